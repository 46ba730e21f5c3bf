"""A plain installation, with the oldest and the newest releases that it promises to run on."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Our own lines must not rely on what numpy, torch or pyarrow will change.
STRICT = ["-W", "error::FutureWarning:llm_instrumentation", "-W"]
STRICT += ["error::DeprecationWarning:llm_instrumentation"]

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
with torch.no_grad(), capture_activations(model, "ids.stream", config=config) as framework:
    with annotate(document=["a", "b"]):
        model(ids, attention_mask=mask)
assert framework.stats().packets == 3 and framework.stats().lost_calls == 0
with ActivationReader("ids.stream") as reader:
    rows = reader.rows("embed")
    assert rows.column("token_id").tolist() == ids[mask == 1].tolist()
    assert rows.column("position").tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert torch.equal(rows.to_torch(), model.embed(ids)[mask == 1])
"""


def interpreter(versions: list[str]) -> Path | None:
    """The first of some Python versions that is on the PATH or among those of pyenv."""
    for version in versions:
        found = [Path(one) for one in [shutil.which(f"python{version}")] if one]
        found += Path.home().glob(f".pyenv/versions/{version}.*/bin/python3")
        for python in found:
            # A shim of pyenv is there even where its version is not chosen.
            if subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
                return python
    return None


@pytest.fixture
def environment(tmp_path):
    """A folder that takes 5 GB, so it goes with the test."""
    yield tmp_path / "env"
    shutil.rmtree(tmp_path / "env", ignore_errors=True)


@pytest.mark.parametrize(
    ("pythons", "releases"),
    [(["3.10"], "lowest-direct"), (["3.14", "3.13", "3.12"], "highest")],
    ids=["oldest", "newest"],
)
def test_the_quick_start_runs(wheel, run, root, environment, pythons, releases):
    """First with the base dependencies alone, then with those of the examples."""
    found = interpreter(pythons)
    if found is None:
        pytest.skip(f"no Python {' or '.join(pythons)} on this machine")
    uv = [sys.executable, "-m", "uv", "--quiet", "--no-cache"]
    folder = environment.parent
    run(*uv, "venv", "--python", found, environment)
    install = [*uv, "pip", "install", "--python", environment, "--resolution", releases]
    program = [environment / "bin" / "python", *STRICT]

    run(*install, wheel)
    for absent in ("pandas", "transformers"):
        assert not list(environment.glob(f"lib/*/site-packages/{absent}"))
    run(*program, "-c", CAPTURE, cwd=folder)
    told = run(*program, environment / "bin" / "strap", "info", "ids.stream", cwd=folder)
    assert "layers      3" in told

    run(*install, f"{wheel}[examples]")
    (block,) = re.findall(r"^```python\n(.*?)^```$", (root / "README.md").read_text(), re.M | re.S)
    told = run(*program, "-c", block, cwd=folder, env={"HF_HUB_OFFLINE": "1"})
    assert told.startswith("114 packets")
