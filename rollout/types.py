"""Data types of a rollout: Prompt -> GenerateRequest -> Generation -> Sample -> SampleGroup. Picklable, no torch.

Requests and generations hold lists, as engines and custom functions produce them. A `Sample` holds arrays, because the
driver reads every token of a step several times. Each array has len(token_ids) entries, and index t describes token t.
T: tokens of one sample (prompt and response), R: response tokens, P: prompt tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rollout.config import Quantization, Routing
from rollout.routes import Routes
from rollout.supports import Supports, no_supports

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOGPROB = 1e-4
"""Largest valid log-prob: a log-prob may exceed 0 by rounding only."""


class FinishReason(Enum):
    """Reason why a response ended."""

    stop = "stop"
    """The model emitted the end-of-sequence token, which is part of the response and is trained."""
    length = "length"
    """The response reached max_new_tokens and is truncated."""
    abort = "abort"
    """The engine ended the request before the response was complete."""
    failed = "failed"
    """The rollout function of an episode failed (see rollout/episodes/), or no engine could serve the request."""


@dataclass(kw_only=True, slots=True)
class Prompt:
    """One question of the dataset, tokenized once."""

    prompt_id: int
    """Position in the dataset; stable over epochs and restarts."""
    token_ids: list[int]
    """[P] token ids that the engine receives, special tokens included."""
    text: str
    """The prompt as text, for the sample log."""
    answer: str
    """The reference answer for the reward."""
    row: dict[str, Any] = field(default_factory=dict)
    """The other columns of the row as plain JSON values, for custom functions."""


@dataclass(kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters of one response. The engine's log-prob is that of the distribution that it draws from."""

    temperature: float
    """Divisor of the logits; 0 means greedy."""
    max_new_tokens: int
    """Upper bound on R."""
    seed: int
    """Unique per sample, non-negative, < 2**31; derived from (run seed, step, prompt id, sample index)."""
    top_p: float = 1.0
    """Tokens are drawn from the most probable ones, up to this mass; 1 for all."""
    top_k: int = -1
    """Tokens are drawn from so many of the most probable ones; -1 for all."""
    min_p: float = 0.0
    """Smallest probability of a token that is drawn, as a share of the largest one; 0 for all."""
    with_supports: bool = False
    """True if the engine returns the support of every token: training needs it for truncated sampling."""
    routes: Routing = Routing.live
    """What the engine returns of the routes of the tokens that it reads: training replays them."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, including the tokenizer's end-of-sequence token."""

    @property
    def with_routes(self) -> bool:
        return self.routes is not Routing.live

    @property
    def is_truncated(self) -> bool:
        """True if tokens are drawn from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(kw_only=True, slots=True)
class GenerateRequest:
    """Request for one response."""

    prompt_id: int
    sample_index: int
    """Index of the sample in its group, 0 .. group_size - 1."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    """Sampling parameters; `max_new_tokens` bounds the whole response, the tokens of `resumed` included."""
    resumed: Generation | None = None
    """First part of a response that was aborted before; the engine samples the rest. None for a new response."""
    first_route: int = 0
    """Number of tokens at the beginning of the prompt whose routes are known: the engine returns those that follow."""
    answer: str = ""
    """The reference answer, for rollout functions; engines ignore it."""
    row: dict[str, Any] = field(default_factory=dict)
    """Columns as in Prompt.row, for rollout functions; not sent to engines."""

    @property
    def first_new_route(self) -> int:
        """The first token of prompt and resumed response whose route is not known."""
        begun = self.resumed
        return self.first_route + (0 if begun is None or begun.routes is None else len(begun.routes))

    def for_engine(self) -> GenerateRequest:
        """The request without `row`, which may be large and which engines do not use."""
        return replace(self, row={}) if self.row else self


@dataclass(kw_only=True, slots=True)
class Generation:
    """The response of an engine to one request. Tokens in, tokens out: never re-tokenized text.

    A generation always holds the whole response, also if a part was sampled earlier or under other weights.
    """

    token_ids: list[int]
    """[R] response tokens, the end-of-sequence token included when it was sampled."""
    logprobs: list[float] | None
    """[R] log pi_rollout of each token; None if the engine returned none (the sample is then dropped)."""
    token_versions: list[int]
    """[R] policy version of the weights that sampled each token."""
    finish_reason: FinishReason
    sampled: list[bool] | None = None
    """[R] False where a rollout function wrote the token (its log-prob is 0); None: the model sampled all tokens."""
    shared_prompt_tokens: int = 0
    """Tokens of the prompt that the engine did not compute for this response, because another one has the same."""
    supports: Supports | None = None
    """[R] the support of each token, where the request asks for it."""
    routes: Routes | None = None
    """Routes of the tokens from `first_route` of the request to the last but one of the response, where the request
    asks for them; each as it was when its token was first read. None without a token."""

    @property
    def supports_or_empty(self) -> Supports:
        """[R] the support of each token, of size 0 where the engine returned none."""
        return no_supports(len(self.token_ids)) if self.supports is None else self.supports

    @property
    def policy_version(self) -> int:
        """The oldest policy version in the response. Raises ValueError for an empty response."""
        return min(self.token_versions)

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the model sampled; tokens that a rollout function wrote are not trained on."""
        return len(self.token_ids) if self.sampled is None else sum(self.sampled)


