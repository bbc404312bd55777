"""test_objectives.py: what each objective promises, as executable tests.

First the worked examples of the docstrings. Then one section for each objective: what is predicted,
how the original text can be recovered, and the distributions that the papers specify. Then what all
objectives promise, mixtures, and mistakes.

Models of two blocks read random letters on the CPU. Every draw is seeded, so a test that passes
once passes always. Left out: how well anything trains, GPUs, the command lines.

    pytest test_objectives.py
    pytest test_objectives.py -k "span or leak"
"""

import dataclasses
import doctest
import functools
import itertools
import math
import re
import sysconfig
from collections import Counter, defaultdict
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import data
import mixture as mixture_file
import model as model_file
import objectives
import sentences as sentences_file
from config import UserError, build
from data import IGNORE, Row, Text, collate
from mixture import (
    TRAIN,
    VALIDATION,
    Source,
    check_knobs,
    check_text,
    draw_row,
    make_batch,
    parse_mixture,
    with_heads,
)
from model import ModelConfig, Transformer
from objectives import OBJECTIVES, UL2, Knobs, attention_mask, info_nce, split_documents, total_loss
from sentences import bounds_alike
from tokenizer import N_SENTINELS, get_tokenizer

PROSE = "The naïve café — 漢字と仮名。 Ça va? Ευχαριστώ! 😀👍 Tschüß, señor…\n" * 3
TOK = get_tokenizer("bytes")
BPE = get_tokenizer("bpe:330", [PROSE])
PACKED = ("span", "ul2", "bart")  # [source EOT][target EOT]
PAIRS = ("nsp", "sop")
MIXTURE = "clm:0.4,fim:0.2,ul2:0.2,mlm:0.2"


# ---- texts -------------------------------------------------------------------------------------


def text_of(documents, tok=TOK) -> Text:
    ids = [np.append(document, tok.EOT) for document in documents]
    return Text(np.concatenate(ids).astype(np.uint16), tok.EOT)


def ids_of(string: str) -> np.ndarray:
    """One id for each character; `$` is EOT."""
    ids = [TOK.EOT if character == "$" else ord(character) for character in string]
    return np.array(ids, np.int32)


@functools.cache
def letters(low: int = 20, high: int = 90) -> Text:
    """Sixty documents of `low` to `high` random letters, spaces, full stops and newlines."""
    dice = np.random.default_rng(0)
    alphabet = list(b"abcdefghij  .\n")
    lengths = dice.integers(low, high + 1, 60)
    return text_of(dice.choice(alphabet, length) for length in lengths)


def counting(length: int) -> Text:
    """Seven documents that count: document d holds 32d, 32d + 1, ...; after 32 ids it repeats."""
    return text_of(32 * d + np.arange(length) % 32 for d in range(7))


def contiguous(ids) -> bool:
    """Whether these ids are adjacent in one document of the counting text."""
    for first, second in itertools.pairwise(ids):
        if first // 32 != second // 32 or (first + 1 - second) % 32 != 0:
            return False
    return True


@functools.cache
def python_source() -> Text:
    """Some of Python's standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:80]
    return text_of(np.frombuffer(file.read_bytes(), np.uint8) for file in files)


# ---- rows --------------------------------------------------------------------------------------


def source_of(name: str, text=None, T: int = 48, seed=1, tok=TOK, **knobs) -> Source:
    return Source(parse_mixture(name), text or letters(), tok, T, Knobs(**knobs), seed)


def draw(n: int, name: str, text=None, T: int = 48, step=0, **others) -> list[Row]:
    """The n rows of a step, drawn from a text."""
    source = source_of(name, text, T, **others)
    return [draw_row(source, TRAIN, step, number, n)[0] for number in range(n)]


def make(n: int, name: str, example, T: int, tok=TOK, **knobs) -> list[Row]:
    """n rows that an objective makes from the same example."""
    rng = np.random.default_rng(0)
    return [OBJECTIVES[name].row(example, rng, tok, T, Knobs(**knobs)) for _ in range(n)]


def window(ids, T: int) -> np.ndarray:
    """A window of T tokens: a document of these ids, then documents of one token each."""
    filler = [TOK.EOT, 0] * T
    return np.array([*ids, *filler][:T], np.int32)


def asked(row: Row) -> np.ndarray:
    """(T,) bool: which positions have a target."""
    return row.targets.reshape(len(row.inputs), -1)[:, 0] != IGNORE


def original(row: Row) -> np.ndarray:
    """The text of a row with its masks undone: the target where there is one, else the input."""
    return np.where(row.targets != IGNORE, row.targets, row.inputs)


def read_and_predicted(row: Row) -> list[int]:
    """All ids of a row without its padding, and the target of the last position."""
    end = (row.segment > 0).sum()
    ids = [*row.inputs[:end].tolist(), int(row.targets[end - 1])]
    return [i for i in ids if i != IGNORE]


def examples(row: Row) -> list[tuple[list[int], list[int]]]:
    """The (source, target) pairs of a row, without the EOT of each side. (In ul2's [S] mode, a
    target has an EOT only if it reaches the end of its document.)"""
    pairs = []
    for number in range(1, row.segment.max() + 1):
        here = row.segment == number
        ids = row.inputs[here].tolist()
        ids.append(int(row.targets[here][-1]))
        end = row.prefix[here].sum()
        goes_on = ids[0] == TOK.S and ids[-1] != TOK.EOT
        assert ids[end - 1] == TOK.EOT and (ids[-1] == TOK.EOT or goes_on)
        assert ids.count(TOK.EOT) == 2 - goes_on
        pairs.append((ids[: end - 1], ids[end:] if goes_on else ids[end:-1]))
    return pairs


def first_examples(rows: list[Row]) -> list[tuple[list[int], list[int]]]:
    return [examples(row)[0] for row in rows]


def sides(row: Row) -> tuple[list[int], list[int]]:
    """A and B of [CLS] A [SEP] B [SEP]."""
    ids = [i for i in original(row).tolist() if i != TOK.PAD]
    middle = ids.index(TOK.SEP)
    assert ids[0] == TOK.CLS and ids[-1] == TOK.SEP
    assert ids.count(TOK.SEP) == 2
    return ids[1:middle], ids[middle + 1 : -1]


def may_see(row: Row) -> np.ndarray:
    """The attention rule, pair by pair: (T, T), query down, key across."""
    T = len(row.inputs)
    allowed = np.zeros((T, T), bool)
    for q, k in np.ndindex(T, T):
        both_in_prefix = row.prefix[q] and row.prefix[k]
        allowed[q, k] = row.segment[q] == row.segment[k] and (k <= q or both_in_prefix)
    return allowed


# ---- models ------------------------------------------------------------------------------------


def model_for(name: str, tok=TOK, knobs=None, **config) -> Transformer:
    torch.manual_seed(0)
    size = dict(n_layer=2, n_head=2, head_dim=16, n_embd=32) | config
    shape = ModelConfig(vocab_size=tok.vocab_size, **size)
    return Transformer(with_heads(shape, parse_mixture(name), knobs or Knobs()))


def awake(model: Transformer, dtype=torch.float32) -> Transformer:
    """Give every matrix random numbers, even those that are initialized to zero or nearly so."""
    generator = torch.Generator().manual_seed(0)
    for name, p in model.to(dtype).named_parameters():
        if p.ndim > 1 and "norm" not in name:
            torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5, generator=generator)
    return model


def batch_of(rows: list[Row], tok=TOK) -> data.Batch:
    return collate(rows, tok.n_bytes)


def parts_of(name: str, model, batch, tok=TOK, **knobs) -> dict:
    first = next(iter(parse_mixture(name)))
    return OBJECTIVES[first].loss(model, batch, tok, Knobs(**knobs))


def figures_of(name: str, model, batch, **knobs) -> dict[str, float]:
    """The mean of each metric, and the total loss."""
    parts = parts_of(name, model, batch, **knobs)
    means = {key: (part.sum / part.divisor).item() for key, part in parts.items()}
    return means | {"loss": total_loss(parts).item()}


# ---- statistics --------------------------------------------------------------------------------


def chi_square_fits(observed: np.ndarray, expected: np.ndarray, freedom: int) -> bool:
    """Pearson's test. By chance alone, the limit is exceeded three times in 100,000 (Wilson and
    Hilferty 1931)."""
    assert expected.min() >= 5, "too few draws for this test"
    unit = 2 / (9 * freedom)
    limit = freedom * (1 - unit + 4 * unit**0.5) ** 3
    return ((observed - expected) ** 2 / expected).sum() < limit


def fair(observed, shares=1.0) -> bool:
    """Whether the counts agree with these shares."""
    observed = np.asarray(observed, float).ravel()
    shares = np.broadcast_to(np.asarray(shares, float).ravel(), observed.shape)
    expected = shares / shares.sum() * observed.sum()
    return chi_square_fits(observed, expected, len(observed) - 1)


def same_distribution(first: list, second: list) -> bool:
    """Whether two samples can be from one distribution. Rare values are counted together."""
    counts = Counter(first), Counter(second)
    common = [thing for thing, n in (counts[0] + counts[1]).items() if n >= 50]
    table = np.array([[count[thing] for thing in common] for count in counts], float)
    rare = np.array([len(first), len(second)]) - table.sum(1)
    if rare.sum() >= 50:
        table = np.column_stack([table, rare])
    expected = table.sum(1, keepdims=True) * table.sum(0) / table.sum()
    return chi_square_fits(table, expected, table.shape[1] - 1)


def tally(values, keys) -> list[int]:
    """How often each of `keys` occurs among `values`, which may hold nothing else."""
    count = Counter(values)
    keys = list(keys)
    assert set(count) <= set(keys), f"unexpected: {set(count) - set(keys)}"
    return [count[key] for key in keys]


def learned_accuracy(rows: list[Row], tokens_of, n_train: int) -> float:
    """How often a logistic regression on some tokens of a row predicts its label correctly.

    `tokens_of(row)` gives equally many numbers for every row. The regression is trained on the
    first n_train rows and tested on the others."""
    seen = np.array([tokens_of(row) for row in rows])
    places = np.arange(seen.shape[1]) * (seen.max() + 1)
    feature = torch.from_numpy(seen + places)  # one feature for each number at each place
    label = torch.tensor([int(row.extra) for row in rows])
    learn = slice(None, n_train)
    test = slice(n_train, None)

    weight = torch.zeros(int(feature.max()) + 1, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=0.02, weight_decay=0.1)
    for _ in range(60):
        score = weight[feature[learn]].sum(1)
        loss = F.binary_cross_entropy_with_logits(score, label[learn].float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    guess = weight[feature[test]].sum(1) > 0
    return (guess == label[test]).float().mean().item()


def majority_accuracy(rows: list[Row], seen_in, n_train: int) -> float:
    """The same for a rule that predicts the most common label of the training rows with an equal
    `seen_in(row)`."""
    counts = defaultdict(lambda: np.zeros(2))
    for row in rows[:n_train]:
        counts[seen_in(row)][row.extra] += 1
    return np.mean([counts[seen_in(row)].argmax() == row.extra for row in rows[n_train:]])


# ---- the worked examples of the docstrings -----------------------------------------------------

# fmt: off
# objective, its example ($ is EOT), T, knobs,
# and the docstring's words, whose fields in braces are filled in from the drawn row.
WORKED_EXAMPLES = [
    ("clm", "abcd", 3, {},
     "abcd -> inputs {inputs}, targets {targets}"),
    ("clm", "ab$cd", 4, {"doc_mask": True},
     "ab$cd, doc_mask -> inputs {inputs}, targets {targets}, segment {segment}"),
    ("prefix", "abcdef", 5, {},
     "abcdef, P = 3 -> inputs {inputs}, prefix {prefix}, targets {targets}"),
    ("mtp", "abcde", 3, {"n_future": 2},
     "abcde, n = 2 -> inputs {inputs}, targets {targets}, extra {between}"),
    ("fim", "abcdef$ghi", 9, {"fim_rate": 1.0, "fim_layouts": "psm"},
     "abcdef, cuts 2 and 4 -> psm {whole}"),
    ("fim", "abcdef$ghi", 9, {"fim_rate": 1.0, "fim_layouts": "spm"},
     "spm {whole}"),
    ("fim", "abcdef$ghi", 9, {"fim_rate": 1.0, "fim_layouts": "spm2"},
     "spm2 {whole}"),
    ("mlm", "abcdefghij", 10, {"mask_rate": 0.2},
     "abcdefghij, 2 targets -> inputs {inputs}, targets {targets}"),
    ("diffusion", ("abcdefgh", 0.4995), 8, {},
     "abcdefgh, p = {p:.1f} -> inputs {inputs}, targets {targets}, weights all {weight:.0f}"),
    ("nsp", ("ab. cd. ef.", "uv. xy. z."), 12, {},
     "ab. cd. ef. / uv. xy. z. -> {original} label {extra}, or"),
    ("nsp", ("ab. cd. ef.", "uv. xy. z."), 12, {},
     "{original} label {extra}"),
    ("sop", "ab. cd. ef.", 14, {},
     "ab. cd. ef. -> {original} label {extra}, or"),
    ("sop", "ab. cd. ef.", 14, {},
     "or {original} label {extra}"),
    ("contrastive", "abcdef", 6, {},
     "abcdef, crops abc and cde -> inputs {inputs}, segment {segment}, nothing to predict"),
    ("span", "abcdefghij$zzzz", 15, {"corruption_rate": 0.3, "mean_span": 1.5},
     "abcdefghij -> {whole}"),
    ("ul2", "abcdefgh$zzz", 12, {},
     "abcdefgh$z -> {whole} or"),
    ("ul2", "abcdefgh$z", 10, {},
     "or {whole} or"),
    ("bart", "ab. cdef. gh$zzzzzzzzz", 22, {},
     '"ab. cdef. gh" -> "{whole}"'),
]
# fmt: on


def example_of(spelled):
    """An example as a draw from a text returns it: ids, two arrays of ids, or ids and a number."""
    if isinstance(spelled, tuple):
        return tuple(example_of(part) for part in spelled)
    return ids_of(spelled) if isinstance(spelled, str) else spelled


def spell(ids) -> str:
    """Ids in the notation of the docstrings; the targets of several horizons in parentheses."""
    if np.ndim(ids) == 2:
        return " ".join(f"({' '.join(spell([i]) for i in targets)})" for targets in ids)
    marks = {TOK.EOT: "$", TOK.MASK: "#", TOK.PAD: "", IGNORE: "_"}
    return "".join(marks.get(int(i), TOK.decode([i])) for i in ids)


def spelled_out(row: Row) -> dict:
    """A row's arrays in the notation of the docstrings."""
    spelled = {
        "inputs": spell(row.inputs),
        "targets": spell(row.targets),
        "prefix": "".join(str(int(p)) for p in row.prefix),
        "segment": "".join(str(s) for s in row.segment),
        "weight": float(row.weights[0]),
        "p": 1 / float(row.weights[0]),
        "extra": row.extra,
        "between": spell(row.extra) if np.ndim(row.extra) == 2 else "",
    }
    if row.targets.ndim == 1:
        spelled["whole"] = spell(read_and_predicted(row))
        spelled["original"] = spell(original(row))
    return spelled


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
    pytest.fail(
        f"the docstring of objectives.{name} has no row that can be drawn; its row of "
        f"WORKED_EXAMPLES makes, for example: {drawn}"
    )


