"""The house stays one to live in: short files and functions, layers, and a guarded list of public names."""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import toolwise

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "toolwise").rglob("*.py"))
LONGEST_FILE, LONGEST_FUNCTION = 400, 70

PUBLIC = {
    "Action",
    "AdvantageEstimator",
    "Agent",
    "AgentPolicy",
    "AnnotatedRollout",
    "BaseEnv",
    "BaseTool",
    "Callback",
    "CheckpointEvent",
    "CreditedBatch",
    "CreditedRollout",
    "EndEvent",
    "EvaluateResult",
    "EvaluationFault",
    "Executor",
    "Generation",
    "Message",
    "MetricResult",
    "OpenAIFunctionToolSchema",
    "PolicyLoss",
    "RLRolloutWorker",
    "RewardSettings",
    "Rollout",
    "RouteDecision",
    "Router",
    "Sampler",
    "RoutedAgent",
    "RunConfig",
    "RunStart",
    "Sampling",
    "ScoredRollout",
    "Stateful",
    "StepData",
    "StepEvent",
    "StepOutput",
    "Stop",
    "StopReason",
    "Task",
    "TokenGenerator",
    "TokenLogprobs",
    "ToolCallParser",
    "ToolCall",
    "ToolwiseError",
    "Tracker",
    "Usage",
    "ValidationEvent",
    "__version__",
    "evaluate",
    "load",
    "load_config",
    "resume",
    "reward_function",
    "sft",
    "tool",
    "train",
}


def test_there_are_sources_to_look_at() -> None:
    assert len(SOURCES) > 50


@cache
def _parsed() -> dict[str, ast.Module]:
    """Every module by its path within the package."""
    gc.disable()  # Python 3.11 raises SystemError if a finalizer that the collector runs compiles code meanwhile
    try:
        return {str(path.relative_to(ROOT / "src" / "toolwise")): ast.parse(path.read_text()) for path in SOURCES}
    finally:
        gc.enable()


def _functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_no_file_is_too_long_to_know() -> None:
    lengths = {str(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST_FILE} == {}


def test_no_function_is_too_long_to_read() -> None:
    lengths = {
        f"{path}:{function.name}": (function.end_lineno or 0) - function.lineno + 1
        for path, tree in _parsed().items()
        for function in _functions(tree)
    }
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FUNCTION} == {}


def test_every_module_says_what_it_is() -> None:
    assert [path for path, tree in _parsed().items() if not ast.get_docstring(tree)] == []


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


def _imports(path: str, tree: ast.Module) -> set[str]:
    """The rooms (or top-level modules) of the package that a module imports, those for type checkers included."""
    dotted = [
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [f"{node.module}.{alias.name}" for alias in node.names]
        )
    ]
    rooms = {name.split(".")[1] for name in dotted if name.startswith("toolwise.")}
    return {room for room in rooms if (ROOT / "src" / "toolwise" / room).is_dir() or room in MODULES} - {_room(path)}


MODULES = {path.stem for path in SOURCES if path.parent.name == "toolwise"}


def _room(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def test_rooms_import_each_other_in_one_direction_only() -> None:
    """The layers allow rooms of one layer to use each other; a circle would make them one room."""
    graph: dict[str, set[str]] = {}
    for path, tree in _parsed().items():
        graph.setdefault(_room(path), set()).update(_imports(path, tree))
    order = TopologicalSorter(graph)
    order.prepare()  # raises CycleError, which names the circle


SHARED_NAMES = {
    "base": "the base class of an environment, of a tool",
    "builder": "from the configuration to a learner, a head, a server's policy",
    "catalog": "the names that a configuration may use, of environments, of tools",
    "check": "one checker per kind of part that users write",
    "engine": "generation behind one protocol: in this process, on a vLLM server",
    "function": "a user's function as a reward, as a tool",
    "gsm8k": "one benchmark as environment, reward and tool",
    "reply": "what a server, what a thinking model replied, in its parts",
}
"""Names that several modules of one layer have, and why: they do the same for another kind of thing."""


def test_modules_of_a_layer_share_a_name_only_with_a_reason() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    for layer in contracts[0]["layers"]:
        rooms = {room.strip() for room in layer.split(":")}
        names = [Path(path).stem for path in _parsed() if _room(path) in rooms and "/" in path]
        shared = {name for name in names if names.count(name) > 1} - {"__init__"}
        assert shared <= set(SHARED_NAMES), layer


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert toolwise.__version__ == project["version"]


TERMINAL = ROOT / "src" / "toolwise" / "terminal"
PIPES = {
    "cli/doctor.py": "a child process of its own answers on a pipe",
    "tools/isolation/tool_worker_main.py": "a worker's output is a pipe of the trainer's",
    "rollout/agents/agent_worker.py": "so is that of an agent's process",
}
"""Who else may print, and why it reaches no terminal."""


def _prints(tree: ast.AST) -> list[str]:
    """Whatever writes to a standard stream or builds a console by another way than `toolwise.terminal`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            module, _, verb = name.rpartition(".")
            streams = ("sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__")
            if name in ("print", "traceback.print_exc", "pprint.pprint") or (
                module in streams and verb in ("write", "writelines")
            ):
                found.append(name)
            if module in ("typer", "click") and verb in ("echo", "secho", "confirm", "prompt"):
                found.append(name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {alias.name for alias in node.names}
            if node.module.split(".")[0] in ("tqdm", "click") or (
                node.module.startswith("rich") and names & {"Console", "Live", "Status", "Progress", "track", "print"}
            ):
                found.append(f"from {node.module} import {', '.join(sorted(names))}")
        elif isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in ("tqdm", "click", "rich", "pprint")]
    return found


def test_nothing_prints_but_by_the_terminal() -> None:
    """Control characters of other people's text are made visible there, and nowhere else."""
    found = {path: _prints(tree) for path, tree in _parsed().items() if path not in PIPES}
    assert {path: prints for path, prints in found.items() if prints and not path.startswith("terminal/")} == {}


def test_the_search_for_prints_finds_them() -> None:
    code = "print(1); typer.echo(2); sys.stderr.write(3)\nfrom rich.console import Console\nimport tqdm"
    assert len(_prints(ast.parse(code))) == 5


PRIVATE_JSON = {
    "sandbox/programs/run.py": "what a child process of ours is asked for, on a descriptor that only it reads",
}


def _writes_json(function: ast.AST) -> bool:
    """Whether a function writes a file of JSON that it made by itself; `allow_nan=False` refuses instead."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    loose = [
        call
        for call in calls
        if ast.unparse(call.func) in ("json.dump", "json.dumps") and "allow_nan" not in [k.arg for k in call.keywords]
    ]
    names = [ast.unparse(call.func) for call in calls]
    verbs = ("write_text", "write_bytes", "writelines", "write_atomic", "writerow")
    return bool(loose) and any(name.split(".")[-1] in verbs or name.endswith("file.write") for name in names)


def test_every_json_file_has_the_one_writer() -> None:
    """`toolwise.serialization.json_text`: no NaN, no half characters, whatever is in a value."""
    found = [
        f"{path}:{function.name}"
        for path, tree in _parsed().items()
        if path not in PRIVATE_JSON
        for function in _functions(tree)
        if _writes_json(function)
    ]
    assert found == []
