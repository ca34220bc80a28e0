"""Configuration of the task: prompts, answers and rewards. No torch, no Ray, no SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from algorithms.config import Checked, Problem


@dataclass(kw_only=True, slots=True)
class RewardConfig(Checked):
    """How a response is scored."""

    function: str = "exact_match"
    """exact_match, gsm8k, gsm8k_flexible, math, math_dapo, or a function of yours as path/to/file.py:name."""
    correct: float = 1.0
    """Reward of a correct answer."""
    incorrect: float = 0.0
    """Reward of a wrong answer. DAPO uses -1."""
    format_score: float | None = None
    """Reward of a wrong answer that is stated in the form asked for; null means reward.incorrect."""
    overlong_buffer_tokens: int = 0
    """Soft overlong penalty (DAPO): the last this many tokens before max_new_tokens are penalised; 0 turns it off."""
    overlong_penalty: float = 1.0
    """Penalty at max_new_tokens; linear over the buffer. Vetted: 1.0."""
    num_workers: int = 2
    """Processes that score; each can be killed and replaced."""
    timeout_s: float = 10.0
    """Deadline in seconds of one call; a response that takes longer is wrong, and counted in reward/timeouts."""
    memory_gib: float = 16.0
    """Address space of a scoring process; one that needs more dies, and is counted in reward/crashes."""
    max_error_fraction: float = 0.05
    """Share of a step's responses for which the function may raise or return no score before the run stops."""

    def problems(self) -> Iterator[Problem]:
        if not self.correct > self.incorrect:
            yield Problem(key="correct", rule=f"must be > reward.incorrect ({self.incorrect})", value=self.correct)
        if self.format_score is not None and not self.incorrect <= self.format_score < self.correct:
            yield Problem(
                key="format_score",
                rule=f"must lie in [reward.incorrect ({self.incorrect}), reward.correct ({self.correct})), or be null",
                value=self.format_score,
            )
        if self.num_workers < 1:
            yield Problem(key="num_workers", rule="must be >= 1", value=self.num_workers)
        for key in ("timeout_s", "memory_gib"):
            if not getattr(self, key) > 0:
                yield Problem(key=key, rule="must be > 0", value=getattr(self, key))
        if not 0 <= self.max_error_fraction <= 1:
            yield Problem(key="max_error_fraction", rule="must lie in [0, 1]", value=self.max_error_fraction)
        if self.overlong_buffer_tokens < 0:
            yield Problem(key="overlong_buffer_tokens", rule="must be >= 0 tokens", value=self.overlong_buffer_tokens)
        if self.overlong_penalty < 0:
            yield Problem(key="overlong_penalty", rule="must be >= 0", value=self.overlong_penalty)


@dataclass(kw_only=True, slots=True)
class DataConfig(Checked):
    """Where prompts and reference answers come from. Choose with `data=arithmetic` or `data=file`."""

    kind: ClassVar[str] = ""


@dataclass(kw_only=True, slots=True)
class ArithmeticDataConfig(DataConfig):
    """The built-in task: sums of two numbers, made on the spot, seeded; see rollout/arithmetic.py."""

    kind: ClassVar[str] = "arithmetic"
    max_operand: int = 99
    """Largest operand; operands are drawn from 0..max_operand."""
    num_heldout: int = 200
    """Problems kept for evaluation; never seen in the demonstrations or in training."""
    seed: int = 0
    """Decides the split into training and held-out problems."""

    def problems(self) -> Iterator[Problem]:
        if not 9 <= self.max_operand <= 999:
            yield Problem(key="max_operand", rule="must lie in [9, 999]", value=self.max_operand)
        elif not 1 <= self.num_heldout <= (self.max_operand + 1) ** 2 // 2:
            yield Problem(
                key="num_heldout",
                rule=f"must lie in [1, {(self.max_operand + 1) ** 2 // 2}] (half of all problems)",
                value=self.num_heldout,
            )


@dataclass(kw_only=True, slots=True)
class FileDataConfig(DataConfig):
    """Rows of a local jsonl, json, csv or parquet file, read with the `datasets` library."""

    kind: ClassVar[str] = "file"
    train_path: str = ""
    """Training rows."""
    eval_path: str = ""
    """Held-out rows."""
    prompt_key: str = "question"
    """Column with the prompt: text, or a list of chat messages."""
    answer_key: str = "answer"
    """Column with the reference answer."""
    instruction: str = ""
    """Appended to every text prompt after a space; empty for none."""
    chat_template: bool = True
    """Whether text prompts are wrapped as a user message with the tokenizer's chat template."""
    max_prompt_tokens: int = 1024
    """Longer prompts are an error that names the row."""

    def problems(self) -> Iterator[Problem]:
        for key in ("train_path", "eval_path"):
            path = getattr(self, key)
            if not path:
                yield Problem(key=key, rule="must be set", value=path, remedy="A jsonl, csv or parquet file.")
            elif not Path(path).is_file():
                yield Problem(key=key, rule="must be an existing file", value=path)
        if self.max_prompt_tokens < 1:
            yield Problem(key="max_prompt_tokens", rule="must be >= 1", value=self.max_prompt_tokens)
