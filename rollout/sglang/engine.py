"""The SGLang engine: a real server in its own processes behind the Engine protocol.

Implements `rollout.engine.Engine`; hosted by `rollout/worker.py`. Tokens in, tokens out. `server.py` owns the
processes, `client.py` the calls, `weight_update.py` the weight sync.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from rollout.config import SGLangConfig
from rollout.engine import EngineError, EngineInfo, WeightReport, WeightSyncError
from rollout.queued_engine import QueuedEngine
from rollout.sglang.client import ClientError
from rollout.sglang.cpu_platform import PLATFORM_NAME
from rollout.sglang.fusing import FusionError, checkpoint_names, plan_fusion
from rollout.sglang.loader import LOADER
from rollout.sglang.memory import CACHE_TAGS, WEIGHT_TAGS, ServerMemory, memory_args
from rollout.sglang.server import ServerSetup, SGLangServer
from rollout.sglang.weight_update import WeightUpdate
from rollout.types import FinishReason, GenerateRequest, Generation, WeightBucket
from rollout.weights import DTYPES, check_buckets

MINIMUM_SGLANG = (0, 5, 23)
"""Earlier releases execute code sent to their weight-update routes."""
INFO_TIMEOUT_S = 30.0
CONTEXT_MARGIN = 4
"""`max_req_input_len` plus this is the longest prompt and response together that SGLang serves without cutting it."""

CPU_SERVER_ARGS: dict[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    # SGLang would take most of the machine's memory for the cache: 65536 tokens of a 0.5B model are 0.8 GB in bf16.
    "max_total_tokens": 65536,
    "max_running_requests": 512,
}
"""Defaults on a CPU; rollout.engine_args override them."""

logger = logging.getLogger(__name__)


class SGLangEngine(QueuedEngine):
    """One SGLang server with a full copy of the weights. Not safe for concurrent calls.

    Seeds: on a CPU every response is drawn from its own `SamplingParams.seed` (see `cpu_srt.py`). On a GPU SGLang
    uses the seed only with `engine_args.enable_deterministic_inference=true`; otherwise responses are independent
    draws from a generator seeded with run seed + engine index.
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
        sleeps: bool = False,
    ) -> None:
        """`num_threads` bounds the compute threads of the server; None leaves the choice to it.

        `sleeps` has the server allocate so that `sleep` can give the memory back.
        """
        super().__init__()
        if device not in ("cpu", "cuda"):
            raise EngineError(f"engine {index} (sglang): device must be cpu or cuda, got {device!r}")
        self._config = config
        self._index = index
        self._seed = seed
        self._device = device
        self._log_dir = log_dir
        self._num_threads = num_threads
        self._server: SGLangServer | None = None
        self._version = 0
        self._weights: WeightUpdate
        self._memory: ServerMemory
        self._context_length = 0
        self._vocab_size = 0
        self._broken = ""
        self._sleeps = sleeps

    def start(self, model_path: Path) -> EngineInfo:
        """Start a server on the model in a local directory; policy version 0. Raises EngineError.

        Also checks, before any training, that a weight sync of this model can be verified.
        """
        begin = time.monotonic()
        if self._server is not None:
            raise EngineError(f"{self._name} start: the engine runs already")
        version = self._check_installation()
        if not (model_path / "config.json").is_file():
            raise EngineError(f"{self._name} start: {model_path} is not a model directory: it has no config.json")
        setup = ServerSetup(index=self._index, log_dir=self._log_dir, environment=self._environment())
        self._server = SGLangServer(setup, server_args=self._server_args(model_path))
        self._version, self._broken = 0, ""
        try:
            self._server.start(timeout_s=self._config.start_timeout_s)
            self._check_model(model_path)
        except BaseException:
            self.stop()
            raise
        info = EngineInfo(
            name=f"sglang {version}",
            address=self._server.address,
            pids=self._server.pids,
            start_s=time.monotonic() - begin,
        )
        logger.info("%s is ready at %s after %.1f s, log %s", self._name, info.address, info.start_s, setup.log_path)
        return info

    def _check(self, requests: Sequence[GenerateRequest]) -> None:
        self._running("generate")
        if self._broken:
            raise EngineError(f"{self._name} generate: the weights are unusable: {self._broken}; load weights again")
        for request in requests:
            self._check_request(request)

    def _sample(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        if not requests:
            return []
        server = self._running("generate")
        body = {
            "input_ids": [request.prompt_token_ids for request in requests],
            "sampling_params": [_sampling_params(request) for request in requests],
            "return_logprob": True,
        }
        try:
            replies = server.client().call("/generate", body=body, timeout_s=self._config.generate_timeout_s)
        except ClientError as error:
            raise self._failure("generate", error) from error
        if not isinstance(replies, list) or len(replies) != len(requests):
            count = len(replies) if isinstance(replies, list) else "no list of"
            raise EngineError(f"{self._name} generate: {len(requests)} requests were sent, {count} responses came back")
        return [self._generation(request, reply) for request, reply in zip(requests, replies, strict=True)]

    def load_weights(self, buckets: Sequence[WeightBucket]) -> WeightReport:
        """Replace all weights, drop the prefix cache, verify what SGLang holds bit by bit, set the version.

        Nothing is sent unless version, names and digests of the buckets are right. After a failure generate() refuses
        until a later sync has succeeded. Raises WeightSyncError naming tensors, both digests and both versions.
        """
        server = self._running("load_weights")
        begin = time.monotonic()
        try:
            version = check_buckets(buckets, held_version=self._version)
            self._weights.prepare(buckets, policy_version=version)
            prepared_s = time.monotonic() - begin
            self._broken = f"the sync of policy version {version} did not complete"
            report = self._weights.load(buckets, policy_version=version)
            self._memory.take(CACHE_TAGS)
        except WeightSyncError as error:
            raise WeightSyncError(f"{self._name} load_weights: {error}") from error
        except ClientError as error:
            cause = f"the new weights were not loaded: {error}"
            lost = error.status is None
            text = server.error("load_weights", cause, policy_version=self._version, lost=lost)
            raise WeightSyncError(text) from error
        held = self.policy_version
        if held != version:
            raise WeightSyncError(f"{self._name} load_weights: version {version} was set, the engine reports {held}")
        self._version, self._broken = version, ""
        report.verify_s += prepared_s
        return report

    def sleep(self) -> None:
        """Give weights, cache and CUDA graphs back; the weights are lost: generate() refuses until the next sync."""
        self._running("sleep")
        if not self._memory.is_released:
            self._broken = "they were given up while the engine slept"
            try:
                self._memory.release()
            except ClientError as error:
                raise self._failure("sleep", error) from error

    def wake(self) -> None:
        """Take the memory of the weights; that of the cache follows when they are loaded, so both copies fit."""
        self._running("wake")
        try:
            self._memory.take(WEIGHT_TAGS)
        except ClientError as error:
            raise self._failure("wake", error) from error

    def verify_weights(self) -> None:
        """Prove again that the engine holds the last weights that it was sent; raises WeightSyncError if not."""
        self._running("verify_weights")
        try:
            self._weights.verify(policy_version=self._version)
        except WeightSyncError as error:
            self._broken = "they are not those that were sent"
            raise WeightSyncError(f"{self._name} verify_weights: {error}") from error
        except ClientError as error:
            raise self._failure("verify_weights", error) from error

    @property
    def policy_version(self) -> int:
        """Version of the weights, asked from the server. Raises EngineError while no verified version is loaded."""
        server = self._running("policy_version")
        try:
            reported = server.client().call("/model_info", timeout_s=INFO_TIMEOUT_S)["weight_version"]
        except ClientError as error:
            raise self._failure("policy_version", error) from error
        return self._parse_version(reported, phase="policy_version")

    def stop(self) -> None:
        """End every process of the server and remove what it left; safe to call twice."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    @property
    def _name(self) -> str:
        return f"engine {self._index} (sglang, policy version {self._version})"

    def _running(self, phase: str) -> SGLangServer:
        if self._server is None:
            raise EngineError(f"{self._name} {phase}: the engine is not running; call start() first")
        return self._server

    def _failure(self, phase: str, error: ClientError) -> EngineError:
        server = self._running(phase)
        return EngineError(server.error(phase, str(error), policy_version=self._version, lost=error.status is None))

    def _check_installation(self) -> str:
        """Version of the installed SGLang; raises EngineError if it is missing, too old, or cannot run here."""
        try:
            version = importlib.metadata.version("sglang")
        except importlib.metadata.PackageNotFoundError as error:
            raise EngineError(
                f"{self._name} start: rollout=sglang needs SGLang: pip install 'parity-rl[sglang]', "
                "or use rollout=torch"
            ) from error
        numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
        if numbers < MINIMUM_SGLANG:
            raise EngineError(
                f"{self._name} start: SGLang {version} is too old; the floor is "
                f"{'.'.join(map(str, MINIMUM_SGLANG))} (earlier releases have remote-code-execution holes)"
            )
        platforms = importlib.metadata.entry_points(group="sglang.srt.platforms")
        if self._device == "cpu" and PLATFORM_NAME not in platforms.names:
            raise EngineError(
                f"{self._name} start: SGLang on a CPU needs Parity's platform plug-in, which is registered when "
                "Parity is installed: pip install -e ."
            )
        return version

    def _environment(self) -> dict[str, str]:
        """What the server's processes see besides this process's environment."""
        environment = {
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            # FastAPI warns about SGLang's route names by the dozen.
            "PYTHONWARNINGS": "ignore::UserWarning",
        }
        if self._device == "cpu":
            environment |= {"SGLANG_PLATFORM": PLATFORM_NAME, "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
            # Threads that spin while they wait take the cores from the trainer: on a busy machine decoding with two
            # threads was six times slower that way.
            environment["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
            num_ranks = self._config.engine_args.get("tp_size", 1)
            if num_ranks > 1:
                # SGLang wants a NUMA node for every rank, or to be told which cores; ours may use all that we may.
                cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
                environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join([cores] * num_ranks)
        if self._num_threads is not None:
            environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self._num_threads))
        return environment

    def _server_args(self, model_path: Path) -> dict[str, Any]:
        return {
            **(CPU_SERVER_ARGS if self._device == "cpu" else {}),
            "log_level_http": "warning",
            "skip_server_warmup": True,
            **memory_args(self._config, device=self._device, sleeps=self._sleeps),
            **self._config.engine_args,
            "custom_weight_loader": [LOADER],
            "device": self._device,
            "dtype": self._config.dtype.value,
            "log_level": "info",
            "model_path": str(model_path),
            "random_seed": self._seed + self._index,
            "skip_tokenizer_init": True,
            "sleep_on_idle": True,
            "trust_remote_code": False,
            "weight_version": "0",
        }

    def _check_model(self, model_path: Path) -> None:
        """After the start: read the context length, and see that the checkpoint's names make up the parameters."""
        client = self._running("start").client()
        hf_config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
        try:
            self._weights = WeightUpdate(
                client,
                device=self._device,
                dtype=DTYPES[self._config.dtype.value],
                num_kv_heads=hf_config.get("num_key_value_heads") or hf_config["num_attention_heads"],
                timeout_s=self._config.sync_timeout_s,
            )
            self._memory = ServerMemory(client, timeout_s=self._config.sync_timeout_s)
            info = client.call("/server_info", timeout_s=INFO_TIMEOUT_S)
            # SGLang tries this itself, before its own port is open. Without it every cache flush, which collects
            # garbage on a CPU, walks through a million objects.
            client.call("/freeze_gc", body={}, timeout_s=INFO_TIMEOUT_S)
        except ClientError as error:
            raise self._failure("start", error) from error
        except WeightSyncError as error:
            raise EngineError(f"{self._name} start: {error}") from error
        try:
            plan_fusion(self._weights.parameter_names, sent=checkpoint_names(model_path))
        except (FusionError, OSError, SafetensorError) as error:
            raise EngineError(f"{self._name} start: {model_path}: {error}") from error
        self._vocab_size = hf_config["vocab_size"]
        self._context_length = info["max_req_input_len"] + CONTEXT_MARGIN

    def _check_request(self, request: GenerateRequest) -> None:
        sampling = request.sampling
        num_prompt_tokens = len(request.prompt_token_ids)
        problem = ""
        if sampling.temperature < 0 or sampling.max_new_tokens < 1:
            problem = (
                f"temperature must be >= 0 and max_new_tokens >= 1, "
                f"got {sampling.temperature} and {sampling.max_new_tokens}"
            )
        elif not num_prompt_tokens:
            problem = "the prompt has no tokens"
        elif not 0 <= min(request.prompt_token_ids) <= max(request.prompt_token_ids) < self._vocab_size:
            problem = f"the prompt has token ids outside 0..{self._vocab_size - 1}"
        elif num_prompt_tokens + sampling.max_new_tokens > self._context_length:
            problem = (
                f"{num_prompt_tokens} prompt tokens and max_new_tokens={sampling.max_new_tokens} exceed the "
                f"engine's context of {self._context_length} tokens"
            )
        if problem:
            raise ValueError(f"{self._name} generate, prompt {request.prompt_id}/{request.sample_index}: {problem}")

    def _generation(self, request: GenerateRequest, reply: Mapping[str, Any]) -> Generation:
        """One response from SGLang's reply; raises EngineError if it contradicts itself."""
        token_ids: list[int] = reply["output_ids"]
        meta = reply["meta_info"]
        where = f"generate, prompt {request.prompt_id}/{request.sample_index}"
        scored = meta.get("output_token_logprobs") or []
        logprobs = [entry[0] for entry in scored]
        if len(scored) == len(token_ids) and [entry[1] for entry in scored] != token_ids:
            raise EngineError(f"{self._name} {where}: the log-probs are those of other tokens than the response")
        versions = {span["version"] for span in meta.get("weight_versions") or []} | {meta["weight_version"]}
        if len(versions) > 1:
            raise EngineError(f"{self._name} {where}: the response mixes the weights of versions {sorted(versions)}")
        finish_reason = self._finish_reason(meta["finish_reason"], where)
        if finish_reason is FinishReason.length and len(token_ids) != request.sampling.max_new_tokens:
            raise EngineError(
                f"{self._name} {where}: the response was cut at {len(token_ids)} of "
                f"max_new_tokens={request.sampling.max_new_tokens} tokens"
            )
        complete = len(logprobs) == len(token_ids) and None not in logprobs
        return Generation(
            token_ids=token_ids,
            logprobs=logprobs if complete else None,
            token_versions=[self._parse_version(meta["weight_version"], phase=where)] * len(token_ids),
            finish_reason=finish_reason,
        )

    def _finish_reason(self, reported: Mapping[str, Any] | None, where: str) -> FinishReason:
        kind = reported["type"] if reported else "none"
        if kind not in FinishReason.__members__:
            raise EngineError(f"{self._name} {where}: unknown finish reason {reported!r}")
        return FinishReason[kind]

    def _parse_version(self, reported: str, *, phase: str) -> int:
        if not reported.isdecimal():
            raise EngineError(
                f"{self._name} {phase}: the server holds weights of version {reported!r}, which no completed sync set"
            )
        return int(reported)


def _sampling_params(request: GenerateRequest) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_new_tokens,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop_token_ids": list(sampling.stop_token_ids),
        "sampling_seed": sampling.seed,
    }
