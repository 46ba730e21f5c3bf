"""Captures of vLLM itself, on processors. `make vllm` makes an environment with it.

What the rows should be is computed by transformers, one request at a time.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig
from llm_instrumentation.engines.vllm import EXTENSION, CompiledModel, capture_vllm
from llm_instrumentation.errors import UnsupportedError

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("vllm", reason="needs vLLM: make vllm makes an environment with it")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(600)
LAYER = "model.layers.1"
PREFIX = list(range(1, 41))
SERVER = "vllm.entrypoints.openai.api_server"


@pytest.fixture(scope="module", autouse=True)
def settings():
    """They hold for engines in this process and in others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, max_position_embeddings=512,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    words = ["?", "The", "ferry", "Seven", "stones", *(f"w{n}" for n in range(5, 512))]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="?")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="?", eos_token="w511"
    ).save_pretrained(path)
    return path


def engine(model: Path, *, eager: bool = True, **how: Any):
    from vllm import LLM

    return LLM(
        str(model), skip_tokenizer_init=True, enforce_eager=eager, dtype="float32",
        max_model_len=256, max_num_seqs=8, block_size=32, enable_prefix_caching=True,
        worker_extension_cls=EXTENSION, **how,
    )  # fmt: skip


def generate(llm, prompts, *, temperature=0.0, **how):
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=temperature, detokenize=False, ignore_eos=True, **how)
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(prompts, sampling, use_tqdm=False)


@torch.no_grad()
def check(model: Path, path, results) -> dict[str, list[int]]:
    """Compares the rows with transformers. It returns the positions of each request's rows."""
    alone = transformers.LlamaForCausalLM.from_pretrained(model).eval()
    found = {}
    with ActivationReader(path) as reader:
        outputs, residuals = (reader.rows(name) for name in (LAYER, f"{LAYER}[1]"))
        for result in results:
            for number, answer in enumerate(result.outputs):
                several = len(result.outputs) > 1
                name = f"{number}_{result.request_id}" if several else result.request_id
                its = outputs.select(request=name, rank=0)
                tokens = result.prompt_token_ids + list(answer.token_ids[:-1])
                positions = its.column("position").tolist()
                assert its.column("token_id").tolist() == [tokens[at] for at in positions]
                assert positions[-1] == len(tokens) - 1
                hidden = alone(torch.tensor([tokens]), output_hidden_states=True).hidden_states[2]
                stream = its.to_torch() + residuals.select(request=name, rank=0).to_torch()
                torch.testing.assert_close(stream, hidden[0, positions], rtol=1e-4, atol=1e-5)
                found[name] = positions
    return found


