"""The simulator against a real run: predicted and measured slot use, tail, rollout and step time.

    python benchmarks/simulator_check.py [--steps 24] [--slots 256 32] [--dir DIR] [key=value ...]

Trains `arithmetic_grpo` with the torch engine for --steps steps, once per value of --slots (rollout.max_batch_size).
The engine's own steps are recorded by a hook that Ray runs in every worker: when each decode step began and how many
slots were busy in it. Nothing else of the run is changed. The first quarter of the steps is left out (kernels are
compiled, memory is taken), the second gives the efficiencies, and the second half is predicted from its lengths with
these. So a prediction knows how long the responses are, and nothing about how long its own steps took.

Printed per setting: means over the predicted steps, measured / predicted, and the mean over steps of the error of each.
slots busy and tail: measured ones are weighted with the real seconds of the decode steps. Also printed: what the
floor alone would say, and the asynchronous and one-step-off schedules of the same run, which were not run.
Prints Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import ray

from rollout.schedules import Outcome, Plant, Schedule, prompts_needed, simulate
from rollout.simulator import TAIL_BUSY, Work
from trainer.cli.catalog import find_recipe
from trainer.cli.compose import resolve
from trainer.cli.estimate import model_shape
from trainer.cli.simulate import _rates
from trainer.config import TrainConfig
from trainer.loop import train
from trainer.simulation import (
    Efficiencies,
    Recording,
    SimulateConfig,
    build_plant,
    draw_work,
    measure_efficiencies,
    read_recording,
)

RECORD = "PARITY_STEP_RECORD"
RECIPE = ("rollout=torch", "tracking.wandb=disabled", "eval.max_prompts=8", "checkpoint.every=0")


@dataclass(frozen=True)
class EngineSteps:
    """What an engine did in one rollout."""

    seconds: list[float]
    """Of each decode step, to the begin of the next; the last one is left out."""
    busy: list[int]
    """Slots busy in it."""

    def slots_busy(self, width: int) -> float:
        return sum(s * b for s, b in zip(self.seconds, self.busy, strict=True)) / (width * sum(self.seconds))

    def tail(self, width: int) -> float:
        few = sum(s for s, b in zip(self.seconds, self.busy, strict=True) if b < TAIL_BUSY * width)
        return few / sum(self.seconds)


def record_steps() -> None:
    """Ray calls this in every worker: write begin and width of every decode step of an engine."""
    from rollout.slots import Step

    plain = Step.__init__
    path = Path(os.environ[RECORD]) / f"{os.getpid()}.txt"

    def made(self, *words, positions, **named):  # type: ignore[no-untyped-def]
        with path.open("a") as file:
            file.write(f"{time.time():.6f} {len(positions)}\n")
        plain(self, *words, positions=positions, **named)

    Step.__init__ = made  # type: ignore[method-assign]


def compose(words: list[str]) -> TrainConfig:
    """The config of the recipe with these overrides."""
    recipe = find_recipe("arithmetic_grpo", own_dir=None)
    assert isinstance(recipe, Path)
    resolution = resolve(recipe, words, own_dir=None, multirun=False)
    if resolution.problems:
        raise SystemExit("\n".join(map(str, resolution.problems)))
    [run] = resolution.runs
    assert run.config is not None
    return run.config


def engine_steps(directory: Path, times: list[dict[str, float]], num_steps: int) -> list[EngineSteps]:
    """The decode steps of each rollout: a rollout is a stretch whose widths were recorded without a long pause between
    two of them, evaluations (the first and the last stretch) left out."""
    [path] = list(directory.glob("*.txt"))
    begins, widths = [], []
    for line in path.read_text().splitlines():
        begin, width = line.split()
        begins.append(float(begin))
        widths.append(int(width))
    # Training and sync lie between two rollouts: the widest num_steps + 1 gaps are those between the stretches.
    gaps = sorted(range(1, len(begins)), key=lambda i: begins[i - 1] - begins[i])[: num_steps + 1]
    edges = [0, *sorted(gaps), len(begins)]
    found = []
    for first, last in list(itertools.pairwise(edges))[1:-1]:
        seconds = [begins[i + 1] - begins[i] for i in range(first, last - 1)]
        found.append(EngineSteps(seconds, widths[first : last - 1]))
    if len(found) != len(times):
        raise SystemExit(f"{len(found)} rollouts were recorded, {len(times)} steps were taken")
    return found


def predict(recording: Recording, plant: Plant, step: int) -> Outcome:
    """Step `step` (from 0) as the simulator sees it."""
    groups = recording.steps[step]
    prompts = [max(1, round(recording.prompt_tokens))] * len(groups)
    work = Work(prompts=prompts, responses=groups, cap=max(map(max, groups)))
    return simulate(Schedule.synchronous, work, replace(plant, prompts_per_step=len(groups)), num_steps=1)


def check(words: list[str], slots: int, num_steps: int, directory: Path) -> list[str]:
    """Run, predict, compare; the rows of the table."""
    words = [*RECIPE, *words, f"rollout.max_batch_size={slots}", f"run.num_steps={num_steps}"]
    config = compose(words)
    samples = config.batch.samples_per_step
    config = compose([*words, f"tracking.samples_per_step={samples}", f"run.dir={directory / 'run'}"])
    steps_dir = directory / "steps"
    steps_dir.mkdir(parents=True)
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"worker_process_setup_hook": record_steps, "env_vars": {RECORD: str(steps_dir)}},
    )
    try:
        train(config)
    finally:
        ray.shutdown()
    recording = read_recording(directory / "run")
    measured = engine_steps(steps_dir, recording.times, num_steps)
    engine, rank, _ = _rates(config, SimulateConfig())
    shape = model_shape(config)
    quarter = num_steps // 4
    fitted = measure_efficiencies(config, recording, shape, engine=engine, rank=rank, steps=slice(quarter, 2 * quarter))
    refill = max(1, slots // 8)  # the torch engine waits until an eighth of its slots is free

    def plant(efficiencies: Efficiencies) -> Plant:
        made = build_plant(
            config, SimulateConfig(), shape, engine=engine, rank=rank, efficiencies=efficiencies, num_engines=1
        )
        return replace(made, refill=refill)

    predicted_steps = range(2 * quarter, num_steps)
    width = min(slots, samples)
    predicted = [predict(recording, plant(fitted), step) for step in predicted_steps]
    ideal = [predict(recording, plant(Efficiencies()), step) for step in predicted_steps]
    rows = [recording.times[step] for step in predicted_steps]
    took = [measured[step] for step in predicted_steps]
    names = ("rollout s", "train s", "step s", "slots busy %", "tail %")
    values = {
        "rollout s": ([row["time/rollout_s"] for row in rows], [made.rollout_s for made in predicted]),
        "train s": ([row["time/train_s"] for row in rows], [made.train_s for made in predicted]),
        "step s": (
            [row["time/step_s"] - (row.get("time/eval_s") or 0.0) for row in rows],
            [made.step_s for made in predicted],
        ),
        "slots busy %": (
            [100 * each.slots_busy(width) for each in took],
            [100 * made.slots_busy_frac for made in predicted],
        ),
        "tail %": ([100 * each.tail(width) for each in took], [100 * made.tail_frac for made in predicted]),
    }
    floors = {
        "rollout s": statistics.mean(made.rollout_s for made in ideal),
        "train s": statistics.mean(made.train_s for made in ideal),
        "step s": statistics.mean(made.step_s for made in ideal),
        "slots busy %": 100 * statistics.mean(made.slots_busy_frac for made in ideal),
        "tail %": 100 * statistics.mean(made.tail_frac for made in ideal),
    }
    lines = []
    for name in names:
        real, made = values[name]
        error = statistics.mean(abs(b - a) / a if a else abs(b - a) for a, b in zip(real, made, strict=True))
        mean_real, mean_made = statistics.mean(real), statistics.mean(made)
        off = (mean_made - mean_real) / mean_real if mean_real else 0.0
        lines.append(
            f"| {slots} | {name} | {mean_real:.3g} | {mean_made:.3g} | {100 * off:+.1f} | {100 * error:.1f} "
            f"| {floors[name]:.3g} |"
        )
    sys.stderr.write(f"slots {slots}: {json.dumps({'fitted': str(fitted), 'quarter': quarter})}\n")
    return lines + planned(config, recording, plant(fitted), slots)


def planned(config: TrainConfig, recording: Recording, plant: Plant, slots: int) -> list[str]:
    """What the other schedules would come to with devices of their own, as comments below the table."""
    lines = []
    for schedule in Schedule:
        needed = prompts_needed(schedule, plant, num_steps=16)
        work = draw_work(config, SimulateConfig(), recording, num_prompts=needed)
        made = simulate(schedule, work, plant, num_steps=16)
        lines.append(
            f"<!-- slots {slots}, {schedule.name}: step {made.step_s:.3g} s, slots busy "
            f"{100 * made.slots_busy_frac:.0f} %, tail {100 * made.tail_frac:.0f} %, wasted "
            f"{100 * made.wasted_frac:.0f} % -->"
        )
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--slots", type=int, nargs="+", default=[256, 32])
    parser.add_argument("--dir", type=Path, default=None, help="where the runs are kept; a temporary directory without")
    parser.add_argument("words", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    lines = [
        "| slots | | measured | predicted | off, % | error per step, % | floor |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        for slots in arguments.slots:
            directory = (arguments.dir or Path(scratch)) / str(slots)
            lines += check(arguments.words, slots, arguments.steps, directory)
    sys.stdout.write("\n".join([line for line in lines if line.startswith("|")]) + "\n\n")
    sys.stdout.write("\n".join([line for line in lines if not line.startswith("|")]) + "\n")


if __name__ == "__main__":
    main()
