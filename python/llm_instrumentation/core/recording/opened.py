"""Opens the native session of a capture, and the hooks in C that put tensors into it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._cpus import usable_cpus
from ..._native import ForwardHooks, Reader, Session, view_function
from ..config import HookGranularity
from ..tensors.capture_state import CaptureState
from ..tensors.enqueue import PLAIN
from .openmp import gomp_parallel
from .plan import CapturePlan
from .ranks import this_rank

__all__ = ["hooks_in_c", "next_step", "open_session", "view_in_c"]


def open_session(plan: CapturePlan) -> Session:
    """Opens the stream.

    Raises:
        StrapError: the stream cannot be opened; the subclass says why.
    """
    options = plan.config.session_options()
    on_cpu = _on_cpu(plan)
    return Session(
        plan.path,
        **options,
        resume_offset=plan.resume_offset,
        capture_id=plan.capture_id,
        overwrite=plan.overwrite,
        rank=this_rank()[0],
        **_ring(plan),
        # Compression threads would take CPUs from the models' own.
        workers_yield=on_cpu and torch.get_num_threads() + options["workers"] > usable_cpus(),
        team=gomp_parallel() if on_cpu else 0,
    )


def _ring(plan: CapturePlan) -> dict[str, Any]:
    if plan.ring is None:
        return {}
    limits = plan.ring
    return {
        "ring": 1, "ring_steps": limits.steps, "ring_seconds": limits.seconds,
        "ring_outlier": limits.outlier, "ring_file": limits.file,
    }  # fmt: skip


def next_step(plan: CapturePlan) -> int:
    """The number after the last step in the resumed stream; 0 for a new one."""
    if not plan.resumes:
        return 0
    import pyarrow.compute as pc

    with Reader(plan.path) as reader:
        last = pc.max(reader.index().read_all()["step"]).as_py()
    return 0 if last is None else int(last) + 1


def view_in_c(plan: CapturePlan) -> int:
    """The address of the function with which hooks in C read tensors.

    0 if hooks in C cannot be used: this torch or interpreter has no such function, or the capture
    keeps samples.

    Raises:
        UnsupportedError: hook.so is missing or does not load.
    """
    sampled = plan.config.granularity is HookGranularity.SAMPLED_SLICES
    return 0 if sampled else view_function(Tensor)


def hooks_in_c(
    plan: CapturePlan, session: Session, state: CaptureState, ran: bytearray, view: int
) -> ForwardHooks | None:
    """The hooks in C of a capture; None if `view` is 0.

    Args:
        plan: the plan of the capture.
        session: the session of the capture.
        state: the state of the capture; it learns of tensors that the session refuses.
        ran: a byte per module, which the module's hook sets to 1.
        view: the address from :func:`view_in_c`.
    """
    if not view:
        return None
    return ForwardHooks(
        session, view=view, plain=PLAIN, is_neg=Tensor.is_neg, ran=ran,
        last_position=plan.config.last_position, failed=state.refuse_tensor,
    )  # fmt: skip


def _on_cpu(plan: CapturePlan) -> bool:
    """Whether a model computes on CPUs, judged by its first parameter."""
    return any(
        tensor is None or tensor.device.type == "cpu"
        for tensor in (next(model.parameters(), None) for model in plan.models)
    )
