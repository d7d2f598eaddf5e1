"""Running cases as a user without privileges."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
NOBODY = 65534


def readable_copy(folder: Path, program: str = "abuse_cases") -> dict[str, str]:
    """A copy of Toolwise and of what it needs that any user may read, and `run.py`, which calls `main` of `program`.

    Bytecode comes along: each worker would compile it all again. Gives the environment to run it in.
    """
    import pydantic

    packages = Path(pydantic.__file__).parent.parent
    names = ("pydantic", "pydantic_core", "typing_extensions.py", "annotated_types", "typing_inspection")
    for name in names:
        source = packages / name
        if source.is_dir():
            shutil.copytree(source, folder / "lib" / name)
        else:
            (folder / "lib").mkdir(exist_ok=True)
            shutil.copy(source, folder / "lib" / name)
    own = HERE.parents[1] / "src" / "toolwise"
    shutil.copytree(own, folder / "src" / "toolwise", ignore=shutil.ignore_patterns("*.safetensors"))
    for source in (*HERE.glob("abuse_*.py"), HERE / "program_cases.py"):
        shutil.copy(source, folder)
    (folder / "run.py").write_text(
        "import site, sys\n"
        f"site.getsitepackages = lambda: [{str(folder / 'lib')!r}]\n"
        f"sys.path[:0] = [{str(folder / 'lib')!r}, {str(folder / 'src')!r}, {str(folder)!r}]\n"
        f"import {program}\n{program}.main()\n"
    )
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return {"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}


def python_for_anybody() -> str | None:
    """A Python of this version that a user without privileges can run."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for program in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        command = [program, "-c", "import ctypes"]
        with suppress(OSError):
            if subprocess.run(command, user=NOBODY, group=NOBODY, check=False, cwd="/", env={}).returncode == 0:
                return program
    return None
