"""What `--help` shows, at 80 columns: words for values instead of Python types, and paragraphs that flow."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_args

_WORDS: dict[type, str] = {int: "N", float: "N", Path: "FILE"}
_DURATIONS = ("timeout", "retention", "expires_in", "older_than", "wait")


def for_people(command: Any) -> Any:
    """The command, or the tree of commands, with help that people can read."""
    if command.help:
        paragraphs = inspect.cleandoc(command.help).split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)
    for param in command.params:
        _in_words(param)
    help_option = command.get_help_option
    command.get_help_option = lambda context: _in_words(help_option(context))
    for child in getattr(command, "commands", {}).values():
        for_people(child)
    return command


def _in_words(param: Any) -> Any:
    if param is None:
        return None
    if param.metavar is None:
        param.metavar = _word(param)
    if param.param_type_name == "argument":
        usage = param.metavar if param.required else f"[{param.metavar}]"
        param.display_type_rich = lambda ctx: None
        param.get_usage_pieces = lambda context: [usage]
    return param


def _word(param: Any) -> str:
    if param.param_type_name == "argument":
        return str(param.name).upper()
    if param.is_flag:
        return ""
    kind = param.type_descriptor.annotation
    kind = next(iter(get_args(kind)), kind)  # a list of these
    if kind is str and str(param.name).endswith(_DURATIONS):
        return "DURATION"
    return _WORDS.get(kind, "TEXT")
