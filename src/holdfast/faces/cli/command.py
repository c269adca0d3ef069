"""How a command is made: from a function whose first parameter is the CommandContext, and from a request.

`command` registers a function; fields of a request are options by themselves, with the texts, defaults and limits that
they have. `asks` makes a command that asks one request and shows its reply. The shared options come by themselves.
What was typed is checked before anything begins: a mistake in it is bad usage. This is where the command line enters
asyncio, on the loop that the server has too.
"""

from __future__ import annotations

import inspect
import logging
import os
import types
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec
import typer
from msgspec import Meta, Struct, UnsetType, structs
from typer.models import ParameterInfo

from holdfast.core.moments import parse_duration
from holdfast.core.requests.declare import Request
from holdfast.errors import HoldfastError, Invalid
from holdfast.faces.cli import DURATIONS, app, groups
from holdfast.faces.cli.context import BadUsage, CommandContext, ExitCode, report
from holdfast.faces.cli.output import forget_stdout, one_line

Body = Callable[..., Coroutine[Any, Any, int | None] | int | None]
B = TypeVar("B", bound=Body)

PANEL = "Shared options"
#: How much a list of what is in custody shows.
LIST_COUNT_DEFAULT = 50

_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def shared_option(
    name: str, text: str, *flags: str, kind: Any = str | None, default: Any = None, panel: str | None = PANEL
) -> inspect.Parameter:
    """An option that several commands have: a field of their context."""
    option = typer.Option(*flags, help=text, rich_help_panel=panel, show_default=False)
    return inspect.Parameter(name, _KEYWORD, default=default, annotation=Annotated[kind, option])


URL = shared_option(
    "url",
    "A storage, opened in this process (sqlite:///FOLDER, postgresql://…, memory://), or a server "
    "(http://…). Also HOLDFAST_URL.",
)
CONFIG = shared_option(
    "config", "The configuration file; ./holdfast.toml if it is there. Also HOLDFAST_CONFIG.", kind=Path | None
)
JSON = shared_option("as_json", "JSON on stdout, errors as JSON on stderr.", "--json", kind=bool, default=False)
SHARED = (
    URL,
    shared_option("token_file", "A file with the server's token. Also HOLDFAST_TOKEN.", kind=Path | None),
    shared_option("ca_file", "A PEM file with the certificate that signed an https server's.", kind=Path | None),
    CONFIG,
    JSON,
)
LogLevel = Annotated[str | None, typer.Option(help="debug, info (default), warning or error.", show_default=False)]
LogFormat = Annotated[str | None, typer.Option(help="json (default) or text.", show_default=False)]
#: What no command asks for, unless it names the field itself.
UNASKED = frozenset({"namespace", "cursor", "created_at", "updated_at", "partitions", "paused"})
S = TypeVar("S", bound=Callable[..., ExitCode | None])


def parse_moment(text: str, *, option: str) -> datetime | None:
    """The moment that was meant, none by an empty text; raises BadUsage."""
    if not text:
        return None
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


def private(path: str, flags: int) -> int:
    """To open a file that is made for its owner alone: it holds bodies."""
    return os.open(path, flags, 0o600)


class CommandOption(NamedTuple):
    """How a field of a request is given on the command line, where that differs from the field itself.

    `metavar` makes it an argument; `kind` is the type of what is typed, of which `read` makes the field's value: it
    gets the option's name too, and raises BadUsage. What follows an equals sign is the value of the field `rest`.
    """

    name: str = ""
    help: str = ""
    metavar: str = ""
    default: Any = ...
    limits: tuple[int | None, int | None] | None = None
    kind: Any = None
    read: Callable[..., Any] | None = None
    rest: str = ""
    panel: str | None = None


#: Fields that every command asks for in this way.
USUAL = {"queue_name": CommandOption(name="name", metavar="QUEUE"), "ids": CommandOption(metavar="ID…")}


