"""Rollouts: episodes of a policy in an environment, one or many at a time. Submodules are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolwise.rollout.queue import RolloutQueue
    from toolwise.rollout.request import AsyncRolloutRequest, RequestState
    from toolwise.rollout.scheduler import RolloutScheduler
    from toolwise.rollout.steps import load_steps, save_steps
    from toolwise.rollout.worker import RLRolloutWorker

_MODULE_OF = {
    "AsyncRolloutRequest": "request",
    "RLRolloutWorker": "worker",
    "RequestState": "request",
    "RolloutQueue": "queue",
    "RolloutScheduler": "scheduler",
    "load_steps": "steps",
    "save_steps": "steps",
}

__all__ = [
    "AsyncRolloutRequest",
    "RLRolloutWorker",
    "RequestState",
    "RolloutQueue",
    "RolloutScheduler",
    "load_steps",
    "save_steps",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'toolwise.rollout' has no attribute {name!r}")
    return getattr(importlib.import_module(f"toolwise.rollout.{_MODULE_OF[name]}"), name)
