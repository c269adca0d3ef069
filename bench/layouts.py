"""Compare SQLite layouts and modules for one durable queue file, in one interleaved run.

    python bench/layouts.py --quick          about two minutes: what `make bench` runs
    python bench/layouts.py                  1k, 100k and 1M items standing: the figures of docs/adr/0009
    python bench/layouts.py --only S4/apsw,done=json --only S4/apsw --base S4/apsw --depth 100000

Every cell is a bare store loop in one thread: WAL, synchronous=FULL, BEGIN IMMEDIATE, payload 512 B, a commit
for each produce, lease and complete. A round runs all cells once, shuffled; ratios are taken within a round.

All layouts have the same counters row per partition and the same unique partial indexes.
    S1   one items table, state in columns, partial indexes
    S2   append log, cursor, narrow lease table      S2e  the same with an index on log(expire_at)
    S3   S2e clustered by (partition, seq) WITHOUT ROWID
    S4   items written once, and one narrow table per state: ready, leases

Options of a variant, after its name: any of PRAGMAS, parts (partitions in use), and the shape of the SQL for
many rows: in S4, fill (the ready table) and take (the lease table) = many | select; in all but S3, done (the
deletes) = many | json | carray (apsw only).
"""

from __future__ import annotations

import argparse
import array
import functools
import itertools
import json
import os
import random
import shutil
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

try:
    import apsw
except ImportError:  # the modules are then not compared, the layouts still are
    HAS_APSW = False
else:
    HAS_APSW = True

SEQ_BITS = 53
SEQ_MASK = (1 << SEQ_BITS) - 1
LEASE_US = 60_000_000
EXPIRE_US = 86_400_000_000
PAYLOADS = [os.urandom(512) for _ in range(64)]
PRAGMAS = {"page_size": "4096", "journal_mode": "wal", "synchronous": "full", "locking_mode": "normal"}
PRAGMAS |= {"secure_delete": "off", "wal_autocheckpoint": "1000", "cache_size": "-16384"}
DEFAULTS = PRAGMAS | {"parts": "1", "fill": "select", "take": "select", "done": "json"}

COUNTERS = """create table counters(partition integer primary key, queued integer not null,
  leased integer not null, last_id integer not null);"""
COUNT = "update counters set queued = queued + ?, leased = leased + ?, last_id = ? where partition = ?"
BODY = "kind text, encoding text, reference text, payload blob not null, dedupe_key text, source_id text"
BODY_NAMES = "kind, encoding, reference, payload, dedupe_key, source_id"
TIMES = "created_at integer not null, expire_at integer not null, attempts integer not null"
UNIQUE = """create unique index by_dedupe_key on {0}(dedupe_key) where dedupe_key is not null;
create unique index by_source_id on {0}(source_id) where source_id is not null;"""
DEATH = "source_queue text, death_reason text, death_attempts integer, died_at integer, dying_to text"
LOG_LEASES = "lease_deadline integer not null, attempts integer not null"

Row = tuple[Any, ...]


def connect(module: str, path: Path) -> Any:
    """Both modules answer `execute(sql, args).fetchall()` and `executemany` on the connection."""
    if module == "apsw":
        return apsw.Connection(str(path), statementcachesize=128)
    return sqlite3.connect(path, isolation_level=None, cached_statements=128)


