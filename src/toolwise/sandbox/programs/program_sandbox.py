"""`ProgramSandbox`: runs programs written by a model, each in a fresh process in the working folder of its rollout.

Never in a reward's worker: code that shares a process with its grader can grade itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, get_args

from toolwise.concurrency.deadlines import exclude_pool_queue_time
from toolwise.concurrency.tasks import wait_all
from toolwise.sandbox.base_sandbox import LIVE_SANDBOXES, BaseSandbox
from toolwise.sandbox.faults import SandboxError
from toolwise.sandbox.layers.bubblewrap import MountView, host_namespaces
from toolwise.sandbox.layers.hardening import LAYER_REQUIREMENTS, LAYERS, Tier, readable_paths
from toolwise.sandbox.programs.run import Language, ProgramResult, ProgramSpec, StopSignal, run_program
from toolwise.sandbox.programs.work_folders import WorkFolder, WorkFolders
from toolwise.sandbox.report import Report, probe
from toolwise.sandbox.scratch import EMPTY_S, remove_in_background
from toolwise.sandbox.targets import package_folder, readable_folders

log = logging.getLogger("toolwise.sandbox")
WORK_MOUNT, TEMPORARY_MOUNT = "/sandbox", "/tmp"
"""Paths of a program's folders in a mount namespace: the same in every rollout."""
MAX_PROGRAM_BYTES = 100_000
T = TypeVar("T")


class ProgramSandbox(BaseSandbox):
    """Runs programs in one language. Safe to use from several threads and event loops.

    `timeout_s` limits the run time of a program; `memory_mb` its memory (all processes of a shell together); `file_mb`
    the size of its folder. `output_kb` each of stdout and stderr are kept. At most `at_once` programs run at a time;
    others wait.
    """

    def __init__(
        self,
        language: Language,
        tier: Tier = "namespaced",
        *,
        timeout_s: float = 10.0,
        memory_mb: int = 512,
        file_mb: int = 64,
        output_kb: int = 16,
        read: Iterable[str | Path] = (),
        permissions: Iterable[str] = (),
        require: bool = False,
        at_once: int | None = None,
    ) -> None:
        if language not in get_args(Language):
            raise SandboxError(f"cannot run programs in {language!r}: use {' or '.join(get_args(Language))}")
        if min(timeout_s, memory_mb, file_mb, output_kb, 1 if at_once is None else at_once) <= 0:
            raise SandboxError(
                "a program's timeout_s, memory_mb, file_mb, output_kb and at_once must be greater than 0"
            )
        report = _checked_report(language, tier, set(permissions), require)
        layers = [layer for layer in LAYERS[tier] if layer in report.layers]
        cpu_s = int(timeout_s * (os.cpu_count() or 1)) + 5
        super().__init__(report, layers, read, memory_mb=memory_mb, file_mb=file_mb, cpu_s=cpu_s)
        self.language, self.timeout_s, self.output_bytes = language, timeout_s, output_kb * 1024
        self._at_once = at_once or max(4, 2 * (os.cpu_count() or 1))
        self._reset(closed=False)
        LIVE_SANDBOXES.add(self)

    def _reset(self, *, closed: bool) -> None:
        self._lock, self._pid, self._closed = threading.Lock(), os.getpid(), closed
        self._threads = ThreadPoolExecutor(self._at_once, thread_name_prefix="toolwise-program")
        self._folders = WorkFolders()
        self._running: set[StopSignal] = set()

    def open_folder(self, files: Mapping[str, str] | None = None) -> WorkFolder:
        """Create a folder for one rollout, with `files` (name -> text) in it. Remove it with `close_folder`."""
        if self._closed:
            raise SandboxError("this program sandbox is closed")
        return self._folders.open(files or {})

    async def close_folder(self, folder: WorkFolder) -> None:
        if not self._closed:  # close() has removed them all
            await _await_completion(self._submit(lambda: self._folders.remove(folder)))

    async def run(self, text: str, folder: WorkFolder) -> ProgramResult:
        """Run a program. Cancelling kills the program and returns once nothing of it is left."""
        stop = StopSignal()
        with self._lock:
            self._running.add(stop)
        try:
            # Time spent queueing behind `at_once` others does not count.
            work = exclude_pool_queue_time(lambda: self._run(text, folder, stop))
            result = await _await_completion(self._submit(work), stop.request_stop)
        finally:
            with self._lock:
                self._running.discard(stop)
        if result is None:
            raise SandboxError("this program sandbox was closed while a program ran")
        return result

    def _run(self, text: str, folder: WorkFolder, stop: StopSignal) -> ProgramResult | None:
        if stop.stop_requested:
            return None
        text = text.encode("utf-8", "replace").decode()
        if len(text.encode()) > MAX_PROGRAM_BYTES:
            return ProgramResult(
                "too_big", f"a program may have {MAX_PROGRAM_BYTES:,} bytes; this one has {len(text):,}"
            )
        if self.language == "shell" and "\0" in text:
            return ProgramResult("exit", "a command cannot hold a NUL character", exit_status=2)
        temporary = self._folders.temporary(folder)
        try:
            return run_program(self._make_spec(text, folder, temporary), stop)
        finally:
            remove_in_background(temporary, EMPTY_S)  # in a thread that blocks anyway: no file outlives the call

    def _make_spec(self, text: str, folder: WorkFolder, temporary: Path) -> ProgramSpec:
        """In namespaces the two folders have fixed paths; elsewhere their real ones."""
        permissions, work = self.permissions, folder.work_path
        scratch, write, view = str(work), str(temporary), None
        packages = tuple(folder_path for folder_path in readable_folders() if folder_path != str(package_folder()))
        read = (*packages, *self._plan.read)
        if "namespaces" in self._plan.layers:
            scratch, write = WORK_MOUNT, TEMPORARY_MOUNT
            read += ("/proc",) if "subprocess" in permissions else ()  # it lists only its own processes
            visible = readable_paths((*read, str(package_folder())), permissions)
            mounts = ((str(work), scratch), (str(temporary), write))
            file_mb = self._plan.file_mb if self._plan.own_disk else None
            view = MountView(tuple(visible), mounts, scratch, "network" in permissions, file_mb)
        plan = replace(self._plan, scratch=scratch, read=read, write=(write,), outside=host_namespaces(view))
        folders = (work, temporary)
        return ProgramSpec(self.language, text, plan, view, folders, self.timeout_s, self.output_bytes, folder.lock)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        with self._lock:
            if self._closed:
                raise SandboxError("this program sandbox is closed")
            return self._threads.submit(work)

    def close(self) -> None:
        """End all programs and remove all folders."""
        if self._pid != os.getpid():  # a forked child: they belong to the parent
            return
        with self._lock:
            self._closed = True
            for stop in self._running:
                stop.request_stop()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._folders.close()

    def _after_fork(self) -> None:
        folders = self._folders
        self._reset(closed=self._closed)
        folders.close()


