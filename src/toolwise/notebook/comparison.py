"""Checks that collected source reproduces the objects in the notebook.

A cell's text shows how an object was created, not what it is now: a default may be bound to an older value, a decorator
may have had another argument, a class may have been patched since. So the text is executed once and the results are
compared.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Mapping
from types import CellType, CodeType, FunctionType
from typing import Any

from toolwise.errors import ToolwiseError
from toolwise.notebook.literals import literal

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_IGNORED_OPCODES = ("PUSH_NULL", "EXTENDED_ARG", "NOP")
_OPCODE_ALIASES = {"LOAD_METHOD": "LOAD_ATTR"}


def check_equivalent(text: str, defined: Mapping[str, Any], module: str) -> None:
    """Execute `text` in a separate namespace and compare what it defines; a `ToolwiseError` says what differs."""
    space: dict[str, Any] = {"__name__": module}
    try:
        exec(compile(text, "<collected>", "exec", dont_inherit=True), space)
    except Exception as fault:
        reason = f"{type(fault).__name__}: {fault}".partition("\n")[0]
        names = ", ".join(defined)
        raise ToolwiseError(
            f"the cells that define {names} fail when they run again ({reason}); put the code in a file"
        ) from fault
    for name, value in defined.items():
        where = _Comparison().difference(value, space[name], name)
        if where is not None:
            is_lambda = getattr(value, "__name__", "") == "<lambda>"
            fix = "write it as a def" if is_lambda else "run that cell again, or put it in a file"
            raise ToolwiseError(
                f"{where} is not what its cell would give now, so a worker process would not run what you see here; "
                f"{fix}"
            )


class _Comparison:
    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] = set()

    def difference(self, here: Any, there: Any, where: str) -> str | None:
        """Describe where the two differ; None if they are equivalent."""
        if here is there or (id(here), id(there)) in self._seen:
            return None
        self._seen.add((id(here), id(there)))
        if isinstance(here, staticmethod | classmethod):
            here, there = here.__func__, getattr(there, "__func__", None)
        if isinstance(here, property):
            here, there = ([getattr(each, name, None) for name in ("fget", "fset", "fdel")] for each in (here, there))
        if isinstance(here, FunctionType) and isinstance(there, FunctionType):
            if not _same_code(here.__code__, there.__code__):
                return where
            return self._parts(_function_parts(here), _function_parts(there), where)
        if isinstance(here, type) and isinstance(there, type):
            return self._parts(_class_parts(here), _class_parts(there), where)
        if type(here).__qualname__ != type(there).__qualname__:
            return where
        if isinstance(here, dict | list | tuple) and literal(here) is None:
            return self._parts(_items(here), _items(there), where)
        if hasattr(here, "__wrapped__"):
            return self._parts(_wrapper_parts(here), _wrapper_parts(there), where)
        return None if _text(here) == _text(there) else where

    def _parts(self, here: Mapping[str, Any], there: Mapping[str, Any], where: str) -> str | None:
        for key, value in here.items():
            label = f"{where}{key}"
            if key not in there:
                return label
            difference = self.difference(value, there[key], label)
            if difference is not None:
                return difference
        return next((f"{where}{key}" for key in there if key not in here), None)


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
    members = {
        f".{name}": value
        for name, value in vars(cls).items()
        if isinstance(value, FunctionType) or not (name.startswith("__") or name == "_abc_impl")
    }
    return {**members, "'s base classes": tuple(base.__qualname__ for base in cls.__bases__)}


def _wrapper_parts(wrapper: Any) -> dict[str, Any]:
    """An object that wraps a function, such as a tool; private attributes may be state and are not compared."""
    public = {f".{name}": value for name, value in getattr(wrapper, "__dict__", {}).items() if not name.startswith("_")}
    plain = {name: value for name, value in public.items() if literal(value) is not None}
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
        (_OPCODE_ALIASES.get(step.opname, step.opname), _argument(step))
        for step in dis.get_instructions(code)
        if step.opname not in _IGNORED_OPCODES
    ]
    names = code.co_varnames, code.co_freevars, code.co_cellvars
    return steps, names, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount


def _argument(step: dis.Instruction) -> str | None:
    jumps = step.opcode in dis.hasjrel or step.opcode in dis.hasjabs
    return None if jumps or isinstance(step.argval, CodeType) else _text(step.argval)


def _doc(code: CodeType) -> str:
    """The docstring without its indentation, which differs for a function under an `if`."""
    first = code.co_consts[0] if code.co_consts else None
    return inspect.cleandoc(first) if isinstance(first, str) else ""
