"""How a machine of a cluster finds the model that the driver has found, and the interface to the other machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from compose_cases import config_of, resolved

from rollout.processes.network import use_interface_towards
from trainer.cluster.model_places import hub_name, place_here

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hub_cache(directory: Path) -> Path:
    """A cache of the hub with one commit of one model -> the directory of that commit."""
    snapshot = directory / "models--some-org--some-model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("another commit")
    return snapshot


def test_a_directory_in_a_cache_of_the_hub_names_repository_and_commit(tmp_path: Path) -> None:
    assert hub_name(hub_cache(tmp_path)) == ("some-org/some-model", COMMIT)
    assert hub_name(Path("/models--a--b/other/x")) is hub_name(Path("/data/model")) is hub_name(Path("model")) is None


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    assert place_here(tmp_path) == tmp_path
    with pytest.raises(FileNotFoundError, match=r"there is no .*/absent"):
        place_here(tmp_path / "absent")


def test_another_cache_gives_the_same_commit(tmp_path: Path) -> None:
    """In a process of its own: the hub's library reads the place of its cache once."""
    here = hub_cache(tmp_path / "this machine")
    of_driver = Path(str(here).replace("this machine", "driver"))
    program = "import sys; from pathlib import Path; from trainer.cluster.model_places import place_here; "
    program += "print(place_here(Path(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(of_driver)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path / "this machine"), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == here


def test_the_interface_is_the_one_that_leads_to_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    use_interface_towards("127.0.0.1")
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "ib0")


def test_variables_of_the_workers_are_passed_on_and_those_of_parity_are_refused() -> None:
    assert config_of("+cluster.env.NCCL_IB_HCA=mlx5").cluster.env == {"NCCL_IB_HCA": "mlx5"}
    words = ["+cluster.env.RANK='3'", "+cluster.env.RAY_ADDRESS=x", "+cluster.env.a-b=x"]
    found = [str(problem) for problem in resolved(*words).problems]
    for name in ("RANK", "RAY_ADDRESS", "a-b"):
        assert [line for line in found if line.startswith(f"cluster.env.{name} is ")], found