def exact() -> InstrumentationConfig:
    return InstrumentationConfig.balanced().with_float32()


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_chunks_prefixes_and_several_answers(eager, model, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine is in this process
    llm = engine(model, eager=eager, max_num_batched_tokens=16)
    with capture_vllm(llm, tmp_path / "run.stream", config=exact()):
        first = generate(llm, [PREFIX], max_tokens=8)
        results = first + generate(llm, [[*PREFIX, 50, 51], [7, 8, 9]], max_tokens=20)
        results += generate(llm, [[9, 8, 7]], max_tokens=4, n=2, temperature=1.0)
    generate(llm, [[1, 2]], max_tokens=2)  # behind the capture
    found = check(model, tmp_path / "run.stream", results)
    assert found == {
        "0": [*range(47)],
        "1": [*range(32, 61)],  # a block of 32 tokens was in the cache
        "2": [*range(22)],
        "0_3": [*range(6)],
        "1_3": [*range(6)],
    }
    with ActivationReader(tmp_path / "run.stream") as reader:
        rows = reader.rows(LAYER)
        assert len(rows) == sum(map(len, found.values()))
        assert max(rows.select(request="0").column("batch_row")) == 0
        steps = rows.select(request="0").column("step").tolist()
        assert [steps.count(step) for step in sorted(set(steps))] == [16, 16, 8] + [1] * 7


def test_requests_that_make_room_are_computed_again(model, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    llm = engine(model, num_gpu_blocks_override=12)
    prompts = [list(range(n, n + 30)) for n in (1, 101, 201)]
    with capture_vllm(llm, tmp_path / "run.stream", config=exact()):
        results = generate(llm, prompts, max_tokens=180)
    found = check(model, tmp_path / "run.stream", results)
    assert any(len(positions) > len(set(positions)) for positions in found.values())


def test_several_workers(model, tmp_path):
    """Two processes, each with half of the heads, write a run folder."""
    llm = engine(model, tensor_parallel_size=2)
    with capture_vllm(llm, f"{tmp_path}/run/", config=exact()):
        results = generate(llm, [PREFIX, [7, 8, 9]], max_tokens=8)
    check(model, tmp_path / "run", results)
    with ActivationReader(tmp_path / "run") as reader:
        assert [shard.state for shard in reader.run.shards] == ["complete"] * 2
        rows = reader.rows(f"{LAYER}.self_attn.qkv_proj")
        assert set(rows.column("rank").tolist()) == {0, 1}
        assert rows.shape == (128,)  # of 4 x 32 + 2 x 2 x 32
    del llm


def contents(path) -> dict[tuple[str, int, int], torch.Tensor]:
    with ActivationReader(path) as reader:
        return {(one.name, one.step, one.call): one.to_torch() for one in reader}


def test_a_compiled_engine_has_what_an_eager_one_has(model, tmp_path, monkeypatch):
    """Compiled code rounds differently in the last bits. Its files are of another process."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    parts = ["model.embed_tokens", "model.layers.?", "model.norm"]
    for name, eager in (("eager", True), ("compiled", False), ("compiled again", False)):
        llm = engine(model, eager=eager)
        config = exact().with_layers(parts)
        with capture_vllm(llm, tmp_path / name, config=config):
            generate(llm, [PREFIX, [7, 8, 9]], max_tokens=8)
        del llm
    eager = contents(tmp_path / "eager")
    assert {name for name, *_ in eager} == {
        "model.embed_tokens", "model.layers.0", "model.layers.0[1]", "model.layers.1",
        "model.layers.1[1]", "model.layers.2", "model.layers.2[1]", "model.norm", "model.norm[1]",
    }  # fmt: skip
    for name in ("compiled", "compiled again"):
        compiled = contents(tmp_path / name)
        assert list(compiled) == list(eager)
        for key, value in compiled.items():
            torch.testing.assert_close(value, eager[key], rtol=1e-4, atol=1e-5)


def generate_and_abort(llm, prompts: dict[str, list[int]], aborted: str) -> list:
    """Gives all requests at once, and aborts one after eight steps. It returns the others."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, detokenize=False, ignore_eos=True, max_tokens=12)
    for name, prompt in prompts.items():
        llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    results, steps = [], 0
    while llm.llm_engine.has_unfinished_requests():
        results += [result for result in llm.llm_engine.step() if result.finished]
        steps += 1
        if steps == 8:
            llm.llm_engine.abort_request([aborted])
    return results


def test_requests_of_a_compiled_engine_equal_an_eager_ones(model, tmp_path, monkeypatch):
    """With chunks, a cached prefix, three requests at once, and one that is aborted."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    prompts = {"chunks": [*range(60, 100)], "cached": [*PREFIX, 50], "aborted": [7, 8, 9]}
    parts = ["model.layers.?", "*.mlp", "*.o_proj"]
    for name, eager in (("eager", True), ("compiled", False)):
        llm = engine(
            model, eager=eager, max_num_batched_tokens=16, additional_config={"strap": parts}
        )
        generate(llm, [PREFIX], max_tokens=1)  # fills the cache
        with capture_vllm(llm, tmp_path / name, config=exact().with_layers(parts)):
            results = generate_and_abort(llm, prompts, "aborted")
        found = check(model, tmp_path / name, results)
        assert found == {"chunks": [*range(51)], "cached": [*range(32, 52)]}
        del llm
    with (
        ActivationReader(tmp_path / "eager") as eager,
        ActivationReader(tmp_path / "compiled") as compiled,
    ):
        assert {LAYER, f"{LAYER}[1]", f"{LAYER}.mlp"} < set(eager.layers) == set(compiled.layers)
        for layer, request in itertools.product(eager.layers, prompts):
            one, two = (run.rows(layer).select(request=request) for run in (eager, compiled))
            for column in ("step", "token_id", "position"):
                assert two.column(column).tolist() == one.column(column).tolist()
            torch.testing.assert_close(two.to_torch(), one.to_torch(), rtol=1e-4, atol=1e-5)
            if request == "aborted":
                assert one.column("position").tolist() == [*range(7)]


def test_other_modules_of_a_compiled_engine(model, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    llm = engine(model, eager=False, additional_config={"strap": ["*.mlp", "*.qkv_proj"]})
    with (
        pytest.warns(RuntimeWarning, match="selected modules, such as 'model'.* not captured"),
        capture_vllm(llm, tmp_path / "run.stream", config=exact()),
    ):
        generate(llm, [PREFIX, [7, 8, 9]], max_tokens=8)
    with ActivationReader(tmp_path / "run.stream") as reader:
        assert {f"model.layers.{n}.mlp" for n in range(3)} <= set(reader.layers)
        assert len(reader.rows("model.layers.1.self_attn.qkv_proj")) == 40 + 3 + 2 * 7
        assert "model.layers.1" not in reader.layers
    for config, told in (
        (exact().with_layers("model.layers.1"), r"without the selected modules.*additional_config"),
        (exact().with_inputs(), r"leave with_inputs\(\) out"),
        (exact().with_kv_cache(), r"leave with_kv_cache\(\) out"),
        (exact().with_gradients(), r"leave with_gradients\(\) out"),
    ):
        with pytest.raises(Exception, match=told):
            capture_vllm(llm, tmp_path / "refused.stream", config=config).__enter__()
    assert not (tmp_path / "refused.stream").exists()


def test_cuda_graphs_are_refused():
    """They replay kernels, without the operators between them."""
    runner = SimpleNamespace(load_model=lambda: None, get_model=lambda: torch.nn.Linear(1, 1))
    settings = SimpleNamespace(
        additional_config={},
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="PIECEWISE")),
    )
    compiled = CompiledModel(runner, settings)
    runner.load_model()
    with pytest.raises(UnsupportedError, match='start it with compilation_config={"cudagraph_mode'):
        compiled.config_of(runner.get_model(), exact())


def test_a_server(model, tmp_path):
    """Captures begin and end by requests to the server, which answers others at the same time."""
    port, log = 8791, tmp_path / "server.log"
    command = [
        sys.executable, "-m", SERVER, "--model", model, "--served-model-name", "tiny", "--port",
        port, "--skip-tokenizer-init", "--dtype", "float32", "--max-model-len",
        256, "--worker-extension-cls", EXTENSION,
    ]  # fmt: skip

    def ask(path: str, **content: Any) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/{path}",
            json.dumps(content).encode(),
            {"Content-Type": "application/json", "X-Request-Id": str(content.pop("name", ""))},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
    with open(log, "wb") as out:
        server = subprocess.Popen(
            list(map(str, command)), env=environment, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        until = time.monotonic() + 400  # a busy machine took more than 240
        while True:
            assert server.poll() is None and time.monotonic() < until, log.read_text()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.5)
        begun = ask(
            "collective_rpc", method="begin_capture", args=[f"{tmp_path}/run/"],
            kwargs={"preset": "max", "settings": {"include": ["model.layers.?"]}},
        )  # fmt: skip
        assert begun["results"] == [f"{tmp_path}/run/rank-00000.stream"]
        with ThreadPool(3) as pool:
            pool.map(
                lambda n: ask("v1/completions", prompt=[1, 2, 3 + n], max_tokens=5, name=f"n{n}"),
                range(3),
            )
        (told,) = ask("collective_rpc", method="end_capture")["results"]
        assert told["packets"] and not told["dropped"]
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:  # it compiles, or hangs
            os.killpg(server.pid, signal.SIGKILL)  # with its workers
            raise
    with ActivationReader(tmp_path / "run") as reader:
        rows = reader.rows(LAYER)
        names = {f"cmpl-n{n}-0" for n in range(3)}
        assert set(rows.column("request")) == names
        assert rows.select(request="cmpl-n1-0").column("token_id").tolist()[:3] == [1, 2, 4]


def test_the_example_of_the_page(model, tmp_path):
    page = Path(__file__).parents[2] / "docs" / "howto" / "engines.md"
    code = re.search(r"^```py\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)[1]
    (tmp_path / "example.py").write_text(code.replace('"MODEL"', f'"{model}", max_model_len=256'))
    ran = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert re.search(
        r"^\[ 0  1 .*torch.Size\(\[\d+, 128\]\)$", ran.stdout, re.MULTILINE | re.DOTALL
    )
