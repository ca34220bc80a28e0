"""Home directories in paths: `~/x` and `~user/x` are expanded once, where a text is read, and nowhere after.

A field whose text names a file or a directory says so by its type, `path: PathText | None` for example.
`trainer/compose/home.py` expands the texts of these fields, and commands those of their own words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, get_args, get_type_hints

from algorithms.config.rules import ConfigError, Problem

NAMES_PATHS = "texts in it name files or directories"
MAY_NAME_PATHS = "texts in it may name files or directories"
"""Marks of the type of a field: Annotated[dict[str, Any], MAY_NAME_PATHS]. The second is for an open mapping, of which
no rule says what a text is: a ~ of an unknown user then stays as it is."""
PathText = Annotated[str, NAMES_PATHS]
"""A text that names a file or a directory, also with more behind it: path.py:name, directory@split."""

_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")


def from_home(text: str, *, key: str) -> str:
    """The value of `key`, with the home directory for a leading ~ or ~user; any other text as it is.

    Raises ConfigError if no user of this machine has the name, and for a variable as a shell would read it.
    """
    if (variable := _VARIABLE.match(text)) is not None:
        rule = f"must not begin with {variable[0]}: no shell reads it here"
        remedy = f"Write ${{oc.env:{variable[1]}}} for the variable, or ./{text} for a directory of that name."
        raise ConfigError([Problem(key=key, rule=rule, value=text, remedy=remedy)])
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
def path_fields(kind: type) -> Mapping[str, str]:
    """Fields of a config class whose texts name, or may name, files or directories -> the mark that says which."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: marks[0] for name, hint in hints.items() if (marks := _marks(hint))}


def _marks(hint: Any) -> list[str]:
    own = [mark for mark in getattr(hint, "__metadata__", ()) if mark in (NAMES_PATHS, MAY_NAME_PATHS)]
    return own + [mark for inner in get_args(hint) for mark in _marks(inner)]
