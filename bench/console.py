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
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from html import unescape
from pathlib import Path
from typing import NamedTuple

import httpx2
import uvloop
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
WARM_S = 1.5
MEDIAN_MS_MAX, MEDIAN_MS_AIM = 150.0, 60.0
RATIO_MAX = 2.0
#: A page that is so quick may grow more than that.
QUICK_MS = 15.0
TABS_CORE_MAX = 0.15
SLOWER_MAX = 0.05
#: The balance counts letters one by one, which is what it is for: it grows with them, and has to be quick all the same.
GROWS = frozenset({"/ledger/balance"})
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

    def places(self) -> dict[str, str]:
        """One path for every page that is found, by the place that it is declared with."""
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
        return found

    def took_ms(self, path: str) -> float:
        """From the question to the last byte."""
        began = time.perf_counter()
        answer = self.browser.get(path)
        took_ms = (time.perf_counter() - began) * 1000
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: {answer.status_code}")
        return took_ms


@contextmanager
def consoles(letters: int, groups: int) -> Iterator[Console]:
    """A server over so many letters."""
    with tempfile.TemporaryDirectory(prefix="holdfast-console-") as temporary:
        folder = Path(temporary)
        asyncio.run(fill(folder, letters, groups))
        with Side("console", ROOT).serving(f"sqlite:///{folder}/data", folder) as server:
            yield Console(server)


class PageTimes(NamedTuple):
    """Medians of one page; the ratio is that of questions that were asked one after the other."""

    few_ms: float
    many_ms: float
    ratio: float

    def verdict(self, place: str) -> str:
        """Whether it is quick enough, and grows no more than it may."""
        grows = self.ratio > RATIO_MAX and self.many_ms > QUICK_MS and place not in GROWS
        if self.many_ms > MEDIAN_MS_MAX or grows:
            return "MISSED"
        return "aim met" if self.many_ms <= MEDIAN_MS_AIM else "must met"


def pages(few: Console, many: Console) -> dict[str, PageTimes]:
    """By the page's place, without what differs from vault to vault."""
    places = few.places()
    found = {}
    for place, path in many.places().items():
        if place in places:
            pairs = [(few.took_ms(places[place]), many.took_ms(path)) for _ in range(LOOKS)]
            few_ms, many_ms = (round(statistics.median(times), 1) for times in zip(*pairs, strict=True))
            found[place] = PageTimes(few_ms, many_ms, round(statistics.median(b / a for a, b in pairs), 2))
    return found


# --- open tabs ------------------------------------------------------------------------------------------------


class Load(NamedTuple):
    """What a server did for a while: items a second, and of how much of a core."""

    rate: float
    core: float


async def _tab(address: str, cookie: str, path: str) -> None:
    """As the page's script does: listens, and reads the page anew when it is told to. By hand, as cheap as can be:
    it shares the machine with what is measured."""
    host, _, port = address.removeprefix("http://").partition(":")
    head = f" HTTP/1.1\r\nhost: {host}:{port}\r\naccept: text/html\r\ncookie: {cookie}\r\n\r\n"
    news, listen = await asyncio.open_connection(host, int(port), limit=1 << 20)
    page, ask = await asyncio.open_connection(host, int(port), limit=1 << 20)
    listen.write(f"GET /live{head}".encode())
    while line := await news.readline():
        if line.startswith(b"event: changed"):
            ask.write(f"GET {path}{head}".encode())
            answer = await page.readuntil(b"\r\n\r\n")
            if not answer.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(answer.decode())
            length = re.search(rb"(?i)content-length: (\d+)", answer)
            assert length is not None
            await page.readexactly(int(length[1]))


async def _tabs(address: str, cookie: str, path: str) -> None:
    """In a process of their own, until it is killed."""
    await asyncio.gather(*(_tab(address, cookie, path) for _ in range(TABS)))


@asynccontextmanager
async def open_tabs(console: Console, path: str) -> AsyncIterator[None]:
    """They have to be there at the end as well."""
    cookie = "; ".join(f"{name}={value}" for name, value in console.browser.cookies.items())
    argv = [sys.executable, "-m", "bench.console", "tabs", console.server.address, cookie, path]
    tabs = await asyncio.create_subprocess_exec(*argv, cwd=ROOT)
    try:
        await asyncio.sleep(WARM_S)
        yield
        if tabs.returncode is not None:
            raise RuntimeError("the tabs have ended")
    finally:
        with suppress(ProcessLookupError):
            tabs.kill()
        await tabs.wait()


