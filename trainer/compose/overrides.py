"""Words of the command line -> overrides that Hydra composes, and a sweep -> the words of each of its runs.

Each word is parsed by itself, so that an unreadable word does not hide the others. Used by `compose.py`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import get_type_hints

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError

from algorithms.config import Problem
from algorithms.config.home import NAMES_PATHS, path_fields
from trainer.config.train import GROUPS, TrainConfig

SWEEP_DIR = "hydra.sweep.dir"
"""Key of the directory of a sweep, the only key of Hydra's own config that has an effect."""
_APART = re.compile(r"(?:^|\0)([^\0= ]+)(?: +=|\0=|=\0)[ \0]*([^\0=]*)(?=\0|$)")
"""In words joined by NUL: a key, and its value, that are apart as in `optim.lr = 1e-3`."""
_HOLE = r"\$\{(?:[^{}]|\$\{[^{}]*\})*\}"
_WITH_TILDE = re.compile(
    rf"""'(?:\\.|[^'])*'|"(?:\\.|[^"])*"|{_HOLE}"""
    rf"""|(?:^|(?<=[\[{{(,:]))(?P<path>[^\[\]{{}}(),:'"~]*~(?:{_HOLE}|\\.|[^,\]}})])*)"""
)
"""A text in quotes or an interpolation, else a text with a ~: a whole value, or one of a list, a mapping, a sweep."""
_ESCAPE = re.compile(r"\\([\\()\[\]{}:=, \t])")
"""A character after a backslash, which Hydra takes away in a text without quotes, and keeps within quotes."""
_ONE_TEXT = re.compile(r"[^'\"\[{,][^,]*")
"""A value without quotes that is no list, no mapping and no sweep."""
_NOT_PLAIN = re.compile(r"[,'\"()\[\]{}=:~]|^\s|\s$")
"""What makes Hydra read a path without quotes as something else."""
_SHORT, _LONG = "resume=", "run.resume="


def long_form(words: Sequence[str]) -> tuple[str, ...]:
    """Overrides with the short key `resume` of the command line written as `run.resume`."""
    return tuple(_LONG + word.removeprefix(_SHORT) if word.startswith(_SHORT) else word for word in words)


def directory_override(run_dir: Path) -> str:
    """The override that names the directory of the run to continue."""
    return f"run.dir={_quoted(str(run_dir))}"


def path_override(key: str, path: str | Path) -> str:
    """The override of a key that names a path, for people: in quotes only where Hydra reads none as it is."""
    return f"{key}={_quoted(str(path)) if _NOT_PLAIN.search(str(path)) else path}"


def override_words(values: Mapping[str, object]) -> list[str]:
    """Key -> value of Python, as the words of the command line: {"correction": "mis", "optim.lr": 1e-5}."""
    return [f"{key}={_written(value)}" for key, value in values.items()]


def change(root: DictConfig, override: Override) -> None:
    """Set the key of `override`, also an unknown one, or delete it; `read.py` reports the keys that must not be there
    and those that must. Raises errors of OmegaConf."""
    section, _, name = override.key_or_group.rpartition(".")
    if not override.is_delete():
        OmegaConf.update(root, override.key_or_group, override.value())
        return
    holder = OmegaConf.select(root, section) if section else root
    if not isinstance(holder, DictConfig) or name not in list(holder):
        raise ConfigKeyError(f"~{override.key_or_group} removes a key that is not there")
    del holder[name]


def parse(words: Sequence[str], *, loader: ConfigLoader, multirun: bool) -> tuple[list[Override], list[Problem]]:
    """Parse `words` -> (overrides, problems of the words that are unreadable or have no effect)."""
    parser = OverridesParser.create(config_loader=loader)
    parsed: list[Override] = []
    words, problems = _spaced(words)
    for word in words:
        try:
            override = _parsed(word, parser, multirun=multirun)
        except HydraException as error:
            problems.append(_refused(word, error))
            continue
        found = _without_effect(override, word, multirun=multirun)
        if found is None:
            parsed.append(override)
        else:
            problems.append(found)
    return parsed, problems


def _parsed(word: str, parser: OverridesParser, *, multirun: bool) -> Override:
    """The override of a word. A path is what is written, where Hydra reads no text, as of 2026_11_28, ä.jsonl, a(1)."""
    key, _, value = word.partition("=")
    is_path = _names_path(key) and _ONE_TEXT.fullmatch(value) is not None
    try:
        found = parser.parse_overrides([quoted_home(word, sweeps=multirun)])[0]
        is_read = not isinstance(found.value(), bool | int | float)
    except HydraException:
        if not is_path:
            raise
        is_read = False
    return parser.parse_overrides([f"{key}={literal(value)}"])[0] if is_path and not is_read else found


def _names_path(key: str) -> bool:
    """True for a key whose value names a file or a directory."""
    section, _, name = key.lstrip("+").partition(".")
    kinds = [get_type_hints(TrainConfig).get(section, object), *GROUPS.get(section, {}).values()]
    return key == SWEEP_DIR or any(path_fields(kind).get(name.partition(".")[0]) == NAMES_PATHS for kind in kinds)


