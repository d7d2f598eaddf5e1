"""docs/lora.md: every snippet runs as it is written, and the exported adapters are those of the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.docs.pages import BASE, Reader, merged

pytestmark = pytest.mark.docs


def test_every_snippet_runs(reader: Callable[..., Reader], tmp_path: Path) -> None:
    # A run that learns nothing ends with status 3: this reward differs between any two replies.
    (tmp_path / "varied.py").write_text(
        "def varied(messages, ground_truth):\n    return sum(map(ord, messages[-1]['content'])) % 101 / 101\n"
    )
    changes = {"rollout": {"temperature": 3.0}, "reward": {"function": "varied.py:varied", "sandbox": {"tier": "off"}}}
    page = reader("docs/lora.md", base=merged(BASE, changes))
    page.read()
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "exported" / "model")
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(
        page.names["model"](input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-4, rtol=0
    )
