"""The command line: `holdfast`. It asks the same services as HTTP does and shows the same numbers.

A command is imported when it is called, or its own help is wanted: `holdfast --help` reads TREE and nothing more.
Help is for people, at 80 columns: words for values instead of Python types, and paragraphs that flow.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException
from typer.main import get_command, get_command_from_info

from holdfast import __version__

_WORDS: dict[type, str] = {int: "N", float: "N", Path: "FILE"}
#: How fields and options end that take a duration.
DURATIONS = ("timeout", "retention", "expires_in", "older_than", "wait")


class Entry(NamedTuple):
    """A command or a group: which modules register it, and its line in `holdfast --help`. A group has an order."""

    modules: str
    line: str
    order: str = ""


#: What stands in `holdfast --help`, in its order.
TREE: dict[str, Entry] = {
    "capture": Entry("redrive", "Take the letters of a dead-letter queue into custody: stored first, acked second."),
    "balance": Entry(
        "redrive",
        "Count letters by queue and state, from the ledger and from the vault; exit code 1 when they differ.",
    ),
    "recover": Entry(
        "recover",
        "Send every letter of a dead-letter queue back to where it belongs. None is lost, whatever fails.",
    ),
    "plan": Entry(
        "letters",
        "Show what a redrive would do: how many letters go where, what is left out and why. Changes nothing.",
    ),
    "run": Entry("run", "Consume with the handlers of an app until SIGTERM or Ctrl-C."),
    "serve": Entry("serve", "Serve queues over HTTP until SIGTERM or Ctrl-C. Ready when GET /health answers 200."),
    "console": Entry(
        "console", "Print a link to the console of a server on this machine: it signs in once, within five minutes."
    ),
    "demo": Entry("demo", "Serve an incident to look at, in ./holdfast-demo, until SIGTERM or Ctrl-C."),
    "queue": Entry(
        "queues items transfer",
        "Queues and their items.",
        "create update info list delete stats clear pause resume lease complete retry extend produce watch items",
    ),
    "topology": Entry(
        "topology",
        "Exchanges, queues and bindings of a RabbitMQ broker: plan, apply, check, export, import, draw.",
        "plan apply check export import draw",
    ),
    "results": Entry(
        "results",
        "Large results that arrive as numbered messages: start, list, show, gaps, ask, cat, abandon.",
        "start list show gaps ask cat abandon",
    ),
    "letters": Entry(
        "letters",
        "Letters in custody: list, search, show, edit, diff, archive, restore, discard, resolve, export.",
        "list search show edit diff archive restore discard resolve export",
    ),
    "groups": Entry("redrive", "Letters that died of one cause: list, change.", "list change"),
    "redrive": Entry(
        "redrive",
        "Tasks that send letters back: start, list, watch, pause, resume, cancel.",
        "start resume watch pause cancel list",
    ),
    "token": Entry("redrive", "API tokens: create, list, revoke.", "create list revoke"),
    "ledger": Entry("redrive", "Who did what to which letter: show, export, head, verify.", "show export head verify"),
    "config": Entry("serve", "What Holdfast is configured with.", "show"),
}


CONTEXT = {"help_option_names": ["-h", "--help"]}


class LazyGroup(TyperGroup):
    """Commands that are made when they are called, or their own help is wanted; until then there is a line of each."""

    def __init__(self, lines: Mapping[str, str], make: Callable[[str], Any], **given: Any) -> None:
        given["commands"] = {name: TyperCommand(name=name, help=line) for name, line in lines.items()}
        super().__init__(**given)
        self.make = make

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in self.commands:
            self.commands[args[0]] = _for_people(self.make(args[0]))
        return super().resolve_command(ctx, args)


class _CommandGroup(LazyGroup):
    """All commands; what is behind a name is imported when it is called."""

    def __init__(self, **given: Any) -> None:
        super().__init__({name: entry.line for name, entry in TREE.items()}, load, **given)


def _group(summary: str, **more: Any) -> typer.Typer:
    return typer.Typer(
        help=summary,
        no_args_is_help=True,
        context_settings=CONTEXT,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        **more,
    )


app = _group(
    "Holdfast keeps messages from getting lost: durable queues with leases, retries and dead queues.\n\n"
    "Commands work on the storage or the server that --url or HOLDFAST_URL names, and without one on "
    "./holdfast-data.\n\n"
    "Exit codes: 0 done, 1 failed, 2 bad usage, 3 partly done, 130 interrupted.",
    cls=_CommandGroup,
)
#: The groups; each module registers its commands in them, or in `app` itself.
groups = {name: _group(entry.line) for name, entry in TREE.items() if entry.order}
groups["items"] = _group("The items in a queue as they are stored: list, export, import, delete.")
groups["queue"].add_typer(groups["items"], name="items")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"holdfast {__version__}")
        raise typer.Exit


@app.callback()
def _before(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What comes before a command."""


