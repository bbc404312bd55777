"""stories.py: little consistent stories, a language whose every probability is known.

In real text, nobody can say which words a model should have guessed. Here, tables of words and
sentences and a state (who is there, who has how many of what, where they are) generate more than
10^11 short documents in plain English, one sentence a line. One of them, as the grammar writes it:

    >>> print(tell(State(np.random.default_rng(117226))), end="")
    At dawn, [Tom] and [Ann] run to the [park].
    There <Tom> has [2] [yellow] [books].
    At noon, [Ann] gives <him> [1] more.
    Now <he> has <3> <yellow> <books>.
    At dusk, they hurry from the <park> to the [barn].
    At night, [Tom] and <Ann> share <3> <yellow> <books> at the <barn>.

A word in <> is fixed by the text before it, a word in [] by the text before and after it together:
each has one right answer. The marks are removed from the text and become `Story.determined`.

Every choice is uniform over a list, and a text can arise in only one way, so -log p of a text is
the sum of the logarithms of those lists' lengths. Its average is the loss that no model can beat.
Stories are a laboratory: what holds here need not hold for what people write.
"""

import re
from collections.abc import Iterator
from itertools import combinations
from math import log
from typing import NamedTuple

import numpy as np

DEFAULT_SIZE = 20_000  # documents: 4.1 MB of text, in one or two seconds
MOST = 8  # things that somebody can have; never fewer than one
STEP = 3  # things that can come or go at once


class Event(NamedTuple):
    sign: int  # things come (+1), go (-1), or neither (0)
    then: list[str]  # one of these follows; "" means no sentence
    what: str
    feeling: str  # can follow a story's only event


# fmt: off
FACTS = {  # chosen when a story first mentions them, and true until it ends
    "boy":     ["Tom", "Ben", "Sam", "Max"],
    "girl":    ["Ann", "Eva", "Mia", "Zoe"],
    "n":       range(2, 6),
    "color":  ["red", "blue", "green", "yellow", "white", "black"],
    "thing":   ["ball", "bell", "book", "cup", "hat", "kite", "lamp", "shell"],
    "place":   ["barn", "beach", "farm", "lake", "market", "mill", "park", "river"],
    "look":    ["brave", "clever", "hungry", "shy", "tiny", "young"],
    "animal":  ["cat", "dog", "duck", "fox", "goat", "pony"],
}
WORDS = {  # chosen afresh each time
    "walk":    ["walk", "run", "hurry", "ride"],
    "gives":   ["gives", "hands", "brings"],
    "finds":   ["finds", "buys", "wins"],
    "loses":   ["loses", "sells", "forgets"],
    "follows": ["follows", "greets", "likes", "trusts"],
    "kind":    ["kind", "gentle", "good"],
    "count":   ["count", "hide", "pack", "share"],
    "draws":   ["draws", "paints", "waits for"],
}
TIMES = ["At dawn", "At nine", "At noon", "At four", "At dusk"]  # always in this order

OPENINGS = [
    "{time}, [{hero}] and [{friend}] {walk} to the [{place}].\n"
    "There <{hero}> has [{n}] [{color}] [{things}].",
    "Today [{hero}] has [{n}] [{color}] [{things}].\n"
    "{time}, <{he}> and [{friend}] {walk} to the [{place}].",
    "{time}, [{hero}] shows [{friend}] [{n}] [{color}] [{things}] at the [{place}].",
]
NOW = "Now <{he}> has <{n}> <{color}> <{things}>."
MORE = [NOW, "That <makes> <{n}>."]
LESS = [NOW, "That <leaves> <{n}>."]
HELLO = ["The <{look}> <{animal}> {follows} " + whom for whom in ("{hero}.", "{friend}.", "them.")]
EVENTS = [
    Event(+1, MORE, "{time}, [{friend}] {gives} <{him}> [{step}] more.",
          "So [{hero}] is <happy> because <{friend}> is {kind}."),
    Event(-1, LESS, "{time}, [{hero}] {gives} <{friend_him}> [{step}] of them.",
          "So [{friend}] is <happy> because <{hero}> is {kind}."),
    Event(+1, MORE, "{time}, [{hero}] {finds} [{step}] more.",
          "So [{hero}] is <proud> of <{his}> <{n}> <{color}> <{things}>."),
    Event(-1, LESS, "{time}, [{hero}] {loses} [{step}] of them.",
          "So [{hero}] is <sad> because <{he}> has only <{n}> left."),
    Event(0, HELLO, "{time}, they meet a [{look}] [{animal}].",
          "They are <glad> because the <{animal}> is {kind}."),
    Event(0, [""], "{time}, they {walk} from the <{old_place}> to the [{place}].",
          "They are <tired> because the <{place}> is far from the <{old_place}>."),
]
ENDINGS = [
    "At night, [{hero}] and <{friend}> {count} <{n}> <{color}> <{things}> at the <{place}>.",
    "At night, [{hero}] and <{friend}> leave the <{place}> with <{n}> <{color}> <{things}>.",
    "At night, [{friend}] {draws} <{hero}> at the <{place}> with <{n}> <{color}> <{things}>.",
]
# fmt: on


