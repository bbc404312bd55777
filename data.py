"""data.py: a text of token ids, what is drawn from it, and how rows become a batch.

The ids come from corpus.py; objectives.py makes the rows.

    >>> text = Text(np.array([7, 8, 9, 0, 5, 6, 0]), eot=0)     # two documents
    >>> text.starts.tolist(), text.stops.tolist()
    ([0, 4], [3, 6])
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from config import UserError

IGNORE = -100  # the target of a position without a loss
N_OTHERS = 16  # candidates drawn for the second document of a pair


# ---- documents and windows ---------------------------------------------------------------------


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
        """At most `length` adjacent int32 tokens of one document."""
        [document] = self._documents(rng)
        return self._between(rng, self.starts[document], self.stops[document], length)

    def two_chunks(self, rng: np.random.Generator, length: int) -> list[np.ndarray]:
        """Two chunks of about the same length, from two documents: of N_OTHERS draws, the second is
        the nearest in length. If there is only one document, or if the first has 2 · length tokens
        or more and the second fewer than length / 2, they are from both halves of the first. Their
        order is random: nsp takes B from either, and neither may be the shorter one more often."""
        drawn = self._documents(rng, 1 + N_OTHERS)
        first = drawn[0]
        second = self._nearest_in_length(first, drawn[1:], length, rng)
        too_short = self.sizes[second] < length / 2 and self.sizes[first] >= 2 * length
        if second == first or too_short:
            bounds = self._halves(first)
        else:
            bounds = [(self.starts[d], self.stops[d]) for d in (first, second)]
        pair = [self._between(rng, *bound, length) for bound in bounds]
        return pair if rng.random() < 0.5 else pair[::-1]

    def _nearest_in_length(self, first: int, others: np.ndarray, length: int, rng) -> int:
        """The one of `others` whose chunk is nearest in length to that of `first`. If all of them
        are `first`: any other document, or `first` if there is no other."""
        others = others[others != first]
        if len(others) == 0:
            if len(self.sizes) == 1:
                return first
            d = rng.integers(len(self.sizes) - 1)
            return d + (d >= first)
        lengths = np.minimum(self.sizes[others], length)
        return others[np.abs(lengths - min(self.sizes[first], length)).argmin()]

    def _halves(self, document: int) -> list[tuple[int, int]]:
        """The bounds of a document's two halves; with 2 or 3 tokens they overlap."""
        start, stop = self.starts[document], self.stops[document]
        middle = (start + stop) // 2
        return [(start, max(middle, start + 2)), (min(middle, stop - 2), stop)]

    def _documents(self, rng: np.random.Generator, n: int = 1) -> np.ndarray:
        """(n,) indices of documents, drawn in proportion to their size."""
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
    block = 1 << 22
    starts = range(0, len(tokens), block)
    found = [start + np.flatnonzero(tokens[start : start + block] == token) for start in starts]
    return np.concatenate(found)


# ---- rows --------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One row of T positions, which an objective makes from its example.

    Decoding relies on these rules. If the objective's attention is "full", targets are not shifted:
    targets[i] is the original token of position i. Otherwise a prefix is its segment's beginning,
    and targets[i], where it is not IGNORE, is the segment's next token, inputs[i + 1]. (But the
    last target need not be an input, and clm's hidden_inputs may put [MASK] in its place.)"""

    inputs: np.ndarray  # (T,) what the model reads
    targets: np.ndarray  # (T,) what each position must predict, IGNORE: nothing; mtp: (T, n_future)
    weights: np.ndarray  # (T,) the weight of each position's loss
    segment: np.ndarray  # (T,) 1, 2, ...: parts that do not see each other; 0: padding
    prefix: np.ndarray  # (T,) True in the prefix, where attention is bidirectional
    raw: np.ndarray  # ids of the original text: shown by view.py, counted here and by run.py
    extra: np.ndarray | None = None  # () or (T, ...) what else the objective's own loss reads


def make_row(inputs, targets, raw, prefix=False, segment=1, weights=1.0, extra=None) -> Row:
    """A Row from (T,) inputs and targets. Scalar prefix, segment or weights hold at all positions.

    >>> make_row(np.array([3, 4]), np.array([4, 5]), raw=np.array([3, 4, 5])).segment.tolist()
    [1, 1]
    """
    T = len(inputs)
    weights = np.full(T, weights, np.float32)
    segment = np.full(T, segment, np.int32)
    prefix = np.full(T, prefix, bool)
    return Row(inputs, targets, weights, segment, prefix, raw, extra)


