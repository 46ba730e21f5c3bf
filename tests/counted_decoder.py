"""A decoder with a static cache whose memory traffic is counted by hand, operator by operator."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

Traffic = Counter[tuple[str, str]]  # bytes, by region type and by load or store


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, most: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.cache = [torch.zeros(heads, most, width // heads) for _ in range(2)]

    def forward(self, x: Tensor, at: Tensor, end: int) -> Tensor:
        q, k, v = (  # [heads, tokens, width of a head]
            part(x).view(len(x), self.heads, -1).transpose(0, 1)
            for part in (self.q, self.k, self.v)
        )
        for slots, new in zip(self.cache, (k, v), strict=True):
            slots.index_copy_(1, at, new)
        keys, values = (slots[:, :end] for slots in self.cache)
        shares = torch.softmax(torch.bmm(q, keys.transpose(1, 2)), -1)
        x = x + self.o(torch.bmm(shares, values).transpose(0, 1).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(x)))


class CountedDecoder(nn.Module):
    """Runs one text. Each call gets its next tokens, int64 [tokens].

    Args:
        most: places in the cache.
    """

    def __init__(
        self, *, vocabulary: int, width: int, heads: int, inner: int, layers: int, most: int,
        device: str, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__()
        self.sizes = vocabulary, width, heads, inner, layers
        self.itemsize = dtype.itemsize
        with torch.device(device):
            self.embed = nn.Embedding(vocabulary, width)
            self.layers = nn.ModuleList(Layer(width, heads, inner, most) for _ in range(layers))
            self.logits = nn.Linear(width, vocabulary, bias=False)
            self.places = torch.arange(most)
        self.to(dtype)
        for layer in self.layers:
            layer.cache = [slots.to(dtype) for slots in layer.cache]
        self.end = 0

    @property
    def caches(self) -> list[list[Tensor]]:
        return [layer.cache for layer in self.layers]

    def forward(self, ids: Tensor) -> Tensor:
        begin, self.end = self.end, self.end + len(ids)
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.places[begin : self.end], self.end)
        found: Tensor = self.logits(x[-1:])
        return found

    def traffic(self, tokens: int, different: int, end: int) -> Traffic:
        """The bytes that a call moves.

        Args:
            tokens: of the call.
            different: how many different tokens are among them.
            end: tokens in the cache after the call.
        """
        vocabulary, width, heads, inner, layers = self.sizes
        row, shares, wide = tokens * width, heads * tokens * end, tokens * inner
        # A result of one token is a view of the product of shares and values, with more a copy.
        joined = row if tokens > 1 else 0
        weights = layers * (4 * width * width + 2 * width * inner)
        loads = (
            3 * row  # q, k and v read x
            + 2 * row  # the cache is given keys and values
            + row + 2 * shares  # scores read q; softmax and the product with values read shares
            + joined + row + 2 * row  # the heads are joined; o and the sum read their arguments
            + row + wide + wide + 2 * row  # up, gelu, down, the sum
        )  # fmt: skip
        stores = 3 * row + 2 * shares + row + joined + row + row + 2 * wide + row + row
        size, indices = self.itemsize, 8 * tokens
        return Traffic(
            {
                ("weight", "load"): size * (different * width + weights + vocabulary * width),
                ("kv_cache", "load"): size * layers * 2 * end * width,
                ("kv_cache", "store"): size * layers * 2 * row,
                ("activation", "load"): size * (layers * loads + width)
                + indices * (1 + 2 * layers),
                ("activation", "store"): size * (row + layers * stores + vocabulary),
            }
        )


def traced_traffic(rows: Any) -> Traffic:
    """The same of a trace, a table of Arrow."""
    sums = rows.group_by(["region_type", "op_type"]).aggregate([("length_bytes", "sum")])
    return Traffic(
        {
            (region, op): length
            for region, op, length in zip(
                sums["region_type"].to_pylist(), sums["op_type"].to_pylist(),
                sums["length_bytes_sum"].to_pylist(), strict=True,
            )
        }
    )  # fmt: skip
