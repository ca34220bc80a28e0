"""Checks of one SGLang server without a run: its start, its digests, its memory, the size of its cache, two GPUs.

On a CPU the real SGLang runs a tiny model.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from gpu_check.host import NEEDS_CUDA, Host, gib
from gpu_check.models import QWEN_05B, TINY, Size, hf_config
from gpu_check.rows import NotRunError, Row, judged, not_run, noted
from rollout.engine import Engine, EngineError, EngineNeeds, WeightSyncError
from rollout.sglang.config import SGLangConfig
from rollout.sglang.engine import SGLangEngine
from rollout.types import GenerateRequest, PackedWeights, SamplingParams
from rollout.weights.packed_weights import TensorShape
from rollout.weights.shared_weights import WeightPublisher, WeightReader

START_TIMEOUT_S = 1200.0
"""The first start on a GPU compiles kernels and captures graphs."""
CACHE_VARIABLES = (
    "SGLANG_CACHE_DIR", "SGLANG_JIT_CACHE_DIR", "SGLANG_DG_CACHE_DIR", "SGLANG_CUTE_AOT_CACHE_DIR", "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "TILELANG_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE",
    "TVM_FFI_CACHE_DIR",
)  # fmt: skip
"""Every directory in which SGLang and what it calls keep compiled kernels."""
SLEEPING_BYTES = 2 * 2**30
"""Memory that a sleeping server may keep: contexts and libraries."""
FRACTIONS = (0.3, 0.6)
RANDOM = replace(TINY, name="tiny-random")


def random_model(host: Host, tiny: Size = RANDOM) -> tuple[Path, PreTrainedModel]:
    """A random model on the disk, and in memory; on a CPU a `tiny` one."""
    size = host.pick(QWEN_05B, tiny)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(hf_config(size), dtype=torch.bfloat16)
    path = host.scratch / f"qwen2-{size.name}"
    model.save_pretrained(path)
    return path, model


@contextmanager
def started(
    host: Host, path: Path, *, sleeps: bool = False, engine_args: dict[str, object] | None = None
) -> Iterator[tuple[SGLangEngine, float]]:
    """A running engine, and the seconds of its start."""
    config = SGLangConfig(
        gpus_per_engine=float(host.pick(int((engine_args or {}).get("tp_size", 1)), 0)),  # type: ignore[call-overload]
        start_timeout_s=START_TIMEOUT_S,
        engine_args=dict(engine_args or {}),
    )
    engine = SGLangEngine(
        config,
        index=0,
        seed=0,
        device=host.device.type,
        log_dir=host.out / "logs",
        num_threads=None if host.is_cuda else host.threads,
        needs=EngineNeeds(sleeps=sleeps),
    )
    try:
        info = engine.start(path)
        yield engine, info.start_s
    except EngineError as error:
        raise RuntimeError(f"{error} (log: {host.out / 'logs'})") from error
    finally:
        engine.stop()


@contextmanager
def packed(model: PreTrainedModel, *, version: int) -> Iterator[PackedWeights]:
    """The weights of a model, as a rank publishes them."""
    named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    shapes = [TensorShape(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
    publisher, reader = WeightPublisher(shapes, dtype=torch.bfloat16), WeightReader()
    try:
        with reader.opened(publisher.publish(named, policy_version=version)) as weights:
            yield weights
    finally:
        reader.close()
        publisher.close()


def starts(host: Host) -> Iterator[Row]:
    """A start with empty caches of kernels, and one with those that it left."""
    path, _ = random_model(host)
    for name in CACHE_VARIABLES:
        os.environ[name] = str(host.scratch / name.lower())
    for what in ("cold caches", "warm caches"):
        with started(host, path) as (_, seconds):
            yield noted("20", f"start of SGLang, {what}", measured=f"{seconds:.1f} s")


def digests(host: Host) -> Iterator[Row]:
    """A verified sync of other weights, and a bit that differs."""
    path, model = random_model(host)
    with started(host, path) as (engine, _):
        yield from _sync(host, "21", engine, model)


def _sync(host: Host, check: str, engine: SGLangEngine, model: PreTrainedModel) -> Iterator[Row]:
    """Load weights that differ from those of the start; then expect other ones than are held."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    begin = time.monotonic()
    with packed(model, version=1) as weights:
        report = engine.load_weights(weights)
    taken = time.monotonic() - begin
    yield judged(
        check,
        "weight sync, verified by SGLang's own digests",
        expected="version 1",
        measured=f"version {engine.policy_version}, {report.num_tensors} tensors, {taken:.2f} s",
        ok=engine.policy_version == 1,
        reason="another version",
    )
    changed = next(name for name, _ in model.named_parameters() if name.endswith("k_proj.weight"))
    model.get_parameter(changed).data.view(torch.int16).view(-1)[3] ^= 1
    found = ""
    with packed(model, version=2) as weights:
        engine._weights.prepare(weights)
        try:
            engine._weights.verify(policy_version=2)
        except WeightSyncError as error:
            found = str(error)
    yield judged(
        check,
        "one bit differs between the engine's weights and those that it must hold",
        expected=f"{changed} is named",
        measured="named" if changed in found else "not named",
        ok=changed in found,
        reason=found[:200] or "SGLang's digests did not show it",
    )


