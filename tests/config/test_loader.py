"""Configuration files, overrides, and one-line error messages."""

from __future__ import annotations

import copy
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from setting_keys import setting_keys

from toolwise.config.loader import apply_overrides, build_config, read_settings, to_toml
from toolwise.errors import ConfigError


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Speed(Enum):
    SLOW = "slow"
    FAST = "fast"


class Calculator(Section):
    kind: Literal["calculator"] = "calculator"
    digits: int = 10


class Search(Section):
    kind: Literal["search"] = "search"
    corpus: Path = Path("wordnet")


class Algorithm(Section):
    adv_estimator: Literal["grpo", "gigpo", "rlvcr"] = "grpo"
    lr: float = Field(1e-4, gt=0)
    clip: float | None = None


class RolloutSettings(Section):
    max_steps: int = 4
    speed: Speed = Speed.SLOW
    seed: int | str | None = None
    tool: Annotated[Calculator | Search, Field(discriminator="kind")] = Calculator()
    others: list[Search] = []
    named: dict[str, Calculator] = {}

    @field_validator("max_steps")
    @classmethod
    def _few(cls, value: int) -> int:
        if value > 100:
            raise ValueError("more than 100 steps\nnever end")
        return value


class Run(Section):
    name: str
    algorithm: Algorithm = Algorithm()
    rollout: RolloutSettings | None = None
    weights: list[float] = []
    free: dict[str, Any] = {}
    frozen: bool = False

    @model_validator(mode="after")
    def _not_frozen(self) -> Run:
        if self.frozen and self.weights:
            raise ValueError("frozen and weights exclude each other")
        return self


def complaint(settings: dict[Any, Any], model: type[BaseModel] = Run) -> str:
    with pytest.raises(ConfigError) as caught:
        build_config(model, settings, source="run.toml")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refusal(path: Path, text: str | None = None) -> str:
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_settings(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_toml_and_yaml_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('name = "x"\n[algorithm]\nlr = 1e-3\n')
    for name in ("run.yaml", "run.YML"):
        (tmp_path / name).write_text("name: x\nalgorithm:\n  lr: 1e-3\n")
    runs = [build_config(Run, read_settings(path), source=path.name) for path in sorted(tmp_path.iterdir())]
    assert [run.algorithm.lr for run in runs] == [1e-3] * 3


def test_an_empty_file_is_an_empty_table(tmp_path: Path) -> None:
    for name in ("a.toml", "a.yaml"):
        (tmp_path / name).write_text("# nothing yet\n")
        assert read_settings(tmp_path / name) == {}


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbfname = 'x'\n")
    assert read_settings(tmp_path / "a.toml") == {"name": "x"}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.toml", "x = 1\ny = = 2\n", "is not valid TOML: Invalid value (at line 2, column 5)"),
        ("a.toml", "x = 1\ny = [1,\n", "(at line 3, column 1)"),
        ("a.toml", "x = 1\nx = 2\n", "line 2"),
        ("a.yaml", "a: 1\nb: [1, 2\n", "(at line 3, column 1)"),
        ("a.yaml", "a: 1\n\tb: 2\n", "is not valid YAML: found character"),
        ("a.yaml", "- 1\n- 2\n", "must contain a table of settings (key: value), not [1, 2]"),
        ("a.yaml", "!!python/object/apply:os.getcwd []\n", "is not valid YAML"),
        ("a.json", "{}", "a configuration file must end in .toml, .yaml or .yml"),
        ("a", "", "a configuration file must end in .toml, .yaml or .yml"),
        ("a.toml", None, "does not exist"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    message = refusal(tmp_path / name, text)
    assert message.startswith(str(tmp_path / name))
    assert said in message


def test_a_folder_is_no_configuration(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path} is a folder: give a configuration file"


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"x = '\xff'")
    assert "is not UTF-8 text (byte 5)" in refusal(tmp_path / "a.toml")


def test_without_pyyaml_the_message_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert "pip install pyyaml" in refusal(tmp_path / "a.yaml", "a: 1")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-4", 1e-4),
        ("-0.5", -0.5),
        ("true", True),
        ('"3"', "3"),
        ("'a b'", "a b"),
        ("grpo", "grpo"),
        ("a/b.jsonl", "a/b.jsonl"),
        ("[1, 2]", [1, 2]),
        ('["a", "b"]', ["a", "b"]),
        ("{x = 1, y.z = 2}", {"x": 1, "y": {"z": 2}}),
        ("", ""),
        ("a=b", "a=b"),
        ("2024-01-01", "2024-01-01"),
        ("1\nother = 2", "1\nother = 2"),
        ("[1, ", "[1,"),
        ("#fff", "#fff"),
        (" spaced ", "spaced"),
    ],
)
def test_the_value_of_an_override(text: str, value: Any) -> None:
    found = apply_overrides({}, [f"a.b={text}"])["a"]["b"]
    assert found == value
    assert type(found) is type(value)


