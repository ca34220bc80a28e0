"""An async judge over HTTP: the calls of a reward function beside a plain asyncio client with the same rules.

    python -m benchmarks.judge_calls [--responses 2000]

The server takes 0.5 s per call, refuses 3 % with HTTP 500 and never answers 1 %, drawn anew for every call. Both sides
have 64 calls open at a time, a deadline of 3 s, three tries and a pause of 1 s before the second. A markdown table:
seconds, responses without a reward, calls. The exit status is 1 if a response is lost or the ratio is below 0.9.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp
from aiohttp import web

from rollout.rewards.workers import reward_pool
from rollout.task_config import RewardConfig
from rollout.user_code.pool import Ended

CALL_S = 0.5
REFUSED, HUNG = 0.03, 0.01
OPEN, TIMEOUT_S, TRIES, PAUSE_S = 64, 3.0, 3, 1.0
FLOOR = 0.9
JUDGE = """
import aiohttp

session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


async def reward(response):
    async with session.post("http://127.0.0.1:{port}/judge", json={{"text": response}}) as reply:
        reply.raise_for_status()
        return (await reply.json())["score"]
"""


def serve(listening: socket.socket, pipe: Connection) -> None:
    """Body of the server's process; sends the number of calls when it is asked for it."""
    draw = random.Random(0)  # noqa: S311 - a seeded fault, no secret
    calls = 0

    async def judge(request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        luck = draw.random()
        if luck < HUNG:
            await asyncio.sleep(3600)
        await asyncio.sleep(CALL_S)
        if luck < HUNG + REFUSED:
            raise web.HTTPInternalServerError
        return web.json_response({"score": float(len((await request.json())["text"]))})

    async def count(_: web.Request) -> web.Response:
        nonlocal calls
        counted, calls = calls, 0
        return web.json_response({"calls": counted})

    app = web.Application()
    app.add_routes([web.post("/judge", judge), web.get("/count", count)])
    pipe.send("ready")
    web.run_app(app, sock=listening, print=None, access_log=None)


@contextmanager
def server() -> Iterator[int]:
    """Yield the port of a judge."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        here, there = multiprocessing.Pipe()
        process = multiprocessing.Process(target=serve, args=(listening, there), daemon=True)
        process.start()
        here.recv()
        try:
            yield listening.getsockname()[1]
        finally:
            process.kill()  # handlers that never answer would delay a polite end
            process.join()


async def plain(port: int, responses: list[str]) -> list[float | None]:
    """The scores by an asyncio client in this process."""
    limit = asyncio.Semaphore(OPEN)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def call(text: str) -> float:
            async with session.post(f"http://127.0.0.1:{port}/judge", json={"text": text}) as reply:
                reply.raise_for_status()
                return float((await reply.json())["score"])

        async def score(text: str) -> float | None:
            for number in range(TRIES):
                try:
                    async with limit, asyncio.timeout(TIMEOUT_S):
                        return await call(text)
                except (aiohttp.ClientError, TimeoutError):
                    await asyncio.sleep(PAUSE_S * 2**number)
            return None

        return list(await asyncio.gather(*map(score, responses)))


def pooled(port: int, responses: list[str], directory: Path) -> tuple[list[float | None], float]:
    """(scores by a reward function in its processes, seconds without their start)."""
    file = directory / "judge.py"
    file.write_text(JUDGE.format(port=port), encoding="utf-8")
    config = RewardConfig(
        function=f"{file}:reward", timeout_s=TIMEOUT_S, max_tries=TRIES, retry_pause_s=PAUSE_S, max_open_calls=OPEN
    )
    scores: dict[int, float | None] = {}

    def take() -> None:
        for event in pool.poll(1.0):
            if isinstance(event, Ended):
                scores[event.key] = event.outcome.value and event.outcome.value.score

    with closing(reward_pool(config)) as pool:
        for key in range(2 * OPEN):  # both processes load the function
            pool.submit(-2 - key, {"response": "x", "raw_response": "x", "answer": "", "prompt": "", "row": {}})
        while len(scores) < 2 * OPEN:
            take()
        scores.clear()
        begin = time.perf_counter()
        for key, response in enumerate(responses):
            pool.submit(key, {"response": response, "raw_response": response, "answer": "", "prompt": "", "row": {}})
        while len(scores) < len(responses):
            take()
        return [scores[key] for key in range(len(responses))], time.perf_counter() - begin


async def _counted(port: int) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/count") as reply:
        return int((await reply.json())["calls"])


def main() -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--responses", type=int, default=2000)
    count = parser.parse_args().responses
    responses = [f"response {number}" for number in range(count)]
    expected = [float(len(response)) for response in responses]
    with server() as port, tempfile.TemporaryDirectory() as directory:
        begin = time.perf_counter()
        found = asyncio.run(plain(port, responses))
        seconds = {"asyncio": time.perf_counter() - begin}
        lost = {"asyncio": sum(score != right for score, right in zip(found, expected, strict=True))}
        calls = {"asyncio": asyncio.run(_counted(port))}
        found, seconds["reward.function"] = pooled(port, responses, Path(directory))
        lost["reward.function"] = sum(score != right for score, right in zip(found, expected, strict=True))
        calls["reward.function"] = asyncio.run(_counted(port)) - 2 * OPEN
    rows = [f"| {name} | {took:.1f} | {lost[name]} of {count} | {calls[name]} |" for name, took in seconds.items()]
    ratio = seconds["asyncio"] / seconds["reward.function"]
    lines = ["| | s | responses without their reward | calls |", "| --- | --- | --- | --- |", *rows, ""]
    sys.stdout.write(
        "\n".join([*lines, f"Throughput of reward.function over that of the plain client: {ratio:.2f}.\n"])
    )
    return int(ratio < FLOOR or lost["reward.function"] > 0)


if __name__ == "__main__":
    sys.exit(main())
