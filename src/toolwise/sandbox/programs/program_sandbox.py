"""Where programs that a model writes run: each in a fresh process, in a working folder that its rollout keeps.

Never in a reward's worker: whoever shares a process with a grader can grade itself.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, get_args

from toolwise.concurrency.deadlines import exclude_pool_queue_time
from toolwise.sandbox.faults import SandboxError
from toolwise.sandbox.layers.bubblewrap import MountView, host_namespaces
from toolwise.sandbox.layers.hardening import LAYER_REQUIREMENTS, LAYERS, Plan, Tier, readable_paths
from toolwise.sandbox.programs.run import Language, ProgramResult, ProgramSpec, StopSignal, run_program
from toolwise.sandbox.programs.work_folders import WorkFolder, WorkFolders
from toolwise.sandbox.report import Report, probe
from toolwise.sandbox.sandbox import PERMISSIONS
from toolwise.sandbox.scratch import remove_in_background
from toolwise.sandbox.targets import package_folder, readable_folders

log = logging.getLogger("toolwise.sandbox")
WORK_MOUNT, TEMPORARY_MOUNT = "/sandbox", "/tmp"
"""What a program's folders are called in a mount namespace: the same in every rollout."""
MAX_PROGRAM_BYTES = 100_000
T = TypeVar("T")
_alive: weakref.WeakSet[ProgramSandbox] = weakref.WeakSet()