class Completion(NamedTuple):
    """The answer to a submitted request, complete or aborted."""

    ticket: int
    """Ticket under which the request was submitted."""
    generation: Generation


def are_logprobs(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """[N] True where an entry of `values` [N] is a log-probability: a finite number, at most 0 up to rounding."""
    return np.isfinite(values) & (values <= MAX_LOGPROB)


@dataclass(kw_only=True, slots=True, eq=False)
class Sample:
    """One trainable token sequence, prompt and response; in an evaluation the prompt alone where no response came."""

    prompt_id: int
    sample_index: int
    token_ids: NDArray[np.int64]
    """[T] token ids of the prompt and of all tokens after it."""
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
    """Reward from which the advantage is computed (shaped: task reward plus penalties)."""
    correct: bool | None = None
    """True if the task's own check passed (unshaped); dynamic sampling and accuracy read this field."""
    extracted: str | None = None
    """The answer that a built-in reward reads off the response; None if it reads none, or if the function is custom."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Further numbers that a reward function of the user returned, by their key in its dict."""
    supports: Supports | None = None
    """[T] the support of each token, of size 0 off the mask; None if all tokens come from the whole vocabulary."""
    routes: Routes | None = None
    """Routes of the first tokens, as far as the one before the last sampled token; None if the trainer chooses the
    experts."""

    def __post_init__(self) -> None:
        """Convert sequences of numbers to arrays. Raises ValueError for a sample that cannot be trained on."""
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
        if not self.response_mask.any() and self.finish_reason is not FinishReason.failed:
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
        if self.supports is not None and (problem := self.supports.problem(self.token_ids, self.response_mask)):
            raise ValueError(f"sample {self.prompt_id}/{self.sample_index}: {problem}")
        if self.routes is not None and not self.num_read <= len(self.routes) <= len(self.token_ids):
            where = f"sample {self.prompt_id}/{self.sample_index}"
            raise ValueError(f"{where}: {len(self.routes)} routes, and {self.num_read} tokens before the last one")

    def __eq__(self, other: object) -> bool:
        """True if all fields are equal, number by number."""
        if not isinstance(other, Sample):
            return NotImplemented
        return all(np.array_equal(getattr(self, each.name), getattr(other, each.name)) for each in fields(self))

    @property
    def num_response_tokens(self) -> int:
        return int(np.count_nonzero(self.response_mask))

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens before the first sampled token."""
        return int(self.response_mask.argmax())

    @property
    def num_read(self) -> int:
        """Number of tokens before the last sampled token, from which all sampled ones are predicted."""
        return int(np.flatnonzero(self.response_mask)[-1]) if self.response_mask.any() else 0

    @property
    def response_versions(self) -> NDArray[np.int64]:
        """[R] policy version of every response token."""
        versions: NDArray[np.int64] = self.token_versions[self.response_mask]
        return versions

    @property
    def policy_version(self) -> int:
        """The oldest policy version in the response."""
        return int(self.response_versions.min())


@dataclass(kw_only=True, slots=True)
class SampleGroup:
    """The samples of one prompt: the unit of the group baseline."""

    prompt: Prompt
    samples: list[Sample] = field(default_factory=list)

    @property
    def rewards(self) -> list[float]:
        """Rewards of all samples. Raises ValueError if a sample has not been scored."""
        rewards = [sample.reward for sample in self.samples]
        missing = [i for i, reward in enumerate(rewards) if reward is None]
        if missing:
            raise ValueError(f"prompt {self.prompt.prompt_id}: samples {missing} have no reward")
        return [reward for reward in rewards if reward is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSpec:
    """A LoRA adapter without its numbers: `rollout/weights/adapter.py` has the formula."""

    rank: int
    alpha: int
    """The adapter is multiplied by alpha / rank."""
    layers: tuple[str, ...]
    """Names of the linear layers that have one, in the model's order."""


@dataclass(kw_only=True, slots=True)
class TensorSpec:
    """Position and digest of one tensor in the packed weights."""

    name: str
    """Hugging Face parameter name."""
    dtype: str
    """torch dtype without the prefix: "bfloat16", "float32", "float16"."""
    shape: tuple[int, ...]
    offset: int
    """First byte within the weights."""
    num_bytes: int
    digest: str
    """xxh3-64 of the tensor's bytes, 16 hex digits, computed by the trainer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionAddress:
    """Address of memory with weights in another process of this machine; see rollout/weights/shared_weights.py."""

    path: str
    """Path of the memory file; valid while the process that wrote it lives."""
    region_id: str
    """Random id that distinguishes the region from any later file under the same `path`."""
    num_bytes: int
    """Bytes of the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationReport:
    """Quantisation error introduced by one weight sync."""

    quantization: Quantization
    errors: dict[str, float]
    """Name of a quantised tensor -> norm of (engine's tensor - policy's tensor) / norm of the policy's tensor."""

    @property
    def error_mean(self) -> float:
        """Mean relative error over the quantised tensors."""
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


class Digester(Protocol):
    """Makes the digests that an engine must report, while the weights pass by."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Take the tensor `name` as it is sent; it must not change before `result`. Raises LayoutError."""
        ...

    def result(self) -> list[dict[str, str]]:
        """Rank of the engine -> parameter -> digest, 16 hex digits. Raises WeightSyncError if a tensor is missing."""
        ...


class WeightLayout(ABC):
    """How an engine holds the weights: all that the digests that it reports depend on. Hashable and picklable."""

    @abstractmethod
    def expected(self, *, sent: Iterable[str], of_adapter: bool) -> Digester:
        """The digester of what is sent together: the adapter, or the other weights. Raises LayoutError for tensors, by
        their names `sent`, that cannot make up what the engine holds."""


EngineDigests = dict[WeightLayout, list[dict[str, str]]]
"""Layout -> rank -> parameter -> digest that the engine must report, 16 hex digits."""


@dataclass(kw_only=True, slots=True)
class SharedWeights:
    """Announcement of one version of the weights in shared memory, sent to engines instead of the weights."""

    address: RegionAddress
    policy_version: int
    tensors: list[TensorSpec]
    quantization: QuantizationReport | None = None
    """Quantisation error of these weights; None for plain weights."""
    engine_digests: EngineDigests = field(default_factory=dict)
    """Of the layouts that were known when the weights were published."""
    base: SharedWeights | None = None
    """The frozen weights, if these are an adapter. They stay the same during a run."""


@dataclass(kw_only=True, slots=True)
class PackedWeights:
    """One version of the policy's tensors, flattened into one buffer."""

    policy_version: int
    tensors: list[TensorSpec]
    data: np.ndarray
    """[num_bytes] uint8; read-only on the receiving side."""
    region: RegionAddress | None = None
    """Region from which other processes of this machine can map `data`; None if `data` is private memory."""
    engine_digests: EngineDigests = field(default_factory=dict)
    """As in SharedWeights."""
    base: PackedWeights | None = None
    """As in SharedWeights."""
