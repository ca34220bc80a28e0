"""One data source -> its prompts and a report: rows checked, duplicates removed, templated, tokenized.

    rows -columns chosen-> prompt, answer -duplicates and contradictions out-> -references tried-> text
        -chat template-> tokens

A bad row never ends the work: all bad rows are collected, and `rollout/data/dataset.py` skips or refuses them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import xxhash

from rollout.data.answers import ANSWER_MARK, plain_number, to_number
from rollout.data.chat_template import ChatTemplate, Rendered, TemplateError
from rollout.data.conversations import Messages, left_out_problem, prompt_value, role_problem
from rollout.data.data_files import BadRow, RawRow, checked_text, plain, row_unit, rows_of
from rollout.data.data_layouts import Columns, choose_columns
from rollout.data.special_tokens import control_tokens, prompt_ids
from rollout.task_config import HUB_SOURCE, FileDataConfig, is_pattern, matching_files
from rollout.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOOKED_AT = 100
"""Number of rows from which the layout is recognised."""
LISTED_NUMBERS = 10
MEDIA = ("<image>", "<video>", "<audio>")
"""Places of what is no text; the column that holds it has the name, or the plural."""
_SHARD = re.compile(r"-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})(?P<hash>-[0-9a-f]{16})?(?=\.)")
"""As the hub names the files of a split."""
NO_TEMPLATE = Rendered(
    "", "chat messages need a tokenizer with a chat template, and the model's has none, or none that is the default"
)


def _all_usable(_: Sequence[str]) -> Mapping[int, str]:
    """The problems of references that nothing judges: none."""
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What the reward, and the user's code, need of the rows."""

    unusable: Callable[[Sequence[str]], Mapping[int, str]] = _all_usable
    """References -> position -> the reason why the reward cannot judge by that reference."""
    answer_key: Callable[[str], str] | None = None
    """A key that is equal for answers that are the same text to the reward; None is `same_answer_key`."""
    are_equal: Callable[[Sequence[tuple[str, str]]], Sequence[bool]] | None = None
    """Pairs of answers -> True for those that the reward takes for equal; None: those with the same key."""
    sees_rows: bool = False
    """True if code of the user sees all columns: rows with the same prompt are the same only if these are too."""


UNJUDGED = Judgement()
"""Nothing judges by the references, and no code of the user sees the rows."""


@dataclass(kw_only=True, slots=True)
class SourceReport:
    """Layout, counts and bad rows of one source."""

    source: str
    columns: Columns
    unread: dict[str, None] = field(default_factory=dict)
    """Columns of any row that are neither prompt nor answer, in their order."""
    num_rows: int = 0
    num_partial: int = 0
    """Usable rows in which a part of the prompt is null."""
    num_duplicates: int = 0
    num_told_apart: int = 0
    """Rows that have the prompt of another row, and differ in columns that the user's code sees."""
    control: dict[int, str] = field(default_factory=dict)
    """Number of a row whose texts hold a control token of the model -> the first such token."""
    answer_control: dict[int, str] = field(default_factory=dict)
    """The same of its answer."""
    contradictions: list[int] = field(default_factory=list)
    """Numbers of the rows that were dropped because another row gives the same prompt a different answer."""
    bad: list[BadRow] = field(default_factory=list)
    num_prompts: int = 0
    has_text: bool = False
    has_messages: bool = False

    def refuse(self, row: RawRow | Row, problem: str, *, prompt_tokens: int | None = None) -> None:
        """Note a row that cannot become a prompt; `prompt_tokens` is the length of a prompt that is too long."""
        values = plain(row.values)
        bad = BadRow(source=self.source, number=row.number, place=row.place, problem=problem, values=values)
        bad.prompt_tokens = prompt_tokens
        self.bad.append(bad)

    def lines(self, config: FileDataConfig) -> list[str]:
        """Lines about the source for the console."""
        lines = [f"{self.source}: {self.columns}; {self.num_rows:,} rows, {self.num_prompts:,} prompts"]
        lines += _unread_files(self.source)
        if self.unread:
            unread = ", ".join(self.unread)
            lines.append(f"{self.source}: columns that are in no prompt: {unread} (data.prompt_key=a+b joins two)")
        if self.num_partial:
            lines.append(
                f"{self.source}: rows with a part of {self.columns.prompt_key} that is null: {self.num_partial:,}"
            )
        if self.num_told_apart:
            lines.append(
                f"{self.source}: {self.num_told_apart:,} rows have the prompt of another row and are kept: they differ "
                "in columns that the reward or rollout function sees"
            )
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
        already = self._templated_already(config)
        for what, found, way_out in (
            ("texts with control tokens of the model, which are read as such", self.control, already),
            ("answers with control tokens of the model, which no text of a response holds", self.answer_control, ""),
        ):
            if found:
                number, token = next(iter(found.items()))
                first = f"{token} in {row_unit(self.source)} {number}{', ...' if len(found) > 1 else ''}"
                lines.append(f"{self.source}: {what}: {len(found):,} ({first}){way_out}")
        if self.has_messages and config.instruction:
            lines.append(f"{self.source}: chat messages are used as they are, without data.instruction")
        return lines

    def has_turns(self, config: FileDataConfig) -> bool:
        """True if the chat template wrote some prompt, or a text has control tokens as if it had."""
        return self.has_messages or (self.has_text and config.chat_template) or bool(self.control)

    def _templated_already(self, config: FileDataConfig) -> str:
        has_template = self.has_text and config.chat_template
        return ". Texts in the form of a chat template need data.chat_template=false" if has_template else ""


