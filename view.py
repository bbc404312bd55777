"""view.py: draw what an objective does to a text: what is read, what is asked, who sees whom.

    python view.py                                    list the objectives
    python view.py fim                                draw one, on a short story
    python view.py span --mean_span=8 --text="A text of your own, some ten words or more."
    python view.py clm:0.5,ul2:0.5 --data=README.md --block_size=128
    python view.py fim --json --n=100 --block_size=256 --seed=1

With --data, --block_size or --json, but without --text, the rows are those that training draws.
Otherwise the text is a short example, usually shown whole.
"""

import inspect
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

import stories
from corpus import DataConfig, load_tokens
from data import IGNORE, TRAIN, Row, Source, Text, check_text, draw_row
from model import dense_mask
from objectives import OBJECTIVES, Knobs, check_knobs, parse_mixture, source_of
from tokenizer import EOT_TEXT, Tokenizer, get_tokenizer
from util import UserError, build, flag, parse_flags, run_command, visible

EACH_WORD = "bpe:999999"  # merges until each word is a token
KINDS = ("R", "S", "X", "PRE", "SUF", "sentinel")  # rows whose first of these differ are shown
N_TRIES = 64  # rows in which these are looked for
MARKS_ROOM = 8  # tokens that a moved text gains
ROOM, LABEL, SIDE = 57, 10, 12  # columns of the cells, of their label, of the mask


@dataclass
class ViewConfig:
    """what to draw"""

    json: bool = flag(False, "print a header line and one JSON object per row, for programs")
    text: str = flag("", "a text of your own, 8 to 512 tokens; @FILE: read there", is_text=True)
    n: int | None = flag(None, "rows; automatic: one of each kind; with --json one", min=1)
    block_size: int | None = flag(
        None, "positions in a row; automatic: what an example needs, else 64", min=8, max=4096
    )
    seed: int = flag(4, "seed for drawing rows", min=0)


# ---- rows --------------------------------------------------------------------------------------


class Example(Text):
    """A few short documents. Every draw returns the first, or the first two, from the beginning."""

    def window(self, rng, length: int, ahead: int = 0) -> np.ndarray:
        return np.resize(self.tokens, length + ahead)

    def chunk(self, rng, length: int) -> np.ndarray:
        return self.tokens[: self.stops[0]][:length]

    def two_chunks(self, rng, length: int) -> list[np.ndarray]:
        return [self.tokens[self.starts[i] : self.stops[i]][:length] for i in range(2)]


def load_example(own_text: str, tokenizer: str = EACH_WORD) -> tuple[Tokenizer, Example]:
    """An Example that begins with a text of the user's own, or else with the shortest story."""
    texts = sorted((text for text, _ in stories.documents(200)), key=len)
    if own_text:
        texts.insert(0, own_text)
    tok = get_tokenizer(tokenizer, texts)
    documents = [np.array([*tok.encode(text), tok.EOT], np.int32) for text in texts]
    if not 8 < len(documents[0]) <= 513:
        has = f"--text has {len(documents[0]) - 1} tokens"
        raise UserError(f"{has}; give 8 to 512, or a long text with --data=FILE")
    return tok, Example(np.concatenate(documents), tok.EOT)


def row_of(source: Source, number: int, n: int) -> tuple[Row, int]:
    """draw_row of the first step. If source.T is None, the row is as short as it can be while it
    holds an Example's first document (nsp and sop may never show all of it)."""
    if source.T is not None:
        return draw_row(source, TRAIN, 0, number, n)
    document = np.sort(source.text.chunk(None, 512))
    size = len(document)
    shortest = size
    for each in source.objectives.values():
        if each.likelihood == "moved":
            shortest = size + MARKS_ROOM  # else no piece is moved
        elif "n_future" in each.knobs:
            shortest = max(size + 1 - source.knobs.n_future, 2)
    for T in range(shortest, 2 * size + 9):
        row, member = draw_row(source._replace(T=T), TRAIN, 0, number, n)
        if np.array_equal(np.sort(row.raw[:size]), document):
            break
    return row, member


