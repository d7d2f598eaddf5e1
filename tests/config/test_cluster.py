"""Where a run's processes are: `[cluster]`."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from toolwise.config.cluster import ClusterConfig


@pytest.mark.parametrize("address", ["", "local", "auto", "10.0.0.1:6379", "ray://head:10001"])
def test_addresses(address: str) -> None:
    assert ClusterConfig(address=address).enabled == bool(address)


def test_a_misspelt_address_is_named() -> None:
    with pytest.raises(ValidationError, match="'locl' is no address; did you mean 'local'"):
        ClusterConfig(address="locl")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"learners": 2}, 'offload needs sharding = "fsdp"'),
        ({"sharding": "fsdp"}, "offload needs several learners"),
    ],
    ids=str,
)
def test_offload_needs_learners_that_divide_the_model(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        ClusterConfig(address="local", offload=True, **settings)
    assert ClusterConfig(address="local", offload=True, sharding="fsdp", learners=2).offload