def sleeping(host: Host) -> Iterator[Row]:
    """Sleep, wake, a sync, a response; and on a GPU what a sleeping server keeps."""
    path, model = random_model(host)
    before = host.used() if host.is_cuda else 0
    with started(host, path, sleeps=host.is_cuda) as (engine, _):
        yield from slept(host, "22", engine, model, kind="server", version=1, before=before)


def slept(
    host: Host, check: str, engine: Engine, model: PreTrainedModel, *, kind: str, version: int, before: int
) -> Iterator[Row]:
    """Let an engine that runs sleep and wake, and give it the weights as `version`.

    `kind` is the word for it; `before` is the memory of the GPU, in bytes, that was taken before its start.
    """
    awake = host.used() if host.is_cuda else 0
    _, slept_s = host.once(engine.sleep)
    asleep = host.used() if host.is_cuda else 0
    _, woke_s = host.once(engine.wake)
    with packed(model, version=version) as weights:
        engine.load_weights(weights)
    length = len(engine.generate(requests(1, tokens=8))[0].token_ids)
    yield judged(
        check,
        "sleep, wake, sync, generate",
        expected="8 tokens",
        measured=f"{length} tokens; slept in {slept_s:.2f} s, woke in {woke_s:.2f} s",
        ok=length == 8,
        reason="no whole response",
    )
    what, expected = f"memory of the GPU that a sleeping {kind} keeps", f"less than {gib(SLEEPING_BYTES)}"
    if not host.is_cuda:
        yield not_run(check, what, expected=expected, reason=NEEDS_CUDA)
        return
    kept = asleep - before
    yield judged(
        check,
        what,
        expected=expected,
        measured=f"{gib(kept)}, awake {gib(awake - before)}",
        ok=kept < SLEEPING_BYTES,
        reason="graphs, workspaces or caches stay",
    )


def cache_size(host: Host) -> Iterator[Row]:
    """Tokens of the KV cache and memory of the server at two values of mem_fraction_static."""
    if not host.is_cuda:
        raise NotRunError(NEEDS_CUDA)
    path, _ = random_model(host)
    total = torch.cuda.get_device_properties(host.device).total_memory
    for fraction in FRACTIONS:
        free = total - host.used()
        with started(host, path, engine_args={"mem_fraction_static": fraction}) as (engine, _):
            taken = host.used() - (total - free)
            server = engine._server
            assert server is not None
            info = server.client().call("/server_info", timeout_s=30)
        tokens = info.get("max_total_num_tokens")
        text = f"{tokens} tokens; the server takes {gib(taken)}, {taken / free:.0%} of what was free"
        yield noted("24", f"mem_fraction_static={fraction}", measured=text, expected=f"{fraction:.0%} and some GiB")


def two_ranks(host: Host) -> Iterator[Row]:
    """A tensor-parallel server of two ranks: digests of both."""
    if host.is_cuda and torch.cuda.device_count() < 2:
        raise NotRunError("needs two GPUs")
    path, model = random_model(host)
    with started(host, path, engine_args={"tp_size": 2}) as (engine, seconds):
        yield noted("26", "start of SGLang, tp_size=2", measured=f"{seconds:.1f} s")
        yield from _sync(host, "26", engine, model)


def requests(number: int, *, tokens: int) -> Sequence[GenerateRequest]:
    """Requests without a stop token."""
    return [
        GenerateRequest(
            prompt_id=index,
            sample_index=0,
            prompt_token_ids=[3, 4, 5, 6 + index],
            sampling=SamplingParams(temperature=1.0, max_new_tokens=tokens, seed=index),
        )
        for index in range(number)
    ]
