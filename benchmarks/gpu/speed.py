"""The speed that a Llama of 7B parameters keeps while it is captured, and the machine's limits.

Each way of capturing runs a prompt and the tokens after it, in turns with the model alone. The ways
stand in the order of their worth. The first pass over them runs each once. Further passes follow
while there is time. A way that would not end in time is left out, so the last ones are cut first.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _common import clean_folder, disk, stored, sync
from llm_instrumentation import InstrumentationConfig, capture_activations
from torch import Tensor, nn

from .limits import pinned_copies, writes
from .stage import TESTS, Stage

PASSES = 3
_SHM = Path("/dev/shm")


class Workload(NamedTuple):
    batch: int
    prompt: int
    new: int


class Way(NamedTuple):
    """A way to run the model.

    Attributes:
        kind: "alone", "empty hooks", "capture", or "torch.save": hooks that call .cpu() and save.
        modules: "layers" or "all".
        place: "disk" or "tmpfs".
        codec: "none", "lz4", "zstd" or "archive".
    """

    kind: str
    modules: str = ""
    place: str = ""
    codec: str = ""


ALONE = Way("alone")
#: In the order of their worth, for short prompts and batches, and for both.
WAYS = (
    Way("capture", "layers", "disk", "lz4"),
    Way("capture", "layers", "tmpfs", "none"),
    Way("capture", "all", "tmpfs", "none"),
    Way("torch.save", "layers", "disk"),
    Way("empty hooks", "layers"),
    Way("capture", "all", "disk", "lz4"),
    Way("capture", "layers", "disk", "none"),
    Way("capture", "layers", "disk", "zstd"),
    Way("empty hooks", "all"),
    Way("torch.save", "all", "tmpfs"),
    Way("capture", "layers", "disk", "archive"),
)


class Model:
    """The model, its inputs, and how its calls are written in this release of transformers."""

    def __init__(self, stage: Stage) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        sys.path.insert(0, str(TESTS))
        from transformers_cache import CACHE_NAME

        self._cache = CACHE_NAME
        config = LlamaConfig(
            vocab_size=stage.size(32000, 97), hidden_size=stage.size(4096, 32),
            intermediate_size=stage.size(11008, 48), num_hidden_layers=stage.size(32, 2),
            num_attention_heads=stage.size(32, 4), num_key_value_heads=stage.size(32, 4),
        )  # fmt: skip
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(stage.device):
            self.module: nn.Module = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
        self.config = config
        self.layers = self.module.model.layers
        self.device = stage.device

    def hooked(self, modules: str) -> list[tuple[str, nn.Module]]:
        if modules == "all":
            return list(self.module.named_modules())
        return [(f"layers.{number}", layer) for number, layer in enumerate(self.layers)]

    @torch.no_grad()
    def run(self, load: Workload) -> tuple[float, float]:
        """Seconds of the prompt, and of the tokens after it."""
        ids = torch.arange(load.batch * load.prompt, device=self.device) % 91
        torch.cuda.synchronize()
        begun = time.perf_counter()
        output = self.module(ids.view(load.batch, -1), use_cache=True, logits_to_keep=1)
        torch.cuda.synchronize()
        between = time.perf_counter()
        for _ in range(load.new):
            token = output.logits[:, -1:].argmax(-1)
            output = self.module(token, use_cache=True, **{self._cache: output[self._cache]})
        torch.cuda.synchronize()
        return between - begun, time.perf_counter() - between


# ---- ways ----------------------------------------------------------------------------


def _empty(module: nn.Module, args: Any, output: Any) -> None:
    pass


@contextlib.contextmanager
def _hooks(modules: list[tuple[str, nn.Module]], make: Callable[[str], Any]) -> Iterator[None]:
    handles = [module.register_forward_hook(make(name)) for name, module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _saved(modules: list[tuple[str, nn.Module]], folder: Path) -> Iterator[dict[str, Any]]:
    """Copies each tensor with .cpu() in the hook, and saves it to a file of its own."""
    told = {"raw_bytes": 0, "tensors": 0}

    def make(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, Tensor):  # the root returns a mapping
                torch.save(tensor.cpu(), folder / f"{told['tensors']}.pt")
                told["tensors"] += 1
                told["raw_bytes"] += tensor.nbytes

        return hook

    with _hooks(modules, make):
        yield told


@contextlib.contextmanager
def _captured(model: Model, way: Way, folder: Path) -> Iterator[dict[str, Any]]:
    config = InstrumentationConfig.balanced().with_progress(False)
    archive = way.codec == "archive"
    config = config.with_archive() if archive else config.with_compression(way.codec)
    if way.modules == "layers":
        config = config.with_layers(type(model.layers[0]))
    told: dict[str, Any] = {}
    path = folder / ("run.archive" if archive else "run.stream")
    with capture_activations(model.module, path, config=config) as framework:
        yield told
    stats = framework.stats()
    told |= {
        "raw_bytes": stats.raw_bytes, "tensors": stats.tensors, "dropped": stats.dropped,
        "failed": stats.failed, "stall_seconds": round(stats.stall_seconds, 3),
    }  # fmt: skip


@contextlib.contextmanager
def opened(model: Model, way: Way, folder: Path) -> Iterator[dict[str, Any]]:
    """Runs a way inside the block. The end of the block writes what is left to the files."""
    if way.kind == "capture":
        with _captured(model, way, folder) as told:
            yield told
    elif way.kind == "torch.save":
        with _saved(model.hooked(way.modules), folder) as told:
            yield told
    elif way.kind == "empty hooks":
        with _hooks(model.hooked(way.modules), lambda name: _empty):
            yield {}
    else:
        yield {}


def measured(model: Model, way: Way, load: Workload, places: dict[str, Path]) -> dict[str, Any]:
    """Seconds of the model's calls, and until the last byte is on its disk; bytes."""
    gc.collect()
    with clean_folder(places[way.place or "tmpfs"]) as folder:
        begun = time.perf_counter()
        with opened(model, way, folder) as told:
            prompt, tokens = model.run(load)
        if way.place:
            sync(folder)
        whole = time.perf_counter() - begun
        return {
            **way._asdict(), **load._asdict(), "prompt_s": prompt, "tokens_s": tokens,
            "whole_s": whole, "stored_bytes": stored(folder), **told,
        }  # fmt: skip


