"""Requests to the Hugging Face hub: none of them waits without end for an answer."""

from __future__ import annotations

from functools import partial
from typing import Any

from huggingface_hub import constants, get_session, snapshot_download

LICENCE_FILES = ("LICEN[CS]E*", "[Ll]icen[cs]e*", "NOTICE*", "USE_POLICY*")
"""Patterns of the files that most licences want with every copy of a model."""
SNAPSHOT_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", *LICENCE_FILES]
"""Patterns of the files that are fetched of a hub model: safetensors weights, configuration, tokenizer and licence;
never pickles or code."""
SECOND_COPIES = ["consolidated*"]
"""Patterns of those that are not: the weights of Mistral's models lie there once more, under other names."""
fetch_model = partial(snapshot_download, allow_patterns=SNAPSHOT_FILES, ignore_patterns=SECOND_COPIES)


def limit_silence() -> None:
    """Give every request of this process to the hub a deadline for the next bytes: HF_HUB_DOWNLOAD_TIMEOUT, or 10 s.

    The library has no deadline for questions about a repository. A download as a whole has none either: a model may
    have hundreds of GB.
    """
    hooks = get_session().event_hooks["request"]
    if _limit not in hooks:
        hooks.append(_limit)


def _limit(request: Any) -> None:
    """Set each limit of `request`, an httpx.Request, that is missing: connect, read, write, pool; seconds."""
    limits = request.extensions["timeout"]
    limits.update({name: constants.HF_HUB_DOWNLOAD_TIMEOUT for name, limit in limits.items() if limit is None})
