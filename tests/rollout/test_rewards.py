"""Rewards: verdicts by hand, hostile text, the overlong penalty, and the real GSM8K references."""

import json
import math
import os
import subprocess
import sys
from contextlib import closing
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.rewards import RULES, RewardError, Scorer, try_reward
from rollout.rewards.custom import reply_of
from rollout.rewards.scorer import overlong_penalty
from rollout.task_config import RewardConfig
from rollout.types import FinishReason, Prompt, Sample, SampleGroup


def exact_match(response, answer):
    return RULES["exact_match"].judge(response, answer)


def gsm8k(response, answer):
    return RULES["gsm8k"].judge(response, answer)


@pytest.mark.parametrize(
    ("response", "answer", "correct"),
    [
        ("42", "42", True),
        (" 42\n", "42 ", True),
        ("42.", "42", False),
        ("4 2", "42", False),
        ("", "42", False),
        ("Yes", "yes", False),
    ],
)
def test_exact_match(response, answer, correct):
    assert exact_match(response, answer) is correct


@pytest.mark.parametrize(
    ("response", "correct"),
    [
        ("so it is #### 1234", True),
        ("#### 1,234", True),
        ("#### $1,234", True),
        ("####1234", True),
        ("#### 1234.00", True),
        ("#### 1234.", True),
        ("#### 1234 eggs", True),
        ("#### 7\nno: #### 1234", True),
        ("#### 1234\nno: #### 7", False),
        ("1234", False),
        ("### 1234", False),
        ("#### the answer is 1234", False),
        ("#### 1234/2", False),
        ("#### 1234.5", False),
        ("#### 12345", False),
        ("#### 1234e2", False),
        ("#### 1234^2", False),
        ("#### -1234", False),
        ("#### --1234", False),
        ("#### 1.234", False),
        ("#### 123,4", False),
        ("#### 1234,567", False),
        ("#### ", False),
        ("####", False),
        ("", False),
        ("#### 1234" + " " * 300, False),
        ("x" * 10_000 + "#### 1234", True),
        ("#### \u0661\u0662\u0663\u0664", False),
        ("#### __import__('os').system('true')", False),
    ],
)
def test_gsm8k_reads_the_number_after_the_last_mark(response, correct):
    assert gsm8k(response, "she has 1,200 + 34 = 1,234\n#### 1,234") is correct
    assert gsm8k(response, "1234") is correct


@pytest.mark.parametrize(
    ("response", "answer", "correct"),
    [
        ("#### -3", "#### -3", True),
        ("#### $-3", "-3", True),
        ("#### -$3", "-3", True),
        ("#### 3", "-3", False),
        ("#### 0.50", "0.5", True),
        ("#### -0", "0", True),
        ("#### 007", "7", True),
    ],
)
def test_gsm8k_compares_numbers_not_text(response, answer, correct):
    assert gsm8k(response, answer) is correct


def test_gsm8k_refuses_a_reference_that_is_no_number():
    with pytest.raises(ValueError, match=r"the reference answer must be a number .* got 'forty-two'"):
        gsm8k("#### 42", "forty-two")


@given(st.text(alphabet="#0123456789,.$-/eE \n\x00\ud800", max_size=400))
def test_gsm8k_survives_any_response(response):
    assert gsm8k(response, "42") in (True, False)


@given(st.integers(-(10**30), 10**30))
def test_gsm8k_accepts_every_integer_in_both_notations(number):
    assert gsm8k(f"#### {number:,}", str(number))
    assert gsm8k(f"#### {number}", f"#### {number:,}")
    assert not gsm8k(f"#### {number + 1}", str(number))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    # max 20, buffer 4, penalty 2: free up to 16, then half a point per token.
    [(1, 0.0), (16, 0.0), (17, -0.5), (18, -1.0), (19, -1.5), (20, -2.0), (25, -2.0)],
)
def test_overlong_penalty_by_hand(tokens, expected):
    assert overlong_penalty(tokens, max_new_tokens=20, buffer_tokens=4, penalty=2.0) == expected


def test_without_a_buffer_there_is_no_penalty():
    assert overlong_penalty(20, max_new_tokens=20, buffer_tokens=0, penalty=1.0) == 0.0


def make_group(responses, *, answer):
    """Responses are lists of token ids after a prompt of two tokens."""
    prompt = Prompt(prompt_id=5, token_ids=[50, 51], text="?", answer=answer)
    samples = [
        Sample(
            prompt_id=5,
            sample_index=index,
            token_ids=[50, 51, *response],
            response_mask=[False, False] + [True] * len(response),
            rollout_logprobs=[0.0, 0.0] + [-0.5] * len(response),
            token_versions=[0] * (2 + len(response)),
            finish_reason=FinishReason.stop,
        )
        for index, response in enumerate(responses)
    ]
    return SampleGroup(prompt=prompt, samples=samples)


