"""The writers of NeMo-RL, prime-rl, slime and miles, for `bundle_peers.py`: their own code writes a random step.

These trainers need GPUs or Megatron, and are in no package index. So the functions that write the files are taken out
of a checkout of each and called: what they import besides is left empty, and no trainer runs. The tensors have the
names, shapes and types that the loops hand to these functions. Metrics are the trainers' own where they have them.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from bundle_rows import Case, step_metrics
from peer_batch import Batch
from torch import Tensor

PROMPT = 5
"""Tokens of a prompt."""


def writers() -> dict[str, Callable[[Path, Path, Batch], list[Case]]]:
    """Name of a checkout -> what compares its files; it takes the checkout, a directory to write to, and a step."""
    return {"NeMo-RL": _nemo_rl, "prime-rl": _prime_rl, "slime": _slime, "miles": _miles}


def _empty(*names: str, **attributes: Any) -> None:
    """Put modules of these names in place, which have the attributes and nothing else."""
    for name in names:
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(attributes)
        sys.modules[name] = module


def _packages(root: Path, *names: str) -> None:
    """Make packages of a checkout importable without running what is in them."""
    for name in names:
        module = ModuleType(name)
        module.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = module


def _functions(path: Path, names: Sequence[str], namespace: dict[str, Any]) -> dict[str, Any]:
    """Run the definitions of these functions and methods of a file, and nothing else of it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wanted = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]
    module = ast.Module(body=[ast.ImportFrom("__future__", [ast.alias("annotations")], 0), *wanted], type_ignores=[])
    exec(compile(ast.fix_missing_locations(module), str(path), "exec"), namespace)  # noqa: S102 - the peer's code
    return namespace


