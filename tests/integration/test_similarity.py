"""Linear CKA of captures, beside the formulas over all pairs of tokens."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation._native import DTYPE_CODES, Session
from llm_instrumentation.analysis import similarity
from llm_instrumentation.analysis.dataset import LayersDifferError
from llm_instrumentation.analysis.rows import NoCallsError, NotTokenAlignedError
from llm_instrumentation.analysis.similarity import cka
from llm_instrumentation.cli import main
from llm_instrumentation.cli.exit_codes import ExitCode
from llm_instrumentation.errors import InvalidArgumentError, NotFoundError
from torch import Tensor

LOSSLESS = InstrumentationConfig.max().with_float32()


#: Compares layers of captures that do not have what a model was given.
of_vectors = functools.partial(cka, without_calls=True)


def write(path: Path, layers: dict[str, Tensor], calls: int = 3) -> Path:
    """Writes a capture of [tokens, width] vectors, some in each of several steps."""
    session = Session(path, codec="lz4", workers=1, max_memory_bytes=64 << 20)
    for step in range(calls):
        for name, rows in layers.items():
            part = rows.tensor_split(calls)[step].contiguous()
            code = DTYPE_CODES[str(part.dtype).removeprefix("torch.")]
            layer = session.layer(name, "", "")
            assert session.enqueue(layer, code, tuple(part.shape), part.data_ptr(), step=step)
            session.flush()
    session.close()
    return path


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def hsic(x: np.ndarray, y: np.ndarray, debiased: bool) -> float:
    """HSIC with linear kernels, from all pairs of tokens; debiased: Song et al. 2012, eq. 5."""
    n, one = len(x), np.ones(len(x))
    of_x, of_y = x @ x.T, y @ y.T
    if not debiased:
        centring = np.eye(n) - 1 / n
        return np.trace(of_x @ centring @ of_y @ centring) / (n - 1) ** 2
    np.fill_diagonal(of_x, 0)
    np.fill_diagonal(of_y, 0)
    first, last = np.trace(of_x @ of_y), one @ of_x @ of_y @ one
    middle = (one @ of_x @ one) * (one @ of_y @ one) / ((n - 1) * (n - 2))
    return (first + middle - 2 / (n - 2) * last) / (n * (n - 3))


def expected(x: Tensor, y: Tensor, debiased: bool = True) -> float:
    # The means are taken off first, because the formulas lose digits to them.
    a, b = ((rows - rows.mean(0)).numpy() for rows in (x, y))
    own = hsic(a, a, debiased) * hsic(b, b, debiased)
    return hsic(a, b, debiased) / np.sqrt(own)


@pytest.fixture
def vectors() -> dict[str, Tensor]:
    """Vectors of 151 tokens at three layers of different widths, the last made from the first."""
    first = noise(151, 20) + 3
    last = torch.tanh(first @ noise(20, 33, seed=1) / 4) + noise(151, 33, seed=2) / 3
    return {"layers.0": first, "layers.1": noise(151, 7, seed=3), "layers.2": last}


# ---- the estimates --------------------------------------------------------------------------


@pytest.mark.parametrize("debiased", [True, False])
def test_values_are_those_of_all_pairs_of_tokens(vectors, debiased, tmp_path):
    found = of_vectors(write(tmp_path / "a.stream", vectors), debiased=debiased)
    assert found.layers == found.other_layers == tuple(vectors)
    assert (found.tokens, found.debiased) == (151, debiased)
    for i, x in enumerate(vectors.values()):
        for j, y in enumerate(vectors.values()):
            assert found.values[i, j] == pytest.approx(expected(x, y, debiased), abs=1e-10)


@pytest.mark.parametrize("tokens", [4, 5, 30])
def test_a_few_tokens(tokens, tmp_path):
    x, y = noise(tokens, 12), noise(tokens, 5, seed=1)
    found = of_vectors(write(tmp_path / "a.stream", {"0": x, "1": y}, calls=1))
    assert found.values[0, 1] == pytest.approx(expected(x, y), abs=1e-10)


def test_one_long_vector_among_short_ones(tmp_path):
    """As of the first token in many models, a thousand times as long as the others."""
    x, y = noise(300, 16), noise(300, 16, seed=1)
    x[0] *= 1000
    found = of_vectors(write(tmp_path / "a.stream", {"0": x, "1": y}))
    assert found.values[0, 1] == pytest.approx(expected(x, y), abs=1e-8)


def test_rotation_scale_and_a_constant_change_nothing(vectors, tmp_path):
    rotation = torch.linalg.qr(noise(20, 20, seed=9))[0]
    moved = dict(vectors, turned=(vectors["layers.0"] @ rotation) * 7 - 40)
    found = of_vectors(write(tmp_path / "a.stream", moved), list(moved))
    np.testing.assert_allclose(found.values[0], found.values[3], atol=1e-12)
    assert found.values[0, 3] == pytest.approx(1, abs=1e-12)


def test_layers_that_have_nothing_in_common(tmp_path):
    """The biased estimate tells of a similarity that is not there; the debiased one does not."""
    path = write(tmp_path / "a.stream", {"0": noise(400, 300), "1": noise(400, 300, seed=1)})
    assert abs(of_vectors(path).values[0, 1]) < 0.01
    assert of_vectors(path, debiased=False).values[0, 1] > 0.4


@pytest.mark.parametrize("batch", [1, 7, 151, 1000])
def test_the_batch_size_does_not_matter(vectors, batch, tmp_path, monkeypatch):
    path = write(tmp_path / "a.stream", vectors)
    whole = of_vectors(path).values
    monkeypatch.setattr(similarity, "_BATCH", batch)
    np.testing.assert_allclose(of_vectors(path).values, whole, rtol=0, atol=1e-12)


def test_groups_of_pairs_give_the_same(vectors, tmp_path):
    path = write(tmp_path / "a.stream", vectors)
    largest = 8 * 33 * 33
    np.testing.assert_array_equal(
        of_vectors(path, max_bytes=largest).values, of_vectors(path).values
    )
    with pytest.raises(InvalidArgumentError, match=rf"33 values wide.*max_bytes={largest:,}"):
        of_vectors(path, max_bytes=largest - 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_of_any_type_are_multiplied_in_float64(vectors, dtype, tmp_path):
    stored = {name: rows.to(dtype) for name, rows in vectors.items()}
    found = of_vectors(write(tmp_path / "a.stream", stored))
    of = expected(stored["layers.0"].double(), stored["layers.2"].double())
    assert found.values[0, 2] == pytest.approx(of, abs=1e-10)


# ---- two captures ---------------------------------------------------------------------------


def test_layers_of_two_captures(vectors, tmp_path):
    changed = {
        "blocks.0": vectors["layers.0"].cos(),
        "blocks.1": vectors["layers.2"] @ noise(33, 50, seed=4),
    }
    a = write(tmp_path / "a.stream", vectors)
    b = write(tmp_path / "b.stream", changed, calls=5)
    found = of_vectors(a, ["layers.0", "layers.2"], other=b, other_layers="blocks.*")
    assert (found.a, found.b) == (str(a), str(b))
    assert found.layers == ("layers.0", "layers.2")
    assert found.other_layers == ("blocks.0", "blocks.1")
    for i, name in enumerate(found.layers):
        for j, other in enumerate(found.other_layers):
            of = expected(vectors[name], changed[other])
            assert found.values[i, j] == pytest.approx(of, abs=1e-10)


def test_captures_of_other_tokens_are_refused(vectors, tmp_path):
    shorter = {name: rows[:150] for name, rows in vectors.items()}
    a = write(tmp_path / "a.stream", vectors)
    b = write(tmp_path / "b.stream", shorter)
    with pytest.raises(LayersDifferError, match="has 151 tokens, .* has 150: capture both"):
        of_vectors(a, other=b)
    with pytest.raises(LayersDifferError, match="has 151 tokens"):
        of_vectors(a, other=b, rows=50)


def test_a_capture_with_other_ids_is_refused(build, ids, tmp_path):
    model = build("llama")
    a, b = tmp_path / "a.stream", tmp_path / "b.stream"
    for path, given in ((a, ids), (b, (ids + 1) % 97)):
        with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
            model(given)
    with pytest.raises(LayersDifferError, match=rf"has the id {ids[0, 0]}, in .* it has"):
        cka(a, other=b)


# ---- a model --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder(minilm, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("minilm") / "a.stream"
    with torch.no_grad(), capture_activations(minilm.model, path, config=LOSSLESS):
        minilm.model(**minilm.inputs)
    return path


def test_the_blocks_of_a_trained_model(encoder, minilm):
    """Padding is left out, and neighbours are more alike than blocks far from each other."""
    found = cka(encoder)
    assert found.layers == tuple(f"encoder.layer.{k}" for k in range(6))
    assert found.tokens == int(minilm.inputs["attention_mask"].sum())
    with ActivationReader(encoder) as reader:
        x, y = (reader.rows(f"encoder.layer.{k}").to_torch().double() for k in (1, 4))
        of_reader = cka(reader, "encoder.layer.?")
    assert found.values[1, 4] == pytest.approx(expected(x, y), abs=1e-10)
    np.testing.assert_array_equal(of_reader.values, found.values)
    np.testing.assert_allclose(np.diag(found.values), 1)
    np.testing.assert_array_equal(found.values, found.values.T)
    assert (np.diff(found.values[0]) < 0).all()


def test_some_of_the_tokens(encoder, minilm):
    ids = minilm.inputs["input_ids"][minilm.inputs["attention_mask"].bool()]
    names = ["encoder.layer.0", "encoder.layer.5"]
    with ActivationReader(encoder) as reader:
        x, y = (reader.rows(name).to_torch().double() for name in names)
    inner = (ids != 101) & (ids != 102)
    found = cka(encoder, names, without_tokens=(101, 102))
    assert found.tokens == int(inner.sum())
    assert found.values[0, 1] == pytest.approx(expected(x[inner], y[inner]), abs=1e-10)
    spread = torch.arange(30) * len(ids) // 30
    found = cka(encoder, names, rows=30)
    assert found.tokens == 30
    assert found.values[0, 1] == pytest.approx(expected(x[spread], y[spread]), abs=1e-10)
    assert cka(encoder, names, rows=10_000).tokens == len(ids)


def test_a_model_beside_itself_in_another_type(encoder, minilm, tmp_path):
    path = tmp_path / "b.stream"
    with torch.no_grad(), capture_activations(minilm.model.to(torch.bfloat16), path):
        minilm.model(**minilm.inputs)
    minilm.model.float()
    across = cka(encoder, other=path)
    assert (np.diag(across.values) > 0.99).all()
    np.testing.assert_allclose(across.values, cka(encoder).values, atol=0.02)


def test_heads_are_one_vector(build, ids, tmp_path):
    model, path = build("llama"), tmp_path / "a.stream"
    names = ["model.layers.0", "model.layers.1.self_attn.v_proj"]
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        model(ids)
    with ActivationReader(path) as reader:
        x, y = (reader.rows(name).to_torch().double() for name in names)
    assert cka(path, names).values[0, 1] == pytest.approx(expected(x, y), abs=1e-10)


# ---- what is shown --------------------------------------------------------------------------


def test_the_table_and_what_a_notebook_shows(vectors, tmp_path):
    found = of_vectors(write(tmp_path / "a.stream", vectors))
    table = found.to_pandas()
    assert list(table.index) == list(table.columns) == list(vectors)
    assert table.loc["layers.0", "layers.2"] == found.values[0, 2]
    assert repr(found) == "<LayerSimilarity: Linear CKA of 151 tokens, debiased, 3 x 3 layers>"
    html = found._repr_html_()
    assert f'<td style="text-align:right">{found.values[0, 2]:.3f}</td>' in html
    assert "The first" not in html


def test_a_large_table_is_cut_in_a_notebook(tmp_path):
    layers = {f"layers.{k}": noise(20, 3, seed=k) for k in range(31)}
    html = of_vectors(write(tmp_path / "a.stream", layers, calls=1))._repr_html_()
    assert "layers.29" in html and "layers.30" not in html
    assert "The first 30 layers; to_pandas() has all." in html


def test_the_figure_has_the_values(vectors, tmp_path):
    from llm_instrumentation.analysis.plots import plot_similarity

    a = write(tmp_path / "a.stream", vectors)
    found = of_vectors(a)
    ax = plot_similarity(found)
    np.testing.assert_array_equal(np.asarray(ax.images[0].get_array()), found.values)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "1", "2"]
    assert f"{found.values[0, 2]:.2f}" in [text.get_text() for text in ax.texts]
    assert ax.get_ylabel() == "layers"
    b = write(tmp_path / "b.stream", vectors)
    two = plot_similarity(of_vectors(a, other=b))
    assert (two.get_ylabel(), two.get_xlabel()) == ("layers of a.stream", "layers of b.stream")


# ---- errors ---------------------------------------------------------------------------------


def test_what_has_no_similarity_is_refused(vectors, tmp_path):
    lone = torch.zeros(151, 4)
    lone[5] = 1
    odd = dict(
        vectors, constant=torch.full((151, 4), 0.1), lone=lone, nan=noise(151, 4) / 0,
        complex=noise(151, 4).to(torch.complex128),
    )  # fmt: skip
    path = write(tmp_path / "a.stream", odd)
    for debiased in (True, False):
        with pytest.raises(InvalidArgumentError, match="'constant' has the same vector"):
            of_vectors(path, ["layers.0", "constant"], debiased=debiased)
    with pytest.raises(InvalidArgumentError, match="'lone' has .* or for all but one"):
        of_vectors(path, ["layers.0", "lone"])
    with pytest.raises(InvalidArgumentError, match="'nan' has NaN or infinite values"):
        of_vectors(path, ["layers.0", "nan"])
    with pytest.raises(InvalidArgumentError, match="'complex' has complex values"):
        of_vectors(path, ["layers.0", "complex"])


def test_arguments_that_do_not_fit(vectors, tmp_path):
    path = write(tmp_path / "a.stream", vectors)
    few = write(tmp_path / "few.stream", {name: rows[:3] for name, rows in vectors.items()})
    with pytest.raises(InvalidArgumentError, match="has 3 tokens: CKA needs 4"):
        of_vectors(few)
    for rows in (3, 2.5, True):
        with pytest.raises(InvalidArgumentError, match=f"rows = {rows}"):
            of_vectors(path, rows=rows)
    with pytest.raises(InvalidArgumentError, match="pass other too"):
        of_vectors(path, other_layers="layers.0")
    with pytest.raises(KeyError, match="'blocks.0'"):
        of_vectors(path, "blocks.0")
    with pytest.raises(NotFoundError):
        of_vectors(tmp_path / "none.stream")
    with pytest.raises(NoCallsError, match="without_calls"):
        cka(path)
    with pytest.raises(InvalidArgumentError, match="needs the calls"):
        of_vectors(path, without_tokens=[0])


def test_layers_without_a_vector_for_each_token_are_refused(tmp_path):
    path = write(tmp_path / "a.stream", {"0": noise(12, 3), "1": noise(12)})
    with pytest.raises(NotTokenAlignedError):
        of_vectors(path)


# ---- the command ----------------------------------------------------------------------------


@pytest.fixture
def strap(capsys):
    """Runs the command in this process. Returns its exit code, its output and its errors."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return run


