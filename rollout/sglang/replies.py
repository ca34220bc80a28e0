"""SGLang's wire format of a sample: GenerateRequest -> body of /generate; reply -> Generation.

A reply that contradicts itself or the request raises ReplyError. A reply with valid tokens and missing, too few or
non-numeric log-probs, or without the supports that were asked for, is passed on unchanged; `rollout/collect/filters.py`
drops and counts it.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

from rollout.routes import Routes, from_bytes
from rollout.supports import supports_of
from rollout.types import FinishReason, GenerateRequest, Generation
from rollout.weights.experts import Mixture

BACKEND_REMEDY = (
    "some of SGLang's kernels choose experts where it does not see it: set "
    "+rollout.engine_args.moe_runner_backend=triton, or policy.routing=live"
)
START = "routed_experts_start_len"
"""Number of the first token of which SGLang returns the route."""


class ReplyError(ValueError):
    """The server's reply does not match the request."""


def body_of(request: GenerateRequest, *, adapter: str | None = None) -> dict[str, Any]:
    """The body of /generate; `request` must have no resumed part: see `rollout.engine.continuation`.

    `adapter` is SGLang's name of the adapter with which it samples; None for the weights alone.
    """
    sampling = request.sampling
    return {
        **({} if adapter is None else {"lora_path": adapter}),
        "input_ids": request.prompt_token_ids,
        "return_logprob": True,
        "sampling_params": {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop_token_ids": list(sampling.stop_token_ids),
            "sampling_seed": sampling.seed,
        },
        **({"return_sampling_mask": True} if sampling.with_supports else {}),
        **({"return_routed_experts": True, START: request.first_route} if sampling.with_routes else {}),
    }


def generation_of(
    request: GenerateRequest, reply: Mapping[str, Any], *, vocab_size: int, sent_version: int, newest_version: int
) -> Generation:
    """The response in `reply`.

    `sent_version` is the engine's version when the request was sent, `newest_version` the newest version sent to it.
    Raises ReplyError.
    """
    meta = _field(reply, "meta_info")
    token_ids: list[int] = _field(reply, "output_ids")
    reported = meta.get("finish_reason")
    kind = reported["type"] if reported else "none"
    if kind not in FinishReason.__members__:
        raise ReplyError(f"unknown finish reason {reported!r}")
    finish_reason = FinishReason[kind]
    num_prompt_tokens = meta.get("prompt_tokens", len(request.prompt_token_ids))
    if num_prompt_tokens != len(request.prompt_token_ids):
        raise ReplyError(
            f"{len(request.prompt_token_ids)} prompt tokens were sent, the server read {num_prompt_tokens}: "
            "does it add special tokens?"
        )
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise ReplyError(f"the response has token ids outside 0..{vocab_size - 1}")
    if finish_reason is FinishReason.length and len(token_ids) != request.sampling.max_new_tokens:
        raise ReplyError(
            f"the response was cut at {len(token_ids)} of max_new_tokens={request.sampling.max_new_tokens} tokens"
        )
    logprobs, supports = _logprobs(meta, token_ids), None
    if request.sampling.with_supports and token_ids:
        kept = meta.get("output_token_sampling_mask")
        if kept is not None:
            # The server's usual log-probs are those of the whole vocabulary.
            logprobs, supports = _as_floats(_field(meta, "output_token_sampling_logprobs")), supports_of(kept)
        elif finish_reason is FinishReason.abort:
            # SGLang leaves them out for a request that it aborts in its queue; without them no token can be resumed.
            return Generation(token_ids=[], logprobs=[], token_versions=[], finish_reason=finish_reason)
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        token_versions=_versions(meta, len(token_ids), sent_version=sent_version, newest_version=newest_version),
        finish_reason=finish_reason,
        shared_prompt_tokens=int(meta.get("cached_tokens") or 0),
        supports=supports,
    )


def routes_of(text: str, shape: tuple[int, int], mixture: Mixture, *, with_weights: bool = False) -> Routes:
    """The routes of SGLang's `text`: of so many tokens, and of so many layers, some of which may have no experts.

    Raises ReplyError if they are none.
    """
    try:
        routes = from_bytes(base64.b64decode(text), (*shape, mixture.per_token), with_weights=with_weights)
    except ValueError as error:
        raise ReplyError(f"routed_experts: {error}") from error
    routes = routes.of_layers(mixture.dense_layers)
    if problem := routes.problem(mixture.number):
        raise ReplyError(f"routed_experts: {problem}; {BACKEND_REMEDY}")
    return routes


def parse_version(reported: object) -> int:
    """Policy version in the server's weight version; raises ReplyError."""
    if not isinstance(reported, str) or not reported.isdecimal():
        raise ReplyError(f"the server holds weights of version {reported!r}, which no completed sync set")
    return int(reported)


def _field(mapping: Mapping[str, Any], name: str) -> Any:
    if name not in mapping:
        raise ReplyError(f"the reply has no {name}, but {', '.join(sorted(mapping)) or 'nothing'}")
    return mapping[name]


def _logprobs(meta: Mapping[str, Any], token_ids: list[int]) -> list[float] | None:
    """Log-probs [R] as reported; None without log-probs."""
    scored = meta.get("output_token_logprobs") or []
    if len(scored) == len(token_ids) and [entry[1] for entry in scored] != token_ids:
        raise ReplyError("the log-probs are those of other tokens than the response")
    if not scored and token_ids:
        return None
    return _as_floats([entry[0] for entry in scored])


def _as_floats(reported: list[float | None]) -> list[float]:
    """The same numbers, NaN for a JSON null, which stands for a non-finite number."""
    return [math.nan if number is None else number for number in reported]


def _versions(meta: Mapping[str, Any], num_tokens: int, *, sent_version: int, newest_version: int) -> list[int]:
    """Versions [R] from the spans of the reply, or from its single version if the server reports no spans."""
    if num_tokens == 0:
        return []
    spans = meta.get("weight_versions")
    if spans is None:
        last = parse_version(_field(meta, "weight_version"))
        if last > sent_version:
            raise ReplyError(
                f"the weights changed from version {sent_version} to {last} during the response, and this server does "
                "not say at which token: use rollout.pause_mode=abort"
            )
        versions = [last] * num_tokens
    else:
        versions = []
        for span in spans:
            if span["end"] > span["start"]:
                versions += [parse_version(span["version"])] * (span["end"] - span["start"])
    if len(versions) != num_tokens:
        raise ReplyError(f"{num_tokens} tokens came back, with the weight versions of {len(versions)}")
    if max(versions) > newest_version:
        raise ReplyError(f"sampled by weights of version {max(versions)}; the newest that was sent is {newest_version}")
    return versions
