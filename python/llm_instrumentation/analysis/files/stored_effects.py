"""Effects of nodes as a Parquet file, which is read without a model.

`interventions.Effects` writes and reads the file, and `strap serve` reads it. It has a row for each
node, with the columns of `_schema`. The entry `_ABOUT` of its metadata is a JSON object with the
version of the format and all fields of `StoredEffects` but `nodes` and `values`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from ..._atomic import typed_errors
from ..._files import replacing
from ..._json import load_json, plain
from ..._parsing import parsing
from ...errors import CorruptError, InvalidArgumentError, NotFoundError, UnsupportedError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "NodeKind",
    "StoredEffects",
    "StoredNode",
    "metric_difference",
    "position_text",
    "read_effects",
    "write_effects",
]

NodeKind: TypeAlias = Literal["layers", "attention", "mlp", "heads", "experts", "modules"]
"""The kinds of `sites_of`."""
Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_ABOUT = b"llm_instrumentation.effects"
_VERSION = 1
#: The limits of a file. Effects take 0.5 GiB then, and a file claims at most that much again.
_MOST_NODES, _MOST_VALUES, _MOST_BYTES = 1 << 20, 1 << 26, 1 << 30
_MOST_ABOUT = 1 << 25
_BATCH = 1024  # nodes that are decoded together
_FEWER = "measure fewer sites, or fewer examples, for one file"
# The metrics of the clean and corrupted inputs are as good as equal if their difference is below
# this share of them. bfloat16 rounds by as much.
_AS_GOOD_AS_EQUAL = 1e-3


@dataclasses.dataclass(frozen=True, slots=True)
class StoredNode:
    """A node: its name, and its site as plain values.

    Attributes:
        name: as "a3.h5@7".
        kind: None: unknown.
        layer: the captured name of the module.
        side, head, head_input, expert, positions, sequences, calls, steps: as in `Site`. Several
            numbers are a list, and a slice is a dict of start, stop and step.
    """

    name: str
    kind: NodeKind | None
    layer: str
    side: str
    head: int | None = None
    head_input: str | None = None
    expert: int | str | None = None
    positions: Any = None
    sequences: Any = None
    calls: Any = None
    steps: Any = None

    @property
    def position(self) -> int | None:
        """The position of a node that has one; None: it has several, all, or a role."""
        chosen = self.positions
        if isinstance(chosen, list) and len(chosen) == 1 and isinstance(chosen[0], int):
            return chosen[0]
        return None

    @property
    def role(self) -> str | None:
        """The span of prompts that the node is at; None: it is at positions, or at all."""
        return self.positions if isinstance(self.positions, str) else None


@dataclasses.dataclass(frozen=True, eq=False)
class StoredEffects:
    """What a file of effects holds.

    Attributes:
        nodes: no two have the same name.
        values: the effect on each example: float64, [nodes, examples].
        clean, corrupted, metric, method, direction, model, clean_ids, corrupted_ids: as in
            `Effects`.
        texts: the texts of tokens by their ids, as far as they were given.
    """

    nodes: tuple[StoredNode, ...]
    values: Floats
    clean: Floats
    corrupted: Floats
    metric: str
    method: str
    direction: str
    model: str
    clean_ids: Ids | None
    corrupted_ids: Ids | None
    texts: Mapping[int, str]

    @functools.cached_property
    def mean(self) -> Floats:
        """The mean effect of each node over the examples: float64, [nodes]."""
        with np.errstate(over="ignore", invalid="ignore"):
            found: Floats = self.values.mean(axis=1)
        return found


def metric_difference(clean: Floats, corrupted: Floats) -> float | None:
    """The mean metric of the clean inputs minus that of the corrupted ones.

    None: the two are as good as equal, so shares of the difference have no meaning.
    """
    difference = float(clean.mean()) - float(corrupted.mean())
    size = max(float(np.abs(clean).mean()), float(np.abs(corrupted).mean()))
    return difference if abs(difference) > _AS_GOOD_AS_EQUAL * size else None


def position_text(
    clean: Ids, corrupted: Ids | None, position: int, text: Callable[[int], str]
) -> str:
    """The token at a position, as "John→Mary" where the clean and the corrupted inputs differ.

    "John…" is the token of the first example, and others have others. "–" is padding.

    Args:
        clean: token ids, [examples, tokens]; -1 is padding.
        corrupted: likewise, or None.
        position: negative ones count from the end.
        text: gives the text of a token id.
    """

    def at(ids: Ids) -> str:
        found = [number for number in ids[:, position].tolist() if number >= 0]
        return text(found[0]) + "…" * (len(set(found)) > 1) if found else "–"

    if corrupted is None or (clean[:, position] == corrupted[:, position]).all():
        return at(clean)
    return f"{at(clean)}→{at(corrupted)}"


# ---- the file -------------------------------------------------------------------------------

_JSON = ("positions", "sequences", "calls", "steps")  # columns whose texts are JSON


def _schema() -> pa.Schema:
    """The columns: a field of `StoredNode` each, and `values`. `expert` is "3" or "shared"."""
    import pyarrow as pa

    texts = dict.fromkeys((field.name for field in dataclasses.fields(StoredNode)), pa.string())
    return pa.schema({**texts, "head": pa.int64(), "values": pa.list_(pa.float64())})


def write_effects(path: Path, effects: StoredEffects) -> Path:
    """Writes a file, which appears when it is complete. A file at `path` is replaced.

    Raises:
        InvalidArgumentError: `path` does not end in .parquet; two nodes have the same name; there
            are more values than a file may have.
        NoSpaceError, StrapIOError: (an OSError) the file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix != ".parquet":
        raise InvalidArgumentError(f"{path}: effects are written as .parquet")
    if fault := _fault(effects.nodes, effects.clean_ids):
        raise InvalidArgumentError(f"{fault}: leave it out")
    nodes, examples = effects.values.shape
    if nodes > _MOST_NODES or effects.values.size > _MOST_VALUES:
        raise InvalidArgumentError(
            f"{nodes:,} nodes and {examples:,} examples are too many: {_FEWER}"
        )
    columns: dict[str, Sequence[Any]] = {
        field.name: [getattr(node, field.name) for node in effects.nodes]
        for field in dataclasses.fields(StoredNode)
    }
    columns["expert"] = [None if one is None else str(one) for one in columns["expert"]]
    for name in _JSON:
        columns[name] = [None if one is None else json.dumps(one) for one in columns[name]]
    schema = _schema()
    ends = pa.array(np.arange(nodes + 1) * examples, pa.int32())
    values = pa.ListArray.from_arrays(ends, effects.values.astype(np.float64).reshape(-1))
    arrays = [pa.array(columns[name], schema.field(name).type) for name in columns]
    about = {
        field.name: value.tolist() if isinstance(value, np.ndarray) else value
        for field in dataclasses.fields(StoredEffects)
        if field.name not in ("nodes", "values")
        for value in [getattr(effects, field.name)]
    }
    told = json.dumps({"version": _VERSION, **plain(about)}, allow_nan=False)
    if len(told) > _MOST_ABOUT:
        raise InvalidArgumentError(f"the token ids take {len(told):,} bytes: {_FEWER}")
    table = pa.Table.from_arrays([*arrays, values], schema=schema.with_metadata({_ABOUT: told}))
    with typed_errors(f"cannot write to {path}"), replacing(path) as partial:
        pq.write_table(table, partial, compression="zstd")
    return path


