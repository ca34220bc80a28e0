"""Reads the files of a checkpoint as data: whoever wrote them, nothing in them is called.

torch.distributed.checkpoint unpickles the index of a checkpoint (.metadata) and each value that is not a tensor, and a
pickle can call any function. Here the index may name the classes of an index only, and values are read as weights are.
`load_shards` in `checkpoint_shards.py` uses both classes.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.serialization import _get_layout

from trainer.rundir.checkpoint import CheckpointError

INDEX = ".metadata"


def _memory_format(owner: object, name: str) -> object:
    """Member `name` of the only enum of an index: early releases of Python 3.11 write it as a call of getattr."""
    if owner is not _MEM_FORMAT_ENCODING:
        raise CheckpointError(f"it asks for {name} of something else than a memory format, which could run code")
    return _MEM_FORMAT_ENCODING[name]


_PARTS = (
    Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, TensorProperties, MetadataIndex,
    StorageMeta, _StorageInfo, _MEM_FORMAT_ENCODING, torch.Size, _get_layout,
)  # fmt: skip
_KNOWN: dict[tuple[str, str], Any] = {
    **{(part.__module__, part.__qualname__): part for part in _PARTS},
    **{("torch", name): kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)},
    ("builtins", "getattr"): _memory_format,
    # The place where it was written. Python 3.13 calls the module pathlib._local.
    **{(module, "PosixPath"): PurePosixPath for module in ("pathlib", "pathlib._local")},
}
"""(module, name) in an index -> what it stands for. None of these does anything but hold its arguments."""


class DataReader(FileSystemReader):
    """The files of a checkpoint; the index is read here, once, before torch looks at anything."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError if the index in the directory `path` is more than data, or damaged."""
        super().__init__(path)
        self._index = _read_index(path / INDEX)
        self._index.storage_meta = StorageMeta(load_id=self.load_id)

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        return self._index


class DataPlanner(DefaultLoadPlanner):
    """Fills a state dict; a value that is not a tensor may be a number, a text or a collection of these."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"the value of {name} is no data: {error}") from error
        set_element(self.original_state_dict, self.mappings[name], loaded)


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise CheckpointError(f"it names {module}.{name}, which could run code")
        return _KNOWN[module, name]


def _read_index(path: Path) -> Metadata:
    """The index in the file `path`, of data only, whose files lie beside it. Raises CheckpointError."""
    try:
        index = _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
        files = {stored.relative_path for stored in index.storage_data.values()}
        if not isinstance(index, Metadata) or any(Path(file).name != file for file in files):
            raise CheckpointError("it leads out of the checkpoint")
    except Exception as error:  # damaged bytes can raise anything
        text = f"{path} is not the index of a checkpoint of Parity: {error}. Use another checkpoint."
        raise CheckpointError(text) from error
    return index
