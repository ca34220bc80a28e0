"""A checkpoint of a run -> a Hugging Face directory that transformers and SGLang load. Used by `parity export`.

The model is never whole in memory: each file of weights is filled from the checkpoint, written and forgotten. A
checkpoint of a LoRA run holds the adapter only: it is added to the weights of the model that the run began with, or
written by itself as peft writes adapters.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from algorithms.config import Problem
from rollout.data.tokenizer import copy_tokenizer, load_tokenizer
from rollout.data.turn_ends import stop_token_ids
from rollout.weights.adapter import A_ENDING, A_SENT, B_ENDING, B_SENT, is_adapter, peft_config, sent_name
from rollout.weights.files import INDEX_FILE, WEIGHT_FILE
from rollout.weights.packed_weights import DTYPES
from trainer.config.train import TrainConfig
from trainer.config.training import HFModelConfig
from trainer.limits.adapter_shape import stored_linear_shapes
from trainer.models.adapter import FILE_PREFIX, MODEL_MARK, read_adapter
from trainer.models.config_files import copy_description, describe_tokenizer_for_release_4
from trainer.models.resolve import resolve_model
from trainer.policy.checkpoint_shards import load_shards
from trainer.policy.lora import adapter_spec, added, freeze_beside_adapter
from trainer.policy.model import empty_causal_lm, tensors_in_files
from trainer.policy.stored import StoredTensor, stored_tensors
from trainer.rundir.checkpoint import Checkpoint, CheckpointError
from trainer.rundir.model_mark import model_mark
from trainer.rundir.resume import lora_of
from trainer.rundir.weights_source import KEY

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = 5 * 10**9
"""Size of a file of weights above which the next one begins: that of most models on the hub."""
ADAPTER_FILE = "adapter_model.safetensors"
"""As peft names it."""
PREFIX = "causal_lm."
"""Name of the model in a ScoringModel, which the ranks save."""


def write_model(
    config: TrainConfig,
    checkpoint: Checkpoint,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the policy of `checkpoint` to `directory`, whole or not at all, with the files of the model that the run
    started from as they are: the type and the tokens that end a response are set in them.

    The weights are cast to `dtype`; None is the type of the model that the run started from. In memory are one file
    of at most `max_shard_bytes`, unless a single tensor is larger, and one tensor in float32. Raises CheckpointError if
    the checkpoint does not fit the model.
    """
    start = _model_of(config, checkpoint)
    lora = lora_of(checkpoint.state.config)
    source: _Source = _Weights(checkpoint)
    if lora.rank:
        source = _Merged(start, _adapter(start, checkpoint), scale=lora.alpha / lora.rank)
    _write_whole(config, start, source, directory, dtype=dtype, max_shard_bytes=max_shard_bytes)


def _model_of(config: TrainConfig, checkpoint: Checkpoint) -> Path:
    """The model that the run of `checkpoint` began with. Raises CheckpointError for an adapter of other weights."""
    start = resolve_model(config, progress=lambda done, total, detail: None)
    if checkpoint.state.model_mark in (None, model_mark(start)):
        return start
    if lora_of(checkpoint.state.config).rank:
        raise CheckpointError(f"{checkpoint.path} holds an adapter of other weights than those in {start}")
    logger.warning(
        "%s does not hold the weights that the run of %s began with: tokenizer, chat template, stop tokens and "
        "config.json are those that lie there now", start, checkpoint.path
    )  # fmt: skip
    return start


def write_merged(config: TrainConfig, adapter: Path, directory: Path, *, dtype: torch.dtype) -> None:
    """Write the model of `config` with the adapter of the directory `adapter` added to its weights to `directory`.

    Otherwise like `write_model`. Raises CheckpointError if the adapter is not one of this model.
    """
    start = resolve_model(config, progress=lambda done, total, detail: None)
    found = read_adapter(KEY, adapter, stored_linear_shapes(start), mark=model_mark(start))
    if isinstance(found, Problem):
        raise CheckpointError(str(found))
    tensors: dict[str, Tensor] = {}
    for file in adapter.glob("*.safetensors"):
        tensors |= {name.removeprefix(FILE_PREFIX): each.float() for name, each in load_file(file).items()}
    named = {name.replace(A_SENT, A_ENDING).replace(B_SENT, B_ENDING): each for name, each in tensors.items()}
    source = _Merged(start, named, scale=found.alpha / found.rank)
    _write_whole(config, start, source, directory, dtype=dtype, max_shard_bytes=MAX_SHARD_BYTES)


