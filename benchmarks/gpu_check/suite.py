"""Check 12: the project's own tests that need neither Ray nor SGLang, under the versions of this host."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from gpu_check.attention_fit import missing_arguments
from gpu_check.host import Host
from gpu_check.rows import NotRunError, Row, judged

ROOT = Path(__file__).resolve().parents[2]
ON_CUDA = ("test_logprob_head.py", "test_forward.py", "test_packing.py")
ON_CPU = ("test_packing.py",)
NEEDED = ("pytest", "hypothesis", "psutil")
TIMEOUT_S = 240


def suite(host: Host) -> Iterator[Row]:
    """The tests compute on the CPU, also on a GPU host: they try its torch and transformers."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise NotRunError(f"needs {', '.join(missing)}")
    files = host.pick(ON_CUDA, ON_CPU)
    paths = [str(ROOT / "tests" / "trainer" / name) for name in files]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths]
    # These pin the arguments that this torch lacks; check 3 tries the adapted attention.
    left_out = ["-k", "not flash_attention"] if missing_arguments() else []
    done = subprocess.run(  # noqa: S603 - our own interpreter and files
        [*command, *left_out], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()
    log = host.out / "tests.log"
    log.write_text(done.stdout + done.stderr, encoding="utf-8")
    yield judged(
        "12",
        f"tests of the trainer: {', '.join(files)}{', without those of flash attention' if left_out else ''}",
        expected="all pass",
        measured=lines[-1] if lines else "no output",
        ok=done.returncode == 0,
        reason=f"see {log.name}",
    )