def test_overrides_go_deep_and_leave_the_rest_and_the_original_alone() -> None:
    before: dict[str, Any] = {"a": {"b": {"c": 1, "d": 2}}, "e": [1]}
    kept = copy.deepcopy(before)
    after = apply_overrides(before, ["a.b.c=5", " a.new.key = x ", "e=[2]", 'f."g.h"=1', "e=[3]"])
    assert after == {"a": {"b": {"c": 5, "d": 2}, "new": {"key": "x"}}, "e": [3], "f": {"g.h": 1}}
    assert before == kept


@pytest.mark.parametrize("override", ["a", "", "=1", "a..b=1", ".a=1", "a.=1", ' ."x"=1'])
def test_an_override_without_a_key_or_a_value_is_named(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides({}, [override])
    assert repr(override) in str(caught.value)
    assert "section.key=value" in str(caught.value)


def test_an_override_below_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"override 'a\.b\.c\.d=1': `a\.b` is 3, not a table"):
        apply_overrides({"a": {"b": 3}}, ["a.b.c.d=1"])


def test_a_key_spelt_wrong_gets_its_sibling() -> None:
    assert complaint({"name": "x", "algorithm": {"lrr": 1}}) == (
        "run.toml: unknown key `algorithm.lrr` (did you mean `algorithm.lr`?)"
    )


def test_a_key_in_the_wrong_section_gets_its_home() -> None:
    assert complaint({"name": "x", "rollout": {"adv_estimator": "grpo"}}) == (
        "run.toml: unknown key `rollout.adv_estimator` (did you mean `algorithm.adv_estimator`?)"
    )


def test_a_key_misspelt_in_the_wrong_section_gets_its_home_too() -> None:
    assert "did you mean `algorithm.adv_estimator`?" in complaint({"name": "x", "adv_estimatr": "grpo"})


def test_a_key_like_nothing_gets_the_list() -> None:
    assert complaint({"name": "x", "algorithm": {"zzz": 1}}) == (
        "run.toml: unknown key `algorithm.zzz` (known keys: adv_estimator, lr, clip)"
    )


def test_keys_inside_lists_tables_and_unions_are_found() -> None:
    rollout = {
        "others": [{}, {"korpus": 1}],
        "named": {"x": {"digitz": 1}},
        "tool": {"kind": "search", "corpas": 1},
    }
    message = complaint({"name": "x", "rollout": rollout})
    assert "unknown key `rollout.others[1].korpus` (did you mean `rollout.others[1].corpus`?)" in message
    assert "`rollout.named.x.digitz` (did you mean `rollout.named.x.digits`?)" in message
    assert "`rollout.tool.corpas` (did you mean `rollout.tool.corpus`?)" in message


def test_a_literal_lists_what_is_allowed_and_guesses() -> None:
    assert complaint({"name": "x", "algorithm": {"adv_estimator": "gipgo"}}) == (
        "run.toml: `algorithm.adv_estimator` must be 'grpo', 'gigpo' or 'rlvcr', got 'gipgo' (did you mean 'gigpo'?)"
    )


def test_an_enum_lists_what_is_allowed_and_guesses() -> None:
    assert complaint({"name": "x", "rollout": {"speed": "fats"}}) == (
        "run.toml: `rollout.speed` must be 'slow' or 'fast', got 'fats' (did you mean 'fast'?)"
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"algorithm": {"lr": -1}}, "`algorithm.lr` must be greater than 0, got -1"),
        ({"algorithm": {"lr": "quick"}}, "`algorithm.lr` must be a valid number, got 'quick'"),
        ({"algorithm": 3}, "`algorithm` must be a table, got 3"),
        ({"weights": [1, "x"]}, "`weights[1]` must be a valid number, got 'x'"),
        ({"rollout": {"seed": [1]}}, "`rollout.seed` must be a valid integer or a valid string, got [1]"),
        ({"rollout": {"max_steps": 101}}, "`rollout.max_steps`: more than 100 steps never end, got 101"),
        ({"rollout": {"tool": {"kind": "serch"}}}, "(did you mean 'search'?)"),
        ({"rollout": {"tool": {"digits": 1}}}, "`rollout.tool.kind` is required: add it"),
        ({"rollout": {"named": {"a": {"digits": "x"}}}}, "`rollout.named.a.digits` must be a valid integer"),
        ({"frozen": True, "weights": [1]}, "run.toml: frozen and weights exclude each other"),
        ({"weights": "x" * 500}, "..."),
    ],
)
def test_what_is_wrong_is_said(settings: dict[str, Any], said: str) -> None:
    message = complaint({"name": "x", **settings})
    assert said in message
    assert len(message) < 200


