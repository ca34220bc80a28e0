"""Custom rewards: `reward.function=path.py:name` -> a function that scores responses. Loaded in reward workers only.

The names of the function's parameters select the values that it receives:

    def reward(response, answer): ...                   one response; also prompt=, row=
    def reward(responses, answers): ...                 many at once; also prompts=, rows=; returns a list
    async def reward(response, answer): ...             many at once, concurrently

where `row` is a dict of the other columns of the prompt's row. The function returns a bool (correct or not), a number
(the reward), or a dict with "score" and optionally "correct" (bool) and further numbers, which become metrics
reward/<key>. The function is user code and runs with the user's rights.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from rollout.processes.child_process import described
from rollout.processes.custom_code import custom_path, load_function

ONE = {"response": "response", "answer": "answer", "prompt": "prompt", "row": "row"}
MANY = {"responses": "response", "answers": "answer", "prompts": "prompt", "rows": "row"}
"""List parameter of a custom function -> key of an item; the values of all items make up the list."""
CONCURRENT = 32
"""Number of responses that an async function scores at the same time."""
BATCH = 256
"""Number of responses per call of a function that takes lists."""


class Kind(Enum):
    """Calling convention of a custom function."""

    single = "single"
    concurrent = "concurrent"
    batch = "batch"


@dataclass(kw_only=True, slots=True)
class Score:
    """Score of one response by a custom function."""

    score: float | None
    """The reward; None if the function returned only a bool."""
    correct: bool | None
    """True if the response is correct; None if the function returned only a number."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomReward:
    """A loaded custom function."""

    function: Callable[..., Any]
    kind: Kind
    parameters: dict[str, str]
    sha256: str
    """SHA-256 of the file when it was loaded."""

    @property
    def at_once(self) -> int:
        """Responses per call of a worker."""
        return {Kind.single: 1, Kind.concurrent: CONCURRENT, Kind.batch: BATCH}[self.kind]

    def score(self, items: Sequence[Mapping[str, Any]]) -> list[Score | str]:
        """One Score per item, or a text that describes the problem with the returned value.

        If a function that takes lists raises, or returns a wrong number of results, all its items fail.
        """
        match self.kind:
            case Kind.single:
                return [self._one(item) for item in items]
            case Kind.concurrent:
                return asyncio.run(self._concurrently(items))
            case Kind.batch:
                return self._batched(items)

    def _arguments(self, item: Mapping[str, Any]) -> dict[str, Any]:
        return {name: item[key] for name, key in self.parameters.items()}

    def _one(self, item: Mapping[str, Any]) -> Score | str:
        try:
            result = self.function(**self._arguments(item))
        except Exception as error:
            return raised(error)
        return checked(result)

    async def _concurrently(self, items: Sequence[Mapping[str, Any]]) -> list[Score | str]:
        calls = [self.function(**self._arguments(item)) for item in items]
        results = await asyncio.gather(*calls, return_exceptions=True)
        return [raised(each) if isinstance(each, BaseException) else checked(each) for each in results]

    def _batched(self, items: Sequence[Mapping[str, Any]]) -> list[Score | str]:
        arguments = {name: [item[key] for item in items] for name, key in self.parameters.items()}
        try:
            results = list(self.function(**arguments))
        except Exception as error:
            return [raised(error)] * len(items)
        if len(results) != len(items):
            return [f"{len(results)} results for {len(items)} responses"] * len(items)
        return [checked(result) for result in results]


def raised(error: BaseException) -> str:
    """One line about an exception of the function, with the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{described(error)} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"


def checked(result: object) -> Score | str:
    """The Score of a returned value, or a text that describes the problem with the value."""
    try:
        return as_score(result)
    except (TypeError, ValueError) as error:
        return described(error)


def as_score(result: object) -> Score:
    """The Score of a returned value. Raises TypeError or ValueError that describes the problem."""
    if isinstance(result, bool):
        return Score(score=None, correct=result)
    if isinstance(result, Mapping):
        if "score" not in result:
            raise ValueError(f"a dict needs the key 'score', got {sorted(map(str, result))}")
        correct = result.get("correct")
        if correct is not None and not isinstance(correct, bool):
            raise TypeError(f"'correct' must be a bool, got {type(correct).__name__}")
        metrics = {str(key): _number(value, key) for key, value in result.items() if key not in ("score", "correct")}
        return Score(score=_number(result["score"], "score"), correct=correct, metrics=metrics)
    return Score(score=_number(result, "the result"), correct=None)


def _number(value: object, name: object) -> float:
    # numpy and torch scalars know __float__; text does not.
    if not isinstance(value, bool | int | float) and not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def load_custom(function: str) -> CustomReward:
    """Run the file and return the function. Raises ValueError if it is missing or requires an unknown parameter."""
    found = load_function(function, key="reward.function")
    if not callable(found):
        raise ValueError(f"reward.function={function} cannot be called")
    kind, parameters = _calling(found, function)
    sha256 = hashlib.sha256(custom_path(function).read_bytes()).hexdigest()
    return CustomReward(function=found, kind=kind, parameters=parameters, sha256=sha256)


def _calling(found: Callable[..., Any], function: str) -> tuple[Kind, dict[str, str]]:
    needed: list[str] = []
    given: list[str] = []
    for parameter in inspect.signature(found).parameters.values():
        if parameter.name in ONE or parameter.name in MANY:
            given.append(parameter.name)
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        ):
            needed.append(parameter.name)
    for table, kind in ((ONE, Kind.single), (MANY, Kind.batch)):
        if given and not needed and all(name in table for name in given):
            is_async = inspect.iscoroutinefunction(found)
            if is_async and kind is Kind.batch:
                break
            return (Kind.concurrent if is_async else kind), {name: table[name] for name in given}
    raise ValueError(
        f"reward.function={function}: its parameters must be some of {', '.join(ONE)}, or of {', '.join(MANY)} for "
        f"many responses at once (not async); got {', '.join([*given, *needed]) or 'none'}"
    )
