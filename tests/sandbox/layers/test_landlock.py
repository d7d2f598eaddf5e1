"""Landlock: which rights each ABI version handles. The abuse suite tests what it blocks."""

from __future__ import annotations

import sys

import pytest

from toolwise.sandbox.layers import landlock


@pytest.mark.parametrize(("version", "bits"), [(1, 13), (2, 14), (3, 15), (4, 15), (5, 16), (7, 16)])
def test_each_version_handles_what_it_knows(version: int, bits: int) -> None:
    assert landlock.handled_rights(version) == (1 << bits) - 1


@pytest.mark.skipif(sys.platform != "linux", reason="Landlock is Linux's")
def test_the_version_is_a_number() -> None:
    assert landlock.abi() >= 0
