"""What nodes have, by content, and `toolwise doctor --cluster` on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from toolwise.cluster import ray_cluster
from toolwise.cluster.interface import Payload
from toolwise.cluster.node_files import unsent_paths
from toolwise.cluster.node_report import NodeReporter, path_hash
from toolwise.cluster.simulated import SimulatedCluster, Weather
from toolwise.config.schema import load_config


def test_a_folder_is_known_by_names_and_contents(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "a").write_text("1")
    assert path_hash(first) == path_hash(second)
    (second / "deep" / "a").write_text("2")
    assert path_hash(first) != path_hash(second)
    (second / "deep" / "a").write_text("1")
    (second / "deep" / "a").rename(second / "deep" / "b")
    assert path_hash(first) != path_hash(second)
    assert path_hash(tmp_path / "none") == "missing"


class TwoNodes(SimulatedCluster):
    """The second one has no `lost`."""

    lost = ""

    def __init__(self) -> None:
        super().__init__({"node": lambda _: NodeReporter("reporter", {})}, Weather())

    def nodes(self) -> list[dict[str, Any]]:
        return [{"id": f"{number}" * 8, "address": f"10.0.0.{number}", "resources": {}} for number in (1, 2)]

    async def call(self, process: Any, method: str, payload: Any, **options: Any) -> Payload:
        reply = dict(await super().call(process, method, payload, **options))
        if process.number == 2 and "facts" in reply:
            facts = json.loads(bytes(reply["facts"]))  # type: ignore[arg-type]
            reply["facts"] = json.dumps(facts | ({self.lost: "missing"} if self.lost in facts else {})).encode()
        return reply


@pytest.fixture
def config(make_config: Any, tmp_path: Path) -> Path:
    (tmp_path / "levels").mkdir()
    (tmp_path / "levels" / "one").write_text("a level")
    (tmp_path / "own.py").write_text("class Own: pass\n")
    environment = {"name": f"{tmp_path / 'own.py'}:Own", "kwargs": {"root": str(tmp_path / "levels")}}
    made: Path = make_config(tmp_path, {"env": environment})
    return made


def test_folders_that_are_not_sent_are_named_by_their_settings(config: Path) -> None:
    assert unsent_paths(load_config(config)) == {str(config.parent / "levels"): "env.kwargs.root"}


@pytest.mark.parametrize("lost", [False, True])
def test_the_command_says_which_node_lacks_what_the_settings_name(
    lost: bool, config: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(config.parent / "levels")
    monkeypatch.setattr(ray_cluster, "RayCluster", lambda config: TwoNodes())
    monkeypatch.setattr(TwoNodes, "lost", folder if lost else "")
    ended = cli("doctor", config, "--cluster", "10.0.0.1:6379", "--json")
    told = json.loads(ended.out)
    assert told["here"][folder] == path_hash(Path(folder))
    assert len(told["nodes"]) == 2
    expected = [f"10.0.0.2 22222222: {folder} is missing, here {path_hash(Path(folder))}"] if lost else []
    assert (told["problems"], ended.status) == (expected, int(lost))
    as_text = cli("doctor", config, "--cluster", "10.0.0.1:6379")
    assert ("is missing" in as_text.err) == lost


@pytest.mark.long
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: pip install 'toolwise[ray]'")
def test_the_command_compares_the_nodes_of_a_real_cluster(config: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "toolwise", "doctor", str(config), "--cluster", "local", "--json"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    told = json.loads(ended.stdout)
    assert (ended.returncode, told["problems"], len(told["nodes"])) == (0, [], 1), ended.stderr
    [facts] = told["nodes"].values()
    assert facts[str(tmp_path / "levels")] == path_hash(tmp_path / "levels")
