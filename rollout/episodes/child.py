"""The process that runs rollout functions, many episodes at a time: lines of JSON in, lines of JSON out.

    python -m rollout.episodes.child FUNCTION@[TOKENIZER_FILE] MEMORY_BYTES

`rollout/episodes/sampler.py` starts, feeds, times and kills the process. In: {"start": id, token_ids, answer, row,
max_new_tokens}, {"turn": id, token_ids, stopped} and {"cancel": id}. Out: {"running": id} before user code runs, so
that a hanging episode is known, {"generate": id, observed, stop_token_ids, max_new_tokens} and {"end": id, observed,
error}.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import IO, Any

import orjson

from rollout.episodes.episode import Episode, RolloutFn, check_rollout_fn
from rollout.episodes.tools import ROLLOUTS
from rollout.processes.child_process import become_child, described, own_arguments
from rollout.processes.custom_code import is_custom, load_function

SEPARATOR = "@"
"""Separator of the function and the tokenizer file on the command line."""


def load(function: str) -> RolloutFn:
    """The rollout function with this name, built-in or in a file."""
    found = load_function(function, key="episode.function") if is_custom(function) else ROLLOUTS[function]
    return check_rollout_fn(found, name=function)


class Server:
    """Runs episodes and sends their requests to the parent."""

    def __init__(self, rollout: RolloutFn, tokenizer_file: str, say: Callable[[object], None]) -> None:
        # The library behind every fast tokenizer, because a worker needs neither transformers nor torch.
        from tokenizers import Tokenizer

        self._rollout = rollout
        self._tokenizer = Tokenizer.from_file(tokenizer_file)
        self._say = say
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._running: dict[int, asyncio.Task[None]] = {}

    async def serve(self, requests: IO[bytes]) -> None:
        """Handle messages until the input ends."""
        reader = asyncio.StreamReader(limit=1 << 30)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests)
        while line := await reader.readline():
            message = orjson.loads(line)
            if "start" in message:
                self._running[message["start"]] = asyncio.create_task(self._episode(message))
            elif "turn" in message:
                self._replies.pop(message["turn"]).set_result(message)
            elif (task := self._running.get(message["cancel"])) is not None:
                task.cancel()

    async def _episode(self, message: dict[str, Any]) -> None:
        number: int = message["start"]

        async def ask(episode: Episode, wish: dict[str, Any]) -> dict[str, Any]:
            self._replies[number] = asyncio.get_running_loop().create_future()
            self._say({"generate": number, **wish})
            reply = await self._replies[number]
            self._say({"running": number})
            return reply

        episode = Episode(
            prompt=self._decode(message["token_ids"]),
            answer=message["answer"],
            row=message["row"],
            tokens_left=message["max_new_tokens"],
            encode=lambda text: list(self._tokenizer.encode(text, add_special_tokens=False).ids),
            decode=self._decode,
            ask=ask,
            token_id=self._tokenizer.token_to_id,
        )
        error = None
        self._say({"running": number})
        try:
            await self._rollout(episode)
        except Exception as caught:
            error = described(caught)
        finally:
            self._running.pop(number, None)
            self._replies.pop(number, None)
        self._say({"end": number, "observed": episode.observed, "error": error})

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


def main(function: str, memory_bytes: int) -> None:
    """Load the function, report that it is loaded, serve."""
    requests, say = become_child(memory_bytes=memory_bytes)
    name, _, tokenizer_file = function.rpartition(SEPARATOR)
    try:
        rollout = load(name)
        if not tokenizer_file:  # the function is only looked at, before a run
            say({"ready": True})
            return
        server = Server(rollout, tokenizer_file, say)
    except Exception as error:
        say({"failed": described(error)})
        return
    say({"ready": True})
    asyncio.run(server.serve(requests))


if __name__ == "__main__":
    main(*own_arguments(sys.argv[1:]))
