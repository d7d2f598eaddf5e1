"""The gateway: an outside agent calls the model that is being trained, over the OpenAI API (docs/own-agents.md)."""

from __future__ import annotations

from toolwise.serve.gateway.builder import build_outside_agent

__all__ = ["build_outside_agent"]
