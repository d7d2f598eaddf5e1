"""The colours of the pages: text can be read on everything that it stands on, in light and in dark."""

from __future__ import annotations

import re

import pytest

from toolwise.view.view_server import STATIC

READABLE = 4.5
"""The contrast that WCAG asks for in text of ordinary size."""
Rgb = tuple[float, ...]


def theme(selector: str) -> dict[str, str]:
    text = (STATIC / "app.css").read_text("utf-8").partition(selector + " {")[2].partition("}")[0]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6}|\d+)", text))


THEMES = {"light": theme(":root"), "dark": theme(':root[data-theme="dark"]')}


def rgb(colour: str) -> Rgb:
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))


def mixed(top: Rgb, below: Rgb, share: float) -> Rgb:
    return tuple(share * a + (1 - share) * b for a, b in zip(top, below, strict=True))


def contrast(first: Rgb, second: Rgb) -> float:
    def luminance(colour: Rgb) -> float:
        red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in colour)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", THEMES)
def test_text_can_be_read_on_every_background(name: str) -> None:
    colours = {key: rgb(value) for key, value in THEMES[name].items() if value.startswith("#")}
    pairs = {
        f"{text} on {ground}": contrast(colours[text], colours[ground])
        for text in ("text", "muted", "accent", "good", "bad", "warn")
        for ground in ("bg", "card", "soft")
    }
    pairs |= {  # pills, on a tint of themselves
        f"{text} tinted": contrast(colours[text], mixed(colours[text], colours["card"], share))
        for text, share in (("good", 0.15), ("warn", 0.22), ("accent", 0.14))
    }
    assert not {pair: value for pair, value in pairs.items() if value < READABLE}


@pytest.mark.parametrize("name", THEMES)
def test_tokens_can_be_read_on_their_strongest_colour(name: str) -> None:
    share = (25 + int(THEMES[name]["shade"])) / 255
    colours = {key: rgb(value) for key, value in THEMES[name].items() if value.startswith("#")}
    for colour in ("positive", "negative", "run-3", "run-4"):
        ground = mixed(colours[colour], colours["soft"], share)
        assert contrast(colours["text"], ground) >= READABLE, colour
