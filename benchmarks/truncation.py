"""Truncated sampling in training: what the kept tokens cost on SmolLM2, in the engine and in the trainer's head.

    python benchmarks/truncation.py [--engines torch sglang] [--steps 4]

Runs `parity train smollm2_grpo` once per row and prints a Markdown table: medians of the steps after the first. The
rows have other responses, so the seconds are those of 1,000 response tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from exact import train

ROWS = {
    "torch": ((), ("top_k=50",), ("top_p=0.95",), ("top_p=0.95", "min_p=0.05")),
    "sglang": ((), ("top_k=50",), ("top_k=256", "top_p=0.95")),
}
"""Engine -> keys of `sampling` of each row."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=tuple(ROWS), default=list(ROWS))
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    sys.stdout.write("| engine | sampling | kept tokens | rollout, s / 1,000 | training, s / 1,000 | K3 |\n")
    sys.stdout.write("| --- | --- | --: | --: | --: | --: |\n")
    for engine in arguments.engines:
        for keys in ROWS[engine]:
            with tempfile.TemporaryDirectory() as scratch:
                words = ("smollm2_grpo", f"rollout={engine}", f"run.num_steps={arguments.steps}", "eval.every=0")
                own = ("eval.max_prompts=2", "checkpoint.every=0", *(f"sampling.{key}" for key in keys))
                rows = train(Path(scratch) / "run", *words, *own)[1:]
            per_token = [1000 / row["rollout/response_tokens"] for row in rows]
            rollout, training = (
                statistics.median(row[name] * each for row, each in zip(rows, per_token, strict=True))
                for name in ("time/rollout_s", "time/train_s")
            )
            kept = statistics.mean(row["rollout/support_size_mean"] for row in rows) if keys else None
            shown = "all" if kept is None else f"{kept:.1f}"
            k3 = statistics.median(row["mismatch/k3"] for row in rows)
            names = " ".join(keys) or "whole vocabulary"
            sys.stdout.write(f"| {engine} | {names} | {shown} | {rollout:.2f} | {training:.2f} | {k3:.1e} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
