"""test_sample.py: what each task reads, what it answers, and what it refuses.

Most models here have two blocks and random weights: they answer nonsense, but the layouts, scores
and refusals are those of trained ones. Whether a trained model is right is counted in lab/.
"""

import dataclasses
import functools
import io
import itertools
import json
import math
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import sample
import train
from checkpoint import save_checkpoint
from corpus import Tokens
from data import Text
from model import ModelConfig, Transformer
from objectives import OBJECTIVES, Knobs, with_heads
from sample import TASKS, TrainedModel, bound_nats, load, one_line_sample, question, showcase
from test_objectives import draw, letters, whole
from tokenizer import get_tokenizer
from util import UserError, parse_flags

TOK = get_tokenizer("bytes")
T = 64
A_TEXT = "Tom has 5 apples."


@functools.cache
def random_model(name: str, heads: str = "chain") -> Transformer:
    """A model with random weights, also where training begins with zeros."""
    knobs = Knobs(mtp_heads=heads)
    config = ModelConfig(vocab_size=TOK.vocab_size, n_layer=2, n_head=2, n_embd=32)
    model = Transformer(with_heads(config, {name: 1.0}, knobs))
    dice = torch.Generator().manual_seed(4)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5, generator=dice)
    return model


def trained_on(name: str, **knobs) -> TrainedModel:
    model = random_model(name, knobs.get("mtp_heads", "chain"))
    return TrainedModel(model, TOK, {name: 1.0}, Knobs(**knobs), T)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run of each objective."""
    folder = tmp_path_factory.mktemp("runs")
    for name in OBJECTIVES:
        model = random_model(name)
        state = {
            "model": model.state_dict(),
            "model_config": dataclasses.asdict(model.config),
            "tokenizer": TOK.to_json(),
            "settings": {**vars(Knobs()), "objective": name, "block_size": T},
        }
        save_checkpoint(folder / name / "ckpt.pt", state)
    return folder


@pytest.fixture
def passes(monkeypatch):
    """A function that lists the ids and the mask of each pass that a model makes from now on."""

    def watch(trained: TrainedModel) -> list:
        def watching(ids, mask, *args, **named):
            seen.append((ids[0].tolist(), mask))
            return trunk(ids, mask, *args, **named)

        seen = []
        trunk = trained.model.trunk
        monkeypatch.setattr(trained.model, "trunk", watching)
        return seen

    return watch


def ids_of(*parts) -> list[int]:
    """Text and special ids -> ids."""
    ids = []
    for part in parts:
        ids += TOK.encode(part) if isinstance(part, str) else [part]
    return ids


# ---- what a task reads --------------------------------------------------------------------------

EOT, MASK, CLS, SEP, FIRST = TOK.EOT, TOK.MASK, TOK.CLS, TOK.SEP, TOK.sentinel
PRE, SUF, MID = TOK.PRE, TOK.SUF, TOK.MID
# fmt: off
LAYOUTS = [  # objective, request, what the model reads first: as in the objective's docstring
    ("clm",         dict(prompt="ab"),                  ["ab"]),
    ("clm",         dict(prompt=""),                    [EOT]),
    ("clm",         dict(prompt="<PRE>" + "b" * T),     ["b" * T]),
    ("prefix",      dict(prompt="ab"),                  ["ab"]),
    ("prefix",      dict(prompt="a" * 9 + "b" * T),     ["b" * T]),
    ("fim",         dict(prompt="ab"),                  ["ab"]),
    ("fim",         dict(prompt="abcdef", suffix="g"),  [SUF, "g", PRE, "abcde", MID, "f"]),
    ("fim",         dict(prompt="a[MASK]b"),            [SUF, "b", PRE, MID, "a"]),
    ("fim",         dict(prompt="", suffix="b"),        [SUF, "b", PRE, MID]),
    ("fim",         dict(prompt="aé日", suffix="b"),     [SUF, "b", PRE, "aé", MID, "日"]),
    ("cm3",         dict(prompt="ab"),                  ["ab"]),
    ("cm3",         dict(prompt="a[MASK]b", suffix=""), ["a", FIRST, "b", FIRST + 1, FIRST]),
    ("span",        dict(prompt="ab", suffix="f"),      ["ab", FIRST, "f", EOT, FIRST]),
    ("span",        dict(prompt="a[MASK]b[MASK]"),      ["a", FIRST, "b", FIRST + 1, EOT, FIRST]),
    ("ul2",         dict(prompt="a"),                   [TOK.S, "a", EOT]),
    ("ul2",         dict(prompt="a" * 9 + "b" * 48),    [TOK.S, "b" * 48, EOT]),
    ("ul2",         dict(prompt="[MASK]b"),             [TOK.R, FIRST, "b", EOT, FIRST]),
    ("ul2",         dict(prompt="a[MASK]", mode="X"),   [TOK.X, "a", FIRST, EOT, FIRST]),
    ("bart",        dict(prompt="a", suffix="b"),       ["a", MASK, "b", EOT]),
    ("mlm",         dict(prompt="a[MASK]b"),            ["a", MASK, "b", EOT]),
    ("mlm",         dict(prompt="[MASK]" + "a" * 63),   [MASK, "a" * 63]),
    ("mntp",        dict(prompt="a[MASK]b"),            [EOT, "a", MASK, "b", EOT]),
    ("mntp",        dict(prompt="[MASK]" + "a" * 62),   [EOT, MASK, "a" * 62]),
    ("nsp",         dict(prompt="A. B[MASK]"),          [CLS, "A.", SEP, " B", MASK, SEP]),
    ("nsp",         dict(prompt="a", suffix="b"),       [CLS, "a", SEP, "b", SEP]),
    ("sop",         dict(prompt="a", suffix="b"),       [CLS, "a", SEP, "b", SEP]),
    ("electra",     dict(prompt="ab"),                  ["ab", EOT]),
    ("plm",         dict(prompt="a[MASK]b"),            ["ab", EOT, MASK]),
    ("contrastive", dict(prompt="a", suffix="b"),       ["a"]),
    ("diffusion",   dict(prompt="a", max_new_tokens=2), ["a", MASK, MASK]),
    ("diffusion",   dict(prompt="a[MASK]b"),            ["a", MASK, "b", EOT]),
    ("diffusion",   dict(prompt="a", suffix="b", max_new_tokens=2), ["a", MASK, MASK, "b", EOT]),
    ("block",       dict(prompt="a"),                   ["a", *[MASK] * 7]),
    ("block",       dict(prompt="abcdefghij"),          ["abcdefgh"]),
]
# fmt: on


@pytest.mark.parametrize("name, request_, layout", LAYOUTS)
def test_a_request_is_laid_out_as_in_training(name, request_, layout, passes):
    """Read in both directions: a source with its EOT, and all that prefix and full models read."""
    trained = trained_on(name)
    seen = passes(trained)
    trained.ask(None, **request_)
    read, mask = seen[0]
    ids = ids_of(*layout)
    assert read == ids

    is_clean = trained.attention == "block" and MASK not in ids
    if trained.attention == "permuted":  # the [MASK] is private
        assert mask[0, 0].tolist() == (np.arange(4) <= [[2], [2], [2], [3]]).tolist()
        return
    both_ways = 0 if trained.attention == "causal" or is_clean else len(ids)
    if trained.attention == "prefix" and EOT in ids:
        both_ways = ids.index(EOT) + 1
    expected = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    expected[:both_ways, :both_ways] = True
    if isinstance(mask, torch.Tensor):
        assert torch.equal(mask[0, 0, :, : len(ids)], expected)
    else:  # "full", or None
        assert expected.all(), mask


def form(ids) -> str:
    """The ids' marks in their order: `t` is any number of text tokens, `#` of masks."""
    letters = ["t" if i < TOK.n_ordinary else "#" if i == MASK else TOK.decode([i]) for i in ids]
    return re.sub(r"(t|#)\1+", r"\1", "".join(letters))


