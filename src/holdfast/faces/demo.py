"""What `holdfast demo` serves: a day of a shop in which something went wrong, in a folder of its own.

Four queues with their consumers in this process; letters of four causes: one is over, one is mended after a while, one
comes back, and one takes an edit. The day before is lived through once, on a clock that is behind: by the same services
that serve it afterwards, so that every number, chart and row of the ledger is what really happened.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import random
import shutil
import struct
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from holdfast.core.item import NewItem
from holdfast.core.message import Message
from holdfast.core.moments import moment
from holdfast.core.plan import PlanOptions, RedriveState, RedriveTask
from holdfast.core.policy import RetryPolicy
from holdfast.core.requests.declare import Caller, Role
from holdfast.core.requests.vault import ArchiveLetters, ChangeGroup, Filter, ListGroups, StartRedrive
from holdfast.core.selection import Selection
from holdfast.core.states import LetterState
from holdfast.errors import CannotStart, HoldfastError
from holdfast.services.collect.service import CollectService
from holdfast.services.consume.worker import ConsumerPlan, Worker
from holdfast.services.queue.broker import QueueBroker
from holdfast.services.queue.queues import Queues
from holdfast.services.queue.service import QueueService
from holdfast.services.vault.admin import VaultApp
from holdfast.settings import Settings, load_settings
from holdfast.wiring import SystemClock, open_collector, open_service, open_vault_app

FOLDER = Path("holdfast-demo")
#: Only a folder that holds this file is ever deleted.
MARKER = "made-by-holdfast-demo"
#: There when the day before was lived through to its end; half a day is deleted and begun anew.
READY = "ready"
CONFIG = "holdfast.toml"
DATA = "data"
QUEUES = ("orders", "payments", "invoices", "mailings")
HOURS_COUNT = 26
#: The cause of what died in `payments` is mended so long after the server has started.
MENDED_AFTER_S = 180.0
ARRIVAL_STEP_S = 3.0
STOP_TIMEOUT_S = 2.0
HANDLED_TIMEOUT_S = 60.0
POLL_S = 0.01
REPORT = "report-of-the-day"
REPORT_PARTS = {"rows": 240, "totals": 12}
#: Numbers of `rows` that never came.
REPORT_GAPS = frozenset({*range(57, 64), 120, 121, 200})
MINUTE_US = 60_000_000
HOUR_US = 60 * MINUTE_US

MARIA = Caller(name="maria", role=Role.ADMIN, origin="demo")


# --- the folder -----------------------------------------------------------------------------------------------


@contextmanager
def held(folder: Path, *, makes: bool) -> Iterator[bool]:
    """The folder, made where it `makes` one, and nobody else's until the end of the block; true when there is no whole
    day in it yet. Raises CannotStart for one that is not ours, or served by another process."""
    if not makes and not folder.exists():
        raise CannotStart(f"demo is not there; no folder '{folder}' here")
    if folder.is_symlink() or (folder.exists() and not (folder / MARKER).is_file()):
        raise CannotStart(
            f"folder is not a demo's; '{folder}' was there before and is left as it is, move it or go to another folder"
        )
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / MARKER).open("a") as marker:
        try:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CannotStart(f"demo is served; another process serves '{folder}', stop it first") from error
        yield not (folder / READY).exists()


def make(folder: Path, settings: Settings, *, tell: Callable[[str], None]) -> None:
    """Live through the day before. Raises HoldfastError."""
    shutil.rmtree(folder / DATA, ignore_errors=True)
    asyncio.run(live_through(settings, tell=tell))
    (folder / READY).touch()


def remove(folder: Path) -> None:
    """Delete the folder of a demo. Raises CannotStart."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise CannotStart(f"demo cannot be deleted; {error.filename}: {error.strerror}") from error


