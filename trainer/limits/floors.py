"""The minimum seconds of a phase on given hardware: pure functions of model, lengths, ceilings. No torch import.

    floor = max(bytes that must move / bandwidth, FLOPs that must be done / rate)        fraction = floor / measured

The counts include the work that the result needs, not the work that an implementation adds: no padding, no
recomputation, no communication, no kernel launches. So a fraction cannot exceed 1, and the difference to 1 is overhead.

Symbols: M parameters that a token is multiplied with (body; the head only where a token is scored or sampled), A query
heads x head size, L layers, s tokens of a sequence, b bytes per number. Source of the FLOP counts: Kaplan et al.,
"Scaling Laws for Neural Language Models", Table 1, https://arxiv.org/abs/2001.08361; attention with the causal half.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trainer.limits.model_shape import ModelShape

BACKWARD_FORWARDS = 2.0
"""FLOPs of a backward pass, in forwards: gradients of the activations and of the weights."""
ADAMW_TRAFFIC_BYTES = 28
"""Bytes per parameter of an AdamW step, float32: weight, two moments, gradient read; all but the last written."""
TAIL_BUSY = 0.25
"""Share of busy slots below which a step of the replay belongs to the tail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Ceilings of one device in its compute type."""

    flops: float
    """FLOPs per second."""
    bytes_per_s: float
    """Bytes per second, read and written."""


class Lengths(NamedTuple):
    """Tokens of a sequence: given and sampled."""

    prompt: int
    response: int


class IdealDecode(NamedTuple):
    """Times of an ideal engine that serves given lengths: see `replay_decode`."""

    seconds: float
    """Seconds of all decode steps."""
    busy_frac: float
    """Tokens / (steps x slots); slots beyond the number of sequences do not count."""
    tail_frac: float
    """Share of the seconds in steps with fewer than `TAIL_BUSY` of the slots busy."""


class GroupLengths(NamedTuple):
    """Tokens of sequences that share a prompt."""

    prompt: int
    rests: tuple[int, ...]
    """Tokens of each sequence after the prompt."""
    scored: int
    """Tokens of all of them together that were sampled."""

    @property
    def num_tokens(self) -> int:
        """Tokens that a forward computes."""
        return self.prompt + sum(self.rests)


def sequence_flops(shape: ModelShape, groups: Sequence[GroupLengths]) -> float:
    """FLOPs of a forward that scores every response token of these groups and computes each prompt once.

    2 * body * tokens + 2 * head * response tokens + 2 * L * A * cells. A sequence of s tokens has s^2 cells: attention
    has s^2 / 2 pairs of query and key, each 2 * A FLOPs for the score and 2 * A for the value, in every layer. r tokens
    after a shared prompt of p tokens add (p + r)^2 - p^2 cells.
    """
    tokens = sum(each.num_tokens for each in groups)
    squares = sum(each.prompt**2 + sum(rest**2 + 2 * each.prompt * rest for rest in each.rests) for each in groups)
    scored = sum(each.scored for each in groups)
    matrices = 2.0 * shape.body_parameters * tokens + 2.0 * shape.head_parameters * scored
    return matrices + 2.0 * shape.num_layers * shape.attention_size * squares


def training_flops(
    shape: ModelShape, groups: Sequence[GroupLengths], *, adapter: int = 0, full_recompute: bool = False
) -> float:
    """FLOPs of forward and backward: 6 * M * tokens + 6 * L * A * s^2, 8 instead of 6 with full recomputation.

    With an `adapter` of that many parameters the model is frozen: 4 * M * tokens, because no gradients of M are made,
    6 * adapter * tokens, and the attention as before.
    """
    flops = sequence_flops(shape, groups) * (1 + BACKWARD_FORWARDS + full_recompute)
    if not adapter:
        return flops
    tokens, scored = sum(each.num_tokens for each in groups), sum(each.scored for each in groups)
    not_made = 2.0 * shape.body_parameters * tokens + 2.0 * shape.head_parameters * scored
    return flops - not_made + 2.0 * (1 + BACKWARD_FORWARDS) * adapter * tokens


def optimizer_floor(num_parameters: int, rates: Rates, *, cast_bytes: int = 0) -> float:
    """Seconds of one AdamW step: ADAMW_TRAFFIC_BYTES per parameter, and `cast_bytes` for a copy in the compute type."""
    return num_parameters * (ADAMW_TRAFFIC_BYTES + cast_bytes) / rates.bytes_per_s


def sync_floor(num_parameters: int, number_bytes: int, rates: Rates) -> float:
    """Seconds of a weight sync: every number is read once and written once, in the engine's type."""
    return 2.0 * num_parameters * number_bytes / rates.bytes_per_s


