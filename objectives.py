"""objectives.py: what the model is asked. One numpy function per objective, its loss, and the table OBJECTIVES.

Each function takes raw token ids and returns rows of T positions, five arrays and nothing else for the model:

    inputs   what the model reads                    targets  what each position must predict; -100: nothing is asked
    segment  1, 2, ... the examples, 0 padding       prefix   True where the position is read bidirectionally
    weights  of each position's loss                 (label   one a row, where a head asks for it)

Attention is one rule: q sees k iff segment[q] == segment[k] and (k <= q or (prefix[q] and prefix[k])).
Left out: encoder-decoder models. Sequence-to-sequence objectives are one row `[source EOT][target EOT]`, the source read
bidirectionally: the "prefix LM" architecture of the T5 paper's own comparison. See one: `python objectives.py fim`.

In the worked examples the tokens are characters, `_` is nothing asked, and `$` is <|endoftext|>.
"""
import difflib
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from data import IGNORE, N_SENTINELS, Rng, Text, Tokenizer, UserError, check_values, cli, flag
from model import linear_cross_entropy

# UL2's denoisers (Tay et al. 2022): mode, share of rows, (mean span, corruption rate), or None for a suffix. Edit them here.
UL2 = (("R", 0.2500, (3, 0.15)), ("R", 0.2500, (8, 0.15)), ("S", 0.2500, None),
       ("X", 0.0625, (3, 0.50)), ("X", 0.0625, (8, 0.50)), ("X", 0.0625, (64, 0.15)), ("X", 0.0625, (64, 0.50)))
FIM_LAYOUTS = {   # what the model reads before it writes the middle
    "psm": lambda tok, p, s: [tok.PRE, *p, tok.SUF, *s, tok.MID], "spm": lambda tok, p, s: [tok.SUF, *s, tok.PRE, *p, tok.MID],
    "spm2": lambda tok, p, s: [tok.PRE, tok.SUF, *s, tok.MID, *p]}
BART_NOISE = ("permute", "rotate", "delete", "infill")   # in the order in which they are applied
BART_RATE, BART_MEAN = 0.3, 3                            # share of the tokens deleted or infilled; mean of the Poisson lengths
DIFFUSION_EPS = 1e-3
TEMPERATURE = 0.05                                       # of the contrastive cosine


@dataclass
class Knobs:
    """Each is read by some objectives only; given to another, it is an error."""
    mask_rate: float = flag(0.15, "mlm, nsp, sop, electra: share of tokens masked, in (0, 1)")
    corruption_rate: float = flag(0.15, "span: share of tokens in spans, in (0, 1)")
    mean_span: float = flag(3.0, "span: mean length of a span, tokens, in [1, inf)")
    prefix_frac: float | None = flag(None, "prefix: share of the row read bidirectionally, in (0, 1); automatic: uniform")
    fim_rate: float = flag(0.5, "fim: probability that a piece is transformed, in [0, 1]")
    fim_layouts: str = flag("psm,spm", "fim: layouts drawn evenly, from psm, spm, spm2; sample.py fills with the last")
    bart_noise: str = flag("infill,permute", "bart: any of permute, rotate, delete, infill")
    n_future: int = flag(4, "mtp: tokens predicted at each position, in [1, 64]")
    mtp_heads: str = flag("chain", "mtp: how horizons beyond the first are made", ("chain", "parallel"))
    mtp_weight: float | None = flag(None, "mtp: weight of their loss, in [0, inf); automatic: 1 each (parallel), 0.3 shared (chain)")
    generator_frac: float = flag(0.25, "electra: generator width over model width, in (0, 1]")
    rtd_weight: float = flag(50.0, "electra: weight of the replaced-token loss, in [0, inf)")
    doc_mask: bool = flag(False, "clm: attention stays inside a document")


# ---- rows -----------------------------------------------------------------------------------------------------------

def rows(inputs, targets, prefix=False, segment=1, weights=1.0, **more) -> dict[str, np.ndarray]:
    """The five arrays of (B, T) rows, scalars broadcast."""
    fill = lambda value, dtype: np.broadcast_to(np.asarray(value, dtype), inputs.shape)
    return dict(inputs=inputs, targets=targets, weights=fill(weights, np.float32), segment=fill(segment, np.int32), prefix=fill(prefix, bool), **more)


def put(out: dict, those: np.ndarray, made: dict, B: int) -> None:
    """Some of B rows into `out`."""
    for name, value in made.items():
        out.setdefault(name, np.empty((B, *value.shape[1:]), value.dtype))[those] = value


