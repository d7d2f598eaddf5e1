"""Tool classes with `isolate = True`: each rollout's tool object lives in a separate process, killed at release."""

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
from toolwise.tools.isolation.tool_pool import ToolPool, read_result, retry_undelivered
from toolwise.tools.isolation.tool_worker import ToolDied, ToolFault, ToolWorker


def isolate_tool(tool: BaseTool) -> BaseTool:
    """`tool` itself, or an `IsolatedTool` around it if it has `isolate = True`."""
    if tool.isolate is not True or isinstance(tool, FunctionTool | IsolatedTool) or in_worker():
        return tool
    return IsolatedTool(tool)


@dataclass(slots=True)
class _RolloutProcess:
    """One rollout's process, and the instance id that the tool in it uses."""

    pool: ToolPool
    worker: ToolWorker
    inner_id: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """The process handles one request at a time."""
    end_reason: str | None = None


class IsolatedTool(BaseTool):
    """Proxy for a tool whose objects are created in worker processes from its class, configuration and schema."""

    isolate = True

    def __init__(self, tool: BaseTool) -> None:
        super().__init__(tool.config, tool.tool_schema)
        self.family, self.price = tool.family, tool.price
        self.target = _target(tool)
        self._rollout_processes: dict[str, _RolloutProcess] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        pool = isolation.shared_pool()
        process = _RolloutProcess(pool, await self._start_tool(pool))
        try:
            process.inner_id = str(await self._call_method(process, "create", instance_id, **kwargs))
        except BaseException:
            pool.end(process.worker)
            raise
        # Objects in different processes may use the same instance id.
        outer_id = instance_id or str(uuid4())
        self._rollout_processes[outer_id] = process
        return outer_id

    async def _start_tool(self, pool: ToolPool) -> ToolWorker:
        request = {"make": self.target.name, "config": self.config, "schema": self.tool_schema.model_dump()}

        async def start() -> ToolWorker:
            worker = await pool.reserve(self.target.module_ref)
            try:
                await worker.request(request)
            except BaseException:
                pool.end(worker)
                raise
            return worker

        return await retry_undelivered(start)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str, float | None, dict[str, Any]]:
        process = self._rollout_processes[instance_id]
        if process.end_reason is not None:
            raise ToolFault(f"it is gone since {process.end_reason}")
        return read_result(await self._call_method(process, "execute", process.inner_id, parameters, **kwargs))

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """None if the process was killed at a deadline."""
        process = self._rollout_processes[instance_id]
        if process.end_reason is not None:
            return None
        reward = await self._call_method(process, "calc_reward", process.inner_id, **kwargs)
        return None if reward is None else float(reward)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        process = self._rollout_processes.pop(instance_id, None)
        if process is None:
            return
        try:
            if process.end_reason is None:
                await self._call_method(process, "release", process.inner_id, **kwargs)
        finally:
            process.pool.end(process.worker)

    async def _call_method(self, process: _RolloutProcess, method: str, *args: Any, **kwargs: Any) -> Any:
        with exclude_queue_time():
            await process.lock.acquire()
        try:
            return await process.worker.request({"verb": method, "args": args, "kwargs": kwargs})
        except asyncio.CancelledError:
            process.end_reason = f"its process was ended in the middle of {method}"
            raise
        except ToolDied as died:
            process.end_reason = process.end_reason or f"{method}, when {died}"
            raise
        finally:
            process.lock.release()


def _target(tool: BaseTool) -> ObjectRef:
    kind = type(tool)
    where = f"tool {tool.name}: isolate = True"
    try:
        target = ObjectRef.of(kind)
    except ToolwiseError as fault:
        raise ToolwiseError(f"{where} needs a class that a worker process can load: {fault}") from None
    required = {
        name
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }
    if not required <= {"config", "tool_schema"}:
        raise ToolwiseError(f"{where} needs a class whose constructor takes only (config) or (config, tool_schema)")
    try:
        json.dumps(tool.config)
    except (TypeError, ValueError):
        raise ToolwiseError(
            f"{where} needs a configuration that is plain JSON, so that a worker can create the tool"
        ) from None
    return target
