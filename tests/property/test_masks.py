"""Padding is read from masks of every form that models are given."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from llm_instrumentation.core.calls.masks import Mask, Unread, kept, read_mask, undecided
from torch import Tensor

HIDDEN = {torch.float32: torch.finfo(torch.float32).min, torch.bfloat16: -torch.inf}


@st.composite
def paddings(draw) -> Tensor:
    """Booleans [rows, tokens]: texts of at least one token, with padding on one side."""
    rows, tokens = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    left = draw(st.booleans())
    places = torch.arange(tokens)
    lengths = draw(st.lists(st.integers(1, tokens), min_size=rows, max_size=rows))
    if left:
        return torch.stack([places >= tokens - length for length in lengths])
    return torch.stack([places < length for length in lengths])


def seen(real: Tensor, queries: int, *, causal: bool, window: int | None) -> Tensor:
    """Which tokens the last tokens see, bool [rows, queries, tokens]."""
    tokens = real.shape[1]
    key, query = torch.arange(tokens), torch.arange(tokens)[:, None]
    allowed = torch.ones(tokens, tokens, dtype=torch.bool)
    if causal:
        allowed &= key <= query
        if window is not None:
            allowed &= key > query - window
    return (allowed & real[:, None])[:, tokens - queries :]


def with_open_rows(mask: Tensor) -> Tensor:
    """Rows that see nothing see all, because some kernels cannot have them."""
    return mask | ~mask.any(-1, keepdim=True)


def added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, HIDDEN[dtype])


@given(
    paddings(),
    st.booleans(),
    st.one_of(st.none(), st.integers(2, 5)),
    st.booleans(),
    st.sampled_from([torch.bool, torch.int64, torch.float32, torch.bfloat16]),
    st.sampled_from([1, 3]),
    st.integers(0, 4),
)
def test_masks_of_queries_and_keys(real, causal, window, opened, dtype, heads, free):
    """All tokens in one call; a static cache has keys that are free."""
    tokens = real.shape[1]
    mask = seen(real, tokens, causal=causal, window=window)
    mask = torch.nn.functional.pad(mask, (0, free))
    if opened and causal:
        mask = with_open_rows(mask)
    if dtype.is_floating_point:
        mask = added(mask, dtype)
    given_to_model = mask[:, None].expand(-1, heads, -1, -1).to(dtype)
    read = read_mask(given_to_model, len(real), tokens, 0)
    assert isinstance(read, Mask)
    assert torch.equal(kept(read), real)


@given(
    paddings(),
    st.sampled_from(["causal", "all", "prefix", "global"]),
    st.sampled_from(["keys", "keys and queries"]),
    st.sampled_from(["", "open", "diagonal"]),
    st.sampled_from([torch.bool, torch.float32]),
)
def test_no_form_of_a_mask_is_misread_without_a_word(real, form, hidden, opened, dtype):
    """Some forms are the same for padding and for text. Those are undecided, or tell nothing."""
    tokens = real.shape[1]
    key, query = torch.arange(tokens), torch.arange(tokens)[:, None]
    allowed = {
        "causal": key <= query,
        "all": key >= 0,
        "prefix": (key <= query) | (key < tokens // 2),
        "global": (key - query).abs().le(1) | (key == 0) | (query == 0),
    }[form].expand(tokens, tokens)
    mask = allowed & real[:, None]
    if hidden == "keys and queries" and form != "global":
        mask = mask & real[:, :, None]
    if opened == "open":
        mask = with_open_rows(mask)
    elif opened == "diagonal" and form != "global":
        mask = mask | torch.eye(tokens, dtype=torch.bool)
    # A text without padding may have these masks: causal, with a prefix that is seen as a whole.
    whole = torch.stack([(key <= query) | (key < prefix) for prefix in range(tokens + 1)])
    tells_nothing = (mask[:, None] == whole).all((2, 3)).any(1) | (mask == allowed).all((1, 2))
    if dtype.is_floating_point:
        mask = added(mask, dtype)
    read = read_mask(mask[:, None], len(real), tokens, 0)
    assert isinstance(read, Mask)
    decided = ~undecided(read) & ~tells_nothing
    assert opened == "diagonal" or not undecided(read).any()
    assert torch.equal(kept(read)[decided], real[decided])
    assert kept(read)[tells_nothing].all()


@given(paddings(), st.integers(1, 12), st.booleans(), st.integers(0, 4))
def test_masks_of_a_call_with_a_cache(real, queries, on_device, free):
    """The last tokens in a call of their own, the others in its cache."""
    queries = min(queries, real.shape[1])
    held = real.shape[1] - queries
    mask = torch.nn.functional.pad(seen(real, queries, causal=True, window=None), (0, free))
    read = read_mask(
        added(mask, torch.float32)[:, None], len(real), queries,
        torch.tensor(held) if on_device else held,
    )  # fmt: skip
    assert isinstance(read, Mask)
    assert torch.equal(kept(read), real[:, held:])


@given(paddings(), st.sampled_from([torch.bool, torch.int64, torch.float32, torch.bfloat16]))
def test_masks_of_tokens(real, dtype):
    masks = [real.to(dtype)]
    if dtype.is_floating_point:
        masks.append(added(real, dtype))
    for mask in masks:
        read = read_mask(mask, *real.shape, 0)
        assert isinstance(read, Mask)
        assert torch.equal(kept(read), real)


@given(paddings(), st.booleans())
def test_several_masks_by_kind_of_layer(real, whole_first):
    tokens = real.shape[1]
    masks = {
        "full_attention": seen(real, tokens, causal=True, window=None)[:, None],
        "sliding_attention": seen(real, tokens, causal=True, window=2)[:, None],
    }
    if not whole_first:
        masks = dict(reversed(masks.items()))
    read = read_mask(masks, len(real), tokens, 0)
    assert isinstance(read, Mask)
    assert torch.equal(kept(read), real)


@given(paddings(), st.integers(1, 3))
def test_what_cannot_be_read_is_told(real, more):
    rows, tokens = real.shape
    mask = seen(real, tokens, causal=True, window=None)[:, None]
    keys = torch.nn.functional.pad(mask, (0, more))
    for given_to_model in (
        real[:, 1:],  # fewer columns than tokens
        mask[:, :, : tokens - 1] if tokens > 2 else mask[:, :, :0],
        object(),
        real.to_sparse(),
        mask.expand(-1, 2, -1, -1)[:, :, None],
    ):
        assert isinstance(read_mask(given_to_model, rows, tokens, 0), Unread)
    assert isinstance(read_mask(keys, rows, tokens, None), Unread)  # where the tokens are
    assert read_mask(None, rows, tokens, 0) is None
