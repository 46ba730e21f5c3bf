"""The command `strap`: its subcommands and their options. Other modules do the work."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ..errors import (
    CorruptError,
    InvalidArgumentError,
    MissingExtraError,
    NotFoundError,
    StrapPermissionError,
    UnsupportedError,
)
from .exit_codes import ExitCode, TraceExitCode, epilog
from .opening import opening
from .program import Program, markup, new_app

__all__ = ["STRAP", "TRACE", "app"]

_CODES = epilog(ExitCode)
_CAPTURES, _MODELS = "Captures", "Models"
_MACHINE, _MEMORY = "The machine beside a program", "Memory traces"

app = new_app(
    "strap", "Look into captures, watch the machine beside them, trace a model's memory.", _CODES
)

_Stream = Annotated[Path, typer.Argument(help="The stream of a capture.", metavar="STREAM")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

# For subcommands that pass all their arguments on to another program.
_PASSED_ON = {
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "ignore_unknown_options": True,
}


# ---- captures ----


@app.command(epilog=_CODES, rich_help_panel=_CAPTURES)
def info(stream: _Stream, as_json: _Json = False) -> None:
    """Describe a capture on one page: its layers, types, sizes, and whether it is complete."""
    begun = opening(stream)
    from .captures import info as run

    run(begun, as_json)


@app.command(epilog=_CODES, rich_help_panel=_CAPTURES)
def ls(
    stream: _Stream,
    layers: Annotated[
        list[str] | None,
        typer.Argument(help="Names; * and ? match (default: all).", metavar="LAYER"),
    ] = None,
    steps: Annotated[
        str | None, typer.Option("--steps", help="A number, a range as 0:10, or numbers as 1,5.")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", help="Likewise, by the number of tokens before the step."),
    ] = None,
    packets: Annotated[
        bool, typer.Option("--packets", help="A row for each packet, not for each layer.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """List the layers of a capture, or its packets, with their sizes."""
    begun = opening(stream)
    from .captures import ls as run

    run(begun, layers, steps, tokens, packets, as_json)


@app.command(epilog=_CODES, rich_help_panel=_CAPTURES)
def tail(
    stream: _Stream,
    layers: Annotated[
        list[str] | None,
        typer.Argument(help="Names; * and ? match (default: all).", metavar="LAYER"),
    ] = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", help="How many of the tensors so far to print.", min=0)
    ] = 10,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object a line and nothing else.")
    ] = False,
) -> None:
    """Print the tensors of a running capture as they come, until it ends."""
    from .tail import tail as run

    run(stream, layers or None, lines, as_json)


@app.command(epilog=_CODES, rich_help_panel=_CAPTURES)
def show(
    stream: _Stream,
    layer: Annotated[str, typer.Argument(help="A name that strap ls lists.", metavar="LAYER")],
    step: Annotated[int | None, typer.Option("--step", help="Which forward call.")] = None,
    token: Annotated[
        int | None, typer.Option("--token", help="How many tokens were recorded before the step.")
    ] = None,
    call: Annotated[
        int | None, typer.Option("--call", help="Which call of the module in the step.")
    ] = None,
    nth: Annotated[
        int | None, typer.Option("--nth", help="Which of several tensors that fit, from 0.")
    ] = None,
    values: Annotated[int, typer.Option("--values", help="How many values to print.", min=0)] = 8,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="The stored type, if no index gives it.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Show one tensor: its shape, type, statistics and first values."""
    from .captures import show as run

    run(stream, layer, {"step": step, "token": token, "call": call}, nth, values, dtype, as_json)


