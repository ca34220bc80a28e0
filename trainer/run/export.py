"""A checkpoint of a run -> a Hugging Face directory that transformers and SGLang load. Used by `parity export`.

The model is never whole in memory: each file of weights is filled from the checkpoint, written and forgotten.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from rollout.data.tokenizer import copy_tokenizer
from rollout.weights.packing import DTYPES
from trainer.config.train import TrainConfig
from trainer.policy.model import INDEX_FILE, WEIGHT_FILE, empty_causal_lm
from trainer.policy.shards import load_shards
from trainer.run.task import resolve_model
from trainer.rundir.checkpoint import Checkpoint

MAX_SHARD_BYTES = 5 * 10**9
"""Size of a file of weights above which the next one begins: that of most models on the hub."""
GENERATION_FILE = "generation_config.json"


def write_model(
    config: TrainConfig,
    checkpoint: Checkpoint,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the policy of `checkpoint` to `directory`, whole or not at all, with its tokenizer.

    The weights are cast to `dtype`; None is the type of the model that the run started from. In memory are one file
    of at most `max_shard_bytes`, unless a single tensor is larger, and one tensor in float32. Raises CheckpointError if
    the checkpoint does not fit the model.
    """
    start = resolve_model(config, progress=lambda done, total, detail: None)
    unfinished = directory.with_name(f".{directory.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished.mkdir()  # refuses a link that somebody else has put there
    try:
        model = _described(start)
        torch.nn.Module.to(model, dtype=_dtype_of(start) if dtype is None else dtype)  # in place
        model.save_pretrained(unfinished, state_dict={})  # what says which model it is; there is no tensor yet
        _write_weights(model, checkpoint.policy_path, unfinished, max_shard_bytes=max_shard_bytes)
        copy_tokenizer(start, unfinished)
        for path in unfinished.glob("*.safetensors"):  # which nobody else can read, and an export is for sharing
            path.chmod((unfinished / "config.json").stat().st_mode)
        unfinished.rename(directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)  # gigabytes that no name leads to
        raise


def _described(start: Path) -> PreTrainedModel:
    """The model in the directory `start` without its weights, with the settings of generation that lie there."""
    model = empty_causal_lm(start)
    if (start / GENERATION_FILE).is_file():
        model.generation_config = GenerationConfig.from_pretrained(start)
    return model


def _write_weights(model: PreTrainedModel, policy: Path, directory: Path, *, max_shard_bytes: int) -> None:
    """Write the weights that `policy`, the part of a checkpoint, holds of `model`, with its dtypes, file by file."""
    stored = _stored(model)
    pattern = WEIGHT_FILE.replace(".", "{suffix}.", 1)
    split = split_torch_state_dict_into_shards(stored, filename_pattern=pattern, max_shard_size=max_shard_bytes)
    for file, names in split.filename_to_tensors.items():
        _write_file({name: stored[name] for name in names}, policy, directory / file)
    if split.is_sharded:
        metadata = {"total_parameters": model.num_parameters(), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_file(described: dict[str, Tensor], policy: Path, file: Path) -> None:
    """Write one file of weights; `described` are its tensors, of device meta. Nothing of it is held afterwards."""
    tensors = {name: torch.empty_like(tensor, device="cpu") for name, tensor in described.items()}
    # The prefix is the name of the model in a ScoringModel, which the ranks save.
    of_policy = {f"causal_lm.{name}": tensor for name, tensor in tensors.items()}
    load_shards({"policy": {"model": of_policy}}, policy, alone=True)
    save_file(tensors, file, metadata={"format": "pt"})


def _stored(model: PreTrainedModel) -> dict[str, Tensor]:
    """Name -> tensor of device meta, for every tensor in the files of a model; tied ones have their first name."""
    stored: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            stored[name] = tensor.detach().to("meta")
    return stored


def _dtype_of(model_path: Path) -> torch.dtype:
    """The type in which the weights of a model lie on the disk."""
    dtype = getattr(AutoConfig.from_pretrained(model_path, trust_remote_code=False), "dtype", None)
    if isinstance(dtype, str):
        return DTYPES[dtype]
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