@pytest.mark.parametrize("name, request_, layout", LAYOUTS)
def test_what_is_asked_is_what_is_trained(name, request_, layout):
    """Training draws rows whose marks come in the question's order: from documents that fit a row
    and, where a piece has an end of its own, from the middle of an endless one, too."""
    texts = [letters(20, 90)]
    if name in ("fim", "cm3", "span", "ul2", "bart"):
        texts.append(Text((np.arange(9999) % 200).astype(np.uint16), EOT))
    for text in texts:
        rows = draw(999, name, text, T=100)
        assert any(form(ids_of(*layout)) in form(whole(row)) for row in rows)


@pytest.mark.parametrize(
    "name, asked, between",
    [("span", [EOT], [FIRST + 1]), ("cm3", [], [EOT, FIRST + 1])],
)
def test_gaps_are_filled_in_order(name, asked, between, passes, monkeypatch):
    """Each prompt ends with the answers to the gaps before. The model says 5 after an EOT that may
    not come first: a gap holds a token at least, and an EOT ends only this gap."""
    trained = trained_on(name)
    logits = torch.zeros(TOK.vocab_size)
    logits[[ord("5"), EOT]] = torch.tensor([50.0, 60.0])
    monkeypatch.setattr(trained.model, "logits", lambda x: logits.expand(*x.shape[:-1], -1))
    seen = passes(trained)
    [answer] = trained.ask("infill", "Tom has [MASK] [MASK] apples")
    source = ids_of("Tom has ", FIRST, " ", FIRST + 1, " apples", *asked)
    first, second = (ids for ids, _ in seen if len(ids) > 1)
    assert first == ids_of(*source, FIRST)
    assert second == ids_of(*first, "5", *between)
    assert answer.details["fills"] == ["5", "5"]
    assert sample.marked(answer.parts) == "Tom has ⟪5⟫ ⟪5⟫ apples"


