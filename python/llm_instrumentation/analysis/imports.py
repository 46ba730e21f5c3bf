"""Files of others as captures::

import_activations("hidden_states", "run.stream", format="vllm")
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .._atomic import sync_directory, typed_errors
from .._files import partial_beside, remove_leftovers
from .._native import Reader, Session
from ..core.config import HookGranularity, InstrumentationConfig
from ..core.files.calls_file import AboutModels, CallsFile, Column, calls_path_for
from ..core.files.earlier import EarlierFiles
from ..core.tensors.layouts import Layouts
from ..core.token_files import load_token_metadata, save_token_metadata, token_file_paths
from ..errors import (
    BusyError,
    InvalidArgumentError,
    StrapError,
    UnsupportedError,
)
from ..progress.bars import Progress, reported
from .files.import_sources import FORMATS, ImportedCall, ImportedTokens, Options, files_of
from .reading.elements import dtype_name

if TYPE_CHECKING:
    import torch

__all__ = ["ImportReport", "import_activations"]

_CODECS = ("none", "lz4", "zstd")  # those that keep every bit
_MEMORY_GB = 0.25  # 10^9 bytes of tensors that wait to be compressed and written
_WAITING_TOKENS = 1 << 16  # tokens whose rows are written to the calls file together


@dataclasses.dataclass(frozen=True)
class ImportReport:
    """The contents of an import.

    Attributes:
        path: the stream.
        format: the format of the source.
        files: number of files that were read.
        layers: the names of the layers.
        steps: number of steps: calls of the model that the files tell of.
        calls: number of steps whose tokens are in the calls file; 0: there is none.
        tokens: number of these tokens, those of padding included.
        bytes: the size of the stream and the files beside it.
    """

    path: str
    format: str
    files: int
    layers: tuple[str, ...]
    steps: int
    calls: int
    tokens: int
    bytes: int


def import_activations(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: str,  # noqa: A002 - the word of the command and of other libraries
    layer_names: str | Sequence[str] | None = None,
    widths: Mapping[str, int] | None = None,
    dtypes: Mapping[str, Any] | None = None,
    codec: str = "lz4",
    overwrite: bool = False,
    progress: Progress = None,
) -> ImportReport:
    """Makes a capture of files with activations that another program wrote.

    docs/howto/importing.md describes the formats. Values keep their type and all their bits,
    bfloat16 and float8 too. One tensor at a time is read, and at most 256 MiB wait to be written.
    The capture appears when it is complete and on disk.

    Args:
        source: a file, or a folder with files of the format. They are read in the order of their
            names.
        out: the stream. Its index and calls file appear beside it.
        format: "vllm", "torch" or "stream-1.3.1".
        layer_names: for "vllm": a pattern with {layer}, the number of the layer in the file from 0
            on, or a name for each layer; None: "layers.{layer}".
        widths: for "stream-1.3.1": how many values a token has, by name or pattern. Layers without
            a width stay without shapes.
        dtypes: for "stream-1.3.1": types of layers that are not float16, by name or pattern.
        codec: "none", "lz4" or "zstd".
        overwrite: replace what is at `out`, whatever it is, and the files that belong beside it.
        progress: show a progress bar; None: on a terminal, and in a notebook. Or a function to
            call with the bytes of the files that were read, and of all files.

    Raises:
        NotFoundError: (a FileNotFoundError) there is no such source.
        InvalidArgumentError: (a ValueError) an argument is out of its range; `out` exists; a file
            lacks a key, or has other shapes than the format or the other files.
        CorruptError: (a ValueError) a file is cut, damaged or of another format.
        UnsupportedError: (a TypeError) a file holds other objects than tensors, or tensors that
            have no dense values or are larger than the file has them.
        UnknownActivationError: (a KeyError) a pattern of `widths` or `dtypes` matches no layer.
        MissingExtraError: a package of the extra "export" is not installed.
        BusyError: (a BlockingIOError) a capture to `out` is running.
        NoSpaceError, StrapIOError: (an OSError) a file cannot be read or written.
    """
    if format not in FORMATS:
        raise InvalidArgumentError(f"format {format!r}: choose one of {', '.join(FORMATS)}")
    read, takes = FORMATS[format]
    options = Options(layer_names, widths, dtypes)
    for option, given in options._asdict().items():
        if given is not None and option not in takes:
            raise InvalidArgumentError(f"{option} is not for the format {format}")
    if codec not in _CODECS:
        raise InvalidArgumentError(f"codec {codec!r}: choose one of {', '.join(_CODECS)}")
    for dtype in (dtypes or {}).values():
        dtype_name(dtype)
    target = Path(os.path.realpath(out))
    files = files_of(Path(source), format)
    _check_target(target, files, overwrite)
    with (
        typed_errors(f"cannot import to {target}"),
        _replacing_capture(target) as folder,
        reported(progress, "importing", in_bytes=True) as told,
    ):
        stream = folder / target.name
        with _CaptureWriter(stream, codec) as writer:
            _copy(read, files, options, writer, told)
        if format == "stream-1.3.1":
            _copy_tokens(files, stream, writer.capture_id)
        return ImportReport(
            path=os.fspath(out),
            format=format,
            files=len(files),
            layers=tuple(writer.layers),
            steps=writer.steps,
            calls=writer.calls,
            tokens=writer.tokens,
            bytes=sum(path.stat().st_size for path in folder.iterdir()),
        )


def _copy(
    read: Callable[[Path, Options], Iterator[ImportedCall]],
    files: Sequence[Path],
    options: Options,
    writer: _CaptureWriter,
    told: Callable[[int, int], Any],
) -> None:
    sizes = [path.stat().st_size for path in files]
    for number, path in enumerate(files):
        for call in read(path, options):
            writer.add(call)
            told(sum(sizes[:number]) + int(sizes[number] * call.done), sum(sizes))
    if not writer.layers:
        raise InvalidArgumentError(f"{files[0]} has no activations")


def _copy_tokens(files: Sequence[Path], stream: Path, capture_id: str) -> None:
    """Copies the token file of a stream of 1.3.1. Several streams have no common one."""
    content = load_token_metadata(files[0]) if len(files) == 1 else None
    if content is not None:
        seconds = content.get("capture_duration_seconds", 0.0)
        save_token_metadata(stream, content["tokens"], seconds, capture_id)


class _CaptureWriter:
    """Writes calls as a stream, its index and its calls file. It is a context manager.

    Args:
        path: the stream.
        codec: its codec.

    Attributes:
        capture_id: the id of the capture.
        layers: the names of the layers, and the width and type of each.
        steps, calls, tokens: as in `ImportReport`.
    """

    def __init__(self, path: Path, codec: str) -> None:
        self._path = path
        config = InstrumentationConfig(HookGranularity.FULL_TENSOR, codec, max_memory_gb=_MEMORY_GB)
        self._session = Session(path, **config.with_float32().session_options())
        self.capture_id = self._session.capture_id
        self.layers: dict[str, tuple[int | None, torch.dtype]] = {}
        self.steps = self.calls = self.tokens = 0
        self._ids: dict[str, int] = {}
        self._calls: CallsFile | None = None
        self._columns: dict[str, list[Any]] = defaultdict(list)
        self._lists: dict[str, list[Column]] = defaultdict(list)
        self._waiting = 0
        self._first = self._next = 0  # the sequences of the call before, and the one after them

    def __enter__(self) -> _CaptureWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            if not self._session.closed:
                self._session.discard()
            if self._calls is not None:
                self._calls.close()

    def _finish(self) -> None:
        self._session.close()
        if self.calls:
            file = self._flush()
            file.end()

    def add(self, call: ImportedCall) -> None:
        """Adds a call as the next step.

        Raises:
            InvalidArgumentError: its layers, widths or types are not those of the calls before.
            UnsupportedError: a stream cannot hold one of its tensors.
        """
        there = set()
        for name, tensor in call.tensors:
            self._check(call, name, tensor)
            self._put(call, name, tensor)
            there.add(name)
        if call.tokens is not None and (missing := self.layers.keys() - there):
            raise InvalidArgumentError(
                f"{call.source}: no layer {min(missing)!r}, which the texts before have"
            )
        if call.tokens is not None:
            self._add_tokens(call.name, call.tokens)
        self.steps += 1

    def _check(self, call: ImportedCall, name: str, tensor: torch.Tensor) -> None:
        if self.calls and call.tokens is not None and name not in self.layers:
            raise InvalidArgumentError(
                f"{call.source}: a layer {name!r}, which the texts before do not have"
            )
        form = (tensor.shape[-1] if tensor.ndim > 1 else None), tensor.dtype
        if (known := self.layers.setdefault(name, form)) != form:
            was, now = (f"{width or 'any'} values of {dtype}" for width, dtype in (known, form))
            raise InvalidArgumentError(
                f"{call.source}: {name!r} has {now}, and before it had {was}"
            )

    def _put(self, call: ImportedCall, name: str, tensor: torch.Tensor) -> None:
        from ..core.tensors.enqueue import When, enqueue_tensor

        if name not in self._ids:
            self._ids[name] = self._session.layer(name)
        try:
            enqueue_tensor(self._session, self._ids[name], tensor, When(self.steps, call.token))
        except UnsupportedError as error:
            raise UnsupportedError(f"{call.source}: {name!r} is {error}") from error

    def _add_tokens(self, name: str, tokens: ImportedTokens) -> None:
        rows, length = tokens.rows, tokens.length
        if tokens.held is None:
            self._first, self._next = self._next, self._next + rows
        for column, cells in (
            ("step", [self.steps] * rows),
            ("row", range(rows)),
            ("model", [""] * rows),
            ("entry", [""] * rows),
            ("sequence", range(self._first, self._first + rows)),
            ("document", [name] if rows == 1 else [f"{name}[{row}]" for row in range(rows)]),
        ):
            self._columns[column] += cells
        for column in ("request", "labels", "inputs", "kept"):
            self._columns[column] += [None] * rows
        places = np.arange(length)
        if tokens.mask is not None:
            places = np.where(tokens.mask, tokens.mask.cumsum(axis=1) - 1, -1)
        positions = np.broadcast_to(places + (tokens.held or 0), (rows, length))
        known = {"token_ids": tokens.ids, "mask": tokens.mask, "positions": positions}
        for column in ("token_ids", "token_hashes", "mask", "positions", "token_types"):
            self._lists[column].append(Column(known.get(column), rows, length))
            self._lists[f"decoder_{column}"].append(Column(None, rows, 0))
        self.calls += 1
        self.tokens += rows * length
        self._waiting += rows * length
        if self._waiting >= _WAITING_TOKENS:
            self._flush()

    def _flush(self) -> CallsFile:
        """Writes the rows that wait to the calls file."""
        if self._calls is None:
            self._calls = CallsFile(
                calls_path_for(self._path),
                self.capture_id,
                AboutModels({}, {"": _BATCH_FIRST.record}, {}),
            )
        if self._columns:
            self._calls.write(self._columns, self._lists)
            self._columns, self._lists = defaultdict(list), defaultdict(list)
            self._waiting = 0
        return self._calls


# Files of others have [batch, tokens, width].
_BATCH_FIRST = Layouts({}, (), batch_first=True)


# ---- the place of the capture ---------------------------------------------------------------


def _names_beside(target: Path) -> list[Path]:
    """The files that an import may write, the stream last."""
    index = target.with_name(f"{target.name}.index")
    return [index, calls_path_for(target), *token_file_paths(target), target]


def _check_target(target: Path, files: Sequence[Path], overwrite: bool) -> None:
    """Refuses to replace files, and always the source, folders and a capture that is running.

    Raises:
        InvalidArgumentError: something would be replaced.
        BusyError: a capture is running.
    """
    for path in _names_beside(target):
        if path in [Path(os.path.realpath(file)) for file in files]:
            raise InvalidArgumentError(f"{path} is the source: choose another place")
        if path.is_dir():
            raise InvalidArgumentError(f"{path} is a folder: choose another name")
        if os.path.lexists(path) and not overwrite:
            raise InvalidArgumentError(
                f"{path} exists: choose another name, or replace the capture there with overwrite"
            )
    if _is_live(target):
        raise BusyError(f"a capture to {target} is running: choose another name")


def _is_live(stream: Path) -> bool:
    try:
        reader = Reader(stream)
    except StrapError:  # there is no stream
        return False
    reader.close()
    return reader.info.live


@contextlib.contextmanager
def _replacing_capture(target: Path) -> Iterator[Path]:
    """Yields a folder to write a capture to, and moves its files to their places at the end.

    The stream is moved last. If the process is killed before that, no stream is at its place.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target)
    with partial_beside(target, folder=True) as folder:
        yield folder
        earlier = dict.fromkeys([target, *EarlierFiles(target).paths, *_names_beside(target)])
        made = [path for path in _names_beside(target) if (folder / path.name).exists()]
        for path in made:
            with open(folder / path.name, "rb") as file:
                os.fsync(file.fileno())
        with partial_beside(target, folder=True) as aside, contextlib.ExitStack() as undo:
            for path in earlier:
                if os.path.lexists(path):
                    os.rename(path, aside / path.name)
                    undo.callback(os.replace, aside / path.name, path)
            for path in made:
                os.rename(folder / path.name, path)
                undo.callback(os.rename, path, folder / path.name)
            sync_directory(target.parent)
            undo.pop_all()
