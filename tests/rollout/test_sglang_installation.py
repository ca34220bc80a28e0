"""What a GPU engine needs of packages, found by their metadata: each missing one and each wrong build is named."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.engine import EngineError, EngineNeeds, EngineSetup
from rollout.processes.gpu_host import Lack, torch_lacks
from rollout.sglang import installation
from rollout.sglang.config import SGLangConfig
from rollout.sglang.cpu.platform import EXACT_VARIABLE
from rollout.sglang.cuda_host import package_lacks
from rollout.sglang.engine import SGLangEngine
from rollout.sglang.installation import check_installation, server_args, server_environment

MODULES = ("sgl_kernel", "flashinfer", "torch_memory_saver")


def environment(monkeypatch: pytest.MonkeyPatch, *, torch: str, pin: str, modules: tuple[str, ...] = MODULES) -> None:
    """Let `torch` be the installed release of torch, `pin` what SGLang requires, and `modules` all that it finds."""
    real_spec, real_version = importlib.util.find_spec, importlib.metadata.version

    def find_spec(name: str, package: str | None = None) -> object:
        return (object() if name in modules else None) if name in MODULES else real_spec(name, package)

    versions = {"torch": torch, "sglang": "0.5.23"}
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or real_version(name))
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["torchao==0.9", pin, "torch_memory_saver>=0.0.9"])


def lacking(*, sleeps: bool) -> list[str]:
    return [lack.what for lack in (*torch_lacks(), *package_lacks(sleeps=sleeps))]


@pytest.mark.parametrize("torch", ["2.14.1", "2.14.1+cu130", "2.14.1+1a2b3c.nv26.08"])
def test_a_fitting_environment_has_no_problem(monkeypatch: pytest.MonkeyPatch, torch: str) -> None:
    environment(monkeypatch, torch=torch, pin="torch==2.14.1")
    assert lacking(sleeps=True) == []


@pytest.mark.parametrize("missing", MODULES)
@pytest.mark.parametrize("sleeps", [False, True])
def test_a_missing_module_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch, missing: str, sleeps: bool
) -> None:
    left = tuple(module for module in MODULES if module != missing)
    environment(monkeypatch, torch="2.14.1+cu130", pin="torch==2.14.1", modules=left)
    lacks = package_lacks(sleeps=sleeps)
    if missing == "torch_memory_saver" and not sleeps:
        assert lacks == []
        return
    [lack] = lacks
    assert re.search(rf"no {missing} \(package \S+\)", lack.what) and "make setup" in lack.remedy


@pytest.mark.parametrize("libc", [("glibc", "2.31"), ("glibc", "2.9"), ("", "")])
def test_a_c_library_for_which_there_are_no_wheels_is_named(
    monkeypatch: pytest.MonkeyPatch, libc: tuple[str, str]
) -> None:
    """Only beside kernels that are missing: those of somebody's own build are there."""
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    environment(monkeypatch, torch="2.14.1+cu130", pin="torch==2.14.1")
    assert lacking(sleeps=True) == []
    environment(monkeypatch, torch="2.14.1+cu130", pin="torch==2.14.1", modules=())
    [_, lack] = package_lacks(sleeps=True)
    assert "2.34" in lack.what and (libc[1] or "another") in lack.what and "Ubuntu 22.04" in lack.remedy
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.34"))
    assert len(lacking(sleeps=True)) == 1


@pytest.mark.parametrize(
    ("torch", "without_cuda"),
    [("2.14.1+cpu", True), ("2.14.1+rocm7.0", True), ("2.14.1+xpu", True), ("2.14.1+cu130", False), ("2.14.1", False)],
)
def test_builds_of_torch_without_cuda_are_told_by_their_label(
    monkeypatch: pytest.MonkeyPatch, torch: str, without_cuda: bool
) -> None:
    environment(monkeypatch, torch=torch, pin="torch==2.14.1")
    assert lacking(sleeps=False) == ([f"torch {torch} is a build without CUDA"] if without_cuda else [])


@pytest.mark.parametrize("pin", ["torch==2.14.1", "torch == 2.14.1", 'torch==2.14.1 ; sys_platform == "linux"'])
def test_another_torch_than_the_kernels_were_built_for_is_named(monkeypatch: pytest.MonkeyPatch, pin: str) -> None:
    environment(monkeypatch, torch="2.13.0+cu130", pin=pin)
    assert lacking(sleeps=False) == ["SGLang 0.5.23 is built for torch 2.14.1, and 2.13.0+cu130 is installed"]


def test_a_release_without_a_pin_takes_any_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, torch="2.15.0+cu130", pin="torch>=2.14")
    assert lacking(sleeps=False) == []


def test_an_engine_says_everything_that_its_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, torch="2.13.0+cpu", pin="torch==2.14.1", modules=())
    no_compiler = Lack("there is no compiler", "Install one.")
    monkeypatch.setattr(installation, "engine_lacks", lambda *, sleeps: [*package_lacks(sleeps=sleeps), no_compiler])
    with pytest.raises(EngineError) as raised:
        check_installation(device="cuda", sleeps=True)
    for words in (*MODULES, "built for torch 2.14.1", "there is no compiler. Install one."):
        assert words in str(raised.value)


def test_a_cpu_engine_needs_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, torch="2.13.0+cpu", pin="torch==2.14.1", modules=())
    assert check_installation(device="cpu") == "0.5.23"


def test_nothing_is_imported_for_the_answer() -> None:
    program = (
        "import sys; from rollout.sglang.cuda_host import engine_lacks; engine_lacks(sleeps=True); "
        "print([name for name in ('torch', 'sglang', 'ray') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_server_with_exact_arithmetic_gets_it_on_every_device(tmp_path: Path) -> None:
    """Whatever engine_args say of the rest; on a GPU its processes are told to register it."""
    config = SGLangConfig(exact=True, engine_args={"sampling_backend": "flashinfer", "max_total_tokens": 100})
    for device in ("cpu", "cuda"):
        arguments = server_args(config, tmp_path, device=device, random_seed=0, needs=EngineNeeds())
        assert (arguments["attention_backend"], arguments["sampling_backend"]) == ("parity_exact", "pytorch")
        assert arguments["disable_cuda_graph"] is True and arguments["max_total_tokens"] == 100
        environment = server_environment(config, device=device, num_threads=None, needs=EngineNeeds())
        assert (environment.get(EXACT_VARIABLE) == "1") is (device == "cuda")
    usual = server_environment(SGLangConfig(), device="cuda", num_threads=None, needs=EngineNeeds())
    assert EXACT_VARIABLE not in usual


@pytest.mark.parametrize(("requests", "width"), [(0, None), (256, None), (700, 700), (5000, 1024)])
def test_decode_graphs_of_a_gpu_are_as_wide_as_a_step(tmp_path: Path, requests: int, width: int | None) -> None:
    """Unless engine_args say how wide they are."""
    name = "cuda_graph_max_bs_decode"
    for device, config, expected in (
        ("cuda", SGLangConfig(), width),
        ("cuda", SGLangConfig(engine_args={name: 8}), 8),
        ("cpu", SGLangConfig(), None),
    ):
        setup = EngineSetup(
            config=config, index=0, seed=0, device=device, num_threads=1, log_dir=tmp_path, model_path=tmp_path,
            num_requests=requests,
        )  # fmt: skip
        engine = config.build(setup)
        assert isinstance(engine, SGLangEngine)
        arguments = server_args(config, tmp_path, device=device, random_seed=0, needs=engine._needs)
        assert arguments.get(name) == expected
