"""Sampling: the embedded engine against transformers' `generate`, same model, same prompts, ragged lengths.

    python benchmarks/generate.py [--rounds 3] [--requests 192] [--slots 64] [--tokens 256] [--width 256]
        [--layers 3] [--threads 2] [--dtype float32]

The sides take turns in one process, on the same weights and threads. `generate` is given the requests in batches of
--slots, in the order in which the engine gets them, padded on the left, with its key/value cache; the engine fills a
slot again when its sequence has ended. The engine also returns a log-prob for every token, `generate` does not.

The model is that of `grpo_step.py`: random weights, of which one row of the head ends a response with probability
4 / --tokens at every token, so that lengths are geometric, cut at --tokens. Both sides sample at temperature 1, with
their own random numbers: tokens per second are compared, by the clock and by processor seconds, not seconds.

Printed besides: of the engine's steps, which are counted where the model is called, the share of slots that were busy
and the share of tail seconds (less than a quarter of the slots busy); the time that the hardware's copy and
product rates allow for the same lengths (`trainer/limits/floors.py`) over the time taken; and how the log-probs of the
last round agree with those of the trainer's forward, on micro-batches of --slots responses.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from grpo_step import build_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollout.collect.requests import make_sample
from rollout.config import DType, Routing
from rollout.torch.config import TorchEngineConfig
from rollout.torch.engine import TorchEngine
from rollout.torch.kv_cache import Prefill, Step
from rollout.torch.model import Decoder, Read
from rollout.types import GenerateRequest, Generation, SamplingParams
from trainer.batch.packing import micro_batch
from trainer.limits.ceilings import find_ceilings
from trainer.limits.estimate import DTYPE_BYTES
from trainer.limits.floors import TAIL_BUSY, Lengths, Rates, prefill_floor, replay_decode
from trainer.limits.model_shape import directory_shape
from trainer.scoring.attention import PACKED_ATTENTION
from trainer.scoring.forward import ScoringModel

GROUP_SIZE = 8
LONGEST_PROMPT = 48


@dataclass(kw_only=True)
class Round:
    """One side's answer to all requests."""

    seconds: float
    processor_s: float
    """Of all threads: it does not depend on who else waits for the cores."""
    lengths: list[int]
    steps: list[tuple[float, int]] = field(default_factory=list)
    """(seconds since the last one, rows) of every decode step; of the engine only."""
    generations: list[Generation] = field(default_factory=list)
    """Of the engine only."""

    @property
    def rate(self) -> float:
        return sum(self.lengths) / self.seconds

    @property
    def processor_rate(self) -> float:
        return sum(self.lengths) / self.processor_s


def make_requests(args: argparse.Namespace, *, eos: int, vocabulary: int) -> list[GenerateRequest]:
    """Groups of GROUP_SIZE samples of prompts of 8 to LONGEST_PROMPT tokens."""
    generator = torch.Generator().manual_seed(0)
    requests = []
    for index in range(args.requests):
        if index % GROUP_SIZE == 0:
            length = int(torch.randint(8, LONGEST_PROMPT + 1, (1,), generator=generator))
            prompt = torch.randint(2, vocabulary, (length,), generator=generator).tolist()
        sampling = SamplingParams(temperature=1.0, max_new_tokens=args.tokens, seed=index, stop_token_ids=(eos,))
        requests.append(
            GenerateRequest(
                prompt_id=index // GROUP_SIZE,
                sample_index=index % GROUP_SIZE,
                prompt_token_ids=prompt,
                sampling=sampling,
            )
        )
    return requests


class CountedDecoder:
    """A decoder that notes when its steps ended and how many rows they had."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._last = time.perf_counter()
        self.steps: list[tuple[float, int]] = []

    @property
    def device(self) -> torch.device:
        return self._decoder.device

    @property
    def dtype(self) -> torch.dtype:
        return self._decoder.dtype

    def restart(self) -> None:
        self._last, self.steps = time.perf_counter(), []

    def prefill(self, token_ids: Tensor, lengths: Tensor, forward: Prefill, *, detail: Routing = Routing.live) -> Read:
        return self._decoder.prefill(token_ids, lengths, forward, detail=detail)

    def step(self, tokens: Tensor, positions: Tensor, forward: Step, *, detail: Routing = Routing.live) -> Read:
        read = self._decoder.step(tokens, positions, forward, detail=detail)
        now = time.perf_counter()
        self.steps.append((now - self._last, len(tokens)))
        self._last = now
        return read


def count_steps(engine: TorchEngine) -> CountedDecoder:
    """Have the engine sample with a decoder that counts."""
    decoder = engine._loop._model
    if decoder is None:
        raise RuntimeError("the engine has no weights")
    counted = CountedDecoder(decoder)
    engine._loop._model = counted  # type: ignore[assignment]
    return counted


def engine_round(engine: TorchEngine, counted: CountedDecoder, requests: list[GenerateRequest]) -> Round:
    """All requests at once; the engine's own slots."""
    counted.restart()
    begin, processor = time.perf_counter(), time.process_time()
    generations = engine.generate(requests)
    seconds, processor_s = time.perf_counter() - begin, time.process_time() - processor
    lengths = [len(each.token_ids) for each in generations]
    return Round(
        seconds=seconds, processor_s=processor_s, lengths=lengths, steps=counted.steps, generations=generations
    )


