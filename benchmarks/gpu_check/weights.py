"""Check 8: publishing weights and reading them in a second process. Check 10: the same through CUDA IPC, as a bound."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor

from gpu_check.host import NEEDS_CUDA, Host, gib, rate
from gpu_check.models import QWEN_05B, QWEN_7B, TINY, Size
from gpu_check.ranks import Setting, lone_rank, run_config
from gpu_check.rows import NotRunError, Row, judged, not_run, noted
from rollout.config import Quantization
from rollout.engine import WeightSyncError
from rollout.sglang.expected import SGLangLayout
from rollout.sglang.fusing import finished, tile_digest
from rollout.types import PackedWeights, SharedWeights
from rollout.weights.packed_weights import check_weights, unpack
from rollout.weights.shared_weights import MappedRegion, WeightReader
from trainer.policy.model import full_tensors

READER_TIMEOUT_S = 300.0
BUCKET_BYTES = 2**29
HASH_FILE = "gpu_tensor_hash.py"
"""SGLang's kernel, one file of its wheel; from SGLang, or from the directory wheels/ of the checkout."""
IPC_BYTES_PER_S = 1e12
"""Rate above which weights through CUDA IPC are worth building."""

QWEN_7B_BYTES = 15_231_233_024
"""Bytes of Qwen2.5-7B in bfloat16."""


def publish(host: Host, size: Size) -> Iterator[Row]:
    """Publish, read in another process, find a flipped bit; seconds of each phase."""
    check = f"8 {size.name}"
    config = run_config(Setting(size=size, prompt_tokens=16, response_tokens=48, cap=128), host)
    with lone_rank(config, host) as worker:

        def gather() -> None:
            for _ in full_tensors(worker._policy.model):
                continue

        _, gathered = host.once(gather)
        first, first_s = host.once(lambda: worker.publish_weights(1))
        shared, again_s = host.once(lambda: worker.publish_weights(2))
        assert first is not None and shared is not None  # rank 0 publishes
        num_bytes = sum(spec.num_bytes for spec in shared.tensors)
        yield noted(
            check, "weights as the engines hold them", measured=f"{gib(num_bytes)}, {len(shared.tensors)} tensors"
        )
        yield noted(check, "gather, no cast", measured=f"{gathered:.2f} s")
        yield noted(check, "publish, first time: fresh memory", measured=f"{first_s:.2f} s, {rate(num_bytes, first_s)}")
        yield noted(
            check, "publish: gather, cast, copy, digest", measured=f"{again_s:.2f} s, {rate(num_bytes, again_s)}"
        )
        layout = _plain_layout(shared, host)
        _, digested_s = host.once(lambda: worker.publish_weights(3, layouts=(layout,)))
        yield noted(check, "publish, with the digests that SGLang must report", measured=f"{digested_s:.2f} s")
        last = worker.publish_weights(4)
        assert last is not None
        yield from _read_elsewhere(check, host, last, num_bytes)
        yield _flipped(check, last)


def _plain_layout(shared: SharedWeights, host: Host) -> SGLangLayout:
    """An engine that fuses nothing: the bytes to digest are as many."""
    return SGLangLayout(
        parameters=tuple(spec.name for spec in shared.tensors),
        num_ranks=1,
        num_kv_heads=1,
        dtype=shared.tensors[0].dtype,
        device=host.device.type,
        quantization=Quantization.none,
    )


def _read_elsewhere(check: str, host: Host, shared: SharedWeights, num_bytes: int) -> Iterator[Row]:
    """Digests, and on a GPU the copy to the device, in a second process."""
    answer = _ask(_reader, shared, host.device.type)
    yield judged(
        check,
        "a second process: digests of all tensors",
        expected="equal",
        measured=answer["problem"] or f"equal, {answer['checked_s']:.2f} s",
        ok=not answer["problem"],
        reason="changed on the way",
    )
    for what, key in (("host -> device", "copied_s"), ("host -> device, registered, as SGLang's loader", "locked_s")):
        if host.is_cuda:
            seconds = answer[key]
            yield noted(check, f"a second process: {what}", measured=f"{seconds:.2f} s, {rate(num_bytes, seconds)}")
        else:
            yield not_run(check, f"a second process: {what}", reason=NEEDS_CUDA)


