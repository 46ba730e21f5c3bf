"""The formats of exports: each function writes the files of one format into an empty folder."""

from __future__ import annotations

import contextlib
import json
import math
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ..._extras import extra
from ...errors import InvalidArgumentError, UnsupportedError
from .export_source import Block, Layer, Source, column_dtype

__all__ = ["FORMATS", "TEXTS", "TOKEN_IDS", "Plan", "dtype_in"]

#: The side file with the columns of texts, for formats that hold numbers only.
TEXTS = "texts.parquet"
#: The column of a data set of contexts.
TOKEN_IDS = "token_ids"

_TEXT_ROWS = 1 << 18  # rows of the side file that are written together
_SAFETENSORS = {
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32",
    "float64", "float8_e4m3fn", "float8_e5m2",
}  # fmt: skip
_NUMPY = {
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16",
    "float32", "float64",
}  # fmt: skip


class Plan(NamedTuple):
    """What to export.

    Attributes:
        source: the rows.
        columns: the columns.
        shard_bytes: about the size of a file that holds some of the rows.
        context: rows of a context; None: a row for each token.
        advance: is called with each number of rows that were written.
    """

    source: Source
    columns: tuple[str, ...]
    shard_bytes: int
    context: int | None
    advance: Callable[[int], None]

    @property
    def numbers(self) -> list[str]:
        """The columns with numbers."""
        return [name for name in self.columns if column_dtype(name) is not object]

    @property
    def texts(self) -> list[str]:
        """The columns with texts."""
        return [name for name in self.columns if column_dtype(name) is object]

    def shards(self, pattern: str) -> Iterator[tuple[str, int, int]]:
        """The name, the first row and the end of each file.

        `pattern` takes a file's `number`, which is from 1 on, its `index`, which is from 0 on, and
        the `count` of files.
        """
        size = self.source.rows_in(self.shard_bytes)
        count = -(-self.source.length // size)
        for shard in range(count):
            stop = min((shard + 1) * size, self.source.length)
            name = pattern.format(number=shard + 1, index=shard, count=count)
            yield name, shard * size, stop

    def blocks(self, first: int, stop: int) -> Iterator[Block]:
        """The blocks of some rows; tells the progress when the caller takes the next one."""
        for block in self.source.blocks(first, stop):
            yield block
            self.advance(len(block))


def dtype_in(format: str, wanted: str | None, layer: str, stored: set[str]) -> str:  # noqa: A002
    """The type of a layer's values in a format.

    Args:
        format: the format.
        wanted: the type that the caller wants; None: the stored one. If the format lacks that one,
            and float32 has all of its values, it is float32.
        layer: the layer's name.
        stored: the types of the layer in the captures.

    Raises:
        InvalidArgumentError: the format has no `wanted`; or there are several stored types.
        UnsupportedError: the format has no such values.
    """
    has = _SAFETENSORS if format == "safetensors" else _NUMPY
    if wanted is not None:
        if wanted not in has:
            raise InvalidArgumentError(f"dtype {wanted!r}: {format} has {', '.join(sorted(has))}")
        return wanted
    if stored == {"float16", "float32"}:
        return "float32"
    if len(stored) > 1:
        raise InvalidArgumentError(
            f"{layer!r} has values of several types: {', '.join(sorted(stored))}. dtype converts "
            "them to one"
        )
    (kind,) = stored
    if kind in has:
        return kind
    if kind == "bfloat16" or kind.startswith("float8"):
        return "float32"
    raise UnsupportedError(f"{layer!r} has values of {kind}, and {format} has no such type")


# ---- safetensors ----------------------------------------------------------------------------


def _safetensors(folder: Path, plan: Plan) -> None:
    with extra("export", "An export to safetensors"):
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    import torch

    weight_map: dict[str, list[str]] = {}
    total = 0
    for name, first, stop in plan.shards("rows-{number:05}-of-{count:05}.safetensors"):
        tensors = {
            layer.name: torch.empty((stop - first, *layer.shape), dtype=getattr(torch, layer.dtype))
            for layer in plan.source.layers
        }
        columns = {name: np.empty(stop - first, column_dtype(name)) for name in plan.numbers}
        at = 0
        for block in plan.blocks(first, stop):
            some = slice(at, at + len(block))
            for number, layer in enumerate(plan.source.layers):
                tensors[layer.name][some] = block.torch(number)
            for column, cells in columns.items():
                cells[some] = block.column(column)
            at += len(block)
        tensors.update((column, torch.from_numpy(cells)) for column, cells in columns.items())
        about = {"format": "pt", "first_row": str(first), "rows": str(stop - first)}
        try:
            save_file(tensors, folder / name, about)
        except SafetensorError as error:
            raise _system_error(error) from error
        total += sum(tensor.nbytes for tensor in tensors.values())
        for key in tensors:
            weight_map.setdefault(key, []).append(name)
    index = {
        "metadata": {"total_size": total, "rows": plan.source.length},
        "weight_map": weight_map,
    }
    (folder / "rows.safetensors.index.json").write_bytes(_json(index))
    _write_texts(folder, plan)


def _system_error(error: Exception) -> Exception:
    """The OSError that an error of safetensors tells of; else the error itself."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), str(error)) if number else error


# ---- Parquet --------------------------------------------------------------------------------


def _parquet(folder: Path, plan: Plan) -> None:
    schema = pa.schema(
        [
            *(pa.field(layer.name, _vectors(layer)) for layer in plan.source.layers),
            *(pa.field(column, _scalar(column)) for column in plan.columns),
        ]
    )
    for name, first, stop in plan.shards("rows-{number:05}-of-{count:05}.parquet"):
        with _parquet_file(folder / name, schema, plan.columns) as file:
            for block in plan.blocks(first, stop):
                arrays = [
                    _vector_array(block.numpy(number)) for number in range(len(plan.source.layers))
                ]
                arrays += [_column_array(block, column) for column in plan.columns]
                batch = pa.Table.from_arrays(arrays, schema=schema)
                file.write_table(batch, row_group_size=len(block))


@contextlib.contextmanager
def _parquet_file(path: Path, schema: pa.Schema, columns: Sequence[str]) -> Iterator[Any]:
    """A Parquet file that is written. Only columns have dictionaries: vectors do not repeat."""
    options: dict[str, Any] = {"compression": "zstd", "use_dictionary": list(columns)}
    try:
        with pq.ParquetWriter(path, schema, **options) as file:
            yield file
    except pa.ArrowNotImplementedError as error:
        raise UnsupportedError(
            f"pyarrow {pa.__version__} cannot write this as Parquet ({error}): install a newer "
            "one, or choose the dtype float32"
        ) from error


def _scalar(column: str) -> pa.DataType:
    kind = column_dtype(column)
    return pa.string() if kind is object else pa.from_numpy_dtype(kind)


def _vectors(layer: Layer) -> pa.DataType:
    kind = pa.from_numpy_dtype(np.dtype(layer.dtype))
    for size in reversed(layer.shape):
        kind = pa.list_(kind, size)
    return kind


def _vector_array(values: npt.NDArray[Any]) -> pa.Array:
    """Lists of a fixed size, one for each row."""
    array = pa.array(values.reshape(-1))
    for size in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def _column_array(block: Block, column: str) -> pa.Array:
    return pa.array(block.column(column), _scalar(column))


def _write_texts(folder: Path, plan: Plan) -> None:
    """Writes the columns of texts to a file of their own, if there are any."""
    if not plan.texts:
        return
    schema = pa.schema([pa.field(column, pa.string()) for column in plan.texts])
    with _parquet_file(folder / TEXTS, schema, plan.texts) as file:
        for block in plan.source.blocks(0, plan.source.length, _TEXT_ROWS):
            arrays = [_column_array(block, column) for column in plan.texts]
            file.write_table(pa.Table.from_arrays(arrays, schema=schema))


# ---- npy ------------------------------------------------------------------------------------


def _npy(folder: Path, plan: Plan) -> None:
    names = [layer.name for layer in plan.source.layers] + plan.numbers
    files = dict(zip(names, file_names(names, ".npy"), strict=True))
    rows = plan.source.length
    with contextlib.ExitStack() as opened:

        def create(name: str, dtype: Any, shape: tuple[int, ...]) -> Any:
            # Written and not mapped: a full disk is then an error and not a signal.
            file = opened.enter_context(open(folder / files[name], "wb"))
            header = {
                "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
                "fortran_order": False,
                "shape": shape,
            }
            np.lib.format.write_array_header_1_0(file, header)
            return file

        layers = [
            create(layer.name, layer.dtype, (rows, *layer.shape)) for layer in plan.source.layers
        ]
        columns = {name: create(name, column_dtype(name), (rows,)) for name in plan.numbers}
        for block in plan.blocks(0, rows):
            for number, file in enumerate(layers):
                file.write(np.ascontiguousarray(block.numpy(number)).data)
            for name, file in columns.items():
                file.write(np.ascontiguousarray(block.column(name)).data)
    (folder / "arrays.json").write_bytes(_json(files))
    _write_texts(folder, plan)


def file_names(names: Sequence[str], suffix: str = "") -> list[str]:
    """A file name for each name: its letters, digits, dots and hyphens, all different."""
    found: list[str] = []
    for name in names:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip(".")[:150] or "root"
        file, number = f"{stem}{suffix}", 1
        while file in found:
            number += 1
            file = f"{stem}-{number}{suffix}"
        found.append(file)
    return found


# ---- datasets -------------------------------------------------------------------------------


def _datasets(folder: Path, plan: Plan) -> None:
    with extra("export", "An export to datasets"):
        import datasets
    features = datasets.Features(_features(plan, datasets))
    schema = features.arrow_schema
    files = []
    for name, first, stop in plan.shards("data-{index:05}-of-{count:05}.arrow"):
        with (
            open(folder / name, "wb") as file,
            pa.ipc.new_stream(file, schema) as stream,
        ):
            for block in plan.blocks(first, stop):
                stream.write_batch(_batch(block, plan, schema))
        files.append({"filename": name})
    datasets.DatasetInfo(features=features).write_to_directory(str(folder))
    state: dict[str, Any] = {
        "_data_files": files,
        "_fingerprint": secrets.token_hex(8),
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_bytes(_json(state))


def _features(plan: Plan, datasets: Any) -> dict[str, Any]:
    """The columns of a data set.

    With a context they are those of SAELens' cached activations.

    Args:
        plan: the plan.
        datasets: the package.
    """
    features: dict[str, Any] = {}
    for layer in plan.source.layers:
        shape = layer.shape if plan.context is None else (plan.context, *layer.shape)
        if len(shape) == 1:
            features[layer.name] = datasets.Sequence(datasets.Value(layer.dtype), length=shape[0])
        else:
            array = datasets.Array2D if len(shape) == 2 else datasets.Array3D
            features[layer.name] = array(shape=shape, dtype=layer.dtype)
    if plan.context is not None:
        features[TOKEN_IDS] = datasets.Sequence(datasets.Value("int32"), length=plan.context)
        return features
    for column in plan.columns:
        kind = column_dtype(column)
        features[column] = datasets.Value("string" if kind is object else np.dtype(kind).name)
    return features


def _batch(block: Block, plan: Plan, schema: pa.Schema) -> pa.RecordBatch:
    arrays = []
    for number, layer in enumerate(plan.source.layers):
        values = block.numpy(number)
        if plan.context is not None:
            values = values.reshape(-1, plan.context, *layer.shape)
        kind = schema.field(layer.name).type
        if isinstance(kind, pa.ExtensionType):
            arrays.append(pa.ExtensionArray.from_storage(kind, _nested_lists(values)))
        else:
            arrays.append(_vector_array(values))
    if plan.context is not None:
        ids = block.column("token_id").astype(np.int32).reshape(-1, plan.context)
        arrays.append(_vector_array(ids))
    else:
        arrays += [_column_array(block, column) for column in plan.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _nested_lists(values: npt.NDArray[Any]) -> pa.Array:
    """Lists of lists, one for each row: datasets stores arrays without their sizes."""
    array = pa.array(values.reshape(-1))
    for axis in range(values.ndim - 1, 0, -1):
        count, size = math.prod(values.shape[:axis]), values.shape[axis]
        array = pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * size, array)
    return array


# ---------------------------------------------------------------------------------------------


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


#: The functions that write each format.
FORMATS: dict[str, Callable[[Path, Plan], None]] = {
    "safetensors": _safetensors,
    "parquet": _parquet,
    "npy": _npy,
    "datasets": _datasets,
}
