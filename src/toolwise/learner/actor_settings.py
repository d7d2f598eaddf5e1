"""Settings of the actor's update: `[actor]` and the KL options of `[algorithm]` in one dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from toolwise.learner.batch import MicroBatchSettings
from toolwise.learner.lora import LoraSettings
from toolwise.learner.loss_aggregation import Aggregation
from toolwise.learner.mismatch import Reaction
from toolwise.learner.optimizer import OptimizerSettings

KlMode = Literal["none", "reward", "loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSettings(OptimizerSettings):
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    entropy_coef: float = 0.0
    ppo_epochs: int = 1
    mini_batches: int = 1
    """Optimiser steps per epoch."""
    loss_aggregation: Aggregation = "token"
    loss_length: int | None = None
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    importance_cap: float = 2.0
    kl: KlMode = "none"
    kl_estimator: str = "k2"
    kl_coef: float = 0.0
    kl_target: float | None = None
    kl_horizon: int = 1000
    micro_batch_tokens: int = 16_384
    share_prefixes: bool = True
    logit_chunk_tokens: int | None = None
    activation_checkpointing: bool = False
    canary: Reaction = "stop"
    lora: LoraSettings | None = None
    temperature: float = 1.0
    seed: int = 0

    @property
    def micro_batch(self) -> MicroBatchSettings:
        return MicroBatchSettings(self.micro_batch_tokens, self.share_prefixes, self.logit_chunk_tokens)

    @property
    def one_step(self) -> bool:
        """Whether each batch gets a single optimiser step: then the step's own log-probs are the old ones."""
        return self.ppo_epochs == self.mini_batches == 1
