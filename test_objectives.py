"""test_objectives.py: what each objective promises, executable.

Models of two blocks on random letters, on the CPU, without a network: the whole file takes about half a minute. Every draw
is seeded, so what holds once holds always. Left out: how well anything trains, GPUs, the command lines.

    pytest test_objectives.py
    pytest test_objectives.py -k "span or leaks"
"""
import functools
import itertools
import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import objectives
import sample
from data import IGNORE, SPECIALS, DataConfig, Replay, Rng, Text, UserError, collate, get_tokenizer, load_tokens
from model import FLEX_BLOCK, ModelConfig, Transformer, attend, block_mask, linear_cross_entropy
from objectives import OBJECTIVES, UL2, Knobs, check_knobs, check_text, info_nce, make_rows, parse_mixture
from sample import Decoder, Sampler

PROSE = "The naïve café — 漢字と仮名。 Ça va? Ευχαριστώ! 😀👍 Tschüß, señor…\n" * 3
TOK = get_tokenizer("bytes")
BPE = get_tokenizer("bpe:330", SimpleNamespace(pieces=lambda: [(PROSE, True)]))
PACKED = tuple(name for name, row in OBJECTIVES.items() if row.attention == "prefix" and name != "prefix")
MASKED, PAIRS, MIXTURE = ("mlm", "electra", "diffusion"), ("nsp", "sop"), "clm:0.4,fim:0.2,ul2:0.2,mlm:0.2"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- helpers --------------------------------------------------------------------------------------------------------

def text_of(documents, tok=TOK) -> Text:
    return Text(np.concatenate([[*d, tok.EOT] for d in documents]).astype(np.uint16), tok.EOT)


@functools.cache
def letters(low: int = 20, high: int = 90) -> Text:
    """Sixty documents of `low` to `high` random letters, spaces, full stops and newlines."""
    dice = np.random.default_rng(0)
    return text_of(dice.choice(list(b"abcdefghij  .\n"), dice.integers(low, high + 1)) for _ in range(60))


def counting(length: int) -> Text:
    """Seven documents that count: document d holds 32d, 32d + 1, ... and wraps to 32d after 32 tokens."""
    return text_of(32 * d + np.arange(length) % 32 for d in range(7))


def contiguous(ids) -> bool:
    """A stretch of one document of the counting text?"""
    return all(i // 32 == j // 32 and (i + 1 - j) % 32 == 0 for i, j in itertools.pairwise(ids))


def draw(name: str, B: int = 8, T: int = 48, text: Text | None = None, **knobs):
    """Raw tokens, and the rows that an objective makes of them."""
    x = OBJECTIVES[name].raw(text or letters(), Rng(2, 0, 0, range(B)), T, TOK, Knobs(**knobs))
    return x, corrupt(name, x, T, **knobs)


def corrupt(name: str, x, T: int, tok=TOK, step: int = 0, **knobs) -> dict:
    return OBJECTIVES[name].corrupt(x, Rng(1, 0, step, range(len(x))), tok, T, Knobs(**knobs))


def one(made, b):    return {key: value[b:b + 1] for key, value in made.items()}
def real(made):      return made["segment"] > 0
def unmasked(made):  return np.where(made["targets"] != IGNORE, made["targets"], made["inputs"])


def repeat(ids, B: int, T: int | None = None) -> np.ndarray:
    """B times the same raw tokens; with T, as a document of its own in a window of T."""
    x = np.asarray([*ids, *([TOK.EOT] + [0] * T if T else [])][:T], np.int32)
    return np.tile(x, (B, *[1] * x.ndim))


def examples(made: dict, b: int):
    """(source, target) of each example of row b, laid out as `[source EOT][target EOT]`; the EOTs are checked and removed."""
    for k in range(1, made["segment"][b].max() + 1):
        at = np.flatnonzero(made["segment"][b] == k)
        ids, n = [*made["inputs"][b, at].tolist(), int(made["targets"][b, at[-1]])], int(made["prefix"][b, at].sum())
        assert ids[n - 1] == ids[-1] == TOK.EOT and ids.count(TOK.EOT) == 2
        yield ids[:n - 1], ids[n:-1]


def first_examples(name: str, x, T: int, **knobs):
    made = corrupt(name, x, T, **knobs)
    return [*zip(*(next(examples(made, b)) for b in range(len(x))))]


def documents(ids, eot: int = TOK.EOT) -> list[list[int]]:
    """What stands between EOTs, empty documents too; -1 is not a token."""
    ids = [int(i) for i in ids if i >= 0]
    cuts = [-1, *(i for i, token in enumerate(ids) if token == eot), len(ids)]
    return [ids[a + 1:b] for a, b in itertools.pairwise(cuts)]


def sees(segment, prefix) -> np.ndarray:
    """The attention rule, pair by pair: (T,), (T,) -> (T, T), query down, key across."""
    T = range(len(segment))
    return np.array([[segment[q] == segment[k] and (k <= q or (prefix[q] and prefix[k])) for k in T] for q in T], bool)


def model_for(name: str, knobs: Knobs | None = None, **config) -> Transformer:
    torch.manual_seed(0)
    size = dict(vocab_size=TOK.vocab_size, n_layer=2, n_head=2, head_dim=16, n_embd=32) | config
    return Transformer(ModelConfig(**size, **OBJECTIVES[name].heads(knobs or Knobs())))


def awake(model: Transformer, dtype=torch.float32) -> Transformer:
    """With random numbers also in the matrices that begin at zero or nearly so."""
    generator = torch.Generator().manual_seed(0)
    for name, p in model.to(dtype).named_parameters():
        if p.ndim > 1 and "norm" not in name:
            torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5, generator=generator)
    return model


def mask_of(batch, model):  return model.mask(batch["attention"], batch.get("segment"), batch.get("prefix"))
def loss_of(name, model, batch, **knobs):
    return OBJECTIVES[name].loss(model, batch, Knobs(**knobs), TOK)


def fair(observed, expected=1.0) -> bool:
    """Pearson's chi-square, below what chance exceeds three times in 100,000 (Wilson and Hilferty 1931)."""
    observed = np.asarray(observed, float).ravel()
    expected = np.broadcast_to(np.asarray(expected, float).ravel(), observed.shape)
    expected = expected / expected.sum() * observed.sum()
    assert expected.min() >= 5, "too few draws for this test"
    n = len(observed) - 1
    return ((observed - expected) ** 2 / expected).sum() < n * (1 - 2 / (9 * n) + 4 * (2 / (9 * n)) ** 0.5) ** 3


def tally(values, keys) -> list[int]:
    """How often each of `keys` occurs among `values`; nothing else may."""
    count, keys = Counter(values), list(keys)
    assert set(count) <= set(keys), set(count) - set(keys)
    return [count[key] for key in keys]


# ---- the worked examples of the docstrings --------------------------------------------------------------------------

EXAMPLES = [   # objective, raw tokens ($ is EOT), T, knobs, and the docstring's words with what the row must say
    ("clm", "abcd", 3, {}, "abcd -> inputs {inputs}, targets {targets}"),
    ("prefix", "abcdef", 5, {}, "abcdef, P = 3 -> inputs {inputs}, prefix {prefix}, targets {targets}"),
    ("mtp", "abcde", 3, dict(n_future=2), "abcde, n = 2 -> inputs {inputs}, targets {targets}"),
    ("fim", "abcdef$ghi", 9, dict(fim_rate=1, fim_layouts="psm"), "abcdef, cuts 2 and 4 -> psm {whole}"),
    ("fim", "abcdef$ghi", 9, dict(fim_rate=1, fim_layouts="spm"), "spm {whole}"),
    ("fim", "abcdef$ghi", 9, dict(fim_rate=1, fim_layouts="spm2"), "spm2 {whole}"),
    ("mlm", "abcdefghij", 10, dict(mask_rate=0.2), "abcdefghij, 2 asked -> inputs {inputs}, targets {targets}"),
    ("diffusion", "abcdefgh", 8, {}, "abcdefgh, p = {p:.1f} -> inputs {inputs}, targets {targets}, weights {weight:.0f} where asked"),
    ("nsp", ["abcdef", "uvwxyz"], 9, {}, "abcdef / uvwxyz -> {unmasked} label {label}, or"),
    ("nsp", ["abcdef", "uvwxyz"], 9, {}, "or {unmasked} label {label}"),
    ("sop", ["abcdef"], 9, {}, "abcdef -> {unmasked} label {label}, or"),
    ("sop", ["abcdef"], 9, {}, "or {unmasked} label {label}"),
    ("contrastive", ["abc", "cde"], 6, {}, "crops abc and cde -> inputs {inputs}, segment {segment}, nothing to predict"),
    ("span", "abcdefghij$zzzz", 15, dict(corruption_rate=0.3, mean_span=1.5), "abcdefghij -> {whole}"),
    ("ul2", "abcdefgh$zzz", 12, {}, "abcdefgh -> {whole} or"),
    ("ul2", "abcdefgh$z", 10, {}, "or {whole} or"),
    ("bart", "ab. cdef. gh$zzzzzzzzz", 22, {}, '"ab. cdef. gh" -> "{whole}"'),
]


