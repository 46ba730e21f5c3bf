"""The torch tracer beside other dispatch modes, in threads, with files and as a collector."""

from __future__ import annotations

import json
import os
import resource
import threading
import time
import warnings

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from llm_instrumentation.errors import InvalidArgumentError, InvalidStateError
from llm_instrumentation.mrm import TraceLabeller
from llm_instrumentation.mrm.collector import CollectorUnavailableError, TorchTracer
from llm_instrumentation.mrm.collector.torch.recorder import BLOCK_ROWS
from llm_instrumentation.mrm.collector.torch.trace import META_KEY
from llm_instrumentation.mrm.schema import ARROW_SCHEMA, KIND_KEY, Kind, kind_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_traces import OldCache, moves, rows_of, traced, whole

# ---- other users of dispatch, and threads --------------------------------------


def test_errors_pass_through_and_tracing_goes_on():
    x = torch.randn(2, 3)

    def work():
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            x @ x
        x.neg()

    assert set(traced(work).symbol) == {"aten::neg"}


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_other_dispatch_modes_see_the_same_operators():
    x, index = torch.randn(3, 3), torch.tensor([1])

    def work():
        torch.nn.functional.embedding(index, x).reshape(3).add_(1)

    with Counting() as alone:
        work()
    with Counting() as around, TorchTracer() as one, one.thread():
        work()
        inner_rows = len(rows_of(one))
    with TorchTracer() as one, one.thread():
        with Counting() as inside:
            work()
        assert len(rows_of(one)) == inner_rows > 0
    assert alone.seen == around.seen == inside.seen


def test_leaving_in_the_wrong_order_is_an_error():
    with TorchTracer() as one:
        attached = one.attach(nn.Linear(2, 2))
        with Counting():
            with pytest.raises(InvalidStateError, match="Counting was entered after the tracer"):
                attached.detach()
        attached.detach()


