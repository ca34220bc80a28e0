"""Before training: do the engines sample with the adapter that they were given? An adapter of random numbers proves it.

The adapter of a run has no effect at its start, where B is zero: an engine that leaves it out samples the same. So the
policy gets random numbers in B for a moment, the engines get them by an ordinary sync, sample, and the ranks score the
tokens with the adapter, without it, and with it wrongly scaled. `trainer/run/loop.py` calls `probe_adapter` once.

Digests find a single wrong tensor; this finds what they cannot: numbers that arrived and are not used, or not so. In
float32 it finds a fault of one layer. In coarser types the fault of one layer among hundreds may hide in the rounding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from rollout.collect.requests import make_sample
from rollout.config import DType, Quantization
from rollout.group.engine_group import EngineGroup
from trainer.batch.packing import micro_batch
from trainer.cluster.policy_group import PolicyGroup
from trainer.cluster.weight_sync import sync_weights
from trainer.config.train import TrainConfig
from trainer.run.probe import CLEARLY_BETTER, MIN_TOKENS_OF_ONE, ProbeError, mean_gap, probe_requests, tolerance_of
from trainer.run.task import Task

SIZES = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Sizes of the random adapter, tried in turn until its effect is clear: s B A has a root mean square of
size / sqrt(in), about that of the weights at 1."""
CLEAR_ROUNDINGS = 8.0
"""The effect, the mean |log-prob with the adapter - without it|, is clear at so many times the difference of engine and
trainer that there is anyway. A much larger adapter hides its own scale: normalisation takes it out again."""
LEAST_EFFECT, EXACT_EFFECT = 0.01, 0.5
"""Least clear effects in nats; the second where nothing rounds, so that one layer of hundreds shows."""
SMALLEST_EFFECT = 1e-6
AS_IT_IS, WITHOUT = "of the adapter as it is", "of the model without its adapter"
LARGEST_SHARE = 0.4
"""Engine and trainer may differ by this share of the adapter's effect. Measured on SmolLM2: 0.29 with an int8 engine,
which rounds most, 0.11 in bfloat16. An adapter of twice its scale, or half of it, differs by half of its effect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterProbeReport:
    """Result of the probe."""

    num_tokens: int
    mean_gap: float
    """Mean |log-prob of the engine - of the trainer with the adapter|."""
    effect: float
    """Mean |log-prob of the engine - of the trainer without the adapter|."""
    seconds: float

    def __str__(self) -> str:
        return (
            f"adapter proven in use on {self.num_tokens} tokens: with random numbers in it, engine and trainer differ "
            f"by {self.mean_gap:.1e} on average, the engine and the model without it by {self.effect:.1e}, "
            f"in {self.seconds:.1f} s"
        )


def probe_adapter(
    config: TrainConfig, task: Task, policy: PolicyGroup, engines: EngineGroup, *, policy_version: int, noise: float
) -> AdapterProbeReport:
    """Prove that every engine samples with the adapter it is given; raises ProbeError that says what it seems to do.

    Engines and ranks hold the adapter of `policy_version` before and after. `noise` is the mean |difference| of their
    log-probs with it, nats.
    """
    started, limit = time.perf_counter(), exact_limit(config)
    clear = max(CLEAR_ROUNDINGS * noise, LEAST_EFFECT) if math.isinf(limit) else EXACT_EFFECT
    for number, size in enumerate(SIZES, start=1):
        # Other numbers each time, and others than the run begins with: an engine that keeps old ones shows.
        with policy.resident():
            policy.begin_adapter_probe(seed=config.run.seed + number, size=size)
        sync_weights(policy, engines, policy_version=policy_version)
        reported, scores = _sample_and_score(config, task, policy, engines)
        if mean_gap(scores[AS_IT_IS], scores[WITHOUT]) >= clear:
            break
    sync_weights(policy, engines, policy_version=policy_version)
    judge_adapter(reported, scores, limit=limit)
    return AdapterProbeReport(
        num_tokens=sum(map(len, reported)),
        mean_gap=mean_gap(reported, scores[AS_IT_IS]),
        effect=mean_gap(reported, scores[WITHOUT]),
        seconds=time.perf_counter() - started,
    )


def exact_limit(config: TrainConfig) -> float:
    """Largest mean |difference| in nats, whatever the effect of the adapter; infinite where rounding may exceed it."""
    is_exact = config.rollout.dtype is DType.float32 and config.policy.dtype is DType.float32
    return tolerance_of(config) if is_exact and config.rollout.quantization is Quantization.none else math.inf


def judge_adapter(
    reported: Sequence[Tensor], scores: Mapping[str, Sequence[Tensor]], *, limit: float = math.inf
) -> None:
    """Raise ProbeError, naming what explains it best, unless the engines' log-probs are those with the adapter.

    Args:
        reported: [R] log-probs of each response, from the engine.
        scores: explanation -> the trainer's under it; AS_IT_IS and WITHOUT among them.
        limit: largest mean |difference|, besides the share of the adapter's effect.
    """
    gaps = {name: mean_gap(reported, each) for name, each in scores.items()}
    ratios = [
        mean_gap([mine], [used]) / max(mean_gap([mine], [unused]), SMALLEST_EFFECT)
        for mine, used, unused in zip(reported, scores[AS_IT_IS], scores[WITHOUT], strict=True)
        if len(mine) >= MIN_TOKENS_OF_ONE
    ]
    is_right = gaps[AS_IT_IS] <= min(limit, LARGEST_SHARE * gaps[WITHOUT])
    if is_right and max(ratios, default=0.0) <= 1.0:
        return
    best = min(gaps, key=lambda name: gaps[name])
    what = f"They are log-probs {best} (then they differ by {gaps[best]:.1e})"
    if gaps[best] * CLEARLY_BETTER > gaps[AS_IT_IS]:
        what = "The engine uses other numbers in some layers, or those of other layers"
        if is_right:
            what = "Some responses agree and some do not: one engine of several differs; look at its log"
    raise ProbeError(
        "phase adapter probe: the engine does not sample with the adapter that it was given: with random numbers in "
        f"it, engine and trainer differ by {gaps[AS_IT_IS]:.2g} nats on average over {sum(map(len, reported))} tokens, "
        f"the engine and the model without it by {gaps[WITHOUT]:.2g}. {what}. Nothing is trained; "
        "policy.lora.merge=true sends the engines weights with the adapter added to them"
    )


def _sample_and_score(
    config: TrainConfig, task: Task, policy: PolicyGroup, engines: EngineGroup
) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """(the engines' log-probs of each response, explanation -> the trainer's) with the random adapter.

    The ranks have their own adapter again afterwards, the engines do not.
    """
    requests = probe_requests(config, task.dataset.train, stop_token_ids=task.stop_token_ids)
    with engines.resident():
        generations = engines.generate(requests)
    samples = [make_sample(request, each) for request, each in zip(requests, generations, strict=True)]
    micros = [micro_batch([sample]) for sample in samples]

    def scored(factor: float) -> list[Tensor]:
        answers = policy.logprobs(micros, adapter_factor=factor)
        return [answer[micro.response_index] for answer, micro in zip(answers, micros, strict=True)]

    scale = config.policy.lora.alpha / config.policy.lora.rank
    with policy.resident():
        scores = {AS_IT_IS: scored(1.0), WITHOUT: scored(0.0)}
        if scale != 1.0:
            scores["of an adapter that is not multiplied by alpha / rank"] = scored(1 / scale)
            scores["of an adapter that is multiplied by alpha / rank twice"] = scored(scale)
        policy.end_adapter_probe()
        scores["of the adapter that the engine had before"] = scored(1.0)
    return [micro.rollout_logprobs[micro.response_index] for micro in micros], scores
