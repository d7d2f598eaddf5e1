"""Faults reported by a worker: messages are kept, invalid kinds are not."""

from __future__ import annotations

import pytest

from toolwise.sandbox.faults import KINDS, WorkerFault, read_fault, sanitize_text


@pytest.mark.parametrize("value", [None, 1, [], {}, {"kind": "mine"}, {"kind": None}, {"kind": ["timeout"]}])
def test_an_invalid_fault_is_a_bad_type(value: object) -> None:
    assert read_fault(value).kind == "bad_type"


def test_a_fault_keeps_its_message() -> None:
    fault = read_fault({"kind": "denied", "message": "no", "traceback": "there"})
    assert (fault.kind, fault.message, fault.traceback) == ("denied", "no", "there")
    assert read_fault({"kind": "died", "message": 5}).message == "no message"


def test_messages_are_cut_and_made_printable() -> None:
    assert sanitize_text("\ud800", 10) == "\\ud800"
    assert len(sanitize_text("x" * 1000, 100)) < 110
    assert sanitize_text(None, 10) == ""


def test_a_fault_is_an_invalid_result() -> None:
    result = WorkerFault("timeout", "late").result()
    assert not result.has_valid_score
    assert result.error is not None
    assert result.error.kind in KINDS
