"""Checks that the tests notice wrong code: plants one mutant at a time and runs the tests that should fail.

    .venv/bin/python scripts/mutants.py [--only NAME] [--jobs N]

`mutants.toml` lists them. Each is planted in a temporary copy of `src/`, never in the working tree. First the same
tests run without a mutant: a test that fails anyway catches nothing.

    caught       a test failed, or ran into the time limit, which only a mutant makes it do
    survived     all tests passed: sharpen one
    out of date  the code to replace is not in its file exactly once
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

PYTEST = ("-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not long and not namespaced")
TIME_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    file: str
    """Relative to `src/toolwise`."""
    before: str
    after: str
    tests: list[str]
    """Relative to `tests`."""


@dataclass(frozen=True, slots=True)
class Project:
    """A working tree and the interpreter of its environment."""

    root: Path
    time_limit_s: float

    @property
    def python(self) -> str:
        own = self.root / ".venv/bin/python"
        return str(own) if own.exists() else sys.executable

    @contextmanager
    def copy(self) -> Iterator[Path]:
        """A copy of `src`, with its bytecode, which stays valid for files that do not change."""
        with TemporaryDirectory(prefix="mutant-") as folder:
            yield Path(shutil.copytree(self.root / "src", Path(folder, "src")))

    def run_python(self, src: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Runs the interpreter in the working tree, with the copy `src` in front of the installed package."""
        environment = {**os.environ, "PYTHONPATH": str(src), "HYPOTHESIS_STORAGE_DIRECTORY": str(src / "hypothesis")}
        # `timeout` ends the whole process group: tests start processes themselves.
        command = ["timeout", "--kill-after=5", str(self.time_limit_s), self.python, *arguments]
        return subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True)

    def run_tests(self, src: Path, tests: Sequence[str]) -> str:
        """The first failure, or "" if all tests passed."""
        result = self.run_python(src, [*PYTEST, *(f"tests/{test}" for test in tests)])
        if result.returncode == 0:
            return ""
        lines = (result.stdout + result.stderr).splitlines()
        failures = [line.partition(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]
        return [*failures, "timeout" if result.returncode in (124, 137) else f"exit status {result.returncode}"][0]

    def check_import(self, src: Path, file: str) -> None:
        """Raises unless Python imports the mutated file."""
        module = "toolwise." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        code = f"from importlib.util import find_spec; print(find_spec({module!r}).origin)"
        result = self.run_python(src, ["-c", code])
        if result.stdout.strip() != str(src / "toolwise" / file):
            raise RuntimeError(f"Python imports {result.stdout.strip() or 'nothing'} instead of {file}")


def try_mutant(project: Project, mutant: Mutant) -> tuple[str, str]:
    """The outcome and its detail."""
    with project.copy() as src:
        path = src / "toolwise" / mutant.file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if (count := text.count(mutant.before)) != 1:
            return "out of date", f"{mutant.before!r} occurs {count} times in {mutant.file}"
        path.write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")
        project.check_import(src, mutant.file)
        failure = project.run_tests(src, mutant.tests)
        return ("caught", failure) if failure else ("survived", " ".join(mutant.tests))


def failing_tests(project: Project, tests: Sequence[str], jobs: int) -> list[str]:
    """The test files that fail without any mutant."""
    with project.copy() as src, ThreadPoolExecutor(jobs) as pool:
        failures = pool.map(lambda test: project.run_tests(src, [test]), tests)
        return [f"{test}: {failure}" for test, failure in zip(tests, failures, strict=True) if failure]


def _timed(project: Project, mutant: Mutant) -> tuple[str, str, float]:
    start = time.monotonic()
    return *try_mutant(project, mutant), time.monotonic() - start


def main() -> int:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="run this mutant; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tested at the same time")
    parser.add_argument("--root", type=Path, default=here.parent, help="the working tree")
    parser.add_argument("--table", type=Path, default=here / "mutants.toml", help="the table of mutants")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, metavar="SECONDS", help="for each pytest run")
    options = parser.parse_args()
    table = tomllib.loads(options.table.read_text(encoding="utf-8"))["mutant"]
    mutants = [Mutant(**entry) for entry in table if not options.only or entry["name"] in options.only]
    project = Project(options.root.resolve(), options.time_limit)
    if failing := failing_tests(project, sorted({test for m in mutants for test in m.tests}), options.jobs):
        print("fail without a mutant:", *failing, sep="\n  ")
        return 1
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(options.jobs) as pool:
        results = pool.map(partial(_timed, project), mutants)
        for mutant, (outcome, detail, seconds) in zip(mutants, results, strict=True):
            counts[outcome] += 1
            print(f"{outcome:11} {mutant.name:28} {seconds:5.0f} s  {detail}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "no such mutant")
    return 1 if counts["survived"] or counts["out of date"] or not mutants else 0


if __name__ == "__main__":
    sys.exit(main())
