"""Rollout workers that sample from vLLM servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cluster_cases import Workers
from vllm_runs import check_learned, config_for, train

from toolwise.cluster.checks import check_cluster
from toolwise.cluster.interface import ClusterError
from toolwise.errors import ConfigError


@pytest.mark.long
def test_the_server_of_a_worker_gets_each_version(stand_in: Any, tmp_path: Path) -> None:
    cluster = Workers()
    check_learned(train(config_for(base_url=stand_in.url), tmp_path, cluster))
    assert len(cluster.built) == 1
    assert stand_in.version == "1"  # the weights of the second update have not been asked for


@pytest.mark.long
def test_a_worker_whose_server_takes_no_weights_is_replaced(stand_in: Any, tmp_path: Path) -> None:
    class Refusing(Workers):
        async def start(self, *arguments: Any, **options: Any) -> Any:
            stand_in.refuses_weights = False
            return await super().start(*arguments, **options)

        async def call(self, process: Any, method: str, payload: Any, **options: Any) -> Any:
            stand_in.refuses_weights = method == "install"
            return await super().call(process, method, payload, **options)

    cluster = Refusing()
    with pytest.raises(ClusterError, match=r"died 2 times.*did not take version 1"):
        train(config_for({"max_restarts": 1}, base_url=stand_in.url), tmp_path, cluster)
    assert len(cluster.built) == 2


def test_workers_do_not_share_a_server() -> None:
    with pytest.raises(ConfigError, match="each worker starts a server"):
        check_cluster(config_for({"workers": 2}, base_url="http://127.0.0.1:8000/v1"))
