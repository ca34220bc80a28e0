"""Layouts: the columns of prompt and answer. The first rows of a source + the keys of the config -> Columns.

Add a layout as a row of `LAYOUTS`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from string import ascii_uppercase
from typing import Any, NamedTuple, TypeGuard

from algorithms.config.similar import similar
from rollout.data.data_files import written_value
from rollout.task_config import FileDataConfig

JOIN = "+"
"""Separator of the columns of a prompt that several columns make up: Body+Question."""


LETTERS = tuple(ascii_uppercase)
_LABELLED = re.compile(r"\W*A\W*[.):]")
"""Beginning of the first of several choices that have their letters."""


class Layout(NamedTuple):
    """Column names of prompt and answer that a family of data sets uses."""

    name: str
    prompt: str
    """Name of a column, or column.field."""
    answer: str


LAYOUTS = (
    Layout("verl", "prompt", "reward_model.ground_truth"),
    Layout("slime/OpenRLHF", "prompt", "label"),
    Layout("GSM8K", "question", "answer"),
    Layout("MATH", "problem", "answer"),
)
"""Layouts that are recognised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Columns of prompt and answer of a source."""

    name: str
    """Name of the layout; "" where both keys were given."""
    prompt_key: str
    answer_key: str
    prompt_paths: tuple[tuple[str, ...], ...]
    """Columns, or columns and fields, whose texts make up the prompt."""
    answer_path: tuple[str, ...]

    def __str__(self) -> str:
        how = f"layout {self.name}" if self.name else "keys as given"
        return f"{how}: prompt from {self.prompt_key}, answer from {self.answer_key}"

    def prompt(self, row: dict[str, Any]) -> object:
        """The prompt of a row, of its parts that are not null; None if there is none.

        A list of texts is a part of lines. If a part is no text, the tuple of the parts, which is no prompt.
        """
        parts = [look_up(row, path) for path in self.prompt_paths]
        if len(parts) == 1:
            return parts[0]
        text = ""
        for part in (_choices(part, self.answer(row)) for part in parts):
            if _is_texts(part):
                text += "\n" + "\n".join(map(str, part))
            elif _is_texts([part]):
                text += f" {str(part).strip()}"
            elif part is not None:
                return tuple(parts)
        return text.strip() or None

    def lacks_part(self, row: dict[str, Any]) -> bool:
        """True if a part of the prompt of a row is null."""
        return any(look_up(row, path) is None for path in self.prompt_paths)

    def answer(self, row: dict[str, Any]) -> object:
        """The answer of a row; None if the row has no answer."""
        return look_up(row, self.answer_path)

    def are_in(self, rows: Sequence[dict[str, Any]]) -> bool:
        """True if every column occurs in some row; for a field of a column, some row must also have a value."""
        return all(
            any(path[0] in row and (len(path) == 1 or look_up(row, path) is not None) for row in rows)
            for path in (*self.prompt_paths, self.answer_path)
        )

    def others(self, row: dict[str, Any]) -> dict[str, Any]:
        """Columns other than prompt and answer. A column that holds the answer in one of its fields is included."""
        used = {path[0] for path in (*self.prompt_paths, self.answer_path) if len(path) == 1}
        return {key: value for key, value in row.items() if key not in used}

    def without_answer(self, others: dict[str, Any]) -> dict[str, Any]:
        """`others` without the answer, which is a field of one of them in some layouts."""
        column, *fields = self.answer_path
        if not fields or not isinstance(others.get(column), dict):
            return others
        inner = replace(self, answer_path=tuple(fields)).without_answer(others[column])
        return {**others, column: {key: value for key, value in inner.items() if key != fields[0] or len(fields) > 1}}

    def unread(self, row: dict[str, Any]) -> list[str]:
        """Columns of a row that are no part of prompt or answer."""
        used = {path[0] for path in (*self.prompt_paths, self.answer_path)}
        return [key for key in row if key not in used]


def _is_texts(value: object) -> TypeGuard[list[str | int | float]]:
    """True for a list of texts, or of numbers, which have one; NaN has none."""
    return isinstance(value, list) and value != [] and all(type(m) in (str, int, float) and m == m for m in value)


def _choices(value: object, answer: object) -> object:
    """The lines of choices in the form {"label": [...], "text": [...]} or {"A": ..., "B": ...}, and of a list of texts
    without labels of which `answer` names one by its letter, as cells of csv hold it too; else `value`."""
    if isinstance(value, str) and answer in LETTERS and value.startswith(("[", "{", "array([")):
        return lines if _is_texts(lines := _choices(written_value(value), answer)) else value
    if isinstance(value, dict):
        labelled = {label: text for label, text in value.items() if text is not None}
        if _is_texts(texts := value.get("text")):
            labels = value.get("label")
            if not _is_texts(labels) or len(labels) != len(texts):
                return _choices(texts, answer)
            labelled = dict(zip(labels, texts, strict=True))
        return [f"{label}. {text}" for label, text in labelled.items()] if _is_texts([*labelled.values()]) else value
    if not _is_texts(value) or answer not in LETTERS[: len(value)] or _LABELLED.match(str(value[0])):
        return value
    return [f"{letter}. {text}" for letter, text in zip(LETTERS, value, strict=False)]


def look_up(row: dict[str, Any], path: Sequence[str]) -> object:
    """A field of a nested column; None if the row does not have the field."""
    value: Any = row
    for part in path:
        if isinstance(value, str) and value.startswith("{"):  # a csv file holds fields as text
            value = written_value(value)
        value = value.get(part) if isinstance(value, dict) else None
    return value


def choose_columns(rows: Sequence[dict[str, Any]], config: FileDataConfig, *, source: str) -> Columns:
    """The columns of prompt and answer: the keys of the config, and for a null key the layout that matches `rows`.

    Raises ValueError if a key is no column, if no layout fits, or if several layouts fit and disagree.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    given = {"prompt_key": config.prompt_key, "answer_key": config.answer_key}
    for key, name in given.items():
        if name is not None:
            _check_columns(name, key=key, columns=columns, source=source)
    if config.prompt_key is not None and config.answer_key is not None:
        chosen = _columns("", config.prompt_key, config.answer_key, columns)
        if len(chosen.prompt_paths) > 1 and chosen.answer_path in chosen.prompt_paths:
            raise ValueError(
                f"{source}: data.prompt_key={config.prompt_key} puts the answer, data.answer_key={config.answer_key}, "
                "into the prompt. Leave that column out of data.prompt_key."
            )
        return chosen
    found: dict[tuple[str, str], Columns] = {}
    for layout in LAYOUTS:
        keys = (config.prompt_key or layout.prompt, config.answer_key or layout.answer)
        candidate = _columns(layout.name, *keys, columns)
        if candidate.are_in(rows):
            found.setdefault(keys, candidate)
    # An empty column is a sign of a layout only if no other layout fits better.
    filled = [each for each in found.values() if any(None not in (each.prompt(row), each.answer(row)) for row in rows)]
    candidates = filled or list(found.values())
    absent = [key for key, name in given.items() if name is None]
    if not candidates and len(absent) == 1:
        [present] = given.keys() - absent
        raise ValueError(
            f"{source}: data.{present} is set and data.{absent[0]} is not, and no known layout has that column beside "
            f"{given[present]}. Set data.{absent[0]} too; columns are {', '.join(columns)}"
        )
    return _the_one(candidates, rows, columns=columns, source=source)


