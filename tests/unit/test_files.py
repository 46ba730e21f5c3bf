"""Files are replaced when they are complete, also in folders that other users may write to."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import threading

import pyarrow as pa
import pytest
from llm_instrumentation import _atomic, _files
from llm_instrumentation._files import (
    is_locked,
    partial_beside,
    remove_leftovers,
    replace_locked,
    replacing,
    write_text,
)
from llm_instrumentation.core.tokens import CheckpointFile, save_token_metadata
from llm_instrumentation.mrm.collector.torch.spool import Spool
from llm_instrumentation.mrm.collector.torch.trace import write_trace


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


def names(folder):
    return sorted(os.listdir(folder))


# ---- links of another user --------------------------------------------------------


def checkpoint(path):
    CheckpointFile(path).replace([], {})


def token_file(path):
    save_token_metadata(path.with_name("gen.stream"), [], 0.0)


def trace(path):
    write_trace(pa.table({"a": [1]}).to_reader(), path)


def rank_file(path):
    os.close(replace_locked(path, b"{}"))


def rows_of_a_trace(path):
    spool = Spool(path)
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
        (rank_file, "rank-00000.json"),
        (lambda path: write_text(path, "a report"), "report.html"),
    ],
)
def test_links_under_names_that_can_be_guessed_are_not_followed(write, name, tmp_path):
    """In a folder like /tmp, another user may place links to a file that only we may write."""
    mine, shared = tmp_path / "mine", tmp_path / "shared"
    mine.write_text("precious")
    shared.mkdir()
    for suffix in (".tmp", ".part", ".partial", ".rows"):
        (shared / (name + suffix)).symlink_to(mine)
    write(shared / name)
    assert mine.read_text() == "precious"


def test_no_link_is_followed_even_under_the_right_name(tmp_path, monkeypatch):
    """If a link has the name of the partial file by chance, creating the file fails."""
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


def test_one_file_may_be_replaced_twice_at_once(tmp_path):
    """Two replacements of one file use different partial files; the one that ends last stays."""
    path = tmp_path / "a.json"
    with replacing(path) as first:
        first.write_text("first")
        with replacing(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"


def test_files_and_folders_get_their_mode_from_the_umask(tmp_path, umask):
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


def test_a_long_name_is_cut_between_two_characters(tmp_path):
    """A name cut within a character would not be valid UTF-8, which Arrow needs for paths."""
    path = tmp_path / ("a" + "\u00e9" * 110 + ".parquet")
    with replacing(path) as partial:
        partial.write_text("x")
        assert partial.name.encode().startswith(b"a\xc3\xa9")
    left = path.with_name("a" + "\u00e9" * 99 + f".{'0' * 16}.partial")
    left.touch()
    remove_leftovers(path)
    assert names(tmp_path) == [path.name]


@pytest.fixture
def steps(monkeypatch):
    """The calls of os.fsync and os.replace in order, with the names of the files."""
    done, fsync, replace = [], os.fsync, os.replace

    def synced(descriptor):
        done.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def replaced(partial, path):
        done.append(("replace", os.path.basename(partial), os.path.basename(path)))
        replace(partial, path)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    return done


def test_a_file_is_synced_before_it_replaces_another(steps, tmp_path):
    path = tmp_path / "a.json"
    with replacing(path) as partial:
        partial.write_text("new")
    assert steps == [("sync", partial.name), ("replace", partial.name, "a.json")]


def test_checkpoint_and_token_files_are_on_disk_with_their_names(steps, tmp_path):
    """The folder is synced after the last file, so the new names survive a power loss."""
    checkpoint(tmp_path / "gen.stream.ckpt.json")
    [(kind, synced), (_, replaced, _), folder] = steps
    assert (kind, synced) == ("sync", replaced) and folder == ("sync", tmp_path.name)
    steps.clear()
    save_token_metadata(tmp_path / "gen.stream", [], 0.0)
    assert [step[0] for step in steps] == ["sync", "replace", "sync", "replace", "sync"]
    assert [step[-1] for step in steps if step[0] == "replace"] == [
        "gen_tokens.json", "gen.stream_tokens.json",
    ]  # fmt: skip
    assert steps[0][1] == steps[1][1] and steps[2][1] == steps[4][1] == tmp_path.name
    steps.clear()
    save_token_metadata(tmp_path / "gen.stream", [], 0.0, durable=False)
    assert [step[0] for step in steps] == ["replace", "replace"]


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_partial_file_that_cannot_be_removed_does_no_harm(tmp_path, monkeypatch):
    """The caller's error is raised all the same, and no file descriptor stays open."""

    def fails(partial):
        raise PermissionError("not yours")

    monkeypatch.setattr(_files, "_remove", fails)
    before, path = descriptors(), tmp_path / "a.json"
    with pytest.raises(ValueError, match="mine"), replacing(path):
        raise ValueError("mine")
    with replacing(path) as partial:
        partial.write_text("x")
    assert path.read_text() == "x"
    assert descriptors() == before


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize("name", ["_create", "_lock"])
def test_ctrl_c_while_a_partial_file_is_made_leaves_nothing(name, folder, tmp_path, monkeypatch):
    function = getattr(_files, name)

    def interrupted(*args):
        opened = function(*args)
        if name == "_create":
            os.close(opened)
        raise KeyboardInterrupt

    monkeypatch.setattr(_files, name, interrupted)
    before = descriptors()
    with pytest.raises(KeyboardInterrupt), partial_beside(tmp_path / "a", folder=folder):
        pass
    assert names(tmp_path) == []
    assert descriptors() == before


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_another_process_may_remove_a_half_made_second_name(links, tmp_path, monkeypatch):
    """The token file gets both names although another process removes leftovers meanwhile."""
    path, link = tmp_path / "gen.stream", os.link

    def found(source, partial):
        if not links:
            raise PermissionError("no links here")
        link(source, partial)
        remove_leftovers(tmp_path / "gen.stream_tokens.json")

    monkeypatch.setattr(_atomic.os, "link", found)
    for seconds in (1.0, 2.0):
        save_token_metadata(path, [], seconds)
    assert names(tmp_path) == ["gen.stream_tokens.json", "gen_tokens.json"]
    assert os.path.samefile(tmp_path / "gen_tokens.json", f"{path}_tokens.json") == links
    assert (tmp_path / "gen_tokens.json").read_bytes() == (
        tmp_path / "gen.stream_tokens.json"
    ).read_bytes()


