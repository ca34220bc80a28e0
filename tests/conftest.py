"""Fixtures and skips that hold for all tests. The guard against leftovers is in tests/leftovers.py."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import settings

# pytest puts tests/ on the path, where tests/algorithms and the like would pass for the packages of that name:
# a real package wins over a directory without __init__.py only if it is on the path too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# Nothing is fetched from the hub: a missing file is an error at once, not after retries.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A waiting OpenMP thread sleeps at once (read when torch is loaded): two processes run the tests on two cores, and the
# threads that one lets spin take the time of the other. Tests of the policy took four times as long.
os.environ.setdefault("GOMP_SPINCOUNT", "100")

from leftovers import leftovers, observe_leftovers

__all__ = ["leftovers", "observe_leftovers"]

# How long an example takes says something about the machine, not about the code.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")

DATA_VARIABLE = "PARITY_TEST_DATA"


@pytest.fixture(scope="session", autouse=True)
def one_thread_per_process() -> None:
    """Two processes run the tests on two cores. With two threads in each, small tensors wait for the threads of the
    other process: the enumerations took 18 times as long. Children of a test choose their threads themselves."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def path_of_its_own() -> Iterator[None]:
    """SGLang in a test's own process puts its torchvision on the path. A process that a later file spawns gets the path
    of this one, and with that torchvision transformers cannot be imported."""
    before = sys.path.copy()
    yield
    sys.path[:] = before


@pytest.fixture(scope="session")
def test_data_dir() -> Path:
    """Directory with the real data sets (gsm8k/, aime24/, ...); skips where PARITY_TEST_DATA is not set."""
    configured = os.environ.get(DATA_VARIABLE)
    if not configured:
        pytest.skip(f"{DATA_VARIABLE} is not set: it names the directory with gsm8k/, aime24/, ...")
    directory = Path(configured)
    assert directory.is_dir(), f"{DATA_VARIABLE}={configured} is not a directory"
    return directory


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With -m slow leave out the files without a slow test: loading them all takes ten seconds in each process."""
    if config.option.markexpr.startswith("slow") and collection_path.match("test_*.py"):
        return "mark.slow" not in collection_path.read_text("utf-8") or None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, and say why."""
    reasons = {"sglang": missing_sglang, "vllm": missing_vllm, "gpu": missing_gpu}
    for marker, missing in reasons.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = missing() if marked else ""
        for item in marked if reason else []:
            item.add_marker(pytest.mark.skip(reason=reason))


def missing_sglang() -> str:
    found = importlib.util.find_spec("sglang") is not None
    return "" if found else "SGLang is not installed (make test, without ENGINE=torch, installs it)"


def missing_vllm() -> str:
    found = importlib.util.find_spec("vllm") is not None
    return "" if found else "vLLM is not installed (make test ENGINE=vllm installs it)"


def missing_gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


@pytest.fixture(scope="session")
def base_model_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """PARITY_CACHE for the session: what a run keeps for the next ones is made once here, and leaves no trace.

    The hurried base model, and the rates of the hardware. A run keeps those only if nothing else goes on, never so
    beside other tests: every run would measure them for seconds. Those of one thread stand for any number.
    """
    from trainer.limits.ceilings import cache_path, device_name, measure
    from trainer.rundir.provenance import num_cores

    cache = tmp_path_factory.mktemp("cache")
    rates = asdict(measure("cpu", num_threads=1)) | {"was_busy": False}
    for count in range(1, num_cores() + 1):
        named = rates | {"device": device_name("cpu", count)}
        cache_path("cpu", count, cache_dir=cache).write_text(json.dumps(named), "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARITY_CACHE", str(cache))
        yield cache


@pytest.fixture
def no_cached_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is cached: a dry run then reads no prompts, of which an invented checkpoint knows nothing."""
    monkeypatch.setenv("PARITY_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def local_ray(base_model_cache: Path) -> Iterator[None]:
    """Ray for the runs of one file inside this process: starting it once saves most of the time of a short run.

    It ends with the file, because other tests of the process start a cluster of their own.
    """
    from trainer.cluster.ray_session import ray_session

    with ray_session(None):
        yield
