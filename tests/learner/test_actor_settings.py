"""Derived properties of the actor's settings."""

from __future__ import annotations

import pytest

from toolwise.learner.actor_settings import ActorSettings
from toolwise.learner.batch import MicroBatchSettings


def test_micro_batch_settings() -> None:
    settings = ActorSettings(micro_batch_tokens=7, share_prefixes=False, logit_chunk_tokens=3)
    assert settings.micro_batch == MicroBatchSettings(7, share_prefixes=False, chunk_tokens=3)


@pytest.mark.parametrize(("epochs", "mini_batches", "one"), [(1, 1, True), (2, 1, False), (1, 2, False), (2, 2, False)])
def test_whether_a_batch_is_one_step(epochs: int, mini_batches: int, one: bool) -> None:
    assert ActorSettings(ppo_epochs=epochs, mini_batches=mini_batches).one_step is one
