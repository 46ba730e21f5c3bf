"""`strap serve`: a local page that looks into captures."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Annotated

import typer

from ..console import shown
from ..options import CAPTURES, CODES, FeatureFolder
from ..pretrained import pretrained, tokenizer_of

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog=CODES, rich_help_panel=CAPTURES)
def serve(
    streams: Annotated[
        list[Path], typer.Argument(help="The streams of captures.", metavar="STREAM...")
    ],
    port: Annotated[
        int, typer.Option("--port", help="Of 127.0.0.1; 0: a free one.", min=0, max=65535)
    ] = 0,
    features: FeatureFolder = None,
    effects: Annotated[
        list[Path] | None,
        typer.Option("--effects", help="A file of Effects.save. May be given again."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", help="For the texts of tokens: a folder, or a model's name."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The causal language model, for logits of units.")
    ] = None,
    opens: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Look into captures in a browser: layers, tokens, features, effects. Ctrl-C ends it."""
    from ...serve import CaptureServer
    from ..captures import open_capture

    with contextlib.ExitStack() as opened:
        readers = [opened.enter_context(open_capture(one, warn=False)) for one in streams]
        network, writes = None, None
        if model is not None:
            from ...interventions.unit_writes import written_by

            network = pretrained("--model", "AutoModelForCausalLM", model)
            writes = functools.partial(written_by, network)
        server = CaptureServer(
            readers, port=port, features=features, effects=effects or (),
            tokenizer=tokenizer_of(tokenizer, model), model=network, writes=writes,
        )  # fmt: skip
        names = ", ".join(shown(reader.path) for reader in readers)
        print(
            f"{names}: open this address in a browser; Ctrl-C ends the server\n{server.url}",
            flush=True,
        )
        if opens:
            import webbrowser

            webbrowser.open(server.url)
        server.run()