def load(name: str) -> Any:
    """A command of `holdfast`, or a group of them."""
    for module in TREE[name].modules.split():
        import_module(f"holdfast.faces.cli.{module}")
    return _lazy(name, TREE[name].order.split()) if TREE[name].order else _made(app, name)


def _lazy(name: str, order: Sequence[str] = ()) -> LazyGroup:
    group = groups[name]
    lines = {str(one.name): one.help or "" for one in group.registered_commands}
    lines |= {str(one.name): str(groups[str(one.name)].info.help) for one in group.registered_groups}
    return LazyGroup(
        {one: lines[one] for one in order or lines},
        lambda one: _lazy(one) if one in groups and one not in TREE else _made(group, one),
        name=name,
        help=group.info.help,
        no_args_is_help=True,
        context_settings=CONTEXT,
        rich_markup_mode="rich",
    )


def _made(group: typer.Typer, name: str) -> Any:
    found = next(one for one in group.registered_commands if one.name == name)
    return get_command_from_info(found, pretty_exceptions_short=True, rich_markup_mode="rich")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in argv
    _open_streams()
    try:
        code = _for_people(get_command(app))(argv, prog_name="holdfast", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except TyperException as error:
        return _bad_usage(error, as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except (UnicodeEncodeError, OSError) as error:
        return _trouble(error, as_json=as_json)


def _trouble(error: UnicodeEncodeError | OSError, *, as_json: bool) -> int:
    from holdfast.faces.cli.context import BadUsage, CommandFailed, report
    from holdfast.faces.cli.output import forget_stdout

    if isinstance(error, UnicodeEncodeError):
        return report(
            BadUsage("an argument is not UTF-8; only a payload may be, as TEXT or with --raw"), as_json=as_json
        )
    forget_stdout()
    name = f"'{error.filename}': " if error.filename else ""
    return report(CommandFailed(f"cannot go on; {name}{error.strerror or error}"), as_json=as_json)


def _bad_usage(error: TyperException, *, as_json: bool) -> int:
    from holdfast.faces.cli.context import BadUsage, ExitCode, report

    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":  # the help itself has been printed
        return ExitCode.BAD_USAGE
    path = context.command_path if context is not None else "holdfast"
    message = error.format_message()
    stop = "" if message.endswith(("?", ".")) else "."
    return report(BadUsage(f"{message}{stop} See '{path} --help'"), as_json=as_json)


def _open_streams() -> None:
    """A stream that the caller closed is one that nobody reads or writes."""
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 - open until the process ends
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _for_people(command: Any) -> Any:
    """The command, or the tree of commands, with help that people can read."""
    if command.help:
        paragraphs = inspect.cleandoc(command.help).split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)
    for param in command.params:
        _in_words(param)
    help_option = command.get_help_option
    command.get_help_option = lambda context: _in_words(help_option(context))
    for child in getattr(command, "commands", {}).values():
        _for_people(child)
    return command


def _in_words(param: Any) -> Any:
    if param is None:
        return None
    if param.metavar is None:
        param.metavar = _word(param)
    if param.param_type_name == "argument":
        usage = param.metavar if param.required else f"[{param.metavar}]"
        param.display_type_rich = lambda ctx: None
        param.get_usage_pieces = lambda context: [usage]
    return param


def _word(param: Any) -> str:
    if param.param_type_name == "argument":
        return str(param.name).upper()
    if param.is_flag:
        return ""
    kind = param.type_descriptor.annotation
    kind = next(iter(get_args(kind)), kind)  # a list of these
    if kind is str and str(param.name).endswith(DURATIONS):
        return "DURATION"
    return _WORDS.get(kind, "TEXT")
