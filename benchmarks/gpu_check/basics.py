"""Check 0: versions and imports. Check 1: ceilings of the hardware, and how fast bytes move between host and device."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import torch
import transformers

from gpu_check.attention_fit import description, missing_arguments
from gpu_check.host import NEEDS_CUDA, Host, rate
from gpu_check.rows import Row, judged, not_run, noted
from rollout.sglang.fusing import tile_digest
from rollout.weights.packed_weights import tensor_digest
from rollout.weights.shared_weights import WeightRegion
from trainer.limits.ceilings import measure
from trainer.rundir.provenance import tool_output

PYTHON_FLOOR = (3, 11)
TORCH_FLOOR = (2, 10)
TRANSFORMERS_FLOOR = (5, 3)
CEILING_TOLERANCE = 0.10
"""Share by which `trainer/limits/ceilings.py` may differ from a timing of one's own."""
REGISTERED_GAIN = 5.0
"""Times the rate of pageable memory above which registering the shared memory is worth it."""
NEEDLESS = ("ray", "sglang", "hydra", "omegaconf", "orjson", "datasets", "wandb")
"""Packages that a rank and the embedded engine must not need."""
IMPORTS = "import trainer.policy.worker, rollout.torch.engine, sys; print([m for m in {names!r} if m in sys.modules])"
IMPORT_TIMEOUT_S = 120


def versions(host: Host) -> Iterator[Row]:
    """Versions of what is installed, the device, and what a rank imports."""
    yield judged(
        "0",
        "Python, torch, transformers",
        expected="Python >= 3.11, torch >= 2.10, transformers >= 5.3",
        measured=f"{platform.python_version()}, {torch.__version__} (CUDA {torch.version.cuda}), "
        f"{transformers.__version__}",
        ok=sys.version_info >= PYTHON_FLOOR
        and _numbers(torch.__version__) >= TORCH_FLOOR
        and _numbers(transformers.__version__) >= TRANSFORMERS_FLOOR,
        reason="an older release",
    )
    yield noted(
        "0",
        "attention of the trainer",
        expected="as in a run",
        measured=description(),
        reason="its time and memory are not quite those of a run" if missing_arguments() else "",
    )
    code = IMPORTS.format(names=NEEDLESS)
    done = subprocess.run(  # noqa: S603 - our own interpreter and text
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False
    )
    yield judged(
        "0",
        "a rank and the embedded engine import none of " + ", ".join(NEEDLESS),
        expected="[]",
        measured=done.stdout.strip() or f"exit status {done.returncode}",
        ok=done.returncode == 0 and done.stdout.strip().endswith("[]"),
        reason=done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "imported needlessly",
    )
    if not host.is_cuda:
        yield not_run("0", "GPU and driver", reason=NEEDS_CUDA)
        return
    shown = tool_output(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    properties = torch.cuda.get_device_properties(host.device)
    yield judged(
        "0",
        "GPU and driver",
        expected="nvidia-smi and torch name a GPU of compute capability 8.0 or more",
        measured=f"{(shown or 'nvidia-smi failed').strip()}; {properties.name}, {properties.major}.{properties.minor}",
        ok=shown is not None and properties.major >= 8,
        reason="no driver, or an older GPU",
    )


def ceilings(host: Host) -> Iterator[Row]:
    """The project's ceilings against a timing of our own; copies between host and device; digests."""
    found = measure(host.device.type, num_threads=host.threads)
    size = host.pick(8192, 512)
    left, right = (torch.randn(size, size, device=host.device).bfloat16() for _ in range(2))
    own = 2 * size**3 / host.seconds(lambda: left @ right, repeats=10)
    texts = (f"{found.bfloat16_flops / 1e12:.3g}", f"{own / 1e12:.3g}")
    if host.is_cuda:
        # A ceiling may lie above: it is the best of several sizes.
        ok = own <= found.bfloat16_flops * (1 + CEILING_TOLERANCE) and own >= found.bfloat16_flops * 0.7
        yield judged(
            "1",
            "bfloat16 product, TFLOP/s: ceiling, own timing",
            expected="own timing within 70 % and 110 % of the ceiling",
            measured=", ".join(texts),
            ok=ok,
            reason="the ceiling or the timing is wrong",
        )
    else:
        yield noted("1", "bfloat16 product, TFLOP/s: ceiling, own timing", measured=", ".join(texts))
    yield noted("1", "copy on the device, read + written", measured=f"{found.copy_bytes_per_s / 1e9:.1f} GB/s")
    num_bytes = host.pick(2**32, 2**24)
    region, first_touch_s = host.once(lambda: _touched(num_bytes))
    yield noted("1", "first touch of shared memory", measured=rate(num_bytes, first_touch_s))
    yield from _digests(host, region)
    yield from _copies(host, region)
    region.close()


def _touched(num_bytes: int) -> WeightRegion:
    region = WeightRegion(num_bytes)
    region.data.fill(1)
    return region


def _digests(host: Host, region: WeightRegion) -> Iterator[Row]:
    data = region.data[: host.pick(2**30, 2**22)]
    _, mixed_s = host.once(lambda: tile_digest([data]))
    yield noted("1", "SGLang's digest in numpy, all cores", measured=rate(data.nbytes, mixed_s))
    tensor = torch.from_numpy(data)
    seconds = host.seconds(lambda: tensor_digest(tensor), repeats=3)
    yield noted("1", "XXH3, one thread", measured=rate(data.nbytes, seconds))


def _copies(host: Host, region: WeightRegion) -> Iterator[Row]:
    """Host <-> device from pageable, pinned, shared and registered memory."""
    if not host.is_cuda:
        for what in ("pageable", "pinned", "shared", "shared, registered (cudaHostRegister)"):
            yield not_run("1", f"host <-> device, {what} memory", reason=NEEDS_CUDA)
        return
    size = region.data.nbytes
    on_device = torch.empty(size, dtype=torch.uint8, device=host.device)
    shared = torch.from_numpy(region.data)
    pageable = torch.from_numpy(np.ones(size, dtype=np.uint8))
    pinned = torch.ones(size, dtype=torch.uint8, pin_memory=True)
    rates: dict[str, tuple[float, float]] = {}

    def time_both(name: str, on_host: torch.Tensor) -> Row:
        out = host.seconds(lambda: on_host.copy_(on_device), repeats=3)
        back = host.seconds(lambda: on_device.copy_(on_host), repeats=3)
        rates[name] = (size / out, size / back)
        return noted("1", f"host <-> device, {name} memory", measured=f"{rate(size, out)}, back {rate(size, back)}")

    yield time_both("pageable", pageable)
    yield time_both("pinned", pinned)
    yield time_both("shared", shared)
    runtime = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(shared.data_ptr(), size, 0))
    name = "shared, registered (cudaHostRegister)"
    if status:
        yield judged("1", name, expected="status 0", measured=f"status {status}", ok=False, reason="CUDA refused")
        return
    yield time_both(name, shared)
    runtime.cudaHostUnregister(shared.data_ptr())
    gains = [fast / slow for fast, slow in zip(rates[name], rates["pageable"], strict=True)]
    yield judged(
        "1",
        "registered against pageable memory",
        expected=f">= {REGISTERED_GAIN:g} times in both directions",
        measured=", ".join(f"{gain:.1f} times" for gain in gains),
        ok=min(gains) >= REGISTERED_GAIN,
        reason="registering gains less than was estimated",
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])
