"""Causal graphs in DOT, the language of Graphviz."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._look import LOOKS, largest_effect, look_of, width

if TYPE_CHECKING:
    from . import CausalGraph

__all__ = ["to_dot"]


def to_dot(graph: CausalGraph) -> str:
    """See `causal_graph.CausalGraph.to_dot`."""
    lines = [
        f"digraph {_quoted(graph.model or 'causal graph')} {{",
        "  rankdir=BT;",
        '  node [shape=box, style=rounded, fontname="Helvetica", fontsize=10, height=0.3];',
        '  edge [arrowsize=0.5, fontname="Helvetica", fontsize=8];',
    ]
    for node in graph.nodes:
        told = "" if node.effect is None else f", tooltip={_label(f'effect {node.effect:.4g}')}"
        lines.append(f"  {_quoted(node.id)} [label={_label(node.id)}{told}];")
    largest = largest_effect(graph.edges)
    for edge in graph.edges:
        look = LOOKS[look_of(edge)]
        values = {
            "color": _quoted(look.color),
            "penwidth": f"{width(edge, largest):.2f}",
            "style": "dashed" if look.dashed else "solid",
        }
        if edge.input:
            values["headlabel"] = _label(edge.input)
        if edge.effect is not None:
            values["tooltip"] = _label(f"{edge.id}: {edge.effect:.4g}")
        attributes = ", ".join(f"{name}={value}" for name, value in values.items())
        lines.append(f"  {_quoted(edge.source)} -> {_quoted(edge.target)} [{attributes}];")
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    """A name in DOT. A backslash before the closing quote would escape it, so each is doubled."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _label(text: str) -> str:
    """A text that Graphviz draws. It replaces sequences as ``&lt;`` in labels, but not in names."""
    return _quoted(text.replace("&", "&amp;"))
