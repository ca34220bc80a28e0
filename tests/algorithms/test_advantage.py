"""Advantages against numbers worked by hand, for groups of different sizes in any order, and under rejection."""

import math
import pickle
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.advantage import ADVANTAGES, sample_advantages
from algorithms.config.advantage import AdvantageConfig, Baseline, BaselineScope, Estimator
from algorithms.config.rules import ConfigError

# Group 7: rewards 1, 0, 0, 1 (mean 0.5, std sqrt(1/3)); group -2: 3, 5 (mean 4, std sqrt 2); group 40: 9 alone.
REWARDS = torch.tensor([1.0, 3.0, 0.0, 9.0, 0.0, 5.0, 1.0])
GROUPS = torch.tensor([7, -2, 7, 40, 7, -2, 7])
TOKENS = torch.tensor([1, 2, 3, 1, 2, 1, 4])

GROUPED = ("grpo", "dr_grpo", "rloo")
"""Estimators whose baseline is the group's alone."""
WHITENED = ("reinforce_pp", "reinforce_pp_baseline")
NAMES = [estimator.name for estimator in ADVANTAGES]


def test_the_table_has_one_entry_per_estimator() -> None:
    assert set(ADVANTAGES) | {Estimator.gae} == set(Estimator), "gae is one per token"
    assert set(NAMES) == {*GROUPED, *WHITENED, "reinforce"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [math.sqrt(0.75), -math.sqrt(0.5), -math.sqrt(0.75), 0, -math.sqrt(0.75), math.sqrt(0.5), 0.8660254]),
        ("dr_grpo", [0.5, -1, -0.5, 0, -0.5, 1, 0.5]),
        ("rloo", [2 / 3, -2, -2 / 3, 0, -2 / 3, 2, 2 / 3]),
        ("reinforce", [1.0, 3, 0, 9, 0, 5, 1]),
    ],
)
def test_closed_form(name: str, expected: list[float]) -> None:
    advantages = sample_advantages(Estimator[name], REWARDS, GROUPS, epsilon=1e-9)
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages, torch.tensor(expected), atol=1e-6, rtol=1e-6)


def test_reinforce_pp_whitens_over_tokens() -> None:
    # Four tokens 2, 0, 0, 0: mean 0.5, variance 3/4, so sqrt(3) and -1/sqrt(3). Per sample it would be 1 and -1.
    advantages = sample_advantages(
        Estimator.reinforce_pp,
        torch.tensor([2.0, 0.0]),
        torch.tensor([0, 1]),
        epsilon=1e-9,
        num_tokens=torch.tensor([1, 3]),
    )
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages, torch.tensor([math.sqrt(3), -1 / math.sqrt(3)]))


def test_reinforce_pp_baseline_whitens_what_the_group_leaves() -> None:
    # Deviations 1, -1, 0, 0 on 1, 3, 2, 2 tokens: mean -2/8, variance 4/8 - 1/16 = 7/16.
    advantages = sample_advantages(
        Estimator.reinforce_pp_baseline,
        torch.tensor([3.0, 1.0, 5.0, 5.0]),
        torch.tensor([0, 0, 1, 1]),
        epsilon=1e-9,
        num_tokens=torch.tensor([1, 3, 2, 2]),
    )
    torch.testing.assert_close(advantages, torch.tensor([1.25, -0.75, 0.25, 0.25]) / math.sqrt(7 / 16))


@pytest.mark.parametrize("name", WHITENED)
def test_whitened_tokens_have_mean_0_and_mean_square_1(name: str) -> None:
    advantages = sample_advantages(Estimator[name], REWARDS, GROUPS, epsilon=1e-12, num_tokens=TOKENS)
    per_token = advantages.double().repeat_interleave(TOKENS)
    assert abs(per_token.mean().item()) < 1e-7
    assert per_token.square().mean().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name", WHITENED)
