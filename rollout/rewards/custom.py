"""Custom rewards: `reward.function=path.py:name` -> a function that scores responses. Loaded in reward workers only.

The names of the function's parameters select the values that it receives:

    def reward(response, answer): ...                   one response; also raw_response=, prompt=, row=
    def reward(responses, answers): ...                 many at once; also raw_responses=, prompts=, rows=
    async def reward(response, answer): ...             many at once, concurrently

where `raw_response` is the response with its special tokens, and `row` a dict of the other columns of the prompt's row.
A function of many responses returns a list. For each, the function returns a bool (correct or not), a number
(the reward), or a dict with "score" and optionally "correct" (bool) and further numbers, which become metrics
reward/<key> and eval/<key> under names that Parity does not use itself. The function is user code and runs with the
user's rights.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from functools import partial
from typing import Any

from rollout.data.data_files import plain_text, short_float
from rollout.processes.child_process import described
from rollout.user_code.custom_code import load_function
from rollout.user_code.serving import Ask, Blocking, Overlapping, Reply

ONE = {"response": "response", "raw_response": "raw_response", "answer": "answer", "prompt": "prompt", "row": "row"}
MANY = {f"{name}s": name for name in ONE}
"""List parameter of a custom function -> key of an item; the values of all items make up the list."""
ELSEWHERE = {
    "solution_str": "response",
    "ground_truth": "answer",
    "data_source": "row['data_source']",
    "extra_info": "row['extra_info']",
    "completion": "response",
    "completions": "responses",
    "solution": "answer",
    "label": "answer",
    "labels": "answers",
}
"""Parameter of a reward function of verl or TRL -> the parameter here. TRL passes the other columns by name: here they
are in `row`, or `rows`."""
NO_LIST = (str, bytes, bytearray, Mapping, Set)
"""Types whose members are no results in the order of the responses."""
VERDICT = ("score", "correct")
"""Keys of a returned dict that make up the verdict; every other key is a metric."""
MAX_SCORE = 1e15
"""Largest magnitude of a score or a metric: the sum of a step's squares must be finite in float32."""
RESERVED_METRICS = frozenset(
    {"mean", "std", "min", "max", "accuracy", "generated_accuracy"}
    | {"timeouts", "crashes", "errors", "retries", "unscored", "outage_s", "failed"}
    | {
        "reward_mean",
        "accuracy_sampled",
        "num_prompts",
        "response_tokens_mean",
        "truncated_frac",
        "policy_version",
        "failed",
    }
)
"""Names that reward/<name> or eval/<name> has already; a number of the function must not take such a metric's place."""


def is_returned(metric: str) -> bool:
    """True for the name of a metric that is a user's: reward/<key> of a reward function, own/<name> of
    tracking.metrics."""
    kind, _, name = metric.partition("/")
    return kind == "own" or (kind == "reward" and name not in RESERVED_METRICS)


class Calling(Enum):
    """Calling convention of a custom function."""

    single = "one response per call"
    overlapping = "one response per call, many calls at a time"
    batch = "many responses per call"


