"""After kill -9 of a traced model at any moment, its trace up to the kill can be recovered."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
import warnings
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from llm_instrumentation._files import created_beside
from llm_instrumentation.errors import (
    CorruptError,
    InvalidArgumentError,
    InvalidStateError,
    NotFoundError,
)
from llm_instrumentation.mrm import TorchTracer, recover_torch_trace
from llm_instrumentation.mrm.collector.torch.recover import read_spool
from llm_instrumentation.mrm.collector.torch.spool import ROW, SPOOL, Spool
from llm_instrumentation.mrm.collector.torch.trace import META_KEY, trace_of
from torch import nn

# The columns that are equal in two runs of one model. Times, addresses and threads differ.
SAME = [
    "sample_id", "phase", "op_type", "symbol", "dso", "region_type", "region_id", "token_index",
    "context_tokens", "length_bytes",
]  # fmt: skip
PROMPT, TOKENS = 5, 400
LONGEST = 256  # bytes of a row, and of the longest mark of this model, are fewer


class Teller:
    """A streamer that tells the number of each token."""

    def __init__(self, tell):
        self.tell, self.tokens = tell, -1

    def put(self, ids):  # the prompt comes first
        if self.tokens >= 0:
            self.tell(self.tokens)
        self.tokens += 1

    def end(self):
        pass


def generate(tell, path):
    """Traces a Llama with random weights, from its construction to the end of a generation."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with TorchTracer(path, run_id="a-run") as tracer:
        with tracer.load():
            model = LlamaForCausalLM(config).eval()
        with tracer.attach(model):
            model.generate(
                torch.arange(PROMPT)[None], max_new_tokens=TOKENS, min_new_tokens=TOKENS,
                do_sample=False, streamer=Teller(tell),
            )  # fmt: skip


def test_a_killed_generation_is_traced_up_to_the_kill(tmp_path, start, long):
    whole = start(generate, tmp_path / "whole.parquet")
    assert whole.all_told() == list(range(TOKENS))
    assert whole.join() == 0
    whole = pd.read_parquet(tmp_path / "whole.parquet")

    chance = random.Random(0)
    for run in range(30 if long else 3):
        path = tmp_path / f"{run}.parquet"
        child = start(generate, path)
        told = child.told()
        time.sleep(chance.uniform(0, 0.3))
        child.signal(signal.SIGKILL)
        told = [told, *child.all_told()][-1]
        assert child.join() == -signal.SIGKILL
        assert not path.exists()

        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            rows = recover_torch_trace(path)
        # A kill ends a write at a page, so the last record may be cut. Nothing else may be wrong.
        cut = r"ended within a record: its last (\d+) bytes are not in the trace"
        lost = [re.search(cut, str(warning.message)) for warning in warned]
        assert len(lost) <= 1 and all(lost), [str(warning.message) for warning in warned]
        assert all(int(found[1]) < LONGEST for found in lost), "rows are whole up to the cut"
        killed = pd.read_parquet(path)
        assert rows == len(killed) < len(whole)
        assert set(killed.run_id) == {"a-run"}
        last = killed.token_index.max()
        assert told <= last, "a call that had ended is in the trace"
        # A call that had not ended may have stored to its cache before the tracer knew the cache.
        ended = killed.token_index.fillna(-1) < max(last, told + 1)
        expected = whole[SAME][: len(killed)]
        pd.testing.assert_frame_equal(killed[SAME][ended], expected[ended])
        others = [name for name in SAME if name != "region_type"]
        pd.testing.assert_frame_equal(killed[others], expected[others])
        assert set(killed[ended].region_type) == {"weight", "kv_cache", "activation", "runtime"}
        assert json.loads(pq.read_schema(path).metadata[META_KEY])["sample_every"] == 1
        assert not created_beside(path, SPOOL)


# ---- torn files -------------------------------------------------------------------


class Cached(nn.Module):
    """A model that returns its cache as a pair of tensors for each layer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, input_ids, past_key_values=None):
        new = (input_ids[..., None] * self.weight)[:, None]
        if past_key_values is not None:
            new = torch.cat([past_key_values[0][0], new], dim=2)
        return new.sum(), ((new, new * 2),)


def trace(tracer, calls=3):
    """Traces some calls of a model. Each call gets the cache of the last one."""
    model, cache = Cached(), None
    with tracer.attach(model), torch.no_grad():
        for _ in range(calls):
            _, cache = model(torch.ones(1, 2), past_key_values=cache)


def left(path, **options) -> Path:
    """Leaves a spool beside a path, as a killed process does, and returns the spool's path."""
    tracer = TorchTracer(path, **options)
    trace(tracer)
    (spool,) = created_beside(path, SPOOL)
    copy = spool.read_bytes()
    tracer.close()
    path.unlink()
    spool.write_bytes(copy)
    return spool


def test_a_spool_that_is_cut_anywhere_is_a_trace_up_to_there(tmp_path):
    spool = left(tmp_path / "trace.parquet")
    content = spool.read_bytes()
    whole = read_spool(spool, "a", None).read_all().to_pylist()
    assert {row["region_type"] for row in whole} == {"weight", "kv_cache", "activation"}
    assert {row["context_tokens"] for row in whole} == {None, 2, 4, 6}

    lengths, of_cache = [], 0
    for cut in range(content.index(b"}") + 1, len(content) + 1):
        spool.write_bytes(content[:cut])
        part = read_spool(spool, "a", None).read_all().to_pylist()
        known = [
            {**row, "region_type": "activation", "region_id": found["region_id"]}
            if found["region_type"] != row["region_type"] == "kv_cache"
            else row
            for row, found in zip(whole, part, strict=False)
        ]
        assert part == known, "only rows of an unknown cache may differ"
        assert of_cache <= (of_cache := [row["region_type"] for row in part].count("kv_cache"))
        lengths.append(len(part))
    assert part == whole
    assert lengths == sorted(lengths)
    assert set(lengths) == set(range(len(whole) + 1)), "each row comes by itself"


