"""Source collected for notebook functions loads in another process, or the error says what is missing."""

from __future__ import annotations

import asyncio
import linecache
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from toolwise.config.imports import load_module
from toolwise.errors import ToolwiseError
from toolwise.notebook import collect_source, lacks_file

RunCell = Callable[[str], dict[str, Any]]


@pytest.fixture
def run_cell() -> Iterator[RunCell]:
    """`run_cell(text)` runs it like an IPython cell: the file does not exist, its lines are in `linecache`."""
    space: dict[str, Any] = {"__name__": "__main__"}
    names: list[str] = []

    def run(text: str) -> dict[str, Any]:
        name = f"/tmp/ipykernel_0/{id(space)}-{len(names)}.py"
        names.append(name)
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec"), space)
        return space

    yield run
    for name in names:
        linecache.cache.pop(name, None)


@pytest.fixture
def reload(tmp_path: Path) -> Callable[[Any], ModuleType]:
    """Load the collected source as a module."""

    def load(target: Any) -> ModuleType:
        path = tmp_path / f"collected_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(collect_source(target), encoding="utf-8")
        return load_module(str(path), what="test")

    return load


def test_helpers_imports_and_constants_of_other_cells_come_along(run_cell: RunCell, reload: Any) -> None:
    run_cell("import math as m\nfrom os.path import join as joined\nLIMITS = {'low': 0.5, 'high': float('inf')}\n")
    run_cell("def half(x):\n    return m.floor(x) / 2\n")
    space = run_cell("def score(x):\n    return joined('a', str(min(half(x), LIMITS['high'])))\n")
    assert lacks_file(space["score"])
    assert reload(space["score"]).score(7) == space["score"](7) == "a/3.5"


def test_only_what_is_used_comes_along(run_cell: RunCell) -> None:
    space = run_cell("import json\nbig = open('/dev/null')\nbig.close()\ndef f(big):\n    return big + 1\n")
    assert "json" not in collect_source(space["f"])
    assert "open" not in collect_source(space["f"])


def test_functions_that_call_each_other(run_cell: RunCell, reload: Any) -> None:
    space = run_cell("def even(n):\n    return n == 0 or odd(n - 1)\ndef odd(n):\n    return n != 0 and even(n - 1)\n")
    assert reload(space["even"]).even(10) is True


def test_a_function_that_was_changed_is_taken_as_it_is_now(run_cell: RunCell, reload: Any) -> None:
    run_cell("def step():\n    return 1\ndef f():\n    return step()\n")
    space = run_cell("def step():\n    return 2\n")
    assert reload(space["f"]).f() == 2


@pytest.mark.parametrize(
    "value",
    [None, True, 3, -1.5, math.inf, "ä\n", b"\x00", [1, [2]], (1,), {"a": (1, 2)}, {3, 1, 2}, frozenset(), set()],
    ids=repr,
)
def test_plain_data_comes_along_by_value(run_cell: RunCell, reload: Any, value: Any) -> None:
    space = run_cell("def f():\n    return VALUE\n")
    space["VALUE"] = value
    assert reload(space["f"]).f() == value


def test_the_same_source_in_every_process(run_cell: RunCell) -> None:
    space = run_cell("def f():\n    return WORDS\n")
    space["WORDS"] = {"one", "two", "three"}
    assert "set(['one', 'three', 'two'])" in collect_source(space["f"])


def test_patterns_paths_loggers_types_and_small_lambdas_come_along(run_cell: RunCell, reload: Any) -> None:
    run_cell(
        "import re, logging\nfrom pathlib import Path\nfrom typing import Any, Optional, TypeVar\n"
        "WORD = re.compile(r'\\w+', re.I)\nHOME = Path('/tmp/x')\nlog = logging.getLogger('mine')\n"
        "T = TypeVar('T')\nWords = list[str]\nclean = lambda text: text.strip()\n"
    )
    space = run_cell(
        "def f(text: 'Optional[Words]' = None, more: T = None) -> dict[str, Any]:\n"
        "    log.debug('f')\n    return {'words': WORD.findall(clean(text)), 'home': HOME}\n"
    )
    again = reload(space["f"])
    assert again.f(" Two words ") == {"words": ["Two", "words"], "home": Path("/tmp/x")}
    assert (again.WORD.pattern, again.WORD.flags) == (r"\w+", re.compile("", re.I).flags)


def test_classes_of_cells_come_along(run_cell: RunCell, reload: Any) -> None:
    run_cell("from dataclasses import dataclass\nfrom enum import Enum\n")
    run_cell("class Kind(Enum):\n    A = 'a'\n@dataclass\nclass Fact:\n    kind: Kind = Kind.A\n")
    run_cell("class Counter:\n    start = 1\n    def next(self):\n        return Fact().kind, self.start + 1\n")
    space = run_cell("def f():\n    return Counter().next()\n")
    again = reload(space["f"])
    assert again.f() == (again.Kind.A, 2)
    assert lacks_file(space["Counter"])
    assert lacks_file(space["Kind"])
    assert reload(space["Counter"]).Counter().next()[1] == 2