def pack(x: np.ndarray, rng: Rng, T: int, tok: Tokenizer, size: Callable, corrupt: Callable, mode: np.ndarray | None = None):
    """Rows of `[source EOT][target EOT]` examples from raw windows x (B, N): one example a document, cut to what fits.

    `size(rng, row)` says how many tokens an example takes that is made of 0, 1, … N raw ones: (N+1,) or (b, N+1), rising.
    `corrupt(pieces, rng, row)` makes the E pieces, 1-D arrays from the rows `row`, into E sources and E targets. `mode` (B,)
    is an id to stand before each source. Attention never leaves an example.
    """
    B, N = x.shape
    ends, plan = np.append(np.flatnonzero(x == tok.EOT), B * N), []
    at, filled, todo, more = np.zeros(B, np.int64), np.zeros(B, np.int64), np.arange(B), mode is not None
    for number in range(T):                                                       # each row's first document, second, ...
        stop = np.minimum(ends[np.searchsorted(ends, todo * N + at[todo])] - todo * N, N)
        table, room = size(rng.fork(todo, number), todo), T + 1 - more - filled[todo]
        fits = np.searchsorted(table, room, side="right") if table.ndim == 1 else (table <= room[:, None]).sum(1)
        n = np.minimum(stop - at[todo], fits - 1)
        real, whole = n > 1, n == stop - at[todo]
        plan.append(np.stack([todo, todo * 0 + number, at[todo], n, filled[todo]])[:, real])
        filled[todo] += np.where(real, (table[n] if table.ndim == 1 else table[np.arange(len(n)), n]) - 1 + more, 0)
        at[todo] += np.where(whole, n + (stop < N), n * real)                     # a whole document's EOT is the example's own
        todo = todo[whole & (at[todo] < N)]
        if len(todo) == 0:
            break
    row, number, begin, n, place = np.concatenate(plan, axis=1)
    pieces = [x[r, b:b + k] for r, b, k in zip(row.tolist(), begin.tolist(), n.tolist())]
    inputs, targets = np.full(B * T, tok.PAD, np.int32), np.full(B * T, IGNORE, np.int32)          # flat: one slice an example
    segment, prefix, examples = np.zeros(B * T, np.int32), np.zeros(B * T, bool), [0] * B
    for r, a, source, target in zip(row.tolist(), (row * T + place).tolist(), *corrupt(pieces, rng.fork(row, number), row)):
        examples[r] += 1
        first = a + more
        middle = first + len(source)                                              # of the source's EOT, which asks for the target
        end = middle + 1 + len(target)
        inputs[first:middle], inputs[middle] = source, tok.EOT
        inputs[middle + 1:end] = targets[middle:end - 1] = target
        targets[end - 1] = tok.EOT
        segment[a:end], prefix[a:middle + 1] = examples[r], True
        if more:
            inputs[a] = mode[r]
    inputs, targets, segment, prefix = (v.reshape(B, T) for v in (inputs, targets, segment, prefix))
    source = x.copy()
    for b, used in enumerate(at.tolist()):
        source[b, used:] = -1
    return rows(inputs, targets, prefix, segment, source=source)


# ---- left to right --------------------------------------------------------------------------------------------------

def clm(x, rng, tok, T, knobs):
    """Causal language modeling (Radford et al. 2018): each token from those before it. x: (B, T+1).

        abcd -> inputs abc, targets bcd
    """
    inputs, targets = x[:, :T], x[:, 1:]
    if not knobs.doc_mask:
        return rows(inputs, targets, source=x)
    ends = inputs == tok.EOT
    return rows(inputs, np.where(ends, IGNORE, targets), segment=1 + ends.cumsum(1) - ends, source=x)


def prefix(x, rng, tok, T, knobs):
    """Prefix LM (Raffel et al. 2020, section 3.2): P tokens read both ways, the rest predicted. x: (B, T+1).

        abcdef, P = 3 -> inputs abcde, prefix 11100, targets __def
    """
    P = 1 + rng.below(T - 1) if knobs.prefix_frac is None else np.clip(round(knobs.prefix_frac * T), 1, T - 1)
    at = np.arange(T)
    return rows(x[:, :T], np.where(at >= P - 1, x[:, 1:], IGNORE), prefix=at < P, source=x)


def mtp(x, rng, tok, T, knobs):
    """Multi-token prediction (Gloeckle et al. 2024; DeepSeek-V3, section 2.2): the next n_future tokens. x: (B, T+n).

        abcde, n = 2 -> inputs abc, targets (b c) (c d) (d e)
    """
    ahead = np.stack([x[:, k:k + T] for k in range(1, knobs.n_future + 1)], axis=-1)
    return rows(x[:, :T], ahead, source=x)


def fim(x, rng, tok, T, knobs):
    """Fill in the middle (Bavarian et al. 2022): a piece is cut at two characters and its middle moved last. x: (B, T+1).

    Context level: pieces end at documents' ends, each is transformed with probability fim_rate. Cut points are characters,
    not tokens, and the three parts are tokenized apart; loss on every position.

        abcdef, cuts 2 and 4 -> psm  <PRE>ab<SUF>ef<MID>cd$
                                spm  <SUF>ef<PRE>ab<MID>cd$
                                spm2 <PRE><SUF>ef<MID>abcd$
    """
    layouts = knobs.fim_layouts.split(",")
    draws = rng.random(4 * (1 + int((x == tok.EOT).sum(1).max())))
    inputs, targets = np.full((len(x), T), tok.PAD, np.int32), np.full((len(x), T), IGNORE, np.int32)
    source = x.copy()
    for b, row in enumerate(x):
        out, at = [], 0
        for i, stop in enumerate([*np.flatnonzero(row == tok.EOT), len(row)]):
            room, piece = T + 1 - len(out), row[at:stop]
            transform, layout, *cuts = draws[b, 4 * i:4 * i + 4]
            made, used = [], 0
            if transform < knobs.fim_rate:
                made, used = _fim_piece(piece, cuts, room, tok, layouts[int(layout * len(layouts))])
            if not made:                                                              # not drawn, or no room for it
                made = row[at:min(stop + 1, at + room)].tolist()
                used = min(len(made), len(piece))
            out += made
            at += used + (used == len(piece) and stop < len(row) and room > used)     # the document's own EOT
            if len(out) > T or used < len(piece):
                break
        ids = np.array(out, np.int32)
        inputs[b, :len(ids) - 1], targets[b, :len(ids) - 1], source[b, at:] = ids[:-1], ids[1:], -1
    return rows(inputs, targets, segment=inputs != tok.PAD, source=source)