def test_whitening_needs_the_number_of_tokens(name: str) -> None:
    with pytest.raises(ValueError, match="num_tokens must hold"):
        sample_advantages(Estimator[name], REWARDS, GROUPS, epsilon=1e-6)


def test_a_sample_without_response_tokens_does_not_move_the_whitening() -> None:
    ids = torch.tensor([0, 1, 2])
    advantages = sample_advantages(
        Estimator.reinforce_pp, torch.tensor([2.0, 0.0, 50.0]), ids, epsilon=1e-9, num_tokens=torch.tensor([1, 3, 0])
    )
    torch.testing.assert_close(advantages[:2], torch.tensor([math.sqrt(3), -1 / math.sqrt(3)]))


def test_epsilon_is_added_to_the_standard_deviation() -> None:
    pair, one_group = torch.tensor([3.0, 5.0]), torch.tensor([0, 0])
    advantages = sample_advantages(Estimator.grpo, pair, one_group, epsilon=1.0)
    torch.testing.assert_close(advantages, torch.tensor([-1.0, 1.0]) / (math.sqrt(2) + 1))
    for name in WHITENED:  # the biased standard deviation of 3, 5 is 1
        whitened = sample_advantages(Estimator[name], pair, one_group, epsilon=1.0, num_tokens=torch.tensor([4, 4]))
        torch.testing.assert_close(whitened, torch.tensor([-0.5, 0.5]))


@pytest.mark.parametrize("name", [*GROUPED, "reinforce_pp_baseline"])
def test_equal_rewards_give_exactly_zero(name: str) -> None:
    # The mean of three times 0.9 is not 0.9 in float32; the difference over epsilon would be an advantage.
    rewards = torch.tensor([0.9, 0.9, 0.9, 0.7, 0.7])
    advantages = sample_advantages(
        Estimator[name], rewards, torch.tensor([0, 0, 0, 1, 1]), epsilon=1e-12, num_tokens=torch.tensor([3, 1, 4, 1, 5])
    )
    assert advantages.tolist() == [0, 0, 0, 0, 0]


def test_equal_rewards_in_the_whole_step_whiten_to_zero() -> None:
    rewards = torch.full((3,), 0.9)
    advantages = sample_advantages(
        Estimator.reinforce_pp, rewards, torch.tensor([0, 1, 2]), epsilon=1e-12, num_tokens=torch.tensor([3, 1, 7])
    )
    assert advantages.tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_no_samples(name: str) -> None:
    none = torch.zeros(0, dtype=torch.long)
    assert (
        sample_advantages(
            Estimator[name], torch.zeros(0), none, epsilon=1e-6, num_tokens=none, kept=none.bool()
        ).tolist()
        == []
    )


@pytest.mark.parametrize("name", NAMES)
def test_shapes_must_agree(name: str) -> None:
    two, three = torch.zeros(2), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"group_ids must both be \[N\], got \[2\] and \[3\]"):
        sample_advantages(Estimator[name], two, three, epsilon=1e-6, num_tokens=three[:2])
    with pytest.raises(ValueError, match=r"kept must both be \[N\], got \[2\] and \[3\]"):
        sample_advantages(Estimator[name], two, three[:2], epsilon=1e-6, num_tokens=three[:2], kept=three.bool())
    with pytest.raises(ValueError, match=r"num_tokens must both be \[N\], got \[2\] and \[3\]"):
        sample_advantages(Estimator[name], two, three[:2], epsilon=1e-6, num_tokens=three)


@settings(max_examples=50)
@given(
    name=st.sampled_from(GROUPED),
    samples=st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 4)), min_size=1, max_size=20),
    seed=st.integers(0, 2**31),
)
def test_groups_do_not_see_each_other_or_the_order(name: str, samples: list[tuple[int, int]], seed: int) -> None:
    groups = torch.tensor([group for group, _ in samples])
    rewards = torch.tensor([float(reward) for _, reward in samples])
    advantages = sample_advantages(Estimator[name], rewards, groups, epsilon=1e-6)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(
        sample_advantages(Estimator[name], rewards[order], groups[order], epsilon=1e-6), advantages[order]
    )
    for group in groups.unique().tolist():
        member = groups == group
        alone = sample_advantages(Estimator[name], rewards[member], groups[member], epsilon=1e-6)
        torch.testing.assert_close(advantages[member], alone)
        assert abs(alone.sum().item()) < 1e-4


