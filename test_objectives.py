"""test_objectives.py: what each objective promises, as executable tests.

First the worked examples of the docstrings, each found among real draws. Then, objective by
objective, what its paper specifies. Then what all promise: which positions are supervised, that the
text comes back, that nothing leaks, that a model learns. Then mixtures, and what is refused.

Models of two blocks read random letters. Every draw is seeded, so a test that passes once passes
always.

    pytest test_objectives.py
    pytest test_objectives.py -k "span or leaks"
"""

import functools
import itertools
import math
import re
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import objectives
import stories
from data import IGNORE, TRAIN, VALIDATION, Batch, Row, Source, Text, collate, draw_row, make_batch
from model import ModelConfig, Transformer
from objectives import OBJECTIVES, Knobs, check_knobs, parse_mixture, total_loss, with_heads
from tokenizer import get_tokenizer
from util import UserError, build

PROSE = "The naïve café — 漢字と仮名。 Ça va? Ευχαριστώ! 😀👍 Tschüß, señor…\n" * 3
TOK = get_tokenizer("bytes")
BPE = get_tokenizer("bpe:330", [PROSE])
PAIRS = ("nsp", "sop")  # [CLS] A [SEP] B [SEP]
BOUNDS = ("diffusion", "block")  # their loss bounds the nats of a text
NO_CONTEXT = {"block": {"context_weight": 0.0}}  # the bound alone
MIXABLE = objectives.with_token_loss()


# ---- texts and rows ----------------------------------------------------------------------------


def text_of(documents, tok=TOK) -> Text:
    ids = [np.append(document, tok.EOT) for document in documents]
    return Text(np.concatenate(ids).astype(np.uint16), tok.EOT)


@functools.cache
def letters(low: int = 20, high: int = 90) -> Text:
    """Sixty documents of `low` to `high` random letters, spaces, full stops and newlines."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(low, high + 1, 60)
    return text_of(rng.choice(list(b"abcdefghij  .\n"), length) for length in lengths)


def counting() -> Text:
    """Seven documents of 60 tokens: document d holds 32d, 32d + 1, ...; it repeats after 32."""
    return text_of(32 * d + np.arange(60) % 32 for d in range(7))


def ids_of(string: str) -> np.ndarray:
    """One id for each character; `$` is EOT."""
    return np.array([TOK.EOT if c == "$" else ord(c) for c in string], np.int32)


def window(ids, T: int) -> np.ndarray:
    """A window of T tokens: a document of these ids, then documents of one token each."""
    return np.array([*ids, *[TOK.EOT, 0] * T][:T], np.int32)


def documents(ids, tok=TOK) -> list[list[int]]:
    """The documents that EOTs separate."""
    parts = np.split(ids, np.flatnonzero(np.asarray(ids) == tok.EOT))
    return [[i for i in part.tolist() if i != tok.EOT] for part in parts]


def no_eot(ids) -> list[int]:
    return [int(i) for i in ids if i != TOK.EOT]


def source_of(name, text=None, T=48, seed=1, tok=TOK, **knobs) -> Source:
    more = (text or letters(), tok, T, Knobs(**knobs), seed)
    return objectives.source_of(parse_mixture(name), *more)


def draw(n: int, name: str, text=None, step=0, **others) -> list[Row]:
    """The n rows of a step, drawn from a text."""
    source = source_of(name, text, **others)
    return [draw_row(source, TRAIN, step, number, n)[0] for number in range(n)]


def make(n: int, name: str, example, T: int, tok=TOK, **knobs) -> list[Row]:
    """n rows that an objective makes from the same example."""
    rng = np.random.default_rng(0)
    return [OBJECTIVES[name].row(example, rng, tok, T, Knobs(**knobs)) for _ in range(n)]


def make_pairs(*arguments, **knobs) -> list[tuple[list[int], list[int]]]:
    """The same, as the (source, target) of each row's first document."""
    return [examples(row)[0] for row in make(*arguments, **knobs)]


# ---- reading rows ------------------------------------------------------------------------------


def asked(row: Row) -> np.ndarray:
    """(T,) bool: which positions have a target."""
    return row.targets.reshape(len(row.inputs), -1)[:, 0] != IGNORE


def original(row: Row, name="mlm") -> np.ndarray:
    """The text of a row with its masks undone: the target where there is one, else the input."""
    targets = row.targets
    if OBJECTIVES[name].shifted:
        targets = np.append(IGNORE, targets[:-1])
    return np.where(targets != IGNORE, targets, row.inputs)


def whole(row: Row) -> list[int]:
    """All ids of a row without its padding, then the last position's target, which is not read."""
    end = np.count_nonzero(row.segment)
    ids = [*row.inputs[:end].tolist(), *np.ravel(row.targets[end - 1]).tolist()]
    return [i for i in ids if i != IGNORE]


def examples(row: Row) -> list[tuple[list[int], list[int]]]:
    """The (source, target) pairs of a packed row, without the EOT of each side. (In ul2's [S] mode
    a target has an EOT only if it reaches the end of its document.)"""
    pairs = []
    for number in range(1, row.segment.max() + 1):
        here = row.segment == number
        ids = [*row.inputs[here].tolist(), int(row.targets[here][-1])]
        end = row.group[here].sum()
        source, target = ids[: end - 1], ids[end:]
        assert ids[end - 1] == TOK.EOT
        assert TOK.EOT not in source + target[:-1]
        assert target[-1] == TOK.EOT or source[0] == TOK.S
        pairs.append((source, [i for i in target if i != TOK.EOT]))
    return pairs


def sides(row: Row) -> tuple[list[int], list[int]]:
    """A and B of [CLS] A [SEP] B [SEP], of which neither is empty."""
    ids = [i for i in original(row).tolist() if i != TOK.PAD]
    assert ids[0] == TOK.CLS and ids[-1] == TOK.SEP and ids.count(TOK.SEP) == 2
    middle = ids.index(TOK.SEP)
    A, B = ids[1:middle], ids[middle + 1 : -1]
    assert A and B and max(A + B) < TOK.n_ordinary
    return A, B


def crops(row: Row) -> list[np.ndarray]:
    return [row.inputs[row.segment == number] for number in (1, 2)]


def may_see(row: Row) -> np.ndarray:
    """The attention rule, pair by pair: (T, T), query down, key across."""
    T = len(row.inputs)
    allowed = np.zeros((T, T), bool)
    for q, k in np.ndindex(T, T):
        together = row.group[q] == row.group[k] != 0
        readable = k <= q and row.group[k] >= 0
        allowed[q, k] = row.segment[q] == row.segment[k] and (readable or together)
    return allowed


# ---- models and statistics ---------------------------------------------------------------------


def model_for(name: str, knobs=None, **config) -> Transformer:
    torch.manual_seed(0)
    size = dict(vocab_size=TOK.vocab_size, n_layer=2, n_head=2, head_dim=16, n_embd=32) | config
    return Transformer(with_heads(ModelConfig(**size), parse_mixture(name), knobs or Knobs()))


def awake(model: Transformer, dtype=torch.float32) -> Transformer:
    """Give every matrix random numbers, even those that are initialized to zero or nearly so."""
    generator = torch.Generator().manual_seed(0)
    for name, p in model.to(dtype).named_parameters():
        if p.ndim > 1 and "norm" not in name:
            torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5, generator=generator)
    return model


def batch_of(rows: list[Row], tok=TOK) -> Batch:
    return collate(rows, tok.n_bytes)


def mask_of(model: Transformer, batch: Batch):
    return model.attention_mask(batch.mask_kind, batch.segment, batch.group)


def metrics_of(name: str, model, batch: Batch, tok=TOK, **knobs) -> dict:
    return OBJECTIVES[name].loss(model, batch, tok, Knobs(**knobs))


def means_of(name: str, model, batch: Batch, **knobs) -> dict[str, float]:
    """The mean of each metric, and the total loss."""
    metrics = metrics_of(name, model, batch, **knobs)
    means = {key: (metric.sum / metric.divisor).item() for key, metric in metrics.items()}
    return means | {"loss": total_loss(metrics).item()}


def fair(observed, shares) -> bool:
    """Whether values, or counts of them, agree with `shares`, a dict or equally likely values; no
    other may occur. Pearson's test: by chance alone, its limit is exceeded three times in 100,000
    (Wilson and Hilferty 1931)."""
    shares = shares if isinstance(shares, dict) else dict.fromkeys(shares, 1.0)
    count = Counter(observed)
    assert count.keys() <= shares.keys(), f"unexpected: {count.keys() - shares.keys()}"
    expected = np.array([*shares.values()]) / sum(shares.values()) * count.total()
    assert expected.min() >= 5, "too few draws for this test"
    freedom = len(shares) - 1
    unit = 2 / (9 * freedom)
    limit = freedom * (1 - unit + 4 * unit**0.5) ** 3
    difference = np.array([count[value] for value in shares]) - expected
    return (difference**2 / expected).sum() < limit


# ---- the worked examples of the docstrings -----------------------------------------------------