def command(
    place: str,
    request: type[Struct] | None = None,
    /,
    *,
    example: str = "",
    shared: tuple[inspect.Parameter, ...] = SHARED,
    only: Mapping[str, CommandOption] | None = None,
    but: Sequence[str] = (),
    **more: CommandOption,
) -> Callable[[B], B]:
    """Register a function, async or not, as the command `holdfast PLACE`; its docstring is the help.

    A line of `example` is what follows the command, or a whole line of a shell with the command in it. The function's
    parameters after the context are options. With a `request`, its fields are options too (all of them `but` these, or
    `only` those), and what they make is the function's second parameter. What stands in its path are arguments.
    """
    given = dict(only or {})
    if request is not None and only is None:
        asked_for = [one for one in request.__struct_fields__ if one in more or one not in UNASKED.union(but)]
        in_path = request.declared.in_path if issubclass(request, Request) else ()
        usual = USUAL | {one: CommandOption(metavar=one.upper()) for one in in_path}
        given = {one: more.get(one) or usual.get(one, CommandOption()) for one in asked_for}

    def register(body: B) -> B:
        _context, *own = inspect.signature(body, eval_str=True).parameters.values()
        own = [one.replace(kind=_KEYWORD) for one in (own if request is None else own[1:])]
        fields = {} if request is None else {one.name: one for one in structs.fields(request)}
        made = {field: _parameter(fields[field], option) for field, option in given.items()}
        first = [one for field, one in made.items() if not given[field].panel]
        parameters = [*first, *own, *(one for field, one in made.items() if given[field].panel), *shared]

        def begin(context: CommandContext, **values: Any) -> Any:
            if request is None:
                return body(context, **values)
            asked: dict[str, object] = {}
            for field, parameter in made.items():
                asked |= _read(fields[field], given[field], parameter.name, values.pop(parameter.name))
            return body(context, request(**asked), **values)

        def run(**values: Any) -> int:
            context = CommandContext(**{one.name: values.pop(one.name) for one in shared})
            return run_body(begin, context, values)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        words = f"holdfast {place}"
        lines = [one if words in one else f"{words} {one}".rstrip() for one in example.split("\n")]
        examples = "\n\n".join(f"  $ {line}" for line in lines)
        *path, name = place.split()
        group = groups[path[-1]] if path else app
        group.command(name, help=inspect.getdoc(body), epilog=f"Example:\n\n{examples}")(run)
        return body

    return register


def asks(
    place: str,
    request: type[Request[Any]],
    /,
    *,
    example: str = "",
    lines: str | None = None,
    shared: tuple[inspect.Parameter, ...] = SHARED,
    **more: CommandOption,
) -> Callable[[S], S]:
    """Make a command that asks `request`, with the options of `command`.

    What it decorates shows the reply to people, and its docstring is the help. As JSON the reply is one document, or
    with `lines` one line for each element of that field (of the reply itself if it is empty).
    """

    def register(show: S) -> S:
        async def body(context: CommandContext, asked: Any) -> ExitCode | None:
            async with context.connect(request) as client:
                reply = await client.call(asked)
            if lines is None:
                context.out.document(reply)
            else:
                context.out.documents(getattr(reply, lines) if lines else reply)
            return show(context.out, asked, reply)

        body.__doc__ = show.__doc__
        command(place, request, example=example, shared=shared, only=None, but=(), **more)(body)
        return show

    return register


def _parameter(field: structs.FieldInfo, option: CommandOption) -> inspect.Parameter:
    if any(isinstance(one, ParameterInfo) for one in get_args(field.type)):  # it says itself how it is given
        return inspect.Parameter(field.name, _KEYWORD, default=field.default, annotation=field.type)
    kind, metas = _kind_of(field.type)
    kind, name = option.kind or kind, option.name or field.name
    least, most = option.limits or (
        next((one.ge for one in metas if one.ge is not None), None),
        next((one.le for one in metas if one.le is not None), None),
    )
    text = option.help or next(one.description for one in metas if one.description)
    default = field.default if option.default is ... else option.default
    is_required = default is msgspec.NODEFAULT or (option.metavar and option.default is ...)
    if isinstance(default, UnsetType):
        default = None  # nothing was given
    if default is None and type(None) not in get_args(kind):
        kind = kind | None
    if option.metavar:
        hint: Any = typer.Argument(metavar=option.metavar, help=text, show_default=False, min=least)
    else:
        flag = [f"--{name.replace('_', '-')}"] if kind is bool else []
        is_shown = kind is not bool and default not in (None, "")
        hint = typer.Option(*flag, help=text, show_default=is_shown, min=least, max=most, rich_help_panel=option.panel)
    default = inspect.Parameter.empty if is_required else default
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


def _read(field: structs.FieldInfo, option: CommandOption, name: str, typed: Any) -> Mapping[str, Any]:
    """What was typed, as fields of a request; what was not is left to the request. Raises BadUsage."""
    word = f"--{name.replace('_', '-')}"
    if typed is None:
        return {}
    if option.rest:
        value, _, rest = typed.partition("=")
        return {field.name: value, option.rest: rest}
    read = option.read or (duration if isinstance(typed, str) and field.name.endswith(DURATIONS) else None)
    if read is not None:
        return {field.name: read(typed, option=word)}
    allowed = _words_of(field.type)
    return {field.name: one_of(typed, allowed, option=word) if allowed and typed else typed}


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
        done: Any = body(context, **arguments)
        return (uvloop.run(done) if inspect.iscoroutine(done) else done) or ExitCode.DONE
    except HoldfastError as error:
        return report(error, as_json=context.as_json, server=context.server)
    except BrokenPipeError:
        forget_stdout()
        return ExitCode.READER_GONE
    except BaseExceptionGroup as group:
        # A TaskGroup wraps what its tasks raise; ours alone are told in a line, a bug keeps its stack trace.
        ours, others = group.split(HoldfastError)
        if ours is None or others is not None:
            raise
        return report(_first(ours), as_json=context.as_json, server=context.server)


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
