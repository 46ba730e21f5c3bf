"""Directions that tell two kinds of texts apart, with a score on texts that were held out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from ..._extras import extra
from ..._pages import units
from ...errors import InvalidArgumentError, MissingExtraError
from ...progress.bars import steps_bar
from ..reading.opened import Capture, opened
from ..reading.selection import Selector
from ..rows import Rows
from ._blocks import Vectors, as_vectors, at_least, rows_of_layer, vector_blocks, width_of

__all__ = ["Labels", "LinearProbe", "ProbeMethod", "ProbeTokens", "contrastive_direction", "probe"]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

Labels: TypeAlias = "str | Mapping[Any, Any] | Callable[[Rows], Iterable[Any]]"
"""The class of each token, see `probe`."""
ProbeMethod: TypeAlias = Literal["logistic", "means"]
"""How a direction is found: by logistic regression, or as the difference of two means."""
ProbeTokens: TypeAlias = Literal["all", "last"]
"""The tokens of a text that count: all of them, or the last one."""


@dataclasses.dataclass(frozen=True, eq=False)
class LinearProbe:
    """A direction that tells two classes apart, and how well it does on held-out texts.

    The probe takes a token for the second class if its vector times `direction`, plus `bias`, is
    above 0.

    Attributes:
        layer: the layer.
        method: "logistic" or "means".
        classes: the two classes. The direction leads from the first one to the second one.
        direction: float64 [width], as the layer's vectors are: of two means it is their difference,
            of a logistic regression the weights, in the scale of the vectors.
        bias: what is added to the product.
        score: the share of held-out tokens whose class is right.
        balanced_score: the mean of these shares of both classes; 0.5 is chance.
        baseline: the share of held-out tokens of the more frequent class, which is the score of a
            guess that is always this class.
        auc: the share of pairs of held-out tokens, one of each class, that the product orders
            rightly; 0.5 is chance. Pairs of equal products count half.
        train, held_out: number of tokens of the first class and of the second one.
        train_groups, held_out_groups: number of documents or texts. None is in both.
        groups: what was split: "document" or "sequence".
        held_out_rows: int64: the places of the held-out tokens among the rows of the layer.
        converged: False: the logistic regression ended before it converged.
    """

    layer: str
    method: ProbeMethod
    classes: tuple[Any, Any]
    direction: Vectors
    bias: float
    score: float
    balanced_score: float
    baseline: float
    auc: float
    train: tuple[int, int]
    held_out: tuple[int, int]
    train_groups: int
    held_out_groups: int
    groups: str
    held_out_rows: Ints
    converged: bool

    def __call__(self, vectors: Any) -> Vectors:
        """The product with each vector, plus the bias: above 0 for the second class.

        Args:
            vectors: [vectors, width], or one vector: a tensor, an array or a list.

        Returns:
            float64 [vectors].

        Raises:
            InvalidArgumentError: another width, or NaN or infinite values.
        """
        found = as_vectors(vectors, len(self.direction), "vectors")
        return np.asarray(found @ self.direction + self.bias)

    def __str__(self) -> str:
        first, second = self.classes
        how = {"logistic": "logistic regression", "means": "difference of means"}[self.method]
        told = [
            f"{self.layer}: {second!r} from {first!r} by {how}",
            f"  right {self.score:.1%} of {units.counted(sum(self.held_out), 'held-out token')}, "
            f"balanced {self.balanced_score:.1%}, AUC {self.auc:.3f}",
            f"  always the more frequent class: {self.baseline:.1%}",
            f"  {first!r} and {second!r}: {self.train[0]:,} and {self.train[1]:,} tokens to learn "
            f"from, {self.held_out[0]:,} and {self.held_out[1]:,} held out",
            f"  split by {self.groups}: {self.train_groups:,} to learn from, "
            f"{self.held_out_groups:,} held out",
        ]
        return "\n".join(told + ["  it has not converged"] * (not self.converged))


def contrastive_direction(
    capture: Capture,
    layer: str,
    labels: Labels,
    *,
    tokens: ProbeTokens = "all",
    held_out: float = 0.25,
    seed: int = 0,
    steps: Selector = None,
    without_tokens: Iterable[int] = (),
    progress: bool | None = None,
) -> LinearProbe:
    """The mean vector of one class minus that of the other one, with a held-out score.

    The capture is read once, in blocks of 16 MiB. All arguments and errors are those of `probe`
    with ``method="means"``. The threshold is the middle between the two means.
    """
    return probe(
        capture, layer, labels, method="means", tokens=tokens, held_out=held_out, seed=seed,
        steps=steps, without_tokens=without_tokens, progress=progress,
    )  # fmt: skip


def probe(
    capture: Capture,
    layer: str,
    labels: Labels,
    *,
    method: ProbeMethod | None = None,
    tokens: ProbeTokens = "all",
    held_out: float = 0.25,
    seed: int = 0,
    penalty: float = 1.0,
    steps: Selector = None,
    without_tokens: Iterable[int] = (),
    max_bytes: int = 2 << 30,
    progress: bool | None = None,
) -> LinearProbe:
    """A linear probe for two classes, with a score on texts that it did not learn from.

    Whole documents are held out, so no text has tokens on both sides. If a text has no document,
    it is a group of its own: give copies of a text the same document, or the score is of texts that
    were learned. Documents of the first class, of the second one and of both are shuffled with
    `seed` each, and a share of each is held out.

    Args:
        capture: a reader or the path of a stream.
        layer: the layer's name.
        labels: the class of each token. A string is the name of a label of `annotate`. A dict has
            the class of each document, or of each sequence if its keys are integers. A function is
            called with the `Rows` of the layer, and gives a class for each row. Tokens without a
            class (None, or not in the dict) are left out. There must be two classes. The direction
            leads to the larger one, as from False to True.
        method: "logistic": logistic regression of scikit-learn, on vectors that are scaled to
            variance 1, in memory. "means": the difference of the two means, in blocks. None:
            "logistic" if scikit-learn is installed, else "means". `LinearProbe.method` says which.
        tokens: "all", or "last": the last token of each text with a class.
        held_out: the share of the groups to hold out, between 0 and 1.
        seed: of the split. The same seed gives the same probe.
        penalty: the weight of the L2 penalty of the logistic regression, which is 1 / C.
        steps: as for `top_contexts`.
        without_tokens: likewise.
        progress: likewise.
        max_bytes: the largest memory of the vectors of a logistic regression.

    Raises:
        InvalidArgumentError: (a ValueError) an argument is out of its range; there are not two
            classes; a class is in fewer than two documents, so that none can be held out; the text
            of a token is unknown; a vector is not finite; the vectors take more than `max_bytes`.
        MissingExtraError: (an ImportError) "logistic" without scikit-learn; the extra "probing"
            brings it.
        NoCallsError, NotTokenAlignedError, UnknownActivationError, NotFoundError, CorruptError: as
            for `top_contexts`.
    """
    _check(method, tokens, held_out, penalty)
    at_least("seed", seed, 0)
    fit = None if method == "means" else _logistic_regression(required=method is not None)
    with opened(capture) as reader:
        rows = rows_of_layer(
            reader, layer, steps=steps, without_tokens=without_tokens, without_calls=False
        )
        classes, second, chosen = _classes(rows, labels)
        of_text, groups, split = _groups(rows)
        if tokens == "last":
            chosen = _last_of(of_text, chosen)
        tested = _held_out(groups, second, chosen, held_out, seed, classes, split)
        learned = chosen & ~tested
        tested &= chosen
        count = int(learned.sum() + tested.sum())
        with steps_bar("probing", progress) as told:
            counted = _ProbeRows(rows, second, lambda done: told(done, count, ""))
            converged = True
            if fit is None:
                direction, bias = counted.means(learned)
            else:
                direction, bias, converged = fit(
                    *counted.matrix(learned, max_bytes), penalty=penalty
                )
            products = counted.products(direction, bias, tested)
    of_class = second[tested]
    return LinearProbe(
        layer=layer,
        method="means" if fit is None else "logistic",
        classes=classes,
        direction=direction,
        bias=bias,
        **_scores(products, of_class),
        train=_tally(second[learned]),
        held_out=_tally(of_class),
        train_groups=len(np.unique(groups[learned])),
        held_out_groups=len(np.unique(groups[tested])),
        groups=split,
        held_out_rows=np.flatnonzero(tested),
        converged=converged,
    )


def _check(method: Any, tokens: Any, held_out: Any, penalty: Any) -> None:
    """
    Raises:
        InvalidArgumentError: an argument is out of its range.
    """
    if method not in (None, *get_args(ProbeMethod)):
        raise InvalidArgumentError(f'method = {method!r}: choose "logistic", "means" or None')
    if tokens not in get_args(ProbeTokens):
        raise InvalidArgumentError(f'tokens = {tokens!r}: choose "all" or "last"')
    if not 0 < held_out < 1:
        raise InvalidArgumentError(f"held_out = {held_out!r}: give a share between 0 and 1")
    if not 0 < penalty < np.inf:
        raise InvalidArgumentError(f"penalty = {penalty!r}: give a number above 0")


# ---- classes and groups -----------------------------------------------------------------------


def _classes(rows: Rows, labels: Labels) -> tuple[tuple[Any, Any], Bools, Bools]:
    """The two classes; whether each row is of the second one; and whether it has a class.

    Raises:
        InvalidArgumentError: there are not two classes, or not one for each row.
    """
    given = _labels(rows, labels)
    if len(given) != len(rows):
        raise InvalidArgumentError(
            f"labels gave {len(given):,} classes, and {rows.layer!r} has {len(rows):,} rows"
        )
    if not all(isinstance(one, Hashable) for one in given):
        raise InvalidArgumentError("labels: a class is a string, a number, True or False")
    known = [one is not None and one == one for one in given]  # NaN is no class
    distinct = {one for one, has in zip(given, known, strict=True) if has}
    if len(distinct) != 2:
        told = ", ".join(sorted(map(repr, distinct))[:5]) or "none"
        raise InvalidArgumentError(
            f"labels has {len(distinct):,} classes ({told}): a probe tells two apart. Map all "
            "others to None"
        )
    first, second = sorted(distinct, key=lambda one: (str(type(one)), one))
    of_second = np.array([one == second for one in given], np.bool_)
    return (first, second), of_second, np.array(known, np.bool_)


def _labels(rows: Rows, labels: Labels) -> list[Any]:
    """The class of each row; None: it has none.

    Raises:
        InvalidArgumentError: labels are of another kind, or no row has one.
    """
    if isinstance(labels, str):
        return _annotated(rows, labels)
    if isinstance(labels, Mapping):
        by_sequence = all(isinstance(key, int) for key in labels)
        column = "sequence" if by_sequence else "document"
        keys = rows.column(column).tolist()
        if labels.keys().isdisjoint(keys):
            raise InvalidArgumentError(
                f"no {column} of {rows.layer!r} is a key of labels: there are "
                f"{', '.join(map(repr, list(dict.fromkeys(keys))[:3]))}"
            )
        return [labels.get(key) for key in keys]
    if not callable(labels):
        raise InvalidArgumentError(
            "labels: give the name of a label, a dict of documents or sequences, or a function of "
            "the rows"
        )
    given = labels(rows)
    return given.tolist() if hasattr(given, "tolist") else list(given)


def _annotated(rows: Rows, name: str) -> list[Any]:
    texts = rows.column("labels").tolist()
    parsed = {text: json.loads(text) for text in set(texts) if text is not None}
    if not any(name in one for one in parsed.values()):
        known = sorted({key for one in parsed.values() for key in one})
        raise InvalidArgumentError(
            f"no row has the label {name!r}: annotate(...) gives labels while the model runs. "
            f"There are {', '.join(map(repr, known)) or 'none'}"
        )
    return [None if text is None else parsed[text].get(name) for text in texts]


def _groups(rows: Rows) -> tuple[Ints, Ints, str]:
    """For each row the number of its text, that of its group, and what a group is.

    Raises:
        InvalidArgumentError: the text of a row is unknown.
    """
    text = rows.column("sequence").astype(np.int64)
    if (text < 0).any():
        raise InvalidArgumentError(
            f"the texts of {int((text < 0).sum()):,} rows of {rows.layer!r} are unknown, so their "
            "texts cannot be held out: choose other steps"
        )
    # Documents are strings and texts numbers, so both can be keys of one dict.
    names = [
        at if one is None else one
        for one, at in zip(rows.column("document").tolist(), text.tolist(), strict=True)
    ]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    split = "document" if any(isinstance(name, str) for name in numbers) else "sequence"
    return text, np.array([numbers[name] for name in names], np.int64), split


def _last_of(text: Ints, chosen: Bools) -> Bools:
    """The last row with a class of each text."""
    found = np.zeros_like(chosen)
    places = np.flatnonzero(chosen)[::-1]
    _, firsts = np.unique(text[places], return_index=True)
    found[places[firsts]] = True
    return found


def _held_out(
    groups: Ints,
    second: Bools,
    chosen: Bools,
    share: float,
    seed: int,
    classes: tuple[Any, Any],
    what: str,
) -> Bools:
    """The rows of held-out groups: a share of the groups of each class, at least one of each.

    Args:
        groups: the group of each row.
        second: whether each row is of the second class.
        chosen: whether each row has a class.
        share: the share of groups to hold out.
        seed: of the split.
        classes: the names of both classes, for messages.
        what: the name of a group, for messages.

    Raises:
        InvalidArgumentError: a class would be on one side only.
    """
    random = np.random.default_rng(seed)
    distinct, number = np.unique(groups[chosen], return_inverse=True)
    has = np.zeros((2, len(distinct)), np.bool_)
    has[second[chosen].astype(np.int64), number] = True
    for of_class, name in zip(has, classes, strict=True):
        if of_class.sum() < 2:
            raise InvalidArgumentError(
                f"class {name!r} is in {units.counted(int(of_class.sum()), what)}, so none can be "
                "held out: label two or more"
            )
    taken = []
    for kind in (has[0] & ~has[1], has[1] & ~has[0], has[0] & has[1]):
        some = random.permutation(np.flatnonzero(kind))
        count = min(max(1, round(share * len(some))), max(0, len(some) - 1))
        taken.append(some[:count])
    held = np.zeros(len(distinct), np.bool_)
    held[np.concatenate(taken)] = True
    for of_class, name in zip(has, classes, strict=True):
        if not (of_class & held).any() or not (of_class & ~held).any():
            raise InvalidArgumentError(
                f"class {name!r} has too few of each {what} for a held-out share of {share}: label "
                "more, or choose another seed"
            )
    return np.isin(groups, distinct[held])


# ---- fitting and scores -------------------------------------------------------------------------


class _ProbeRows:
    """Reads the vectors of a layer: of those to learn from first, then of the held-out ones."""

    def __init__(self, rows: Rows, second: Bools, told: Callable[[int], Any]) -> None:
        self._rows, self._second, self._told = rows, second, told
        self._done = 0

    def _blocks(self, chosen: Bools) -> Iterable[tuple[Ints, Vectors]]:
        """The rows that are chosen and their vectors, block by block.

        Raises:
            InvalidArgumentError: a value is not finite.
        """
        places = np.flatnonzero(chosen)
        done = self._done
        for first, vectors in vector_blocks(
            self._rows[places], lambda count: self._told(done + count)
        ):
            if not np.isfinite(vectors).all():
                raise InvalidArgumentError(
                    f"{self._rows.layer!r} has NaN or infinite values: leave these tokens out, "
                    "with labels of None"
                )
            yield places[first : first + len(vectors)], vectors
        self._done += len(places)

    def means(self, learned: Bools) -> tuple[Vectors, float]:
        """The difference of the means, and the bias that puts 0 in the middle of both."""
        sums = np.zeros((2, width_of(self._rows)))
        for places, vectors in self._blocks(learned):
            of_second = self._second[places]
            sums[0] += vectors[~of_second].sum(0)
            sums[1] += vectors[of_second].sum(0)
        first, second = _tally(self._second[learned])
        means = sums / np.array([[first], [second]])
        direction = means[1] - means[0]
        if not direction.any():
            raise InvalidArgumentError(
                f"both classes have the same mean in {self._rows.layer!r}, so there is no direction"
            )
        return direction, float(-direction @ means.mean(0))

    def matrix(self, learned: Bools, max_bytes: int) -> tuple[Vectors, Bools]:
        """The vectors to learn from, and whether each is of the second class.

        Raises:
            InvalidArgumentError: they take more than `max_bytes`.
        """
        shape = int(learned.sum()), width_of(self._rows)
        needed = 8 * shape[0] * shape[1]
        if needed > max_bytes:
            raise InvalidArgumentError(
                f"the vectors of {shape[0]:,} tokens take {units.size(needed)}, more than "
                f'max_bytes = {max_bytes:,}: give fewer tokens a class, as with tokens="last", or '
                f'choose method="means", which reads in blocks, or max_bytes={needed:,}'
            )
        found = np.empty(shape)
        at = 0
        for _, vectors in self._blocks(learned):
            found[at : at + len(vectors)] = vectors
            at += len(vectors)
        return found, self._second[learned]

    def products(self, direction: Vectors, bias: float, chosen: Bools) -> Vectors:
        """The products of the chosen rows, in their order."""
        blocks = [vectors @ direction + bias for _, vectors in self._blocks(chosen)]
        return np.concatenate(blocks)


def _logistic_regression(*, required: bool) -> Any:
    """A function that fits one; None: scikit-learn is not installed, and it is not required."""
    try:
        with extra("probing", "A logistic regression"):
            from sklearn.exceptions import ConvergenceWarning
            from sklearn.linear_model import LogisticRegression
    except MissingExtraError:
        if required:
            raise
        return None
    import warnings

    def fitted(vectors: Vectors, second: Bools, *, penalty: float) -> tuple[Vectors, float, bool]:
        mean, scale = vectors.mean(0), vectors.std(0)
        # The same value everywhere has a deviation of rounding only. It tells nothing.
        scale[scale <= 1e-12 * np.abs(mean)] = 1.0
        vectors -= mean
        vectors /= scale
        model = LogisticRegression(C=1 / penalty, max_iter=1000)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", ConvergenceWarning)
            model.fit(vectors, second)
        converged = not any(issubclass(one.category, ConvergenceWarning) for one in told)
        direction = model.coef_[0].astype(np.float64) / scale
        return direction, float(model.intercept_[0] - direction @ mean), converged

    return fitted


def _tally(second: Bools) -> tuple[int, int]:
    return int((~second).sum()), int(second.sum())


def _scores(products: Vectors, second: Bools) -> dict[str, float]:
    """The scores of products of held-out tokens."""
    right = (products > 0) == second
    first, other = _tally(second)
    # The rank of each product; equal ones have the mean of their ranks.
    _, number, counts = np.unique(products, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[number]
    return {
        "score": float(right.mean()),
        "balanced_score": float((right[second].mean() + right[~second].mean()) / 2),
        "baseline": max(first, other) / (first + other),
        "auc": float((ranks[second].sum() - other * (other + 1) / 2) / (first * other)),
    }
