"""Two copies of a model's weights: the learner updates one in place, the engine samples from the other, and each
published version is copied from the first to the second."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolwise.engine import Engine
from toolwise.engine.device_streams import LearnerStream, finish_kernels, use_own_stream
from toolwise.engine.weight_swap import replace_weights
from toolwise.models.merged_weights import merged_copy
from toolwise.protocols import ReloadingEngine

if TYPE_CHECKING:
    from toolwise.policies.local import LocalPolicy


@dataclass(frozen=True, slots=True)
class WeightCopies:
    """The engine's model, `policy.model`, and the learner's."""

    policy: LocalPolicy
    learner_model: Any
    keep_cache: bool = False
    """Whether replies that are being written keep their keys and values when a version is published."""

    @classmethod
    def of(cls, policy: LocalPolicy, *, keep_cache: bool = False) -> WeightCopies:
        """Copy the policy's model for a learner; takes as much memory again as the weights. On a GPU the engine works
        on a stream of its own from now on."""
        copies = cls(policy, copy.deepcopy(policy.model), keep_cache)
        if isinstance(policy.engine, Engine):
            use_own_stream(policy.engine)
        return copies

    def learner_stream(self) -> LearnerStream:
        """Where the learner's updates run."""
        return LearnerStream(self.policy.model.device)

    @property
    def bytes(self) -> int:
        """What the second copy takes."""
        return sum(parameter.nbytes for parameter in self.policy.model.parameters())

    async def publish(self, version: int) -> None:
        """Give the engine the learner's weights as `version`, between two of its steps. No update may run meanwhile."""
        engine = self.policy.engine
        assert isinstance(engine, Engine | ReloadingEngine)  # see async_setup
        await replace_weights(engine, self.copy, version, keep_cache=self.keep_cache)

    def copy(self) -> None:
        """Copy the learner's weights, with adapters merged in, to the policy's model; returns when that is done."""
        import torch

        self._finish_kernels()  # of a cancelled request, which may still read the weights
        source = dict(merged_copy(self.learner_model).named_parameters())
        with torch.no_grad():
            for name, parameter in self.policy.model.named_parameters():
                parameter.copy_(source[name])
        self._finish_kernels()

    def _finish_kernels(self) -> None:
        if isinstance(self.policy.engine, Engine):
            finish_kernels(self.policy.engine)