def test_a_required_key_is_asked_for() -> None:
    assert complaint({}) == "run.toml: `name` is required: add it"


def test_keys_that_are_no_text_are_one_line_too() -> None:
    assert "Keys should be strings" in complaint({"name": "x", 1: 2})


def test_three_mistakes_are_told_unknown_keys_first_and_the_rest_counted() -> None:
    message = complaint({"nmae": "x", "algorithm": {"lr": 0, "clip": "a"}, "weights": 1, "frozen": "perhaps"})
    assert message.startswith("run.toml: unknown key `nmae` (did you mean `name`?); `name` is required: add it; ")
    assert message.count("; ") == 3
    assert message.endswith("; and 3 more")


def test_all_paths_are_the_leaves() -> None:
    assert setting_keys(Run) == [
        "name",
        "algorithm.adv_estimator",
        "algorithm.lr",
        "algorithm.clip",
        "rollout.max_steps",
        "rollout.speed",
        "rollout.seed",
        "rollout.tool.kind",
        "rollout.tool.digits",
        "rollout.tool.corpus",
        "rollout.others",
        "rollout.named",
        "weights",
        "free",
        "frozen",
    ]


class Node(Section):
    value: int = 0
    below: Node | None = None
    short: str | Algorithm = ""


def test_a_model_inside_itself_is_entered_once() -> None:
    assert setting_keys(Node) == [
        "value",
        "below",
        "short.adv_estimator",
        "short.lr",
        "short.clip",
    ]


INTEGERS = st.integers(-(2**63), 2**63 - 1)
"""As many as TOML has."""
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
FLOATS = st.floats(allow_nan=False)
FREE = st.recursive(
    st.booleans() | INTEGERS | FLOATS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
SEARCHES = st.builds(Search, corpus=st.sampled_from([Path("a"), Path("/b/c d")]))
CALCULATORS = st.builds(Calculator, digits=INTEGERS)
RUNS = st.builds(
    Run,
    name=WORDS,
    algorithm=st.builds(
        Algorithm,
        adv_estimator=st.sampled_from(["grpo", "gigpo", "rlvcr"]),
        lr=st.floats(min_value=0, exclude_min=True),
        clip=st.none() | FLOATS,
    ),
    rollout=st.none()
    | st.builds(
        RolloutSettings,
        max_steps=st.integers(-(2**63), 100),
        speed=st.sampled_from(Speed),
        seed=st.none() | INTEGERS | WORDS,
        tool=SEARCHES | CALCULATORS,
        others=st.lists(SEARCHES, max_size=2),
        named=st.dictionaries(WORDS, CALCULATORS, max_size=2),
    ),
    weights=st.lists(FLOATS, max_size=3),
    free=st.dictionaries(WORDS, FREE, max_size=3),
    frozen=st.just(False),
)


@settings(max_examples=200, deadline=None)
@given(run=RUNS)
def test_written_settings_come_back_equal(run: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("toml") / "run.toml"
    path.write_text(to_toml(run), encoding="utf-8", newline="")
    assert build_config(Run, read_settings(path), source=path.name) == run


class Forgetful(Section):
    limit: int | None = 5
    items: list[int | None] = []
    free: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("made", "path"),
    [
        (Forgetful(limit=None), "limit"),
        (Forgetful(items=[1, None]), r"items\[1\]"),
        (Forgetful(free={"a": {"b": None}}), r"free\.a\.b"),
    ],
)
def test_a_null_that_toml_would_forget_is_refused(made: Forgetful, path: str) -> None:
    with pytest.raises(ConfigError, match=f"`{path}` is null, which TOML cannot represent"):
        to_toml(made)


@settings(max_examples=100, deadline=None)
@given(raw=st.dictionaries(st.sampled_from([*Run.model_fields, "x", "lr"]), FREE, max_size=5))
def test_whatever_is_given_the_answer_is_a_model_or_one_line(raw: dict[str, Any]) -> None:
    try:
        build_config(Run, raw, source="run.toml")
    except ConfigError as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message


def test_an_enormous_number_where_a_table_is_meant_is_one_short_line() -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides({}, [f"actor=0x{'f' * 5_000}", "actor.lr=1.0"])
    assert "an integer of 20000 bits, not a table" in str(caught.value)
    assert len(str(caught.value)) < 500
