"""policy_loss with every surrogate: numbers worked by hand, what is never read, invariances, and the edge cases."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from algorithm_cases import Batch, backward, corrected, counts, packed, random_batch
from torch import Tensor

from algorithms.config import (
    Aggregation,
    CISPOConfig,
    DPPOKLConfig,
    DPPOTVConfig,
    GSPOConfig,
    LossConfig,
    PPOClipConfig,
    RecomputeConfig,
    ReinforceConfig,
    SAPOConfig,
    TISConfig,
)
from algorithms.correction import Correction
from algorithms.loss import SURROGATES, LossOutput, policy_loss

LOG2 = math.log(2)
SURROGATE_CONFIGS: list[LossConfig] = [
    PPOClipConfig(dual_clip=3.0),
    GSPOConfig(),
    CISPOConfig(low=0.5, high=2.0),
    ReinforceConfig(),
    DPPOTVConfig(threshold=0.1),
    DPPOKLConfig(),
    SAPOConfig(),
]
each_surrogate = pytest.mark.parametrize("loss_config", SURROGATE_CONFIGS, ids=lambda config: config.surrogate)


def test_no_surrogate_is_left_out() -> None:
    assert {config.surrogate for config in SURROGATE_CONFIGS} == set(SURROGATES)


def hand_batch() -> Batch:
    """Two responses of two tokens, mu = 1/8, A = 1 | -2: pi_old / mu = 4, 1 | 1, 1/4; pi_theta / pi_old = 1, 1.1 |
    1.5, 1."""
    rollout = torch.full((4,), -3 * LOG2)
    old = rollout + torch.tensor([2 * LOG2, 0.0, 0.0, -2 * LOG2])
    return Batch(
        logprobs=old + torch.tensor([1.0, 1.1, 1.5, 1.0]).log(),
        old_logprobs=old,
        rollout_logprobs=rollout,
        advantages=torch.tensor([1.0, 1.0, -2.0, -2.0]),
        entropy=torch.tensor([1.0, 2.0, 3.0, 4.0]),
        response_mask=torch.ones(4, dtype=torch.bool),
        cu_seqlens=packed(2, 2),
    )


def loss_of(
    batch: Batch,
    loss_config: LossConfig,
    *,
    logprobs: Tensor | None = None,
    correction: Correction | None = None,
    coefficients: Tensor | None = None,
) -> LossOutput:
    """The loss of a batch, anchored on pi_old with weight 1, as a plain sum unless told otherwise."""
    return policy_loss(
        batch.logprobs if logprobs is None else logprobs,
        entropy=batch.entropy,
        advantages=batch.advantages,
        response_mask=batch.response_mask,
        cu_seqlens=batch.cu_seqlens,
        correction=corrected(batch, RecomputeConfig()) if correction is None else correction,
        coefficients=torch.ones_like(batch.logprobs) if coefficients is None else coefficients,
        loss_config=loss_config,
    )


ROOT = math.sqrt(1.5)


def sapo_slope(ratio: float, temperature: float) -> float:
    gate = 1 / (1 + math.exp(-temperature * (ratio - 1)))
    return 4 * gate * (1 - gate) * ratio


@pytest.mark.parametrize(
    ("loss_config", "gradient"),
    [
        (PPOClipConfig(), [-1, -1.1, 3, 2]),
        (PPOClipConfig(dual_clip=1.2), [-1, -1.1, 0, 2]),
        # The first response has ratio sqrt(1.1), above the clip; the second has A < 0 and is not clipped from above.
        (GSPOConfig(), [0, 0, 2 * ROOT, 2 * ROOT]),
        (CISPOConfig(high=1.2), [-1, -1.1, 2.4, 2]),
        (ReinforceConfig(), [-1, -1, 2, 2]),
        # Probabilities move 1/2 -> 1/2, 1/8 -> 0.1375, 1/8 -> 0.1875, 1/32 -> 1/32.
        (DPPOTVConfig(threshold=0.02), [-1, -1.1, 3, 2]),
        (DPPOTVConfig(threshold=0.01), [-1, 0, 3, 2]),
        # KL of the second move: log(1 / 1.1) / 8 + 7/8 log(0.875 / 0.8625) = 6.8e-4.
        (DPPOKLConfig(threshold=7e-4), [-1, -1.1, 3, 2]),
        (DPPOKLConfig(threshold=6.5e-4), [-1, 0, 3, 2]),
        (SAPOConfig(), [-1, -sapo_slope(1.1, 1.0), 2 * sapo_slope(1.5, 1.05), 2]),
    ],
)
def test_every_surrogate_under_tis_by_hand(loss_config: LossConfig, gradient: list[float]) -> None:
    batch = hand_batch()
    loss_config = replace(loss_config, aggregation=Aggregation.token_mean)
    _, grad = backward(batch, TISConfig(), loss_config, totals=(4, 2))
    # Weights 2 (cut from 4), 1, 1, 1/4.
    torch.testing.assert_close(grad, torch.tensor(gradient) * torch.tensor([2, 1, 1, 0.25]) / 4, atol=1e-5, rtol=1e-5)


def test_gspo_has_the_gradient_of_the_sequence_ratio() -> None:
    # -(1/N) sum of min(s A, clip(s) A), written with s itself instead of its token form.
    batch = random_batch(7, [5, 9, 3], noise=0.0)
    batch.advantages = torch.tensor([1.5] * 5 + [-0.5] * 9 + [2.0] * 3)
    batch.logprobs = batch.old_logprobs + 0.02 * (batch.logprobs - batch.old_logprobs)
    config = GSPOConfig(clip_low=0.04, clip_high=0.04)
    output, grad = backward(batch, RecomputeConfig(), config, totals=counts(batch, RecomputeConfig()))
    logprobs = batch.logprobs.clone().requires_grad_()
    objective = torch.zeros(())
    starts = batch.cu_seqlens.tolist()
    for start, end in pairwise(starts):
        mask = batch.response_mask[start:end]
        ratio = (logprobs - batch.old_logprobs)[start:end][mask].mean().exp()
        objective = objective + ratio * batch.advantages[start] / 3
    (-objective).backward()
    assert output.stats.metrics()["loss/clip_frac_high"] == 0
    assert output.loss.item() == pytest.approx(-objective.item(), rel=1e-6)
    assert logprobs.grad is not None
    torch.testing.assert_close(grad, logprobs.grad, rtol=1e-5, atol=1e-8)


def test_gspo_leaves_rejected_tokens_out_of_its_mean() -> None:
    batch = hand_batch()
    keep = torch.tensor([True, True, False, True])
    correction = Correction(anchor=batch.old_logprobs, weight=torch.ones(4), keep=keep)
    output = loss_of(batch, GSPOConfig(), correction=correction)
    # Without the token of ratio 1.5, the second response has ratio 1 and not sqrt(1.5).
    assert output.stats.metrics()["loss/ratio_mean"] == pytest.approx((2 * math.sqrt(1.1) + 1) / 3, rel=1e-6)


def test_a_config_without_a_surrogate_is_refused() -> None:
    batch = hand_batch()
    with pytest.raises(TypeError, match="loss must be the config of a surrogate, got LossConfig"):
        loss_of(batch, LossConfig())


@each_surrogate
def test_what_a_rejected_token_carries_is_never_read(loss_config: LossConfig) -> None:
    batch = hand_batch()
    keep = torch.tensor([True, True, False, True])
    clean = Correction(anchor=batch.old_logprobs, weight=torch.ones(4), keep=keep)
    expected = batch.logprobs.clone().requires_grad_()
    loss_of(batch, loss_config, logprobs=expected, correction=clean).loss.backward()
    poison = torch.where(keep, 1.0, math.inf)
    poisoned = replace(batch, advantages=batch.advantages * poison)
    correction = clean._replace(anchor=batch.old_logprobs * poison, weight=poison)
    for value in (batch.logprobs[2].item(), math.nan, math.inf, -math.inf):
        logprobs = torch.where(keep, batch.logprobs, value).requires_grad_()
        output = loss_of(poisoned, loss_config, logprobs=logprobs, correction=correction, coefficients=poison)
        output.loss.backward()
        assert math.isfinite(output.loss.item())
        assert logprobs.grad is not None and expected.grad is not None
        assert torch.equal(logprobs.grad, expected.grad) and logprobs.grad[2] == 0
        assert output.stats.metrics()["loss/invalid_tokens"] == 0


@each_surrogate
def test_a_kept_token_with_a_broken_log_prob_is_left_out_and_counted(loss_config: LossConfig) -> None:
    batch = hand_batch()
    keep = torch.tensor([True, True, False, True])
    correction = corrected(batch, RecomputeConfig())
    without = batch.logprobs.clone().requires_grad_()
    loss_of(batch, loss_config, logprobs=without, correction=correction._replace(keep=keep)).loss.backward()
    for value in (math.nan, math.inf, -math.inf):
        logprobs = torch.where(keep, batch.logprobs, value).requires_grad_()
        output = loss_of(batch, loss_config, logprobs=logprobs, correction=correction)
        output.loss.backward()
        assert logprobs.grad is not None and without.grad is not None
        assert torch.equal(logprobs.grad, without.grad)
        assert output.stats.metrics()["loss/invalid_tokens"] == 1


@each_surrogate
def test_only_the_log_probs_of_pi_theta_get_a_gradient(loss_config: LossConfig) -> None:
    batch = hand_batch()
    inputs = {
        "logprobs": batch.logprobs.clone().requires_grad_(),
        "anchor": batch.old_logprobs.clone().requires_grad_(),
        "weight": torch.ones(4, requires_grad=True),
        "advantages": batch.advantages.clone().requires_grad_(),
        "coefficients": torch.ones(4, requires_grad=True),
    }
    correction = Correction(anchor=inputs["anchor"], weight=inputs["weight"], keep=batch.response_mask)
    loss_of(
        replace(batch, advantages=inputs["advantages"]),
        loss_config,
        logprobs=inputs["logprobs"],
        correction=correction,
        coefficients=inputs["coefficients"],
    ).loss.backward()
    assert [name for name, tensor in inputs.items() if tensor.grad is not None] == ["logprobs"]


@each_surrogate
def test_at_ratio_one_the_gradient_is_coefficient_times_weight_times_a(loss_config: LossConfig) -> None:
    batch = hand_batch()
    logprobs = batch.logprobs.clone().requires_grad_()
    weight, coefficients = torch.tensor([2.0, 1.0, 0.5, 1.0]), torch.tensor([0.25, 0.25, 0.5, 0.5])
    correction = Correction(anchor=batch.logprobs, weight=weight, keep=batch.response_mask)
    batch = replace(batch, advantages=torch.tensor([1.0, 1.0, -3.0, -3.0]))
    output = loss_of(batch, loss_config, logprobs=logprobs, correction=correction, coefficients=coefficients)
    output.loss.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([-0.5, -0.25, 0.75, 1.5]))
    metrics = output.stats.metrics()
    assert metrics["loss/ratio_mean"] == 1 and metrics["loss/approx_kl"] == 0
    assert metrics["loss/clip_frac_low"] == metrics["loss/clip_frac_high"] == 0


@each_surrogate
@pytest.mark.parametrize("aggregation", Aggregation)
def test_micro_batches_their_order_and_padding_do_not_matter(loss_config: LossConfig, aggregation: Aggregation) -> None:
    # Drift large enough that bounds bind, and an empty response between the others.
    batch = random_batch(11, [6, 0, 9, 4, 7], noise=0.3)
    loss_config = replace(
        loss_config,
        aggregation=aggregation,
        fixed_length_tokens=16 if aggregation is Aggregation.fixed_length else None,
        entropy_coef=0.01,
    )
    totals = counts(batch, TISConfig())
    whole, gradient = backward(batch, TISConfig(), loss_config, totals=totals)
    assert gradient.abs().sum() > 0
    # The second micro-batch comes first, and behind it lies padding.
    pieces = gradient.split(batch.lengths)
    size = 0.0
    for split in ([[3, 4], [0, 1, 2]], [[4], [2], [1], [3], [0]]):
        parts = [backward(padded(batch.select(part)), TISConfig(), loss_config, totals=totals) for part in split]
        size = max(size, sum(abs(part.loss.item()) for part, _ in parts))
        assert sum(part.loss.item() for part, _ in parts) == pytest.approx(whole.loss.item(), abs=1e-6 * size)
        for part, (_, grad) in zip(split, parts, strict=True):
            expected = torch.cat([*[pieces[n] for n in part], torch.zeros(3)])
            torch.testing.assert_close(grad, expected, rtol=1e-6, atol=0)


def padded(batch: Batch) -> Batch:
    """Three tokens of garbage behind the last sequence."""

    def longer(values: Tensor) -> Tensor:
        return torch.cat([values, values.new_full((3,), math.nan)])

    return Batch(
        logprobs=longer(batch.logprobs),
        old_logprobs=longer(batch.old_logprobs),
        rollout_logprobs=longer(batch.rollout_logprobs),
        advantages=longer(batch.advantages),
        entropy=longer(batch.entropy),
        response_mask=torch.cat([batch.response_mask, torch.zeros(3, dtype=torch.bool)]),
        cu_seqlens=batch.cu_seqlens,
    )


@each_surrogate
@pytest.mark.parametrize("lengths", [[4, 0, 2], [1], [0], []])
def test_every_surrogate_runs_backward_without_a_kept_token(loss_config: LossConfig, lengths: list[int]) -> None:
    batch = random_batch(1, lengths, noise=0.1)
    batch.rollout_logprobs = torch.full_like(batch.rollout_logprobs, math.nan)
    output, grad = backward(batch, TISConfig(), loss_config, totals=(0, 0))
    assert output.loss.item() == 0 and grad.shape == batch.logprobs.shape and (grad == 0).all()
    assert output.stats.metrics()["loss/approx_kl"] is None


@each_surrogate
def test_no_surrogate_reads_a_value_on_the_host(loss_config: LossConfig) -> None:
    with torch.device("meta"):
        logprobs = torch.empty(9, requires_grad=True)
        anchor, weight, advantages, coefficients, entropy = (torch.empty(9) for _ in range(5))
        mask, keep = torch.empty(9, dtype=torch.bool), torch.empty(9, dtype=torch.bool)
        cu_seqlens, factor = torch.empty(4, dtype=torch.int32), torch.empty(())
    output = policy_loss(
        logprobs,
        entropy=entropy,
        advantages=advantages,
        response_mask=mask,
        cu_seqlens=cu_seqlens,
        correction=Correction(anchor=anchor, weight=weight, keep=keep),
        coefficients=coefficients,
        loss_config=replace(loss_config, entropy_coef=0.1),
    )
    output.loss.backward()
    assert output.stats.scaled(policy=factor).sums.is_meta


def test_statistics_of_the_ratio_and_of_the_drift_by_hand() -> None:
    batch = hand_batch()
    drift = (0 + (0.1 - math.log(1.1)) + (0.5 - math.log(1.5)) + 0) / 4
    token = loss_of(batch, PPOClipConfig()).stats.metrics()
    assert token["loss/ratio_mean"] == pytest.approx(4.6 / 4, rel=1e-6)
    assert token["loss/ratio_max"] == pytest.approx(1.5, rel=1e-6)
    assert token["loss/approx_kl"] == pytest.approx(drift, rel=1e-5)
    # GSPO: the ratio of the response, the drift still of the token.
    sequence = loss_of(batch, GSPOConfig()).stats.metrics()
    assert sequence["loss/ratio_mean"] == pytest.approx((math.sqrt(1.1) + ROOT) / 2, rel=1e-6)
    assert sequence["loss/ratio_max"] == pytest.approx(ROOT, rel=1e-6)
    assert sequence["loss/approx_kl"] == token["loss/approx_kl"]


def test_the_policy_loss_of_the_statistics_can_be_scaled_afterwards() -> None:
    batch = hand_batch()
    stats = loss_of(batch, PPOClipConfig()).stats
    metrics, scaled = stats.metrics(), stats.scaled(policy=torch.tensor(0.25, dtype=torch.float64)).metrics()
    assert metrics["loss/policy"] == pytest.approx(2.9, rel=1e-6)
    assert scaled == {**metrics, "loss/policy": pytest.approx(2.9 / 4, rel=1e-6)}
    # Nothing was changed in place.
    assert stats.metrics() == metrics
