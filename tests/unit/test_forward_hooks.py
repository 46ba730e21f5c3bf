"""The hook in C and its twin in Python capture the same."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llm_instrumentation import ActivationReader, InstrumentationConfig, InstrumentationFramework
from llm_instrumentation._native import view_function
from llm_instrumentation.core.recording import opened as opening
from llm_instrumentation.core.recording import recorder
from llm_instrumentation.errors import CaptureError, StrapError, UnsupportedError
from torch import Tensor, nn

pytestmark = pytest.mark.skipif(
    not view_function(Tensor),
    reason="this torch or interpreter has no hooks in C",
)


class Returns(nn.Module):
    """Returns its argument."""

    def forward(self, value):
        return value


class Outer(nn.Module):
    """Calls its inner modules in turn, one for each value."""

    def __init__(self, inner=2):
        super().__init__()
        self.inner = nn.ModuleList(Returns() for _ in range(inner))

    def forward(self, values):
        for i, value in enumerate(values):
            self.inner[i % len(self.inner)](value)


class Marked(Tensor):
    """A subclass of Tensor without changes."""


def capture(path, model, run, config=None, in_c=True):
    """The packets that `run(model)` left in a capture, each as a tuple.

    A tuple has layer, step, token, call, source dtype, shape and values.
    """
    config = config or InstrumentationConfig.fast_capture()
    framework = InstrumentationFramework(config)
    framework.instrument_model(model)
    with pytest.MonkeyPatch.context() as patch:
        if not in_c:
            patch.setattr(opening, "view_function", lambda _: 0)
        with framework.capture_activations(path):
            hooks = [h.func for m in model.modules() for h in m._forward_hooks.values()]
            assert in_c == any(type(h).__name__ == "builtin_function_or_method" for h in hooks)
            run(model)
    with ActivationReader(path) as reader:
        return [
            (a.layer, a.step, a.token, a.call, a.source_dtype, a.shape, a.to_torch())
            for a in reader
        ]


def assert_same(one, other):
    assert [about for *about, _ in one] == [about for *about, _ in other]
    for (*about, a), (*_, b) in zip(one, other, strict=True):
        assert a.dtype == b.dtype, about
        assert bytes_of(a) == bytes_of(b), about


def bytes_of(tensor):
    return bytes(tensor.reshape(-1).contiguous().view(torch.uint8).numpy())


X = torch.arange(24.0).reshape(4, 6) - 7
COMPLEX = torch.complex(X, X + 1)
OUTPUTS = {
    "contiguous": X,
    "transposed": X.t(),
    "a slice": X[1:, 2:],
    "a row": X[:1],
    "expanded": X[:1].expand(5, 6),
    "a scalar": X[2, 2],
    "empty": X[:0],
    "a parameter": nn.Parameter(X.clone()),
    "with a gradient": X.clone().requires_grad_() * 2,
    "negated as it is read": COMPLEX.conj().imag,
    "one of them": COMPLEX.conj().imag[1, 2],
    "complex": COMPLEX,
    "conjugated": COMPLEX.conj(),
    "zeros without memory": torch._efficientzerotensor((3,)),
    "a subclass": X.as_subclass(Marked),
    "beside None": (X, None),
    "a list beside None": [X, None],
    "a tensor beside a tensor": (X, X + 1),
    "a mapping": {"logits": X, "other": X[0]},
    "None": None,
    "a number": 3,
    "overflowing": X * 1e30,
    **{
        str(dtype): (X + 7).to(dtype)
        for dtype in (
            torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32,
            torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn,
        )
    },
}  # fmt: skip
if hasattr(torch, "uint16"):
    OUTPUTS[str(torch.uint16)] = (X + 7).to(torch.uint16)
if hasattr(torch, "uint4"):
    OUTPUTS["of four bits"] = torch.zeros(3, dtype=torch.uint8).view(torch.uint4)
if hasattr(torch, "int2"):
    OUTPUTS["of two bits"] = torch.zeros(3, dtype=torch.int8).view(torch.int2)


@pytest.mark.parametrize("name", OUTPUTS)
def test_each_kind_of_output(tmp_path, name):
    """Both hooks make the same packets of each kind of output."""

    def run(model):
        model([OUTPUTS[name], X])

    ours = capture(tmp_path / "c.stream", Outer(), run)
    theirs = capture(tmp_path / "python.stream", Outer(), run, in_c=False)
    assert len(ours) > 0
    assert_same(ours, theirs)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    calls=st.lists(st.lists(st.sampled_from(sorted(OUTPUTS)), max_size=6), min_size=1, max_size=4),
    inner=st.integers(1, 3),
)
def test_any_order_of_outputs_and_steps(tmp_path, calls, inner):
    """Both hooks make the same packets of any sequence of calls."""

    def run(model):
        model([X])
        for names in calls:
            model([OUTPUTS[name] for name in names])
            model.inner[0](X[0])  # a part of the model, called on its own

    ours = capture(tmp_path / "c.stream", Outer(inner), run)
    theirs = capture(tmp_path / "python.stream", Outer(inner), run, in_c=False)
    assert_same(ours, theirs)


def test_small_tensors_have_the_time_and_thread_of_their_module(tmp_path):
    """The index has the time and thread of each call, although the packets are made later."""

    class Slow(nn.Module):
        def forward(self, value):
            time.sleep(0.05)
            return value

    model = nn.Sequential(*(Slow() for _ in range(6)))
    config = InstrumentationConfig.fast_capture()
    framework = InstrumentationFramework(config)
    framework.instrument_model(model)
    ids = []

    def work():
        ids.append(threading.get_native_id())
        model(torch.ones(3))

    with framework.capture_activations(tmp_path / "a.stream"):
        for _ in range(2):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    with ActivationReader(tmp_path / "a.stream") as reader:
        index = reader.index.to_pydict()
    inner = [i for i, layer in enumerate(index["layer"]) if layer]
    assert [index["thread"][i] for i in inner] == [ids[0]] * 6 + [ids[1]] * 6
    times = [index["time_ns"][i] for i in inner]
    for before, after in itertools.pairwise(times):
        assert after - before >= 50_000_000


def test_threads_count_their_own_calls(tmp_path):
    start = threading.Barrier(4)

    def run(model):
        def work(n):
            start.wait()
            for _ in range(20):
                model([torch.full((3,), float(n))] * 4)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    model = Outer(2)
    steps = {}
    for layer, step, _, call, _, _, values in capture(tmp_path / "a.stream", model, run):
        steps.setdefault(step, []).append((layer, call, float(values[0])))
    assert sorted(steps) == list(range(80))
    for packets in steps.values():
        assert [p[:2] for p in packets] == [
            ("inner.0", 0), ("inner.1", 0), ("inner.0", 1), ("inner.1", 1),
        ]  # fmt: skip
        assert len({value for *_, value in packets}) == 1


@pytest.mark.parametrize("many", [2, 6])
def test_captures_beside_each_other(tmp_path, many):
    """A thread has places in C for a few captures; further captures run in Python."""
    model = Outer(2)
    config = InstrumentationConfig.fast_capture()
    frameworks = [InstrumentationFramework(config) for _ in range(many)]
    paths = [tmp_path / f"{n}.stream" for n in range(many)]
    open_ones = []
    for framework, path in zip(frameworks, paths, strict=True):
        framework.instrument_model(model)
        block = framework.capture_activations(path)
        block.__enter__()
        open_ones.append(block)
        model([X, X, X])
    for block in reversed(open_ones):
        block.__exit__(None, None, None)
    for n, path in enumerate(paths):
        with ActivationReader(path) as reader:
            found = [(a.layer, a.step, a.call) for a in reader]
        assert found == [
            (layer, step, call)
            for step in range(many - n)
            for layer, call in (("inner.0", 0), ("inner.1", 0), ("inner.0", 1))
        ]


MANY = [torch.full((n % 700 + 1,), float(n)) for n in range(400)]
LARGE = torch.arange(9_000.0)


def test_small_and_large_outputs_stay_in_their_order(tmp_path):
    def run(model):
        model([*MANY, LARGE, X, X.t(), *MANY, [X, X], X])

    ours = capture(tmp_path / "c.stream", Outer(3), run)
    theirs = capture(tmp_path / "python.stream", Outer(3), run, in_c=False)
    assert_same(ours, theirs)


def test_changing_a_small_output_later_does_not_change_its_packet(tmp_path):
    class Changes(Outer):
        def forward(self, values):
            for value in values:
                self.inner[0](value).add_(1)

    value = torch.zeros(3)
    stored = capture(tmp_path / "a.stream", Changes(1), lambda model: model([value] * 5))
    assert [float(tensor[0]) for *_, tensor in stored] == [0, 1, 2, 3, 4]


def captured(path):
    with ActivationReader(path) as reader:
        return [float(a.to_torch().reshape(-1)[0]) for a in reader]


def opened(model, path):
    framework = InstrumentationFramework(InstrumentationConfig.fast_capture())
    framework.instrument_model(model)
    return framework, framework.capture_activations(path)


def test_a_checkpoint_covers_unfinished_steps_of_other_threads(tmp_path):
    path = tmp_path / "a.stream"
    inside, go_on = threading.Event(), threading.Event()

    class Waits(Outer):
        def forward(self, values):
            super().forward(values)
            inside.set()
            assert go_on.wait(60)

    model = Waits(1)
    framework, block = opened(model, path)
    with block:
        thread = threading.Thread(target=model, args=(MANY[:3],))
        thread.start()
        assert inside.wait(60)
        framework._recorders[-1].checkpoint()
        so_far = captured(path)
        go_on.set()
        thread.join()
    assert so_far == captured(path) == [0, 1, 2]


def test_a_checkpoint_from_within_a_step_covers_it(tmp_path):
    path = tmp_path / "a.stream"
    model = Outer(2)
    framework, block = opened(model, path)
    seen = []

    def checkpoint(*_):
        framework._recorders[-1].checkpoint()
        seen.append(captured(path))

    with block:
        model.inner[1].register_forward_hook(checkpoint)  # runs after the hook of the capture
        model(MANY[:4])
    assert seen == [[0, 1], [0, 1, 2, 3]]


@pytest.mark.parametrize("cause", [ValueError, KeyboardInterrupt, SystemExit])
def test_outputs_before_an_exception_are_captured(tmp_path, cause):
    class Breaks(Outer):
        def forward(self, values):
            super().forward(values)
            raise cause

    def run(model):
        def work():
            with pytest.raises(cause):
                model(MANY[:3])

        work()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    stored = capture(tmp_path / "a.stream", Breaks(1), run)
    assert [float(tensor[0]) for *_, tensor in stored] == [0, 1, 2, 0, 1, 2]


def test_a_capture_may_end_during_steps_of_other_threads(tmp_path):
    """Outputs before the end of the capture are in the file, later ones are not."""
    path = tmp_path / "a.stream"
    inside, go_on = threading.Barrier(4), threading.Event()

    class Waits(Outer):
        def forward(self, values):
            super().forward(values)
            inside.wait(60)
            assert go_on.wait(60)
            super().forward(values)  # the capture has ended

    model = Waits(1)
    threads = [threading.Thread(target=model, args=(MANY[:3],)) for _ in range(3)]
    with opened(model, path)[1]:
        for thread in threads:
            thread.start()
        inside.wait(60)
    go_on.set()
    for thread in threads:
        thread.join()
    assert sorted(captured(path)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


class Asked(torch.overrides.TorchFunctionMode):
    """Blocks a hook of this thread while the hook reads a property of a tensor."""

    def __init__(self):
        super().__init__()
        self.inside, self.go_on = threading.Event(), threading.Event()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.is_neg:
            self.inside.set()
            assert self.go_on.wait(60)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("strict", [False, True])
def test_a_hook_may_still_run_when_the_block_ends(tmp_path, monkeypatch, strict, in_c):
    """The session closes while the hook runs: its tensor is not captured, and nothing is raised."""
    model, asked, failures = Outer(1), Asked(), []

    def work():
        try:
            with asked:
                model([X, X])
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    ended = recorder.Recorder._ended

    def while_the_block_ends(self):
        asked.go_on.set()
        thread.join()
        ended(self)

    monkeypatch.setattr(recorder.Recorder, "_ended", while_the_block_ends)
    config = InstrumentationConfig.fast_capture()
    config.strict = strict

    def run(model):
        model([X])
        thread.start()
        assert asked.inside.wait(60)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        stored = capture(tmp_path / "a.stream", model, run, config, in_c=in_c)
    assert [step for _, step, *_ in stored] == [0]
    assert failures == [] and told == []


def test_a_call_that_outlives_the_capture_needs_no_output(tmp_path):
    """A capture whose only call is unfinished at the end has no outputs, and raises no error."""
    inside, go_on = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def forward(self, value):
            inside.set()
            assert go_on.wait(60)
            return value

    model = nn.Sequential(Slow())
    thread = threading.Thread(target=model, args=(X,))
    framework, block = opened(model, tmp_path / "a.stream")
    with block:
        thread.start()
        assert inside.wait(60)
    go_on.set()
    thread.join()
    assert framework.stats().steps == 1
    assert captured(tmp_path / "a.stream") == []


def test_a_child_forked_within_a_step_warns_once_that_it_does_not_capture(tmp_path):
    class Forks(Outer):
        def forward(self, values):
            super().forward(values)
            self.child = os.fork()
            super().forward(values)

    path = tmp_path / "a.stream"
    model = Forks(1)
    with opened(model, path)[1], warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            model(MANY[:3])
        finally:
            if model.child == 0:
                os._exit(sum("goes on in process" in str(w.message) for w in told))
        _, status = os.waitpid(model.child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert captured(path) == [0, 1, 2, 0, 1, 2]


def test_a_finished_capture_keeps_no_tensor_and_no_recorder_alive(tmp_path):
    model = Outer(1)
    value = torch.ones(5)
    before = sys.getrefcount(value)
    framework = InstrumentationFramework(InstrumentationConfig.fast_capture())
    framework.instrument_model(model)
    with framework.capture_activations(tmp_path / "a.stream"):
        hook = next(iter(model.inner[0]._forward_hooks.values()))
        model([value] * 50)
        alive = weakref.ref(framework._recorders[-1])
    assert sys.getrefcount(value) == before
    assert hook(model.inner[0], (), value) is None  # the hook of a finished capture does nothing
    del hook, framework
    gc.collect()
    assert alive() is None


def test_a_hook_called_with_wrong_arguments_raises_type_error(tmp_path):
    model = Outer(1)
    framework = InstrumentationFramework(InstrumentationConfig.fast_capture())
    framework.instrument_model(model)
    with framework.capture_activations(tmp_path / "a.stream"):
        hook = next(iter(model.inner[0]._forward_hooks.values()))
        for arguments in ((), (model,), (model, ()), (model, (), X, X)):
            with pytest.raises(TypeError):
                hook(*arguments)
        model([X])


def test_errors_of_libstrap_in_the_hook_are_raised_as_strap_error(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder.Recorder, "_detach", lambda self: None)
    model = Outer(1)
    framework = InstrumentationFramework(InstrumentationConfig.fast_capture().with_strict())
    framework.instrument_model(model)
    with framework.capture_activations(tmp_path / "a.stream"):
        attached = framework._recorders[-1]._attached
        model([X])
    with attached, pytest.raises(StrapError, match="no open session"):
        model([X])


def test_ctrl_c_while_a_hook_waits_for_room(tmp_path):
    """Ctrl-C ends a hook that waits for memory; the packets in the file are intact."""
    framework = InstrumentationFramework(
        InstrumentationConfig.fast_capture().with_memory_limit(0.002)
    )
    model = Outer(1)
    framework.instrument_model(model)
    large = torch.arange(2_000_000.0) % 1000  # as float16 twice the memory limit
    ctrl_c = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt), framework.capture_activations(tmp_path / "a.stream"):
        ctrl_c.start()
        while True:
            model([large] * 20)
    with ActivationReader(tmp_path / "a.stream") as reader:
        kept = [a.to_torch() for a in reader]
    assert len(kept) > 0
    assert all(torch.equal(tensor.float(), large) for tensor in kept)


class Interrupted(torch.overrides.TorchFunctionMode):
    """Raises KeyboardInterrupt while a hook reads a property of a tensor."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.is_neg:
            raise KeyboardInterrupt
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("in_c", [True, False])
def test_ctrl_c_while_a_hook_looks_at_a_tensor(tmp_path, in_c):
    """The hook raises KeyboardInterrupt and captures nothing of that call."""

    def run(model):
        model([X])
        with pytest.raises(KeyboardInterrupt), Interrupted():
            model([X])

    steps = [step for _, step, *_ in capture(tmp_path / "a.stream", Outer(1), run, in_c=in_c)]
    assert steps == [0]


