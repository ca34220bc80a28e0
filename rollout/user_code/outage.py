"""Whether failures are the fault of the items, or of a server that the function asks and that is away.

OUTAGE_CALLS items fail without a success in between, or one item twice up to its last try: an outage is suspected. From
then on one call is tried at a time, by turns a new item, which no cache of the function can answer, and one whose call
has succeeded before, since all new ones may be bad. If one of each has failed the outage is proven, and told. The first
success ends it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from rollout.task_config import CallsConfig

logger = logging.getLogger(__name__)

OUTAGE_CALLS = 8
"""Items that fail without a success in between from which on the fault may be none of theirs."""
MAX_PAUSE_S = 10.0
"""Longest pause in seconds between two tries."""


@dataclass(eq=False)
class Outage:
    """The outage of one function: none, suspected or proven."""

    config: CallsConfig
    name: str
    """Name of the function in messages."""
    key: str
    """The key of its longest wait, for messages."""
    known: bytes | None = None
    """An item whose call has succeeded; None if there is none, or if a call cannot be made again."""
    past_s: float = 0.0
    """Seconds of the proven outages that a success has ended."""
    _last_failure: str = ""
    _failed: set[int] = field(default_factory=set)
    """Keys of the items that have failed, in whichever try, since the last success."""
    _since: float | None = None
    """Time at which it was suspected; None outside of an outage."""
    _probes: int = 0
    """Calls that were made one at a time in it, and have failed."""
    _is_probing: bool = False
    """True if the call that is open is such a call."""
    _probe_at: float = 0.0
    """Time of the next of them."""

    @property
    def is_on(self) -> bool:
        """True if one is suspected or proven: calls are made one at a time."""
        return self._since is not None

    @property
    def tries_known(self) -> bool:
        """True if the next call is for `known`, and not for a new item."""
        return self.known is not None and self._probes % 2 == 1

    @property
    def _is_proven(self) -> bool:
        return self._probes >= (1 if self.known is None else 2)

    def holds(self, *, is_busy: bool) -> bool:
        """True if no call may be made now; `is_busy`: one is open."""
        return self.is_on and (is_busy or time.monotonic() < self._probe_at)

    def note_call(self) -> None:
        """A call is made."""
        self._is_probing = self.is_on

    def note_failure(self, key: int, message: str, *, proven: bool, is_last: bool) -> bool:
        """A call for the item `key` has failed -> True in an outage.

        `proven`: the item is the cause. `is_last`: the item would be given up now.
        """
        # At the end of a step too few items are left to fail: the one that succeeds shows whose fault this is.
        shows = is_last and not proven and key in self._failed and self.known is not None
        self._last_failure = message
        if not proven:
            self._failed.add(key)
        now = time.monotonic()
        if self._since is None:
            if not self.config.outage_wait_s or not (shows or len(self._failed) >= OUTAGE_CALLS):
                return False
            self._since, self._probe_at, self._probes = now, now, int(shows)
        elif self._is_probing:
            was_proven, self._is_probing = self._is_proven, False
            self._probes += 1
            self._probe_at = now + min(self.config.retry_pause_s * 2.0**self._probes, MAX_PAUSE_S)
            if self._is_proven and not was_proven:
                logger.warning(
                    "%s: every call fails, the last with %s. The run waits until one succeeds, at most %g s (%s)",
                    self.name, message, self.config.outage_wait_s, self.key,
                )  # fmt: skip
        return True

    def note_success(self, item: bytes | None) -> bool:
        """A call for `item`, None if it cannot be made again, has succeeded -> True if that ends a proven outage."""
        since, ends = self._since, self.is_on and self._is_proven
        if since is not None and ends:
            lasted_s = time.monotonic() - since
            self.past_s += lasted_s
            logger.warning("%s: calls succeed again after %.0f s", self.name, lasted_s)
        self._failed.clear()
        self._since, self.known = None, item
        return ends

    def end_in_vain(self) -> str:
        """End an outage that has lasted outage_wait_s -> what happened; "" if there is none."""
        if self._since is None or time.monotonic() - self._since <= self.config.outage_wait_s:
            return ""
        self._since = None
        self._failed.clear()
        return f"no call succeeded for {self.config.outage_wait_s:g} s, the last failed with {self._last_failure}"
