"""The table of model families in docs/models.md is what the code does today."""

from __future__ import annotations

import models_page


def test_the_table_is_up_to_date() -> None:
    page = models_page.PAGE.read_text(encoding="utf-8")
    assert models_page.write(page) == page, "run scripts/models_page.py"