# ---- what it answers -----------------------------------------------------------------------------

QUESTIONS = {
    "start": dict(prompt=A_TEXT),
    "text": dict(prompt=A_TEXT),
    "one gap": dict(prompt="Tom has [MASK] apples."),
    "gaps": dict(prompt="Tom has [MASK] apples."),
    "any text": dict(prompt="Tom has ", suffix=" apples.", max_new_tokens=20),
    "two texts": dict(prompt=A_TEXT, suffix="Now he has 7."),
}
EVERY_TASK = [(name, entry) for name, row in OBJECTIVES.items() for entry in row.tasks]


@pytest.mark.parametrize("name, entry", EVERY_TASK)
def test_every_task_answers_people_and_programs(name, entry, runs, capsys):
    texts = QUESTIONS[TASKS[entry].texts]
    flags = [f"--{key}={value}" for key, value in texts.items()]
    flags += [f"--out_dir={runs / name}", f"--task={TASKS[entry].name}"]
    sample.main(flags)
    shown = capsys.readouterr().out
    sample.main([*flags, "--json"])
    [line] = capsys.readouterr().out.splitlines()
    said = json.loads(line, parse_constant=pytest.fail)  # fails for NaN

    assert shown.strip() and said["prompt"] == texts["prompt"]
    if said["text"] and entry != "detect":
        assert f"⟪{sample.visible(said['text'])}⟫" in shown
    if said["whole"] != said["text"]:  # the answer contains the question
        before, after = (*texts["prompt"].split("[MASK]"), "")[:2]
        assert said["whole"].startswith(before) and said["whole"].endswith(after)


