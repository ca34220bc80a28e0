"""When a request is sent, how often, and how long it may take, against a server that answers when the test says so."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rollout.sglang.client import ClientError, SGLangClient
from rollout.sglang.request_stream import Job, RequestStream
from rollout.types import GenerateRequest, SamplingParams

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
PARTS = {"nothing": b"", "half a head": HEAD[:30], "a head": HEAD, "half a body": HEAD + b"{"}
"""Parts of an answer, after which the connection is closed."""
PROMPT = 10
MOST = 80


class Server:
    """Holds every request until `answer` is called; the reply has as many tokens as that says.

    Closes a connection that is idle for half a second, and loses the connection of every abort.
    """

    def __init__(self) -> None:
        self.held: dict[int, threading.Event] = {}
        self.num_tokens = 0
        self.fates: list[str] = []
        """What happens to the next requests in the place of an answer: a key of PARTS, or "reset"."""
        self.came: list[tuple[int, str, int]] = []
        """Ticket, rid and port of the client of every request."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 0.5

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path != "/generate":
                    return self.lose("nothing")
                ticket = body["input_ids"][0]
                server.came.append((ticket, body["rid"], self.client_address[1]))
                server.held[ticket] = threading.Event()
                server.held[ticket].wait(60)
                if server.fates:
                    return self.lose(server.fates.pop(0))
                meta = {"prompt_tokens": PROMPT, "cached_tokens": 0, "completion_tokens": server.num_tokens}
                raw = json.dumps({"output_ids": [], "meta_info": meta}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def lose(self, fate: str) -> None:
                self.close_connection = True
                if fate == "reset":
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    os.close(self.connection.detach())
                else:
                    self.wfile.write(PARTS[fate])

            def log_message(self, format: str, *args: object) -> None:
                """Silent."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.client = SGLangClient(
            address=f"http://127.0.0.1:{self._http.server_address[1]}", api_key="a", admin_api_key="b"
        )

    def wait_for(self, count: int) -> list[int]:
        """The tickets that have arrived, as soon as there are `count` of them and no other follows."""
        self.wait_until(lambda: len(self.held) >= count)
        time.sleep(0.2)
        return sorted(self.held)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not holds() and time.monotonic() < deadline:
            time.sleep(0.01)

    def lose(self, ticket: int, *fates: str) -> None:
        """Lose the connection of a request as often as there are `fates`; after that it is answered."""
        self.fates += fates
        for _ in fates:
            self.wait_until(lambda: ticket in self.held)
            self.held.pop(ticket).set()

    def answer(self, *tickets: int, tokens: int = 1) -> None:
        self.num_tokens = tokens
        for ticket in tickets:
            self.held[ticket].set()

    def stop_listening(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def close(self) -> None:
        self.answer(*self.held)
        self.stop_listening()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def jobs(*tickets: int) -> list[Job]:
    """Requests with prompts of their own, the first token of which is the ticket."""
    sampling = SamplingParams(temperature=1.0, max_new_tokens=MOST, seed=0)
    made = []
    for ticket in tickets:
        prompt = [ticket] * PROMPT
        request = GenerateRequest(prompt_id=ticket, sample_index=0, prompt_token_ids=prompt, sampling=sampling)
        made.append(
            Job(
                ticket=ticket,
                request=request,
                body={"input_ids": prompt, "sampling_params": {"max_new_tokens": MOST}},
            )
        )
    return made


def test_the_time_of_a_request_starts_again_with_every_answer_of_the_server(server: Server) -> None:
    stream = RequestStream(server.client, window=8, timeout_s=3.0, is_shared=False)
    try:
        stream.submit(jobs(1, 2, 3))
        assert server.wait_for(3) == [1, 2, 3]
        for ticket in (1, 2, 3):  # 3 is answered 4.5 s after it was sent
            time.sleep(1.5)
            server.answer(ticket)
            assert [answer.job.ticket for answer in stream.poll(5.0)] == [ticket]
        stream.submit(jobs(4))
        begin = time.monotonic()
        with pytest.raises(ClientError, match=r"no complete answer within 3\.0 s"):
            stream.poll(60.0)
        assert 2.9 < time.monotonic() - begin < 30
    finally:
        stream.close()


def test_what_the_cache_cannot_hold_waits_here_and_not_in_the_server(server: Server) -> None:
    """100 tokens, and an eighth more: two responses of half of the most, later five of 10 tokens and their prompts."""
    stream = RequestStream(server.client, window=8, timeout_s=60, is_shared=False, cache_tokens=100)
    try:
        stream.submit(jobs(*range(1, 13)))
        assert server.wait_for(2) == [1, 2]
        server.answer(1, 2, tokens=10)
        assert server.wait_for(7) == [1, 2, 3, 4, 5, 6, 7]
        server.answer(3, tokens=90)  # the mean is (20 + 20 + 100) / 3 tokens: two are enough
        server.answer(4, 5, 6, tokens=90)
        assert server.wait_for(7)[-1] < 10
        server.answer(7, tokens=90)
    finally:
        stream.close()


def test_a_request_that_is_larger_than_the_cache_is_sent_alone(server: Server) -> None:
    stream = RequestStream(server.client, window=8, timeout_s=60, is_shared=False, cache_tokens=20)
    try:
        stream.submit(jobs(1, 2))
        assert server.wait_for(1) == [1]
        server.answer(1)
        assert server.wait_for(2) == [1, 2]
    finally:
        stream.close()


@pytest.fixture
def stream(server: Server) -> Iterator[RequestStream]:
    stream = RequestStream(server.client, window=8, timeout_s=60, is_shared=False)
    yield stream
    stream.close()


def test_a_request_that_meets_a_connection_which_the_idle_server_has_closed_is_sent_again(
    server: Server, stream: RequestStream
) -> None:
    """The loop of the client is late: it takes the connection from its pool before it hears of the end."""
    stream.submit(jobs(1))
    server.wait_for(1)
    server.answer(1)
    assert stream.poll(10.0)[0].reply
    stream._loop.call_soon_threadsafe(time.sleep, 0.2)
    time.sleep(0.1)
    stream._loop.call_soon_threadsafe(time.sleep, 1.0)
    stream.submit(jobs(2))  # in one round of the loop with the second pause
    assert server.wait_for(2) == [1, 2]
    server.answer(2)
    assert stream.poll(10.0)[0].reply


@pytest.mark.parametrize("fate", ["nothing", "reset"])
def test_a_request_is_sent_again_once_if_no_byte_of_an_answer_came(
    server: Server, stream: RequestStream, fate: str
) -> None:
    stream.submit(jobs(1))
    server.lose(1, fate)
    server.answer(*server.wait_for(1))
    [answer] = stream.poll(10.0)
    assert answer.reply and not answer.is_refused
    (first, second) = server.came
    assert first[1] != second[1], "SGLang refuses the id of a request that it still has"
    assert first[2] != second[2], "on a new connection"

    stream.submit(jobs(2))
    server.lose(2, fate, fate)
    with pytest.raises(ClientError, match="POST /generate"):
        stream.poll(10.0)
    assert [ticket for ticket, _, _ in server.came] == [1, 1, 2, 2]


@pytest.mark.parametrize("fate", ["half a head", "a head", "half a body"])
def test_a_request_is_not_repeated_once_a_part_of_the_answer_came(
    server: Server, stream: RequestStream, fate: str
) -> None:
    stream.submit(jobs(1))
    server.lose(1, fate)
    with pytest.raises(ClientError, match="POST /generate"):
        stream.poll(10.0)
    assert len(server.came) == 1


def test_a_server_that_has_ended_is_found_at_once(server: Server, stream: RequestStream) -> None:
    stream.submit(jobs(1, 2, 3))
    server.wait_for(3)
    server.fates += ["nothing"] * 3
    server.stop_listening()
    server.answer(1, 2, 3)
    with pytest.raises(ClientError, match="ConnectionRefusedError"):
        stream.poll(30.0)
    assert stream.num_unfinished == 0


def test_a_lost_request_waits_until_the_weights_are_replaced(server: Server, stream: RequestStream) -> None:
    stream.submit(jobs(1))
    server.wait_for(1)
    with stream.held():
        server.lose(1, "nothing")
        assert server.wait_for(0) == []
        stream.version = 7
    server.answer(*server.wait_for(1))
    [answer] = stream.poll(10.0)
    assert answer.reply and answer.job.version == 7


def test_an_aborted_request_is_not_repeated_and_a_lost_abort_is_no_failure(
    server: Server, stream: RequestStream
) -> None:
    stream.submit(jobs(1, 2))
    server.wait_for(2)
    stream.abort([1])
    time.sleep(0.5)  # the connection of the abort is lost meanwhile
    assert stream.num_unfinished == 2
    server.lose(1, "nothing")
    assert [(answer.job.ticket, answer.reply) for answer in stream.poll(10.0)] == [(1, None)]
    server.answer(2)
    assert stream.poll(10.0)[0].reply
    assert len(server.came) == 2


def test_what_was_not_sent_is_given_back_and_the_rest_is_served(server: Server) -> None:
    stream = RequestStream(server.client, window=2, timeout_s=60, is_shared=False)
    try:
        stream.submit(jobs(*range(1, 8)))
        assert server.wait_for(2) == [1, 2]
        assert stream.give_back(2) == [7, 6]
        assert stream.num_unfinished == 5
        server.answer(1, 2)
        assert server.wait_for(4) == [1, 2, 3, 4]
        assert stream.give_back(9) == [5] and stream.give_back(9) == []
        server.answer(3, 4)
        ended: list[int] = []
        while len(ended) < 4:
            ended += [answer.job.ticket for answer in stream.poll(10.0)]
        assert sorted(ended) == [1, 2, 3, 4] and stream.num_unfinished == 0
        assert server.wait_for(4) == [1, 2, 3, 4]
    finally:
        stream.close()
