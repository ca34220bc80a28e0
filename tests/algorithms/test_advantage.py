"""Advantages against numbers worked by hand, for groups of different sizes in any order."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.advantage import ADVANTAGES
from algorithms.config import Estimator

# Group 7: rewards 1, 0, 0, 1 (mean 0.5, std sqrt(1/3)); group -2: 3, 5 (mean 4, std sqrt 2); group 40: 9 alone.
REWARDS = torch.tensor([1.0, 3.0, 0.0, 9.0, 0.0, 5.0, 1.0])
GROUPS = torch.tensor([7, -2, 7, 40, 7, -2, 7])


def test_the_table_has_one_entry_per_estimator() -> None:
    assert set(ADVANTAGES) == {estimator.name for estimator in Estimator}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [math.sqrt(0.75), -math.sqrt(0.5), -math.sqrt(0.75), 0, -math.sqrt(0.75), math.sqrt(0.5), 0.8660254]),
        ("dr_grpo", [0.5, -1, -0.5, 0, -0.5, 1, 0.5]),
        ("rloo", [2 / 3, -2, -2 / 3, 0, -2 / 3, 2, 2 / 3]),
    ],
)
def test_closed_form(name: str, expected: list[float]) -> None:
    advantages = ADVANTAGES[name](REWARDS, GROUPS, epsilon=1e-9)
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages, torch.tensor(expected), atol=1e-6, rtol=1e-6)


def test_epsilon_is_added_to_the_standard_deviation() -> None:
    advantages = ADVANTAGES["grpo"](torch.tensor([3.0, 5.0]), torch.tensor([0, 0]), epsilon=1.0)
    torch.testing.assert_close(advantages, torch.tensor([-1.0, 1.0]) / (math.sqrt(2) + 1))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_equal_rewards_give_exactly_zero(name: str) -> None:
    # The mean of three times 0.9 is not 0.9 in float32; the difference over epsilon would be an advantage.
    rewards = torch.tensor([0.9, 0.9, 0.9, 0.7, 0.7])
    advantages = ADVANTAGES[name](rewards, torch.tensor([0, 0, 0, 1, 1]), epsilon=1e-12)
    assert advantages.tolist() == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_no_samples(name: str) -> None:
    assert ADVANTAGES[name](torch.zeros(0), torch.zeros(0, dtype=torch.long), epsilon=1e-6).tolist() == []


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"\[2\] and \[3\]"):
        ADVANTAGES["grpo"](torch.zeros(2), torch.zeros(3, dtype=torch.long), epsilon=1e-6)


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(sorted(ADVANTAGES)),
    samples=st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 4)), min_size=1, max_size=20),
    seed=st.integers(0, 2**31),
)
def test_groups_do_not_see_each_other_or_the_order(name: str, samples: list[tuple[int, int]], seed: int) -> None:
    groups = torch.tensor([group for group, _ in samples])
    rewards = torch.tensor([float(reward) for _, reward in samples])
    advantages = ADVANTAGES[name](rewards, groups, epsilon=1e-6)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(ADVANTAGES[name](rewards[order], groups[order], epsilon=1e-6), advantages[order])
    for group in groups.unique().tolist():
        member = groups == group
        alone = ADVANTAGES[name](rewards[member], groups[member], epsilon=1e-6)
        torch.testing.assert_close(advantages[member], alone)
        assert abs(alone.sum().item()) < 1e-4