def _the_one(candidates: list[Columns], rows: Sequence[dict[str, Any]], *, columns: list[str], source: str) -> Columns:
    if not candidates:
        known = "; ".join(f"{layout.prompt} and {layout.answer} ({layout.name})" for layout in LAYOUTS)
        raise ValueError(
            f"{source}: no known layout has the columns {', '.join(columns)}.{_of_marks(columns)}{_of_form(rows)} "
            f"Known are {known}. Name yours with data.prompt_key and data.answer_key, which hold for every source, "
            "or rename the columns."
        )
    first = candidates[0]
    # AIME and AMC files hold the same text as problem and as question; then either column is right.
    for other in candidates[1:]:
        if any((first.prompt(row), first.answer(row)) != (other.prompt(row), other.answer(row)) for row in rows):
            way = "Choose with data.prompt_key and data.answer_key."
            if all(None in (first.prompt(row), other.prompt(row)) for row in rows):  # no choice fits all rows
                way = "Each row has the columns of one of them: give all rows of a source the same columns."
            raise ValueError(f"{source}: the columns fit several layouts ({first}; {other}). {way}")
    return first


def _columns(name: str, prompt_key: str, answer_key: str, columns: list[str]) -> Columns:
    parts = [prompt_key] if prompt_key in columns else prompt_key.split(JOIN)
    return Columns(
        name=name,
        prompt_key=prompt_key,
        answer_key=answer_key,
        prompt_paths=tuple(_path(part, columns) for part in parts),
        answer_path=_path(answer_key, columns),
    )


def _path(name: str, columns: list[str]) -> tuple[str, ...]:
    """("reward_model", "ground_truth") for a field of a nested column written reward_model.ground_truth."""
    return (name,) if name in columns else tuple(name.split("."))


def _check_columns(name: str, *, key: str, columns: list[str], source: str) -> None:
    parts = [name] if name in columns or key != "prompt_key" else name.split(JOIN)
    for part in parts:
        if _path(part, columns)[0] not in columns:
            close = similar(part, columns)
            hint = f" Did you mean {close}?" if close else _of_marks(columns)
            raise ValueError(f"{source}: data.{key}={name} is not a column; columns are {', '.join(columns)}.{hint}")


def _of_marks(columns: list[str]) -> str:
    """A sentence about a file whose columns are separated by another mark than a comma; empty for other files."""
    is_one = len(columns) == 1 and any(mark in columns[0] for mark in ";\t|")
    return " The columns of a .csv file are separated by commas." if is_one else ""


def _of_form(rows: Sequence[dict[str, Any]]) -> str:
    """A sentence about rows that stand in another form than question and answer; empty for rows without a known one."""
    for key, value in (rows[0] if rows else {}).items():
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            if {"role", "from"} & value[0].keys():
                return f" {key} is a conversation: write the messages before the answer into a column of their own."
            if len(rows) == 1:
                return f" Rows stand under {key}: write that list alone into the file."
    return ""
