"""Where results go: JSON for programs, texts and tables for people. Progress and notes go to stderr.

On a terminal long text folds, ids and keys stay whole, and nothing vanishes. A table that does not fit even so becomes
records, one `name  value` a line. What is piped is neither cut nor padded.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import compress

import msgspec
import typer
from rich import box
from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.core.moments import format_duration, written_duration

#: A column of text may become this narrow before the table becomes records; a date fits.
FOLDED_COLUMNS_MIN = 10
GAP_COLUMNS = 2
NOTHING = "-"
#: Wide enough for every table: what is piped into a file or another program is never cut.
PIPE_COLUMNS = 10_000
PREVIEW_CHARACTERS_MAX = 60
INDENT = "  "
#: What other commands ask for: never folded.
WHOLE = ("id", "key", "transaction")

_encoder = msgspec.json.Encoder()
_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.\d+)?Z")


def one_line(text: str) -> str:
    """The text without anything that could move the cursor or look like another line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


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


class Output:
    """stdout as JSON or for people."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.people = console()

    def document(self, value: object) -> None:
        """One JSON document, or one line of JSON Lines; nothing for people."""
        if self.as_json:
            sys.stdout.buffer.write(_encoder.encode(value) + b"\n")
            sys.stdout.buffer.flush()

    def documents(self, values: Iterable[object]) -> None:
        """JSON Lines; nothing for people."""
        if self.as_json:
            sys.stdout.buffer.write(_encoder.encode_lines(values))
            sys.stdout.buffer.flush()

    def announce(self, text: str) -> None:
        """What a program that goes on has begun, as it stands; as JSON one line."""
        self.document({"announcement": text})
        if not self.as_json:
            typer.echo(text)

    def say(self, text: str) -> None:
        """A sentence for people; nothing as JSON."""
        if not self.as_json:
            self.people.print(Text(one_line(text)), soft_wrap=True)

    def show(self, table: Table) -> None:
        """A table for people; nothing as JSON."""
        if not self.as_json:
            print_table(table, self.people, piped=not sys.stdout.isatty())

    def record(self, pairs: Sequence[tuple[str, object]]) -> None:
        """`name  value` lines for people; nothing as JSON."""
        if not self.as_json:
            self._lines(record([(name, shown(value)) for name, value in pairs], self.people.width))

    def block(self, title: str, lines: Iterable[str]) -> None:
        """Text of several lines below its title, for people; nothing as JSON."""
        if not self.as_json:
            parts = [part for line in lines for part in folded(one_line(line), self.people.width - len(INDENT))]
            self._lines(["", title, *(f"{INDENT}{part}" for part in parts)])

    def _lines(self, lines: Iterable[str]) -> None:
        self.people.print(Text("\n".join(lines)), soft_wrap=True)

    def note(self, text: str) -> None:
        """A remark on stderr, for people alone."""
        if not self.as_json:
            typer.echo(one_line(text), err=True)


class _Console(Console):
    """One that leaves it to the command what a reader who is gone means."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or wide enough when there is none."""
    stream = sys.stderr if stderr else sys.stdout
    return _Console(file=stream, width=None if stream.isatty() else PIPE_COLUMNS, highlight=False, markup=False)


def forget_stdout() -> None:
    """The reader (`| head`) is gone or the disk is full: Python must not try to write the rest when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    title: str = "",
    whole: Collection[str] = WHOLE,
    with_empty: bool = False,
) -> Table:
    """A table of these rows, without the columns in which nothing stands, or `with_empty` ones too.

    A column that begins with `#` holds numbers or durations and is right-aligned. On a narrow terminal numbers and the
    `whole` columns stay as they are; the others fold.
    """
    texts = [[shown(cell) for cell in row] for row in rows]
    is_kept = [with_empty or not rows or any(row[index] != NOTHING for row in texts) for index in range(len(columns))]
    made = Table(
        box=box.SIMPLE_HEAD,
        title=Text(one_line(title), style="bold") if title else None,
        title_justify="left",
        pad_edge=False,
        collapse_padding=True,
    )
    for column in compress(columns, is_kept):
        name = column.removeprefix("#")
        is_number = column.startswith("#")
        made.add_column(
            name,
            justify="right" if is_number else "left",
            no_wrap=is_number or name in whole,
            overflow="fold",
        )
    for row in texts:
        made.add_row(*map(Text, compress(row, is_kept)))
    return made


def add_row(to: Table, *cells: object, style: str = "") -> None:
    """Add a row; texts are made harmless for a terminal first."""
    to.add_row(*(Text(shown(cell)) for cell in cells), style=style or None)


def shown(value: object) -> str:
    """A value in a table: numbers with thin groups, moments in UTC to the second, nothing as a dash."""
    match value:
        case None | "":
            return NOTHING
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}".replace(",", " ")
        case datetime():
            return value.strftime("%Y-%m-%d %H:%M:%SZ")
        case bytes():
            return preview(value)
        case str() if moment := _MOMENT.fullmatch(value):  # as a server writes it
            return f"{moment[1]} {moment[2]}Z"
    return one_line(str(value))


def preview(payload: bytes) -> str:
    """The beginning of a payload: its text, or its size and first bytes when it is none."""
    head = payload[: PREVIEW_CHARACTERS_MAX * 4]
    try:
        text = head.decode("utf-8", "strict" if len(head) == len(payload) else "ignore")
    except UnicodeDecodeError:
        return f"{len(payload)} bytes: {payload[:16].hex(' ')}{'…' if len(payload) > 16 else ''}"
    text = one_line(text)
    return text if len(text) <= PREVIEW_CHARACTERS_MAX else text[:PREVIEW_CHARACTERS_MAX] + "…"


def readable(duration: str) -> str:
    """A measured duration, rounded to what a person reads: `35ms`, `1.5s`, `2h3m4s`."""
    duration_us = written_duration(duration)
    step_us = 1_000 if duration_us < 1_000_000 else 100_000 if duration_us < 60_000_000 else 1_000_000
    return format_duration(round(duration_us / step_us) * step_us) if duration_us else NOTHING


def short(duration: str) -> str:
    """A duration that somebody set, as people write it: `1h`, where an answer says `1h0m0s`."""
    return format_duration(written_duration(duration)) if duration else ""


def plural(count: int, noun: str) -> str:
    """`1 item`, `2 000 items`."""
    return f"{shown(count)} {noun}" if count == 1 else f"{shown(count)} {noun}s"
