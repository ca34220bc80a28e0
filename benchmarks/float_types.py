"""K3 of one floating-point type on both sides: the embedded engine samples, and the trainer's scorer scores.

    python benchmarks/float_types.py [--prompts 32] [--seeds 0 1 2] [--dtypes float32 float16 bfloat16]

SmolLM2-135M-Instruct answers word problems of two steps with 48 tokens each, at temperature 1. The seed chooses the
problems and the draws. Engine and scorer hold the same weights in the same type; their code, batches and order of sums
differ, as in a run. Nothing is trained, because the gradients of float16 are slow on a processor without float16
products. The table has one row per type and seed: the number of response tokens, K3, the mean and the largest distance
of two log-probs, and the largest difference of two probabilities.

The first run fetches the model, 93 MB (trainer/run/smollm2.py). Prints Markdown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from batch_size import questions, responses
from real_step import place
from torch import Tensor
from transformers import AutoModelForCausalLM

from algorithms.kl import k3
from rollout.collect.requests import make_sample
from rollout.config import DType
from rollout.types import Sample
from rollout.weights.packing import DTYPES
from trainer.batch.packing import micro_batch
from trainer.run.smollm2 import build_smollm2
from trainer.scoring.attention import PACKED_ATTENTION
from trainer.scoring.forward import ScoringModel

CHUNK_TOKENS = 1024
RESPONSES = 16
"""Responses of a micro-batch: the scorer computes in other shapes than the engine, which decodes all together."""


def sampled(path: Path, dtype: str, *, prompts: int, seed: int) -> list[Sample]:
    """One response of the engine, with its log-probs, to each of `prompts` problems; no two seeds share a problem."""
    requests = questions(path, range(seed * prompts, (seed + 1) * prompts))
    generations = responses(path, requests, dtype=DType[dtype])
    return [make_sample(request, generation) for request, generation in zip(requests, generations, strict=True)]


def log_ratios(scorer: ScoringModel, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """(log pi - log mu, pi - mu) [R] float64 of all response tokens."""
    found: list[tuple[Tensor, Tensor]] = []
    for first in range(0, len(samples), RESPONSES):
        micro = micro_batch(samples[first : first + RESPONSES])
        trained = scorer(micro, temperature=1.0).logprobs[micro.response_index].double()
        rolled = micro.rollout_logprobs[micro.response_index].double()
        found.append((trained - rolled, trained.exp() - rolled.exp()))
    ratios, differences = zip(*found, strict=True)
    return torch.cat(ratios), torch.cat(differences)


def main() -> None:
    parser = argparse.ArgumentParser(description="K3 of one floating-point type on both sides")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["float32", "float16", "bfloat16"])
    arguments = parser.parse_args()
    path = build_smollm2()
    sys.stdout.write(f"{place()}\n\n| type | seed | tokens | K3 | mean distance, nats | largest | probabilities |\n")
    sys.stdout.write("|---|--:|--:|--:|--:|--:|--:|\n")
    with torch.inference_mode():
        for name in arguments.dtypes:
            model = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=DTYPES[name],
                attn_implementation=PACKED_ATTENTION,
                local_files_only=True,
                trust_remote_code=False,
            )
            scorer = ScoringModel(model.eval().requires_grad_(False), chunk_tokens=CHUNK_TOKENS)
            for seed in arguments.seeds:
                delta, difference = log_ratios(scorer, sampled(path, name, prompts=arguments.prompts, seed=seed))
                cells = [f"{len(delta):,}", f"{k3(delta).mean():.2e}", f"{delta.abs().mean():.1e}"]
                cells += [f"{delta.abs().max():.1e}", f"{difference.abs().max():.1e}"]
                sys.stdout.write(f"| {name} | {seed} | {' | '.join(cells)} |\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
