"""DataConfig -> Prompts, tokenized once, and the resumable stream for `rollout/collect/collector.py`.

Problems of the built-in task come from `rollout/data/arithmetic.py`, files and hub data sets from
`rollout/data/file_prompts.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict, TypeVar

import numpy as np
import orjson
import xxhash

from algorithms.config import Problem
from rollout.data.arithmetic import ArithmeticProblem, arithmetic_problems
from rollout.data.chat_template import DAY, ChatTemplate, default_template
from rollout.data.data_files import BadRow, DataError, on_hub, plain
from rollout.data.file_prompts import UNJUDGED, Judgement, SourceReport, file_prompts, plain_prompt, source_rows
from rollout.data.special_tokens import prompt_ids
from rollout.data.turn_ends import no_beginning_note, turn_end
from rollout.task_config import ArithmeticDataConfig, DataConfig, FileDataConfig, OnBadRow
from rollout.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")
LISTED_ROWS = 20
"""Number of bad rows that an error lists; further rows are only counted."""
LISTED_LONG_ROWS = 3
"""Number of them whose prompt is too long."""
SHOWN = 10
"""Prompts whose end is looked at."""
TRAIN_KEY = "data.train_path"
CHECKED_ROWS = 10_000
"""Rows per source that are read before anything is loaded, a second's work; the run itself reads all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """The prompts of a run."""

    train: list[Prompt]
    heldout: list[Prompt]
    eval_sets: dict[str, list[Prompt]] = field(default_factory=dict)
    """Name of a further evaluation set -> its prompts."""
    notes: list[str] = field(default_factory=list)
    """Messages for the console: the recognised layout, removed duplicates and skipped rows."""
    skipped: list[BadRow] = field(default_factory=list)
    """Rows skipped under data.on_bad_row=skip."""
    turn_end: int | None = None
    """Token that the chat template writes after an answer; None if no prompt is templated, or it writes none."""

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        lists = (self.train, self.heldout, *self.eval_sets.values())
        return max(len(prompt.token_ids) for prompts in lists for prompt in prompts)

    @property
    def largest_token(self) -> int:
        """Largest token id of all prompts."""
        lists = (self.train, self.heldout, *self.eval_sets.values())
        return max(max(prompt.token_ids, default=0) for prompts in lists for prompt in prompts)


def load_dataset(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    eval_sets: Mapping[str, str] | None = None,
    judgement: Judgement = UNJUDGED,
) -> Dataset:
    """Training and held-out prompts, and the prompts of `eval_sets` (name -> source, read like data.eval_path).

    Raises DataError listing all unusable rows of all sources, unless data.on_bad_row=skip.
    """
    if isinstance(config, FileDataConfig):
        return _file_dataset(config, tokenizer, eval_sets or {}, judgement)
    if not isinstance(config, ArithmeticDataConfig):
        raise DataError(Problem(key="data", rule="must be arithmetic or file", value=config.kind))
    if eval_sets:
        raise DataError(Problem(key="eval.sets", rule=f"must be empty with data={config.kind}", value=dict(eval_sets)))
    train, heldout = (_arithmetic_prompts(problems, tokenizer) for problems in arithmetic_problems())
    return Dataset(train=train, heldout=heldout)


def _file_dataset(
    config: FileDataConfig, tokenizer: PreTrainedTokenizerBase, eval_sets: Mapping[str, str], judgement: Judgement
) -> Dataset:
    _check_template(config, tokenizer)
    with ExitStack() as within:
        template = end = None
        if default_template(tokenizer) is not None:
            template = within.enter_context(closing(ChatTemplate(tokenizer, config.chat_template_kwargs)))
        sources = _sources(config, eval_sets)
        found = _read(sources, config, lambda source: file_prompts(source, config, tokenizer, template, judgement))
        if template is not None and any(report.has_turns(config) for _, report in found.values()):
            end = turn_end(template, tokenizer)
    if empty := [
        _unusable(key, sources[key], "\n".join(["No row is left.", *report.lines(config), *map(str, report.bad[:1])]))
        for key, (prompts, report) in found.items()
        if not prompts
    ]:
        raise DataError(*empty)
    reports = [report for _, report in found.values()]
    if config.instruction and not any(report.has_text for report in reports):
        rule = "must be '': it is appended to text, and all prompts are chat messages, which are used as they are"
        remedy = "Or write it into the messages."
        raise DataError(Problem(key="data.instruction", rule=rule, value=config.instruction, remedy=remedy))
    notes = [*dict.fromkeys(line for report in reports for line in report.lines(config))]  # one file may be two sources
    train, *held = (prompts for prompts, _ in found.values())
    trained = {prompt.text for prompt in train}
    for report, prompts in zip(reports[1:], held, strict=True):
        if shared := sum(prompt.text in trained for prompt in prompts):
            notes.append(f"{report.source}: {shared:,} of its prompts are training prompts too")
    if end is not None and (note := no_beginning_note(end, [prompt.text for prompt in train[:SHOWN]], tokenizer)):
        notes.append(note)
    if end is not None and "strftime_now" in str(tokenizer.chat_template):
        notes.append(f"the chat template writes today's date: it is {DAY:%d %b %Y} on every day, for the same prompts")
    return Dataset(
        train=train,
        heldout=held[0],
        eval_sets=dict(zip(eval_sets, held[1:], strict=True)),
        notes=notes,
        skipped=[row for report in reports for row in report.bad],
        turn_end=end,
    )


