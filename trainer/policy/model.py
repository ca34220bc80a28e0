"""A model directory -> a sharded model with each rank's own rows of the weights; its whole tensors.

Every rank of `trainer/policy/worker.py` calls `empty_causal_lm`, then `shard`, then `load_rows`. No rank ever holds
more of the weights than its shard, on the device or on the host. Weights are float32 masters; forward and backward run
in `policy.dtype`; gradients are reduced in float32. Beside an adapter the frozen weights lie there in `policy.dtype`.

accelerate makes the empty model. Its loader is not used because rank 0 holds the whole model there and sends every
tensor to all ranks; its FSDP2, with offload and clipping, because it is for ranks on GPUs only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from rollout.config import DType
from rollout.model.limits import PLAIN_OUTPUTS, altered_logits
from rollout.model.onednn_linear import use_fast_products
from rollout.weights.adapter import is_adapter, name_without_adapter, sent_name
from rollout.weights.packed_weights import ALIGNMENT, DTYPES, TensorShape, listed, stored_state
from trainer.policy.host_copy import full_tensor, local_part, own_rows, with_local_part
from trainer.policy.lora import Part, Update, fill_adapter, updates
from trainer.policy.stored import StoredTensor, stored_tensors
from trainer.scoring.attention import PACKED_ATTENTION, packed_attention
from trainer.scoring.forward import ScoringModel
from trainer.scoring.rms_norm import use_fused_norms

logger = logging.getLogger(__name__)

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""The name since torch 2.14, which warns of the earlier one."""
BUCKET_BYTES = 128 << 20
"""Largest number of bytes that are gathered at a time; a larger tensor comes alone."""
COMPARED_ROWS = 4096
"""Rows of two matrices that are compared at a time."""
FLOAT_KINDS = {"F64", "F32", "F16", "BF16"}
"""Types of weights that are not quantised, as safetensors names them."""
ATTENDING = {"full_attention", "sliding_attention"}
"""Kinds of layers in which a token reads others by attention alone."""


class UnsupportedModelError(ValueError):
    """A model that computes what Parity does not, whatever its files hold."""


def load_hf_config(path: Path) -> PretrainedConfig:
    """config.json of a model; UnsupportedModelError for one whose logits are more than head(hidden states)."""
    hf_config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False, **PLAIN_OUTPUTS)
    if altered := altered_logits(hf_config):
        raise UnsupportedModelError(f"{path}: it changes its logits after the head ({altered})")
    return hf_config


def load_causal_lm(
    path: Path, *, dtype: torch.dtype = torch.float32, attention: str | None = PACKED_ATTENTION
) -> PreTrainedModel:
    """A whole causal language model from safetensors, without remote code; `attention` None: that of transformers.

    For a diagnosis, tests and measurements: neither a rank nor an export holds a whole model. Raises ValueError like
    `load_hf_config`.
    """
    model = AutoModelForCausalLM.from_pretrained(
        path,
        config=load_hf_config(path),
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=False,
        attn_implementation=attention,
    )
    return _without_padding(model, path)


def empty_causal_lm(path: Path, *, attention: str = PACKED_ATTENTION) -> PreTrainedModel:
    """A float32 causal language model whose parameters have a shape and no memory (device meta), without remote code.

    Buffers are real: rotary frequencies are computed, not stored. Raises UnsupportedModelError like `load_hf_config`,
    and for a class that does not attend by `attention`.
    """
    hf_config = load_hf_config(path)
    if others := sorted(set(getattr(hf_config, "layer_types", None) or ()) - ATTENDING):
        raise UnsupportedModelError(f"{path}: packed sequences would read each other in its layers ({listed(others)})")
    own = f"{path}: its class in transformers takes no attention but its own"
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(
                hf_config, dtype=torch.float32, trust_remote_code=False, attn_implementation=attention
            )
    except KeyError as error:
        if error.args != (attention,):
            raise
        raise UnsupportedModelError(own) from error
    model = _without_padding(model, path)
    if model._is_stateful or not model._supports_sdpa:
        raise UnsupportedModelError(own)
    model.tie_weights()  # accelerate makes a new parameter wherever one is registered: tied ones come apart
    use_fast_products(model)
    use_fused_norms(model)
    return model


