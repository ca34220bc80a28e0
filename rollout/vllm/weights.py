"""Where the tensors that the trainer sends lie in vLLM's parameters. No vLLM is imported."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from rollout.engine import LayoutError
from rollout.weights.fusion import VOCABULARY_PARAMETERS, plan_fusion


def places_of(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Tensor by its Hugging Face name -> the rows of a parameter of vLLM that it fills: a view.

    `shapes` are those of the tensors in the model's files. A tied head has no place. Raises LayoutError unless each
    parameter is made up of tensors, but for the rows with which vLLM pads a vocabulary.
    """
    held = {name: parameter.data for name, parameter in model.named_parameters()}
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
