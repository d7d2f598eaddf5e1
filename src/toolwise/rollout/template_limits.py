"""Limits on chat templates. They come with a model and are programs: jinja's sandbox keeps them away from the process,
but does not bound time and memory.

`bound_template` parses a template and inserts a check at each loop, call, filter and operator: CPU time and the
characters produced are charged to a `Budget`, and an operation that could produce too much at once is refused before it
runs. The resulting tree is rendered in jinja's sandbox, like any other template.
"""

from __future__ import annotations

import re
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jinja2 import Environment, nodes
from jinja2.exceptions import TemplateAssertionError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

from toolwise.errors import TemplateLimitError

MAX_TEMPLATE_CHARS = 200_000
"""Published templates have up to thirty thousand."""
MAX_CPU_S = 10.0
MAX_RENDER_CHARS = 1 << 28
"""Characters that all steps of a rendering may produce, plus 256 per character of the conversation."""
MAX_STEP_CHARS = 1 << 28
"""Characters that one step may produce."""
MAX_ITEMS = 1 << 18
"""Items in a nested value."""
ITEM_CHARS = 16
"""Characters charged per list item."""
MAX_BITS = 100_000
EXPANDING_OPERATIONS = frozenset(
    (
        *("batch", "center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "map", "replace"),
        *("rjust", "slice", "sum", "translate", "urlize", "wordwrap", "xmlattr", "zfill"),
    )
)
"""Filters and methods whose result can be as large as the product of their arguments."""
_WIDTH = re.compile(r"\d{5,}")
_current = threading.local()


class Budget:
    """What one rendering may use."""

    def __init__(self, chars: int) -> None:
        self.chars = MAX_RENDER_CHARS + 256 * chars
        self.steps = 0
        self._ends = time.thread_time() + MAX_CPU_S

    def step(self, chars: int = 0) -> None:
        self.chars -= chars
        self.steps += 1
        if self.chars < 0:
            raise TemplateLimitError("it produces more text than any conversation needs: does it repeat itself?")
        if self.steps % 16 == 0 and time.thread_time() > self._ends:
            raise TemplateLimitError(f"it still runs after {MAX_CPU_S:g} s of CPU time: does it loop forever?")


@contextmanager
def budget(chars: int) -> Iterator[None]:
    """Bounded templates rendered inside, by this thread, share one budget."""
    previous = getattr(_current, "budget", None)
    _current.budget = Budget(chars)
    try:
        yield
    finally:
        _current.budget = previous


def bound_template(source: str) -> nodes.Template:
    """The template as a syntax tree with checks inserted."""
    if len(source) > MAX_TEMPLATE_CHARS:
        raise TemplateLimitError(f"it has {len(source)} characters, more than {MAX_TEMPLATE_CHARS}")
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    tree: nodes.Template = _CheckInserter().visit(environment.parse(source))
    return tree.set_environment(environment)  # type: ignore[return-value]


class _GenerationTag(Extension):
    """{% generation %} marks what the assistant wrote, for loss masks, which are not used here: keeps its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CheckInserter(NodeTransformer):
    def get_visitor(self, node: nodes.Node) -> Any:
        return getattr(self, f"check_{type(node).__name__.lower()}", None)

    def check_for(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        written = sum(len(data.data) for part in node.body for data in part.find_all(nodes.TemplateData))
        step = nodes.ExprStmt(_call("step", nodes.Const(written)))
        step.set_lineno(node.lineno)
        node.body = [step, *node.body]
        return node

    check_macro = check_for

    def check_callblock(self, node: nodes.CallBlock) -> nodes.Node:
        call = node.call
        self.check_for(node)
        node.call = call  # must stay a plain call: jinja passes the block to it
        return node

    def check_output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        if all(isinstance(part, nodes.TemplateData | nodes.Const) for part in node.nodes):
            return node
        (only, *others) = node.nodes
        if not others and isinstance(only, nodes.Call) and isinstance(only.node, nodes.ImportedName):
            only.node = _imported_name("written_" + only.node.importname.rpartition(".")[2])  # counted already
        else:
            parts = [nodes.Const(part.data) if isinstance(part, nodes.TemplateData) else part for part in node.nodes]
            node.nodes = [_call("concat", *parts)]
        return node

    def check_mul(self, node: nodes.BinExpr) -> nodes.Node:
        self.generic_visit(node)
        return _call(type(node).__name__.lower(), node.left, node.right)

    check_pow = check_mul

    def check_mod(self, node: nodes.Mod) -> nodes.Node:
        counts = isinstance(node.left, nodes.Getattr) and isinstance(node.left.node, nodes.Name)
        return node if counts and node.left.node.name == "loop" else self.check_mul(node)  # type: ignore[attr-defined]

    def check_add(self, node: nodes.Add) -> nodes.Node:
        parts = [node.right]
        left = node.left
        while isinstance(left, nodes.Add):  # a + b + c in one step
            parts.append(left.right)
            left = left.left
        parts.append(left)
        return _call("add", *(self.visit(part) for part in reversed(parts)))

    def check_concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concat", *node.nodes)

    def check_list(self, node: nodes.List | nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if all(isinstance(n, nodes.Const) for n in node.items) else _call("emit", node)

    def check_tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self.check_list(node) if node.ctx == "load" else node

    def check_dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _call("emit", node)

    def check_getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _call("charged", node) if isinstance(node.arg, nodes.Slice) else node

    def check_call(self, node: nodes.Call) -> nodes.Node:
        self.generic_visit(node)
        node.args = [nodes.ContextReference(), node.node, *node.args]
        node.node = _imported_name("called")
        return node

    def check_filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        if node.node is None:  # applied to a block
            if node.name in EXPANDING_OPERATIONS:
                raise TemplateLimitError(f"it applies the filter {node.name} to a block, which is not allowed here")
            return node
        arguments = [nodes.ContextReference(), nodes.Const(node.name), node.node, *node.args]
        return nodes.Call(_imported_name("filtered"), arguments, node.kwargs, node.dyn_args, node.dyn_kwargs)


def _imported_name(name: str) -> nodes.ImportedName:
    return nodes.ImportedName(f"{__name__}.{name}")


def _call(name: str, *arguments: nodes.Expr) -> nodes.Call:
    return nodes.Call(_imported_name(name), list(arguments), [], None, None)


# Rendered templates call the following functions by name.


def step(chars: int = 0) -> None:
    current: Budget | None = getattr(_current, "budget", None)
    if current is not None:
        current.step(chars)


def charged(value: Any) -> Any:
    """Charge for a value that only holds existing objects."""
    step(_shallow_size(value))
    return value


def emit(value: Any) -> Any:
    """Charge for a value that is written out, or that may hold an object more than once."""
    step(size_of(value))
    return value


def concat(*values: Any) -> str:
    step(sum(map(size_of, values)))
    return "".join(map(str, values))


def add(first: Any, *others: Any) -> Any:
    for other in others:
        first = first + other
        step(_shallow_size(first))
    return first


def mul(left: Any, right: Any) -> Any:
    for value, times in ((left, right), (right, left)):
        if isinstance(times, int):
            if isinstance(value, int):
                _check_bits(value.bit_length() + times.bit_length())
            elif isinstance(value, str | list | tuple):
                _check_growth(max(size_of(value), _shallow_size(value)), times)
    return charged(left * right)


def pow(left: Any, right: Any) -> Any:  # jinja's name for it
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))
    return left**right


def mod(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        _check_format(left, right if isinstance(right, tuple) else (right,))
    return charged(left % right)


def called(context: Context, function: Any, /, *arguments: Any, **named: Any) -> Any:
    """Call through the sandbox, which decides whether the function is safe; string methods are checked here first."""
    kind = type(function)
    inner = getattr(function, "__wrapped__", function) if kind is types.FunctionType else function
    if type(inner) is types.BuiltinMethodType and isinstance(inner.__self__, str):
        _check_arguments(inner.__name__, [inner.__self__, *arguments, *named.values()])
    elif kind is types.FunctionType and function.__name__ == "generate_lorem_ipsum":
        raise TemplateLimitError("it calls lipsum, which is not allowed in chat templates")
    value = context.environment.call(context, function, *arguments, **named)  # type: ignore[attr-defined]
    step(_shallow_size(value))
    return value


def filtered(context: Context, name: str, /, *arguments: Any, **named: Any) -> Any:
    function = context.environment.filters.get(name)
    if function is None:
        raise TemplateAssertionError(f"No filter named {name!r}.", 0)
    if name != "map" or len(arguments) > 1:  # map over an attribute creates nothing new
        _check_arguments(name, [*arguments, *named.values()])
    value = context.call(function, *arguments, **named)
    step(_shallow_size(value))
    return value


def _written(function: Callable[..., Any]) -> Callable[..., Any]:
    def written(*arguments: Any, **named: Any) -> Any:
        value = function(*arguments, **named)
        if not isinstance(value, str):
            step(size_of(value))
        return value

    return written


written_add = _written(add)
written_mul = _written(mul)
written_pow = _written(pow)
written_mod = _written(mod)
written_concat = _written(concat)
written_called = _written(called)
written_filtered = _written(filtered)
written_charged = _written(charged)
written_emit = emit


def _check_arguments(name: str, arguments: list[Any]) -> None:
    if name in ("format", "format_map"):
        _check_format(arguments[0], arguments[1:])
    elif name in EXPANDING_OPERATIONS:
        _check_growth(_growth(name, arguments), 1)
    elif name in ("string", "tojson", "pprint"):
        step(sum(map(size_of, arguments)))


def _growth(name: str, arguments: list[Any]) -> int:
    """An upper bound on the size of the result of a filter or method."""
    if name == "replace" and all(isinstance(value, str) for value in arguments[:3]) and len(arguments) > 2:
        text, old, new = map(str, arguments[:3])
        return len(text) + text.count(old) * len(new)
    if name == "join":
        glue = sum(len(value) for value in arguments if isinstance(value, str))
        lists = [value for value in arguments if isinstance(value, list | tuple | dict)]
        return sum(size_of(value) + len(value) * glue for value in lists)
    product = 1
    for value in arguments:
        product *= max(1, abs(value) if isinstance(value, int) else size_of(value))
    return product


def size_of(value: Any) -> int:
    """Approximate number of characters the value is written with; raises on values larger than a rendering may be."""
    if isinstance(value, str):
        return len(value)
    size, seen, pending = 0, 0, [value]
    while pending:
        item = pending.pop()
        size += len(item) if isinstance(item, str) else 1
        if isinstance(item, dict):
            pending += item.keys()
            pending += item.values()
        elif isinstance(item, list | tuple):
            pending += item
        seen += 1
        if len(pending) + seen > MAX_ITEMS:
            raise TemplateLimitError("it builds a value larger than any conversation")
    return size


def _shallow_size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    return ITEM_CHARS * len(value) if isinstance(value, list | tuple | dict) else 0


def _check_growth(size: int, times: int) -> None:
    if size * times > MAX_STEP_CHARS:
        raise TemplateLimitError("it produces more text in one step than any conversation needs")


def _check_format(text: str, values: Any) -> None:
    if _WIDTH.search(text) or any(isinstance(value, int) and abs(value) > 1e15 for value in values):
        raise TemplateLimitError("it formats text to a width of more than 9999")
    step(len(text) + sum(map(size_of, values)) * (1 + text.count("%") + text.count("{")))


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateLimitError("it computes with numbers of more than 30,000 digits")
