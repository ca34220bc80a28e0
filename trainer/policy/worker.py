"""The FSDP worker: one data-parallel rank of the policy, hosted in a Ray actor by `trainer/cluster/policy_group.py`.

Verbs: setup, dry_run, ceilings, train, logprobs, begin_adapter_probe, end_adapter_probe, publish_weights,
save_checkpoint, saved_checkpoint, compare_files, load_checkpoint, sleep, wake. All ranks must be called together where
a verb contains their collectives: all but ceilings and compare_files. What `train` does stands in
`trainer/policy/step.py`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rollout.config import Routing
from rollout.exact.gpu import use_batch_invariant_kernels
from rollout.exact.layers import make_exact
from rollout.processes.gpu_host import listed, rank_lacks
from rollout.processes.inherited import forget_launcher
from rollout.processes.network import use_interface_towards
from rollout.processes.process_marks import ProcessMark, mark_processes
from rollout.processes.stacks import STACKS_FILE, write_stack_when_asked
from rollout.processes.torch_trace import Recorder
from rollout.types import SharedWeights, WeightLayout
from rollout.weights.experts import mixture_of
from rollout.weights.packed_weights import DTYPES
from trainer.batch.train_batch import MicroBatch, RankMiniBatch, StepSamples
from trainer.config.train import TrainConfig
from trainer.config.training import Offload
from trainer.limits.ceilings import Ceilings, find_ceilings
from trainer.limits.estimate import logprob_chunk_tokens
from trainer.limits.floors import GroupLengths
from trainer.limits.memory_plan import CONTEXT_BYTES
from trainer.policy.checkpoint_shards import REJECTED_STEPS, ShardReport, ShardWriter, load_rng, load_shards
from trainer.policy.critic import Critic, ValueModel, load_value_model
from trainer.policy.dry_run import DryRunReport, dry_run
from trainer.policy.host_copy import HostCopy, others_bytes, wait_for_others
from trainer.policy.lora import ProbeAdapter, adapter_scaled, freeze_beside_adapter, without_adapter
from trainer.policy.model import (
    checkpoint_activations,
    compile_layers,
    decoder_layers,
    empty_causal_lm,
    load_rows,
    shard,
)
from trainer.policy.publisher import PolicyPublisher
from trainer.policy.step import TrainingStep
from trainer.policy.train_report import RankReport
from trainer.policy.trainable import StateDict, Trainable
from trainer.rundir.sealed_directory import FileRecord, SealError, compare_files
from trainer.scoring.attention import PACKED_ATTENTION
from trainer.scoring.exact_attention import EXACT_ATTENTION
from trainer.scoring.forward import ScoringModel
from trainer.scoring.routing_replay import make_replayable
from trainer.text.plain import size

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySetup:
    """Settings that a rank needs to join the group."""

    config: TrainConfig
    model_path: Path
    rank: int
    init_method: str | None
    """File at which the ranks of one machine meet, "file://<path>"; None if ranks meet at the store of rank 0."""
    device: str
    """"cpu" or "cuda"."""
    num_threads: int
    """Torch threads on a CPU."""
    log_dir: Path
    """Directory of the file of stacks."""
    host: str = "127.0.0.1"
    """Address at which other machines reach the machine of rank 0."""
    engine_threads: int = 1
    """Compute threads of a rollout engine on a CPU, for its ceilings."""
    critic_path: Path | None = None
    """Model that the critic starts from, if there is one; None for that of the policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyInfo:
    """Facts that a rank reports about itself once the rank is ready."""

    process: ProcessMark
    device_bytes: int | None
    """Memory of the rank's GPU; None on a CPU."""


