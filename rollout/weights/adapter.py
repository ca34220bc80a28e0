"""LoRA adapters of models: which layers they belong to, and the names of their tensors.

A layer y = x W^T becomes y = x W^T + s x A^T B^T with A [r, in], B [out, r] and s = alpha / r (Hu et al.,
arXiv:2106.09685, section 4.1). Layers, names and formats are those of the library peft, with one adapter, ADAPTER. The
policy's ranks train it (`trainer/policy/lora.py`); engines compute with it beside the frozen weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rollout.types import AdapterSpec

if TYPE_CHECKING:  # the names are needed where nothing heavy is imported
    from peft import LoraConfig as PeftConfig
    from torch import nn
    from transformers import PreTrainedModel

ADAPTER = "default"
"""Name of the adapter, which peft puts into the names of its parameters."""
A_ENDING, B_ENDING = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"
"""Ends of the names of A and B in a model, after that of their layer."""
A_SENT, B_SENT = ".lora_A.weight", ".lora_B.weight"
"""The same ends in peft's files, and where an adapter is sent."""
BASE_LAYER = ".base_layer"
"""What peft puts into the names of the parameters of a layer that has an adapter."""


def add_adapter(causal_lm: PreTrainedModel, spec: AdapterSpec, *, on_meta: bool = False) -> None:
    """Put an adapter of zero effect beside the layers of `spec`, in place: A is random, B is zero.

    `on_meta` leaves the adapter without memory (device meta).
    """
    from peft import inject_adapter_in_model

    inject_adapter_in_model(peft_config(causal_lm, spec), causal_lm, adapter_name=ADAPTER, low_cpu_mem_usage=on_meta)


def peft_config(causal_lm: nn.Module, spec: AdapterSpec) -> PeftConfig:
    """The adapter as peft describes it. It has no dropout: the policy that is trained is the one that samples."""
    from peft import LoraConfig as PeftConfig
    from torch import nn

    linear = [name for name, module in causal_lm.named_modules() if isinstance(module, nn.Linear)]
    return PeftConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        target_modules=short_names(spec.layers, among=linear),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )


def short_names(layers: Iterable[str], *, among: Iterable[str]) -> list[str]:
    """The last parts of the names of `layers`, each once, if they mean no other layer `among` all; or the whole names.

    peft takes both.
    """
    chosen = list(layers)
    ends = sorted({last_part(name) for name in chosen})
    is_same = {name for name in among if last_part(name) in ends} == set(chosen)
    return ends if is_same else chosen


def last_part(name: str) -> str:
    """model.layers.0.mlp.up_proj -> up_proj."""
    return name.rpartition(".")[2]


def is_adapter(name: str) -> bool:
    """True for the name of a parameter that belongs to the adapter."""
    return name.endswith((A_ENDING, B_ENDING))


def name_without_adapter(name: str) -> str:
    """The name that a parameter of the frozen model has in its files."""
    return name.replace(f"{BASE_LAYER}.", ".")


def sent_name(name: str) -> str:
    """The name under which a parameter of the adapter is sent: that in peft's files, below their prefix."""
    return name.replace(f".{ADAPTER}.", ".")
