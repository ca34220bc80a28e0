"""vLLM's engine in the caller's process behind the Engine protocol, on a CPU: no server, no process of its own.

`rollout/embedded/` has the thread, the requests and the order of a sync, `rollout/vllm/sampler.py` the draws. Weights
are copied into vLLM's parameters and read back from them. Read against vLLM 0.32.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from rollout.config import PauseMode, Routing
from rollout.embedded.engine import EmbeddedEngine, Part
from rollout.engine import EngineError, EngineInfo, EngineSetup
from rollout.model.text_part import text_part
from rollout.types import PackedWeights
from rollout.vllm.weights import places_of
from rollout.weights.experts import mixture_of
from rollout.weights.files import tensor_shapes
from rollout.weights.packed_weights import DTYPES
from rollout.weights.quantization import round_inputs

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

    from rollout.vllm.config import VLLMConfig
    from rollout.vllm.decoding import Batch

RELEASE = "0.32."
BLOCK_TOKENS = 32
"""Tokens of a block of the cache, the fewest that vLLM has on a CPU: whole blocks of a prompt are read once."""
STEP_TOKENS = 2048
"""Tokens of prompts that are read in a step, vLLM's own default."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the sampler stands in the first one
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the machine is shared
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CONFIGURE_LOGGING": "0",  # else to stdout
    "TORCHDYNAMO_DISABLE": "1",  # compiling took longer than it saves
    "HF_HUB_OFFLINE": "1",
}
"""Variables that vLLM reads where it is imported and started."""


class VLLMEngine(EmbeddedEngine["LLMEngine"]):
    """One model of vLLM. Its packages are imported at the start, which takes about 20 s of a core.

    A process holds one such engine at a time: vLLM keeps its state in modules.
    """

    _running: ClassVar[VLLMEngine | None] = None

    def __init__(self, config: VLLMConfig, setup: EngineSetup) -> None:
        """`setup.num_threads` applies to the whole process."""
        super().__init__(config, index=setup.index)
        self._vllm = config
        self._num_threads = setup.num_threads
        self._routes = setup.routes
        self._log_file = setup.log_dir / f"engine-{setup.index}.log"
        self._model: LLMEngine | None
        self._runner: Any
        self._places: dict[str, Tensor] = {}

    def _start(self, model_path: Path) -> EngineInfo:
        described = text_part(json.loads((model_path / "config.json").read_text(encoding="utf-8")))
        if rule := self._vllm.model_rule(described):
            raise EngineError(f"{self._name} start: {model_path}: the model must {rule}")
        if VLLMEngine._running is not None:
            raise EngineError(f"{self._name} start: a process holds one engine of vLLM; stop the other one first")
        VLLMEngine._running = self
        with self._surroundings():
            try:
                import vllm

                if not vllm.__version__.startswith(RELEASE):
                    raise EngineError(f"{self._name} start: vLLM must be {RELEASE}x, this is {vllm.__version__}")
                from rollout.vllm.experts import RouteRecorder, use_plain_experts
                from rollout.vllm.sampler import SeededSampler

                keeps_routes = self._routes is not Routing.live and mixture_of(described) is not None
                recorder = RouteRecorder() if keeps_routes else None
                use_plain_experts(recorder)
                self._model = _new_engine(self._vllm, model_path, described)
                self._runner = self._model.model_executor.driver_worker.model_runner
                self._places = places_of(self._runner.model, tensor_shapes(model_path))
            except Exception as error:  # vLLM raises whatever its assertions and its libraries raise
                self.stop()
                text = f"{self._name} start: {model_path} could not be loaded: {type(error).__name__}: {error}; "
                text += "rollout.cache_tokens and rollout.max_batch_size decide what vLLM takes of the memory; see "
                raise EngineError(f"{text}{self._log_file}") from error
        self._runner.sampler = SeededSampler(self._runner, recorder)
        round_inputs(self._runner.model, self._config.quantization)
        limits = self._model.model_config
        self._vocab_size, self._context_length = limits.get_vocab_size(), limits.max_model_len
        return EngineInfo(
            name=f"vllm {vllm.__version__}",
            address="embedded",
            pids=(),
            start_s=0.0,
            cache_tokens=self._vllm.cache_tokens,
        )

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """What vLLM finds at its start; it changes variables and functions of the process, which are put back."""
        variables, set_num_threads = dict(os.environ), torch.set_num_threads
        set_num_threads(self._num_threads)
        os.environ.update(ENVIRONMENT | {"OMP_NUM_THREADS": str(self._num_threads)})
        log = logging.getLogger("vllm")
        if not log.handlers:
            self._log_file.parent.mkdir(parents=True, exist_ok=True)
            log.addHandler(logging.FileHandler(self._log_file))
            log.propagate = False
            log.setLevel(logging.INFO)
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            for name in os.environ.keys() - variables.keys():
                del os.environ[name]
            os.environ.update(variables)

    def _new_batch(self, model: LLMEngine, policy_version: int) -> Batch:
        from rollout.vllm.decoding import Batch

        return Batch(
            model,
            sampler=self._runner.sampler,
            num_slots=self._vllm.max_batch_size,
            policy_version=policy_version,
        )

    def _parts(self, weights: PackedWeights) -> list[Part]:
        return [(weights, self._places)]

    def _renewed(self) -> LLMEngine:
        engine: LLMEngine = self._started("load_weights")
        mode = self._vllm.pause_mode
        if mode is PauseMode.abort:
            self._loop.abort(None)
        if mode is not PauseMode.in_place:
            # Every response is read again: between two steps vLLM takes all requests back.
            engine.reset_prefix_cache(reset_running_requests=True)
        return engine

    def stop(self) -> None:
        model = self._model
        super().stop()
        if model is not None:
            model.engine_core.shutdown()
            self._places, self._runner = {}, None
        if VLLMEngine._running is self:
            VLLMEngine._running = None


def _new_engine(config: VLLMConfig, model_path: Path, described: Mapping[str, Any]) -> LLMEngine:
    """An engine of vLLM whose linear layers multiply with the parameters that the model shows."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers import utils
    from vllm.v1.engine.llm_engine import LLMEngine

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    # vLLM would pack the weights and leave empty parameters: nothing could be loaded or read back.
    utils.dispatch_cpu_unquantized_gemm = plain
    heads = described["num_attention_heads"]
    size = described.get("head_dim") or described["hidden_size"] // heads
    width = 2 * size * (described.get("num_key_value_heads") or heads) * DTYPES[config.dtype.name].itemsize
    cache_tokens = (-(-config.cache_tokens // BLOCK_TOKENS) + 1) * BLOCK_TOKENS  # vLLM keeps a block for itself
    arguments = EngineArgs(
        model=str(model_path),
        dtype=config.dtype.name,
        enforce_eager=True,
        skip_tokenizer_init=True,
        generation_config="vllm",
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=cache_tokens * width * described["num_hidden_layers"],
        max_model_len=config.context_length(described),
        max_num_seqs=config.max_batch_size,
        max_num_batched_tokens=max(STEP_TOKENS, config.max_batch_size),  # a decode step takes a token of each
        async_scheduling=False,
        disable_log_stats=True,
    )
    return LLMEngine.from_engine_args(arguments)
