"""The six modes against the golden vector and against bounds worked by hand."""

import math
from typing import Any

import pytest
import torch
from algorithm_cases import MODES, by_response, packed
from torch import Tensor

from algorithms.config import (
    Anchor,
    BypassConfig,
    BypassLoss,
    CorrectionConfig,
    Level,
    MISBound,
    MISConfig,
    PPOISConfig,
    RecomputeConfig,
    RejectConfig,
    TISConfig,
    VanillaISConfig,
)
from algorithms.correction import Correction, correct
from algorithms.tokens import Tokens

ROLLOUT = -3.0
GOLDEN = ((0.1, -0.3, 0.9), (0.0, -2.5))
RHO = (1.10517, 0.74082, 2.45960, 1.0, 0.0820850)


def on_gaps(config: CorrectionConfig, *responses: tuple[float, ...], advantage: float = 1.0) -> Correction:
    """The correction of responses whose tokens have these Delta, every token on the mask, all with one advantage."""
    delta = torch.tensor([value for response in responses for value in response])
    rollout = torch.full_like(delta, ROLLOUT)
    return correct(
        config.spec(),
        Tokens(
            trainer_logprobs=rollout + delta,
            rollout_logprobs=rollout,
            response_mask=torch.ones_like(delta, dtype=torch.bool),
            cu_seqlens=packed(*map(len, responses)),
            advantages=torch.full_like(delta, advantage),
        ),
    )


