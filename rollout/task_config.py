"""Configuration of the task: prompts, answers and rewards. No torch, no Ray, no SGLang."""

from __future__ import annotations

import glob
import os
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar

from algorithms.config import Checked, Custom, Problem
from algorithms.config.home import MAY_NAME_PATHS, PathText
from algorithms.config.rules import Rule, above, at_least, given, ruled, within
from rollout.similar_file import similar_file


def most_failed(fraction: float, least: int, number: int) -> float:
    """How many of `number` responses may fail: a `fraction` of them, or `least` of them, which is not all, if more."""
    return max(fraction * number, min(least, number - 1))


@dataclass(kw_only=True, slots=True)
class CallsConfig(Checked):
    """Processes that run user code, and what a failed call means."""

    num_workers: int = ruled(1, at_least(1))
    """Number of processes that run the function; each can be killed and replaced."""
    timeout_s: float = ruled(10.0, above(0))
    """Deadline in seconds of one call."""
    max_tries: int = ruled(3, at_least(1))
    """Number of times that a call is made if it fails; 1 for no second try."""
    retry_pause_s: float = ruled(1.0, at_least(0))
    """Pause in seconds before a failed call is made again; it doubles with every try."""
    outage_wait_s: float = ruled(300.0, at_least(0))
    """Seconds for which the run waits while every call fails, as when a server of somebody else is away; 0 waits for
    nothing."""
    arguments: Annotated[dict[str, Any], MAY_NAME_PATHS] = field(default_factory=dict)
    """Values of further parameters of your function, by name; numbers, texts, lists and mappings."""


@dataclass(kw_only=True, slots=True)
class RewardConfig(CallsConfig):
    """Scoring of a response."""

    function: PathText = "exact_match"
    """Reward function: exact_match, gsm8k, gsm8k_flexible, math, math_dapo, or a custom function as
    path/to/file.py:name."""
    correct: float = 1.0
    """Reward of a correct answer; its number defines the unit of reward."""
    incorrect: float = 0.0
    """Reward of a wrong answer, in units of reward. DAPO uses -1."""
    overlong_buffer_tokens: int = ruled(0, at_least(0, "tokens"))
    """Soft overlong penalty (DAPO): number of tokens before sampling.max_new_tokens over which the penalty grows; 0
    turns the penalty off."""
    overlong_penalty: float = ruled(1.0, at_least(0))
    """Penalty at sampling.max_new_tokens, in units of reward; grows linearly from 0 over the buffer. Vetted: 1.0."""
    num_workers: int = ruled(2, at_least(1))
    """Number of processes that score responses; each can be killed and replaced."""
    timeout_s: float = ruled(10.0, above(0))
    """Deadline in seconds of one call of the function."""
    max_open_calls: int = ruled(64, at_least(1))
    """Calls of an async function that are open at a time, over all processes."""
    max_failed_fraction: float = ruled(0.1, within(0, 1))
    """Share of a step's responses whose scoring may fail after the last try; more end the run."""
    min_failed: int = ruled(8, at_least(0))
    """Number of such responses that never ends the run, unless all fail."""

    @property
    def correct_rule(self) -> str:
        """What makes a response correct, and how to change that, for messages; empty for a built-in function, whose
        verdict does not depend on the reward."""
        if ":" not in self.function:  # path/to/file.py:name
            return ""
        return (
            f"a number counts as correct from reward.correct={self.correct:g} on, a dict with 'correct' by that alone. "
            "If some should be correct, let 'correct' be true for them, or, without 'correct', lower reward.correct."
        )

    def conflicts(self) -> Iterator[Problem]:
        if self.arguments and ":" not in self.function:
            yield self.broken("arguments", f"must be {{}} with reward.function={self.function}, which takes none")
        if not self.correct > self.incorrect:
            yield self.broken("correct", f"must be > reward.incorrect ({self.incorrect})")


@dataclass(kw_only=True, slots=True)
class DataConfig(Checked):
    """Source of prompts and reference answers. Choose with `data=arithmetic` or `data=file`."""

    kind: ClassVar[str] = ""


@dataclass(kw_only=True, slots=True)
class ArithmeticDataConfig(DataConfig):
    """The built-in task: sums of two numbers below 100; see rollout/data/arithmetic.py."""

    kind: ClassVar[str] = "arithmetic"


class OnBadRow(Enum):
    """Treatment of rows that cannot become a prompt."""

    fail = "fail"
    """The run does not begin; all bad rows are reported."""
    skip = "skip"
    """Bad rows are left out, counted, and written to bad_rows.jsonl."""


HUB_SOURCE = re.compile(r"(?P<repo>[^:@]+)(?::(?P<config>[^:@]+))?@(?P<split>[^@/]+)")
"""Source on the Hugging Face hub, `repo[:config]@split`, for example openai/gsm8k:main@train."""
OWN_TEMPLATE_ARGUMENTS = (
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "tokenize",
)  # fmt: skip
"""Arguments of apply_chat_template() that Parity sets itself, so that a prompt ends where the response begins."""


SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
"""Of files with rows."""
_ADDRESS = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?:datasets/)?(?P<repo>[^/@]+/[^/@]+)?.*", re.IGNORECASE)
"""A URL; `repo` names the data set in those of the hub, hf://datasets/owner/name/file."""


def is_pattern(path: str) -> bool:
    """True if `path` is a pattern for the names of files: part-*.jsonl."""
    return glob.has_magic(path) and not Path(path).exists() and HUB_SOURCE.fullmatch(path) is None


