"""What the README shows is what runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_readme_shows_the_quickstart_that_is_run() -> None:
    shown = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    assert shown.group(1).strip() == (ROOT / "examples" / "quickstart.py").read_text().strip()


def test_the_quickstart_is_fifteen_lines_of_code() -> None:
    code = (ROOT / "examples" / "quickstart.py").read_text().splitlines()
    assert sum(bool(line.strip()) for line in code) <= 18


def test_the_quickstart_learns(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "quickstart.py")],
        cwd=tmp_path,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    before, arrow, after, report = done.stdout.strip().splitlines()[-1].split()
    assert arrow == "->"
    assert float(before) == 0.0
    assert float(after) > 0.5
    assert (tmp_path / report).is_file()


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))))
def test_every_link_of_the_readme_leads_somewhere(link: str) -> None:
    assert (ROOT / link).exists()
