"""test_generate.py: what decoding promises: a cache changes no token, and neither do drafts.

All on models of two blocks with random float64 weights, which may write only a few letters. Not
tested: speed, a GPU, and what sample.py does with a decoder (test_sample.py).

    pytest tests/test_generate.py
    pytest tests/test_generate.py -k "drafting or drafts"
"""

import functools
import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map

import generate
import model as model_file
from generate import Decoder, Sampler, captured, look_up, unmask, write_blocks
from model import ModelConfig, Transformer, dense_mask

CONTEXT = 32
MASK = 127
A, B, C, D = b"abcd"
DRAFTERS = {
    "heads": lambda decoder: [decoder.heads],
    "look-up": lambda decoder: [look_up],
    "both": lambda decoder: [decoder.heads, look_up],
}


# ---- models, and a decoder without a cache -----------------------------------------------------


@functools.cache
def random_model(mtp_heads: str = "chain") -> Transformer:
    """With three heads, and random weights also where they are zero at first."""
    shape = dict(vocab_size=128, n_layer=2, n_head=2, n_kv_head=1, head_dim=16, n_embd=32)
    model = Transformer(ModelConfig(**shape, n_future=4, mtp_heads=mtp_heads)).double()
    generator = torch.Generator().manual_seed(4)
    for name, p in model.named_parameters():
        if p.ndim > 1 and "norm" not in name:
            torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5, generator=generator)
    return model.eval()


def only(letters: str = "abcdef") -> torch.Tensor:
    """(V,) bool: the ids that may be drawn."""
    return torch.isin(torch.arange(128), torch.tensor(list(letters.encode())))


def decoder_for(model, temperature=0.0, batch=1, letters="abcdef") -> Decoder:
    """It drafts even where that does not pay: with untrained models it seldom does."""
    decoder = Decoder(model, batch, CONTEXT, Sampler(temperature), only(letters))
    decoder.cost = {}
    return decoder