def test_the_command_prints_draws_and_gives_json(strap, vectors, tmp_path):
    a = write(tmp_path / "a.stream", vectors)
    found = of_vectors(a)
    code, out, _ = strap("similarity", a, "--without-calls", "--figure", tmp_path / "a.png")
    assert code == ExitCode.OK
    title, heads, first, *_ = out.splitlines()
    assert title == "Linear CKA of 151 tokens, debiased"
    assert heads.split() == ["0", "1", "2", "layer"]
    assert first.split() == ["0", *(f"{value:.3f}" for value in found.values[0]), "layers.0"]
    assert (tmp_path / "a.png").stat().st_size > 5000
    code, out, _ = strap("similarity", a, "--without-calls", "--json", "--biased", "--rows", "100")
    as_json = json.loads(out)
    assert (as_json["tokens"], as_json["debiased"]) == (100, False)
    np.testing.assert_array_equal(as_json["values"], of_vectors(a, debiased=False, rows=100).values)


def test_the_command_compares_two_captures(strap, vectors, tmp_path):
    a = write(tmp_path / "a.stream", vectors)
    b = write(tmp_path / "b.stream", {"x": vectors["layers.2"], "y": vectors["layers.0"]})
    options = ["--other", b, "--other-layer", "y", "--other-layer", "x"]
    code, out, _ = strap("similarity", a, "--without-calls", "layers.0", *options)
    assert code == ExitCode.OK
    assert out.splitlines()[-1] == "columns: x, y"  # in the order of execution
    assert out.splitlines()[2].split()[2] == "1.000"


def test_the_command_says_what_is_wrong(strap, vectors, tmp_path):
    a = write(tmp_path / "a.stream", vectors)
    code, _, err = strap("similarity", a, "--without-calls", "--figure", tmp_path / "a.gif")
    assert code == ExitCode.USAGE and "a.gif: the name ends in" in err
    code, _, err = strap("similarity", a, "--without-calls", "none")
    assert code == ExitCode.NOT_FOUND and "'none'" in err
    with open(a, "r+b") as file:
        file.seek(-500, 2)
        file.write(b"wrong")
    code, _, err = strap("similarity", a, "--without-calls")
    assert code == ExitCode.DAMAGED, err
