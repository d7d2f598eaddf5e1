"""Entry point of a program's process: hardens itself, reports that, and runs the program.

Started by `run.py`. Imports little, since every call pays for it.
"""

from __future__ import annotations

import ast
import json
import linecache
import os
import sys
import traceback
import types
from contextlib import suppress
from typing import Any, NoReturn

from toolwise.sandbox.layers.denial_hints import DISK_FULL_ERRNOS, explain
from toolwise.sandbox.layers.disk import send_folders
from toolwise.sandbox.layers.hardening import Plan, harden
from toolwise.sandbox.layers.kernel import die_with_trainer
from toolwise.sandbox.layers.seccomp import require_fork_approval

PROGRAM_FILENAME = "<program>"
SHELLS = ("/bin/bash", "/bin/sh")
NOT_HARDENED = 70
_OUT_OF_MEMORY = b'{"kind": "memory", "message": "it asked for more memory than memory_mb allows"}\n'


def main(start: dict[str, Any]) -> NoReturn:
    """`start`: descriptors of the order, the status pipe and the trainer's liveness pipe, and the parent's pid."""
    die_with_trainer(start["life"], start["parent"])
    status_fd = start["status"]
    for descriptor in (start["life"], status_fd, start["folders"]):
        os.set_inheritable(descriptor, False)
    with os.fdopen(start["order"], "rb") as file:
        order = json.load(file)
    plan = Plan.from_json(order["plan"])
    if start["forks"] is not None:
        require_fork_approval(start["forks"])
    result = harden(plan, lambda: _wait_for_files(start["folders"], plan.folders))
    os.write(status_fd, json.dumps({"missing": result.missing}).encode() + b"\n")
    if result.missing:
        os._exit(NOT_HARDENED)
    if order["language"] == "shell":
        shell = next(path for path in SHELLS if os.path.exists(path))
        os.execve(shell, [shell, "-c", order["text"]], os.environ)
    sys.exit(_run(order["text"], start["keep"], status_fd, plan.permissions))


def _wait_for_files(channel: int, folders: tuple[str, ...]) -> None:
    send_folders(channel, folders, b"x")
    if not os.read(channel, 1):  # the files do not fit, or the trainer is gone
        os._exit(NOT_HARDENED)
    os.close(channel)


def _run(text: str, path: list[str], status_fd: int, permissions: tuple[str, ...]) -> int:
    """Run `text` as a script and print the value of a final expression. Returns the exit status."""
    sys.argv, sys.path[:] = [""], [os.getcwd(), *path]
    module = types.ModuleType("__main__")
    for name in [name for name in sys.modules if name.partition(".")[0] == "toolwise"]:
        del sys.modules[name]
    sys.modules["__main__"] = module
    linecache.cache[PROGRAM_FILENAME] = (len(text), None, f"{text}\n".splitlines(keepends=True), PROGRAM_FILENAME)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)  # keep what a program printed before its deadline
    try:
        _execute(text, module.__dict__)
    except SystemExit:
        raise
    except BaseException as fault:  # untrusted code may raise anything
        _report_exception(fault, status_fd, permissions)
        return 1
    return 0


def _execute(text: str, names: dict[str, Any]) -> None:
    tree = ast.parse(text, PROGRAM_FILENAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, PROGRAM_FILENAME, "exec", dont_inherit=True), names)
    if last is not None:
        exec(compile(ast.Interactive([last]), PROGRAM_FILENAME, "single", dont_inherit=True), names)


def _report_exception(fault: BaseException, status_fd: int, permissions: tuple[str, ...]) -> None:
    """Print the traceback without our own frames to stderr; tell the trainer what an exit status cannot say."""
    trace = fault.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != PROGRAM_FILENAME:
        trace = trace.tb_next
    fault.__traceback__ = trace
    with suppress(Exception):
        if isinstance(fault, MemoryError):
            os.write(status_fd, _OUT_OF_MEMORY)
            traceback.clear_frames(trace)
        elif isinstance(fault, OSError) and fault.errno in DISK_FULL_ERRNOS:
            os.write(
                status_fd, json.dumps({"kind": "too_big", "message": f"it wrote too much: {fault}"}).encode() + b"\n"
            )
        elif (why := explain(fault, permissions)) is not None:
            os.write(status_fd, json.dumps({"kind": "denied", "message": why}).encode() + b"\n")
    with suppress(Exception):
        sys.stdout.flush()
        traceback.print_exception(fault)
