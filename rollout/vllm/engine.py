"""vLLM's engine in the caller's process behind the Engine protocol: no server, no process of its own.

`rollout/embedded/` has the thread, the requests and the order of a sync. Weights are copied into vLLM's parameters and
read back from them. A CPU and a GPU have different releases of vLLM: what differs between these stands in
`rollout/vllm/cpu.py` and `rollout/vllm/gpu.py`.
"""

from __future__ import annotations

import json
import logging
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from rollout.config import PauseMode
from rollout.embedded.engine import EmbeddedEngine, Part
from rollout.engine import EngineError, EngineInfo, EngineSetup
from rollout.model.text_part import text_part
from rollout.processes.inherited import variables
from rollout.types import PackedWeights
from rollout.vllm.releases import Release, installed_package
from rollout.vllm.weights import places_of
from rollout.weights.files import tensor_shapes
from rollout.weights.packed_weights import DTYPES

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

    from rollout.vllm.config import VLLMConfig

BLOCK_TOKENS = 32
"""Tokens of a block of the cache, the fewest that vLLM has on a CPU: whole blocks of a prompt are read once."""


class VLLMEngine(EmbeddedEngine["LLMEngine"]):
    """One model of vLLM. Its packages are imported at the start, which takes about 20 s of a core.

    A process holds one such engine at a time: vLLM keeps its state in modules.
    """

    release: ClassVar[Release]
    environment: ClassVar[Mapping[str, str]] = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CONFIGURE_LOGGING": "0",  # else to stdout
        "HF_HUB_OFFLINE": "1",
    }
    """Variables that vLLM reads where it is imported and started."""
    _running: ClassVar[VLLMEngine | None] = None

    def __init__(self, config: VLLMConfig, setup: EngineSetup) -> None:
        """`setup.num_threads` applies to the whole process."""
        super().__init__(config, index=setup.index)
        self._vllm = config
        self._setup = setup
        self._log = logging.FileHandler(setup.log_dir / f"engine-{setup.index}.log", delay=True)
        self._model: LLMEngine | None
        self._places: dict[str, Tensor] = {}

    @abstractmethod
    def _launch(self, model_path: Path, described: Mapping[str, Any]) -> LLMEngine:
        """An engine of vLLM with the model in `model_path`, which its config.json has `described`."""

    def _start(self, model_path: Path) -> EngineInfo:
        described = text_part(json.loads((model_path / "config.json").read_text(encoding="utf-8")))
        if rule := self._vllm.model_rule(described):
            raise EngineError(f"{self._name} start: {model_path}: the model must {rule}")
        if VLLMEngine._running is not None:
            raise EngineError(f"{self._name} start: a process holds one engine of vLLM; stop the other one first")
        if not self.release.is_of(found := installed_package()):
            this = " ".join(found or ("nothing",))
            raise EngineError(
                f"{self._name} start: vLLM must come from {self.release}, this is {this}; {self.release.remedy}"
            )
        VLLMEngine._running = self
        with self._surroundings():
            try:
                import vllm

                self._model = engine = self._launch(model_path, described)
                model = engine.model_executor.driver_worker.model_runner.get_model()
                self._places = places_of(model, tensor_shapes(model_path))
            except Exception as error:  # vLLM raises whatever its assertions and its libraries raise
                self.stop()
                text = f"{self._name} start: {model_path} could not be loaded: {type(error).__name__}: {error}; "
                text += "rollout.cache_tokens and rollout.max_batch_size decide what vLLM takes of the memory; see "
                raise EngineError(f"{text}{self._log.baseFilename}") from error
        limits, cache = engine.model_config, engine.vllm_config.cache_config
        self._vocab_size, self._context_length = limits.get_vocab_size(), limits.max_model_len
        held = self._vllm.held_tokens
        return EngineInfo(
            name=f"vllm {vllm.__version__}",
            address="embedded",
            pids=(),
            start_s=0.0,
            cache_tokens=cache.num_gpu_blocks * cache.block_size if held is None else held,
        )

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """What vLLM finds at its start; it changes variables and functions of the process, which are put back."""
        before, set_num_threads = variables(), torch.set_num_threads
        set_num_threads(self._setup.num_threads)
        os.environ.update({**self.environment, "OMP_NUM_THREADS": str(self._setup.num_threads)})
        log = logging.getLogger("vllm")
        self._setup.log_dir.mkdir(parents=True, exist_ok=True)
        log.addHandler(self._log)
        log.propagate = False
        log.setLevel(logging.INFO)
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)

    def _arguments(self, model_path: Path) -> dict[str, Any]:
        """The EngineArgs that both releases get."""
        return {
            "model": str(model_path),
            "dtype": self._vllm.dtype.name,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "max_num_seqs": self._vllm.max_batch_size,
            # A step ends with its tokens, so that weights change between two steps, and each token has a version.
            "async_scheduling": False,
            "disable_log_stats": True,
        }

    def _cache_bytes(self, described: Mapping[str, Any], *, tokens: int) -> int:
        """Bytes of a cache with room for so many tokens."""
        heads = described["num_attention_heads"]
        size = described.get("head_dim") or described["hidden_size"] // heads
        width = 2 * size * (described.get("num_key_value_heads") or heads) * DTYPES[self._vllm.dtype.name].itemsize
        blocks = -(-tokens // BLOCK_TOKENS) + 1  # vLLM keeps a block for itself
        return blocks * BLOCK_TOKENS * width * int(described["num_hidden_layers"])

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
            self._places = {}
        if VLLMEngine._running is self:
            VLLMEngine._running = None
            logging.getLogger("vllm").removeHandler(self._log)
            self._log.close()
