"""Load a pydantic model from a TOML or YAML file and `a.b=c` overrides, with every error as one readable line.

Independent of what the settings are; those of a run are in `schema.py`.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import logging
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import to_jsonable_python

from toolwise.errors import ConfigError
from toolwise.untrusted.bounds import truncate_text

Model = TypeVar("Model", bound=BaseModel)
Location = tuple[int | str, ...]

log = logging.getLogger("toolwise.config")

OLD_KEYS = {
    "actor.canary": "mismatch_check",
    "algorithm.rlvcr.price_rollouts": "subtract_thinking_cost",
    "router.divide_by_std_as_a_control": "divide_by_std",
    "router.evaluate": "eval_mode",
}
"""Old names of settings, still accepted in files and overrides, and their current names in the same table."""
CONFIG_SUFFIXES = (".toml", ".yaml", ".yml")
MAX_SHOWN_ERRORS = 3
MAX_SHOWN_KEYS = 8
MAX_FILE_BYTES = 16 << 20
MAX_DEPTH = 50
"""Maximum nesting of tables and lists."""


class Section(BaseModel):
    """Base of a configuration table: unknown keys are errors, instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def read_settings(path: str | Path) -> dict[str, Any]:
    """Read the settings in a `.toml`, `.yaml` or `.yml` file."""
    path = Path(path)
    read = dict(zip(CONFIG_SUFFIXES, (_read_toml, _read_yaml, _read_yaml), strict=True)).get(path.suffix.lower())
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder: give a configuration file")
        if read is None:
            raise ConfigError(f"{path}: a configuration file must end in .toml, .yaml or .yml")
        settings = read(path, _read_regular_file(path).decode("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except ValueError as error:  # an impossible file name, e.g. with a null byte
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must contain a table of settings (key: value), not {_display_value(settings)}")
    return settings


def _read_regular_file(path: Path) -> bytes:
    """Read a regular file of reasonable size; opened non-blocking, because opening a pipe could wait forever."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ConfigError(f"{path} is a pipe or a device: write the configuration to a file")
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MB, too large for a configuration file")
    return content


def _read_toml(path: Path, text: str) -> Any:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        end = f"(at line {text.count(chr(10)) + 1}, column {len(text) - text.rfind(chr(10))})"
        reason = _one_line(error).replace("(at end of document)", end)
        raise ConfigError(f"{path} is not valid TOML: {reason}") from None


def _read_yaml(path: Path, text: str) -> Any:
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError:
        raise ConfigError(f"{path}: reading YAML needs PyYAML: pip install pyyaml (or write TOML)") from None
    try:
        settings = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (at line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        reason = _one_line(getattr(error, "problem", None) or error)
        raise ConfigError(f"{path} is not valid YAML: {reason}{where}") from None
    return {} if settings is None else settings


def apply_overrides(settings: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `settings` with each `a.b=c` applied; missing tables are created."""
    try:
        settings = _rename_old_keys(copy.deepcopy(settings))
    except RecursionError:
        raise ConfigError("the settings are nested too deeply: flatten them") from None
    for override in overrides:
        key, equals, text = override.partition("=")
        *sections, name = _key_names(key)
        what = f"override {truncate_text(repr(override), 200)}"
        if not equals or not all((*sections, name)):
            raise ConfigError(f"{what}: write it as section.key=value")
        table: Any = settings
        for depth, section in enumerate(sections, start=1):
            table = table.setdefault(section, {})
            if not isinstance(table, dict):
                where = ".".join(sections[:depth])
                raise ConfigError(f"{what}: `{where}` is {_display_value(table)}, not a table")
        table[_current_name(".".join(sections), name)] = _value(text.strip())
    return settings


def _key_names(key: str) -> list[str]:
    """Split `a.b.c` into names; names that contain a dot are quoted: `a."b.c".d`."""
    if '"' not in key:
        return [name.strip() for name in key.split(".")]
    try:
        table: Any = tomllib.loads(f"{key} = 0")
    except (ValueError, RecursionError):
        return [""]
    names = []
    while isinstance(table, dict):
        name, table = next(iter(table.items()))
        names.append(name)
    return names


def _value(text: str) -> Any:
    """Parse a TOML number, boolean, quoted string, array or inline table; anything else is plain text."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    is_value = len(parsed) == 1 and isinstance(parsed["value"], bool | int | float | str | list | dict)
    return parsed["value"] if is_value else text


def build_config(model: type[Model], settings: dict[str, Any], *, source: str) -> Model:
    """Validate `settings` as a `model`; errors become one `ConfigError` that starts with `source`."""
    if (problem := next(_unrepresentable_values(settings, ()), None)) is not None:
        raise ConfigError(f"{source}: {problem}")
    settings = _rename_old_keys(settings)
    try:
        return model.model_validate(settings)
    except ValidationError as error:
        messages = _error_messages(model, settings, error)
    if (rest := len(messages) - MAX_SHOWN_ERRORS) > 0:
        messages[MAX_SHOWN_ERRORS:] = [f"and {rest} more"]
    raise ConfigError(f"{source}: {'; '.join(messages)}")


def _rename_old_keys(settings: dict[str, Any], section: str = "") -> dict[str, Any]:
    """`settings` with current names. With both names in one table, the old one stays and is an unknown key."""
    renamed = {}
    for key, value in settings.items():
        name = key if OLD_KEYS.get(f"{section}.{key}") in settings else _current_name(section, key)
        inner = f"{section}.{key}" if section else str(key)
        renamed[name] = _rename_old_keys(value, inner) if isinstance(value, dict) else value
    return renamed


def _current_name(section: str, key: str) -> str:
    if name := OLD_KEYS.get(f"{section}.{key}"):
        note_renamed(f"{section}.{key}", f"{section}.{name}")
    return name or key


@cache
def note_renamed(old: str, new: str) -> None:
    """Logged once per process, however often the setting is read."""
    log.warning("%s is an old name for %s: please use the new one", old, new)


def _unrepresentable_values(value: Any, location: Location) -> Iterator[str]:
    """Describe values that Python can hold but TOML cannot."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield f"`{_dotted(location)}` is an integer of more than 64 bits"
    elif isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        yield f"`{_dotted(location)}` contains half of a surrogate pair: write valid text"
    elif isinstance(value, dict | list) and len(location) >= MAX_DEPTH:
        yield f"`{_dotted(location[:3])}` is nested more than {MAX_DEPTH} levels deep"
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _unrepresentable_values(key, location) if isinstance(key, str) else ()
            yield from _unrepresentable_values(item, (*location, key))


_TYPES = {"model_type": "a table", "dict_type": "a table", "path_type": "a path", "list_type": "a list"}


def _error_messages(model: type[BaseModel], settings: dict[str, Any], error: ValidationError) -> list[str]:
    """One message per setting. Unknown keys come first: a misspelled key also shows up as a missing one. Where
    something inside a setting is wrong, it is not said that the whole might have had another form."""
    unknown: dict[Location, str] = {}
    invalid: dict[Location, str] = {}
    needs: dict[Location, str] = {}
    for item in error.errors(include_url=False):
        kind, context, value = item["type"], item.get("ctx", {}), item["input"]
        location = _location(item["loc"], settings, missing=kind == "missing")
        if "discriminator" in context:  # pydantic reports the table, not the key in it that is wrong
            location, value = (*location, context["discriminator"].strip("'")), context.get("tag")
        path = f"`{_dotted(location)}`" if location else "the configuration"
        shown = "" if isinstance(value, dict) else f", got {_display_value(value)}"
        expected = context.get("expected") or context.get("expected_tags")
        message = re.match("Input should be (.*?)(, unable to .*)?$", item["msg"])  # the second part: why it failed
        need = _TYPES.get(kind) or expected or (message and message[1])
        if kind == "extra_forbidden":
            unknown[location] = f"unknown key {path} ({_suggest_key(model, location)})"
        elif kind in ("missing", "union_tag_not_found"):
            invalid[location] = f"{path} is required: add it"
        elif need:  # each member of a union has its own expectation
            needs[location] = f"{needs[location]} or {need}" if location in needs else need
            invalid[location] = f"{path} must be {needs[location]}{shown}{_suggest_value(expected, value)}"
        else:
            reason = re.sub("^(Value|Assertion) error, ", "", item["msg"])
            invalid[location] = f"{path}: {reason}{shown}" if location else reason
    inside = {location[:length] for location in (*unknown, *invalid) for length in range(len(location))}
    problems = [*unknown.items(), *invalid.items()]
    return [_one_line(message) for location, message in problems if location not in inside]


def _location(raw: Location, settings: Any, *, missing: bool) -> Location:
    """`raw` without what pydantic inserts between the keys, such as the names of union members."""
    location: list[int | str] = []
    for name in raw:
        inside = name in settings if isinstance(settings, dict) else isinstance(settings, list)
        if inside and (isinstance(settings, dict) or isinstance(name, int)):
            location.append(name)
            settings = settings[name]
    return (*location, raw[-1]) if missing else tuple(location)


def _dotted(location: Location) -> str:
    """A location as an override would name it, in one line, since a key can be any text."""
    shown = (f"[{key}]" if isinstance(key, int) else f".{truncate_text(_one_line(key), 80)}" for key in location)
    return "".join(shown).lstrip(".")


def _display_value(value: Any) -> str:
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, int) and value.bit_length() > 200:  # repr refuses integers of more than 4,300 digits
        return f"an integer of {value.bit_length()} bits"
    text = _one_line(repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def _suggest_value(expected: str | None, value: Any) -> str:
    near = difflib.get_close_matches(str(value), re.findall(r"'([^']*)'", expected or ""), n=1)
    return f" (did you mean '{near[0]}'?)" if near else ""


def _suggest_key(model: type[BaseModel], location: Location) -> str:
    section, key = location[:-1], str(location[-1])
    siblings = [name for parent in _models_at(model, section) for name in parent.model_fields]
    guesses = [_dotted((*section, near)) for near in difflib.get_close_matches(key, siblings, n=1)]
    names = {path: path.rpartition(".")[2] for path in setting_paths(model)}
    guesses += [path for path, name in names.items() if name == key][:2]
    if not guesses:
        last_paths = {name: path for path, name in names.items()}
        guesses = [last_paths[near] for near in difflib.get_close_matches(key, last_paths, n=1, cutoff=0.8)]
    if guesses:
        return f"did you mean {' or '.join(f'`{guess}`' for guess in dict.fromkeys(guesses))}?"
    known = ", ".join(siblings[:MAX_SHOWN_KEYS]) + (", …" if len(siblings) > MAX_SHOWN_KEYS else "")
    return f"known keys: {known}" if siblings else "this table has no keys"


def _models_at(model: type[BaseModel], location: Location) -> list[type[BaseModel]]:
    """The models that can occur at `location`, including those inside lists and tables."""
    models = [model]
    for name in location:
        fields = [parent.model_fields[name] for parent in models if name in parent.model_fields]
        if fields:  # otherwise a list index or a key of a free-form table: the models stay the same
            models = [inner for field in fields for inner in _models_in(field.annotation, containers=True)]
    return models


def _models_in(annotation: Any, *, containers: bool = False) -> Iterator[type[BaseModel]]:
    origin = get_origin(annotation)
    if origin is None:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
    elif containers or origin in (Union, UnionType, Annotated):
        for inner in get_args(annotation):
            yield from _models_in(inner, containers=containers)


def setting_paths(model: type[BaseModel], prefix: str = "", above: tuple[type[BaseModel], ...] = ()) -> Iterator[str]:
    """The dotted names of all settings and tables. A model inside itself is not entered again."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for inner in _models_in(field.annotation):
            if inner not in (*above, model):
                yield from setting_paths(inner, f"{prefix}{name}.", (*above, model))


def to_toml(model: BaseModel, *, changed_only: bool = False) -> str:
    """All settings as TOML, which `read_settings` and `build_config` turn back into an equal model. None is omitted.

    `changed_only` omits settings that have their default value.
    """
    if location := next(_unwritable_nones(model, ()), None):
        raise ConfigError(
            f"`{_dotted(location)}` is null, which TOML cannot represent: leave it out or give it a value"
        )
    import tomli_w  # only what writes configurations needs it

    return tomli_w.dumps(_to_toml_value(model.model_dump(exclude_defaults=changed_only)))


def _unwritable_nones(value: Any, location: Location) -> Iterator[Location]:
    """Locations of None values that would not survive a round trip, because omitting them restores another value."""
    fields = type(value).model_fields if isinstance(value, BaseModel) else {}
    none_by_default = {n for n, field in fields.items() if field.default is None and field.default_factory is None}
    items: Iterable[tuple[int | str, Any]] = ((name, getattr(value, name)) for name in fields)
    if isinstance(value, dict):
        items = ((str(key), item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        if item is not None:
            yield from _unwritable_nones(item, (*location, key))
        elif key not in none_by_default:
            yield (*location, key)


def _to_toml_value(value: Any) -> Any:
    """`value` in TOML types; pydantic's JSON form would turn an infinity in a free-form table into null."""
    if isinstance(value, dict):
        return {str(to_jsonable_python(k)): _to_toml_value(item) for k, item in value.items() if item is not None}
    if isinstance(value, list | tuple | set | frozenset):
        return [_to_toml_value(item) for item in value]
    return value if isinstance(value, float) else to_jsonable_python(value)
