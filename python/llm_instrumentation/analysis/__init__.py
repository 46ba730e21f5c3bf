"""Reads captures as tensors and tables. It imports nothing that hooks models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .activation import Activation
    from .reader import ActivationReader, ActivationView, UnknownActivationError
    from .salvage import SalvageReport
    from .visualization import (
        analyze_circuits,
        build_packet_dataframe,
        create_interactive_dashboard,
        load_stream_packets,
        plot_token_progression,
        visualize_attention_patterns,
    )

__all__ = [
    "Activation",
    "ActivationReader",
    "ActivationView",
    "SalvageReport",
    "UnknownActivationError",
    "analyze_circuits",
    "build_packet_dataframe",
    "create_interactive_dashboard",
    "load_stream_packets",
    "plot_token_progression",
    "visualize_attention_patterns",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Activation": ".activation",
        "ActivationReader": ".reader",
        "ActivationView": ".reader",
        "SalvageReport": ".salvage",
        "UnknownActivationError": ".reader",
        "analyze_circuits": ".visualization",
        "build_packet_dataframe": ".visualization",
        "create_interactive_dashboard": ".visualization",
        "load_stream_packets": ".visualization",
        "plot_token_progression": ".visualization",
        "visualize_attention_patterns": ".visualization",
    },
)