def first_row(config: DataConfig, eval_sets: Mapping[str, str], judgement: Judgement) -> tuple[Prompt, bool] | None:
    """Read up to CHECKED_ROWS rows of every source on this disk -> (the first training prompt, not tokenized; True if
    the chat template is to write it).

    None if the training rows are not on this disk. Raises DataError like `load_dataset`, for what can be seen without a
    tokenizer.
    """
    if not isinstance(config, FileDataConfig):
        problem = arithmetic_problems().train[0]
        return Prompt(prompt_id=0, token_ids=[], text=problem.prompt, answer=problem.answer), False
    sources = _sources(config, eval_sets)
    local = {key: source for key, source in sources.items() if not on_hub(config, [source])}
    found = _read(local, config, lambda source: source_rows(source, config, judgement, most=CHECKED_ROWS))
    rows, _ = found.get(TRAIN_KEY, ([], None))
    if not rows:
        return None
    [row, *_], is_templated = rows, config.chat_template or not isinstance(rows[0].prompt, str)
    text = plain_prompt(row.prompt, config)
    return Prompt(prompt_id=0, token_ids=[], text=text, answer=row.answer, row=plain(row.others)), is_templated


def _sources(config: FileDataConfig, eval_sets: Mapping[str, str]) -> dict[str, str]:
    """Key of the config -> the source of rows that it names; first the training rows, then the held-out ones."""
    further = {f"eval.sets.{name}": source for name, source in eval_sets.items()}
    return {TRAIN_KEY: config.train_path, "data.eval_path": config.eval_path, **further}


def _read(
    sources: Mapping[str, str], config: FileDataConfig, read: Callable[[str], tuple[list[Item], SourceReport]]
) -> dict[str, tuple[list[Item], SourceReport]]:
    """What `read` finds in each of the `sources`, by key; a source that several keys name is read once.

    Raises DataError with a problem for every source that cannot be read, or has bad rows (unless
    data.on_bad_row=skip).
    """
    found: dict[str, tuple[list[Item], SourceReport]] = {}
    problems: dict[str, Problem] = {}
    for source in dict.fromkeys(sources.values()):
        keys = [key for key, named in sources.items() if named == source]
        try:
            result = read(source)
            reason = _bad_rows(result[1].bad, good=len(result[0])) if config.on_bad_row is OnBadRow.fail else ""
        except ValueError as error:
            reason = str(error)
        if reason:
            problems[keys[0]] = _unusable(keys[0], source, reason)
        else:
            found |= dict.fromkeys(keys, result)
    if problems:
        raise DataError(*problems.values())
    return {key: found[key] for key in sources}


def _unusable(key: str, source: str, reason: str) -> Problem:
    return Problem(key=key, rule="must have rows that can be used", value=source, remedy=reason)


def _bad_rows(bad: Sequence[BadRow], *, good: int) -> str:
    """A line for each bad row of a source with `good` others, and the way out; "" without bad rows."""
    if not bad:
        return ""
    too_long = [row for row in bad if row.prompt_tokens is not None]
    first_long = too_long[:LISTED_LONG_ROWS]  # the lines of all are alike, and the way out names the longest
    listed = [row for row in bad if row.prompt_tokens is None or row in first_long][:LISTED_ROWS]
    shown = [str(row) for row in listed]
    more = [f"and {len(bad) - len(listed)} more"] if len(bad) > len(listed) else []
    way_out = "Mend them, or leave them out with data.on_bad_row=skip." if good else "No row is good: mend them."
    if too_long:
        longest = max(row.prompt_tokens or 0 for row in too_long)
        counted = "1 prompt is" if len(too_long) == 1 else f"{len(too_long)} prompts are"
        way_out += f" {counted} too long: data.max_prompt_tokens={longest} would take the longest."
    return "\n".join([f"{len(bad)} row{'s' * (len(bad) > 1)} cannot be used:", *shown, *more, way_out])


