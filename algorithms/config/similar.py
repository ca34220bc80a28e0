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
    if lower in names:
        return names[lower]
    # Two letters that changed places weigh too much in a short word.
    swapped = [name for name in names if sorted(name) == sorted(lower) and _places(name, lower) == 2]
    meant = swapped if len(swapped) == 1 else difflib.get_close_matches(lower, names, n=1, cutoff=SIMILAR)
    return names[meant[0]] if meant else None


def _places(first: str, second: str) -> int:
    """Places at which two words of one length differ."""
    return sum(a != b for a, b in zip(first, second, strict=True))
