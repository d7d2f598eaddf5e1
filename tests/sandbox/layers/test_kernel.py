"""Kernel calls through ctypes, in separate processes since they cannot be undone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="these are Linux's calls")


def _run(body: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", f"from toolwise.sandbox.layers.kernel import *\nimport os\n{body}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()


def test_capabilities_can_be_dropped() -> None:
    assert _run("drop_capabilities(); print(capabilities())") == "0"


def test_privileges_are_not_gained() -> None:
    assert _run("print(has_no_new_privs()); set_no_new_privs(); print(has_no_new_privs())") == "False\nTrue"


def test_a_process_whose_parent_is_gone_ends() -> None:
    assert _run(
        "import sys; print('begun', flush=True)\npid = os.fork()\nif pid == 0: die_with_parent(1); print('on')"
    ) == ("begun")


def test_errors_have_names() -> None:
    assert "prctl" in _run("try: call_prctl(-1, 0)\nexcept OSError as fault: print(fault)")