def _write_whole(
    config: TrainConfig,
    start: Path,
    source: _Source,
    directory: Path,
    *,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> None:
    """Write the weights of `source`, of a model like that in `start`, with the other files of that one."""
    dtype = _dtype_of(start) if dtype is None else dtype
    stop_ids = stop_token_ids(load_tokenizer(start), start, stop=config.sampling.stop)
    with _whole_or_nothing(directory) as unfinished:
        model = empty_causal_lm(start)
        for parameter in model.parameters():  # buffers have a type of their own
            parameter.data = parameter.to(dtype)
        copy_description(start, unfinished, dtype=dtype, stop_ids=stop_ids)
        _write_weights(model, source, unfinished, as_in=stored_tensors(start), max_shard_bytes=max_shard_bytes)
        copy_tokenizer(start, unfinished)
        describe_tokenizer_for_release_4(unfinished)


def write_adapter(config: TrainConfig, checkpoint: Checkpoint, directory: Path) -> None:
    """Write the adapter of a LoRA run's `checkpoint` to `directory`, whole or not at all, as peft writes adapters.

    float32, as it was trained. Raises CheckpointError if the checkpoint does not fit the model.
    """
    start = _model_of(config, checkpoint)
    model = empty_causal_lm(start)
    described = peft_config(model, adapter_spec(model, lora_of(checkpoint.state.config)))
    described.inference_mode = True
    of_hub = config.model if isinstance(config.model, HFModelConfig) and not Path(config.model.path).is_dir() else None
    described.base_model_name_or_path = str(start.resolve()) if of_hub is None else of_hub.path
    described.revision = None if of_hub is None else of_hub.revision
    tensors = {f"{FILE_PREFIX}{sent_name(name)}": each for name, each in _adapter(start, checkpoint).items()}
    metadata = {"format": "pt", MODEL_MARK: model_mark(start) or ""}
    with _whole_or_nothing(directory) as unfinished:
        described.save_pretrained(str(unfinished))
        save_file(tensors, unfinished / ADAPTER_FILE, metadata=metadata)


@contextmanager
def _whole_or_nothing(directory: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `directory` if nothing is raised, and goes otherwise."""
    unfinished = directory.with_name(f".{directory.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished.mkdir()  # refuses a link that somebody else has put there
    try:
        yield unfinished
        for path in unfinished.glob("*.safetensors"):  # which nobody else can read, and an export is for sharing
            path.chmod(unfinished.stat().st_mode & 0o666)
        unfinished.rename(directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)  # gigabytes that no name leads to
        raise


class _Weights:
    """The weights of a run that trains all of them: those of its checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._policy = checkpoint.policy_path

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Fill tensors by their names in the model, whatever their dtypes."""
        load_shards(
            {"policy": {"model": {f"{PREFIX}{name}": each for name, each in tensors.items()}}}, self._policy, alone=True
        )


class _Merged:
    """The weights of the model in `start` with an adapter added, which has whole matrices, named as the ranks do."""

    def __init__(self, start: Path, adapter: Mapping[str, Tensor], *, scale: float) -> None:
        self._stored = tensors_in_files(start)
        self._adapter, self._scale = adapter, scale

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """As that of `_Weights`."""
        for name, tensor in tensors.items():
            whole = self._stored[name].whole().float()
            layer = name.removesuffix(".weight")
            if (a := self._adapter.get(f"{layer}{A_ENDING}")) is not None:
                whole += added(a, self._adapter[f"{layer}{B_ENDING}"], self._scale)
            tensor.copy_(whole)


_Source = _Weights | _Merged


def _adapter(start: Path, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The whole adapter in a checkpoint of a LoRA run by name, float32; `start` is the model that it began with."""
    model = empty_causal_lm(start)
    freeze_beside_adapter(model, lora_of(checkpoint.state.config))
    described = {name: each for name, each in model.named_parameters() if is_adapter(name)}
    tensors = {name: torch.empty(each.shape, dtype=torch.float32) for name, each in described.items()}
    _Weights(checkpoint).fill(tensors)
    return tensors


def _write_weights(
    model: PreTrainedModel,
    source: _Source,
    directory: Path,
    *,
    as_in: Mapping[str, StoredTensor],
    max_shard_bytes: int,
) -> None:
    """Write the weights that `source` holds of `model`, with its dtypes, file by file, under the names that the files
    of the model that the run started from have for them: one for each matrix of an expert."""
    stored = _stored(model)
    names_there = {name: as_in[name].names if name in as_in else (name,) for name in stored}
    pattern = WEIGHT_FILE.replace(".", "{suffix}.", 1)
    split = split_torch_state_dict_into_shards(stored, filename_pattern=pattern, max_shard_size=max_shard_bytes)
    for file, names in split.filename_to_tensors.items():
        _write_file({name: stored[name] for name in names}, source, directory / file, names_there)
    if split.is_sharded:
        metadata = {"total_parameters": model.num_parameters(), **split.metadata}
        places = {part: file for name, file in split.tensor_to_filename.items() for part in names_there[name]}
        index = {"metadata": metadata, "weight_map": places}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_file(
    described: dict[str, Tensor], source: _Source, file: Path, names_there: Mapping[str, tuple[str, ...]]
) -> None:
    """Write one file of weights; `described` are its tensors, of device meta. Nothing of it is held afterwards."""
    tensors = {name: torch.empty_like(tensor, device="cpu") for name, tensor in described.items()}
    source.fill(tensors)
    written: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = names_there[name]
        written |= (
            {parts[0]: tensor} if len(parts) == 1 else dict(zip(parts, _matrices(tensor, len(parts)), strict=True))
        )
    save_file(written, file, metadata={"format": "pt"})


def _matrices(experts: Tensor, number: int) -> tuple[Tensor, ...]:
    """The matrices of the experts of a layer [E, O, I], so many of equal size, as views."""
    return experts.view(number, -1, experts.shape[-1]).unbind()


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
    """The type of the weights that config.json names, or, as for transformers, that of the tensors in the files."""
    dtype = getattr(AutoConfig.from_pretrained(model_path, trust_remote_code=False), "dtype", None)
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    if isinstance(dtype, torch.dtype):
        return dtype
    stored = (each.rows(0, 1).dtype for each in stored_tensors(model_path).values())
    return next((each for each in stored if each.is_floating_point), torch.float32)
