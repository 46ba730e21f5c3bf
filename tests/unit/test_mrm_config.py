"""Experiment files: their keys and defaults, messages for mistakes, and the runs they describe."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from llm_instrumentation.mrm.config import (
    CollectorType,
    ConfigError,
    EngineType,
    ExperimentConfig,
    ModelConfig,
    RunConfig,
    UnknownPolicy,
    expand_sweep,
    generate_run_id,
    load_experiment,
    load_prompts,
    validate_config_semantics,
    validate_environment,
    validate_model_paths,
)
from llm_instrumentation.mrm.config.prompts import BUILTIN
from llm_instrumentation.mrm.processing import policy_for
from llm_instrumentation.mrm.schema import Kind

ROOT = Path(__file__).resolve().parents[2]
MODEL = {"id": "tiny", "engine": "transformers", "random": {"architecture": "llama"}}


def experiment(**sections):
    return {"experiment": {"name": "a test"}, "models": [MODEL], **sections}


@pytest.fixture
def written(tmp_path):
    """Writes an experiment file and returns its path."""

    def write(content):
        path = tmp_path / "experiment.yaml"
        text = content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problems(path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_experiment(path)
    assert str(path) in str(caught.value)
    return caught.value.problems


def test_the_least_experiment_has_the_documented_defaults(written):
    config = load_experiment(written(experiment()))
    assert config.sweep.context_lengths == [2048]
    assert config.sweep.batch_sizes == [1]
    assert config.sweep.output_tokens == [128]
    assert (config.sweep.repetitions, config.sweep.warmup_runs) == (1, 0)
    assert config.collector.order == [
        CollectorType.PERF_MEM, CollectorType.MEMRAY, CollectorType.PROCESS_MONITOR,
    ]  # fmt: skip
    assert config.collector.perf_mem.sample_period == 4000
    assert config.collector.perf_mem.ldlat_threshold == 20
    assert config.collector.process_monitor.poll_interval_ms == 100
    assert config.labeller.unknown_policy is UnknownPolicy.LOG_AND_SKIP
    assert config.output.base_dir == "results/"
    assert config.output.compression.value == "zstd"


@pytest.mark.parametrize(
    ("section", "accesses", "others"),
    [
        ({}, "log_and_skip", "assign_unknown"),
        ({"unknown_policy": "log_and_skip"}, "log_and_skip", "log_and_skip"),
        ({"unknown_policy": "fail_run"}, "fail_run", "fail_run"),
    ],
    ids=["none", "the default", "another"],
)
def test_without_a_policy_pages_and_allocations_keep_unknown_rows(
    written, section, accesses, others
):
    labeller = load_experiment(written(experiment(labeller=section))).labeller
    assert policy_for(labeller, Kind.ACCESSES).value == accesses
    for kind in set(Kind) - {Kind.ACCESSES}:
        assert policy_for(labeller, kind).value == others


@pytest.mark.parametrize("name", ["config/default_experiment.yaml", "examples/minimal.yaml"])
def test_the_experiments_of_the_project_can_be_read(name):
    config = load_experiment(ROOT / name)
    assert validate_config_semantics(config).errors == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"models": [{**MODEL, "engine": "llamacp"}]},
            "models[0].engine: 'llamacp' is none of llamacpp, vllm, transformers",
        ),
        (
            {"sweep": {"context_length": [8]}},
            "sweep.context_length: unknown key; did you mean context_lengths? allowed are "
            "context_lengths, batch_sizes, output_tokens, repetitions, warmup_runs",
        ),
        (
            {"sweep": {"batch_sizes": []}},
            "sweep.batch_sizes: is empty; it needs at least one value",
        ),
        ({"sweep": {"batch_sizes": [1, "x"]}}, "sweep.batch_sizes[1]: 'x' is no whole number"),
        ({"sweep": {"batch_sizes": [True]}}, "sweep.batch_sizes[0]: true is no whole number"),
        ({"sweep": {"output_tokens": [0]}}, "sweep.output_tokens[0]: 0 must be above 0"),
        ({"sweep": {"repetitions": 0}}, "sweep.repetitions: 0 must be at least 1"),
        (
            {"sweep": {"repetitions": 10**9}},
            "sweep.repetitions: 1000000000 must be at most 10000",
        ),
        (
            {"sweep": {"context_lengths": [10**20]}},
            "sweep.context_lengths[0]: 100000000000000000000 must be at most 2147483647",
        ),
        (
            {"sweep": None},
            "sweep: null is no mapping; allowed are context_lengths, batch_sizes, output_tokens, "
            "repetitions, warmup_runs",
        ),
        (
            {"sweep": {1: 2}},
            "sweep[1]: the key is no text; allowed are context_lengths, batch_sizes, "
            "output_tokens, repetitions, warmup_runs",
        ),
        (
            {"sweep": {"context_lengths": [8, 8]}},
            "sweep.context_lengths: 8 stands twice; a run would have the same name as another",
        ),
        ({"models": []}, "models: is empty; it needs at least one value"),
        (
            {"collector": {"torch": [1]}},
            "collector.torch: [1] is no mapping; allowed are sample_every, trace_load, max_runs, "
            "kv_regions",
        ),
        (
            {"labeller": {"unknown_policy": "keep"}},
            "labeller.unknown_policy: 'keep' is none of log_and_skip, assign_runtime, "
            "assign_unknown, fail_run",
        ),
        (
            {"analyser": {"metrics": ["retention"]}},
            "analyser.metrics[0]: 'retention' is none of retention_duration, write_once_ratio, "
            "read_frequency, working_set_size, access_locality, inter_access_interval",
        ),
        (
            {"experiment": {"name": "x", "version": 1.0}},
            "experiment.version: 1.0 is no text; put it in quotes",
        ),
        ({"experiment": {}}, "experiment.name: missing"),
        (
            {"models": [{"id": "a", "engine": "llamacpp"}]},
            "models[0]: model 'a': engine llamacpp needs path",
        ),
        (
            {"models": [{"id": "a", "engine": "vllm", "package": "p"}]},
            "models[0]: model 'a': engine vllm takes path or hf_repo, not package",
        ),
        (
            {"models": [{"id": "a", "engine": "vllm", "hf_repo": "a/b", "kv_cache": "static"}]},
            "models[0]: model 'a': kv_cache: static is for engine transformers; vllm has a "
            "cache of its own",
        ),
        (
            {"models": [{**MODEL, "hf_repo": "a/b"}]},
            "models[0]: model 'tiny': hf_repo and random are given; keep one",
        ),
        (
            {"models": [{**MODEL, "id": "../up"}]},
            "models[0].id: '../up' cannot name a folder; use letters, digits and . _ + -, a letter "
            "or digit first",
        ),
    ],
)
def test_a_mistake_is_one_line_with_key_value_and_allowed_values(written, change, line):
    assert problems(written(experiment(**change))) == [line]


def test_all_mistakes_are_reported_at_once(written):
    found = problems(written(experiment(sweep={"repetitions": 0}, telemtry={})))
    assert [line.partition(":")[0] for line in found] == ["sweep.repetitions", "telemtry"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "empty; an experiment needs at least experiment and models"),
        ("just text", "'just text' is no mapping; allowed are experiment, models, "),
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1: key 'a' stands here and in line 1; keep one"),
        ("a: [1, 2\nb: 3\n", "line 2, column "),
        ("a: !!python/object:os.system {}\n", "line 1, column 4: could not determine a constr"),
        ("a: 2024-13-45\n", "line 1, column 4: '2024-13-45' is no timestamp"),
        ("a: !!bool maybe\n", "line 1, column 4: 'maybe' is no bool"),
        ("PAR1\x00", "character 4 is '\\x00'; this is no text"),
        ("[" * 5000, "lists or mappings lie too deep in each other"),
    ],
)
def test_a_file_that_is_no_experiment_is_refused_with_its_line(written, text, line):
    (found,) = problems(written(text))
    assert found.startswith(line)


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"name: \xff\xfe")
    assert problems(path) == ["byte 6 is no UTF-8 text"]


def test_a_folder_is_no_experiment(tmp_path):
    assert problems(tmp_path) == ["is a folder; give a YAML file"]


def test_a_missing_file_raises_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.yaml"):
        load_experiment(tmp_path / "nowhere.yaml")


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["experiment", "models", "sweep", "id", "engine", "name", "x"]),
        inner, max_size=4,
    ),
    max_leaves=12,
))  # fmt: skip
def test_no_file_breaks_the_reader(tmp_path_factory, tree):
    """Any YAML file is read, or refused with problems of one line each."""
    path = tmp_path_factory.mktemp("any") / "any.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    problems = ["read"]
    try:
        load_experiment(path)
    except ConfigError as error:
        problems = error.problems
    assert all("\n" not in line for line in problems) and problems


def test_unquoted_dates_are_read_as_text(written):
    text = "experiment: {name: x, date_created: 2024-05-01}\nmodels:\n  - " + str(MODEL)
    assert load_experiment(written(text)).experiment.date_created == "2024-05-01"


def test_a_model_config_in_python_takes_a_path_object(tmp_path):
    model = ModelConfig(id="m", engine=EngineType.LLAMACPP, path=tmp_path / "m.gguf")
    assert model.path == str(tmp_path / "m.gguf")


def test_the_reader_accepts_any_key_of_an_architecture(written):
    """Keys of `random` go to the architecture's configuration, which checks them later."""
    model = {**MODEL, "random": {"architecture": "llama", "hidden_size": 64, "seed": 3}}
    random = load_experiment(written(experiment(models=[model]))).models[0].random
    assert random is not None
    assert (random.seed, random.settings) == (3, {"hidden_size": 64})


