"""A training step on packed sequences against one on padded sequences: seconds per real token, and whether sequences
that share a forward see each other.

    python benchmarks/packed_step.py [--sequences 64] [--median 64] [--sigma 1.0] [--repeats 5] [--threads 1]

Log-normal lengths, cut at 512. Timed: forward, log-probs of every response token, backward; no optimizer. Variants:
    padded     transformers, one batch padded to its longest sequence, with an attention mask
    sorted     the same in micro-batches of sequences of similar length, as many as ours
    packed     Parity: the bins of its planner, sequences end to end

A second table has the packed step at equal tokens, cut into more and more sequences: work that touches the whole
micro-batch once for each of its sequences shows there.

Errors are of log-probs, against one forward per sequence without padding. The negative control is transformers on
the same packed sequences with position_ids that start again at 0, once without and once with a cache (its default).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from grpo_step import build_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout.types import FinishReason, Sample
from trainer.batch.packing import micro_batch
from trainer.batch.planner import DEFAULT_COST, plan
from trainer.scoring.attention import PACKED_ATTENTION
from trainer.scoring.forward import ScoringModel

LONGEST = 512
PROMPT = 6
"""Prompt tokens of a sequence."""
CAP = 4096
"""Tokens of one packed micro-batch."""
TOLERANCE = 1e-4
"""Nats; both variants must compute the same."""


def make_samples(args: argparse.Namespace) -> list[Sample]:
    """Random tokens; lengths are log-normal with the given median of the response."""
    generator = random.Random(args.seed)  # noqa: S311  (not a secret)
    samples = []
    for index in range(args.sequences):
        drawn = round(args.median * generator.lognormvariate(0.0, args.sigma))
        response = min(max(drawn, 1), LONGEST - PROMPT)
        samples.append(
            Sample(
                prompt_id=index,
                sample_index=0,
                token_ids=np.array([generator.randrange(2, 16) for _ in range(PROMPT + response)]),
                response_mask=np.arange(PROMPT + response) >= PROMPT,
                rollout_logprobs=np.zeros(PROMPT + response),
                token_versions=np.zeros(PROMPT + response, dtype=np.int64),
                finish_reason=FinishReason.stop,
                reward=0.0,
            )
        )
    return samples


def chosen(logits: Tensor, token_ids: Tensor) -> Tensor:
    """[.., T - 1] log-probs of token t + 1 after token t."""
    return torch.log_softmax(logits[..., :-1, :].float(), dim=-1).gather(-1, token_ids[..., 1:, None]).squeeze(-1)


def exact(model: PreTrainedModel, samples: list[Sample]) -> list[Tensor]:
    """Log-probs of every response, one forward each."""
    with torch.no_grad():
        rows = [torch.from_numpy(sample.token_ids)[None] for sample in samples]
        return [chosen(model(input_ids=row, use_cache=False).logits, row)[0, PROMPT - 1 :] for row in rows]


def padded_step(model: PreTrainedModel, batches: list[list[Sample]]) -> list[list[Tensor]]:
    """Forward and backward of every batch, padded on the right."""
    results = []
    for batch in batches:
        longest = max(len(sample.token_ids) for sample in batch)
        ids = pad_sequence([torch.from_numpy(sample.token_ids) for sample in batch], batch_first=True)
        lengths = torch.tensor([len(sample.token_ids) for sample in batch])
        mask = torch.arange(longest) < lengths[:, None]
        logprobs = chosen(model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits, ids)
        response = mask[:, 1:] & (torch.arange(1, longest) >= PROMPT)
        (logprobs * response).sum().backward()
        results.append([row[PROMPT - 1 : end - 1].detach() for row, end in zip(logprobs, lengths, strict=True)])
    return results


def packed_step(model: ScoringModel, batches: list[list[Sample]]) -> list[list[Tensor]]:
    """Forward and backward of every batch, end to end."""
    results = []
    for batch in batches:
        scores = model(micro_batch(batch), temperature=1.0)
        scores.logprobs.sum().backward()
        parts = scores.logprobs.detach().split([len(sample.token_ids) for sample in batch])
        results.append([part[PROMPT:] for part in parts])
    return results


def packed_by_transformers(model: PreTrainedModel, batch: list[Sample], *, use_cache: bool) -> list[Tensor]:
    """The negative control: transformers on packed sequences, told their boundaries by position_ids only."""
    lengths = [len(sample.token_ids) for sample in batch]
    ids = torch.from_numpy(np.concatenate([sample.token_ids for sample in batch]))[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        logits = model(input_ids=ids, position_ids=positions, use_cache=use_cache).logits[0]
    pairs = zip(logits.split(lengths), ids[0].split(lengths), strict=True)
    return [chosen(part, tokens)[PROMPT - 1 :] for part, tokens in pairs]


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


def cut(tokens: int, number: int) -> list[Sample]:
    """`number` sequences of uneven lengths, `tokens` tokens together, half of each the prompt."""
    bounds = [
        round(tokens * (part + 0.3 * (part % 3 - 1) * (0 < part < number)) / number) for part in range(number + 1)
    ]
    return [
        Sample(
            prompt_id=index,
            sample_index=0,
            token_ids=np.arange(length) % 14 + 2,
            response_mask=np.arange(length) >= length // 2,
            rollout_logprobs=np.zeros(length),
            token_versions=np.zeros(length, dtype=np.int64),
            finish_reason=FinishReason.stop,
            reward=0.0,
        )
        for index, length in enumerate(end - start for start, end in pairwise(bounds))
    ]


def seconds_by_number(model: ScoringModel, repeats: int, clock: Callable[[], float]) -> dict[int, float]:
    """Number of sequences in CAP tokens -> median seconds of a packed step, the numbers by turns."""
    batches = {number: cut(CAP, number) for number in (1, 8, 64, 512)}
    seconds: dict[int, list[float]] = {number: [] for number in batches}
    for _ in range(repeats + 1):
        for number, batch in batches.items():
            started = clock()
            packed_step(model, [batch])
            seconds[number].append(clock() - started)
    return {number: statistics.median(found[1:]) for number, found in seconds.items()}


def sorted_batches(samples: list[Sample], count: int) -> list[list[int]]:
    """`count` batches of neighbours in length."""
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].token_ids))
    bounds = [len(order) * part // count for part in range(count + 1)]
    return [order[start:end] for start, end in pairwise(bounds)]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("sequences", 64), ("median", 64), ("repeats", 5), ("threads", 1), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sigma", type=float, default=1.0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    samples = make_samples(args)
    lengths = [len(sample.token_ids) for sample in samples]
    with tempfile.TemporaryDirectory() as scratch:
        build_model(Path(scratch), end_probability=0.0)
        plain = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32).eval()
        packing = AutoModelForCausalLM.from_pretrained(
            scratch, dtype=torch.float32, attn_implementation=PACKED_ATTENTION
        ).eval()
    ours = ScoringModel(packing, chunk_tokens=512)
    [bins] = plan(lengths, [DEFAULT_COST.of(length) for length in lengths], cap=CAP, num_ranks=1)
    variants: dict[str, tuple[list[list[int]], Callable[[list[list[Sample]]], list[list[Tensor]]]]] = {
        "padded": ([list(range(len(samples)))], lambda batches: padded_step(plain, batches)),
        "sorted": (sorted_batches(samples, len(bins)), lambda batches: padded_step(plain, batches)),
        "packed": (bins, lambda batches: packed_step(ours, batches)),
    }
    expected = exact(plain, samples)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    errors: dict[str, float] = {}
    for _ in range(args.repeats + 1):
        for name, (batches, step) in variants.items():
            started = clock()
            found = step([[samples[i] for i in batch] for batch in batches])
            seconds[name].append(clock() - started)
            order = [i for batch in batches for i in batch]
            errors[name] = worst([part for parts in found for part in parts], [expected[i] for i in order])
            if errors[name] > TOLERANCE:
                raise RuntimeError(f"{name} is off by {errors[name]} nats")
    sys.stdout.write(
        f"{len(samples)} sequences, {sum(lengths)} tokens, longest {max(lengths)}; {len(bins)} bins of at most {CAP} "
        f"tokens; torch {torch.__version__}, {args.threads} thread(s), "
        f"{'processor' if args.threads == 1 else 'wall'} time, median (range) of {args.repeats}.\n\n"
        "| variant | forwards | computed tokens per real one | us per real token | times padded | log-prob error |\n"
        "|---|--:|--:|--:|--:|--:|\n"
    )
    for name, (batches, _) in variants.items():
        runs = [second / sum(lengths) * 1e6 for second in seconds[name][1:]]
        base = statistics.median(seconds["padded"][1:])
        computed = sum(lengths) if name == "packed" else sum(max(lengths[i] for i in b) * len(b) for b in batches)
        sys.stdout.write(
            f"| {name} | {len(batches)} | {computed / sum(lengths):.2f} | {statistics.median(runs):.0f} "
            f"({min(runs):.0f} - {max(runs):.0f}) | {base / statistics.median(seconds[name][1:]):.2f} "
            f"| {errors[name]:.1e} |\n"
        )
    sys.stdout.write(f"\n| sequences in {CAP} tokens | us per token | times one sequence |\n|--:|--:|--:|\n")
    by_number = seconds_by_number(ours, args.repeats, clock)
    for number, second in by_number.items():
        sys.stdout.write(f"| {number} | {second / CAP * 1e6:.0f} | {second / by_number[1]:.2f} |\n")
    batch = [samples[i] for i in bins[-1]]
    truth = [expected[i] for i in bins[-1]]
    for use_cache in (False, True):
        error = worst(packed_by_transformers(plain, batch, use_cache=use_cache), truth)
        sys.stdout.write(f"\ntransformers on one packed bin, use_cache={use_cache}: log-prob error {error:.1e}")
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
