"""Global names that a definition refers to."""

from __future__ import annotations

import pytest

from toolwise.notebook.text import attribute_chains, global_names


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def f(a, b=C):\n    d = a\n    return d + e", ["C", "e"]),
        ("@deco(x)\ndef f(a: A) -> B:\n    def g():\n        return a + h\n    return g", ["A", "B", "deco", "h", "x"]),
        ("def f(a: 'A | list[B]'):\n    return [i for i in range(a)]", ["A", "B", "list", "range"]),
        ("class K(Base):\n    x = y\n    def m(self):\n        return K.x + z", ["Base", "K", "y", "z"]),
        ("def f():\n    global g\n    g = 1", ["g"]),
        ("async def f():\n    return await w(lambda q: q + r)", ["r", "w"]),
        ("name = [x for x in y]", ["y"]),
    ],
)
def test_names_from_outside(source: str, names: list[str]) -> None:
    assert global_names(source) == names


def test_a_literal_in_quotes_is_no_annotation() -> None:
    assert global_names("def f(a: Literal['not a name!', 'ok']): ...") == ["Literal"]
    assert global_names("def f(a: Annotated[int, 'metres each']): ...") == ["Annotated", "int"]


def test_chains_begin_at_the_name() -> None:
    assert attribute_chains("a.b.c(x.a.d)", "a") == ["a.b", "a.b.c"]
