"""`toolwise doctor`: what is installed, what is missing and how to get it, and what this machine can do."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

REQUIREMENTS = [
    "torch>=2.11",
    "transformers>=5.10",
    "numpy>=2.0",
    "safetensors>=0.5",
    "pydantic>=2.10",
    "typer>=0.15",
    "rich>=13.9",
    "pyarrow>=18",
    "jinja2>=3.1",
    "httpx>=0.27",
    "jsonschema>=4.23",
    "tomli-w>=1.1",
    "matplotlib>=3.9",
    'starlette>=0.41; extra == "serve"',
    'uvicorn>=0.32; extra == "serve"',
    'starlette>=0.41; extra == "view"',
    'uvicorn>=0.32; extra == "view"',
    'ray>=2.40; extra == "ray"',
    'vllm>=0.20; extra == "vllm"',
    'mcp>=2.0; extra == "mcp"',
    'textworld-express>=1.1; extra == "worlds"',
    'scienceworld>=1.2; extra == "worlds"',
    'gymnasium>=1.0; extra == "worlds"',
    'peft>=0.17; extra == "peft"',
    'gguf>=0.10; extra == "gguf"',
    'tensorboard>=2.18; extra == "tensorboard"',
    'wandb>=0.19; extra == "wandb"',
]
"""For a checkout that was never installed, which has no metadata to ask; a test holds it to pyproject.toml."""

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*([^;]*)(?:;(.*))?")
_PROBE_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class Package:
    """One requirement and what is there to meet it."""

    name: str
    wanted: str
    extra: str | None
    installed: str | None

    @property
    def ok(self) -> bool:
        return self.installed is not None and _meets(self.installed, self.wanted)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what is installed, what is missing and how to get it, and what this machine can do."""
    packages = inspect_packages()
    machine, troubles = inspect_machine(packages)
    troubles = [*missing_core(packages), *troubles]
    if as_json:
        import json

        typer.echo(json.dumps(_as_json(packages, machine, troubles), indent=2))
    else:
        _show(packages, machine, troubles)
    if troubles:
        raise typer.Exit(1)


def inspect_packages(requirements: Sequence[str] | None = None) -> list[Package]:
    """What Toolwise's own metadata asks for, beside what is installed."""
    if requirements is None:
        try:
            requirements = importlib.metadata.requires("toolwise") or REQUIREMENTS
        except importlib.metadata.PackageNotFoundError:
            requirements = REQUIREMENTS
    packages = []
    for line in requirements:
        found = _REQUIREMENT.match(line)
        if not found:
            continue
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", found[3] or "")
        packages.append(Package(found[1], found[2].strip(), extra[1] if extra else None, _version(found[1])))
    return packages


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _meets(installed: str, wanted: str) -> bool:
    """Whether every `>=` of `wanted` holds; other operators are left to pip."""
    return all(_release(installed) >= _release(least) for least in re.findall(r">=\s*([0-9.]+)", wanted))


def _release(version: str) -> tuple[int, ...]:
    numbers = [int(number) for number in re.findall(r"\d+", re.match(r"[0-9.]*", version)[0])]  # type: ignore[index]
    while numbers and numbers[-1] == 0:  # 2.0 is 2
        numbers.pop()
    return tuple(numbers)


def missing_core(packages: Sequence[Package]) -> list[str]:
    lacking = [package for package in packages if package.extra is None and not package.ok]
    if not lacking:
        return []
    names = ", ".join(f"{p.name} ({f'{p.installed} is too old' if p.installed else 'missing'})" for p in lacking)
    return [f"core packages: {names}: pip install {' '.join(repr(p.name + p.wanted) for p in lacking)}"]


def inspect_machine(packages: Sequence[Package]) -> tuple[dict[str, Any], list[str]]:
    """What this machine offers, by topic, and what is broken."""
    torch_there = any(package.name == "torch" and package.installed for package in packages)
    gpu, troubles = _gpu() if torch_there else ({"gpus": [], "cuda": None}, [])
    machine = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": _usable_cpus(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "memory_gib": _memory_gib(),
        "free_disk_gib": round(shutil.disk_usage(Path.cwd()).free / 2**30, 1),
        **gpu,
        "cpu_bf16": _cpu_flag("amx_bf16", "avx512_bf16", "bf16"),
        "sqlite_fts5": _has_fts5(),
        "java": _first_line("java", "-version"),
        "bubblewrap": _bubblewrap(),
        "landlock_abi": _landlock_abi(),
        "seccomp": Path("/proc/sys/kernel/seccomp/actions_avail").exists(),
        "terminal": sys.stdout.isatty(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
    }
    return machine, troubles


