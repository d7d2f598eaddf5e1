"""Hardened worker processes for untrusted code: reward functions and programs written by a model.

Names are imported lazily: workers import this package too, need few of its names and must start fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolwise.sandbox.faults import KINDS, SandboxError
    from toolwise.sandbox.programs.program_sandbox import ProgramSandbox
    from toolwise.sandbox.programs.run import ProgramResult
    from toolwise.sandbox.sandbox import RewardExecutor, Sandbox, SandboxExecutor

_MODULE_OF = {
    "KINDS": "faults",
    "ProgramResult": "programs.run",
    "ProgramSandbox": "programs.program_sandbox",
    "RewardExecutor": "sandbox",
    "Sandbox": "sandbox",
    "SandboxError": "faults",
    "SandboxExecutor": "sandbox",
}

__all__ = ["KINDS", "ProgramResult", "ProgramSandbox", "RewardExecutor", "Sandbox", "SandboxError", "SandboxExecutor"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'toolwise.sandbox' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"toolwise.sandbox.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
