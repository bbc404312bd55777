"""sentences.py: where sentences end, and where nsp and sop cut a text in two, so that the cut gives
no answer away.

Skip this file on a first reading. A cut would reveal the label if only a true B began with a
newline, or only a false B began inside a word. Before these rules, the text at the cut alone
revealed 57% to 97% of the labels (NOTES.md, section 3).

So cuts are made where a sentence has ended, or in a text without sentences, such as text8, between
words. The look of a cut is the mark before it, the whitespace (blanks) on both sides, and the kind
of character after it. In "end.\n  Next", the cut after the newline has a full stop, the blanks "\n"
and "  ", and a capital. If possible, all cuts of a row look the same. The choice of a cut must not
depend on the sentences next to it: "the cut nearest to a place" depends on both of these, and only
a true pair contains both.

A place is a number of tokens: place 3 lies after the third token of a chunk.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from itertools import accumulate, pairwise

import numpy as np
from numpy.random import Generator

from tokenizer import Tokenizer

# A sentence ends
# - after ., ! or ? if a space or a tab follows (it belongs to the next sentence),
# - after the last newline of a run of newlines,
# - after a Chinese or Japanese mark, unless another mark, a closing quote or bracket, or the end of
#   the line follows.
MARKS = ["。", "！", "？"]
CLOSING = [*MARKS, *"」』”’）》】\"')\r\n"]
END = rf"[.!?](?=[ \t])|\n(?!\n)|(?:{'|'.join(MARKS)})(?!{'|'.join(map(re.escape, CLOSING))})"
SENTENCE_END = re.compile(END.encode())
# What stands after a place: blanks (at most 100 are compared), then a kind of character.
KINDS = rb"(?P<capital>[A-Z])|(?P<small>[a-z\x80-\xff])|(?P<digit>[0-9])|(?P<other>)"
AFTER = re.compile(rb"(?P<blanks>\s{0,100})(?:" + KINDS + b")")
# What stands before a place: a mark or none, then blanks. The text is read backwards, so the three
# bytes of each Chinese mark are reversed.
REVERSED = b"|".join(mark.encode()[::-1] for mark in MARKS)
BEFORE = re.compile(rb"\s{0,100}(?:[.!?,;:]|" + REVERSED + b"|)")


def cuts_alike(first, other, rng: Generator, tok: Tokenizer, room: int) -> tuple[int, int]:
    """One cut in each chunk, both with the same look: where sentences have ended or, if no two such
    cuts look alike, after words. One random share chooses both: at 0.5, each is the middle one of
    its chunk's cuts with this look. If no two look alike at all, each chunk is cut at this share of
    its tokens. `room`: tokens for A and B in a row."""
    share = rng.random()
    spelled, other_spelled = Spelled(first, tok), Spelled(other, tok)
    for ends in (Spelled.sentence_ends, Spelled.word_ends):
        looks = spelled.looks(ends(spelled))
        other_looks = other_spelled.looks(ends(other_spelled))
        in_both = set(looks.values()) & set(other_looks.values())
        # In the order of the texts: that of a set differs between processes. A look that occurs
        # often is drawn often.
        common = [look for look in [*looks.values(), *other_looks.values()] if look in in_both]
        if common:
            look = common[rng.integers(len(common))]
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
    on the label. It is drawn from 9/10 of the shorter of the two texts after the cuts up to all but
    one of its tokens (of 10 tokens or fewer: all but one, at least one): B must not show where its
    document ends. If A and B then do not both fit, B gets at most a random share of the room, 1/4
    to 3/4; A gets the rest."""
    after = [length_without_blanks(chunk, tok) - cut for chunk, cut in zip(chunks, cuts)]
    n = max(min(after), 1)
    length = rng.integers(max(9 * n // 10, 1), max(n, 2))
    if max(cuts) + length > room:
        length = min(length, rng.integers(max(room // 4, 1), 3 * room // 4 + 1))
    return int(length)


def runs_of_sentences(chunk, rng: Generator, tok: Tokenizer, room: int, whole_document: bool):
    """Two adjacent runs of whole sentences, as long as `room` allows, or None if no two fit."""
    bounds = bounds_alike(chunk, tok, whole_document)
    # last[i]: a row that starts at bounds[i] can reach bounds[last[i]] and no further.
    last = [bisect_right(bounds, start + room) - 1 for start in bounds]
    # If a row that starts a sentence earlier reaches as far, this one has room for that sentence.
    is_full = [end > end_if_earlier for end, end_if_earlier in zip(last, [-1, *last])]
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
    spelled = Spelled(chunk, tok)
    looks = spelled.looks(spelled.sentence_ends() or spelled.word_ends())
    if not looks:
        return []
    look = commonest(looks.values())
    bounds = cuts_with(look, looks)
    if whole_document:
        before, after = look
        if spelled.look_after(0) == after:
            bounds = [0, *bounds]
        # The document's end lies after the blanks that it ends with, or else before them.
        for end in (len(chunk), length_without_blanks(chunk, tok)):
            if end > bounds[-1] and spelled.look_before(end) == before:
                return [*bounds, end]
    return bounds


def broken_off(chunk, rng: Generator, tok: Tokenizer, room: int, whole_document: bool):
    """Two parts of a chunk, in order, if no two runs of whole sentences fit."""
    two = two_beginnings(chunk, rng, tok, room, whole_document)
    return two or two_sides(chunk, rng, tok, room)


def two_beginnings(chunk, rng: Generator, tok: Tokenizer, room: int, whole_document: bool):
    """The beginnings of two sentences, equally long: at most 3/4 of the shorter one. Only sentences
    that start with the most common look count, and the two are next to each other among these. None
    if there are no two."""
    spelled = Spelled(chunk, tok)
    starts = spelled.sentence_ends()
    if whole_document:
        starts = [0, *starts]
    # Move each start past its blanks: a document's first sentence has none, which would show.
    solid = [place for place, piece in enumerate(spelled.pieces) if not piece.isspace()]
    indices = {bisect_left(solid, start) for start in starts}  # len(solid): only blanks follow
    starts = [solid[i] for i in sorted(indices - {len(solid)})]
    looks = [spelled.look_after(start) for start in starts]
    sentences = np.split(chunk, starts)[1:]  # without what stands before the first
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
    inside_sentences = {*spelled.word_ends()} - {*spelled.sentence_ends()}
    between_words = [place for place in places if place in inside_sentences]
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


def cuts_with(look: tuple, looks: dict[int, tuple]) -> list[int]:
    return [place for place in looks if looks[place] == look]


def commonest(looks) -> tuple | None:
    """Of looks that are equally common, the greatest; of no looks, None. (The first one would lead
    to cuts near a document's beginning, and the lengths of A and B would tell their order.)"""
    counts = Counter(looks)
    return max(counts, key=lambda look: (counts[look], look), default=None)


class Spelled:
    """A chunk as bytes: where sentences and words end, and what stands around these places.

    >>> from tokenizer import get_tokenizer
    >>> tok = get_tokenizer("bytes")
    >>> spelled = Spelled(np.array(tok.encode("end.\\n  Next 3.5? Yes.")), tok)
    >>> spelled.sentence_ends()
    [5, 16]
    >>> spelled.look_before(5), spelled.look_after(5)
    (b'.\\n', (b'  ', 'capital'))
    """

    def __init__(self, chunk: np.ndarray, tok: Tokenizer):
        self.pieces = [tok.bytes[id] for id in chunk.tolist()]
        self.text = b"".join(self.pieces)
        self.backwards = self.text[::-1]
        # The byte at which each place lies.
        self.offsets = list(accumulate(map(len, self.pieces), initial=0))

    def sentence_ends(self) -> list[int]:
        """The places where a sentence has ended, in order, without the chunk's end. Blanks that
        follow in the same piece, as in ". ", stay with it. If something else follows in the same
        piece, there is no place to cut."""
        places = set()
        for found in SENTENCE_END.finditer(self.text):
            place = bisect_left(self.offsets, found.end())
            rest = self.text[found.end() : self.offsets[place]]
            if not rest.strip(b" \t"):
                places.add(place)
        return sorted(places - {len(self.pieces)})

    def word_ends(self) -> list[int]:
        """The places after a word and before the whitespace that follows it."""
        pairs = enumerate(pairwise(self.pieces), start=1)
        return [i for i, (a, b) in pairs if b[:1].isspace() and not a[-1:].isspace()]

    def looks(self, places: list[int]) -> dict[int, tuple]:
        """The places, each with its look."""
        return {place: (self.look_before(place), self.look_after(place)) for place in places}

    def look_before(self, place: int) -> bytes:
        """The blanks that end at a place, and the mark before them."""
        return BEFORE.match(self.backwards, len(self.text) - self.offsets[place])[0][::-1]

    def look_after(self, place: int) -> tuple[bytes, str]:
        """The blanks that begin at a place, and the kind of character after them."""
        found = AFTER.match(self.text, self.offsets[place])
        return found["blanks"], found.lastgroup
