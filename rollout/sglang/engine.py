"""The SGLang engine: a real server in its own processes behind the Engine protocol.

Implements `rollout.engine.Engine`; `rollout/group/worker.py` hosts it. Tokens in, tokens out. `server.py` owns the
processes (`external.py` stands for a server without them), `request_stream.py` sends requests, `replies.py` reads
replies, `client.py` makes the other calls, `weight_update.py` does the weight sync.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from rollout.config import PauseMode, Routing
from rollout.engine import (
    Engine,
    EngineError,
    EngineInfo,
    EngineNeeds,
    LayoutError,
    WeightReport,
    WeightSyncError,
    aborted,
    continuation,
    given_up,
    request_problem,
    whole_response,
)
from rollout.routes import Routes, joined
from rollout.sglang.client import ClientError, SGLangClient
from rollout.sglang.external import ExternalServer
from rollout.sglang.installation import check_installation, server_args, server_environment
from rollout.sglang.loader import LOADER
from rollout.sglang.quantized import engine_quantization, sent_names
from rollout.sglang.replies import START, ReplyError, body_of, generation_of, parse_version, routes_of
from rollout.sglang.request_stream import Answer, Job, RequestStream, window_of
from rollout.sglang.server import SGLangServer
from rollout.sglang.weight_update import ADAPTER_NAME, CACHE_TAGS, WEIGHT_TAGS, WeightUpdate
from rollout.types import Completion, GenerateRequest, PackedWeights
from rollout.weights.adapter import A_SENT, B_SENT
from rollout.weights.experts import Mixture, mixture_of, sources
from rollout.weights.files import tensor_shapes
from rollout.weights.fusion import plan_fusion
from rollout.weights.packed_weights import DTYPES, check_weights

if TYPE_CHECKING:
    from rollout.sglang.config import SGLangConfig

INFO_TIMEOUT_S = 30.0
CONTEXT_MARGIN = 4
"""Sum of prompt and response that SGLang serves uncut, minus `max_req_input_len`, tokens."""

logger = logging.getLogger(__name__)


class SGLangEngine(Engine):
    """One SGLang server with a full copy of the weights; started by this engine, or one of `rollout.servers`.

    Seeds: on a CPU every response is drawn from its own `SamplingParams.seed` (see
    `rollout/sglang/cpu/srt_platform.py`). On a GPU SGLang uses the seed only with
    `engine_args.enable_deterministic_inference=true`; otherwise responses are independent draws from a generator seeded
    with run seed + engine index.
    """

    def __init__(
        self,
        config: SGLangConfig,
        *,
        index: int,
        seed: int,
        device: str,
        log_dir: Path,
        num_threads: int | None,
        needs: EngineNeeds | None = None,
    ) -> None:
        """`num_threads` bounds the compute threads of the server; None leaves the number to the server."""
        if device not in ("cpu", "cuda"):
            raise EngineError(f"engine {index} (sglang): device must be cpu or cuda, got {device!r}")
        self._config = config
        self._index = index
        self._quantization = engine_quantization(config)
        self._seed = seed
        self._device = device
        self._log_dir = log_dir
        self._num_threads = num_threads
        self._needs = needs or EngineNeeds()
        self._server: SGLangServer | ExternalServer | None = None
        self._requests: RequestStream | None = None
        self._weights: WeightUpdate
        self._context_length = 0
        self._vocab_size = 0
        self._mixture: Mixture | None = None
        self._num_layers = 0
        self._cache_tokens = self._needs.cache_tokens
        """Tokens whose keys and values the server can hold, as it, or one before it, reports them."""
        self._version = 0
        """Policy version of the weights that were verified last."""
        self._newest_version = 0
        """Policy version of the weights that were sent last."""
        self._broken = ""
        """Reason why the weights are unusable; "" if they are usable."""
        self._is_profiled = False

    def start(self, model_path: Path) -> EngineInfo:
        """Start a server on the model in a local directory; policy version 0. Raises EngineError.

        The start also checks, before any training, that a weight sync of this model can be verified.
        """
        begin = time.monotonic()
        if self._server is not None:
            raise EngineError(f"{self._name} start: the engine runs already")
        if not (model_path / "config.json").is_file():
            raise EngineError(f"{self._name} start: {model_path} is not a model directory: it has no config.json")
        self._version, self._newest_version, self._broken = 0, 0, ""
        self._server = self._new_server(model_path)
        try:
            self._server.start(timeout_s=self._config.start_timeout_s)
            version = self._examine(self._server, model_path)
        except BaseException:
            self.stop()
            raise
        info = EngineInfo(
            name=f"sglang {version}",
            address=self._server.address,
            pids=self._server.pids,
            start_s=time.monotonic() - begin,
            cache_tokens=self._cache_tokens,
            layout=self._weights.layout,
        )
        logger.info("%s is ready at %s after %.1f s", self._name, info.address, info.start_s)
        return info

    def submit(self, tickets: Sequence[int], requests: Sequence[GenerateRequest]) -> None:
        """Queue requests and return at once. See `Engine.submit`."""
        self._check_alive()
        if self._broken:
            raise self._unusable()
        stream = self._stream("generate")
        jobs = []
        for ticket, request in zip(tickets, requests, strict=True):
            if problem := request_problem(request, vocab_size=self._vocab_size, context_length=self._context_length):
                where = f"prompt {request.prompt_id}/{request.sample_index}"
                raise ValueError(f"{self._name} generate, {where}: {problem}")
            jobs.append(Job(ticket=ticket, request=request, body=self._body(request)))
        stream.submit(jobs)

    def poll(self, timeout_s: float) -> list[Completion]:
        """Responses that have ended since the last poll. See `Engine.poll`.

        A request that the server refuses comes back as failed. Also raises EngineError when the server fails at a
        request or its reply does not match the request. After an error no request is unfinished.
        """
        stream = self._stream("generate")
        if self._broken and stream.num_unfinished:
            stream.drop()
            raise self._unusable()
        try:
            answers = stream.poll(timeout_s)
        except ClientError as error:
            raise self._failure("generate", error) from error
        if not answers:
            self._check_alive()
        return [self._completion(answer) for answer in answers]

    def abort(self, tickets: Sequence[int] | None) -> None:
        """End unfinished requests. See `Engine.abort`."""
        self._stream("abort").abort(tickets)

    def give_back(self, count: int) -> list[int]:
        """Give requests back that the server does not have yet. See `Engine.give_back`."""
        try:
            return self._stream("give back").give_back(count)
        except ClientError as error:
            raise self._failure("give back", error) from error

    def load_weights(self, weights: PackedWeights) -> WeightReport:
        """Replace all weights, drop the prefix cache, verify the weights in SGLang bit by bit, set the version.

        `rollout.pause_mode` determines the treatment of unfinished requests. Nothing is sent unless version, names and
        digests of the weights are right. After a failure the engine refuses requests until a later sync succeeds.
        Raises WeightSyncError naming tensors, both digests and both versions.
        """
        server, stream = self._running("load_weights"), self._stream("load_weights")
        begin = time.monotonic()
        try:
            check_weights(weights, held_version=self._version)
            self._weights.prepare(weights)
            prepared_s = time.monotonic() - begin
            with stream.held():
                report = self._replace(weights, stream)
        except WeightSyncError as error:
            raise WeightSyncError(f"{self._name} load_weights: {error}") from error
        except ClientError as error:
            cause = f"the new weights were not loaded: {error}"
            lost = error.status is None
            text = server.error("load_weights", cause, policy_version=self._version, lost=lost)
            # The loss of a server says nothing about the weights: another server may hold them.
            raise (EngineError if lost else WeightSyncError)(text) from error
        report.verify_s += prepared_s
        return report

    def _replace(self, weights: PackedWeights, stream: RequestStream) -> WeightReport:
        """The part of a sync after which the old weights are gone; no request is sent to the server meanwhile."""
        mode, version = self._config.pause_mode, weights.policy_version
        if mode is PauseMode.abort:
            stream.abort(None)
            stream.drain(time.monotonic() + self._config.sync_timeout_s)
        before = self._newest_version
        self._newest_version = version
        keeps_cache = mode is PauseMode.in_place and stream.num_unfinished > 0
        try:
            report = self._weights.load(weights, keeps_cache=keeps_cache)
            self._weights.take_memory(CACHE_TAGS)
            held = self.policy_version
            if held != version:
                raise WeightSyncError(f"version {version} was set, the engine reports {held}")
        except BaseException:
            self._broken = f"the sync of policy version {version} did not complete"
            self._newest_version = max(before, self._version)
            raise
        self._version, self._broken = version, ""
        stream.version = version
        if mode is PauseMode.in_place:
            stream.extra_key = f"policy version {version}"
        return report

    def sleep(self) -> None:
        """Release weights, cache and CUDA graphs; the weights are lost: generate() refuses until the next sync."""
        if self._stream("sleep").num_unfinished:
            raise EngineError(f"{self._name} sleep: requests are unfinished; poll or abort them first")
        if not self._weights.has_released:
            self._broken = "they were given up while the engine slept"
            try:
                self._weights.release_memory()
            except ClientError as error:
                raise self._failure("sleep", error) from error

    def wake(self) -> None:
        """Take the memory of the weights; the cache follows after the weights are loaded, so that both copies fit."""
        self._running("wake")
        try:
            self._weights.take_memory(WEIGHT_TAGS)
        except ClientError as error:
            raise self._failure("wake", error) from error

    def start_profile(self, directory: Path) -> None:
        """Record the schedulers of the server by SGLang's own profiler; `directory` is on a disk that they see."""
        gpu = [] if self._device == "cpu" else ["GPU", "MEM"]
        body = {
            "output_dir": str(directory.resolve()), "activities": ["CPU", *gpu], "with_stack": False,
            "record_shapes": False, "profile_prefix": f"engine_{self._index}", "profile_id": "sglang",
        }  # fmt: skip
        self._profile("/start_profile", body)
        self._is_profiled = True

    def stop_profile(self) -> None:
        if self._is_profiled:
            self._is_profiled = False
            self._profile("/stop_profile", {})

    def _profile(self, route: str, body: dict[str, Any]) -> None:
        try:
            self._running("profile").client().call(route, timeout_s=self._config.sync_timeout_s, body=body)
        except ClientError as error:
            raise self._failure("profile", error) from error

    @property
    def sampling_s(self) -> float:
        return 0.0 if self._requests is None else self._requests.sampling_s

    @property
    def policy_version(self) -> int:
        """Version of the weights, as the server reports it. Raises EngineError while no verified version is loaded."""
        server = self._running("policy_version")
        try:
            reported = server.client().call("/model_info", timeout_s=INFO_TIMEOUT_S)["weight_version"]
            return parse_version(reported)
        except ClientError as error:
            raise self._failure("policy_version", error) from error
        except ReplyError as error:
            raise EngineError(f"{self._name} policy_version: {error}") from error

    def stop(self) -> None:
        """End every process of the server and remove its files; safe to call twice.

        A server that Parity did not start loses only the requests of this run.
        """
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if self._server is not None:
            self._server.stop()
            self._server = None

    @property
    def _name(self) -> str:
        return f"engine {self._index} (sglang, policy version {self._version})"

    def _running(self, phase: str) -> SGLangServer | ExternalServer:
        if self._server is None:
            raise EngineError(f"{self._name} {phase}: the engine is not running; call start() first")
        return self._server

    def _stream(self, phase: str) -> RequestStream:
        if self._requests is None:
            raise EngineError(f"{self._name} {phase}: the engine is not running; call start() first")
        return self._requests

    def _unusable(self) -> EngineError:
        return EngineError(f"{self._name} generate: the weights are unusable: {self._broken}; load weights again")

    def _check_alive(self) -> None:
        server = self._running("generate")
        if server.end_cause:
            raise EngineError(server.error("generate", "the server has ended", policy_version=self._version))

    def _failure(self, phase: str, error: ClientError) -> EngineError:
        server = self._running(phase)
        return EngineError(server.error(phase, str(error), policy_version=self._version, lost=error.status is None))

    def _new_server(self, model_path: Path) -> SGLangServer | ExternalServer:
        if self._config.servers:
            # The weights of such a server are unknown until the first sync.
            self._broken = "none have been sent to this server yet"
            return ExternalServer(self._config.servers[self._index], index=self._index)
        try:
            check_installation(device=self._device, sleeps=self._needs.sleeps)
        except EngineError as error:
            raise EngineError(f"{self._name} start: {error}") from error
        environment = server_environment(
            self._config,
            device=self._device,
            num_threads=self._num_threads,
            needs=self._needs,
            quantization=self._quantization,
        )
        arguments = server_args(
            self._config,
            model_path,
            device=self._device,
            random_seed=self._seed + self._index,
            needs=replace(self._needs, cache_tokens=self._cache_tokens),
            quantization=self._quantization,
        )
        return SGLangServer(index=self._index, log_dir=self._log_dir, environment=environment, server_args=arguments)

    def _examine(self, server: SGLangServer | ExternalServer, model_path: Path) -> str:
        """Check a started server: its options, and that the checkpoint's names make up its parameters; its release."""
        client = server.client()
        hf_config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
        try:
            info = client.call("/server_info", timeout_s=INFO_TIMEOUT_S)
            if isinstance(server, ExternalServer):
                server.check(info, self._config)
            self._cache_tokens = info.get("max_total_num_tokens")
            self._weights = self._new_weight_update(client, info, hf_config)
            if isinstance(server, SGLangServer):
                # SGLang tries this call itself, before its own port is open, and fails. Without it every cache flush,
                # which collects garbage on a CPU, walks through a million objects.
                client.call("/freeze_gc", body={}, timeout_s=INFO_TIMEOUT_S)
            layout = self._weights.layout
            layout.part(of_adapter=False).fusion(
                sent=sent_names(sources(tensor_shapes(model_path)), self._quantization)
            )
            if self._needs.adapter is not None:
                sent = [f"{layer}{end}" for layer in self._needs.adapter.layers for end in (A_SENT, B_SENT)]
                plan_fusion(layout.part(of_adapter=True).parameters, sent=sent)
            self._requests = RequestStream(
                client,
                window=window_of(info),
                timeout_s=self._config.generate_timeout_s,
                is_shared=isinstance(server, ExternalServer),
                cache_tokens=self._cache_tokens,
            )
        except ClientError as error:
            raise self._failure("start", error) from error
        except EngineError as error:
            raise EngineError(f"{self._name} start: {server.address}: {error}") from error
        except (LayoutError, OSError, SafetensorError) as error:
            raise EngineError(f"{self._name} start: {model_path}: {error}") from error
        self._vocab_size = hf_config["vocab_size"]
        self._mixture, self._num_layers = mixture_of(hf_config), hf_config["num_hidden_layers"]
        self._context_length = info["max_req_input_len"] + CONTEXT_MARGIN
        return str(info.get("version", "of unknown release"))

    def _new_weight_update(self, client: SGLangClient, info: dict[str, Any], hf_config: dict[str, Any]) -> WeightUpdate:
        is_external = bool(self._config.servers)
        return WeightUpdate(
            client,
            device=info.get("device", self._device) if is_external else self._device,
            dtype=DTYPES[self._config.dtype.value],
            num_kv_heads=hf_config.get("num_key_value_heads") or hf_config["num_attention_heads"],
            timeout_s=self._config.sync_timeout_s,
            maps_memory=not is_external or _maps_memory(client, info),
            quantization=self._quantization,
            adapter=self._needs.adapter,
        )

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        """The body of /generate for the rest of a response, with the adapter if there is one."""
        return body_of(continuation(request), adapter=None if self._needs.adapter is None else ADAPTER_NAME)

    def _completion(self, answer: Answer) -> Completion:
        """The Completion of an answer. Raises EngineError, and ends all requests, if reply and request do not match."""
        job, reply = answer.job, answer.reply
        if reply is None:
            unanswered = given_up if answer.is_refused else aborted
            return Completion(job.ticket, unanswered(job.request))
        try:
            rest = generation_of(
                continuation(job.request),
                reply,
                vocab_size=self._vocab_size,
                sent_version=job.version,
                newest_version=self._newest_version,
            )
            rest.routes = self._routes(job, reply.get("meta_info") or {}, len(rest.token_ids))
        except ReplyError as error:
            self._stream("generate").drop()
            where = f"prompt {job.request.prompt_id}/{job.request.sample_index}"
            raise EngineError(f"{self._name} generate, {where}: {error}") from error
        return Completion(job.ticket, whole_response(job.request, rest))

    def _routes(self, job: Job, meta: Mapping[str, Any], num_tokens: int) -> Routes | None:
        """The routes of the rest of a response with `num_tokens`. Raises ReplyError."""
        mixture, own = self._mixture, meta.get("routed_experts")
        if not job.request.sampling.with_routes or not num_tokens or mixture is None or own is None:
            return None

        def decoded(text: str, first: int, end: int) -> Routes:
            with_weights = self._needs.routes is Routing.weights  # a server returns what it was started for
            return routes_of(text, (end - first, self._num_layers), mixture, with_weights=with_weights)

        last = len(job.body["input_ids"]) + num_tokens - 1
        if (reading := job.reading) is not None and reading.routes is None:
            reading.routes = decoded(reading.text, reading.first, reading.end)
        return joined([None if reading is None else reading.routes, decoded(own, job.body[START], last)])


def _maps_memory(client: SGLangClient, info: dict[str, Any]) -> bool:
    """True if a server that Parity did not start can read this machine's memory: it has the loader and runs here."""
    return LOADER in (info.get("custom_weight_loader") or []) and client.is_local