def ids_of(text) -> list:
    return [ids_of(t) for t in text] if isinstance(text, list) else [TOK.EOT if c == "$" else ord(c) for c in text]


def spell(ids) -> str:
    """Ids in the notation of the docstrings; the targets of several horizons as pairs."""
    if np.ndim(ids) == 2:
        return " ".join(f"({' '.join(spell([i]) for i in pair)})" for pair in ids)
    return "".join({TOK.EOT: "$", TOK.MASK: "#", TOK.PAD: "", IGNORE: "_"}.get(int(i), TOK.decode([i])) for i in ids)


def spelled(made: dict, b: int) -> dict:
    inputs, targets, weight, end = made["inputs"][b], made["targets"][b], float(made["weights"][b, 0]), real(made)[b].sum()
    out = {key: "".join(str(int(i)) for i in made[key][b]) for key in ("prefix", "segment")}
    out |= dict(inputs=spell(inputs), targets=spell(targets), weight=weight, p=1 / weight, label=made["label"][b] if "label" in made else None)
    return out | (dict(whole=spell([*inputs, targets[end - 1]]), unmasked=spell(unmasked(made)[b])) if targets.ndim == 1 else {})


@pytest.mark.parametrize("name, text, T, knobs, words", EXAMPLES, ids=[row[0] for row in EXAMPLES])
def test_worked_example(name, text, T, knobs, words):
    """Among many draws for the docstring's text there is the docstring's row."""
    x, docstring = repeat(ids_of(text), 1000), " ".join(OBJECTIVES[name].corrupt.__doc__.split())
    draws = (spelled(made, b) for step in range(30) for made in [corrupt(name, x, T, step=step, **knobs)] for b in range(1000))
    assert any(words.format(**drawn) in docstring for drawn in draws)


def test_worked_example_of_electra():
    """The generator's guesses fill the row; a correct one counts as original."""
    made = corrupt("electra", repeat(ids_of("abcdefgh"), 999), 8, mask_rate=0.25)
    batch = collate(one(made, next(b for b in range(999) if spell(made["targets"][b]) == "___d__g_")))
    model, read, hidden = model_for("electra"), [], torch.zeros(1, 8, 32)
    hidden[0, [3, 6]] = 100 * model.embed_tokens.weight[ids_of("dx")].detach()
    model.generate_hidden = lambda ids, mask: hidden
    model.register_forward_pre_hook(lambda _, args: read.append(TOK.decode(args[0][0])))
    verdicts = torch.tensor([0.0, 0, 0, 0, 0, 0, 1, 0])
    model.detect_head.register_forward_hook(lambda *_: 40 * verdicts[None, :, None] - 20)
    _, figures = loss_of("electra", model, batch)
    assert figures["detect_accuracy"] == 1 and figures["detect_loss"] < 1e-6 and figures["replaced"] == 1 / 8
    words = f"abcdefgh, d and g asked, the generator says d and x -> reads {read[0]}, replaced {''.join(str(int(v)) for v in verdicts)}"
    assert words in " ".join(OBJECTIVES["electra"].loss.__doc__.split())


def test_every_objective_has_a_worked_example():
    assert {name for name, *_ in EXAMPLES} | {"electra"} == set(OBJECTIVES)


# ---- rows: what is asked, what comes back ---------------------------------------------------------------------------

def last_read(made):
    """From the last position of a source to the one before its target's last token."""
    more_source = made["prefix"][:, 1:] & (made["segment"][:, 1:] == made["segment"][:, :-1])
    return real(made) & ~np.pad(more_source, ((0, 0), (0, 1)))


ASKED = dict(clm=real, fim=real, mtp=real, prefix=last_read, span=last_read, ul2=last_read, bart=last_read,
             diffusion=lambda made: made["inputs"] == TOK.MASK, contrastive=lambda made: made["segment"] < 0)


@pytest.mark.parametrize("name", ASKED)
def test_exactly_these_positions_are_asked(name):
    _, made = draw(name, B=64)
    assert ((made["targets"] != IGNORE).reshape(64, 48, -1) == ASKED[name](made)[..., None]).all()
    assert (made["weights"] == 1).all() or name == "diffusion"


@pytest.mark.parametrize("name", ["mlm", "electra", *PAIRS])
@pytest.mark.parametrize("rate", [0.15, 0.4, 0.001])
def test_mask_count_is_exact(name, rate):
    _, made = draw(name, B=64, mask_rate=rate)
    asked, ordinary = made["targets"] != IGNORE, unmasked(made) < TOK.n_ordinary
    assert asked.sum(1).tolist() == [max(1, round(rate * n)) for n in ordinary.sum(1).tolist()]
    assert ordinary[asked].all() and asked[made["inputs"] == TOK.MASK].all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_shape_and_attention_arrays(name):
    """Examples are numbered 1, 2, ..., padding is 0 and last; prefix is all False, all True, or True then False in each example."""
    _, made = draw(name, B=64, T=50)
    kind, segments, prefixes = OBJECTIVES[name].attention, made["segment"], made["prefix"]
    assert all(made[key].shape[:2] == (64, 50) for key in ("inputs", "targets", "weights", "segment", "prefix"))
    assert {"causal": not prefixes.any(), "full": prefixes.all(), "prefix": prefixes.any() and not prefixes.all()}[kind]
    assert segments.max() == 2 if name == "contrastive" else segments.max() > 1 if name in PACKED else segments.max() == 1
    assert ((segments == 0) == (made["inputs"] == TOK.PAD)).all()
    for segment, prefix in zip(segments, prefixes):
        used = segment[:(segment > 0).sum()]
        assert used[0] == 1 and set(np.diff(used).tolist()) <= {0, 1} and (segment[len(used):] == 0).all()
        for part in (prefix[segment == k] for k in range(1, used[-1] + 1 if kind == "prefix" else 0)):
            assert part[0] and not part[-1] and (np.diff(part.astype(int)) <= 0).all()


@pytest.mark.parametrize("name", ["clm", "prefix", "mtp"])
def test_left_to_right_rows_hold_the_raw_tokens(name):
    x, made = draw(name, B=32)
    targets, following = made["targets"].reshape(32, 48, -1), np.stack([x[:, k:k + 48] for k in range(1, x.shape[1] - 47)], -1)
    assert (made["inputs"] == x[:, :48]).all() and targets.shape[2] == (4 if name == "mtp" else 1)
    assert (targets == following)[targets != IGNORE].all()


def test_doc_mask_asks_nothing_after_eot_and_parts_documents():
    x, made = draw("clm", doc_mask=True)
    assert ((made["targets"] == IGNORE) == (x[:, :48] == TOK.EOT)).all() and (made["targets"] == TOK.EOT).any()
    assert all(segment.tolist() == [1 + ids[:t].tolist().count(TOK.EOT) for t in range(48)] for ids, segment in zip(x, made["segment"]))


@pytest.mark.parametrize("name", MASKED)
def test_masked_rows_give_back_the_text_and_hide_it(name):
    """Other text under the [MASK]s and the same draws: the same inputs."""
    x, made = draw(name, B=32)
    hidden = made["inputs"] == TOK.MASK
    again = corrupt(name, np.where(hidden, (x + 1) % 256, x), 48)
    assert (unmasked(made) == x).all() and hidden.any()
    assert (again["inputs"] == made["inputs"]).all() and (again["targets"][hidden] != made["targets"][hidden]).all()


def splice(source: list[int], target: list[int]) -> list[int]:
    """The slow way back: at a sentinel of the source, read on after the same sentinel in the target."""
    is_sentinel, text = lambda i: i >= TOK.sentinel, []
    order = list(range(TOK.sentinel, TOK.sentinel + sum(map(is_sentinel, source))))
    assert [i for i in source if is_sentinel(i)] == [i for i in target if is_sentinel(i)] == order
    for i in source:
        after = target[target.index(i) + 1:] if is_sentinel(i) else [i]
        text += itertools.takewhile(lambda j: not is_sentinel(j), after)
    return text


def undo(name: str, source: list[int], target: list[int]) -> list[int]:
    if name == "bart":
        return target
    mode, *rest = source if name == "ul2" else [None, *source]
    assert name == "span" or mode in (TOK.R, TOK.S, TOK.X)
    return rest + target if mode == TOK.S else splice(rest, target)


@pytest.mark.parametrize("name, knobs", [("span", {}), ("span", dict(corruption_rate=0.5, mean_span=1)), ("span", dict(mean_span=64)), ("ul2", {}),
                                         *(("bart", dict(bart_noise=noise)) for noise in ("infill,permute", "delete", "rotate,infill,delete,permute"))])