@torch.inference_mode()
def transformers_round(model: Any, requests: list[GenerateRequest], *, slots: int) -> Round:
    """Batches of `slots` requests, one after the other."""
    [eos] = requests[0].sampling.stop_token_ids
    lengths: list[int] = []
    begin, processor = time.perf_counter(), time.process_time()
    for first in range(0, len(requests), slots):
        batch = requests[first : first + slots]
        width = max(len(request.prompt_token_ids) for request in batch)
        pads = [width - len(request.prompt_token_ids) for request in batch]
        ids = [[0] * pad + request.prompt_token_ids for pad, request in zip(pads, batch, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in pads]
        out = model.generate(
            input_ids=torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=batch[0].sampling.max_new_tokens,
            eos_token_id=eos,
            pad_token_id=0,
        )
        for row in out[:, width:].tolist():
            lengths.append(row.index(eos) + 1 if eos in row else len(row))
    seconds, processor_s = time.perf_counter() - begin, time.process_time() - processor
    return Round(seconds=seconds, processor_s=processor_s, lengths=lengths)


def busy_and_tail(found: Round, *, slots: int) -> tuple[float, float]:
    """Share of the slots that were busy, and of the seconds with less than TAIL_BUSY of them."""
    rows = [count for _, count in found.steps]
    tail_s = sum(seconds for seconds, count in found.steps if count < TAIL_BUSY * slots)
    return sum(rows) / (len(rows) * slots), tail_s / sum(seconds for seconds, _ in found.steps)


def floor_seconds(found: Round, requests: list[GenerateRequest], model_path: Path, args: argparse.Namespace) -> float:
    """Seconds that the hardware's rates allow for these lengths."""
    shape = directory_shape(model_path)
    ceilings = find_ceilings("cpu", num_threads=args.threads)
    dtype = DType(args.dtype)
    rates = Rates(flops=ceilings.flops(dtype), bytes_per_s=ceilings.copy_bytes_per_s)
    prompts = {tuple(request.prompt_token_ids) for request in requests}
    lengths = [
        Lengths(len(request.prompt_token_ids), length) for request, length in zip(requests, found.lengths, strict=True)
    ]
    replay = replay_decode(shape, lengths, rates, number_bytes=DTYPE_BYTES[dtype], slots=args.slots)
    return prefill_floor(shape, [len(prompt) for prompt in prompts], rates) + replay.seconds


@torch.inference_mode()
def agreement(
    path: Path, requests: list[GenerateRequest], generations: list[Generation], *, slots: int, dtype: torch.dtype
) -> Tensor:
    """|log-prob of the engine - log-prob of the trainer's forward| of every sampled token, in nats."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=PACKED_ATTENTION).eval()
    scoring = ScoringModel(model, chunk_tokens=512)
    samples = [make_sample(request, generation) for request, generation in zip(requests, generations, strict=True)]
    batches = [micro_batch(samples[first : first + slots]) for first in range(0, len(samples), slots)]
    gaps = [(scoring(each, temperature=1.0).logprobs - each.rollout_logprobs)[each.response_mask] for each in batches]
    return torch.cat(gaps).abs()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        build_model(path, end_probability=4 / args.tokens, width=args.width, layers=args.layers)
        dtype = getattr(torch, args.dtype)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()
        config = TorchEngineConfig(dtype=DType(args.dtype), max_batch_size=args.slots)
        engine = TorchEngine(config, index=0, device="cpu", num_threads=args.threads)
        engine.start(path)
        counted = count_steps(engine)
        requests = make_requests(args, eos=int(model.config.eos_token_id), vocabulary=int(model.config.vocab_size))
        warm = requests[: args.slots]
        engine_round(engine, counted, warm), transformers_round(model, warm, slots=args.slots)
        write(f"{args.requests} requests, {args.slots} slots, at most {args.tokens} tokens, width {args.width}, ")
        write(f"{args.layers} layers, {args.dtype}, {args.threads} threads\n\n")
        write("| round | engine, tokens/s | generate, tokens/s | ratio | by processor seconds | slots busy | tail ")
        write("| of the floor |\n")
        write("|---|--:|--:|--:|--:|--:|--:|--:|\n")
        ratios, processor_ratios = [], []
        for number in range(1, args.rounds + 1):
            mine = engine_round(engine, counted, requests)
            theirs = transformers_round(model, requests, slots=args.slots)
            busy, tail = busy_and_tail(mine, slots=args.slots)
            floor = floor_seconds(mine, requests, path, args) / mine.seconds
            ratios.append(mine.rate / theirs.rate)
            processor_ratios.append(mine.processor_rate / theirs.processor_rate)
            write(f"| {number} | {mine.rate:,.0f} | {theirs.rate:,.0f} | {ratios[-1]:.2f} ")
            write(f"| {processor_ratios[-1]:.2f} | {busy:.0%} | {tail:.0%} | {floor:.1%} |\n")
        steps = [seconds * 1e3 for seconds, rows in mine.steps if rows >= 0.9 * args.slots]
        write(f"\nmedian ratio {statistics.median(ratios):.2f}, by processor seconds ")
        write(f"{statistics.median(processor_ratios):.2f}; a step of {args.slots} sequences takes ")
        mean = statistics.mean(mine.lengths)
        write(f"{statistics.median(steps):.1f} ms, {len(mine.steps)} steps; mean length {mean:.0f}\n")
        engine.stop()
        gap = agreement(path, requests, mine.generations, slots=args.slots, dtype=dtype)
        write(f"engine and trainer: {len(gap)} tokens, {(gap == 0).float().mean():.1%} of them with bitwise equal ")
        write(f"log-probs; mean difference {gap.mean():.1e}, largest {gap.max():.1e} nats\n")


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
