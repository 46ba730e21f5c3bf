"""Sweeps over runs, and archives of runs."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml
from exported_runs import (
    HOSTILE,
    REGION,
    export,
    metadata,
    reference_names,
)
from llm_instrumentation.mrm.reporter import (
    ManifestError,
    RunExporter,
    export_hf,
    export_zenodo,
    load_sweep,
    write_manifest,
    write_sweep_report,
)
from report_page import Page, check_page
from synthetic_traces import make_trace, reference_tables

pytestmark = pytest.mark.usefixtures("plain_pages")


# ---- sweeps -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sweep_dir(tmp_path_factory) -> Path:
    """A sweep with two context lengths and two repetitions of each.

    The second run with the longer context is contaminated. Of two further runs, one was interrupted
    and one has no trace.
    """
    results = tmp_path_factory.mktemp("sweep") / "results"
    for context, rep, window, validity in (
        (128, 0, 12.0, "clean"), (128, 1, 14.0, "marginal"),
        (512, 0, 20.0, "clean"), (512, 1, 99.0, "contaminated"),
    ):  # fmt: skip
        trace = make_trace(weight_window_s=window, tokens=3)
        export(
            results / "tiny" / f"ctx{context}_rep{rep}", trace, reference_tables(trace),
            context=context, rep=rep, validity=validity, figures=False, report=False,
        )  # fmt: skip
    broken = results / "tiny" / "ctx512_rep2"
    broken.mkdir()
    (broken / "INCOMPLETE").write_text('{"state": "interrupted", "reason": "Ctrl-C"}')
    untraced = results / "tiny" / "untraced"
    untraced.mkdir()
    (untraced / "metadata.json").write_text('{"run_id": "untraced", "trace": {"kind": null}}')
    write_manifest(untraced, "untraced")
    return results


def test_a_sweep_aggregates_the_runs_that_count_and_lists_the_others(sweep_dir):
    sweep = load_sweep(sweep_dir)
    assert [run.run_id for run in sweep.runs] == ["ctx128_rep0", "ctx128_rep1", "ctx512_rep0"]
    reasons = {one.run_id: one.reason for one in sweep.left_out}
    assert reasons == {
        "ctx512_rep1": "contaminated: observer_cpu 31.0 % is too much",
        "ctx512_rep2": "not finished (interrupted: Ctrl-C)",
        "untraced": "no metrics.csv: it has no memory trace",
    }
    assert sweep.varying() == ["context_length"]
    assert sweep.group_by == ["region_type", "context_length"]
    weight = sweep.aggregates.set_index(["region_type", "context_length"]).loc["weight"]
    assert weight["n_runs"].tolist() == [2, 1]
    assert weight["retention_p99_s_mean"].tolist() == [13.0, 20.0]
    assert weight["retention_p99_s_min"].tolist() == [12.0, 20.0]
    assert weight["retention_p99_s_max"].tolist() == [14.0, 20.0]
    assert weight["suitability"].tolist() == ["high_mrm", "high_mrm"]


def test_runs_can_be_grouped_by_chosen_columns(sweep_dir):
    by_type = load_sweep(sweep_dir, ["region_type"]).aggregates.set_index("region_type")
    assert by_type.index.tolist() == ["weight", "kv_cache", "activation", "runtime"]
    assert by_type.loc["weight", "n_runs"] == 3
    assert by_type.loc["weight", "retention_p99_s_max"] == 20.0  # the contaminated run has 99
    assert by_type.loc["kv_cache", "suitability"] == "high_mrm"
    with pytest.raises(ValueError, match="'weather' is none of region_type, model"):
        load_sweep(sweep_dir, ["weather"])
    with pytest.raises(FileNotFoundError):
        load_sweep(sweep_dir / "none")


def test_a_folder_without_runs_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run"):
        write_sweep_report(tmp_path, tmp_path / "reports")
    assert not (tmp_path / "reports").exists()


@pytest.mark.figures
def test_a_sweep_report_stands_alone(sweep_dir, tmp_path):
    path = write_sweep_report(sweep_dir, tmp_path / "out", formats=("png", "pdf"))
    assert path == tmp_path / "out" / "report.html"
    text = check_page(path.read_text()).text
    for said in (
        "Memory traces: minimal", "runs that count 3", "marginal ! 1",
        "high_mrm in 3 of 3 runs", "13 s (12 s to 14 s)", "Ctrl-C",
        "contaminated: observer_cpu 31.0 % is too much", "no metrics.csv",
    ):  # fmt: skip
        assert said in text, said
    assert "99 s" not in text
    out = tmp_path / "out"
    assert {p.name for p in out.iterdir()} == {
        "report.html", "aggregates.csv", "metrics.csv", "by_context_length.png",
        "by_context_length.pdf", "runs",
    }  # fmt: skip
    found = pd.read_csv(out / "metrics.csv")
    assert set(found["run_id"]) == {"ctx128_rep0", "ctx128_rep1", "ctx512_rep0"}
    assert len(pd.read_csv(out / "aggregates.csv")) == 8
    links = [a["href"] for t, a in Page(path.read_text()).elements if t == "a"]
    assert len(links) == 6
    for link in links:
        check_page((out / link).read_text())


def test_groups_that_mix_runs_say_so(sweep_dir, tmp_path):
    path = write_sweep_report(sweep_dir, tmp_path, group_by=["region_type"])
    assert "Groups mix runs of different context_length" in check_page(path.read_text()).text


def test_a_sweep_without_a_run_that_counts_has_a_report(tmp_path, trace, tables):
    results = tmp_path / "results"
    export(results / "run_1", trace, tables, validity="contaminated", figures=False)
    text = check_page(write_sweep_report(results, tmp_path / "out").read_text()).text
    assert "No run counts" in text and "contaminated" in text


def test_a_damaged_run_does_not_count(run_dir, tmp_path):
    (run_dir / "metrics.csv").write_text("region_type\n")
    sweep = load_sweep(run_dir)
    assert sweep.runs == []
    assert "metrics.csv: its size is" in sweep.left_out[0].reason


@pytest.mark.figures
def test_names_in_a_sweep_are_escaped(tmp_path, trace, tables):
    name = "<b>&\"' run"
    ten = {name: tables[name] for name in reference_names()}
    results = tmp_path / "results"
    for number in range(2):
        folder = results / f"{number}" / name
        export(folder, trace, ten, model=f"{HOSTILE}{number}", figures=False, report=False)
    path = write_sweep_report(results, tmp_path / "out")
    page = check_page(path.read_text())
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert len(set(links)) == 2
    assert all((tmp_path / "out" / link).is_file() for link in links)


# ---- archives ---------------------------------------------------------------------------


def bytes_below(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def card_of(folder: Path) -> dict:
    _, header, _ = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(header)


def test_a_hugging_face_data_set(sweep_dir, tmp_path):
    """The export has a card whose configurations name existing files."""
    result = export_hf(sweep_dir, tmp_path / "hf", license="cc-by-4.0")
    assert result.runs == ["ctx128_rep0", "ctx128_rep1", "ctx512_rep0", "ctx512_rep1", "untraced"]
    assert result.left_out == {"ctx512_rep2": "not finished (interrupted: Ctrl-C)"}
    assert result.files == len(bytes_below(tmp_path / "hf"))
    card = card_of(tmp_path / "hf")
    assert card["license"] == "cc-by-4.0"
    configs = {one["config_name"]: one for one in card["configs"]}
    assert configs.keys() >= {
        "trace", "runs", "metrics", "region_map", "kv_block_lifecycle", "retention_summary",
    }  # fmt: skip
    assert [name for name, one in configs.items() if one.get("default")] == ["metrics"]
    for one in card["configs"]:
        for file in one["data_files"]:
            assert list((tmp_path / "hf").glob(file["path"])), file
    splits = [file["split"] for file in configs["trace"]["data_files"]]
    assert splits == ["clean", "marginal", "contaminated"]


def test_its_tables_keep_their_rows_and_name_their_runs(sweep_dir, tmp_path):
    export_hf(sweep_dir, tmp_path / "hf")
    data = tmp_path / "hf" / "data"
    metrics = pq.read_table(data / "metrics" / "clean.parquet").to_pylist()
    assert {row["run_id"] for row in metrics} == {"ctx128_rep0", "ctx512_rep0"}
    assert {row["context_length"] for row in metrics} == {128, 512}
    regions = pq.read_table(data / "region_map" / "clean.parquet").to_pylist()
    assert regions == [{"run_id": run, **REGION} for run in ("ctx128_rep0", "ctx512_rep0")]
    copied = data / "trace" / "contaminated" / "00000.parquet"
    original = sweep_dir / "tiny" / "ctx512_rep1" / "trace.parquet"
    assert copied.read_bytes() == original.read_bytes()
    runs = pq.read_table(data / "runs" / "unmeasured.parquet").to_pylist()
    assert json.loads(runs[0]["metadata"]) == {"run_id": "untraced", "trace": {"kind": None}}


def test_archives_of_the_same_runs_are_the_same(sweep_dir, tmp_path):
    copied = Path(shutil.copytree(sweep_dir, tmp_path / "elsewhere" / "results"))
    export_hf(sweep_dir, tmp_path / "a")
    export_hf(copied, tmp_path / "b")
    assert bytes_below(tmp_path / "a") == bytes_below(tmp_path / "b")
    one = export_zenodo(sweep_dir, tmp_path / "one.zip")
    other = export_zenodo(copied, tmp_path / "other.zip")
    assert one.path.read_bytes() == other.path.read_bytes()


def test_an_archive_for_zenodo(sweep_dir, tmp_path):
    """The zip has metadata for Zenodo and a checksum of each file."""
    result = export_zenodo(sweep_dir, tmp_path / "dist", license="cc-by-4.0")
    assert result.path == tmp_path / "dist" / "minimal.zip"
    with zipfile.ZipFile(result.path) as archive:
        assert archive.testzip() is None
        assert len(archive.namelist()) == result.files
        about = json.loads(archive.read("minimal/.zenodo.json"))
        sums = archive.read("minimal/SHA256SUMS").decode().splitlines()
        found = {
            name.removeprefix("minimal/"): hashlib.sha256(archive.read(name)).hexdigest()
            for name in archive.namelist()
        }
    assert about["upload_type"] == "dataset"
    assert about["creators"] == [{"name": "A. Person", "affiliation": "A House"}]
    assert about["license"] == "cc-by-4.0"
    assert about["version"] == "1.0.0"
    stated = dict(reversed(line.split("  ", 1)) for line in sums)
    assert stated == {
        name: digest
        for name, digest in found.items()
        if name not in (".zenodo.json", "README.md", "SHA256SUMS")
    }
    assert "runs/tiny/ctx128_rep0/trace.parquet" in stated
    assert not any("ctx512_rep2" in name for name in stated)


def test_raw_files_are_packed_on_request(run_dir, tmp_path):
    (run_dir / "raw").mkdir()
    (run_dir / "raw" / "perf_script.txt").write_text("a line\n" * 1000)
    without = export_zenodo(run_dir, tmp_path / "a.zip")
    raw = export_zenodo(run_dir, tmp_path / "b.zip", include_raw=True)
    assert raw.files == without.files + 1
    with zipfile.ZipFile(raw.path) as archive:
        text = archive.read("minimal/runs/run_1/raw/perf_script.txt")
    assert text == b"a line\n" * 1000


@pytest.mark.parametrize("pack", [export_hf, export_zenodo])
def test_a_run_that_differs_from_its_manifest_is_not_packed(run_dir, tmp_path, pack):
    (run_dir / "trace.parquet").write_bytes(b"PAR1")
    with pytest.raises(ManifestError, match=r"trace\.parquet: its size is 4 bytes") as caught:
        pack(tmp_path / "tiny", tmp_path / "out.zip")
    assert [one.path for one in caught.value.differences] == ["trace.parquet"]
    assert not (tmp_path / "out.zip").exists()


@pytest.mark.parametrize("pack", [export_hf, export_zenodo])
def test_without_a_finished_run_there_is_nothing_to_pack(tmp_path, pack):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "INCOMPLETE").write_text("{}")
    with pytest.raises(FileNotFoundError, match="no finished run.*not finished"):
        pack(tmp_path / "results", tmp_path / "out.zip")


def test_a_folder_that_holds_something_is_not_overwritten(finished, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="choose another"):
        export_hf(finished, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    assert export_hf(finished, tmp_path / "empty").runs == ["run_1"]


def test_an_export_follows_no_link_beside_its_folder(finished, tmp_path):
    """A link under the name that the export might use while it writes is left alone."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (tmp_path / "hf.partial").symlink_to(mine)
    export_hf(finished, tmp_path / "hf")
    assert list(mine.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "hf.partial", "mine"]


def test_names_in_a_card_are_escaped(tmp_path, trace, tables):
    name = "<script>|`x`"
    told = metadata(name, model="a | b <img src=x>")
    told["experiment"] = {"name": "---\nlicense: mit\n---", "description": "# not a heading\n<b>"}
    RunExporter(tmp_path / "run").export(trace, [], [], tables, metadata=told, figures=False)
    export_hf(tmp_path / "run", tmp_path / "hf")
    card = card_of(tmp_path / "hf")
    assert "license" not in card
    text = (tmp_path / "hf" / "README.md").read_text().split("---\n", 2)[2]
    assert "<script>" not in text and "<img" not in text and "<b>" not in text
    row = next(line for line in text.splitlines() if "&lt;script&gt;" in line)
    assert row.replace("\\|", "").count("|") == 8  # seven cells
