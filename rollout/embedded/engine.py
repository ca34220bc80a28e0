"""An engine in the caller's process, no server: its requests, its thread, and the order of a verified weight sync.

Implements `rollout.engine.Engine` but for the model itself; `rollout/group/worker.py` hosts the engine. The thread of
`rollout/embedded/sampling_loop.py` samples with the `Batch` of the engine.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic

import torch

from rollout.config import EngineConfig
from rollout.embedded.batch import Batch, Model
from rollout.embedded.sampling_loop import SamplingLoop
from rollout.engine import Engine, EngineError, EngineInfo, WeightReport, WeightSyncError, request_problem
from rollout.processes.torch_trace import Recorder
from rollout.types import Completion, GenerateRequest, PackedWeights
from rollout.weights.packed_weights import check_weights, dtype_name, listed, tensor_digest, unpack

STOP_TIMEOUT_S = 10.0
"""Seconds of waiting for the current token when the engine is stopped or put to sleep."""

Part = tuple[PackedWeights, Mapping[str, torch.Tensor]]
"""Weights that are sent, and what of the engine's memory they replace, by name."""


class EmbeddedEngine(Engine, Generic[Model]):
    """One model, with continuous batched sampling in its own thread."""

    def __init__(self, config: EngineConfig, *, index: int) -> None:
        """`index` names the engine in errors."""
        self._config = config
        self._index = index
        self._model: Any = None
        """The loaded model; None if the engine is not running."""
        self._vocab_size = self._context_length = 0
        self._version = 0
        self._broken = ""
        """Reason why the weights are unusable; "" if they are usable."""
        self._recorder = Recorder()
        self._loop: SamplingLoop[Model] = SamplingLoop(
            name=f"engine {index} ({config.kind})",
            make_batch=self._new_batch,
            request_timeout_s=config.generate_timeout_s,
        )

    def start(self, model_path: Path) -> EngineInfo:
        """Load weights and architecture from a local directory; policy version 0. Raises EngineError.

        Loading cannot be interrupted: rollout.start_timeout_s is checked after loading.
        """
        begin = time.monotonic()
        if not (model_path / "config.json").is_file():
            raise EngineError(f"{self._name} start: {model_path} is not a model directory: it has no config.json")
        self._version, self._broken = 0, ""
        info = self._start(model_path)
        self._loop.load(self._renewed(), policy_version=0)
        info.start_s = time.monotonic() - begin
        if info.start_s > self._config.start_timeout_s:
            self.stop()
            raise EngineError(
                f"{self._name} start: loading took {info.start_s:.1f} s, more than "
                f"rollout.start_timeout_s={self._config.start_timeout_s}"
            )
        return info

    def submit(self, tickets: Sequence[int], requests: Sequence[GenerateRequest]) -> None:
        """Queue requests; the samples of one call do not depend on other work of the process.

        Raises ValueError for an invalid request, EngineError if the engine holds no usable weights or has failed.
        """
        self._started("generate")
        if self._broken:
            raise EngineError(f"{self._name} generate: the weights are unusable: {self._broken}; load weights again")
        for request in requests:
            self._check_request(request)
        self._loop.submit(tickets, requests)

    def poll(self, timeout_s: float) -> list[Completion]:
        """Completions since the last poll; after a failure EngineError until weights are loaded again."""
        return self._loop.poll(timeout_s)

    def abort(self, tickets: Sequence[int] | None) -> None:
        """End unfinished requests after the current token; `poll` returns their tokens so far."""
        self._loop.abort(tickets)

    def load_weights(self, weights: PackedWeights) -> WeightReport:
        """Replace all parameters with bytes whose digests equal the sent digests; then set the version.

        No parameter changes unless version, names, shapes, dtypes and digests are right. What is copied is read back
        and compared. Sampling pauses only after the checks. Raises WeightSyncError; if the read-back disagrees,
        unfinished requests are lost and the engine refuses requests until a later sync succeeds.
        """
        self._started("load_weights")
        begin = time.monotonic()
        check_weights(weights, held_version=self._version)
        parts = self._parts(weights)
        for part, places in parts:
            self._check_names(part, places)
        checked = time.monotonic()
        with self._loop.paused(self._config.sync_timeout_s):
            try:
                in_place, loaded = self._replace(parts, begin=begin)
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

    def _replace(self, parts: Sequence[Part], *, begin: float) -> tuple[bool, float]:
        """Put checked weights into the model -> (True if the bytes are used in place, time.monotonic() then)."""
        version = parts[-1][0].policy_version
        self._broken = f"the sync of policy version {version} did not complete"
        in_place = self._uses_in_place(parts)
        with torch.no_grad():
            for part, places in parts:
                for spec, tensor in unpack(part):
                    if in_place:
                        places[spec.name].data = tensor
                    else:
                        self._check_sync_deadline(begin, version=version)
                        places[spec.name].copy_(tensor)
        loaded = time.monotonic()
        if not in_place:
            for part, places in parts:
                self._read_back(part, places, begin=begin)
        self._loop.load(self._renewed(), policy_version=version)
        self._version = version
        self._broken = ""
        return in_place, loaded

    def sleep(self) -> None:
        """Free what the engine can; the model keeps its weights. Raises EngineError while requests are unfinished."""
        self._started("sleep")
        self._loop.unload()

    def wake(self) -> None:
        """Sample again."""
        self._started("wake")
        if not self._broken:
            self._loop.load(self._renewed(), policy_version=self._version)

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

    @abstractmethod
    def _start(self, model_path: Path) -> EngineInfo:
        """Load the model -> `_model`, and say what it can serve: `_vocab_size`, `_context_length`."""

    @abstractmethod
    def _new_batch(self, model: Model, policy_version: int) -> Batch[Model]:
        """A batch without requests."""

    @abstractmethod
    def _parts(self, weights: PackedWeights) -> list[Part]:
        """What of the sent weights the engine has to take, the weights of the sync last, with their places."""

    def _uses_in_place(self, parts: Sequence[Part]) -> bool:
        """True if the engine can use the bytes where they lie."""
        return False

    @abstractmethod
    def _renewed(self) -> Model:
        """What to sample with from now on, with the weights that are in place; called while sampling pauses."""

    @property
    def _name(self) -> str:
        return f"engine {self._index} ({self._config.kind}, policy version {self._version})"

    def _started(self, phase: str) -> Any:
        if self._model is None:
            raise EngineError(f"{self._name} {phase}: the engine is not running; call start() first")
        return self._model

    def _check_request(self, request: GenerateRequest) -> None:
        sampling = request.sampling
        problem = request_problem(request, vocab_size=self._vocab_size, context_length=self._context_length)
        if not (0 < sampling.top_p <= 1 and 0 <= sampling.min_p <= 1 and (sampling.top_k >= 1 or sampling.top_k == -1)):
            problem = (
                f"top_p={sampling.top_p}, top_k={sampling.top_k} and min_p={sampling.min_p} must be in (0, 1], "
                "-1 or at least 1, and in [0, 1]"
            )
        if problem:
            raise ValueError(f"{self._name} generate, prompt {request.prompt_id}/{request.sample_index}: {problem}")

    def _check_names(self, weights: PackedWeights, places: Mapping[str, torch.Tensor]) -> None:
        specs = {spec.name: spec for spec in weights.tensors}
        where = f"{self._name} load_weights of policy version {weights.policy_version}"
        unknown, missing = specs.keys() - places.keys(), places.keys() - specs.keys()
        if unknown or missing:
            raise WeightSyncError(
                f"{where}: the names are not those of the model's parameters; "
                f"unknown: {listed(unknown)}; missing: {listed(missing)}"
            )
        for name, place in places.items():
            spec = specs[name]
            if spec.shape != tuple(place.shape) or spec.dtype != dtype_name(place.dtype):
                raise WeightSyncError(
                    f"{where}: tensor {name} was sent as {spec.dtype} {spec.shape}, the engine holds "
                    f"{dtype_name(place.dtype)} {tuple(place.shape)} (rollout.dtype decides the type)"
                )

    def _read_back(self, weights: PackedWeights, places: Mapping[str, torch.Tensor], *, begin: float) -> None:
        version = weights.policy_version
        for spec in weights.tensors:
            self._check_sync_deadline(begin, version=version)
            held = tensor_digest(places[spec.name])
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
