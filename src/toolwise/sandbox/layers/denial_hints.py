"""Explains to users what a refused system call was for and which permission would allow it."""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Iterator

ALL_ALLOWED = ("calls", "files", "network", "subprocess")
"""For a sandbox with neither Landlock nor a seccomp filter: refusals there do not come from us."""
REFUSED_ERRNOS = (errno.EPERM, errno.EACCES, errno.EROFS)
"""EROFS: readable paths are mounted read-only in a mount namespace."""
DISK_FULL_ERRNOS = (errno.EFBIG, errno.ENOSPC, errno.EDQUOT)
NETWORK = "the sandbox has no network: permissions=('network',) allows it"
SUBPROCESS = "the sandbox starts no processes: permissions=('subprocess',) allows it"
FILES = (
    "the sandbox reads only its own file, the modules beside it that it imports and packages, and writes only to its "
    "working folder: read=[…] adds to it"
)
METADATA = "the sandbox changes no modes, times or attributes of files: shutil.copyfile copies a file without them"
SHARED_MEMORY = "the sandbox has no shared memory: mmap.mmap(-1, n, flags=mmap.MAP_PRIVATE) works"
OTHER = "the sandbox refuses this call"
_NETWORK_FILES = ("socket.py", "ssl.py", "socketserver.py", "client.py", "selector_events.py")
_METADATA_WORDS = ("chmod", "copymode", "copystat", "utime", "setxattr")
_PROCESS_WORDS = ("fork", "exec", "spawn", "subprocess", "popen", "os.system", "Process(", "posix_spawn")


def explain(fault: BaseException, allowed: tuple[str, ...] = ()) -> str | None:
    """One sentence if the sandbox caused the fault; None if it is an ordinary error in the code."""
    for cause in _chain(fault):
        if isinstance(cause, OSError) and type(cause).__name__ == "gaierror" and "network" not in allowed:
            return NETWORK
        if isinstance(cause, OSError) and cause.errno in REFUSED_ERRNOS:
            return _explain_refusal(cause, allowed)
    return None


def _chain(fault: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [fault]
    while waiting:
        current = waiting.pop(0)
        if current is None or id(current) in seen or len(seen) > 20:
            continue
        seen.add(id(current))
        yield current
        reason = getattr(current, "reason", None)
        waiting += [reason if isinstance(reason, BaseException) else None, current.__cause__, current.__context__]


def _explain_refusal(fault: OSError, allowed: tuple[str, ...]) -> str | None:
    frames = traceback.extract_tb(fault.__traceback__)
    if any(frame.filename.endswith(_NETWORK_FILES) for frame in frames) and "network" not in allowed:
        return NETWORK
    context = " ".join(f"{os.path.basename(frame.filename)} {frame.name} {frame.line or ''}" for frame in frames)
    context = context.replace("exec_module", "")  # an import, not exec
    if fault.filename is None or any(word in context for word in _PROCESS_WORDS[:5]):
        if any(word in context for word in _PROCESS_WORDS) and "subprocess" not in allowed:
            return SUBPROCESS
        if "socket" in context and "network" not in allowed:
            return NETWORK
    if "calls" not in allowed:
        if any(word in context for word in _METADATA_WORDS):
            return METADATA
        if "mmap(" in context or "SemLock" in context:
            return SHARED_MEMORY
    if fault.filename is not None and "files" not in allowed:
        return FILES
    return OTHER if "calls" not in allowed else None
