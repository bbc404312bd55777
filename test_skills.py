"""What the skills promise: right answers count as right, wrong answers as wrong, and each question
fits the context of its model."""

import doctest
import functools
import json
import math
import re
from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import compare
import skills
import stories
import yardsticks
from claims import CLAIMS
from generate import Stats
from mixture import parse_mixture
from objectives import OBJECTIVES, PAIR_MARKS, Knobs
from sample import TrainedModel
from skills import (
    MARKS,
    N_STORIES,
    Hole,
    held_out,
    kind_of,
    measure,
    runs_of_words,
    times_told,
    with_another_word,
    words_of,
)
from tokenizer import get_tokenizer

TOK = get_tokenizer("bytes")
CHANCES = {  # bounds of what guessing gets; for all other skills: 0.25 to 0.35
    "pairs judged right": (0.5, 0.5),
    "words unmasked, up to five runs at once": (0.15, 0.45),
    "replaced words found": (0.0, 0.05),
    "reports that are right": (0.0, 0.05),
    "second halves found among 200": (0.005, 0.005),
    "sentences with masked words restored": (0.1, 0.3),
    "stories written to their end": (0.0, 0.0),
    "three holes filled right": (0.15, 0.45),
    "three holes ended right": (0.0, 0.0),
    "holes ended right": (0.0, 0.0),
    "shuffled sentences put in their place": (0.15, 0.25),
}


class Oracle:
    """Stands in for a TrainedModel and knows all stories by heart. A liar gives wrong answers."""

    def __init__(self, objective: str, is_liar: bool = False, block_size: int = 600):
        self.tok = TOK
        self.device = torch.device("cpu")
        self.knobs = Knobs()
        self.mixture = parse_mixture(objective)
        self.tasks = [*OBJECTIVES[objective].tasks, "score", "embed"]
        self.block_size = block_size
        self.is_liar = is_liar
        told = [*held_out(self, block_size), *held_out(self, block_size, full=True)]
        self.known = list(dict.fromkeys(story.text for story in told))
        self.model = SimpleNamespace(future=(), generator=None)

    def logits(self, ids, prefix_length=0):
        """A liar predicts the token that it reads, not the next one."""
        said = torch.tensor(ids).roll(0 if self.is_liar else -1)
        return F.one_hot(said, TOK.vocab_size).float()

    def ask(self, task, before, after=None, **flags):
        if task == "pair":
            follows = any(before + after in known for known in self.known)
            return [SimpleNamespace(details={"probability": float(follows != self.is_liar)})]
        if task == "detect":
            return [SimpleNamespace(details={"replaced_probability": self.doubts(before)})]
        if task == "restore":
            told = "no no no no no" if self.is_liar else self.restored(before)
            return [SimpleNamespace(text=told)]
        if task == "continue":
            [rest, *_] = [known[len(before) :] for known in self.known if known.startswith(before)]
            most = len(rest) - 1 if self.is_liar else flags["max_new_tokens"]
            return [SimpleNamespace(text=rest[:most])]
        text = before if after is None else f"{before}[MASK]{after}"
        pattern = re.escape(text).replace(re.escape("[MASK]"), "(.+?)")
        told = next(filter(None, (re.fullmatch(pattern, known) for known in self.known)), None)
        assert told, f"Oracle.ask cannot answer the task {task}: add its right answer"
        fills = told.groups()
        fills = ["no no no no no" if self.is_liar else fill for fill in fills]
        written = "".join(fills)
        ids = TOK.encode(written)
        return [SimpleNamespace(text=written, ids=ids, details={"fills": fills})]

    def embed(self, text):
        [place] = [i for i, known in enumerate(self.known) if text in known]
        if self.is_liar and self.known[place].startswith(text):
            place += 1
        return F.one_hot(torch.tensor(place), N_STORIES + 1).float()

    def doubts(self, text):
        """A number for each byte: 1 where the text differs from the nearest known story, else 0.
        A liar doubts nothing."""

        def difference(known):
            head = len(common(known, text))
            tail = len(common(known[head:][::-1], text[head:][::-1]))
            return max(len(text) - head - tail, 1), head

        n, head = min(map(difference, self.known))
        doubt = 0.0 if self.is_liar else 1.0
        return [doubt if head <= i < head + n else 0.0 for i in range(len(text))]

    def restored(self, noisy):
        """The known story that has, in any order, all lines of a text with masked words."""
        mask = re.escape("[MASK]")
        lines = [re.escape(line).replace(mask, r"[\w ]+") for line in noisy.splitlines()]
        for known in self.known:
            own = known.splitlines()
            if len(own) == len(lines) and all(
                any(re.fullmatch(line, other) for other in own) for line in lines
            ):
                return known


