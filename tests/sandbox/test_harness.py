"""The harness loads and calls a function and encodes the outcome as plain data."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from toolwise.errors import ConfigError
from toolwise.sandbox.harness import Harness, plain_fault, preload_package

CALL: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "ground_truth": 1, "kwargs": {}}


def _harness(tmp_path: Path, source: str) -> Harness:
    path = tmp_path / "r.py"
    path.write_text(source)
    return Harness.load(f"{path}:f")


def test_a_result_is_json(tmp_path: Path) -> None:
    answer = _harness(tmp_path, "def f(messages, truth, k=0): return truth + k").call_one({**CALL, "kwargs": {"k": 2}})
    assert json.loads(answer["result"])["score"] == 3.0


def test_lenient_calls_leave_out_what_is_not_taken(tmp_path: Path) -> None:
    harness = _harness(tmp_path, "def f(messages, truth): return truth")
    call = {**CALL, "kwargs": {"step": 5}}
    assert harness.call_one(call)["fault"]["kind"] == "exception"
    assert "result" in harness.call_one({**call, "lenient": True})


def test_a_batch_function_gets_a_batch_of_one(tmp_path: Path) -> None:
    harness = _harness(tmp_path, "def f(rollouts_messages, ground_truths): return ground_truths")
    assert json.loads(harness.call_one(CALL)["result"])["score"] == 1.0
    assert len(harness.call_batch({"calls": [CALL, CALL]})) == 2


def test_an_invalid_message_is_an_exception(tmp_path: Path) -> None:
    answer = _harness(tmp_path, "def f(messages, truth): return 1").call_one({**CALL, "messages": [{"role": "nobody"}]})
    assert answer["fault"]["kind"] == "exception"


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (MemoryError(), "memory"),
        (OSError(12, "Cannot allocate memory"), "memory"),
        (SystemExit(1), "died"),
        (OSError(27, "File too large"), "too_big"),
        (PermissionError(1, "Operation not permitted"), "denied"),
        (ValueError("x"), "exception"),
    ],
)
def test_exceptions_have_kinds(fault: BaseException, kind: str) -> None:
    assert plain_fault(fault, ())["fault"]["kind"] == kind


def test_what_fails_while_it_loads_is_an_import_fault() -> None:
    assert plain_fault(ValueError("x"), (), loading=True)["fault"]["kind"] == "import"


def test_one_decorated_function_is_found_and_two_are_not(tmp_path: Path) -> None:
    head = "from toolwise import reward_function\n@reward_function\ndef a(messages, truth): return 1\n"
    (tmp_path / "one.py").write_text(head)
    assert Harness.load(str(tmp_path / "one.py")).reward.function.__name__ == "a"
    (tmp_path / "two.py").write_text(head + "@reward_function\ndef b(messages, truth): return 1\n")
    with pytest.raises(ConfigError, match="it has a, b: choose one"):
        Harness.load(str(tmp_path / "two.py"))


def test_a_package_is_known_by_its_own_folder(tmp_path: Path) -> None:
    package = tmp_path / "package_known_by_folder"
    package.mkdir()
    (package / "__init__.py").write_text("X = 1")
    (package / "inner.py").write_text("def f(messages, truth): return 1")
    top = {"name": package.name, "origin": str(package / "__init__.py"), "places": [str(package)]}
    try:
        preload_package(top)
        assert Harness.load(f"{package.name}.inner:f").reward.mode == "pointwise"
    finally:
        for name in [n for n in sys.modules if n.startswith(package.name)]:
            del sys.modules[name]


def test_a_failed_package_import_is_undone(tmp_path: Path) -> None:
    (tmp_path / "broken_on_import.py").write_text("1 / 0")
    top = {"name": "broken_on_import", "origin": str(tmp_path / "broken_on_import.py"), "places": None}
    with pytest.raises(ZeroDivisionError):
        preload_package(top)
    assert "broken_on_import" not in sys.modules