# ---------------------------------------------------------------- rejection


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Group 0 keeps 1, 0, 2 (mean 1, std 1) and rejects 4; group 1 keeps 6 and rejects 8; group 2 keeps nothing.
        ("grpo", [0, -1, 3, 1, 0, 0, 0, 0]),
        ("dr_grpo", [0, -1, 3, 1, 0, 2, 0, 0]),
        ("rloo", [0, -1.5, 3, 1.5, 0, 2, 0, 0]),
        ("reinforce", [1, 0, 4, 2, 6, 8, 5, 7]),
    ],
)
def test_only_kept_samples_form_the_baseline(name: str, expected: list[float]) -> None:
    advantages = sample_advantages(
        Estimator[name],
        torch.tensor([1.0, 0, 4, 2, 6, 8, 5, 7]),
        torch.tensor([0, 0, 0, 0, 1, 1, 2, 2]),
        epsilon=1e-12,
        kept=torch.tensor([True, True, False, True, True, False, False, False]),
    )
    assert advantages.tolist() == expected


def test_only_kept_tokens_are_whitened() -> None:
    # Kept tokens 2, 0, 0, 0 as above; the rejected 8 is (8 - 0.5) / sqrt(0.75).
    kept = torch.tensor([True, False, True])
    rewards, tokens = torch.tensor([2.0, 8.0, 0.0]), torch.tensor([1, 100, 3])
    advantages = sample_advantages(
        Estimator.reinforce_pp, rewards, torch.tensor([0, 1, 2]), epsilon=1e-9, num_tokens=tokens, kept=kept
    )
    torch.testing.assert_close(advantages, torch.tensor([1.5, 7.5, -0.5]) / math.sqrt(0.75))
    # One group of 2, 0 (mean 1): deviations 1, 7, -1 on 1, 100, 3 tokens; kept mean -1/2, variance 3/4.
    grouped = sample_advantages(
        Estimator.reinforce_pp_baseline, rewards, torch.tensor([0, 0, 0]), epsilon=1e-9, num_tokens=tokens, kept=kept
    )
    torch.testing.assert_close(grouped, torch.tensor([1.5, 7.5, -0.5]) / math.sqrt(0.75))


@pytest.mark.parametrize("name", [*GROUPED, *WHITENED])
def test_nothing_kept_is_zero_and_everything_kept_is_the_default(name: str) -> None:
    arguments = {"epsilon": 1e-6, "num_tokens": TOKENS}
    nothing = sample_advantages(Estimator[name], REWARDS, GROUPS, kept=torch.zeros(7, dtype=torch.bool), **arguments)
    assert nothing.tolist() == [0] * 7
    everything = sample_advantages(Estimator[name], REWARDS, GROUPS, kept=torch.ones(7, dtype=torch.bool), **arguments)
    assert torch.equal(everything, sample_advantages(Estimator[name], REWARDS, GROUPS, **arguments))


@pytest.mark.parametrize("name", ["reinforce_pp_baseline", "grpo"])
def test_a_rejected_sample_is_never_divided_by_epsilon_alone(name: str) -> None:
    advantages = sample_advantages(
        Estimator[name],
        torch.tensor([1.0, 1.0, 0.0]),
        torch.tensor([0, 0, 0]),
        epsilon=1e-6,
        num_tokens=torch.tensor([2, 2, 2]),
        kept=torch.tensor([True, True, False]),
    )
    assert advantages.tolist() == [0, 0, 0]


