"""How `holdfast recover` ends, whatever it recovered from: report, summary, exit code."""

from __future__ import annotations

from pathlib import Path

import msgspec

from holdfast.core.recovery import Summary
from holdfast.core.recovery_text import summary_lines
from holdfast.faces.cli.failures import CommandFailed, ExitCode
from holdfast.faces.cli.session import Session


def finish(session: Session, summary: Summary, report: Path | None) -> ExitCode:
    """Write and say the summary; returns what it means for a program."""
    if report is not None:
        try:
            report.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
        except OSError as error:
            raise CommandFailed(f"report cannot be written; '{report}': {error.strerror or error}") from error
    for line in summary_lines(summary):
        session.out.say(line)
    session.out.document(summary)
    if summary.failure:
        return ExitCode.FAILED
    return ExitCode.DONE if summary.is_complete else ExitCode.PARTLY_DONE
