"""view.py: see what an objective does to a text: the row, what is asked, the attention; without a name, the list of all.

    python objectives.py fim
    python objectives.py span --mean_span=8 --block_size=128 --data=README.md
    python objectives.py fim --json --n=100 --block_size=256 --seed=1
"""
import json
import sys
from dataclasses import dataclass

import numpy as np
import torch

from data import IGNORE, DataConfig, Rng, Tokenizer, cli, flag, load_tokens, parse_flags
from model import may_attend
from objectives import OBJECTIVES, Knobs, check_knobs, check_text, make_rows, parse_mixture


@dataclass
class ViewConfig:
    """rows of one objective, drawn or as JSON lines"""
    json: bool = flag(False, "one header line and one JSON object a row, for programs")
    n: int = flag(1, "rows, in [1, inf)")
    block_size: int = flag(64, "positions of a row, T, in [8, inf)")
    seed: int = flag(5, "seed of the draws, in [0, 2147483648)")    # of 5, the first rows of fim and ul2 show what they do


def _spell(tok: Tokenizer, ids) -> list[str]:
    """Each id as visible text."""
    show = {"\n": "⏎", "\t": "⇥", "\r": "␍"}
    return [tok.names.get(int(i)) or "".join(show.get(c, c if c.isprintable() else "·") for c in tok.decode([i])) for i in ids]


def _draw_mask(row: dict) -> str:
    """The attention of one row, a dark cell where q (down) may see k (across), two rows of cells a line of half blocks."""
    segment, both_ways = (torch.tensor(row[name])[None] for name in ("segment", "prefix"))
    sees = (may_attend(segment, both_ways)[0] & (segment[0, :, None] > 0)).numpy()
    cells = -(-len(sees) // 64)
    sees = np.pad(sees[::cells, ::cells], ((0, 1), (0, 0)))
    return "\n".join("  " + "".join(" ▀▄█"[int(a) + 2 * int(b)] for a, b in zip(sees[i], sees[i + 1])) for i in range(0, len(sees) - 1, 2))


def draw(row: dict, tok: Tokenizer, colour: bool) -> str:
    """The original, the row the model reads (asked positions coloured), what it must predict, and the attention."""
    paint = (lambda s: f"\033[1;32m{s}\033[0m") if colour else (lambda s: s)
    targets = row["targets"] if row["targets"].ndim == 1 else row["targets"][:, 0]
    asked, real = targets != IGNORE, row["segment"] > 0
    reads = "".join(paint(s) if a else s for s, a, r in zip(_spell(tok, row["inputs"]), asked, real) if r)
    answers = [paint(s) if a else "·" for s, a, r in zip(_spell(tok, np.maximum(targets, 0)), asked, real) if r]
    more = "" if row["targets"].ndim == 1 or row["targets"].shape[1] == 1 else f"   (and the {row['targets'].shape[1] - 1} tokens after it)"
    out = ["original", "  " + "".join(_spell(tok, row["source"])), "reads" + (" (green: a prediction is asked here)" if colour else ""), "  " + reads,
           f"predicts, position by position (· is nothing asked){more}", "  " + "".join(answers)]
    if "label" in row:
        out += [f"label  {row['label']}"]
    out += [f"asked at {asked.sum()} of {real.sum()} positions, {len(real) - real.sum()} padded",
            "attention: what each position (down) sees (across)", _draw_mask(row)]
    return "\n".join(out)


def main(argv: list[str]) -> None:
    view, knobs, config, given = parse_flags(argv, __doc__, ViewConfig, Knobs, DataConfig, positional="objective")
    if given.get("objective") is None:
        for name, row in OBJECTIVES.items():
            about = row.corrupt.__doc__ if row.corrupt.__name__ == name else row.loss.__doc__
            print(f"{name:<12} {row.attention:<7} {about.split(' x: ')[0].splitlines()[0]}")
        return print("\nSee one: python objectives.py fim     Train one: python train.py --objective=fim     Mix: --objective=clm:0.5,ul2:0.5")
    mixture = parse_mixture(given["objective"])
    check_knobs(mixture, knobs, given, view.block_size)
    tokens = load_tokens(config, log=lambda line: print(line, file=sys.stderr))
    tok = tokens.tok
    check_text(mixture, tokens.train, view.block_size, knobs, tok)
    if view.json:
        print(json.dumps({"objective": given["objective"], "block_size": view.block_size, "vocab_size": tok.vocab_size,
                          "special_tokens": tok.specials, "attention": "+".join(dict.fromkeys(OBJECTIVES[m].attention for m in mixture))}))
    made = make_rows(mixture, tokens.train, Rng(view.seed, 0, 0, range(view.n)), tok, view.block_size, knobs)
    for i in range(view.n):
        row = {k: v[i] for k, v in made.items() if k != "member"}
        row["source"] = row["source"][row["source"] >= 0]
        if view.json:
            keys = ["source", "inputs", "targets", "weights", "segment", "prefix", *(["label"] if "label" in row else [])]
            print(json.dumps({k: row[k].tolist() for k in keys}))
        else:
            print(f"{given['objective']}, row {i}\n{draw(row, tok, sys.stdout.isatty())}\n")


if __name__ == "__main__":
    cli(main)
