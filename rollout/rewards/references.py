"""References of a data source, each tried by the rule that will judge with it, before a run starts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from algorithms.config import Problem
from rollout.data.data_files import DataError
from rollout.data.file_prompts import Judgement
from rollout.rewards.answer_rules import RULES, RewardRule
from rollout.rewards.reward_pool import is_correct, judged
from rollout.task_config import RewardConfig
from rollout.user_code.custom_code import is_custom
from rollout.user_code.pool import Failure, Outcome, UserCodeError

_READABLE = re.compile(r"-?(?:[0-9]{1,15}(?:\.[0-9]{1,15})?|\\[dt]?frac\{[0-9]{1,15}\}\{[1-9][0-9]{0,14}\})")
r"""Numbers, \frac{..}{..} of whole numbers included, that math-verify reads for certain. Most references are such, and
the parser takes milliseconds for each."""


def judgement(config: RewardConfig, *, own_rollout: bool) -> Judgement:
    """What `config` needs of the rows; `own_rollout` is True if a rollout function of the user sees them too."""

    def unusable(answers: Sequence[str]) -> dict[int, str]:
        known = _verdicts(config.function)
        new = [answer for answer in dict.fromkeys(answers) if answer not in known]
        with _named(config):
            problems = unusable_references(config, new)
        known |= {answer: problems.get(position, "") for position, answer in enumerate(new)}
        return {position: known[answer] for position, answer in enumerate(answers) if known[answer]}

    def are_equal(pairs: Sequence[tuple[str, str]]) -> list[bool]:
        assert rule is not None
        items = [{"response": rule.state(one), "answer": other, "prompt": ""} for one, other in pairs]
        with _named(config):
            return [is_correct(outcome) for outcome in judged(config, items)]

    rule = RULES.get(config.function)
    key = None if rule is None else rule.answer_key
    asks = are_equal if rule is not None and rule.parses else None
    return Judgement(
        unusable=unusable, answer_key=key, are_equal=asks, sees_rows=own_rollout or is_custom(config.function)
    )


def form_notes(config: RewardConfig, prompts: Sequence[str]) -> list[str]:
    """The line about prompts of which none asks for the form of answers that the rule reads; none for other rules."""
    marks = RULES[config.function].marks if config.function in RULES else ()
    if not marks or any(mark.casefold() in prompt.casefold() for prompt in prompts for mark in marks):
        return []
    forms = " or ".join(marks)
    return [
        f"WARNING: reward.function={config.function} reads answers with {forms}, and no prompt that was read asks for "
        "it: data.instruction can"
    ]


@contextmanager
def _named(config: RewardConfig) -> Iterator[None]:
    """Raise DataError, which names reward.function, where no worker can be started."""
    try:
        yield
    except UserCodeError as error:
        rule = "must be a function that can be loaded"
        problem = Problem(key="reward.function", rule=rule, value=config.function, remedy=str(error))
        raise DataError(problem) from error


@cache
def _verdicts(function: str) -> dict[str, str]:
    """Reference -> what was found of it in this process, which reads the rows twice: for the check and for the run."""
    return {}


def unusable_references(config: RewardConfig, answers: Sequence[str]) -> dict[int, str]:
    """Position in `answers` -> reason why no response can be correct with this reference, for the unusable ones.

    The reason is a sentence without its subject: "must be a number, ...". A rule that parses does so in workers with
    reward.timeout_s for each reference, so that no reference can stop the run. Empty for a function of the user's own,
    which alone knows its references. Raises UserCodeError if no worker can be started.
    """
    rule = RULES.get(config.function)
    if rule is None:
        return {}
    distinct = dict.fromkeys(answers)
    if not rule.parses:
        problems = {answer: rule.reference_problem(answer) for answer in distinct}
    else:
        problems = _tried_in_workers(config, rule, [each for each in distinct if not _READABLE.fullmatch(each)])
    return {position: problem for position, each in enumerate(answers) if (problem := problems.get(each))}


def _tried_in_workers(config: RewardConfig, rule: RewardRule, answers: Sequence[str]) -> dict[str, str]:
    """Reference -> reason, "" for a usable one."""
    stated = {answer: rule.unusable(answer) for answer in answers if rule.says_more(answer)}
    others = [answer for answer in answers if answer not in stated]
    items = [{"response": rule.state(answer), "answer": answer, "prompt": ""} for answer in others]
    outcomes = judged(config, items)
    return stated | {answer: _problem(outcome, rule, answer) for answer, outcome in zip(others, outcomes, strict=True)}


def _problem(outcome: Outcome, rule: RewardRule, answer: str) -> str:
    if outcome.failure is None or outcome.failure is Failure.error:
        return "" if is_correct(outcome) else rule.unusable(answer)
    # What another program may have ended says nothing about the reference.
    return f"{rule.unusable(answer)} ({outcome.message})" if outcome.proven else ""
