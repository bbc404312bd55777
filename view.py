"""view.py: draw what an objective does to a text: what is read, what is asked, who sees whom.

    python view.py                                    list the objectives
    python view.py fim                                draw one, on a short story
    python view.py span --mean_span=8 --text="A text of your own, some ten words or more."
    python view.py clm:0.5,ul2:0.5 --data=README.md --block_size=128
    python view.py all --svg=picture.svg              draw all on one text, as a picture
    python view.py fim --json --n=100 --block_size=256 --seed=1

With --data, --block_size or --json, but without --text, the rows are those that training draws (for
diffusion, after its warm-up). Otherwise the text is a short example, usually shown whole. The table
SPECIAL has a function for each objective that has more to show.
"""

import inspect
import json
import sys
from dataclasses import dataclass

import numpy as np
import torch

import stories
from config import UserError, atomic_write, build, flag, parse_flags, run_command, visible
from corpus import DataConfig, load_tokens
from data import IGNORE, Row, Text
from mixture import TRAIN, Source, check_knobs, check_text, draw_row, parse_mixture, tokens_ahead
from model import dense_mask
from objectives import OBJECTIVES, PAIR_MARKS, Knobs
from picture import Cell, Drawing, show, svg, without_source
from tokenizer import EOT_TEXT, Tokenizer, get_tokenizer

PICTURE = "Tom has 5 red pens.\nAnn brings 2 more.\nNow he has 7.\n"  # the text of pictures
EACH_WORD = "bpe:999999"  # merges until each word is a token
# Objectives whose rows are of several kinds, and the tokens with which each kind begins.
MODES = {"ul2": ("R", "S", "X"), "fim": ("PRE", "SUF")}


@dataclass
class ViewConfig:
    """what to draw"""

    json: bool = flag(False, "print a header line and one JSON object per row, for programs")
    svg: str = flag("", "write a picture to this file")
    text: str = flag("", "a text of your own, 8 to 512 tokens")
    n: int | None = flag(None, "rows; automatic: one of each kind; with --json one", min=1)
    block_size: int | None = flag(
        None, "positions in a row; automatic: what an example needs, else 64", min=8, max=4096
    )
    seed: int = flag(5, "seed for drawing rows", min=0, below=1 << 31)


# ---- the text ----------------------------------------------------------------------------------


class Example(Text):
    """A few short documents. Every draw returns the first, or the first two, from the beginning."""

    def __init__(self, documents: list[np.ndarray], eot: int):
        super().__init__(np.concatenate([[*ids, eot] for ids in documents]), eot)
        self.documents = documents

    def window(self, rng: np.random.Generator, length: int, ahead: int = 0) -> np.ndarray:
        return np.resize(self.tokens, length + ahead).astype(np.int32)

    def chunk(self, rng: np.random.Generator, length: int) -> np.ndarray:
        return self.documents[0][:length]

    def two_chunks(self, rng: np.random.Generator, length: int) -> list[np.ndarray]:
        return [ids[:length] for ids in self.documents[:2]]


def load_text(view: ViewConfig, given: dict) -> tuple[Tokenizer, Text]:
    """The training text of a corpus, or the Example that is shown instead of it."""
    if given.get("text") == "":
        raise UserError("--text is empty: give a text of 8 tokens or more")
    if view.text or not (view.json or view.block_size or "data" in given):
        for name in ("cache_dir", "invalid_utf8"):
            if name in given:
                raise UserError(f"--{name} has no effect without --data: remove it")
        texts = sorted((text for text, _ in stories.documents(200)), key=len)
        if view.text or view.svg:
            texts.insert(0, view.text or PICTURE)
        tok = get_tokenizer(given.get("tokenizer", EACH_WORD), texts)
        documents = [np.array(tok.encode(text), np.int32) for text in texts]
        if not 8 <= len(documents[0]) <= 512:
            wrong = f"--text: a drawing needs 8 to 512 tokens, got {len(documents[0])}"
            remedy = "give a shorter text, or a long one with --data=FILE"
            if len(documents[0]) < 8:
                remedy = "give a longer text"
                remedy += ", or add --tokenizer=bytes" if tok.name != "bytes" else ""
            raise UserError(f"{wrong}; {remedy}")
        return tok, Example(documents, tok.EOT)

    config = build(DataConfig, given)
    tokens = load_tokens(config, log=lambda line: print(visible(line), file=sys.stderr))
    return tokens.tok, Text(tokens.train, tokens.tok.EOT)


# ---- rows --------------------------------------------------------------------------------------


def row_of(scene: Source, number: int, n: int) -> tuple[str, Row]:
    """The name of the objective that made row `number` of n, and the row, as in a training step."""
    if scene.T is None:
        scene = scene._replace(T=positions_needed(scene, number, n))
    row, member = draw_row(scene, TRAIN, 0, number, n)
    return list(scene.mixture)[member], row


