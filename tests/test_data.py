"""test_data.py: ids become examples, rows and batches; tokenizers; stories."""

import itertools
import re
from collections import Counter
from math import exp, isclose
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data
import stories
from data import IGNORE, TRAIN, VALIDATION, Source, Text, draw_row, make_row
from stories import EVENTS, FACTS, WORDS, story
from tokenizer import EOT_TEXT, N_SENTINELS, SINGLE_BYTES, SPECIALS, Tokenizer, get_tokenizer
from util import UserError


def generator(seed=0) -> np.random.Generator:
    return np.random.default_rng(seed)


# ---- tokenizers --------------------------------------------------------------------------------

TOKENIZERS = {
    "bytes": get_tokenizer("bytes"),
    "bpe": get_tokenizer("bpe:300", [Path(data.__file__).read_text(encoding="utf-8")]),
}
each_tokenizer = pytest.mark.parametrize("tok", TOKENIZERS.values(), ids=TOKENIZERS)


@each_tokenizer
def test_one_table_of_special_tokens_follows_the_text(tok):
    assert list(tok.specials) == [EOT_TEXT, *SPECIALS]
    assert list(tok.specials.values()) == list(range(tok.n_ordinary, tok.n_ids))
    assert tok.vocab_size % 64 == 0 and 0 <= tok.vocab_size - tok.n_ids < 64
    named = [tok.EOT, tok.PAD, tok.MASK, tok.CLS, tok.SEP, tok.PRE, tok.SUF, tok.MID]
    assert named + [tok.R, tok.S, tok.X, tok.sentinel] == list(tok.specials.values())[:12]
    assert tok.names[tok.sentinel + N_SENTINELS - 1] == "<extra_id_255>"
    assert tok.n_bytes.tolist() == [len(piece) for piece in tok.bytes]
    assert not tok.n_bytes[tok.n_ordinary :].any()


@each_tokenizer
def test_any_bytes_survive_and_special_tokens_in_text_stay_text(tok):
    draw = generator()
    letters = [*range(32, 127), 10, 13, 0x85, 0xA0, 0x3B1, 0x2028, 0x4E2D, 0x1F600]
    for n in draw.integers(0, 200, size=100):
        noise = draw.integers(0, 256, n, dtype=np.uint8).tobytes()
        characters = "".join(map(chr, draw.choice(letters, n))).encode()
        blanks = bytes(draw.choice(list(b" \t\n\r\0"), n))
        for raw in (noise, characters, blanks, noise + characters, "".join(SPECIALS[:12]).encode()):
            ids = tok.encode(raw)
            assert tok.decode_bytes(ids) == raw and tok.n_bytes[ids].sum() == len(raw)
            assert all(id < tok.n_ordinary for id in ids)
    text = "word" + " " * 1_200_000 + "word"  # more than tiktoken's stack can hold at a time
    assert tok.decode(tok.encode(text)) == text


@each_tokenizer
def test_any_ids_decode(tok):
    assert tok.decode([]) == "" and tok.decode([IGNORE, tok.vocab_size, 10**9]) == ""
    assert tok.decode(np.array([[104], [105]])) == "hi"
    assert tok.decode([255, tok.EOT, 104, tok.MASK]) == f"\ufffd{EOT_TEXT}h[MASK]"
    assert tok.decode_bytes(range(tok.n_ids, tok.vocab_size)) == b""


@each_tokenizer
def test_a_tokenizer_survives_its_json(tok):
    again = Tokenizer.from_json(tok.to_json())
    assert again.to_json() == tok.to_json() and again.bytes == tok.bytes
    assert again.encode("the cat") == tok.encode("the cat")
    with pytest.raises(UserError, match="not a tokenizer's JSON"):
        Tokenizer.from_json('{"name": "bpe:300"}')


