"""test_generate.py: what decoding promises: a cache changes no token, and neither do drafts.

Decoding is tested on the CPU, on models of two blocks with random float64 weights, which may write
only the letters "a" to "f". The later tests are of sample.py: what each task reads and answers. No
network is needed. Not tested: speed, and whether anything that a model says is true.

    pytest test_generate.py
    pytest test_generate.py -k "drafting or drafts"
"""

import dataclasses
import doctest
import functools
import gc
import importlib
import itertools
import json
import math
import os
import shlex
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import generate
import model as model_file
import sample
from checkpoint import load_checkpoint, save_checkpoint
from config import UserError
from corpus import Tokens
from generate import Decoder, Drafter, LookUp, Sampler, captured, heads_of, unmask
from mixture import with_heads
from model import ModelConfig, Transformer
from objectives import OBJECTIVES, Knobs, fim_prompt
from sample import TASKS, Answer, SampleConfig, bound_nats, load, parts_of
from showcase import one_line_sample, question, showcase, text_with_a_hole
from tokenizer import get_tokenizer

LETTERS = "abcdef"
CONTEXT = 32
TOK = get_tokenizer("bytes")
DRAFTERS = {
    "heads": lambda decoder: [heads_of(decoder)],
    "look-up": lambda decoder: [LookUp()],
    "both": lambda decoder: [heads_of(decoder), LookUp()],
}


@pytest.fixture
def always_draft(monkeypatch):
    """Draft even where it does not pay: with untrained models it seldom does."""
    monkeypatch.setattr(generate, "MOST_CREDIT", 1e9)


# ---- models and a decoder without a cache ------------------------------------------------------


def randomize(model: Transformer) -> Transformer:
    """Give all matrices random weights, including those that are initialized to zero."""
    generator = torch.Generator().manual_seed(4)
    for name, p in model.named_parameters():
        if p.ndim > 1 and "norm" not in name:
            torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5, generator=generator)
    return model.eval()


@functools.cache
def random_model(mtp_heads: str = "chain") -> Transformer:
    config = ModelConfig(
        **dict(vocab_size=128, n_layer=2, n_head=2, n_kv_head=1, head_dim=16, n_embd=32),
        **dict(n_future=4, mtp_heads=mtp_heads),
    )
    return randomize(Transformer(config).double())


def only(letters: str = LETTERS) -> torch.Tensor:
    """(V,) bool: the ids that may be drawn."""
    return torch.isin(torch.arange(128), torch.tensor(list(letters.encode())))


def decoder_for(model, temperature=0.0, batch=1, letters=LETTERS) -> Decoder:
    return Decoder(model, batch, CONTEXT, Sampler(temperature), only(letters))


def prompts(n: int, shortest: int, longest: int, letters: int = 6) -> list[list[int]]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(shortest, longest + 1, n)
    return [rng.integers(97, 97 + letters, length).tolist() for length in lengths]


@torch.no_grad()
def next_logits(model, text: list[int], prefix: int = 0) -> torch.Tensor:
    """(V,) logits after a text, which is read from its beginning, without a cache."""
    ids = torch.tensor([text])
    segment = torch.ones_like(ids)
    mask = model.attention_mask("rule", segment, torch.arange(len(text))[None] < prefix)
    return model.logits(model.norm(model.trunk(ids, mask)))[0, -1]


def decode_slowly(decoder: Decoder, prompt: list[int], n: int, prefix=0, row=0) -> list[int]:
    """What the decoder must write, computed without a cache, one token at a time."""
    u = decoder.numbers_for(n, seed=1)[row]
    text = list(prompt)
    for i in range(n):
        if len(text) > CONTEXT:  # the context is full: go on with its second half
            n_dropped = len(text) - CONTEXT // 2
            text = text[n_dropped:]
            prefix = prefix and len(text)
        logits = next_logits(decoder.model, text, prefix) + decoder.penalty
        text.append(int(decoder.sampler(logits, u[i])))
        prompt = [*prompt, text[-1]]
    return prompt[-n:]


# ---- the sampler -------------------------------------------------------------------------------


def test_a_uniform_number_chooses_where_the_sum_of_probabilities_passes_it():
    logits = torch.tensor([0.5, 0.0, 0.3, 0.2]).log()
    sampler = Sampler(temperature=1.0)
    for u, token in [(0.0, 0), (0.49, 0), (0.51, 2), (0.79, 2), (0.81, 3), (1 - 1e-16, 3)]:
        assert sampler(logits, torch.tensor(u, dtype=torch.float64)) == token


@pytest.mark.parametrize(
    "sampler, kept",
    [
        (Sampler(1.0), [0.5, 0.2, 0.2, 0.1]),
        (Sampler(1.0, top_k=2), [5 / 7, 2 / 7, 0, 0]),
        (Sampler(1.0, top_k=9), [0.5, 0.2, 0.2, 0.1]),
        (Sampler(1.0, top_p=0.6), [5 / 7, 2 / 7, 0, 0]),
        (Sampler(1.0, top_p=1e-9), [1, 0, 0, 0]),
        (Sampler(1e-30), [1, 0, 0, 0]),
        (Sampler(1e308), [0.25, 0.25, 0.25, 0.25]),
    ],
)
def test_top_k_and_top_p_keep_the_likeliest(sampler, kept):
    """If two tokens are equally likely, the first one is kept."""
    logits = torch.tensor([0.5, 0.2, 0.2, 0.1]).log()
    assert torch.allclose(sampler.probs(logits), torch.tensor(kept).float(), atol=1e-5)


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(1, top_k=1), Sampler(1, top_p=0)])
def test_greedy_is_the_likeliest_token_whatever_the_number(sampler):
    logits = torch.tensor([0.1, 3.0, 2.0]).expand(50, 3)
    assert (sampler(logits, torch.rand(50)) == 1).all()


def test_top_k_and_top_p_follow_the_temperature():
    logits = torch.tensor([0.6, 0.3, 0.1]).log()
    for sampler in (Sampler(0.5, top_k=2), Sampler(0.5, top_p=0.9)):
        assert torch.allclose(sampler.probs(logits), torch.tensor([0.8, 0.2, 0.0]), atol=1e-5)


def test_top_p_counts_the_whole_distribution_also_with_top_k():
    logits = torch.tensor([0.4, 0.2, 0.2, 0.2]).log()
    p = Sampler(1.0, top_k=2, top_p=0.5).probs(logits)  # 0.4 < 0.5: the second is kept, too
    assert torch.allclose(p, torch.tensor([2 / 3, 1 / 3, 0, 0]), atol=1e-5)


# ---- plain decoding ----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_cache_changes_no_token(temperature):
    """One prompt is longer than the context, the others are shorter; every text outgrows it."""
    model = random_model()
    texts = set()
    for prompt in prompts(6, 1, 40):
        decoder = decoder_for(model, temperature)
        [text], stats = decoder.generate(prompt, 40)
        assert text == decode_slowly(decoder, prompt[-CONTEXT:], 40)
        assert stats.tokens == stats.passes == 40
        texts.add(tuple(text))
    assert len(texts) > 3


def test_samples_of_a_batch_are_those_of_their_seeds():
    decoder = decoder_for(random_model(), temperature=0.8, batch=3)
    [prompt] = prompts(1, 8, 8)
    rows, _ = decoder.generate(prompt, 30)
    assert rows == [decode_slowly(decoder, prompt, 30, row=row) for row in range(3)]
    assert len(set(map(tuple, rows))) == 3
    alone = decoder_for(random_model(), temperature=0.8)
    assert rows == [alone.generate(prompt, 30, seed=1 + row)[0][0] for row in range(3)]


def test_a_sample_ends_before_its_stop_token():
    decoder = decoder_for(random_model(), temperature=1.0, batch=50)
    whole, _ = decoder.generate([97], 30)
    ended, _ = decoder.generate([97], 30, stops={ord("c")})
    for long, short in zip(whole, ended):
        assert short == (long[: long.index(ord("c"))] if ord("c") in long else long)
    assert len(set(map(len, ended))) > 5


def test_an_answer_that_may_not_be_empty_has_a_token_and_nothing_else_changes():
    """The first token is the one that would be drawn if the stop tokens were not allowed."""
    stops = {ord("c"), ord("d")}
    decoder = decoder_for(random_model(), temperature=1.0, batch=50)
    usual, _ = decoder.generate([97], 30, stops=stops)
    forced, _ = decoder.generate([97], 30, stops=stops, may_be_empty=False)
    others = decoder_for(random_model(), temperature=1.0, batch=50)
    others.penalty[list(stops)] = -math.inf
    [*firsts] = others.generate([97], 1)[0]
    assert [] in usual and [] not in forced
    for was, is_now, [first] in zip(usual, forced, firsts):
        assert is_now[0] == first
        if was and was[0] == first:
            assert is_now == was


