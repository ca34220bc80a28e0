"""The HTTP client against a real socket that misbehaves: deadlines, statuses, refusals."""

from __future__ import annotations

import gzip
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from rollout.engine import EngineError
from rollout.sglang import external
from rollout.sglang.client import ClientError, SGLangClient
from rollout.sglang.external import ExternalServer


@contextmanager
def answering(respond: Callable[[socket.socket, bytes], None]) -> Iterator[tuple[SGLangClient, list[bytes]]]:
    """A client of a server that reads one request per connection and leaves the answer to `respond`."""
    requests: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                requests.append(read_request(connection))
                respond(connection, requests[-1])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        yield SGLangClient(address=address, api_key="user-key", admin_api_key="admin-key"), requests
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(timeout=10)
        assert not thread.is_alive()


def read_request(connection: socket.socket) -> bytes:
    """The whole request: closing a socket with unread bytes resets the connection."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        raw += connection.recv(65536)
    head, _, body = raw.partition(b"\r\n\r\n")
    match = re.search(rb"Content-Length: ([0-9]+)", head)
    while match and len(body) < int(match[1]):
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def http(body: bytes, *, status: str = "200 OK", content_type: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def test_json_is_parsed_and_keys_fit_the_route() -> None:
    with answering(lambda connection, _: connection.sendall(http(b'{"a": [1]}'))) as (client, requests):
        assert client.call("/generate", body={"x": 1}, timeout_s=60) == {"a": [1]}
        assert client.call("/flush_cache", body={}, timeout_s=60) == {"a": [1]}
        assert client.call("/model_info", timeout_s=60) == {"a": [1]}
    assert requests[0].startswith(b"POST /generate ") and b"Bearer user-key" in requests[0]
    assert requests[1].startswith(b"POST /flush_cache ") and b"Bearer admin-key" in requests[1]
    assert requests[2].startswith(b"GET /model_info ") and b"Bearer user-key" in requests[2]


def test_a_chunked_answer_is_read_whole_and_a_cut_one_is_an_error() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with answering(lambda connection, _: connection.sendall(head + b"3\r\n[1,\r\n2\r\n2]\r\n0\r\n\r\n")) as (client, _):
        assert client.call("/generate", body={}, timeout_s=60) == [1, 2]
    with (
        answering(lambda connection, _: connection.sendall(head + b"3\r\n[1]\r\n")) as (client, _),
        pytest.raises(ClientError, match="ClientPayloadError"),
    ):
        client.call("/generate", body={}, timeout_s=60)


def test_text_is_returned_as_it_is() -> None:
    reply = http(b"Cache flushed.", content_type="text/plain")
    with answering(lambda connection, _: connection.sendall(reply)) as (client, _):
        assert client.call("/flush_cache", body={}, timeout_s=60) == "Cache flushed."


def test_status_and_text_of_a_refusal_are_in_the_error() -> None:
    reply = http(b'{"error": "prompt is too long"}', status="400 Bad Request")
    with (
        answering(lambda connection, _: connection.sendall(reply)) as (client, _),
        pytest.raises(ClientError, match=r"POST /generate: HTTP 400: .*prompt is too long") as caught,
    ):
        client.call("/generate", body={}, timeout_s=60)
    assert caught.value.status == 400


def test_success_false_is_an_error_whatever_the_status() -> None:
    reply = http(b'{"success": false, "message": "no session"}')
    with (
        answering(lambda connection, _: connection.sendall(reply)) as (client, _),
        pytest.raises(ClientError, match=r"refused: .*no session"),
    ):
        client.call("/end_weight_update", body={}, timeout_s=60)


def test_silence_ends_at_the_deadline() -> None:
    given_up = threading.Event()
    with answering(lambda connection, _: given_up.wait(8)) as (client, _):
        with pytest.raises(ClientError, match=r"no complete answer within 0\.3 s") as caught:
            client.call("/generate", body={}, timeout_s=0.3)
        given_up.set()
    assert caught.value.status is None


def test_a_trickle_ends_at_the_deadline_too() -> None:
    """Every byte comes in time for a socket timeout; only the sum is too slow."""

    def trickle(connection: socket.socket, _: bytes) -> None:
        head, body = http(b"[" + b"1," * 5000 + b"1]").split(b"\r\n\r\n")
        connection.sendall(head + b"\r\n\r\n")
        for byte in body:
            try:
                connection.sendall(bytes([byte]))
            except OSError:
                return
            time.sleep(0.03)

    with answering(trickle) as (client, _):
        begin = time.monotonic()
        with pytest.raises(ClientError, match="no complete answer"):
            client.call("/generate", body={}, timeout_s=0.5)
        assert time.monotonic() - begin < 60, "all of it takes five minutes"


def test_broken_connections_have_no_status() -> None:
    half = http(b"x" * 100)[:-50]
    with answering(lambda connection, _: connection.sendall(half)) as (client, _):
        with pytest.raises(ClientError, match="ClientPayloadError") as caught:
            client.call("/generate", body={}, timeout_s=60)
        assert caught.value.status is None
    with pytest.raises(ClientError, match="ConnectionRefusedError") as caught:
        client.call("/generate", body={}, timeout_s=60)
    assert caught.value.status is None
    with pytest.raises(ClientError, match="no time is left"):
        client.call("/generate", body={}, timeout_s=-1)


def test_a_reply_without_end_is_given_up_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.sglang.client.MAX_REPLY_BYTES", 1 << 20)
    sent = 0

    def pour(connection: socket.socket, _: bytes) -> None:
        nonlocal sent
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n[")
        with suppress(OSError):
            while sent < 64 << 20:
                connection.sendall(b"1," * 32768)
                sent += 65536

    with answering(pour) as (client, _), pytest.raises(ClientError, match="the answer has more than 1048576 bytes"):
        client.call("/model_info", timeout_s=30)
    assert sent < 32 << 20, "nothing is read after the limit"


def test_a_compressed_reply_counts_as_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.sglang.client.MAX_REPLY_BYTES", 1 << 20)
    reply = http(gzip.compress(b"1" * (8 << 20))).replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n", 1)
    with (
        answering(lambda connection, _: connection.sendall(reply)) as (client, _),
        pytest.raises(ClientError, match="more than 1048576 bytes"),
    ):
        client.call("/model_info", timeout_s=30)


def test_a_redirect_is_an_error_and_takes_no_key_elsewhere() -> None:
    with answering(lambda connection, _: connection.sendall(http(b"{}"))) as (other, asked):
        head = f"HTTP/1.1 307 Temporary Redirect\r\nLocation: {other.address}/model_info\r\nContent-Length: 0\r\n\r\n"
        with (
            answering(lambda connection, _: connection.sendall(head.encode())) as (client, _),
            pytest.raises(ClientError, match="GET /model_info: HTTP 307"),
        ):
            client.call("/model_info", timeout_s=60)
        assert asked == []


def test_a_name_that_is_looked_up_for_ever_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: given_up.wait(60) and [])
    begin = time.monotonic()
    try:
        client = SGLangClient(address="http://engines.invalid:30000", api_key="", admin_api_key="")
        with pytest.raises(ClientError, match=r"no complete answer within 0\.3 s"):
            client.call("/model_info", timeout_s=0.3)
        assert time.monotonic() - begin < 30
    finally:
        given_up.set()


def test_a_server_where_nobody_listens_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "REFUSED_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as ended:
        address = f"http://127.0.0.1:{ended.getsockname()[1]}"
    begin = time.monotonic()
    with pytest.raises(
        EngineError,
        match=rf"start: nobody listens after \d+ s: .*ConnectionRefused.* The server at {address} is not ours",
    ):
        ExternalServer(address, index=0).start(timeout_s=300.0)
    assert 1.0 <= time.monotonic() - begin < 60


def test_a_server_that_still_loads_its_model_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts the connection and answers only later."""
    monkeypatch.setattr(external, "REFUSED_S", 0.1)
    monkeypatch.setattr(external, "READY_INTERVAL_S", 0.1)
    asked: list[float] = []

    def respond(connection: socket.socket, request: bytes) -> None:
        asked.append(time.monotonic())
        status = "200 OK" if asked[-1] - asked[0] > 1.0 else "503 Service Unavailable"
        connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\n{{}}".encode())

    with answering(respond) as (client, _):
        ExternalServer(client.address, index=0).start(timeout_s=30.0)
    assert asked[-1] - asked[0] > 1.0
