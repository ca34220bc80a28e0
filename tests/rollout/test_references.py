"""References, tried by their rule before a run: those that no response can equal are found, and no others."""

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.rewards import RULES, references, unusable_references
from rollout.task_config import RewardConfig

SOLUTION = "We add the numbers.\nThen 3 + 4 = 7, so the sum is 7."


@pytest.mark.parametrize(
    ("function", "usable", "unusable"),
    [
        ("exact_match", ["34", "about 5", SOLUTION], []),
        (
            "gsm8k",
            ["34", "so it is\n#### 1,234", "$7.50", "-3"],
            ["about 5", "9 (apples)", "1e-05", "3/4", SOLUTION],
        ),
        ("gsm8k_flexible", ["34", "so\n#### -1,234"], ["1/2", "7 apples", r"\boxed{7}", "1" * 400]),
        (
            "math",
            [
                "34",
                r"\frac12",
                r"\boxed{34}",
                "$34$",
                "(1, 2]",
                "Evelyn",
                "42.",
                "**42**",
                r"The answer is $\boxed{4}$.",
            ],
            [
                "x + " * 200 + "x",
                SOLUTION * 20,
                "}{",
                "Answer: 42",
                "$<<4+2=6>>6\n#### 6",
                "array(['20'], dtype=object)",
                "np.float64(5.0)",
                "tensor(5.)",
                "nan",
                "<NA>",
                "-inf",
            ],
        ),
        (
            "math_dapo",
            ["34", r"\boxed{34}", "$34$", r"x = \frac12", "Evelyn", r"The answer is $\boxed{4}$."],
            [
                SOLUTION,
                "7\n8",
                "x" * 301,
                r"\text{}",
                '["20"]',
                "['20']",
                "{'answer': 42}",
                "The answer is 42.",
                '{"answer": 42}',
                "7. #### 7",
                "array(['20'], dtype=object)",
                "np.int64(5)",
                "Decimal('5')",
                "NaN",
                "inf",
            ],
        ),
    ],
)
def test_references_that_no_response_can_equal_are_found(function, usable, unusable):
    found = unusable_references(RewardConfig(function=function, num_workers=1), [*usable, *unusable])
    assert sorted(found) == list(range(len(usable), len(usable) + len(unusable)))
    for position, problem in found.items():
        answer = [*usable, *unusable][position]
        assert problem.startswith("must be ") and f"reward.function={function}" in problem
        assert repr(answer[-80:]) in problem


def test_rows_with_one_reference_have_one_verdict():
    config = RewardConfig(function="gsm8k")
    assert list(unusable_references(config, ["1", "none", "2", "none"])) == [1, 3]
    assert unusable_references(config, []) == {}


def test_a_function_of_ones_own_alone_knows_its_references():
    assert unusable_references(RewardConfig(function="no/file.py:reward"), ["", "any"]) == {}


def test_a_reference_that_hangs_its_worker_is_the_problem_of_its_row():
    hanging = "(" * 199 + "1" + ")" * 199
    answers = [r"\sqrt{2}", hanging, r"\sqrt{3}"]
    found = unusable_references(RewardConfig(function="math", num_workers=1, timeout_s=1.0), answers)
    assert list(found) == [1]
    assert "no answer within 1 s" in found[1]


@settings(max_examples=50, deadline=None)
@given(text=st.from_regex(references._READABLE, fullmatch=True))
def test_references_that_are_not_parsed_before_a_run_can_be_read(text):
    assert RULES["math"].reference_problem(text) == ""


@pytest.mark.skipif("PARITY_TEST_DATA" not in os.environ, reason="PARITY_TEST_DATA is not set")
@pytest.mark.parametrize("function", ["gsm8k", "gsm8k_flexible"])
def test_all_references_of_gsm8k_are_tried_within_a_second(function):
    path = Path(os.environ["PARITY_TEST_DATA"]) / "gsm8k" / "train.jsonl"
    answers = [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]
    begin_s = time.process_time()
    assert unusable_references(RewardConfig(function=function), answers) == {}
    assert time.process_time() - begin_s < 1.0


@pytest.mark.parametrize("reference", ["42.", "**42**", " 42 "])
def test_ornaments_of_a_reference_change_no_verdict(reference):
    assert RULES["math"].judge(r"\boxed{42}", reference)
    assert RULES["math"].judge(r"\boxed{42.}", reference)


@pytest.mark.parametrize("answer", ["No answer is possible", "The answer is not unique", "x << y"])
def test_an_answer_in_words_is_a_reference(answer):
    assert RULES["math_dapo"].reference_problem(answer) == ""
