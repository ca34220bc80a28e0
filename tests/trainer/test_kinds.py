"""K3 and accuracy by kind of engine: token means, both kinds or nothing."""

from __future__ import annotations

import pytest
from test_packing import make_sample

from rollout.types import Prompt, SampleGroup
from trainer.run.kinds import metrics_by_kind


def groups() -> list[SampleGroup]:
    """Two prompts with a long and a short response of each kind."""
    found = []
    for prompt_id in (0, 1):
        group = SampleGroup(prompt=Prompt(prompt_id=prompt_id, token_ids=[1], text="", answer=""))
        for index, (length, quantized, correct) in enumerate([(3, True, True), (1, True, False), (2, False, True)]):
            sample = make_sample(prompt_id=prompt_id, index=index, response=length)
            sample.quantized, sample.correct = quantized, correct
            group.samples.append(sample)
        found.append(group)
    return found


def test_every_token_counts_the_same() -> None:
    k3 = {(0, 0): 1.0, (0, 1): 5.0, (0, 2): 0.25, (1, 0): 3.0, (1, 1): 1.0}
    metrics = metrics_by_kind(groups(), k3)
    assert metrics["mismatch/k3_quantized"] == pytest.approx((3 * 1 + 1 * 5 + 3 * 3 + 1 * 1) / 8)
    assert metrics["mismatch/k3_plain"] == 0.25  # the other plain sample was not scored
    assert metrics["reward/accuracy_quantized"] == 0.5 and metrics["reward/accuracy_plain"] == 1.0
    assert metrics_by_kind(groups(), {})["mismatch/k3_plain"] is None


def test_one_kind_alone_has_nothing_to_compare() -> None:
    alone = groups()
    for group in alone:
        group.samples = [sample for sample in group.samples if sample.quantized]
    assert metrics_by_kind(alone, {}) == {}
