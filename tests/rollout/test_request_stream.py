"""When a request is sent and how long it may take, against a server that answers when the test says so."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rollout.sglang.client import ClientError, SGLangClient
from rollout.sglang.request_stream import Job, RequestStream
from rollout.types import GenerateRequest, SamplingParams

PROMPT = 10
MOST = 80


class Server:
    """Holds every request until `answer` is called; the reply has as many tokens as that says."""

    def __init__(self) -> None:
        self.held: dict[int, threading.Event] = {}
        self.num_tokens = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                ticket = body["input_ids"][0]
                server.held[ticket] = threading.Event()
                server.held[ticket].wait(60)
                meta = {"prompt_tokens": PROMPT, "cached_tokens": 0, "completion_tokens": server.num_tokens}
                raw = json.dumps({"output_ids": [], "meta_info": meta}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

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
        deadline = time.monotonic() + 10
        while len(self.held) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        return sorted(self.held)

    def answer(self, *tickets: int, tokens: int = 1) -> None:
        self.num_tokens = tokens
        for ticket in tickets:
            self.held[ticket].set()

    def close(self) -> None:
        self.answer(*self.held)
        self._http.shutdown()
        self._http.server_close()


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
    stream = RequestStream(server.client, window=8, timeout_s=1.5, is_shared=False)
    try:
        stream.submit(jobs(1, 2, 3))
        assert server.wait_for(3) == [1, 2, 3]
        for ticket in (1, 2, 3):  # 3 is answered 3 s after it was sent
            time.sleep(1.0)
            server.answer(ticket)
            assert [answer.job.ticket for answer in stream.poll(5.0)] == [ticket]
        stream.submit(jobs(4))
        begin = time.monotonic()
        with pytest.raises(ClientError, match=r"no complete answer within 1\.5 s"):
            stream.poll(10.0)
        assert 1.4 < time.monotonic() - begin < 5
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
