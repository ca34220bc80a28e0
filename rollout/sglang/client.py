"""HTTP client of one SGLang server: (route, body, deadline) -> parsed reply, or ClientError.

Every call carries a key, has a deadline and checks the status. `rollout/sglang/server.py` owns the server;
`rollout/sglang/engine.py` makes the calls. Samples go through `rollout/sglang/request_stream.py`.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from rollout.config import LOOPBACK
from rollout.sglang.options import MAX_REPLY_BYTES

HOST = "127.0.0.1"
SHOWN_REPLY_CHARS = 2000
"""Number of characters of the server's reply in an error."""
ADMIN_ROUTES = frozenset({
    "/abort_request", "/begin_weight_update", "/continue_generation", "/end_weight_update", "/flush_cache",
    "/freeze_gc", "/load_lora_adapter_from_tensors", "/pause_generation", "/release_memory_occupation",
    "/resume_memory_occupation", "/start_profile", "/stop_profile", "/update_weight_version",
    "/update_weights_from_tensor", "/weights_checker",
})  # fmt: skip
"""Routes that SGLang guards with the admin key if one is set; other routes take the ordinary key."""


class ClientError(RuntimeError):
    """A call failed."""

    def __init__(
        self, message: str, *, status: int | None = None, is_refused: bool = False, is_unanswered: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status of the reply; None without a reply."""
        self.is_refused = is_refused
        """True if nobody listens at the address."""
        self.is_unanswered = is_unanswered
        """True if the connection was lost before a byte of the answer came."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SGLangClient:
    """Address and keys of one server, and calls to it."""

    address: str
    """Scheme, host and port: "http://127.0.0.1:30000"."""
    api_key: str = field(repr=False)
    """Key of the server; empty if the server requires none."""
    admin_api_key: str = field(repr=False)

    @property
    def is_local(self) -> bool:
        """True if the server is on this machine."""
        return urlsplit(self.address).hostname in LOOPBACK

    def routes(self, *, timeout_s: float) -> frozenset[str]:
        """Paths that this release of SGLang serves, from /openapi.json."""
        return frozenset(self.call("/openapi.json", timeout_s=timeout_s)["paths"])

    def call(self, route: str, *, timeout_s: float, body: Mapping[str, Any] | None = None) -> Any:
        """Wait for `exchange`, over a connection of its own, at most `timeout_s` seconds.

        Nothing is sent twice: no server closes a new connection as an idle one, and an update of weights or a pause
        whose answer was lost may have been carried out.
        """
        if timeout_s <= 0:
            raise ClientError(f"{route}: no time is left before the deadline")

        async def once() -> Any:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with aiohttp.ClientSession(self.address, timeout=timeout) as session:
                return await self.exchange(session, route, body)

        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(once())
        finally:
            # asyncio.run would wait here, without a deadline, for a thread that still looks up the host's name.
            loop.close()

    async def exchange(self, session: aiohttp.ClientSession, route: str, body: Mapping[str, Any] | None) -> Any:
        """GET `route`, or POST `body` as JSON; returns the parsed reply. `session` belongs to this server.

        A reply that is not JSON comes back as text (`/flush_cache`). Raises ClientError when the server cannot be
        reached, does not answer completely within the time limit of the session, answers with more than MAX_REPLY_BYTES
        or with a status other than 200 (redirects are not followed), or answers {"success": false}.
        """
        method = "GET" if body is None else "POST"
        key = self.admin_api_key if route in ADMIN_ROUTES else self.api_key
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        data = None if body is None else io.BytesIO(orjson.dumps(body))
        what = f"{method} {route}"
        raw = None
        try:
            async with session.request(method, route, data=data, headers=headers, allow_redirects=False) as response:
                raw = bytearray()
                async for part in response.content.iter_any():
                    raw += part
                    if len(raw) > MAX_REPLY_BYTES:
                        raise ClientError(f"{what}: the answer has more than {MAX_REPLY_BYTES} bytes")
        except TimeoutError as error:
            limit_s = session.timeout.total or session.timeout.sock_connect
            raise ClientError(f"{what}: no complete answer within {limit_s} s") from error
        except (aiohttp.ClientError, OSError) as error:
            # The error of the system below says more: a refused connection, an unknown host.
            cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
            refused, lost = isinstance(cause, ConnectionRefusedError), raw is None and _is_lost(error)
            text = f"{what}: {type(cause).__name__}: {cause}"
            raise ClientError(text, is_refused=refused, is_unanswered=lost) from error
        return parse_reply(what, bytes(raw), status=response.status, content_type=response.content_type)


def _is_lost(error: Exception) -> bool:
    """True if an established connection ended without a part of the answer's head."""
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return isinstance(error.message, str)  # else it is the part that came
    return isinstance(error, OSError) and not isinstance(error, aiohttp.ClientConnectorError)


def parse_reply(what: str, raw: bytes, *, status: int, content_type: str) -> Any:
    """The reply to the request `what`, parsed if it is JSON, else as text; raises ClientError for a refusal."""
    text = raw[:SHOWN_REPLY_CHARS].decode("utf-8", errors="replace")
    if status != HTTPStatus.OK:
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
