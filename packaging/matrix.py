"""Runs the quick start and the tests nearest to Python and torch on several releases of them.

    python packaging/matrix.py [ROW ...]

Each row of the table has an environment of its own, with a wheel of this checkout: first with
what the wheel needs, then with EXTRAS. In the row `oldest` each direct dependency has the lowest
release that pyproject.toml promises. A row stays as it was where it is not chosen, or where the
machine lacks its Python. The table is benchmarks/results/matrix.md. uv's cache keeps 5 GB for each
release of torch.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "benchmarks" / "results" / "matrix.md"
EXTRAS = {"circuits", "examples", "export", "mrm", "report", "serve"}
# What the tests themselves need. Of these the newest release is taken in every row.
TOOLS = [
    "duckdb", "hypothesis", "lz4", "polars", "pytest", "pytest-benchmark", "pytest-timeout",
    "pytest-xdist", "zstandard",
]  # fmt: skip
TESTS = {
    "unit tests": ["tests/unit"],
    "hooks": ["tests/integration/hooks"],
    "compiled": [
        "tests/integration/test_compile.py",
        "tests/integration/test_compiled_captures.py",
    ],
}
SHOWN = ("torch", "transformers", "numpy", "pyarrow", "pandas")
# Our own lines must not rely on what numpy, torch or pyarrow will change.
STRICT = [
    "-W", "error::FutureWarning:llm_instrumentation",
    "-W", "error::DeprecationWarning:llm_instrumentation",
]  # fmt: skip

# Runs with what the wheel needs.
CAPTURE = """
import torch
from torch import nn
from llm_instrumentation import ActivationReader, InstrumentationConfig, annotate
from llm_instrumentation import capture_activations

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, input_ids, attention_mask):
        return self.head(self.embed(input_ids))

model = Model()
ids = torch.randint(50, (2, 5))
mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
config = InstrumentationConfig.balanced().with_float32()
with torch.no_grad(), capture_activations(model, "run.stream", config=config) as framework:
    with annotate(document=["a", "b"]):
        model(ids, attention_mask=mask)
assert framework.stats().packets == 3 and framework.stats().lost_calls == 0
with ActivationReader("run.stream") as reader:
    rows = reader.rows("embed")
    assert rows.column("token_id").tolist() == ids[mask == 1].tolist()
    assert rows.column("position").tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert torch.equal(rows.to_torch(), model.embed(ids)[mask == 1])
"""


class Row(NamedTuple):
    python: str
    resolution: str


ROWS = {
    "oldest": Row("3.10", "lowest-direct"),
    "3.10": Row("3.10", "highest"),
    "3.12": Row("3.12", "highest"),
    "3.13": Row("3.13", "highest"),
    "3.14": Row("3.14", "highest"),
}


def interpreter(version: str) -> Path | None:
    """A Python of this version on the PATH or among those of pyenv."""
    found = [Path(one) for one in [shutil.which(f"python{version}")] if one]
    found += Path.home().glob(f".pyenv/versions/{version}.*/bin/python3")
    for python in found:
        # A shim of pyenv is there even where its version is not chosen.
        if subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
            return python
    return None


def requirements(wheel: Path, extras: set[str]) -> list[str]:
    """What a wheel and its extras need. uv takes the lowest only of what is given to it."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    found = set()
    for needed in re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE):
        release, _, marker = needed.partition(";")
        extra = re.search(r"extra == '(\w+)'", marker)
        if (not extra or extra[1] in extras) and not release.startswith("llm"):
            found.add(release.strip())
    return sorted(found)


def command(*arguments: str | Path) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, arguments))}\n{done.stdout}{done.stderr}")
    return done.stdout


def captures(python: Path, program: str, packets: int, folder: Path) -> str:
    """Runs a program that captures, and looks at its capture with `strap`."""
    lines: list[list[str | Path]] = [
        [python, *STRICT, "-c", program],
        [python, *STRICT, python.with_name("strap"), "info", "--json", "run.stream"],
    ]
    for line in lines:
        done = subprocess.run(line, cwd=folder, capture_output=True, text=True)
        if done.returncode != 0:
            print(done.stdout + done.stderr)
            return "fails"
    return "runs" if json.loads(done.stdout)["packets"] == packets else "fails"


def tests(python: Path, files: list[str], folder: Path) -> str:
    """How many tests passed, as a cell of the table. What failed is printed."""
    report = folder / "report.xml"
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider",
         "--continue-on-collection-errors", f"--junitxml={report}", *files],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if not report.exists():
        raise SystemExit(done.stdout + done.stderr)
    (suite,) = ElementTree.parse(report).getroot()
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    skipped = int(suite.attrib["skipped"])
    if failed:
        print("\n".join(re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE)))
    passed = int(suite.attrib["tests"]) - failed - skipped
    return (
        f"{passed} passed"
        + f", {skipped} skipped" * bool(skipped)
        + (f", **{failed} failed**" * bool(failed))
    )


def cells(row: Row, wheel: Path, folder: Path) -> dict[str, str]:
    """The cells of a row; none if the machine has no such Python."""
    found = interpreter(row.python)
    if found is None:
        return {}
    uv = [sys.executable, "-m", "uv", "--quiet"]
    command(*uv, "venv", "--python", found, folder / "env")
    python = folder / "env" / "bin" / "python"
    install: list[str | Path] = [*uv, "pip", "install", "--python", python]
    releases = ["--resolution", row.resolution]
    command(*install, *releases, *requirements(wheel, set()), wheel)
    plain = captures(python, CAPTURE, 3, folder)
    command(*install, *releases, *requirements(wheel, EXTRAS), wheel)
    command(*install, *TOOLS)
    told = dict(
        line.split("==")
        for line in command(*uv, "pip", "freeze", "--python", python).splitlines()
        if line.partition("==")[0] in SHOWN
    )
    made = {"Python": command(python, "-V").split()[1], **{name: told[name] for name in SHOWN}}
    made["day"] = datetime.date.today().isoformat()
    made["plain install"] = plain
    (block,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    made["quick start"] = captures(python, block, 114, folder)
    return made | {name: tests(python, files, folder) for name, files in TESTS.items()}


def main() -> None:
    chosen = sys.argv[1:] or list(ROWS)
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    heads = ["", "day", "Python", *SHOWN, "plain install", "quick start", *TESTS]
    text = TABLE.read_text() if TABLE.exists() else ""
    lines = {name: line for line, name in re.findall(r"^([|] (\S+) [|] 2.*)", text, re.MULTILINE)}
    with tempfile.TemporaryDirectory() as folder:
        command(sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT)
        (wheel,) = Path(folder).glob("*.whl")
        for name in chosen:
            with tempfile.TemporaryDirectory() as within:
                made = cells(ROWS[name], wheel, Path(within))
            if not made:
                print(f"{name}: no Python {ROWS[name].python} here", flush=True)
                continue
            lines[name] = f"| {' | '.join([name, *(made[head] for head in heads[1:])])} |"
            print(lines[name], flush=True)
    table = [
        f"| {' | '.join(heads)} |",
        f"|{' --- |' * len(heads)}",
        *(lines[name] for name in ROWS if name in lines),
    ]
    TABLE.write_text(
        "# Releases that it was tested with\n\n"
        "Measured by `make matrix`. In `oldest` each direct dependency has the lowest release\n"
        "that pyproject.toml promises; in the others the newest. *plain install* is a capture of\n"
        "a small model without extras. Tests of what a release lacks are skipped.\n\n"
        + "".join(f"{line}\n" for line in table)
    )
    sys.exit(any("fail" in line for line in table))


if __name__ == "__main__":
    main()
