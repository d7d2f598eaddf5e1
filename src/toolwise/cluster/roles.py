"""The roles of processes, by name. What a process runs is imported there by its reference: nothing is pickled."""

from __future__ import annotations

import asyncio
import os
import traceback
from importlib import import_module
from typing import Any, Protocol

from toolwise.cluster.interface import Payload, RefusedError, check_payload
from toolwise.config.imports import WORKER_ENV_VAR
from toolwise.errors import ToolwiseError

ROLES = {
    "rollout": "toolwise.cluster.rollout_worker:RolloutWorker",
    "learner": "toolwise.cluster.learner_worker:LearnerWorker",
    "node": "toolwise.cluster.node_report:NodeReporter",
}
REFUSED, FAILED = "$refused", "$failed"
"""Keys of a reply that is an error: its text."""


class Role(Protocol):
    """What a process does. It is built with its name and the payload that the process is started with."""

    async def handle(self, method: str, payload: Payload) -> Payload:
        """Answer a call. Calls overlap."""

    def close(self) -> None:
        """Stop what the process started, and delete its files."""


class RoleHost:
    """Runs one role in a process, for the implementation of `Cluster` that started it."""

    def __init__(self, role: str, name: str) -> None:
        os.environ[WORKER_ENV_VAR] = "1"  # files of the user that are imported here must not start another run
        self.role, self.name = role, name
        self.served: Role | None = None

    async def setup(self, payload: Payload, stored: Payload | None = None) -> dict[str, Any]:
        return await self._answer(None, {**payload, **(stored or {})})

    async def call(self, method: str, payload: Payload, stored: Payload | None = None) -> dict[str, Any]:
        return await self._answer(method, {**payload, **(stored or {})})

    async def end(self) -> None:
        """Stop what the process started and delete its files, before it is killed."""
        if self.served is not None:
            await asyncio.to_thread(self.served.close)

    async def wait(self) -> None:
        """Never returns: it ends with the process, whose death is noticed by that."""
        await asyncio.Event().wait()

    async def _answer(self, method: str | None, payload: Payload) -> dict[str, Any]:
        try:
            if method is None:
                module, _, name = ROLES[self.role].partition(":")
                self.served = getattr(import_module(module), name)(self.name, check_payload(payload))
                return {}
            assert self.served is not None
            return dict(check_payload(await self.served.handle(method, check_payload(payload))))
        except RefusedError as fault:
            return {REFUSED: str(fault).encode()}
        except ToolwiseError as fault:
            return {FAILED: str(fault).encode()}
        except Exception:
            return {FAILED: traceback.format_exc().encode()}