def prefill_floor(shape: ModelShape, prompts: Sequence[int], rates: Rates) -> float:
    """Seconds of reading distinct prompts (tokens of each): body everywhere, head at the last token."""
    flops = sequence_flops(shape, [GroupLengths(tokens, (), 0) for tokens in prompts])
    return (flops + 2.0 * shape.head_parameters * len(prompts)) / rates.flops


def kv_bytes_per_token(shape: ModelShape, number_bytes: int) -> int:
    """Bytes of the KV cache per token, over all layers."""
    return shape.num_layers * shape.kv_size * number_bytes


def replay_decode(
    shape: ModelShape,
    lengths: Sequence[Lengths],
    rates: Rates,
    *,
    number_bytes: int,
    is_8_bit: bool = False,
    slots: int | None,
    is_mixed: bool = False,
) -> IdealDecode:
    """Serve sequences of these lengths, in this order, each in the first free slot; slots=None serves all at once.

    The first token of a response comes from the prefill. Each further token is a decode step of all running sequences:
    max((M * b + kv * sum of contexts) / bandwidth, (2 * M * B + 4 * L * A * sum of contexts) / rate) for B sequences.
    Numbers have b = `number_bytes`; those of the layers of an engine that `is_8_bit` have one byte.

    A step of a mixture reads the experts of one token at the least; if it `is_mixed`, those that B tokens meet in the
    mean, whose experts do not depend on each other.
    """
    steps = [max(0, each.response - 1) for each in lengths]
    starts = _start_steps(steps, slots)
    num_steps = max((start + count for start, count in zip(starts, steps, strict=True)), default=0)
    if num_steps == 0:
        return IdealDecode(0.0, 1.0, 0.0)
    # Changes of the number of running sequences and of sum(prompt - start), so that contexts at step t are this sum + t
    # * B.
    running, offset = np.zeros(num_steps + 1), np.zeros(num_steps + 1)
    for each, start, count in zip(lengths, starts, steps, strict=True):
        running[start] += 1
        running[start + count] -= 1
        offset[start] += each.prompt + 1 - start
        offset[start + count] -= each.prompt + 1 - start
    busy = running.cumsum()[:-1]
    contexts = offset.cumsum()[:-1] + np.arange(num_steps) * busy
    weights = shape.matrix_parameters
    read = np.full(num_steps, float(weights))
    if is_mixed and shape.num_experts:
        missed = 1 - shape.experts_per_token / shape.num_experts  # by one token; B miss it with missed^B
        read += shape.idle_parameters * (1 - missed ** np.maximum(0, busy - 1))
    read -= is_8_bit * shape.body_parameters * (1 - 1 / number_bytes)
    moved = read * number_bytes + kv_bytes_per_token(shape, number_bytes) * contexts
    flops = 2.0 * weights * busy + 4.0 * shape.num_layers * shape.attention_size * contexts
    seconds = np.maximum(moved / rates.bytes_per_s, flops / rates.flops)
    width = min(slots or len(lengths), len(lengths))
    return IdealDecode(
        seconds=float(seconds.sum()),
        busy_frac=float(busy.sum() / (num_steps * width)),
        tail_frac=float(seconds[busy < TAIL_BUSY * width].sum() / seconds.sum()),
    )


def _start_steps(steps: Sequence[int], slots: int | None) -> list[int]:
    """The decode step at which each sequence starts: list scheduling on `slots` slots."""
    if slots is None or slots >= len(steps):
        return [0] * len(steps)
    free = [0] * slots
    starts = []
    for count in steps:
        start = heapq.heappop(free)
        starts.append(start)
        heapq.heappush(free, start + count)
    return starts
