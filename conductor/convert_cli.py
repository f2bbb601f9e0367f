"""`conductor convert`: a model in a form that costs less to serve, written as a folder, with what the form costs in quality.

The figures come with the model: perplexity before and after on text that the user gives, and the bytes of KV a token. Whether
the trade is a good one is the user's to say.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

BAD_INPUT = 2

convert_app = typer.Typer(no_args_is_help=True, help="Write a model in a form that costs less to serve.")


@convert_app.callback()
def convert() -> None:
    """Makes a command's name be asked for, also as long as there is one alone."""


@convert_app.command("mla")
def convert_mla(
    target: Annotated[Path, typer.Argument(help="Folder to write; `conductor serve --model` loads it.", metavar="FOLDER")],
    text: Annotated[Path, typer.Option(help="Ordinary text: half of it calibrates, half is scored.")],
    model: Annotated[str, typer.Option(help="Model name, .gguf file or Hugging Face folder.")] = "smollm2-135m",
    rope_dim: Annotated[int, typer.Option(help="Key numbers that stay rotary.")] = 96,
    rank: Annotated[int | None, typer.Option(help="Latent numbers a token and layer; by measured loss if not given.")] = None,
    max_rise: Annotated[float, typer.Option(help="Loss allowed in choosing the rank: rise of perplexity.")] = 0.05,
    tokens: Annotated[int, typer.Option(help="Tokens of the text to use.")] = 2048,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Turn grouped-query attention into latent attention, without training; print what it saves and what it costs."""
    from models.convert_folder import Wanted, convert_folder
    from models.errors import ModelError

    try:
        words = text.read_text(encoding="utf-8")
        done = convert_folder(model, target, words, Wanted(rope_dim, rank, max_rise, tokens))
    except (OSError, ValueError, ModelError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from None
    figures = asdict(done) | {"rise": done.rise}
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        typer.echo(f"{name}: {value}")
