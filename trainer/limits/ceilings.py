"""Ceilings of the hardware: bytes per second of a large copy and FLOPs per second of a matrix product.

Measured once per hardware, torch version and thread count (`measure`, one to two seconds), then read from the cache.
The floors of `trainer/limits/floors.py` use these numbers, so the best of many repeats counts: a ceiling that is too
low would make a phase look faster than possible.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from rollout.config import DType
from rollout.model.onednn_linear import linear
from rollout.weights.packed_weights import DTYPES
from trainer.rundir.cache import default_cache_dir
from trainer.rundir.provenance import cpu_name, num_cores
from trainer.rundir.run_dir import write_whole

logger = logging.getLogger(__name__)

COPY_BYTES = 2**28
"""Size of the copied buffer, bytes: larger than every cache of a CPU."""
COPY_BYTES_CUDA = 2**30
COPY_S = 0.3
"""Seconds of repeated copies."""
PRODUCT_S = 0.15
"""Seconds of repeated products of the largest size, per type."""
LONG_PRODUCT_S = 0.02
"""Seconds of one product until which its size is doubled."""
PRODUCT_SIZES = (256, 512, 1024, 2048, 4096, 8192)
"""Rows and columns of the products: a type that a CPU computes slowly stays at the first, to keep the probe short."""
BUSY_PERCENT = 25.0
"""Processor time of other programs, in percent of the machine, above which a measurement is not kept."""
BUSY_LOOK_S = 0.2
SCHEMA = 2
"""Version of the cached file; raised when the method of measuring changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """The limits of one device."""

    device: str
    """Name of the measured device for people: "AMD EPYC, 1 thread"."""
    copy_bytes_per_s: float
    """Bytes read plus bytes written of a large copy, per second."""
    float32_flops: float
    """FLOPs per second of a product of square matrices, where a multiplication and an addition count 2."""
    bfloat16_flops: float
    float16_flops: float
    was_busy: bool = False
    """True if other programs ran during the measurement: then the rates are too low, and are not kept."""

    def flops(self, dtype: DType) -> float:
        """FLOPs per second in `dtype`."""
        match dtype:
            case DType.float32:
                return self.float32_flops
            case DType.bfloat16:
                return self.bfloat16_flops
            case DType.float16:
                return self.float16_flops

    def __str__(self) -> str:
        return (
            f"{self.device}: copy {self.copy_bytes_per_s / 1e9:,.1f} GB/s; products in GFLOP/s: float32 "
            f"{self.float32_flops / 1e9:,.0f}, bfloat16 {self.bfloat16_flops / 1e9:,.0f}, "
            f"float16 {self.float16_flops / 1e9:,.0f}"
            f"{' (other programs were running: too low)' if self.was_busy else ''}"
        )


def device_name(device: str, num_threads: int) -> str:
    """Name of the device for people; `device` is "cpu" or "cuda"."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{cpu_name() or platform.machine()}, {num_threads} {'thread' if num_threads == 1 else 'threads'}"


def cache_path(device: str, num_threads: int, *, cache_dir: Path | None = None) -> Path:
    """Path of the cached ceilings of this hardware, torch version and thread count."""
    facts: dict[str, object] = {
        "schema": SCHEMA,
        "device": device_name(device, num_threads),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    if device == "cuda":
        facts["memory"] = torch.cuda.get_device_properties().total_memory
    else:
        facts["cores"] = num_cores()
        facts["memory"] = psutil.virtual_memory().total
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return (cache_dir or default_cache_dir()) / f"ceilings-{key}.json"


def find_ceilings(device: str, *, num_threads: int, cache_dir: Path | None = None) -> Ceilings:
    """The ceilings of `device` ("cpu" or "cuda"), measured now if no valid copy is cached.

    A damaged copy is measured again. A measurement on a busy machine is not kept, so the next run measures again. The
    same holds, after a warning, if the cache cannot be written.
    """
    path = cache_path(device, num_threads, cache_dir=cache_dir)
    kept = _read(path)
    if kept is not None:
        return kept
    ceilings = measure(device, num_threads=num_threads)
    if ceilings.was_busy:
        return ceilings
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(ceilings), indent=2) + "\n")
    except OSError as error:
        logger.warning(
            "the measured ceilings could not be kept in %s and are measured again next time: %s", path, error
        )
    return ceilings


def measure(device: str, *, num_threads: int) -> Ceilings:
    """Copy and multiply on `device` for one to two seconds; `num_threads` applies to the probe, on a CPU."""
    before = torch.get_num_threads()
    was_busy = device == "cpu" and psutil.cpu_percent(interval=BUSY_LOOK_S) > BUSY_PERCENT
    try:
        if device == "cpu":
            torch.set_num_threads(num_threads)
        with torch.inference_mode():
            rates = {dtype: _product_rate(torch.device(device), DTYPES[dtype.name]) for dtype in DType}
            copy = _copy_rate(torch.device(device))
    finally:
        torch.set_num_threads(before)
        if device == "cuda":
            torch.cuda.empty_cache()
    return Ceilings(
        device=device_name(device, num_threads),
        copy_bytes_per_s=copy,
        float32_flops=rates[DType.float32],
        bfloat16_flops=rates[DType.bfloat16],
        float16_flops=rates[DType.float16],
        was_busy=was_busy,
    )


def _copy_rate(device: torch.device) -> float:
    num_bytes = COPY_BYTES_CUDA if device.type == "cuda" else COPY_BYTES
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _best(lambda: target.copy_(source), device, budget_s=COPY_S)


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """The best rate over all measured sizes: a small product that stays in the cache counts too."""
    rate = 0.0
    for size in PRODUCT_SIZES:
        left, right = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))

        def multiply(left: torch.Tensor = left, right: torch.Tensor = right) -> None:
            linear(left, right)

        seconds = _best(multiply, device, budget_s=0.0)
        is_long = seconds >= LONG_PRODUCT_S or size == PRODUCT_SIZES[-1]
        if is_long:
            seconds = min(seconds, _best(multiply, device, budget_s=PRODUCT_S))
        rate = max(rate, 2 * size**3 / seconds)
        if is_long:
            break
    return rate


def _best(work: Callable[[], object], device: torch.device, *, budget_s: float) -> float:
    """Seconds of the fastest of at least two repeats, for about `budget_s`; a first repeat is not counted."""
    best = float("inf")
    deadline = time.perf_counter() + budget_s
    for repeat in range(1_000_000):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ended = time.perf_counter()
        if repeat:
            best = min(best, ended - started)
        if repeat >= 2 and ended >= deadline:
            break
    return best


def _read(path: Path) -> Ceilings | None:
    """The cached ceilings; None if there are none, or with a warning if they are damaged."""
    if not path.exists():
        return None
    try:
        kept = Ceilings(**json.loads(path.read_text(encoding="utf-8")))
        rates = (kept.copy_bytes_per_s, kept.float32_flops, kept.bfloat16_flops, kept.float16_flops)
        if not all(isinstance(rate, float) and 0 < rate < float("inf") for rate in rates):
            raise ValueError(f"a rate is not positive: {rates}")
        return kept
    except (OSError, ValueError, TypeError) as error:
        logger.warning("the ceilings in %s are damaged (%s) and are measured again", path, error)
        return None
