"""In-process generation over the learner's own weights: scheduler, blocks, runner, sampler, engine."""

from __future__ import annotations

from toolwise.engine.attention import can_attend
from toolwise.engine.engine import Engine
from toolwise.engine.request import Scored

__all__ = ["Engine", "Scored", "can_attend"]