def positions_needed(scene: Source, number: int, n: int) -> int:
    """The smallest T for which a row holds all of the Example's first document. (With mtp, the end
    of the document may be in the targets only.)"""
    document = scene.text.documents[0]
    size = len(document)
    fewest = max(size + 1 - tokens_ahead(scene.mixture, scene.knobs), 2)
    for T in range(fewest, 2 * size + 9):
        row, _ = draw_row(scene._replace(T=T), TRAIN, 0, number, n)
        if np.array_equal(np.sort(row.raw[:size]), np.sort(document)):  # sop may swap its parts
            return T
    return size + PAIR_MARKS  # nsp may never show all of it


def draw_rows(scene: Source, n: int | None) -> list[tuple[str, Row]]:
    """n rows; without n, the first row of each member of the mixture, or of each of its MODES."""
    if n is not None:
        return [row_of(scene, i, n) for i in range(n)]

    rows = []
    for name in scene.mixture:
        alone = scene._replace(mixture={name: 1.0})
        kinds = [getattr(scene.tok, mode) for mode in MODES.get(name, ())]
        drawn = [row_of(alone, i, 64) for i in range(64 if kinds else 0)]
        first = {int(row.inputs[0]): (name, row) for _, row in reversed(drawn)}  # by first token
        rows += [first[kind] for kind in kinds if kind in first] or [row_of(alone, 0, 1)]
    return rows


# ---- what any row shows ------------------------------------------------------------------------


def about(name: str) -> str:
    """The first paragraph of an objective's docstring: a sentence."""
    doc = inspect.getdoc(OBJECTIVES[name].row) or ""
    return " ".join(doc.split("\n\n")[0].split())


def cell(tok: Tokenizer, id: int) -> Cell:
    """An id as visible text, without the space before a word; IGNORE is an empty cell."""
    if id == IGNORE:
        return Cell("")
    if id in tok.names:
        name = tok.names[id].replace("extra_id_", "").replace(EOT_TEXT, "<EOT>")
        if id == tok.MASK:
            return Cell(name, "hidden")
        return Cell(name, "sentinel" if id >= tok.sentinel else "mark")
    piece = tok.decode([id])
    if "\ufffd" in piece:  # part of a character
        piece = "".join(f"\\x{byte:02X}" for byte in tok.bytes[id])
    word = piece.strip(" ") or "␣" * len(piece)
    return Cell(visible(word.replace("\n", "⏎").replace("\t", "⇥")), "text")


def cells(tok: Tokenizer, ids, kind: str = "") -> list[Cell]:
    """The cells of several ids; `kind`, if given, overrides their own kinds."""
    drawn = [cell(tok, id) for id in np.asarray(ids).tolist()]
    return [each._replace(kind=kind or each.kind) for each in drawn]


def draw_any(name: str, row: Row, tok: Tokenizer) -> Drawing:
    """What positions read, are asked and may see; neighbors that are read alike form a group."""
    n = 1 + int(np.flatnonzero(row.segment > 0).max(initial=-1))  # the rest is padding
    segment = row.segment[:n]
    prefix = row.prefix[:n]
    mask = dense_mask(torch.tensor(segment)[None], torch.tensor(prefix)[None])[0, 0].numpy()
    targets = row.targets.reshape(len(row.inputs), -1)[:n]  # (n, horizons)
    asked = targets[:, 0] != IGNORE

    groups = []
    is_new = (np.diff(segment) != 0) | (np.diff(prefix) != 0)
    for at in np.split(np.arange(n), 1 + np.flatnonzero(is_new)):
        both_ways = np.triu(mask[np.ix_(at, at)], 1).any()
        tracks = {f"reads {'⇄' if both_ways else '→'}": cells(tok, row.inputs[at])}
        if asked[at].any():
            for k, column in enumerate(targets[at].T, 1):
                tracks["asks" if k == 1 else f"asks +{k}"] = cells(tok, column, "answer")
        groups.append(tracks)

    note = f"Asked at {asked.sum()} of {n} positions"
    weights = row.weights[:n][asked]
    if (weights != 1).any():
        note += f", each with weight {weights.mean():.2f}"
    return Drawing(name, about(name), groups, mask, f"{note}.")


# ---- what only one objective's row shows ---------------------------------------------------------


def draw_pair(drawing: Drawing, row: Row, scene: Source) -> Drawing:
    """The label in words, under the [CLS] that it is read from."""
    word, meaning = LABELS[drawing.name][int(row.extra)]
    drawing.groups[0]["asks"][0] = Cell(word, "answer")
    note = f"The label {row.extra}, asked at [CLS], is {word!r}: {meaning}."
    return drawing._replace(note=note)


LABELS = {  # objective -> label -> a word and what it means
    "nsp": {0: ("NotNext", "B is from another document"), 1: ("IsNext", "B is the text after A")},
    "sop": {0: ("swapped", "B stood before A"), 1: ("in order", "B stood after A")},
}


