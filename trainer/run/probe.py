"""Before training: do the engines' log-probs mean what the trainer takes them for? A few tokens prove it.

The engines sample from the weights that they were just given; the ranks score the same tokens with the same weights.
At the right temperature and position both agree within rounding. `trainer/run/loop.py` calls `probe_logprobs` once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.kl import k3
from rollout.collect.filters import invalid_reason
from rollout.collect.requests import SeedSource, make_sample, sampling_params
from rollout.config import DType, Quantization, Routing
from rollout.group.engine_group import EngineGroup
from rollout.types import GenerateRequest, Prompt, Sample
from rollout.weights.packed_weights import DTYPES
from trainer.batch.packing import micro_batch
from trainer.batch.train_batch import MicroBatch
from trainer.cluster.policy_group import PolicyGroup
from trainer.cluster.weight_sync import sync_weights
from trainer.config.train import TrainConfig
from trainer.run.task import Task

PROBE_STEP = -3
"""Stands for the step in sampling seeds: no training step and no evaluation has it."""
PROMPTS_PER_ENGINE = 4
MAX_TOKENS = 16
"""Sampled for each prompt at most."""
ROUNDINGS = 16
"""A mean difference of so many roundings of the coarser type is allowed: 0.125 in bfloat16. Tests with random models in
bfloat16 differ by less than a third of it, a log-prob at the wrong temperature by more."""
FLOAT32_TOLERANCE = 1e-3
"""Kernels add up in different orders; more than that is not rounding in float32."""
QUANTIZED_TOLERANCE = {Quantization.fp8: 0.25, Quantization.int8: 0.25, Quantization.int4: 0.5}
"""Tolerances where every engine is quantised. On the arithmetic model the mean difference is below a tenth of the
tolerance."""
CLEARLY_BETTER = 3.0
"""An explanation is found if the difference is smaller by this factor under it."""
MIN_TOKENS_OF_ONE = 8
"""From so many tokens on, a response is also judged by itself: one engine of several may be the one that is wrong."""


class ProbeError(RuntimeError):
    """The engine's log-probs are not the trainer's: says what they seem to be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeReport:
    """Result of the probe."""

    num_samples: int
    num_tokens: int
    mean_gap: float
    """Mean |log-prob of the engine - of the trainer|."""
    max_gap: float
    tolerance: float
    k3: float
    """Mean of exp(d) - 1 - d with d = trainer - engine: an estimate of the KL, without a step in between."""
    seconds: float

    def __str__(self) -> str:
        return (
            f"log-probs proven on {self.num_tokens} tokens of {self.num_samples} responses: engine and trainer differ "
            f"by {self.mean_gap:.1e} on average (allowed: {self.tolerance:.1e}), {self.max_gap:.1e} at most, "
            f"K3 {self.k3:.1e}, in {self.seconds:.1f} s"
        )


Scores = Callable[[float], list[Tensor]]
"""Temperature -> the trainer's log-probs [R] of the response tokens of each sample."""


def probe_logprobs(
    config: TrainConfig, task: Task, policy: PolicyGroup, engines: EngineGroup, *, policy_version: int
) -> ProbeReport:
    """Sample on every engine, score on the ranks, compare; raises ProbeError if the two disagree.

    Engines and ranks hold the weights of `policy_version`, before and after.
    """
    started = time.perf_counter()
    micros = sampled(config, task, engines, policy_version=policy_version)

    def scores(temperature: float) -> list[Tensor]:
        return scored(policy, micros, temperature=temperature)

    def without_adapter() -> list[Tensor]:
        return scored(policy, micros, adapter_factor=0.0)

    with policy.resident():
        deltas = judge(
            [micro.rollout_logprobs[micro.response_index] for micro in micros],
            scores,
            temperature=config.sampling.temperature,
            tolerance=tolerance_of(config),
            lowest=coarser(config.rollout.dtype, config.policy.dtype),
            without_adapter=without_adapter if config.policy.lora.rank else None,
        )
    if config.rollout.exact and deltas.any():
        raise ProbeError(
            f"phase probe: rollout.exact=true, and the log-probs of {int(deltas.count_nonzero())} of {deltas.numel()} "
            f"tokens are not those of the trainer in every bit; the largest difference is {deltas.abs().max():.1e}. "
            "Nothing is trained. Set rollout.exact=false, and please report this processor and model"
        )
    if engines.takes_turns:  # they gave their weights up while the ranks scored
        sync_weights(policy, engines, policy_version=policy_version)
    return ProbeReport(
        num_samples=len(micros),
        num_tokens=deltas.numel(),
        mean_gap=float(deltas.abs().mean()),
        max_gap=float(deltas.abs().max()),
        tolerance=tolerance_of(config),
        k3=float(k3(deltas).mean()),
        seconds=time.perf_counter() - started,
    )


