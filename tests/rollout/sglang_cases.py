"""A real SGLang server on a tiny random model, and what tests of it need: requests, references, an engine beside it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from packing_cases import pack
from tiny_model import EOS_TOKEN_ID, write_tiny_model

from rollout.config import DType
from rollout.engine import Engine, EngineInfo, EngineNeeds
from rollout.processes.scratch import Scratch
from rollout.sglang.client import SGLangClient
from rollout.sglang.config import SGLangConfig
from rollout.sglang.engine import SGLangEngine
from rollout.sglang.external import ADMIN_API_KEY, API_KEY
from rollout.sglang.replies import body_of
from rollout.sglang.server import SGLangServer
from rollout.types import GenerateRequest, Generation, PackedWeights, SamplingParams
from rollout.weights.packed_weights import TensorShape, stored_state
from rollout.weights.shared_weights import WeightPublisher
from trainer.run.probe import judge, rounding_tolerance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10], [20, 21, 22], [40], [11, 12, 13, 14, 11, 12, 13, 14, 50, 60]]
LONG = 1500
"""Tokens of a response that goes on while this process waits for a core, which the server need not."""
FAULT_TIMEOUT_S = 30.0
"""A dead server must be noticed within this on a loaded machine; on an idle one it takes well under a second."""


@dataclass
class Served:
    """A running engine and the weights that its server holds."""

    engine: SGLangEngine
    info: EngineInfo
    model: PreTrainedModel
    log: Path
    version: int = 0

    def __post_init__(self) -> None:
        self._first_model = self.model

    @property
    def client(self) -> SGLangClient:
        server = self.engine._server
        assert server is not None
        return server.client()

    @property
    def scheduler(self) -> psutil.Process:
        """The process of the server that samples."""
        [found] = [process for process in map(psutil.Process, self.info.pids) if "scheduler" in process.name()]
        return found

    def packed(self, model: PreTrainedModel, *, dtype: torch.dtype = torch.float32) -> PackedWeights:
        """The model's weights as the next version."""
        return pack(stored_state(model), policy_version=self.version + 1, dtype=dtype)

    def verify(self) -> None:
        """Compare the server's weights with those that were sent last, as a sync does."""
        weights = self.engine._weights
        weights._deadline = time.monotonic() + 60
        weights.verify(policy_version=self.version)

    def load(self, model: PreTrainedModel) -> None:
        self.engine.load_weights(self.packed(model))
        self.version += 1
        self.model = model

    def restore(self) -> None:
        """End all requests, and give the server the weights that it started with if it may hold others."""
        stream = self.engine._requests
        assert stream is not None
        stream.extra_key = None
        stream.abort(None)
        stream.drain(time.monotonic() + 60)
        stream.poll(0.0)
        held = self.client.call("/model_info", timeout_s=30)["weight_version"]
        if self.model is not self._first_model or self.engine._broken or held != str(self.version):
            self.load(self._first_model)


