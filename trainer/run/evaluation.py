"""Evaluation of a policy on all its sets: of the one in training, and of a checkpoint, an exported or the base model.

    parity eval:  checkpoint -export-> Hugging Face directory -start-> engines -evaluate-> eval.json, eval.jsonl

No rank is started: a sharded checkpoint is written as one model, in the type of the engines, which is also what a
weight sync sends them. So `parity eval` of the last checkpoint of a run repeats the last evaluation of that run.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from rollout.collect.dispatch import Sampler
from rollout.collect.evaluate import (
    GREEDY,
    EvalPlan,
    EvalResult,
    Keep,
    evaluate,
    evaluation_requests,
    keep_nothing,
    num_correct,
)
from rollout.data.dataset import prompts_digest
from rollout.data.tokenizer import adapter_tokenizer_note
from rollout.engine import EngineInfo
from rollout.episodes.sampler import with_episodes
from rollout.task_config import FileDataConfig
from rollout.types import SampleGroup
from rollout.weights.packed_weights import DTYPES
from trainer.cluster.placement import Cluster, engines_only
from trainer.config.outputs import HELDOUT
from trainer.config.train import TrainConfig
from trainer.models.export import write_merged, write_model
from trainer.models.resolve import resolve_model
from trainer.run.task import Task, data_notes, load_task
from trainer.rundir.checkpoint import Checkpoint
from trainer.rundir.printed import printed_log
from trainer.rundir.provenance import config_record, environment_record, group_choices
from trainer.rundir.run_dir import LOGS, make_private, write_whole
from trainer.rundir.weights_source import SourceKind, WeightsSource

RESULT_FILE, ROWS_FILE = "eval.json", "eval.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """Results of `parity eval`, and the path of the file that holds the results."""

    results: dict[str, EvalResult]
    """By name of the set."""
    checkpoint: Checkpoint | None
    """None for a base model and for an exported one."""
    result_path: Path


def evaluate_sets(
    config: TrainConfig, task: Task, sampler: Sampler, *, keep: Keep = keep_nothing
) -> dict[str, EvalResult]:
    """Evaluate on the task's held-out prompts, then on each of eval.sets; every set is cut to eval.max_prompts."""
    sets = {HELDOUT: task.dataset.heldout, **task.dataset.eval_sets}
    return {
        name: evaluate(sampler, prompts[: config.eval.max_prompts], task.scorer, _plan(config, task, name), keep=keep)
        for name, prompts in sets.items()
    }


def _plan(config: TrainConfig, task: Task, name: str) -> EvalPlan:
    return EvalPlan(
        sampling=config.eval_sampling,
        num_samples=config.eval.samples,
        seed=config.run.seed,
        stop_token_ids=task.stop_token_ids,
        max_failed_fraction=config.collect.max_invalid_fraction,
        min_failed=config.collect.min_failed,
        name="" if name == HELDOUT else name,
    )


def evaluation_metrics(results: Mapping[str, EvalResult]) -> dict[str, float | None]:
    """eval/* of the held-out set and eval/<name>/* of every other one."""
    metrics: dict[str, float | None] = {}
    for name, result in results.items():
        metrics |= result.metrics("eval" if name == HELDOUT else f"eval/{name}")
    return metrics


def response_rows(config: TrainConfig, task: Task, results: Mapping[str, EvalResult]) -> list[dict[str, object]]:
    """The responses of all sets, one row per prompt, as eval.jsonl has them."""
    return [row for name, result in results.items() for row in _rows(_plan(config, task, name), result.groups)]


