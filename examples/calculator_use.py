"""A reward part for agents with a calculator: was it called at least once, and did every call succeed?

Beside the reward for the right answer, with a small weight, it teaches a model that rarely calls to do so.
"""

from __future__ import annotations

from typing import Any


def calls_work(messages: list[Any], ground_truth: Any, prompt_length: int = 0) -> dict[str, Any]:
    """1 if the agent called a tool and no call failed, 0.3 if some did, 0 if it never called."""
    results = [message.content or "" for message in messages[prompt_length:] if message.role == "tool"]
    failed = [result for result in results if result.startswith("error")]
    tried = bool(results)
    return {
        "score": float(tried) * (0.3 if failed else 1.0),
        "metrics": {"called": float(tried), "well_formed": float(tried and not failed)},
    }
