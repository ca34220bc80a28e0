"""Starts one SGLang server in this process: a JSON request on stdin -> `sglang.launch_server`'s own code.

`rollout/sglang/server.py` runs this file as `python -m rollout.sglang.launch`. The server's arguments come through
stdin because two of them are keys, which must not be readable in the process list. On a GPU SGLang spawns processes,
which import this file again before any other module, so code at its top runs in all of them. On a CPU they are forks.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from typing import Any

from rollout.sglang.cpu.forking import fork_processes
from rollout.sglang.cpu.platform import EXACT_VARIABLE, PLATFORM_NAME, activate
from rollout.sglang.cpu.torchvision import make_torchvision_importable

if os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME:
    make_torchvision_importable()
elif os.environ.get(EXACT_VARIABLE) == "1":  # a GPU: not yet run on one
    from rollout.sglang.cpu.srt_platform import install_exact

    install_exact()


def main() -> None:
    """Read {"parent_pid": int, "server_args": {...}} from stdin and serve until killed."""
    from rollout.processes.keeper import die_with_parent

    request = json.load(sys.stdin)
    die_with_parent(signal.SIGKILL)
    if os.getppid() != request["parent_pid"]:
        sys.exit(f"the process {request['parent_pid']} that started this server is gone")
    server_args: dict[str, Any] = request["server_args"]
    _hide_in_logs([server_args["api_key"], server_args["admin_api_key"]])

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    if activate() is not None:
        fork_processes()
    run_server(ServerArgs(**server_args))


def _hide_in_logs(secrets: list[str]) -> None:
    """Replace the keys in every log record: SGLang logs all of its arguments at start."""
    make_record = logging.getLogRecordFactory()

    def make_redacted(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        message = record.getMessage()
        if any(secret in message for secret in secrets):
            for secret in secrets:
                message = message.replace(secret, "<redacted>")
            record.msg, record.args = message, ()
        return record

    logging.setLogRecordFactory(make_redacted)


if __name__ == "__main__":
    main()
