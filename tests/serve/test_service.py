"""The service from start to end, in this process: ready, reload by SIGHUP, drain by SIGTERM."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from trained_router import small_router

from toolwise.agent.agent import Agent
from toolwise.errors import ConfigError, QuestionError
from toolwise.models import locate
from toolwise.serve.service import ServiceConfig, is_loopback, serve

torch.set_num_threads(1)
ASK = {"model": "mine", "messages": [{"role": "user", "content": "What is 417 * 38?"}]}


def load_small(tools: Sequence[Any] | None) -> Agent:
    return Agent.load("builtin:small", tools=["calculator"] if tools is None else tools)


def run(
    config: ServiceConfig,
    client: Callable[[str], None],
    load_agent: Callable[[Sequence[Any] | None], Agent] = load_small,
) -> int:
    """Serve while `client` talks; it must end the service. Returns how often the agent was loaded."""
    faults: list[BaseException] = []
    loads = []

    def load(tools: Sequence[Any] | None) -> Agent:
        loads.append(tools)
        return load_agent(tools)

    def talk(url: str) -> None:
        try:
            until(lambda: httpx.get(f"{url}/ready").status_code == 200)
            client(url)
        except BaseException as fault:
            faults.append(fault)
            os.kill(os.getpid(), signal.SIGTERM)

    threads: list[threading.Thread] = []

    def start(url: str) -> None:
        threads.append(threading.Thread(target=talk, args=(url,)))
        threads[0].start()

    serve(config, load, start)
    threads[0].join(30)
    if faults:
        raise faults[0]
    return len(loads)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_gone(url: str) -> bool:
    try:
        httpx.get(f"{url}/health")
    except httpx.TransportError:
        return True
    return False


def test_collections_leave_out_the_model_while_it_serves() -> None:
    seen: list[tuple[bool, bool]] = []
    threshold = gc.get_threshold()[0]
    gc.unfreeze()  # what the tests before it have left out

    def client(url: str) -> None:
        seen.append((gc.get_freeze_count() > 0, gc.get_threshold()[0] > threshold))
        os.kill(os.getpid(), signal.SIGTERM)

    run(ServiceConfig("mine", port=0, mode="model"), client)
    assert seen == [(True, True)]
    assert (gc.get_freeze_count(), gc.get_threshold()[0]) == (0, threshold)


def test_it_gets_ready_reloads_and_drains() -> None:
    seen: dict[str, Any] = {}

    def client(url: str) -> None:
        seen["first"] = httpx.post(f"{url}/v1/chat/completions", json=ASK, timeout=30).json()
        os.kill(os.getpid(), signal.SIGHUP)
        until(lambda: 'reloads_total{result="done"} 1' in httpx.get(f"{url}/metrics").text)
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=ASK | {"stream": True}, timeout=30) as answer:
            lines = answer.iter_lines()
            seen["begun"] = next(lines)
            os.kill(os.getpid(), signal.SIGTERM)  # the stream under way is finished all the same
            seen["rest"] = [line for line in lines if line]
        until(lambda: is_gone(url))

    assert run(ServiceConfig("mine", port=0), client) == 2
    assert seen["first"]["choices"][0]["message"]["content"] == "Answer: 15846"
    assert seen["first"]["policy_version"] == 0
    assert seen["rest"][-1] == "data: [DONE]"
    assert json.loads(seen["rest"][-2][6:])["policy_version"] == 1


SLOW_TOOL = '''
import time
from pathlib import Path

HERE = Path(__file__).parent

def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    (HERE / f"called-{time.monotonic_ns()}").touch()
    while not (HERE / "go").exists():
        time.sleep(0.01)
    return str(eval(expression))
'''


def test_requests_under_way_finish_on_the_weights_they_began_with(tmp_path: Path) -> None:
    """Over HTTP. A stream and an answer wait for their tool, and go on in another turn when new weights are in use."""
    model = shutil.copytree(locate("builtin:small"), tmp_path / "model")
    (tmp_path / "slow.py").write_text(SLOW_TOOL)
    seen: dict[str, Any] = {}

    def ask(name: str, path: str, **fields: Any) -> threading.Thread:
        def post() -> None:
            seen[name] = httpx.post(path, json=ASK | fields, timeout=60)

        thread = threading.Thread(target=post)
        thread.start()
        return thread

    def client(url: str) -> None:
        path = f"{url}/v1/chat/completions"
        old = [ask("answer", path), ask("stream", path, stream=True)]
        until(lambda: len(list(tmp_path.glob("called-*"))) == 2)
        weights = load_file(model / "model.safetensors")
        weights["model.norm.weight"] *= 0  # no token is likelier than another
        save_file(weights, model / "new.safetensors", metadata={"format": "pt"})
        (model / "new.safetensors").replace(model / "model.safetensors")
        os.kill(os.getpid(), signal.SIGHUP)
        until(lambda: 'reloads_total{result="done"} 1' in httpx.get(f"{url}/metrics").text)
        ask("new", path, max_tokens=8).join(60)
        assert all(thread.is_alive() for thread in old)
        (tmp_path / "go").touch()
        for thread in old:
            thread.join(60)
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: is_gone(url))

    tool = f"{tmp_path}/slow.py:calculator"
    assert run(ServiceConfig("mine", port=0), client, lambda tools: Agent.load(model, tools=tools or [tool])) == 2
    answer, new = seen["answer"].json(), seen["new"].json()
    assert (answer["choices"][0]["message"]["content"], answer["policy_version"]) == ("Answer: 15846", 0)
    assert (seen["answer"].headers["x-toolwise-weights"], seen["new"].headers["x-toolwise-weights"]) == ("0", "1")
    assert (new["choices"][0]["message"]["content"] == "Answer: 15846", new["policy_version"]) == (False, 1)
    chunks = [json.loads(line[6:]) for line in seen["stream"].text.splitlines() if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    assert (text, chunks[-1]["policy_version"]) == ("Answer: 15846", 0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "models.example"])
def test_other_machines_may_reach_it_only_with_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="--api-key-env"):
        ServiceConfig("mine", host=host)
    config = ServiceConfig("mine", host=host, keys=["a-key-for-this-test"])
    assert "a-key-for-this-test" not in repr(config)
    assert not is_loopback(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_the_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    ServiceConfig("mine", host=host)


def test_a_budget_that_the_router_cannot_keep_ends_the_service_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, closed = Agent(small_router(tmp_path)), []
    monkeypatch.setattr(agent.policy, "close", lambda: closed.append(True))
    with pytest.raises(QuestionError, match="not calibrated for a budget"):
        serve(ServiceConfig("mine", port=0, budget=0.5), lambda tools: agent, lambda url: pytest.fail("it started"))
    assert closed == [True]
