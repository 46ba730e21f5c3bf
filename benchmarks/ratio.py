"""Measures the size of compressed activations, their error, and the speed on one core.

    python benchmarks/ratio.py [--rounds 5] [--out DIR]

The tensors are the outputs of every module of a trained MiniLM for 8 English texts. libstrap
captures them from modules that return them again, to a file in memory; its time runs from before
the opening of the capture to its close. The other compressors get the bytes of each tensor, as
float32 or as float16 converted before; their time is that of the compression alone. All run on one
core and take turns in every round. Speeds are medians, in 10^6 bytes of float32 per second of CPU
time.

MSE is the mean squared error of the values that are read back, over the whole capture. The
normalised MSE of a packet is its squared error divided by the sum of its squared values. The table
has the median and the largest over all packets.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _one_core  # before the other imports, which start threads
import numpy as np
import torch
from _activations import outputs
from _common import head, keep, machine, plot, table
from capture_peers import add_packages
from llm_instrumentation import ActivationReader, InstrumentationConfig, InstrumentationFramework
from llm_instrumentation.core.config import from_preset
from torch import Tensor, nn

PRESETS = ("fast_capture", "balanced", "max", "max_compression")
Arrays = dict[str, np.ndarray]
Figures = dict[str, Any]


class Replay(nn.Module):
    """Calls one module for each tensor; the module returns the tensor."""

    def __init__(self, tensors: Arrays) -> None:
        super().__init__()
        self.tensors = [torch.from_numpy(array) for array in tensors.values()]
        for number, tensor in enumerate(self.tensors):
            self.add_module(f"t{number}", _Again(tensor))

    def forward(self) -> None:
        for module in self.children():
            module()


class _Again(nn.Module):
    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def forward(self) -> Tensor:
        return self.tensor


# ---- libstrap ---------------------------------------------------------------------


def configurations() -> dict[str, Callable[[], InstrumentationConfig]]:
    ways = {preset: (lambda preset=preset: from_preset(preset)) for preset in PRESETS}
    ways["max_compression, archive"] = lambda: from_preset("max_compression").with_archive()
    return ways


def captured(model: Replay, config: InstrumentationConfig, folder: Path) -> Figures:
    """Captures the tensors once: CPU seconds, stored bytes, and the errors after reading back."""
    path = folder / "a.capture"  # an archive must not end in .stream
    framework = InstrumentationFramework(config.with_progress(False).with_workers(1))
    framework.instrument_model(model)
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # "the model waited"
        with framework.capture_activations(path):
            model()
    seconds = time.process_time() - began
    stats = framework.stats()
    found = {"seconds": seconds, "stored": stats.stored_bytes, "told_mse": stats.mse}
    with ActivationReader(stats.path) as reader:
        back = {f"t{n}": reader[f"t{n}"][0].to_torch().numpy() for n in range(len(model.tensors))}
    originals = {f"t{n}": tensor.numpy() for n, tensor in enumerate(model.tensors)}
    for file in folder.iterdir():
        file.unlink()
    return found | errors(originals, back)


def errors(originals: Arrays, back: Arrays) -> Figures:
    """The MSE over all tensors, and the median and maximum of the tensors' normalised MSE."""
    square_error, values, normalised = 0.0, 0, []
    for name, original in originals.items():
        wanted = original.astype(np.float64)
        off = float(np.square(back[name].astype(np.float64) - wanted).sum())
        power = float(np.square(wanted).sum())
        square_error, values = square_error + off, values + original.size
        if power > 0:
            normalised.append(off / power)
    return {
        "mse": square_error / values,
        "normalised_median": statistics.median(normalised), "normalised_max": max(normalised),
    }  # fmt: skip


# ---- the others -------------------------------------------------------------------


def compressors() -> tuple[dict[str, Callable[[np.ndarray], Any]], list[str]]:
    """Functions that compress an array, by name, and messages about missing packages."""
    missing: list[str] = []
    found: dict[str, Callable[[np.ndarray], Any]] = {}
    for add in (_zstandard, _lz4, _blosc2, _zipnn):
        try:
            found |= add()
        except ImportError as error:
            missing.append(str(error))
    return found, missing


def _zstandard() -> dict[str, Callable[[np.ndarray], Any]]:
    import zstandard

    made = {level: zstandard.ZstdCompressor(level=level) for level in (1, 3)}
    return {
        f"zstd {level}": lambda array, level=level: made[level].compress(array.data.cast("B"))
        for level in made
    }


def _lz4() -> dict[str, Callable[[np.ndarray], Any]]:
    import lz4.frame

    return {"lz4 frame": lambda array: lz4.frame.compress(array.data.cast("B"))}