# fmt: off
# objective, its example ($ is EOT), T, knobs,
# and the docstring's words, whose fields in braces are filled in from the drawn row.
WORKED_EXAMPLES = [
    ("clm", "abcd", 3, {}, "abcd -> inputs {inputs}, targets {targets}"),
    ("clm", "ab$cd", 4, {"doc_mask": True},
     "ab$cd, doc_mask -> inputs {inputs}, targets {targets}, segment {segment}"),
    ("prefix", "abcdef", 5, {},
     "abcdef, P = 3 -> inputs {inputs}, group {group}, targets {targets}"),
    ("mtp", "abcde", 3, {"n_future": 2},
     "abcde, n = 2 -> inputs {inputs}, targets {targets}, extra {extra}"),
    ("fim", "abcdef$ghi", 9, {"fim_rate": 1.0, "fim_layouts": "psm"},
     "abcdef, cuts 2 and 4 -> psm {whole}"),
    ("fim", "abcdef$ghi", 9, {"fim_rate": 1.0, "fim_layouts": "spm"}, "spm {whole}"),
    ("fim", "abcdef$ghi", 9, {"fim_rate": 1.0, "fim_layouts": "spm2"}, "spm2 {whole}"),
    ("cm3", "abcdef$gh", 8, {}, "abcdef -> {whole}"),
    ("cm3", "abcdef$ghijk", 11, {}, "cd$ {whole}"),
    ("mlm", "abcdefghij", 10, {"mask_rate": 0.2},
     "abcdefghij, 2 targets -> inputs {inputs}, targets {targets}"),
    ("mntp", "abcdefghijk", 10, {"mask_rate": 0.2},
     "abcdefghijk, 2 targets -> inputs {inputs}, targets {targets}"),
    ("diffusion", ("abcdefgh", 0.4995), 8, {},
     "abcdefgh, p = {p:.1f} -> inputs {inputs}, targets {targets}, weights all {weight:.0f}"),
    ("block", ("abcde", 0.0), 8, {"diffusion_block": 2},
     "abcde, L = 2 -> inputs {inputs}, targets {targets}, place {place}, group {group}"),
    ("plm", "abcdef", 8, {"plm_rate": 1 / 3},
     "abcdef, d before b -> inputs {inputs}, targets {targets}, place {place}, group {group}"),
    ("nsp", ("ab. cd. ef.", "uv. xy. z."), 12, {},
     "ab. cd. ef. / uv. xy. z. -> {original} label {extra}, or"),
    ("nsp", ("ab. cd. ef.", "uv. xy. z."), 12, {}, "{original} label {extra}"),
    ("sop", "ab. cd. ef.", 14, {}, "ab. cd. ef. -> {original} label {extra}, or"),
    ("sop", "ab. cd. ef.", 14, {}, "or {original} label {extra}"),
    ("contrastive", "abcdef", 6, {},
     "abcdef, crops abc and cde -> inputs {inputs}, segment {segment}, nothing to predict"),
    ("span", "abcdefghij$zzzz", 15, {"corruption_rate": 0.3, "mean_span": 1.5},
     "abcdefghij -> {whole}"),
    ("ul2", "abcdefgh$zzz", 12, {}, "abcdefgh$z -> {whole} or"),
    ("ul2", "abcdefgh$z", 10, {}, "or {whole} or"),
    ("bart", "ab. cdef. gh$zzzzzzzzz", 22, {}, '"ab. cdef. gh" -> "{whole}"'),
]
# fmt: on


def example_of(spelled):
    """An example as a draw from a text returns it: ids, two arrays of ids, or ids and a number."""
    if isinstance(spelled, tuple):
        return tuple(example_of(part) for part in spelled)
    return ids_of(spelled) if isinstance(spelled, str) else spelled


def spell(ids) -> str:
    """Ids in the notation of the docstrings; the targets of several horizons in parentheses."""
    if np.ndim(ids) == 0:
        return str(ids)  # a label, or None
    if np.ndim(ids) == 2:
        return " ".join(f"({' '.join(spell([i]) for i in targets)})" for targets in ids)
    marks = {TOK.EOT: "$", TOK.MASK: "#", TOK.PAD: "", IGNORE: "_"}
    return "".join(marks.get(int(i), TOK.decode([i])) for i in ids)


def spelled_out(row: Row) -> dict:
    """A row in the notation of the docstrings."""
    return {
        "inputs": spell(row.inputs),
        "targets": spell(row.targets),
        "group": "".join("0123456789=-"[g] for g in row.group),
        "place": "".join(str(p) for p in row.place),
        "segment": "".join(str(s) for s in row.segment),
        "weight": float(row.weights[0]),
        "p": 1 / float(row.weights[0]),
        "extra": spell(row.extra),
        "whole": spell(whole(row)),
        "original": spell(original(row)) if row.targets.ndim == 1 else "",
    }


@pytest.mark.parametrize("name, example, T, knobs, words", WORKED_EXAMPLES)
def test_worked_example_of_the_docstring(name, example, T, knobs, words):
    """Of many rows drawn from the docstring's example, one is the docstring's row."""
    docstring = " ".join(OBJECTIVES[name].row.__doc__.split())
    rng = np.random.default_rng(0)
    for _ in range(30_000):
        row = OBJECTIVES[name].row(example_of(example), rng, TOK, T, Knobs(**knobs))
        drawn = words.format(**spelled_out(row))
        if drawn in docstring:
            return
    pytest.fail(f"no row like the one in the docstring of objectives.{name}, but: {drawn}")


def test_worked_example_of_electra():
    """The generator's samples fill the row; a sample that is right counts as original."""
    rows = make(999, "electra", ids_of("abcdefgh"), 8, mask_rate=0.25)
    batch = batch_of([next(row for row in rows if spell(row.targets) == "___d__g_")])
    model = model_for("electra")
    # A generator that is sure of d and x, and a detector that finds the x.
    sure = torch.zeros(1, 8, 32)
    sure[0, [3, 6]] = 100 * model.embed_tokens.weight[ids_of("dx")].detach()
    model.generator_states = lambda ids, mask: sure
    verdict = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 0]])
    model.detect_head.register_forward_hook(lambda *_: 40.0 * verdict - 20.0)
    read = []
    model.register_forward_pre_hook(lambda _, args: read.append(spell(args[0][0])))

    means = means_of("electra", model, batch)
    assert means["detect_accuracy"] == 1 and means["detect_loss"] < 1e-6
    assert means["replaced_share"] == 1 / 8
    assert means["detect_accuracy_baseline"] == 7 / 8  # of always saying "original"
    example = f"the generator says d and x -> reads {read[0]}, replaced 00000010"
    assert example in " ".join(objectives.electra_loss.__doc__.split())


def test_every_objective_has_a_worked_example():
    """In its docstring, and, unless somebody has just added it, among those tested here."""
    shown = {name for name, *_ in WORKED_EXAMPLES} | {"electra"}
    assert all(name in shown or "->" in OBJECTIVES[name].row.__doc__ for name in OBJECTIVES)


# ---- clm ---------------------------------------------------------------------------------------


def test_clm_doc_mask_runs_documents_alone():
    """The logits of a packed row are those of its documents, each run alone after its EOT."""
    model = awake(model_for("clm"))
    batch = batch_of(draw(2, "clm", T=96, doc_mask=True))
    packed = model.logits(model(batch.inputs, mask_of(model, batch))[0])
    for logits, ids, segment in zip(packed, batch.inputs, batch.segment):
        assert segment.max() > 1
        for number in segment.unique():
            here = segment == number
            assert number == 1 or ids[here][0] == TOK.EOT
            alone = model.logits(model(ids[here][None])[0])[0]
            torch.testing.assert_close(logits[here], alone, atol=1e-4, rtol=0)


# ---- prefix ------------------------------------------------------------------------------------


def test_prefix_split_is_uniform_or_where_the_knob_says():
    rows = make(4000, "prefix", np.arange(34), 33)
    assert fair((row.group.sum() for row in rows), range(1, 33))
    for share, P in ((0.3, 12), (1e-6, 1), (0.999999, 39)):
        assert draw(1, "prefix", T=40, prefix_frac=share)[0].group.sum() == P


# ---- mtp ---------------------------------------------------------------------------------------


def test_mtp_without_its_extra_heads_is_clm():
    """In parameters, rows and loss; with n_future=1 there are no extra heads."""
    clm = awake(model_for("clm"))
    loss = means_of("clm", clm, batch_of(draw(4, "clm")))["loss"]
    for n_future in (1, 4):
        model = awake(model_for("mtp", Knobs(n_future=n_future)))
        heads = {name.split(".")[0] for name in set(model.state_dict()) - set(clm.state_dict())}
        assert heads == ({"future"} if n_future > 1 else set())
        model.load_state_dict(clm.state_dict(), strict=False)
        rows = draw(4, "mtp", n_future=n_future)  # the same texts
        means = means_of("mtp", model, batch_of(rows), n_future=n_future)
        assert means["token_loss"] == pytest.approx(loss, rel=1e-5)
        assert (means["loss"] == means["token_loss"]) == (n_future == 1)


