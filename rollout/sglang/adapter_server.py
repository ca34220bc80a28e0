"""Inside the SGLang server: a LoRA adapter whose numbers are replaced in place, and whose memory SGLang digests.

`rollout/sglang/installation.py` starts the server with one adapter; `rollout/sglang/weight_update.py` names it to
SGLang, without numbers, by SGLang's own route. From then on every sync replaces the numbers under the same name, so
that unfinished requests go on with the new ones, as they go on with new weights. SGLang's `/weights_checker` digests
the parameters of the model: the memory that the kernels of LoRA read is registered as such.

SGLang loads `activate` as a plug-in (entry point `sglang.srt.plugins`) in all its processes. Only SGLang's processes
import SGLang here. Read against SGLang 0.5.23: lora/{lora_manager,mem_pool,layers}.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from rollout.sglang.cpu.pinned_memory import ignore_pinned_memory
from rollout.sglang.cpu.platform import PLATFORM_NAME

ACTIVE = "PARITY_SGLANG_ADAPTER"
"""Environment variable that is 1 in servers that are started with an adapter."""
NUM_SLOTS = 2
"""Places for adapters in SGLang's memory: SGLang itself keeps the first for requests without an adapter."""
SLOT = 1
_MANAGER = "parity_lora_manager"
"""Attribute of the model under which the loader finds SGLang's manager of adapters."""


def activate() -> None:
    """Register the hook; does nothing in other servers of the user."""
    if os.environ.get(ACTIVE) != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME:
        ignore_pinned_memory()
    HookRegistry.register("sglang.srt.lora.lora_manager.LoRAManager.__init__", _expose, HookType.AFTER)


def load_adapter(model: Any, tensors: Mapping[str, Tensor], config: dict[str, Any]) -> None:
    """Put `tensors`, by peft's names, in the place of the adapter that the server has.

    `config` is peft's description of the adapter. The name stays, and so do the ids in requests that run. Raises
    RuntimeError if SGLang refuses them.
    """
    manager = getattr(model, _MANAGER)
    (reference,) = manager.lora_refs.values()
    # SGLang keeps what it is given, and takes it from there again should the slot be lost: not the shared memory.
    owned = {name: tensor.clone() for name, tensor in tensors.items()}
    results = [
        manager.unload_lora_adapter(reference),
        manager.load_lora_adapter_from_tensors(reference, owned, config),
    ]
    if refused := [result.error_message for result in results if not result.success]:
        raise RuntimeError(f"SGLang did not take the adapter: {'; '.join(refused)}")
    manager.fetch_new_loras({reference.lora_id})
    if manager.memory_pool.get_buffer_id(reference.lora_id) != SLOT:
        raise RuntimeError("SGLang put the adapter into another slot than the one whose memory is digested")


class _Held(nn.Module):
    """Memory of the adapter as a parameter, so that SGLang digests it under the name of its layer."""

    def __init__(self, memory: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(memory, requires_grad=False)


def _expose(_result: None, manager: Any, *_args: Any, **_kwargs: Any) -> None:
    """Register the slot's memory as parameters of the layers, and the manager as an attribute of the model."""
    from sglang.srt.lora.utils import LoRAType, get_target_module_name

    setattr(manager.base_model, _MANAGER, manager)
    pool = manager.memory_pool
    for number, modules in enumerate(manager.lora_modules):
        for name, module in modules.items():
            target = get_target_module_name(name, pool.target_modules)
            for kind, matrix in ((LoRAType.LORA_A, "lora_A"), (LoRAType.LORA_B, "lora_B")):
                setattr(module, matrix, _Held(pool.get_tensor(target, number, kind)[SLOT]))
