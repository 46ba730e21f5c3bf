"""Effects of edges by runs with plain hooks, on tiny decoders of transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import transformers
from llm_instrumentation.interventions.metrics import Metric
from llm_instrumentation.interventions.prompts import Prompts
from torch import Tensor, nn

WIDTH, VOCABULARY, HEADS, HEAD = 32, 50, 4, 8
LLAMA = {
    "hidden_size": WIDTH, "intermediate_size": 48, "vocab_size": VOCABULARY, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": HEAD, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
NEOX = {
    "hidden_size": WIDTH, "intermediate_size": 48, "vocab_size": VOCABULARY,
    "num_hidden_layers": 2, "num_attention_heads": HEADS, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


class Names(NamedTuple):
    """The modules of a decoder, written down once more.

    `first` and `second` are the norms before attention and MLP, `post` and `post_mlp` those behind;
    "": there is none. `joint`: the queries and keys of all heads are normed together.
    """

    layers: str = "model.layers"
    first: str = "input_layernorm"
    second: str = "post_attention_layernorm"
    last: str = "model.norm"
    out: str = "self_attn.o_proj"
    mlp: str = "mlp"
    fused: str = ""
    post: str = ""
    post_mlp: str = ""
    projections: str = "self_attn.{}_proj"
    joint: bool = False


GPT2 = Names(
    "transformer.h", "ln_1", "ln_2", "transformer.ln_f", "attn.c_proj", fused="attn.c_attn"
)
OPT = Names(
    "model.decoder.layers", "self_attn_layer_norm", "final_layer_norm",
    "model.decoder.final_layer_norm", "self_attn.out_proj", "fc2",
)  # fmt: skip
NEOX_NAMES = Names(
    "gpt_neox.layers", last="gpt_neox.final_layer_norm", out="attention.dense",
    fused="attention.query_key_value",
)  # fmt: skip
SANDWICH = Names(
    second="pre_feedforward_layernorm", post="post_attention_layernorm",
    post_mlp="post_feedforward_layernorm",
)  # fmt: skip
POST = SANDWICH._replace(first="", second="")
GLM4 = Names(post="post_self_attn_layernorm", post_mlp="post_mlp_layernorm")
ONE_NORM = Names(second="input_layernorm")
GPTJ = Names(
    "transformer.h", "ln_1", "ln_1", "transformer.ln_f", "attn.out_proj",
    projections="attn.{}_proj",
)  # fmt: skip
PHI = ONE_NORM._replace(last="model.final_layernorm", out="self_attn.dense")
# A token sees itself and three before it.
WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
# Norms behind heads, or behind heads and before them.
POST_NORMS: dict[str, tuple[str, dict[str, Any], Names]] = {
    "gemma2": ("gemma2", {**LLAMA, **WINDOW, "query_pre_attn_scalar": HEAD}, SANDWICH),
    "gemma3": ("gemma3_text", {**LLAMA, **WINDOW, "query_pre_attn_scalar": HEAD}, SANDWICH),
    "glm4": ("glm4", LLAMA, GLM4),
    "exaone4": ("exaone4", {**LLAMA, **WINDOW}, POST),
    "olmo2": ("olmo2", LLAMA, POST._replace(joint=True)),
    "olmo3": ("olmo3", {**LLAMA, **WINDOW}, POST._replace(joint=True)),
    "flex_olmo": (
        "flex_olmo", {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2},
        POST._replace(joint=True),
    ),
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], Names]] = {
    "gpt2": (
        "gpt2",
        {"n_layer": 2, "n_head": HEADS, "n_embd": WIDTH, "vocab_size": VOCABULARY,
         "bos_token_id": 0, "eos_token_id": 0},
        GPT2,
    ),
    "gpt_neox": ("gpt_neox", {**NEOX, "use_parallel_residual": False}, NEOX_NAMES),
    "gpt_neox, parallel": ("gpt_neox", NEOX, NEOX_NAMES),
    "opt": (
        "opt",
        {"hidden_size": WIDTH, "ffn_dim": 48, "vocab_size": VOCABULARY, "num_hidden_layers": 2,
         "num_attention_heads": HEADS, "word_embed_proj_dim": WIDTH},
        OPT,
    ),
    "gemma": ("gemma", {**LLAMA, "num_key_value_heads": 1, "pad_token_id": 0}, Names()),
    "mixtral": ("mixtral", {**LLAMA, "num_local_experts": 4}, Names()),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 16}, Names()),
    "qwen3_moe": ("qwen3_moe", EXPERTS, Names()),
    "olmoe": (
        "olmoe", {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2}, Names(joint=True)
    ),
    "gptj": (
        "gptj",
        {"n_layer": 2, "n_head": HEADS, "n_embd": WIDTH, "vocab_size": VOCABULARY,
         "rotary_dim": 4, "bos_token_id": 0, "eos_token_id": 0},
        GPTJ,
    ),
    "phi": ("phi", LLAMA, PHI),
    **{kind: (kind, LLAMA, ONE_NORM) for kind in ("cohere", "cohere2")},
    **{
        kind: (kind, LLAMA, Names())
        for kind in ("llama", "mistral", "olmo", "qwen2", "qwen3", "starcoder2")
    },
    **POST_NORMS,
}  # fmt: skip


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    kind, fields, _ = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **fields)
    config._experts_implementation = "eager"  # the others have no float64
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # weights of this size make effects that are well above rounding
        for weight in model.parameters():
            weight.add_(0.15 * torch.randn_like(weight))
    found: nn.Module = model.double()
    return found


def pairs(left: bool = False) -> Prompts:
    """Texts of six tokens that differ in two of them; with two columns of padding on the left."""
    torch.manual_seed(1)
    clean = torch.randint(3, VOCABULARY, (2, 6))
    corrupted = clean.clone()
    corrupted[:, 1:3] = (clean[:, 1:3] + 7) % (VOCABULARY - 3) + 3
    if not left:
        return Prompts(clean, corrupted)
    mask = torch.ones(2, 8).long()
    mask[:, :2] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    clean, corrupted = (nn.functional.pad(ids, (2, 0)) for ids in (clean, corrupted))
    return Prompts(
        *({"input_ids": one, "attention_mask": mask, "position_ids": positions}
          for one in (clean, corrupted))
    )  # fmt: skip


def of_four(logits: Tensor, batch: Prompts) -> Tensor:
    """The logit of 5 minus that of 6 at the last four tokens, each with another weight."""
    weights = torch.tensor([0.5, -1.0, 2.0, 1.0], dtype=logits.dtype)
    return (logits[:, -4:, 5] - logits[:, -4:, 6]) @ weights


METRIC = Metric("logit of 5 minus that of 6", of_four)


# ---- plain hooks ----------------------------------------------------------------------------


Change = Callable[[Tensor], Tensor]


@contextlib.contextmanager
def hooked(model: nn.Module, *changes: tuple[str, str, Change]) -> Iterator[None]:
    """Changes the first input or the output of modules."""
    handles = []
    for name, side, change in changes:
        module = model.get_submodule(name)
        if side == "in":
            handles.append(
                module.register_forward_pre_hook(
                    lambda _, args, change=change: (change(args[0]), *args[1:])
                )
            )
        else:

            def after(_: Any, args: Any, output: Any, change: Change = change) -> Any:
                if isinstance(output, tuple):
                    return (change(output[0]), *output[1:])
                return change(output)

            handles.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Plain:
    """Effects of single edges by runs with plain hooks, which share no code with ours."""

    def __init__(self, name: str, model: nn.Module, prompts: Prompts) -> None:
        self.names = MODELS[name][2]
        self.model = model
        self.prompts = prompts
        self.heads = HEADS
        self.shared = HEADS // MODELS[name][1].get("num_key_value_heads", HEADS)

    def run(self, inputs: Any, *changes: tuple[str, str, Change]) -> Tensor:
        with torch.no_grad(), hooked(self.model, *changes):
            return METRIC(self.model(**inputs), self.prompts)

    def seen(self, inputs: Any, name: str, side: str, *changes: tuple[str, str, Change]) -> Tensor:
        """What a module receives or returns in a run."""
        found: list[Tensor] = []

        def keep(value: Tensor) -> Tensor:
            found.append(value.clone())
            return value

        self.run(inputs, *changes, (name, side, keep))
        batch, tokens = next(iter(inputs.values())).shape
        return found[0].reshape(batch, tokens, -1)

    def of_layer(self, layer: int, part: str) -> str:
        return f"{self.names.layers}.{layer}.{part}"

    def columns(self, head: int, kind: str) -> tuple[str, slice]:
        """The projection of a head's input, and the columns of it."""
        if self.names is GPT2:
            first = "qkv".index(kind) * WIDTH + head * HEAD
            return self.names.fused, slice(first, first + HEAD)
        if self.names.fused:
            first = (3 * head + "qkv".index(kind)) * HEAD
            return self.names.fused, slice(first, first + HEAD)
        projection = self.names.projections.format(kind)
        if self.names.joint and kind != "v":  # a norm over all heads comes next
            return projection, slice(None)
        own = head if kind == "q" else head // self.shared
        return projection, slice(own * HEAD, (own + 1) * HEAD)

    def reads(self, layer: int, kind: str) -> str:
        """The module whose input is the residual stream that a part of a layer reads."""
        if kind == "m":
            norm, part = self.names.second, self.names.mlp
        else:
            norm, part = self.names.first, self.columns(0, kind)[0]
        return self.of_layer(layer, norm or part)

    def results(self, inputs: Any, layer: int) -> Tensor:
        return self.seen(inputs, self.of_layer(layer, self.names.out), "in")

    def change(self, source: str) -> Tensor:
        """What a node adds to the residual stream, changed alone to that of the other run."""
        clean, other = self.prompts.clean, self.prompts.corrupted
        if source == "input":
            place = self.reads(0, "q")
            return self.seen(other, place, "in") - self.seen(clean, place, "in")
        layer = int(source[1])
        if source[0] == "m":
            place = self.of_layer(layer, self.names.post_mlp or self.names.mlp)
            return self.seen(other, place, "out") - self.seen(clean, place, "out")
        results = self.results(clean, layer)
        part = slice(int(source[4:]) * HEAD, (int(source[4:]) + 1) * HEAD)
        changed = results.clone()
        changed[..., part] = self.results(other, layer)[..., part]
        with torch.no_grad():
            before, after = (self.behind_heads(layer, one) for one in (results, changed))
        return after - before

    def behind_heads(self, layer: int, results: Tensor) -> Tensor:
        """What attention adds to the residual stream, from the results of its heads."""
        found = self.model.get_submodule(self.of_layer(layer, self.names.out))(results)
        if self.names.post:
            found = self.model.get_submodule(self.of_layer(layer, self.names.post))(found)
        return found

    def effect(self, source: str, s: int, target: str, kind: str, t: int) -> Tensor:
        """The effect of source@s -> target@t<kind> on each example."""
        base = self.prompts.clean
        change = self.change(source)

        def add(residual: Tensor) -> Tensor:
            new = residual.clone().reshape(change.shape)
            new[:, s] += change[:, s]
            return new.reshape(residual.shape)

        clean = self.run(base)
        if target == "logits":
            return self.run(base, (self.names.last, "in", add)) - clean
        layer = int(target[1])
        if target[0] == "m":
            mlp = self.of_layer(layer, self.names.mlp)
            new = self.seen(base, mlp, "out", (self.reads(layer, "m"), "in", add))
            return self.run(base, (mlp, "out", self.put(new, t, slice(None)))) - clean
        head = int(target[4:])
        out = self.of_layer(layer, self.names.out)
        part, columns = self.columns(head, kind)
        projection = self.of_layer(layer, part)
        # One run for the projection, one for what the head makes of it, one for the rest.
        projected = self.seen(base, projection, "out", (self.reads(layer, kind), "in", add))
        place = (projection, "out", self.put(projected, s, columns))
        results = self.seen(base, out, "in", place)
        own = slice(head * HEAD, (head + 1) * HEAD)
        return self.run(base, (out, "in", self.put(results, t, own))) - clean

    @staticmethod
    def put(new: Tensor, position: int, columns: slice) -> Change:
        def change(value: Tensor) -> Tensor:
            changed = value.clone().reshape(*new.shape[:2], -1)
            changed[:, position, columns] = new[:, position, columns]
            return changed.reshape(value.shape)

        return change


EDGES = [
    ("input", 1, "a0.h1", "k", 4), ("input", 2, "a0.h3", "v", 5), ("a0.h1", 2, "a1.h2", "k", 5),
    ("a0.h1", 2, "a1.h2", "v", 3), ("m0", 2, "a1.h1", "v", 5), ("a0.h2", 5, "a1.h3", "q", 5),
    ("input", 2, "m0", "", 2), ("a0.h3", 4, "m1", "", 4), ("a1.h2", 5, "logits", "", 5),
]  # fmt: skip