def test_an_encoding_keeps_its_own_eot():
    ranks = {byte: id for id, byte in enumerate(SINGLE_BYTES)}
    tok = Tokenizer("some", ranks, r"(?s).", {EOT_TEXT: 300})
    assert (tok.n_ordinary, tok.EOT, tok.PAD) == (256, 300, 301)
    assert tok.decode([300]) == EOT_TEXT and tok.decode([299]) == ""


def test_bpe_golden():
    pieces = get_tokenizer("bpe:260", ["low low low lower lowest newest"]).bytes
    assert pieces[256:260] == [b"lo", b"low", b" low", b"es"]
    assert get_tokenizer("bpe:400", ["abc abc"]).n_ordinary == 259  # ab, abc, and " abc"


WORDS_WITH_MARKS = ["বাংলা ভাষা", "हिन्दी में लिखो", "తెలుగు భాష", "ภาษาไทยที่นี่", "cafe\u0301 noir"]


@pytest.mark.parametrize("text", WORDS_WITH_MARKS)
def test_a_bpe_keeps_marks_with_their_letters(text):
    tok = get_tokenizer("bpe:400", [f" {text}" * 9])
    assert len(tok.encode(f" {text}")) == len(text.split())


def slow_bpe(words: list[str], n_ids: int) -> list[bytes]:
    """Byte-pair encoding that counts all pairs again for each merge."""
    words = [tuple(word.encode()) for word in words]
    pieces = list(SINGLE_BYTES)
    while len(pieces) < n_ids:
        counts = Counter(pair for word in words for pair in itertools.pairwise(word))
        pair = min(counts, key=lambda pair: (-counts[pair], pair))
        words = [merge(word, pair, len(pieces)) for word in words]
        pieces.append(pieces[pair[0]] + pieces[pair[1]])
    return pieces


def merge(word: tuple, pair: tuple, new: int) -> tuple:
    if word[:2] == pair:
        return (new, *merge(word[2:], pair, new))
    return (*word[:1], *merge(word[1:], pair, new)) if word else ()


@pytest.mark.parametrize("seed", range(5))
def test_bpe_agrees_with_counting_all_pairs_anew(seed):
    draw = generator(seed)
    words = ["".join(draw.choice(list("abc"), draw.integers(1, 9))) for _ in range(60)]
    words.append("".join(draw.choice(list("acgt"), 600)))
    tok = get_tokenizer("bpe:300", [" ".join(words)])
    assert tok.bytes[:300] == slow_bpe([words[0], *(f" {word}" for word in words[1:])], 300)


# ---- ids -> examples ---------------------------------------------------------------------------

SMALL = Text(np.array([1, 2, 3, 0, 4, 0, 5, 6, 7, 8, 9, 10, 0]), eot=0)  # 3, 1 and 6 tokens


def test_a_window_wraps_around_and_begins_with_a_document_that_fits():
    windows = {tuple(SMALL.window(generator(seed), 5, ahead=1).tolist()) for seed in range(200)}
    ring = np.tile(SMALL.tokens, 2)
    starts = [0, 3, 4, 5, *range(6, 13)]  # not inside the first: it has 3 tokens
    assert windows == {tuple(ring[start : start + 6].tolist()) for start in starts}
    with pytest.raises(UserError, match="--block_size=13"):
        data.check_text(SMALL, len(SMALL))


def test_a_chunk_is_from_one_document_drawn_in_proportion_to_its_size():
    chunks = Counter(tuple(SMALL.chunk(generator(seed), 5).tolist()) for seed in range(3000))
    assert set(chunks) == {(1, 2, 3), (5, 6, 7, 8, 9), (6, 7, 8, 9, 10)}
    assert chunks[1, 2, 3] / 3000 == pytest.approx(1 / 3, abs=0.03)
    with pytest.raises(UserError, match="longer documents"):
        Text(np.array([1, 0, 2, 0]), eot=0).chunk(generator(), 5)


