"""The process that runs rollout functions, many episodes at a time. `rollout/user_code/serving.py` has its protocol.

The item of a call is {token_ids, answer, row, max_new_tokens}, a question {observed, stop_token_ids, max_new_tokens},
its answer {token_ids, stopped, is_end}, and the reply {observed}.
"""

from __future__ import annotations

from typing import Any

import orjson

from rollout.episodes.episode import Episode, EpisodeError, Vocabulary, check_rollout_fn
from rollout.episodes.tools import ROLLOUTS
from rollout.user_code.custom_code import is_custom, load_function
from rollout.user_code.serving import Ask, Overlapping, Reply, serve


def load(function: str, tokenizer_file: str, arguments: str) -> Overlapping:
    """The rollout function with this name, built-in, or in a file with `arguments`, a JSON object; it reads text with a
    tokenizer.json."""
    given = orjson.loads(arguments)
    own = is_custom(function)
    found = load_function(function, key="episode.function", arguments=given) if own else ROLLOUTS[function]
    rollout = check_rollout_fn(found, name=function)
    vocabulary = Vocabulary(tokenizer_file)

    async def run(item: dict[str, Any], ask: Ask) -> Reply:
        episode = Episode(
            prompt=vocabulary.decode(item["token_ids"]),
            answer=item["answer"],
            row=item["row"],
            tokens_left=item["max_new_tokens"],
            vocabulary=vocabulary,
            ask=ask,
        )
        await rollout(episode)
        if episode.is_sampling:  # in a task that it has left behind
            raise EpisodeError("it did not wait for the turn that it had asked for")
        return {"observed": episode.unsent()}

    return Overlapping(run=run)


if __name__ == "__main__":
    serve(load)