def _ask(target: Callable[..., None], *arguments: object) -> dict[str, Any]:
    """The answer of a second process. Raises RuntimeError if it dies, TimeoutError if it is late."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        if not ours.poll(READER_TIMEOUT_S):
            raise TimeoutError(f"the second process did not answer within {READER_TIMEOUT_S:g} s")
        answer: dict[str, Any] = ours.recv()
        return answer
    except EOFError as error:
        process.join(10)
        raise RuntimeError(f"the second process ended with {process.exitcode}") from error
    finally:
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()


def _reader(answers: Connection, shared: SharedWeights, device: str) -> None:
    """In the second process: check every digest, then copy every tensor to the device."""
    reader = WeightReader()
    answer: dict[str, Any] = {"problem": "", "checked_s": 0.0, "copied_s": 0.0, "locked_s": 0.0}
    with reader.opened(shared) as weights:
        started = time.perf_counter()
        try:
            check_weights(weights, held_version=0)
        except WeightSyncError as error:
            answer["problem"] = str(error)
        answer["checked_s"] = time.perf_counter() - started
        if device == "cuda":
            answer["copied_s"] = _seconds_to_device(weights)
            locked = MappedRegion(shared.address, registered=True)
            answer["locked_s"] = _seconds_to_device(replace(weights, data=locked.data))
    reader.release()
    reader.close()
    answers.send(answer)


def _seconds_to_device(weights: PackedWeights) -> float:
    """Seconds in which all tensors are copied into memory of the GPU that is there."""
    held = [torch.empty_like(tensor, device="cuda") for _, tensor in unpack(weights)]
    torch.cuda.synchronize()
    started = time.perf_counter()
    for place, (_, tensor) in zip(held, unpack(weights), strict=True):
        place.copy_(tensor)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _flipped(check: str, shared: SharedWeights) -> Row:
    """One bit of one tensor is changed where it lies; the check must name the tensor."""
    spec = max(shared.tensors, key=lambda spec: spec.num_bytes)
    reader, found = WeightReader(), ""
    with reader.opened(shared) as weights:
        weights.data[spec.offset + 1] ^= 4  # the reader's mapping is private
        try:
            check_weights(weights, held_version=0)
        except WeightSyncError as error:
            found = str(error)
    reader.release()
    reader.close()
    ok = spec.name in found
    return judged(
        check,
        "one flipped bit",
        expected="the tensor is named",
        measured=f"{spec.name} named" if ok else "not found",
        ok=ok,
        reason=found or "the damage went unseen",
    )


def digest_kernel(host: Host) -> Iterator[Row]:
    """Our numpy digest and our kernel against SGLang's own on the GPU: odd sizes, three types, stacked pieces."""
    what, expected = "digest of a GPU tensor: numpy and our kernel against SGLang's", "equal for all"
    if not host.is_cuda:
        yield not_run("8 digest", what, expected=expected, reason=NEEDS_CUDA)
        return
    from rollout.sglang.hash_kernel import tile_sum  # needs Triton

    kernel = _sglang_kernel()
    differing, cases = [], 0
    for dtype in (torch.bfloat16, torch.float32, torch.int8):
        for rows in (1, 3, 4097, 100_003):
            whole = torch.randint(-100, 100, (rows,), device=host.device).to(dtype)
            parts = whole.split(max(1, rows // 3))
            pieces = [np.asarray(part.cpu().view(torch.uint8).numpy()) for part in parts]
            ours = {tile_digest(pieces), finished(int(tile_sum(parts)))}
            theirs = f"{int(kernel.gpu_tensor_hash(whole)) & (2**64 - 1):016x}"
            cases += 1
            differing += [] if ours == {theirs} else [f"{dtype} [{rows}]: {sorted(ours)}, {theirs}"]
    yield judged(
        "8 digest",
        what,
        expected=expected,
        measured=f"{cases - len(differing)} of {cases} equal",
        ok=not differing,
        reason="; ".join(differing),
    )


def _sglang_kernel() -> ModuleType:
    """SGLang's file with `gpu_tensor_hash`; raises NotRunError if neither SGLang nor the file is there."""
    found = importlib.util.find_spec("sglang")
    installed = [] if found is None else [Path(root) for root in found.submodule_search_locations or []]
    roots = [Path("wheels"), *(root / "kernels" / "ops" / "memory" for root in installed)]
    for file in (root / HASH_FILE for root in roots):
        if file.is_file():
            spec = importlib.util.spec_from_file_location("gpu_tensor_hash", file)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise NotRunError(f"needs SGLang, or its file {HASH_FILE} in wheels/")


def cuda_ipc(host: Host) -> Iterator[Row]:
    """Weights in flat buckets on the GPU, opened by a second process through CUDA IPC and copied into its own."""
    what, expected = "weights through CUDA IPC", f">= {IPC_BYTES_PER_S / 1e12:g} TB/s"
    if not host.is_cuda:
        yield not_run("10", what, expected=expected, reason=NEEDS_CUDA)
        return
    total = QWEN_7B_BYTES
    number = -(-total // BUCKET_BYTES)
    generator = torch.Generator(host.device).manual_seed(0)
    buckets = [
        torch.randint(256, (BUCKET_BYTES,), dtype=torch.uint8, device=host.device, generator=generator)
        for _ in range(number)
    ]
    host.wait()
    answer = _ask(_ipc_reader, buckets)
    same = answer["sums"] == [_sum(bucket) for bucket in buckets]
    num_bytes = number * BUCKET_BYTES
    yield judged("10", f"{what}: checksums", expected="equal", measured="equal" if same else "other", ok=same)
    yield judged(
        "10",
        what,
        expected=expected,
        measured=f"{rate(num_bytes, answer['seconds'])} for {gib(num_bytes)}",
        ok=num_bytes / answer["seconds"] >= IPC_BYTES_PER_S,
        reason="not worth building",
    )


def _ipc_reader(answers: Connection, buckets: list[Tensor]) -> None:
    """In the second process: copy every bucket into memory of its own."""
    own = [torch.empty_like(bucket) for bucket in buckets]
    torch.cuda.synchronize()
    started = time.perf_counter()
    for mine, theirs in zip(own, buckets, strict=True):
        mine.copy_(theirs)
    torch.cuda.synchronize()
    answers.send({"seconds": time.perf_counter() - started, "sums": [_sum(bucket) for bucket in own]})


def _sum(bucket: Tensor) -> int:
    """A checksum [bytes] uint8 -> int, computed on the GPU in parts."""
    return sum(int((part.view(torch.int32).long()).sum()) for part in bucket.split(2**26))


PUBLISHED = {"tiny": TINY, "0.5B": QWEN_05B, "7B": QWEN_7B}
"""Sizes of check 8: the first on a CPU, the others on a GPU."""
