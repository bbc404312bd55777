"""The atlas: its pages are what the code and runs.json say, its links lead where they say, no words
of a chart overlap, and a run that was stopped goes on."""

import itertools
import json
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from lab import atlas, chart, compare, skills
from lab.picture import CHAR, LABEL_CHAR, WIDTH
from lab.yardsticks import read_log
from objectives import OBJECTIVES
from util import UserError

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "lab" / "atlas"
PAGES = sorted(FOLDER.glob("*.md"))
SMALL = "--n_layer=1 --n_head=1 --n_embd=16 --batch_size=4 --device=cpu --dtype=float32"
# About how many pixels a character takes, by the class of its text.
WIDTHS = {"label": LABEL_CHAR, "about": 6.4, "name": 7.9}


def test_the_pages_are_what_the_code_and_the_runs_say(tmp_path):
    if (FOLDER / "runs.json").exists():
        shutil.copy(FOLDER / "runs.json", tmp_path)
    atlas.main(["--draw", f"--to={tmp_path}"])
    drawn, committed = (
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (tmp_path, FOLDER)
    )
    stale = [name for name in drawn | committed if drawn.get(name) != committed.get(name)]
    assert not stale, "draw them again, without training: python -m lab.atlas --draw"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_link_leads_to_what_it_names(path):
    text = path.read_text()
    code = (ROOT / "objectives.py").read_text().splitlines()
    for function, line in re.findall(r"\[`(\w+)`\]\(\S+objectives\.py#L(\d+)\)", text):
        assert code[int(line) - 1].startswith(f"def {function}(")
    results = (ROOT / "lab" / "RESULTS.md").read_text()
    for link in re.findall(r"(?:\]\(|src=\"|href=\")([^)\"]+)", text):
        file, _, anchor = link.partition("#")
        assert file.startswith("https://") or (FOLDER / file).exists()
        assert not file.endswith("RESULTS.md") or not anchor or f'id="{anchor}"' in results


def test_all_objectives_have_a_page():
    assert {path.stem for path in PAGES} == {*OBJECTIVES, "README"}


def run_with(names: list[str], steps: int) -> dict:
    """What runs.json holds of a run with these skills."""
    counted = {name: [0.97, 0.3] for name in names}
    evaluations = [
        {"step": step, "minutes": step / 500, "val_loss": 400 / step, "skills": counted}
        for step in range(100, steps + 1, 100)
    ]
    figures = {"steps": steps, "minutes": steps / 500, "stories": 60}
    return figures | {"evaluations": evaluations, "skills": counted}


LONG = [
    "words that follow from the past (prefix)",
    "sentences with masked words restored",
    "shuffled sentences put in their place",
    "words unmasked, up to five runs at once",
    "pairs judged right (inside 100 stories)",
    "three holes filled right ([R])",
    "replaced words found (recall)",
]


def boxes_of(svg: str) -> list[tuple]:
    """Where the words of a picture are, which is inside of it."""
    root = ET.fromstring(svg)
    boxes = []
    for text in root.findall("{*}text"):
        x, y = float(text.get("x")), float(text.get("y"))
        width = len(text.text) * WIDTHS.get(text.get("class"), CHAR)
        if text.get("class") == "cell":  # x is its middle
            x -= width / 2
        assert x >= 0 and x + width <= WIDTH and 10 <= y <= float(root.get("height")) - 4
        boxes.append((x, x + width, y - 8, y + 2, text.text))
    return boxes


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.svg")), ids=lambda path: path.stem)
def test_no_words_leave_a_picture(path):
    assert boxes_of(path.read_text())


@pytest.mark.parametrize("drawing", ["curves", "progress"])
def test_no_words_of_a_chart_overlap(drawing):
    runs = {name: run_with(LONG, steps) for steps, name in enumerate(OBJECTIVES, 1400)}
    boxes = boxes_of(chart.progress(runs) if drawing == "progress" else chart.curves(runs["clm"]))
    for (a, b, c, d, one), (e, f, g, h, other) in itertools.combinations(boxes, 2):
        assert b <= e or f <= a or d <= g or h <= c, f"{one!r} and {other!r} overlap"


@pytest.fixture(scope="module")
def fewer_questions():
    patch = pytest.MonkeyPatch()
    patch.setattr(skills, "N_STORIES", 4)
    patch.setattr(skills, "N_WRITTEN", 1)
    patch.setattr(atlas, "N_WATCHED", 2)
    yield
    patch.undo()


def test_a_stopped_run_goes_on_and_a_finished_one_is_kept(tmp_path, fewer_questions):
    out, pages = tmp_path / "out", tmp_path / "pages"
    flags = f"{SMALL} --data=stories:400 --cache_dir={tmp_path}/cache --log_every=1 --eval_every=2"
    begun = [*flags.split(), "--objective=mlm", f"--out_dir={out}/mlm", "--max_steps=2"]
    compare.train_quietly(out / "mlm", begun, atlas.watch)
    command = [f"--flags={flags} --max_steps=4", f"--out_dir={out}", f"--to={pages}"]
    atlas.main([*command, "--only=mlm"])
    assert "resumes    after step 2" in (out / "mlm" / "screen.txt").read_text()

    run = json.loads((pages / "runs.json").read_text())["mlm"]
    lines = read_log(out / "mlm")
    milliseconds = [line["ms"] for line in lines if "ms" in line]
    assert len(milliseconds) == 4 and run["steps"] == 4
    assert run["minutes"] == pytest.approx(sum(milliseconds) / 60_000, abs=1e-3)
    assert [line["step"] for line in run["evaluations"]] == [2, 4]
    assert list(run["skills"]) == list(run["evaluations"][0]["skills"]) == ["masked words found"]
    assert "sample.py --out_dir=out/mlm" in (pages / "mlm.md").read_text()
    assert "(mlm-curve.svg)" in (pages / "mlm.md").read_text()
    assert "-curve.svg" not in (pages / "clm.md").read_text()

    atlas.main([*command, "--only=mlm"])
    assert read_log(out / "mlm") == lines
    with pytest.raises(UserError, match="--out_dir"):
        atlas.main([f"--out_dir={out}", "--only=mlm", f"--to={pages}"])

    pytest.importorskip("matplotlib")
    compare.main([f"--plot={out}/mlm", f"--out_dir={tmp_path}"])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
