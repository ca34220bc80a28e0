"""EpisodeSampler: requests -> responses of several turns, between the collector and the engines.

To the collector it is a sampler like the engines. Every turn is a request of its own to the engines, whose prompt is
everything before it; between turns the rollout function decides. The transcript is kept here: a rollout function
cannot change what was sampled.
"""

from __future__ import annotations

import itertools
import logging
import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.engine import wait_for
from rollout.episodes.child import SEPARATOR
from rollout.episodes.config import EPISODE_MEMORY_BYTES, EpisodeConfig
from rollout.episodes.running import RunningEpisode
from rollout.episodes.worker import EpisodeWorker, Inbox
from rollout.processes.child_process import START_TIMEOUT_S
from rollout.types import Completion, FinishReason, GenerateRequest, Generation

if TYPE_CHECKING:
    from rollout.collect.dispatch import Sampler

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 2
"""How often an episode is begun whose worker was lost through no fault that can be shown to be its own."""
TICK_S = 0.02
"""Both sides are waited for in turns of this length while both have something to do."""


class EpisodeFunctionError(RuntimeError):
    """The rollout function cannot be used at all; names it and what happened."""


@dataclass(kw_only=True, slots=True)
class EpisodeStats:
    """What happened since the last look."""

    ended: int = 0
    turns: int = 0
    failed: int = 0
    restarted: int = 0
    last_failure: str = ""

    def metrics(self) -> dict[str, float | None]:
        """episode/turns_mean, failed, restarted."""
        mean = self.turns / self.ended if self.ended else None
        return {"episode/turns_mean": mean, "episode/failed": self.failed, "episode/restarted": self.restarted}

    def warn(self) -> None:
        """Log that episodes failed, if any did."""
        if self.failed:
            logger.warning("%d of %d episodes failed; the last was %s", self.failed, self.ended, self.last_failure)


