"""Sites: what each layer of a model is, whatever its architecture calls it."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import prepared
import pyarrow as pa
import pytest
import torch
from blocks_by_hand import tensors_of
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation.analysis.reader import UnknownActivationError
from llm_instrumentation.analysis.rows import NoCallsError
from llm_instrumentation.core.selection import LayerSelectionError
from llm_instrumentation.core.tensors.model_sites import sites_of_model
from llm_instrumentation.core.tensors.sites import ModelSites
from llm_instrumentation.errors import CorruptError, InvalidArgumentError
from small_models import build
from tiny_models import MODEL_TYPES, Tiny, make
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

TYPES = (
    "albert", "bart", "bert", "bitnet", "bloom", "clip", "cohere", "deberta-v2", "distilbert",
    "falcon_h1", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "granite", "llama", "longformer",
    "mamba", "mixtral", "mpnet", "mpt", "olmo2", "owlvit", "phi", "rwkv", "t5", "vit", "wav2vec2",
    "xlnet",
)  # fmt: skip


class Sums(TorchDispatchMode):
    """Keeps the summands of all sums of two tensors of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("add.Tensor", "add_.Tensor"):
            one, other = args[:2]
            if isinstance(other, Tensor) and one.shape == other.shape and one.is_floating_point():
                self.seen.append((one.clone(), other.clone()))
        return func(*args, **(kwargs or {}))


