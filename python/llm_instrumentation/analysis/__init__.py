"""Reads captures as tensors, rows, tables and figures. It imports nothing that hooks models.

Each name is imported from its module on first use. Only ``ActivationDataset``, ``ActivationRows``,
``LayerSimilarity`` and ``cka`` import torch. The functions `logit_lens` and `salvage` have the
names of their modules, and are imported from there::

    from llm_instrumentation.analysis.logit_lens import logit_lens
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .activation import Activation
    from .attention import AttentionWeights, attention_layers, attention_weights
    from .compare import CaptureComparison, LayerComparison, compare_captures
    from .dataset import ActivationDataset, ActivationRows
    from .exports import ExportReport, export_rows
    from .imports import ImportReport, import_activations
    from .plots import (
        plot_attention,
        plot_attention_heads,
        plot_drift,
        plot_layer_statistics,
        plot_logit_lens,
        plot_massive_activations,
        plot_similarity,
        plot_token_errors,
        plot_token_norms,
        save_figure,
    )
    from .reader import ActivationReader, ActivationView, UnknownActivationError
    from .rows import NoCallsError, NotTokenAlignedError, Row, Rows
    from .salvage import SalvageReport
    from .similarity import LayerSimilarity, cka
    from .views import layer_statistics, massive_activations, token_errors, token_norms
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
    "ActivationDataset",
    "ActivationReader",
    "ActivationRows",
    "ActivationView",
    "AttentionWeights",
    "CaptureComparison",
    "ExportReport",
    "ImportReport",
    "LayerComparison",
    "LayerSimilarity",
    "NoCallsError",
    "NotTokenAlignedError",
    "Row",
    "Rows",
    "SalvageReport",
    "UnknownActivationError",
    "analyze_circuits",
    "attention_layers",
    "attention_weights",
    "build_packet_dataframe",
    "cka",
    "compare_captures",
    "create_interactive_dashboard",
    "export_rows",
    "import_activations",
    "layer_statistics",
    "load_stream_packets",
    "massive_activations",
    "plot_attention",
    "plot_attention_heads",
    "plot_drift",
    "plot_layer_statistics",
    "plot_logit_lens",
    "plot_massive_activations",
    "plot_similarity",
    "plot_token_errors",
    "plot_token_norms",
    "plot_token_progression",
    "save_figure",
    "token_errors",
    "token_norms",
    "visualize_attention_patterns",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Activation": ".activation",
        "ActivationDataset": ".dataset",
        "ActivationReader": ".reader",
        "ActivationRows": ".dataset",
        "ActivationView": ".reader",
        "AttentionWeights": ".attention",
        "CaptureComparison": ".compare",
        "ExportReport": ".exports",
        "ImportReport": ".imports",
        "LayerComparison": ".compare",
        "LayerSimilarity": ".similarity",
        "NoCallsError": ".rows",
        "NotTokenAlignedError": ".rows",
        "Row": ".rows",
        "Rows": ".rows",
        "SalvageReport": ".salvage",
        "UnknownActivationError": ".reader",
        "analyze_circuits": ".visualization",
        "attention_layers": ".attention",
        "attention_weights": ".attention",
        "build_packet_dataframe": ".visualization",
        "cka": ".similarity",
        "compare_captures": ".compare",
        "create_interactive_dashboard": ".visualization",
        "export_rows": ".exports",
        "import_activations": ".imports",
        "layer_statistics": ".views",
        "load_stream_packets": ".visualization",
        "massive_activations": ".views",
        "plot_attention": ".plots",
        "plot_attention_heads": ".plots",
        "plot_drift": ".plots",
        "plot_layer_statistics": ".plots",
        "plot_logit_lens": ".plots",
        "plot_massive_activations": ".plots",
        "plot_similarity": ".plots",
        "plot_token_errors": ".plots",
        "plot_token_norms": ".plots",
        "plot_token_progression": ".visualization",
        "save_figure": ".plots",
        "token_errors": ".views",
        "token_norms": ".views",
        "visualize_attention_patterns": ".visualization",
    },
)