def _unread_files(source: str) -> Iterator[str]:
    """Yield a line for each data set of which `source` has some files: train-00000-of-00003.parquet says that there are
    three."""
    hub = None if Path(source).is_file() else HUB_SOURCE.fullmatch(source)
    if hub is not None:
        files = [str(path) for path in Path(hub["repo"]).rglob(f"{hub['split']}-*")]
    else:
        files = matching_files(source) if is_pattern(source) else [source]
    read: dict[tuple[str, int], set[int]] = {}
    for file in files:
        if shard := _SHARD.search(file):
            every = _SHARD.sub(f"-*-of-{shard['count']}{'-*' if shard['hash'] else ''}", file)
            read.setdefault((every, int(shard["count"])), set()).add(int(shard["number"]))
    for (every, count), numbers in read.items():
        if len(numbers) < count:
            absent = ", ".join(str(number) for number in range(count) if number not in numbers)
            there = len(matching_files(every))
            more = f"{every} names {there}" if there > len(numbers) else f"of {every} these are not there: {absent}"
            yield f"{source}: {len(numbers)} of {count} files of its data set; {more}"


@dataclass(kw_only=True, slots=True)
class Row:
    """A usable row, not yet tokenized."""

    number: int
    prompt: str | Messages
    answer: str
    others: dict[str, Any]
    place: str = ""
    """As in `RawRow`."""
    text: str = ""
    templated: bool = False
    """True if the chat template wrote the text."""

    @property
    def values(self) -> dict[str, Any]:
        """What bad_rows.jsonl shows of the row."""
        return {"prompt": self.prompt, "answer": self.answer}


def file_prompts(
    source: str,
    config: FileDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate | None,
    judgement: Judgement = UNJUDGED,
) -> tuple[list[Prompt], SourceReport]:
    """The prompts of one source, in its order; `template` is that of the tokenizer, None if it has none.

    Raises ValueError if the source is not readable or has unknown columns, or if the template hangs.
    """
    chosen, report = source_rows(source, config, judgement)
    _note_control(chosen, config, tokenizer, report)
    prompts = _tokenized(_templated(chosen, config, template, report), config, tokenizer, report)
    report.bad.sort(key=lambda bad: bad.number)
    report.num_prompts = len(prompts)
    return prompts, report


def source_rows(
    source: str, config: FileDataConfig, judgement: Judgement, *, most: int | None = None
) -> tuple[list[Row], SourceReport]:
    """The usable rows of a source without duplicates, not yet tokenized; at most `most` rows are read.

    Raises ValueError if the source is not readable or has unknown columns.
    """
    rows = itertools.islice(rows_of(config, source), most)
    first = list(itertools.islice(rows, LOOKED_AT))
    if not first:
        raise ValueError(f"{source} has no rows")
    readable = [row.values for row in first if not row.problem]
    if not readable:
        raise ValueError(f"{source}, {row_unit(source)} {first[0].number}: {first[0].problem}")
    columns = choose_columns(readable, config, source=source)
    report = SourceReport(source=source, columns=columns)
    # Row by row: all rows of DAPO do not fit into memory, the unique rows do.
    usable = _usable_rows(itertools.chain(first, rows), config, report)
    unique = remove_duplicates(usable, report, judgement=judgement)
    unusable = judgement.unusable([row.answer for row in unique])
    for position, problem in unusable.items():
        report.refuse(unique[position], f"{columns.answer_key} {problem}")
    return [row for position, row in enumerate(unique) if position not in unusable], report


