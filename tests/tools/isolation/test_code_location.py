"""References by which another process loads a function."""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

from toolwise.config.imports import file_version, load_reference
from toolwise.errors import ToolwiseError
from toolwise.tools.builtin.calculator import CalculatorTool, evaluate
from toolwise.tools.isolation.code_location import ModuleRef, ObjectRef

FILE = Path(__file__).with_name("isolated_tools.py")


def test_a_module_is_known_by_its_name_and_its_file() -> None:
    target = ObjectRef.of(evaluate)
    assert target.module_ref.module == "toolwise.tools.builtin.calculator"
    assert Path(target.module_ref.file).name == "calculator.py"
    assert target.find(target.module_ref.load()) is evaluate
    assert str(target.module_ref) == "toolwise.tools.builtin.calculator"


def test_a_file_is_known_by_its_path() -> None:
    target = ObjectRef.of(load_reference(f"{FILE}:plain", what="tool"))
    assert target == ObjectRef(ModuleRef(None, str(FILE), file_version(FILE)), "plain")
    assert str(target.module_ref) == str(FILE)


def test_a_name_that_belongs_to_another_file_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "json.py"
    path.write_text("HERE = 1")
    loaded = ModuleRef("json", str(path)).load()
    assert vars(loaded)["HERE"] == 1
    assert ModuleRef("no.such.module", str(path)).load() is loaded


def test_a_class_and_a_method_of_a_class_are_found() -> None:
    assert ObjectRef.of(CalculatorTool).name == "CalculatorTool"
    assert (
        ObjectRef(ModuleRef(None, str(FILE)), "Ledger.create").find(ModuleRef(None, str(FILE)).load()).__name__
        == "create"
    )


def test_what_cannot_be_found_again_says_why() -> None:
    def inner() -> None: ...

    for target, reason in [
        (lambda: 0, "a lambda"),
        (inner, "defined inside a function"),
        (functools.partial(evaluate), "no file"),
        (len, "no file"),
        (CalculatorTool({}).execute, "method of an object"),
    ]:
        with pytest.raises(ToolwiseError, match=reason):
            ObjectRef.of(target)


def test_what_was_typed_in_has_no_file() -> None:
    module = ModuleType("typed_in")
    exec("def f(): ...", vars(module))
    with pytest.raises(ToolwiseError, match="no file"):
        ObjectRef.of(vars(module)["f"])


@pytest.mark.parametrize(
    ("ending", "found"),
    [
        ("if __name__ == '__main__':\n    show()", True),
        ("if '__main__' == __name__: show()", True),
        ("show()", False),
        ("if True: show()", False),
    ],
)
def test_a_script_is_loaded_again_only_where_it_is_guarded(tmp_path: Path, ending: str, found: bool) -> None:
    source = f"""
from toolwise.errors import ToolwiseError
from toolwise.tools.isolation.code_location import ObjectRef
def f(): ...
def show():
    try: print(ObjectRef.of(f))
    except ToolwiseError as fault: print("not:", fault)
{ending}
"""
    (tmp_path / "part.py").write_text(source)
    script = subprocess.run(
        [sys.executable, str(tmp_path / "part.py")], capture_output=True, text=True, check=True, timeout=60
    )
    module = subprocess.run(
        [sys.executable, "-m", "part"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    if found:
        assert "module=None" in script.stdout
        assert "module='part'" in module.stdout
    else:
        assert "not: loading part.py again would run it" in script.stdout


def test_an_edited_file_is_another_place(tmp_path: Path) -> None:
    path = tmp_path / "edited.py"
    places = []
    for number in (1, 2, 1):
        path.write_text(f"def f():\n    return {number}\n")
        places.append(ObjectRef.of(load_reference(f"{path}:f", what="tool")).module_ref)
    assert places[0] == places[2] != places[1]
    assert ModuleRef(**asdict(places[1])) == places[1]
