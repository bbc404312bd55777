"""objectives.py: what the model is asked: a function per objective, its loss, the table OBJECTIVES.

An objective's function takes ONE example and returns one data.Row of T positions: what is read,
what must be predicted, and who sees whom (model.may_attend). Its arguments:

    x      the example: for most objectives a 1-D array of token ids, from a function in the section
           "examples", which the table OBJECTIVES names in its first column
    rng    NumPy's random generator, from which the function draws all of its random numbers
    tok    the tokenizer: ids below tok.n_ordinary are text; tok.EOT ends a document (and a source,
           a target, a fim middle); tok.MASK, ... are special; tok.sentinel + k is <extra_id_k>
    T      the number of positions of a row (--block_size)
    knobs  the flags that objectives read

There are no encoder-decoder models. A sequence-to-sequence objective is one row
`[source EOT][target]` whose source is read both ways (bidirectionally): the "prefix LM" in the T5
paper's own comparison. To see one: `python view.py span`.

A window (adjacent tokens of the text) may cross the ends of documents. Attention crosses them too
everywhere, as in GPT-3 and in RoBERTa's FULL-SENTENCES, but for clm with doc_mask. In span, ul2 and
bart each document's piece is its own segment, in contrastive each crop. In nsp and sop a row holds
two texts that see each other.

In worked examples tokens are characters, `_` is IGNORE, `$` is EOT, `#` is [MASK]; span, ul2 and
bart show `source$target$`; `-` and `=` are private groups. T is large enough, and the rest of the
row is not shown. In shapes, B counts rows, N positions with a target, C channels, and V ids in the
vocabulary. `Differs:` lists what a paper or its code does otherwise.
"""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import regex
import torch
from numpy.random import Generator
from torch import Tensor
from torch.nn import functional as F

from data import IGNORE, Batch, Row, Source, Text, make_row
from model import ModelConfig, Transformer
from tokenizer import N_SENTINELS, Tokenizer
from util import UserError, comma_list, flag

SHARE = {"above": 0, "below": 1}  # the interval of a knob: 0 < value < 1


@dataclasses.dataclass
class Knobs:
    """each is read by some objectives only; giving it to another is an error"""

    mask_rate: float = flag(0.15, "mlm, mntp, nsp, sop, electra: share of tokens masked", **SHARE)
    corruption_rate: float = flag(0.15, "span: mean share of tokens in spans", **SHARE)
    mean_span: float = flag(3.0, "span: mean length of a span, in tokens", min=1)
    prefix_frac: float | None = flag(
        None, "prefix: share of the row read both ways; automatic: uniformly random", **SHARE
    )
    fim_rate: float = flag(0.9, "fim: probability that a piece is transformed", min=0, max=1)
    fim_layouts: str = flag(
        "psm,spm", "fim: comma list of psm, spm, spm2 (variant 2), drawn evenly"
    )
    fim_cuts: str = flag("characters", "fim: a text is cut between these", ("characters", "tokens"))
    bart_noise: str = flag("infill,permute", "bart: comma list of permute, delete, infill, rotate")
    n_future: int = flag(4, "mtp: tokens predicted at each position", min=1, max=64)
    mtp_heads: str = flag(
        "linear", "mtp: kind of the heads beyond the first", ("linear", "parallel", "chain")
    )
    mtp_weight: float | None = None  # mtp: weight of the extra heads' loss; None: see mtp_loss
    generator_frac: float = 0.25  # electra: the generator's width, as a share of the model's
    rtd_weight: float = 50.0  # electra: weight of the loss of replaced token detection
    doc_mask: bool = flag(False, "clm: attention stays inside a document")
    diffusion_block: int = flag(8, "block: tokens in a block; 1: like clm, T/2: diffusion", min=1)
    plm_rate: float = flag(1 / 6, "plm: share of tokens predicted one by one", above=0, max=1)
    context_weight: float = flag(1.0, "block: weight of clm's loss on the clean text", min=0)


# ---- examples: adjacent tokens of the text (window) or of one document (chunk) -------------------


def window(text: Text, rng: Generator, T: int, knobs: Knobs):
    return text.window(rng, T)


def window_and_next(text: Text, rng: Generator, T: int, knobs: Knobs):
    return text.window(rng, T + 1)


def window_and_future(text: Text, rng: Generator, T: int, knobs: Knobs):
    return text.window(rng, T + 1, ahead=knobs.n_future - 1)


