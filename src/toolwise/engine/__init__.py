"""In-process generation on the learner's weights: scheduler, KV cache blocks, runner, sampler, engine."""

from __future__ import annotations

from toolwise.engine.engine import Engine
from toolwise.engine.paged_attention import supports_paged_attention
from toolwise.engine.paths import engine_path
from toolwise.engine.request import ContinuationScores

__all__ = ["ContinuationScores", "Engine", "engine_path", "supports_paged_attention"]
