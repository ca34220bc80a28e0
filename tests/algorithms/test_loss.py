"""policy_loss: numbers worked by hand, the zero gradient of rejected tokens, and the edge cases."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from algorithm_cases import MODES, Batch, backward, corrected, counts, packed, random_batch

from algorithms.config import (
    Aggregation,
    Anchor,
    BypassConfig,
    BypassLoss,
    CorrectionConfig,
    MISConfig,
    PPOClipConfig,
    PPOISConfig,
    RecomputeConfig,
    ReinforceConfig,
    RejectedDenominator,
    TISConfig,
)
from algorithms.correction import correct
from algorithms.loss import policy_loss
from algorithms.tokens import Tokens

LOG2 = math.log(2)


def hand_batch() -> Batch:
    """Two responses of two tokens, mu = 1/8: pi_old / mu = 4, 1 | 1, 1/4; pi_theta / pi_old = 1, 1.1 | 1.5, 1."""
    rollout = torch.full((4,), -3 * LOG2)
    old = rollout + torch.tensor([2 * LOG2, 0.0, 0.0, -2 * LOG2])
    return Batch(
        logprobs=old + torch.tensor([1.0, 1.1, 1.5, 1.0]).log(),
        old_logprobs=old,
        rollout_logprobs=rollout,
        advantages=torch.tensor([1.0, 1.0, 2.0, 2.0]),
        entropy=torch.tensor([1.0, 2.0, 3.0, 4.0]),
        response_mask=torch.ones(4, dtype=torch.bool),
        cu_seqlens=packed(2, 2),
    )


@pytest.mark.parametrize(
    ("config", "expected", "gradient"),
    [
        # -(1 + 1.1 + 2 x 1.2 + 2) / 4: the third ratio is clipped at 1.2.
        (RecomputeConfig(), -6.5 / 4, [-1, -1.1, 0, -2]),
        # Weights 2 (cut from 4), 1, 1, 1/4.
        (TISConfig(), -(2 + 1.1 + 2.4 + 0.5) / 4, [-2, -1.1, 0, -0.5]),
        # 4 and 1/4 lie outside [0.5, 2]; the denominator keeps them, or drops them.
        (MISConfig(), -(1.1 + 2.4) / 4, [0, -1.1, 0, 0]),
        (MISConfig(rejected_denominator=RejectedDenominator.drop), -(1.1 + 2.4) / 2, [0, -2.2, 0, 0]),
        # pi_theta / mu = 4, 1.1, 1.5, 1/4, clipped at 1.2 from above.
        (PPOISConfig(), -(1.2 + 1.1 + 2.4 + 0.5) / 4, [0, -1.1, 0, -0.5]),
        (BypassConfig(), -(1.2 + 1.1 + 2.4 + 0.5) / 4, [0, -1.1, 0, -0.5]),
    ],
)
def test_closed_form(config: CorrectionConfig, expected: float, gradient: list[float]) -> None:
    batch = hand_batch()
    output, grad = backward(batch, config, PPOClipConfig(), totals=counts(batch, config))
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(grad, torch.tensor(gradient) / 4, atol=1e-5, rtol=1e-5)
    assert output.stats.metrics()["loss/policy"] == pytest.approx(expected, abs=1e-5)


def test_bypass_with_reinforce_weighs_with_the_current_policy() -> None:
    batch = hand_batch()
    logprobs = batch.logprobs.clone().requires_grad_()
    output = policy_loss(
        logprobs,
        entropy=None,
        advantages=batch.advantages,
        response_mask=batch.response_mask,
        cu_seqlens=batch.cu_seqlens,
        correction=correct(
            BypassConfig(loss=BypassLoss.reinforce).spec(),
            Tokens(
                trainer_logprobs=logprobs.detach(),
                rollout_logprobs=batch.rollout_logprobs,
                response_mask=batch.response_mask,
                cu_seqlens=batch.cu_seqlens,
            ),
        ),
        coefficients=torch.full((4,), 0.25),
        loss_config=ReinforceConfig(),
    )
    output.loss.backward()
    # Weights min(pi_theta / mu, 2) = 2, 1.1, 1.5, 1/4 on -A log pi_theta.
    log_pi = [-LOG2, math.log(1.1) - 3 * LOG2, math.log(1.5) - 3 * LOG2, -5 * LOG2]
    expected = -(2 * log_pi[0] + 1.1 * log_pi[1] + 3 * log_pi[2] + 0.5 * log_pi[3]) / 4
    assert output.loss.item() == pytest.approx(expected, abs=1e-5)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([-2, -1.1, -3, -0.5]) / 4, atol=1e-5, rtol=1e-5)


def test_entropy_bonus_covers_all_response_tokens() -> None:
    batch = hand_batch()
    config = MISConfig()
    plain, _ = backward(batch, config, PPOClipConfig(), totals=counts(batch, config))
    bonus, _ = backward(batch, config, PPOClipConfig(entropy_coef=0.1), totals=counts(batch, config))
    assert (bonus.loss - plain.loss).item() == pytest.approx(-0.1 * 10 / 4, abs=1e-6)
    assert bonus.stats.metrics() == plain.stats.metrics()
    assert plain.stats.metrics()["policy/entropy"] == 2.5


def test_entropy_bonus_needs_the_entropy() -> None:
    batch = hand_batch()
    arguments = {
        "advantages": batch.advantages,
        "response_mask": batch.response_mask,
        "cu_seqlens": batch.cu_seqlens,
        "correction": corrected(batch, RecomputeConfig()),
        "coefficients": torch.ones(4),
    }
    with pytest.raises(ValueError, match="entropy_coef"):
        policy_loss(batch.logprobs, entropy=None, loss_config=PPOClipConfig(entropy_coef=0.1), **arguments)
    output = policy_loss(batch.logprobs, entropy=None, loss_config=PPOClipConfig(), **arguments)
    assert output.stats.metrics()["policy/entropy"] is None


def test_first_update_on_policy_has_ratio_one() -> None:
    batch = random_batch(5, [6, 6], noise=0.3)
    batch.logprobs = batch.old_logprobs
    config = TISConfig()
    output, _ = backward(batch, config, PPOClipConfig(), totals=counts(batch, config))
    metrics = output.stats.metrics()
    assert metrics["loss/ratio_mean"] == 1.0
    assert metrics["loss/clip_frac_low"] == metrics["loss/clip_frac_high"] == 0.0


@pytest.mark.parametrize("name", MODES)
def test_a_rejected_token_has_exactly_zero_gradient(name: str) -> None:
    config = MODES[name]
    batch = random_batch(2, [12, 5, 9], noise=1.5)
    # The last response has rho = 1, so that something is kept at every level.
    batch.old_logprobs[17:] = batch.rollout_logprobs[17:]
    victims = batch.response_mask.nonzero().flatten()[[0, 7]]
    batch.rollout_logprobs[victims] = torch.tensor([-math.inf, math.nan])
    batch.logprobs[victims] = torch.tensor([math.inf, 3.0])
    batch.advantages[victims] = torch.tensor([math.nan, 1e30])
    keep = corrected(batch, config).keep
    assert not keep[victims].any() and keep.any()
    output, grad = backward(batch, config, PPOClipConfig(), totals=counts(batch, config))
    assert math.isfinite(output.loss.item())
    assert (grad[~keep] == 0).all()
    assert (grad[keep] != 0).any()
    # Every kept token whose clip does not bind does get a gradient.
    if name.startswith(("tis", "vanilla", "bypass-reinforce")):
        assert (grad[keep] != 0).float().mean() > 0.5


VALUES = (-1.0, 0.0, -60.0, -math.inf, math.inf, math.nan, 0.5)


@pytest.mark.parametrize("name", MODES)
def test_extreme_logprobs_give_a_finite_loss_and_gradient(name: str) -> None:
    config = MODES[name]
    cases = list(product(VALUES, VALUES, VALUES, (1.0, -1.0)))
    old, rollout, theta, advantages = (torch.tensor(column) for column in zip(*cases, strict=True))
    batch = Batch(
        logprobs=theta,
        old_logprobs=old,
        rollout_logprobs=rollout,
        advantages=advantages,
        entropy=torch.ones_like(old),
        response_mask=torch.ones_like(old, dtype=torch.bool),
        cu_seqlens=packed(0, *[2] * (len(cases) // 2)),
    )
    loss_config = PPOClipConfig(aggregation=Aggregation.seq_mean_token_mean, entropy_coef=0.01)
    output, grad = backward(batch, config, loss_config, totals=counts(batch, config))
    assert torch.isfinite(output.loss)
    assert torch.isfinite(grad).all()
    valid = torch.isfinite(old) & torch.isfinite(rollout) & (rollout < 1e-4) & torch.isfinite(theta)
    assert (grad[~valid] == 0).all() and (grad[valid] != 0).any()
    kept_but_broken = corrected(batch, config).keep & ~torch.isfinite(theta)
    assert output.stats.metrics()["loss/invalid_tokens"] == kept_but_broken.sum().item()


@pytest.mark.parametrize("name", ["ppo_is", "bypass"])
def test_without_pi_old_a_broken_pi_theta_is_left_out(name: str) -> None:
    rollout = torch.tensor([-1.0, -1.0, math.nan, -1.0])
    logprobs = torch.tensor([-1.0, math.nan, -1.0, -math.inf], requires_grad=True)
    mask = torch.ones(4, dtype=torch.bool)
    output = policy_loss(
        logprobs,
        entropy=None,
        advantages=torch.ones(4),
        response_mask=mask,
        cu_seqlens=packed(4),
        correction=correct(
            MODES[name].spec(),
            Tokens(trainer_logprobs=None, rollout_logprobs=rollout, response_mask=mask, cu_seqlens=packed(4)),
        ),
        coefficients=torch.ones(4),
        loss_config=PPOClipConfig(),
    )
    output.loss.backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-1, 0, 0, 0]
    assert output.stats.metrics()["loss/invalid_tokens"] == 2


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("lengths", [[4, 0, 2], [1], [0], []])
def test_all_rejected_and_empty_batches_still_run_backward(name: str, lengths: list[int]) -> None:
    batch = random_batch(1, lengths, noise=0.1)
    batch.rollout_logprobs = torch.full_like(batch.rollout_logprobs, math.nan)
    for aggregation in (Aggregation.token_mean, Aggregation.seq_mean_token_mean):
        output, grad = backward(batch, MODES[name], PPOClipConfig(aggregation=aggregation), totals=(0, 0))
        assert output.loss.item() == 0
        assert (grad == 0).all()
        metrics = output.stats.metrics()
        assert metrics["loss/ratio_mean"] is None and metrics["loss/ratio_max"] is None


@pytest.mark.parametrize("name", MODES)
def test_a_single_token(name: str) -> None:
    batch = replace(hand_batch().select([0]), cu_seqlens=packed(1))
    one = Batch(
        logprobs=batch.logprobs[1:],
        old_logprobs=batch.old_logprobs[1:],
        rollout_logprobs=batch.rollout_logprobs[1:],
        advantages=batch.advantages[1:],
        entropy=batch.entropy[1:],
        response_mask=batch.response_mask[1:],
        cu_seqlens=packed(1),
    )
    _, grad = backward(one, MODES[name], PPOClipConfig(), totals=(1, 1))
    # rho = 1 and A = 1: every mode is plain PPO with ratio 1.1, or REINFORCE with weight 1.
    expected = -1.0 if MODES[name].spec().anchor is Anchor.none else -1.1
    assert grad.item() == pytest.approx(expected, abs=1e-5)


def test_weights_carry_no_gradient() -> None:
    batch = hand_batch()
    for config in (TISConfig(), BypassConfig(loss=BypassLoss.reinforce)):
        old = batch.old_logprobs.clone().requires_grad_()
        output, _ = backward(replace(batch, old_logprobs=old), config, PPOClipConfig(), totals=(4, 2))
        assert output.loss.requires_grad and old.grad is None
