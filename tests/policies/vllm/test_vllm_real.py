"""A real vLLM server, started by toolwise: its log-probs match the model, before and after a weight change.

`make vllm-env` creates the separate environment that vLLM needs; without it these tests are skipped.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from cluster_cases import Workers
from vllm_runs import check_learned, config_for, train

from toolwise.config.schema import RunConfig
from toolwise.errors import ContextFullError
from toolwise.messages import Message
from toolwise.models import locate
from toolwise.policies.local import LocalPolicy
from toolwise.policies.vllm.builder import build_vllm
from toolwise.policies.vllm.engine import VllmEngine
from toolwise.protocols import Generation, Sampling

pytestmark = pytest.mark.long

T = TypeVar("T")
Forced = Callable[[Any, list[int], list[int], float], list[float]]
PYTHON = Path(__file__).parents[3] / ".venv-vllm" / "bin" / "python"
# The `vllm` command looks up the version of a package "vllm", but the CPU build has another name.
COMMAND = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--max-num-seqs", "32"]
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
QUESTIONS = ["What is 531 * 77?", "How many bridges does Alder have?", "Hello there", "4512 + 309 = ?"]


def run(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(work, 120)

    return asyncio.run(limited())


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    if not PYTHON.is_file():
        pytest.skip("there is no .venv-vllm: make vllm-env")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def model(loaded: Any) -> Any:
    return copy.deepcopy(loaded[0])


@pytest.fixture(scope="module")
def engine(environment: None, model: Any) -> Iterator[VllmEngine]:
    rollout = {"engine": "vllm", "vllm": {"command": COMMAND}}
    made = build_vllm(RunConfig.model_validate({"rollout": rollout}), model, locate("builtin:small"))
    yield made
    made.close()


def prompts(chat: Any) -> list[list[int]]:
    return [chat.start([Message(role="user", content=question)]) for question in QUESTIONS]


def all_of(generator: Any, chat: Any, sampling: Sampling) -> list[Generation]:
    async def together() -> list[Generation]:
        return [*await asyncio.gather(*(generator.generate(prompt, sampling) for prompt in prompts(chat)))]

    return run(together())


def assert_says_what_the_model_says(engine: VllmEngine, model: Any, chat: Any, forced: Forced) -> None:
    greedy = Sampling(max_new_tokens=48, do_sample=False, stop_token_ids=(chat.end_id,))
    theirs = all_of(engine, chat, greedy)
    ours = all_of(LocalPolicy(model, chat, greedy), chat, greedy)
    assert [list(g.token_ids) for g in theirs] == [list(g.token_ids) for g in ours]
    assert [g.finish_reason for g in theirs] == [g.finish_reason for g in ours]
    for temperature in (0.7, 1.0, 2.0):
        drawn = all_of(engine, chat, Sampling(temperature=temperature, max_new_tokens=48, seed=3))
        for prompt, found in zip(prompts(chat), drawn, strict=True):
            expected = forced(model, prompt, list(found.token_ids), temperature)
            assert list(found.logprobs) == pytest.approx(expected, abs=1e-4)
            assert found.policy_version == engine.version


def test_it_says_what_the_model_says(engine: VllmEngine, model: Any, loaded: Any, teacher_forced: Forced) -> None:
    assert_says_what_the_model_says(engine, model, loaded[1], teacher_forced)


def test_after_an_update_it_says_what_the_new_weights_say(
    engine: VllmEngine, model: Any, loaded: Any, teacher_forced: Forced
) -> None:
    """Each kind of weight alone, and all together: a part that is not updated must show."""
    chat, before = loaded[1], {name: weight.detach().clone() for name, weight in model.named_parameters()}
    torch.manual_seed(0)
    for part in ("embed_tokens", "self_attn", "mlp", "norm", ""):
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(before[name])
                if part in name:
                    weight.add_(torch.randn_like(weight) * 0.05)
        engine.weights_changed(engine.version + 1)
        assert_says_what_the_model_says(engine, model, chat, teacher_forced)


def test_replies_go_on_across_reloads_and_each_token_is_of_its_version(
    engine: VllmEngine, model: Any, loaded: Any, teacher_forced: Forced
) -> None:
    torch.manual_seed(0)
    first, models = engine.version, [copy.deepcopy(model)]

    def change() -> None:
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.01)
        models.append(copy.deepcopy(model))

    async def go() -> list[Generation]:
        replies = [
            asyncio.ensure_future(engine.generate(prompt, Sampling(max_new_tokens=1000, seed=seed)))
            for seed, prompt in enumerate(prompts(loaded[1]) * 3)
        ]
        for version in (1, 2):
            await asyncio.sleep(1.0)
            await engine.replace_weights(change, first + version)
        return [*await asyncio.gather(*replies)]

    for prompt, reply in zip(prompts(loaded[1]) * 3, run(go()), strict=True):
        tokens, versions = list(reply.token_ids), [version - first for version in reply.token_versions or ()]
        assert sorted({*versions}) == [0, 1, 2]
        assert versions == sorted(versions)
        assert len(tokens) == len(versions) == 1000
        forced = [teacher_forced(each, prompt, tokens, 1.0) for each in models]
        expected = [forced[version][place] for place, version in enumerate(versions)]
        assert list(reply.logprobs) == pytest.approx(expected, abs=1e-3)
    assert engine.gate.inside == 0


def test_a_seed_gives_the_same_draw_whatever_else_runs(engine: VllmEngine, loaded: Any) -> None:
    sampling = Sampling(max_new_tokens=32, seed=11)
    alone = run(engine.generate(prompts(loaded[1])[0], sampling))
    together = all_of(engine, loaded[1], sampling)
    assert list(alone.token_ids) == list(together[0].token_ids)


def test_where_a_reply_ends_is_ours_to_say(engine: VllmEngine, loaded: Any) -> None:
    prompt = prompts(loaded[1])[0]
    whole = run(engine.generate(prompt, Sampling(max_new_tokens=48, do_sample=False)))
    assert (len(whole.token_ids), whole.finish_reason) == (48, "length")
    stop = whole.token_ids[5]
    cut = run(engine.generate(prompt, Sampling(max_new_tokens=48, do_sample=False, stop_token_ids=(stop,))))
    assert list(cut.token_ids) == list(whole.token_ids)[: list(whole.token_ids).index(stop) + 1]
    assert cut.finish_reason == "stop"


def test_a_prompt_too_long_is_an_ending(engine: VllmEngine) -> None:
    with pytest.raises(ContextFullError, match="4096"):
        run(engine.generate([5] * 5000, Sampling(max_new_tokens=8)))


def test_two_steps_of_training_pass_the_canary(
    environment: None, tmp_path: Path, cli: Callable[..., Any], make_config: Callable[..., Path]
) -> None:
    rollout = {"engine": "vllm", "vllm": {"command": COMMAND}, "n": 4, "max_new_tokens": 32}
    settings = {"rollout": rollout, "algorithm": {"zero_std_groups": "keep"}, "actor": {"lr": 1e-4}}
    ended = cli("train", make_config(tmp_path, settings), "--out", tmp_path / "run")
    assert ended.status == 0, ended.err
    figures = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [step["canary/logprob_gap_max"] for step in figures if "canary/logprob_gap_max" in step]
    assert len(gaps) == 2
    assert 0 < max(gaps) < 1e-3


def test_asynchronous_training_passes_the_canary(
    environment: None, tmp_path: Path, cli: Callable[..., Any], make_config: Callable[..., Path]
) -> None:
    rollout = {"engine": "vllm", "vllm": {"command": COMMAND}, "n": 4, "max_new_tokens": 200, "max_concurrent": "auto"}
    trainer = {"mode": "async", "max_staleness": 2, "total_steps": 6}
    settings = {
        "rollout": rollout,
        "trainer": trainer,
        "algorithm": {"zero_std_groups": "keep"},
        "actor": {"lr": 1e-4},
    }
    ended = cli("train", make_config(tmp_path, settings), "--out", tmp_path / "run")
    assert ended.status == 0, ended.err
    figures = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in figures if "staleness/max" in step]
    assert len(steps) == 6
    assert 1.0 <= max(step["staleness/max"] for step in steps) <= 2.0
    assert max(step.get("canary/logprob_gap_max", 0.0) for step in steps) < 1e-3
    assert max(step["staleness/logprob_gap"] for step in steps) > 0.0


def test_servers_of_two_workers_get_each_version(tmp_path: Path) -> None:
    """In this process the workers start one after the other."""
    cluster, servers = Workers(), list[VllmEngine]()

    def look(workers: Workers, method: str) -> None:
        engines = (worker.setup.policy.engine for worker in workers.built)
        servers.extend(engine for engine in engines if isinstance(engine, VllmEngine) and engine not in servers)

    cluster.on_call = look
    check_learned(train(config_for({"workers": 2}, command=COMMAND), tmp_path, cluster))
    assert len({server.control.root for server in servers}) == 2
    assert all(server.version == 1 for server in servers)
    for server in servers:
        assert server.server is not None
        with pytest.raises(ProcessLookupError):
            os.kill(server.server._process.pid, 0)