def test_names_that_the_file_does_not_say_are_none(tmp_path):
    """A spool names a device and an operator before their rows. Without that, the name is None."""
    spool = Spool(tmp_path / "trace.parquet", symbols={0: "aten::mm"}, devices={1: "cuda:0"})
    block = b"".join(
        ROW.pack(1, 4096, 8, 2 << 9 | device, 2 * operator)
        for device, operator in [(0, 0), (1, 0), (2, 1)]
    )
    spool.write(memoryview(block), 7)
    found = trace_of(spool.contents(), "a").read_all().to_pylist()
    spool.close()
    assert [(row["dso"], row["symbol"]) for row in found] == [
        ("torch", "aten::mm"), ("torch:cuda:0", "aten::mm"), (None, None),
    ]  # fmt: skip


def test_a_forked_child_does_not_remove_what_its_parent_writes(tmp_path):
    spool = Spool(tmp_path / "trace.parquet")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of the test run
        child = os.fork()
    if child == 0:
        spool.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert spool.path.exists()
    spool.close()
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "end",
    [b"\0" * 100, b"\xff" * 100, b"\5\0\0\0\2\0\0\0" + b"{" * 90],
    ids=["zeros", "ones", "no JSON"],
)
def test_a_damaged_end_is_left_out_with_a_warning(tmp_path, end):
    """A power failure may leave zeros or old data at the end of a file."""
    path = tmp_path / "trace.parquet"
    spool = left(path)
    expected = read_spool(spool, "trace", None).read_all()
    with spool.open("ab") as file:
        file.write(end)
    with pytest.warns(RuntimeWarning, match=f"its last {len(end)} bytes are not in the trace"):
        assert recover_torch_trace(path) == len(expected)
    assert pq.read_table(path).to_pandas().equals(expected.to_pandas())


# ---- leftovers --------------------------------------------------------------------


def test_a_new_trace_warns_of_one_that_was_not_closed_and_leaves_it(tmp_path):
    path = tmp_path / "trace.parquet"
    spool = left(path, kv_regions="layer")
    before = spool.read_bytes()
    with pytest.warns(RuntimeWarning, match=rf"{spool} has the rows .*recover_torch_trace\("):
        with TorchTracer(path) as tracer:
            trace(tracer, calls=1)
    assert spool.read_bytes() == before
    newer = path.read_bytes()

    with pytest.raises(FileExistsError, match="give the trace of .* another path, out"):
        recover_torch_trace(path)
    assert path.read_bytes() == newer and spool.exists()
    rows = recover_torch_trace(spool, tmp_path / "first.parquet")
    first = pd.read_parquet(tmp_path / "first.parquet")
    assert len(first) == rows > 0
    assert first[first.region_type == "kv_cache"].region_id.nunique() == 2
    assert sorted(os.listdir(tmp_path)) == ["first.parquet", "trace.parquet"]


def forget(tell, path):
    """A process that ends without closing its tracer."""
    warnings.simplefilter("ignore")
    tracer = TorchTracer(path)
    trace(tracer)


def test_a_tracer_that_is_forgotten_leaves_its_rows(tmp_path, start):
    path = tmp_path / "trace.parquet"
    assert start(forget, path).join() == 0
    assert recover_torch_trace(path) > 0


def test_several_traces_that_were_not_closed_have_to_be_named(tmp_path, start):
    path = tmp_path / "trace.parquet"
    for _ in range(2):
        assert start(forget, path).join() == 0
    first, second = created_beside(path, SPOOL)
    with pytest.raises(InvalidArgumentError, match="several .*give one of") as caught:
        recover_torch_trace(path)
    assert str(first) in str(caught.value) and str(second) in str(caught.value)
    assert recover_torch_trace(second) == recover_torch_trace(first, tmp_path / "other.parquet")
    assert sorted(os.listdir(tmp_path)) == ["other.parquet", "trace.parquet"]


def test_a_trace_that_is_being_made_is_left_alone(tmp_path):
    path = tmp_path / "trace.parquet"
    with TorchTracer(path) as tracer:
        trace(tracer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            TorchTracer(path).attach(nn.Linear(2, 2)).detach()
        with pytest.raises(InvalidStateError, match="is being written"):
            recover_torch_trace(created_beside(path, SPOOL)[0])
    assert len(pd.read_parquet(path)) > 0


def test_other_files_than_spools_are_refused(tmp_path):
    with pytest.raises(NotFoundError, match="no trace that was not closed"):
        recover_torch_trace(tmp_path / "nowhere" / "trace.parquet")
    with pytest.raises(NotFoundError, match="no trace that was not closed"):
        recover_torch_trace(tmp_path / f"gone{SPOOL}")
    for content in (b"", b"mrmspl0\n" + bytes(100)):
        foreign = tmp_path / f"foreign.parquet{SPOOL}"
        foreign.write_bytes(content)
        with pytest.raises(CorruptError, match="foreign.*begins with"):
            recover_torch_trace(foreign)
        assert foreign.exists()


def test_a_trace_that_cannot_be_written_leaves_the_spool(tmp_path):
    path = tmp_path / "trace.parquet"
    spool = left(path)
    with pytest.raises(OSError, match="no folder"):
        recover_torch_trace(spool, tmp_path / "no folder" / "trace.parquet")
    assert recover_torch_trace(path) > 0