class Producers:
    """Clients that produce one item after the other, while one dies every half second, so that there is news."""

    def __init__(self, server: Server, count: int) -> None:
        self._server = server
        self._count = count
        self._made = 0

    async def _produce(self, client: httpx2.AsyncClient, queue: str, pause_s: float = 0.0) -> None:
        body = {"queue_name": queue, "request_timeout": "10s", "items": [{"utf8": "x" * 512}]}
        while True:
            answer = await client.post("/v1/queue.produce", json=body)
            if answer.status_code != 200:
                raise RuntimeError(answer.text)
            self._made += not pause_s
            await asyncio.sleep(pause_s)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Until the end of this."""
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with (
            httpx2.AsyncClient(base_url=self._server.address, headers=headers, timeout=60, trust_env=False) as client,
            asyncio.TaskGroup() as group,
        ):
            tasks = [group.create_task(self._produce(client, "orders0.dlq", 0.5))]
            tasks += [group.create_task(self._produce(client, "orders1")) for _ in range(self._count)]
            yield
            for task in tasks:
                task.cancel()

    async def load(self, seconds: float) -> Load:
        """What was done in so many seconds."""
        before_s, before, began_s = self._server.cpu_s, self._made, time.perf_counter()
        await asyncio.sleep(seconds)
        took_s = time.perf_counter() - began_s
        return Load((self._made - before) / took_s, (self._server.cpu_s - before_s) / took_s)


async def _pairs(
    console: Console, *, producers: int, rounds: int, seconds: float, path: str
) -> list[tuple[Load, Load]]:
    """Without tabs and with them, in turn."""
    found = []
    clients = Producers(console.server, producers)
    async with clients.running():
        for _ in range(rounds):
            await asyncio.sleep(WARM_S)
            without = await clients.load(seconds)
            async with open_tabs(console, path):
                found.append((without, await clients.load(seconds)))
    return found


def tabs_cost(console: Console, *, rounds: int, seconds: float, path: str = "/") -> dict[str, float]:
    """Medians of paired rounds: of how much of a core, and by how much fewer items are produced."""
    console.server.ask("POST", "/admin/captures", {"queue": "orders0.dlq", "continuous": True})
    quiet = asyncio.run(_pairs(console, producers=0, rounds=3, seconds=seconds, path=path))
    busy = asyncio.run(_pairs(console, producers=PRODUCERS, rounds=2 * rounds, seconds=seconds, path=path))
    slower = sorted(1 - beside.rate / alone.rate for alone, beside in busy)
    print(f"  console: slower by {', '.join(f'{one:.1%}' for one in slower)}", file=sys.stderr)
    core = statistics.median(beside.core - alone.core for alone, beside in quiet)
    return {"core": round(core, 3), "produce_slower": round(statistics.median(slower), 3)}


def main(*, rounds: int = 5, quick: bool = False) -> bool:
    """For `make bench`."""
    count = LETTERS // 10 if quick else LETTERS
    with consoles(LETTERS_FEW, GROUPS_FEW) as few, consoles(count, GROUPS) as many:
        times = pages(few, many)
        cost = tabs_cost(many, rounds=rounds, seconds=2.0 if quick else 4.0)
    print(f"\nconsole: a page's median in ms, with {LETTERS_FEW} letters and with {count}")
    for place, one in sorted(times.items(), key=lambda item: -item[1].many_ms):
        print(f"  {place:34} {one.few_ms:>8} {one.many_ms:>8}  ratio {one.ratio:.2f}: {one.verdict(place)}")
    is_dear = cost["core"] > TABS_CORE_MAX or cost["produce_slower"] > SLOWER_MAX
    told = f"{cost['core']:.1%} of a core, queue.produce {cost['produce_slower']:.1%} slower"
    print(f"  {TABS} open tabs: {told}: {'MISSED' if is_dear else 'must met'}")
    print(
        json.dumps({"bench": "console", "pages": {place: one._asdict() for place, one in times.items()}, "tabs": cost})
    )
    return not is_dear and all(one.verdict(place) != "MISSED" for place, one in times.items())


def main_of_one() -> None:
    """From a shell: a folder that is filled and kept, for `holdfast serve`; and the tabs of a measurement."""
    parser = argparse.ArgumentParser(prog="python -m bench.console", description=__doc__)
    parts = parser.add_subparsers(dest="what", required=True)
    filled = parts.add_parser("fill")
    filled.add_argument("folder", type=Path)
    filled.add_argument("--letters", type=int, default=LETTERS)
    filled.add_argument("--groups", type=int, default=GROUPS)
    tabs = parts.add_parser("tabs")
    for name in ("address", "cookie", "path"):
        tabs.add_argument(name)
    options = parser.parse_args()
    if options.what == "fill":
        asyncio.run(fill(options.folder.absolute(), options.letters, options.groups))
    else:
        uvloop.run(_tabs(options.address, options.cookie, options.path))


if __name__ == "__main__":
    main_of_one()
