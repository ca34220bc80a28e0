"""Rules: how the built-in rewards judge a response. (response text, reference answer) -> Verdict.

A rule extracts an answer from a response and compares it with the reference. Plain string work, nothing is executed;
only `math` does more than that, and every rule runs in a process that can be killed (`rollout/rewards/pool.py`).
A new rule is two functions and a row of `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from rollout.data.answers import (
    ANSWER_MARK,
    boxed_or_tail,
    dapo_answer,
    last_number,
    marked_number,
    normalise,
    to_number,
)

MANY = 64
"""Responses that a rule of bounded work is handed at once."""


class Verdict(NamedTuple):
    """What a rule says about one response."""

    correct: bool
    extracted: str | None
    """The answer that was found, in a form in which equal answers are equal text; None if none was stated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One way to judge a response."""

    extract: Callable[[str], str | None]
    """The answer that a response states, None if it states none in the form asked for."""
    equal: Callable[[str, str], bool]
    """(extracted, reference) -> whether they are the same answer. Raises ValueError for an unusable reference."""
    at_once: int = MANY
    """Responses per call of a worker: 1 where a single one can take all the time there is."""

    def judge(self, response: str, answer: str) -> Verdict:
        """Raises ValueError for a reference that the rule cannot use."""
        extracted = self.extract(response)
        # The reference is looked at in any case: a useless one must not hide behind responses without an answer.
        correct = self.equal("" if extracted is None else extracted, answer)
        return Verdict(correct and extracted is not None, extracted)


def same_text(extracted: str, answer: str) -> bool:
    """Whether two answers are the same text, leading and trailing white space aside."""
    return extracted.strip() == answer.strip()


def same_number(extracted: str, answer: str) -> bool:
    """Whether `extracted` is the number that `answer` is, or that follows the last "####" of `answer`."""
    reference = to_number(answer.rpartition(ANSWER_MARK)[2], whole=True)
    if reference is None:
        raise ValueError(
            "the reference answer must be a number or end with '#### number' with reward.function=gsm8k or "
            f"gsm8k_flexible, got {answer[-80:]!r}"
        )
    return to_number(extracted, whole=True) == reference


def same_normalised(extracted: str, answer: str) -> bool:
    """Whether two answers are the same text once units, spaces and LaTeX ornaments are gone."""
    return extracted == normalise(answer)


def same_mathematics(extracted: str, answer: str) -> bool:
    """Whether two expressions are equal, as math-verify sees it."""
    from rollout.rewards.mathematics import equal_expressions

    return equal_expressions(extracted, answer)


RULES: dict[str, Rule] = {
    "exact_match": Rule(extract=str.strip, equal=same_text),
    "gsm8k": Rule(extract=marked_number, equal=same_number),
    "gsm8k_flexible": Rule(extract=last_number, equal=same_number),
    "math": Rule(extract=boxed_or_tail, equal=same_mathematics, at_once=1),
    "math_dapo": Rule(extract=dapo_answer, equal=same_normalised),
}
"""Choices of `reward.function`, besides path.py:function."""


def rule_names() -> list[str]:
    """The built-in choices of `reward.function`, sorted."""
    return sorted(RULES)
