"""test_skills.py: right answers count as right, wrong ones as wrong, and each question fits the
context of its model."""

import functools
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import stories
from lab import skills, yardsticks
from lab.skills import MARKS, N_STORIES, Hole, held_out, kind_of, measure, words_of
from objectives import OBJECTIVES, PAIR_MARKS, Knobs, parse_mixture
from sample import tasks_of
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
    "sums in written stories right": (0.125, 0.125),
    "three holes filled right": (0.15, 0.45),
    "two holes filled right": (0.3, 0.4),
    "two holes ended right": (0.0, 0.0),
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
        self.block_size = block_size
        self.is_liar = is_liar
        told = [*held_out(self, block_size), *held_out(self, block_size, full=True)]
        self.known = list(dict.fromkeys(story.text for story in told))
        self.model = SimpleNamespace(future=(), generator=None)
        self.asked = []  # the questions: (objective, layouts of fim, task, texts, flags)

    @property
    def tasks(self):
        return tasks_of(self.mixture)

    def logits(self, ids, prefix_length=0):
        """A liar predicts the token that it reads, not the next one."""
        said = torch.tensor(ids).roll(0 if self.is_liar else -1)
        return F.one_hot(said, TOK.vocab_size).float()

    def ask(self, task, before, after=None, **flags):
        whose = "+".join(self.mixture)
        self.asked.append((whose, self.knobs.fim_layouts, task, (before, after), flags))
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
            if self.is_liar:
                rest = re.sub(r"(Now \w+ has|That \w+) \d+", r"\1 0", rest)
            return [SimpleNamespace(text=rest[:most])]
        text = before if after is None else f"{before}[MASK]{after}"
        pattern = re.escape(text).replace(re.escape("[MASK]"), "(.+?)")
        told = next(filter(None, (re.fullmatch(pattern, known) for known in self.known)), None)
        assert told, f"Oracle.ask cannot answer the task {task}: add its right answer"
        fills = ["no no no no no" if self.is_liar else fill for fill in told.groups()]
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


# ---- who is asked what ---------------------------------------------------------------------------


def test_members_of_a_mixture_are_asked_one_by_one():
    """fim, span and ul2 all fill gaps: each answers its own questions. fim is asked in each of its
    layouts, ul2 in both of its modes for gaps."""
    mixed = Oracle("clm,fim,span,ul2,mlm")
    measure(mixed)
    asked = {(whose, task, flags.get("mode")) for whose, _, task, _, flags in mixed.asked}
    assert asked == {
        ("clm", "continue", None),
        ("fim", "infill", None),
        ("span", "infill", None),
        ("ul2", "continue", None),
        ("ul2", "infill", "R"),
        ("ul2", "infill", "X"),
        ("mlm", "fill", None),
    }
    layouts = {layouts for whose, layouts, task, *_ in mixed.asked if whose == "fim"}
    assert layouts == {"psm", "spm"}


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
def test_pairs_fit_the_context_and_are_false_as_in_training(name):
    """nsp's false pairs are of two stories. sop's have the right content in the wrong order."""
    trained = Oracle(name, block_size=200)
    unseen = held_out(trained, skills.MEASURE[trained.tasks[0]].room(200))
    trained.known = whole = [story.text for story in unseen]
    [judged] = skills.MEASURE[trained.tasks[0]].function(trained, unseen).values()
    assert judged.value == 1.0
    pairs = [texts for *_, texts, _ in trained.asked]
    assert len(pairs) == (N_STORIES if name == "nsp" else 72)  # sop: those with two times inside
    for i, (first, second) in enumerate(pairs):
        assert len(TOK.encode(first + second)) + PAIR_MARKS <= 200
        is_true = i % 2 == 0
        assert any(first + second in text for text in whole) == is_true
        together = any(first in text and second in text for text in whole)
        assert together == (is_true or name == "sop")


def test_only_full_stories_are_asked_about_where_that_matters():
    trained = SimpleNamespace(tok=TOK)
    assert all(story.is_full for story in held_out(trained, 1000, full=True))
    assert not all(story.is_full for story in held_out(trained, 1000))


def test_a_word_is_replaced_by_another_of_its_kind():
    words = ("Tom", "red", "balls", "7", "park")
    assert [kind_of(word) for word in words] == ["boy", "color", "thing", "n", "place"]
    assert kind_of("because") == "other" and kind_of("her") == kind_of("him") != kind_of("she")

    def others(word):
        rng = np.random.default_rng(1)
        return {skills.with_another_word(Hole("", f" {word}", ""), rng).word for _ in range(100)}

    assert others("red") == {f" {color}" for color in stories.FACTS["color"]} - {" red"}
    assert others("balls") == {f" {thing}s" for thing in stories.FACTS["thing"]} - {" balls"}


