"""picture.py: the drawings of view.py as an SVG, several objectives on one text.

    python -m lab.picture all --svg=lab/picture.svg
    python -m lab.picture clm,fim,span,mlm --svg=lab/rows.svg

The SVG has a background of its own, so it looks the same on a light page and on a dark one.
"""

import re
from dataclasses import dataclass
from html import escape

import numpy as np

from objectives import OBJECTIVES, Knobs, source_of
from util import atomic_write, build, comma_list, flag, parse_flags, run_command, visible
from view import LABEL, Drawing, about, draw, draw_rows, layout, load_example

# fmt: off
WIDTH, MARGIN = 900, 20  # pixels, like all that follows except ROOM
MASK = 36                # side of the little attention mask
ROOM = 112               # columns of cells on a line
BOX = 16                 # height of a cell
LINE = 18                # from one track to the next
GAP = 2.5                # between two columns
CHAR = 6.65              # width of a character of a cell
LABEL_CHAR = 5.5         # of a label
FILL = {  # kind of a cell -> colors of the box, its border and its text; words for the legend
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


@dataclass
class PictureConfig:
    """what to draw"""

    svg: str = flag("picture.svg", "the file to write")
    text: str = flag("Tom has 5 red pens.\nAnn brings 2 more.\nNow he has 7.\n", "the text")
    seed: int = flag(5, "seed for drawing rows", min=0)


def svg(strips: dict[str, list[Drawing]]) -> str:
    """The text of an SVG: one strip below another, each with the drawings of one objective."""
    y = MARGIN - 4
    parts = [text(MARGIN, y + 14, f"One text, {len(strips)} objectives", "title")]
    y += 26
    parts += legend(y)
    y += 32
    for name, drawings in strips.items():
        parts.append(f'<path d="M{MARGIN} {y - 8}H{WIDTH - MARGIN}" stroke="#e9e5db"/>')
        y = draw_strip(parts, name, drawings, y) + 17

    return on_paper(parts, y)


def on_paper(parts: list[str], height: float) -> str:
    """The text of an SVG with these parts, WIDTH wide."""
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    paper = f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#fcfbf8"/>'
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


def draw_strip(parts: list[str], name: str, drawings: list[Drawing], y: int) -> int:
    """Add an objective's name, its sentence and its rows with their masks -> y of the bottom."""
    parts.append(text(MARGIN, y + 11, name, "name"))
    parts.append(text(MARGIN + 8 * len(name) + 12, y + 11, about(name, source=False), "about"))
    return draw_rows_and_masks(parts, drawings, y + LINE)


def draw_rows_and_masks(parts: list[str], drawings: list[Drawing], y: int) -> int:
    """Add an objective's rows with their masks -> y of the bottom."""
    for drawing in drawings:
        parts.append(draw_mask(drawing.mask, WIDTH - MARGIN - MASK, y))
        y = max(draw_lines(parts, drawing, y), y + MASK) + 7
    return y - 7


def draw_lines(parts: list[str], drawing: Drawing, y: int) -> int:
    """Add a drawing's labels and cells -> y of the bottom."""
    for group, widths in layout(drawing, ROOM):
        is_wrong = [answer == "yes" for answer in group.get("replaced?", [""] * len(widths))]
        for label, track in group.items():
            parts.append(text(MARGIN, y + 11, label, "label"))
            x = MARGIN + CHAR * LABEL
            for cell, width, wrong in zip(track, widths, is_wrong):
                if cell:
                    fill, stroke, ink, _ = FILL[kind_of(label, cell, wrong)]
                    wide = CHAR * width - GAP
                    parts.append(rectangle(x, y + 0.5, wide, BOX, fill, stroke))
                    parts.append(text(x + wide / 2, y + 12, cell, "cell", ink))
                x += CHAR * width
            y += LINE
    return y


def kind_of(label: str, cell: str, wrong: bool) -> str:
    """A key of FILL, from a cell's track and text; `wrong`: its token was replaced."""
    if label.startswith("asks"):
        return "answer"
    if label in ("detector", "replaced?") and wrong:
        return "wrong"
    if label in ("unlike", "replaced?"):
        return "other"
    if cell == "[MASK]":
        return "hidden"
    if re.fullmatch(r"<\d+>", cell):
        return "sentinel"
    return "mark" if re.fullmatch(r"<[A-Z]+>|\[[A-Z]+\]", cell) else "text"


def draw_mask(mask: np.ndarray, x: int, y: int) -> str:
    """A square that colors what each position (down) sees (across)."""
    step = MASK / len(mask)
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


def strips_of(names: list[str], config: PictureConfig) -> dict[str, list[Drawing]]:
    """Some objectives' drawings on one text."""
    tok, example = load_example(config.text)
    strips = {}
    for name in names:
        source = source_of({name: 1.0}, example, tok, None, Knobs(), config.seed)
        strips[name] = [draw(name, row, source) for _, row in draw_rows(source, None)]
    return strips


def main(argv: list[str]) -> None:
    given = parse_flags(argv, __doc__, PictureConfig, positional="objectives")
    config = build(PictureConfig, given)
    names = given.get("objectives", "all")
    names = list(OBJECTIVES) if names == "all" else comma_list("objectives", names, OBJECTIVES)
    with atomic_write(config.svg) as f:
        f.write(svg(strips_of(names, config)).encode())
    print(f"wrote {visible(config.svg)}")


if __name__ == "__main__":
    run_command(main)
