"""Finds the token of a row by the times at which tokens were emitted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .engines.base import PhaseEvent, PhaseRecord

__all__ = ["TokenClock"]


class TokenClock:
    """Maps times to ``token_index`` and ``context_tokens``.

    The time between the start of a generation and its first token belongs to token 0, the time
    between tokens 0 and 1 to token 1, and so on. Times outside generations, and after the last
    token, have no token. ``context_tokens`` is the length of the context that the step of the token
    reads.

    Args:
        records: the events of the run.
    """

    def __init__(self, records: Iterable[PhaseRecord]) -> None:
        starts, tokens, contexts = [0], [-1], [-1]

        def begin(at: int, token: int, context: int) -> None:
            starts.append(at)
            tokens.append(token)
            contexts.append(context)

        for record in records:
            if record.event is PhaseEvent.GENERATION_START:
                begin(record.mono_ns, 0, int(record.metadata.get("context_length", -1)))
            elif record.event is PhaseEvent.TOKEN_EMITTED:
                token = int(record.metadata["token_index"]) + 1
                begin(record.mono_ns, token, int(record.metadata["context_tokens"]))
            elif record.event is PhaseEvent.GENERATION_END:
                tokens[-1] = contexts[-1] = -1  # work after the last token is for no token
                begin(record.mono_ns, -1, -1)
        self._starts = np.array(starts, np.int64)
        self._tokens = np.array(tokens, np.int64)
        self._contexts = np.array(contexts, np.int64)

    def annotate(self, reader: pa.RecordBatchReader) -> pa.RecordBatchReader:
        """The same rows, with tokens in rows whose collector did not know them."""
        schema = reader.schema

        def batches() -> Iterator[pa.RecordBatch]:
            for batch in reader:
                yield self._annotate(batch)

        if "token_index" not in schema.names or "context_tokens" not in schema.names:
            return reader
        return pa.RecordBatchReader.from_batches(schema, batches())

    def _annotate(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch.num_rows == 0:
            return batch
        times = np.asarray(batch.column("timestamp_ns"))
        place = np.maximum(np.searchsorted(self._starts, times, side="right") - 1, 0)
        columns = list(batch.columns)
        for name, known in (("token_index", self._tokens), ("context_tokens", self._contexts)):
            index = batch.schema.get_field_index(name)
            if columns[index].null_count:
                found = known[place]
                own = pa.array(found, pa.int64(), mask=found < 0)
                columns[index] = pc.coalesce(columns[index], own)
        return pa.RecordBatch.from_arrays(columns, schema=batch.schema)
