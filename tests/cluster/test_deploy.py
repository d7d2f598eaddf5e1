"""deploy/: the Slurm script runs a training on two Ray nodes under commands that play Slurm's; the manifest has what
KubeRay's operator requires."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
SCRIPT = DEPLOY / "slurm.sh"
SRUN = """#!/bin/sh
# Runs the command after srun's options here.
echo "$*" >> "$SRUN_LOG"
echo $$ >> "$SRUN_LOG.pids"
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
    return found


def test_the_operator_makes_the_token_and_reaches_the_dashboard(job: dict[str, Any]) -> None:
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52)  # else the operator refuses authOptions
    assert job["spec"]["submissionMode"] == "HTTPMode"
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert all(group["rayStartParams"] == {} for group in groups)
    assert all("env" not in container for group in groups for container in group["template"]["spec"]["containers"])


def test_the_jobs_command_is_one_of_a_shell_and_of_toolwise(job: dict[str, Any], cli: Any) -> None:
    entrypoint = job["spec"]["entrypoint"]
    subprocess.run(["sh", "-nc", entrypoint], check=True)
    told = cli("train", "--help").out
    assert set(re.findall(r"--[a-z]+", entrypoint)) <= set(re.findall(r"--[a-z]+", told))


def test_the_slurm_script_is_correct_shell() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", SCRIPT], check=True)


@pytest.mark.long
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: pip install 'toolwise[ray]'")
def test_the_slurm_script_trains_on_two_nodes(make_config: Any, tmp_path: Path) -> None:
    """Both are raylets on this machine."""
    programs = tmp_path / "bin"
    programs.mkdir()
    commands = {
        "srun": SRUN,
        "scontrol": "#!/bin/sh\necho first\necho second\n",
        "toolwise": f'#!/bin/sh\nexec {sys.executable} -m toolwise "$@"\n',
        "ray": f'#!/bin/sh\nexec {sys.executable} -m ray.scripts.scripts "$@"\n',
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
    }
    for name, text in commands.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "SRUN_LOG": str(tmp_path / "srun"),
        "SLURM_CPUS_ON_NODE": "2",
        "SLURM_JOB_NODELIST": "any",
    }
    changes = {
        "cluster": {"workers": 2, "worker_cpus": 0.5},
        "rollout": {"n": 4},
        "trainer": {"total_steps": 2},
        "validation": {"before": False},
    }
    config, run = make_config(tmp_path, changes), tmp_path / "run"
    with (tmp_path / "said").open("w") as said:
        ended = subprocess.run(
            ["bash", SCRIPT, config, run], env=environment, stdout=said, stderr=said, check=False, timeout=580
        )
    for pid in (tmp_path / "srun.pids").read_text().split():  # as Slurm ends the steps of a job
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGTERM)
    assert ended.returncode == 0, (tmp_path / "said").read_text()
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    steps = (tmp_path / "srun").read_text().splitlines()
    assert all("--cpus-per-task=2 --cpu-bind=none" in step for step in steps)
    assert sum("ray start" in step for step in steps) == 2
