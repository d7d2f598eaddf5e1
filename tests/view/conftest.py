"""Generated run folders for the view tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
from run_folders import make_run as make_run

import toolwise.view.report as report
from toolwise.training.run_folder import RunFolder

_drawn: dict[tuple[object, ...], Any] = {}


def draw_once(render: Callable[..., Any]) -> Callable[..., Any]:
    """`render`, which draws each run's figure once: most tests are about the page around the same figures."""

    @wraps(render)
    def drawn(run: RunFolder, *palette: object) -> Any:
        files = sorted(path for path in run.path.rglob("*") if path.is_file() and path.stem != "report")
        key = (render.__name__, run.name, *palette, *((path.name, path.read_bytes()) for path in files))
        if key not in _drawn:
            _drawn[key] = render(run, *palette)
        return _drawn[key]

    return drawn


@pytest.fixture(autouse=True)
def _figures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("render_curves", "render_routing", "render_thinking"):
        monkeypatch.setattr(report, name, draw_once(getattr(report, name)))
