"""The first hour on GPUs: its page has the numbers that are calculated, and room for the measured ones."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_style import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import gpu_expectations
from gpu_expectations import RUNS, FirstRun, group, planned, rollout_s, train_s

PAGE = (ROOT / "docs" / "first_gpu_run.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_the_page_has_the_run_and_its_numbers(run: FirstRun, tmp_path: Path) -> None:
    recipe, *words = shlex.split(run.command)
    [after] = re.findall(rf"parity train {re.escape(recipe)}(?![\w.])(.*?)(?=parity train|\Z)", PAGE, re.DOTALL)
    assert all(word in after for word in words)
    for row in gpu_expectations.rows(run, tmp_path):
        assert row.removesuffix("|").strip() in after


def test_the_numbers_follow_the_model_and_its_lengths(tmp_path: Path) -> None:
    small, large = RUNS[0], RUNS[2]
    config, plan, shape = planned(small, tmp_path)
    assert plan.rank is not None and not plan.takes_turns
    # 6 FLOPs per parameter and token at the rate of the products are the least that training can take.
    tokens = group(small, config).num_tokens * config.batch.prompts_per_step
    seconds, mfu = train_s(small, config, shape, adapter=0)
    assert 6 * shape.matrix_parameters * tokens / gpu_expectations.PRODUCTS < seconds < 2.0
    assert 0.1 < mfu < 0.5
    longer = replace(small, response=2 * small.response)
    assert train_s(longer, config, shape, adapter=0)[0] > 1.5 * seconds
    assert rollout_s(longer, config, shape) > 1.5 * rollout_s(small, config, shape)
    # 7B reads 15.2 GB per decode step.
    config, plan, shape = planned(large, tmp_path)
    steps = max(group(large, config).rests)
    assert rollout_s(large, config, shape) > steps * 15.2e9 / gpu_expectations.READS
    assert plan.takes_turns
