"""Effects of nodes of a model on a metric, for each example: a table, a figure, a graph, a file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast, get_args

import numpy as np
import numpy.typing as npt
from torch import nn

from .._extras import extra
from .._html import block, table
from ..analysis.causal_graph import CausalGraph
from ..analysis.causal_graph import Node as GraphNode
from ..analysis.files.stored_effects import (
    StoredEffects,
    StoredNode,
    metric_difference,
    read_effects,
    write_effects,
)
from ..analysis.significance import (
    Adjustment,
    MeanInterval,
    adjusted,
    bootstrap_interval,
    permutation_test,
    width_remark,
)
from ..errors import CorruptError, InvalidArgumentError
from .metrics import Metric
from .nodes import NodeKind, node_kinds, node_names
from .prompts import Direction, Prompts
from .running.runs import Floats, Target, model_name, versions
from .sites import Site, Where, position_of, role_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = ["Effects"]

Ids: TypeAlias = npt.NDArray[np.int64]

_SHOWN = 20  # rows in a notebook


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Effects:
    """The effects of nodes on a metric.

    An effect is the metric with an intervention on the node minus the metric without it. Where
    intervals are wider than effects, tables and figures say the number of examples.

    Attributes:
        sites: the nodes as sites.
        nodes: their names, as `CausalGraph` has them: "a3.h5", "m3", "transformer.h.3@7".
        values: the effect on each example: float64, [nodes, examples].
        clean: the metric of the clean inputs without interventions: float64, [examples].
        corrupted: likewise, of the corrupted inputs.
        metric: the name of the metric.
        method: how the effects were found, as "activation patching".
        direction: "denoising": the metric without interventions is `corrupted`. "noising": it is
            `clean`, as for ablations.
        model: the model's name.
        clean_ids: the token ids of the clean inputs, of the text that all sites are in: int64,
            [examples, tokens]; -1 is padding. None: unknown, or the sites are in several texts.
        corrupted_ids: likewise, of the corrupted inputs. None also for ablations.
        kinds: the kind of each node, as in `sites_of`; empty: unknown.
    """

    sites: tuple[Site, ...]
    nodes: tuple[str, ...]
    values: Floats
    clean: Floats
    corrupted: Floats
    metric: str
    method: str
    direction: Direction
    model: str
    clean_ids: Ids | None = None
    corrupted_ids: Ids | None = None
    kinds: tuple[NodeKind, ...] = ()

    def __len__(self) -> int:
        return len(self.nodes)

    def __repr__(self) -> str:
        nodes, examples = self.values.shape
        return (
            f"<Effects of {nodes:,} nodes of {self.model} on {self.metric}: {self.method}, "
            f"{self.direction}, {examples:,} examples>"
        )

    def _repr_html_(self) -> str:
        order = np.argsort(-np.abs(self.mean), kind="stable")
        shown = order[:_SHOWN]
        low, high = self._ends(shown)
        rows = [
            (
                self.nodes[at],
                f"{self.mean[at]:+.4g}",
                f"{low[n]:+.4g} to {high[n]:+.4g}" if np.isfinite(low[n] + high[n]) else "–",
            )
            for n, at in enumerate(shown)
        ]
        left_out = len(order) - _SHOWN
        note = f"and {left_out:,} more nodes with smaller effects" if left_out > 0 else ""
        why = width_remark(self.mean[shown], low, high, self.values.shape[1])
        note = "; ".join(filter(None, [note, why]))
        return block(repr(self).strip("<>"), table(["node", "effect", "interval"], rows, note))

    # ---- numbers ----------------------------------------------------------------------------

    @property
    def mean(self) -> Floats:
        """The mean effect of each node over the examples: float64, [nodes]."""
        found: Floats = self.values.mean(axis=1)
        return found

    def fraction(self) -> Floats:
        """The mean effects as shares of the difference clean - corrupted: float64, [nodes].

        In denoising, 1 means that the node alone brings the whole difference back. In noising, -1
        means that the node alone takes it away.

        Raises:
            InvalidArgumentError: (a ValueError) the mean metrics of the clean and the corrupted
                inputs are as good as equal, so shares would have no meaning.
        """
        if (difference := metric_difference(self.clean, self.corrupted)) is None:
            raise InvalidArgumentError(
                f"the mean {self.metric} is {self.clean.mean():.6g} for the clean inputs and "
                f"{self.corrupted.mean():.6g} for the corrupted ones: they are too close to divide "
                "by their difference. Choose other pairs or another metric, or use the effects as "
                "they are"
            )
        return self.mean / difference

    def intervals(self, confidence: float = 0.95, *, seed: int = 0) -> MeanInterval:
        """Confidence intervals of the mean effects, each of [nodes]. See `bootstrap_interval`.

        Raises:
            InvalidArgumentError: (a ValueError) there is one example, or an argument is out of its
                range.
        """
        return bootstrap_interval(self.values.T, confidence, seed)

    def p_values(
        self, method: Adjustment | None = "holm", *, seed: int = 0, resamples: int = 9_999
    ) -> Floats:
        """Whether each mean effect differs from 0: float64, [nodes]. See `permutation_test`.

        Args:
            method: how they are adjusted for the number of nodes, see `adjusted`. None: not.
            seed: of the flips of signs.
            resamples: the number of flips. With n nodes and "holm" no p-value is below
                2 n / (resamples + 1).

        Raises:
            InvalidArgumentError: (a ValueError) as for `intervals`.
            MissingExtraError: scipy is not installed; the extra "circuits" brings it.
        """
        found = permutation_test(self.values.T, seed, resamples=resamples)
        return found if method is None else adjusted(found, method)

    def _ends(self, rows: Sequence[int] | np.ndarray | slice) -> tuple[Floats, Floats]:
        """The ends of the intervals of some nodes; NaN if there is one example."""
        values = self.values[rows]
        if values.shape[1] < 2:
            return np.full(len(values), np.nan), np.full(len(values), np.nan)
        found = bootstrap_interval(values.T)
        return found.low, found.high

    # ---- files ------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, tokenizer: Any = None) -> Path:
        """Writes the effects to a Parquet file, with those on each example.

        `strap serve --effects` shows it in a browser. The file appears when it is complete; a file
        at `path` is replaced. It has a row for each node: its name, its site, and `values`, a list
        with the effect on each example.

        Args:
            path: the file; its name ends in .parquet.
            tokenizer: its `decode` gives the texts of the tokens, which are stored too. None: token
                ids alone are stored.

        Returns:
            the path.

        Raises:
            InvalidArgumentError: (a ValueError) the name ends otherwise; two nodes have the same
                name; there are more than 2^20 nodes or 2^26 values; with `tokenizer`, the token ids
                are not known.
            NoSpaceError, StrapIOError: (an OSError) the file cannot be written.
        """
        texts = {}
        if tokenizer is not None:
            if self.clean_ids is None:
                raise InvalidArgumentError(
                    "tokenizer is for effects with token ids, and these have none: leave it out"
                )
            given = [ids for ids in (self.clean_ids, self.corrupted_ids) if ids is not None]
            numbers = np.unique(np.concatenate([ids.reshape(-1) for ids in given])).tolist()
            texts = {number: str(tokenizer.decode([number])) for number in numbers if number >= 0}
        kinds = self.kinds or (None,) * len(self.nodes)
        nodes = tuple(map(_stored, self.nodes, self.sites, kinds))
        about = {
            name: getattr(self, name)
            for name in ("clean", "corrupted", "metric", "method", "direction", "model")
        }
        return write_effects(
            Path(path),
            StoredEffects(
                nodes=nodes, values=self.values, **about, clean_ids=self.clean_ids,
                corrupted_ids=self.corrupted_ids, texts=texts,
            ),
        )  # fmt: skip

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Effects:
        """Reads a file of `save`.

        Raises:
            NotFoundError: (a FileNotFoundError) there is no such file.
            CorruptError: (a ValueError) it holds something else, or is damaged.
            UnsupportedError: a later version wrote it, or it has more values than are read.
            StrapIOError: (an OSError) it cannot be read.
        """
        found = read_effects(path)
        kinds = tuple(node.kind for node in found.nodes if node.kind is not None)
        if found.direction not in get_args(Direction):
            raise CorruptError(f"{os.fspath(path)}: there is no direction {found.direction!r}")
        try:
            sites = tuple(map(_site, found.nodes))
        except (InvalidArgumentError, TypeError, KeyError) as error:
            raise CorruptError(f"{os.fspath(path)}: a node has no site: {error}") from error
        return cls(
            sites, tuple(node.name for node in found.nodes), found.values, found.clean,
            found.corrupted, found.metric, found.method, cast(Direction, found.direction),
            found.model, found.clean_ids, found.corrupted_ids,
            kinds if len(kinds) == len(sites) else (),
        )  # fmt: skip

    # ---- to other things --------------------------------------------------------------------

    def to_pandas(self) -> pd.DataFrame:
        """A table with a row for each node, in their order.

        Returns:
            node; layer, the captured name of the site's module; head, head_input, position and role
            (the span of the prompts), or missing; effect, the mean over the examples; low and high,
            the ends of a 95 % interval, NaN if there is one example.

        Raises:
            MissingExtraError: pandas is not installed; the extra "report" brings it.
        """
        with extra("report", "to_pandas"):
            import pandas as pd

        low, high = self._ends(slice(None))
        columns = {
            "node": self.nodes,
            "layer": [site.layer for site in self.sites],
            "head": [site.head for site in self.sites],
            "head_input": [site.head_input for site in self.sites],
            "position": [position_of(site) for site in self.sites],
            "role": [role_of(site) for site in self.sites],
            "effect": self.mean,
            "low": low,
            "high": high,
        }
        found: pd.DataFrame = pd.DataFrame(columns)
        for name in ("head", "position"):
            found[name] = found[name].astype("Int64")
        return found

    def to_graph(self) -> CausalGraph:
        """The nodes with their mean effects and 95 % intervals as a causal graph without edges.

        Raises:
            InvalidArgumentError: (a ValueError) a site is there twice.
        """
        low, high = self._ends(slice(None))
        bounded = np.isfinite(low) & np.isfinite(high)
        nodes = [
            GraphNode(
                name,
                effect=self.mean[at],
                low=low[at] if bounded[at] else None,
                high=high[at] if bounded[at] else None,
            )
            for at, name in enumerate(self.nodes)
        ]
        return CausalGraph(
            tuple(nodes),
            model=self.model,
            metric=self.metric,
            method=f"{self.method}, {self.direction}",
            clean=float(self.clean.mean()),
            corrupted=float(self.corrupted.mean()),
            examples=self.values.shape[1],
            versions=versions(),
        )

    def plot(self, ax: Axes | None = None, *, tokenizer: Any = None) -> Axes:
        """Draws the mean effects. Positive ones are blue, negative ones red.

        Heads are a heat map with a row for each layer and a column for each head, and one for the
        feed-forward blocks if they are there too. Sites of one position each have a column for each
        position, and sites of spans of the prompts, heads too, a column for each span. Other sites
        are bars, with their 95 % intervals.

        Args:
            ax: the axes to draw to; None makes a figure.
            tokenizer: its `decode` gives the texts of the tokens at the positions, as
                "John→Mary" where the clean and the corrupted inputs differ. "John…" is the
                token of the first example, others have others. None: positions are numbers.

        Raises:
            InvalidArgumentError: (a ValueError) two nodes belong to one cell of the heat map; with
                `tokenizer`, the sites have no positions, or the token ids are not known.
            MissingExtraError: matplotlib is not installed; the extra "report" brings it.
        """
        from ._effects_figure import plot_effects

        return plot_effects(self, ax, tokenizer)


_SLICE = ("start", "stop", "step")


def _stored(name: str, site: Site, kind: NodeKind | None) -> StoredNode:
    """A node with its site as plain values."""

    def choice(value: Any) -> Any:
        if isinstance(value, slice):
            return {part: getattr(value, part) for part in _SLICE}
        return [choice(one) for one in value] if isinstance(value, tuple) else value

    return StoredNode(
        name, kind, site.layer,
        **{part: choice(getattr(site, part)) for part in Where.__annotations__},
    )  # fmt: skip


def _site(node: StoredNode) -> Site:
    """The site of a stored node.

    Raises:
        InvalidArgumentError, TypeError, KeyError: it has none.
    """

    def choice(value: Any) -> Any:
        return slice(*(value[part] for part in _SLICE)) if isinstance(value, dict) else value

    parts: Any = {part: choice(getattr(node, part)) for part in Where.__annotations__}
    return Site(node.layer, **parts)


def effects_of(
    model: nn.Module,
    prompts: Prompts,
    nodes: Sequence[Target],
    values: Floats,
    base: Floats,
    source: Floats,
    metric: Metric,
    method: str,
    direction: Direction,
) -> Effects:
    """The result of a measurement.

    Args:
        base: the metric of the run that is changed, [examples].
        source: the metric of the run that the values come from.
    """
    sites = tuple(node.site for node in nodes)
    corrupted, clean = (base, source) if direction == "denoising" else (source, base)
    in_encoder = {node.spot.in_encoder for node in nodes}
    # The sites of one figure are in one text, and an encoder has another one than its decoder.
    ids = prompts.token_ids(encoder=in_encoder == {True}) if len(in_encoder) == 1 else None
    clean_ids, corrupted_ids = (None, None) if ids is None else (one.cpu().numpy() for one in ids)
    return Effects(
        sites, node_names(model, sites), values, clean, corrupted, metric.name, method, direction,
        model_name(model), clean_ids, None if method.endswith("ablation") else corrupted_ids,
        node_kinds(model, sites),
    )  # fmt: skip
