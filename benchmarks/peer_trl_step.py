"""TRL's GRPOTrainer on the task of `grpo_step.py`, with everything turned off that costs time and is not the step."""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from grpo_step import SEED, SIZES, WARM_UP, ProcessorClock, Step
from half_rewarded import rewarded
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rollout.data.arithmetic import arithmetic_problems


class Clock(TrainerCallback):
    """Seconds between the ends of steps, tokens and phases of each."""

    def __init__(self, num_steps: int) -> None:
        self.processor = ProcessorClock(num_steps)
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

    def reward(self, completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.tokens += sum(map(len, completion_ids))
        return [float(rewarded(text)) for text in completions]

    def timed(self, trainer: Any, method: str, name: str) -> None:
        """Attribute the seconds of a method to `name`."""
        original = getattr(trainer, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = original(*args, **kwargs)
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - started
            return result

        setattr(trainer, method, call)


def trl_steps(args: argparse.Namespace) -> list[Step]:
    """Train for WARM_UP + args.steps steps, one optimizer step per generation of all samples."""
    torch.set_num_threads(args.threads)
    size = SIZES[args.size]
    samples = size.prompts * size.group_size
    problems = arithmetic_problems().train
    clock = Clock(args.steps)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            reward_funcs=clock.reward,
            train_dataset=Dataset.from_dict({"prompt": [problem.prompt for problem in problems]}),
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
                max_steps=WARM_UP + args.steps,
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
    steps = clock.steps[WARM_UP:]
    for step in steps:
        step.processor_s = clock.processor.per_step
    return steps
