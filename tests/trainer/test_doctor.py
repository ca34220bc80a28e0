"""`parity doctor`: every check on this machine for real, and each remedy on a machine that lacks something."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import socket
from pathlib import Path

import pytest
from cli_process import parity

from trainer.cli import doctor
from trainer.cli.doctor import MISSING, NOTE, OK, Finding, Findings

KEY = "0123456789abcdef0123456789abcdef01234567"


def by_name(findings: Findings) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings.all}


def test_the_command_on_this_machine(tmp_path: Path) -> None:
    outcome = parity("doctor", cwd=tmp_path, env={"WANDB_API_KEY": KEY})
    assert outcome.code == 0, outcome.out
    names = [line.split()[1] for line in outcome.out.splitlines()]
    assert names == [
        *("python", "torch", "ray", "transformers", "hydra-core", "safetensors", "xxhash", "loopback", "/dev/shm"),
        *("sglang", "GPUs", "cores", "memory", "disk", "limits", "wandb", "engines"),
    ]
    assert "key in $WANDB_API_KEY" in outcome.out
    assert "copy " in outcome.out and "GFLOP/s: float32" in outcome.out
    assert KEY not in outcome.out + outcome.err
    assert "rollout=torch" in outcome.out.splitlines()[-1]


@pytest.mark.scenario(33)
def test_no_sglang_leaves_the_embedded_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "sglang" else real(name, *a))
    findings = doctor.examine()
    assert findings.engines == ("torch",)
    assert by_name(findings)["sglang"].status == MISSING
    assert 'pip install ".[sglang]"' in doctor.render(findings)


def test_an_old_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: object())
    monkeypatch.setattr(doctor, "version", lambda name: "0.5.9")
    finding = doctor._sglang(gpus=["H200"])
    assert finding.status == MISSING
    assert "0.5.9 is below 0.5.23" in finding.found
    monkeypatch.setattr(doctor, "version", lambda name: "0.5.23.post1")
    assert doctor._sglang(gpus=["H200"]).status == OK


def test_sglang_on_a_cpu_needs_its_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: object())
    monkeypatch.setattr(doctor, "version", lambda name: "0.6.0")
    monkeypatch.setattr(doctor, "entry_points", lambda group: importlib.metadata.EntryPoints())
    finding = doctor._sglang(gpus=[])
    assert finding.status == MISSING
    assert "parity_cpu is not registered" in finding.found
    assert doctor._sglang(gpus=["H200"]).status == OK


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
    ],
)
def test_where_the_wandb_key_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, netrc: str | None, expected: str | None
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
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


def test_scarce_resources_are_noted_with_a_remedy() -> None:
    assert doctor._amount("disk", 10, 100, floor=1000, remedy="Free some.") == (
        NOTE, "disk", "10 B free of 100 B", "Free some."
    )  # fmt: skip
    assert doctor._amount("disk", 1000, 2000, floor=1000, remedy="Free some.").remedy == ""


def test_releases_compare_as_numbers() -> None:
    assert doctor.release("0.5.23") == (0, 5, 23)
    assert doctor.release("0.10.0rc1") > doctor.release("0.9.9")
    assert doctor.release("0.5.23.post1") >= (0, 5, 23)
    assert doctor.release("unknown") == ()
