"""The built-in task: the split, the two authors, the stream of demonstrations and the tokenizer."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rollout.data import arithmetic
from rollout.data.arithmetic import (
    TOKENS,
    ArithmeticProblem,
    arithmetic_problems,
    demonstrations,
    save_tokenizer,
    work_out,
)
from rollout.rewards import RULES


def gsm8k(response, answer):
    return RULES["gsm8k"].judge(response, answer)


def operands(problem: ArithmeticProblem) -> tuple[int, int]:
    left, right = problem.prompt.removesuffix("=").split("+")
    return int(left), int(right)


def digit_sum(number: int) -> int:
    return sum(map(int, str(number)))


def num_carries(problem: ArithmeticProblem) -> int:
    """A carry turns ten units into one of the next column: the digit sum drops by nine (Kummer)."""
    left, right = operands(problem)
    return (digit_sum(left) + digit_sum(right) - digit_sum(left + right)) // 9


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)


def test_every_sum_is_on_exactly_one_side() -> None:
    split = arithmetic_problems()
    assert len(split.heldout) == 200
    assert len(split.train) == 100 * 100 - 200
    prompts = Counter(problem.prompt for problem in [*split.train, *split.heldout])
    assert prompts == Counter(f"{a}+{b}=" for a in range(100) for b in range(100))
    for problem in [*split.train, *split.heldout]:
        assert int(problem.answer) == sum(operands(problem))


@pytest.mark.parametrize("num_heldout", [1, 6, 7, 50])
def test_a_sum_and_its_mirror_image_are_never_on_both_sides(num_heldout: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "MAX_OPERAND", 9)
    monkeypatch.setattr(arithmetic, "NUM_HELDOUT", num_heldout)
    split = arithmetic_problems()
    assert len(split.heldout) == num_heldout
    assert len(split.train) in (100 - num_heldout, 99 - num_heldout)  # one may be left over
    held = {operands(problem) for problem in split.heldout}
    assert not {(right, left) for left, right in held} & {operands(problem) for problem in split.train}
    assert not held & {operands(problem) for problem in split.train}


def test_the_split_depends_on_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first = arithmetic_problems()
    assert first == arithmetic_problems()
    # Written down, so that a change of the split between machines or versions does not pass for the same data.
    assert [problem.prompt for problem in first.heldout[:3]] == ["62+19=", "37+34=", "20+85="]
    monkeypatch.setattr(arithmetic, "SPLIT_SEED", 1)
    other = arithmetic_problems()
    assert set(other.heldout) != set(first.heldout)


@pytest.mark.parametrize(
    ("prompt", "careful", "careless"),
    [
        ("37+58=", "7+8=15, 3+5+1=9 #### 95", "7+8=15, 3+5=8 #### 85"),
        ("57+68=", "7+8=15, 5+6+1=12 #### 125", "7+8=15, 5+6=11 #### 15"),
        ("99+1=", "9+1=10, 9+0+1=10 #### 100", "9+1=10, 9+0=9 #### 90"),
        ("4+81=", "4+1=5, 0+8=8 #### 85", "4+1=5, 0+8=8 #### 85"),
        ("0+0=", "0+0=0 #### 0", "0+0=0 #### 0"),
        ("5+5=", "5+5=10 #### 10", "5+5=10 #### 0"),
        ("995+7=", "5+7=12, 9+0+1=10, 9+0+1=10 #### 1002", "5+7=12, 9+0=9, 9+0=9 #### 992"),
    ],
)
def test_both_authors_work_column_by_column(prompt: str, careful: str, careless: str) -> None:
    problem = ArithmeticProblem(prompt=prompt, answer=careful.rsplit(" ", 1)[1])
    assert work_out(problem, carries=True) == careful
    assert work_out(problem, carries=False) == careless


def test_the_careless_author_is_wrong_exactly_where_something_is_carried() -> None:
    with_carry = 0
    for problem in arithmetic_problems().train:
        assert gsm8k(work_out(problem, carries=True), problem.answer)
        carried = num_carries(problem) > 0
        assert gsm8k(work_out(problem, carries=False), problem.answer) is not carried, problem
        assert (work_out(problem, carries=False) == work_out(problem, carries=True)) is not carried, problem
        with_carry += carried
    # 55 of 100 digit pairs carry nothing, in either column: the greedy accuracy of a base model of careless habits.
    assert with_carry / 9800 == pytest.approx(1 - 0.55**2, abs=0.01)


def test_demonstrations_cover_the_training_problems_and_no_other() -> None:
    train = arithmetic_problems().train
    stream = demonstrations(wrong_fraction=0.6, seed=3)
    first = [next(stream) for _ in train]
    second = [next(stream) for _ in train]
    for one_pass in (first, second):
        assert sorted(demonstration.problem for demonstration in one_pass) == sorted(train)
    assert [d.problem for d in first] != [d.problem for d in second]


@pytest.mark.parametrize("wrong_fraction", [0.0, 0.6, 1.0])
def test_authors_are_drawn_in_the_given_proportion(wrong_fraction: float) -> None:
    stream = demonstrations(wrong_fraction=wrong_fraction, seed=0)
    drawn = [d for d in itertools.islice(stream, 19600) if num_carries(d.problem)]
    wrong = sum(not gsm8k(d.response, d.problem.answer) for d in drawn)
    # Four standard errors of a share of about 13700 draws.
    assert wrong / len(drawn) == pytest.approx(wrong_fraction, abs=0.017 if 0 < wrong_fraction < 1 else 0)


def test_demonstrations_are_decided_by_their_seed() -> None:
    def taken(seed: int) -> list[str]:
        stream = demonstrations(wrong_fraction=0.6, seed=seed)
        return [demonstration.response for demonstration in itertools.islice(stream, 100)]

    assert taken(0) == taken(0)
    assert taken(0) != taken(1)


def test_the_tokenizer_gives_exactly_the_text(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == len(TOKENS) == 16
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    for problem in arithmetic_problems().train[:300]:
        response = work_out(problem, carries=True)
        prompt_ids, response_ids = tokenizer(problem.prompt).input_ids, tokenizer(response).input_ids
        assert len(prompt_ids) == len(problem.prompt)
        assert "".join(TOKENS[token] for token in response_ids) == response
        assert tokenizer.decode(response_ids) == response
        assert tokenizer.decode([*response_ids, 1], skip_special_tokens=True) == response
        assert tokenizer(problem.prompt + response).input_ids == prompt_ids + response_ids
    assert tokenizer("37+58=").input_ids == [5, 9, 12, 7, 10, 13]
    assert tokenizer(", ").input_ids == [14]
    assert tokenizer(" #### ").input_ids == [15]


def test_the_tokenizer_refuses_text_outside_its_vocabulary(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(Exception, match="WordLevel error"):
        tokenizer("3*4=")


def test_problems_need_no_torch(tmp_path: Path) -> None:
    code = "import sys, rollout.data.arithmetic; sys.exit(sorted({'torch', 'transformers'} & set(sys.modules)) or 0)"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
