"""The built-in task: sums of two numbers, demonstrations of mixed quality, and a tokenizer.

`trainer/models/base_model.py` trains the base model on the demonstrations; `rollout/data/dataset.py` makes prompts of
the problems. This file does not import torch.

A response works column by column, least significant first, and ends with the mark of GSM8K and the answer:

    37+58=   careful author    7+8=15, 3+5+1=9 #### 95
             careless author   7+8=15, 3+5=8 #### 85      never carries, so right only where nothing is carried

               calculator       37+58=95 #### 95              asks for the sum, which rollout/episodes/tools.py says

With more than half of the demonstrations by the careless author, greedy decoding of the base model forgets every carry,
while sampling still finds the right answer: a reward on the answer alone tells the two authors apart.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

COLUMN_SEPARATOR = ", "
ANSWER_MARK = " #### "
"""Separates the working from the answer; the reward reads the text after the last mark, as in GSM8K."""
PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"
TOKENS = (PAD_TOKEN, EOS_TOKEN, *"0123456789", "+", "=", COLUMN_SEPARATOR, ANSWER_MARK)
"""The whole vocabulary; a token's id is its position."""
MAX_OPERAND = 99
"""Largest operand of a sum: two-digit sums need a carry, and a model this small learns them."""
NUM_HELDOUT = 200
"""Number of problems kept for evaluation: the standard error of an accuracy is then at most 3.5 %."""
SPLIT_SEED = 0
"""Seed of the split into training and held-out problems."""


class ArithmeticProblem(NamedTuple):
    """A sum to work out."""

    prompt: str
    """The problem as text, for example "37+58="."""
    answer: str
    """The sum, in decimal: "95"."""


class Demonstration(NamedTuple):
    """A problem and the response of one author."""

    problem: ArithmeticProblem
    response: str
    """Working and answer, without the end-of-sequence token."""


class ArithmeticSplit(NamedTuple):
    """The problems of the task. No held-out problem is in `train`, in either order of its operands."""

    train: list[ArithmeticProblem]
    heldout: list[ArithmeticProblem]


def arithmetic_problems() -> ArithmeticSplit:
    """Split all sums of two operands in 0..MAX_OPERAND into training and held-out problems, shuffled.

    a+b and b+a go into the same list, so that a held-out sum cannot be remembered from its mirror image. Where an odd
    number of held-out problems separates such a pair, the second problem belongs to neither list. The lists and their
    order are the same on every machine.
    """
    generator = random.Random(SPLIT_SEED)  # noqa: S311 (a split, not a secret)
    operands = range(MAX_OPERAND + 1)
    pairs = [(left, right) for left in operands for right in operands if left <= right]
    generator.shuffle(pairs)
    train: list[ArithmeticProblem] = []
    heldout: list[ArithmeticProblem] = []
    for left, right in pairs:
        mirrored = [(left, right)] if left == right else [(left, right), (right, left)]
        problems = [ArithmeticProblem(prompt=f"{a}+{b}=", answer=str(a + b)) for a, b in mirrored]
        if len(heldout) < NUM_HELDOUT:
            heldout += problems[: NUM_HELDOUT - len(heldout)]
        else:
            train += problems
    generator.shuffle(train)
    generator.shuffle(heldout)
    return ArithmeticSplit(train=train, heldout=heldout)


def work_out(problem: ArithmeticProblem, *, carries: bool) -> str:
    """Answer `problem` as the careful author (`carries`) or as the careless author, who forgets every carry."""
    left, right = problem.prompt.removesuffix("=").split("+")
    width = max(len(left), len(right))
    steps: list[str] = []
    digits = ""
    carry = 0
    for a, b in zip(reversed(left.zfill(width)), reversed(right.zfill(width)), strict=True):
        column = int(a) + int(b) + carry
        steps.append(f"{a}+{b}+1={column}" if carry else f"{a}+{b}={column}")
        digits = f"{column % 10}{digits}"
        carry = column // 10 if carries else 0
    answer = f"1{digits}" if carry else digits
    return COLUMN_SEPARATOR.join(steps) + ANSWER_MARK + answer


def demonstrations(*, wrong_fraction: float, seed: int, calculator: bool = False) -> Iterator[Demonstration]:
    """Yield demonstrations of the training problems without end, in a new order on every pass.

    A demonstration is by the careless author with probability `wrong_fraction` in [0, 1], independently of the problem,
    so the two answers to a problem are in that proportion. The other demonstrations are by the careful author, or, if
    `calculator`, by the author who uses the calculator. The same arguments always give the same demonstrations.
    """
    generator = random.Random(seed)  # noqa: S311 (the order of data, not a secret)
    problems = arithmetic_problems().train
    while True:
        generator.shuffle(problems)
        for problem in problems:
            careless = generator.random() < wrong_fraction
            response = work_out(problem, carries=not careless)
            if calculator and not careless:  # the tool writes the text after "="
                response = f"{problem.prompt}{problem.answer}{ANSWER_MARK}{problem.answer}"
            yield Demonstration(problem=problem, response=response)


def save_tokenizer(directory: Path) -> None:
    """Write the tokenizer of the task into `directory`, for `load_tokenizer(directory)`.

    Encoding adds no special token; the caller appends the end-of-sequence token where needed. The tokenizer refuses
    text with a character outside its vocabulary instead of replacing the character.
    """
    # Imported here because transformers takes seconds and the problems alone do not need it.
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(vocab={token: index for index, token in enumerate(TOKENS)}))
    pattern = Regex(f"{COLUMN_SEPARATOR}|{ANSWER_MARK}|.")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD_TOKEN, eos_token=EOS_TOKEN, clean_up_tokenization_spaces=False
    ).save_pretrained(directory)
