"""Folders as file systems of a fixed size, mounted in a throwaway process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolwise.sandbox.layers.disk import MAX_FILES, is_limited
from toolwise.sandbox.report import probe

linux = pytest.mark.skipif(sys.platform != "linux", reason="mount namespaces are Linux's")


def _limited(folder: Path, body: str) -> dict[str, object]:
    code = (
        "import errno, json, os, sys\nfrom toolwise.sandbox.layers.disk import is_limited, limit_folders\n"
        "folder = sys.argv[1]\nos.chdir(folder)\nsaid = {'why': limit_folders([folder], 2)}\n"
        f"{body}\nprint(json.dumps(said))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    said = dict(json.loads(done.stdout))
    if said["why"]:
        pytest.skip(f"no file system can be mounted here: {said['why']}")
    return said


@linux
def test_writes_stop_at_the_size_limit(tmp_path: Path) -> None:
    body = (
        "said['limited'] = is_limited(folder, 2)\nx = os.open('x', os.O_CREAT | os.O_WRONLY)\nos.unlink('x')\n"
        "try:\n    while True: os.write(x, bytes(100_000))\nexcept OSError as fault: said['fault'] = fault.errno\n"
        "said['size'] = os.fstat(x).st_size"
    )
    said = _limited(tmp_path, body)
    assert said["limited"]
    assert said["fault"] == 28
    assert said["size"] == 2 << 20
    assert list(tmp_path.iterdir()) == []  # nothing of it is visible outside


@linux
def test_files_stop_at_the_count_limit(tmp_path: Path) -> None:
    body = (
        "try:\n    for said['files'] in range(1 << 20): os.mkdir(str(said['files']))\n"
        "except OSError as fault: said['fault'] = fault.errno"
    )
    said = _limited(tmp_path, body)
    assert said["fault"] == 28
    assert said["files"] == MAX_FILES - 1


@linux
def test_it_has_no_capabilities_in_its_namespace(tmp_path: Path) -> None:
    body = "from toolwise.sandbox.layers.kernel import capabilities\nsaid['powers'] = capabilities()"
    if os.getuid() != 0:
        assert _limited(tmp_path, body)["powers"] == 0


@linux
def test_a_common_folder_is_not_limited(tmp_path: Path) -> None:
    assert not is_limited(str(tmp_path), 1)


@linux
def test_the_report_says_how_the_disk_is_limited() -> None:
    said = probe("standard")
    assert said.own_disk or "disk by measuring it" in str(said)
