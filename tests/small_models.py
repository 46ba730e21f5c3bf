"""Small models of transformers with random weights, the same in each run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCABULARY = 97


def build(
    architecture: str, *, width: int = 32, layers: int = 2, heads: int = 4, grouped: bool = False,
    device: str = "cpu",
) -> nn.Module:  # fmt: skip
    """A llama, gpt2, bert, mixtral, t5 or vit.

    Args:
        grouped: half as many heads have keys and values; for a llama.
    """
    import transformers as hf

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": width, "intermediate_size": width * 3 // 2,
        "num_hidden_layers": layers, "num_attention_heads": heads,
    }  # fmt: skip
    text = {**sizes, "vocab_size": VOCABULARY}
    no_special_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    model: Any
    with torch.device(device):
        if architecture == "llama":
            pairs = {"num_key_value_heads": heads // 2} if grouped else {}
            model = hf.LlamaForCausalLM(hf.LlamaConfig(**text, **pairs, **no_special_tokens))
        elif architecture == "gpt2":
            config = hf.GPT2Config(
                vocab_size=VOCABULARY, n_embd=width, n_layer=layers, n_head=heads
            )
            model = hf.GPT2LMHeadModel(config)
        elif architecture == "bert":
            model = hf.BertModel(hf.BertConfig(**text))
        elif architecture == "mixtral":
            experts = {"num_key_value_heads": heads // 2, "num_local_experts": 4}
            model = hf.MixtralForCausalLM(hf.MixtralConfig(**text, **experts, **no_special_tokens))
        elif architecture == "vit":
            model = hf.ViTModel(hf.ViTConfig(**sizes, image_size=64, patch_size=16))
        else:
            assert architecture == "t5"
            config = hf.T5Config(
                vocab_size=VOCABULARY, d_model=width, d_kv=width // heads, d_ff=width * 3 // 2,
                num_layers=layers, num_heads=heads, decoder_start_token_id=0, eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
            model = hf.T5ForConditionalGeneration(config)
    found: nn.Module = model.eval()
    return found


def saved(model: Any, folder: Path) -> Path:
    """The folder of a language model with a tokenizer, whose tokens are w0, w1 and so on."""
    import transformers
    from tokenizers import Tokenizer, models

    ids = {f"w{number}": number for number in range(model.config.vocab_size)}
    words = Tokenizer(models.WordLevel(ids, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder
