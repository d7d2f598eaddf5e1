"""Any configuration is a run's or one line that says why not."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from fuzzing import JSON, ODD, SCALARS, TEXT, fuzz, nested
from hypothesis import strategies as st
from setting_keys import setting_keys

from toolwise.api import read_config
from toolwise.config.loader import build_config, read_settings, to_toml
from toolwise.config.schema import RunConfig, load_config
from toolwise.errors import ToolwiseError

PATHS = sorted(setting_keys(RunConfig))
KEYS = st.one_of(st.sampled_from(PATHS), st.sampled_from(PATHS).map(lambda path: path.partition(".")[0]), TEXT)
VALUES = st.one_of(
    JSON, SCALARS, st.sampled_from(["0x" + "f" * 5_000, "9" * 5_000, "[" * 300, "1979-05-27", "{a = 1}"])
)
OVERRIDES = st.lists(
    st.one_of(st.tuples(KEYS, VALUES).map(lambda pair: f"{pair[0]}={pair[1]}"), TEXT), min_size=1, max_size=3
)
LINES = st.lists(
    st.one_of(
        st.sampled_from(PATHS).flatmap(lambda path: VALUES.map(lambda value: f"{path} = {value!r}")),
        st.sampled_from([f"[{path}]" for path in PATHS]),
        st.sampled_from([f"[[{path}]]" for path in PATHS]),
        TEXT,
    ),
    max_size=5,
).map("\n".join)


def told(fault: ToolwiseError) -> None:
    assert "\n" not in str(fault)
    assert len(str(fault)) < 20_000


def tables(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, value in pairs:
        table, *rest = [found], *path.split(".")
        place: Any = table[0]
        for name in rest[:-1]:
            place = place.setdefault(name, {}) if isinstance(place, dict) else {}
        if isinstance(place, dict):
            place[rest[-1]] = value
    return found


@fuzz(st.lists(st.tuples(KEYS, st.one_of(VALUES, st.just(nested(300)))), max_size=4), st.one_of(st.just([]), OVERRIDES))
def test_any_settings_are_a_run_or_a_line(pairs: list[tuple[str, Any]], overrides: list[str]) -> None:
    try:
        config = read_config(tables(pairs), overrides)
    except ToolwiseError as fault:
        told(fault)
        return
    written = to_toml(config)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_text(written, encoding="utf-8")
        assert build_config(RunConfig, read_settings(path), source="again") == config


@fuzz(
    st.one_of(st.binary(max_size=80), LINES.map(lambda text: text.encode("utf-8", "replace"))),
    st.sampled_from(["toml", "yaml"]),
)
def test_any_file_is_a_run_or_a_line(content: bytes, ending: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"run.{ending}"
        path.write_bytes(content)
        try:
            load_config(path)
        except ToolwiseError as fault:
            told(fault)


@fuzz(ODD)
def test_any_name_is_a_file_or_a_line(name: str) -> None:
    try:
        load_config(f"{name}.toml")
    except ToolwiseError as fault:
        told(fault)


@fuzz(st.dictionaries(TEXT, JSON, max_size=3))
def test_free_tables_are_kept_or_refused(table: dict[str, Any]) -> None:
    try:
        config = read_config({"reward": {"function": "a:b", "kwargs": table}})
    except ToolwiseError as fault:
        told(fault)
        return
    try:
        to_toml(config)
    except ToolwiseError as fault:
        told(fault)