def draw_electra(drawing: Drawing, row: Row, scene: Source) -> Drawing:
    """What the generator reads, what the detector reads, and what the detector is asked.

    There is no generator here: half of the chosen positions keep their token, half get any."""
    tok = scene.tok
    pool = scene.text.tokens[:100_000]
    pool = pool[pool < tok.n_ordinary]
    generator = cells(tok, row.inputs[: len(drawing.mask)])
    detector = list(generator)
    replaced = [Cell("no", "other")] * len(generator)
    for i in np.flatnonzero(row.targets != IGNORE):
        u = row.extra[i]
        sample = int(row.targets[i])
        if u >= 0.5:  # then 2u - 1 is uniform on [0, 1)
            sample = int(pool[int((2 * u - 1) * len(pool))])
        detector[i] = cell(tok, sample)
        if sample != row.targets[i]:
            detector[i] = detector[i]._replace(kind="wrong")
            replaced[i] = Cell("yes", "wrong")
    tracks = {"generator": generator, "detector": detector, "replaced?": replaced}
    note = "In training, a generator fills the [MASK]s; here, words drawn from the text do."
    return drawing._replace(groups=[tracks], note=note)


def draw_crops(drawing: Drawing, row: Row, scene: Source) -> Drawing:
    """Both crops, and those of three other rows."""
    groups = [{f"crop {k}": cells(scene.tok, row.inputs[row.segment == k])} for k in (1, 2)]
    for i in range(1, 4):
        source = scene._replace(seed=scene.seed + i, T=len(row.inputs))
        if isinstance(scene.text, Example):  # it always draws its first document
            source = source._replace(text=Example(scene.text.documents[i:], scene.tok.EOT))
        _, other = row_of(source, 0, 1)
        for k in (1, 2):
            crop = other.inputs[other.segment == k]
            groups.append({"unlike": cells(scene.tok, crop, "other")})
    note = "The two crops must embed alike, and unlike those of the batch's other rows."
    return drawing._replace(groups=groups, note=note)


SPECIAL = {"nsp": draw_pair, "sop": draw_pair, "electra": draw_electra, "contrastive": draw_crops}


def draw(scene: Source, n: int | None) -> list[Drawing]:
    drawings = []
    for name, row in draw_rows(scene, n):
        drawing = draw_any(name, row, scene.tok)
        if name in SPECIAL:
            drawing = SPECIAL[name](drawing, row, scene)
        drawings.append(drawing)
    return drawings


# ---- the command -------------------------------------------------------------------------------


def print_json(spec: str, scene: Source, n: int) -> None:
    """A header and a line for each row, with the names of data.Row, but "source" for `raw`."""
    attention = dict.fromkeys(OBJECTIVES[name].attention for name in scene.mixture)
    header = {"objective": spec, "block_size": scene.T, "vocab_size": scene.tok.vocab_size}
    header |= {"special_tokens": scene.tok.specials, "attention": "+".join(attention)}
    print(json.dumps(header))
    for name, row in draw_rows(scene, n):
        line = {"source": row.raw.tolist()}
        for key in ("inputs", "targets", "weights", "segment", "prefix"):
            line[key] = getattr(row, key).tolist()
        if row.extra is not None and np.ndim(row.extra) == 0:
            line["label"] = np.asarray(row.extra).item()
        if len(scene.mixture) > 1:
            line["member"] = name
        print(json.dumps(line))


def print_list() -> None:
    for name, objective in OBJECTIVES.items():
        print(f"{name:<12} {objective.attention:<7} {without_source(about(name))}")
    print("\nSee one: python view.py fim     Train one: python train.py --objective=fim")


def main(argv: list[str]) -> None:
    given = parse_flags(argv, __doc__, ViewConfig, Knobs, DataConfig, positional="objective")
    view = build(ViewConfig, given)
    knobs = build(Knobs, given)
    spec = given.get("objective")
    if spec is None and not given:
        return print_list()
    if spec is None:
        raise UserError(f"--{min(given)} needs an objective: view.py NAME, or view.py all")
    if view.text and "data" in given:
        raise UserError("--text and --data each give a text: leave one out")
    if view.json and (view.svg or spec == "all"):
        raise UserError("--json prints the rows of one objective: name one, and leave out --svg")

    T = view.block_size or (64 if view.json or "data" in given else None)
    mixtures = [parse_mixture(each) for each in (OBJECTIVES if spec == "all" else [spec])]
    for mixture in mixtures:
        check_knobs(mixture, knobs, {} if spec == "all" else given, T or 64)

    tok, text = load_text(view, given)
    scenes = [Source(mixture, text, tok, T, knobs, view.seed) for mixture in mixtures]
    if not isinstance(text, Example):
        for scene in scenes:
            check_text(scene.mixture, text, T, knobs)
    if view.json:
        return print_json(spec, scenes[0], view.n or 1)

    strips = {}  # by objective
    for scene in scenes:
        for drawing in draw(scene, view.n):
            strips.setdefault(drawing.name, []).append(drawing)
    if view.svg:
        with atomic_write(view.svg) as f:
            f.write(svg(list(strips.values())).encode())
        print(f"wrote {visible(view.svg)}")
        return
    for number, drawings in enumerate(strips.values()):
        if number:
            print()
        show(drawings)


if __name__ == "__main__":
    run_command(main)
