"""A clock per engine for the time with requests to sample; the engine sets the clock where requests come and end."""

from __future__ import annotations

import time


class BusyClock:
    """A clock that runs while there is work. It has no lock: the owner calls it under the lock that guards the work."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    def set(self, *, is_busy: bool) -> None:
        """Start the clock if `is_busy`, else stop it; repeating the same value changes nothing."""
        if is_busy and self._since is None:
            self._since = time.monotonic()
        elif not is_busy and self._since is not None:
            self._seconds += time.monotonic() - self._since
            self._since = None

    @property
    def seconds(self) -> float:
        """Seconds with work, up to now."""
        return self._seconds + (0.0 if self._since is None else time.monotonic() - self._since)
