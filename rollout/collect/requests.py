"""Requests to engines and samples from their answers: seeds, sampling parameters, samples.

Used by `rollout/collect/collector.py`, `rollout/collect/dispatch.py` and `rollout/collect/evaluate.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np
import xxhash

from rollout.config import Routing, SamplingConfig
from rollout.supports import joined, no_supports
from rollout.types import GenerateRequest, Generation, Sample, SamplingParams


class SeedSource:
    """Sampling seeds of one step: hashes of (run seed, step, prompt id, sample index), none given twice.

    The same prompt can come twice in a step (a small dataset); its second group then gets other seeds.
    """

    def __init__(self, seed: int, *, step: int) -> None:
        """`step` is >= 1 for training; evaluation uses a negative number of its own."""
        self._seed = seed
        self._step = step
        self._used: set[int] = set()

    @property
    def step(self) -> int:
        return self._step

    def reserve(self, seeds: Iterable[int]) -> None:
        """Exclude `seeds`, which unfinished requests use, from later draws."""
        self._used.update(seeds)

    def draw(self, prompt_id: int, sample_index: int) -> int:
        """A seed in [0, 2**31)."""
        attempt = 0
        while True:
            key = struct.pack("<5q", self._seed, self._step, prompt_id, sample_index, attempt)
            seed = xxhash.xxh3_64_intdigest(key) & 0x7FFFFFFF
            if seed not in self._used:
                self._used.add(seed)
                return seed
            attempt += 1


def make_sample(request: GenerateRequest, generation: Generation) -> Sample:
    """Prompt and valid response as one token sequence; the prompt is off the mask with log-prob 0.

    Raises ValueError for a response that cannot be trained on.
    """
    if generation.logprobs is None:
        raise ValueError(f"sample {request.prompt_id}/{request.sample_index}: no log-probs")
    before = np.zeros(len(request.prompt_token_ids), dtype=np.bool_)  # the type of what is joined to it is wider
    all_sampled = np.ones(len(generation.token_ids), dtype=np.bool_)
    mask = np.concatenate([before, all_sampled if generation.sampled is None else generation.sampled])
    versions = np.concatenate([before, generation.token_versions])
    supports = None if generation.supports is None else joined([no_supports(len(before)), generation.supports])
    if len(mask) != len(versions):
        where = f"sample {request.prompt_id}/{request.sample_index}"
        raise ValueError(f"{where}: sampled and token_versions differ in length")
    return Sample(
        prompt_id=request.prompt_id,
        sample_index=request.sample_index,
        token_ids=np.concatenate([request.prompt_token_ids, generation.token_ids]),
        response_mask=mask,
        rollout_logprobs=np.concatenate([before, generation.logprobs]),
        token_versions=np.where(mask, versions, 0),
        finish_reason=generation.finish_reason,
        supports=supports,
        routes=generation.routes,
    )


def sampling_params(
    config: SamplingConfig, *, seed: int, stop_token_ids: tuple[int, ...], routes: Routing = Routing.live
) -> SamplingParams:
    """Sampling parameters of one training response."""
    return SamplingParams(
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        seed=seed,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        with_supports=config.is_truncated,
        routes=routes,
        stop_token_ids=stop_token_ids,
    )
