"""Where the heads of attention modules are, for each architecture.

The vectors of all heads of a layer stand side by side in the last dimension of one tensor. The
table says which tensor that is: of the head's result, query, key and value.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, Literal, TypeAlias

from torch import nn

from ..core.tensors.modules import adapter_advice, original_name
from ..errors import InvalidArgumentError, UnsupportedError

__all__ = [
    "AttentionHeads",
    "HeadColumns",
    "HeadInput",
    "HeadLayout",
    "attention_heads",
    "register_heads",
]

HeadInput: TypeAlias = Literal["q", "k", "v"]
"""One of a head's inputs: its query, key or value."""


@dataclasses.dataclass(frozen=True)
class HeadLayout:
    """The places of the heads in a class of attention modules.

    The names of modules and attributes are relative to the attention module.

    Attributes:
        out: the output projection. Its input is the results of the heads, one after the other.
        q, k, v: the modules that return the queries, keys and values of all heads.
        heads: the attribute with the number of query heads.
        head_dim: the attribute with the width of a head.
        key_value_heads: the attribute with the number of key and value heads; None: as `heads`.
        fused: for one module that returns queries, keys and values. "parts": all queries, then all
            keys, then all values, as in GPT-2. "heads": the query, key and value of the first
            head, then those of the second one, as in GPT-NeoX. None: three modules.
        joint: the inputs that are normed over all heads together, as the queries and keys of OLMo
            2. So what one head reads depends on the columns of all heads.
    """

    out: str
    q: str
    k: str
    v: str
    heads: str = "config.num_attention_heads"
    head_dim: str = "head_dim"
    key_value_heads: str | None = None
    fused: Literal["parts", "heads"] | None = None
    joint: tuple[HeadInput, ...] = ()

    def __post_init__(self) -> None:
        if self.fused == "heads" and self.joint:
            raise InvalidArgumentError(
                f"fused = 'heads' with joint = {self.joint!r}: a norm over all heads needs their "
                "columns side by side"
            )
        if self.fused is not None and not self.q == self.k == self.v:
            raise InvalidArgumentError(
                f"fused = {self.fused!r} needs one module for q, k and v, not {self.q!r}, "
                f"{self.k!r} and {self.v!r}"
            )
        if self.fused is not None and self.key_value_heads is not None:
            raise InvalidArgumentError(
                f"fused = {self.fused!r} with key_value_heads = {self.key_value_heads!r}: the "
                "places of shared keys and values in one tensor are not known"
            )


_LLAMA = HeadLayout(
    "o_proj", "q_proj", "k_proj", "v_proj", key_value_heads="config.num_key_value_heads"
)
_JOINT = dataclasses.replace(_LLAMA, joint=("q", "k"))
_GPT2 = HeadLayout("c_proj", "c_attn", "c_attn", "c_attn", heads="num_heads", fused="parts")
_GPT_NEOX = HeadLayout(
    "dense", "query_key_value", "query_key_value", "query_key_value", head_dim="head_size",
    fused="heads",
)  # fmt: skip
_GPTJ = HeadLayout("out_proj", "q_proj", "k_proj", "v_proj", heads="num_attention_heads")
_PHI = dataclasses.replace(_LLAMA, out="dense")
_OPT = HeadLayout("out_proj", "q_proj", "k_proj", "v_proj", heads="num_heads")
_BERT = HeadLayout(
    "output.dense", "self.query", "self.key", "self.value",
    heads="self.num_attention_heads", head_dim="self.attention_head_size",
)  # fmt: skip
_T5 = HeadLayout("o", "q", "k", "v", heads="n_heads", head_dim="key_value_proj_dim")

# By the class of the attention module. A subclass has the layout of its base.
_LAYOUTS: dict[str, HeadLayout] = {
    **{
        f"{name}Attention": _LLAMA
        for name in (
            "Cohere", "Cohere2", "Exaone4", "Gemma", "Gemma2", "Gemma3", "Glm4", "Llama",
            "Mistral", "Mixtral", "Olmo", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Starcoder2",
        )
    },
    **{f"{name}Attention": _JOINT for name in ("FlexOlmo", "Olmo2", "Olmo3", "Olmoe")},
    "GPTJAttention": _GPTJ,
    "PhiAttention": _PHI,
    "GPT2Attention": _GPT2,
    "GPTNeoXAttention": _GPT_NEOX,
    "OPTAttention": _OPT,
    **{f"{name}Attention": _BERT for name in ("Bert", "Electra", "Roberta", "XLMRoberta")},
    "T5Attention": _T5,
}  # fmt: skip


