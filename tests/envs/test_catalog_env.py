"""From a configuration's `env` to one environment per episode."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from toolwise.envs.base import BaseEnv
from toolwise.envs.catalog import build_env_factory, build_interaction_factory
from toolwise.envs.gsm8k import Gsm8kEnv
from toolwise.envs.gymnasium import GymnasiumEnv
from toolwise.envs.interactions import BaseInteraction, FunctionInteraction, InteractiveEnv, ScriptedInteraction
from toolwise.envs.methods_env import MethodsEnv
from toolwise.envs.tool_env import ToolEnv
from toolwise.errors import ConfigError, DataError, ToolwiseError
from toolwise.tools import build_tools
from toolwise.types import Task

FILE = '''
from toolwise import BaseEnv
from toolwise.envs.interactions import BaseInteraction, ScriptedInteraction

class Counter:
    """A plain class."""
    def __init__(self, start: int = 0) -> None:
        self.n = start
    def add(self, k: int) -> int:
        """Adds."""
        self.n += k
        return self.n

class Room(BaseEnv):
    def __init__(self, task, size=3):
        self.task, self.size = task, size
    async def reset(self): return f"{self.task.task_id} {self.size}"
    async def step(self, action): return "", 0.0, True, {}

class Closet(Room):
    def __init__(self, tools): self.tools = tools
    async def reset(self): return ", ".join(self.tools)

room = Room(None)
def make_room(task): return Room(task, 9)
def make_nothing(): return 3
def words(seen): return f"cell {seen}"
def user(messages, tone="dry"): return tone
def make_user() -> BaseInteraction: return ScriptedInteraction(["hi"])
number = 3
'''


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "worlds.py"
    path.write_text(FILE)
    return str(path)


def a_task(**more: Any) -> Task:
    return Task(task_id="t", prompt=[], **more)


def first(env: BaseEnv) -> Any:
    async def live() -> Any:
        seen = await env.reset()
        await env.close()
        return seen

    return asyncio.run(live())


def test_built_in_names() -> None:
    tools = build_tools(["calculator"])
    env = build_env_factory("tools", {"tool_timeout_s": 3.0}, tools=tools)(a_task())
    assert isinstance(env, ToolEnv)
    assert (list(env.tools), env.tool_timeout_s) == (["calculator"], 3.0)
    solved = build_env_factory("gsm8k", tools=tools)(a_task(ground_truth="8"))
    assert isinstance(solved, Gsm8kEnv)
    assert [spec["function"]["name"] for spec in solved.tool_specs()] == ["calculator"]


def test_a_world_of_gymnasium_with_functions_by_reference(file: str) -> None:
    options = {"format_observation": f"{file}:words", "describe": False}
    env = build_env_factory("gymnasium:FrozenLake-v1", options)(a_task())
    assert isinstance(env, GymnasiumEnv)
    assert first(env) == "cell 0"


def test_classes_and_functions_get_what_they_take(file: str) -> None:
    tools = build_tools(["calculator"])
    assert first(build_env_factory(f"{file}:Room", {"size": 4}, tools=tools)(a_task())) == "t 4"
    assert first(build_env_factory(f"{file}:make_room", tools=tools)(a_task())) == "t 9"
    assert first(build_env_factory(f"{file}:Closet", tools=tools)(a_task())) == "calculator"


def test_a_plain_class_becomes_its_methods(file: str) -> None:
    env = build_env_factory(f"{file}:Counter", {"kwargs": {"start": 5}})(a_task())
    assert isinstance(env, MethodsEnv)
    assert [spec["function"]["name"] for spec in env.tool_specs()] == ["add"]
    first(env)


@pytest.mark.parametrize("write", [lambda table: table, json.dumps])
def test_a_task_adds_to_the_options(file: str, write: Any) -> None:
    factory = build_env_factory(f"{file}:Room", {"size": 4})
    assert first(factory(a_task(extra_info={"env_kwargs": write({"size": 7})}))) == "t 7"
    assert first(factory(a_task())) == "t 4"


def test_settings_of_the_run_reach_environments_that_take_them(file: str) -> None:
    defaults = {"tool_timeout_s": 2.5, "nobody_takes_this": 1}
    env = build_env_factory("tools", defaults=defaults)(a_task())
    assert isinstance(env, ToolEnv)
    assert env.tool_timeout_s == 2.5
    chosen = build_env_factory("tools", {"tool_timeout_s": 1.0}, defaults=defaults)(a_task())
    assert isinstance(chosen, ToolEnv)
    assert chosen.tool_timeout_s == 1.0
    assert first(build_env_factory(f"{file}:Room", defaults=defaults)(a_task())) == "t 3"


def test_tables_of_options_are_merged() -> None:
    factory = build_env_factory(
        "gymnasium:FrozenLake-v1", {"make_kwargs": {"is_slippery": False, "render_mode": "ansi"}, "draw": True}
    )
    own = {"env_kwargs": {"make_kwargs": {"desc": ["SG", "FF"]}, "seed": 1}}
    assert "[S]G" in first(factory(a_task(extra_info=own)))


def test_each_episode_gets_an_environment_of_its_own(file: str) -> None:
    factory = build_env_factory(f"{file}:Room")
    assert factory(a_task()) is not factory(a_task())


@pytest.mark.parametrize(
    ("env", "kwargs", "said"),
    [
        ("gsm9k", {}, "there is no 'gsm9k'; did you mean 'gsm8k'?"),
        ("nothing", {}, "use gsm8k, tools, gymnasium:ID, or module:name"),
        ("gymnasium:Nowhere-v0", {}, "gymnasium has no environment 'Nowhere-v0'"),
        ("gymnasium:FrozenLake-v1", {"action": []}, "has no option 'action'; did you mean 'actions'?"),
        ("gsm8k", {"tool": None}, "has no option 'tool'"),
        ("{file}:Room", {"task": 3}, "has no option 'task'"),
        ("{file}:Rom", {}, "did you mean 'Room'"),
        ("{file}:room", {}, "is an instance, but every episode needs a new one"),
        ("{file}:number", {}, "give a class or a function"),
        ("{file}:Counter", {"start": 5}, "has no option 'start'"),
        ("{file}:Counter", {"methods": ["sub"]}, "Counter has no public method sub; it has add"),
    ],
)
def test_what_makes_no_environment_is_said_before_the_run(file: str, env: str, kwargs: Any, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build_env_factory(env.format(file=file), kwargs)
    assert said in str(raised.value)


def test_what_a_function_made_is_looked_at(file: str) -> None:
    with pytest.raises(ConfigError, match="returned 3, which is not a BaseEnv"):
        build_env_factory(f"{file}:make_nothing")(a_task())


@pytest.mark.parametrize("own", ["{broken", [1], {"sise": 3}])
def test_a_tasks_bad_options_name_the_task(file: str, own: Any) -> None:
    with pytest.raises((DataError, ToolwiseError), match="task t"):
        build_env_factory(f"{file}:Room")(a_task(extra_info={"env_kwargs": own}))


def test_users_by_name_by_class_and_by_function(file: str) -> None:
    assert isinstance(build_interaction_factory("scripted", {"lines": ["a"]})(), ScriptedInteraction)
    assert isinstance(build_interaction_factory(f"{file}:make_user")(), ScriptedInteraction)
    assert isinstance(build_interaction_factory(ScriptedInteraction)(), ScriptedInteraction)
    user = build_interaction_factory(f"{file}:user", {"tone": "warm"})()
    assert isinstance(user, FunctionInteraction)

    async def talk() -> Any:
        await user.start(tone="cold")
        return await user.respond([])

    assert asyncio.run(talk())[0] == "cold"


@pytest.mark.parametrize(
    ("interaction", "kwargs", "said"),
    [
        ("scriptd", {}, "did you mean 'scripted'"),
        ("scripted", {"line": []}, "has no option 'line'"),
        (ScriptedInteraction([]), {}, "is an instance, but every episode needs a new one"),
        (dict, {}, "neither a BaseInteraction nor a function"),
    ],
)
def test_what_is_no_user_is_named(interaction: Any, kwargs: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_interaction_factory(interaction, kwargs)


def test_an_environment_with_a_user() -> None:
    made: list[BaseInteraction] = []

    class User(ScriptedInteraction):
        def __init__(self, lines: list[str]) -> None:
            super().__init__(lines)
            made.append(self)

    factory = build_env_factory(
        "tools", tools=build_tools(["calculator"]), interaction=User, interaction_kwargs={"lines": []}, max_user_turns=3
    )
    one, other = factory(a_task()), factory(a_task())
    assert isinstance(one, InteractiveEnv)
    assert isinstance(other, InteractiveEnv)
    assert one.max_user_turns == 3
    assert len(made) == 2
