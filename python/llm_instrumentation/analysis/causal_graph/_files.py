"""Causal graphs as files: our JSON, and the choice of the format by the end of the path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._atomic import typed_errors
from ..._files import write_text
from ..._json import load_json_file, to_json
from ..._parsing import parsing
from ...errors import CorruptError, InvalidArgumentError, NotFoundError, UnsupportedError

if TYPE_CHECKING:
    from . import CausalGraph

__all__ = ["FORMAT", "VERSION", "load", "save", "write_json"]

FORMAT = "llm_instrumentation.causal_graph"
VERSION = 1


def save(graph: CausalGraph, path: Path) -> Path:
    """See `causal_graph.save_graph`."""
    if path.suffix == ".json":
        return write_json(path, {"format": FORMAT, "version": VERSION, **graph.to_dict()})
    if path.suffix == ".graphml":
        from ._networkx import to_graphml

        text = to_graphml(graph)
    elif path.suffix in (".dot", ".gv"):
        text = graph.to_dot()
    elif path.suffix == ".html":
        from .page import graph_page

        text = graph_page(graph)
    else:
        raise InvalidArgumentError(
            f"{path}: graphs are written as .json, .graphml, .dot, .gv and .html"
        )
    return _write(path, text)


def load(path: Path) -> Mapping[str, Any]:
    """The values in a file of `save`, for `CausalGraph.from_dict`.

    Raises:
        NotFoundError, CorruptError, UnsupportedError, InvalidArgumentError, MissingExtraError: see
            `causal_graph.load_graph`.
    """
    readers = {".json": _load_json, ".graphml": _load_graphml}
    if path.suffix not in readers:
        raise InvalidArgumentError(f"{path}: graphs are read from .json and .graphml")
    try:
        return readers[path.suffix](path)
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no file {path}") from error


def _load_json(path: Path) -> Mapping[str, Any]:
    with parsing(path, "is no JSON"):
        record = load_json_file(path)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CorruptError(f'{path} holds no causal graph: it has no "format": "{FORMAT}"')
    if (version := record.get("version")) != VERSION:
        raise UnsupportedError(
            f"{path} has version {version!r}, this version reads {VERSION}: install a later "
            "llm_instrumentation"
        )
    return record


def _load_graphml(path: Path) -> Mapping[str, Any]:
    from ._networkx import from_graphml

    try:
        with parsing(path, "holds no causal graph"):
            return from_graphml(path.read_bytes())
    except InvalidArgumentError as error:
        raise CorruptError(f"{path} holds no causal graph: {error}") from error


def write_json(path: Path, record: Mapping[str, Any]) -> Path:
    """Replaces a file by JSON, as `save` does."""
    return _write(path, to_json(record))


def _write(path: Path, text: str) -> Path:
    with typed_errors(f"cannot write to {path}"):
        return write_text(path, text)
