"""What the drawings promise: they show everything that an objective does, and fit the screen."""

import doctest
import functools
import json
import re
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

import model
import picture
import view
from config import UserError
from data import IGNORE, Text, make_row
from mixture import TRAIN, Source, make_batch, parse_mixture
from objectives import OBJECTIVES, Knobs
from picture import columns_of, svg
from tokenizer import get_tokenizer

TEXT = "Tom has 5 red pens. Ann brings 2 more. Now he has 7."
SHOWS = {  # what each drawing must contain
    "clm": ["reads →", "asks", "<EOT>"],
    "prefix": ["reads ⇄", "reads →"],
    "fim": ["<PRE>", "<SUF>", "<MID>"],
    "mtp": ["asks +4"],
    "span": ["reads ⇄", "<0>"],
    "ul2": ["[R]", "[S]", "[X]"],
    "bart": ["[MASK]", "<EOT>"],
    "mlm": ["[MASK]", "Asked at "],
    "nsp": ["[CLS]", "[SEP]", "IsNext", "B is the text after A"],
    "sop": ["[CLS]", "[SEP]", "swapped", "B stood before A"],
    "electra": ["generator", "detector", "replaced?", "yes", "a generator fills"],
    "diffusion": ["[MASK]", "each with weight"],
    "contrastive": ["crop 1", "crop 2", "unlike"],
}


@functools.cache
def example():
    return view.load_text(view.ViewConfig(text=TEXT), {})


def scene_of(name, seed=0):
    tok, text = example()
    return Source(parse_mixture(name), text, tok, None, Knobs(), seed)


def printed(capsys, *argv):
    view.main(list(argv))
    return capsys.readouterr().out


def track(drawing, label):
    """The cell texts of a track, over all groups; empty where a group has no such track."""
    texts = []
    for group in drawing.groups:
        size = len(next(iter(group.values())))
        found = [cells for name, cells in group.items() if name.startswith(label)]
        texts += [cell.text for cell in found[0]] if found else [""] * size
    return texts


def test_worked_examples():
    results = doctest.testmod(picture)
    assert results.attempted >= 2
    assert results.failed == 0


# What each objective's drawing shows.


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_drawing_fits_a_screen_and_shows_what_matters(name, capsys):
    out = printed(capsys, name)
    lines = out.splitlines()
    assert len(lines) <= 23, "a line of the 24 is for the prompt"
    assert max(map(columns_of, lines)) <= 80
    assert out.startswith(f"{name}: ")
    assert "\033" not in out
    assert "█" in out or "▄" in out
    assert name in SHOWS, f"SHOWS needs a row for {name}"
    for what in SHOWS[name]:
        assert what in out


@pytest.mark.parametrize("name", sorted(OBJECTIVES.keys() - {"electra", "contrastive"}))
def test_every_position_is_drawn_above_what_it_is_asked(name):
    for seed in range(5):
        scene = scene_of(name, seed)
        _, row = view.row_of(scene, 0, 1)
        [drawing] = view.draw(scene, 1)
        n = len(drawing.mask)
        assert (row.segment[:n] > 0).all()
        assert (row.segment[n:] == 0).all()

        read, asked = track(drawing, "reads"), track(drawing, "asks")
        assert read == [cell.text for cell in view.cells(scene.tok, row.inputs[:n])]
        targets = row.targets.reshape(len(row.inputs), -1)[:n, 0]
        expected = [cell.text for cell in view.cells(scene.tok, targets)]
        if name in view.LABELS:
            assert asked[0] == view.LABELS[name][int(row.extra)][0]
            expected[0] = asked[0]
        assert asked == expected


PADDED = ("contrastive",)  # objectives whose rows may have padding when the example is short


# nsp cuts its example, and sop leaves out the first sentence if it alone has no blank before it.
@pytest.mark.parametrize("name", sorted(OBJECTIVES.keys() - {"nsp", "sop"}))
def test_an_example_is_shown_whole(name):
    for seed in range(10):
        scene = scene_of(name, seed)
        _, row = view.row_of(scene, 0, 1)
        document = scene.text.documents[0]
        assert sorted(row.raw[: len(document)]) == sorted(document)
        assert (row.segment > 0).all() or name in PADDED, f"{name} has padding: add it to PADDED"


