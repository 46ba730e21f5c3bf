"""Features of sparse autoencoders as Parquet or as lines of JSON."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..._atomic import replacing_folder, typed_errors
from ..._json import plain, to_json
from ...errors import CorruptError, InvalidArgumentError
from ...progress.bars import steps_bar
from .feature_folder import FeatureFolder
from .features import HISTOGRAM_EDGES, Feature, FeatureContext, SAEFeatures
from .folder import free_folder
from .logits import TokenEffect

__all__ = ["FeatureFormat", "feature_record", "load_features", "save_features"]

#: The formats of files of features.
FeatureFormat = Literal["parquet", "jsonl"]

_TABLE = 1024  # features that are written together
_EFFECT = pa.struct([("token_id", pa.int64()), ("text", pa.string()), ("value", pa.float32())])
_CONTEXT = pa.struct(
    [
        ("row", pa.int64()),
        ("value", pa.float32()),
        ("peak", pa.int32()),
        ("sequence", pa.int64()),
        ("position", pa.int64()),
        ("document", pa.string()),
        ("token_ids", pa.list_(pa.int64())),
        ("texts", pa.list_(pa.string())),
        ("values", pa.list_(pa.float32())),
    ]
)
_SCHEMA = pa.schema(
    [
        ("layer", pa.string()),
        ("feature", pa.int64()),
        ("fired", pa.int64()),
        ("density", pa.float64()),
        ("maximum", pa.float32()),
        ("histogram", pa.list_(pa.int64())),
        ("contexts", pa.list_(_CONTEXT)),
        ("promoted", pa.list_(_EFFECT)),
        ("suppressed", pa.list_(_EFFECT)),
    ]
)


def save_features(
    found: SAEFeatures,
    out: str | os.PathLike[str],
    *,
    format: FeatureFormat = "parquet",  # noqa: A002 - the word of the command and of other libraries
    overwrite: bool = False,
    progress: bool | None = None,
) -> Path:
    """Writes features to a folder: a row or a line for each, and what they have in common.

    `features.parquet`, or `features.jsonl` with a JSON object in each line, has the fields of
    `Feature`. `features.json` has the layer, the numbers of rows and features, the edges of the
    histogram and the context. The folder appears when it is complete.

    Args:
        found: the features.
        out: the folder.
        format: "parquet" or "jsonl".
        overwrite: replace what is at `out`, whatever it is.
        progress: show a progress bar; None: on a terminal, and in a notebook.

    Returns:
        the folder.

    Raises:
        InvalidArgumentError: (a ValueError) `out` exists, or there is no such format.
        CorruptError: (a ValueError) bytes of a capture differ from the written ones.
        NoSpaceError, StrapIOError: (an OSError) the files cannot be written.
    """
    if format not in get_args(FeatureFormat):
        choice = ", ".join(map(repr, get_args(FeatureFormat)))
        raise InvalidArgumentError(f"format = {format!r}: choose one of {choice}")
    target = free_folder(out, overwrite)
    about = {
        "layer": found.layer,
        "rows": found.rows,
        "features": len(found),
        "alive": int((found.fired > 0).sum()),
        "top": found.top_rows.shape[1],
        "context": found.context,
        "histogram_edges": HISTOGRAM_EDGES.tolist(),
    }
    with (
        typed_errors(f"cannot write to {target}"),
        replacing_folder(target) as folder,
        steps_bar("writing features", progress) as told,
    ):
        (folder / "features.json").write_text(to_json(about), encoding="utf-8")
        records = _counted(found, told)
        if format == "parquet":
            with pq.ParquetWriter(folder / "features.parquet", _SCHEMA) as file:
                while some := list(itertools.islice(records, _TABLE)):
                    file.write_table(pa.Table.from_pylist(some, _SCHEMA))
        else:
            with open(folder / "features.jsonl", "w", encoding="utf-8") as lines:
                lines.writelines(
                    json.dumps(plain(one), ensure_ascii=False) + "\n" for one in records
                )
    return target


def load_features(path: str | os.PathLike[str], *, top: int | None = None) -> list[Feature]:
    """Reads features from a folder of `save_features`: those that were active.

    Args:
        path: the folder.
        top: only so many, those with the largest activations, the largest first; None: all, in
            their order.

    Raises:
        NotFoundError: (a FileNotFoundError) it has no such files.
        CorruptError: (a ValueError) a file holds something else.
    """
    folder = FeatureFolder(path)
    maximum = folder.columns()["maximum"]
    active = np.flatnonzero(maximum > 0)
    if top is not None:
        active = active[np.argsort(-maximum[active], kind="stable")[:top]]
    try:
        return [_feature(record) for record in folder.records(active.tolist())]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(
            f"{folder.path} holds no features of save_features: {error!r}"
        ) from error


def _feature(record: dict[str, Any]) -> Feature:
    contexts = [FeatureContext(**one) for one in record["contexts"]]
    effects = {
        name: None if record[name] is None else [TokenEffect(**one) for one in record[name]]
        for name in ("promoted", "suppressed")
    }
    return Feature(**{**record, "contexts": contexts, **effects})


def feature_record(feature: Feature) -> dict[str, Any]:
    """The fields of a feature as dicts, lists, numbers and texts."""
    record = dict(vars(feature))
    for name in ("contexts", "promoted", "suppressed"):
        if record[name] is not None:
            record[name] = [dict(vars(one)) for one in record[name]]
    return record


def _counted(found: SAEFeatures, told: Any) -> Iterator[dict[str, Any]]:
    for number, feature in enumerate(found):
        yield feature_record(feature)
        told(number + 1, len(found), "")
