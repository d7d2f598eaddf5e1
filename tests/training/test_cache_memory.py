"""The engine's cache makes room for updates: by estimate, by measurement, and for each update if nothing else helps."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from learner_cases import tiny_model

from toolwise.config.schema import RunConfig
from toolwise.engine import Engine
from toolwise.learner import actor as actor_module
from toolwise.learner.forward import TrunkForward
from toolwise.learner.packing import Packed
from toolwise.protocols import Sampling
from toolwise.training.cache_memory import CacheMemory
from toolwise.training.loop import train_step
from toolwise.training.run import Run, assemble
from toolwise.types import Task

torch.set_num_threads(1)
GREEDY = Sampling(do_sample=False, max_new_tokens=6)


@dataclass
class Device:
    """A device of `total` bytes on which an update peaks at `update` bytes."""

    total: int
    update: int = 0

    def usable(self) -> int:
        return self.total

    def peak(self) -> int:
        return self.update

    def reset_peak(self) -> None:
        return


def build_engine(blocks: int = 40) -> Engine:
    return Engine(tiny_model(), blocks=blocks, block_size=4)


def generate(engine: Engine) -> list[int]:
    return list(asyncio.run(engine.generate([5, 6, 7, 8, 9], GREEDY)).token_ids)


def test_a_dropped_cache_comes_back_in_its_new_size_with_the_same_answers() -> None:
    engine = build_engine()
    expected = generate(engine)
    assert engine.most_blocks == 3
    assert engine.drop_cache()
    assert not engine.drop_cache()  # nothing left to free
    assert engine.runner.keys == []
    assert generate(engine) == expected
    assert engine.drop_cache(blocks=7)
    assert generate(engine) == expected
    assert (engine.blocks.count, len(engine.runner.keys[0])) == (7, 7)
    assert engine.blocks.available == 7


def test_an_engine_at_work_keeps_its_size() -> None:
    engine = build_engine()

    async def main() -> list[int]:
        request = asyncio.ensure_future(engine.generate([5, 6, 7, 8, 9], replace(GREEDY, max_new_tokens=40)))
        await asyncio.sleep(0)
        assert not engine.drop_cache(blocks=3)
        return list((await request).token_ids)

    found = asyncio.run(main())
    assert len(found) >= 1
    assert engine.blocks.count == 40


@pytest.mark.parametrize(
    ("total", "permanent", "blocks", "frees"),
    [(200, 90, 40, False), (130, 90, 21, False), (112, 100, 4, True), (115, 50, 40, True)],
    ids=["fits", "smaller", "smaller and freed each time", "freed each time"],
)
def test_the_estimate_decides_the_size(total: int, permanent: int, blocks: int, frees: bool) -> None:
    """All in blocks. The update needs 100, with the margin 108."""
    engine = build_engine()
    size = engine.runner.block_bytes
    shared = CacheMemory(engine, Device(total * size + size // 2))
    shared.limit(100 * size, permanent * size)
    assert (engine.blocks.count, shared.frees_each_update) == (blocks, frees)


def test_a_measured_update_decides_the_size_once_it_ran_out_of_memory() -> None:
    engine = build_engine()
    size = engine.runner.block_bytes
    shared = CacheMemory(engine, Device(total=130 * size, update=100 * size))
    generate(engine)
    shared.before_update()
    assert shared.reclaim()
    assert not shared.reclaim()
    assert shared.after_update() == {"engine/cache_freed": 1.0}
    assert engine.blocks.count == 21
    generate(engine)
    shared.before_update()
    assert shared.after_update() == {}  # it fits now
    generate(engine)
    shared.before_update()
    assert shared.reclaim()  # it does not: longer rows
    assert shared.after_update() == {"engine/cache_freed": 1.0}
    generate(engine)
    shared.before_update()
    assert engine.runner.keys == []
    assert shared.after_update() == {"engine/cache_freed": 1.0}


def test_a_cache_that_would_be_too_small_is_freed_for_each_update() -> None:
    engine = build_engine()
    size = engine.runner.block_bytes
    shared = CacheMemory(engine, Device(total=111 * size, update=100 * size))  # 3 blocks are in use, 3 would be left
    generate(engine)
    assert shared.reclaim()
    shared.after_update()
    assert (engine.blocks.count, shared.frees_each_update) == (40, True)


def vowels(messages: Any, ground_truth: Any) -> float:
    text = messages[-1].content or ""
    return sum(text.count(letter) for letter in "aeiou") + len(text) / 100


def build_run() -> Run:
    settings = {
        "deterministic": True,
        "model": {"device": "cpu"},
        "data": {"batch_size": 2},
        "actor": {"lr": 1e-5},
        "rollout": {"n": 4, "max_new_tokens": 12, "temperature": 3.0, "cache_mb": 8},
        "multi_turn": {"max_turns": 1},
        "reward": {"sandbox": {"tier": "off"}},
    }
    tasks = [Task(task_id=str(i), prompt=[{"role": "user", "content": f"What is {i} + 2?"}]) for i in range(4)]  # type: ignore[list-item]
    return assemble(RunConfig.model_validate(settings), tasks=tasks, validation_tasks=[], reward=vowels)


def test_two_steps_whose_updates_need_the_cache_are_those_of_a_larger_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update runs out of memory while the cache is there: it is freed, and taken again by the next rollouts."""
    found = []
    for tight in (False, True):
        run = build_run()
        engine = run.policy.engine
        assert isinstance(engine, Engine)
        if tight:
            shared = CacheMemory(engine, Device(total=0))
            run = replace(run, cache_memory=shared)
            run.learner.memory.reclaim = shared.reclaim  # type: ignore[attr-defined]

            class Refusing(TrunkForward):
                held = engine.runner

                def __call__(self, packed: Packed) -> torch.Tensor:
                    if self.held.keys:
                        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
                    return super().__call__(packed)

            monkeypatch.setattr(actor_module, "TrunkForward", Refusing)

        async def steps(run: Run = run) -> list[dict[str, float]]:
            return [dict((await train_step(run)).metrics) for _ in range(3)]

        try:
            found.append((asyncio.run(steps()), run.learner.weights_checksum()))
        finally:
            run.close()
    (calm, weights), (tight_steps, tight_weights) = found
    assert weights == tight_weights
    assert [m["actor/out_of_memory"] for m in tight_steps] == [1.0, 0.0, 0.0]
    assert [m["engine/cache_freed"] for m in tight_steps] == [1.0, 1.0, 1.0]
    for one, other in zip(calm, tight_steps, strict=True):
        assert one["actor/updates"] == 1.0
        for name in ("actor/loss", "actor/grad_norm", "score/mean", "tokens/sampled", "actor/computed_tokens"):
            assert one[name] == other[name]