def _fim_piece(piece, cuts, room: int, tok, layout: str) -> tuple[list[int], int]:
    """As many of the piece's tokens as fit, transformed -> at most `room` ids (none: not one token fits), and how many it took."""
    used = min(len(piece), room - 4)
    while used > 0:
        text = tok.decode_bytes(piece[:used])
        starts = np.flatnonzero((np.frombuffer(text, np.uint8) & 0xC0) != 0x80)       # of UTF-8 characters
        edge = np.append(starts, len(text))
        i, j = sorted(int(edge[int(c * len(edge))]) for c in cuts)
        p, m, s = tok.encode(text[:i]), tok.encode(text[i:j]), tok.encode(text[j:])
        over = len(p) + len(m) + len(s) + 4 - room
        if over <= 0:
            return [*FIM_LAYOUTS[layout](tok, p, s), *m, tok.EOT], used
        used -= over                                                                  # apart, the parts made more tokens
    return [], 0


# ---- both ways ------------------------------------------------------------------------------------------------------

def mlm(x, rng, tok, T, knobs):
    """Masked LM (BERT, Devlin et al. 2019): tokens that were hidden, with a fresh mask at every step (RoBERTa). x: (B, T).

    Exactly max(1, round(mask_rate · ordinary tokens)) are asked for; of them 80% read [MASK], 10% a random token, 10% stay.

        abcdefghij, 2 asked -> inputs abc#efghij, targets ___d___h__    (# is [MASK]; h stayed)
    """
    special = x >= tok.n_ordinary                                             # never a candidate
    candidates = T - special.sum(1)
    n = np.minimum(np.maximum(1, np.rint(knobs.mask_rate * candidates)), candidates).astype(np.int64)
    place = rng.choose(T, n, special)                                         # (B, most asked); filled up with T
    fate = rng.random(2 * place.shape[1]).reshape(*place.shape, 2)[place < T]
    at, text = (place + np.arange(len(x))[:, None] * T)[place < T], x.reshape(-1)                    # flat: (asked,) places
    inputs, targets = text.copy(), np.full(text.shape, IGNORE, np.int32)
    random = np.flatnonzero(fate[:, 0] >= 0.9)
    targets[at] = text[at]
    inputs[at[np.flatnonzero(fate[:, 0] < 0.8)]] = tok.MASK
    inputs[at[random]] = fate[random, 1] * tok.n_ordinary
    return rows(inputs.reshape(x.shape), targets.reshape(x.shape), prefix=True, segment=x != tok.PAD, source=x)


def electra(x, rng, tok, T, knobs):
    """Replaced token detection (ELECTRA, Clark et al. 2020): which tokens did a small generator write? x: (B, T).

    mlm's rows, for the generator, and a number in [0, 1) a position that draws its sample there. The loss does the rest.
    """
    return mlm(x, rng, tok, T, knobs) | {"dice": rng.random(T).astype(np.float32)}


def diffusion(x, rng, tok, T, knobs):
    """Masked diffusion (MDLM, Sahoo et al. 2024; LLaDA): tokens masked at a rate of the row's own. x: (B, T).

    One t a row, stratified over the batch; each ordinary token is masked with probability p = (1-ε)t + ε, its loss weighs 1/p.

        abcdefgh, p = 0.5 -> inputs a##d#f#h, targets _bc_e_g_, weights 2 where asked
    """
    t = (rng.shared + rng.rows.astype(np.float64)) / rng.n_rows % 1.0
    p = ((1 - DIFFUSION_EPS) * t + DIFFUSION_EPS)[:, None]
    asked = (rng.random(T) < p) & (x < tok.n_ordinary)
    return rows(np.where(asked, tok.MASK, x), np.where(asked, x, IGNORE), prefix=True, weights=1 / p, source=x)


def nsp(x, rng, tok, T, knobs):
    """Next sentence prediction (BERT): does B follow A, or is it another document's? x: (B, 2, T-3), one window of each.

    In half the rows B is the text after A (label 1), else the start of the other window (label 0); mlm on top.

        abcdef / uvwxyz -> [CLS]ab[SEP]cdef[SEP] label 1, or [CLS]ab[SEP]uvwx[SEP] label 0
    """
    first, other = x[:, 0], x[:, 1]
    n = (first != tok.PAD).sum(1)
    A, follows = 1 + rng.below(n[:, None] - 1)[:, 0], rng.random(1)[:, 0] < 0.5
    j = np.arange(first.shape[1])
    text = np.where(j < A[:, None], first, np.take_along_axis(other, np.maximum(j - A[:, None], 0), 1))
    text = np.where(follows[:, None] | (j >= n[:, None]), first, text)
    return _pair(text, A, follows, rng, tok, T, knobs, source=text)


