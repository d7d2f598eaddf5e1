"""What the settings of an agent folder may say, and what an export copies: a folder may come from anyone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from toolwise.agent.sources import find_agent, find_router
from toolwise.config.loader import setting_paths
from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError
from toolwise.training.agent_bundle import AGENT_FIELDS, read_bundle, write_bundle
from toolwise.training.checkpoint.agent_manifest import write_manifest


def paths_of(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in table.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from paths_of(value, f"{prefix}{name}.")


WRITTEN = set(paths_of(RunConfig().model_dump(include=AGENT_FIELDS)))


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value  # type: ignore[no-any-return]


def test_every_setting_that_an_export_does_not_write_is_refused(tmp_path: Path) -> None:
    refused = [path for path in setting_paths(RunConfig) if path not in WRITTEN]
    assert {"model.trust_remote_code", "model.chat_template", "rollout.vllm.command", "rollout.engine"} < set(refused)
    assert {"rollout.grammar.lark", "reward.sandbox.tier", "agent.command", "router.name", "seed"} < set(refused)
    for path in refused:
        with pytest.raises(ConfigError, match="which an agent folder must not choose") as told:
            read_bundle(nested(path, "x"), tmp_path, (), trust_code=True)
        assert "\n" not in str(told.value)
        assert any(f"sets {path[:length]}," in str(told.value) for length in range(1, len(path) + 1))


def test_what_an_export_writes_is_read_again(tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {"model": {"template_kwargs": {"x": {"y": 1}}}, "rollout": {"grammar": {"regex": "a+"}, "deadline_s": 5}}
    )
    settings = write_bundle(config, tmp_path)
    read = RunConfig.model_validate(read_bundle(settings, tmp_path, (), trust_code=False, use_reward=True))
    assert read == config


def test_a_setting_that_a_folder_must_not_choose_can_be_given(tmp_path: Path) -> None:
    read = read_bundle({"tools": []}, tmp_path, ["model.trust_remote_code=true"], trust_code=False)
    assert read["model"] == {"trust_remote_code": True}


@pytest.mark.parametrize(
    "entry", [{"name": "search", "folder": ".."}, {"name": "search", "file": "~"}, "../tool.py", {"name": "/x/tool.py"}]
)
def test_no_tool_reads_a_file_outside_the_folder(entry: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which is not in the folder"):
        read_bundle({"tools": [entry]}, tmp_path, (), trust_code=True)


def test_a_router_reads_no_file_outside_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    folder.mkdir()
    (tmp_path / "mine.toml").write_text("")
    (folder / "own.toml").write_text("")
    for with_manifest in (False, True):
        for wording, said in (
            ("../mine.toml", "mine.toml"),
            (str(tmp_path / "mine.toml"), "mine.toml"),
            ("own.toml", ""),
        ):
            (folder / "agent.json").unlink(missing_ok=True)
            router = {"enable": True, "wording": wording, "labels": str(tmp_path / "mine.toml")}
            grammar = {"lark": str(tmp_path / "mine.toml"), "tool_calls": True}
            metadata = {"router": router, "rollout": {"grammar": grammar}}
            (folder / "router.json").write_text(json.dumps(metadata))
            if with_manifest:
                write_manifest(folder, "x", 1, {"tools": []})
            find = find_agent if with_manifest else find_router
            if said:
                with pytest.raises(
                    ConfigError, match=rf"trained with the wording {said}, .* --set router.wording=FILE"
                ):
                    find(folder)
                assert find(folder, ["router.wording=silent"])[0].router.wording == "silent"
            else:
                config = find(folder)[0]
                assert (config.router.wording, config.router.labels) == (str(folder / "own.toml"), None)
                assert config.rollout.grammar.lark is None


def test_an_export_copies_only_the_files_that_search_reads(tmp_path: Path) -> None:
    notes, out = tmp_path / "notes", tmp_path / "out"
    (notes / ".git").mkdir(parents=True)
    (notes / "more").mkdir()
    for name in ("a.txt", "more/b.md", ".env", ".hidden.txt", ".git/config", ".git/c.txt", "db.sqlite"):
        (notes / name).write_text("x")
    (tmp_path / "mine.txt").write_text("my secret")
    (notes / "link.txt").symlink_to(tmp_path / "mine.txt")
    config = RunConfig.model_validate({"tools": [{"name": "search", "folder": str(notes)}]})
    assert write_bundle(config, out)["tools"] == [{"name": "search", "folder": "documents/0"}]
    copied = [path.relative_to(out).as_posix() for path in sorted(out.rglob("*")) if path.is_file()]
    assert copied == ["documents/0/a.txt", "documents/0/more/b.md"]


def test_an_export_has_no_secrets_of_urls_and_commands(tmp_path: Path) -> None:
    args = ["--api-key", "hunter2", "--token=hunter2", "--url=https://me:${PASSWORD}@host", "--header", "A: ${B}"]
    tools = [
        {"name": "mcp", "url": "https://me:hunter2@host/mcp"},
        {"name": "mcp", "url": "https://host/mcp?api_key=hunter2&x=${X}"},
        {"name": "mcp", "url": "https://host/mcp?api_key=${KEY}", "headers": {"Authorization": "Bearer ${KEY}"}},
        {"name": "mcp", "command": ["serve"], "args": args, "env": {"DATABASE_URL": "postgres://me:hunter2@host/db"}},
    ]
    written = write_bundle(RunConfig.model_validate({"tools": tools}), tmp_path)["tools"]
    assert written[2] == tools[2]
    assert "hunter2" not in json.dumps(written)
    assert written[3]["args"] == ["--api-key", "--url=https://me:${PASSWORD}@host", "--header", "A: ${B}"]
