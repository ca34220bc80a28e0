"""Discrete-event simulation of rollout engines: lengths in, seconds and slots out. Nothing is sampled; numpy only.

    Work (lengths of every response) -> Fleet (engines with slots, clocks, KV contexts) -> Trace (who was busy when)

An engine runs its sequences together, one token each per decode step; a freed slot goes to the first request that
waits. Between two completions the step time is one of two straight lines in the step number, so a stretch of any length
costs one closed form, and a simulation some 20 microseconds per response, whatever its length. Requests of one prompt
stay on one engine, which the outstanding tokens choose, as in `rollout/group/balance.py`.

`rollout/simulate/simulated_schedules.py` collects with a Fleet as a trainer does: synchronously, over-sampled,
partially, asynchronously.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

TAIL_BUSY = 0.25
"""A moment belongs to the tail when fewer than this share of the slots is busy; as in the accounting of a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCost:
    """Seconds of one engine. A decode step of B sequences with contexts that sum to C takes

    step_s + max(read_s + kv_s * C, token_s * B + context_s * C)

    and to read n tokens behind c others takes prefill_token_s * n + prefill_square_s * ((c + n)^2 - c^2) + prefill_s.
    """

    step_s: float = 0.0
    """What a step costs whatever it does: launches, sampling, Python."""
    read_s: float = 0.0
    """Reading the weights."""
    kv_s: float = 0.0
    """Reading keys and values of one token of context."""
    token_s: float = 0.0
    """Products with the weights, per sequence."""
    context_s: float = 0.0
    """Attention to one token of context."""
    prefill_s: float = 0.0
    """Per prompt: the head."""
    prefill_token_s: float = 0.0
    prefill_square_s: float = 0.0

    def decode(self, steps: int, running: int, contexts: int) -> float:
        """Seconds of `steps` steps of `running` sequences, whose contexts sum to `contexts` in the first of them."""
        offset = self.read_s - self.token_s * running + (self.kv_s - self.context_s) * contexts
        slope = (self.kv_s - self.context_s) * running
        last = offset + slope * (steps - 1)
        if offset >= 0 and last >= 0:
            moved = steps
        elif offset < 0 and last < 0:
            moved = 0
        elif offset >= 0:  # bound by memory at first
            moved = min(steps, int(offset / -slope) + 1)
        else:  # bound by memory at last
            moved = steps - min(steps, -int(offset // slope))
        first, count = (0, moved) if offset >= 0 else (steps - moved, moved)
        by_memory = _sum_contexts(first, count, running, contexts)
        by_compute = _sum_contexts(0, steps, running, contexts) - by_memory
        seconds = self.read_s * moved + self.kv_s * by_memory
        seconds += self.token_s * running * (steps - moved) + self.context_s * by_compute
        return seconds + self.step_s * steps

    def steps_within(self, seconds: float, most: int, running: int, contexts: int) -> int:
        """The largest number of whole steps, at most `most`, that fit into `seconds`."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.decode(middle, running, contexts) <= seconds else (low, middle - 1)
        return low

    def prefill(self, tokens: int, behind: int = 0) -> float:
        """Seconds to read `tokens` behind `behind` others that are in the cache."""
        square = (behind + tokens) ** 2 - behind**2
        return self.prefill_s + self.prefill_token_s * tokens + self.prefill_square_s * square


def _sum_contexts(first: int, count: int, running: int, contexts: int) -> int:
    """Sum of contexts + i * running for i in first .. first + count - 1."""
    return count * contexts + running * (count * (2 * first + count - 1) // 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Lengths of all responses that a simulation may ask for, prompt by prompt."""

    prompts: list[int]
    """[prompts] tokens of each prompt."""
    responses: list[list[int]]
    """[prompts][group size] tokens of each response, at least 1."""
    cap: int
    """sampling.max_new_tokens: what a request counts as outstanding."""

    def __post_init__(self) -> None:
        sizes = {len(group) for group in self.responses}
        if len(self.prompts) != len(self.responses) or len(sizes) != 1:
            raise ValueError("the work needs a list of responses per prompt, all equally long")
        shortest = min(min(group) for group in self.responses)
        longest = max(max(group) for group in self.responses)
        if shortest < 1 or longest > self.cap or min(self.prompts) < 1:
            raise ValueError(f"responses must have 1 to {self.cap} tokens and prompts at least 1")

    @property
    def group_size(self) -> int:
        return len(self.responses[0])


class Running(NamedTuple):
    """A sequence in a slot, ordered by its end."""

    end: int
    """Decode step of its engine with which it ends."""
    group: int
    sample: int
    """Which response of the group."""


@dataclass(kw_only=True, slots=True)
class Group:
    """What is known of the responses to one prompt."""

    done: list[int]
    """Tokens of each response so far."""
    left: int
    """Responses that are not complete."""
    end_s: float = 0.0
    """When the last one was complete."""
    tokens_by_version: Counter[int] = field(default_factory=Counter)
    """Tokens by the version of the weights that sampled them."""


class Engine:
    """One engine: a clock, slots, and a queue."""

    __slots__ = ("cached", "clock", "contexts", "count", "running", "waiting")

    def __init__(self) -> None:
        self.clock = 0.0
        """When `count` decode steps were done."""
        self.count = 0
        self.contexts = 0
        """Sum of the contexts of the next step."""
        self.running: list[Running] = []
        self.waiting: deque[tuple[int, int]] = deque()
        """(group, index)."""
        self.cached: set[int] = set()
        """Groups whose prompt has been read with the present weights."""


class Fleet:
    """Engines that work on the same clock. `start` and `stop` are for all of them; in between `advance` runs on."""

    def __init__(self, work: Work, cost: EngineCost, *, num_engines: int, slots: int | None, refill: int = 1) -> None:
        """`slots` per engine, None for as many as there are requests; slots are given away when `refill` are free."""
        self._work = work
        self._cost = cost
        self._slots = slots
        self._refill = refill
        self._engines = [Engine() for _ in range(num_engines)]
        self._events: list[tuple[float, int]] = []
        self.version = 0
        """Of the weights that the engines hold."""
        self.groups: dict[int, Group] = {}
        """Those that were submitted and not yet taken."""
        self.most_outstanding = 0
        """Most requests that were unfinished at one time."""
        self.tokens_decoded = 0
        self.finished: list[int] = []
        """Complete groups in the order of their ends, until they are taken."""
        self.trace = Trace()

    @property
    def most_busy(self) -> int:
        """Slots that count: those of all engines, or the requests there ever were if these are fewer."""
        total = self.most_outstanding if self._slots is None else self._slots * len(self._engines)
        return min(total, self.most_outstanding)

    def submit(self, groups: Iterable[int]) -> None:
        """Spread the unfinished responses of `groups` over the engines. Only while they are stopped."""
        new = list(groups)
        for group in new:
            size = self._work.group_size
            self.groups.setdefault(group, Group(done=[0] * size, left=size))
        loads = [(self._queued(engine), number) for number, engine in enumerate(self._engines)]
        heapq.heapify(loads)
        parts: dict[int, list[int]] = {}
        for group in sorted(new, key=lambda group: (-self._load(group), group)):
            load, number = heapq.heappop(loads)
            parts.setdefault(number, []).append(group)
            heapq.heappush(loads, (load + self._load(group), number))
        for number, part in parts.items():
            for group in sorted(part):
                done, whole = self.groups[group].done, self._work.responses[group]
                waiting = [(group, index) for index, tokens in enumerate(done) if tokens < whole[index]]
                self._engines[number].waiting.extend(waiting)

    def start(self, at: float) -> None:
        """Let the engines go on with what waits."""
        outstanding = sum(group.left for group in self.groups.values())
        self.most_outstanding = max(self.most_outstanding, outstanding)
        self._events = []
        for number, engine in enumerate(self._engines):
            engine.clock = max(engine.clock, at)
            self._admit(engine)
            self._schedule(number)

    def stop(self, at: float, *, keep: bool) -> None:
        """End what runs at `at`; a decode step that is under way then is lost.

        keep: unfinished responses wait at their engine, whose cache is dropped; otherwise the queues are emptied.
        """
        for engine in self._engines:
            if engine.running:
                steps = engine.running[0].end - engine.count
                done = self._cost.steps_within(at - engine.clock, steps, len(engine.running), engine.contexts)
                engine.count += done
                engine.clock = max(engine.clock, at)  # what reads prompts finishes that first
            for each in sorted(engine.running, reverse=True):
                self._record(each.group, each.sample, left=each.end - engine.count)
                self.trace.change(engine.clock, -1)
                engine.waiting.appendleft((each.group, each.sample))
            engine.running, engine.contexts = [], 0
            engine.cached.clear()
            if not keep:
                engine.waiting.clear()
        self._events = []

    def advance(self, until: float | None = None) -> bool:
        """Process the next completion; False, and nothing happens, if there is none before `until`."""
        if not self._events or (until is not None and self._events[0][0] > until):
            return False
        time, number = heapq.heappop(self._events)
        engine = self._engines[number]
        steps = engine.running[0].end - engine.count
        engine.contexts += steps * len(engine.running)
        engine.clock, engine.count = time, engine.count + steps
        while engine.running and engine.running[0].end == engine.count:
            each = heapq.heappop(engine.running)
            engine.contexts -= self._work.prompts[each.group] + self._work.responses[each.group][each.sample]
            self.trace.change(time, -1)
            self._record(each.group, each.sample, left=0)
            group = self.groups[each.group]
            group.left -= 1
            if group.left == 0:
                group.end_s = time
                self.finished.append(each.group)
        self._admit(engine)
        self._schedule(number)
        return True

    def take(self, groups: Sequence[int]) -> list[Group]:
        """Hand groups over, finished or not; the fleet forgets them."""
        taken = set(groups)
        self.finished = [group for group in self.finished if group not in taken]
        return [self.groups.pop(group) for group in groups]

    def _admit(self, engine: Engine) -> None:
        slots = len(engine.running) + len(engine.waiting) if self._slots is None else self._slots
        if slots - len(engine.running) < min(self._refill, len(engine.waiting)):
            return
        while engine.waiting and len(engine.running) < slots:
            group, index = engine.waiting.popleft()
            prompt, done = self._work.prompts[group], self.groups[group].done
            self.trace.change(engine.clock, 1)
            if group not in engine.cached:
                engine.cached.add(group)
                engine.clock += self._cost.prefill(prompt)
            if done[index]:
                engine.clock += self._cost.prefill(done[index], behind=prompt)
            # A prefill gives the next token.
            self._record(group, index, left=self._work.responses[group][index] - done[index] - 1)
            heapq.heappush(
                engine.running, Running(engine.count + self._work.responses[group][index] - done[index], group, index)
            )
            engine.contexts += prompt + done[index]

    def _schedule(self, number: int) -> None:
        engine = self._engines[number]
        if engine.running:
            steps = engine.running[0].end - engine.count
            seconds = self._cost.decode(steps, len(engine.running), engine.contexts) if steps else 0.0
            heapq.heappush(self._events, (engine.clock + seconds, number))

    def _record(self, group: int, index: int, *, left: int) -> None:
        """A response has all but `left` of its tokens: those that are new were sampled from the present weights."""
        state = self.groups[group]
        total = self._work.responses[group][index] - left
        new = total - state.done[index]
        state.done[index] = total
        state.tokens_by_version[self.version] += new
        self.tokens_decoded += new

    def _load(self, group: int) -> int:
        """Prompt tokens once and the tokens that its responses may still get."""
        return self._work.prompts[group] + sum(
            self._work.cap - done
            for done, whole in zip(self.groups[group].done, self._work.responses[group], strict=True)
            if done < whole
        )

    def _queued(self, engine: Engine) -> int:
        """Outstanding tokens of an engine that is stopped."""
        prompts = {group for group, _ in engine.waiting}
        responses = sum(self._work.cap - self.groups[group].done[index] for group, index in engine.waiting)
        return sum(self._work.prompts[group] for group in prompts) + responses


class Trace:
    """How many slots were busy when."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._changes: list[int] = []

    def change(self, at: float, by: int) -> None:
        """`by` slots more are busy from `at` on."""
        self._times.append(at)
        self._changes.append(by)

    @property
    def most(self) -> int:
        """Most slots that were busy together."""
        return int(self._steps()[1].max(initial=0))

    def busy(self, phases: Sequence[tuple[float, float]], *, width: int) -> tuple[float, float]:
        """(slot-seconds, seconds with less than TAIL_BUSY of `width` slots busy) within `phases`, (start, end) each."""
        times, busy = self._steps()
        total = tail = 0.0
        for start, end in phases:
            first, last = np.searchsorted(times, [start, end], side="right")
            edges = np.concatenate([[start], times[first:last], [end]])
            level = np.concatenate([busy[first - 1 : first] if first else [0], busy[first:last]])
            lasting = np.diff(edges)
            total += float((level * lasting).sum())
            tail += float(lasting[level < TAIL_BUSY * width].sum())
        return total, tail

    def _steps(self) -> tuple[np.ndarray, np.ndarray]:
        """Times in order, and the busy slots from each of them on."""
        times = np.asarray(self._times, dtype=np.float64)
        changes = np.asarray(self._changes, dtype=np.int64)
        # At one time what ends comes before what begins.
        order = np.lexsort((changes, times))
        return times[order], changes[order].cumsum()
