"""A script of another trainer -> its settings. Nothing of it is executed.

bash    variables, arrays and arithmetic of the script are filled in; branches are read as if all were taken
Python  arguments of GRPOConfig, GRPOTrainer and LoraConfig, as far as they are literals or names of literals
YAML    keys, joined by dots
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from trainer.compose.peers import Settings, arithmetic
from trainer.text.yaml_text import leaves, load_yaml

_COMMANDS = r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`"
_INNER = r"(?:[^{}]|\$\{(?:[^{}]|\$\{[^{}]*\})*\})*"
_DOUBLE = rf'"(?:\\.|\$\{{{_INNER}\}}|[^"\\])*"'
_WORDS = re.compile(
    rf"""(?<![^\s;(])\#[^\n]*|(?:[^\s"'\\$();&|<>`]|\\.|'[^']*'|{_DOUBLE}|{_COMMANDS}|\$\{{{_INNER}\}}|\$)+"""
    r"|[();&|\n]",
    re.DOTALL,
)
_QUOTED = re.compile(rf"""\$\{{{_INNER}\}}|'([^']*)'|({_DOUBLE})|\\(.)""", re.DOTALL)
_VARIABLE = re.compile(rf"\$\(\((.*?)\)\)|{_COMMANDS}|\$\{{(\w+)(?::?[-=]({_INNER}))?\}}|\$(\w+)", re.DOTALL)
_ASSIGNED = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_PROGRAM = re.compile(r"(.*/)?\w+\.py|[\w.]*\bmain_\w+|grpo")
_CALLS = ("GRPOConfig", "GRPOTrainer", "LoraConfig")


def read_script(path: Path) -> tuple[Settings, list[str]]:
    """(The settings of a script in bash, Python or YAML, empty if it has none; comments on how they were read).

    A value that depends on what only a run knows stays as it is written, with its $ or as a line of Python. Raises
    OSError, ValueError and SyntaxError.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return dict(_of_python(ast.parse(text))), []
    if path.suffix in (".yaml", ".yml"):
        return {".".join(keys): value for keys, value in leaves(load_yaml(text)) if keys and value != {}}, []
    commands = ((_of_words(words), comments) for words, comments in _bash_commands(text))
    return max(commands, key=lambda found: len(found[0]), default=({}, []))


def _of_python(tree: ast.Module) -> Iterator[tuple[str, object]]:
    names: dict[str, object] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                names[name] = _literal(value, names)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), keywords=keywords) if name in _CALLS:
                yield from ((each.arg, _literal(each.value, names)) for each in keywords if each.arg)


def _literal(node: ast.expr, names: dict[str, object]) -> object:
    """The value of an expression; its source behind a $ where it is no literal."""
    match node:
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Call(func=ast.Name(id="load_dataset"), args=args, keywords=keywords):
            given = [str(_literal(each, names)) for each in args]
            split = [str(_literal(each.value, names)) for each in keywords if each.arg == "split"]
            return f"{':'.join(given)}@{split[0]}" if split else f"${ast.unparse(node)}"
    try:
        return ast.literal_eval(node)
    except ValueError:
        return f"${ast.unparse(node)}"


def _of_words(words: list[str]) -> dict[str, object]:
    """`key=value`, `--key value ...`, `--key=value` and `--key` behind the program of a command."""
    starts = [index for index, word in enumerate(words) if _PROGRAM.fullmatch(word)]
    settings: dict[str, object] = {}
    flag = ""
    for word in words[starts[0] + 1 :] if starts else ():
        key, is_set, value = word.partition("=")
        if word.startswith("--"):
            flag = key.lstrip("-").replace("-", "_")
            settings[flag] = value if is_set else True
        elif flag:
            settings[flag] = word if settings[flag] is True else f"{settings[flag]} {word}"
        elif is_set:
            settings[key.lstrip("+~")] = value
    return settings


def _bash_commands(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """(Words of each command, with the values that the script has given to variables before; comments on these)."""
    variables, arrays = {"HOME": "~"}, dict[str, list[str]]()
    command: list[str] = []
    comments: dict[str, str] = {}
    array = empty = ""
    for found in _WORDS.finditer(text.replace("\\\n", " ") + "\n"):
        word, assigned = found[0], _ASSIGNED.fullmatch(found[0])
        if word.startswith("#") or (array and word == "\n"):
            continue
        if word == "(" and empty:
            array = empty
            arrays.setdefault(array, [])
        elif len(word) == 1 and word in "();&|\n":
            array = ""
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

    if array := re.fullmatch(r'"?\$\{(\w+|@)(?:\[[@*]\])?\}"?|"?\$@"?', word):
        if array[1] in arrays:
            return arrays[array[1]]
        if "@" in word:
            return []
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
