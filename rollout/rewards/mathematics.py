"""Equality of mathematical expressions by the math-verify library. Runs in reward workers only.

math-verify bounds its own work with SIGALRM, which a computation in C ignores. So its timeouts are off, and
`rollout/rewards/pool.py` kills the process at the deadline.
"""

from __future__ import annotations

import logging

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

_CONFIG = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
# math-verify logs with every call that its timeouts are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def equal_expressions(extracted: str, answer: str) -> bool:
    """True if the expression in `extracted` equals the reference `answer`: 1/2 is 0.5, {1, 2} is {2, 1}.

    Raises ValueError for a reference that math-verify cannot read.
    """
    # The reference is boxed, because parts of a bare reference would be taken for the whole.
    reference = _parsed(answer if "\\boxed" in answer else f"\\boxed{{{answer}}}")
    if not reference:
        raise ValueError(f"reward.function=math cannot read the reference answer {answer[-80:]!r}")
    found = _parsed(extracted)
    return bool(found) and bool(verify(reference, found, timeout_seconds=None))


def _parsed(text: str) -> list[object]:
    found: list[object] = parse(text, extraction_config=_CONFIG, parsing_timeout=None)
    return found
