"""Rules of the built-in rewards: (response text, reference answer) -> correct or not.

A rule extracts an answer from a response and compares it with the reference. Rules do plain string work and execute
nothing; only `math` parses expressions. Every rule runs in a process that can be killed (`rollout/user_code`). A new
rule is three functions and an entry of `RULES`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollout.data.answers import (
    ANSWER_MARK,
    MAX_EXPRESSION_CHARS,
    STATEMENT,
    bare,
    boxed,
    boxed_or_tail,
    dapo_answer,
    last_number,
    latex_signs,
    marked_number,
    normalise,
    stated,
    to_number,
)


class Verdict(NamedTuple):
    """What a rule finds in one response."""

    correct: bool
    extracted: str | None
    """The answer that the response states, as text; None if it states none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardRule:
    """A way to judge a response: extract its answer, compare it with the reference."""

    name: str
    """The choice of `reward.function`."""
    read: Callable[[str], str | None]
    """Text after the thoughts -> the answer stated in the required form; None if the text has no such answer."""
    equal: Callable[[str, str], bool]
    """(extracted, reference) -> True if both are the same answer. Raises ValueError for an unusable reference."""
    state: Callable[[str], str]
    """Reference -> a response that states the reference in the required form."""
    needs: str
    """Form of the references that the rule can use, for messages: a noun with its article."""
    answer_key: Callable[[str], str] | None = None
    """Reference -> a text that is equal for references that the rule takes for equal; None: equal numbers are equal."""
    as_text: Callable[[str], str | None] = str
    """What `extract` returned -> the answer alone, for a vote; None if it holds no answer after all. May parse."""
    at_once: int = 64
    """Responses per call of a worker: 1 for a rule that parses, and may spend the whole deadline on one response."""
    alone: bool = False
    """True if a reference must be the answer alone: the rule compares the whole of it."""
    with_thoughts: bool = False
    """True if the answer is the whole response, thoughts included."""
    marks: tuple[str, ...] = ()
    """Texts of which a prompt that asks for the required form has one; () for a rule that reads answers in any form."""

    @property
    def parses(self) -> bool:
        """True if answers are equal by more than their text."""
        return self.at_once == 1

    def extract(self, response: str, prompt: str = "") -> str | None:
        """The answer that a response to `prompt` states; None if it states none. Bounded string work."""
        text = response if self.with_thoughts else stated(response, prompt)
        return None if text is None else self.read(text)

    def verdict(self, response: str, answer: str, prompt: str = "") -> Verdict:
        """The verdict on a response to `prompt`. Raises ValueError for a reference that the rule cannot use."""
        extracted = self.extract(response, prompt)
        # The reference is parsed in any case: responses without an answer must not hide an unusable reference.
        correct = self.equal("" if extracted is None else extracted, answer)
        if extracted is None:
            return Verdict(correct=False, extracted=None)
        return Verdict(correct=correct, extracted=self.as_text(extracted))

    def judge(self, response: str, answer: str, prompt: str = "") -> bool:
        """True if the answer of one response is correct. Raises ValueError for a reference that the rule cannot use."""
        return self.verdict(response, answer, prompt).correct

    def reference_problem(self, answer: str) -> str:
        """Why no response can be correct with the reference `answer`, for a sentence about it; "" if one can.

        A reference that states the answer in words equals only a response that does, which no model writes.
        """
        if self.says_more(answer):
            return self.unusable(answer)
        try:
            return "" if self.judge(self.state(answer), answer) else self.unusable(answer)
        except ValueError:
            return self.unusable(answer)

    def says_more(self, answer: str) -> bool:
        """True if the reference `answer` is more than the answer, and the rule needs the answer alone; a box is it."""
        return self.alone and not boxed(answer) and STATEMENT.search(answer) is not None

    def unusable(self, answer: str) -> str:
        """The sentence about a reference that no response can equal, without its subject."""
        return f"must be {self.needs}, with reward.function={self.name}; no response can equal {answer[-80:]!r}"


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