def half_window_and_next(text: Text, rng: Generator, T: int, knobs: Knobs):
    return text.window(rng, T // 2 + 1)


def chunk(text: Text, rng: Generator, T: int, knobs: Knobs):
    return text.chunk(rng, T)


def long_chunk(text: Text, rng: Generator, T: int, knobs: Knobs):
    return text.chunk(rng, PAIR_CHUNK * (T - PAIR_MARKS))


def two_long_chunks(text: Text, rng: Generator, T: int, knobs: Knobs):
    return text.two_chunks(rng, PAIR_CHUNK * (T - PAIR_MARKS))


# ---- left to right -----------------------------------------------------------------------------


def clm(x: np.ndarray, rng: Generator, tok: Tokenizer, T: int, knobs: Knobs) -> Row:
    """Causal language modeling (Radford et al. 2018): each token from those before it.

    x: (T+1,) ids. With doc_mask, attention stays inside a document. An EOT is the last target of
    its document and the first input of the next.

        abcd -> inputs abc, targets bcd
        ab$cd, doc_mask -> inputs ab$c, targets b$cd, segment 1122
    """
    inputs = x[:-1]
    segment = 1 + np.cumsum(inputs == tok.EOT) if knobs.doc_mask else 1
    return make_row(inputs, x[1:], raw=x, segment=segment)


def prefix(x: np.ndarray, rng: Generator, tok: Tokenizer, T: int, knobs: Knobs) -> Row:
    """Prefix LM (Raffel et al. 2020, section 3.2): P tokens are read both ways, the rest is
    predicted.

    x: (T+1,) ids. P is prefix_frac · T if that is given, else uniform on 1 ... T-1. The last
    position of the prefix predicts the first token after it.

        abcdef, P = 3 -> inputs abcde, group 11100, targets __def

    Differs:
    - Liu et al. 2018, often cited for it, put input and output into one decoder
    """
    if knobs.prefix_frac is None:
        P = rng.integers(1, T)
    else:
        P = min(max(round(knobs.prefix_frac * T), 1), T - 1)
    position = np.arange(T)
    targets = np.where(position >= P - 1, x[1:], IGNORE)
    return make_row(x[:-1], targets, raw=x, group=position < P)


def mtp(x: np.ndarray, rng: Generator, tok: Tokenizer, T: int, knobs: Knobs) -> Row:
    """Multi-token prediction (Gloeckle et al. 2024): the next n tokens.

    x: (T+n,) ids. At position i the ordinary model predicts x[i+1], and the head
    model.future[k - 2] predicts x[i+k], for the horizons k = 2 ... n. A head is
    - parallel: a block (Gloeckle et al., section 2)
    - linear: a matrix (their appendix B); the default, because its drafts save the most time here
    - chain: a block (DeepSeek-V3, section 2.2) that also reads `extra`, the true x[i+k-1]

        abcde, n = 2 -> inputs abc, targets (b c) (c d) (d e), extra (b) (c) (d)

    Differs:
    - Gloeckle et al. use n = 4 for subwords, 8 for bytes, and weight 1 for each head
    - DeepSeek-V3 has n = 2, and the weight 0.3 falls to 0.1
    """
    horizons = range(1, knobs.n_future + 1)
    targets = np.stack([x[k : k + T] for k in horizons], axis=1)  # (T, n)
    return make_row(x[:T], targets, raw=x, extra=targets[:, :-1])


# fmt: off
# Bavarian et al. 2022
FIM_LAYOUTS = {
    "psm":  ("PRE", "prefix", "SUF", "suffix", "MID"),
    "spm":  ("SUF", "suffix", "PRE", "prefix", "MID"),
    "spm2": ("PRE", "SUF", "suffix", "MID", "prefix"),
}
# fmt: on
FIM_MARKS = 4  # special tokens of a transformed piece: three marks and an EOT


def fim(x: np.ndarray, rng: Generator, tok: Tokenizer, T: int, knobs: Knobs) -> Row:
    """Fill in the middle (Bavarian et al. 2022): clm on a text whose middle was moved last.

    x: (T+1,) ids. Each piece of random_pieces that fits is transformed with probability fim_rate:
    "context level" in the paper. What no piece holds stays as it is, as in clm. Half of the pieces
    are cut between characters, and the three parts are tokenized separately; with fim_cuts=tokens a
    model never learns to fill a hole inside a token. Every token is predicted. An EOT ends the
    middle, not the document.

        abcdef, cuts 2 and 4 -> psm  <PRE>ab<SUF>ef<MID>cd$
                                spm  <SUF>ef<PRE>ab<MID>cd$
                                spm2 <PRE><SUF>ef<MID>abcd$

    Differs:
    - the paper mostly uses a rate of 0.5 and finds no cost up to 0.9, the rate of Code Llama
      (Rozière et al. 2023) and the default here
    - both papers cut a long text to exactly a row, and so cut off its end once it is transformed
    - in the paper all cuts are uniform, so few middles are a word or a line (cut_in_three)
    - Code Llama transforms whole documents only; both papers train psm together with spm2
    """
    layouts = knobs.fim_layouts.split(",")
    ids = []
    done = 0  # tokens of x that ids hold
    for piece in random_pieces(x, T, rng, tok.EOT):
        moved = piece.tolist()
        text = piece[piece != tok.EOT]
        if len(text) and rng.random() < knobs.fim_rate:
            layout = layouts[rng.integers(len(layouts))]
            before, middle, after = cut_in_three(text, rng, tok, knobs.fim_cuts)
            moved = [*fim_prompt(layout, tok, before, after), *middle, tok.EOT]
        if len(ids) + len(moved) > T + 1:
            break
        ids += moved
        done += len(piece)
    return row_of_moved(ids, x, done, tok, T)


def random_pieces(x: np.ndarray, T: int, rng: Generator, eot: int) -> list[np.ndarray]:
    """The window in pieces: each document with its EOT, and the last one, which the window cuts
    off, in pieces of random length, log-uniform from T/16 to T. If pieces were cut to fit a row,
    its end would tell where they end, and the model would learn nothing else."""
    cuts = [0, *(1 + np.flatnonzero(x == eot))]
    while cuts[-1] < len(x):
        cuts.append(cuts[-1] + math.ceil(T / 16 ** rng.random()))
    return np.split(x, cuts[1:-1])


def row_of_moved(ids: list[int], x: np.ndarray, done: int, tok: Tokenizer, T: int) -> Row:
    """A causal row of ids that hold the first `done` tokens of x, then of the rest of x as it is.
    Every token is predicted except sentinels."""
    room = T + 1 - len(ids)
    rest = x[done : done + room].tolist()
    row = np.array([*ids, *rest, *[tok.PAD] * (room - len(rest))], np.int32)
    inputs, next_ids = row[:-1], row[1:]
    predicted = (next_ids != tok.PAD) & (next_ids < tok.sentinel)
    targets = np.where(predicted, next_ids, IGNORE)
    raw = x[: done + len(rest)]
    return make_row(inputs, targets, raw=raw, segment=inputs != tok.PAD)  # 1: text, 0: padding


def cut_in_three(piece: np.ndarray, rng: Generator, tok: Tokenizer, cuts: str) -> list[list[int]]:
    """The ids of a piece's text before, in and after its middle. Half of the middles lie between
    two uniform cuts, as in the paper. Half are what people ask for, some whole tokens anywhere:
    their number is log-uniform."""
    text = tok.decode_bytes(piece)
    if rng.random() < 0.5:
        places = places_to_cut(piece, text, tok, cuts)
        i, j = np.sort(places[rng.integers(len(places), size=2)])
    else:
        places = places_to_cut(piece, text, tok, "tokens")
        n = min(int(len(places) ** rng.random()), len(places) - 1)
        first = rng.integers(len(places) - n)
        i, j = places[[first, first + n]]
    return [tok.encode(part) for part in (text[:i], text[i:j], text[j:])]


def places_to_cut(piece: np.ndarray, text: bytes, tok: Tokenizer, cuts: str) -> np.ndarray:
    """Byte offsets where a piece's text may be cut: between "characters", or only where a place
    between characters is also between "tokens".

    >>> from tokenizer import get_tokenizer
    >>> text = "aé!".encode()
    >>> places_to_cut(np.array([97, 0xC3, 0xA9, 33]), text, get_tokenizer("bytes"), "characters")
    array([0, 1, 3, 4])
    """
    begins = (np.frombuffer(text, np.uint8) & 0b1100_0000) != 0b1000_0000  # not inside a character
    begins = np.append(begins, True)  # the end, too
    if cuts == "characters":
        return np.flatnonzero(begins)
    places = np.append(0, np.cumsum(tok.n_bytes[piece]))
    return places[begins[places]]


def fim_prompt(layout: str, tok: Tokenizer, before: list[int], after: list[int]) -> list[int]:
    """What the model reads before it writes the middle.

    >>> from tokenizer import get_tokenizer
    >>> tok = get_tokenizer("bytes")
    >>> tok.decode(fim_prompt("spm", tok, [97, 98], [101]))
    '<SUF>e<PRE>ab<MID>'
    """
    texts = {"prefix": before, "suffix": after}
    ids = []
    for part in FIM_LAYOUTS[layout]:
        ids += texts[part] if part in texts else [getattr(tok, part)]
    return ids


def check_fim(T: int, knobs: Knobs) -> None:
    comma_list("fim_layouts", knobs.fim_layouts, FIM_LAYOUTS)


def cm3(x: np.ndarray, rng: Generator, tok: Tokenizer, T: int, knobs: Knobs) -> Row:
    """Causal masking (CM3, Aghajanyan et al. 2022): clm on a text whose spans were moved last.

    x: (T+1,) ids. From each piece of random_pieces that fits, Poisson(1) spans are moved, each to
    the end and after its sentinel; their ends are drawn uniformly between tokens. What no piece
    holds stays as it is. Every token but the sentinels is predicted, as in InCoder (Fried et al.
    2022). An EOT ends each span; the text before the moved spans has none, as in fim.

        abcdef -> ab<extra_id_0>ef<extra_id_0>cd$
                  <extra_id_0>bc<extra_id_1>f<extra_id_0>a$<extra_id_1>de$

    Differs:
    - CM3 moves at least one span and at most 16, InCoder at most 256, drawn again if any overlap
    - CM3's code keeps those of n² drawn spans that do not overlap, and predicts sentinels, too
    - both end the text and each span with marks of their own, and cut off a text that has become
      too long; InCoder asks with one more sentinel at the text's end
    """
    ids = []
    done = 0  # tokens of x that ids hold
    for piece in random_pieces(x, T, rng, tok.EOT):
        moved = piece.tolist()
        text = piece[piece != tok.EOT]
        n_gaps = rng.poisson(1)
        if len(text) and n_gaps:
            cuts = np.sort(rng.integers(len(text) + 1, size=2 * n_gaps))
            first, *parts = (part.tolist() for part in np.split(text, cuts))
            spans, clean = parts[::2], parts[1::2]
            moved = [*first, *marked_parts(clean, tok)]
            moved += marked_parts([[*span, tok.EOT] for span in spans], tok)
        if len(ids) + len(moved) > T + 1:
            break
        ids += moved
        done += len(piece)
    return row_of_moved(ids, x, done, tok, T)


def marked_parts(parts: list[list[int]], tok: Tokenizer) -> list[int]:
    """The parts' ids, each after its sentinel."""
    return [id for k, part in enumerate(parts) for id in (tok.sentinel + k, *part)]


# ---- both ways ---------------------------------------------------------------------------------


def mlm(x: np.ndarray, rng: Generator, tok: Tokenizer, T: int, knobs: Knobs) -> Row:
    """Masked language modeling (BERT, Devlin et al. 2019): tokens that were masked.

    x: (T,) ids. Exactly max(1, round(mask_rate · ordinary tokens)) tokens are targets. Each becomes
    [MASK] with probability 80%, a random token with 10%, or stays, because texts for fine-tuning
    have no [MASK]. Each step draws a new mask, as in RoBERTa (Liu et al. 2019).

        abcdefghij, 2 targets -> inputs abc#efghij, targets ___d___h__    (h stayed)

    Differs:
    - BERT has [CLS] and [SEP], counts them among the tokens, and a random token may be special
    - its unembedding is tied to its embedding, has a bias, and follows a dense layer, GELU, a norm
    """
    return mask_tokens(x, rng, tok, knobs.mask_rate, mask_share=0.8, random_share=0.1)


def mntp(x: np.ndarray, rng: Generator, tok: Tokenizer, T: int, knobs: Knobs) -> Row:
    """Masked next token prediction (LLM2Vec, BehnamGhader et al. 2024): mlm, with targets one
    position earlier.

    x: (T+1,) ids, all but the first masked as in mlm. With clm:0.5,mntp:0.5 this is GPT-BERT
    (Charpentier and Samuel 2024): one model that continues texts and fills masks.

        abcdefghijk, 2 targets -> inputs abc#efghij, targets __d___h___    (h stayed)

    Differs:
    - LLM2Vec trains a finished causal model so, by LoRA
    - GPT-BERT's code masks spans, at a rate from 0.3 to 0.15, and its documents do not see each
      other; its loss gives mntp 15/16 of the weight, where half of the rows get 13% here
    """
    row = mlm(x[1:], rng, tok, T, knobs)
    return row._replace(inputs=np.append(x[:1], row.inputs[:-1]), raw=x[:-1])


def mask_tokens(x, rng: Generator, tok: Tokenizer, rate, mask_share, random_share) -> Row:
    """A share `rate` of the ordinary tokens, at least one, are the targets. A share `mask_share` of
    these is replaced by [MASK], `random_share` by random ordinary tokens; the others stay."""
    ordinary = np.flatnonzero(x < tok.n_ordinary)
    chosen = rng.permutation(ordinary)[: max(1, round(rate * len(ordinary)))]
    fate = rng.random(len(chosen))

    inputs = x.copy()
    inputs[chosen[fate < mask_share]] = tok.MASK
    randomized = chosen[(fate >= mask_share) & (fate < mask_share + random_share)]
    inputs[randomized] = rng.integers(tok.n_ordinary, size=len(randomized))

    targets = np.full_like(x, IGNORE)
    targets[chosen] = x[chosen]
    return make_row(inputs, targets, raw=x, group=1, segment=x != tok.PAD)  # nsp, sop pad


def electra(x: np.ndarray, rng: Generator, tok: Tokenizer, T: int, knobs: Knobs) -> Row:
    """Replaced token detection (ELECTRA, Clark et al. 2020): which tokens did a small generator
    replace?

    x: (T,) ids. This is the generator's row: each target becomes [MASK] with probability 85%, or
    stays, and none is random, as in the reference code. electra_loss makes the detector's row: it
    samples the generator's tokens with `extra`, (T,) numbers in [0, 1).

    Differs:
    - the paper masks all targets, and calls the detector a discriminator
    - the reference code draws positions with replacement, and so masks a few less
    - the paper's generators have 1/4 or 1/3 of the width; ELECTRA-Large has a mask_rate of 0.25
    """
    row = mask_tokens(x, rng, tok, knobs.mask_rate, mask_share=0.85, random_share=0.0)
    return row._replace(extra=rng.random(len(x), dtype=np.float32))


DIFFUSION_EPS = 1e-3  # ε: the smallest probability that a token is masked


def diffusion(example, rng: Generator, tok: Tokenizer, T: int, knobs: Knobs) -> Row:
    """Masked diffusion (MDLM, Sahoo et al. 2024; LLaDA, Nie et al. 2025): masked tokens; each row
    draws its own mask rate.

    example: (T,) ids and t in [0, 1), about the row's mask rate. Each token, EOT included, is
    masked with probability p = (1-ε)t + ε, as in LLaDA, and its loss has weight 1/p, so that rows
    with few masks count as much as others.

        abcdefgh, p = 0.5 -> inputs a##d#f#h, targets _bc_e_g_, weights all 2

    Differs:
    - LLaDA also cuts 1% of its batches to a random length
    """
    x, t = example
    inputs, targets, weights = noised(x, t, rng, tok)
    return make_row(inputs, targets, raw=x, group=1, weights=weights, scored=x)


def noised(ids: np.ndarray, t, rng: Generator, tok: Tokenizer) -> tuple:
    """Mask each id with probability p = (1-ε)t + ε; t is a number, or one for each id -> inputs,
    targets and weights 1/p."""
    p = (1 - DIFFUSION_EPS) * t + DIFFUSION_EPS
    masked = rng.random(len(ids)) < p
    return np.where(masked, tok.MASK, ids), np.where(masked, ids, IGNORE), 1 / p


def block(example, rng: Generator, tok: Tokenizer, T: int, knobs: Knobs) -> Row:
    """Block diffusion (BD3-LM, Arriola et al. 2025): masked tokens of a block, from it and the text
    before it.

    example: (T/2 + 1,) ids and t, as in diffusion; a block has L = diffusion_block tokens. All
    blocks of the text are asked at once. Each is there twice: noisy, a private group, then clean,
    read from left to right; both have the text's places. So a noisy block sees itself and the clean
    text before it. Its t is drawn evenly over the batch's blocks. The clean text is predicted as in
    clm, with weight context_weight.

        abcde, L = 2 -> inputs a#abc#cd, targets _bbc_dde, place 01012323, group --00==00

    Differs:
    - the paper's code lays out all noisy blocks, then all clean ones, in 2T positions with a mask
      of their own: the same sums; there a clean block sees itself in both directions
    - it predicts no clean token, draws each t alone, and clips it to an interval of low variance
    - a last block that does not fit is left out
    """
    x, t = example
    L, n_blocks = block_sizes(T, knobs)
    text, following = x[: L * n_blocks], x[1 : L * n_blocks + 1]
    t_of_blocks = (rng.permutation(n_blocks) + t) / n_blocks
    noisy, targets, weights = noised(text, np.repeat(t_of_blocks, L), rng, tok)
    if not knobs.context_weight:
        following = np.full_like(text, IGNORE)
    group, place = groups_of_blocks(len(text), L)
    inputs, targets = by_turns(noisy, text, L), by_turns(targets, following, L)
    weights = by_turns(weights, np.ones_like(weights), L)
    laid = dict(raw=text, group=group, place=place, weights=weights, scored=text)
    return padded(make_row(inputs, targets, **laid), tok, T)


def block_sizes(T: int, knobs: Knobs) -> tuple[int, int]:
    """The tokens of a block, and how many blocks a row has."""
    L = min(knobs.diffusion_block, T // 2)
    return L, T // 2 // L


def groups_of_blocks(n: int, L: int) -> tuple[np.ndarray, np.ndarray]:
    """The groups and places of a row with n tokens of text in noisy and clean blocks of L."""
    private = -1 - np.arange(n) // L
    return by_turns(private, np.zeros(n, int), L), by_turns(np.arange(n), np.arange(n), L)


def by_turns(noisy: np.ndarray, clean: np.ndarray, L: int) -> np.ndarray:
    """(n,), (n,) -> (2n,): L of the first, L of the second, and so on. L divides n."""
    return np.stack([noisy.reshape(-1, L), clean.reshape(-1, L)], axis=1).ravel()


SPANS_OF_PLM = 1 / np.arange(1, 6)  # relative frequency of spans of 1 to 5 tokens, as in XLNet


def plm(x: np.ndarray, rng: Generator, tok: Tokenizer, T: int, knobs: Knobs) -> Row:
    """Permutation language modeling (XLNet, Yang et al. 2019): some tokens, one after another in
    random order.

    x: (T,) ids, of which n are read, so that m = plm_rate · n chosen ones fill the row. It holds
    the visible tokens, which see each other, then for each chosen one a private [MASK] in its
    place, which must predict it, and the token itself. So each is predicted from the visible text
    and the chosen tokens before it. These are XLNet's query and content streams. With plm_rate 1
    nothing is visible: any order (σ-GPT, Pannatier et al. 2024).

        abcdef, d before b -> inputs acef#d#b, targets ____d_b_, place 02453311, group 1111-0=0

    Differs:
    - XLNet carries states over from the segment before, and has relative positions
    - its spans are whole words, each in a stretch of six times its length; none is an EOT
    """
    n = math.ceil(T / (1 + knobs.plm_rate))
    m = T - n
    chosen = np.zeros(n, bool)
    lengths = 1 + rng.choice(5, size=m, p=SPANS_OF_PLM / SPANS_OF_PLM.sum())
    for start, length in zip(rng.integers(n, size=m), lengths):
        chosen[start : start + min(length, m - chosen.sum())] = True
    others = rng.permutation(np.flatnonzero(~chosen))
    chosen[others[: m - chosen.sum()]] = True  # as in XLNet, single tokens make up the number
    return permuted(x[:n], rng.permutation(np.flatnonzero(chosen)), tok)


def permuted(text: np.ndarray, order: np.ndarray, tok: Tokenizer) -> Row:
    """The row that asks for the tokens of a text at the places of `order`, one after another."""
    visible = np.setdiff1d(np.arange(len(text)), order)
    m = len(order)
    group, _ = groups_of_blocks(m, 1)
    masks, nothing = np.full(m, tok.MASK), np.full(m, IGNORE)
    return make_row(
        np.concatenate([text[visible], by_turns(masks, text[order], 1)]),
        np.concatenate([np.full(len(visible), IGNORE), by_turns(text[order], nothing, 1)]),
        raw=text,
        group=np.concatenate([np.ones(len(visible), int), group]),
        place=np.concatenate([visible, np.repeat(order, 2)]),
    )


CROP = (0.05, 0.5)  # shortest and longest crop, as shares of its chunk
TEMPERATURE = 0.05  # cosines are divided by it


def contrastive(chunk: np.ndarray, rng: Generator, tok: Tokenizer, T: int, knobs: Knobs) -> Row:
    """Contrastive (InfoNCE; Contriever, Izacard et al. 2022): which two crops are of one document?

    chunk: at most T ids of one document. Two crops of it, each 5% to 50% of its length, as in the
    paper, and placed independently, are a positive pair. The negatives of a first crop are the
    other rows' second crops, and vice versa. Two rows may be from one document, which is common if
    there are only a few hundred.

        chunk abcdef, crops abc and cde -> inputs abccde, segment 111222, nothing to predict

    Differs:
    - Contriever embeds second crops with a momentum encoder, and its negatives are a queue of them
    - it puts [CLS] and [SEP] around each crop and drops a tenth of a crop's tokens
    - it scores by a plain dot product, in one direction only, and begins with BERT's weights
    - its chunks are 256 tokens, perhaps of several documents
    """
    low, high = (max(1, int(share * len(chunk))) for share in CROP)
    crops = []
    for _ in range(2):
        n = rng.integers(low, high + 1)
        start = rng.integers(len(chunk) - n + 1)
        crops.append(chunk[start : start + n])

    ids = np.concatenate(crops)
    targets = np.full_like(ids, IGNORE)
    segment = np.repeat([1, 2], [*map(len, crops)])
    return padded(make_row(ids, targets, raw=chunk, group=1, segment=segment), tok, T)


# ---- two texts: nsp and sop --------------------------------------------------------------------

PAIR_MARKS = 3  # special tokens of a pair: [CLS] and two [SEP]
PAIR_CHUNK = 4  # length of a chunk to cut from, in rows; a shorter chunk is a whole document
PAIR_SHORT = 0.1  # share of the rows that hold less text than they could


def nsp(chunks, rng: Generator, tok: Tokenizer, T: int, knobs: Knobs) -> Row:
    """Next sentence prediction (BERT, Devlin et al. 2019): does B follow A, or is it from another
    document?

    chunks: two arrays of ids, from two documents or from the two halves of the only one. In half
    the rows B is the text after A, label 1, else it is from the other chunk, label 0. The MLM loss
    is added. Only content may tell the label: both possible Bs begin after the same kind of cut, at
    the same share of their chunks, and their length is drawn from what both chunks allow: nearly
    all of the shorter one, but not its last token, because B must not show where its document ends.
    A text without sentences and blanks is cut anywhere: letters next to the cut may tell its label.

        T = 12: ab. cd. ef. / uv. xy. z. -> [CLS]ab. cd.[SEP] e[SEP] label 1, or
                                            [CLS]ab. cd.[SEP] z[SEP] label 0

    Differs:
    - BERT's label is 0 if B follows, and its head has tanh where model.BinaryHead has GELU
    - its B begins at any sentence of any other document, and may reach that document's end
    - it shortens the longer text at a random end; here A loses its beginning, B its end
    - its short rows have any length; nobody can judge the shortest, and they delay learning
    """
    cuts = next(cuts for cuts in ways_to_cut(chunks, tok) if all(cuts))
    share = rng.random()
    cut, other_cut = (places[int(share * len(places))] for places in cuts)
    first, second, other = chunks[0][:cut], chunks[0][cut:], chunks[1][other_cut:]

    room = room_of_pair(rng, T)
    n = min(len(second), len(other))
    most = max(room - cut, rng.integers(max(room // 4, 1), 3 * room // 4 + 1))
    length = min(most, rng.integers(max(9 * n // 10, 1), max(n, 2)))
    follows = rng.random() < 0.5
    B = second if follows else other
    return pair_row(first[-(room - length) :], B[:length], follows, rng, tok, T, knobs)


def sop(chunk: np.ndarray, rng: Generator, tok: Tokenizer, T: int, knobs: Knobs) -> Row:
    """Sentence order prediction (ALBERT, Lan et al. 2020): are A and B in order, or swapped?

    chunk: ids of one document. A and B are adjacent runs of whole sentences that fill their room as
    far as whole sentences can; if no two fit, they are runs of words. In half the rows they are
    swapped, label 0. The MLM loss is added. Both begin and end at the same kind of cut. A text
    without sentences and blanks is cut anywhere: letters next to the cut may tell its label.

        ab. cd. ef. -> [CLS] cd.[SEP] ef.[SEP] label 1, or [CLS] ef.[SEP] cd.[SEP] label 0

    Differs:
    - ALBERT's label is 1 if they are swapped, and it masks up to 3 adjacent words
    - it cuts a pair that is too long at random ends, and its short rows have any length
    - of a chunk that is one sentence, it takes B from another document, as swapped
    """
    if len(chunk) < PAIR_CHUNK * (T - PAIR_MARKS):  # a whole document, whose ends are cuts, too
        chunk = np.concatenate([[tok.ranks[b"\n"]], chunk, [tok.ranks[b" "]]], dtype=np.int32)
    room = room_of_pair(rng, T)
    ways = (full_runs(bounds, room) for [bounds] in ways_to_cut([chunk], tok))
    runs = next(filter(None, ways))
    start, *cuts, end = runs[rng.integers(len(runs))]
    cut = cuts[rng.integers(len(cuts))]  # a choice by length would tell the order
    A, B = chunk[start:cut], chunk[cut:end]
    in_order = rng.random() < 0.5
    if not in_order:
        A, B = B, A
    return pair_row(A, B, in_order, rng, tok, T, knobs)


def room_of_pair(rng: Generator, T: int) -> int:
    """Tokens for A and B: all that fit, or in some rows a random half of these or more. If all rows
    held whole documents, sop would only learn which sentences begin and end these."""
    room = T - PAIR_MARKS
    return rng.integers(room // 2, room + 1) if rng.random() < PAIR_SHORT else room


def ways_to_cut(chunks, tok: Tokenizer) -> Iterator[list]:
    """The kinds of places to cut at, the best first, each as a list of places for every chunk: ends
    of lines or ends of sentences inside lines, whichever are more; ends of words; all places. The
    cuts of a row are all of one kind, because B shows its own: inside a line it has a blank first.
    """
    ends = [sentence_ends(chunk, tok) for chunk in chunks]
    lines = [
        [end for end in places if b"\n" in tok.bytes[chunk[end - 1]]]
        for chunk, places in zip(chunks, ends)
    ]
    inside = [sorted({*places} - {*excluded}) for places, excluded in zip(ends, lines)]
    yield from sorted([inside, lines], key=lambda cuts: -min(map(len, cuts)))
    yield [word_ends(chunk, tok) for chunk in chunks]
    yield [range(1, len(chunk)) for chunk in chunks]


def full_runs(bounds, room: int) -> list:
    """All runs of three bounds or more that fit into `room`, but with no bound more on a side.

    >>> full_runs([1, 3, 4, 6, 9], room=5)
    [[1, 3, 4, 6], [4, 6, 9]]
    """
    first = {}  # for each number of bounds that fit, the first of these from which they do
    for i, start in enumerate(bounds):
        first.setdefault(bisect.bisect_right(bounds, start + room), i)
    return [bounds[i:stop] for stop, i in first.items() if stop - i >= 3]


def pair_row(A, B, label: bool, rng: Generator, tok: Tokenizer, T: int, knobs: Knobs) -> Row:
    """[CLS]A[SEP]B[SEP], padded, with mlm's masks; `extra` is the label. As in BERT, a learned
    vector (model.second_text) tells B from A."""
    pair = pair_ids(A, B, tok)
    ids = np.full(T, tok.PAD, np.int32)
    ids[: len(pair)] = pair
    row = mlm(ids, rng, tok, T, knobs)
    return row._replace(raw=np.concatenate([A, B]), extra=np.int64(label))


def pair_ids(A, B, tok: Tokenizer) -> np.ndarray:
    """[CLS]A[SEP]B[SEP], int32: PAIR_MARKS tokens more than A and B."""
    return np.concatenate([[tok.CLS], A, [tok.SEP], B, [tok.SEP]]).astype(np.int32)


# A sentence ends after ., ! or ? if a space or a tab follows, which belongs to the next sentence;
# after the same and closing quotes or brackets, unless a small letter goes on: "Why?" she asked;
# after the last newline of a run; and after another script's mark, with those that close it.
SENTENCE_END = regex.compile(
    r"""[.!?](?=[ \t])|[.!?][\p{Pe}\p{Pf}\p{Pi}"']+(?=[ \t]+\P{Ll})|\n(?!\n)"""
    r"""|(?![.!?])\p{Sentence_Terminal}[\p{Sentence_Terminal}\p{Pe}\p{Pf}"']*+(?![\r\n])"""
)


def sentence_ends(ids, tok: Tokenizer) -> list[int]:
    """The numbers of tokens after which a sentence has ended, in order, without all of them.

    A blank in the same token, as in ". ", stays with its sentence. If anything else follows in the
    same token, there is no place to cut.

    >>> from tokenizer import get_tokenizer
    >>> tok = get_tokenizer("bytes")
    >>> sentence_ends(tok.encode("end.\\n  Next 3.5? Yes."), tok)
    [5, 16]
    """
    pieces = [tok.bytes[id] for id in np.asarray(ids).tolist()]
    raw = b"".join(pieces)
    text = raw.decode("utf-8", "surrogateescape")
    offsets = list(itertools.accumulate(map(len, pieces), initial=0))  # the byte of each place
    places = set()
    start = end = 0  # a sentence's first character, the byte where it ends
    for found in SENTENCE_END.finditer(text):
        end += len(text[start : found.end()].encode("utf-8", "surrogateescape"))
        start = found.end()
        place = bisect.bisect_left(offsets, end)
        if not raw[end : offsets[place]].strip(b" \t"):
            places.add(place)
    return sorted(places - {len(pieces)})


def word_ends(ids, tok: Tokenizer) -> list[int]:
    """The places after a word and before the white space that follows it."""
    pairs = itertools.pairwise(tok.bytes[id] for id in ids)
    return [i for i, (a, b) in enumerate(pairs, 1) if b[:1].isspace() and not a[-1:].isspace()]


# ---- laying out --------------------------------------------------------------------------------


def padded(row: Row, tok: Tokenizer, T: int) -> Row:
    """A shorter row, filled up to T positions."""
    fill = dict(inputs=tok.PAD, targets=IGNORE, weights=1, segment=0, group=0)
    n = len(row.inputs)
    arrays = {k: np.pad(getattr(row, k), (0, T - n), constant_values=fill[k]) for k in fill}
    return row._replace(**arrays, place=np.append(row.place, np.arange(n, T)))


def pack(pieces: list, pairs: list, tok: Tokenizer, T: int) -> Row:
    """Lay out pairs of source and target, `[source EOT][target]`, each a segment of its own.

    The source and its EOT, which predicts the target's first token, are read both ways. The last
    token of the target is predicted but never read. `pieces` are the original texts, for Row.raw.

        source ab, target cd$ -> inputs ab$cd, targets __cd$, group 11100
    """
    inputs = np.full(T, tok.PAD, np.int32)
    targets = np.full(T, IGNORE, np.int32)
    segment = np.zeros(T, np.int32)
    group = np.zeros(T, np.int32)
    start = 0
    for number, (source, target) in enumerate(pairs, 1):
        middle = start + len(source)
        end = middle + len(target)
        assert end <= T, f"size() of pieces_that_fit is too small: {end} positions of {T}"
        inputs[start:middle] = source
        inputs[middle] = tok.EOT
        inputs[middle + 1 : end] = target[:-1]
        targets[middle:end] = target
        segment[start:end] = number
        group[start : middle + 1] = 1
        start = end
    raw = join_documents(pieces, tok.EOT)
    return make_row(inputs, targets, raw=raw, group=group, segment=segment)


def pieces_that_fit(x, rng: Generator, tok: Tokenizer, T: int, size: Callable) -> tuple[list, list]:
    """Cut documents into pieces of two tokens or more, whose segments fit into T positions.
    `size(n)` is the most positions that a segment made from n tokens can take. A document that does
    not fit becomes pieces of random length: if all filled their rows, a question about a shorter
    text would be new to the model. Returns the pieces, and for each whether it reaches its
    document's end (the window may cut the last).

    Many windows begin where a document does. If that one does not fit, half of the rows begin
    anywhere in it: else its end would seldom be read."""
    pieces = []
    reaches_end = []
    room = T
    *documents, cut_by_window = split_documents(x, tok.EOT)
    for i, document in enumerate([*documents, cut_by_window]):
        start = 0
        is_long = document is not cut_by_window and size(len(document)) > T
        if i == 0 and is_long and rng.random() < 0.5:
            start = rng.integers(len(document) - 1)
        while len(document) - start >= 2:
            n = len(document) - start
            most = most_tokens(room, size)
            if n > most:
                if most < max(T // 8, 2):
                    break  # a shorter document may still fit
                n = rng.integers(max(T // 16, 2), most + 1)
            pieces.append(document[start : start + n])
            start += n
            reaches_end.append(start == len(document) and document is not cut_by_window)
            room -= size(n)
    return pieces, reaches_end


def most_tokens(room: int, size: Callable) -> int:
    """The largest n with size(n) <= room. Since size never decreases, it is how many n fit."""
    return bisect.bisect_right(range(1, room + 1), room, key=size)


def split_documents(x: np.ndarray, eot: int) -> list[np.ndarray]:
    """The documents, which the EOTs separate; some may be empty.

    >>> split_documents(np.array([1, 2, 0, 3, 0]), eot=0)
    [array([1, 2]), array([3]), array([], dtype=int64)]
    """
    parts = np.split(x, np.flatnonzero(x == eot))  # each part but the first begins with an EOT
    return [part[part != eot] for part in parts]


def join_documents(pieces: list[np.ndarray], eot: int) -> np.ndarray:
    """The pieces, with an EOT between them."""
    parts = [np.append(piece, eot) for piece in pieces]
    return np.concatenate([[], *parts])[:-1].astype(np.int32)  # [] where there is no piece


# ---- source to target --------------------------------------------------------------------------


def span(x: np.ndarray, rng: Generator, tok: Tokenizer, T: int, knobs: Knobs) -> Row:
    """Span corruption (T5, Raffel et al. 2020): drop spans, predict them after their sentinels.

    x: (T,) ids; each piece of pieces_that_fit becomes a segment. A target ends with EOT. A row's
    rate is uniform around corruption_rate, here from 0 to 0.6. With rate 0.3 and mean 1.5:

        abcdefghij -> abc<extra_id_0>fgh<extra_id_1>j$<extra_id_0>de<extra_id_1>i$

    Differs:
    - T5 has one rate: then the length of the text that is left tells how much is missing, and the
      model writes that much into any gap
    - T5 joins documents without a mark, and its spans may cross from one to the next
    - in the paper's figure a target ends with one more sentinel
    - by default, T5's code begins with clean text and ends with noise, so that a single span is
      always the text's end; here all arrangements are equally likely
    """
    spans = dict(rate=row_rate(knobs.corruption_rate, rng), mean=knobs.mean_span)
    pieces, _ = pieces_that_fit(x, rng, tok, T, lambda n: span_size(n, **spans))
    pairs = [corrupt_spans(piece, rng, tok, **spans) for piece in pieces]
    return pack(pieces, pairs, tok, T)


def row_rate(rate: float, rng: Generator) -> float:
    """A row's own rate: uniform around `rate`, as far as 0 or 1."""
    return rate + min(rate, 1 - rate) * (2 * rng.random() - 1)


def span_counts(n: int, rate: float, mean: float) -> tuple[int, int]:
    """n raw tokens -> how many are noise, and in how many spans; clean tokens separate these."""
    n_noise = min(max(round(rate * n), 1), n - 1)
    n_spans = min(max(round(n_noise / mean), 1), n - n_noise + 1, N_SENTINELS)
    return n_noise, n_spans


def span_size(n: int, rate: float, mean: float) -> int:
    """Positions of a segment of n raw tokens: these, each sentinel twice, and the source's EOT."""
    _, n_spans = span_counts(n, rate, mean)
    return n + 2 * n_spans + 1


def corrupt_spans(piece: np.ndarray, rng: Generator, tok: Tokenizer, rate: float, mean: float):
    """Raw ids -> source: clean text, <extra_id_k> for span k; target: <extra_id_k> span k ... EOT.

    All arrangements are equally likely, so the first and the last token are masked less often than
    the rate says: with 64 tokens, rate 0.15 and mean 3, in 5% of the draws."""
    n_noise, n_spans = span_counts(len(piece), rate, mean)
    lengths = composition(n_noise, n_spans, rng)
    # The outer two gaps may be empty: draw positive ones from a total larger by 2, then subtract 1.
    gaps = composition(len(piece) - n_noise + 2, n_spans + 1, rng)
    gaps[0] -= 1
    gaps[-1] -= 1

    text = piece.tolist()
    source, target = [], []
    start = 0
    for k, (gap, length) in enumerate(zip(gaps[:-1], lengths)):
        hole = start + gap
        source += [*text[start:hole], tok.sentinel + k]
        target += [tok.sentinel + k, *text[hole : hole + length]]
        start = hole + length
    source += text[start:]
    target.append(tok.EOT)
    return source, target


def composition(total: int, parts: int, rng: Generator) -> list[int]:
    """`parts` positive integers that add up to `total`, every choice of them equally likely: it
    cuts at parts - 1 of the total - 1 places between units."""
    cuts = 1 + rng.permutation(total - 1)[: parts - 1]
    bounds = sorted([0, *cuts.tolist(), total])
    return [stop - start for start, stop in itertools.pairwise(bounds)]


# fmt: off
# UL2's denoisers: mode token, share of the rows, spans (None: the text's suffix). Edit them here.
# Rates are means and lengths are drawn, as for `span`. With mean 64, texts of less than 320 tokens
# (rate 0.15) or 96 (rate 0.5) always have a single span, of any length.
UL2 = (
    ("R", 0.2500, dict(rate=0.15, mean=3)),
    ("R", 0.2500, dict(rate=0.15, mean=8)),
    ("S", 0.2500, None),
    ("X", 0.0625, dict(rate=0.50, mean=3)),
    ("X", 0.0625, dict(rate=0.50, mean=8)),
    ("X", 0.0625, dict(rate=0.15, mean=64)),
    ("X", 0.0625, dict(rate=0.50, mean=64)),
)
# fmt: on


def ul2(x: np.ndarray, rng: Generator, tok: Tokenizer, T: int, knobs: Knobs) -> Row:
    """UL2 (Tay et al. 2022): a mode token, then one of several denoisers.

    x: (T,) ids. One denoiser is drawn for the row, with a rate of its own as in span, and each
    piece becomes a segment.

        abcdefgh$z -> [R]ab<extra_id_0>defgh$<extra_id_0>c$ or [S]abc$defgh$ or
                      [X]ab<extra_id_0>gh$<extra_id_0>cdef$   (z alone is too short: left out)

    Differs:
    - mean lengths and rates are the paper's, the shares are not: its code draws all seven equally
      often by default
    - in its code, T5's function puts a single span at the text's end
    - [S] cuts at 3n/4 of n tokens in the paper's table, uniformly on [1, n-1] in its code
    """
    shares = np.array([share for _, share, _ in UL2])
    name, _, spans = UL2[rng.choice(len(UL2), p=shares / shares.sum())]
    mode = getattr(tok, name)
    if spans is None:
        pieces, reaches_end = pieces_that_fit(x, rng, tok, T, lambda n: n + 2)  # mode and EOT
        pairs = [split_suffix(piece, ends, rng, tok) for piece, ends in zip(pieces, reaches_end)]
    else:
        spans = dict(rate=row_rate(spans["rate"], rng), mean=spans["mean"])
        pieces, _ = pieces_that_fit(x, rng, tok, T, lambda n: span_size(n, **spans) + 1)
        pairs = [corrupt_spans(piece, rng, tok, **spans) for piece in pieces]
    pairs = [([mode, *source], target) for source, target in pairs]
    return pack(pieces, pairs, tok, T)


def split_suffix(piece: np.ndarray, reaches_end: bool, rng: Generator, tok: Tokenizer):
    """UL2's S-denoiser: the source is the first P of n tokens, with P uniform on [n/4, 3n/4], the
    target is the rest. It has an EOT only if the piece reaches the end of its document. If it
    always had one, the model would learn to stop anywhere."""
    n = len(piece)
    P = rng.integers(math.ceil(n / 4), 3 * n // 4 + 1)
    rest = [*piece[P:], tok.EOT] if reaches_end else piece[P:]
    return piece[:P], rest


def check_span(T: int, knobs: Knobs) -> None:
    remedy = "raise --mean_span, lower --corruption_rate or --block_size"
    check_sentinels(T, knobs.corruption_rate, knobs.mean_span, remedy)


def check_ul2(T: int, knobs: Knobs) -> None:
    for _, _, spans in UL2:
        if spans is not None:
            check_sentinels(T, **spans, remedy="edit the table UL2 or lower --block_size")


def check_sentinels(T: int, rate: float, mean: float, remedy: str) -> None:
    """Raise UserError if at this rate a row of T positions needs more sentinels than there are. (At
    the higher rate of a single row, its spans become longer.)"""
    n = most_tokens(T, lambda n: span_size(n, rate, mean))
    n_spans = round(rate * n / mean)
    if n_spans > N_SENTINELS:
        many = f"{n_spans} spans per row, but only {N_SENTINELS} sentinels"
        raise UserError(f"--block_size={T}: {many}; {remedy}")


BART_RATE = 0.3  # share of the tokens that are deleted, or covered by infilling
BART_MEAN_SPAN = 3  # mean of the Poisson lengths of infilled spans


def bart(x: np.ndarray, rng: Generator, tok: Tokenizer, T: int, knobs: Knobs) -> Row:
    """Denoising (BART, Lewis et al. 2020): the whole original from a noised text.

    x: (T,) ids; each document's piece becomes a segment. `bart_noise` chooses among the functions
    of BART_NOISE, which are applied in that table's order.

        "ab. cdef. gh" -> " gh#f.ab.$ab. cdef. gh$"    (permuted; then # for " cde")

    Differs:
    - the paper's fifth noise, token masking, is left out
    - in BART only full stops end a sentence
    - the paper gives no rate of deletion; infilling draws Poisson lengths, and in fairseq it hides
      whole words
    """
    chosen = knobs.bart_noise.split(",")
    noises = [noise for name, noise in BART_NOISE.items() if name in chosen]
    pieces, _ = pieces_that_fit(x, rng, tok, T, lambda n: bart_size(n, chosen))
    pairs = []
    for piece in pieces:
        source = piece
        for noise in noises:
            source = noise(source, rng, tok)
        pairs.append((source, [*piece, tok.EOT]))
    return pack(pieces, pairs, tok, T)


def permute(ids: np.ndarray, rng: Generator, tok: Tokenizer) -> np.ndarray:
    """The text's sentences in random order."""
    sentences = np.split(ids, sentence_ends(ids, tok))
    return np.concatenate([sentences[i] for i in rng.permutation(len(sentences))])


def rotate(ids: np.ndarray, rng: Generator, tok: Tokenizer) -> np.ndarray:
    """The text from a random token on, then the text before that token."""
    return np.roll(ids, -rng.integers(len(ids)))


def delete(ids: np.ndarray, rng: Generator, tok: Tokenizer) -> np.ndarray:
    """Remove BART_RATE of the tokens, without a mark in their place."""
    kept = len(ids) - round(BART_RATE * len(ids))
    return ids[np.sort(rng.permutation(len(ids))[:kept])]


def infill(ids: np.ndarray, rng: Generator, tok: Tokenizer) -> np.ndarray:
    """Text infilling: spans that cover exactly BART_RATE of the tokens are each replaced by one
    [MASK]; a span of length 0 inserts a [MASK]. Their number and sum are fixed; given both, Poisson
    lengths are multinomial."""
    n_noise, n_spans = infill_counts(len(ids))
    lengths = rng.multinomial(n_noise, np.full(n_spans, 1 / n_spans))
    # Gaps may be empty: draw positive ones from a larger total, then subtract 1.
    gaps = composition(len(ids) - n_noise + n_spans + 1, n_spans + 1, rng)
    text = ids.tolist()
    noisy = []
    start = 0
    for gap, length in zip(gaps[:-1], lengths.tolist()):
        hole = start + gap - 1
        noisy += [*text[start:hole], tok.MASK]
        start = hole + length
    return np.array([*noisy, *text[start:]])


BART_NOISE = {"permute": permute, "delete": delete, "infill": infill, "rotate": rotate}


def check_bart(T: int, knobs: Knobs) -> None:
    comma_list("bart_noise", knobs.bart_noise, BART_NOISE)


def infill_counts(n: int) -> tuple[int, int]:
    """n tokens -> how many of them infilling covers, and with how many spans."""
    n_noise = round(BART_RATE * n)
    n_spans = max(round(n_noise / BART_MEAN_SPAN), 1)
    return n_noise, n_spans


def bart_size(n: int, chosen: list[str]) -> int:
    """Positions of a segment of n raw tokens, whose source the noise may shorten."""
    source = n
    if "delete" in chosen:
        source -= round(BART_RATE * source)
    if "infill" in chosen:
        n_noise, n_spans = infill_counts(source)
        source += n_spans - n_noise
    return source + 1 + n


# ---- losses ------------------------------------------------------------------------------------


class Metric(NamedTuple):
    """A mean over a batch, kept as sum and divisor, so that both can be added up over batches. The
    loss is the sum of coefficient · sum / divisor; a metric with coefficient 0 is only logged.
    Losses of tokens are divided by batch.total_weight, in training the mean over all micro-batches
    of a step, so that their gradients add up to the whole batch's."""

    sum: Tensor
    divisor: Tensor
    coefficient: float = 0.0


Metrics = dict[str, Metric]  # by name


def total_loss(metrics: Metrics) -> Tensor:
    """What a step minimizes."""
    losses = [m for m in metrics.values() if m.coefficient]
    # The divisor is 0 in a batch without targets.
    return sum(m.coefficient * m.sum / m.divisor.clamp(min=1e-9) for m in losses)


def states_of(model: Transformer, batch: Batch) -> list[Tensor]:
    """What the model makes of a batch: one (B, T, C) for each horizon."""
    return model(batch.inputs, attention_mask(model, batch), batch.extra, batch.place)


def attention_mask(model: Transformer, batch: Batch):
    return model.attention_mask(batch.mask_kind, batch.segment, batch.group)


def at_targets(states: Tensor, batch: Batch) -> Tensor:
    """(B, T, C) -> (N, C), the states of the positions with a target."""
    return states.flatten(0, 1).index_select(0, batch.index)


def token_metrics(total: Tensor, weight: Tensor, n_bytes: Tensor) -> Metrics:
    """Nats per unit of weight, and bits per byte."""
    return {
        "token_loss": Metric(total, weight, 1.0),
        "bits_per_byte": Metric(total.detach() / math.log(2), n_bytes),
    }


def token_loss(model: Transformer, batch: Batch, tok: Tokenizer, knobs: Knobs) -> Metrics:
    """Cross entropy over the positions with a target; a mixture's members are logged separately.

    The loss is a mean over targets, not over rows: in clm:0.5,mlm:0.5, half of the rows are mlm's,
    but 0.15 / (1 + 0.15) = 13% of the targets."""
    [states] = states_of(model, batch)  # one, except in mtp
    states = at_targets(states, batch)
    total, nll = model.cross_entropy(states, batch.targets, batch.weights)
    metrics = token_metrics(total, batch.total_weight, batch.target_bytes)
    if len(batch.names) > 1:
        for i, name in enumerate(batch.names):
            weights = (batch.member == i) * batch.weights
            metrics[f"loss_{name}"] = Metric((weights * nll).sum(), weights.sum())
    return metrics


def mtp_loss(model: Transformer, batch: Batch, tok: Tokenizer, knobs: Knobs) -> Metrics:
    """Next-token loss + mtp_weight · the mean (parallel: the sum) of the other horizons' losses."""
    n = model.config.n_future
    state, *future_states = states_of(model, batch)
    targets, *future_targets = batch.targets.T  # (N,) for each horizon
    total, _ = model.cross_entropy(at_targets(state, batch), targets, batch.weights)
    metrics = token_metrics(total, batch.total_weight, batch.target_bytes)
    if n == 1:
        return metrics

    is_parallel = knobs.mtp_heads == "parallel"
    weight = knobs.mtp_weight or (1.0 if is_parallel else 0.3)
    if is_parallel:  # future_loss is a mean over the heads: this makes it a sum
        weight *= n - 1
    states = torch.cat([at_targets(state, batch) for state in future_states])  # ((n-1) · N, C)
    weights = batch.weights.repeat(n - 1)
    total, nll = model.cross_entropy(states, torch.cat(future_targets), weights)
    metrics["future_loss"] = Metric(total / (n - 1), batch.total_weight, weight)
    for horizon, horizon_nll in enumerate(nll.view(n - 1, -1), 2):
        weighted = (horizon_nll * batch.weights).sum()
        metrics[f"loss_{horizon}"] = Metric(weighted, batch.total_weight)
    return metrics


def diffusion_loss(model: Transformer, batch: Batch, tok: Tokenizer, knobs: Knobs) -> Metrics:
    """The sum of the masked tokens' cross entropies, each with weight 1/p, divided by the number of
    tokens in the text. The mean of this is an upper bound on the nats per token (the negative
    ELBO). As in MDLM, [MASK] is never predicted. In a block row, the clean tokens' mean loss is
    added, times context_weight."""
    [states] = states_of(model, batch)
    states = at_targets(states, batch)
    _, nll = model.cross_entropy(states, batch.targets, batch.weights, forbidden_id=tok.MASK)
    nll = nll * batch.weights
    masked = batch.inputs.flatten()[batch.index] == tok.MASK
    metrics = token_metrics((nll * masked).sum(), batch.total_weight, batch.target_bytes)
    if batch.place is not None:
        clean = (~masked).float()
        metrics["context_loss"] = Metric((nll * clean).sum(), clean.sum(), knobs.context_weight)
    return metrics


def electra_loss(model: Transformer, batch: Batch, tok: Tokenizer, knobs: Knobs) -> Metrics:
    """A generator does mlm, its samples fill the row, and the model says which were replaced. The
    loss is the generator's + rtd_weight · the detector's, which is a mean over all tokens. A sample
    that is right counts as original. No gradient flows through the samples.

        abcdefgh, targets d and g, the generator says d and x -> reads abcdefxh, replaced 00000010
    """
    mask = attention_mask(model, batch)
    states = at_targets(model.generator_states(batch.inputs, mask), batch)
    embedding = model.embed_tokens.weight
    total, _ = model.cross_entropy(states, batch.targets, batch.weights, unembedding=embedding)

    original, filled = fill_samples(states, embedding, batch, tok)
    replaced = (filled != original).float()
    n = total.new_full((), replaced.numel())

    logit = model.detect_head(model(filled, mask)[0]).float()  # (B, T)
    loss = F.binary_cross_entropy_with_logits(logit, replaced, reduction="none")
    right = ((logit > 0) == (replaced > 0)).float()
    metrics = token_metrics(total, batch.total_weight, batch.target_bytes)
    metrics["replaced_share"] = Metric(replaced.sum(), n)
    metrics["detect_loss"] = Metric(loss.sum(), n, knobs.rtd_weight)
    metrics["detect_accuracy"] = Metric(right.sum(), n)
    metrics["detect_accuracy_baseline"] = Metric(
        torch.maximum(replaced.sum(), n - replaced.sum()), n
    )
    return metrics


@torch.no_grad()
def fill_samples(states, embedding, batch: Batch, tok: Tokenizer) -> tuple[Tensor, Tensor]:
    """The generator's (N, C) states and the (V, C) embedding -> the original rows and the rows with
    the generator's samples filled in, (B, T) each. Samples are ordinary tokens at temperature 1,
    drawn by inverse CDF with the uniform numbers of batch.extra. Unlike in model.cross_entropy, the
    probabilities of all N positions are in memory at once."""
    cdf = F.linear(states, embedding[: tok.n_ordinary]).float().softmax(-1).cumsum(-1)
    uniform = batch.extra.flatten()[batch.index, None]
    # The first id whose cumulative probability passes the uniform number:
    sample = torch.searchsorted(cdf, uniform, right=True)[:, 0].clamp(max=tok.n_ordinary - 1)

    ids = batch.inputs.flatten()
    original = ids.scatter(0, batch.index, batch.targets)
    filled = ids.scatter(0, batch.index, sample)
    return original.view_as(batch.inputs), filled.view_as(batch.inputs)


def pair_loss(model: Transformer, batch: Batch, tok: Tokenizer, knobs: Knobs) -> Metrics:
    """mlm plus binary cross entropy of the pair's label, read from [CLS]."""
    states = model(batch.inputs, attention_mask(model, batch))[0]
    total, _ = model.cross_entropy(at_targets(states, batch), batch.targets, batch.weights)

    label = batch.extra.float()
    logit = model.pair_head(states[:, 0]).float()
    bce = F.binary_cross_entropy_with_logits(logit, label, reduction="sum")
    right = ((logit > 0) == (label > 0)).float()
    rows = total.new_full((), len(label))
    metrics = token_metrics(total, batch.total_weight, batch.target_bytes)
    metrics["pair_loss"] = Metric(bce, rows, 1.0)
    metrics["pair_accuracy"] = Metric(right.sum(), rows)
    metrics["pair_accuracy_baseline"] = Metric(rows / 2, rows)
    return metrics


def contrastive_loss(model: Transformer, batch: Batch, tok: Tokenizer, knobs: Knobs) -> Metrics:
    """InfoNCE; guessing costs ln(rows). The negatives are the other rows of the micro-batch."""
    first, second = embed_crops(model, batch.inputs, attention_mask(model, batch), batch.segment)
    loss, accuracy = info_nce(first, second)
    rows = loss.new_full((), len(first))
    return {
        "contrastive_loss": Metric(loss * rows, rows, 1.0),
        "retrieval_accuracy": Metric(accuracy * rows, rows),
        "retrieval_accuracy_baseline": Metric(rows / rows, rows),  # mean 1 / rows
    }


def embed_crops(model: Transformer, ids: Tensor, mask, segment: Tensor) -> Tensor:
    """(B, T) ids, two crops in each row -> (2, B, C): the crops' mean states as unit vectors."""
    states = model(ids, mask)[0].float()  # (B, T, C)
    crop = torch.stack([segment == 1, segment == 2]).float()  # (2, B, T)
    # In float32, because info_nce divides the rounding error of a cosine by TEMPERATURE:
    with torch.autocast(states.device.type, enabled=False):
        sums = torch.einsum("nbt,btc->nbc", crop, states)
        return F.normalize(sums, dim=-1)  # a sum has the direction of the mean


def info_nce(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """(B, C), (B, C) unit vectors -> loss, retrieval accuracy. first[i] and second[i] are partners.
    The loss is the cross entropy of finding the partner, with cosine / TEMPERATURE as logits,
    averaged over both directions."""
    with torch.autocast(first.device.type, enabled=False):
        score = first @ second.T / TEMPERATURE
        partner = torch.arange(len(first), device=first.device)
        loss = (F.cross_entropy(score, partner) + F.cross_entropy(score.T, partner)) / 2
        return loss, (score.argmax(1) == partner).float().mean()


# ---- the table ---------------------------------------------------------------------------------


class Objective(NamedTuple):
    """An entry of the table. To add an objective, write its function and name it here.

    A new flag is a field of Knobs, named in `knobs`. A new head is a module `..._head` of
    model.Transformer and a field of that name in ModelConfig, named in `heads`. A new way to use a
    model is an entry of sample.TASKS; without any, a model can still embed texts. Learning rates
    and numbers of steps are in train.py, the worked examples in test_objectives.py."""

    draw: Callable  # draw(text, rng, T, knobs) -> an example
    row: Callable  # row(example, rng, tok, T, knobs) -> data.Row
    loss: Callable  # loss(model, batch, tok, knobs) -> Metrics
    # "causal", "prefix", "full", "block" (causal, then a block both ways) or "permuted" (full, then
    # some tokens one by one): how sample.py reads a text with the model. (Training reads only what
    # `row` returns as segment, group and place.)
    attention: str
    tasks: tuple[str, ...]  # what the model can do: keys of sample.TASKS, the usual one first
    knobs: tuple[str, ...] = ()  # the fields of Knobs that it reads
    # What it changes in the model, mostly heads: fields of ModelConfig, set to the knob of that
    # name, else to True. It then needs a loss of its own: mixtures have no heads.
    heads: tuple[str, ...] = ()
    # What the loss is -log p of, or an upper bound of that: "text" (the unchanged text), "moved" (a
    # text with its middle moved), "rest" (a part of a text) or "" (nothing). Except for "",
    # bits per byte and a score are shown; only for "text", the entropy of the language, too.
    likelihood: str = ""
    shifted: bool = False  # targets that are read both ways are one position earlier (mntp)
    has_t: bool = False  # the example also has a t in [0, 1), spread evenly over a batch's rows
    check: Callable | None = None  # check(T, knobs) raises UserError if they cannot make a row


# fmt: off
OBJECTIVES = {
    #                        draw               row          loss              attention
    "clm":         Objective(window_and_next,   clm,         token_loss,       "causal",
        tasks=("continue",), knobs=("doc_mask",), likelihood="text"),
    "prefix":      Objective(window_and_next,   prefix,      token_loss,       "prefix",
        tasks=("continue_prefix",), knobs=("prefix_frac",), likelihood="rest"),
    "fim":         Objective(window_and_next,   fim,         token_loss,       "causal",
        tasks=("infill_fim", "continue"), knobs=("fim_rate", "fim_layouts", "fim_cuts"),
        likelihood="moved", check=check_fim),
    "cm3":         Objective(window_and_next,   cm3,         token_loss,       "causal",
        tasks=("infill_cm3", "continue"), likelihood="moved"),
    "mtp":         Objective(window_and_future, mtp,         mtp_loss,         "causal",
        tasks=("continue",), knobs=("n_future", "mtp_heads", "mtp_weight"),
        heads=("n_future", "mtp_heads"), likelihood="text"),
    "span":        Objective(window,            span,        token_loss,       "prefix",
        tasks=("infill_span",), knobs=("corruption_rate", "mean_span"), check=check_span),
    "ul2":         Objective(window,            ul2,         token_loss,       "prefix",
        tasks=("infill_ul2", "continue_ul2"), check=check_ul2),
    "bart":        Objective(window,            bart,        token_loss,       "prefix",
        tasks=("restore",), knobs=("bart_noise",), check=check_bart),
    "mlm":         Objective(window,            mlm,         token_loss,       "full",
        tasks=("fill",), knobs=("mask_rate",)),
    "mntp":        Objective(window_and_next,   mntp,        token_loss,       "full",
        tasks=("fill",), knobs=("mask_rate",), shifted=True),
    "nsp":         Objective(two_long_chunks,   nsp,         pair_loss,        "full",
        tasks=("pair", "fill"), knobs=("mask_rate",), heads=("pair_head",)),
    "sop":         Objective(long_chunk,        sop,         pair_loss,        "full",
        tasks=("pair_order", "fill"), knobs=("mask_rate",), heads=("pair_head",)),
    "electra":     Objective(window,            electra,     electra_loss,     "full",
        tasks=("detect", "fill"), knobs=("mask_rate", "rtd_weight", "generator_frac"),
        heads=("detect_head", "generator_frac")),
    "diffusion":   Objective(window,            diffusion,   diffusion_loss,   "full",
        tasks=("unmask", "continue_unmask"), likelihood="text", has_t=True),
    "block":       Objective(half_window_and_next, block,    diffusion_loss,   "block",
        tasks=("continue_block",), knobs=("diffusion_block", "context_weight"), likelihood="text",
        has_t=True),
    "plm":         Objective(window,            plm,         token_loss,       "permuted",
        tasks=("fill_in_order",), knobs=("plm_rate",), likelihood="rest"),
    "contrastive": Objective(chunk,             contrastive, contrastive_loss, "full",
        tasks=("similarity",)),
}
# fmt: on


# ---- one objective, or several at given shares --------------------------------------------------


def parse_mixture(spec: str) -> dict[str, float]:
    """The shares, which add up to 1, of the objectives in a flag's text. May raise UserError.

    >>> parse_mixture("clm:0.5,ul2:1.5")
    {'clm': 0.25, 'ul2': 0.75}
    """
    parts = [part.strip().partition(":") for part in spec.split(",")]
    names = comma_list("objective", ",".join(name for name, _, _ in parts), OBJECTIVES)
    alone = [name for name in names if name not in with_token_loss()]
    if len(names) > 1 and alone:
        able = ", ".join(with_token_loss())
        raise UserError(f"--objective={spec}: {alone[0]} cannot be mixed, only {able} can")
    try:
        shares = [float(weight if colon else 1) for _, colon, weight in parts]
    except ValueError:
        shares = [0]
    if min(shares) <= 0 or not math.isfinite(sum(shares)) or 0 < spec.count(":") < len(names):
        raise UserError(f"--objective={spec}: give each a share above 0, as in clm:0.5,ul2:0.5")
    return {name: share / sum(shares) for name, share in zip(names, shares)}


def first_member(mixture: dict[str, float]) -> Objective:
    """The table's entry of a mixture's first member. All members have the same loss, and none
    has heads."""
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


def source_of(mixture, text: Text, tok: Tokenizer, T: int, knobs: Knobs, seed: int) -> Source:
    """What a mixture's rows are drawn from."""
    members = {name: OBJECTIVES[name] for name in mixture}
    return Source(members, list(mixture.values()), text, tok, T, knobs, seed)
