"""Direct logit attribution: what each part of a decoder adds to a logit, from a capture::

    config.with_layers(attribution_layers(model)).with_inputs()
    with capture_activations(model, "run.stream", config=config):
        model(ids)
    found = direct_logit_attribution("run.stream", model, token=paris, against=rome)
    print(found)                             # the heads and MLPs that add the most

The residual stream of a decoder is the sum of the embeddings and of what each attention and each
MLP has added. With the scale of the last norm held fixed, a logit is the same sum. The heads of a
layer with a norm behind them are told apart with the scale of this norm held fixed, too.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from .._extras import extra
from .._html import block, table
from .._integers import integers
from ..analysis.neurons.frozen_head import FrozenHead, LogitMap
from ..analysis.reader import ActivationReader, UnknownActivationError
from ..analysis.reading.opened import Capture, opened
from ..analysis.token_rows.text_rows import rows_and_texts, rows_of_texts, token_labels
from ..core.tensors.capture_state import INPUT
from ..errors import InvalidArgumentError, UnsupportedError
from .decoders import DecoderGraph, decoder
from .paths.post_norms import behind, written_change
from .paths.residuals import check_linear, linear

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "LogitAttribution",
    "attribution_layers",
    "direct_logit_attribution",
    "direct_logit_attributions",
]

Values = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# The captured parts of a sum differ from the captured sum less than this, also in bfloat16.
_ROUNDING = 0.02
_SHOWN = 15  # parts in a text
_BLOCK = 4 << 20  # values of a layer that are in memory at once, and at least one text


@dataclasses.dataclass(frozen=True, repr=False)
class LogitAttribution:
    """What each part adds to the logit of a token, at each position of a text.

    The logit at a position is the model's prediction of the token behind it. A notebook shows the
    parts that add the most at the last position, and `print` writes them.

    Attributes:
        parts: the names: "input" for the embeddings, "a3" for an attention or "a3.h2" for one of
            its heads, "a3.bias" for the bias of its output projection beside heads, "m3" for an
            MLP, and "bias" for the biases of the last norm and of the unembedding.
        tokens: a label for each position: the token's text, or else its id.
        positions: int64 [positions]: the places in the text.
        targets: int64 [positions]: the tokens whose logits these are.
        against: the token whose logit is taken away; None: none.
        values: float64 [parts, positions]: what each part adds.
        logits: float64 [positions]: the logits, from the residual stream before the last norm.
        rounding: float64 [positions]: the logit minus the sum of all parts. It is what the capture
            and the model have rounded.
    """

    parts: tuple[str, ...]
    tokens: tuple[str, ...]
    positions: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    against: int | None
    values: Values
    logits: Values
    rounding: Values

    def __getitem__(self, part: str) -> Values:
        """What a part adds at each position.

        Raises:
            InvalidArgumentError: there is no such part.
        """
        if part not in self.parts:
            raise InvalidArgumentError(f"no part {part!r}: the parts are {', '.join(self.parts)}")
        found: Values = self.values[self.parts.index(part)]
        return found

    def top(self, count: int = _SHOWN, position: int = -1) -> list[tuple[str, float]]:
        """The parts that add or take away the most, with their values.

        Args:
            count: how many.
            position: the place among `positions`; negative ones count from the end.
        """
        column = self.values[:, position]
        order = np.argsort(-np.abs(column), kind="stable")[:count]
        return [(self.parts[at], float(column[at])) for at in order.tolist()]

    def __repr__(self) -> str:
        return f"<LogitAttribution: {len(self.parts)} parts, {len(self.positions)} positions>"

    def _told(self) -> str:
        minus = "" if self.against is None else f" minus that of token {self.against}"
        return (
            f"logit of token {self.targets[-1]}{minus} behind {self.tokens[-1]!r}: "
            f"{self.logits[-1]:.4g}"
        )

    def __str__(self) -> str:
        lines = [f"  {part:<10} {value:+9.4g}" for part, value in self.top()]
        return "\n".join([self._told(), *lines])

    def _repr_html_(self) -> str:
        rows = [[part, f"{value:+.4g}"] for part, value in self.top()]
        more = f"The first {_SHOWN}; to_pandas() has all." if len(self.parts) > _SHOWN else ""
        return block(self._told(), table(["part", "adds"], rows, more))

    def to_pandas(self) -> pd.DataFrame:
        """The values as a table: the parts are the index, the positions the columns.

        Raises:
            MissingExtraError: pandas is not installed; the extra "report" brings it.
        """
        with extra("report", "A table"):
            import pandas as pd

        found: pd.DataFrame = pd.DataFrame(self.values, list(self.parts), self.positions.tolist())
        return found


def attribution_layers(model: nn.Module) -> list[str]:
    """The modules that `direct_logit_attribution` needs, for `with_layers` and `with_inputs`.

    Raises:
        UnsupportedError: (a TypeError) the model is no decoder that is known.
    """
    parts = decoder(model)
    found = [parts.blocks[0].layer]
    for one in parts.blocks:
        found += [one.out, *([one.mlp_out] if one.mlp_out else [])]
    return [*found, parts.readers[-1].norm]


def direct_logit_attribution(
    capture: Capture,
    model: nn.Module,
    token: int | None = None,
    against: int | None = None,
    *,
    sequence: int = 0,
    positions: int | Sequence[int] | None = None,
    heads: bool = True,
    tokenizer: Any = None,
) -> LogitAttribution:
    """Tells what each part of a decoder adds to a logit.

    The scale of the last norm is held fixed, so that the logit is a sum. The effect of a part
    through later parts is left out, as that of a head whose result another head reads. Patching and
    edges measure it.

    The parts are compared with the captured input of the last norm: their sum must be the same but
    for rounding. The map from the residual stream to the logit is compared with the model's own
    head, which runs on made-up tokens. All sums are in float64.

    Args:
        capture: a reader or the path of a stream, with the inputs and outputs of the modules of
            `attribution_layers`.
        model: the model that was captured.
        token: the token whose logit it is, the same at all positions. None: at each position the
            token that follows in the text; the last position is then left out.
        against: take away the logit of this token, so that it is a difference of logits.
        sequence: the number of the text in the capture, from 0.
        positions: the places in the text, from 0; negative ones count from the last one that was
            captured. None: all. A few take a fraction of the time.
        heads: tell the heads of an attention apart.
        tokenizer: its ``decode`` gives the texts of tokens.

    Raises:
        UnsupportedError: (a TypeError) the model is no decoder that is known; the parts do not add
            up to the residual stream; the model does more behind its last norm than the
            unembedding, as a soft cap; or a norm behind heads is no RMSNorm.
        UnknownActivationError: (a KeyError) a tensor was not captured; the message names it.
        InvalidArgumentError: (a ValueError) there is no such text, token or position; an argument
            has something else than integers, or `positions` is empty; or `token` is None, and the
            ids of the text are unknown or no token follows.
        NotTokenAlignedError: (a ValueError) a layer has no vector for each token.
    """
    [found] = direct_logit_attributions(
        capture, model, token, against,
        sequences=[sequence], positions=positions, heads=heads, tokenizer=tokenizer,
    )  # fmt: skip
    return found


def direct_logit_attributions(
    capture: Capture,
    model: nn.Module,
    tokens: int | Sequence[int] | None = None,
    against: int | Sequence[int] | None = None,
    *,
    sequences: Iterable[int] | None = None,
    positions: int | Sequence[int] | None = None,
    heads: bool = True,
    tokenizer: Any = None,
) -> list[LogitAttribution]:
    """Tells what each part of a decoder adds to a logit, in several texts.

    It is quicker than `direct_logit_attribution` for each text: the model's head is looked at once,
    and the tensors of many texts are read together. The mean at the last positions is
    ``np.mean([one.values[:, -1] for one in found], axis=0)``. With ``positions=-1``, or of a
    capture ``with_last_position``, only those are calculated.

    Args:
        capture: as for `direct_logit_attribution`.
        model: likewise.
        tokens: the token whose logit it is, one for all texts or one for each. None: at each
            position the token that follows.
        against: the token whose logit is taken away, likewise. None: none.
        sequences: the numbers of the texts in the capture, from 0; None: all, in their order.
            Rows whose text is unknown, as of beams, are in none.
        positions: as for `direct_logit_attribution`, the same in all texts.
        heads: as for `direct_logit_attribution`.
        tokenizer: likewise.

    Returns:
        what the parts add in each text. All have the same parts.

    Raises:
        InvalidArgumentError: (a ValueError) as for `direct_logit_attribution`, or there are not as
            many tokens as texts.
        UnsupportedError: (a TypeError) as for `direct_logit_attribution`.
        UnknownActivationError: (a KeyError) likewise.
        NotTokenAlignedError: (a ValueError) likewise.
    """
    parts = decoder(model)
    check_linear(parts)
    norm = parts.readers[-1].norm
    places = None
    if positions is not None:
        given = integers("positions", positions)
        places = [given] if isinstance(given, int) else given
        if not places:
            raise InvalidArgumentError("positions is empty: give at least one, or None for all")
    found: list[LogitAttribution] = []
    with opened(capture) as reader:
        names = _names(reader, parts)
        _, texts = rows_and_texts(reader, names["norm"])
        known, counts = np.unique(texts[texts >= 0], return_counts=True)  # -1: of no known text
        lengths = dict(zip(known.tolist(), counts.tolist(), strict=True))
        chosen = [*lengths] if sequences is None else integers("sequences", list(sequences))
        assert isinstance(chosen, list)
        wanted = [
            _WantedText(*one)
            for one in zip(
                chosen, (lengths.get(one, 0) for one in chosen),
                _of_each("tokens", tokens, chosen), _of_each("against", against, chosen),
                strict=True,
            )
        ]  # fmt: skip
        head = FrozenHead(parts.model, parts.module(norm))
        for some in _blocks(wanted, _BLOCK // head.width):
            found += _of_block(
                reader, parts, head, names, some, places, heads=heads, tokenizer=tokenizer
            )
    return found


class _WantedText(NamedTuple):
    """A text, the number of its tokens, and the tokens whose logits are meant."""

    sequence: int
    length: int
    token: int | None
    against: int | None


def _of_each(
    name: str, given: int | Sequence[int] | None, texts: Sequence[int]
) -> Sequence[int | None]:
    """One for each text.

    Raises:
        InvalidArgumentError: there are not as many as texts.
    """
    if given is None:
        return [None] * len(texts)
    if isinstance(numbers := integers(name, given), int):
        return [numbers] * len(texts)
    if len(numbers) != len(texts):
        raise InvalidArgumentError(
            f"{name} has {len(numbers)} tokens, and there are {len(texts)} texts: give one for "
            "each, or one for all"
        )
    return numbers


def _blocks(wanted: Iterable[_WantedText], most: int) -> Iterator[list[_WantedText]]:
    """The texts that are read together: as many as have this number of tokens, and at least one."""
    block: list[_WantedText] = []
    held = 0
    for one in wanted:
        if block and held + one.length > most:
            yield block
            block, held = [], 0
        block.append(one)
        held += one.length
    if block:
        yield block


def _of_block(
    reader: ActivationReader, parts: DecoderGraph, head: FrozenHead, names: Mapping[str, str],
    wanted: Sequence[_WantedText], places: list[int] | None, *, heads: bool, tokenizer: Any,
) -> Iterator[LogitAttribution]:  # fmt: skip
    """What the parts add in some texts."""
    sequences = [one.sequence for one in wanted]
    rows = rows_of_texts(reader, list(names.values()), sequences, tokenizer)
    by_part = {part: rows[name] for part, name in names.items()}
    stream = by_part.pop("norm")
    labels, positions = token_labels(stream), stream.column("position").astype(np.int64)
    ids = stream.column("token_id").astype(np.int64)
    ends = np.cumsum([one.length for one in wanted])
    of_texts = []
    for one, end in zip(wanted, ends.tolist(), strict=True):
        begin = end - one.length
        chosen = _chosen(one, positions[begin:end], places)
        targets_of = _targets(one, ids[begin:end], positions[begin:end], chosen)
        of_texts.append((begin + chosen, targets_of))
    kept = np.concatenate([rows for rows, _ in of_texts])
    targets = torch.from_numpy(np.concatenate([tokens for _, tokens in of_texts]))
    cuts = np.cumsum([len(rows) for rows, _ in of_texts])[:-1]
    minus = None
    if wanted[0].against is not None:
        others = [
            np.full(len(rows), one.against) for one, (rows, _) in zip(wanted, of_texts, strict=True)
        ]
        minus = torch.from_numpy(np.concatenate(others))
    # The vectors of these texts, of one part at a time.
    whole = stream[kept].to_torch().double()
    mapped = head.map(whole, targets, minus)
    found = _PartSums(parts, mapped, whole, heads=heads)
    for part, of_part in by_part.items():
        found.add(part, of_part[kept].to_torch().double())
    found.check()
    values = np.stack([*found.values.values(), mapped.constants.numpy()])
    logits = mapped.logits.numpy()
    columns = zip(
        wanted, *(np.split(one, cuts, axis=-1) for one in (kept, targets.numpy(), values, logits)),
        strict=True,
    )  # fmt: skip
    for one, at, tokens, of_text, made in columns:
        yield LogitAttribution(
            parts=(*found.values, "bias"),
            tokens=tuple(labels[row] for row in at.tolist()),
            positions=positions[at],
            targets=tokens,
            against=one.against,
            values=of_text,
            logits=made,
            rounding=made - of_text.sum(0),
        )


def _names(reader: ActivationReader, parts: DecoderGraph) -> dict[str, str]:
    """The captured tensor of each part, "norm" for the input of the last norm.

    Raises:
        UnknownActivationError: one was not captured.
    """
    wanted = {"input": (parts.blocks[0].layer, True)}
    for number, one in enumerate(parts.blocks):
        wanted[f"a{number}"] = (one.out, True)
        if one.mlp_out:
            wanted[f"m{number}"] = (one.mlp_out, False)
    wanted["norm"] = (parts.readers[-1].norm, True)
    found = {}
    for part, (module, of_input) in wanted.items():
        # A first argument that is given by its name has the name in brackets.
        pattern = re.escape(module) + (r"(\['hidden_states'\])?" + re.escape(INPUT)) * of_input
        names = [name for name in reader.layers if re.fullmatch(pattern, name)]
        if not names:
            raise UnknownActivationError(
                f"{reader.path} lacks the {'input' if of_input else 'output'} of {module!r}: "
                "capture with config.with_layers(attribution_layers(model)).with_inputs()"
            )
        found[part] = names[0]
    return found


def _chosen(text: _WantedText, positions: Ints, places: list[int] | None) -> Ints:
    """The numbers of the rows of a text, among its own, at some places.

    Args:
        positions: of each row of the text.
        places: positions, or negative numbers of rows; None: all that have a token to predict.
    """
    if places is None:
        return np.arange(text.length if text.token is not None else text.length - 1)
    found = []
    for place in places:
        rows = np.flatnonzero(positions == place) if place >= 0 else [text.length + place]
        if len(rows) != 1 or rows[0] < 0:
            raise InvalidArgumentError(
                f"position {place}: of text {text.sequence} the capture has {text.length} tokens, "
                f"at the positions {positions.min()} to {positions.max()}"
            )
        found.append(int(rows[0]))
    return np.array(found, np.int64)


def _targets(text: _WantedText, ids: Ints, positions: Ints, rows: Ints) -> Ints:
    """The tokens whose logits are meant at some rows of a text.

    Args:
        ids: of all rows of the text.
        positions: likewise.
        rows: their numbers.
    """
    if text.token is not None:
        return np.full(len(rows), text.token, np.int64)
    if (ids < 0).any():
        raise InvalidArgumentError(
            "the capture does not have the ids of the tokens, so those that follow are unknown: "
            "name a token"
        )
    if len(ids) < 2 or rows.max() + 1 == len(ids):
        raise InvalidArgumentError(
            f"no token follows the last one of text {text.sequence}: name a token"
        )
    apart = positions[rows + 1] - positions[rows]
    if (apart != 1).any():
        raise InvalidArgumentError(
            f"the capture lacks the token behind position {positions[rows][apart != 1][0]} of text "
            f"{text.sequence}: name a token"
        )
    return ids[rows + 1]


class _PartSums:
    """What the parts add to a logit, one part after the other.

    Attributes:
        values: [positions] of each part.
    """

    def __init__(
        self, parts: DecoderGraph, mapped: LogitMap, whole: Tensor, *, heads: bool
    ) -> None:
        self._parts, self._mapped, self._whole, self._heads = parts, mapped, whole, heads
        self._sum = torch.zeros_like(whole)
        self.values: dict[str, Values] = {}

    def add(self, part: str, vectors: Tensor) -> None:
        """Takes a part: what the embeddings or an MLP have added, or the results of heads."""
        directions = self._mapped.directions
        if not part.startswith("a"):
            self._sum += vectors
            self.values[part] = (vectors * directions).sum(-1).numpy()
            return
        layer = self._parts.blocks[int(part[1:])]
        weight, bias = linear(self._parts.module(layer.out), layer.out)
        weight = weight.cpu().double()
        exact = torch.zeros(len(weight)).double() if bias is None else bias.cpu().double()
        together = vectors @ weight.T + exact
        if layer.post_norm:
            together, directions = self._behind(layer.post_norm, together, directions)
        self._sum += together
        by_column = vectors * (directions @ weight)
        of_bias = directions @ exact
        if not self._heads:
            self.values[part] = (by_column.sum(-1) + of_bias).numpy()
            return
        of_heads = by_column.reshape(len(vectors), layer.heads.heads, -1).sum(-1)
        for number, one in enumerate(of_heads.unbind(-1)):
            self.values[f"{part}.h{number}"] = one.numpy()
        if bias is not None:
            self.values[f"{part}.bias"] = of_bias.numpy()

    def _behind(self, name: str, together: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        """What a norm makes of the sum of the heads, and directions before it for those behind it.

        With its scale held fixed, an RMSNorm multiplies each value by a number. So it does the same
        to values and to directions.

        Raises:
            UnsupportedError: it is another norm.
        """
        norm = self._parts.module(name)
        if not type(norm).__name__.endswith("RMSNorm"):
            raise UnsupportedError(
                f"{name!r} is a {type(norm).__name__}, so the heads before it cannot be told "
                "apart. Edges can measure them: see edge_attribution"
            )
        device = next((one.device for one in norm.parameters()), together.device)
        before = together.to(device)
        held = written_change(norm, name, before, directions.to(device)[None], "frozen")[0]
        with torch.no_grad():
            return behind(norm, before).cpu(), held.cpu()

    def check(self) -> None:
        """
        Raises:
            UnsupportedError: the parts do not add up to the residual stream.
        """
        apart = (self._sum - self._whole).norm(dim=-1) / self._whole.norm(dim=-1).clamp_min(1e-9)
        if not bool((apart < _ROUNDING).all()):
            kind = type(self._parts.model).__name__
            raise UnsupportedError(
                f"what the embeddings, attentions and MLPs of {kind} have added differs by "
                f"{float(apart.max()):.0%} from the input of its last norm: the capture is of "
                "another model or was rounded too much (with_float32() keeps all digits), or "
                f"{kind} is not as its layout says; see register_decoder"
            )