def _check_template(config: FileDataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError if the chat template is missing, or does not use a variable that the config sets."""
    template = default_template(tokenizer)
    if config.chat_template and template is None:
        rule, remedy = "must be false with this model, whose tokenizer has no chat template", "Or use a chat model."
        if named := tokenizer.chat_template:
            rule += " that is the default"
            remedy = f"Or save one of {', '.join(named)} as chat_template.jinja beside the tokenizer."
        raise DataError(Problem(key="data.chat_template", rule=rule, value=True, remedy=remedy))
    why = "the model has no chat template" if template is None else "the chat template of the model does not mention it"
    rule = f"has no effect: {why}"
    unknown = {key: value for key, value in config.chat_template_kwargs.items() if key not in str(template)}
    if unknown:
        raise DataError(
            *(Problem(key=f"data.chat_template_kwargs.{key}", rule=rule, value=unknown[key]) for key in unknown)
        )


def bad_rows_text(rows: Sequence[BadRow]) -> str:
    """A line of JSON per row: source, line or row, problem, and the row itself."""
    lines = [{"source": bad.source, bad.unit: bad.number, "problem": bad.problem, "values": bad.values} for bad in rows]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """xxh3-64 of prompts, answers, other columns and ids: equal if two lists hold the same data in the same order.

    A checkpoint names the prompts of responses under way by their ids, which a blank line or a duplicate moves. Ids
    that are positions add nothing.
    """
    digest = xxhash.xxh3_64()
    for position, prompt in enumerate(prompts):
        if prompt.prompt_id != position:
            digest.update(f"|{prompt.prompt_id}|".encode())
        digest.update(np.asarray(prompt.token_ids, dtype=np.int64).tobytes())
        digest.update(f"|{prompt.answer}|".encode(errors="replace"))
        if prompt.row:
            digest.update(orjson.dumps(prompt.row, option=orjson.OPT_SORT_KEYS))
    return digest.hexdigest()


class StreamState(TypedDict):
    """Position of a PromptStream, as plain numbers and text for a checkpoint."""

    seed: int
    epoch: int
    position: int
    """Prompts of the epoch already taken."""
    digest: str
    """xxh3-64 of all prompts and answers: a stream continues only with the same data."""


class PromptStream:
    """Prompts without end, in a new order every epoch; no prompt comes twice within an epoch."""

    def __init__(self, prompts: list[Prompt], *, seed: int) -> None:
        """`seed` determines the order of every epoch."""
        if not prompts:
            raise ValueError("there are no training prompts")
        self._prompts = prompts
        self._by_id = {prompt.prompt_id: prompt for prompt in prompts}
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._permutation(0)
        self._digest = prompts_digest(prompts)

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts; continues with the next epoch at the end of the current one."""
        prompts: list[Prompt] = []
        while len(prompts) < count:
            if self._position == len(self._prompts):
                self._epoch += 1
                self._position = 0
                self._order = self._permutation(self._epoch)
            chosen = self._order[self._position : self._position + count - len(prompts)]
            prompts += [self._prompts[index] for index in chosen]
            self._position += len(chosen)
        return prompts

    def prompt(self, prompt_id: int) -> Prompt:
        """A prompt that was taken earlier. Raises KeyError for an id that is not in the data."""
        return self._by_id[prompt_id]

    def state_dict(self) -> StreamState:
        """The state from which load_state_dict() continues."""
        return StreamState(seed=self._seed, epoch=self._epoch, position=self._position, digest=self._digest)

    def load_state_dict(self, state: StreamState) -> None:
        """Continue at the position of `state`. Raises ValueError for another seed or other prompts."""
        mine = self.state_dict()
        if (state["seed"], state["digest"]) != (mine["seed"], mine["digest"]):
            raise ValueError(
                "the saved prompt stream was over other data or another run.seed: "
                f"saved seed {state['seed']}, digest {state['digest']}; "
                f"now seed {mine['seed']}, digest {mine['digest']}"
            )
        self._epoch = state["epoch"]
        self._position = state["position"]
        self._order = self._permutation(self._epoch)

    def _permutation(self, epoch: int) -> list[int]:
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, epoch]))
        order: list[int] = np.random.Generator(bits).permutation(len(self._prompts)).tolist()
        return order


def _arithmetic_prompts(problems: list[ArithmeticProblem], tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    token_ids = prompt_ids([problem.prompt for problem in problems], tokenizer, templated=True)
    return [
        Prompt(prompt_id=index, token_ids=ids, text=problem.prompt, answer=problem.answer)
        for index, (problem, ids) in enumerate(zip(problems, token_ids, strict=True))
    ]