def _usable_rows(rows: Iterator[RawRow], config: FileDataConfig, report: SourceReport) -> Iterator[Row]:
    """Rows that have a prompt and an answer; other rows go to the report."""
    columns = report.columns
    for row in rows:
        report.num_rows += 1
        try:
            if row.problem:
                raise ValueError(row.problem)
            report.unread |= dict.fromkeys(columns.unread(row.values))
            prompt = prompt_value(columns.prompt(row.values), columns.prompt_key, continues=config.continue_assistant)
            answer = _answer_text(columns.answer(row.values), columns.answer_key)
            _refuse_media(prompt, columns.others(row.values), columns.prompt_key)
        except ValueError as error:
            report.refuse(row, str(error))
            continue
        report.num_partial += columns.lacks_part(row.values)
        yield Row(number=row.number, prompt=prompt, answer=answer, others=columns.others(row.values), place=row.place)


def _refuse_media(prompt: str | Messages, others: Mapping[str, Any], key: str) -> None:
    """Raise ValueError for a prompt with the place of a picture, or its like, that another column holds."""
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    for place in MEDIA:
        held = [column for column, value in others.items() if column.lower().startswith(place[1:-1]) and value]
        if held and any(place in text for text in texts):
            raise ValueError(f"{key} has {place}, from the column {held[0]}; Parity trains on text")


@dataclass(kw_only=True, slots=True)
class _Same:
    """Rows of which all is the same that the policy, and code of the user, can see."""

    first: Row
    answer: str
    """Key of the first row's answer."""
    numbers: list[int] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """Answers with another key."""
    contradict: bool = False


def remove_duplicates(rows: Iterable[Row], report: SourceReport, *, judgement: Judgement) -> list[Row]:
    """The first of the rows that are the same; no row of those that are the same and have different answers.

    Rows are the same if their prompts are, and, if code of the user sees them, all other columns. Source: DAPO's
    published parquet repeats every problem, see https://arxiv.org/abs/2503.14476; a prompt with two answers would be
    rewarded for one of them and punished for the other.
    """
    sees_rows, answer_key = judgement.sees_rows, judgement.answer_key or same_answer_key
    found: dict[bytes, _Same] = {}
    asked: set[bytes] = set()
    for row in rows:
        answer = answer_key(row.answer)
        others = plain(report.columns.without_answer(row.others)) if sees_rows else None
        key = _digest([row.prompt, others])
        if sees_rows:
            question = _digest(row.prompt)
            report.num_told_apart += question in asked and key not in found
            asked.add(question)
        same = found.setdefault(key, _Same(first=row, answer=answer))
        if same.answer != answer:
            same.others.append(row.answer)
        same.numbers.append(row.number)
    _decide(list(found.values()), judgement)
    report.contradictions = sorted(n for same in found.values() if same.contradict for n in same.numbers)
    kept = [same.first for same in found.values() if not same.contradict]
    report.num_duplicates = sum(len(same.numbers) for same in found.values() if not same.contradict) - len(kept)
    return kept


def _decide(found: Sequence[_Same], judgement: Judgement) -> None:
    """Say which of the rows that are the same, with answers that differ in their text, contradict each other."""
    pairs = [(same, other) for same in found for other in same.others]
    equal: Sequence[bool] = [False] * len(pairs)
    if pairs and judgement.are_equal is not None:
        equal = judgement.are_equal([(same.first.answer, other) for same, other in pairs])
    for (same, _), is_equal in zip(pairs, equal, strict=True):
        same.contradict |= not is_equal


def _digest(value: object) -> bytes:
    return xxhash.xxh3_128_digest(orjson.dumps(value, option=orjson.OPT_SORT_KEYS))


def same_answer_key(answer: str) -> str:
    """A key that is equal for equal answers: the text after "####", numbers by value."""
    stated = answer.rpartition(ANSWER_MARK)[2].strip()
    number = to_number(stated, whole=True)
    return stated if number is None else plain_number(number)


