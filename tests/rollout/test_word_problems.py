"""Word problems: right answers, plain English, nothing of the evaluation in the training, and read like a file."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import xxhash
from data_cases import byte_tokenizer

from rollout.data.data_files import is_local, read_rows
from rollout.data.dataset import PromptStream, load_dataset
from rollout.data.word_problems import BOYS, COLOURED, FOODS, GIRLS, LEVELS, SPLITS, TOYS, word_problems
from rollout.rewards import RULES
from rollout.task_config import FileDataConfig

SETS = list(itertools.product(LEVELS, SPLITS))
PEOPLE = re.compile(rf"\b({'|'.join((*GIRLS, *BOYS))})\b")
THINGS = re.compile(rf"\b({'|'.join((*FOODS, *TOYS, *COLOURED))})\b")
TAKES = re.compile(
    r"(gives|gave) \d|\d+ to [A-Z]|lost|spent|handed|swapped|took|takes \d+ (of them )?out|borrowed|burst|away|get "
    r"off|leave|of them left|went home|has read|are ill|used|read \d+ pages on Monday|ate \d+ of|"
    r"sold \d+( of|$| in the afternoon)"
)
"""Words of a clause whose number is taken away from what was there."""
GOES_ON = re.compile(r"\d+ on [A-Z]\w+day")
"""A clause without a verb: it says the same as the clause before it, of another day."""


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def skeleton(question: str) -> str:
    """The question without its names, things, numbers and pronouns: what is left of its template."""
    text = re.sub(r"\d+", "#", THINGS.sub("things", PEOPLE.sub("Person", question)))
    return re.sub(r"\b[Ss]?[Hh]e\b", "they", text)


def pairs(question: str) -> set[frozenset[int]]:
    """Every two numbers of a question, in any order."""
    return {frozenset(pair) for pair in itertools.combinations(numbers(question), 2)}


def solved(question: str) -> int:
    """The answer as a reader finds it, clause by clause, from the verbs alone."""
    total, sign = 0, 1
    for sentence in re.split(r"[.?] ?", question):
        for clause in re.split(r",? and (?:then )?|, | for (?=\d)", sentence):
            if not (found := numbers(clause)):
                continue
            [number] = found  # a clause with two of them would not be understood
            if not total:
                total = number
                continue
            compares = re.search(r"\d+ more (\w+ )?than|fewer", clause)
            if not GOES_ON.fullmatch(clause):
                sign = -1 if TAKES.search(clause) or "fewer" in clause else 1
            total += sign * number + (total if compares else 0)
    return total


@pytest.mark.parametrize(("level", "split"), SETS)
def test_the_answers_are_right_and_no_number_is_too_large(level: str, split: str) -> None:
    for row in word_problems(level, split):
        equation, _, answer = row["answer"].partition("\n#### ")
        left, _, right = equation.partition(" = ")
        assert re.fullmatch(r"\d+( [+-] \d+)+", left), row
        terms = left.replace("+ ", "").replace("- ", "-").split()
        assert sum(map(int, terms)) == int(right) == int(answer) == solved(row["question"]), row
        assert set(numbers(left)) == set(numbers(row["question"])), row
        assert all(2 <= number <= LEVELS[level].largest for number in numbers(row["question"])), row
        assert 1 <= int(answer) <= LEVELS[level].largest, row
        assert RULES["gsm8k_flexible"].judge(f"That makes {answer}.", row["answer"]), row


@pytest.mark.parametrize(("level", "split"), SETS)
def test_every_problem_is_plain_english(level: str, split: str) -> None:
    rows = list(word_problems(level, split))
    assert len({row["question"] for row in rows}) == len(rows) == SPLITS[split]
    for row in rows:
        question = row["question"]
        sentences = re.findall(r"[A-Z][^.?]*[.?]", question)
        assert " ".join(sentences) == question, "sentences, each with a capital letter, a full stop, and one space"
        assert re.match("How (many|old) ", sentences[-1]) and question.count("?") == 1, question
        assert not re.search(r"[^A-Za-z0-9 ,.?]", question)
        people = PEOPLE.findall(question)
        for pronoun, names in (("she", GIRLS), ("he", BOYS)):
            if re.search(rf"\b{pronoun}\b", question, re.IGNORECASE):
                assert people[0] in names, question
        given = re.search(rf"{PEOPLE.pattern}[^.]* (?:gives|gave|handed) .*to {PEOPLE.pattern}", question)
        assert given is None or given[1] != given[2], question


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_of_the_evaluation_occurs_in_the_training(level: str) -> None:
    train, held = ([row["question"] for row in word_problems(level, split)] for split in ("train", "eval"))
    assert not set(train) & set(held)
    assert not set(map(skeleton, train)) & set(map(skeleton, held))
    assert not set().union(*map(pairs, train)) & set().union(*map(pairs, held))


@pytest.mark.parametrize("level", LEVELS)
def test_the_problems_are_varied(level: str) -> None:
    """Every template has its share of each split, from the beginning on: a cut of eval.max_prompts holds all kinds."""
    for split, at_least in (("train", 18), ("eval", 7)):
        kinds = [skeleton(row["question"]) for row in word_problems(level, split)]
        assert len(set(kinds)) >= at_least
        shares = [kinds.count(kind) for kind in set(kinds)]
        assert max(shares) - min(shares) <= 1
        assert len(set(kinds[: len(shares)])) == len(shares)
    words = " ".join(row["question"] for split in SPLITS for row in word_problems(level, split))
    assert {*PEOPLE.findall(words), *THINGS.findall(words)} == {*GIRLS, *BOYS, *FOODS, *TOYS, *COLOURED}


def test_the_problems_are_the_same_on_every_machine() -> None:
    """A run goes on over the same data only: whoever changes a digest ends the runs over the old problems."""
    rows = (json.dumps(list(word_problems(level, split))).encode() for level, split in SETS)
    assert [xxhash.xxh3_64_hexdigest(row) for row in rows] == [
        "1da1cf1b96e6624a",
        "4165eb308ec6f780",
        "cc5ac34365038f72",
        "bc4f6aaae34a9739",
    ]


def test_they_are_read_like_a_file_and_the_stream_goes_on(tmp_path: Path) -> None:
    train, held, harder = (f"word_problems:{part}" for part in ("one_step@train", "one_step@eval", "two_steps@eval"))
    config = FileDataConfig(train_path=train, eval_path=held, instruction="Be brief.")
    tokenizer = byte_tokenizer(tmp_path)
    data = load_dataset(config, tokenizer, eval_sets={"harder": harder})
    first = next(word_problems("one_step", "train"))
    assert (data.train[0].text, data.train[0].answer) == (
        f"[user]{first['question']} Be brief.[assistant]",
        first["answer"],
    )
    assert [len(prompts) for prompts in (data.train, data.heldout, data.eval_sets["harder"])] == [800, 200, 200]
    layout = "layout GSM8K: prompt from question, answer from answer"
    assert data.notes[0] == f"{train}: {layout}; 800 rows, 800 prompts"
    assert len(data.notes) == 3, "no duplicate, no contradiction, no prompt that is trained on"
    stream = PromptStream(data.train, seed=3)
    stream.take(790)
    state = stream.state_dict()
    again = PromptStream(load_dataset(config, tokenizer).train, seed=3)
    again.load_state_dict(state)
    assert again.take(30) == stream.take(30)


def test_a_wrong_level_or_split_names_those_there_are() -> None:
    for source in ("word_problems:three_steps@train", "word_problems@train", "word_problems:one_step@test"):
        with pytest.raises(ValueError, match=rf"^{source} is unknown: .*LEVEL is one of one_step, two_steps and SPLIT"):
            read_rows(source)
    assert is_local("word_problems:one_step@train") and not is_local("openai/gsm8k:main@train")
