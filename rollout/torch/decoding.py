"""Continuous batched sampling: (Decoder, GenerateRequests) -> Generations.

The thread of `rollout/torch/decode_loop.py` calls this arithmetic of `rollout/torch/engine.py`. The response to a
request depends on its prompt, its seed and the weights; the other requests of a batch change only the last bits of the
logits.

S: slots, N: sequences being decoded, in the first N slots, R: most response tokens, V: vocabulary, B: rows,
M: sequences that are read.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice

import torch
from torch import Tensor

from rollout.engine import aborted, whole_response
from rollout.torch.kv_cache import KVSlots, Prefill, Step
from rollout.torch.model import Decoder
from rollout.types import Completion, FinishReason, GenerateRequest, Generation

REFILL_PARTS = 8
"""Requests are admitted when 1 / REFILL_PARTS of the slots is free, or a slot for each: admission costs a forward."""

PREFILL_TOKENS = 1 << 15
"""Maximum of tokens in one forward over prompts, padding included: bounds the memory of the forward."""


def sample_tokens(logits: Tensor, *, temperature: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution; also its log-prob.

    logits [B, V]; temperature [B] float32, 0 for greedy; uniforms [B] float64 in [0, 1). Returns token ids [B] int64
    and log-probs [B] float32: log_softmax(logits / temperature), for greedy rows of the untempered distribution.
    A row with a NaN logit yields a NaN log-prob.
    """
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    # float64: near 1, float32 numbers are 6e-8 apart, which is more than the probability of a rare token.
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    # A draw is at most 1 - 2^-53, so the product stays below the total also after rounding, and a token without
    # probability at the upper end is never chosen.
    target = uniforms * cumulative[:, -1]
    sampled = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(-1)
    tokens = torch.where(greedy, scaled.argmax(dim=-1), sampled.clamp(max=logits.shape[-1] - 1))
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


