"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text


def print_table(
    columns: Iterable[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    numbers: bool = False,
    unwrapped: str = "",
    **options: Any,
) -> None:
    """Print `rows`; with `numbers`, every column but the first is aligned right. `unwrapped` names a column whose text
    stays on one line, to be copied. `options` are those of rich's table."""
    from rich.table import Column, Table

    from toolwise.terminal.display import Console

    table = Table(
        *(
            Column(name, justify="right" if numbers and index else "left", no_wrap=name == unwrapped)
            for index, name in enumerate(columns)
        ),
        **options,
    )
    for row in rows:
        table.add_row(*row)
    Console().print(table)
