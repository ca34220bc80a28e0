"""Before training: do the engines sample with the adapter that they were given? An adapter of random numbers proves it.

The adapter of a run has no effect at its start, where B is zero: an engine that leaves it out samples the same. So the
policy gets random numbers in A and B for a moment, the engines get them by an ordinary sync, sample, and the ranks
score the tokens with the adapter and without it. `trainer/run/loop.py` calls `probe_adapter` once.

Digests find a single wrong tensor; this finds what they cannot: numbers that arrived and are not used, or not so. In
float32 it finds a fault of one layer. In coarser types the fault of one layer among hundreds may hide in the rounding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rollout.config import DType, Quantization
from rollout.group.engine_group import EngineGroup
from trainer.batch.train_batch import MicroBatch
from trainer.cluster.policy_group import PolicyGroup
from trainer.cluster.weight_sync import sync_weights
from trainer.config.train import TrainConfig
from trainer.run.probe import CLEARLY_BETTER, MIN_TOKENS_OF_ONE, ProbeError, mean_gap, sampled, scored, tolerance_of
from trainer.run.task import Task

SIZES = (0.1, 0.3, 1.0, 3.0)
"""Sizes of the random adapter, tried in turn until its effect is clear: s B A has a root mean square of
size / sqrt(in), about that of the weights at 1."""
CLEAR_ROUNDINGS = 8.0
"""The effect, the mean |log-prob with the adapter - without it|, is clear at so many times the difference of engine and
trainer that there is anyway. A much larger adapter hides its own scale: normalisation takes it out again."""
LEAST_EFFECT, EXACT_EFFECT = 0.01, 0.5
"""Least clear effects in nats; the second where nothing rounds, so that one layer of hundreds shows."""
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
        micros = sampled(config, task, engines, policy_version=policy_version)
        reported = [micro.rollout_logprobs[micro.response_index] for micro in micros]
        with policy.resident():
            used, unused = scored(policy, micros), scored(policy, micros, adapter_factor=0.0)
        if mean_gap(used, unused) >= clear:
            break
    if not is_in_use(reported, used, unused, limit=limit):
        raise ProbeError(_refusal(config, policy, micros))
    with policy.resident():
        policy.end_adapter_probe()
    sync_weights(policy, engines, policy_version=policy_version)
    return AdapterProbeReport(
        num_tokens=sum(map(len, reported)),
        mean_gap=mean_gap(reported, used),
        effect=mean_gap(reported, unused),
        seconds=time.perf_counter() - started,
    )


def exact_limit(config: TrainConfig) -> float:
    """Largest mean |difference| in nats, whatever the effect of the adapter; infinite where rounding may exceed it."""
    is_exact = config.rollout.dtype is DType.float32 and config.policy.dtype is DType.float32
    return tolerance_of(config) if is_exact and config.rollout.quantization is Quantization.none else math.inf


def is_in_use(
    reported: Sequence[Tensor], used: Sequence[Tensor], unused: Sequence[Tensor], *, limit: float = math.inf
) -> bool:
    """True if the engines' log-probs are those with the adapter, over all responses and in each of them.

    Args:
        reported: [R] log-probs of each response, from the engine.
        used: the trainer's with the adapter.
        unused: the trainer's without it.
        limit: largest mean |difference|, besides the share of the adapter's effect.
    """
    # One engine of several may be the one that leaves it out.
    is_nearer = all(
        mean_gap([mine], [with_it]) <= mean_gap([mine], [without])
        for mine, with_it, without in zip(reported, used, unused, strict=True)
        if len(mine) >= MIN_TOKENS_OF_ONE
    )
    return is_nearer and mean_gap(reported, used) <= min(limit, LARGEST_SHARE * mean_gap(reported, unused))


def _refusal(config: TrainConfig, policy: PolicyGroup, micros: Sequence[MicroBatch]) -> str:
    """The text of the error, with what explains the engines' log-probs best."""
    reported = [micro.rollout_logprobs[micro.response_index] for micro in micros]
    factors = {"of the adapter as it is": 1.0, "of the model without its adapter": 0.0}
    scale = config.policy.lora.alpha / config.policy.lora.rank
    if scale != 1.0:
        factors["of an adapter that is not multiplied by alpha / rank"] = 1 / scale
        factors["of an adapter that is multiplied by alpha / rank twice"] = scale
    with policy.resident():
        gaps = {
            name: mean_gap(reported, scored(policy, micros, adapter_factor=factor)) for name, factor in factors.items()
        }
        policy.end_adapter_probe()
        gaps["of the adapter that the engine had before"] = mean_gap(reported, scored(policy, micros))
    gap, without, *_ = gaps.values()
    best = min(gaps, key=lambda name: gaps[name])
    what = f"They are log-probs {best} (then they differ by {gaps[best]:.1e})"
    if gaps[best] * CLEARLY_BETTER > gap:
        what = (
            "The engine uses other numbers in some layers, or those of other layers, or one engine of several is wrong"
        )
    return (
        "phase adapter probe: the engine does not sample with the adapter that it was given: with random numbers in "
        f"it, engine and trainer differ by {gap:.2g} nats on average over {sum(map(len, reported))} tokens, the "
        f"engine and the model without it by {without:.2g}. {what}. Nothing is trained; policy.lora.merge=true sends "
        "the engines weights with the adapter added to them"
    )
