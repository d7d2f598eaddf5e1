"""`toolwise doctor`: packages against requirements, probes of the machine, and the exit status."""

from __future__ import annotations

import importlib.metadata
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from toolwise.cli import doctor
from toolwise.sandbox.layers import bubblewrap

app = typer.Typer()
app.command()(doctor.doctor)


def test_nodes_of_a_cluster_are_counted_by_what_they_have() -> None:
    here = {"host": "a", "torch": "2.11", "cpus": 2}
    nodes: dict[str, dict[str, Any]] = {f"10.0.0.{i}": {"host": f"h{i}", "torch": "2.11", "cpus": 8} for i in range(5)}
    nodes["10.0.0.2"]["cpus"] = 4
    nodes["10.0.0.9"] = {"problem": "does not answer"}
    rows = {name: (mine, others) for name, mine, others in doctor.node_rows(here, nodes)}
    assert rows["torch"] == ("2.11", "the same")
    assert rows["cpus"] == ("2", "8 (4), 4 (1)")
    assert rows["host"] == ("a", "h0 (1), h1 (1), h2 (1), …")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"})


@pytest.fixture
def requirements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list of packages to fill; without torch the command is fast."""
    lines: list[str] = []
    monkeypatch.setattr(doctor, "_requirements", lambda: lines)
    return lines


def script(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def test_a_checkout_that_was_never_installed_reads_pyproject(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]

    def missing(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    packages = doctor.inspect_packages()
    assert [p.name + p.wanted for p in packages if p.extra is None] == project["dependencies"]
    extras = {extra for extra in project["optional-dependencies"] if extra != "dev"}
    assert {p.extra for p in packages} - {None} == extras


def test_requirements_are_read_as_metadata_writes_them() -> None:
    lines = [
        "typer>=0.15",
        "rich[jupyter]>=13.9",
        'uvicorn>=0.32; extra == "serve"',
        "gguf>=0.1; python_version > '3' and extra == 'gguf'",
    ]
    found = [(p.name, p.wanted, p.extra) for p in doctor.inspect_packages(lines)]
    assert found == [
        ("typer", ">=0.15", None),
        ("rich", ">=13.9", None),
        ("uvicorn", ">=0.32", "serve"),
        ("gguf", ">=0.1", "gguf"),
    ]


@pytest.mark.parametrize(
    ("installed", "wanted", "ok"),
    [
        ("2.11.0", ">=2.11", True),
        ("2.13.0+cpu", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("18.0.0", ">=18", True),
        ("2", ">=2.0", True),
        ("5.0.0rc1", ">=5", True),
        ("1.0", "", True),
        (None, "", False),
    ],
)
def test_versions_are_compared_as_numbers(installed: str | None, wanted: str, ok: bool) -> None:
    assert doctor.Package("x", wanted, None, installed).ok is ok


def test_all_is_well_with_the_core_there_and_an_extra_missing(requirements: list[str]) -> None:
    requirements += ["typer>=0.1", 'surely-not-there>=1; extra == "serve"']
    result = run()
    assert result.exit_code == 0, result.output
    assert "surely-not-there missing" in result.output
    assert "pip install 'toolwise[serve]'" in result.output
    assert "All required packages are installed." in result.output


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_a_missing_or_old_core_package_is_status_1_and_the_command(
    requirements: list[str], arguments: tuple[str, ...]
) -> None:
    requirements += ["surely-not-there>=3", "typer>=999", "rich>=1"]
    result = run(*arguments)
    assert result.exit_code == 1
    assert "pip install 'surely-not-there>=3' 'typer>=999'" in result.output
    assert "is too old" in result.output


def test_json_has_it_all(requirements: list[str]) -> None:
    requirements += ["typer>=0.1", 'surely-not-there>=1; extra == "serve"']
    told = json.loads(run("--json").output)
    assert told["ok"] is True
    assert told["troubles"] == []
    assert told["core"][0]["name"] == "typer"
    assert told["extras"]["serve"]["ok"] is False
    assert told["extras"]["serve"]["install"] == "pip install 'toolwise[serve]'"
    machine = told["machine"]
    assert machine["cpus"] > 0
    assert machine["free_disk_gib"] > 0
    assert machine["landlock_abi"] >= 0
    assert machine["terminal"] is False
    assert isinstance(machine["sqlite_fts5"], bool)


@pytest.mark.long
def test_torch_is_asked_in_a_process_of_its_own() -> None:
    found, troubles = doctor.inspect_torch()
    assert troubles == []
    assert isinstance(found["gpus"], list)
    assert found["cpu_float32_gflops"] > 0
    assert "cpu_bfloat16_gflops" in found


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ImportError('libcudart.so is gone')", "libcudart.so is gone"),
        ("import os; os.abort()", "the process crashed"),
    ],
)
def test_a_torch_that_does_not_load_is_a_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    (tmp_path / "torch.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    _, troubles = doctor.inspect_torch()
    assert len(troubles) == 1
    assert said in troubles[0]
    assert "pip install --force-reinstall torch" in troubles[0]


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ({"gpu_bf16": True}, "yes, on the GPU"),
        ({}, "unknown without torch"),
        ({"cpu_float32_gflops": 50.0, "cpu_bfloat16_gflops": None}, "crashes on this CPU: use float32"),
        ({"cpu_float32_gflops": 147.0, "cpu_bfloat16_gflops": 0.3}, "float32 147.0: use float32"),
        ({"cpu_float32_gflops": 50.0, "cpu_bfloat16_gflops": 99.0}, "99.0 GFLOPS on the CPU, float32 50.0"),
    ],
)
def test_bfloat16_is_judged_by_what_was_measured(machine: dict[str, Any], said: str) -> None:
    assert said in doctor._bf16(machine)


def test_bubblewrap_is_tried_as_the_sandbox_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor._bubblewrap() is None
    script(tmp_path, "bwrap", "echo bubblewrap 0.9.0")
    monkeypatch.setattr(bubblewrap, "unavailable_reason", lambda: "no user namespaces")
    assert doctor._bubblewrap() == "bubblewrap 0.9.0, but it does not work here: no user namespaces"
    monkeypatch.setattr(bubblewrap, "unavailable_reason", lambda: "")
    assert doctor._bubblewrap() == "bubblewrap 0.9.0"


@pytest.mark.parametrize(("quota", "most"), [("50000 100000\n", 0.5), ("max 100000\n", 10_000), ("", 10_000)])
def test_processors_are_those_a_container_leaves(monkeypatch: pytest.MonkeyPatch, quota: str, most: float) -> None:
    monkeypatch.setattr(doctor, "_read", lambda path: quota)
    assert 0 < doctor._usable_cpus() <= most
