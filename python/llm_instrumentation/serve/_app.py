"""The routes: pages, lists as JSON, and numbers as bytes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from importlib import resources
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .._extras import extra

with extra("serve", "strap serve"):
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

from .._json import plain
from .._pages.theme import css_root
from .._version import __version__
from ..analysis.reader import UnknownActivationError
from ..analysis.rows import NoCallsError
from ..errors import InvalidArgumentError, NotFoundError, StrapError
from ._captures import Capture
from ._effects import EffectMaps
from ._features import ORDERS, Features
from ._guard import Guard
from ._query import Query
from ._scans import Scans
from ._tensors import POOLS
from ._texts import SEARCHES
from ._units import ORDERS_OF_UNITS, Scan

__all__ = ["create_app"]

#: The files that the server gives, and no others.
_STATIC = (
    "index.html", "style.css", "app.js", "api.js", "charts.js", "colors.js", "contexts.js",
    "dom.js", "effects.js", "features.js", "heads.js", "heatmap.js", "layer.js", "lists.js",
    "overview.js", "search.js", "tokens.js", "units.js",
)  # fmt: skip
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}

_MOST = 1 << 50  # rows and places are below this
_PAGE = 500  # entries of a list
_SIDE = 2048  # rows or columns of a tile
_LAYERS = 64  # of one request for norms or vectors
_TOKENS = 1024  # likewise, and of an axis

_Answer: TypeAlias = Callable[[Query], Any]
_Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


def create_app(
    captures: Sequence[Capture],
    features: Features | None,
    effects: Sequence[EffectMaps],
    worker: Executor,
    *,
    token: str,
    port: int,
) -> Guard:
    """The application that a server runs.

    Args:
        captures: the captures; a request says which by its number.
        features: the features of an autoencoder, or None.
        effects: the files of effects; a request says which by its number.
        worker: reads captures, features and effects. It has one thread, so the memory for requests
            that come together is that of one.
        token: the secret that the first request must have.
        port: of the server; a request for another host or port is refused.
    """
    answers, scans = _Answers(captures, features, effects), Scans(worker, _json)
    routes = [
        Route("/", _page("index.html")),
        Route("/static/theme.css", _bytes(css_root().encode(), "text/css")),
        *(Route(f"/static/{name}", _page(name)) for name in _STATIC if name != "index.html"),
        *(
            Route(f"/api/{name}", _answering(answer, worker))
            for name, answer in answers.by_path(_PATHS).items()
        ),
        *(
            Route(f"/api/{name}", scans.answering(scan))
            for name, scan in answers.by_path(_SCANS).items()
        ),
    ]
    app = Starlette(
        routes=routes, exception_handlers={StrapError: _refused, Exception: _failed, 404: _unknown}
    )
    return Guard(app, token=token, port=port)


# ---- what is asked ------------------------------------------------------------


# The paths below /api/.
_PATHS = (
    "site",
    "overview",
    "layers",
    "activations",
    "activation",
    "axes",
    "tile",
    "value",
    "texts",
    "text",
    "norms",
    "vectors",
    "search",
    "features",
    "feature",
    "effects",
    "effects_tile",
    "effect",
)
_SCANS = ("units", "unit")  # likewise; these take long


class _Answers:
    """The answers to queries. A public method answers the path of its name below /api/.

    Args:
        captures: the captures that are served.
        features: the features of an autoencoder; None: none were given.
        effects: files of effects; none: none were given.
    """

    def __init__(
        self, captures: Sequence[Capture], features: Features | None, effects: Sequence[EffectMaps]
    ) -> None:
        self._captures = captures
        self._given = features
        self._effects = effects

    def by_path(self, paths: Sequence[str]) -> dict[str, _Answer]:
        """The methods by the path that they answer."""
        return {path: getattr(self, path) for path in paths}

    def site(self, query: Query) -> Any:
        return {
            "version": __version__,
            "captures": [one.path for one in self._captures],
            "features": None if self._given is None else self._given.about,
            "effects": [one.about for one in self._effects],
        }

    def overview(self, query: Query) -> Any:
        one = self._capture(query)
        if query.choice("refresh", ("0", "1")) == "1":
            one.refresh()
        return one.overview()

    def layers(self, query: Query) -> Any:
        return self._capture(query).layers(query.text("q"), *self._page(query))

    def activations(self, query: Query) -> Any:
        step = query.optional("step", high=_MOST)
        return self._capture(query).activations(query.text("layer"), *self._page(query), step)

    def activation(self, query: Query) -> Any:
        return self._capture(query).activation(query.integer("row", high=_MOST), self._fold(query))

    def axes(self, query: Query) -> Any:
        top, left, height, width = self._part(query)
        rect = top, left, min(height, _TOKENS), min(width, _TOKENS)
        lead = query.integer("lead", 0, high=_MOST)
        return self._capture(query).axes(query.integer("row", high=_MOST), lead, rect)

    def tile(self, query: Query) -> Any:
        found = self._capture(query).tile(
            query.integer("row", high=_MOST),
            self._fold(query),
            query.integer("lead", 0, high=_MOST),
            self._part(query),
            query.integer("rows", 256, low=1, high=_SIDE),
            query.integer("columns", 512, low=1, high=_SIDE),
            query.choice("pool", POOLS),
        )
        return _FloatAnswer(found.values, {"sampled": found.sampled})

    def value(self, query: Query) -> Any:
        at = query.integer("at", high=_MOST)
        return self._capture(query).value(query.integer("row", high=_MOST), at)

    def texts(self, query: Query) -> Any:
        return self._capture(query).texts(*self._page(query))

    def text(self, query: Query) -> Any:
        step, position = query.optional("step", high=_MOST), query.optional("position", high=_MOST)
        at = None if step is None or position is None else (step, position)
        sequence, layers, *_ = self._chosen(query)
        return self._capture(query).text(sequence, layers, *self._page(query), at)

    def norms(self, query: Query) -> Any:
        begin = query.integer("begin", 0, high=_MOST)
        count = query.integer("count", 100, low=1, high=_TOKENS)
        values, problems = self._capture(query).norms(*self._chosen(query), begin, count)
        return _FloatAnswer(values, {"problems": problems})

    def vectors(self, query: Query) -> Any:
        token = query.integer("at", high=_MOST)
        columns = query.integer("columns", 512, low=1, high=_SIDE)
        values, problems = self._capture(query).vectors(*self._chosen(query), token, columns)
        return _FloatAnswer(values, {"problems": problems})

    def search(self, query: Query) -> Any:
        kind = query.choice("kind", SEARCHES)
        return self._capture(query).search(kind, query.text("q"), *self._page(query))

    def features(self, query: Query) -> Any:
        order = query.choice("order", ORDERS)
        return self._described().listing(order, *self._page(query))

    def feature(self, query: Query) -> Any:
        return self._described().feature(query.integer("feature", high=_MOST))

    def effects(self, query: Query) -> Any:
        return self._measured(query).listing(query.text("kind"), *self._page(query))

    def effects_tile(self, query: Query) -> Any:
        values, labels = self._measured(query).tile(
            query.text("kind"),
            self._part(query),
            query.integer("rows", 256, low=1, high=_SIDE),
            query.integer("columns", 512, low=1, high=_SIDE),
        )
        return _FloatAnswer(values, labels)

    def effect(self, query: Query) -> Any:
        row, column = query.integer("row", high=_MOST), query.integer("column", high=_MOST)
        node, found = self._measured(query).node(query.text("kind"), row, column)
        return {**found, "captured": self._capture(query).of_node(node)}

    def units(self, query: Query) -> Scan:
        order = query.choice("order", ORDERS_OF_UNITS)
        layer, without = self._of_units(query)
        return self._capture(query).units.listing(layer, without, order, *self._page(query))

    def unit(self, query: Query) -> Scan:
        number = query.integer("unit", high=_MOST)
        return self._capture(query).units.unit(*self._of_units(query), number)

    def _of_units(self, query: Query) -> tuple[str, tuple[int, ...]]:
        """A layer, and the ids of tokens that do not count."""
        return query.text("layer"), query.integers("without", high=_MOST)

    def _capture(self, query: Query) -> Capture:
        """The capture of a query."""
        return self._captures[query.integer("capture", 0, high=len(self._captures) - 1)]

    def _page(self, query: Query) -> tuple[int, int]:
        """The first row and the number of rows of a page."""
        return query.integer("begin", 0, high=_MOST), query.integer("count", 100, low=1, high=_PAGE)

    def _chosen(self, query: Query) -> tuple[int, str, int, int]:
        """A text, and some of its layers."""
        return (
            query.integer("sequence", high=_MOST),
            query.text("layers"),
            query.integer("first", 0, high=_MOST),
            query.integer("many", _LAYERS, low=1, high=_LAYERS),
        )

    def _fold(self, query: Query) -> int:
        """The columns of a tensor with one dimension; 0: the usual number."""
        return query.integer("fold", 0, high=1 << 24)

    def _part(self, query: Query) -> tuple[int, int, int, int]:
        """The top, left, height and width of a part of a tensor."""
        return (
            query.integer("top", high=_MOST), query.integer("left", high=_MOST),
            query.integer("height", high=_MOST), query.integer("width", high=_MOST),
        )  # fmt: skip

    def _measured(self, query: Query) -> EffectMaps:
        """The effects of a query.

        Raises:
            NotFoundError: none were given.
        """
        if not self._effects:
            raise NotFoundError("no effects were given: start strap serve with --effects FILE")
        return self._effects[query.integer("file", 0, high=len(self._effects) - 1)]

    def _described(self) -> Features:
        """The features.

        Raises:
            NotFoundError: none were given.
        """
        if self._given is None:
            raise NotFoundError("no features were given: start strap serve with --features FOLDER")
        return self._given


# ---- answers ------------------------------------------------------------------


class _FloatAnswer:
    """Numbers that are sent as bytes.

    An answer is: the length of a JSON text (uint32, little-endian), the text (padded with spaces to
    a multiple of 4), and float32 values, little-endian. The text has the `shape`.

    Args:
        values: float32.
        about: more for the JSON text.
    """

    def __init__(self, values: npt.NDArray[np.float32], about: Mapping[str, Any]) -> None:
        head = _json({"shape": values.shape, **about})
        head += b" " * (-len(head) % 4)
        self.content = len(head).to_bytes(4, "little") + head + values.astype("<f4").tobytes()


def _answering(answer: _Answer, worker: Executor) -> _Endpoint:
    def answered(query: Query) -> Response:
        found = answer(query)
        if isinstance(found, _FloatAnswer):
            return Response(found.content, media_type="application/octet-stream")
        return Response(_json(found), media_type="application/json")

    async def endpoint(request: Request) -> Response:
        query = Query(request.query_params)
        return await asyncio.get_running_loop().run_in_executor(worker, answered, query)

    return endpoint


def _page(name: str) -> _Endpoint:
    content = resources.files(__package__).joinpath("static").joinpath(name).read_bytes()
    return _bytes(content, _TYPES[name.rpartition(".")[2]])


def _bytes(content: bytes, media_type: str) -> _Endpoint:
    async def endpoint(request: Request) -> Response:
        return Response(content, media_type=media_type)

    return endpoint


def _json(value: Any) -> bytes:
    return json.dumps(plain(value), ensure_ascii=False, allow_nan=False).encode()


# ---- errors -------------------------------------------------------------------


def _refused(request: Request, error: Exception) -> Response:
    """The answer to a request for what is not there or cannot be read."""
    code = 422  # damage, layers without tokens, a stream that another program removes
    if isinstance(error, InvalidArgumentError):
        code = 400
    elif isinstance(error, (NotFoundError, UnknownActivationError, NoCallsError)):
        code = 404
    return _error(code, str(error))


def _failed(request: Request, error: Exception) -> Response:
    print(f"strap serve: {request.url.path}: {error!r}", file=sys.stderr)
    return _error(500, f"{type(error).__name__}: {error}")


def _unknown(request: Request, error: Exception) -> Response:
    return _error(404, f"there is no page {request.url.path}")


def _error(code: int, message: str) -> Response:
    return Response(_json({"error": message}), code, media_type="application/json")
