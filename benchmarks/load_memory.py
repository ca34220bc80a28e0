"""Peak memory of two ranks while they load a model: each its own rows, against the whole model before sharding.
With --export that of one process while it exports a checkpoint of the model instead.

    python benchmarks/load_memory.py [--hidden 1024] [--layers 16] [--export [--shard-mib MIB]]

Makes a random Qwen2 of that size in bfloat16 in a temporary directory. Every variant runs in fresh processes; the
peak is the largest resident memory during the load minus that before it, file pages included.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollout.config import DType
from rollout.data.arithmetic import save_tokenizer
from rollout.data.dataset import StreamState
from trainer.compose.compose import resolve
from trainer.policy.model import empty_causal_lm, load_causal_lm, load_rows, shard
from trainer.run.export import write_model
from trainer.rundir.checkpoint import POLICY, Checkpoint, RunState
from trainer.scoring.forward import ScoringModel

RECIPE = Path(__file__).parents[1] / "recipes" / "arithmetic_grpo.yaml"
RANKS = 2
VARIANTS = ("whole model, then sharded", "own rows only")


def save_model(path: Path, *, hidden: int, layers: int) -> int:
    """Write a random model, and the tokenizer that an export copies; its number of parameters."""
    config = Qwen2Config(
        vocab_size=32768,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    model = Qwen2ForCausalLM(config)
    torch.nn.Module.to(model, torch.bfloat16)  # in place
    model.save_pretrained(path)
    save_tokenizer(path)
    return sum(parameter.numel() for parameter in model.parameters())


def memory_kib(field: str) -> int:
    """VmRSS or VmHWM (the largest VmRSS so far) of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


def rank_main(rank: int, variant: str, path: Path, results: Path) -> None:
    """Load in one rank and write down the peak above the start, in MiB."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{results}/meet", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    empty_causal_lm(path)  # imports what both variants need
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forgets the largest resident memory so far
    before = memory_kib("VmRSS")
    own_rows = variant == VARIANTS[1]
    causal_lm = empty_causal_lm(path) if own_rows else load_causal_lm(path)
    model = ScoringModel(causal_lm, chunk_tokens=512)
    shard(model, causal_lm.get_decoder(), mesh, DType.bfloat16)
    if own_rows:
        load_rows(causal_lm, path, device=torch.device("cpu"))
    dist.barrier()
    peak, held = memory_kib("VmHWM") - before, memory_kib("VmRSS") - before
    (results / str(rank)).write_text(f"{peak / 1024:.0f} {held / 1024:.0f}", encoding="ascii")
    dist.destroy_process_group()


def save_weights(path: Path, checkpoint: Path) -> None:
    """Write the weights of the model `path` as one rank saves them, in float32; no optimizer, which no export reads."""
    model = ScoringModel(load_causal_lm(path), chunk_tokens=512)
    dcp.save({"policy": {"model": get_model_state_dict(model)}}, checkpoint_id=checkpoint / POLICY, no_dist=True)


def export_main(_rank: int, directory: Path, shard_bytes: int | None) -> None:
    """Export in one process and say the peak above the start, in MiB."""
    torch.set_num_threads(1)
    words = ("model=hf", f"model.path={directory / 'model'}", "rollout=torch", f"run.dir={directory / 'run'}")
    resolution = resolve(RECIPE, words, own_dir=None, multirun=False)
    config = resolution.runs[0].config
    if config is None:
        raise SystemExit("\n".join(map(str, resolution.problems)))
    state = RunState(step=1, policy_version=1, stream=StreamState(seed=0, epoch=0, position=0, digest=""))
    checkpoint = Checkpoint(path=directory / "saved", state=state)
    empty_causal_lm(directory / "model")  # imports what an export needs
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = memory_kib("VmRSS")
    if shard_bytes is None:
        write_model(config, checkpoint, directory / "exported")
    else:
        write_model(config, checkpoint, directory / "exported", max_shard_bytes=shard_bytes)
    peak = memory_kib("VmHWM") - before
    files = sorted((directory / "exported").glob("*.safetensors"))
    largest = max(file.stat().st_size for file in files)
    sys.stdout.write(
        f"export: peak {peak / 1024:.0f} MiB; {len(files)} files, the largest of {largest / 2**20:.0f} MiB\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--export", action="store_true")
    parser.add_argument("--shard-mib", type=int, default=None, help="size of a file of an export; left out: as always")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        count = save_model(path, hidden=args.hidden, layers=args.layers)
        if args.export:
            sys.stdout.write(f"{count:,} parameters: {count * 4 / 2**20:.0f} MiB in float32\n")
            save_weights(path, Path(directory) / "saved")
            shard_bytes = None if args.shard_mib is None else args.shard_mib * 2**20
            mp.spawn(export_main, args=(Path(directory), shard_bytes))
            return
        sys.stdout.write(f"{count:,} parameters: {count * 4 / 2**20:.0f} MiB in float32, {RANKS} ranks\n")
        for variant in VARIANTS:
            with tempfile.TemporaryDirectory() as results:
                mp.spawn(rank_main, args=(variant, path, Path(results)), nprocs=RANKS)
                found = [(Path(results) / str(rank)).read_text(encoding="ascii").split() for rank in range(RANKS)]
            for rank, (peak, held) in enumerate(found):
                sys.stdout.write(f"{variant}, rank {rank}: peak {peak} MiB, held afterwards {held} MiB\n")


if __name__ == "__main__":
    main()
