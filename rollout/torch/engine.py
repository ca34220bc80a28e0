"""The embedded engine: a transformers model in the caller's process behind the Engine protocol, no server.

The thread of `rollout/embedded/sampling_loop.py` samples, with `rollout/torch/decoding.py`, the forward of
`rollout/torch/model.py` and the memory of `rollout/torch/kv_cache.py`. The engine is deterministic, so other engines
are compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout.embedded.engine import EmbeddedEngine, Part
from rollout.engine import EngineError, EngineInfo
from rollout.exact.gpu import use_batch_invariant_kernels
from rollout.exact.layers import make_exact
from rollout.model.limits import PLAIN_OUTPUTS, altered_logits
from rollout.model.onednn_linear import use_fast_products
from rollout.torch.decoding import Batch
from rollout.torch.kv_cache import SLOT_ATTENTION
from rollout.torch.model import Decoder, ExactDecoder
from rollout.types import AdapterSpec, PackedWeights
from rollout.weights.adapter import add_adapter, is_adapter, name_without_adapter, sent_name
from rollout.weights.packed_weights import DTYPES, check_weights, content_mark, listed, stored_state
from rollout.weights.quantization import round_inputs

if TYPE_CHECKING:
    from rollout.torch.config import TorchEngineConfig


class TorchEngine(EmbeddedEngine[Decoder]):
    """One model of transformers. On a CPU, weights in shared memory become its parameters in place."""

    def __init__(
        self,
        config: TorchEngineConfig,
        *,
        index: int,
        device: str,
        num_threads: int | None,
        adapter: AdapterSpec | None = None,
    ) -> None:
        """`num_threads` applies to the whole process, None leaves it unchanged.

        With an `adapter` the engine gets the frozen weights once, and the adapter at every sync.
        """
        super().__init__(config, index=index)
        self._num_slots = config.max_batch_size
        self._adapter = adapter
        self._device = torch.device(device)
        self._num_threads = num_threads
        self._model: PreTrainedModel | None
        self._base_mark = ""
        """`content_mark` of the frozen weights that the engine has verified; "" before them, or without an adapter."""

    def _start(self, model_path: Path) -> EngineInfo:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        try:
            # The return type is the model alone, but with output_loading_info the function returns a pair.
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                model_path,
                dtype=DTYPES[self._config.dtype.name],
                use_safetensors=True,
                trust_remote_code=False,
                **PLAIN_OUTPUTS,
                local_files_only=True,
                output_loading_info=True,
                attn_implementation=SLOT_ATTENTION,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise EngineError(f"{self._name} start: {model_path} could not be loaded: {error}") from error
        model, loading = loaded
        if absent := loading["missing_keys"]:
            # transformers would continue with random numbers for missing weights.
            raise EngineError(f"{self._name} start: {model_path} lacks tensors of its architecture: {listed(absent)}")
        if altered := altered_logits(model.config):
            raise EngineError(f"{self._name} start: {model_path}: {altered} in config.json is not supported")
        if self._adapter is not None:
            add_adapter(model, self._adapter)
        self._model = model.eval().requires_grad_(False).to(self._device)
        self._base_mark = ""
        if self._config.exact:
            try:
                make_exact(model)
                if self._device.type == "cuda":
                    use_batch_invariant_kernels()
            except (ValueError, RuntimeError) as error:
                raise EngineError(f"{self._name} start: {model_path}: {error}") from error
        else:
            use_fast_products(model)
        round_inputs(model, self._config.quantization)
        self._vocab_size, self._context_length = model.config.vocab_size, model.config.max_position_embeddings
        return EngineInfo(name=f"torch {torch.__version__}", address="embedded", pids=(), start_s=0.0)

    def _new_batch(self, model: Decoder, policy_version: int) -> Batch:
        return Batch(model, num_slots=self._num_slots, policy_version=policy_version)

    def _parts(self, weights: PackedWeights) -> list[Part]:
        """Of an adapter's parts the frozen weights are replaced only if the engine does not hold them yet."""
        parts: list[Part] = [(weights, self._parameters(of_adapter=self._adapter is not None))]
        base = weights.base
        if base is not None and content_mark(base.tensors) != self._base_mark:
            check_weights(base, held_version=base.policy_version)
            parts.insert(0, (base, self._parameters(of_adapter=False)))
        return parts

    def _uses_in_place(self, parts: Sequence[Part]) -> bool:
        return self._device.type == "cpu" and all(part.region is not None for part, _ in parts)

    def _replace(self, parts: Sequence[Part], *, begin: float) -> tuple[bool, float]:
        done = super()._replace(parts, begin=begin)
        base = parts[-1][0].base
        self._base_mark = "" if base is None else content_mark(base.tensors)
        return done

    def _parameters(self, *, of_adapter: bool) -> dict[str, torch.Tensor]:
        """The parameters of the adapter, or all other weights, under the names with which they are sent."""
        return {
            sent_name(name) if of_adapter else name_without_adapter(name): parameter
            for name, parameter in stored_state(self._started("load_weights"))
            if is_adapter(name) is of_adapter
        }

    def _renewed(self) -> Decoder:
        return (ExactDecoder if self._config.exact else Decoder)(self._started("generate"))

    def sleep(self) -> None:
        """Move the model to the host; the model keeps its weights. Raises EngineError while requests are unfinished."""
        super().sleep()
        self._move("cpu")

    def wake(self) -> None:
        """Move the model back to its device."""
        self._started("wake")
        self._move(self._device.type)
        super().wake()

    def _move(self, device: str) -> None:
        model: torch.nn.Module = self._started("sleep")
        model.to(device)
        self._free()

    def stop(self) -> None:
        super().stop()
        self._free()

    def _free(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
