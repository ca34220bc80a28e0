"""Who is on a GPU that engines and policy share: sides that take turns, moved only by `with side.resident():`.

The groups (`rollout/group/engine_group.py`, `trainer/cluster/policy_group.py`) are the sides;
`trainer/cluster/placement.py` decides whether they take turns at all. Leaving a block moves nothing: a side stays where
it is until the other one needs the room, so blocks of one side behind each other cost nothing. Not yet run on a GPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

logger = logging.getLogger(__name__)


class Side(Protocol):
    """One of those that share the GPU."""

    def sleep(self) -> None:
        """Give the GPU's memory back. Raises without having lost anything that is needed."""
        ...

    def wake(self) -> None:
        """Take the memory again."""
        ...


class Turns:
    """At most one side is awake while the sides take turns; all of them always are while they do not."""

    def __init__(self) -> None:
        self._awake: Side | None = None
        self._taken = False
        self._inside: Side | None = None
        self._moving_s = 0.0

    def take(self, *, awake: Side) -> None:
        """From now on the sides take turns; `awake` is on the GPU, alone."""
        self._taken, self._awake = True, awake

    @property
    def are_taken(self) -> bool:
        """Whether the sides take turns."""
        return self._taken

    @contextmanager
    def resident(self, side: Side) -> Iterator[None]:
        """Have `side` awake, and everybody else asleep, for the block and until another side is entered.

        A side whose sleep or wake failed is where it was and is asked again next time. Raises RuntimeError inside the
        block of another side.
        """
        if not self._taken:
            yield
            return
        if self._inside is not None and self._inside is not side:
            raise RuntimeError("the sides of a shared GPU take turns: leave the block of one before entering the other")
        outer, self._inside = self._inside, side
        try:
            self._move(side)
            yield
        finally:
            self._inside = outer

    def metrics(self) -> dict[str, float | None]:
        """Seconds spent on moving since the last call; nothing while nobody takes turns."""
        moving_s, self._moving_s = self._moving_s, 0.0
        return {"perf/turns_s": moving_s} if self._taken else {}

    def _move(self, side: Side) -> None:
        if self._awake is side:
            return
        started = time.perf_counter()
        if self._awake is not None:
            self._awake.sleep()
            self._awake = None
        side.wake()
        self._awake = side
        self._moving_s += time.perf_counter() - started
        logger.debug("%s is on the GPU after %.2f s", type(side).__name__, time.perf_counter() - started)