def matching_files(pattern: str) -> list[str]:
    """The files that `pattern` names, sorted; a directory of that very name comes before others."""
    directory, name = os.path.split(pattern)
    if Path(directory).is_dir():
        pattern = os.path.join(glob.escape(directory), name)
    return sorted(found for found in glob.glob(pattern, recursive=True) if Path(found).is_file())


def is_saved(directory: Path) -> bool:
    """True for a directory as save_to_disk() of `datasets` writes it."""
    return any((directory / name).is_file() for name in ("dataset_dict.json", "state.json"))


def is_source(path: str) -> bool:
    """True if `path` is an existing file, names some, or has the form of a data set on the hub or of word problems."""
    if _ADDRESS.fullmatch(path):
        return False
    return (
        Path(path).is_file()
        or HUB_SOURCE.fullmatch(path) is not None
        or (is_pattern(path) and any(matching_files(path)))
    )


def source_problem(key: str, path: str) -> Problem | None:
    """The Problem of a source of rows, the value of `key`, that is no file and has no form of another; or None."""
    if is_source(path):
        return None
    rule, remedy = "must be an existing file, or repo[:config]@split", similar_file(path, SUFFIXES)
    remedy = remedy or f"There is no such file in {Path(path).absolute().parent}."
    if (address := _ADDRESS.fullmatch(path)) is not None:
        remedy = "Fetch the file, and name it."
        if address["scheme"] == "hf" and address["repo"]:
            remedy = f"A data set of the hub is named like {address['repo']}@train."
    elif is_pattern(path):
        remedy = "No file has a name like that."
    elif not Path(path).exists() and HUB_SOURCE.fullmatch(on_hub := f"{path}@train") and not Path(path).suffix:
        remedy += f" On the hub it is {on_hub}."
    elif Path(path).is_dir():
        remedy = (
            f"It is a directory: name files in it, as {path}/*.parquet, or {path}@train for the rows of a data set."
        )
    return Problem(key=key, rule=rule, value=path, remedy=remedy)


_SOURCES = (
    "A jsonl, json, csv or parquet file, a pattern of such files, repo[:config]@split of the Hugging Face hub, or "
    "word_problems:one_step@train."
)
_COLUMN = Rule("must name a column", bool)


@dataclass(kw_only=True, slots=True)
class FileDataConfig(DataConfig):
    """Rows of local files (jsonl, json, csv, parquet), of the Hugging Face hub (repo[:config]@split), or word problems
    that are made on the spot (word_problems:one_step@train; see rollout/data/word_problems.py)."""

    kind: ClassVar[str] = "file"
    train_path: PathText = ruled("", given(), remedy=_SOURCES)
    """Source of the training rows: a file, a pattern of files, or repo[:config]@split."""
    eval_path: PathText = ruled("", given(), remedy=_SOURCES)
    """Source of the held-out rows: a file, a pattern of files, or repo[:config]@split."""
    prompt_key: str | None = ruled(None, _COLUMN, remedy="Use null to recognise the layout.")
    """Column with the prompt (text, or chat messages); a+b joins the texts of two columns; null recognises the
    layout."""
    answer_key: str | None = ruled(None, _COLUMN, remedy="Use null to recognise the layout.")
    """Column with the reference answer, a.b for the field b of the column a; null recognises the layout."""
    instruction: str = ""
    """Text appended to every text prompt after a space; an empty text appends nothing."""
    chat_template: bool = True
    """Wrap text prompts as a user message with the tokenizer's chat template."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, for example {enable_thinking: false}."""
    continue_assistant: bool = False
    """Let the response go on with a last message of the assistant, which then ends the prompt; false makes such a
    conversation a bad row."""
    max_prompt_tokens: int = ruled(1024, at_least(1))
    """Largest number of tokens of a prompt; rows with longer prompts are bad rows."""
    on_bad_row: OnBadRow = OnBadRow.fail
    """Treatment of rows that cannot become a prompt: fail reports all bad rows and ends the run; skip leaves the rows
    out and writes them to bad_rows.jsonl."""

    def source_problem(self, key: str, source: str) -> Problem | None:
        """The Problem of a `source` of rows, the value of `key`, that can be seen without reading it; or None."""
        return source_problem(key, source)

    def conflicts(self) -> Iterator[Problem]:
        for key in ("train_path", "eval_path"):
            if (problem := self.source_problem(key, getattr(self, key))) is not None:
                yield problem
        for name in sorted(set(self.chat_template_kwargs) & set(OWN_TEMPLATE_ARGUMENTS)):
            yield Problem(key=f"chat_template_kwargs.{name}", rule="cannot be chosen", value=name)


@dataclass(kw_only=True, slots=True)
class CustomData(FileDataConfig, Custom):
    """A source of rows of a user: a data base, a generator, another format. Rows then go the way of rows of files."""

    kind: ClassVar[str] = "custom"
    train_path: str = "train"
    """What `rows` gets for the training rows; any text that says which they are."""
    eval_path: str = "eval"
    """What `rows` gets for the held-out rows."""
    prompt_key: str | None = ruled("prompt", _COLUMN, remedy="Use null to recognise the layout.")
    """Column with the prompt; null recognises the layout."""
    answer_key: str | None = ruled("answer", _COLUMN, remedy="Use null to recognise the layout.")
    """Column with the reference answer; null recognises the layout."""

    @abstractmethod
    def rows(self, source: str) -> Iterator[Mapping[str, Any]]:
        """The rows of train_path, eval_path or an entry of eval.sets, each column -> value, the same at every call.

        A start reads the first of them only, so that a generator need not make the others.
        """
        raise NotImplementedError

    def source_problem(self, key: str, source: str) -> Problem | None:
        return None
