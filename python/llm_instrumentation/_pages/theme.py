"""The colours and fonts of pages and figures, as constants and as CSS variables.

The colours are based on those of Okabe and Ito, which people with any colour vision can tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping

INK = "#1b1f24"
MUTED = "#5b6672"
RULE = "#c3cad2"
GRID = "#e4e8ec"
SURFACE = "#ffffff"
ALARM = "#b3261e"  # of what is wrong, or held up

#: For each colour: its value on a light page, and on a dark page.
COLORS = {
    "blue": ("#0072b2", "#5db4ec"),
    "vermillion": ("#d55e00", "#f58a3c"),
    "green": ("#009e73", "#3fcba0"),
    "purple": ("#b8558f", "#e59bc4"),
    "gray": ("#767f88", "#a3adb7"),
    "ochre": ("#a6761d", "#dcb355"),
}
#: Colours that can be told apart, for lines of any kind.
PALETTE = tuple(COLORS[name][0] for name in ("blue", "vermillion", "green", "purple", "gray"))

_TONES = {
    "good": ("#1a7f4b", "#4cc38a"),
    "fair": ("#9a6700", "#e3b341"),
    "bad": (ALARM, "#ff8379"),
    "plain": ("#5b6672", "#a2acb6"),
}
_FONTS = (
    "--font: system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif; "
    "--mono: ui-monospace, SFMono-Regular, Menlo, Consolas, 'Liberation Mono', monospace"
)


def css_colors() -> tuple[dict[str, str], dict[str, str]]:
    """The CSS variables of the figures of a light page and of a dark page."""
    light = {"--ink": INK, "--muted": MUTED, "--rule": RULE, "--grid": GRID, "--surface": SURFACE}
    dark = {
        "--ink": "#e8ebee",
        "--muted": "#a2acb6",
        "--rule": "#4a545e",
        "--grid": "#2c343c",
        "--surface": "#161b20",
    }
    for name, (on_light, on_dark) in COLORS.items():
        light[f"--{name}"], dark[f"--{name}"] = on_light, on_dark
    light["--bad"], dark["--bad"] = _TONES["bad"]
    return light, dark


def css_root() -> str:
    """The CSS that declares fonts and colours for light screens and paper, and for dark screens."""
    light, dark = css_colors()
    light |= {"--page": "#f6f7f8", **{f"--{name}": tone[0] for name, tone in _TONES.items()}}
    dark |= {"--page": "#0f1317", **{f"--{name}": tone[1] for name, tone in _TONES.items()}}
    return (
        f":root {{ color-scheme: light dark; {_FONTS}; {_declared(light)} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {_declared(dark)} }} }}\n"
    )


def _declared(variables: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {value}" for name, value in variables.items())
