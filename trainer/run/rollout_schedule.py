"""When the engines begin to sample later steps, by the configs of trainer/config/schedule.py."""

from __future__ import annotations

from rollout.collect.collector import Collector
from trainer.config.schedule import ScheduleConfig


class RolloutSchedule:
    """Tells the collector when to begin later steps; one object per run."""

    def __init__(self, config: ScheduleConfig, collector: Collector, *, num_steps: int) -> None:
        """`num_steps` is the last step, after which no step is sampled."""
        self._config = config
        self._collector = collector
        self._num_steps = num_steps

    def begin_next(self, step: int, policy_version: int) -> None:
        """Let the engines begin later steps with weights of `policy_version`; called after `step` is collected."""
        ahead = min(self._config.steps_ahead, self._num_steps - step)
        if ahead > 0:
            self._collector.start(step + 1, policy_version, num_steps=ahead)

    def finish_next(self, step: int, policy_version: int) -> None:
        """Wait for the next step if all its tokens must be of `policy_version`; called before the sync after `step`."""
        if self._config.steps_ahead and not self._config.updates_in_flight and step < self._num_steps:
            self._collector.finish(step + 1, policy_version)
