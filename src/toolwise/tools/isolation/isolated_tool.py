"""A tool class with `isolate = True`: each rollout's tool object lives in a process of its own, killed at release."""

from __future__ import annotations

import asyncio
import inspect
import json
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from toolwise.concurrency.deadlines import exclude_queue_time
from toolwise.config.imports import in_worker
from toolwise.errors import ToolwiseError
from toolwise.tools import isolation
from toolwise.tools.base import BaseTool
from toolwise.tools.function import FunctionTool
from toolwise.tools.isolation.code_location import ObjectRef
from toolwise.tools.isolation.pool import ATTEMPTS, Pool, read_result
from toolwise.tools.isolation.worker import CallNotDelivered, ToolDied, ToolFault, Worker


def isolate_tool(tool: BaseTool) -> BaseTool:
    """`tool` as it is to be used: itself, or where its class says `isolate = True` one that lives in processes."""
    if tool.isolate is not True or isinstance(tool, FunctionTool | IsolatedTool) or in_worker():
        return tool
    return IsolatedTool(tool)


@dataclass(slots=True)
class _RolloutProcess:
    """One rollout's process, and what the tool in it calls its instance."""

    pool: Pool
    worker: Worker
    inner_id: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One question at a time, as the process answers them."""
    end_reason: str | None = None


class IsolatedTool(BaseTool):
    """Stands for a tool whose objects are made in worker processes, out of its class, configuration and schema."""

    isolate = True

    def __init__(self, tool: BaseTool) -> None:
        super().__init__(tool.config, tool.tool_schema)
        self.family, self.price = tool.family, tool.price
        self.target = _target(tool)
        self._rollout_processes: dict[str, _RolloutProcess] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        pool = isolation.shared_pool()
        life = _RolloutProcess(pool, await self._start_tool(pool))
        try:
            life.inner_id = str(await self._call_method(life, "create", instance_id, **kwargs))
        except BaseException:
            pool.end(life.worker)
            raise
        # Objects in different processes may well call their instances the same.
        outer = instance_id or str(uuid4())
        self._rollout_processes[outer] = life
        return outer

    async def _start_tool(self, pool: Pool) -> Worker:
        """A process with a tool object in it."""
        question = {"make": self.target.name, "config": self.config, "schema": self.tool_schema.model_dump()}
        for attempt in range(ATTEMPTS):
            worker = await pool.reserve(self.target.module_ref)
            try:
                await worker.request(question)
            except BaseException as fault:
                pool.end(worker)
                if not isinstance(fault, CallNotDelivered) or attempt + 1 == ATTEMPTS:
                    raise
            else:
                return worker
        raise AssertionError("unreachable")

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str, float | None, dict[str, Any]]:
        life = self._rollout_processes[instance_id]
        if life.end_reason is not None:
            raise ToolFault(f"it is gone since {life.end_reason}")
        return read_result(await self._call_method(life, "execute", life.inner_id, parameters, **kwargs))

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """None where the process was ended at a deadline: it has no word on the rollout any more."""
        life = self._rollout_processes[instance_id]
        if life.end_reason is not None:
            return None
        reward = await self._call_method(life, "calc_reward", life.inner_id, **kwargs)
        return None if reward is None else float(reward)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        life = self._rollout_processes.pop(instance_id, None)
        if life is None:
            return
        try:
            if life.end_reason is None:
                await self._call_method(life, "release", life.inner_id, **kwargs)
        finally:
            life.pool.end(life.worker)

    async def _call_method(self, life: _RolloutProcess, method: str, *args: Any, **kwargs: Any) -> Any:
        with exclude_queue_time():
            await life.lock.acquire()
        try:
            try:
                return await life.worker.request({"verb": method, "args": args, "kwargs": kwargs})
            except asyncio.CancelledError:
                life.end_reason = f"its process was ended in the middle of {method}"
                raise
            except ToolDied as died:
                life.end_reason = life.end_reason or f"{method}, when {died}"
                raise
        finally:
            life.lock.release()


def _target(tool: BaseTool) -> ObjectRef:
    kind = type(tool)
    where = f"tool {tool.name}: isolate = True"
    try:
        target = ObjectRef.of(kind)
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
