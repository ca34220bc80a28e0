"""Ways to collect the samples of a training step, simulated: what each does to step time, slots, tail and staleness.

Symbols: P prompts per step, f over-sampling, k the training step, from 1; it trains weights of version k - 1, and a
token that was sampled from version v has lag k - 1 - v.

    synchronous   P prompts are answered completely; then training, then sync.
    over_sampled  ceil(f P) prompts start; with the P-th complete group the rest is aborted and its tokens are wasted.
    partial       as over_sampled, but what is not complete goes on in the next step, its tokens read again.
    one_step_off  step k + 1 is collected while step k trains; both end before the sync: its tokens have lag 1.
    asynchronous  engines never drain: prompts of step j start once version j - 1 - max_staleness exists, a sync pauses
                  all engines and drops their caches, then everything goes on. Steps train prompts in their order.

over_sampled and partial train the groups that are complete first, and short answers are: `length_bias` says how much.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from rollout.simulate.simulator import EngineCost, Fleet, Group, Work


class Schedule(Enum):
    """How a step is collected."""

    synchronous = "synchronous"
    over_sampled = "over_sampled"
    partial = "partial"
    one_step_off = "one_step_off"
    asynchronous = "asynchronous"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainCost:
    """Seconds of a training step: step_s + token_s * tokens + response_s * response tokens + square_s * sum of s^2."""

    step_s: float = 0.0
    token_s: float = 0.0
    """Prompt and response tokens: the body."""
    response_s: float = 0.0
    """Response tokens: the head."""
    square_s: float = 0.0
    """Attention, per squared length of a sequence."""

    def seconds(self, prompts: list[int], responses: list[list[int]]) -> float:
        """Of a step on these groups."""
        lengths = [prompt + each for prompt, group in zip(prompts, responses, strict=True) for each in group]
        sampled = sum(map(sum, responses))
        squares = sum(length**2 for length in lengths)
        return self.step_s + self.token_s * sum(lengths) + self.response_s * sampled + self.square_s * squares


@dataclass(frozen=True, kw_only=True, slots=True)
class Plant:
    """What is simulated."""

    cost: EngineCost
    train: TrainCost
    sync_s: float
    """Seconds of a weight sync, in which engines and trainer wait."""
    other_s: float
    """Seconds of a step in which neither samples nor trains: rewards, packing, logging."""
    num_engines: int
    slots: int | None
    """Sequences that an engine decodes together; None for all it has."""
    prompts_per_step: int
    refill: int = 1
    """Slots that must be free until one is given away."""
    over_sampling: float = 1.5
    max_staleness: int = 2

    def __post_init__(self) -> None:
        if self.num_engines < 1 or self.prompts_per_step < 1 or self.over_sampling < 1 or self.max_staleness < 1:
            raise ValueError("engines, prompts, over-sampling and staleness must be at least 1")


@dataclass(kw_only=True, slots=True)
class Step:
    """One training step of a simulation."""

    begin_s: float
    """The end of the step before."""
    rollout_s: float
    """Seconds in which engines sampled for it, from its first request to its last token."""
    wait_s: float
    """Seconds in which the trainer waited for responses."""
    train_s: float
    end_s: float = 0.0
    trained: Counter[int] = field(default_factory=Counter)
    """Tokens that were trained on, by lag."""
    wasted: int = 0
    """Tokens of responses that were aborted for good."""
    trained_responses: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a schedule comes to; means over the steps after the first quarter, in which pipelines fill."""

    schedule: Schedule
    step_s: float
    rollout_s: float
    wait_s: float
    train_s: float
    tokens_per_s: float
    """Response tokens trained on per second."""
    slots_busy_frac: float
    """Busy slot-seconds / (slots x seconds in which a rollout is under way); slots beyond the requests do not count."""
    running_mean: float
    """Sequences that an engine decodes together, on average over all seconds, those of training and sync included."""
    tail_frac: float
    """Share of these seconds with less than a quarter of the slots busy."""
    wasted_frac: float
    """Tokens of aborted responses / (these + tokens trained on)."""
    lags: dict[int, float]
    """Share of the trained tokens by lag."""
    length_bias: float
    """Mean length of the trained responses / mean of all that were started for these steps; 1 is no bias. Of the whole
    simulation, first quarter included, as are the counts of tokens."""
    tokens_decoded: int
    tokens_taken: int
    """Trained on or wasted."""
    tokens_in_flight: int
    """Left in the engines at the end."""

    @property
    def mean_lag(self) -> float:
        return sum(lag * share for lag, share in self.lags.items())


