"""Nested, sparse and quantized outputs are captured as their dense component tensors."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation.core.tensors.components import components_of
from llm_instrumentation.errors import UnsupportedError
from torch import Tensor, nn

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]

RAGGED = [torch.arange(8.0).view(2, 4), -torch.arange(12.0).view(3, 4)]
DENSE = torch.tensor([[0, 2, 0, 0.5], [0, 0, 0, 0], [3, 0, -1, 0], [0, 0, 0, 4]])
SCALES = torch.tensor([0.1, 0.2, 0.3, 0.7], dtype=torch.float64)
ZEROS = torch.tensor([0, 3, 1, 2])
INDICES = torch.tensor([[2, 0, 2], [1, 3, 1]])

MADE = {
    "nested": lambda: torch.nested.nested_tensor(RAGGED),
    "nested, a view": lambda: torch.nested.nested_tensor(RAGGED).transpose(1, 2),
    "nested, a part": lambda: torch.nested.nested_tensor(RAGGED).chunk(2, -1)[1],
    "nested, in a longer buffer": lambda: torch._nested_view_from_buffer(
        torch.arange(50.0), torch.tensor([[2, 3], [1, 3]]), torch.tensor([[3, 1], [3, 1]]),
        torch.tensor([0, 6]),
    ),
    "nested, any dimension": lambda: torch.nested.nested_tensor([RAGGED[0], RAGGED[1][:, :1]]),
    "nested, bfloat16": lambda: torch.nested.nested_tensor([x.bfloat16() for x in RAGGED]),
    "nested, of scalars": lambda: torch.nested.nested_tensor([torch.tensor(1.0), torch.tensor(2)]),
    "nested, of nothing": lambda: torch.nested.nested_tensor([]),
    "jagged": lambda: torch.nested.nested_tensor(RAGGED, layout=torch.jagged),
    "jagged, a view": lambda: torch.nested.nested_tensor(
        RAGGED, layout=torch.jagged
    ).transpose(1, 2),
    "jagged, with gaps": lambda: torch.nested.narrow(
        torch.arange(36.0).view(3, 6, 2), 1, torch.tensor([0, 1, 2]), torch.tensor([2, 3, 1]),
        layout=torch.jagged,
    ),
    "COO": DENSE.to_sparse,
    "COO, uncoalesced": lambda: torch.sparse_coo_tensor(INDICES, torch.ones(3), (4, 4)),
    "COO, hybrid": lambda: torch.sparse_coo_tensor(INDICES[:1], torch.rand(3, 5).half(), (4, 5)),
    "COO, empty": lambda: torch.zeros(2, 3).to_sparse(),
    "COO, complex": lambda: torch.complex(DENSE, -DENSE).to_sparse().conj(),
    "COO, integers": lambda: DENSE.long().to_sparse(),
    "CSR": DENSE.to_sparse_csr,
    "CSR, a batch": torch.stack([DENSE, DENSE.flip(1)]).to_sparse_csr,
    "CSC": DENSE.to_sparse_csc,
    "BSR": lambda: DENSE.to_sparse_bsr((2, 2)),
    "BSC": lambda: DENSE.to_sparse_bsc((2, 1)),
    "quantized": lambda: torch.quantize_per_tensor(DENSE, 0.1, 3, torch.qint8),
    "quantized, a view": lambda: torch.quantize_per_tensor(DENSE, 0.1, 3, torch.quint8).t(),
    "quantized, 32 bits": lambda: torch.quantize_per_tensor(DENSE, 1e-9, 0, torch.qint32),
    "quantized, channels": lambda: torch.quantize_per_channel(
        DENSE, SCALES, ZEROS, 1, torch.quint8
    ),
    "quantized, channels, float": lambda: torch.quantize_per_channel(
        DENSE, SCALES.float(), SCALES.float(), 0, torch.quint8
    ),
}  # fmt: skip
COMPONENTS = {
    "nested": [".values", ".sizes"],
    "jagged": [".values", ".offsets"],
    "jagged, with gaps": [".values", ".offsets", ".lengths"],
    "COO": [".indices", ".values"],
    "CSR": [".crow_indices", ".col_indices", ".values"],
    "BSR": [".crow_indices", ".col_indices", ".values"],
    "CSC": [".ccol_indices", ".row_indices", ".values"],
    "BSC": [".ccol_indices", ".row_indices", ".values"],
    "quantized": [".int_repr", ".q_scale", ".q_zero_point"],
    "quantized, channels": [".int_repr", ".q_per_channel_scales", ".q_per_channel_zero_points"],
}


class Returns(nn.Module):
    def __init__(self, output: object) -> None:
        super().__init__()
        self.output = output

    def forward(self) -> object:
        return self.output


def built_again(parts: dict[str, Tensor], transform: str, says: dict) -> Tensor:
    """The tensor that has these components.

    `transform` and `says` are the transform and the parameters of the components in the index.
    """
    if transform == "quantized":
        if "axis" not in says:
            scale, zero = parts[".q_scale"].item(), parts[".q_zero_point"].item()
            return torch._make_per_tensor_quantized_tensor(parts[".int_repr"], scale, zero)
        scales, zeros = parts[".q_per_channel_scales"], parts[".q_per_channel_zero_points"]
        return torch._make_per_channel_quantized_tensor(
            parts[".int_repr"], scales, zeros, says["axis"]
        )
    if says["layout"] == "jagged":
        return torch.nested.nested_tensor_from_jagged(
            parts[".values"], parts[".offsets"], lengths=parts.get(".lengths"),
            jagged_dim=says["shape"].index(None),
        )  # fmt: skip
    if transform == "nested":
        sizes = parts[".sizes"].tolist()
        numels = [torch.Size(size).numel() for size in sizes]
        values = parts[".values"].split(numels) if sizes else []
        return torch.nested.as_nested_tensor(
            [v.view(s) for v, s in zip(values, sizes, strict=True)]
        )
    layout = getattr(torch, says["layout"])
    if layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(
            parts[".indices"], parts[".values"], says["shape"], is_coalesced=says["is_coalesced"]
        )
    outer, inner, values = parts.values()
    return torch.sparse_compressed_tensor(outer, inner, values, says["shape"], layout=layout)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(a: Tensor, b: Tensor) -> None:
    """Asserts that two tensors are of the same kind and have the same bits."""
    assert (a.layout, a.dtype, a.is_nested, a.is_quantized) == (
        b.layout, b.dtype, b.is_nested, b.is_quantized
    )  # fmt: skip
    if a.is_nested:
        each = list(zip(a.unbind(), b.unbind(), strict=True))
        assert all(x.shape == y.shape and bits(x) == bits(y) for x, y in each)
        return
    assert a.shape == b.shape
    if a.is_quantized:
        assert a.qscheme() == b.qscheme() and torch.equal(a.int_repr(), b.int_repr())
        assert bits(a.dequantize()) == bits(b.dequantize())
        return
    if a.layout is torch.sparse_coo:
        assert a.is_coalesced() == b.is_coalesced()
    each = zip(components_of(a).dense, components_of(b).dense, strict=True)
    for (name, x), (same_name, y) in each:
        assert name == same_name and x.shape == y.shape and bits(x) == bits(y)


def rebuilt(reader: ActivationReader, path: str) -> Tensor:
    """The output at a path, built from the packets of its components."""
    parts = {a.path.removeprefix(path): a for a in reader if a.path.startswith(f"{path}.")}
    one, *others = parts.values()
    assert all((a.transform, a.parameters) == (one.transform, one.parameters) for a in others)
    values = {name: a.to_torch() for name, a in parts.items()}
    if ".values" in values and parts[".values"].source_dtype == "float32":
        values[".values"] = values[".values"].float()  # float32 values are stored as float16
    return built_again(values, one.transform, json.loads(one.parameters))


@pytest.mark.filterwarnings("error:an output of layer")
@pytest.mark.parametrize("kind", MADE)
def test_an_output_is_built_again_bit_for_bit(kind, path):
    output, x = MADE[kind](), torch.ones(2)
    model = Returns((x, {"a": [output]}))
    with torch.no_grad(), capture_activations(model, path) as framework:
        assert model()[1]["a"][0] is output
    assert framework.stats().failed == 0
    with ActivationReader(path) as reader:
        names = [a.name for a in reader]
        assert names[0] == ""
        expected = COMPONENTS.get(kind, COMPONENTS[kind.partition(",")[0]])
        if kind == "quantized, channels, float":
            expected = COMPONENTS["quantized, channels"]
        assert names[1:] == [f"[1]['a'][0]{name}" for name in expected]
        assert_same(rebuilt(reader, "[1]['a'][0]"), output)


@pytest.mark.parametrize("hooks", ["C", "Python"])
def test_a_dense_tensor_between_others(hooks, path, monkeypatch):
    if hooks == "Python":
        monkeypatch.delattr(Tensor, "__dlpack_c_exchange_api__", raising=False)
    model, x = nn.Sequential(nn.Identity()), DENSE
    nested = torch.nested.nested_tensor(RAGGED)
    outputs = [x, x.to_sparse(), x, nested, x, torch.quantize_per_tensor(x, 1.0, 0, torch.qint32)]
    with capture_activations(model, path) as framework:
        for output in outputs:
            model(output)
    assert framework.stats().failed == 0
    with ActivationReader(path) as reader:
        assert [a.step for a in reader["0"]] == [a.step for a in reader[""]] == [0, 2, 4]
        assert all(torch.equal(a.to_torch(), x.half()) for a in reader["0"])
        assert [a.step for a in reader["0.values"]] == [1, 3]
        assert [(a.step, a.to_torch().dtype) for a in reader["0.int_repr"]] == [(5, torch.int32)]
        assert [a.transform for a in reader["0.values"]] == ["sparse", "nested"]


def test_the_fast_path_of_an_encoder(path):
    """The fast path of an encoder removes the padding, so its layers return nested tensors."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 3).eval()
    x, padding = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    seen = []
    for one in model.layers:
        one.register_forward_hook(lambda module, args, output: seen.append(output))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "nothing is captured of")  # parts that do not run
        warnings.filterwarnings("ignore", "The PyTorch API of nested")
        with torch.no_grad(), capture_activations(model, path) as framework:
            model(x, src_key_padding_mask=padding)
    assert [output.is_nested for output in seen] == [True] * 3
    assert framework.stats().failed == 0
    with ActivationReader(path) as reader:
        for i, output in enumerate(seen):
            values = reader[f"layers.{i}.values"][0]
            assert json.loads(values.parameters) == {"layout": "strided"}
            assert reader[f"layers.{i}.sizes"][0].to_torch().tolist() == [[5, 16], [3, 16]]
            stored = values.to_torch().view(8, 16)
            assert torch.equal(stored, torch.cat(output.unbind()).half())


