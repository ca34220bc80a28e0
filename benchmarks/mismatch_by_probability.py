"""Where the mismatch sits by the engine's probability of a token, over runs that differ in the seed.

    python benchmarks/mismatch_by_probability.py [RUN ...]

RUN is the directory of a run; its histograms.jsonl is read. Without one, three runs of `arithmetic_grpo` of four steps
are made, with a torch engine in bfloat16. Prints Markdown: per range of probability the tokens of all runs, the mean of
|log pi - log mu| in nats with the lowest and highest run, and the share of K3.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

SETTING = (
    "arithmetic_grpo", "rollout=torch", "rollout.dtype=bfloat16", "policy.num_workers=1", "run.num_steps=4",
    "eval.every=0", "eval.max_prompts=2", "checkpoint.every=0", "tracking.wandb=disabled", "run.seed=0,1,2",
)  # fmt: skip
OCTAVES = 8
"""Ranges that are halves of the one before; all tokens below them are one more range."""


def make_runs(directory: Path) -> list[Path]:
    """Three short runs that differ in the seed."""
    command = [sys.executable, "-m", "trainer", "train", "-m", *SETTING, f"hydra.sweep.dir={directory}"]
    subprocess.run(command, check=True, stdout=sys.stderr)  # noqa: S603
    return sorted(path.parent for path in directory.glob("*/histograms.jsonl"))


def sums(run: Path) -> Tensor:
    """Sums over a run (3, ranges): tokens, |log pi - log mu| and K3."""
    lines = (run / "histograms.jsonl").read_text(encoding="utf-8").splitlines()
    found = torch.zeros(3, OCTAVES + 1, dtype=torch.float64)
    for axis in (json.loads(line)["by_probability"] for line in lines):
        counts = torch.tensor(axis["counts"], dtype=torch.float64)
        means = torch.tensor([axis["abs_logdiff"], axis["k3"]], dtype=torch.float64).nan_to_num()
        of_bins = torch.cat([counts[None], means * counts])
        found[:, :OCTAVES] += of_bins[:, :OCTAVES]
        found[:, OCTAVES] += of_bins[:, OCTAVES:].sum(1)
    return found


def table(runs: Sequence[Path]) -> str:
    """The table of `runs` as Markdown."""
    per_run = torch.stack([sums(run) for run in runs])  # (runs, 3, ranges)
    total = per_run.sum(0)
    tokens, difference, k3 = total
    of_run = per_run[:, 1] / per_run[:, 0]
    lines = [
        f"{len(runs)} runs, {int(tokens.sum()):,} tokens, K3 {k3.sum() / tokens.sum():.3g}",
        "",
        "| probability | tokens | mean of abs(log pi - log mu) | share of K3 |",
        "|---|--:|--:|--:|",
    ]
    names = [
        "1/2 to 1",
        *(f"1/{2 ** (index + 1)} to 1/{2**index}" for index in range(1, OCTAVES)),
        f"below 1/{2**OCTAVES}",
    ]
    for index, name in enumerate(names):
        low, high = of_run[:, index].min(), of_run[:, index].max()
        mean, share = difference[index] / tokens[index], k3[index] / k3.sum()
        lines.append(f"| {name} | {int(tokens[index]):,} | {mean:.3g} ({low:.3g}-{high:.3g}) | {share:.0%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN")
    named: list[Path] = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as made:
        sys.stdout.write(table(named or make_runs(Path(made))) + "\n")


if __name__ == "__main__":
    main()
