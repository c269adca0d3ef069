"""`holdfast run`: the consumers of an app, in one process or several, until a signal."""

from __future__ import annotations

import asyncio
import importlib
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from holdfast.core.moments import Backoff
from holdfast.errors import CannotStart
from holdfast.faces.app import App
from holdfast.faces.cli.command import CONFIG, JSON, LogFormat, LogLevel, command
from holdfast.faces.cli.context import BadUsage, CommandContext, collect_seldom
from holdfast.services.queue.queues import Queues
from holdfast.services.recover.service import RecoverySchedule
from holdfast.settings import ListenAddress, Settings, parse_address
from holdfast.telemetry.events import emit, set_up_logging

BACKOFF = Backoff(first_s=0.5, delay_s_max=30.0)
#: A process that lived this long has earned a fresh start.
STEADY_S = 60.0
EXAMPLE = """orders:app
orders:app --declare --health 127.0.0.1:8480
orders:app --processes 4 --only orders.new"""
PROCESSES_COUNT_MAX = 64
#: Ctrl-C reaches every process of a group, and the first of them passes it on: that is one signal, not two.
SAME_SIGNAL_S = 1.0
_PACKAGE = str(Path(__file__).parents[2])


async def run_processes(arguments: Sequence[Sequence[str]], *, announce: Callable[[str], None]) -> int:
    """Run `holdfast` with each of these arguments until SIGTERM or SIGINT; returns the worst exit code.

    Signals are passed on. A process that one ended is started again. One that gave up by itself has said why, and ends
    all of them.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    tasks = [asyncio.create_task(_keep(own, stop, announce)) for own in arguments]
    codes = await asyncio.gather(*tasks)
    return max(codes)


async def _keep(arguments: Sequence[str], stop: asyncio.Event, announce: Callable[[str], None]) -> int:
    loop = asyncio.get_running_loop()
    failures = 0
    while True:
        began_s = loop.time()
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "holdfast", *arguments)
        announce(f"process {process.pid} runs")
        ended = asyncio.create_task(process.wait())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if stop.is_set():
            if process.returncode is None:
                process.terminate()
            return max(0, await ended)
        code = await ended
        if code >= 0:
            stop.set()
            return code
        failures = 1 if loop.time() - began_s > STEADY_S else failures + 1
        emit("process.killed", pid=str(process.pid), signal=str(-code))
        try:
            async with asyncio.timeout(BACKOFF.delay_s(failures - 1, spread=1.0)):
                await stop.wait()
                return 0
        except TimeoutError:
            continue


@command("run", example=EXAMPLE, shared=(CONFIG, JSON))
def run(
    context: CommandContext,
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="MODULE:NAME of a holdfast.App, found from the current folder.")
    ],
    declare: Annotated[
        bool, typer.Option("--declare", help="Make queues, wait queues and dead queues that are missing.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="Consume this queue alone; can be given several times.")
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, max=PROCESSES_COUNT_MAX, help="How many processes; one that is killed comes back.")
    ] = 1,
    health: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT to answer GET /health and /metrics on; each further process takes the next port.",
            show_default=False,
        ),
    ] = None,
    recover: Annotated[
        bool, typer.Option("--recover/--no-recover", help="Whether to run what \\[recover] of holdfast.toml says.")
    ] = True,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> int:
    """Consume with the handlers of an app until SIGTERM or Ctrl-C.

    A stop takes no new messages and lets running handlers end within the app's limit; the rest goes back. A second
    signal gives everything back at once.
    """
    context.given = {"log_level": log_level, "log_format": log_format}
    settings = context.settings if recover else replace(context.settings, recover={})
    set_up_logging(level=settings.log_level, form=settings.log_format)
    address, announce = parse_address(health) if health is not None else None, context.out.announce
    if processes > 1:
        flags = _flags(declare, only or (), {**context.given, "config": context.config}, recover=recover)
        return _run_processes(target, processes, address, flags, announce)
    loaded = load_app(target)
    if loaded.vault is None and settings.vault is not None:
        loaded.vault = settings.vault.reveal()
    import uvloop

    collect_seldom()
    return uvloop.run(_consume(loaded, settings, declare=declare, only=only or (), health=address, announce=announce))


def load_app(target: str) -> App:
    """The app that MODULE:NAME names. Raises BadUsage, or CannotStart when the module itself fails."""
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise BadUsage(f"target is invalid; '{target}' is not MODULE:NAME")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise CannotStart(f"module cannot be imported; '{module_name}': {error}{_where(error, folder)}") from error
    except Exception as error:
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        text = f"{type(error).__name__}: {what}{_where(error, folder)}"
        raise CannotStart(f"module cannot be imported; '{module_name}': {text}") from error
    found = getattr(module, name, None)
    if not isinstance(found, App):
        what = "is not there" if found is None else f"is a {type(found).__name__}, not a holdfast.App"
        raise CannotStart(f"app is not found; '{name}' in '{module_name}' {what}")
    return found


def _where(error: Exception, folder: str) -> str:
    """Where the user's own code failed: its file and line. Our frames and those of Python would only hide it."""
    if isinstance(error, SyntaxError) and error.filename:
        return f", in {error.filename} line {error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(folder)]
    theirs = [frame for frame in frames if not frame.filename.startswith((_PACKAGE, sys.prefix))]
    return f", in {theirs[-1].filename} line {theirs[-1].lineno}: {theirs[-1].line}" if theirs else ""