def sampled(config: TrainConfig, task: Task, engines: EngineGroup, *, policy_version: int) -> list[MicroBatch]:
    """A few responses of every engine, one each. Raises ProbeError if one is invalid."""
    requests = probe_requests(config, task.dataset.train, stop_token_ids=task.stop_token_ids, routes=task.routes)
    with engines.resident():
        generations = engines.generate(requests)
    samples: list[Sample] = []
    for request, generation in zip(requests, generations, strict=True):
        reason = invalid_reason(request, generation, policy_version=policy_version)
        if reason is not None:
            raise ProbeError(f"phase probe: a response of the engine is invalid: {reason.name} ({reason.value})")
        samples.append(make_sample(request, generation))
    return [micro_batch([sample]) for sample in samples]


def scored(
    policy: PolicyGroup,
    micros: Sequence[MicroBatch],
    *,
    temperature: float | None = None,
    adapter_factor: float = 1.0,
) -> list[Tensor]:
    """The trainer's log-probs [R] of each response, at `sampling.temperature` or another: see `PolicyGroup`."""
    answers = policy.logprobs(micros, temperature=temperature, adapter_factor=adapter_factor)
    return [answer[micro.response_index] for answer, micro in zip(answers, micros, strict=True)]


def probe_requests(
    config: TrainConfig,
    prompts: Sequence[Prompt],
    *,
    stop_token_ids: tuple[int, ...],
    routes: Routing = Routing.live,
) -> list[GenerateRequest]:
    """The first training prompts, one response each, enough for every engine."""
    seeds = SeedSource(config.run.seed, step=PROBE_STEP)
    requests = []
    for prompt in prompts[: PROMPTS_PER_ENGINE * config.rollout.num_engines]:
        number, params = prompt.prompt_id, config.sampling
        sampling = sampling_params(params, seed=seeds.draw(number, 0), stop_token_ids=stop_token_ids, routes=routes)
        sampling.max_new_tokens = min(MAX_TOKENS, sampling.max_new_tokens)
        requests.append(
            GenerateRequest(prompt_id=number, sample_index=0, prompt_token_ids=prompt.token_ids, sampling=sampling)
        )
    return requests


def coarser(one: DType, other: DType) -> DType:
    """The type with the larger rounding error."""
    return max(one, other, key=lambda dtype: torch.finfo(DTYPES[dtype.name]).eps)


def tolerance_of(config: TrainConfig) -> float:
    """Largest mean |difference|, in nats: `rollout.probe_tolerance`, or what rounding can explain."""
    if config.rollout.probe_tolerance is not None:
        return config.rollout.probe_tolerance
    tolerance = rounding_tolerance(coarser(config.rollout.dtype, config.policy.dtype), config.sampling.temperature)
    if config.rollout.quantization is Quantization.none:
        return tolerance
    return max(tolerance, QUANTIZED_TOLERANCE[config.rollout.quantization] / min(1.0, config.sampling.temperature))


def rounding_tolerance(dtype: DType, temperature: float) -> float:
    """Return the largest mean |difference| that rounding in `dtype` can explain, in nats. Logits are divided by the
    temperature, and so are their errors."""
    roundings = ROUNDINGS * torch.finfo(DTYPES[dtype.name]).eps
    return max(FLOAT32_TOLERANCE, roundings) / min(1.0, temperature)


