"""TRL's GRPOTrainer on the task of `grpo_step.py`, with everything turned off that costs time and is not the step."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from datasets import Dataset
from grpo_step import REAL, SEED, SIZES, ProcessorClock, Step
from half_rewarded import rewarded
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rollout.data.arithmetic import arithmetic_problems
from rollout.data.word_problems import word_problems


class Clock(TrainerCallback):
    """Seconds between the ends of steps, tokens and phases of each."""

    def __init__(self, num_steps: int, *, warm_up: int) -> None:
        self.processor = ProcessorClock(num_steps, warm_up=warm_up)
        self.steps: list[Step] = []
        self.tokens = 0
        self.parts: dict[str, float] = {}
        self._ended = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        self.parts["other"] = now - self._ended - sum(self.parts.values())
        self.steps.append(Step(seconds=now - self._ended, tokens=self.tokens, parts=self.parts))
        self.processor.mark(len(self.steps))
        self._ended, self.tokens, self.parts = time.perf_counter(), 0, {}

    def reward(self, completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.tokens += sum(map(len, completion_ids))
        texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
        return [float(rewarded(text)) for text in texts]

    def timed(self, trainer: Any, method: str, name: str) -> None:
        """Attribute the seconds of a method to `name`."""
        original = getattr(trainer, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = original(*args, **kwargs)
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - started
            return result

        setattr(trainer, method, call)


def prompts(size: str) -> Iterator[Any]:
    """What Parity's recipe of that size asks: texts, or messages for the chat template."""
    if size == REAL:
        for row in word_problems("one_step", "train"):
            yield [{"role": "user", "content": row["question"]}]
    else:
        yield from (problem.prompt for problem in arithmetic_problems().train)


def trl_steps(args: argparse.Namespace) -> list[Step]:
    """Train for the first steps and `args.steps` more, one optimizer step per generation of all samples."""
    torch.set_num_threads(args.threads)
    size = SIZES[args.size]
    samples = size.prompts * size.group_size
    clock = Clock(args.steps, warm_up=size.warm_up)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            reward_funcs=clock.reward,
            train_dataset=Dataset.from_dict({"prompt": list(prompts(args.size))}),
            callbacks=[clock],
            args=GRPOConfig(
                output_dir=scratch,
                use_cpu=True,
                bf16=args.dtype == "bfloat16",
                gradient_checkpointing=False,
                per_device_train_batch_size=size.trl_batch,
                gradient_accumulation_steps=samples // size.trl_batch,
                num_generations=size.group_size,
                max_completion_length=size.max_new_tokens,
                temperature=1.0,
                beta=0.0,
                learning_rate=1e-6,
                lr_scheduler_type="constant",
                max_steps=size.warm_up + args.steps,
                seed=SEED,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
        )
        clock.timed(trainer, "_generate_single_turn", "generate")
        clock.timed(trainer, "training_step", "forward, backward")
        inner = trainer._generate_and_score_completions

        # training_step calls it for the first micro-batch: what it does besides generating is not training.
        def prepare(*a: Any, **k: Any) -> Any:
            started = time.perf_counter()
            before = clock.parts.get("generate", 0.0)
            result = inner(*a, **k)
            spent = time.perf_counter() - started
            clock.parts["score"] = spent - (clock.parts["generate"] - before)
            clock.parts["forward, backward"] = clock.parts.get("forward, backward", 0.0) - spent
            return result

        trainer._generate_and_score_completions = prepare
        trainer.train()
    steps = clock.steps[size.warm_up :]
    for step in steps:
        step.processor_s = clock.processor.per_step
    return steps