def test_two_chunks_are_from_two_documents_of_like_length_or_both_halves_of_one():
    sizes = [4, 40, 5, 41]
    tokens = np.concatenate([np.append(np.full(size, 1 + n), 0) for n, size in enumerate(sizes)])
    text = Text(tokens, eot=0)
    pairs = Counter()
    for seed in range(500):
        a, b = text.two_chunks(generator(seed), 30)
        assert len(set(a)) == len(set(b)) == 1 and len(a) == min(sizes[a[0] - 1], 30)
        pairs[a[0], b[0]] += 1
    assert all(one != two for one, two in pairs)
    alike = pairs[2, 4] + pairs[4, 2] + pairs[1, 3] + pairs[3, 1]
    assert alike > 450 and 0.8 < pairs[2, 4] / pairs[4, 2] < 1.25

    single = Text(np.arange(1, 9), eot=0)
    for seed in range(50):
        a, b = sorted(chunk.tolist() for chunk in single.two_chunks(generator(seed), 3))
        assert a[-1] <= 4 < b[0] and len(a) == len(b) == 3


# ---- examples -> rows -> a batch ---------------------------------------------------------------


def example_objective(token: int):
    """An objective whose rows are windows; their last position shows `token`, their extra is t."""

    def row(example, rng, tok, T, knobs):
        ids, t = example
        targets = np.append(ids[1:T], token)
        return make_row(ids[:T], targets, raw=ids, extra=np.array([t, rng.random()]))

    return SimpleNamespace(
        draw=lambda text, rng, T, knobs: text.window(rng, T), row=row, has_t=True
    )


def example_source(**more) -> Source:
    objectives = {"a": example_objective(1), "b": example_objective(2)}
    tok = TOKENIZERS["bytes"]
    text = Text(generator().integers(97, 123, 500), tok.EOT)
    return Source(objectives, [0.75, 0.25], text, tok, 8, None, **dict(seed=1) | more)


def same(one, two) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, two) if a is not None)


def test_a_row_depends_on_seed_split_step_and_number_alone():
    source = example_source()
    row, member = draw_row(source, TRAIN, 5, 3, 8)
    again, same_member = draw_row(example_source(), TRAIN, 5, 3, 8)
    assert same(row, again) and member == same_member
    others = [(source, VALIDATION, 5, 3), (source, TRAIN, 6, 3), (source, TRAIN, 5, 4)]
    for other in [*others, (example_source(seed=2), TRAIN, 5, 3)]:
        assert not same(row, draw_row(*other, 8)[0])

    batch = data.make_batch(source, TRAIN, 5, [3, 4], 8)  # those of one of several processes
    assert batch.inputs[0].tolist() == row.inputs.tolist() and batch.names == ("a", "b")
    assert batch.member.tolist()[:8] == [member] * 8


def test_shares_of_a_mixture_and_of_a_replayed_text():
    older = Text(np.full(100, 65), eot=256)
    source = example_source(replay_text=older, replay_rate=0.4)
    drawn = [draw_row(source, TRAIN, step, 0, 1) for step in range(3000)]
    assert all(row.targets[-1] == 1 + member for row, member in drawn)
    from_b = np.array([member for _, member in drawn]) == 1
    replayed = np.array([row.inputs[0] == 65 for row, _ in drawn])
    assert from_b.mean() == pytest.approx(0.25, abs=0.03)
    assert replayed.mean() == pytest.approx(0.4, abs=0.03)
    assert replayed[from_b].mean() == pytest.approx(0.4, abs=0.06)  # they are independent


def test_t_is_stratified_over_the_rows_of_a_step_whatever_the_member():
    source = example_source()
    for step in (3, 20):
        for number in range(8):
            row, _ = draw_row(source, TRAIN, step, number, 8)
            assert number / 8 <= row.extra[0] < (number + 1) / 8
    ts = {m: [] for m in (0, 1)}
    for step in range(2000):
        row, member = draw_row(source, TRAIN, step, 0, 1)
        ts[member].append(row.extra[0])
    assert np.mean(ts[0]) == pytest.approx(np.mean(ts[1]), abs=0.04)


