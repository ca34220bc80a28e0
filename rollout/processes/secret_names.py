"""Names under which a secret stands: keys of a config, words of a command line, environment variables."""

from __future__ import annotations

import re

SECRET_WORDS = (
    r"key(?!word|board)|token(?!iz)|secret|passw|passphrase|pwd|credential|auth(?!or(?!i[sz]))|bearer|cookie|signature"
    r"|session_?id|(?<![\w.-])session(?![\w.-])|(?<![a-z])(?:pat|sig|jwt)(?![a-z])"
)
"""Regular expression of the parts of a name that mark a secret."""
_SECRET_NAME = re.compile(SECRET_WORDS, re.IGNORECASE)
_HARMLESS_NAMES = frozenset({"prompt_key", "answer_key"})
"""Keys of Parity's configs that hold column names."""


def is_secret_name(name: str) -> bool:
    """True if a value under this key (the last part of a dotted or dashed path) must not be written."""
    last = name.rsplit(".", 1)[-1].lstrip("+~-").replace("-", "_").lower()
    return last not in _HARMLESS_NAMES and _SECRET_NAME.search(last) is not None