def _ids(batch: Batch) -> Tensor:
    """[N, P + L] token ids; eight responses each begin with the same prompt."""
    responses, longest = batch.mask.shape
    ids = torch.randint(0, 1000, (responses, PROMPT + longest), generator=torch.Generator().manual_seed(0))
    ids[:, :PROMPT] = (torch.arange(responses) // 8).unsqueeze(1) + torch.arange(PROMPT)
    return ids


def _whole(batch: Batch, values: Tensor) -> Tensor:
    """[N, L] -> [N, P + L], 0 on the prompt and the padding."""
    inside = torch.where(batch.inside, values, torch.zeros_like(values))
    return torch.cat([inside.new_zeros(len(inside), PROMPT), inside], 1)


def _nemo_rl(checkout: Path, place: Path, batch: Batch) -> list[Case]:
    root, unused = checkout / "nemo_rl", {"Any": Any, "Optional": Any}
    iteration = _functions(
        root / "distributed/batched_data_dict.py", ["slice", "make_microbatch_iterator"], dict(unused)
    )

    class BatchedDataDict(dict[str, Any]):
        data = property(lambda self: self)
        size = property(lambda self: len(next(iter(self.values()))))
        slice = iteration["slice"]
        make_microbatch_iterator = iteration["make_microbatch_iterator"]

    class PackedTensor:
        pass

    iteration |= {"SlicedDataDict": dict, "PackedTensor": PackedTensor, "torch": torch}
    log = {"BatchedDataDict": BatchedDataDict, "os": os, "json": json, "np": np, "torch": torch, "print": str}
    write = _functions(root / "utils/logger.py", ["log_batched_dict_as_jsonl"], log)["log_batched_dict_as_jsonl"]
    sample_mask = torch.ones(len(batch.mask))
    sample_mask[3] = 0
    columns = {
        "content": ["text"] * len(batch.mask),
        "rewards": (torch.arange(len(batch.mask)) % 2).float().tolist(),
        "input_lengths": (PROMPT + batch.inside.sum(1)).tolist(),
        "token_ids": _ids(batch).tolist(),
        "token_loss_mask": _whole(batch, batch.mask.long()).tolist(),
        "sample_loss_mask": sample_mask.tolist(),
        "advantages": _whole(batch, batch.advantages).tolist(),
        "generation_logprobs": _whole(batch, batch.rollout).tolist(),
        "prev_logprobs": _whole(batch, batch.old).tolist(),
    }
    write(SimpleNamespace(base_log_dir=str(place)), columns, "train_data_step12.jsonl")
    loss = _functions(root / "algorithms/utils.py", ["calculate_kl", "masked_mean"], unused | {"torch": torch})
    mask = batch.mask * sample_mask.unsqueeze(-1)
    found = step_metrics(place / "train_data_step12.jsonl", "tis")

    def mean(values: Tensor) -> float:
        return float(loss["masked_mean"](values, mask))

    def kl(kind: str) -> float:
        # As ClippedPGLossFn calls it for gen_kl_error; in float64, because the formula loses digits in float32.
        pair = {"logprobs": batch.rollout.double(), "logprobs_reference": batch.old.double()}
        return mean(loss["calculate_kl"](**pair, kl_type=kind, input_clamp_value=None, output_clamp_value=None))

    return [
        _case("NeMo-RL", "`gen_kl_error`", "mismatch/k3", kl("k3"), found),
        _case("NeMo-RL", "`gen_kl_error`, type k1", "mismatch/k1", kl("k1"), found),
        _case("NeMo-RL", "mean of `exp(prev - generation)`", "mismatch/is/raw_mean", mean(_rho(batch)), found),
    ]


def _case(peer: str, name: str, metric: str, theirs: float, found: dict[str, float]) -> Case:
    return Case(peer=peer, name=name, metric=metric, theirs=theirs, ours=found[metric])


def _rho(batch: Batch) -> Tensor:
    return (batch.old.double() - batch.rollout.double()).exp()


def _prime_rl(checkout: Path, place: Path, batch: Batch) -> list[Case]:
    root = checkout / "src"
    _packages(root, "prime_rl", "prime_rl.trainer", "prime_rl.trainer.rl")
    kinds = {name: type(name, (), {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2}) for name in ("DefaultLossConfig",)}
    kinds |= {name: type(name, (), {}) for name in ("TrainerConfig", "CustomLossConfig", "IPOLossConfig", "LossConfig")}
    _empty("prime_rl.configs", "prime_rl.configs.trainer", **kinds)
    _empty("prime_rl.utils", "prime_rl.utils.utils", import_object=None)
    export = importlib.import_module("prime_rl.trainer.rl.token_export")
    ids, lengths = _ids(batch), (PROMPT + batch.inside.sum(1)).tolist()
    ranks = [range(rank, len(ids), 2) for rank in range(2)]
    for rank, members in enumerate(ranks):
        exporter = export.TokenExporter(place, rank)
        names = ("input_ids", "position_ids", "loss_mask", "advantages", "inference_logprobs", "logprobs")
        wide = (
            ids,
            torch.arange(ids.shape[1]).expand_as(ids),
            _whole(batch, batch.mask),
            _whole(batch, batch.advantages),
        )
        values = [*wide, _whole(batch, batch.rollout), _whole(batch, batch.old)]
        micro = {
            name: torch.cat([each[row, : lengths[row]] for row in members]).unsqueeze(0)
            for name, each in zip(names, values, strict=True)
        }
        output = {"logprobs": micro.pop("logprobs"), "entropy": torch.zeros(micro["input_ids"].shape)}
        packed = [lengths[row] for row in members]
        whole: dict[str, Any] = micro | {"env_names": ["math"] * sum(packed)}
        exporter.export(12, 0, whole, output, packed, kinds["DefaultLossConfig"]())
        exporter.mark_stable()
    directory = place / "token_exports" / "step_12"
    kept: list[float] = []
    weights: list[float] = []
    for path in sorted(directory.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            kept += [value for value, on in zip(row["mismatch_kl"], row["loss_mask"], strict=True) if on]
            weights += [value for value, on in zip(row["importance_ratio"], row["loss_mask"], strict=True) if on]
    found = step_metrics(directory, "tis")
    return [
        _case("prime-rl", "mean of `mismatch_kl`", "mismatch/k3", float(np.mean(kept)), found),
        _case("prime-rl", "mean of `importance_ratio`", "mismatch/is/raw_mean", float(np.mean(weights)), found),
    ]


def _rows(batch: Batch, members: Sequence[int]) -> dict[str, Any]:
    """What slime and miles hand over of the responses `members`, lists by column."""
    ids, lengths = _ids(batch), batch.inside.sum(1).tolist()
    own = {"rollout_log_probs": batch.rollout, "log_probs": batch.old, "advantages": batch.advantages}
    return {
        "tokens": [ids[row, : PROMPT + lengths[row]] for row in members],
        "response_lengths": [lengths[row] for row in members],
        "total_lengths": [PROMPT + lengths[row] for row in members],
        "loss_masks": [batch.mask[row, : lengths[row]].int() for row in members],
        "rewards": [0.0 for _ in members],
        "sample_indices": list(members),
        **{name: [each[row, : lengths[row]] for row in members] for name, each in own.items()},
    }


def _mean_rows(peer: str, batch: Batch, found: dict[str, float]) -> list[Case]:
    """slime and miles have these numbers as plain expressions in their losses: no function of theirs is called."""
    delta, mask = batch.old.double() - batch.rollout.double(), batch.mask
    k3 = (torch.exp(delta) - delta - 1)[mask].mean().item()
    return [
        _case(peer, "mean of k3 of the tensors", "mismatch/k3", k3, found),
        _case(peer, "mean of -(log_probs - rollout_log_probs)", "mismatch/k1", -delta[mask].mean().item(), found),
        _case(peer, "`tis` without bounds, mean", "mismatch/is/raw_mean", _rho(batch)[mask].mean().item(), found),
    ]


def _slime(checkout: Path, place: Path, batch: Batch) -> list[Case]:
    _packages(checkout, "slime", "slime.observability")
    parallel = SimpleNamespace(
        is_pipeline_last_stage=lambda **_: True,
        get_tensor_model_parallel_rank=lambda: 0,
        get_context_parallel_rank=lambda: 0,
        get_data_parallel_rank=lambda **_: 0,
        get_data_parallel_world_size=lambda **_: 2,
        get_data_parallel_src_rank=lambda **_: 0,
        get_data_parallel_group_gloo=lambda **_: None,
    )
    _empty("megatron", "megatron.core", mpu=parallel)
    _empty("slime.backends", "slime.backends.megatron_utils")
    _empty("slime.backends.megatron_utils.cp_utils", all_gather_with_cp=lambda value, *_: value)
    writer = importlib.import_module("slime.observability.train_data_utils")
    shards = []
    for rank in range(2):
        members = range(1 - rank, len(batch.mask), 2)
        rewards = {
            "raw_reward": [0.0, 1.0] * (len(batch.mask) // 2),
            "local_raw_reward": [float(n % 2) for n in members],
        }
        shards.append(_rows(batch, members) | rewards | {"partition": list(members), "num_microbatches": [1]})

    def gather(own: Any, into: list[Any], **_: Any) -> None:
        into[0] = own
        into[1] = own | {"rank": 1, "data_parallel_rank": 1, "rollout_data": shards[1]}

    with (
        mock.patch("torch.distributed.get_rank", return_value=0),
        mock.patch("torch.distributed.gather_object", side_effect=gather),
    ):
        arguments = SimpleNamespace(save_debug_train_data=str(place / "slime_{rollout_id}.pt"))
        writer.save_debug_train_data(arguments, rollout_id=12, rollout_data=shards[0])
    return _mean_rows("slime", batch, step_metrics(place / "slime_12.pt", "tis"))


def _miles(checkout: Path, place: Path, batch: Batch) -> list[Case]:
    _packages(checkout, "miles", "miles.utils", "miles.backends", "miles.backends.training_utils")
    state = SimpleNamespace(cp=SimpleNamespace(rank=0, size=2))
    _empty("miles.backends.training_utils.parallel", get_parallel_state=lambda: state)
    writer = importlib.import_module("miles.utils.train_dump_utils")
    cut = importlib.import_module("miles.backends.training_utils.cp_utils").slice_log_prob_with_cp
    arguments = SimpleNamespace(save_debug_train_data=str(place / "miles/{rollout_id}_{rank}.pt"), qkv_format="thd")
    # Two ranks of data, two of context, and two of tensor parallelism, which hold the same.
    for data, context, tensor in [(d, c, t) for d in range(2) for c in range(2) for t in range(2)]:
        columns = _rows(batch, range(data, len(batch.mask), 2))
        columns["raw_reward"] = [0.0] * len(batch.mask)
        state.cp.rank = context
        for name in ("rollout_log_probs", "log_probs", "advantages"):
            shapes = zip(columns[name], columns["total_lengths"], columns["response_lengths"], strict=True)
            columns[name] = [cut(value, total, length) for value, total, length in shapes]
        writer.save_debug_train_data_for_rank(
            arguments,
            rollout_id=12,
            rollout_data=columns,
            rank=4 * data + 2 * context + tensor,
            cp_rank=context,
            cp_size=2,
        )
    return _mean_rows("miles", batch, step_metrics(place / "miles", "tis"))
