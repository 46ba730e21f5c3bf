"""Turns a spool into a trace, once the use of each storage is known."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ...._files import partial_beside, remove_leftovers
from ...._parsing import parsing
from ....errors import CorruptError
from ...schema import Kind, arrow_schema
from ..base import PhaseBoundaries
from ..rows import OPS, Phases, Words, make_batch
from .regions import TYPES, LabelledRegions, devices_of
from .spool import NONE, PHASES, Contents

__all__ = ["META_KEY", "about_trace", "read_trace", "trace_of", "write_trace"]

#: Schema metadata: how the trace was made, as JSON.
META_KEY = b"mrm_torch_tracer"

_BATCH_ROWS = 1 << 16
_MOST_NAMES = 1 << 20


def trace_of(
    contents: Contents, run_id: str, boundaries: PhaseBoundaries | None = None
) -> pa.RecordBatchReader:
    """The rows of a spool as batches of ``arrow_schema(Kind.ACCESSES)``, in the order of writing.

    Args:
        contents: the content of the spool; its file has to stay open.
        run_id: ``run_id`` of all rows.
        boundaries: phases that replace those of the steps; None: keep those of the steps.
    """
    schema = arrow_schema(Kind.ACCESSES)
    about = json.dumps(about_trace(contents)).encode()
    schema = schema.with_metadata({**schema.metadata, META_KEY: about})
    regions = LabelledRegions(contents.weights, contents.cache)
    # Rows before the first step have no phase, token or context.
    marks = np.concatenate([[(0, NONE, NONE, NONE)], contents.steps])
    symbols = _by_number(contents.facts.get("symbols", {}))
    devices = _by_number({"0": "cpu", **contents.facts.get("devices", {})})
    places = [f"torch:{device}" if device != "cpu" else "torch" for device in devices]
    phases = None if boundaries is None else Phases(boundaries)

    def batches() -> Iterator[pa.RecordBatch]:
        first_id = 0
        for block, threads in _batched(contents.blocks()):
            real = (block["region"] >= 0) & (block["length"] > 0) & (block["address"] > 0)
            rows = block[real]
            ids, types = regions.label(rows["region"])
            step = marks[np.searchsorted(marks[:, 0], rows["time"], side="right") - 1]
            yield make_batch(
                schema,
                run_id,
                first_id,
                times=rows["time"],
                addresses=rows["address"],
                op_type=(OPS, rows["code"] & 1),
                symbol=_known(symbols, rows["code"] >> 1),
                dso=_known(places, devices_of(rows["region"])),
                phase=(PHASES, step[:, 1]) if phases is None else phases.of(rows["time"]),
                region_type=(TYPES, types),
                region_id=ids,
                thread_id=threads[real],
                token_index=_nullable(step[:, 2]),
                context_tokens=_nullable(step[:, 3]),
                length_bytes=rows["length"],
            )
            first_id += len(rows)

    return pa.RecordBatchReader.from_batches(schema, batches())


def about_trace(contents: Contents) -> dict[str, Any]:
    """How a trace was made, and which tensors it lacks, as a dict that JSON can hold."""
    return {
        **contents.facts.get("about", {}),
        "threads": len(contents.threads),
        "operators": _by_number(contents.facts.get("symbols", {})),
        "tensors_without_address": _sum(contents.facts.get("unseen", {})),
        "taken_whole": _sum(contents.facts.get("taken_whole", {})),
        "weight_storages": len(contents.weights),
        "cache_storages": len(contents.cache),
    }


def _sum(counts: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """The counts of all recorders."""
    total: Counter[str] = Counter()
    for one in counts.values():
        total.update(one)
    return dict(total)


def _by_number(names: Mapping[str, str]) -> list[str]:
    last = max(map(int, names), default=-1)
    if last >= _MOST_NAMES:
        raise CorruptError(f"there are not {last} operators and devices")
    return [names.get(str(number), "") for number in range(last + 1)]


def _known(words: Sequence[str], codes: npt.NDArray[np.int64]) -> Words:
    """A text column. A code beyond ``words`` is null: the file ended before the name came."""
    return words, np.where(codes < len(words), codes, NONE)


def _batched(
    blocks: Iterable[tuple[npt.NDArray[np.void], int]],
) -> Iterator[tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]]:
    """Joins blocks to arrays of about ``_BATCH_ROWS`` rows, and their thread ids."""
    held: list[tuple[npt.NDArray[np.void], int]] = []
    rows = 0
    for block, thread in blocks:
        held.append((block, thread))
        rows += len(block)
        if rows >= _BATCH_ROWS:
            yield _joined(held)
            held, rows = [], 0
    if held:
        yield _joined(held)


def _joined(
    held: list[tuple[npt.NDArray[np.void], int]],
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
    threads = np.array([thread for _, thread in held], np.int64)
    lengths = [len(block) for block, _ in held]
    return np.concatenate([block for block, _ in held]), np.repeat(threads, lengths)


def _nullable(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.ma.masked_equal(values, NONE)


def write_trace(reader: pa.RecordBatchReader, path: Path) -> int:
    """Writes a zstd Parquet file and returns its number of rows.

    The file appears at ``path`` once it is whole.
    """
    texts = [field.name for field in reader.schema if pa.types.is_dictionary(field.type)]
    deltas = {"sample_id": "DELTA_BINARY_PACKED", "timestamp_ns": "DELTA_BINARY_PACKED"}
    rows = 0
    remove_leftovers(path)
    with partial_beside(path) as partial:
        with pq.ParquetWriter(
            partial, reader.schema, compression="zstd", use_dictionary=texts, column_encoding=deltas
        ) as writer:
            for batch in reader:
                writer.write_batch(batch)
                rows += batch.num_rows
        os.replace(partial, path)
    return rows


def read_trace(path: Path, run_id: str, boundaries: PhaseBoundaries | None) -> pa.RecordBatchReader:
    """The rows of a written trace with the run id ``run_id``.

    ``boundaries`` replace the phases of the rows; None keeps them.
    """
    texts = [field.name for field in arrow_schema() if pa.types.is_dictionary(field.type)]
    with parsing(path, "is no whole Parquet file"):
        schema = pq.read_schema(path)
    schema = arrow_schema().with_metadata(schema.metadata)
    phases = Phases(boundaries)

    def batches() -> Iterator[pa.RecordBatch]:
        with parsing(path), pq.ParquetFile(path, read_dictionary=texts) as file:
            for batch in file.iter_batches(_BATCH_ROWS):
                columns = dict(zip(schema.names, batch.columns, strict=True))
                columns["run_id"] = _texts([run_id], np.zeros(len(batch), np.int32))
                if boundaries is not None:
                    columns["phase"] = _phases(phases, columns["timestamp_ns"])
                yield pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)

    return pa.RecordBatchReader.from_batches(schema, batches())


def _phases(phases: Phases, times: pa.Array) -> pa.Array:
    found: Any = phases.of(np.asarray(times))
    if found is None:
        return pa.nulls(len(times), pa.dictionary(pa.int32(), pa.string()))
    words, codes = found
    return _texts(words, codes)


def _texts(words: Sequence[str], codes: npt.NDArray[Any]) -> pa.DictionaryArray:
    indices = pa.array(codes, pa.int32(), mask=codes < 0)
    return pa.DictionaryArray.from_arrays(indices, pa.array(words, pa.string()))