def padded_row(n: int, T=128):
    ids = np.arange(T)
    segment = (ids < n).astype(np.int32)
    targets = np.where(segment, ids + 1, IGNORE)
    return make_row(ids, targets, raw=ids[:n], segment=segment, weights=0.5)


def test_a_batch_has_the_targets_of_its_rows_and_counts_their_bytes():
    n_bytes = np.full(200, 2)
    batch = data.collate([padded_row(3), padded_row(40)], n_bytes, members=[1, 0], names=("a", "b"))
    assert batch.inputs.shape == (2, 64) and batch.inputs.dtype == torch.int64
    assert batch.index.tolist() == [0, 1, 2, *range(64, 104)]
    assert batch.targets.tolist() == [1, 2, 3, *range(1, 41)]
    assert batch.member.tolist() == [1] * 3 + [0] * 40
    assert (batch.total_weight, batch.target_bytes, batch.place) == (21.5, 86, None)
    moved = batch.to(torch.device("cpu"))
    assert all(same([a], [b]) for a, b in zip(vars(batch).values(), vars(moved).values()))
    ids, targets, place = np.array([1, 9, 3]), np.array([IGNORE, 2, IGNORE]), np.array([0, 1, 1])
    row = make_row(ids, targets, raw=ids, place=place, scored=np.array([2, 3]))
    batch = data.collate([row], np.arange(20))  # what is scored, not what is asked, is counted
    assert (batch.total_weight, batch.target_bytes) == (2, 2 + 3)
    assert batch.place.tolist() == [place.tolist()]


