"""Surrogates and their gradients against numbers worked by hand."""

import math

import pytest
import torch
from algorithm_cases import packed

import algorithms.loss as loss_module
from algorithms.config import ConfigError
from algorithms.config.loss import (
    CISPOConfig,
    DPPOKLConfig,
    DPPOTVConfig,
    GSPOConfig,
    LossConfig,
    PPOClipConfig,
    ReinforceConfig,
    SAPOConfig,
)
from algorithms.loss import SURROGATES, Surrogate, SurrogateTokens

CONFIGS: dict[str, LossConfig] = {
    config.surrogate: config
    for config in (
        PPOClipConfig(),
        GSPOConfig(),
        CISPOConfig(),
        ReinforceConfig(),
        DPPOTVConfig(),
        DPPOKLConfig(),
        SAPOConfig(),
    )
}


def surrogate_of(
    config: LossConfig,
    logprobs: torch.Tensor,
    anchor: torch.Tensor,
    advantages: list[float],
    *,
    mask: list[bool] | None = None,
    lengths: list[int] | None = None,
) -> tuple[Surrogate, list[float]]:
    """The surrogate of tokens that are all active in one sequence, and its gradient with respect to log pi_theta."""
    logprobs = logprobs.clone().requires_grad_()
    num_tokens = len(advantages)
    surrogate = SURROGATES[config.surrogate](
        SurrogateTokens(
            logprobs=logprobs,
            anchor_logprobs=anchor,
            advantages=torch.tensor(advantages),
            response_mask=torch.tensor(mask or [True] * num_tokens, dtype=torch.bool),
            cu_seqlens=packed(*(lengths or [num_tokens])),
        ),
        config,
    )
    surrogate.loss.sum().backward()
    assert logprobs.grad is not None
    return surrogate, logprobs.grad.tolist()


def surrogate_at(config: LossConfig, ratios: list[float], advantages: list[float]) -> tuple[Surrogate, list[float]]:
    """The surrogate of tokens with these ratios to an anchor of log-prob -1."""
    anchor = torch.full((len(ratios),), -1.0)
    return surrogate_of(config, anchor + torch.tensor(ratios).log(), anchor, advantages)


def surrogate_between(
    config: LossConfig, anchor: list[float], theta: list[float], advantages: list[float]
) -> tuple[Surrogate, list[float]]:
    """The surrogate of tokens with these probabilities under the anchor and under pi_theta."""
    return surrogate_of(config, torch.tensor(theta).log(), torch.tensor(anchor).log(), advantages)


