"""Reward functions: (response text, reference answer) -> correct or not. Plain string work, nothing is executed.

`rollout/rewards/scorer.py` turns the verdict into a reward. A new function is a function and a row of `REWARDS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal

RewardFn = Callable[[str, str], bool]
"""(response text, reference answer) -> whether the response is correct."""

ANSWER_MARK = "####"
GSM8K_TAIL_CHARS = 300
"""Only the end of a response can hold its answer; also bounds the work on a response of any length."""

_NUMBER = re.compile(
    r"-?\$?-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?"
    # The number ends here: "3/4" is not 3, "1.2.3" is not 1.2, "1,23" is not 1.
    r"(?![0-9/^*]|[.,][0-9]|[eE][0-9])"
)


def exact_match(response: str, answer: str) -> bool:
    """Whether the response is the reference answer, leading and trailing white space aside."""
    return response.strip() == answer.strip()


def gsm8k(response: str, answer: str) -> bool:
    """Whether the number after the last "####" of the response's end equals the reference number.

    The number must follow the mark directly, white space aside; a dollar sign and thousands commas are removed and
    "18.00" equals "18". A reference with a working keeps only what follows its last "####". Raises ValueError for
    a reference that is not a number. Source: the answer format of GSM8K (Cobbe et al., arXiv:2110.14168).
    """
    reference = _to_number(answer.rpartition(ANSWER_MARK)[2], whole=True)
    if reference is None:
        raise ValueError(
            f"reward.function=gsm8k needs a reference answer that is a number or ends with '#### number', "
            f"got {answer[-80:]!r}"
        )
    _, mark, tail = response[-GSM8K_TAIL_CHARS:].rpartition(ANSWER_MARK)
    return bool(mark) and _to_number(tail, whole=False) == reference


REWARDS: dict[str, RewardFn] = {"exact_match": exact_match, "gsm8k": gsm8k}
"""Choices of `reward.function`."""


def reward_names() -> list[str]:
    """The choices of `reward.function`, sorted."""
    return sorted(REWARDS)


def _to_number(text: str, *, whole: bool) -> Decimal | None:
    """The number at the beginning of `text`, or, if `whole`, the number that `text` is."""
    stripped = text.strip()
    found = _NUMBER.fullmatch(stripped) if whole else _NUMBER.match(stripped)
    if found is None or found.group().count("-") > 1:
        return None
    return Decimal(found.group().replace(",", "").replace("$", ""))
