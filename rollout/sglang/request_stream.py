"""Requests to one SGLang server: jobs in, replies out as they end. One HTTP request per sample.

A thread with its own event loop sends the requests over pooled connections, in the order of submission, as many at a
time as the server runs together: the others wait here, not in the server. Before several requests with one prompt the
server reads the prompt once, so that each of them finds it in the prefix cache: a scheduler that gets them together
would compute it for each.
`rollout/sglang/engine.py` makes the requests and reads the replies (`rollout/sglang/replies.py`); the other calls go
through `rollout/sglang/client.py`.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import secrets
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

import aiohttp

from rollout.engine import ABORT_TIMEOUT_S
from rollout.processes.busy_clock import BusyClock
from rollout.routes import Routes
from rollout.sglang.client import ClientError, SGLangClient
from rollout.sglang.replies import START
from rollout.types import GenerateRequest

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 2.0
"""Seconds after which an idle connection is closed, before the server closes it under a new request. SGLang does so
after 5 s; a server that Parity starts after `installation.SERVER_KEEP_ALIVE_S`, because the client may be late."""
CONNECT_TIMEOUT_S = 30.0
WATCH_INTERVAL_S = 0.2
ABORT_REPEAT_S = 1.0
"""Seconds after which an abort is sent again: a server forgets an abort that overtook its request."""
HANDOVER_TIMEOUT_S = 30.0
"""Deadline in seconds for handing work to the thread."""
DEFAULT_WINDOW = 256
"""Maximum of unanswered requests to a server that does not report how many it runs together."""
REFUSED_STATUSES = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)
"""Statuses that are about one request; any other error, such as 401 or 503, is about the server."""
MIN_SHARED_PROMPT = 16
"""Tokens of a prompt below which computing it for each request costs less than another request."""
WINDOW_SLACK = 1.125
"""Ratio of sent requests to requests that the server runs together, so that free slots are filled without delay."""
REMEMBERED = 256
"""Number of answers over which the mean length of a response is taken, about."""


ResultT = TypeVar("ResultT")


@dataclass(kw_only=True, slots=True)
class Reading:
    """The routes of a prompt that several jobs share, but that of its last token, which each job returns."""

    text: str
    """As the server returns them."""
    first: int
    """Token that they begin with."""
    end: int
    """Token that they end before."""
    version: int
    """Policy version of the engine when the prompt was read."""
    routes: Routes | None = None
    """The same, once a job has needed them."""


@dataclass(kw_only=True, slots=True)
class Job:
    """One request to the server."""

    ticket: int
    request: GenerateRequest
    body: Mapping[str, Any]
    """Body of /generate, without rid."""
    rid: str = field(default_factory=partial(secrets.token_hex, 16))
    """Id of the request. SGLang aborts by prefix, so all ids have the same length."""
    sent_at: float = 0.0
    """Monotonic time of sending, plus the seconds in which weights were replaced since then."""
    version: int = 0
    """Policy version of the engine when the request was sent."""
    task: asyncio.Task[None] | None = None
    aborted_at: float | None = None
    """Monotonic time of the first abort."""
    abort_sent_at: float = 0.0
    is_repeated: bool = False
    """True if the request was sent before, and its connection was lost without an answer."""
    reading: Reading | None = None
    """What the server returned when it read the prompt for several jobs."""


class Answer(NamedTuple):
    """A job that has ended, with its reply."""

    job: Job
    reply: dict[str, Any] | None
    """The server's reply; None if the job was aborted before it was sent, never answered its abort, or was refused."""
    is_refused: bool = False
    """True if the server refused the request."""


