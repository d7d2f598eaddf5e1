"""Generate docs/settings.md, the reference of every setting, from the configuration classes.

python scripts/settings_page.py
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from toolwise.config.schema import RunConfig
from toolwise.config.sft import SftConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
INTRODUCTION = """# Settings

Every setting of a run, by table of the configuration file. `toolwise train CONFIG --set actor.lr=1e-5` overrides one;
`--dry-run` shows those that differ from their defaults. Paths are relative to the configuration file. Those of
`toolwise sft` follow at the end.

This page is generated: edit the docstrings in the configuration's classes, then run `python scripts/settings_page.py`.
"""
NAMES = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path", dict: "table"}
BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


SFT = "`toolwise sft`: "


def page() -> str:
    parts = [*sections(RunConfig, ""), *sections(SftConfig, "", SFT)]
    return INTRODUCTION + "".join(f"\n{section}" for section in parts)


def sections(model: type[BaseModel], path: str, prefix: str = "") -> Iterator[str]:
    """One section per table: its own settings first, then the tables inside it. `prefix` begins their titles."""
    told = docstrings(model)
    rows = ["| setting | type | default | |", "|---|---|---|---|"]
    inner: list[tuple[type[BaseModel], str]] = []
    for name in told:
        field, own = model.model_fields[name], f"{path}.{name}".lstrip(".")
        found = table_of(field.annotation)
        if found is not None and get_origin(field.annotation) is dict:
            inner.append((found, f"{own}.NAME"))
            found = None
        if found is not None and not is_list(field.annotation):
            inner.append((found, own))
            continue
        if found is not None:
            inner.append((found, f"[{own}]"))
        cells = (f"`{name}`", type_text(field), default_text(field), told[name])
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    outside = f"{prefix}outside of any table" if prefix else "Outside of any table"
    title = f"{prefix}`[{path}]`" if path else outside
    about = f"{one_line(model.__doc__)}\n\n" if path and model.__doc__ else ""
    if len(rows) > 2:
        yield f"## {title}\n\n{about}" + "\n".join(rows) + "\n"
    for found, own in inner:
        yield from sections(found, own, prefix)


def docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The docstring below each field: first those of the class itself, then those that it inherits."""
    found: dict[str, str] = {}
    for kind in (kind for kind in model.__mro__ if kind not in (BaseModel, object)):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, [*body.body[1:], ast.Pass()], strict=True):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = ast.literal_eval(after.value) if isinstance(after, ast.Expr) else ""
                found.setdefault(field.target.id, one_line(text))
    return found


def table_of(annotation: Any) -> type[BaseModel] | None:
    """The model inside an annotation of a table or a list of tables."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := table_of(inner)) is not None), None)


def is_list(annotation: Any) -> bool:
    """Whether it is a list, or may be one."""
    if get_origin(annotation) in (Union, UnionType):
        return any(map(is_list, get_args(annotation)))
    return get_origin(annotation) is list


def type_text(field: FieldInfo) -> str:
    return bounded(plain_type(field.annotation), field.metadata)


def plain_type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return bounded(plain_type(arguments[0]), arguments[1:])
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(plain_type(inner) for inner in arguments if inner is not NoneType)
    if origin is list:
        return f"list of {plain_type(arguments[0])}"
    if origin is dict:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "tables"
    return NAMES.get(annotation, "any" if annotation is Any else str(annotation))


def bounded(text: str, metadata: Any) -> str:
    limits = [
        f"{sign} {value:g}"
        for item in metadata
        for name, sign in BOUNDS.items()
        if isinstance(value := getattr(item, name, None), int | float)
    ]
    return f"{text} {', '.join(limits)}".strip()


def default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined:
        return ""
    return f"`{json.dumps(to_jsonable_python(value), ensure_ascii=False)}`"


def one_line(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
