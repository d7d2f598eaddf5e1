"""A tool class with `isolate = True`: each rollout's tool object lives in a process of its own, killed at release."""

from __future__ import annotations

import asyncio
import inspect
import json
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from toolwise.errors import ToolwiseError
from toolwise.references import in_worker
from toolwise.tools import isolation
from toolwise.tools.base import BaseTool
from toolwise.tools.function import FunctionTool
from toolwise.tools.isolation.places import Target
from toolwise.tools.isolation.pool import ATTEMPTS, Pool, read_result
from toolwise.tools.isolation.workers import NeverReached, ToolDied, ToolFault, Worker
from toolwise.waiting import queueing


def isolated(tool: BaseTool) -> BaseTool:
    """`tool` as it is to be used: itself, or where its class says `isolate = True` one that lives in processes."""
    if tool.isolate is not True or isinstance(tool, FunctionTool | IsolatedTool) or in_worker():
        return tool
    return IsolatedTool(tool)


@dataclass(slots=True)
class _Life:
    """One rollout's process, and what the tool in it calls its instance."""

    pool: Pool
    worker: Worker
    inner: str = ""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One question at a time, as the process answers them."""
    ended: str | None = None


class IsolatedTool(BaseTool):
    """Stands for a tool whose objects are made in worker processes, out of its class, configuration and schema."""

    isolate = True

    def __init__(self, tool: BaseTool) -> None:
        super().__init__(tool.config, tool.tool_schema)
        self.family, self.price = tool.family, tool.price
        self.target = _target(tool)
        self._lives: dict[str, _Life] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        pool = isolation.shared()
        life = _Life(pool, await self._made(pool))
        try:
            life.inner = str(await self._ask(life, "create", instance_id, **kwargs))
        except BaseException:
            pool.end(life.worker)
            raise
        # Objects in different processes may well call their instances the same.
        outer = instance_id or str(uuid4())
        self._lives[outer] = life
        return outer

    async def _made(self, pool: Pool) -> Worker:
        """A process with a tool object in it."""
        question = {"make": self.target.name, "config": self.config, "schema": self.tool_schema.model_dump()}
        for attempt in range(ATTEMPTS):
            worker = await pool.take(self.target.place)
            try:
                await worker.ask(question)
            except BaseException as fault:
                pool.end(worker)
                if not isinstance(fault, NeverReached) or attempt + 1 == ATTEMPTS:
                    raise
            else:
                return worker
        raise AssertionError("unreachable")

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str, float | None, dict[str, Any]]:
        life = self._lives[instance_id]
        if life.ended is not None:
            raise ToolFault(f"it is gone since {life.ended}")
        return read_result(await self._ask(life, "execute", life.inner, parameters, **kwargs))

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """None where the process was ended at a deadline: it has no word on the rollout any more."""
        life = self._lives[instance_id]
        if life.ended is not None:
            return None
        reward = await self._ask(life, "calc_reward", life.inner, **kwargs)
        return None if reward is None else float(reward)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        life = self._lives.pop(instance_id, None)
        if life is None:
            return
        try:
            if life.ended is None:
                await self._ask(life, "release", life.inner, **kwargs)
        finally:
            life.pool.end(life.worker)

    async def _ask(self, life: _Life, verb: str, *args: Any, **kwargs: Any) -> Any:
        with queueing():
            await life.turn.acquire()
        try:
            try:
                return await life.worker.ask({"verb": verb, "args": args, "kwargs": kwargs})
            except asyncio.CancelledError:
                life.ended = f"its process was ended in the middle of {verb}"
                raise
            except ToolDied as died:
                life.ended = life.ended or f"{verb}, when {died}"
                raise
        finally:
            life.turn.release()


def _target(tool: BaseTool) -> Target:
    kind = type(tool)
    where = f"tool {tool.name}: isolate = True"
    try:
        target = Target.of(kind)
    except ToolwiseError as fault:
        raise ToolwiseError(f"{where} needs a class that a worker process can load: {fault}") from None
    needed = {
        name
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }
    if not needed <= {"config", "tool_schema"}:
        raise ToolwiseError(f"{where} needs a class that is made of (config) or (config, tool_schema) alone")
    try:
        json.dumps(tool.config)
    except (TypeError, ValueError):
        raise ToolwiseError(f"{where} needs a configuration that is plain JSON, to make the tool again") from None
    return target
