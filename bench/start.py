"""What a start costs: `import holdfast` and `holdfast --help` beside a Python that does nothing, in processor time.

Before requests were declared once, the import took 12.6 times as long as `python -c pass`, and the help 35 times.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

from bench.rounds import Target, report, run

VARIANTS = {
    "python -c pass": ("-c", "pass"),
    "import holdfast": ("-c", "import holdfast"),
    "holdfast --help": ("-m", "holdfast", "--help"),
    "holdfast queue --help": ("-m", "holdfast", "queue", "--help"),
}
BASE = "python -c pass"
#: Half of what it was is a must.
TARGETS = (Target("import holdfast", BASE, must=0.16, aim=0.4), Target("holdfast --help", BASE, must=0.057, aim=0.1))


def starts_per_s(arguments: Sequence[str], *, count: int) -> float:
    """How many starts fit into a second of the processor."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(count):
        subprocess.run([sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return count / (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def main(*, rounds: int, quick: bool) -> bool:
    """Whether it is at most half of what it was."""
    count = 3 if quick else 10
    variants = {name: partial(starts_per_s, arguments, count=count) for name, arguments in VARIANTS.items()}
    return report("start", run("start", variants, rounds=rounds), TARGETS)
