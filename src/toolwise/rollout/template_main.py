"""Renders chat templates in a process of its own, started by `template_process.py`. Imports only jinja2.

Templates see what they see in transformers: the same functions, filters and tags, in jinja's sandbox. The kernel limits
the CPU time and the memory of each rendering: when its CPU time is used up the process is killed, whatever it does.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

from jinja2 import Template, nodes, pass_eval_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

HEADER = struct.Struct("!dQQQ")
"""Of a request: the fields of `Limits` and the length of (source, variables, now) as JSON."""
ANSWER = struct.Struct("!cQ")
MAX_ERROR_CHARS = 2_000


class Limits(NamedTuple):
    cpu_s: float
    memory_bytes: int
    chars: int
    """Of the rendered text."""


class _GenerationTag(Extension):
    """{% generation %} marks what the assistant wrote, for loss masks, which are not used here: keeps its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_keep"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _keep(self, context: nodes.EvalContext, caller: Any) -> str:
        return str(caller())


class _Dict:
    """`dict` without the attributes of the class."""

    def __call__(self, *items: Any, **named: Any) -> dict[Any, Any]:
        return dict(*items, **named)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


class _Namespace(Namespace):
    def __init__(*arguments: Any, **named: Any) -> None:
        values = dict(*arguments[1:], **named)
        for name in values:
            _check_name(name)
        Namespace.__init__(arguments[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"chat templates cannot store underscore-prefixed attributes: {name!r:.40}")


def _raise_exception(message: Any) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Without the escapes for HTML that jinja's own writes; no other options, which could be functions."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=64)
def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, dict=_Dict(), namespace=_Namespace)
    return environment.from_string(source)


def render(source: str, variables: Mapping[str, Any], now: datetime, limits: Limits) -> tuple[bytes, bytes]:
    """The kind of the answer and its text: "t"ext, an "e"rror of the template, or a "l"imit that it exceeds."""
    try:
        text = _compile(source).render({"strftime_now": now.strftime, **variables})
        if len(text) > limits.chars:
            return b"l", b"it produces more text than any conversation needs: does it repeat itself?"
        return b"t", text.encode("utf-8", "surrogatepass")
    except MemoryError:
        pass
    except Exception as fault:
        try:
            reason = " ".join(str(fault)[:MAX_ERROR_CHARS].split()) or type(fault).__name__
            return b"e", reason.encode("utf-8", "replace")
        except MemoryError:
            pass
    return b"l", f"it needs more than {limits.memory_bytes >> 20} MB of memory".encode()


def main() -> None:
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    own_bytes, (unlimited, hard) = _address_space(), resource.getrlimit(resource.RLIMIT_AS)
    while len(header := requests.read(HEADER.size)) == HEADER.size:
        *values, length = HEADER.unpack(header)
        limits = Limits(*values)
        source, variables, now = json.loads(requests.read(length))
        allowed = own_bytes + limits.memory_bytes
        resource.setrlimit(
            resource.RLIMIT_AS, (allowed if hard == resource.RLIM_INFINITY else min(allowed, hard), hard)
        )
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
        kind, text = render(source, variables, datetime.fromisoformat(now), limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (unlimited, hard))
        answers.write(ANSWER.pack(kind, len(text)))
        answers.write(text)
        answers.flush()


def _address_space() -> int:
    """Bytes that this process has mapped; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
