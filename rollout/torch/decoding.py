"""Continuous batched sampling: (Decoder, GenerateRequests) -> Generations.

The thread of `rollout/torch/decode_loop.py` calls this arithmetic of `rollout/torch/engine.py`. The response to a
request depends on its prompt, its seed and the weights; the other requests of a batch change only the last bits of the
logits.

N: sequences being decoded, in the first N slots, R: response tokens of a sequence, V: vocabulary, B: rows,
M: sequences that are read.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.truncation import CUT_LOGIT, kept_tokens
from rollout.config import Routing
from rollout.engine import aborted, whole_response
from rollout.routes import Routes, joined
from rollout.supports import supports_of
from rollout.torch.kv_cache import KVSlots
from rollout.torch.model import Decoder, ReadRoutes
from rollout.types import Completion, FinishReason, GenerateRequest, Generation

REFILL_PARTS = 8
"""Requests are admitted when 1 / REFILL_PARTS of the slots is free, or a slot for each: admission costs a forward."""

PREFILL_TOKENS = 1 << 15
"""Maximum of tokens in one forward over prompts, padding included: bounds the memory of the forward."""


class Truncation(NamedTuple):
    """What of the distribution of each row is drawn from, as `algorithms.truncation.kept_tokens` takes it; each [B]."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


class Drawn(NamedTuple):
    """The tokens of one draw."""

    tokens: Tensor
    """[B] int64."""
    logprobs: Tensor
    """[B] float32, nats, of the distribution that was drawn from; of the whole one for greedy rows."""
    kept: Tensor | None
    """[B, V] bool, the support of each token; None without truncation."""


def sample_tokens(
    logits: Tensor,
    *,
    temperature: Tensor,
    uniforms: Tensor,
    truncation: Truncation | None = None,
    log_softmax: Callable[[Tensor], Tensor] = Decoder.log_softmax,
) -> Drawn:
    """Draw one token per row by inverting the cumulative distribution.

    logits [B, V]; temperature [B] float32, 0 for greedy; uniforms [B] float64 in [0, 1). The log-probs are
    log_softmax(logits / temperature) over the kept tokens, for greedy rows of the untempered distribution.
    A row with a NaN logit yields a NaN log-prob.
    """
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    logprobs = log_softmax(scaled)
    kept = None
    if truncation is not None:
        kept = kept_tokens(logprobs.exp(), **truncation._asdict()) | greedy[:, None]
        # The trainer's head cuts in the same way, so that both have the same bits in exact arithmetic.
        logprobs = log_softmax(scaled.masked_fill(~kept, CUT_LOGIT))
    # float64: near 1, float32 numbers are 6e-8 apart, which is more than the probability of a rare token.
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    # A draw is at most 1 - 2^-53, so the product stays below the total also after rounding, and a token without
    # probability at the upper end is never chosen.
    target = uniforms * cumulative[:, -1]
    sampled = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(-1)
    tokens = torch.where(greedy, scaled.argmax(dim=-1), sampled.clamp(max=logits.shape[-1] - 1))
    return Drawn(tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1), kept)


