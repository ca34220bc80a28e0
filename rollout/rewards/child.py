"""The child process that scores: one line of JSON in, one line of JSON out, until the input ends.

    python -m rollout.rewards.child FUNCTION MEMORY_BYTES

`rollout/rewards/pool.py` starts, feeds, times and kills the process. All messages are text; nothing is unpickled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from rollout.processes.child_process import become_child, described, own_arguments
from rollout.processes.custom_code import is_custom
from rollout.rewards.custom import Reply, load_custom
from rollout.rewards.rules import RULES

Judge = Callable[[Sequence[Mapping[str, Any]]], list[Reply]]


def load(function: str) -> tuple[Judge, int]:
    """Load a rule or a custom function -> (function that judges a list of items, number of items per call)."""
    if is_custom(function):
        custom = load_custom(function)
        return custom.score, custom.at_once
    rule = RULES[function]
    rule.judge("1", "1")  # imports what the rule needs, before a deadline runs
    return lambda items: [
        rule.verdict(item["response"], item["answer"], item["prompt"])._asdict() for item in items
    ], rule.at_once


def answer(judge: Judge, items: Sequence[Mapping[str, Any]]) -> list[Reply]:
    """The verdicts. If the rule raises, each item is judged by itself, so that one bad item does not spoil the rest."""
    try:
        return judge(items)
    except Exception as error:
        if len(items) == 1:
            return [{"error": described(error)}]
    return [verdict for item in items for verdict in answer(judge, [item])]


def main(function: str, memory_bytes: int) -> None:
    """Answer requests until the input ends."""
    requests, say = become_child(memory_bytes=memory_bytes)
    try:
        judge, at_once = load(function)
    except Exception as error:
        say({"failed": described(error)})
        return
    say({"at_once": at_once})
    for line in requests:
        say(answer(judge, orjson.loads(line)))


if __name__ == "__main__":
    main(*own_arguments(sys.argv[1:]))
