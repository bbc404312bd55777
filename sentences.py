"""sentences.py: where sentences end, and where nsp and sop cut a text in two, so that the cut gives
no answer away.

Skip this file on a first reading. A cut would reveal the label if only a true B began with a
newline, or only a false B began inside a word. Before these rules, the text at the cut alone
revealed 57% to 97% of the labels (NOTES.md, section 3).

So cuts are made where a sentence has ended, or in a text without sentences, such as text8, between
words. The look of a cut is the mark before it, the whitespace (blanks) on both sides, and the kind
of letter after it: after the newline of "end.\n  Next", a full stop, the blanks "\n" and "  ", a
capital. If possible, all cuts of a row look the same. The choice of a cut must not depend on the
sentences next to it: "the cut nearest to a place" depends on both of these, and only a true pair
contains both.

A place is a number of tokens: place 3 lies after the third token of a chunk.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from itertools import accumulate, pairwise

import numpy as np
from numpy.random import Generator

from tokenizer import Tokenizer

# A sentence ends after a mark that a blank follows (the blank belongs to the next sentence), after
# the last newline in a run of newlines, and after Chinese and Japanese marks.
ENDS = rb"[.!?](?=[ \t])|\n(?!\n)|" + "(?:。|！|？)(?!。|！|？|」|』|”|\r|\n)".encode()
SENTENCE_END = re.compile(ENDS)
# What stands after a place: blanks, then a capital, a letter that is small or not ASCII, a digit,
# or none of these. Before it, read backwards: blanks, then a mark or none.
AFTER = re.compile(rb"(\s*)(?:([A-Z])|([a-z\x80-\xff])|([0-9])|)")
BEFORE = re.compile(rb"\s*(?:[.!?,;:]|" + "？|！|。".encode()[::-1] + b"|)")


def cuts_alike(first, other, rng: Generator, tok: Tokenizer, room: int) -> tuple[int, int]:
    """One cut in each chunk, after a sentence or else after a word, both with the same look. Both
    are at the same share of their chunk's cuts with this look. If the chunks have no look in
    common, each is at this share of its chunk. `room`: tokens for A and B in a row."""
    share = rng.random()
    for find_cuts in (sentence_cuts, word_cuts):
        looks, other_looks = find_cuts(first, tok), find_cuts(other, tok)
        both = set(looks.values()) & set(other_looks.values())
        shared = [look for look in [*looks.values(), *other_looks.values()] if look in both]
        if shared:
            look = shared[rng.integers(len(shared))]
            cut = cut_at(share, cuts_with(look, looks), first, room)
            return cut, cut_at(share, cuts_with(look, other_looks), other, room)
    return 1 + int(share * (len(first) - 1)), 1 + int(share * (len(other) - 1))


def cut_at(share: float, cuts: list[int], chunk: np.ndarray, room: int) -> int:
    """The cut at this share of the cuts. In a chunk of more than `room` tokens, cuts near its ends
    are skipped if there are others: a short side would leave the row half empty."""
    edge = (len(chunk) - room) // 4
    cuts = [cut for cut in cuts if edge <= cut <= len(chunk) - edge] or cuts
    return cuts[int(share * len(cuts))]


def length_of_second(chunks, cuts, rng: Generator, tok: Tokenizer, room: int) -> int:
    """How many tokens of the text after a cut become B. The length may depend on both cuts, but not
    on the label. It is drawn from 3/4 of the shorter of the two texts after the cuts up to all but
    one of its tokens (one token if there is only one): B must not show where its document ends. If
    A and B then do not both fit, B gets at most a random share of the room, 1/4 to 3/4; A gets the
    rest."""
    after = [length_without_blanks(chunk, tok) - cut for chunk, cut in zip(chunks, cuts)]
    n = max(min(after), 1)
    length = rng.integers(max(3 * n // 4, 1), max(n, 2))
    if max(cuts) + length > room:
        length = min(length, rng.integers(max(room // 4, 1), 3 * room // 4 + 1))
    return int(length)


def runs_of_sentences(chunk, rng: Generator, tok: Tokenizer, room: int, whole_document: bool):
    """Two adjacent runs of whole sentences, as long as `room` allows, or None if no two fit."""
    bounds = bounds_alike(chunk, tok, whole_document)
    # last[i]: a row that starts at bounds[i] can reach bounds[last[i]] and no further.
    last = [bisect_right(bounds, start + room) - 1 for start in bounds]
    # It is full if a row that started one sentence earlier would end earlier.
    is_full = [end > end_before for end, end_before in zip(last, [-1, *last])]
    starts = [i for i, end in enumerate(last) if is_full[i] and end - i >= 2]  # two sentences
    if not starts:
        return None
    i = starts[rng.integers(len(starts))]
    cut = bounds[rng.integers(i + 1, last[i])]
    return chunk[bounds[i] : cut], chunk[cut : bounds[last[i]]]


def bounds_alike(chunk: np.ndarray, tok: Tokenizer, whole_document: bool) -> list[int]:
    """Where sentences begin and end, or words if there are no sentences: only places with the most
    common look. The two ends of a whole document are added if they have this look, too; a part of a
    document begins and ends inside a sentence."""
    looks = sentence_cuts(chunk, tok) or word_cuts(chunk, tok)
    if not looks:
        return []
    look = commonest(looks.values())
    bounds = cuts_with(look, looks)
    if whole_document:
        spelled = Spelled(chunk, tok)
        before, after = look
        if spelled.look_after(0) == after:
            bounds = [0, *bounds]
        for end in (len(chunk), length_without_blanks(chunk, tok)):
            if end > bounds[-1] and spelled.look_before(end) == before:
                return [*bounds, end]
    return bounds


def broken_off(chunk, rng: Generator, tok: Tokenizer, room: int, whole_document: bool):
    """Two parts of a chunk, in order, if no two runs of whole sentences fit."""
    two = two_beginnings(chunk, rng, tok, room, whole_document)
    return two or two_sides(chunk, rng, tok, room)


def two_beginnings(chunk, rng: Generator, tok: Tokenizer, room: int, whole_document: bool):
    """The beginnings, equally long (at most 3/4 of the shorter one), of two successive sentences
    among those that start with the most common look; None if there are no two."""
    spelled = Spelled(chunk, tok)
    starts = [0] * whole_document + spelled.sentence_ends()
    # Skip blanks at a sentence's start: a document's first sentence has none, which would show.
    starts = sorted({spelled.skip_blanks(start) for start in starts} - {len(chunk)})
    looks = [spelled.look_after(start) for start in starts]
    sentences = np.split(chunk, starts)[1:]
    common = commonest(looks)
    alike = [sentence for sentence, look in zip(sentences, looks) if look == common]
    if len(alike) < 2:
        return None
    i = rng.integers(len(alike) - 1)
    # They are measured without the blanks at their ends: a document's last sentence has none.
    shorter = min(length_without_blanks(sentence, tok) for sentence in alike[i : i + 2])
    length = max(min(room // 2, 3 * shorter // 4), 1)
    return tuple(sentence[:length] for sentence in alike[i : i + 2])


def two_sides(chunk: np.ndarray, rng: Generator, tok: Tokenizer, room: int):
    """Both sides of a cut, between words of a sentence if possible, in a part of the chunk that is
    as long as the room. An eighth of the chunk is left out at each end (of a short chunk, three
    tokens or a quarter): a document's own ends would reveal the order. So would a sentence that
    ends at the cut."""
    length = max(length_without_blanks(chunk, tok), 2)
    edge = max(length // 8, min(length // 4, 3))
    end = length - edge
    start = edge + rng.integers(max(end - edge - room, 0) + 1)
    places = range(start, min(start + room, end) + 1)
    spelled = Spelled(chunk, tok)
    in_sentences = {*spelled.word_ends()} - {*spelled.sentence_ends()}
    between_words = [place for place in places if place in in_sentences]
    if len(between_words) > 2:
        places = between_words
    cut = places[rng.integers(1, len(places) - 1)]
    return chunk[places[0] : cut], chunk[cut : places[-1]]


def length_without_blanks(chunk: np.ndarray, tok: Tokenizer) -> int:
    """The chunk's length without the whitespace at its end; at least 1."""
    length = len(chunk)
    while length > 1 and tok.bytes[chunk[length - 1]].isspace():
        length -= 1
    return length