@pytest.mark.parametrize("name", ["clm", "prefix", "fim", "span", "ul2", "bart"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafting_changes_no_answer(name, temperature):
    trained = trained_on(name)
    task = TASKS[OBJECTIVES[name].tasks[0]]
    request = QUESTIONS[task.texts] | dict(temperature=temperature, max_new_tokens=30)
    [plain] = trained.ask(task.name, **request)
    [drafted] = trained.ask(task.name, **request, speculative=True)
    assert drafted.parts == plain.parts and drafted.ids == plain.ids


BPE = get_tokenizer("bpe:300", ["the mill, the market, the school\n" * 9])


@pytest.mark.parametrize("name", ["clm", "prefix", "fim", "span", "ul2"])
@pytest.mark.parametrize("end", [" the ", " the m", " the mi"])
def test_a_text_may_end_inside_a_token(name, end):
    """The first new token begins with the bytes that were left out, also with drafting."""
    trained = TrainedModel(random_model(name), BPE, {name: 1.0}, Knobs(), T)
    before, left_out = sample.open_end(BPE, end)
    assert before == BPE.encode(" the") and BPE.decode([*before, *left_out]) == end
    is_gap = TASKS[OBJECTIVES[name].tasks[0]].texts != "start"
    request = dict(prompt=end, suffix=" and" if is_gap else None, temperature=1.0)
    [plain] = trained.ask(None, **request, max_new_tokens=30)
    [drafted] = trained.ask(None, **request, max_new_tokens=30, speculative=True)
    assert drafted.parts == plain.parts and drafted.ids == plain.ids
    assert BPE.decode(plain.ids) == BPE.decode(left_out) + plain.text
    assert plain.whole.startswith(end + plain.text)


@pytest.mark.parametrize("name", ["block", "diffusion", "mlm", "mntp", "plm", "electra"])
@pytest.mark.parametrize("end", [" the", " the ", " the m", " the mi"])
def test_a_text_that_is_unmasked_may_end_inside_a_token(name, end):
    trained = TrainedModel(random_model(name), BPE, {name: 1.0}, Knobs(), T)
    if "continue" in {TASKS[task].name for task in trained.tasks}:
        answers = trained.ask("continue", end, num_samples=3, temperature=1.0, max_new_tokens=9)
        assert all(answer.whole.startswith(end) for answer in answers)
        assert all(BPE.decode(answer.ids) == end[4:] + answer.text for answer in answers)
        answers = trained.ask("continue", end, num_samples=20, temperature=9.0, top_k=1)
        assert len({answer.ids[0] for answer in answers}) == 1
    if name != "block":
        [answer] = trained.ask(None, end + "[MASK] and")  # a whole word is left as it is
        assert answer.whole.startswith(end) and answer.whole.endswith(" and")
        assert len(answer.ids) == 1


def test_the_ends_spellings_are_as_likely_as_the_model_says():
    """After X, the text "ab" is a and b, or a and the beginning of bc, or that of abc."""
    tok = get_tokenizer("bpe:258", ["abc\nabc\nbc\nbc\nbc\n"])
    trained = TrainedModel(random_model("clm"), tok, {"clm": 1.0}, Knobs(), T)
    x, a, b, bc, abc = (*map(ord, "Xab"), 256, 257)
    p, q = ((trained.logits(row)[-1] / 0.5).softmax(-1) for row in ([x], [x, a]))
    p = torch.stack([p[a] * q[b], p[a] * q[bc], p[abc]])
    flags = dict(num_samples=600, temperature=0.5, max_new_tokens=1)
    begun = [tuple(each.ids[:2]) for each in trained.ask("continue", "Xab", **flags)]
    share = [
        np.mean([ids[: len(way)] == way for ids in begun]) for way in ((a, b), (a, bc), (abc,))
    ]
    assert torch.allclose(torch.tensor(share).float(), p / p.sum(), atol=0.07)


def test_a_gap_holds_something_also_after_what_was_left_out(monkeypatch):
    """The model would write the blank that was left out, and end there."""
    trained = TrainedModel(random_model("span"), BPE, {"span": 1.0}, Knobs(), T)
    logits = torch.zeros(BPE.vocab_size)
    [blank] = BPE.encode(" ")
    logits[[blank, BPE.EOT]] = torch.tensor([50.0, 60.0])
    monkeypatch.setattr(trained.model, "logits", lambda x: logits.expand(*x.shape[:-1], -1))
    [answer] = trained.ask("infill", " the ", " and")
    assert answer.whole == " the   and" and answer.ids == [blank, blank]


@pytest.mark.parametrize("heads", ["linear", "parallel", "chain"])
def test_drafting_by_heads_changes_no_answer(heads):
    trained = trained_on("mtp", mtp_heads=heads)
    n_drafted = 0
    for seed in range(3):
        request = dict(prompt="abcabc", seed=seed, max_new_tokens=50, temperature=0.8)
        [plain] = trained.ask("continue", **request)
        [fast] = trained.ask("continue", **request, speculative=True)
        assert fast.ids == plain.ids
        n_drafted += fast.details["drafted"]
    assert n_drafted > 0


@pytest.mark.parametrize(
    "name, prompt", [("clm", "a"), ("fim", "a[MASK]b"), ("ul2", "a[MASK]b[MASK]c")]
)
def test_samples_are_those_of_their_seeds(name, prompt):
    trained = trained_on(name)
    flags = dict(temperature=1.0, max_new_tokens=6)
    several = trained.ask(None, prompt, seed=5, num_samples=3, **flags)
    alone = [trained.ask(None, prompt, seed=seed, **flags)[0] for seed in (5, 6, 7)]
    assert [answer.parts for answer in several] == [answer.parts for answer in alone]
    assert len({answer.whole for answer in several}) == 3


@pytest.mark.parametrize("name", ["fim", "span", "ul2", "bart"])
def test_an_answer_ends_before_its_question_leaves_the_context(name):
    """Only a continuation may outgrow the context, whose beginning is then dropped."""
    trained = trained_on(name)
    trained.allowed = lambda ends=(): torch.arange(TOK.vocab_size) == ord("a")
    task = TASKS[OBJECTIVES[name].tasks[0]].name
    [answer] = trained.ask(task, "ab", "c", max_new_tokens=500)
    assert 50 < len(answer.ids) < T and "context is full" in answer.lines[0]
    if name == "fim":
        [answer] = trained.ask("continue", "ab", max_new_tokens=500)
        assert len(answer.ids) == 500 and not answer.lines


def test_a_mask_is_filled_with_the_likeliest_token_but_no_end_of_document():
    trained = trained_on("mlm")
    logits = torch.full((4, TOK.vocab_size), -torch.inf)
    logits[1, ids_of("vwxyz")] = torch.tensor([0.1, 0.4, 0.3, 0.15, 0.05]).log()
    logits[1, EOT] = 9.0
    trained.masked_logits = lambda ids: logits[: len(ids)].clone()
    [answer] = trained.ask("fill", "a[MASK]b")
    assert answer.whole == "awb" and answer.ids == [ord("w")]
    [guesses] = answer.details["guesses"]
    assert [guess["token"] for guess in guesses] == list("wxyvz")
    assert [guess["p"] for guess in guesses] == [0.4, 0.3, 0.15, 0.1, 0.05]
    assert answer.lines[0].startswith("gap 1: 'w' 0.40   'x' 0.30")


def test_a_guess_that_is_a_part_of_a_character_is_shown_as_a_byte():
    trained = trained_on("mlm")
    logits = torch.full((4, TOK.vocab_size), -torch.inf)
    logits[0, [0xE6, ord("b")]] = torch.tensor([0.0, -1.0])
    trained.masked_logits = lambda ids: logits[: len(ids)].clone()
    [answer] = trained.ask("fill", "[MASK]本")
    note, guesses = answer.lines
    assert "is one byte" in note and guesses.startswith("gap 1: '0xe6' 0.73   'b' 0.27")


def test_electras_masks_are_filled_by_its_generator():
    trained = trained_on("electra")
    ids = ids_of("a", MASK, "b", EOT)
    row = torch.tensor([ids])
    with torch.inference_mode():
        states = trained.model.generator_states(row, trained.model.full_mask(row))[0]
        logits = F.linear(states, trained.model.embed_tokens.weight)
    allowed = trained.allowed()
    assert torch.equal(trained.masked_logits(ids)[:, allowed], logits[:, allowed])


def test_unmasking_follows_the_given_steps_and_order(passes):
    trained = trained_on("diffusion")
    seen = passes(trained)
    firsts = {"confidence": set(), "random": set()}
    for order, seed in itertools.product(firsts, range(8)):
        seen.clear()
        trained.ask("unmask", "a", "b", max_new_tokens=6, steps=6, order=order, seed=seed)
        assert [ids.count(MASK) for ids, _ in seen] == [6, 5, 4, 3, 2, 1]
        firsts[order].add(next(i for i in range(1, 7) if seen[1][0][i] != MASK))
    assert len(firsts["confidence"]) == 1 < len(firsts["random"])


def test_what_is_probably_replaced_is_marked():
    """A character of several tokens is marked as a whole."""
    trained = trained_on("electra")
    p = torch.tensor([0.51, 0.49, 0.99, 0.01, 0.2])
    hook = trained.model.detect_head.register_forward_hook(lambda *_: p.logit())
    try:
        [answer] = trained.ask("detect", "abcé")
    finally:
        hook.remove()
    assert sample.marked(answer.parts) == "⟪a⟫b⟪c⟫é"
    assert answer.details["replaced_probability"] == pytest.approx(p.tolist(), abs=1e-4)
    assert answer.lines[0].startswith("most suspicious: 'c' 0.99 (token 2)   'a' 0.51 (token 0)")


def test_two_texts_are_compared():
    row = ids_of(CLS, "ab.", SEP, "c.", SEP)
    for name in ("nsp", "sop"):  # read from [CLS]
        trained = trained_on(name)
        logit = trained.model.pair_head(trained.states(row, len(row))[0])
        [answer] = trained.ask("pair", "ab.", "c.")
        assert answer.details["probability"] == pytest.approx(logit.sigmoid().item(), abs=1e-4)
    trained = trained_on("contrastive")
    a, b = trained.embed("abc"), trained.embed(A_TEXT)
    [answer] = trained.ask("similarity", "abc", A_TEXT)
    cosine = (a @ b / a.norm() / b.norm()).item()
    assert answer.details["similarity"] == pytest.approx(cosine, abs=1e-4)


# ---- score and embed -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["clm", "fim", "prefix"])
def test_a_score_is_the_sum_over_the_text_among_the_ids_that_may_be_drawn(name):
    trained = trained_on(name)
    text = "日本 " + A_TEXT
    ids = TOK.encode(text)
    logits = trained.logits([EOT, *ids])[:-1].masked_fill(~trained.allowed(), -torch.inf)
    nats = F.cross_entropy(logits, torch.tensor(ids), reduction="sum").item()
    said = trained.score(text)
    n_bytes = len(text.encode())
    assert said["nats"] == pytest.approx(nats) and not said["bound"]
    assert said["bits_per_byte"] == pytest.approx(nats / math.log(2) / n_bytes)
    assert said["perplexity"] == pytest.approx(math.exp(nats / n_bytes))


def test_in_a_long_text_half_a_context_stands_before_each_scored_token():
    trained = trained_on("clm")
    text = A_TEXT * 12
    ids = [EOT, *TOK.encode(text)]
    nats = 0.0
    first = 0  # the start of the window
    for i in range(1, len(ids)):
        if i - first > T:
            first = i - 1 - T // 2
        nats -= trained.logits(ids[first:i])[-1].log_softmax(-1)[ids[i]].item()
    assert trained.score(text)["nats"] == pytest.approx(nats, rel=1e-4)


@pytest.mark.parametrize("name, L", [("clm", 1), ("diffusion", 3), ("block", 1), ("block", 2)])
def test_probabilities_of_all_texts_sum_to_one_and_a_bound_lies_above(name, L, monkeypatch):
    """All texts of three letters, each a or b. A bound is the mean over all maskings of each block;
    it is a code length, and no code can be shorter than its probabilities allow: they sum to less.
    With a block of one token, the bound is exact."""
    monkeypatch.setattr(sample, "BOUND_ROWS", 600)
    trained = trained_on(name, diffusion_block=L)
    trained.banned = torch.ones_like(trained.banned)
    trained.banned[ids_of("ab")] = False

    def exact(ids: list[int], before: list[int], n_after: int) -> float:
        """The mean over all maskings of the ids, beside masks that stay."""
        nats = 0.0
        for n in range(1, len(ids) + 1):
            choices = list(itertools.combinations(range(len(ids)), n))
            for masked in map(list, choices):
                noisy = torch.tensor(ids)
                noisy[masked] = MASK
                row = [*before, *noisy.tolist(), *[MASK] * n_after]
                start = 0 if name == "diffusion" else len(before)
                group = (np.arange(len(row)) >= start).astype(int)
                found = trained.logits(row, group=group)[len(before) :]
                wanted = torch.tensor(ids)[masked]
                nats += F.cross_entropy(found[masked], wanted).item() / len(choices)
        return nats

    total = 0.0
    for text in map("".join, itertools.product("ab", repeat=3)):
        said = trained.score(text)
        assert said["bound"] == (name != "clm")
        total += math.exp(-said["nats"])
        ids = TOK.encode(text)
        parts = [(ids[i : i + L], ids[:i], max(i + L - 3, 0)) for i in range(0, 3, L)]
        if name == "diffusion":
            parts = [(ids, [EOT], 0)]
        if name != "clm":
            nats = sum(exact(*part) for part in parts)
            assert said["nats"] == pytest.approx(nats, rel=0.05)
    assert total == pytest.approx(1) if L == 1 else 0.5 < total < 1


def test_the_bound_reads_what_stands_before_and_masks_none_of_it(passes):
    trained = trained_on("diffusion")
    before = TOK.encode("At dawn, ")
    seen = passes(trained)
    bound_nats(trained, TOK.encode("a" * (T - len(before) + 3)), before)
    assert all(ids[: len(before)] == before for ids, _ in seen)
    assert {len(ids) for ids, _ in seen} == {T, len(before) + 3}


@pytest.mark.parametrize("name, both_ways", [("clm", 0), ("prefix", 1), ("contrastive", 1)])
def test_an_embedding_is_the_mean_of_the_states_of_all_parts_of_a_text(name, both_ways):
    trained = trained_on(name)
    ids = TOK.encode(A_TEXT * 6)
    parts = [ids[start : start + T] for start in range(0, len(ids), T)]
    states = torch.cat([trained.states(part, len(part) * both_ways) for part in parts])
    assert torch.allclose(trained.embed(A_TEXT * 6), states.mean(0), atol=1e-5)


def test_a_pair_model_embeds_a_text_as_a_pair_of_sentences(passes):
    trained = trained_on("nsp")
    seen = passes(trained)
    trained.embed("A. B b b b. C c c c.")
    assert [ids for ids, _ in seen] == [ids_of(CLS, "A. B b b b.", SEP, " C c c c.", SEP)]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_nothing_is_predicted_that_may_not_be_drawn(name):
    trained = trained_on(name)
    for logits in (trained.logits(ids_of(A_TEXT)), trained.masked_logits(ids_of(A_TEXT))):
        assert (logits.isfinite() == trained.allowed()).all()


# ---- what is refused -----------------------------------------------------------------------------

# fmt: off
REFUSALS = [  # objective, request -> words of the line
    ("clm",         dict(task="infill", prompt="a", suffix="b"), "--task=continue: a text"),
    ("clm",         dict(task="kontinue", prompt="a"),           "takes --task=continue"),
    ("clm",         dict(task="score"),                          "--task=score: a text"),
    ("fim",         dict(prompt="a[MASK]b[MASK]c"),              "--task=infill: a text with one"),
    ("span",        dict(prompt="abc"),                          "[MASK] in --prompt"),
    ("mlm",         dict(task="score", prompt="a"),              "--task=fill"),
    ("nsp",         dict(task="pair", prompt="abc"),             "--prompt and --suffix"),
    ("contrastive", dict(prompt="a[MASK]", suffix="b"),          "two texts"),
    ("bart",        dict(),                                      "--task=restore"),
    ("electra",     dict(),                                      "--task=detect"),
    ("span",        dict(prompt="a" * 60, suffix="b"),           "the context has 64"),
    ("bart",        dict(prompt="a" * 32),                       "shorten the texts"),
    ("nsp",         dict(prompt="a" * 30, suffix="b" * 32),      "shorten the texts"),
    ("diffusion",   dict(prompt="a", suffix="b"),                "--max_new_tokens"),
    ("diffusion",   dict(prompt="a" * 64),                       "shorten the texts"),
    ("clm",         dict(prompt="a", steps=4),                   "--steps is not read"),
    ("mlm",         dict(prompt="a[MASK]", temperature=1.0),     "--temperature is not read"),
    ("span",        dict(prompt="a[MASK]", mode="X"),            "--mode is not read"),
    ("clm",         dict(prompt="a", temperature=-1.0),          "must be at least 0"),
]
# fmt: on


@pytest.mark.parametrize("name, request_, word", REFUSALS)
def test_what_cannot_be_answered_is_refused_in_one_line(name, request_, word):
    with pytest.raises(UserError) as refused:
        trained_on(name).ask(**{"task": None, **request_})
    assert word in str(refused.value) and "\n" not in str(refused.value)


# ---- the interfaces ------------------------------------------------------------------------------


def test_texts_are_normalized_like_the_corpus(runs, capsys, monkeypatch, tmp_path):
    """In Python, on the command line, and from a file or standard input."""
    trained = trained_on("clm")
    theirs, ours = "\ufeffTom has\r\n5 \udcff\r", "Tom has\n5 \ufffd\n"
    assert trained.score(theirs) == trained.score(ours)
    assert torch.equal(trained.embed(theirs), trained.embed(ours))
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbfTom has\r\n5 \xff\r\n\r\n")  # the last line end is left out
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    for prompt in (theirs, f"@{file}", "@-"):
        sample.main([f"--out_dir={runs / 'clm'}", f"--prompt={prompt}", "--json"])
        assert json.loads(capsys.readouterr().out)["prompt"] == ours
    flags = ["--prompt=~/bin", "--suffix=@@a", "--out_dir=~/x"]
    given = {"prompt": "~/bin", "suffix": "@a", "out_dir": f"{Path.home()}/x"}
    assert parse_flags(flags, "", sample.SampleConfig) == given


def test_the_python_interface(runs):
    model = load(runs / "fim")
    assert model.infill("def ", " + b", max_new_tokens=9) == model.infill(
        "def ", " + b", max_new_tokens=9, temperature=0.0
    )
    text = model.generate("def ", max_new_tokens=9)
    assert text == model.generate("def ", max_new_tokens=9, temperature=0.7, seed=1)
    assert text != model.generate("def ", max_new_tokens=9, seed=2)
    assert model.score("def ").keys() >= {"nats", "perplexity", "bits_per_byte"}
    assert model.embed("def ").shape == (32,)
    assert load(runs / "mlm").fill("a [MASK]").startswith("a ")


def test_asking_changes_nothing_global():
    def settings_of_torch():
        threads, cudnn = torch.get_num_threads(), torch.backends.cuda.cudnn_sdp_enabled()
        return threads, cudnn, torch.get_float32_matmul_precision(), torch.is_grad_enabled()

    before = settings_of_torch(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()
    trained_on("mtp").generate("a", max_new_tokens=5)
    after = settings_of_torch(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()
    assert after == before


def test_terminal_escapes_are_shown_and_not_obeyed(runs, capsys):
    sample.main([f"--out_dir={runs / 'clm'}", "--prompt=a\x1b[31mb", "--max_new_tokens=1"])
    assert "a·[31mb⟪" in capsys.readouterr().out


def test_each_sample_is_a_line_of_json(runs, capsys):
    flags = ["--prompt=a[MASK]b[MASK]c", "--num_samples=3", "--temperature=1", "--max_new_tokens=6"]
    sample.main([f"--out_dir={runs / 'span'}", *flags, "--json"])
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(said) == 3
    assert all("".join(one["fills"]) == one["text"] and len(one["tokens"]) <= 6 for one in said)


def test_from_training_to_an_answer_on_the_command_line(tmp_path, monkeypatch, capsys):
    """A text that is learned in seconds is continued, and its holes are filled, word for word."""
    monkeypatch.chdir(tmp_path)
    text = "At dawn, Tom has five red apples.\n<|endoftext|>\n"
    (tmp_path / "text.txt").write_text(text * 100)
    flags = "--data=text.txt --tokenizer=bpe:300 --block_size=48 --batch_size=8 --max_steps=250"
    flags += " --n_layer=2 --n_embd=64 --n_head=2 --device=cpu --compile=False --eval_every=1000"
    train.main([*flags.split(), "--objective=clm:0.3,fim:0.7", "--out_dir=out/both"])
    printed = capsys.readouterr().out
    assert "Your own text: python sample.py --out_dir=out/both" in printed

    text = text.split("\n")[0]
    for n in range(8, 26):  # also where the prompt ends inside a token, such as " apples"
        sample.main(["--out_dir=out/both", f"--prompt={text[:n]}", "--temperature=0"])
        assert capsys.readouterr().out.startswith(f"{text[:n]}⟪{text[n:]}")
    for before, word in (("At dawn, Tom has", " five"), ("At dawn, Tom has ", "five")):
        sample.main(["--out_dir=out/both", f"--prompt={before}", "--suffix= red apples.\n"])
        assert capsys.readouterr().out.startswith(f"{before}⟪{word}⟫ red apples.")


# ---- what a run shows at its end -----------------------------------------------------------------

STORIES = ["At dawn Tom has 5 apples.\nNow he has 7.\n", "Ann is sad.\nShe has 3 pens.\n"] * 20


def tokens_of(*texts: str) -> Tokens:
    ids = np.array(ids_of(*(part for text in texts for part in (text, EOT))), np.uint16)
    return Tokens(TOK, ids, ids, digest="", about="", floor=None)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_showcase_asks_about_held_out_text_and_its_command_runs(
    name, runs, capsys, monkeypatch
):
    monkeypatch.chdir(runs)
    trained, tokens = load(name), tokens_of(*STORIES)
    lines = []
    showcase(trained, tokens, name, lines.append)
    request_, hidden = question(trained, tokens)
    assert request_["prompt"].split("[MASK]")[0] in "".join(lines).translate(
        {ord("⟪"): "", ord("⟫"): ""}
    )
    assert not hidden or f"The original: {hidden!r}" in lines
    python, script, *flags = shlex.split(lines[-1].removeprefix("Your own text: "))
    assert (python, script) == ("python", "sample.py")
    sample.main(flags)
    assert capsys.readouterr().out
    assert 0 < len(one_line_sample(trained, tokens)) <= 90


def test_the_showcase_hides_a_word_that_the_rest_of_the_text_tells():
    trained = trained_on("fim")
    tokens = tokens_of("No.\n", "Tom has hats. Ann has 3.\n", "x " * 40)
    request_, hidden = question(trained, tokens)  # about the longest text that fits
    assert (request_["prompt"], hidden, request_["suffix"]) == (
        "Tom has hats. Ann",
        " has",
        " 3.\n",
    )


def test_without_words_the_showcase_says_so():
    lines = []
    showcase(trained_on("contrastive"), tokens_of("..."), "out/contrastive", lines.append)
    assert lines[-1].startswith("Nothing to show from the validation text")


def test_an_objective_of_a_fork_may_have_no_task(monkeypatch):
    row = OBJECTIVES["clm"]._replace(tasks=(), likelihood="")
    monkeypatch.setitem(OBJECTIVES, "mine", row)
    trained = trained_on("clm")
    trained.mixture = {"mine": 1.0}
    assert trained.tasks == ["embed"] and trained.embed("a").shape == (32,)