def test_text_comes_back_from_source_and_target(name, knobs):
    """Example by example it is the documents of the window, and `source` says how far the window was read."""
    x, made = draw(name, B=64, T=80, text=letters(2, 60), **knobs)
    for b in range(64):
        back = [undo(name, s, t) for s, t in examples(made, b)]
        pieces = [piece for piece in documents(x[b]) if len(piece) > 1]
        assert back[:-1] == pieces[:len(back) - 1] and back[-1] == pieces[len(back) - 1][:len(back[-1])]
        assert back == [piece for i, piece in enumerate(documents(made["source"][b])) if piece and (i or len(piece) > 1)]


def fim_pieces(made: dict, b: int, tok=TOK) -> list[list[int]]:
    """The pieces of a row, each with its EOT if it has one."""
    end = real(made)[b].sum()
    ids = [*made["inputs"][b, :end].tolist(), int(made["targets"][b, end - 1])]
    cuts = [0, *(i + 1 for i, token in enumerate(ids) if token == tok.EOT), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(cuts) if b > a]


def unfim(piece: list[int], tok) -> bytes:
    """The text of a piece, in whatever layout; a transformed one ends with its EOT."""
    if piece[0] not in (tok.PRE, tok.SUF):
        return tok.decode_bytes([i for i in piece if i != tok.EOT])
    assert piece[-1] == tok.EOT, f"{tok.decode(piece)!r} is cut off"
    second, middle = piece.index(tok.SUF if piece[0] == tok.PRE else tok.PRE), piece.index(tok.MID)
    p, s = sorted((piece[:second], piece[second:middle]), key=lambda part: part[0] == tok.SUF)
    return b"".join(map(tok.decode_bytes, (p[1:], piece[middle + 1:-1], s[1:])))


@pytest.mark.parametrize("layouts", ["psm", "spm", "spm2", "psm,spm,spm2"])
@pytest.mark.parametrize("tok", [TOK, BPE], ids=["bytes", "bpe"])
def test_fim_gives_back_the_text_byte_for_byte(tok, layouts):
    """Also where characters have several bytes, where a cut splits a token, and where the row's end cuts a document."""
    dice = np.random.default_rng(0)
    text = text_of((tok.encode(PROSE[a:a + dice.integers(1, 60)]) for a in dice.integers(0, len(PROSE) - 60, 200)), tok)
    x = text.stream(Rng(1, 0, 0, range(600)), 65)
    made = corrupt("fim", x, 64, tok, fim_rate=1, fim_layouts=layouts)
    for b in range(600):
        pieces, source = fim_pieces(made, b, tok), made["source"][b][made["source"][b] >= 0]
        assert (source == x[b, :len(source)]).all() and (made["segment"][b] == 0).sum() <= (0 if tok is TOK else 16)
        assert all(len(p) < 16 or p[0] in (tok.PRE, tok.SUF) for p in pieces), "left as it was, though there was room"
        assert b"|".join(unfim(p, tok) for p in pieces).rstrip(b"|") == b"|".join(map(tok.decode_bytes, documents(source, tok.EOT))).rstrip(b"|")
    assert {token for token in (tok.PRE, tok.SUF) if (made["inputs"][:, 0] == token).any()} == {
        "psm": {tok.PRE}, "spm": {tok.SUF}, "spm2": {tok.PRE}}.get(layouts, {tok.PRE, tok.SUF})


@pytest.mark.parametrize("name", OBJECTIVES)
def test_specials_are_never_corrupted_nor_drawn(name):
    """Windows hold EOTs: none is replaced or asked about inside a text, and no corruption makes up a special token."""
    x, made = draw(name, B=256, T=64, text=letters(4, 12))
    ids, marks = made["inputs"], {*range(TOK.n_ordinary), TOK.MASK}
    assert (x >= TOK.n_ordinary).any()
    if name in (*MASKED, *PAIRS):
        before = unmasked(made)
        assert (made["targets"] < TOK.n_ordinary).all() and (ids == before)[before >= TOK.n_ordinary].all() and set(ids[ids != before].tolist()) <= marks
    for source, target in (pair for b in range(256) for pair in examples(made, b)) if name in PACKED else ():
        allowed = marks if name == "bart" else {*range(TOK.n_ordinary), TOK.R, TOK.S, TOK.X, *range(TOK.sentinel, TOK.n_ids)}
        assert set(source) <= allowed and set(target) <= allowed - {TOK.MASK, TOK.R, TOK.S, TOK.X}


# ---- randomness -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text", [letters, functools.partial(letters, 2, 12)], ids=["long", "short"])
@pytest.mark.parametrize("spec", [*OBJECTIVES, MIXTURE])
def test_rows_depend_on_seed_step_and_row_alone(spec, text):
    rows = lambda step=3, which=range(8), seed=1: make_rows(parse_mixture(spec), text(), Rng(seed, 0, step, which, 8), TOK, 48, Knobs())
    whole, again = rows(), rows()
    for key, value in whole.items():
        assert (value == again[key]).all() and all((value[b:b + 1] == rows(which=[b])[key]).all() for b in range(8)), key
    assert all((other["inputs"] != whole["inputs"]).any(1).all() for other in (rows(step=4), rows(seed=2)))
    assert len({row.tobytes() for row in whole["inputs"]}) == 8


@pytest.mark.parametrize("name", OBJECTIVES)
def test_corruption_leaves_its_input_alone_and_is_fresh_at_every_step(name):
    x, _ = draw(name)
    before = x.copy()
    x.setflags(write=False)
    steps = {tuple(value.tobytes() for value in corrupt(name, x, 48, step=step).values()) for step in range(5)}
    assert (x == before).all() and len(steps) == (1 if name in ("clm", "mtp", "contrastive") else 5)


def test_contrastive_draws_from_a_replay_and_from_a_single_document():
    """An older corpus mixed back in; a validation text that holds one document."""
    for text in (Replay(letters(), letters(5, 9), 0.5), text_of([range(97, 123)])):
        assert (make_rows({"contrastive": 1.0}, text, Rng(1, 0, 0, range(8)), TOK, 48, Knobs())["segment"] > 0).any(1).all()


def test_choose_is_uniform_and_distinct():
    assert fair(tally(map(tuple, Rng(1, 0, 0, range(8000)).choose(6, 3).tolist()), itertools.combinations(range(6), 3)))


# ---- no leakage -----------------------------------------------------------------------------------------------------

def moved(read, ids: torch.Tensor) -> np.ndarray:
    """(T,) ids -> (T, T): does the state at q (down) change when the token at k (across) does?"""
    T = len(ids)
    others = ids.long().repeat(T + 1, 1)
    others[range(T), range(T)] = (others[0] + 1) % TOK.n_ordinary
    with torch.no_grad():
        h = read(others)
    return ((h[:T] - h[T]).abs().amax(-1) > 1e-9).T.numpy()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_nothing_leaks(name):
    """Through the model, a state moves with every token that the rule lets it see and with no other, above all not the answer."""
    model, (_, made) = awake(model_for(name), torch.float64), draw(name, B=4, T=40)
    for b in range(4):
        batch, segment, targets = collate(one(made, b)), made["segment"][b], made["targets"][b].reshape(40, -1)[:, 0]
        mask, rule = mask_of(batch, model), sees(segment, made["prefix"][b])
        readers = [lambda ids: model.trunk(ids, mask), *([lambda ids: model.generate_hidden(ids, mask)] if model.generator else [])]
        assert all((moved(read, batch["inputs"][0]) == rule)[segment > 0].all() for read in readers)
        if OBJECTIVES[name].attention != "full":                  # the answer is the row's next token
            q = np.flatnonzero((targets != IGNORE)[:-1] & (segment[1:] == segment[:-1]))
            assert len(q) and not rule[q, q + 1].any() and (targets[q] == made["inputs"][b][q + 1]).all()


@pytest.mark.parametrize("kind", ["parallel", "chain"])
def test_no_horizon_sees_its_answer(kind):
    """Horizon k at position t has read x[..t], and with a chain also x[t+1] ... x[t+k-1], but never x[t+k]."""
    model, T, n = awake(model_for("mtp", Knobs(mtp_heads=kind)), torch.float64), 12, 4
    ahead = lambda ids: torch.stack([ids[:, k:k + T] for k in range(1, n)], -1)
    for k in range(1, n + 1):
        read = lambda ids: F.pad(model(ids[:, :T], "causal", ahead(ids))[k - 1], (0, 0, 0, n))
        assert (moved(read, torch.arange(97, 97 + T + n))[:T] == np.tri(T, T + n, k - 1 if kind == "chain" else 0, dtype=bool)).all()


