"""Sends what is sealed of a run folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .._json import load_json_file
from ..errors import CorruptError, NotFoundError
from ._sending import Sending, Told

__all__ = ["send_folder", "send_sealed"]

_RANK_FILE = re.compile(r"rank-\d{5,}\.json")
_MANIFEST = "manifest.json"


def send_folder(
    sending: Sending, folder: Path, told: Told | None = None, done: set[str] | None = None
) -> None:
    """Sends the sealed streams of a run folder, then its rank files, then the manifest.

    Args:
        sending: sends them.
        folder: the run folder.
        told: as the progress of `upload`, for each stream.
        done: the streams that are proven already.

    Raises:
        NotFoundError: the folder has no rank file and no manifest.
        CorruptError: a rank file or the manifest is damaged. No stream of it is sent, or the
            manifest is not.
    """
    ranks = _rank_files(folder)
    manifest = folder / _MANIFEST
    if not ranks and not manifest.exists():
        raise NotFoundError(
            f"{folder} is no run folder: it has neither {_MANIFEST} nor rank-00000.json; "
            "upload its streams one by one"
        )
    send_sealed(sending, folder, set() if done is None else done, told)
    if manifest.exists():
        _shards(manifest)  # or raises
    for file in ranks:
        sending.small(file)
    if manifest.exists():
        sending.small(manifest)


def send_sealed(sending: Sending, folder: Path, done: set[str], told: Told | None = None) -> None:
    """Sends the streams that the rank files list as complete, and adds their names to `done`."""
    manifest = folder / _MANIFEST
    for file in _rank_files(folder) or ([manifest] if manifest.exists() else []):
        for name in _shards(file):
            if name not in done:
                sending.stream(folder / name, told)
                done.add(name)


def _rank_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if _RANK_FILE.fullmatch(file.name))


def _shards(file: Path) -> list[str]:
    """The streams that a rank file or manifest lists as complete.

    Raises:
        CorruptError: it is damaged, or a stream is outside of the folder.
    """
    way_out = "write it again, or upload the streams one by one"
    try:
        content: Any = load_json_file(file)
        shards = [(shard["path"], shard["state"]) for shard in content["shards"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"{file} is no list of shards: {error!r}: {way_out}") from None
    names = [name for name, state in shards if state == "complete"]
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CorruptError(f"{file} lists {name!r}, which is no file of its folder: {way_out}")
    return names
