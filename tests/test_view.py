"""What the drawings promise: they show everything that an objective does, and fit the screen."""

import json
import re

import numpy as np
import pytest

import view
from corpus import DataConfig, load_tokens
from data import TRAIN, Text, draw_row
from objectives import OBJECTIVES, Knobs, parse_mixture, source_of
from util import UserError

TEXT = "Tom has 5 red pens. Ann brings 2 more. Now he has 7."
SHOWS = {  # what each drawing must contain
    "clm": "reads → asks <EOT>",
    "prefix": "reads ⇄ →",
    "fim": "<PRE> <SUF> <MID>",
    "cm3": "<0> <EOT>",
    "mtp": "asks +4",
    "span": "reads ⇄ <0>",
    "ul2": "[R] [S] [X]",
    "bart": "[MASK] <EOT>",
    "mlm": "[MASK] Asked at",
    "mntp": "[MASK] Asked at",
    "nsp": "[CLS] [SEP] label",
    "sop": "[CLS] [SEP] label",
    "electra": "generator detector replaced? yes",
    "diffusion": "[MASK] with mean weight",
    "block": "reads ⇄ → [MASK]",
    "plm": "reads ⇄ → [MASK]",
    "contrastive": "crop unlike",
}


def rows_of(name, n=1, **knobs):
    """The source of an example, and its rows with their drawings."""
    tok, example = view.load_example(TEXT)
    source = source_of(parse_mixture(name), example, tok, None, Knobs(**knobs), 0)
    rows = view.draw_rows(source, n)
    return source, [(row, view.draw(member, row, source)) for member, row in rows]


def printed(capsys, *argv):
    view.main(list(argv))
    return capsys.readouterr().out


def track(drawing, label):
    """The cells of a track, over all groups."""
    tracks = [track for each in drawing.groups for key, track in each.items() if label in key]
    return [cell for track in tracks for cell in track]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_drawing_fits_a_screen_and_shows_what_matters(name, capsys):
    out = printed(capsys, name)
    lines = out.splitlines()
    assert len(lines) <= 23, "a line of the 24 is for the prompt"
    assert max(map(len, lines)) <= 80
    assert out.startswith(f"{name}: ")
    assert "█" in out or "▄" in out
    assert all(word in out for word in SHOWS.get(name, "").split())


@pytest.mark.parametrize("name", sorted(OBJECTIVES.keys() - {"nsp", "sop", "mtp", "block"}))
def test_an_example_is_shown_whole_and_each_position_above_what_it_is_asked(name):
    source, [(row, drawing)] = rows_of(name)
    document = source.text.chunk(None, 512)
    assert sorted(row.raw[: len(document)]) == sorted(document)
    if name not in ("electra", "contrastive"):
        assert track(drawing, "reads") == view.cells(source.tok, row.inputs)
        assert track(drawing, "asks") == view.cells(source.tok, row.targets)


@pytest.mark.parametrize("name", ["nsp", "sop"])
def test_the_label_is_asked_at_cls(name):
    _, rows = rows_of(name, n=20)
    assert {int(row.extra) for row, _ in rows} == {0, 1}
    assert all(track(drawing, "asks")[0] == f"label {row.extra}" for row, drawing in rows)


def test_electra_shows_what_was_replaced_and_the_question():
    source, rows = rows_of("electra", n=20)
    for row, drawing in rows:
        pairs = zip(track(drawing, "detector"), view.cells(source.tok, row.raw))
        assert track(drawing, "replaced?") == ["no" if a == b else "yes" for a, b in pairs]


def test_contrastive_shows_both_crops_and_those_of_other_documents():
    source, [(row, drawing)] = rows_of("contrastive")
    labels = [label for group in drawing.groups for label in group]
    assert labels == ["crop 1", "crop 2"] + ["unlike"] * 6
    crops = [row.inputs[row.segment == k] for k in (1, 2)]
    assert track(drawing, "crop") == view.cells(source.tok, np.concatenate(crops))
    assert set(track(drawing, "unlike")) - set(re.findall(r"\w+|\.", TEXT))


def test_each_mode_layout_and_member_of_a_mixture_is_shown(capsys):
    for name, modes in {
        "ul2": ("R", "S", "X"),
        "fim": ("PRE", "SUF"),
        "cm3": ("sentinel",),
    }.items():
        source, rows = rows_of(name, n=None)
        firsts = [row.inputs[row.inputs >= source.tok.n_ordinary][0] for row, _ in rows]
        assert firsts == [getattr(source.tok, mode) for mode in modes]
    assert len(rows_of("fim", n=None, fim_rate=0.0)[1]) == 1
    out = printed(capsys, "clm:0.5,ul2:0.5", f"--text={TEXT}")
    assert re.findall(r"(?m)^\w+:", out) == ["clm:", "ul2:"]


def test_the_list_has_a_line_for_each_objective(capsys):
    lines = printed(capsys).splitlines()
    for line, (name, objective) in zip(lines, OBJECTIVES.items()):
        assert line.split()[:2] == [name, objective.attention]
        assert len(line) <= 100


def test_no_control_character_reaches_the_terminal(capsys):
    out = printed(capsys, "clm", "--text=A \x1b[31m red \x07 bell, \x9b0m and \u202e back.\r\nNow.")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out)


@pytest.mark.parametrize("spec", [*OBJECTIVES, "clm:0.5,ul2:0.5"])
def test_json_rows_are_those_of_training(spec, tmp_path, capsys):
    path = tmp_path / "text.txt"
    path.write_text("<|endoftext|>\n".join([f"{TEXT} Tom likes them.\n"] * 30))
    flags = [f"--data={path}", f"--cache_dir={tmp_path}/cache", "--block_size=48", "--seed=7"]
    header, *lines = map(json.loads, printed(capsys, spec, "--json", "--n=5", *flags).splitlines())
    tokens = load_tokens(DataConfig(str(path), cache_dir=f"{tmp_path}/cache"))
    tok = tokens.tok
    source = source_of(parse_mixture(spec), Text(tokens.train, tok.EOT), tok, 48, Knobs(), 7)
    expected = {"objective": spec, "block_size": 48, "vocab_size": tok.vocab_size}
    expected["special_tokens"] = tok.specials
    expected["attention"] = "causal+prefix" if "," in spec else OBJECTIVES[spec].attention
    assert header == expected
    for number, line in enumerate(lines):
        row, member = draw_row(source, TRAIN, 0, number, 5)
        assert line.pop("source") == row.raw.tolist()
        assert line.pop("member", spec) == list(source.objectives)[member]
        assert line.pop("label", None) == (int(row.extra) if spec in ("nsp", "sop") else None)
        keys = ("inputs", "targets", "weights", "segment", "group", "place")
        assert line == {key: getattr(row, key).tolist() for key in keys}


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["fmi"], "did you mean fim?"),
        (["clm", "--mask_rate=0.3"], "mask_rate"),
        (["clm", "--text=short"], "8 to 512"),
        (["clm", "--data=/no/such/file"], "/no/such/file"),
    ],
)
def test_a_mistake_gives_one_line(argv, word):
    with pytest.raises(UserError) as error:
        view.main(argv)
    assert word in str(error.value)
    assert "\n" not in str(error.value)
