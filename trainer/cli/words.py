"""Words of the form key=value after a command that composes no config."""

from __future__ import annotations

from collections.abc import Sequence

from algorithms.config import Problem
from algorithms.config.home import from_home
from trainer.compose.keys import nearest


def given_words(words: Sequence[str]) -> dict[str, str]:
    """Key -> value of the words of the form key=value. Raises ConfigError for a ~ of an unknown user."""
    pairs = [word.partition("=")[::2] for word in words if "=" in word]
    return {key: from_home(value, key=key) for key, value in pairs}


def unknown_word(key: str, value: str, *, known: Sequence[str], command: str) -> Problem:
    """The problem of a key that `command` does not take; `known` are those that it takes."""
    close = nearest(key, known)
    hint = f"Did you mean {close}? " if close else ""
    keys = ", ".join(f"{name}=" for name in known)
    return Problem(key=key, rule=f"is not a word of {command}", value=value, remedy=f"{hint}It takes {keys}.")
