"""The child process that runs user code: lines of JSON in, lines of JSON out, until the input ends.

    in:  {"call": number, "items": [...], "timeout_s": seconds}, {"answer": question, "value": ...}, {"cancel": number}
    out: {"ready": items per call, "overlap": bool, "files": {path: digest}} or {"failed": text}; then {"call": number,
         "replies": [...]}, and of an async call before it {.., "begun": true}, {.., "ask": ..., "question": number} and
         {.., "withdrawn": true}

A reply is what the call returned for one item, as a JSON object; {"error": text} if it failed, with "late" if it passed
its deadline, with "final" if a further try would fail alike. `rollout/user_code/pool.py` starts, feeds, times and kills
the process. All messages are text; nothing is unpickled.

All async calls of a process run in one event loop that lives as long as the process, so that a client or a semaphore
at module level can be used by all of them.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import traceback
import types
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

import orjson

from rollout.processes.child_process import MAX_LINE_BYTES, Pipes, become_child, described
from rollout.user_code.custom_code import FOREIGN, is_async_function, own_files
from rollout.user_code.mark import NOBODY, Mark

Reply = dict[str, Any]
Ask = Callable[[Any], Awaitable[Any]]
"""Sends a question of a call to the parent and returns the answer."""

_call: ContextVar[int] = ContextVar("call", default=NOBODY)
"""The call to which the running task belongs; a task that user code starts takes it over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocking:
    """Work of a function that computes: one call after the other, in the main thread, without a running loop."""

    run: Callable[[Sequence[Any]], list[Reply]]
    """The items of a call -> one reply for each."""
    items: int
    """Most items of a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlapping:
    """Work of an async function: many calls of one item at a time, in one loop."""

    run: Callable[[Any, Ask], Awaitable[Reply]]
    items: ClassVar[int] = 1


Load = Callable[..., Blocking | Overlapping]
"""(function, further arguments) -> the function, loaded."""


def serve(load: Load) -> None:
    """Body of the process: `module MEMORY_BYTES MARK FUNCTION [MORE]`; MARK is the descriptor of the shared memory."""
    memory_bytes, descriptor, function, *more = sys.argv[1:]
    pipes = become_child(memory_bytes=int(memory_bytes))
    mark = Mark(int(descriptor))
    mark.close()
    with asyncio.Runner() as runner:
        try:
            # A client that is made when the file is imported may look for the loop in which it will be used.
            is_async = is_async_function(function)
            work = runner.run(_loaded(load, function, *more)) if is_async else load(function, *more)
        except BaseException as error:  # sys.exit() of a file that is a program too
            pipes.say({"failed": raised(error)})
            return
        pipes.say({"ready": work.items, "overlap": isinstance(work, Overlapping), "files": own_files()})
        if isinstance(work, Blocking):
            _serve_blocking(work, pipes, mark)
        else:
            runner.run(_Calls(work, pipes.say, mark).serve(pipes.requests))


async def _loaded(load: Load, *arguments: str) -> Blocking | Overlapping:
    return load(*arguments)


def _serve_blocking(work: Blocking, pipes: Pipes, mark: Mark) -> None:
    for line in pipes.requests:
        message = orjson.loads(line)
        if "call" not in message:
            continue  # a call that nobody waits for any more
        mark.set(message["call"])
        try:
            replies = work.run(message["items"])
        except BaseException as error:  # what would end the process is an error of the call
            replies = [{"error": raised(error)}] * len(message["items"])
        mark.clear()
        pipes.say({"call": message["call"], "replies": replies})


class _Calls:
    """The calls of an async function that are under way."""

    def __init__(self, work: Overlapping, say: Callable[[object], None], mark: Mark) -> None:
        self._work = work
        self._say = say
        self._mark = mark
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._questions = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        """Question -> its answer. An answer may come when a call has given its question up and asks the next."""

    async def serve(self, requests: IO[bytes]) -> None:
        """Handle messages until the input ends."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._marked_task)
        reader = asyncio.StreamReader(limit=2 * MAX_LINE_BYTES)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests)
        while line := await reader.readline():
            message = orjson.loads(line)
            if "call" in message:
                call = message["call"]
                self._tasks[call] = loop.create_task(self._run(call, message["items"][0], message["timeout_s"]))
            elif "answer" in message:
                answer = self._answers.pop(message["answer"], None)
                if answer is not None and not answer.done():  # else the call has ended, or waits no longer
                    answer.set_result(message["value"])
            elif (task := self._tasks.pop(message["cancel"], None)) is not None:
                task.cancel()

    async def _run(self, call: int, item: Any, timeout_s: float) -> None:
        _call.set(call)
        self._say({"call": call, "begun": True})
        limit = asyncio.timeout(timeout_s)

        async def ask(question: Any) -> Any:
            number = next(self._questions)
            answer = self._answers[number] = asyncio.get_running_loop().create_future()
            limit.reschedule(None)  # the time of the engines is not the time of the call
            self._say({"call": call, "ask": question, "question": number})
            try:
                return await answer
            except asyncio.CancelledError:  # user code has given the question up, with a deadline of its own
                self._answers.pop(number, None)  # the answer may have come in the same moment
                self._say({"call": call, "withdrawn": True})
                raise
            finally:
                if not limit.expired():
                    limit.reschedule(asyncio.get_running_loop().time() + timeout_s)

        try:
            async with limit:
                reply = await _marked(self._work.run(item, ask), call, self._mark)
        except asyncio.CancelledError as error:
            if call not in self._tasks:
                return  # the parent has cancelled the call
            reply = {"error": raised(error)}
        except Exception as error:
            late = isinstance(error, TimeoutError) and limit.expired()
            reply = {"error": f"no answer within {timeout_s:g} s", "late": True} if late else {"error": raised(error)}
        self._tasks.pop(call, None)
        self._say({"call": call, "replies": [reply]})

    def _marked_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
        call = _call.get()
        if call != NOBODY:
            coroutine = _marked(coroutine, call, self._mark)
        return asyncio.Task(coroutine, loop=loop, **more)


async def _marked(coroutine: Any, call: int, mark: Mark) -> Any:
    return await _steps(coroutine, call, mark)


@types.coroutine
def _steps(coroutine: Any, call: int, mark: Mark) -> Generator[Any, Any, Any]:
    """Run `coroutine`; the mark names `call` while its code runs."""
    value: Any = None
    thrown: BaseException | None = None
    while True:
        mark.set(call)
        try:
            awaited = coroutine.send(value) if thrown is None else coroutine.throw(thrown)
        except BaseException as end:
            mark.clear()
            if isinstance(end, StopIteration):
                return end.value
            if end is thrown or isinstance(end, (Exception, asyncio.CancelledError)):
                raise
            # asyncio would end the whole loop, or tell nobody: an exit, or the panic of a library in another language.
            raise _Exit(raised(end)) from end
        mark.clear()
        try:
            value, thrown = (yield awaited), None
        except BaseException as error:  # a cancellation belongs to the coroutine
            value, thrown = None, error


class _Exit(Exception):
    """A call has asked the process to exit; the text is that of `raised`."""


def raised(error: BaseException) -> str:
    """A text about an exception of user code: one line, with the last line of the user's own that led to it."""
    if isinstance(error, _Exit):
        return str(error)
    while isinstance(error, BaseExceptionGroup):  # of a TaskGroup; its own text names no cause
        error = error.exceptions[0]
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(FOREIGN)]
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{described(error)}{place}"