def prompts(n: int, shortest: int, longest: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(shortest, longest + 1, n)
    return [rng.integers(97, 103, length).tolist() for length in lengths]


def decode_slowly(decoder: Decoder, prompt: list[int], n: int, prefix=0, row=0) -> list[int]:
    """What the decoder must write. Each token is computed from the text's beginning, without a
    cache. When the context is full, its second half becomes the text."""
    model = decoder.model
    u = decoder.numbers_for(n, seed=1)[row]
    text = prompt[-CONTEXT:]
    new = []
    for i in range(n):
        if len(text) > CONTEXT:
            text = text[-(CONTEXT // 2) :]
            prefix = prefix and len(text)
        ids = torch.tensor([text])
        is_prefix = torch.arange(len(text))[None] < prefix
        mask = model.attention_mask("rule", torch.ones_like(ids), is_prefix)
        with torch.no_grad():
            logits = model.logits(model.norm(model.trunk(ids, mask)))[0, -1]
        new.append(int(decoder.sampler(logits.float() + decoder.penalty, u[i])))
        text = [*text, new[-1]]
    return new


# ---- the sampler -------------------------------------------------------------------------------


def test_a_uniform_number_chooses_where_the_sum_of_probabilities_passes_it():
    logits = torch.tensor([0.5, 0.0, 0.3, 0.2, 0.0]).log()
    sampler = Sampler(temperature=1.0)
    for u, token in [(0.0, 0), (0.49, 0), (0.51, 2), (0.79, 2), (0.81, 3), (1.0, 3)]:
        assert sampler(logits, torch.tensor(u)) == token


@pytest.mark.parametrize(
    "sampler, expected",
    [
        (Sampler(1.0), [0.5, 0.2, 0.2, 0.1]),
        (Sampler(0.5), [25 / 34, 4 / 34, 4 / 34, 1 / 34]),
        (Sampler(1.0, top_k=2), [5 / 7, 2 / 7, 0, 0]),  # of two equals, the first
        (Sampler(1.0, top_k=9), [0.5, 0.2, 0.2, 0.1]),
        (Sampler(1.0, top_p=0.6), [5 / 7, 2 / 7, 0, 0]),
        (Sampler(1.0, top_p=1e-9), [1, 0, 0, 0]),
        (Sampler(0.5, top_k=2), [25 / 29, 4 / 29, 0, 0]),  # temperature comes first
        (Sampler(0.5, top_p=0.7), [1, 0, 0, 0]),
        (Sampler(1.0, top_k=2, top_p=0.7), [1, 0, 0, 0]),  # 5/7 of the two: top_k comes first
        (Sampler(1.0, top_k=1), None),
        (Sampler(1.0, top_p=0.0), None),
        (Sampler(), None),
    ],
)
def test_the_sampler_draws_the_stated_distribution(sampler, expected):
    """By drawing with ten thousand evenly spaced numbers; None: the likeliest token, always."""
    logits = torch.tensor([0.5, 0.2, 0.2, 0.1]).log()
    u = (torch.arange(10_000) + 0.5) / 10_000
    drawn = sampler(logits.expand(10_000, 4), u)
    shares = torch.bincount(drawn, minlength=4) / 10_000
    assert torch.allclose(shares, torch.tensor(expected or [1, 0, 0, 0]).float(), atol=2e-4)


def test_the_numbers_that_decide_are_uniform_and_independent():
    u = decoder_for(random_model(), batch=50).numbers_for(200, seed=1) - 0.5
    assert abs(u.mean()) < 0.01 and u.var().item() == pytest.approx(1 / 12, rel=0.05)
    assert abs((u[:, 1:] * u[:, :-1]).mean()) < 0.003 > abs((u[1:] * u[:-1]).mean())


# ---- plain decoding ----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_cache_changes_no_token(temperature):
    """Prompts are shorter or longer than the context; every text outgrows it."""
    texts = set()
    for prompt in prompts(6, 1, 40):
        decoder = decoder_for(random_model(), temperature)
        [text], stats = decoder.generate(prompt, 40)
        assert text == decode_slowly(decoder, prompt, 40)
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


def test_a_longer_text_begins_with_the_shorter():
    decoder = decoder_for(random_model(), temperature=1.0, batch=3)
    long, _ = decoder.generate([A], 9, seed=7)
    for n in (0, 1, 5):
        assert decoder.generate([A], n, seed=7)[0] == [row[:n] for row in long]


def test_a_sample_ends_before_its_stop_token():
    decoder = decoder_for(random_model(), temperature=1.0, batch=50)
    whole, _ = decoder.generate([C, A], 30)
    ended, stats = decoder.generate([C, A], 30, stops={C})
    for long, short in zip(whole, ended):
        assert short == (long[: long.index(C)] if C in long else long)
    assert len(set(map(len, ended))) > 5
    assert stats.tokens == sum(map(len, ended))


def test_what_may_not_come_first_does_not_and_nothing_else_changes():
    stops = {C, D}
    decoder = decoder_for(random_model(), temperature=1.0, batch=50)
    usual, _ = decoder.generate([A], 30, stops=stops)
    forced, _ = decoder.generate([A], 30, stops=stops, first=only("abef"))
    assert [] in usual and [] not in forced
    unbiased = decoder_for(random_model(), temperature=1.0, batch=50, letters="abef")
    firsts, _ = unbiased.generate([A], 1)
    for was, now, first in zip(usual, forced, firsts):
        assert now[:1] == first
        assert now == was or was[:1] != first


@pytest.mark.parametrize("n", [10, 40])
def test_a_prefix_is_read_in_both_directions(n):
    """When the context is full, all that is read again is the new prefix."""
    differ = 0
    for prompt in [*prompts(3, 4, 20), *prompts(2, 26, CONTEXT)]:
        decoder = decoder_for(random_model())
        prefix = len(prompt) - len(prompt) % 3
        [text], _ = decoder.generate(prompt, n, prefix_length=prefix)
        assert text == decode_slowly(decoder, prompt, n, prefix)
        differ += text != decoder.generate(prompt, n)[0][0]
    assert differ > 1


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


# ---- speculative decoding ----------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "mtp_heads, drafters",
    [("linear", "look-up"), *itertools.product(["linear", "parallel", "chain"], ["heads", "both"])],
)
def test_drafting_changes_no_token(mtp_heads, drafters, temperature):
    """Prompts are short, half a context, or nearly a whole one, and some begin with a prefix. Some
    drafts are kept, not all."""
    kept = drafted = 0
    for prompt in [*prompts(2, 1, 6), *prompts(2, 12, 20), *prompts(2, 30, 32)]:
        decoder = decoder_for(random_model(mtp_heads), temperature, letters="abc")
        for prefix in (0, len(prompt) // 2):
            [plain], _ = decoder.generate(prompt, 20, prefix_length=prefix)
            way = DRAFTERS[drafters](decoder)
            [fast], stats = decoder.generate(prompt, 20, prefix_length=prefix, drafters=way)
            assert fast == plain
            assert stats.passes + stats.kept == 20
            kept += stats.kept
            drafted += stats.drafted
    assert 0.05 < kept / drafted < 0.95


@pytest.mark.parametrize("sampler", [Sampler(0.8, top_k=2), Sampler(1.3, top_p=0.7)])
def test_drafting_changes_no_token_with_top_k_and_top_p(sampler):
    kept = 0
    for prompt in prompts(6, 1, 30):
        decoder = Decoder(random_model(), 1, CONTEXT, sampler, only("abc"))
        [plain], _ = decoder.generate(prompt, 20)
        decoder.cost = {}
        [fast], stats = decoder.generate(prompt, 20, drafters=DRAFTERS["both"](decoder))
        assert fast == plain
        kept += stats.kept
    assert kept > 0


@pytest.mark.parametrize("mtp_heads", ["linear", "chain"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafting_stops_where_plain_decoding_does(temperature, mtp_heads):
    """The stop token is frequent, so it also occurs among the drafts."""
    inside = 0
    for prompt in prompts(40, 1, 8):
        decoder = decoder_for(random_model(mtp_heads), temperature, letters="abc")
        [plain], _ = decoder.generate(prompt, 20, stops={B})
        drafters = DRAFTERS["both"](decoder)
        [fast], stats = decoder.generate(prompt, 20, stops={B}, drafters=drafters)
        assert fast == plain
        inside += len(fast) < stats.passes + stats.kept - 1
    assert inside > 0


@torch.no_grad()
def draft_slowly(decoder: Decoder, text: list[int], u: torch.Tensor) -> list[int]:
    """The heads' guesses at what follows a text whose last token the trunk has not read."""
    model = decoder.model
    known = list(text)
    for k in range(3):
        ahead = [(known[t:] + [0] * 3)[:3] for t in range(1, len(text))]
        states = model(torch.tensor([text[:-1]]), ahead=torch.tensor([ahead]))
        logits = model.logits(states[k + 1])[0, -1].float() + decoder.penalty
        known.append(int(decoder.sampler(logits, u[k])))
    return known[len(text) :]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mtp_heads", ["linear", "parallel", "chain"])
def test_drafts_are_what_the_heads_say_at_every_pass(mtp_heads, temperature, monkeypatch):
    """So cache entries that a head made from wrong guesses are made again, and a head that was not
    asked for a while catches up."""
    lengths = Counter()
    monkeypatch.setattr(generate, "BLOCK_COST", 0.3)

    def checked(decoder, context, u):
        guesses = decoder.heads(context, u)
        assert guesses == draft_slowly(decoder, context, u)[: len(guesses)]
        lengths[len(guesses)] += 1
        return guesses

    for prompt in prompts(5, 1, 30):
        decoder = decoder_for(random_model(mtp_heads), temperature, letters="abc")
        decoder.generate(prompt, 20, drafters=[functools.partial(checked, decoder)])
    assert lengths[3] > 2
    if mtp_heads != "linear":
        assert lengths[1] + lengths[2] > 2


@torch.inference_mode()
@pytest.mark.parametrize("mtp_heads, n_guesses", [("linear", 3), ("parallel", 2), ("chain", 2)])
def test_no_more_blocks_are_asked_once_the_guesses_are_unlikely(mtp_heads, n_guesses, monkeypatch):
    """Of nine letters that are drawn almost evenly, two guesses in a row are seldom right."""
    decoder = decoder_for(random_model(mtp_heads), temperature=1e4, letters="abcdefghi")
    decoder.generate([A], 5)
    monkeypatch.setattr(generate, "BLOCK_COST", 0.1)  # 1/9, but 1/81 for two
    assert len(decoder.heads([A, B], torch.full((9,), 0.5))) == n_guesses


@pytest.mark.parametrize(
    "text, found",
    [
        ("abcxabc", "xabc"),  # what followed the longest tail that occurs earlier
        ("xbc1abc2.bc", "2.bc"),  # of several places, the latest
        ("abab", "abab"),  # a short period is continued
        ("abcd", ""),
    ],
)
def test_look_up_drafts_what_followed_the_last_tokens(text, found):
    assert look_up(list(text.encode())) == list(found.encode())


def test_drafting_pauses_where_it_does_not_pay_and_goes_on_where_it_does():
    """The drafts are wrong up to place 300 of the text, right after it."""
    decoder = Decoder(random_model(), 1, 601, allowed=only())
    text = [A, *decoder.generate([A], 600)[0][0]]
    drafted_at = []

    def drafter(context, u):
        drafted_at.append(len(context))
        return [0] if len(context) < 300 else text[len(context) :][:2]

    decoder.cost[drafter] = 0.1
    assert decoder.generate([A], 600, drafters=[drafter])[0] == [text[1:]]
    wrong = [place for place in drafted_at if place < 300]
    assert len(wrong) < 20 + 300 / generate.TRIAL_EVERY
    assert drafted_at[-50:] == list(range(drafted_at[-50], 600, 3))  # each pass writes three tokens


def test_a_drafter_is_for_one_text():
    decoder = decoder_for(random_model(), batch=2)
    with pytest.raises(AssertionError, match="one sample, got 2"):
        decoder.generate([A], 4, drafters=[look_up])


# ---- CUDA graphs -------------------------------------------------------------------------------


@pytest.mark.parametrize("mtp_heads", ["linear", "chain"])
def test_captured_graphs_change_no_token(mtp_heads, monkeypatch):
    """As on CUDA, a graph always reads and writes the same memory. Only shapes that are small and
    often seen are captured, each once."""
    shapes = []

    def capture(function, static_inputs):
        shapes.append((function, *(tuple(x.shape) for x in static_inputs)))
        static_outputs = tree_map(torch.clone, function(*static_inputs))

        def replay(*inputs):
            for static, x in zip(static_inputs, inputs):
                static.copy_(x)  # fails for any other shape
            return tree_map(torch.Tensor.copy_, static_outputs, function(*static_inputs))

        return replay

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", capture)
    for prompt in prompts(3, 1, 30):
        decoder = decoder_for(random_model(mtp_heads))
        [plain], _ = decoder.generate(prompt, 60)
        decoder.run_pass = captured(decoder.run_pass)
        decoder.run_heads = [captured(run) for run in decoder.run_heads]
        for _ in range(3):
            drafters = DRAFTERS["both"](decoder)
            assert decoder.generate(prompt, 60, drafters=drafters)[0] == [plain]
    assert len(set(shapes)) == len(shapes) > 3
    assert max(ids[-1] for _, ids, *_ in shapes) <= generate.LONGEST_GRAPH


# ---- masked diffusion --------------------------------------------------------------------------


def unmask_step_by_step(model, ids, sampler, steps, order="confidence") -> list[torch.Tensor]:
    """The ids before the first step and after each."""
    seen = []
    mask = model.full_mask(ids)

    def read(ids):
        seen.append(ids)
        return model.logits(model(ids, mask)[0]).float().masked_fill(~only(), -math.inf)

    dice = generate.generators(len(ids), 1)
    result = unmask(read, ids, MASK, sampler, dice, steps, order)
    return [*seen, result]


@pytest.mark.parametrize("order", ["confidence", "random"])
@pytest.mark.parametrize("steps, masked", [(4, [13, 10, 7, 4, 0]), (5, [13, 11, 8, 6, 3, 0])])
def test_unmasking_fills_an_even_share_a_step_and_leaves_the_rest_alone(order, steps, masked):
    ids = torch.tensor([[A, B] + [MASK] * 10 + [C] + [MASK] * 3] * 2)
    model = random_model("parallel")  # whose heads read no tokens ahead
    stages = unmask_step_by_step(model, ids, Sampler(1.0), steps, order)
    assert [int((stage[0] == MASK).sum()) for stage in stages] == masked
    for before, after in itertools.pairwise(stages):
        assert torch.equal(before[before != MASK], after[before != MASK])
    assert only()[stages[-1]].all()


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(5.0, top_k=2)])
def test_the_token_that_the_model_is_surest_of_is_unmasked_first(sampler):
    """By the model's own probability, whatever the temperature."""
    ids = torch.tensor([[A, MASK, B, MASK, MASK, C, MASK, MASK]])
    model = random_model("parallel")
    with torch.no_grad():
        state, *_ = model(ids, model.full_mask(ids))
    logits = model.logits(state)[0].masked_fill(~only(), -math.inf).float()
    guess = sampler(logits, torch.rand(8, generator=torch.Generator().manual_seed(1)))
    p = logits.softmax(-1).gather(-1, guess[:, None])[:, 0]
    expected = ids.clone()
    surest = p.where(ids[0] == MASK, 0).argmax()
    expected[0, surest] = guess[surest]
    assert torch.equal(unmask_step_by_step(model, ids, sampler, steps=5)[1], expected)


def write_blocks_slowly(decoder, prompt, n, size, steps, order, row) -> list[int]:
    """What write_blocks must write: the whole context is read again in each step, without a cache.
    When it is full, its first half is dropped."""
    model = decoder.model
    [dice] = generate.generators(decoder.batch, 1)[row : row + 1]
    text = [*prompt]
    start = 0
    while len(text) < len(prompt) + n:
        at = len(text) // size * size
        if at + size - start > CONTEXT:
            start = at - CONTEXT // 2 // size * size
        before = text[start:at]

        def read(block, before=before):
            ids = torch.tensor([[*before, *block[0].tolist()]])
            in_block = torch.arange(len(ids[0]))[None] >= len(before)
            mask = dense_mask(torch.ones_like(ids), in_block)
            logits = model.logits(model.norm(model.trunk(ids, mask)))[:, len(before) :]
            return logits.float() + decoder.penalty

        block = torch.tensor([text[at:] + [MASK] * (at + size - len(text))])
        block = unmask(read, block, MASK, decoder.sampler, [dice], steps, order)
        text = text[:at] + block[0].tolist()
    return text[len(prompt) :][:n]


@torch.inference_mode()
@pytest.mark.parametrize("temperature, order", [(0.0, "confidence"), (1.0, "random")])
@pytest.mark.parametrize("size, steps, length", [(1, 1, 0), (4, 4, 9), (4, 2, 40), (24, 32, 7)])
def test_blocks_are_written_as_without_a_cache(size, steps, length, temperature, order):
    """Also beyond the context's end, and for several samples."""
    prompt = prompts(1, length, length)[0]
    decoder = decoder_for(random_model("linear"), temperature, batch=2)
    how = dict(steps=steps, order=order)
    rows = write_blocks(decoder, prompt, 50, size, MASK, (), seed=1, **how)
    for row, new in enumerate(rows):
        assert new == write_blocks_slowly(decoder, prompt, 50, size, steps, order, row)
    assert temperature == 0 or rows[0] != rows[1]
    stopped = write_blocks(decoder, prompt, 50, size, MASK, {C}, seed=1, **how)
    assert stopped == [generate.cut(row, {C}) for row in rows]
