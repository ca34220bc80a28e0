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
from rollout.rewards.custom import Score, load_custom
from rollout.rewards.rules import RULES

Judge = Callable[[Sequence[Mapping[str, Any]]], list[dict[str, Any]]]


def load(function: str) -> tuple[Judge, dict[str, Any]]:
    """Load a rule or a custom function -> (function that judges a list of items, greeting for the parent)."""
    if not is_custom(function):
        rule = RULES[function]
        rule.judge("1", "1")  # imports what the rule needs, before a deadline runs

        def by_rule(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
            verdicts = [rule.judge(item["response"], item["answer"]) for item in items]
            return [{"correct": verdict.correct, "extracted": verdict.extracted} for verdict in verdicts]

        return by_rule, {"at_once": rule.at_once, "sha256": None}
    custom = load_custom(function)

    def by_custom(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [
            {"score": each.score, "correct": each.correct, "metrics": each.metrics}
            if isinstance(each, Score)
            else {"error": each}
            for each in custom.score(items)
        ]

    return by_custom, {"at_once": custom.at_once, "sha256": custom.sha256}


def answer(judge: Judge, items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The verdicts. If the rule raises, each item is judged by itself, so that one bad item does not spoil the rest."""
    try:
        return judge(items)
    except Exception as error:
        if len(items) == 1:
            return [{"error": described(error)}]
    return [verdict for item in items for verdict in answer(judge, [item])]


def main(function: str, memory_bytes: int) -> None:
    """Answer requests until the input ends."""
    say = become_child(memory_bytes=memory_bytes)
    try:
        judge, hello = load(function)
    except Exception as error:
        say({"failed": described(error)})
        return
    say(hello)
    for line in sys.stdin.buffer:
        say(answer(judge, orjson.loads(line)))


if __name__ == "__main__":
    main(*own_arguments(sys.argv[1:]))
