"""What stories promise: one derivation and a known price per text, one right answer per span."""

import doctest
import re
from math import comb, exp, isclose, log

import numpy as np
import pytest

import stories
from stories import EVENTS, FACTS, documents, story


def some_stories(n, seed=5):
    rng = np.random.default_rng(seed)
    return [story(rng) for _ in range(n)]


def test_golden():
    results = doctest.testmod(stories)
    assert results.attempted == 4
    assert results.failed == 0


# Small worlds, of which every story is told.


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
    "names": {"boy": 2, "girl": 2, "endings": 3, "events": [0, 5]},
    "gifts": {"n": 3, "gives": 2, "kind": 2, "events": [0, 1]},
    "luck": {"n": 3, "finds": 2, "loses": 2, "events": [2, 3]},
    "things": {"color": 2, "thing": 2, "events": [2, 5]},
    "places": {"place": 3, "endings": 3, "count": 2, "draws": 2, "events": [3, 5]},
    "animals": {"look": 2, "animal": 2, "follows": 2, "kind": 2, "events": [4, 5]},
    "walks": {"walk": 2, "events": [1, 5]},
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


def test_small_worlds_have_all_events():
    """A new event must be added to WORLDS, and to `price`."""
    assert set().union(*(rich["events"] for rich in WORLDS.values())) == set(range(len(EVENTS)))


def test_small_world(world):
    """Each text occurs once, the probabilities sum to one, and no marked word can be replaced."""
    assert 100 < len(world) < 10_000
    assert len({text for text, _, _ in world}) == len(world)
    assert isclose(sum(exp(-nats) for _, nats, _ in world), 1)

    answers = {"past": {}, "both": {}}
    for text, _, _ in world:
        for word in re.finditer(r"\w+", text):
            before = text[: word.start()]
            after = text[word.end() :]
            answers["past"].setdefault(hash(before), set()).add(word[0])
            answers["both"].setdefault(hash((before, after)), set()).add(word[0])
    for text, _, determined in world:
        for start, stop, kind in determined:
            before = text[:start]
            key = hash(before) if kind == "past" else hash((before, text[stop:]))
            assert answers[kind][key] == {text[start:stop]}, (before, kind)


def test_lists_hold_each_option_once():
    """Otherwise a text could arise in two ways. (Small worlds have a list's first options only.)"""
    lists = [*FACTS.values(), *stories.WORDS.values(), stories.TIMES]
    for options in [*lists, stories.OPENINGS, stories.ENDINGS]:
        assert len(set(options)) == len(options)


def fillings(texts, before, after):
    """Every middle, of any length, that makes a story of the world."""
    room = len(before) + len(after)
    for text in texts:
        if len(text) > room and text.startswith(before) and text.endswith(after):
            yield text[len(before) : len(text) - len(after)]


