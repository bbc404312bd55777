"""sentences.py: where nsp and sop cut a text in two, so that the cut gives no answer away.

Skip this file on a first reading. A cut would reveal the label if only a true B began with a
newline, or only a false B began inside a word. Before these rules, the text at the cut alone
revealed 57% to 97% of the labels (NOTES.md, section 3).

So cuts are made where a sentence has ended, or in a text without sentences, such as text8, between
words. The look of a cut is the mark before it, the whitespace (blanks) on both sides, and the kind
of letter after it: after the newline of "end.\n  Next", a full stop, the blanks "\n" and "  ", a
capital. If possible, all cuts of a row look the same; each look has a checksum. The choice of a cut
must not depend on the sentences next to it: "the cut nearest to a place" depends on both of these,
and only a true pair contains both.
"""

import zlib

import numpy as np
from numpy.random import Generator

from tokenizer import Tokenizer


def cuts_alike(first, other, rng: Generator, tok: Tokenizer, room: int) -> tuple[int, int]:
    """One cut in each chunk, after a sentence or else after a word, both with the same look. Both
    are at the same share of their chunk's cuts with this look. If the chunks have no look in
    common, each is at this share of its chunk. `room`: tokens for A and B in a row."""
    share = rng.random()
    for find_cuts in (sentence_cuts, word_cuts):
        cuts, looks = find_cuts(first, tok)
        others, other_looks = find_cuts(other, tok)
        of_both = np.concatenate([looks, other_looks])
        shared = of_both[np.isin(of_both, np.intersect1d(looks, other_looks))]
        if len(shared):
            look = rng.choice(shared)
            cut = cut_at(share, cuts[looks == look], first, room)
            return cut, cut_at(share, others[other_looks == look], other, room)
    return 1 + int(share * (len(first) - 1)), 1 + int(share * (len(other) - 1))


def cut_at(share: float, cuts: np.ndarray, chunk: np.ndarray, room: int) -> int:
    """The cut at this share of the cuts. In a chunk of more than `room` tokens, cuts near its ends
    are skipped if there are others: a short side would leave the row half empty."""
    edge = (len(chunk) - room) // 4
    inner = cuts[(cuts >= edge) & (cuts <= len(chunk) - edge)]
    cuts = inner if len(inner) else cuts
    return int(cuts[int(share * len(cuts))])


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
    last = np.searchsorted(bounds, bounds + room, side="right") - 1
    fits_two = last - np.arange(len(bounds)) >= 2  # two sentences or more
    is_full = np.diff(last, prepend=-1) > 0  # starting one sentence earlier, it would end earlier
    starts = np.flatnonzero(fits_two & is_full)
    if len(starts) == 0:
        return None
    i = rng.choice(starts)
    cut = bounds[rng.integers(i + 1, last[i])]
    return chunk[bounds[i] : cut], chunk[cut : bounds[last[i]]]


def bounds_alike(chunk: np.ndarray, tok: Tokenizer, whole_document: bool) -> np.ndarray:
    """Where sentences begin and end, or words if there are no sentences: only places with the most
    common look. The two ends of a whole document are added if they have this look, too; a part of a
    document begins and ends inside a sentence."""
    bounds, looks = sentence_cuts(chunk, tok)
    if len(bounds) == 0:
        bounds, looks = word_cuts(chunk, tok)
    if len(bounds) == 0:
        return bounds
    bounds = bounds[looks == commonest(looks)]
    if whole_document:
        first = bounds[0]
        if look_after(chunk, 0, tok) == look_after(chunk, first, tok):
            bounds = np.append(0, bounds)
        end = len(chunk)
        wanted = look_before(chunk, first, tok)
        if look_before(chunk, end, tok) != wanted:
            end = length_without_blanks(chunk, tok)
        if end > bounds[-1] and look_before(chunk, end, tok) == wanted:
            bounds = np.append(bounds, end)
    return bounds


def broken_off(chunk, rng: Generator, tok: Tokenizer, room: int, whole_document: bool):
    """Two parts of a chunk, in order, if no two runs of whole sentences fit."""
    two = two_beginnings(chunk, rng, tok, room, whole_document)
    return two or two_sides(chunk, rng, tok, room)


