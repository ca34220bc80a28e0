"""Remove secrets from written records: configs, command lines, environment records.

Any value -> the same shape with secret strings replaced by "<redacted>". trainer/tracking/tracker.py redacts a config
before it reaches config.yaml, environment.json or W&B. A secret is recognised by the name of its key (api_key,
hf_token, password, ...), by its place (user:password@ in a URL, the value after --api-key) or by a well-known prefix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum

REDACTED = "<redacted>"

_SECRET_WORDS = r"key|token(?!iz)|secret|passw|pwd|credential|auth"
_SECRET_NAME = re.compile(_SECRET_WORDS, re.IGNORECASE)
# Numbers under these names are secrets too (`password: 123456`); `max_new_tokens: 64` is not.
_SECRET_NUMBER_NAME = re.compile(r"secret|passw|pwd|credential|api_?key", re.IGNORECASE)
_HARMLESS_NAMES = frozenset({"prompt_key", "answer_key"})
"""Keys of Parity's configs that hold column names."""

_NUMBER = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?", re.IGNORECASE)
_FLAG = re.compile(r"--?(?P<name>[A-Za-z][\w.-]*)")
_ASSIGNMENT = re.compile(r"(?P<name>[+~-]*[A-Za-z_][\w./-]*)=(?P<value>.*)", re.DOTALL)
_INNER_PAIR = re.compile(
    rf"(?P<name>[\w.-]*(?:{_SECRET_WORDS})[\w.-]*)(?P<mid>[\"']?\s*[:=]\s*)(?P<value>\"[^\"]*\"|'[^']*'|[^\s,}}\]&;\"']+)",
    re.IGNORECASE,
)
_URL_LOGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)[^/\s@]+@", re.IGNORECASE)
_URL_QUERY = re.compile(rf"(?P<name>[?&][\w.-]*(?:{_SECRET_WORDS})[\w.-]*=)[^&\s#]+", re.IGNORECASE)
_HEADER = re.compile(r"\b(?P<kind>Bearer|Basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE)
_KNOWN_PREFIX = re.compile(r"\b(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abp]-|AKIA|wandb_v\d_)[\w-]{12,}")


def is_secret_name(name: str) -> bool:
    """True if a value under this key (the last part of a dotted or dashed path) must not be written."""
    last = name.rsplit(".", 1)[-1].lstrip("+~-").replace("-", "_").lower()
    return last not in _HARMLESS_NAMES and _SECRET_NAME.search(last) is not None


def redact(value: object) -> object:
    """A copy of `value` without secrets; mappings, sequences and dataclasses are walked (dataclasses become dicts).

    Numbers, booleans and None are kept, except numbers under names such as `password`. In a sequence of strings the
    item after a flag such as `--api-key` is redacted as well.
    """
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return {key: _redact_member(str(key), member) for key, member in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _redact_member(f.name, getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (list, tuple)):
        return type(value)(_redact_items(value)) if type(value) in (list, tuple) else _redact_items(value)
    if isinstance(value, (set, frozenset)):
        return type(value)(redact(item) for item in value)
    return value


def redact_argv(argv: Sequence[str]) -> list[str]:
    """A command line without secrets: `--api-key X`, `--api-key=X`, `+a.b.api_key=X`, `a={api_key:X}`, URLs."""
    shown: list[str] = []
    hide_next = False
    for item in argv:
        if hide_next:
            shown.append(REDACTED)
            hide_next = False
            continue
        flag = _FLAG.fullmatch(item)
        hide_next = flag is not None and is_secret_name(flag["name"])
        shown.append(_redact_argument(item))
    return shown


def redact_text(text: str) -> str:
    """Free text without logins in URLs, secrets in query strings, authorization headers and well-known key formats."""
    text = _URL_LOGIN.sub(rf"\g<scheme>{REDACTED}@", text)
    text = _URL_QUERY.sub(rf"\g<name>{REDACTED}", text)
    text = _HEADER.sub(rf"\g<kind> {REDACTED}", text)
    return _KNOWN_PREFIX.sub(REDACTED, text)


def _redact_argument(item: str) -> str:
    assignment = _ASSIGNMENT.fullmatch(item)
    if assignment is None:
        return redact_text(item)
    name, value = assignment["name"], assignment["value"]
    if is_secret_name(name) and value and not (_NUMBER.fullmatch(value) and not _SECRET_NUMBER_NAME.search(name)):
        return f"{name}={REDACTED}"
    return f"{name}={redact_text(_INNER_PAIR.sub(_redact_inner_pair, value))}"


def _redact_inner_pair(match: re.Match[str]) -> str:
    """One `api_key: X` inside a Hydra dict override."""
    name, value = match["name"], match["value"]
    harmless_number = _NUMBER.fullmatch(value) is not None and not _SECRET_NUMBER_NAME.search(name)
    if not is_secret_name(name) or harmless_number:
        return match[0]
    return f"{name}{match['mid']}{REDACTED}"


def _redact_member(name: str, value: object) -> object:
    return _redact_all(value, name=name) if is_secret_name(name) else redact(value)


def _redact_all(value: object, *, name: str) -> object:
    """A value under a secret key with every string replaced, at any depth."""
    if isinstance(value, str):
        return REDACTED if value else value
    if isinstance(value, bytes):
        return REDACTED
    if isinstance(value, Enum) or value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return REDACTED if _SECRET_NUMBER_NAME.search(name) else value
    if isinstance(value, Mapping):
        return {key: _redact_all(member, name=name) for key, member in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_redact_all(item, name=name) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _redact_all(getattr(value, f.name), name=name) for f in fields(value)}
    return REDACTED


def _redact_items(items: Sequence[object]) -> list[object]:
    shown: list[object] = []
    previous: object = None
    for item in items:
        flag = _FLAG.fullmatch(previous) if isinstance(previous, str) else None
        after_secret_flag = flag is not None and is_secret_name(flag["name"])
        hidden = isinstance(item, str) and after_secret_flag
        shown.append(REDACTED if hidden else _redact_item(item))
        previous = item
    return shown


def _redact_item(item: object) -> object:
    """An item of a list without secrets: `--api-key=X` is treated as an argument, other items are walked."""
    if isinstance(item, str):
        return _redact_argument(item) if _ASSIGNMENT.fullmatch(item) else redact_text(item)
    return redact(item)
