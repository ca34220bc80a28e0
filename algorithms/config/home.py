"""Home directories in paths: `~/x` and `~user/x` are expanded once, where a text is read, and nowhere after.

A field whose text names a file or a directory says so by its type, `path: PathText | None` for example.
`trainer/compose/home.py` expands the texts of these fields, and commands those of their own words.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Annotated, Any, get_args, get_type_hints

from algorithms.config.rules import ConfigError, Problem

NAMES_PATHS = "texts in it name files or directories"
"""Mark of the type of a field: Annotated[dict[str, Any], NAMES_PATHS]."""
PathText = Annotated[str, NAMES_PATHS]
"""A text that names a file or a directory, also with more behind it: path.py:name, directory@split."""


def from_home(text: str, *, key: str) -> str:
    """The value of `key`, with the home directory for a leading ~ or ~user; any other text as it is.

    Raises ConfigError if no user of this machine has the name.
    """
    try:
        path = os.path.expanduser(text)
    except ValueError:  # a NUL in the name
        path = text
    if path == text and text.startswith("~"):
        user = text.partition("/")[0]
        rule = f"must not begin with {user}: this machine has no user of that name"
        remedy = f"Write ./{text} for a directory of that name, or ~/ for your own home directory."
        raise ConfigError([Problem(key=key, rule=rule, value=text, remedy=remedy)])
    return path


@cache
def path_fields(kind: type) -> frozenset[str]:
    """Fields of a config class whose texts name files or directories."""
    hints = get_type_hints(kind, include_extras=True)
    return frozenset(name for name, hint in hints.items() if _names_paths(hint))


def _names_paths(hint: Any) -> bool:
    return NAMES_PATHS in getattr(hint, "__metadata__", ()) or any(map(_names_paths, get_args(hint)))
