"""Problems of model, data, reward and machine that would end a run, found before torch or transformers is imported.

`trainer/run/start.py` asks for them, for `--dry-run` and for the run alike. What only a tokenizer shows is found by
`load_task` (trainer/run/task.py), before anything is started or written.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from algorithms.config import Problem
from rollout.config import SGLangConfig
from rollout.data.data_files import DataError, is_local
from rollout.data.dataset import first_row, load_dataset
from rollout.rewards import try_reward
from rollout.similar_file import similar_directory
from rollout.task_config import ArithmeticDataConfig, FileDataConfig
from trainer.config.train import TrainConfig
from trainer.config.training import HFModelConfig
from trainer.limits.machine import CPUS_PER_WORKER, Machine, this_machine
from trainer.limits.memory_plan import gpu_bytes, memory_plan
from trainer.rundir.text import size

logger = logging.getLogger(__name__)

HUB_TIMEOUT_S = 3.0
"""Seconds for the hub to say whether it has a model; without an answer the run asks again when it fetches the model."""
TOKENIZER_FILES = ("tokenizer*", "vocab*")
OTHER_GPUS = ("/dev/dxg", "/dev/kfd")
"""Devices of GPUs that `Machine.gpus` does not count: of Windows below Linux, and of AMD."""


def task_problems(configs: Sequence[TrainConfig], *, trains: bool = True) -> list[Problem]:
    """Problems of all runs, each once; a model, a file or a function that several runs share is looked at once.

    Runs that do not train have no ranks, and their model is not looked at: it is not always that of the config.
    """
    machine = this_machine()
    found = [problem for config in configs for problem in _machine_problems(config, machine, trains=trains)]
    for config in {task_key(config): config for config in configs}.values():
        found += [*(_model_problems(config) if trains else ()), *_data_problems(config)]
    return list({str(problem): problem for problem in found}.values())


def task_key(config: TrainConfig) -> str:
    """The same text for runs that work on the same task."""
    sections = ("model", "critic", "advantage", "data", "eval", "reward", "sampling", "rollout")
    return repr([getattr(config, name) for name in sections])


def is_on_disk(config: TrainConfig) -> bool:
    """True if the model is a directory and the rows are files of this disk: nothing has to be fetched or made."""
    if not (isinstance(config.model, HFModelConfig) and isinstance(config.data, FileDataConfig)):
        return False
    models = [config.model.path, *([config.critic.path] if config.has_critic and config.critic.path else [])]
    sources = (config.data.train_path, config.data.eval_path, *config.eval.sets.values())
    return all(Path(path).expanduser().is_dir() for path in models) and all(map(is_local, sources))


def _machine_problems(config: TrainConfig, machine: Machine, *, trains: bool) -> Iterator[Problem]:
    """Yield the problems of workers that do not fit on this machine; a cluster at an address is not asked."""
    if config.cluster.address is not None:
        return
    policy, rollout = config.policy, config.rollout
    ranks = policy.num_workers if trains else 0
    gpus = ranks * policy.gpus_per_worker + rollout.num_engines * rollout.gpus_per_engine
    cpus = CPUS_PER_WORKER * (ranks + rollout.num_engines)
    elsewhere = "or name a Ray cluster with cluster.address."
    if gpus > machine.gpus and not any(Path(device).exists() for device in OTHER_GPUS):
        key = "rollout.gpus_per_engine" if rollout.gpus_per_engine else "policy.gpus_per_worker"
        rule = f"must fit on this machine: the run needs {gpus:g} GPU, and it has {machine.gpus}"
        remedy = f"Set policy.gpus_per_worker=0 and rollout.gpus_per_engine=0 for a run on the CPU, {elsewhere}"
        yield config.broken(key, rule, remedy)
    if cpus > max(machine.cpus, os.cpu_count() or 1):  # Ray counts the cores of the machine
        rule = f"must fit on this machine: the workers need {cpus:g} CPU, and it has {machine.cpus}"
        yield config.broken("policy.num_workers", rule, f"Lower it, or rollout.num_engines, {elsewhere}")
    if not trains:
        return
    plan = memory_plan(config, device_bytes=gpu_bytes() if gpus else None)
    for needed, bytes_there in ((plan.least_host_bytes, machine.memory), (plan.least_device_bytes, plan.device_bytes)):
        if needed is not None and bytes_there is not None and needed > bytes_there:
            yield Problem(
                key="model",
                rule=f"must fit into {size(bytes_there)} of memory: weights, gradients and AdamW need {size(needed)}",
                value=config.model.description,
                remedy=f"Use a smaller model or more GPUs, {elsewhere}",
            )


def policy_problems(config: TrainConfig) -> Iterator[Problem]:
    """Yield the problems of the directory, or name on the hub, of the policy."""
    if isinstance(config.model, HFModelConfig):
        found = find_model("model.path", config.model.path, config.model.revision)
        if isinstance(found, Problem):
            yield found
        elif found is not None:
            yield from _context_problems(config, found)


def _model_problems(config: TrainConfig) -> Iterator[Problem]:
    """Yield the problems of the directories, or names on the hub, of policy and critic."""
    yield from policy_problems(config)
    if config.has_critic and config.critic.path is not None:
        found = find_model("critic.path", config.critic.path, None)
        if isinstance(found, Problem):
            yield found


def find_model(key: str, path: str, revision: str | None) -> Path | Problem | None:
    """The directory of a model, also in the hub's cache; None if the hub has it; or the Problem with `path`."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return _incomplete(key, directory) or directory
    rule = "must be a directory or a repository of the hub that can be read"
    if directory.exists():
        return Problem(
            key=key, rule=rule, value=path, remedy=f"It is a file: {key}={directory.parent} is its directory."
        )
    # Imported here because the import takes a quarter of a second, and most runs have their model on the disk.
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=["config.json"], local_files_only=True))
    except HFValidationError:
        remedy = similar_directory(path) or "There is no such directory, and it is no name of the hub."
        return Problem(key=key, rule=rule, value=path, remedy=remedy)
    except LocalEntryNotFoundError:
        pass  # the hub is asked below
    try:
        HfApi().model_info(path, revision=revision, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # of the hub's library and of its HTTP client, which is no dependency of Parity itself
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if status >= 500 or "Timeout" in type(error).__name__:
            return None
        said = str(error).splitlines()[0]
        remedy = f"There is no such directory here, and the hub cannot be asked or does not give it: {said}"
        remedy = similar_directory(path) or remedy
        return Problem(key=key, rule=rule, value=path, remedy=remedy)
    return None


def _incomplete(key: str, directory: Path) -> Problem | None:
    """The Problem of a directory that is no model; `key` decides whether it needs a tokenizer."""
    missing = [name for name in ("config.json", "*.safetensors") if not any(directory.glob(name))]
    if key != "critic.path" and not any(any(directory.glob(name)) for name in TOKENIZER_FILES):
        missing.append("tokenizer.json")
    if not missing and "model_type" in described(directory):
        return None
    return Problem(
        key=key,
        rule="must be the directory of a Hugging Face model"
        + (f", with {', '.join(missing)}" if missing else ", whose config.json names its model_type"),
        value=str(directory),
        remedy=f"model.save_pretrained(DIR) and tokenizer.save_pretrained(DIR) write one; then {key}=DIR.",
    )


def described(directory: Path) -> Mapping[str, Any]:
    """config.json of a model; empty if it cannot be read."""
    try:
        found = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _context_problems(config: TrainConfig, directory: Path) -> Iterator[Problem]:
    """Yield the problem of responses that fit with no prompt; the prompts are read only then, for the right number."""
    if any(context_problems(config, directory, longest_prompt=None)):
        yield from context_problems(config, directory, longest_prompt=_longest_prompt(config, directory))


def _longest_prompt(config: TrainConfig, directory: Path) -> int | None:
    """Tokens of the longest prompt; None if it is not on this disk, or cannot be read, which others report."""
    if not is_on_disk(config):
        return None
    # Imported here because the import takes seconds, and only this refusal needs it.
    from rollout.data.tokenizer import load_tokenizer

    try:
        return load_dataset(config.data, load_tokenizer(directory), eval_sets=config.eval.sets).longest_prompt
    except Exception as error:  # transformers raises whatever its readers of files raise
        logger.debug("the prompts cannot be read: %s", error)
        return None


def context_problems(config: TrainConfig, directory: Path, *, longest_prompt: int | None) -> Iterator[Problem]:
    """Yield the problem of responses for which a prompt of `longest_prompt` tokens leaves no room in the context.

    None is a length that is not known, of at least a token. Nothing is yielded where the engine decides: with servers
    that run already, and with scaled positions.
    """
    model = described(directory)
    text = model.get("text_config", model)
    context = text.get("max_position_embeddings")
    if isinstance(config.rollout, SGLangConfig):
        context = config.rollout.engine_args.get("context_length", context)
        if config.rollout.servers or any(
            "factor" in (text.get(key) or {}) for key in ("rope_scaling", "rope_parameters")
        ):
            return
    tokens = {"sampling.max_new_tokens": config.sampling.max_new_tokens}
    tokens |= {"eval.max_new_tokens": config.eval.max_new_tokens} if config.eval.max_new_tokens is not None else {}
    for key, most in tokens.items():
        if not isinstance(context, int) or (longest_prompt or 1) + most <= context:
            continue
        rule = f"must leave room for a prompt in the model's context of {context} tokens"
        remedy = f"Take {context} less the tokens of the longest prompt, which is not read yet."
        if longest_prompt is not None:
            rule = f"must be <= {context - longest_prompt}: the model's context has {context} tokens, and prompts have "
            rule += f"up to {longest_prompt} of them"
            remedy = "Or leave long prompts out (data.max_prompt_tokens, data.on_bad_row=skip)."
        yield Problem(key=key, rule=rule, value=most, remedy=remedy)


def _data_problems(config: TrainConfig) -> Iterator[Problem]:
    """Yield the problems of the rows, and of the reward function with the first of them."""
    try:
        prompt = first_row(config.data, config.eval.sets)
    except DataError as error:
        yield from error.problems
        return
    own_rule = isinstance(config.data, ArithmeticDataConfig) and ":" not in config.reward.function
    if prompt is None or own_rule:
        return
    if reason := try_reward(config.reward, prompt):
        rule = "must score the first row of the data, with its own answer as the response"
        yield config.broken("reward.function", rule, f"It failed with {reason}")
