"""Captures in object storage: read by ranges from a real server, through networks that fail."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    InstrumentationFramework,
    capture_activations,
)
from llm_instrumentation.analysis.compare import compare_captures
from llm_instrumentation.analysis.dataset import ActivationDataset
from llm_instrumentation.cli import main
from llm_instrumentation.errors import (
    CorruptError,
    InvalidArgumentError,
    InvalidStateError,
    NotFoundError,
    RunFolderError,
    StrapIOError,
)
from llm_instrumentation.storage import (
    CredentialsError,
    ObjectChangedError,
    StorageError,
    StorageOptions,
    Uploader,
    upload,
)
from llm_instrumentation.storage._bucket import Bucket

pytest.importorskip("obstore")
from faulty_proxy import faulty_proxy
from s3_server import s3_server

STEPS = 40
OPTIONS = {"timeout_s": 1.0, "deadline_s": 30.0}  # a busy machine takes seconds for a retry


@pytest.fixture(scope="module")
def capture(tmp_path_factory) -> Path:
    """A capture of 5 layers and 40 steps."""
    stream = tmp_path_factory.mktemp("capture") / "run.stream"
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(50, 64), torch.nn.Linear(64, 256), torch.nn.ReLU(),
        torch.nn.Linear(256, 64),
    )  # fmt: skip
    config = InstrumentationConfig.max()
    with torch.no_grad(), capture_activations(model, stream, config=config):
        for _ in range(STEPS):
            model(torch.randint(0, 50, (4, 32)))
    return stream


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def bucket(server, capture, monkeypatch, tmp_path) -> Path:
    """A bucket with the capture, and an environment in which clients find the server."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STRAP_CACHE_FOLDER", str(tmp_path / "cache"))
    shutil.rmtree(server.folder / "models", ignore_errors=True)
    bucket = server.create_bucket("models")
    (bucket / "runs").mkdir()
    for file in capture.parent.glob("run*"):
        shutil.copy(file, bucket / "runs" / file.name)
    return bucket


