"""Scripts and benchmarks start: their imports exist, and `--help` says what they do. Nothing else runs most of them."""

from __future__ import annotations

import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [path for folder in ("scripts", "benchmarks") for path in sorted((ROOT / folder).glob("*.py"))]


def case(path: Path) -> Any:
    """TRL takes seconds to import."""
    marks = [pytest.mark.long] if "\nfrom trl" in path.read_text() else []
    return pytest.param(path, marks=marks, id=f"{path.parent.name}/{path.name}")


@pytest.mark.parametrize("path", map(case, SCRIPTS))
def test_it_starts_and_says_what_it_does(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(path.parent))  # as `python PATH` does
    if "argparse" not in path.read_text():
        assert runpy.run_path(str(path))["__doc__"]
        return
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage:")


@pytest.mark.skipif(find_spec("starlette") is None, reason="needs the extra view")
def test_the_benchmark_of_the_pages_measures_each_of_its_aims(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "view.py", "--out", tmp_path, "--rollouts", "2000", "--port", "0"]
    ended = subprocess.run(
        [*command, "--steps", "0", "--no-browser"], capture_output=True, text=True, timeout=120, check=False
    )
    figures = [line for line in ended.stdout.splitlines() if "(aim: " in line]
    assert [line.partition(":")[0] for line in figures] == [
        "slowest of 5 filters",
        "slowest of 5 text searches",
        "most memory of the server",
    ], ended.stderr
    missed = any("MISSED" in line for line in figures)  # on a machine that does much else
    assert (ended.returncode, ended.stderr) == (int(missed), "")


@pytest.mark.long
def test_the_benchmark_of_the_pages_compares_the_index_with_a_step(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "view.py", "--out", tmp_path, "--rollouts", "300", "--port", "0"]
    ended = subprocess.run(
        [*command, "--steps", "2", "--no-browser"], capture_output=True, text=True, timeout=300, check=False
    )
    shares = [line for line in ended.stdout.splitlines() if line.startswith("share of the step: ")]
    assert len(shares) == 1, ended.stderr
    assert "(aim: 2" in shares[0]
