"""Imports of modules beside a file, in the trainer, in the sandbox and in tool workers."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from selection import quick_first

from toolwise.config.imports import load_reference
from toolwise.config.sibling_imports import imported_siblings
from toolwise.sandbox import Sandbox
from toolwise.tools.catalog import build_tools
from toolwise.tools.function import FunctionTool

REWARD = """
import json
import helpers
import pkg.other
from pkg.deep import thing

def score(messages, ground_truth):
    from late import LATE
    import space.inner as inner
    return {"score": helpers.VALUE, "reason": " ".join([thing.X, pkg.other.Y, LATE, inner.W, json.__name__])}

def sneaks(messages, ground_truth):
    return {"score": 0.0, "reason": open(__file__.replace("reward.py", ground_truth)).read()}
"""


def project(folder: Path, name: str, value: float) -> Path:
    files = {
        "reward.py": REWARD,
        "helpers.py": "import values\nVALUE = values.V",
        "values.py": f"V = {value}",
        "late.py": f"LATE = 'late-{name}'",
        "pkg/__init__.py": "",
        "pkg/other.py": f"Y = 'y-{name}'",
        "pkg/deep/__init__.py": "",
        "pkg/deep/thing.py": f"from ..other import Y\nX = 'x-{name}'",
        "space/inner.py": f"W = 'w-{name}'",
        "json.py": "raise RuntimeError('the standard library comes first')",
        "unrelated.py": "SECRET = 1",
        "secret.txt": "secret",
        "pkg/secret.py": "SECRET = 2",
    }
    for path, text in files.items():
        (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / path).write_text(text)
    return folder / name / "reward.py"


@pytest.mark.parametrize("tier", quick_first(["off", "basic", "standard", "namespaced"], ["off", "standard"]))
def test_each_reward_gets_the_helpers_of_its_own_folder(tier: str, tmp_path: Path) -> None:
    files = {name: project(tmp_path, name, value) for name, value in (("a", 1.0), ("b", 2.0))}
    path = list(sys.path)
    with Sandbox(tier, timeout_s=20) as sandbox:  # type: ignore[arg-type]
        results = {name: sandbox.evaluate(f"{file}:score", [], None) for name, file in files.items()}
    for name, value in (("a", 1.0), ("b", 2.0)):
        assert results[name].score == value, results[name]
        assert results[name].reason == f"x-{name} y-{name} late-{name} w-{name} json"
    assert sys.path == path
    assert "helpers" not in sys.modules


@pytest.mark.parametrize("beside", ["unrelated.py", "secret.txt", "pkg/secret.py"])
def test_nothing_else_of_the_folder_can_be_read(beside: str, tmp_path: Path) -> None:
    file = project(tmp_path, "a", 1.0)
    with Sandbox(timeout_s=20) as sandbox:
        if "landlock" not in sandbox.report().layers:
            pytest.skip("this kernel has no Landlock")
        result = sandbox.evaluate(f"{file}:sneaks", [], beside)
    assert result.error is not None
    assert result.error.kind == "denied"


def test_what_a_file_imports_is_found_without_running_it(tmp_path: Path) -> None:
    file = project(tmp_path, "a", 1.0)
    (file.parent / "values.py").write_text("import helpers, no_such_module\nraise RuntimeError")
    found = {str(path.relative_to(file.parent)) for path in imported_siblings(file)}
    assert found == {
        *("helpers.py", "values.py", "late.py", "space/inner.py"),
        *("pkg/__init__.py", "pkg/other.py", "pkg/deep/__init__.py", "pkg/deep/thing.py"),
    }
    file.write_text("def (")
    assert imported_siblings(file) == []


LINKED = """
import helpers
def score(messages, ground_truth):
    return {"score": 1.0, "reason": str(getattr(helpers, "SECRET", "none"))}