@dataclass(kw_only=True, slots=True)
class _Rows:
    """One row per slot; the rows of the sequences being decoded come first."""

    ticket: Tensor
    """[S] int64, ticket of the request."""
    temperature: Tensor
    """[S] float32, sampling temperature."""
    limit: Tensor
    """[S] int64, max_new_tokens."""
    stop: Tensor
    """[S, W] int64, stop token ids, -1 where a row has fewer."""
    uniforms: Tensor
    """[S, R] float64, all draws of a sample, fixed by its seed alone: draw t is for response token t."""
    prompt_length: Tensor
    """[S] int64, tokens of the prompt."""
    count: Tensor
    """[S] int64, response tokens so far, resumed tokens included."""
    tokens: Tensor
    """[S, R] int64; entries from `count` on have no meaning."""
    logprobs: Tensor
    """[S, R] float32; entries of resumed tokens have no meaning."""

    @classmethod
    def empty(cls, num_slots: int, *, num_stop: int, max_new_tokens: int, device: torch.device) -> _Rows:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

        return cls(
            ticket=zeros(),
            temperature=zeros(dtype=torch.float32),
            limit=zeros(),
            stop=zeros(num_stop),
            uniforms=zeros(max_new_tokens, dtype=torch.float64),
            prompt_length=zeros(),
            count=zeros(),
            tokens=zeros(max_new_tokens),
            logprobs=zeros(max_new_tokens, dtype=torch.float32),
        )

    def grown(self, num_slots: int, *, num_stop: int, max_new_tokens: int) -> _Rows:
        """The same rows with room for at least the given sizes; `self` if the room is enough."""
        held_slots, held_stop = self.stop.shape
        room = self.tokens.shape[1]
        if held_slots >= num_slots and held_stop >= num_stop and room >= max_new_tokens:
            return self
        larger = _Rows.empty(
            max(num_slots, held_slots),
            num_stop=max(num_stop, held_stop),
            max_new_tokens=max(max_new_tokens, room),
            device=self.count.device,
        )
        larger.stop.fill_(-1)
        for column in fields(self):
            old = getattr(self, column.name)
            getattr(larger, column.name)[tuple(slice(size) for size in old.shape)] = old
        return larger

    def fill(self, first: int, sequences: Sequence[_Sequence]) -> None:
        """Write `sequences` into the rows from `first` on."""
        samplings = [sequence.request.sampling for sequence in sequences]
        rows = slice(first, first + len(sequences))
        width = self.stop.shape[1]
        stop = [[*s.stop_token_ids, *([-1] * (width - len(s.stop_token_ids)))] for s in samplings]
        self.ticket[rows] = torch.tensor([sequence.ticket for sequence in sequences])
        self.temperature[rows] = torch.tensor([s.temperature for s in samplings])
        self.limit[rows] = torch.tensor([s.max_new_tokens for s in samplings])
        self.stop[rows] = torch.tensor(stop, dtype=torch.int64).view(len(sequences), width)
        self.prompt_length[rows] = torch.tensor([len(sequence.request.prompt_token_ids) for sequence in sequences])
        self.count[rows] = torch.tensor([len(sequence.begun) for sequence in sequences])
        # Drawn on the CPU for every device, so that a seed gives the same draws everywhere.
        generator = torch.Generator()
        for row, sequence in enumerate(sequences, start=first):
            sampling = sequence.request.sampling
            generator.manual_seed(sampling.seed)
            draws = torch.rand(sampling.max_new_tokens, generator=generator, dtype=torch.float64)
            self.uniforms[row, : sampling.max_new_tokens] = draws
            if sequence.begun:
                self.tokens[row, : len(sequence.begun)] = torch.tensor(sequence.begun)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy rows `source` to rows `target`, both [M] int64."""
        for column in fields(self):
            values = getattr(self, column.name)
            values[target] = values[source]


@dataclass(kw_only=True, slots=True)
class _Sequence:
    """A request with a slot."""

    ticket: int
    request: GenerateRequest
    taken_up: float
    """Time of its admission, time.monotonic()."""
    spans: list[tuple[int, int]]
    """(first response token, policy version) of every stretch sampled by this engine."""

    @property
    def begun(self) -> list[int]:
        """Response tokens of an earlier, aborted part."""
        return [] if self.request.resumed is None else self.request.resumed.token_ids

    def generation(self, tokens: list[int], logprobs: list[float], reason: FinishReason) -> Generation:
        """The response; `tokens` and `logprobs` [R] hold all tokens so far."""
        ends = [*(first for first, _ in self.spans[1:]), len(tokens)]
        versions = [v for (first, v), end in zip(self.spans, ends, strict=True) for _ in range(first, end)]
        first = len(self.begun)
        rest = Generation(
            token_ids=tokens[first:], logprobs=logprobs[first:], token_versions=versions, finish_reason=reason
        )
        return whole_response(self.request, rest)


class Batch:
    """The sequences being decoded and the requests that wait for a slot. Call under `torch.inference_mode()`.

    The set of tokens drawn together depends on the order of the calls alone, never on the clock.
    """

    def __init__(self, decoder: Decoder, *, num_slots: int, policy_version: int) -> None:
        """At most `num_slots` sequences are decoded together; memory grows with the sequences."""
        self._decoder = decoder
        self._num_slots = num_slots
        self._version = policy_version
        self._waiting: dict[int, GenerateRequest] = {}
        self._sequences: dict[int, _Sequence] = {}
        """Ticket -> sequence, in the order of admission."""
        self._rows = _Rows.empty(0, num_stop=0, max_new_tokens=0, device=decoder.device)
        self._slots = KVSlots(num_slots=0, max_columns=0)
        self._logits: Tensor | None = None
        """[N, V], next-token logits of the active rows."""

    @property
    def num_active(self) -> int:
        return len(self._sequences)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def oldest(self) -> tuple[float, GenerateRequest] | None:
        """(time.monotonic() of the admission, request) of the sequence that has been decoded for the longest time."""
        first = next(iter(self._sequences.values()), None)
        return None if first is None else (first.taken_up, first.request)

    def add(self, tickets: Sequence[int], requests: Sequence[GenerateRequest]) -> None:
        """Append requests to the queue for a slot."""
        self._waiting.update(zip(tickets, requests, strict=True))

    def advance(self) -> list[Completion]:
        """Sample one token for every active sequence; returns the sequences that ended with it."""
        free = self._num_slots - self.num_active
        if self._waiting and free >= min(self.num_waiting, max(1, self._num_slots // REFILL_PARTS)):
            self._admit(min(free, self.num_waiting))
        if not self._sequences:
            return []
        ended = self._sample()
        self._logits = None
        completions: list[Completion] = []
        if bool(ended.any()):
            completions = self._collect(ended, is_abort=False)
        if self._sequences:
            self._logits = self._next_logits()
        return completions

    def abort(self, tickets: Collection[int] | None) -> list[Completion]:
        """End the unfinished requests among `tickets`, None for all; returns their tokens so far."""
        completions: list[Completion] = []
        for ticket in [ticket for ticket in self._waiting if tickets is None or ticket in tickets]:
            completions.append(Completion(ticket, aborted(self._waiting.pop(ticket))))
        mine = [tickets is None or ticket in tickets for ticket in self._rows.ticket[: self.num_active].tolist()]
        if any(mine):
            completions += self._collect(torch.tensor(mine, device=self._decoder.device), is_abort=True)
        return completions

    def renew(self, decoder: Decoder, policy_version: int) -> None:
        """Continue with other weights: every sequence is read again with them, and keeps its log-probs so far."""
        self._decoder, self._version = decoder, policy_version
        self._logits = None
        active = self.num_active
        if not active:
            return
        rows, texts = self._rows, []
        columns = (rows.ticket, rows.count, rows.tokens)
        for ticket, count, tokens in zip(*(column[:active].tolist() for column in columns), strict=True):
            sequence = self._sequences[ticket]
            sequence.spans.append((count, policy_version))
            texts.append(sequence.request.prompt_token_ids + tokens[:count])
        self._logits = self._read(0, texts)

    def _admit(self, count: int) -> None:
        """Give the next `count` requests a slot each and read their tokens."""
        now, active = time.monotonic(), self.num_active
        sequences = []
        for ticket in list(islice(self._waiting, count)):
            request = self._waiting.pop(ticket)
            sequence = _Sequence(ticket=ticket, request=request, taken_up=now, spans=[])
            sequence.spans.append((len(sequence.begun), self._version))
            sequences.append(sequence)
        samplings = [sequence.request.sampling for sequence in sequences]
        held = len(self._rows.ticket)
        needed = active + count
        num_rows = held if needed <= held else min(self._num_slots, max(needed, 2 * held))
        self._rows = self._rows.grown(
            num_rows,
            num_stop=max(len(sampling.stop_token_ids) for sampling in samplings),
            max_new_tokens=max(sampling.max_new_tokens for sampling in samplings),
        )
        longest = max(len(s.request.prompt_token_ids) + s.request.sampling.max_new_tokens for s in sequences)
        self._slots.resize(num_slots=num_rows, max_columns=longest)
        self._rows.fill(active, sequences)
        self._sequences.update((sequence.ticket, sequence) for sequence in sequences)
        logits = self._read(active, [[*sequence.request.prompt_token_ids, *sequence.begun] for sequence in sequences])
        self._logits = logits if self._logits is None else torch.cat([self._logits, logits])

    def _read(self, first: int, texts: Sequence[Sequence[int]]) -> Tensor:
        """Store `texts` in the slots from `first` on, reading each distinct text once -> logits after each, [M, V]."""
        device, logits = self._decoder.device, []
        for part in chunks(texts, max_tokens=PREFILL_TOKENS):
            distinct: dict[tuple[int, ...], int] = {}
            index = [distinct.setdefault(tuple(text), len(distinct)) for text in texts[part]]
            width = max(len(text) for text in distinct)
            # Any token id works as padding.
            padded = [list(text) + [0] * (width - len(text)) for text in distinct]
            text_of_slot = torch.tensor(index, device=device)
            read = self._decoder.prefill(
                torch.tensor(padded, device=device),
                torch.tensor([len(text) for text in distinct], device=device),
                Prefill(self._slots, first_slot=first + part.start, prompt_of_slot=text_of_slot, longest=width),
            )
            logits.append(read[text_of_slot])
        return torch.cat(logits)

    def _sample(self) -> Tensor:
        """Draw the next token of every active row -> [N] bool, True for rows that ended with it."""
        rows, active = self._rows, slice(self.num_active)
        if self._logits is None:
            raise RuntimeError("a token is drawn after a forward")
        count = rows.count[active, None]
        uniforms = rows.uniforms[active].gather(1, count).squeeze(1)
        tokens, logprobs = sample_tokens(self._logits, temperature=rows.temperature[active], uniforms=uniforms)
        rows.tokens[active].scatter_(1, count, tokens[:, None])
        rows.logprobs[active].scatter_(1, count, logprobs[:, None])
        rows.count[active] += 1
        return (tokens[:, None] == rows.stop[active]).any(dim=-1) | (rows.count[active] >= rows.limit[active])

    def _collect(self, ended: Tensor, *, is_abort: bool) -> list[Completion]:
        """The responses of the rows `ended` [N] bool; frees their slots."""
        rows, indices, completions = self._rows, ended.nonzero().squeeze(-1), []
        columns = (rows.ticket, rows.count, rows.tokens, rows.logprobs)
        active = self.num_active
        for ticket, count, tokens, logprobs in zip(*(c[indices].tolist() for c in columns), strict=True):
            sequence = self._sequences.pop(ticket)
            stopped = tokens[count - 1] in sequence.request.sampling.stop_token_ids
            reason = FinishReason.stop if stopped else FinishReason.length
            generation = sequence.generation(
                tokens[:count], logprobs[:count], FinishReason.abort if is_abort else reason
            )
            completions.append(Completion(ticket, generation))
        self._release(ended, active=active)
        return completions

    def _release(self, ended: Tensor, *, active: int) -> None:
        """Free the slots of the `ended` rows among the first `active`; the last active rows move into the gaps."""
        left = active - int(ended.sum())
        target = ended[:left].nonzero().squeeze(-1)
        source = (~ended[left:]).nonzero().squeeze(-1) + left
        if len(target):
            lengths = self._rows.prompt_length[source] + self._rows.count[source]
            self._slots.move(source, target, columns=int(lengths.max()))
            self._rows.move(source, target)
        if self._logits is not None:
            self._logits[target] = self._logits[source]
            self._logits = self._logits[:left] if left else None

    def _next_logits(self) -> Tensor:
        rows, active = self._rows, slice(self.num_active)
        count = rows.count[active]
        tokens = rows.tokens[active].gather(1, count[:, None] - 1).squeeze(1)
        positions = rows.prompt_length[active] + count - 1
        forward = Step(self._slots, positions=positions, longest=int(positions.max()) + 1, dtype=self._decoder.dtype)
        return self._decoder.step(tokens, positions, forward)


def chunks(texts: Sequence[Sequence[int]], *, max_tokens: int) -> Iterator[slice]:
    """Consecutive `texts` for one forward, each distinct text once: `max_tokens` with padding, or a single text."""
    begin, width = 0, 0
    distinct: set[tuple[int, ...]] = set()
    for index, text in enumerate(texts):
        key = tuple(text)
        if key in distinct:
            continue
        if index > begin and (len(distinct) + 1) * max(width, len(text)) > max_tokens:
            yield slice(begin, index)
            begin, width = index, 0
            distinct.clear()
        distinct.add(key)
        width = max(width, len(text))
    yield slice(begin, len(texts))