def _usable_cpus() -> float:
    """Processors this process may use: its affinity, and the share that a container leaves it."""
    count: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        count = min(count, round(int(quota) / int(period), 2))
    return count


def _memory_gib() -> dict[str, float | None]:
    table = dict(re.findall(r"(\w+):\s+(\d+) kB", _read("/proc/meminfo")))
    sizes: dict[str, int | None] = {
        "total": int(table["MemTotal"]) * 1024 if "MemTotal" in table else None,
        "available": int(table["MemAvailable"]) * 1024 if "MemAvailable" in table else None,
    }
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    sizes["container_limit"] = int(limit) if limit.isdigit() else None
    return {name: None if size is None else round(size / 2**30, 1) for name, size in sizes.items()}


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _cpu_flag(*names: str) -> bool:
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return bool(flags and set(names) & set(flags[1].split()))


def _gpu() -> tuple[dict[str, Any], list[str]]:
    try:
        import torch

        gpus = []
        for index in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(index)
            gpus.append({"name": card.name, "memory_gib": round(card.total_memory / 2**30, 1)})
        bf16 = torch.cuda.is_bf16_supported() if gpus else False
        return {"gpus": gpus, "cuda": torch.version.cuda, "gpu_bf16": bf16}, []
    except Exception as error:  # a broken install can fail in any way, and saying so is the point
        reason = " ".join(str(error).split())[:200]
        trouble = f"torch is installed but does not load ({reason}): pip install --force-reinstall torch"
        return {"gpus": [], "cuda": None}, [trouble]


def _has_fts5() -> bool:
    connection = sqlite3.connect(":memory:")
    try:
        connection.execute("CREATE VIRTUAL TABLE words USING fts5(word)")
    except sqlite3.OperationalError:
        return False
    finally:
        connection.close()
    return True


def _run(*command: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _first_line(*command: str) -> str | None:
    done = _run(*command)
    lines = (done.stdout + done.stderr).strip().splitlines() if done and done.returncode == 0 else []
    return next((line.strip() for line in lines if not line.startswith("Picked up ")), None)


def _bubblewrap() -> str | None:
    """Its version; being installed is not enough, many containers refuse it the namespaces it needs."""
    version = _first_line("bwrap", "--version")
    if version is None:
        return None
    tried = _run("bwrap", "--ro-bind", "/", "/", "--unshare-all", "true")
    return version if tried and tried.returncode == 0 else f"{version}, but it does not work here"


def _landlock_abi() -> int:
    """The kernel's version of Landlock, 0 where there is none."""
    if sys.platform != "linux":
        return 0
    create_ruleset, ask_version = 444, 1
    version = ctypes.CDLL(None, use_errno=True).syscall(create_ruleset, None, ctypes.c_size_t(0), ask_version)
    return max(0, version)


def _extras(packages: Sequence[Package]) -> dict[str, list[Package]]:
    extras: dict[str, list[Package]] = {}
    for package in packages:
        if package.extra is not None:
            extras.setdefault(package.extra, []).append(package)
    return extras


def _as_json(packages: Sequence[Package], machine: dict[str, Any], troubles: list[str]) -> dict[str, Any]:
    from toolwise import __version__

    def told(package: Package) -> dict[str, Any]:
        return {**asdict(package), "ok": package.ok}

    return {
        "toolwise": __version__,
        "ok": not troubles,
        "core": [told(package) for package in packages if package.extra is None],
        "extras": {
            extra: {
                "ok": all(package.ok for package in members),
                "install": f"pip install 'toolwise[{extra}]'",
                "packages": [told(package) for package in members],
            }
            for extra, members in _extras(packages).items()
        },
        "machine": machine,
        "troubles": troubles,
    }


def _show(packages: Sequence[Package], machine: dict[str, Any], troubles: list[str]) -> None:
    from rich.console import Console


    console = Console()