def settings_of(folder: Path, listen: str) -> Settings:
    """Settings of the demo alone: nothing of the environment, and no other file. Raises CannotStart."""
    file = folder / CONFIG
    captured = ", ".join(f'"{name}.dlq"' for name in QUEUES)
    text = f"# Written by `holdfast demo`.\ncapture = [{captured}]\n"
    file.write_text(text + 'retry_delay = "200ms"\nresolve_after = "6h"\nlog_level = "error"\nlog_format = "text"\n')
    file.chmod(0o600)
    data = folder.absolute() / DATA
    given = {"url": f"sqlite:////{str(data).lstrip('/')}", "data_folder": folder.absolute(), "listen": listen}
    return load_settings(given, environment={}, file=file)


# --- the shop -------------------------------------------------------------------------------------------------


class Incident:
    """Its handlers, and what is wrong with the world around them."""

    def __init__(self) -> None:
        self.gateway_is_down = False
        self.mail_is_down = False
        self.chance = random.Random(7)  # noqa: S311 - a demo's numbers are no secret
        self._number = 40_000

    async def order(self, message: Message) -> None:
        order = json.loads(message.body)
        self._check_address(order["customer"]["email"])

    def _check_address(self, address: str) -> None:
        if address.count("@") != 1 or address.endswith("."):
            raise ValueError(f"'{address}' is not an e-mail address")

    async def payment(self, message: Message) -> None:
        payment = json.loads(message.body)
        self._charge(payment["card"], payment["amount"])

    def _charge(self, card: str, amount: str) -> None:
        if self.gateway_is_down:
            raise TimeoutError(f"pay.example did not answer within 5 s, {amount} was not charged to {card}")

    async def invoice(self, message: Message) -> None:
        country = message.body.partition(b'country="')[2].partition(b'"')[0].decode()
        self._tax_rule(country)

    def _tax_rule(self, country: str) -> None:
        if country == "NO":
            raise LookupError(f"no tax rule for country '{country}' since 2026-11-01")

    async def mailing(self, message: Message) -> None:
        if self.mail_is_down:
            raise ConnectionRefusedError("mx1.example:25 refused the connection")

    # What arrives.

    def new_order(self, *, is_wrong: bool) -> NewItem:
        number = self._next()
        name = self.chance.choice(("ana", "bo", "chidi", "dilara", "emre", "freja"))
        lines = [{"sku": f"LAMP-{self.chance.randrange(900)}", "count": self.chance.randrange(1, 4)}]
        customer = {"name": name.title(), "email": f"{name}{'@@' if is_wrong else '@'}mail.example"}
        order = {"number": number, "customer": customer, "lines": lines, "total": f"{number % 180 + 9}.90"}
        return self._item("order.placed", "application/json", json.dumps(order).encode())

    def new_payment(self) -> NewItem:
        number = self._next()
        payment = {"order": number, "card": f"**** {number % 9000 + 1000}", "amount": f"{number % 180 + 9}.90 EUR"}
        return self._item("payment.due", "application/json", json.dumps(payment).encode())

    def new_invoice(self, *, is_wrong: bool) -> NewItem:
        number = self._next()
        country = "NO" if is_wrong else self.chance.choice(("DE", "FR", "SE", "PT"))
        body = f'<?xml version="1.0"?>\n<invoice number="{number}" country="{country}"><net>{number % 180}.00</net>'
        return self._item("invoice.wanted", "application/xml", (body + "</invoice>").encode())

    def new_mailing(self, *, send_at: datetime | None = None) -> NewItem:
        number = self._next()
        if send_at is None and number % 5 == 0:
            return self._item("mail.picture", "image/png", _picture(number))
        text = (
            f"Hello,\n\nyour parcel for order {number} is on its way.\nIt will be with you tomorrow.\n\nLantern & Co."
        )
        return self._item("mail.shipped", "text/plain", text.encode())

    def _item(self, kind: str, encoding: str, body: bytes) -> NewItem:
        return NewItem(payload=body, kind=kind, encoding=encoding, reference=f"shop-{self._number}")

    def _next(self) -> int:
        self._number += 1
        return self._number


