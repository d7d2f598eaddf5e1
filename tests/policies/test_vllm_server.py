"""The bundled model behind a real vLLM server: its samples and log-probs match the local policy.

`make vllm-env` creates the separate environment that vLLM needs; without it these tests are skipped.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Coroutine, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import torch

from toolwise.errors import ContextFullError
from toolwise.messages import Message, ToolCall
from toolwise.models import load_model, locate
from toolwise.policies.local import LocalPolicy
from toolwise.policies.openai.policy import OpenAIAgentPolicy
from toolwise.protocols import AgentPolicy, Sampling
from toolwise.remote.server_errors import ServerError
from toolwise.rollout.worker import RLRolloutWorker
from toolwise.tools import build_tools
from toolwise.types import StopReason, Task

pytestmark = pytest.mark.long

torch.set_num_threads(1)
T = TypeVar("T")
ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
START_S = 300.0
GREEDY = Sampling(max_new_tokens=48, do_sample=False)
QUESTIONS = ["What is 531 * 77?", "How many bridges does Alder have?", "Hello there", "4512 + 309 = ?"]
TOOLS = build_tools(["calculator", "search"])
SPECS = [tool.get_openai_tool_schema().model_dump() for tool in TOOLS.values()]
# The `vllm` command looks up the version of a package "vllm", but the CPU build has another name.
COMMAND = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server"]
OPTIONS = {
    "--model": locate("builtin:small"),
    "--served-model-name": "small",
    "--dtype": "float32",
    "--max-num-seqs": "32",
    "--tool-call-parser": "hermes",
    "--logprobs-mode": "processed_logprobs",
    "--generation-config": "vllm",
}
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not PYTHON.is_file():
        pytest.skip("there is no .venv-vllm: make vllm-env")
    place = tmp_path_factory.mktemp("vllm")
    root = f"http://127.0.0.1:{(port := free_port())}"
    options = [part for pair in OPTIONS.items() for part in pair]
    options += ["--host", "127.0.0.1", "--port", str(port), "--enable-auto-tool-choice", "--enforce-eager"]
    with (
        (place / "log").open("wb") as log,
        subprocess.Popen(
            [*COMMAND, *options], stdout=log, stderr=subprocess.STDOUT, cwd=place, env=os.environ | SETTINGS
        ) as server,
    ):
        try:
            wait_until_up(root, server, place / "log")
            yield f"{root}/v1"
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()


def wait_until_up(root: str, server: subprocess.Popen[bytes], log: Path) -> None:
    ends = time.monotonic() + START_S
    while time.monotonic() < ends and server.poll() is None:
        try:
            if httpx.get(f"{root}/health", timeout=5).is_success:
                return
        except httpx.TransportError:
            time.sleep(1)
    pytest.fail(f"vLLM did not start: {log.read_text(errors='replace')[-3000:]}")


@cache
def loaded() -> tuple[Any, Any]:
    return load_model("builtin:small", device="cpu")


def run(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(work, 120)

    return asyncio.run(limited())


def user(text: str) -> list[Message]:
    return [Message(role="user", content=text)]


def assert_same_tokens(one: dict[str, Any], other: dict[str, Any]) -> None:
    for key in ("prompt_ids", "token_ids"):
        assert list(one[key]) == list(other[key])
    assert list(one["logprobs"]) == pytest.approx(list(other["logprobs"]), abs=1e-4)
    assert one["finish_reason"] == other["finish_reason"]


@pytest.mark.parametrize("parser", ["openai", "hermes"])
@pytest.mark.parametrize("specs", [None, SPECS], ids=["no tools", "tools"])
def test_greedy_decisions_are_the_local_policys(url: str, parser: str, specs: Any) -> None:
    async def both() -> list[tuple[Any, Any]]:
        remote, here = OpenAIAgentPolicy(url, "small", sampling=GREEDY, parser=parser), LocalPolicy(*loaded(), GREEDY)
        asked = [(remote.get_action(user(q), specs), here.get_action(user(q), specs)) for q in QUESTIONS]
        return [tuple(await asyncio.gather(*pair)) for pair in asked]  # type: ignore[misc]

    for (action, _, logprobs, _), (local_action, _, local_logprobs, _) in run(both()):
        assert_same_tokens(logprobs, local_logprobs)
        assert action["type"] == local_action["type"]
        assert action["content"] == local_action["content"]
        assert (action.get("name"), action.get("arguments")) == (
            local_action.get("name"),
            local_action.get("arguments"),
        )


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_logprobs_are_those_of_a_teacher_forced_pass_after_temperature(url: str, temperature: float) -> None:
    policy = OpenAIAgentPolicy(url, "small", sampling=Sampling(temperature=temperature, max_new_tokens=24))
    _, _, logprobs, _ = run(policy.get_action(user("Hello there")))
    assert logprobs is not None
    prompt, tokens = list(logprobs["prompt_ids"]), list(logprobs["token_ids"])
    with torch.inference_mode():
        logits = loaded()[0](input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits.float() / temperature, dim=-1)[range(len(tokens)), tokens]
    assert list(logprobs["logprobs"]) == pytest.approx(expected.tolist(), abs=1e-4)


def episode(policy: AgentPolicy, question: str) -> RLRolloutWorker:
    task = Task(task_id="t", prompt=user(question), tools=["calculator"])
    worker = RLRolloutWorker(task, policy, tools=TOOLS, do_sample=False)
    run(worker.run_episode())
    return worker


UNREADABLE = "How much is 4512 + 309?"
"""The model answers it with a call that is no JSON."""


@pytest.mark.parametrize(
    ("question", "parser"),
    [("What is 531 * 77?", "openai"), ("What is 531 * 77?", "hermes"), (UNREADABLE, "hermes")],
)
def test_a_whole_episode_is_the_local_policys(url: str, question: str, parser: str) -> None:
    remote = episode(OpenAIAgentPolicy(url, "small", sampling=GREEDY, parser=parser), question)
    here = episode(LocalPolicy(*loaded(), GREEDY), question)
    assert remote.fault is None
    assert remote.stop_reason is StopReason.ANSWERED
    assert [(m.role, m.content) for m in remote.messages] == [(m.role, m.content) for m in here.messages]
    assert len(remote.steps) == 2
    assert remote.usage.calls == here.usage.calls
    assert (remote.usage.calls.get("calculator") == 1) is (question != UNREADABLE)
    for one, other in zip(remote.steps, here.steps, strict=True):
        assert_same_tokens(one.policy_logprobs or {}, other.policy_logprobs or {})


def test_a_call_that_was_no_json_is_no_reason_to_refuse_the_next_turn(url: str) -> None:
    bad = ToolCall(id="call_0", name="", arguments='{"name": "calc')
    messages = [
        *user("2 + 2?"),
        Message(role="assistant", content="", tool_calls=[bad]),
        Message(role="tool", content="error: not a call", tool_call_id="call_0"),
    ]
    logprobs = run(OpenAIAgentPolicy(url, "small", sampling=GREEDY).get_action(messages, SPECS))[2]
    assert logprobs is not None
    assert len(logprobs["token_ids"]) > 0


def test_a_conversation_too_long_is_an_ending(url: str) -> None:
    with pytest.raises(ContextFullError, match="4096"):
        run(OpenAIAgentPolicy(url, "small").get_action(user("word " * 5_000)))


def test_a_refusal_is_told_in_the_servers_words(url: str) -> None:
    with pytest.raises(ServerError, match=r"HTTP 404.*does not exist"):
        run(OpenAIAgentPolicy(url, "large").get_action(user("Hi")))
    with pytest.raises(ServerError, match="HTTP 400"):
        run(OpenAIAgentPolicy(url, "small", extra_body={"temperature": -5}).get_action(user("Hi")))