def sop(x, rng, tok, T, knobs):
    """Sentence order prediction (ALBERT, Lan et al. 2020): are A and B in order, or swapped? x: (B, 1, T-3).

    In half the rows the two are swapped (label 0); mlm on top.

        abcdef -> [CLS]ab[SEP]cdef[SEP] label 1, or [CLS]cdef[SEP]ab[SEP] label 0
    """
    text = x[:, 0]
    n = (text != tok.PAD).sum(1)
    A, in_order = 1 + rng.below(n[:, None] - 1)[:, 0], rng.random(1)[:, 0] < 0.5
    j = np.arange(text.shape[1])
    turn = (j + np.where(in_order, 0, A)[:, None]) % n[:, None]
    turned = np.where(j < n[:, None], np.take_along_axis(text, turn, 1), tok.PAD)
    return _pair(turned, np.where(in_order, A, n - A), in_order, rng, tok, T, knobs, source=text)


def _pair(text, first, label, rng, tok, T, knobs, source):
    """[CLS] text[:first] [SEP] text[first:] [SEP], padded, with mlm on its ordinary tokens."""
    B, n = np.arange(len(text))[:, None], (text != tok.PAD).sum(1)
    ids = np.full((len(text), T), tok.PAD, np.int32)
    j = np.arange(text.shape[1])
    ids[B, 1 + j + (j >= first[:, None])] = text
    ids[:, 0] = tok.CLS
    ids[B[:, 0], first + 1] = ids[B[:, 0], n + 2] = tok.SEP
    return mlm(ids, rng, tok, T, knobs) | dict(label=label.astype(np.int64), source=np.where(source == tok.PAD, -1, source))


