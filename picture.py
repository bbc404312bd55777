"""picture.py: drawings of rows, on a terminal or as an SVG, without any dependency.

A Drawing shows one row, in cells. view.py makes the drawings; this file knows nothing about
objectives. The SVG has a background of its own, so it looks the same on a light page and on a dark
one:

    python view.py all --svg=picture.svg
"""

import itertools
import re
import textwrap
import unicodedata
from collections.abc import Iterator
from html import escape
from typing import NamedTuple

import numpy as np


class Cell(NamedTuple):
    """One token at one position; an empty cell has no text."""

    text: str
    kind: str = ""  # a key of FILL: its color; the drawing says the same without colors


Group = dict[str, list[Cell]]  # positions that are read alike: label -> cells, one for each


class Drawing(NamedTuple):
    """One row."""

    name: str  # of the objective that made it
    about: str  # a sentence, its source in brackets
    groups: list[Group]
    mask: np.ndarray  # (n, n) bool: who (down) sees whom (across)
    note: str


def wrap(widths: list[int], room: int) -> Iterator[slice]:
    """Slices of columns, as many in each as fit on a line, but at least one.

    >>> list(wrap([3, 3, 3], room=7))
    [slice(0, 2, None), slice(2, 3, None)]
    """
    start = used = 0
    for i, width in enumerate(widths):
        if i > start and used + width > room:
            yield slice(start, i)
            start = i
            used = 0
        used += width
    yield slice(start, len(widths))