def test_the_labels_are_said_in_words():
    words = {"nsp": defaultdict(set), "sop": defaultdict(set)}
    for name, seen in words.items():
        for seed in range(40):
            scene = scene_of(name, seed)
            [drawing] = view.draw(scene, 1)
            read = track(drawing, "reads")
            second = read[read.index("[SEP]") + 1 :]
            seen[track(drawing, "asks")[0]].add(" ".join(second[:-1]))
    assert words["nsp"].keys() == {"IsNext", "NotNext"}
    assert words["sop"].keys() == {"in order", "swapped"}
    own = set(re.findall(r"\w+|\.", TEXT)) | {"[MASK]"}
    assert any(not set(second.split()) <= own for second in words["nsp"]["NotNext"])
    swapped = [second.replace("[MASK]", "Tom")[:3] for second in words["sop"]["swapped"]]
    assert "Tom" in swapped  # the first sentence became the second


def test_electra_shows_what_was_replaced_and_the_question():
    kept = 0
    for seed in range(10):
        scene = scene_of("electra", seed)
        _, row = view.row_of(scene, 0, 1)
        [drawing] = view.draw(scene, 1)
        original = [cell.text for cell in view.cells(scene.tok, row.raw)]
        asked = row.targets != IGNORE
        read = track(drawing, "detector")
        for i, answer in enumerate(track(drawing, "replaced?")):
            assert answer == ("yes" if read[i] != original[i] else "no")
            assert asked[i] or answer == "no"
            kept += asked[i] and answer == "no"
        assert "[MASK]" not in read
    assert kept > 0, "a sample that is right counts as original"


def test_contrastive_shows_both_crops_and_those_of_other_rows():
    scene = scene_of("contrastive")
    _, row = view.row_of(scene, 0, 1)
    [drawing] = view.draw(scene, 1)
    labels = [label for group in drawing.groups for label in group]
    assert labels == ["crop 1", "crop 2"] + ["unlike"] * 6
    for i in (1, 2):
        crop = view.cells(scene.tok, row.inputs[row.segment == i])
        assert track(drawing._replace(groups=drawing.groups[i - 1 : i]), "crop") == [
            cell.text for cell in crop
        ]
    own = set(re.findall(r"\w+|\.", TEXT))
    for group in drawing.groups[2:]:
        words = {cell.text for cell in group["unlike"]}
        assert not words or words - own or len(words) < 3


def test_mtp_shows_all_targets_of_a_position():
    scene = scene_of("mtp")
    [drawing] = view.draw(scene, 1)
    read = track(drawing, "reads")
    for k in (2, 3, 4):
        assert track(drawing, f"asks +{k}")[: -k or None] == read[k:]


def test_each_mode_layout_and_member_of_a_mixture_is_shown():
    tok = scene_of("ul2").tok
    for name, kinds in {"ul2": [tok.R, tok.S, tok.X], "fim": [tok.PRE, tok.SUF]}.items():
        rows = view.draw_rows(scene_of(name), None)
        assert [row.inputs[0] for _, row in rows] == kinds
    never = scene_of("fim")._replace(knobs=Knobs(fim_rate=0.0))  # so no row is of either kind
    assert len(view.draw_rows(never, None)) == 1
    drawings = view.draw(scene_of("clm:0.5,ul2:0.5"), None)
    assert [drawing.name for drawing in drawings] == ["clm", "ul2", "ul2", "ul2"]


def test_an_objective_of_a_fork_is_drawn_too(monkeypatch, capsys):
    def echo(x, rng, tok, T, knobs):
        """Echo (a fork): each token again."""
        return make_row(x[:-1], x[:-1], raw=x, prefix=True)

    monkeypatch.setitem(OBJECTIVES, "echo", OBJECTIVES["clm"]._replace(row=echo))
    out = printed(capsys, "echo", f"--text={TEXT}")
    assert out.startswith("echo: Echo (a fork): each token again.")
    assert "Asked at 16 of 16 positions." in out
    assert "echo         causal  Echo: each token again." in printed(capsys)


