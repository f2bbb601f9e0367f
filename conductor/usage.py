"""Runs the command line so that a mistake in its use is one line, with option, value and what is allowed, like every other."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console

BAD_USAGE = 2
UsageError: type[Exception] = typer.BadParameter.__mro__[
    1
]  # under that name Typer exports it in some versions and not in others


def run(app: typer.Typer) -> int:
    """The exit code of the command that `sys.argv` names."""
    try:
        code = app(prog_name="conductor", standalone_mode=False)
    except UsageError as error:
        if type(error).__name__ != "NoArgsIsHelpError":  # making it has printed the help already
            Console(stderr=True).print(f"error: {complaint(error)}", style="red", markup=False, highlight=False, soft_wrap=True)
        return BAD_USAGE
    except typer.Abort:
        return 1
    return code if isinstance(code, int) else 0


def complaint(error: Any) -> str:
    """A usage error in one line."""
    faults = getattr(error.__cause__, "errors", None)  # of pydantic, which checks values; it alone knows the value
    if faults is not None and getattr(error, "param", None) is not None:
        fault = faults()[0]
        name = next(iter(error.param.opts), error.param.name)
        return f"{name} is {fault['input']!r}; allowed: {fault['msg'].removeprefix('Input should be ')}"
    context = getattr(error, "ctx", None)
    hint = "" if context is None else f" See `{context.command_path} --help`."
    return " ".join(error.format_message().split()).rstrip(".") + "." + hint
