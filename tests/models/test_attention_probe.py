"""The window of a layer is read from the function that transformers builds its mask from."""

from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from toolwise.models.attention_probe import UnsupportedAttentionError, _window


@pytest.mark.parametrize("longest", [16, 1000])
@pytest.mark.parametrize("window", [1, 2, 7, 15, 16, 999, 1000, 5000])
def test_a_sliding_window_is_found_unless_it_holds_every_text(window: int, longest: int) -> None:
    found = _window(sliding_window_causal_mask_function(window), longest)
    assert found == (window if window < longest else None)
    assert _window(causal_mask_function, longest) is None


def test_other_masks_are_refused() -> None:
    bidirectional = lambda batch, head, query, key: key >= 0  # noqa: E731
    for function in (chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)), bidirectional):
        with pytest.raises(UnsupportedAttentionError, match="neither causal nor a sliding window"):
            _window(function, 100)