class RequestStream:
    """The requests of one engine. `submit`, `poll` and `abort` may be called by any thread.

    A refused request ends its own job. A request whose connection is lost before a byte of the answer came is sent once
    more. Any other failure ends all unfinished jobs: `poll` raises the error once, after returning the jobs that had
    ended before.
    """

    def __init__(
        self,
        client: SGLangClient,
        *,
        window: int,
        timeout_s: float,
        is_shared: bool,
        cache_tokens: int | None = None,
    ) -> None:
        """Start the thread.

        Args:
            window: bounds the sent and unanswered requests.
            timeout_s: seconds in which each must be answered. The time starts again with every answer of the server,
                because a request may have waited in the server's queue until then.
            is_shared: True if the server has other users, so that only requests of this stream may be aborted.
            cache_tokens: number of tokens whose keys and values the server can hold; None if it does not say.
        """
        self._client = client
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._window = max(1, min(window, files // 2))
        self._timeout_s = timeout_s
        self._is_shared = is_shared
        self._cache_tokens = cache_tokens
        self._answered_at = 0.0
        """Monotonic time of the server's latest answer, plus the seconds in which weights were replaced since then."""
        self._num_measured = 0
        self._mean_tokens = 0.0
        """Tokens that a request adds to the server's cache: mean over the latest `_num_measured` answers."""
        self.extra_key: str | None = None
        """Cache key that separates the prefixes of policy versions; None where prefixes are dropped at a sync."""
        self.version = 0
        """Policy version for new requests."""
        # Guarded by the condition:
        self._changed = threading.Condition()
        self._ended: list[Answer] = []
        self._failure: ClientError | None = None
        self._num_unfinished = 0
        self._busy = BusyClock()
        # Used by the thread only:
        self._waiting: deque[Job] = deque()
        self._sent: dict[int, Job] = {}
        self._readings: dict[asyncio.Task[None], list[Job]] = {}
        """Requests that have the server read a prompt -> the jobs with the prompt, which wait for it."""
        self._errands: set[asyncio.Task[Any]] = set()
        self._held_since: float | None = None
        self._session: aiohttp.ClientSession
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sglang-requests", daemon=True)
        self._thread.start()
        if not self._ready.wait(HANDOVER_TIMEOUT_S):
            raise ClientError(f"no thread for requests after {HANDOVER_TIMEOUT_S:.0f} s")

    @property
    def sampling_s(self) -> float:
        """Seconds with unfinished jobs."""
        with self._changed:
            return self._busy.seconds

    @property
    def num_unfinished(self) -> int:
        """Number of jobs that have neither ended nor failed."""
        with self._changed:
            return self._num_unfinished

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs and return at once."""
        with self._changed:
            self._num_unfinished += len(jobs)
            self._busy.set(is_busy=self._num_unfinished > 0)
        self._loop.call_soon_threadsafe(self._accept, list(jobs))

    def poll(self, timeout_s: float) -> list[Answer]:
        """Jobs that have ended since the last call; waits at most `timeout_s` seconds for the first.

        Raises ClientError if the server cannot be reached, failed at a request or did not answer one in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._failure is not None, timeout=max(0.0, timeout_s))
            ended, self._ended = self._ended, []
            if not ended and self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
        return ended

    def abort(self, tickets: Sequence[int] | None) -> None:
        """End the unfinished jobs of `tickets`, None for all; `poll` returns them."""
        self._loop.call_soon_threadsafe(self._abort, None if tickets is None else set(tickets))

    def give_back(self, count: int) -> list[int]:
        """Remove up to `count` jobs that were not sent, the last ones -> their tickets; `poll` does not return them."""
        return self._call(self._give_back(count))

    def drop(self) -> None:
        """End all unfinished jobs without an answer."""
        self._call(self._drop(None))

    def drain(self, deadline: float) -> None:
        """Wait until no job is unfinished; raises ClientError at the monotonic time `deadline`."""
        with self._changed:
            timeout_s = max(0.0, deadline - time.monotonic())
            if not self._changed.wait_for(lambda: self._num_unfinished == 0, timeout=timeout_s):
                raise ClientError(f"{self._num_unfinished} requests did not end when they were aborted")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Send no request inside the block, and stop the clock of sent requests."""
        self._call(self._hold(True))
        try:
            yield
        finally:
            self._call(self._hold(False))

    def close(self) -> None:
        """End all jobs and the thread; safe to call twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(HANDOVER_TIMEOUT_S)

    def _call(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(HANDOVER_TIMEOUT_S)
        except TimeoutError as error:
            text = f"the thread that sends requests did not answer within {HANDOVER_TIMEOUT_S:.0f} s"
            raise ClientError(text) from error

    # ------------------------------------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.close()

    async def _main(self) -> None:
        async with self._new_session() as self._session:
            self._ready.set()
            while not self._closing.is_set():
                self._watch()
                try:
                    await asyncio.wait_for(self._closing.wait(), WATCH_INTERVAL_S)
                except TimeoutError:
                    continue
            await self._drop(None)

    def _new_session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        # Each request has its own deadline, whose clock stands still while weights are replaced.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        return aiohttp.ClientSession(self._client.address, connector=connector, timeout=timeout)

    def _accept(self, jobs: Sequence[Job]) -> None:
        """Queue new jobs; have the server read the prompts that several of them share."""
        by_prompt: dict[tuple[int, ...], list[Job]] = {}
        for job in jobs:
            by_prompt.setdefault(tuple(job.body["input_ids"]), []).append(job)
        waits: set[int] = set()
        for prompt, group in by_prompt.items():
            if len(group) > 1 and len(prompt) >= MIN_SHARED_PROMPT and self._held_since is None:
                self._readings[self._loop.create_task(self._read(group))] = group
                waits.update(job.ticket for job in group)
        self._waiting.extend(job for job in jobs if job.ticket not in waits)
        self._send()

    async def _read(self, group: Sequence[Job]) -> None:
        """Have the server compute the prompt of a group, and send its jobs, which wait for it.

        If it fails, each job computes the prompt, or fails for the same reason.
        """
        # SGLang gives a request up, with its prompt, that wants the kept tokens of no token.
        body = {name: value for name, value in group[0].body.items() if name != "return_sampling_mask"}
        sampling = {**body["sampling_params"], "max_new_tokens": 0}
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._generate(
                    {**body, "sampling_params": sampling, "return_logprob": False}, self._session
                )
            if text := (reply.get("meta_info") or {}).get("routed_experts"):
                reading = Reading(text=text, first=body[START], end=len(body["input_ids"]) - 1, version=self.version)
                for job in group:
                    job.reading = reading
        except Exception as error:  # whatever it is: nobody looks at this task, and its jobs must not hang
            logger.info("a prompt of %d tokens was not read in advance: %s", len(body["input_ids"]), error)
        task = asyncio.current_task()
        assert task is not None
        self._waiting.extend(self._readings.pop(task, ()))
        self._send()

    def _end_readings(self, tickets: set[int] | None = None) -> list[asyncio.Task[None]]:
        """Give up reading for the jobs of `tickets`, None for all: their groups wait to be sent like other jobs."""
        ended = [
            task
            for task, group in self._readings.items()
            if tickets is None or any(job.ticket in tickets for job in group)
        ]
        for task in ended:
            task.cancel()
            self._waiting.extend(self._readings.pop(task))
        return ended

    def _send(self) -> None:
        while self._waiting and self._has_room(self._waiting[0]) and self._held_since is None:
            job = self._waiting.popleft()
            job.sent_at, job.version = time.monotonic(), self.version
            if job.reading is not None and job.reading.version == self.version:
                job.body = {**job.body, START: job.reading.end}
            else:  # the prompt will be computed with other weights
                job.reading = None
            self._sent[job.ticket] = job
            job.task = self._loop.create_task(self._serve(job))

    def _has_room(self, job: Job) -> bool:
        """True if the server can work on `job` beside what it was sent.

        Before the first answer a response is taken for half as long as it may become.
        """
        if len(self._sent) >= self._window:
            return False
        if self._cache_tokens is None or not self._sent:
            return True
        body = job.body
        expected = self._mean_tokens or len(body["input_ids"]) + body["sampling_params"]["max_new_tokens"] / 2
        return (len(self._sent) + 1) * expected <= WINDOW_SLACK * self._cache_tokens

    def _measure(self, job: Job, reply: Mapping[str, Any]) -> None:
        """Note the time of an answer, and the tokens that were computed for it; an aborted response is too short."""
        self._answered_at = time.monotonic()
        meta = reply.get("meta_info") or {}
        if job.aborted_at is not None or "completion_tokens" not in meta:
            return
        added = len(job.body["input_ids"]) - (meta.get("cached_tokens") or 0) + meta["completion_tokens"]
        self._num_measured = min(self._num_measured + 1, REMEMBERED)
        self._mean_tokens += (added - self._mean_tokens) / self._num_measured

    async def _serve(self, job: Job) -> None:
        try:
            # Not on another idle connection, which may be lost too.
            async with self._new_session() if job.is_repeated else nullcontext(self._session) as session:
                reply = await self._generate({**job.body, "rid": job.rid}, session)
        except Exception as error:  # whatever it is: nobody looks at this task, and its request must not hang
            cause = error if isinstance(error, ClientError) else ClientError(f"{type(error).__name__}: {error}")
            if cause.status in REFUSED_STATUSES:
                self._end(Answer(job, None, is_refused=True))
            elif cause.is_unanswered and not job.is_repeated:
                self._repeat(job, cause)
            elif self._sent.get(job.ticket) is job:
                await self._drop(cause, but=job)
            return
        self._measure(job, reply)
        self._end(Answer(job, reply))

    def _repeat(self, job: Job, cause: ClientError) -> None:
        """Send a request once more whose connection was lost before a byte of the answer came.

        The server may have closed the connection as an idle one. That is safe: a request changes nothing in the server,
        which drops the response that it had perhaps begun. The id is a new one, because SGLang refuses the id of a
        request which it still has.
        """
        if job.aborted_at is not None:
            self._end(Answer(job, None))
        elif self._sent.pop(job.ticket, None) is not None:
            logger.info("%s; the request is sent again", cause)
            job.is_repeated, job.rid = True, secrets.token_hex(16)
            if job.reading is not None:
                job.body, job.reading = {**job.body, START: job.reading.first}, None
            self._waiting.appendleft(job)  # while weights are replaced it waits like others
            self._send()

    async def _generate(self, body: Mapping[str, Any], session: aiohttp.ClientSession) -> dict[str, Any]:
        key = {} if self.extra_key is None else {"extra_key": self.extra_key}
        return await self._client.exchange(session, "/generate", {**body, **key})

    def _end(self, answer: Answer) -> None:
        if self._sent.pop(answer.job.ticket, None) is None:
            return
        self._tell([answer])
        self._send()

    def _tell(self, answers: list[Answer]) -> None:
        with self._changed:
            self._ended.extend(answers)
            self._num_unfinished -= len(answers)
            self._busy.set(is_busy=self._num_unfinished > 0)
            self._changed.notify_all()

    def _abort(self, tickets: set[int] | None) -> None:
        self._end_readings(tickets)
        unsent = [job for job in self._waiting if tickets is None or job.ticket in tickets]
        if unsent:
            gone = {job.ticket for job in unsent}
            self._waiting = deque(job for job in self._waiting if job.ticket not in gone)
            self._tell([Answer(job, None) for job in unsent])
        now = time.monotonic()
        chosen = [job for job in self._sent.values() if tickets is None or job.ticket in tickets]
        fresh = [job for job in chosen if job.aborted_at is None]
        for job in fresh:
            job.aborted_at, job.abort_sent_at = now, now
        if fresh and tickets is None and not self._is_shared:
            self._run_errand("/abort_request", {"abort_all": True})
            return
        for job in fresh:
            self._run_errand("/abort_request", {"rid": job.rid})

    async def _give_back(self, count: int) -> list[int]:
        jobs = [self._waiting.pop() for _ in range(min(count, len(self._waiting)))]
        self._forget(len(jobs))
        return [job.ticket for job in jobs]

    def _forget(self, num_jobs: int, cause: ClientError | None = None) -> None:
        """Note that unfinished jobs are gone, without an answer."""
        with self._changed:
            self._num_unfinished -= num_jobs
            self._busy.set(is_busy=self._num_unfinished > 0)
            self._failure = self._failure or cause
            self._changed.notify_all()

    def _run_errand(self, route: str, body: Mapping[str, Any]) -> None:
        """Post without waiting. The replies to aborted requests show the effect of an abort, or a dead server."""

        async def post() -> None:
            try:
                await self._client.exchange(self._session, route, body)
            except ClientError as error:
                if self._sent and not error.is_unanswered:  # `_watch` repeats it
                    await self._drop(error)

        task = self._loop.create_task(post())
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    def _watch(self) -> None:
        """Check deadlines, and repeat or give up aborts without an answer."""
        now = time.monotonic()
        for job in list(self._sent.values()):
            if self._held_since is None and now - max(job.sent_at, self._answered_at) > self._timeout_s:
                text = f"POST /generate: no complete answer within {self._timeout_s:.1f} s"
                self._loop.create_task(self._drop(ClientError(text)))
                return
            if job.aborted_at is None:
                continue
            if now - job.aborted_at > ABORT_TIMEOUT_S:
                if job.task is not None:
                    job.task.cancel()
                self._end(Answer(job, None))
            elif now - job.abort_sent_at > ABORT_REPEAT_S and self._held_since is None:
                job.abort_sent_at = now
                self._run_errand("/abort_request", {"rid": job.rid})

    async def _drop(self, cause: ClientError | None, *, but: Job | None = None) -> None:
        """End all jobs; `but` is the job whose own task calls this."""
        readings = self._end_readings()
        jobs = [*self._sent.values(), *self._waiting]
        self._sent.clear()
        self._waiting.clear()
        tasks = [job.task for job in jobs if job.task is not None and job is not but]
        for task in tasks:
            task.cancel()
        tasks += readings
        self._forget(len(jobs), cause)
        # The server notices the closed connections and ends the requests.
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _hold(self, on: bool) -> None:
        if on and self._held_since is None:
            self._held_since = time.monotonic()
            self._end_readings()
        elif not on and self._held_since is not None:
            held_s = time.monotonic() - self._held_since
            self._answered_at += held_s
            for job in self._sent.values():
                job.sent_at += held_s
            self._held_since = None
            self._send()


def window_of(info: dict[str, Any]) -> int:
    """Maximum of unanswered requests to a server with this /server_info."""
    states = info.get("internal_states") or [{}]
    running = states[0].get("effective_max_running_requests_per_dp") or info.get("max_running_requests")
    return int(running * WINDOW_SLACK) if running else DEFAULT_WINDOW