class Store:
    """One file of one layout, opened by one module."""

    schema = ""
    insert_sql = ""
    tables: tuple[str, ...] = ()

    def __init__(self, path: Path, module: str, options: dict[str, str]) -> None:
        self.module = module
        self.fill, self.take, self.done = options["fill"], options["take"], options["done"]
        self.conn = connect(module, path)
        self.execute, self.many = self.conn.execute, self.conn.executemany
        for name in PRAGMAS:
            self.rows(f"pragma {name}={options[name]}")
        self.partitions = range(int(options["parts"]))
        if not self.rows("select 1 from sqlite_schema"):
            for statement in (COUNTERS + self.schema).split(";"):
                self.execute(statement)
            self.many("insert into counters values (?, 0, 0, 0)", [(p,) for p in self.partitions])
        self.last = {row[0]: row[1] for row in self.rows("select partition, last_id from counters")}

    # One transaction each; the caller's loop is produce, lease, complete.
    def produce(self, partition: int, count: int) -> None:
        now = time.time_ns() // 1000
        first = max(now | partition << SEQ_BITS, self.last[partition] + 1)
        self.execute("begin immediate")
        self.insert(range(first, first + count), now)
        self.commit(partition, count, 0, first + count - 1)

    def lease(self, partition: int, count: int) -> list[Row]:
        self.execute("begin immediate")
        rows = self.pick(partition, count, time.time_ns() // 1000)
        self.commit(partition, -len(rows), len(rows), self.last[partition])
        return rows

    def complete(self, partition: int, ids: list[int]) -> None:
        self.execute("begin immediate")
        self.remove(ids)
        self.commit(partition, 0, -len(ids), self.last[partition])

    def commit(self, partition: int, queued: int, leased: int, last: int) -> None:
        self.execute(COUNT, (queued, leased, last, partition))
        self.execute("commit")
        self.last[partition] = last

    def insert(self, ids: range, now: int) -> None:
        self.many(self.insert_sql, [(i, now, now + EXPIRE_US, *body(i)) for i in ids])

    def pick(self, partition: int, count: int, now: int) -> list[Row]:
        raise NotImplementedError

    def remove(self, ids: list[int]) -> None:
        for table in self.tables:
            self.delete(table, ids)

    def rows(self, sql: str, args: Row = ()) -> list[Row]:
        return self.execute(sql, args).fetchall()  # type: ignore[no-any-return]

    def delete(self, table: str, ids: list[int], where: str = "") -> None:
        """Delete exactly these; a row that is not there would be a stale lease, so the count is checked."""
        before = self.changes()
        if self.done == "many" or len(ids) == 1:
            self.many(f"delete from {table} where id = ? {where}", [(i,) for i in ids])
        else:
            value = apsw.carray(array.array("q", ids)) if self.done == "carray" else json.dumps(ids)
            source = "carray" if self.done == "carray" else "json_each"
            self.execute(f"delete from {table} where id in (select value from {source}(?)) {where}", (value,))
        if self.changes() - before != len(ids):
            raise RuntimeError(f"{table}: not every id was there")

    def changes(self) -> int:
        return int(self.conn.total_changes() if self.module == "apsw" else self.conn.total_changes)


def body(i: int) -> Row:
    return ("order", "json", "ref", PAYLOADS[i & 63], None, None)


def bounds(partition: int) -> tuple[int, int]:
    return partition << SEQ_BITS, partition << SEQ_BITS | SEQ_MASK


class OneTable(Store):
    schema = f"""create table items(id integer primary key, lease_deadline integer, {TIMES}, {BODY}, {DEATH});
create index ready on items(id) where lease_deadline is null;
create index ready_expire on items(expire_at) where lease_deadline is null;
create index lease_deadline on items(lease_deadline) where lease_deadline is not null;
{UNIQUE.format("items")}"""
    insert_sql = f"""insert into items(id, created_at, expire_at, {BODY_NAMES}, attempts)
values (?, ?, ?, ?, ?, ?, ?, ?, ?, 0)"""
    pick_sql = """select id, kind, encoding, reference, payload, attempts from items indexed by ready
where lease_deadline is null and id between ? and ? order by id limit ?"""
    lease_sql = """update items set lease_deadline = ?, attempts = attempts + 1
where lease_deadline is null and id between ? and ?"""

    def pick(self, partition: int, count: int, now: int) -> list[Row]:
        rows = self.rows(self.pick_sql, (*bounds(partition), count))
        self.execute(self.lease_sql, (now + LEASE_US, rows[0][0], rows[-1][0]))
        return rows

    def remove(self, ids: list[int]) -> None:
        self.delete("items", ids, "and lease_deadline is not null")


class Log(Store):
    tables = ("leases", "log")
    schema = f"""create table log(id integer primary key, {TIMES}, {BODY}, {DEATH});
create table leases(id integer primary key, {LOG_LEASES});
create index lease_deadline on leases(lease_deadline);
create table cursor(partition integer primary key, id integer not null);
{UNIQUE.format("log")}"""
    insert_sql = OneTable.insert_sql.replace("items", "log")
    pick_sql = """select id, kind, encoding, reference, payload, attempts from log
where id between ? and ? order by id limit ?"""
    lease_sql = "insert into leases select id, ?, attempts + 1 from log where id between ? and ?"

    def pick(self, partition: int, count: int, now: int) -> list[Row]:
        low, high = bounds(partition)
        for (cursor,) in self.rows("select id from cursor where partition = ?", (partition,)):
            low = cursor + 1
        rows = self.rows(self.pick_sql, (low, high, count))
        self.execute(self.lease_sql, (now + LEASE_US, rows[0][0], rows[-1][0]))
        self.execute("replace into cursor values (?, ?)", (partition, rows[-1][0]))
        return rows


class LogExpire(Log):
    schema = Log.schema + "create index log_expire on log(expire_at);"


class LogClustered(Store):
    tables = ("leases", "log")
    schema = f"""create table log(partition integer, seq integer, {TIMES}, {BODY}, {DEATH},
  primary key (partition, seq)) without rowid;
create table leases(partition integer, seq integer, {LOG_LEASES}, primary key (partition, seq)) without rowid;
create index lease_deadline on leases(lease_deadline);
create index log_expire on log(expire_at);
create table cursor(partition integer primary key, seq integer not null);
{UNIQUE.format("log")}"""
    insert_sql = f"""insert into log(partition, seq, created_at, expire_at, {BODY_NAMES}, attempts)
values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)"""
    pick_sql = """select partition << 53 | seq, kind, encoding, reference, payload, attempts, seq from log
where partition = ? and seq > ? order by seq limit ?"""
    lease_sql = """insert into leases select partition, seq, ?, attempts + 1 from log
where partition = ? and seq between ? and ?"""

    def insert(self, ids: range, now: int) -> None:
        times = (now, now + EXPIRE_US)
        self.many(self.insert_sql, [(i >> SEQ_BITS, i & SEQ_MASK, *times, *body(i)) for i in ids])

    def pick(self, partition: int, count: int, now: int) -> list[Row]:
        found = self.rows("select seq from cursor where partition = ?", (partition,))
        rows = self.rows(self.pick_sql, (partition, found[0][0] if found else 0, count))
        self.execute(self.lease_sql, (now + LEASE_US, partition, rows[0][6], rows[-1][6]))
        self.execute("replace into cursor values (?, ?)", (partition, rows[-1][6]))
        return rows

    def remove(self, ids: list[int]) -> None:
        keys = [(i >> SEQ_BITS, i & SEQ_MASK) for i in ids]
        for table in self.tables:
            self.many(f"delete from {table} where partition = ? and seq = ?", keys)


class ReadyTable(Store):
    tables = ("leases", "items")
    schema = f"""create table items(id integer primary key, {BODY}, {DEATH});
create table ready(id integer primary key, {TIMES});
create index ready_expire on ready(expire_at);
create table leases(id integer primary key, {TIMES},
  leased_at integer not null, lease_deadline integer not null);
create index lease_deadline on leases(lease_deadline);
{UNIQUE.format("items")}"""
    insert_sql = f"insert into items(id, {BODY_NAMES}) values (?, ?, ?, ?, ?, ?, ?)"
    ready_sql = "insert into ready select id, ?, ?, 0 from items where id between ? and ?"
    pick_sql = """select i.id, i.kind, i.encoding, i.reference, i.payload,
  r.attempts, r.created_at, r.expire_at from ready r cross join items i on i.id = r.id
where r.id between ? and ? order by r.id limit ?"""
    lease_sql = """insert into leases select id, created_at, expire_at, attempts + 1, ?, ?
from ready where id between ? and ?"""

    def insert(self, ids: range, now: int) -> None:
        self.many(self.insert_sql, [(i, *body(i)) for i in ids])
        if self.fill == "select":
            self.execute(self.ready_sql, (now, now + EXPIRE_US, ids[0], ids[-1]))
        else:
            self.many("insert into ready values (?, ?, ?, 0)", [(i, now, now + EXPIRE_US) for i in ids])

    def pick(self, partition: int, count: int, now: int) -> list[Row]:
        rows = self.rows(self.pick_sql, (*bounds(partition), count))
        first, last, until = rows[0][0], rows[-1][0], now + LEASE_US
        if self.take == "select":
            self.execute(self.lease_sql, (now, until, first, last))
        else:
            leased = [(r[0], r[6], r[7], r[5] + 1, now, until) for r in rows]
            self.many("insert into leases values (?, ?, ?, ?, ?, ?)", leased)
        self.execute("delete from ready where id between ? and ?", (first, last))
        return rows


LAYOUTS = {"S1": OneTable, "S2": Log, "S2e": LogExpire, "S3": LogClustered, "S4": ReadyTable}


@dataclass
class Cell:
    """One variant at one depth and batch size, and what its rounds gave."""

    variant: str
    depth: int
    batch: int
    store: Store
    rates: list[float] = field(default_factory=list)
    cycles_ms: list[float] = field(default_factory=list)

    def run(self, cycles: int) -> None:
        """Time `cycles` cycles after two that warm up."""
        clock, store, parts = time.perf_counter, self.store, len(self.store.partitions)
        marks = []
        for n in range(cycles + 3):
            marks.append(clock())
            partition = n % parts
            store.produce(partition, self.batch)
            rows = store.lease(partition, self.batch)
            store.complete(partition, [row[0] for row in rows])
        marks = marks[2:]
        self.rates.append(cycles * self.batch / (marks[-1] - marks[0]))
        self.cycles_ms += [1000 * (b - a) for a, b in itertools.pairwise(marks)]


class Files:
    """Files filled to a depth, made once per layout and copied for each variant."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made = 0

    @functools.cache  # noqa: B019 - lives as long as the run
    def template(self, layout: str, page_size: str, parts: str, depth: int) -> Path:
        path = self.folder / f"template-{layout}-{page_size}-{parts}-{depth}"
        options = DEFAULTS | {"page_size": page_size, "parts": parts, "synchronous": "off"}
        store = LAYOUTS[layout](path, "sqlite3", options)
        for n in range(depth // 200):  # in turns, as partitions fill in use
            store.produce(n % int(parts), 200)
        store.conn.close()
        return path

    def open(self, variant: str, depth: int) -> Store:
        name, *pairs = variant.split(",")
        layout, module = name.split("/")
        options = DEFAULTS | dict(pair.split("=") for pair in pairs)
        self.made += 1
        path = self.folder / f"{self.made}.db"
        shutil.copyfile(self.template(layout, options["page_size"], options["parts"], depth), path)
        return LAYOUTS[layout](path, module, options)


def spread(values: list[float], form: Callable[[float], str]) -> str:
    return f"{form(statistics.median(values))} [{form(min(values))}..{form(max(values))}]"


def report(cells: list[Cell], base: str | None, rounds: int) -> None:
    """A Markdown table (p50, p99 of a cycle in ms), then one JSON line."""
    by_key = {(c.variant, c.depth, c.batch): c for c in cells}
    shallow = min(c.depth for c in cells)
    print(f"| variant | depth | batch | items/s | / {base or 'S2e'} | / {shallow:,} | / sqlite3 | p50, p99 |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    results = []
    for c in sorted(cells, key=lambda c: (-c.batch, c.depth)):
        rate, cuts = round(statistics.median(c.rates)), statistics.quantiles(c.cycles_ms, n=100)
        result: dict[str, Any] = {"variant": c.variant, "depth": c.depth, "batch": c.batch, "per_s": rate}
        texts = [c.variant, f"{c.depth:,}", str(c.batch), spread(c.rates, "{:,.0f}".format)]
        layout, rest = c.variant.split("/")
        others = {"base": (base or f"S2e/{rest}", c.depth), "shallow": (c.variant, shallow)}
        others["sqlite3"] = (f"{layout}/{rest.replace('apsw', 'sqlite3')}", c.depth)
        for name, key in others.items():
            other = by_key.get((*key, c.batch), c)
            ratios = [a / b for a, b in zip(c.rates, other.rates, strict=True)]
            texts.append("-" if other is c else spread(ratios, "{:.2f}".format))
            result[f"against_{name}"] = None if other is c else round(statistics.median(ratios), 3)
        print("| " + " | ".join([*texts, f"{cuts[49]:.2f}, {cuts[98]:.2f}"]) + " |")
        results.append(result | {"p50_ms": round(cuts[49], 3), "p99_ms": round(cuts[98], 3)})
    versions = {"sqlite3": sqlite3.sqlite_version, "apsw": apsw.sqlite_lib_version() if HAS_APSW else None}
    print(json.dumps({"bench": "layouts", "rounds": rounds, **versions, "cells": results}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="depths 1k and 20k, 5 rounds")
    parser.add_argument("--only", action="append", metavar="VARIANT", help="run these variants (repeatable)")
    parser.add_argument("--depth", action="append", type=int, help="items standing in the file (repeatable)")
    parser.add_argument("--base", metavar="VARIANT", help="what ratios are taken against; S2e if left out")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--cycles", type=int, default=200, help="cycles of 100 per round and cell")
    parser.add_argument("--folder", help="where the files are made; the disk that is measured")
    args = parser.parse_args()
    rounds = args.rounds or (5 if args.quick else 7)
    depths = args.depth or ([1_000, 20_000] if args.quick else [1_000, 100_000, 1_000_000])
    modules = ["sqlite3", "apsw"] if HAS_APSW else ["sqlite3"]
    grid = [f"{layout}/{module}" for layout in LAYOUTS for module in modules]
    variants = args.only or [*grid, f"S2e/{modules[-1]},parts=10", f"S4/{modules[-1]},parts=10"]
    with tempfile.TemporaryDirectory(prefix="layouts-", dir=args.folder) as folder:
        files = Files(Path(folder))
        cells = []
        for depth in depths:
            for variant in variants:
                store = files.open(variant, depth)
                cells += [Cell(variant, depth, batch, store) for batch in (100, 1)]
        os.sync()
        for _ in range(rounds):
            for cell in random.sample(cells, len(cells)):
                cell.run(args.cycles)
        report(cells, args.base, rounds)


if __name__ == "__main__":
    main()
