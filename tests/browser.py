"""Chromium for the tests of pages: what a page logs, how accessible and how wide it is."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

#: The widths in pixels that every page must fit: a phone, a small laptop, a large screen.
WIDTHS = (360, 1280, 2560)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A headless `playwright.sync_api.Browser`. Skips the test if there is no Chromium."""
    sync_api = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("needs Chromium (Debian's package chromium) on PATH")
    # Chromium has no sandbox for root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


def complaints(page: Any) -> list[str]:
    """Collects what `page` logs as errors and warnings, its exceptions, and requests that fail.

    Requests that the page itself ends, because something else is to be shown, are no failures.
    """
    found: list[str] = []

    def logged(message: Any) -> None:
        if message.type in ("error", "warning"):
            found.append(message.text)

    def failed(request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":
            found.append(f"{request.url}: {request.failure}")

    page.on("console", logged)
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("requestfailed", failed)
    return found


def violations(page: Any) -> list[str]:
    """What axe-core finds against the accessibility rules: the rule, and the first element."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    return [
        f"{rule['id']}: {rule['help']}: {rule['nodes'][0]['html'][:200]}"
        for rule in axe.run(page).response["violations"]
    ]


def sideways(page: Any) -> int:
    """By how many pixels the page is wider than its window."""
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    return int(page.evaluate(wide))
