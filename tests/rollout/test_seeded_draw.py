"""Draws with one seed per sample: the law, the independence from the batch, greedy rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.truncation import kept_tokens
from rollout.seeded_draw import LEAST, draw, uniforms


def test_numbers_are_those_of_splitmix64() -> None:
    """SplitMix64 from state 0 gives 0xE220A8397B1DCDAF."""

    def mix(state: int) -> int:
        mask = (1 << 64) - 1
        state = (state + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        return state ^ (state >> 31)

    assert mix(0) == 0xE220A8397B1DCDAF
    states = [0, 1, 2**31 - 1, 2**62 + 5]
    got = uniforms(torch.tensor(states))
    assert got.dtype == torch.float64
    assert got.tolist() == [(mix(state) >> 11) / 2**53 for state in states]


def test_draws_of_neighbouring_seeds_and_positions_are_uniform_and_uncorrelated() -> None:
    side, count = 300, 100
    seeds, positions = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    tokens = draw(
        torch.ones(1, count).expand(side * side, -1), seeds=seeds.reshape(-1), positions=positions.reshape(-1)
    )
    each = side * side / count
    chi_square = ((tokens.bincount(minlength=count) - each) ** 2 / each).sum().item()
    assert chi_square < 99 + 5 * (2 * 99) ** 0.5
    centred = tokens.view(side, side) - (count - 1) / 2
    for shifted in (
        centred.roll(1, 0),
        centred.roll(1, 1),
        centred.roll((1, 1), (0, 1)),
        centred.roll((1, -1), (0, 1)),
    ):
        correlation = (centred * shifted).mean().item() * 12 / (count**2 - 1)
        assert abs(correlation) < 5 / side


LAWS = {
    "all likely": torch.softmax(torch.linspace(-3, 3, 12), dim=0),
    "the most unlikely": torch.tensor([*[LEAST / 2] * 2000, 1.0, *[0.0] * 3, *[LEAST / 9] * 2000]),
    "some of each": torch.logspace(0, -6, 300),
}


@pytest.mark.parametrize("name", LAWS)
def test_draws_follow_the_law(name: str) -> None:
    law, count = LAWS[name], 40_000
    tokens = torch.cat([
        draw(law.expand(2000, -1), seeds=torch.arange(start, start + 2000), positions=torch.full((2000,), 17))
        for start in range(0, count, 2000)
    ])  # fmt: skip
    expected = law.double() / law.double().sum() * count
    assert not (tokens.bincount(minlength=len(law))[law == 0]).any()
    # Neighbours are counted together until twenty are expected.
    place = (expected.cumsum(0) / 20).floor().long()
    found = torch.zeros(int(place.max()) + 1, dtype=torch.float64)
    found.index_add_(0, place, tokens.bincount(minlength=len(law)).double())
    wanted = torch.zeros_like(found).index_add_(0, place, expected)
    cells = int((wanted > 0).sum())
    chi_square = ((found - wanted)[wanted > 0] ** 2 / wanted[wanted > 0]).sum().item()
    assert chi_square < cells - 1 + 5 * (2 * (cells - 1)) ** 0.5


def test_a_small_change_of_the_weights_changes_few_draws() -> None:
    """A draw must change as often as the laws differ (total variation); the bound is three times that."""
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(400, 2000, generator=generator)
    laws = [
        torch.softmax(each, -1) for each in (logits, logits + 0.05 * torch.randn(logits.shape, generator=generator))
    ]
    seeds, positions = torch.arange(400), torch.arange(400) % 20
    first, second = (draw(law, seeds=seeds, positions=positions) for law in laws)
    must = ((laws[0] - laws[1]).abs().sum(-1) / 2).mean().item()
    assert 0 < (first != second).float().mean().item() < 3 * must


def test_a_row_without_numbers_gives_a_token() -> None:
    row = torch.tensor([[float("nan"), 1.0]])
    assert draw(row, seeds=torch.tensor([1]), positions=torch.tensor([1])).item() in (0, 1)


def test_a_draw_does_not_depend_on_the_rest_of_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.softmax(torch.randn(32, 50, generator=generator), dim=-1)
    seeds, positions = torch.arange(32) * 7, torch.arange(32)
    together = draw(probs, seeds=seeds, positions=positions)
    alone = [draw(probs[i : i + 1], seeds=seeds[i : i + 1], positions=positions[i : i + 1]).item() for i in range(32)]
    assert together.tolist() == alone


@given(
    st.lists(st.floats(0, 1, width=32), min_size=2, max_size=9).filter(lambda row: sum(row) > 1e-3),
    st.integers(0, 2**31 - 1),
)
def test_top_1_is_greedy_whatever_the_seed(row: list[float], seed: int) -> None:
    probs = torch.tensor([row])
    kept = kept_tokens(probs, top_k=torch.tensor([1]), top_p=torch.tensor([1.0]), min_p=torch.tensor([0.0]))
    assert draw(probs * kept, seeds=torch.tensor([seed]), positions=torch.tensor([3])).item() == row.index(max(row))