def common(a: str, b: str) -> str:
    """The longest common prefix."""
    n = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return a[:n]


@functools.cache
def found_by_an_oracle(name: str) -> dict[str, skills.Skill]:
    return measure(Oracle(name))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_oracle_is_right_and_a_liar_is_wrong(name):
    found = found_by_an_oracle(name)
    assert bool(found) == bool(OBJECTIVES[name].tasks)
    for what, skill in found.items():
        assert skill.value == 1, what
        low, high = CHANCES.get(what.split(" (")[0], (0.25, 0.35))
        assert low <= skill.chance <= high, f"{what}: guessing gets {skill.chance}; see CHANCES"
    for what, skill in measure(Oracle(name, is_liar=True)).items():
        assert skill.value < 0.1, what


def test_a_text_is_not_scored_in_a_layout_that_is_not_known():
    """A new task's model would else be asked as if it were causal."""
    model = Oracle("clm")
    first, second = TOK.encode("At dawn,"), TOK.encode(" Tom")
    assert len(skills.logits_after(model, "continue", first, second)) == len(second)
    assert skills.logits_after(model, "reorder", first, second) is None


def test_claims_are_decided_by_scores_that_exist():
    known = {
        *("bits per byte", "bits per byte of own text", "val_loss", "first event", "word fits"),
        *("roles of names", "documents", "second parts found", *yardsticks.OTHER_ROWS),
        *("tokens per pass at temperature 0", "tokens per pass at temperature 0.8"),
        *("times as fast at temperature 0", "times as fast at temperature 0.8"),
        *("holes inside words", "masked words found in short stories"),
    }
    for name in OBJECTIVES:
        known |= found_by_an_oracle(name).keys()
    for claim in CLAIMS.values():
        assert {comparison.score for comparison in claim.comparisons} <= known, claim.text


def test_the_footnote_says_what_a_bag_of_words_gets():
    """It knows which two kinds of event there are, and says the one that was first more often in
    the questions that probes are fitted to."""
    told = yardsticks.short_stories(yardsticks.N_DRAWN, yardsticks.SEED + 1)
    n = yardsticks.first_events(Oracle("clm"), told).n_learned
    kinds = [yardsticks.kinds_of_events(story.text) for story in told]
    asked = [pair for pair in kinds if len(pair) == 2][: yardsticks.N_PROBED]
    firsts = defaultdict(Counter)
    for pair in asked[:n]:
        firsts[frozenset(pair)][pair[0]] += 1
    says = {pair: counts.most_common(1)[0][0] for pair, counts in firsts.items()}
    share = np.mean([says[frozenset(pair)] == pair[0] for pair in asked[n:]])
    footnote = compare.FOOTNOTE.replace("\n", " ")
    assert f"which two events there are, but not their order, gets {share:.2f}." in footnote


