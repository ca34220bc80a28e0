"""Schedule of sampling: a step's responses are sampled before its training, during the previous step, or further ahead.

`trainer/run/loop.py` calls the same phases in every schedule; trainer/run/rollout_schedule.py decides in which phase
the engines begin to sample later steps. v(k) denotes the weights at the start of the training of step k:

    sync          collect k (all from v(k)); train k; weights
    one_step_off  collect k; begin k+1 with v(k); train k; wait for the rest of k+1; weights
                  -> every token of a step is from the weights of the previous step
    bounded       collect k; begin up to k+max_staleness; train k; weights, while the engines continue
                  -> a response may have tokens of several versions, none older than max_staleness steps

Imports no torch, because the command line reads the configs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from algorithms.config import Checked, Problem
from algorithms.config.rules import at_least, ruled
from rollout.config import CollectOrder
from trainer.config.training import Residency

if TYPE_CHECKING:
    from trainer.config.train import TrainConfig


@dataclass(kw_only=True, slots=True)
class ScheduleConfig(Checked):
    """Time of sampling relative to training. Choose with `schedule=sync|one_step_off|bounded`."""

    kind: ClassVar[str] = ""
    updates_in_flight: ClassVar[bool] = False
    """True if weights change while responses are unfinished."""

    @property
    def steps_ahead(self) -> int:
        """Number of later rollout steps whose prompts the engines may sample while a step is trained."""
        return 0


@dataclass(kw_only=True, slots=True)
class SyncScheduleConfig(ScheduleConfig):
    """Sample, then train, then sample with the new weights: on-policy except for the engines' rounding."""

    kind: ClassVar[str] = "sync"


@dataclass(kw_only=True, slots=True)
class OneStepOffScheduleConfig(ScheduleConfig):
    """While a step is trained, the engines sample the next step with the weights before the update."""

    kind: ClassVar[str] = "one_step_off"

    @property
    def steps_ahead(self) -> int:
        return 1


@dataclass(kw_only=True, slots=True)
class BoundedScheduleConfig(ScheduleConfig):
    """The engines wait for the trainer only when `max_staleness` steps ahead; weights change while they sample."""

    kind: ClassVar[str] = "bounded"
    updates_in_flight: ClassVar[bool] = True
    max_staleness: int = ruled(
        1, at_least(1, "rollout step"), remedy="Use schedule=sync for tokens of the newest weights alone."
    )
    """Largest lag, in rollout steps, of the weights that sampled a token behind the weights that train on the token.
    Vetted: 1 to 4."""

    @property
    def steps_ahead(self) -> int:
        return self.max_staleness


def schedule_problems(config: TrainConfig) -> Iterator[Problem]:
    """Yield broken rules between the schedule, the collection of groups and the sharing of GPUs."""
    schedule, collect = config.schedule, config.collect
    if collect.partial and schedule.steps_ahead:
        goes_on = "the engines go on with them" if schedule.updates_in_flight else "every step is sampled to its end"
        yield config.broken(
            "collect.partial",
            f"must be false with schedule={schedule.kind}: no responses are resumed, {goes_on}",
            "Use schedule=sync, or leave it out.",
        )
    if collect.order is CollectOrder.completion and collect.over_sampling == 1 and not schedule.updates_in_flight:
        yield config.broken(
            "collect.order",
            "has no effect with collect.over_sampling=1: a step then takes all groups",
            "Set collect.over_sampling, or collect.order=submission.",
        )
    if schedule.steps_ahead and config.shares_gpus and config.cluster.residency is not Residency.never:
        yield config.broken(
            "cluster.residency",
            f"must be never with schedule={schedule.kind}: engines that sample while the policy is trained cannot "
            "take turns with it on a GPU",
            "Give engines and policy GPUs of their own, or make both fit and set cluster.residency=never.",
        )
