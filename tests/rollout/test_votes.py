"""Votes: answers that the rule finds equal are one answer, however they are written."""

import pytest

from rollout.collect.evaluate import majority_vote
from rollout.rewards import votes
from rollout.rewards.reward_pool import Judgment, judged
from rollout.rewards.votes import merged_votes
from rollout.task_config import RewardConfig
from rollout.user_code.pool import Outcome


def majority(responses, answer, *, function="math", prompt=""):
    """maj@k of the responses to one prompt, by the workers as in an evaluation."""
    config = RewardConfig(function=function, num_workers=1)
    outcomes = judged(config, [{"response": each, "answer": answer, "prompt": prompt} for each in responses])
    (merged,) = merged_votes(config, [[(each.value.extracted, each.value.correct) for each in outcomes]])
    return majority_vote(merged)


@pytest.mark.parametrize(
    ("responses", "answer", "expected"),
    [
        # Correct responses are one answer.
        ([r"\boxed{\frac{3}{4}}", r"\boxed{0.75}", r"\boxed{3/4}", r"\boxed{1}", r"\boxed{1}"], "0.75", 1.0),
        ([r"\boxed{(x+1)^2}", r"\boxed{x^2+2x+1}", r"\boxed{0}"], "(x+1)(x+1)", 1.0),
        # So are wrong ones.
        ([r"\boxed{5}", r"\boxed{\frac{3}{4}}", r"\boxed{0.75}"], "5", 0.0),
        ([r"\boxed{5}", r"\boxed{5.0}", r"\boxed{x^2-1}", r"\boxed{(x-1)(x+1)}", r"\boxed{-1+x^2}"], "5", 0.0),
        ([r"\boxed{5}", r"\boxed{1,234}", r"\boxed{1234.0}"], "5", 0.0),
        ([r"\boxed{5}", r"\boxed{1{,}234}", r"\boxed{1235}", r"\boxed{1236}"], "5", 1 / 4),
        ([r"\boxed{5}", r"\boxed{\{1, 2\}}", r"\boxed{\{2, 1\}}", r"\boxed{5}"], "5", 0.5),
        # Without a box the expression votes, and no text without an expression.
        (["We get $5$.", "So it must be $5$.", r"\boxed{7}", "It is $7$.", "Therefore $7$."], "5", 0.0),
        (["We get 5", "I cannot tell.", "I do not know.", "No answer"], "5", 1.0),
        (["<think>7", "<think>7", "<think>7</think> so $5$"], "5", 1.0),
    ],
)
def test_math_votes_by_value(responses, answer, expected):
    assert majority(responses, answer) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("function", "responses", "answer"),
    [
        ("gsm8k", ["#### 1,800", "#### $1800.00", "#### 7"], "1800"),
        ("gsm8k", ["#### 1,800", "#### +1800", "<think>#### 7", "<think>#### 7"], "1800"),
        ("gsm8k_flexible", ["1.8e3", "it is 1800", "it is 1/2", "it is 1/2", "it is 7"], "1800"),
        ("math_dapo", ["Answer: 1,800", "**Answer**: $1800$", "Answer: 7"], r"\boxed{1800}"),
        ("exact_match", ["yes", " yes\n", "no"], "yes"),
    ],
)
def test_rules_that_compare_texts_vote_by_what_they_compare(function, responses, answer):
    assert majority(responses, answer, function=function) == 1.0


def test_an_open_thought_of_the_prompt_casts_no_vote():
    responses = [r"\boxed{7}", r"\boxed{7}", r"so</think>\boxed{5}"]
    assert majority(responses, "5", prompt="3 + 2?<think>\n") == 1.0
    assert majority(responses, "5") == 0.0


@pytest.mark.parametrize(
    "decided",
    [
        [("x+1", False), ("1+x", False)],  # nobody is right
        [("5", True)] * 3 + [("x+1", False), ("1+x", False)],  # all of the others together are fewer
        [("5", True)] + [("x+1", False)] * 2 + [("1+x", False)],  # the others have won already
        [("5", True)] + [(str(number), False) for number in range(6, 40)],  # numbers differ as texts do
    ],
)
def test_answers_are_compared_only_where_the_vote_depends_on_it(decided, monkeypatch):
    asked = []
    monkeypatch.setattr(votes, "judged", lambda config, items: asked.extend(items) or [])
    assert merged_votes(RewardConfig(function="math"), [decided]) == [decided]
    assert asked == []


def test_no_more_pairs_are_compared_than_promised(monkeypatch):
    asked = []
    monkeypatch.setattr(
        votes, "judged", lambda config, items: asked.extend(items) or [Outcome(Judgment(correct=False)) for _ in items]
    )
    merged_votes(RewardConfig(function="math"), [[("5", True), *((f"x+{n}", False) for n in range(200))]])
    assert len(asked) == votes.MAX_COMPARED * (votes.MAX_COMPARED - 1) // 2


def test_a_comparison_that_hangs_leaves_two_answers():
    hanging = "(" * 199 + "1" + ")" * 199
    cast = [("5", True), ("x+1", False), ("1+x", False), (hanging, False)]
    (merged,) = merged_votes(RewardConfig(function="math", num_workers=2, timeout_s=1.0), [cast])
    assert [answer for answer, _ in merged] == ["5", "x+1", "x+1", hanging]