def test_members_of_a_mixture_are_asked_one_by_one(monkeypatch):
    """fim, span, ul2 and bart all fill gaps: each answers its own questions."""
    asked = {}
    for task in skills.MEASURE:

        def note(member, told, task=task):
            assert task not in asked
            asked[task] = list(member.mixture)
            return {}

        noted = skills.MEASURE[task]._replace(function=note)
        monkeypatch.setitem(skills.MEASURE, task, noted)

    class Mixed:
        tok = TOK
        block_size = 600
        mixture = parse_mixture("clm,fim,span,ul2,bart,mlm")
        tasks = TrainedModel.tasks

    assert measure(Mixed()) == {}
    assert asked == {
        "continue": ["clm"],
        "infill_fim": ["fim"],
        "infill_span": ["span"],
        "infill_ul2": ["ul2"],
        "continue_ul2": ["ul2"],
        "restore": ["bart"],
        "fill": ["mlm"],
    }


def test_holes_inside_words_are_asked():
    assert yardsticks.holes_inside_words(Oracle("fim")) == 1
    assert yardsticks.holes_inside_words(Oracle("fim", is_liar=True)) == 0
    short = Oracle("fim")
    short.block_size = 100  # no story fits
    assert yardsticks.holes_inside_words(short) is None


def test_the_examples_are_right():
    found = doctest.testmod(skills)
    assert found.attempted >= 1 and found.failed == 0


def test_only_what_fits_is_asked():
    trained = Oracle("clm", block_size=200)
    told = held_out(trained, room=190)
    assert len(told) == N_STORIES
    assert max(len(TOK.encode(story.text)) for story in told) <= 190
    assert measure(Oracle("clm", block_size=130 + MARKS)) == {}  # no story is that short
    assert measure(Oracle("bart", block_size=300)) == {}  # its rows hold the story twice
    # [R], the text without three words, a sentinel in each gap and one at the end, EOT; then for
    # each gap eight tokens and a sentinel.
    for block_size in (64, 80, 128):
        room = skills.MEASURE["infill_ul2"].room(block_size)
        assert 1 + (room - 3) + 3 + 1 + 1 + 3 * (8 + 1) <= block_size


@pytest.mark.parametrize("name", ["nsp", "sop"])
def test_pairs_that_are_asked_fit_the_context(name):
    trained = Oracle(name, block_size=200)
    lengths = []

    def ask(task, first, second):
        lengths.append(len(TOK.encode(first)) + len(TOK.encode(second)) + PAIR_MARKS)
        return [SimpleNamespace(details={"probability": 1.0})]

    trained.ask = ask
    entry = trained.tasks[0]
    unseen = held_out(trained, skills.MEASURE[entry].room(200))
    [judged] = skills.MEASURE[entry].function(trained, unseen).values()
    assert judged.value == 0.5  # half of the pairs are true
    n_asked = N_STORIES if name == "nsp" else 72  # sop: those with two times inside
    assert len(lengths) == n_asked and max(lengths) <= 200


def test_a_word_is_replaced_by_another_of_its_kind():
    assert [kind_of(word) for word in ("Tom", "red", "balls", "7", "park")] == [
        *("boy", "color", "thing", "n", "place")
    ]
    assert kind_of("because") == "other" and kind_of("her") == kind_of("him") != kind_of("she")

    def others(word):
        rng = np.random.default_rng(1)
        return {with_another_word(Hole("", f" {word}", ""), rng).word for _ in range(100)}

    assert others("red") == {f" {color}" for color in stories.FACTS["color"]} - {" red"}
    assert others("balls") == {f" {thing}s" for thing in stories.FACTS["thing"]} - {" balls"}


def test_times_told_counts_each_occurrence_of_a_fact_and_a_number_once():
    [story, *_] = held_out(Oracle("electra"), room=600)
    for hole in words_of(story, "both"):
        n = times_told(hole, story)
        assert n == 1 if hole.word.strip().isdigit() else n == story.text.count(hole.word.strip())


def test_neighboring_holes_are_one():
    for story in held_out(Oracle("ul2"), room=600)[:50]:
        words = words_of(story, "past")
        runs = runs_of_words(story)
        assert "".join(run.word for run in runs) == "".join(word.word for word in words)
        for run in runs:
            assert run.before + run.word + run.after == story.text
        for a, b in zip(runs, runs[1:]):
            assert len(b.before) > len(a.before + a.word)


