"""The web console: pages for a person, rendered on the server. They ask what programs ask, and decide nothing.

Each module imported here registers its pages.
"""

from holdfast.faces.web import (
    groups,
    ledger,
    letter,
    letters,
    live,
    openapi,
    overview,
    queues,
    recovery,
    redrives,
    results,
    sessions,
    settings,
    topology,
)

__all__ = [
    "groups",
    "ledger",
    "letter",
    "letters",
    "live",
    "openapi",
    "overview",
    "queues",
    "recovery",
    "redrives",
    "results",
    "sessions",
    "settings",
    "topology",
]
