"""Where the tensors that the trainer sends lie in vLLM's parameters. No vLLM is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from rollout.engine import LayoutError
from rollout.weights.experts import parts_per_expert, sources
from rollout.weights.fusion import VOCABULARY_PARAMETERS, plan_fusion


def places_of(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Tensor by its Hugging Face name -> the rows of a parameter of vLLM that it fills: a view.

    `shapes` are those of the tensors in the model's files, where the matrices of experts lie one by one. A tied head
    has no place. Raises LayoutError unless each parameter is made up of tensors, but for the rows with which vLLM pads
    a vocabulary.
    """
    held = {name: parameter.data for name, parameter in model.named_parameters()}
    # The experts stand in a module of their own, below that of the model.
    held = {name.replace(".experts.routed_experts.", ".experts."): value for name, value in held.items()}
    shapes = {name: _stacked(name, [shapes[part] for part in parts]) for name, parts in sources(shapes).items()}
    places: dict[str, Tensor] = {}
    for name, parts in plan_fusion(held, sent=shapes).sources.items():
        begin = 0
        for part in parts:
            end = begin + shapes[part][0]
            places[part] = held[name][begin:end]
            begin = end
            if tuple(places[part].shape) != shapes[part]:
                raise LayoutError(f"{part} has shape {shapes[part]}, and {name} of vLLM {tuple(held[name].shape)}")
        if begin != len(held[name]) and not name.endswith(VOCABULARY_PARAMETERS):
            raise LayoutError(f"{name} of vLLM has {len(held[name])} rows, and {', '.join(parts)} have {begin}")
    return places


def _stacked(name: str, parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of a tensor of experts that consists of matrices of these shapes; of any other tensor its own."""
    if len(parts) == 1:
        return parts[0]
    matrices = parts_per_expert(name)
    rows, columns = parts[0]
    return (len(parts) // matrices, matrices * rows, columns)