def test_decorators_and_async_functions(run_cell: RunCell, reload: Any) -> None:
    run_cell("import functools, asyncio, toolwise\nfrom toolwise import reward_function, tool\n")
    space = run_cell(
        "@functools.lru_cache(maxsize=2)\ndef twice(n):\n    return 2 * n\n"
        "@reward_function(mode='batch')\nasync def score(rollouts, truths):\n"
        "    await asyncio.sleep(0)\n    return [twice(t) for t in truths]\n"
        "@tool(price=0.5)\ndef price(item: str) -> str:\n"
        "    '''A price.\n\n    Args:\n        item: Of what.\n    '''\n    return item\n"
        "cached = functools.lru_cache(twice)\ndef g(n):\n    return cached(n)\n"
    )
    again = reload(space["score"])
    assert asyncio.run(again.score([], [1, 2])) == [2, 4]
    assert again.score.__toolwise_reward_mode__ == "batch"
    assert reload(space["price"]).price.price == 0.5
    assert reload(space["g"]).g(4) == 8


def test_a_mark_that_was_set_by_a_call_is_kept(run_cell: RunCell, reload: Any) -> None:
    run_cell("from toolwise import reward_function\ndef score(a, b):\n    return [1.0]\n")
    space = run_cell("score = reward_function(mode='batch')(score)\n")
    assert reload(space["score"]).score.__toolwise_reward_mode__ == "batch"


def test_annotations_that_are_not_evaluated_stay_so(run_cell: RunCell, reload: Any) -> None:
    space = run_cell("from __future__ import annotations\ndef f(x: Unknown) -> None:\n    pass\n")
    assert reload(space["f"]).f(1) is None


def test_a_submodule_is_imported_by_its_whole_name(run_cell: RunCell) -> None:
    space = run_cell("import xml.dom.minidom\ndef f():\n    return xml.dom.minidom.parseString('<a/>')\n")
    assert "import xml.dom.minidom\n" in collect_source(space["f"])


def test_functions_of_one_s_own_modules_come_along(
    run_cell: RunCell, reload: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_helpers.py").write_text("import json\ndef tidy(x):\n    return json.dumps(x)\n")
    monkeypatch.syspath_prepend(tmp_path)
    run_cell("import my_helpers\nfrom my_helpers import tidy\ndef f():\n    return tidy([1])\n")
    space = run_cell("def g():\n    return my_helpers.tidy([1])\n")
    assert reload(space["f"]).f() == "[1]"
    with pytest.raises(ToolwiseError, match=r"my_helpers is a module of your own.*`from my_helpers import …`"):
        collect_source(space["g"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("file = open('/dev/null')\nfile.close()\ndef f():\n    return file\n", r"f uses file, a _io\.TextIOWrapper"),
        ("import random\nrng = random.Random(0)\ndef f():\n    return rng\n", r"f uses rng, a random\.Random"),
        ("import numpy as np\nW = np.ones(3)\ndef f():\n    return W\n", r"f uses W, a numpy\.ndarray"),
        ("W = list(range(400_000))\ndef f():\n    return W\n", "f uses W, a list of .* too big to copy; read it"),
        ("def g():\n    return W\nW = object()\ndef f():\n    return g()\n", "g uses W, a object.*create it inside g"),
        ("def make():\n    n = 1\n    def f():\n        return n\n    return f\nf = make()\n", "f is defined inside"),
        ("f = lambda: 1\n", "is a lambda"),
        (
            "def wrap(g):\n    def inner():\n        return g()\n    return inner\n@wrap\ndef f():\n    return 1\n",
            "inner is defined inside a function",
        ),
    ],
)
def test_what_cannot_come_along_is_named(run_cell: RunCell, text: str, told: str) -> None:
    space = run_cell(text)
    with pytest.raises(ToolwiseError, match=told) as caught:
        collect_source(space["f"])
    assert "\n" not in str(caught.value)


def test_two_things_of_one_name(run_cell: RunCell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rates.py").write_text("RATE = 1\ndef rate():\n    return RATE\n")
    monkeypatch.syspath_prepend(tmp_path)
    space = run_cell("from my_rates import rate\nRATE = 2\ndef f():\n    return rate() + RATE\n")
    with pytest.raises(ToolwiseError, match="two different things named 'RATE'"):
        collect_source(space["f"])


def test_without_source_it_says_what_to_do() -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def f():\n    return 1\n", "<stdin>", "exec"), space)
    with pytest.raises(ToolwiseError, match=r"the source of f cannot be found .*: put it in a file"):
        collect_source(space["f"])


def test_a_file_s_own_functions_do_not_lack_one() -> None:
    assert not lacks_file(collect_source)
    assert not lacks_file(Path)
    assert not lacks_file(len)
    assert not lacks_file(re.compile)


def test_ipython_s_history_tells_which_definition_is_the_latest(run_cell: RunCell, reload: Any) -> None:
    one, two = "class A:\n    x = 1\n", "class A:\n    x = 2\n"
    run_cell(one)
    run_cell(two)
    space = run_cell("class A:\n    x = 1\ndef f():\n    return A.x\n")
    space["_ih"] = ["", one, two, one]
    linecache.cache["/tmp/ipykernel_0/other.py"] = (len(two), None, two.splitlines(keepends=True), "")
    try:
        assert reload(space["f"]).f() == 1
    finally:
        del linecache.cache["/tmp/ipykernel_0/other.py"]


def test_the_plain_prompt(tmp_path: Path) -> None:
    """A real REPL: it keeps source since Python 3.13; earlier versions raise a clear error."""
    typed = "def f():\n    return 1\n\nimport toolwise.notebook\nprint(toolwise.notebook.collect_source(f))\n"
    done = subprocess.run(
        [sys.executable, "-q", "-i"], input=typed, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False
    )
    assert "return 1" in done.stdout or "the source of f cannot be found" in done.stderr
