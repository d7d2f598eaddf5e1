"""Warm processes of an outside agent: each runs one task at a time, and is replaced when it hangs, dies or leaks."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from toolwise.concurrency.deadlines import call_in_thread, exclude_queue_time
from toolwise.config.agent import AgentConfig
from toolwise.config.imports import GIVEN_IN_PYTHON, check_nameable
from toolwise.errors import ConfigError
from toolwise.rollout.agents.agent_process import (
    AgentDiedError,
    AgentFaultError,
    AgentLoadError,
    AgentProcess,
    worker_command,
)

log = logging.getLogger("toolwise.agents")
LOAD_TIMEOUT_S = 120.0
"""How long the imports of an agent may take on a busy machine."""
MAX_THREADS = 32
"""A process in which a task leaves more threads than this is replaced."""


class AgentPool:
    """Runs `agent.run` or `agent.command`. Callers bound how many tasks run at once: each has a process."""

    def __init__(self, config: AgentConfig) -> None:
        if config.run.startswith(GIVEN_IN_PYTHON):
            check_nameable(config.run, "agent.run")
        if not config.command and ":" not in config.run:
            raise ConfigError(f"agent.run = {config.run!r} is not a reference: write path/to/file.py:name")
        self.config = config
        self.killed = 0
        """Processes that were killed or died during a task."""
        self._idle: list[AgentProcess] = []
        self._live: set[AgentProcess] = set()
        self._load_error: AgentLoadError | None = None
        self._closed = False

    async def run(self, task: Mapping[str, Any], base_url: str, api_key: str) -> Any:
        """The agent's result for `task`. Cancelling it kills the process."""
        with exclude_queue_time():  # what loading takes is not the task's
            process = await self._take(base_url, api_key)
        try:
            if self.config.command:
                return await process.run_once(task)
            result = await process.run(task, base_url, api_key)
        except AgentFaultError:
            self._put_back(process)
            raise
        except BaseException:
            self.killed += 1
            self._end(process)
            raise
        else:
            self._put_back(process)
            return result
        finally:
            if self.config.command:
                self._end(process)

    def pids(self) -> list[int]:
        return [process.pid for process in self._live]

    def close(self) -> None:
        """End every process, also those that work."""
        self._closed = True
        for process in self._live:
            process.kill()
        for process in self._live:
            process.close()
        self._live.clear()
        self._idle.clear()

    async def _take(self, base_url: str, api_key: str) -> AgentProcess:
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            self._end(process)
        if self._load_error is not None:
            raise self._load_error
        config, environment = self.config, dict(os.environ)
        if config.command:  # `run` gets them as arguments, others for each task
            environment |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        command = config.command or worker_command(config.python or sys.executable)
        try:
            process = await call_in_thread(
                lambda: AgentProcess(command, environment, worker=not config.command), name="starting an agent"
            )
        except OSError as fault:
            raise AgentDiedError(f"no process can be started for the agent: {fault}") from None
        self._live.add(process)
        try:
            if not config.command:
                await self._load(process)
        except BaseException:
            self._end(process)
            raise
        return process

    async def _load(self, process: AgentProcess) -> None:
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                await process.load(self.config.run, [] if self.config.python else sys.path)
        except AgentLoadError as fault:
            self._load_error = fault  # the next process would fail too, after as long
            raise
        except TimeoutError:
            raise AgentDiedError(f"the agent took longer than {LOAD_TIMEOUT_S:g} s to load") from None

    def _put_back(self, process: AgentProcess) -> None:
        if self.config.command:
            return
        if process.threads > MAX_THREADS:
            log.warning("the agent left %d threads running: its process is replaced", process.threads)
            self._end(process)
        elif self._closed:
            self._end(process)
        else:
            self._idle.append(process)

    def _end(self, process: AgentProcess) -> None:
        process.kill()
        if process in self._live:
            self._live.discard(process)
            process.release()
