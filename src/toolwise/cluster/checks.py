"""Refuses settings that a cluster cannot do, before any process starts."""

from __future__ import annotations

from toolwise.config.imports import GIVEN_IN_PYTHON
from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError


def check_cluster(config: RunConfig) -> None:
    """Raise with one line for the first setting that does not go with `cluster.address`. `config` is what the run
    records: workers load by name what was given in Python."""
    if not config.cluster.enabled:
        return
    router, cluster, rollout = config.router, config.cluster, config.rollout
    several = cluster.learners > 1
    for refused, problem in (
        (several and not router.train_actor, "cluster.learners above 1 without training the actor: set it to 1"),
        (
            several and router.enable and router.optimizer == "actor",
            'cluster.learners above 1 and router.optimizer = "actor": set it to "own"',
        ),
        (
            rollout.engine == "vllm" and bool(rollout.vllm.base_url) and cluster.workers > 1,
            "rollout.vllm.base_url and cluster.workers above 1: without it each worker starts a server",
        ),
    ):
        if refused:
            raise ConfigError(f"cluster.address does not go with {problem}")
    for text in _given_in_python(config.model_dump(mode="json", exclude={"trainer"})):
        what = text.removeprefix(GIVEN_IN_PYTHON)
        raise ConfigError(f"{what} exists only in this process: workers load code by name, so put it into a file")


def _given_in_python(value: object) -> list[str]:
    if isinstance(value, str):
        return [value] if value.startswith(GIVEN_IN_PYTHON) else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in items for text in _given_in_python(item)]
