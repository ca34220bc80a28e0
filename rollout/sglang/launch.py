"""Starts one SGLang server in this process: a JSON request on stdin -> `sglang.launch_server`'s own code.

`rollout/sglang/server.py` runs this file as `python -m rollout.sglang.launch`. The server's arguments come through
stdin because two of them are keys, which must not be readable in the process list. The processes that SGLang spawns
import this file again before any other module, so code at its top runs in all of them.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
from typing import Any

from rollout.sglang.cpu.platform import PLATFORM_NAME
from rollout.sglang.cpu.torchvision import make_torchvision_importable

if os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME:
    make_torchvision_importable()

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Read {"parent_pid": int, "server_args": {...}} from stdin and serve until killed."""
    request = json.load(sys.stdin)
    _die_with_parent(request["parent_pid"])
    server_args: dict[str, Any] = request["server_args"]
    _hide_in_logs([server_args["api_key"], server_args["admin_api_key"]])

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    run_server(ServerArgs(**server_args))


def _die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; exit at once if that thread is gone."""
    libc = ctypes.CDLL("libc.so.6", use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit(f"the process {parent_pid} that started this server is gone")


def _hide_in_logs(secrets: list[str]) -> None:
    """Replace the keys in every log record: SGLang logs all of its arguments at start."""
    make_record = logging.getLogRecordFactory()

    def make_redacted(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        message = record.getMessage()
        if any(secret in message for secret in secrets):
            for secret in secrets:
                message = message.replace(secret, "[redacted]")
            record.msg, record.args = message, ()
        return record

    logging.setLogRecordFactory(make_redacted)


if __name__ == "__main__":
    main()
