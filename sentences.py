"""sentences.py: where nsp and sop cut a text in two, so that the cut gives no answer away.

Skip this file on a first reading. A cut would reveal the label if only a true B began with a
newline, or only a false B began inside a word. Before these rules, the text at the cut alone
revealed 66% to 97% of the labels (NOTES.md, section 3).

So cuts are made where a sentence has ended, or in a text without sentences, such as text8, between
words. The whitespace on each side of a cut is called its blanks: the cut after the newline of
"end.\n  Next" has the blanks "\n" and "  ". If possible, all cuts of a row have the same pair of
blanks; each pair has a checksum. The choice of a cut must not depend on the sentences next to it:
"the cut nearest to a place" depends on both of these, and only a true pair contains both.
"""

import zlib

import numpy as np
from numpy.random import Generator

from tokenizer import Tokenizer


def cuts_alike(first, other, rng: Generator, tok: Tokenizer, room: int) -> tuple[int, int]:
    """One cut in each chunk, after a sentence or else after a word, with the same blanks around
    both. Both are at the same share of their chunk's cuts with these blanks. If the chunks have no
    blanks in common, both are at the same share of its length. `room`: tokens for A and B in a row.
    """
    share = rng.random()
    for find_cuts in (sentence_cuts, word_cuts):
        cuts, blanks = find_cuts(first, tok)
        others, other_blanks = find_cuts(other, tok)
        of_both = np.concatenate([blanks, other_blanks])
        shared = of_both[np.isin(of_both, np.intersect1d(blanks, other_blanks))]
        if len(shared):
            kind = rng.choice(shared)
            cut = cut_at(share, cuts[blanks == kind], first, room)
            return cut, cut_at(share, others[other_blanks == kind], other, room)
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
    """Where sentences begin and end: only places with the most common blanks around them. The two
    ends of a whole document are added if they look the same: their blanks do, and the end has a
    mark, such as a full stop, that another bound has, too. A part of a document begins and ends
    inside a sentence. If there are no sentences: where words end. A document's own ends are then
    left out, because a capital letter or a full stop would show them."""
    bounds, blanks = sentence_cuts(chunk, tok)
    if len(bounds) == 0:
        bounds, blanks = word_cuts(chunk, tok)
        whole_document = False
    if len(bounds) == 0:
        return bounds
    bounds = bounds[blanks == commonest(blanks)]
    if whole_document:
        first = bounds[0]
        marks = marks_before(chunk, bounds, tok)
        if blanks_after(chunk, 0, tok) == blanks_after(chunk, first, tok):
            bounds = np.append(0, bounds)
        end = len(chunk)
        wanted = blanks_before(chunk, first, tok)
        if blanks_before(chunk, end, tok) != wanted:
            end = length_without_blanks(chunk, tok)
        same_blanks = blanks_before(chunk, end, tok) == wanted
        if end > bounds[-1] and same_blanks and marks_before(chunk, [end], tok)[0] in marks:
            bounds = np.append(bounds, end)
    return bounds


def marks_before(chunk: np.ndarray, places, tok: Tokenizer) -> list[bytes]:
    """(n,) places -> the last byte before each that is not whitespace, such as b"."; b"" if there
    is none."""
    solid = np.flatnonzero(~tok.is_blank[chunk])
    n_before = np.searchsorted(solid, places)  # solid tokens before each place
    return [tok.bytes[chunk[solid[n - 1]]].rstrip()[-1:] if n else b"" for n in n_before]


def broken_off(chunk, rng: Generator, tok: Tokenizer, room: int, whole_document: bool):
    """Two parts of a chunk, in order, if no two runs of whole sentences fit."""
    two = two_beginnings(chunk, rng, tok, room, whole_document)
    return two or two_sides(chunk, rng, tok, room)


