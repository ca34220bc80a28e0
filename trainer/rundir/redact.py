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

from rollout.processes.secret_names import SECRET_WORDS, is_secret_name

REDACTED = "<redacted>"

# Numbers under these names are secrets too (`password: 123456`); `max_new_tokens: 64` is not.
_SECRET_NUMBER_NAME = re.compile(r"secret|passw|pwd|credential|api_?key", re.IGNORECASE)

_NUMBER = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?", re.IGNORECASE)
_FLAG = re.compile(r"--?(?P<name>[A-Za-z][\w.-]*)")
_ASSIGNMENT = re.compile(r"(?P<name>[+~-]*[A-Za-z_][\w./-]*)=(?P<value>.*)", re.DOTALL)
_INNER_PAIR = re.compile(
    rf"(?P<name>[\w.-]*(?:{SECRET_WORDS})[\w.-]*)(?P<mid>[\"']?\s*[:=]\s*)(?P<value>\"[^\"]*\"|'[^']*'|[^\s,}}\]&;\"']+)",
    re.IGNORECASE,
)
_URL_LOGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)[^/\s@]+@", re.IGNORECASE)
_URL_QUERY = re.compile(rf"(?P<name>[?&][\w.-]*(?:{SECRET_WORDS})[\w.-]*=)[^&\s#]+", re.IGNORECASE)
_HEADER = re.compile(r"\b(?P<kind>Bearer|Basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE)
_KNOWN_PREFIX = re.compile(r"\b(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abp]-|AKIA|wandb_v\d_)[\w-]{12,}")


def redact(value: object, *, name: str = "") -> object:
    """A copy of `value`, which stands under the key `name`, without secrets; dataclasses become dicts.

    Under a secret key every string is replaced, at any depth. Numbers, booleans and None are kept, except numbers under
    names such as `password`. In a sequence of strings the item after a flag such as `--api-key` is redacted as well.
    """
    is_secret = is_secret_name(name)
    if isinstance(value, str):
        return (REDACTED if value else value) if is_secret else redact_text(value)
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: redact(member, name=name if is_secret else str(key)) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        items = [redact(item, name=name) for item in value] if is_secret else _redact_items(value)
        return tuple(items) if type(value) is tuple else items
    if isinstance(value, (set, frozenset)):
        return {redact(item, name=name) for item in value}
    if not is_secret or value is None or isinstance(value, (bool, Enum)):
        return value
    is_harmless = isinstance(value, (int, float)) and not _SECRET_NUMBER_NAME.search(name)
    return value if is_harmless else REDACTED


def redact_argv(argv: Sequence[str]) -> list[str]:
    """A command line without secrets: `--api-key X`, `--api-key=X`, `+a.b.api_key=X`, `a={api_key:X}`, URLs."""
    return [str(item) for item in _redact_items(argv)]


def redact_text(text: str) -> str:
    """Free text without logins in URLs, secrets in query strings, authorization headers and well-known key formats."""
    text = _URL_LOGIN.sub(rf"\g<scheme>{REDACTED}@", text)
    text = _URL_QUERY.sub(rf"\g<name>{REDACTED}", text)
    text = _HEADER.sub(rf"\g<kind> {REDACTED}", text)
    return _KNOWN_PREFIX.sub(REDACTED, text)


def _redact_items(items: Sequence[object]) -> list[object]:
    """A list, or a command line: the item after a secret flag is hidden."""
    shown: list[object] = []
    previous: object = None
    for item in items:
        flag = _FLAG.fullmatch(previous) if isinstance(previous, str) else None
        if not isinstance(item, str):
            shown.append(redact(item))
        else:
            shown.append(REDACTED if flag is not None and is_secret_name(flag["name"]) else _redact_argument(item))
        previous = item
    return shown


def _redact_argument(item: str) -> str:
    """An argument `name=value`, or other text."""
    assignment = _ASSIGNMENT.fullmatch(item)
    if assignment is None:
        return redact_text(item)
    name, value = assignment["name"], assignment["value"]
    if value and _is_hidden(name, value):
        return f"{name}={REDACTED}"
    # A Hydra dict override holds pairs `api_key: X` of its own.
    inner = _INNER_PAIR.sub(
        lambda pair: f"{pair['name']}{pair['mid']}{REDACTED}" if _is_hidden(pair["name"], pair["value"]) else pair[0],
        value,
    )
    return f"{name}={redact_text(inner)}"


def _is_hidden(name: str, value: str) -> bool:
    """True for text under a secret name; a number is hidden under names such as `password` only."""
    is_harmless = _NUMBER.fullmatch(value) is not None and not _SECRET_NUMBER_NAME.search(name)
    return is_secret_name(name) and not is_harmless
