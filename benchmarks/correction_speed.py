"""How long a micro-batch takes in the correction: `correct`, its statistics, the histograms, and `metrics` per step.

    python benchmarks/correction_speed.py [--threads 1] [--repeats 30]

The sizes are those of a micro-batch of the demo and of one of SmolLM2-135M on two CPU cores, and a large one. Medians
of wall time. Prints Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from algorithms.config import MISConfig, RejectConfig
from algorithms.correction import Correction, correct
from algorithms.histograms import mismatch_histograms
from algorithms.mismatch import MismatchStats, StepContext, mismatch_stats
from algorithms.tokens import Tokens

CONFIG = MISConfig(reject=RejectConfig(veto=1e-4, geometric_ratio=[0.9, 1.1], mean_k3=0.1, max_k3=1.0))
NOISE = 0.02
"""Standard deviation of Delta, nats: a rollout in a lower precision."""
SIZES = ((2_000, 16), (7_550, 64), (262_144, 64))
"""Tokens and sequences of a micro-batch."""


def milliseconds(function: Callable[[], object], *, repeats: int) -> float:
    """Median of `repeats` calls after one that is not counted."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def make_tokens(num_tokens: int, num_sequences: int) -> Tokens:
    """Sequences of about equal length with log-probs in (-2, 0), seven tokens in ten on the mask."""
    generator = torch.Generator().manual_seed(0)
    rollout = -2 * torch.rand(num_tokens, generator=generator)
    return Tokens(
        trainer_logprobs=rollout + NOISE * torch.randn(num_tokens, generator=generator),
        rollout_logprobs=rollout,
        response_mask=torch.rand(num_tokens, generator=generator) < 0.7,
        cu_seqlens=torch.linspace(0, num_tokens, num_sequences + 1).to(torch.int32),
        advantages=torch.randn(num_tokens, generator=generator),
    )


def corrected(tokens: Tokens) -> Correction:
    """The correction, with nothing left over from an earlier call."""
    return correct(CONFIG.spec(), replace(tokens))


def measured(tokens: Tokens, context: StepContext) -> MismatchStats:
    """Everything that training asks of a micro-batch."""
    tokens = replace(tokens)
    stats = mismatch_stats(tokens, correct(CONFIG.spec(), tokens), context)
    mismatch_histograms(tokens)
    return stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    sys.stdout.write(f"{arguments.threads} thread(s), torch {torch.__version__}\n\n")
    sys.stdout.write("| tokens | sequences | a micro-batch, ms | of it `correct`, ms | `metrics` of a step, ms |\n")
    sys.stdout.write("|---:|---:|---:|---:|---:|\n")
    for num_tokens, num_sequences in SIZES:
        tokens = make_tokens(num_tokens, num_sequences)
        lags = torch.zeros(num_sequences, dtype=torch.int64)
        context = StepContext(rewards=torch.rand(num_sequences), lags=lags)
        calls = (partial(measured, tokens, context), partial(corrected, tokens), measured(tokens, context).metrics)
        times = [f"{milliseconds(call, repeats=arguments.repeats):.2f}" for call in calls]
        sys.stdout.write(f"| {num_tokens} | {num_sequences} | {' | '.join(times)} |\n")


if __name__ == "__main__":
    main()
