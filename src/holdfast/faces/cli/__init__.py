"""The command line: `holdfast`. It calls the same service as HTTP does and shows the same numbers."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer
from typer.exceptions import TyperException
from typer.main import get_command

from holdfast.faces.cli import (
    config,
    custody,
    items,
    leases,
    letters,
    produce,
    queues,
    recover,
    redrive,
    results,
    run,
    serve,
    topology,
    transfer,
    watch,
)
from holdfast.faces.cli.app import app
from holdfast.faces.cli.context import BadUsage, CommandFailed, ExitCode, report
from holdfast.faces.cli.help import for_people
from holdfast.faces.cli.output import forget_stdout

__all__ = ["app", "main", "modules"]

#: Each module registers its commands in the tree of `app`.
modules = (
    serve,
    run,
    recover,
    queues,
    produce,
    leases,
    items,
    transfer,
    watch,
    topology,
    results,
    letters,
    custody,
    redrive,
    config,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in argv
    _open_streams()
    try:
        code = for_people(get_command(app))(argv, prog_name="holdfast", standalone_mode=False)
        sys.stdout.flush()
        return int(code or ExitCode.DONE)
    except TyperException as error:
        return _bad_usage(error, as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except UnicodeEncodeError:
        return report(
            BadUsage("an argument is not UTF-8; only a payload may be, as TEXT or with --raw"), as_json=as_json
        )
    except OSError as error:
        forget_stdout()
        name = f"'{error.filename}': " if error.filename else ""
        return report(CommandFailed(f"cannot go on; {name}{error.strerror or error}"), as_json=as_json)


def _bad_usage(error: TyperException, *, as_json: bool) -> int:
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