"""


def linked(folder: Path, link: str, target: Path) -> Path:
    """A reward whose helpers are a symlink."""
    file = folder / "a" / "reward.py"
    file.parent.mkdir()
    file.write_text(LINKED)
    (file.parent / link).symlink_to(target)
    return file


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("helpers.py", "secret.env"),  # not Python
        ("helpers.py", "other/settings.py"),  # Python, but from another project
        ("helpers.py", "a/.env"),  # in the folder, but not Python
        ("helpers", "other"),  # a package from another project
        ("helpers.py", "a/helpers.py"),  # to itself
    ],
)
def test_a_link_that_leads_out_of_the_folder_opens_nothing(link: str, target: str, tmp_path: Path) -> None:
    file = linked(tmp_path, link, tmp_path / target)
    (tmp_path / "other").mkdir()
    for place in ("secret.env", "other/settings.py", "other/__init__.py", "a/.env"):
        (tmp_path / place).write_text("SECRET = 'hunter2'")
    assert imported_siblings(file) == []


def test_a_worker_does_not_read_through_such_a_link(tmp_path: Path) -> None:
    folder = tmp_path / "executor-popen"  # neither this name nor `exec_module` is a process
    folder.mkdir()
    (tmp_path / "secret.env").write_text("SECRET = 'hunter2'")
    file = linked(folder, "helpers.py", tmp_path / "secret.env")
    with Sandbox(timeout_s=20) as sandbox:
        if "landlock" not in sandbox.report().layers:
            pytest.skip("this kernel has no Landlock")
        result = sandbox.evaluate(f"{file}:score", [], None)
    assert result.error is not None
    assert result.error.kind == "denied"
    assert "read=[" in result.error.message
    with Sandbox(timeout_s=20, read=[tmp_path / "secret.env"]) as sandbox:  # explicitly allowed
        assert sandbox.evaluate(f"{file}:score", [], None).reason == "hunter2"


@pytest.mark.parametrize("tier", ["standard", "namespaced"])
def test_a_link_within_the_folder_is_followed(tier: str, tmp_path: Path) -> None:
    file = linked(tmp_path, "helpers.py", tmp_path / "a" / "helpers_2.py")
    (file.parent / "helpers_2.py").write_text("SECRET = 'shared'")
    with Sandbox(tier, timeout_s=20) as sandbox:  # type: ignore[arg-type]
        assert sandbox.evaluate(f"{file}:score", [], None).reason == "shared"


def test_a_module_named_by_python_has_its_helpers_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = project(tmp_path, "a", 1.0)
    file.rename(file.with_name("dotted_reward_for_siblings.py"))
    monkeypatch.syspath_prepend(str(file.parent))
    with Sandbox(timeout_s=20) as sandbox:
        assert sandbox.evaluate("dotted_reward_for_siblings:score", [], None).score == 1.0


def test_what_an_ordinary_import_finds_is_not_loaded_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shared_for_siblings.py").write_text("class Kind: pass")
    (tmp_path / "user.py").write_text("from shared_for_siblings import Kind")
    monkeypatch.syspath_prepend(str(tmp_path))
    import shared_for_siblings  # type: ignore[import-not-found]

    assert load_reference(f"{tmp_path / 'user.py'}:Kind", what="x") is shared_for_siblings.Kind


def test_toolwise_and_data_folders_are_not_taken_for_modules(tmp_path: Path) -> None:
    for name in ("toolwise", "numpy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("a clone, or data")
    (tmp_path / "user.py").write_text("import numpy\nfrom toolwise import Message\nPI = numpy.pi")
    assert load_reference(f"{tmp_path / 'user.py'}:PI", what="x") == pytest.approx(3.14159, abs=1e-4)


def test_a_missing_module_is_still_missing(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("import no_such_helper\ndef f(messages, ground_truth): return 1.0")
    with Sandbox(timeout_s=20) as sandbox:
        result = sandbox.evaluate(f"{tmp_path / 'r.py'}:f", [], None)
    assert result.error is not None
    assert result.error.kind == "import"
    assert "no_such_helper" in result.error.message


def test_tools_in_worker_processes_have_theirs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "helpers.py").write_text(f"def shout(text):\n    return text.upper() + '-{name}'")
        (tmp_path / name / "tools.py").write_text(
            f'import helpers\n\n\ndef say_{name}(text: str) -> str:\n    """Says.\n\n    Args:\n'
            '        text: What.\n    """\n    return helpers.shout(text)\n'
        )
    tools = build_tools([f"{tmp_path / name / 'tools.py'}:say_{name}" for name in ("a", "b")])

    async def call(name: str) -> str:
        tool = tools[f"say_{name}"]
        assert isinstance(tool, FunctionTool)
        instance = await tool.create()
        return str((await tool.execute(instance, {"text": "hi"}))[0])

    assert [asyncio.run(call(name)) for name in ("a", "b")] == ["HI-a", "HI-b"]
