"""How a command is made: an async function whose first parameter is the Session; the shared options come by themselves.

This is the place where the command line enters asyncio, on the loop that the server has too.

Moments as people type them: RFC 3339, or `+10m` from now.

What a command checks before it begins. A mistake in what was typed is bad usage, whatever the command.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Coroutine, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer
import uvloop
from rich.markup import escape

from holdfast.core.moments import parse_duration
from holdfast.errors import HoldfastError, Invalid
from holdfast.faces.cli.context import BadUsage, CommandContext, ExitCode, report
from holdfast.faces.cli.output import forget_stdout, one_line


def parse_moment(text: str, *, option: str) -> datetime:
    """The moment that was meant; raises BadUsage."""
    if text.startswith("+"):
        delay_us = parse_duration(duration(text[1:], option=option), what=option)
        return datetime.now(UTC) + timedelta(microseconds=delay_us)
    try:
        at = msgspec.convert(text, datetime)
    except msgspec.ValidationError as error:
        raise BadUsage(f"{option} is invalid; '{text}' is no moment, use 2030-01-31T08:00:00Z or +10m") from error
    if at.tzinfo is None:
        raise BadUsage(f"{option} is invalid; '{text}' has no time zone, end it with Z for UTC")
    return at


def duration(text: str, *, option: str) -> str:
    """The text, when it is a duration; raises BadUsage."""
    try:
        parse_duration(text, what=option)
    except Invalid as error:
        raise BadUsage(error.message) from error
    return text


def one_of(text: str, allowed: Iterable[str], *, option: str) -> str:
    """The text, when it is one of these; raises BadUsage, which lists them."""
    words = list(allowed)
    if text not in words:
        raise BadUsage(f"{option} is invalid; '{text}' is none of {', '.join(words)}")
    return text


def read_file(path: Path, *, bytes_max: int) -> bytes:
    """What a file holds; raises BadUsage when it cannot be read or is too large."""
    try:
        with path.open("rb") as stream:
            data = stream.read(bytes_max + 1)
    except OSError as error:
        raise BadUsage(f"file cannot be read; '{path}': {error.strerror or error}") from error
    if len(data) > bytes_max:
        raise BadUsage(f"file is too large; '{path}' has more than {bytes_max} bytes")
    return data


Body = Callable[..., Coroutine[Any, Any, ExitCode | None]]
B = TypeVar("B", bound=Body)

PANEL = "Shared options"

Url = Annotated[
    str | None,
    typer.Option(
        help="A storage, opened in this process (sqlite:///FOLDER, postgresql://…, memory://), or a server "
        "(http://…). Also HOLDFAST_URL.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(help="A file with the server's token. Also HOLDFAST_TOKEN.", rich_help_panel=PANEL),
]
CaFile = Annotated[
    Path | None,
    typer.Option(help="A PEM file with the certificate that signed an https server's.", rich_help_panel=PANEL),
]
Config = Annotated[
    Path | None,
    typer.Option(
        help="The configuration file; ./holdfast.toml if it is there. Also HOLDFAST_CONFIG.", rich_help_panel=PANEL
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout, errors as JSON on stderr.", rich_help_panel=PANEL)]

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
CONFIG_PARAMETER = inspect.Parameter("config", _KEYWORD, default=None, annotation=Config)
JSON_PARAMETER = inspect.Parameter("as_json", _KEYWORD, default=False, annotation=Json)
SHARED = (
    inspect.Parameter("url", _KEYWORD, default=None, annotation=Url),
    inspect.Parameter("token_file", _KEYWORD, default=None, annotation=TokenFile),
    inspect.Parameter("ca_file", _KEYWORD, default=None, annotation=CaFile),
    CONFIG_PARAMETER,
    JSON_PARAMETER,
)


def command(
    app: typer.Typer, name: str, *, example: str, shared: tuple[inspect.Parameter, ...] = SHARED
) -> Callable[[B], B]:
    """Register an async function as a command; its docstring is the help, `example` is shown below it."""

    def register(body: B) -> B:
        _session, *own = inspect.signature(body, eval_str=True).parameters.values()
        names = frozenset(parameter.name for parameter in shared)

        def run(**given: Any) -> int:
            options = {key: value for key, value in given.items() if key in names}
            arguments = {key: value for key, value in given.items() if key not in names}
            return run_body(body, CommandContext(**options), arguments)

        parameters = [parameter.replace(kind=_KEYWORD) for parameter in own] + list(shared)
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        examples = "\n\n".join(f"  $ {escape(line)}" for line in example.splitlines())
        app.command(name, help=inspect.getdoc(body), epilog=f"Example:\n\n{examples}")(run)
        return body

    return register


def run_body(body: Body, session: CommandContext, arguments: dict[str, Any]) -> int:
    """Run a command to its end; errors of ours are reported here."""
    _say_warnings(as_json=session.as_json)
    try:
        return uvloop.run(body(session, **arguments)) or ExitCode.DONE
    except HoldfastError as error:
        return report(error, as_json=session.as_json, server=_server(session))
    except BrokenPipeError:
        forget_stdout()
        return ExitCode.READER_GONE
    except BaseExceptionGroup as group:
        # A TaskGroup wraps what its tasks raise; ours alone are told in a line, a bug keeps its stack trace.
        ours, others = group.split(HoldfastError)
        if ours is None or others is not None:
            raise
        return report(_first(ours), as_json=session.as_json, server=_server(session))


def _server(session: CommandContext) -> str:
    """Where a server of these settings would be; nowhere when they cannot be read."""
    try:
        return session.server
    except HoldfastError:
        return ""


def _first(group: BaseExceptionGroup[HoldfastError]) -> HoldfastError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, HoldfastError)  # noqa: S101 - the group was split by this type
    return error


class _Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(f"{record.levelname.lower()}: {one_line(record.getMessage())}", err=True)


def _say_warnings(*, as_json: bool) -> None:
    """What the service in this process warns of goes to stderr as a line; as JSON, stderr is for errors alone."""
    logger = logging.getLogger("holdfast")
    logger.handlers = [logging.NullHandler() if as_json else _Warnings(logging.WARNING)]
    logger.propagate = False