def test_drafts_are_kept_out_of_those_that_were_drafted(monkeypatch):
    """Guessing drafts the most common token: a, in 6 of 10 places."""
    results = [("aaab", 3, 2), ("aaabcc", 5, 4)]  # written, drafted, kept
    results = [([TOK.encode(w)], Stats(len(w), drafted=d, kept=k)) for w, d, k in results]
    trained = Oracle("mtp")
    trained.decoder = lambda: SimpleNamespace(generate=lambda *_, **__: results.pop(0))
    monkeypatch.setattr(skills, "heads_of", lambda decoder: None)
    found = skills.drafts_kept(trained, held_out(trained, 600)[:2])
    assert found.value == 6 / 8 and found.chance == 6 / 10


@pytest.mark.parametrize("is_liar", [False, True])
def test_holes_are_filled_from_the_left_only(is_liar):
    """A liar's last token is wrong."""
    trained = Oracle("clm")

    def logits(ids, prefix_length):
        left = TOK.decode(ids[1:])  # without the EOT before a document
        [known, *_] = [known for known in trained.known if known.startswith(left)]
        said = TOK.encode(known[: len(left)] + ("!" if is_liar else known[len(left)]))
        return F.one_hot(torch.tensor(said), TOK.vocab_size).float()

    trained.logits = logits
    found = yardsticks.left_only(trained)
    assert found == 0 if is_liar else found > 0.9  # some stories begin alike


def test_each_layout_of_fim_is_asked(monkeypatch):
    """The skills cover all layouts of a model; sample.py itself uses only the last one."""
    layouts = []

    def infilling(trained, unseen, how):
        layouts.append((trained.knobs.fim_layouts, how))
        return {}

    monkeypatch.setattr(skills, "infilling", infilling)
    measure(Oracle("fim"))
    assert layouts == [("psm", " (psm)"), ("spm", " (spm)")]


def test_a_hole_that_ends_too_early_has_not_ended_right():
    found = skills.filled([Hole("", " a b", ""), Hole("", " a", "")], [" a", " c"])
    assert found["holes ended right"].value == 0.5


def test_each_first_text_looks_for_its_second():
    angles = {"f0": 30, "s0": 60, "f1": 66, "s1": 70}  # the one nearest to s0 is f1

    def embed(text):
        angle = math.radians(angles[text])
        return torch.tensor([math.cos(angle), math.sin(angle)])

    assert skills.partners_found(SimpleNamespace(embed=embed), [("f0", "s0"), ("f1", "s1")]) == 1.0


def test_only_full_stories_are_asked_about_where_that_matters():
    trained = SimpleNamespace(tok=get_tokenizer("bytes"))
    assert all(story.is_full for story in held_out(trained, 1000, full=True))
    assert not all(story.is_full for story in held_out(trained, 1000))


def test_ul2_is_asked_in_the_mode_that_a_skill_is_named_after():
    trained = Oracle("ul2")
    modes = []
    ask = trained.ask
    trained.ask = lambda *texts, mode, **flags: modes.append(mode) or ask(*texts, **flags)
    unseen = held_out(trained, 600, full=True)[:3]
    found = skills.infilling_ul2(trained, unseen)
    assert modes == [*"RRRXXX"]
    assert [*found] == [
        f"three holes {how} right ([{m}])" for m in "RX" for how in ("filled", "ended")
    ]


@pytest.mark.parametrize("of_two", [True, False])
def test_wrong_orders_are_of_one_story_and_wrong_seconds_of_two(of_two):
    """As in training: sop's false pairs have the right content in the wrong order."""
    trained = Oracle("nsp" if of_two else "sop")
    told = held_out(trained, 600)[:60]
    pairs = []

    def ask(task, *texts):
        pairs.append(texts)
        return [SimpleNamespace(details={"probability": 1.0})]

    trained.ask = ask
    skills.pairing(trained, told, of_two)
    whole = [story.text for story in told]
    for i, (first, second) in enumerate(pairs):
        together = any(first in text and second in text for text in whole)
        assert any(first + second in text for text in whole) == (i % 2 == 0)
        assert together == (i % 2 == 0 or not of_two)