# ---- batches -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Batch:
    """Rows as tensors. N positions have a target: cross entropy is computed only there."""

    inputs: Tensor  # (B, T) int64
    segment: Tensor  # (B, T) int32
    prefix: Tensor  # (B, T) bool
    mask_kind: str  # "causal", "full" or "rule": the mask that segment and prefix imply
    index: Tensor  # (N,) flat positions, row · T + column
    targets: Tensor  # (N,) or (N, n_future) int64
    weights: Tensor  # (N,) float32
    # () the loss's divisor: weights.sum(). train.compute_gradients replaces it by the mean over all
    # micro-batches and processes of the step.
    total_weight: Tensor
    target_bytes: Tensor  # () bytes of the targets' text
    raw_bytes: Tensor  # () bytes of the rows' raw text; used by diffusion
    member: Tensor  # (N,) index in `names` of the objective that made the position's row
    names: tuple[str, ...]  # the objectives of the mixture
    extra: Tensor | None = None  # the rows' `extra`, stacked

    def to(self, device: torch.device) -> "Batch":
        tensors = {name: x for name, x in vars(self).items() if torch.is_tensor(x)}
        on_cuda = device.type == "cuda"
        if on_cuda:
            tensors = {name: x.pin_memory() for name, x in tensors.items()}
        # On MPS the copy must block: else it could read memory that has been reused by then
        # (PyTorch's issue 189690).
        moved = {name: x.to(device, non_blocking=on_cuda) for name, x in tensors.items()}
        return dataclasses.replace(self, **moved)

    def __getstate__(self) -> dict:
        """The fields of a batch on the CPU, for another process, tensors as NumPy arrays. (Tensors
        would travel through shared memory, of which a container has little.)"""
        return {name: x.numpy() if torch.is_tensor(x) else x for name, x in vars(self).items()}

    def __setstate__(self, fields: dict) -> None:
        tensors = {k: torch.from_numpy(x) for k, x in fields.items() if isinstance(x, np.ndarray)}
        vars(self).update(fields | tensors)


def collate(rows: list[Row], n_bytes: np.ndarray, members=0, names=("",)) -> Batch:
    """Stack rows into a batch. `n_bytes` (V,): the length of each id's text in bytes; `members`:
    for each row, or for all of them, the index in `names` of the objective that made it."""
    raw_bytes = n_bytes[np.concatenate([row.raw for row in rows])].sum()
    rows = trim_padding(rows)
    inputs = np.stack([row.inputs for row in rows])  # (B, T)
    targets = np.stack([row.targets for row in rows])  # (B, T) or (B, T, n_future)
    weights = np.stack([row.weights for row in rows])
    segment = np.stack([row.segment for row in rows])
    prefix = np.stack([row.prefix for row in rows])
    extra = None
    if rows[0].extra is not None:
        extra = torch.from_numpy(np.stack([row.extra for row in rows]))
    B, T = inputs.shape

    targets = targets.reshape(B * T, *targets.shape[2:])  # (B·T,) or (B·T, n_future)
    first_targets = targets if targets.ndim == 1 else targets[:, 0]  # mtp: the next tokens
    index = np.flatnonzero(first_targets != IGNORE)
    weights = weights.ravel()[index]
    target_bytes = n_bytes[first_targets[index]].sum()
    member = np.full(B, members)  # (B,)

    return Batch(
        inputs=torch.from_numpy(inputs.astype(np.int64)),
        segment=torch.from_numpy(segment),
        prefix=torch.from_numpy(prefix),
        mask_kind=mask_kind(segment, prefix),
        index=torch.from_numpy(index),
        targets=torch.from_numpy(targets[index]).long(),
        weights=torch.from_numpy(weights),
        total_weight=torch.tensor(float(weights.sum())),
        target_bytes=torch.tensor(float(target_bytes)),
        raw_bytes=torch.tensor(float(raw_bytes)),
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
    # Numbers and None are kept. `raw` is cut too, which does no harm: nothing reads it later.
    return [Row(*(part[:length] if np.ndim(part) else part for part in row)) for row in rows]


def mask_kind(segment: np.ndarray, prefix: np.ndarray) -> str:
    """The simplest mask that (B, T) segments and prefixes allow: "causal" and "full" have faster
    kernels than "rule"."""
    one_text = segment.max() <= 1 and (segment[:, 1:] <= segment[:, :-1]).all()  # then padding
    if one_text and not prefix.any():
        return "causal"  # no position sees the padding after it
    if (segment == 1).all() and prefix.all():
        return "full"
    return "rule"
