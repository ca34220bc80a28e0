"""Keys of other trainers -> what does the same here: the rows of peers.yaml, whose head says how to read them.

`unknown_keys.py` answers a key that does not exist, `key_page.py` and `peer_page.py` write them into docs, `port.py`
translates whole scripts.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from algorithms.config.advantage import Estimator
from trainer.text.yaml_text import load_yaml

Settings = Mapping[str, object]
"""Key of another trainer -> value."""
SYNONYMS: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("fp32", "fp64", "float64", "double"), ("float32",)),
    "bf16": ("bfloat16",),
    "fp16": ("float16",),
    "half": ("float16",),
    **dict.fromkeys(("none", "null", "off", "false", "no"), ("none", "disabled", "never", "recompute")),
    **dict.fromkeys(("on", "true", "yes"), ("mismatch", "always", "online")),
    "async": ("one_step_off",),
    "low_var_kl": ("k3",),
    "mse": ("k2",),
    "kl": ("k1",),
    "seq_mean_token_sum_norm": ("fixed_length",),
    "ppo": ("ppo_clip", "gae"),
    "hf": ("torch",),
}
"""Word of other trainers for a value -> values of Parity; the first one that a key or a group accepts is meant."""
CHOICES: Final[dict[str, str]] = {
    **{
        f"loss={estimator.name}": f"It is an estimator of advantages: advantage.estimator={estimator.name}."
        for estimator in Estimator
    },
}
"""Choice of an option that other trainers have in this group -> a sentence about what there is instead."""
DEPENDS: Final = "depends on "
"""Begins what is said of a value that only the script knows; such a one has a $."""
NOTHING: Final = "nothing to write"
_HOLE = re.compile(r"\{([^{}]*)\}")
_WORD = re.compile(r"(?:\{[^{}]*\}|\S)+")
OPERATORS: Final[dict[type, Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What there is here in place of a key with a value."""

    words: tuple[str, ...]
    """Words of the command line, filled in; none where nothing does the same."""
    said: str
    """A sentence without its point, or nothing."""

    def text(self) -> str:
        """It as sentences of a refusal."""
        found = [f"Here it is {' '.join(self.words)}"] * bool(self.words) + [self.said] * bool(self.said)
        capital = [each if re.match(r"\w*[_.=/]", each) else each[0].upper() + each[1:] for each in found]
        return " ".join(f"{each.removesuffix('.')}." for each in capital)


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """The rows of one trainer."""

    about: str
    """Its name and version."""
    defaults: Settings
    usual: Settings
    """Settings beside which the table of defaults is printed."""
    keys: Mapping[str, Mapping[str, str]]
    """Pattern of the end of a key -> pattern of its value -> answer, not filled in."""

    def row(self, path: list[str]) -> tuple[int, int] | None:
        """(Number of the parts of `path` that the row of a key does not name, number of the row)."""
        for start in range(len(path)):
            for number, pattern in enumerate(self.keys):
                if re.fullmatch(pattern, ".".join(path[start:])):
                    return start, number
        return None

    def answer(self, path: list[str], value: object, settings: Settings | None = None) -> Answer | None:
        """The answer to a key with a value; `settings` are all of a script, None if the others are not known.

        Raises ValueError for a number that cannot be computed from them.
        """
        found = self.row(path)
        rows = [*self.keys.values()][found[1]] if found else {}
        order = sorted(rows.items(), key=lambda row: 0 if settings is not None else self._place(row[0], row[1], value))
        for pattern, answer in order:
            first, *conditions = pattern.split(" & ")
            if (match := re.fullmatch(first, as_text(value), re.IGNORECASE)) is None:
                continue
            groups, words, said = match.groupdict(), *parted(answer)
            # An unknown value chooses none of several rows, apart from one that is written for it.
            open_ = "" if "$" not in as_text(value) or len(rows) == 1 or "$" in first else "what"
            for condition in conditions if settings is not None and not open_ else ():
                open_, match = self._meets(condition, value, settings or {})
                if open_ or match is None:
                    break
                groups |= match.groupdict()
            if match is None and not open_:
                continue
            filled = [] if open_ else [self._filled(word, value, groups, settings) for word in _WORD.findall(words)]
            if open_ or "$" in "".join(filled):
                keys = ", ".join(word.partition("=")[0] for word in _WORD.findall(words))
                hint = f"set {keys}" if keys else said * (not said.startswith(NOTHING))
                filled, said = [], f"{DEPENDS}{open_ or 'what'} only the script knows; {hint}".removesuffix("; ")
            elif "$" in as_text(value) and filled and not said and "$" not in first:
                said = "the words behind it are not known"
            return Answer(words=tuple(filled), said=said)
        return None

    def _meets(self, condition: str, value: object, settings: Settings) -> tuple[str, re.Match[str] | None]:
        """(What is unknown of the key of a condition, the match of its value) with `settings`."""
        key, _, expected = condition.partition("=")
        text = as_text(self.value(key, settings))
        match = re.fullmatch(self._filled(expected, value, {}, settings), text, re.IGNORECASE)
        return f"{key}, which" if "$" in text else "", match

    def _place(self, pattern: str, answer: str, value: object) -> int:
        """Where a row comes if the other keys are not known: 0 if its conditions hold for who sets only what is usual,
        then the others, and last a sentence for every value, such as that the key has no effect by itself."""
        first, *conditions = pattern.split(" & ")
        if first == ".*" and not parted(answer)[0]:
            return 2
        return int(not all(self._meets(condition, value, self.usual)[1] for condition in conditions))

    def value(self, key: str, settings: Settings) -> object:
        """The value of `key`, or of one that ends with it, in a script or by default; None if it has none."""
        for name, value in settings.items():
            if f".{name}".endswith(f".{key}"):
                return value
        for name, value in self.defaults.items():
            if f".{name}".endswith(f".{key}"):
                try:
                    return self._filled(value, value, {}, settings) if isinstance(value, str) else value
                except ValueError:  # it is computed from what is unknown, and as unknown itself
                    return f"${value}"
        return None

    def _filled(self, text: str, value: object, groups: Mapping[str, str], settings: Settings | None) -> str:
        def number(found: re.Match[str]) -> str:
            if not found[1]:
                return as_text(value)
            if found[1] == "any":
                return "|".join(re.findall(r"[\w.]+", as_text(value)))
            if settings is None and found[1] not in groups:
                return "..."
            return as_text(arithmetic(found[1], lambda name: groups.get(name) or self.value(name, settings or {})))

        return _HOLE.sub(number, text)


