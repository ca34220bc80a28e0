"""Servers on the loopback for the real W&B client, which no test can let talk to W&B itself."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

PROJECT = {"id": "p", "name": "parity", "entity": {"id": "e", "name": "someone"}}
BUCKET = {"id": "b", "name": "x1", "displayName": "run", "config": "{}", "project": PROJECT, "historyLineCount": 0}
ANSWERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mutation UpsertBucket", {"upsertBucket": {"bucket": BUCKET, "inserted": True}}),
    ("mutation CreateRunFiles", {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}}),
    ("query RunResumeStatus", {"model": {"bucket": None}}),
)
"""(beginning of a GraphQL request, data of its answer); of all others the data is empty."""


class WandbServer(http.server.ThreadingHTTPServer):
    """Lets every run in and keeps the rows that it is sent, until it is told to refuse or to fall silent."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, *, refuses: bool = False, deleted: Collection[str] = ()) -> None:
        """`refuses`: answer every request with 401. `deleted`: ids of runs that were deleted."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.refuses = refuses
        self.deleted = deleted
        self.silent = threading.Event()
        self.ends = threading.Event()
        self.rows: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving(server: WandbServer) -> Iterator[WandbServer]:
    """Serve while the block runs."""
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.ends.set()
        server.shutdown()
        server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: WandbServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.server.silent.is_set():
            self.server.ends.wait()
            return
        if self.server.refuses:
            self.send_error(401)
            return
        sent = json.loads(body) if body else {}
        for line in sent.get("files", {}).get("wandb-history.jsonl", {}).get("content", []):
            self.server.rows.append(json.loads(line))
        query = sent.get("query", "").strip()
        name = sent.get("variables", {}).get("name")
        if query.startswith("mutation UpsertBucket") and name in self.server.deleted:
            text = f"run someone/parity/{name} was previously created and deleted; try a new run name"
            self._answer(409, {"data": {"upsertBucket": None}, "errors": [{"message": text}]})
            return
        data = next((answer for beginning, answer in ANSWERS if query.startswith(beginning)), {})
        self._answer(200, {"data": data})

    def _answer(self, code: int, content: dict[str, Any]) -> None:
        answer = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""
