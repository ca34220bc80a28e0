"""The tokens of a model as text: encode, decode, and the tokens in which a text can end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_PART = "\ufffd"
"""What stands for a part of a character that has several bytes."""


class Vocabulary:
    """A tokenizer without transformers and torch, which a worker needs not load."""

    def __init__(self, tokenizer_file: str) -> None:
        """`tokenizer_file` is the path of a tokenizer.json, which is read when it is needed."""
        self._file = tokenizer_file
        self.enders = cache(self._enders)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer  # the library behind every fast tokenizer

        tokenizer = Tokenizer.from_file(self._file)
        # transformers keeps there what a tokenizer was last called with, and switches it off for a call without.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def size(self) -> int:
        """The largest token id, plus 1."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> list[int]:
        """Text -> token ids with which it reads so after other text, without special tokens around it.

        Some tokenizers, such as those of Llama 2 and Mistral, put a space before what they take for a first word.
        """
        ids = self._ids(text)
        if _indent(self.decode_after(ids, raw=True)) == _indent(text):
            return ids
        for before in ("\n", "."):
            head, whole = self._ids(before), self._ids(before + text)
            if whole[: len(head)] == head:
                return whole[len(head) :]
        return ids

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int], *, raw: bool = False) -> str:
        """Token ids -> text, without special tokens unless `raw`."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=not raw))

    def decode_after(self, token_ids: Sequence[int], *, raw: bool = False) -> str:
        """`decode`, as the tokens read after another: some tokenizers drop a space at the beginning."""
        before, text = self._before
        return self.decode([*before, *token_ids], raw=raw).removeprefix(text)

    @cached_property
    def _before(self) -> tuple[list[int], str]:
        """A token of letters or digits, and its text; nothing if there is none."""
        texts = (([token], self.decode([token])) for token in range(self.size))
        return next((each for each in texts if each[1].isascii() and each[1].isalnum()), ([], ""))

    def special_token(self, name: str) -> int | None:
        """The id of the special token with this name; None if there is none."""
        found = self._tokenizer.token_to_id(name)
        return None if found is None or self.decode([found]) else int(found)

    def has_special(self, text: str) -> bool:
        """True if a special token is in `text`, which no text of a turn holds then."""
        return any(token.special and token.content in text for token in self._added)

    @cached_property
    def _added(self) -> list[AddedToken]:
        return list(self._tokenizer.get_added_tokens_decoder().values())

    def _enders(self, text: str) -> frozenset[int]:
        """The tokens in which `text` can end: those that hold it, or begin with an end of it."""
        ends = tuple(text[at:] for at in range(len(text)))
        has_parts = not text.isascii()
        return frozenset(
            token
            for token, shown in enumerate(self._texts)
            if text in shown or shown.startswith(ends) or (has_parts and _PART in shown)
        )

    @cached_property
    def _texts(self) -> list[str]:
        """The text of every token, as it reads after another."""
        before, text = self._before
        shown = self._tokenizer.decode_batch([[*before, token] for token in range(self.size)])
        return [each.removeprefix(text) for each in shown]


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip(" "))
