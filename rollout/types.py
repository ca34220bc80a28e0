"""The nouns of a rollout: Prompt -> GenerateRequest -> Generation -> Sample -> SampleGroup. Plain, picklable, no torch.

Requests and generations are lists, as engines and functions of the user write them. A `Sample` holds arrays: the driver
goes over every token of a step several times. Each of them has len(token_ids) entries, and index t describes token t.
T: tokens of one sample (prompt and response), R: response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout.config import Quantization

MAX_LOGPROB = 1e-4
"""A log-prob may exceed 0 by rounding only."""


class FinishReason(Enum):
    """Why a response ended."""

    stop = "stop"
    """The model emitted the end-of-sequence token; it is part of the response and is trained."""
    length = "length"
    """max_new_tokens was reached: the response is truncated."""
    abort = "abort"
    """The engine gave the request up before it was complete."""
    failed = "failed"
    """The rollout function of an episode failed; see rollout/episodes/."""


@dataclass(kw_only=True, slots=True)
class Prompt:
    """One question of the dataset, tokenized once."""

    prompt_id: int
    """Position in the dataset; stable over epochs and restarts."""
    token_ids: list[int]
    """[P] what the engine is given, special tokens included."""
    text: str
    """The prompt as text, for the sample log."""
    answer: str
    """The reference answer that the reward compares with."""
    row: dict[str, Any] = field(default_factory=dict)
    """The other columns of the row as plain JSON values, for functions of the user."""


@dataclass(kw_only=True, slots=True)
class SamplingParams:
    """How one response is sampled. The engine's log-prob is after temperature, before any truncation."""

    temperature: float
    """Divides the logits; 0 means greedy."""
    max_new_tokens: int
    """Upper bound on R."""
    seed: int
    """Unique per sample, non-negative, < 2**31; derived from (run seed, step, prompt id, sample index)."""
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, the tokenizer's end-of-sequence among them."""


@dataclass(kw_only=True, slots=True)
class GenerateRequest:
    """One response to be sampled."""

    prompt_id: int
    sample_index: int
    """0 .. group_size - 1: which sample of the group."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    """`max_new_tokens` bounds the whole response, the tokens of `resumed` included."""
    resumed: Generation | None = None
    """The first part of the response, where it was aborted before: the engine samples the rest."""
    answer: str = ""
    """The reference answer, for rollout functions; engines do not look at it."""
    row: dict[str, Any] = field(default_factory=dict)
    """As Prompt.row, for rollout functions; engines are not sent it."""

    def for_engine(self) -> GenerateRequest:
        """The request without what engines have no use for, which may be large."""
        return replace(self, row={}) if self.row else self


@dataclass(kw_only=True, slots=True)
class Generation:
    """What an engine returned for one request. Tokens in, tokens out: never re-tokenized text.

    The whole response, also where a part of it was sampled earlier or under other weights.
    """

    token_ids: list[int]
    """[R] response tokens, the end-of-sequence token included when it was sampled."""
    logprobs: list[float] | None
    """[R] log pi_rollout of each token; None if the engine returned none (the sample is then dropped)."""
    token_versions: list[int]
    """[R] policy version of the weights that sampled each token."""
    finish_reason: FinishReason
    sampled: list[bool] | None = None
    """[R] False where a rollout function wrote the token (its log-prob is 0); None: the model sampled all of them."""

    @property
    def policy_version(self) -> int:
        """The oldest version of the response. Raises ValueError for an empty one."""
        return min(self.token_versions)

    @property
    def num_sampled(self) -> int:
        """Tokens that the model sampled: what a rollout function wrote costs no sampling and is not trained on."""
        return len(self.token_ids) if self.sampled is None else sum(self.sampled)


class Completion(NamedTuple):
    """The answer to a request that was submitted, complete or aborted."""

    ticket: int
    """As it was submitted under."""
    generation: Generation


def are_logprobs(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which of `values` [N] are log-probabilities: numbers, finite, and at most 0 but for rounding -> [N]."""
    return np.isfinite(values) & (values <= MAX_LOGPROB)