def assert_close(actual: torch.Tensor | list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.as_tensor(actual).detach(), torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_every_config_has_a_surrogate() -> None:
    assert set(CONFIGS) == set(SURROGATES)


@pytest.mark.parametrize("name", SURROGATES)
def test_at_ratio_one_every_gradient_is_that_of_the_plain_policy_gradient(name: str) -> None:
    # Also where tokens of one response have advantages of both signs, and probabilities from 1e-9 to 1.
    logprobs = torch.tensor([-1.0, -20.0, 0.0, -1e-7, -0.5])
    advantages = [2.0, -3.0, 1.0, -1.0, 0.0]
    surrogate, gradient = surrogate_of(CONFIGS[name], logprobs, logprobs, advantages, lengths=[3, 2])
    assert_close(gradient, [-2.0, 3.0, -1.0, 1.0, 0.0])
    assert surrogate.ratio.tolist() == [1.0] * 5
    assert not surrogate.clipped_low.any() and not surrogate.clipped_high.any()


@pytest.mark.parametrize("name", SURROGATES)
def test_only_the_loss_carries_a_gradient(name: str) -> None:
    anchor = torch.full((4,), -1.0)
    logprobs = torch.tensor([-3.0, -1.0, -0.9, 0.0], requires_grad=True)
    surrogate = SURROGATES[name](
        SurrogateTokens(
            logprobs=logprobs,
            anchor_logprobs=anchor,
            advantages=torch.tensor([1.0, -1.0, 1.0, -1.0]),
            response_mask=torch.ones(4, dtype=torch.bool),
            cu_seqlens=packed(4),
        ),
        CONFIGS[name],
    )
    assert surrogate.loss.requires_grad
    assert not surrogate.ratio.requires_grad
    assert surrogate.clipped_low.dtype == surrogate.clipped_high.dtype == torch.bool


@pytest.mark.parametrize("name", SURROGATES)
def test_without_tokens_there_is_an_empty_surrogate_with_a_graph(name: str) -> None:
    for lengths in ([], [0], [0, 0]):
        logprobs = torch.zeros(0, requires_grad=True)
        surrogate = SURROGATES[name](
            SurrogateTokens(
                logprobs=logprobs,
                anchor_logprobs=torch.zeros(0),
                advantages=torch.zeros(0),
                response_mask=torch.zeros(0, dtype=torch.bool),
                cu_seqlens=packed(*lengths),
            ),
            CONFIGS[name],
        )
        surrogate.loss.sum().backward()
        assert logprobs.grad is not None and surrogate.ratio.shape == (0,)


@pytest.mark.parametrize("name", SURROGATES)
def test_extreme_ratios_stay_finite(name: str) -> None:
    logprobs = torch.tensor([0.0, -1e4, 0.0, -1e4, -60.0, 0.0])
    anchor = torch.tensor([-1e4, 0.0, -1e4, 0.0, -60.0, 0.0])
    for lengths in ([6], [1, 1, 1, 1, 1, 1]):
        advantages = [1.0, 1.0, -1.0, -1.0, 1.0, -1.0]
        surrogate, gradient = surrogate_of(CONFIGS[name], logprobs, anchor, advantages, lengths=lengths)
        assert torch.isfinite(surrogate.loss).all() and torch.isfinite(surrogate.ratio).all()
        assert all(math.isfinite(value) for value in gradient)


def test_ppo_clip_with_separate_bounds() -> None:
    config = PPOClipConfig(clip_low=0.2, clip_high=0.28)
    ratios = [0.7, 1.1, 1.25, 1.5, 0.7, 1.1, 1.5, 5.0]
    advantages = [1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0]
    surrogate, gradient = surrogate_at(config, ratios, advantages)
    assert_close(surrogate.loss, [-0.7, -1.1, -1.25, -1.28, 0.8, 1.1, 1.5, 5.0])
    # d(-r A)/d log pi = -r A where the clip does not bind, 0 where it does.
    assert_close(gradient, [-0.7, -1.1, -1.25, 0.0, 0.0, 1.1, 1.5, 5.0])
    assert_close(surrogate.ratio, ratios)
    assert surrogate.clipped_high.tolist() == [False, False, False, True, False, False, False, False]
    assert surrogate.clipped_low.tolist() == [False, False, False, False, True, False, False, False]


def test_dual_clip_bounds_the_loss_of_negative_advantages_only() -> None:
    config = PPOClipConfig(dual_clip=3.0)
    surrogate, gradient = surrogate_at(config, [5.0, 2.9, 5.0, 0.1, 0.5], [-2.0, -2.0, 2.0, 2.0, -2.0])
    assert_close(surrogate.loss, [6.0, 5.8, -2.4, -0.2, 1.6])
    assert_close(gradient, [0.0, 5.8, 0.0, -0.2, 0.0])
    assert surrogate.clipped_high.tolist() == [True, False, True, False, False]
    assert surrogate.clipped_low.tolist() == [False, False, False, False, True]


def test_the_log_ratio_is_clamped_at_20() -> None:
    logprobs, anchor = torch.tensor([0.0, -100.0]), torch.tensor([-100.0, 0.0])
    surrogate, gradient = surrogate_of(PPOClipConfig(), logprobs, anchor, [-1.0, -1.0])
    torch.testing.assert_close(surrogate.ratio, torch.tensor([math.exp(20), math.exp(-20)]))
    assert gradient == [0.0, 0.0]
    # Just inside the bound there is a gradient.
    _, gradient = surrogate_of(PPOClipConfig(), torch.tensor([0.0]), torch.tensor([-19.5]), [-1.0])
    assert gradient[0] == pytest.approx(math.exp(19.5), rel=1e-6)


def test_gspo_has_one_ratio_per_response() -> None:
    # Two responses, geometric means of 1.1 x 0.9 x 1.0 and of 1.2 x 1.2.
    ratios = torch.tensor([1.1, 0.9, 1.0, 1.2, 1.2])
    anchor = torch.tensor([-1.0, -2.0, -3.0, -1.0, -2.0])
    config = GSPOConfig(clip_low=0.04, clip_high=0.04)
    surrogate, gradient = surrogate_of(
        config, anchor + ratios.log(), anchor, [2.0, 2.0, 2.0, -1.0, -1.0], lengths=[3, 2]
    )
    s = 0.99 ** (1 / 3)
    assert_close(surrogate.ratio, [s, s, s, 1.2, 1.2])
    assert_close(surrogate.loss, [-2 * s, -2 * s, -2 * s, 1.2, 1.2])
    # Every token has the gradient of its response's ratio, not of its own.
    assert_close(gradient, [-2 * s, -2 * s, -2 * s, 1.2, 1.2])


def test_gspo_averages_over_active_tokens_only() -> None:
    # The middle token of three, and padding behind the response, are not active: the loss gives them zeros.
    anchor = torch.tensor([-1.0, 0.0, -1.0, 0.0])
    log_ratio = torch.tensor([math.log(1.02), 0.0, math.log(1.02), 0.0])
    config = GSPOConfig(clip_low=0.04, clip_high=0.04)
    surrogate, gradient = surrogate_of(
        config, anchor + log_ratio, anchor, [1.0, 0.0, 1.0, 0.0], mask=[True, False, True, False], lengths=[3]
    )
    assert_close(surrogate.ratio[[0, 2]], [1.02, 1.02])
    assert_close(gradient, [-1.02, 0.0, -1.02, 0.0])


def test_gspo_clips_whole_responses_on_the_side_of_the_advantage() -> None:
    # Responses of one token; bounds 0.9997 and 1.0004.
    ratios = [1.0005, 1.0003, 1.0005, 0.9996, 0.9998, 0.9996]
    advantages = [1.0, 1.0, -1.0, -1.0, -1.0, 1.0]
    anchor = torch.full((6,), -0.5)
    surrogate, gradient = surrogate_of(
        GSPOConfig(), anchor + torch.tensor(ratios).log(), anchor, advantages, lengths=[1] * 6
    )
    assert surrogate.clipped_high.tolist() == [True, False, False, False, False, False]
    assert surrogate.clipped_low.tolist() == [False, False, False, True, False, False]
    assert [value == 0 for value in gradient] == [True, False, False, True, False, False]
    torch.testing.assert_close(
        surrogate.loss.detach(),
        torch.tensor([-1.0004, -1.0003, 1.0005, 0.9997, 0.9998, -0.9996]),
        rtol=0,
        atol=2e-7,
    )


def test_gspo_with_responses_of_one_token_is_ppo_clip() -> None:
    ratios, advantages = torch.tensor([1.03, 1.05, 0.97, 0.95, 1.05, 0.95]), [1.0, 1.0, -1.0, -1.0, -2.0, 2.0]
    anchor = torch.full((6,), -0.5)
    logprobs = anchor + ratios.log()
    token, expected = surrogate_of(PPOClipConfig(clip_low=0.04, clip_high=0.04), logprobs, anchor, advantages)
    sequence, gradient = surrogate_of(
        GSPOConfig(clip_low=0.04, clip_high=0.04), logprobs, anchor, advantages, lengths=[1] * 6
    )
    assert gradient == expected and expected.count(0.0) == 2
    assert all(torch.equal(one, other) for one, other in zip(sequence, token, strict=True))


def test_gspo_clamps_the_mean_log_ratio_at_10() -> None:
    logprobs, anchor = torch.tensor([0.0, 0.0, -15.0]), torch.tensor([-11.0, -13.0, 0.0])
    surrogate, gradient = surrogate_of(GSPOConfig(), logprobs, anchor, [-1.0, -1.0, 1.0], lengths=[2, 1])
    torch.testing.assert_close(surrogate.ratio, torch.tensor([10.0, 10.0, -10.0]).exp())
    assert gradient == [0.0, 0.0, 0.0]


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    config = CISPOConfig(low=0.5, high=2.0)
    ratios, advantages = [0.25, 0.8, 3.0, 0.25, 0.8, 3.0], [1.0, 1.0, 1.0, -2.0, -2.0, -2.0]
    surrogate, gradient = surrogate_at(config, ratios, advantages)
    assert_close(gradient, [-0.5, -0.8, -2.0, 1.0, 1.6, 4.0])
    log_pi = [-1 + math.log(ratio) for ratio in ratios]
    assert_close(surrogate.loss, [slope * log_p for slope, log_p in zip(gradient, log_pi, strict=True)])
    assert_close(surrogate.ratio, ratios)
    # On both sides for both signs of A: it says that the weight was bounded, not that the gradient is gone.
    assert surrogate.clipped_low.tolist() == [True, False, False, True, False, False]
    assert surrogate.clipped_high.tolist() == [False, False, True, False, False, True]


def test_cispo_has_no_lower_bound_unless_given() -> None:
    surrogate, gradient = surrogate_at(CISPOConfig(), [1e-6, 4.9, 5.1], [1.0, 1.0, 1.0])
    assert_close(gradient, [-1e-6, -4.9, -5.0])
    assert surrogate.clipped_low.tolist() == [False, False, False]
    assert surrogate.clipped_high.tolist() == [False, False, True]


def test_reinforce_is_unclipped_and_its_ratio_is_only_reported() -> None:
    surrogate, gradient = surrogate_at(ReinforceConfig(), [0.5, 4.0], [2.0, -3.0])
    log_pi = [-1 + math.log(0.5), -1 + math.log(4.0)]
    assert_close(surrogate.loss, [-2 * log_pi[0], 3 * log_pi[1]])
    assert gradient == [-2.0, 3.0]
    assert_close(surrogate.ratio, [0.5, 4.0])
    assert not surrogate.clipped_low.any() and not surrogate.clipped_high.any()


def test_dppo_tv_drops_what_moves_on_away_from_the_anchor() -> None:
    anchor, theta = [0.5, 0.5, 0.5, 0.5, 0.5, 0.5], [0.71, 0.71, 0.69, 0.29, 0.29, 0.31]
    advantages = [2.0, -2.0, 2.0, -2.0, 2.0, -2.0]
    surrogate, gradient = surrogate_between(DPPOTVConfig(), anchor, theta, advantages)
    expected = [0.0, 2.84, -2.76, 0.0, -1.16, 1.24]
    assert_close(surrogate.loss, expected)
    assert_close(gradient, expected)
    assert_close(surrogate.ratio, [1.42, 1.42, 1.38, 0.58, 0.58, 0.62])
    assert surrogate.clipped_high.tolist() == [True, False, False, False, False, False]
    assert surrogate.clipped_low.tolist() == [False, False, False, True, False, False]


def test_dppo_tv_leaves_rare_tokens_free_that_ppo_would_clip() -> None:
    surrogate, gradient = surrogate_between(DPPOTVConfig(), [0.01, 0.9], [0.1, 0.65], [1.0, -1.0])
    assert_close(gradient, [-10.0, 0.0])
    clipped, _ = surrogate_between(PPOClipConfig(clip_low=0.3), [0.01, 0.9], [0.1, 0.65], [1.0, -1.0])
    assert surrogate.clipped_high.tolist() == [False, False] and clipped.clipped_high.tolist() == [True, False]
    assert surrogate.clipped_low.tolist() == [False, True] and clipped.clipped_low.tolist() == [False, False]


@pytest.mark.parametrize("config", [DPPOTVConfig(), DPPOKLConfig(threshold=2.0)])
def test_dppo_caps_the_ratio_and_keeps_its_gradient(config: LossConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "RATIO_CAP", 4.0)
    surrogate, gradient = surrogate_between(config, [0.02, 0.02, 0.02], [0.16, 0.16, 0.06], [1.0, -1.0, 1.0])
    assert_close(surrogate.loss, [-4.0, 4.0, -3.0])
    assert_close(gradient, [-4.0, 4.0, -3.0])
    assert_close(surrogate.ratio, [8.0, 8.0, 3.0])


def test_dppo_kl_compares_bernoulli_laws_from_the_anchor_to_pi_theta() -> None:
    # Divergences 0.0540, 0.0540, 0.0472, 0.0366, 0.0530, 0.0540 against 0.05. The direction decides the fourth and
    # the fifth: the other way round they are 0.0530 and 0.0366.
    anchor, theta = [0.5, 0.5, 0.5, 0.97, 0.9, 0.5], [0.66, 0.66, 0.65, 0.9, 0.97, 0.34]
    advantages = [1.0, -1.0, 1.0, -1.0, 1.0, -1.0]
    surrogate, gradient = surrogate_between(DPPOKLConfig(), anchor, theta, advantages)
    assert surrogate.clipped_high.tolist() == [True, False, False, False, True, False]
    assert surrogate.clipped_low.tolist() == [False, False, False, False, False, True]
    assert_close(gradient, [0.0, 1.32, -1.3, 0.9 / 0.97, 0.0, 0.0])


def bernoulli_kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


@pytest.mark.parametrize("threshold", [0.2, 0.5, 1.0, 3.0, 12.0])
def test_dppo_kl_decides_by_the_exact_divergence(threshold: float) -> None:
    anchor = [0.5, 0.9, 0.1, 0.003, 0.9, 0.999]
    theta = [0.9, 0.2, 0.0001, 1e-30, 1e-20, 1e-6]
    surrogate, _ = surrogate_between(DPPOKLConfig(threshold=threshold), anchor, theta, [1.0] + [-1.0] * 5)
    expected = [bernoulli_kl(p, q) > threshold for p, q in zip(anchor, theta, strict=True)]
    assert (surrogate.clipped_high | surrogate.clipped_low).tolist() == expected


def test_dppo_kl_near_probability_one_is_finite_and_bounded() -> None:
    # 1 - p counts as at least 1e-6: from 0.9 to certainty is 0.1 log(0.1 / 1e-6) - ..., not infinity.
    divergence = 0.9 * math.log(0.9) + 0.1 * math.log(0.1 / 1e-6)
    for threshold, dropped in ((divergence * 0.999, True), (divergence * 1.001, False)):
        surrogate, _ = surrogate_between(DPPOKLConfig(threshold=threshold), [0.9], [1.0], [1.0])
        assert surrogate.clipped_high.tolist() == [dropped]
    # Two certain probabilities differ by rounding only.
    surrogate, gradient = surrogate_of(DPPOKLConfig(), torch.zeros(1), torch.full((1,), -5e-7), [1.0])
    assert surrogate.clipped_high.tolist() == [False] and gradient == [pytest.approx(-1.0, rel=1e-5)]


def test_sapo_closes_the_gate_smoothly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "TAU_NEGATIVE", 2.0)
    surrogate, gradient = surrogate_at(SAPOConfig(), [2.0, 2.0, 0.5, 0.5], [1.0, -1.0, 3.0, -3.0])
    # sigmoid(1) = 0.7310586, sigmoid(2) = 0.8807971, sigmoid(-0.5) = 0.3775407, sigmoid(-1) = 0.2689414.
    assert_close(surrogate.loss, [-4 * 0.7310586, 2 * 0.8807971, -12 * 0.3775407, 6 * 0.2689414])
    # f'(r) r = 4 s (1 - s) r.
    expected = [-8 * 0.1966119, 8 * 0.1049936, -6 * 0.2350037, 6 * 0.1966119]
    assert_close(gradient, expected)
    assert_close(surrogate.ratio, [2.0, 2.0, 0.5, 0.5])
    assert not surrogate.clipped_low.any() and not surrogate.clipped_high.any()


