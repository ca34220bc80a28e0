"""Another user of the machine, or another process, tries to get at a run that is under way."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster as Machines

from trainer.cluster.ray_session import TOKEN_VARIABLE, ray_session
from trainer.rundir import run_dir
from trainer.rundir.run_dir import lock_directory, release_directory, write_whole

NOBODY = 65534
"""The user of the system who owns nothing."""

STRANGER = """
import sys
import ray
try:
    ray.init(address=sys.argv[1], logging_level="ERROR")
except Exception as error:
    sys.exit(f"refused: {error}")
"""


def private_ancestor(path: Path) -> Path:
    """The nearest directory above `path`, or `path`, that only its owner may enter."""
    found = next((each for each in (path, *path.parents) if each.is_dir() and each.stat().st_mode & 0o077 == 0), None)
    assert found is not None, f"any user may read {path}"
    return found


def assert_closed_to_others(path: Path) -> None:
    """Only this user can reach `path`; shown with a process of another user where this one may start it."""
    assert private_ancestor(path).stat().st_uid == os.getuid()
    if os.getuid() == 0:
        looking = subprocess.run(["ls", str(path)], user=NOBODY, group=NOBODY, capture_output=True, text=True)
        assert looking.returncode != 0 and "Permission denied" in looking.stderr


@pytest.mark.slow
def test_ray_of_a_run_lets_nobody_in_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token that all runs of a user share does not open a run, and Ray's files are closed to other users."""
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        Path(parent).chmod(0o755)
        monkeypatch.setenv("RAY_TMPDIR", parent)
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        home = Path(parent) / "home"
        (home / ".ray").mkdir(parents=True)
        monkeypatch.setenv("HOME", str(home))
        with ray_session(None):
            session = Path(ray._private.worker._global_node.get_session_dir_path())  # type: ignore[attr-defined]
            assert session.is_relative_to(parent) and private_ancestor(session) != Path(parent)
            assert_closed_to_others(session / "sockets" / "raylet")
            assert TOKEN_VARIABLE not in os.environ and os.environ["RAY_AUTH_MODE"] == "disabled"
            assert list((home / ".ray").iterdir()) == []
            # No autoscaler, and nobody who reads the logs.
            words = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
            assert not [each for each in words if parent in each and "monitor.py" in each]
            # No worker that no run can use.
            assert [each.count("--num_prestart_python_workers=0") for each in words if "raylet/raylet" in each] == [1]
            address = ray.get_runtime_context().gcs_address
            (home / ".ray" / "auth_token").write_text("f" * 64)
            stranger = subprocess.run(
                [sys.executable, "-c", STRANGER, address],
                env={**os.environ, "RAY_AUTH_MODE": "token"},
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert stranger.returncode == 1 and "InvalidAuthToken" in stranger.stderr
        assert [path.name for path in Path(parent).iterdir()] == ["home"]


@pytest.mark.slow
def test_ray_of_a_run_has_its_files_below_a_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        monkeypatch.setenv("HOME", home)
        monkeypatch.setenv("RAY_TMPDIR", "~/r")
        with ray_session(None):
            session = Path(ray._private.worker._global_node.get_session_dir_path())  # type: ignore[attr-defined]
            assert session.is_relative_to(Path(home) / "r")
        assert [*(Path(home) / "r").glob("parity-*")] == [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_a_process_whose_own_ray_ended_joins_a_cluster_without_a_token() -> None:
    """Ray's part in this process must not ask the nodes of the second cluster for the token of the first."""

    class Seat:
        def taken(self) -> bool:
            return True

    with ray_session(None):
        pass
    machines = Machines(initialize_head=True, head_node_args={"include_dashboard": False, "num_cpus": 1})
    try:
        with ray_session(machines.address):
            seat: Any = ray.remote(Seat).options(num_cpus=1).remote()  # type: ignore[attr-defined]
            assert ray.get(seat.taken.remote(), timeout=120)
    finally:
        machines.shutdown()


LATE = """
import fcntl, sys
from pathlib import Path
from trainer.rundir import run_dir
real = fcntl.flock
def late(file, operation):
    print("opened", flush=True)
    sys.stdin.readline()
    real(file, operation)
fcntl.flock = late
try:
    run_dir.lock_directory(Path(sys.argv[1]), key="run.dir")
except run_dir.RunDirectoryError as refused:
    print(refused, flush=True)
else:
    print("locked", flush=True)
"""


@pytest.mark.scenario(35)
def test_who_opens_the_lock_of_a_run_that_ends_does_not_share_with_the_next_run(tmp_path: Path) -> None:
    """One process has opened the lock when its holder removes it, and a third one has the directory by then."""
    directory = tmp_path / "run"
    first = lock_directory(directory, key="run.dir")
    other = subprocess.Popen(
        [sys.executable, "-c", LATE, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    with other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "opened\n"
        release_directory(first, directory)
        second = lock_directory(directory, key="run.dir")
        other.stdin.write("go\ngo\n")
        assert other.stdout.readline() == "opened\n"
        assert f"is in use by process {os.getpid()}" in other.stdout.readline()
    release_directory(second, directory)
    release_directory(lock_directory(directory, key="run.dir"), directory)


def test_other_users_cannot_read_a_run_unless_its_directory_was_made_for_them(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    for directory, mode in ((tmp_path / "runs" / "new", 0o700), (shared, 0o755)):
        lock = lock_directory(directory, key="run.dir")
        (directory / "samples.jsonl").write_text("a response")
        assert directory.stat().st_mode & 0o777 == mode
        release_directory(lock, directory)
    assert_closed_to_others(tmp_path / "runs" / "new" / "samples.jsonl")


def test_a_page_in_a_directory_of_all_users_follows_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a link under a name that others can guess, nor one under the name that is really used."""
    victim = tmp_path / "victim"
    victim.write_text("whole")
    for name in ("", f"{os.getpid()}."):
        (tmp_path / f".page.{name}unfinished").symlink_to(victim)
    write_whole(tmp_path / "page.html", "<p>")
    assert (tmp_path / "page.html").read_text() == "<p>" and not (tmp_path / "page.html").is_symlink()
    monkeypatch.setattr(run_dir.secrets, "token_hex", lambda length: "guessed")
    link = tmp_path / ".page.guessed.unfinished"
    link.symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "page.html", "<i>")
    assert victim.read_text() == "whole"
