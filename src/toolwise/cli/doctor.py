"""`toolwise doctor`: installed packages, missing ones and how to install them, and what this machine supports."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import sqlite3
import subprocess
import sys
import timeit
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from toolwise import __version__
from toolwise.cli.tables import print_table
from toolwise.terminal import print_error, print_json

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*([^;]*)(?:;.*extra\s*==\s*['\"]([^'\"]+))?")
"""Name, version and extra."""
_OPENMP = ("omp_num_threads", "omp_wait_policy")
_PROBE_TIMEOUT_S = 10
_TORCH_TIMEOUT_S = 120
MAX_VALUES = 3
"""Of a fact that differs among the nodes of a cluster, in the table."""


@dataclass(frozen=True, slots=True)
class Package:
    """A requirement and the installed version, if any."""

    name: str
    wanted: str
    extra: str | None
    installed: str | None

    @property
    def ok(self) -> bool:
        minimums = re.findall(r">=\s*([0-9.]+)", self.wanted)  # other operators are left to pip
        return self.installed is not None and all(_release(self.installed) >= _release(least) for least in minimums)


def doctor(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run's folder, also of a run that goes on or has crashed. With --cluster: a configuration.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    cluster: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Compare the nodes of a Ray cluster with this machine instead: versions, code, and the programs and "
            "folders of a configuration that each node must have.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Say what is wrong with a RUN: likely cause, evidence, and what to try. Exit status: 0 nothing found, 1 something.

    Without RUN: installed and missing packages, how to install them, and what this machine supports.
    """
    if cluster:
        return _compare_nodes(cluster, run, as_json)
    if run is not None:
        from toolwise.cli.run_doctor import examine

        if examine(run, as_json=as_json):
            raise typer.Exit(1)
        return None
    packages = inspect_packages()
    machine, troubles = inspect_machine(), missing_core_packages(packages)
    if any(package.name == "torch" and package.installed for package in packages):
        torch_info, torch_troubles = inspect_torch()
        machine |= torch_info
        troubles += torch_troubles
    if as_json:
        print_json(_as_json(packages, machine, troubles))
    else:
        _show(packages, machine, troubles)
    if troubles:
        raise typer.Exit(1)
    return None


def _compare_nodes(address: str, config: Path | None, as_json: bool) -> None:
    """Report every node of the cluster at `address`; exit with status 1 if one differs from this process."""
    from toolwise.cluster.node_files import unsent_paths
    from toolwise.cluster.node_report import compare_nodes
    from toolwise.config.schema import load_config

    paths = [] if config is None else list(unsent_paths(load_config(config)))
    here, reports, problems = compare_nodes(address, paths)
    if as_json:
        print_json({"here": here, "nodes": reports, "problems": problems})
    else:
        title = f"{len(reports)} nodes: {', '.join(reports)}"
        print_table(("", "here", "nodes"), node_rows(here, reports), title=title, title_justify="left")
        for problem in problems:
            print_error(problem)
    if problems:
        raise typer.Exit(1)


def node_rows(here: Mapping[str, Any], reports: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Each fact: here, and its most common values on the nodes, with the number of nodes that have them."""
    rows = []
    for key, value in here.items():
        counts = Counter(str(facts[key]) for facts in reports.values() if key in facts)
        shown = ", ".join(f"{other} ({count})" for other, count in counts.most_common(MAX_VALUES))
        others = ", …" if len(counts) > MAX_VALUES else ""
        rows.append((key, str(value), "the same" if list(counts) == [str(value)] else shown + others))
    return rows


def inspect_packages(requirements: Sequence[str] | None = None) -> list[Package]:
    """Toolwise's requirements, from its package metadata, with the installed versions."""
    matches = map(_REQUIREMENT.match, _requirements() if requirements is None else requirements)
    return [Package(found[1], found[2].strip(), found[3], _version(found[1])) for found in matches if found]


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires("toolwise") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout that was never installed
        project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = [(extra, lines) for extra, lines in project["optional-dependencies"].items() if extra != "dev"]
        return [*project["dependencies"], *(f'{line}; extra == "{extra}"' for extra, lines in extras for line in lines)]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    release = re.sub(r"(\.0*)+$", "", re.split(r"[^0-9.]", version)[0])  # 2.0 equals 2
    return tuple(map(int, re.findall(r"\d+", release)))


def missing_core_packages(packages: Sequence[Package]) -> list[str]:
    if not (lacking := [package for package in packages if package.extra is None and not package.ok]):
        return []
    names = ", ".join(f"{p.name} ({f'{p.installed} is too old' if p.installed else 'missing'})" for p in lacking)
    return [f"core packages: {names}: pip install {' '.join(repr(p.name + p.wanted) for p in lacking)}"]


def inspect_machine() -> dict[str, Any]:
    from toolwise.sandbox.layers import landlock

    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": _usable_cpus(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "memory_gib": _memory_gib(),
        "free_disk_gib": round(shutil.disk_usage(Path.cwd()).free / 2**30, 1),
        "sqlite_fts5": _has_fts5(),
        "bubblewrap": _bubblewrap(),
        "landlock_abi": landlock.abi(),
        "seccomp": Path("/proc/sys/kernel/seccomp/actions_avail").exists(),
        "terminal": sys.stdout.isatty(),
        **{name: os.environ.get(name.upper()) for name in _OPENMP},
    }


