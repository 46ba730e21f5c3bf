"""mrm-trace: its output, errors and exit codes. Tests of whole runs are integration tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from llm_instrumentation.cli import mrm_trace
from llm_instrumentation.cli.exit_codes import TraceExitCode as ExitCode
from llm_instrumentation.mrm.collection import (
    CollectorStep,
    NothingCollectedError,
    build_collector,
    choose_mode,
    collectors_for,
    engine_mismatch,
)
from llm_instrumentation.mrm.collector.base import Mode
from llm_instrumentation.mrm.config import load_experiment, load_prompts
from llm_instrumentation.mrm.config.schema import CollectorConfig, CollectorType, EngineType
from llm_instrumentation.mrm.runs import (
    INCOMPLETE,
    RunFolder,
    find_finished,
    find_runs,
    parameters_of,
)
from synthetic_traces import make_trace

ROOT = Path(__file__).resolve().parents[2]
MINIMAL = ROOT / "examples" / "minimal.yaml"


@pytest.fixture
def command(capsys):
    """Returns a function that runs the command and returns (exit code, stdout, stderr)."""

    def run(*arguments) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            mrm_trace([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return run


@pytest.fixture
def experiment(tmp_path):
    """Returns a function that writes an experiment file of a tiny model with given sections."""

    def write(**sections) -> Path:
        content = yaml.safe_load(MINIMAL.read_text(encoding="utf-8")) | sections
        content.setdefault("output", {})["base_dir"] = str(tmp_path / "results")
        path = tmp_path / "experiment.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        return path

    return write


def test_help_tells_the_exit_codes(command):
    for arguments in (["--help"], ["run", "--help"]):
        code, out, _ = command(*arguments)
        assert code == ExitCode.OK
        assert "130 interrupted" in " ".join(out.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["plan"],
        ["plan", "--config", "a.yaml", "--nope"],
        ["validate"],
        ["plan", "--config", "nowhere.yaml"],
        ["analyse", "--input", "nowhere"],
        ["analyse", "--input", ".", "--metrics", "retention"],
        ["export", "--input", ".", "--format", "zip"],
    ],
)
def test_a_wrong_command_line_exits_with_1(command, arguments):
    code, out, err = command(*arguments)
    assert code == ExitCode.USAGE
    assert out == ""
    assert err


def test_a_wrong_file_exits_with_1_and_prints_a_line_for_each_mistake(command, experiment):
    path = experiment(sweep={"repetitions": 0, "output_tokens": []})
    code, out, err = command("run", "--config", path)
    assert (code, out) == (ExitCode.USAGE, "")
    assert [line.split()[1:3] for line in err.splitlines()] == [
        [f"{path}:", "sweep.output_tokens:"], [f"{path}:", "sweep.repetitions:"],
    ]  # fmt: skip


def test_what_looks_like_an_emoji_stays_text(command):
    _, _, err = command("plan", "--config", "runs:x:smile:.yaml")
    assert "runs:x:smile:.yaml" in err


def test_mistakes_are_printed_as_json_on_request(command, experiment):
    path = experiment(sweep={"repetitions": 0})
    code, out, err = command("plan", "--config", path, "--json")
    told = json.loads(out)
    assert code == told["exit_code"] == ExitCode.USAGE
    assert told["errors"] == [f"{path}: sweep.repetitions: 0 must be at least 1"]
    assert err == ""


def test_a_wrong_command_line_is_reported_as_json_on_request(command):
    code, out, err = command("plan", "--json")
    told = json.loads(out)
    assert code == told["exit_code"] == ExitCode.USAGE
    assert "--config" in told["errors"][0]
    assert err == ""


@pytest.mark.parametrize(
    "section",
    [{"prompts": {"source": "nowhere.txt"}}, {"labeller": {"rules_file": "nowhere.yaml"}}],
)
@pytest.mark.parametrize("verb", ["validate", "plan", "run"])
def test_every_command_names_missing_files_of_the_plan(command, experiment, verb, section):
    code, out, err = command(verb, "--config", experiment(**section))
    assert (code, out) == (ExitCode.USAGE, "")
    (key,) = section
    assert f"{key}." in err
    assert "is not there" in err


def test_a_plan_lists_each_run(command, experiment):
    path = experiment(sweep={"context_lengths": [8, 16], "repetitions": 2, "warmup_runs": 1})
    code, out, _ = command("plan", "--config", path)
    assert code == ExitCode.OK
    assert "Total runs : 6  (2 warmup, 4 actual)" in out
    code, out, _ = command("plan", "--config", path, "--json")
    runs = json.loads(out)["runs"]
    assert [(run["context_length"], run["is_warmup"], run["rep_index"]) for run in runs] == [
        (8, True, 0), (8, False, 0), (8, False, 1), (16, True, 0), (16, False, 0), (16, False, 1),
    ]  # fmt: skip
    assert {run["finished_as"] for run in runs} == {None}


def test_validate_names_missing_files(command, experiment):
    models = [{"id": "m", "engine": "llamacpp", "path": "nowhere.gguf"}]
    code, out, _ = command("validate", "--config", experiment(models=models), "--json")
    told = json.loads(out)
    assert code == ExitCode.USAGE
    assert not told["valid"]
    assert "models[0].path: 'nowhere.gguf' is not there" in told["errors"]


def test_an_only_pattern_without_a_run_is_refused(command, experiment):
    code, _, err = command("run", "--config", experiment(), "--only", "ctx4096")
    assert code == ExitCode.USAGE
    assert "'ctx4096'" in err


@pytest.mark.parametrize("module", ["llm_instrumentation.mrm", "llm_instrumentation.cli.trace"])
def test_the_command_is_light(module):
    """Help and shell completion are fast, because importing the command imports no torch."""
    heavy = ("torch", "transformers", "matplotlib", "pandas", "pyarrow")
    program = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# Tables.


@pytest.fixture
def traced(tmp_path):
    """The path of a trace file with weights, a KV cache and activations."""
    path = tmp_path / "trace.parquet"
    pq.write_table(make_trace(weight_window_s=30.0), path)
    return path


def test_tables_are_read_on_narrow_terminals_and_no_digit_is_lost(command, traced, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    code, out, err = command("analyse", "--input", traced)
    assert (code, err) == (ExitCode.OK, "")
    assert "…" not in out
    assert out.index("retention_summary") < out.index("retention_per_region")
    assert "regions more; all are in --json" in out
    weights = next(line for line in out.splitlines() if line.startswith("weight "))
    assert weights.split() == ["weight", "4", "30", "30", "30", "30"]


def test_chosen_metrics_alone(command, traced):
    code, out, _ = command("analyse", "--input", traced, "--metrics", "working_set_size", "--json")
    (run,) = json.loads(out)["runs"]
    assert code == ExitCode.OK
    assert set(run["tables"]) == {"working_set_per_region", "working_set_summary"}


def test_a_trace_that_lacks_columns_names_them(command, traced):
    pq.write_table(pq.read_table(traced).drop_columns(["address_page", "op_type"]), traced)
    code, _, err = command("analyse", "--input", traced)
    assert code == ExitCode.RUN_FAILED
    assert "lacks the required columns address_page, op_type" in err
    assert len(err.splitlines()) == 1


def test_a_trace_that_is_cut_off_says_so(command, traced):
    traced.write_bytes(traced.read_bytes()[:-100])
    code, _, err = command("analyse", "--input", traced)
    assert code == ExitCode.RUN_FAILED
    assert f"{traced} is no whole Parquet file" in err
    assert len(err.splitlines()) == 1


# The choice of a collector.


def test_every_collector_takes_the_keys_of_its_section():
    settings = load_experiment(MINIMAL).collector
    for kind in CollectorType:
        assert build_collector(kind, settings).name == kind.value


def test_collectors_watch_from_outside_if_they_can():
    """perf_mem attaches to the process, memray wraps its command, the torch tracer runs in it."""
    settings = load_experiment(MINIMAL).collector
    modes = {
        kind: choose_mode(build_collector(kind, settings), EngineType.TRANSFORMERS)
        for kind in (CollectorType.PERF_MEM, CollectorType.MEMRAY, CollectorType.TORCH)
    }
    assert list(modes.values()) == [Mode.ATTACH, Mode.WRAP, Mode.IN_PROCESS]


def test_for_llama_cpp_page_collectors_are_tried_before_memray_as_a_fallback():
    kinds = CollectorType
    documented = CollectorConfig()
    for engine in (EngineType.TRANSFORMERS, EngineType.VLLM):
        assert collectors_for(documented, engine) == dict.fromkeys(documented.order)
    tried = collectors_for(documented, EngineType.LLAMACPP)
    assert list(tried) == [
        kinds.PERF_MEM, kinds.PAGE_FAULTS, kinds.WRITE_SETS, kinds.MEMRAY, kinds.PROCESS_MONITOR,
    ]  # fmt: skip
    assert [bool(why) for why in tried.values()] == [False, True, True, False, False]


def test_a_primary_memray_stays_first():
    """For llama.cpp, page collectors go before memray only if memray is a fallback."""
    kinds = CollectorType
    first = CollectorConfig(primary="memray", fallback="page_faults", fallback_2=None)
    assert list(collectors_for(first, EngineType.LLAMACPP)) == [kinds.MEMRAY, kinds.PAGE_FAULTS]
    named = CollectorConfig(primary="write_sets", fallback="memray", fallback_2="page_faults")
    tried = collectors_for(named, EngineType.LLAMACPP)
    assert list(tried) == [kinds.WRITE_SETS, kinds.PAGE_FAULTS, kinds.MEMRAY]
    assert tried[kinds.WRITE_SETS] is None
    without = CollectorConfig(primary="perf_mem", fallback=None)
    assert list(collectors_for(without, EngineType.LLAMACPP)) == [
        kinds.PERF_MEM, kinds.PROCESS_MONITOR,
    ]  # fmt: skip


def test_the_torch_tracer_cannot_watch_vllm():
    assert engine_mismatch(CollectorType.TORCH, EngineType.TRANSFORMERS) is None
    assert "vllm is none" in str(engine_mismatch(CollectorType.TORCH, EngineType.VLLM))
    assert engine_mismatch(CollectorType.MEMRAY, EngineType.VLLM) is None


def test_the_error_says_why_each_collector_could_not_run():
    steps = [CollectorStep("perf_mem", False, "no PMU"), CollectorStep("memray", False, "absent")]
    assert str(NothingCollectedError(steps)) == (
        "no collector could run. perf_mem: no PMU; memray: absent"
    )


# Run folders.


def test_a_folder_without_a_manifest_is_damaged(tmp_path):
    (tmp_path / "a-run").mkdir()
    defect = RunFolder(tmp_path / "a-run").defect()
    assert defect is not None
    assert defect.state == "damaged"
    assert "manifest" in defect.reason


def test_the_mark_of_a_run_says_why_it_is_incomplete(tmp_path):
    """A run folder with a mark is incomplete for the marked reason; a damaged mark counts too."""
    folder = RunFolder(tmp_path / "a-run")
    folder.mark("interrupted", "Ctrl-C")
    defect = folder.defect()
    assert defect is not None
    assert (defect.state, defect.reason, defect.run_id) == ("interrupted", "Ctrl-C", "a-run")
    (folder.path / INCOMPLETE).write_text("{torn", encoding="utf-8")
    defect = folder.defect()
    assert defect is not None
    assert defect.state == "damaged"


def finish(folder: RunFolder, parameters: dict) -> None:
    from llm_instrumentation.mrm.reporter import write_manifest

    folder.path.mkdir(parents=True)
    text = json.dumps({"run_id": folder.run_id, "parameters": parameters})
    (folder.path / "metadata.json").write_text(text, encoding="utf-8")
    write_manifest(folder.path, folder.run_id)


def test_finished_runs_are_known_by_their_parameters(experiment):
    config = load_experiment(experiment(sweep={"context_lengths": [8, 16], "output_tokens": [4]}))
    from llm_instrumentation.mrm.config import expand_sweep

    first, second = expand_sweep(config)
    earlier = expand_sweep(config, "20200101T000000Z")[0]
    folder = RunFolder(Path(earlier.output_dir))
    finish(folder, parameters_of(config, earlier))
    found = find_finished(config, first)
    assert found is not None
    assert found.path == folder.path
    assert find_finished(config, second) is None

    config.collector.torch.sample_every = 7
    assert find_finished(config, first) is None


def test_a_run_that_does_not_match_its_manifest_is_marked_and_run_again(experiment):
    from llm_instrumentation.mrm.config import expand_sweep

    config = load_experiment(experiment())
    (run,) = expand_sweep(config)
    folder = RunFolder(Path(run.output_dir))
    finish(folder, parameters_of(config, run))
    assert find_finished(config, run) is not None
    (folder.path / "metadata.json").write_text("{}", encoding="utf-8")
    assert find_finished(config, run) is None
    assert not (folder.path / INCOMPLETE).exists()
    assert find_finished(config, run, mark=True) is None
    defect = folder.defect()
    assert defect is not None
    assert defect.state == "damaged"
    assert "metadata.json" in defect.reason


def test_the_output_folder_is_no_parameter_of_a_run(experiment):
    """Output and analyser options do not change the fingerprint of a run; prompts do."""
    from llm_instrumentation.mrm.config import expand_sweep

    config = load_experiment(experiment())
    (run,) = expand_sweep(config)
    before = parameters_of(config, run)["fingerprint"]
    config.output.base_dir = "elsewhere"
    config.analyser.histogram_bins = 7
    assert parameters_of(config, run)["fingerprint"] == before
    config.prompts.texts = ["another prompt"]
    assert load_prompts(config.prompts)[0].text == "another prompt"
    assert parameters_of(config, run)["fingerprint"] != before


def test_runs_are_found_below_a_folder(tmp_path):
    for name in ("m/a", "m/b", "n/c"):
        RunFolder(tmp_path / name).mark("failed", "a test")
    (tmp_path / "m" / "a" / "raw" / "x").mkdir(parents=True)
    assert [folder.run_id for folder in find_runs(tmp_path)] == ["a", "b", "c"]
    assert [folder.run_id for folder in find_runs(tmp_path / "n" / "c")] == ["c"]
    with pytest.raises(FileNotFoundError):
        list(find_runs(tmp_path / "nowhere"))