@pytest.mark.parametrize(
    "heads, mtp_weight, weight",
    [("linear", None, 0.1), ("chain", None, 0.1), ("chain", 0.6, 0.2), ("parallel", None, 1.0)],
)
def test_mtp_logs_and_weighs_each_horizon(heads, mtp_weight, weight):
    """Horizons after the first weigh 0.3 together (DeepSeek-V3), or 1 each (Gloeckle et al.)."""
    model = awake(model_for("mtp", Knobs(mtp_heads=heads)))
    batch = batch_of(draw(4, "mtp"))
    means = means_of("mtp", model, batch, mtp_heads=heads, mtp_weight=mtp_weight)
    states = model(batch.inputs, mask_of(model, batch), batch.extra)
    losses = []
    for k, state in enumerate(states):
        logits = model.logits(state).flatten(0, 1)
        losses.append(F.cross_entropy(logits, batch.targets[:, k]).item())
    logged = [means[key] for key in ("token_loss", "loss_2", "loss_3", "loss_4")]
    assert logged == pytest.approx(losses, rel=1e-4)
    assert means["loss"] == pytest.approx(losses[0] + weight * sum(losses[1:]), rel=1e-4)


# ---- fim ---------------------------------------------------------------------------------------


def fim_pieces(row: Row, tok=TOK) -> list[list[int]]:
    """The ids of each document's piece, including its EOT if it has one."""
    ids = np.array(whole(row))
    pieces = np.split(ids, 1 + np.flatnonzero(ids == tok.EOT))
    return [piece.tolist() for piece in pieces if len(piece)]


def parts_of_fim(piece: list[int], tok=TOK) -> list[bytes]:
    """What stands before the hole, in it and after it; of a piece that was left as it is, itself.
    (In spm2 the text before the hole is found at the beginning of the middle.)"""
    if piece[0] not in (tok.PRE, tok.SUF):
        return [tok.decode_bytes([i for i in piece if i != tok.EOT])]
    assert piece[-1] == tok.EOT, f"{tok.decode(piece)!r} is cut off"
    second = piece.index(tok.SUF if piece[0] == tok.PRE else tok.PRE)
    third = piece.index(tok.MID)
    before, after = piece[1:second], piece[second + 1 : third]
    if piece[0] == tok.SUF:
        before, after = after, before
    return [tok.decode_bytes(part) for part in (before, piece[third + 1 : -1], after)]


@pytest.mark.parametrize("layouts", ["psm", "spm", "spm2", "psm,spm,spm2"])
@pytest.mark.parametrize("tok", [TOK, BPE], ids=["bytes", "bpe"])
def test_fim_gives_back_the_text_byte_for_byte(tok, layouts):
    """Also where characters have several bytes, where a cut splits a token, and where the end of
    the row cuts a document."""
    rng = np.random.default_rng(0)
    starts = rng.integers(0, len(PROSE) - 60, 200)
    text = text_of((tok.encode(PROSE[a : a + rng.integers(0, 60)]) for a in starts), tok)
    marks = set()
    for row in draw(150, "fim", text, T=64, tok=tok, fim_rate=1.0, fim_layouts=layouts):
        pieces = fim_pieces(row, tok)
        parts = [part for piece in pieces for part in parts_of_fim(piece, tok)]
        assert b"".join(parts) == tok.decode_bytes(row.raw[row.raw != tok.EOT])
        assert (row.segment > 0).all()
        marks |= {pieces[0][0]} & {tok.PRE, tok.SUF}
    of_layout = {"psm": {tok.PRE}, "spm": {tok.SUF}, "spm2": {tok.PRE}}
    assert marks == of_layout.get(layouts, {tok.PRE, tok.SUF})


@pytest.mark.parametrize(
    "tok, unit, text, places, tokens",
    [
        (TOK, "characters", "aé漢😀", [0, 1, 3, 6, 10], [0, 1, 3, 6, 10]),
        (TOK, "tokens", "aé漢😀", [0, 1, 3, 6, 10], [0, 1, 3, 6, 10]),  # not inside a character
        (BPE, "tokens", "The café", [0, 3, 9], [0, 3, 9]),
        (BPE, "characters", "The café", [0, 1, 2, 3, 4, 5, 6, 7, 9], [0, 3, 9]),
    ],
)
def test_fim_cuts_between_characters_or_tokens(tok, unit, text, places, tokens):
    """In half of the pieces both cuts are uniform and independent, so that two different places are
    twice as likely as one. In the other half the middle is whole tokens anywhere, and their number
    is log-uniform."""
    x = np.array([*tok.encode(text), *[tok.EOT] * 16], np.int32)
    cuts = []
    for row in make(3000, "fim", x, len(x) - 1, tok, fim_rate=1.0, fim_cuts=unit):
        before, middle, _ = parts_of_fim(fim_pieces(row, tok)[0], tok)
        cuts.append((len(before), len(before + middle)))
    shares = Counter()
    for i, j in itertools.combinations_with_replacement(places, 2):
        shares[i, j] += (1 + (i < j)) / len(places) ** 2
    n = len(tokens)
    for i, j in itertools.combinations(range(n), 2):
        shares[tokens[i], tokens[j]] += math.log((j - i + 1) / (j - i), n) / (n - (j - i))
    assert fair(cuts, dict(shares))


def test_fim_rate_and_layouts():
    rows = draw(1500, "fim", text=letters(6, 10), T=80)
    firsts = [fim_pieces(row)[1][0] for row in rows]  # the second piece is a whole document
    shares = {TOK.PRE: 0.45, TOK.SUF: 0.45, 0: 0.1}
    assert fair([mark if mark in shares else 0 for mark in firsts], shares)
    for row in draw(32, "fim", text=letters(0, 20), fim_rate=0.0):  # then it is clm
        assert (row.inputs == row.raw[:48]).all() and asked(row).all()


# ---- cm3 ---------------------------------------------------------------------------------------


def parts_of_cm3(row: Row) -> list[tuple[list[int], list[list[int]]]]:
    """For each document, its text with sentinels, and the spans that these stand for."""
    ids = whole(row)
    parts = []
    i = 0
    while i < len(ids):
        text = []
        n = 0  # gaps so far
        while i < len(ids) and (ids[i] < TOK.n_ordinary or ids[i] == TOK.sentinel + n):
            n += ids[i] == TOK.sentinel + n
            text.append(ids[i])
            i += 1
        i += i < len(ids) and ids[i] == TOK.EOT and not n
        spans = []
        for k in range(n):
            assert ids[i] == TOK.sentinel + k
            end = ids.index(TOK.EOT, i)  # ValueError: the span is cut off
            spans.append(ids[i + 1 : end])
            i = end + 1
        parts.append((text, spans))
    return parts


def undo_cm3(text: list[int], spans: list[list[int]]) -> list[int]:
    at = {TOK.sentinel + k: span for k, span in enumerate(spans)}
    return [j for i in text for j in at.get(i, [i])]


def test_cm3_moves_poisson_many_spans_with_uniform_ends():
    """Mean 1; two different ends of a span are twice as likely as one. No EOT stands between the
    text and its spans; sentinels are not predicted."""
    x = window(range(10), 200)
    n_gaps = Counter()
    ends = []
    for row in make(3000, "cm3", x, 199):
        text, spans = parts_of_cm3(row)[0]
        n_gaps[min(len(spans), 4)] += 1
        if len(spans) == 1:
            start = text.index(TOK.sentinel)
            ends.append((start, start + len(spans[0])))
        assert (row.inputs[len(text)] == TOK.EOT) == (not spans)
        next_ids = row.inputs[1:]
        assert (asked(row)[:-1] == ((next_ids < TOK.sentinel) & (next_ids != TOK.PAD))).all()
    poisson = [math.exp(-1) / math.factorial(k) for k in range(4)]
    assert fair(n_gaps, dict(enumerate([*poisson, 1 - sum(poisson)])))
    pairs = itertools.combinations_with_replacement(range(11), 2)
    assert fair(ends, {(i, j): 1 if i == j else 2 for i, j in pairs})


# ---- mlm and electra ---------------------------------------------------------------------------


@pytest.mark.parametrize("name, masked, random", [("mlm", 0.8, 0.1), ("electra", 0.85, 0.0)])
def test_masked_random_and_unchanged_tokens(name, masked, random):
    """In these shares, at no favored position. A random token is any ordinary one, 97 included."""
    rows = make(2000, name, np.full(100, 97, np.int32), 100)
    shares = {i: random / 256 for i in range(256) if random}
    shares |= {TOK.MASK: masked, 97: 1 - masked - random + random / 256}
    assert fair(np.concatenate([row.inputs[asked(row)] for row in rows]).tolist(), shares)
    places = [place for row in rows for place in np.flatnonzero(asked(row)).tolist()]
    assert fair(places, range(100))


@pytest.mark.parametrize("name", ["mlm", "electra", *PAIRS])
@pytest.mark.parametrize("rate", [0.15, 0.4, 0.001])
def test_mask_count_is_exact_and_specials_are_left_alone(name, rate):
    """Exactly max(1, round(mask_rate · ordinary tokens)) positions have a target."""
    for row in draw(32, name, mask_rate=rate):
        ordinary = original(row) < TOK.n_ordinary
        assert asked(row).sum() == max(1, round(rate * ordinary.sum()))
        assert ordinary[asked(row)].all()
        read = row.inputs[asked(row)]
        assert ((read == TOK.MASK) | (read < TOK.n_ordinary)).all(), "replaced by a special token"