class Span(NamedTuple):
    start: int  # in characters of the text
    stop: int
    kind: str  # "past": fixed by the text before; "both": by the text before and after


class Story(NamedTuple):
    text: str  # three to seven sentences, each ends with ".\n"
    nats: float  # -log of the text's probability, its end included
    determined: list[Span]  # one word each, in the order of the text

    @property
    def is_full(self) -> bool:
        """Whether no sentence could be added: it has two events, or a feeling after the only one.
        (A proud feeling has no "because", so its stories are not counted, which does no harm.) In
        other stories, a gap may rightly be filled with its word and one more event."""
        n_times = sum(f"{time}," in self.text for time in TIMES)
        return n_times == 3 or "because" in self.text


class State(dict):
    """Everything that is true in a story so far, and the cost of choosing it: -log p, in nats."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        self.nats = 0.0

    def choose(self, options):
        self.nats += log(len(options))
        return options[self.rng.integers(len(options))]

    def __missing__(self, word):
        """Python calls this for a word that is not in the state. A fact is chosen once and kept;
        any other word is chosen again each time."""
        if word == "things":
            return self["thing"] if self["n"] == 1 else self["thing"] + "s"
        if word in WORDS:
            return self.choose(WORDS[word])
        self[word] = self.choose(FACTS[word])
        return self[word]

    def change(self, event):
        """Apply what an event changes: the number of things, or the place."""
        if event.sign:
            room = MOST - self["n"] if event.sign > 0 else self["n"] - 1
            self["step"] = self.choose(range(1, min(STEP, room) + 1))
            self["n"] += event.sign * self["step"]
        if "{old_place}" in event.what:
            here = self["place"]
            self["old_place"] = here
            self["place"] = self.choose([place for place in FACTS["place"] if place != here])


def tell(state: State) -> str:
    """A whole story, with its marks."""
    # A boy and a girl, so that "he" and "she" are never ambiguous.
    boy = [state["boy"], "he", "him", "his"]
    girl = [state["girl"], "she", "her", "her"]
    hero, friend = state.choose([(boy, girl), (girl, boy)])
    state["hero"], state["he"], state["him"], state["his"] = hero
    state["friend"] = friend[0]
    state["friend_him"] = friend[2]

    n_events = state.choose([1, 2])
    times = state.choose(list(combinations(TIMES, 1 + n_events)))
    state["time"] = times[0]
    sentences = [state.choose(OPENINGS).format_map(state)]

    untold = list(EVENTS)
    for time in times[1:]:
        event = state.choose([e for e in untold if 1 <= state["n"] + e.sign <= MOST])
        untold.remove(event)
        state["time"] = time
        state.change(event)
        sentences.append(event.what.format_map(state))
        sentences.append(state.choose(event.then).format_map(state))
    if n_events == 1 and state.choose([True, False]):
        sentences.append(event.feeling.format_map(state))
    sentences.append(state.choose(ENDINGS).format_map(state))
    return "".join(sentence + "\n" for sentence in sentences if sentence)


def story(rng: np.random.Generator) -> Story:
    """One story.

    >>> text, nats, determined = story(np.random.default_rng(117226))
    >>> text[:40], round(nats, 2)
    ('At dawn, Tom and Ann run to the park.\\nTh', 28.39)
    >>> [text[start:stop] for start, stop, kind in determined if kind == "both"]
    ['Tom', 'Ann', 'park', '2', 'yellow', 'books', 'Ann', '1', 'barn', 'Tom']
    """
    state = State(rng)
    text = ""
    determined = []
    for piece in re.split(r"(<\w+>|\[\w+\])", tell(state)):
        word = piece.strip("<>[]")
        if word != piece:
            kind = "past" if piece[0] == "<" else "both"
            determined.append(Span(len(text), len(text) + len(word), kind))
        text += word
    return Story(text, state.nats, determined)


def documents(n: int, seed: int = 1) -> Iterator[tuple[str, float]]:
    """`n` different stories, each with its nats."""
    rng = np.random.default_rng(seed)
    told = set()
    while len(told) < n:
        text, nats, _ = story(rng)
        if text not in told:
            told.add(text)
            yield text, nats
