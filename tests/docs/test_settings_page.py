"""docs/settings.md is what the configuration's classes say."""

from __future__ import annotations

import pytest
import settings_page
from setting_keys import setting_keys

from toolwise.config.schema import RunConfig

pytestmark = pytest.mark.docs


def test_the_page_is_up_to_date() -> None:
    shown = settings_page.PAGE.read_text(encoding="utf-8")
    assert shown == settings_page.page(), "run `python scripts/settings_page.py`"


def test_every_setting_is_on_the_page() -> None:
    page = settings_page.page()
    for path in setting_keys(RunConfig):
        table, _, name = path.rpartition(".")
        section = page.partition(f"\n## `[{table}]`" if table else "\n## Outside of any table")[2].partition("\n## ")[0]
        assert f"| `{name}` |" in section, path