def read_effects(path: str | os.PathLike[str]) -> StoredEffects:
    """Reads a file of `write_effects`, or of another program that keeps to its format.

    Its claims are checked before anything is decoded.

    Raises:
        NotFoundError: (a FileNotFoundError) there is no such file.
        CorruptError: (a ValueError) it holds something else, or is damaged.
        UnsupportedError: a later version wrote it, or it has more values than are read.
        StrapIOError: (an OSError) it cannot be read.
    """
    import pyarrow.parquet as pq

    path = Path(path)
    if not path.exists():
        raise NotFoundError(f"there is no file {path}")
    if not path.is_file():  # a pipe would not end
        raise CorruptError(f"{path} is no regular file")
    with (
        typed_errors(f"cannot read {path}"),
        parsing(path, "holds no effects", way_out=": give a file of Effects.save"),
        pq.ParquetFile(path) as file,
    ):
        about = _about(path, file)
        _check_size(path, file)
        table = file.read(_schema().names)
        return _effects(table, about)


def _about(path: Path, file: Any) -> Mapping[str, Any]:
    """The object in the metadata.

    Raises:
        UnsupportedError: a later version wrote it.
        ValueError: it is missing, or something else.
    """
    if _ABOUT not in (entries := file.schema_arrow.metadata or {}):
        raise ValueError(f"its metadata has no {_ABOUT.decode()!r}")
    if len(entries[_ABOUT]) > _MOST_ABOUT:
        raise UnsupportedError(
            f"{path} has {len(entries[_ABOUT]):,} bytes of metadata: at most {_MOST_ABOUT:,} are "
            f"read; {_FEWER}"
        )
    about = load_json(entries[_ABOUT])
    if not isinstance(about, dict):
        raise ValueError(f"{_ABOUT.decode()!r} of its metadata is no object")
    if (version := about.get("version")) != _VERSION:
        raise UnsupportedError(
            f"{path} has version {version!r}, this version reads {_VERSION}: install a later "
            "llm_instrumentation"
        )
    return about


