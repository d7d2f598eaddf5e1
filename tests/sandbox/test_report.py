"""The one-line report: what was requested, what is active, what is missing and how to get it."""

from __future__ import annotations

import sys

import pytest

from toolwise.sandbox import Sandbox, SandboxError, report
from toolwise.sandbox.report import Report, probe

GAP = Report("standard", "basic", {"limits": "memory"}, {"landlock": "OSError: this kernel has no Landlock"})


@pytest.mark.skipif(sys.platform != "linux", reason="the standard tier is Linux's")
def test_a_probe_uses_every_layer() -> None:
    found = probe("standard")
    assert set(found.layers) | set(found.missing) == {"limits", "capabilities", "no_new_privs", "landlock", "seccomp"}
    if found.complete:
        assert str(found).startswith("sandbox: requested standard, got standard: ")
        assert str(found).endswith("missing: nothing")
    assert probe("standard") is found


def test_a_gap_is_told_with_its_cure() -> None:
    assert "missing: landlock (OSError: this kernel has no Landlock; it needs Linux 5.13" in str(GAP)
    assert "\n" not in str(GAP)


def test_require_refuses_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(report._cache, ("standard", ()), GAP)
    with pytest.raises(SandboxError, match="require=True"):
        Sandbox(require=True)


def test_less_is_said_loudly(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(report._cache, ("standard", ()), GAP)
    Sandbox().close()
    assert "missing: landlock" in caplog.text


def test_off_is_called_off() -> None:
    assert str(probe("off")).startswith("sandbox: off")
