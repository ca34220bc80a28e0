"""config.json and generation_config.json: of a model for a directory with other weights of it, and of a new model.

transformers writes what its own release made of a file. Release 5 writes the rotary embedding as `rope_parameters`
alone; release 4 does not read that name, and takes its default base without a warning; likewise the number of experts.
So the files of a model are copied, and in the form of release 5 the names that release 4 reads stand beside the new
ones.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from rollout.weights.packed_weights import dtype_name
from trainer.models.directory import CONFIG_FILE, DTYPE_KEYS, EOS_KEY, GENERATION_FILE

ROPE_KEY = "rope_parameters"
THETA_KEY, PART_KEY = "rope_theta", "partial_rotary_factor"
"""Fields of `rope_parameters` that release 4 reads outside of `rope_scaling`."""
EXPERTS_KEY = "num_experts"
"""Release 5 writes `num_local_experts` for it, which Qwen3-MoE of release 4 does not read."""
CODE_KEY = "auto_map"
"""Names Python files, which are not copied: whoever allows a model its code (trust_remote_code) would miss them."""
SPECIAL_TOKEN_KEYS = ("bos_token_id", EOS_KEY, "pad_token_id")


def copy_description(source: Path, target: Path, *, dtype: torch.dtype, stop_ids: Sequence[int]) -> None:
    """Write the two files of the model in `source` to `target`, with weights of `dtype`, which end at `stop_ids`.

    Every other field stays as it is, and a file without a change is copied. `stop_ids` are the tokens that end a
    response: generate() stops at those in generation_config.json, which is written also if `source` has none; an engine
    may read those in config.json too. The files must be readable: see `broken_file` in trainer/models/directory.py.
    """
    of_weights = {key: dtype_name(dtype) for key in DTYPE_KEYS}
    described = _read(source / CONFIG_FILE)
    described.pop(CODE_KEY, None)
    parts = [described, described.get("text_config")]  # the second of a model that reads more than text
    for part in (each for each in parts if isinstance(each, dict)):
        part |= {key: name for key, name in of_weights.items() if key in part}
        if EOS_KEY in part:
            _end_at(part, stop_ids)
    described.setdefault(DTYPE_KEYS[0], of_weights[DTYPE_KEYS[0]])
    if ROPE_KEY in described:
        described |= _fields_of_release_4(source)
    _write(target / CONFIG_FILE, described, source=source / CONFIG_FILE)
    path = source / GENERATION_FILE
    generation = (
        _read(path) if path.is_file() else {key: described[key] for key in SPECIAL_TOKEN_KEYS if key in described}
    )
    _end_at(generation, stop_ids)
    _write(target / GENERATION_FILE, generation, source=path)


def release_4_note(directory: Path) -> str:
    """A sentence if transformers 4 cannot read the rotary embedding of the model in `directory`; or ""."""
    described = _read(directory / CONFIG_FILE)
    if ROPE_KEY not in described or THETA_KEY in described:
        return ""
    return (
        f"{directory / CONFIG_FILE}: each kind of layer has other {ROPE_KEY}, as in the model that the run began with. "
        "transformers 4 does not read them and takes its defaults. Load it with transformers 5"
    )


def describe_for_release_4(directory: Path) -> None:
    """Add what transformers 4 reads to the files that transformers 5 has written of a new model into `directory`."""
    described = _read(directory / CONFIG_FILE)
    described |= {DTYPE_KEYS[0]: described[DTYPE_KEYS[1]], **_fields_of_release_4(directory)}
    _write(directory / CONFIG_FILE, described)
    describe_tokenizer_for_release_4(directory)


def describe_tokenizer_for_release_4(directory: Path) -> None:
    """Put the names that both releases read in place of those that release 5 has written of a tokenizer, and none of
    code."""
    path = directory / "tokenizer_config.json"
    fields = dict(given := _read(path) if path.is_file() else {})
    fields.pop(CODE_KEY, None)
    if given.get("tokenizer_class") == "TokenizersBackend":  # two names of one class
        fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(given.get("extra_special_tokens"), list):
        fields["additional_special_tokens"] = fields.pop("extra_special_tokens")
    if fields != given:
        _write(path, fields)


def _end_at(fields: dict[str, Any], stop_ids: Sequence[int]) -> None:
    """Have `fields` name the `stop_ids`, as they do if they list the same in another order."""
    given = fields.get(EOS_KEY)
    if set(given if isinstance(given, list) else [given]) != set(stop_ids):
        fields[EOS_KEY] = stop_ids[0] if len(stop_ids) == 1 else list(stop_ids)


def _fields_of_release_4(directory: Path) -> dict[str, Any]:
    """The rotary embedding and the number of experts of the model in `directory` in the fields that transformers 4
    reads.

    No rotary embedding if each kind of layer has another one: for this release 4 has names that differ from family to
    family.
    """
    found = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    experts = {EXPERTS_KEY: found.num_experts} if EXPERTS_KEY in found.attribute_map else {}
    rope = getattr(found, ROPE_KEY, None) or {}
    if THETA_KEY not in rope:
        return experts
    moved = {key: rope[key] for key in (THETA_KEY, PART_KEY) if key in rope}
    scaling = {key: value for key, value in rope.items() if key != THETA_KEY}
    if rope["rope_type"] == "longrope" and "long_factor" in rope:  # Phi-3 of release 4 refuses every other field
        scaling = {"type": "longrope"} | {key: rope[key] for key in ("short_factor", "long_factor")}
    # An explicit null, because some families scale by default.
    return experts | moved | {"rope_scaling": None if rope["rope_type"] == "default" else scaling}


def _read(path: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return fields


def _write(path: Path, fields: dict[str, Any], *, source: Path | None = None) -> None:
    """Write `fields`, or copy the file `source` if it has the same."""
    if source is not None and source.is_file() and _read(source) == fields:
        shutil.copyfile(source, path)
    else:
        path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