def naive_attention(q, k, v, allowed):
    """(H, T, D) arrays and (T, T): one head and one query at a time."""
    out = np.zeros_like(q)
    for h, t in np.ndindex(q.shape[:2]):
        group = h * len(k) // len(q)
        score = np.where(allowed[t], np.exp(k[group] @ q[h, t] / q.shape[2] ** 0.5), 0)
        out[h, t] = score / score.sum() @ v[group]
    return out


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("path", ["causal", "full", "rows"])
def test_attention_is_the_naive_rule(path, kv_heads):
    dice, T = np.random.default_rng(0), 14
    q, k, v = (dice.normal(size=(heads, T, 8)) for heads in (4, kv_heads, kv_heads))
    segment = np.array([1] * 5 + [2] * 6 + [0] * 3) if path == "rows" else np.ones(T, int)
    prefix = np.isin(range(T), [0, 1, 2, 5, 6, 13]) if path == "rows" else np.full(T, path == "full")
    mask = model_for("clm").mask(path, torch.tensor(segment)[None], torch.tensor(prefix)[None])
    got = attend(*(torch.tensor(a)[None] for a in (q, k, v)), mask)[0].numpy()
    np.testing.assert_allclose(got, naive_attention(q, k, v, sees(segment, prefix)), atol=1e-12)


def test_collate_never_changes_the_rule():
    """For every row of three positions, what the chosen path lets a position see is what the rule does."""
    model, paths = model_for("clm"), set()
    for segment, prefix in itertools.product(itertools.product([0, 1, 2], repeat=3), itertools.product([False, True], repeat=3)):
        batch = collate(objectives.rows(np.zeros((1, 3), np.int32), np.zeros((1, 3), np.int32), prefix=[prefix], segment=[segment]))
        mask, asking = mask_of(batch, model), np.array(segment) > 0
        allowed = {"causal": np.tri(3), "full": np.ones((3, 3))}[mask] if isinstance(mask, str) else mask[0, 0].numpy()
        assert (allowed == sees(segment, prefix))[asking].all(), (segment, prefix, batch["attention"])
        paths.add(batch["attention"])
    assert paths == {"causal", "full", "rows"}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_collate_keeps_targets_in_place_and_finds_the_fast_path(name):
    _, made = draw(name)
    batch, flat = collate(made), made["targets"].reshape(8 * 48, -1)
    at = np.flatnonzero(flat[:, 0] != IGNORE)
    assert batch["index"][:len(at)].tolist() == at.tolist() and (batch["weights"][len(at):] == 0).all()
    assert (batch["targets"].reshape(len(batch["index"]), -1)[:len(at)].numpy() == flat[at]).all()
    assert batch["denom"] == pytest.approx(made["weights"].ravel()[at].sum() or 1)
    fast = {"clm": "causal", "mtp": "causal", "fim": "causal", "mlm": "full", "electra": "full", "diffusion": "full"}
    assert batch["attention"] == fast.get(name, batch["attention"]) and (name not in (*PACKED, "prefix") or batch["attention"] == "rows")


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_tiles_cover_the_rule_and_nothing_empty():
    """Rows of two tiles: packed, prefix, causal, full, padded, and one whose two documents never meet."""
    T, made = 2 * FLEX_BLOCK, [draw(name, B=1, T=2 * FLEX_BLOCK)[1] for name in ("span", "bart", "prefix", "clm", "mlm")]
    padded = dict(segment=(np.arange(T) < 100)[None] * 1, prefix=(np.arange(T) < 30)[None])
    apart = dict(segment=np.repeat([1, 2], FLEX_BLOCK)[None], prefix=np.zeros((1, T), bool))
    segment, prefix = (torch.tensor(np.concatenate([row[key] for row in [*made, padded, apart]])) for key in ("segment", "prefix"))
    mask, rule = block_mask(segment, prefix), np.stack([sees(s, p) for s, p in zip(segment.tolist(), prefix.tolist())])
    visited = mask.to_dense()[:, 0].bool().numpy()
    assert not (rule & ~np.kron(visited, np.ones((FLEX_BLOCK, FLEX_BLOCK), bool))).any()
    assert visited[3].tolist() == [[True, False], [True, True]] and visited[6].tolist() == [[True, False], [False, True]]
    torch.manual_seed(0)
    q, k, v = (torch.randn(len(rule), heads, T, 16) for heads in (2, 1, 1))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):             # autocast leaves q and k in float32
        made = attend(q, k, v.to(dtype), mask)
        assert made.dtype == dtype
        torch.testing.assert_close(made, attend(q, k, v.to(dtype), torch.tensor(rule)[:, None]), atol=tolerance, rtol=tolerance * 10)


# ---- losses ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", OBJECTIVES)
def test_overfits_one_batch(name):
    batch, model = collate(draw(name, B=4, T=24)[1]), model_for(name, n_embd=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0)
    first = loss_of(name, model, batch)[0].item()
    for _ in range(120):
        loss, _ = loss_of(name, model, batch)
        if loss.item() < 0.1 * first:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pytest.fail(f"from {first:.3f} only to {loss.item():.3f}")


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "contrastive"])
def test_first_loss_is_that_of_a_uniform_guess(name):
    batch = collate(draw(name)[1])
    loss, figures = loss_of(name, model_for(name), batch)
    want, got = math.log(TOK.vocab_size), figures.get("token_loss", loss).item()
    if name == "diffusion":                                       # [MASK] is no candidate
        want = math.log(TOK.vocab_size - 1) * (batch["weights"].sum() / batch["inputs"].numel()).item()
    assert got == pytest.approx(want, rel=0.01)
    assert all(figures[key].item() == pytest.approx(math.log(2), rel=0.01) for key in ("pair_loss", "detect_loss") if key in figures)


LOSSES = [("nsp", {}, lambda f: f["token_loss"] + f["pair_loss"]), ("electra", {}, lambda f: f["token_loss"] + 50 * f["detect_loss"]),
          ("mtp", dict(mtp_heads="parallel"), lambda f: f["loss_1"] + f["loss_2"] + f["loss_3"] + f["loss_4"]),
          ("mtp", dict(mtp_heads="chain"), lambda f: f["loss_1"] + 0.3 * (f["loss_2"] + f["loss_3"] + f["loss_4"]) / 3)]


@pytest.mark.parametrize("name, knobs, total", LOSSES)
def test_loss_is_the_sum_of_its_logged_parts(name, knobs, total):
    loss, figures = loss_of(name, awake(model_for(name, Knobs(**knobs))), collate(draw(name)[1]), **knobs)
    assert loss.item() == pytest.approx(total(figures).item(), rel=1e-5)
    assert all(0 <= figures[key] <= 1 for key in ("pair_accuracy", "detect_accuracy", "replaced") if key in figures)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_batch_without_targets_is_finite(name):
    made, model = draw(name)[1], model_for(name)
    loss, figures = loss_of(name, model, collate(made | {"targets": np.full_like(made["targets"], IGNORE)}))
    loss.backward()
    assert loss.isfinite() and all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert name == "contrastive" or figures.get("token_loss", loss).item() == 0


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_training_step_never_asks_the_host(name, monkeypatch):
    """On a device whose tensors have no values, a look at one, or an operation that mixes in another device's, would raise."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)                     # that device has none
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    batch, config = collate(draw(name)[1]), model_for(name).config
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("meta"):
            model = Transformer(config)
        loss_of(name, model, {k: v.to("meta") if torch.is_tensor(v) else v for k, v in batch.items()})[0].backward()
        assert model.embed_tokens.weight.grad is not None


@pytest.mark.parametrize("banned", [None, 7])
def test_linear_cross_entropy_is_cross_entropy(banned):
    """Loss and gradients, over several chunks, with weights, and with an id that can never be predicted."""
    torch.manual_seed(0)
    h, u = torch.randn(600, 16, requires_grad=True), torch.randn(1 << 14, 16, requires_grad=True)
    targets, weights = torch.randint(9, 1 << 14, (600,)), torch.rand(600)
    loss, nll = linear_cross_entropy(h, u, targets, weights, banned)
    logits = (h @ u.T).index_fill(1, torch.tensor([] if banned is None else [banned], dtype=torch.long), -math.inf)
    each = F.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(nll, each.detach(), atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(torch.autograd.grad(3 * loss, (h, u)), torch.autograd.grad(3 * (each * weights).sum(), (h, u))):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_diffusion_equals_the_exact_count_form(monkeypatch):
    """Averaged over all masks of three tokens and integrated over t: the loss of masking l tokens, l uniform. [MASK] is no candidate."""
    monkeypatch.setattr(objectives, "DIFFUSION_EPS", 1e-9)
    model, x, got, want = awake(model_for("diffusion")), repeat(b"abc", 1), 0.0, 0.0
    for mask in (m for m in itertools.product([False, True], repeat=3) if any(m)):
        n = sum(mask)
        for node, node_weight in zip(*np.polynomial.legendre.leggauss(3)):          # exact for polynomials of degree 5
            rng = Rng(1, 0, 0, [0])
            rng.shared, rng.random = (node + 1) / 2, lambda T: np.where([mask], 0.0, 1.0)
            made = OBJECTIVES["diffusion"].corrupt(x, rng, TOK, 3, Knobs())
            p = 1 / made["weights"][0, 0]
            got += node_weight / 2 * p**n * (1 - p) ** (3 - n) * loss_of("diffusion", model, collate(made))[0].item()
        ids, at = torch.tensor(x).long(), torch.tensor([mask])
        logits = model.logits(model(ids.masked_fill(at, TOK.MASK), "full")[0]).index_fill(2, torch.tensor(TOK.MASK), -math.inf)
        want += F.cross_entropy(logits[at], ids[at], reduction="sum").item() / n / math.comb(3, n) / 3
    assert got == pytest.approx(want, rel=1e-4)


def test_info_nce():
    """Identical embeddings tell nothing apart: ln(pairs). Pairs that agree and nobody else: nothing. And by hand, both directions."""
    same = F.normalize(torch.ones(16, 8), dim=1)
    loss, accuracy = info_nce(torch.eye(8), torch.eye(8))
    assert info_nce(same, same)[0].item() == pytest.approx(math.log(16)) and loss < 1e-6 and accuracy == 1
    angle = torch.tensor([0.1, 0.5]), torch.tensor([0.2, 0.3])
    e = [[math.exp(math.cos(a - b) / 0.05) for b in angle[1].tolist()] for a in angle[0].tolist()]
    rows, columns = e[0][0] / sum(e[0]) * e[1][1] / sum(e[1]), e[0][0] / (e[0][0] + e[1][0]) * e[1][1] / (e[0][1] + e[1][1])
    assert info_nce(*(torch.stack([a.cos(), a.sin()], 1) for a in angle))[0].item() == pytest.approx(-math.log(rows * columns) / 4, rel=1e-4)


def test_contrastive_pools_each_crop_alone():
    """A row's two embeddings are the means of its crops, each read by itself; padding has no part in them."""
    model = awake(model_for("contrastive"))
    batch = collate(corrupt("contrastive", np.array([[[97, 98, 99, 100], [101, 102, TOK.PAD, TOK.PAD]]], np.int32), 8))
    both = objectives.embed(model, batch["inputs"], model.mask("rows", batch["segment"], batch["prefix"]), batch["segment"], 2)
    for crop, got in (([97, 98, 99, 100], both[0, 0]), ([101, 102], both[0, 1])):
        torch.testing.assert_close(got, F.normalize(model(torch.tensor([crop]), "full")[0][0].mean(0), dim=0), atol=1e-5, rtol=1e-4)