# ---- the plan ------------------------------------------------------------------------


def main() -> None:
    stage = Stage()
    warnings.simplefilter("ignore", RuntimeWarning)  # "the model waited": a column shows it
    prompt, new = stage.size(2048, 9), stage.size(64, 2)
    one, many = Workload(1, prompt, new), Workload(stage.size(16, 2), prompt, new)
    # All modules of the long prompts would be 155 GB.
    short = many._replace(prompt=stage.size(128, 4))
    model = Model(stage)
    with contextlib.ExitStack() as stack:
        places = {
            "disk": _folder(stack, stage.work),
            "tmpfs": _folder(stack, _SHM if _SHM.is_dir() else stage.work),
        }
        stage.keep(
            model={"parameters": sum(p.numel() for p in model.module.parameters()),
                   "modules": len(list(model.module.modules())), "layers": len(model.layers)},
            disk=disk(places["disk"]), tmpfs=disk(places["tmpfs"]),
        )  # fmt: skip
        size = stage.size(1 << 30, 1 << 20)
        stage.keep(limits={
            "pinned": pinned_copies(stage.device, size),
            **{place: writes(folder, 2 * size) for place, folder in places.items()},
        })  # fmt: skip
        for load in (one, many, short):
            model.run(load)  # warms up, as does a capture
        measured(model, Way("capture", "layers", "tmpfs", "none"), one, places)
        gc.collect()
        gc.freeze()  # the later collections pass over what there is now
        runs: list[dict[str, Any]] = []
        for _ in range(stage.size(PASSES, 1)):
            if not _one_pass(stage, model, places, (one, many, short), runs):
                break
    lost = sum(run.get("failed", 0) + run.get("dropped", 0) > 0 for run in runs)
    stage.keep(failed=lost + len(stage.result.get("errors", [])))


def _folder(stack: contextlib.ExitStack, parent: Path) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(dir=parent, prefix="gpu-")))


def _one_pass(
    stage: Stage, model: Model, places: dict[str, Path], loads: tuple[Workload, ...],
    runs: list[dict[str, Any]],
) -> int:  # fmt: skip
    """Runs each way once, if it ends in time; returns how many ran."""
    one, many, short = loads
    ran = 0
    fresh: dict[Workload, int] = {}  # ways since the model ran alone
    for way in WAYS:
        for load in (one, short if way.modules == "all" else many):
            for kind in (ALONE, way) if fresh.get(load, 2) >= 2 else (way,):
                expected = _expected(runs, kind, load)
                if stage.left() < 1.2 * expected + 3:
                    continue
                ran += 1
                try:
                    runs.append(measured(model, kind, load, places))
                except (
                    Exception
                ) as error:  # no room in a small tmpfs, for one; the others still run
                    traceback.print_exc()
                    errors = [*stage.result.get("errors", []), f"{kind}, {load}: {error!r}"[:300]]
                    stage.keep(errors=errors)
                    continue
                fresh[load] = 0 if kind is ALONE else fresh.get(load, 0) + 1
                stage.keep(runs=runs)
    return ran


def _expected(runs: list[dict[str, Any]], way: Way, load: Workload) -> float:
    """Seconds that a way takes: as before, or four times as long as the model alone."""
    same = [run for run in runs if all(run[k] == v for k, v in load._asdict().items())]
    for wanted, factor in ((way, 1.0), (ALONE, 4.0)):
        seconds = [run["whole_s"] for run in same if run["kind"] == wanted.kind
                   and run["modules"] == wanted.modules and run["codec"] == wanted.codec
                   and run["place"] == wanted.place]  # fmt: skip
        if seconds:
            return factor * statistics.median(seconds)
    return 8.0 if load.batch > 1 else 4.0


if __name__ == "__main__":
    main()