def _note_control(
    rows: Sequence[Row], config: FileDataConfig, tokenizer: PreTrainedTokenizerBase, report: SourceReport
) -> None:
    """Note the rows whose texts hold control tokens: whoever wrote such a text may not have meant them as such."""
    tokens = control_tokens(tokenizer)
    if not tokens:
        return
    pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
    for row in rows:
        if isinstance(row.prompt, str):
            texts = [row.prompt, config.instruction]
        else:
            texts = [message["content"] for message in row.prompt]
        found = next((found for text in texts if (found := pattern.search(text)) is not None), None)
        if found is not None:
            report.control[row.number] = found.group()
        if (found := pattern.search(row.answer)) is not None:
            report.answer_control[row.number] = found.group()


def _templated(
    rows: list[Row], config: FileDataConfig, template: ChatTemplate | None, report: SourceReport
) -> list[Row]:
    """The rows with their text in the form that the engine reads. Raises ValueError if the template is broken."""
    chats: dict[int, Messages] = {}
    for row in rows:
        if isinstance(row.prompt, str):
            report.has_text = True
            row.text = plain_prompt(row.prompt, config)
            row.templated = config.chat_template
        else:
            report.has_messages = row.templated = True
        if row.templated:
            is_text = isinstance(row.prompt, str)
            chats[row.number] = [{"role": "user", "content": row.text}] if is_text else row.prompt  # type: ignore[assignment]
    done: list[Row] = []
    rendered = itertools.repeat(NO_TEMPLATE) if template is None else template.render(list(chats.values()))
    for row in rows:
        if row.templated:
            chat = chats[row.number]
            try:
                row.text, problem = next(rendered)
            except TemplateError as error:
                place = row.place or f"{report.source}, {row_unit(report.source)} {row.number}"
                raise ValueError(f"{place}: {error}") from error
            if template is not None:
                problem = role_problem(chat, template.text) or problem or left_out_problem(chat, row.text)
            if problem:
                report.refuse(row, problem)
                continue
        done.append(row)
    return done


def plain_prompt(prompt: str | Messages, config: FileDataConfig) -> str:
    """The text of a prompt before the chat template writes it."""
    if isinstance(prompt, str):
        return f"{prompt} {config.instruction}" if config.instruction else prompt
    return "\n".join(message["content"] for message in prompt)


def _tokenized(
    rows: list[Row], config: FileDataConfig, tokenizer: PreTrainedTokenizerBase, report: SourceReport
) -> list[Prompt]:
    prompts: list[Prompt] = []
    for templated in (True, False):
        chosen = [row for row in rows if row.templated is templated]
        for row, ids in _with_ids(chosen, tokenizer, report, templated=templated):
            if not 0 < len(ids) <= config.max_prompt_tokens:
                limit = f"{len(ids)} prompt tokens, more than data.max_prompt_tokens={config.max_prompt_tokens}"
                problem = limit if ids else f"{report.columns.prompt_key} has no tokens"
                report.refuse(row, problem, prompt_tokens=len(ids) or None)
                continue
            prompts.append(
                Prompt(prompt_id=row.number - 1, token_ids=ids, text=row.text, answer=row.answer, row=plain(row.others))
            )
    return sorted(prompts, key=lambda prompt: prompt.prompt_id)


def _with_ids(
    rows: list[Row], tokenizer: PreTrainedTokenizerBase, report: SourceReport, *, templated: bool
) -> list[tuple[Row, list[int]]]:
    """Each row with its tokens; rows whose text the tokenizer refuses go to the report."""
    try:
        return list(zip(rows, prompt_ids([row.text for row in rows], tokenizer, templated=templated), strict=True))
    except Exception as error:  # tokenizers raises no class of its own, and does not say for which text
        if len(rows) == 1:
            report.refuse(rows[0], f"the tokenizer refuses the text: {error}")
            return []
    return [pair for row in rows for pair in _with_ids([row], tokenizer, report, templated=templated)]


def _answer_text(value: object, key: str) -> str:
    """The reference as text: 42 and 42.0 both become "42", 1e-05 becomes "0.00001". Raises ValueError.

    A list with one answer is that answer.
    """
    if isinstance(value, list) and len(value) == 1:
        [value] = value
    if value is None or value == "":
        raise ValueError(f"{key} is missing")
    if isinstance(value, str) and value.strip():
        return checked_text(value, key)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float | Decimal) and math.isfinite(value):
        return plain_number(Decimal(str(value)))
    way_out = ". Save the column as text" if hasattr(value, "isoformat") else ""
    if isinstance(value, list | dict | bool):
        way_out = (
            f". Name text or a number with data.answer_key; a function of yours finds {key.split('.')[0]} in `row`"
        )
    raise ValueError(f"{key} must be text or a finite number, got {value!r:.80}{way_out}")
