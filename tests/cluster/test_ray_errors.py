"""Ray's errors as those of the cluster, without Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from toolwise.cluster.interface import Process, ProcessDiedError, RemoteCallError
from toolwise.cluster.ray_cluster import DEAD, RayCluster


class RayError(Exception):
    pass


ERRORS = {name: type(name, (RayError,), {}) for name in (*DEAD, "RaySystemError")}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("RayActorError", ProcessDiedError), ("NodeDiedError", ProcessDiedError), ("RaySystemError", RemoteCallError)],
)
def test_a_dead_node_is_a_dead_process(name: str, expected: type[Exception]) -> None:
    cluster = cast(Any, SimpleNamespace(ray=SimpleNamespace(exceptions=SimpleNamespace(RayError=RayError, **ERRORS))))

    async def fail() -> None:
        raise ERRORS[name]("gone")

    with pytest.raises(expected, match="gone"):
        asyncio.run(RayCluster._reply(cluster, Process(1, "learner-0"), fail(), "update", 1.0))
