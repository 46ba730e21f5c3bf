"""Makes a synthetic trace of a decoder, of any length. The same seed gives the same trace.

Weights are stored once and then read in order, again and again. The KV cache gets a new block every
2,000 rows, and all blocks so far are read at random. Activations are stored and read on a pool of
pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

CHUNK = 1_000_000
WEIGHTS, WEIGHT_BYTES, LINE = 0x7F00_0000_0000, 8 << 20, 64
KV, BLOCK, BLOCK_EVERY = 0x7E00_0000_0000, 256, 2000
POOL, POOL_PAGES = 0x7D00_0000_0000, 4096

TYPES = pa.array(["weight", "kv_cache", "activation"])
OPS = pa.array(["load", "store"])


def batches(rows: int, seed: int = 1) -> Iterator[pa.RecordBatch]:
    """The trace in batches of a million rows, with the required columns and the labels."""
    rng = np.random.default_rng(seed)
    time, swept = 1_000_000_000, 0
    lines = WEIGHT_BYTES // LINE
    for start in range(0, rows, CHUNK):
        n = min(CHUNK, rows - start)
        row = np.arange(start, start + n)
        times = time + np.cumsum(rng.integers(1, 200, n))
        time = int(times[-1])

        kind = rng.choice(3, n, p=(0.45, 0.30, 0.25))
        weight, kv, activation = kind == 0, kind == 1, kind == 2
        op = np.zeros(n, np.int32)
        address = np.empty(n, np.uint64)
        region = np.ones(n, np.int64)

        sweep = swept + np.arange(weight.sum())
        swept += len(sweep)
        address[weight] = WEIGHTS + sweep % lines * LINE
        op[weight] = sweep < lines

        blocks = row[kv] // BLOCK_EVERY + 1  # number of KV blocks at each row
        block = (rng.random(len(blocks)) * blocks).astype(np.int64)
        fresh = rng.random(len(blocks)) < 0.03
        block[fresh] = blocks[fresh] - 1
        address[kv] = KV + block * BLOCK
        op[kv] = fresh
        region[kv] = 2 + block

        page = rng.integers(0, POOL_PAGES, activation.sum())
        address[activation] = POOL + page * 4096 + rng.integers(0, 64, len(page)) * LINE
        op[activation] = rng.random(len(page)) < 0.4
        region[activation] = 1 << 40 | page

        yield pa.record_batch(
            {
                "run_id": pa.DictionaryArray.from_arrays(np.zeros(n, np.int32), ["bench"]),
                "sample_id": row,
                "timestamp_ns": times,
                "address": address,
                "address_page": address >> np.uint64(12),
                "op_type": pa.DictionaryArray.from_arrays(op, OPS),
                "region_type": pa.DictionaryArray.from_arrays(kind.astype(np.int32), TYPES),
                "region_id": region,
            }
        )


def write(path: Path, rows: int) -> Path:
    """Writes the trace as a Parquet file unless the file exists."""
    if not path.exists():
        partial = path.with_suffix(".partial")
        writer = None
        for batch in batches(rows):
            writer = writer or pq.ParquetWriter(partial, batch.schema, compression="zstd")
            writer.write_batch(batch)
        if writer is not None:
            writer.close()
        partial.rename(path)
    return path