def n_fillings(world, is_full):
    """The number of fillings of each gap in some of the stories of a world."""
    texts = [told.text for told in world]
    counts = []
    for told in world[:: len(world) // 40]:
        if told.is_full == is_full:
            for start, stop, _ in told.determined:
                counts.append(len(list(fillings(texts, told.text[:start], told.text[stop:]))))
    return counts


def test_gaps_of_a_full_story_have_one_filling_of_any_length(world):
    assert set(n_fillings(world, is_full=True)) == {1}


@pytest.mark.parametrize("world", ["places"], indirect=True)
def test_gaps_of_other_stories_may_have_more(world):
    assert max(n_fillings(world, is_full=False)) > 1


# The whole language, checked from its texts alone.


def replay(text):
    """The events of a story in order: (kind, things before it, how many came or went)."""
    n = int(re.search(r"\d+", text)[0])
    events = []
    for line in text.splitlines():
        if change := re.search(r"(\d+) (more|of them)", line):
            step = int(change[1])
            lucky = bool(re.search("finds|buys|wins|loses|sells|forgets", line))
            kind = {"more": ["receive", "find"], "of them": ["give", "lose"]}[change[2]][lucky]
            events.append((kind, n, step))
            n += step if change[2] == "more" else -step
        elif " meet a " in line:
            events.append(("meet", n, 0))
        elif " from the " in line and "far from" not in line:
            events.append(("move", n, 0))
    return events, n


def price(text):
    """-log of a text's probability, from the text alone."""
    events, _ = replay(text)
    options = [32, 4, 6, 8, 8, 3]  # the cast, number, color, thing, place, opening
    if " shows " not in text:
        options.append(4)  # how they travel
    options += [2, comb(5, 1 + len(events))]
    used = set()
    for kind, n, _ in events:
        possible = {"receive", "give", "find", "lose", "meet", "move"} - used
        if n == 8:
            possible -= {"receive", "find"}
        if n == 1:
            possible -= {"give", "lose"}
        options.append(len(possible))
        used.add(kind)
        if kind == "meet":
            options += [6, 6, 3, 4]
        elif kind == "move":
            options += [4, 7]
        elif kind in ("receive", "find"):
            options += [min(3, 8 - n), 3, 2]
        else:
            options += [min(3, n - 1), 3, 2]
    if len(events) == 1:
        options.append(2)  # a feeling or none
    if re.search("(happy|glad) because", text):
        options.append(3)
    options.append(3)  # the ending, and its verb
    if re.search("draws|paints|waits", text):
        options.append(3)
    elif " leave " not in text:
        options.append(4)
    return sum(log(n) for n in options)


def test_price():
    for text, nats, _ in some_stories(2000):
        assert isclose(nats, price(text)), text


def words(kind, text):
    """The words of one kind in a text, in order."""
    return re.findall(rf"\b({'|'.join(FACTS[kind])})s?\b", text)


def names(text):
    return re.findall(r"\b(?:" + "|".join(FACTS["boy"] + FACTS["girl"]) + r")\b", text)


def test_english():
    for text, _, _ in some_stories(1000):
        assert 120 <= len(text) <= 260
        assert 3 <= text.count("\n") <= 7
        assert re.fullmatch(r"([A-Z][\w ,]+\.\n)+", text)
        assert not re.search(r"\b[Aa] [aeiou]|  |\b(\w+) \1\b", text)
        for number, things in re.findall(rf"(\d+) (?:{'|'.join(FACTS['color'])}) (\w+)", text):
            assert things.endswith("s") == (number != "1")
            assert 1 <= int(number) <= 8
        other = "she" if names(text)[0] in FACTS["boy"] else "he"
        assert not re.search(rf"\b{other}\b", text)


def test_pronouns_are_those_of_whom_they_mean_and_reasons_name_the_other():
    of_hero = r"(\w+) is proud of (his|her) "
    of_other = r"(\w+) (?:gives|hands|brings) (him|her) "
    reason = r"So (\w+) is happy because (\w+) is"
    found = {of_hero: [], of_other: [], reason: []}
    for text, _, _ in some_stories(3000):
        for pattern, pairs in found.items():
            pairs += re.findall(pattern, text)
    assert all(len(pairs) > 50 for pairs in found.values())
    assert all((name in FACTS["boy"]) == (word == "his") for name, word in found[of_hero])
    assert all((name in FACTS["boy"]) == (word == "her") for name, word in found[of_other])
    assert all((a in FACTS["boy"]) != (b in FACTS["boy"]) for a, b in found[reason])


def test_halves_belong_together():
    """Three or more names, colors, things or places recur after any cut: halves can be matched."""
    for text, _, _ in some_stories(300):
        lines = text.splitlines(keepends=True)
        for cut in range(1, len(lines)):
            first, second = "".join(lines[:cut]), "".join(lines[cut:])
            shared = set(names(first)) & set(names(second))
            for kind in "color", "thing", "place":
                shared |= set(words(kind, first)) & set(words(kind, second))
            assert len(shared) >= 3, (first, second)


def test_documents():
    told = list(documents(3000))
    texts = [text for text, _ in told]
    assert len(set(texts)) == 3000
    assert told[:100] == list(documents(100))
    assert not set(texts) & {text for text, _ in documents(1000, seed=2)}

    nats = sum(nats for _, nats in told)
    assert 0.12 < nats / sum(len(text) for text in texts) < 0.16
    # A language with an entropy of H nats has at least e^H texts.
    assert exp(nats / 3000) > 1e11


def test_a_story_that_is_told_again_is_left_out(monkeypatch):
    told = iter([stories.Story(text, 1.0, []) for text in "aabacab"])
    monkeypatch.setattr(stories, "story", lambda rng: next(told))
    assert [text for text, _ in documents(3)] == ["a", "b", "c"]
