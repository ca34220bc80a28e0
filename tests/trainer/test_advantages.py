"""Advantages of a step on the ranks: from rewards, whatever the packing; without a value until they are set."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest
import torch
from policy_cases import make_config, make_samples
from test_packing import make_group, make_sample, pack_samples

from algorithms.config import (
    AdvantageConfig,
    Baseline,
    BaselineScope,
    Estimator,
    KLEstimator,
    KLPlacement,
    Level,
    MISConfig,
    ReferenceKLConfig,
)
from trainer.batch.packing import micro_batch
from trainer.batch.train_batch import present
from trainer.config.train import TrainConfig
from trainer.policy.advantages import kept_tokens, set_sample_advantages, set_token_advantages


def test_advantages_are_relative_to_their_own_group_wherever_it_is_packed() -> None:
    groups = [make_group(0, [1.0, 0.0]), make_group(1, [5.0, 5.0, 5.0])]
    samples = [sample for group in groups for sample in group.samples]
    batch = pack_samples([samples], num_ranks=2, max_tokens=14, policy_version=0)
    config = make_config(Path("model"), advantage=AdvantageConfig(estimator=Estimator.dr_grpo))
    expected = {(0, 0): 0.5, (0, 1): -0.5, (1, 0): 0.0, (1, 1): 0.0, (1, 2): 0.0}
    found = {}
    for minis in batch.ranks:
        assert set_sample_advantages(config, minis, batch.samples).tolist() == list(expected.values())
        for micro in minis[0].micro_batches:
            advantages = present(micro.advantages, "advantages")
            assert not advantages[~micro.response_mask].any()
            for number, key in enumerate(micro.sample_keys):
                tokens = slice(*micro.cu_seqlens[number : number + 2].tolist())
                [found[key]] = set(advantages[tokens][micro.response_mask[tokens]].tolist())
    assert found == expected


def test_a_micro_batch_has_no_advantages_before_they_are_set() -> None:
    micro = micro_batch([make_sample()])
    assert micro.advantages is None
    with pytest.raises(RuntimeError, match="advantages of a micro-batch must be set before the first update"):
        present(micro.advantages, "advantages")
    config = make_config(Path("model"), advantage=AdvantageConfig(estimator=Estimator.gae))
    batch = pack_samples([[make_sample()]], num_ranks=1, max_tokens=100, policy_version=0)
    with pytest.raises(RuntimeError, match="old_values of a micro-batch must be set before the first update"):
        set_token_advantages(config, batch.ranks[0], batch.samples)


@pytest.mark.parametrize("estimator", Estimator)
def test_groups_of_one_are_refused_where_the_baseline_is_the_group(estimator: Estimator) -> None:
    config = make_config(Path("model"), advantage=AdvantageConfig(estimator=estimator))
    config.batch = replace(config.batch, group_size=1)
    found = [str(problem) for problem in config.conflicts() if problem.key == "batch.group_size"]
    if estimator.baseline is Baseline.group:
        assert config.min_group_size == 2
        [refusal] = found
        assert refusal.endswith("These need no groups: reinforce, reinforce_pp, gae.")
    else:
        assert (found, config.min_group_size) == ([], 1)


def on_ranks(config: TrainConfig, num_ranks: int) -> tuple[dict[tuple[int, int], list[float]], int]:
    """Sample -> its advantages token by token, and the tokens that the correction keeps; every rank is a thread."""
    batch = pack_samples([make_samples()], num_ranks=num_ranks, max_tokens=20, policy_version=0)
    micros = [micro for minis in batch.ranks for micro in minis[0].micro_batches]
    for micro in micros:
        mask, tokens = micro.response_mask, micro.token_ids
        micro.old_logprobs = torch.where(mask, micro.rollout_logprobs - 0.02 * (tokens % 7), 0.0)
        micro.ref_logprobs = torch.where(mask, micro.rollout_logprobs - 0.03 * (tokens % 5), 0.0)
        micro.old_values = torch.where(mask, 0.1 * (tokens % 3), 0.0)
    parts: list[torch.Tensor] = []
    meeting = Barrier(num_ranks, timeout=60)

    def add_up(total: torch.Tensor) -> None:
        parts.append(total.clone())
        meeting.wait()
        total.copy_(torch.stack(parts).sum(0))

    compute = set_token_advantages if config.has_critic else set_sample_advantages
    with ThreadPoolExecutor(num_ranks) as ranks:
        list(ranks.map(lambda minis: compute(config, minis, batch.samples, reduce=add_up), batch.ranks))
    found = {}
    for micro in micros:
        starts, advantages = micro.cu_seqlens.tolist(), present(micro.advantages, "advantages")
        for number, key in enumerate(micro.sample_keys):
            found[key] = advantages[starts[number] : starts[number + 1]].tolist()
    return found, sum(int(kept_tokens(config, micro).sum()) for micro in micros)


@pytest.mark.parametrize(
    ("estimator", "scope"),
    [
        (estimator, scope)
        for estimator in Estimator
        for scope in BaselineScope
        if estimator is not Estimator.reinforce or scope is BaselineScope.all  # it has no baseline
    ],
)
def test_advantages_do_not_depend_on_the_number_of_ranks(estimator: Estimator, scope: BaselineScope) -> None:
    """Nor where ranks must add up what they have: the samples that are kept, the KL in the reward, moments of tokens.

    Three ranks: one has fewer micro-batches with a sample than the others.
    """
    advantage = AdvantageConfig(estimator=estimator, baseline_scope=scope)
    correction = MISConfig(level=Level.sequence, low=0.8, high=1.25)
    config = replace(
        make_config(Path("model"), correction=correction, advantage=advantage),
        reference=ReferenceKLConfig(coef=1.0, estimator=KLEstimator.k1, placement=KLPlacement.reward),
    )
    expected, kept = on_ranks(config, 1)
    assert 0 < kept < sum(sample.num_response_tokens for sample in make_samples())
    for num_ranks in (2, 3):
        found, _ = on_ranks(config, num_ranks)
        assert found.keys() == expected.keys()
        for key, values in found.items():
            assert values == pytest.approx(expected[key], abs=1e-5)
