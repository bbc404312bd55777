"""chart.py: the pictures of atlas.py, SVGs: rows of an objective, curves of a run, of all."""

import math
from dataclasses import dataclass

from lab.picture import LABEL_CHAR, MARGIN, draw_rows_and_masks, legend, on_paper, text
from objectives import OBJECTIVES
from view import Drawing

# fmt: off
COLORS = ("#1f6fb2", "#c2571a", "#2a8a4a", "#8250b0", "#b3324d", "#0f8b8d", "#8a6d1f", "#5b6470")
GRID = "#e4e0d6"
# fmt: on
LEADER = 12  # pixels from a panel to the names of its lines
BETWEEN = 13  # from one name to the next, at least
ROW = 32  # from one objective to the next, in `progress`


# ---- pictures -----------------------------------------------------------------------------------


def strip(drawings: list[Drawing]) -> str:
    """An objective's rows, and what the colors mean."""
    parts = []
    y = draw_rows_and_masks(parts, drawings, MARGIN)
    return on_paper(parts + legend(y + 12), y + 40)


def curves(run: dict) -> str:
    """The validation loss and the right answers of a run, by step."""
    losses = [(line["step"], line["val_loss"]) for line in run["evaluations"]]
    rows = dict(top=44, height=140, x_end=run["steps"])
    left = Panel(left=60, width=230, y_end=max(loss for _, loss in losses), **rows)
    parts = left.axes("validation loss, nats", "steps")
    parts.append(left.line(losses, COLORS[0]))

    right = Panel(left=345, width=255, y_end=1, **rows)
    title = f"right answers on {run['stories']} stories, at the end on all (dotted: guessing)"
    parts += right.axes(title, "steps", y_format=".0%")
    lines = {}
    for line in run["evaluations"]:
        for skill, (value, _) in line["skills"].items():
            lines.setdefault(skill, []).append((line["step"], value))
    colors = dict(zip(lines, COLORS))
    for skill, (_, chance) in line["skills"].items():
        parts.append(right.level(chance, colors[skill]))
        parts.append(right.line(lines[skill], colors[skill]))
    return on_paper(parts + right.names(lines, colors), 230)


def progress(runs: dict[str, dict]) -> str:
    """The first skill of each objective by minutes of training, each in a row of its own, with the
    color of its attention."""
    runs = {name: run for name, run in runs.items() if run["skills"]}
    kinds = list(dict.fromkeys(objective.attention for objective in OBJECTIVES.values()))
    parts = [text(MARGIN, 32, "Right answers while it learns (dotted: guessing)", "name")]
    for i, kind in enumerate(kinds):
        parts.append(text(445 + 90 * i, 32, f"— {kind}", "", COLORS[i]))

    top, height = 50, ROW * len(runs)
    columns = dict(
        left=110, width=480, x_end=max([run["minutes"] for run in runs.values()], default=1)
    )
    parts += Panel(top=top, height=height, y_end=1, **columns).across(
        "minutes of steps alone", True
    )
    for i, (name, run) in enumerate(runs.items()):
        color = COLORS[kinds.index(OBJECTIVES[name].attention)]
        row = Panel(top=top + ROW * i + 3, height=ROW - 6, y_end=1, **columns)
        shares = [first_skill(line)[1] for line in run["evaluations"]]
        minutes = [line["minutes"] for line in run["evaluations"]]
        skill, share, chance = first_skill(run)
        parts.append(row.level(chance, color))
        parts.append(row.line(list(zip(minutes, shares)), color))
        parts.append(text(MARGIN, top + ROW * i + 20, name, "", color))
        parts.append(text(602, top + ROW * i + 20, f"{share:>4.0%} {skill}", "label"))
    return on_paper(parts, top + height + 42)


def first_skill(counted: dict) -> tuple[str, float, float]:
    """Of a run or an evaluation: the first skill's name, its right answers, and what guessing
    gets."""
    skill, (value, chance) = next(iter(counted["skills"].items()))
    return skill, value, chance


# ---- axes, lines and names ----------------------------------------------------------------------


