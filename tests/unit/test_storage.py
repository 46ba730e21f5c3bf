"""URLs, options and holes of object storage, without a store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from llm_instrumentation import ActivationReader
from llm_instrumentation.errors import InvalidArgumentError, InvalidStateError, UnsupportedError
from llm_instrumentation.storage import StorageOptions, _record, upload, url_of
from llm_instrumentation.storage._holes import punch_hole
from llm_instrumentation.storage._pace import Pace
from llm_instrumentation.storage._urls import location_of


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("s3://bucket/run.stream", "s3://bucket/run.stream"),
        (Path("s3://bucket/a/run.stream"), "s3://bucket/a/run.stream"),
        (Path("gs://bucket/run.stream"), "gs://bucket/run.stream"),
        ("az://container/", "az://container/"),
        ("file:///data/run.stream", "file:///data/run.stream"),
        (Path("file:///data/run.stream"), "file:///data/run.stream"),
        ("run.stream", None),
        ("/data/s3://bucket/run.stream", None),
        ("http://host/run.stream", None),
        ("s3", None),
    ],
)
def test_a_path_is_a_url_or_not(path, url):
    assert url_of(path) == url


def test_places_beside_and_inside():
    stream = location_of("s3://bucket/runs/run.stream")
    assert stream.url == "s3://bucket/runs/run.stream"
    assert stream.beside("x.json").url == "s3://bucket/runs/x.json"
    assert location_of("s3://bucket/runs/").inside("x").url == "s3://bucket/runs/x"
    assert location_of("s3://bucket").inside("x").url == "s3://bucket/x"
    assert location_of("file:///data/runs").inside("x").url == "file:///data/runs/x"


def test_credentials_in_a_url_are_refused_and_not_repeated():
    with pytest.raises(InvalidArgumentError, match="has credentials in it") as error:
        location_of("s3://AKID:very-secret@bucket/run.stream")
    assert "secret" not in str(error.value).replace("AWS_SECRET_ACCESS_KEY", "")
    assert location_of("s3://bucket/a@b.stream").key == "a@b.stream"


def test_options_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("STRAP_CACHE_FOLDER", str(tmp_path))
    monkeypatch.setenv("STRAP_CACHE_BYTES", "5000")
    options = StorageOptions(store={"secret_access_key": "hidden"})
    assert options.cache_folder == tmp_path and options.cache_bytes == 5000
    assert "hidden" not in repr(options)
    monkeypatch.setenv("STRAP_CACHE_BYTES", "5 GB")
    with pytest.raises(InvalidArgumentError, match="'5 GB' is no number of bytes"):
        StorageOptions()
    monkeypatch.delenv("STRAP_CACHE_BYTES")
    with pytest.raises(InvalidArgumentError, match="connections = 0 must be above 0"):
        StorageOptions(connections=0)


def test_what_needs_a_path_says_so(tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"s3://b/run.stream is no path .* download it"):
        ActivationReader.salvage("s3://b/run.stream")
    with pytest.raises(InvalidArgumentError, match="begins with s3://"):
        upload(tmp_path / "run.stream", "bucket/run")


def test_holes_are_zeros_without_blocks(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"x" * 100_000)
    descriptor = os.open(file, os.O_RDWR)
    try:
        os.fsync(descriptor)
        before = file.stat().st_blocks
        punch_hole(descriptor, 100, 90_000, str(file))
    finally:
        os.close(descriptor)
    assert file.read_bytes() == b"x" * 100 + bytes(90_000) + b"x" * 9_900
    assert file.stat().st_blocks < before


def test_a_stopped_pace_raises():
    pace = Pace(1.0)
    pace.wait_for(1000)
    pace.stop()
    with pytest.raises(InvalidStateError, match="run it again"):
        pace.wait_for(1)


def test_the_record_of_a_later_version():
    content = b'{"upload_version": 2, "files": {}, "complete": true}'
    with pytest.raises(UnsupportedError, match="has version 2, this version reads 1"):
        _record.parse(content, "s3://b/run.stream.upload.json")
