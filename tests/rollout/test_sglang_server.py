"""The owner of the server's processes, and the CPU platform, without waiting for a server to be ready."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from algorithms.config import ConfigError
from rollout.engine import EngineError
from rollout.processes.scratch import PREFIX, SHARED_MEMORY, Scratch, sweep
from rollout.sglang.config import OWNED_SGLANG_ARGS, REFUSED_SGLANG_ARGS, SGLangConfig
from rollout.sglang.cpu.platform import PLATFORM_CLASS, activate
from rollout.sglang.cpu.torchvision import make_torchvision_importable
from rollout.sglang.engine import SGLangEngine
from rollout.sglang.server import PORTS, SGLangServer, hold_port
from rollout.types import GenerateRequest, SamplingParams


def make_server(log_dir: Path, *, environment: dict[str, str]) -> SGLangServer:
    return SGLangServer(index=3, log_dir=log_dir, environment=environment, server_args={"model_path": "no-such-model"})


def make_engine(log_dir: Path, **engine_args: object) -> SGLangEngine:
    config = SGLangConfig(engine_args=dict(engine_args))
    return SGLangEngine(config, index=2, seed=0, device="cpu", log_dir=log_dir, num_threads=1)


def descendants() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_a_server_that_dies_at_once_is_reported_with_exit_code_and_log(tmp_path: Path) -> None:
    server = make_server(tmp_path, environment={"PYTHONHASHSEED": "not-a-number"})
    before = descendants()
    begin = time.monotonic()
    with pytest.raises(EngineError) as caught:
        server.start(timeout_s=120)
    text = str(caught.value)
    assert time.monotonic() - begin < 60
    assert text.startswith("engine 3 (sglang, policy version 0) start: the server ended before it was ready")
    assert "The server ended with exit code 1" in text
    assert f"last 20 lines of {tmp_path / 'engine-3.log'}:\n" in text
    assert "PYTHONHASHSEED must be" in text
    assert descendants() == before
    assert (tmp_path / "engine-3.log").stat().st_mode & 0o777 == 0o600
    server.stop()
    # A second server appends to the log, and quotes only its own lines.
    with pytest.raises(EngineError) as caught:
        make_server(tmp_path, environment={"PYTHONHASHSEED": "-2"}).start(timeout_s=120)
    assert str(caught.value).count("PYTHONHASHSEED must be") == 1
    assert (tmp_path / "engine-3.log").read_text(encoding="utf-8").count("PYTHONHASHSEED must be") == 2


def test_a_server_that_is_killed_while_it_starts_is_reported_with_the_signal(tmp_path: Path) -> None:
    server = make_server(tmp_path, environment={})
    before = descendants()

    def kill() -> None:
        while server._process is None:
            time.sleep(0.01)
        server._process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    begin = time.monotonic()
    with pytest.raises(EngineError, match=r"start: .* The server ended with exit code -9 \(SIGKILL\)"):
        server.start(timeout_s=120)
    assert time.monotonic() - begin < 60
    killer.join()
    assert descendants() == before
    server.stop()


@pytest.mark.sglang
def test_a_server_that_is_not_ready_in_time_is_ended(tmp_path: Path) -> None:
    server = make_server(tmp_path, environment={})
    before = descendants()
    begin = time.monotonic()
    with pytest.raises(
        EngineError, match=r"not ready within rollout\.start_timeout_s=1\.0; its last answer: .*Refused"
    ):
        server.start(timeout_s=1.0)
    assert time.monotonic() - begin < 60
    assert descendants() == before


def test_log_tail_hides_keys_and_noise_and_keeps_the_last_twenty_lines(tmp_path: Path) -> None:
    server = make_server(tmp_path, environment={})
    lines = [f"line {number}" for number in range(30)]
    lines += ["", 'leaked function "set_loc"', "nanobind: leaked 3 types!"]
    lines.append(f"the key is {server._api_key} or {server._admin_api_key}")
    (tmp_path / "engine-3.log").write_text("\n".join(lines), encoding="utf-8")
    text = server.error("generate", "it broke", policy_version=7)
    assert text.startswith("engine 3 (sglang, policy version 7) generate: it broke\nlast 20 lines of ")
    tail = text.splitlines()[2:]
    assert tail == [*(f"line {number}" for number in range(11, 30)), "the key is <redacted> or <redacted>"]


ORPHAN_SCRIPT = """
import os, sys, threading, time
from pathlib import Path
from rollout.sglang.server import SGLangServer
server = SGLangServer(index=0, log_dir=Path(sys.argv[1]), environment={}, server_args={"model_path": "x"})
threading.Thread(target=server.start, kwargs={"timeout_s": 60}, daemon=True).start()
while server._process is None:
    time.sleep(0.01)