def publisher_of(named: list[tuple[str, torch.Tensor]]) -> WeightPublisher:
    shapes = [TensorShape(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
    return WeightPublisher(shapes, dtype=torch.float32)


def start_served(
    directory: Path, *, model_type: str, tied: bool, dtype: DType, tp_size: int = 1, needs: EngineNeeds | None = None
) -> Served:
    model = write_tiny_model(directory / "model", seed=0, model_type=model_type, tied=tied, max_positions=LONG + 20)
    config = SGLangConfig(dtype=dtype, generate_timeout_s=120, sync_timeout_s=120, engine_args={"tp_size": tp_size})
    logs = directory / "logs"
    engine = SGLangEngine(config, index=0, seed=0, device="cpu", log_dir=logs, num_threads=1, needs=needs)
    info = engine.start(directory / "model")
    return Served(engine=engine, info=info, model=model, log=logs / "engine-0.log")


def make_requests(
    prompts: list[list[int]],
    *,
    num_samples: int = 1,
    temperature: float = 1.0,
    max_new_tokens: int = 24,
    seed: int = 0,
    stop: tuple[int, ...] = (EOS_TOKEN_ID,),
) -> list[GenerateRequest]:
    """`num_samples` requests per prompt, each with a seed of its own."""
    return [
        GenerateRequest(
            prompt_id=prompt_id,
            sample_index=sample,
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                temperature=temperature,
                max_new_tokens=max_new_tokens,
                seed=seed + prompt_id * 1000 + sample,
                stop_token_ids=stop,
            ),
        )
        for prompt_id, prompt in enumerate(prompts)
        for sample in range(num_samples)
    ]


def reference_logprobs(
    model: PreTrainedModel, prompt: list[int], response: list[int], *, temperature: float
) -> torch.Tensor:
    """[R] log-probs of the response under a float32 forward of transformers."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0]
    scores = torch.log_softmax(logits.float() / temperature, dim=-1)
    at = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
    return scores[at, torch.tensor(response)]


def largest_gap(
    requests: list[GenerateRequest],
    generations: list[Generation],
    model: PreTrainedModel,
    *,
    temperature: float,
    shift: int = 0,
) -> float:
    """Largest |engine - transformers| over all response tokens; `shift` compares each token with a later one."""
    gaps = []
    for request, generation in zip(requests, generations, strict=True):
        assert generation.logprobs is not None
        expected = reference_logprobs(model, request.prompt_token_ids, generation.token_ids, temperature=temperature)
        engine = torch.tensor(generation.logprobs)
        count = len(engine) - shift
        if count > 0:
            gaps.append((engine[:count] - expected[shift:]).abs().max().item())
    return max(gaps)


def tokens(generations: list[Generation]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


def alive(pids: tuple[int, ...]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def scratch_of(running: Served) -> Scratch:
    server = running.engine._server
    assert server is not None and server._scratch is not None
    return server._scratch


def judged(served: Served, *, temperature: float, lowest: DType) -> torch.Tensor:
    """The probe before training, with transformers in the place of the trainer's ranks."""
    requests = make_requests(PROMPTS, num_samples=2, temperature=temperature, max_new_tokens=16)
    generations = served.engine.generate(requests)

    def scores(other: float) -> list[torch.Tensor]:
        return [
            reference_logprobs(served.model, request.prompt_token_ids, generation.token_ids, temperature=other)
            for request, generation in zip(requests, generations, strict=True)
        ]

    return judge(
        [torch.tensor(generation.logprobs) for generation in generations],
        scores,
        temperature=temperature,
        tolerance=rounding_tolerance(lowest, temperature),
        lowest=lowest,
    )


def poll_all(engine: Engine, count: int, *, into: dict[int, Generation] | None = None) -> dict[int, Generation]:
    """Poll until `count` completions are there, by ticket; each comes once."""
    got = {} if into is None else into
    deadline = time.monotonic() + 240
    while len(got) < count:
        assert time.monotonic() < deadline, f"{len(got)} of {count} came back"
        for ticket, generation in engine.poll(1.0):
            assert ticket not in got
            got[ticket] = generation
    return got


def without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no token ends a response: each takes all its `max_new_tokens`."""

    def endless(request: GenerateRequest, *, adapter: str | None = None) -> dict[str, Any]:
        body = body_of(request, adapter=adapter)
        body["sampling_params"]["ignore_eos"] = True
        return body

    monkeypatch.setattr("rollout.sglang.engine.body_of", endless)


def under_way(engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch) -> list[GenerateRequest]:
    """Requests (tickets 0, 1, ...) that have their first tokens and most of their tokens still to come.

    The last request, of 8 tokens, is sampled in the same batches: when it comes back, the others have about as many.
    """
    without_end(monkeypatch)
    requests = make_requests(PROMPTS, num_samples=8, max_new_tokens=LONG, seed=11)
    [short] = make_requests(PROMPTS[:1], max_new_tokens=8)
    engine.submit(range(len(requests) + 1), [*requests, short])
    [first] = poll_all(engine, 1)
    assert first == len(requests), "a short response waited for the long ones"
    return requests


@contextmanager
def stopped_until_sync(engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The server samples nothing until a sync in the block calls it: no request ends while the sync is prepared."""
    assert engine._server is not None
    processes = [each for each in map(psutil.Process, engine._server.pids) if "scheduler" in each.name()]
    post = engine._weights._post

    def resume() -> None:
        for process in processes:
            process.resume()

    with monkeypatch.context() as patch:
        patch.setattr(engine._weights, "_post", lambda *arguments: (resume(), post(*arguments))[1])
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            resume()


@contextmanager
def external(served: Served, monkeypatch: pytest.MonkeyPatch, *, address: str = "", **options: Any) -> Iterator[Served]:
    """An engine on the server of `served`, or on a front of it, as `rollout.servers` makes it; not synced yet."""
    server = served.engine._server
    assert isinstance(server, SGLangServer)
    monkeypatch.setenv(API_KEY, server._api_key)
    monkeypatch.setenv(ADMIN_API_KEY, server._admin_api_key)
    options = {"dtype": DType.float32, "generate_timeout_s": 60, "sync_timeout_s": 60, **options}
    config = SGLangConfig(servers=[address or served.info.address], **options)
    engine = SGLangEngine(config, index=0, seed=0, device="cpu", log_dir=served.log.parent, num_threads=None)
    try:
        info = engine.start(served.log.parents[1] / "model")
        yield Served(engine=engine, info=info, model=served.model, log=served.log, version=served.version)
    finally:
        engine.stop()