def _without_padding(model: nn.Module, path: Path) -> PreTrainedModel:
    """Let every row of the embedding learn; TypeError if `model` is not of transformers.

    torch gives no gradient to the row of the padding token. Packed sequences have no padding, and in many models that
    token is a real one too: the end of a turn in SmolLM2, which every prompt holds.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model.path={path} is not a torch model")
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        embedding.padding_idx = None
    return model


def decoder_layers(decoder: nn.Module) -> list[nn.Module]:
    """The repeated blocks of the decoder: the units that FSDP shards one by one."""
    lists = [list(module) for module in decoder.children() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(decoder).__name__} has no list of decoder layers to shard")
    return max(lists, key=len)


def checkpoint_activations(decoder: nn.Module, *, every: int) -> None:
    """Have every `every`-th decoder layer keep only its input for the backward pass; 0 does nothing.

    In place and before `shard`: then FSDP gathers a layer before it is computed again. Parameter names stay. That
    of transformers is not used because it is off in eval mode, in which the policy is trained; that of accelerate
    because it puts each layer into another module, which changes the names of its parameters.
    """
    if every:
        for layer in decoder_layers(decoder)[::every]:
            checkpoint(layer, preserve_rng_state=False)  # nothing in eval mode draws random numbers


def compile_layers(decoder: nn.Module) -> None:
    """Compile the forward of every decoder layer with torch.compile, in place; names of parameters stay.

    Hooks of FSDP and of `checkpoint_activations` stay outside. One graph serves all layers and lengths: sizes are
    symbols in it. Packed attention stays outside too: its calls depend on the lengths of the sequences.
    """
    AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))
    for layer in decoder_layers(decoder):
        layer.forward = torch.compile(layer.forward, dynamic=True)


def shard(
    model: nn.Module,
    decoder: nn.Module,
    mesh: DeviceMesh,
    dtype: DType,
    *,
    on_host: bool = False,
    exact: Sequence[nn.Module] = (),
) -> None:
    """Apply FSDP2 in place: one unit per layer of its `decoder`, the rest (embedding, final norm, head) in the root.

    Embedding and head stay together in the root because they may be tied: a unit of its own would untie them.
    `on_host`: shards and their gradients lie on the host, and a unit is on the device only while it computes.
    Each module of `exact` is a unit too, and computes in float32 whatever the `dtype` of the others.
    """
    # Memory can be pinned only where there is a CUDA device to copy to.
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if on_host else OffloadPolicy()
    for units, used in ((exact, DType.float32), ((*decoder_layers(decoder), model), dtype)):
        precision = MixedPrecisionPolicy(param_dtype=DTYPES[used.name], reduce_dtype=torch.float32)
        for unit in units:
            fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=offload)


def load_rows(
    model: nn.Module,
    path: Path,
    *,
    device: torch.device,
    prefix: str = "",
    frozen: torch.dtype = torch.float32,
    adapter_seed: int = 0,
) -> None:
    """Fill the parameters of `model`, which is sharded and without memory, with this rank's rows.

    Each rank reads its own rows from the safetensors files, and its own experts of a mixture; no rank sends any.
    Whatever floating-point type lies in the files becomes float32, or `frozen` for a parameter that is not trained.
    Tied parameters stay one object.

    The shards go to `device`, the host with policy.offload=parameters. `prefix` stands before the model's names in the
    files, if the model is a part of what they hold. An adapter begins as `adapter_seed` draws it. Raises ValueError if
    a parameter is not in the files, or has another shape there, and OSError if the directory holds no safetensors
    weights.
    """
    held = stored_tensors(path, prefix)
    names, stored = _stored_names(model, held, path)
    unused = sorted(held.keys() - {name_without_adapter(name) for aliases in names.values() for name in aliases})
    if unused:
        logger.warning("model.path=%s: tensors that the model has no parameter for: %s", path, listed(unused))
    state: dict[str, Tensor] = {**fill_adapter(model, seed=adapter_seed, device=device)}
    for parameter, name in stored.items():
        if isinstance(parameter, nn.Parameter):
            dtype = torch.float32 if parameter.requires_grad else frozen
            rows = read_shard(parameter, held[name], device=device, dtype=dtype)
            loaded: Tensor = nn.Parameter(rows, requires_grad=parameter.requires_grad)
        else:  # a buffer, which every rank has whole
            loaded = held[name].whole().to(parameter)
        state |= dict.fromkeys(names[parameter], loaded)
    model.load_state_dict(state, strict=True, assign=True)


def _stored_names(
    model: nn.Module, held: Collection[str], path: Path
) -> tuple[dict[Tensor, list[str]], dict[Tensor, str]]:
    """(parameter or buffer -> its names in the model, more than one if it is tied; and -> its name among those `held`).

    Without those of an adapter, which no file of the model holds.

    Raises ValueError if one is not `held` by the files of the directory `path`.
    """
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.state_dict(keep_vars=True).items():
        if not is_adapter(name):
            names.setdefault(parameter, []).append(name)
    in_files = {parameter: map(name_without_adapter, aliases) for parameter, aliases in names.items()}
    stored = {parameter: next((name for name in found if name in held), "") for parameter, found in in_files.items()}
    absent = [names[parameter][0] for parameter, name in stored.items() if not name]
    if absent:
        others = sorted(set(held) - {name_without_adapter(name) for found in names.values() for name in found})
        instead = "save the model again"
        if others:
            instead = f"they hold others, which are not translated: {listed(others)}; take a model of another family, "
            instead += "or weights under the names that its parameters have in transformers"
        raise ValueError(
            f"model.path={path}: the safetensors files lack parameters of the model: {listed(absent)}; {instead}"
        )
    return names, stored


def tensors_in_files(path: Path) -> dict[str, StoredTensor]:
    """Name of every parameter of the model in `path`, of tied ones each name -> the tensor in the files there."""
    held = stored_tensors(path)
    names, stored = _stored_names(empty_causal_lm(path), held, path)
    return {name: held[stored[parameter]] for parameter, aliases in names.items() for name in aliases}


def check_files(path: Path) -> None:
    """Compare the files of a model with its config.json, by name and shape; reads their headers, and tied tensors that
    they hold twice.

    Raises ValueError, as `load_rows` would on every rank, and what transformers raises of a config.json that is wrong.
    """
    held = stored_tensors(path)
    names, stored = _stored_names(empty_causal_lm(path), held, path)
    for parameter, name in stored.items():
        shape, kind = held[name].header()
        if shape != parameter.shape:
            raise ValueError(f"{path}: {name} has shape {list(shape)}, the model wants {list(parameter.shape)}")
        if kind not in FLOAT_KINDS:
            quantised = f"{name} holds {kind}, quantised numbers that would be read without their scales"
            raise ValueError(f"{path}: {quantised}. Save the model in 16 or 32 bits")
        for other in names[parameter]:
            if other != name and other in held and not _same_values(held[name], held[other]):
                tied = f"config.json ties {name} and {other}, and the files hold other values of each"
                raise ValueError(f"{path}: {tied}. transformers 5 keeps them apart: tie_word_embeddings=false says so")


def _same_values(one: StoredTensor, two: StoredTensor) -> bool:
    """True if two names in the files hold the same matrix; a part of it is in memory at a time."""
    if (shape := one.shape()) != two.shape():
        return False
    ends = [(at, min(at + COMPARED_ROWS, shape[0])) for at in range(0, shape[0], COMPARED_ROWS)]
    return all(torch.equal(one.rows(*each).float(), two.rows(*each).float()) for each in ends)


def read_shard(
    parameter: nn.Parameter, stored: StoredTensor, *, device: torch.device, dtype: torch.dtype = torch.float32
) -> DTensor:
    """This rank's rows of a tensor, as `dtype`, placed as `parameter` (a DTensor sharded by rows) is."""
    if not isinstance(parameter.data, DTensor) or parameter.data.placements != (Shard(0),):
        raise TypeError(f"{stored.origin} is not sharded by rows over one mesh dimension")
    whole = parameter.data
    start, stop = own_rows(whole)
    local = torch.empty((stop - start, *whole.shape[1:]), dtype=dtype, device=device)
    if (shape := stored.shape()) != whole.shape:
        raise ValueError(f"{stored.origin} has shape {list(shape)}, the model wants {list(whole.shape)}")
    if stop > start:
        local.copy_(stored.rows(start, stop))
        if not torch.isfinite(local).all():
            raise ValueError(
                f"{stored.origin} holds numbers that are not finite: name another model, or copy the file again"
            )
    return with_local_part(whole, local)


