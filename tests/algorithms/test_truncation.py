"""What top-k, top-p and min-p keep: by hand, against a plain sort, and independent of the other rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from algorithms import truncation
from algorithms.truncation import kept_tokens


def kept(rows: list[list[float]], **limits: list[float]) -> list[list[int]]:
    """Ids of the kept tokens of each row."""
    whole = {"top_k": [1 << 30], "top_p": [1.0], "min_p": [0.0]} | limits
    top_k, top_p, min_p = (torch.tensor((values * len(rows))[: len(rows)]) for values in whole.values())
    mask = kept_tokens(torch.tensor(rows), top_k=top_k, top_p=top_p, min_p=min_p)
    return [row.nonzero().flatten().tolist() for row in mask]


def test_each_rule_by_hand() -> None:
    row = [0.1, 0.4, 0.2, 0.3]
    assert kept([row]) == [[0, 1, 2, 3]]
    assert kept([row], top_k=[2]) == [[1, 3]]
    # 0.4 is below 0.5 of mass, so 0.3 still belongs to the nucleus; 0.7 is not.
    assert kept([row], top_p=[0.5]) == [[1, 3]]
    # At least 0.6 * 0.4 = 0.24.
    assert kept([row], min_p=[0.6]) == [[1, 3]]
    assert kept([row, row, row], top_k=[4, 1, 4], top_p=[0.75, 1.0, 1.0], min_p=[0.0, 0.0, 1.0]) == [
        [1, 2, 3],
        [1],
        [1],
    ]


def test_of_equal_probabilities_the_lower_ids_are_kept() -> None:
    assert kept([[0.2, 0.3, 0.2, 0.3]], top_k=[1]) == [[1]]
    assert kept([[0.2, 0.3, 0.2, 0.3]], top_k=[3]) == [[0, 1, 3]]
    assert kept([[0.25] * 4], top_p=[0.3]) == [[0, 1]]


def test_top_p_1_keeps_what_rounding_lifts_above_1() -> None:
    """The float32 sum of these probabilities is above 1 before the last of them."""
    probs = torch.softmax(torch.randn(1, 50_000, generator=torch.Generator().manual_seed(9)), -1)
    assert float(probs.sort(descending=True).values.cumsum(-1)[0, -2]) > 1
    limits = {"top_k": torch.tensor([1 << 30]), "min_p": torch.tensor([0.0])}
    assert bool(kept_tokens(probs, top_p=torch.tensor([1.0]), **limits).all())


def test_of_a_row_with_a_nan_all_is_kept_and_the_others_do_not_notice() -> None:
    assert kept([[0.5, float("nan"), 0.1], [0.7, 0.2, 0.1]], top_k=[2]) == [[0, 1, 2], [0, 1]]


def by_sorting(probs: Tensor, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The definition, one token after the other."""
    order = sorted(range(len(probs)), key=lambda token: (-float(probs[token]), token))
    found, mass = [], torch.zeros(())
    for rank, token in enumerate(order):
        if rank >= top_k or (top_p < 1 and mass > top_p) or probs[token] < probs[order[0]] * min_p:
            break
        found.append(token)
        mass = mass + probs[token]
    return sorted(found)


@given(
    st.lists(st.integers(0, 8), min_size=2, max_size=40).filter(any),
    st.sampled_from([1, 2, 3, 7, 1 << 30]),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(1, 9),
)
def test_the_kept_tokens_are_those_of_the_definition(
    weights: list[int], top_k: int, top_p: float, min_p: float, depth: int
) -> None:
    """Small integers give many equal probabilities, and powers of two exact sums; any first depth finds the same."""
    probs = torch.tensor(weights, dtype=torch.float32) / 1024
    before = truncation._FIRST_DEPTH
    truncation._FIRST_DEPTH = depth  # type: ignore[misc]
    try:
        assert kept([probs.tolist()], top_k=[top_k], top_p=[top_p], min_p=[min_p]) == [
            by_sorting(probs, top_k, top_p, min_p)
        ]
    finally:
        truncation._FIRST_DEPTH = before  # type: ignore[misc]


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_a_row_keeps_the_same_alone_and_beside_others(top_p: float) -> None:
    """A flat row needs more than the first depth, and its neighbours are looked at as deep."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([[0.01], [1.0], [4.0], [30.0]])
    probs = torch.softmax((torch.randn(4, 3000, generator=generator) * scale).bfloat16().float(), -1)
    limits = {"top_p": torch.tensor([top_p]), "min_p": torch.tensor([0.0]), "top_k": torch.tensor([1 << 30])}
    together = kept_tokens(probs, **{name: value.expand(4) for name, value in limits.items()})
    alone = torch.cat([kept_tokens(row[None], **limits) for row in probs])
    assert torch.equal(together, alone)
    assert int(together[0].sum()) > truncation._FIRST_DEPTH * top_p > int(together[3].sum())
