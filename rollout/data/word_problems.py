r"""Word problems that the project makes: `word_problems:LEVEL@SPLIT` -> rows with the columns of GSM8K.

    {"question": "Lily has 5 coins and gets 6 more. How many coins does Lily have now?",
     "answer": "5 + 6 = 11\n#### 11"}

`rollout/data/data_files.py` reads them like the rows of a file. The splits share names and things, but no template and
no pair of numbers, so that a held-out problem can neither be remembered nor matched word by word.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rollout.data.answers import ANSWER_MARK

NAME = "word_problems"
SPLITS = {"train": 800, "eval": 200}
"""Split -> number of its problems: with 200 the standard error of an accuracy is at most 3.5 %."""
SMALLEST = 2
"""Smallest number in a problem: 1 would need other words."""
HELDOUT_FRACTION = 0.25
"""Fraction of the pairs of numbers that only evaluation problems have."""
SEED = 0
"""Seed of the pairs that are held out, and of the problems."""

GIRLS = ("Alice", "Amina", "Anna", "Clara", "Ella", "Emma", "Grace", "Hannah", "Julia", "Lily", "Maria", "Mei", "Nora",
         "Priya", "Ruth", "Sofia")  # fmt: skip
BOYS = ("Adam", "Ali", "Ben", "Carlos", "Daniel", "David", "Finn", "Hugo", "Jack", "Kenji", "Leo", "Noah", "Omar",
        "Paul", "Sam", "Tom")  # fmt: skip
FOODS = ("apples", "bananas", "carrots", "cookies", "lemons", "muffins", "oranges", "peaches", "pears", "plums")
TOYS = ("books", "buttons", "cards", "coins", "crayons", "marbles", "pencils", "postcards", "shells", "stamps",
        "stickers")  # fmt: skip
COLOURED = ("balloons", "beads", "blocks", "buttons", "cups", "marbles", "pencils", "ribbons")

Templates = Mapping[tuple[int, ...], tuple[str, ...]]
"""Factors of the numbers x, y, z, whose sum is the answer -> texts of problems.

