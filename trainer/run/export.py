"""A checkpoint of a run -> a Hugging Face directory that transformers and SGLang load. Used by `parity export`."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from transformers import AutoConfig

from rollout.data.tokenizer import copy_tokenizer
from rollout.weights.packing import DTYPES
from trainer.config.train import TrainConfig
from trainer.limits.estimate import LOGPROB_CHUNK_TOKENS
from trainer.policy.forward import ScoringModel
from trainer.policy.model import load_causal_lm
from trainer.policy.shards import load_shards
from trainer.run.task import resolve_model
from trainer.rundir.checkpoint import Checkpoint


def write_model(
    config: TrainConfig, checkpoint: Checkpoint, directory: Path, *, dtype: torch.dtype | None = None
) -> None:
    """Write the policy of `checkpoint` to `directory`, whole or not at all, with its tokenizer.

    The weights are cast to `dtype`; None is the type of the model that the run started from.
    """
    start = resolve_model(config, progress=lambda done, total, detail: None)
    model = load_policy(config, start, checkpoint)
    unfinished = directory.with_name(f".{directory.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished.mkdir()  # refuses a link that somebody else has put there
    target = _dtype_of(start) if dtype is None else dtype
    model.to(dtype=target).causal_lm.save_pretrained(unfinished, safe_serialization=True)
    copy_tokenizer(start, unfinished)
    for path in unfinished.glob("*.safetensors"):  # which nobody else can read, and an export is for sharing
        path.chmod((unfinished / "config.json").stat().st_mode)
    unfinished.rename(directory)


def load_policy(config: TrainConfig, start: Path, checkpoint: Checkpoint | None) -> ScoringModel:
    """The policy of `checkpoint`, or the model in the directory `start` without one: whole, on the host, in float32."""
    causal_lm = load_causal_lm(start)
    model = ScoringModel(causal_lm, chunk_tokens=LOGPROB_CHUNK_TOKENS, fp32_head=config.policy.fp32_head)
    if checkpoint is not None:
        state = get_model_state_dict(model)
        load_shards({"policy": {"model": state}}, checkpoint.policy_path, alone=True)
        set_model_state_dict(model, state)
    return model


def _dtype_of(model_path: Path) -> torch.dtype:
    """The type in which the weights of a model lie on the disk."""
    dtype = getattr(AutoConfig.from_pretrained(model_path, trust_remote_code=False), "dtype", None)
    if isinstance(dtype, str):
        return DTYPES[dtype]
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
