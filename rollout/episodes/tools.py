"""Built-in rollout functions. A new rollout function is an async function and a row of `ROLLOUTS`."""

from __future__ import annotations

import re

from rollout.episodes.episode import Episode, RolloutFn

EQUALS = "="
MAX_CALLS = 8
_SUM = re.compile(r"(?:[0-9]{1,18}\+){1,8}[0-9]{1,18}=$")


async def calculator(episode: Episode) -> None:
    """The model writes a sum and "=", the calculator writes its value: the tool of the arithmetic task.

    An expression that is not a sum of plain numbers gets no result; nor does any expression after MAX_CALLS calls.
    """
    for _ in range(MAX_CALLS):
        turn = await episode.generate(stop=[EQUALS])
        if not turn.stopped or not turn.text.endswith(EQUALS) or episode.ended:
            return
        expression = _SUM.search(turn.text)
        if expression is not None:
            total = sum(int(term) for term in expression.group().removesuffix(EQUALS).split("+"))
            episode.observe(str(total))
        if episode.ended:
            return
    await episode.generate()


ROLLOUTS: dict[str, RolloutFn] = {"calculator": calculator}
"""Name of a built-in choice of `episode.function` -> rollout function; path.py:name is the other choice."""
