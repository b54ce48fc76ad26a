"""Grouped bar charts as SVG text. Knows rectangles and labels, and nothing of what
they measure."""

from collections.abc import Mapping
from html import escape

_COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#9c755f")
_WIDTH, _LEFT, _RIGHT = 720, 210, 70
_BAR, _GAP, _HEAD = 16, 14, 44
_STYLE = "font-family: sans-serif; font-size: 12px; fill: #222"


def bar_chart(
    title: str, groups: Mapping[str, Mapping[str, float]], unit: str = ""
) -> str:
    """An SVG of horizontal bars: one group a key, one bar a series in it.

    Every group has a scale of its own, because groups may be of different sizes: bars
    compare within a group, numbers across. Groups without a bar are left out.
    """
    shown = {name: bars for name, bars in groups.items() if bars}
    series = list(dict.fromkeys(name for bars in shown.values() for name in bars))
    colors = {name: _COLORS[i % len(_COLORS)] for i, name in enumerate(series)}
    parts = [_text(10, 20, title, "font-weight: bold; font-size: 14px")]
    y = _HEAD
    for group, bars in shown.items():
        parts.append(_text(10, y + _BAR * len(bars) / 2 + 4, group))
        for name, value in bars.items():
            parts.append(_bar(y, name, value, max(bars.values()), colors[name], unit))
            y += _BAR
        y += _GAP
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" '
        f'viewBox="0 0 {_WIDTH} {y}" style="{_STYLE}">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _bar(
    y: float, name: str, value: float, largest: float, color: str, unit: str
) -> str:
    room = _WIDTH - _LEFT - _RIGHT
    width = room * value / largest if largest > 0 else 0.0
    number = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return (
        _text(_LEFT - 6, y + 12, name, "text-anchor: end; fill: #555")
        + f'\n<rect x="{_LEFT}" y="{y + 2}" width="{width:.1f}" '
        + f'height="{_BAR - 4}" fill="{color}"/>\n'
        + _text(_LEFT + width + 5, y + 12, f"{number} {unit}".strip())
    )


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" style="{style}">{escape(text)}</text>'
