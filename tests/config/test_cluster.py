"""Where a run's processes are: `[cluster]`."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from toolwise.config.cluster import ClusterConfig


@pytest.mark.parametrize("address", ["", "local", "auto", "10.0.0.1:6379", "ray://head:10001"])
def test_addresses(address: str) -> None:
    assert ClusterConfig(address=address).enabled == bool(address)


def test_a_misspelt_address_is_named() -> None:
    with pytest.raises(ValidationError, match="'locl' is no address; did you mean 'local'"):
        ClusterConfig(address="locl")