# The attention rule, control characters and wide letters.


def test_the_drawing_follows_a_changed_rule(monkeypatch):
    before = view.draw(scene_of("clm"), 1)
    assert (before[0].mask == np.tri(16, dtype=bool)).all()
    rule = model.may_attend

    def sliding(q, k, *rest, **named):
        return rule(q, k, *rest, **named) & (q - k < 3)

    monkeypatch.setattr(model, "may_attend", sliding)
    after = view.draw(scene_of("clm"), 1)
    assert (after[0].mask == np.tri(16, dtype=bool) & ~np.tri(16, k=-3, dtype=bool)).all()
    assert picture.terminal_lines(after[0]) != picture.terminal_lines(before[0])
    assert svg([after]) != svg([before])

    def everything(q, k, *rest, **named):
        return rule(q, k, *rest, **named) | (k == k)

    monkeypatch.setattr(model, "may_attend", everything)
    [drawing] = view.draw(scene_of("clm"), 1)
    assert list(drawing.groups[0])[0] == "reads ⇄"


def test_no_control_character_reaches_the_terminal_or_the_picture(tmp_path, capsys):
    nasty = "A \x1b[31m red \x07 bell, \x9b0m and \u202e back.\r\nNow \x00 it is done, says Tom."
    path = tmp_path / "nasty.txt"
    path.write_text(nasty.replace("\x00", "") * 20, encoding="utf-8", newline="")
    cache = f"--cache_dir={tmp_path / 'cache'}"
    out = printed(capsys, "all", f"--text={nasty}")
    out += printed(capsys, "span", f"--data={path}", cache)
    out += printed(capsys, "mlm", f"--data={path}", cache, "--block_size=32", "--n=3")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out)
    assert "·" in out
    printed(capsys, "all", f"--text={nasty}", f"--svg={tmp_path / 'nasty.svg'}")
    ET.parse(tmp_path / "nasty.svg")


def test_wide_letters_keep_their_columns(capsys):
    out = printed(capsys, "clm", "--text=漢字 は 広い です 。 Tom reads 漢字 twice a day")
    rows = [row for row in out.splitlines() if row.startswith(("reads", "asks"))]
    before_mask = [re.split("[▀▄█]", row)[0] for row in rows[:4]]
    assert len({len(text) for text in before_mask}) > 1
    assert len({columns_of(text) for text in before_mask}) == 1
    assert columns_of("漢字e\u0301") == 5 and columns_of("Ａ") == 2


# Rows for programs.


@pytest.mark.parametrize("spec", [*OBJECTIVES, "clm:0.5,ul2:0.5"])
def test_json_rows_are_those_of_training(spec, tmp_path, capsys):
    path = tmp_path / "text.txt"
    stories = ["Tom has 5 red pens. Ann brings 2 more.\nNow he has 7.\n"] * 30
    path.write_text("<|endoftext|>\n".join(stories))
    flags = [f"--data={path}", f"--cache_dir={tmp_path / 'cache'}", "--tokenizer=bytes"]
    out = printed(capsys, spec, "--json", "--n=5", "--block_size=48", "--seed=7", *flags)
    header, *rows = [json.loads(line) for line in out.splitlines()]
    tok = get_tokenizer("bytes")
    assert header["objective"] == spec
    assert (header["block_size"], header["vocab_size"]) == (48, tok.vocab_size)
    assert header["special_tokens"] == tok.specials

    config = view.build(view.DataConfig, {"data": str(path), "cache_dir": str(tmp_path / "cache")})
    text = Text(view.load_tokens(config).train, tok.EOT)
    mixture = parse_mixture(spec)
    batch = make_batch(Source(mixture, text, tok, 48, Knobs(), 7), TRAIN, 0, range(5), 5)
    T = batch.inputs.shape[1]  # a batch leaves out the columns in which all rows are padding
    for key in ("inputs", "segment", "prefix"):
        assert [row[key][:T] for row in rows] == getattr(batch, key).tolist()
    assert not any(any(row["segment"][T:]) for row in rows)

    targets = np.array([row["targets"][:T] for row in rows]).reshape(5 * T, -1)
    weights = np.array([row["weights"][:T] for row in rows], np.float32).ravel()
    asked = np.flatnonzero(targets[:, 0] != IGNORE)
    assert asked.tolist() == batch.index.tolist()
    assert targets[asked].tolist() == batch.targets.reshape(len(asked), targets.shape[1]).tolist()
    assert weights[asked].tolist() == batch.weights.tolist()

    has_label = batch.extra is not None and batch.extra.ndim == 1  # one number for each row
    assert [row.get("label") for row in rows] == (batch.extra.tolist() if has_label else [None] * 5)
    assert all(("member" in row) == (len(mixture) > 1) for row in rows)
    assert all(set(tok.decode(row["source"])) <= set(path.read_text()) for row in rows)