# Checks over several sections.


def test_models_with_the_same_id_are_refused(written):
    config = load_experiment(written(experiment(models=[MODEL, MODEL])))
    assert validate_config_semantics(config).errors == [
        "models[1].id: 'tiny' is models[0].id too; the runs would share a folder"
    ]


def test_missing_files_are_named_by_their_key(written, tmp_path):
    llama = {"id": "l", "engine": "llamacpp", "path": str(tmp_path)}
    config = load_experiment(
        written(
            experiment(
                models=[llama, {**llama, "id": "m", "path": "nowhere.gguf"}],
                labeller={"rules_file": "no-rules.yaml"},
                prompts={"source": "no-prompts.txt"},
                output={"base_dir": str(tmp_path / "experiment.yaml")},
            )
        )
    )
    assert validate_model_paths(config).errors == [
        f"models[0].path: {str(tmp_path)!r} is a folder; llamacpp reads a GGUF file",
        "models[1].path: 'nowhere.gguf' is not there",
    ]
    assert [line.partition(":")[0] for line in validate_config_semantics(config).errors] == [
        "output.base_dir", "labeller.rules_file", "prompts.source",
    ]  # fmt: skip


def test_a_collector_that_cannot_see_the_engine(written):
    model = {"id": "l", "engine": "vllm", "hf_repo": "a/b"}
    alone = {"primary": "torch", "fallback": None, "fallback_2": None}
    config = load_experiment(written(experiment(models=[model], collector=alone)))
    assert validate_config_semantics(config).errors == [
        "collector: torch traces engine transformers, not vllm of models[0], and there is no "
        "fallback"
    ]
    config.collector.fallback = CollectorType.MEMRAY
    result = validate_config_semantics(config)
    assert result.is_valid
    assert result.warnings[0].endswith("its runs use memray")


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (b"\xff", "is no YAML"),
        (b"rules: [", "is no YAML"),
        (b"[{region_type: weights}]", "rules[0]: region_type 'weights': one of weight, kv_cache"),
        (b"[{region_type: weight, symbol: x}]", "rules[0]: unknown keys symbol; a rule has"),
    ],
)
def test_rules_that_cannot_be_read_are_reported_before_a_run(written, tmp_path, rules, said):
    (tmp_path / "rules.yaml").write_bytes(rules)
    labeller = {"rules_file": str(tmp_path / "rules.yaml")}
    (error,) = validate_config_semantics(
        load_experiment(written(experiment(labeller=labeller)))
    ).errors
    assert error.startswith(f"labeller.rules_file: {tmp_path / 'rules.yaml'}")
    assert said in error
    assert "\n" not in error


