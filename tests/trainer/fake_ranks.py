"""One rank of a large run without its memory and without the other ranks: what its tensors would take is counted.

Weights are a sparse file, tensors are fake (a shape and no numbers), and the process group is torch's `fake` one,
which receives nothing. The rank's own code runs over them; what it allocates and frees is real but for the numbers.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.batch.packing import micro_batch
from trainer.config.train import TrainConfig
from trainer.config.training import HFModelConfig
from trainer.limits.estimate import logprob_chunk_tokens
from trainer.limits.floors import GroupLengths
from trainer.policy.dry_run import group_samples
from trainer.policy.model import checkpoint_activations, empty_causal_lm, shard
from trainer.policy.trainable import Trainable
from trainer.scoring import attention, logprob_head
from trainer.scoring.forward import ScoringModel


@contextmanager
def one_rank_of(count: int) -> Iterator[None]:
    """This process as rank 0 of `count` ranks that are not there: what it holds is real, what it receives is not."""
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def sparse_model(path: Path, **sizes: Any) -> Path:
    """A directory with config.json and bfloat16 weights of a Qwen2 of these sizes, all zeros that take no disk."""
    config = AutoConfig.for_model("qwen2", **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    header: dict[str, object] = {}
    end = 0
    for name, parameter in model.named_parameters():
        start, end = end, end + 2 * parameter.numel()
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.mkdir()
    config.save_pretrained(path)
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path


class AllocatedBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are alive; FSDP empties and refills some of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.take(leaf)
        return out

    def take(self, tensor: Tensor) -> None:
        """Count the storage of `tensor`, if it is not counted yet."""
        storage = tensor.untyped_storage()
        if storage not in self._sizes:
            size = [storage.nbytes()]
            self._sizes[storage] = size
            self._add(size[0])
            weakref.finalize(storage, lambda: self._add(-size[0]))

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """Take note of the new size of a storage."""
        held = self._sizes.get(storage)
        if held is not None:
            self._add(size - held[0])
            held[0] = size

    def _add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def peak_of_a_rank(config: TrainConfig, groups: Sequence[GroupLengths], monkeypatch: pytest.MonkeyPatch) -> int:
    """Largest number of bytes that rank 0 of a run on GPUs holds in two micro-batches of `groups`, without AdamW."""
    monkeypatch.setattr(attention, "flash_runs", lambda *states: True)  # as on a GPU: no float32 copies
    monkeypatch.setattr(logprob_head, "CPU_BLOCK_ELEMENTS", logprob_head.GPU_BLOCK_ELEMENTS)
    count = AllocatedBytes()
    resize = torch.UntypedStorage.resize_

    def counted_resize(storage: torch.UntypedStorage, size: int) -> object:
        count.resized(storage, size)
        return resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", counted_resize)
    with one_rank_of(config.policy.num_workers):
        # Made before tensors are fake: the mesh and the packing read numbers.
        mesh = init_device_mesh("cpu", (config.policy.num_workers,))
        micro = micro_batch(group_samples(groups))
        assert isinstance(config.model, HFModelConfig)
        causal_lm = empty_causal_lm(Path(config.model.path))
        chunk_tokens = logprob_chunk_tokens(config, vocab_size=causal_lm.get_output_embeddings().out_features)
        model = ScoringModel(causal_lm, chunk_tokens=chunk_tokens, fp32_head=config.policy.fp32_head).eval()
        checkpoint_activations(causal_lm.get_decoder(), every=config.policy.activation_checkpoint_every)
        shard(model, causal_lm.get_decoder(), mesh, config.policy.dtype)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            policy = Trainable(model, config.optim, name="policy", dtype=config.policy.dtype)
            for parameter in model.parameters():
                assert isinstance(parameter.data, DTensor)
                count.take(parameter.data.to_local())
            with count:
                for _ in range(2):
                    scores = policy.model(micro, temperature=1.0)
                    policy.backward(scores.logprobs.sum())
                    del scores
    return count.peak
