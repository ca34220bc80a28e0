"""The child process that scores: a rule or a custom function. `rollout/user_code/serving.py` has its protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from rollout.processes.child_process import described
from rollout.rewards.answer_rules import RULES, RewardRule
from rollout.rewards.custom import load_custom
from rollout.user_code.custom_code import is_custom
from rollout.user_code.serving import Blocking, Overlapping, Reply, serve


def load(function: str, arguments: str) -> Blocking | Overlapping:
    """Load a rule, or a custom function with `arguments`, a JSON object."""
    if is_custom(function):
        return load_custom(function, orjson.loads(arguments)).work()
    rule = RULES[function]
    rule.judge("1", "1")  # imports what the rule needs, before a deadline runs
    return Blocking(run=lambda items: [judge(rule, item) for item in items], items=rule.at_once)


def judge(rule: RewardRule, item: Mapping[str, Any]) -> Reply:
    """The reply {"correct", "extracted"}, or {"error": text} if the rule cannot use the reference."""
    try:
        return rule.verdict(item["response"], item["answer"], item["prompt"])._asdict()
    except Exception as error:
        return {"error": described(error), "final": True}


if __name__ == "__main__":
    serve(load)