def register_heads(attention: type[nn.Module] | str, layout: HeadLayout) -> None:
    """Says where a class of attention modules has its heads::

        register_heads(
            "PhiAttention",
            HeadLayout("dense", "q_proj", "k_proj", "v_proj",
                       key_value_heads="config.num_key_value_heads"),
        )

    Args:
        attention: the class of the attention modules, or its name.
        layout: replaces an earlier one of this class.

    Raises:
        InvalidArgumentError: the layout contradicts itself.
    """
    name = attention if isinstance(attention, str) else attention.__name__
    _LAYOUTS[name] = layout


@dataclasses.dataclass(frozen=True)
class HeadColumns:
    """The columns of a head in the last dimension of a tensor.

    Attributes:
        module: the name of the module.
        side: the tensor is the module's input or its output.
        columns: the columns.
        width: of the last dimension.
    """

    module: str
    side: Literal["input", "output"]
    columns: slice
    width: int


@dataclasses.dataclass(frozen=True)
class AttentionHeads:
    """The heads of one attention module.

    Attributes:
        layer: the name of the attention module.
        heads: the number of query heads.
        key_value_heads: the number of key and value heads. It is smaller than `heads` if query
            heads share them (grouped-query attention).
        head_dim: the width of a head.
        layout: where they are.
    """

    layer: str
    heads: int
    key_value_heads: int
    head_dim: int
    layout: HeadLayout

    def key_value_head(self, head: int) -> int:
        """The key and value head that a query head uses.

        Raises:
            InvalidArgumentError: there is no such query head.
        """
        if not 0 <= head < self.heads:
            raise InvalidArgumentError(
                f"head = {head}: {self.layer!r} has the heads 0 to {self.heads - 1}"
            )
        return head // (self.heads // self.key_value_heads)

    def columns(self, head: int, head_input: HeadInput | None = None) -> HeadColumns:
        """The columns of a query head's result, or of its query, key or value.

        Raises:
            InvalidArgumentError: there is no such query head.
        """
        shared = self.key_value_head(head)
        if head_input is None:
            return self._columns(self.layout.out, "input", head, self.heads)
        module = getattr(self.layout, head_input)
        if self.layout.fused is None:
            if head_input == "q":
                return self._columns(module, "output", head, self.heads)
            return self._columns(module, "output", shared, self.key_value_heads)
        part = "qkv".index(head_input)
        place = part * self.heads + head if self.layout.fused == "parts" else 3 * head + part
        return self._columns(module, "output", place, 3 * self.heads)

    def _columns(
        self, module: str, side: Literal["input", "output"], place: int, places: int
    ) -> HeadColumns:
        begin = place * self.head_dim
        name = f"{self.layer}.{module}" if self.layer else module
        columns = slice(begin, begin + self.head_dim)
        return HeadColumns(name, side, columns, places * self.head_dim)


def attention_heads(model: nn.Module) -> dict[str, AttentionHeads]:
    """The attention modules of a model that the table knows, by name, in the model's order.

    The table knows the attention classes of Llama, Mistral, Mixtral, Qwen2, Qwen2-MoE, Qwen3,
    Qwen3-MoE, Gemma, Gemma 2, Gemma 3, OLMo, OLMo 2, OLMo 3, OLMoE, FlexOlmo, EXAONE 4, GLM-4,
    Cohere, Cohere 2, Starcoder 2, Phi, GPT-2, GPT-J, GPT-NeoX, OPT, BERT (and so MiniLM), RoBERTa,
    XLM-RoBERTa, ELECTRA and T5 in transformers, and their subclasses. `register_heads` adds a
    class.

    Raises:
        UnsupportedError: a module does not have what the layout of its class says.
    """
    found = {}
    for name, module in model.named_modules():
        layout = next((_LAYOUTS[n] for n in _class_names(module) if n in _LAYOUTS), None)
        if layout is not None:
            found[original_name(name)] = _heads_of(original_name(name), module, layout)
    return found


def _class_names(module: nn.Module) -> list[str]:
    return [kind.__name__ for kind in type(module).__mro__]


def _heads_of(name: str, module: nn.Module, layout: HeadLayout) -> AttentionHeads:
    def number(attribute: str) -> int:
        value: Any = operator.attrgetter(attribute)(module)
        return operator.index(value)

    try:
        for part in (layout.out, layout.q, layout.k, layout.v):
            module.get_submodule(part)
        heads, head_dim = number(layout.heads), number(layout.head_dim)
        shared = heads if layout.key_value_heads is None else number(layout.key_value_heads)
    except (AttributeError, TypeError) as error:
        raise UnsupportedError(
            f"{name!r} ({type(module).__name__}) is not as its layout of heads says: {error}. Use "
            f"register_heads with another layout{adapter_advice(module)}"
        ) from error
    return AttentionHeads(name, heads, shared, head_dim, layout)