def _usable_cpus() -> float:
    """CPUs this process may use: its affinity, capped by the container's quota."""
    count: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = re.match(r"(\d+) (\d+)", _read("/sys/fs/cgroup/cpu.max"))
    return min(count, round(int(quota[1]) / int(quota[2]), 2)) if quota else count


def _memory_gib() -> dict[str, float | None]:
    table = dict(re.findall(r"(\w+):\s+(\d+) kB", _read("/proc/meminfo")))
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    sizes = {
        "total": int(table.get("MemTotal", 0)) * 1024,
        "available": int(table.get("MemAvailable", 0)) * 1024,
        "container_limit": int(limit) if limit.isdigit() else 0,
    }
    return {name: round(size / 2**30, 1) if size else None for name, size in sizes.items()}


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def inspect_torch() -> tuple[dict[str, Any], list[str]]:
    """What torch reports about this machine, and problems with torch itself."""
    process = _run(
        sys.executable,
        "-c",
        "from toolwise.cli.doctor import probe_torch; probe_torch()",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        timeout_s=_TORCH_TIMEOUT_S,
    )
    info: dict[str, Any] = {"cpu_float32_gflops": None, "cpu_bfloat16_gflops": None}
    for line in process.stdout.splitlines() if process else []:
        info |= json.loads(line)
    if "gpus" in info:
        return info, []
    last_line = process.stderr.strip().splitlines()[-1:] if process else [f"no response in {_TORCH_TIMEOUT_S} s"]
    reason = " ".join(last_line)[:200] or "the process crashed"
    return info, [f"torch does not load ({reason}): pip install --force-reinstall torch"]


def probe_torch() -> None:
    """Runs in a subprocess: a CPU that advertises instructions it does not support kills it with a signal."""
    import torch

    cards = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    gpus = [{"name": card.name, "memory_gib": round(card.total_memory / 2**30, 1)} for card in cards]
    bf16 = torch.cuda.is_bf16_supported() if gpus else False
    print(json.dumps({"gpus": gpus, "cuda": torch.version.cuda, "gpu_bf16": bf16}), flush=True)
    size = 256
    for name in ("float32", "bfloat16"):
        square = torch.ones(size, size, dtype=getattr(torch, name))
        seconds = min(timeit.repeat(partial(torch.matmul, square, square), number=1, repeat=4))
        print(json.dumps({f"cpu_{name}_gflops": round(2 * size**3 / seconds / 1e9, 1)}), flush=True)


def _has_fts5() -> bool:
    with closing(sqlite3.connect(":memory:")) as connection, suppress(sqlite3.OperationalError):
        connection.execute("CREATE VIRTUAL TABLE words USING fts5(word)")
        return True
    return False


def _run(
    *command: str, env: dict[str, str] | None = None, timeout_s: float = _PROBE_TIMEOUT_S
) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=env, timeout=timeout_s
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _bubblewrap() -> str | None:
    """Bubblewrap's version, and whether it works: many containers deny it the namespaces it needs."""
    from toolwise.sandbox.layers import bubblewrap

    process = _run("bwrap", "--version")
    if process is None or process.returncode:
        return None
    reason = bubblewrap.unavailable_reason()
    return process.stdout.strip() + (f", but it does not work here: {reason}" if reason else "")


