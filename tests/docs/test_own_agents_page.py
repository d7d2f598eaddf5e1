"""docs/own-agents.md: every snippet runs as it is written, and every refused option is documented."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.docs.pages import ROOT, Reader

from toolwise.serve.gateway.wire_format import ChatCall

pytestmark = pytest.mark.docs
NOT_RUN = {
    "make agents-env": "installs packages",
    "python -m pytest -m long tests/end_to_end/test_own_agents.py": "the long tests run it",
}


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As for a script in that folder."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("my_agent", "graded_agent", "my_command"):
        sys.modules.pop(name, None)


def test_every_snippet_runs(reader: Callable[..., Reader], importable: None) -> None:
    page = reader("docs/own-agents.md", not_run=NOT_RUN)
    page.base["reward"] = {**page.base["reward"], "sandbox": {"trusted": ["toolwise.demo.reward"]}}
    page.read()
    faults = page.names["result"].summary["faults"]
    assert faults["env"] == faults["policy"] == faults["infrastructure"] == 0


def test_what_an_agent_may_ask_for_is_documented() -> None:
    page = (ROOT / "docs" / "own-agents.md").read_text(encoding="utf-8")
    accepted = [name for name in ChatCall.model_fields if name != "stream_options"]
    assert [name for name in accepted if f"`{name}`" not in page] == []