class Parts(nn.Module):
    """A model whose parts are called directly too, like the encoder of an encoder-decoder."""

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Returns()

        def forward(self, value, cause=None):
            value = self.layer(value)
            if cause is not None:
                raise cause
            return value

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = self.Stack(), self.Stack()

    def forward(self, value, where=None, cause=None):
        for name, part in (("encoder", self.encoder), ("decoder", self.decoder)):
            value = part(value, cause if where == name else None)
        if where == "model":
            raise cause
        return value


ENCODER = ["encoder.layer", "encoder"]
DECODER = ["decoder.layer", "decoder"]
BEFORE = {
    "encoder": ENCODER[:1],
    "decoder": [*ENCODER, *DECODER[:1]],
    "model": [*ENCODER, *DECODER],
}


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("where", BEFORE)
@pytest.mark.parametrize(
    "cause", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError]
)
def test_a_call_after_a_failed_call_is_a_new_step(tmp_path, cause, where, in_c):
    """A new step begins although the caller keeps the exception, and so the frames of the call."""
    kept = []

    def run(model):
        for _ in range(2):
            with pytest.raises(cause) as caught:
                model(X, where, cause())
            kept.append(caught)
            model.encoder(X)
            model(X)

    stored = capture(tmp_path / "a.stream", Parts(), run, in_c=in_c)
    whole = [*ENCODER, *DECODER, ""]
    assert [(layer, step, call) for layer, step, _, call, *_ in stored] == [
        (layer, step, 0)
        for step, layers in enumerate([BEFORE[where], ENCODER, whole] * 2)
        for layer in layers
    ]


