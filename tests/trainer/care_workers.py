"""Rollout workers that are slow, stuck or lie, for tests of the engine group; light to import, each in its process."""

from __future__ import annotations

import time
from typing import Any

from rollout.engine import WeightReport
from rollout.group.worker import RolloutWorker
from rollout.types import PackedWeights, SharedWeights


def decoder_of(worker: RolloutWorker) -> Any:
    return worker._engine._loop._decoder  # type: ignore[attr-defined]


class SlowWorker(RolloutWorker):
    """Takes its time for every token, so that a test can interfere."""

    def load_weights(self, weights: SharedWeights | PackedWeights) -> WeightReport:
        report = super().load_weights(weights)
        decoder = decoder_of(self)
        step = decoder.step

        def slow_step(*arguments: object) -> object:
            time.sleep(0.02)
            return step(*arguments)

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
            decoder_of(self).step = lambda *arguments: time.sleep(600)
        return report
