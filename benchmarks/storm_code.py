"""User code for `fault_storm.py`: a judge and a tool over HTTP. A call of them goes wrong when it finds an order to.

An order is an empty file `<service>_<fault>` in the storm's directory. The call that removes it carries it out.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

if TYPE_CHECKING:
    from rollout.episodes.episode import Episode

PLACE = Path(os.environ["PARITY_STORM_PLACE"])
GARBAGE = b'{"call": 0, "replies": [}\n\xff\xfe garbage\n'

session = aiohttp.ClientSession()
limit = asyncio.Semaphore(8)


async def reward(response: str) -> float:
    """1 or 0.5, each for half of an untrained model's responses, so that groups disagree."""
    return float(await ask("judge", "0.5" if sum(map(ord, response)) % 2 else "1"))


async def rollout(episode: Episode) -> None:
    """The model works a sum out, the tool shows the first digit of the answer, the model writes the others."""
    said = await episode.generate(stop=[" #### "])
    if said.text.endswith(" #### ") and episode.tokens_left > 1:
        episode.observe(await ask("tool", episode.answer[0]))
        await episode.generate()


async def ask(service: str, text: str) -> str:
    """What a service says to `text`: the same text."""
    async with limit:
        if is_ordered(service, "hang"):
            await asyncio.get_running_loop().create_future()
        if is_ordered(service, "raise"):
            raise RuntimeError("the storm raises")
        if is_ordered(service, "exit"):
            os._exit(3)
        if is_ordered(service, "flood"):
            print("flood " * 700_000)  # noqa: T201 - what user code prints is the matter
            for descriptor in range(3, 31):
                with suppress(OSError):
                    os.write(descriptor, GARBAGE)
        async with session.post((PLACE / service).read_text(), data=text, raise_for_status=True) as reply:
            return await reply.text()


def is_ordered(service: str, fault: str) -> bool:
    """True for one call after each order."""
    with suppress(FileNotFoundError):
        (PLACE / f"{service}_{fault}").unlink()
        return True
    return False