@pytest.mark.parametrize(
    ("random", "said"),
    [
        ({"architecture": "lama"}, "random.architecture: transformers has no 'lama'; did you mean"),
        (
            {"architecture": "llama", "hiden_size": 8},
            "random.hiden_size: no key of llama; near are hidden_size",
        ),
        (
            {"architecture": "llama", "max_position_embeddings": 128},
            "model 'tiny' has 128 positions; context_length 100 and output_tokens 64 need 164",
        ),
    ],
)
def test_settings_that_an_engine_would_refuse_are_reported_before_a_run(written, random, said):
    pytest.importorskip("transformers")
    sweep = {"context_lengths": [8, 100], "output_tokens": [64]}
    config = experiment(models=[{**MODEL, "random": random}], sweep=sweep)
    (error,) = validate_environment(load_experiment(written(config))).errors
    assert error.startswith(f"models[0]: {said}")


def test_a_collector_that_cannot_run_gives_the_reason_and_its_replacement(written):
    pytest.importorskip("transformers")
    collector = {
        "primary": "perf_mem",
        "perf_mem": {"events": ["no-such-event"]},
        "fallback": None,
        "fallback_2": "torch",
    }
    config = experiment(collector=collector, sweep={"context_lengths": [8]})
    result = validate_environment(load_experiment(written(config)))
    assert result.is_valid
    why, instead = result.warnings
    assert why.startswith("collector.primary: perf_mem cannot run here: ")
    assert instead == "collector: runs of transformers will use torch"

    collector["fallback_2"] = None
    result = validate_environment(load_experiment(written(config)))
    assert result.errors == ["collector: none of perf_mem can run here"]


