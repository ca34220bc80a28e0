"""DataConfig -> Prompts, tokenized once, and the resumable stream in which `rollout/collect.py` takes them.

Problems of the built-in task come from `rollout/arithmetic.py`; files are read with the `datasets` library.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np
import xxhash

from rollout.arithmetic import ArithmeticProblem, arithmetic_problems
from rollout.task_config import ArithmeticDataConfig, DataConfig, FileDataConfig
from rollout.types import Prompt

if TYPE_CHECKING:
    from rollout.hf import PreTrainedTokenizerBase

LISTED_ROWS = 20
"""Bad rows shown in an error; the rest is counted."""
READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
"""File suffix -> builder of the `datasets` library."""


class Dataset(NamedTuple):
    """The prompts of a run."""

    train: list[Prompt]
    heldout: list[Prompt]


@dataclass(kw_only=True, slots=True)
class BadRow:
    """A row that cannot become a prompt."""

    path: str
    row: int
    """1-based, in file order."""
    problem: str

    def __str__(self) -> str:
        return f"{self.path}, row {self.row}: {self.problem}"


@dataclass(kw_only=True, slots=True)
class _Row:
    """A usable row, not yet tokenized."""

    number: int
    text: str
    templated: bool
    """Whether the chat template wrote the text."""
    answer: str


def load_dataset(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Training and held-out prompts. Raises ValueError listing all unusable rows of both files."""
    match config:
        case ArithmeticDataConfig():
            split = arithmetic_problems(config)
            return Dataset(
                train=_arithmetic_prompts(split.train, tokenizer), heldout=_arithmetic_prompts(split.heldout, tokenizer)
            )
        case FileDataConfig():
            bad: list[BadRow] = []
            train = _file_prompts(config.train_path, config, tokenizer, bad=bad)
            heldout = _file_prompts(config.eval_path, config, tokenizer, bad=bad)
            _refuse(bad)
            return Dataset(train=train, heldout=heldout)
        case _:
            raise ValueError(f"data={config.kind!r} is unknown; use data=arithmetic or data=file")


def load_eval_sets(
    paths: Mapping[str, str], config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[Prompt]]:
    """Prompts of further evaluation sets by name, read like data.eval_path. Raises ValueError listing unusable rows."""
    if not paths:
        return {}
    if not isinstance(config, FileDataConfig):
        raise ValueError(f"eval.sets needs data=file, got data={config.kind}")
    bad: list[BadRow] = []
    found = {name: _file_prompts(path, config, tokenizer, bad=bad) for name, path in paths.items()}
    _refuse(bad)
    return found


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """xxh3-64 of prompts and answers: whether two lists are the same data in the same order."""
    digest = xxhash.xxh3_64()
    for prompt in prompts:
        digest.update(np.asarray(prompt.token_ids, dtype=np.int64).tobytes())
        digest.update(f"|{prompt.answer}|".encode())
    return digest.hexdigest()


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, model_path: Path) -> tuple[int, ...]:
    """Token ids that end a response: the tokenizer's end-of-sequence and those of generation_config.json, sorted.

    Raises ValueError if there is none: every response would run into sampling.max_new_tokens.
    """
    ids = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    path = model_path / "generation_config.json"
    if path.is_file():
        listed = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        ids.update(listed if isinstance(listed, list) else [] if listed is None else [listed])
    if not ids:
        raise ValueError(
            f"{model_path} names no end-of-sequence token: set eos_token in tokenizer_config.json "
            "or eos_token_id in generation_config.json"
        )
    return tuple(sorted(ids))


class StreamState(TypedDict):
    """Where a PromptStream stands; plain numbers and text for a checkpoint."""

    seed: int
    epoch: int
    position: int
    """Prompts of the epoch already taken."""
    digest: str
    """xxh3-64 of all prompts and answers: a stream continues only over the same data."""


