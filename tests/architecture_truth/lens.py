"""The logit lens at the last layer, beside the probabilities of the model."""

from __future__ import annotations

import numpy as np
import torch
from llm_instrumentation.analysis.logit_lens import logit_lens
from tiny_models import VOCABULARY, Tiny
from torch import Tensor

from .cells import Cell, Different, judged, not_applicable, works, worst
from .fields import with_fields
from .forwards import captured_pass

__all__ = ["lens_cell"]


# What some models do to logits is nothing with the values of their types.
_SCALES = (
    r"logit_scale|logits_scaling|lm_head_multiplier|output_multiplier|logits_mup_width_multiplier"
)
_CAPS = r"final_logit_softcapping|logits_soft_cap"


def lens_cell(tiny: Tiny) -> Cell:
    """The cell of the logit lens, of two texts with padding on the right."""
    scaled = with_fields(tiny, _SCALES, 0.4) or tiny
    capped = with_fields(tiny, _CAPS, 2.0) or tiny
    return worst(_lens(one) for one in {id(one): one for one in (scaled, capped)}.values())


def _lens(tiny: Tiny) -> Cell:
    inputs = tiny.inputs(padding="right")
    with captured_pass(tiny, inputs) as of:
        logits = getattr(of.output, "logits", None)
        text = inputs.get("decoder_input_ids", inputs.get("input_ids"))
        if text is None:
            return not_applicable("no text")
        if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[-1] < VOCABULARY:
            return not_applicable("no logits of tokens")

        def check() -> Cell:
            for row in range(len(text)):
                lens = logit_lens(of.reader, tiny.model, sequence=row)
                best, its_ids = lens.probabilities[-1], torch.from_numpy(lens.ids[-1])
                if len(its_ids) > logits.shape[1]:
                    raise Different(f"the lens at {lens.layers[-1]!r} is of another text")
                exact = logits[row, : len(its_ids)].double().softmax(-1)
                for of_model in (exact.max(-1).values, exact.gather(1, its_ids[:, None])[:, 0]):
                    if not np.allclose(best, of_model.numpy(), atol=1e-4):
                        raise Different(f"the lens at {lens.layers[-1]!r} differs from the model")
            return works

        return judged(check)
