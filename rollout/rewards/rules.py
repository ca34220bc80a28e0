"""Rules of the built-in rewards: (response text, reference answer) -> correct or not.

A rule extracts an answer from a response and compares it with the reference. Rules do plain string work and execute
nothing; only `math` parses expressions. Every rule runs in a process that can be killed (`rollout/rewards/pool.py`). A
new rule is two functions and a row of `RULES`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from rollout.data.answers import (
    ANSWER_MARK,
    boxed_or_tail,
    dapo_answer,
    last_number,
    marked_number,
    normalise,
    to_number,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardRule:
    """A way to judge a response: extract its answer, compare it with the reference."""

    extract: Callable[[str], str | None]
    """Response -> the answer stated in the required form; None if the response has no such answer."""
    equal: Callable[[str, str], bool]
    """(extracted, reference) -> True if both are the same answer. Raises ValueError for an unusable reference."""
    at_once: int = 64
    """Responses per call of a worker: 1 for a rule that may spend the whole deadline on one response."""

    def judge(self, response: str, answer: str) -> bool:
        """True if the answer of one response is correct. Raises ValueError for a reference that the rule cannot use."""
        extracted = self.extract(response)
        # The reference is parsed in any case: responses without an answer must not hide an unusable reference.
        correct = self.equal("" if extracted is None else extracted, answer)
        return correct and extracted is not None


def same_text(extracted: str, answer: str) -> bool:
    """True if two answers are the same text, leading and trailing white space ignored."""
    return extracted.strip() == answer.strip()


def same_number(extracted: str, answer: str) -> bool:
    """True if `extracted` equals the number `answer`, or the number after the last "####" of `answer`."""
    reference = to_number(answer.rpartition(ANSWER_MARK)[2], whole=True)
    if reference is None:
        raise ValueError(
            "the reference answer must be a number or end with '#### number' with reward.function=gsm8k or "
            f"gsm8k_flexible, got {answer[-80:]!r}"
        )
    return to_number(extracted, whole=True) == reference


def same_normalised(extracted: str, answer: str) -> bool:
    """True if two answers are the same text without units, spaces and LaTeX ornaments."""
    return extracted == normalise(answer)


def same_mathematics(extracted: str, answer: str) -> bool:
    """True if math-verify finds two expressions equal: 1/2 is 0.5, {1, 2} is {2, 1}.

    math-verify bounds its own work with SIGALRM, which a computation in C ignores. So its timeouts are off, and
    `rollout/rewards/pool.py` kills the process at the deadline. Raises ValueError for a reference that it cannot read.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # math-verify logs with every call that its timeouts are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    config = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    # The reference is boxed, because parts of a bare reference would be taken for the whole.
    boxed = answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"
    reference = parse(boxed, extraction_config=config, parsing_timeout=None)
    if not reference:
        raise ValueError(f"reward.function=math cannot read the reference answer {answer[-80:]!r}")
    found = parse(extracted, extraction_config=config, parsing_timeout=None)
    return bool(found) and bool(verify(reference, found, timeout_seconds=None))


RULES: dict[str, RewardRule] = {
    "exact_match": RewardRule(extract=str.strip, equal=same_text),
    "gsm8k": RewardRule(extract=marked_number, equal=same_number),
    "gsm8k_flexible": RewardRule(extract=last_number, equal=same_number),
    "math": RewardRule(extract=boxed_or_tail, equal=same_mathematics, at_once=1),
    "math_dapo": RewardRule(extract=dapo_answer, equal=same_normalised),
}
"""Name of a built-in choice of `reward.function` -> rule; path.py:function is the other choice."""
