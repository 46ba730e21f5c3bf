"""The rules of the Python code: which part of the package may import which."""

from __future__ import annotations

import ast
import re
import sys

import pytest
from python_modules import NAME, PACKAGE, imported, modules

# The parts of ours that each part may import. All may import `errors`, and files such as `_files`.
# A line for a part of another one replaces its line.
ALLOWED: dict[str, set[str]] = {
    "_native": set(),
    "_pages": set(),
    "memory": set(),
    "progress": {"_native", "_pages"},
    "core": {"_native", "memory"},
    # Documented paths of 1.3.1 and of mrm-trace. Nothing else imports `compat`.
    **{
        f"core.{name}": {"compat"}
        for name in ("auto_detect", "compression", "hooks", "profiling", "streaming")
    },
    "core.framework": {"_native", "memory", "probes"},  # it gives a capture its probes
    "core.recording": {"_native", "memory", "_pages", "progress"},
    "storage": {"_native", "core"},  # the names of files beside a stream
    "analysis": {"_native", "_pages", "core", "progress", "storage"},
    "engines": {"core"},
    "interventions": {"_pages", "analysis", "core", "progress"},
    "probes": {"_native", "_pages", "analysis"},
    "timeline": {"_native", "analysis", "core", "probes"},
    "serve": {"_native", "_pages", "analysis"},
    "mrm": {"_native", "_pages", "progress"},
    # Its torch tracer runs compiled models eagerly, as core.
    "mrm.collector": {"_native", "_pages", "core", "progress"},
    "report": {"_native", "_pages", "analysis", "core", "mrm", "probes", "progress", "storage"},
    "memory.async_writer": {"compat"},
    "memory.ring_buffer": {"compat"},
    "analysis.visualization": {"compat"},
    **{f"mrm.labeller.{name}": {"compat"} for name in ("address_tracker", "kv_lifecycle")},
    **{f"mrm.parser.{name}": {"compat"} for name in ("normalizer", "schema")},
    **{f"mrm.utils.{name}": {"compat"} for name in ("files", "logging")},
    "compat": {"_native", "_pages", "analysis", "core", "memory"},
    "compat.mrm": {"mrm"},
    "utils": {"core"},
    # No other part imports it.
    "cli": {
        *("_native", "_pages", "analysis", "interventions", "probes", "progress"),
        *("report", "serve", "storage", "timeline"),
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
    "lightning": {"lightning"},
    "mrm": {*REPORT, "memray", "psutil", "pydantic", "yaml"},
    "probing": {"sklearn"},
    "ray": {"ray"},
    "report": REPORT,
    "sae": {"sae_lens", "transformers"},
    "serve": {"starlette", "uvicorn"},
    "storage": {"google_crc32c", "obstore"},
    "trainer": {"transformers"},
}
# The parts of core that hook models. Reading a capture must not import them.
HOOKS = {"core.framework", "core.hooking", "core.hooks", "core.recording"}
# The parts that may load torch when they are imported, which takes seconds.
TORCH = {
    *("analysis._model_head", "analysis.dataset", "analysis.neurons.frozen_head"),
    *("analysis.sae", "analysis.similarity"),
    *("analysis.sparse_autoencoder", "analysis.token_rows.dataset_tokens", "analysis.training"),
    *("compat", "core", "engines", "interventions", "memory", "mrm.collector"),
}


def parts_of(module: str) -> list[str]:
    """The parts of the package that a module belongs to, the smallest first."""
    names = module.split(".")[1:]
    return [".".join(names[:count]) for count in range(len(names), 0, -1)]


def wrong(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """The imports of a module that the table does not allow."""
    here = parts_of(module) or [""]
    rule = next((ALLOWED[part] for part in here if part in ALLOWED), None)
    found = []
    for name, at_load, _ in imported(module, source, is_package=is_package):
        if name.split(".")[0] == "torch" and at_load and rule is not None and not TORCH & {*here}:
            found.append(f"{module} imports torch when it is loaded")
        if not name.startswith(f"{NAME}."):
            continue
        used = parts_of(name)
        if rule is not None and used[-1] in ALLOWED and used[-1] not in {*rule, here[-1]}:
            found.append(f"{module} imports {used[-1]}")
        if here[-1] == "analysis" and HOOKS & {*used}:
            found.append(f"{module} imports {name}")
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
        ("core.recording.recorder", "from ...probes.capture import CaptureProbes", "probes"),
        ("core.recording.recorder", "def f():\n    from ... import probes", "probes"),
        ("analysis.reader", "from ..core.recording.recorder import Recorder", "core.recording"),
        ("analysis.reader", "from ..core import recording", "core.recording"),
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