def test_a_prefix_is_read_in_both_directions():
    differ = 0
    for prompt in prompts(6, 4, 20):
        decoder = decoder_for(random_model())
        prefix = len(prompt) - len(prompt) % 3
        [both_ways], _ = decoder.generate(prompt, 10, prefix_length=prefix)
        assert both_ways == decode_slowly(decoder, prompt, 10, prefix)
        differ += both_ways != decoder.generate(prompt, 10)[0][0]
    assert differ > 2


def test_decoding_follows_the_rule_of_attention_when_it_is_edited(monkeypatch):
    """The edit is a sliding window, written in the one place that states the rule."""
    decoder = decoder_for(random_model())
    [prompt] = prompts(1, 20, 20)
    [usual], _ = decoder.generate(prompt, 30)
    rule = model_file.may_attend

    def sliding_window(q, k, *more, **named):
        return rule(q, k, *more, **named) & (k > q - 4)

    monkeypatch.setattr(model_file, "may_attend", sliding_window)
    [edited], _ = decoder.generate(prompt, 30)
    [drafted], stats = decoder.generate(prompt, 30, drafters=DRAFTERS["both"](decoder))
    assert edited == drafted == decode_slowly(decoder, prompt, 30) != usual
    assert stats.kept > 0


@pytest.mark.parametrize("module", [generate, sample])
def test_the_examples_of_the_docstrings_are_right(module):
    found = doctest.testmod(module)
    assert found.attempted > 0 and found.failed == 0


def test_what_is_read_again_is_the_new_prefix_if_there_was_one():
    differ = 0
    for prompt in [*prompts(6, 26, CONTEXT), *prompts(6, 4, 10)]:
        decoder = decoder_for(random_model())
        [text], _ = decoder.generate(prompt, 60, prefix_length=len(prompt))
        assert text == decode_slowly(decoder, prompt, 60, prefix=len(prompt))
        differ += text != decoder.generate(prompt, 60)[0][0]
    assert differ > 6


def test_tokens_after_a_stop_are_not_counted():
    decoder = decoder_for(random_model(), temperature=1.0, batch=50)
    rows, stats = decoder.generate([97], 30, stops={ord("c")})
    assert stats.tokens == sum(map(len, rows)) < 50 * 30


# ---- speculative decoding ----------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "mtp_heads, drafters",
    [("linear", "look-up"), *itertools.product(["linear", "parallel", "chain"], ["heads", "both"])],
)
def test_drafting_changes_no_token(mtp_heads, drafters, temperature, always_draft):
    """Prompts are short, half a context, or nearly a whole one; some drafts are kept, not all."""
    kept = drafted = 0
    model = random_model(mtp_heads)
    for prompt in [*prompts(2, 1, 6), *prompts(2, 12, 20), *prompts(2, 30, 32)]:
        decoder = decoder_for(model, temperature, letters="abc")
        [plain], _ = decoder.generate(prompt, 20)
        [fast], stats = decoder.generate(prompt, 20, drafters=DRAFTERS[drafters](decoder))
        assert fast == plain
        assert stats.passes + stats.kept == 20
        kept += stats.kept
        drafted += stats.drafted
    assert 0.05 < kept / drafted < 0.95