def _picture(number: int) -> bytes:
    """A small PNG: a body that is no text."""
    rows = b"".join(b"\0" + bytes((number + 7 * x * y) % 256 for x in range(32)) for y in range(32))
    parts = ((b"IHDR", struct.pack(">IIBBBBB", 32, 32, 8, 0, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    framed = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def _plans(shop: Incident) -> list[ConsumerPlan]:
    handlers = {"orders": shop.order, "payments": shop.payment, "invoices": shop.invoice, "mailings": shop.mailing}
    policy = RetryPolicy(attempts=3, delay=0.0)
    return [
        ConsumerPlan(
            queue=name, handler=handler, policy=policy, concurrency=20, permanent=(ValueError,), name=f"{name}@shop"
        )
        for name, handler in handlers.items()
    ]


@asynccontextmanager
async def _consuming(queues: Queues, shop: Incident, clock: SystemClock) -> AsyncIterator[None]:
    broker = QueueBroker(queues, clock=clock)
    workers = [Worker(plan, broker, stop_timeout_s=STOP_TIMEOUT_S) for plan in _plans(shop)]
    tasks = [asyncio.create_task(worker.run(), name=f"consumer of {worker.plan.queue}") for worker in workers]
    try:
        yield
    finally:
        for worker in workers:
            worker.stop()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- the day before -------------------------------------------------------------------------------------------


class IncidentClock(SystemClock):
    """The machine's clock, and so much behind."""

    def __init__(self) -> None:
        super().__init__()
        self.behind_us = 0

    def now_us(self) -> int:
        return super().now_us() - self.behind_us


class Produced(NamedTuple):
    """What one hour brings: how many of each, and what was down in it."""

    orders: int
    wrong_orders: int
    payments: int
    wrong_invoices: int
    mailings: int
    mail_is_down: bool
    gateway_is_down: bool


def _hours(chance: random.Random) -> Iterator[Produced]:
    """From the oldest on. The mail server was away for two hours of the morning, the gateway is for the last three."""
    for ago in range(HOURS_COUNT, -1, -1):
        mail_is_down, gateway_is_down = ago in (15, 14), ago <= 2
        yield Produced(
            orders=chance.randrange(8, 16),
            wrong_orders=chance.randrange(1, 5) if ago <= 7 else 0,
            payments=chance.randrange(30, 55) if gateway_is_down else 6,
            wrong_invoices=chance.randrange(2, 7),
            mailings=chance.randrange(360, 420) if mail_is_down else 5,
            mail_is_down=mail_is_down,
            gateway_is_down=gateway_is_down,
        )


def be_quiet() -> None:
    """That messages fail is what the demo shows: its terminal need not say so as well."""
    logging.getLogger("holdfast").addFilter(lambda record: not getattr(record, "event", "").startswith("message."))


async def live_through(settings: Settings, *, tell: Callable[[str], None]) -> None:
    """Let the day before happen, as the store of these settings. Raises HoldfastError."""
    shop, clock = Incident(), IncidentClock()
    url = settings.storages[0].url
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(open_service({"default": url}, clock=clock))
        queues = Queues(service)
        app = await stack.enter_async_context(open_vault_app(settings, queues, clock=clock))
        day = _History(shop, clock, queues, app)
        clock.behind_us = (HOURS_COUNT + 1) * HOUR_US
        await day.make_queues()
        captures = [f"{name}.dlq" for name in QUEUES]
        working = app.at_work(captures=captures, resolve_after_s=6 * 3600, retention_s={}, accept_clock=True)
        async with _consuming(queues, shop, clock), working:
            for number, arrivals in enumerate(_hours(shop.chance)):
                ago = HOURS_COUNT - number
                clock.behind_us = max(2 * MINUTE_US, ago * HOUR_US + shop.chance.randrange(20) * MINUTE_US)
                await day.live(arrivals, ago)
                tell(f"Making a day of a shop … {100 * (number + 1) // (HOURS_COUNT + 1)} %")
        clock.behind_us = MINUTE_US
        news = [shop.new_mailing(send_at=moment(clock.now_us() + (9 + number) * HOUR_US)) for number in range(12)]
        await queues.queue_produce("mailings", news)
        async with open_collector(url, queues=queues, clock=clock) as collector:
            await _collect(queues, collector)


class _History:
    """The hours of the day before, and what Maria, who is on call, does in them."""

    def __init__(self, shop: Incident, clock: IncidentClock, queues: Queues, app: VaultApp) -> None:
        self._shop, self._clock, self._queues, self._app = shop, clock, queues, app

    async def make_queues(self) -> None:
        for name in QUEUES:
            await self._queues.queues_create(f"{name}.dlq")
            await self._queues.queues_create(name, dead_queue=f"{name}.dlq", lease_timeout="1m", max_attempts=3)
        for name in ("reports", "reports.done"):
            await self._queues.queues_create(name, lease_timeout="1m")

    async def live(self, arrivals: Produced, ago: int) -> None:
        """One hour."""
        shop = self._shop
        shop.mail_is_down, shop.gateway_is_down = arrivals.mail_is_down, arrivals.gateway_is_down
        orders = [shop.new_order(is_wrong=False) for _ in range(arrivals.orders)]
        orders += [shop.new_order(is_wrong=True) for _ in range(arrivals.wrong_orders)]
        invoices = [shop.new_invoice(is_wrong=place < arrivals.wrong_invoices) for place in range(10)]
        await self._queues.queue_produce("orders", orders)
        await self._queues.queue_produce("payments", [shop.new_payment() for _ in range(arrivals.payments)])
        await self._queues.queue_produce("invoices", invoices)
        await self._queues.queue_produce("mailings", [shop.new_mailing() for _ in range(arrivals.mailings)])
        await self._empty(QUEUES)
        await self._empty([f"{name}.dlq" for name in QUEUES])  # into the vault
        if ago == 20:
            await self._change("LookupError", status="resolved", note="mended in 1.41, they said")
            await self._redrive("invoices.dlq", "after the deploy of 1.41", "it was said to be mended")
        if ago == 12:
            await self._change("ConnectionRefusedError", note="mx1 was restarted by the provider; letters can go")
        if ago == 9:
            await self._change(
                "LookupError", note="finance has to enter the rule for NO; a redrive does not help before"
            )
            await self._archive("invoices.dlq")

    async def _empty(self, names: Sequence[str]) -> None:
        """Until nothing is in these queues, nor on its way out of them."""
        for name in names:
            await _until(partial(self._is_empty, name))

    async def _is_empty(self, name: str) -> bool:
        stats = await self._queues.queue_stats(name)
        return not any(one.total or one.scheduled or one.dying for one in stats.partitions)

    async def _redrive(self, queue: str, name: str, reason: str) -> None:
        task = await _start_redrive(self._app, Selection(queue=queue), 0, name, reason)
        await _until(lambda: self._is_done(task.id))
        await self._empty([queue.removesuffix(".dlq"), queue])

    async def _is_done(self, task: int) -> bool:
        return (await self._app.redrives.find(task)).state is not RedriveState.RUNNING

    async def _change(self, error: str, *, note: str, status: Literal["resolved"] | None = None) -> None:
        groups = await self._app.call(ListGroups(), MARIA)
        for group in groups.groups:
            if error in group.title:
                await self._app.call(ChangeGroup(key=group.key, status=status, note=note), MARIA)

    async def _archive(self, queue: str) -> None:
        found = await self._app.vault.letters.oldest_ids(
            Selection(queue=queue, state=LetterState.CAPTURED), count_max=6
        )
        asked = ArchiveLetters(
            selection=Filter(ids=tuple(found), queue=queue), count=len(found), reason="of test customers"
        )
        await self._app.call(asked, MARIA)


async def _start_redrive(app: VaultApp, selection: Selection, per_s: int, name: str, reason: str) -> RedriveTask:
    plan = await app.planner.plan(PlanOptions(selection=selection, max_per_s=per_s), MARIA)
    return await app.call(StartRedrive(plan=plan.hash, name=name, reason=reason), MARIA)


async def _collect(queues: Queues, collector: CollectService) -> None:
    """A result of which some numbers never came."""
    await collector.start(
        b"all orders of the day",
        producer="reports",
        notify="reports.done",
        transaction_id=REPORT,
        series=[*REPORT_PARTS],
    )
    lease = await queues.queue_lease("reports", request_timeout="10s")
    asked = json.loads(lease.items[0].reference)
    sent = 0
    for series, count in REPORT_PARTS.items():
        numbers = [number for number in range(count) if series != "rows" or number not in REPORT_GAPS]
        references = [{"transaction-id": REPORT, "series": series, "ordinal": number} for number in numbers]
        items = [
            NewItem(payload=f"{series} {one['ordinal']}\n".encode(), reference=json.dumps(one)) for one in references
        ]
        await queues.queue_produce(asked["payload-queue"], items)
        header = {"transaction-id": REPORT, "series": series, "count": count}
        await queues.queue_produce(asked["header-queue"], [NewItem(reference=json.dumps(header))])
        sent += len(items)
    await queues.queue_complete("reports", [item.id for item in lease.items], partition=lease.partition)

    async def is_stored() -> bool:
        return sum(one.stored_count for one in await collector.stand(REPORT)) >= sent

    await _until(is_stored)


async def _until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(HANDLED_TIMEOUT_S):
        while not await holds():  # noqa: ASYNC110 - a store has to be asked
            await asyncio.sleep(POLL_S)


# --- while it is served ---------------------------------------------------------------------------------------


@asynccontextmanager
async def at_work(service: QueueService, app: VaultApp) -> AsyncIterator[None]:
    """The shop goes on beside the server: consumers, slow arrivals, and a redrive that takes its time."""
    shop, queues = Incident(), Queues(service)
    shop.gateway_is_down = True
    async with _consuming(queues, shop, SystemClock()):
        arriving = asyncio.create_task(_arrive(shop, queues, time.monotonic()), name="arrivals of the demo")
        redriving = asyncio.create_task(_redrive_mailings(app), name="redrive of the demo")
        try:
            yield
        finally:
            arriving.cancel()
            redriving.cancel()
            await asyncio.gather(arriving, redriving, return_exceptions=True)


async def _redrive_mailings(app: VaultApp) -> None:
    """What died while the mail server was away goes back, slowly enough to be watched; once."""
    tasks = await app.vault.redrives.page(before=2**62, count_max=50)
    if any(task.wish.selection.queue == "mailings.dlq" for task in tasks):
        return
    try:
        await _start_redrive(app, Selection(queue="mailings.dlq"), 1, "mailings of the morning", "mx1 is back")
    except HoldfastError:
        pass  # somebody has sent them back already


async def _arrive(shop: Incident, queues: Queues, began_s: float) -> None:
    while True:
        shop.gateway_is_down = time.monotonic() - began_s < MENDED_AFTER_S
        turn = shop.chance.randrange(8)
        queue, item = {
            0: ("orders", shop.new_order(is_wrong=True)),
            1: ("payments", shop.new_payment()),
            2: ("invoices", shop.new_invoice(is_wrong=True)),
            3: ("invoices", shop.new_invoice(is_wrong=False)),
            4: ("mailings", shop.new_mailing()),
            5: ("payments", shop.new_payment()),
        }.get(turn, ("orders", shop.new_order(is_wrong=False)))
        try:
            await queues.queue_produce(queue, [item])
        except HoldfastError:
            pass  # the visitor paused, cleared or deleted it, which is what a demo is for
        await asyncio.sleep(ARRIVAL_STEP_S)
