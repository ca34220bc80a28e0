"""The settings of another trainer's script -> a recipe, with a comment for what it cannot say."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from algorithms.config import Problem
from algorithms.config.rules import describe
from trainer.compose.compose import resolve
from trainer.compose.peer_script import Script
from trainer.compose.peers import DEPENDS, NOTHING, Peer, Settings, as_text, peers
from trainer.config.train import GROUPS, TrainConfig

ALWAYS = ("model=hf", "data=file")
"""Choices that every recipe of a script makes."""
NO_REWARD = "TODO.py:reward"
"""A file that is not there: a dry run refuses it."""
TOP_K = 256
"""What the refusal of a truncation without top_k proposes."""
LONGEST = ("data.max_prompt_tokens", "sampling.max_new_tokens", "batch.max_tokens_per_microbatch")
"""The first two must fit into the third."""
ELSEWHERE = ("model.path", "data.train_path", "data.eval_path", "reward.function", "run.resume_from")
"""Files that need not be where the script is ported."""


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


def ported(script: Script, peer: Peer, *, source: str) -> tuple[str, list[Problem]]:
    """(The recipe that does what the script does, as YAML; problems that it has apart from files that are elsewhere).

    `source` is the name of the script. Values that Parity refuses become comments.
    """
    words = dict(word.split("=", 1) for word in ALWAYS)
    settings = _with_mappings(script.settings, peer)
    found, notes = translated(settings, peer, script.lines)
    for each in found.values():
        words |= dict(word.lstrip("+").split("=", 1) for word in each)
    notes += script.comments
    if "reward.function" not in words:
        words["reward.function"] = NO_REWARD
        notes.append(f"# reward.function={NO_REWARD}: the script names no rule; choose one, or write a function")
    for key in ("model.path", "data.train_path", "data.eval_path"):
        if key not in words:
            notes.append(f"# {key}: the script names none that can be read; set it")
    if _needs_top_k(words):
        words["sampling.top_k"] = str(TOP_K)
        notes.append(f"# sampling.top_k={TOP_K}: with top_p or min_p SGLang returns the kept tokens, which this bounds")
    defaults = own_defaults()
    prompt, response, both = (_parsed(words.get(key, as_text(defaults[key]))) for key in LONGEST)
    if isinstance(prompt, int) and isinstance(response, int) and isinstance(both, int) and prompt + response > both:
        words[LONGEST[-1]] = str(prompt + response)
    title = f"# Question: What does {source} ({peer.about}) do here?\n# Verified: no, written by parity port\n"
    problems = _problems(_recipe(words))
    while refused := [problem for problem in problems if problem.key in words]:
        for problem in refused:
            value = words.pop(problem.key, "the same")
            notes.append(f"# {problem.key}={value}: left out, Parity's default is taken; {problem}")
        problems = _problems(_recipe(words))
    notes += [f"# parity train refuses this recipe: {each}" for each in problems]
    said = "".join(f"{' '.join(note.split())}\n" for note in ["", *notes]) if notes else ""
    return f"{title}{_recipe(words)}{said}", problems


def _problems(recipe: str) -> list[Problem]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ported.yaml"
        path.write_text(recipe, encoding="utf-8")
        found = resolve(path, (), own_dir=None, multirun=False, unneeded=ELSEWHERE).problems
    return [replace(each, key=each.key.rpartition(": ")[2]) for each in found]


def _with_mappings(settings: Settings, peer: Peer) -> Settings:
    """`x_kwargs.a=1` and `x_kwargs.b=2`, which have no rows of their own, as one value of `x_kwargs`."""
    joined: dict[str, Any] = {}
    for key, value in settings.items():
        holder, _, name = key.rpartition(".")
        row = peer.row(key.split("."))
        if holder.endswith("_kwargs") and peer.row(holder.split(".")) and (row is None or row[0]):
            joined.setdefault(holder, {})[name] = _parsed(as_text(value)) if isinstance(value, str) else value
        else:
            joined[key] = value
    return joined


def _recipe(words: Mapping[str, str]) -> str:
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
    return f"{head}\n{body}"


def _needs_top_k(words: Mapping[str, str]) -> bool:
    """True if a server needs a top_k beside the top_p or min_p of a script that leaves it open."""
    top_p, min_p, top_k = (_parsed(words.get(f"sampling.{name}", "")) for name in ("top_p", "min_p", "top_k"))
    is_cut = (isinstance(top_p, int | float) and top_p < 1) or (isinstance(min_p, int | float) and min_p > 0)
    return words.get("rollout") != "torch" and is_cut and top_k in ("", -1)


def translated(
    settings: Settings, peer: Peer, lines: Mapping[str, int] = MappingProxyType({})
) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """(Key of the script, or of the defaults -> words, in the order of the table; comments for the rest).

    `lines` are those of the script that set the keys.
    """
    unset = [key for key in peer.defaults if not any(_same(key, given) for given in settings)]
    # A script may set an older name of a key, which the row of the newer one names whole.
    names = {row[1]: key for key in settings if (row := peer.row(key.split("."))) and not row[0]}
    older = {key: names[row[1]] for key in unset if (row := peer.row(key.split("."))) and row[1] in names}
    given = {**settings, **{key: settings[name] for key, name in older.items()}}
    known = {**given, **{key: peer.value(key, given) for key in unset if key not in older}}
    rows = sorted(known, key=lambda key: (peer.row(key.split(".")) or (0, len(peer.keys)))[1])
    words, notes = dict[str, tuple[str, ...]](), list[str]()
    for key in rows:
        try:
            answer = peer.answer(key.split("."), known[key], known)
            said = "is no key that is known here" if answer is None else answer.said
            if answer and answer.words:
                words[key] = answer.words
        except ValueError as error:
            said = str(error)
        if said and (key in settings or said.startswith(DEPENDS)) and not said.startswith(NOTHING):
            place = f" (line {lines[key]})" if key in lines else "" if key in settings else f" ({peer.about}'s default)"
            notes.append(f"# {key}={as_text(known[key])}: {said}{place}")
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
    try:
        if value[:1] in ("[", "{"):
            return json.loads(value)
    except ValueError:
        pass
    if value.startswith("[") and value.endswith("]"):
        return [_parsed(each.strip()) for each in value[1:-1].split(",") if each.strip()]
    return {"true": True, "false": False, "null": None}.get(value, value)
