"""Continuous batched sampling: (Decoder, GenerateRequests) -> Generations.

The arithmetic of `rollout/torch_engine.py`. The response to a request depends on its prompt, its seed and the
weights; the requests beside it only move the last bits of the logits.

S: slots, N: sequences being decoded, in the first N slots, R: most response tokens, V: vocabulary, B: rows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rollout.decoder import Decoder
from rollout.slots import KVSlots, Prefill, Step
from rollout.types import FinishReason, GenerateRequest, Generation

REFILL_PARTS = 8
"""Requests are admitted when one of this many parts of the slots is free: each admission costs a forward."""


def sample_tokens(logits: Tensor, *, temperature: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution; also its log-prob.

    logits [B, V]; temperature [B] float32, 0 for greedy; uniforms [B] float64 in [0, 1). Returns token ids [B] int64
    and log-probs [B] float32: log_softmax(logits / temperature), for greedy rows of the untempered distribution.
    A row with a NaN logit yields a NaN log-prob.
    """
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    # float64: near 1, float32 numbers are 6e-8 apart, which is more than a rare token's share.
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    # A draw is at most 1 - 2^-53, so the product stays below the total also after rounding, and a token without
    # probability at the upper end is never chosen.
    target = uniforms * cumulative[:, -1]
    sampled = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(-1)
    tokens = torch.where(greedy, scaled.argmax(dim=-1), sampled.clamp(max=logits.shape[-1] - 1))
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def decode(
    decoder: Decoder, requests: Sequence[GenerateRequest], *, num_slots: int, policy_version: int, deadline: float
) -> list[Generation]:
    """Sample every request to its stop token or its limit; results in the order of the requests.

    At most `num_slots` sequences are decoded together. When a share of them has ended, the next requests take
    their slots. Call under `torch.inference_mode()`. `deadline` is a time.monotonic() value, looked at before every
    token; raises TimeoutError saying how many responses were complete.
    """
    if not requests:
        return []
    batch = _Batch(decoder, requests, num_slots=num_slots)
    generations: list[Generation | None] = [None] * len(requests)
    while batch.is_running:
        if time.monotonic() > deadline:
            complete = sum(generation is not None for generation in generations)
            raise TimeoutError(
                f"{complete} of {len(requests)} responses complete; {len(requests) - complete} of {len(requests)} "
                f"were unfinished after {batch.num_steps} tokens"
            )
        for position, generation in batch.advance(policy_version):
            generations[position] = generation
    return [generation for generation in generations if generation is not None]


