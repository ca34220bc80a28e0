"""One data source -> its prompts and a report: rows checked, duplicates removed, templated, tokenized.

    rows -columns chosen-> prompt, answer -duplicates and contradictions out-> text -chat template-> tokens

A bad row never ends the work: all bad rows are collected, and `rollout/data/dataset.py` skips or refuses them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
import xxhash

from rollout.data.answers import ANSWER_MARK, plain_number, to_number
from rollout.data.chat_template import ChatTemplate, Messages, Rendered, TemplateError
from rollout.data.data_files import BadRow, RawRow, checked_text, plain, read_rows, row_unit
from rollout.data.data_layouts import Columns, choose_columns
from rollout.task_config import FileDataConfig
from rollout.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOOKED_AT = 100
"""Number of rows from which the layout is recognised."""
LISTED_NUMBERS = 10
NO_TEMPLATE = Rendered("", "chat messages need a tokenizer with a chat template, and the model's has none")


@dataclass(kw_only=True, slots=True)
class SourceReport:
    """Layout, counts and bad rows of one source."""

    source: str
    columns: Columns
    num_rows: int = 0
    num_duplicates: int = 0
    contradictions: list[int] = field(default_factory=list)
    """Numbers of the rows that were dropped because another row gives the same prompt a different answer."""
    bad: list[BadRow] = field(default_factory=list)
    num_prompts: int = 0
    has_text: bool = False
    has_messages: bool = False

    def refuse(self, number: int, problem: str, values: dict[str, Any], *, prompt_tokens: int | None = None) -> None:
        """Note a row that cannot become a prompt; `prompt_tokens` is the length of a prompt that is too long."""
        self.bad.append(
            BadRow(
                source=self.source, number=number, problem=problem, values=plain(values), prompt_tokens=prompt_tokens
            )
        )

    def lines(self, config: FileDataConfig) -> list[str]:
        """Lines about the source for the console."""
        lines = [f"{self.source}: {self.columns}; {self.num_rows:,} rows, {self.num_prompts:,} prompts"]
        if self.num_duplicates:
            lines.append(f"{self.source}: {self.num_duplicates:,} duplicates removed (same prompt, same answer)")
        if self.contradictions:
            shown = ", ".join(map(str, self.contradictions[:LISTED_NUMBERS]))
            more = ", ..." if len(self.contradictions) > LISTED_NUMBERS else ""
            lines.append(
                f"{self.source}: rows with contradicting answers, which are left out: {len(self.contradictions):,} "
                f"({row_unit(self.source)} {shown}{more})"
            )
        if self.bad:
            lines.append(f"{self.source}: bad rows: {len(self.bad):,}")
        if self.has_messages and config.instruction:
            lines.append(f"{self.source}: chat messages are used as they are, without data.instruction")
        return lines


@dataclass(kw_only=True, slots=True)
class Row:
    """A usable row, not yet tokenized."""

    number: int
    prompt: str | Messages
    answer: str
    others: dict[str, Any]
    text: str = ""
    templated: bool = False
    """True if the chat template wrote the text."""


def file_prompts(
    source: str, config: FileDataConfig, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate | None
) -> tuple[list[Prompt], SourceReport]:
    """The prompts of one source, in its order; `template` is that of the tokenizer, None if it has none.

    Raises ValueError if the source is not readable or has unknown columns, or if the template hangs.
    """
    chosen, report = source_rows(source, config)
    prompts = _tokenized(_templated(chosen, config, template, report), config, tokenizer, report)
    report.bad.sort(key=lambda bad: bad.number)
    report.num_prompts = len(prompts)
    return prompts, report


def source_rows(source: str, config: FileDataConfig, *, most: int | None = None) -> tuple[list[Row], SourceReport]:
    """The usable rows of a source without duplicates, not yet tokenized; at most `most` rows are read.

    Raises ValueError if the source is not readable or has unknown columns.
    """
    rows = itertools.islice(read_rows(source), most)
    first = list(itertools.islice(rows, LOOKED_AT))
    if not first:
        raise ValueError(f"{source} has no rows")
    readable = [row.values for row in first if not row.problem]
    if not readable:
        raise ValueError(f"{source}, {row_unit(source)} {first[0].number}: {first[0].problem}")
    report = SourceReport(source=source, columns=choose_columns(readable, config, source=source))
    # Row by row: all rows of DAPO do not fit into memory, the unique rows do.
    usable = _usable_rows(itertools.chain(first, rows), report)
    return remove_duplicates(usable, report), report


def _usable_rows(rows: Iterator[RawRow], report: SourceReport) -> Iterator[Row]:
    """Rows that have a prompt and an answer; other rows go to the report."""
    columns = report.columns
    for row in rows:
        report.num_rows += 1
        try:
            if row.problem:
                raise ValueError(row.problem)
            prompt = _prompt_value(columns.prompt(row.values), columns.prompt_key)
            answer = _answer_text(columns.answer(row.values), columns.answer_key)
        except ValueError as error:
            report.refuse(row.number, str(error), row.values)
            continue
        yield Row(number=row.number, prompt=prompt, answer=answer, others=columns.others(row.values))


@dataclass(kw_only=True, slots=True)
class _Same:
    """Rows that share one prompt."""

    first: Row
    answer: str
    """Key of the first row's answer."""
    numbers: list[int] = field(default_factory=list)
    contradict: bool = False


