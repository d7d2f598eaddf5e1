"""Decoding many steps ahead with kernels gives the same results as step by step. On a CPU the kernels are plain
torch."""

from __future__ import annotations

from typing import Any

import pytest
from engine_cases import (
    VOCABULARY,
    assert_forced,
    assert_greedy,
    counted,
    generate_all,
    greedily,
    random_ids,
    reference,
    run,
    tiny,
)
from selection import quick_first

from toolwise.engine import cuda_graphs
from toolwise.engine.cuda_runner import CudaRunner
from toolwise.protocols import Sampling

NEW = 41


def tiny_for_kernels(family: str = "llama", seed: int = 0) -> Any:
    """Heads of a size that the kernels support."""
    return tiny(family, seed, **({} if family == "qwen3" else {"head_dim": 16}))


LENGTHS = (1, 17, 30, 9, 64)
PROMPTS = [random_ids(length, seed) for seed, length in enumerate(LENGTHS)]
GROUPS = [[*random_ids(40, 100 + group), member] for group in range(3) for member in range(4)]
FAMILIES = ["llama", "llama-rope", "qwen2", "qwen3"]
WAYS: dict[str, dict[str, Any]] = {
    "all together": {},
    "in chunks": {"max_batch_tokens": 24},
    "two at a time": {"max_requests": 2},
    "short of memory": {"blocks": 40},
    "nothing shared": {"prefix_cache": False},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", quick_first(FAMILIES, ("qwen3",)))
def test_greedy_is_what_transformers_generates(family: str, way: str) -> None:
    model = tiny_for_kernels(family)
    engine = counted(model, fused=True, **WAYS[way])
    prompts = [*PROMPTS, *GROUPS[:3]]
    found = generate_all(engine, prompts, [greedily(model, NEW)] * len(prompts))
    for ids, result in zip(prompts, found, strict=True):
        assert_greedy(model, ids, list(result.token_ids), reference(model, ids, NEW))
        assert_forced(model, ids, result)
    metrics = engine.metrics()
    assert metrics["engine/blocks_in_use"] == 0
    assert metrics["engine/steps"] < NEW * (5 if way in ("two at a time", "short of memory") else 1)
    if way == "short of memory":
        assert metrics["engine/preemptions"] > 0


@pytest.mark.parametrize("family", quick_first(FAMILIES, ("llama", "qwen3")))
def test_groups_share_their_prompt_and_say_the_same(family: str) -> None:
    model = tiny_for_kernels(family)
    samplings = [Sampling(max_new_tokens=NEW, seed=n, temperature=0.7) for n in range(len(GROUPS))]
    apart = generate_all(counted(model, fused=False, prefix_cache=False), GROUPS, samplings)
    engine = counted(model, fused=True)
    shared = generate_all(engine, GROUPS, samplings)
    assert [list(g.token_ids) for g in shared] == [list(g.token_ids) for g in apart]
    for one, other in zip(shared, apart, strict=True):
        assert list(one.logprobs) == pytest.approx(list(other.logprobs), abs=1e-4)
    assert isinstance(engine.runner, CudaRunner)
    assert any(groups for _, groups, _ in engine.runner.shapes)


def test_each_ends_at_its_own_length_and_stop_token() -> None:
    model = tiny_for_kernels()
    lengths = [1, 2, 31, 32, 33, 40]
    samplings = [Sampling(max_new_tokens=n, seed=n) for n in lengths]
    found = generate_all(counted(model, fused=True), [PROMPTS[1]] * len(lengths), samplings)
    assert [len(g.token_ids) for g in found] == lengths
    assert {g.finish_reason for g in found} == {"length"}
    stop = found[-1].token_ids[7]
    first = list(found[-1].token_ids).index(stop)
    [ended] = generate_all(
        counted(model, fused=True), [PROMPTS[1]], [Sampling(max_new_tokens=40, seed=40, stop_token_ids=(99999, stop))]
    )
    assert list(ended.token_ids) == list(found[-1].token_ids)[: first + 1]
    assert ended.finish_reason == "stop"


@pytest.mark.parametrize("look", [1, 2, 7])
def test_looking_up_more_often_changes_nothing_but_how_soon_it_hears(
    look: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_for_kernels()
    lengths = [3, 12, 12, 30, 31, 40]
    samplings = [Sampling(max_new_tokens=n, seed=n) for n in lengths]
    prompts = [PROMPTS[1]] * len(lengths)
    plain = generate_all(counted(model, fused=True), prompts, samplings)
    monkeypatch.setattr(cuda_graphs, "POLL_INTERVAL_STEPS", look)
    engine = counted(model, fused=True)
    found = generate_all(engine, prompts, samplings)
    assert [list(g.token_ids) for g in found] == [list(g.token_ids) for g in plain]
    assert isinstance(engine.runner, CudaRunner)
    assert 1 in {rows for rows, _, _ in engine.runner.shapes}  # steps get smaller as requests finish


def test_a_newcomer_is_heard_at_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "POLL_INTERVAL_STEPS", 4)
    model = tiny_for_kernels()
    engine = counted(model, fused=True)
    steps: list[int] = []
    ahead = engine.runner.decode_multi_step

    def timed(requests: Any, most: int, interrupted: Any) -> Any:
        if not steps:  # a request arrives while the first ones decode
            engine.run_between_steps(lambda: None)
        tokens, logprobs = ahead(requests, most, interrupted)
        steps.append(max(map(len, tokens)))
        return tokens, logprobs

    monkeypatch.setattr(engine.runner, "decode_multi_step", timed)
    [found] = generate_all(engine, [PROMPTS[1]], [Sampling(max_new_tokens=41, seed=1)])
    assert (steps[0], sum(steps), len(found.token_ids)) == (4, 40, 41)


def test_it_goes_on_after_weights_change_in_place_and_after_they_move() -> None:
    model, other = tiny_for_kernels(seed=0), tiny_for_kernels(seed=1)
    engine = counted(model, fused=True)
    greedy = [greedily(model, 12)]
    before = generate_all(engine, [PROMPTS[2]], greedy)[0]
    for parameter, value in zip(model.parameters(), other.parameters(), strict=True):
        parameter.data.copy_(value.data)
    engine.weights_changed(1)
    after = generate_all(engine, [PROMPTS[2]], greedy)[0]
    assert list(after.token_ids) == reference(other, PROMPTS[2], 12) != list(before.token_ids)
    assert after.policy_version == 1
    for parameter in model.parameters():  # like `model.to`
        parameter.data = parameter.data.clone()
    engine.drop_cache()
    assert list(generate_all(engine, [PROMPTS[2]], greedy)[0].token_ids) == list(after.token_ids)


def test_what_the_device_cannot_decide_goes_step_by_step() -> None:
    model = tiny_for_kernels()
    engine = counted(model, fused=True, decode=lambda ids: "".join(chr(65 + i) for i in ids))
    plain = generate_all(engine, [PROMPTS[1]], [greedily(model, 20)])[0]
    text = "".join(chr(65 + i) for i in plain.token_ids)
    found = run(engine.generate(PROMPTS[1], greedily(model, 20), stop_strings=[text[4:6]]))
    assert len(found.token_ids) == text.index(text[4:6]) + 2
    assert found.finish_reason == "stop"


def test_scores_and_states_are_those_of_the_stock_forward() -> None:
    model = tiny_for_kernels("qwen3")
    more = [random_ids(5, 7), random_ids(9, 8)]
    for prompt in PROMPTS:
        found, expected = (run(counted(model, fused=way).score(prompt, more)) for way in (True, False))
        for one, other in zip(found, expected, strict=True):
            assert list(one.logprobs) == pytest.approx(list(other.logprobs), abs=1e-4)
            assert list(one.entropies) == pytest.approx(list(other.entropies), abs=1e-4)
        states = [run(counted(model, fused=way).encode(prompt)) for way in (True, False)]
        assert states[0].tolist() == pytest.approx(states[1].tolist(), abs=1e-4)


def test_a_token_outside_the_vocabulary_stops_nothing() -> None:
    model = tiny_for_kernels()
    stops = tuple(range(VOCABULARY, VOCABULARY + 9))  # more than fit on the device
    found = generate_all(
        counted(model, fused=True), [PROMPTS[0]], [Sampling(max_new_tokens=9, do_sample=False, stop_token_ids=stops)]
    )
    assert list(found[0].token_ids) == reference(model, PROMPTS[0], 9)
