"""The names of 1.3.1 under their documented path; see `compat.visualization`."""

from __future__ import annotations

from ..compat.visualization import (
    analyze_circuits,
    build_packet_dataframe,
    create_interactive_dashboard,
    load_stream_packets,
    plot_token_progression,
    visualize_attention_patterns,
)

__all__ = [
    "analyze_circuits",
    "build_packet_dataframe",
    "create_interactive_dashboard",
    "load_stream_packets",
    "plot_token_progression",
    "visualize_attention_patterns",
]