@dataclass
class Panel:
    """The area between two axes, in pixels. Both axes begin at 0."""

    left: float
    top: float
    width: float
    height: float
    x_end: float  # the value at the right edge
    y_end: float  # the value at the upper edge

    def place(self, x: float, y: float) -> tuple[float, float]:
        across = self.left + self.width * x / self.x_end
        return across, self.top + self.height * (1 - y / self.y_end)

    def axes(self, title: str, below: str, y_format: str = ",g") -> list[str]:
        """A title, and round numbers on both axes."""
        parts = [text(self.left, self.top - 14, title, "about"), *self.across(below)]
        for value in ticks(self.y_end):
            x, y = self.place(0, value)
            parts.append(f'<path d="M{x:.1f} {y:.1f}h{self.width}" stroke="{GRID}"/>')
            number = format(value, y_format)
            parts.append(text(x - 6 - LABEL_CHAR * len(number), y + 3, number, "label"))
        return parts

    def across(self, below: str, with_lines: bool = False) -> list[str]:
        """Round numbers below the panel, and below them what they mean."""
        bottom = self.top + self.height
        parts = [centered(self.left + self.width / 2, bottom + 30, below)]
        for value in ticks(self.x_end):
            x, _ = self.place(value, 0)
            parts.append(centered(x, bottom + 15, f"{value:,g}"))
            if with_lines:
                parts.append(f'<path d="M{x:.1f} {self.top}v{self.height}" stroke="{GRID}"/>')
        return parts

    def line(self, points: list[tuple], color: str) -> str:
        """A line through (x, y) points, with a dot at its end."""
        places = ["{:.1f},{:.1f}".format(*self.place(*point)) for point in points]
        x, y = places[-1].split(",")
        dot = f'<circle cx="{x}" cy="{y}" r="2.4" fill="{color}"/>'
        style = f'fill="none" stroke="{color}" stroke-width="1.8"'
        return f'<polyline points="{" ".join(places)}" {style}/>{dot}'

    def level(self, y: float, color: str) -> str:
        """A dotted line across."""
        x, y = self.place(0, y)
        style = f'stroke="{color}" stroke-opacity="0.6" stroke-dasharray="2 4"'
        return f'<path d="M{x:.1f} {y:.1f}h{self.width}" {style}/>'

    def names(self, lines: dict[str, list[tuple]], colors: dict[str, str]) -> list[str]:
        """Each line's name to the right of the panel, and a thin line from there to its end. Names
        are in the order of the ends, and do not overlap."""
        ends = {name: self.place(*points[-1]) for name, points in lines.items()}
        order = sorted(ends, key=lambda name: ends[name][1])
        heights = apart([ends[name][1] for name in order], self.top + self.height)
        right = self.left + self.width + LEADER
        parts = []
        for name, height in zip(order, heights):
            x, y = ends[name]
            path = f"M{x:.1f} {y:.1f}L{right - 3:.1f} {height:.1f}"
            parts.append(f'<path d="{path}" stroke="{colors[name]}" stroke-opacity="0.5"/>')
            parts.append(text(right, height + 4, name, "", colors[name]))
        return parts


def ticks(end: float) -> list[float]:
    """Three to eight round numbers from 0 to `end`.

    >>> ticks(1470), ticks(0.65)
    ([0.0, 500.0, 1000.0], [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    """
    unit = 10 ** math.floor(math.log10(end))
    step = next(unit * k for k in (0.2, 0.5, 1, 2) if end / (unit * k) < 7)
    return [round(i * step, 9) for i in range(math.floor(end / step + 1e-9) + 1)]


def apart(heights: list[float], lowest: float) -> list[float]:
    """Heights in order, moved so that each is BETWEEN or more below the one before it, and none is
    below `lowest`.

    >>> apart([10, 12, 50, 50], lowest=60)
    [10, 23, 47, 60]
    """
    moved = []
    for y in heights:
        moved.append(max(y, moved[-1] + BETWEEN) if moved else y)
    for i, y in enumerate(reversed(moved)):
        moved[-1 - i] = min(y, lowest - BETWEEN * i)
    return moved


def centered(x: float, y: float, words: str) -> str:
    return text(x - LABEL_CHAR * len(words) / 2, y, words, "label")
