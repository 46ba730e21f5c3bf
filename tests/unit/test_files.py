"""Files that take another's place once they are whole, in folders where others may write too."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pyarrow as pa
import pytest
from llm_instrumentation import _files
from llm_instrumentation._files import partial_beside, remove_leftovers, replacing
from llm_instrumentation.core.tokens import CheckpointFile, save_token_metadata
from llm_instrumentation.mrm.collector.torch.spool import Spool
from llm_instrumentation.mrm.collector.torch.trace import write_trace
from llm_instrumentation.mrm.reporter.files import write_text

pytestmark = pytest.mark.unit


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


def names(folder):
    return sorted(os.listdir(folder))


# ---- links that somebody else laid ------------------------------------------------


def checkpoint(path):
    CheckpointFile(path).replace([], {})


def token_file(path):
    save_token_metadata(path.with_name("gen.stream"), [], 0.0)


def trace(path):
    write_trace(pa.table({"a": [1]}).to_reader(), path)


def rows_of_a_trace(path):
    spool = Spool(path.parent)
    spool.write(memoryview(bytes(40)), 1)
    spool.close()


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (checkpoint, "gen.stream.ckpt.json"),
        (token_file, "gen_tokens.json"),
        (token_file, "gen.stream_tokens.json"),
        (trace, "trace.parquet"),
        (rows_of_a_trace, "trace.parquet"),
        (lambda path: write_text(path, "a report"), "report.html"),
    ],
)
def test_links_under_names_that_can_be_guessed_are_not_followed(write, name, tmp_path):
    """In a folder like /tmp, somebody else lays links to a file that only we may write."""
    mine, shared = tmp_path / "mine", tmp_path / "shared"
    mine.write_text("precious")
    shared.mkdir()
    for suffix in (".tmp", ".part", ".partial", ".rows"):
        (shared / (name + suffix)).symlink_to(mine)
    write(shared / name)
    assert mine.read_text() == "precious"


def test_no_link_is_followed_even_under_the_right_name(tmp_path, monkeypatch):
    guesses = iter(["0" * 16, "1" * 16])
    monkeypatch.setattr(_files.secrets, "token_hex", lambda n: next(guesses))
    path, mine = tmp_path / "a.json", tmp_path / "mine"
    mine.write_text("precious")
    (tmp_path / f"a.json.{'0' * 16}.partial").symlink_to(mine)
    with pytest.raises(FileExistsError), partial_beside(path):
        pass
    assert mine.read_text() == "precious"


# ---- replacing --------------------------------------------------------------------


def test_a_file_appears_when_it_is_whole(tmp_path):
    path = tmp_path / "a.json"
    with replacing(path) as partial:
        assert partial.parent == tmp_path and partial.name.endswith(".partial")
        partial.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    assert names(tmp_path) == ["a.json"]


def test_after_an_error_the_old_file_stands(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as partial:
        partial.write_text("ne")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.json"]


def test_two_that_replace_one_file_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "a.json"
    with replacing(path) as first:
        first.write_text("first")
        with replacing(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"


def test_its_mode_is_that_of_a_plain_open(tmp_path, umask):
    with replacing(tmp_path / "file") as partial:
        partial.write_text("x")
    with partial_beside(tmp_path / "folder", folder=True) as partial:
        partial.rename(tmp_path / "folder")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o750


def test_the_longest_names(tmp_path):
    path = tmp_path / ("\u00e9" * 125 + ".json")  # 255 bytes
    for text in ("1", "2"):
        write_text(path, text)
        assert path.read_text() == text
    assert names(tmp_path) == [path.name]


def test_a_folder_appears_when_it_is_whole(tmp_path):
    target = tmp_path / "data"
    with pytest.raises(OSError, match="full"), partial_beside(target, folder=True) as partial:
        (partial / "half").write_text("x")
        raise OSError("full")
    assert names(tmp_path) == []


# ---- what killed processes left ---------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from llm_instrumentation._files import partial_beside
with partial_beside(Path(sys.argv[1]), folder=sys.argv[2] == "folder") as partial:
    print(partial.name, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_killed_process_left_goes_and_what_a_running_one_writes_stays(kind, tmp_path):
    path = tmp_path / "a.json"
    other = tmp_path / "b.json.0123456789abcdef.partial"
    other.write_text("of another file")
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, path, kind],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as process:  # fmt: skip
        left = process.stdout.readline().strip()
        remove_leftovers(path)
        assert names(tmp_path) == [left, other.name]
        process.kill()
        process.wait()
        assert names(tmp_path) == [left, other.name]
    remove_leftovers(path)
    assert names(tmp_path) == [other.name]
    write_text(path, "x")
    assert names(tmp_path) == ["a.json", other.name]


def test_leftovers_that_are_no_files_of_ours_do_no_harm(tmp_path):
    path, mine = tmp_path / "a.json", tmp_path / "mine"
    mine.mkdir()
    (mine / "kept").touch()
    (tmp_path / f"a.json.{'0' * 16}.partial").symlink_to(mine)
    os.mkfifo(tmp_path / f"a.json.{'1' * 16}.partial")
    write_text(path, "x")
    assert path.read_text() == "x"
    assert (mine / "kept").exists()


def test_a_leftover_that_is_removed_before_its_lock_is_made_anew(tmp_path, monkeypatch):
    lock, path = _files._lock, tmp_path / "a.json"

    def too_late(descriptor):
        monkeypatch.setattr(_files, "_lock", lock)
        remove_leftovers(path)  # of another process, between creating and locking
        return lock(descriptor)

    monkeypatch.setattr(_files, "_lock", too_late)
    write_text(path, "x")
    assert path.read_text() == "x"
    assert names(tmp_path) == ["a.json"]
