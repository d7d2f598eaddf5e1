"""One thing that hostile or clumsy reward code does, as a line of a list."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

HEAD = """
import asyncio, builtins, ctypes, errno, fcntl, gc, itertools, json, math, mmap, os, re, resource, signal, socket
import struct, subprocess, sys, threading, time
from toolwise.types import EvaluateResult, MetricResult, StepOutput

def system(number, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    answer = libc.syscall(number, *arguments)
    if answer < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer

def channel():
    for fd in range(3, 64):
        try:
            if os.fstat(fd).st_mode & 0o170000 == 0o140000:
                return fd
        except OSError:
            pass
"""


@dataclass(frozen=True)
class Case:
    """`body` is the body of f(messages, truth); `module` stands before it. `kind` is one or several, "ok" for none."""

    name: str
    kind: str
    body: str = "return 1.0"
    module: str = ""
    score: float | None = None
    replaced: bool | None = None
    """Whether the worker must not serve again."""

    def source(self) -> str:
        return f"{HEAD}\n{textwrap.dedent(self.module)}\ndef f(messages, truth):\n" + textwrap.indent(
            textwrap.dedent(self.body).strip("\n"), "    "
        )
