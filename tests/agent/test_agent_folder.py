"""Train a little, export, load, ask: an export is an agent, with its tools, and answers as before the export."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import toolwise
from toolwise.agent.agent import Agent
from toolwise.agent.events import AgentAnswer, TextDelta, ToolCalled, ToolReturned
from toolwise.agent.export import export_model
from toolwise.errors import CheckpointError, ConfigError, ToolwiseError
from toolwise.training.checkpoint.agent_manifest import AGENT_FILE

SUM = "What is 4321 - 1234?"
SHORT = ["rollout.max_new_tokens=48"]
TOOLS = '''
from words import ENDING

def shout(text: str) -> str:
    """Say something loudly."""
    return text.upper() + ENDING
'''


@pytest.fixture(scope="module")
def exported(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_model(tiny_run, tmp_path_factory.mktemp("agent") / "exported").out


@pytest.fixture(scope="module")
def agent(exported: Path) -> Agent:
    return toolwise.load(exported, overrides=SHORT)


def test_an_export_answers_as_its_run_did(agent: Agent, tiny_run: Path) -> None:
    trained = toolwise.load(tiny_run, overrides=SHORT)
    assert list(agent.tools) == list(trained.tools) != []
    for question in (SUM, "How many mills does Alder have?"):
        before, after = trained.ask(question), agent.ask(question)
        assert (before.text, before.calls, before.cost) == (after.text, after.calls, after.cost)
        assert after.text
    answered = agent.ask(SUM)
    assert answered.text == "Answer: 3087"
    assert answered.calls["calculator"] == 1
    assert answered.cost == sum(answered.calls.values())


def test_an_agent_without_a_router_has_no_routes_and_no_budget(agent: Agent) -> None:
    answered = agent.ask(SUM)
    assert (answered.route, dict(answered.route_probs)) == ("", {})
    for options in ({"budget": 0.5}, {"route": "answer"}):
        with pytest.raises(ConfigError, match="has no router"):
            agent.ask(SUM, **options)  # type: ignore[arg-type]
    capped = agent.ask(SUM, cap=0)
    assert (capped.refused >= 1, capped.cost) == (True, 0.0)
    with pytest.raises(ConfigError, match="cap"):
        agent.ask(SUM, cap=-1)
    for nothing in ("", " \n", []):
        with pytest.raises(ConfigError, match="the question is empty"):
            agent.ask(nothing)


@pytest.mark.long
def test_overlapping_questions_are_answered_as_one_at_a_time(agent: Agent) -> None:
    questions = [f"What is {1200 + n} - {(n * 37) % 900}?" for n in range(16)]

    async def together() -> list[str]:
        return [answered.text for answered in await asyncio.gather(*map(agent.aask, questions))]

    alone = [agent.ask(question).text for question in questions]
    assert len(set(alone)) > 8
    assert asyncio.run(together()) == alone


def test_a_stream_tells_what_happens_and_ends_with_the_answer(agent: Agent) -> None:
    events = list(agent.stream(SUM))
    kinds = [type(event) for event in events]
    assert kinds.index(ToolCalled) < kinds.index(ToolReturned) < kinds.index(AgentAnswer) == len(kinds) - 1
    assert kinds.count(TextDelta) > 3
    answered = events[-1]
    assert isinstance(answered, AgentAnswer)
    assert answered.text == agent.ask(SUM).text
    written = "".join(event.text for event in events if isinstance(event, TextDelta))
    assert written == "".join(step.raw_policy_output or "" for step in answered.rollout.steps)
    roles = [message.role for message in answered.messages]
    assert roles == ["assistant", "tool"] * (len(roles) // 2) + ["assistant"]


def test_a_stream_can_be_left_and_reports_errors(agent: Agent) -> None:
    for _ in agent.stream(SUM):
        break  # closes the stream, which cancels the rollout
    assert agent.ask(SUM).text == "Answer: 3087"
    with pytest.raises(ConfigError, match="has no router"):
        list(agent.stream(SUM, route="answer"))


def test_a_stream_whose_event_loop_cannot_be_created_ends(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise OSError("Too many open files")

    ended: list[BaseException] = []

    def ask() -> None:
        try:
            list(agent.stream(SUM))
        except OSError as fault:
            ended.append(fault)

    monkeypatch.setattr(asyncio.events, "new_event_loop", fail)
    monkeypatch.setattr(threading.Thread, "is_alive", lambda _: True)  # it has not ended yet when its fault is read
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(10)
    assert [str(fault) for fault in ended] == ["Too many open files"]


def test_a_conversation_goes_on_from_the_messages_of_an_answer(agent: Agent) -> None:
    conversation: list[Any] = [{"role": "user", "content": SUM}]
    conversation += agent.ask(conversation).messages
    conversation.append({"role": "user", "content": "What is 3 + 4?"})
    answered = agent.ask(conversation)
    roles = [message.role for message in answered.rollout.messages]
    assert roles[:2] == ["user", "assistant"]
    assert roles[len(conversation) - 1 : len(conversation) + 1] == ["user", "assistant"]
    assert answered.text


def test_a_plain_model_is_an_agent_too(tmp_path: Path) -> None:
    from toolwise.models import locate

    folder = shutil.copytree(locate("builtin:small"), tmp_path / "model")
    for source in ("builtin:small", folder):
        assert toolwise.load(source, tools=["calculator"], overrides=SHORT).ask(SUM).text == "Answer: 3087"
    assert not toolwise.load(folder).tools
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="is not an agent, a run, a checkpoint or a model folder"):
        toolwise.load(tmp_path / "empty")
    with pytest.raises(ToolwiseError, match="there is no folder"):
        toolwise.load(tmp_path / "nowhere")


def change(folder: Path, name: str) -> None:
    file = folder / name
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (lambda folder: change(folder, "model.safetensors"), "model.safetensors is not what was exported"),
        (lambda folder: change(folder, "tokenizer.json"), "tokenizer.json is not what was exported"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "more.json").write_text("{}"), "more.json was added after"),
        (lambda folder: (folder / AGENT_FILE).write_text("{"), "agent.json cannot be read"),
        (
            lambda folder: (folder / AGENT_FILE).write_text(
                (folder / AGENT_FILE).read_text().replace('"max_turns"', '"max_turnz"')
            ),
            "agent.json was changed",
        ),
    ],
)
def test_a_changed_folder_is_refused_in_one_line(
    tamper: Callable[[Path], Any], said: str, exported: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(exported, tmp_path / "copy")
    (folder / "README.md").write_text("a better card")  # its publisher's
    toolwise.load(folder)
    tamper(folder)
    with pytest.raises(CheckpointError, match=said) as told:
        toolwise.load(folder)
    assert "\n" not in str(told.value)


@pytest.fixture
def own_run(tiny_run: Path, tmp_path: Path) -> Path:
    """A copy of the run whose configuration names a tool in a file, with a secret in its options."""
    import tomllib

    import tomli_w

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "words.py").write_text('ENDING = "!"\n')
    (tmp_path / "mine" / "my_tools.py").write_text(TOOLS)
    (tmp_path / "mine" / "facts.txt").write_text("Alder has 12 mills.\n")
    run = shutil.copytree(tiny_run, tmp_path / "run")
    settings = tomllib.loads((run / "config.toml").read_text())
    settings["tools"] = [
        "calculator",
        {"name": "search", "file": str(tmp_path / "mine" / "facts.txt"), "cache": str(tmp_path / "cache")},
        f"{tmp_path}/mine/my_tools.py:shout",
    ]
    (run / "config.toml").write_text(tomli_w.dumps(settings))
    return run


def test_code_comes_with_the_folder_and_runs_only_if_trusted(
    own_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = export_model(own_run, tmp_path / "exported").out
    shutil.rmtree(tmp_path / "mine")
    settings = json.loads((out / AGENT_FILE).read_text())["settings"]
    assert str(tmp_path) not in (out / AGENT_FILE).read_text()
    assert settings["tools"][2] == "code/1/my_tools.py:shout"
    assert (out / "code/1/words.py").is_file()
    with pytest.raises(ConfigError, match=r"brings code .*: the tool code/1/my_tools\.py:shout; read it") as told:
        toolwise.load(out)
    assert "\n" not in str(told.value)
    assert list(toolwise.load(out, tools=["calculator", "search"]).tools) == ["calculator", "search"]
    assert not toolwise.load(out, tools=[]).tools
    with caplog.at_level(logging.WARNING):
        agent = toolwise.load(out, trust_code=True, overrides=SHORT)
    assert "runs with your permissions: the tool code/1/my_tools.py:shout" in caplog.text
    assert list(agent.tools) == ["calculator", "search", "shout"]
    assert agent.ask(SUM).text == "Answer: 3087"
    assert "--trust-code" in (out / "README.md").read_text()


def test_secrets_are_not_exported(own_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = (own_run / "config.toml").read_text()
    server = 'tools = [{name="mcp", command=["serve"], env={API_KEY="hunter2hunter2", OTHER_KEY="${MINE}"}}]\n'
    kept = text[text.index("\n[") :] if "tools" in text else text
    (own_run / "config.toml").write_text(server + kept.replace(text[text.index("tools") : text.index("]\n")], ""))
    (tmp_path / "mine" / "my_tools.py").write_text('API_KEY = "sk-abcdefgh12345678"\n' + TOOLS)
    with caplog.at_level(logging.WARNING):
        out = export_model(own_run, tmp_path / "exported").out
    everything = b"".join(path.read_bytes() for path in out.rglob("*") if path.suffix in (".json", ".py", ".md"))
    assert b"hunter2" not in everything
    assert b"sk-abcdef" not in everything
    assert b"${MINE}" in everything
    assert "API_KEY is not part of the export" in caplog.text
    with pytest.raises(ConfigError, match="the MCP server 'serve'"):
        toolwise.load(out)


def test_a_folder_cannot_name_files_elsewhere(exported: Path, tmp_path: Path) -> None:
    from toolwise.training.checkpoint.agent_manifest import verify_agent, write_manifest

    folder = shutil.copytree(exported, tmp_path / "copy")
    for entry in ({"name": "search", "file": "/etc/passwd"}, {"name": "search", "folder": "../.."}, "../x.py:tool"):
        settings: dict[str, Any] = dict(verify_agent(folder).settings) | {"tools": [entry]}
        write_manifest(folder, "x", 1, settings)
        with pytest.raises(ConfigError, match="which is not in the folder"):
            toolwise.load(folder, trust_code=True)