def test_detection_teaches_the_generator_nothing():
    """The gradient of generator-only parameters does not depend on the weight of the detection loss; the trunk's does. And
    what the generator fills in is never a special token, and counts as replaced where it is not the original."""
    grads, read, made = [], [], draw("electra")[1]
    for weight in (0.0, 50.0):
        model = awake(model_for("electra"))
        model.register_forward_pre_hook(lambda _, args: read.append(args[0].numpy()))
        loss, figures = loss_of("electra", model, collate(made), rtd_weight=weight)
        loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    mine = [name for name in grads[0] if name.startswith("generator")]
    assert mine and all(grads[0][name].abs().max() > 0 and torch.equal(grads[0][name], grads[1][name]) for name in mine)
    asked = made["targets"] != IGNORE
    assert (read[0] == made["inputs"])[~asked].all() and (read[0][asked] < TOK.n_ordinary).all()
    assert figures["replaced"].item() == pytest.approx((read[1] != unmasked(made)).mean(), rel=1e-5)
    assert grads[0]["layers.0.mlp.up_proj.weight"].abs().max() == 0 < grads[1]["layers.0.mlp.up_proj.weight"].abs().max()


def test_doc_mask_runs_documents_alone():
    """The logits of a packed row are those of its documents, each run by itself from position 0."""
    model, batch = awake(model_for("clm")), collate(draw("clm", B=2, T=96, doc_mask=True)[1])
    packed = model.logits(model(batch["inputs"], mask_of(batch, model))[0])
    for row, ids, segment in zip(packed, batch["inputs"], batch["segment"]):
        for at in (segment == k for k in segment.unique()):
            torch.testing.assert_close(row[at], model.logits(model(ids[at][None])[0])[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["parallel", "chain"])
def test_mtp_without_its_heads_is_clm(kind):
    full, plain, batch = awake(model_for("mtp", Knobs(mtp_heads=kind))), model_for("clm"), collate(draw("mtp")[1])
    plain.load_state_dict({name: p for name, p in full.state_dict().items() if not name.startswith("future")})
    torch.testing.assert_close(full(batch["inputs"], "causal", batch["ahead"])[0], plain(batch["inputs"])[0])
    x, _ = draw("clm")
    one_horizon = loss_of("mtp", plain, collate(corrupt("mtp", x, 48, n_future=1)), n_future=1)[0]
    assert one_horizon.item() == pytest.approx(loss_of("clm", plain, collate(corrupt("clm", x, 48)))[0].item(), rel=1e-6)


@pytest.mark.parametrize("kv_heads, tied", [(4, False), (2, False), (1, True)])
def test_model_is_qwen3(kv_heads, tied):
    """Another implementation with the same weights under the same names gives the same logits."""
    transformers = pytest.importorskip("transformers")
    mine = awake(model_for("clm", n_head=4, n_kv_head=kv_heads, tied=tied))
    c = mine.config
    theirs = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=c.vocab_size, hidden_size=c.n_embd, intermediate_size=c.d_ff, num_hidden_layers=c.n_layer, num_attention_heads=c.n_head,
        num_key_value_heads=c.n_kv_head, head_dim=c.head_dim, rms_norm_eps=c.norm_eps, tie_word_embeddings=tied)).eval()
    weights = {name if name.startswith("lm_head") else f"model.{name}": p for name, p in mine.state_dict().items()}
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if tied else set())
    ids = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(mine.logits(mine(ids)[0]), theirs(ids).logits, atol=1e-4, rtol=1e-4)


# ---- distributions --------------------------------------------------------------------------------------------------

def test_mlm_corrupts_80_10_10_and_favours_no_position():
    x = repeat([97 + i % 26 for i in range(100)], 4000)
    made = corrupt("mlm", x, 100)
    asked, inputs = made["targets"] != IGNORE, made["inputs"]
    masked, changed = inputs == TOK.MASK, asked & (inputs != TOK.MASK) & (inputs != x)
    kept = asked.sum() - masked.sum() - changed.sum()
    assert fair([masked.sum(), changed.sum(), kept], [0.8, 0.1 * 255 / 256, 0.1 + 0.1 / 256])        # a random token may be the same one
    assert fair(np.bincount(inputs[changed], minlength=256)[:97]) and set(inputs[changed].tolist()) == set(range(256))
    assert abs(asked.mean(0) / 0.15 - 1).max() < 0.2


def test_diffusion_is_stratified_and_weighs_by_its_rate():
    _, made = draw("diffusion", B=512, T=200)
    p, ordinary, masked = 1 / made["weights"][:, 0].astype(float), unmasked(made) < TOK.n_ordinary, made["inputs"] == TOK.MASK
    t = (p - 1e-3) / (1 - 1e-3)
    assert sorted(((t - t.min()) * 512).round(1).tolist()) == list(range(512)) and 0 <= t.min() < 1 / 512
    z = (masked.sum(1) - p * ordinary.sum(1)) / np.sqrt(p * (1 - p) * ordinary.sum(1) + 0.01)
    assert abs(z).max() < 5 and 0.8 < (z**2).mean() < 1.2 and fair(masked.sum(0), (p[:, None] * ordinary).sum(0))


def span_counts(L: int, rate: float, mean: float) -> tuple[int, int]:
    n = min(max(round(rate * L), 1), L - 1)
    return n, max(1, round(n / mean))


def longest(T: int, rate: float, mean: float, extra: int = 0) -> int:
    return max(L for L in range(2, T) if L + 2 * span_counts(L, rate, mean)[1] + 2 + extra <= T + 1)


@pytest.mark.parametrize("rate, mean, T", [(0.15, 3, 128), (0.5, 3, 100), (0.5, 64, 128), (0.15, 64, 300), (0.9, 10, 77)])
def test_span_counts_are_exact_and_fill_the_row(rate, mean, T):
    """Noise tokens, spans, row length; every span has a token, and so has every gap between two spans."""
    L = longest(T, rate, mean)
    n, s = span_counts(L, rate, mean)
    made = corrupt("span", repeat(np.arange(T) % 256, 50), T, corruption_rate=rate, mean_span=mean)
    for source, target in (pair for b in range(50) for pair in examples(made, b)):
        assert splice(source, target) == [i % 256 for i in range(L)] and len(source) == L - n + s and len(target) == n + s
        assert not any(i >= TOK.sentinel <= j for side in (source, [*target, TOK.sentinel]) for i, j in itertools.pairwise(side))


def hidden(name: str, L: int, T: int, B: int, **knobs) -> np.ndarray:
    """(B, L) bool: which of the raw tokens 0 ... L-1 are missing from the source."""
    sources, _ = first_examples(name, repeat(range(L), B, T), T, **knobs)
    return np.array([np.isin(range(L), source, invert=True) for source in sources])


