"""Another user of the machine, or another process, tries to get at a run that is under way."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import ray

from trainer.cluster.placement import TOKEN_VARIABLE, ray_session

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