def remove_duplicates(rows: Iterable[Row], report: SourceReport) -> list[Row]:
    """The first row of each prompt; no row of a prompt whose rows have different answers.

    Source: DAPO's published parquet repeats every problem, see https://arxiv.org/abs/2503.14476; a prompt with two
    answers would be rewarded for one of them and punished for the other.
    """
    found: dict[bytes, _Same] = {}
    for row in rows:
        key = xxhash.xxh3_128_digest(orjson.dumps(row.prompt, option=orjson.OPT_SORT_KEYS))
        answer = same_answer_key(row.answer)
        same = found.setdefault(key, _Same(first=row, answer=answer))
        same.contradict |= same.answer != answer
        same.numbers.append(row.number)
    report.contradictions = sorted(n for same in found.values() if same.contradict for n in same.numbers)
    kept = [same.first for same in found.values() if not same.contradict]
    report.num_duplicates = sum(len(same.numbers) for same in found.values() if not same.contradict) - len(kept)
    return kept


def same_answer_key(answer: str) -> str:
    """A key that is equal for equal answers: the text after "####", numbers by value."""
    stated = answer.rpartition(ANSWER_MARK)[2].strip()
    number = to_number(stated, whole=True)
    return stated if number is None else plain_number(number)


def _templated(
    rows: list[Row], config: FileDataConfig, template: ChatTemplate | None, report: SourceReport
) -> list[Row]:
    """The rows with their text in the form that the engine reads. Raises ValueError if the template hangs on a row."""
    chats: list[Messages] = []
    for row in rows:
        if isinstance(row.prompt, str):
            report.has_text = True
            row.text = f"{row.prompt} {config.instruction}" if config.instruction else row.prompt
            row.templated = config.chat_template
        else:
            report.has_messages = row.templated = True
        if row.templated:
            chats.append([{"role": "user", "content": row.text}] if isinstance(row.prompt, str) else row.prompt)
    done: list[Row] = []
    rendered = itertools.repeat(NO_TEMPLATE) if template is None else template.render(chats)
    for row in rows:
        if row.templated:
            try:
                row.text, problem = next(rendered)
            except TemplateError as error:
                raise ValueError(f"{report.source}, {row_unit(report.source)} {row.number}: {error}") from error
            if problem:
                report.refuse(row.number, problem, {"prompt": row.prompt, "answer": row.answer})
                continue
        done.append(row)
    return done


def _tokenized(
    rows: list[Row], config: FileDataConfig, tokenizer: PreTrainedTokenizerBase, report: SourceReport
) -> list[Prompt]:
    prompts: list[Prompt] = []
    for templated in (True, False):
        chosen = [row for row in rows if row.templated is templated]
        # A chat template already contains the special tokens.
        token_ids = tokenize([row.text for row in chosen], tokenizer, add_special_tokens=not templated)
        for row, ids in zip(chosen, token_ids, strict=True):
            if not 0 < len(ids) <= config.max_prompt_tokens:
                limit = f"{len(ids)} prompt tokens, more than data.max_prompt_tokens={config.max_prompt_tokens}"
                problem = limit if ids else f"{report.columns.prompt_key} has no tokens"
                values = {"prompt": row.prompt, "answer": row.answer}
                report.refuse(row.number, problem, values, prompt_tokens=len(ids) or None)
                continue
            prompts.append(
                Prompt(prompt_id=row.number - 1, token_ids=ids, text=row.text, answer=row.answer, row=plain(row.others))
            )
    return sorted(prompts, key=lambda prompt: prompt.prompt_id)


def tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool) -> list[list[int]]:
    """Token ids of each text."""
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]
    return ids


def _prompt_value(value: object, key: str) -> str | Messages:
    """Checked text or chat messages of a prompt. Raises ValueError."""
    if value is None:
        raise ValueError(f"{key} is missing")
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"{key} is empty")
        return checked_text(value, key)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key} must be text or a list of chat messages, got {value!r:.80}")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(f"{key} has a chat message without role or content: {message!r:.80}")
        checked_text(message["content"], key)
    if not any(message["content"].strip() for message in value):
        raise ValueError(f"{key} is empty")
    messages: Messages = plain(value)
    return messages


def _answer_text(value: object, key: str) -> str:
    """The reference as text: 42 and 42.0 both become "42". Raises ValueError."""
    if value is None or value == "":
        raise ValueError(f"{key} is missing")
    if isinstance(value, str) and value.strip():
        return checked_text(value, key)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() else str(value)
    raise ValueError(f"{key} must be text or a finite number, got {value!r:.80}")
