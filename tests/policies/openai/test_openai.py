"""The OpenAI policy over real HTTP: the bundled model behind our own server, and a server that misbehaves."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

import pytest
import torch

from toolwise.errors import ContextFullError, PolicyError
from toolwise.messages import Message, ToolCall
from toolwise.models import load_model
from toolwise.policies.local import LocalPolicy
from toolwise.policies.openai.policy import OpenAIAgentPolicy
from toolwise.protocols import AgentPolicy, Sampling, SessionPolicy
from toolwise.remote.server_errors import ServerError
from toolwise.rollout.scheduler import RolloutScheduler
from toolwise.rollout.worker import RLRolloutWorker
from toolwise.serve import ServedModel, Server, build_app
from toolwise.tools import build_tools
from toolwise.types import RouteDecision, StopReason, Task

torch.set_num_threads(1)
T = TypeVar("T")
GREEDY = Sampling(max_new_tokens=48, do_sample=False)
QUESTIONS = ["What is 531 * 77?", "How many bridges does Alder have?", "Hello there", "4512 + 309 = ?"]
TOOLS = build_tools(["calculator", "search"])
SPECS = [tool.get_openai_tool_schema().model_dump() for tool in TOOLS.values()]


def run(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(work, 30)

    return asyncio.run(limited())


def user(text: str) -> list[Message]:
    return [Message(role="user", content=text)]


@cache
def loaded() -> tuple[Any, Any]:
    return load_model("builtin:small", device="cpu")


def local() -> LocalPolicy:
    return LocalPolicy(*loaded(), GREEDY)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(build_app(ServedModel.of(local(), "small"))) as started:
        yield started


def assert_same_tokens(one: dict[str, Any], other: dict[str, Any]) -> None:
    for key in ("prompt_ids", "token_ids"):
        assert list(one[key]) == list(other[key])
    assert list(one["logprobs"]) == pytest.approx(list(other["logprobs"]), abs=1e-4)
    assert (one["finish_reason"], one["policy_version"]) == (other["finish_reason"], other["policy_version"])


# The bundled model behind the real server.


def test_it_is_a_policy_with_sessions() -> None:
    policy = OpenAIAgentPolicy("http://localhost:1/v1", "m")
    assert isinstance(policy, AgentPolicy)
    assert isinstance(policy, SessionPolicy)


@pytest.mark.parametrize("parser", ["openai", "hermes"])
@pytest.mark.parametrize("specs", [None, SPECS], ids=["no tools", "tools"])
def test_greedy_decisions_are_the_local_policys(server: Server, parser: str, specs: Any) -> None:
    async def both() -> list[tuple[Any, Any]]:
        remote, here = OpenAIAgentPolicy(server.url, "small", sampling=GREEDY, parser=parser), local()
        asked = [(remote.get_action(user(q), specs), here.get_action(user(q), specs)) for q in QUESTIONS]
        return [tuple(await asyncio.gather(*pair)) for pair in asked]  # type: ignore[misc]

    calls = 0
    for (action, raw, logprobs, value), (local_action, local_raw, local_logprobs, _) in run(both()):
        assert action == local_action
        assert raw == (action["content"] if parser == "openai" and specs else local_raw)
        assert value is None
        assert_same_tokens(logprobs, local_logprobs)
        calls += action["type"] == "tool_call"
    assert calls > 0 or specs is None


def test_requests_that_come_together_are_answered_each_with_its_own(server: Server) -> None:
    async def crowd() -> list[Any]:
        policy = OpenAIAgentPolicy(server.url, "small", sampling=GREEDY)
        return await asyncio.gather(*(policy.get_action(user(q)) for q in QUESTIONS * 8))

    answers = [raw for _, raw, _, _ in run(crowd())]
    assert answers[: len(QUESTIONS)] * 8 == answers
    assert len(set(answers)) > 1


SUM = "What is 531 * 77?"


def episode(policy: AgentPolicy, *, do_sample: bool = False, seed: int = 0, question: str = SUM) -> RLRolloutWorker:
    task = Task(task_id="t", prompt=user(question), tools=["calculator"], ground_truth="40887")
    worker = RLRolloutWorker(task, policy, tools=TOOLS, do_sample=do_sample, seed=seed)
    run(worker.run_episode())
    return worker


@pytest.mark.parametrize("parser", ["openai", "hermes"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_whole_episode_with_a_tool_is_the_local_policys(server: Server, parser: str, do_sample: bool) -> None:
    remote = episode(OpenAIAgentPolicy(server.url, "small", sampling=GREEDY, parser=parser), do_sample=do_sample)
    here = episode(local(), do_sample=do_sample)
    assert remote.fault is None
    assert remote.stop_reason is StopReason.ANSWERED
    assert remote.messages == here.messages
    assert remote.usage.calls == {"calculator": 1}
    assert remote.messages[-2].content == "40887"
    for one, other in zip(remote.steps, here.steps, strict=True):
        assert one.policy_logprobs is not None
        assert other.policy_logprobs is not None
        assert_same_tokens(one.policy_logprobs, other.policy_logprobs)


def test_a_call_that_nobody_can_read_is_shown_again_as_it_was_written(server: Server) -> None:
    question = "How much is 4512 + 309?"
    remote = episode(OpenAIAgentPolicy(server.url, "small", sampling=GREEDY, parser="hermes"), question=question)
    here = episode(local(), question=question)
    assert isinstance(remote.steps[0].action_taken["arguments"], str), (
        "the model has learned to write this call: ask another"
    )
    assert remote.messages == here.messages
    for one, other in zip(remote.steps, here.steps, strict=True):
        assert_same_tokens(one.policy_logprobs or {}, other.policy_logprobs or {})


def test_turns_share_one_buffer_where_each_extends_the_last(server: Server) -> None:
    first, second = (s.policy_logprobs or {} for s in episode(OpenAIAgentPolicy(server.url, "small")).steps)
    whole = [*first["prompt_ids"], *first["token_ids"]]
    assert list(second["prompt_ids"])[: len(whole)] == whole
    assert first["prompt_ids"]._items is second["prompt_ids"]._items


def test_a_seed_gives_the_same_episode_and_another_another(server: Server) -> None:
    policy = OpenAIAgentPolicy(server.url, "small", sampling=Sampling(temperature=2.0, max_new_tokens=12))
    texts = [[s.raw_policy_output for s in episode(policy, do_sample=True, seed=s).steps] for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_call_that_was_no_json_does_not_spoil_the_next_turn(server: Server) -> None:
    bad = ToolCall(id="call_0", name="", arguments='{"name": "calc')
    messages = [
        *user("2 + 2?"),
        Message(role="assistant", content="", tool_calls=[bad]),
        Message(role="tool", content="error: not a call", tool_call_id="call_0"),
    ]
    _, _, logprobs, _ = run(OpenAIAgentPolicy(server.url, "small", sampling=GREEDY).get_action(messages, SPECS))
    assert logprobs is not None
    chat = loaded()[1]
    assert list(logprobs["prompt_ids"]) == chat.start(messages, SPECS)


def test_a_server_that_tells_no_ids_gives_log_probs_that_cannot_be_taken_for_tokens(server: Server) -> None:
    policy = OpenAIAgentPolicy(server.url, "small", sampling=GREEDY, return_token_ids=False)
    _, raw, logprobs, _ = run(policy.get_action(user("Hello there")))
    assert logprobs is not None
    assert {"token_ids", "prompt_ids", "logprobs"}.isdisjoint(logprobs)
    assert "".join(logprobs["tokens"]).removesuffix("<|end|>") == raw
    assert len(logprobs["token_logprobs"]) == len(logprobs["tokens"])
    assert policy.metrics()["policy/without_ids"] == 1


def test_ids_in_the_place_of_token_texts_are_the_ids(server: Server) -> None:
    extra = {"return_tokens_as_token_ids": True}
    policy = OpenAIAgentPolicy(server.url, "small", sampling=GREEDY, extra_body=extra)
    plain = OpenAIAgentPolicy(server.url, "small", sampling=GREEDY)
    assert_same_tokens(run(policy.get_action(user("Hi")))[2] or {}, run(plain.get_action(user("Hi")))[2] or {})


def test_a_reply_cut_off_ends_the_episode_also_without_ids(server: Server) -> None:
    sampling = Sampling(max_new_tokens=2)
    for return_token_ids in (True, False):
        policy = OpenAIAgentPolicy(server.url, "small", sampling=sampling, return_token_ids=return_token_ids)
        assert episode(policy).stop_reason is StopReason.MAX_TOKENS


def test_a_conversation_too_long_for_the_model_is_an_ending_and_no_fault(server: Server) -> None:
    policy = OpenAIAgentPolicy(server.url, "small")
    with pytest.raises(ContextFullError, match="4096"):
        run(policy.get_action(user("word " * 5_000)))
    task = Task(task_id="t", prompt=user("word " * 5_000))
    worker = RLRolloutWorker(task, policy)
    run(worker.run_episode())
    assert worker.stop_reason is StopReason.PROMPT_TOO_LONG
    assert policy.metrics()["policy/context_full"] == 2


def test_a_model_that_is_not_there_is_said_to_be_so(server: Server) -> None:
    with pytest.raises(PolicyError, match=r"HTTP 404: model 'large' not found; available: small$"):
        run(OpenAIAgentPolicy(server.url, "large").get_action(user("Hi")))


def test_a_prompt_of_token_ids_is_refused_and_not_replaced() -> None:
    with pytest.raises(PolicyError, match="prompt_ids"):
        OpenAIAgentPolicy("http://localhost:1/v1", "m").session(seed=0, do_sample=True, prompt_ids=[1])


def test_an_unknown_parser_is_refused() -> None:
    with pytest.raises(PolicyError, match="choose one of openai, "):
        OpenAIAgentPolicy("http://localhost:1/v1", "m", parser="hermeneutic")


def test_the_client_needs_no_torch() -> None:
    code = "import sys; from toolwise.policies.openai.policy import OpenAIAgentPolicy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# A server that misbehaves in every way.

Writer = asyncio.StreamWriter
Behaviour = Callable[[Writer], Awaitable[None]]
FINE = json.dumps({"choices": [{"message": {"content": "fine"}, "finish_reason": "stop"}]}).encode()


def answer(status: int, body: bytes = FINE, *, length: int | None = None, **headers: str) -> Behaviour:
    async def behave(writer: Writer) -> None:
        given = {"content-type": "application/json", "content-length": str(len(body) if length is None else length)}
        given["connection"] = "close"  # announced, or the client would reuse the connection
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        writer.write(f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode() + body)

    return behave


async def stall(writer: Writer) -> None:
    await asyncio.sleep(60)


async def drop(writer: Writer) -> None:
    writer.transport.abort()


async def endless(writer: Writer) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n")
    while True:
        writer.write(b" " * 4_000)
        await writer.drain()
        await asyncio.sleep(0.001)


async def drip(writer: Writer) -> None:
    writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(FINE)}\r\n\r\n".encode())
    for byte in FINE:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.05)


async def babble(writer: Writer) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.2\r\n" * 3)


fine = answer(200)
half = answer(200, FINE[:20], length=len(FINE))


class FaultyServer:
    """Behaves as `choose` says, given the text of the request and how often it came before."""

    def __init__(self, choose: Callable[[str, int], Behaviour]) -> None:
        self.choose = choose
        self.asked: dict[str, int] = {}
        self.was_asked, self.was_left = asyncio.Event(), asyncio.Event()

    async def __aenter__(self) -> FaultyServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            question = json.loads(await reader.readexactly(length))["messages"][-1]["content"]
            asked = self.asked[question] = self.asked.get(question, 0) + 1
            self.was_asked.set()
            behaving = asyncio.ensure_future(self.choose(question, asked - 1)(writer))
            gone = asyncio.ensure_future(reader.read())
            await asyncio.wait({behaving, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not behaving.done():
                self.was_left.set()
            behaving.cancel()
            gone.cancel()
            await asyncio.gather(behaving, gone, return_exceptions=True)
        except (OSError, EOFError):
            pass
        finally:
            writer.close()


def impatient(url: str, **more: Any) -> OpenAIAgentPolicy:
    settings = {"timeout_s": 10.0, "deadline_s": 20.0, "max_retries": 2, "backoff_s": 0.01, **more}
    return OpenAIAgentPolicy(url, "m", **settings)


def ask_faulty(behaviours: Sequence[Behaviour], **more: Any) -> tuple[Any, dict[str, float], float]:
    """The outcome, counts and seconds with a server that misbehaves in these ways in turn, and then behaves."""

    async def work() -> tuple[Any, dict[str, float], float]:
        script = dict(enumerate(behaviours))
        async with FaultyServer(lambda question, asked: script.get(asked, fine)) as faulty:
            policy = impatient(faulty.url, **more)
            began = time.monotonic()
            (outcome,) = await asyncio.gather(policy.get_action(user("Hi")), return_exceptions=True)
            took_s = time.monotonic() - began
            await policy.aclose()
            if isinstance(outcome, BaseException):
                assert faulty.url in str(outcome)
                assert "\n" not in str(outcome)
                return outcome, policy.metrics(), took_s
            return outcome[1], policy.metrics(), took_s

    return run(work())


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        (stall, "timeout"),
        (drip, "timeout"),
        (drop, "dropped"),
        (babble, "dropped"),
        (half, "dropped"),
        (answer(429), "rate_limited"),
        (answer(429, retry_after="0"), "rate_limited"),
        (answer(500), "server_error"),
        (answer(503, b"<html>busy</html>", content_type="text/html"), "server_error"),
        (answer(200, b'{"choices": ['), "bad_reply"),
        (answer(200, b"<html>Sign in</html>", content_type="text/html"), "bad_reply"),
        (answer(200, b"{}"), "bad_reply"),
        (answer(200, b'{"choices": []}'), "bad_reply"),
        (answer(200, b'{"choices": [{"message": {"content": ""}}]}'), "bad_reply"),
        (answer(200, b"not gzip", content_encoding="gzip"), "bad_reply"),
        (answer(200, b""), "bad_reply"),
        (answer(204, b""), "bad_reply"),
    ],
)
def test_trouble_that_may_pass_is_counted_and_asked_again(behaviour: Behaviour, kind: str) -> None:
    timeout_s = 0.5 if kind == "timeout" else 10.0
    outcome, counts, _ = ask_faulty([behaviour], timeout_s=timeout_s)
    assert outcome == "fine"
    assert counts["policy/requests"] == 2
    assert counts[f"policy/retries/{kind}"] == counts["policy/retries"] == 1
    outcome, counts, took_s = ask_faulty([behaviour] * 9, max_retries=1, timeout_s=timeout_s)
    assert isinstance(outcome, ServerError)
    assert outcome.kind == kind
    assert str(outcome).endswith("(2 attempts)")
    assert counts[f"policy/failures/{kind}"] == counts["policy/failures"] == 1
    assert took_s < 5


@pytest.mark.parametrize(
    ("behaviour", "kind", "said"),
    [
        (answer(401, b'{"error": {"message": "no such key"}}'), "refused", "HTTP 401: no such key"),
        (answer(404, b"Not Found"), "refused", "HTTP 404: Not Found"),
        (answer(400, b'{"error": {"message": "bad\\nfield"}}'), "refused", "bad field"),
        (answer(307, b"", location="http://127.0.0.1:9/v1"), "redirect", "redirects to http://127.0.0.1:9/v1"),
        (answer(200, FINE.replace(b"stop", b"content_filter")), "refused", "content filter"),
    ],
)
def test_trouble_that_stays_is_told_at_once(behaviour: Behaviour, kind: str, said: str) -> None:
    outcome, counts, _ = ask_faulty([behaviour] * 9)
    assert isinstance(outcome, ServerError)
    assert outcome.kind == kind
    assert said in str(outcome)
    assert counts["policy/requests"] == 1


def test_json_under_another_name_is_json() -> None:
    assert ask_faulty([answer(200, content_type="text/plain")])[0] == "fine"


def test_a_body_without_end_is_not_read_for_ever() -> None:
    outcome, counts, took_s = ask_faulty([endless] * 9, max_retries=1, timeout_s=0.5)
    assert isinstance(outcome, ServerError)
    assert outcome.kind == "timeout"
    assert counts["policy/requests"] == 2
    assert took_s < 5


def test_a_server_that_is_not_there_is_said_to_be_so() -> None:
    async def work() -> None:
        async with FaultyServer(lambda question, asked: fine) as faulty:
            url = faulty.url
        policy = impatient(url)
        with pytest.raises(ServerError, match=r"no connection: .*\(3 attempts\)") as caught:
            await policy.get_action(user("Hi"))
        assert caught.value.kind == "connect"

    run(work())


def test_cancelling_a_decision_hangs_up_at_once() -> None:
    async def work() -> None:
        async with FaultyServer(lambda question, asked: stall) as faulty:
            asking = asyncio.create_task(impatient(faulty.url, timeout_s=60).get_action(user("Hi")))
            await faulty.was_asked.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(asking, 5)
            await asyncio.wait_for(faulty.was_left.wait(), 5)

    run(work())


def test_a_policy_can_be_used_by_one_loop_after_another(server: Server) -> None:
    policy = OpenAIAgentPolicy(server.url, "small", sampling=GREEDY, max_concurrent=1)

    async def two() -> list[Any]:
        return await asyncio.gather(policy.get_action(user("Hi")), policy.get_action(user("Hi")))

    assert run(two())[0][1] == run(two())[1][1]


BATCH: dict[str, tuple[Callable[[int], Behaviour], StopReason]] = {
    "fine": (lambda asked: fine, StopReason.ANSWERED),
    "once 500": (lambda asked: fine if asked else answer(500), StopReason.ANSWERED),
    "once 429": (lambda asked: fine if asked else answer(429, retry_after="0"), StopReason.ANSWERED),
    "once dropped": (lambda asked: fine if asked else drop, StopReason.ANSWERED),
    "once half": (lambda asked: fine if asked else half, StopReason.ANSWERED),
    "always 500": (lambda asked: answer(500), StopReason.POLICY_FAULT),
    "always 401": (lambda asked: answer(401), StopReason.POLICY_FAULT),
    "always broken": (lambda asked: answer(200, b"{"), StopReason.POLICY_FAULT),
    "always stalls": (lambda asked: stall, StopReason.POLICY_FAULT),
    "always dropped": (lambda asked: drop, StopReason.POLICY_FAULT),
}


def test_in_a_batch_trouble_is_each_requests_own() -> None:
    names = [name for name in BATCH for _ in range(6)]

    async def work() -> tuple[list[Any], dict[str, float]]:
        async with FaultyServer(lambda question, asked: BATCH[question.split("/")[1]][0](asked)) as faulty:
            policy = impatient(faulty.url, timeout_s=2.0, max_retries=1, max_concurrent=64)
            tasks = [Task(task_id=str(i), prompt=user(f"{i}/{name}")) for i, name in enumerate(names)]
            decisions = [RouteDecision(task, f"g{i}", 1, i, task.prompt) for i, task in enumerate(tasks)]
            rollouts = await RolloutScheduler(policy, {}, deadline_s=20).roll_out(decisions)
            return rollouts, policy.metrics()

    rollouts, counts = run(work())
    assert [r.batch_data_id for r in rollouts] == list(range(len(names)))
    for name, rollout in zip(names, rollouts, strict=True):
        assert rollout.stop_reason is BATCH[name][1], (name, rollout.fault)
        if rollout.stop_reason is StopReason.ANSWERED:
            assert rollout.messages[-1].content == "fine"
        else:
            assert rollout.fault is not None
            assert rollout.fault.startswith("ServerError: server at http://127.0.0.1")
            assert not rollout.stop_reason.trainable
    assert counts["policy/failures"] == 6 * sum(reason is StopReason.POLICY_FAULT for _, reason in BATCH.values())
    assert counts["policy/failures/refused"] == 6
    assert counts["policy/requests"] == len(names) + counts["policy/retries"]
