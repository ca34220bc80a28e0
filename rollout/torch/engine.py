"""The embedded engine: a transformers model in the caller's process behind the Engine protocol, no server.

Implements `rollout.engine.Engine`; `rollout/group/worker.py` hosts the engine. The thread of
`rollout/torch/decode_loop.py` samples, with `rollout/torch/decoding.py`, the forward of `rollout/torch/model.py` and
the memory of `rollout/torch/kv_cache.py`. The engine is deterministic, so other engines are compared with it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout.engine import Engine, EngineError, EngineInfo, WeightReport, WeightSyncError, request_problem
from rollout.exact.gpu import use_batch_invariant_kernels
from rollout.exact.layers import make_exact
from rollout.model.limits import PLAIN_OUTPUTS, altered_logits
from rollout.model.onednn_linear import use_fast_products
from rollout.processes.recorder import Recorder
from rollout.torch.decode_loop import DecodeLoop
from rollout.torch.kv_cache import SLOT_ATTENTION
from rollout.torch.model import Decoder, ExactDecoder
from rollout.types import AdapterSpec, Completion, GenerateRequest, PackedWeights
from rollout.weights.adapter import add_adapter, is_adapter, name_without_adapter, sent_name
from rollout.weights.packed_weights import (
    DTYPES,
    check_weights,
    content_mark,
    dtype_name,
    listed,
    stored_state,
    tensor_digest,
    unpack,
)
from rollout.weights.quantization import round_inputs

if TYPE_CHECKING:
    from rollout.torch.config import TorchEngineConfig

STOP_TIMEOUT_S = 10.0
"""Seconds of waiting for the current token when the engine is stopped or put to sleep."""

_Part = tuple[PackedWeights, dict[str, torch.Tensor]]
"""Weights that are sent, and the parameters that they replace, by name."""


class TorchEngine(Engine):
    """One model, with continuous batched sampling in its own thread."""

    def __init__(
        self,
        config: TorchEngineConfig,
        *,
        index: int,
        device: str,
        num_threads: int | None,
        adapter: AdapterSpec | None = None,
    ) -> None:
        """`index` names the engine in errors; `num_threads` applies to the whole process, None leaves it unchanged.

        With an `adapter` the engine gets the frozen weights once, and the adapter at every sync.
        """
        self._config = config
        self._adapter = adapter
        self._index = index
        self._device = torch.device(device)
        self._num_threads = num_threads
        self._model: PreTrainedModel | None = None
        self._version = 0
        self._base_mark = ""
        """`content_mark` of the frozen weights that the engine has verified; "" before them, or without an adapter."""
        self._broken = ""
        self._recorder = Recorder()
        self._loop = DecodeLoop(
            name=f"engine {index} (torch)", num_slots=config.max_batch_size, request_timeout_s=config.generate_timeout_s
        )

    def start(self, model_path: Path) -> EngineInfo:
        """Load weights and architecture from a local directory; policy version 0. Raises EngineError.

        Loading cannot be interrupted: rollout.start_timeout_s is checked after loading.
        """
        begin = time.monotonic()
        if not (model_path / "config.json").is_file():
            raise EngineError(f"{self._name} start: {model_path} is not a model directory: it has no config.json")
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
        self._version = 0
        self._base_mark = self._broken = ""
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
        self._loop.load(self._decoder(model), policy_version=0)
        start_s = time.monotonic() - begin
        if start_s > self._config.start_timeout_s:
            self.stop()
            raise EngineError(
                f"{self._name} start: loading took {start_s:.1f} s, more than "
                f"rollout.start_timeout_s={self._config.start_timeout_s}"
            )
        return EngineInfo(name=f"torch {torch.__version__}", address="embedded", pids=(), start_s=start_s)

    def submit(self, tickets: Sequence[int], requests: Sequence[GenerateRequest]) -> None:
        """Queue requests; the samples of one call do not depend on other work of the process.

        Raises ValueError for an invalid request, EngineError if the engine holds no usable weights or has failed.
        """
        model = self._started_model("generate")
        if self._broken:
            raise EngineError(f"{self._name} generate: the weights are unusable: {self._broken}; load weights again")
        for request in requests:
            self._check_request(request, model)
        self._loop.submit(tickets, requests)

    def poll(self, timeout_s: float) -> list[Completion]:
        """Completions since the last poll; after a failure EngineError until weights are loaded again."""
        return self._loop.poll(timeout_s)

    def abort(self, tickets: Sequence[int] | None) -> None:
        """End unfinished requests after the current token; `poll` returns their tokens so far."""
        self._loop.abort(tickets)

    def load_weights(self, weights: PackedWeights) -> WeightReport:
        """Replace all parameters with bytes whose digests equal the sent digests; then set the version.

        Of an adapter's parts the frozen weights are replaced only if the engine does not hold them yet. No parameter
        changes unless version, names, shapes, dtypes and digests are right. On a CPU, weights in shared memory become
        the parameters in place. Other weights are copied, read back and compared. Sampling pauses only after the
        checks. Raises WeightSyncError; if the read-back disagrees, unfinished requests are lost and the engine refuses
        requests until a later sync succeeds.
        """
        model = self._started_model("load_weights")
        begin = time.monotonic()
        check_weights(weights, held_version=self._version)
        parts = [(weights, self._parameters(model, of_adapter=self._adapter is not None))]
        base = weights.base
        if base is not None and content_mark(base.tensors) != self._base_mark:
            check_weights(base, held_version=base.policy_version)
            parts.insert(0, (base, self._parameters(model, of_adapter=False)))
        for part, parameters in parts:
            self._check_names(part, parameters)
        checked = time.monotonic()
        with self._loop.paused(self._config.sync_timeout_s):
            try:
                in_place, loaded = self._replace(parts, model, begin=begin)
            finally:
                if self._broken:
                    self._loop.fail(f"{self._name} load_weights: the weights are unusable: {self._broken}")
        return WeightReport(
            policy_version=weights.policy_version,
            num_tensors=len(weights.tensors),
            num_bytes=sum(spec.num_bytes for part, _ in parts for spec in part.tensors),
            load_s=loaded - checked,
            verify_s=(checked - begin) + (time.monotonic() - loaded),
            in_place=in_place,
        )

    def _replace(self, parts: Sequence[_Part], model: PreTrainedModel, *, begin: float) -> tuple[bool, float]:
        """Put checked weights into the model -> (True if the bytes are used in place, time.monotonic() then)."""
        weights = parts[-1][0]
        version = weights.policy_version
        self._broken = f"the sync of policy version {version} did not complete"
        in_place = self._device.type == "cpu" and all(part.region is not None for part, _ in parts)
        with torch.no_grad():
            for part, parameters in parts:
                for spec, tensor in unpack(part):
                    if in_place:
                        parameters[spec.name].data = tensor
                    else:
                        self._check_sync_deadline(begin, version=version)
                        parameters[spec.name].copy_(tensor)
        loaded = time.monotonic()
        if not in_place:
            for part, parameters in parts:
                self._read_back(part, parameters, begin=begin)
        self._loop.load(self._decoder(model), policy_version=version)
        self._version = version
        self._base_mark = "" if weights.base is None else content_mark(weights.base.tensors)
        self._broken = ""
        return in_place, loaded

    def _parameters(self, model: PreTrainedModel, *, of_adapter: bool) -> dict[str, torch.Tensor]:
        """The parameters of the adapter, or all other weights, under the names with which they are sent."""
        return {
            sent_name(name) if of_adapter else name_without_adapter(name): parameter
            for name, parameter in stored_state(model)
            if is_adapter(name) is of_adapter
        }

    def sleep(self) -> None:
        """Move the model to the host; the model keeps its weights. Raises EngineError while requests are unfinished."""
        model: torch.nn.Module = self._started_model("sleep")
        self._loop.unload()
        model.to("cpu")
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Move the model back to its device."""
        model: torch.nn.Module = self._started_model("wake")
        model.to(self._device)
        if not self._broken:
            self._loop.load(self._decoder(self._started_model("wake")), policy_version=self._version)

    def start_profile(self, directory: Path) -> None:
        """Record all threads of this process."""
        self._recorder.start(directory / f"engine_{self._index}.json.gz")

    def stop_profile(self) -> None:
        self._recorder.stop()

    @property
    def sampling_s(self) -> float:
        return self._loop.sampling_s

    @property
    def policy_version(self) -> int:
        """Version of the last weights that passed verification; 0 before the first sync."""
        return self._version

    def stop(self) -> None:
        """End sampling, drop unfinished requests, and free the model; safe to call twice."""
        self._loop.stop(STOP_TIMEOUT_S)
        self._model = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def _name(self) -> str:
        return f"engine {self._index} (torch, policy version {self._version})"

    def _decoder(self, model: PreTrainedModel) -> Decoder:
        return ExactDecoder(model) if self._config.exact else Decoder(model)

    def _started_model(self, phase: str) -> PreTrainedModel:
        if self._model is None:
            raise EngineError(f"{self._name} {phase}: the engine is not running; call start() first")
        return self._model

    def _check_request(self, request: GenerateRequest, model: PreTrainedModel) -> None:
        sampling, limits = request.sampling, model.config
        problem = request_problem(request, vocab_size=limits.vocab_size, context_length=limits.max_position_embeddings)
        if not (0 < sampling.top_p <= 1 and 0 <= sampling.min_p <= 1 and (sampling.top_k >= 1 or sampling.top_k == -1)):
            problem = (
                f"top_p={sampling.top_p}, top_k={sampling.top_k} and min_p={sampling.min_p} must be in (0, 1], "
                "-1 or at least 1, and in [0, 1]"
            )
        if problem:
            raise ValueError(f"{self._name} generate, prompt {request.prompt_id}/{request.sample_index}: {problem}")

    def _check_names(self, weights: PackedWeights, parameters: dict[str, torch.Tensor]) -> None:
        specs = {spec.name: spec for spec in weights.tensors}
        where = f"{self._name} load_weights of policy version {weights.policy_version}"
        unknown, missing = specs.keys() - parameters.keys(), parameters.keys() - specs.keys()
        if unknown or missing:
            raise WeightSyncError(
                f"{where}: the names are not those of the model's parameters; "
                f"unknown: {listed(unknown)}; missing: {listed(missing)}"
            )
        for name, parameter in parameters.items():
            spec = specs[name]
            if spec.shape != tuple(parameter.shape) or spec.dtype != dtype_name(parameter.dtype):
                raise WeightSyncError(
                    f"{where}: tensor {name} was sent as {spec.dtype} {spec.shape}, the engine holds "
                    f"{dtype_name(parameter.dtype)} {tuple(parameter.shape)} (rollout.dtype decides the type)"
                )

    def _read_back(self, weights: PackedWeights, parameters: dict[str, torch.Tensor], *, begin: float) -> None:
        version = weights.policy_version
        for spec in weights.tensors:
            self._check_sync_deadline(begin, version=version)
            held = tensor_digest(parameters[spec.name])
            if held != spec.digest:
                self._broken = f"tensor {spec.name} is not what was sent with policy version {version}"
                raise WeightSyncError(
                    f"{self._name} load_weights: tensor {spec.name} was sent with digest {spec.digest} "
                    f"(policy version {version}) but the engine holds {held} (last good version {self._version})"
                )

    def _check_sync_deadline(self, begin: float, *, version: int) -> None:
        if time.monotonic() - begin > self._config.sync_timeout_s:
            raise WeightSyncError(
                f"{self._name} load_weights: policy version {version} was not loaded and verified within "
                f"rollout.sync_timeout_s={self._config.sync_timeout_s}"
            )