@pytest.mark.parametrize("in_c", [True, False])
def test_a_call_whose_part_failed_goes_on_in_the_same_step(tmp_path, in_c):
    class Tries(Parts):
        def forward(self, value):
            with pytest.raises(KeyboardInterrupt):
                self.encoder(value, KeyboardInterrupt())
            return self.decoder(value)

    def run(model):
        model(X)
        model(X)

    stored = capture(tmp_path / "a.stream", Tries(), run, in_c=in_c)
    assert [(layer, step, call) for layer, step, _, call, *_ in stored] == [
        (layer, step, 0) for step in (0, 1) for layer in ("encoder.layer", *DECODER, "")
    ]


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("cause", [KeyboardInterrupt, ValueError])
def test_a_step_ends_although_a_part_of_it_failed(tmp_path, cause, in_c):
    """The next call is a new step, also if a part raised and the model caught the exception."""

    class Tries(Parts):
        def forward(self, value):
            with pytest.raises(cause):
                self.encoder(value, cause())
            return self.decoder(value)

    def run(model):
        model(X)
        model.decoder.layer(X)
        model(X)

    stored = capture(tmp_path / "a.stream", Tries(), run, in_c=in_c)
    step = ["encoder.layer", *DECODER, ""]
    assert [(layer, step, call) for layer, step, _, call, *_ in stored] == [
        *((layer, 0, 0) for layer in step),
        ("decoder.layer", 1, 0),
        *((layer, 2, 0) for layer in step),
    ]


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("ends", [ValueError, None])
def test_a_model_that_calls_itself_is_in_one_step(tmp_path, ends, in_c):
    class Calls(Outer):
        def forward(self, depth):
            if depth > 0:
                with contextlib.suppress(KeyboardInterrupt):
                    self(depth - 1)
                self.inner[0](X)
            elif ends is not None:
                raise KeyboardInterrupt
            if depth == 3 and ends is not None:
                raise ends

    def run(model):
        for _ in range(2):
            with contextlib.suppress(ValueError):
                model(3)
            model.inner[0](X)  # a new step

    stored = capture(tmp_path / "a.stream", Calls(1), run, in_c=in_c)
    assert [(step, call) for _, step, _, call, *_ in stored] == [
        (2 * n + at, call) for n in range(2) for at, call in ((0, 0), (0, 1), (0, 2), (1, 0))
    ]


