"""Tables of the command line."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rich.console import Console, RenderableType
from rich.table import Table

# A terminal of any width, or long lines.
console = Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)


def table(
    title: str, rows: Sequence[Mapping[str, object]], *, max_columns: int = 5
) -> RenderableType:
    """Rows of the same fields; with more than ``max_columns`` one line per field."""
    if not rows:
        return f"{printable(title)}: none"
    lines = [[name.replace("_", " ") for name in rows[0]]]
    lines += [[_cell(name, value) for name, value in row.items()] for row in rows]
    if len(rows[0]) > max_columns:
        lines = list(map(list, zip(*lines, strict=True)))
    drawn = Table(title=printable(title), title_justify="left")
    for head in lines[0]:
        drawn.add_column(head, overflow="fold")
    for line in lines[1:]:
        drawn.add_row(*line)
    return drawn


def printable(text: object) -> str:
    """For what anybody may have written: at most a line of it, without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text)[:500])


def _cell(name: str, value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(name + key, item)}" for key, item in value.items())
    if isinstance(value, int) and "_bytes" in name:
        return f"{value / 2**20:,.1f} MiB" if value >> 20 else f"{value / 2**10:.1f} KiB"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "-" if value is None else printable(value)
