"""The rows of captures as files of other libraries::

export_rows("run.stream", "rows", "model.layers.*", format="parquet")
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .._atomic import replacing_folder, sync_directory, typed_errors
from .._json import load_json_file, to_json
from ..errors import InvalidArgumentError
from ..progress.bars import Progress, reported
from .files.export_formats import FORMATS, TOKEN_IDS, Plan, dtype_in
from .files.export_source import COLUMNS_OF_EXPORTS, Source
from .reading.elements import dtype_name
from .reading.selection import Selector
from .token_rows.capture_tokens import LayersDifferError

__all__ = ["DEFAULT_COLUMNS", "ExportReport", "LayersDifferError", "export_rows"]

#: The columns of an export, unless the caller names others.
DEFAULT_COLUMNS = ("token_id", "position", "sequence", "step", "document")
"""The columns that `export_rows` writes by default."""

_MANIFEST = "_export.json"
_OURS = "llm_instrumentation.export"
_MOST_ELEMENTS = 1 << 31  # of one list in Arrow


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """The contents of an export.

    Attributes:
        path: its folder.
        format: its format.
        captures: the streams.
        layers: the names of the layers.
        columns: the names of the columns.
        dtypes: the type of each layer's values in the export.
        rows: number of rows.
        contexts: number of whole contexts; None: it has no contexts.
        left_out_rows: rows that are in no whole context.
        left_out_activations: activations whose call is not in the calls file, see `Rows.left_out`;
            of the layer that has the most.
        files: the names of its files.
        bytes: the size of all files.
    """

    path: str
    format: str
    captures: tuple[str, ...]
    layers: tuple[str, ...]
    columns: tuple[str, ...]
    dtypes: tuple[str, ...]
    rows: int
    contexts: int | None
    left_out_rows: int
    left_out_activations: int
    files: tuple[str, ...]
    bytes: int


def export_rows(
    captures: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    layers: str | Iterable[str],
    *,
    format: str,  # noqa: A002 - the word of the command and of other libraries
    columns: Iterable[str] = DEFAULT_COLUMNS,
    steps: Selector = None,
    padding: bool = False,
    without_tokens: Iterable[int] = (),
    dtype: Any = None,
    shard_bytes: int = 256 << 20,
    context: int | None = None,
    overwrite: bool = False,
    progress: Progress = None,
) -> ExportReport:
    """Writes the rows of some layers to a folder, in a format of other libraries.

    docs/howto/exporting.md describes the files of each format. The folder appears when it is
    complete and on disk; a failed export leaves what was there before. Rows are read 32 MiB at a
    time; with "safetensors" a shard is in memory. Every format takes 8 bytes for each row. The
    vectors of the layers may have different shapes.

    Args:
        captures: the path of a stream, or several. Their rows follow each other, in the order of
            capture.
        out: the folder. An earlier export there is replaced, unless files were added to it.
        layers: names or patterns, as for `ActivationReader.select`. The layers need the same tokens
            in the same order.
        format: "safetensors", "parquet", "npy" or "datasets".
        columns: columns of `Rows.column`, without "text", and "capture", the number of the capture
            from 0 on. Steps and sequences count anew in each capture.
        steps: the steps, as for `ActivationReader.select`, of every capture; None: all. The last
            step of a capture whose process died may lack some of the layers.
        padding: also export rows of tokens that the mask leaves out.
        without_tokens: ids of tokens without a row.
        dtype: convert the values to this type. None: as they are stored; where the format has no
            bfloat16 or float8, they become float32, exactly.
        shard_bytes: about the size of a file, for formats other than "npy".
        context: for "datasets": a row has so many tokens of a text, in the layout of SAELens'
            cached activations. Rows that fill no whole context are left out and counted. The
            columns are the layers and "token_ids".
        overwrite: replace what is at `out`, whatever it is, except a folder with one of the
            captures.
        progress: show a progress bar; None: on a terminal, and in a notebook. Or a function to
            call with the rows that were written, and all rows.

    Raises:
        InvalidArgumentError: (a ValueError) an argument is out of its range; `out` exists and is
            no export; captures differ in layers, shapes or types; or no row is left.
        LayersDifferError: (a ValueError) layers have different tokens; the message names the first
            difference.
        NotTokenAlignedError, NoCallsError, UnknownActivationError: as for `ActivationReader.rows`.
        UnsupportedError: the format has no such values, as complex ones.
        MissingExtraError: a package of the extra "export" is not installed.
        CorruptError: (a ValueError) bytes of a capture differ from the written ones.
        NoSpaceError, StrapIOError: (an OSError) the files cannot be written.
    """
    streams = _listed(captures)
    names, wanted = _listed(layers), tuple(columns)
    if format not in FORMATS:
        raise InvalidArgumentError(f"format {format!r}: choose one of {', '.join(FORMATS)}")
    if not streams:
        raise InvalidArgumentError("captures: name at least one")
    if shard_bytes < 1:
        raise InvalidArgumentError(f"shard_bytes {shard_bytes}: give a number of bytes above 0")
    wanted = _columns(wanted, format, context)
    target = Path(os.path.realpath(out))
    _check_target(target, streams, overwrite)
    kind = None if dtype is None else dtype_name(dtype)
    with contextlib.ExitStack() as opened:
        source = Source(
            streams, names, steps=steps, padding=padding, without_tokens=without_tokens,
            dtype_of=functools.partial(dtype_in, format, kind), context=context, opened=opened,
        )  # fmt: skip
        _check_layers(source, wanted, context)
        told = opened.enter_context(reported(progress, f"exporting {source.length:,} rows"))
        plan = Plan(source, wanted, shard_bytes, context, _counter(source.length, told))
        report = ExportReport(
            path=os.fspath(out),
            format=format,
            captures=tuple(map(os.fspath, streams)),
            layers=tuple(layer.name for layer in source.layers),
            columns=wanted,
            dtypes=tuple(layer.dtype for layer in source.layers),
            rows=source.length,
            contexts=None if context is None else source.length // context,
            left_out_rows=source.left_out_rows,
            left_out_activations=source.left_out_activations,
            files=(),
            bytes=0,
        )
        with typed_errors(f"cannot write to {target}"), replacing_folder(target) as folder:
            FORMATS[format](folder, plan)
            return _finished(folder, report)


def _listed(given: Any) -> list[Any]:
    return [given] if isinstance(given, (str, os.PathLike)) else list(given)


def _columns(wanted: tuple[str, ...], format: str, context: int | None) -> tuple[str, ...]:  # noqa: A002
    """The columns of the export.

    Raises:
        InvalidArgumentError: there are no such columns, or no context of this size.
    """
    if context is not None:
        if format != "datasets":
            raise InvalidArgumentError(f"context is for the format datasets, not for {format}")
        if context < 1:
            raise InvalidArgumentError(f"context {context}: give a number of tokens above 0")
        if wanted != DEFAULT_COLUMNS:
            raise InvalidArgumentError(
                f"context gives the column {TOKEN_IDS} alone: leave columns or context out"
            )
        return (TOKEN_IDS,)
    for name in wanted:
        if name not in COLUMNS_OF_EXPORTS:
            choice = ", ".join(COLUMNS_OF_EXPORTS)
            raise InvalidArgumentError(f"no column {name!r}: choose some of {choice}")
    return tuple(dict.fromkeys(wanted))


def _check_layers(source: Source, columns: tuple[str, ...], context: int | None) -> None:
    for layer in source.layers:
        if layer.name in columns:
            raise InvalidArgumentError(
                f"{layer.name!r} is a layer and a column: leave one of them out"
            )
        if context is not None and context * math.prod(layer.shape) >= _MOST_ELEMENTS:
            raise InvalidArgumentError(
                f"context {context}: {layer.name!r} has 2^31 values or more in it"
            )


def _counter(total: int, told: Callable[[int, int], Any]) -> Callable[[int], None]:
    done = 0

    def advance(rows: int) -> None:
        nonlocal done
        done += rows
        told(done, total)

    return advance


# ---- the folder -----------------------------------------------------------------------------


def _check_target(target: Path, streams: list[Any], overwrite: bool) -> None:
    """Refuses to replace what is no export, and always a folder with one of the captures.

    Raises:
        InvalidArgumentError: it would be replaced.
    """
    for stream in streams:
        if target in [(path := Path(os.path.realpath(stream))), *path.parents]:
            raise InvalidArgumentError(f"{target}: it has the capture {os.fspath(stream)}")
    if target.exists() and not overwrite and not _is_export(target):
        raise InvalidArgumentError(
            f"{target} exists and is no export, or has other files too: choose another folder, or "
            "replace it with overwrite"
        )


def _is_export(target: Path) -> bool:
    """Whether it is an empty folder, or a folder with the files of one export and no others."""
    if not target.is_dir():
        return False
    there = set(os.listdir(target))
    if not there:
        return True
    try:
        manifest = load_json_file(target / _MANIFEST)
        return manifest["kind"] == _OURS and there <= {_MANIFEST, *manifest["files"]}
    except (OSError, ArithmeticError, ValueError, LookupError, TypeError):
        return False


def _finished(folder: Path, report: ExportReport) -> ExportReport:
    """Writes the manifest, and syncs all files to disk."""
    names = sorted(os.listdir(folder))
    manifest = {
        "kind": _OURS,
        "version": 1,
        "format": report.format,
        "captures": [os.path.basename(capture) for capture in report.captures],
        "layers": dict(zip(report.layers, report.dtypes, strict=True)),
        "columns": report.columns,
        "rows": report.rows,
        "contexts": report.contexts,
        "left_out_rows": report.left_out_rows,
        "files": names,
    }
    (folder / _MANIFEST).write_text(to_json(manifest), encoding="utf-8")
    files = (*names, _MANIFEST)
    for name in files:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
    sync_directory(folder)
    size = sum((folder / name).stat().st_size for name in files)
    return dataclasses.replace(report, files=files, bytes=size)
