"""The state machine of the guard: (config, state, metrics of a step) -> state and events. No clock, no randomness.

    watch -> warn -> tighten 1 .. tighten n -> freeze (-> stop)

A number that is watched is bad after `trip_steps` steps in a row beyond its `trip`, and good again after `clear_steps`
in a row on the other side of its `clear`. The first bad number climbs to warn. Every `escalate_steps` steps in which a
bad number is measured and has not come back climb one rung more, up to `highest`; at the top, stop ends the run. Once
no number is bad the guard goes down one rung, and one more after every `clear_steps` steps. An unknown number (null)
neither counts nor interrupts a row; a step in which nothing is known leaves the rung alone.

Stop is an event, not a rung: a run that goes on after it begins frozen, and stops again if nothing has become better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, NamedTuple

from algorithms.config.spec import HARMLESS_ESS
from trainer.config.guard import ACTIONS, Action, BandConfig, MismatchGuardConfig
from trainer.run.guard_rise import RiseState, after_step

Row = Mapping[str, float | None]
K3_METRIC: Final = "mismatch/k3"
WATCHING: Final = 0
"""The rung at the bottom."""


class Reading(NamedTuple):
    """One watched number of a step."""

    name: str
    band: BandConfig
    value: float | None
    """None: not known in this step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalState:
    """One watched number: whether it is bad, and the steps in a row that speak for a change."""

    bad: bool = False
    row: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardState:
    """What the guard remembers, as JSON values: a checkpoint holds it."""

    rung: int = WATCHING
    pressed: int = 0
    """Steps at this rung in which a bad number has not come back."""
    calm: int = 0
    """Steps at this rung in which no number was bad."""
    signals: Mapping[str, SignalState] = field(default_factory=dict)
    rise: RiseState = field(default_factory=RiseState)
    stops: int = 0
    """How often the guard has ended the run."""

    @property
    def bad(self) -> list[str]:
        """Names of the numbers that are bad."""
        return sorted(name for name, signal in self.signals.items() if signal.bad)

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> GuardState:
        """What `to_json` gave, also after a round trip through JSON."""
        signals = {name: SignalState(**signal) for name, signal in saved["signals"].items()}
        rise = saved["rise"]
        return cls(
            **{key: saved[key] for key in ("rung", "pressed", "calm", "stops")},
            signals=signals,
            rise=RiseState(**rise | {"window": tuple(rise["window"])}),
        )


class Ladder:
    """The rungs of a config: 0 watches, the others are actions of increasing strength."""

    def __init__(self, config: MismatchGuardConfig) -> None:
        strongest = ACTIONS.index(config.highest)
        rungs = [Action.warn, *[Action.tighten] * config.tightenings, Action.freeze]
        self._rungs = [action for action in rungs if ACTIONS.index(action) <= strongest]

    @property
    def top(self) -> int:
        return len(self._rungs)

    def action(self, rung: int) -> Action | None:
        """What is done at `rung`; None while watching."""
        return None if rung == WATCHING else self._rungs[rung - 1]

    def tightenings(self, rung: int) -> int:
        """How often the correction is tightened at `rung`."""
        return self._rungs[:rung].count(Action.tighten)

    def is_frozen(self, rung: int) -> bool:
        """Whether the policy stays as it is at `rung`."""
        return self.action(rung) is Action.freeze


class GuardStep(NamedTuple):
    """What a step made of the guard."""

    state: GuardState
    stop: bool
    """The run shall be saved and ended."""


def after(config: MismatchGuardConfig, state: GuardState, row: Row) -> GuardStep:
    """The guard after a step with the metrics `row`."""
    watched = list(readings(config, row))
    signals = {
        reading.name: _next_signal(config, reading, state.signals.get(reading.name, SignalState()))
        for reading in watched
    }
    was_bad, top = bool(state.bad), Ladder(config).top
    state = replace(
        state, signals=signals, rise=after_step(config.rise, state.rise, row.get(K3_METRIC)), rung=min(state.rung, top)
    )
    if not watched:
        return GuardStep(replace(state, rung=WATCHING, pressed=0, calm=0), stop=False)
    if all(reading.value is None for reading in watched):
        return GuardStep(state, stop=False)
    if state.bad:
        return _climbed(config, state, watched, top=top)
    return GuardStep(_descended(config, state, has_just_cleared=was_bad), stop=False)


def readings(config: MismatchGuardConfig, row: Row) -> Iterator[Reading]:
    """The numbers that `config` watches, in `row`."""
    kind = config.weights.name
    ess = row.get(f"mismatch/ess/raw_{'seq' if kind == 'sequence' else kind}")
    khat = row.get(f"mismatch/khat/{'seq' if kind == 'sequence' else kind}")
    if khat is None and ess is not None and ess > HARMLESS_ESS:
        khat = 0.0  # not measured because the weights have no tail that matters: known to be good
    found = (
        Reading("k3", config.k3, row.get(K3_METRIC)),
        Reading("ess", config.ess, ess),
        Reading("khat", config.khat, khat),
    )
    yield from (reading for reading in found if reading.band.trip is not None)


def _next_signal(config: MismatchGuardConfig, reading: Reading, signal: SignalState) -> SignalState:
    band, value = reading.band, reading.value
    if value is None:
        return signal
    speaks = band.is_good(value) if signal.bad else band.is_bad(value)
    row = signal.row + 1 if speaks else 0
    if row >= (config.clear_steps if signal.bad else config.trip_steps):
        return SignalState(bad=not signal.bad)
    return replace(signal, row=row)


def _climbed(config: MismatchGuardConfig, state: GuardState, watched: list[Reading], *, top: int) -> GuardStep:
    """A number is bad: up to warn, and on when the rung has had its time."""
    if state.rung == WATCHING:
        return GuardStep(replace(state, rung=1, pressed=0, calm=0), stop=False)
    pressing = any(
        state.signals[reading.name].bad and reading.value is not None and not reading.band.is_good(reading.value)
        for reading in watched
    )
    pressed = state.pressed + pressing
    if pressed < config.escalate_steps:
        return GuardStep(replace(state, pressed=pressed, calm=0), stop=False)
    if state.rung < top:
        return GuardStep(replace(state, rung=state.rung + 1, pressed=0, calm=0), stop=False)
    if config.highest is Action.stop:
        return GuardStep(replace(state, pressed=0, calm=0, stops=state.stops + 1), stop=True)
    return GuardStep(replace(state, pressed=config.escalate_steps, calm=0), stop=False)


def _descended(config: MismatchGuardConfig, state: GuardState, *, has_just_cleared: bool) -> GuardState:
    """No number is bad: one rung down at once, then one per `clear_steps` steps."""
    if state.rung == WATCHING:
        return replace(state, pressed=0, calm=0)
    calm = state.calm + 1
    if has_just_cleared or calm >= config.clear_steps:
        return replace(state, rung=state.rung - 1, pressed=0, calm=0)
    return replace(state, pressed=0, calm=calm)