def as_digits(token_ids):
    return "".join(str(token) for token in token_ids)


def test_scorer_fills_text_verdict_and_shaped_reward():
    config = RewardConfig(correct=1.0, incorrect=-1.0, overlong_buffer_tokens=2, overlong_penalty=0.5)
    group = make_group([[4, 2], [4, 3], [0, 4, 2, 7], [4, 2, 0, 0, 0]], answer="42")
    Scorer(config, max_new_tokens=5, decode=as_digits).score([group])
    assert [sample.text for sample in group.samples] == ["42", "43", "0427", "42000"]
    assert [sample.correct for sample in group.samples] == [True, False, False, False]
    # 4 of 5 tokens: half the buffer; 5 of 5: all of it.
    assert group.rewards == [1.0, -1.0, -1.25, -1.5]


@pytest.mark.parametrize(
    "source",
    [
        "def reward(response, row): return {'score': row['weights'][response], 'n': len(row)}",
        "def reward(responses, rows):\n  return [{'score': r['weights'][a], 'n': 2} for a, r in zip(responses, rows)]",
    ],
)
def test_a_function_of_ones_own_is_given_the_row(tmp_path, source):
    (tmp_path / "own_row_reward.py").write_text(source, encoding="utf-8")
    group = make_group([[4, 2], [7]], answer="42")
    group.prompt.row = {"weights": {"42": 0.25, "7": 2}, "kind": None}
    config = RewardConfig(function=f"{tmp_path}/own_row_reward.py:reward", num_workers=1)
    with closing(Scorer(config, max_new_tokens=5, decode=as_digits)) as scorer:
        scorer.score([group])
        assert group.rewards == [0.25, 2.0]
        assert [sample.reward_parts for sample in group.samples] == [{"n": 2.0}, {"n": 2.0}]


@pytest.mark.parametrize(
    "source",
    [
        "def reward(raw_response, response): return float(raw_response == f'<{response}>')",
        "def reward(raw_responses, responses): return [float(r == f'<{t}>') for r, t in zip(raw_responses, responses)]",
    ],
)
def test_a_function_of_ones_own_can_ask_for_the_text_with_special_tokens(tmp_path, source):
    (tmp_path / "own_raw_reward.py").write_text(source, encoding="utf-8")
    group = make_group([[4, 2], [7]], answer="42")
    config = RewardConfig(function=f"{tmp_path}/own_raw_reward.py:reward", num_workers=1)
    raw = {"decode": as_digits, "decode_raw": lambda tokens: f"<{as_digits(tokens)}>"}
    with closing(Scorer(config, max_new_tokens=5, **raw)) as scorer:
        scorer.score([group])
    assert group.rewards == [1.0, 1.0]
    assert try_reward(config, group.prompt) == ""


@pytest.mark.parametrize("results", ["{0: 0.5, 1: 0.5}", "{0.5, 1.0}", "b'10'", "'10'", "numpy.zeros((2, 2))"])
def test_what_is_no_list_of_results_is_an_error_of_each_response(tmp_path, results):
    """The keys of a dict, and the members of a set, are no rewards."""
    source = f"import numpy\ndef reward(responses): return {results}"
    (tmp_path / "own_no_list.py").write_text(source, encoding="utf-8")
    group = make_group([[4, 2], [7]], answer="42")
    config = RewardConfig(function=f"{tmp_path}/own_no_list.py:reward", num_workers=1)
    assert "2 responses need a list of as many results" in try_reward(config, group.prompt).replace("3 resp", "2 resp")


def test_scoring_a_few_groups_leaves_other_samples_to_poll():
    group = make_group([[4, 2], [4, 3]], answer="42")
    with closing(Scorer(RewardConfig(num_workers=1), max_new_tokens=5, decode=as_digits)) as scorer:
        for sample in group.samples:
            scorer.submit(group.prompt, sample)
        other = make_group([[4, 2]], answer="42")
        scorer.score([other])  # an evaluation while a step is being collected
        assert other.rewards == [1.0]
        assert scorer.unfinished == 2
        found = []
        while scorer.unfinished:
            found += scorer.poll(60.0)
    assert [sample.reward for sample in found] == group.rewards == [1.0, 0.0]


def test_a_function_may_take_longer_to_import_than_a_call(tmp_path, monkeypatch):
    """Its worker counts as lost only after the time for the start, whatever the deadline of a call is."""
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(2.5)\ndef reward(response): return 0.25\n")
    monkeypatch.setattr("rollout.user_code.pool.GRACE_S", 1.0)
    config = RewardConfig(function=f"{tmp_path}/slow.py:reward", timeout_s=0.5)
    scorer = Scorer(config, max_new_tokens=5, decode=as_digits)
    group = make_group([[4, 2]], answer="42")
    try:
        scorer.submit(group.prompt, group.samples[0])
        while not (found := scorer.poll(0.2)):
            pass
    finally:
        scorer.close()
    assert [sample.reward for sample in found] == [0.25]


