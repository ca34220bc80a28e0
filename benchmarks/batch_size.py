"""How much the size of a batch alone changes log-probs: the same tokens, the same weights, the same code.

    python benchmarks/batch_size.py [--prompts 32] [--batches 2 8 32] [--dtypes float32 float16 bfloat16]

SmolLM2-135M-Instruct answers word problems of two steps with 48 tokens each. Plain transformers then scores every
response alone, and again in batches of each size, padded on the right, as many trainers do. The table compares the two
log-probs of each response token: the share whose probabilities differ by more than a tenth (ratio outside [0.9, 1.1]),
the largest ratio, the mean distance, K3, and the share that is equal in every bit. No weight sync can take this
mismatch away: it is in neither engine, but in the shapes of the products.

The first run fetches the model, 93 MB (trainer/run/smollm2.py). Prints Markdown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from real_step import place
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from algorithms.kl import k3
from rollout.config import DType, TorchEngineConfig
from rollout.data.tokenizer import load_tokenizer
from rollout.data.word_problems import word_problems
from rollout.torch.engine import TorchEngine
from rollout.types import GenerateRequest, Generation, SamplingParams
from rollout.weights.packing import DTYPES
from trainer.run.smollm2 import build_smollm2

MAX_NEW_TOKENS = 48
LOWEST, HIGHEST = 0.9, 1.1
"""Ratio of the two probabilities of a token that counts as equal."""


def load(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model in `dtype`, with the attention that transformers takes by itself."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True, trust_remote_code=False)
    return model.eval().requires_grad_(False)


def questions(path: Path, numbers: range) -> list[GenerateRequest]:
    """A request for MAX_NEW_TOKENS tokens, at temperature 1, to each word problem of two steps with these numbers."""
    tokenizer, requests = load_tokenizer(path), []
    for number, row in zip(numbers, islice(word_problems("two_steps", "train"), numbers.start, None), strict=False):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["question"]}], add_generation_prompt=True, tokenize=False
        )
        prompt = tokenizer.encode(str(text), add_special_tokens=False)
        sampling = SamplingParams(temperature=1.0, max_new_tokens=MAX_NEW_TOKENS, seed=number, stop_token_ids=())
        requests.append(GenerateRequest(prompt_id=number, sample_index=0, prompt_token_ids=prompt, sampling=sampling))
    return requests


def responses(path: Path, requests: Sequence[GenerateRequest], *, dtype: DType) -> list[Generation]:
    """The responses of the embedded engine, computed in `dtype`."""
    engine = TorchEngine(TorchEngineConfig(dtype=dtype), index=0, device="cpu", num_threads=None)
    engine.start(path)
    generations = engine.generate(requests)
    engine.stop()
    return generations


def answered(path: Path, *, prompts: int) -> list[tuple[list[int], int]]:
    """(token ids, number of tokens of the prompt) of one response in bfloat16 to each problem."""
    requests = questions(path, range(prompts))
    return [
        (request.prompt_token_ids + generation.token_ids, len(request.prompt_token_ids))
        for request, generation in zip(requests, responses(path, requests, dtype=DType.bfloat16), strict=True)
    ]


def scores(model: PreTrainedModel, sequences: Sequence[tuple[list[int], int]], *, size: int) -> Tensor:
    """Log-probs [R] float64 of all response tokens, scored in batches of `size` sequences, padded on the right."""
    found: list[Tensor] = []
    for start in range(0, len(sequences), size):
        batch = sequences[start : start + size]
        longest = max(len(tokens) for tokens, _ in batch)
        ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens, _ in batch])
        mask = torch.tensor([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens, _ in batch])
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        for row, (tokens, prompt) in zip(logits, batch, strict=True):
            logprobs = torch.log_softmax(row[prompt - 1 : len(tokens) - 1].float(), dim=-1)
            found.append(logprobs.gather(-1, torch.tensor(tokens[prompt:])[:, None]).squeeze(-1).double())
    return torch.cat(found)


def table_row(name: str, variant: str, reference: Tensor, scored: Tensor) -> str:
    """One row of Markdown: log-probs [R] of a variant beside those that count as right."""
    delta = scored - reference
    ratio = delta.exp()
    share = ((ratio < LOWEST) | (ratio > HIGHEST)).double().mean()
    largest = torch.maximum(ratio, 1 / ratio).max()
    cells = [
        f"{100 * share:.2f} %",
        f"{largest:.4f}",
        f"{delta.abs().mean():.1e}",
        f"{k3(delta).mean():.1e}",
        f"{100 * (delta == 0).double().mean():.1f} %",
    ]
    return f"| {name} | {variant} | {' | '.join(cells)} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="log-probs of the same tokens in batches of several sizes")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["float32", "float16", "bfloat16"])
    arguments = parser.parse_args()
    path = build_smollm2()
    sequences = answered(path, prompts=arguments.prompts)
    tokens = sum(len(ids) - prompt for ids, prompt in sequences)
    sys.stdout.write(f"{place()}\n\n{len(sequences)} responses, {tokens:,} tokens.\n\n")
    sys.stdout.write(
        "| type | batch | ratio outside [0.9, 1.1] | largest ratio | mean distance, nats | K3 | equal bits |\n"
    )
    sys.stdout.write("|---|--:|--:|--:|--:|--:|--:|\n")
    with torch.inference_mode():
        for name in arguments.dtypes:
            model = load(path, DTYPES[name])
            alone = scores(model, sequences, size=1)
            for size in arguments.batches:
                sys.stdout.write(table_row(name, str(size), alone, scores(model, sequences, size=size)))
                sys.stdout.flush()


if __name__ == "__main__":
    main()
