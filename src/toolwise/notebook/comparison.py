"""Plain data as Python literals, and a check that collected source reproduces the objects in the notebook.

A cell's text shows how an object was created, not what it is now: a default may be bound to an older value, a decorator
may have had another argument, a class may have been patched since. So the text is executed once and the results are
compared.
"""

from __future__ import annotations

import dis
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any

from toolwise.errors import ToolwiseError

NamedContainers = Mapping[int, str]
"""`id` -> name of containers that are already bound: written as that name, so that they stay one object."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_IGNORED_OPCODES = ("PUSH_NULL", "EXTENDED_ARG", "NOP")
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_OPCODE_ALIASES = {"LOAD_METHOD": "LOAD_ATTR"}


def literal(value: Any, known: NamedContainers | None = None, depth: int = 0) -> str | None:
    """The value as a Python literal; None if it is not plain data."""
    if depth > 50:
        return None
    kind = type(value)
    if value is None or value is Ellipsis or kind in (bool, int, str, bytes):
        return repr(value)
    if kind is float:
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if known and id(value) in known:
        return known[id(value)]
    if kind not in (list, tuple, set, frozenset, dict):
        return None
    items = [literal(item, known, depth + 1) for item in value]
    values = [literal(item, known, depth + 1) for item in value.values()] if kind is dict else []
    if None in items or None in values:
        return None
    if kind is dict:
        return "{" + ", ".join(f"{key}: {item}" for key, item in zip(items, values, strict=True)) + "}"
    return _collection_literal(kind, [str(item) for item in items])


def containers(value: Any, path: str) -> Iterator[tuple[int, str]]:
    """The `id` of each list, dict and set in plain data, and the expression that reaches it."""
    if isinstance(value, list | dict | set):
        yield id(value), path
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from containers(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from containers(item, f"{path}[{literal(key)}]")


def _collection_literal(kind: type, items: list[str]) -> str:
    if kind is list:
        return f"[{', '.join(items)}]"
    if kind is tuple:
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    return f"{kind.__name__}([{', '.join(sorted(items))}])"  # the same order in every process


def check_equivalent(text: str, defined: Mapping[str, Any], module: str) -> None:
    """Execute `text` in a separate namespace and compare what it defines; a `ToolwiseError` says what differs."""
    space: dict[str, Any] = {"__name__": module}
    try:
        exec(compile(text, "<collected>", "exec", dont_inherit=True), space)
    except Exception as fault:
        reason = f"{type(fault).__name__}: {fault}".partition("\n")[0]
        raise ToolwiseError(
            f"the cells that define {', '.join(defined)} fail when they run again ({reason}); put the code in a file"
        ) from fault
    for name, value in defined.items():
        where = _difference(value, space[name], name, set())
        if where is not None:
            is_lambda = getattr(value, "__name__", "") == "<lambda>"
            fix = "write it as a def" if is_lambda else "run that cell again, or put it in a file"
            raise ToolwiseError(
                f"{where} is not what its cell would give now, so a worker process would not run what you see here; "
                f"{fix}"
            )


def _difference(here: Any, there: Any, where: str, seen: set[tuple[int, int]]) -> str | None:
    """Describe where the two differ; None if they are equivalent. `seen` are the ids of the pairs compared so far."""
    if here is there or (id(here), id(there)) in seen:
        return None
    seen.add((id(here), id(there)))
    if isinstance(here, staticmethod | classmethod):
        here, there = here.__func__, getattr(there, "__func__", None)
    if isinstance(here, property):
        here, there = ([getattr(each, name, None) for name in ("fget", "fset", "fdel")] for each in (here, there))
    if isinstance(here, FunctionType) and isinstance(there, FunctionType):
        if not _same_code(here.__code__, there.__code__):
            return where
        parts: Callable[[Any], dict[str, Any]] = _function_parts
    elif isinstance(here, type) and isinstance(there, type):
        parts = _class_parts
    elif type(here).__qualname__ != type(there).__qualname__:
        return where
    elif isinstance(here, dict | list | tuple) and literal(here) is None:
        parts = _items
    elif hasattr(here, "__wrapped__"):
        parts = _wrapper_parts
    else:
        return None if _text(here) == _text(there) else where
    ours, theirs = parts(here), parts(there)
    for key, value in ours.items():
        label = f"{where}{key}"
        difference = _difference(value, theirs[key], label, seen) if key in theirs else label
        if difference is not None:
            return difference
    return next((f"{where}{key}" for key in theirs if key not in ours), None)


def _function_parts(function: FunctionType) -> dict[str, Any]:
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    values = {**dict(zip(names, defaults, strict=True)), **(function.__kwdefaults__ or {})}
    closure = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    return {
        **{f"'s default of {name}": value for name, value in values.items()},
        **{f" (with {name} of its decorator)": _content(cell) for name, cell in closure.items()},
        **{f".{name}": value for name, value in vars(function).items() if literal(value) is not None},
        **({"'s inner function": vars(function)["__wrapped__"]} if "__wrapped__" in vars(function) else {}),
    }


def _class_parts(cls: type) -> dict[str, Any]:
    return {
        **{
            f".{name}": value
            for name, value in vars(cls).items()
            if isinstance(value, FunctionType) or not (name.startswith("__") or name == "_abc_impl")
        },
        "'s base classes": tuple(base.__qualname__ for base in cls.__bases__),
    }


def _wrapper_parts(wrapper: Any) -> dict[str, Any]:
    """An object that wraps a function, such as a tool; private attributes may be state and are not compared."""
    plain = {
        f".{name}": value
        for name, value in getattr(wrapper, "__dict__", {}).items()
        if not name.startswith("_") and literal(value) is not None
    }
    return {**plain, "'s inner function": wrapper.__wrapped__}


def _items(container: Any) -> dict[str, Any]:
    pairs = container.items() if isinstance(container, dict) else enumerate(container)
    return {f"[{_text(key)}]": item for key, item in pairs}


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _text(value: Any) -> str:
    """Text that tells two values of one type apart: a literal, or the `repr` without addresses."""
    text = literal(value)
    try:
        return text if text is not None else _ADDRESS.sub("", repr(value))
    except Exception:  # a __repr__ in user code
        return ""


def _same_code(first: CodeType, second: CodeType) -> bool:
    """Whether two code objects do the same; some opcodes of a call depend on the rest of the file and are ignored."""
    same = _code_signature(first) == _code_signature(second) and _doc(first) == _doc(second)
    inner = [[const for const in code.co_consts if isinstance(const, CodeType)] for code in (first, second)]
    return same and len(inner[0]) == len(inner[1]) and all(map(_same_code, *inner))


def _code_signature(code: CodeType) -> tuple[Any, ...]:
    steps = [
        (
            _OPCODE_ALIASES.get(step.opname, step.opname),
            None if step.opcode in _JUMPS or isinstance(step.argval, CodeType) else _text(step.argval),
        )
        for step in dis.get_instructions(code)
        if step.opname not in _IGNORED_OPCODES
    ]
    names = code.co_varnames, code.co_freevars, code.co_cellvars
    return steps, names, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount


def _doc(code: CodeType) -> str:
    """The docstring without its indentation, which differs for a function under an `if`."""
    first = code.co_consts[0] if code.co_consts else None
    return inspect.cleandoc(first) if isinstance(first, str) else ""