def test_span_arrangements_are_equally_likely():
    """Ten tokens, four of them noise in two spans: every pattern with two runs, and no other, as often as the next."""
    patterns = [bits for bits in itertools.product([False, True], repeat=10)
                if sum(bits) == 4 and sum(b and not a for a, b in itertools.pairwise((False, *bits))) == 2]
    got = hidden("span", 10, 15, 9000, corruption_rate=0.4, mean_span=2)
    assert len(patterns) == 63 and fair(tally(map(tuple, got.tolist()), patterns))


def test_spans_favour_no_position():
    """Everywhere the rate, but where fewer arrangements reach: the first and last token begin or end one of s spans, no more,
    no less. One long span stands anywhere. BART's infilling likewise."""
    often = hidden("span", 100, 111, 10000).mean(0)               # n = 15, s = 5
    assert often.sum() == pytest.approx(15) and abs(often[8:-8] / 0.15 - 1).max() < 0.2 and abs(often[[0, -1]] / (5 / 86) - 1).max() < 0.2
    assert fair(tally(hidden("span", 100, 103, 9000, mean_span=64).argmax(1).tolist(), range(86)))
    often = hidden("bart", 100, 300, 6000, bart_noise="infill").mean(0)
    assert often.sum() == pytest.approx(30) and abs(often[9:-9] / 0.3 - 1).max() < 0.2 and abs(often[:50].sum() / 15 - 1) < 0.03


def test_ul2_draws_its_table():
    """Modes and denoisers by their shares, each with its own counts; the mode token counts toward T."""
    T, seen, shares = 256, Counter(), Counter()
    for source, target in zip(*first_examples("ul2", repeat(np.arange(T) % 256, 4000), T)):
        spans = sum(i >= TOK.sentinel for i in target)
        seen[source[0], spans, len(target) - spans if spans else 0] += 1
    for mode, share, shape in UL2:
        n, s = span_counts(longest(T, shape[1], shape[0], 1), shape[1], shape[0]) if shape else (0, 0)
        shares[getattr(TOK, mode), s, n] += share
    assert len(shares) == 7 and fair(tally(seen.elements(), shares), list(shares.values()))
    assert [sum(share for (m, *_), share in shares.items() if m == mode) for mode in (TOK.R, TOK.S, TOK.X)] == [0.5, 0.25, 0.25]


def test_splits_are_uniform():
    """prefix: on 1 ... T-1. ul2's suffixes of L = 62 tokens: on [L/4, 3L/4]."""
    assert fair(tally(draw("prefix", B=8000, T=33)[1]["prefix"].sum(1).tolist(), range(1, 33)))
    assert fair(tally((len(s) - 1 for s in first_examples("ul2", repeat(range(64), 12000), 64)[0] if s[0] == TOK.S), range(16, 47)))
    assert (draw("prefix", T=40, prefix_frac=0.3)[1]["prefix"].sum(1) == 12).all()


def test_fim_cuts_between_characters_uniformly():
    """Four characters of one to four bytes have five places to cut, and every pair of places is as likely as any other."""
    made, cuts = corrupt("fim", repeat("aé漢😀".encode(), 9000, 14), 13, fim_rate=1, fim_layouts="psm"), []
    for row in made["inputs"].tolist():
        p, s = row[1:row.index(TOK.SUF)], row[row.index(TOK.SUF) + 1:row.index(TOK.MID)]
        cuts.append((len(bytes(p).decode()), 4 - len(bytes(s).decode())))                 # decode() raises inside a character
    pairs = list(itertools.combinations_with_replacement(range(5), 2))
    assert fair(tally(cuts, pairs), [1 + (i < j) for i, j in pairs])


def test_fim_rate_and_layouts():
    made = draw("fim", B=2000, T=80, text=letters(6, 10))[1]
    first = Counter(fim_pieces(made, b)[1][0] for b in range(2000))              # of each row's second piece, a whole document
    pre, suf = first[TOK.PRE], first[TOK.SUF]
    assert fair([pre + suf, 2000 - pre - suf]) and fair([pre, suf])
    none, every = (draw("fim", T=80, fim_rate=rate)[1]["inputs"] for rate in (0, 1))
    assert (none <= TOK.EOT).all() and np.isin(every[:, 0], [TOK.PRE, TOK.SUF, TOK.EOT]).all()


def test_bart_infills_exactly_30_percent_with_poisson_lengths():
    """A span between two clean tokens shows its length, 0 included, by the numbers missing between them."""
    lengths, poisson = [], [math.exp(-3) * 3**k / math.factorial(k) for k in range(9)]
    for source, target in zip(*first_examples("bart", repeat(np.arange(4000) % 256, 40), 4000, bart_noise="infill")):
        assert len(target) - sum(i != TOK.MASK for i in source) == round(0.3 * len(target)) and target == [i % 256 for i in range(len(target))]
        lengths += [(c - a - 1) % 256 for a, b, c in zip(source, source[1:], source[2:]) if b == TOK.MASK and TOK.MASK not in (a, c)]
    assert fair(tally((min(k, 9) for k in lengths), range(10)), [*poisson, 1 - sum(poisson)]) and np.mean(lengths) == pytest.approx(3, abs=0.1)


def test_bart_permutes_sentences_and_infills_by_default():
    parts = ["One.", " Two!", "\n", "Is it three?"]
    text = list("".join(parts).encode())
    sources, targets = first_examples("bart", repeat(text, 3000, 2 * len(text) + 1), 2 * len(text) + 1, bart_noise="permute")
    ways = {tuple(ord(c) for c in "".join(way)): 0 for way in itertools.permutations(parts)}
    assert len(ways) == 24 and fair(tally(map(tuple, sources), ways)) and set(map(tuple, targets)) == {tuple(text)}
    sources, _ = first_examples("bart", repeat(text, 500, 60), 60)
    assert all(TOK.MASK in s for s in sources) and any(s.index(ord("I")) < s.index(ord("O")) for s in sources if {ord("I"), ord("O")} <= set(s))


def test_bart_deletes_30_percent_and_rotates_anywhere():
    sources, _ = first_examples("bart", repeat(range(20), 4000, 35), 35, bart_noise="delete")
    assert all(len(s) == 14 and list(s) == sorted(s) for s in sources) and fair(tally(itertools.chain(*sources), range(20)))
    sources, targets = first_examples("bart", repeat(range(20), 4000, 41), 41, bart_noise="rotate")
    assert all(s == [(s[0] + i) % 20 for i in range(20)] and t == list(range(20)) for s, t in zip(sources, targets))
    assert fair(tally((s[0] for s in sources), range(20)))


def sides(made: dict, b: int) -> tuple[list[int], list[int]]:
    """A and B of [CLS] A [SEP] B [SEP]."""
    ids = [i for i in unmasked(made)[b].tolist() if i != TOK.PAD]
    middle = ids.index(TOK.SEP)
    assert ids[0] == TOK.CLS and ids[-1] == TOK.SEP and ids.count(TOK.SEP) == 2
    return ids[1:middle], ids[middle + 1:-1]


@pytest.mark.parametrize("name", PAIRS)
def test_half_the_pairs_are_what_they_seem(name):
    """nsp: B follows A, or comes from another document. sop: A and B are contiguous, or would be if swapped."""
    _, made = draw(name, B=2000, T=40, text=counting(60))
    for b, label in enumerate(made["label"]):
        A, B = sides(made, b)
        wrong = contiguous(B + A) if name == "sop" else contiguous(A) and contiguous(B) and A[0] // 32 != B[0] // 32
        assert A and B and (contiguous(A + B) if label else wrong)
    assert fair(tally(made["label"].tolist(), [0, 1])) and len({len(sides(made, b)[0]) for b in range(2000)}) == 36


def test_nsp_of_one_document_takes_a_distant_place():
    _, made = draw("nsp", B=500, T=23, text=text_of([range(200)]))
    assert all(abs(B[0] - A[-1]) > 50 for A, B in (sides(made, b) for b in np.flatnonzero(made["label"] == 0)))


@pytest.mark.parametrize("name", PAIRS)
def test_both_sides_have_a_token_however_short_the_documents(name):
    """And no window leaves its document."""
    _, made = draw(name, B=500, T=16, text=text_of([[97], [98, 99], [100], [101, 102, 103], [104]]))
    assert all(A and B and TOK.EOT not in A + B for A, B in (sides(made, b) for b in range(500)))


