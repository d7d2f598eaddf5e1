"""A refused call is explained by the permission that would allow it."""

from __future__ import annotations

import errno
import mmap
import shutil
import socket
import subprocess
from unittest.mock import patch
from urllib.error import URLError

import pytest

from toolwise.sandbox.layers import denial_hints


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
    assert denial_hints.explain(fault) == denial_hints.NETWORK


def test_a_subprocess_names_processes() -> None:
    with patch("subprocess._fork_exec", _refuse):
        fault = _caught(lambda: subprocess.run(["true"], check=False, close_fds=False, preexec_fn=lambda: None))
    assert denial_hints.explain(fault) == denial_hints.SUBPROCESS


def test_a_file_names_the_way_to_read_it() -> None:
    assert denial_hints.explain(PermissionError(errno.EACCES, "Permission denied", "/etc/x")) == denial_hints.FILES


def test_a_name_that_cannot_be_looked_up_is_the_network() -> None:
    assert denial_hints.explain(socket.gaierror(-3, "Temporary failure in name resolution")) == denial_hints.NETWORK


def test_it_is_found_under_other_exceptions() -> None:
    inner = PermissionError(errno.EPERM, "Operation not permitted")
    assert denial_hints.explain(URLError(inner)) is not None
    outer = ValueError("wrapped")
    outer.__cause__ = inner
    assert denial_hints.explain(outer) is not None


@pytest.mark.parametrize(
    "fault", [ValueError("x"), PermissionError("said by the code itself"), OSError(2, "not there")]
)
def test_other_errors_are_not_explained(fault: Exception) -> None:
    assert denial_hints.explain(fault) is None


def test_a_cycle_of_causes_ends() -> None:
    one, two = ValueError(), ValueError()
    one.__cause__, two.__cause__ = two, one
    assert denial_hints.explain(one) is None


@pytest.mark.parametrize(
    "fault",
    [PermissionError(1, "x"), PermissionError(13, "x", "/etc/x"), socket.gaierror(-3, "no"), URLError(OSError(1, "x"))],
)
def test_where_nothing_is_refused_nothing_is_explained(fault: Exception) -> None:
    assert denial_hints.explain(fault, denial_hints.ALL_ALLOWED) is None


def test_shared_memory_and_metadata_name_what_works_instead() -> None:
    with patch("mmap.mmap", _refuse):
        assert denial_hints.explain(_caught(lambda: mmap.mmap(-1, 4096))) == denial_hints.SHARED_MEMORY
    with patch("os.chmod", _refuse):
        assert denial_hints.explain(_caught(lambda: shutil.copymode(__file__, __file__))) == denial_hints.METADATA
