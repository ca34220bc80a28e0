"""Sharing of GPUs between engines and policy: two tenants take turns, moved only by `with tenant.resident():`.

The groups (`rollout/group/engine_group.py`, `trainer/cluster/policy_group.py`) are the tenants;
`trainer/cluster/placement.py` decides if the tenants take turns at all. Leaving a block moves nothing: a tenant stays
on the GPU until the other needs the memory, so consecutive blocks of one tenant cost nothing. Not yet run on a GPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

logger = logging.getLogger(__name__)


class GpuTenant(Protocol):
    """One of the two users of a shared GPU: the engines or the policy."""

    def sleep(self) -> None:
        """Free the GPU's memory. If the call raises, no needed state is lost."""
        ...

    def wake(self) -> None:
        """Allocate the GPU's memory again."""
        ...


class SharedGpu:
    """Turns of two tenants of a GPU: at most one is awake. Unless enabled, all tenants are always awake."""

    def __init__(self) -> None:
        self._awake: GpuTenant | None = None
        self._enabled = False
        self._inside: GpuTenant | None = None
        self._swap_s = 0.0

    def enable(self, *, awake: GpuTenant) -> None:
        """Let the tenants take turns from now on; `awake` is the only tenant on the GPU."""
        self._enabled, self._awake = True, awake

    @property
    def is_enabled(self) -> bool:
        """True if the tenants take turns."""
        return self._enabled

    def admits(self, tenant: GpuTenant) -> bool:
        """True if `tenant` may take memory of the GPU now: it is awake, or the tenants do not take turns."""
        return not self._enabled or self._awake is tenant

    @contextmanager
    def resident(self, tenant: GpuTenant) -> Iterator[None]:
        """Keep `tenant` awake, and the other asleep, for the block and until the block of the other begins.

        If a sleep or wake fails, the tenant counts as unmoved and the next block tries again. Raises RuntimeError
        inside the block of the other tenant.
        """
        if not self._enabled:
            yield
            return
        if self._inside is not None and self._inside is not tenant:
            raise RuntimeError(
                "policy and engines take turns on a shared GPU: leave the block of one before entering the other"
            )
        outer, self._inside = self._inside, tenant
        try:
            self._move(tenant)
            yield
        finally:
            self._inside = outer

    def metrics(self) -> dict[str, float | None]:
        """Seconds spent on sleep and wake since the last call; empty if the tenants do not take turns."""
        swap_s, self._swap_s = self._swap_s, 0.0
        return {"perf/gpu_swap_s": swap_s} if self._enabled else {}

    def _move(self, tenant: GpuTenant) -> None:
        if self._awake is tenant:
            return
        started = time.perf_counter()
        if self._awake is not None:
            self._awake.sleep()
            self._awake = None
        tenant.wake()
        self._awake = tenant
        self._swap_s += time.perf_counter() - started
        logger.debug("%s is on the GPU after %.2f s", type(tenant).__name__, time.perf_counter() - started)
