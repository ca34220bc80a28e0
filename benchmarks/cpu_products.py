"""Linear layers of a training call on a CPU: torch's own product against `rollout/torch/onednn_linear.py`.

    python benchmarks/cpu_products.py [--rows 8576] [--width 256] [--layers 3] [--threads 2] [--repeats 5]

Forward and both products of the backward of every linear layer of `grpo_step.py`'s model on --rows tokens in float32:
what no training call on as many tokens can fall below with that library. The variants take turns. Prints Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from rollout.torch.onednn_linear import linear, prefers_onednn

TOLERANCE = 1e-4
"""Relative difference between the variants, at most."""


def training_products(multiply: Callable[[Tensor, Tensor], Tensor], states: Tensor, weights: list[Tensor]) -> Tensor:
    """Every layer forward and backward, one after the other; the last gradient."""
    for weight in weights:
        rows = states[:, : weight.shape[1]].detach().requires_grad_()
        multiply(rows, weight).sum().backward()
    last = weights[-1].grad
    if last is None:
        raise RuntimeError("a layer got no gradient")
    for weight in weights:
        weight.grad = None
    return last


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("rows", 8576), ("width", 256), ("layers", 3), ("threads", 2), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    wide = 4 * args.width
    sizes = [(args.width, args.width)] * 4 + [(wide, args.width)] * 2 + [(args.width, wide)]
    weights = [torch.randn(size, requires_grad=True) for size in sizes * args.layers]
    states = torch.randn(args.rows, wide)
    variants = {"torch": functional.linear, "rollout/torch/onednn_linear.py": linear}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    found = []
    for repeat in range(args.repeats + 1):
        for name, multiply in variants.items():
            started = time.perf_counter()
            gradient = training_products(multiply, states, weights)
            if repeat:
                seconds[name].append(time.perf_counter() - started)
            else:
                found.append(gradient)
    if (found[0] - found[1]).abs().max() > TOLERANCE * found[0].abs().max():
        raise RuntimeError("the variants compute different gradients")
    flops = 6 * args.rows * sum(weight.numel() for weight in weights)
    sys.stdout.write(
        f"{args.rows} rows, width {args.width}, {args.layers} layers; {args.threads} threads; torch "
        f"{torch.__version__}; oneDNN is {'' if prefers_onednn() else 'not '}preferred; medians (range) of "
        f"{args.repeats}.\n\n| variant | s | GFLOP/s |\n|---|--:|--:|\n"
    )
    for name, runs in seconds.items():
        middle = statistics.median(runs)
        sys.stdout.write(
            f"| {name} | {middle:.2f} ({min(runs):.2f} - {max(runs):.2f}) | {flops / middle / 1e9:.0f} |\n"
        )


if __name__ == "__main__":
    main()
