"""How tables and texts fit a terminal: long text folds, ids and keys stay whole, and nothing vanishes.

A table that does not fit even so becomes records, one `name  value` a line. What is piped is neither cut nor padded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.table import Table
from rich.text import Text

#: A column of text may become this narrow before the table becomes records; a date fits.
FOLDED_COLUMNS_MIN = 10
GAP_COLUMNS = 2
NOTHING = "-"


def print_table(table: Table, to: Console, *, piped: bool) -> None:
    """A table, or its rows as records where it does not fit."""
    if piped or fits(table, to.width):
        with to.capture() as captured:
            to.print(table)
        lines = [line.rstrip() for line in captured.get().splitlines()]
    else:
        lines = list(_records(table, to.width))
    to.print(Text.from_ansi("\n".join(lines)), soft_wrap=True)


def fits(table: Table, width: int) -> bool:
    """Whether every column can be as wide as it must be."""
    needed = GAP_COLUMNS * len(table.columns)
    for column in table.columns:
        widest = max(cell_len(str(cell)) for cell in (column.header, *column.cells))
        needed += widest if column.no_wrap else min(widest, FOLDED_COLUMNS_MIN)
    return needed <= width


def record(pairs: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    """`name  value` lines; a value that is too long goes on below its beginning."""
    indent = max((cell_len(name) for name, _ in pairs), default=0) + GAP_COLUMNS
    for name, value in pairs:
        beginning = name + " " * (indent - cell_len(name))
        for line in folded(value, max(FOLDED_COLUMNS_MIN, width - indent)):
            yield f"{beginning}{line}".rstrip()
            beginning = " " * indent


def folded(text: str, width: int) -> list[str]:
    """The text in lines of at most this width: broken at spaces where there are any, and whole again when joined."""
    lines: list[str] = []
    rest = text
    while cell_len(rest) > width:
        head = chop_cells(rest, width)[0]
        space = head.rfind(" ")
        cut = space + 1 if space > 0 else len(head)
        lines.append(rest[:cut])
        rest = rest[cut:]
    return [*lines, rest]


def _records(table: Table, width: int) -> Iterator[str]:
    if table.title:
        yield from (str(table.title), "")
    names = [str(column.header) for column in table.columns]
    rows: Iterable[tuple[object, ...]] = zip(*(column.cells for column in table.columns), strict=True)
    for row in rows:
        pairs = [(name, str(cell)) for name, cell in zip(names, row, strict=True) if str(cell) != NOTHING]
        yield from record(pairs, width)
        yield ""