_CHOICE = re.compile(
    r"\\boxed\{\s*(?:\\(?:text|math)(?:bf|rm|sf|it)?\s*\{\s*)?\(?([A-Z])(?:(?P<alone>\)?\.?\s*\}?\s*\}\Z)|[).:])"
)
"""A box with a letter, alone or before the choice that it names: B, \\textbf{(B)} 12, B. 12."""
_PERCENT = r"\%"
_SHARE = re.compile(r"\\boxed\{([^{}]*)\\%\s*\}\Z")


def same_mathematics(extracted: str, answer: str) -> bool:
    """True if math-verify finds two expressions equal: 1/2 is 0.5, {1, 2} is {2, 1}.

    It reads no per cent sign in a box. Here 50\\% is 50, as in MATH's own scorer, and 0.5.
    math-verify bounds its own work with SIGALRM, which a computation in C ignores. So its timeouts are off, and
    `rollout/user_code` kills the process at the deadline. Raises ValueError for a reference that it cannot read.
    """
    from math_verify import verify

    boxes = as_boxed(answer), extracted
    asked, chosen = map(_CHOICE.match, boxes)
    if asked and asked["alone"] and chosen:
        return asked[1] == chosen[1]
    reference, found = (_expressions(box.replace(_PERCENT, "") if boxed(box) else box) for box in boxes)
    if not reference:
        raise ValueError(f"reward.function=math cannot read the reference answer {answer[-80:]!r}")
    if not found or verify(reference, found, timeout_seconds=None):
        return bool(found)
    shares = [_SHARE.sub(r"\\boxed{\\frac{\1}{100}}", box) for box in boxes]
    return shares != [*boxes] and bool(verify(*map(_expressions, shares), timeout_seconds=None))


def _expressions(text: str) -> list[Any]:
    """What math-verify finds in `text`: an expression of sympy, then its text; empty if it finds none."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    # math-verify logs with every call that its timeouts are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    config = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    found: list[Any] = parse(text, extraction_config=config, parsing_timeout=None)
    return found


def expression_text(extracted: str) -> str | None:
    """The expression in the box, or else the one that math-verify finds; None if it finds none."""
    found = boxed(extracted)
    if found is None:
        expressions = _expressions(extracted)
        return str(expressions[-1]) if expressions else None
    return found


def as_boxed(answer: str) -> str:
    """The reference in a box, because parts of a bare reference would be taken for the whole."""
    latex = latex_signs(answer)
    return latex if "\\boxed" in latex else f"\\boxed{{{bare(latex)}}}"


def as_marked(answer: str) -> str:
    """The number of a reference of GSM8K after the mark."""
    return f"{ANSWER_MARK} {answer.rpartition(ANSWER_MARK)[2].strip()}"


_NUMBER = "a number, or text that ends with '#### number'"
RULES: dict[str, RewardRule] = {
    rule.name: rule
    for rule in (
        RewardRule(
            name="exact_match",
            read=str.strip,
            equal=same_text,
            state=str,
            needs="text",
            answer_key=str.strip,
            with_thoughts=True,
        ),
        RewardRule(
            name="gsm8k",
            read=marked_number,
            equal=same_number,
            state=as_marked,
            needs=_NUMBER,
            marks=(ANSWER_MARK,),
        ),
        RewardRule(name="gsm8k_flexible", read=last_number, equal=same_number, state=as_marked, needs=_NUMBER),
        RewardRule(
            name="math",
            read=boxed_or_tail,
            equal=same_mathematics,
            state=as_boxed,
            needs=f"an expression that math-verify can read, of at most {MAX_EXPRESSION_CHARS} characters",
            answer_key=normalise,
            alone=True,
            as_text=expression_text,
            at_once=1,
            marks=("\\boxed",),
        ),
        RewardRule(
            name="math_dapo",
            read=dapo_answer,
            equal=same_normalised,
            state="Answer: {}".format,
            answer_key=normalise,
            alone=True,
            needs="one line with the answer alone, without its derivation",
            marks=("Answer:", "\\boxed"),
        ),
    )
}
"""Name of a built-in choice of `reward.function` -> rule; path.py:function is the other choice."""
