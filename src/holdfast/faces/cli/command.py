"""How a command is made: from a function whose first parameter is the CommandContext, or from a request.

`command` registers a function; `asks` makes a command that asks one request and shows its reply. The shared options
come by themselves. What was typed is checked before anything begins: a mistake in it is bad usage. This is where the
command line enters asyncio, on the loop that the server has too.
"""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Callable, Coroutine, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec
import typer
from msgspec import UNSET, Meta, UnsetType, structs

from holdfast.core.moments import parse_duration
from holdfast.core.requests.declare import Request
from holdfast.errors import HoldfastError, Invalid
from holdfast.faces.cli.context import BadUsage, CommandContext, ExitCode, report
from holdfast.faces.cli.output import forget_stdout, one_line

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
S = TypeVar("S", bound=Callable[..., ExitCode | None])


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


def command(
    app: typer.Typer, name: str, *, example: str, shared: tuple[inspect.Parameter, ...] = SHARED
) -> Callable[[B], B]:
    """Register an async function as a command; its docstring is the help, `example` is shown below it."""

    def register(body: B) -> B:
        _context, *own = inspect.signature(body, eval_str=True).parameters.values()
        names = frozenset(parameter.name for parameter in shared)

        def run(**given: Any) -> int:
            options = {key: value for key, value in given.items() if key in names}
            arguments = {key: value for key, value in given.items() if key not in names}
            return run_body(body, CommandContext(**options), arguments)

        parameters = [parameter.replace(kind=_KEYWORD) for parameter in own] + list(shared)
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        examples = "\n\n".join(f"  $ {_escaped(line)}" for line in example.splitlines())
        app.command(name, help=inspect.getdoc(body), epilog=f"Example:\n\n{examples}")(run)
        return body

    return register


def _escaped(line: str) -> str:
    """A bracket in a text is no markup."""
    if "[" not in line:
        return line
    from rich.markup import escape

    return escape(line)


# --- commands made from requests ------------------------------------------------------------------------------


class CommandOption(NamedTuple):
    """How a field of a request is given on the command line, where that differs from the field itself.

    `metavar` makes it an argument; `check` gets what was given and the option's name, and raises BadUsage.
    """

    name: str = ""
    help: str = ""
    metavar: str = ""
    default: Any = ...
    check: Callable[..., object] | None = None


def asks(
    app: typer.Typer,
    word: str,
    request: type[Request[Any]],
    /,
    *,
    example: str,
    lines: str | None = None,
    shared: tuple[inspect.Parameter, ...] = SHARED,
    **given: CommandOption,
) -> Callable[[S], S]:
    """Make a command that asks `request`: the fields that are given are its options, in their order.

    What it decorates shows the reply to people, and its docstring is the help. As JSON the reply is one document, or
    with `lines` one line for each element of that field (of the reply itself if it is empty).
    """
    fields = {one.name: one for one in structs.fields(request)}
    names = {field: option.name or field for field, option in given.items()}

    def register(show: S) -> S:
        async def body(context: CommandContext, **values: Any) -> ExitCode | None:
            asked = {field: _value(fields[field], given[field], names[field], values[names[field]]) for field in given}
            wanted = request(**{field: value for field, value in asked.items() if value is not UNSET})
            async with context.connect(request) as client:
                reply = await client.call(wanted)
            if lines is None:
                context.out.document(reply)
            else:
                context.out.documents(getattr(reply, lines) if lines else reply)
            return show(context.out, wanted, reply)

        parameters = [_parameter(names[field], fields[field], option) for field, option in given.items()]
        context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        body.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]  # `command` reads it
        body.__doc__ = show.__doc__
        command(app, word, example=example, shared=shared)(body)
        return show

    return register


def _parameter(name: str, field: structs.FieldInfo, option: CommandOption) -> inspect.Parameter:
    kind, metas = _kind_of(field.type)
    least = next((one.ge for one in metas if one.ge is not None), None)
    most = next((one.le for one in metas if one.le is not None), None)
    text = option.help or next(one.description for one in metas if one.description)
    default = field.default if option.default is ... else option.default
    if option.metavar:
        hint: Any = typer.Argument(metavar=option.metavar, help=text, show_default=False, min=least)
        return inspect.Parameter(name, _KEYWORD, annotation=Annotated[kind, hint])
    if default is msgspec.NODEFAULT or isinstance(default, UnsetType):
        default = None  # nothing was given
    if default is None and type(None) not in get_args(kind):
        kind = kind | None
    if kind is bool:
        hint = typer.Option(f"--{name.replace('_', '-')}", help=text)
    else:
        hint = typer.Option(help=text, show_default=default not in (None, ""), min=least, max=most)
    return inspect.Parameter(name, _KEYWORD, default=default, annotation=Annotated[kind, hint])


def _kind_of(hint: Any) -> tuple[Any, list[Meta]]:
    """What typer is to take for a field, and what its type says of limits and meaning."""
    metas: list[Meta] = []
    if get_origin(hint) is Annotated:
        hint, *more = get_args(hint)
        metas = [one for one in more if isinstance(one, Meta)]
    if get_origin(hint) is Literal:
        return str, metas
    if get_origin(hint) in (types.UnionType, Union):
        kinds = [_kind_of(one)[0] for one in get_args(hint) if one is not UnsetType]
        return Union[tuple(kinds)], metas  # noqa: UP007 - of as many as there are
    if get_origin(hint) is list:
        return list[_kind_of(get_args(hint)[0])[0]], metas  # type: ignore[misc]  # made at run time
    return hint, metas


def _value(field: structs.FieldInfo, option: CommandOption, name: str, value: Any) -> Any:
    """What was given, checked; what was not given is left to the request."""
    if value is None:
        return UNSET
    word = f"--{name.replace('_', '-')}"
    if option.check is not None:
        option.check(value, option=word)
    allowed = _words_of(field.type)
    if allowed and value != "":
        one_of(value, allowed, option=word)
    return value


def _words_of(hint: Any) -> list[str]:
    """The words that a field takes, if it takes no others."""
    if get_origin(hint) is Literal:
        return [word for word in get_args(hint) if word]
    return [word for one in get_args(hint) for word in _words_of(one)]


def run_body(body: Body, context: CommandContext, arguments: Mapping[str, Any]) -> int:
    """Run a command to its end; errors of ours are reported here."""
    import uvloop

    _say_warnings(as_json=context.as_json)
    try:
        return uvloop.run(body(context, **arguments)) or ExitCode.DONE
    except HoldfastError as error:
        return report(error, as_json=context.as_json, server=_server(context))
    except BrokenPipeError:
        forget_stdout()
        return ExitCode.READER_GONE
    except BaseExceptionGroup as group:
        # A TaskGroup wraps what its tasks raise; ours alone are told in a line, a bug keeps its stack trace.
        ours, others = group.split(HoldfastError)
        if ours is None or others is not None:
            raise
        return report(_first(ours), as_json=context.as_json, server=_server(context))


def _server(context: CommandContext) -> str:
    """Where a server of these settings would be; nowhere when they cannot be read."""
    try:
        return context.server
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
