"""Cost of training on groups whose prompt is computed once, against the same groups with the prompt in every sequence.

    python benchmarks/shared_prompts.py [--groups 4] [--size 8] [--rounds 3] [--dtype bfloat16] [--prompts 8 30 100 300]

SmolLM2-135M-Instruct scores and differentiates `groups` x `size` sequences, in micro-batches of at most 4,096 computed
tokens, with prompts of 8, 30, 100 and 300 tokens and responses of 50 and 200 on average (uniform from half to one and a
half times as many). The same sequences are packed twice: neighbours of one prompt, which share it, and dealt so that no
neighbours have the same prompt. Both are timed in turns; the table shows the medians of seconds for forward and
backward, and the largest difference of a log-prob in float32. Prints Markdown.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch

from rollout.config import DType
from rollout.types import FinishReason, Sample
from rollout.weights.packing import DTYPES
from trainer.batch.packing import micro_batch
from trainer.batch.train_batch import MicroBatch
from trainer.policy.model import load_causal_lm
from trainer.run.smollm2 import build_smollm2
from trainer.scoring.forward import ScoringModel

CAP = 4096
VOCAB = 49_152


def draw_groups(count: int, size: int, *, prompt: int, response: int, rng: random.Random) -> list[list[Sample]]:
    """`count` groups of `size` samples with `prompt` tokens before and about `response` tokens after."""
    groups = []
    for number in range(count):
        given = [rng.randrange(VOCAB) for _ in range(prompt)]
        group = []
        for index in range(size):
            length = rng.randint(response // 2, response * 3 // 2)
            group.append(
                Sample(
                    prompt_id=number,
                    sample_index=index,
                    token_ids=np.array(given + [rng.randrange(VOCAB) for _ in range(length)]),
                    response_mask=np.arange(prompt + length) >= prompt,
                    rollout_logprobs=np.zeros(prompt + length),
                    token_versions=np.zeros(prompt + length, np.int64),
                    finish_reason=FinishReason.stop,
                )
            )
        groups.append(group)
    return groups


def batches(samples: Sequence[Sample]) -> list[MicroBatch]:
    """Micro-batches of at most CAP computed tokens, in the order of the samples."""
    found: list[MicroBatch] = []
    taken: list[Sample] = []
    for sample in samples:
        if taken and micro_batch([*taken, sample]).inputs.num_tokens > CAP:
            found.append(micro_batch(taken))
            taken = []
        taken.append(sample)
    return [*found, micro_batch(taken)]


def seconds_of(model: ScoringModel, micros: Sequence[MicroBatch]) -> float:
    """Seconds of forward and backward."""
    started = time.perf_counter()
    for micro in micros:
        model(micro, temperature=1.0).logprobs.sum().backward()
    model.zero_grad()
    return time.perf_counter() - started


def logprobs_by_sample(model: ScoringModel, micros: Sequence[MicroBatch]) -> dict[tuple[int, int], torch.Tensor]:
    """Log-probs of each sample."""
    found: dict[tuple[int, int], torch.Tensor] = {}
    with torch.no_grad():
        for micro in micros:
            parts = model(micro, temperature=1.0).logprobs.split(micro.cu_seqlens.diff().tolist())
            found |= dict(zip(micro.sample_keys, parts, strict=True))
    return found


def write(line: str) -> None:
    """One line of Markdown."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="prompts computed once against once per sequence")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=[each.name for each in DType], default="bfloat16")
    parser.add_argument("--prompts", type=int, nargs="+", default=[8, 30, 100, 300])
    arguments = parser.parse_args()
    dtype = DTYPES[arguments.dtype]
    model = ScoringModel(load_causal_lm(build_smollm2()), chunk_tokens=512)
    rng = random.Random(0)  # noqa: S311
    write(f"{arguments.groups} groups of {arguments.size}, {arguments.dtype}, {torch.get_num_threads()} threads\n")
    write("| prompt | response | tokens | computed | every prompt s | once s | ratio | largest difference |")
    write("|--:|--:|--:|--:|--:|--:|--:|--:|")
    for prompt in arguments.prompts:
        for response in (50, 200):
            groups = draw_groups(arguments.groups, arguments.size, prompt=prompt, response=response, rng=rng)
            shared = batches([sample for group in groups for sample in group])
            alone = batches([sample for dealt in zip(*groups, strict=True) for sample in dealt])
            model.float()
            ours, theirs = logprobs_by_sample(model, shared), logprobs_by_sample(model, alone)
            difference = max(float((ours[key] - theirs[key]).abs().max()) for key in ours)
            model.to(dtype)
            seconds_of(model, shared)
            times = [(seconds_of(model, alone), seconds_of(model, shared)) for _ in range(arguments.rounds)]
            slow, fast = (statistics.median(each) for each in zip(*times, strict=True))
            tokens, computed = (sum(micro.inputs.num_tokens for micro in micros) for micros in (alone, shared))
            write(
                f"| {prompt} | {response} | {tokens:,} | {computed:,} | {slow:.2f} | {fast:.2f} | {slow / fast:.2f} "
                f"| {difference:.1e} |",
            )


if __name__ == "__main__":
    main()
