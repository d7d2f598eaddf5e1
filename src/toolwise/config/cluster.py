"""The `[cluster]` section of a run's configuration: processes on one or more machines. Source of docs/settings.md."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from toolwise.config.imports import did_you_mean
from toolwise.config.loader import Section


class ClusterConfig(Section):
    address: str = ""
    """Where the processes run: "local" starts a Ray cluster on this machine, "auto" uses the one that it belongs to,
    HOST:PORT and ray://HOST:PORT another one; empty: no cluster. `--cluster` sets it: docs/cluster.md."""
    workers: PositiveInt = 2
    """Rollout workers: processes with engine, tools, environments and reward sandbox."""
    learners: PositiveInt = 1
    """Learner processes, which divide each batch; 1: the learner is in the process of the run."""
    sharding: Literal["replicated", "fsdp"] = "replicated"
    """"replicated": each learner has all weights. "fsdp": each has a part of weights, gradients and optimizer state."""
    offload: bool = False
    """With sharding = "fsdp": weights, gradients and optimizer state are in CPU memory; a GPU has a layer while it
    computes it."""
    groups_per_worker: PositiveInt | None = None
    """Groups that a worker rolls out at once; by default the batches under way divided among the workers, within
    rollout.max_concurrent."""
    worker_cpus: PositiveFloat = 1.0
    """CPUs reserved for each rollout worker; its threads, too."""
    worker_gpus: NonNegativeFloat = 0.0
    """GPUs reserved for each rollout worker."""
    learner_cpus: PositiveFloat = 1.0
    """CPUs reserved for each learner."""
    learner_gpus: NonNegativeFloat = 0.0
    """GPUs reserved for each learner."""
    max_restarts: NonNegativeInt = 10
    """Rollout workers that may be started again in the course of a run; one more death ends it."""
    max_learner_restarts: NonNegativeInt = 3
    """How often the learners may be started again, from the last checkpoint."""
    start_s: PositiveFloat = 300.0
    """Time limit of a process to start and load the model, in seconds."""
    answer_s: PositiveFloat = 120.0
    """How much longer than rollout.deadline_s a worker may take to return a group; then it is replaced."""
    transfer_s: PositiveFloat = 120.0
    """Time limit of a weight transfer, in seconds."""
    update_s: PositiveFloat = 1800.0
    """Time limit of an update by several learners, in seconds."""
    whole_copy_every: PositiveInt = Field(default=20)
    """Weights are sent as the bitwise difference from the version before where that is smaller, and as a whole at least
    every so many versions."""
    object_store_mb: PositiveInt = 256
    """"local": size of Ray's object store. It holds two copies of the weights."""

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        if address and ":" not in address and address not in ("local", "auto"):
            hint = did_you_mean(address, ("local", "auto"))
            raise ValueError(f"{address!r} is no address{hint}; use local, auto, HOST:PORT or ray://HOST:PORT")
        return address

    @model_validator(mode="after")
    def _check_offload(self) -> ClusterConfig:
        if self.offload and self.sharding != "fsdp":
            raise ValueError('offload needs sharding = "fsdp"')
        if self.offload and self.learners < 2:
            raise ValueError("offload needs several learners, which divide the model: set learners to 2 or more")
        return self

    @property
    def enabled(self) -> bool:
        return bool(self.address)

    @property
    def local(self) -> bool:
        """Whether the run starts its own cluster. Ray may listen on other interfaces too: a token keeps others out."""
        return self.address == "local"