def columns_of(text: str) -> int:
    """How many columns a text takes in a fixed-width font: some characters take two, some none."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)


def without_source(sentence: str) -> str:
    """
    >>> without_source("Prefix LM (Raffel et al. 2020): the rest is predicted.")
    'Prefix LM: the rest is predicted.'
    """
    return re.sub(r" \([^()]*\)", "", sentence)


# ---- on a terminal -----------------------------------------------------------------------------

COLUMNS = 80
GUTTER = 10  # columns of a label
SIDE = 12  # columns of the mask, at most; a line shows two of its rows


def show(drawings: list[Drawing]) -> None:
    """Print the rows of one objective. A single row of a short text fits a screen of 80 x 24."""
    print(textwrap.fill(f"{drawings[0].name}: {drawings[0].about}", COLUMNS))
    for drawing in drawings:
        print("\n".join(terminal_lines(drawing)))
    if len(drawings) == 1:
        print(textwrap.shorten(drawings[0].note, COLUMNS))
    print("⇄ read both ways, → left to right; at right: who (down) sees whom (across)")


def layout(drawing: Drawing, columns: int) -> Iterator[tuple[str, list[Cell], list[int]]]:
    """The lines of a drawing: a label, cells, how many columns each cell takes."""
    for group in drawing.groups:
        widths = [1 + max(columns_of(cell.text) for cell in each) for each in zip(*group.values())]
        for part in wrap(widths, columns):
            for label, track in group.items():
                if any(cell.text for cell in track[part]):
                    yield label, track[part], widths[part]


def terminal_lines(drawing: Drawing) -> list[str]:
    """Cells in columns, and the mask to their right."""
    room = COLUMNS - GUTTER - SIDE - 1
    lines = []
    for label, cells, widths in layout(drawing, room):
        texts = [cell.text for cell in cells]
        lines.append("".join(map(padded, [label, *texts], [GUTTER, *widths])))
    rows = itertools.zip_longest(lines, mask_lines(drawing.mask), fillvalue="")
    return [f"{padded(line, GUTTER + room)} {seen}".rstrip() for line, seen in rows]


def padded(text: str, width: int) -> str:
    return text + " " * (width - columns_of(text))


def mask_lines(mask: np.ndarray) -> list[str]:
    """At most SIDE rows and columns of an (n, n) mask, evenly spaced, two rows on each line."""
    n = len(mask)
    side = min(n, SIDE)
    kept = ((np.arange(side) + 0.5) * n / side).astype(int)
    mask = np.pad(mask[np.ix_(kept, kept)], ((0, side % 2), (0, 0)))
    pairs = np.array(list(" ▀▄█"))[mask[::2] + 2 * mask[1::2]]
    return ["".join(row) for row in pairs]


# ---- as SVG ----------------------------------------------------------------------------------

# fmt: off
WIDTH, MARGIN = 900, 20  # pixels, like all that follows except ROOM
MASK = 36                # side of the little attention mask
ROOM = 112  # columns of cells on a line
BOX = 16  # height of a cell
LINE = 18  # from one track to the next
GAP = 2.5  # between two columns
CHAR = 6.65  # width of a character of a cell
LABEL_CHAR = 5.5  # of a label
FILL = {  # kind -> colors of the box, its border and its text; words for the legend
    "text":     ("#ffffff", "#d0d5db", "#24292f", "read"),
    "hidden":   ("#2d333b", "#2d333b", "#ffffff", "hidden"),
    "sentinel": ("#f1dfff", "#c8a2e6", "#651fa3", "stands for a gap"),
    "mark":     ("#dfecfd", "#a5c6ee", "#164a86", "special token"),
    "answer":   ("#d9f2df", "#97d0a6", "#14532d", "asked at the position above"),
    "wrong":    ("#ffdfd3", "#eaa78f", "#97290c", "replaced"),
    "other":    ("#f2f0ea", "#dfdbd1", "#7d7a72", ""),
}
SEEN, UNSEEN = "#5b86b5", "#ece8de"  # in a mask
STYLE = """
text { font: 11px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace }
.cell { text-anchor: middle }
.label { font-size: 9px; fill: #7d7a72 }
.name { font-size: 13px; font-weight: bold; fill: #24292f }
.title, .about { font: 12.5px system-ui, 'Segoe UI', Helvetica, 'DejaVu Sans', sans-serif }
.title { font-size: 17px; font-weight: bold; fill: #24292f }
.about { fill: #57606a }
"""
# fmt: on


def svg(strips: list[list[Drawing]]) -> str:
    """The text of an SVG: one strip below another, each with the drawings of one objective."""
    parts = []
    y = MARGIN - 4
    if len(strips) > 1:
        parts.append(text(MARGIN, y + 14, f"One text, {len(strips)} objectives", "title"))
        y += 26
    parts += legend(y)
    y += 32
    for drawings in strips:
        if len(strips) > 1:
            parts.append(f'<path d="M{MARGIN} {y - 8}H{WIDTH - MARGIN}" stroke="#e9e5db"/>')
        y = draw_strip(parts, drawings, y) + 17

    size = f'width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}"'
    paper = f'<rect width="{WIDTH}" height="{y}" rx="10" fill="#fcfbf8"/>'
    body = "\n".join([f"<style>{STYLE}</style>", paper, *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{body}\n</svg>\n'


def legend(y: float) -> list[str]:
    """A line that says what the colors mean."""
    entries = [(fill, stroke, says) for fill, stroke, _, says in FILL.values() if says]
    entries.append((SEEN, SEEN, "seen (across) by a position (down)"))
    parts = []
    x = MARGIN
    for fill, stroke, says in entries:
        parts.append(rectangle(x, y, 11, 11, fill, stroke))
        parts.append(text(x + 16, y + 9, says, "label"))
        x += 36 + LABEL_CHAR * len(says)
    return parts


def draw_strip(parts: list[str], drawings: list[Drawing], y: int) -> int:
    """Add an objective's name, its sentence and its rows with their masks -> y of the bottom."""
    name = drawings[0].name
    parts.append(text(MARGIN, y + 11, name, "name"))
    about = without_source(drawings[0].about)
    parts.append(text(MARGIN + 8 * len(name) + 12, y + 11, about, "about"))
    y += LINE
    for drawing in drawings:
        parts.append(draw_mask(drawing.mask, WIDTH - MARGIN - MASK, y))
        y = max(draw_lines(parts, drawing, y), y + MASK) + 7
    return y - 7


def draw_lines(parts: list[str], drawing: Drawing, y: int) -> int:
    """Add a drawing's labels and cells -> y of the bottom."""
    for label, cells, widths in layout(drawing, ROOM):
        parts.append(text(MARGIN, y + 11, label, "label"))
        x = MARGIN + CHAR * GUTTER
        for cell, width in zip(cells, widths):
            if cell.text:
                fill, stroke, ink, _ = FILL[cell.kind]
                wide = CHAR * width - GAP
                parts.append(rectangle(x, y + 0.5, wide, BOX, fill, stroke))
                parts.append(text(x + wide / 2, y + 12, cell.text, "cell", ink))
            x += CHAR * width
        y += LINE
    return y


def draw_mask(mask: np.ndarray, x: int, y: int) -> str:
    """A square that colors what each position (down) sees (across)."""
    step = MASK / max(len(mask), 1)  # a row may be all padding
    runs = []
    for q, row in enumerate(mask):
        edges = np.flatnonzero(np.diff(np.pad(row.astype(int), 1)))
        for start, stop in edges.reshape(-1, 2):
            width = (stop - start) * step
            corner = f"M{x + start * step:.2f} {y + q * step:.2f}"
            runs.append(f"{corner}h{width:.2f}v{step:.2f}h{-width:.2f}z")
    square = rectangle(x, y, MASK, MASK, UNSEEN, UNSEEN)
    return f'{square}<path d="{"".join(runs)}" fill="{SEEN}"/>'


def rectangle(x: float, y: float, width: float, height: float, fill: str, stroke: str) -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" rx="3.5"'
    return f'<rect {size} fill="{fill}" stroke="{stroke}"/>'


def text(x: float, y: float, content: str, kind: str, ink: str = "") -> str:
    color = f' fill="{ink}"' if ink else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{color}>{escape(content)}</text>'
