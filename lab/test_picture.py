"""The pictures: no text leaves its box, and those that are committed are up to date."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from lab import picture

FOLDER = Path(picture.__file__).parent
WHAT = {"picture.svg": "all", "rows.svg": "clm,fim,span,mlm"}


@pytest.mark.parametrize("name", WHAT)
def test_a_committed_picture_is_what_its_command_draws(name, tmp_path):
    picture.main([WHAT[name], f"--svg={tmp_path / name}"])
    same = (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()
    assert same, f"draw it again: python -m lab.picture {WHAT[name]} --svg=lab/{name}"


def test_no_text_leaves_its_box_and_no_box_the_picture():
    root = ET.parse(FOLDER / "picture.svg").getroot()
    _, *boxes = root.findall("{*}rect")  # the first is the paper
    for box in boxes:
        assert 0 <= float(box.get("x")) <= picture.WIDTH - float(box.get("width"))
    texts = root.findall("{*}text")
    for text in texts:
        if text.get("class") == "cell":
            half = 6.6 * len(text.text) / 2  # 6.6: width of a letter, at 11 pixels
            middle, y = float(text.get("x")), float(text.get("y")) - 11.5
            row = [box for box in boxes if float(box.get("y")) == y]
            bounds = [(float(b.get("x")), float(b.get("width"))) for b in row]
            [(x, width)] = [(x, width) for x, width in bounds if x < middle < x + width]
            assert x - 0.1 <= middle - half and middle + half <= x + width + 0.1
    names = [text.text for text in texts if text.get("class") == "name"]
    assert names == list(picture.OBJECTIVES)