def simulate(schedule: Schedule, work: Work, plant: Plant, *, num_steps: int) -> Outcome:
    """Collect and train `num_steps` steps. Raises ValueError if `work` holds too few prompts (see `prompts_needed`)."""
    needed = prompts_needed(schedule, plant, num_steps=num_steps)
    if len(work.prompts) < needed:
        raise ValueError(
            f"{schedule.name} needs {needed} prompts for {num_steps} steps, the work has {len(work.prompts)}"
        )
    run = _Run(work, plant)
    steps = list(_SCHEDULES[schedule](run, num_steps))
    counted = steps[num_steps // 4 :]
    window = [(max(start, counted[0].begin_s), end) for start, end in run.phases if end > counted[0].begin_s]
    width = run.fleet.most_busy
    busy, tail = run.fleet.trace.busy(window, width=width)
    phase_s = sum(end - start for start, end in window)
    trained: Counter[int] = Counter()
    for step in counted:
        trained.update(step.trained)
    total, wasted = trained.total(), sum(step.wasted for step in counted)
    in_order = schedule not in (Schedule.over_sampled, Schedule.partial)
    started = work.responses[: plant.prompts_per_step * num_steps if in_order else needed]
    drawn = [each for group in started for each in group]
    mean_trained = sum(step.trained.total() for step in steps) / sum(step.trained_responses for step in steps)
    wall_s = counted[-1].end_s - counted[0].begin_s
    return Outcome(
        schedule=schedule,
        step_s=wall_s / len(counted),
        rollout_s=sum(step.rollout_s for step in counted) / len(counted),
        wait_s=sum(step.wait_s for step in counted) / len(counted),
        train_s=sum(step.train_s for step in counted) / len(counted),
        tokens_per_s=total / wall_s,
        slots_busy_frac=busy / (width * phase_s),
        running_mean=busy / (plant.num_engines * wall_s),
        tail_frac=tail / phase_s,
        wasted_frac=wasted / (total + wasted),
        lags={lag: trained[lag] / total for lag in sorted(trained)},
        length_bias=mean_trained / (sum(drawn) / len(drawn)),
        tokens_decoded=run.fleet.tokens_decoded,
        tokens_taken=sum(step.trained.total() + step.wasted for step in steps),
        tokens_in_flight=sum(sum(group.done) for group in run.fleet.groups.values()),
    )


def prompts_needed(schedule: Schedule, plant: Plant, *, num_steps: int) -> int:
    """Prompts that `num_steps` steps may start."""
    match schedule:
        case Schedule.over_sampled | Schedule.partial:
            return _started(plant) * num_steps
        case Schedule.one_step_off:
            return plant.prompts_per_step * (num_steps + 1)
        case Schedule.asynchronous:
            return plant.prompts_per_step * (num_steps + plant.max_staleness)
        case _:
            return plant.prompts_per_step * num_steps


def _started(plant: Plant) -> int:
    return math.ceil(plant.over_sampling * plant.prompts_per_step)


class _Run:
    """A fleet, the prompts that it has not seen, and when it was sampling."""

    def __init__(self, work: Work, plant: Plant) -> None:
        self.work = work
        self.plant = plant
        self.fleet = Fleet(work, plant.cost, num_engines=plant.num_engines, slots=plant.slots, refill=plant.refill)
        self.phases: list[tuple[float, float]] = []
        """(start, end) of the times in which a rollout was under way."""
        self._next = 0

    def new(self, count: int) -> list[int]:
        """The next prompts."""
        first, self._next = self._next, self._next + count
        return list(range(first, self._next))

    def until(self, count: int) -> float:
        """Run until `count` groups are complete; returns when the last of them was."""
        while len(self.fleet.finished) < count:
            if not self.fleet.advance():
                raise RuntimeError("the engines have nothing left to do")
        return self.fleet.groups[self.fleet.finished[count - 1]].end_s

    def train_s(self, groups: list[int]) -> float:
        """Of a step on these groups."""
        return self.plant.train.seconds(
            [self.work.prompts[group] for group in groups], [self.work.responses[group] for group in groups]
        )

    def trained(self, step: Step, groups: list[int], *, version: int) -> None:
        """Take complete groups for a step that trains `version`."""
        for group in self.fleet.take(groups):
            for sampled, tokens in group.tokens_by_version.items():
                step.trained[version - sampled] += tokens
            step.trained_responses += len(group.done)


def _synchronous(run: _Run, num_steps: int) -> Iterator[Step]:
    return _rounds(run, num_steps, started=run.plant.prompts_per_step, keep=False)


def _over_sampled(run: _Run, num_steps: int) -> Iterator[Step]:
    return _rounds(run, num_steps, started=_started(run.plant), keep=False)


def _partial(run: _Run, num_steps: int) -> Iterator[Step]:
    return _rounds(run, num_steps, started=_started(run.plant), keep=True)


def _rounds(run: _Run, num_steps: int, *, started: int, keep: bool) -> Iterator[Step]:
    """Engines and trainer take turns; a round ends with as many complete groups as a step trains."""
    fleet, plant, now = run.fleet, run.plant, 0.0
    for number in range(num_steps):
        fleet.version = number
        fleet.submit([*fleet.groups, *run.new(started - len(fleet.groups))])
        fleet.start(now)
        end = run.until(plant.prompts_per_step)
        # Also of kept responses: they are dispatched anew with the next round.
        fleet.stop(end, keep=False)
        run.phases.append((now, end))
        groups = fleet.finished[: plant.prompts_per_step]
        train_s = run.train_s(groups)
        step = Step(begin_s=now, rollout_s=end - now, wait_s=end - now, train_s=train_s)
        run.trained(step, groups, version=number)
        if not keep:
            step.wasted = _tokens(fleet.take(list(fleet.groups)))
        now = step.end_s = end + train_s + plant.sync_s + plant.other_s
        yield step


def _one_step_off(run: _Run, num_steps: int) -> Iterator[Step]:
    """A round is answered while the one before it trains."""
    fleet, plant, now = run.fleet, run.plant, 0.0
    count = plant.prompts_per_step
    groups, rollout_s = _round(run, count, 0.0), run.phases[-1][1]
    wait_s = now = rollout_s
    begin = 0.0
    for number in range(num_steps):
        train_s = run.train_s(groups)
        step = Step(begin_s=begin, rollout_s=rollout_s, wait_s=wait_s, train_s=train_s)
        run.trained(step, groups, version=number)
        trained_at = now + train_s + plant.other_s
        fleet.version = number
        groups = _round(run, count, now)
        ended = run.phases[-1][1]
        rollout_s = ended - now
        now = step.end_s = begin = max(trained_at, ended) + plant.sync_s
        # The sync waits for both, so what rollout takes longer than training is waited for in this step.
        step.wait_s, wait_s = wait_s, 0.0
        step.wait_s += max(0.0, ended - trained_at)
        yield step


def _round(run: _Run, count: int, at: float) -> list[int]:
    """Answer the next `count` prompts completely, from `at` on."""
    groups = run.new(count)
    run.fleet.submit(groups)
    run.fleet.start(at)
    run.phases.append((at, run.until(count)))
    return groups


def _asynchronous(run: _Run, num_steps: int) -> Iterator[Step]:
    """Engines go on through training; a sync pauses them."""
    fleet, plant, free = run.fleet, run.plant, 0.0
    count = plant.prompts_per_step
    fleet.submit(run.new(count * (plant.max_staleness + 1)))
    fleet.start(0.0)
    admitted = [0.0] * (plant.max_staleness + 1)
    for number in range(num_steps):
        groups = list(range(number * count, (number + 1) * count))
        while any(fleet.groups[group].left for group in groups):
            if not fleet.advance():
                raise RuntimeError("the engines have nothing left to do")
        complete = max(fleet.groups[group].end_s for group in groups)
        begin = max(complete, free)
        train_s = run.train_s(groups)
        paused = begin + train_s + plant.other_s
        step = Step(begin_s=free, rollout_s=complete - admitted[number], wait_s=begin - free, train_s=train_s)
        while fleet.advance(paused):
            pass
        run.trained(step, groups, version=number)
        fleet.stop(paused, keep=True)
        run.phases.append((free, paused))
        free = step.end_s = paused + plant.sync_s
        fleet.version = number + 1
        if number + 1 < num_steps:
            fleet.submit(run.new(count))
        fleet.start(free)
        admitted.append(free)
        yield step


def _tokens(groups: list[Group]) -> int:
    return sum(sum(group.done) for group in groups)


_SCHEDULES: dict[Schedule, Callable[[_Run, int], Iterator[Step]]] = {
    Schedule.synchronous: _synchronous,
    Schedule.over_sampled: _over_sampled,
    Schedule.partial: _partial,
    Schedule.one_step_off: _one_step_off,
    Schedule.asynchronous: _asynchronous,
}