def test_a_large_sweep_is_a_warning(written):
    config = load_experiment(written(experiment(sweep={"repetitions": 1001})))
    result = validate_config_semantics(config)
    assert result.is_valid
    assert result.warnings == ["sweep: 1001 runs, each with a folder of its own"]


# Runs.


def test_run_ids_are_the_parameters_and_the_time():
    assert (
        generate_run_id("llama", 2048, 1, 128, 0, ts="20240501T120000Z")
        == "llama_ctx2048_batch1_out128_rep0_20240501T120000Z"
    )
    assert "_warmup_" in generate_run_id("llama", 2048, 1, 128, 0, warmup=True)


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3),
    st.integers(1, 3), st.integers(0, 3),
)  # fmt: skip
def test_a_sweep_is_every_combination_once_with_warmups_first(
    models, contexts, batches, outputs, repetitions, warmups
):
    config = ExperimentConfig.model_validate(
        experiment(
            models=[{**MODEL, "id": f"m{n}"} for n in range(models)],
            sweep={
                "context_lengths": [8 * (n + 1) for n in range(contexts)],
                "batch_sizes": [n + 1 for n in range(batches)],
                "output_tokens": [4 * (n + 1) for n in range(outputs)],
                "repetitions": repetitions,
                "warmup_runs": warmups,
            },
        )
    )
    runs = expand_sweep(config)
    cells = models * contexts * batches * outputs
    assert len(runs) == cells * (repetitions + warmups)
    assert len({run.run_id for run in runs}) == len(runs)
    for first in range(0, len(runs), repetitions + warmups):
        cell = runs[first : first + repetitions + warmups]
        assert [run.is_warmup for run in cell] == [True] * warmups + [False] * repetitions
        same = {(r.model.id, r.context_length, r.batch_size, r.output_tokens) for r in cell}
        assert len(same) == 1
    assert all(isinstance(run, RunConfig) for run in runs)
    assert runs[0].output_dir == f"results/m0/{runs[0].run_id}"


# Prompts.


def test_prompts_come_with_the_package():
    assert load_prompts() == list(BUILTIN)
    assert len(BUILTIN) == 5


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("p.txt", "one\n\n two \n", [("one", ""), ("two", "")]),
        ("p.jsonl", '{"prompt": "one", "category": "a"}\n', [("one", "a")]),
        ("p.yaml", "a: [one]\nb:\n  - {prompt: two}\n", [("one", "a"), ("two", "b")]),
        ("p.json", '["one",\n\t"two"]', [("one", ""), ("two", "")]),
    ],
)
def test_prompts_from_a_file(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text, encoding="utf-8")
    config = ExperimentConfig.model_validate(
        experiment(prompts={"source": str(tmp_path / name)})
    ).prompts
    assert [(prompt.text, prompt.category) for prompt in load_prompts(config)] == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.txt", "\n", "holds no prompts"),
        ("p.jsonl", "{", "line 1"),
        ("p.jsonl", '{"text": "one"}', "no text under 'prompt'"),
        ("p.yaml", "a: one", "a is no list of texts"),
        ("p.csv", "one", "is none of .txt"),
        ("p.json", "", "p.json: Expecting value: line 1"),
    ],
)
def test_files_that_hold_no_prompts(tmp_path, name, text, message):
    (tmp_path / name).write_text(text, encoding="utf-8")
    config = ExperimentConfig.model_validate(
        experiment(prompts={"source": str(tmp_path / name)})
    ).prompts
    with pytest.raises(ValueError, match=message):
        load_prompts(config)


def test_prompts_that_are_no_text_and_no_file(tmp_path):
    (tmp_path / "p.txt").write_bytes(b"Once \xff")
    config = ExperimentConfig.model_validate(
        experiment(prompts={"source": str(tmp_path / "p.txt")})
    ).prompts
    with pytest.raises(ValueError, match=r"prompts.source: .*p.txt: byte 5 is no UTF-8 text"):
        load_prompts(config)
    config.source = str(tmp_path)
    with pytest.raises(IsADirectoryError, match="is a folder; give a file"):
        load_prompts(config)


def test_categories_choose_among_the_prompts():
    config = ExperimentConfig.model_validate(experiment(prompts={"categories": ["code"]})).prompts
    assert [prompt.category for prompt in load_prompts(config)] == ["code"]
    config.categories = ["poems"]
    with pytest.raises(ValueError, match="'poems' is none of the file's: code, facts"):
        load_prompts(config)
