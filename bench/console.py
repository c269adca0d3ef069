"""The console's pages with many letters, and what open tabs cost the server.

The real server over SQLite; pages are asked for one after the other, as a browser that is signed in does. Every page
that the bar leads to is measured, and of every other one the first that a link is found to.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import NamedTuple

import httpx2
from msgspec.structs import replace

from bench.served import TOKEN, Server, Side
from bench.vault import ACT, letter
from holdfast.core.letter import Fingerprint
from holdfast.core.plan import PlanOptions
from holdfast.core.requests.declare import Caller, Role
from holdfast.core.selection import Selection
from holdfast.faces.web.console import PAGES
from holdfast.services.queue.queues import Queues
from holdfast.settings import Settings, StorageSettings
from holdfast.wiring import SystemClock, open_service, open_vault_app

ROOT = Path(__file__).parents[1]
ADMIN = Caller(name="bench", role=Role.ADMIN, origin="bench")
GROUPS, GROUPS_FEW = 1_000, 50
LETTERS, LETTERS_FEW = 100_000, 1_000
BATCH = 1_000
HOURS = 24
QUEUES = 7
LOOKS = 15
TABS = 50
PRODUCERS = 8
MEDIAN_MS_MAX, MEDIAN_MS_AIM = 150.0, 60.0
RATIO_MAX = 2.0
#: A page that is so quick may grow more than that.
QUICK_MS = 15.0
TABS_CORE_MAX = 0.15
SLOWER_MAX = 0.05
LINK = re.compile(r'href="(/[^"#]*)"')
HTML = {"accept": "text/html"}


class EarlierClock(SystemClock):
    """The system's, set back."""

    back_us = 0

    def now_us(self) -> int:
        return super().now_us() - self.back_us


async def fill(folder: Path, letters: int, groups: int) -> None:
    """A folder for `holdfast serve`: queues with dead queues, letters of a day, and a redrive that is paused."""
    url, clock = f"sqlite:///{folder}/data", EarlierClock()
    settings = Settings(storages=(StorageSettings(name="default", url=url),), data_folder=folder)
    async with open_service({"default": url}) as service:
        queues = Queues(service)
        for number in range(QUEUES):
            await queues.queues_create(f"orders{number}.dlq")
            await queues.queues_create(f"orders{number}", dead_queue=f"orders{number}.dlq", max_attempts=3)
        async with open_vault_app(settings, queues, clock=clock) as app:
            batches = range(0, letters, BATCH)
            for place, start in enumerate(batches):
                clock.back_us = (len(batches) - 1 - place) * HOURS * 3_600_000_000 // len(batches)
                batch = []
                for number in range(start, min(start + BATCH, letters)):
                    made, cause = letter(number), random.Random(number).randrange(groups)
                    death = replace(made.death, first_at_us=clock.now_us(), last_at_us=clock.now_us())
                    group = Fingerprint(f"{cause:032x}", f"Cause {cause}: {made.death.error_type}")
                    batch.append(replace(made, death=death, origin="queue", group=group.key, group_title=group.title))
                stored = await app.vault.letters.put(batch, ACT)
                await app.vault.letters.acking([one.letter for one in stored])
            clock.back_us = 0
            wish = PlanOptions(selection=Selection(ids=tuple(range(1, 201))))
            plan = await app.planner.plan(wish, ADMIN)
            task, _ = await app.planner.execute(plan.hash, ADMIN, ACT, name="the first two hundred")
            await app.redrives.change(task.id, "pause", ACT)


class Console:
    """A server with its console, and a browser that is signed in."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.browser = httpx2.Client(base_url=server.address, headers=HTML, timeout=60, trust_env=False)
        self.browser.post("/sign-in", data={"token": TOKEN})

    def places(self) -> list[str]:
        """One path for every page that is found."""
        names = sorted((one.path for one in PAGES if one.method == "GET"), key=lambda path: "{" in path)
        patterns = {path: re.compile(re.sub(r"{\w+(:any)?}", "[^?]+", path)) for path in names}
        found = {one.path: one.path for one in PAGES if one.bar and one.method == "GET"}
        waiting = list(found.values())
        while waiting:
            text = self.browser.get(waiting.pop(0)).text
            for link in map(unescape, LINK.findall(text)):
                path = link.partition("?")[0]
                place = next((one for one, pattern in patterns.items() if pattern.fullmatch(path)), "")
                if place and place not in found:
                    found[place] = link
                    waiting.append(link)
        return list(found.values())

    def median_ms(self, path: str) -> float:
        """From the question to the last byte."""
        times = []
        for _ in range(LOOKS):
            began = time.perf_counter()
            answer = self.browser.get(path)
            times.append(time.perf_counter() - began)
            if answer.status_code != 200:
                raise RuntimeError(f"{path}: {answer.status_code}")
        return round(statistics.median(times) * 1000, 1)


@contextmanager
def consoles(letters: int, groups: int) -> Iterator[Console]:
    """A server over so many letters."""
    with tempfile.TemporaryDirectory(prefix="holdfast-console-") as temporary:
        folder = Path(temporary)
        asyncio.run(fill(folder, letters, groups))
        with Side("console", ROOT).serving(f"sqlite:///{folder}/data", folder) as server:
            yield Console(server)


def pages(console: Console) -> dict[str, float]:
    """By the page's place, without what differs from vault to vault."""
    return {re.sub(r"[0-9a-f]{16,64}|(?<=/)\d+", "…", path): console.median_ms(path) for path in console.places()}


