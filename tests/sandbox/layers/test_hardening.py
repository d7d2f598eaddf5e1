"""Plans travel as JSON; layers that a machine lacks are reported, not raised."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from toolwise.sandbox.layers.hardening import LAYER_REQUIREMENTS, LAYERS, Plan


def test_a_plan_survives_json() -> None:
    plan = Plan(("limits",), "/scratch", ("/a", "/b"), 5, 6, 7, ("network",))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_every_layer_says_how_to_get_it() -> None:
    assert {layer for layers in LAYERS.values() for layer in layers} <= set(LAYER_REQUIREMENTS)


def test_limits_are_above_current_usage(tmp_path: Path) -> None:
    source = (
        "from toolwise.sandbox.layers.hardening import *\nimport resource\n"
        "before = bytearray(200_000_000)\n"
        f"got = harden(Plan(('limits',), {str(tmp_path)!r}, memory_mb=64))\n"
        "fine = bytearray(30_000_000)\n"
        "try: bytearray(100_000_000)\nexcept MemoryError: print('limited', list(got.layers), got.missing)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "limited ['limits'] {}"


def test_a_failing_layer_is_reported(tmp_path: Path) -> None:
    source = (
        "from toolwise.sandbox.layers import hardening, landlock\n"
        "landlock.abi = lambda: 0\n"
        f"got = hardening.harden(hardening.Plan(('no_new_privs', 'landlock'), {str(tmp_path)!r}))\n"
        "print(sorted(got.layers), got.missing)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, env=environment)
    assert "no Landlock" in done.stdout