@pytest.mark.parametrize("used, length", [(0, 32), (1, 32), (32, 32), (33, 64), (97, 128)])
def test_padding_that_all_rows_share_is_cut_off(used, length):
    for row in data.trim_padding([padded_row(used), padded_row(used // 2)]):
        assert len(row.inputs) == len(row.targets) == len(row.group) == length
        assert row.extra is None


def test_a_mask_is_simple_only_where_it_equals_the_rule():
    """For each kind of (2, 4) rows: "causal" and "full" are the rule for all that is no padding."""
    q, k = np.arange(4)[:, None], np.arange(4)
    for segment in itertools.product([0, 1, 2], repeat=4):
        for group in itertools.product([-1, 0, 1], repeat=4):
            s, p = np.array(segment), np.array(group)
            together = (p[:, None] == p) & (p != 0)
            rule = (s[:, None] == s) & ((k <= q) & (p >= 0) | together)
            masks = {"causal": k <= q, "full": np.ones((4, 4), bool), "rule": rule}
            kind = data.mask_kind(s[None], p[None])
            assert (masks[kind] == rule)[s > 0].all()
    ones = np.ones((2, 4), np.int32)
    padded = np.array([[1, 1, 1, 1], [1, 1, 0, 0]])
    assert data.mask_kind(ones, ones < 0) == data.mask_kind(padded, ones < 0) == "causal"
    assert data.mask_kind(ones, ones > 0) == "full" and data.mask_kind(padded, padded > 0) == "rule"


# ---- stories -----------------------------------------------------------------------------------


class EveryChoice:
    """Stands in for the generator: story after story, takes every possible sequence of choices."""

    def __init__(self):
        self.path = []  # for each choice: the option to take, the number of options

    def integers(self, n):
        if self.at == len(self.path):
            self.path.append([0, n])
        option, n_before = self.path[self.at]
        assert n == n_before, "the same choices must lead to the same question"
        self.at += 1
        return option

    def stories(self):
        while True:
            self.at = 0
            yield story(self)
            while self.path and self.path[-1][0] + 1 == self.path[-1][1]:
                self.path.pop()
            if not self.path:
                return
            self.path[-1][0] += 1


# How many options a small world has for some words, and its events; all other words have one.
WORLDS = {
    "names": {"boy": 2, "girl": 2, "endings": 2, "events": [0, 5]},
    "gifts": {"n": 3, "gives": 2, "events": [0, 1]},
    "luck": {"n": 2, "finds": 2, "loses": 2, "events": [2, 3]},
    "things": {"color": 2, "thing": 2, "events": [2, 5]},
    "places": {"place": 3, "endings": 3, "count": 2, "draws": 2, "events": [3, 5]},
    "animals": {"look": 2, "animal": 2, "follows": 2, "kind": 2, "events": [4, 5]},
    "events": {"events": [0, 1, 2, 3, 4, 5]},
}


@pytest.fixture(scope="module", params=WORLDS)
def world(request):
    """Every story of a small world."""
    rich = WORLDS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        for table in stories.FACTS, stories.WORDS:
            for word, options in table.items():
                # There must be a place to go to. (The first n is 2, so something can be lost.)
                n = rich.get(word, 2 if word == "place" else 1)
                patch.setitem(table, word, options[:n])
        patch.setattr(stories, "EVENTS", [EVENTS[i] for i in rich["events"]])
        patch.setattr(stories, "ENDINGS", stories.ENDINGS[: rich.get("endings", 1)])
        patch.setattr(stories, "TIMES", stories.TIMES[:3])
        patch.setattr(stories, "MOST", 4)
        patch.setattr(stories, "STEP", 2)
        return list(EveryChoice().stories())


def test_each_text_has_one_derivation_and_each_determined_word_one_answer(world):
    assert 100 < len(world) < 10_000 and len({text for text, _, _ in world}) == len(world)
    assert isclose(sum(exp(-nats) for _, nats, _ in world), 1)

    answers = {"past": {}, "both": {}}
    for text, _, _ in world:
        for word in re.finditer(r"\w+", text):
            before, after = text[: word.start()], text[word.end() :]
            answers["past"].setdefault(hash(before), set()).add(word[0])
            answers["both"].setdefault(hash((before, after)), set()).add(word[0])
    for text, _, determined in world:
        for start, stop, kind in determined:
            before = text[:start]
            key = hash(before) if kind == "past" else hash((before, text[stop:]))
            assert answers[kind][key] == {text[start:stop]}, (before, kind)


def test_a_gap_of_a_full_story_has_one_filling_of_any_length(world):
    for told in world[:: len(world) // 10]:
        for start, stop, _ in told.determined if told.is_full else ():
            before, after = told.text[:start], told.text[stop:]
            room = len(before + after)
            fits = [t for t, _, _ in world if t.startswith(before) and t.endswith(after)]
            assert [t for t in fits if len(t) > room] == [told.text]


def test_lists_hold_each_option_once():
    """Otherwise a text could arise in two ways. Small worlds have a list's first options only."""
    lists = [*FACTS.values(), *WORDS.values(), stories.TIMES, stories.OPENINGS, stories.ENDINGS]
    assert all(len(set(options)) == len(options) for options in lists)


def test_documents_are_different_stories_of_little_entropy():
    told = list(stories.documents(3000))
    assert len({text for text, _ in told}) == 3000 and told[:50] == list(stories.documents(50))
    nats = sum(nats for _, nats in told)
    assert 0.12 < nats / sum(len(text) for text, _ in told) < 0.16
    assert exp(nats / 3000) > 1e11  # an entropy of H nats needs at least e^H texts


def test_stories_are_plain_english_and_their_pronouns_unambiguous():
    for text, _ in stories.documents(1000):
        assert 120 <= len(text) <= 260 and re.fullmatch(r"([A-Z][\w ,]+\.\n){3,7}", text)
        assert not re.search(r"\b[Aa] [aeiou]|  |\b(\w+) \1\b", text)
        for number, things in re.findall(rf"(\d+) (?:{'|'.join(FACTS['color'])}) (\w+)", text):
            assert things.endswith("s") == (number != "1") and 1 <= int(number) <= 8
        names = re.findall("|".join(FACTS["boy"] + FACTS["girl"]), text)
        assert not re.search(r"\bshe\b" if names[0] in FACTS["boy"] else r"\bhe\b", text)
