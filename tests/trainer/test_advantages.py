"""Advantages of a step on the ranks: from rewards, whatever the packing; without a value until they are set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from policy_cases import make_config
from test_packing import make_group, make_sample, pack_samples

from algorithms.config import AdvantageConfig, Baseline, Estimator
from trainer.batch.packing import micro_batch
from trainer.batch.train_batch import present
from trainer.policy.advantages import set_sample_advantages, set_token_advantages


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