def test_contrastive_crops_one_document_twice_independently():
    x, made = draw("contrastive", B=8000, T=48, text=counting(32))
    assert (x.reshape(8000, -1) == made["inputs"]).all() and all(contiguous(crop) for crop in x.reshape(-1, 24).tolist())
    assert (x[:, 0, 0] // 32 == x[:, 1, 0] // 32).all() and fair(np.bincount(x[:, 0, 0] // 32))
    assert fair(tally(map(tuple, (x[:, :, 0] % 32).tolist()), itertools.product(range(9), repeat=2)))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return load_tokens(DataConfig(cache_dir=str(tmp_path_factory.mktemp("cache"))))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_at_most_one_percent_is_padding(name, library):
    made = make_rows({name: 1.0}, library.train, Rng(1, 0, 0, range(256)), library.tok, 512, Knobs())
    assert (made["segment"] == 0).mean() <= 0.01


# ---- mixtures, mistakes, tokenizers ---------------------------------------------------------------------------------

def test_mixture_draws_its_shares_and_logs_each_member():
    made = make_rows(mixture := parse_mixture("clm:1,prefix:0.6,mlm:0.4"), letters(), Rng(1, 0, 0, range(12000)), TOK, 16, Knobs())
    assert mixture == {"clm": 0.5, "prefix": 0.3, "mlm": 0.2} and fair(np.bincount(made["member"]), [5, 3, 2])
    assert (np.where(made["prefix"].all(1), 2, made["prefix"].any(1)) == made["member"]).all()
    model = awake(model_for("clm"))
    made = {key: value[:32] for key, value in made.items()}
    loss, figures = loss_of("clm", model, collate(made, tuple(mixture)))
    counts = [(made["targets"][made["member"] == i] != IGNORE).sum() for i in range(3)]
    assert loss.item() == pytest.approx(sum(figures[f"loss_{name}"][0].item() for name in mixture) / sum(counts), rel=1e-5)
    assert counts == [figures[f"loss_{name}"][1].item() for name in mixture]
    prefix = {key: value[made["member"] == 1] for key, value in made.items() if key != "member"}
    total, weight = figures["loss_prefix"]
    assert (total / weight).item() == pytest.approx(loss_of("prefix", model, collate(prefix))[0].item(), rel=1e-5)


def check(name: str, T: int = 256, given=None, **knobs):
    check_knobs({name: 1.0}, Knobs(**knobs), given or knobs, T)


KNOBS = [("mlm", "mask_rate", (0, 1, -0.1, 1.5, math.nan)), ("span", "corruption_rate", (0, 1, math.nan)), ("span", "mean_span", (0, 0.5, -3, math.nan)),
         ("prefix", "prefix_frac", (0, 1, math.nan)), ("fim", "fim_rate", (-0.1, 1.1, math.nan)), ("fim", "fim_layouts", ("", "pms", "psm,", "psm,psm")),
         ("bart", "bart_noise", ("", "zebra", "delete,delete")), ("mtp", "n_future", (0, -1)), ("mtp", "mtp_weight", (-1, math.nan, math.inf)),
         ("electra", "generator_frac", (0, 1.1, math.nan)), ("electra", "rtd_weight", (-1, math.nan, math.inf))]
ALONE = [name for name, row in OBJECTIVES.items() if row.loss is not objectives.token_loss]
REFUSED = [   # words of the message, what must not pass
    *((f"--{knob}", functools.partial(check, name, **{knob: value})) for name, knob, values in KNOBS for value in values),
    *((f"--{f.name} is not read by {name}", functools.partial(check, name, given={f.name}))
      for name in OBJECTIVES for f in fields(Knobs) if f.name not in OBJECTIVES[name].knobs),
    *((f"--objective={spec}", functools.partial(parse_mixture, spec))
      for spec in ("nothing", "", "clm,", "clm:x", "clm:0", "clm:-1", "clm:nan", "clm:inf", "fmi", *(f"clm,{name}" for name in ALONE))),
    *((words, functools.partial(check_text, {name: 1.0}, text_of(documents), 48, Knobs(), TOK))
      for words, name, documents in (("20 tokens", "clm", [range(19)]), ("needs 52", "mtp", [range(50)]),
                                     ("two documents", "contrastive", [range(200)]), ("two tokens", "sop", [[97]] * 60))),
    ("--block_size", functools.partial(check, "clm", 4)), ("--mean_span", functools.partial(check, "span", corruption_rate=0.9, mean_span=1.0)),
    ("--mean_span", functools.partial(check, "span", 2048, corruption_rate=0.4, mean_span=1.0)), ("UL2", functools.partial(check, "ul2", 8192))]


@pytest.mark.parametrize("words, attempt", REFUSED)
def test_mistake_is_one_line_that_names_it(words, attempt):
    """Mixtures that cannot be, knobs that nobody reads, values, row lengths and texts that make no row."""
    with pytest.raises(UserError) as raised:
        attempt()
    assert words in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_defaults_and_own_knobs_pass(name):
    check(name, given={*OBJECTIVES[name].knobs})
    check_text({name: 1.0}, letters(), 48, Knobs(), TOK)


@pytest.mark.parametrize("tok", [TOK, BPE], ids=["bytes", "bpe"])
def test_tokenizer_keeps_text_and_specials_apart(tok):
    for special in ("<|endoftext|>", *SPECIALS[:11], SPECIALS[-1]):
        ids = tok.encode(f"a{special}b")
        assert max(ids) < tok.n_ordinary <= tok.specials[special] and tok.decode(ids) == f"a{special}b" and tok.decode([tok.specials[special]]) == special
    again = type(tok).from_json(tok.to_json())
    assert again.encode(PROSE) == tok.encode(PROSE) and again.specials == tok.specials and tok.vocab_size % 64 == 0


@pytest.mark.parametrize("size", [0, 1, 7, 100, 3000])
@pytest.mark.parametrize("tok", [TOK, BPE], ids=["bytes", "bpe"])
def test_tokenizer_gives_back_any_bytes(tok, size):
    dice = np.random.default_rng(size)
    for raw in (dice.bytes(size), PROSE.encode()[:size]):
        assert tok.decode_bytes(tok.encode(raw)) == raw
    assert isinstance(tok.decode(dice.integers(-5, tok.vocab_size + 99, size)), str)


# ---- reading out ----------------------------------------------------------------------------------------------------

def prompts_of(B: int, low: int, high: int) -> list[list[int]]:
    dice = np.random.default_rng(0)
    return [dice.integers(97, 103, dice.integers(low, high + 1)).tolist() for _ in range(B)]


def only(letters: str) -> torch.Tensor:
    """(V,) which ids may be drawn, for a model of 128 ids."""
    return torch.isin(torch.arange(128), torch.tensor(list(letters.encode())))


@functools.cache
def reader(name: str, **knobs) -> Transformer:
    return awake(model_for(name, Knobs(**knobs), vocab_size=128, n_kv_head=1), torch.float64)


def decoder(model, B: int, heads: int = 0, lookup: int = 0, temperature: float = 0.0, letters: str = "abcdef") -> Decoder:
    return Decoder(model, B, heads, Sampler(temperature), only(letters), 32, lookup)


def decode(model, prompts, n: int, heads: int = 0, lookup: int = 0, temperature: float = 0.0, letters: str = "abcdef", stop: str = "z", **more):
    return decoder(model, len(prompts), heads, lookup, temperature, letters).generate(prompts, n, ord(stop), **more)


@torch.no_grad()
def slow_greedy(model, prompt: list[int], n: int, prefix: int = 0) -> list[int]:
    """Without a cache: everything is read again for each token; past 32 tokens the text goes on with its last 16."""
    text, out = list(prompt), []
    for _ in range(n):
        text = text if len(text) <= 32 else text[-16:]
        rule = torch.tensor(sees(np.ones(len(text)), np.arange(len(text)) < prefix))
        logits = model.logits(model(torch.tensor([text]), rule)[0])[0, -1]
        out.append(int(logits.masked_fill(~only("abcdef"), -math.inf).argmax()))
        text.append(out[-1])
    return out


def test_cached_greedy_is_uncached_greedy():
    """A batch of prompts of different lengths, each as if alone, also past the end of the context."""
    model, prompts = reader("clm"), prompts_of(12, 1, 32)
    together = decode(model, prompts, 40)[0]
    assert together == [decode(model, [p], 40)[0][0] for p in prompts] == [slow_greedy(model, p, 40) for p in prompts]
    assert len(set(map(tuple, together))) > 6


def test_prefix_prompt_is_read_both_ways():
    model, prompts = reader("prefix"), prompts_of(24, 4, 20)
    lengths = [len(p) - i % 3 for i, p in enumerate(prompts)]
    got = decode(model, prompts, 10, prefix_length=lengths)[0]
    assert got == [slow_greedy(model, p, 10, n) for p, n in zip(prompts, lengths)] != decode(model, prompts, 10)[0]


@pytest.mark.parametrize("low, high", [(1, 6), (12, 20), (30, 32)])
@pytest.mark.parametrize("heads, lookup", [(1, 0), (3, 0), (0, 4), (2, 5), (3, 9)])
@pytest.mark.parametrize("kind", ["parallel", "chain"])
def test_drafting_changes_no_token_of_greedy(kind, heads, lookup, low, high):
    """Prompts within the context, crossing its end, and filling it; some drafts are kept, some are not."""
    model, prompts = reader("mtp", mtp_heads=kind), prompts_of(100, low, high)
    fast, stats = decode(model, prompts, 24, heads, lookup)
    assert fast == decode(model, prompts, 24)[0] and 0 < stats.acceptance[0] < 0.95


@torch.no_grad()
def slow_drafts(model, text: list[int], n: int = 3, letters: str = "abcdef") -> list[int]:
    """The heads' guesses at what follows the text, its last token unread, without a cache."""
    known = list(text)
    for k in range(n):
        ahead = torch.tensor([[(known[t:] + [0] * 3)[:3] for t in range(1, len(text))]])
        logits = model.logits(model(torch.tensor([text[:-1]]), "causal", ahead)[k + 1])[0, -1]
        known.append(int(logits.masked_fill(~only(letters), -math.inf).argmax()))
    return known[len(text):]


@torch.inference_mode()
def drafted(model, text: list[int], heads: int, lookup: int = 0, letters: str = "abcdef") -> tuple[list[int], list[int]]:
    """The text with its next token, and the drafts after reading it."""
    newest, drafts = decoder(model, 1, heads, lookup, letters=letters)._prefill([text], None, torch.zeros(1, dtype=torch.float64))
    return [*text, *newest.tolist()], drafts[0].tolist()


@pytest.mark.parametrize("kind", ["parallel", "chain"])
def test_drafts_are_what_the_heads_say(kind):
    """After a prompt exactly; later, as many are kept as reading everything again for each pass would keep, but for the entries
    that a chain's heads made from wrong guesses."""
    model, kept = reader("mtp", mtp_heads=kind), Counter()
    for prompt in (prompts := prompts_of(60, 1, 8)):
        text, drafts = drafted(model, prompt, 3)
        assert drafts == slow_drafts(model, text)
        text, at = prompt + decode(model, [prompt], 24)[0][0], len(prompt) + 1
        while at < len(prompt) + 16:
            match = sum(itertools.accumulate((a == b for a, b in zip(slow_drafts(model, text[:at]), text[at:])), int.__mul__))
            kept.update(range(match) if at + match < len(prompt) + 16 else ())
            at += match + 1
    runs = np.sum([decode(model, [prompt], 16, 3)[1].kept for prompt in prompts], 0)
    assert kept[1] and np.abs(runs - [kept[k] for k in range(3)]).max() <= (0 if kind == "parallel" else 0.1 * kept[0])


def looked_up(text: list[int], n: int) -> tuple[list[int], int]:
    """What followed the longest of the last four tokens, of the latest place where it stood before, and how long it is."""
    length = lambda end: next((k for k in range(4) if k >= end or text[end - 1 - k] != text[-1 - k]), 4)
    end = max(range(1, len(text)), key=lambda end: (length(end), end))
    return [text[end:][i % (len(text) - end)] for i in range(n)], length(end)


def test_lookup_drafts_what_followed_the_last_tokens():
    """After the heads' guesses, or instead of them where four tokens stood in the text before; a short period goes on."""
    model, seen = reader("mtp", mtp_heads="chain"), Counter()
    for prompt in prompts_of(120, 1, 30):
        prompt = [97 + i % 3 for i in prompt]
        heads = slow_drafts(model, drafted(model, prompt, 0, 0, "abc")[0], 2, "abc")
        for n_heads, guessed in ((0, []), (2, heads)):
            text, drafts = drafted(model, prompt, n_heads, 6, "abc")
            instead, length = looked_up(text, 6 + n_heads)
            seen[n_heads, length] += 1
            assert drafts == (instead if length == 4 or not n_heads else guessed + looked_up(text + guessed, 6)[0])
    assert min(seen[n, k] for n in (0, 2) for k in range(5)) > 2


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["parallel", "chain"])
def test_drafts_of_a_row_are_its_own_and_reading_fewer_positions_changes_none(kind, monkeypatch):
    """In a batch as alone; and after a pass of 13 positions, all of which the heads know already, the newest 8 suffice."""
    model, prompts = reader("mtp", mtp_heads=kind), [[97 + i % 3 for i in p] for p in prompts_of(30, 1, 12)]
    together = decoder(model, len(prompts), 2, 6)._prefill(prompts, None, torch.zeros(len(prompts), dtype=torch.float64))[1]
    assert together.tolist() == [drafted(model, p, 2, 6)[1] for p in prompts]
    zero, known, seen = torch.zeros(1, 13, dtype=torch.float64), 0, set()
    for prompt in prompts_of(20, 4, 8):
        longer, made = prompt + decode(model, [prompt], 14)[0][0], []
        for read in (99, 8):
            monkeypatch.setattr(sample, "READ", read)
            one = decoder(model, 1, 3, 9)
            one._prefill([longer], None, zero[:, 0])                                # the heads' entries are those of the true text
            at, (token, *ahead) = len(prompt), longer[len(prompt):][:13]
            for keys in one.cache.k[model.config.n_layer:]:
                keys[:, at + 5:at + 13] = math.nan                                  # but for the newest 8, which must be made
            known += one._pass(*(torch.tensor([x]) for x in (token, ahead, at, at)), zero)[0][0, -1].item() == 12
            made.append(one.text[0, at + 14:at + 17].tolist())                      # the heads' guesses
        assert made[0] == made[1]
        seen.add(tuple(made[0]))
    assert known == 40 and len(seen) > 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["parallel", "chain"])