def test_an_output_is_freed_although_a_part_of_its_step_failed(tmp_path):
    class Tries(Parts):
        def forward(self, value):
            with contextlib.suppress(KeyboardInterrupt):
                self.encoder(value, KeyboardInterrupt())
            return self.decoder(value) + 1

    model = Tries()
    with opened(model, tmp_path / "a.stream")[1]:
        returned = weakref.ref(model(X))
        gc.collect()
        assert returned() is None


def test_a_model_that_swallows_ctrl_c_and_captures_nothing(tmp_path):
    """A capture without outputs raises CaptureError, also if the model caught KeyboardInterrupt."""

    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Breaks()

        def forward(self, value):
            with contextlib.suppress(KeyboardInterrupt):
                self.part(value)

    class Breaks(nn.Module):
        def forward(self, value):
            raise KeyboardInterrupt

    model = Tries()
    block = opened(model, tmp_path / "a.stream")[1]
    with pytest.raises(CaptureError, match="1 forward calls, but no output"), block:
        model(X)


def test_objects_of_an_interrupted_call_are_freed_with_the_capture(tmp_path):
    class Held:
        pass

    def interrupted(model):
        held = Held()
        with pytest.raises(KeyboardInterrupt):
            model(X, "model", KeyboardInterrupt())
        return weakref.ref(held)

    found = []
    framework = InstrumentationFramework(InstrumentationConfig.fast_capture())
    model = Parts()
    framework.instrument_model(model)
    with framework.capture_activations(tmp_path / "a.stream"):
        found.append(interrupted(model))
    gc.collect()
    assert found[0]() is None
    assert framework.stats().steps == 1