def _check_size(path: Path, file: Any) -> None:
    """
    Raises:
        UnsupportedError: the file claims more than is read.
        ValueError: it has other columns.
    """
    schema = _schema()
    for field in schema:
        at = file.schema_arrow.get_field_index(field.name)
        if at < 0 or file.schema_arrow.field(at).type != field.type:
            raise ValueError(f"it has no column {field.name!r} of the type {field.type}")
    metadata = file.metadata
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [group.column(at) for group in groups for at in range(group.num_columns)]
    bytes_ = sum(chunk.total_uncompressed_size for chunk in chunks)
    values = max((chunk.num_values for chunk in chunks), default=0)
    if metadata.num_rows > _MOST_NODES or values > _MOST_VALUES or bytes_ > _MOST_BYTES:
        raise UnsupportedError(
            f"{path} has {metadata.num_rows:,} nodes, {values:,} effects and {bytes_:,} bytes: "
            f"at most {_MOST_NODES:,}, {_MOST_VALUES:,} and {_MOST_BYTES:,} are read; {_FEWER}"
        )


def _effects(table: pa.Table, about: Mapping[str, Any]) -> StoredEffects:
    """
    Raises:
        ValueError, TypeError, KeyError: it is not what `write_effects` writes.
    """
    clean, corrupted = (_metrics(about, name) for name in ("clean", "corrupted"))
    examples = len(clean)
    if len(corrupted) != examples or not examples or not table.num_rows:
        raise ValueError(
            f"it has {table.num_rows} nodes, {examples} clean and {len(corrupted)} corrupted "
            "metrics"
        )
    column = table["values"].combine_chunks()
    lengths = column.value_lengths()
    flat = column.flatten()
    if column.null_count or flat.null_count or set(lengths.unique().to_pylist()) != {examples}:
        raise ValueError(f"'values' has other rows than lists of {examples} numbers")
    values = np.array(flat.to_numpy(zero_copy_only=False), np.float64).reshape(-1, examples)
    clean_ids, corrupted_ids = (
        _ids(about, name, examples) for name in ("clean_ids", "corrupted_ids")
    )
    if corrupted_ids is not None and (clean_ids is None or clean_ids.shape != corrupted_ids.shape):
        raise ValueError("'clean_ids' and 'corrupted_ids' have different shapes")
    names = [field.name for field in dataclasses.fields(StoredNode)]
    nodes = tuple(
        _node(record)
        for batch in table.select(names).to_batches(max_chunksize=_BATCH)
        for record in batch.to_pylist()
    )
    if fault := _fault(nodes, clean_ids):
        raise ValueError(fault)
    metric, method, direction, model = (
        _text(about, name) for name in ("metric", "method", "direction", "model")
    )
    texts = {int(number): _text(about["texts"], number) for number in about["texts"]}
    return StoredEffects(
        nodes, values, clean, corrupted, metric, method, direction, model, clean_ids,
        corrupted_ids, texts,
    )  # fmt: skip


def _text(record: Mapping[str, Any], name: str) -> str:
    if not isinstance(found := record.get(name), str):
        raise ValueError(f"{name!r} is no text")
    return found


def _metrics(about: Mapping[str, Any], name: str) -> Floats:
    """Numbers; null is NaN."""
    found = np.array([np.nan if one is None else one for one in about[name]])
    if found.ndim != 1 or found.dtype.kind not in "if":
        raise ValueError(f"{name!r} is no list of numbers")
    return found.astype(np.float64)


def _ids(about: Mapping[str, Any], name: str, examples: int) -> Ids | None:
    if about.get(name) is None:
        return None
    found = np.array(about[name])
    if found.ndim != 2 or len(found) != examples or found.dtype.kind != "i":
        raise ValueError(f"{name!r} has no list of token ids for each of {examples} examples")
    return found.astype(np.int64)


def _node(record: dict[str, Any]) -> StoredNode:
    for name in ("name", "layer", "side"):
        record[name] = sys.intern(_text(record, name))  # many nodes are of one layer
    if record["kind"] not in (None, *get_args(NodeKind)):
        raise ValueError(f"there is no kind of nodes {record['kind']!r}")
    if (expert := record["expert"]) is not None and expert.isascii() and expert.isdigit():
        record["expert"] = int(expert)
    for name in _JSON:
        if record[name] is not None:
            record[name] = load_json(record[name])
    return StoredNode(**record)


def _fault(nodes: Sequence[StoredNode], ids: Ids | None) -> str | None:
    """What is wrong with the nodes; None: nothing."""
    seen: set[str] = set()
    for node in nodes:
        if node.name in seen:
            return f"the node {node.name!r} is there twice"
        seen.add(node.name)
        at = node.position
        if ids is not None and at is not None and not -ids.shape[1] <= at < ids.shape[1]:
            return f"the node {node.name!r} is at position {at} of {ids.shape[1]} tokens"
    return None
