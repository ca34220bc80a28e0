"""Rollout workers that are slow, stuck or lie, for tests of the engine group; light to import, each in its process."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from rollout.engine import EngineSetup, WeightReport, given_up
from rollout.group.worker import RolloutWorker
from rollout.types import Completion, GenerateRequest, PackedWeights, SharedWeights

POISON, REFUSED = 61, 62
"""Token ids of prompts that kill whoever has begun to serve them, or are refused."""


def decoder_of(worker: RolloutWorker) -> Any:
    return worker._engine._loop._model  # type: ignore[attr-defined]


class SlowWorker(RolloutWorker):
    """Takes its time for every token, so that a test can interfere."""

    def load_weights(self, weights: SharedWeights | PackedWeights) -> WeightReport:
        report = super().load_weights(weights)
        decoder = decoder_of(self)
        step = decoder.step

        def slow_step(*arguments: object, **options: object) -> object:
            time.sleep(0.02)
            return step(*arguments, **options)

        decoder.step = slow_step
        return report


class DishonestWorker(RolloutWorker):
    """Engine 0 answers polls but never gets on; started anew, it says that it holds other weights than it was sent."""

    def load_weights(self, weights: SharedWeights | PackedWeights) -> WeightReport:
        report = super().load_weights(weights)
        mark = self._setup.log_dir / "was started before"
        if self._setup.index == 0 and mark.exists():
            report.policy_version += 7
        elif self._setup.index == 0:
            mark.touch()
            decoder_of(self).step = lambda *arguments, **options: time.sleep(600)
        return report


class HungWorker(RolloutWorker):
    """Engine 0 answers polls but never gets on."""

    def load_weights(self, weights: SharedWeights | PackedWeights) -> WeightReport:
        report = super().load_weights(weights)
        if self._setup.index == 0:
            decoder_of(self).step = lambda *arguments, **options: time.sleep(600)
        return report


class QueueWorker(SlowWorker):
    """Begins two requests at a time, as if its cache held no more, and gives others back; engine 1 is fast."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self._queue: deque[tuple[int, GenerateRequest]] = deque()
        self._begun: set[int] = set()
        self._served: list[int] = []

    def load_weights(self, weights: SharedWeights | PackedWeights) -> WeightReport:
        is_slow = self._setup.index == 0
        return super().load_weights(weights) if is_slow else RolloutWorker.load_weights(self, weights)

    def submit(self, tickets: Sequence[int], requests: Sequence[GenerateRequest]) -> None:
        self._queue.extend(zip(tickets, requests, strict=True))
        self._begin()

    def _begin(self) -> None:
        while self._queue and len(self._begun) < 2:
            ticket, request = self._queue.popleft()
            self._begun.add(ticket)
            super().submit([ticket], [request])

    def poll(self, timeout_s: float) -> list[Completion]:
        completions = super().poll(timeout_s)
        self._served += [completion.ticket for completion in completions]
        self._begun -= {completion.ticket for completion in completions}
        self._begin()
        return completions

    def give_back(self, count: int) -> list[int]:
        return [self._queue.pop()[0] for _ in range(min(count, len(self._queue)))]

    def served(self) -> list[int]:
        """Tickets that this engine has answered."""
        return self._served


class MortalWorker(SlowWorker):
    """Dies of a prompt with POISON when it is sampled, and refuses one with REFUSED as an SGLang server does."""

    _refused: Sequence[Completion] = ()
    _is_poisoned = False

    def submit(self, tickets: Sequence[int], requests: Sequence[GenerateRequest]) -> None:
        asked = list(zip(tickets, requests, strict=True))
        self._refused = [Completion(t, given_up(r)) for t, r in asked if REFUSED in r.prompt_token_ids]
        self._is_poisoned = self._is_poisoned or any(POISON in request.prompt_token_ids for request in requests)
        served = [(t, r) for t, r in asked if REFUSED not in r.prompt_token_ids]
        super().submit([t for t, _ in served], [r for _, r in served])

    def poll(self, timeout_s: float) -> list[Completion]:
        refused, self._refused = self._refused, ()
        if self._is_poisoned:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        return list(refused) or super().poll(timeout_s)