def test_electra_fills_in_ordinary_tokens_drawn_from_the_generator():
    """At temperature 1: if the generator predicts the same everywhere, each token's share of the
    samples is its probability. Positions without a target keep their token."""
    rows = draw(300, "electra", mask_rate=0.4)
    share = np.random.default_rng(0).random(TOK.n_ordinary) + 0.5
    logits = torch.full((TOK.vocab_size,), 50.0)  # no special token is drawn, however likely
    logits[: TOK.n_ordinary] = torch.from_numpy(np.log(share / share.sum()))
    model = model_for("electra")
    model.embed_tokens.weight.data[:, 0] = logits
    model.generator_states = lambda ids, mask: F.one_hot(ids * 0, 32).float()
    read = []
    model.register_forward_pre_hook(lambda _, args: read.append(args[0].numpy()))

    metrics_of("electra", model, batch_of(rows))
    hidden = np.stack([asked(row) for row in rows])
    texts = np.stack([original(row) for row in rows])
    assert (read[0] == texts)[~hidden].all()
    assert fair(read[0][hidden].tolist(), dict(enumerate(share)))


def test_electra_detection_weighs_50_and_teaches_the_generator_nothing():
    """The gradient of the generator's own parameters does not depend on the weight of the detection
    loss. The trunk's gradient comes from the detection loss alone."""
    batch = batch_of(draw(8, "electra"))
    gradients = {}
    for weight in (1.0, Knobs().rtd_weight):
        model = awake(model_for("electra"))
        metrics = metrics_of("electra", model, batch, rtd_weight=weight)
        total_loss(metrics).backward()
        gradients[weight] = {name: p.grad for name, p in model.named_parameters()}
    trunk = "layers.0.mlp.up_proj.weight"
    torch.testing.assert_close(50 * gradients[1.0][trunk], gradients[50.0][trunk])
    of_generator = [name for name in gradients[1.0] if name.startswith("generator")]
    assert of_generator and model.generator.norm.weight.shape == (8,)  # a quarter of the width
    for name in of_generator:
        assert gradients[1.0][name].abs().max() > 0
        assert torch.equal(gradients[1.0][name], gradients[50.0][name])


def test_mntp_is_mlm_one_position_earlier():
    """The first token is read, and never masked."""
    x = np.arange(97, 148, dtype=np.int32)
    for row, same in zip(make(50, "mntp", x, 50), make(50, "mlm", x[1:], 50)):
        assert (row.inputs == [x[0], *same.inputs[:-1]]).all()
        assert (row.targets == same.targets).all() and (row.group == 1).all()


def test_mntp_and_clm_are_one_model_with_two_losses():
    shapes = [
        {key: weight.shape for key, weight in model_for(name).state_dict().items()}
        for name in ("clm", "mntp")
    ]
    assert shapes[0] == shapes[1]
    batch = make_batch(source_of("clm:0.5,mntp:0.5"), TRAIN, 0, range(32), 32)
    means = means_of("clm", awake(model_for("clm")), batch)
    assert means["loss_clm"] > 0 and means["loss_mntp"] > 0


# ---- diffusion and block -----------------------------------------------------------------------


def test_diffusion_is_stratified_and_weighs_by_its_rate():
    """Each row's t lies in its own 256th of the interval, anywhere in it."""
    rows = draw(256, "diffusion", T=200)
    assert all((row.weights == row.weights[0]).all() for row in rows)
    p = np.array([1 / float(row.weights[0]) for row in rows])
    jitter = 256 * (p - 1e-3) / (1 - 1e-3) - np.arange(256)
    assert -0.001 < jitter.min() < 0.1 and 0.9 < jitter.max() < 1.001
    assert 0.4 < jitter.mean() < 0.6

    masked = np.stack([asked(row) for row in rows])
    deviation = (masked.sum(1) - 200 * p) / np.sqrt(200 * p * (1 - p) + 0.01)
    assert abs(deviation).max() < 5 and 0.75 < (deviation**2).mean() < 1.25
    assert fair(np.nonzero(masked)[1].tolist(), range(200)), "a position is favored"
    ends = [TOK.EOT in row.targets for row in draw(200, "diffusion", letters(4, 12))]
    assert sum(ends) > 100, "a text's end must cost nats too"


@pytest.mark.parametrize("name", BOUNDS)
def test_the_bound_is_the_entropy_of_random_lengths(name):
    """Each token is EOT with probability q, whatever precedes it, and otherwise an `a`. The best
    model predicts just that everywhere, and its loss is the entropy of q. (If EOT were never
    masked, the best model would always predict `a`, and its loss would be 0.)"""
    q = 0.1
    ends = np.random.default_rng(0).random(50_000) < q
    text = Text(np.where(ends, TOK.EOT, ord("a")).astype(np.uint16), TOK.EOT)
    batch = batch_of(draw(256, name, text=text, T=256, **NO_CONTEXT.get(name, {})))
    model = model_for(name, n_layer=1)  # its block does nothing yet
    model.embed_tokens.weight.data.fill_(1.0)
    logits = torch.full((TOK.vocab_size,), -1e9)
    logits[[TOK.EOT, ord("a")]] = torch.tensor([q, 1 - q]).log()
    state = model(batch.inputs[:1])[0][0, 0, 0].item()  # the same number everywhere
    model.lm_head.weight.data = F.pad(logits[:, None] / state, (0, 31))
    entropy = -q * math.log(q) - (1 - q) * math.log(1 - q)
    assert means_of(name, model, batch)["token_loss"] == pytest.approx(entropy, rel=0.1)


@pytest.mark.parametrize("name", BOUNDS)
def test_the_bound_equals_the_exact_count_form(name):
    """On three tokens, the loss averaged over all masks and integrated over p equals the loss of
    masking exactly n tokens, with n uniform on 1, 2, 3. [MASK] itself is never predicted."""
    model = awake(model_for(name))
    x = ids_of("abc")
    ids = torch.from_numpy(x).long()[None]
    exact = integral = 0.0
    for mask in itertools.product([False, True], repeat=3):
        n = sum(mask)
        hidden = torch.tensor([mask])
        logits = model.logits(model(ids.masked_fill(hidden, TOK.MASK), "full")[0])
        logits[..., TOK.MASK] = -math.inf
        nats = F.cross_entropy(logits[hidden], ids[hidden], reduction="sum").item()
        exact += nats / max(n, 1) / math.comb(3, n) / 3
    nodes, node_weights = np.polynomial.legendre.leggauss(3)  # exact up to degree 5
    for p, node_weight in zip((nodes + 1) / 2, node_weights / 2):
        example, T = (ids_of("abcd")[: 3 + (name == "block")], (p - 1e-3) / (1 - 1e-3)), 3
        if name == "block":
            T, knobs = 6, dict(diffusion_block=3, context_weight=0.0)
        rows = make(9999, name, example, T, **(knobs if name == "block" else {}))
        by_mask = {tuple(asked(row)[:3].tolist()): row for row in rows}
        assert len(by_mask) == 8
        for mask, row in by_mask.items():
            chance = p ** sum(mask) * (1 - p) ** (3 - sum(mask))
            loss = means_of(name, model, batch_of([row]))["loss"]
            integral += node_weight * chance * loss
    assert integral == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("L", [1, 3, 8, 24])