@pytest.mark.parametrize("wrap", ["np.bool_", "lambda x: torch.tensor([x])"])
@pytest.mark.parametrize("form", ["{}", "{{'score': 2 if {} else -1, 'correct': {}, 'right': {}}}"])
def test_a_bool_of_numpy_or_torch_is_a_bool(tmp_path, wrap, form):
    value = "wrap(response == answer)"
    (tmp_path / "own.py").write_text(
        f"import numpy as np, torch\nwrap = {wrap}\ndef reward(response, answer): return {form.format(*[value] * 3)}\n"
    )
    config = RewardConfig(function=f"{tmp_path}/own.py:reward", correct=2.0, incorrect=-1.0, num_workers=1)
    group = make_group([[4, 2], [7]], answer="42")
    with closing(Scorer(config, max_new_tokens=5, decode=as_digits)) as scorer:
        scorer.score([group])
    assert [sample.correct for sample in group.samples] == [True, False]
    assert group.rewards == [2.0, -1.0]
    assert [sample.reward_parts for sample in group.samples] == (
        [{}, {}] if form == "{}" else [{"right": 1.0}, {"right": 0.0}]
    )


@pytest.mark.parametrize(
    ("result", "reply"),
    [
        (np.True_, {"correct": True}),
        (np.array(False), {"correct": False}),
        (np.array([[True]]), {"correct": True}),
        (np.array([True], dtype=object), {"correct": True}),
        (torch.tensor(False), {"correct": False}),
        (np.float32(0.9), {"score": 0.9}),
        (torch.tensor(0.9), {"score": 0.9}),
        ({"score": np.float16(0.7)}, {"score": 0.7, "correct": None, "metrics": {}}),
        (np.int8(-3), {"score": -3.0}),
        (np.longdouble(0.25), {"score": 0.25}),
        (torch.tensor([[0.5]], requires_grad=True), {"score": 0.5}),
        (torch.tensor(0.5, dtype=torch.bfloat16), {"score": 0.5}),
        (Decimal("0.5"), {"score": 0.5}),
        (Fraction(1, 2), {"score": 0.5}),
        ({"score": np.True_}, {"score": 1.0, "correct": None, "metrics": {}}),
        ({"score": 1, "correct": None, "n": np.int32(4)}, {"score": 1.0, "correct": None, "metrics": {"n": 4.0}}),
        ({"score": 1, "a": None, "b/c": np.True_}, {"score": 1.0, "correct": None, "metrics": {"b/c": 1.0}}),
        ({"score": 1, "a": math.nan}, None),
        ([True, np.False_], None),
        (np.array([True, False]), None),
        (np.array([]), None),
        (torch.tensor([1.0, 2.0]), None),
        (np.str_("1.0"), None),
        (np.array("yes"), None),
        (np.complex64(1), None),
        (np.float64("nan"), None),
        (np.ma.masked, None),
        (np.ma.array([5], mask=[True]), None),
        ({"score": 1, "correct": np.int64(1)}, None),
        ({"score": 1, "correct": np.str_("yes")}, None),
    ],
)  # fmt: skip
def test_values_of_numpy_and_torch_are_what_they_stand_for(result, reply):
    found = reply_of(result)
    assert list(found) == ["error"] if reply is None else found == reply


@pytest.mark.filterwarnings("error")
def test_a_coroutine_that_nobody_awaits_is_named():
    async def inner():
        return 1.0

    assert "its outermost decorator must be an async def" in reply_of(inner())["error"]


def test_many_results_may_be_one_array(tmp_path):
    (tmp_path / "own.py").write_text(
        "import numpy as np\ndef reward(responses, answers): return np.array(responses) == np.array(answers)\n"
    )
    config = RewardConfig(function=f"{tmp_path}/own.py:reward", correct=2.0, incorrect=-1.0, num_workers=1)
    group = make_group([[4, 2], [7]], answer="42")
    with closing(Scorer(config, max_new_tokens=5, decode=as_digits)) as scorer:
        scorer.score([group])
    assert group.rewards == [2.0, -1.0]


