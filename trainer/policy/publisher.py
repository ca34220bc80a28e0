"""What a rank gives the engines: all weights at every sync; or the frozen weights once, and an adapter at every sync.

Used by `trainer/policy/worker.py`. The bytes lie in shared memory of the machine (`rollout/weights/shared_weights.py`);
rank 0 sends them to machines without a rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from rollout.engine import LayoutError, WeightSyncError
from rollout.types import PackedWeights, SharedWeights, WeightLayout
from rollout.weights.adapter import is_adapter, sent_name
from rollout.weights.packed_weights import DTYPES, unpack
from rollout.weights.quantization import weight_publisher
from rollout.weights.shared_weights import WeightPublisher
from trainer.config.train import TrainConfig
from trainer.policy.host_copy import local_part, own_rows
from trainer.policy.lora import Part
from trainer.policy.model import full_tensors, tensor_shapes
from trainer.policy.trainable import Trainable
from trainer.scoring.forward import ScoringModel


class PolicyPublisher:
    """Publishes each version of the policy; every rank has one, because to gather the weights takes all of them."""

    def __init__(self, policy: Trainable[ScoringModel], config: TrainConfig) -> None:
        """Raises ValueError as `weight_publisher` does."""
        self._policy = policy
        self._part = Part.frozen if config.sends_adapter else Part.whole
        self._weights = weight_publisher(tensor_shapes(policy.model, self._part), config.rollout)
        self._adapter: WeightPublisher | None = None
        if config.sends_adapter:
            dtype = DTYPES[config.rollout.dtype.name]
            self._adapter = WeightPublisher(tensor_shapes(policy.model, Part.adapter), dtype=dtype)
        self._base: SharedWeights | None = None
        """The frozen weights, once this rank has published them."""

    def publish(
        self,
        policy_version: int,
        *,
        publishes: bool,
        with_base: bool,
        layouts: tuple[WeightLayout, ...],
    ) -> SharedWeights | None:
        """Gather what the engines need; where this rank `publishes`, write it to memory of its machine -> where it is.

        A collective. An adapter goes alone, or `with_base` if a rank that publishes has not published the frozen
        weights yet. See `PolicyWorker.publish_weights` for the rest.
        """
        if self._adapter is None:
            shared = self._publish(self._weights, self._part, policy_version, publishes=publishes, layouts=layouts)
        else:
            if with_base:
                self._base = self._publish(
                    self._weights, self._part, policy_version, publishes=publishes, layouts=layouts
                )
            shared = self._publish(self._adapter, Part.adapter, policy_version, publishes=publishes, layouts=layouts)
            if shared is not None:
                self._check_own_rows(shared, self._adapter)
        if shared is None:
            return None
        # What is quantised are the frozen weights.
        quantization = shared.quantization if self._base is None else self._base.quantization
        return replace(shared, base=self._base, quantization=quantization)

    def _publish(
        self,
        publisher: WeightPublisher,
        part: Part,
        policy_version: int,
        *,
        publishes: bool,
        layouts: tuple[WeightLayout, ...],
    ) -> SharedWeights | None:
        tensors = full_tensors(self._policy.model, publisher.input_dtypes, part)
        if not publishes:
            for _ in tensors:
                continue  # gathering is a collective: every rank walks the same parameters
            return None
        try:
            digests = {
                layout: layout.expected(sent=publisher.names, of_adapter=part is Part.adapter) for layout in layouts
            }
            shared = publisher.publish(
                tensors, policy_version=policy_version, watchers=[each.add for each in digests.values()]
            )
        except LayoutError as error:
            raise WeightSyncError(f"policy version {policy_version}: {error}") from error
        shared.engine_digests = {layout: each.result() for layout, each in digests.items()}
        return shared

    def _check_own_rows(self, shared: SharedWeights, publisher: WeightPublisher) -> None:
        """Compare what was published with the adapter that this rank trains, row by row of its own.

        The digests say that the engines hold what was published; this says that it is the adapter of now. Raises
        WeightSyncError with the tensor's name.
        """
        published = PackedWeights(
            policy_version=shared.policy_version, tensors=shared.tensors, data=publisher.published()
        )
        held = {
            sent_name(name): each for name, each in self._policy.model.causal_lm.named_parameters() if is_adapter(name)
        }
        for spec, tensor in unpack(published):
            parameter: Any = held[spec.name].detach()
            start, stop = own_rows(parameter)
            if not torch.equal(local_part(parameter).to(tensor.device, tensor.dtype), tensor[start:stop]):
                raise WeightSyncError(
                    f"policy version {shared.policy_version}: {spec.name} was published with other numbers than those "
                    "that this rank trains"
                )