def test_all_blocks_of_a_row_are_asked_at_once(L):
    """Each block's noisy copy sees itself and the clean text before it: its states are those of a
    row that holds nothing else, also of the clean text."""
    model = awake(model_for("block"), torch.float64)
    rows = draw(3, "block", letters(4, 60), T=48, diffusion_block=L)
    batch = batch_of(rows)
    together = model(batch.inputs, mask_of(model, batch), place=batch.place)[0]
    for row, states in zip(rows, together):
        is_clean = (row.group == 0) & (row.segment > 0)
        assert row.inputs[is_clean].tolist() == row.raw.tolist() and len(row.raw) == 24
        for number in range(1, 24 // L + 1):
            [noisy] = np.nonzero(row.group == -number)
            [clean] = np.nonzero(is_clean & (row.place < row.place[noisy[0]]))
            assert row.place[noisy].tolist() == [*range(L * (number - 1), L * number)]
            at = np.concatenate([clean, noisy])
            group = torch.tensor(row.group[at] < 0)[None].int()
            mask = model.attention_mask("rule", torch.ones_like(group), group)
            alone = model(torch.tensor(row.inputs[at])[None].long(), mask)[0][0]
            torch.testing.assert_close(states[at], alone, atol=1e-9, rtol=0)


def test_the_rates_of_blocks_are_stratified_over_the_batch():
    """A block's place tells nothing about its rate."""
    rows = draw(64, "block", T=96, diffusion_block=8)  # six blocks each
    p = np.array([[1 / row.weights[row.group == -k][0] for k in range(1, 7)] for row in rows])
    strata = (64 * 6 * (p - 1e-3) / (1 - 1e-3)).astype(int)
    assert sorted(strata.ravel()) == [*range(64 * 6)]
    assert fair((strata[:, 0] // 64).tolist(), range(6))


def test_clean_text_is_predicted_as_in_clm_if_it_has_a_weight():
    """The bound stays what it is; the other loss is clm's mean loss on the same text."""
    model = awake(model_for("block"))
    batch = batch_of(draw(8, "block"))
    bound = means_of("block", model, batch_of(draw(8, "block", **NO_CONTEXT["block"])))
    means = means_of("block", model, batch, context_weight=0.5)
    assert means["token_loss"] == pytest.approx(bound["loss"], rel=1e-5)
    texts = [row.raw for row in draw(8, "block")]
    last = [row.targets[(row.group == 0) & (row.segment > 0)][-1] for row in draw(8, "block")]
    clm = [make(1, "clm", np.append(x, y), len(x))[0] for x, y in zip(texts, last)]
    want = means_of("clm", model, batch_of(clm))["loss"]
    assert means["context_loss"] == pytest.approx(want, rel=1e-3)  # without [MASK]
    assert means["loss"] == pytest.approx(means["token_loss"] + 0.5 * means["context_loss"])


# ---- plm ---------------------------------------------------------------------------------------


def two_streams(model, text, order) -> torch.Tensor:
    """XLNet's two streams, written again: the (m, V) logits of the tokens at the places of `order`.
    Content attends to what is visible and to chosen content up to itself, queries to content before
    them and to themselves."""
    n, m = len(text), len(order)
    rank = np.full(n, -1)
    rank[order] = np.arange(m)
    content_sees = (rank[None] <= rank[:, None]).copy()
    query_sees = rank[None] < np.arange(m)[:, None]
    allowed = np.block([[content_sees, np.zeros((n, m))], [query_sees, np.eye(m)]]).astype(bool)
    ids = torch.tensor([*text, *[TOK.MASK] * m])[None]
    place = torch.tensor([*range(n), *order])[None]
    mask = torch.tensor(allowed)[None, None]
    return model.logits(model(ids, mask, place=place)[0])[0, n:]


@pytest.mark.parametrize("rate", [1 / 6, 0.5, 1.0])
def test_plm_is_xlnets_two_streams(rate):
    model = awake(model_for("plm"), torch.float64)
    for row in draw(4, "plm", letters(4, 60), T=42, plm_rate=rate):
        order = row.place[asked(row)]
        assert len(order) == round(rate * len(row.raw)) == len(set(order))
        assert (row.targets[asked(row)] == row.raw[order]).all()
        batch = batch_of([row])
        states = model(batch.inputs, mask_of(model, batch), place=batch.place)[0]
        logits = model.logits(states)[0, asked(row)]
        torch.testing.assert_close(logits, two_streams(model, row.raw, order), atol=1e-9, rtol=0)


def test_plm_chooses_short_spans_anywhere_and_asks_in_any_order():
    rows = make(3000, "plm", np.arange(100, 114), 14)  # two of twelve
    orders = [row.place[asked(row)] for row in rows]
    assert {*itertools.chain(*orders)} == {*range(12)}
    assert fair([bool(a < b) for a, b in orders], [True, False])
    assert 0.4 < np.mean([abs(a - b) == 1 for a, b in orders]) < 0.8  # by chance: 1 / 6


# ---- contrastive -------------------------------------------------------------------------------


def test_contrastive_crops_are_5_to_50_percent_of_a_chunk_anywhere():
    """All lengths are equally likely, and so are all places of each length. One crop says nothing
    about the other."""
    rows = make(4000, "contrastive", np.arange(20), 20)
    drawn = [(len(crop), int(crop[0])) for row in rows for crop in crops(row)]
    assert fair(drawn, {(n, i): 1 / (21 - n) for n in range(1, 11) for i in range(21 - n)})
    both = [tuple(int(crop[0]) // 7 for crop in crops(row)) for row in rows]
    first, second = (Counter(side) for side in zip(*both))
    assert fair(both, {(i, j): first[i] * second[j] for i in first for j in second})


def test_contrastive_loss_by_hand():
    """A crop's embedding is its mean state, read alone and without the padding; cosines are divided
    by 0.05; the loss is averaged over both directions."""
    model = awake(model_for("contrastive"))
    rows = draw(5, "contrastive")
    embeddings = [[], []]
    for row in rows:
        for i, crop in enumerate(crops(row)):
            states = model(torch.from_numpy(crop).long()[None], "full")[0]
            embeddings[i].append(F.normalize(states[0].mean(0), dim=0))
    first, second = map(torch.stack, embeddings)
    score = first @ second.T / 0.05
    want = -(score.log_softmax(1).diag() + score.log_softmax(0).diag()).mean() / 2
    means = means_of("contrastive", model, batch_of(rows))
    assert means["loss"] == pytest.approx(want.item(), rel=1e-3)
    right = (score.argmax(1) == torch.arange(5)).float().mean().item()
    assert means["retrieval_accuracy"] == pytest.approx(right)


def test_contrastive_guess_costs_ln_pairs():
    """So do identical embeddings."""
    model = awake(model_for("contrastive"))
    [row] = draw(1, "contrastive")
    means = means_of("contrastive", model, batch_of([row] * 16))
    assert means["loss"] == pytest.approx(math.log(16), rel=1e-5)
    assert means["retrieval_accuracy_baseline"] == 1 / 16


# ---- nsp and sop -------------------------------------------------------------------------------


def contiguous(ids) -> bool:
    """Whether these ids are adjacent in one document of the counting text."""
    pairs = itertools.pairwise(ids)
    return all(a // 32 == b // 32 and (a + 1 - b) % 32 == 0 for a, b in pairs)


def test_nsp_is_the_next_text_or_another_document():
    rows = draw(600, "nsp", text=counting(), T=40)
    for row in rows:
        A, B = sides(row)
        assert contiguous(A) and contiguous(B)
        assert contiguous(A + B) if row.extra == 1 else A[0] // 32 != B[0] // 32
    assert fair((int(row.extra) for row in rows), [0, 1])
    for row in draw(200, "nsp", text=text_of([range(200)]), T=23):  # the only document
        A, B = sides(row)
        assert B[0] == A[-1] + 1 if row.extra == 1 else abs(B[0] - A[-1]) > 10, "a distant place"


def test_sop_swaps_half_the_pairs_and_a_swapped_pair_unswaps_to_the_text():
    """In documents with sentences, and in documents without any."""
    prose = text_of(TOK.encode(document) for document, _ in stories.documents(50))
    for text in (prose, counting()):
        rows = draw(400, "sop", text=text, T=80)
        for row in rows:
            A, B = sides(row)
            in_order = A + B if row.extra == 1 else B + A
            assert np.array(in_order, text.tokens.dtype).tobytes() in text.tokens.tobytes()
        assert fair((int(row.extra) for row in rows), [0, 1])


@pytest.mark.parametrize("name", PAIRS)
def test_both_sides_have_a_token_however_short_the_documents(name):
    text = text_of([[97], [98, 99], [100], [101, 102, 103], [104]])
    assert all(map(sides, draw(200, name, text=text, T=16)))


@pytest.mark.parametrize("name", PAIRS)
def test_pair_loss_is_mlm_plus_the_label_judged_at_cls(name):
    model = awake(model_for(name))
    batch = batch_of(draw(8, name))
    read = []
    model.pair_head.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    means = means_of(name, model, batch)
    at_cls = model(batch.inputs, mask_of(model, batch))[0][:, 0]
    torch.testing.assert_close(read[0], at_cls)
    assert means["loss"] == pytest.approx(means["token_loss"] + means["pair_loss"], rel=1e-5)
    assert means["pair_accuracy_baseline"] == 0.5

    model.pair_head.register_forward_hook(lambda *_: 40.0 * batch.extra - 20.0)  # always right
    means = means_of(name, model, batch)
    assert means["pair_accuracy"] == 1 and means["pair_loss"] < 1e-6


def texts_without_order(name: str) -> dict[str, list[np.ndarray]]:
    """Documents of three kinds, as bytes."""
    rng = np.random.default_rng(0)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:80]
    letters = list(b"abcdefghij  .\n")
    documents = {
        "stories": [text.encode() for text, _ in stories.documents(2000)],
        "python": [file.read_bytes() for file in files],
        "letters": [bytes(rng.choice(letters, rng.integers(40, 200))) for _ in range(2000)],
    }[name]
    return [np.frombuffer(document, np.uint8) for document in documents]


def shuffled(documents, inside_each: bool, rng) -> Text:
    """The documents with their sentences in random order, inside each or over all of them."""
    split = [np.split(ids, objectives.sentence_ends(ids, TOK)) for ids in documents]
    if inside_each:
        split = [[sentences[i] for i in rng.permutation(len(sentences))] for sentences in split]
        return text_of(np.concatenate(sentences) for sentences in split)
    every = [sentence for sentences in split for sentence in sentences]
    order = iter(rng.permutation(len(every)))
    return text_of(np.concatenate([every[next(order)] for _ in sentences]) for sentences in split)


def features(row: Row) -> set[tuple]:
    """What a rule that reads no meaning may look at: the tokens of A and of B in any order, three
    tokens at each of their ends, each two of these across the [SEP], and lengths."""
    A, B = sides(row)
    seen = {(len(A) // 8, len(B) // 8), len(A) > len(B)}
    for name, side in (("A", A), ("B", B)):
        seen |= {(name, id) for id in side} | {(name, "length", len(side) // 4)}
        seen |= {(name, i, side[i]) for i in range(-3, 3) if len(side) >= 3}
    return seen | {(a, b, A[-a], B[b]) for a in (1, 2, 3)[: len(A)] for b in (0, 1, 2)[: len(B)]}


def learned_accuracy(rows: list[Row]) -> float:
    """How often a network with one hidden layer, trained on three quarters of the rows, finds the
    label of the others."""
    ids = {}  # of each feature
    bags = [torch.tensor([ids.setdefault(f, len(ids)) for f in features(row)]) for row in rows]
    label = torch.tensor([float(row.extra) for row in rows])
    n = len(rows) * 3 // 4
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.EmbeddingBag(len(ids), 32, mode="sum"), torch.nn.GELU(), torch.nn.Linear(32, 1)
    )
    torch.nn.init.normal_(network[0].weight, std=0.1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.1)

    def judge(some) -> torch.Tensor:
        starts = np.cumsum([0, *(len(bags[i]) for i in some)])[:-1]
        summed = network[0](torch.cat([bags[i] for i in some]), torch.from_numpy(starts))
        return network[1:](summed)[:, 0]

    for _ in range(12):
        for some in torch.randperm(n).split(32):
            loss = F.binary_cross_entropy_with_logits(judge(some), label[some])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return ((judge(range(n, len(rows))) > 0) == (label[n:] > 0)).float().mean().item()


@pytest.mark.parametrize("kind", ["stories", "python", "letters"])
@pytest.mark.parametrize("name", PAIRS)
def test_nothing_but_content_tells_whether_two_texts_belong_together(name, kind):
    """If sentences come in random order, neither order nor succession means anything: what is still
    found is told by the cut, the lengths, or what stands around them."""
    documents = texts_without_order(kind)
    rows = []
    for seed in range(4):  # the last quarter is the test: in an order that was never seen
        text = shuffled(documents, name == "sop", np.random.default_rng(seed))
        rows += draw(500, name, text=text, step=seed, T=128)
    assert learned_accuracy(rows) < 0.57


@pytest.mark.parametrize("name", PAIRS)
def test_content_tells_whether_two_texts_belong_together(name):
    """nsp: each document has one letter of its own. sop: the letters come in alphabetical order."""
    rng = np.random.default_rng(0)
    letters = [sorted("abcdefgh")] * 50 if name == "sop" else [c * 9 for c in "abc"]
    documents = [" ".join(f"{c * rng.integers(2, 9)}." for c in each) for each in letters]
    rows = draw(2000, name, text=text_of(map(TOK.encode, documents)), T=64)
    assert learned_accuracy(rows) > 0.95


# ---- span --------------------------------------------------------------------------------------


def undo_spans(source: list[int], target: list[int]) -> list[int]:
    """The text: each sentinel in the source replaced by what follows it in the target. ul2's mode
    is left out."""
    if source[0] == TOK.S:
        return source[1:] + target
    source = [i for i in source if i not in (TOK.R, TOK.X)]
    spans = {}
    for i in target:
        if i >= TOK.sentinel:
            assert i == TOK.sentinel + len(spans)
            span = spans[i] = []
        else:
            span.append(i)
    assert [i for i in source if i >= TOK.sentinel] == list(spans)
    return [j for i in source for j in spans.get(i, [i])]


@pytest.mark.parametrize("rate, mean, T", [(0.15, 3.0, 128), (0.5, 3.0, 100), (0.3, 64.0, 300)])
def test_span_hides_the_rate_on_average_in_spans_of_the_mean_length(rate, mean, T):
    """Each row has a rate of its own, uniform up to twice the knob. Every span has a token, as has
    every gap between two."""
    shares = []
    knobs = dict(corruption_rate=rate, mean_span=mean)
    for source, target in make_pairs(2000, "span", np.arange(T) % 256, T, **knobs):
        text = undo_spans(source, target)
        assert text == [(text[0] + i) % 256 for i in range(len(text))]
        spans = sum(i >= TOK.sentinel for i in source)
        noise = len(target) - spans
        assert spans == min(max(1, round(noise / mean)), len(text) - noise + 1)
        for side in (source, [*target, TOK.sentinel]):
            assert all(min(two) < TOK.sentinel for two in itertools.pairwise(side))
        if len(text) > T // 2:
            shares.append(noise / len(text))
    assert max(shares) < 2 * rate + 0.01 and np.mean(shares) == pytest.approx(rate, rel=0.15)


def test_span_arrangements_are_equally_likely():
    """Ten tokens, four of them noise in two spans: all patterns of two runs, and no others."""
    patterns = []
    for bits in itertools.product([False, True], repeat=10):
        runs = sum(b and not a for a, b in itertools.pairwise((False, *bits)))
        if sum(bits) == 4 and runs == 2:
            patterns.append(bits)
    assert len(patterns) == 63
    knobs = dict(corruption_rate=0.4, mean_span=2.0)
    pairs = make_pairs(20_000, "span", window(range(10), 15), 15, **knobs)
    drawn = [tuple(i not in source for i in range(10)) for source, _ in pairs]
    assert fair((bits for bits in drawn if sum(bits) == 4), patterns)


# ---- ul2 ---------------------------------------------------------------------------------------


def test_ul2_draws_the_papers_denoisers():
    """The modes at their shares, with spans of the mean lengths of Tay et al. 2022, table 1, and at
    most twice its rates. A suffix begins anywhere in the middle half."""
    modes = []
    lengths = {TOK.R: set(), TOK.X: set()}
    for source, target in make_pairs(3000, "ul2", np.arange(256), 256):
        modes.append(source[0])
        if source[0] == TOK.S:
            n = len(source) - 1 + len(target)
            assert n // 4 <= len(source) - 1 <= -(-3 * n // 4)
            continue
        spans = sum(i >= TOK.sentinel for i in target)
        noise = len(target) - spans
        n = len(source) - 1 - spans + noise
        assert noise <= max(round(n * {TOK.R: 0.3, TOK.X: 1.0}[source[0]]), 1)
        means = {TOK.R: (3, 8), TOK.X: (3, 8, 64)}[source[0]]
        fitting = [m for m in means if spans == min(max(1, round(noise / m)), n - noise + 1)]
        assert fitting
        if len(fitting) == 1:
            lengths[source[0]] |= {*fitting}
    assert fair(modes, {TOK.R: 0.5, TOK.S: 0.25, TOK.X: 0.25})
    assert lengths == {TOK.R: {3, 8}, TOK.X: {3, 8, 64}}


def test_ul2_asks_for_the_end_of_a_text_only_where_its_document_ends():
    """Otherwise a model would learn that text may stop anywhere."""
    known = documents(letters(5, 30).tokens)
    n_ends = Counter()
    for row in draw(200, "ul2", text=letters(5, 30)):
        for number, (source, target) in enumerate(examples(row), 1):
            if source[0] == TOK.S:
                is_whole = source[1:] + target in known
                asks = bool(row.targets[row.segment == number][-1] == TOK.EOT)
                assert asks == is_whole or number == 1  # the first may be the end of a document
                n_ends[asks] += 1
    assert min(n_ends[True], n_ends[False]) > 10


# ---- bart --------------------------------------------------------------------------------------


def test_bart_infills_exactly_30_percent_with_poisson_lengths():
    """The text counts, so the numbers missing between two clean tokens give the length of the span
    between them, 0 included."""
    lengths = []
    for source, target in make_pairs(30, "bart", np.arange(4000) % 256, 4000, bart_noise="infill"):
        assert target == [(target[0] + i) % 256 for i in range(len(target))]
        clean = sum(i != TOK.MASK for i in source)
        assert len(target) - clean == round(0.3 * len(target))
        for before, here, after in zip(source, source[1:], source[2:]):
            if here == TOK.MASK and TOK.MASK not in (before, after):
                lengths.append((after - before - 1) % 256)
    poisson = [math.exp(-3) * 3**k / math.factorial(k) for k in range(9)]
    shares = dict(enumerate([*poisson, 1 - sum(poisson)]))
    assert fair((min(length, 9) for length in lengths), shares)


SENTENCES = [
    ["One.", " Two!\n\n", "Is it 3.5 or a.b?"],
    ['"The sun is up."', ' "Are you there?" he asks.', " (He waits.)"],
    ["„Ja.“", " «Où ça ?»", ' Say "it is 3.5."'],
    ["सूरज उगता है।", " पक्षी गाते हैं।", "हवा चलती है॥"],
    ["سورج نکل آیا۔", " کیا پرندے گاتے ہیں؟", " ہوا چلتی ہے۔"],
    ["太阳出来了。", "他说：「鸟在唱！？」", "“风很大。”"],
]


@pytest.mark.parametrize("sentences", SENTENCES)
def test_bart_permutes_whole_sentences(sentences):
    """Every order is as likely as any other, and the target is the original."""
    text = "".join(sentences)
    ids = TOK.encode(text)
    T = 2 * len(ids) + 1
    pairs = make_pairs(1000, "bart", window(ids, T), T, bart_noise="permute")
    orders = ["".join(order) for order in itertools.permutations(sentences)]
    assert fair((TOK.decode(source) for source, _ in pairs), orders)
    assert {TOK.decode(target) for _, target in pairs} == {text}


def test_bart_deletes_30_percent_and_rotates_anywhere_and_asks_for_the_original():
    pairs = make_pairs(1500, "bart", window(range(20), 35), 35, bart_noise="delete")
    assert all(len(source) == 14 and source == sorted(source) for source, _ in pairs)
    assert fair((i for source, _ in pairs for i in source), range(20))
    rotated = make_pairs(1500, "bart", window(range(20), 41), 41, bart_noise="rotate")
    assert all(source == [(source[0] + i) % 20 for i in range(20)] for source, _ in rotated)
    assert fair((source[0] for source, _ in rotated), range(20))
    assert all(target == list(range(20)) for _, target in pairs + rotated)


# ---- all objectives: rows ----------------------------------------------------------------------


@pytest.mark.parametrize("name", OBJECTIVES)
def test_segments_prefixes_and_weights(name):
    """Segments are numbered 1, 2, ...; padding is 0 and comes last. In each segment, groups are all
    0, all 1, or 1 and then 0; block and plm have private ones, too. Weights are 1, except those of
    the bounds. Only block and plm read a text in another order than its own."""
    kinds = {
        "causal": "0+",
        "prefix": "1+0*",
        "full": "1+",
        "block": "(-+0+)+",
        "permuted": "1*(-0)+",
    }
    for row in draw(32, name, T=50):
        assert {len(array) for array in row[:6]} == {50}
        assert (row.weights == 1).all() or name in BOUNDS
        assert ((row.segment == 0) == (row.inputs == TOK.PAD)).all()
        used = row.segment[row.segment > 0]
        assert used[0] == 1 and set(np.diff(used)) <= {0, 1}
        assert (row.segment[len(used) :] == 0).all()
        for number in range(1, used[-1] + 1):
            groups = "".join("-01"[np.sign(g) + 1] for g in row.group[row.segment == number])
            assert re.fullmatch(kinds[OBJECTIVES[name].attention], groups)
        assert (row.place == np.arange(50)).all() or name in ("block", "plm")


def supervised(name: str, row: Row) -> np.ndarray:
    """(T,) bool: the positions that must have a target, as the row's other arrays tell."""
    if name in ("clm", "mtp", "fim"):
        return row.segment > 0
    if name == "cm3":
        return (row.segment > 0) & np.append(row.inputs[1:] < TOK.sentinel, asked(row)[-1])
    if name == "contrastive":
        return np.zeros(len(row.inputs), bool)
    if name in (*BOUNDS, "plm"):
        is_clean = (row.group == 0) & (row.segment > 0)
        return (row.inputs == TOK.MASK) | (is_clean if name == "block" else False)
    # A source or a prefix ends with the position that predicts the first token after it.
    prefix_goes_on = row.group[1:].astype(bool) & (row.segment[1:] == row.segment[:-1])
    return (row.segment > 0) & ~np.append(prefix_goes_on, False)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_exactly_the_right_positions_are_asked_for_the_right_tokens(name):
    """Read from left to right, a position's target is the next token of its segment; read both
    ways, it is the position's own token. (How many mlm masks: see its section.)"""
    for row in draw(64, name, T=80):
        if OBJECTIVES[name].attention != "full" or name in ("diffusion", "contrastive"):
            assert (asked(row) == supervised(name, row)).all()
        if OBJECTIVES[name].attention in ("full", "block", "permuted"):
            masked = row.inputs == TOK.MASK
            assert asked(row)[np.append(masked[1:], False) if name == "mntp" else masked].all()
        else:
            targets = row.targets.reshape(80, -1)[:-1, 0]
            next_in_segment = (row.segment[1:] == row.segment[:-1]) & asked(row)[:-1]
            assert (targets == row.inputs[1:])[next_in_segment].all()


def undone(name: str, row: Row) -> list[list[int]]:
    """The documents of a row, told from its inputs and targets."""
    if name == "bart":
        return [target for _, target in examples(row)]
    if name in ("span", "ul2"):
        return [undo_spans(source, target) for source, target in examples(row)]
    if name == "cm3":
        return [[i for parts in parts_of_cm3(row) for i in undo_cm3(*parts)]]
    if OBJECTIVES[name].attention == "full":
        return documents(original(row, name))
    return documents(np.array(whole(row)))


@pytest.mark.parametrize(
    "name, knobs",
    [
        (name, {})
        for name in OBJECTIVES
        if name not in ("fim", "contrastive", "block", "plm", *PAIRS)
    ]
    + [("span", {"corruption_rate": 0.5, "mean_span": 1.0}), ("clm", {"doc_mask": True})]
    + [("bart", {"bart_noise": "rotate,infill,delete,permute"})],
)
def test_the_original_text_comes_back(name, knobs):
    """A row holds what it says (`raw`): documents of the text, or pieces of them."""
    text = letters(2, 60)
    known = documents(text.tokens)
    for row in draw(64, name, text, T=80, **knobs):
        found = undone(name, row)
        assert found == (documents(row.raw) if name != "cm3" else [no_eot(row.raw)])
        for document in documents(row.raw):
            assert any(bytes(document) in bytes(one) for one in known)


@pytest.mark.parametrize("name", ["fim", "cm3", "span", "ul2", "bart"])
def test_the_shape_of_a_row_tells_nothing(name):
    """In one endless document: where a segment's last EOT stands varies, and so do a segment's
    length, its number of gaps and how much it asks for."""
    endless = Text((np.arange(20_000) % 200).astype(np.uint16), TOK.EOT)
    ends, lengths, gaps, amounts = [], set(), set(), set()
    for row in draw(1500, name, text=endless, T=128):
        for number in range(1, row.segment.max() + 1):
            [here] = np.nonzero(row.segment == number)
            [eot] = np.nonzero(row.targets[here] == TOK.EOT)
            ends += [eot[-1]] if len(eot) else []
            lengths.add(len(here))
            gaps.add(np.isin(row.inputs[here], [TOK.MASK, TOK.MID]).sum())
            gaps.add((row.inputs[here] >= TOK.sentinel).sum())
            amounts.add((row.targets[here] != IGNORE).sum())
    assert len(ends) > 1000
    counts, _ = np.histogram(ends, bins=16, range=(0, 128))
    assert counts.max() / len(ends) < 0.2
    assert len(gaps) >= 4
    if name in ("span", "ul2", "bart"):  # elsewhere a segment is the whole row
        assert len(lengths) > 50 and len(amounts) > 10


@pytest.mark.parametrize("name", OBJECTIVES)
def test_rows_are_filled(name):
    """At most a hundredth of all positions is padding, except with pieces that have an end, with
    two sides and with crops."""
    most = {"nsp": 0.2, "sop": 0.25, "contrastive": 0.6}.get(name, 0.01)
    most = {"span": 0.08, "ul2": 0.08, "bart": 0.12}.get(name, most)
    padded = [(row.segment == 0).mean() for row in draw(64, name, letters(50, 3000), T=256)]
    assert np.mean(padded) <= most


# ---- all objectives: randomness ----------------------------------------------------------------


@pytest.mark.parametrize("name", [*OBJECTIVES, "clm:0.4,fim:0.2,ul2:0.2,mlm:0.2"])
def test_rows_depend_on_seed_split_step_and_number_alone(name):
    def rows_of(seed=1, split=TRAIN, step=0):
        source = source_of(name, seed=seed)
        return [draw_row(source, split, step, number, 8)[0] for number in range(8)]

    def same(first, second):
        return all(map(np.array_equal, first, second))

    rows = rows_of()
    assert all(map(same, rows, rows_of()))
    for others in (rows_of(seed=2), rows_of(split=VALIDATION), rows_of(step=1), rows[1:]):
        assert not any(map(same, rows, others))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_corruption_never_writes_to_its_input(name):
    """Which may be a part of a memory-mapped, read-only corpus: NumPy raises if anything does."""
    example = OBJECTIVES[name].draw(letters(), np.random.default_rng(0), 48, Knobs())
    for part in [example] if isinstance(example, np.ndarray) else example:
        part.setflags(write=False)
    example = (example, 0.5) if OBJECTIVES[name].has_t else example
    make(5, name, example, 48)


# ---- all objectives: no leak -------------------------------------------------------------------


def moved(states_of, ids: torch.Tensor) -> np.ndarray:
    """(T,) ids -> (T, T): whether the state at q (down) changes with the token at k (across)."""
    T = len(ids)
    changed = ids.repeat(T + 1, 1)  # the last row stays as it is
    changed[range(T), range(T)] = (ids + 1) % TOK.n_ordinary
    with torch.no_grad():
        states = states_of(changed)
    difference = (states[:T] - states[T]).abs().amax(-1)
    return (difference > 1e-9).T.numpy()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_nothing_leaks(name):
    """In the whole model, a state changes with every token that the rule lets it see, and with no
    other: above all not with its own target."""
    model = awake(model_for(name), torch.float64)
    for row in draw(4, name, T=40):
        batch = batch_of([row])
        n = batch.inputs.shape[1]  # without the padding
        allowed = may_see(row)[:n, :n]
        readers = [model.trunk]
        if name == "electra":
            readers.append(model.generator_states)
        for states_of in readers:
            where = {} if batch.place is None else {"place": batch.place}
            reader = functools.partial(states_of, mask=mask_of(model, batch), **where)
            moves = moved(reader, batch.inputs[0])
            assert (moves == allowed)[row.segment[:n] > 0].all(), "may_see says something else"
        if OBJECTIVES[name].attention in ("causal", "prefix"):  # the target is the row's next token
            q = np.flatnonzero(asked(row)[:-1] & (row.segment[1:] == row.segment[:-1]))
            assert len(q) > 0 and not may_see(row)[q, q + 1].any()


@pytest.mark.parametrize("kind", ["linear", "parallel", "chain"])
def test_no_horizon_sees_its_answer(kind):
    """Horizon k at position t has read x[..t], and in a chain also x[t+1] ... x[t+k-1], but never
    x[t+k]."""
    model = awake(model_for("mtp", Knobs(mtp_heads=kind)), torch.float64)
    T, n = 12, 4

    def horizon(ids, k):
        ahead = torch.stack([ids[:, i : i + T] for i in range(1, n)], dim=-1)
        state = model(ids[:, :T], ahead=ahead)[k - 1]
        return F.pad(state, (0, 0, 0, n))

    ids = torch.arange(97, 97 + T + n)
    for k in range(1, n + 1):
        later = k - 1 if kind == "chain" else 0
        want = np.tri(T, T + n, later, dtype=bool)
        assert (moved(functools.partial(horizon, k=k), ids)[:T] == want).all()


# ---- all objectives: losses --------------------------------------------------------------------


@pytest.mark.parametrize("name", OBJECTIVES)
def test_overfits_one_batch(name):
    batch = batch_of(draw(4, name, T=24))
    model = model_for(name, n_embd=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0)
    losses = []
    for _ in range(120):
        loss = total_loss(metrics_of(name, model, batch))
        losses.append(loss.item())
        if losses[-1] < 0.1 * losses[0]:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pytest.fail(f"from {losses[0]:.3f} only to {losses[-1]:.3f}")


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "contrastive"])
@pytest.mark.parametrize("config", [{}, {"n_embd": 256, "tied": True}], ids=["untied", "tied"])
def test_first_loss_is_that_of_a_uniform_guess(name, config):
    """With a tied embedding and a final norm of weight 1, each position would predict its own
    input, and the loss would be twice as high."""
    batch = batch_of(draw(32, name, **NO_CONTEXT.get(name, {})))
    means = means_of(name, model_for(name, **config), batch)
    want = math.log(TOK.vocab_size)
    if name in BOUNDS:  # [MASK] is never predicted; the mean is over all positions read both ways
        want = math.log(TOK.vocab_size - 1) * (batch.weights.sum() / batch.total_weight).item()
    assert means["token_loss"] == pytest.approx(want, rel=0.05 if config else 0.01)
    for binary in ("pair_loss", "detect_loss"):
        assert means.get(binary, math.log(2)) == pytest.approx(math.log(2), rel=0.01)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_batch_without_targets_costs_nothing(name):
    """0, not NaN: neither the tokens' loss nor any gradient."""
    rows = [row._replace(targets=np.full_like(row.targets, IGNORE)) for row in draw(8, name)]
    model = model_for(name)
    metrics = metrics_of(name, model, batch_of(rows))
    loss = total_loss(metrics)
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert loss.item() == 0 or (loss.isfinite() and name in ("electra", "contrastive", *PAIRS))
    assert name == "contrastive" or metrics["token_loss"].sum == 0


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "contrastive"])
def test_sums_do_not_depend_on_the_batch_size(name):
    """So the validation loss depends on neither accumulation nor the number of processes. A row
    that is rebuilt alone is the row of the batch."""
    model = awake(model_for(name))

    def totals(size):
        sums = Counter()
        for start in range(0, 12, size):
            numbers = range(start, start + size)
            batch = make_batch(source_of(name), VALIDATION, 0, numbers, n_rows=12)
            for key, metric in metrics_of(name, model, batch).items():
                sums[f"{key}, sum"] += metric.sum.item()
                sums[f"{key}, divisor"] += metric.divisor.item()
        return sums

    assert totals(1) == pytest.approx(totals(12), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if OBJECTIVES[name].likelihood])
def test_bits_per_byte_counts_the_bytes_of_the_very_targets(name):
    """Tokens are not of the average length. A bound is on the whole text and counts its bytes."""
    texts = [PROSE[i : i + 40] for i in range(0, 120, 20)] + ["plain ascii text", "漢字と仮名"]
    rows = draw(8, name, text_of(map(BPE.encode, texts), BPE), T=16, tok=BPE)
    model = awake(model_for(name, vocab_size=BPE.vocab_size))
    metrics = metrics_of(name, model, batch_of(rows, BPE), BPE)
    answers = [row.targets.reshape(16, -1)[asked(row), 0] for row in rows]
    if name in BOUNDS:
        answers = [row.raw for row in rows]
    ids = np.concatenate(answers)
    bits = metrics["bits_per_byte"]
    assert bits.divisor == len(BPE.decode_bytes(ids[ids < BPE.n_ordinary]))
    nats = metrics["token_loss"].sum.item()
    assert bits.sum.item() == pytest.approx(nats / math.log(2), rel=1e-5)


# ---- mixtures ----------------------------------------------------------------------------------

THREE = "clm:1,prefix:0.6,mlm:0.4"


def test_mixture_draws_its_shares():
    assert parse_mixture(THREE) == {"clm": 0.5, "prefix": 0.3, "mlm": 0.2}
    source = source_of(THREE, T=16)
    drawn = [draw_row(source, TRAIN, 0, number, 3000) for number in range(3000)]
    assert fair((member for _, member in drawn), {0: 5, 1: 3, 2: 2})
    for row, member in drawn:
        assert member == (2 if row.group.all() else int(row.group.any()))


def test_mixture_logs_the_loss_of_each_member():
    """Also of a member that has no row in a batch."""
    model = awake(model_for("clm"))
    batch = make_batch(source_of(THREE, T=16), TRAIN, 0, range(32), 32)
    metrics = metrics_of("clm", model, batch)
    by_member = sum(metrics[f"loss_{name}"].sum for name in ("clm", "prefix", "mlm"))
    assert by_member.item() == pytest.approx(metrics["token_loss"].sum.item(), rel=1e-5)
    prefixes = [row for row in draw(32, THREE, T=16) if row.group.any() and not row.group.all()]
    alone = means_of("prefix", model, batch_of(prefixes))["loss"]
    logged = metrics["loss_prefix"]
    assert (logged.sum / logged.divisor).item() == pytest.approx(alone, rel=1e-5)

    batch = make_batch(source_of("clm:0.99,mlm:0.01", T=16), TRAIN, 0, range(2), n_rows=2)
    metrics = metrics_of("clm", model, batch)
    assert metrics["loss_mlm"].divisor == 0 and total_loss(metrics).isfinite()


# ---- mistakes ----------------------------------------------------------------------------------

# fmt: off
REFUSED = [  # objective, T, knobs, what the line must name
    ("mlm", 256, {"mask_rate": 0.0}, "--mask_rate"),
    ("mlm", 256, {"mask_rate": math.nan}, "--mask_rate"),
    ("prefix", 256, {"prefix_frac": 1.0}, "--prefix_frac"),
    ("fim", 256, {"fim_rate": 1.1}, "--fim_rate"),
    ("fim", 256, {"fim_layouts": "pms"}, "did you mean"),
    ("fim", 256, {"fim_layouts": "psm,psm"}, "--fim_layouts"),
    ("bart", 256, {"bart_noise": "zebra"}, "--bart_noise"),
    ("mtp", 256, {"n_future": 0}, "--n_future"),
    ("mtp", 256, {"mtp_heads": "serial"}, "--mtp_heads"),
    ("span", 1157, {"corruption_rate": 0.4, "mean_span": 1.0}, "--mean_span"),  # 257 sentinels
    ("clm,ul2", 8192, {}, "UL2"),  # too few sentinels
    ("fmi", 256, {}, "fim"),
    ("clm:", 256, {}, "clm"),
    ("clm:-1", 256, {}, "clm"),
    ("clm:nan", 256, {}, "clm"),
    ("clm,clm", 256, {}, "clm"),
    ("clm:0.5,span", 256, {}, "share"),
    *[(f"{name},prefix", 256, {}, "cannot be mixed") for name in OBJECTIVES if name not in MIXABLE],
]
# fmt: on


@pytest.mark.parametrize("spec, T, knobs, words", REFUSED)
def test_refused_in_one_line_that_names_the_remedy(spec, T, knobs, words):
    with pytest.raises(UserError) as raised:
        check_knobs(parse_mixture(spec), build(Knobs, knobs), knobs, T)
    assert words in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_own_knobs_pass_and_a_knob_that_nobody_reads_is_refused(name):
    check_knobs({name: 1.0}, Knobs(), OBJECTIVES[name].knobs, 256)
    for knob in set(vars(Knobs())) - set(OBJECTIVES[name].knobs):
        with pytest.raises(UserError, match=f"--{knob}"):
            check_knobs({name: 1.0}, Knobs(), {knob}, 256)