def test_sapo_has_slope_one_and_value_two_over_tau_at_ratio_one() -> None:
    surrogate, gradient = surrogate_at(SAPOConfig(), [1.0, 1.0], [1.0, -2.0])
    assert gradient == pytest.approx([-1.0, 2.0], rel=1e-6)
    assert surrogate.loss.tolist() == pytest.approx([-2.0, 4 / 1.05], rel=1e-6)


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (PPOClipConfig, {"clip_low": 1.0}, "clip_low must lie in (0, 1), got 1.0. Vetted: 0.2."),
        (PPOClipConfig, {"clip_high": 0.0}, "clip_high must be > 0, got 0.0."),
        (PPOClipConfig, {"dual_clip": 1.0}, "dual_clip must be > 1 or null, got 1.0."),
        (GSPOConfig, {"clip_low": 0.2}, "clip_low must lie in (0, 0.05): the mean log-ratio"),
        (GSPOConfig, {"clip_high": 0.05}, "got 0.05. Vetted: 4e-4. A clip of the token's ratio is loss=ppo_clip."),
        (GSPOConfig, {"clip_high": 0.0}, "clip_high must lie in (0, 0.05)"),
        (CISPOConfig, {"low": 1.1}, "low must lie in [0, 1]"),
        (CISPOConfig, {"low": -0.1}, "low must lie in [0, 1]"),
        (CISPOConfig, {"high": 0.28}, "high must be > 1: it bounds the ratio, not its distance from 1, got 0.28."),
        (DPPOTVConfig, {"threshold": 1.0}, "threshold must lie in (0, 1): it is a difference of probabilities"),
        (DPPOKLConfig, {"threshold": 0.0}, "threshold must lie in (0, 13): it is a divergence in nats, got 0.0."),
        (DPPOKLConfig, {"threshold": 13.0}, "threshold must lie in (0, 13)"),
    ],
)
def test_values_out_of_range_are_refused(config: type[LossConfig], values: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(**values)
    assert message in str(error.value)


@pytest.mark.parametrize("config", [type(config) for config in CONFIGS.values()])
@pytest.mark.parametrize("value", [-0.1, math.nan])
def test_the_rules_of_the_base_hold_in_every_config(config: type[LossConfig], value: float) -> None:
    with pytest.raises(ConfigError, match="entropy_coef must be >= 0"):
        config(entropy_coef=value)
