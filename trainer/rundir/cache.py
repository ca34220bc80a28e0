"""Where Parity keeps what is expensive to make and the same for every run: base models, measured ceilings."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """Return $PARITY_CACHE, or ~/.cache/parity where it is not set."""
    configured = os.environ.get("PARITY_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "parity"