def test_drafting_stops_where_plain_decoding_does(kind, temperature):
    """With an end token that comes often, so also inside drafts; in a batch and alone."""
    model, prompts = reader("mtp", mtp_heads=kind), prompts_of(150, 1, 8)
    run = lambda prompts, heads, lookup=2: decode(model, prompts, 23, heads, lookup * (heads > 0), temperature, stop="c")
    (plain, _), (fast, stats) = run(prompts, 0), run(prompts, 3)
    assert fast == plain and stats.kept[1] > 0 and len(set(map(len, plain))) > 5 and not any(ord("c") in out for out in plain)
    assert temperature or [run([p], 3)[0][0] for p in prompts[:12]] == plain[:12]


@pytest.mark.parametrize("heads, lookup", [(0, 0), (3, 0), (3, 12)])
@pytest.mark.parametrize("kind", ["parallel", "chain"])
def test_a_decoding_pass_never_asks_the_host(kind, heads, lookup):
    """So that one captured graph can serve a whole generation; on tensors without values, as above."""
    config = reader("mtp", mtp_heads=kind).config
    with FakeTensorMode():
        with torch.device("meta"):
            model = Transformer(config)
        decoder = Decoder(model, 2, heads, Sampler(0.8, 50, 0.9), None, 32, lookup)
        whole = lambda *shape, **of: torch.zeros(2, *shape, device="meta", **of or {"dtype": torch.long})
        made = decoder._pass(whole(), whole(heads + lookup), whole(), whole(), whole(1 + heads + lookup, dtype=torch.float64))
        assert [tuple(x.shape) for x in made] == [(2, 2 + heads + lookup), (2,), (2, heads + lookup), (2,), (2,)]


DAD = list(b"dad")


@functools.cache
@torch.no_grad()
def next_probs(kind: str, text: tuple, horizon: int = 1) -> np.ndarray:
    """(3,) over a, b, c: what stands `horizon` tokens after dad + text."""
    model, ids = reader("mtp", mtp_heads=kind), torch.tensor([[*DAD, *text]])
    hidden = model(ids, "causal", torch.zeros(*ids.shape, 3, dtype=torch.long))[horizon - 1]
    return model.logits(hidden[0, -1])[97:100].softmax(-1).numpy()


def exact(kind: str, n: int) -> list[float]:
    """The probabilities of all continuations of n letters."""
    return [math.prod(next_probs(kind, text[:i])[text[i] - 97] for i in range(n)) for text in itertools.product(b"abc", repeat=n)]


@pytest.mark.parametrize("kind, heads, lookup", [("parallel", 0, 0), ("parallel", 2, 0), ("chain", 3, 0), ("chain", 1, 2)])
def test_drafting_keeps_the_distribution(kind, heads, lookup):
    out, stats = decode(reader("mtp", mtp_heads=kind), [DAD] * 4500, 3, heads, lookup, 1.0, "abc")
    assert fair(tally(map(tuple, out), itertools.product(b"abc", repeat=3)), exact(kind, 3))
    assert heads == 0 or 0.05 < stats.acceptance[0] < 0.95


def test_the_distribution_test_catches_the_wrong_rule():
    """Drafting the likeliest token and accepting it with min(1, p/q), else drawing from (p - q)+, is not drawing from p."""
    dice, q, out = np.random.default_rng(0), next_probs("parallel", (), 2), []
    for a in dice.choice(list(b"abc"), 4000, p=next_probs("parallel", ())).tolist():
        p, draft = next_probs("parallel", (a,)), q.argmax()
        rest = np.maximum(p - q, 0)
        out.append((a, 97 + int(draft if dice.random() < p[draft] / q[draft] else dice.choice(3, p=rest / rest.sum()))))
    assert not fair(tally(out, itertools.product(b"abc", repeat=2)), exact("parallel", 2))


def test_contrastive_refuses_a_row_without_a_negative():
    """A lone pair would be right whatever the model says: loss 0, nothing learned."""
    with pytest.raises(UserError, match="raise --batch_size"):
        loss_of("contrastive", model_for("contrastive").train(), collate(draw("contrastive", B=1)[1]))
