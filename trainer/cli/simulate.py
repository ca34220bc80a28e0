"""`parity simulate <recipe> [simulate.key=value ...] [key=value ...]`: a table of schedules by number of engines.

Everything is checked, and reported together, before anything is computed. Called by `commands.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from algorithms.config import Problem
from rollout.config import DType
from rollout.simulate.simulated_schedules import Outcome, Plant, Schedule, prompts_needed, simulate
from trainer.cli.arguments import parse_train
from trainer.cli.evaluate import flag_problems
from trainer.cli.tables import table_text
from trainer.compose.catalog import find_recipe
from trainer.compose.compose import resolve
from trainer.compose.outcome import DONE, FAILED, report
from trainer.compose.own_keys import read_own_keys
from trainer.config.train import TrainConfig
from trainer.limits.estimate import model_shape
from trainer.limits.floors import Rates
from trainer.limits.machine import this_machine
from trainer.limits.model_shape import ModelShape, UnknownShapeError
from trainer.simulate.simulation import (
    DEVICES,
    Efficiencies,
    LengthLaw,
    Recording,
    RecordingError,
    Scaling,
    SimulateConfig,
    build_plant,
    draw_work,
    measure_efficiencies,
    read_recording,
)

NAME = "parity simulate"
SECTION = "simulate"
OVERLAPPED = (Schedule.one_step_off, Schedule.asynchronous)
"""Schedules in which engines sample while the policy trains."""


def run_simulate(words: Sequence[str]) -> int:
    """Simulate as `words` say; returns the exit code."""
    own = [word for word in words if word.startswith(f"{SECTION}.")]
    rest = [word for word in words if word not in own]
    if not any(not word.startswith("-") for word in rest):
        missing = Problem(key="recipe", rule="must be given", value=None, remedy=f"See {NAME} --help.")
        return report([missing], command=NAME)
    arguments, problems = parse_train(rest)
    problems += flag_problems(arguments, command=NAME)
    assumed, wrong = read_own_keys(SimulateConfig, own, section=SECTION)
    problems += wrong
    recipe = find_recipe(arguments.recipe, own_dir=arguments.own_dir)
    if isinstance(recipe, Problem):
        return report([recipe, *problems], command=NAME)
    resolution = resolve(recipe, arguments.overrides, own_dir=arguments.own_dir, multirun=False)
    problems += resolution.problems
    config = resolution.runs[0].config if resolution.runs else None
    shape: ModelShape | None = None
    if config is not None:
        problems += _device_problems(config, assumed)
        try:
            shape = model_shape(config)
        except UnknownShapeError as error:
            problems.append(Problem(key="model", rule=f"must have a known size: {error}", value=config.model.kind))
    if shape is not None and not shape.is_dense:
        problems.append(Problem(key="model", rule="must be dense: a mixture of experts has no floors here", value=None))
    if problems or config is None or shape is None:
        return report(problems, command=f"{NAME} {arguments.recipe}")
    try:
        for text in _tables(config, assumed, shape):
            sys.stdout.write(text)
            sys.stdout.flush()
    except RecordingError as error:
        sys.stderr.write(f"{NAME}: {error}\n")
        return FAILED
    return DONE


def _device_problems(config: TrainConfig, assumed: SimulateConfig) -> Iterator[Problem]:
    wants_gpu = config.rollout.gpus_per_engine > 0 or config.policy.gpus_per_worker > 0
    if assumed.device is None and wants_gpu and this_machine().gpus == 0:
        yield Problem(
            key=f"{SECTION}.device",
            rule="must be named: the recipe is for GPUs, and this machine has none to measure",
            value=None,
            remedy=f"Use one of {', '.join(DEVICES)}.",
        )


def _tables(config: TrainConfig, assumed: SimulateConfig, shape: ModelShape) -> Iterator[str]:
    """The assumptions, then the table."""
    engine, rank, device = _rates(config, assumed)
    recording = None if assumed.run is None else read_recording(Path(assumed.run))
    measured = Efficiencies()
    if recording is not None:
        # The first steps are slower: kernels are compiled, memory is taken.
        later = slice(max(1, len(recording.steps) // 4), None)
        measured = measure_efficiencies(config, recording, shape, engine=engine, rank=rank, steps=later)
    used = Efficiencies(
        decode=measured.decode if assumed.decode_efficiency is None else assumed.decode_efficiency,
        step_overhead_s=measured.step_overhead_s if assumed.step_overhead_s is None else assumed.step_overhead_s,
        train=measured.train if assumed.train_efficiency is None else assumed.train_efficiency,
        sync_s=measured.sync_s if assumed.sync_s is None else assumed.sync_s,
        other_s=measured.other_s if assumed.other_s is None else assumed.other_s,
    )
    yield "".join(f"{line}\n" for line in assumption_lines(config, assumed, recording, used, device=device))
    schedules = [each for each in Schedule if not (config.shares_gpus and each in OVERLAPPED)]
    rows: list[tuple[Plant, Outcome]] = []
    for count in assumed.engines or [config.rollout.num_engines]:
        plant = build_plant(config, assumed, shape, engine=engine, rank=rank, efficiencies=used, num_engines=count)
        needed = max(prompts_needed(each, plant, num_steps=assumed.steps) for each in schedules)
        work = draw_work(config, assumed, recording, num_prompts=needed)
        rows += [(plant, simulate(each, work, plant, num_steps=assumed.steps)) for each in schedules]
    yield render(rows)


def _rates(config: TrainConfig, assumed: SimulateConfig) -> tuple[Rates, Rates, str]:
    """Rates of one engine and of one rank, and what they are of."""
    engine_gpus, rank_gpus = max(1.0, config.rollout.gpus_per_engine), max(1.0, config.policy.gpus_per_worker)
    if assumed.device is not None:
        of_one = DEVICES[assumed.device]
        return _times(of_one, engine_gpus), _times(of_one, rank_gpus), f"{assumed.device}, data sheet, bfloat16"
    # Here and not above: this imports torch, and measures for a second what is not in the cache.
    from trainer.limits.ceilings import Ceilings, find_ceilings

    def look(gpus: float, workers: int, dtype: DType) -> tuple[Rates, Ceilings]:
        threads = max(1, (os.cpu_count() or 1) // workers)
        found = find_ceilings("cuda" if gpus > 0 else "cpu", num_threads=threads)
        return Rates(flops=found.flops(dtype), bytes_per_s=found.copy_bytes_per_s), found

    engine, found = look(config.rollout.gpus_per_engine, config.rollout.num_engines, config.rollout.dtype)
    rank, _ = look(config.policy.gpus_per_worker, config.policy.num_workers, config.policy.dtype)
    return _times(engine, engine_gpus), _times(rank, rank_gpus), f"this machine, measured: {found}"


def _times(rates: Rates, count: float) -> Rates:
    return replace(rates, flops=rates.flops * count, bytes_per_s=rates.bytes_per_s * count)


def assumption_lines(
    config: TrainConfig, assumed: SimulateConfig, recording: Recording | None, used: Efficiencies, *, device: str
) -> Iterator[str]:
    """What the numbers stand on, a line each."""
    law = assumed.lengths or (LengthLaw.log_normal if recording is None else LengthLaw.recorded)
    median = assumed.median_tokens or max(1, config.sampling.max_new_tokens // 4)
    match law:
        case LengthLaw.recorded:
            lengths = f"whole groups drawn from {assumed.run}"
        case LengthLaw.log_normal:
            lengths = f"log-normal, median {median}, sigma {assumed.sigma:g}, correlation in a group "
            lengths += f"{assumed.group_correlation:g}"
        case LengthLaw.bimodal:
            lengths = f"bimodal, {1 - assumed.long_frac:.0%} around {median} and {assumed.long_frac:.0%} around "
            lengths += f"{median * assumed.long_factor:.0f}, correlation in a group {assumed.group_correlation:g}"
    batch = config.batch
    grows = ", times engines / rollout.num_engines, ranks too" if assumed.scaling is Scaling.weak else ""
    yield f"lengths     {lengths}; at most {config.sampling.max_new_tokens}; seed {assumed.seed}"
    yield f"batch       {batch.prompts_per_step} prompts x {batch.group_size} samples per step{grows}"
    yield f"device      {device}"
    sync = "its floor" if used.sync_s is None else f"{used.sync_s:.3g} s"
    yield (
        f"efficiency  decode {used.decode:.3g} of the floor and {used.step_overhead_s:.3g} s per decode step; train "
        f"{used.train:.3g} of the floor; sync {sync}; other {used.other_s:.3g} s per step"
    )
    if recording is None and used == Efficiencies():
        yield "            nothing is measured: no step can be faster on this device (simulate.run=<run.dir> measures)"
    yield (
        f"schedules   over-sampling {assumed.over_sampling:g}; staleness at most {assumed.max_staleness}; a sync drops "
        "the caches and pauses asynchronous engines"
    )
    if config.shares_gpus:
        yield "            one_step_off and asynchronous are left out: engines and ranks share their GPUs"
    else:
        yield "            engines and ranks have devices of their own: overlapping slows neither"
    yield "            slots are not limited by memory; every complete group is trained on; no engine fails"


def render(rows: Sequence[tuple[Plant, Outcome]]) -> str:
    """A row per number of engines and schedule, as text that ends in a line break."""
    table = Table("engines", "schedule", box=None, pad_edge=False, header_style="bold")
    titles = ("step s", "rollout s", "wait s", "train s", "tokens/s", "slots busy %", "running", "tail %", "wasted %")
    for title in (*titles, "length bias", "lag: share %"):
        table.add_column(title, justify="right")
    for plant, made in rows:
        seconds = [made.step_s, made.rollout_s, made.wait_s, made.train_s]
        lags = " ".join(f"{lag}:{100 * share:.0f}" for lag, share in made.lags.items())
        table.add_row(
            str(plant.num_engines),
            made.schedule.name,
            *(f"{value:.3g}" for value in seconds),
            f"{made.tokens_per_s:,.0f}",
            f"{100 * made.slots_busy_frac:.1f}",
            f"{made.running_mean:.1f}",
            f"{100 * made.tail_frac:.1f}",
            f"{100 * made.wasted_frac:.1f}",
            f"{made.length_bias:.3f}",
            lags,
        )
    return table_text(table)
