"""Kernels that two threads launch for the first time at the same moment."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import toolwise.kernels
from toolwise.kernels.launch import jit


class Kernel:
    """As Triton's: a compiled kernel is found in a cache before it is loaded, which takes until `loaded` is set."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self.function, self.options = function, options
        self.cache: dict[Any, dict[str, Any]] = {}
        self.loading, self.loaded = threading.Event(), threading.Event()

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = self.cache.setdefault(type(args[0]), {"run": None, "function": None})
        if kernel["run"] is None:
            kernel["run"] = lambda function, *args: function(*args)
            self.loading.set()
            self.loaded.wait(5.0)
            kernel["function"] = self.function
        return kernel["run"](kernel["function"], *args)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType("triton")
    module.jit = lambda function, **options: Kernel(function, **options)
    monkeypatch.setitem(sys.modules, "triton", module)
    return module


def launch_twice(kernel: Any) -> list[Any]:
    """The second time while the first launch still loads the kernel."""
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(kernel[(1,)], 1)
        assert kernel.loading.wait(5.0)
        second = threads.submit(kernel[(1,)], 2)
        wait([second], 0.05)
        kernel.loaded.set()
        return [first.result(), second.result()]


def test_a_kernel_that_is_being_loaded_is_not_launched_by_another_thread(triton: Any) -> None:
    assert launch_twice(jit(lambda x: x + 1)) == [2, 3]


def test_without_turns_such_a_launch_fails(triton: Any) -> None:
    with pytest.raises(TypeError):
        launch_twice(Kernel(lambda x: x + 1))


def test_options_are_triton_s(triton: Any) -> None:
    kernel = jit(do_not_specialize=["x"])(lambda x: x)
    kernel.loaded.set()
    assert kernel.options == {"do_not_specialize": ["x"]}
    assert kernel[(1,)](3) == 3


def test_every_kernel_takes_turns() -> None:
    folder = Path(toolwise.kernels.__file__).parent
    texts = {path.name: path.read_text() for path in folder.parent.rglob("*.py")}
    assert sum(text.count("\n@jit") for text in texts.values()) > 20
    own = {name for name, text in texts.items() if re.search(r"triton\.jit|import jit.*triton", text)}
    assert own == {"launch.py"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_threads_on_streams_of_their_own_launch_new_kernels_together() -> None:
    """A width that no kernel was compiled for yet, from four threads at once."""
    barrier = threading.Barrier(4)

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        barrier.wait()
        with torch.cuda.stream(stream):
            out = toolwise.kernels.rms_norm(x, weight, 1e-6)
        stream.synchronize()
        return out

    with ThreadPoolExecutor(4) as threads:
        for width in range(131, 147):
            x, weight = torch.randn(8, width, device="cuda"), torch.randn(width, device="cuda")
            torch.cuda.synchronize()
            expected = torch.nn.functional.rms_norm(x, (width,), weight, 1e-6)
            for out in threads.map(normed, [x] * 4, [weight] * 4):
                assert torch.allclose(out, expected, atol=1e-4)
