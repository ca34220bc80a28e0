"""Which engine gets which request: those of one prompt together, the tokens that are still to come spread evenly."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.types import GenerateRequest


def load_of(request: GenerateRequest) -> int:
    """Tokens that are still to be sampled at most."""
    begun = 0 if request.resumed is None else len(request.resumed.token_ids)
    return request.sampling.max_new_tokens - begun


def split_by_load(
    requests: Sequence[GenerateRequest], num_parts: int, *, loads: Sequence[int] | None = None
) -> list[list[int]]:
    """Indices of `requests` for each of `num_parts` engines, which have `loads` tokens to sample already.

    The requests of one prompt stay together (they share a prefix); the heaviest group goes to the lightest
    engine, counting prompt tokens once and response tokens at their bound.
    """
    groups: dict[int, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(request.prompt_id, []).append(index)

    def load(indices: list[int]) -> int:
        return len(requests[indices[0]].prompt_token_ids) + sum(load_of(requests[i]) for i in indices)

    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = list(loads or [0] * num_parts)
    for indices in sorted(groups.values(), key=lambda indices: (-load(indices), indices[0])):
        part = min(range(num_parts), key=lambda p: (loads[p], p))
        parts[part].extend(indices)
        loads[part] += load(indices)
    return [sorted(part) for part in parts]


def split_by_kind(requests: Sequence[GenerateRequest], loads: Sequence[int], *, num_quantized: int) -> list[list[int]]:
    """Like `split_by_load`, with each group divided between the first `num_quantized` engines and the others.

    Sample i of n is for a quantised engine if the count floor(i * num_quantized / engines) rises with it: every group
    is divided alike, in proportion to the engines, the first sample goes to a plain engine, and a resumed response
    goes to the kind that began it.
    """
    kinds: dict[bool, list[int]] = {True: [], False: []}
    for index, request in enumerate(requests):
        before, after = (at * num_quantized // len(loads) for at in (request.sample_index, request.sample_index + 1))
        kinds[after > before].append(index)
    parts: list[list[int]] = []
    for kind, taken in ((True, loads[:num_quantized]), (False, loads[num_quantized:])):
        split = split_by_load([requests[index] for index in kinds[kind]], len(taken), loads=taken) if taken else []
        parts += [[kinds[kind][position] for position in part] for part in split]
    return parts
