"""Whether memory stays flat: a real run of the torch engine and a small model, memory of every process at every step.

    python benchmarks/memory_slope.py [--steps 200] [--keep DIRECTORY]

Ray, two FSDP2 ranks, one engine, GRPO on arithmetic, a checkpoint every 50 steps, as `parity train` runs them; the base
model is built in a hurry (once, then cached), because what it knows does not matter here. The learning rate is 1e-12,
so that responses stay as long as they are: memory follows the largest batch so far, and a policy that learns to write
longer ones would show that instead of a leak. The slope is the median over all pairs of the later half of the steps
(Theil and Sen), of what a process cannot give back: its smallest memory in any 16 steps, after which a rank gives back
what it kept; private memory, without pages that processes share. Prints Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rollout.processes.process_memory import STEPS_KEPT
from trainer.compose.compose import resolve
from trainer.run.loop import train
from trainer.rundir.rows import read_rows

RECIPE = Path(__file__).parents[1] / "recipes" / "arithmetic_grpo.yaml"
PREFIX = "perf/memory_gib/"
MIB_PER_GIB = 1024


def low_points(values: Sequence[float]) -> list[float]:
    """The smallest of every STEPS_KEPT neighbours of `values`, one per step."""
    return [min(values[start : start + STEPS_KEPT]) for start in range(len(values) - STEPS_KEPT + 1)]


def median_slope(values: Sequence[float]) -> float:
    """Slope per step of `values`, one per step: the median over all pairs."""
    pairs = itertools.combinations(enumerate(values), 2)
    return statistics.median((late - early) / (j - i) for (i, early), (j, late) in pairs)


def main() -> None:
    """Run, and print a row per process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--keep", type=Path, help="directory of the run; a temporary one otherwise")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = arguments.keep or Path(scratch) / "run"
        words = [
            "rollout=torch", "model.num_steps=120", "tracking.wandb=disabled", "eval.every=50", "checkpoint.every=50",
            "batch.mini_batch_prompts=8", "optim.lr=1e-12", f"run.num_steps={arguments.steps}", f"run.dir={run_dir}",
        ]  # fmt: skip
        resolution = resolve(RECIPE, words, own_dir=None, multirun=False)
        [run] = resolution.runs
        if run.config is None:
            sys.exit("\n".join(str(problem) for problem in resolution.problems))
        started = time.perf_counter()
        train(run.config)
        seconds = time.perf_counter() - started
        rows = [row for row in read_rows(run_dir / "metrics.jsonl") if row["step"]]
    lines = [
        f"{len(rows)} steps in {seconds:.0f} s; MiB of private memory",
        "",
        "| process | step 1 | step 10 | middle | last | slope of the later half, MiB per step |",
        "|---|" + "--:|" * 5,
    ]
    for key in sorted(key for key in rows[0] if key.startswith(PREFIX)):
        series = [row[key] * MIB_PER_GIB for row in rows]
        lowest = low_points(series)
        shown = [series[0], series[min(9, len(series) - 1)], series[len(series) // 2], series[-1]]
        lines.append(
            f"| {key.removeprefix(PREFIX).replace('_', ' ')} | {' | '.join(f'{value:.1f}' for value in shown)} | "
            f"{median_slope(lowest[len(lowest) // 2 :]):.3f} |"
        )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
