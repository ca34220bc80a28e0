"""Special tokens of a tokenizer: those around a prompt, and the texts that it reads as control tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rollout.data.answers import THOUGHT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prompt_ids(texts: list[str], tokenizer: PreTrainedTokenizerBase, *, templated: bool) -> list[list[int]]:
    """Token ids of each text, with the special tokens that a tokenizer puts around a prompt.

    A text that is `templated` has its special tokens. Of any other the beginning-of-sequence token stands once, also if
    the text names it itself, and no end-of-sequence token ends the prompt: the response goes on with it.
    """
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=not templated)["input_ids"]
    return ids if templated else [_open_ended(each, tokenizer) for each in ids]


def _open_ended(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    first, last = 0, len(ids)
    while last and ids[last - 1] == tokenizer.eos_token_id:
        last -= 1
    while last - first > 1 and ids[first] == ids[first + 1] == tokenizer.bos_token_id:
        first += 1
    return ids[first:last]


def response_decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Tokens of a response -> text without special tokens, except marks of thoughts: they tell where the answer is."""
    added = {each for each, token in tokenizer.added_tokens_decoder.items() if token.special}
    special = {each: str(tokenizer.convert_ids_to_tokens(each)) for each in added | set(tokenizer.all_special_ids)}
    dropped = {each for each, text in special.items() if not THOUGHT.fullmatch(text)}
    return lambda token_ids: str(tokenizer.decode([each for each in token_ids if each not in dropped]))


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The texts that the tokenizer reads as control tokens, such as <|im_end|>, wherever they stand."""
    added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
    # Some tokenizers do not mark the tokens of their template.
    control = {text for text, is_special in added.items() if is_special or (text[:2] == "<|" and text[-2:] == "|>")}
    return control | set(tokenizer.all_special_tokens)