def test_worked_example_of_electra(monkeypatch):
    """The generator's samples fill the row; a correct sample counts as original."""
    rows = make(999, "electra", ids_of("abcdefgh"), 8, mask_rate=0.25)
    batch = batch_of([next(row for row in rows if spell(row.targets) == "___d__g_")])
    model = model_for("electra")

    # A generator that is sure of d and x, and a detector that finds the x.
    sure = torch.zeros(1, 8, 32)
    sure[0, [3, 6]] = 100 * model.embed_tokens.weight[ids_of("dx")].detach()
    monkeypatch.setattr(model, "generator_states", lambda ids, mask: sure)
    verdict = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 0]])
    model.detect_head.register_forward_hook(lambda *_: 40.0 * verdict - 20.0)
    read = []
    model.register_forward_pre_hook(lambda _, args: read.append(spell(args[0][0])))

    figures = figures_of("electra", model, batch)
    assert figures["detect_accuracy"] == 1
    assert figures["detect_loss"] < 1e-6
    assert figures["detect_accuracy_baseline"] == 7 / 8  # "none is replaced"
    says = "abcdefgh, targets d and g, the generator says d and x"
    replaced = "".join(str(int(v)) for v in verdict[0])
    docstring = " ".join(objectives.electra_loss.__doc__.split())
    assert f"{says} -> reads {read[0]}, replaced {replaced}" in docstring


def test_knobs_begin_with_the_published_values():
    """Devlin et al. 2019; Raffel et al. 2020; Roziere et al. 2023; Gloeckle et al. 2024; Clark et
    al. 2020."""
    knobs = Knobs()
    assert knobs.mask_rate == 0.15
    assert (knobs.corruption_rate, knobs.mean_span) == (0.15, 3)
    assert knobs.fim_rate == 0.9
    assert knobs.n_future == 4
    assert (knobs.generator_frac, knobs.rtd_weight) == (0.25, 50)


def test_the_help_of_a_knob_names_the_objectives_that_read_it():
    for field in dataclasses.fields(Knobs):
        users = [name for name, objective in OBJECTIVES.items() if field.name in objective.knobs]
        begins = ", ".join(users) + ": "
        assert field.metadata["help"].startswith(begins), f"{field.name}: begin with {begins!r}"


def test_every_objective_has_a_worked_example():
    """A new objective must show a small row in its docstring, and these tests keep it true."""
    shown = {name for name, *_ in WORKED_EXAMPLES} | {"electra"}
    missing = set(OBJECTIVES) - shown
    assert not missing, f"add a row to WORKED_EXAMPLES in test_objectives.py for: {missing}"


def test_worked_example_of_packing():
    row = objectives.pack([ids_of("abcd")], [(ids_of("ab"), ids_of("cd$"))], TOK, 5)
    example = "source ab, target cd$ -> inputs {inputs}, targets {targets}, prefix {prefix}"
    assert example.format(**spelled_out(row)) in objectives.pack.__doc__


@pytest.mark.parametrize("module", [data, mixture_file, model_file, objectives])
def test_doctests(module):
    failed, tried = doctest.testmod(module)
    assert failed == 0 and tried > 0


# ---- clm ---------------------------------------------------------------------------------------


def test_clm_predicts_hidden_inputs_all_the_same():
    rows = draw(200, "clm", hidden_inputs=0.3, doc_mask=True)
    plain = draw(200, "clm", doc_mask=True)
    hidden = 0
    ordinary = 0
    for row, whole in zip(rows, plain):
        at = row.inputs == TOK.MASK
        assert (row.inputs[~at] == whole.inputs[~at]).all()
        assert (whole.inputs[at] < TOK.n_ordinary).all()
        assert (row.targets == whole.targets).all()
        assert (row.segment == whole.segment).all()
        hidden += at.sum()
        ordinary += (whole.inputs < TOK.n_ordinary).sum()
    assert hidden / ordinary == pytest.approx(0.3, abs=0.02)


def test_clm_doc_mask_runs_documents_alone():
    """The logits of a packed row are those of its documents, each run by itself from position 0."""
    model = awake(model_for("clm"))
    batch = batch_of(draw(2, "clm", T=96, doc_mask=True))
    packed = model.logits(model(batch.inputs, attention_mask(model, batch))[0])
    for logits, ids, segment in zip(packed, batch.inputs, batch.segment):
        for number in segment.unique():
            here = segment == number
            alone = model.logits(model(ids[here][None])[0])[0]
            torch.testing.assert_close(logits[here], alone, atol=1e-4, rtol=0)


# ---- prefix ------------------------------------------------------------------------------------


def test_prefix_split_is_uniform_or_where_the_knob_says():
    rows = make(8000, "prefix", np.arange(34), 33)
    assert fair(tally((row.prefix.sum() for row in rows), range(1, 33)))
    rows = draw(8, "prefix", T=40, prefix_frac=0.3)
    assert all(row.prefix.sum() == 12 for row in rows)


def test_prefix_leaves_a_token_on_each_side_at_any_share():
    for share, P in ((1e-6, 1), (0.999999, 39)):
        assert draw(1, "prefix", T=40, prefix_frac=share)[0].prefix.sum() == P


# ---- mtp ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", ["linear", "parallel", "chain"])
def test_mtp_never_holds_all_logits_of_its_horizons(heads, monkeypatch):
    """Memory must not grow with n_future · V: only the chunked cross entropy makes logits."""
    model = model_for("mtp", n_future=4, mtp_heads=heads)

    def refuse(state):
        raise AssertionError("all logits at once")

    monkeypatch.setattr(model, "logits", refuse)
    rows = draw(4, "mtp", n_future=4, mtp_heads=heads)
    figures = figures_of("mtp", model, batch_of(rows), n_future=4, mtp_heads=heads)
    assert figures["future_loss"] > 0


@pytest.mark.parametrize(
    "heads, given, weight",
    [
        ("linear", {}, 0.3 / 3),
        ("parallel", {}, 1.0),
        ("parallel", {"mtp_weight": 0.6}, 0.6),
        ("chain", {}, 0.3 / 3),
        ("chain", {"mtp_weight": 0.6}, 0.6 / 3),
    ],
)
def test_mtp_loss_weighs_its_horizons(heads, given, weight):
    """Horizons after the first weigh 0.3 together (DeepSeek-V3), or 1 each (Gloeckle et al.)."""
    model = awake(model_for("mtp", knobs=Knobs(mtp_heads=heads)))
    figures = figures_of("mtp", model, batch_of(draw(4, "mtp")), mtp_heads=heads, **given)
    beyond_the_first = figures["loss_2"] + figures["loss_3"] + figures["loss_4"]
    assert figures["future_loss"] == pytest.approx(beyond_the_first / 3, rel=1e-5)
    want = figures["token_loss"] + weight * beyond_the_first
    assert figures["loss"] == pytest.approx(want, rel=1e-5)


