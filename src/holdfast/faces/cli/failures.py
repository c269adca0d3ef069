"""What went wrong, for the reader of the command line: one line with what to do next, or one JSON object.

Nobody sees a stack trace for a mistake of theirs, a server that is gone, or a file that is missing.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec
import typer

from holdfast.errors import BadUrl, BrokerUnreachable, CannotStart, HoldfastError, Unauthorized, Unreachable

#: What the service calls a field is an option here.
OPTIONS = {"say sensitive = true": "say --sensitive", ", use force": ", use --force"}


class ExitCode(IntEnum):
    """How a command ended. 141 is what the shell shows for a reader that went away."""

    DONE = 0
    FAILED = 1
    BAD_USAGE = 2
    PARTLY_DONE = 3
    INTERRUPTED = 130
    READER_GONE = 141


class CommandFailed(HoldfastError):
    """The command cannot go on: a file, a line, an argument."""

    code = 400
    code_text = "Bad Request"

    def __init__(
        self, message: str, *, details: dict[str, object] | None = None, exit_code: ExitCode = ExitCode.FAILED
    ) -> None:
        super().__init__(message)
        self.details = details or {}
        self.exit_code = exit_code


class BadUsage(CommandFailed):
    """The arguments do not go together."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=ExitCode.BAD_USAGE)


def partly_done(message: str, cause: HoldfastError, *, done_count: int, **details: object) -> CommandFailed:
    """The error for a command that stopped on its way: partly done if anything was done before."""
    failed = CommandFailed(
        message,
        details={"done_count": done_count, **details},
        exit_code=ExitCode.PARTLY_DONE if done_count else ExitCode.FAILED,
    )
    failed.code, failed.code_text = cause.code, cause.code_text
    return failed


def report(error: HoldfastError, *, as_json: bool, server: str = "") -> ExitCode:
    """Say it on stderr; returns how the command ended."""
    message = error.message + advice(error, server=server)
    for field, option in OPTIONS.items():
        message = message.replace(field, option)
    details: dict[str, object] = {"ids": list(error.ids)} if error.ids else {}
    if isinstance(error, CommandFailed):
        details = error.details
    if as_json:
        line = msgspec.json.encode(
            {"code": error.code, "code_text": error.code_text, "message": message, "details": details}
        ).decode()
    else:
        line = f"error: {one_line(message)}"
        if len(error.ids) > 1:
            line += f" (and {len(error.ids) - 1} more: {one_line(', '.join(error.ids[1:6]))})"
    typer.echo(line, err=True)
    if isinstance(error, CommandFailed):
        return error.exit_code
    return ExitCode.BAD_USAGE if isinstance(error, BadUrl) else ExitCode.FAILED


def advice(error: HoldfastError, *, server: str) -> str:
    """What to do next, where the text itself does not say it."""
    match error:
        case Unauthorized():
            return ", give it with --token-file or in HOLDFAST_TOKEN"
        case BrokerUnreachable() if "cannot be reached" in error.message:
            return "; check that it runs, and its host and port"
        case Unreachable() if "cannot be reached" in error.message:
            return "; start it with 'holdfast serve', or give another --url"
        case CannotStart() if error.message.startswith("data folder is in use"):
            where = f"--url {server}" if server else "give its address with --url http://HOST:PORT"
            return f"; if that process is a Holdfast server, talk to it: {where}"
    return ""


def one_line(text: str) -> str:
    """The text without anything that could move the cursor or look like another line."""
    return "".join(character if character.isprintable() else _escaped(character) for character in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