# The picture.


def test_the_picture_is_sound_and_shows_all_objectives(tmp_path, capsys):
    path = tmp_path / "picture.svg"
    assert str(path) in printed(capsys, "all", f"--svg={path}")
    root = ET.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    names = [each.text for each in elements(root, "text") if each.get("class") == "name"]
    assert names == list(OBJECTIVES)
    assert len(elements(root, "path")) >= 2 * len(OBJECTIVES)  # masks, and lines between strips

    width, height = float(root.get("width")), float(root.get("height"))
    boxes = defaultdict(list)
    for each in elements(root, "rect")[1:]:
        x, y, w, h = (float(each.get(key)) for key in ("x", "y", "width", "height"))
        assert x >= 0 and x + w <= width and y >= 0 and y + h <= height
        boxes[y].append((x, x + w))
    for row in boxes.values():
        row.sort()
        assert all(end <= start for (_, end), (start, _) in zip(row, row[1:])), "boxes overlap"
    for each in elements(root, "text"):
        if each.get("class") == "cell":
            half = 6.6 * columns_of(each.text) / 2  # 6.6: width of a letter, at 11 pixels
            middle, y = float(each.get("x")), float(each.get("y")) - 11.5
            [box] = [one for one in boxes[y] if one[0] < middle < one[1]]
            assert box[0] <= middle - half + 0.1 and middle + half <= box[1] + 0.1


def elements(root, tag):
    return root.findall(f".//{{http://www.w3.org/2000/svg}}{tag}")


def test_one_strip_alone(tmp_path, capsys):
    path = tmp_path / "fim.svg"
    printed(capsys, "fim", f"--svg={path}")
    names = [each.text for each in elements(ET.parse(path).getroot(), "text")]
    assert "fim" in names and "One text, 1 objectives" not in names
    assert "stands for a gap" in names  # the legend
    assert "mlm" not in names
    assert "<MID>" in names


def test_a_mixture_has_a_strip_for_each_member(tmp_path, capsys):
    path = tmp_path / "both.svg"
    printed(capsys, "ul2:0.5,clm:0.5", f"--svg={path}")
    texts = elements(ET.parse(path).getroot(), "text")
    assert [each.text for each in texts if each.get("class") == "name"] == ["ul2", "clm"]
    printed(capsys, "clm:0.99,fim:0.01", f"--svg={path}")  # fim makes few rows, but has a strip
    texts = elements(ET.parse(path).getroot(), "text")
    assert [each.text for each in texts if each.get("class") == "name"] == ["clm", "fim"]


# The command.


def test_the_picture_of_the_readme_is_what_its_command_draws(tmp_path, capsys):
    path = tmp_path / "picture.svg"
    printed(capsys, "all", f"--svg={path}")
    committed = Path(view.__file__).with_name("picture.svg")
    same = path.read_text(encoding="utf-8") == committed.read_text(encoding="utf-8")
    assert same, "draw it again: python view.py all --svg=picture.svg"


