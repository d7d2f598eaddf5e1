"""`rollout.stop` in a whole run, synchronous and asynchronous."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Cli, MakeConfig


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_replies_end_at_the_string_and_are_trained_on(
    mode: str, tmp_path: Path, cli: Cli, make_config: MakeConfig
) -> None:
    trainer = {"total_steps": 2, "mode": mode, "save_every": 10}
    config = make_config(tmp_path, {"rollout": {"stop": ["never said", "swer:"]}, "trainer": trainer})
    ended = cli("train", config, "--out", tmp_path / "run")
    assert ended.status in (0, 3), ended.err  # 3: no reply has an answer, so nothing may be learned
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    shares = [step["outputs/stop_string"] for step in steps if "outputs/stop_string" in step]
    assert len(shares) == 2
    assert all(0 < share <= 1 for share in shares)
    texts = []
    for path in sorted((tmp_path / "run" / "rollouts").glob("step-*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            last = json.loads(line)["messages"][-1]
            texts += [last["content"]] * (last["role"] == "assistant" and "swer:" in last["content"])
    assert texts
    assert all(text.endswith("swer:") for text in texts)  # the model goes on with a number