@cache
def peers() -> dict[str, Peer]:
    """Name of a trainer -> its rows."""
    tables = load_yaml((Path(__file__).parent / "peers.yaml").read_text(encoding="utf-8"))
    return {
        name: Peer(
            about=table["about"],
            defaults=table["defaults"],
            usual=table["usual"],
            keys={key: {".*": row} if isinstance(row, str) else row for key, row in table["keys"].items()},
        )
        for name, table in tables.items()
    }


def peer_hint(path: list[str], value: object = None) -> str:
    """What there is here in place of another trainer's key, as sentences; empty for other keys.

    Of several trainers the one that names most of the key answers, then one that has it by its name.
    """
    parts = [part.replace("-", "_") for part in path]
    found = []
    for peer in peers().values():
        if (row := peer.row(parts)) and (answer := peer.answer(parts, value)):
            is_named = ".".join(parts[row[0] :]) in [*peer.keys][row[1]].split("|")
            found.append((row[0], not is_named, answer))
    return min(found, key=lambda each: each[:2])[2].text() if found else ""


def peer_names(trainer: str, key: str) -> list[str]:
    """The names of a key of Parity in `trainer`."""
    sets = re.compile(rf"(\S+=\S+ )*\+?{re.escape(key)}=")
    names = [
        name
        for pattern, answers in peers()[trainer].keys.items()
        if any(is_words(text) and sets.match(text) for text in answers.values())
        for name in re.sub(r"\([^)]*\)\?", "", pattern).split("|")
        if re.fullmatch(r"[\w.]+", name)
    ]
    short = [re.sub(r"^(data|critic|rollout|optim|model)\.", "", name) for name in names]  # a section of Parity too
    return [name for name in dict.fromkeys(short) if not any(name.endswith(f".{other}") for other in short)]


def is_words(text: str) -> bool:
    """True if an answer begins with words of the command line."""
    return all(re.match(r"\+?[a-z_][\w.]*=", word) for word in _HOLE.sub("x", text).split(" | ")[0].split())


def parted(answer: str) -> tuple[str, str]:
    """(Words of the command line, sentence) of an answer; either may be empty."""
    words, _, said = answer.rpartition(" | ") if is_words(answer) else ("", "", answer)
    return (words, said) if words or not is_words(said) else (said, "")


def as_text(value: object) -> str:
    """A value of Python, YAML or a shell as the command line takes it."""
    if isinstance(value, dict | list):
        entries = {str(key): each for key, each in value.items()} if isinstance(value, dict) else value
        return json.dumps(entries, separators=(",", ":"), default=str)
    text = f"{value:.12g}" if isinstance(value, float) else str(value)
    return {"True": "true", "False": "false", "None": "null"}.get(text, text)


def arithmetic(text: str, value_of: Callable[[str], object]) -> object:
    """The value of a name, or of a sum, product or quotient of numbers and names; `a or b` is b where a has no value.

    Raises ValueError for all else.
    """

    def number(node: ast.expr) -> float:
        match node:
            case ast.BinOp(left, op, right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](number(left), number(right))
            case ast.BoolOp(ast.Or(), [first, other]):
                try:
                    return number(first)
                except ValueError as error:
                    if str(error).startswith(DEPENDS):
                        raise
                    return number(other)
            case ast.UnaryOp(ast.USub(), operand):
                return -number(operand)
            case ast.Constant(int() | float() as value):
                return value
            case ast.Name() | ast.Attribute():
                found = as_text(value_of(ast.unparse(node)))
                if "$" in found:
                    raise ValueError(f"{DEPENDS}{ast.unparse(node)}={found}, which only the script knows")
                try:
                    return int(found) if found.lstrip("-").isdigit() else float(found)
                except ValueError:
                    raise ValueError(f"{ast.unparse(node)}={found} is no number") from None
        raise ValueError(f"{text} is no sum of numbers")

    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if isinstance(tree, ast.Name | ast.Attribute):
            if (found := value_of(text.strip())) is None:
                raise ValueError(f"{text} has no value")
            return found
        return number(tree)
    except (SyntaxError, ArithmeticError) as error:
        raise ValueError(f"{text} cannot be computed: {error}") from error
