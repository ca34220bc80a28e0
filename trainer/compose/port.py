"""The settings of another trainer's script -> a recipe, with a comment for what it cannot say."""

from __future__ import annotations

from typing import Any

import yaml

from algorithms.config.rules import describe
from trainer.compose.peers import Peer, Settings, as_text, peers
from trainer.config.train import GROUPS, TrainConfig

ALWAYS = ("model=hf", "data=file")
"""Choices that every recipe of a script makes."""
LONGEST = ("data.max_prompt_tokens", "sampling.max_new_tokens", "batch.max_tokens_per_microbatch")
"""The first two must fit into the third."""


def peer_of(settings: Settings) -> Peer:
    """The trainer that knows the most of the keys."""

    def known(peer: Peer) -> float:
        paths = [key.split(".") for key in settings]
        return sum(1 - row[0] / len(path) / 2 for path in paths if (row := peer.row(path)))

    return max(peers().values(), key=known)


def own_defaults() -> dict[str, object]:
    """Key of Parity -> default; of a key that several options of a group have, that of the first of them."""
    options = [(f"{group}.", kind) for group in GROUPS for kind in reversed([*GROUPS[group].values()])]
    kinds: list[tuple[str, type]] = [("", TrainConfig), *options]
    return {each.key: each.default for prefix, kind in kinds for each in describe(kind, prefix=prefix)}


def ported(settings: Settings, peer: Peer, *, source: str) -> str:
    """The recipe that does what the script does, as YAML; `source` is the name of the script."""
    words = dict(word.split("=", 1) for word in ALWAYS)
    found, notes = translated(settings, peer)
    for each in found.values():
        words |= dict(word.lstrip("+").split("=", 1) for word in each)
    defaults = own_defaults()
    prompt, response, both = (int(words.get(key, as_text(defaults[key]))) for key in LONGEST)
    if prompt + response > both:
        words[LONGEST[-1]] = str(prompt + response)
    chosen = [{f"override /{group}": words[group]} for group in GROUPS if group in words]
    tree: dict[str, Any] = {}
    texts = {each.key for each in describe(TrainConfig) if isinstance(each.default, str)}
    for key, value in words.items():
        if key not in GROUPS:
            *sections, name = key.split(".")
            holder = tree
            for section in sections:
                holder = holder.setdefault(section, {})
            holder[name] = value if key in texts else _parsed(value)
    head = yaml.safe_dump({"defaults": ["/train", *chosen, "_self_"]}, sort_keys=False)
    body = yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=110)
    said = "".join(f"{note}\n" for note in ["", *notes]) if notes else ""
    title = f"# Question: What does {source} ({peer.about}) do here?\n# Verified: no, written by parity port\n"
    return f"{title}{head}\n{body}{said}"


def translated(settings: Settings, peer: Peer) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """(Key of the script, or of the defaults -> words, in the order of the table; comments for the rest)."""
    unset = [key for key in peer.defaults if not any(_same(key, given) for given in settings)]
    known = {**settings, **{key: peer.value(key, settings) for key in unset}}
    rows = sorted(known, key=lambda key: (peer.row(key.split(".")) or (0, len(peer.keys)))[1])
    words, notes = dict[str, tuple[str, ...]](), list[str]()
    for key in rows:
        try:
            answer = peer.answer(key.split("."), known[key], known)
            said = "is no key that is known here" if answer is None else answer.said
            if answer and "$" in "".join(answer.words):
                said = f"depends on what only the script knows: {' '.join(answer.words)}"
            elif answer and answer.words:
                words[key] = answer.words
        except ValueError as error:
            said = str(error)
        if said and key in settings and not said.startswith("nothing to write"):
            notes.append(f"# {key}={as_text(known[key])}: {said}")
    return words, notes


def _same(key: str, given: str) -> bool:
    return key == given or key.endswith(f".{given}") or given.endswith(f".{key}")


def _parsed(value: str) -> object:
    """A word as a number, a list, true, false, null or text."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            pass
    if value.startswith("[") and value.endswith("]"):
        return [_parsed(each.strip()) for each in value[1:-1].split(",") if each.strip()]
    return {"true": True, "false": False, "null": None}.get(value, value)
