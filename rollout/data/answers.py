"""Answers: response text -> the answer that the response states, as text. Bounded string work; nothing is executed."""

from __future__ import annotations

import re
from decimal import Decimal

ANSWER_MARK = "####"
TAIL_CHARS = 300
"""Characters at the end of a response in which the answer must stand; bounds the work on a response of any length."""
BOXED_TAIL_CHARS = 2000
"""Characters at the end of a response in which the last boxed expression must begin."""
MAX_EXPRESSION_CHARS = 400
"""Longest possible answer, characters; a longer expression could only keep a parser busy."""

THOUGHT_MARKS = (
    "<think>", "<thinking>", "<thought>", "<reasoning>", "<seed:think>", "[think]", "◁think▷", "<|begin_of_thought|>",
)  # fmt: skip
"""Marks of several model families, in lower case, that open a thought; </think> and its like close one."""
_OPENS = "|".join(map(re.escape, THOUGHT_MARKS))
_CLOSES = r"</(?:think|thinking|thought|reasoning|seed:think)>|\[/think\]|◁/think▷|<\|end_of_thought\|>"
_THOUGHT = re.compile(f"(?P<opens>{_OPENS})|{_CLOSES}", re.IGNORECASE)

_NUMBER = re.compile(
    r"-?\$?-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?"
    # The number must end here: "3/4" is not 3, "1.2.3" is not 1.2, "1,23" is not 1.
    r"(?![0-9/^*]|[.,][0-9]|[eE][0-9])"
)
# No look-ahead: in free text the last number is wanted, whatever text follows.
_ANY_NUMBER = re.compile(r"-?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")
_DAPO_ANSWER = re.compile(r"answer\s*:[ \t*]*([^\n]+)", re.IGNORECASE)
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")


def stated(response: str, prompt: str = "") -> str | None:
    """What the response says after its thoughts; None if it ends inside of a thought, which states no answer.

    A thought is opened by the response, or by a prompt that ends with one of THOUGHT_MARKS, as chat templates do.
    """
    if marks := list(_THOUGHT.finditer(response)):
        return None if marks[-1]["opens"] else response[marks[-1].end() :]
    return None if prompt.rstrip()[-TAIL_CHARS:].lower().endswith(THOUGHT_MARKS) else response


def to_number(text: str, *, whole: bool) -> Decimal | None:
    """The number at the beginning of `text`, or, if `whole`, the number that makes up all of `text`."""
    stripped = text.strip()
    found = _NUMBER.fullmatch(stripped) if whole else _NUMBER.match(stripped)
    if found is None or found.group().count("-") > 1:
        return None
    return Decimal(found.group().replace(",", "").replace("$", ""))


def marked_number(response: str) -> str | None:
    """The number directly after the last "####" of the response's end; see `rollout/rewards/rules.py`, gsm8k.

    A dollar sign and thousands commas are removed. Source: the format of GSM8K (Cobbe et al., arXiv:2110.14168).
    """
    _, mark, tail = response[-TAIL_CHARS:].rpartition(ANSWER_MARK)
    number = to_number(tail, whole=False) if mark else None
    return None if number is None else plain_number(number)


def last_number(response: str) -> str | None:
    """The last number of the response's end, whatever text surrounds it."""
    found = _ANY_NUMBER.findall(response[-TAIL_CHARS:])
    return plain_number(Decimal(found[-1].replace(",", "").replace("$", ""))) if found else None


def boxed(response: str) -> str | None:
    r"""The content of the last complete \boxed{...} or \fbox{...} of the response's end, braces balanced."""
    tail = response[-BOXED_TAIL_CHARS:]
    for found in reversed(list(_BOXED.finditer(tail))):
        depth = 1
        for position in range(found.end(), len(tail)):
            depth += {"{": 1, "}": -1}.get(tail[position], 0)
            if depth == 0:
                return tail[found.end() : position].strip()
    return None


def boxed_or_tail(response: str) -> str | None:
    r"""The boxed expression as \boxed{...}, or the end of the response, in which math-verify then searches."""
    found = boxed(response)
    if found is None:
        return response[-TAIL_CHARS:].strip() or None
    return f"\\boxed{{{found}}}" if 0 < len(found) <= MAX_EXPRESSION_CHARS else None


def dapo_answer(response: str) -> str | None:
    r"""The text after the last "Answer:" of the response's end, or the last \boxed{...} there, normalised.

    Source: DAPO, arXiv:2503.14476, whose prompt asks for a last line of the form "Answer: $Answer".
    """
    found = _DAPO_ANSWER.findall(response[-TAIL_CHARS:])
    stated = found[-1] if found else boxed(response[-TAIL_CHARS:])
    if stated is None:
        return None
    return normalise(stated) or None


_ORNAMENTS = re.compile(r"\\(?:left|right|displaystyle|!|,|;|:| |quad)|[$\s]|\\\(|\\\)|\\\[|\\\]")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox|mathbf|rm)\s*\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\[dt]?frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])")
_UNITS = re.compile(
    r"(?<=[0-9}])(?:degrees?|\^\\circ|\^\{\\circ\}|\\circ|\\%|%|dollars?|cents?|units?|square\w*|cubic\w*|inches|feet|"
    r"hours?|minutes?|days?|meters?|miles?|cm|km|kg|points?)$"
)


def normalise(answer: str) -> str:
    """The answer without parts that do not change its value: a box, LaTeX ornaments, units after a number, commas.

    Follows Lewkowycz et al. 2022 (Minerva), appendix D.1: answers are compared as text. The result is never longer than
    MAX_EXPRESSION_CHARS.
    """
    text = (boxed(answer) or answer).strip()[:MAX_EXPRESSION_CHARS].rsplit("=", 1)[-1]
    text = _TEXT.sub(r"\1", text.replace("\\$", ""))
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _ORNAMENTS.sub("", text).rstrip(".,;")
    text = _UNITS.sub("", text)
    number = to_number(text, whole=True)
    return text if number is None else plain_number(number)


def plain_number(number: Decimal) -> str:
    """The shortest decimal text of a number: 18 and 18.00 are both "18"; -0 is "0"."""
    text = format(number, "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text
