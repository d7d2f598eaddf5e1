"""docs/lora.md: every snippet runs as it is written, and the exported adapters are those of the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.docs.pages import Reader

pytestmark = pytest.mark.docs


def test_every_snippet_runs(reader: Callable[..., Reader], learning_base: dict[str, Any], tmp_path: Path) -> None:
    page = reader("docs/lora.md", base=learning_base)
    page.read()
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "exported" / "model")
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(
        page.names["model"](input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-4, rtol=0
    )
