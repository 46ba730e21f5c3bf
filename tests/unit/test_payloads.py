"""The C library of zstd decodes the payloads of our encoder bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_instrumentation._native.payload import decode, encode

BLOCK = 128 << 10


def check(data: bytes) -> zstandard.FrameParameters:
    payload = encode(data, "zstd")
    parameters = zstandard.get_frame_parameters(payload)
    assert parameters.content_size == len(data)
    assert parameters.window_size <= max(len(data), 256 << 10)
    assert not parameters.has_checksum and parameters.dict_id == 0
    assert zstandard.ZstdDecompressor().decompress(payload) == data
    assert decode(payload, "zstd") == data
    return parameters


def float16(count: int, mantissa: int) -> bytes:
    words = np.random.default_rng(count).normal(size=count).astype(np.float16).view(np.uint16)
    return (words >> (10 - mantissa) << (10 - mantissa)).tobytes()


@pytest.mark.parametrize("size", [0, 1, 2, 255, 256, 1023, 1024, 65791, 65792])
def test_short_payloads(size):
    rng = np.random.default_rng(size)
    check(bytes(size))
    check(rng.bytes(size))
    check((rng.integers(0, 256, size) & rng.integers(0, 256, size)).astype(np.uint8).tobytes())


@pytest.mark.parametrize("blocks", [1, 2, 3, 33])
@pytest.mark.parametrize("beyond", [-2, -1, 0, 1, 2])
def test_payloads_around_whole_blocks(blocks, beyond):
    size = blocks * BLOCK + beyond
    for mantissa in (10, 5):
        check(float16(size // 2 + 1, mantissa)[:size])
    check(bytes(size))
    check(np.random.default_rng(size).bytes(size))


@pytest.mark.parametrize("values", [2, 128, 129, 255, 256])
def test_payloads_of_few_and_many_different_bytes(values):
    rng = np.random.default_rng(values)
    data = np.minimum(rng.integers(0, values, 50_000), rng.integers(0, values, 50_000))
    check(np.concatenate([data, np.arange(values)]).astype(np.uint8).tobytes())


def test_repeated_bytes_are_compressed():
    rows = np.frombuffer(float16(384, 10), np.uint8)
    ids = np.random.default_rng(0).integers(0, 30_000, 40_000)
    for data, least in ((np.tile(rows, 2000).tobytes(), 50), (ids.tobytes(), 3)):
        check(data)
        assert len(data) / len(encode(data, "zstd")) > least


def test_activations_come_near_the_entropy_of_their_bytes():
    for mantissa in (10, 7, 5):
        data = float16(1 << 20, mantissa)
        counts = np.bincount(np.frombuffer(data, np.uint8))
        shares = counts[counts > 0] / len(data)
        entropy = -(shares * np.log2(shares)).sum() / 8 * len(data)
        assert entropy < len(encode(data, "zstd")) < 1.02 * entropy


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(1, 2000), st.integers(0, 16))
def test_any_payload(data, repeats, zeros):
    data = data * repeats
    words = np.frombuffer(data[: len(data) // 2 * 2], np.uint16) >> zeros << zeros
    check(words.tobytes() + data[len(data) // 2 * 2 :])