class Doubled(torch.Tensor):
    """A subclass whose memory is that of another tensor."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = [one.inner if isinstance(one, Doubled) else one for one in args]
        return Doubled(func(*plain, **(kwargs or {})))


def test_the_inner_tensors_of_subclasses_are_traced():
    x = torch.randn(4)
    kept = []
    frame = traced(lambda: kept.append(Doubled(x).neg()))
    assert moves(frame) == [whole("load", x), whole("store", kept[0].inner)]


def test_functional_transforms_are_traced_as_they_run():
    x, w = torch.randn(5, 3), torch.randn(3)
    kept = []
    frame = traced(lambda: kept.append(torch.vmap(torch.dot, (0, None))(x, w)))
    torch.testing.assert_close(kept[0], x @ w)
    assert whole("load", x) in moves(frame)


def test_fake_tensors_leave_no_rows():
    from torch._subclasses import FakeTensorMode

    def work():
        with FakeTensorMode():
            torch.randn(3) @ torch.randn(3)

    assert moves(traced(work)) == []


def test_sparse_parameters_leave_no_rows():
    parameter = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
    assert moves(traced(parameter.detach)) == []


def test_a_model_can_be_exported_meanwhile():
    """The tracer accepts the symbolic sizes of an export, which are no numbers."""
    layer, x = nn.Linear(4, 3), torch.randn(5, 4)
    with TorchTracer() as one, one.thread():
        exported = torch.export.export(
            layer, (x,), dynamic_shapes={"input": {0: torch.export.Dim("n", min=2, max=64)}}
        )
        assert torch.equal(exported.module()(x), layer(x))
        assert set(rows_of(one).symbol) >= {"aten::addmm"}


def test_backward_passes_are_traced():
    weight = torch.randn(3, requires_grad=True)
    with TorchTracer() as one:
        with one.thread():
            (weight * 2).sum().backward()
        frame = rows_of(one)
    assert weight.grad.tolist() == [2, 2, 2]
    assert whole("store", weight.grad) in moves(frame)


def test_other_threads_are_traced_only_if_they_ask():
    x = torch.randn(4)
    with TorchTracer() as one:

        def asks():
            with one.thread():
                x.neg()

        def asks_not():
            x.abs()

        with one.thread():
            for work in (asks, asks_not):
                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
            x.sin()
        frame = rows_of(one)
    assert set(frame.symbol) == {"aten::neg", "aten::sin"}
    assert frame.thread_id.nunique() == 2
    loads = frame[frame.op_type == "load"]
    assert loads.region_id.nunique() == 1, "both threads read the same region"


def test_many_threads_at_once():
    start = threading.Barrier(4)
    with TorchTracer() as one:

        def work():
            with one.thread():
                x = torch.randn(16)
                start.wait()
                for _ in range(BLOCK_ROWS):
                    x = x.neg()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        frame = rows_of(one)
    negations = frame[frame.symbol == "aten::neg"]
    assert len(negations) == 4 * 2 * BLOCK_ROWS
    stores = negations[negations.op_type == "store"]
    assert stores.region_id.is_unique
    for _, mine in negations.groupby("thread_id"):
        # Each step loads the tensor that the step before stored.
        made = mine[mine.op_type == "store"].region_id.to_numpy()
        read = mine[mine.op_type == "load"].region_id.to_numpy()
        assert (made[:-1] == read[1:]).all()


def test_detaching_in_another_thread_is_refused():
    with TorchTracer() as one:
        attached = one.attach(nn.Linear(2, 2))
        errors = []

        def detach():
            try:
                attached.detach()
            except InvalidStateError as error:
                errors.append(str(error))

        thread = threading.Thread(target=detach)
        thread.start()
        thread.join()
        assert "ends in that thread" in errors[0]


def test_sampling_traces_a_share_of_the_operators_with_the_same_labels():
    model = nn.Linear(8, 8, bias=False)
    x = torch.randn(1, 8)
    with TorchTracer(sample_every=10) as one, torch.no_grad():
        with one.load():
            for _ in range(50):
                model.weight.zero_()
        with one.attach(model):
            for _ in range(5000):
                model(x)
        frame = rows_of(one)
    assert len(frame[frame.phase == "weight_load"]) == 50, "the load is traced in full"
    sampled = frame[frame.phase == "generation"]
    assert 5000 / 10 * 0.8 < sampled.timestamp_ns.nunique() < 5000 / 10 * 1.2
    assert set(sampled[sampled.address == model.weight.data_ptr()].region_type) == {"weight"}
    assert len(sampled) == 3 * sampled.timestamp_ns.nunique(), "an operator is sampled whole"


# ---- files, and the collector --------------------------------------------------


def test_the_file_is_a_trace(tmp_path):
    path = tmp_path / "here" / "trace.parquet"
    model = nn.Linear(2, 2)
    with TorchTracer(path, run_id="a-run") as one, torch.no_grad():
        with one.attach(model):
            model(torch.randn(1, 2))
        before = one.reader().read_all()
    table = pq.read_table(path)
    assert [p.name for p in path.parent.iterdir()] == ["trace.parquet"]
    assert table.to_pandas().equals(before.to_pandas())
    assert before.schema.equals(ARROW_SCHEMA)
    schema = pq.read_schema(path)
    assert kind_of(schema) is Kind.ACCESSES
    assert schema.metadata[KIND_KEY] == b"accesses"
    assert set(before["run_id"].to_pylist()) == {"a-run"}
    about = json.loads(schema.metadata[META_KEY])
    assert about["sample_every"] == 1
    assert about["weight_storages"] == 2
    assert one.reader().read_all().equals(table.cast(before.schema))


def test_a_trace_without_rows_is_written_too(tmp_path):
    with TorchTracer(tmp_path / "t.parquet") as one, one.thread():
        pass
    assert pq.read_table(tmp_path / "t.parquet").num_rows == 0


def test_closing_twice_does_nothing_and_an_unused_tracer_has_no_trace():
    one = TorchTracer()
    one.close()
    with pytest.raises(InvalidStateError, match="has written no trace"):
        one.reader()
    with one.thread():
        torch.ones(1)
    one.close()
    one.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_every": 0}, "sample_every = 0"),
        ({"max_runs": 0}, "max_runs = 0"),
        ({"kv_regions": "page"}, "kv_regions = 'page'"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        TorchTracer(**options)


def test_the_model_goes_on_when_the_disk_is_full(tmp_path):
    x = torch.randn(4)
    one = TorchTracer(tmp_path / "t.parquet")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with one.thread(), torch.no_grad():
        for _ in range(BLOCK_ROWS):
            y = x.neg()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            for _ in range(BLOCK_ROWS):
                y = x.neg()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert y.tolist() == (-x).tolist()
    with pytest.raises(OSError, match="File too large"):
        one.close()
    assert 0 < pq.read_metadata(tmp_path / "t.parquet").num_rows < 4 * BLOCK_ROWS


def test_labels_learnt_while_the_disk_is_full_are_written(tmp_path):
    """A region that is found to be a weight while the disk is full is labelled in earlier rows."""
    model = nn.Linear(2, 2, bias=False)
    one = TorchTracer(tmp_path / "t.parquet")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with one.thread(), torch.no_grad():
        model.weight.data.neg()
        one.reader()  # writes the rows so far
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            with one.attach(model):
                for _ in range(BLOCK_ROWS):
                    model(torch.ones(1, 2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(OSError, match="File too large"):
        one.close()
    assert os.listdir(tmp_path) == ["t.parquet"]
    (first, *_) = pq.read_table(tmp_path / "t.parquet").to_pylist()
    assert (first["symbol"], first["region_type"]) == ("aten::neg", "weight")


def test_a_forked_child_adds_nothing(tmp_path):
    x = torch.randn(4)
    with TorchTracer(tmp_path / "t.parquet") as one:
        with one.thread():
            x.neg()
            with warnings.catch_warnings():
                # The test run has threads, so Python warns of fork.
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if child == 0:
                for _ in range(BLOCK_ROWS):
                    x.neg()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            x.neg()
        assert len(rows_of(one)) == 4


def test_as_a_collector_the_tracer_traces_from_start_to_stop(tmp_path):
    one = TorchTracer()
    one.start([os.getpid()], tmp_path / "raw")
    with torch.no_grad():
        model = nn.Linear(2, 2)
        one.attach(model)
        middle = time.monotonic_ns()
        model(torch.randn(1, 2))
    with pytest.raises(InvalidStateError, match="is running"):
        one.start([os.getpid()], tmp_path)
    meta = one.stop()
    torch.ones(3).neg()  # no longer traced

    boundaries = [
        {"phase": "weight_load", "start_ns": 0, "end_ns": middle},
        {"phase": "generation", "start_ns": middle, "end_ns": time.monotonic_ns()},
    ]
    frame = one.trace("the-run", boundaries).read_all().to_pandas()
    assert set(frame.run_id) == {"the-run"}
    assert (
        frame.phase == np.where(frame.timestamp_ns < middle, *("weight_load", "generation"))
    ).all()
    weights = frame[frame.region_type == "weight"]
    assert set(weights[weights.op_type == "store"].phase) == {"weight_load"}
    assert meta.output_file == str(tmp_path / "raw" / "torch_trace.parquet")
    assert meta.output_file_size_bytes == os.path.getsize(meta.output_file)
    assert (meta.collector_type, meta.used, meta.warnings) == ("torch", True, [])
    assert meta.extra["rows"] == len(frame)
    assert meta.extra["ns_per_operator_at_least"] > 0
    with pytest.raises(InvalidStateError, match="not running"):
        one.stop()


def test_with_trace_load_off_each_weight_gets_one_store(tmp_path):
    model = nn.Linear(2, 2)
    one = TorchTracer(trace_load=False)
    one.start([os.getpid()], tmp_path)
    torch.ones(3).neg()  # before the model is attached: not traced
    one.attach(model)
    one.stop()
    frame = one.trace("a").read_all().to_pandas()
    assert list(frame.symbol) == ["weight_load"] * 2


def test_the_collector_can_be_started_again(tmp_path):
    one = TorchTracer()
    for run in ("first", "second"):
        one.start([os.getpid()], tmp_path / run)
        torch.ones(3).neg()
        one.stop()
        assert len(one.trace(run).read_all()) == 3


def test_other_processes_are_refused(tmp_path):
    with pytest.raises(CollectorUnavailableError, match="traces models in its own process"):
        TorchTracer().start([1], tmp_path)


def test_the_labeller_keeps_the_labels_of_the_tracer():
    model = OldCache()
    with TorchTracer() as one, torch.no_grad():
        with one.attach(model):
            model(torch.ones(1, 5))
        table = one.reader().read_all()
    labelled = TraceLabeller().label_table(table).read_all().to_pandas()
    for column in ("region_type", "region_id"):
        assert list(labelled[column]) == list(table[column].to_pylist())
