"""Load balance: requests -> engines. Requests of one prompt stay together; remaining tokens are spread evenly."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.types import GenerateRequest


def load_of(request: GenerateRequest) -> int:
    """Largest number of tokens that are still to be sampled for the request."""
    begun = 0 if request.resumed is None else len(request.resumed.token_ids)
    return request.sampling.max_new_tokens - begun


def split_by_load(requests: Sequence[GenerateRequest], loads: Sequence[int]) -> list[list[int]]:
    """Indices of `requests` for each engine; `loads` holds the tokens that each engine has to sample already.

    The requests of one prompt stay together, because they share a prefix. The heaviest group goes to the engine with
    the smallest load, counting prompt tokens once and response tokens at their upper bound.
    """
    groups: dict[int, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(request.prompt_id, []).append(index)

    def load(indices: list[int]) -> int:
        return len(requests[indices[0]].prompt_token_ids) + sum(load_of(requests[i]) for i in indices)

    totals = list(loads)
    parts: list[list[int]] = [[] for _ in totals]
    for indices in sorted(groups.values(), key=lambda indices: (-load(indices), indices[0])):
        lightest = totals.index(min(totals))
        parts[lightest].extend(indices)
        totals[lightest] += load(indices)
    return [sorted(part) for part in parts]
