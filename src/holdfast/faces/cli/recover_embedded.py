"""`holdfast recover` on an embedded dead queue: each item goes back to the queue it died in."""

from __future__ import annotations

from pathlib import Path

from holdfast.core.recovery import Limits
from holdfast.faces.cli.failures import CommandFailed, ExitCode
from holdfast.faces.cli.session import Session


async def recover_embedded(
    session: Session, url: str, dead_queue: str, *, limits: Limits, dry_run: bool, report: Path | None
) -> ExitCode:
    """Not built yet."""
    raise CommandFailed("embedded recovery is not there yet")
