"""Warm processes of an outside agent: each runs one task at a time, and is replaced when it hangs, dies or leaks.

A process is started in a thread, which nobody can stop: it registers the process, or kills it if its caller has gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolwise.concurrency.deadlines import call_in_thread, exclude_queue_time, run_async
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
_SCRIPTS = (".py", ".sh", ".js", ".mjs", ".ts", ".rb", ".pl", ".jar")
MAX_THREADS = 32
"""A process in which a task leaves more threads than this is replaced."""


def _check_program(program: str, setting: str) -> None:
    if shutil.which(program) is None:
        problem = "cannot be executed" if Path(program).is_file() else "is not there"
        raise ConfigError(f"{setting}: the program {program!r} {problem}: install it, or write its path")


def _check_command(command: Sequence[str]) -> None:
    """Raise for a program or script that is not there: each task would fail."""
    _check_program(command[0], "agent.command")
    script = next((part for part in command[1:] if not part.startswith("-")), "")
    if script.endswith(_SCRIPTS) and not Path(script).is_file():
        raise ConfigError(f"agent.command: there is no file {script!r} in {Path.cwd()}: write its path")


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
        self.replaced = 0
        """Processes that were ended since a task left something running."""
        self._idle: list[AgentProcess] = []
        self._live: set[AgentProcess] = set()
        self._lock = threading.Lock()
        """Guards `_live` and `_closed`, which the threads that start processes use too."""
        self._loaded = False
        self._load_error: AgentLoadError | None = None
        self._closed = False

    def check(self) -> None:
        """Load the agent once before anything is rolled out; its process then waits for the first task. Raises
        `ConfigError` if it does not load. A command is not started; its program and script must be there."""
        if self.config.command:
            _check_command(self.config.command)
            return
        _check_program(self.config.python or sys.executable, "agent.python")
        try:
            run_async(self._warm_up())
        except AgentLoadError as fault:
            raise ConfigError(" ".join(str(fault).split())) from None
        except AgentDiedError as fault:
            raise ConfigError(f"agent.run = {self.config.run!r} does not load: {fault}") from None

    async def _warm_up(self) -> None:
        self._idle.append(await self._take("", ""))

    async def run(self, task: Mapping[str, Any], base_url: str, api_key: str) -> Any:
        """The agent's result for `task`. Cancelling it kills the process."""
        with exclude_queue_time():  # what loading takes is not the task's
            process = await self._take(base_url, api_key)
        try:
            if self.config.command:
                return await process.run_once(task)
            return await self._run_in_worker(process, task, base_url, api_key)
        except AgentFaultError:
            raise
        except BaseException:
            self.killed += 1
            self._end(process)
            raise
        finally:
            if self.config.command:
                self._end(process)

    async def _run_in_worker(self, process: AgentProcess, task: Mapping[str, Any], base_url: str, api_key: str) -> Any:
        try:
            result = await process.run(task, base_url, api_key)
        except AgentFaultError:
            await self._put_back(process)
            raise
        await self._put_back(process)
        return result

    def pids(self) -> list[int]:
        with self._lock:
            return [process.pid for process in self._live]

    def close(self) -> None:
        """End every process, also those that work."""
        with self._lock:
            self._closed = True
            live = list(self._live)
            self._live.clear()
        for process in live:
            process.kill()
        for process in live:
            process.close()
        self._idle.clear()

    async def _take(self, base_url: str, api_key: str) -> AgentProcess:
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            self._end(process)
        if self._load_error is not None:
            raise self._load_error
        process = await self._start(base_url, api_key)
        try:
            if not self.config.command:
                await self._load(process)
        except BaseException:
            self._end(process)
            raise
        return process

    async def _start(self, base_url: str, api_key: str) -> AgentProcess:
        config, environment = self.config, dict(os.environ)
        if config.command:  # `run` gets them as arguments, others for each task
            environment |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        command = config.command or worker_command(config.python or sys.executable)
        started: list[AgentProcess] = []
        gone = threading.Event()

        def start() -> AgentProcess:
            process = AgentProcess(command, environment, worker=not config.command)
            with self._lock:
                wanted = not (self._closed or gone.is_set())
                if wanted:
                    self._live.add(process)
                    started.append(process)
            if not wanted:
                process.close()
                raise AgentDiedError("the run has ended")
            return process

        try:
            return await call_in_thread(start, name="starting an agent")
        except OSError as fault:
            raise AgentDiedError(f"no process can be started for the agent: {fault}") from None
        except BaseException:
            with self._lock:
                gone.set()
            for process in started:
                self._end(process)
            raise

    async def _load(self, process: AgentProcess) -> None:
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                await process.load(self.config.run, [] if self.config.python else sys.path)
        except AgentLoadError as fault:
            if not self._loaded:
                self._load_error = fault  # the next process would fail too, after as long
            raise
        except TimeoutError:
            raise AgentDiedError(f"the agent took longer than {LOAD_TIMEOUT_S:g} s to load") from None
        self._loaded = True

    async def _put_back(self, process: AgentProcess) -> None:
        children = await call_in_thread(process.count_children, name="counting an agent's processes")
        threads = process.threads if process.threads > MAX_THREADS else 0
        if threads or children:
            self.replaced += 1
            count, what = (children, "processes") if children else (threads, "threads")
            log.warning("the agent left %d %s running: its process is replaced", count, what)
            self._end(process)
        elif self._closed:
            self._end(process)
        else:
            self._idle.append(process)

    def _end(self, process: AgentProcess) -> None:
        process.kill()
        with self._lock:
            was_live = process in self._live
            self._live.discard(process)
        if was_live:
            process.release()
