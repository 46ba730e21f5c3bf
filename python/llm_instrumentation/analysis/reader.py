"""Reading a capture: layers, steps, and activations as torch tensors or numpy arrays::

with ActivationReader("run.stream") as reader:
    reader.layers                                  # ("embeddings", "encoder.layer.0", ...)
    reader["encoder.layer.0"][0].to_torch()
    reader["encoder.layer.0"].at(step=3).to_numpy()
    reader.select("encoder.*", steps=slice(0, 10)).stack()
    reader.index.to_pandas()
"""

from __future__ import annotations

import difflib
import functools
import math
import operator
import os
import re
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from .._extras import extra
from .._native import ReaderInfo, capture_id_of
from .._pages import units
from .._warn import warn
from ..core.config import SiteKind
from ..core.files.run_folder import is_run_folder
from ..core.files.run_records import RunRecord
from ..core.token_files import load_token_metadata
from ..errors import (
    InvalidArgumentError,
    StrapError,
    StrapTimeoutError,
)
from ..progress.bars import Progress
from ..storage import RemoteRun, StorageOptions, open_reader, open_run, url_of
from .activation import Activation
from .reading.ahead import Ahead
from .reading.calls import Calls, CallsOf
from .reading.catalogue import Alike
from .reading.elements import (
    dtype_name,
    element_size,
    from_storage,
    numpy_dtype,
    refuse_view,
    storage_dtype,
    torch_dtype,
)
from .reading.follow import windows
from .reading.joined import JoinedReader
from .reading.packet_reader import PacketReader
from .reading.parts import joined
from .reading.remote_run import RemoteRunStreams
from .reading.run_folder import RunStreams
from .reading.selection import Selector, among, bounds
from .reading.snapshot import Snapshot, StoredForm
from .rows import NoCallsError, Rows
from .salvage import SalvageReport, salvage
from .token_rows.layer_tokens import LayerTokens

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import torch

__all__ = ["Activation", "ActivationReader", "ActivationView", "UnknownActivationError"]

# For each column: its sorted numbers, and their places in the view; None if they are sorted there.
_Orders: TypeAlias = "dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]]"

_ITERATED = 4096  # rows of a view that an iteration converts to Python numbers at a time
_CONVERTED_BYTES = 4 << 20  # bytes that are decoded at a time and then converted to another type
_TOLD = 5  # names in a message


class UnknownActivationError(StrapError, KeyError):
    """The capture has no such layer or activation; the message names similar ones."""

    __str__ = Exception.__str__  # KeyError's shows the message in quotes


