"""HTTP client of one SGLang server on this machine: (route, body, deadline) -> parsed reply, or ClientError.

Every call carries a key, has a deadline and checks the status. `rollout/sglang/server.py` owns the server;
`rollout/sglang/engine.py` decides what to ask.
"""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Mapping
from typing import Any

import orjson

HOST = "127.0.0.1"
SHOWN_REPLY_CHARS = 2000
"""An error shows this much of the server's reply."""
READ_BYTES = 1 << 20

ADMIN_ROUTES = frozenset(
    {
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
"""Routes that SGLang guards with the admin key once there is one; the others take the ordinary key."""


class ClientError(RuntimeError):
    """A call failed. `status` is the HTTP status of the reply, None if there was none."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class SGLangClient:
    """Calls one server. One connection per call: nothing is left half-read after an error."""

    def __init__(self, *, port: int, api_key: str, admin_api_key: str) -> None:
        self._port = port
        self._api_key = api_key
        self._admin_api_key = admin_api_key

    def routes(self, *, timeout_s: float) -> frozenset[str]:
        """Paths that this release of SGLang serves, from /openapi.json."""
        return frozenset(self.call("/openapi.json", timeout_s=timeout_s)["paths"])

    def call(self, route: str, *, timeout_s: float, body: Mapping[str, Any] | None = None) -> Any:
        """GET `route`, or POST `body` to it as JSON; the parsed reply.

        A reply that is not JSON comes back as text (`/flush_cache`). Raises ClientError when the server cannot be
        reached, does not answer completely within `timeout_s` seconds, answers with a status other than 200, or
        answers {"success": false}.
        """
        method = "GET" if body is None else "POST"
        what = f"{method} {route}"
        if timeout_s <= 0:
            raise ClientError(f"{what}: no time is left before the deadline")
        deadline = time.monotonic() + timeout_s
        connection = http.client.HTTPConnection(HOST, self._port, timeout=timeout_s)
        try:
            connection.request(
                method, route, body=None if body is None else orjson.dumps(body), headers=self._headers(route)
            )
            wire = connection.sock
            response = connection.getresponse()
            raw = _read(response, wire, deadline)
        except TimeoutError as error:
            raise ClientError(f"{what}: no complete answer within {timeout_s:.1f} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise ClientError(f"{what}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
        text = raw[:SHOWN_REPLY_CHARS].decode("utf-8", errors="replace")
        if response.status != http.HTTPStatus.OK:
            raise ClientError(f"{what}: HTTP {response.status}: {text}", status=response.status)
        if "json" not in (response.headers["Content-Type"] or ""):
            return text
        try:
            reply = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise ClientError(f"{what}: the answer is not JSON: {error}: {text}", status=response.status) from error
        if isinstance(reply, dict) and "success" in reply and not reply["success"]:
            raise ClientError(f"{what}: refused: {text}", status=response.status)
        return reply

    def _headers(self, route: str) -> dict[str, str]:
        key = self._admin_api_key if route in ADMIN_ROUTES else self._api_key
        return {"Authorization": f"Bearer {key}", "Content-Type": "application/json", "Connection": "close"}


def _read(response: http.client.HTTPResponse, wire: socket.socket, deadline: float) -> bytes:
    """The whole body. A socket timeout bounds each read; this bounds their sum."""
    parts: list[bytes] = []
    # http.client closes a chunked response, and with it the socket, at its end; `length` is what is still to come.
    while not response.isclosed() and response.length != 0:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        wire.settimeout(remaining_s)
        parts.append(response.read1(READ_BYTES))
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(parts)