@dataclass(kw_only=True, slots=True)
class _Sequence:
    """A request with a slot, and its response so far."""

    ticket: int
    request: GenerateRequest
    taken_up: float
    """Time of its admission, time.monotonic()."""
    draws: array[float]
    """[max_new_tokens] float64, all draws of the sample, fixed by its seed alone: draw t is for response token t."""
    tokens: list[int]
    """[R] response tokens so far, resumed tokens included."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probs of the tokens sampled here, the last ones of `tokens`."""
    versions: list[int] = field(default_factory=list)
    """Policy versions of the tokens sampled here."""
    supports: list[NDArray[np.int32]] = field(default_factory=list)
    """Supports of the tokens sampled here, if the request asks for them."""
    routes: list[Routes] = field(default_factory=list)
    """Routes of the tokens from `request.first_new_route` on, if they are asked for; the first may be shared."""
    shared_tokens: int = 0
    """Tokens of its prompt, if they were read for another sequence."""

    def known_routes(self) -> Routes:
        """Routes of the tokens from which those of the response so far were predicted."""
        return joined([*self.routes[:1], joined(self.routes[1:]).merged()]).first(
            self.length - 1 - self.request.first_new_route
        )

    @property
    def text(self) -> list[int]:
        """Prompt and response so far."""
        return self.request.prompt_token_ids + self.tokens

    @property
    def length(self) -> int:
        """Number of tokens of prompt and response so far."""
        return len(self.request.prompt_token_ids) + len(self.tokens)

    def finish_reason(self) -> FinishReason | None:
        """Reason why the response is complete; None if it is not."""
        sampling = self.request.sampling
        if self.tokens[-1] in sampling.stop_token_ids:
            return FinishReason.stop
        return FinishReason.length if len(self.tokens) >= sampling.max_new_tokens else None

    def completion(self, reason: FinishReason) -> Completion:
        """The response so far as an answer to the request."""
        first = len(self.tokens) - len(self.versions)
        rest = Generation(
            token_ids=self.tokens[first:],
            logprobs=self.logprobs,
            token_versions=self.versions,
            finish_reason=reason,
            shared_prompt_tokens=self.shared_tokens,
            supports=supports_of(self.supports) if self.request.sampling.with_supports else None,
            routes=self.known_routes() if self.request.sampling.with_routes else None,
        )
        return Completion(self.ticket, whole_response(self.request, rest))


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
        self._sequences: list[_Sequence] = []
        """The sequence in every active slot."""
        self._slots = KVSlots(num_slots=0, max_columns=0)
        self._logits: Tensor | None = None
        """[N, V], next-token logits of the active sequences."""

    @property
    def num_active(self) -> int:
        return len(self._sequences)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def oldest(self) -> tuple[float, GenerateRequest] | None:
        """(time.monotonic() of the admission, request) of the sequence that has been decoded for the longest time."""
        first = min(self._sequences, key=lambda sequence: sequence.taken_up, default=None)
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
        completions = self._sample()
        if self._sequences:
            self._logits = self._next_logits()
        return completions

    def abort(self, tickets: Collection[int] | None) -> list[Completion]:
        """End the unfinished requests among `tickets`, None for all; returns their tokens so far."""
        completions: list[Completion] = []
        for ticket in [ticket for ticket in self._waiting if tickets is None or ticket in tickets]:
            completions.append(Completion(ticket, aborted(self._waiting.pop(ticket))))
        ended = [i for i, sequence in enumerate(self._sequences) if tickets is None or sequence.ticket in tickets]
        completions += [self._sequences[index].completion(FinishReason.abort) for index in ended]
        self._release(ended)
        return completions

    def renew(self, decoder: Decoder, policy_version: int) -> None:
        """Continue with other weights: every sequence is read again with them, and keeps its log-probs so far."""
        self._decoder, self._version = decoder, policy_version
        self._logits = None
        for sequence in self._sequences:
            sequence.routes = [sequence.known_routes()]  # the newest token is read again for the next one
        if self._sequences:
            self._logits = self._read(0, [sequence.text for sequence in self._sequences])

    def _admit(self, count: int) -> None:
        """Give the next `count` requests a slot each and read their tokens."""
        now, active = time.monotonic(), self.num_active
        # Drawn on the CPU for every device, so that a seed gives the same draws everywhere.
        generator = torch.Generator()
        for ticket in list(islice(self._waiting, count)):
            request = self._waiting.pop(ticket)
            generator.manual_seed(request.sampling.seed)
            draws = torch.rand(request.sampling.max_new_tokens, generator=generator, dtype=torch.float64)
            begun = [] if request.resumed is None else list(request.resumed.token_ids)
            # A list would hold four times as many bytes, for every token that the response might have.
            packed = array("d", draws.numpy().tobytes())
            self._sequences.append(_Sequence(ticket=ticket, request=request, taken_up=now, draws=packed, tokens=begun))
        new = self._sequences[active:]
        self._slots.resize(
            num_slots=self.num_active,
            most_slots=self._num_slots,
            max_columns=max(len(s.request.prompt_token_ids) + s.request.sampling.max_new_tokens for s in new),
        )
        logits = self._read(active, [sequence.text for sequence in new])
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
                self._decoder.reading(
                    self._slots, first_slot=first + part.start, prompt_of_slot=text_of_slot, longest=width
                ),
                detail=self._detail,
            )
            logits.append(read.logits[text_of_slot])
            seen: set[int] = set()
            # One array for all that share it: it is sent to another process once.
            routes: dict[tuple[int, int], Routes] = {}
            for sequence, text in zip(self._sequences[first + part.start :], index, strict=False):
                if text in seen:
                    sequence.shared_tokens = len(sequence.request.prompt_token_ids)
                seen.add(text)
                known = sequence.request.first_new_route + sum(map(len, sequence.routes))
                if read.routes is not None and known < sequence.length:
                    new = _rows(read.routes, text, slice(known, sequence.length))
                    sequence.routes.append(routes.setdefault((text, known), new))
        return torch.cat(logits)

    @property
    def _detail(self) -> Routing:
        """The most that a sequence asks for."""
        wanted = {sequence.request.sampling.routes for sequence in self._sequences}
        return next((each for each in (Routing.weights, Routing.replay) if each in wanted), Routing.live)

    def _sample(self) -> list[Completion]:
        """Draw the next token of every active sequence -> the sequences that ended with it."""
        if self._logits is None:
            raise RuntimeError("a token is drawn after a forward")
        temperatures = [sequence.request.sampling.temperature for sequence in self._sequences]
        uniforms = [sequence.draws[len(sequence.tokens)] for sequence in self._sequences]
        device = self._logits.device
        drawn = sample_tokens(
            self._logits,
            temperature=torch.tensor(temperatures, device=device),
            uniforms=torch.tensor(uniforms, dtype=torch.float64, device=device),
            truncation=self._truncation(self._logits),
            log_softmax=self._decoder.log_softmax,
        )
        self._logits = None
        self._keep_supports(drawn.kept)
        completions, ended = [], []
        for index, (token, logprob) in enumerate(zip(drawn.tokens.tolist(), drawn.logprobs.tolist(), strict=True)):
            sequence = self._sequences[index]
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(self._version)
            if (reason := sequence.finish_reason()) is not None:
                completions.append(sequence.completion(reason))
                ended.append(index)
        self._release(ended)
        return completions

    def _truncation(self, logits: Tensor) -> Truncation | None:
        """What is drawn from for every active sequence; None if that is the whole vocabulary for all of them."""
        params, vocab = [sequence.request.sampling for sequence in self._sequences], logits.shape[-1]
        if not any(each.is_truncated for each in params):
            return None
        # Greedy rows take the most probable token anyway: few tokens have to be put in order for them.
        limits = [1 if each.temperature == 0 else vocab if each.top_k == -1 else each.top_k for each in params]
        return Truncation(
            top_k=torch.tensor(limits, device=logits.device),
            top_p=torch.tensor([each.top_p for each in params], device=logits.device),
            min_p=torch.tensor([each.min_p for each in params], device=logits.device),
        )

    def _keep_supports(self, kept: Tensor | None) -> None:
        """Add the support [N, V] of the tokens just drawn to each sequence that has to return it."""
        asking = [number for number, each in enumerate(self._sequences) if each.request.sampling.with_supports]
        if kept is None or not asking:
            return
        rows = kept[asking]
        token_ids = rows.nonzero()[:, 1].to(torch.int32).cpu().numpy()
        for number, support in zip(asking, np.split(token_ids, rows.sum(-1).cumsum(0)[:-1].cpu().numpy()), strict=True):
            self._sequences[number].supports.append(support)

    def _release(self, ended: Sequence[int]) -> None:
        """Free the slots `ended`; the last active sequences move into the gaps."""
        left = self.num_active - len(ended)
        gaps = [slot for slot in ended if slot < left]
        moved = [slot for slot in range(left, self.num_active) if slot not in ended]
        if gaps:
            target, source = (torch.tensor(slots, device=self._decoder.device) for slots in (gaps, moved))
            self._slots.move(source, target, columns=max(self._sequences[slot].length for slot in moved))
            for gap, slot in zip(gaps, moved, strict=True):
                self._sequences[gap] = self._sequences[slot]
            if self._logits is not None:
                self._logits[target] = self._logits[source]
        del self._sequences[left:]
        if self._logits is not None:
            self._logits = self._logits[:left] if left else None

    def _next_logits(self) -> Tensor:
        device = self._decoder.device
        places = [sequence.length - 1 for sequence in self._sequences]
        positions = torch.tensor(places, device=device)
        forward = self._decoder.stepping(self._slots, positions=positions, longest=max(places) + 1)
        tokens = torch.tensor([sequence.tokens[-1] for sequence in self._sequences], device=device)
        read = self._decoder.step(tokens, positions, forward, detail=self._detail)
        if read.routes is not None:
            for row, sequence in enumerate(self._sequences):
                sequence.routes.append(_rows(read.routes, row, slice(None)))
        return read.logits


def _rows(read: ReadRoutes, row: int, tokens: slice) -> Routes:
    """The routes of some tokens of a row that was read."""
    weights = () if read.weights is None else (read.weights[row, tokens],)
    return Routes((read.experts[row, tokens],), weights)


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