def assert_weights(correction: Correction, *expected: float) -> None:
    torch.testing.assert_close(correction.weight, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def cut_tokens(correction: Correction) -> list[float]:
    """Kept tokens of each golden response whose weight was cut."""
    assert correction.raw_weight is not None
    return by_response(correction.keep & (correction.weight < correction.raw_weight), packed(3, 2))


def test_golden_token_weights() -> None:
    assert_weights(on_gaps(VanillaISConfig(), *GOLDEN), *RHO)
    tis = on_gaps(TISConfig(), *GOLDEN)
    assert_weights(tis, 1.10517, 0.74082, 2.0, 1.0, 0.0820850)
    assert abs(tis.weight.mean().item() - 0.98561483) < 1e-5
    assert cut_tokens(tis) == [1, 0]
    assert tis.keep.all()
    mis = on_gaps(MISConfig(), *GOLDEN)
    assert_weights(mis, 1.10517, 0.74082, 0.0, 1.0, 0.0)
    assert mis.keep.tolist() == [True, True, False, True, False]
    assert cut_tokens(mis) == [0, 0]
    truncate = on_gaps(MISConfig(bound=MISBound.truncate), *GOLDEN)
    assert_weights(truncate, 1.10517, 0.74082, 2.0, 1.0, 0.0)
    assert truncate.keep.tolist() == [True, True, True, True, False]
    assert cut_tokens(truncate) == [1, 0]


def test_golden_sequence_and_geometric_weights() -> None:
    a, b = 2.01375, 0.0820850
    assert_weights(on_gaps(VanillaISConfig(level=Level.sequence), *GOLDEN), a, a, a, b, b)
    assert_weights(on_gaps(TISConfig(level=Level.sequence), *GOLDEN), 2, 2, 2, b, b)
    a, b = 1.26280, 0.286505
    assert_weights(on_gaps(VanillaISConfig(level=Level.geometric), *GOLDEN), a, a, a, b, b)
    mis = on_gaps(MISConfig(level=Level.geometric), *GOLDEN)
    assert_weights(mis, a, a, a, 0, 0)
    assert mis.keep.tolist() == [True, True, True, False, False]
    mis = on_gaps(MISConfig(level=Level.sequence, low=0.05), *GOLDEN)
    assert mis.keep.tolist() == [False, False, False, True, True]


def test_modes_without_a_weight() -> None:
    for config in (RecomputeConfig(), PPOISConfig(), BypassConfig()):
        correction = on_gaps(config, *GOLDEN)
        assert correction.weight.tolist() == [1, 1, 1, 1, 1]
        assert correction.keep.all()
        assert cut_tokens(correction) == [0, 0]


def test_bypass_reinforce_takes_its_weight_from_the_logprobs_it_is_given() -> None:
    config = BypassConfig(loss=BypassLoss.reinforce)
    assert_weights(on_gaps(config, *GOLDEN), 1.10517, 0.74082, 2.0, 1.0, 0.0820850)


@pytest.mark.parametrize("name", MODES)
def test_the_anchor_is_pi_old_or_mu_as_the_spec_says(name: str) -> None:
    correction = on_gaps(MODES[name], *GOLDEN)
    on_mu = MODES[name].spec().anchor is not Anchor.old
    delta = torch.tensor([0.0] * 5 if on_mu else [*GOLDEN[0], *GOLDEN[1]])
    assert torch.equal(correction.anchor, ROLLOUT + delta)


def test_a_ratio_on_a_bound_is_inside_it() -> None:
    for delta in (math.log(2), math.log(0.5)):
        # ROLLOUT + delta would round; 0 as rollout log-prob keeps Delta exact.
        correction = correct(
            MISConfig().spec(),
            Tokens(
                trainer_logprobs=torch.tensor([delta]),
                rollout_logprobs=torch.zeros(1),
                response_mask=torch.ones(1, dtype=torch.bool),
                cu_seqlens=packed(1),
            ),
        )
        assert correction.keep.tolist() == [True]


def test_bounds_are_on_pi_train_over_mu_and_not_on_its_inverse() -> None:
    # With 1/rho in [0.6, 1.6] the verdicts swap: 1/0.55 = 1.82 is outside, 1/1.5 = 0.67 inside, 1/1.65 = 0.606 too.
    gaps = (math.log(0.55), math.log(1.5), math.log(1.65))
    correction = on_gaps(MISConfig(low=0.6, high=1.6), gaps)
    assert correction.keep.tolist() == [False, True, False]
    correction = on_gaps(MISConfig(low=0.6, high=1.6, bound=MISBound.truncate), gaps)
    assert correction.keep.tolist() == [False, True, True]
    assert_weights(correction, 0.0, 1.5, 1.6)


def test_bounds_see_the_log_ratio_before_the_clamp() -> None:
    # e^25 is above 1e9 = e^20.7, but e^20, where the clamp puts it, is below.
    correction = on_gaps(MISConfig(high=1e9), (25.0, 20.5))
    assert correction.keep.tolist() == [False, True]
    assert_weights(correction, 0.0, math.exp(20))
    assert_weights(on_gaps(VanillaISConfig(), (25.0, -25.0)), math.exp(20), math.exp(-20))
    assert_weights(on_gaps(TISConfig(cap=1e9), (20.5,)), math.exp(20))


def test_sequence_sums_are_clamped_after_summing() -> None:
    # 30 - 29 = 1 although 30 is beyond the clamp: the sum comes first.
    level = Level.sequence
    assert_weights(on_gaps(VanillaISConfig(level=level), (30.0, -29.0)), math.e, math.e)
    assert_weights(on_gaps(VanillaISConfig(level=level), (15.0, 15.0)), math.exp(20), math.exp(20))


def test_veto_rejects_the_whole_response_and_no_other() -> None:
    responses = ((0.0, -10.0, 0.1), (0.2, -0.3))  # e^-10 = 4.5e-5 < 1e-4
    assert on_gaps(MISConfig(), *responses).keep.tolist() == [False, False, False, True, True]
    assert on_gaps(MISConfig(reject=RejectConfig()), *responses).keep.tolist() == [True, False, True, True, True]
    assert on_gaps(MISConfig(reject=RejectConfig(veto=1e-5)), *responses).keep.tolist() == [
        True,
        False,
        True,
        True,
        True,
    ]
    low = MISConfig(bound=MISBound.truncate, low=1e-6)
    assert on_gaps(low, *responses).keep.tolist() == [False, False, False, True, True]


def test_veto_looks_at_the_mask_only() -> None:
    correction = correct(
        MISConfig().spec(),
        Tokens(
            trainer_logprobs=torch.tensor([-50.0, -1.0]),
            rollout_logprobs=torch.tensor([0.0, -1.0]),
            response_mask=torch.tensor([False, True]),
            cu_seqlens=packed(2),
        ),
    )
    assert correction.keep.tolist() == [False, True]


@pytest.mark.parametrize("name", MODES)
def test_pi_old_may_be_missing_only_where_it_is_not_needed(name: str) -> None:
    rollout = torch.tensor([-1.0, -2.0, math.nan])

    def without_old() -> Correction:
        return correct(
            MODES[name].spec(),
            Tokens(
                trainer_logprobs=None,
                rollout_logprobs=rollout,
                response_mask=torch.ones(3, dtype=torch.bool),
                cu_seqlens=packed(3),
            ),
        )

    spec = MODES[name].spec()
    if spec.anchor is Anchor.rollout and not spec.measures_trainer:
        correction = without_old()
        assert correction.anchor.tolist() == [-1, -2, 0]
        assert correction.weight.tolist() == [1, 1, 0]
        assert correction.keep.tolist() == [True, True, False]
    else:
        with pytest.raises(ValueError, match=rf"anchor={spec.anchor.name} needs trainer_logprobs, got None"):
            without_old()


INVALID = [
    (-1.0, -math.inf),
    (-1.0, math.nan),
    (-1.0, math.inf),
    (-1.0, 0.5),
    (-math.inf, -1.0),
    (math.nan, -1.0),
    (math.inf, -1.0),
    (-math.inf, -math.inf),
]


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize(("old", "rollout"), INVALID)
def test_an_invalid_token_is_rejected_in_every_mode(name: str, old: float, rollout: float) -> None:
    correction = correct(
        MODES[name].spec(),
        Tokens(
            trainer_logprobs=torch.tensor([-1.0, old, -1.0]),
            rollout_logprobs=torch.tensor([-1.0, rollout, -1.0]),
            response_mask=torch.ones(3, dtype=torch.bool),
            cu_seqlens=packed(2, 1),
            advantages=torch.ones(3),
        ),
    )
    assert correction.keep.tolist()[1:] == [False, True]
    assert correction.weight.tolist()[1:] == [0, 1]
    assert correction.anchor.tolist() == [-1, 0, -1]
    # Without this token the response, or the turn, has no weight; and no criterion over responses can be decided.
    spec = MODES[name].spec()
    whole = spec.weight is not None and spec.weight.level in (Level.sequence, Level.geometric, Level.segment)
    whole = whole or any(not criterion.startswith(("token_", "prob_", "dppo_")) for criterion in spec.reject.active())
    assert correction.keep.tolist()[0] is not whole


def test_log_mu_a_rounding_above_zero_is_valid() -> None:
    assert on_gaps(RecomputeConfig(), (0.0,)).keep.all()
    correction = correct(
        RecomputeConfig().spec(),
        Tokens(
            trainer_logprobs=torch.zeros(2),
            rollout_logprobs=torch.tensor([9e-5, 2e-4]),
            response_mask=torch.ones(2, dtype=torch.bool),
            cu_seqlens=packed(2),
        ),
    )
    assert correction.keep.tolist() == [True, False]


@pytest.mark.parametrize("name", MODES)
def test_off_the_mask_everything_is_defined_and_nothing_is_changed(name: str) -> None:
    old = torch.tensor([math.nan, -1.0, 7.0, -math.inf])
    rollout = torch.tensor([math.inf, -1.0, 9.0, math.nan])
    mask = torch.tensor([False, True, False, False])
    before = (old.clone(), rollout.clone(), mask.clone())
    old.requires_grad_()
    correction = correct(
        MODES[name].spec(),
        Tokens(
            trainer_logprobs=old,
            rollout_logprobs=rollout,
            response_mask=mask,
            cu_seqlens=packed(3, 0),
            advantages=torch.full((4,), math.nan).masked_fill(mask, 1.0),
        ),
    )
    assert correction.anchor.tolist() == [0, -1, 0, 0]
    assert correction.weight.tolist() == [1, 1, 1, 1]
    assert correction.keep.tolist() == [False, True, False, False]
    assert not correction.weight.requires_grad and not correction.anchor.requires_grad
    after: tuple[Tensor, ...] = (old.detach(), rollout, mask)
    for kept, now in zip(before, after, strict=True):
        torch.testing.assert_close(now, kept, equal_nan=True, rtol=0, atol=0)


def test_a_mode_without_a_case_is_refused() -> None:
    with pytest.raises(TypeError, match="CorrectionConfig"):
        on_gaps(CorrectionConfig(), (0.0,))


def test_half_precision_logprobs_are_refused() -> None:
    with pytest.raises(ValueError, match="trainer_logprobs must be float32"):
        correct(
            TISConfig().spec(),
            Tokens(
                trainer_logprobs=torch.zeros(1, dtype=torch.bfloat16),
                rollout_logprobs=torch.zeros(1),
                response_mask=torch.ones(1, dtype=torch.bool),
                cu_seqlens=packed(1),
            ),
        )


def test_a_config_without_its_spec_is_refused() -> None:
    config: Any = TISConfig()
    tokens = Tokens(
        trainer_logprobs=torch.zeros(1),
        rollout_logprobs=torch.zeros(1),
        response_mask=torch.ones(1, dtype=torch.bool),
        cu_seqlens=packed(1),
    )
    with pytest.raises(TypeError, match=r"takes a CorrectionSpec, got a TISConfig\. Pass config\.spec\(\)\."):
        correct(config, tokens)