def draw_rows(source: Source, n: int | None) -> list[tuple[str, Row]]:
    """n rows, each with its objective's name; without n, the first row of each objective of a
    mixture, or of each of its KINDS."""
    if n is not None:
        drawn = [row_of(source, i, n) for i in range(n)]
        return [(list(source.objectives)[member], row) for row, member in drawn]

    kinds = [getattr(source.tok, kind) for kind in KINDS]
    rows = []
    for name, objective in source.objectives.items():
        alone = source._replace(objectives={name: objective}, shares=[1.0])
        drawn = [row_of(alone, i, N_TRIES)[0] for i in range(N_TRIES)]
        marks = [row.inputs[np.isin(row.inputs, kinds)] for row in drawn]
        first = {ids[0]: row for ids, row in zip(marks[::-1], drawn[::-1]) if len(ids)}
        usual = drawn[N_TRIES // 3 if objective.has_t else 0]  # t rises from 0 to 1
        rows += [(name, first[kind]) for kind in kinds if kind in first] or [(name, usual)]
    return rows


# ---- drawings ----------------------------------------------------------------------------------


class Drawing(NamedTuple):
    """One row as cells, each the text of a token, or empty."""

    groups: list[dict[str, list[str]]]  # positions that are read alike: label -> a cell for each
    mask: np.ndarray  # (n, n) bool: who (down) sees whom (across)
    note: str


def about(name: str, source: bool = True) -> str:
    """The first paragraph of an objective's docstring: a sentence, with its source in brackets."""
    sentence = " ".join(inspect.getdoc(OBJECTIVES[name].row).split("\n\n")[0].split())
    return sentence if source else re.sub(r" \([^()]*\)", "", sentence)


def cells(tok: Tokenizer, ids: np.ndarray) -> list[str]:
    """Ids as visible text, without the space before a word; IGNORE is an empty cell."""
    texts = []
    for id in ids.tolist():
        if id in tok.names:
            text = tok.names[id].replace("extra_id_", "").replace(EOT_TEXT, "<EOT>")
        else:
            piece = "" if id == IGNORE else tok.decode([id])
            if "\ufffd" in piece:  # part of a character
                piece = "".join(f"\\x{byte:02X}" for byte in tok.bytes[id])
            text = piece.strip(" ") or "␣" * len(piece)
        texts.append(visible(text.replace("\n", "⏎").replace("\t", "⇥")))
    return texts


def draw(name: str, row: Row, source: Source) -> Drawing:
    """What positions read, are asked and may see; neighbors that are read alike form a group."""
    tok = source.tok
    n = 1 + int(np.flatnonzero(row.segment > 0).max(initial=-1))  # the rest is padding
    segment = row.segment[:n]
    group = row.group[:n]
    alone = np.isin(group, [g for g in set(group.tolist()) if np.sum(group == g) == 1])
    kind = np.where(alone, 0, group)  # a private [MASK] is drawn with its token
    mask = dense_mask(torch.tensor(segment)[None], torch.tensor(group)[None])[0, 0].numpy()
    targets = row.targets.reshape(len(row.inputs), -1)[:n]  # (n, horizons)
    asked = targets[:, 0] != IGNORE

    groups = []
    is_new = (np.diff(segment) != 0) | (np.diff(kind) != 0)
    for at in np.split(np.arange(n), 1 + np.flatnonzero(is_new)):
        both_ways = np.triu(mask[np.ix_(at, at)], 1).any()
        tracks = {f"reads {'⇄' if both_ways else '→'}": cells(tok, row.inputs[at])}
        for k, column in enumerate(targets[at].T, 1):
            tracks["asks" if k == 1 else f"asks +{k}"] = cells(tok, column)
        groups.append(tracks)

    weights = row.weights[:n][asked]
    weighted = f", with mean weight {weights.mean():.2f}" if (weights != 1).any() else ""
    note = f"Asked at {asked.sum()} of {n} positions{weighted}."
    if has_label(row):
        groups[0]["asks"][0] = f"label {row.extra}"
    if "detect_head" in OBJECTIVES[name].heads:
        groups = [detector_tracks(row, source)]
        note = "In training, a generator fills the [MASK]s; here, words drawn from the text do."
    if "similarity" in OBJECTIVES[name].tasks:
        groups = crops(row, source)
        note = "The two crops must embed alike, and unlike those of the batch's other rows."
    return Drawing(groups, mask, note)


def has_label(row: Row) -> bool:
    """One number for the whole row, asked at its first position."""
    return row.extra is not None and row.extra.ndim == 0


def detector_tracks(row: Row, source: Source) -> dict[str, list[str]]:
    """What electra's generator and detector read, and what the detector is asked. There is no
    generator here: half of the chosen positions keep their token, half get any."""
    pool = source.text.tokens[:100_000]
    pool = pool[pool < source.tok.n_ordinary]
    u = 2 * row.extra - 1  # where this is not negative, it is uniform on [0, 1)
    samples = np.where(u < 0, row.targets, pool[(u.clip(0) * len(pool)).astype(int)])
    read = np.where(row.targets == IGNORE, row.inputs, samples)
    replaced = (row.targets != IGNORE) & (samples != row.targets)
    return {
        "generator": cells(source.tok, row.inputs),
        "detector": cells(source.tok, read),
        "replaced?": ["yes" if wrong else "no" for wrong in replaced],
    }


def crops(row: Row, source: Source) -> list[dict[str, list[str]]]:
    """Both crops of contrastive, and those of three other rows."""
    tok = source.tok
    groups = [{f"crop {k}": cells(tok, row.inputs[row.segment == k])} for k in (1, 2)]
    for i in (1, 2, 3):
        text = source.text
        if isinstance(text, Example):  # it always draws its first document
            text = Example(text.tokens[text.starts[i] :], tok.EOT)
        other = source._replace(text=text, seed=source.seed + i, T=len(row.inputs))
        unlike, _ = draw_row(other, TRAIN, 0, 0, 1)
        groups += [{"unlike": cells(tok, unlike.inputs[unlike.segment == k])} for k in (1, 2)]
    return groups


# ---- what is printed ---------------------------------------------------------------------------


def layout(drawing: Drawing, room: int) -> Iterator[tuple[dict[str, list[str]], list[int]]]:
    """Groups that fit on a line, and how many columns each of their cells takes."""
    for group in drawing.groups:
        widths = [1 + max(map(len, column)) for column in zip(*group.values())]
        start = 0
        while start < len(widths):
            stop = start + 1
            while stop < len(widths) and sum(widths[start : stop + 1]) <= room:
                stop += 1
            part = {label: track[start:stop] for label, track in group.items()}
            yield {k: track for k, track in part.items() if any(track)}, widths[start:stop]
            start = stop


def mask_lines(mask: np.ndarray) -> list[str]:
    """At most SIDE rows and columns of an (n, n) mask, evenly spaced, two rows on each line.

    >>> mask_lines(np.tri(4, dtype=bool))
    ['█▄  ', '███▄']
    """
    n = len(mask)
    side = min(n, SIDE)
    kept = ((np.arange(side) + 0.5) * n / side).astype(int)
    mask = np.pad(mask[np.ix_(kept, kept)], ((0, side % 2), (0, 0)))
    pairs = np.array(list(" ▀▄█"))[mask[::2] + 2 * mask[1::2]]
    return ["".join(row) for row in pairs]


def show(name: str, drawings: list[Drawing]) -> None:
    """Print the rows of one objective, cells in columns and the mask to their right. A single row
    of a short text fits a screen of 80 x 24."""
    print(textwrap.fill(f"{name}: {about(name)}", 80))
    for drawing in drawings:
        lines = []
        for group, widths in layout(drawing, ROOM):
            for label, track in group.items():
                padded = [f"{text:<{width}}" for text, width in zip(track, widths)]
                lines.append(f"{label:<{LABEL}}{''.join(padded)}")
        for line, seen in itertools.zip_longest(lines, mask_lines(drawing.mask), fillvalue=""):
            print(f"{line:<{LABEL + ROOM}} {seen}".rstrip())
    if len(drawings) == 1:
        print(textwrap.shorten(drawings[0].note, 80))
    print("⇄ read both ways, → left to right; at right: who (down) sees whom (across)")


def print_json(spec: str, source: Source, n: int) -> None:
    """A header and a line for each row, with the names of data.Row, but "source" for `raw`."""
    attention = dict.fromkeys(each.attention for each in source.objectives.values())
    header = {"objective": spec, "block_size": source.T, "vocab_size": source.tok.vocab_size}
    header |= {"special_tokens": source.tok.specials, "attention": "+".join(attention)}
    print(json.dumps(header))
    keys = ("inputs", "targets", "weights", "segment", "group", "place")
    for name, row in draw_rows(source, n):
        line = {"source": row.raw.tolist()} | {key: getattr(row, key).tolist() for key in keys}
        if has_label(row):
            line["label"] = int(row.extra)
        if len(source.objectives) > 1:
            line["member"] = name
        print(json.dumps(line))


def main(argv: list[str]) -> None:
    given = parse_flags(argv, __doc__, ViewConfig, Knobs, DataConfig, positional="objective")
    view = build(ViewConfig, given)
    if "objective" not in given:
        for name, objective in OBJECTIVES.items():
            print(f"{name:<12} {objective.attention:<7} {about(name, source=False)}")
        print("\nSee one: python view.py fim     Train one: python train.py --objective=fim")
        return

    spec = given["objective"]
    mixture = parse_mixture(spec)
    knobs = build(Knobs, given)
    T = view.block_size or (64 if view.json or "data" in given else None)
    check_knobs(mixture, knobs, given, T or 64)
    if T is None or view.text:
        tok, text = load_example(view.text, given.get("tokenizer", EACH_WORD))
    else:
        config = build(DataConfig, given)
        tokens = load_tokens(config, log=lambda line: print(visible(line), file=sys.stderr))
        tok, text = tokens.tok, Text(tokens.train, tokens.tok.EOT)
        check_text(text, T)

    source = source_of(mixture, text, tok, T, knobs, view.seed)
    if view.json:
        return print_json(spec, source, view.n or 1)
    rows = draw_rows(source, view.n)
    for number, name in enumerate(dict.fromkeys(name for name, _ in rows)):
        if number:
            print()
        show(name, [draw(name, row, source) for member, row in rows if member == name])


if __name__ == "__main__":
    run_command(main)