def sentence_cuts(chunk: np.ndarray, tok: Tokenizer) -> dict[int, tuple]:
    """The places in a chunk where a sentence has ended, each with its look."""
    spelled = Spelled(chunk, tok)
    return spelled.looks(spelled.sentence_ends())


def word_cuts(chunk: np.ndarray, tok: Tokenizer) -> dict[int, tuple]:
    """The same for places after a word, before the whitespace that follows it."""
    spelled = Spelled(chunk, tok)
    return spelled.looks(spelled.word_ends())


def cuts_with(look: tuple, looks: dict[int, tuple]) -> list[int]:
    return [place for place in looks if looks[place] == look]


def commonest(looks) -> tuple | None:
    """Of looks that are equally common, the first; of no looks, None."""
    counts = Counter(looks)
    return max(counts, key=counts.get, default=None)


class Spelled:
    """A chunk's text, where its sentences end, and what stands around its places.

    >>> from tokenizer import get_tokenizer
    >>> tok = get_tokenizer("bytes")
    >>> spelled = Spelled(np.array(tok.encode("end.\\n  Next 3.5? Yes.")), tok)
    >>> spelled.sentence_ends()
    [5, 16]
    >>> spelled.look_before(5), spelled.look_after(5)
    (b'.\\n', (b'  ', 2))
    """

    def __init__(self, chunk: np.ndarray, tok: Tokenizer):
        self.pieces = [tok.bytes[id] for id in chunk.tolist()]
        self.text = b"".join(self.pieces)
        self.backwards = self.text[::-1]
        self.offsets = list(accumulate(map(len, self.pieces), initial=0))  # of each place

    def sentence_ends(self) -> list[int]:
        """The places where a sentence has ended, in order, without the chunk's end. If it ends
        inside a piece, as in ". ", the piece belongs to it."""
        ends = [found.end() for found in SENTENCE_END.finditer(self.text)]
        places = {bisect_left(self.offsets, end) for end in ends}
        return sorted(places - {len(self.pieces)})

    def word_ends(self) -> list[int]:
        """The places after a word and before the whitespace that follows it."""
        pairs = enumerate(pairwise(self.pieces), start=1)
        return [i for i, (a, b) in pairs if b[:1].isspace() and not a[-1:].isspace()]

    def looks(self, places: list[int]) -> dict[int, tuple]:
        """The places, each with its look."""
        return {place: (self.look_before(place), self.look_after(place)) for place in places}

    def look_before(self, place: int) -> bytes:
        """All the blanks that end at a place, and the mark before them."""
        return BEFORE.match(self.backwards, len(self.text) - self.offsets[place])[0][::-1]

    def look_after(self, place: int) -> tuple[bytes, int]:
        """All the blanks that begin at a place, and the kind of letter after them: the number of
        AFTER's group (1: none of them)."""
        found = AFTER.match(self.text, self.offsets[place])
        return found[1], found.lastindex

    def skip_blanks(self, place: int) -> int:
        """The first place, from this one on, that is not before a token of whitespace."""
        while place < len(self.pieces) and self.pieces[place].isspace():
            place += 1
        return place
