"""The Makefile: which recipe the demo trains, and what it refuses."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from test_style import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*words: str) -> subprocess.CompletedProcess[str]:
    """`make -n`: what would be run, also where make runs the tests."""
    outer = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MODEL", "ENGINE", "ARGS"}
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    return subprocess.run(["make", "-n", *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ((), "parity train arithmetic_grpo rollout=sglang"),
        (("MODEL=moe",), "parity train arithmetic_moe rollout=sglang"),
        (("ENGINE=vllm", "GPU="), "parity train arithmetic_grpo rollout=vllm"),
        (("MODEL=smollm2",), "parity train smollm2_grpo rollout=sglang"),
        (("MODEL=smollm2", "ENGINE=torch", "ARGS=run.seed=1"), "parity train smollm2_grpo rollout=torch run.seed=1"),
    ],
)
def test_the_demo_trains_the_recipe_of_its_model(words: tuple[str, ...], command: str) -> None:
    done = make("demo", *words)
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1].strip()
    assert line == f"exec .venv/bin/{command}"
    assert (ROOT / "recipes" / f"{command.split()[2]}.yaml").is_file()


@pytest.mark.parametrize("target", ["setup", "test", "demo", "lint"])
def test_a_host_with_gpus_gets_the_packages_for_them(target: str) -> None:
    """Whatever the target, or one would make .venv anew for the next."""
    with_gpus, without = (next(line for line in make(target, word).stdout.splitlines() if "install.sh" in line)
                          for word in ("GPU=/dev/nvidia0", "GPU="))  # fmt: skip
    assert "BASE=gpu requirements/install.sh" in with_gpus and "sglang-cpu" not in with_gpus
    assert "BASE" not in without and ("sglang-cpu" in without or target == "lint")


@pytest.mark.parametrize("word", ["MODEL=gpt", "ENGINE=trt"])
def test_another_model_or_engine_is_refused(word: str) -> None:
    done = make("demo", word)
    key, _, value = word.partition("=")
    assert done.returncode == 2 and f"{key} must be " in done.stderr and f"got '{value}'" in done.stderr


@pytest.mark.parametrize("engine", ["sglang", "vllm", "torch"])
@pytest.mark.parametrize("target", ["setup", "test", "test-slow", "demo", "bench"])
def test_an_engine_is_installed_and_tested_where_it_was_asked_for(target: str, engine: str) -> None:
    shown = make(target, f"ENGINE={engine}", "GPU=").stdout
    for name in ("sglang", "vllm"):
        assert (f" {name}-cpu" in shown) is (name == engine)
        assert (f"and not {name}" in shown) is (name != engine and target.startswith("test"))


@pytest.mark.parametrize("target", ["demo", "test", "test-slow"])
def test_what_runs_on_a_cpu_is_refused_beside_the_packages_of_vllm_for_gpus(target: str) -> None:
    done = make(target, "ENGINE=vllm", "GPU=/dev/nvidia0")
    assert done.returncode == 2 and "add GPU=" in done.stderr


def test_a_host_with_gpus_gets_the_packages_of_its_engine() -> None:
    assert "BASE=vllm-gpu requirements/install.sh" in make("setup", "ENGINE=vllm", "GPU=/dev/nvidia0").stdout
    assert "BASE=gpu requirements/install.sh" in make("setup", "ENGINE=torch", "GPU=/dev/nvidia0").stdout


@pytest.mark.parametrize(("words", "full"), [((), False), (("FULL=1",), True)])
def test_the_gpu_check_sees_the_devices_of_the_host(words: tuple[str, ...], full: bool) -> None:
    done = make("gpu-check", *words, "ARGS=--checks 2")
    assert done.returncode == 0, done.stderr
    assert "requirements/install.sh" not in done.stdout  # a bare host has no network
    [command] = [line.split(" -m ")[1] for line in done.stdout.splitlines() if " -m " in line]
    assert command.split() == ["gpu_check", *(["--full"] if full else []), "--checks", "2"]


def test_the_gpu_check_keeps_the_devices_that_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "unset CUDA_VISIBLE_DEVICES" in make("gpu-check").stdout
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert "unset CUDA_VISIBLE_DEVICES" not in make("gpu-check").stdout


@pytest.mark.parametrize(("engine", "base"), [("sglang", "gpu"), ("vllm", "vllm-gpu")])
def test_the_job_with_the_packages_for_gpus_has_an_environment_of_its_own(engine: str, base: str) -> None:
    shown = make("test-gpu-packages", f"ENGINE={engine}", "GPU=", "ARGS=--steps plans").stdout
    assert f"BASE={base} VENV=.venv-{base} requirements/install.sh dev" in shown
    assert shown.rstrip().endswith(f".venv-{base}/bin/python -m gpu_check.packages --steps plans")
    assert "gpu_check.packages" not in make("test").stdout + make("test-slow").stdout
    assert f".venv-{base}" in make("clean").stdout