def two_beginnings(chunk, rng: Generator, tok: Tokenizer, room: int, whole_document: bool):
    """The beginnings, equally long (at most 3/4 of the shorter one), of two successive sentences
    among those that start with the most common look; None if there are no two."""
    starts, _ = sentence_cuts(chunk, tok)
    if whole_document:
        starts = np.append(0, starts)
    # Skip blanks at a sentence's start: a document's first sentence has none, which would show.
    solid = np.flatnonzero(~tok.is_blank[chunk])
    next_solid = np.searchsorted(solid, starts)
    starts = np.unique(solid[next_solid[next_solid < len(solid)]])
    looks = look_after(chunk, starts, tok)
    alike = np.flatnonzero(looks == commonest(looks)) if len(starts) else []
    if len(alike) < 2:
        return None
    # Sentences are measured without the blanks at their ends: a document's last one has none.
    stops = np.append(starts[1:], len(chunk))
    lengths = 1 + solid[np.searchsorted(solid, stops) - 1] - starts
    i = rng.integers(len(alike) - 1)
    two = alike[i : i + 2]
    length = max(min(room // 2, 3 * lengths[two].min() // 4), 1)
    return tuple(chunk[start : start + length] for start in starts[two])


def two_sides(chunk: np.ndarray, rng: Generator, tok: Tokenizer, room: int):
    """Both sides of a cut, between words of a sentence if possible, in a part of the chunk that is
    as long as the room. An eighth of the chunk is left out at each end (of a short chunk, three
    tokens or a quarter): a document's own ends would reveal the order. So would a sentence that
    ends at the cut."""
    length = max(length_without_blanks(chunk, tok), 2)
    edge = max(length // 8, min(length // 4, 3))
    end = length - edge
    start = edge + rng.integers(max(end - edge - room, 0) + 1)
    places = np.arange(start, min(start + room, end) + 1)
    words, _ = word_cuts(chunk, tok)
    in_sentences = np.setdiff1d(words, 1 + np.flatnonzero(tok.sentence_ends(chunk)))
    between_words = np.intersect1d(places, in_sentences)
    if len(between_words) > 2:
        places = between_words
    cut = places[rng.integers(1, len(places) - 1)]
    return chunk[places[0] : cut], chunk[cut : places[-1]]


def length_without_blanks(chunk: np.ndarray, tok: Tokenizer) -> int:
    """The chunk's length without the whitespace at its end; at least 1."""
    return 1 + np.flatnonzero(~tok.is_blank[chunk]).max(initial=0)


def sentence_cuts(chunk: np.ndarray, tok: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """(n,) places in a chunk where a sentence has ended, and (n,) checksums of their looks."""
    return with_looks(1 + np.flatnonzero(tok.sentence_ends(chunk)), chunk, tok)


def word_cuts(chunk: np.ndarray, tok: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """The same for places after a word, before the whitespace that follows it."""
    ends_word = (tok.ends_with[chunk[:-1]] == 0) & (tok.begins_with[chunk[1:]] > 0)
    return with_looks(1 + np.flatnonzero(ends_word), chunk, tok)


def with_looks(cuts: np.ndarray, chunk: np.ndarray, tok: Tokenizer):
    """The cuts, and the checksums of their looks."""
    return cuts, (look_before(chunk, cuts, tok) << 32) + look_after(chunk, cuts, tok)


def look_before(chunk: np.ndarray, places, tok: Tokenizer) -> np.ndarray:
    """(n,) places -> (n,) checksums of all the blanks that end there, and of the mark before them;
    0 for neither."""
    places = np.atleast_1d(places)
    return checksums(tok.ends_with[chunk], tok.is_blank[chunk], tok.mark[chunk], places)


def look_after(chunk: np.ndarray, places, tok: Tokenizer) -> np.ndarray:
    """The same for the blanks that begin at each place, and for the kind of letter after them."""
    back = chunk[::-1]
    places = len(chunk) - np.atleast_1d(places)
    return checksums(tok.begins_with[back], tok.is_blank[back], tok.letter[back], places)


def checksums(ends: np.ndarray, is_blank: np.ndarray, kinds: np.ndarray, places: np.ndarray):
    """For each of (n,) places, a checksum of the blanks that end there and of the kind of character
    before them. For each token, `ends` is the number of the whitespace at its end, `is_blank` says
    whether it is nothing else, and `kinds` is the kind of its last other character.

    >>> ends = np.array([0, 7, 8, 0, 7, 0, 7])  # a letter, two blanks, twice a letter and a blank
    >>> kinds = np.array([0, 0, 0, 0, 0, 5, 0])  # the last letter is of another kind
    >>> a, b, c, d, e = checksums(ends, ends > 0, kinds, np.array([1, 2, 3, 5, 7])).tolist()
    >>> a == 0, b == d, b == c, d == e
    (True, True, False, False)
    """
    solid = np.flatnonzero(~is_blank)
    n_before = np.searchsorted(solid, places)  # solid tokens before each place
    first = np.append(0, solid + 1)[n_before]  # first token of the blanks
    kind = np.append(0, kinds[solid])[n_before]
    first -= (first > 0) & (ends[first - 1] > 0)  # the token before may end with whitespace, too
    data = ends.tobytes()  # slices of bytes are faster than slices of arrays
    starts = (first * ends.itemsize).tolist()
    stops = (places * ends.itemsize).tolist()
    # A CRC may start from any number: here, from the kind.
    found = [zlib.crc32(data[a:b], k) for a, b, k in zip(starts, stops, kind.tolist())]
    return np.array(found, np.int64)


def commonest(looks: np.ndarray) -> int:
    different, counts = np.unique(looks, return_counts=True)
    return different[counts.argmax()]
