"""The house stays one to live in: short files and functions, layers, and a guarded list of public names."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import toolwise

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "toolwise").rglob("*.py"))
LONGEST_FILE, LONGEST_FUNCTION = 400, 70

PUBLIC = {
    "Action",
    "AdvantageEstimator",
    "AgentPolicy",
    "AnnotatedRollout",
    "BaseEnv",
    "BaseTool",
    "CreditedRollout",
    "EvaluateResult",
    "EvaluationFault",
    "Executor",
    "Generation",
    "Message",
    "MetricResult",
    "OpenAIFunctionToolSchema",
    "RLRolloutWorker",
    "Rollout",
    "RouteDecision",
    "RoutedAgent",
    "RunConfig",
    "Sampling",
    "ScoredRollout",
    "Stateful",
    "StepData",
    "StepOutput",
    "StopReason",
    "Task",
    "TokenGenerator",
    "TokenLogprobs",
    "ToolCall",
    "ToolwiseError",
    "Tracker",
    "Usage",
    "__version__",
    "evaluate",
    "load_config",
    "resume",
    "reward_function",
    "sft",
    "tool",
    "train",
}


def test_there_are_sources_to_look_at() -> None:
    assert len(SOURCES) > 50


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / "src")))
def test_no_file_is_too_long_to_know(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST_FILE


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / "src")))
def test_no_function_is_too_long_to_read(path: Path) -> None:
    functions = [
        n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = {f.name: (f.end_lineno or 0) - f.lineno + 1 for f in functions}
    assert {name: lines for name, lines in long.items() if lines > LONGEST_FUNCTION} == {}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / "src")))
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_no_room_is_a_junk_room() -> None:
    junk = {"utils", "helpers", "common", "manager", "misc"}
    assert [p for p in SOURCES if p.stem in junk or p.parent.name in junk] == []


def test_the_public_names_are_these() -> None:
    assert set(toolwise.__all__) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_can_be_had(name: str) -> None:
    assert getattr(toolwise, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = toolwise.no_such_name


def test_the_layers_hold() -> None:
    """The contracts in pyproject.toml: data flows one way, torch only where tensors live."""
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(linter), "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert toolwise.__version__ == project["version"]