def test_the_loss_of_each_horizon_is_logged_under_its_number():
    knobs = Knobs(n_future=3)
    config = with_heads(
        ModelConfig(vocab_size=TOK.vocab_size, n_layer=1, n_embd=32, n_head=1), {"mtp": 1.0}, knobs
    )
    torch.manual_seed(0)
    model = Transformer(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    rng = np.random.default_rng(0)
    rows = [OBJECTIVES["mtp"].row(rng.integers(97, 107, 35), rng, TOK, 32, knobs) for _ in range(2)]
    batch = collate(rows, TOK.n_bytes)
    metrics = OBJECTIVES["mtp"].loss(model, batch, TOK, knobs)
    states = model(batch.inputs, None, batch.extra)
    for k in (2, 3):
        logits = model.logits(states[k - 1]).flatten(0, 1)[batch.index]
        expected = F.cross_entropy(logits, batch.targets[:, k - 1])
        found = metrics[f"loss_{k}"]
        assert (found.sum / found.divisor).item() == pytest.approx(expected.item(), rel=1e-4)


# ---- fim ---------------------------------------------------------------------------------------


def fim_pieces(row: Row, tok=TOK) -> list[list[int]]:
    """The ids of each document's piece, including its EOT if it has one."""
    ids = np.array(read_and_predicted(row))
    pieces = np.split(ids, 1 + np.flatnonzero(ids == tok.EOT))
    return [piece.tolist() for piece in pieces if len(piece)]


def undo_fim(piece: list[int], tok=TOK) -> bytes:
    """The original text of a piece in any layout; a transformed piece must end with EOT."""
    if piece[0] not in (tok.PRE, tok.SUF):
        return tok.decode_bytes([i for i in piece if i != tok.EOT])

    assert piece[-1] == tok.EOT, f"{tok.decode(piece)!r} is cut off"
    mark_of_second = tok.SUF if piece[0] == tok.PRE else tok.PRE
    second = piece.index(mark_of_second)
    third = piece.index(tok.MID)
    before, after = piece[1:second], piece[second + 1 : third]
    if piece[0] == tok.SUF:
        before, after = after, before
    middle = piece[third + 1 : -1]
    return b"".join(tok.decode_bytes(part) for part in (before, middle, after))


@pytest.mark.parametrize("layouts", ["psm", "spm", "spm2", "psm,spm,spm2"])
@pytest.mark.parametrize("tok", [TOK, BPE], ids=["bytes", "bpe"])
@pytest.mark.parametrize("unit", ["characters", "tokens"])
def test_fim_gives_back_the_text_byte_for_byte(tok, layouts, unit):
    """Also where characters have several bytes, where a cut splits a token, and where the end of
    the row cuts a document."""
    dice = np.random.default_rng(0)
    starts = dice.integers(0, len(PROSE) - 60, 200)
    text = text_of((tok.encode(PROSE[a : a + dice.integers(0, 60)]) for a in starts), tok)
    first_marks = set()
    for _ in range(300):
        x = text.window(dice, 65)
        knobs = Knobs(fim_rate=1.0, fim_layouts=layouts, fim_cuts=unit)
        row = objectives.fim(x, dice, tok, 64, knobs)
        pieces = fim_pieces(row, tok)
        documents = split_documents(row.raw, tok.EOT)
        assert (row.raw == x[: len(row.raw)]).all()
        assert [undo_fim(p, tok) for p in pieces] == [tok.decode_bytes(d) for d in documents]
        for piece in pieces:
            transformed = piece[0] in (tok.PRE, tok.SUF)
            assert transformed or len(piece) < 16, "left as it was, though there was room"
        first_marks |= {pieces[0][0]} & {tok.PRE, tok.SUF}
        assert (row.segment == 0).sum() <= (0 if tok is TOK else 16)
    of_layout = {"psm": {tok.PRE}, "spm": {tok.SUF}, "spm2": {tok.PRE}}
    assert first_marks == of_layout.get(layouts, {tok.PRE, tok.SUF})


def test_fim_asks_everywhere_and_is_clm_where_nothing_is_transformed():
    for row in draw(32, "fim"):
        assert (asked(row) == (row.segment > 0)).all()
        assert (row.targets[:-1] == row.inputs[1:])[asked(row)[:-1]].all()
    for row in draw(32, "fim", text=letters(0, 20), fim_rate=0.0):
        assert (row.inputs == row.raw[:48]).all() and (row.targets[:-1] == row.raw[1:48]).all()
        assert asked(row).all()


@pytest.mark.parametrize("unit", ["characters", "tokens"])
def test_fim_cuts_between_characters_uniformly(unit):
    """Four characters of one to four bytes have five places to cut, and both cuts are uniform and
    independent. With byte tokens, fim_cuts=tokens still cuts only between characters."""
    cuts = []
    x = np.frombuffer("aé漢😀".encode() + b"\0\0\0\0", np.uint8).astype(np.int32)
    x[10:] = TOK.EOT
    for row in make(4500, "fim", x, 13, fim_rate=1.0, fim_layouts="psm", fim_cuts=unit):
        ids = row.inputs.tolist()
        suffix = ids.index(TOK.SUF)
        middle = ids.index(TOK.MID)
        before = bytes(ids[1:suffix]).decode()  # raises if a character was cut
        after = bytes(ids[suffix + 1 : middle]).decode()
        cuts.append((len(before), 4 - len(after)))
    places = list(itertools.combinations_with_replacement(range(5), 2))
    shares = [1 if i == j else 2 for i, j in places]
    assert fair(tally(cuts, places), shares)


def test_fim_cuts_between_tokens_uniformly():
    """If tokens hold several characters, cuts are only between tokens, all equally likely."""
    ids = BPE.encode("def walk(the, words):")
    ends = np.cumsum([0, *BPE.n_bytes[ids]]).tolist()
    assert len(ids) < ends[-1], "each token is a character: this tests nothing"
    x = np.array([*ids, *[BPE.EOT] * 5], np.int32)
    firsts = []
    for row in make(4000, "fim", x, len(x) - 1, BPE, fim_layouts="psm", fim_cuts="tokens"):
        row_ids = row.inputs.tolist()
        if row_ids[0] == BPE.PRE:
            before = BPE.decode_bytes(row_ids[1 : row_ids.index(BPE.SUF)])
            firsts.append(ends.index(len(before)))  # raises if a token was cut
    places = len(ends)
    assert fair(tally(firsts, range(places)), [2 * (places - i) - 1 for i in range(places)])


def test_fim_rate_and_layouts():
    rows = draw(2000, "fim", text=letters(6, 10), T=80)
    first = Counter(fim_pieces(row)[1][0] for row in rows)  # the second piece is a whole document
    psm, spm = first[TOK.PRE], first[TOK.SUF]
    assert fair([psm + spm, 2000 - psm - spm], [9, 1])
    assert fair([psm, spm])


# ---- mlm ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n, o in OBJECTIVES.items() if "mask_rate" in o.knobs])
@pytest.mark.parametrize("rate", [0.15, 0.4, 0.001])
def test_mask_count_is_exact(name, rate):
    """Exactly max(1, round(mask_rate · ordinary tokens)) positions have a target."""
    for row in draw(64, name, mask_rate=rate):
        ordinary = original(row) < TOK.n_ordinary
        assert asked(row).sum() == max(1, round(rate * ordinary.sum()))
        assert ordinary[asked(row)].all(), "a special token was chosen"
        assert asked(row)[row.inputs == TOK.MASK].all()


def test_mlm_corrupts_80_10_10_and_favors_no_position():
    x = np.array([97 + i % 26 for i in range(100)], np.int32)
    chosen = np.zeros(100)
    fates = Counter()
    drawn = Counter()
    for row in make(4000, "mlm", x, 100):
        chosen += asked(row)
        masked = asked(row) & (row.inputs == TOK.MASK)
        changed = asked(row) & ~masked & (row.inputs != x)
        fates["masked"] += masked.sum()
        fates["changed"] += changed.sum()
        fates["stayed"] += (asked(row) & (row.inputs == x)).sum()
        drawn.update(row.inputs[changed].tolist())
    # A random token equals the original once in 256 times.
    counts = [fates["masked"], fates["changed"], fates["stayed"]]
    assert fair(counts, [0.8, 0.1 * 255 / 256, 0.1 + 0.1 / 256])
    assert set(drawn) == set(range(256))
    assert fair([drawn[i] for i in range(97)])
    assert abs(chosen / 4000 / 0.15 - 1).max() < 0.2


WINDOWS = {objectives.window: False, objectives.window_and_t: True}  # is t drawn, too?


@pytest.mark.parametrize(
    "name", [n for n, o in OBJECTIVES.items() if o.attention == "full" and o.draw in WINDOWS]
)
def test_masked_rows_give_back_the_text_and_hide_it(name):
    """Undoing the masks gives the text back. The inputs alone do not tell it: with other text under
    the [MASK]s and the same random numbers, they are the same."""
    for row in draw(32, name):
        assert (original(row) == row.raw).all()

        def again(text):
            return make(1, name, (text, 0.5) if WINDOWS[OBJECTIVES[name].draw] else text, 48)[0]

        first = again(row.raw)
        hidden = first.inputs == TOK.MASK
        other_text = np.where(hidden, (row.raw + 1) % 256, row.raw)
        second = again(other_text)
        assert hidden.any()
        assert (second.inputs == first.inputs).all()
        assert (second.targets != first.targets)[hidden].all()


# ---- electra -----------------------------------------------------------------------------------


def test_electra_masks_85_keeps_15_and_draws_no_random_token():
    x = np.array([97 + i % 26 for i in range(100)], np.int32)
    masked = stayed = 0
    for row in make(2000, "electra", x, 100):
        masked += (asked(row) & (row.inputs == TOK.MASK)).sum()
        stayed += (asked(row) & (row.inputs == x)).sum()
    assert masked + stayed == 2000 * 15
    assert fair([masked, stayed], [0.85, 0.15])


def test_electra_fills_in_ordinary_tokens_drawn_from_the_generator():
    """At temperature 1: if the generator predicts the same everywhere, each token's share of the
    samples is its probability. Positions without a target keep their token."""
    rows = draw(300, "electra", mask_rate=0.4)
    batch = batch_of(rows)
    probability = np.random.default_rng(0).random(TOK.n_ordinary) + 0.5
    probability /= probability.sum()
    logits = np.full(TOK.vocab_size, 50.0)  # no special token is drawn, however likely
    logits[: TOK.n_ordinary] = np.log(probability)
    embedding = torch.from_numpy(logits)[:, None]  # of one channel, and all states are 1
    states = torch.ones(len(batch.index), 1, dtype=embedding.dtype)

    before, filled = objectives.fill_samples(states, embedding, batch, TOK)
    assert (before.numpy() == np.stack([original(row) for row in rows])).all()
    hidden = np.stack([asked(row) for row in rows])
    assert (filled == before).numpy()[~hidden].all()
    drawn = tally(filled.numpy()[hidden].tolist(), range(TOK.n_ordinary))
    assert fair(drawn, probability)


def test_electra_detection_teaches_the_generator_nothing():
    """The gradient of the generator's own parameters does not depend on the weight of the detection
    loss. The trunk's gradient comes from the detection loss alone."""
    batch = batch_of(draw(8, "electra"))
    gradients = {}
    for weight in (1.0, 50.0):
        model = awake(model_for("electra"))
        total_loss(parts_of("electra", model, batch, rtd_weight=weight)).backward()
        gradients[weight] = {name: p.grad for name, p in model.named_parameters()}
    trunk = "layers.0.mlp.up_proj.weight"
    torch.testing.assert_close(50 * gradients[1.0][trunk], gradients[50.0][trunk])
    mine = [name for name in gradients[1.0] if name.startswith("generator")]
    assert mine
    for name in mine:
        assert gradients[1.0][name].abs().max() > 0
        assert torch.equal(gradients[1.0][name], gradients[50.0][name])


def test_electra_head_is_dense_gelu_linear_and_its_loss_weighs_50():
    model = awake(model_for("electra"))
    head = model.detect_head
    h = torch.randn(2, 5, 32)
    dense = h @ head.dense.weight.T + head.dense.bias
    want = F.gelu(dense) @ head.out.weight.T + head.out.bias
    torch.testing.assert_close(head(h), want[..., 0])

    figures = figures_of("electra", model, batch_of(draw(8, "electra")))
    want = figures["token_loss"] + 50 * figures["detect_loss"]
    assert figures["loss"] == pytest.approx(want, rel=1e-5)


def test_electra_generator_is_a_quarter_as_wide_and_equally_deep():
    generator = model_for("electra", n_embd=64, n_head=4, n_layer=3).generator
    assert len(generator.layers) == 3 and generator.norm.weight.shape == (16,)
    assert generator.layers[0].mlp.gate_proj.in_features == 16


# ---- diffusion ---------------------------------------------------------------------------------


def test_diffusion_masks_any_token_and_asks_for_what_it_masked():
    ends = 0
    for row in draw(200, "diffusion", text=letters(4, 12)):
        masked = row.inputs == TOK.MASK
        assert (asked(row) == masked).all()
        assert (original(row) == row.raw).all()
        ends += (row.targets == TOK.EOT).sum()
    assert ends > 100, "a text's end must cost nats too"


def test_diffusion_is_stratified_and_weighs_by_its_rate():
    rows = draw(256, "diffusion", T=200)
    p = np.array([1 / float(row.weights[0]) for row in rows])
    assert all((row.weights == row.weights[0]).all() for row in rows)
    t = (p - 1e-3) / (1 - 1e-3)
    jitter = 256 * t - np.arange(256)  # each t lies in its own 256th, anywhere in it
    assert -0.001 < jitter.min() < 0.1 and 0.9 < jitter.max() < 1.001
    assert 0.4 < jitter.mean() < 0.6
    [next_step] = [row.weights[0] for row in draw(1, "diffusion", T=200, step=1)]
    assert rows[0].weights[0] != next_step, "the t of every step would be the same"

    masked = np.stack([asked(row) for row in rows])
    deviation = (masked.sum(1) - 200 * p) / np.sqrt(200 * p * (1 - p) + 0.01)
    assert abs(deviation).max() < 5
    assert 0.8 < (deviation**2).mean() < 1.2
    assert fair(masked.sum(0))


def test_diffusion_begins_with_rows_that_hide_less():
    """The upper bound of t rises linearly to 1 in the first 40 steps."""
    source = source_of("diffusion", T=200)._replace(warmup=(0, 40))

    for step, bound in [(0, 0.25), (20, 0.625), (39, 0.98125), (40, 1.0), (99, 1.0)]:
        rows = [draw_row(source, TRAIN, step, number, 64)[0] for number in range(64)]
        p = np.array([1 / float(row.weights[0]) for row in rows])
        jitter = 64 * (p - 1e-3) / (1 - 1e-3) / bound - np.arange(64)  # in its own 64th
        assert jitter.min() > -0.001 and jitter.max() < 1.001, step
    assert objectives.highest_t(0, 0, 0) == 1.0, "no warm-up"


def test_diffusion_bound_is_not_below_the_entropy_of_random_lengths(monkeypatch):
    """Each token is EOT with probability q, whatever precedes it, and otherwise an `a`. The best
    model predicts just that everywhere, and its loss is the entropy of q. (If EOT were never
    masked, the best model would always predict `a`, and its loss would be 0.)"""
    q = 0.1
    ends = np.random.default_rng(0).random(200_000) < q
    text = Text(np.where(ends, TOK.EOT, ord("a")).astype(np.uint16), TOK.EOT)
    batch = batch_of(draw(256, "diffusion", text=text, T=512))
    log_p = torch.full((TOK.vocab_size,), -1e9)
    log_p[TOK.EOT] = math.log(q)
    log_p[ord("a")] = math.log(1 - q)

    model = model_for("diffusion")
    model.lm_head.weight = torch.nn.Parameter(F.pad(log_p[:, None], (0, 31)))
    monkeypatch.setattr(model, "forward", lambda ids, mask: [F.one_hot(ids * 0, 32).float()])
    bound = figures_of("diffusion", model, batch)["loss"]
    entropy = -q * math.log(q) - (1 - q) * math.log(1 - q)
    assert bound == pytest.approx(entropy, rel=0.05)


def test_diffusion_equals_the_exact_count_form(monkeypatch):
    """On three tokens, the loss averaged over all masks and integrated over t equals the loss of
    masking exactly l tokens, with l uniform on 1, 2, 3. [MASK] itself is never predicted."""
    monkeypatch.setattr(objectives, "DIFFUSION_EPS", 1e-9)
    model = awake(model_for("diffusion"))
    x = ids_of("abc")

    class Dice:
        def random(self, T):  # masks exactly the positions in `mask`
            return np.where(mask, -1.0, 2.0)

    got = want = 0.0
    nodes, node_weights = np.polynomial.legendre.leggauss(3)  # exact up to degree 5
    for mask in itertools.product([False, True], repeat=3):
        n = sum(mask)
        if n == 0:
            continue
        for t, weight in zip((nodes + 1) / 2, node_weights / 2):
            row = objectives.diffusion((x, t), Dice(), TOK, 3, Knobs())
            loss = figures_of("diffusion", model, batch_of([row]))["loss"]
            got += weight * t**n * (1 - t) ** (3 - n) * loss

        hidden = torch.tensor([mask])
        ids = torch.from_numpy(x).long()[None]
        logits = model.logits(model(ids.masked_fill(hidden, TOK.MASK), "full")[0])
        logits[..., TOK.MASK] = -math.inf
        nats = F.cross_entropy(logits[hidden], ids[hidden], reduction="sum").item()
        want += nats / n / math.comb(3, n) / 3
    assert got == pytest.approx(want, rel=1e-4)


# ---- nsp ---------------------------------------------------------------------------------------


def test_nsp_is_the_next_text_or_another_document():
    rows = draw(2000, "nsp", text=counting(60), T=40)
    for row in rows:
        A, B = sides(row)
        assert A and B and contiguous(A) and contiguous(B)
        if row.extra == 1:
            assert contiguous(A + B)
        else:
            assert A[0] // 32 != B[0] // 32
    assert fair(tally((int(row.extra) for row in rows), [0, 1]))


def test_nsp_of_a_single_document_takes_a_distant_place():
    for row in draw(500, "nsp", text=text_of([range(200)]), T=23):
        A, B = sides(row)
        if row.extra == 1:
            assert B[0] == A[-1] + 1
        else:
            assert abs(B[0] - A[-1]) > 30
    for row in draw(100, "nsp", text=text_of([[97, 98, 99]]), T=23):  # even of three tokens
        assert all(sides(row))


def test_a_tenth_of_the_rows_of_nsp_is_short(monkeypatch):
    """Their room is 35 to 70 tokens."""
    text = text_of(sentences_of(np.random.default_rng(i), 60) for i in range(9))
    lengths = np.array([len(row.raw) for row in draw(4000, "nsp", text=text, T=73)])
    assert np.mean(lengths < 50) == pytest.approx(0.1 * 15 / 36, abs=0.012)
    assert 34 <= min(lengths) < 40 and max(lengths) == 70
    monkeypatch.setattr(objectives, "PAIR_SHORT", 0)
    assert all(len(row.raw) >= 50 for row in draw(1000, "nsp", text=text, T=73))


def test_a_learned_vector_marks_the_second_text_of_a_pair():
    """It is added to B and to the [SEP] after B, as in BERT, and to nothing else."""
    for name in PAIRS:
        model = model_for(name, separator=TOK.SEP)
        torch.nn.init.normal_(model.second_text)
        batch = batch_of(draw(20, name, text=python_source(), T=64))
        mask = attention_mask(model, batch)
        with_vector = model.embed_tokens(batch.inputs) + model.second_text
        without = model.embed_tokens(batch.inputs)
        model.short_conv = None
        found = model.embed(batch.inputs, mask)
        for ids, *rows in zip(batch.inputs.tolist(), found, with_vector, without):
            end_of_a, end_of_b = (i for i, id in enumerate(ids) if id == TOK.SEP)
            for i, (vector, marked, plain) in enumerate(zip(*rows)):
                assert torch.equal(vector, marked if end_of_a < i <= end_of_b else plain)


def sentences_of(dice, n: int, alphabet=b"abcdefgh") -> list[int]:
    """n sentences of random letters, with a space between them."""
    words = (dice.choice(list(alphabet), dice.integers(2, 7)) for _ in range(n))
    return list(b" ".join(bytes(word.tolist()) + b"." for word in words))


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_are_cut_at_the_ends_of_sentences(name, monkeypatch):
    monkeypatch.setattr(objectives, "PAIR_SHORT", 0)  # in short rows, two sentences may not fit
    dice = np.random.default_rng(0)
    text = text_of(sentences_of(dice, dice.integers(2, 60)) for _ in range(40))
    for row in draw(300, name, text=text, T=40):
        A, B = sides(row)
        assert A[-1] == ord(".")
        begins_sentence = B[0] == ord(" ") or (name == "sop" and row.extra == 0)
        assert begins_sentence


@functools.cache
def long_and_short_documents() -> Text:
    """One long document and 200 short ones. Each begins with an `F` and ends with an `L`; their
    sentences look alike."""
    dice = np.random.default_rng(0)
    n_sentences = [*dice.integers(2, 12, 200), 1000]
    documents = [sentences_of(dice, n) for n in n_sentences]
    return text_of([ord("F"), *document, ord("L")] for document in documents)


def test_nsp_label_does_not_show_in_the_shape_of_the_pair():
    """Lengths, padding, and whether B holds the beginning or the end of its document have the same
    joint distribution for true and for random Bs. No B reaches its document's end."""
    seen = {0: [], 1: []}
    for row in draw(5000, "nsp", text=long_and_short_documents(), T=64):
        A, B = sides(row)
        is_padded = TOK.PAD in row.inputs
        begins_document = ord("F") in B
        ends_document = B[-1] == ord("L")
        lengths = (len(A) // 8, len(B) // 8)
        seen[int(row.extra)].append((*lengths, is_padded, begins_document, ends_document))
    assert same_distribution(seen[0], seen[1])
    assert 0.1 < np.mean([padded for _, _, padded, _, _ in seen[1]]) < 0.9
    assert not any(ends for *_, ends in [*seen[0], *seen[1]])


def test_nsp_label_cannot_be_learned_if_a_says_nothing_about_b():
    """If all documents look alike, a regression on a row's tokens is no better than chance."""
    rows = draw(6000, "nsp", text=long_and_short_documents(), T=32)
    assert abs(learned_accuracy(rows, original, 4000) - 0.5) < 0.04


def test_nsp_label_does_not_depend_on_which_document_b_is_from():
    """Three documents with letters of their own, one four times as long as the others. B's letters
    show its document, but not the label."""
    dice = np.random.default_rng(0)
    sizes = enumerate([120, 30, 30], start=10)
    text = text_of(sentences_of(dice, n, range(8 * i, 8 * i + 8)) for i, n in sizes)
    rows = draw(4000, "nsp", text=text, T=64)
    assert majority_accuracy(rows, lambda row: max(sides(row)[1]) // 8, 2500) < 0.55


def test_nsp_finds_another_document_however_large_the_first_is():
    text = text_of([[97] * 4000, [98] * 20, [99] * 20])
    for row in draw(200, "nsp", text=text, T=16):
        A, B = (set(side) for side in sides(row))
        assert len(A) == len(B) == 1 and (A == B) == (row.extra == 1)


def test_nsp_label_can_be_learned_if_a_shows_its_document():
    """Each document has eight letters of its own. The label is 1 if A and B have the same ones."""
    dice = np.random.default_rng(0)
    alphabets = [range(8 * i, 8 * i + 8) for i in range(10, 30)]
    text = text_of(sentences_of(dice, 30, alphabet) for alphabet in alphabets)
    rows = draw(2000, "nsp", text=text, T=64)
    for row in rows[:500]:
        A, B = ({i // 8 for i in side if i >= 80} for side in sides(row))
        if A and B:
            assert (A == B) == (row.extra == 1)

    def both_alphabets(row):
        A, B = sides(row)
        return [32 * (max(A) // 8) + max(B) // 8]

    assert learned_accuracy(rows, both_alphabets, 1500) > 0.95


def around_separator(row: Row) -> np.ndarray:
    """Three tokens on each side of the first [SEP], and all pairs of a left and a right token."""
    ids = [TOK.PAD] * 3 + original(row).tolist() + [TOK.PAD] * 3
    at = ids.index(TOK.SEP)
    near = np.array(ids[at - 3 : at] + ids[at + 1 : at + 4])
    together = 257 * near[:3, None] + near[None, 3:]
    return np.concatenate([near, together.ravel()])


@pytest.mark.parametrize("name", PAIRS)
def test_pair_label_does_not_show_at_the_separator(name, monkeypatch):
    """Three tokens on each side of [SEP] reveal little: only what the end of a line of Python says
    about the beginning of the next. Cuts anywhere, even in words, revealed nearly all labels."""
    rows = draw(2500, name, text=python_source(), T=128)
    assert learned_accuracy(rows, around_separator, 1900) < 0.58

    for finds_nothing in ("sentence_ends", "word_ends"):
        monkeypatch.setattr(sentences_file.Spelled, finds_nothing, lambda self: [])
    rows = draw(1500, name, text=python_source(), T=128)
    assert learned_accuracy(rows, around_separator, 1000) > 0.57


@pytest.mark.parametrize("name", PAIRS)
def test_both_sides_have_a_token_however_short_the_documents(name):
    text = text_of([[97], [98, 99], [100], [101, 102, 103], [104]])
    for row in draw(300, name, text=text, T=16):
        A, B = sides(row)
        assert A and B
        assert TOK.EOT not in A + B


def test_pair_loss_is_mlm_plus_the_label():
    figures = figures_of("nsp", awake(model_for("nsp")), batch_of(draw(8, "nsp")))
    want = figures["token_loss"] + figures["pair_loss"]
    assert figures["loss"] == pytest.approx(want, rel=1e-5)
    assert 0 <= figures["pair_accuracy"] <= 1


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_are_judged_at_cls(name):
    model = awake(model_for(name))
    batch = batch_of(draw(8, name))
    expected = model(batch.inputs, attention_mask(model, batch))[0][:, 0]
    read = []
    model.pair_head.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    model.pair_head.register_forward_hook(lambda *_: 40.0 * batch.extra - 20.0)  # always correct
    found = figures_of(name, model, batch)
    torch.testing.assert_close(read[0], expected)
    assert found["pair_accuracy"] == 1 and found["pair_loss"] < 1e-6


# ---- sop ---------------------------------------------------------------------------------------


def test_sop_swaps_half_the_pairs_and_a_swapped_pair_unswaps_to_the_text(monkeypatch):
    """In documents with sentences, and in documents without any."""
    monkeypatch.setattr(objectives, "PAIR_SHORT", 0)
    dice = np.random.default_rng(0)
    documents = [sentences_of(dice, 20) for _ in range(20)]
    documents += [dice.choice(list(b"abcdefgh"), 150).tolist() for _ in range(20)]
    whole = b"|".join(map(bytes, documents))
    rows = draw(1000, "sop", text=text_of(documents), T=40)
    for row in rows:
        A, B = sides(row)
        assert A and B
        assert bytes(A + B if row.extra == 1 else B + A) in whole
    assert fair(tally((int(row.extra) for row in rows), [0, 1]))


def test_sop_finds_whole_sentences_wherever_two_fit(monkeypatch):
    monkeypatch.setattr(objectives, "PAIR_SHORT", 0)
    monkeypatch.delattr(objectives, "broken_off")
    text = text_of([TOK.encode("a" * 100 + ". bc. de. fg. hi. " + "j" * 100 + ".")] * 3)
    for row in draw(50, "sop", text=text, T=40):
        assert set(row.raw.tolist()) <= set(TOK.encode(" bcdefghi."))


def test_short_rows_of_sop_do_not_show_where_a_document_ends():
    """A document of ten sentences fits a row. Its first and last sentence alone would tell the
    order, so some rows have neither."""
    document = TOK.encode("".join(f"{letter * 5}.\n" for letter in "abcdefghij"))
    rows = draw(4000, "sop", text=text_of([document] * 3), T=73)
    lengths = [len(row.raw) for row in rows if len(row.raw) < 70]
    assert len(lengths) / 4000 == pytest.approx(0.1, abs=0.02)
    assert min(lengths) < 10 and max(lengths) == 63
    inside = [{ord("a"), ord("j")}.isdisjoint(row.raw.tolist()) for row in rows]
    assert np.mean(inside) > 0.04


@pytest.mark.parametrize("has_sentences, least", [(True, 0.8), (False, 0.65)])
def test_sop_reads_all_of_a_document(has_sentences, least):
    """Of a text without blanks, all but its outer eighths."""
    dice = np.random.default_rng(0)
    documents = [sentences_of(dice, 40) for _ in range(3)]
    if not has_sentences:
        documents = [dice.choice(list(b"abcdefgh"), 300).tolist() for _ in range(3)]
    text = text_of(documents)
    document = bytes(documents[0])
    seen = set()
    for row in draw(300, "sop", text=text, T=40):
        ids = bytes(row.raw.tolist())
        seen.update(ids[i : i + 5] for i in range(len(ids) - 4))
    found = [document[i : i + 5] in seen for i in range(len(document) - 4)]
    assert np.mean(found) > least


@pytest.mark.parametrize(
    "marked, is_whole",
    [
        ("|Ab.\n|Cd.\n|Ef.\n|", True),
        ("Ab.\n|Cd.\n|Ef.\n", False),  # a part of a document ends inside a sentence
        ("Ab.| Cd.| Ef.|", True),  # all sentences except the first have a blank before them
        ("Ab.| Cd.| Ef.|\n", True),
        ("Ab.|  Cd.|  Ef.|  \n", True),
        ("|Ab.\n|Cd.\n|Ef", True),  # the document ends without a newline
        ("Ab.\n|Cd.\n\nEf.\n|Gh.\n|I", False),  # only places with the most common look
        ("Ab.\n|C d.\n|Ef .\n|Gh", False),  # blanks inside sentences do not count
        ("Ab.| Cd .| Ef", False),
        ("Ab.| Cd.| Ef", True),  # the document's end lacks the mark of the others
        ("|Ab,\n|Cd,\n|Ef.\n", True),  # ... or has another
        ("Ab,| cd,| ef; gh", False),  # words, if there are no sentences
        ("Ab| cd| ef.", True),  # a full stop or a capital letter would show the document's own ends
        ("Abcdef", False),
        (" \n| \n", True),  # a document of whitespace
    ],
)
def test_sop_cuts_where_sentences_look_alike(marked, is_whole):
    parts = marked.split("|")
    text = np.array(TOK.encode("".join(parts)))
    marks = np.cumsum([len(part) for part in parts[:-1]])
    assert bounds_alike(text, TOK, is_whole) == marks.tolist()


# ---- nsp and sop: only content tells the label --------------------------------------------------


def test_a_cut_has_blanks_on_both_sides_a_mark_before_them_and_a_letter_after_them():
    """These are compared. What else stands there is the sentences' content."""

    def looks(text, place):
        spelled = sentences_file.Spelled(np.array(TOK.encode(text)), TOK)
        return spelled.look_before(place), spelled.look_after(place)

    marks = [".", "!", "?", ",", ";", ":", "。", "！", "？", "az(漢"]
    before = [{looks(mark, len(mark.encode()))[0] for mark in alike} for alike in marks]
    letters = ["AZ", "azéя漢", "09", "(."]
    after = [{looks(letter, 0)[1] for letter in alike} for alike in letters]
    for found in (before, after):
        assert [len(alike) for alike in found] == [1] * len(found)
        assert len(set.union(*found)) == len(found)
    assert looks("a.\n \tB", 3) == looks("cde.\n \tFg", 5)
    assert looks("a.\n \tB", 3) != looks("a.\n\t B", 3)
    assert looks("a.\n\nB", 3) != looks("a.\n\nB", 4)


@functools.cache
def prose_of(seed: int, joined_by: tuple, last: str, n_documents=3000, lengths=(1, 6)) -> Text:
    """Documents of one to six sentences (`lengths`), each of about 30 to 110 bytes. Between two
    sentences stands one of `joined_by`, drawn at random; after the last one stands `last`."""
    rng = np.random.default_rng(seed)
    words = ["river", "house", "green", "walks", "under", "seven", "cloud", "paper", "light"]
    documents = []
    for _ in range(n_documents):
        sentences = []
        for _ in range(rng.integers(lengths[0], lengths[1] + 1)):
            chosen = [words[i] for i in rng.integers(len(words), size=rng.integers(5, 20))]
            sentences.append(" ".join(chosen).capitalize() + ".")
            sentences.append(joined_by[rng.integers(len(joined_by))])
        documents.append("".join([*sentences[:-1], last]).encode())
    return Text(np.concatenate([[*d, TOK.EOT] for d in documents]).astype(TOK.dtype), TOK.EOT)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(
    "T, joined_by, last",
    [
        (64, (" ",), ""),
        (64, ("\n",), ""),
        (64, (" ", "\n"), ""),
        (64, ("\n", "\n\n"), "\n"),
        (64, ("\n", "\n\n", "\n  "), ""),
        (256, (" ",), ""),
        (256, ("\n", "\n\n", "\n  "), ""),
    ],
    ids=repr,
)
def test_what_stands_around_the_separator_does_not_tell_the_label(name, T, joined_by, last):
    """The characters at the edges of A and B, and whether a sentence ends inside them, are equally
    frequent under both labels. This holds at a document's beginning and end too, for sentences
    longer than the row, and if only some sentences end a paragraph."""
    rows = draw(1300, name, text=prose_of(1, joined_by, last), T=T)
    assert majority_accuracy(rows, functools.partial(edges_of_sides, name), 800) < 0.57


def edges_of_sides(name: str, row: Row) -> tuple:
    """Two characters at the edges of A and B, with `a` for small letters and `A` for capitals, and
    whether a sentence ends inside each."""
    A, B = (bytes(side).decode() for side in sides(row))
    around = [A[-2:], B[:2]]
    if name == "sop":  # nsp's A begins anywhere, under both labels
        around += [A[:2], B[-2:]]
    shapes = [re.sub("[a-z]", "a", re.sub("[A-Z]", "A", edge)) for edge in around]
    return (*shapes, "." in A[:-3], "." in B[:-3])


@pytest.mark.parametrize(
    "name, T, sizes, n_rows, most",
    [("sop", 128, (8, 45), 3000, 0.55), ("nsp", 256, (2, 60), 8000, 0.52)],
)
def test_lengths_of_sentences_at_the_separator_do_not_tell_the_label(name, T, sizes, n_rows, most):
    """Sentences of two lengths, equally many, in random order. "The cut nearest to a place" or "the
    first start after it" would choose a long sentence more often, and with it the one beside it."""
    dice = np.random.default_rng(0)
    documents = []
    for _ in range(300):
        lengths = dice.choice(sizes, dice.integers(20, 60))
        documents.append("".join("a" * n + ". " for n in lengths))
    rows = draw(n_rows, name, text=text_of(map(TOK.encode, documents)), T=T)

    def lengths_beside(row):
        A, B = (bytes(side).decode() for side in sides(row))
        last = re.split(r"\.\s", A.strip())[-1]
        first = re.split(r"\.\s", B.strip())[0]
        return len(last) // 8, len(first) // 8, np.sign(len(A) - len(B))

    assert majority_accuracy(rows, lengths_beside, n_rows * 5 // 8) < most


@pytest.mark.parametrize("name", PAIRS)
def test_a_text_without_sentences_is_cut_between_words(name):
    """Such as text8. Cut anywhere, it revealed nine of ten labels by the letters at the cut.
    A text without blanks is still cut anywhere."""
    dice = np.random.default_rng(0)
    words = ["river", "house", "green", "walks", "under", "seven", "cloud", "paper", "light"]
    documents = [" ".join(dice.choice(words, dice.integers(20, 200))) for _ in range(300)]
    rows = draw(3000, name, text=text_of(map(TOK.encode, documents)), T=64)

    def letters_beside(row):
        A, B = (bytes(side) for side in sides(row))
        return A[-2:], B[:2]

    assert majority_accuracy(rows, letters_beside, 2000) < 0.55
    for row in draw(100, name, text=text_of([TOK.encode("acgt" * 50)] * 3), T=64):
        assert all(sides(row))


def test_lengths_do_not_tell_the_order_if_looks_are_equally_common():
    """Each document has three lines and two kinds of cuts. If the first kind were taken, A would be
    the shorter side in most rows."""
    dice = np.random.default_rng(0)
    documents = []
    for i in range(1000):
        lines = zip("ABC", dice.integers(4, 8, 3), [".!.", "!.."][i % 2])
        documents.append("".join(f"{letter}{'a' * n}{mark}\n" for letter, n, mark in lines))
    rows = draw(1500, "sop", text=text_of(map(TOK.encode, documents)), T=64)

    def longer(row):
        A, B = sides(row)
        return np.sign(len(A) - len(B))

    assert majority_accuracy(rows, longer, 1000) < 0.57


def test_two_sides_of_a_sentence_do_not_meet_where_another_ends():
    ids = np.array(TOK.encode("Aa bb cc dd. ee ff gg hh"))
    for seed in range(50):
        A, _ = sentences_file.two_sides(ids, np.random.default_rng(seed), TOK, 100)
        assert A[-1] != ord(".")


def test_a_document_of_blank_lines_is_searched_once():
    """Searched from each line on, it would take a minute."""
    ids = np.array(TOK.encode(" \n" * 40_000))
    found = sentences_file.two_beginnings(ids, np.random.default_rng(0), TOK, 100, False)
    assert found is None


@pytest.mark.parametrize("name", PAIRS)
def test_chinese_text_is_cut_after_its_full_stops(name, monkeypatch):
    """Inside words of two letters, a cut would tell the label: there are no blanks."""
    monkeypatch.setattr(objectives, "PAIR_SHORT", 0)
    dice = np.random.default_rng(0)
    words = ["河流", "房子", "绿色", "走路", "七天", "云彩", "纸张", "光明", "朋友"]
    sentences = ["".join(dice.choice(words, dice.integers(1, 6))) + "。" for _ in range(9000)]
    documents = ["".join(sentences[i : i + 30]) for i in range(0, 9000, 30)]
    rows = draw(1500, name, text=text_of(map(TOK.encode, documents)), T=256)
    assert all(bytes(sides(row)[0]).decode(errors="ignore")[-1] == "。" for row in rows)

    def letters_beside(row):
        A, B = (bytes(side).decode(errors="ignore") for side in sides(row))
        return A[-3:], B[:2]

    assert majority_accuracy(rows, letters_beside, 1000) < 0.57


DOCUMENTS = {  # kinds of documents, made from words, whose ends do not look like their inside
    "one sentence": lambda words: f"{' '.join(words)}.",
    "two words": lambda words: f"{words[0]} {words[1]}.\n",
    "no mark at the end": lambda words: ". ".join(words),
    "commas, and a full stop at the end": lambda words: ",\n".join(words) + ".\n",
    "a capital at the beginning": lambda words: "".join(f"{w}\n" for w in words).capitalize(),
    "a list with a heading": lambda words: "Items:\n" + "".join(f"- {w}\n" for w in words),
}


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_documents_own_ends_do_not_tell_the_order(kind):
    """Neither the mark that A or B ends with nor the kind of letter it begins with does."""
    dice = np.random.default_rng(0)
    lengths = [dice.integers(1, 9, size=dice.integers(4, 12)) for _ in range(1000)]
    documents = [DOCUMENTS[kind](["a" * n for n in each]) for each in lengths]
    rows = draw(1500, "sop", text=text_of(map(TOK.encode, documents)), T=128)

    def ends(row):
        texts = [bytes(side).decode().strip() for side in sides(row)]
        return [(text[:1].isupper(), text[:1].isalpha(), text[-1:].isalpha()) for text in texts]

    assert majority_accuracy(rows, lambda row: tuple(ends(row)), 1000) < 0.57


@pytest.mark.parametrize("name", PAIRS)
def test_indentation_beside_the_separator_does_not_tell_the_label(name):
    """Lines of code, whose indent differs from the line before by one level or none. With byte
    tokens an indent is several tokens long."""
    dice = np.random.default_rng(0)
    documents = []
    for _ in range(600):
        depths = np.abs(np.cumsum(dice.integers(-1, 2, size=40))) % 5
        documents.append(
            "".join(f"{'    ' * depth}{'a' * dice.integers(2, 9)}\n" for depth in depths)
        )
    rows = draw(5000, name, text=text_of(map(TOK.encode, documents)), T=128)

    def indents_beside(row):
        A, B = (bytes(side) for side in sides(row))
        lines = (A.rstrip().rsplit(b"\n")[-1], B.lstrip(b"\n"))
        return [len(line) - len(line.lstrip()) for line in lines]

    assert majority_accuracy(rows, lambda row: tuple(indents_beside(row)), 3500) < 0.55


@pytest.mark.parametrize("last", ["", "\n"], ids=repr)
def test_sop_of_two_sentences_does_not_cut_words(last):
    """The first has no blank before it and the second has one, so they do not look alike."""
    rows = draw(2500, "sop", text=prose_of(1, (" ",), last, lengths=(2, 2)), T=128)

    def letters_beside(row):
        A, B = (bytes(side) for side in sides(row))
        return A[-2:], B[:2]

    assert majority_accuracy(rows, letters_beside, 1500) < 0.6


@pytest.mark.parametrize("joined_by", [" ", "  ", "\n"], ids=repr)
def test_sop_of_two_sentences_does_not_show_which_ends_the_document(joined_by):
    """Only the last sentence has no blank after it. Both parts stop before their last letter."""
    dice = np.random.default_rng(0)
    documents = []
    for _ in range(2000):
        sentences = ["a" * n + "." for n in dice.integers(1, 20, size=2)]
        documents.append(joined_by.join(sentences))
    rows = draw(1000, "sop", text=text_of(map(TOK.encode, documents)), T=64)
    for row in rows:
        A, B = (bytes(side) for side in sides(row))
        assert A.endswith(b".") == B.endswith(b".")


def test_nsp_does_not_show_where_the_second_document_ends():
    """The newline at a document's end does not count as text that B may stop before."""
    rows = draw(1000, "nsp", text=prose_of(1, (" ",), "\n", lengths=(2, 2)), T=256)
    assert not any(bytes(sides(row)[1]).endswith(b".") for row in rows)


def test_the_ends_of_a_text_that_is_cut_anywhere_are_left_out_however_short_it_is():
    for n, left_out in {4: 1, 8: 2, 12: 3, 40: 5}.items():
        ids = np.arange(97, 97 + n)
        A, B = sentences_file.two_sides(ids, np.random.default_rng(n), TOK, 100)
        assert (A[0] - ids[0], ids[-1] - B[-1]) == (left_out, left_out)


def test_a_cut_near_an_end_of_a_long_text_is_the_last_resort():
    """It would leave a row half empty."""

    def found(cuts, room):
        ids = np.zeros(100, int)
        return [sentences_file.cut_at(share, cuts, ids, room) for share in (0, 0.5, 0.99)]

    assert found([2, 40, 98], room=20) == [40, 40, 40]
    assert found([2, 40, 98], room=100) == [2, 40, 98]
    assert found([2, 98], room=20) == [2, 98, 98]


def test_sop_label_does_not_show_where_a_chunk_is_cut_from_a_long_document():
    """A chunk that is a part of a document begins and ends inside a sentence."""
    text = prose_of(1, (" ",), "", n_documents=100, lengths=(20, 60))
    rows = draw(2000, "sop", text=text, T=64)
    assert majority_accuracy(rows, functools.partial(edges_of_sides, "sop"), 1250) < 0.55


# ---- contrastive -------------------------------------------------------------------------------


def crops(row: Row) -> tuple[np.ndarray, np.ndarray]:
    return row.inputs[row.segment == 1], row.inputs[row.segment == 2]


def test_contrastive_crops_are_5_to_50_percent_of_a_chunk():
    rows = make(4000, "contrastive", np.arange(100), 200)
    lengths = [len(crop) for row in rows for crop in crops(row)]
    assert fair(tally(lengths, range(5, 51)))
    assert all(not asked(row).any() for row in rows)


def test_contrastive_crops_lie_anywhere_and_are_independent():
    """From ten tokens: all lengths from 1 to 5 are equally likely, and so are all places of each
    length. One crop says nothing about the other."""
    pairs = [crops(row) for row in make(9000, "contrastive", np.arange(10), 10)]
    place = [(len(crop), int(crop[0])) for pair in pairs for crop in pair]
    places = [(n, start) for n in range(1, 6) for start in range(11 - n)]
    assert fair(tally(place, places), [1 / (11 - n) for n, _ in places])
    both = [(int(a[0]) // 4, int(b[0]) // 4) for a, b in pairs]
    first = np.bincount([a for a, _ in both]) / 9000
    second = np.bincount([b for _, b in both]) / 9000
    joint = tally(both, itertools.product(range(3), repeat=2))
    assert fair(joint, np.outer(first, second))


def test_contrastive_pools_each_crop_alone():
    """A row's two embeddings are the normalized mean states of its crops, each read by itself and
    without the padding."""
    model = awake(model_for("contrastive"))
    [row] = make(1, "contrastive", ids_of("abcdefghijklmnopqrst"), 24)
    batch = batch_of([row])
    mask = attention_mask(model, batch)
    both = objectives.embed_crops(model, batch.inputs, mask, batch.segment)
    for crop, embedding in zip(crops(row), both[:, 0]):
        ids = torch.from_numpy(crop).long()[None]
        mean = model(ids, "full")[0][0].mean(0)
        torch.testing.assert_close(embedding, F.normalize(mean, dim=0), atol=1e-5, rtol=1e-4)


def test_info_nce_at_its_two_ends():
    """If all embeddings are identical, the loss is ln(pairs). If only partners agree, it is 0."""
    same = F.normalize(torch.ones(16, 8), dim=1)
    assert info_nce(same, same)[0].item() == pytest.approx(math.log(16))
    loss, accuracy = info_nce(torch.eye(8), torch.eye(8))
    assert loss < 1e-6
    assert accuracy == 1


def test_info_nce_by_hand_in_both_directions():
    first = torch.tensor([0.1, 0.5])  # angles
    second = torch.tensor([0.2, 0.3])
    e = torch.exp(torch.cos(first[:, None] - second) / 0.05)
    by_row = (e.diag() / e.sum(1)).log().mean()
    by_column = (e.diag() / e.sum(0)).log().mean()
    points = [torch.stack([angle.cos(), angle.sin()], dim=1) for angle in (first, second)]
    want = -(by_row + by_column) / 2
    assert info_nce(*points)[0].item() == pytest.approx(want.item(), rel=1e-4)


def test_contrastive_counts_nothing_for_a_row_without_negatives():
    """A lone pair is always retrieved correctly, so it must not improve an average."""
    model = awake(model_for("contrastive"))
    rows = draw(5, "contrastive")
    four = parts_of("contrastive", model, batch_of(rows[:4]))
    lone = parts_of("contrastive", model, batch_of(rows[4:]))
    for key, part in four.items():
        together = (part.sum + lone[key].sum) / (part.divisor + lone[key].divisor)
        assert together.item() == pytest.approx((part.sum / part.divisor).item())
    assert total_loss(lone).item() == 0


def test_contrastive_draws_from_a_replay_and_from_a_single_document():
    """That is, from an older corpus mixed back in, and from a validation text of one document."""
    replay = source_of("contrastive")._replace(replay_text=letters(5, 9), replay_rate=0.5)
    single = source_of("contrastive", text_of([range(97, 123)]))
    for source in (replay, single):
        for number in range(8):
            row, _ = draw_row(source, TRAIN, 0, number, 8)
            assert all(len(crop) for crop in crops(row))


# ---- span --------------------------------------------------------------------------------------


def undo_spans(source: list[int], target: list[int]) -> list[int]:
    """The text: each sentinel in the source replaced by what follows it in the target."""
    spans = {}
    for i in target:
        if i >= TOK.sentinel:
            assert i == TOK.sentinel + len(spans)
            span = spans[i] = []
        else:
            span.append(i)
    assert [i for i in source if i >= TOK.sentinel] == list(spans)
    return [j for i in source for j in spans.get(i, [i])]


def undo(name: str, source: list[int], target: list[int]) -> list[int]:
    """The original text of an example."""
    if name == "bart":
        return target
    if name == "span":
        return undo_spans(source, target)
    mode, *source = source
    assert mode in (TOK.R, TOK.S, TOK.X)
    return source + target if mode == TOK.S else undo_spans(source, target)


UNDONE = [
    ("span", {}),
    ("span", {"corruption_rate": 0.5, "mean_span": 1.0}),
    ("span", {"mean_span": 64.0}),
    ("ul2", {}),
    ("bart", {"bart_noise": "infill,permute"}),
    ("bart", {"bart_noise": "delete"}),
    ("bart", {"bart_noise": "rotate,infill,delete,permute"}),
]


@pytest.mark.parametrize("name, knobs", UNDONE)
def test_text_comes_back_from_source_and_target(name, knobs):
    """The examples give back the row's documents one by one. The first may be only a part if it is
    too long for the row, and the last only a beginning."""
    dice = np.random.default_rng(0)
    for _ in range(64):
        x = letters(2, 60).window(dice, 80)
        [row] = make(1, name, x, 80, **knobs)
        back = [undo(name, source, target) for source, target in examples(row)]
        documents = [d.tolist() for d in split_documents(x, TOK.EOT) if len(d) > 1]
        assert bytes(back[0]) in bytes(documents[0])
        assert len(back) == 1 or back[0] == documents[0]
        assert back[1:-1] == documents[1 : len(back) - 1]
        assert len(back) == 1 or back[-1] == documents[len(back) - 1][: len(back[-1])]
        assert back == [d.tolist() for d in split_documents(row.raw, TOK.EOT)]


@pytest.mark.parametrize("name", PACKED)
def test_packed_rows_ask_for_targets_only(name):
    """Targets begin at the source's last position, its EOT; the target's last token is predicted
    but never read. Attention is bidirectional in the sources and causal in the targets."""
    for row in draw(64, name, T=80):
        start = 0
        for number, (source, target) in enumerate(examples(row), 1):
            middle = start + len(source)
            stop = start + (row.segment == number).sum()
            assert (row.segment[start:stop] == number).all()
            assert row.prefix[start : middle + 1].all()
            assert not row.prefix[middle + 1 : stop].any()
            assert not asked(row)[start:middle].any()
            predicted = [*target, TOK.EOT][: stop - middle]  # an EOT or none: see `examples`
            assert row.targets[middle:stop].tolist() == predicted
            assert row.inputs[middle + 1 : stop].tolist() == predicted[:-1]
            start = stop
        assert (row.segment[start:] == 0).all()
        assert not asked(row)[start:].any()


def noise_and_spans(L: int, rate: float, mean: float) -> tuple[int, int]:
    """L raw tokens -> how many are noise, and in how many spans."""
    noise = min(max(round(rate * L), 1), L - 1)
    return noise, max(1, round(noise / mean))


def longest_text(T: int, rate: float, mean: float, marks: int = 0) -> int:
    """The most raw tokens that fit into a row of T positions; `marks`: its mode tokens."""
    fits = []
    for L in range(2, T):
        _, spans = noise_and_spans(L, rate, mean)
        if L + 2 * spans + 2 + marks <= T + 1:
            fits.append(L)
    return max(fits)


SHAPES = [(0.15, 3.0, 128), (0.5, 3.0, 100), (0.5, 64.0, 128), (0.15, 64.0, 300), (0.9, 10.0, 77)]


@pytest.mark.parametrize("rate, mean, T", SHAPES)
def test_span_counts_are_exact_and_fill_the_row(rate, mean, T):
    """Noise tokens, spans and row length. Every span has a token, as has every gap between two."""
    L = longest_text(T, rate, mean)
    noise, spans = noise_and_spans(L, rate, mean)
    rows = make(50, "span", np.arange(T) % 256, T, corruption_rate=rate, mean_span=mean)
    for [(source, target)] in map(examples, rows):
        first, *_ = text = undo_spans(source, target)
        assert text == [(first + i) % 256 for i in range(L)]
        assert len(source) == L - noise + spans
        assert len(target) == noise + spans
        for side in (source, [*target, TOK.sentinel]):
            for a, b in itertools.pairwise(side):
                assert a < TOK.sentinel or b < TOK.sentinel


def hidden_tokens(rows: list[Row], L: int) -> np.ndarray:
    """(rows, L) bool: which of the raw tokens 0 ... L-1 are missing from the source."""
    return np.array([np.isin(range(L), source, invert=True) for source, _ in first_examples(rows)])


def test_span_arrangements_are_equally_likely():
    """Ten tokens, four of them noise in two spans: all patterns of two runs, and no others."""
    patterns = []
    for bits in itertools.product([False, True], repeat=10):
        runs = sum(b and not a for a, b in itertools.pairwise((False, *bits)))
        if sum(bits) == 4 and runs == 2:
            patterns.append(bits)
    rows = make(5000, "span", window(range(10), 15), 15, corruption_rate=0.4, mean_span=2.0)
    assert len(patterns) == 63
    assert fair(tally(map(tuple, hidden_tokens(rows, 10).tolist()), patterns))


# ---- ul2 ---------------------------------------------------------------------------------------


def test_ul2_draws_its_table():
    """Modes and denoisers occur in proportion to their shares, each with its own numbers of spans
    and noise tokens. The mode token counts toward T."""
    T = 256
    seen = []
    for source, target in first_examples(make(3000, "ul2", np.arange(T) % 256, T)):
        spans = sum(i >= TOK.sentinel for i in target)
        noise = len(target) - spans if spans else 0
        seen.append((source[0], spans, noise))
    shares = Counter()
    for mode, share, form in UL2:
        noise = spans = 0
        if form is not None:
            L = longest_text(T, **form, marks=1)
            noise, spans = noise_and_spans(L, **form)
        shares[getattr(TOK, mode), spans, noise] += share
    assert len(shares) == 7
    assert fair(tally(seen, shares), list(shares.values()))


def test_ul2_has_the_papers_denoisers():
    """Tay et al. 2022, table 1: mean length and rate of each denoiser except the suffix."""
    table = {(mode, spans and (spans["mean"], spans["rate"])) for mode, _, spans in UL2}
    short = {("R", (3, 0.15)), ("R", (8, 0.15))}
    many = {("X", (3, 0.5)), ("X", (8, 0.5)), ("X", (64, 0.15)), ("X", (64, 0.5))}
    assert table == short | many | {("S", None)}


def test_ul2_modes_are_a_half_and_two_quarters():
    modes = Counter()
    for mode, share, _ in UL2:
        modes[mode] += share
    assert modes == {"R": 0.5, "S": 0.25, "X": 0.25}


def test_ul2_suffixes_begin_anywhere_in_the_middle_half():
    """The split of L = 62 tokens is uniform on [L/4, 3L/4]."""
    rng = np.random.default_rng(0)
    texts = [objectives.split_suffix(np.arange(62), True, rng, TOK)[0] for _ in range(2200)]
    assert fair(tally(map(len, texts), range(16, 47)))


@pytest.mark.parametrize("seed", range(20))
def test_ul2_asks_for_the_end_of_a_text_only_where_its_document_ends(seed):
    """Otherwise a model would learn that text may stop anywhere."""
    rng = np.random.default_rng(seed)
    x = rng.integers(97, 123, size=64)
    x[rng.permutation(64)[:4]] = TOK.EOT
    text = bytes(TOK.EOT % 256 if i == TOK.EOT else i for i in x)  # EOT, id 256, becomes \0
    for row in make(20, "ul2", x, 64):
        for number, (source, target) in enumerate(examples(row), 1):
            if source[0] == TOK.S:
                piece = bytes([*source[1:], *target])
                last = row.targets[row.segment == number][-1]
                ends = b"\0" + piece + b"\0" in b"\0" + text
                assert last == (TOK.EOT if ends else target[-1])


# ---- bart --------------------------------------------------------------------------------------


def test_bart_infills_exactly_30_percent_with_poisson_lengths():
    """The text counts, so the numbers missing between two clean tokens give the length of the span
    between them, 0 included."""
    lengths = []
    rows = make(40, "bart", np.arange(4000) % 256, 4000, bart_noise="infill")
    for source, target in first_examples(rows):
        assert target == [(target[0] + i) % 256 for i in range(len(target))]
        clean = sum(i != TOK.MASK for i in source)
        assert len(target) - clean == round(0.3 * len(target))
        for before, here, after in zip(source, source[1:], source[2:]):
            if here == TOK.MASK and TOK.MASK not in (before, after):
                lengths.append((after - before - 1) % 256)
    poisson = [math.exp(-3) * 3**k / math.factorial(k) for k in range(9)]
    observed = tally((min(length, 9) for length in lengths), range(10))
    assert fair(observed, [*poisson, 1 - sum(poisson)])
    assert np.mean(lengths) == pytest.approx(3, abs=0.1)


def test_bart_infills_anywhere():
    rows = make(1500, "bart", window(range(100), 181), 181, bart_noise="infill")
    often = hidden_tokens(rows, 100).mean(0)
    assert often.sum() == pytest.approx(30)
    assert abs(often[9:-9] / 0.3 - 1).max() < 0.2
    assert abs(often[:50].sum() / 15 - 1) < 0.03


def test_bart_permutes_whole_sentences():
    """Every order is as likely as any other, and the target is the original."""
    parts = ["One.", " Two!\n", "\n", "Is it 3.5 or a.b?"]
    sentences = [parts[0], parts[1] + parts[2], parts[3]]
    text = "".join(parts)
    T = 2 * len(text) + 1
    rows = make(3000, "bart", window(ids_of(text), T), T, bart_noise="permute")
    sources, targets = zip(*first_examples(rows))
    orders = ["".join(order) for order in itertools.permutations(sentences)]
    assert fair(tally(map(TOK.decode, sources), orders))
    assert set(map(TOK.decode, targets)) == {text}


def test_bart_by_default_permutes_and_infills():
    text = "1 one one. 2 two two. 3 three three."
    T = 2 * len(text) + 1
    orders = set()
    for source, target in first_examples(make(200, "bart", window(ids_of(text), T), T)):
        assert TOK.MASK in source
        assert TOK.decode(target) == text
        orders.add("".join(c for c in TOK.decode(source) if c in "123"))
    assert {"123", "132", "213", "231", "312", "321"} <= orders


def test_bart_deletes_30_percent_anywhere():
    rows = make(3000, "bart", window(range(20), 35), 35, bart_noise="delete")
    sources = [source for source, _ in first_examples(rows)]
    assert all(len(source) == 14 and source == sorted(source) for source in sources)
    assert fair(tally(itertools.chain(*sources), range(20)))


def test_bart_rotates_to_any_token_and_asks_for_the_original():
    rows = make(3000, "bart", window(range(20), 41), 41, bart_noise="rotate")
    starts = []
    for source, target in first_examples(rows):
        start = source[0]
        assert source == [(start + i) % 20 for i in range(20)]
        assert target == list(range(20))
        starts.append(start)
    assert fair(tally(starts, range(20)))


# ---- all objectives: rows ----------------------------------------------------------------------


@pytest.mark.parametrize("name", OBJECTIVES)
def test_shapes_segments_prefixes_and_weights(name):
    """Examples are numbered 1, 2, ...; padding is 0 and comes last. `prefix` is False everywhere,
    True everywhere, or True and then False in each example. (All True if ul2's target is one token
    without an EOT: that token is predicted but not read.) Weights are 1, except for diffusion's."""
    attention = OBJECTIVES[name].attention
    for row in draw(64, name, T=50):
        for array in (row.inputs, row.targets, row.weights, row.segment, row.prefix):
            assert len(array) == 50
        assert (row.weights == 1).all() or name == "diffusion"
        assert ((row.segment == 0) == (row.inputs == TOK.PAD)).all()
        used = row.segment[row.segment > 0]
        assert used[0] == 1 and set(np.diff(used)) <= {0, 1}
        assert (row.segment[len(used) :] == 0).all()

        if attention == "causal":
            assert not row.prefix.any()
        elif attention == "full":
            assert row.prefix.all()
        else:
            for number in range(1, used[-1] + 1):
                prefix = row.prefix[row.segment == number].astype(int)
                cut_short = name == "ul2" and row.targets[row.segment == number][-1] != TOK.EOT
                assert prefix[0] == 1 and (prefix[-1] == 0 or cut_short)
                assert (np.diff(prefix) <= 0).all()


PADDED = {  # the largest share that may be padding; 1% for the others
    "nsp": 0.08,  # some rows are short; a long document may be paired with a short one
    "sop": 0.23,  # some rows are short; they hold whole sentences, and all of their cuts look alike
    "contrastive": 0.6,  # two crops of 27% each on average
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_rows_are_filled(name):
    rows = draw(64, name, text=python_source(), T=512)
    padded = np.mean([(row.segment == 0).mean() for row in rows])
    most = PADDED.get(name, 0.01)
    assert padded <= most, (
        f"{padded:.1%} of {name}'s positions are padding: is size() too large? If not, see PADDED"
    )


@pytest.mark.parametrize("name", ["span", "bart"])
def test_the_ends_of_a_document_that_fits_a_window_but_not_a_row_are_read(name):
    """With a uniform start, the last of 120 tokens would be read 0.03 (bart) or 0.17 (span) times
    as often as a token on average."""
    document = np.arange(120)
    rows = draw(2000, name, text=text_of([document] * 50), T=128)
    read = np.bincount(np.concatenate([row.raw for row in rows]), minlength=120)[:120]
    assert min(read[0], read[-1]) > 0.4 * read.mean()


def test_a_window_does_not_begin_inside_a_document_that_fits_into_it():
    """Documents of 2 to 30 tokens, and one of 200, inside which a window may begin."""
    lengths = [*range(2, 31), 200, *range(2, 31)]
    tokens = np.concatenate([[0, *range(1, n + 1)] for n in lengths])[1:]
    text = Text(tokens, eot=0)
    dice = np.random.default_rng(3)
    firsts = Counter()
    for _ in range(3000):
        window = text.window(dice, 40)
        assert len(window) == 40
        firsts[int(window[0])] += 1
        document = window[: np.flatnonzero(np.append(window, 0) == 0)[0]]
        assert len(document) == 0 or document[0] == 1 or len(document) + document[0] > 40
    inside = sum(n for first, n in firsts.items() if first > 1)
    assert firsts[1] > 1000 and inside > 400  # the long document is read from anywhere


@pytest.mark.parametrize("n", [100, 127, 129, 140])
@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in PAIRS])
def test_every_token_of_a_document_is_seen(name, n):
    """Documents are about as long as a row, T = 128. Four objectives must also predict the EOT."""
    text = text_of([range(1, n + 1)] * 5)
    rows = draw(500, name, text, T=128)
    seen = Counter(id for row in rows for id in set(row.raw.tolist()))
    fewest = 50 if name == "fim" else 0  # fim's marks must not push out a document's end
    assert min(seen[id] for id in range(1, n + 1)) > fewest
    if name in ("clm", "prefix", "mtp", "diffusion"):
        first_targets = [row.targets.reshape(128, -1)[:, 0] for row in rows]
        assert sum(TOK.EOT in targets for targets in first_targets) > 100


@pytest.mark.parametrize("n_sentences", [6, 11, 12])
def test_nsp_sees_all_of_a_document_of_two_rows(n_sentences):
    """Few cuts of such a document have a whole row on each side. Sentences of 12 tokens, T = 64."""
    sentences = [[*range(65 + 10 * i, 75 + 10 * i), ord("."), ord(" ")] for i in range(n_sentences)]
    text = text_of([np.concatenate(sentences)] * 5)
    rows = draw(1500, "nsp", text, T=64)
    seen = Counter(id for row in rows for id in set(row.raw.tolist()))
    assert min(seen[id] for id in range(65, 65 + 10 * n_sentences - 10)) > 5
    cuts = {tuple(sides(row)[0][-3:]) for row in rows}
    assert len(cuts) >= n_sentences - 3


def test_the_end_of_a_text_is_seen_as_often_as_its_middle():
    text = text_of([np.full(60, d) for d in range(1, 41)])
    dice = np.random.default_rng(0)
    seen = Counter(id for _ in range(4000) for id in set(text.window(dice, 129).tolist()))
    assert min(seen[d] for d in range(1, 41)) > 0.8 * np.median(list(seen.values()))


def test_documents_are_found_beyond_the_first_block_of_a_long_text():
    """find_all reads 2^22 tokens at a time; a corpus is often longer."""
    tokens = np.ones((1 << 22) + 10, np.uint16)
    tokens[[5, (1 << 22) + 3]] = 0
    text = data.Text(tokens, eot=0)
    assert text.starts.tolist() == [0, 6, (1 << 22) + 4]
    assert text.stops.tolist() == [5, (1 << 22) + 3, (1 << 22) + 10]


def test_a_long_document_is_not_paired_with_a_short_one():
    """If no document of half the length is at hand, both chunks are halves of the long one: else
    both possible second texts would be cut to a few tokens."""
    text = text_of([np.full(4000, 97), *[np.full(6, 98)] * 20])
    dice = np.random.default_rng(0)
    pairs = [text.two_chunks(dice, 100) for _ in range(200)]
    of_long = [pair for pair in pairs if any(97 in chunk for chunk in pair)]
    assert len(of_long) > 150
    long_first = [p for p in of_long if all(set(chunk) == {97} for chunk in p)]
    assert len(long_first) > 0.9 * len(of_long)
    assert all(len(chunk) == 100 for pair in long_first for chunk in pair)


def test_as_many_spans_as_sentinels_are_the_most():
    """One more would be numbered past the vocabulary."""

    def n_spans(T):
        n = objectives.most_tokens(T, lambda n: objectives.span_size(n, 0.4, 1.0))
        return objectives.span_counts(n, 0.4, 1.0)[1]

    last = max(T for T in range(600, 2000) if n_spans(T) == N_SENTINELS)
    knobs = dict(corruption_rate=0.4, mean_span=1.0)
    check("span", last, **knobs)
    assert n_spans(last + 2) > N_SENTINELS
    is_refused(lambda: check("span", last + 2, **knobs), "sentinels")


# ---- all objectives: randomness ----------------------------------------------------------------


def same_row(first: Row, second: Row) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("text", [letters(), letters(2, 12)], ids=["long", "short"])
@pytest.mark.parametrize("name", [*OBJECTIVES, MIXTURE])
def test_rows_depend_on_seed_step_and_row_alone(name, text):
    rows = draw(8, name, text)
    assert all(map(same_row, rows, draw(8, name, text)))
    assert not any(map(same_row, rows, draw(8, name, text, step=1)))
    assert not any(map(same_row, rows, draw(8, name, text, seed=2)))
    assert len({row.inputs.tobytes() for row in rows}) == 8


@pytest.mark.parametrize("name", [*OBJECTIVES, MIXTURE])
def test_a_row_rebuilt_alone_is_the_row_of_the_batch(name):
    source = source_of(name)
    batch = make_batch(source, TRAIN, step=5, numbers=range(8), n_rows=8)
    for b in range(8):
        alone = make_batch(source, TRAIN, step=5, numbers=[b], n_rows=8)
        n = alone.inputs.shape[1]  # it may have less padding
        assert torch.equal(alone.inputs[0], batch.inputs[b, :n])
        assert torch.equal(alone.segment[0], batch.segment[b, :n])
        assert torch.equal(alone.prefix[0], batch.prefix[b, :n])
        width = batch.inputs.shape[1]
        here = batch.index // width == b
        assert torch.equal(alone.index % n, batch.index[here] % width)
        assert torch.equal(alone.targets, batch.targets[here])
        assert torch.equal(alone.weights, batch.weights[here])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_corruption_leaves_its_input_alone(name):
    """Even if the input is read-only, like a memory-mapped corpus."""
    text = letters()
    text.tokens.setflags(write=False)
    example = OBJECTIVES[name].draw(text, np.random.default_rng(0), 48, Knobs(), 0.5)
    arrays = [example] if isinstance(example, np.ndarray) else example
    arrays = [array for array in arrays if isinstance(array, np.ndarray)]
    before = [array.copy() for array in arrays]
    for array in arrays:
        array.setflags(write=False)
    make(5, name, example, 48)
    assert all(map(np.array_equal, arrays, before))


def test_no_two_draws_share_their_numbers(monkeypatch):
    seeds = []
    make = np.random.default_rng
    monkeypatch.setattr(
        np.random, "default_rng", lambda seed: seeds.append(tuple(seed)) or make(seed)
    )
    for split, step, number in itertools.product((TRAIN, VALIDATION), range(2), range(3)):
        draw_row(source_of("clm"), split, step, number, 3)
    assert len(seeds) == len(set(seeds)) == 2 * 2 * 3


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


def reach(allowed: np.ndarray, n_blocks: int, beside: int) -> np.ndarray:
    """(T, T) bool: the tokens that a state can depend on. These are the visible ones up to `beside`
    places away; each block then reaches one step of the rule further. (With today's rule, two steps
    reach no further than one; with a sliding window they do.)"""
    place = np.arange(len(allowed))
    reached = allowed & (abs(place[:, None] - place) <= beside)
    for _ in range(n_blocks):
        reached = allowed @ reached
    return reached


@pytest.mark.parametrize("name", OBJECTIVES)
def test_nothing_leaks(name):
    """In the whole model, a state changes with every token that the rule lets it reach, and with no
    other, above all not with its own target."""
    model = awake(model_for(name), torch.float64)
    for row in draw(4, name, T=40):
        batch = batch_of([row])
        mask = attention_mask(model, batch)
        n = batch.inputs.shape[1]  # without the padding
        allowed = may_see(row)[:n, :n]
        real = row.segment[:n] > 0
        readers = [(model.trunk, 1)]  # and how far the short convolution reads
        if model.generator is not None:
            readers.append((model.generator_states, 0))
        for states_of, beside in readers:
            moves = moved(functools.partial(states_of, mask=mask), batch.inputs[0])
            reached = reach(allowed, len(model.layers), beside)
            assert (moves == reached)[real].all(), "not the rule that may_see, in this file, says"

        if OBJECTIVES[name].attention != "full":  # the target is the row's next token
            answers = row.targets.reshape(40, -1)[:, 0]
            q = np.flatnonzero(asked(row)[:-1] & (row.segment[1:] == row.segment[:-1]))
            assert len(q) > 0
            assert (answers[q] == row.inputs[q + 1]).all(), "a target is not its next input"
            assert not allowed[q, q + 1].any()


@pytest.mark.parametrize("kind", ["linear", "parallel", "chain"])
def test_no_horizon_sees_its_answer(kind):
    """Horizon k at position t has read x[..t], and in a chain also x[t+1] ... x[t+k-1], but never
    x[t+k]."""
    model = awake(model_for("mtp", knobs=Knobs(mtp_heads=kind)), torch.float64)
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
def test_batch_keeps_targets_in_place(name):
    rows = draw(8, name)
    batch = batch_of(rows)
    expected = []
    for b, row in enumerate(rows):
        for t in np.flatnonzero(asked(row)).tolist():
            expected.append((b, t, row.targets[t].tolist(), float(row.weights[t])))

    width = batch.inputs.shape[1]
    columns = (batch.index // width, batch.index % width, batch.targets, batch.weights)
    assert list(zip(*(column.tolist() for column in columns))) == expected
    assert batch.total_weight == pytest.approx(sum(weight for *_, weight in expected))


def test_batch_leaves_out_padding_that_all_rows_share():
    """The new length is a multiple of 32, so that shapes stay few. No real token is lost."""
    rows = draw(8, "nsp", text=letters(10, 20), T=128)
    batch = batch_of(rows)
    assert batch.inputs.shape[1] == 32
    for ids, row in zip(batch.inputs, rows):
        assert (row.inputs[:32] == ids.numpy()).all()
        assert (row.segment[32:] == 0).all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_overfits_one_batch(name):
    batch = batch_of(draw(4, name, T=24))
    model = model_for(name, n_embd=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0)
    first = None
    for _ in range(120):
        loss = total_loss(parts_of(name, model, batch))
        first = first or loss.item()
        if loss.item() < 0.1 * first:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pytest.fail(f"from {first:.3f} only to {loss.item():.3f}")


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "contrastive"])
@pytest.mark.parametrize("config", [{}, {"n_embd": 256, "tied": True}], ids=["untied", "tied"])
def test_first_loss_is_that_of_a_uniform_guess(name, config):
    """With identity blocks and a tied embedding, a final norm of weight 1 would make each position
    predict its own input, at a loss of 22 where ln(vocabulary) is 10.8."""
    batch = batch_of(draw(32, name))
    figures = figures_of(name, model_for(name, **config), batch)
    want = math.log(TOK.vocab_size)
    if name == "diffusion":  # [MASK] is never predicted; the mean is over all positions
        want = math.log(TOK.vocab_size - 1) * (batch.weights.sum() / batch.inputs.numel()).item()
    assert figures["token_loss"] == pytest.approx(want, rel=0.05 if config else 0.01)
    for binary in ("pair_loss", "detect_loss"):
        assert figures.get(binary, math.log(2)) == pytest.approx(math.log(2), rel=0.01)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_table_says_whether_the_unembedding_is_trained(name):
    model = model_for(name)
    total_loss(parts_of(name, model, batch_of(draw(8, name)))).backward()
    assert (model.lm_head.weight.grad is not None) == OBJECTIVES[name].unembeds


@pytest.mark.parametrize("name", OBJECTIVES)
def test_batch_without_targets_costs_nothing(name):
    rows = draw(8, name)
    rows = [row._replace(targets=np.full_like(row.targets, IGNORE)) for row in rows]
    model = model_for(name)
    parts = parts_of(name, model, batch_of(rows))
    loss = total_loss(parts)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    if OBJECTIVES[name].loss in (objectives.token_loss, objectives.mtp_loss):
        assert loss.item() == 0
    if "token_loss" in parts:
        assert parts["token_loss"].sum == 0


@pytest.mark.parametrize("name", PACKED)
def test_rows_of_a_text_that_has_no_example_are_padding_and_cost_nothing(name):
    batch = batch_of(draw(2, name, text=text_of([[97]] * 60)))
    assert (batch.segment == 0).all()
    loss = total_loss(parts_of(name, model_for(name), batch))
    loss.backward()
    assert loss.item() == 0


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "contrastive"] + [MIXTURE])
def test_sums_do_not_depend_on_the_batch_size(name):
    """So the validation loss depends on neither accumulation nor the number of processes."""
    first = next(iter(parse_mixture(name)))
    model = awake(model_for(first))
    totals = []
    for size in (1, 4, 12):
        sums = Counter()
        for start in range(0, 12, size):
            numbers = range(start, start + size)
            batch = make_batch(source_of(name), VALIDATION, 0, numbers, n_rows=12)
            for key, part in parts_of(name, model, batch).items():
                sums[f"{key}, sum"] += part.sum.item()
                sums[f"{key}, divisor"] += part.divisor.item()
        totals.append(sums)
    assert totals[0] == pytest.approx(totals[2], rel=1e-4, abs=1e-6)
    assert totals[1] == pytest.approx(totals[2], rel=1e-4, abs=1e-6)


LIKELIHOODS = [name for name, objective in OBJECTIVES.items() if objective.likelihood]


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_bits_per_byte_counts_the_bytes_of_the_very_targets(name):
    """The small corpus ends in another script, so the corpus's average of bytes per token would be
    far off. diffusion's bound is on the whole text, so it counts the bytes of all positions."""
    documents = [PROSE[i : i + 40] for i in range(0, 120, 20)] + ["plain ascii text", "漢字と仮名"]
    text = text_of(map(BPE.encode, documents), BPE)
    rows = draw(8, name, text, T=16, tok=BPE)
    batch = batch_of(rows, BPE)
    parts = parts_of(name, awake(model_for(name, BPE)), batch, BPE)

    n_bytes = 0
    for row in rows:
        if name == "diffusion":
            answers = original(row)
        else:
            answers = row.targets.reshape(16, -1)[asked(row), 0]
        n_bytes += len(BPE.decode_bytes(answers[answers < BPE.n_ordinary]))
    bits = parts["bits_per_byte"]
    assert bits.divisor == n_bytes
    nats = parts["token_loss"].sum
    assert bits.sum.item() == pytest.approx(nats.item() / math.log(2), rel=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_training_step_never_looks_at_a_value(name, monkeypatch):
    """So a GPU never waits for the host. Tensors of the meta device have no values: reading one, or
    combining it with a tensor of another device, would raise."""
    batch = batch_of(draw(4, name))
    model = model_for(name)
    attention_mask(model, batch)  # compares a shortcut with the rule and caches the answer
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # meta has none
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("meta"):
            model = Transformer(model.config)
        batch = batch.to(torch.device("meta"))
        total_loss(parts_of(name, model, batch)).backward()
        assert model.embed_tokens.weight.grad is not None


# ---- mixtures ----------------------------------------------------------------------------------


THREE = "clm:1,prefix:0.6,mlm:0.4"


def test_mixture_draws_its_shares():
    source = source_of(THREE, T=16)
    assert source.mixture == {"clm": 0.5, "prefix": 0.3, "mlm": 0.2}
    drawn = [draw_row(source, TRAIN, 0, number, 6000) for number in range(6000)]
    assert fair(np.bincount([member for _, member in drawn]), [5, 3, 2])
    for row, member in drawn:
        kind = 2 if row.prefix.all() else int(row.prefix.any())
        assert kind == member


def test_mixture_logs_the_loss_of_each_member():
    model = awake(model_for("clm"))
    parts = parts_of("clm", model, make_batch(source_of(THREE, T=16), TRAIN, 0, range(32), 32))
    by_member = sum(parts[f"loss_{name}"].sum for name in ("clm", "prefix", "mlm"))
    assert by_member.item() == pytest.approx(parts["token_loss"].sum.item(), rel=1e-5)
    prefixes = [row for row in draw(32, THREE, T=16) if row.prefix.any() and not row.prefix.all()]
    alone = figures_of("prefix", model, batch_of(prefixes))["loss"]
    part = parts["loss_prefix"]
    assert (part.sum / part.divisor).item() == pytest.approx(alone, rel=1e-5)


def test_mixture_has_a_loss_if_a_batch_has_no_row_of_one_member():
    batch = make_batch(source_of("clm:0.99,mlm:0.01", T=16), TRAIN, 0, range(2), n_rows=2)
    assert set(batch.member.tolist()) == {0}
    parts = parts_of("clm", model_for("clm"), batch)
    assert parts["loss_mlm"].divisor == 0
    assert total_loss(parts).isfinite()


# ---- mistakes ----------------------------------------------------------------------------------


def check(name: str, T: int = 256, given=None, **knobs):
    check_knobs(parse_mixture(name), build(Knobs, knobs), given or knobs, T)


def check_short(name: str, documents):
    check_text(parse_mixture(name), text_of(documents), 48, Knobs())


def is_refused(attempt, words: str):
    """The attempt must raise UserError with one line that has these words."""
    with pytest.raises(UserError) as raised:
        attempt()
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


# fmt: off
BAD_VALUES = [
    ("mlm", "mask_rate", (0.0, 1.0, -0.1, 1.5, math.nan)),
    ("span", "corruption_rate", (0.0, 1.0, math.nan)),
    ("span", "mean_span", (0.0, 0.5, -3.0, math.nan)),
    ("prefix", "prefix_frac", (0.0, 1.0, math.nan)),
    ("fim", "fim_rate", (-0.1, 1.1, math.nan)),
    ("fim", "fim_layouts", ("", "pms", "psm,", "psm,psm")),
    ("fim", "fim_cuts", ("", "words")),
    ("bart", "bart_noise", ("", "zebra", "delete,delete")),
    ("mtp", "n_future", (0, -1)),
    ("mtp", "mtp_heads", ("", "serial")),
    ("mtp", "mtp_weight", (-1.0, math.nan, math.inf)),
    ("electra", "generator_frac", (0.0, 1.1, math.nan)),
    ("electra", "rtd_weight", (-1.0, 0.0, math.nan, math.inf)),
]
BAD_MIXTURES = ["nothing", "", "clm,", "clm:x", "clm:0", "clm:-1", "clm:nan", "clm:inf", "fmi"]
BAD_MIXTURES += ["clm:0.5,span", "clm,ul2:1,span:2", "clm:,mlm:3"]
# fmt: on


@pytest.mark.parametrize("name, knob, values", BAD_VALUES)
def test_bad_value_of_a_knob_is_refused(name, knob, values):
    for value in values:
        is_refused(functools.partial(check, name, **{knob: value}), f"--{knob}")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_knob_that_nobody_reads_is_refused(name):
    for field in fields(Knobs):
        if field.name not in OBJECTIVES[name].knobs:
            attempt = functools.partial(check, name, given={field.name})
            is_refused(attempt, f"--{field.name} does not apply to {name}")


@pytest.mark.parametrize("spec", BAD_MIXTURES)
def test_bad_mixture_is_refused(spec):
    is_refused(functools.partial(parse_mixture, spec), f"--objective={spec}")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective_with_a_loss_of_its_own_cannot_be_mixed(name):
    other = "prefix" if name == "clm" else "clm"
    if OBJECTIVES[name].loss is objectives.token_loss:
        assert set(parse_mixture(f"{other},{name}")) == {other, name}
    else:
        is_refused(functools.partial(parse_mixture, f"{other},{name}"), "cannot be mixed")


def test_row_that_cannot_be_laid_out_is_refused():
    dense = {"corruption_rate": 0.9, "mean_span": 1.0}
    is_refused(functools.partial(check, "span", **dense), "--mean_span")
    many = {"corruption_rate": 0.4, "mean_span": 1.0}
    is_refused(functools.partial(check, "span", 2048, **many), "--mean_span")
    for name in ("ul2", "clm,ul2"):
        is_refused(functools.partial(check, name, 8192), "UL2")


def test_text_that_cannot_make_a_row_is_refused():
    is_refused(functools.partial(check_short, "clm", [range(19)]), "has 20")
    is_refused(functools.partial(check_short, "mtp", [range(50)]), "needs 52")
    is_refused(functools.partial(check_short, "contrastive", [range(200)]), "two documents")
    is_refused(functools.partial(check_short, "sop", [[97]] * 60), "two tokens")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_defaults_and_own_knobs_pass(name):
    check(name, given=OBJECTIVES[name].knobs)
    check_text(parse_mixture(name), letters(), 48, Knobs())
