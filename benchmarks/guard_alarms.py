"""The guard on real runs of the arithmetic task: false alarms where nothing is wrong, true ones where something is.

    python benchmarks/guard_alarms.py [--seeds 2] [--steps 50] [--kinds bfloat16,fault] [--dir DIR] [KEY=VALUE ...]
    python benchmarks/guard_alarms.py --runs METRICS_JSONL ...

Trains the recipe `arithmetic_grpo` as benchmarks/quantized_rollout.py does (one rank and one torch engine in this
process, four optimizer steps per rollout), keeps the metrics of every step in DIR, and shows them to the guard with
its defaults. A run that is in DIR already is not repeated. Words KEY=VALUE are added to every run. Prints Markdown.
--runs trains nothing: it shows what the guard would have said to runs that are there, for example one's own.

bfloat16, int8   nothing is wrong: every alarm is a false one
fault            bfloat16; from step FAULT_STEP on the engine gets int4 weights, as after a wrong restart
collapse         int4, recompute, ten times the learning rate

rise             step in which the early warning is given
bad              step in which a watched number has been bad for guard.trip_steps steps, and which
falls            first step from which the reward (mean of WINDOW steps) stays FALL below an earlier mean to the end
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from quantized_rollout import ROOT, SETTING, Run, compose, say

from trainer.batch.planner import DEFAULT_COST
from trainer.config.guard import Action, MismatchGuardConfig
from trainer.run.guard_machine import GuardState, Row, after
from trainer.run.loop import build_batch
from trainer.run.task import load_task

INT4 = ("rollout.dtype=float32", "rollout.quantization=int4")
KINDS: dict[str, tuple[str, ...]] = {
    "bfloat16": ("rollout.dtype=bfloat16", "correction=tis"),
    "int8": ("rollout.dtype=float32", "rollout.quantization=int8", "correction=tis"),
    "fault": ("rollout.dtype=bfloat16", "rollout.quantization=int4", "correction=tis"),
    "collapse": (*INT4, "correction=recompute", "optim.lr=1e-3"),
}
FAULT_STEP = 31
WINDOW, FALL = 5, 0.1
GUARD = MismatchGuardConfig(highest=Action.warn)


class FaultyRun(Run):
    """A run whose quantised engine is sent plain weights until the fault."""

    faulty = True

    def sync(self) -> None:
        if self.faulty:
            super().sync()
        else:
            self.sampler.load(self.plain_weights())


def rows_of(kind: str, seed: int, *, steps: int, folder: Path, words: list[str]) -> list[Row]:
    """The metrics of every step of one run, trained now unless it was before."""
    path = folder / f"{kind}-{seed}-{steps}.jsonl"
    if not path.is_file():
        config = compose([*SETTING, *KINDS[kind], *words, f"run.seed={seed}", f"run.num_steps={steps}"])
        task = load_task(config, progress=lambda done, total, detail: None)
        rows = []
        with tempfile.TemporaryDirectory() as scratch:
            FaultyRun.faulty = kind != "fault"
            run = FaultyRun(config, task, Path(scratch))
            try:
                collector = run.collector()
                for step in range(1, steps + 1):
                    run.faulty = kind != "fault" or step + 1 >= FAULT_STEP
                    collected = collector.collect(step, run.version)
                    batch = build_batch(config, collected, run.version, cost=DEFAULT_COST)
                    report = run.worker.train(batch.ranks[0], batch.samples, step)
                    run.version += report.num_optimizer_steps
                    run.sync()
                    rows.append(report.metrics | {"step": step, "reward/mean": collected.stats.generated_accuracy})
            finally:
                run.close()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        sys.stderr.write(f"{path.stem}: done\n")
    return read(path)


def read(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def alarms(rows: list[Row]) -> tuple[list[int], list[str]]:
    """Steps in which the early warning begins, and in which a watched number becomes bad, with its name."""
    state, rises, bad = GuardState(), [], []
    for step, row in enumerate(rows, start=1):
        before, state = state, after(GUARD, state, row).state
        if state.rise.rises and not before.rise.rises:
            rises.append(step)
        bad += [f"{step} ({name})" for name in state.bad if name not in before.bad]
    return rises, bad


def fall_of(rows: list[Row]) -> int | None:
    """The first step after which the mean reward stays FALL below the best mean before it; None if it never does."""
    reward = [row["reward/mean"] or 0.0 for row in rows]
    means = [statistics.fmean(reward[max(0, at - WINDOW + 1) : at + 1]) for at in range(len(reward))]
    below = [mean < max(means[WINDOW - 1 : at + 1], default=0.0) - FALL for at, mean in enumerate(means)]
    lasting = next((at for at in range(WINDOW, len(below)) if all(below[at:])), None)
    return None if lasting is None else lasting + 1


def show(found: list[int] | list[str]) -> str:
    return ", ".join(str(each) for each in found) or "-"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--dir", type=Path, default=ROOT / "outputs" / "guard_alarms")
    parser.add_argument("--runs", type=Path, nargs="+", default=[])
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    say("| run | steps | K3, first thirty | K3, last ten | rise | bad | reward falls |")
    say("|---|--:|--:|--:|--:|--:|--:|")
    shown: list[Row] = []
    for path in arguments.runs:
        shown += read(path)
        tell(path.parent.name, read(path))
    for kind in [] if arguments.runs else arguments.kinds.split(","):
        for seed in range(arguments.seeds):
            rows = rows_of(kind, seed, steps=arguments.steps, folder=arguments.dir, words=arguments.words)
            tell(f"{kind}, seed {seed}", rows)
            shown += rows
    started = time.process_time()
    alarms(shown)
    say(
        f"\nThe guard itself: {1e6 * (time.process_time() - started) / len(shown):.0f} µs of processor time per step.\n"
    )


def tell(name: str, rows: list[Row]) -> None:
    """One line of the table; K3 as medians."""
    rises, bad = alarms(rows)
    k3 = [value for row in rows if (value := row["mismatch/k3"]) is not None]
    say(
        f"| {name} | {len(rows)} | {statistics.median(k3[:30]):.1e} | {statistics.median(k3[-10:]):.1e} "
        f"| {show(rises)} | {show(bad)} | {fall_of(rows) or '-'} |"
    )


if __name__ == "__main__":
    main()