def two_beginnings(chunk, rng: Generator, tok: Tokenizer, room: int, whole_document: bool):
    """The beginnings, equally long (at most 3/4 of the shorter one), of two successive sentences
    among those that start with the most common blanks; None if there are no two."""
    starts, _ = sentence_cuts(chunk, tok)
    if whole_document:
        starts = np.append(0, starts)
    # Skip blanks at a sentence's start: a document's first sentence has none, which would show.
    solid = np.flatnonzero(~tok.is_blank[chunk])
    next_solid = np.searchsorted(solid, starts)
    starts = np.unique(solid[next_solid[next_solid < len(solid)]])
    blanks = blanks_after(chunk, starts, tok)
    alike = np.flatnonzero(blanks == commonest(blanks)) if len(starts) else []
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
    as long as the room. Its outer eighths, at least a token each, are left out: a document's own
    ends would reveal the order, and so would a sentence that ends at the cut."""
    edge = max(len(chunk) // 8, 1) if len(chunk) > 3 else 0
    end = len(chunk) - edge
    start = edge + rng.integers(max(end - edge - room, 0) + 1)
    places = np.arange(start, min(start + room, end) + 1)
    in_sentences = np.setdiff1d(word_cuts(chunk, tok)[0], sentence_cuts(chunk, tok)[0])
    between_words = np.intersect1d(places, in_sentences)
    if len(between_words) > 2:
        places = between_words
    cut = places[rng.integers(1, len(places) - 1)]
    return chunk[places[0] : cut], chunk[cut : places[-1]]


def length_without_blanks(chunk: np.ndarray, tok: Tokenizer) -> int:
    """The chunk's length without the whitespace at its end; at least 1."""
    return 1 + np.flatnonzero(~tok.is_blank[chunk]).max(initial=0)


def sentence_cuts(chunk: np.ndarray, tok: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """(n,) places in a chunk where a sentence has ended, and (n,) checksums of their blanks."""
    return with_blanks(1 + np.flatnonzero(tok.sentence_ends(chunk)), chunk, tok)


def word_cuts(chunk: np.ndarray, tok: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """The same for places after a word, before the whitespace that follows it."""
    ends_word = (tok.ends_with[chunk[:-1]] == 0) & (tok.begins_with[chunk[1:]] > 0)
    return with_blanks(1 + np.flatnonzero(ends_word), chunk, tok)


def with_blanks(cuts: np.ndarray, chunk: np.ndarray, tok: Tokenizer):
    """The cuts, and the checksums of their blanks."""
    return cuts, (blanks_before(chunk, cuts, tok) << 32) + blanks_after(chunk, cuts, tok)


def blanks_before(chunk: np.ndarray, places, tok: Tokenizer) -> np.ndarray:
    """(n,) places -> (n,) checksums of all the blanks that end there; 0 for none."""
    return checksums_of_blanks(tok.ends_with[chunk], tok.is_blank[chunk], np.atleast_1d(places))


def blanks_after(chunk: np.ndarray, places, tok: Tokenizer) -> np.ndarray:
    """The same for the blanks that begin at each place."""
    back = chunk[::-1]
    places = len(chunk) - np.atleast_1d(places)
    return checksums_of_blanks(tok.begins_with[back], tok.is_blank[back], places)


def checksums_of_blanks(ends: np.ndarray, is_blank: np.ndarray, places: np.ndarray) -> np.ndarray:
    """For each of (n,) places, a checksum of the blanks that end there. For each token, `ends` is
    the number of the whitespace at its end, and `is_blank` says whether it is nothing else.

    >>> ends = np.array([0, 7, 8, 0, 7])  # a letter, two blanks, a letter, a blank
    >>> a, b, c, d = checksums_of_blanks(ends, ends > 0, np.array([1, 2, 3, 5]))
    >>> bool(a == 0), bool(b == d), bool(b == c)
    (True, True, False)
    """
    solid = np.flatnonzero(~is_blank)
    first = np.append(0, solid + 1)[np.searchsorted(solid, places)]  # first token of the blanks
    first -= (first > 0) & (ends[first - 1] > 0)  # the token before may end with whitespace, too
    data = ends.tobytes()  # slices of bytes are faster than slices of arrays
    starts = (first * ends.itemsize).tolist()
    stops = (places * ends.itemsize).tolist()
    return np.array([zlib.crc32(data[a:b]) for a, b in zip(starts, stops)], np.int64)


def commonest(checksums: np.ndarray) -> int:
    kinds, counts = np.unique(checksums, return_counts=True)
    return kinds[counts.argmax()]
