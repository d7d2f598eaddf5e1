"""Saves and restores the process's global random number generators.

The training loop uses only explicit seeds; tools, environments and rewards that run in this process may not.
"""

from __future__ import annotations

import logging
import random
from typing import Any

log = logging.getLogger("toolwise.training.checkpoint")


class RngState:
    """The global generators of Python, numpy, torch, and the GPUs in use."""

    def state_dict(self) -> dict[str, Any]:
        import numpy as np
        import torch

        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        import numpy as np
        import torch

        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])
        elif state["cuda"]:
            log.warning(
                "the checkpoint is from %d GPUs, this process has %d: their random state is not restored",
                len(state["cuda"]),
                torch.cuda.device_count(),
            )