@pytest.mark.parametrize(
    ("prompt", "response", "correct", "extracted"),
    [
        ("3 + 4?", r"<think>\boxed{8}</think>\boxed{7}", True, "7"),
        ("3 + 4?", r"<think>\boxed{7}", False, None),
        ("3 + 4?<think>\n", r"\boxed{7}", False, None),
        ("3 + 4?<think>\n", r"hm</think>so $7$", True, "7"),
        ("3 + 4?", "I cannot tell.", False, None),
    ],
)
def test_the_answer_that_is_judged_is_kept_and_thoughts_have_none(prompt, response, correct, extracted):
    group = make_group([[1]], answer="7")
    group.prompt.text = prompt
    with closing(
        Scorer(RewardConfig(function="math", num_workers=1), max_new_tokens=5, decode=lambda _: response)
    ) as it:
        it.score([group])
    (sample,) = group.samples
    assert (sample.correct, sample.extracted) == (correct, extracted)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return float(row['a'] + response == 'x12')", ""),
        ("return 1 / 0", "ZeroDivisionError"),
        ("return float(response)", "for the response 'I do not know.'"),
        ("return None", "NoneType"),
        ("return float(response[0] == '1')", "IndexError"),  # a response may be empty
    ],
)
def test_a_function_is_tried_with_the_answer_of_a_prompt(tmp_path, body, reason):
    (tmp_path / "own.py").write_text(f"def reward(response, row): {body}\n")
    prompt = Prompt(prompt_id=0, token_ids=[], text="?", answer="12", row={"a": "x"})
    said = try_reward(RewardConfig(function=f"{tmp_path}/own.py:reward"), prompt)
    assert reason in said and bool(said) is bool(reason)


def test_a_function_of_many_responses_is_tried_with_more_than_one(tmp_path):
    (tmp_path / "own.py").write_text("def reward(responses, answers): return [1.0]\n")
    prompt = Prompt(prompt_id=0, token_ids=[], text="?", answer="12", row={})
    assert "3 responses need as many results, got 1" in try_reward(
        RewardConfig(function=f"{tmp_path}/own.py:reward"), prompt
    )


def test_a_function_of_many_responses_that_returns_no_list_is_told_so(tmp_path):
    (tmp_path / "own.py").write_text("def reward(responses, answers): return 1.0\n")
    prompt = Prompt(prompt_id=0, token_ids=[], text="?", answer="12", row={})
    said = try_reward(RewardConfig(function=f"{tmp_path}/own.py:reward"), prompt)
    assert "3 responses need a list of as many results, got a float" in said


def test_scorer_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match=r"reward\.function must be one of exact_match, .*, got 'maths'"):
        Scorer(RewardConfig(function="maths"), max_new_tokens=5, decode=as_digits)
    with pytest.raises(ValueError, match=r"reward\.function must name an existing file; there is no .*/no/file\.py"):
        Scorer(RewardConfig(function="no/file.py:reward"), max_new_tokens=5, decode=as_digits)
    with pytest.raises(ValueError, match=r"reward\.overlong_buffer_tokens must be < sampling\.max_new_tokens \(5\)"):
        Scorer(RewardConfig(overlong_buffer_tokens=5), max_new_tokens=5, decode=as_digits)
    scorer = Scorer(RewardConfig(function="gsm8k"), max_new_tokens=5, decode=as_digits)
    with pytest.raises(RewardError, match=r"failed on 1 of 1 .* prompt 5/0: ValueError: the reference"):
        scorer.score([make_group([[1]], answer="none")])


def test_names_are_known_without_torch():
    assert sorted(RULES) == ["exact_match", "gsm8k", "gsm8k_flexible", "math", "math_dapo"]
    script = "import sys; from rollout.rewards import RULES; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.skipif("PARITY_TEST_DATA" not in os.environ, reason="PARITY_TEST_DATA is not set")
@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1319)])
def test_every_gsm8k_reference_is_correct_against_itself(split, count):
    path = Path(os.environ["PARITY_TEST_DATA"]) / "gsm8k" / f"{split}.jsonl"
    answers = [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(answers) == count
    for answer in answers:
        number = answer.rpartition("#### ")[2]
        assert gsm8k(f"I think so. #### {number}", answer)
        assert gsm8k(answer, answer)
        assert not gsm8k(f"#### {number}1", answer)
        assert not gsm8k(number, answer)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("#### 18", "18"),
        ("#### $18.00", "18"),
        ("so #### 1,800 eggs", "1800"),
        ("#### 0.50", "0.5"),
        ("#### -0.0", "0"),
        ("#### -3", "-3"),
        ("#### 7\n#### 007", "7"),
        ("18", None),
        ("#### many", None),
    ],
)
def test_gsm8k_answer(response, answer):
    assert RULES["gsm8k"].extract(response) == answer
    assert answer is None or gsm8k(response, answer)


@given(st.lists(st.sampled_from(["#### 18", "18.0", "#### 18.0 eggs", "####18,000", "18000", " 18 "]), min_size=2))
def test_responses_with_one_answer_have_one_verdict(responses):
    for name in ("exact_match", "gsm8k", "gsm8k_flexible", "math_dapo"):
        verdicts = {}
        for response in responses:
            rule = RULES[name]
            verdicts.setdefault(rule.extract(response), set()).add(rule.judge(response, "18"))
        assert all(len(found) == 1 for answer, found in verdicts.items() if answer is not None)
