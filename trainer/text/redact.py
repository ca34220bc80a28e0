"""Remove secrets from written records: configs, command lines, environment records.

Any value -> the same shape with secret strings replaced by "<redacted>". trainer/rundir/provenance.py redacts what goes
into config.yaml and environment.json, trainer/tracking/wandb_run.py what goes to W&B. A secret is recognised by the
name of its key (api_key, hf_token, password, ...), by its place (user:password@ in a URL, the value after --api-key) or
by a well-known form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum

from algorithms.config.custom import written
from rollout.processes.secret_names import SECRET_WORDS, is_secret_name

REDACTED = "<redacted>"

# Numbers under these names are secrets too (`password: 123456`); `max_new_tokens: 64` is not.
_SECRET_NUMBER_NAME = re.compile(r"secret|passw|pwd|credential|api_?key", re.IGNORECASE)

_NUMBER = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?", re.IGNORECASE)
_FLAG = re.compile(r"--?(?P<name>[A-Za-z][\w.-]*)")
_ASSIGNMENT = re.compile(r"(?P<name>[+~-]*[A-Za-z_][\w./-]*)=(?P<value>.*)", re.DOTALL)

# Every pattern below begins where a word begins and bounds what comes before its mark: a text may be a megabyte of one
# letter, and its time must grow with its length only.
_VALUE = r"(?P<value>\"[^\"]*\"|'[^']*'|[^\s,}\]&;\"'<]+)"
_NAME_WITH = r"(?<![\w.-])(?P<name>[\w.-]{{0,64}}?(?:{})[\w.-]{{0,64}})"
_INNER_PAIR = re.compile(_NAME_WITH.format(SECRET_WORDS) + r"(?P<mid>[\"']?\s{0,9}[:=]\s{0,9})" + _VALUE, re.IGNORECASE)
_QUOTED_PAIR = re.compile(
    _NAME_WITH.format(SECRET_WORDS) + r"(?P<mid>\\?[\"']\s{0,9}:\s{0,9}\\?(?=[\"']))(?P<value>\"[^\"]*\"|'[^']*')",
    re.IGNORECASE,
)
# In prose only these names mark a secret: `KeyError: 'x'` and `not a key: x` must stay readable.
_STRONG_WORDS = (
    r"(?:api|access|private|secret|account)[_-]?key|(?:auth|access|refresh|hf|session|bearer|security)[_-]?token"
    r"|secret|passw(?:or)?d|passphrase|credential|cookie|session_?id|(?<![a-z])pat(?![a-z])"
)
_PLAIN_PAIR = re.compile(
    _NAME_WITH.format(_STRONG_WORDS) + r"(?P<mid>=|\s?[:=]\s?(?=[^\s,;]{0,199}\d))(?P<value>[^\s,}\]&;\"'<()]{4,})",
    re.IGNORECASE,
)
_HEADERS = re.compile(
    r"\b(?P<name>(?:proxy-)?authorization[\"']?\s?[:=]\s?[\"']?(?:[a-z]{1,20}\s)?|bearer\s(?=[^\s\"']{0,99}\d))"
    r"[\w.~+/=%:-]{8,}",
    re.IGNORECASE,
)
_COOKIES = re.compile(r"\b(?P<name>(?:set-)?cookie:\s?)[^\r\n\"']+", re.IGNORECASE)
_URL_LOGIN = re.compile(r"(?<![a-z0-9+.-])(?P<scheme>[a-z][a-z0-9+.-]{0,20}://)[^/\s@]+@", re.IGNORECASE)
_URL_QUERY = re.compile(rf"(?P<name>[?&;][\w.-]{{0,64}}?(?:{SECRET_WORDS})[\w.-]{{0,64}}=)[^&\s#\"'<>]+", re.IGNORECASE)
_WANDB_KEY = re.compile(r"(?P<name>\bwandb\b[^\n]{0,40}?)(?<![\w-])[0-9a-f]{40}(?!\w)", re.IGNORECASE)
"""A key of W&B looks like a commit, which must stay: W&B must be named before it."""
_KNOWN_FORM = re.compile(
    r"(?<![\w-])(?:"
    r"hf_[A-Za-z0-9]{20,}|sk-(?=[\w-]{0,99}\d)[\w-]{16,}|[sr]k_(?:live|test)_\w{16,}|gh[opusr]_\w{16,}|github_pat_\w{16,}"
    r"|glpat-[\w-]{16,}|xox[abeprs]-[\w-]{12,}|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,}|ya29\.[\w-]{20,}|npm_\w{30,}"
    r"|pypi-[\w-]{30,}|nvapi-[\w-]{20,}|gsk_\w{20,}|wandb_v\d_[\w-]{12,}|local-[0-9a-f]{40}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}-----|\Z)",
    re.DOTALL,
)


def redact(value: object, *, name: str = "") -> object:
    """A copy of `value`, which stands under the key `name`, without secrets; dataclasses become dicts.

    Under a secret key every string is replaced, at any depth. Numbers, booleans and None are kept, except numbers under
    names such as `password`. In a sequence of strings the item after a flag such as `--api-key` is redacted as well.
    """
    is_secret = is_secret_name(name)
    if isinstance(value, str):
        return (REDACTED if value else value) if is_secret else redact_text(value)
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: written(getattr(value, field.name)) for field in fields(value)}
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
    """Free text without secrets: by their form, their header, their place in a URL, or the name right before them."""
    text = _KNOWN_FORM.sub(REDACTED, text)
    text = _URL_LOGIN.sub(rf"\g<scheme>{REDACTED}@", text)
    for pattern in (_URL_QUERY, _HEADERS, _COOKIES, _WANDB_KEY):
        text = pattern.sub(rf"\g<name>{REDACTED}", text)
    for pattern in (_QUOTED_PAIR, _PLAIN_PAIR):
        text = pattern.sub(_without_value, text)
    return text


def _without_value(pair: re.Match[str]) -> str:
    """A pair `name: value` without its value, in the quotes that the value has, if the name is that of a secret."""
    if not _is_hidden(pair["name"], pair["value"]):
        return pair[0]
    quote = pair["value"][0] if pair["value"][0] in "\"'" else ""
    return f"{pair['name']}{pair['mid']}{quote}{REDACTED}{quote}"


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
    inner = _INNER_PAIR.sub(_without_value, value)
    return f"{name}={redact_text(inner)}"


def _is_hidden(name: str, value: str) -> bool:
    """True for text under a secret name; a number is hidden under names such as `password` only."""
    is_harmless = _NUMBER.fullmatch(value) is not None and not _SECRET_NUMBER_NAME.search(name)
    return is_secret_name(name) and not is_harmless
