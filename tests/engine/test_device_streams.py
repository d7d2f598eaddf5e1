"""An engine and a learner on one device at the same time: each token has the log-prob of the weights that sampled it,
whatever the learner computes meanwhile."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_cases import random_ids, tiny

from toolwise.engine import Engine
from toolwise.engine.cuda_graphs import CAPTURE
from toolwise.engine.cuda_runner import CudaRunner
from toolwise.engine.device_streams import LearnerStream, finish_kernels, use_own_stream
from toolwise.engine.weight_swap import replace_weights
from toolwise.protocols import Generation, Sampling

torch.set_num_threads(1)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
TEMPERATURE = 0.9


def model_on(device: str) -> Any:
    return tiny("llama", head_dim=16).to(device)


def update_of(model: Any) -> Callable[[], None]:
    """An optimiser step on random tokens, large enough to be seen in every log-prob."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def update() -> None:
        ids = torch.randint(1, 90, (8, 64), device=model.device)
        for _ in range(3):
            optimizer.zero_grad()
            logits = model(input_ids=ids).logits[:, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return update


@torch.no_grad()
def forced(model: Any, prompt: list[int], reply: list[int]) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *reply]], device=model.device)
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / TEMPERATURE
    return logits.log_softmax(-1)[range(len(reply)), reply].cpu()


async def overlapped(engine: Engine, learner: Any, prompts: list[list[int]], updates: int) -> tuple[Any, list[Any]]:
    """Replies that go on across updates, and the weights of each version."""
    stream, update, versions = LearnerStream(engine.runner.device), update_of(learner), [copy.deepcopy(learner)]

    def publish() -> None:
        finish_kernels(engine)
        with torch.no_grad():
            for ours, new in zip(engine.model.parameters(), learner.parameters(), strict=True):
                ours.copy_(new)
        finish_kernels(engine)

    async def reply(seed: int, prompt: list[int]) -> list[tuple[list[int], Generation]]:
        found = []
        for turn in range(3):
            sampling = Sampling(max_new_tokens=40 + 7 * (seed % 5), seed=seed + 100 * turn, temperature=TEMPERATURE)
            found.append((prompt, await engine.generate(prompt, sampling)))
            prompt = [*prompt, *found[-1][1].token_ids, 3]
        return found

    replies = [asyncio.ensure_future(reply(seed, prompt)) for seed, prompt in enumerate(prompts)]
    for version in range(1, updates + 1):
        await stream.run_in_thread(update)
        versions.append(copy.deepcopy(learner))
        await replace_weights(engine, publish, version)
    return [turn for turns in await asyncio.gather(*replies) for turn in turns], versions


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_have_the_log_probs_of_their_version_while_the_learner_updates(device: str) -> None:
    model = model_on(device)
    learner = copy.deepcopy(model)
    engine = Engine(model, blocks=1024)
    use_own_stream(engine)
    prompts = [random_ids(9 + 5 * (n % 4), n) for n in range(8 if device == "cpu" else 48)]
    try:
        turns, versions = asyncio.run(overlapped(engine, learner, prompts, 3 if device == "cpu" else 12))
    finally:
        engine.close()
    seen: set[int] = set()
    for prompt, found in turns:
        reply = list(found.token_ids)
        own = list(found.token_versions or [found.policy_version] * len(reply))
        seen |= set(own)
        by_version = {v: forced(versions[v], prompt, reply) for v in set(own)}
        expected = torch.stack([by_version[v][place] for place, v in enumerate(own)])
        assert (expected - torch.tensor(list(found.logprobs))).abs().max() < 2e-3
    assert len(seen) > 1
    if device == "cuda":
        assert isinstance(engine.runner, CudaRunner)


@pytest.mark.parametrize("device", DEVICES)
def test_a_hidden_state_is_handed_over_in_host_memory(device: str) -> None:
    model = model_on(device)
    engine = Engine(model, blocks=64)
    use_own_stream(engine)
    prompt = random_ids(20, 0)
    try:
        state = asyncio.run(engine.encode(prompt))
    finally:
        engine.close()
    with torch.no_grad():
        exact = model.get_decoder()(input_ids=torch.tensor([prompt], device=device)).last_hidden_state[0, -1]
    assert state.device.type == "cpu"
    assert torch.allclose(state, exact.float().cpu(), atol=1e-4)


@needs_gpu
def test_the_engine_s_thread_and_updates_have_streams_of_their_own() -> None:
    engine = Engine(model_on("cuda"), blocks=64)
    use_own_stream(engine)
    default = torch.cuda.default_stream()
    try:
        assert engine._thread.submit(torch.cuda.current_stream).result() != default
        assert LearnerStream(torch.device("cuda")).run(torch.cuda.current_stream) != default
        assert torch.cuda.current_stream() == default
    finally:
        engine.close()


@needs_gpu
def test_no_graph_is_captured_during_an_update() -> None:
    held: list[bool] = []
    LearnerStream(torch.device("cuda")).run(lambda: held.append(CAPTURE.locked()))
    assert held == [True]
    assert not CAPTURE.locked()


def test_without_a_gpu_updates_are_plain_calls() -> None:
    thread = LearnerStream(torch.device("cpu")).run(threading.current_thread)
    assert thread is threading.current_thread()
    assert not CAPTURE.locked()


def test_updates_always_run_in_the_same_thread() -> None:
    """Each thread that computes would keep handles and workspaces of its own."""
    stream = LearnerStream(torch.device("cpu"))

    async def threads() -> list[threading.Thread]:
        return [await stream.run_in_thread(threading.current_thread) for _ in range(4)]

    async def two_at_once() -> list[threading.Thread]:
        return await asyncio.gather(*(stream.run_in_thread(threading.current_thread) for _ in range(2)))

    found = asyncio.run(threads()) + asyncio.run(two_at_once())
    assert len(set(found)) == 1
    assert found[0] is not threading.current_thread()
    stream.close()
    found[0].join(5.0)
    assert not found[0].is_alive()