def _blosc2() -> dict[str, Callable[[np.ndarray], Any]]:
    import blosc2

    blosc2.set_nthreads(1)

    def way(codec: Any, shuffle: Any) -> Callable[[np.ndarray], Any]:
        return lambda array: blosc2.compress(
            array, typesize=array.itemsize, clevel=1, filter=shuffle, codec=codec
        )

    codecs = {"zstd": blosc2.Codec.ZSTD, "lz4": blosc2.Codec.LZ4}
    filters = {"shuffle": blosc2.Filter.SHUFFLE, "bitshuffle": blosc2.Filter.BITSHUFFLE}
    return {
        f"blosc2 {shuffle}, {codec}": way(codecs[codec], filters[shuffle])
        for codec in codecs
        for shuffle in filters
    }


def _zipnn() -> dict[str, Callable[[np.ndarray], Any]]:
    from zipnn import ZipNN

    made = {
        2: ZipNN(bytearray_dtype="float16", input_format="byte", threads=1),
        4: ZipNN(bytearray_dtype="float32", input_format="byte", threads=1),
    }
    return {"zipnn": lambda array: made[array.itemsize].compress(bytearray(array.data.cast("B")))}


def compressed(compress: Callable[[np.ndarray], Any], tensors: Arrays) -> Figures:
    began = time.process_time()
    stored = sum(len(compress(array)) for array in tensors.values())
    return {"seconds": time.process_time() - began, "stored": stored}


# ---- measuring --------------------------------------------------------------------


def measure(tensors: Arrays, rounds: int, folder: Path) -> list[dict[str, Figures]]:
    model = Replay(tensors)
    halves = {name: array.astype(np.float16) for name, array in tensors.items()}
    back = {name: array.astype(np.float32) for name, array in halves.items()}
    others, missing = compressors()
    for reason in missing:
        print(f"left out: {reason}", flush=True)
    own: dict[str, Callable[[], Figures]] = {
        name: (lambda make=make: captured(model, make(), folder))
        for name, make in configurations().items()
    }
    for way in own.values():
        way()  # warms up; an exception here is an error of this package
    ways = dict(own)
    halved = errors(tensors, back)
    for name, compress in others.items():
        ways[f"{name}, float16"] = lambda f=compress: compressed(f, halves) | halved
        ways[f"{name}, float32"] = lambda f=compress: compressed(f, tensors) | EXACT
    for name in [name for name in ways if name not in own]:
        try:
            ways[name]()  # warms up
        except Exception as error:
            print(f"{name}: left out: {type(error).__name__}: {error}", flush=True)
            del ways[name]
    return [{name: way() for name, way in ways.items()} for _ in range(rounds)]


EXACT = {"mse": 0.0, "normalised_median": 0.0, "normalised_max": 0.0}


def summary(rounds: list[dict[str, Figures]], source: int) -> dict[str, dict[str, float]]:
    out = {}
    for name, first in rounds[0].items():
        seconds = statistics.median(one[name]["seconds"] for one in rounds)
        speed = source / seconds / 1e6
        out[name] = {"ratio": source / first["stored"], "speed": speed, **first}
    return out


def show(found: dict[str, dict[str, float]]) -> None:
    rows = [
        [
            name, f"{one['ratio']:.2f}", f"{one['speed']:.0f}", f"{one['mse']:.1e}",
            f"{one['normalised_median']:.1e}", f"{one['normalised_max']:.1e}",
        ]
        for name, one in found.items()
    ]  # fmt: skip
    headings = [
        "contender", "ratio to float32", "MB/s on one core", "MSE", "normalised, median packet",
        "normalised, worst packet",
    ]  # fmt: skip
    print()
    print(table(headings, rows), flush=True)


def draw(found: dict[str, dict[str, float]], axes: Any) -> None:
    for name, one in found.items():
        ours = not name.endswith(("float16", "float32"))
        axes.plot(one["ratio"], one["speed"], "ro" if ours else "k.")
        axes.annotate(name, (one["ratio"], one["speed"]), fontsize=6)
    axes.margins(x=0.2)
    axes.set(xlabel="ratio to float32", ylabel="10^6 bytes a second, one core", yscale="log")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where streams go (/dev/shm or a temporary folder)")
    parser.add_argument("--out", type=Path, help="folder for the plot")
    parser.add_argument("--json", type=Path, help="write the rounds here as well")
    parser.add_argument("--quick", action="store_true", help="a few tensors once: only a test")
    options = parser.parse_args()
    torch.set_num_threads(1)
    add_packages()
    tensors = outputs()
    if options.quick:
        options.rounds, tensors = 1, dict(list(tensors.items())[:5])
    source = sum(array.nbytes for array in tensors.values())
    shm = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=options.folder or shm, prefix="ratio-") as folder:
        told = machine(Path(folder), ("torch", "numpy", "zstandard", "lz4", "blosc2", "zipnn"))
        told["core"] = f"{_one_core.CORE} alone"
        head("Ratio and error", told)
        print(f"{len(tensors)} tensors, {source / 1e6:.1f} MB of float32", flush=True)
        rounds = measure(tensors, options.rounds, Path(folder))
    found = summary(rounds, source)
    show(found)
    keep(options.json, told, {"tensors": len(tensors), "bytes": source}, rounds)
    plot(options.out, "ratio", lambda axes: draw(found, axes), figsize=(9, 6))


if __name__ == "__main__":
    main()