def test_times_told_counts_each_occurrence_of_a_fact_and_a_number_once():
    [story, *_] = held_out(Oracle("electra"), room=600)
    for hole in words_of(story, "both"):
        word = hole.word.strip()
        n = skills.times_told(hole, story)
        assert n == 1 if word.isdigit() else n == story.text.count(word)


def test_neighboring_holes_are_one():
    for story in held_out(Oracle("ul2"), room=600)[:50]:
        words = words_of(story, "past")
        runs = skills.runs_of_words(story)
        assert "".join(run.word for run in runs) == "".join(word.word for word in words)
        for run in runs:
            assert run.before + run.word + run.after == story.text
        for a, b in zip(runs, runs[1:]):
            assert len(b.before) > len(a.before + a.word)


def test_hidden_words_do_not_stand_where_a_shuffled_line_loses_its_place():
    trained = Oracle("bart")
    rng = np.random.default_rng(0)
    runs = [run for story in held_out(trained, 600) for run in skills.some_runs(story, rng)]
    assert runs and not any(run.before.endswith("\nThat") for run in runs)


# ---- what counts as right ------------------------------------------------------------------------


def test_a_hole_that_ends_too_early_has_not_ended_right():
    found = skills.filled([Hole("", " a b", ""), Hole("", " a", "")], [" a", " c"])
    assert found["holes ended right"].value == 0.5


def test_each_first_text_looks_for_its_second():
    angles = {"f0": 30, "s0": 60, "f1": 66, "s1": 70}  # the one nearest to s0 is f1

    def embed(text):
        angle = math.radians(angles[text])
        return torch.tensor([math.cos(angle), math.sin(angle)])

    assert skills.partners_found(SimpleNamespace(embed=embed), [("f0", "s0"), ("f1", "s1")]) == 1.0


def test_recall_and_precision_are_not_each_others():
    """A detector that doubts everything finds every wrong word, and hardly any report is right. A
    doubt that does not reach sample.py's bound is no report."""
    trained = Oracle("electra")
    told = held_out(trained, 600)[:20]
    trained.doubts = lambda text: [1.0] * len(text)
    recall, precision = skills.detecting(trained, told).values()
    assert recall.value == 1.0 and 0 < precision.value < 0.1
    trained.doubts = lambda text: [0.49] * len(text)
    assert [skill.value for skill in skills.detecting(trained, told).values()] == [0.0, 0.0]


def test_a_special_token_is_no_word_that_a_model_writes():
    """They are never drawn, so the likeliest other token is what the model would write."""
    trained = Oracle("clm")
    right = trained.logits
    mask = F.one_hot(torch.tensor(TOK.MASK), TOK.vocab_size)
    trained.logits = lambda ids, prefix_stop=0: right(ids) + 2 * mask
    found = skills.continuing(trained, held_out(trained, 600)[:5])
    assert found["words that follow from the past"].value == 1.0


def test_second_halves_are_read_in_the_layout_of_training():
    """What is read both ways, and what was written before the second half."""
    first, second = TOK.encode("ab"), TOK.encode("cd")
    read = {}

    def logits(ids, prefix_length):
        read[task] = (TOK.decode(ids[:prefix_length]), TOK.decode(ids[prefix_length:]))
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
    for task in layouts:
        assert len(skills.logits_after(trained, task, first, second)) == len(second)
    assert read == layouts


def test_the_table_has_what_was_learned_before_what_guessing_gets():
    title, line = skills.report({"holes filled right": skills.Skill(0.9, 0.25)})
    assert title.split()[-2:] == ["learned", "guessing"]
    assert line.split()[-2:] == ["90.0%", "25.0%"]


# ---- yardsticks that an oracle can take ----------------------------------------------------------


def test_holes_inside_words_are_asked():
    assert yardsticks.holes_inside_words(Oracle("fim")) == 1
    assert yardsticks.holes_inside_words(Oracle("fim", is_liar=True)) == 0
    short = Oracle("fim")
    short.block_size = 100  # no story fits
    assert yardsticks.holes_inside_words(short) is None


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
    for detect_head, targets in ((True, 1.15), (None, 0.15)):
        trained.model.detect_head = detect_head
        found = yardsticks.targets_per_position(trained, None)
        assert found == pytest.approx(targets, abs=0.02)
