"""The page docs/ARCHITECTURES.md: a line for each model type, written and read back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import tiny_models
import transformers
from tiny_models.types import class_name

from .cells import Cell
from .features import FEATURES

__all__ = ["PAGE", "Line", "line_of", "lines_of_page", "page", "version_of_page"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ARCHITECTURES.md"
Line = str
_MARKS = {"works": "works", "refused": "refused", "not applicable": "–"}
_ROW = re.compile(r"^\| `([^`]+)` \| .* \|$", re.MULTILINE)
_NAME = r"(?<![\w.])(?!torch\.)\w+(?:\.\w+)+"  # of a module
_NAMES = re.compile(rf"{_NAME}(?:, {_NAME})*")
_VERSION = re.compile(r"made with transformers (\S+)")

_COLUMNS = {
    "capture": "every output of every module with that of a plain hook, bit for bit; and that the "
    "model returns the same",
    "rows": "the [rows](API.md#llm_instrumentationanalysisrows) of all layers with the values of "
    "plain hooks, and sequence, position and token id of each row: texts with padding on the left, "
    "on the right, as many texts as tokens, texts as long as something else in the model. Rows of "
    "a text in a batch with the vectors of the text alone",
    "generation": "the same, of 4 tokens that `generate` makes of texts with padding on the left",
    "static cache": 'the same, with `cache_implementation="static"`',
    "logit lens": "what the [logit lens](API.md#llm_instrumentationanalysislogit_lens) gives at "
    "the last layer with the probabilities of the model",
    "ablation": "the outputs while an attention or an MLP is "
    "[ablated](howto/interventions.md) with those of a run in which an addition of the model "
    "leaves out what the block adds to the residual stream",
}
_BEGIN = """\
# Model types

What works with which model type of transformers. `python scripts/architectures.py` tries each type
with a tiny model of random weights, and writes this page. It was made with transformers {version}
on a CPU.

{columns}

**refused** is a typed error of the package, and no answer. **–** does not apply: the type has no
text, no generation or no logits, or transformers cannot do it. The reasons stand below the table.

{counts}

{table}
"""


def page(truths: Mapping[str, Mapping[str, Cell]]) -> str:
    """The page of the cells of all types.

    Raises:
        ValueError: a cell is wrong.
    """
    names = sorted(truths)
    begin = _BEGIN.format(
        version=transformers.__version__,
        columns=_table(["column", "what is compared"], *map(list, _COLUMNS.items())),
        counts=_counts(truths),
        table="\n".join(
            [
                _table(["type", "class", *FEATURES]),
                *(line_of(name, truths[name]) for name in names),
            ]
        ),
    )
    return "\n".join(
        [
            begin,
            _reasons("Refused", "refused", truths),
            _reasons("Does not apply", "not applicable", truths),
            _skipped(),
        ]
    )


def line_of(model_type: str, cells: Mapping[str, Cell]) -> Line:
    """The line of a type in the table.

    Raises:
        ValueError: a cell is wrong.
    """
    wrong = [
        f"{feature}: {cells[feature].reason}"
        for feature in FEATURES
        if cells[feature].verdict == "wrong"
    ]
    if wrong:
        raise ValueError(f"{model_type}: {'; '.join(wrong)}")
    marks = [_MARKS[cells[feature].verdict] for feature in FEATURES]
    return _row([f"`{model_type}`", class_name(model_type), *marks])


def lines_of_page(text: str) -> dict[str, Line]:
    """The lines of the table, by model type."""
    return {found[1]: found[0] for found in _ROW.finditer(text)}


def version_of_page(text: str) -> str:
    """The version of transformers that a page was made with.

    Raises:
        ValueError: it does not say.
    """
    found = _VERSION.search(text)
    if found is None:
        raise ValueError("the page does not say with which version of transformers it was made")
    return found[1]


def _table(head: list[str], *rows: list[str]) -> str:
    return "\n".join(map(_row, [head, ["---"] * len(head), *rows]))


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _counts(truths: Mapping[str, Mapping[str, Cell]]) -> str:
    rows = []
    for feature in FEATURES:
        verdicts = [cells[feature].verdict for cells in truths.values()]
        works, refused = verdicts.count("works"), verdicts.count("refused")
        numbers = [works + refused, works, refused, len(verdicts) - works - refused]
        rows.append([feature, *map(str, numbers)])
    return (
        f"{len(truths)} model types were tried, {len(tiny_models.SKIPPED)} were skipped.\n\n"
        + _table(["feature", "tried", "works", "refused", "–"], *rows)
    )


def _reasons(title: str, verdict: str, truths: Mapping[str, Mapping[str, Cell]]) -> str:
    """The reasons for a verdict, each with its types, by feature."""
    lines = [f"## {title}\n"]
    for feature in FEATURES:
        by_reason: dict[str, list[str]] = {}
        for name in sorted(truths):
            cell = truths[name][feature]
            if cell.verdict == verdict:
                by_reason.setdefault(_in_general(cell.reason, name), []).append(name)
        if by_reason:
            lines.append(f"### {title}: {feature}\n")
            for reason, names in sorted(by_reason.items(), key=lambda one: (-len(one[1]), one[0])):
                # What a type does not have needs no list of names: the table has them.
                counted = verdict == "not applicable" and reason.startswith("no ")
                of = f"{len(names)} types" if counted else _list(names)
                lines.append(f"- {reason}: {of}")
            lines.append("")
    return "\n".join(lines)


def _skipped() -> str:
    by_reason: dict[str, list[str]] = {}
    for name, why in tiny_models.SKIPPED.items():
        by_reason.setdefault(why, []).append(name)
    lines = ["## Skipped\n"]
    lines += [f"- {why}: {_list(sorted(names))}" for why, names in by_reason.items()]
    return "\n".join([*lines, ""])


def _in_general(reason: str, model_type: str) -> str:
    """A reason without the names and numbers of one model, so that types share it."""
    reason = reason.replace(class_name(model_type), "the model")
    reason = re.sub(r"'[^']*'|\"[^\"]*\"", "‘…’", reason)
    reason = re.sub(_NAMES, "‘…’", reason)
    reason = re.sub(r"\[[\d, ]+\]", "[…]", reason)
    return _escaped(re.sub(r"\b\d+\b", "n", reason))


def _escaped(text: str) -> str:
    return re.sub(r"([|<>*_`])", r"\\\1", text)


def _list(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
