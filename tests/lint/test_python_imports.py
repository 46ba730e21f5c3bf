"""The rules of the Python code: which part of the package may import which."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "llm_instrumentation"
NAME = PACKAGE.name

# The parts of ours that each part may import. All may import `errors`, and files such as `_files`.
ALLOWED: dict[str, set[str]] = {
    "_native": set(),
    "_pages": set(),
    "memory": set(),
    "core": {"_native", "memory"},
    "core.framework": {"_native", "memory", "probes"},  # it gives a capture its probes
    "core.monitor": {"_native", "_pages", "memory"},  # for the units of its line
    "storage": {"_native", "core"},  # the names of files beside a stream
    "analysis": {"_native", "_pages", "core", "storage"},
    "engines": {"core"},
    "interventions": {"_pages", "analysis", "core"},
    "probes": {"_native", "_pages", "analysis"},
    "timeline": {"_native", "analysis", "core", "probes"},
    "serve": {"_native", "_pages", "analysis"},
    "mrm": {"_native", "_pages"},
    "report": {"_native", "_pages", "analysis", "core", "mrm", "probes", "storage"},
    # Its torch tracer runs compiled models eagerly, as core.
    "mrm.collector": {"_native", "_pages", "core"},
    "utils": {"core"},
    # No other part imports it.
    "cli": {
        *("_native", "_pages", "analysis", "interventions", "probes", "report", "serve"),
        *("storage", "timeline"),
    },
    "cli.trace": {"_pages", "mrm"},
    "mrm.cli": {"cli"},  # a path of mrm-trace
}
# The packages of a plain installation, and those that each extra adds. torch and typer bring
# typing_extensions.
INSTALLED = {NAME, "numpy", "pyarrow", "rich", "torch", "typer", "typing_extensions"}
REPORT = {"cycler", "matplotlib", "pandas", "plotly"}
EXTRAS = {
    "circuits": {"networkx", "scipy"},
    "export": {"datasets", "safetensors"},
    "mrm": {*REPORT, "memray", "psutil", "pydantic", "yaml"},
    "ray": {"ray"},
    "report": REPORT,
    "sae": {"sae_lens", "transformers"},
    "serve": {"starlette", "uvicorn"},
    "storage": {"google_crc32c", "obstore"},
}
# The modules of core that hook models. Reading a capture must not import them.
HOOKS = {"eager", "framework", "gradients", "hooks", "module_hooks", "recorder", "sink", "steps"}
# The parts that may load torch when they are imported, which takes seconds.
TORCH = {
    *("analysis._model_head", "analysis._pool_rows", "analysis._ray_source"),
    *(f"analysis.{name}" for name in ("_recycled", "_shuffled", "_tokens")),
    "analysis.dataset",
    "analysis.similarity",
    *(f"analysis._sae_{name}" for name in ("evaluation", "features", "latents", "logits", "rows")),
    *("analysis._sae_training", "analysis.sparse_autoencoder", "core", "engines"),
    *("interventions", "memory"),
    "mrm.collector",
}


def imported(module: str, source: str, *, is_package: bool = False) -> Iterator[tuple[str, bool]]:
    """The absolute names that a module imports, each with whether it does so when it is loaded."""
    tree = ast.parse(source)
    at_load = set(_at_load(tree.body))
    parent = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node in at_load
        elif isinstance(node, ast.ImportFrom):
            base = parent[: len(parent) - node.level + 1] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            for alias in node.names:
                yield ".".join([*base, alias.name]), node in at_load


def _at_load(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is loaded, without blocks for type checkers."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        for inner in ("body", "orelse", "finalbody"):
            if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from _at_load(getattr(statement, inner, []))


def wrong(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """The imports of a module that the table does not allow."""
    _, part, inside, *_ = [*module.split("."), "", ""]
    here = {part, f"{part}.{inside}"}
    rule = ALLOWED.get(f"{part}.{inside}", ALLOWED.get(part))
    found = []
    for name, at_load in imported(module, source, is_package=is_package):
        if name.split(".")[0] == "torch" and at_load and rule is not None and not here & TORCH:
            found.append(f"{module} imports torch when it is loaded")
        if not name.startswith(f"{NAME}."):
            continue
        used, *rest = name.split(".")[1:]
        if rule is not None and used in ALLOWED and used != part and used not in rule:
            found.append(f"{module} imports {used}")
        if part == "analysis" and used == "core" and rest and rest[0] in HOOKS:
            found.append(f"{module} imports core.{rest[0]}")
    return found


def without_extra(module: str, source: str) -> list[str]:
    """The imports of packages that a plain installation may lack, outside of their extra."""
    tree = ast.parse(source)
    surrounded = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.With):
            used = re.match(r"extra\('(\w+)', ", ast.unparse(node.items[0].context_expr))
            surrounded |= dict.fromkeys(node.body, EXTRAS[used[1]] if used else set())
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            surrounded |= dict.fromkeys(node.body, set().union(*EXTRAS.values()))
    found = []
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [str(node.module)]
        for package in (name.split(".")[0] for name in names):
            if package not in INSTALLED | sys.stdlib_module_names | surrounded.get(node, set()):
                found.append(f"{module} imports {package} without its extra")
    return found


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = [NAME, *path.relative_to(PACKAGE).with_suffix("").parts]
        yield ".".join(part for part in parts if part != "__init__"), path


def test_imports_keep_to_the_table():
    found = list(modules())
    assert {name.split(".")[1] for name, _ in found if "." in name} >= {
        part for part in ALLOWED if "." not in part
    }
    assert [fault for name, path in found for fault in without_extra(name, path.read_text())] == []
    assert [
        fault
        for name, path in found
        for fault in wrong(name, path.read_text(), is_package=path.name == "__init__.py")
    ] == []


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("core.recorder", "from ..probes.capture import CaptureProbes", "probes"),
        ("core.recorder", "def f():\n    from .. import probes", "probes"),
        ("analysis.reader", "from ..core.recorder import Recorder", "core.recorder"),
        ("analysis.reader", "from ..core import recorder", "core.recorder"),
        ("analysis.reader", "from ..interventions.sites import Site", "interventions"),
        ("analysis.reader", "try:\n    import torch.nn\nexcept ImportError: ...", "torch"),
        ("_native.library", "import llm_instrumentation.core.config", "core"),
        ("probes.report", "from ..mrm.schema import RegionType", "mrm"),
        ("mrm.reporter.html", "from ...probes import report", "probes"),
        ("probes.top", "from ..cli import console", "cli"),
        ("mrm.runner", "from ..cli.exit_codes import TraceExitCode", "cli"),
        ("cli.captures", "from ..mrm.config import load_experiment", "mrm"),
        ("cli.captures", "import torch", "torch"),
    ],
)
def test_a_made_up_violation_is_found(module, source, fault):
    (found,) = wrong(f"{NAME}.{module}", source)
    assert fault in found


def test_one_function_writes_sizes_for_people():
    """`units.size` does. A rate or a limit may stand in the unit that its option has."""
    ladder_or_suffix = re.compile(r'"(?:[kKMGT]i?B)", *"|\} ?[kKMGT]i?B\b(?!/s)')
    found = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if ladder_or_suffix.search(path.read_text())
    ]
    assert found == ["_pages/units.py"]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.framework", "from ..probes.capture import CaptureProbes"),
        ("analysis.reader", "def f():\n    import torch"),
        ("analysis.reader", "if TYPE_CHECKING:\n    import torch"),
        ("mrm.reporter.html", "from ..._pages import page\nfrom ..schema import Kind"),
        ("_native.library", "from ..errors import StrapError"),
    ],
)
def test_an_import_that_the_table_allows_is_no_violation(module, source):
    assert wrong(f"{NAME}.{module}", source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pandas as pd",
        "def f():\n    from matplotlib.figure import Figure",
        "try:\n    import psutil\nexcept ImportError: ...",
        "with extra('report', 'A report'):\n    import pandas, yaml",
        "with open('file'):\n    import pandas",
        "import unheard_of.module",
    ],
)
def test_an_import_without_its_extra_is_found(source):
    (found,) = without_extra("module", source)
    assert "without its extra" in found


@pytest.mark.parametrize(
    "source",
    [
        "import os\nimport numpy\nfrom pyarrow import compute\nfrom ..pandas import frame",
        "with extra('report', 'A report'):\n    import matplotlib.figure\n    import pandas",
        "def f():\n    with extra('mrm', 'A run'):\n        import psutil",
        "if TYPE_CHECKING:\n    import pandas as pd",
    ],
)
def test_a_package_inside_its_extra_is_no_violation(source):
    assert without_extra("module", source) == []