def test_the_list_has_a_line_for_each_objective(capsys):
    lines = printed(capsys).splitlines()
    for line, (name, row) in zip(lines, OBJECTIVES.items()):
        assert line.split()[:2] == [name, row.attention]
        assert line.endswith((".", "?"))
        assert len(line) <= 100, "shorten the first sentence of the docstring"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["fmi"], "did you mean fim?"),
        (["clm", "--mask_rate=0.3"], "--mask_rate does not apply to clm"),
        (["clm", "--text=short"], "got 1; give a longer text, or add --tokenizer=bytes"),
        (["clm", "--text=" + "long " * 600], "a long one with --data=FILE"),
        (["clm", "--n=0"], "must be at least 1"),
        (["all", "--json"], "name one"),
        (["clm", "--json", "--svg=x.svg"], "leave out --svg"),
        (["clm", "--tokenizer=byte", f"--text={TEXT}"], "bytes"),
        (["clm", "--data=/no/such/file"], "/no/such/file"),
        (["clm", f"--text={TEXT}", "--data=stories"], "each give a text: leave one out"),
        (["clm", "--cache_dir=x"], "--cache_dir has no effect without --data: remove it"),
    ],
)
def test_a_mistake_gives_one_line(argv, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        view.main(argv)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_no_remedy_is_given_that_was_taken_already():
    with pytest.raises(UserError, match="got 5; give a longer text$"):
        view.main(["clm", "--tokenizer=bytes", "--text=short"])


def test_a_text_too_short_to_draw_gives_one_line(tmp_path):
    path = tmp_path / "tiny.txt"
    path.write_text("Hi you.")
    with pytest.raises(
        UserError, match="needs 65 tokens, but the training text has 6; lower --block_size or give"
    ):
        view.main(["nsp", f"--data={path}", f"--cache_dir={tmp_path / 'cache'}"])


@pytest.mark.parametrize("name", [*OBJECTIVES, "clm:0.5,ul2:0.5"])
def test_json_says_how_rows_are_read(name, capsys):
    header = json.loads(printed(capsys, name, "--json", f"--text={TEXT}").splitlines()[0])
    wanted = "causal+prefix" if "," in name else OBJECTIVES[name].attention
    assert header["attention"] == wanted


def test_the_drawing_follows_the_flags(capsys):
    """With --mask_rate=0.9 nearly all words are asked; a fim that moves nothing has no marks."""
    many = printed(capsys, "mlm", f"--text={TEXT}", "--mask_rate=0.9")
    asked, n = map(int, re.search(r"Asked at (\d+) of (\d+)", many).groups())
    assert asked == round(0.9 * n)
    assert "<MID>" not in printed(capsys, "fim", f"--text={TEXT}", "--fim_rate=0")
    assert "asks +2" in printed(capsys, "mtp", f"--text={TEXT}", "--n_future=2")
    assert "asks +3" not in printed(capsys, "mtp", f"--text={TEXT}", "--n_future=2")


def test_the_note_has_the_weight_of_the_answers():
    for seed in range(5):
        scene = scene_of("diffusion", seed)
        _, row = view.row_of(scene, 0, 1)
        [drawing] = view.draw(scene, 1)
        asked = row.targets != IGNORE
        if asked.any():
            assert f"each with weight {row.weights[asked].mean():.2f}" in drawing.note


def test_the_mask_on_a_terminal_is_the_mask():
    """Two rows on a line: the upper half of a character is the first. Longer rows are sampled."""
    seen = {" ": (0, 0), "▀": (1, 0), "▄": (0, 1), "█": (1, 1)}

    def shown(mask):
        pairs = [[seen[c] for c in line] for line in picture.mask_lines(mask)]
        return np.array([[pair[half] for pair in line] for line in pairs for half in (0, 1)])

    mask = np.tri(8, dtype=bool)
    assert (shown(mask) == mask).all()
    long = shown(np.tri(48, dtype=bool))  # 12 of 48, evenly spread
    assert (long == np.tri(12)).all()
    half = np.zeros((48, 48), bool)
    half[:, 24:] = True
    assert (shown(half)[:, :6] == 0).all() and (shown(half)[:, 6:] == 1).all()
