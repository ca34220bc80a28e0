"""Sharing of GPUs between engines and policy: two sides take turns, moved only by `with side.resident():`.

The groups (`rollout/group/engine_group.py`, `trainer/cluster/policy_group.py`) are the sides;
`trainer/cluster/placement.py` decides whether the sides take turns at all. Leaving a block moves nothing: a side stays
on the GPU until the other side needs the memory, so consecutive blocks of one side cost nothing. Not yet run on a GPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

logger = logging.getLogger(__name__)


class Side(Protocol):
    """One of the two users of a shared GPU: the engines or the policy."""

    def sleep(self) -> None:
        """Free the GPU's memory. If the call raises, no needed state is lost."""
        ...

    def wake(self) -> None:
        """Allocate the GPU's memory again."""
        ...


class Turns:
    """Turns on a shared GPU: at most one side is awake. Without turns, all sides are always awake."""

    def __init__(self) -> None:
        self._awake: Side | None = None
        self._taken = False
        self._inside: Side | None = None
        self._moving_s = 0.0

    def take(self, *, awake: Side) -> None:
        """Let the sides take turns from now on; `awake` is the only side on the GPU."""
        self._taken, self._awake = True, awake

    @property
    def are_taken(self) -> bool:
        """True if the sides take turns."""
        return self._taken

    @contextmanager
    def resident(self, side: Side) -> Iterator[None]:
        """Keep `side` awake, and the other side asleep, for the block and until the block of another side begins.

        If a sleep or wake fails, the side counts as unmoved and the next block tries again. Raises RuntimeError inside
        the block of another side.
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
        """Seconds spent on sleep and wake since the last call; empty if the sides do not take turns."""
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