BATCH_ITEMS = 256
"""Most responses per call of a function that takes lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomReward:
    """A loaded custom function."""

    function: Callable[..., Any]
    calling: Calling
    parameters: dict[str, str]

    def work(self) -> Blocking | Overlapping:
        """The function as a process runs it.

        A reply is {"score", "correct", "metrics"}, or {"error": text}. score: the reward, None if the function returned
        only a bool. correct: None if it returned only a number. If a function that takes lists raises, or returns a
        wrong number of results, all its items fail.
        """
        match self.calling:
            case Calling.single:
                return Blocking(run=lambda items: [reply_of(self.function(**self._arguments(items[0])))], items=1)
            case Calling.overlapping:
                return Overlapping(run=self._one)
            case Calling.batch:
                return Blocking(run=self._batched, items=BATCH_ITEMS)

    def _arguments(self, item: Mapping[str, Any]) -> dict[str, Any]:
        return {name: item[key] for name, key in self.parameters.items()}

    async def _one(self, item: Mapping[str, Any], _ask: Ask) -> Reply:
        return reply_of(await self.function(**self._arguments(item)))

    def _batched(self, items: Sequence[Mapping[str, Any]]) -> list[Reply]:
        found = self.function(**{name: [item[key] for item in items] for name, key in self.parameters.items()})
        is_list = isinstance(found, Iterable) and not isinstance(found, NO_LIST) and getattr(found, "ndim", 1) == 1
        results = list(found) if is_list else []
        if len(results) == len(items):
            return [reply_of(result) for result in results]
        got = (
            f"as many results, got {len(results)}"
            if is_list
            else f"a list of as many results, got a {type(found).__name__}"
        )
        # A call for one response alone would be right by chance.
        return [{"error": f"{len(items)} responses need {got}", "final": True}] * len(items)


def reply_of(result: object) -> Reply:
    """The reply for a returned value, which may be an error that describes the problem with the value."""
    try:
        if inspect.iscoroutine(result):
            result.close()  # which would warn that nobody awaited it
            raise TypeError("the function returned a coroutine: its outermost decorator must be an async def as well")
        if not isinstance(result, Mapping):
            value = _python_value(result)
            return {"correct": value} if isinstance(value, bool) else {"score": _number(value, "the result")}
        if "score" not in result:
            raise ValueError(f"a dict needs the key 'score', got {sorted(map(str, result))}")
        correct = _python_value(result.get("correct"))
        if correct is not None and not isinstance(correct, bool):
            raise TypeError(f"'correct' must be a bool, got {type(correct).__name__}")
        further = {key: value for key, value in result.items() if key not in VERDICT and value is not None}
        metrics = {plain_text(str(key)): _number(value, key) for key, value in further.items()}
        # Metrics of a further evaluation set have its name in front: <set>/accuracy.
        if taken := [key for key in metrics if key.rpartition("/")[2] in RESERVED_METRICS]:
            raise ValueError(f"the key {min(taken)!r} is the name of a metric of Parity's: give it another name")
        return {"score": _number(result["score"], "score"), "correct": correct, "metrics": metrics}
    except Exception as error:  # what the user's own types raise when they become numbers or text
        return {"error": described(error)}


def _python_value(value: object) -> object:
    """The Python value of an array or tensor with one element (numpy, torch, jax); another value as it is.

    0.9 in 32 bits is 0.9, not the 0.8999999761581421 that lies below reward.correct=0.9.

    Raises ValueError for an element that is masked, and the library's own error for more elements or none.
    """
    if not (hasattr(value, "dtype") and callable(item := getattr(value, "item", None))):
        return value
    mask: Any = getattr(value, "mask", None)
    if hasattr(mask, "dtype") and mask.any():
        raise ValueError("a masked value is no value")
    short = short_float(str(value.dtype).removeprefix("torch."))
    return item() if short is None else short(item())


def _number(value: object, name: object) -> float:
    value = _python_value(value)
    # Decimal and Fraction know __float__; text does not.
    if not isinstance(value, bool | int | float) and not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    if abs(number) > MAX_SCORE:
        raise ValueError(f"{name} must lie in [-{MAX_SCORE:g}, {MAX_SCORE:g}], got {number:g}")
    return number


def load_custom(function: str, arguments: Mapping[str, Any] | None = None) -> CustomReward:
    """Run the file and return the function. Raises ValueError if it is missing or requires an unknown parameter."""
    found = load_function(function, key="reward.function", arguments=arguments)
    assert callable(found)
    needed: list[str] = []
    given: list[str] = []
    for parameter in inspect.signature(found).parameters.values():
        if parameter.name in (arguments or ()):
            continue
        if parameter.name in ONE or parameter.name in MANY:
            given.append(parameter.name)
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        ):
            needed.append(parameter.name)
    inner = found.func if isinstance(found, partial) else found
    is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)
    for table, calling in ((ONE, Calling.overlapping if is_async else Calling.single), (MANY, Calling.batch)):
        if given and not needed and all(name in table for name in given) and not (is_async and table is MANY):
            parameters = {name: table[name] for name in given}
            return CustomReward(function=found, calling=calling, parameters=parameters)
    raise ValueError(
        f"its parameters must be some of {', '.join(ONE)}, or of {', '.join(MANY)} for many responses at once (not "
        f"async); got {', '.join([*given, *needed]) or 'none'}. {_here(needed)}".strip()
    )


def _here(names: Sequence[str]) -> str:
    """Sentences with the parameter that takes the place of each of `names`, which are unknown."""
    known = {name: ELSEWHERE.get(name) or next(iter(get_close_matches(name, [*ONE, *MANY], n=1)), "") for name in names}
    found = [f"{name} is {here}" for name, here in known.items() if here]
    return f"Here {', '.join(found)}." if found else ""
