"""A user's part is created from a class or a function, or is the object itself."""

from __future__ import annotations

from typing import Any

import pytest

from toolwise.config.components import create
from toolwise.errors import ConfigError


class Part:
    def __init__(self, scale: float = 1.0, seed: int = 0) -> None:
        self.scale, self.seed = scale, seed


def fails() -> None:
    raise SystemExit(3)


def test_a_class_gets_its_arguments_and_what_is_provided_for_it() -> None:
    part = create(Part, {"scale": 2.0}, "part: Part", {"seed": 7, "tools": {}})
    assert (part.scale, part.seed) == (2.0, 7)
    assert create(part, {}, "part: Part") is part


@pytest.mark.parametrize(
    ("target", "kwargs", "words"),
    [
        (Part, {"scael": 2.0}, "part has no option 'scael'.*did you mean 'scale'"),
        (Part, {"seed": 1}, "part has no option 'seed'"),
        (Part(), {"scale": 2.0}, "part is an object, not a class; set scale where it is created"),
        (fails, {}, r"part could not be created: RuntimeError: it called sys.exit\(3\)"),
    ],
)
def test_mistakes_are_one_line(target: Any, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        create(target, kwargs, "part", {"seed": 7})
