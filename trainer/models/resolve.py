"""The config's model -> a local directory that can be read: made, converted, found, or fetched from the hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from algorithms.config import Problem
from rollout.data.hub import fetch_model, limit_silence
from rollout.data.tokenizer import load_tokenizer
from trainer.config.train import TrainConfig
from trainer.config.training import ArithmeticModelConfig, HFModelConfig, ModelConfig, SmolLM2ModelConfig
from trainer.models.base_model import base_model_entry, build_base_model
from trainer.models.directory import find_model
from trainer.models.smollm2 import build_smollm2, smollm2_entry
from trainer.policy.model import UnsupportedModelError, check_files
from trainer.rundir.cache import Progress
from trainer.rundir.run_dir import StartError


def resolve_model(config: TrainConfig, *, progress: Progress) -> Path:
    """The model as a local directory: built, converted, found, or fetched from the hub at its pinned revision."""
    hide_bars()
    model = config.model
    if isinstance(model, ArithmeticModelConfig):
        return build_base_model(model, progress=progress)
    if isinstance(model, SmolLM2ModelConfig):
        return build_smollm2(progress=progress)
    if not isinstance(model, HFModelConfig):
        raise ValueError(f"model={model.kind!r} is unknown; use model=hf, model=smollm2 or model=arithmetic")
    return _directory("model.path", model.path, model.revision)


def made_model(model: ModelConfig) -> Path | None:
    """The directory of a model that Parity has made before; None of others."""
    entry = base_model_entry(model) if isinstance(model, ArithmeticModelConfig) else smollm2_entry()
    return entry if entry.is_dir() else None


def hide_bars() -> None:
    """Let transformers draw no bars while it reads and writes files of this machine; downloads keep theirs."""
    shows_downloads = not are_progress_bars_disabled()
    transformers_logging.disable_progress_bar()  # of downloads too
    if shows_downloads:
        enable_progress_bars()


def resolve_critic(config: TrainConfig, model_path: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """The model that a critic starts from as a local directory: that of the policy if the config names no other.

    Raises StartError if it has another vocabulary than the policy, whose tokens it must read.
    """
    critic = config.critic
    if critic.path is None:
        return model_path
    path = _directory("critic.path", critic.path, None)
    if load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
        rule = f"must have the vocabulary of the policy ({model_path})"
        remedy = "Use a model of the same family, or null for that of the policy."
        raise StartError(Problem(key="critic.path", rule=rule, value=critic.path, remedy=remedy))
    return path


def _directory(key: str, path: str, revision: str | None) -> Path:
    """A local directory as it is, anything else fetched from the hub. Raises StartError that names the `key`."""
    directory = Path(path)
    try:
        if not directory.is_dir():
            limit_silence()
            directory = Path(fetch_model(path, revision=revision))
    except (OSError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        rule = "must be a directory or a repository of the hub that can be read"
        remedy = f"{key}=DIR says where it lies now: no such directory is in {Path.cwd()}, and the hub says {reason}"
        raise StartError(Problem(key=key, rule=rule, value=path, remedy=remedy)) from error
    # A model of the hub is here only now, and the files of another may have been changed since the run began.
    if isinstance(found := find_model(key, str(directory), None), Problem):
        raise StartError(found)
    return directory


def compare_files(key: str, model_path: Path) -> None:
    """Raise StartError, naming `key`, if the files of the model do not hold what its config.json describes."""
    try:
        check_files(model_path)
    except UnsupportedModelError as error:
        rule = "must be a model of an architecture that Parity computes"
        raise StartError(
            Problem(key=key, rule=rule, value=str(model_path), remedy=f"{error}. Use another model.")
        ) from error
    except Exception as error:  # transformers raises whatever its checks of a config.json raise
        reason = " ".join(str(error).split())
        if "does not recognize this architecture" in reason:  # its advice is to install another transformers
            reason = "transformers has no model of its model_type, and code that comes with a model is never run."
        elif not isinstance(error, ValueError):  # a KeyError of transformers is one value of config.json
            reason = f"transformers makes no model of config.json: {type(error).__name__}: {reason}"
        rule = (
            "must hold the weights of the model that its config.json describes, named as by its class in transformers"
        )
        raise StartError(Problem(key=key, rule=rule, value=str(model_path), remedy=reason)) from error