def evaluate_model(
    config: TrainConfig,
    source: WeightsSource,
    *,
    checkpoint: Checkpoint | None,
    run_dir: Path,
    say: Callable[[str], None],
) -> Evaluated:
    """Start the engines of `config` on what `source` names, evaluate, write eval.json and eval.jsonl to `run_dir`.

    `checkpoint` is `checkpoint_of(config, source)`. Raises CheckpointError if its weights cannot be read.
    """
    started = time.perf_counter()
    make_private(run_dir)
    lines: list[str] = []

    def keep(plan: EvalPlan, groups: Sequence[SampleGroup]) -> None:
        lines.extend(json.dumps(row, ensure_ascii=False) + "\n" for row in _rows(plan, groups))
        write_whole(run_dir / ROWS_FILE, "".join(lines))

    # Beside the results, and not in a temporary directory: engines on other machines see the same disk.
    logs = run_dir / LOGS
    with printed_log(logs), tempfile.TemporaryDirectory(dir=run_dir, prefix=".model-") as scratch:
        model_path = _model_directory(config, source, checkpoint, Path(scratch) / "model", say=say)
        task = load_task(config, progress=_silent, model_path=model_path)
        for note in data_notes(task.dataset, run_dir):
            say(note)
        say(f"evaluating {source.describe(checkpoint)}: starting Ray and the rollout engines")
        with closing(task.scorer), Cluster(engines_only(config), log_dir=logs) as cluster:
            engines = cluster.spawn_engines(task.model_path)
            infos = engines.wait_ready()
            for info in infos:
                say(f"engine ready: {info.name} at {info.address} in {info.start_s:.1f} s")
            ready = time.perf_counter()
            try:
                with with_episodes(engines, config.episode, model_path=task.model_path) as sampler:
                    results = evaluate_sets(config, task, sampler, keep=keep)
            except Exception as error:
                if lines:
                    error.add_note(f"The responses, and the rewards that they have, are in {run_dir / ROWS_FILE}.")
                raise
            ended = time.perf_counter()
    if checkpoint is not None:
        version = checkpoint.state.policy_version
        results = {name: replace(result, policy_version=version) for name, result in results.items()}
    record = {
        "checkpoint": _source_record(source, checkpoint),
        **_conditions(config, task, infos),
        "sets": {name: _set_record(config, name, result) for name, result in results.items()},
        "seconds": {"start": round(ready - started, 3), "evaluate": round(ended - ready, 3)},
        "choices": group_choices(config),
        "config": config_record(config),
        "environment": environment_record(sys.argv),
    }
    write_whole(run_dir / RESULT_FILE, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    return Evaluated(results=results, checkpoint=checkpoint, result_path=run_dir / RESULT_FILE)


def _model_directory(
    config: TrainConfig,
    source: WeightsSource,
    checkpoint: Checkpoint | None,
    directory: Path,
    *,
    say: Callable[[str], None],
) -> Path:
    """Return the directory of the weights for the engines; a checkpoint, or an adapter with its model, is written to
    `directory` as one model."""
    dtype = DTYPES[config.rollout.dtype.name]
    if source.kind is SourceKind.adapter:
        say(f"adding the adapter in {source.path} to its model")
        write_merged(config, source.path, directory, dtype=dtype)
        if note := adapter_tokenizer_note(source.path, directory):
            say(f"note: {note}")
        return directory
    if checkpoint is None:
        return source.path if source.kind is SourceKind.model else resolve_model(config, progress=_silent)
    say(f"reading the weights of {checkpoint.path}")
    write_model(config, checkpoint, directory, dtype=dtype)
    return directory


def _silent(done: int, total: int, detail: str) -> None:
    """Progress that nobody looks at."""


def _source_record(source: WeightsSource, checkpoint: Checkpoint | None) -> dict[str, object]:
    path = None if source.kind is SourceKind.base else str(source.path.absolute())
    record: dict[str, object] = {"kind": source.kind.name, "path": path}
    if checkpoint is not None:
        state = checkpoint.state
        record |= {"path": str(checkpoint.path.absolute()), "step": state.step, "policy_version": state.policy_version}
    return record


def _conditions(config: TrainConfig, task: Task, infos: list[EngineInfo]) -> dict[str, object]:
    """Return the settings that decide the responses besides weights and prompts."""
    sampling = config.eval_sampling
    return {
        "seed": config.run.seed,
        "sampling": {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "samples": config.eval.samples,
            "stop_token_ids": list(task.stop_token_ids),
        },
        "engines": [info.name for info in infos],
        "engine_dtype": config.rollout.dtype.name,
        "engine_quantization": config.rollout.quantization.name,
        "reward_function": config.reward.function,
    }


def _set_record(config: TrainConfig, name: str, result: EvalResult) -> dict[str, object]:
    heldout = config.data.eval_path if isinstance(config.data, FileDataConfig) else f"data={config.data.kind}"
    return {
        "file": heldout if name == HELDOUT else config.eval.sets[name],
        "prompts_xxh3_64": prompts_digest([group.prompt for group in result.groups]),
        **{key.partition("/")[2]: value for key, value in result.metrics().items()},
        "accuracy_error": result.accuracy_error,
        "accuracy_sampled_error": result.sampled_error,
    }


def _rows(plan: EvalPlan, groups: Sequence[SampleGroup]) -> list[dict[str, object]]:
    """A row of eval.jsonl per prompt."""
    requests = evaluation_requests([group.prompt for group in groups], plan)
    rows: list[dict[str, object]] = []
    for position, group in enumerate(groups):
        asked = requests[position * len(group.samples) :][: len(group.samples)]
        responses = [
            {
                "seed": request.sampling.seed,
                "response": sample.text,
                "extracted": sample.extracted,
                "correct": sample.correct,
                "reward": sample.reward,
                "reward_parts": sample.reward_parts,
                "num_response_tokens": sample.num_response_tokens,
                "finish_reason": sample.finish_reason.name,
            }
            for request, sample in zip(asked, group.samples, strict=True)
        ]
        rows.append(
            {
                "set": plan.name or HELDOUT,
                "prompt_id": group.prompt.prompt_id,
                "prompt": group.prompt.text,
                "prompt_tokens": len(group.prompt.token_ids),
                "answer": group.prompt.answer,
                "num_correct": num_correct(group.samples[GREEDY + 1 :]),
                "greedy": responses[GREEDY],
                "sampled": responses[GREEDY + 1 :],
            }
        )
    return rows