class ActivationReader:
    """The activations of a capture. Thread-safe; close it or use it as a context manager.

    After `close` the data of the index stays available; values do not.

    It joins split tensors, and a float32 twin belongs to its float16 packet. In a notebook a reader
    shows a table of its layers. Long work shows its progress on terminals and below the cell of a
    notebook, without ipywidgets; ``progress=False`` hides it, and True shows it elsewhere too.

    A packet that no index describes has no type, because the stream does not contain types. Its
    bytes are read as float16, the format of stored float32.

    Args:
        path: the stream; its index and token file are expected beside it. A URL of s3, gs, az or
            file reads an object: see `llm_instrumentation.storage`.
        ignore_index: find the packets by scanning the stream, without its index.
        warn: warn with a `RuntimeWarning` if `problem` is not empty, and if neither an index nor
            `dtypes` gives the type of an activation.
        dtypes: stored types of the activations that no index describes, by name or pattern as in
            `select`: {"*": "bfloat16", "embed": torch.int64}. The last match counts. If an index
            gives the type, `dtypes` is ignored.
        storage: how the store of a URL is reached; None: by the environment.

    Attributes:
        path: the path or URL of the stream, as a str.
        info: facts that opening the stream found. `info.live`: a capture is writing the stream.
        layers: names of the captured tensors (layer and place in its output) in the order of their
            first appearance: "h.0", "h.0[1]"; the root module's is "".
        steps: the numbers of the forward steps that have activations, sorted.
        tokens: the token numbers that have activations, sorted.

    Raises:
        NotFoundError: (a FileNotFoundError) there is no such file.
        CorruptError: (a ValueError) the file is no stream.
        UnknownActivationError: (a KeyError) a name or pattern of `dtypes` matches no layer.
        InvalidArgumentError: (a ValueError) `dtypes` has a value that is no type of a capture.
        StrapError: the stream cannot be read for another reason.
    """

    _streams: RunStreams | None = None  # of a run folder

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        ignore_index: bool = False,
        warn: bool = True,
        dtypes: Mapping[str, Any] | None = None,
        storage: StorageOptions | None = None,
    ) -> None:
        self.path = url_of(path) or os.fspath(path)
        self._storage = storage
        self._warn = warn
        self._told_padding = False
        self._dtypes = {pattern: dtype_name(dtype) for pattern, dtype in (dtypes or {}).items()}
        self._closing = threading.Lock()
        self._refreshing = threading.Lock()
        self._closed = False
        self._calls: Calls | None = None
        # All snapshots in use, including those of `follow` and those that `refresh` has replaced.
        self._snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        packets = self._open(ignore_index)
        try:
            self._show(Snapshot(self.path, packets))
            for pattern in self._dtypes:
                self._fitting(pattern)
        except BaseException:
            packets.close()
            raise
        self._tell(self._snapshot, stacklevel=3)

    def _open(self, ignore_index: bool) -> PacketReader:
        run = open_run(self.path, self._storage)
        if isinstance(run, RemoteRun):
            self._streams = RemoteRunStreams(run, ignore_index=ignore_index, options=self._storage)
        elif run is not None or (os.path.isdir(self.path) and is_run_folder(self.path)):
            folder = self.path if run is None else os.fspath(run)
            self._streams = RunStreams(folder, ignore_index=ignore_index)
        else:
            return open_reader(self.path, ignore_index=ignore_index, options=self._storage)
        return JoinedReader(self.path, self._streams)

    @property
    def _file(self) -> str:
        """The stream on this machine: of a URL the copy, which has the small files beside it."""
        return self._snapshot.packets.path

    @property
    def fetched_bytes(self) -> int:
        """Bytes that were received from the store of a URL until now; 0 for a path."""
        return self._snapshot.packets.fetched_bytes

    def _show(self, snapshot: Snapshot) -> None:
        """Makes a snapshot the reader's present one."""
        self._enter(snapshot)
        self._snapshot = snapshot
        self._calls = None
        self._catalogue = snapshot.catalogue
        self.info: ReaderInfo = snapshot.packets.info
        self.layers: tuple[str, ...] = self._catalogue.layers()
        # Sorted columns of the view of all activations and of each layer's view, kept for reuse.
        self._orders: dict[str | None, _Orders] = {}
        self.steps = self._distinct("step")
        self.tokens = self._distinct("token")

    def _enter(self, snapshot: Snapshot) -> None:
        """Gives a snapshot the caller's types, and registers it to be closed with the reader."""
        names = snapshot.catalogue.layers() if self._dtypes else ()
        for pattern, dtype in self._dtypes.items():
            snapshot.catalogue.said.update(dict.fromkeys(_matching(pattern, names), dtype))
        with self._closing:
            if self._closed:
                snapshot.close()
            self._snapshots.add(snapshot)

    def _tell(self, snapshot: Snapshot, stacklevel: int) -> None:
        if self._warn and (problem := snapshot.packets.info.problem):
            warnings.warn(f"{self.path}: {problem}", RuntimeWarning, stacklevel)
        if self._warn and (names := snapshot.catalogue.untyped()):
            message = f"{self.path}: {_unknown_types(names)}"
            warnings.warn(message, RuntimeWarning, stacklevel)

    def _distinct(self, column: str) -> tuple[int, ...]:
        values = self._catalogue.numbers(column)[self._catalogue.activations]
        ends = np.flatnonzero(values[1:] != values[:-1])  # one of each run is enough
        found = np.unique(np.append(values[ends], values[-1:]))
        return tuple(found[found >= 0].tolist())

    @property
    def problem(self) -> str:
        """The damage of the stream or its index, such as a torn tail; "" if there is none.

        While a capture writes the stream (`info.live`), a torn tail is normal and not reported.
        """
        return self.info.problem

    @property
    def missing(self) -> ActivationView:
        """Tensors that were dropped, could not be captured or are incomplete: see their `error`."""
        return ActivationView(self._snapshot, self._catalogue.missing)

    @property
    def index(self) -> pa.Table:
        """The index, one row for each packet or note; docs/STREAM_FORMAT.md lists its columns.

        It is a pyarrow table. A type checker sees that type if `pyarrow-stubs` is installed,
        otherwise `Any`.
        """
        return self._catalogue.columns.table()

    @functools.cached_property
    def token_metadata(self) -> dict[str, Any] | None:
        """The token file: total_tokens, tokens, capture_duration_seconds; None if there is none,
        and for a run folder.

        Raises:
            TokenFileError: (a ValueError) the file is damaged.
        """
        return load_token_metadata(self._file)

    def __len__(self) -> int:
        """Number of activations. Split tensors count once, and twins do not count."""
        return len(self._catalogue.activations)

    def __iter__(self) -> Iterator[Activation]:
        """All activations in capture order."""
        return iter(self.select())

    def __contains__(self, layer: object) -> bool:
        return layer in self._catalogue.rows_by_name

    def __getitem__(self, layer: str) -> ActivationView:
        """The activations of a layer, in capture order.

        Raises:
            UnknownActivationError: (a KeyError) no activation has this name.
        """
        rows = self._rows_of(layer)
        return ActivationView(self._snapshot, rows, self._orders.setdefault(layer, {}))

    def select(
        self,
        layers: str | Iterable[str] | None = None,
        *,
        steps: Selector = None,
        tokens: Selector = None,
        calls: Selector = None,
        requests: str | Iterable[str] | None = None,
    ) -> ActivationView:
        """The activations of some layers and steps, in capture order; nothing is decoded yet.

        Args:
            layers: names or patterns: `*` matches any characters and `?` one character; brackets
                are literal. None: all.
            steps: the steps, as for `ActivationView.select`.
            tokens: the tokens, as for `ActivationView.select`.
            calls: the calls, as for `ActivationView.select`.
            requests: the requests, as for `ActivationView.select`.

        Raises:
            UnknownActivationError: (a KeyError) a name or pattern matches no layer.
        """
        if layers is None:
            orders = self._orders.setdefault(None, {})
            view = ActivationView(self._snapshot, self._catalogue.activations, orders)
        else:
            patterns = [layers] if isinstance(layers, str) else list(layers)
            names = dict.fromkeys(name for pattern in patterns for name in self._fitting(pattern))
            rows = [self._catalogue.rows_by_name[name] for name in names]
            if len(names) == 1:
                view = self[next(iter(names))]
            else:
                view = ActivationView(
                    self._snapshot, np.sort(np.concatenate([np.empty(0, np.int64), *rows]))
                )
        return view.select(steps=steps, tokens=tokens, calls=calls, requests=requests)

    def joined(
        self,
        layer: str,
        step: int | None = None,
        *,
        call: int | None = None,
        dim: int | None = None,
        dtype: Any = None,
    ) -> torch.Tensor:
        """Joins the parts of one tensor that the ranks hold.

        The parts of a DTensor go where the index says. A tensor that all ranks have is returned
        once.

        Args:
            layer: the layer's name.
            step: the step; None: the layer has one.
            call: the call of the module in its step; None: the module has one.
            dim: the dimension along which the ranks' plain tensors are joined, in the order of the
                ranks. The index does not know it of an output that a module returns as a local
                tensor. Not for parts of a DTensor.
            dtype: as in `Activation.to_torch`.

        Raises:
            UnknownActivationError: (a KeyError) there is no such activation.
            InvalidArgumentError: (a ValueError) the index does not say how the parts fit: the ranks
                have other values and `dim` is None, several activations of a rank fit, or the parts
                are partial sums.
            NotFoundError: a part is missing.
        """
        return joined(self[layer].select(steps=step, calls=call), layer, dim, dtype)

    def rows(
        self,
        layer: str,
        *,
        steps: Selector = None,
        requests: str | Iterable[str] | None = None,
        padding: bool = False,
        refused: bool = False,
        without_tokens: Iterable[int] = (),
        tokenizer: Any = None,
        without_calls: bool = False,
    ) -> Rows:
        """The vectors of a layer, a row for each token that the model was given.

        Outputs of the shapes [batch, tokens, width], [tokens, width] (the tokens of all rows of the
        batch one after the other), [tokens, batch, width], [batch, heads, tokens, width] and
        [batch, tokens, heads, width] have rows. The vectors of the last two are [heads, width]. The
        calls file says what each token was.

        Where a mask does not say which tokens are padding, `rows` warns and keeps them all.
        Activations whose call is not in the calls file, as at the end of a capture whose process
        died, are left out; `rows` warns of them when the capture has ended.

        Args:
            layer: the layer's name.
            steps: the steps, as for `select`; None: all.
            requests: the requests, as for `select`; None: all.
            padding: also give rows of tokens that the mask leaves out.
            refused: also give rows of tokens that a generation took back, as those of a draft that
                it refused with an assistant or with prompt lookup. Their column "accepted" is
                False. See :mod:`llm_instrumentation.analysis.rows`.
            without_tokens: ids of tokens without a row, as those of special tokens.
            tokenizer: its `decode` gives the column "text".
            without_calls: take rows and tokens from the shapes alone, for a capture that does not
                have what the model was given. Then `position` is the place in the tensor, and
                padding, token ids and documents are unknown.

        Raises:
            UnknownActivationError: (a KeyError) no activation has this name.
            NotTokenAlignedError: (a ValueError) the layer has no vector for each token.
            NoCallsError: (a LookupError) the capture does not have what the model was given.
        """
        vectors = self._vectors(layer, steps, requests, tokenizer, without_calls)
        if vectors.left_out and self._warn and not self.info.live:
            warn(
                f"the calls file of {self.path} lacks the calls of {vectors.left_out:,} "
                f"activations of {layer!r}: their rows are left out"
            )
        numbers = vectors.kept(padding, without_tokens, refused)
        return Rows(vectors, np.arange(vectors.tokens) if numbers is None else numbers)

    def _vectors(
        self, layer: str, steps: Selector, requests: Any, tokenizer: Any, without_calls: bool
    ) -> LayerTokens:
        chosen = self[layer].select(steps=steps, requests=requests)
        if not len(chosen):
            raise UnknownActivationError(f"no activation of {layer!r} is chosen")
        calls = None if without_calls else self._calls_of_capture()
        vectors = LayerTokens(self._snapshot, chosen._rows, calls, tokenizer)
        if vectors.unknown_padding and self._warn and not self._told_padding:
            self._told_padding = True
            warn(
                f"{self.path}: {vectors.unknown_padding:,} activations of {layer!r} are of calls "
                "with a mask that does not say which tokens are padding. Padding has rows too; "
                'their column "padding" is -1'
            )
        return vectors

    def names(
        self, site: SiteKind, layers: int | Iterable[int] | None = None, *, stack: str | None = None
    ) -> list[str]:
        """The names of layers by what they are in the model, whatever its architecture calls them.

        Args:
            site: see `InstrumentationConfig.with_sites`.
            layers: numbers of layers, from 0; negative ones count from the end. None: all that have
                the site and were captured.
            stack: a part of the name of the list of layers, for models with several, such as
                "decoder".

        Raises:
            UnknownActivationError: (a KeyError) `layers` is None, and none was captured.
            NoCallsError: (a LookupError) the capture does not say what is what in its model.
            InvalidArgumentError: (a ValueError) the model does not have the site, or it is not
                known; or it has several stacks, or the capture several models.
        """
        sites = self._calls_of_capture().sites
        if not sites:
            raise NoCallsError(
                f"the calls file of {self.path} does not say which layer is the {site}, because "
                "an older release or an import made it: choose layers by their names"
            )
        if len(sites) > 1:
            raise InvalidArgumentError(
                f"{self.path} has several models, {', '.join(sites)}: choose layers by their names"
            )
        (of_model,) = sites.values()
        found = of_model.find(site, layers, stack=stack)
        if layers is not None:
            return found
        if not (captured := [name for name in found if name in self]):
            raise UnknownActivationError(self._unknown(found[0], self.layers))
        return captured

    def residual(self, layer: int, *, stack: str | None = None) -> ActivationView:
        """The residual stream behind a layer, which is what the layer returns; see `names`.

        Args:
            layer: the number of the layer, from 0; negative ones count from the end.
            stack: see `names`.

        Raises:
            UnknownActivationError: (a KeyError) it was not captured.
            NoCallsError, InvalidArgumentError: as `names`.
        """
        return self[self.names("residual", layer, stack=stack)[0]]

    def attention(self, layer: int, *, stack: str | None = None) -> ActivationView:
        """What the attention of a layer returns, before it is added; as `residual`."""
        return self[self.names("attention", layer, stack=stack)[0]]

    def mlp(self, layer: int, *, stack: str | None = None) -> ActivationView:
        """What the feed-forward block of a layer returns, before it is added; as `residual`."""
        return self[self.names("mlp", layer, stack=stack)[0]]

    @property
    def capture_id(self) -> str | None:
        """The unique id of the capture, or of the run of a run folder.

        None: the index has none, or is missing.
        """
        return capture_id_of(self._file) if self.run is None else self.run.run_id

    @property
    def run(self) -> RunRecord | None:
        """The content of a run folder's manifest or rank files; None: the reader reads one stream.

        It has `run_id`, `world_size`, `mesh`, `model`, `configuration`, `hosts`, `shards` (the
        streams, by rank) and `finished`. `run.clock_of(rank)` is the time base of the machine of a
        rank.
        """
        return None if self._streams is None else self._streams.run

    def _calls_of_capture(self) -> Calls:
        if self._calls is None:
            self._snapshot.packets.fetch_calls()
            stream = CallsOf(self._file, self.capture_id)
            streams = [stream] if self._streams is None else self._streams.calls()
            self._calls = Calls(self.path, streams)
        return self._calls

    def _fitting(self, pattern: str) -> list[str]:
        if names := _matching(pattern, self.layers):
            return names
        raise UnknownActivationError(self._unknown(pattern, self.layers))

    def _rows_of(self, layer: str) -> npt.NDArray[np.int64]:
        try:
            return self._catalogue.rows_by_name[layer]
        except KeyError:
            raise UnknownActivationError(self._unknown(layer, self.layers)) from None

    def _unknown(self, layer: Any, layers: Sequence[str]) -> str:
        message = f"{self.path} has no activation named {layer!r}"
        if not isinstance(layer, str):
            return f"{message}: names are strings"
        for activation in self.missing:
            if activation.name == layer:
                return f"{message}, as it is missing: {activation.error}"
        close = difflib.get_close_matches(layer, layers, n=5)
        close += [name for name in layers if layer and layer in name and name not in close]
        if close:
            return f"{message}. Did you mean {', '.join(map(repr, close[:5]))}?"
        more = f" and {len(layers) - _TOLD} more" if len(layers) > _TOLD else ""
        return f"{message}. It has {', '.join(map(repr, layers[:_TOLD])) or 'none'}{more}"

    @staticmethod
    def salvage(
        path: str | os.PathLike[str],
        out: str | os.PathLike[str] | None = None,
        *,
        force: bool = False,
        progress: Progress = None,
    ) -> SalvageReport:
        """Copies the intact packets of a damaged stream to a new one; see `salvage.salvage`."""
        return salvage(path, out, force=force, progress=progress)

    def refresh(self) -> int:
        """Adds the activations that a running capture has written since the last look.

        `layers`, `steps` and all other attributes follow. Existing views and activations do not
        change. Only the new part of the index is read. The table of activations is built again,
        which took 23 to 32 ms for 200,000 packets of 200 layers.

        Returns:
            The number of new activations.

        Raises:
            NotFoundError: (a FileNotFoundError) the stream at the path is another one now, or was
                cut back by a capture that resumes: open it again.
            InvalidStateError: the reader is closed.
        """
        with self._refreshing:
            if (snapshot := self._snapshot.follow(0)) is None:
                return 0
            before, problem = len(self), self.problem
            self._show(snapshot)
            self.__dict__.pop("token_metadata", None)
            if self.problem != problem:
                self._tell(snapshot, stacklevel=3)
            return len(self) - before

    def follow(
        self,
        layers: str | Iterable[str] | None = None,
        *,
        steps: Selector = None,
        tokens: Selector = None,
        calls: Selector = None,
        requests: str | Iterable[str] | None = None,
        poll_s: float = 0.1,
        timeout_s: float | None = None,
    ) -> Iterator[Activation]:
        """Yields all activations in capture order: the existing ones, then new ones.

        It ends when the capture has ended and all its activations were yielded. If the capture's
        process died, it yields the complete activations and then gives a `RuntimeWarning` with the
        `problem`. If the file system has no locks, a running capture cannot be recognised: it
        yields what is there, and ends. The reader itself does not change until `refresh`. Yielded
        activations are not kept, so the memory does not grow with their number.

        A packet is yielded when the index describes it, at most about a second after its capture.
        Split tensors are yielded complete, float16 packets with their float32 twin.

        Args:
            layers: the layers, as for `select`. A layer may appear later; a name or pattern that
                matched no layer is an error at the end.
            steps: the steps, as for `select`.
            tokens: the tokens, as for `select`.
            calls: the calls, as for `select`.
            requests: the requests, as for `select`.
            poll_s: seconds between two looks for more.
            timeout_s: seconds to wait for the next activation; None: for ever.

        Raises:
            StrapTimeoutError: (a TimeoutError) no activation came for `timeout_s`.
            NotFoundError: (a FileNotFoundError) the stream was replaced, removed or renamed, or cut
                back by a capture that resumes.
            UnknownActivationError: (a KeyError) the capture ended, and a name or pattern matched no
                layer.
            InvalidArgumentError: (a ValueError) `poll_s` or `timeout_s` is not above 0; or as in
                `ActivationView.select`.
            InvalidStateError: the reader is closed.
        """
        for what, value in (("poll_s", poll_s), ("timeout_s", timeout_s)):
            if value is not None and not value > 0:
                raise InvalidArgumentError(f"{what} = {value!r} must be above 0")
        patterns = [layers] if isinstance(layers, str) else layers and list(layers)
        wanted: dict[str, Any] = {
            "steps": _kept(steps),
            "tokens": _kept(tokens),
            "calls": _kept(calls),
            "requests": _kept(requests),
        }
        ActivationView(self._snapshot, np.empty(0, np.int64)).select(**wanted)  # or raises

        def activations() -> Iterator[Activation]:
            begun, last, seen = self._snapshot, time.monotonic(), set(self.layers)
            for snapshot, rows in windows(begun):
                if snapshot is not None:
                    self._enter(snapshot)
                    seen.update(snapshot.catalogue.rows_by_name)
                    if patterns is not None:
                        rows = _of_layers(snapshot, rows, patterns)
                    for activation in ActivationView(snapshot, rows).select(**wanted):
                        yield activation
                        last = time.monotonic()
                    if snapshot is not begun and not snapshot.packets.info.live:
                        self._tell(snapshot, stacklevel=3)
                    continue
                if timeout_s is not None and time.monotonic() - last > timeout_s:
                    raise StrapTimeoutError(
                        f"{self.path} is being captured, but no activation came for {timeout_s} s"
                    )
                time.sleep(poll_s)
            for pattern in patterns or ():
                if not _matching(pattern, seen):
                    raise UnknownActivationError(self._unknown(pattern, tuple(seen)))

        return activations()

    def close(self) -> None:
        """Closes the stream. A second call does nothing."""
        with self._closing:
            self._closed = True
            snapshots = list(self._snapshots)
            for snapshot in snapshots:  # they may share readers, which must be open for that
                snapshot.catalogue.columns.close()
            for snapshot in snapshots:
                snapshot.close()

    def __enter__(self) -> ActivationReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        says = [
            _count(len(self), "activation"),
            _count(len(self.layers), "layer"),
            _count(len(self.steps), "step"),
            _count(self.info.packets, "packet"),
            units.size(self.info.file_bytes),
        ]
        if self.missing:
            says.append(f"{len(self.missing)} missing")
        if self.info.live:
            says.append("being captured")
        if self.problem:
            says.append(f"problem: {self.problem}")
        if self._closed:
            says.append("closed")
        return f"<ActivationReader {self.path!r}: {', '.join(says)}>"

    def _repr_html_(self) -> str:
        from .reading.notebook import capture_html

        return capture_html(self)


