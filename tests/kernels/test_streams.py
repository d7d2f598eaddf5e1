"""One CUDA stream for each purpose."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from toolwise.kernels import streams


def test_each_purpose_keeps_its_stream_however_many_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()
    monkeypatch.setattr(streams, "_streams", {})
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(numbers) % 32)  # as torch does
    device: Any = torch.device("cuda:0")
    taken = {streams.stream_for("capture", device) for _ in range(100)}
    others = [streams.stream_for(purpose, device) for purpose in ("engine", "update", "warm-up", "checkpoint")]
    assert len(taken) == 1
    assert len({*taken, *others}) == 5


def test_no_two_purposes_share_a_stream_whatever_others_take_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()
    monkeypatch.setattr(streams, "_streams", {})
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(numbers) % 32)
    device: Any = torch.device("cuda:0")
    taken = []
    for purpose in ("engine", "update", "warm-up", "capture", "checkpoint"):
        taken.append(streams.stream_for(purpose, device))
        for _ in range(31):  # by FSDP, say: the next one would be the same again
            next(numbers)
    assert len({*taken}) == 5
