"""The weights in the safetensors files of a model's directory, under the names that the model has for them.

A dense model has a tensor for each of the files'. A mixture of experts has one for the matrices of all experts of a
layer, which are read expert by expert (rollout/weights/experts.py).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rollout.weights.experts import is_experts, parts_per_expert, sources
from rollout.weights.files import INDEX_FILE, WEIGHT_FILE, indexed_files
from trainer.rundir.sealed_directory import inside


def weight_files(path: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file of the directory that holds it.

    As with transformers, the index says which files are read, not what is in them. Raises OSError if there is none, and
    ValueError if the index names a file outside the directory.
    """
    files = [inside(path, name) for name in sorted(set(indexed_files(path).values()))]
    if not files and not (path / WEIGHT_FILE).is_file():
        raise FileNotFoundError(f"model.path={path} has neither {WEIGHT_FILE} nor {INDEX_FILE}")
    found: dict[str, Path] = {}
    for file in files or [path / WEIGHT_FILE]:
        with safe_open(file, framework="pt") as tensors:
            found |= dict.fromkeys(tensors.keys(), file)
    return found


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the model, where it lies on the disk."""

    parts: tuple[tuple[Path, str], ...]
    """(file, name there) of the tensor, or of the matrices of its experts, expert after expert."""
    parts_per_row: int = 0
    """Number of matrices that make up a row, which is an expert; 0 for a tensor that lies there as it is."""

    def shape(self) -> tuple[int, ...]:
        """Its shape; reads the header of a file."""
        return self.header()[0]

    def header(self) -> tuple[tuple[int, ...], str]:
        """Its shape, and the type of its numbers as safetensors names it; reads the header of a file."""
        file, name = self.parts[0]
        with safe_open(file, framework="pt") as tensors:
            stored = tensors.get_slice(name)
            first, kind = tuple(stored.get_shape()), str(stored.get_dtype())
        if not self.parts_per_row:
            return first, kind
        return (len(self.parts) // self.parts_per_row, first[0] * self.parts_per_row, *first[1:]), kind

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` in the type of the file, on the host; a single number as it is.

        Raises ValueError for experts of other sizes.
        """
        with ExitStack() as stack:
            chosen = self.parts[start * self.parts_per_row : stop * self.parts_per_row] or self.parts
            files: dict[Path, Any] = {
                file: stack.enter_context(safe_open(file, framework="pt")) for file in {file for file, _ in chosen}
            }
            if not self.parts_per_row:
                file, name = self.parts[0]
                stored = files[file].get_slice(name)
                rows: Tensor = stored[start:stop] if stored.get_shape() else files[file].get_tensor(name)
                return rows
            matrices = [files[file].get_tensor(name) for file, name in chosen]
            if len({matrix.shape for matrix in matrices}) > 1:
                raise ValueError(f"{chosen[0][0]}: {chosen[0][1]} and its like have several shapes")
            return torch.cat(matrices).view(stop - start, -1, matrices[0].shape[-1])

    def whole(self) -> Tensor:
        """All of it, as `rows`."""
        return self.rows(0, next(iter(self.shape()), 1))

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the files, of the matrices of experts in order."""
        return tuple(name for _, name in self.parts)

    @property
    def origin(self) -> str:
        """File and name of the tensor, or of its first matrix, for an error."""
        file, name = self.parts[0]
        return f"{file}: {name}"


def stored_tensors(path: Path, prefix: str = "") -> dict[str, StoredTensor]:
    """Name in the model -> tensor, of what the files of `path` hold under names that begin with `prefix`, which is left
    out. Raises like `weight_files`."""
    files = {name.removeprefix(prefix): file for name, file in weight_files(path).items() if name.startswith(prefix)}
    return {
        name: StoredTensor(
            tuple((files[part], prefix + part) for part in parts),
            parts_per_expert(name) if is_experts(name) and name not in files else 0,
        )
        for name, parts in sources(files).items()
    }
