"""data.py: token ids become examples, examples become rows, rows become a batch.

corpus.py makes the ids. The objectives' functions in objectives.py say what is drawn from them, and
make the rows.

    >>> text = Text(np.array([7, 8, 9, 0, 5, 6, 0]), eot=0)     # two documents
    >>> text.starts.tolist(), text.stops.tolist()
    ([0, 4], [3, 6])
"""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenizer import Tokenizer
from util import UserError

BLOCK = 1 << 20  # tokens that are searched at a time: this bounds memory
N_OTHERS = 16  # candidates drawn for the second document of a pair
IGNORE = -100  # the target of a position without a loss
TRAIN, VALIDATION = 0, 1  # splits: their rows share no random numbers


# ---- token ids -> examples ---------------------------------------------------------------------


class Text:
    """One split of a corpus: token ids with an EOT after every document (the last may lack it).

    `starts` and `stops` are the bounds of each document of at least two tokens, without its EOT."""

    def __init__(self, tokens: np.ndarray, eot: int):
        self.tokens = np.asarray(tokens)  # an array over the same memory: a memmap is slow to slice
        ends = np.append(find_all(self.tokens, eot), len(tokens))  # text may end inside a document
        starts = np.append(0, ends[:-1] + 1)
        keep = ends - starts >= 2
        self.starts = starts[keep]
        self.stops = ends[keep]
        self.sizes = self.stops - self.starts
        self.cumulative_sizes = np.cumsum(self.sizes)

    def __len__(self) -> int:
        return len(self.tokens)

    def window(self, rng: np.random.Generator, length: int, ahead: int = 0) -> np.ndarray:
        """(length + ahead,) int32: adjacent tokens from anywhere in the text, which wraps around at
        its end. If the start falls inside a document that fits into `length` with its EOT, it moves
        back to the document's first token, because later words depend on the first ones. `ahead`:
        extra tokens, which do not count for this rule."""
        start = rng.integers(len(self))
        document = np.searchsorted(self.starts, start, side="right") - 1
        if document >= 0 and start < self.stops[document] and self.sizes[document] < length:
            start = self.starts[document]
        places = np.arange(start, start + length + ahead)
        return self.tokens.take(places, mode="wrap").astype(np.int32)

    def chunk(self, rng: np.random.Generator, length: int) -> np.ndarray:
        """At most `length` adjacent int32 tokens of one document, drawn in proportion to size."""
        [document] = self._documents(rng, 1)
        return self._between(rng, self.starts[document], self.stops[document], length)

    def two_chunks(self, rng: np.random.Generator, length: int) -> list[np.ndarray]:
        """Chunks of two documents, or of both halves of the only one, in random order. Of N_OTHERS
        draws, the second document is the nearest in length, so that nsp can keep most of both."""
        first, *others = self._documents(rng, 1 + N_OTHERS)
        others = [d for d in others if d != first] or [
            d for d in range(len(self.sizes)) if d != first
        ]
        start, stop = self.starts[first], self.stops[first]
        if others:
            sizes = np.minimum(self.sizes[others], length)
            second = others[np.abs(sizes - min(stop - start, length)).argmin()]
            bounds = [(start, stop), (self.starts[second], self.stops[second])]
        else:
            middle = (start + stop) // 2  # with 2 or 3 tokens, the halves overlap
            bounds = [(start, max(middle, start + 2)), (min(middle, stop - 2), stop)]
        pair = [self._between(rng, *bound, length) for bound in bounds]
        return pair if rng.random() < 0.5 else pair[::-1]

    def _documents(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """(n,) indices of documents, drawn in proportion to size."""
        if len(self.sizes) == 0:
            raise UserError("--data: no document has two tokens or more; give longer documents")
        at = rng.integers(self.cumulative_sizes[-1], size=n)
        return np.searchsorted(self.cumulative_sizes, at, side="right")

    def _between(self, rng: np.random.Generator, start: int, stop: int, length: int) -> np.ndarray:
        """At most `length` adjacent tokens, anywhere from `start` to `stop`."""
        length = min(length, stop - start)
        start += rng.integers(stop - start - length + 1)
        return self.tokens[start : start + length].astype(np.int32)


def find_all(tokens: np.ndarray, token: int) -> np.ndarray:
    """The positions of `token`, found block by block: the text may be larger than memory."""
    starts = range(0, len(tokens), BLOCK)
    found = [start + np.flatnonzero(tokens[start : start + BLOCK] == token) for start in starts]
    return np.concatenate(found)


def check_text(text: Text, T: int) -> None:
    """Raise UserError if the training text is too short for one row of T positions."""
    if len(text) < T + 1:
        has = f"a row needs {T + 1} tokens, but the training text has {len(text)}"
        raise UserError(f"--block_size={T}: {has}; lower --block_size or give more text")


# ---- examples -> rows --------------------------------------------------------------------------


class Row(NamedTuple):
    """One row of T positions, which an objective makes from its example."""

    inputs: np.ndarray  # (T,) what the model reads
    targets: np.ndarray  # (T,) what each position must predict, IGNORE: nothing; mtp: (T, n_future)
    weights: np.ndarray  # (T,) the weight of each position's loss
    segment: np.ndarray  # (T,) 1, 2, ...: parts that do not see each other; 0: padding
    group: np.ndarray  # (T,) 0: read to the left only; each other group also sees all of itself,
    # and a negative one is private: nobody else sees it
    place: np.ndarray  # (T,) where the token stands in its text, mostly 0 ... T-1
    raw: np.ndarray  # ids of the original text: shown by view.py, counted here and in train.py
    scored: np.ndarray | None = None  # ids whose nats the loss estimates; None: the targets
    extra: np.ndarray | None = None  # () or (T, ...) what else the objective's own loss reads

    # Decoding relies on these rules. Where an objective reads both ways or asks at a private
    # [MASK], targets[i] is the original token of position i, or of i + 1 if its entry in the table
    # says "shifted". Elsewhere, targets[i], where it is not IGNORE, is the segment's next token.
    # (But the last target need not be an input.)


def make_row(inputs, targets, raw, group=0, segment=1, weights=1.0, place=None, **others) -> Row:
    """A Row from (T,) inputs and targets. Scalar group, segment or weights hold at all positions.

    >>> make_row(np.array([3, 4]), np.array([4, 5]), raw=np.array([3, 4, 5])).segment.tolist()
    [1, 1]
    """
    T = len(inputs)
    weights = np.full(T, weights, np.float32)
    segment = np.full(T, segment, np.int32)
    group = np.full(T, group, np.int32)
    place = np.arange(T) if place is None else place
    return Row(inputs, targets, weights, segment, group, place, raw, **others)


class Source(NamedTuple):
    """What rows are drawn from: a text, by one objective or by a mixture of several."""

    objectives: dict[str, Any]  # name -> its entry of OBJECTIVES
    shares: list[float]  # of the rows, for each objective; their sum is 1
    text: Text
    tok: Tokenizer
    T: int
    knobs: Any  # objectives.Knobs
    seed: int
    replay_text: Text | None = None  # an older corpus, to mix back in by row
    replay_rate: float = 0.0  # its share of the rows


def draw_row(source: Source, split: int, step: int, number: int, n_rows: int) -> tuple[Row, int]:
    """Row `number` of the n_rows of a step, and the index of the objective that made it. They
    depend on the arguments alone, so any row of any step can be rebuilt."""
    # + 1 because numpy drops trailing zeros: [seed, 0, 0, 0] would equal default_rng(seed).
    rng = np.random.default_rng([source.seed, split, step, number + 1])
    # As in MDLM, row i of n has a t in [i / n, (i + 1) / n).
    t = (number + rng.random()) / n_rows
    member = 0
    if len(source.shares) > 1:
        member = int(rng.choice(len(source.shares), p=source.shares))
    text = source.text
    if source.replay_text is not None and rng.random() < source.replay_rate:
        text = source.replay_text

    objective = list(source.objectives.values())[member]
    example = objective.draw(text, rng, source.T, source.knobs)
    if objective.has_t:
        example = example, t
    return objective.row(example, rng, source.tok, source.T, source.knobs), member


# ---- rows -> a batch ---------------------------------------------------------------------------


@dataclasses.dataclass
class Batch:
    """Rows as tensors. N positions have a target: cross entropy is computed only there."""

    inputs: Tensor  # (B, T) int64
    segment: Tensor  # (B, T) int32
    group: Tensor  # (B, T) int32
    place: Tensor | None  # (B, T) int64; None: 0 ... T-1 in all rows
    mask_kind: str  # "causal", "full" or "rule": the mask that segment and group imply
    index: Tensor  # (N,) flat positions, row · T + column
    targets: Tensor  # (N,) or (N, n_future) int64
    weights: Tensor  # (N,) float32
    total_weight: Tensor  # () the loss's divisor: weights or scored ids; a mean over micro-batches
    target_bytes: Tensor  # () bytes of the text of the targets, or of the scored ids
    member: Tensor  # (N,) index in `names` of the objective that made the position's row
    names: tuple[str, ...]  # the objectives of the mixture
    extra: Tensor | None = None  # the rows' `extra`, stacked

    def to(self, device: torch.device) -> "Batch":
        tensors = {name: x for name, x in vars(self).items() if torch.is_tensor(x)}
        on_cuda = device.type == "cuda"  # on MPS a copy must block (PyTorch's issue 189690)
        if on_cuda:
            tensors = {name: x.pin_memory() for name, x in tensors.items()}
        moved = {name: x.to(device, non_blocking=on_cuda) for name, x in tensors.items()}
        return dataclasses.replace(self, **moved)


def make_batch(source: Source, split: int, step: int, numbers, n_rows: int) -> Batch:
    """The batch of these row numbers, out of a step's n_rows. Any process would draw the same."""
    drawn = [draw_row(source, split, step, number, n_rows) for number in numbers]
    rows, members = zip(*drawn)
    return collate(rows, source.tok.n_bytes, members, tuple(source.objectives))


def collate(rows: list[Row], n_bytes: np.ndarray, members=0, names=("",)) -> Batch:
    """Stack rows into a batch. `n_bytes` (V,): the length of each id's text in bytes; `members`:
    for each row, or for all of them, the index in `names` of the objective that made it."""
    rows = trim_padding(rows)
    inputs = np.stack([row.inputs for row in rows])  # (B, T)
    targets = np.stack([row.targets for row in rows])  # (B, T) or (B, T, n_future)
    weights = np.stack([row.weights for row in rows])
    segment = np.stack([row.segment for row in rows])
    group = np.stack([row.group for row in rows])
    place = np.stack([row.place for row in rows])
    in_order = (place == np.arange(place.shape[1])).all()
    extra = None
    if rows[0].extra is not None:
        extra = torch.from_numpy(np.stack([row.extra for row in rows]))
    B, T = inputs.shape

    targets = targets.reshape(B * T, *targets.shape[2:])  # (B·T,) or (B·T, n_future)
    first_targets = targets if targets.ndim == 1 else targets[:, 0]  # mtp: the next tokens
    index = np.flatnonzero(first_targets != IGNORE)
    weights = weights.ravel()[index]
    total_weight = weights.sum()
    target_bytes = n_bytes[first_targets[index]].sum()
    if rows[0].scored is not None:
        scored = np.concatenate([row.scored for row in rows])
        total_weight, target_bytes = len(scored), n_bytes[scored].sum()
    member = np.full(B, members)  # (B,)

    return Batch(
        inputs=torch.from_numpy(inputs.astype(np.int64)),
        segment=torch.from_numpy(segment),
        group=torch.from_numpy(group),
        place=None if in_order else torch.from_numpy(place),
        mask_kind=mask_kind(segment, group),
        index=torch.from_numpy(index),
        targets=torch.from_numpy(targets[index]).long(),
        weights=torch.from_numpy(weights),
        total_weight=torch.tensor(float(total_weight)),
        target_bytes=torch.tensor(float(target_bytes)),
        member=torch.from_numpy(member[index // T]),
        names=names,
        extra=extra,
    )


def trim_padding(rows: list[Row]) -> list[Row]:
    """Cut off the padding that all rows have at the end: pairs and crops of short texts leave much
    of T empty. The new length is T or a multiple of max(T // 4, 32): there are few shapes."""
    T = len(rows[0].inputs)
    unit = max(T // 4, 32)
    used = max(np.count_nonzero(row.segment) for row in rows)
    length = math.ceil(max(used, 1) / unit) * unit
    # Numbers and None are kept. `raw` is cut too, which does no harm: nothing reads it later; and
    # `scored` is never longer than what is used.
    return [Row(*(part[:length] if np.ndim(part) else part for part in row)) for row in rows]


def mask_kind(segment: np.ndarray, group: np.ndarray) -> str:
    """The simplest mask that (B, T) segments and groups allow: "causal" and "full" have faster
    kernels than "rule"."""
    one_text = segment.max() <= 1 and (segment[:, 1:] <= segment[:, :-1]).all()  # then padding
    if one_text and not group.any():
        return "causal"  # no position sees the padding after it
    if (segment == 1).all() and (group == 1).all():
        return "full"
    return "rule"
