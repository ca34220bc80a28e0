"""Continuous batched sampling: (Decoder, GenerateRequests) -> Generations.

The thread of `rollout/embedded/sampling_loop.py` calls this arithmetic of `rollout/torch/engine.py`. The response to a
request depends on its prompt, its seed and the weights; the other requests of a batch change only the last bits of the
logits.

N: sequences being decoded, in the first N slots, R: response tokens of a sequence, V: vocabulary, B: rows,
M: sequences that are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rollout.config import Routing
from rollout.embedded import batch as embedded
from rollout.embedded.batch import Response
from rollout.embedded.drawing import add_drawn, sample_tokens, truncation_of
from rollout.routes import Routes
from rollout.torch.kv_cache import KVSlots
from rollout.torch.model import Decoder, ReadRoutes
from rollout.types import Completion

REFILL_PARTS = 8
"""Requests are admitted when 1 / REFILL_PARTS of the slots is free, or a slot for each: admission costs a forward."""

PREFILL_TOKENS = 1 << 15
"""Maximum of tokens in one forward over prompts, padding included: bounds the memory of the forward."""


class Batch(embedded.Batch[Decoder]):
    """The sequences being decoded and the requests that wait for a slot. Call under `torch.inference_mode()`.

    The set of tokens drawn together depends on the order of the calls alone, never on the clock.
    """

    def __init__(self, decoder: Decoder, *, num_slots: int, policy_version: int) -> None:
        """Memory grows with the sequences."""
        super().__init__(decoder, num_slots=num_slots, policy_version=policy_version)
        self._sequences: list[Response] = []
        """The sequence in every active slot."""
        self._slots = KVSlots(num_slots=0, max_columns=0)
        self._logits: Tensor | None = None
        """[N, V], next-token logits of the active sequences."""

    @property
    def active(self) -> list[Response]:
        return self._sequences

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

    def renew(self, decoder: Decoder, policy_version: int) -> None:
        """Continue with other weights: every sequence is read again with them, and keeps its log-probs so far."""
        self._model, self._version = decoder, policy_version
        self._logits = None
        for sequence in self._sequences:
            sequence.routes = [sequence.known_routes()]  # the newest token is read again for the next one
        if self._sequences:
            self._logits = self._read(0, [sequence.text for sequence in self._sequences])

    def _admit(self, count: int) -> None:
        """Give the next `count` requests a slot each and read their tokens."""
        active = self.num_active
        self._sequences += self._next(count)
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
        device, logits = self._model.device, []
        for part in chunks(texts, max_tokens=PREFILL_TOKENS):
            distinct: dict[tuple[int, ...], int] = {}
            index = [distinct.setdefault(tuple(text), len(distinct)) for text in texts[part]]
            width = max(len(text) for text in distinct)
            # Any token id works as padding.
            padded = [list(text) + [0] * (width - len(text)) for text in distinct]
            text_of_slot = torch.tensor(index, device=device)
            read = self._model.prefill(
                torch.tensor(padded, device=device),
                torch.tensor([len(text) for text in distinct], device=device),
                self._model.reading(
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
        sampling = [sequence.request.sampling for sequence in self._sequences]
        device = self._logits.device
        drawn = sample_tokens(
            self._logits,
            temperature=torch.tensor([each.temperature for each in sampling], device=device),
            seeds=torch.tensor([each.seed for each in sampling], device=device),
            positions=torch.tensor([sequence.length - 1 for sequence in self._sequences], device=device),
            truncation=truncation_of(sampling, self._logits),
            log_softmax=self._model.log_softmax,
        )
        self._logits = None
        add_drawn(drawn, self._sequences, policy_version=self._version)
        completions, ended = [], []
        for sequence in self._sequences:
            if (reason := sequence.finish_reason()) is not None:
                completions.append(sequence.completion(reason))
                ended.append(sequence)
        self._release(ended)
        return completions

    def _release(self, ended: Sequence[Response]) -> None:
        """Free the slots of `ended`; the last active sequences move into the gaps."""
        tickets = {sequence.ticket for sequence in ended}
        freed = [slot for slot, sequence in enumerate(self._sequences) if sequence.ticket in tickets]
        left = self.num_active - len(freed)
        gaps = [slot for slot in freed if slot < left]
        moved = [slot for slot in range(left, self.num_active) if slot not in freed]
        if gaps:
            target, source = (torch.tensor(slots, device=self._model.device) for slots in (gaps, moved))
            self._slots.move(source, target, columns=max(self._sequences[slot].length for slot in moved))
            for gap, slot in zip(gaps, moved, strict=True):
                self._sequences[gap] = self._sequences[slot]
            if self._logits is not None:
                self._logits[target] = self._logits[source]
        del self._sequences[left:]
        if self._logits is not None:
            self._logits = self._logits[:left] if left else None

    def _next_logits(self) -> Tensor:
        device = self._model.device
        places = [sequence.length - 1 for sequence in self._sequences]
        positions = torch.tensor(places, device=device)
        forward = self._model.stepping(self._slots, positions=positions, longest=max(places) + 1)
        tokens = torch.tensor([sequence.tokens[-1] for sequence in self._sequences], device=device)
        read = self._model.step(tokens, positions, forward, detail=self._detail)
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