@pytest.fixture
def proxy(server, bucket, monkeypatch):
    with faulty_proxy(server.url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


URL = "s3://models/runs/run.stream"


def test_rows_are_those_of_the_local_file(bucket, capture):
    with ActivationReader(capture) as local, ActivationReader(URL) as remote:
        assert remote.path == URL and remote.layers == local.layers
        assert remote.index.equals(local.index) and remote.capture_id == local.capture_id
        for ours, theirs in zip(remote, local, strict=True):
            assert torch.equal(ours.to_torch(), theirs.to_torch())
        layer = remote.rows("1", steps=slice(3, 9))
        assert np.array_equal(np.asarray(layer), np.asarray(local.rows("1", steps=slice(3, 9))))
        assert torch.equal(remote["3"].stack(), local["3"].stack())


def test_no_more_is_fetched_than_the_rows_need(proxy):
    with ActivationReader(URL) as reader:
        opened = reader.fetched_bytes
        for view in (reader["2"].select(steps=slice(10, 30)), reader["1"].select(steps=[0, 7])):
            before, needed = reader.fetched_bytes, sum(one.stored_bytes for one in view)
            view.stack()
            assert needed <= reader.fetched_bytes - before <= 1.1 * needed
        again = reader.fetched_bytes
        reader["2"].select(steps=slice(10, 30)).stack()
        assert reader.fetched_bytes == again  # the copy has them
        assert reader.fetched_bytes == proxy.answered  # counted by the network too
        assert opened < reader.info.file_bytes / 10


def test_a_path_lib_path_of_a_url_is_the_url(bucket):
    with ActivationReader(Path(URL)) as reader:
        assert reader.path == URL


def test_functions_that_take_a_path_take_a_url(bucket, capture):
    assert compare_captures(str(capture), URL).agree
    with ActivationReader(capture) as local:
        expected = np.asarray(local.rows("1"))
    batches = [batch["1"] for batch in ActivationDataset(URL, "1", batch_size=100)]
    assert np.array_equal(torch.cat(batches).numpy(), expected)


def test_a_small_cache_is_enough(bucket, capture, monkeypatch, tmp_path):
    """Blocks of packets that were read go back to the disk, and come again when needed."""
    options = StorageOptions(cache_bytes=200_000)
    with ActivationReader(capture) as local, ActivationReader(URL, storage=options) as remote:
        (folder,) = (tmp_path / "cache").glob("*.partial")
        copy = folder / "run.stream"
        assert copy.stat().st_size == capture.stat().st_size
        for layer in ("1", "2", "1"):
            for ours, theirs in zip(remote[layer], local[layer], strict=True):
                assert torch.equal(ours.to_torch(), theirs.to_torch())
                assert copy.stat().st_blocks * 512 <= 300_000
            assert torch.equal(remote[layer].stack(), local[layer].stack())
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_an_index_the_stream_is_fetched_whole(bucket, capture):
    (bucket / "runs" / "run.stream.index").unlink()
    with pytest.warns(RuntimeWarning, match="no index tells"):
        with ActivationReader(URL) as remote, ActivationReader(capture) as local:
            assert len(remote) == len(local)
            assert remote.fetched_bytes >= local.info.file_bytes
            shape = local["2"][3].shape
            assert torch.equal(remote["2"][3].to_torch().view(shape), local["2"][3].to_torch())
    options = StorageOptions(cache_bytes=100_000)
    with pytest.raises(StorageError, match="STRAP_CACHE_BYTES"):
        ActivationReader(URL, storage=options)


def test_the_index_of_another_capture_is_not_used(bucket, capture, tmp_path):
    other = tmp_path / "other.stream"
    model = torch.nn.Linear(64, 64)
    with torch.no_grad(), capture_activations(model, other):
        model(torch.randn(3, 64))
    shutil.copy(f"{other}.index", bucket / "runs" / "run.stream.index")
    with ActivationReader(URL, warn=False) as remote:
        assert remote.problem.startswith("the index is ignored")
        assert remote.info.packets == 5 * STEPS


@pytest.mark.parametrize("fault", ["reset", "503", "truncated", "wrong"])
def test_a_network_that_fails_at_times_changes_nothing(proxy, capture, fault):
    """The first answer for each range is wrong."""
    seen = set()

    def first(request):
        new = bool(request.range) and request.range not in seen
        seen.add(request.range)
        return fault if new else ""

    proxy.fault = first
    options = StorageOptions(**OPTIONS)
    with ActivationReader(URL, storage=options) as remote, ActivationReader(capture) as local:
        assert torch.equal(remote["1"].stack(), local["1"].stack())
        for ours, theirs in zip(remote["2"], local["2"], strict=True):
            assert torch.equal(ours.to_torch(), theirs.to_torch())


def test_an_answer_that_takes_too_long_is_asked_for_again(proxy, capture):
    slow = iter([True, True])
    proxy.fault = lambda request: "slow" if request.range and next(slow, False) else ""
    options = StorageOptions(timeout_s=0.5, deadline_s=20.0)
    with ActivationReader(URL, storage=options) as remote, ActivationReader(capture) as local:
        assert torch.equal(remote["1"][0].to_torch(), local["1"][0].to_torch())


@pytest.mark.parametrize("fault", ["reset", "503", "truncated", "slow"])
def test_a_store_that_is_gone_is_an_error_in_bounded_time(proxy, fault):
    options = StorageOptions(timeout_s=0.3, deadline_s=1.0)
    with ActivationReader(URL, storage=options) as reader:
        proxy.fault = lambda request: fault
        with pytest.raises(StorageError, match=f"{URL}: .* for 1 s"):
            reader["3"][5].to_torch()
        proxy.fault = lambda request: ""
        reader["3"][5].to_torch()  # the reader stays of use


def test_bytes_that_are_wrong_each_time_are_an_error(proxy):
    with ActivationReader(URL, storage=StorageOptions(**OPTIONS)) as reader:
        proxy.fault = lambda request: "wrong" if request.range else ""
        with pytest.raises(StorageError, match="5 times, each time with other bytes"):
            reader["2"][7].to_torch()


def test_a_damaged_object_is_a_damaged_capture(bucket, capture):
    """The store has the wrong bytes, not the network: as for a local file."""
    with ActivationReader(capture) as local:
        place = local.index["offset"][20].as_py() + 100
    stream = bucket / "runs" / "run.stream"
    content = bytearray(stream.read_bytes())
    content[place] ^= 1
    stream.write_bytes(content)
    with ActivationReader(URL) as reader:
        row = reader.index.slice(20, 1).to_pylist()[0]
        with pytest.raises(CorruptError, match="checksum") as caught:
            reader[row["layer"]].at(step=row["step"]).to_torch()
    assert "cache" not in str(caught.value)


def test_a_replaced_object_is_noticed(bucket, capture):
    with ActivationReader(URL) as reader:
        stream = bucket / "runs" / "run.stream"
        content = bytearray(stream.read_bytes())
        content[-1] ^= 1
        stream.unlink()
        stream.write_bytes(content)
        import obstore
        from obstore.store import from_url

        store = from_url("s3://models", client_options={"allow_http": True})
        obstore.put(store, "runs/run.stream", bytes(content))
        with pytest.raises(ObjectChangedError, match=f"{URL}.*open the capture again"):
            reader["3"].stack()


def test_what_is_missing_is_named(bucket, monkeypatch):
    with pytest.raises(NotFoundError, match="s3://models/runs/other.stream: there is no such obj"):
        ActivationReader("s3://models/runs/other.stream")
    with pytest.raises(NotFoundError, match="there is no bucket s3://nothing"):
        ActivationReader("s3://nothing/run.stream")
    with pytest.raises(InvalidArgumentError, match="names no bucket"):
        ActivationReader("s3://")


def test_credentials_that_do_not_fit(bucket, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    with pytest.raises(CredentialsError, match=r"SignatureDoesNotMatch.*check the access") as found:
        ActivationReader(URL)
    assert "another-secret" not in str(found.value) and "AKID" not in str(found.value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(CredentialsError) as found:
        ActivationReader(URL)
    assert isinstance(found.value, PermissionError) and "nobody" not in str(found.value)


def test_credentials_that_expire(proxy):
    with ActivationReader(URL, storage=StorageOptions(**OPTIONS)) as reader:
        proxy.fault = lambda request: "expired"
        with pytest.raises(CredentialsError, match="ExpiredToken") as caught:
            reader["3"].stack()
    assert "secret-token" not in str(caught.value)


def test_a_reader_that_is_not_closed_leaves_no_copy(bucket, tmp_path):
    reader = ActivationReader(URL)
    reader["1"][0].to_torch()
    del reader
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_url_of_a_file_reads_the_file(capture):
    with ActivationReader(f"file://{capture}") as reader, ActivationReader(capture) as local:
        assert torch.equal(reader["1"].stack(), local["1"].stack())
        assert reader.rows("1").shape == local.rows("1").shape and reader.fetched_bytes == 0


def test_a_cache_folder_that_cannot_be_made_is_an_error(bucket, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StrapIOError, match="cannot make a folder in"):
        ActivationReader(URL, storage=StorageOptions(cache_folder=tmp_path / "file" / "cache"))


def test_the_copy_of_a_killed_process_is_removed(bucket, tmp_path):
    """Its lock is gone with it."""
    left = tmp_path / "cache" / "copy.0123456789abcdef.partial"
    left.mkdir(parents=True)
    (left / "run.stream").write_bytes(b"x")
    with ActivationReader(URL):
        assert not left.exists()


def test_a_closed_reader_says_so(bucket):
    reader = ActivationReader(URL)
    activation = reader["1"][0]
    reader.close()
    reader.close()
    with pytest.raises(InvalidStateError, match="closed"):
        activation.to_torch()
    assert len(reader) == 5 * STEPS


def test_many_threads_read_one_copy(bucket, capture):
    """Each row is right, although the copy has room for few."""
    options = StorageOptions(cache_bytes=400_000)
    with ActivationReader(capture) as local, ActivationReader(URL, storage=options) as remote:
        expected = [activation.to_torch() for activation in local]

        def reads(first: int) -> bool:
            places = range(first, len(expected), 3)
            return all(torch.equal(list(remote)[k].to_torch(), expected[k]) for k in places)

        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(reads, range(6)))


# ---- commands ----


@pytest.fixture
def strap(bucket, capfd):
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        return ended.value.code, *capfd.readouterr()

    return run


def test_commands_take_a_url(strap, capture, tmp_path):
    code, out, _ = strap("info", URL, "--json")
    assert code == 0 and json.loads(out)["path"] == URL and json.loads(out)["layers"] == 5
    assert strap("ls", URL)[1] == strap("ls", str(capture))[1]
    shown = [strap("show", path, "1", "--step", "3")[1] for path in (URL, str(capture))]
    assert shown[0] == shown[1]
    code, out, _ = strap("verify", URL)
    assert code == 0 and out.startswith(f"{URL}: {5 * STEPS} packets read")
    assert strap("compare", str(capture), URL)[0] == 0
    assert strap("report", URL)[0] == 2
    assert strap("report", URL, "--out", str(tmp_path / "report.html"))[0] == 0
    assert URL in (tmp_path / "report.html").read_text()


def test_strap_upload(strap, bucket, capture, monkeypatch):
    code, out, _ = strap("upload", str(capture), "s3://models/again/")
    assert code == 0 and out.startswith("s3://models/again/: 3 files sent")
    assert (bucket / "again" / "run.stream").read_bytes() == capture.read_bytes()
    code, out, _ = strap("upload", str(capture), "s3://models/again/", "--json")
    assert json.loads(out)["sent"] == []
    assert strap("upload", str(capture), "s3://nothing/")[0] == 5
    assert strap("upload", str(capture), "nowhere")[0] == 2
    assert strap("upload", str(capture), "s3://models/", "--rate", "0")[0] == 2
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    code, _, err = strap("upload", str(capture), "s3://models/again/")
    assert code == 3 and "the store refuses the credentials" in err


def test_strap_compares_a_store_that_refuses_with_no_secret(strap, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    code, _, err = strap("info", URL)
    assert code == 3 and err.count("\n") == 1 and "another" not in err


def test_a_shuffled_data_set_needs_a_folder(bucket, tmp_path):
    data = ActivationDataset(URL, "1", batch_size=100, shuffle="full", scratch=tmp_path / "rows")
    assert sum(len(batch["1"]) for batch in data) == STEPS * 4 * 32
    with pytest.raises(InvalidArgumentError, match="give scratch="):
        next(iter(ActivationDataset(URL, "1", batch_size=100, shuffle="full")))


# ---- run folders ----

RUN = "s3://models/long/"


@pytest.fixture(scope="module")
def long_run(tmp_path_factory) -> Path:
    """A capture of several segments."""
    folder = tmp_path_factory.mktemp("long") / "run"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 64), torch.nn.Linear(64, 256))
    config = InstrumentationConfig.max().with_segments(gb=0.001)
    until = time.monotonic() + 60
    with torch.no_grad(), capture_activations(model, f"{folder}/", config=config):
        while not (folder / "rank-00000.00003.stream").exists():
            assert time.monotonic() < until
            model(torch.randint(0, 50, (4, 32)))
    return folder


def test_a_run_folder_is_read_by_ranges(proxy, long_run):
    upload(long_run, RUN)
    before = proxy.answered
    with ActivationReader(long_run) as local, ActivationReader(RUN) as remote:
        assert remote.path == RUN and not remote.problem
        assert remote.run == local.run and remote.index.equals(local.index)
        opened = remote.fetched_bytes
        steps = slice(remote.steps[-1] // 2, None)  # in some segments
        view = remote["1"].select(steps=steps)
        needed = sum(one.stored_bytes for one in view)
        assert torch.equal(view.stack(), local["1"].select(steps=steps).stack())
        assert needed <= remote.fetched_bytes - opened <= 1.1 * needed
        for ours, theirs in zip(remote, local, strict=True):
            assert torch.equal(ours.to_torch(), theirs.to_torch())
        ours, theirs = remote.rows("1"), local.rows("1")
        assert ours.column("token_id").tolist() == theirs.column("token_id").tolist()
        assert remote.fetched_bytes <= proxy.answered - before

    def batches(path):
        return list(ActivationDataset(path, "1", batch_size=64, columns=["token_id"]))

    for one, other in zip(batches(RUN), batches(long_run), strict=True):
        assert torch.equal(one["1"], other["1"])
        assert torch.equal(one["token_id"], other["token_id"])


def test_a_run_that_is_uploaded_while_it_is_captured(bucket, tmp_path):
    run = tmp_path / "run"
    model = torch.nn.Linear(64, 256)
    config = InstrumentationConfig.max().with_segments(gb=0.001)
    with (
        torch.no_grad(),
        Uploader(run, RUN, delete_local=True, poll_s=0.05) as uploader,
        capture_activations(model, f"{run}/", config=config),
    ):
        steps, until = 0, time.monotonic() + 60
        while not (run / "rank-00000.00003.stream").exists() or not uploader.report.deleted:
            assert time.monotonic() < until, uploader.error
            torch.manual_seed(steps)
            model(torch.randn(64, 64))
            steps += 1
    assert sorted(file.name for file in run.iterdir()) == ["manifest.json", "rank-00000.json"]
    with ActivationReader(RUN) as reader, torch.no_grad():
        assert not reader.problem and reader.steps == tuple(range(steps))
        for activation in reader[""]:
            torch.manual_seed(activation.step)
            assert torch.equal(activation.to_torch(), model(torch.randn(64, 64)).half())


def test_what_is_wrong_with_a_run_folder_is_named(bucket, long_run):
    upload(long_run, RUN)
    there = bucket / "long"
    (there / "rank-00000.00001.stream").unlink()
    with pytest.warns(RuntimeWarning, match=r"there is no rank-00000\.00001\.stream"):
        ActivationReader(RUN).close()
    first, second = (there / f"rank-00000.0000{k}.stream" for k in (0, 2))
    for end in ("", ".index", ".calls", ".upload.json"):
        shutil.copy(f"{second}{end}", f"{first}{end}")
    with pytest.warns(RuntimeWarning, match="the record of its upload lists rank-00000.00002"):
        ActivationReader(RUN).close()
    Path(f"{first}.upload.json").unlink()
    with pytest.raises(RunFolderError, match=r"rank-00000\.00000\.stream is a shard of another"):
        ActivationReader(RUN)
    text = (there / "manifest.json").read_text()
    (there / "manifest.json").write_text(text[:100])
    with pytest.raises(RunFolderError, match=r"s3://models/long/manifest\.json is not usable"):
        ActivationReader(RUN)
    shutil.rmtree(there)
    with pytest.raises(NotFoundError, match="s3://models/long/"):
        ActivationReader(RUN)


def test_commands_take_the_url_of_a_run_folder(strap, bucket, long_run):
    upload(long_run, RUN)
    code, said, _ = strap("info", RUN)
    assert code == 0 and "segments" in said
    assert strap("verify", RUN)[0] == 0
    assert strap("ls", RUN)[1] == strap("ls", str(long_run))[1]


def test_credentials_that_expire_between_rank_files(proxy, bucket, long_run):
    upload(long_run, RUN)
    (bucket / "long" / "manifest.json").unlink()
    for name, of in (("rank-00000.json", 1), ("rank-00001.json", 2)):
        text = (long_run / "rank-00000.json").read_text()
        (bucket / "long" / "rank-00000.json").write_text(
            text.replace('"world_size": 1', f'"world_size": {of}')
        )
        proxy.fault = lambda request, name=name: "expired" if name in request.path else ""
        with pytest.raises(CredentialsError, match=name):
            ActivationReader(RUN)


def test_the_streams_of_a_run_share_the_cache(bucket, long_run, tmp_path):
    upload(long_run, RUN)
    options = StorageOptions(cache_folder=tmp_path / "small", cache_bytes=400_000)
    with ActivationReader(RUN, storage=options) as remote, ActivationReader(long_run) as local:
        for ours, theirs in zip(remote, local, strict=True):
            assert torch.equal(ours.to_torch(), theirs.to_torch())
        copies = sum(f.stat().st_blocks * 512 for f in tmp_path.glob("small/*/*.stream"))
        assert 0 < copies < 800_000 < remote.info.file_bytes


def test_an_uploader_waits_for_the_folder(bucket, long_run, tmp_path):
    run = tmp_path / "later"
    with Uploader(run, RUN, poll_s=0.01) as uploader:
        time.sleep(0.2)
        assert uploader.error is None
        shutil.copytree(long_run, run)
    assert "manifest.json" in uploader.report.sent


def test_a_refused_upload_is_not_repeated(proxy, capture):
    """A status of the store that says so ends it at once; 503 and the like are repeated."""
    parts = []

    def fault(request):
        upload = request.method in ("PUT", "POST") and "upload.json" not in request.path
        parts.append(request) if upload else None
        return "refused" if upload else ""

    proxy.fault = fault
    with pytest.raises(StorageError, match="status 405"):
        upload(capture, "s3://models/refused/")
    assert len(parts) == 1


def test_local_files_stay_if_the_store_has_no_etags(bucket, capture, monkeypatch):
    facts = Bucket.facts
    monkeypatch.setattr(Bucket, "facts", lambda *at: facts(*at)._replace(etag=None))
    put_parts = Bucket.put_parts
    monkeypatch.setattr(Bucket, "put_parts", lambda *how: put_parts(*how) and None)
    with pytest.raises(StorageError, match="has no ETag.*no local file is deleted"):
        upload(capture, "s3://models/etags/", delete_local=True)
    assert capture.exists() and (bucket / "etags" / "run.stream").exists()


def test_verifying_a_run_folder_looks_at_all_of_its_files(strap, bucket, long_run):
    upload(long_run, RUN)
    (calls, *_) = (bucket / "long").glob("*.stream.calls")
    content = bytearray(calls.read_bytes())
    content[-20] ^= 1
    calls.write_bytes(content)
    code, out, _ = strap("verify", RUN)
    assert code == 6 and f"{calls.name}: its SHA-256 is not that of the upload" in out


def test_files_of_a_whole_rank_are_uploaded(bucket, tmp_path):
    run = tmp_path / "run"
    framework = InstrumentationFramework(InstrumentationConfig.max().with_segments(gb=0.001))
    framework.instrument_model(model := torch.nn.Linear(64, 256))
    until = time.monotonic() + 60
    with (
        torch.no_grad(),
        framework.capture_activations(f"{run}/", track_per_token=True) as tracker,
    ):
        while not (run / "rank-00000.00001.stream").exists():
            assert time.monotonic() < until
            model(torch.randn(64, 64))
            tracker.record_token(1, "a")
    sent = upload(run, RUN).sent
    assert sent.index("rank-00000_tokens.json") < sent.index("rank-00000.json")
    there = {file.name for file in (bucket / "long").iterdir()}
    assert {file.name for file in run.iterdir()} <= there
