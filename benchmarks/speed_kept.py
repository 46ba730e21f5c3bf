"""Measures the speed that a model keeps while every module's output is captured.

    python benchmarks/speed_kept.py [--rounds 5] [--out DIR] [--contenders NAME ...]

A random-weight Llama of 8 layers, 768 wide, runs prefills of 256 tokens and greedy generations of
32 tokens. Each round runs every contender for many passes in one capture, and the model alone
before and after each contender. The speed kept is the time alone (the mean of before and after)
divided by the time with the contender. "flight recorder" keeps the last steps in the memory that a
capture has, and writes nothing; "flight recorder in a file" keeps them in a file in /dev/shm, and
"with outliers" also looks at magnitudes. "during a dump" writes a full ring of --dump-gb meanwhile,
in bursts alone. The table has medians and ranges over the rounds. The contender "nothing" is the
model alone again; its range shows the noise.

"sustained" measures from before the opening of the capture to its close. Its memory limit is a
small part of the captured bytes (column "over memory"). With --sync the time also includes the
writing to the disk. "burst" measures the model's own time. Its memory limit has room for all
tensors, so the file is written after the model is done. No result is a failure.

To use several quiet moments of a machine, run it with --json FILE --more: that adds rounds to those
of the earlier runs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _common import head, keep, kept_rounds, machine, plot, spread, table
from capture_peers import PEERS
from capture_peers.apart import Apart, peers
from capture_peers.contender import (
    Absent,
    Contender,
    Figures,
    Running,
    build,
    hooks,
    run_passes,
    tensors,
)
from llm_instrumentation import InstrumentationFramework
from llm_instrumentation.core.config import from_preset
from llm_instrumentation.flight import flight_recorder
from torch import Tensor, nn

DURING_A_DUMP = "during a dump"  # not by default, because its file is large
FLIGHT = ("flight recorder", "flight recorder in a file", "with outliers", DURING_A_DUMP)
PRESETS = ("fast_capture", "balanced", "max_compression")
WORKLOADS = ("prefill", "generation")
MODES = ("sustained", "burst")
_RING_VALUES = 24 << 20
_BURST_GB = 0.6  # more than one burst captures
QUICK_PEERS = ("numpy_tofile", "torch_save", "safetensors_files")  # these need no extra process
Round = dict[str, Figures]  # by contender
Way = Contender | Apart


# ---- contenders -------------------------------------------------------------------


@contextlib.contextmanager
def _nothing(model: nn.Module, folder: Path, memory: float | None) -> Iterator[Running]:
    yield Running(model)


def _do_nothing(module: nn.Module, args: Any, output: Any) -> None:
    pass


@contextlib.contextmanager
def _empty_hooks(model: nn.Module, folder: Path, memory: float | None) -> Iterator[Running]:
    with hooks(model, lambda name: _do_nothing):
        yield Running(model)


@contextlib.contextmanager
def _float16_in_memory(model: nn.Module, folder: Path, memory: float | None) -> Iterator[Running]:
    """The least work that stores float16: PyTorch converts into a ring of 48 MB in memory."""
    ring, at = torch.empty(_RING_VALUES, dtype=torch.float16), 0

    def convert(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal at
        for tensor in tensors(output):
            n = tensor.numel()
            if at + n > _RING_VALUES:
                at = 0
            ring[at : at + n].copy_(tensor.reshape(-1))
            at += n

    with hooks(model, lambda name: convert):
        yield Running(model)


@contextlib.contextmanager
def _preset(model: nn.Module, preset: str, folder: Path, memory: float | None) -> Iterator[Running]:
    config = from_preset(preset).with_progress(False)
    if memory is not None:
        config.with_memory_limit(memory)
    else:
        config.with_burst(_BURST_GB)
    framework = InstrumentationFramework(config)
    framework.instrument_model(model)
    running = Running(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # "the model waited": a column shows it
        with framework.capture_activations(folder / "run.stream"):
            yield running
    stats = framework.stats()
    if stats.dropped or stats.failed:
        raise SystemExit(f"{preset}: {stats.dropped} tensors dropped, {stats.failed} failed")
    running.told = {
        "stalls": stats.stalls, "stall_seconds": stats.stall_seconds, "ratio": stats.ratio,
        # raw_bytes counts float32, which is staged as float16.
        "over_memory": stats.raw_bytes / 2 / stats.memory_limit,
    }  # fmt: skip


@contextlib.contextmanager
def _flight(model: nn.Module, folder: Path, memory: float | None, **more: Any) -> Iterator[Running]:
    """All triggers are on, but for outliers perhaps, and none comes."""
    with flight_recorder(
        model, folder / "flight", memory_gb=_BURST_GB if memory is None else memory,
        condition=lambda output: None, signal=signal.SIGUSR1, **more,
    ) as recorder:  # fmt: skip
        yield Running(model)
        stats = recorder.stats()
    if stats.dropped or stats.failed or recorder.dumps:
        raise SystemExit(f"flight recorder: {stats}")


@contextlib.contextmanager
def _during_a_dump(
    model: nn.Module, gb: float, ids: Tensor, folder: Path, memory: float | None
) -> Iterator[Running]:
    """A full ring is being written while the model runs, and all that it returns meanwhile, too."""
    recorder = flight_recorder(model, folder / "flight", memory_gb=gb, after=1_000_000)
    running = Running(model)
    with recorder:
        while not recorder.stats().gone_steps:
            running.prefill(ids)
        began = time.perf_counter()
        recorder.dump("measured")
        yield running
        during = time.perf_counter() - began
        recorder.stop()
        whole = time.perf_counter() - began
    (dump,) = recorder.dumps
    if dump.problem:
        raise SystemExit(f"{DURING_A_DUMP}: {dump.problem}")
    running.told = {"dumped_for": during, "dump_seconds": whole}


def contenders(model: nn.Module, options: argparse.Namespace) -> list[Contender]:
    ids = torch.randint(1, 32000, (1, options.length), generator=torch.Generator().manual_seed(2))
    return [
        Contender("nothing", functools.partial(_nothing, model)),
        Contender("empty hooks", functools.partial(_empty_hooks, model)),
        Contender("float16 in memory", functools.partial(_float16_in_memory, model)),
        *(Contender(preset, functools.partial(_preset, model, preset)) for preset in PRESETS),
        Contender("flight recorder", functools.partial(_flight, model)),
        Contender(
            "flight recorder in a file",
            functools.partial(_flight, model, ring_file=f"/dev/shm/strap-speed-kept-{os.getpid()}"),
        ),
        Contender("with outliers", functools.partial(_flight, model, outlier=100.0)),
        Contender(DURING_A_DUMP, functools.partial(_during_a_dump, model, options.dump_gb, ids)),
    ]


# ---- measuring --------------------------------------------------------------------


def _alone(running: Running, workload: str, ids: Tensor, passes: int, pause: float) -> float:
    """Seconds per pass of the model alone, after a pause in which the last contender ends."""
    time.sleep(pause)
    run_passes(running, workload, ids, 1)
    return run_passes(running, workload, ids, passes) / passes


def one_round(
    number: int, model: nn.Module, ways: list[Way], workload: str, mode: str,
    options: argparse.Namespace, parent: Path,
) -> Round:  # fmt: skip
    """Runs each contender once, and the model alone before and after it."""
    passes = getattr(options, f"{workload}_passes" if mode == "sustained" else "burst_passes")
    memory = getattr(options, f"{workload}_memory") if mode == "sustained" else None
    length = options.length if workload == "prefill" else options.prompt
    ids = torch.randint(1, 32000, (1, length), generator=torch.Generator().manual_seed(1))
    alone = Running(model)
    few = max(2, passes // 4) if passes > 1 else 1
    turn = number % len(ways)
    done: Round = {}
    before = _alone(alone, workload, ids, few, options.pause)
    for way in [*ways[turn:], *ways[:turn]]:
        try:
            result = way.run(workload, ids, passes, memory, parent, options.sync)
        except Absent as reason:
            print(f"{way.name}, {workload}: left out: {reason}", flush=True)
            continue
        after = _alone(alone, workload, ids, few, options.pause)
        result |= {"before": before, "after": after, "alone": (before + after) / 2}
        done[way.name], before = result, after
    return done


def measure(options: argparse.Namespace, ways: list[Way], model: nn.Module) -> list[Any]:
    """A list of {workload, mode, results}, one for each round."""
    rounds = []
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="speed-kept-") as parent:
        for workload in options.workload:
            one_pass = argparse.Namespace(**{**vars(options), "burst_passes": 1})
            warm = one_round(0, model, ways, workload, "burst", one_pass, Path(parent))
            can = [way for way in ways if way.name in warm]
            for number in range(options.rounds):
                for mode in options.mode:
                    now = [way for way in can if mode == "sustained" or way.name in OWN]
                    done = one_round(number, model, now, workload, mode, options, Path(parent))
                    rounds.append({"workload": workload, "mode": mode, "results": done})
    return rounds


OWN = ("nothing", "empty hooks", "float16 in memory", *PRESETS, *FLIGHT)


# ---- showing ----------------------------------------------------------------------


def gathered(rounds: list[Any], workload: str, mode: str) -> dict[str, list[Figures]]:
    """The figures of each contender, over the rounds of one workload and mode."""
    found: dict[str, list[Figures]] = {}
    for one in rounds:
        if (one["workload"], one["mode"]) == (workload, mode):
            for name, result in one["results"].items():
                found.setdefault(name, []).append(result)
    return found


def kept(results: list[Figures], mode: str) -> list[float]:
    clock = "whole" if mode == "sustained" else "model"
    return [one["alone"] / one[clock] for one in results]


def show(rounds: list[Any], workload: str, mode: str) -> None:
    found = gathered(rounds, workload, mode)
    if not found:
        return
    floor = statistics.median(kept(found["empty hooks"], mode)) if "empty hooks" in found else None
    rows = []
    for name, results in found.items():
        middle = statistics.median(kept(results, mode))
        alone = statistics.median(one["alone"] for one in results)
        own = {key: statistics.median(one.get(key, 0) for one in results) for key in results[0]}
        rows.append(
            [
                name,
                spread(kept(results, mode)),
                f"{middle / floor:.2f}" if floor else "",
                spread([one["alone"] / one["model"] for one in results]),
                f"{alone * 1e3:.0f}",
                f"{own['model'] * 1e3:.0f}", f"{own['whole'] * 1e3:.0f}",
                f"{own['stored'] / 1e6:.1f}",
                f"{own['over_memory']:.2f}" if "over_memory" in own else "",
                f"{own['stall_seconds']:.2f} s" if "stall_seconds" in own else "",
                str(len(results)),
            ]
        )  # fmt: skip
    clock = "to the last byte" if mode == "sustained" else "while the model runs"
    print(f"\n{workload}, {mode}: speed kept {clock}, median (range)\n")
    headings = [
        "contender", "speed kept", "of empty hooks'", "while the model runs", "alone ms/pass",
        "model ms/pass", "whole ms/pass", "MB/pass", "over memory", "stalled", "rounds",
    ]  # fmt: skip
    print(table(headings, rows), flush=True)


def draw(rounds: list[Any], axes: Any) -> None:
    """Draws a panel for each workload with a bar for each contender, of sustained rounds if any."""
    for axis, workload in zip(axes, WORKLOADS, strict=True):
        mode = "sustained" if gathered(rounds, workload, "sustained") else "burst"
        found = gathered(rounds, workload, mode)
        names = list(found)[::-1]
        values = [kept(found[name], mode) for name in names]
        axis.barh(names, [statistics.median(v) for v in values])
        for place, one in enumerate(values):
            axis.plot(one, [place] * len(one), "k.", markersize=3)
        axis.set(title=f"{workload}, {mode}", xlabel="speed kept", xlim=(0, 1.1))
        axis.axvline(1, color="grey", linewidth=0.5)


def chosen(ways: list[Way], wanted: list[str] | None) -> list[Way]:
    if wanted is None:
        return [way for way in ways if way.name != DURING_A_DUMP]
    unknown = set(wanted) - {way.name for way in ways}
    if unknown:
        raise SystemExit(f"no contender {sorted(unknown)}; there are {[w.name for w in ways]}")
    return [way for way in ways if way.name in wanted]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--mode", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help="as in the table")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS, help="beside ours")
    parser.add_argument("--length", type=int, default=256, help="tokens of a prefill")
    parser.add_argument("--prompt", type=int, default=16, help="tokens before a generation")
    parser.add_argument("--prefill-passes", type=int, default=12, help="in one capture")
    parser.add_argument("--generation-passes", type=int, default=6, help="in one capture")
    parser.add_argument("--burst-passes", type=int, default=4, help="in one capture")
    parser.add_argument("--prefill-memory", type=float, default=0.25, help="GB, sustained")
    parser.add_argument("--generation-memory", type=float, default=0.02, help="GB, sustained")
    parser.add_argument("--dump-gb", type=float, default=2.0, help="the ring that a dump writes")
    parser.add_argument(
        "--pause", type=float, default=0.3,
        help="seconds after a capture, for threads that end and memory that is given back",
    )  # fmt: skip
    parser.add_argument("--sync", action="store_true", help="count until the disk has all")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the model")
    parser.add_argument("--folder", help="where captures go, and are deleted (a temporary one)")
    parser.add_argument("--out", type=Path, help="folder for the plot")
    parser.add_argument("--json", type=Path, help="write the rounds here as well")
    parser.add_argument("--more", action="store_true", help="add to the rounds of --json")
    parser.add_argument("--quick", action="store_true", help="a tiny model once: only a test")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.length, options.pause = 1, 8, 0.0
        if options.peers is PEERS:
            options.peers = QUICK_PEERS
        options.prefill_passes = options.generation_passes = options.burst_passes = 1
    return options


def main() -> None:
    options = parsed()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    model = build(options.quick)
    others, absent = peers(model, list(options.peers), options.quick, options.threads)
    ways = chosen([*contenders(model, options), *others], options.contenders)
    told = machine(Path(options.folder or tempfile.gettempdir()), ("torch", "transformers"))
    told["threads of the model"] = str(options.threads)
    head("Speed kept", told)
    print(f"{sum(1 for _ in model.modules())} modules, every one hooked", flush=True)
    for peer, reason in absent.items():
        print(f"{peer}: left out: {reason}")
    settings = {
        name: getattr(options, name)
        for name in (
            "length", "prompt", "prefill_passes", "generation_passes", "burst_passes",
            "prefill_memory", "generation_memory", "sync", "threads",
        )
    }  # fmt: skip
    rounds = kept_rounds(options.json, options.more, settings) + measure(options, ways, model)
    for workload in WORKLOADS:
        for mode in MODES:
            show(rounds, workload, mode)
    keep(options.json, told, settings, rounds)
    plot(options.out, "speed_kept", lambda axes: draw(rounds, axes), ncols=2, figsize=(12, 5))


if __name__ == "__main__":
    main()
