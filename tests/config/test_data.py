"""The settings of data sources: their forms, their paths, and those that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolwise.config.data import DataSource, source_paths
from toolwise.config.loader import build_config, to_toml
from toolwise.config.schema import RunConfig, load_config
from toolwise.errors import ConfigError


def read(tmp_path: Path, text: str) -> RunConfig:
    (tmp_path / "run.toml").write_text(text)
    return load_config(tmp_path / "run.toml")


def test_paths_of_all_forms_are_relative_to_the_file(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        '[data]\nval = ["v/*.parquet", "w.jsonl"]\ncache = "c"\n[[data.train]]\npath = "a/*.parquet"\nweight = 3\n'
        '[[data.train]]\npath = "b.jsonl"\nweight = 1',
    )
    assert config.data.train == [
        DataSource(path=tmp_path / "a/*.parquet", weight=3),
        DataSource(path=tmp_path / "b.jsonl", weight=1),
    ]
    assert source_paths(config.data.val) == [tmp_path / "v/*.parquet", tmp_path / "w.jsonl"]
    assert config.data.cache == tmp_path / "c"


def test_sources_survive_the_file_of_a_run(tmp_path: Path) -> None:
    config = read(tmp_path, '[data]\ntrain = [{path = "a.jsonl", weight = 2}, {path = "b.jsonl", weight = 0.5}]')
    assert read(tmp_path, to_toml(config)) == config


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"train": []}, r"data\.train is an empty list"),
        ({"train": [{"path": "a", "weight": 1}, "b"]}, "some sources have a weight and some have none"),
        ({"val": [{"path": "a", "weight": 1}]}, r"data\.val: weights apply to data\.train only"),
        (
            {"train": [{"path": "a", "weight": 0}]},
            r"toml: `data\.train\[0\]\.weight` must be greater than 0, got 0$",
        ),
        (
            {"train": [{"path": "a", "wieght": 1}]},
            r"toml: unknown key `data\.train\[0\]\.wieght` \(did you [^;]*$",
        ),
        ({"train": 3}, r"^run.toml: `data\.train` must be a path or a list, got 3$"),
        ({"train": [["a"]]}, r"^run.toml: `data\.train\[0\]` must be a path or a table, got \['a'\]$"),
    ],
)
def test_a_source_that_cannot_be_is_refused(data: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build_config(RunConfig, {"data": data}, source="run.toml")