def use_own_gpu() -> torch.device:
    """Make the one GPU that Ray shows this process torch's current device; not yet run on a GPU.

    Raises RuntimeError if torch sees none, or if its kernels cannot be compiled on this machine.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"torch {torch.__version__} sees no GPU here, and policy.gpus_per_worker asks for one: install the build "
            "of torch for CUDA, or compare nvidia-smi with the CUDA version of the build; parity doctor looks at both"
        )
    if lacks := rank_lacks():
        raise RuntimeError(f"a rank cannot use the GPU of this machine: {listed(lacks)}")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


class PolicyWorker:
    """One FSDP2 rank: master weights, optimizer and the training step."""

    def __init__(self, setup: PolicySetup) -> None:
        forget_launcher()
        write_stack_when_asked(setup.log_dir / STACKS_FILE)
        self._setup = setup
        self._config = setup.config
        self._store: dist.TCPStore | None = None
        self._recorder = Recorder()

    def open_store(self) -> int:
        """Open the store at which the ranks of several machines meet, on rank 0 -> its port, which the system chooses.

        The port is in use from here on, so that nobody can take it before the other ranks come.
        """
        self._store = self._meet(0, is_master=True)
        return self._store.port

    def _meet(self, port: int, *, is_master: bool) -> dist.TCPStore:
        timeout = timedelta(seconds=self._config.policy.start_timeout_s)
        return dist.TCPStore(self._setup.host, port, is_master=is_master, wait_for_workers=False, timeout=timeout)

    def setup(self, store_port: int | None = None) -> PolicyInfo:
        """Join the process group, load the model, shard it, build the optimizer.

        `store_port` is given if the ranks meet at the store of rank 0.
        """
        setup, config = self._setup, self._config
        if store_port is not None and self._store is None:
            self._store = self._meet(store_port, is_master=False)
        torch.manual_seed(config.run.seed)
        if setup.device == "cpu":
            torch.set_num_threads(setup.num_threads)
        self._device = torch.device(setup.device)
        if self._store is not None:
            use_interface_towards(setup.host)
        own_gpu = use_own_gpu() if setup.device == "cuda" else None
        dist.init_process_group(
            # Norms of gradients that lie on the host are summed there.
            "cpu:gloo,cuda:nccl" if setup.device == "cuda" else "gloo",
            init_method=setup.init_method,
            store=self._store,
            rank=setup.rank,
            world_size=config.policy.num_workers,
            timeout=timedelta(seconds=config.policy.step_timeout_s),
            # NCCL connects the ranks here, so that a network that does not work is an error of the start.
            device_id=own_gpu,
        )
        mesh = init_device_mesh(setup.device, (config.policy.num_workers,))
        model = self._load_model(mesh, trained=True)
        self._policy = Trainable(
            model, config.optim, name="policy", dtype=config.policy.dtype, offload=config.policy.offload
        )
        # The policy as the run starts with it; without its adapter it is that still.
        self._reference_on_host = HostCopy()
        has_copy = config.has_reference and not config.policy.lora.rank
        self._reference = self._load_model(mesh, trained=False) if has_copy else None
        reference = without_adapter(model) if config.has_reference and not has_copy else self._reference
        self._critic: Critic | None = None
        if config.has_critic:
            path = setup.critic_path or setup.model_path
            self._critic = Critic(load_value_model(path, mesh, config, self._device), config)
        self._training = TrainingStep(
            config, self._policy, reference=reference, critic=self._critic, device=self._device
        )
        self._shards = ShardWriter(rank=setup.rank, device=self._device, timeout_s=config.policy.step_timeout_s)
        self._probe_adapter: ProbeAdapter | None = None
        self._others_bytes: int | None = None
        """Bytes of the GPU that others held at the first sleep, before the engines started."""
        self._has_woken = False
        self._publisher = PolicyPublisher(self._policy, config)
        return PolicyInfo(
            process=mark_processes([os.getpid()])[0],
            device_bytes=torch.cuda.get_device_properties(0).total_memory if setup.device == "cuda" else None,
        )

    def _load_model(self, mesh: DeviceMesh, *, trained: bool) -> ScoringModel:
        """The model of the run, sharded; frozen if it is not `trained`."""
        policy = self._config.policy
        exact = self._config.rollout.exact
        causal_lm = empty_causal_lm(self._setup.model_path, attention=EXACT_ATTENTION if exact else PACKED_ATTENTION)
        chunk_tokens = logprob_chunk_tokens(self._config, vocab_size=causal_lm.get_output_embeddings().out_features)
        model = ScoringModel(causal_lm, chunk_tokens=chunk_tokens, fp32_head=policy.fp32_head, exact=exact)
        model.requires_grad_(trained)
        if trained and policy.lora.rank:
            freeze_beside_adapter(causal_lm, policy.lora)
        if exact:
            make_exact(causal_lm)
            if self._device.type == "cuda":
                use_batch_invariant_kernels()
        model.eval()  # no dropout: the engine has none, and pi_old must be the policy that samples
        if trained:
            checkpoint_activations(causal_lm.get_decoder(), every=policy.activation_checkpoint_every)
        mixture = mixture_of(causal_lm.config.to_dict())
        if trained and mixture is not None and policy.routing is not Routing.live:
            make_replayable(decoder_layers(causal_lm.get_decoder()), mixture)
            model.with_routes = True
        if policy.torch_compile:
            compile_layers(causal_lm.get_decoder())
        on_host = policy.offload is Offload.parameters
        shard(model, causal_lm.get_decoder(), mesh, policy.dtype, on_host=on_host)
        place = torch.device("cpu") if on_host else self._device
        # What is never updated needs no more digits than the forward takes.
        frozen = DTYPES[policy.dtype.name] if policy.lora.rank else torch.float32
        seed = self._config.run.seed
        load_rows(causal_lm, self._setup.model_path, device=place, frozen=frozen, adapter_seed=seed)
        return model

    def train(
        self, mini_batches: list[RankMiniBatch], samples: StepSamples, step: int, dump_dir: Path | None = None
    ) -> RankReport:
        """One rollout step: each of `batch.passes` takes one optimizer step per mini-batch.

        `samples` are those of the whole step, all ranks. What this rank trained on is written to `dump_dir`.
        """
        return self._training.run(mini_batches, samples, step, dump_dir=dump_dir)

    def dry_run(self, groups: list[GroupLengths]) -> DryRunReport:
        """Forward and backward of one micro-batch of groups of these lengths; nothing is learnt from it.

        Raises RuntimeError if the memory does not suffice.
        """
        path = self._setup.model_path
        return dry_run(self._policy, self._config, groups, device=self._device, model_path=path)

    def logprobs(
        self, micro_batches: list[MicroBatch], temperature: float | None = None, adapter_factor: float = 1.0
    ) -> list[Tensor]:
        """Log-probs [T] float32 (CPU) of each micro-batch under the current weights, without gradient.

        At `sampling.temperature`, or at another one; with `adapter_factor` times the adapter.
        """
        used = self._config.sampling.temperature if temperature is None else temperature
        with torch.no_grad(), adapter_scaled(self._policy.model, adapter_factor):
            micros = (micro.to(self._device) for micro in micro_batches)
            return [self._policy.model(micro, temperature=used).logprobs.cpu() for micro in micros]

    def begin_adapter_probe(self, seed: int, size: float) -> None:
        """Put random numbers in the place of the adapter, or others; see `trainer/run/adapter_probe.py`."""
        self.end_adapter_probe()
        self._probe_adapter = ProbeAdapter(self._policy.model.causal_lm, seed=seed, size=size)

    def end_adapter_probe(self) -> None:
        """Take the adapter back that was there before."""
        if self._probe_adapter is not None:
            self._probe_adapter.end()
            self._probe_adapter = None

    def publish_weights(
        self,
        policy_version: int,
        publishes: bool = True,
        with_base: bool = True,
        layouts: tuple[WeightLayout, ...] = (),
    ) -> SharedWeights | None:
        """Gather all weights; if this rank `publishes`, write them into memory of this machine as the engines hold them
        -> where they are, None if it does not publish.

        Where engines get an adapter, only the adapter is gathered, and `with_base` the frozen weights too. The weights
        are also digested for engines of these `layouts`.
        """
        return self._publisher.publish(policy_version, publishes=publishes, with_base=with_base, layouts=layouts)

    def start_profile(self, directory: Path) -> None:
        """Record this process; the trace is rank_<N>.json.gz in `directory`."""
        self._recorder.start(directory / f"rank_{self._setup.rank}.json.gz")

    def stop_profile(self) -> None:
        """Write the trace."""
        self._recorder.stop()

    def save_checkpoint(self, path: Path, asynchronous: bool) -> None:
        """Write all that this rank holds to the directory `path`; if `asynchronous`, only copy it before returning."""
        state: StateDict = {name: part.state_dict() for name, part in self._learnt().items()}
        state[REJECTED_STEPS] = torch.tensor(self._training.rejected_steps)
        self._shards.save(state, path, asynchronous=asynchronous)

    def saved_checkpoint(self, wait: bool) -> ShardReport | None:
        """Return this rank's report of the last save; None while the rank is writing, unless `wait`."""
        return self._shards.report(wait=wait)

    def compare_files(self, checkpoint: Path, records: dict[str, FileRecord]) -> str | None:
        """Compare this rank's share of the files of a checkpoint with their records -> the damage, None without any."""
        try:
            compare_files(checkpoint, records)
        except SealError as damage:
            return str(damage)
        return None

    def load_checkpoint(self, path: Path, step: int) -> bool:
        """Take back what is in `path`, saved after `step` by any number of ranks.

        False if it was another number, so that the random number generators were seeded anew.
        """
        parts = self._learnt()
        state: StateDict = {name: part.state_dict() for name, part in parts.items()}
        state[REJECTED_STEPS] = rejected_steps = torch.tensor(0)
        load_shards(state, path)  # into the tensors of the state
        for name, part in parts.items():
            part.load_state_dict(state[name])
        self._training.rejected_steps = int(rejected_steps)
        return load_rng(
            path,
            rank=self._setup.rank,
            num_ranks=self._config.policy.num_workers,
            device=self._device,
            seed=self._config.run.seed,
            step=step,
        )

    def _learnt(self) -> dict[str, Trainable[ScoringModel] | Trainable[ValueModel]]:
        """The trained models, by their names in a checkpoint."""
        return {"policy": self._policy} | ({} if self._critic is None else {"critic": self._critic.trainable})

    def ceilings(self) -> tuple[Ceilings, Ceilings | None]:
        """Return the ceilings of a rank and of an engine: measured once per hardware, then cached.

        The ceilings of an engine are unknown where the engine has a GPU and the ranks have none.
        """
        setup, rollout = self._setup, self._config.rollout
        of_rank = find_ceilings(setup.device, num_threads=setup.num_threads)
        if rollout.gpus_per_engine > 0:
            return of_rank, of_rank if setup.device == "cuda" else None
        return of_rank, find_ceilings("cpu", num_threads=setup.engine_threads)

    def sleep(self) -> None:
        """Move everything to the host; safe to call twice. Not yet run on a GPU."""
        for part in self._learnt().values():
            part.sleep()
        if self._reference is not None and not self._reference_on_host.holds:
            self._reference_on_host.take(self._reference.parameters(), device=self._device)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what torch keeps for itself, the other side cannot have
        if self._others_bytes is None:
            self._others_bytes = others_bytes(self._device)

    def wake(self) -> None:
        """Move everything back; safe to call twice."""
        if self._others_bytes is not None and not self._has_woken:
            self._has_woken = True
            self._look_for_room(self._others_bytes)
        for part in self._learnt().values():
            part.wake()
        self._reference_on_host.give_back(device=self._device)

    def _look_for_room(self, before: int) -> None:
        """Warn if the engine, which sleeps for the first time, has not given its memory of the GPU back."""
        kept = wait_for_others(self._device, at_most=before + CONTEXT_BYTES) - before
        if kept > CONTEXT_BYTES:
            log = self._setup.log_dir / f"engine-{self._setup.rank // self._config.rollout.tp_size}.log"
            text = "phase policy wake: the engine sleeps and keeps %s of the GPU, %s are planned: its log is %s"
            logger.warning(f"{text}. cluster.residency=never does without sleep", size(kept), size(CONTEXT_BYTES), log)
