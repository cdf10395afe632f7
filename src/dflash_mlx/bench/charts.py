"""Small charts as SVG text: numbers and words in, one document out. Knows nothing of what they mean.

Bars in groups with whiskers, and lines with markers; every bar and point carries its value as a tooltip, bars also
in print. Fonts are those of the viewer, so widths are estimates with room to spare.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#3ca951", "#a463f2", "#6cc5b0", "#9c6b4e", "#97bbf5")

_WIDTH, _HEIGHT = 760, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 24, 88, 56
_INK, _FAINT = "#333333", "#dddddd"


@dataclass(frozen=True, slots=True)
class Bar:
    """A value with its range, or without."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """Points of one thing, from left to right."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    colour: int | None = None  # lines that belong together share one; None: one of its own


def bars(
    title: str,
    groups: Sequence[str],
    series: Sequence[tuple[str, Sequence[Bar | None]]],
    *,
    y_label: str,
    reference: float | None = None,
) -> str:
    """Groups side by side, in each one bar of every series; None leaves a gap.

    Args:
        title: above the chart.
        groups: their names.
        series: name and one bar for each group.
        y_label: what the height means.
        reference: a height that gets a line of its own.
    """
    shown = [bar for _, row in series for bar in row if bar]
    tops = [max(bar.value, bar.high or 0.0) for bar in shown] + [reference or 0.0]
    frame = _Frame(title, y_label, "", ticks(max(tops)), (0.0, float(len(groups))))
    parts = [
        frame.axes(),
        frame.legend([(name, COLOURS[i % len(COLOURS)], False) for i, (name, _) in enumerate(series)]),
    ]
    room = 0.78 / max(len(series), 1)
    for at, group in enumerate(groups):
        parts.append(_text(frame.x(at + 0.5), _HEIGHT - _BOTTOM + 20, group))
        for i, (name, row) in enumerate(series):
            if bar := row[at]:
                left = at + 0.11 + i * room
                parts.append(
                    _bar(frame, left, room * 0.92, bar, COLOURS[i % len(COLOURS)], f"{group}, {name}")
                )
    if reference is not None:
        y = frame.y(reference)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_INK}" '
            'stroke-dasharray="5 4"/>'
        )
    return _document(title, parts)


