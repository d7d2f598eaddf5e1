"""From a configuration to a run that trains through a vLLM server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolwise.config.schema import RunConfig, load_config
from toolwise.errors import ConfigError, PolicyError
from toolwise.policies.vllm.builder import build_vllm

Cli = Callable[..., Any]
MakeConfig = Callable[..., Path]


def config(**vllm: Any) -> RunConfig:
    return RunConfig.model_validate({"rollout": {"engine": "vllm", "vllm": vllm}})


@pytest.mark.long
def test_two_steps_of_training_pass_the_canary(
    tmp_path: Path, cli: Cli, make_config: MakeConfig, stand_in: Any
) -> None:
    rollout = {"engine": "vllm", "vllm": {"base_url": stand_in.url}, "n": 4, "max_new_tokens": 32}
    settings = {"rollout": rollout, "algorithm": {"zero_std_groups": "keep"}, "actor": {"lr": 1e-4}}
    ended = cli("train", make_config(tmp_path, settings), "--out", tmp_path / "run")
    assert ended.status == 0, ended.err
    figures = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [step["canary/logprob_gap_max"] for step in figures if "canary/logprob_gap_max" in step]
    assert len(gaps) == 2
    assert max(gaps) < 1e-3
    assert stand_in.version == "2"
    assert stand_in.asked.count("collective_rpc") == 4  # uniform weights, the model's own, and one per update


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "told"),
    [({"ignores_weights": True}, "not update the output head"), ({"ignores_after": 2}, "disagree on the log-probs")],
    ids=["from the beginning", "after the first update"],
)
def test_weights_that_do_not_arrive_stop_the_run(
    tmp_path: Path, cli: Cli, make_config: MakeConfig, stand_in: Any, fault: dict[str, Any], told: str
) -> None:
    """Found before the first rollout, or by the mismatch check."""
    for name, value in fault.items():
        setattr(stand_in, name, value)
    rollout = {"engine": "vllm", "vllm": {"base_url": stand_in.url}, "n": 4, "max_new_tokens": 32}
    settings = {"rollout": rollout, "algorithm": {"zero_std_groups": "keep"}, "validation": {"before": False}}
    ended = cli("train", make_config(tmp_path, settings), "--out", tmp_path / "run")
    assert ended.status == 2
    assert told in ended.err


def test_a_server_is_refused_before_any_weight_is_sent(stand_in: Any, loaded: Any) -> None:
    stand_in.dtype = "torch.bfloat16"
    with pytest.raises(PolicyError, match="--dtype float32"):
        build_vllm(config(base_url=stand_in.url), loaded[0], "unused")
    assert "collective_rpc" not in stand_in.asked


def test_a_key_is_taken_from_the_environment(stand_in: Any, loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.api_key_env: the environment variable VLLM_KEY is not set"):
        build_vllm(config(base_url=stand_in.url, api_key_env="VLLM_KEY"), loaded[0], "unused")


def test_no_server_leaves_nothing_behind(loaded: Any, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"there is no vLLM server at http://127\.0\.0\.1:9"):
        build_vllm(config(base_url="http://127.0.0.1:9/v1", weights_dir=tmp_path / "w"), loaded[0], "unused")
    assert list((tmp_path / "w").iterdir()) == []


def test_a_folder_of_weights_lies_beside_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[rollout.vllm]\nweights_dir = "shared"\n', encoding="utf-8")
    assert load_config(tmp_path / "run.toml").rollout.vllm.weights_dir == tmp_path / "shared"
