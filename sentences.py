"""sentences.py: where nsp and sop cut a text in two, so that the cut gives no answer away.

nsp asks whether B follows A, sop whether A and B are in order. A cut would tell if only a true B
began with a newline, or a text inside a word. So cuts are made where a sentence has ended and,
where possible, all cuts of a row have the same whitespace ("blanks" below) on both sides.
"""

import numpy as np
from numpy.random import Generator

from tokenizer import Tokenizer


def cuts_alike(first, other, share: float, tok: Tokenizer, room: int) -> tuple[int, int]:
    """One cut for each chunk, near `share` of it: after a sentence, with equal blanks around both.
    If there are no two such cuts: at that share exactly. `room`: tokens of a row for A and B."""
    cuts, blanks = sentence_cuts(first, tok)
    others, other_blanks = sentence_cuts(other, tok)
    in_both = (blanks[:, None] == other_blanks).any(1)
    if not in_both.any():
        return 1 + int(share * (len(first) - 1)), 1 + int(share * (len(other) - 1))
    cut = nearest(cuts[in_both], share, first, room)
    [kind] = blanks[cuts == cut]
    return cut, nearest(others[other_blanks == kind], share, other, room)


def nearest(cuts: np.ndarray, share: float, chunk: np.ndarray, room: int) -> int:
    """The cut nearest to this share of a chunk. Cuts with `room` tokens on both sides go first."""
    inner = cuts[(cuts >= room) & (cuts <= len(chunk) - room)]
    margin = room if len(inner) else 1
    wanted = margin + share * (len(chunk) - 2 * margin)
    cuts = inner if len(inner) else cuts
    return int(cuts[np.abs(cuts - wanted).argmin()])


def bounds_alike(chunk: np.ndarray, tok: Tokenizer, whole_document: bool) -> np.ndarray:
    """Where sentences begin and end, all with the same whitespace around, the commonest: different
    whitespace would show whether A and B were swapped.

    A chunk of a longer document begins and ends inside a sentence: these fragments are left out.
    The ends of a whole document count where the whitespace beside them is the same, too."""
    bounds, blanks = sentence_cuts(chunk, tok)
    if len(bounds) == 0:
        return bounds
    bounds = bounds[blanks == commonest(blanks)]
    if whole_document:
        first = bounds[0]
        if blanks_after(chunk, 0, tok) == blanks_after(chunk, first, tok):
            bounds = np.append(0, bounds)
        if blanks_before(chunk, len(chunk), tok) == blanks_before(chunk, first, tok):
            bounds = np.append(bounds, len(chunk))
    return bounds


def broken_off(chunk, rng: Generator, tok: Tokenizer, room: int, whole_document: bool):
    """Two parts of a chunk, in order, where no two runs of whole sentences fit: equally long
    beginnings of two sentences that start with the same blanks; else a text cut anywhere."""
    starts, _ = sentence_cuts(chunk, tok)
    if whole_document:
        starts = np.append(0, starts)
    lengths = np.diff(np.append(starts, len(chunk)))
    blanks = blanks_after(chunk, starts, tok)
    alike = np.flatnonzero(blanks == commonest(blanks)) if len(starts) else []
    if len(alike) > 1:
        shorter = lengths[alike[:2]].min()
        length = max(min(room // 2, 3 * shorter // 4), 1)
        return tuple(chunk[start : start + length] for start in starts[alike[:2]])
    edge = len(chunk) // 8  # a document's own ends would tell the order
    text = chunk[edge : len(chunk) - edge][:room]
    cut = rng.integers(1, len(text))
    return text[:cut], text[cut:]


def sentence_cuts(chunk: np.ndarray, tok: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """(n,) places in a chunk where a sentence has ended, and (n,) codes of the blanks around."""
    cuts = 1 + np.flatnonzero(tok.sentence_ends(chunk))
    before = blanks_before(chunk, cuts, tok)
    after = blanks_after(chunk, cuts, tok)
    return cuts, before * tok.n_blanks**2 + after  # two codes in one number


def blanks_before(chunk: np.ndarray, places, tok: Tokenizer) -> np.ndarray:
    """(n,) places -> (n,) codes of the blanks right before them, of the last two tokens' only."""
    last = chunk[places - 1]
    earlier = tok.ends_with[chunk[np.maximum(places - 2, 0)]]
    earlier = np.where(tok.is_blank[last] & (places > 1), earlier, 0)
    return tok.ends_with[last] * tok.n_blanks + earlier


def blanks_after(chunk: np.ndarray, places, tok: Tokenizer) -> np.ndarray:
    """The same for the blanks right after each place."""
    first = chunk[places]
    later = tok.begins_with[chunk[np.minimum(places + 1, len(chunk) - 1)]]
    later = np.where(tok.is_blank[first] & (places + 1 < len(chunk)), later, 0)
    return tok.begins_with[first] * tok.n_blanks + later


def commonest(numbers: np.ndarray) -> int:
    kinds, counts = np.unique(numbers, return_counts=True)
    return kinds[counts.argmax()]
