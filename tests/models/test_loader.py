"""The device and the dtype that a model is loaded with."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from toolwise.models import loader


def test_auto_is_bfloat16_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loader.resolve_dtype("auto", "cpu") == "float32"
    assert loader.resolve_dtype("auto", "cuda:1") == "bfloat16"
    assert loader.resolve_dtype("float32", "cuda") == "float32"
    for there, dtype in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert loader.resolve_dtype("auto", "auto") == dtype


def test_threads_may_load_models_at_the_same_time() -> None:
    with ThreadPoolExecutor(4) as threads:
        models = [
            model for model, _ in threads.map(lambda _: loader.load_model("builtin:small", device="cpu"), range(6))
        ]
    assert all(parameter.device.type == "cpu" for model in models for parameter in model.parameters())
