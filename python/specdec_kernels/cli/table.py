"""Tables on stdout: printed by rich if it is installed, else as aligned text."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

NARROWEST_TEXT = 12  # least width of a text column, which is broken into lines on a narrow terminal
BETWEEN = 3  # characters between two columns on a terminal

Rows = list[list[str]]


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, least: Sequence[str] = ()
) -> None:
    """Print a table whose first `left` columns are text, the others numbers, aligned right; omit empty columns.

    If the terminal is too narrow, headings and text are broken into lines, and then the columns of `least` are hidden
    in their order. Numbers are never cut.
    """
    kept = [i for i, name in enumerate(columns) if i < left or any(row[i] for row in rows)]
    columns, cells = [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]
    if importlib.util.find_spec("rich") is None:
        print("\n".join(plain_lines(columns, cells, left)))
        return

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    # A pipe has no width: use what the table needs instead of the default 80 columns.
    if not console.is_terminal:
        console = Console(width=max(400, sum(widths_of(columns, cells, left)) + BETWEEN * len(columns)))
    hidden: list[str] = []
    if sum(widths_of(columns, cells, left)) + BETWEEN * len(columns) > console.width:
        headings = [name.replace(" ", "\n") for name in columns]
        while sum(widths_of(headings, cells, left, NARROWEST_TEXT)) + BETWEEN * len(headings) > console.width:
            expendable = [name for name in least if name in columns]
            if not expendable:
                break
            at = columns.index(expendable[0])
            hidden.append(columns.pop(at))
            headings.pop(at)
            cells = [row[:at] + row[at + 1 :] for row in cells]
        columns = headings

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", no_wrap=i >= left, overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    if hidden:
        console.print(f"not shown in {console.width} columns: {', '.join(hidden)}", style="dim", highlight=False)


def widths_of(columns: Sequence[str], rows: Rows, left: int, most: int | None = None) -> list[int]:
    """Return the width of each column; `most` limits text columns."""
    widths = [
        max(len(line) for cell in column for line in cell.split("\n")) for column in zip(columns, *rows, strict=True)
    ]
    return [width if most is None or i >= left else min(width, most) for i, width in enumerate(widths)]


def plain_lines(columns: Sequence[str], rows: Rows, left: int) -> list[str]:
    """Return the lines of an aligned table."""
    widths = widths_of(columns, rows, left)
    return [
        "  ".join(
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [columns, *rows]
    ]
