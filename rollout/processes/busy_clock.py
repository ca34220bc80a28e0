"""How long an engine has had something to sample: one clock per engine, set where requests come and end."""

from __future__ import annotations

import time


class BusyClock:
    """Runs while there is work. Not locked: its owner calls it under the lock that guards the work."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    def set(self, *, is_busy: bool) -> None:
        """Whether there is work from now on; saying the same twice changes nothing."""
        if is_busy and self._since is None:
            self._since = time.monotonic()
        elif not is_busy and self._since is not None:
            self._seconds += time.monotonic() - self._since
            self._since = None

    @property
    def seconds(self) -> float:
        """With work, up to now."""
        return self._seconds + (0.0 if self._since is None else time.monotonic() - self._since)