class Run:
    """A pass of a model: the first tensors that its modules got and returned, and all sums."""

    def __init__(self, tiny: Tiny) -> None:
        self.given: dict[str, list[Tensor]] = defaultdict(list)
        self.returned: dict[str, list[Tensor]] = defaultdict(list)
        handles = []
        for name, module in tiny.model.named_modules():

            def before(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                self._keep(self.given[name], [*args, *kwargs.values()])

            def behind(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                self._keep(self.returned[name], output)

            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(behind))
        with torch.no_grad(), Sums() as sums:
            tiny.model(**tiny.inputs(padding="right"))
        self.sums = sums.seen
        for handle in handles:
            handle.remove()

    def _keep(self, kept: list[Tensor], values: Any) -> None:
        kept.extend(tensor.clone() for tensor in tensors_of(values)[:1])

    def holds_stream(self, layer: str, found: Tensor) -> bool:
        """Whether a tensor is a sum with what a layer was given, not what is added to it."""
        streams = [one for one in self.given[layer][:1] if one.any()]  # a sum with zeros is itself
        for one, other in self.sums:
            if any(same(one, stream) or same(other, stream) for stream in streams):
                streams.append(one + other)
        return any(same(found, stream) for stream in streams[1:])

    def is_added(self, layer: str, found: Tensor, through: int = 3) -> bool:
        """Whether a tensor is added to another one, as it is, scaled, or behind other modules."""
        summands = [one for pair in self.sums for one in pair]
        if any(same(found, one) or scaled(found, one) for one in summands):
            return True
        behind = (
            self.returned[name][0]
            for name, given in self.given.items()
            if name.startswith(f"{layer}.") and self.returned[name]
            if any(same(one, found) for one in given)
        )
        return through > 0 and any(
            self.is_added(layer, one, through - 1) for one in behind if not same(one, found)
        )


def same(one: Tensor, other: Tensor) -> bool:
    return one.numel() == other.numel() and torch.equal(one.reshape(-1), other.reshape(-1))


def scaled(one: Tensor, other: Tensor) -> bool:
    if one.numel() != other.numel():
        return False
    ratio = other.reshape(-1) / one.reshape(-1)
    ratio = ratio[ratio.isfinite()]
    return len(ratio) > 0 and torch.allclose(ratio, ratio.median(), rtol=1e-4)


def mistakes(tiny: Tiny) -> list[str]:
    """What the sites of a model say that a pass of it shows to be wrong."""
    run, found = Run(tiny), []
    for stack in sites_of_model(tiny.model).stacks:
        if not run.returned[stack.residual[0]]:  # parts for images do not run without an image
            continue
        for layer, behind in itertools.pairwise(stack.residual):
            if not same(run.returned[layer][0], run.given[behind][0]):
                found.append(f"{layer} does not return what {behind} is given")
        for layer, *blocks in zip(
            stack.residual, stack.attention, stack.cross_attention, stack.mlp, strict=True
        ):
            for block in filter(None, blocks):
                if not run.returned[block]:
                    found.append(f"{block} does not run")
                elif run.holds_stream(layer, run.returned[block][0]):
                    found.append(f"{block} returns a sum with the residual stream")
                elif not run.is_added(layer, run.returned[block][0]):
                    found.append(f"{block} is not added")
    return found


@pytest.mark.parametrize("model_type", TYPES)
def test_sites_are_what_a_pass_of_the_model_shows(model_type):
    tiny = make(model_type)
    assert mistakes(tiny) == []
    stacks = sites_of_model(tiny.model).stacks
    assert all(len(stack.residual) >= 1 for stack in stacks)
    without = {"attention": ("mamba", "xlnet"), "mlp": ("mamba", "xlnet")}
    for kind, types in without.items():
        assert all(None not in getattr(one, kind) for one in stacks) == (model_type not in types)


# Layers that are no steps of one residual stream: stages of images, several streams with weights,
# a part that not every call runs. Or attention of shifted blocks, which is cut before it is added.
OTHERS = {
    "deepseek_v4": "is not added", "dory": "is not added|does not return", "hy_v4": "is not added",
    "hy_v4_vl": "is not added", "maskformer": "is not added", "maskformer-swin": "is not added",
    "pegasus_x": r"layers\.1\.self_attn is not added", "pvt_v2": "does not return",
    "regnet": "is not added", "swiftformer": "is not added",
    "swin2sr": "is not added", "swinv2": "is not added", "trocr": "does not run",
    "yolos": "does not return", "zaya": "is not added",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_sites_of_all_types_are_right_or_not_told():
    names = sorted({name for names in MODEL_TYPES.values() for name in names})
    found = {model_type: mistakes(make(model_type)) for model_type in names}
    wrong = {
        model_type: its
        for model_type, its in found.items()
        if not all(re.search(OTHERS.get(model_type, "no other"), one) for one in its)
    }
    assert wrong == {}


# ---- captured, and read -------------------------------------------------------------------------


def captured(model: nn.Module, path: Path, config: InstrumentationConfig, **given: Any) -> Path:
    with torch.no_grad(), capture_activations(model, path, config=config):
        model(**given)
    return path


def test_a_capture_has_the_chosen_sites_and_reads_them_by_name(tmp_path):
    model, ids = build("llama", layers=4).eval(), torch.arange(6)[None]
    seen: dict[str, Tensor] = {}
    layer = model.model.layers[2]
    for name, module in (("residual", layer), ("attention", layer.self_attn), ("mlp", layer.mlp)):
        module.register_forward_hook(
            lambda module, args, output, name=name: seen.update({name: tensors_of(output)[0]})
        )
    config = InstrumentationConfig.balanced().with_float32()
    config.with_sites("residual", "attention", "mlp", layers=[1, -2]).with_sites("final_norm")
    path = captured(model, tmp_path / "run.stream", config, input_ids=ids)
    with ActivationReader(path) as reader:
        assert set(reader.layers) == {
            *(f"model.layers.{n}{part}" for n in (1, 2) for part in ("", ".self_attn", ".mlp")),
            "model.norm",
        }
        assert torch.equal(reader.residual(2)[0].to_torch(), seen["residual"])
        assert torch.equal(reader.attention(-2)[0].to_torch(), seen["attention"])
        assert torch.equal(reader.mlp(2)[0].to_torch(), seen["mlp"])
        assert reader.names("residual") == ["model.layers.1", "model.layers.2"]
        assert reader.names("residual", range(4))[3] == "model.layers.3"
        assert reader.names("final_norm") == ["model.norm"]
        with pytest.raises(UnknownActivationError, match=r"no activation named 'model.layers.3'"):
            reader.residual(3)
        with pytest.raises(UnknownActivationError, match=r"no activation named 'lm_head'"):
            reader.names("unembedding")
        with pytest.raises(InvalidArgumentError, match="no layer 4 in 'model.layers', which has 4"):
            reader.residual(4)
        with pytest.raises(InvalidArgumentError, match="no cross_attention of layer 'model.lay"):
            reader.names("cross_attention", 0)
        with pytest.raises(InvalidArgumentError, match="choose one of residual, attention"):
            reader.names("resid")


def test_sites_are_kept_beside_included_names_and_cleared(tmp_path):
    model = build("gpt2").eval()
    config = (
        InstrumentationConfig.balanced().with_layers("transformer.wpe").with_sites("embeddings")
    )
    path = captured(model, tmp_path / "run.stream", config, input_ids=torch.arange(4)[None])
    with ActivationReader(path) as reader:
        assert set(reader.layers) == {"transformer.wpe", "transformer.wte"}
    assert config.with_sites().sites == ()


def test_a_model_with_two_stacks_asks_for_one(tmp_path):
    model, ids = build("t5").eval(), torch.arange(4)[None]
    with pytest.raises(LayerSelectionError, match="several stacks .*'encoder.block', 'decoder.bl"):
        captured(
            model, tmp_path / "no", InstrumentationConfig.balanced().with_sites("residual"),
            input_ids=ids, decoder_input_ids=ids,
        )  # fmt: skip
    config = InstrumentationConfig.balanced().with_sites(
        "residual", "cross_attention", stack="decoder"
    )
    path = captured(model, tmp_path / "run", config, input_ids=ids, decoder_input_ids=ids)
    with ActivationReader(path) as reader:
        assert [one.name for one in reader.residual(1, stack="decoder")] == ["decoder.block.1"]
        assert reader.names("cross_attention", 0, stack="decoder") == [
            "decoder.block.0.layer.1.EncDecAttention"
        ]
        with pytest.raises(InvalidArgumentError, match="no stack: there are 'encoder.block'"):
            reader.residual(1, stack="vision")


def test_a_model_without_known_layers_is_told(tmp_path):
    with pytest.raises(LayerSelectionError, match="not known where the model has its layers"):
        captured(
            nn.Sequential(nn.Linear(2, 2)), tmp_path / "run",
            InstrumentationConfig.balanced().with_sites("residual"), input=torch.ones(1, 2),
        )  # fmt: skip
    assert sites_of_model(make("reformer").model).stacks == ()  # it has two streams
    assert sites_of_model(make("xlm").model).stacks == ()  # it has lists of parts of layers


@pytest.mark.parametrize("wrong", ["heads", "", 3, None])
def test_a_wrong_kind_of_site_is_refused(wrong):
    with pytest.raises(ValueError, match="sites must be one of residual"):
        InstrumentationConfig.balanced().with_sites(wrong)
    with pytest.raises(ValueError, match=r"layers = \['first'\]: give an integer"):
        InstrumentationConfig.balanced().with_sites("mlp", layers=["first"])


def test_numbers_of_layers_are_those_of_numpy_and_torch_too(tmp_path):
    def of(layers: Any) -> InstrumentationConfig:
        return InstrumentationConfig.balanced().with_sites("residual", layers=layers)

    whole = of([0, 1])
    for several in (np.arange(2), torch.arange(2), (np.int64(0), 1), range(2)):
        assert of(several).sites == whole.sites
    assert of(np.int8(1)).sites[0].layers == (1,)
    tiny, path = make("llama"), tmp_path / "a.stream"
    with torch.no_grad(), capture_activations(tiny.model, path, config=whole):
        tiny.model(**tiny.inputs())
    with ActivationReader(path) as reader:
        assert reader.residual(np.int64(1))[0].name == reader.residual(1)[0].name
        for wrong in (True, 1.0, "1"):
            with pytest.raises(InvalidArgumentError, match="layers = .*: give an integer, or a"):
                reader.residual(wrong)
            with pytest.raises(InvalidArgumentError, match="layers = .*: give an integer, or a"):
                of(wrong)


def with_sites_of_file(path: Path, sites: bytes | None) -> None:
    """Replaces what a calls file says of sites."""
    calls = path.with_name(f"{path.name}.calls")
    with pa.OSFile(str(calls)) as file:
        table = pa.ipc.open_stream(file).read_all()
    metadata = {key: value for key, value in table.schema.metadata.items() if key != b"sites"}
    if sites is not None:
        metadata[b"sites"] = sites
    with pa.OSFile(str(calls), "wb") as file:
        schema = table.schema.with_metadata(metadata)
        with pa.ipc.new_stream(file, schema) as stream:
            stream.write_table(table.replace_schema_metadata(metadata))


def test_captures_that_do_not_say_what_is_what_are_told(tmp_path):
    model = build("llama").eval()
    config = InstrumentationConfig.balanced()
    path = captured(model, tmp_path / "run.stream", config, input_ids=torch.arange(4)[None])
    with_sites_of_file(path, None)
    with ActivationReader(path) as reader, pytest.raises(NoCallsError, match="older release"):
        reader.residual(0)
    record = sites_of_model(model).record()
    assert ModelSites.of_record(json.loads(json.dumps(record))) == sites_of_model(model)
    record["stacks"][0]["mlp"] = ["one"]
    damaged = [b"[]", b'{"m": {}}', b'{"m": {"stacks": 3}}', json.dumps({"m": record}).encode()]
    for text in damaged:
        with_sites_of_file(path, text)
        with ActivationReader(path) as reader, pytest.raises(CorruptError, match="list of sites"):
            reader.residual(0)
    path.with_name("run.stream.calls").unlink()
    with ActivationReader(path) as reader, pytest.raises(NoCallsError):
        reader.residual(0)


def test_several_models_in_a_capture_are_told(tmp_path):
    from llm_instrumentation import InstrumentationFramework

    first, second = build("llama").eval(), build("gpt2").eval()
    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    framework.instrument_model(first)
    framework.instrument_model(second)
    with torch.no_grad(), framework.capture_activations(tmp_path / "run.stream"):
        first(torch.arange(4)[None])
    with ActivationReader(tmp_path / "run.stream") as reader:
        with pytest.raises(InvalidArgumentError, match="several models, llama, gpt2"):
            reader.residual(0)


def strap(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*prepared.strap(), *arguments], capture_output=True, text=True)


def test_strap_show_takes_a_site(tmp_path):
    model = build("llama").eval()
    config = InstrumentationConfig.balanced()
    path = str(captured(model, tmp_path / "run.stream", config, input_ids=torch.arange(4)[None]))
    shown = strap("show", path, "--site", "mlp", "--layer", "-1", "--json")
    assert json.loads(shown.stdout)["name"] == "model.layers.1.mlp"
    assert '"model.norm"' in strap("show", path, "--site", "final_norm", "--json").stdout
    for wrong, said in (
        ([], "give a LAYER; or --site"),
        (["model.norm", "--site", "mlp"], "give a LAYER; or --site"),
        (["model.norm", "--layer", "1"], "give a LAYER; or --site"),
        (["--site", "residual"], "2 layers have the residual: choose one by --layer"),
        (["--site", "heads"], "choose one of residual"),
    ):
        done = strap("show", path, *wrong)
        assert done.returncode and said in done.stderr