def test_a_word_counts_as_reported_only_above_the_bound_of_sample():
    trained = Oracle("electra")
    trained.doubts = lambda text: [skills.MARKED_ABOVE - 0.01] * len(text)
    found = skills.detecting(trained, held_out(trained, 600)[:20])
    assert [skill.value for skill in found.values()] == [0.0, 0.0]


def test_a_special_token_is_no_word_that_a_model_writes():
    """They are never drawn, so the likeliest other token is what the model would write."""
    trained = Oracle("clm")
    told = held_out(trained, 600)[:5]
    right = trained.logits

    def logits(ids, prefix_length=0):
        return right(ids) + 2 * F.one_hot(torch.tensor(TOK.MASK), TOK.vocab_size)

    trained.logits = logits
    [(name, skill), *_] = skills.continuing(trained, told).items()
    assert name == "words that follow from the past" and skill.value == 1.0


def test_hidden_words_do_not_stand_where_a_shuffled_line_loses_its_place():
    trained = Oracle("bart")
    rng = np.random.default_rng(0)
    runs = [run for story in held_out(trained, 600) for run in skills.some_runs(story, rng)]
    assert runs and not any(run.before.endswith("\nThat") for run in runs)


def test_recall_and_precision_are_not_each_others(monkeypatch):
    """A detector that doubts everything finds every wrong word, and hardly any report is right."""
    trained = Oracle("electra")
    trained.doubts = lambda text: [1.0] * len(text)
    recall, precision = skills.detecting(trained, held_out(trained, 600)[:20]).values()
    assert recall.value == 1.0 and 0 < precision.value < 0.1


def test_the_table_has_what_was_learned_before_what_guessing_gets():
    title, line = skills.report({"holes filled right": skills.Skill(0.9, 0.25)})
    assert title.split()[-2:] == ["learned", "guessing"]
    assert line.split()[-2:] == ["90.0%", "25.0%"]


def test_second_halves_are_read_in_the_layout_of_training():
    """What is read both ways, and what was written before the second half."""
    first, second = TOK.encode("ab"), TOK.encode("cd")
    read = {}

    def logits(ids, prefix_length):
        read[entry] = (TOK.decode(ids[:prefix_length]), TOK.decode(ids[prefix_length:]))
        return torch.zeros(len(ids), TOK.vocab_size)

    trained = SimpleNamespace(tok=TOK, logits=logits)
    end = "<|endoftext|>"
    layouts = {
        "continue": ("", f"{end}abc"),
        "infill_fim": ("", f"{end}abc"),
        "continue_prefix": (f"{end}ab", "c"),
        "continue_ul2": (f"[S]ab{end}", "c"),
        "infill_span": (f"ab<extra_id_0>{end}", "<extra_id_0>c"),
        "restore": (f"ab[MASK]{end}", "abc"),
    }
    for entry in layouts:
        skills.logits_after(trained, entry, first, second)
    assert read == layouts


def test_a_probe_is_tested_on_questions_that_it_has_not_learned():
    """Labels are noise, but with as many channels as questions a probe learns them by heart."""
    torch.manual_seed(0)
    states, labels = torch.randn(200, 200), torch.randint(2, (200,))
    assert yardsticks.probe(states, labels, 150) < 0.75


def test_times_as_fast_is_plain_time_over_drafting_time(monkeypatch):
    def in_turns(decoder, prompts, n, ways):
        seconds = {"plain": 6.0, "pausing": 2.0, "always": 9.0}
        return {way: dict(tokens=8, passes=4, seconds=seconds[way]) for way in ways}

    monkeypatch.setattr(yardsticks, "decode_in_turns", in_turns)
    trained = SimpleNamespace(block_size=64, decoder=lambda sampler: None)
    found = yardsticks.drafting(trained, [([1, 2], [])])
    assert found["times as fast at temperature 0"] == 3.0
    assert found["tokens per pass at temperature 0.8"] == 2.0


