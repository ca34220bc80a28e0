"""What a simulation of rollouts stands on: the floors of this recipe's model, and efficiencies measured in a run.

    recipe, device -> EngineCost, TrainCost (trainer/limits/floors.py, each divided by an efficiency)
    lengths: log-normal, bimodal, or those of a run -> Work                      ->
    rollout/simulate/simulated_schedules.py
Used by `parity simulate` (trainer/cli/simulate.py). No torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from algorithms.config import Checked, Problem
from rollout.simulate.simulated_schedules import Plant, Schedule, TrainCost, simulate
from rollout.simulate.simulator import EngineCost, Work
from trainer.config.train import TrainConfig
from trainer.limits.estimate import DTYPE_BYTES, batch_shape
from trainer.limits.floors import Rates, kv_bytes_per_token, optimizer_floor, sync_floor
from trainer.limits.model_shape import ModelShape
from trainer.rundir.rows import read_rows

BIMODAL_SPREAD = 0.25
"""Standard deviation of the logarithm of a length around each of the two modes."""

DEVICES = {
    "a100": Rates(flops=312e12, bytes_per_s=2.039e12),
    "h100": Rates(flops=989e12, bytes_per_s=3.35e12),
    "h200": Rates(flops=989e12, bytes_per_s=4.8e12),
    "b200": Rates(flops=2250e12, bytes_per_s=8e12),
}
"""Data-sheet rates of NVIDIA's SXM modules: dense bfloat16 products and memory. No program reaches them: give an
efficiency, measured in a run."""


USUAL_SLOWNESS = 2.0
"""Seconds of a well-made engine over its floor, where a run does not tell: the prior of `fit_step_cost`."""


class LengthLaw(Enum):
    """Where the lengths of the responses come from."""

    log_normal = "log_normal"
    bimodal = "bimodal"
    """Short answers around the median, and a part around a multiple of it."""
    recorded = "recorded"
    """Whole groups drawn from those of simulate.run."""


class Scaling(Enum):
    """What grows with the number of engines."""

    fixed = "fixed"
    """Nothing: the batch and the ranks of the recipe."""
    weak = "weak"
    """Prompts per step and ranks, in proportion to rollout.num_engines."""


@dataclass(kw_only=True, slots=True)
class SimulateConfig(Checked):
    """What `parity simulate` assumes; a null is measured in simulate.run, or the ideal without one."""

    engines: list[int] = field(default_factory=list)
    """Numbers of engines, a row each; empty for rollout.num_engines."""
    scaling: Scaling = Scaling.fixed
    """What grows with the engines."""
    steps: int = 16
    """Training steps that are simulated; the first quarter is not counted."""
    seed: int = 0
    """Decides the lengths."""
    run: str | None = None
    """Directory of a run whose samples.jsonl holds every sample (tracking.samples_per_step)."""
    lengths: LengthLaw | None = None
    """null: recorded with a run, log_normal without."""
    median_tokens: int | None = None
    """Median of the log-normal law, short mode of the bimodal one; null for a quarter of sampling.max_new_tokens."""
    sigma: float = 0.8
    """Standard deviation of the logarithm of a log-normal length."""
    long_frac: float = 0.2
    """Bimodal: share of the responses around the long mode."""
    long_factor: float = 8.0
    """Bimodal: long mode / short mode."""
    group_correlation: float = 0.5
    """Correlation of the lengths of one prompt's responses, before they are bent to the law."""
    prompt_tokens: int | None = None
    """Tokens of a prompt; null for the mean of the run, or the longest that the recipe allows."""
    over_sampling: float = 1.5
    """Prompts started by over_sampled and partial, as a multiple of batch.prompts_per_step."""
    max_staleness: int = 2
    """Steps that a response of asynchronous collection may have been started too early."""
    slots: int | None = None
    """Sequences that an engine decodes together; null for the engine's own limit, or no limit."""
    device: str | None = None
    """Of engines and ranks: a100, h100, h200, b200 (data sheet, bfloat16); null for this machine, measured."""
    decode_efficiency: float | None = None
    """Floor of decoding and prefill / its seconds, beyond step_overhead_s; null: measured, or 1."""
    step_overhead_s: float | None = None
    """Seconds of a decode step whatever it does; null: measured, or 0."""
    train_efficiency: float | None = None
    """Floor of training / its seconds; null: measured, or 1."""
    sync_s: float | None = None
    """Seconds of a weight sync; null: measured, or its floor."""
    other_s: float | None = None
    """Seconds of a step for rewards, packing and records; null: measured, or 0."""

    def problems(self) -> Iterator[Problem]:
        for count in self.engines:
            if not 1 <= count <= 4096:
                yield Problem(key="engines", rule="must be numbers from 1 to 4096", value=count)
        for key, least in (("steps", 4), ("max_staleness", 1)):
            if getattr(self, key) < least:
                yield Problem(key=key, rule=f"must be >= {least}", value=getattr(self, key))
        for key in ("median_tokens", "prompt_tokens", "slots"):
            value = getattr(self, key)
            if value is not None and value < 1:
                yield Problem(key=key, rule="must be >= 1 or null", value=value)
        for key in ("sigma", "step_overhead_s", "sync_s", "other_s"):
            value = getattr(self, key)
            if value is not None and value < 0:
                yield Problem(key=key, rule="must be >= 0", value=value)
        for key in ("decode_efficiency", "train_efficiency"):
            value = getattr(self, key)
            if value is not None and not 0 < value <= 1:
                yield Problem(key=key, rule="must lie in (0, 1], or be null", value=value)
        for key in ("long_frac", "group_correlation"):
            if not 0 <= getattr(self, key) <= 1:
                yield Problem(key=key, rule="must lie in [0, 1]", value=getattr(self, key))
        for key in ("over_sampling", "long_factor"):
            if not getattr(self, key) >= 1:
                yield Problem(key=key, rule="must be >= 1", value=getattr(self, key))
        if self.device is not None and self.device not in DEVICES:
            yield Problem(key="device", rule=f"must be one of {', '.join(DEVICES)}, or null", value=self.device)
        if self.run is not None and not (Path(self.run) / "metrics.jsonl").is_file():
            yield Problem(key="run", rule="must be the directory of a run, with its metrics.jsonl", value=self.run)
        if self.lengths is LengthLaw.recorded and self.run is None:
            yield Problem(
                key="lengths", rule="must have a run to be recorded in", value=self.lengths, remedy="Set run."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """What a run tells about itself."""

    steps: list[list[list[int]]]
    """[steps][groups][samples] response tokens, complete."""
    prompt_tokens: float
    """Mean."""
    times: list[dict[str, float]]
    """[steps] the row of metrics.jsonl."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiencies:
    """What turns floors into seconds."""

    decode: float = 1.0
    step_overhead_s: float = 0.0
    train: float = 1.0
    sync_s: float | None = None
    """None for its floor."""
    other_s: float = 0.0


class RecordingError(ValueError):
    """A run does not tell what a simulation needs: says why and what to do."""


def engine_cost(shape: ModelShape, rates: Rates, *, number_bytes: int, efficiencies: Efficiencies) -> EngineCost:
    """The terms of `prefill_floor` and `replay_decode`, divided by the efficiency, and the overhead of a step."""
    compute_s, move_s = (1 / (rate * efficiencies.decode) for rate in (rates.flops, rates.bytes_per_s))
    attention = shape.num_layers * shape.attention_size
    return EngineCost(
        step_s=efficiencies.step_overhead_s,
        read_s=shape.matrix_parameters * number_bytes * move_s,
        kv_s=kv_bytes_per_token(shape, number_bytes) * move_s,
        token_s=2.0 * shape.matrix_parameters * compute_s,
        context_s=4.0 * attention * compute_s,
        prefill_s=2.0 * shape.head_parameters * compute_s,
        prefill_token_s=2.0 * shape.body_parameters * compute_s,
        prefill_square_s=2.0 * attention * compute_s,
    )


def train_cost(config: TrainConfig, shape: ModelShape, rates: Rates, *, efficiency: float) -> TrainCost:
    """The floor of training that a run is measured by (trainer/run/accounting.py), divided by the efficiency.

    `rates` are those of all ranks together.
    """
    critic = 4 * config.has_critic
    scored = config.forwards_per_token - critic
    body = scored + (critic if config.critic.path is None else 0)
    flop_s = 1 / (rates.flops * efficiency)
    compute_bytes = DTYPE_BYTES[config.policy.dtype]
    update_s = optimizer_floor(shape.num_parameters, rates, cast_bytes=compute_bytes if compute_bytes < 4 else 0)
    return TrainCost(
        step_s=config.batch.optimizer_steps_per_rollout * update_s / efficiency,
        token_s=2.0 * shape.body_parameters * body * flop_s,
        response_s=2.0 * shape.head_parameters * scored * flop_s,
        square_s=2.0 * shape.num_layers * shape.attention_size * body * flop_s,
    )


def build_plant(
    config: TrainConfig,
    assumed: SimulateConfig,
    shape: ModelShape,
    *,
    engine: Rates,
    rank: Rates,
    efficiencies: Efficiencies,
    num_engines: int,
) -> Plant:
    """`num_engines` engines and the ranks of the recipe; `engine` and `rank` are the rates of one of each."""
    factor = num_engines / config.rollout.num_engines if assumed.scaling is Scaling.weak else 1.0
    ranks = max(1, round(config.policy.num_workers * factor))
    number_bytes = DTYPE_BYTES[config.rollout.dtype]
    floor_s = sync_floor(shape.num_parameters, number_bytes, engine)
    return Plant(
        cost=engine_cost(shape, engine, number_bytes=number_bytes, efficiencies=efficiencies),
        train=train_cost(
            config,
            shape,
            Rates(flops=rank.flops * ranks, bytes_per_s=rank.bytes_per_s * ranks),
            efficiency=efficiencies.train,
        ),
        sync_s=floor_s if efficiencies.sync_s is None else efficiencies.sync_s,
        other_s=efficiencies.other_s,
        num_engines=num_engines,
        slots=config.rollout.max_running if assumed.slots is None else assumed.slots,
        prompts_per_step=max(1, round(config.batch.prompts_per_step * factor)),
        over_sampling=assumed.over_sampling,
        max_staleness=assumed.max_staleness,
    )


def draw_work(config: TrainConfig, assumed: SimulateConfig, recording: Recording | None, *, num_prompts: int) -> Work:
    """Lengths for `num_prompts` prompts; the same for the same seed."""
    rng = np.random.default_rng(assumed.seed)
    size, cap = config.batch.group_size, config.sampling.max_new_tokens
    if assumed.prompt_tokens is not None:
        prompt = assumed.prompt_tokens
    else:
        prompt = batch_shape(config).prompt_tokens if recording is None else round(recording.prompt_tokens)
    law = assumed.lengths or (LengthLaw.log_normal if recording is None else LengthLaw.recorded)
    if law is LengthLaw.recorded and recording is not None:
        groups = [group for step in recording.steps for group in step]
        chosen = (groups[index] for index in rng.integers(len(groups), size=num_prompts))
        responses = [
            [group[index] for index in rng.permutation(np.resize(np.arange(len(group)), size))] for group in chosen
        ]
        cap = max(cap, max(map(max, responses)))
    else:
        drawn = _lengths(law, assumed, rng, (num_prompts, size), cap=cap)
        responses = np.clip(np.rint(drawn), 1, cap).astype(int).tolist()
    return Work(prompts=[max(1, prompt)] * num_prompts, responses=responses, cap=cap)


def _lengths(
    law: LengthLaw, assumed: SimulateConfig, rng: np.random.Generator, shape: tuple[int, int], *, cap: int
) -> np.ndarray:
    """[prompts, group size] lengths, not cut yet."""
    common, own = rng.standard_normal((shape[0], 1)), rng.standard_normal(shape)
    latent = math.sqrt(assumed.group_correlation) * common + math.sqrt(1 - assumed.group_correlation) * own
    median = assumed.median_tokens or max(1, cap // 4)
    if law is LengthLaw.log_normal:
        return np.asarray(median * np.exp(assumed.sigma * latent))
    share = min(max(1 - assumed.long_frac, 1e-12), 1 - 1e-12)
    is_long = latent > statistics.NormalDist().inv_cdf(share)
    mode = np.where(is_long, median * assumed.long_factor, median)
    return np.asarray(mode * np.exp(BIMODAL_SPREAD * rng.standard_normal(shape)))


def read_recording(run_dir: Path) -> Recording:
    """Lengths and seconds of a run. Raises RecordingError unless every sample of every step was recorded."""
    rows = _rows(run_dir / "metrics.jsonl")
    by_step: dict[int, dict[int, list[tuple[int, int]]]] = {}
    for sample in _rows(run_dir / "samples.jsonl"):
        groups = by_step.setdefault(sample["step"], {})
        groups.setdefault(sample["prompt_id"], []).append((sample["sample_index"], sample["num_response_tokens"]))
    prompt_tokens: list[float] = []
    steps = []
    for row in rows:
        groups = by_step.get(row["step"], {})
        count = sum(map(len, groups.values()))
        if count < row["rollout/num_samples"] or row["rollout/wasted_tokens"]:
            raise RecordingError(
                f"{run_dir}, step {row['step']}: {count} samples in samples.jsonl, {row['rollout/num_samples']:.0f} "
                f"trained on, {row['rollout/wasted_tokens']:.0f} tokens of others. A simulation needs all lengths: "
                f"run with collect=fixed and tracking.samples_per_step={row['rollout/num_samples']:.0f}."
            )
        steps.append([[tokens for _, tokens in sorted(group)] for group in groups.values()])
        prompt_tokens.append((row["perf/train_tokens"] - row["rollout/response_tokens"]) / count)
    if len(steps) < 2:
        raise RecordingError(f"{run_dir} has {len(steps)} complete steps; at least 2 are needed, the first is left out")
    return Recording(steps=steps, prompt_tokens=statistics.mean(prompt_tokens), times=rows)


def measure_efficiencies(
    config: TrainConfig, recording: Recording, shape: ModelShape, *, engine: Rates, rank: Rates, steps: slice
) -> Efficiencies:
    """Fit seconds of the recorded `steps` with their floors: decoding with an overhead per step, training without.

    Engines and ranks are those of `config`, which must be the config of the run.
    """
    assumed = SimulateConfig()
    ideal = build_plant(
        config,
        assumed,
        shape,
        engine=engine,
        rank=rank,
        efficiencies=Efficiencies(),
        num_engines=config.rollout.num_engines,
    )
    counting = replace(ideal, cost=EngineCost(step_s=1.0))
    counts, floors, rollouts, train_floors, trains = [], [], [], [], []
    for groups, row in zip(recording.steps[steps], recording.times[steps], strict=True):
        prompts = [max(1, round(recording.prompt_tokens))] * len(groups)
        work = Work(prompts=prompts, responses=groups, cap=max(map(max, groups)))
        count, floor = (
            simulate(Schedule.synchronous, work, replace(plant, prompts_per_step=len(groups)), num_steps=1).rollout_s
            for plant in (counting, ideal)
        )
        counts.append(count)
        floors.append(floor)
        rollouts.append(row["time/rollout_s"])
        train_floors.append(ideal.train.seconds(prompts, groups))
        trains.append(row["time/train_s"])
    overhead_s, slowness = fit_step_cost(counts, floors, rollouts)
    rows = recording.times[steps]
    named = ("rollout", "train", "sync", "eval", "checkpoint")
    others = [row["time/step_s"] - sum(row.get(f"time/{name}_s") or 0.0 for name in named) for row in rows]
    return Efficiencies(
        decode=1 / slowness,
        step_overhead_s=overhead_s,
        train=min(1.0, sum(train_floors) / sum(trains)),
        sync_s=statistics.median(row["time/sync_s"] for row in rows),
        other_s=max(0.0, statistics.median(others)),
    )


def fit_step_cost(counts: Sequence[float], floors: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(a, s) of seconds = a * counts + s * floors, a >= 0 and s >= 1: nothing beats its floor.

    Steps of like lengths hardly tell the two apart. So s is drawn to `USUAL_SLOWNESS` as strongly as the residuals are
    large (a normal prior on the share of the floor in the seconds, with a standard deviation of 1): exact data decide
    by themselves, noisy ones leave to the overhead what a usual floor does not explain.
    """
    n, f, t = (np.asarray(values, dtype=np.float64) for values in (counts, floors, seconds))
    # In shares of the mean: t / mean = u * n / mean + v * f / mean.
    scaled = np.stack([n / n.mean(), f / f.mean()], axis=1)
    target = t / t.mean()
    free = np.linalg.lstsq(scaled, target, rcond=None)[0]
    noise = float(((scaled @ free - target) ** 2).sum()) / max(1, len(t) - 2)
    least = float(f.mean() / t.mean())
    usual = min(1.0, USUAL_SLOWNESS * least)
    drawn = np.vstack([scaled, [0.0, math.sqrt(noise)]])
    u, v = np.linalg.lstsq(drawn, np.append(target, math.sqrt(noise) * usual), rcond=None)[0]
    if v < least:
        v = least
        u = float((scaled[:, 0] * (target - v * scaled[:, 1])).sum() / (scaled[:, 0] ** 2).sum())
    if u < 0:
        u, v = 0.0, max(least, float((scaled[:, 1] * target).sum() / (scaled[:, 1] ** 2).sum()))
    return float(u * t.mean() / n.mean()), float(v * t.mean() / f.mean())


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        return read_rows(path)
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error}") from error