@dataclass(kw_only=True, slots=True, eq=False)
class Sample:
    """One trainable token sequence, prompt and response."""

    prompt_id: int
    sample_index: int
    token_ids: NDArray[np.int64]
    """[T] prompt and everything after it."""
    response_mask: NDArray[np.bool_]
    """[T] True where pi_rollout sampled the token. Never overwritten."""
    rollout_logprobs: NDArray[np.float64]
    """[T] log pi_rollout at the sampling temperature; 0.0 off the mask."""
    token_versions: NDArray[np.int64]
    """[T] completed optimizer steps of the weights that sampled the token; 0 off the mask."""
    finish_reason: FinishReason
    text: str = ""
    """The decoded response, for rewards and the sample log only: never tokenized again."""
    reward: float | None = None
    """What the advantage is computed from (shaped: task reward plus penalties)."""
    correct: bool | None = None
    """Whether the task's own check passed (unshaped); dynamic sampling and accuracy look at this."""

    def __post_init__(self) -> None:
        """Takes sequences of numbers too. Raises ValueError for what cannot be trained on."""
        self.token_ids = np.asarray(self.token_ids, dtype=np.int64)
        self.response_mask = np.asarray(self.response_mask, dtype=np.bool_)
        self.rollout_logprobs = np.asarray(self.rollout_logprobs, dtype=np.float64)
        self.token_versions = np.asarray(self.token_versions, dtype=np.int64)
        lengths = [
            len(values) for values in (self.token_ids, self.response_mask, self.rollout_logprobs, self.token_versions)
        ]
        if len(set(lengths)) != 1:
            raise ValueError(
                f"sample {self.prompt_id}/{self.sample_index}: token_ids, response_mask, rollout_logprobs and "
                f"token_versions differ in length: {', '.join(map(str, lengths))}"
            )
        if not self.response_mask.any():
            raise ValueError(f"sample {self.prompt_id}/{self.sample_index}: no response token")
        if self.response_mask[0]:
            raise ValueError(f"sample {self.prompt_id}/{self.sample_index}: the first token cannot be a response")
        wrong = self.response_mask & ~are_logprobs(self.rollout_logprobs)
        if wrong.any():
            token = int(wrong.argmax())
            raise ValueError(
                f"sample {self.prompt_id}/{self.sample_index}: log-prob {self.rollout_logprobs[token]} "
                f"of token {token} is not a log-probability"
            )

    def __eq__(self, other: object) -> bool:
        """Whether every field is the same, number by number."""
        if not isinstance(other, Sample):
            return NotImplemented
        return all(np.array_equal(getattr(self, each.name), getattr(other, each.name)) for each in fields(self))

    @property
    def num_response_tokens(self) -> int:
        return int(np.count_nonzero(self.response_mask))

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the first that was sampled."""
        return int(self.response_mask.argmax())

    @property
    def response_versions(self) -> NDArray[np.int64]:
        """[R] policy version of every response token."""
        versions: NDArray[np.int64] = self.token_versions[self.response_mask]
        return versions

    @property
    def policy_version(self) -> int:
        """The oldest version of the response."""
        return int(self.response_versions.min())


@dataclass(kw_only=True, slots=True)
class SampleGroup:
    """The samples of one prompt: the unit of the group baseline."""

    prompt: Prompt
    samples: list[Sample] = field(default_factory=list)

    @property
    def rewards(self) -> list[float]:
        """Rewards of all samples; raises if one has not been scored."""
        rewards = [sample.reward for sample in self.samples]
        missing = [i for i, reward in enumerate(rewards) if reward is None]
        if missing:
            raise ValueError(f"prompt {self.prompt.prompt_id}: samples {missing} have no reward")
        return [reward for reward in rewards if reward is not None]


@dataclass(kw_only=True, slots=True)
class TensorSpec:
    """Where one tensor lies in a weight bucket."""

    name: str
    """Hugging Face parameter name."""
    dtype: str
    """torch dtype without the prefix: "bfloat16", "float32", "float16"."""
    shape: tuple[int, ...]
    offset: int
    """First byte within the bucket."""
    num_bytes: int
    digest: str
    """xxh3-64 of the tensor's bytes, 16 hex digits, computed by the trainer."""


@dataclass(kw_only=True, slots=True)
class BucketSpec:
    """Some of the policy's tensors, and where they lie one after the other."""

    start: int
    """First byte within the region."""
    num_bytes: int
    tensors: list[TensorSpec]


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionAddress:
    """Memory of another process of this machine that holds weights; see rollout/weights/shared_weights.py."""

    path: str
    """Opened while the process that wrote it lives."""
    region_id: str
    """Random: tells the region from whatever else may come to lie under `path`."""
    num_bytes: int
    """Of the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationReport:
    """What one sync lost to the grid of quantised engines."""

    quantization: Quantization
    errors: dict[str, float]
    """Name -> norm of (held - policy's) / norm of the policy's, of every quantised tensor."""

    @property
    def error_mean(self) -> float:
        """Over tensors."""
        return sum(self.errors.values()) / len(self.errors)

    @property
    def worst(self) -> str:
        """Name of the tensor with the largest error."""
        return max(self.errors, key=lambda name: self.errors[name])

    def metrics(self) -> dict[str, float | None]:
        return {"sync/quantization_error_mean": self.error_mean, "sync/quantization_error_max": self.errors[self.worst]}

    def __str__(self) -> str:
        return (
            f"{self.quantization.name}: {len(self.errors)} tensors with relative errors of {self.error_mean:.2e} on "
            f"average, {self.errors[self.worst]:.2e} at most ({self.worst})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BroadcastAddress:
    """Where the receivers of weights meet their sender."""

    host: str
    port: int
    num_receivers: int
    timeout_s: float
    """Bounds every broadcast of all weights, the first one with the forming of the group."""


@dataclass(kw_only=True, slots=True)
class SharedWeights:
    """What engines of the trainer's machine are sent instead of the weights."""

    address: RegionAddress
    policy_version: int
    buckets: list[BucketSpec]
    quantization: QuantizationReport | None = None
    """What these weights lost to a grid; None for plain weights."""
    broadcast: BroadcastAddress | None = None
    """Where workers of other machines get the weights; None if nobody receives them."""

    @property
    def num_tensors(self) -> int:
        return sum(len(bucket.tensors) for bucket in self.buckets)


@dataclass(kw_only=True, slots=True)
class WeightBucket:
    """Some of the policy's tensors, flattened into one buffer."""

    policy_version: int
    index: int
    """0 .. num_buckets - 1."""
    num_buckets: int
    tensors: list[TensorSpec]
    data: np.ndarray
    """[num_bytes] uint8; read-only on the receiving side."""
    region: RegionAddress | None = None
    """Where other processes of this machine can map `data`; None if it is memory of this process alone."""
    start: int = 0
    """First byte of `data` within `region`."""