sys.stdout.write(f"{server._process.pid}\\n")
sys.stdout.flush()
time.sleep(60)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs Linux")
def test_a_server_dies_with_its_parent(tmp_path: Path) -> None:
    """Killed before or after the server asked the kernel for this: in both cases nothing stays."""
    for delay_s in (0.0, 4.0):
        owner = subprocess.Popen(
            [sys.executable, "-c", ORPHAN_SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert owner.stdout is not None
        launched = psutil.Process(int(owner.stdout.readline()))
        time.sleep(delay_s)
        owner.send_signal(signal.SIGKILL)
        owner.wait(timeout=10)
        owner.stdout.close()
        deadline = time.monotonic() + 30
        while launched.is_running() and launched.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not launched.is_running() or launched.status() == psutil.STATUS_ZOMBIE


SCRATCH_SCRIPT = """
import sys, time
from pathlib import Path
from rollout.processes.scratch import SEGMENTS, Scratch
scratch = Scratch()
(scratch.path / SEGMENTS).write_text(sys.argv[1])
sys.stdout.write(f"{scratch.path}\\n")
sys.stdout.flush()
time.sleep(60)
"""


def test_what_a_killed_owner_left_is_swept_and_what_a_living_one_uses_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    segment = SHARED_MEMORY / f"sglang_loads_{tmp_path.name}"
    foreign = SHARED_MEMORY / f"foreign_{tmp_path.name}"
    script = [sys.executable, "-c", SCRATCH_SCRIPT, f"{segment.name}\n{foreign.name}\n../etc/passwd\n"]
    owner = subprocess.Popen(script, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        owner.stdout.close()
        assert left.parent == tmp_path and left.stat().st_mode & 0o777 == 0o700
        segment.touch()
        foreign.touch()
        sweep(PREFIX, parent=tmp_path)
        assert left.is_dir() and segment.exists()
        owner.kill()
        owner.wait(timeout=10)
        mine = Scratch()
        assert not left.exists() and not segment.exists() and foreign.exists()
        mine.remove()
        mine.remove()
        assert list(tmp_path.iterdir()) == []
    finally:
        owner.kill()
        segment.unlink(missing_ok=True)
        foreign.unlink(missing_ok=True)


def test_ports_lie_below_those_of_outgoing_connections() -> None:
    with ExitStack() as held:
        ports = {held.enter_context(hold_port()).getsockname()[1] for _ in range(20)}
    assert ports <= set(PORTS) and len(ports) == 20
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()[0])
    assert max(ports) < first_ephemeral


@pytest.mark.scenario(33)
def test_nobody_takes_the_port_between_its_choice_and_the_start_of_the_server(tmp_path: Path) -> None:
    server = make_server(tmp_path, environment={})
    port = urlsplit(server.address).port
    assert port is not None
    script = f"import socket; socket.socket().bind(('127.0.0.1', {port}))"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "Address already in use" in other.stderr
    # The server itself can listen there, as uvicorn does, and only once.
    with socket.create_server(("127.0.0.1", port)), pytest.raises(OSError, match="Address already in use"):
        socket.create_server(("127.0.0.1", port))
    server.stop()
    with socket.socket() as free:
        free.bind(("127.0.0.1", port))


def test_engine_args_that_break_the_weight_sync_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine_args\.dp_size is not supported: .* could not be verified, got 2"):
        make_engine(tmp_path, dp_size=2)
    with pytest.raises(ConfigError, match=r"engine_args\.tp_size must be an integer >= 1, got 0"):
        make_engine(tmp_path, tp_size=0)
    with pytest.raises(ConfigError, match=r"engine_args\.weight_version is set by Parity, got '9'"):
        make_engine(tmp_path, weight_version="9")
    for name, value in (("kv_events_config", '{"publisher": "zmq"}'), ("disaggregation_mode", "prefill")):
        with pytest.raises(ConfigError, match=rf"engine_args\.{name} is refused: the server would listen at another"):
            make_engine(tmp_path, **{name: value})
    with pytest.raises(
        ConfigError, match=r"engine_args\.enable_metrics is refused: /metrics would answer without a key"
    ):
        make_engine(tmp_path, enable_metrics=True)
    with pytest.raises(EngineError, match="device must be cpu or cuda, got 'tpu'"):
        SGLangEngine(SGLangConfig(), index=0, seed=0, device="tpu", log_dir=tmp_path, num_threads=None)


def test_an_engine_that_does_not_run_says_so(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=1, seed=0)
    request = GenerateRequest(prompt_id=0, sample_index=0, prompt_token_ids=[1], sampling=sampling)
    with pytest.raises(EngineError, match=r"engine 2 \(sglang, policy version 0\) generate: .*call start\(\) first"):
        engine.generate([request])
    with pytest.raises(EngineError, match="load_weights: the engine is not running"):
        engine.load_weights([])
    engine.stop()
    engine.stop()


def test_a_directory_without_a_model_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    before = descendants()
    with pytest.raises(EngineError, match=re.escape(f"{tmp_path} is not a model directory: it has no config.json")):
        make_engine(tmp_path).start(tmp_path)
    assert descendants() == before


def test_the_platform_is_chosen_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "parity_cpu")
    assert activate() == (None if torch.cuda.is_available() else PLATFORM_CLASS)


def test_the_entry_point_is_cheap_and_makes_torchvision_importable() -> None:
    """A fresh interpreter, because an import of torchvision cannot be tried twice."""
    script = (
        "import sys; import rollout.sglang.cpu.platform as platform;"
        "assert not {'torch', 'sglang', 'torchvision'} & set(sys.modules), 'heavy import';"
        "platform.make_torchvision_importable();"
        "assert not platform.make_torchvision_importable(), 'declared twice';"
        "import importlib.util;"
        "importlib.util.find_spec('torchvision') and __import__('torchvision')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("build", ["None", "'13.0'"])
def test_torchvision_is_found_in_its_directory_under_every_build_of_torch(build: str, tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("")
    script = (
        "import sys; from pathlib import Path; import torch; import rollout.sglang.cpu.torchvision as module;"
        f"torch.version.cuda = {build}; module.DIRECTORY = Path({str(tmp_path)!r});"
        # An environment for GPUs has a torchvision beside torch.
        "sys.path = [place for place in sys.path if not Path(place, 'torchvision').is_dir()];"
        "assert not module.make_torchvision_importable();"
        "import torchvision; assert torchvision.__file__.startswith(str(module.DIRECTORY))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == 0, done.stderr


@pytest.mark.sglang
def test_the_refused_engine_args_are_options_of_the_installed_release() -> None:
    """Each option of SGLang that names a port or an address is set by Parity, refused, or known to be harmless."""
    make_torchvision_importable()
    from sglang.srt.server_args import ServerArgs

    options = set(ServerArgs.__struct_fields__)
    assert set(REFUSED_SGLANG_ARGS) <= options
    reaching = {name for name in options if re.search(r"(_port|_ports|_addr|_endpoints?|_urls?|_ip)$", name)}
    assert reaching - set(REFUSED_SGLANG_ARGS) - OWNED_SGLANG_ARGS == {"nccl_port"}
