"""SQL lives in files, one statement each, named verb_noun; migrations are numbered. This reads them."""

from __future__ import annotations

from importlib.resources import files


def statements(package: str) -> dict[str, str]:
    """Every `sql/*.sql` of an engine's package, by name."""
    folder = files(package) / "sql"
    return {
        entry.name.removesuffix(".sql"): entry.read_text("utf-8").strip()
        for entry in folder.iterdir()
        if entry.name.endswith(".sql")
    }


def migrated_kinds(package: str) -> list[str]:
    """The kinds of files or schemas that an engine's package has migrations for."""
    return sorted(entry.name for entry in (files(package) / "migrations").iterdir() if entry.is_dir())


def migrations(package: str, *, kind: str) -> dict[int, str]:
    """Every `migrations/<kind>/NNNN.sql` of an engine's package, by number, in order."""
    folder = files(package) / "migrations" / kind
    found = {
        int(entry.name.removesuffix(".sql")): entry.read_text("utf-8")
        for entry in folder.iterdir()
        if entry.name.endswith(".sql")
    }
    return dict(sorted(found.items()))
