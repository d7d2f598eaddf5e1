"""Policies: a model in this process, a server, or a script.

Names are imported lazily, so that the client of a server does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_MODULE_OF = {
    "LocalPolicy": "toolwise.policies.local",
    "OpenAIAgentPolicy": "toolwise.policies.openai.policy",
    "ScriptedPolicy": "toolwise.policies.scripted",
}

__all__ = ["LocalPolicy", "OpenAIAgentPolicy", "ScriptedPolicy"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'toolwise.policies' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


if TYPE_CHECKING:
    from toolwise.policies.local import LocalPolicy
    from toolwise.policies.openai.policy import OpenAIAgentPolicy
    from toolwise.policies.scripted import ScriptedPolicy