def tensor_shapes(model: ScoringModel, part: Part = Part.whole) -> list[TensorShape]:
    """List name, dtype and shape of every tensor that `full_tensors` yields, in the same order."""
    added = updates(model.causal_lm) if part is Part.whole else {}
    return [
        # The sum of a weight and its adapter is float32.
        TensorShape(
            name,
            torch.float32 if name in added else each.dtype,
            tuple(each.shape),
            kept=not isinstance(each, nn.Parameter),
        )
        for name, each in _named_state(model, part)
    ]


def full_tensors(
    model: ScoringModel,
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    part: Part = Part.whole,
) -> Iterator[tuple[str, Tensor]]:
    """Name and whole tensor of all weights of `part`, in order, on the ranks' device. Tied parameters come once.

    The names are those in the model's files, or peft's for an adapter. Gathering is a collective: every rank must walk
    the iterator to its end. Several ranks cast their rows to the type that `dtypes` names for a tensor before they
    gather it, so that no more bytes travel than are wanted; a rank that is alone gathers nothing and yields tensors as
    they are. Tensors are gathered by the bucket, and the next bucket is under way while the caller works on those of
    the last.
    """
    if isinstance(model, FSDPModule):
        model.reshard()  # after a forward without backward the root still holds gathered copies in the compute dtype
    rows, added = [], updates(model.causal_lm) if part is Part.whole else {}
    for name, parameter in _named_state(model, part):
        tensor = parameter.detach()
        if not isinstance(parameter, nn.Parameter):  # before the parameters: every rank has it whole
            yield name, tensor
            continue
        if not isinstance(tensor, DTensor) or tensor.placements != (Shard(0),):
            raise TypeError(f"{name} is not sharded by rows: its bytes are not those of the master weights")
        own = torch.float32 if name in added else tensor.dtype
        rows.append(_Rows(name, tensor, dtypes.get(name, own), added.get(name)))
    if dist.get_world_size(rows[0].sharded.device_mesh.get_group()) == 1:
        yield from ((each.name, full_tensor(each.with_update())) for each in rows)
        return
    under_way: _Gathering | None = None
    for bucket in _buckets(rows):
        following = _Gathering(bucket)
        if under_way is not None:
            yield from under_way.tensors()
        under_way = following
    if under_way is not None:
        yield from under_way.tensors()


