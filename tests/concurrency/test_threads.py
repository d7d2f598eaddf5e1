"""A small model gets one thread unless the configuration or the environment sets the number."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from toolwise.concurrency import threads
from toolwise.concurrency.threads import SMALL_MODEL_WEIGHTS, configure_threads, set_thread_count
from toolwise.config.schema import RunConfig


class Model(torch.nn.Module):
    device = torch.device("cpu")

    def __init__(self, weights: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(weights, device="meta"))


SMALL, LARGE = Model(SMALL_MODEL_WEIGHTS - 1), Model(SMALL_MODEL_WEIGHTS)


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    threads._initial_thread_count.cache_clear()
    yield
    torch.set_num_threads(before)
    threads._initial_thread_count.cache_clear()


def used(model: Model, **settings: object) -> int:
    config = RunConfig.model_validate({"model": settings})
    configure_threads(config)
    set_thread_count(config, model)
    return torch.get_num_threads()


def test_a_small_model_has_one_and_a_large_one_after_it_all() -> None:
    assert [used(SMALL), used(LARGE), used(SMALL)] == [1, 2, 1]


def test_the_configuration_decides() -> None:
    assert used(SMALL, threads=2) == 2
    assert used(LARGE, threads=1) == 1


def test_so_does_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert used(SMALL) == 2
