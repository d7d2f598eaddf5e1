"""The random number generators of the whole process, as a part of a checkpoint.

The loop itself draws from seeds alone; tools, environments and rewards that run in this process may not.
"""

from __future__ import annotations

import logging
import random
from typing import Any

log = logging.getLogger("toolwise.training.checkpoint")


class RngState:
    """Python's generator, numpy's, torch's, and those of the GPUs in use."""

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
                "the checkpoint is of %d GPUs, here are %d: their random numbers begin anew",
                len(state["cuda"]),
                torch.cuda.device_count(),
            )
