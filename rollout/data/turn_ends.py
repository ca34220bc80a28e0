"""Where a response ends: the tokens at which an engine stops, and the token that the chat template writes there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algorithms.config import Problem
from algorithms.config.similar import similar
from rollout.data.chat_template import ChatTemplate, TemplateError
from rollout.data.data_files import DataError
from rollout.data.special_tokens import control_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EOS_FILES = ("generation_config.json", "config.json")
"""Files of a model that name its end-of-sequence tokens. SGLang stops at those of both."""
ANSWER = "It is so indeed."
PROBES = ((), ({"role": "system", "content": "Be brief."},))
"""What stands before the probe: some templates need a system message, others refuse one."""
STOP_KEY = "sampling.stop"


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, model_path: Path, *, stop: Sequence[str | int] = ()
) -> tuple[int, ...]:
    """Token ids that end a response, sorted: the tokenizer's end of a sequence, those that the model's files name, and
    those of `stop`, which are ids or texts of one token.

    Raises ValueError if there is no such token, because every response would run into sampling.max_new_tokens, and
    DataError if the vocabulary has no such token of `stop`.
    """
    ids = {int(tokenizer.eos_token_id)} if tokenizer.eos_token_id is not None else set()
    for name in EOS_FILES:
        if (model_path / name).is_file():
            ids.update(_eos_ids(json.loads((model_path / name).read_text(encoding="utf-8"))))
    ids.update(_stop_ids(tokenizer, stop))
    if not ids:
        raise ValueError(
            f"{model_path} names no end-of-sequence token: set eos_token in tokenizer_config.json "
            f"or eos_token_id in generation_config.json, or name tokens with {STOP_KEY}"
        )
    return tuple(sorted(ids))


def _eos_ids(described: dict[str, Any]) -> Iterator[int]:
    for part in (described, described.get("text_config") or {}):
        listed = part.get("eos_token_id")
        yield from listed if isinstance(listed, list) else [] if listed is None else [listed]


def _stop_ids(tokenizer: PreTrainedTokenizerBase, stop: Sequence[str | int]) -> Iterator[int]:
    """The id of each member of `stop`. Raises DataError for all that are none."""
    problems = []
    for each in stop:
        try:
            ids = [each] if isinstance(each, int) else tokenizer(each, add_special_tokens=False)["input_ids"]
        except Exception:  # of tokenizers: a vocabulary of whole words has no tokens for other text
            ids = []
        if len(ids) == 1 and 0 <= ids[0] < len(tokenizer):
            yield ids[0]
            continue
        known = sorted(control_tokens(tokenizer))
        remedy = f"Its control tokens are {', '.join(known)}."
        if isinstance(each, str) and (close := similar(each, known)):
            remedy = f"Did you mean {close}? {remedy}"
        problems.append(Problem(key=STOP_KEY, rule="must name tokens of the model", value=each, remedy=remedy))
    if problems:
        raise DataError(*problems)


def control_ends(tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> set[int]:
    """Those of `stop_ids` that are control tokens, and so no text of a response, also if not marked special."""
    control = control_tokens(tokenizer)
    return {each for each in stop_ids if tokenizer.convert_ids_to_tokens(each) in control}


def text_end_note(stop_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, stop: Sequence[str | int]) -> str:
    """A sentence about those of `stop_ids` that are ordinary text, and are not named by `stop`; or ""."""
    ends = set(stop_ids) - control_ends(tokenizer, stop_ids) - set(_stop_ids(tokenizer, stop))
    shown = ", ".join(f"{tokenizer.decode([each])!r} (id {each})" for each in sorted(ends) if each < len(tokenizer))
    files = " or ".join(EOS_FILES)
    return f"responses end at {shown} too, which is ordinary text: eos_token_id in {files} names it" if shown else ""


def turn_end(template: ChatTemplate, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token of its own that `template` writes after an answer, be it the next turn's first.

    None if it writes none, or refuses a short chat.
    """
    for before in PROBES:
        asked = {"role": "user", "content": "Is it so?"}
        chat = [*before, asked, {"role": "assistant", "content": ANSWER}]
        try:
            texts = [template.whole(chat), template.whole([*chat, asked])]
        except TemplateError:
            return None
        # A template may take one turn only.
        if all(problem for _, problem in texts):
            continue
        # The last answer counts first: gpt-oss ends only earlier ones, and a channel of thoughts, with <|end|>.
        for written in (text for text, problem in texts if not problem):
            _, answer, rest = written.rpartition(ANSWER)
            ids: list[int] = tokenizer(rest, add_special_tokens=False)["input_ids"] if answer else []
            if added := [each for each in ids if each in tokenizer.added_tokens_decoder]:
                # A tag such as </answer> closes a part of the answer, which goes on to the end of the turn.
                return next((each for each in added if not _is_tag(each, tokenizer)), added[0])
        return None
    return None


def _is_tag(token_id: int, tokenizer: PreTrainedTokenizerBase) -> bool:
    text = str(tokenizer.added_tokens_decoder[token_id])
    return re.fullmatch(r"</\w+>", text) is not None and text not in control_tokens(tokenizer)


def no_beginning_note(token_id: int, prompts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> str:
    """A sentence if texts of `prompts` end with the turn of the one who asks, and begin no answer; else ""."""
    token = str(tokenizer.added_tokens_decoder[token_id])
    if not any(text.rstrip().endswith(token) for text in prompts):
        return ""
    return (
        f"prompts end with {token}: the chat template writes no beginning of an answer, which the model must sample. A "
        "template with add_generation_prompt writes it"
    )


def past_end_note(token_id: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """A sentence about a turn's end that ends no response."""
    token = tokenizer.convert_ids_to_tokens(token_id)
    return (
        f"the chat template ends an answer with {token}, and no response ends there: it goes on, with turns that the "
        f"model makes up. {STOP_KEY}=['{token}'] ends it there"
    )
