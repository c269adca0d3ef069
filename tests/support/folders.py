"""Folders in memory, for suites in which no plug is pulled: a kill of a process leaves the kernel what was written, on
a disk and here alike, so that waiting for a disk would prove nothing more. `tests/faults` stays on the disk."""

from __future__ import annotations

import shutil
from pathlib import Path

MEMORY = Path("/dev/shm")
FREE_BYTES_MIN = 512 * 2**20  # containers often have 64 MiB


def memory_place() -> Path | None:
    """Where such folders can be; None: where all temporary files are, because there is no room."""
    return MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= FREE_BYTES_MIN else None
