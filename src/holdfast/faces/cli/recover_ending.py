"""How `holdfast recover` ends, whatever it recovered from: report, summary, exit code."""

from __future__ import annotations

from holdfast.core.recovery import Summary, summary_lines
from holdfast.faces.cli.context import CommandContext, CommandFailed, ExitCode
from holdfast.faces.cli.recover_report import ReportFile


def finish(session: CommandContext, summary: Summary, report: ReportFile | None) -> ExitCode:
    """Write and say the summary; returns what it means for a program. A report that fails does not silence it."""
    failed: CommandFailed | None = None
    if report is not None:
        try:
            report.write(summary)
        except CommandFailed as error:
            failed = error
    for line in summary_lines(summary):
        session.out.say(line)
    session.out.document(summary)
    if failed is not None:
        raise failed
    if summary.failure:
        return ExitCode.FAILED
    return ExitCode.DONE if summary.is_complete else ExitCode.PARTLY_DONE