@dataclass(kw_only=True, slots=True)
class _Rows:
    """One row per slot; those of the sequences being decoded come first."""

    request: Tensor
    """[S] int64, position in the list of requests."""
    temperature: Tensor
    """[S] float32."""
    limit: Tensor
    """[S] int64, max_new_tokens."""
    stop: Tensor
    """[S, W] int64, stop token ids, -1 where a row has fewer."""
    uniforms: Tensor
    """[S, R] float64, all draws of a sample, fixed by its seed alone."""
    prompt_length: Tensor
    """[S] int64."""
    count: Tensor
    """[S] int64, response tokens so far."""
    tokens: Tensor
    """[S, R] int64; entries from `count` on are meaningless."""
    logprobs: Tensor
    """[S, R] float32."""

    @classmethod
    def empty(cls, num_slots: int, *, num_stop: int, max_new_tokens: int, device: torch.device) -> _Rows:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

        return cls(
            request=zeros(),
            temperature=zeros(dtype=torch.float32),
            limit=zeros(),
            stop=zeros(num_stop),
            uniforms=zeros(max_new_tokens, dtype=torch.float64),
            prompt_length=zeros(),
            count=zeros(),
            tokens=zeros(max_new_tokens),
            logprobs=zeros(max_new_tokens, dtype=torch.float32),
        )

    def fill(self, first: int, positions: Sequence[int], requests: Sequence[GenerateRequest]) -> None:
        """Put requests[p] for every p of `positions` into the rows from `first` on."""
        samplings = [requests[position].sampling for position in positions]
        rows = slice(first, first + len(positions))
        width = self.stop.shape[1]
        stop = [[*s.stop_token_ids, *([-1] * (width - len(s.stop_token_ids)))] for s in samplings]
        self.request[rows] = torch.tensor(positions)
        self.temperature[rows] = torch.tensor([s.temperature for s in samplings])
        self.limit[rows] = torch.tensor([s.max_new_tokens for s in samplings])
        self.stop[rows] = torch.tensor(stop, dtype=torch.int64).view(len(positions), width)
        self.prompt_length[rows] = torch.tensor([len(requests[position].prompt_token_ids) for position in positions])
        self.count[rows] = 0
        # On the CPU whatever the device is, so that a seed means the same draws everywhere.
        generator = torch.Generator()
        for row, sampling in enumerate(samplings, start=first):
            generator.manual_seed(sampling.seed)
            draws = torch.rand(sampling.max_new_tokens, generator=generator, dtype=torch.float64)
            self.uniforms[row, : sampling.max_new_tokens] = draws

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy rows `source` to rows `target`, both [M] int64."""
        for column in fields(self):
            values = getattr(self, column.name)
            values[target] = values[source]


class _Batch:
    """The sequences being decoded and the requests that wait for a slot."""

    def __init__(self, decoder: Decoder, requests: Sequence[GenerateRequest], *, num_slots: int) -> None:
        self.num_steps = 0
        self._decoder = decoder
        self._requests = requests
        self._num_slots = min(num_slots, len(requests))
        self._waiting = 0
        """Position of the first request that has no slot yet."""
        self._active = 0
        self._rows = _Rows.empty(
            self._num_slots,
            num_stop=max(len(request.sampling.stop_token_ids) for request in requests),
            max_new_tokens=max(request.sampling.max_new_tokens for request in requests),
            device=decoder.device,
        )
        longest = max(len(request.prompt_token_ids) + request.sampling.max_new_tokens for request in requests)
        self._slots = KVSlots(num_slots=self._num_slots, max_columns=longest)
        self._logits: Tensor | None = None
        """[N, V] of the active rows."""

    @property
    def is_running(self) -> bool:
        return self._active > 0 or self._waiting < len(self._requests)

    def advance(self, policy_version: int) -> list[tuple[int, Generation]]:
        """One token for every active sequence; returns those that ended with it, by position of their request."""
        free = self._num_slots - self._active
        if self._waiting < len(self._requests) and free >= max(1, self._num_slots // REFILL_PARTS):
            self._admit(min(free, len(self._requests) - self._waiting))
        ended = self._sample()
        self.num_steps += 1
        finished: list[tuple[int, Generation]] = []
        if bool(ended.any()):
            finished = self._collect(ended.nonzero().squeeze(-1), policy_version)
            self._release(ended)
        if self._active:
            self._logits = self._next_logits()
        return finished

    def _admit(self, count: int) -> None:
        """Give the next `count` requests a slot each and read every distinct prompt among them once."""
        positions = range(self._waiting, self._waiting + count)
        distinct: dict[tuple[int, ...], int] = {}
        index = [distinct.setdefault(tuple(self._requests[p].prompt_token_ids), len(distinct)) for p in positions]
        width = max(len(prompt) for prompt in distinct)
        # The id of padding does not matter.
        padded = [list(prompt) + [0] * (width - len(prompt)) for prompt in distinct]
        device = self._decoder.device
        prompt_of_slot = torch.tensor(index, device=device)
        logits = self._decoder.prefill(
            torch.tensor(padded, device=device),
            torch.tensor([len(prompt) for prompt in distinct], device=device),
            Prefill(self._slots, first_slot=self._active, prompt_of_slot=prompt_of_slot, longest=width),
        )[prompt_of_slot]
        self._rows.fill(self._active, positions, self._requests)
        self._logits = logits if self._logits is None else torch.cat([self._logits[: self._active], logits])
        self._waiting += count
        self._active += count

    def _sample(self) -> Tensor:
        """Draw the next token of every active row; returns which rows ended with it, [N] bool."""
        rows, active = self._rows, slice(self._active)
        if self._logits is None:
            raise RuntimeError("a token is drawn after a forward")
        count = rows.count[active, None]
        uniforms = rows.uniforms[active].gather(1, count).squeeze(1)
        tokens, logprobs = sample_tokens(self._logits, temperature=rows.temperature[active], uniforms=uniforms)
        rows.tokens[active].scatter_(1, count, tokens[:, None])
        rows.logprobs[active].scatter_(1, count, logprobs[:, None])
        rows.count[active] += 1
        return (tokens[:, None] == rows.stop[active]).any(dim=-1) | (rows.count[active] >= rows.limit[active])

    def _collect(self, ended: Tensor, policy_version: int) -> list[tuple[int, Generation]]:
        rows = self._rows
        columns = (rows.request, rows.count, rows.tokens, rows.logprobs, rows.stop)
        finished = []
        for request, count, tokens, logprobs, stop in zip(*(c[ended].tolist() for c in columns), strict=True):
            reason = FinishReason.stop if tokens[count - 1] in stop else FinishReason.length
            generation = Generation(
                token_ids=tokens[:count],
                logprobs=logprobs[:count],
                token_versions=[policy_version] * count,
                finish_reason=reason,
            )
            finished.append((request, generation))
        return finished

    def _release(self, ended: Tensor) -> None:
        """Free the slots of the rows that ended; the last active rows move into the holes."""
        left = self._active - int(ended.sum())
        target = ended[:left].nonzero().squeeze(-1)
        source = (~ended[left:]).nonzero().squeeze(-1) + left
        if len(target):
            lengths = self._rows.prompt_length[source] + self._rows.count[source]
            self._slots.move(source, target, columns=int(lengths.max()))
            self._rows.move(source, target)
        self._active = left

    def _next_logits(self) -> Tensor:
        rows, active = self._rows, slice(self._active)
        count = rows.count[active]
        tokens = rows.tokens[active].gather(1, count[:, None] - 1).squeeze(1)
        positions = rows.prompt_length[active] + count - 1
        forward = Step(self._slots, positions=positions, longest=int(positions.max()) + 1, dtype=self._decoder.dtype)
        return self._decoder.step(tokens, positions, forward)