def test_values_beyond_float16_have_a_float32_twin(path):
    x = torch.nested.nested_tensor([row * 1e6 for row in RAGGED])
    model = Returns(x)
    with torch.no_grad(), capture_activations(model, path):
        model()
    with ActivationReader(path) as reader:
        assert reader[".values"][0].overflowed
        assert reader[".values"][0].transform == "nested"
        assert_same(rebuilt(reader, ""), x)


def test_components_of_recomputed_outputs_are_named_recomputed(path):
    """An output that a backward pass computes again has `!recomputed` at the end of its name."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.to_sparse = Sparse()

        def forward(self, x: Tensor) -> Tensor:
            run = torch.utils.checkpoint.checkpoint
            return run(lambda x: self.to_sparse(x).to_dense() * x, x, use_reentrant=False)

    class Sparse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu().to_sparse()

    model, x = Checkpointed(), torch.ones(2, 2, requires_grad=True)
    with capture_activations(model, path):
        model(x).sum().backward()
    with ActivationReader(path) as reader:
        first, again = reader["to_sparse.values"], reader["to_sparse.values!recomputed"]
        assert len(first) == len(again) == 1
        assert torch.equal(first[0].to_torch(), again[0].to_torch())


def test_a_tensor_in_the_memory_order_of_mkldnn_is_stored_as_a_dense_one(path):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    x = torch.rand(1, 3, 4, 4)
    model = Returns(x.to_mkldnn())
    with torch.no_grad(), capture_activations(model, path):
        model()
    with ActivationReader(path) as reader:
        (activation,) = reader
        assert (activation.name, activation.transform) == ("", None)
        assert torch.equal(activation.to_torch(), x.half())


def fake() -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2, 2).to_sparse()


REFUSED = {
    "a torch.sparse_coo tensor of torch.float32 on device meta: it has no values": lambda: (
        torch.sparse_coo_tensor(size=(3, 3), device="meta")
    ),
    "a torch.sparse_coo FakeTensor of torch.float32 on device cpu: it has no values": fake,
    "a quantized (torch.per_channel_affine_float_qparams) tensor of torch.quint4x2": lambda: (
        torch.quantize_per_channel(DENSE, SCALES.float(), SCALES.float(), 0, torch.quint4x2)
    ),
}


@pytest.mark.parametrize("says", REFUSED)
def test_outputs_without_components_are_named_in_one_warning(says, path):
    model = Returns((torch.ones(2), REFUSED[says]()))
    with torch.no_grad(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with capture_activations(model, path) as framework:
            for _ in range(3):
                model()
    assert [f"an output of layer '' is not captured: {says}" in str(w.message) for w in told] == [
        True
    ]
    assert framework.stats().failed == 3
    with ActivationReader(path) as reader:
        assert [a.name for a in reader] == [""] * 3
        assert [a.path for a in reader.missing] == ["[1]"] * 3
        assert all(a.error.startswith(says) for a in reader.missing)


NAMED = {
    "nested": r"a nested \(torch.strided\) tensor of torch.float32",
    "jagged": r"a nested \(torch.jagged\) NestedTensor of torch.float32",
    "CSR": r"a torch.sparse_csr tensor of torch.float32",
    "quantized": r"a quantized \(torch.per_tensor_affine\) tensor of torch.qint8",
}


@pytest.mark.parametrize("kind", NAMED)
def test_no_samples_are_taken_of_components(kind, path):
    """With sampling, outputs that would need components are noted and named in one warning."""
    model = Returns((torch.ones(2), MADE[kind]()))
    config = InstrumentationConfig.balanced().with_sampling(0.5)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match=NAMED[kind]) as told:
        with capture_activations(model, path, config=config):
            model()
    assert len(told) == 1
    with ActivationReader(path) as reader:
        assert [a.name for a in reader] == [""]
        assert [a.name for a in reader.missing] == ["[1]"]


def test_a_component_that_cannot_be_stored_is_noted(path):
    """The name of one component is too long; the other component is captured."""
    key = "k" * 65_524
    model = Returns({key: DENSE.to_sparse()})
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="at most 65535") as told:
        with capture_activations(model, path) as framework:
            model()
    assert len(told) == 1
    assert framework.stats().failed == 1
    with ActivationReader(path) as reader:
        assert [a.path for a in reader] == [f"['{key}'].values"]
        assert len(reader.missing) == 1


def test_a_strict_capture_raises_only_for_outputs_without_components(path):
    config = InstrumentationConfig.balanced().with_strict()
    model = Returns(DENSE.to_sparse())
    with torch.no_grad(), capture_activations(model, path, config=config):
        model()
    model = Returns(fake())
    with torch.no_grad(), pytest.raises(UnsupportedError, match="sparse_coo FakeTensor"):
        with capture_activations(model, path, config=config):
            model()
