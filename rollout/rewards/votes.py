"""Votes of sampled responses: answers that are equal by the rule that judges are one answer.

A correct response states the reference, so correct responses agree with each other. Wrong answers in different writing
are compared pair by pair, where the outcome of the vote depends on it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from rollout.data.answers import plain_number, to_number
from rollout.rewards.answer_rules import RULES
from rollout.rewards.reward_pool import is_correct, judged
from rollout.task_config import RewardConfig

Vote = tuple[str | None, bool]
"""(the answer that a response states, True if it is correct); None states none."""
MAX_COMPARED = 32
"""Different wrong answers to one prompt that are compared, the most frequent first: at most 496 pairs."""


def merged_votes(config: RewardConfig, votes: Sequence[Sequence[Vote]]) -> list[list[Vote]]:
    """The votes of each prompt with one writing for wrong answers that the rule finds equal.

    Rules that compare texts have one writing anyway. With `math`, workers compare the pairs, each within
    reward.timeout_s; a pair whose comparison fails stays two answers. Raises UserCodeError if no worker starts.
    """
    rule = RULES.get(config.function)
    if rule is None or not rule.parses:
        return [list(each) for each in votes]
    plain = [[(_plain(answer), correct) for answer, correct in each] for each in votes]
    pairs = [(number, *pair) for number, each in enumerate(plain) for pair in _open_pairs(each)]
    items = [{"response": rule.state(one), "answer": other, "prompt": ""} for _, one, other in pairs]
    same: dict[tuple[int, str], str] = {}
    for (number, one, other), outcome in zip(pairs, judged(config, items), strict=True):
        if is_correct(outcome):  # pairs come in order, so the first writing of an answer is its name
            same.setdefault((number, other), same.get((number, one), one))
    return [
        [(answer if answer is None else same.get((number, answer), answer), correct) for answer, correct in each]
        for number, each in enumerate(plain)
    ]


def _plain(answer: str | None) -> str | None:
    number = None if answer is None else to_number(answer, whole=True)
    return answer if number is None else plain_number(number)


def _open_pairs(votes: Sequence[Vote]) -> list[tuple[str, str]]:
    """Pairs of wrong answers whose equality can change the outcome; two numbers differ if their text does."""
    wrong = Counter(answer for answer, correct in votes if answer is not None and not correct)
    num_correct = sum(correct for _, correct in votes)
    if not 0 < num_correct <= wrong.total() or wrong.most_common(1)[0][1] > num_correct:
        return []
    answers = [answer for answer, _ in wrong.most_common(MAX_COMPARED)]
    numbers = {answer for answer in answers if to_number(answer, whole=True) is not None}
    return [pair for pair in itertools.combinations(answers, 2) if not numbers.issuperset(pair)]
