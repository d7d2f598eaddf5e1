"""In-process generation over the learner's own weights: scheduler, blocks, runner, sampler, engine."""

from __future__ import annotations

from toolwise.engine.engine import Engine
from toolwise.engine.paged_attention import supports_paged_attention
from toolwise.engine.request import ContinuationScores

__all__ = ["ContinuationScores", "Engine", "supports_paged_attention"]