def test_the_bound_of_a_second_half_is_given_the_first(monkeypatch):
    asked = []
    monkeypatch.setattr(
        yardsticks, "bound_nats", lambda trained, ids, before=None: asked.append((ids, before)) or 1
    )
    pairs = [(list(range(80)), [200, 201])]
    yardsticks.second_half_bits(Oracle("diffusion", block_size=40), pairs, bound=True)
    assert asked == [([200, 201], list(range(46, 80)))]  # the end of the first half: MARKS are 4


def test_the_scores_of_a_run_are_those_of_the_end_of_its_log(tmp_path, monkeypatch):
    lines = [{"ms": 900}, {"ms": 5}, {"ms": 7}, {"val_loss": 3.0}, {"val_loss": 2.0}]
    skill = {"holes filled right (psm)": {"value": 0.1}, "holes filled right (spm)": {"value": 0.9}}
    lines.append({"skills": skill})
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(yardsticks, "open_checkpoint", lambda folder: None)
    monkeypatch.setattr(yardsticks, "own_text", lambda checkpoint: None)
    monkeypatch.setattr(yardsticks, "TrainedModel", lambda checkpoint: Oracle("fim"))
    monkeypatch.setattr(yardsticks, "set_for_asking", lambda trained: torch.no_grad())
    monkeypatch.setattr(yardsticks, "scores_of_model", lambda trained, own: {})
    found = yardsticks.scores_of_run(tmp_path)
    assert (found["val_loss"], found["ms"]) == (2.0, 7)
    assert found["holes filled right"] == 0.9  # of the layout that sample.py uses, the last one


def test_rows_of_own_text_and_of_each_kind_are_what_a_loss_is_measured_on(monkeypatch):
    asked = {}
    monkeypatch.setattr(
        yardsticks, "loss_on", lambda trained, name, knobs, text=None: asked.setdefault(text, 0.0)
    )
    own = "the held-out text of the run"
    yardsticks.losses_on_other_rows(Oracle("mlm"), own)
    assert asked.keys() == {own}


def test_rows_have_the_knobs_of_the_yardstick_not_those_of_the_run():
    trained = Oracle("mlm", block_size=64)
    shares = []
    for percent in (15, 40):
        _, knobs = yardsticks.OTHER_ROWS[f"masks of {percent}%"]
        batch = yardsticks.rows_of(trained, {"mlm": 1.0}, knobs, None)
        shares.append(len(batch.targets) / batch.inputs.numel())
    assert shares == pytest.approx([0.15, 0.4], abs=0.02)


def test_a_detector_answers_at_every_position_too():
    trained = Oracle("electra", block_size=64)
    trained.model.detect_head = True
    assert yardsticks.targets_per_position(trained, None) == pytest.approx(1.15, abs=0.02)
    trained.model.detect_head = None
    assert yardsticks.targets_per_position(trained, None) == pytest.approx(0.15, abs=0.02)


def test_probes_are_compared_with_different_random_networks(monkeypatch):
    seeds = []
    monkeypatch.setattr(yardsticks, "random_twin", lambda trained, seed: seeds.append(seed))
    monkeypatch.setattr(yardsticks, "share_right", lambda trained, exam: 0.5)
    yardsticks.probes(None, {"first event": yardsticks.Exam([], 0)})
    assert len(set(seeds)) == yardsticks.N_TWINS


def test_ul2_goes_on_in_its_mode_s(monkeypatch):
    asked = set()
    monkeypatch.setattr(
        yardsticks, "logits_after", lambda trained, task, *_: asked.add(task) or None
    )
    trained = Oracle("ul2")
    trained.attention = "prefix"
    yardsticks.second_half_bits(trained, [([1, 2], [3])])
    assert asked == {"continue_ul2"}