class ActivationView(Sequence["Activation"]):
    """A sequence of activations in capture order. Values are decoded on demand.

    `reader[name]` and `ActivationReader.select` return one. `view[k]` decodes one activation. A
    loop over the view and joining it decode many packets at a time, so they are faster for many
    small activations. ``numpy.asarray(view)`` stacks all activations into an array. In a notebook a
    view shows a table of its layers.
    """

    __slots__ = ("_orders", "_rows", "_snapshot")

    def __init__(
        self,
        snapshot: Snapshot,
        rows: npt.NDArray[np.int64],
        orders: _Orders | None = None,
    ) -> None:
        self._snapshot = snapshot
        self._rows = rows
        self._orders = {} if orders is None else orders

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, at: int) -> Activation: ...
    @overload
    def __getitem__(self, at: slice) -> ActivationView: ...
    def __getitem__(self, at: int | slice) -> Activation | ActivationView:
        if isinstance(at, slice):
            return ActivationView(self._snapshot, self._rows[at])
        place = operator.index(at)
        if not -len(self) <= place < len(self):
            raise IndexError(f"activation {place} of {len(self)}")
        return Activation(self._snapshot, int(self._rows[place]))

    def __iter__(self) -> Iterator[Activation]:
        ahead = Ahead(self._snapshot.packets, self._snapshot.catalogue, self._rows)
        for first in range(0, len(self), _ITERATED):
            for place, row in enumerate(self._rows[first : first + _ITERATED].tolist(), first):
                yield Activation(self._snapshot, row, ahead, place)

    def __repr__(self) -> str:
        layers = _count(len(np.unique(self._snapshot.catalogue.codes[self._rows])), "layer")
        steps = np.unique(self._column("step"))
        steps = steps[steps >= 0]
        span = f", steps {steps[0]} to {steps[-1]}" if len(steps) else ""
        return f"<ActivationView: {_count(len(self), 'activation')} of {layers}{span}>"

    def _repr_html_(self) -> str:
        from .reading.notebook import view_html

        return view_html(self)

    def named(self, name: str) -> ActivationView:
        """The activations of a layer; an empty view if there are none."""
        rows = self._snapshot.catalogue.rows_by_name.get(name, np.empty(0, np.int64))
        return ActivationView(self._snapshot, self._rows[np.isin(self._rows, rows)])

    def _column(self, column: str) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = self._snapshot.catalogue.numbers(column)[self._rows]
        return values

    def select(
        self,
        *,
        steps: Selector = None,
        tokens: Selector = None,
        calls: Selector = None,
        requests: str | Iterable[str] | None = None,
    ) -> ActivationView:
        """The activations of some steps, tokens, calls and requests.

        Args:
            steps: forward steps: a number, a half-open range such as slice(0, 10), a collection, or
                None for all. Only None matches an activation whose step is unknown.
            tokens: numbers of the tokens that the steps led to, given in the same way.
            calls: calls of the module within its step, given in the same way.
            requests: one or several names from `for_request`; None: all.

        Raises:
            InvalidArgumentError: (a ValueError) a number is negative, or a selector has another
                type.
        """
        view = self
        for column, wanted in (("step", steps), ("token", tokens), ("call", calls)):
            if wanted is not None:
                view = view._narrowed(column, wanted)
        if requests is not None:
            named = {requests} if isinstance(requests, str) else set(requests)
            codes, names = view._snapshot.catalogue.texts("request")
            wanted_codes = [code for code, name in enumerate(names) if name in named]
            rows = view._rows[np.isin(codes[view._rows], wanted_codes)]
            view = ActivationView(view._snapshot, rows)
        return view

    def _narrowed(self, column: str, wanted: int | slice | Iterable[int]) -> ActivationView:
        places: Any
        if (ends := bounds(wanted, column)) is None:
            places = among(self._column(column), wanted, column)
        else:
            values, order = self._sorted(column)
            low, high = np.searchsorted(values, ends).tolist()
            places = slice(low, high) if order is None else np.sort(order[low:high])
        rows = self._rows[places]
        return self if len(rows) == len(self) else ActivationView(self._snapshot, rows)

    def _sorted(self, column: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]:
        if (found := self._orders.get(column)) is None:
            values = self._column(column).astype(np.int64)
            order = None
            if not (values[1:] >= values[:-1]).all():
                order = np.argsort(values, kind="stable")
                values = values[order]
            found = self._orders[column] = values, order
        return found

    def at(
        self, *, step: int | None = None, token: int | None = None, call: int | None = None
    ) -> Activation:
        """The single activation of a step, token or call.

        Raises:
            UnknownActivationError: (a KeyError) there is no such activation.
            InvalidArgumentError: (a ValueError) there are several; the message says how they
                differ.
        """
        found = self.select(steps=step, tokens=token, calls=call)
        if len(found) == 1:
            return found[0]
        given = {"step": step, "token": token, "call": call}
        asked = ", ".join(f"{k}={v}" for k, v in given.items() if v is not None) or "any step"
        if not found:
            has = ", ".join(_span(self._column(k), k) for k, v in given.items() if v is not None)
            raise UnknownActivationError(
                f"no activation at {asked}: the {len(self)} here have {has}"
                if has
                else "no activation here"
            )
        differ = [k for k in given if len(np.unique(found._column(k))) > 1]
        hint = f"name their {' or '.join(differ)} too" if differ else "use select()"
        raise InvalidArgumentError(f"{len(found)} activations at {asked}: {hint}")

    def stack(self, *, exact: bool = True, dtype: Any = None) -> torch.Tensor:
        """All values in one tensor of shape (len(self), *shape); arguments as in `to_torch`.

        A mixture of float16 activations and float32 twins stacks as float32.

        Raises:
            InvalidArgumentError: (a ValueError) shapes or types differ, or the view is empty.
        """
        if (alike := self._snapshot.catalogue.alike(self._rows)) is not None:
            return self._packed(alike, dtype).reshape(len(self), *alike.shapes[0].tolist())
        forms = self._forms(exact, dtype)
        _same_shape(forms)
        out = _empty((len(forms), *forms[0].shape), torch_dtype(_common(forms, dtype)))
        for place, form in zip(out, forms, strict=True):
            self._fill(place, form)
        return out

    def cat(self, dim: int = 0, *, exact: bool = True, dtype: Any = None) -> torch.Tensor:
        """All values joined along a dimension; arguments as in `to_torch`.

        Raises:
            InvalidArgumentError: (a ValueError) shapes differ in another dimension, types
                differ, or the view is empty.
        """
        import torch

        alike = self._snapshot.catalogue.alike(self._rows, dim)
        if alike is not None and math.prod(alike.shapes[0, :dim].tolist()) == 1:
            shape = alike.shapes[0].tolist()
            shape[dim] = int(alike.shapes[:, dim].sum())
            return self._packed(alike, dtype).reshape(shape)
        forms = self._forms(exact, dtype)
        ndim = len(forms[0].shape)
        if not -ndim <= dim < ndim:
            raise InvalidArgumentError(
                f"cat along dimension {dim} of shape {forms[0].shape}"
                + ("" if ndim else ": scalars can be stacked")
            )
        dim %= ndim
        if len({(*form.shape[:dim], None, *form.shape[dim + 1 :]) for form in forms}) > 1:
            shapes = _tally(form.shape for form in forms)
            raise InvalidArgumentError(f"cannot concatenate along dimension {dim} {shapes}")
        lengths = [form.shape[dim] for form in forms]
        first = forms[0].shape
        shape = (*first[:dim], sum(lengths), *first[dim + 1 :])
        out = _empty(shape, torch_dtype(_common(forms, dtype)))
        for place, form in zip(torch.split(out, lengths, dim), forms, strict=True):
            self._fill(place, form)
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """All values in one array of shape (len(self), *shape), types as in `Activation.to_numpy`.

        Raises:
            InvalidArgumentError: (a ValueError) shapes or types differ, or the view is empty; or
                `copy` is False, although each call decodes the values again.
        """
        refuse_view(copy, repr(self))
        if (alike := self._snapshot.catalogue.alike(self._rows)) is None:
            forms = self._forms(True, dtype)
            _same_shape(forms)
            _common(forms, dtype)  # float16 and float32 become float32 in np.stack too
            return np.stack([activation.to_numpy(dtype=dtype) for activation in self])
        sizes = alike.shapes.prod(axis=1) * element_size(alike.dtype)
        flat = np.empty(int(sizes.sum()) // element_size(alike.dtype), storage_dtype(alike.dtype))
        self._snapshot.decode_all(self._rows, sizes, flat.ctypes.data)
        values = from_storage(flat, alike.dtype).reshape(len(self), *alike.shapes[0].tolist())
        return (
            values if dtype is None else values.astype(numpy_dtype(dtype_name(dtype)), copy=False)
        )

    def to_pandas(self) -> pd.DataFrame:
        """The index's data about the activations, without their values.

        Returns:
            a row for each activation, in order: "name", then the columns of
            `ActivationReader.index` for its first packet. The frame's index is `Activation.row`.

        Raises:
            MissingExtraError: (a TypeError and an ImportError) pandas is not installed;
                `ActivationReader.index` needs no pandas.
        """
        with extra("report", "to_pandas"):
            import pandas as pd
        catalogue = self._snapshot.catalogue
        table: pd.DataFrame = catalogue.columns.table().take(self._rows).to_pandas()
        table.insert(0, "name", [catalogue.name(row) for row in self._rows.tolist()])
        table.index = pd.Index(self._rows, name="row")
        return table

    def _packed(self, alike: Alike, dtype: Any) -> torch.Tensor:
        """The elements of plain activations of one type, in one flat tensor."""
        stored = torch_dtype(alike.dtype)
        wanted = stored if dtype is None else torch_dtype(dtype_name(dtype))
        lengths = alike.shapes.prod(axis=1)
        sizes = lengths * element_size(alike.dtype)
        out = _empty((int(lengths.sum()),), wanted)
        if wanted == stored:
            self._snapshot.decode_all(self._rows, sizes, out.data_ptr())
            return out
        at, piece = 0, max(1, _CONVERTED_BYTES // max(1, int(sizes.max())))
        for first in range(0, len(self), piece):
            some = slice(first, first + piece)
            part = _empty((int(lengths[some].sum()),), stored)
            self._snapshot.decode_all(self._rows[some], sizes[some], part.data_ptr())
            out[at : at + len(part)].copy_(part)
            at += len(part)
        return out

    def _forms(self, exact: bool, dtype: Any) -> list[StoredForm]:
        if not len(self):
            raise InvalidArgumentError("no activations to join: the selection is empty")
        return [self._snapshot.form(int(row), exact, dtype) for row in self._rows]

    def _fill(self, place: torch.Tensor, form: StoredForm) -> None:
        """Decodes a form into `place`; directly if `place` has the stored type."""
        if place.dtype == torch_dtype(form.dtype) and place.is_contiguous():
            self._snapshot.decode(form, place.data_ptr())
        else:
            place.copy_(self._snapshot.torch(form))


# ---- names, joining and messages --------------------------------------------------------


def _matching(pattern: str, names: Collection[str]) -> list[str]:
    """The names that match a name or pattern."""
    if pattern not in names and isinstance(pattern, str) and ("*" in pattern or "?" in pattern):
        glob = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
        fits = re.compile(glob, re.DOTALL).fullmatch
        return [name for name in names if fits(name)]
    return [pattern] if pattern in names else []


def _kept(wanted: Any) -> Any:
    """A selector that can be read more than once: an iterable becomes a tuple."""
    several = isinstance(wanted, Iterable) and not isinstance(wanted, str)
    return tuple(wanted) if several else wanted


def _of_layers(
    snapshot: Snapshot, rows: npt.NDArray[np.int64], patterns: Iterable[str]
) -> npt.NDArray[np.int64]:
    """The rows of the layers that match names or patterns."""
    catalogue = snapshot.catalogue
    names = {name for pattern in patterns for name in _matching(pattern, catalogue.names)}
    codes = [code for code, name in enumerate(catalogue.names) if name in names]
    return rows[np.isin(catalogue.codes[rows], codes)]


def _same_shape(forms: Sequence[StoredForm]) -> None:
    if len({form.shape for form in forms}) > 1:
        raise InvalidArgumentError(f"cannot stack {_tally(form.shape for form in forms)}")


def _common(forms: Sequence[StoredForm], dtype: Any) -> str:
    """The type that can hold the values of all forms."""
    names = {form.dtype for form in forms}
    if dtype is not None:
        names = {dtype_name(dtype)}
    elif names == {"float16", "float32"}:
        names = {"float32"}
    if len(names) > 1:
        raise InvalidArgumentError(
            f"cannot join {_tally(form.dtype for form in forms)}: pass dtype= to convert them"
        )
    return names.pop()


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    import torch

    return torch.empty(shape, dtype=dtype, device="cpu")


def _unknown_types(names: Sequence[str]) -> str:
    some = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
    return (
        f"no index tells the types and shapes of activations of {some}: their bytes are taken for "
        "float16, which is what float32 is stored as. Where they are something else, say so by "
        'dtypes={"*": "bfloat16"}, or by dtype= of to_torch and to_numpy'
    )


def _tally(kinds: Iterable[object]) -> str:
    """Shapes or types with their counts, the most frequent first, as a text."""
    counts = Counter(kinds)
    listed = [f"{kind} ({count})" for kind, count in counts.most_common(6)]
    if len(counts) > len(listed):
        listed.append(f"{len(counts) - len(listed)} others")
    return f"{counts.total()} activations of " + ", ".join(listed)


def _span(values: npt.NDArray[Any], what: str) -> str:
    known = values[values >= 0]
    return f"{what}s {known.min()} to {known.max()}" if len(known) else f"no {what}s"


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"
