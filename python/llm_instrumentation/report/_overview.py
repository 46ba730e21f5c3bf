"""What was captured: the facts of the index, and everything that is wrong or left out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from shlex import quote

import numpy as np

from .._pages import page, units
from ..analysis.reader import ActivationReader
from ..analysis.reading.summary import CaptureSummary
from ._sample import Sample

__all__ = ["chips", "facts", "notices"]

_TOLD = 20  # reasons for missing tensors are listed, at most


def chips(found: CaptureSummary) -> str:
    """The most important facts, in a line."""
    tone = {"closed": "good", "running": "fair", "no index": "fair"}.get(found.state, "bad")
    shown = [
        page.chip("capture", found.state, tone),
        page.chip("layers", units.count(found.layers)),
        page.chip("tensors", units.count(found.tensors)),
        page.chip("steps", units.count(found.steps)),
    ]
    if found.tokens is not None:
        shown.append(page.chip("tokens", units.count(found.tokens)))
    shown.append(page.chip("file", units.size(found.file_bytes)))
    if found.ratio:
        shown.append(page.chip("ratio", f"{found.ratio:.2f}"))
    return f'<div class="chips">{"".join(shown)}</div>'


def notices(found: CaptureSummary, sample: Sample) -> Iterator[str]:
    """What a reader must know before the numbers: damage, what is missing, odd values."""
    if found.state == "running":
        yield page.notice(
            "fair",
            "A process is still writing this capture. The page shows what was there so far.",
        )
    if found.state == "damaged":
        yield page.notice(
            "bad", f"Damaged: {found.problem}",
            f"strap salvage {quote(found.path)} copies what is intact to a new stream.",
        )  # fmt: skip
    elif found.problem:
        yield page.notice("fair", found.problem)
    if found.state == "no index":
        yield page.notice(
            "fair",
            "No index describes the packets, so only their names and sizes are known. Their bytes "
            "are shown as float16, which is what float32 is stored as.",
        )
    elif found.unlisted:
        yield page.notice(
            "fair",
            f"Not in the index: {units.counted(found.unlisted, 'packet')}. Their shapes and steps "
            "are unknown.",
        )
    if found.tokens_problem:
        yield page.notice("bad", found.tokens_problem)
    if not found.tensors:
        yield page.notice("fair", "The capture has no tensors.")
    if sample.unreadable:
        yield page.notice(
            "bad",
            f"Cannot be read: {units.counted(sample.unreadable, 'packet')} of the sample.",
            *sample.reasons,
        )
    odd = [
        f"{name or '<root>'} ({one.nan:,} NaN, {one.inf:,} infinite)"
        for name, one in sample.layers.items()
        if one.nan or one.inf
    ]
    if odd:
        more = f", and {len(odd) - _TOLD:,} more" if len(odd) > _TOLD else ""
        yield page.notice("bad", f"NaN or infinite values in {', '.join(odd[:_TOLD])}{more}")


def facts(reader: ActivationReader, found: CaptureSummary, error: float) -> Iterator[str]:
    """The facts of the capture.

    Args:
        reader: the capture.
        found: its summary.
        error: squared error of storing over squared values, of all layers; NaN: not measured.
    """
    catalogue, rows = reader._catalogue, reader._catalogue.activations
    bits = catalogue.numbers("mantissa_bits")[rows]
    bits = bits[bits >= 0]
    steps = units.count(found.steps)
    if found.first_step is not None:
        steps += f" ({found.first_step} to {found.last_step})"
    rate = found.raw_bytes / found.seconds if found.seconds else math.nan
    yield page.definitions(
        [
            ("models", found.models),
            ("packets", found.packets),
            ("steps", steps),
            ("tokens", found.tokens),
            ("types", _counted(found.source_dtypes)),
            ("stored as", _counted(found.stored_dtypes)),
            ("codecs", _counted(found.codecs)),
            ("rounded to", _bits(int(bits.min()), int(bits.max())) if len(bits) else None),
            ("tensors also stored as float32", len(catalogue.twins) or None),
            ("stored in part", _counted(_in_part(reader))),
            ("raw", units.size(found.raw_bytes) if found.ratio else None),
            ("stored", units.size(found.stored_bytes)),
            ("compression ratio", f"{found.ratio:.2f}" if found.ratio else None),
            ("stream", f"{units.size(found.file_bytes)} ({found.file_bytes:,} bytes)"),
            ("squared error / squared values", f"{error:.2g}" if math.isfinite(error) else None),
            ("from first tensor to last", units.seconds(found.seconds) if found.seconds else None),
            ("captured", f"{units.size(rate)} a second" if found.ratio and rate > 0 else None),
            ("last written", f"{reader._snapshot.packets.written:%Y-%m-%d %H:%M:%S} UTC"),
            ("checkpoint", found.checkpoint),
            ("capture id", found.capture_id),
        ]
    )  # fmt: skip
    if found.missing:
        yield "<h3>Not captured</h3>"
        reasons = Counter(activation.error for activation in reader.missing)
        names: dict[str | None, str] = {}
        for activation in reader.missing:
            names.setdefault(activation.error, activation.name)
        yield page.listing(
            ["reason", "tensors", "first"],
            [
                (str(reason), f"{count:,}", names[reason] or "<root>")
                for reason, count in reasons.most_common(_TOLD)
            ],
            texts=1,
        )


def _bits(least: int, most: int) -> str:
    """The bits of mantissa that values were rounded to."""
    return f"{least if least == most else f'{least} to {most}'} bits of mantissa"


def _in_part(reader: ActivationReader) -> dict[str, int]:
    """How many tensors were stored in part, by the transform."""
    codes, names = reader._catalogue.texts("transform")
    of = codes[reader._catalogue.activations]
    counts = np.bincount(of[of >= 0], minlength=len(names)).tolist()
    return {
        name: n
        for name, n in zip(names, counts, strict=True)
        if n and name in ("sample", "last_position")
    }


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count:,})" for name, count in counts.items())
