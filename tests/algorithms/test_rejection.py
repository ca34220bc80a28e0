"""Every rejection criterion on numbers worked by hand, on both sides of its bound."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import fields

import pytest
import torch
from algorithm_cases import EVERY_CRITERION, by_response, packed
from torch import Tensor

from algorithms.config import ConfigError, CustomConfig, RejectConfig
from algorithms.correction import Correction, correct
from algorithms.kl import bernoulli_kl
from algorithms.rejection import CRITERIA
from algorithms.tokens import Tokens

ROLLOUT = -3.0
A, B = (0.1, -0.3, 0.9), (0.0, -2.5)
"""Delta of two responses: the golden vector of the reference."""
ALL = [True] * 5
NONE_OF_B = [True, True, True, False, False]
NONE_OF_A = [False, False, False, True, True]


def rejected_by(
    reject: RejectConfig, *responses: tuple[float, ...], advantages: list[float] | None = None
) -> Correction:
    """The correction of responses with these Delta and log mu = -3."""
    delta = torch.tensor([value for response in responses for value in response])
    rollout = torch.full_like(delta, ROLLOUT)
    return correct(
        CustomConfig(reject=reject).spec(),
        Tokens(
            trainer_logprobs=rollout + delta,
            rollout_logprobs=rollout,
            response_mask=torch.ones_like(delta, dtype=torch.bool),
            cu_seqlens=packed(*map(len, responses)),
            advantages=torch.ones_like(delta) if advantages is None else torch.tensor(advantages),
        ),
    )


# K3: A 0.00517, 0.04082, 0.55960; B 0, 1.58208; means 0.20186, 0.79104.
# Products: 2.01375, 0.08209; geometric means 1.26280, 0.28650; mean e^|Delta|: 1.63821, 6.59125.
WORKED: list[tuple[RejectConfig, list[bool]]] = [
    (RejectConfig(token_ratio=[0.5, 2.0]), [True, True, False, True, False]),
    (RejectConfig(token_ratio=[0.08, 2.46]), ALL),
    (RejectConfig(sequence_ratio=[0.05, 2.01]), NONE_OF_A),
    (RejectConfig(sequence_ratio=[0.083, 2.02]), NONE_OF_B),
    (RejectConfig(geometric_ratio=[0.28, 1.26]), NONE_OF_A),
    (RejectConfig(geometric_ratio=[0.29, 1.27]), NONE_OF_B),
    (RejectConfig(token_k3=0.55), [True, True, False, True, False]),
    (RejectConfig(token_k3=0.57), [True, True, True, True, False]),
    (RejectConfig(mean_k3=0.201), [False] * 5),
    (RejectConfig(mean_k3=0.203), NONE_OF_B),
    (RejectConfig(max_k3=0.559), [False] * 5),
    (RejectConfig(max_k3=0.56), NONE_OF_B),
    (RejectConfig(veto=0.083), NONE_OF_B),
    (RejectConfig(veto=0.082), ALL),
    (RejectConfig(mult_err=1.63), [False] * 5),
    (RejectConfig(mult_err=1.64), NONE_OF_B),
]


def rejected_tokens(correction: Correction, *lengths: int) -> list[list[float]]:
    """By criterion and response."""
    return [by_response(rejected, packed(*lengths)) for rejected in correction.rejected.values()]


@pytest.mark.parametrize(("reject", "expected"), WORKED, ids=lambda value: str(value)[:60])
def test_worked_by_hand(reject: RejectConfig, expected: list[bool]) -> None:
    correction = rejected_by(reject, A, B)
    assert correction.keep.tolist() == expected
    assert list(correction.rejected) == reject.active()
    # A is the first three tokens, B the last two.
    assert rejected_tokens(correction, 3, 2) == [[3 - sum(expected[:3]), 2 - sum(expected[3:])]]
    assert correction.weight.tolist() == [float(kept) for kept in expected]


def test_every_key_is_a_criterion_and_every_criterion_a_key() -> None:
    assert CRITERIA.keys() == {field.name for field in fields(RejectConfig)} - {"custom"}


def test_criteria_are_anded_and_each_says_what_it_rejected() -> None:
    correction = rejected_by(RejectConfig(token_ratio=[0.08, 2.0], veto=0.1), A, B)
    assert tuple(correction.rejected) == ("token_ratio", "veto")
    assert rejected_tokens(correction, 3, 2) == [[1, 0], [0, 2]]
    assert correction.keep.tolist() == [True, True, False, False, False]


def on_probabilities(reject: RejectConfig, *, train: list[float], rollout: list[float], advantage: float) -> list[bool]:
    """Verdicts on single-token responses with these probabilities and one advantage."""
    keep: Tensor = correct(
        CustomConfig(reject=reject).spec(),
        Tokens(
            trainer_logprobs=torch.tensor(train).log(),
            rollout_logprobs=torch.tensor(rollout).log(),
            response_mask=torch.ones(len(train), dtype=torch.bool),
            cu_seqlens=packed(*[1] * len(train)),
            advantages=torch.full((len(train),), advantage),
        ),
    ).keep
    return keep.tolist()


def test_probability_difference() -> None:
    train, rollout = [0.9, 0.65, 0.3, 0.5], [0.65, 0.5, 0.6, 0.5]  # + 0.25, + 0.15, - 0.3, 0
    kept = on_probabilities(RejectConfig(prob_diff=[-0.2, 0.2]), train=train, rollout=rollout, advantage=1.0)
    assert kept == [False, True, False, True]
    kept = on_probabilities(RejectConfig(prob_diff=[-0.4, 0.1]), train=train, rollout=rollout, advantage=1.0)
    assert kept == [False, False, True, True]


def test_dppo_drops_only_where_the_advantage_pushes_outwards() -> None:
    train, rollout = [0.9, 0.3, 0.55], [0.6, 0.6, 0.5]  # + 0.3, - 0.3, + 0.05
    for reject in (RejectConfig(dppo_tv=0.2), RejectConfig(dppo_kl=0.15)):
        assert on_probabilities(reject, train=train, rollout=rollout, advantage=1.0) == [False, True, True]
        assert on_probabilities(reject, train=train, rollout=rollout, advantage=-1.0) == [True, False, True]
        assert on_probabilities(reject, train=train, rollout=rollout, advantage=0.0) == [True, True, True]


def test_bernoulli_kl_is_worked_by_hand_and_safe_at_the_ends() -> None:
    p, q = torch.tensor([0.6, 0.5]), torch.tensor([0.9, 0.5])
    expected = 0.6 * math.log(0.6 / 0.9) + 0.4 * math.log(0.4 / 0.1)
    torch.testing.assert_close(bernoulli_kl(p.log(), q.log()), torch.tensor([expected, 0.0]))
    ends = bernoulli_kl(torch.tensor([-60.0, 0.0, 0.0]), torch.tensor([0.0, -60.0, 0.0]))
    assert torch.isfinite(ends).all()
    assert ends[0] > 10 and ends[1] > 50 and ends[2] == 0


def test_opsm_drops_responses_that_were_punished_and_have_become_unlikely() -> None:
    # Mean of log mu - log pi: A -0.2333, B 1.25.
    reject = RejectConfig(opsm=1.2)
    assert rejected_by(reject, A, B, advantages=[-1.0] * 5).keep.tolist() == NONE_OF_B
    assert rejected_by(reject, A, B, advantages=[1.0] * 5).keep.tolist() == ALL
    assert rejected_by(RejectConfig(opsm=1.3), A, B, advantages=[-1.0] * 5).keep.tolist() == ALL


@pytest.mark.parametrize("name", CRITERIA)
def test_a_criterion_that_reads_advantages_says_so_and_asks_for_them(name: str) -> None:
    reject = RejectConfig(**{name: getattr(EVERY_CRITERION, name)})
    asks = pytest.raises(ValueError, match=rf"correction.reject.{name} reads the sign of the advantage")
    with asks if reject.reads_advantages() else nullcontext():
        correct(
            CustomConfig(reject=reject).spec(),
            Tokens(
                trainer_logprobs=torch.zeros(1),
                rollout_logprobs=torch.zeros(1),
                response_mask=torch.ones(1, dtype=torch.bool),
                cu_seqlens=packed(1),
            ),
        )


def test_the_veto_sees_the_log_ratio_before_any_clamp_and_the_mask_only() -> None:
    # e^-25 = 1.4e-11: below e^-20, where a clamped log-ratio could not tell the two apart.
    assert rejected_by(RejectConfig(veto=1e-10), (0.0, -22.0)).keep.tolist() == [True, True]
    assert rejected_by(RejectConfig(veto=1e-10), (0.0, -25.0)).keep.tolist() == [False, False]
    keep = correct(
        CustomConfig(reject=RejectConfig(veto=0.5, max_k3=0.1, token_ratio=[0.5, 2.0])).spec(),
        Tokens(
            trainer_logprobs=torch.tensor([-50.0, -1.0, math.nan]),
            rollout_logprobs=torch.tensor([0.0, -1.0, math.inf]),
            response_mask=torch.tensor([False, True, False]),
            cu_seqlens=packed(2, 1),
        ),
    ).keep
    assert keep.tolist() == [False, True, False]


def test_only_response_tokens_count_as_rejected() -> None:
    correction = correct(
        CustomConfig(reject=RejectConfig(veto=0.5)).spec(),
        Tokens(
            trainer_logprobs=torch.tensor([0.0, -9.0, -1.0]),
            rollout_logprobs=torch.tensor([0.0, -1.0, -1.0]),
            response_mask=torch.tensor([False, True, True]),
            cu_seqlens=packed(3),
        ),
    )
    assert rejected_tokens(correction, 3) == [[2]]
    assert correction.keep.tolist() == [False, False, False]


REFUSED = [
    ({"token_ratio": [0.5]}, r"token_ratio must be \[low, high\]"),
    ({"token_ratio": [2.0, 0.5]}, "token_ratio must be .* 0 < low <= 1 <= high"),
    ({"geometric_ratio": [0.0, 1.1]}, "geometric_ratio must be"),
    ({"sequence_ratio": [1.1, 2.0]}, "sequence_ratio must be .* on-policy tokens are rejected"),
    ({"prob_diff": [0.1, 0.2]}, "prob_diff must be"),
    ({"prob_diff": [-0.1]}, r"prob_diff must be \[low, high\]"),
    ({"veto": 0.0}, r"veto must lie in \(0, 1\) or be null"),
    ({"veto": 1.0}, r"veto must lie in \(0, 1\) or be null"),
    ({"mult_err": 1.0}, "mult_err must be > 1"),
    ({"token_k3": 0.0}, "token_k3 must be > 0 or null"),
    ({"opsm": -1.0}, "opsm must be > 0"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_bounds_that_cannot_be_meant_are_refused(values: dict[str, float | list[float]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RejectConfig(**values)


def test_bounds_of_the_wrong_level_are_noted() -> None:
    [note] = RejectConfig(geometric_ratio=[0.5, 2.0]).notes()
    assert "geometric_ratio=[0.5, 2.0] practically never rejects" in note
    [note] = RejectConfig(sequence_ratio=[0.999, 1.001]).notes()
    assert "rejects nearly every response" in note
    assert not list(RejectConfig(sequence_ratio=[0.5, 2.0], geometric_ratio=[0.999, 1.001]).notes())
