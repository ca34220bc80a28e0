"""LoRA in the policy: the weights of the model are frozen, and small matrices beside its linear layers are trained.

`rollout/weights/adapter.py` has the formula and the names. A starts as peft draws it and B as zero, so that a run
begins with the model itself.

Everything here works on a model as `trainer/policy/model.py` makes and shards it. Nothing has dropout: the engine has
none, and the policy that is trained must be the policy that sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rollout.model.onednn_linear import use_fast_products
from rollout.types import AdapterSpec
from rollout.weights.adapter import A_ENDING, ADAPTER, B_ENDING, add_adapter, is_adapter
from trainer.config.training import LoraConfig
from trainer.limits.adapter_shape import chosen_layers
from trainer.policy.host_copy import full_tensor, local_part, own_rows, with_local_part

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Part(Enum):
    """The parameters that engines get at once."""

    whole = "whole"
    """All weights of the model; with an adapter, with what it adds to them."""
    frozen = "frozen"
    """The weights beside an adapter, as the run began with them."""
    adapter = "adapter"


class NoAdapterError(ValueError):
    """policy.lora fits no layer of the model."""


def freeze_beside_adapter(causal_lm: PreTrainedModel, config: LoraConfig) -> None:
    """Put an adapter beside the chosen linear layers, in place, and freeze everything else.

    `causal_lm` is without memory (device meta), and so is the adapter. Raises NoAdapterError if no layer is chosen.
    """
    add_adapter(causal_lm, adapter_spec(causal_lm, config), on_meta=True)
    use_fast_products(causal_lm)  # the layers of the adapter too


def adapter_spec(causal_lm: nn.Module, config: LoraConfig) -> AdapterSpec:
    """The adapter of `config` for a model. Raises NoAdapterError if no layer of it is chosen."""
    linear = [name for name, module in causal_lm.named_modules() if isinstance(module, nn.Linear)]
    layers = chosen_layers(linear, config.targets)
    if not layers:
        raise NoAdapterError(f"policy.lora.targets={config.targets} is the name of no linear layer of the decoder")
    return AdapterSpec(rank=config.rank, alpha=config.alpha, layers=tuple(layers))


def added(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """What the adapter adds to the weights of a layer: s B A; some rows of B give these rows."""
    return (b @ a).mul_(scale)


def drawn_a(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """A new A [r, in], float32, uniform within 1 / sqrt(in), as peft draws it."""
    return nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=generator)


def fill_adapter(model: nn.Module, *, seed: int, device: torch.device) -> dict[str, nn.Parameter]:
    """This rank's rows of a new adapter by name: A random, B zero.

    Every rank draws the whole matrices, which are small, so that the numbers do not depend on the number of ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    filled: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            is_a = name.endswith(A_ENDING)
            whole = drawn_a(parameter.shape, generator) if is_a else torch.zeros(parameter.shape)
            start, stop = own_rows(parameter.data)  # type: ignore[arg-type]  # sharded, so a DTensor
            # A copy: DCP cannot stage a DTensor whose rows lie behind those of another rank in the same memory.
            rows = whole[start:stop].to(device, copy=True)
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
def adapter_scaled(model: nn.Module, factor: float) -> Iterator[None]:
    """While the context lasts the model computes with `factor` times its adapter, with 0 as the run began.

    Turning the adapter off as peft does would also freeze and thaw its parameters, which FSDP has noted down.
    """
    scales: list[dict[str, float]] = [module.scaling for module in model.modules() if hasattr(module, "lora_A")]  # type: ignore[misc]
    before = [scale[ADAPTER] for scale in scales]
    try:
        for scale in scales:
            scale[ADAPTER] *= factor
        yield
    finally:
        for scale, value in zip(scales, before, strict=True):
            scale[ADAPTER] = value


def without_adapter(model: Callable[..., Any]) -> Callable[..., Any]:
    """The frozen model inside `model` as a function with the same arguments: the reference policy of a LoRA run."""

    def score(*arguments: Any, **options: Any) -> Any:
        with adapter_scaled(model, 0.0):  # type: ignore[arg-type]
            return model(*arguments, **options)

    return score


class ProbeAdapter:
    """An adapter of random numbers in the place of the policy's, until `end`: its effect is seen on any token.

    That of a run has none at the start, where B is zero.
    """

    def __init__(self, causal_lm: nn.Module, *, seed: int, size: float) -> None:
        """A is drawn like that of a new adapter; B is normal, so that s B A has the root mean square `size` / sqrt(in).

        Every rank draws the whole matrices, which are small, and takes its own rows.
        """
        generator = torch.Generator().manual_seed(seed)
        self._before: list[tuple[Tensor, Tensor]] = []
        for name, parameter in causal_lm.named_parameters():
            if not is_adapter(name):
                continue
            if name.endswith(A_ENDING):
                whole = drawn_a(parameter.shape, generator)
            else:
                module: Any = causal_lm.get_submodule(name.removesuffix(B_ENDING))
                deviation = size * math.sqrt(3 / parameter.shape[1]) / module.scaling[ADAPTER]
                whole = torch.randn(parameter.shape, generator=generator).mul_(deviation)
            start, stop = own_rows(parameter.data)  # type: ignore[arg-type]  # sharded, so a DTensor
            own = local_part(parameter.detach())
            self._before.append((own, own.clone()))
            own.copy_(whole[start:stop])

    def end(self) -> None:
        """Give the policy its adapter back, bit by bit."""
        for own, kept in self._before:
            own.copy_(kept)
        self._before = []
