"""Collectors: sources of memory traces, and a survey of those that can run on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._lazy import lazy

if TYPE_CHECKING:
    from .access import AccessCollector
    from .artifact_manager import ArtifactManager, DiskSpaceError
    from .base import BaseCollector, CollectorMeta, CollectorUnavailableError, Mode
    from .lackey import Lackey
    from .machine import CollectorStatus, select_collector, survey_machine
    from .memray_runner import MemrayRunner
    from .page_faults import PageFaults
    from .perf_runner import PerfMemRunner
    from .process_monitor import ProcessMonitor, ProcessMonitorCollector, ProcessSample
    from .torch import TorchTracer
    from .torch.recover import recover_torch_trace
    from .write_sets import WriteSets

__all__ = [
    "AccessCollector",
    "ArtifactManager",
    "BaseCollector",
    "CollectorMeta",
    "CollectorStatus",
    "CollectorUnavailableError",
    "DiskSpaceError",
    "Lackey",
    "MemrayRunner",
    "Mode",
    "PageFaults",
    "PerfMemRunner",
    "ProcessMonitor",
    "ProcessMonitorCollector",
    "ProcessSample",
    "TorchTracer",
    "WriteSets",
    "recover_torch_trace",
    "select_collector",
    "survey_machine",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "AccessCollector": ".access",
        "ArtifactManager": ".artifact_manager",
        "BaseCollector": ".base",
        "CollectorMeta": ".base",
        "CollectorStatus": ".machine",
        "CollectorUnavailableError": ".base",
        "DiskSpaceError": ".artifact_manager",
        "Lackey": ".lackey",
        "MemrayRunner": ".memray_runner",
        "Mode": ".base",
        "PageFaults": ".page_faults",
        "PerfMemRunner": ".perf_runner",
        "ProcessMonitor": ".process_monitor",
        "ProcessMonitorCollector": ".process_monitor",
        "ProcessSample": ".process_monitor",
        "TorchTracer": ".torch",
        "WriteSets": ".write_sets",
        "recover_torch_trace": ".torch.recover",
        "select_collector": ".machine",
        "survey_machine": ".machine",
    },
)
