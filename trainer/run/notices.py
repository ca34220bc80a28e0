"""What a run says once: that the reward function fails on responses, that no response counts as correct, that there is
nothing to learn from, or that rollout.exact does not hold. Calls that hang are told in each step that they make slow.

Rows of metrics -> events, for `trainer/run/loop.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainer.config.train import TrainConfig
from trainer.rundir.events import Event, Severity

IDLE_STEPS = 3
"""Steps in a row without anything to learn from, after which the run warns."""
_OTHER_GROUPS = (
    "Take other prompts, a larger batch.group_size, a higher sampling.temperature, or a reward that tells more answers "
    "apart."
)

_OTHER_BOUNDS = (
    "Loosen correction.low, correction.high or correction.reject: mismatch/rs/... in metrics.jsonl have the share that "
    "each criterion rejects."
)


_FAILURES = {
    "reward/timeouts": "took longer than reward.timeout_s",
    "reward/crashes": "lost their process",
    "reward/errors": "raised, or gave no number",
    "reward/retries": "were made again",
    "reward/unscored": "left a response without a reward",
}
"""Metric -> what so many calls of the reward function did."""


class Notices:
    """Reads the metrics of every step; says each thing, and each kind of failure that makes no step slow, once."""

    def __init__(self, config: TrainConfig, *, is_resumed: bool = False) -> None:
        """A resumed run does not say again what it said about correct responses."""
        self._correct_rule = "" if is_resumed else config.reward.correct_rule
        """Empty once it is told, or a response was correct."""
        self._group_is_baseline = config.min_group_size > 1
        self._promises_bits = config.rollout.exact and config.max_staleness == 0
        self._idle_steps = 0
        self._warns = True
        self._told_failures: set[str] = set()

    def observe(self, step: int, row: Mapping[str, float | None]) -> list[Event]:
        """The events of `step`, by its metrics."""
        low, high = row["reward/min"] or 0.0, row["reward/max"] or 0.0
        rewards = f"{low:.3g} to {high:.3g}"
        found: list[Event] = []
        failures = {name: int(number) for name in _FAILURES if (number := row.get(name))}
        is_new = bool(failures.keys() - self._told_failures)
        waited_s, step_s = row.get("time/reward_s") or 0.0, row.get("time/step_s") or 0.0
        is_slow = "reward/timeouts" in failures and waited_s > step_s / 2
        if is_new or is_slow:  # calls that hang explain each step that they make slow; W&B has one alert of them
            self._told_failures |= failures.keys()
            said = "; ".join(f"{number} {_FAILURES[name]}" for name, number in failures.items())
            text = f"calls of the reward function failed in this step: {said}. Every step counts them in "
            text += ", ".join(failures)
            text += f". Waiting for rewards took {waited_s:.0f} s of its {step_s:.0f} s" * is_slow
            severity = Severity.warn if is_new else Severity.info
            found.append(Event(step=step, kind="reward", severity=severity, text=text))
        gap = row.get("mismatch/abs_logdiff_max")
        if self._promises_bits and gap:
            self._promises_bits = False
            text = f"rollout.exact=true, and engine and trainer differ by up to {gap:.1e} nats in this step. The "
            text += "correction still holds. Please report it, with the line of parity doctor about the processor"
            found.append(Event(step=step, kind="exact", severity=Severity.warn, text=text))
        if row["reward/generated_accuracy"]:
            self._correct_rule = ""
        if self._correct_rule and low < high:
            text = f"the rewards of this step differ ({rewards}), but none of its responses is correct: "
            text += f"{self._correct_rule}"
            found.append(Event(step=step, kind="reward", severity=Severity.info, text=text))
            self._correct_rule = ""
        no_spread = self._group_is_baseline and row["rollout/zero_variance_frac"] == 1
        is_idle = no_spread or row["optim/grad_norm"] == 0
        self._idle_steps = self._idle_steps + 1 if is_idle else 0
        if self._warns and self._idle_steps == IDLE_STEPS:
            self._warns = False
            last = f"in the last {IDLE_STEPS} steps"
            text = f"the gradient was 0 {last}: the policy does not change (rewards of this step: {rewards})."
            if row["mismatch/kept_frac"] == 0:
                text = f"the gradient was 0 {last}: the correction rejects every token. {_OTHER_BOUNDS}"
            elif no_spread:
                text = f"the rewards taught nothing {last}: in each group all are equal. {_OTHER_GROUPS}"
            found.append(Event(step=step, kind="reward", severity=Severity.warn, text=text))
        return found
