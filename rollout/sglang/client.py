"""HTTP client of one SGLang server: (route, body, deadline) -> parsed reply, or ClientError.

Every call carries a key, has a deadline and checks the status. `rollout/sglang/server.py` owns the server;
`rollout/sglang/engine.py` makes the calls. Samples go through `rollout/sglang/request_stream.py`.
"""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import orjson

from rollout.config import LOOPBACK

HOST = "127.0.0.1"
SHOWN_REPLY_CHARS = 2000
"""Number of characters of the server's reply in an error."""
READ_BYTES = 1 << 20

ADMIN_ROUTES = frozenset(
    {
        "/abort_request",
        "/begin_weight_update",
        "/continue_generation",
        "/end_weight_update",
        "/flush_cache",
        "/freeze_gc",
        "/pause_generation",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/update_weight_version",
        "/update_weights_from_tensor",
        "/weights_checker",
    }
)
"""Routes that SGLang guards with the admin key if one is set; other routes take the ordinary key."""


class ClientError(RuntimeError):
    """A call failed. `status` is the HTTP status of the reply, or None without a reply."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Address and keys of a server."""

    address: str
    """Scheme, host and port: "http://127.0.0.1:30000"."""
    api_key: str = field(repr=False)
    """Key of the server; empty if the server requires none."""
    admin_api_key: str = field(repr=False)

    @property
    def is_local(self) -> bool:
        """True if the server is on this machine."""
        return urlsplit(self.address).hostname in LOOPBACK

    def headers(self, route: str) -> dict[str, str]:
        key = self.admin_api_key if route in ADMIN_ROUTES else self.api_key
        return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}


class SGLangClient:
    """Calls one server. Each call opens a connection, so that an error leaves no half-read reply."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    def routes(self, *, timeout_s: float) -> frozenset[str]:
        """Paths that this release of SGLang serves, from /openapi.json."""
        return frozenset(self.call("/openapi.json", timeout_s=timeout_s)["paths"])

    def call(self, route: str, *, timeout_s: float, body: Mapping[str, Any] | None = None) -> Any:
        """GET `route`, or POST `body` as JSON; returns the parsed reply.

        A reply that is not JSON comes back as text (`/flush_cache`). Raises ClientError when the server cannot be
        reached, does not answer completely within `timeout_s` seconds, answers with a status other than 200, or answers
        {"success": false}.
        """
        method = "GET" if body is None else "POST"
        what = f"{method} {route}"
        if timeout_s <= 0:
            raise ClientError(f"{what}: no time is left before the deadline")
        deadline = time.monotonic() + timeout_s
        connection = self._connect(timeout_s)
        headers = {**self.endpoint.headers(route), "Connection": "close"}
        try:
            connection.request(method, route, body=None if body is None else orjson.dumps(body), headers=headers)
            wire = connection.sock
            response = connection.getresponse()
            raw = _read(response, wire, deadline)
        except TimeoutError as error:
            raise ClientError(f"{what}: no complete answer within {timeout_s:.1f} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise ClientError(f"{what}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
        return parse_reply(what, raw, status=response.status, content_type=response.headers["Content-Type"] or "")

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        parts = urlsplit(self.endpoint.address)
        if parts.scheme == "https":
            return http.client.HTTPSConnection(parts.hostname or HOST, parts.port, timeout=timeout_s)
        return http.client.HTTPConnection(parts.hostname or HOST, parts.port, timeout=timeout_s)


def parse_reply(what: str, raw: bytes, *, status: int, content_type: str) -> Any:
    """The reply to the request `what`, parsed if it is JSON, else as text; raises ClientError for a refusal."""
    text = raw[:SHOWN_REPLY_CHARS].decode("utf-8", errors="replace")
    if status != http.HTTPStatus.OK:
        raise ClientError(f"{what}: HTTP {status}: {text}", status=status)
    if "json" not in content_type:
        return text
    try:
        reply = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ClientError(f"{what}: the answer is not JSON: {error}: {text}", status=status) from error
    if isinstance(reply, dict) and "success" in reply and not reply["success"]:
        raise ClientError(f"{what}: refused: {text}", status=status)
    return reply


def _read(response: http.client.HTTPResponse, wire: socket.socket, deadline: float) -> bytes:
    """The whole body. A socket timeout bounds each read; `deadline` bounds their sum."""
    parts: list[bytes] = []
    # http.client closes a chunked response, and with it the socket, at its end; `length` is the number of bytes to
    # come.
    while not response.isclosed() and response.length != 0:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        wire.settimeout(remaining_s)
        parts.append(response.read1(READ_BYTES))
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(parts)