def _extras(packages: Sequence[Package]) -> dict[str, list[Package]]:
    return {
        name: [package for package in packages if package.extra == name]
        for name in dict.fromkeys(package.extra for package in packages)
        if name is not None
    }


def _as_json(packages: Sequence[Package], machine: dict[str, Any], troubles: list[str]) -> dict[str, Any]:
    as_json = {package: {**asdict(package), "ok": package.ok} for package in packages}
    return {
        "toolwise": __version__,
        "ok": not troubles,
        "core": [as_json[package] for package in packages if package.extra is None],
        "extras": {
            extra: {
                "ok": all(package.ok for package in members),
                "install": f"pip install 'toolwise[{extra}]'",
                "packages": [as_json[package] for package in members],
            }
            for extra, members in _extras(packages).items()
        },
        "machine": machine,
        "troubles": troubles,
    }


def _show(packages: Sequence[Package], machine: dict[str, Any], troubles: list[str]) -> None:
    from toolwise.terminal.display import Console

    core = [(package.name, package.wanted, _state(package)) for package in packages if package.extra is None]
    extras = [
        (
            extra,
            ", ".join(f"{package.name} {_state(package)}" for package in members),
            "" if all(package.ok for package in members) else f"pip install 'toolwise[{extra}]'",
        )
        for extra, members in _extras(packages).items()
    ]
    for title, columns, rows in (
        (f"toolwise {__version__}: core", ("package", "required", "installed"), core),
        ("extras", ("extra", "packages", "install"), extras),
        ("this machine", ("feature", "status"), _machine_rows(machine)),
    ):
        print_table(columns, rows, unwrapped="install", title=title, title_justify="left")
    for trouble in troubles:
        Console().print(trouble, style="bold red", soft_wrap=True)
    if not troubles:
        Console().print("All required packages are installed.", style="green")


def _state(package: Package) -> str:
    if package.installed is None:
        return "missing"
    return package.installed if package.ok else f"{package.installed}, too old"


def _machine_rows(machine: dict[str, Any]) -> list[tuple[str, str]]:
    memory, load = machine["memory_gib"], machine["load_average"]
    gpus = ", ".join(f"{gpu['name']} ({gpu['memory_gib']} GiB)" for gpu in machine.get("gpus", []))
    sizes = ", ".join(f"{size} GiB {name.replace('_', ' ')}" for name, size in memory.items() if size is not None)
    return [
        ("Python", f"{machine['python']} on {machine['system']}"),
        ("processors", f"{machine['cpus']:g}" + (f", load average {load[0]:.1f}" if load else "")),
        ("memory", sizes or "unknown"),
        ("free disk", f"{machine['free_disk_gib']} GiB"),
        ("GPU", f"{gpus}, CUDA {machine['cuda']}" if gpus else "none: train small models in float32"),
        ("bfloat16", _bf16(machine)),
        ("SQLite FTS5", "yes" if machine["sqlite_fts5"] else "no: the search tool needs it"),
        ("bubblewrap", machine["bubblewrap"] or "none"),
        ("Landlock", f"ABI {machine['landlock_abi']}" if machine["landlock_abi"] else "none"),
        ("seccomp", "yes" if machine["seccomp"] else "none"),
        ("terminal", "yes" if machine["terminal"] else "no: output goes to a file or pipe"),
        ("OpenMP", ", ".join(f"{name.upper()}={machine[name] or 'unset'}" for name in _OPENMP)),
    ]


def _bf16(machine: dict[str, Any]) -> str:
    """Whether bfloat16 is worth using, from the measured GFLOPS."""
    bfloat16, float32 = machine.get("cpu_bfloat16_gflops"), machine.get("cpu_float32_gflops")
    if machine.get("gpu_bf16"):
        return "yes, on the GPU"
    if float32 is None:
        return "unknown without torch"
    if bfloat16 is None:
        return "crashes on this CPU: use float32, or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
    speeds = f"{bfloat16} GFLOPS on the CPU, float32 {float32}"
    return speeds if bfloat16 > float32 else f"{speeds}: use float32"
