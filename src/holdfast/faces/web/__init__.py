"""The web console: pages for a person, rendered on the server. They ask what programs ask, and decide nothing.

Each module imported here registers its pages.
"""

from holdfast.faces.web import ledger, letters, live, openapi, overview, queues, sessions, settings

__all__ = ["ledger", "letters", "live", "openapi", "overview", "queues", "sessions", "settings"]
