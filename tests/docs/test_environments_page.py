"""docs/environments.md: every snippet runs as it is written, and every name is documented."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
from tests.docs.pages import ROOT, Reader

from toolwise.checks.env.check import EnvChecks
from toolwise.envs.base import BaseEnv
from toolwise.envs.catalog import ENVS, INTERACTIONS
from toolwise.envs.gymnasium import GymnasiumEnv
from toolwise.envs.methods_env import RESERVED_NAMES

pytestmark = pytest.mark.docs


def test_every_snippet_runs(reader: Callable[..., Reader]) -> None:
    page = reader("docs/environments.md")
    page.read()
    assert isinstance(page.names["env"], BaseEnv)


def test_every_name_is_documented() -> None:
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    methods = [name for name in vars(BaseEnv) if not name.startswith("_") and name != "structured_actions"]
    options = [name for name in inspect.signature(GymnasiumEnv).parameters if name != "world"]
    findings = [*EnvChecks(BaseEnv, [], None, None, 0, 1, 1.0).parts(), "event loop"]
    missing = [name for name in (*methods, *options, *RESERVED_NAMES, *ENVS, *INTERACTIONS) if f"`{name}" not in page]
    assert missing == []
    assert [name for name in findings if f"| {name} |" not in page] == []