def test_a_folder_appears_when_it_is_whole(tmp_path):
    target = tmp_path / "data"
    with pytest.raises(OSError, match="full"), partial_beside(target, folder=True) as partial:
        (partial / "half").write_text("x")
        raise OSError("full")
    assert names(tmp_path) == []


# ---- leftovers of killed processes ------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from llm_instrumentation._files import partial_beside
with partial_beside(Path(sys.argv[1]), folder=sys.argv[2] == "folder") as partial:
    print(partial.name, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_leftovers_of_killed_processes_go_and_files_of_running_ones_stay(kind, tmp_path):
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


def test_leftovers_on_nfs_are_removed(tmp_path, monkeypatch):
    """NFS turns flock into an fcntl(2) lock, which refuses LOCK_EX on a file opened for reading."""
    flock = fcntl.flock

    def of_nfs(descriptor, operation):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError("EBADF")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", of_nfs)
    left = tmp_path / f"a.json.{'0' * 16}.partial"
    left.touch()
    remove_leftovers(tmp_path / "a.json")
    assert names(tmp_path) == []


def test_the_folder_is_listed_once_for_each_path(tmp_path, monkeypatch):
    listed, listdir = [], os.listdir

    def counted(folder):
        listed.append(folder)
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", counted)
    for _ in range(5):
        checkpoint(tmp_path / "gen.stream.ckpt.json")
    assert listed == [tmp_path]


def test_links_and_pipes_with_the_name_of_a_leftover_do_no_harm(tmp_path):
    path, mine = tmp_path / "a.json", tmp_path / "mine"
    mine.mkdir()
    (mine / "kept").touch()
    (tmp_path / f"a.json.{'0' * 16}.partial").symlink_to(mine)
    os.mkfifo(tmp_path / f"a.json.{'1' * 16}.partial")
    write_text(path, "x")
    assert path.read_text() == "x"
    assert (mine / "kept").exists()


def test_a_partial_file_that_is_removed_before_its_lock_is_made_again(tmp_path, monkeypatch):
    lock, path = _files._lock, tmp_path / "a.json"

    def too_late(descriptor):
        monkeypatch.setattr(_files, "_lock", lock)
        remove_leftovers(path)  # another process does this between creating and locking
        return lock(descriptor)

    monkeypatch.setattr(_files, "_lock", too_late)
    write_text(path, "x")
    assert path.read_text() == "x"
    assert names(tmp_path) == ["a.json"]


def test_a_file_that_is_replaced_locked_is_never_seen_unlocked(tmp_path):
    path, seen, done = tmp_path / "rank-00000.json", [], threading.Event()
    descriptor = replace_locked(path, b"0")

    def look():
        while not done.is_set():
            seen.append(is_locked(path))

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(300):
        following = replace_locked(path, str(number).encode())
        os.close(descriptor)
        descriptor = following
    done.set()
    thread.join()
    assert len(seen) > 300 and all(seen)
    os.close(descriptor)
    assert not is_locked(path) and path.read_bytes() == b"299" and names(tmp_path) == [path.name]
