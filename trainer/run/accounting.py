"""Compares the cost of a step with the least possible cost: fractions of the floor, MFU, tokens/s, memory.

Ceilings (measured once, `trainer/limits/ceilings.py`) and the model's sizes are known at the start; after every step
the lengths that were sampled and trained on give the floors (`trainer/limits/floors.py`), and floor / seconds gives
the fractions.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout.collect.collector import Collected, CollectStats
from rollout.config import DType
from rollout.group.actor_calls import WorkerError
from rollout.group.balance import split_by_load
from rollout.group.engine_group import EngineGroup
from rollout.processes.process_memory import private_bytes
from rollout.types import SampleGroup
from trainer.batch.planner import DEFAULT_COST, SequenceCost
from trainer.batch.train_batch import TrainBatch
from trainer.cluster.policy_group import PolicyGroup
from trainer.config.train import TrainConfig
from trainer.config.training import LoraConfig
from trainer.limits.adapter_shape import adapter_parameters, stored_linear_shapes
from trainer.limits.ceilings import Ceilings
from trainer.limits.estimate import DTYPE_BYTES
from trainer.limits.floors import (
    GroupLengths,
    Lengths,
    Rates,
    optimizer_floor,
    prefill_floor,
    replay_decode,
    sequence_flops,
    sync_floor,
    training_flops,
)
from trainer.limits.model_shape import ModelShape, UnknownShapeError, directory_shape
from trainer.policy.train_report import TrainReport

logger = logging.getLogger(__name__)

SLOW_TYPE = 0.5
"""Products of a type, over those of float32 per second, below which a device only emulates it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Model and ceilings of the devices that the run computes on. An unknown part is None, and then the fractions that
    need the part are None."""

    shape: ModelShape | None
    policy: Ceilings | None
    """Ceilings of one rank."""
    engine: Ceilings | None
    """Ceilings of one engine."""
    adapter: int = 0
    """Parameters of the LoRA adapter; 0 if all weights are trained."""


def look_at_hardware(model_path: Path, policy: PolicyGroup, lora: LoraConfig) -> Hardware:
    """Sizes of the model and ceilings of its devices. What cannot be found costs a warning and its fractions."""
    shape: ModelShape | None = None
    of_rank = of_engine = None
    adapter = 0
    try:
        shape = directory_shape(model_path)
        if lora.rank:
            adapter = adapter_parameters(stored_linear_shapes(model_path), lora)
        of_rank, of_engine = policy.ceilings()
    except (UnknownShapeError, WorkerError) as error:
        logger.warning("no fractions of the hardware's limits in this run: %s", error)
    return Hardware(shape=shape, policy=of_rank, engine=of_engine, adapter=adapter)


def _slow_type(key: str, dtype: DType, ceilings: Ceilings) -> list[str]:
    """A line where the device only emulates the type that `key` asks for."""
    own, plain = ceilings.flops(dtype), ceilings.flops(DType.float32)
    if own > SLOW_TYPE * plain:
        return []
    rates = f"at {own / 1e9:,.0f} GFLOP/s and float32 at {plain / 1e9:,.0f}"
    return [f"note: {key}={dtype.name} is multiplied {rates} here: {key}=float32 is likely to be faster"]


def group_lengths(group: SampleGroup) -> GroupLengths:
    """Lengths of the samples of a group, which share a prompt."""
    prompt = group.samples[0].num_prompt_tokens
    return GroupLengths(
        prompt=prompt,
        rests=tuple(len(sample.token_ids) - prompt for sample in group.samples),
        scored=sum(sample.num_response_tokens for sample in group.samples),
    )


class StepAccounting:
    """Metrics of how a step stands to the limits of its hardware; one per run."""

    def __init__(self, config: TrainConfig, hardware: Hardware) -> None:
        self._config = config
        self._hardware = hardware
        self._impossible: set[str] = set()
        rank, engine, ranks = hardware.policy, hardware.engine, config.policy.num_workers
        self._policy_rates: Rates | None = None
        """Of all ranks together."""
        if rank is not None:
            flops, copied = rank.flops(config.policy.dtype), rank.copy_bytes_per_s
            self._policy_rates = Rates(flops=flops * ranks, bytes_per_s=copied * ranks)
        self._engine_rates: Rates | None = None
        """Of one engine."""
        if engine is not None:
            self._engine_rates = Rates(flops=engine.flops(config.rollout.dtype), bytes_per_s=engine.copy_bytes_per_s)

    @property
    def sequence_cost(self) -> SequenceCost:
        """FLOPs of a sequence in this model, for the planner."""
        shape = self._hardware.shape
        if shape is None:
            return DEFAULT_COST
        return SequenceCost.of_model(
            num_parameters=shape.matrix_parameters, num_layers=shape.num_layers, attention_size=shape.attention_size
        )

    def assumptions(self) -> list[str]:
        """Return the assumptions behind the fractions, a line each, for accounting.json and the report."""
        shape, policy, engine = self._hardware.shape, self._hardware.policy, self._hardware.engine
        if shape is None or policy is None:
            return ["limits: unknown, so no fractions of them"]
        dtype, ranks = self._config.policy.dtype, self._config.policy.num_workers
        passes, trained = self._config.batch.passes, self._hardware.adapter
        factor, of_weights = 6 * passes, (4 if trained else 6) * passes
        adapter = f"{factor} x {trained:,} adapter parameters x tokens + " if trained else ""
        lines = [
            f"MFU: {of_weights} x ({shape.body_parameters:,} body parameters x tokens + {shape.head_parameters:,} head "
            f"parameters x response tokens) + {adapter}{factor} x {shape.num_layers} layers x {shape.attention_size} x "
            f"cells of attention, over train seconds x {policy.flops(dtype) / 1e9:,.0f} GFLOP/s {dtype.name} x {ranks} "
            f"{'rank' if ranks == 1 else 'ranks'}",
            f"limits of a rank, measured: {policy}",
        ]
        if engine is not None:
            lines += [f"limits of an engine, measured: {engine}"]
        return lines

    def slow_types(self) -> list[str]:
        """Return a line for each side whose type the device only emulates, as older processors do with bfloat16."""
        config, hardware = self._config, self._hardware
        sides = (
            ("policy.dtype", config.policy.dtype, hardware.policy),
            ("rollout.dtype", config.rollout.dtype, hardware.engine),
        )
        return [line for key, dtype, limits in sides if limits for line in _slow_type(key, dtype, limits)]

    def metrics(
        self, times: Mapping[str, float | None], *, collected: Collected, batch: TrainBatch, report: TrainReport
    ) -> dict[str, float | None]:
        """perf/* of the step whose phases took `times` (`time/<phase>_s`)."""

        def seconds(phase: str) -> float:
            return times.get(f"time/{phase}_s") or 0.0

        train_s, step_s = seconds("train"), seconds("step")
        # A mini-batch from which nothing was learnt is left out of the later passes.
        passes = max(1.0, report.num_optimizer_steps / self._config.batch.mini_batches)
        found: dict[str, float | None] = {
            "perf/train_tokens_per_s": passes * batch.stats.num_tokens / train_s if train_s else None,
            "perf/exposed_sync_frac": seconds("sync") / step_s if step_s else None,
        }
        trained = [group_lengths(group) for group in collected.groups]
        floors = self._rollout_floors(collected.stats, found)
        floors |= self._train_floor(trained, report.num_optimizer_steps, passes=passes)
        for phase, floor_s in floors.items():
            hidden_s = collected.stats.hidden_s if phase == "rollout" else 0.0
            found[f"perf/{phase}_floor_frac"] = self.fraction(phase, floor_s, seconds(phase) + hidden_s)
        if floors:
            least_s = sum(floors.values())
            if self._config.schedule.steps_ahead:
                # Sampling may be hidden behind the rest, or the rest behind it.
                rollout_s = floors.get("rollout", 0.0)
                least_s = max(rollout_s, least_s - rollout_s)
            found["perf/step_floor_frac"] = self.fraction("step", least_s, step_s - seconds("eval"))
        if self._hardware.shape is not None and self._policy_rates is not None:
            mfu_s = passes * self._training_flops(self._hardware.shape, trained) / self._policy_rates.flops
            found["perf/mfu"] = self.fraction("MFU", mfu_s, train_s)
        return found

    def memory(self, report: TrainReport, engines: EngineGroup) -> dict[str, float | None]:
        """Private memory in GiB of the driver, of each rank after its training step, of each engine after its sync."""
        held = {"driver": private_bytes()}
        held |= {f"policy_{number}": rank.private_bytes for number, rank in enumerate(report.ranks)}
        held |= {f"engine_{index}": size for index, size in engines.memory().items()}
        return {f"perf/memory_gib/{name}": size / 2**30 for name, size in held.items()}

    def fraction(self, phase: str, floor_s: float, measured_s: float) -> float | None:
        """floor / measured; None, and one warning per phase, above 1: then a formula or a ceiling is wrong."""
        if measured_s <= 0:
            return None
        found = floor_s / measured_s
        if found <= 1:
            return found
        if phase not in self._impossible:
            self._impossible.add(phase)
            logger.warning(
                "%s took %.4g s, less than its floor of %.4g s: the limits were measured on a busy machine, or the "
                "model stays in a cache. Such fractions are left out. Remove ceilings-*.json from $PARITY_CACHE, or "
                "~/.cache/parity, to measure again.",
                phase,
                measured_s,
                floor_s,
            )
        return None

    # ---------------------------------------------------------------- floors of the phases

    def _training_flops(self, shape: ModelShape, trained: Sequence[GroupLengths]) -> float:
        return training_flops(shape, trained, adapter=self._hardware.adapter)

    def _train_floor(
        self, trained: Sequence[GroupLengths], num_optimizer_steps: int, *, passes: float
    ) -> dict[str, float]:
        """Forward and backward of every pass, what else is scored, and the optimizer."""
        shape, rates, config = self._hardware.shape, self._policy_rates, self._config
        if shape is None or rates is None:
            return {}
        more = config.needs_old_logprobs_pass + config.has_reference
        # Without an optimizer step the policy may have run its forward alone (critic.warmup_rollout_steps).
        own = passes * self._training_flops(shape, trained) if num_optimizer_steps else sequence_flops(shape, trained)
        flops = own + more * sequence_flops(shape, trained)
        if config.has_critic and config.critic.path is None:
            # It has no head over the vocabulary: nothing of it is scored.
            without_head = [each._replace(scored=0) for each in trained]
            flops += (1 + 3 * config.batch.passes) * sequence_flops(shape, without_head)
        compute_bytes = DTYPE_BYTES[config.policy.dtype]
        cast_bytes = compute_bytes if compute_bytes < 4 else 0
        update_s = optimizer_floor(self._hardware.adapter or shape.num_parameters, rates, cast_bytes=cast_bytes)
        return {"train": flops / rates.flops + num_optimizer_steps * update_s}

    def _rollout_floors(self, stats: CollectStats, found: dict[str, float | None]) -> dict[str, float]:
        """Rollout and weight sync; `found` gets what the replay says about the slots.

        Every round is replayed with the lengths that came back, on each engine those that it was given; engines run
        side by side, rounds one after the other. A prompt is read once per round and engine.
        """
        shape, rates = self._hardware.shape, self._engine_rates
        if shape is None or rates is None:
            return {}
        config = self._config.rollout
        number_bytes, rollout_s = DTYPE_BYTES[config.dtype], 0.0
        idle = [0] * config.num_engines
        busy: list[tuple[float, float, float]] = []
        for served in stats.served:
            engines_s = [0.0]
            for part in split_by_load(served.requests, idle):
                lengths = [Lengths(len(served.requests[i].prompt_token_ids), served.lengths[i]) for i in part]
                prompts = {tuple(served.requests[i].prompt_token_ids) for i in part}
                read_s = prefill_floor(shape, [len(prompt) for prompt in prompts], rates)
                replay = replay_decode(
                    shape,
                    lengths,
                    rates,
                    number_bytes=number_bytes,
                    is_8_bit=config.takes_quantized,
                    slots=config.max_running,
                )
                engines_s.append(read_s + replay.seconds)
                busy.append((replay.seconds, replay.busy_frac, replay.tail_frac))
            rollout_s += max(engines_s)
        total = sum(seconds for seconds, _, _ in busy)
        if total > 0:
            found["rollout/slots_busy_frac"] = sum(seconds * share for seconds, share, _ in busy) / total
            found["rollout/tail_frac"] = sum(seconds * share for seconds, _, share in busy) / total
        return {"rollout": rollout_s, "sync": sync_floor(shape.num_parameters, number_bytes, rates)}