class ProgramSandbox:
    """Runs programs in one language. Safe to use from several threads and event loops.

    `timeout_s` is a program's own time; `memory_mb` what it may take, a shell's processes together; `file_mb` what its
    folder may hold; of what it prints, `output_kb` of stdout and as much of stderr are kept. At most `at_once` programs
    run at a time; others wait.
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
            raise SandboxError(f"programs in {language!r} cannot be run: there are {' and '.join(get_args(Language))}")
        if min(timeout_s, memory_mb, file_mb, output_kb, 1 if at_once is None else at_once) <= 0:
            raise SandboxError("a program's timeout_s, memory_mb, file_mb, output_kb and at_once must be more than 0")
        self.language, self.tier, self.timeout_s, self.output_bytes = language, tier, timeout_s, output_kb * 1024
        self.permissions = _checked_permissions(language, tier, permissions)
        self._report = _checked_report(language, tier, self.permissions, require)
        layers = tuple(layer for layer in LAYERS[tier] if layer in self._report.layers)
        readable = tuple(str(Path(place).expanduser().resolve()) for place in read)
        cpu_s = int(timeout_s * (os.cpu_count() or 1)) + 5
        own_disk = self._report.own_disk
        self._plan = Plan(layers, "", readable, memory_mb, file_mb, cpu_s, self.permissions, own_disk=own_disk)
        self._at_once = at_once or max(4, 2 * (os.cpu_count() or 1))
        self._reset()
        _alive.add(self)

    def _reset(self) -> None:
        self._lock, self._pid, self._closed = threading.Lock(), os.getpid(), False
        self._threads: ThreadPoolExecutor | None = None
        self._folders = WorkFolders()
        self._running: set[StopSignal] = set()

    def report(self) -> Report:
        """What was asked and what was got, layer by layer."""
        return self._report

    def open_folder(self, files: Mapping[str, str] | None = None) -> WorkFolder:
        """A folder for one rollout, with `files` (name -> text) in it; to be given back with `close_folder`."""
        if self._closed:
            raise SandboxError("this sandbox of programs is closed")
        return self._folders.open(files or {})

    async def close_folder(self, folder: WorkFolder) -> None:
        """Removes a folder with all that is in it."""
        if not self._closed:  # which removed them all
            await _await_completion(self._executor().submit(self._folders.remove, folder))

    async def run(self, text: str, folder: WorkFolder) -> ProgramResult:
        """Runs a program. Whoever cancels this ends the program, and comes back when nothing of it is left."""
        stop = StopSignal()
        with self._lock:
            self._running.add(stop)
        try:
            # Waiting while `at_once` others run is not the program's time.
            work = exclude_pool_queue_time(lambda: self._run(text, folder, stop))
            result = await _await_completion(self._executor().submit(work), stop.request_stop)
        finally:
            with self._lock:
                self._running.discard(stop)
        if result is None:
            raise SandboxError("this sandbox of programs was closed while a program ran")
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
            remove_in_background(temporary)

    def _make_spec(self, text: str, folder: WorkFolder, temporary: Path) -> ProgramSpec:
        """The two folders have names of their own where there are namespaces, and their real ones elsewhere."""
        layers, permissions, work = self._plan.layers, self.permissions, folder.work_path
        scratch, write, view = str(work), str(temporary), None
        packages = tuple(place for place in readable_folders() if place != str(package_folder()))
        read = (*packages, *self._plan.read)
        if "namespaces" in layers:
            scratch, write = WORK_MOUNT, TEMPORARY_MOUNT
            read += ("/proc",) if "subprocess" in permissions else ()  # of its own processes
            seen = readable_paths((*read, str(package_folder())), permissions)
            mounts = ((str(work), scratch), (str(temporary), write))
            file_mb = self._plan.file_mb if self._plan.own_disk else None
            view = MountView(tuple(seen), mounts, scratch, "network" in permissions, file_mb)
        limits = (self._plan.memory_mb, self._plan.file_mb, self._plan.cpu_s)
        plan = Plan(layers, scratch, read, *limits, permissions, (write,), host_namespaces(view), self._plan.own_disk)
        folders = (work, temporary)
        return ProgramSpec(self.language, text, plan, view, folders, self.timeout_s, self.output_bytes, folder.lock)

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._closed:
                raise SandboxError("this sandbox of programs is closed")
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._at_once, thread_name_prefix="toolwise-program")
            return self._threads

    def close(self) -> None:
        """Ends all programs and removes all folders."""
        if self._pid != os.getpid():  # a fork's: they are the parent's
            return
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, None
            for stop in self._running:
                stop.request_stop()
        if threads is not None:
            threads.shutdown(wait=True, cancel_futures=True)
        self._folders.close()

    def _after_fork(self) -> None:
        folders, closed = self._folders, self._closed
        self._reset()
        self._closed = closed
        folders.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()


async def _await_completion(future: Future[T], stop: Callable[[], None] = lambda: None) -> T:
    """What a thread's work gives. A cancellation stops the work, and is raised once the work has put itself away:
    however often it comes."""
    waiter = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(waiter)
    except asyncio.CancelledError:
        stop()
        future.cancel()  # which counts only where it has not begun
        while not waiter.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({waiter})
        if not waiter.cancelled():
            waiter.exception()  # nobody is left to hear of it
        raise


def _checked_permissions(language: Language, tier: Tier, given: Iterable[str]) -> tuple[str, ...]:
    permissions = set(given)
    unknown = sorted(permissions - set(PERMISSIONS))
    if unknown:
        raise SandboxError(f"there is no permission {unknown[0]!r}: there are {' and '.join(PERMISSIONS)}")
    if language == "shell" and tier == "namespaced":
        permissions.add("subprocess")  # what it starts is locked in with it
    if language == "shell" and "subprocess" not in permissions:
        raise SandboxError(
            f"a shell starts processes: use tier='namespaced', or permissions=['subprocess'] with tier={tier!r}"
        )
    return tuple(sorted(permissions))


def _checked_report(language: Language, tier: Tier, permissions: tuple[str, ...], require: bool) -> Report:
    """What there is, told where it is less than was asked, and refused where it is too little for strangers' code."""
    if tier == "off" or tier not in LAYERS or (language == "shell" and tier == "basic"):
        least = "'namespaced' or 'standard'" if language == "shell" else "'namespaced', 'standard' or 'basic'"
        raise SandboxError(f"programs that a model writes do not run in tier {tier!r}: use {least}")
    report = probe(tier, permissions)
    if require and not report.complete:
        raise SandboxError(f"{report} (require=True)")
    walls = {"namespaces"} if language == "shell" and tier == "namespaced" else {"namespaces", "landlock"}
    held = {"limits", "no_new_privs", "seccomp"} <= set(report.layers) and walls & set(report.layers)
    if tier != "basic" and not held:
        raise SandboxError(_missing_layers_message(language, report, walls))
    if tier == "basic" or not report.complete:
        log.warning("programs in %s: %s", language, report)
    return report


def _missing_layers_message(language: Language, report: Report, walls: set[str]) -> str:
    """One line for a machine that isolates too little for a model's programs in this language."""
    wanted = [layer for layer in report.missing if layer in {"limits", "no_new_privs", "seccomp"} | walls]
    gaps = "; ".join(f"{report.missing[layer]} (needed: {LAYER_REQUIREMENTS[layer]})" for layer in wanted)
    less = "tier='standard' with permissions=['subprocess']" if language == "shell" else "tier='basic'"
    return (
        f"{language} programs of a model cannot run in tier {report.asked!r} here: {gaps}; "
        f"or isolate them less with {less}, see docs/security.md"
    )


def _close_all() -> None:
    for sandbox in list(_alive):
        sandbox.close()


def _reset_all_after_fork() -> None:
    for sandbox in list(_alive):
        sandbox._after_fork()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_reset_all_after_fork)
