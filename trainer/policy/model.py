"""ScoringModel -> the same sharded with FSDP2; its gradients and its whole tensors.

Called by every rank of `trainer/policy/worker.py`. Weights are float32 masters; forward and backward run in
`policy.dtype`; gradients are reduced in float32. accelerate makes the empty model (`trainer/policy/model_load.py`). Its
FSDP2, with offload and clipping, is not used because it is for ranks on GPUs only, and a rank can be on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rollout.config import DType
from rollout.hf.transformers import AutoModelForCausalLM, PreTrainedModel
from rollout.weights.buckets import DTYPES, TensorShape
from trainer.policy.attention import PACKED_ATTENTION
from trainer.policy.forward import ScoringModel
from trainer.policy.model_load import load_hf_config


def load_causal_lm(path: Path) -> PreTrainedModel:
    """A whole float32 causal language model from safetensors, without remote code.

    A rank does not need it: see `trainer/policy/model_load.py`. Raises ValueError like `load_hf_config`.
    """
    model = AutoModelForCausalLM.from_pretrained(
        path,
        config=load_hf_config(path),
        dtype=torch.float32,
        use_safetensors=True,
        trust_remote_code=False,
        attn_implementation=PACKED_ATTENTION,
    )
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model.path={path} is not a torch model")
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


def shard(model: nn.Module, decoder: nn.Module, mesh: DeviceMesh, dtype: DType, *, on_host: bool = False) -> None:
    """Apply FSDP2 in place: one unit per layer of its `decoder`, the rest (embedding, final norm, head) in the root.

    Embedding and head stay together in the root because they may be tied: a unit of its own would untie them.
    `on_host`: shards and their gradients lie on the host, and a unit is on the device only while it computes.
    """
    precision, offload = _precision(dtype), _offload(mesh, on_host=on_host)
    for layer in decoder_layers(decoder):
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)


def shard_exactly(module: nn.Module, mesh: DeviceMesh, *, on_host: bool = False) -> None:
    """Make `module` an FSDP2 unit that computes in float32 whatever the rest of its model does; before `shard`."""
    fully_shard(module, mesh=mesh, mp_policy=_precision(DType.float32), offload_policy=_offload(mesh, on_host=on_host))


def _precision(dtype: DType) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=DTYPES[dtype.name], reduce_dtype=torch.float32)


def _offload(mesh: DeviceMesh, *, on_host: bool) -> OffloadPolicy:
    # Memory can be pinned only where there is a CUDA device to copy to.
    return CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if on_host else OffloadPolicy()


def tensor_shapes(model: ScoringModel) -> list[TensorShape]:
    """List name, dtype and shape of every tensor that `full_tensors` yields, in the same order."""
    named = model.causal_lm.named_parameters()
    return [TensorShape(name, parameter.dtype, tuple(parameter.shape)) for name, parameter in named]


def full_tensors(model: ScoringModel) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face name and whole tensor of every parameter, one at a time.

    Gathering is a collective: every rank must walk the iterator to its end. Tied parameters come once.
    """
    if isinstance(model, FSDPModule):
        model.reshard()  # after a forward without backward the root still holds gathered copies in the compute dtype
    for name, parameter in model.causal_lm.named_parameters():
        tensor = parameter.detach()
        if isinstance(tensor, DTensor):
            tensor = tensor.to(tensor.device_mesh.device_type)  # shards on the host are gathered on the mesh's device
        if not isinstance(tensor, DTensor):
            raise TypeError(f"{name} is not sharded: its bytes are not those of the master weights")
        yield name, tensor.full_tensor()