def _named_state(model: ScoringModel, part: Part) -> Iterator[tuple[str, Tensor]]:
    """The weights of `part` under the names with which they are sent, buffers first."""
    for name, each in stored_state(model.causal_lm):
        if is_adapter(name) is (part is Part.adapter):
            yield sent_name(name) if part is Part.adapter else name_without_adapter(name), each


class _Rows(NamedTuple):
    """A parameter of which every rank holds rows, and the dtype in which it is gathered."""

    name: str
    sharded: DTensor
    dtype: torch.dtype
    added: Update | None

    def with_update(self) -> DTensor:
        """The rows with what an adapter adds to them. A collective where there is an adapter."""
        return self.sharded if self.added is None else self.added.to(self.sharded)

    def bytes_per_rank(self) -> int:
        """Bytes of the rows of one rank, on the boundary of the next tensor; the last ranks may fill fewer."""
        rows = math.ceil(self.sharded.shape[0] / self.sharded.device_mesh.size())
        num_bytes = rows * math.prod(self.sharded.shape[1:]) * self.dtype.itemsize
        return math.ceil(num_bytes / ALIGNMENT) * ALIGNMENT


def _buckets(rows: Sequence[_Rows]) -> Iterator[list[_Rows]]:
    """The parameters in order, as many at a time as BUCKET_BYTES hold."""
    bucket: list[_Rows] = []
    left = BUCKET_BYTES
    for each in rows:
        num_bytes = each.bytes_per_rank() * each.sharded.device_mesh.size()
        if bucket and num_bytes > left:
            yield bucket
            bucket, left = [], BUCKET_BYTES
        bucket.append(each)
        left -= num_bytes
    yield bucket


class _Gathering:
    """One collective that gathers the parameters of a bucket, begun when it is made."""

    def __init__(self, bucket: list[_Rows]) -> None:
        mesh = bucket[0].sharded.device_mesh
        self._bucket = bucket
        self._ends = list(accumulate(each.bytes_per_rank() for each in bucket))
        self._sent = torch.empty(self._ends[-1], dtype=torch.uint8, device=mesh.device_type)
        for each, end in zip(bucket, self._ends, strict=True):
            own = local_part(each.with_update())
            start = end - each.bytes_per_rank()
            place = self._sent[start : start + own.numel() * each.dtype.itemsize]
            place.view(each.dtype).view(own.shape).copy_(own)
        self._received = self._sent.new_empty((mesh.size(), self._ends[-1]))
        self._work = _all_gather(self._received.view(-1), self._sent, group=mesh.get_group(), async_op=True)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Wait for the ranks -> name and whole tensor of each parameter of the bucket."""
        self._work.wait()
        for each, end in zip(self._bucket, self._ends, strict=True):
            shape = each.sharded.shape
            num_rows = math.ceil(shape[0] / len(self._received))
            start = end - each.bytes_per_rank()
            parts = self._received[:, start : start + num_rows * math.prod(shape[1:]) * each.dtype.itemsize]
            yield each.name, parts.view(each.dtype).reshape(-1, *shape[1:])[: shape[0]]