class PromptStream:
    """Prompts without end, in a new order every epoch; no prompt comes twice within an epoch."""

    def __init__(self, prompts: list[Prompt], *, seed: int) -> None:
        """`seed` decides the order of every epoch."""
        if not prompts:
            raise ValueError("there are no training prompts")
        self._prompts = prompts
        self._by_id = {prompt.prompt_id: prompt for prompt in prompts}
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._permutation(0)

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts; goes on with the next epoch when one is used up."""
        taken: list[Prompt] = []
        while len(taken) < count:
            if self._position == len(self._prompts):
                self._epoch += 1
                self._position = 0
                self._order = self._permutation(self._epoch)
            chosen = self._order[self._position : self._position + count - len(taken)]
            taken += [self._prompts[index] for index in chosen]
            self._position += len(chosen)
        return taken

    def prompt(self, prompt_id: int) -> Prompt:
        """A prompt that was taken earlier. Raises KeyError for one that the data does not have."""
        return self._by_id[prompt_id]

    def state_dict(self) -> StreamState:
        """What load_state_dict() needs to go on from here."""
        digest = prompts_digest(self._prompts)
        return StreamState(seed=self._seed, epoch=self._epoch, position=self._position, digest=digest)

    def load_state_dict(self, state: StreamState) -> None:
        """Go on where `state` was taken. Raises ValueError for another seed or other prompts."""
        mine = self.state_dict()
        if (state["seed"], state["digest"]) != (mine["seed"], mine["digest"]):
            raise ValueError(
                "the saved prompt stream was over other data or another run.seed: "
                f"saved seed {state['seed']}, digest {state['digest']}; "
                f"now seed {mine['seed']}, digest {mine['digest']}. Restore both to continue."
            )
        self._epoch = state["epoch"]
        self._position = state["position"]
        self._order = self._permutation(self._epoch)

    def _permutation(self, epoch: int) -> list[int]:
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, epoch]))
        order: list[int] = np.random.Generator(bits).permutation(len(self._prompts)).tolist()
        return order


def _refuse(bad: list[BadRow]) -> None:
    """Raise ValueError if there are bad rows."""
    if not bad:
        return
    shown = [str(row) for row in bad[:LISTED_ROWS]]
    if len(bad) > LISTED_ROWS:
        shown.append(f"and {len(bad) - LISTED_ROWS} more")
    raise ValueError("\n".join([f"{len(bad)} rows of the data cannot be used:", *shown]))


def _arithmetic_prompts(problems: list[ArithmeticProblem], tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    token_ids = _tokenize([problem.prompt for problem in problems], tokenizer, add_special_tokens=False)
    return [
        Prompt(prompt_id=index, token_ids=ids, text=problem.prompt, answer=problem.answer)
        for index, (problem, ids) in enumerate(zip(problems, token_ids, strict=True))
    ]


def _file_prompts(
    path: str, config: FileDataConfig, tokenizer: PreTrainedTokenizerBase, *, bad: list[BadRow]
) -> list[Prompt]:
    """Prompts of one file; rows that cannot be used are appended to `bad`."""
    if config.chat_template and tokenizer.chat_template is None:
        raise ValueError(
            "data.chat_template=true needs a tokenizer with a chat template, and the model's has none. "
            "Use data.chat_template=false, or a chat model."
        )
    refused: list[BadRow] = []
    rows: list[_Row] = []
    for number, (prompt, answer) in enumerate(_read_rows(path, config), start=1):
        try:
            text, templated = _prompt_text(prompt, config, tokenizer)
            rows.append(_Row(number=number, text=text, templated=templated, answer=_answer_text(answer, config)))
        except ValueError as error:
            refused.append(BadRow(path=path, row=number, problem=str(error)))
    prompts: list[Prompt] = []
    for templated in (True, False):
        chosen = [row for row in rows if row.templated is templated]
        # A chat template writes its own special tokens.
        token_ids = _tokenize([row.text for row in chosen], tokenizer, add_special_tokens=not templated)
        for row, ids in zip(chosen, token_ids, strict=True):
            if not ids:
                refused.append(BadRow(path=path, row=row.number, problem=f"{config.prompt_key} has no tokens"))
            elif len(ids) > config.max_prompt_tokens:
                problem = f"{len(ids)} prompt tokens, more than data.max_prompt_tokens={config.max_prompt_tokens}"
                refused.append(BadRow(path=path, row=row.number, problem=problem))
            else:
                prompts.append(Prompt(prompt_id=row.number - 1, token_ids=ids, text=row.text, answer=row.answer))
    bad += sorted(refused, key=lambda row: row.row)
    return sorted(prompts, key=lambda prompt: prompt.prompt_id)


def _tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool) -> list[list[int]]:
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]
    return ids


def _read_rows(path: str, config: FileDataConfig) -> Iterator[tuple[object, object]]:
    """(prompt, answer) of every row of a local file; absent values are None."""
    # Imported here because it takes seconds and the built-in task does not need it.
    import datasets

    suffix = Path(path).suffix.lower()
    if suffix not in READERS:
        raise ValueError(f"{path}: the suffix must be one of {', '.join(READERS)}, got {suffix!r}")
    # CSV has no types: guessed ones would turn the answers 007 and 42 into 7 and, beside an empty cell, 42.0.
    as_text = {config.prompt_key: str, config.answer_key: str}
    options: dict[str, Any] = {"converters": as_text} if suffix == ".csv" else {}
    # A private cache, so that nothing stale is read and nothing is left in the user's home.
    with tempfile.TemporaryDirectory(prefix="parity-data-") as cache:
        try:
            table = datasets.load_dataset(
                READERS[suffix], data_files=path, split="train", cache_dir=cache, keep_in_memory=True, **options
            )
        except StopIteration as error:
            # What the JSON reader raises for a file without a line.
            raise ValueError(f"{path} has no rows") from error
        except (datasets.exceptions.DatasetGenerationError, OSError, ValueError) as error:
            raise ValueError(f"{path} could not be read: {error.__cause__ or error}") from error
        if len(table) == 0:
            raise ValueError(f"{path} has no rows")
        columns = table.column_names
        paths = [
            _column_path(config.prompt_key, key="prompt_key", columns=columns, path=path),
            _column_path(config.answer_key, key="answer_key", columns=columns, path=path),
        ]
        for row in table.select_columns(sorted({column_path[0] for column_path in paths})):
            yield _lookup(row, paths[0]), _lookup(row, paths[1])


def _column_path(name: str, *, key: str, columns: list[str], path: str) -> list[str]:
    """["reward_model", "ground_truth"] for a field of a nested column written reward_model.ground_truth."""
    if name in columns:
        return [name]
    parts = name.split(".")
    if parts[0] not in columns:
        raise ValueError(f"{path}: data.{key}={name} is not a column; columns are {', '.join(columns)}")
    return parts


def _lookup(row: dict[str, Any], column_path: list[str]) -> object:
    value: Any = row
    for part in column_path:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _prompt_text(value: object, config: FileDataConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[str, bool]:
    """Prompt as the engine will see it, and whether the chat template wrote it. Raises ValueError."""
    if value is None:
        raise ValueError(f"{config.prompt_key} is missing")
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"{config.prompt_key} is empty")
        text = f"{value} {config.instruction}" if config.instruction else value
        if not config.chat_template:
            return text, False
        return _apply_template([{"role": "user", "content": text}], tokenizer), True
    if not isinstance(value, list) or not value:
        raise ValueError(f"{config.prompt_key} must be text or a list of chat messages, got {value!r:.80}")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(f"{config.prompt_key} has a chat message without role or content: {message!r:.80}")
    if not any(message["content"].strip() for message in value):
        raise ValueError(f"{config.prompt_key} is empty")
    return _apply_template(value, tokenizer), True


def _apply_template(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> str:
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise ValueError("chat messages need a tokenizer with a chat template, and the model's has none")
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from error


def _answer_text(value: object, config: FileDataConfig) -> str:
    """The reference as text: 42 and 42.0 both become "42". Raises ValueError."""
    if value is None or value == "":
        raise ValueError(f"{config.answer_key} is missing")
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() else str(value)
    raise ValueError(f"{config.answer_key} must be text or a finite number, got {value!r:.80}")