class EpisodeSampler:
    """Implements `rollout.collect.dispatch.Sampler` over another one. Usable from one thread."""

    def __init__(self, sampler: Sampler, config: EpisodeConfig, *, tokenizer_file: Path) -> None:
        """`tokenizer_file` is the tokenizer.json of the model."""
        if config.function is None:
            raise ValueError("episode.function is null: responses of one turn need no EpisodeSampler")
        self._sampler = sampler
        self._config = config
        self._function = f"{config.function}{SEPARATOR}{tokenizer_file}"
        self._tickets = itertools.count()
        self._inbox: Inbox = queue.SimpleQueue()
        self._workers: list[EpisodeWorker] = []
        self._episodes: dict[int, RunningEpisode] = {}
        self._turns: dict[int, GenerateRequest] = {}
        """By episode: what rollout functions want sampled, until it is submitted."""
        self._of_engine_ticket: dict[int, int] = {}
        self._done: list[Completion] = []
        self._stats = EpisodeStats()
        self._alone: dict[int, EpisodeStats] = {}
        """By ticket, where the episodes that somebody waits for in `generate` are counted."""

    def submit(self, requests: Sequence[GenerateRequest]) -> list[int]:
        """Begin an episode for each request; their tickets."""
        tickets = []
        for request in requests:
            if request.resumed is not None:
                raise ValueError("an episode cannot be resumed: the rollout function does not remember its first part")
            ticket = next(self._tickets)
            self._episodes[ticket] = self._begun(
                RunningEpisode(ticket=ticket, request=request, worker=self._worker(ticket))
            )
            tickets.append(ticket)
        return tickets

    def poll(self, timeout_s: float) -> list[Completion]:
        """The episodes that have ended since the last poll; waits at most `timeout_s` for the first.

        Raises EpisodeFunctionError if the rollout function cannot be loaded, and what the engines raise.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            remaining = deadline - time.monotonic()
            self._hear_workers(remaining if not self._of_engine_ticket else 0.0)
            self._hear_engines(remaining)
            self._check_deadlines()
            if self._done or remaining <= 0 or not self._episodes:
                done, self._done = self._done, []
                return done

    def abort(self, tickets: Sequence[int] | None) -> None:
        """End the unfinished episodes among `tickets`, None for all; `poll` returns what they have so far."""
        chosen = list(self._episodes) if tickets is None else [each for each in tickets if each in self._episodes]
        for episode in (self._episodes[ticket] for ticket in chosen):
            self._let_go(episode)
            self._finish(episode, FinishReason.abort)

    @property
    def unfinished(self) -> int:
        """Tickets that `poll` has not returned yet."""
        return len(self._episodes) + len(self._done)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """One response per request, in their order; `poll` returns what else ends meanwhile.

        As an evaluation is no part of a step, `take_stats` does not count these episodes; those that fail are logged.
        """
        others: list[Completion] = []
        tickets = self.submit(requests)
        stats = EpisodeStats()
        self._alone.update(dict.fromkeys(tickets, stats))
        try:
            return wait_for(tickets, self.poll, others=others)
        finally:
            self._done += others
            for ticket in tickets:
                self._alone.pop(ticket, None)
            stats.warn()

    def sampling_s(self) -> float:
        """Seconds in which the engines have sampled since they started; mean over engines."""
        return self._sampler.sampling_s()

    def take_stats(self) -> EpisodeStats:
        """What happened since the last call."""
        taken, self._stats = self._stats, EpisodeStats()
        return taken

    def close(self) -> None:
        """End the workers; safe to call twice. They start again with the next episode."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def _worker(self, ticket: int) -> EpisodeWorker:
        """The worker of an episode, by turns; all are started with the first episode."""
        while len(self._workers) < self._config.num_workers:
            self._workers.append(self._start())
        return self._workers[ticket % len(self._workers)]

    def _start(self) -> EpisodeWorker:
        return EpisodeWorker(self._function, memory_bytes=EPISODE_MEMORY_BYTES, inbox=self._inbox)

    def _begun(self, episode: RunningEpisode) -> RunningEpisode:
        request = episode.request
        episode.worker.say(
            {
                "start": episode.ticket,
                "token_ids": request.prompt_token_ids,
                "answer": request.answer,
                "row": request.row,
                "max_new_tokens": request.sampling.max_new_tokens,
            }
        )
        episode.since = time.monotonic()
        return episode

    def _hear_workers(self, timeout_s: float) -> None:
        """Act on what rollout functions want; waits for the first message only if the engines have nothing to do."""
        self._heed_all(timeout_s)
        if self._turns:  # one call for all of them: each is a round trip to the engines
            numbers, turns = list(self._turns), list(self._turns.values())
            self._turns = {}
            for number, engine_ticket in zip(numbers, self._sampler.submit(turns), strict=True):
                self._episodes[number].engine_ticket = engine_ticket
                self._of_engine_ticket[engine_ticket] = number

    def _heed_all(self, timeout_s: float) -> None:
        wait_s = min(max(timeout_s, 0.0), self._config.timeout_s)
        try:
            said = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            while True:
                if said.worker in self._workers:
                    self._heed(said.worker, said.message)
                said = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _heed(self, worker: EpisodeWorker, message: dict[str, Any] | None) -> None:
        if message is None:
            crashed = [each for each in self._episodes.values() if each.ticket == worker.running]
            self._replace(worker, f"its worker {worker.death()}", blamed=crashed if worker.ready else ())
        elif "ready" in message:
            worker.ready = True
        elif "running" in message:
            worker.running = message["running"]
        elif "failed" in message:
            self.close()
            raise EpisodeFunctionError(f"episode.function={self._config.function}: {message['failed']}")
        elif (episode := self._episodes.get(message["generate" if "generate" in message else "end"])) is not None:
            episode.observe(message["observed"])
            if "generate" in message:
                self._turns[episode.ticket] = episode.next_turn(message)
            else:
                self._end(episode, message["error"])

    def _hear_engines(self, remaining: float) -> None:
        if not self._of_engine_ticket:
            return
        # Whatever a rollout function wants next should not wait behind the longest turn.
        between_turns = len(self._episodes) > len(self._of_engine_ticket)
        wait_s = min(remaining, TICK_S) if between_turns else remaining
        for ticket, generation in self._sampler.poll(max(0.0, wait_s)):
            number = self._of_engine_ticket.pop(ticket, None)
            if number is None:
                continue  # the episode was given up in the meantime
            episode = self._episodes[number]
            episode.engine_ticket = None
            episode.add(generation)
            if generation.finish_reason not in (FinishReason.stop, FinishReason.length):
                self._let_go(episode)
                self._finish(episode, generation.finish_reason)
                continue
            stopped = generation.finish_reason is FinishReason.stop
            episode.worker.say({"turn": number, "token_ids": generation.token_ids, "stopped": stopped})
            episode.since = time.monotonic()

    def _end(self, episode: RunningEpisode, error: str | None) -> None:
        if error is None and not episode.num_turns:
            error = "it ended without having sampled anything"
        if error is not None:
            self._stats_of(
                episode
            ).last_failure = f"prompt {episode.request.prompt_id}/{episode.request.sample_index}: {error}"
            self._finish(episode, FinishReason.failed)
        else:
            self._finish(episode, FinishReason.length if episode.tokens_left < 1 else episode.last)

    def _finish(self, episode: RunningEpisode, reason: FinishReason) -> None:
        del self._episodes[episode.ticket]
        stats = self._stats_of(episode)
        stats.ended += 1
        stats.turns += episode.num_turns
        stats.failed += reason is FinishReason.failed
        self._done.append(Completion(episode.ticket, episode.generation(reason)))

    def _let_go(self, episode: RunningEpisode) -> None:
        """Nobody is to work on the episode any more."""
        self._turns.pop(episode.ticket, None)
        if episode.engine_ticket is not None:
            self._sampler.abort([episode.engine_ticket])
            self._of_engine_ticket.pop(episode.engine_ticket, None)
            episode.engine_ticket = None
        episode.worker.say({"cancel": episode.ticket})

    def _stats_of(self, episode: RunningEpisode) -> EpisodeStats:
        return self._alone.get(episode.ticket, self._stats)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            limit = self._config.timeout_s if worker.ready else START_TIMEOUT_S
            late = [
                each
                for each in self._episodes.values()
                if each.worker is worker and each.engine_ticket is None and now - each.since > limit
            ]
            if late:
                # Code that never gives way makes all others late.
                blamed = [each for each in late if each.ticket == worker.running] or late
                self._replace(worker, f"no answer within {limit:g} s after a turn", blamed=blamed)

    def _replace(self, worker: EpisodeWorker, what: str, *, blamed: Sequence[RunningEpisode]) -> None:
        """A worker is lost: the episodes that it hung in fail, the others of it begin anew in another one."""
        worker.kill()
        self._workers.remove(worker)
        for episode in [each for each in self._episodes.values() if each.worker is worker]:
            self._let_go(episode)
            if episode in blamed or episode.attempt >= MAX_ATTEMPTS:
                self._end(episode, what)
                continue
            self._stats_of(episode).restarted += 1
            # Who is to blame is out of the way now; if nobody is known to be, it may be this one.
            attempt = episode.attempt + (not blamed)
            anew = RunningEpisode(
                ticket=episode.ticket, request=episode.request, worker=self._worker(episode.ticket), attempt=attempt
            )
            self._episodes[episode.ticket] = self._begun(anew)


@contextmanager
def with_episodes(sampler: Sampler, config: EpisodeConfig, *, model_path: Path) -> Iterator[Sampler]:
    """`sampler` as it is, or behind an EpisodeSampler if the config names a rollout function."""
    if config.function is None:
        yield sampler
        return
    tokenizer_file = model_path / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise ValueError(f"episode.function={config.function} needs a fast tokenizer: {tokenizer_file} does not exist")
    with closing(EpisodeSampler(sampler, config, tokenizer_file=tokenizer_file)) as episodes:
        yield episodes


def episode_metrics(sampler: Sampler) -> dict[str, float | None]:
    """episode/* since the last call, and a warning if any failed; nothing for responses of one turn."""
    if not isinstance(sampler, EpisodeSampler):
        return {}
    stats = sampler.take_stats()
    stats.warn()
    return stats.metrics()
