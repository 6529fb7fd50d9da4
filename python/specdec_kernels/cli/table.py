"""One table on stdout: through rich where it is installed, else aligned text."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

NARROWEST_TEXT = 12  # of a column of text, which is broken into lines where the terminal is narrow
BETWEEN = 3  # what a terminal's table has between two columns

Rows = list[list[str]]


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, least: Sequence[str] = ()
) -> None:
    """`left` columns are text and aligned left, the others are numbers and aligned right; empty ones are left out.

    Where a terminal is too narrow for all, headings and text are broken into lines, and then columns are hidden, those
    of `least` in their order, so that every number that is shown is shown whole.
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
    # A pipe has no width: give it all that the table wants rather than the default 80 columns.
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
    """Of each column, at one line a cell; `most` bounds those of text."""
    widths = [
        max(len(line) for cell in column for line in cell.split("\n")) for column in zip(columns, *rows, strict=True)
    ]
    return [width if most is None or i >= left else min(width, most) for i, width in enumerate(widths)]


def plain_lines(columns: Sequence[str], rows: Rows, left: int) -> list[str]:
    widths = widths_of(columns, rows, left)
    return [
        "  ".join(
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [columns, *rows]
    ]
