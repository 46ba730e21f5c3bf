"""The counters of a capture."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .._html import block, table
from .._native import SessionStats

__all__ = ["CaptureStats"]


@dataclass(frozen=True)
class CaptureStats:
    """The counters of a capture; times in seconds, sizes in bytes.

    A step is an outermost call into the model, at whichever module it enters. Calls that one method
    makes side by side, as CLIP's `get_text_features` does, are one step. If the method calls a
    module a second time, that begins the next step. Outputs that a backward pass computes again, in
    checkpointed modules, belong to no step, and the names of their packets end in `!recomputed`.

    Attributes:
        path: the stream file; of a capture in segments the last one.
        packets: packets in the file.
        tensors: tensors captured; one gives several packets when it is split or has values
            beyond float16.
        raw_bytes: bytes of the captured tensors in their own type.
        stored_bytes: bytes of the payloads in the file.
        ratio: raw_bytes / stored_bytes of the written packets; 0.0 before the first packet.
        mse: mean squared error of the values that were converted from float32 to float16, rounded
            or archived; for archives it is an upper bound.
        normalized_mse: squared error of these values over their squared values.
        max_error: the largest absolute error of these values.
        overflowed: float32 tensors with finite values beyond float16, stored as float32 too.
        underflowed: float32 tensors whose values are too small for float16. With an `error_bound`:
            float16 alone breaks the bound of a packet; the tensor is stored as float32 too. Without
            a bound: a packet loses more than 0.01 of its squared values, and the capture ends with
            a warning that names the layers.
        dropped: tensors left out because the memory was full (``with_drop_when_full``).
        dropped_bytes: bytes of the dropped tensors.
        failed: tensors that could not be captured; the index has the reason for each.
        stalls: hooks that had to wait for room.
        stall_seconds: sum of these waits, including waits in progress.
        queued_packets: packets that are captured and not yet in the file.
        queued_bytes: staging memory of the queued packets.
        memory_bytes: staging memory taken from the system, or left by an earlier capture, now.
        memory_peak: the largest value of memory_bytes so far.
        memory_limit: the limit of the staging memory.
        file_bytes: length of the stream; of a capture in segments that of the last one.
        steps: steps seen, those that were left out included.
        seconds: time since the capture began.
        throughput_gbps: raw_bytes over seconds, in 10^9 bytes a second.
        write_seconds: time in write calls, including a call in progress.
        writer_thread: the system's id of the thread that writes; 0: unknown.
        yield_seconds: time that hooks waited to leave the CPUs to compression, including waits in
            progress; hooks do so if the model's own threads use every CPU.
        repeated: packets of the same elements as one just before, which were not compressed again.
        silent: names of the hooked modules that have not run, as far as hooks know.
        skipped_steps: those of `steps` that were left out, by `with_every` or while paused.
        lost_calls: calls of the model that could not be recorded in the calls file. A warning says
            why. Rows of tokens lack theirs.
    """

    path: str
    packets: int = 0
    tensors: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    ratio: float = 0.0
    mse: float = 0.0
    normalized_mse: float = 0.0
    max_error: float = 0.0
    overflowed: int = 0
    dropped: int = 0
    dropped_bytes: int = 0
    failed: int = 0
    stalls: int = 0
    stall_seconds: float = 0.0
    queued_packets: int = 0
    queued_bytes: int = 0
    memory_bytes: int = 0
    memory_peak: int = 0
    memory_limit: int = 0
    file_bytes: int = 0
    steps: int = 0
    seconds: float = 0.0
    throughput_gbps: float = 0.0
    write_seconds: float = 0.0
    writer_thread: int = 0
    yield_seconds: float = 0.0
    repeated: int = 0
    underflowed: int = 0
    silent: tuple[str, ...] = ()
    skipped_steps: int = 0
    lost_calls: int = 0

    @classmethod
    def of(
        cls,
        path: str,
        s: SessionStats,
        *,
        steps: int,
        skipped_steps: int,
        seconds: float,
        silent: tuple[str, ...],
        lost_calls: int,
    ) -> CaptureStats:
        """From the native counters. The ratio is exact once nothing is queued."""
        return cls(
            path=path,
            packets=s.packets,
            tensors=s.tensors,
            raw_bytes=s.raw_bytes,
            stored_bytes=s.stored_bytes,
            ratio=s.raw_bytes / s.stored_bytes if s.stored_bytes else 0.0,
            mse=s.square_error / s.converted if s.converted else 0.0,
            normalized_mse=s.square_error / s.square_sum if s.square_sum else 0.0,
            max_error=s.max_error,
            overflowed=s.overflowed,
            dropped=s.dropped,
            dropped_bytes=s.dropped_bytes,
            failed=s.failed,
            stalls=s.stalls,
            stall_seconds=s.stall_ns / 1e9,
            queued_packets=s.queued_packets,
            queued_bytes=s.queued_bytes,
            memory_bytes=s.memory_bytes,
            memory_peak=s.memory_peak,
            memory_limit=s.memory_limit,
            file_bytes=s.file_bytes,
            steps=steps,
            seconds=seconds,
            throughput_gbps=s.raw_bytes / seconds / 1e9 if seconds > 0 else 0.0,
            write_seconds=s.write_ns / 1e9,
            writer_thread=s.writer_thread,
            yield_seconds=s.yield_ns / 1e9,
            repeated=s.repeated,
            underflowed=s.underflowed,
            silent=silent,
            skipped_steps=skipped_steps,
            lost_calls=lost_calls,
        )

    def _repr_html_(self) -> str:
        """For notebooks: the counters that are not 0."""
        there = [
            (name, value) for name, value in self.counters().items() if value and name != "path"
        ]
        return block(
            self.path,
            table(
                ["counter", "value"],
                [
                    (name, f"{value:,}" if isinstance(value, int) else f"{value:.4g}")
                    for name, value in there
                ],
            ),
        )

    def counters(self) -> dict[str, Any]:
        """All counters without the names in `silent`, as a dict for a log line."""
        found = asdict(self)
        del found["silent"]
        return found
