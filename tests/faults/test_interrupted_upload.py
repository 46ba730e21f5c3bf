"""Uploads through networks that fail, and kill -9 of an upload: what is there is whole."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation.core.files.run_folder import ShardFolder
from llm_instrumentation.core.files.run_records import Clock, RankFile, Shard, joined_run
from llm_instrumentation.errors import (
    BusyError,
    CorruptError,
    InvalidArgumentError,
    InvalidStateError,
    NoSpaceError,
    NotFoundError,
    RunFolderError,
)
from llm_instrumentation.storage import (
    CredentialsError,
    StorageError,
    StorageOptions,
    UnfinishedUploadError,
    Uploader,
    upload,
)

pytest.importorskip("obstore")
from faulty_proxy import faulty_proxy
from s3_server import s3_server

URL = "s3://models/runs"
OPTIONS = StorageOptions(timeout_s=5.0, deadline_s=20.0)
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="module")
def captured(tmp_path_factory) -> Path:
    """A finished capture of 24 MB, in raw bytes."""
    stream = tmp_path_factory.mktemp("captured") / "run.stream"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 512), torch.nn.Linear(512, 1024))
    config = InstrumentationConfig.max().with_float32()
    with torch.no_grad(), capture_activations(model, stream, config=config):
        for _ in range(5):
            model(torch.randint(0, 50, (4, 128)))
    return stream


@pytest.fixture
def stream(captured, tmp_path) -> Path:
    """A copy of the capture, which a test may delete."""
    folder = tmp_path / "run"
    folder.mkdir()
    for file in captured.parent.iterdir():
        shutil.copy(file, folder / file.name)
    return folder / "run.stream"


@pytest.fixture
def bucket(server, monkeypatch, tmp_path) -> Path:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STRAP_CACHE_FOLDER", str(tmp_path / "cache"))
    shutil.rmtree(server.folder / "models", ignore_errors=True)
    return server.create_bucket("models")


@pytest.fixture
def proxy(server, bucket, monkeypatch):
    with faulty_proxy(server.url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


def is_there(bucket: Path, stream: Path) -> bool:
    """Whether the store has the files of the capture byte for byte, and a complete record."""
    record = json.loads((bucket / "runs" / "run.stream.upload.json").read_text())
    files = [file for file in stream.parent.iterdir() if file.name.startswith("run")]
    return (
        record["complete"]
        and {file.name for file in files} == set(record["files"])
        and all((bucket / "runs" / f.name).read_bytes() == f.read_bytes() for f in files)
    )


def test_an_upload_is_read_back_byte_for_byte(bucket, stream):
    report = upload(stream, URL + "/")
    assert report.sent[-1] == "run.stream" and report.deleted == []
    assert report.sent_bytes == sum(file.stat().st_size for file in stream.parent.iterdir())
    assert is_there(bucket, stream)
    with ActivationReader(stream) as local, ActivationReader(f"{URL}/run.stream") as remote:
        for ours, theirs in zip(remote, local, strict=True):
            assert torch.equal(ours.to_torch(), theirs.to_torch())
        rows = [np.asarray(reader.rows("0")) for reader in (remote, local)]
        assert rows[0].tobytes() == rows[1].tobytes()


def test_a_second_upload_sends_nothing(proxy, stream):
    upload(stream, URL)
    proxy.forget()
    report = upload(stream, URL)
    assert report.sent == [] and "run.stream" in report.skipped
    assert proxy.received == 0


def test_what_changed_is_sent_again(bucket, stream):
    upload(stream, URL)
    (bucket / "runs" / "run.stream.calls").unlink()
    tokens = stream.with_name("run_tokens.json")
    tokens.write_text("{}")
    assert upload(stream, URL).sent == ["run.stream.calls", "run_tokens.json"]
    assert is_there(bucket, stream)


def uploads(tell, environment: dict[str, str], stream: Path, rate: float | None) -> None:
    os.environ.update(environment)
    tell("begun")
    upload(stream, URL, bytes_per_second=rate, options=OPTIONS)


@pytest.mark.parametrize("part", [0.01, 0.3, 0.6, 0.9])
def test_killed_uploads_go_on(start, server, proxy, bucket, stream, part):
    total = sum(file.stat().st_size for file in stream.parent.iterdir())
    environment = {**server.environment, "AWS_ENDPOINT_URL": proxy.url}
    proxy.bytes_per_second = 20e6
    child = start(uploads, environment, stream, None)
    child.told()
    until = time.monotonic() + 60
    while proxy.received < part * total:
        assert time.monotonic() < until
        time.sleep(0.001)
    child.signal(signal.SIGKILL)
    child.join()
    proxy.bytes_per_second = None
    with pytest.raises((UnfinishedUploadError, NotFoundError)):
        ActivationReader(f"{URL}/run.stream")
    time.sleep(0.5)  # until the proxy has passed on what it has
    record = bucket / "runs" / "run.stream.upload.json"
    proven = set(json.loads(record.read_text())["files"]) if record.exists() else set()
    assert "run.stream" not in proven
    report = upload(stream, URL, options=OPTIONS)
    assert set(report.skipped) == proven and "run.stream" in report.sent
    assert is_there(bucket, stream)
    ActivationReader(f"{URL}/run.stream").close()


@pytest.mark.parametrize("fault", ["reset", "503", "wrong upload"])
def test_a_network_that_fails_at_times_changes_nothing(proxy, bucket, stream, fault):
    """The first try of each part fails. The store refuses a part with another checksum."""
    seen = set()

    def first(request):
        name = request.path.partition("&")[0]  # without the id of the upload
        new = "partNumber" in name and name not in seen
        seen.add(name)
        return fault if new else ""

    proxy.fault = first
    assert "run.stream" in upload(stream, URL, options=OPTIONS).sent
    assert len(seen) >= 3 and is_there(bucket, stream)


@pytest.mark.parametrize("fault", ["reset", "503", "wrong upload"])
def test_a_store_that_is_gone_is_an_error_and_deletes_nothing(proxy, bucket, stream, fault):
    before = {file.name: file.read_bytes() for file in stream.parent.iterdir()}
    proxy.fault = lambda request: fault if "partNumber" in request.path else ""
    options = StorageOptions(timeout_s=1.0, deadline_s=1.0)
    with pytest.raises(StorageError, match=r"s3://models/runs/run.stream.*: "):
        upload(stream, URL, delete_local=True, options=options)
    assert {file.name: file.read_bytes() for file in stream.parent.iterdir()} == before
    proxy.fault = lambda request: ""
    with pytest.raises(UnfinishedUploadError, match=r"run strap upload again"):
        ActivationReader(f"{URL}/run.stream")
    upload(stream, URL)
    assert is_there(bucket, stream)


def test_credentials_that_expire_during_an_upload(proxy, stream):
    proxy.fault = lambda request: "expired" if "partNumber=2" in request.path else ""
    with pytest.raises(CredentialsError, match="ExpiredToken") as caught:
        upload(stream, URL, options=OPTIONS)
    assert "secret-token" not in str(caught.value)


def test_local_files_are_deleted_once_they_are_proven(bucket, stream):
    (stream.parent / "notes.txt").write_text("of the user")
    content = stream.read_bytes()
    report = upload(stream, URL, delete_local=True)
    assert [file.name for file in stream.parent.iterdir()] == ["notes.txt"]
    assert report.deleted[0] == str(stream)
    assert (bucket / "runs" / "run.stream").read_bytes() == content


def test_a_deletion_that_was_killed_goes_on(bucket, stream):
    upload(stream, URL)
    stream.unlink()
    upload(stream, URL, delete_local=True)
    assert list(stream.parent.iterdir()) == []


def test_nothing_is_deleted_for_an_object_that_was_replaced(bucket, stream):
    import obstore
    from obstore.store import from_url

    upload(stream, URL)
    content = stream.read_bytes()
    stream.unlink()  # as by a killed deletion
    store = from_url("s3://models", client_options={"allow_http": True})
    obstore.put(store, "runs/run.stream", content[:-1])
    with pytest.raises(StorageError, match="no local file is deleted"):
        upload(stream, URL, delete_local=True)
    assert stream.with_name("run.stream.index").exists()


def test_the_rate_is_bounded(proxy, stream):
    """At half of the size a second it takes two seconds less the blocks that go at once."""
    begun = time.monotonic()
    upload(stream, URL, bytes_per_second=stream.stat().st_size / 2)
    assert time.monotonic() - begun > 1.5


def test_what_is_no_finished_capture_is_refused(bucket, stream, tmp_path):
    with pytest.raises(NotFoundError, match=r"other.stream"):
        upload(tmp_path / "other.stream", URL)
    with pytest.raises(NotFoundError, match="there is no bucket s3://nothing"):
        upload(stream, "s3://nothing/runs")
    with pytest.raises(InvalidArgumentError, match="begins with s3://"):
        upload(stream, str(tmp_path))
    with pytest.raises(InvalidArgumentError, match="bytes_per_second = 0"):
        upload(stream, URL, bytes_per_second=0)
    os.truncate(stream, stream.stat().st_size - 10)
    with pytest.raises(CorruptError, match="strap salvage"):
        upload(stream, URL)
    assert not (bucket / "runs").exists()


def test_a_capture_under_way_is_refused(bucket, tmp_path):
    model = torch.nn.Linear(4, 4)
    with torch.no_grad(), capture_activations(model, tmp_path / "run.stream"):
        model(torch.ones(1, 4))
        with pytest.raises(BusyError, match="is being written"):
            upload(tmp_path / "run.stream", URL)


@pytest.mark.parametrize(
    "content",
    [b"", b'{"upload_version": 1, "comp', b"[]", b'{"upload_version": 1, "files": {"a": 1}}'],
)
def test_a_damaged_record_is_named_and_replaced(bucket, stream, content):
    upload(stream, URL)
    record = bucket / "runs" / "run.stream.upload.json"
    record.write_bytes(content)
    with pytest.raises(CorruptError, match=r"run.stream.upload.json is no record of an upload"):
        ActivationReader(f"{URL}/run.stream")
    upload(stream, URL)
    assert is_there(bucket, stream)


def test_a_small_file_that_is_wrong_is_an_error(bucket, stream):
    """The record has its checksum."""
    upload(stream, URL)
    index = bucket / "runs" / "run.stream.index"
    content = bytearray(index.read_bytes())
    content[len(content) // 2] ^= 1
    index.write_bytes(content)
    with pytest.raises(CorruptError, match=r"run.stream.index: its SHA-256"):
        ActivationReader(f"{URL}/run.stream")


def test_a_folder_of_this_machine(stream, tmp_path):
    there = tmp_path / "there"
    upload(stream, f"file://{there}")
    assert is_there_locally(there, stream)
    assert upload(stream, f"file://{there}", delete_local=True).sent == []
    assert list(stream.parent.iterdir()) == []
    with ActivationReader(f"file://{there}/run.stream") as reader:
        assert len(reader) == 15


def is_there_locally(there: Path, stream: Path) -> bool:
    return all((there / f.name).read_bytes() == f.read_bytes() for f in stream.parent.iterdir())


def test_a_full_disk_of_the_copy_is_an_error(bucket, stream, mount):
    """A smaller limit is the way out."""
    upload(stream, URL)
    folder = mount("tmpfs", 6 * MEGABYTE) / "cache"
    url = f"{URL}/run.stream"
    with ActivationReader(url, storage=StorageOptions(cache_folder=folder)) as reader:
        with pytest.raises(NoSpaceError, match="cannot write to"):
            for activation in reader:
                activation.to_torch()
    options = StorageOptions(cache_folder=folder, cache_bytes=3 * MEGABYTE)
    with ActivationReader(url, storage=options) as remote, ActivationReader(stream) as local:
        for ours, theirs in zip(remote, local, strict=True):
            assert torch.equal(ours.to_torch(), theirs.to_torch())


# ---- run folders ----


def seal(folder: Path, stream: Path, segments: int, *, whole: bool = True) -> None:
    """Writes the rank file of so many sealed segments, and of one that is being written."""
    for k in range(segments):
        for file in stream.parent.iterdir():
            target = folder / file.name.replace("run", f"rank-00000.{k:05}")
            if not target.exists() and k == segments - 1:
                shutil.copy(file, target)
    shards = [Shard(f"rank-00000.{k:05}.stream", 0, k, "complete") for k in range(segments)]
    shards.append(Shard(f"rank-00000.{segments:05}.stream", 0, segments))
    rank = RankFile(
        run_id="run", rank=0, world_size=1, created_at_utc="2026-01-01", mesh=None, model="m",
        configuration={}, clock=Clock.now(0), shards=tuple(shards),
    )  # fmt: skip
    os.close(ShardFolder(folder).write_rank_file(rank))
    if not whole:
        os.truncate(folder / "rank-00000.json", 300)


def end(folder: Path) -> None:
    """Writes the manifest."""
    own = ShardFolder(folder)
    own.write_manifest(joined_run(own.rank_files(), {}))


def test_segments_are_uploaded_as_they_come(bucket, stream, tmp_path):
    folder = tmp_path / "run-folder"
    folder.mkdir()
    with Uploader(folder, URL, delete_local=True, poll_s=0.05) as uploader:
        for k in range(1, 4):
            seal(folder, stream, k)
            name = f"rank-00000.{k - 1:05}.stream"
            until = time.monotonic() + 60
            while (folder / f"{name}.index").exists() or (folder / name).exists():
                assert time.monotonic() < until, uploader.error
                time.sleep(0.05)
            assert (bucket / "runs" / name).read_bytes() == stream.read_bytes()
        assert not (bucket / "runs" / "rank-00000.json").exists()
        end(folder)
    assert uploader.report.sent[-2:] == ["rank-00000.json", "manifest.json"]
    assert sorted(file.name for file in folder.iterdir()) == ["manifest.json", "rank-00000.json"]
    assert uploader.close() is uploader.report
    # A run folder that was uploaded and deleted needs nothing more.
    assert upload(folder, URL).sent == ["rank-00000.json", "manifest.json"]


def test_a_store_that_is_gone_for_a_while_does_not_stop_the_uploader(
    proxy, bucket, stream, tmp_path
):
    folder = tmp_path / "run-folder"
    folder.mkdir()
    proxy.fault = lambda request: "503"
    options = StorageOptions(timeout_s=1.0, deadline_s=0.3)
    uploader = Uploader(folder, URL, poll_s=0.05, options=options)
    seal(folder, stream, 1)
    until = time.monotonic() + 60
    while uploader.error is None:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert isinstance(uploader.error, StorageError)
    proxy.fault = lambda request: ""
    uploader.close()
    assert (bucket / "runs" / "rank-00000.00000.stream").read_bytes() == stream.read_bytes()


def test_a_half_written_rank_file_or_manifest_is_an_error(bucket, stream, tmp_path):
    folder = tmp_path / "run-folder"
    folder.mkdir()
    with pytest.raises(NotFoundError, match="is no run folder"):
        upload(folder, URL)
    seal(folder, stream, 1, whole=False)
    with pytest.raises(RunFolderError, match=r"rank-00000.json is not usable: no valid JSON"):
        upload(folder, URL)
    seal(folder, stream, 1)
    (folder / "manifest.json").write_text('{"manifest_version": 1, "sha')
    with pytest.raises(RunFolderError, match=r"manifest.json is not usable: no valid JSON"):
        upload(folder, URL)
    assert not (bucket / "runs" / "manifest.json").exists()
    text = (folder / "rank-00000.json").read_text()
    (folder / "rank-00000.json").write_text(text.replace("rank-00000.00000", "../rank-00000.00000"))
    with pytest.raises(RunFolderError, match=r'"path" is \'\.\./rank-00000'):
        upload(folder, URL)


def test_an_uploader_can_be_stopped(bucket, stream, tmp_path):
    folder = tmp_path / "run-folder"
    folder.mkdir()
    seal(folder, stream, 1)
    uploader = Uploader(folder, URL, bytes_per_second=MEGABYTE, poll_s=0.01)
    until = time.monotonic() + 60
    while not uploader.report.sent:
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(InvalidStateError, match="took longer than 0.1 s"):
        uploader.close(timeout_s=0.1)
    assert threading.active_count() == 1 or "strap-upload" not in {
        thread.name for thread in threading.enumerate()
    }
    upload(folder, URL)
    assert (bucket / "runs" / "rank-00000.00000.stream").read_bytes() == stream.read_bytes()


# ---- memory ----


def uploads_large(tell, environment: dict[str, str], stream: Path) -> None:
    os.environ.update(environment)
    upload(stream, URL, memory_bytes=32 * MEGABYTE)
    status = Path("/proc/self/status").read_text()
    tell(int(status.partition("VmHWM:")[2].split()[0]) * 1024)


@pytest.mark.slow
def test_the_memory_of_an_upload_is_bounded(start, server, bucket, stream):
    """2 GB, with a packet of zeros that is a hole on this disk."""
    small = start(uploads_large, server.environment, stream)
    baseline = small.told()
    length = 2_000_000_000
    with open(stream, "ab") as file:
        file.write(struct.pack("!HI", 3, length) + b"big")
    os.truncate(stream, stream.stat().st_size + length)
    large = start(uploads_large, server.environment, stream)
    assert large.told(timeout=280) < baseline + 150 * MEGABYTE
    assert (bucket / "runs" / "run.stream").stat().st_size == stream.stat().st_size