def test_threads_of_c_may_call_the_model_repeatedly(tmp_path):
    """Python makes a new thread state for each call from a thread that C created."""
    source = tmp_path / "twice.c"
    source.write_text(
        "#include <pthread.h>\n"
        "static void *run(void *call) { for (int i = 0; i < 3; i++) ((void (*)(void))call)();"
        " return 0; }\n"
        "void thrice(void (*call)(void)) { pthread_t t; pthread_create(&t, 0, run, (void *)call);"
        " pthread_join(t, 0); }\n"
    )
    cc = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(cc[0]) is None:
        pytest.skip(f"no C compiler {cc[0]!r}")
    library = tmp_path / "twice.so"
    subprocess.run([*cc, "-shared", "-fPIC", "-pthread", source, "-o", library], check=True)
    thrice = ctypes.CDLL(str(library)).thrice

    def run(model):
        @ctypes.CFUNCTYPE(None)
        def call():
            model.inner[0](X)  # a new step
            model([X, X])
            gc.collect()

        thrice(call)

    ours = capture(tmp_path / "c.stream", Outer(1), run)
    theirs = capture(tmp_path / "python.stream", Outer(1), run, in_c=False)
    assert [call for _, _, _, call, *_ in ours] == [0, 0, 1] * 3
    assert_same(ours, theirs)


def test_without_the_library_no_file_is_touched(tmp_path, monkeypatch):
    path = tmp_path / "a.stream"
    path.write_bytes(b"an earlier capture")

    def missing(tensor):
        raise UnsupportedError("hook.so is missing")

    monkeypatch.setattr(opening, "view_function", missing)
    framework = InstrumentationFramework(InstrumentationConfig.fast_capture())
    framework.instrument_model(Outer(1))
    with pytest.raises(UnsupportedError), framework.capture_activations(path):
        pass
    assert path.read_bytes() == b"an earlier capture"


def test_an_unknown_exchange_api_gives_no_view_function():
    class Other:
        __dlpack_c_exchange_api__ = object()

    assert view_function(Other) == 0
    assert view_function(object) == 0
    assert view_function(Tensor) != 0
