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


def test_a_missing_layer_is_reported_with_its_requirement() -> None:
    assert "missing: landlock (OSError: this kernel has no Landlock; it needs Linux 5.13" in str(GAP)
    assert "\n" not in str(GAP)


def test_require_fails_if_a_layer_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(report._cache, ("standard", ()), GAP)
    with pytest.raises(SandboxError, match="require=True"):
        Sandbox(require=True)


def test_missing_layers_are_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(report._cache, ("standard", ()), GAP)
    Sandbox().close()
    assert "missing: landlock" in caplog.text


def test_the_off_tier_is_reported() -> None:
    assert str(probe("off")).startswith("sandbox: off")
