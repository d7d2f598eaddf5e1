"""Probes detect layers that do not hold: here, in a process without any."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="the layers are Linux's")
def test_without_layers_every_probe_goes_through(tmp_path: object) -> None:
    source = (
        "import sys\nfrom toolwise.sandbox.layers.hardening import LAYERS, Plan\n"
        "from toolwise.sandbox.layers.probes import probe_layers\n"
        "layers = tuple(layer for layer in LAYERS['standard'] if layer != 'limits')\n"
        "said = probe_layers(Plan(layers, sys.argv[1]))\n"
        "print(*sorted(layer for layer, why in said.items() if why))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", source, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    expected = {"landlock", "no_new_privs", "seccomp"} | ({"capabilities"} if os.getuid() == 0 else set())
    assert set(done.stdout.split()) == expected
