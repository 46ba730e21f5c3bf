"""The subcommand `strap serve`: a local page that looks into captures."""

from __future__ import annotations

import contextlib
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from ..serve import CaptureServer
from .captures import open_capture
from .console import shown
from .opening import Opening

__all__ = ["serve"]


def serve(
    streams: Sequence[Path | Opening],
    port: int,
    features: Path | None,
    tokenizer: str | None,
    opens: bool,
) -> None:
    """Serves captures until Ctrl-C."""
    with contextlib.ExitStack() as opened:
        readers = [opened.enter_context(open_capture(one, warn=False)) for one in streams]
        decoder = None
        if tokenizer is not None:
            from .pretrained import pretrained

            decoder = pretrained("--tokenizer", "AutoTokenizer", tokenizer)
        server = CaptureServer(readers, port=port, features=features, tokenizer=decoder)
        names = ", ".join(shown(reader.path) for reader in readers)
        print(
            f"{names}: open this address in a browser; Ctrl-C ends the server\n{server.url}",
            flush=True,
        )
        if opens:
            webbrowser.open(server.url)
        server.run()
