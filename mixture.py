"""mixture.py: one objective or several at given shares: their rows and batches, and what they need.

>>> parse_mixture("clm:0.5,ul2:1.5")
{'clm': 0.25, 'ul2': 0.75}
"""

import bisect
import dataclasses
import itertools
import math
from typing import NamedTuple

import numpy as np

from config import UserError, comma_list
from data import Batch, Row, Text, collate
from model import ModelConfig
from objectives import OBJECTIVES, Knobs, Objective, highest_t, token_loss
from tokenizer import Tokenizer

TRAIN, VALIDATION = 0, 1  # splits: their rows share no random numbers


# ---- rows and batches ---------------------------------------------------------------------------


class Source(NamedTuple):
    """What rows are drawn from."""

    mixture: dict[str, float]
    text: Text
    tok: Tokenizer
    T: int
    knobs: Knobs
    seed: int
    replay_text: Text | None = None  # an older corpus, to mix back in by row
    replay_rate: float = 0.0
    warmup: tuple[float, float] = (0, 0)  # highest_t's start and end; (0, 0): it is always 1


def draw_row(source: Source, split: int, step: int, number: int, n_rows: int) -> tuple[Row, int]:
    """Row `number` of the n_rows of a step, and the index of the mixture's objective that made it.
    They depend on the arguments alone, so any row of any step can be rebuilt."""
    # + 1 because numpy drops trailing zeros: [seed, 0, 0, 0] would equal default_rng(seed).
    rng = np.random.default_rng([source.seed, split, step, number + 1])
    u = rng.random()
    *ends, _ = itertools.accumulate(source.mixture.values())  # where each share but the last ends
    member = bisect.bisect(ends, u)  # NumPy would take 10 µs more for each row
    objective = OBJECTIVES[list(source.mixture)[member]]
    text = source.text
    if source.replay_text is not None and rng.random() < source.replay_rate:
        text = source.replay_text
    # As in MDLM, t / highest_t of row i of n lies in [i / n, (i + 1) / n). Only diffusion reads t.
    # It is never mixed with others, so u has chosen nothing, and can place t in this interval.
    t = (number + u) / n_rows * highest_t(step, *source.warmup)
    example = objective.draw(text, rng, source.T, source.knobs, t)
    return objective.row(example, rng, source.tok, source.T, source.knobs), member


def make_batch(source: Source, split: int, step: int, numbers, n_rows: int) -> Batch:
    """The batch of these row numbers, out of a step's n_rows. Any process would draw the same."""
    drawn = [draw_row(source, split, step, number, n_rows) for number in numbers]
    rows, members = zip(*drawn)
    return collate(rows, source.tok.n_bytes, members, tuple(source.mixture))


# ---- what was asked for -------------------------------------------------------------------------


def parse_mixture(spec: str) -> dict[str, float]:
    """ "fim" -> {"fim": 1.0}; "clm:0.5,ul2:0.5" -> shares that add up to 1. Raises UserError."""
    parts = [part.strip().partition(":") for part in spec.split(",")]
    comma_list("objective", ",".join(name for name, _, _ in parts), OBJECTIVES)  # may raise
    shares = {}
    for name, colon, weight in parts:
        try:
            shares[name] = float(weight if colon else 1)
        except ValueError:
            shares[name] = math.nan  # is refused below
        if not 0 < shares[name] < 1e9:
            raise UserError(f"--objective={spec}: the share of {name} must be above 0, below 1e9")

    if 0 < spec.count(":") < len(shares):
        raise UserError(f"--objective={spec}: give each objective a share, or none of them")
    alone = [name for name in shares if name not in with_token_loss()]
    if len(shares) > 1 and alone:
        able = ", ".join(with_token_loss())
        raise UserError(f"--objective={spec}: {alone[0]} cannot be mixed, only {able} can")
    total = sum(shares.values())
    return {name: share / total for name, share in shares.items()}


def first_member(mixture: dict[str, float]) -> Objective:
    """The table's entry of a mixture's first member. All members have the same loss, and none
    has heads: an objective with heads must have a loss of its own."""
    return OBJECTIVES[next(iter(mixture))]


def with_token_loss() -> list[str]:
    """The objectives whose loss is plain token cross entropy: those that can be mixed."""
    return [name for name, objective in OBJECTIVES.items() if objective.loss is token_loss]


def with_heads(config: ModelConfig, mixture: dict[str, float], knobs: Knobs) -> ModelConfig:
    """The config with the mixture's heads and no others."""
    all_heads = {name for objective in OBJECTIVES.values() for name in objective.heads}
    fields = {name: getattr(ModelConfig, name) for name in all_heads}  # the defaults: no head
    for name in first_member(mixture).heads:  # a knob's value (n_future), else True (pair_head)
        fields[name] = getattr(knobs, name, True)
    return dataclasses.replace(config, **fields)


def check_shape(config: ModelConfig) -> None:
    """Raise UserError on a shape that no model can have."""
    if config.n_head % config.n_kv_head:
        raise UserError(f"--n_kv_head={config.n_kv_head}: must divide --n_head={config.n_head}")
    if config.head_dim % 2:
        raise UserError(f"--head_dim={config.head_dim}: must be even, for rotary positions")


def check_knobs(mixture: dict[str, float], knobs: Knobs, given, T: int) -> None:
    """Raise UserError on a knob that no member reads, or on values that allow no T-position row."""
    read = {knob for name in mixture for knob in OBJECTIVES[name].knobs}
    for field in dataclasses.fields(Knobs):
        if field.name in given and field.name not in read:
            users = [name for name in OBJECTIVES if field.name in OBJECTIVES[name].knobs]
            wrong = f"--{field.name} does not apply to {'+'.join(mixture)}"
            raise UserError(f"{wrong}, only to {', '.join(users)}: remove it")
    for name in mixture:
        if OBJECTIVES[name].check:
            OBJECTIVES[name].check(T, knobs)


def tokens_ahead(mixture: dict[str, float], knobs: Knobs) -> int:
    """An upper bound on how many tokens past a row's last position are targets."""
    return knobs.n_future if "n_future" in first_member(mixture).heads else 1


def check_text(mixture: dict[str, float], text: Text, T: int, knobs: Knobs, held_out=False) -> None:
    """Raise UserError if not even one row can be made from a text, if it has too few documents, or
    if they are too short. Text that is held out may be shorter than a row."""
    needed = T + tokens_ahead(mixture, knobs)
    if len(text) < needed and not held_out:
        has = f"a row needs {needed} tokens, but the training text has {len(text)}"
        raise UserError(f"--block_size={T}: {has}; lower --block_size or give more text")
    for name in mixture:
        # A draw raises UserError if it needs a document of two tokens and there is none.
        OBJECTIVES[name].draw(text, np.random.default_rng(0), T, knobs, 0.0)
        if OBJECTIVES[name].fewest_rows > 1 and len(text.sizes) < 2:
            raise UserError(
                f"{name} needs two documents or more, separated by a line <|endoftext|> or as "
                "files in a folder; to train on, give 40 or more, because every 20th is held out"
            )
