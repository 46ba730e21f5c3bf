from __future__ import annotations

import errno
import os
import threading

import pytest
from llm_instrumentation.memory.async_writer import AsyncWriteError, AsyncWriter


def test_bytes_are_written_in_order(tmp_path):
    path = tmp_path / "out.bin"
    with AsyncWriter(path) as writer:
        for i in range(2000):
            writer.write(b"%d," % i)
        writer.write(bytearray(b"end"))
        writer.write(memoryview(b"..!")[2:])
        writer.write(b"")
    assert path.read_bytes() == b"".join(b"%d," % i for i in range(2000)) + b"end!"


def test_a_buffer_may_be_reused_at_once(tmp_path):
    with AsyncWriter(tmp_path / "out") as writer:
        buffer = bytearray(b"first")
        writer.write(buffer)
        buffer[:] = b"other"
    assert (tmp_path / "out").read_bytes() == b"first"


def test_a_file_is_emptied_or_appended_to(tmp_path):
    path = tmp_path / "out"
    for text, append in [(b"old", False), (b"a", False), (b"b", True)]:
        with AsyncWriter(path, append=append) as writer:
            writer.write(text)
    assert path.read_bytes() == b"ab"


def test_flush_waits_until_the_bytes_are_in_the_file(tmp_path):
    with AsyncWriter(tmp_path / "out") as writer:
        writer.write(bytes(1 << 20))
        writer.flush(timeout=30)
        assert os.path.getsize(tmp_path / "out") == writer.bytes_written == 1 << 20


@pytest.fixture
def pipe(tmp_path):
    """A named pipe that the test has not read from yet, and its reading end."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield path, reader
    os.close(reader)


def drain(reader, nbytes):
    os.set_blocking(reader, True)
    while nbytes:
        nbytes -= len(os.read(reader, min(nbytes, 1 << 16)))


def test_writers_wait_while_the_queue_is_full(pipe):
    path, reader = pipe
    chunk = bytes(1 << 20)  # more than a pipe holds, so the writing thread blocks
    writer = AsyncWriter(path, max_bytes=1 << 20)
    writer.write(chunk)
    with pytest.raises(TimeoutError, match="still queued"):
        writer.write(chunk, timeout=0.05)
    with pytest.raises(TimeoutError, match="still queued"):
        writer.flush(timeout=0.05)
    with pytest.raises(TimeoutError, match="not all written"):
        writer.close(timeout=0.05)
    drain(reader, 1 << 20)
    writer.close(timeout=30)
    assert writer.bytes_written == 1 << 20


def test_data_larger_than_the_queue_is_taken_when_it_is_empty(tmp_path):
    with AsyncWriter(tmp_path / "out", max_bytes=10) as writer:
        writer.write(b"x" * 8)
        writer.write(b"y" * 1000)
        writer.write(b"z" * 8)
    assert (tmp_path / "out").read_bytes() == b"x" * 8 + b"y" * 1000 + b"z" * 8


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_failure_reaches_every_caller():
    writer = AsyncWriter("/dev/full")
    writer.write(b"data")
    with pytest.raises(AsyncWriteError) as caught:
        writer.flush(timeout=30)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == "/dev/full"
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(AsyncWriteError, match="No space left"):
        writer.write(b"more")
    with pytest.raises(AsyncWriteError, match="No space left"):
        writer.close()
    writer.close()  # does not raise: the failure was already raised once


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_leaving_the_block_raises_a_failure():
    with pytest.raises(AsyncWriteError), AsyncWriter("/dev/full") as writer:
        writer.write(b"data")


def test_a_failure_wakes_a_writer_that_waits(pipe):
    path, reader = pipe
    writer = AsyncWriter(path, max_bytes=1 << 20)
    writer.write(bytes(1 << 20))
    raised = []

    def write():
        try:
            writer.write(bytes(1 << 20), timeout=30)
        except AsyncWriteError as error:
            raised.append(error.errno)

    waiting = threading.Thread(target=write)
    waiting.start()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, reader)  # closes the reading end, so the write fails with EPIPE
    os.close(null)
    waiting.join(30)
    assert raised == [errno.EPIPE]
    with pytest.raises(AsyncWriteError):
        writer.close()


def test_a_closed_writer_refuses_more(tmp_path):
    writer = AsyncWriter(tmp_path / "out")
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="is closed"):
        writer.write(b"x")
    with pytest.raises(ValueError, match="is closed"):
        writer.flush()


def test_arguments_are_checked(tmp_path):
    with pytest.raises(ValueError, match="max_bytes must be positive, not 0"):
        AsyncWriter(tmp_path / "out", max_bytes=0)
    with pytest.raises(FileNotFoundError):
        AsyncWriter(tmp_path / "missing" / "out")


def test_no_thread_and_no_descriptor_is_left(tmp_path):
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with AsyncWriter(tmp_path / "out") as writer:
            writer.write(b"x")
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not [t for t in threading.enumerate() if t.name == "llm-instrumentation-writer"]