@pytest.mark.parametrize("scope", BaselineScope)
def test_what_the_scope_of_the_baseline_optimises(scope: BaselineScope) -> None:
    """Exact expectation of the kept samples' gradient for rloo, over all groups of three one-token responses.

    kept: proportional to the gradient of E[r | kept]. all: that of E[kept r] - E[r] P(kept) with E[r] held fixed, which
    has one more term: it raises the probability of being kept wherever the kept responses are the better ones.
    """
    logits = torch.tensor([0.3, -0.4, 0.1], dtype=torch.float64, requires_grad=True)
    rewards, keep = torch.tensor([1.0, 0.0, 3.0]), torch.tensor([True, True, False])
    log_pi = logits.log_softmax(0)
    pi = log_pi.exp()
    groups = torch.tensor(list(product(range(3), repeat=3)))
    flat = groups.flatten()
    advantages = sample_advantages(
        Estimator.rloo,
        rewards[flat],
        torch.arange(27).repeat_interleave(3),
        epsilon=1e-6,
        kept=keep[flat] if scope is BaselineScope.kept else None,
    ).reshape(27, 3)
    weight = pi.detach()[groups].prod(1, keepdim=True) * keep[groups] / 3
    (actual,) = torch.autograd.grad((weight * advantages * log_pi[groups]).sum(), logits, retain_graph=True)
    kept_mass = (pi * keep).sum()
    conditional = (pi * keep * rewards).sum() / kept_mass
    if scope is BaselineScope.kept:
        another_is_kept = 1 - (1 - kept_mass.detach()) ** 2
        target = another_is_kept * kept_mass.detach() * conditional
    else:
        target = (pi * keep * rewards).sum() - (pi * rewards).sum().detach() * kept_mass
    (expected,) = torch.autograd.grad(target, logits, retain_graph=True)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-7)
    (other,) = torch.autograd.grad(kept_mass, logits)
    if scope is BaselineScope.kept:  # E[r | kept] does not change when the kept mass is scaled as a whole
        assert abs(actual[2].item()) < 1e-7 < abs(other[2].item())
    else:
        assert abs(actual[2].item()) > 0.05


# ---------------------------------------------------------------- host and configuration


@pytest.mark.parametrize("name", NAMES)
def test_no_value_is_read_on_the_host(name: str) -> None:
    with torch.device("meta"):
        rewards, groups, tokens = torch.empty(6), torch.empty(6, dtype=torch.long), torch.empty(6, dtype=torch.long)
        kept = torch.empty(6, dtype=torch.bool)
    advantages = sample_advantages(Estimator[name], rewards, groups, epsilon=1e-6, num_tokens=tokens, kept=kept)
    assert advantages.is_meta and advantages.shape == (6,) and advantages.dtype == torch.float32


def test_a_scope_without_a_baseline_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"baseline_scope has no effect with estimator=reinforce.*got kept\."):
        AdvantageConfig(estimator=Estimator.reinforce, baseline_scope=BaselineScope.kept)
    for estimator in Estimator:
        if estimator is not Estimator.reinforce:
            AdvantageConfig(estimator=estimator, baseline_scope=BaselineScope.kept)
    AdvantageConfig(estimator=Estimator.reinforce)


@pytest.mark.parametrize("name", NAMES)
def test_an_estimator_says_that_its_baseline_is_the_group(name: str) -> None:
    """With groups of one sample it would train on zeros."""
    rewards, tokens = torch.tensor([1.0, 0.0, 3.0]), torch.tensor([2, 5, 3])
    found = sample_advantages(Estimator[name], rewards, torch.arange(3), epsilon=1e-6, num_tokens=tokens)
    assert (Estimator[name].baseline is Baseline.group) is not found.any().item()


def test_every_estimator_survives_a_copy_with_its_baseline() -> None:
    for estimator in Estimator:
        assert pickle.loads(pickle.dumps(estimator)) is estimator
        assert Estimator(estimator.name) is Estimator[estimator.name] is estimator