async def _await_completion(future: Future[T], stop: Callable[[], None] = lambda: None) -> T:
    """Await the result of a thread. A cancellation stops the work and is raised once the work has cleaned up, even if
    cancelled repeatedly."""
    waiter = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(waiter)
    except asyncio.CancelledError:
        stop()
        future.cancel()  # works only if it has not started
        with suppress(asyncio.CancelledError):
            await wait_all([waiter])
        if not waiter.cancelled():
            waiter.exception()  # retrieve it: no caller is left to handle it
        raise


def _checked_report(language: Language, tier: Tier, permissions: set[str], require: bool) -> Report:
    """Probe this machine. Warns if layers are missing; raises if too few are left for untrusted code."""
    if language == "shell" and tier == "namespaced":
        permissions.add("subprocess")  # what it starts is in the same namespaces
    if language == "shell" and "subprocess" not in permissions:
        raise SandboxError(
            f"a shell starts processes: use tier='namespaced', or permissions=['subprocess'] with tier={tier!r}"
        )
    if tier == "off" or tier not in LAYERS or (language == "shell" and tier == "basic"):
        tiers = "'namespaced' or 'standard'" if language == "shell" else "'namespaced', 'standard' or 'basic'"
        raise SandboxError(f"programs written by a model cannot run in tier {tier!r}: use {tiers}")
    report = probe(tier, permissions, require=require)
    walls = {"namespaces"} if language == "shell" and tier == "namespaced" else {"namespaces", "landlock"}
    isolated = {"limits", "no_new_privs", "seccomp"} <= set(report.layers) and walls & set(report.layers)
    if tier != "basic" and not isolated:
        raise SandboxError(_missing_layers_message(language, report, walls))
    if tier == "basic" or not report.complete:
        log.warning("programs in %s: %s", language, report)
    return report


def _missing_layers_message(language: Language, report: Report, walls: set[str]) -> str:
    needed = [layer for layer in report.missing if layer in {"limits", "no_new_privs", "seccomp"} | walls]
    gaps = "; ".join(f"{report.missing[layer]} (needed: {LAYER_REQUIREMENTS[layer]})" for layer in needed)
    alternative = "tier='standard' with permissions=['subprocess']" if language == "shell" else "tier='basic'"
    return (
        f"{language} programs written by a model cannot run in tier {report.requested!r} here: {gaps}; "
        f"or use weaker isolation with {alternative}, see docs/security.md"
    )
