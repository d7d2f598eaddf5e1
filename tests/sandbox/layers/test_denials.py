"""A refused call is explained by the permission that would have allowed it."""

from __future__ import annotations

import errno
import mmap
import shutil
import socket
import subprocess
from unittest.mock import patch
from urllib.error import URLError

import pytest

from toolwise.sandbox.layers import denials


def _caught(attempt: object) -> BaseException:
    try:
        attempt()  # type: ignore[operator]
    except BaseException as fault:
        return fault
    raise AssertionError("nothing was raised")


def _refuse(*_: object, **__: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_a_socket_names_the_network() -> None:
    with patch.object(socket.socket, "connect", _refuse):
        fault = _caught(lambda: socket.socket().connect(("127.0.0.1", 1)))
    assert denials.explain(fault) == denials.NETWORK


def test_a_subprocess_names_processes() -> None:
    with patch("subprocess._fork_exec", _refuse):
        fault = _caught(lambda: subprocess.run(["true"], check=False, close_fds=False, preexec_fn=lambda: None))
    assert denials.explain(fault) == denials.SUBPROCESS


def test_a_file_names_the_way_to_read_it() -> None:
    assert denials.explain(PermissionError(errno.EACCES, "Permission denied", "/etc/x")) == denials.FILES


def test_a_name_that_cannot_be_looked_up_is_the_network() -> None:
    assert denials.explain(socket.gaierror(-3, "Temporary failure in name resolution")) == denials.NETWORK


def test_it_is_found_under_other_exceptions() -> None:
    inner = PermissionError(errno.EPERM, "Operation not permitted")
    assert denials.explain(URLError(inner)) is not None
    outer = ValueError("wrapped")
    outer.__cause__ = inner
    assert denials.explain(outer) is not None


@pytest.mark.parametrize(
    "fault", [ValueError("x"), PermissionError("said by the code itself"), OSError(2, "not there")]
)
def test_other_mistakes_are_the_codes_own(fault: Exception) -> None:
    assert denials.explain(fault) is None


def test_a_cycle_of_causes_ends() -> None:
    one, two = ValueError(), ValueError()
    one.__cause__, two.__cause__ = two, one
    assert denials.explain(one) is None


@pytest.mark.parametrize(
    "fault",
    [PermissionError(1, "x"), PermissionError(13, "x", "/etc/x"), socket.gaierror(-3, "no"), URLError(OSError(1, "x"))],
)
def test_where_nothing_is_refused_nothing_is_explained(fault: Exception) -> None:
    assert denials.explain(fault, denials.ALL_ALLOWED) is None


def test_shared_memory_and_metadata_name_what_works_instead() -> None:
    with patch("mmap.mmap", _refuse):
        assert denials.explain(_caught(lambda: mmap.mmap(-1, 4096))) == denials.SHARED_MEMORY
    with patch("os.chmod", _refuse):
        assert denials.explain(_caught(lambda: shutil.copymode(__file__, __file__))) == denials.METADATA