def judge(
    reported: Sequence[Tensor],
    scores: Scores,
    *,
    temperature: float,
    tolerance: float,
    lowest: DType,
    without_adapter: Callable[[], list[Tensor]] | None = None,
) -> Tensor:
    """Trainer minus engine, [all tokens], if the two agree; raises ProbeError naming what disagrees.

    Args:
        reported: [R] log-probs of each response, from the engine.
        scores: the trainer's, at any temperature.
        temperature: at which the responses were sampled.
        tolerance: largest mean |difference|.
        lowest: the coarser of the types in which the two compute.
        without_adapter: the trainer's log-probs without its adapter, if it has one.
    """
    scored = scores(temperature)
    gap, deltas = mean_gap(reported, scored), torch.cat(scored) - torch.cat(list(reported))
    pairs = zip(reported, scored, strict=True)
    worst = max((mean_gap([a], [b]) for a, b in pairs if a.numel() >= MIN_TOKENS_OF_ONE), default=0.0)
    # The mean over one response scatters more than that over all.
    if gap <= tolerance / CLEARLY_BETTER and worst <= tolerance:
        return deltas
    found, best = _best_explanation(reported, scored, scores, temperature=temperature)
    if without_adapter is not None and (gap_without := mean_gap(reported, without_adapter())) < best:
        found, best = "These are log-probs of the model without its adapter: the engine leaves it out", gap_without
    is_explained = best * CLEARLY_BETTER < gap
    if gap <= tolerance and worst <= 2 * tolerance and not is_explained:
        return deltas
    what = _unexplained(gap, tolerance, lowest=lowest, temperature=temperature)
    if is_explained:
        what = f"{found} (then they differ by {best:.1e})"
    raise ProbeError(
        "phase probe: the engine's log-probs are not those of the trainer for the same tokens and weights: they differ "
        f"by {gap:.2g} on average over {sum(map(len, reported))} tokens"
        f"{f', {worst:.2g} over the worst response' if worst > gap else ''}; "
        f"rollout.probe_tolerance allows {tolerance:.2g}. {what}. Nothing is trained: every correction would be wrong"
    )


def _best_explanation(
    reported: Sequence[Tensor], scored: Sequence[Tensor], scores: Scores, *, temperature: float
) -> tuple[str, float]:
    """The mistake under which both agree best, and the mean |difference| under it."""
    found = {
        "These are the log-probs of the tokens before: the engine's are shifted by one": mean_gap(
            [values[1:] for values in reported], [values[:-1] for values in scored]
        ),
        "These are the log-probs of the tokens after: the engine's are shifted by one": mean_gap(
            [values[:-1] for values in reported], [values[1:] for values in scored]
        ),
    }
    others = {1.0: "the engine reports them before it divides by the temperature (SGLANG_RETURN_ORIGINAL_LOGPROB?)"}
    others[temperature**2] = "the engine divides by it twice"
    for other, reason in others.items():
        if abs(other - temperature) > 1e-6:
            text = f"These are log-probs at temperature {other:g}, not {temperature:g}: {reason}"
            found[text] = mean_gap(reported, scores(other))
    return min(found.items(), key=lambda item: item[1])


def _unexplained(gap: float, tolerance: float, *, lowest: DType, temperature: float) -> str:
    if gap <= tolerance:
        return "Some responses agree and some do not: one engine of several differs; look at engine_args and its log"
    if gap <= (usual := rounding_tolerance(lowest, temperature)):
        return (
            f"That is rounding in {lowest.name}, for which {usual:.2g} is allowed where rollout.probe_tolerance is not "
            "set: raise it, or leave it out"
        )
    if lowest is DType.float32 and gap <= rounding_tolerance(DType.bfloat16, temperature):
        return (
            "It may be rounding to 16 bits where both should compute in float32: look at the engine's head, attention "
            "backend and cache dtype. Or the engine holds slightly other weights"
        )
    return (
        "No other temperature and no shift explains it: the engine holds other weights or another model, adds special "
        "tokens, or changes logits (penalty, bias, soft cap, truncation, quantisation)"
    )


def mean_gap(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Mean |difference| over all tokens; infinite if there are none."""
    gaps = torch.cat([(a - b).abs() for a, b in zip(one, other, strict=True)])
    return float(gaps.mean()) if gaps.numel() else math.inf
