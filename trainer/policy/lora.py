"""LoRA: the weights of the model are frozen, and small matrices beside its linear layers are trained.

A layer y = x W^T becomes y = x W^T + s x A^T B^T with A [r, in], B [out, r] and s = alpha / r (Hu et al.,
arXiv:2106.09685, section 4.1). Layers, names and formats are those of the library peft, with one adapter, ADAPTER. A
starts as peft draws it and B as zero, so that a run begins with the model itself.

Everything here works on a model as `trainer/policy/model.py` makes and shards it. Nothing has dropout: the engine has
none, and the policy that is trained must be the policy that sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rollout.torch.onednn_linear import use_fast_products
from trainer.config.training import LoraConfig
from trainer.limits.adapter_shape import chosen_layers
from trainer.policy.host_copy import full_tensor, local_part, own_rows, with_local_part

if TYPE_CHECKING:  # peft takes seconds to import, and most runs need none of it
    from peft import LoraConfig as PeftConfig
    from transformers import PreTrainedModel

ADAPTER = "default"
"""Name of the adapter, which peft puts into the names of its parameters."""
A_ENDING, B_ENDING = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"
"""Ends of the names of A and B, after that of their layer."""
_BASE = ".base_layer."


class NoAdapterError(ValueError):
    """policy.lora fits no layer of the model."""


def add_adapter(causal_lm: PreTrainedModel, config: LoraConfig) -> None:
    """Put an adapter beside the chosen linear layers, in place, and freeze everything else.

    `causal_lm` is without memory (device meta), and so is the adapter. Raises NoAdapterError if no layer is chosen.
    """
    from peft import inject_adapter_in_model

    inject_adapter_in_model(peft_config(causal_lm, config), causal_lm, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    use_fast_products(causal_lm)  # the layers of the adapter too


def peft_config(causal_lm: PreTrainedModel, config: LoraConfig) -> PeftConfig:
    """The adapter as peft describes it. Raises NoAdapterError if no layer of the model is chosen."""
    from peft import LoraConfig as PeftConfig

    linear = [name for name, module in causal_lm.named_modules() if isinstance(module, nn.Linear)]
    targets = chosen_layers(linear, config.targets)
    if not targets:
        raise NoAdapterError(f"policy.lora.targets={config.targets} is the name of no linear layer of the decoder")
    # The last parts of the names say the same in a few words, where they mean no other layer.
    ends = sorted({name.rpartition(".")[2] for name in targets})
    is_same = {name for name in linear if name.rpartition(".")[2] in ends} == set(targets)
    return PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=ends if is_same else targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )


def is_adapter(name: str) -> bool:
    """True for the name of a parameter that belongs to the adapter."""
    return name.endswith((A_ENDING, B_ENDING))


def name_without_adapter(name: str) -> str:
    """The name that a parameter of the frozen model has in its files."""
    return name.replace(_BASE, ".")


def peft_name(name: str) -> str:
    """The name that a parameter of the adapter has in peft's files, below their prefix."""
    return name.replace(f".{ADAPTER}.", ".")


def added(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """What the adapter adds to the weights of a layer: s B A; some rows of B give these rows."""
    return (b @ a).mul_(scale)


def fill_adapter(model: nn.Module, *, seed: int, device: torch.device) -> dict[str, nn.Parameter]:
    """This rank's rows of a new adapter by name: A uniform within 1/sqrt(in), as peft draws it, B zero.

    Every rank draws the whole matrices, which are small, so that the numbers do not depend on the number of ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    filled: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            whole = torch.zeros(parameter.shape)
            if name.endswith(A_ENDING):
                nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
            start, stop = own_rows(parameter.data)  # type: ignore[arg-type]  # sharded, so a DTensor
            rows = whole[start:stop].to(device)
            filled[name] = nn.Parameter(with_local_part(parameter.data, rows))  # type: ignore[arg-type]
    return filled


class Update:
    """What the adapter adds to one weight: s B A, of which every rank has its own rows."""

    def __init__(self, a: DTensor, b: DTensor, scale: float) -> None:
        self._a, self._b, self._scale = a, b, scale

    def to(self, weight: DTensor) -> DTensor:
        """The sum with the weight [out, in] of the layer: new rows. A collective: A is gathered."""
        own, b = local_part(weight), local_part(self._b)
        return with_local_part(weight, own + added(full_tensor(self._a).to(b.device), b, self._scale))


def updates(causal_lm: nn.Module) -> dict[str, Update]:
    """Name of a weight of the model in its files -> what the adapter adds to it; empty without an adapter."""
    found: dict[str, Update] = {}
    parameters = {name: parameter.detach() for name, parameter in causal_lm.named_parameters() if is_adapter(name)}
    for name, a in parameters.items():
        if name.endswith(A_ENDING):
            layer = name.removesuffix(A_ENDING)
            scale: float = causal_lm.get_submodule(layer).scaling[ADAPTER]  # type: ignore[index, assignment, union-attr]
            found[f"{layer}.weight"] = Update(a, parameters[layer + B_ENDING], scale)  # type: ignore[arg-type]
    return found


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """While the context lasts the model computes without its adapter: with the weights that the run began with.

    The adapter is multiplied by 0. Turning it off as peft does would also freeze and thaw its parameters, which FSDP
    has noted down.
    """
    scales: list[dict[str, float]] = [module.scaling for module in model.modules() if hasattr(module, "lora_A")]  # type: ignore[misc]
    before = [scale[ADAPTER] for scale in scales]
    try:
        for scale in scales:
            scale[ADAPTER] = 0.0
        yield
    finally:
        for scale, value in zip(scales, before, strict=True):
            scale[ADAPTER] = value


def without_adapter(model: Callable[..., Any]) -> Callable[..., Any]:
    """The frozen model inside `model` as a function with the same arguments: the reference policy of a LoRA run."""

    def score(*arguments: Any, **options: Any) -> Any:
        with adapter_off(model):  # type: ignore[arg-type]
            return model(*arguments, **options)

    return score