In a text {a}, {b} and {c} are different people, {she} and {She} stand for {a}; {food}, {toys}, {beads} (things that
have a colour) and {things} (food or toys) are plural nouns; {x}, {y} and {z} are numbers.
"""
ADD, TAKE = (1, 1), (1, -1)
SUM, MORE_LESS, LESS_MORE, LESS_LESS = (1, 1, 1), (1, 1, -1), (1, -1, 1), (1, -1, -1)
WITH_MORE, WITH_FEWER = (2, 1), (2, -1)
"""Two counts together, where the second is y more, or y fewer, than the first."""

ONE_STEP_TRAIN: Templates = {
    ADD: (
        "{a} has {x} {things} and gets {y} more. How many {things} does {a} have now?",
        "{a} has {x} {things} and {b} has {y}. How many {things} do they have together?",
        "{a} had {x} {toys}. Then {she} found {y} more. How many {toys} does {a} have now?",
        "There are {x} boys and {y} girls in a room. How many children are in the room?",
        "There are {x} {things} in a box. {a} puts {y} more into it. How many {things} are in the box now?",
        "{a} ate {x} {food} and {b} ate {y}. How many {food} did they eat together?",
        "{a} bought {x} {things} on Monday and {y} on Tuesday. How many {things} did {a} buy?",
        "A bag holds {x} red {beads} and {y} blue {beads}. How many {beads} are in the bag?",
        "{b} gives {a} {y} {things}. {a} already had {x}. How many {things} does {a} have now?",
        "{a} saw {x} ducks and {y} swans at the pond. How many birds did {a} see?",
        "A shop has {x} {things}. A van brings {y} more. How many {things} does the shop have now?",
        "{a} counted {x} {things} on the table and {y} on the shelf. How many {things} did {a} count?",
        "{a} picked {x} {food} before lunch and {y} after it. How many {food} did {a} pick?",
        "One bus carries {x} people and another carries {y}. How many people are on both buses?",
        "{a} is {x} years old. How old will {a} be in {y} years?",
        "{a} scored {x} points in one game and {y} in the next. How many points did {a} score?",
    ),
    TAKE: (
        "{a} has {x} {things} and gives {y} of them to {b}. How many {things} does {a} have left?",
        "{a} had {x} {toys} and lost {y} of them. How many {toys} does {a} have now?",
        "There were {x} {food} on the table. {a} ate {y} of them. How many {food} are left?",
        "{a} had {x} {things}. {She} sold {y} of them at the market. How many {things} does {a} have left?",
        "A basket holds {x} {food}. {a} takes {y} of them out. How many {food} are still in it?",
        "{a} had {x} books. {b} borrowed {y} of them. How many books does {a} still have?",
        "There are {x} birds in a tree. Then {y} of them fly away. How many birds stay?",
        "A book has {x} pages. {a} has read {y} of them. How many pages are left to read?",
        "{a} has {x} {beads} and gives away {y}. How many {beads} does {a} have now?",
        "There are {x} people on a bus. At the stop {y} get off. How many people are on the bus now?",
        "A shop had {x} {things} and sold {y} of them today. How many {things} does the shop have now?",
        "{a} had {x} coins and spent {y}. How many coins are left?",
        "A farmer had {x} sheep, but {y} ran away. How many sheep does the farmer have now?",
        "There were {x} cars in the street. Then {y} drove away. How many cars are still there?",
        "A team has {x} players. Today {y} of them are ill. How many players can play?",
        "{a} picked {x} {food} and used {y} of them for a cake. How many {food} are left?",
    ),
}
ONE_STEP_EVAL: Templates = {
    ADD: (
        "{a} keeps {x} {toys} in a drawer. {b} adds {y}. How many {toys} does the drawer hold?",
        "{a} owns {x} {toys}. {b} owns {y}. How many {toys} do {a} and {b} own altogether?",
        "{a} owned {x} {toys} and received {y} more as a present. How many {toys} does {she} own now?",
        "{a} has a farm with {x} cows and {y} horses. How many animals live on the farm?",
        "{a} planted {x} trees last year and {y} this year. How many trees did {she} plant in all?",
        "{a} walked {x} miles yesterday and {y} miles today. How many miles did {she} walk?",
    ),
    TAKE: (
        "{a} saw {x} children in the park. Then {y} of them went home. How many children were left?",
        "{a} packed {x} {food} and handed {y} of them to {b}. How many {food} does {a} keep?",
        "{a} had {x} balloons, but {y} of them burst. How many balloons does {a} still have?",
    ),
}

TWO_STEPS_TRAIN: Templates = {
    MORE_LESS: (
        "{a} has {x} {things}. {She} gets {y} more and then gives {z} to {b}. How many {things} does {a} have now?",
        "There are {x} people on a bus. At a stop {y} more get on and {z} get off. How many people are on the bus now?",
        (
            "A shop had {x} {things}. It received {y} more in the morning and sold {z} in the afternoon. How many "
            "{things} does the shop have left?"
        ),
        "There are {x} birds in a tree. Then {y} more come, and {z} fly away. How many birds are in the tree now?",
    ),
    LESS_LESS: (
        "{a} had {x} {things}. {She} gave {y} to {b} and {z} to {c}. How many {things} does {a} have left?",
        "A book has {x} pages. {a} read {y} pages on Monday and {z} on Tuesday. How many pages are left to read?",
        "{a} baked {x} muffins. {She} ate {y} of them and sold {z}. How many muffins are left?",
        (
            "There were {x} {food} in a basket. {a} took {y} of them, and {b} took {z}. How many {food} are still in "
            "the basket?"
        ),
    ),
    LESS_MORE: (
        "{a} had {x} {toys}. {She} lost {y} of them and then bought {z} more. How many {toys} does {a} have now?",
        (
            "There were {x} children in the pool. Then {y} of them left and {z} others came. How many children are "
            "in the pool now?"
        ),
        "{a} had {x} coins. {She} spent {y} of them and then earned {z}. How many coins does {a} have now?",
    ),
    SUM: (
        "{a} has {x} {things}, {b} has {y} and {c} has {z}. How many {things} do they have together?",
        "{a} picked {x} {food} on Monday, {y} on Tuesday and {z} on Wednesday. How many {food} did {a} pick?",
        "A jar holds {x} red, {y} blue and {z} green {beads}. How many {beads} are in the jar?",
    ),
    WITH_MORE: (
        "{a} has {x} {things}. {b} has {y} more than {a}. How many {things} do they have together?",
        "{a} ate {x} {food} in May and {y} more than that in June. How many {food} did {a} eat in both months?",
    ),
    WITH_FEWER: (
        "{a} has {x} {things}. {b} has {y} fewer than {a}. How many {things} do they have together?",
        "{a} sold {x} {things} on Saturday and {y} fewer on Sunday. How many {things} did {a} sell in both days?",
    ),
}
TWO_STEPS_EVAL: Templates = {
    MORE_LESS: (
        (
            "{a} keeps {x} {toys} in a drawer. {She} adds {y}, and {b} takes {z} out. How many {toys} does the "
            "drawer hold?"
        ),
        (
            "A train has {x} passengers. At the first station {y} board, and at the second {z} leave the train. How "
            "many passengers are left?"
        ),
    ),
    LESS_LESS: (
        "{a} had {x} balloons. The wind took {y} of them, and {z} burst. How many balloons does {a} still have?",
    ),
    LESS_MORE: ("{a} owned {x} {toys}. {She} swapped {y} of them for {z} others. How many {toys} does {a} own now?",),
    SUM: (
        "{a} walked {x} miles on Friday, {y} miles on Saturday and {z} miles on Sunday. How many miles did {she} walk?",
    ),
    WITH_MORE: (
        (
            "A farm has {x} cows. It has {y} more horses than cows. How many cows and horses does the farm have "
            "altogether?"
        ),
    ),
    WITH_FEWER: (
        (
            "{a} scored {x} points in the first game and {y} points fewer in the second. How many points did {she} "
            "score in all?"
        ),
    ),
}


class Level(NamedTuple):
    """Problems of one difficulty."""

    largest: int
    """Largest number of a problem, answer included."""
    templates: Mapping[str, Templates]
    """Split -> its templates."""


LEVELS = {
    "one_step": Level(12, {"train": ONE_STEP_TRAIN, "eval": ONE_STEP_EVAL}),
    "two_steps": Level(50, {"train": TWO_STEPS_TRAIN, "eval": TWO_STEPS_EVAL}),
}


def word_problems(level: str | None, split: str) -> Iterator[dict[str, str]]:
    """The problems of a split, in turn from each of its templates: the same on every machine, and no text twice.

    Raises ValueError for another level or split than those of LEVELS and SPLITS.
    """
    if level not in LEVELS or split not in SPLITS:
        asked = f"{NAME}:{level}@{split}" if level else f"{NAME}@{split}"
        raise ValueError(
            f"{asked} is unknown: use {NAME}:LEVEL@SPLIT, where LEVEL is one of {', '.join(LEVELS)} and SPLIT one of "
            f"{', '.join(SPLITS)}"
        )
    return _problems(LEVELS[level], split)


def _problems(level: Level, split: str) -> Iterator[dict[str, str]]:
    generator = random.Random(f"{SEED} {split}")  # noqa: S311 (problems, not secrets)
    pairs = _pairs(level.largest)[split]
    texts: set[str] = set()
    templates = [(factors, text) for factors, group in level.templates[split].items() for text in group]
    for factors, text in itertools.cycle(templates):
        question = ""
        while not question or question in texts:
            numbers = _numbers(factors, level.largest, pairs, generator)
            question = text.format(**_words(generator), **dict(zip("xyz", numbers, strict=False)))
        texts.add(question)
        yield {"question": question, "answer": _answer(factors, numbers)}
        if len(texts) == SPLITS[split]:
            return


def _pairs(largest: int) -> dict[str, set[tuple[int, int]]]:
    """Split -> the pairs of numbers, the smaller one first, that may stand in one problem."""
    pairs = list(itertools.combinations_with_replacement(range(SMALLEST, largest + 1), 2))
    random.Random(SEED).shuffle(pairs)  # noqa: S311 (a split, not a secret)
    num_heldout = int(len(pairs) * HELDOUT_FRACTION)
    return {"train": set(pairs[num_heldout:]), "eval": set(pairs[:num_heldout])}


def _numbers(
    factors: tuple[int, ...], largest: int, pairs: set[tuple[int, int]], generator: random.Random
) -> list[int]:
    """Numbers of which every two make a pair of `pairs`, for a story in which nothing exceeds `largest` or runs out."""
    while True:
        numbers = [generator.randint(SMALLEST, largest) for _ in factors]
        terms = [factor * number for factor, number in zip(factors, numbers, strict=True)]
        taken = -sum(term for term in terms if term < 0)
        if sum(terms) + taken > largest or taken >= numbers[0]:
            continue
        if all(tuple(sorted(pair)) in pairs for pair in itertools.combinations(numbers, 2)):
            return numbers


def _words(generator: random.Random) -> dict[str, str]:
    """A word for every slot of a template that is no number."""
    a, b, c = generator.sample(GIRLS + BOYS, 3)
    she = "she" if a in GIRLS else "he"
    food, toys, beads = (generator.choice(words) for words in (FOODS, TOYS, COLOURED))
    people = {"a": a, "b": b, "c": c, "she": she, "She": she.capitalize()}
    return people | {"food": food, "toys": toys, "beads": beads, "things": generator.choice((food, toys))}


def _answer(factors: tuple[int, ...], numbers: list[int]) -> str:
    r"""The sum, and the answer after the mark of GSM8K: "5 + 8 = 13\n#### 13"."""
    total = sum(factor * number for factor, number in zip(factors, numbers, strict=True))
    terms = [
        f"{'-' if factor < 0 else '+'} {number}"
        for factor, number in zip(factors, numbers, strict=True)
        for _ in range(abs(factor))
    ]
    return f"{' '.join(terms).removeprefix('+ ')} = {total}\n{ANSWER_MARK} {total}"