async def _consume(
    app: App,
    settings: Settings,
    *,
    declare: bool,
    only: Sequence[str],
    health: ListenAddress | None,
    announce: Callable[[str], None],
) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    told_s: float | None = None

    def on_signal() -> None:
        nonlocal told_s
        if told_s is None:
            told_s = loop.time()
            app.stop()
        elif task is not None and loop.time() - told_s > SAME_SIGNAL_S:
            task.cancel()

    async with AsyncExitStack() as stack:
        if health is not None:
            from holdfast.faces.app import serving_health

            address = await stack.enter_async_context(serving_health(health, lambda: app.health))
            announce(f"Health on http://{address}/health")
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        recoveries = _recoveries(app, settings) if settings.recover else RecoverySchedule(())
        try:
            async with app.running(declare=declare, only=only), recoveries.at_work():
                announce(f"Consuming {', '.join(only or [plan.queue for plan in app.consumers])}")
                await app.ended()
        except asyncio.CancelledError:
            return 130
    return 0


def _recoveries(app: App, settings: Settings) -> RecoverySchedule:
    """What [recover] of holdfast.toml says, on the app's own queues or broker."""
    from holdfast.wiring import Location, scheduled_recoveries, vault_of

    def queues() -> Queues | None:
        return None if is_broker else app.queues

    is_broker = Location.parse(app.url).kind == "amqp"
    broker = settings.broker.reveal() if settings.broker else app.url if is_broker else None
    return scheduled_recoveries(settings, queues=queues, broker=broker, vault=vault_of(settings))


def _run_processes(
    target: str, count: int, health: ListenAddress | None, flags: Sequence[str], announce: Callable[[str], None]
) -> int:
    arguments = []
    for number in range(count):
        port = health and ListenAddress(health.host, health.port and health.port + number)
        own = ["--health", str(port)] if port else []
        # One of them runs the recoveries; the others would only find its lock.
        arguments.append(["run", target, *own, *(("--no-recover",) if number else ()), *flags])
    return asyncio.run(run_processes(arguments, announce=announce))


def _flags(declare: bool, only: Sequence[str], given: Mapping[str, object], *, recover: bool) -> list[str]:
    flags = (["--declare"] if declare else []) + ([] if recover else ["--no-recover"])
    for queue in only:
        flags += ["--only", queue]
    for name, value in given.items():
        if value is not None:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    return flags
