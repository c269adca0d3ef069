"""Many items in few statements.

Python's lock is let go and taken again for every statement, not for every row: beside a busy event loop each taking is
a wait, and a row of its own each time made a commit of thousands of items mostly that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import apsw

from holdfast.engines.sqlite.connection import SQL

if TYPE_CHECKING:
    from holdfast.core.item import NewItem

#: So many rows have a statement of their own, which stays compiled; any number is a sum of few of these.
ROWS_COUNTS = (500, 200, 100, 50, 20, 10, 5, 2, 1)


def insert_items(connection: apsw.Connection, first_row_id: int, items: Sequence[NewItem]) -> None:
    """Insert items that have no story, under row ids that rise by one."""
    if len(items) == 1:
        (one,) = items
        connection.execute(SQL["insert_item"], (first_row_id, one.kind, one.encoding, one.reference, one.payload))
        return
    for item in items:
        if item.kind or item.encoding or item.reference:
            _insert_whole(connection, first_row_id, items)
            return
    # Payloads alone are one array, bound as one value: a single statement, however many there are.
    payloads = apsw.carray(tuple([item.payload for item in items]))
    connection.execute(SQL["insert_bare_items"], (first_row_id, payloads))


def _insert_whole(connection: apsw.Connection, first_row_id: int, items: Sequence[NewItem]) -> None:
    position, left = 0, len(items)
    for count in ROWS_COUNTS:
        while left >= count:
            values: list[int | str | bytes] = [first_row_id + position]
            for item in items[position : position + count]:
                values += (item.kind, item.encoding, item.reference, item.payload)
            connection.execute(_whole(count), values)
            position += count
            left -= count


@cache
def _whole(count: int) -> str:
    return SQL["insert_items"] + ",".join(f"(?1+{n},?,?,?,?)" for n in range(count))
