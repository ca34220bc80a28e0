"""Quantised and plain engines on the same prompts: mismatch and reward of each kind, for `trainer/run/loop.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rollout.types import Sample, SampleGroup


def metrics_by_kind(
    groups: Iterable[SampleGroup], sample_k3: Mapping[tuple[int, int], float]
) -> dict[str, float | None]:
    """mismatch/k3 and reward/accuracy of quantised and of plain engines; nothing unless there are samples of both.

    `sample_k3` maps (prompt_id, sample_index) to the mean K3 of the response; here every token counts the same, as in
    mismatch/k3.
    """
    samples = [sample for group in groups for sample in group.samples]
    kinds = {kind: [sample for sample in samples if sample.quantized == kind] for kind in (True, False)}
    if not all(kinds.values()):
        return {}
    metrics: dict[str, float | None] = {}
    for kind, name in ((True, "quantized"), (False, "plain")):
        metrics[f"mismatch/k3_{name}"] = _token_mean(kinds[kind], sample_k3)
        metrics[f"reward/accuracy_{name}"] = sum(sample.correct is True for sample in kinds[kind]) / len(kinds[kind])
    return metrics


def _token_mean(samples: Iterable[Sample], sample_k3: Mapping[tuple[int, int], float]) -> float | None:
    """None if no sample has a K3."""
    scored = [
        (sample.num_response_tokens, sample_k3[key])
        for sample in samples
        if (key := (sample.prompt_id, sample.sample_index)) in sample_k3
    ]
    tokens = sum(count for count, _ in scored)
    return sum(count * value for count, value in scored) / tokens if tokens else None
