"""A run's configuration: path resolution, and a lossless round trip through a file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from toolwise.config.loader import OLD_KEYS, note_renamed, to_toml
from toolwise.config.schema import RunConfig, load_config, resolve_paths
from toolwise.errors import ConfigError


def write(path: Path, settings: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tomli_w.dumps(settings), encoding="utf-8")
    return path


def test_an_empty_file_is_a_run_of_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path / "run.toml", {})) == RunConfig()


def test_toml_and_yaml_say_the_same(tmp_path: Path) -> None:
    toml = write(tmp_path / "run.toml", {"seed": 3, "actor": {"lr": 0.5}, "tools": ["search"]})
    yaml = tmp_path / "run.yaml"
    yaml.write_text("seed: 3\nactor: {lr: 0.5}\ntools: [search]\n", encoding="utf-8")
    assert load_config(toml) == load_config(yaml)


def test_paths_in_a_file_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "model").mkdir(parents=True)
    settings = {
        "data": {"train": "train.jsonl", "val": "../val.jsonl"},
        "model": {"path": "model"},
        "reward": {"function": "judge.py:judge"},
        "tools": ["calculator", "tools.py:double", {"name": "tools.py:half", "price": 2.0}],
    }
    write(tmp_path / "runs" / "run.toml", settings)
    found = load_config("runs/run.toml")
    folder = tmp_path / "runs"
    assert (found.data.train, found.data.val) == (folder / "train.jsonl", folder / "../val.jsonl")
    assert found.model.path == str(folder / "model")
    assert found.reward.function == f"{folder / 'judge.py'}:judge"
    assert found.tools == [
        "calculator",
        f"{folder / 'tools.py'}:double",
        {"name": f"{folder / 'tools.py'}:half", "price": 2.0},
    ]


def test_labels_and_wording_of_the_router_are_files_and_silence_is_none(tmp_path: Path) -> None:
    router = {"labels": "labels.jsonl", "wording": "words/mine.toml"}
    found = load_config(write(tmp_path / "run.toml", {"router": router})).router
    assert (found.labels, found.wording) == (tmp_path / "labels.jsonl", str(tmp_path / "words/mine.toml"))
    for word in ("silent", ""):
        assert load_config(write(tmp_path / "run.toml", {"router": {"wording": word}})).router.wording == word


def test_paths_on_the_command_line_are_relative_to_where_one_is(tmp_path: Path) -> None:
    file = write(tmp_path / "runs" / "run.toml", {"data": {"train": "train.jsonl"}})
    found = load_config(file, ["data.train=mine.jsonl", "reward.function=judge.py:judge"])
    assert found.data.train == Path("mine.jsonl")
    assert found.reward.function == "judge.py:judge"


def test_names_that_are_no_paths_stay_as_they_are(tmp_path: Path) -> None:
    settings = {
        "model": {"path": "owner/name"},
        "reward": {"function": "package.module:judge"},
        "tools": ["search", "package.tools:double"],
    }
    found = load_config(write(tmp_path / "run.toml", settings))
    assert found.model.path == "owner/name"
    assert found.reward.function == "package.module:judge"
    assert found.tools == ["search", "package.tools:double"]


def test_absolute_and_home_paths_stay_where_they_lead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    settings = {"data": {"train": "/data/train.jsonl", "val": "~/val.jsonl"}}
    found = load_config(write(tmp_path / "run.toml", settings))
    assert (found.data.train, found.data.val) == (Path("/data/train.jsonl"), tmp_path / "home" / "val.jsonl")


@given(
    st.dictionaries(
        st.sampled_from(["data", "model", "reward", "tools", "seed"]),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=4),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["train", "val", "path", "function", "name"]), inner, max_size=3)
            ),
        ),
    )
)
def test_settings_of_a_wrong_type_are_left_for_validation(settings: dict[str, Any]) -> None:
    before = repr(settings)
    assert resolve_paths(settings, Path("/folder")).keys() == settings.keys()
    assert repr(settings) == before


def test_a_configuration_survives_a_round_trip_through_a_file(tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {
            "data": {"train": "/x/train.jsonl", "limit": 3},
            "tools": ["calculator", {"name": "search", "price": 0.5}],
            "reward": {"function": "a.b:c", "kwargs": {"price": 1e-3, "words": ["a", "ä"], "deep": {"x": True}}},
            "actor": {"lr": 1.2345678901234567e-05},
        }
    )
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert load_config(file) == config
    assert "val" not in tomllib.loads(to_toml(config))["data"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("actor.lr=0", "greater than 0"),
        ("actor.lr=nan", "finite"),
        ("reward.max_error_rate=1.5", "less than or equal to 1"),
        ("rollout.tool_parser=hermse", "did you mean 'hermes'"),
        ("algorithm.zero_std_groups=dorp", "did you mean 'drop'"),
        ("trainer.save_every=-1", "greater than 0"),
        ("data.batchsize=3", "did you mean `data.batch_size`?"),
    ],
)
def test_values_that_make_no_run_are_refused(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path / "run.toml", {}), [override])
    assert said in str(caught.value)
    assert override.partition("=")[0].split(".")[0] in str(caught.value)


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().seed = 3  # type: ignore[misc]


@pytest.mark.parametrize("old", sorted(OLD_KEYS))
def test_an_old_name_of_a_setting_is_accepted_with_a_note(
    old: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    section, _, name = old.rpartition(".")
    new = f"{section}.{OLD_KEYS[old]}"
    value = {"actor.canary": '"warn"', "router.evaluate": '"argmax"'}.get(old, "true")
    (tmp_path / "old.toml").write_text(f"[{section}]\n{name} = {value}\n")
    (tmp_path / "empty.toml").write_text("")
    note_renamed.cache_clear()
    by_old_name = load_config(tmp_path / "old.toml")
    assert caplog.messages == [f"{old} is an old name for {new}: please use the new one"]
    assert by_old_name == load_config(tmp_path / "empty.toml", [f"{new}={value}"]) != RunConfig()
    assert by_old_name == load_config(tmp_path / "empty.toml", [f"{old}={value}"])
    (tmp_path / "new.toml").write_text(to_toml(RunConfig()))
    assert by_old_name == load_config(tmp_path / "new.toml", [f"{old}={value}"])
    default = next(iter(to_toml(RunConfig()).split(f"{OLD_KEYS[old]} = ")[1:])).splitlines()[0]
    assert load_config(tmp_path / "old.toml", [f"{new}={default}"]) == RunConfig()
    (tmp_path / "both.toml").write_text(f"[{section}]\n{name} = {value}\n{OLD_KEYS[old]} = {value}\n")
    with pytest.raises(ConfigError, match=f"unknown key `{old}`"):
        load_config(tmp_path / "both.toml")


@pytest.mark.parametrize("name", ["icepop", "sequence"])
def test_bounds_of_a_correction_that_leave_nothing_are_refused(name: str) -> None:
    bounds = {f"{name}_low": 1.02, f"{name}_high": 1.01}
    with pytest.raises(ValueError, match=rf"{name}_low is 1.02 and {name}_high is 1.01: everything would be left"):
        RunConfig.model_validate({"actor": {"correction": bounds}})