# --- open tabs ------------------------------------------------------------------------------------------------


class Load(NamedTuple):
    """What a server did for a while: items a second, and of how much of a core."""

    rate: float
    core: float


async def _tab(browser: httpx2.AsyncClient, path: str) -> None:
    """As the page's script does: listens, and reads the page anew when it is told to."""
    async with browser.stream("GET", "/live") as news:
        async for line in news.aiter_lines():
            if line.startswith("event: changed"):
                await browser.get(path)


async def _measured(server: Server, seconds: float, *, tabs: int, producers: int, path: str) -> Load:
    """One item dies every half second, so that there is news."""
    limits = httpx2.Limits(max_connections=2 * TABS + 2 * PRODUCERS)
    made = 0
    async with (
        httpx2.AsyncClient(
            base_url=server.address, headers=HTML, timeout=60, trust_env=False, limits=limits
        ) as browser,
        httpx2.AsyncClient(
            base_url=server.address, headers={"authorization": f"Bearer {TOKEN}"}, timeout=60, trust_env=False
        ) as client,
    ):
        await browser.post("/sign-in", data={"token": TOKEN})

        async def produce(queue: str, pause_s: float = 0.0) -> None:
            nonlocal made
            body = {"queue_name": queue, "request_timeout": "10s", "items": [{"utf8": "x" * 512}]}
            while True:
                answer = await client.post("/v1/queue.produce", json=body)
                if answer.status_code != 200:
                    raise RuntimeError(answer.text)
                made += not pause_s
                await asyncio.sleep(pause_s)

        tasks = [asyncio.create_task(_tab(browser, path)) for _ in range(tabs)]
        tasks += [asyncio.create_task(produce("orders0.dlq", 0.5))]
        tasks += [asyncio.create_task(produce("orders1")) for _ in range(producers)]
        await asyncio.sleep(2.0)
        before_s, before, began_s = server.cpu_s, made, time.perf_counter()
        await asyncio.sleep(seconds)
        took_s = time.perf_counter() - began_s
        load = Load((made - before) / took_s, (server.cpu_s - before_s) / took_s)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for failed in [one for one in ended if isinstance(one, Exception)]:
            raise failed
        return load


def tabs_cost(console: Console, *, rounds: int, seconds: float, path: str = "/") -> dict[str, float]:
    """Medians of paired rounds."""
    server = console.server
    server.ask("POST", "/admin/captures", {"queue": "orders0.dlq", "continuous": True})
    cores, slower = [], []
    for _ in range(rounds):
        quiet = asyncio.run(_measured(server, seconds, tabs=0, producers=0, path=path))
        open_tabs = asyncio.run(_measured(server, seconds, tabs=TABS, producers=0, path=path))
        alone = asyncio.run(_measured(server, seconds, tabs=0, producers=PRODUCERS, path=path))
        beside = asyncio.run(_measured(server, seconds, tabs=TABS, producers=PRODUCERS, path=path))
        cores.append(open_tabs.core - quiet.core)
        slower.append(1 - beside.rate / alone.rate)
    return {"core": round(statistics.median(cores), 3), "produce_slower": round(statistics.median(slower), 3)}


def main(*, rounds: int = 3, quick: bool = False) -> bool:
    """For `make bench`."""
    with consoles(LETTERS_FEW, GROUPS_FEW) as console:
        few = pages(console)
    with consoles(LETTERS // 10 if quick else LETTERS, GROUPS) as console:
        many = pages(console)
        cost = tabs_cost(console, rounds=min(rounds, 3), seconds=5.0 if quick else 10.0)
    print("\nconsole: a page's median in ms, with few letters and with many")
    met = True
    for path, value in sorted(many.items(), key=lambda item: -item[1]):
        ratio = round(value / few[path], 2) if path in few else None
        is_slow = value > MEDIAN_MS_MAX or (ratio is not None and ratio > RATIO_MAX and value > QUICK_MS)
        met &= not is_slow
        verdict = "MISSED" if is_slow else "aim met" if value <= MEDIAN_MS_AIM else "must met"
        print(f"  {path:48} {few.get(path, 0.0):>8} {value:>8}  ratio {ratio}: {verdict}")
    is_dear = cost["core"] > TABS_CORE_MAX or cost["produce_slower"] > SLOWER_MAX
    print(f"  {TABS} tabs: {cost['core']:.1%} of a core, queue.produce {cost['produce_slower']:.1%} slower"
          f"{': MISSED' if is_dear else ': must met'}")  # fmt: skip
    print(json.dumps({"bench": "console", "few_ms": few, "many_ms": many, "tabs": cost}))
    return met and not is_dear


def serve_kept() -> None:
    """From a shell: a folder that is filled and kept, for `holdfast serve`."""
    parser = argparse.ArgumentParser(prog="python -m bench.console", description=__doc__)
    parser.add_argument("--letters", type=int, default=LETTERS)
    parser.add_argument("--groups", type=int, default=GROUPS)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    asyncio.run(fill(options.folder.absolute(), options.letters, options.groups))


if __name__ == "__main__":
    serve_kept()
