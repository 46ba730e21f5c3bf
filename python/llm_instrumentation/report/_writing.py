"""Puts the parts of a report together, and writes it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._atomic import typed_errors
from .._files import write_text
from .._pages import page
from .._version import __version__
from ..analysis.compare import first_other_tokens
from ..analysis.neurons.unit_logits import Writes
from ..analysis.reader import ActivationReader
from ..analysis.reading.summary import CaptureSummary, summary
from ..analysis.reading.summary import layers as summaries
from ..analysis.rows import NotTokenAlignedError
from ..errors import CorruptError, InvalidArgumentError, NotFoundError
from ..progress.bars import steps_bar
from ..storage import check_local
from ._against import compared, comparison_parts
from ._dump import dump_parts
from ._features import feature_parts
from ._layers import layer_tables
from ._machine import device_parts, probe_parts, trace_parts
from ._overview import chips, facts, notices
from ._sample import Sample, sampled
from ._texts import attention_figures, text_of_step, token_figures
from ._trends import trends
from ._units import unit_section

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Report", "render_report", "write_report"]

_GENERATOR = "llm_instrumentation report"
_ENDING = ".report.html"
_FEATURES = 20  # that are shown, of those with the largest activations


@dataclasses.dataclass(frozen=True)
class Report:
    """A report that was written.

    Attributes:
        path: the file.
        bytes: its length.
        layers, tensors: of the capture.
        packets: number of tensors that were read for statistics and histograms of the layers.
    """

    path: str
    bytes: int
    layers: int
    tensors: int
    packets: int


@dataclasses.dataclass(frozen=True)
class _Page:
    html: str
    layers: int
    tensors: int
    packets: int


def write_report(
    stream: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    packets: int = 1000,
    step: int | None = None,
    tokenizer: Any = None,
    model: nn.Module | None = None,
    against: str | os.PathLike[str] | None = None,
    rename: Mapping[str, str] | None = None,
    features: str | os.PathLike[str] | None = None,
    probes: str | os.PathLike[str] | None = None,
    trace: str | os.PathLike[str] | None = None,
    circuit: str | os.PathLike[str] | None = None,
    units: Iterable[tuple[str, int]] = (),
    writes: Writes | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> Report:
    """Writes a capture as one HTML page, which needs no other file, no script and no network.

    The page is written when it is complete. Time and memory do not grow with the capture, but for
    its index: so many packets are read, the rest is from the index. Layers of `units` are read
    whole.

    Args:
        stream: the stream of a capture. Its index, what the model was given, the token file and
            the files of its probes are expected beside it.
        out: the file; None: ``STREAM.report.html``. An earlier report there is replaced.
        packets: how many tensors to read for the statistics and histograms of the layers, and how
            many pairs to compare; but at least one of each layer, and one step.
        step: the step whose first text is shown; None: the last one.
        tokenizer: its ``decode`` gives the texts of tokens; None: they are shown as ids.
        model: the model that was captured, for the logit lens. It runs, see `logit_lens`.
        against: the stream of a reference to compare the capture with.
        rename: what layers of the reference are called in the capture, as for `compare_captures`.
        features: a folder of `save_features`.
        probes: a file of snapshots of block devices.
        trace: the run folder of a memory trace.
        circuit: a causal graph of the model, a file of `save_graph`.
        units: units to show, each with its layer and its number, as `unit_page` finds them. All
            rows of their layers are read, in blocks.
        writes: called with the layer of a unit, gives the `writes` of `unit_page`, as `written_by`
            does for a model. With it and `model` the tokens that a unit promotes are shown.
        overwrite: replace what is at ``out``, whatever it is.
        progress: show a progress bar on stderr; None: if it is a terminal.

    Raises:
        NotFoundError: (a FileNotFoundError) there is no such stream, other file, or folder.
        CorruptError: (a ValueError) a file is something else. Damaged packets are told on the page.
        InvalidArgumentError: (a ValueError) ``out`` is another file, or is missing for a URL; there
            is no such step; the tokenizer or the model does not fit the capture; the captures have
            no layer in common.
        UnsupportedError: (a TypeError) the logit lens is not known for the model.
        MissingExtraError: matplotlib or pandas is not installed; the extra "report" brings both.
        NoSpaceError, StrapIOError: (an OSError) the file cannot be written.
    """
    if out is None:
        check_local(stream, "give out= a file for the report")
    target = Path(f"{os.fspath(stream)}{_ENDING}" if out is None else out)
    _check_target(target, overwrite)
    wanted = _Wanted(
        packets, step, tokenizer, model, against, rename, features, probes, trace, circuit,
        tuple(units), writes,
    )  # fmt: skip
    made = _made(stream, wanted, progress)
    with typed_errors(f"cannot write to {target}"):
        write_text(target, made.html)
    size = target.stat().st_size
    return Report(os.fspath(target), size, made.layers, made.tensors, made.packets)


def render_report(
    stream: str | os.PathLike[str],
    *,
    packets: int = 1000,
    step: int | None = None,
    tokenizer: Any = None,
    model: nn.Module | None = None,
    against: str | os.PathLike[str] | None = None,
    rename: Mapping[str, str] | None = None,
    features: str | os.PathLike[str] | None = None,
    probes: str | os.PathLike[str] | None = None,
    trace: str | os.PathLike[str] | None = None,
    circuit: str | os.PathLike[str] | None = None,
    units: Iterable[tuple[str, int]] = (),
    writes: Writes | None = None,
    progress: bool | None = None,
) -> str:
    """Returns the page of `write_report` as a text. Arguments and errors are the same."""
    wanted = _Wanted(
        packets, step, tokenizer, model, against, rename, features, probes, trace, circuit,
        tuple(units), writes,
    )  # fmt: skip
    return _made(stream, wanted, progress).html


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """The arguments of `write_report` that say what the page shows."""

    packets: int
    step: int | None
    tokenizer: Any
    model: nn.Module | None
    against: str | os.PathLike[str] | None
    rename: Mapping[str, str] | None
    features: str | os.PathLike[str] | None
    probes: str | os.PathLike[str] | None
    trace: str | os.PathLike[str] | None
    circuit: str | os.PathLike[str] | None
    units: Sequence[tuple[str, int]]
    writes: Writes | None

    def check(self) -> None:
        """
        Raises:
            InvalidArgumentError: a value is out of its range.
        """
        if self.packets < 1:
            raise InvalidArgumentError(f"packets = {self.packets}: give 1 or more")
        if self.tokenizer is not None and not callable(getattr(self.tokenizer, "decode", None)):
            raise InvalidArgumentError(
                f"tokenizer = {self.tokenizer!r}: give an object with a method decode"
            )
        if self.rename and self.against is None:
            raise InvalidArgumentError("rename: it needs against")


def _check_target(target: Path, overwrite: bool) -> None:
    """
    Raises:
        NotFoundError: there is no such folder.
        InvalidArgumentError: another file would be replaced.
    """
    if not target.parent.is_dir():
        raise NotFoundError(f"cannot write to {target}: there is no folder {target.parent}")
    if overwrite or not target.exists():
        return
    beginning = b""
    if target.is_file():
        with open(target, "rb") as file:
            beginning = file.read(1024)
    if f'content="{_GENERATOR}"'.encode() not in beginning:
        raise InvalidArgumentError(
            f"{target} exists and is no report: choose another file, or replace it with overwrite"
        )


def _made(stream: str | os.PathLike[str], wanted: _Wanted, progress: bool | None) -> _Page:
    wanted.check()
    with ActivationReader(stream, warn=False) as reader:
        with steps_bar("reading layers", progress) as told:
            found = sampled(reader, wanted.packets, lambda done, total: told(done, total, ""))
        about = summary(reader)
        lines, error = trends(reader)
        name = ", ".join(about.models) or os.path.basename(reader.path)
        title = f"Capture of {name}" if about.models else f"Capture {name}"
        # By heading, in the order of the page.
        parts = {
            "What went wrong": _unless_damaged(dump_parts(reader, wanted.tokenizer, progress)),
            "What was captured": facts(reader, about, error),
            "Layers": layer_tables(summaries(reader.select()), lines, found.layers),
            "Tokens": _unless_damaged(_tokens(reader, wanted)),
            "Difference": _difference(reader, wanted, progress),
            "Units": _unless_damaged(_units(reader, wanted, progress)),
            "Features": _features(wanted),
            "Circuit": _circuit(wanted),
            "Over time": probe_parts(reader._file),
            "Block devices": () if wanted.probes is None else device_parts(wanted.probes),
            "Memory trace": () if wanted.trace is None else trace_parts(wanted.trace),
            "How this page was made": _origin(about, found),
        }
        sections = {
            heading: section
            for heading, inner in parts.items()
            if (section := page.section(heading, *inner, anchor=_anchor(heading)))
        }
    body = [
        f"<header><h1>{escape(title)}</h1>",
        page.paragraph(reader.path, "sub"),
        f"{chips(about)}</header>",
        page.contents([(heading, _anchor(heading)) for heading in sections]),
        *notices(about, found),
        *sections.values(),
    ]
    html = page.page(title, "\n".join(part for part in body if part), generator=_GENERATOR)
    return _Page(html, about.layers, about.tensors, found.packets)


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")


def _tokens(reader: ActivationReader, wanted: _Wanted) -> Iterator[str]:
    if not len(reader):
        return
    try:
        text = text_of_step(reader, wanted.step, wanted.tokenizer)
    except NotTokenAlignedError as error:
        yield page.paragraph(f"Tokens cannot be shown: {error}")
        return
    yield from token_figures(text, wanted.model, wanted.tokenizer)
    yield from attention_figures(reader, text, wanted.tokenizer)


def _unless_damaged(parts: Iterator[str]) -> Iterator[str]:
    """Parts of the page. If a file is damaged, they end with a notice that says so."""
    try:
        yield from parts
    except CorruptError as error:
        yield page.notice("bad", f"This part ends here: {error}")


def _difference(reader: ActivationReader, wanted: _Wanted, progress: bool | None) -> Iterator[str]:
    if wanted.against is None:
        return
    with ActivationReader(wanted.against, warn=False) as reference:
        yield from _unless_damaged(_compared(reference, reader, wanted, progress))


def _compared(
    reference: ActivationReader, reader: ActivationReader, wanted: _Wanted, progress: bool | None
) -> Iterator[str]:
    other = first_other_tokens(reference, reader)
    with steps_bar("comparing", progress) as told:
        found, steps = compared(
            reference, reader, other, wanted.rename, wanted.packets,
            lambda done, total: told(done, total, ""),
        )  # fmt: skip
    yield from comparison_parts(found, steps, len(reference.steps), other)


def _units(reader: ActivationReader, wanted: _Wanted, progress: bool | None) -> Iterator[str]:
    yield from unit_section(
        reader, wanted.units, wanted.tokenizer, wanted.model, wanted.writes, progress
    )


def _features(wanted: _Wanted) -> Iterator[str]:
    if wanted.features is None:
        return
    from ..analysis.sparse_autoencoder import load_features

    yield from feature_parts(load_features(wanted.features, top=_FEATURES))


def _circuit(wanted: _Wanted) -> Iterator[str]:
    if wanted.circuit is None:
        return
    from ..analysis.causal_graph import load_graph
    from ..analysis.causal_graph.page import graph_parts

    yield from graph_parts(load_graph(wanted.circuit), "circuit", level=3)


def _origin(about: CaptureSummary, found: Sample) -> Iterator[str]:
    values = sum(one.values for one in found.layers.values())
    yield page.paragraph(
        f"Ranges, zeros and histograms are of {values:,} values from {found.packets:,} of "
        f"{about.tensors:,} tensors, at equal distances. Everything else about the layers is from "
        "the index, which lists every tensor; an RMS that the index lacks is of the same values. "
        f"Made by llm_instrumentation {__version__}."
    )