def lines(
    title: str,
    series: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    x_names: Sequence[tuple[float, str]] | None = None,
    top: float | None = None,
) -> str:
    """Lines with markers over a common axis that begins at 0.

    Args:
        title: above the chart.
        series: at least one with a point.
        x_label: what the place from left to right means.
        y_label: what the height means.
        x_names: places on the x axis and what to write there; None takes those of the points.
        top: the height that the axis reaches; None takes that of the points.
    """
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points]
    left, right = min(xs), max(xs)
    pad = 0.04 * (right - left) or 0.5
    frame = _Frame(title, y_label, x_label, ticks(max(ys) if top is None else top), (left - pad, right + pad))
    numbers = [i if line.colour is None else line.colour for i, line in enumerate(series)]
    colours = [COLOURS[i % len(COLOURS)] for i in numbers]
    parts = [
        frame.axes(),
        frame.legend([(s.name, c, s.dashed) for s, c in zip(series, colours, strict=True)]),
    ]
    for x, name in x_names or [(x, f"{x:g}") for x in sorted(set(xs))]:
        parts.append(_text(frame.x(x), _HEIGHT - _BOTTOM + 20, name))
    for line, colour in zip(series, colours, strict=True):
        places = [(frame.x(x), frame.y(y)) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dashes = ' stroke-dasharray="6 4"' if line.dashed else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        for (px, py), (x, y) in zip(places, line.points, strict=True):
            tip = f"{line.name}, {x:g}: {number(y)}"
            parts.append(
                f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5" fill="{colour}"><title>{escape(tip)}</title></circle>'
            )
    return _document(title, parts)


def ticks(top: float) -> list[float]:
    """Round heights from 0 to the first at or above `top`, four to eight steps apart."""
    if not top > 0:
        return [0.0, 1.0]
    magnitude = 10.0 ** floor(log10(top))
    step = next(s for s in (m * magnitude / 10 for m in (1, 2, 2.5, 5, 10, 20)) if top / s <= 7.999)
    count = -int(-top / step // 1)
    return [round(i * step, 10) for i in range(count + 1)]


def number(value: float) -> str:
    """Three figures, as people write them."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


class _Frame:
    """The axes of one chart and where values stand in it."""

    def __init__(
        self, title: str, y_label: str, x_label: str, heights: Sequence[float], span: tuple[float, float]
    ) -> None:
        self._title, self._y_label, self._x_label = title, y_label, x_label
        self._heights, self._span = heights, span

    def x(self, value: float) -> float:
        left, right = self._span
        return _LEFT + (value - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - value / self._heights[-1] * (_HEIGHT - _TOP - _BOTTOM)

    def axes(self) -> str:
        parts = [_text(_LEFT, 26, self._title, size=16, anchor="start", weight="bold")]
        for height in self._heights:
            y = self.y(height)
            parts.append(
                f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_FAINT}"/>'
            )
            parts.append(_text(_LEFT - 8, y + 4, f"{height:g}", anchor="end"))
        middle = (_TOP + _HEIGHT - _BOTTOM) / 2
        parts.append(_text(16, middle, self._y_label, turn=True))
        if self._x_label:
            parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 14, self._x_label))
        return "\n".join(parts)

    def legend(self, entries: Sequence[tuple[str, str, bool]]) -> str:
        """Name, colour and whether dashed, below the title, in as many lines as it takes (there is room for two)."""
        parts, x, y = [], float(_LEFT), 46
        for name, colour, dashed in entries:
            width = 22 + 7.2 * len(name)
            if x > _LEFT and x + width > _WIDTH:
                x, y = float(_LEFT), y + 18
            dashes = ' stroke-dasharray="4 3"' if dashed else ""
            parts.append(
                f'<line x1="{x:.0f}" x2="{x + 16:.0f}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="6"{dashes}/>'
            )
            parts.append(_text(x + 22, y + 4, name, anchor="start"))
            x += width + 18
        return "\n".join(parts)


def _bar(frame: _Frame, left: float, width: float, bar: Bar, colour: str, name: str) -> str:
    x, right = frame.x(left), frame.x(left + width)
    y, foot, middle = frame.y(bar.value), frame.y(0.0), (x + right) / 2
    tip = f"{name}: {number(bar.value)}"
    top = y
    parts = [
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{right - x:.1f}" height="{foot - y:.1f}" fill="{colour}">'
        f"<title>{escape(tip)}</title></rect>"
    ]
    if bar.low is not None and bar.high is not None:
        top = min(y, frame.y(bar.high))
        parts.append(
            f'<path d="M{middle:.1f} {frame.y(bar.low):.1f}V{frame.y(bar.high):.1f}" '
            f'stroke="{_INK}" stroke-width="1.5"/>'
        )
    # Written upwards: numbers of neighbours would run into each other.
    inside = foot - y > 40
    start, ink = (foot - 6, _ink_on(colour)) if inside else (top - 6, _INK)
    label = _text(middle + 4, start, f"{bar.value:.2f}", size=11, anchor="start", turn=True, ink=ink)
    return "\n".join([*parts, label])


def _ink_on(colour: str) -> str:
    """White, or dark on a bright colour (by the weights that the eye gives red, green and blue)."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return _INK if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else "white"


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    anchor: str = "middle",
    weight: str = "normal",
    turn: bool = False,
    ink: str = _INK,
) -> str:
    turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{ink}"{turned}>{escape(text)}</text>'
    )


def _document(title: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'font-family="system-ui, Helvetica, Arial, sans-serif" role="img">\n<title>{escape(title)}</title>\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )
