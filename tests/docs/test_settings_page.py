"""docs/settings.md is what the configuration's classes say."""

from __future__ import annotations

import pytest
import settings_page
from pydantic import BaseModel
from setting_keys import setting_keys

from toolwise.config.schema import RunConfig
from toolwise.config.sft import SftConfig

pytestmark = pytest.mark.docs


def test_the_page_is_up_to_date() -> None:
    shown = settings_page.PAGE.read_text(encoding="utf-8")
    assert shown == settings_page.page(), "run `python scripts/settings_page.py`"


@pytest.mark.parametrize(("config", "prefix"), [(RunConfig, ""), (SftConfig, settings_page.SFT)])
def test_every_setting_is_on_the_page(config: type[BaseModel], prefix: str) -> None:
    page = settings_page.page()
    for path in setting_keys(config):
        table, _, name = path.rpartition(".")
        outside = f"{prefix}outside of any table" if prefix else "Outside of any table"
        section = page.partition(f"\n## {prefix}`[{table}]`" if table else f"\n## {outside}")[2].partition("\n## ")[0]
        assert f"| `{name}` |" in section, path
