"""Seconds per step and final accuracy of every schedule, of partial rollouts, and of responses with a tool.

    python benchmarks/schedules.py [--steps 30] [--seeds 3] [--model-steps 1200] [--dir DIR] [--rows NAME ...]
                                   [-- key=value ...]

Trains `arithmetic_grpo` (`arithmetic_tool` for the last row) with the torch engine, seed after seed and schedule after
schedule; prints Markdown: medians over all steps but the first two of a run, and over the seeds the mean held-out
accuracy after the last step with its lowest and highest value. With --dir a run that is finished there is not
repeated. The seconds of a machine that has other work to do say nothing; accuracy and lag do.

exposed   seconds in which the step waited for responses
hidden    seconds in which the engine sampled while the step did something else
overlap   hidden / seconds in which the engine sampled
lag       mean age of the tokens that were trained on, in optimizer steps
wasted    tokens that were sampled and thrown away / tokens that were sampled
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.cluster.session import ray_session
from trainer.compose.compose import resolve
from trainer.run.loop import train
from trainer.rundir.rows import read_rows

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
TOOL = "sync, calculator"
BASE = ("rollout=torch", "tracking.wandb=disabled", "checkpoint.every=0", "eval.every=0")
SCHEDULES = {
    "sync": (),
    "sync, partial": ("collect.partial=true", "collect.over_sampling=1.5"),
    "one_step_off": ("schedule=one_step_off",),
    "bounded": ("schedule=bounded",),
    TOOL: (),
}
WARM_STEPS = 2


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run; the first one is the evaluation before training."""
    path = run_dir / "metrics.jsonl"
    return read_rows(path) if path.exists() else []


def run(name: str, seed: int, directory: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one run, which is made if it is not there."""
    run_dir = directory / f"{name.replace(', ', '-').replace('=', '')}-{seed}"
    rows = rows_of(run_dir)
    if len(rows) == 1 + arguments.steps:
        return rows
    words = [*BASE, *SCHEDULES[name], f"run.seed={seed}", f"run.num_steps={arguments.steps}", f"run.dir={run_dir}"]
    words += [f"model.num_steps={arguments.model_steps}", "run.resume=clean", *arguments.words]
    recipe = RECIPES / f"arithmetic_{'tool' if name == TOOL else 'grpo'}.yaml"
    resolution = resolve(recipe, words, own_dir=None, multirun=False)
    if resolution.problems or resolution.runs[0].config is None:
        raise SystemExit("\n".join(map(str, resolution.problems)))
    sys.stderr.write(f"{name}, seed {seed}\n")
    train(resolution.runs[0].config)
    return rows_of(run_dir)


def median(rows: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.median(row[key] for row in rows)


def line(name: str, runs: Sequence[list[dict[str, Any]]]) -> str:
    """One row of the table."""
    warm = [row for rows in runs for row in rows[1 + WARM_STEPS :]]
    sampled = sum(row["rollout/generated_tokens"] for rows in runs for row in rows[1:])
    wasted = sum(row["rollout/wasted_tokens"] for rows in runs for row in rows[1:])
    cells = [
        f"{median(warm, 'time/step_s'):.2f}",
        f"{median(warm, 'time/rollout_s'):.2f}",
        f"{median(warm, 'perf/rollout_hidden_s'):.2f}",
        f"{median(warm, 'perf/overlap_frac'):.2f}",
        f"{statistics.mean(row['rollout/lag_mean'] for row in warm):.2f}",
        f"{statistics.mean(row['rollout/mixed_version_frac'] for row in warm):.2f}",
        f"{100 * wasted / sampled:.1f} %",
    ]
    for key in ("eval/accuracy", "eval/accuracy_sampled"):
        last = [rows[-1][key] for rows in runs]
        cells.append(f"{statistics.mean(last):.3f} ({min(last):.3f} to {max(last):.3f})")
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model-steps", type=int, default=1200, help="of the base model, which is made once")
    parser.add_argument("--dir", type=Path, help="where runs stay; a temporary directory without")
    parser.add_argument("--rows", nargs="+", choices=list(SCHEDULES), default=list(SCHEDULES), help="all without")
    parser.add_argument("words", nargs="*", help="overrides for every run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.dir or Path(scratch)
        found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in arguments.rows}
        with ray_session(None):  # once for all runs
            for seed in range(arguments.seeds):
                for name in arguments.rows:
                    found[name].append(run(name, seed, directory, arguments))
    before = statistics.mean(rows[0]["eval/accuracy"] for rows in found[arguments.rows[0]])
    lines = [
        f"{arguments.steps} steps, {arguments.seeds} seeds; held-out accuracy before training ({arguments.rows[0]}) "
        f"{before:.3f}",
        "",
        "| schedule | s per step | exposed | hidden | overlap | lag | mixed | wasted | greedy | sampled |",
        "|---|" + "--:|" * 9,
        *(line(name, runs) for name, runs in found.items()),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
