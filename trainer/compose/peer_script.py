"""A script of another trainer -> its settings. Nothing of it is executed.

bash    variables, arrays and arithmetic of the script are filled in; branches are read as if all were taken
Python  what GRPOConfig, GRPOTrainer and LoraConfig are given: peer_python.py
YAML    keys, joined by dots
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.compose.peer_python import PythonReader
from trainer.compose.peers import Settings, arithmetic
from trainer.text.yaml_text import leaves, load_yaml

_COMMANDS = r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`"
_INNER = r"(?:[^{}]|\$\{(?:[^{}]|\$\{[^{}]*\})*\})*"
_DOUBLE = rf'"(?:\\.|\$\{{{_INNER}\}}|[^"\\])*"'
_WORDS = re.compile(
    rf"""(?<!\S)(?:\d|&)?(?:>>?|<)(?:&\d|\s*(?:[^\s;&|()"']|{_DOUBLE}|'[^']*')+)|(?<![^\s;(])\#[^\n]*|(?:[^\s"'\\$();&|<>`]|\\.|'[^']*'|{_DOUBLE}|{_COMMANDS}|\$\{{{_INNER}\}}|\$)+"""
    r"|[();&|\n]",
    re.DOTALL,
)
_QUOTED = re.compile(rf"""\$\{{{_INNER}\}}|'([^']*)'|({_DOUBLE})|\\(.)""", re.DOTALL)
_VARIABLE = re.compile(rf"\$\(\((.*?)\)\)|{_COMMANDS}|\$\{{(\w+)(?::?[-=]({_INNER}))?\}}|\$(\w+)", re.DOTALL)
_ASSIGNED = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_ARRAY = re.compile(r'"?\$\{(\w+|@)(?:\[[@*]\])?\}"?|"?\$@"?')
_HYDRA = re.compile(r"\+*[a-z_]\w*(\.\w+)+=.*", re.DOTALL)
_REDIRECTION = re.compile(r"(\d|&)?[<>]")
_PROGRAM = re.compile(r"(.*/)?[\w.-]+\.py|[\w.]*\bmain_\w+|grpo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """What a script says."""

    settings: Settings
    lines: Mapping[str, int]
    """Key -> the line that sets it, where it is known."""
    comments: list[str]
    """How it was read, and what was not."""


def read_script(path: Path) -> Script:
    """The settings of a script in bash, Python or YAML, empty if it has none.

    A value that depends on what only a run knows stays as it is written, with its $ or as a line of Python. Raises
    OSError, ValueError and SyntaxError.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        found = PythonReader(ast.parse(text))
        return Script(settings=found.settings, lines=found.lines, comments=found.comments)
    comments: list[str] = []
    if path.suffix in (".yaml", ".yml"):
        settings = {".".join(keys): value for keys, value in leaves(load_yaml(text)) if keys and value != {}}
    else:
        commands = [(*_of_words(words), said) for words, said in _bash_commands(text)]
        settings, unread, said = max(commands, key=lambda found: len(found[0]), default=({}, [], []))
        others = [f"# {len(each)} settings of another command: the one with the most is read" for each, *_ in commands]
        others = [text for text, (each, *_) in zip(others, commands, strict=True) if each and each is not settings]
        comments = [*said, *(f"# {word}: no setting that can be read" for word in unread), *others]
    return Script(
        settings=settings, lines={key: line for key in settings if (line := _line(key, text))}, comments=comments
    )


def _line(key: str, text: str) -> int:
    """The number of the first line that names a key; 0 if none does."""
    named = re.compile(rf"(?:(?<![\w.])|(?<=__)){re.escape(key)}\b|^\s*{re.escape(key.rpartition('.')[2])}\s*:")
    lines = enumerate(text.replace("-", "_").splitlines(), 1)
    return next((number for number, line in lines if not line.lstrip().startswith("#") and named.search(line)), 0)


def _of_words(words: list[str]) -> tuple[dict[str, object], list[str]]:
    """(`key=value`, `--key value ...`, `--key=value` and `--key` behind the program of a command; other words)."""
    starts = [index for index, word in enumerate(words) if _PROGRAM.fullmatch(word)]
    settings: dict[str, object] = {}
    flag = ""
    unread: list[str] = []
    for word in words[starts[0] + 1 :] if starts else ():
        key, is_set, value = word.partition("=")
        if word.startswith("--"):
            flag = key.lstrip("-").replace("-", "_")
            settings[flag] = value if is_set else True
            flag = "" if is_set else flag
        elif _HYDRA.fullmatch(word) or (is_set and not flag):
            settings[key.lstrip("+")] = value
            flag = ""
        elif flag and not _ARRAY.fullmatch(word):
            settings[flag] = word if settings[flag] is True else f"{settings[flag]} {word}"
        else:
            unread.append(word)
    launched = words[: starts[0]] if settings else []
    if {"accelerate", "torchrun", "deepspeed"} & set(launched) and any(word.startswith("-") for word in launched):
        unread.append(" ".join(launched))
    return settings, unread


def _bash_commands(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """(Words of each command, with the values that the script has given to variables before; comments on these)."""
    variables, arrays = {"HOME": "~"}, dict[str, list[str]]()
    command: list[str] = []
    comments: dict[str, str] = {}
    array = empty = ""
    for found in _WORDS.finditer(text.replace("\\\n", " ") + "\n"):
        word, assigned = found[0], _ASSIGNED.fullmatch(found[0])
        if word.startswith("#") or _REDIRECTION.match(word) or (array and word == "\n"):
            continue
        if word == "(" and empty:
            array = empty
            arrays.setdefault(array, [])
        elif len(word) == 1 and word in "();&|\n":
            array = ""
            if command[:1] in (["for"], ["read"]) and len(command) > 1:
                variables.pop(command[-1 if command[0] == "read" else 1], None)
            if command[:1] in (["source"], ["."]) and len(command) > 1:
                comments[command[1]] = f"# source {command[1]}: the settings of this file are not read"
            yield command, [*comments.values()]
            command = []
        elif array:
            arrays[array] += _expanded(word, variables, arrays)
        elif assigned and not set(command) - {"export", "local", "declare", "then", "else", "do"}:
            name, added, value = assigned.groups()
            value = (variables.get(name, "") if added else "") + " ".join(_expanded(value, variables, arrays))
            if name in comments or (not added and variables.get(name, value) != value):
                comments[name] = f"# {name}: the script sets it more than once; it is read as {value}, the last value"
            variables[name] = value
        else:
            command += _expanded(word, variables, arrays)
        empty = assigned[1] if assigned and not assigned[3] else ""


def _expanded(word: str, variables: dict[str, str], arrays: dict[str, list[str]]) -> list[str]:
    """The words that bash makes of one: variables filled in, quotes gone; what only a run knows stays."""

    def value_of(found: re.Match[str]) -> str:
        sum_, name, default, short = found.groups()
        if sum_ is not None:
            try:
                return str(arithmetic(sum_.replace("/", "//").replace("$", ""), variables.get))
            except ValueError:
                return found[0]
        if (known := variables.get(name or short)) is not None:
            return known
        return found[0] if default is None else " ".join(_expanded(default, variables, arrays))

    if array := _ARRAY.fullmatch(word):
        if array[1] in arrays:
            return arrays[array[1]]
        if "@" in word:
            return [word.strip('"')]
    done, end = "", 0
    for found in _QUOTED.finditer(word):
        single, double, escaped = found.groups()
        if single is double is escaped is None:
            continue
        done += _VARIABLE.sub(value_of, word[end : found.start()])
        text = single or escaped or ""
        if double is not None:
            text = _VARIABLE.sub(value_of, re.sub(r'\\(["\\$`])', r"\1", double[1:-1]))
        done += text
        end = found.end()
    done += _VARIABLE.sub(value_of, word[end:])
    return done.split() if _VARIABLE.fullmatch(word) else [done]
