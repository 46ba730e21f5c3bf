"""Whatever a rank file or manifest contains, it is read, or refused with its name."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_instrumentation.core.files.run_folder import ShardFolder
from llm_instrumentation.core.files.run_records import Clock, RankFile, Shard, SmallFile, joined_run
from llm_instrumentation.errors import RunFolderError

CLOCK = Clock("node", "boot", 2_000, 1_000, (0,))
SHARD = Shard(
    "rank-00000.stream", 0, state="complete", capture_id="ab", size_bytes=7, packets=1,
    first_step=0, last_step=0, files=(SmallFile("rank-00000.stream.index", 3, "cd"),),
)  # fmt: skip
RANK_FILE = RankFile("run", 0, 2, "2026-01-01", None, "m", {}, CLOCK, (SHARD,), closed=True)

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)


def places(content, at=()):
    """The paths to all values in a JSON document."""
    yield at
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in items if isinstance(content, (dict, list)) else ():
        if isinstance(value, (dict, list)):
            yield from places(value, (*at, key))
        else:
            yield (*at, key)


def written(folder: Path) -> ShardFolder:
    found = ShardFolder(folder)
    os.close(found.write_rank_file(RANK_FILE))
    found.write_manifest(joined_run({0: RANK_FILE}, {1: "it died"}))
    return found


def test_what_is_written_is_read(tmp_path):
    found = written(tmp_path)
    assert found.rank_file(0) == RANK_FILE
    run = found.run()
    assert run.shards == (SHARD, Shard("rank-00001.stream", 1, state="missing", reason="it died"))
    assert (run.finished, run.hosts) == (True, (CLOCK,))
    found.manifest_path.unlink()
    assert not found.run().finished


def test_a_manifest_has_a_shard_of_each_rank():
    with TemporaryDirectory() as directory:
        folder = written(Path(directory))
        path = folder.path / "manifest.json"
        content = json.loads(path.read_text())
        content["shards"] = [shard for shard in content["shards"] if shard["rank"] != 1]
        path.write_text(json.dumps(content))
        with pytest.raises(RunFolderError, match='"shards" has none of rank 1'):
            folder.run()


@given(st.data(), st.sampled_from(["rank-00000.json", "manifest.json"]), anything)
def test_any_value_in_any_place_is_read_or_refused(data, name, value):
    with TemporaryDirectory() as directory:
        folder = written(Path(directory))
        path = folder.path / name
        content = json.loads(path.read_text())
        at = data.draw(st.sampled_from(list(places(content))))
        changed = copy.deepcopy(content) if at else value
        if at:
            inner = changed
            for key in at[:-1]:
                inner = inner[key]
            inner[at[-1]] = value
        path.write_text(json.dumps(changed))
        with contextlib.suppress(RunFolderError):
            assert folder.run().shards


@given(st.binary(max_size=60), st.integers(0, 2000))
def test_torn_and_foreign_bytes_are_refused(tail, length):
    with TemporaryDirectory() as directory:
        folder = written(Path(directory))
        whole = folder.manifest_path.read_bytes()
        content = whole[:length] + tail
        folder.manifest_path.write_bytes(content)
        with contextlib.suppress(RunFolderError):
            run = folder.run()
            assert run == ShardFolder(written(Path(directory)).path).run()
