"""Draws with one seed per sample: the law, the independence from the batch, greedy rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.truncation import kept_tokens
from rollout.seeded_draw import draw, uniforms


def test_first_number_is_that_of_splitmix64() -> None:
    """SplitMix64 from state 0 gives 0xE220A8397B1DCDAF; a second round over it, position 0, is worked out in Python."""

    def mix(state: int) -> int:
        mask = (1 << 64) - 1
        state = (state + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        return state ^ (state >> 31)

    assert mix(0) == 0xE220A8397B1DCDAF
    seeds, positions = [0, 1, 2**31 - 1], [0, 5, 100_000]
    expected = [
        (mix((mix(seed) + position * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)) >> 11) / 2**53
        for seed, position in zip(seeds, positions, strict=True)
    ]
    got = uniforms(torch.tensor(seeds), positions=torch.tensor(positions))
    assert got.dtype == torch.float64
    assert got.tolist() == expected


def test_numbers_of_neighbouring_seeds_and_positions_are_uniform_and_uncorrelated() -> None:
    seeds, positions = torch.meshgrid(torch.arange(300), torch.arange(300), indexing="ij")
    numbers = uniforms(seeds.reshape(-1), positions=positions.reshape(-1)).view(300, 300)
    assert ((numbers >= 0) & (numbers < 1)).all()
    counts = torch.histc(numbers.float(), bins=100, min=0, max=1)
    chi_square = ((counts - 900) ** 2 / 900).sum().item()
    assert chi_square < 99 + 5 * (2 * 99) ** 0.5
    assert numbers.unique().numel() == 300 * 300
    centred = numbers - 0.5
    for shifted in (
        centred.roll(1, 0),
        centred.roll(1, 1),
        centred.roll((1, 1), (0, 1)),
        centred.roll((1, -1), (0, 1)),
    ):
        correlation = (centred * shifted).mean().item() * 12
        assert abs(correlation) < 5 / 300


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 0), (0.19, 0), (0.2, 2), (0.5, 2), (0.99, 2), (1 - 2**-53, 2)])
def test_draw_inverts_the_cumulated_probabilities(uniform: float, token: int) -> None:
    """Probabilities 0.2, 0, 0.8, 0: token 1 and 3 cannot be drawn, 0.2 is the first number that gives token 2."""
    probs = torch.tensor([[0.2, 0.0, 0.8, 0.0]], dtype=torch.float64)
    assert draw(probs, uniform=torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]
    assert draw(probs * 7, uniform=torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def test_draws_follow_the_law() -> None:
    probs = torch.softmax(torch.linspace(-3, 3, 12), dim=0)
    count = 40_000
    uniform = uniforms(torch.arange(count), positions=torch.full((count,), 17))
    tokens = draw(probs.expand(count, -1), uniform=uniform)
    expected = probs.double() * count
    chi_square = ((tokens.bincount(minlength=12) - expected) ** 2 / expected).sum().item()
    assert chi_square < 11 + 5 * (2 * 11) ** 0.5


def test_a_draw_does_not_depend_on_the_rest_of_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.softmax(torch.randn(32, 50, generator=generator), dim=-1)
    seeds, positions = torch.arange(32) * 7, torch.arange(32)
    together = draw(probs, uniform=uniforms(seeds, positions=positions))
    alone = [
        draw(probs[i : i + 1], uniform=uniforms(seeds[i : i + 1], positions=positions[i : i + 1])).item()
        for i in range(32)
    ]
    assert together.tolist() == alone


@given(
    st.lists(st.floats(0, 1, width=32), min_size=2, max_size=9).filter(lambda row: sum(row) > 1e-3),
    st.floats(0, 0.999999),
)
def test_top_1_is_greedy_whatever_the_number(row: list[float], uniform: float) -> None:
    probs = torch.tensor([row])
    kept = kept_tokens(probs, top_k=torch.tensor([1]), top_p=torch.tensor([1.0]), min_p=torch.tensor([0.0]))
    assert draw(probs * kept, uniform=torch.tensor([uniform], dtype=torch.float64)).item() == row.index(max(row))
