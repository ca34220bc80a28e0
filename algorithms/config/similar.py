"""The known name that a wrong name probably means, for messages. Every suggestion has the same threshold."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SIMILAR = 0.75
"""Ratio of difflib in [0, 1] from which two names are similar: two letters exchanged in four still are."""


def similar(word: str, known: Iterable[str]) -> str | None:
    """The entry of `known` that is the same as `word` but for upper case, or else the most similar one; or None."""
    names = {name.lower(): name for name in known}
    lower = word.lower()
    meant = lower if lower in names else next(iter(difflib.get_close_matches(lower, names, n=1, cutoff=SIMILAR)), None)
    return None if meant is None else names[meant]
