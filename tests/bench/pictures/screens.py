"""The screen of `paceline top`, taken from a running system under load, and drawn.

Knows the screen's lines and its styles. It refuses to know what they say.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from paceline_cli.top.cells import width_of
from paceline_cli.top.controls import Controls
from paceline_cli.top.screen import draw
from paceline_cli.top.source import Source, admin_target
from paceline_cli.top.state import TopState
from paceline_client import AsyncClient, Stopping

WIDTH, HEIGHT = 80, 24
_SECONDS = 12.0
_STREAMS = {"blue": 10, "green": 6}  # by tenant
_CELL, _LINE, _SIZE, _EDGE = 8.4, 17.0, 14, 10.0
_BACKGROUND, _FOREGROUND = "#1e1e1e", "#d4d4d4"
_COLOURS = {"good": "#6a9955", "warn": "#d7ba7d", "bad": "#f44747"}
_REVERSE = ("head", "selected")


@dataclass(frozen=True, slots=True)
class Screen:
    """Lines of parts: a style and a text each."""

    source: str
    lines: Sequence[Sequence[tuple[str, str]]]


async def take_screen(target: str, source: str) -> Screen:
    """Ask a running system for answers, and take the screen of its operator after some seconds. PacelineError where
    there is none.
    """
    state, controls = TopState(), Controls()
    asked = Source(admin_target(target), None, None, state, time.monotonic)
    async with AsyncClient(target) as client:
        streams = [
            asyncio.create_task(
                client.generate(f"Story {number} for {tenant}:", tenant=tenant, stopping=Stopping(max_tokens=400))
            )
            for tenant, count in _STREAMS.items()
            for number in range(count)
        ]
        asking = asyncio.create_task(asked.run(1.0))
        try:
            await asyncio.sleep(_SECONDS)
            controls.press("end", state.overview)
            lines = draw(state, controls, WIDTH, HEIGHT, time.monotonic())
        finally:
            for task in (asking, *streams):
                task.cancel()
            await asyncio.gather(asking, *streams, return_exceptions=True)
            await asked.close()
    return Screen(source, [[(part.style, part.text) for part in line] for line in lines])


def draw_screen(screen: Screen, path: Path) -> None:
    """As a terminal shows it: every cell has the same width, whatever font there is."""
    width, height = WIDTH * _CELL + 2 * _EDGE, (len(screen.lines) + 1) * _LINE + 2 * _EDGE
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.1f} {height:.1f}" font-size="{_SIZE}" '
        'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" xml:space="preserve">',
        f'<path d="M0 0H{width:.1f}V{height:.1f}H0Z" fill="{_BACKGROUND}"/>',
    ]
    for number, line in enumerate(screen.lines):
        column = 0
        for style, text in line:
            drawn += _part(style, text, _EDGE + column * _CELL, _EDGE + number * _LINE)
            column += width_of(text)
    drawn.append(
        f'<text x="{_EDGE}" y="{height - _EDGE:.1f}" font-size="9" fill="#888888">{escape(screen.source)}</text>'
    )
    path.write_text("\n".join([*drawn, "</svg>"]) + "\n", encoding="utf-8")


def _part(style: str, text: str, x: float, y: float) -> list[str]:
    if not text.strip() and style not in _REVERSE:
        return []
    colour, width = _COLOURS.get(style, _FOREGROUND), width_of(text) * _CELL
    behind = []
    if style in _REVERSE:
        behind = [f'<path d="M{x:.1f} {y:.1f}h{width:.1f}v{_LINE}h-{width:.1f}Z" fill="{_FOREGROUND}"/>']
        colour = _BACKGROUND
    weight = ' font-weight="bold"' if style in ("bold", "bad", "selected") else ""
    where = f'x="{x:.1f}" y="{y + 0.78 * _LINE:.1f}" textLength="{width:.1f}"'
    return [*behind, f'<text {where} fill="{colour}"{weight}>{escape(text)}</text>']
