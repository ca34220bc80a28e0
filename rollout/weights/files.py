"""The safetensors files of a model or an adapter: names and shapes of the tensors. Does not import torch."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

WEIGHT_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, from the headers of the safetensors files.

    Beside the files that transformers reads there may be the same weights under other names, such as Mistral's
    consolidated.safetensors; and the layers that some models have behind the last one, to predict several tokens. Both
    are left out. Raises FileNotFoundError if there is none, or a part of them is missing, and ValueError for a damaged
    one, or two sets.
    """
    named = set(indexed_files(directory).values()) or {WEIGHT_FILE}
    there = sorted(directory.glob("*.safetensors"))
    files = [path for path in there if path.name in named] or there
    missing = named - {path.name for path in there}
    if not files or 0 < len(missing) < len(named):
        raise FileNotFoundError(f"no {min(missing) if files else '*.safetensors file'} in {directory}")
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            with safe_open(path, framework="numpy") as file:  # reads the header, not the tensors
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path.name} is damaged, or not a safetensors file: {error}") from error
    behind = _layers_behind(directory)
    return {name: shape for name, shape in shapes.items() if not name.startswith(behind)}


def _layers_behind(directory: Path) -> tuple[str, ...]:
    """Beginnings of the names of tensors in layers behind the last one, of which config.json tells the number."""
    try:
        text = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        first, number = text["num_hidden_layers"], text["num_nextn_predict_layers"]
        return tuple(f"model.layers.{layer}." for layer in range(first, first + number))
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def indexed_files(directory: Path) -> dict[str, str]:
    """Tensor name -> name of its file, as the index says; empty if the weights are one file.

    transformers leaves the index behind where it saves a model in one file over one in several, and the one file where
    it saves several over it. Raises ValueError if both are there: transformers reads the one file, others the several.
    """
    index = directory / INDEX_FILE
    listed: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.is_file() else {}
    files = set(listed.values())
    if WEIGHT_FILE in files or not (directory / WEIGHT_FILE).is_file():
        return listed
    if any((directory / name).is_file() for name in files):
        raise ValueError(f"{WEIGHT_FILE} and the files of {INDEX_FILE} are two sets of weights; remove the older one")
    return {}
