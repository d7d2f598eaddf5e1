"""Collected source reproduces the notebook's current function, or an error is raised."""

from __future__ import annotations

import linecache
from typing import Any

import pytest

from toolwise.errors import ToolwiseError
from toolwise.notebook import collect_source

WRAP = """
import functools
def times(w):
    def wrap(f):
        @functools.wraps(f)
        def inner(m, gt):
            return w * f(m, gt)
        return inner
    return wrap
"""


def run_cells(*cells: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "__main__", "_ih": ["", *cells]}
    for number, text in enumerate(cells):
        name = f"/tmp/ipykernel_0/{id(space)}-{number}-{hash(text)}.py"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec", dont_inherit=True), space)
    return space


@pytest.mark.parametrize(
    ("cells", "where"),
    [
        (["K = 1.0\ndef score(m, gt, k=K):\n    return k\n", "K = 2.0\n"], "score's default of k"),
        (["K = 1.0\ndef score(m, gt, *, k=K):\n    return k\n", "K = 2.0\n"], "score's default of k"),
        ([WRAP, "W = 1.0\n@times(W)\ndef score(m, gt):\n    return 1.0\n", "W = 5.0\n"], r"score \(with w of its"),
        (
            [WRAP, "def score(m, gt):\n    return 1.0\nscore = times(2)(score)\nscore = times(2)(score)\n"],
            r"score \(with f of its decorator\)",
        ),
        (["f = lambda s: 1.0\ndef score(m, gt):\n    return f(0)\n", "f, g = (lambda s: 2.0), 3\n"], "f"),
        (["f = lambda s: s + 1\ndef score(m, gt):\n    return f(0)\n", "if True:\n    f = lambda s: s - 1\n"], "f"),
        (["f = lambda s: 1\ndef score(m, gt):\n    return f(0)\n", "f: object = lambda s: True\n"], "f"),
        (["class C:\n    k = 1.0\n    def f(self):\n        return self.k\n", "C.k = 7.0\n"], r"C\.k"),
        (["class C:\n    def f(self):\n        return 1\n", "C.g = lambda self: 2\n"], r"C\.g"),
        (["class C:\n    def f(self):\n        return 1\n", "def f(self):\n    return 2\nC.f = f\n"], r"C\.f"),
        (
            [
                "class C:\n    x = 1\n    @property\n    def f(self):\n        return 1\n",
                "C.f = property(lambda s: 2)\n",
            ],
            r"C\.f\[0\]",
        ),
        (
            [
                "from toolwise import tool\nP = 1.0\n@tool(price=P)\ndef score(a: str) -> str:\n"
                "    '''S.\n\n    Args:\n        a: b\n    '''\n    return a\n",
                "P = 2.0\n",
            ],
            r"score\.config",
        ),
    ],
)
def test_what_differs_is_refused_in_one_line(cells: list[str], where: str) -> None:
    space = run_cells(*cells, "def score(m, gt):\n    return C().f()\n" if "score" not in "".join(cells) else "")
    with pytest.raises(ToolwiseError, match=rf"^{where}.* is not what its cell would give now") as caught:
        collect_source(space["score"])
    assert "\n" not in str(caught.value)


def test_text_that_does_not_run_again_is_refused() -> None:
    space = run_cells("N = 2\n@[lambda f: f][N - 2]\ndef score(m, gt):\n    return N\n", "N = 9\n")
    with pytest.raises(ToolwiseError, match=r"the cells that define score fail when they run again \(IndexError"):
        collect_source(space["score"])


