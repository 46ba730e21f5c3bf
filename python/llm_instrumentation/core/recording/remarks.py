"""The warnings at the end of a capture: what is missing, what was slow, what lost precision."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..._warn import warn
from ..calls.steps import Steps
from ..config import InstrumentationConfig
from ..hooking.attached import AttachedHooks
from ..hooking.gradients import Gradients
from ..stats import CaptureStats
from .plan import CapturePlan
from .underflow import underflowed_layers

__all__ = ["warn_at_end"]

# A capture below its target rate warns if the model waited for more than this share of the time.
_STALL_SHARE = 0.05
# Captures shorter than this do not warn, because the first writes are slow.
_JUDGED_SECONDS = 1.0
# A warning names at most so many modules.
_SHOWN_NAMES = 5


def warn_at_end(
    plan: CapturePlan,
    stats: CaptureStats,
    *,
    streams: Sequence[str],
    hooks: AttachedHooks,
    steps: Steps,
    gradients: Gradients,
    missed: Sequence[str],
    replaced: Sequence[str],
) -> None:
    """Warns of all that the user would not expect of a capture that went well.

    Args:
        plan: the plan of the capture.
        stats: its last counters.
        streams: its streams; several if it has segments.
        hooks: its hooks.
        steps: its steps.
        gradients: its gradients.
        missed: the names of modules that should have run but were not seen.
        replaced: the names of modules that left their places.
    """
    if hooks.unwalked:
        warn(
            "objects of these types hold tensors that are not captured: "
            + ", ".join(sorted(hooks.unwalked))
        )
    _warn_of_stalls(plan.config, stats)
    if stats.underflowed and plan.config.float16_bound == math.inf:
        layers = _some(underflowed_layers(streams))
        warn(
            f"float16 is too coarse for the small values of {stats.underflowed:,} tensors of "
            f"{layers}: more than 0.01 of their squared values "
            "is lost. InstrumentationConfig.with_float32() stores float32 as it is"
        )
    if replaced:
        warn(
            f"{_some(replaced)} left the model during the capture: what has taken that place "
            "is not captured"
        )
    _warn_of_silence(streams[-1], hooks, steps, missed)
    if plan.config.gradients and any(hooks.ran) and not gradients.seen:
        why = (
            "call backward within the block"
            if gradients.awaited
            else "no output requires one, as under torch.no_grad()"
        )
        warn(f"no gradient was computed in the block: {why}")


def _warn_of_stalls(config: InstrumentationConfig, stats: CaptureStats) -> None:
    target = config.target_throughput_gbps
    stalled = stats.stall_seconds > _STALL_SHARE * stats.seconds
    if stalled and stats.throughput_gbps < target and stats.seconds >= _JUDGED_SECONDS:
        warn(
            f"the model waited {stats.stall_seconds:.1f} of {stats.seconds:.1f} s for the "
            f"capture, which took {stats.throughput_gbps:.2f} GB/s; the target is {target} "
            "GB/s. A faster disk, a cheaper codec or fewer layers help"
        )


def _warn_of_silence(
    stream: str, hooks: AttachedHooks, steps: Steps, missed: Sequence[str]
) -> None:
    skipped = steps.numbers.skipped
    if not any(hooks.ran):
        if hooks.ran and not steps.seen_to_end:
            why = f": all {skipped} steps were left out" if skipped else ""
            warn(f"no module ran in the block{why}. It has put nothing into {stream}")
    elif missed:
        but = f" but perhaps in the {skipped} steps that were left out" if skipped else ""
        warn(
            f"nothing is captured of {_some(missed)}: not called{but}, or where no hooks are, "
            "in exported or scripted code or by a parent that uses the weights alone. "
            "stats().silent names all modules that did not run"
        )


def _some(names: Sequence[str]) -> str:
    """The first names, and the number of further ones."""
    more = len(names) - _SHOWN_NAMES
    return ", ".join(map(repr, names[:_SHOWN_NAMES])) + (f" and {more} more" if more > 0 else "")