@app.command(epilog=_CODES, rich_help_panel=_CAPTURES)
def compare(
    a: Annotated[Path, typer.Argument(help="The stream of the reference.", metavar="A")],
    b: Annotated[Path, typer.Argument(help="The stream to compare with it.", metavar="B")],
    layers: Annotated[
        list[str] | None,
        typer.Argument(help="Names in A; * and ? match (default: all).", metavar="LAYER"),
    ] = None,
    steps: Annotated[
        str | None, typer.Option("--steps", help="A number, a range as 0:10, or numbers as 1,5.")
    ] = None,
    renamed: Annotated[
        list[str] | None,
        typer.Option(
            "--map", help="Names in A and B, as 'model.layers.*=blocks.*'; again for more."
        ),
    ] = None,
    rtol: Annotated[
        float | None, typer.Option("--rtol", help="Relative tolerance (default: of the types).")
    ] = None,
    atol: Annotated[float, typer.Option("--atol", help="Absolute tolerance.")] = 0.0,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Draw the error of each layer to a file.")
    ] = None,
    heat_map: Annotated[
        Path | None,
        typer.Option("--heat-map", help="Draw the error of each token and layer to a file."),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Compare two captures: which layers differ, by how much, and where it begins.

    The exit code is 7 if a layer differs by more than the tolerance.
    """
    from .compare import compare as run

    raise typer.Exit(
        run(a, b, layers or [], steps, renamed or [], rtol, atol, figure, heat_map, as_json)
    )


@app.command(epilog=_CODES, rich_help_panel=_CAPTURES)
def similarity(
    stream: _Stream,
    layers: Annotated[
        list[str] | None,
        typer.Argument(help="Names; * and ? match (default: the blocks).", metavar="LAYER"),
    ] = None,
    other: Annotated[
        Path | None,
        typer.Option("--other", help="A capture of the same tokens to compare with."),
    ] = None,
    other_layers: Annotated[
        list[str] | None,
        typer.Option("--other-layer", help="A name in it; again for more (default: as LAYER)."),
    ] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", help="So many tokens, spread evenly (default: all).")
    ] = None,
    biased: Annotated[
        bool, typer.Option("--biased", help="The biased estimate of older papers.")
    ] = False,
    without_tokens: Annotated[
        str | None, typer.Option("--without-tokens", help="Ids to leave out, as 101,102.")
    ] = None,
    without_calls: Annotated[
        bool, typer.Option("--without-calls", help="Each vector is a row, token or not.")
    ] = False,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Draw the matrix to a PNG, PDF or SVG file.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Compare the layers of a capture with each other, or with those of another, by linear CKA."""
    from .similarity import similarity as run

    run(
        stream, layers, other, other_layers, rows, not biased, without_tokens, without_calls,
        figure, as_json,
    )  # fmt: skip


@app.command(epilog=_CODES, rich_help_panel=_CAPTURES)
def report(
    stream: _Stream,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The page (default: STREAM.report.html).")
    ] = None,
    packets: Annotated[
        int, typer.Option("--packets", help="Read so many packets; but one of each layer.", min=1)
    ] = 1000,
    step: Annotated[
        int | None, typer.Option("--step", help="Show the tokens of this step (default: the last).")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="For texts (default: that of the model).")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="The causal language model, for the logit lens."),
    ] = None,
    against: Annotated[
        Path | None, typer.Option("--against", help="The stream of a reference to compare with.")
    ] = None,
    renamed: Annotated[
        list[str] | None,
        typer.Option("--map", help="As for strap compare; the reference is A."),
    ] = None,
    features: Annotated[
        Path | None, typer.Option("--features", help="A folder of strap sae features --out.")
    ] = None,
    probes: Annotated[
        Path | None, typer.Option("--probes", help="Snapshots of block devices of strap probe.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="The run folder of a memory trace.")
    ] = None,
    circuit: Annotated[
        Path | None, typer.Option("--circuit", help="A .json or .graphml file of strap circuit.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is at --out, whatever it is.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Write a capture as one HTML page: layers, values, tokens, attention, differences.

    The page needs no other file, no script and no network.
    """
    from .reports import report as run

    run(
        stream, out, packets, step, tokenizer, model, against, renamed or [], features, probes,
        trace, circuit, overwrite, as_json,
    )  # fmt: skip


@app.command(epilog=_CODES, rich_help_panel=_CAPTURES)
def verify(stream: _Stream, as_json: _Json = False) -> None:
    """Read every packet, compare its checksum, and list the damaged ones."""
    from .captures import verify as run

    raise typer.Exit(run(stream, as_json))


@app.command(epilog=_CODES, rich_help_panel=_CAPTURES)
def salvage(
    stream: Annotated[
        Path, typer.Argument(help="The damaged stream; it is not changed.", metavar="STREAM")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The new stream (default: NAME.salvaged.stream beside it)."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", "--force", help="Replace an existing file.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Copy the intact packets of a damaged stream to a new one, and list what is lost."""
    from .captures import salvage as run

    run(stream, out, overwrite, as_json)


@app.command(epilog=_CODES, rich_help_panel=_CAPTURES)
def upload(
    path: Annotated[Path, typer.Argument(help="A stream, or a run folder.", metavar="PATH")],
    url: Annotated[
        str, typer.Argument(help="The folder to upload to: s3://BUCKET/PREFIX/.", metavar="URL")
    ],
    rate: Annotated[
        float | None, typer.Option("--rate", help="Send at most so many megabytes a second.")
    ] = None,
    delete_local: Annotated[
        bool, typer.Option("--delete-local", help="Delete local files that are proven there.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Upload a finished capture to object storage. Run it again, and it goes on where it ended."""
    from .uploads import upload as run

    run(path, url, rate, delete_local, as_json)


@app.command(epilog=_CODES, rich_help_panel=_CAPTURES)
def serve(
    streams: Annotated[
        list[Path], typer.Argument(help="The streams of captures.", metavar="STREAM...")
    ],
    port: Annotated[
        int, typer.Option("--port", help="Of 127.0.0.1; 0: a free one.", min=0, max=65535)
    ] = 0,
    features: Annotated[
        Path | None, typer.Option("--features", help="A folder of strap sae features --out.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", help="For the texts of tokens: a folder, or a model's name."),
    ] = None,
    opens: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Look into captures in a browser: layers, tensors, tokens, features. Ctrl-C ends it."""
    first = opening(streams[0])
    from .serving import serve as run

    run([first, *streams[1:]], port, features, tokenizer, opens)


class RowFormat(str, Enum):
    SAFETENSORS = "safetensors"
    PARQUET = "parquet"
    NPY = "npy"
    DATASETS = "datasets"


@app.command(epilog=_CODES, rich_help_panel=_CAPTURES)
def export(
    sources: Annotated[
        list[Path], typer.Argument(help="Streams, or a file of snapshots.", metavar="STREAM...")
    ],
    out: Annotated[
        Path, typer.Argument(help="The folder, or FILE.parquet for snapshots.", metavar="OUT")
    ],
    form: Annotated[
        RowFormat | None, typer.Option("--format", help="The format of rows; needed for streams.")
    ] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option("--layer", help="A name; * and ? match. May be given again."),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option("--columns", help="As token_id,step (see docs/API.md for the default)."),
    ] = None,
    steps: Annotated[
        str | None, typer.Option("--steps", help="A number, a range as 0:10, or numbers as 1,5.")
    ] = None,
    padding: Annotated[bool, typer.Option("--padding", help="Export rows of padding too.")] = False,
    without_tokens: Annotated[
        str | None, typer.Option("--without-tokens", help="Ids of tokens without a row, as 0,1.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Convert the values (default: as stored).")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option("--context", help="Tokens of a row, for datasets: SAELens' layout.", min=1),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is at OUT, whatever it is.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Export the rows of layers, a vector for each token, as files of other libraries.

    A file of snapshots of a probe becomes a Parquet file: strap export FILE.jsonl FILE.parquet.
    """
    from .exports import export as run

    run(
        sources, out, None if form is None else form.value, layers or [], columns, steps, padding,
        without_tokens, dtype, context, overwrite, as_json,
    )  # fmt: skip


class ImportFormat(str, Enum):
    VLLM = "vllm"
    TORCH = "torch"
    STREAM = "stream-1.3.1"


class Codec(str, Enum):
    NONE = "none"
    LZ4 = "lz4"
    ZSTD = "zstd"


@app.command("import", epilog=_CODES, rich_help_panel=_CAPTURES)
def import_(
    source: Annotated[Path, typer.Argument(help="A file, or a folder of them.", metavar="SOURCE")],
    out: Annotated[Path, typer.Argument(help="The new stream.", metavar="OUT")],
    form: Annotated[ImportFormat, typer.Option("--format", help="The format of the files.")],
    layers: Annotated[
        list[str] | None,
        typer.Option(
            "--layer",
            help="For vllm: a pattern (default: layers.{layer}), or given again for each layer.",
        ),
    ] = None,
    widths: Annotated[
        list[str] | None,
        typer.Option("--width", help="For stream-1.3.1: values of a token, as NAME=768."),
    ] = None,
    dtypes: Annotated[
        list[str] | None,
        typer.Option("--dtype", help="For stream-1.3.1: type of the values, as NAME=bfloat16."),
    ] = None,
    codec: Annotated[Codec, typer.Option("--codec", help="The codec of the stream.")] = Codec.LZ4,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is at OUT, whatever it is.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Make a capture of files with activations that another program wrote."""
    from .imports import import_files as run

    run(
        source, out, form.value, layers or [], widths or [], dtypes or [], codec.value, overwrite,
        as_json,
    )  # fmt: skip


# ---- models ----


class CircuitMetric(str, Enum):
    LOGIT_DIFFERENCE = "logit-difference"
    CROSS_ENTROPY = "cross-entropy"
    KL_DIVERGENCE = "kl-divergence"


@app.command(epilog=_CODES, rich_help_panel=_MODELS)
def circuit(
    model: Annotated[
        str, typer.Argument(help="A causal language model: a folder or a name.", metavar="MODEL")
    ],
    clean: Annotated[
        list[str] | None, typer.Option("--clean", help="A text. May be given again.")
    ] = None,
    corrupted: Annotated[
        list[str] | None, typer.Option("--corrupted", help="Its counterpart, of as many tokens.")
    ] = None,
    correct: Annotated[
        list[str] | None, typer.Option("--correct", help="The token that should follow.")
    ] = None,
    wrong: Annotated[
        list[str] | None, typer.Option("--wrong", help="The one that follows the corrupted text.")
    ] = None,
    pairs: Annotated[
        Path | None,
        typer.Option("--pairs", help="These texts instead, by name: an object in each line."),
    ] = None,
    metric: Annotated[
        CircuitMetric, typer.Option("--metric", help="What effects are effects on.")
    ] = CircuitMetric.LOGIT_DIFFERENCE,
    steps: Annotated[
        int, typer.Option("--steps", help="Of integrated gradients; 0: one gradient.", min=0)
    ] = 5,
    top_k: Annotated[int, typer.Option("--top-k", help="Edges to choose.", min=1)] = 60,
    exact: Annotated[
        bool, typer.Option("--exact", help="Measure these edges by patching, too.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write the circuit: a page.html, or .json, .graphml, .dot."),
    ] = None,
    every: Annotated[
        Path | None, typer.Option("--all", help="Write the graph of all edges, as .json.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Default: that of the model.")
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Pairs at a time.", min=1)] = 8,
    device: Annotated[str, typer.Option("--device", help="As cpu or cuda.")] = "cpu",
    as_json: _Json = False,
) -> None:
    """Find the edges of a language model that make the difference between two texts."""
    from .circuits import circuit as run

    texts = {"clean": clean, "corrupted": corrupted, "correct": correct, "wrong": wrong}
    run(
        model, {name: given or () for name, given in texts.items()}, pairs, metric.value, steps,
        top_k, exact, out, every, tokenizer, batch_size, device, as_json,
    )  # fmt: skip


# ---- sparse autoencoders ----

sae = typer.Typer(
    help="Train sparse autoencoders of SAELens on captures, evaluate and explain them.",
    epilog=_CODES,
    rich_markup_mode=markup(),
)
app.add_typer(sae, name="sae", rich_help_panel=_CAPTURES)

_Streams = Annotated[list[Path], typer.Argument(help="Streams.", metavar="STREAM...")]
_WithoutTokens = Annotated[
    str | None, typer.Option("--without-tokens", help="Ids of tokens to leave out, as 0,1.")
]
_Device = Annotated[str, typer.Option("--device", help="As cpu or cuda.")]
_Saes = Annotated[Path, typer.Argument(help="The folder of a training.", metavar="SAES")]
_Rows = Annotated[int, typer.Option("--batch-size", help="Rows at a time.")]
_MaxRows = Annotated[int | None, typer.Option("--max-rows", help="Read no more rows.")]
_OneLayer = Annotated[str | None, typer.Option("--layer", help="Needed if SAES has several.")]
_Features = Annotated[str | None, typer.Option("--features", help="Their numbers, as 1,5,9.")]


class Order(str, Enum):
    NONE = "none"
    POOL = "pool"
    FULL = "full"


class Scale(str, Enum):
    NONE = "none"
    MEAN_NORM = "expected_average_only_in"


class FirstBias(str, Enum):
    MEAN = "mean"
    ZEROS = "zeros"


@sae.command("train", epilog=_CODES)
def sae_train(
    sources: _Streams,
    out: Annotated[Path, typer.Argument(help="The folder.", metavar="OUT")],
    architecture: Annotated[str, typer.Option("--architecture", help="As topk or gated.")],
    width: Annotated[int, typer.Option("--width", help="Features of each autoencoder.")],
    layers: Annotated[
        list[str] | None,
        typer.Option("--layer", help="A name; * and ? match. May be given again."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Training steps (default: one epoch).")
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Rows of a step.")] = 4096,
    shuffle: Annotated[
        Order, typer.Option("--shuffle", help="The order of the rows.")
    ] = Order.POOL,
    lr: Annotated[float, typer.Option("--lr", help="The rate of learning.")] = 3e-4,
    normalize: Annotated[
        Scale,
        typer.Option(
            "--normalize",
            help="Divides the vectors: none, expected_average_only_in.",
            metavar="KIND",
        ),
    ] = Scale.MEAN_NORM,
    bias: Annotated[
        FirstBias, typer.Option("--bias", help="The decoder's bias at the beginning.")
    ] = FirstBias.MEAN,
    options: Annotated[
        list[str] | None,
        typer.Option("--option", help="A field of the architecture, as k=32. May be given again."),
    ] = None,
    trainer: Annotated[
        list[str] | None,
        typer.Option("--trainer", help="A field of SAELens' trainer. May be given again."),
    ] = None,
    without_tokens: _WithoutTokens = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the order and the weights.")] = 0,
    device: _Device = "cpu",
    checkpoint_every: Annotated[
        int, typer.Option("--checkpoint-every", help="Training steps between checkpoints.")
    ] = 1000,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Draw the losses to this PNG, SVG or PDF file.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin anew, and replace an earlier training.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Train an autoencoder for each layer; a training that was killed goes on."""
    from .sae import train as run

    run(
        sources, out, layers or [], batch_size, shuffle.value, without_tokens, options or [],
        trainer or [], figure, as_json, architecture=architecture, width=width, steps=steps, lr=lr,
        normalize=normalize.value, bias=bias.value, seed=seed, device=device,
        checkpoint_every=checkpoint_every, overwrite=overwrite,
    )  # fmt: skip


@sae.command("evaluate", epilog=_CODES)
def sae_evaluate(
    sources: _Streams,
    saes: _Saes,
    layers: Annotated[
        list[str] | None,
        typer.Option("--layer", help="A name (default: all). May be given again."),
    ] = None,
    batch_size: _Rows = 4096,
    without_tokens: _WithoutTokens = None,
    max_rows: _MaxRows = None,
    device: _Device = "cpu",
    model: Annotated[
        str | None,
        typer.Option("--model", help="A causal language model, for the cross-entropy score."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option("--text", help="A text file for the model, in UTF-8.")
    ] = None,
    context: Annotated[
        int, typer.Option("--context", help="Tokens that the model sees at once.", min=2)
    ] = 128,
    as_json: _Json = False,
) -> None:
    """Tell how well autoencoders reconstruct the rows of captures, and what that costs a model."""
    from .sae import evaluate as run

    run(
        sources, saes, layers or [], batch_size, without_tokens, max_rows, device, model, text,
        context, as_json,
    )  # fmt: skip


class FileFormat(str, Enum):
    PARQUET = "parquet"
    JSONL = "jsonl"


@sae.command("features", epilog=_CODES)
def sae_features(
    sources: _Streams,
    saes: _Saes,
    layer: _OneLayer = None,
    batch_size: _Rows = 4096,
    without_tokens: _WithoutTokens = None,
    max_rows: _MaxRows = None,
    device: _Device = "cpu",
    model: Annotated[
        str | None,
        typer.Option("--model", help="A causal language model, for the logits they change."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="For texts (default: that of the model).")
    ] = None,
    features: _Features = None,
    top: Annotated[int, typer.Option("--top", help="Contexts of a feature.", min=1)] = 5,
    context: Annotated[int, typer.Option("--context", help="Tokens of a context.", min=1)] = 20,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write all of them to this new folder.")
    ] = None,
    form: Annotated[
        FileFormat | None, typer.Option("--format", help="Of --out (default: parquet).")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is at --out, whatever it is.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Show on which tokens features are active, and which they promote."""
    from .sae import features as run

    run(
        sources, saes, layer, batch_size, without_tokens, device, model, tokenizer, features, out,
        None if form is None else form.value, overwrite, as_json, top=top, context=context,
        max_rows=max_rows,
    )  # fmt: skip


@sae.command("latents", epilog=_CODES)
def sae_latents(
    sources: _Streams,
    saes: _Saes,
    out: Annotated[
        Path, typer.Argument(help="A folder; it gets a new one for the layer.", metavar="OUT")
    ],
    layer: _OneLayer = None,
    batch_size: _Rows = 4096,
    without_tokens: _WithoutTokens = None,
    max_rows: _MaxRows = None,
    device: _Device = "cpu",
    model: Annotated[
        str, typer.Option("--model", help="The model's name, for Delphi's config.json.")
    ] = "",
    features: _Features = None,
    context: Annotated[int, typer.Option("--context", help="Tokens of a context.", min=1)] = 256,
    splits: Annotated[int, typer.Option("--splits", help="Number of files.", min=1)] = 5,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is in the folder of the layer.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Write the activations of features for Delphi, which lets language models explain them."""
    from .sae import latents as run

    run(
        sources, saes, out, layer, batch_size, without_tokens, device, model, features, as_json,
        max_rows=max_rows, context=context, splits=splits, overwrite=overwrite,
    )  # fmt: skip


# ---- the machine ----


class Sort(str, Enum):
    CPU = "cpu"
    FAULTS = "faults"
    OFF_CPU = "off-cpu"
    IO = "io"


@app.command(add_help_option=False, context_settings=_PASSED_ON, rich_help_panel=_MACHINE)
def probe(context: typer.Context) -> None:
    """Run strap-probe, which prints a line of JSON for each interval. Try: strap probe --help."""
    from ..probes.program import run

    raise typer.Exit(run(context.args))


@app.command(epilog=_CODES, rich_help_panel=_MACHINE)
def top(
    interval: Annotated[float, typer.Option("--interval", help="Seconds.")] = 1.0,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", help="Disk or partition; may be given again (default: all)."),
    ] = None,
    sort: Annotated[Sort, typer.Option("--sort", help="The order of the processes.")] = Sort.CPU,
    once: Annotated[bool, typer.Option("--once", help="Print one interval, then exit.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object for each interval, as a line.")
    ] = False,
) -> None:
    """Show a live view of devices and processes; q or Ctrl-C ends it.

    If the output is no terminal, it prints a table for each interval.
    """
    from ..probes.top import run

    run(interval, device or [], sort.value, once, as_json)


@app.command(epilog=_CODES, rich_help_panel=_MACHINE)
def timeline(
    stream: _Stream,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write a Perfetto trace, for ui.perfetto.dev."),
    ] = None,
    profiler: Annotated[
        Path | None,
        typer.Option("--profiler", help="With --out: add the JSON of PyTorch's profiler."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is at --out, whatever it is.")
    ] = False,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Draw the waits to this PNG, SVG or PDF file.")
    ] = None,
    table: Annotated[
        Path | None, typer.Option("--table", help="Write the intervals to this CSV file.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Show when a capture did what: as a Perfetto trace, or as a summary of its waits.

    With --out it writes a trace. Without it, it tells whether a capture with probes waited for the
    disk or for the CPU; --figure and --table go with that.
    """
    from .timelines import perfetto, waits

    if out is not None and (figure is not None or table is not None):
        raise InvalidArgumentError("--figure and --table are of the summary: leave --out away")
    if out is None and (profiler is not None or overwrite):
        raise InvalidArgumentError("--profiler and --overwrite are of a trace: give --out too")
    if out is None:
        waits(stream, figure, table, as_json)
    else:
        perfetto(stream, out, profiler, overwrite, as_json)


# ---- memory traces ----


@app.command(add_help_option=False, context_settings=_PASSED_ON, rich_help_panel=_MEMORY)
def trace(context: typer.Context) -> None:
    """Trace, label and analyse a model's memory, as mrm-trace does. Try: strap trace --help."""
    raise typer.Exit(TRACE.run("strap trace", context.args))


def _trace_app() -> typer.Typer:
    from .trace import app

    return app


STRAP = Program(
    load=lambda: app,
    usage=ExitCode.USAGE,
    interrupted=ExitCode.INTERRUPTED,
    failed=ExitCode.FAILED,
    codes={
        StrapPermissionError: ExitCode.NOT_PERMITTED,
        UnsupportedError: ExitCode.UNSUPPORTED,
        NotFoundError: ExitCode.NOT_FOUND,
        FileNotFoundError: ExitCode.NOT_FOUND,
        KeyError: ExitCode.NOT_FOUND,
        InvalidArgumentError: ExitCode.USAGE,
        CorruptError: ExitCode.USAGE,
    },
)
TRACE = Program(
    load=_trace_app,
    usage=TraceExitCode.USAGE,
    interrupted=TraceExitCode.INTERRUPTED,
    failed=TraceExitCode.RUN_FAILED,
    codes={MissingExtraError: TraceExitCode.USAGE},
)
