"""One table on stdout: through rich where it is installed, else aligned text."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """`left` columns are text and aligned left, the others are numbers and aligned right."""
    if importlib.util.find_spec("rich") is None:
        print("\n".join(plain_lines(columns, rows, left)))
        return

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console()
    # A pipe has no width: give it all that the table wants rather than the default 80 columns.
    if not console.is_terminal:
        console = Console(width=400)
    console.print(table)


def plain_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[str]:
    table = [columns, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    return [
        "  ".join(
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