@pytest.mark.parametrize(
    "cells",
    [
        ["import math\ndef score(m, gt):\n    return math.floor(2.5)\n"],  # one cell: another opcode for the call
        ["import math\n", "def score(m, gt):\n    return [math.floor(x) for x in (1.5,) if x] or None\n"],
        [WRAP, "@times(2)\ndef score(m, gt, *rest):\n    return 1.0\n"],
        [WRAP, "def score(m, gt):\n    return 1.0\nscore = times(2)(score)\n"],
        [WRAP, "@times(2)\ndef f(m, gt):\n    return 1.0\ng = times(3)(f)\ndef score(m, gt):\n    return g(m, gt)\n"],
        ["if True:\n    def score(m, gt):\n        '''Two.\n\n        Lines.\n        '''\n        return 1.0\n"],
        ["import threading\ndef score(m, gt, lock=threading.Lock()):\n    with lock:\n        return 1.0\n"],
        [
            "import enum, dataclasses, abc\nclass E(enum.Enum):\n    A = 1\n"
            "@dataclasses.dataclass\nclass P:\n    x: float = 1.0\n"
            "    y: list = dataclasses.field(default_factory=list)\n"
            "class B(abc.ABC):\n    @abc.abstractmethod\n    def f(self): ...\n"
            "class C(B):\n    T = [1]\n    def f(self):\n        return super().__class__ and self.T[0] + self.s()\n"
            "    @staticmethod\n    def s():\n        return 1\n"
            "def score(m, gt):\n    return P().x + E.A.value + C().f()\n"
        ],
    ],
)
def test_what_is_the_same_is_taken(cells: list[str]) -> None:
    space, again = run_cells(*cells), {"__name__": "again"}
    exec(compile(collect_source(space["score"]), "<again>", "exec", dont_inherit=True), again)
    assert again["score"]([], None) == space["score"]([], None)  # type: ignore[operator]


def test_running_the_cell_again_is_a_cure() -> None:
    space = run_cells("K = 1.0\n", "def score(m, gt, k=K):\n    return k\n", "K = 2.0\n")
    with pytest.raises(ToolwiseError, match="run that cell again"):
        collect_source(space["score"])
    space = run_cells("K = 1.0\n", "K = 2.0\n", "def score(m, gt, k=K):\n    return k\n")
    assert "K = 2.0" in collect_source(space["score"])


@pytest.mark.parametrize(
    "cell",
    [
        "A = [1.0]\nB = A\ndef score(m, gt):\n    A.append(2.0)\n    return len(B)\n",
        "A = {'k': [1.0]}\nB = A['k']\ndef score(m, gt):\n    A['k'].append(2.0)\n    return len(B)\n",
        "B = [1.0]\nA = ([B], 2)\ndef score(m, gt):\n    A[0][0].append(2.0)\n    return len(B)\n",
        "B = [1.0]\nA = {'x': B}\ndef score(m, gt):\n    B.append(2.0)\n    return len(A['x'])\n",
    ],
)
def test_one_container_under_two_names_stays_one(cell: str) -> None:
    space, again = run_cells(cell), {"__name__": "again"}
    exec(compile(collect_source(space["score"]), "<again>", "exec"), again)
    assert again["score"]([], None) == space["score"]([], None) == 2  # type: ignore[operator]


@pytest.mark.parametrize(
    ("cell", "named"),
    [
        ("API_KEY = 'abc'\ndef score(m, gt):\n    return API_KEY\n", "API_KEY"),
        ("KEY = 'sk-live-SECRET'\ndef score(m, gt):\n    return KEY[:2]\n", "KEY"),
        ("DB = {'password': 'hunter2'}\ndef score(m, gt):\n    return DB\n", "password"),
        ("def score(m, gt, token='a8Fh2kPq09sLmN4x'):\n    return token\n", "token"),
        ("def score(m, gt):\n    return dict(api_key='abc')\n", "api_key"),
        ("def score(m, gt):\n    return 'hf_abcdefghij1234'\n", "'hf_a'…"),
    ],
)
def test_secrets_are_not_copied_into_a_file(cell: str, named: str) -> None:
    space = run_cells(cell)
    with pytest.raises(ToolwiseError, match=r"which looks like a secret .* read it from os\.environ inside score") as e:
        collect_source(space["score"])
    assert f"score holds {named}," in str(e.value)


def test_keys_and_tokens_that_are_no_secrets_are_copied() -> None:
    space = run_cells(
        "KEY = 'ground_truth'\nSTOP_TOKEN = '</s>'\nAPI_KEY = ''\nTOKENS = 16\n"
        "def score(m, gt):\n    return KEY, STOP_TOKEN, API_KEY, TOKENS\n"
    )
    assert "STOP_TOKEN" in collect_source(space["score"])