@pytest.mark.parametrize("mtp_heads", ["linear", "chain"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafting_stops_where_plain_decoding_does(temperature, mtp_heads, always_draft):
    """The stop token is frequent, so it also occurs among the drafts."""
    inside = 0
    for prompt in prompts(40, 1, 8):
        decoder = decoder_for(random_model(mtp_heads), temperature, letters="abc")
        [plain], _ = decoder.generate(prompt, 20, stops={ord("b")})
        drafters = DRAFTERS["both"](decoder)
        [fast], stats = decoder.generate(prompt, 20, stops={ord("b")}, drafters=drafters)
        assert fast == plain
        inside += len(fast) < stats.passes + stats.kept - 1
    assert inside >= 2


def test_the_numbers_that_decide_are_uniform_and_independent():
    u = decoder_for(random_model(), batch=50).numbers_for(200, seed=1) - 0.5
    assert abs(u.mean()) < 0.01 and u.var().item() == pytest.approx(1 / 12, rel=0.05)
    assert abs((u[:, 1:] * u[:, :-1]).mean()) < 0.003 > abs((u[1:] * u[:-1]).mean())


def test_a_longer_text_begins_with_the_shorter():
    decoder = decoder_for(random_model(), temperature=1.0, batch=3)
    short, _ = decoder.generate([97], 5, seed=7)
    long, _ = decoder.generate([97], 9, seed=7)
    assert [row[:5] for row in long] == short


@pytest.mark.parametrize("mtp_heads", ["linear", "chain"])
def test_captured_graphs_change_no_token(mtp_heads, always_draft, monkeypatch):
    """As on CUDA, each shape has a graph, which always reads and writes the same memory. No garbage
    is collected during a capture, because freeing an older graph would break it."""
    monkeypatch.setattr(generate, "CALLS_BEFORE_GRAPH", 1)
    shapes = []

    def capture(function, static_inputs):
        assert not gc.isenabled()
        shapes.append([tuple(x.shape) for x in static_inputs])
        static_outputs = tree_map(torch.clone, function(*static_inputs))

        def replay(*inputs):
            for static, x in zip(static_inputs, inputs):
                static.copy_(x)  # fails for any other shape
            return tree_map(torch.Tensor.copy_, static_outputs, function(*static_inputs))

        return replay

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", capture)
    for prompt in prompts(3, 1, 30):
        decoder = decoder_for(random_model(mtp_heads))
        [plain], _ = decoder.generate(prompt, 30)
        decoder.run_pass = captured(decoder.run_pass)
        decoder.run_linear_heads = captured(decoder.run_linear_heads)
        decoder.run_block_heads = [captured(run) for run in decoder.run_block_heads]
        for _ in range(2):
            [fast], stats = decoder.generate(prompt, 30, drafters=[heads_of(decoder), LookUp()])
            assert fast == plain and gc.isenabled()
            n_captured = len(shapes)
        decoder.generate(prompt, 30, drafters=[heads_of(decoder), LookUp()])
        assert len(shapes) == n_captured  # generating again needs no new graphs
    assert max(ids[-1] for ids, *_ in shapes) <= generate.LONGEST_GRAPH


def test_a_shape_that_is_seldom_read_is_not_captured(monkeypatch):
    def capture(function, static_inputs):
        captures.append(static_inputs[0].shape[-1])
        return function

    captures = []
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", capture)
    double = captured(lambda x: 2 * x)
    for _ in range(generate.CALLS_BEFORE_GRAPH):
        assert double(torch.ones(1, 3)).sum() == 6 and not captures
    for _ in range(2):
        assert double(torch.ones(1, 3)).sum() == 6 and captures == [3]
    long = torch.ones(1, generate.LONGEST_GRAPH + 1)
    for _ in range(generate.CALLS_BEFORE_GRAPH + 1):
        double(long)
    assert captures == [3]


@torch.no_grad()
def draft_slowly(model, text: list[int]) -> list[int]:
    """The heads' guesses at what follows a text whose last token the trunk has not read."""
    known = list(text)
    for k in range(3):
        ahead = [(known[t:] + [0] * 3)[:3] for t in range(1, len(text))]
        states = model(torch.tensor([text[:-1]]), ahead=torch.tensor([ahead]))
        logits = model.logits(states[k + 1])[0, -1].masked_fill(~only("abc"), -math.inf)
        known.append(int(logits.argmax()))
    return known[len(text) :]


@pytest.mark.parametrize("mtp_heads", ["linear", "parallel", "chain"])
def test_drafts_are_what_the_heads_say_at_every_pass(mtp_heads, monkeypatch, always_draft):
    """So cache entries that a head made from wrong guesses are made again, and a head that was not
    asked for a while catches up."""
    model = random_model(mtp_heads)
    lengths = Counter()

    def checked(heads, text, drafts, start, u):
        made = heads(text, drafts, start, u)
        assert made == draft_slowly(model, text[start:])[: len(made)]
        lengths[len(made)] += 1
        return made

    for prompt in prompts(5, 1, 30):
        decoder = decoder_for(model, letters="abc")
        heads = heads_of(decoder)
        heads.least_probability = 0.3
        decoder.generate(prompt, 20, drafters=[functools.partial(checked, heads)])
    assert min(lengths[1] + lengths[2], lengths[3]) > 2


@pytest.mark.parametrize("least, n_drafts", [(0.0, 3), (0.9, 2), (1.1, 0)])
def test_linear_heads_draft_what_is_likely(least, n_drafts, monkeypatch):
    """Probabilities of 1, 0.95 and 0.9: all three guesses are right with probability 0.86."""
    decoder = decoder_for(random_model("linear"))
    heads = heads_of(decoder)
    heads.least_probability = least
    answer = torch.tensor([97, 98, 99]), torch.tensor([1.0, 0.95, 0.9])
    monkeypatch.setattr(decoder, "run_linear_heads", lambda position, u: answer)
    balance = heads.balance
    assert heads([97, 97], [], 0, torch.zeros(1, 9)) == [97, 98, 99][:n_drafts]
    spent = heads.cost_of_asking + n_drafts * heads.cost
    assert heads.balance == pytest.approx(balance - spent)


@pytest.mark.parametrize(
    "text, drafts, found",
    [
        ("abcxabc", "", "xabc"),  # what followed the longest tail that occurs earlier
        ("xbc1abc2.bc", "", "2.bc"),  # of several places, the latest
        ("abab", "", "abab"),  # a short period is continued
        ("abcd.a", "bc", "d.ab"),  # earlier drafts count as text
        ("abcd", "", ""),
    ],
)
def test_look_up_drafts_what_followed_the_last_tokens(text, drafts, found):
    u = torch.zeros(1, 9)
    assert LookUp()(list(text.encode()), list(drafts.encode()), 0, u) == list(found.encode())


def test_a_drafter_that_is_always_wrong_costs_a_few_per_cent_and_no_more():

    class Wrong(Drafter):
        cost = 0.25

        def guess(self, text, drafts, start, u):
            return [0, 0]  # text never holds a 0

    text = [1]
    drafter = Wrong()
    n_drafts = 0
    for _ in range(1000):
        n_drafts += len(drafter(text, [], 0, torch.zeros(1, 9)))
        text.append(1)
    assert n_drafts * 0.25 <= generate.MOST_CREDIT + 1000 * generate.ALLOWANCE + 0.5
    drafter.balance = -1.0
    assert drafter([*text, 0, 0], [], 0, torch.zeros(1, 9)) == []
    drafter.last_drafts = [0, 0]
    drafter.drafts_start = len(text)
    assert drafter([*text, 0, 0], [], 0, torch.zeros(1, 9)) == [0, 0]  # right: trusted again


def test_a_drafter_is_for_one_text():
    decoder = decoder_for(random_model(), batch=2)
    with pytest.raises(AssertionError, match="one sample, got 2"):
        decoder.generate([97], 4, drafters=[LookUp()])


# ---- masked diffusion --------------------------------------------------------------------------


def read_ids(model, monkeypatch) -> list:
    """A list to which each pass through the trunk appends the first row of the ids it reads."""
    seen = []
    trunk = model.trunk

    def watching(ids, *more, **named):
        seen.append(ids[0].tolist())
        return trunk(ids, *more, **named)

    monkeypatch.setattr(model, "trunk", watching)
    return seen


@pytest.mark.parametrize("order", ["confidence", "random"])
def test_unmasking_fills_an_even_share_a_step_and_leaves_the_rest_alone(order, monkeypatch):
    MASK = 127
    ids = torch.tensor([[97, 98] + [MASK] * 10 + [99] + [MASK] * 3] * 2)
    model = random_model("parallel")  # whose heads read no tokens ahead
    read = read_ids(model, monkeypatch)
    rows = unmask(model, ids, MASK, only(), Sampler(1.0), steps=4, order=order)
    given = ids != MASK
    assert torch.equal(rows[given], ids[given])
    assert torch.isin(rows[~given], only().nonzero()).all()
    assert [row.count(MASK) for row in read] == [13, 10, 7, 4]


def test_the_surest_token_is_unmasked_first(monkeypatch):
    MASK = 127
    ids = torch.tensor([[97, MASK, 98, MASK, MASK, 99]])
    model = random_model("parallel")  # whose heads read no tokens ahead
    read = read_ids(model, monkeypatch)
    unmask(model, ids, MASK, only(), Sampler(), steps=3)
    after_one_step = read[1]
    everywhere = torch.ones_like(ids)
    mask = model.attention_mask("full", everywhere, everywhere.bool())
    p = (
        model.logits(model.norm(model.trunk(ids, mask)))[0]
        .masked_fill(~only(), -math.inf)
        .softmax(-1)
    )
    surest = max((1, 3, 4), key=lambda i: p[i].max().item())
    expected = ids[0].tolist()
    expected[surest] = p[surest].argmax().item()
    assert after_one_step == expected


def test_remaining_masks_are_filled_in_even_shares(monkeypatch):
    MASK = 127
    ids = torch.tensor([[97] + [MASK] * 7])
    read = read_ids(model := random_model("parallel"), monkeypatch)
    unmask(model, ids, MASK, only(), Sampler(), steps=5)
    assert [row.count(MASK) for row in read] == [7, 6, 5, 3, 2]


def test_the_surest_tokens_are_those_of_the_models_own_probability(monkeypatch):
    MASK = 127
    ids = torch.tensor([[97, MASK, 98, MASK, MASK, 99, MASK, MASK]])
    model = random_model("parallel")
    read = read_ids(model, monkeypatch)
    sampler = Sampler(5.0, top_k=2)
    unmask(model, ids, MASK, only(), sampler, steps=5)
    everywhere = torch.ones_like(ids)
    mask = model.attention_mask("full", everywhere, everywhere.bool())
    logits = model.logits(model.norm(model.trunk(ids, mask)))[0].masked_fill(~only(), -math.inf)
    guess = sampler(logits.float(), torch.rand(8, generator=torch.Generator().manual_seed(1)))
    p = logits.softmax(-1).gather(-1, guess[:, None])[:, 0]
    surest = max((1, 3, 4, 6, 7), key=lambda i: p[i].item())
    assert [i for i in (1, 3, 4, 6, 7) if read[1][i] != MASK] == [surest]


# ---- sample.py: the tasks ----------------------------------------------------------------------


def save_random_run(folder, name: str, block_size: int = 64) -> None:
    config = ModelConfig(
        **dict(vocab_size=TOK.vocab_size, n_layer=2, n_head=2, head_dim=16, n_embd=32)
    )
    config = with_heads(config, {name: 1.0}, Knobs())
    save_checkpoint(
        folder / "ckpt.pt",
        dict(
            model=randomize(Transformer(config)).state_dict(),
            model_config=dataclasses.asdict(config),
            knobs=dataclasses.asdict(Knobs()),
            train_config={"objective": name, "block_size": block_size},
            **dict(tokenizer=TOK.to_json(), data_config={}, data_digest="", replay_digest=""),
            **dict(optimizers=[], step=1, elapsed_s=1.0, best_val_loss=1.0),
        ),
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a random model of every objective."""
    folder = tmp_path_factory.mktemp("runs")
    for name in OBJECTIVES:
        save_random_run(folder / name, name)
    return folder


def ids_of(*parts) -> list[int]:
    """Text and special ids -> ids."""
    ids = []
    for part in parts:
        ids += TOK.encode(part) if isinstance(part, str) else [part]
    return ids


LAYOUTS = [  # objective, flags, what the model reads before it writes
    ("clm", dict(prompt="ab"), ["ab"]),
    ("clm", dict(prompt=""), [TOK.EOT]),
    ("clm", dict(prompt="[MASK]<PRE>", task="continue"), ["[MASK]<PRE>"]),
    ("prefix", dict(prompt="ab"), ["ab"]),
    ("fim", dict(prompt="abcdef", suffix="g"), [TOK.SUF, "g", TOK.PRE, "ab", TOK.MID, "cdef"]),
    ("fim", dict(prompt="a[MASK]b"), [TOK.SUF, "b", TOK.PRE, TOK.MID, "a"]),
    ("fim", dict(prompt="a\udcff", suffix="b"), [TOK.SUF, "b", TOK.PRE, TOK.MID, "a?"]),
    ("fim", dict(prompt="", suffix="b"), [TOK.SUF, "b", TOK.PRE, TOK.MID]),
    ("fim", dict(prompt="a日本", suffix="b"), [TOK.SUF, "b", TOK.PRE, "a", TOK.MID, "日本"]),
    (
        "span",
        dict(prompt="abcde", suffix="f"),
        ["ab", TOK.sentinel, "f", TOK.sentinel + 1, TOK.EOT, TOK.sentinel, "cde"],
    ),
    (
        "span",
        dict(prompt="a[MASK]b[MASK]"),
        [TOK.sentinel, "b", TOK.sentinel + 1, TOK.EOT, TOK.sentinel, "a"],
    ),
    ("ul2", dict(prompt="a"), [TOK.S, "a", TOK.EOT]),
    (
        "ul2",
        dict(prompt="abcdef", suffix="g", mode="X"),
        [TOK.X, "a", TOK.sentinel, "g", TOK.sentinel + 1, TOK.EOT, TOK.sentinel, "bcdef"],
    ),
    ("bart", dict(prompt="a", suffix="b"), ["a", TOK.MASK, "b", TOK.EOT]),
    ("mlm", dict(prompt="a[MASK]b"), ["a", TOK.MASK, "b", TOK.EOT]),
    ("nsp", dict(prompt="A. B[MASK]"), [TOK.CLS, "A.", TOK.SEP, " B", TOK.MASK, TOK.SEP]),
    ("nsp", dict(prompt="a[MASK]"), [TOK.CLS, "a", TOK.SEP, TOK.MASK, TOK.SEP]),
    ("nsp", dict(prompt="a", suffix="b"), [TOK.CLS, "a", TOK.SEP, "b", TOK.SEP]),
    ("sop", dict(prompt="a", suffix="b"), [TOK.CLS, "a", TOK.SEP, "b", TOK.SEP]),
    ("electra", dict(prompt="ab"), ["ab", TOK.EOT]),
    ("contrastive", dict(prompt="a", suffix="b"), ["a"]),
    ("diffusion", dict(prompt="a", max_new_tokens=2), ["a", TOK.MASK, TOK.MASK]),
    (
        "diffusion",
        dict(prompt="[MASK]", task="continue", max_new_tokens=1),
        ["[MASK]", TOK.MASK],
    ),
    (
        "diffusion",
        dict(prompt="a", suffix="b", max_new_tokens=2),
        ["a", TOK.MASK, TOK.MASK, "b", TOK.EOT],
    ),
    ("diffusion", dict(prompt="a", suffix="b"), ["a", *[TOK.MASK] * 8, "b", TOK.EOT]),
]


def test_fim_may_be_given_any_part_of_its_prefix_as_the_beginning_of_its_middle():
    """If none of the prefix is moved, this is the paper's psm; if all of it is, its spm2."""
    before, after = TOK.encode("abc"), TOK.encode("d")
    given = [[*fim_prompt("psm", TOK, before[:n], after), *before[n:]] for n in range(4)]
    assert given[3] == ids_of(TOK.PRE, "abc", TOK.SUF, "d", TOK.MID)
    assert given[1] == ids_of(TOK.PRE, "a", TOK.SUF, "d", TOK.MID, "bc")
    assert given[0] == fim_prompt("spm2", TOK, before, after)


@pytest.mark.parametrize("name, flags, layout", LAYOUTS)
def test_a_request_is_laid_out_as_in_training(name, flags, layout, runs, monkeypatch):
    """Read in both directions: a source with its EOT, and all that prefix and full models read."""
    trained = load(runs / name)
    ids = ids_of(*layout)
    both_ways = {"causal": 0, "full": len(ids), "prefix": len(ids)}[OBJECTIVES[name].attention]
    if OBJECTIVES[name].attention == "prefix" and TOK.EOT in ids:
        both_ways = ids.index(TOK.EOT) + 1
    masks = []
    trunk = trained.model.trunk

    def watching(read, mask, *more, **named):
        if not masks:
            assert read[0].tolist() == ids
            if mask == "full":
                mask = torch.ones(1, 1, len(ids), len(ids), dtype=torch.bool)
            masks.append(mask[0, 0, :, : len(ids)])
        return trunk(read, mask, *more, **named)

    monkeypatch.setattr(trained.model, "trunk", watching)
    sample.serve(trained, sample.build(SampleConfig, flags))
    assert torch.equal(masks[0], dense_mask_of(len(ids), both_ways))


def test_every_task_has_a_layout_here():
    entries = {entry for objective in OBJECTIVES.values() for entry in objective.tasks}
    for name, flags, _ in LAYOUTS:
        request = sample.build(SampleConfig, flags)
        entries -= {next(e for e in OBJECTIVES[name].tasks if sample.can_answer(e, request))}
    assert not entries, f"LAYOUTS needs a row for {entries}"


def dense_mask_of(n: int, both_ways: int) -> torch.Tensor:
    """(n, n): causal, except that the first `both_ways` positions all see each other."""
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    mask[:both_ways, :both_ways] = True
    return mask


def test_a_document_ends_with_eot_where_it_fits(runs):
    trained = load(runs / "mlm")
    full = [97] * trained.block_size
    assert trained.as_document(full) == full
    assert trained.as_document(full[1:]) == [*full[1:], TOK.EOT]
    assert load(runs / "nsp").as_document([97]) == [97]  # [SEP] ends it


QUESTIONS = {  # texts that each kind of task is asked about
    "text": dict(prompt="Tom has 5 apples."),
    "one gap": dict(prompt="Tom has [MASK] apples."),
    "gaps": dict(prompt="Tom has [MASK] apples."),
    "two texts": dict(prompt="Tom has 5 apples.", suffix="Now he has 7."),
    "any text": dict(prompt="Tom has ", suffix=" apples.", max_new_tokens=20),
}
EVERY_TASK = [(name, task) for name, row in OBJECTIVES.items() for task in row.tasks]


@pytest.mark.parametrize("name, entry", EVERY_TASK)
def test_every_task_answers_and_marks_what_the_model_wrote(name, entry, runs, capsys):
    """On the command line, in the output for people and in the JSON for programs."""
    task = TASKS[entry]
    question = QUESTIONS[task.texts]
    flags = [f"--out_dir={runs / name}", f"--task={task.names[0]}"]
    flags += [f"--{key}={value}" for key, value in question.items()]
    sample.main(flags)
    shown = capsys.readouterr().out
    sample.main([*flags, "--json"])
    [line] = capsys.readouterr().out.splitlines()
    said = json.loads(line, parse_constant=lambda constant: pytest.fail(constant))
    assert said["prompt"] == question["prompt"]
    assert shown.strip()
    if task.texts != "two texts" and entry != "detect":
        assert TOK.decode(said["tokens"]) == said["text"] or entry == "fill"
        assert shown.count("⟪") == shown.count("⟫") >= 1
        assert "⟪" + sample.visible(said["text"]) + "⟫" in shown
    if entry != "restore" and said["whole"]:  # restore writes the whole text anew
        before, *after = question["prompt"].split("[MASK]")
        assert said["whole"].startswith(before)
        end = question.get("suffix", "".join(after))
        assert said["whole"].endswith(end)


def test_each_gap_gets_the_text_after_its_sentinel(monkeypatch, runs):
    """Gaps are filled in turn. Each target holds the given tokens and the fills of earlier gaps."""
    trained = load(runs / "span")
    mark = [TOK.sentinel + k for k in range(4)]
    told = []
    read = []

    def write(trained, request, prompt, prefix_length, ends):
        read.append((prompt, prefix_length, ends, request.seed, request.max_new_tokens))
        text = told[len(read) - 1]
        return [Answer([(text, True)], TOK.encode(text), {"passes": 2})]

    monkeypatch.setattr(sample, "write", write)
    told = ["5", "redder"]
    [answer] = trained.ask("infill", "Tom has [MASK] [MASK] apples", seed=3, max_new_tokens=9)
    source = ids_of("Tom h", mark[0], " ", mark[1], " apples", mark[2], TOK.EOT)
    first = [*source, *ids_of(mark[0], "as ")]
    assert read[0] == (first, len(source), [mark[1]], 3, 9)
    assert read[1] == ([*first, *ids_of("5", mark[1])], len(source), [mark[2]], 1003, 8)
    assert answer.details == {"passes": 4, "fills": told}
    assert answer.text == "5redder" and answer.ids == TOK.encode("5redder")

    read.clear()
    told = ["5", "redder", "more"]
    [answer] = trained.ask("infill", "[MASK] [MASK] apples[MASK]")
    source = ids_of(mark[0], " ", mark[1], " apples", mark[2], TOK.EOT)  # gaps at both ends
    assert read[0][:3] == ([*source, mark[0]], len(source), [mark[1]])
    assert answer.details["fills"] == told
    assert answer.whole == "5 redder applesmore"
    assert sample.marked(answer.parts) == "⟪5⟫ ⟪redder⟫ apples⟪more⟫"


@pytest.mark.parametrize("first_end", ["sentinel", "EOT"])
def test_a_gap_ends_at_a_sentinel_and_at_an_eot(first_end, monkeypatch, runs):
    """This also holds for a gap before the last one: the next gap is still filled."""
    trained = load(runs / "span")
    end = TOK.EOT if first_end == "EOT" else TOK.sentinel + 1
    says = iter([ord("5"), end, ord("7"), TOK.EOT])

    def sampler(logits, u):
        return torch.tensor([[next(says)]])

    monkeypatch.setattr(sample, "sampler_for", lambda request, goes_on: sampler)
    [answer] = trained.ask("infill", "Tom has[MASK] or[MASK] apples")
    assert answer.details["fills"] == ["5", "7"]


def test_a_gap_holds_a_token_at_least(runs, monkeypatch):
    """Like a span in training, even if the model would end the gap at once."""
    trained = load(runs / "span")
    ends = torch.zeros(TOK.vocab_size)
    ends[[TOK.EOT, *range(TOK.sentinel, TOK.sentinel + 9)]] = 50.0
    monkeypatch.setattr(trained.model, "logits", lambda state: ends.expand(*state.shape[:-1], -1))
    [answer] = trained.ask("infill", "Tom has[MASK] or[MASK] apples")
    assert [len(TOK.encode(fill)) for fill in answer.details["fills"]] == [1, 1]


def test_samples_of_a_text_with_gaps_are_those_of_their_seeds(runs):
    trained = load(runs / "ul2")
    flags = dict(temperature=1.0, max_new_tokens=6)
    several = trained.ask("infill", "a[MASK]b[MASK]c", seed=5, num_samples=3, **flags)
    for number, answer in enumerate(several):
        [alone] = trained.ask("infill", "a[MASK]b[MASK]c", seed=5 + number, **flags)
        assert alone.whole == answer.whole and len(answer.ids) <= 6
    assert len({answer.whole for answer in several}) == 3
    alike = "(all samples are identical; to vary them, raise --temperature"
    assert not any(alike in line for line in several[-1].lines)
    *_, last = trained.ask("infill", "a[MASK]b[MASK]c", seed=5, num_samples=3, max_new_tokens=6)
    assert any(alike in line for line in last.lines)


def test_gaps_for_which_no_token_is_left_are_named(runs, monkeypatch):
    trained = load(runs / "span")
    [answer] = trained.ask("infill", "a[MASK]b[MASK]c", max_new_tokens=1)
    assert answer.details["fills"][1] == ""
    assert answer.lines == ["(gap 2 was not reached: raise --max_new_tokens)"]
    only_a = torch.arange(trained.model.config.vocab_size) == ord("a")
    monkeypatch.setattr(trained, "allowed", lambda also=(): only_a)
    [answer] = trained.ask("infill", "a[MASK]b[MASK]c")
    assert answer.lines == [
        "(the context is full; to see the rest, shorten the texts)",
        "(gap 2 was not reached: shorten the texts)",
    ]


@pytest.mark.parametrize("name", ["fim", "span", "ul2", "bart"])
def test_an_answer_ends_before_its_question_leaves_the_context(name, runs, monkeypatch):
    """A continuation may outgrow the context, whose beginning is then dropped; the text in a gap
    may not. (Models that were trained for only a few steps hardly ever write EOT.)"""
    trained = load(runs / name)
    vocabulary = trained.model.config.vocab_size
    task = "restore" if name == "bart" else "infill"
    lengths = []
    for seed in range(1, 6):
        flags = dict(max_new_tokens=500, temperature=1.0, seed=seed)
        [answer] = trained.ask(task, "ab", "c", **flags)
        lengths.append(len(answer.ids))
        is_full = "(the context is full; to see the rest, shorten the texts)" in answer.lines
        assert is_full == (len(answer.ids) > 50)
    assert 50 < max(lengths) < trained.block_size
    if name in ("fim", "bart"):  # an answer may be short, too
        monkeypatch.setattr(trained, "allowed", lambda also=(): torch.arange(vocabulary) == TOK.EOT)
        assert trained.ask(task, "ab", "c", **flags)[0].lines == []
        monkeypatch.undo()
    if name == "fim":
        assert len(trained.ask("continue", "ab", **flags)[0].ids) > trained.block_size


@pytest.mark.parametrize("name, n_read", [("clm", 64), ("prefix", 64), ("ul2", 48)])
def test_a_prompt_that_is_too_long_is_reported(name, n_read, runs):
    trained = load(runs / name)
    [answer] = trained.ask("continue", "a" * 100, max_new_tokens=1)
    assert answer.lines == [f"(only {n_read} of 100 tokens were read: those at the end)"]
    assert trained.ask("continue", "a" * n_read, max_new_tokens=1)[0].lines == []


def test_a_text_around_a_gap_that_is_too_long_is_reported(runs):
    """Of the 64 positions, fim reserves 4 for its marks and 5 for the answer."""
    trained = load(runs / "fim")
    [answer] = trained.ask("infill", "a" * 100, "b" * 10, max_new_tokens=5)
    assert answer.lines == ["(only 55 of 110 tokens were read: those around the gap)"]
    assert trained.ask("infill", "a" * 45, "b" * 10, max_new_tokens=5)[0].lines == []


def test_an_unmasked_end_of_text_ends_it_unless_text_follows(monkeypatch, runs):
    trained = load(runs / "diffusion")

    def fake(model, ids, mask_id, allowed, sampler, **options):
        token = TOK.EOT if allowed[TOK.EOT] else ord("x")
        return torch.where(ids == mask_id, torch.tensor(token), ids)

    monkeypatch.setattr(sample, "unmask", fake)
    assert trained.ask("continue", "ab", max_new_tokens=3)[0].whole == "ab"
    assert trained.ask("unmask", "ab", "c", max_new_tokens=3)[0].whole == "abxxxc"
    with pytest.raises(UserError, match="does not apply to .MASK., which is one token"):
        trained.ask("unmask", "ab[MASK]c", max_new_tokens=3)


def test_a_mask_is_never_filled_with_the_end_of_a_document(monkeypatch, runs):
    trained = load(runs / "mlm")
    ends = F.one_hot(torch.tensor(TOK.EOT), TOK.vocab_size).float()
    monkeypatch.setattr(trained, "masked_logits", lambda ids: ends.expand(len(ids), -1))
    assert TOK.EOT not in trained.ask("fill", "a[MASK]b")[0].ids


@pytest.mark.parametrize("name", ["clm", "fim"])
def test_a_likelihood_is_the_sum_over_the_text_among_ids_that_may_be_drawn(name, runs):
    trained = load(runs / name)
    ids = TOK.encode("Tom has 5 apples.")
    said = trained.score("Tom has 5 apples.")
    logits = trained.logits([TOK.EOT, *ids])[:-1]
    logits = logits.masked_fill(~trained.allowed(), -torch.inf)
    nats = F.cross_entropy(logits, torch.tensor(ids), reduction="sum").item()
    assert math.isclose(said["nats"], nats, rel_tol=1e-5)
    assert math.isclose(said["bits_per_byte"], nats / math.log(2) / 17, rel_tol=1e-5)
    assert math.isclose(said["perplexity"], math.exp(nats / 17), rel_tol=1e-5)
    assert not said["bound"]


def test_the_json_of_a_score_counts_its_tokens_in_n_tokens(runs, capsys):
    sample.main([f"--out_dir={runs / 'clm'}", "--prompt=abc", "--task=score", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["tokens"] == [] and said["n_tokens"] == 3


def test_a_text_longer_than_the_context_is_scored_with_half_a_context_before_each_token(runs):
    trained = load(runs / "clm")
    text = "Tom has 5 apples. " * 12
    ids = [TOK.EOT, *TOK.encode(text)]
    nats = 0.0
    first = 0  # the start of the window
    for i in range(1, len(ids)):
        if i - first > 64:
            first = i - 1 - 32
        logits = trained.logits(ids[first:i])[-1]
        nats -= logits.masked_fill(~trained.allowed(), -torch.inf).log_softmax(-1)[ids[i]].item()
    assert math.isclose(trained.score(text)["nats"], nats, rel_tol=1e-4)


def test_the_bound_of_diffusion_is_the_mean_over_all_maskings(runs, monkeypatch):
    trained = load(runs / "diffusion")
    monkeypatch.setattr(sample, "BOUND_ROWS", 1500)
    ids = TOK.encode("5 a")
    exact = 0.0
    for size in (1, 2, 3):
        subsets = list(itertools.combinations(range(3), size))
        for hidden in subsets:
            noisy = [TOK.MASK if i in hidden else id for i, id in enumerate(ids)]
            logits = trained.logits([TOK.EOT, *noisy], prefix_length=4)[1:]
            nats = F.cross_entropy(logits, torch.tensor(ids), reduction="none")
            exact += nats[list(hidden)].sum().item() * 3 / size / len(subsets) / 3
    known = functools.cache(trained.logits)  # there are only seven maskings
    monkeypatch.setattr(
        trained, "logits", lambda ids, prefix_length: known(tuple(ids.tolist()), prefix_length)
    )
    said = trained.score("5 a")
    assert said["bound"] and said["nats"] == pytest.approx(exact, rel=0.03)


def test_what_the_model_wrote_is_kept_apart_from_what_was_given():
    """Even if it is only part of a character: the letters around it stay intact."""
    ids = [*TOK.encode("a"), 0xE3, *TOK.encode("b")]
    assert parts_of(TOK, ids, [False, True, False]) == [
        ("a", False),
        ("\ufffd", True),
        ("b", False),
    ]
    assert parts_of(TOK, [], []) == []


def test_a_character_of_several_tokens_is_marked_as_a_whole(runs, monkeypatch):
    trained = load(runs / "electra")
    text = "café ☃ ☃é ☃☃"
    for threshold in trained.ask("detect", text)[0].details["replaced_probability"]:
        monkeypatch.setattr("sample.MARKED_ABOVE", threshold)
        assert trained.ask("detect", text)[0].whole == text
    monkeypatch.setattr("sample.MARKED_ABOVE", -1)
    assert trained.ask("detect", text)[0].parts == [(text, True)]


def test_the_bound_reads_what_stands_before_and_hides_none_of_it(runs, monkeypatch):
    trained = load(runs / "diffusion")
    before = TOK.encode("At dawn, ")
    room = trained.block_size - len(before)
    seen = []

    def logits(ids, prefix_length):
        seen.append(ids.tolist())
        return torch.zeros(len(ids), TOK.vocab_size)

    monkeypatch.setattr(trained, "logits", logits)
    bound_nats(trained, TOK.encode("a" * (room + 3)), before)
    assert all(ids[: len(before)] == before for ids in seen)
    assert {len(ids) for ids in seen} == {trained.block_size, len(before) + 3}


def test_an_embedding_is_the_mean_of_the_hidden_states(runs):
    for name, both_ways in (("clm", False), ("prefix", True), ("contrastive", True)):
        trained = load(runs / name)
        ids = TOK.encode("Tom has 5 apples.")
        states = trained.states(ids, prefix_length=len(ids) if both_ways else 0)
        vector = trained.embed("Tom has 5 apples.")
        assert torch.allclose(vector, states.mean(0), atol=1e-5)
        [answer] = trained.ask("embed", "Tom has 5 apples.")
        assert answer.details["embedding"] == vector.tolist()
        assert trained.model.logits(states).isfinite().all()  # fails if weights require gradients


def test_programs_get_the_notes_for_people(runs, capsys):
    flags = ["--max_new_tokens=2", "--num_samples=2", "--temperature=0", "--json"]
    sample.main([f"--out_dir={runs / 'clm'}", "--prompt=abc", *flags])
    *_, last = capsys.readouterr().out.splitlines()
    assert any("all samples are identical" in note for note in json.loads(last)["notes"])


def test_a_mixture_says_which_task_it_chose(runs, monkeypatch):
    trained = load(runs / "mlm")
    trained.mixture = {"bart": 0.5, "mlm": 0.5}
    text = "a[MASK]b[MASK]c"
    chosen = "(task: restore; --task=fill would do something else)"
    monkeypatch.setattr(sample, "write", lambda *_: [Answer([("abc", True)])])
    assert chosen in trained.ask(None, text)[0].lines
    assert chosen not in trained.ask(None, text, max_new_tokens=5)[0].lines  # fill would refuse
    assert not any("(task" in line for line in trained.ask("fill", text)[0].lines)
    [answer] = load(runs / "nsp").ask(None, "a", "b")  # fill could answer, too
    assert not any("(task" in line for line in answer.lines)


@pytest.mark.parametrize("name", ["mlm", "diffusion"])
def test_a_blank_before_a_gap_is_noted_if_tokens_hold_blanks(name, runs, monkeypatch):
    trained = load(runs / name)

    def notes(text):
        [answer] = trained.ask(None, text)
        return [line for line in answer.lines if "leave no space before a gap" in line]

    assert notes("a [MASK] b") == []  # bytes: a blank is a token of its own
    monkeypatch.setattr(trained.tok, "name", "bpe:300")
    assert len(notes("a [MASK] b")) == 1 and notes("a[MASK] b ") == []


def test_a_text_is_restored_whole_unless_the_user_sets_a_limit(runs, monkeypatch):
    trained = load(runs / "bart")
    trained.block_size = 1000
    most = []
    monkeypatch.setattr(sample, "write", lambda _, request, *rest: most.append(request.most_new))
    for limit in (None, 7):
        request = SampleConfig(prompt="Tom has 5 apples. " * 25, max_new_tokens=limit)
        sample.restore(trained, request)
    assert most == [1000, 7]


def test_the_end_of_a_prompt_that_is_too_long_is_what_is_read(runs, monkeypatch):
    for name, ids in {
        "clm": ids_of("b" * 64),
        "prefix": ids_of("b" * 64),
        "ul2": ids_of(TOK.S, "b" * 48, TOK.EOT),
    }.items():
        trained = load(runs / name)
        read = read_ids(trained.model, monkeypatch)
        trained.ask("continue", "a" * 30 + "b" * 64, max_new_tokens=1)
        assert read[0] == ids


def test_each_samples_json_has_its_own_details(runs, capsys):
    flags = ["--prompt=a[MASK]b[MASK]c", "--num_samples=3", "--temperature=1", "--max_new_tokens=6"]
    sample.main([f"--out_dir={runs / 'span'}", *flags, "--json"])
    for line in capsys.readouterr().out.splitlines():
        said = json.loads(line)
        assert "".join(said["fills"]) == said["text"]


def test_the_members_of_a_mixture_are_chosen_by_the_flags_given(runs):
    trained = load(runs / "span")
    trained.mixture = {"span": 0.5, "ul2": 0.5}
    assert trained.ask("infill", "a[MASK]b", mode="X", max_new_tokens=1)


def test_the_number_of_hidden_tokens_follows_the_mean_span(runs, monkeypatch):
    trained = load(runs / "span")
    trained.knobs = dataclasses.replace(trained.knobs, mean_span=5.0)
    read = read_ids(trained.model, monkeypatch)
    trained.ask("infill", "abcdefgh", "i", max_new_tokens=1)
    mark = TOK.sentinel
    assert read[0] == ids_of("abc", mark, "i", mark + 1, TOK.EOT, mark, "defgh")


def test_a_text_that_cannot_be_restored_whole_is_refused(runs):
    trained = load(runs / "bart")
    trained.ask("restore", "a" * 31, max_new_tokens=1)
    with pytest.raises(UserError, match="this takes 66 tokens but the context has 64"):
        trained.ask("restore", "a" * 32, max_new_tokens=1)


def test_the_likeliest_tokens_are_shown_with_their_probabilities(runs, monkeypatch):
    trained = load(runs / "mlm")
    logits = torch.full((4, TOK.vocab_size), -torch.inf)
    logits[1, [ord(c) for c in "vwxyz"]] = torch.tensor([0.1, 0.4, 0.3, 0.15, 0.05]).log()
    monkeypatch.setattr(trained, "masked_logits", lambda ids: logits[: len(ids)])
    [answer] = trained.ask("fill", "a[MASK]b")
    assert answer.lines[0] == "gap 1: 'w' 0.40   'x' 0.30   'y' 0.15   'v' 0.10   'z' 0.05"


def test_diffusion_goes_on_after_a_prompt_to_the_end_of_the_context(runs):
    trained = load(runs / "diffusion")
    [answer] = trained.ask("continue", "ab")
    assert answer.whole.startswith("ab")
    is_full = "(the context is full; to see the rest, shorten the texts)" in answer.lines
    assert is_full == (len(answer.ids) == trained.block_size - 2)
    [answer] = trained.ask("continue", "ab", max_new_tokens=trained.block_size - 2)
    assert answer.lines == []


def test_bits_are_per_byte_and_not_per_character(runs):
    said = load(runs / "clm").score("日本é")
    assert math.isclose(said["bits_per_byte"], said["nats"] / math.log(2) / 8, rel_tol=1e-6)


def test_a_score_says_whether_it_is_a_bound(runs):
    for name, words in (("clm", ""), ("diffusion", "at most about ")):
        [answer] = load(runs / name).ask("score", "ab")
        assert answer.lines[0].startswith(f"{words}{answer.details['nats']:.2f} nats over 2 tokens")


def test_the_bound_masks_each_number_of_tokens_equally_often(runs, monkeypatch):
    trained = load(runs / "diffusion")
    n_masked = Counter()

    def logits(ids, prefix_length):
        n_masked[(ids == TOK.MASK).sum().item()] += 1
        return torch.zeros(len(ids), TOK.vocab_size)

    monkeypatch.setattr(trained, "logits", logits)
    bound_nats(trained, TOK.encode("abcd"))
    assert n_masked == {1: 16, 2: 16, 3: 16, 4: 16}


def test_in_a_long_text_each_token_counts_equally_in_the_embedding(runs):
    trained = load(runs / "clm")
    ids = TOK.encode("abc" * 30)  # 64 tokens, then 26
    states = torch.cat([trained.states(ids[:64]), trained.states(ids[64:])])
    assert torch.allclose(trained.embed("abc" * 30), states.mean(0), atol=1e-5)


def test_a_text_becomes_a_pair_at_the_sentence_end_nearest_to_its_middle(runs, monkeypatch):
    trained = load(runs / "nsp")
    read = read_ids(trained.model, monkeypatch)
    trained.embed("A. B b b b. C c c c.")
    assert read == [ids_of(TOK.CLS, "A. B b b b.", TOK.SEP, " C c c c.", TOK.SEP)]


# ---- the Python interface ----------------------------------------------------------------------


def test_three_lines_of_python(runs):
    model = load(runs / "fim")
    middle = model.infill("def add(a, b): return ", " + b", max_new_tokens=9)
    assert isinstance(middle, str) and middle == model.infill(
        "def add(a, b): return ", " + b", max_new_tokens=9, temperature=0.0
    )
    assert isinstance(model.infill("def ", "", max_new_tokens=9), str)  # nothing after the gap
    text = model.generate("def ", max_new_tokens=9)
    assert text == model.generate("def ", max_new_tokens=9, temperature=0.7, seed=1)
    assert text != model.generate("def ", max_new_tokens=9, seed=2)
    assert model.score("def ").keys() >= {"nats", "perplexity", "bits_per_byte"}
    assert model.embed("def ").shape == (32,)
    assert load(runs / "mlm").fill("a [MASK]").startswith("a ")


def test_only_ask_takes_num_samples(runs):
    model = load(runs / "fim")
    several = dict(max_new_tokens=3, num_samples=2, temperature=1.0)
    assert len(model.ask("continue", "a", **several)) == 2
    for ask in (model.generate, lambda text, **flags: model.infill(text, "b", **flags)):
        with pytest.raises(TypeError, match="multiple values for keyword argument 'num_samples'"):
            ask("a", **several)


def test_what_is_probably_replaced_is_marked(runs, monkeypatch):
    trained = load(runs / "electra")
    probability = torch.tensor([0.61, 0.59, 0.99, 0.01])
    ids = [*TOK.encode("abcd"), TOK.EOT]
    expected = trained.states(ids, len(ids))[:-1]  # read in both directions

    def head(states):
        assert torch.equal(states, expected)
        return probability.logit()

    monkeypatch.setattr(trained.model.detect_head, "forward", head)
    [answer] = trained.ask("detect", "abcd")
    assert answer.parts == [("a", True), ("b", False), ("c", True), ("d", False)]
    assert answer.details["replaced_probability"] == [0.61, 0.59, 0.99, 0.01]
    suspects = "'c' 0.99 (token 2)   'a' 0.61 (token 0)   'b' 0.59 (token 1)   'd' 0.01 (token 3)"
    assert answer.lines == [f"most suspicious: {suspects}"]


@pytest.mark.parametrize("name, says", [("nsp", "follows the first"), ("sop", "are in order")])
def test_a_pairs_probability_is_read_from_its_first_position(name, says, runs, monkeypatch):
    trained = load(runs / name)
    row = ids_of(TOK.CLS, "ab.", TOK.SEP, "c.", TOK.SEP)
    state = trained.states(row, len(row))[0]

    def head(given):
        assert torch.equal(given, state)
        return torch.tensor(2.0)

    monkeypatch.setattr(trained.model.pair_head, "forward", head)
    [answer] = trained.ask("pair", "ab.", "c.")
    assert answer.details["probability"] == pytest.approx(1 / (1 + math.exp(-2)), abs=1e-4)
    assert says in answer.lines[0] and answer.lines[0].endswith(": 0.881")


def test_likeness_is_the_cosine_of_the_embeddings(runs):
    trained = load(runs / "contrastive")
    for one, other in (("abc", "abc"), ("abc", "Tom has 5 apples.")):
        a, b = trained.embed(one), trained.embed(other)
        [answer] = trained.ask("similarity", one, other)
        cosine = (a @ b / a.norm() / b.norm()).item()
        assert answer.details["similarity"] == pytest.approx(cosine, abs=1e-4)
    assert trained.ask("similarity", "abc", "abc")[0].details["similarity"] == 1


def test_a_mask_is_filled_with_the_likeliest_token(runs, monkeypatch):
    """The five likeliest tokens are listed, with their probabilities."""
    trained = load(runs / "mlm")
    logits = torch.full((4, TOK.vocab_size), -torch.inf)
    logits[1, [ord(c) for c in "vwxyz"]] = torch.tensor([0.1, 0.4, 0.3, 0.15, 0.05]).log()
    monkeypatch.setattr(trained, "masked_logits", lambda ids: logits[: len(ids)])
    [answer] = trained.ask("fill", "a[MASK]b")
    assert answer.whole == "awb" and answer.ids == [ord("w")]
    [guesses] = answer.details["guesses"]
    assert [(guess["token"], guess["p"]) for guess in guesses] == [
        *(("w", 0.4), ("x", 0.3), ("y", 0.15), ("v", 0.1), ("z", 0.05))
    ]


def test_electras_masks_are_filled_by_its_generator(runs):
    trained = load(runs / "electra")
    ids = ids_of("a", TOK.MASK, "b", TOK.EOT)
    row = torch.tensor([ids])
    with torch.inference_mode():
        states = trained.model.generator_states(row, "full")[0]
        expected = F.linear(states, trained.model.embed_tokens.weight).float()
    assert torch.equal(
        trained.masked_logits(ids)[:, trained.allowed()], expected[:, trained.allowed()]
    )


def test_unmasking_follows_the_given_steps_and_order(runs, monkeypatch):
    trained = load(runs / "diffusion")
    read = read_ids(trained.model, monkeypatch)
    firsts = {"confidence": set(), "random": set()}
    for order, seed in itertools.product(firsts, range(8)):
        read.clear()
        trained.ask("unmask", "a", "b", max_new_tokens=6, steps=6, order=order, seed=seed)
        assert len(read) == 6
        firsts[order].add(next(i for i in range(1, 7) if read[1][i] != TOK.MASK))
    assert len(firsts["confidence"]) == 1 < len(firsts["random"])
    read.clear()
    trained.ask("unmask", "a", "b", max_new_tokens=6, steps=3)
    assert len(read) == 3


@pytest.mark.parametrize("name", OBJECTIVES)
def test_nothing_is_predicted_that_may_not_be_drawn(name, runs):
    trained = load(runs / name)
    ids = TOK.encode("Tom has 5 apples.")
    for logits in (trained.logits(ids), trained.masked_logits(ids)):
        assert (logits.isfinite() == trained.allowed()).all()


def test_importing_the_interface_leaves_the_environment_alone(monkeypatch):
    """All files of the project are read anew."""
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    for path in Path(sample.__file__).parent.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    before = dict(os.environ)
    importlib.import_module("sample")
    assert os.environ == before


def test_loading_and_asking_change_nothing_global(runs):
    def globals_of_torch():
        return (
            *(torch.get_num_threads(), torch.backends.cuda.cudnn_sdp_enabled()),
            *(torch.get_default_dtype(), torch.get_float32_matmul_precision()),
            torch.is_grad_enabled(),
            *(torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()),
        )

    before = globals_of_torch()
    load(runs / "mtp").generate("a", max_new_tokens=5)
    assert globals_of_torch() == before
    sample.main([f"--out_dir={runs / 'mtp'}", "--max_new_tokens=3", "--json"])
    assert globals_of_torch() == before


@pytest.mark.parametrize(
    "name, task, flags, words",
    [
        (
            "clm",
            "infill",
            dict(prompt="a", suffix="b"),
            "clm model has no --task=infill; it takes a text without a gap, in --prompt (--task=c",
        ),
        (
            "fim",
            "infill",
            dict(prompt="a[MASK]b[MASK]c"),
            "Objectives that take texts given like yours: span, ul2",
        ),
        (
            "mtp",
            None,
            dict(prompt="a[MASK]b"),
            "takes a text without a gap, in --prompt (--task=continue|score|embed)",
        ),
        (
            "clm",
            "continue",
            dict(prompt="a", suffix="b"),
            "model takes a text without a gap",
        ),
        (
            "clm",
            "pair",
            dict(prompt="a", suffix="b"),
            "model has no --task=pair; it takes a text without a gap",
        ),
        (
            "span",
            "infill",
            dict(prompt="abc"),
            "takes a text with gaps: [MASK] in --prompt",
        ),
        (
            "diffusion",
            "unmask",
            dict(prompt="a" * 60, suffix="b"),
            "lower --max_new_tokens, the gap's length",
        ),
        ("diffusion", "continue", dict(prompt="a" * 64), "shorten the texts"),
        ("diffusion", "continue", dict(prompt="a", suffix="b"), "takes a text with gaps"),
        ("diffusion", "infill", dict(prompt="abc"), "(--task=continue|score|embed)"),
        ("span", "infill", dict(prompt="a" * 60, suffix="b"), "the context has 64"),
        ("span", "infill", dict(prompt="[MASK]" * 256), "but this model fills at most 255"),
        ("diffusion", "unmask", dict(prompt="a", suffix="b", max_new_tokens=10**7), "this takes"),
        (
            "contrastive",
            None,
            dict(prompt="a[MASK]", suffix="b"),
            "takes two texts: --prompt and --suffix (--task=similarity); or a text",
        ),
        (
            "mlm",
            "fill",
            dict(prompt="abc"),
            "takes a text with gaps: [MASK] in --prompt",
        ),
        (
            "mlm",
            None,
            dict(prompt="abc"),
            "(--task=fill); or a text without a gap, in --prompt (--task=embed)",
        ),
        ("nsp", "pair", dict(prompt="abc"), "takes two texts: --prompt and --suffix"),
        ("nsp", "pair", dict(prompt="a" * 30, suffix="b" * 32), "shorten the texts"),
        ("electra", "detect", {}, "no text to judge"),
        ("clm", "score", {}, "no text to score"),
        ("clm", "embed", {}, "no text to embed"),
        ("bart", None, {}, "no text to restore"),
        (
            "mlm",
            "score",
            dict(prompt="a"),
            "this mlm model has no --task=score; it takes a text with",
        ),
        ("mtp", "continue", dict(speculative=True, num_samples=2), "one text at a time"),
        ("clm", "continue", dict(steps=4), "--steps does not apply to --task=continue of this clm"),
        ("fim", "infill", dict(prompt="a", suffix="b", top_k=5), "no effect at temperature 0"),
        ("clm", "kontinue", dict(prompt="a"), "--task='kontinue': must be continue or infill"),
        ("clm", "continue", dict(temperature=-1.0), "--temperature=-1.0: must be at least 0"),
    ],
)
def test_requests_that_mean_nothing_are_refused(name, task, flags, words, runs):
    with pytest.raises(UserError) as refused:
        load(runs / name).ask(task, **flags)
    assert words in str(refused.value)


def test_an_unknown_flag_is_an_error_of_python(runs):
    with pytest.raises(TypeError, match="takes no temprature; did you mean temperature"):
        load(runs / "clm").generate("a", temprature=1)


@pytest.mark.parametrize("name, value", [("out_dir", "out/fim"), ("device", "cpu"), ("json", True)])
def test_flags_of_the_command_line_alone_are_no_keywords(name, value, runs):
    with pytest.raises(TypeError, match=f"takes no {name}"):
        load(runs / "clm").generate("a", **{name: value})


def test_speed_is_that_of_the_tokens(runs, capsys, monkeypatch):
    answer = Answer([("abcdef", True)], [97] * 6, dict(passes=2, drafted=5, kept=4, seconds=2.0))
    sample.show([answer])
    assert "[3.0 tokens/s, kept 4 of 5 drafts]" in capsys.readouterr().err


# ---- the showcase, and an objective of a fork --------------------------------------------------


STORIES = ["At dawn Tom has 5 apples.\nNow he has 7.\n", "Ann is sad.\nShe has 3 pens.\n"] * 20


@pytest.fixture
def tokens() -> Tokens:
    ids = np.array(ids_of(*(part for story in STORIES for part in (story, TOK.EOT))), np.uint16)
    return Tokens(TOK, ids, ids, digest="", about="", floor=None)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_showcase_asks_about_held_out_text_and_its_command_asks_about_another(
    name, runs, tokens, capsys, monkeypatch
):
    if not OBJECTIVES[name].tasks:
        pytest.skip("there is nothing to show")
    monkeypatch.chdir(runs)
    lines = []
    showcase(load(runs / name), runs / name, tokens, lines.append)
    flags, original = question(load(runs / name), tokens)
    assert not original or f"The original: {original}" in lines
    assert flags["prompt"].split("[MASK]")[0][:9] in "".join(STORIES)
    shown = "\n".join(lines[1:-1]).replace("⟪", "").replace("⟫", "")
    assert shown.count(flags["prompt"][:9]) == 1  # not the answer alone, and not twice
    sample.show(load(runs / name).ask(None, **flags))
    for line in filter(str.strip, capsys.readouterr().out.splitlines()):
        assert line in "\n".join(lines)

    python, script, *words = shlex.split(lines[-1].removeprefix("Your own text: "))
    assert (python, script) == ("python", "sample.py")
    assert {word.split("=")[0] for word in words} == {"--out_dir", *(f"--{flag}" for flag in flags)}
    sample.main(words)
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    "held_out, expected",
    [
        (
            ["No.\n", "Tom has hats. Ann has 3.\n", "x " * 40],  # the longest that fits
            ("Tom has hats. Ann", " has", " 3.\n"),  # the later word that is there twice
        ),
        (["a" + "é" * 40], ("a" + "é" * 11, "ééé", "")),  # no half a character at the end
        (["Tom [MASK] has.\n"], ("", "Tom", " ")),  # no gap but the hole
    ],
)
def test_the_showcase_is_about_held_out_text_and_hides_a_later_word(held_out, expected, runs):
    train, val = (
        np.array(ids_of(*(part for text in texts for part in (text, TOK.EOT))), np.uint16)
        for texts in (["Seen in training. Seen.\n"] * 3, held_out)
    )
    tokens = Tokens(TOK, train, val, "", "", None)
    assert text_with_a_hole(load(runs / "mlm"), tokens) == expected


def test_of_a_long_word_the_showcase_hides_and_names_the_beginning(runs):
    ids = np.array(ids_of("Ann walking, Tom walking.\n", TOK.EOT), np.uint16)
    flags, answer = question(load(runs / "mlm"), Tokens(TOK, ids, ids, "", "", None))
    assert flags["prompt"] == f"Ann walking, Tom{'[MASK]' * 6}ng.\n" and answer == repr(" walki")


def test_the_showcase_hides_a_whole_word(runs):
    text = "Un été, un été.\n"
    ids = np.array([*TOK.encode(text), TOK.EOT] * 2, np.uint16)
    flags, answer = question(load(runs / "mlm"), Tokens(TOK, ids, ids, "", "", None))
    hidden = " été"
    assert answer == repr(hidden)
    assert flags["prompt"].replace("[MASK]" * len(hidden.encode()), hidden) == text


def test_one_line_shows_what_the_model_wrote(runs):
    """Of a long text, the part around it."""
    trained = load(runs / "mlm")
    trained.block_size = 400
    ids = np.array([*TOK.encode("At dawn, " + "Tom walks to the mill. " * 7), TOK.EOT], np.uint16)
    line = one_line_sample(trained, Tokens(TOK, ids, ids, "", "", None))
    assert "⟪" in line and len(line) <= 90 and "At dawn" not in line


def test_an_objective_of_a_fork_may_have_no_task(tmp_path, tokens, monkeypatch):
    row = OBJECTIVES["clm"]._replace(tasks=(), likelihood="")
    monkeypatch.setitem(OBJECTIVES, "mine", row)
    save_random_run(tmp_path, "mine")
    assert load(tmp_path).tasks == ["embed"]
    lines = []
    showcase(load(tmp_path), tmp_path, tokens, lines.append)
    assert lines[-1].startswith("Nothing to show from the validation text")


# ---- checkpoints -------------------------------------------------------------------------------


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path):
    save_random_run(tmp_path, "clm")
    state = load_checkpoint(tmp_path / "ckpt.pt")
    old, new = "layers.0.mlp.up_proj.weight", "layers.0.mlp.gate.weight"
    state["model"][new] = state["model"].pop(old)
    save_checkpoint(tmp_path / "ckpt.pt", state)
    with pytest.raises(UserError) as refused:
        load(tmp_path)
    message = str(refused.value)
    assert old in message and new in message and "\n" not in message