def contrastive(x, rng, tok, T, knobs):
    """Contrastive (InfoNCE; Contriever, Izacard et al. 2022): which two crops are of one document? x: (B, 2, T//2).

    The row's two crops, independent of each other, are a positive pair; the other rows' crops are negatives.

        crops abc and cde -> inputs abccde, segment 111222, nothing to predict
    """
    ids = np.full((len(x), T), tok.PAD, np.int32)
    ids[:, :2 * (T // 2)] = x.reshape(len(x), -1)
    segment = np.where(ids == tok.PAD, 0, 1 + (np.arange(T) >= T // 2))
    order = np.argsort(segment == 0, axis=1, kind="stable")                   # short crops: padding last
    ids, segment = np.take_along_axis(ids, order, 1), np.take_along_axis(segment, order, 1)
    return rows(ids, np.full_like(ids, IGNORE), prefix=True, segment=segment, source=np.where(ids == tok.PAD, -1, ids))


# ---- source to target -----------------------------------------------------------------------------------------------

def span_counts(n_raw, rate: float, mean: float):
    """Raw tokens -> noise tokens, spans (T5, Raffel et al. 2020, section 3.3). Spans need a clean token between them."""
    noise = np.clip(np.rint(rate * n_raw), 1, np.maximum(n_raw - 1, 1)).astype(np.int64)
    return noise, np.clip(np.rint(noise / mean), 1, n_raw - noise + 1).astype(np.int64)


def _parts(ids, lengths) -> list:
    return [ids[i:j] for i, j in itertools.pairwise([0, *np.cumsum(lengths).tolist()])]


def span_examples(pieces, rng, tok, rate, mean):
    """Raw pieces -> sources `clean text, <extra_id_k> for span k` and targets `<extra_id_0> span 0 <extra_id_1> span 1 …`.

    Span lengths are a uniform composition of the noise into positive parts, gaps of the rest with the two outer ones
    possibly empty: every arrangement is equally likely (the very ends are masked a little less: a span must lie inside).
    All pieces at once, end to end in `text`.
    """
    text, n = np.concatenate(pieces), np.array([len(p) for p in pieces])
    noise, s = span_counts(n, rate, mean)                                                            # (E,) each
    length = np.diff(1 + rng.choose(noise - 1, s - 1), axis=1, prepend=0, append=noise[:, None])     # (E, most spans)
    gap = np.diff(1 + rng.choose(n - noise + 1, s), axis=1, prepend=1)                               # before each span
    start = (gap + length).cumsum(1) - length + (n.cumsum() - n)[:, None]
    e, k = np.nonzero(np.arange(length.shape[1]) < s[:, None])                                       # span k of example e
    start, length, sentinel = start[e, k], length[e, k], tok.sentinel + k
    hidden = np.repeat(start - (length.cumsum() - length), length) + np.arange(length.sum())         # where the noise tokens stood
    source, keep = text.copy(), np.ones(len(text), bool)
    keep[hidden], keep[start], source[start] = False, True, sentinel                                 # a span's first token
    target, spell, at = np.empty(len(hidden) + len(k), text.dtype), np.ones(len(hidden) + len(k), bool), (length + 1).cumsum() - length - 1
    spell[at], target[at] = False, sentinel
    target[spell] = text[hidden]
    return _parts(source[keep], n - noise + s), _parts(target, noise + s)


@functools.lru_cache
def _span_sizes(n_max: int, rate: float, mean: float) -> np.ndarray:
    n = np.arange(n_max + 1)
    return n + 2 * span_counts(n, rate, mean)[1] + 2


def span(x, rng, tok, T, knobs):
    """Span corruption (T5, Raffel et al. 2020): drop spans, predict them after their sentinels. x: (B, T).

        abcdefghij -> abc<extra_id_0>fgh<extra_id_1>j$<extra_id_0>de<extra_id_1>i$
    """
    rate, mean = knobs.corruption_rate, knobs.mean_span
    return pack(x, rng, T, tok, lambda rng, row: _span_sizes(x.shape[1], rate, mean),
                lambda pieces, rng, row: span_examples(pieces, rng, tok, rate, mean))


def suffix_examples(pieces, rng):
    """UL2's S-denoiser: a piece of n tokens -> its first P and the rest, P uniform on [n/4, 3n/4]."""
    n = np.array([len(p) for p in pieces])
    low = -(-n // 4)
    cut = low + rng.below(np.maximum(3 * n // 4 - low, 0)[:, None] + 1)[:, 0]
    return [p[:c] for p, c in zip(pieces, cut)], [p[c:] for p, c in zip(pieces, cut)]


def ul2(x, rng, tok, T, knobs):
    """UL2's mixture of denoisers (Tay et al. 2022): a mode token, then a row of the table UL2's denoisers. x: (B, T).

        abcdefgh -> [R]ab<extra_id_0>defgh$<extra_id_0>c$ or [S]abc$defgh$ or [X] with long spans or many
    """
    shares, n = np.cumsum([share for _, share, _ in UL2]), x.shape[1]
    draw = np.searchsorted(shares, rng.random(1)[:, 0] * shares[-1], side="right")
    mode = np.array([getattr(tok, name) for name, _, _ in UL2])[draw]
    mean, rate = np.array([shape or (1, 0) for _, _, shape in UL2]).T[:, draw]                       # a suffix has no spans
    sizes = np.stack([_span_sizes(n, shape[1], shape[0]) if shape else np.arange(n + 1) + 2 for _, _, shape in UL2])

    def corrupt(pieces, rng, row):
        made = [None] * len(pieces)
        for spans in (False, True):
            those = np.flatnonzero((rate[row] > 0) == spans)
            some, r = [pieces[i] for i in those], row[those]
            if some:
                pairs = span_examples(some, rng[those], tok, rate[r], mean[r]) if spans else suffix_examples(some, rng[those])
                for i, pair in zip(those, zip(*pairs)):
                    made[i] = pair
        return zip(*made)

    return pack(x, rng, T, tok, lambda rng, row: sizes[draw[row]], corrupt, mode)


POISSON = np.cumsum([np.exp(-BART_MEAN) * BART_MEAN**k / float(np.prod(np.arange(1, k + 1))) for k in range(30)][:-1])


def _bart_counts(n_raw, noise: list[str]):
    """Raw tokens -> those deleted, those of the rest covered by infilling."""
    deleted = np.rint(BART_RATE * n_raw).astype(np.int64) * ("delete" in noise)
    return deleted, np.rint(BART_RATE * (n_raw - deleted)).astype(np.int64) * ("infill" in noise)


def _infill(rng, n_max: int, covered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Poisson lengths (B, many), enough for n_max tokens, and how many of them cover so many tokens, (B, n), as covered."""
    lengths = np.searchsorted(POISSON, rng.random(32 + int(n_max * BART_RATE) // 2))
    spans = np.stack([np.searchsorted(ends, want) + 1 for ends, want in zip(lengths.cumsum(1), covered)])
    return lengths, np.where(covered > 0, spans, 0)


def _bart_sizes(rng, n_max: int, noise: list[str]) -> np.ndarray:
    n = np.arange(n_max + 1)
    deleted, covered = _bart_counts(n, noise)
    sizes = 2 * n - deleted - covered + 2
    return sizes + _infill(rng, n_max, np.broadcast_to(covered, (len(rng), len(n))))[1] if "infill" in noise else sizes      # one [MASK] a span


def bart_examples(pieces, rng, tok, noise: list[str], n_max: int):
    """Raw pieces -> their noised texts, and themselves."""
    n = np.array([len(p) for p in pieces])
    deleted, covered = _bart_counts(n, noise)
    lengths, spans = _infill(rng, n_max, covered[:, None])
    spans = spans[:, 0]
    slots, width = n - deleted - covered + spans, np.uint64(int(n.max()).bit_length())                  # clean tokens and [MASK]s
    kept, masks, turn = rng.choose(n, (n - deleted) * ("delete" in noise)), rng.choose(slots, spans), rng.random(2)
    order, sources = rng.bits(n.max()) >> width << width, []
    for i, text in enumerate(pieces):
        if "permute" in noise:                                        # by a random number of the sentence, then by place
            ends = tok.ends_sentence[text]
            place = np.sort(order[i, ends.cumsum() - ends] | np.arange(len(text), dtype=np.uint64))
            text = text[(place & ((np.uint64(1) << width) - np.uint64(1))).astype(np.int64)]
        if "rotate" in noise:
            text = np.roll(text, -int(turn[i, 0] * len(text)))
        text = text[kept[i, :n[i] - deleted[i]]] if deleted[i] else text
        if covered[i]:
            length, at = lengths[i, :spans[i]], masks[i, :spans[i]]
            length[-1] += covered[i] - length.sum()                   # the last is cut to fit exactly; it may stand anywhere
            step = np.ones(slots[i], np.int64)
            step[at] = np.roll(length, int(turn[i, 1] * spans[i]))
            text = text[np.maximum(step.cumsum() - 1, 0)]
            text[at] = tok.MASK
        sources.append(text)
    return sources, pieces


def bart(x, rng, tok, T, knobs):
    """Denoising (BART, Lewis et al. 2020): the whole original from a noised text. x: (B, T).

    Infilling covers exactly 30% of the tokens by spans of Poisson(3) length, each one [MASK]; a span of length 0 inserts a
    [MASK]. Permuting shuffles sentences; deleting drops 30% without a mark; rotating starts the text elsewhere, the target
    stays the original.

        "ab. cdef. gh" -> " gh#f.ab.$ab. cdef. gh$"    (# is [MASK])
    """
    noise = [name for name in BART_NOISE if name in knobs.bart_noise.split(",")]
    n_max = x.shape[1]
    return pack(x, rng, T, tok, lambda rng, row: _bart_sizes(rng, n_max, noise),
                lambda pieces, rng, row: bart_examples(pieces, rng, tok, noise, n_max))


# ---- losses: (model, batch, knobs, tok) -> loss, figures to log ------------------------------------------

def _mask(model, batch):
    return model.mask(batch["attention"], batch.get("segment"), batch.get("prefix"))


def _read(model, batch):
    """The hidden states of the positions with a target, (N, C), one a horizon."""
    return [h.flatten(0, 1).index_select(0, batch["index"]) for h in model(batch["inputs"], _mask(model, batch), batch.get("ahead"))]


def token_loss(model, batch, knobs, tok, banned=None):
    """Weighted cross entropy over the positions with a target, divided by the sum of weights; a mixture's members apart."""
    weights = batch["weights"]
    total, nll = linear_cross_entropy(_read(model, batch)[0], model.unembedding, batch["targets"], weights, banned)
    figures = {"token_loss": total / batch["denom"]}
    for i, name in enumerate(batch.get("members", ())):
        mine = (batch["member"] == i) * weights
        figures[f"loss_{name}"] = torch.stack([(mine * nll).sum(), mine.sum()])           # a sum and its weight
    return figures["token_loss"], figures


def mtp_loss(model, batch, knobs, tok):
    """The ordinary loss plus mtp_weight times the other horizons': their sum (Gloeckle) or their mean (DeepSeek-V3).

    All horizons go through one call of the unembedding, a chunk at a time: memory does not grow with them."""
    n = model.config.n_future
    extra = knobs.mtp_weight
    if extra is None:
        extra = 1.0 if model.config.mtp_heads == "parallel" else 0.3
    if model.config.mtp_heads == "chain":
        extra /= max(n - 1, 1)
    hidden = torch.cat(_read(model, batch))                                     # (n N, C)
    weights, targets = torch.cat([batch["weights"] * (extra if k else 1) for k in range(n)]), batch["targets"].T.flatten()
    total, nll = linear_cross_entropy(hidden, model.unembedding, targets, weights)
    each = (nll.view(n, -1) * batch["weights"]).sum(1) / batch["denom"]
    return total / batch["denom"], {"token_loss": each[0]} | {f"loss_{k + 1}": each[k] for k in range(n)}


def diffusion_loss(model, batch, knobs, tok):
    """Σ masked cross entropy / p over B·T, a bound on the nats per token; [MASK] itself can never be predicted."""
    loss, _ = token_loss(model, batch, knobs, tok, banned=tok.MASK)
    loss = loss * batch["denom"] / batch["inputs"].numel()
    return loss, {"token_loss": loss}


def electra_loss(model, batch, knobs, tok):
    """ELECTRA (Clark et al. 2020): a generator does mlm, its samples fill the row, the model says which were replaced.

        abcdefgh, d and g asked, the generator says d and x -> reads abcdefxh, replaced 00000010
    """
    mask = _mask(model, batch)
    hidden = model.generate_hidden(batch["inputs"], mask).flatten(0, 1)[batch["index"]]
    total, nll = linear_cross_entropy(hidden, model.embed_tokens.weight, batch["targets"], batch["weights"])
    generator_loss = total / batch["denom"]
    with torch.no_grad():                                                       # samples, temperature 1: no gradient
        logits = F.linear(hidden, model.embed_tokens.weight).float()
        logits[:, tok.n_ordinary:] = -torch.inf
        sample = (logits.softmax(-1).cumsum(-1) <= batch["dice"][:, None]).sum(-1).clamp(max=tok.n_ordinary - 1)
        ids = F.pad(batch["inputs"].flatten().long(), (0, 1))                   # the padding of `index` writes to one place more
        at = torch.where(batch["weights"] > 0, batch["index"], len(ids) - 1)
        original, filled = ids.scatter(0, at, batch["targets"])[:-1], ids.scatter(0, at, sample)[:-1]
        replaced = (filled != original).float()                                 # a correct guess counts as original
        real = (original != tok.PAD).float()
    h = model(filled.view_as(batch["inputs"]), mask)[0]
    guess = model.detect_head(h).flatten().float()
    bce = F.binary_cross_entropy_with_logits(guess, replaced, reduction="none")
    detect_loss = (bce * real).sum() / real.sum()
    accuracy = (((guess > 0) == (replaced > 0)) * real).sum() / real.sum()
    return generator_loss + knobs.rtd_weight * detect_loss, {
        "token_loss": generator_loss, "detect_loss": detect_loss, "detect_accuracy": accuracy, "replaced": (replaced * real).sum() / real.sum()}


def pair_loss(model, batch, knobs, tok):
    """mlm plus binary cross entropy of the pair's label, read from [CLS]."""
    h = model(batch["inputs"], _mask(model, batch))[0]
    total, _ = linear_cross_entropy(h.flatten(0, 1)[batch["index"]], model.unembedding, batch["targets"], batch["weights"])
    mlm_loss = total / batch["denom"]
    guess = model.pair_head(h[:, 0]).squeeze(-1).float()
    loss = F.binary_cross_entropy_with_logits(guess, batch["label"].float())
    accuracy = ((guess > 0) == (batch["label"] > 0)).float().mean()
    return mlm_loss + loss, {"token_loss": mlm_loss, "pair_loss": loss, "pair_accuracy": accuracy}


def embed(model, ids, mask, segment, n: int):
    """(B, T) ids in n segments a row -> (B, n, C) of length 1: the mean over each segment's positions."""
    h = model(ids, mask)[0].float()                                             # (B, T, C)
    member = torch.stack([segment == i + 1 for i in range(n)], dim=1).float()   # (B, n, T)
    with torch.autocast(h.device.type, enabled=False):
        return F.normalize(member @ h / member.sum(-1, keepdim=True).clamp(min=1), dim=-1)


def info_nce(a, b):
    """(B, C), (B, C) of length 1 -> loss and retrieval accuracy: a[i] belongs to b[i], the others are negatives."""
    score = a @ b.T / TEMPERATURE
    here = torch.arange(len(a), device=a.device)
    return (F.cross_entropy(score, here) + F.cross_entropy(score.T, here)) / 2, (score.argmax(1) == here).float().mean()


def contrastive_loss(model, batch, knobs, tok):
    """Cosine / 0.05, cross entropy in both directions; chance is ln(rows)."""
    if model.training and len(batch["inputs"]) < 2:
        raise UserError("contrastive needs negatives: 2 rows in each part of --grad_accum on each process; raise --batch_size")
    both = embed(model, batch["inputs"], _mask(model, batch), batch["segment"], 2)
    with torch.autocast(both.device.type, enabled=False):
        loss, accuracy = info_nce(both[:, 0], both[:, 1])
    return loss, {"retrieval_accuracy": accuracy}


# ---- the table ------------------------------------------------------------------------------------------------------

class Objective(NamedTuple):
    """A row of the table. `raw(text, rng, T, tok, knobs)` draws the raw tokens that `corrupt` makes into rows of T; `heads`
    turns knobs into fields of ModelConfig; `sample` are the read-outs of sample.py it serves, the usual one first."""
    corrupt: Callable
    raw: Callable
    loss: Callable
    heads: Callable
    attention: str
    sample: tuple
    knobs: tuple


def windows(more):  return lambda text, rng, T, tok, knobs: text.stream(rng, T + more)
def horizons(text, rng, T, tok, knobs):  return text.stream(rng, T + knobs.n_future)
def two_docs(text, rng, T, tok, knobs):  return text.inside(rng, T - 3, tok.PAD, n=2, other=True)
def one_doc(text, rng, T, tok, knobs):   return text.inside(rng, T - 3, tok.PAD)
def crops(text, rng, T, tok, knobs):     return text.inside(rng, T // 2, tok.PAD, n=2)


def no_head(knobs): return {}
def pair(knobs):    return {"pair_head": True}
def detect(knobs):  return {"detect_head": True, "generator_frac": knobs.generator_frac}
def future(knobs):  return {"n_future": knobs.n_future, "mtp_heads": knobs.mtp_heads}


OBJECTIVES = {name: Objective(*row) for name, *row in (
    # name           corrupt      raw         loss              heads    attention  sample                        knobs
    ("clm",          clm,         windows(1), token_loss,       no_head, "causal", ("continue",),                ("doc_mask",)),
    ("prefix",       prefix,      windows(1), token_loss,       no_head, "prefix", ("continue_prefix",),         ("prefix_frac",)),
    ("fim",          fim,         windows(1), token_loss,       no_head, "causal", ("middle", "continue"),       ("fim_rate", "fim_layouts")),
    ("mtp",          mtp,         horizons,   mtp_loss,         future,  "causal", ("continue",),                ("n_future", "mtp_heads", "mtp_weight")),
    ("span",         span,        windows(0), token_loss,       no_head, "prefix", ("gaps",),                    ("corruption_rate", "mean_span")),
    ("ul2",          ul2,         windows(0), token_loss,       no_head, "prefix", ("gaps_ul2", "continue_ul2"), ()),
    ("bart",         bart,        windows(0), token_loss,       no_head, "prefix", ("restore",),                 ("bart_noise",)),
    ("mlm",          mlm,         windows(0), token_loss,       no_head, "full",   ("fill",),                    ("mask_rate",)),
    ("nsp",          nsp,         two_docs,   pair_loss,        pair,    "full",   ("pair", "fill"),             ("mask_rate",)),
    ("sop",          sop,         one_doc,    pair_loss,        pair,    "full",   ("pair", "fill"),             ("mask_rate",)),
    ("electra",      electra,     windows(0), electra_loss,     detect,  "full",   ("detect", "fill"),           ("mask_rate", "rtd_weight", "generator_frac")),
    ("diffusion",    diffusion,   windows(0), diffusion_loss,   no_head, "full",   ("unmask",),                  ()),
    ("contrastive",  contrastive, crops,      contrastive_loss, no_head, "full",   ("similarity",),              ()),
)}


# ---- mixtures, checks, batches --------------------------------------------------------------------------------------

def parse_mixture(spec: str) -> dict[str, float]:
    """"fim" -> {"fim": 1.0}; "clm:0.5,ul2:0.5" -> shares that add up to 1. Raises UserError."""
    shares = {}
    for part in spec.split(","):
        name, _, weight = part.strip().partition(":")
        if name not in OBJECTIVES:
            near = difflib.get_close_matches(name, OBJECTIVES, 1, 0)[0]
            raise UserError(f"--objective={spec}: there is no {name!r}; did you mean {near}? ({', '.join(OBJECTIVES)})")
        try:
            shares[name] = shares.get(name, 0) + float(weight or 1)
        except ValueError:
            raise UserError(f"--objective={spec}: {weight!r} is not a weight; write e.g. clm:0.5,ul2:0.5") from None
        if not 0 < shares[name] < float("inf"):
            raise UserError(f"--objective={spec}: the weight of {name} must be positive")
    if len(shares) > 1 and (alone := [n for n in shares if OBJECTIVES[n].loss is not token_loss]):
        able = [n for n, o in OBJECTIVES.items() if o.loss is token_loss]
        raise UserError(f"--objective={spec}: {alone[0]} has a loss of its own and cannot be mixed; these can: {', '.join(able)}")
    return {name: w / sum(shares.values()) for name, w in shares.items()}


def check_knobs(mixture: dict[str, float], knobs: Knobs, given, T: int) -> None:
    """Raise UserError on a knob that no member reads, or a value that makes no row of T positions."""
    def need(ok: bool, name: str, what: str):
        if not ok:
            raise UserError(f"--{name}={getattr(knobs, name, T)}: {what}")

    read = {k for name in mixture for k in OBJECTIVES[name].knobs}
    for name in (f.name for f in fields(Knobs)):
        if name in given and name not in read:
            users = [o for o, row in OBJECTIVES.items() if name in row.knobs]
            raise UserError(f"--{name} is not read by {'+'.join(mixture)}; it belongs to {', '.join(users)}: remove it or change --objective")
    check_values(knobs)
    need(T >= 8, "block_size", "a row needs at least 8 positions")
    need("corruption_rate" not in read or knobs.corruption_rate / knobs.mean_span <= 1 - knobs.corruption_rate, "corruption_rate",
         f"too high for --mean_span={knobs.mean_span}: spans need a clean token between them; lower it or raise --mean_span")
    for name, legal in (("fim_layouts", FIM_LAYOUTS), ("bart_noise", BART_NOISE)):
        chosen = getattr(knobs, name).split(",")
        need(set(chosen) <= set(legal) and len(set(chosen)) == len(chosen), name, f"must be a comma list from {', '.join(legal)}")
    shapes = [(knobs.corruption_rate, knobs.mean_span, "raise --mean_span, lower --corruption_rate or --block_size")] if "span" in mixture else []
    shapes += [(s[1], s[0], "edit the table UL2 or lower --block_size") for _, _, s in UL2 if s] if "ul2" in mixture else []
    for rate, mean, remedy in shapes:
        sizes = _span_sizes(T, rate, mean)
        spans = int(span_counts(max(int((sizes <= T + 1).sum()) - 1, 1), rate, mean)[1])
        if spans > N_SENTINELS:
            raise UserError(f"--block_size={T}: {spans} spans a row but only {N_SENTINELS} sentinels; {remedy}")


def check_text(mixture: dict[str, float], text: Text, T: int, knobs: Knobs, tok: Tokenizer) -> None:
    """Raise UserError where the training text cannot make one row."""
    for name in mixture:
        need = OBJECTIVES[name].raw(text, Rng(0, 0, 0, [0]), T, tok, knobs).shape[-1]
        if OBJECTIVES[name].raw is crops and len(text.starts) < 2:
            raise UserError(f"{name} needs at least two documents and this text has one; separate documents by a line <|endoftext|>, or use a folder")
        if len(text) < need:
            raise UserError(f"the training text has {len(text)} tokens and one row needs {need}; give more text or lower --block_size")


def make_rows(mixture: dict[str, float], text: Text, rng: Rng, tok: Tokenizer, T: int, knobs: Knobs) -> dict[str, np.ndarray]:
    """The rows `rng` stands for: each draws its objective, then its raw tokens, then their corruption."""
    names, shares = list(mixture), np.cumsum(list(mixture.values()))
    member = np.minimum(np.searchsorted(shares, rng.random(1)[:, 0], side="right"), len(names) - 1)
    out = {}
    for i, name in enumerate(names):
        those = np.flatnonzero(member == i)
        if len(those) == 0:
            continue
        row, part = OBJECTIVES[name], rng[those] if len(names) > 1 else rng
        made = row.corrupt(row.raw(text, part, T, tok, knobs), part, tok, T, knobs)
        if len(names) == 1:
            return made
        width = made["source"].shape[1]                              # members read raw windows of their own lengths
        made["source"] = np.pad(made["source"], ((0, 0), (0, T + 1 - width)), constant_values=-1)
        put(out, those, made, len(rng))
    return out | {"member": member}


if __name__ == "__main__":
    import view
    cli(view.main)
