"""The folders of dumps: an ordinary run folder each, with a file that says why it was written."""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from .._atomic import replace_durably
from .._json import plain
from ..core.config import InstrumentationConfig
from ..core.files.run_folder import ShardFolder
from ..core.files.run_records import Clock, RankFile, Shard, joined_run
from ..core.recording.ranks import this_rank
from ..core.recording.run_member import described, stored
from ..errors import CorruptError, NotFoundError

__all__ = ["TRIGGER", "Dump", "DumpFolder", "Trigger", "load_trigger", "next_folder", "remove"]

#: The file of a dump that says why it was written.
TRIGGER = "trigger.json"
_VERSION = 1


@dataclass(frozen=True)
class Trigger:
    """Why a dump was written.

    Attributes:
        kind: "not finite", "outlier", "exception", "condition", "signal" or "asked".
        reason: a sentence.
        step: the step that showed it; None: no step did.
        layer, path: the module and the place in its output, of a value that is not finite or of an
            outlier.
        call: which call of the module within the step, from 0.
        element: the number of the first such element, row-major; of an outlier that of its largest
            magnitude.
        value: that value as text, such as "nan", "-inf" or "412.5".
        request: the request that the step served; None: none.
        usual: the usual largest magnitude of the layer of an outlier; None: it is none.
    """

    kind: str
    reason: str
    step: int | None = None
    layer: str | None = None
    path: str | None = None
    call: int | None = None
    element: int | None = None
    value: str | None = None
    request: str | None = None
    usual: float | None = None


@dataclass(frozen=True)
class Dump:
    """A dump that was written.

    Attributes:
        path: its folder, which :class:`.ActivationReader` reads.
        trigger: why it was written.
        first_step, last_step: its steps; None: it has none, or they are not known.
        created_at_utc: when it began.
        problem: why it is not whole; "": it is.
    """

    path: Path
    trigger: Trigger
    first_step: int | None
    last_step: int | None
    created_at_utc: str
    problem: str = ""


def next_folder(path: Path) -> Path:
    """Makes the next folder of a recorder: ``path-000001``, then ``path-000002``."""
    pattern = re.compile(re.escape(path.name) + r"-(\d{6})")
    path.parent.mkdir(parents=True, exist_ok=True)
    found = (pattern.fullmatch(name) for name in os.listdir(path.parent))
    number = max((int(one[1]) for one in found if one is not None), default=0)
    while True:
        number += 1
        folder = path.with_name(f"{path.name}-{number:06d}")
        try:
            folder.mkdir()
        except FileExistsError:  # another process was first
            continue
        return folder


class DumpFolder:
    """A dump that is being written.

    Args:
        path: its folder.
        trigger: why it is written.
        config: the configuration of the recorder.
        model: the names of its models.

    Attributes:
        path, trigger: as given.
        stream: where the tensors are written to.
        problem: why it will not be whole; "": nothing is wrong.
    """

    def __init__(
        self, path: Path, trigger: Trigger, config: InstrumentationConfig, model: str
    ) -> None:
        self.path = path
        self.trigger = trigger
        self.problem = ""
        self._config, self._model = config, model
        self._rank, self._ranks = this_rank()
        self._folder = ShardFolder(path)
        self.stream = self._folder.shard_path(self._rank, archive=config.archive)
        self._began = datetime.datetime.now(datetime.timezone.utc).isoformat()

    def finish(self, capture_id: str) -> Dump:
        """Writes the files that make it a run, and its trigger.

        Args:
            capture_id: the id of the stream.
        """
        shard = Shard(self.stream.name, self._rank, capture_id=capture_id)
        state = "failed" if self.problem else "complete"
        shard = described(self._folder, shard, state, self.problem)
        rank = RankFile(
            run_id=capture_id, rank=self._rank, world_size=1, created_at_utc=self._began,
            mesh=None, model=self._model, configuration=stored(self._config),
            clock=Clock.now(self._rank), shards=(shard,), closed=True,
        )  # fmt: skip
        os.close(self._folder.write_rank_file(rank))
        self._folder.write_manifest(joined_run({self._rank: rank}, {}))
        first, last = shard.first_step, shard.last_step
        dump = Dump(self.path, self.trigger, first, last, self._began, shard.reason)
        record = {"trigger_version": _VERSION, **plain(dump)}
        del record["path"]
        replace_durably(self.path / TRIGGER, json.dumps(record, indent=1).encode() + b"\n")
        return dump

    def unfinished(self, error: str) -> Dump:
        """The dump if :meth:`finish` failed, as on a full disk. Its steps are not known."""
        return Dump(self.path, self.trigger, None, None, self._began, self.problem or error)


def load_trigger(path: str | os.PathLike[str]) -> Dump:
    """Reads why a dump was written.

    Raises:
        NotFoundError: the folder is no dump.
        CorruptError: the file is damaged.
    """
    folder = Path(path)
    try:
        record = json.loads((folder / TRIGGER).read_bytes())
        trigger = Trigger(**record["trigger"])
        return Dump(
            folder, trigger, record["first_step"], record["last_step"], record["created_at_utc"],
            record["problem"],
        )  # fmt: skip
    except FileNotFoundError:
        raise NotFoundError(
            f"{folder} is no dump of a flight recorder: it has no {TRIGGER}"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{folder / TRIGGER} is damaged: {error!r}") from error


def remove(dump: Dump) -> None:
    """Removes a dump: its trigger first, so that the rest is no dump if that is interrupted."""
    (dump.path / TRIGGER).unlink(missing_ok=True)
    shutil.rmtree(dump.path, ignore_errors=True)