def quoted_home(word: str, *, sweeps: bool = False) -> str:
    """The same word, with quotes around each text that holds a ~, which Hydra's grammar refuses without them.

    A value that begins with ~ is one path, unless the word `sweeps`.
    """
    key, is_set, value = word.partition("=")
    if value.startswith("~") and not sweeps:
        return f"{key}={literal(value)}"

    def quoted(found: re.Match[str]) -> str:
        return found[0] if found["path"] is None else literal(found["path"].strip())

    return f"{key}{is_set}{_WITH_TILDE.sub(quoted, value)}"


def literal(text: str) -> str:
    """A text without quotes, as Hydra would read it, in quotes."""
    return _quoted(_ESCAPE.sub(r"\1", text))


def _spaced(words: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """(The other words, a Problem for each key with spaces around its =, in one word of the shell or in three)."""
    problems: list[Problem] = []

    def refuse(found: re.Match[str]) -> str:
        key, value = found.groups()
        rule, remedy = "must have no spaces around =", f"Write {key}={value}."
        problems.append(Problem(key=key, rule=rule, value=f"{key} = {value}", remedy=remedy))
        return ""

    rest = _APART.sub(refuse, "\0".join(words)).split("\0")
    return [word for word in rest if word or word in words], problems


def expand(overrides: Sequence[Override]) -> list[tuple[str, ...]]:
    """Words of every run of a sweep, in the order in which Hydra's basic sweeper starts the runs.

    The last of several overrides of one key wins, as in Hydra's sweeper. Without a sweep the result has one run.
    """
    choices: dict[str, list[str]] = {}
    for override in overrides:
        key = override.get_key_element()
        if override.is_sweep_override():
            # A function such as choice takes the quotes from its texts.
            choices[key] = [quoted_home(f"{key}={value}") for value in override.sweep_string_iterator()]
        else:
            choices[key] = [override.input_line or key]
    return list(itertools.product(*choices.values()))


def _written(value: object) -> str:
    """A value of Python as Hydra reads it: texts are quoted, so that they stay texts."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case Enum():  # one of the user that is a text or a number is that; Parity's have names alone
            return _written(value.value) if isinstance(value, str | int) else value.name
        case float():
            return repr(float(value))  # float64 of numpy is a float that names its type
        case int():
            return repr(value)
        case Mapping():
            return f"{{{','.join(f'{key}:{_written(inner)}' for key, inner in value.items())}}}"
        case list() | tuple():
            return f"[{','.join(map(_written, value))}]"
        case _:
            return _quoted(str(value))


def _quoted(text: str) -> str:
    # OmegaConf reads no quotes with a backslash before them in an interpolation, and YAML none in single quotes.
    return QuotedString(text=text, quote=Quote.double if "'" in text else Quote.single).with_quotes()


def _refused(word: str, error: HydraException) -> Problem:
    """The Problem of a word that Hydra cannot parse."""
    key, is_set, value = word.partition("=")
    if not is_set:
        return Problem(
            key=word,
            rule="is not an override",
            value=word,
            remedy='Write key=value, in quotes where the value has spaces: "key=two words".',
        )
    # Hydra writes the reason between the word itself and a link.
    reason = next(line for line in str(error).splitlines() if not line.startswith(("Error parsing", "See ")))
    reason = reason.removeprefix("LexerNoViableAltException: ")
    rule = "cannot be read" if "~" in value else f"cannot be read ({reason})"  # Hydra did not get what was typed
    remedy = "Quote a value that holds special characters: \"key='a=b, c'\"."
    if "'" in value:
        text = value.removeprefix("'").removesuffix("'")
        typed = re.sub(r'([\\"$`])', r"\\\1", f"{key}={_quoted(text)}")  # as a shell reads it in double quotes
        remedy = f'A text with an apostrophe stands in double quotes: "{typed}".'
    return Problem(key=key, rule=rule, value=word, remedy=remedy)


def _without_effect(override: Override, word: str, *, multirun: bool) -> Problem | None:
    key, value = override.key_or_group, word.partition("=")[2]
    if override.package is not None or (override.is_delete() and key not in GROUPS and "=" in word):
        said = f"~{key}" if override.is_delete() else f"{key}={value}"
        return Problem(key=key, rule="has a part without effect", value=word, remedy=f"Write {said}.")
    if key == "run.recipe":
        return Problem(key=key, rule="is set by the command line", value=value, remedy="Remove it.")
    if override.is_hydra_override() and word.partition("=")[0] != SWEEP_DIR:
        rule, remedy = "has no effect: Parity starts the runs itself", f"Use run.dir, or {SWEEP_DIR} for a sweep."
        return Problem(key=key, rule=rule, value=value, remedy=remedy)
    if key in GROUPS and (override.package is not None or word.startswith("+")):
        remedy = f"Write {key}={value}."
        return Problem(key=override.get_key_element(), rule="is not how a group is chosen", value=value, remedy=remedy)
    if not override.is_sweep_override():
        return None
    if not multirun:
        remedy = f"parity train -m runs each value; a list is written [a,b], a text with commas \"{key}='a,b'\"."
        return Problem(key=key, rule="must be one value", value=value, remedy=remedy)
    if override.is_hydra_override() or not override.is_discrete_sweep():
        remedy = "Name the values of a key that is not Hydra's: key=a,b,c."
        return Problem(key=key, rule="cannot be swept", value=value, remedy=remedy)
    if not any(True for _ in override.sweep_string_iterator()):
        remedy = f"Options: {', '.join(GROUPS[key])}." if key in GROUPS else "Name the values: key=a,b,c."
        return Problem(key=key, rule="must have a value", value=value, remedy=remedy)
    return None
