"""The simulator against a real run: predicted and measured slot use, tail, rollout and step time.

    python benchmarks/simulator_check.py [--steps 24] [--slots 256 32] [--dir DIR] [key=value ...]

Trains `arithmetic_grpo` with the torch engine for --steps steps, once per value of --slots (rollout.max_batch_size).
The engine's own steps are recorded by a hook that Ray runs in every worker: when each decode step began and how many
slots were busy in it. Nothing else of the run is changed. The first quarter of the steps is left out (kernels are
compiled, memory is taken), the second gives the efficiencies, and the second half is predicted from its lengths with
these; a step behind an evaluation is left out, whose decode steps would be taken for its own. So a prediction knows how
long the responses are, and nothing about how long its own steps took.

Printed per setting: means over the predicted steps, and the mean over the steps of the error of each. "by steps" counts
every decode step alike, which no other program on the machine can disturb; "by seconds" weighs with its seconds. floor:
what the simulator says of an engine that works at the limit of the hardware. Below the table stands what the other
schedules would come to, which were not run. Prints Markdown.
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

from rollout.simulate.simulated_schedules import Outcome, Plant, Schedule, prompts_needed, simulate
from rollout.simulate.simulator import TAIL_BUSY, EngineCost, Work
from trainer.cli.simulate import _rates
from trainer.compose.catalog import find_recipe
from trainer.compose.compose import resolve
from trainer.config.train import TrainConfig
from trainer.limits.estimate import model_shape
from trainer.run.loop import is_evaluated, train
from trainer.simulate.simulation import (
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
    """Of each decode step, to the begin of the next, and of the last as long as the one before it."""
    busy: list[int]
    """Slots busy in it."""

    def by_steps(self) -> EngineSteps:
        """The same with steps of one second."""
        return EngineSteps([1.0] * len(self.seconds), self.busy)

    def slots_busy(self, width: int) -> float:
        return sum(s * b for s, b in zip(self.seconds, self.busy, strict=True)) / (width * sum(self.seconds))

    def tail(self, width: int) -> float:
        few = sum(s for s, b in zip(self.seconds, self.busy, strict=True) if b < TAIL_BUSY * width)
        return few / sum(self.seconds)


def record_steps() -> None:
    """Ray calls this in every worker: write begin and width of every decode step of an engine, and every sync as 0."""
    from rollout.torch.engine import TorchEngine
    from rollout.torch.kv_cache import Step

    plain_step, plain_load = Step.__init__, TorchEngine.load_weights
    path = Path(os.environ[RECORD]) / f"{os.getpid()}.txt"

    def write(width: int) -> None:
        with path.open("a") as file:
            file.write(f"{time.time():.6f} {width}\n")

    def made(self, *words, positions, **named):  # type: ignore[no-untyped-def]
        write(len(positions))
        plain_step(self, *words, positions=positions, **named)

    def load(self, *words, **named):  # type: ignore[no-untyped-def]
        write(0)
        return plain_load(self, *words, **named)

    Step.__init__ = made  # type: ignore[method-assign]
    TorchEngine.load_weights = load  # type: ignore[method-assign]


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


def engine_steps(directory: Path, num_steps: int) -> list[EngineSteps]:
    """The decode steps of the rollout of each training step: those between two syncs.

    Those behind an evaluated step, and those of the first, begin with an evaluation; what follows the last sync is one.
    """
    [path] = list(directory.glob("*.txt"))
    rollouts: list[list[tuple[float, int]]] = []
    for line in path.read_text().splitlines():
        begin, width = line.split()
        if width == "0":
            rollouts.append([])
        else:
            rollouts[-1].append((float(begin), int(width)))
    if len(rollouts) != num_steps + 1:
        raise SystemExit(f"{len(rollouts) - 1} rollouts were recorded, {num_steps} steps were taken")
    found = []
    for rollout in rollouts[:num_steps]:
        seconds = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(rollout)]
        found.append(EngineSteps([*seconds, seconds[-1]], [width for _, width in rollout]))
    return found


def predict(recording: Recording, plant: Plant, step: int) -> Outcome:
    """Step `step` (from 0) as the simulator sees it."""
    groups = recording.steps[step]
    prompts = [max(1, round(recording.prompt_tokens))] * len(groups)
    work = Work(prompts=prompts, responses=groups, cap=max(map(max, groups)))
    return simulate(Schedule.synchronous, work, replace(plant, prompts_per_step=len(groups)), num_steps=1)


Compared = tuple[str, list[float], list[float], list[float] | None]
"""What, and by step: measured, predicted, and of an ideal engine."""


def shares(
    name: str, took: list[EngineSteps], made: list[Outcome], ideal: list[Outcome] | None, *, width: int
) -> list[Compared]:
    """Busy slots and tail, in percent."""

    def percent(attribute: str, outcomes: list[Outcome] | None) -> list[float]:
        return [100 * getattr(each, attribute) for each in outcomes or []]

    busy, tail = (
        [100 * share(width) for share in some] for some in ([e.slots_busy for e in took], [e.tail for e in took])
    )
    return [
        (f"slots busy {name}, %", busy, percent("slots_busy_frac", made), percent("slots_busy_frac", ideal) or None),
        (f"tail {name}, %", tail, percent("tail_frac", made), percent("tail_frac", ideal) or None),
    ]


def line(name: str, real: list[float], made: list[float], least: list[float] | None) -> str:
    """The cells of a row."""
    error = statistics.mean(abs(b - a) for a, b in zip(real, made, strict=True))
    floor = "" if least is None else f"{statistics.mean(least):.3g}"
    return f"{name} | {statistics.mean(real):.3g} | {statistics.mean(made):.3g} | {error:.3g} | {floor}"


def run(config: TrainConfig, steps_dir: Path) -> None:
    """Train, with the steps of the engine recorded in `steps_dir`."""
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


def check(words: list[str], slots: int, num_steps: int, directory: Path) -> list[str]:
    """Run, predict, compare; the rows of the table."""
    words = [*RECIPE, *words, f"rollout.max_batch_size={slots}", f"run.num_steps={num_steps}"]
    config = compose(words)
    samples = config.batch.samples_per_step
    config = compose([*words, f"tracking.samples_per_step={samples}", f"run.dir={directory / 'run'}"])
    steps_dir = directory / "steps"
    if not steps_dir.exists():
        steps_dir.mkdir(parents=True)
        run(config, steps_dir)
    recording = read_recording(directory / "run")
    measured = engine_steps(steps_dir, num_steps)
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

    steps = [step for step in range(2 * quarter, num_steps) if not is_evaluated(config, step)]
    counting = replace(plant(fitted), cost=EngineCost(step_s=1.0))
    by_count = [predict(recording, counting, step) for step in steps]
    predicted = [predict(recording, plant(fitted), step) for step in steps]
    ideal = [predict(recording, plant(Efficiencies()), step) for step in steps]
    rows = [recording.times[step] for step in steps]
    took = [measured[step] for step in steps]
    width = min(slots, samples)
    compared = [
        ("decode steps", [float(len(each.busy)) for each in took], [made.rollout_s for made in by_count], None),
        *shares("by steps", [each.by_steps() for each in took], by_count, None, width=width),
        *shares("by seconds", took, predicted, ideal, width=width),
    ]
    for name in ("rollout", "train", "step"):
        eval_s = [(row.get("time/eval_s") or 0.0) if name == "step" else 0.0 for row in rows]
        seconds = [row[f"time/{name}_s"] - less for row, less in zip(rows, eval_s, strict=True)]
        made, least = ([getattr(each, f"{name}_s") for each in some] for some in (predicted, ideal))
        compared.append((f"{name}, s", seconds, made, least))
    lines = [f"| {slots} | {line(*row)} |" for row in compared]
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
    parser.add_argument("--dir", type=Path, default=None, help="where the runs are kept, and not repeated")
    parser.add_argument("words", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    lines = [
        "| slots | | measured | predicted | mean error of a step | floor |",
        "|--:|---|--:|--:|--:|--:|",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        for slots in arguments.slots:
            directory = (arguments.dir or Path(scratch)) / str(slots)
            lines += check(arguments.words, slots, arguments.steps, directory)
    sys.stdout.write("\n".join([line for line in lines if line.startswith("|")]) + "\n\n")
    sys.stdout.write("\n".join([line for line in lines if not line.startswith("|")]) + "\n")


if __name__ == "__main__":
    main()
