"""data.py: files become token ids, ids become rows, rows become a batch.

A corpus is a text file (<|endoftext|> ends a document), JSON (objects with a field "text", one a
line or in an array), either of them compressed (.gz), a folder of such files, or a built-in corpus:
`python` (the source of Python's standard library), `stories`, or `stories:N` (N of them). It is
tokenized once, as a stream, into memory-mapped files. The objectives' functions in objectives.py
say what is drawn from it, and make the rows.

    >>> text = Text(np.array([7, 8, 9, 0, 5, 6, 0]), eot=0)     # two documents
    >>> text.starts.tolist(), text.stops.tolist()
    ([0, 4], [3, 6])
"""

import contextlib
import dataclasses
import gzip
import hashlib
import io
import itertools
import json
import math
import os
import re
import shutil
import sysconfig
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import stories
from tokenizer import EOT_TEXT, Tokenizer, get_tokenizer, normalize
from util import UserError, atomic_write, flag, suggest, visible

STORIES_TOKENIZER = "bpe:1024"
LARGE_TOKENIZER = "bpe:2048"  # for texts of LARGE bytes or more; smaller ones get byte tokens
LARGE = 1_000_000
MOST_STORIES = 1_000_000  # 200 MB of text, a minute
VAL_EVERY = 20  # one document in 20 is held out for validation, or the last 1/20 of the tokens
HELD_OUT = (0.02, 0.10)  # if the documents' hash holds out another share, it is the end of the text
MOST_REPLACED = 0.01  # share of bytes that are not UTF-8; a text with more is in another encoding
BLOCK = 1 << 20  # characters that are read, tokenized and written at a time: this bounds memory
CACHE_FORMAT = 13  # raise it when the same text would give other ids
REPORT_SECONDS = 5  # between two progress lines of the tokenization
# Folders beside or inside the standard library that are not its code:
NO_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# A folder that holds one of these is a run or a cache, and no text:
OWN_FILES = re.compile(r"ckpt\.pt|log\.jsonl|(tokens|tokenizer)-[0-9a-f]{16}\.json")
JSON_NAME = re.compile(r"\.(json|jsonl|ndjson)(\.gz)?$", re.IGNORECASE)
JSON_START = re.compile(r'\s*(\[\s*)?\{\s*"')
# It takes a newline with it; at the end of what was read so far, that newline may still come.
SEPARATOR = re.compile(rf"{re.escape(EOT_TEXT)}(?:\n|(?!\Z))")

N_OTHERS = 16  # candidates drawn for the second document of a pair
IGNORE = -100  # the target of a position without a loss
TRAIN, VALIDATION = 0, 1  # splits: their rows share no random numbers


@dataclasses.dataclass
class DataConfig:
    """the text and its tokens"""

    data: str = flag("stories", "text or JSON file, folder, stories, stories:N or python")
    tokenizer: str | None = flag(None, "bytes, bpe:N or a tiktoken name; automatic: by the text")
    cache_dir: str = flag(".cache", "folder of the token caches")


# ---- files -> documents ------------------------------------------------------------------------


class Corpus:
    """The documents of a path or of a built-in corpus, read piece by piece."""

    def __init__(self, data: str):
        self.name = data
        self.n_stories = count_stories(data)
        files = [] if self.n_stories else find_files(data)
        self.files = [path for path in files if is_text(path, in_folder=len(files) > 1)]
        self.n_left_out = len(files) - len(self.files)
        self.size = sum(path.stat().st_size for path in self.files)
        self.n_replaced = Counter()  # file -> bytes that were not UTF-8, in the last reading
        if self.size == 0 and not self.n_stories:
            remedy = "give UTF-8 (no UTF-16, no NUL bytes); in a folder, runs are skipped"
            raise UserError(f"--data={data}: there is no text in it; {remedy}")

    def __str__(self) -> str:
        if self.n_stories:
            return f"stories ({self.n_stories} documents)"
        n_files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        left_out = f"; {self.n_left_out} without text left out" if self.n_left_out else ""
        folder = "folder " if os.path.isdir(self.name) else ""  # it may be called stories
        return f"{folder}{visible(self.name)} ({n_files}, {self.size:,} bytes{left_out})"

    def digest(self) -> str:
        """A hash of the content, not of names and dates. The content of stories is the program
        that tells them."""
        whole = hashlib.sha256(str(self.n_stories).encode())
        for path in [Path(stories.__file__)] if self.n_stories else self.files:
            with open(path, "rb") as f:
                whole.update(hashlib.file_digest(f, "sha256").digest())
        return whole.hexdigest()

    def pieces(self) -> Iterator[tuple[str, bool, bool]]:
        """Yield (text, is_last, is_val) for pieces of documents, of BLOCK characters at most."""
        by_hash = self.by_hash
        return ((text, last, chosen and by_hash) for text, last, chosen in self._read())

    @cached_property
    def by_hash(self) -> bool:
        """Whether documents are held out by their hash, or the end of the text: found by reading
        all of it. Raises UserError if it is in another encoding."""
        sizes = [0, 0]
        for text, _, chosen in self._read():
            sizes[chosen] += len(text.encode())
        n_replaced = self.n_replaced.total()
        if n_replaced > MOST_REPLACED * sum(sizes):
            [(path, _)] = self.n_replaced.most_common(1)
            wrong = f"{n_replaced:,} bytes are not UTF-8, most of them in {path}"
            remedy = f"iconv -f GB18030 -t UTF-8 {path} > NEW (or from LATIN1, SHIFT_JIS, ...)"
            raise UserError(f"--data={self.name}: {wrong}; convert it: {remedy}")
        least, most = HELD_OUT
        return least * sum(sizes) <= sizes[1] <= most * sum(sizes)

    def _read(self) -> Iterator[tuple[str, bool, bool]]:
        self.n_replaced.clear()
        for text, _ in self._stories:
            yield text, True, is_chosen(text)
        for path in self.files:
            with open_text(path) as f:
                for text in read_json(f) if is_json(path) else [f]:
                    yield from split_documents(self._blocks(path, text))

    def _blocks(self, path: Path, f: io.TextIOBase) -> Iterator[str]:
        while block := f.read(BLOCK):
            text = normalize(block)
            self.n_replaced[path] += text.count("\ufffd") - block.count("\ufffd")
            yield text

    @cached_property
    def _stories(self) -> list[tuple[str, float]]:
        return list(stories.documents(self.n_stories or 0))

    def floor(self) -> float | None:
        """Nats per byte of the validation documents under their own grammar, if it is known; of
        all documents, if the end of the text is held out."""
        if not self.n_stories:
            return None
        held_out = [told for told in self._stories if not self.by_hash or is_chosen(told[0])]
        return sum(nats for _, nats in held_out) / sum(len(text.encode()) for text, _ in held_out)


def count_stories(data: str) -> int | None:
    """ "stories:500" -> 500, "stories" -> the default number; another corpus, or a file or folder
    of this name -> None."""
    if os.path.exists(data) or not re.match("stories(:|$)", data):
        return None
    if data == "stories":
        return stories.DEFAULT_SIZE
    number = data.removeprefix("stories:")
    n = int(number) if re.fullmatch("[0-9]{1,7}", number) else 0
    if not VAL_EVERY <= n <= MOST_STORIES:
        raise UserError(f"--data={data}: write stories:N with N from {VAL_EVERY} to {MOST_STORIES}")
    return n


def find_files(data: str) -> list[Path]:
    """A file, or those below a folder except hidden ones, runs and caches, or the library."""
    if os.path.exists(data):
        return files_below(data) if os.path.isdir(data) else [Path(data)]
    if data == "python":
        library = files_below(sysconfig.get_path("stdlib"), NO_LIBRARY)
        return [path for path in library if path.suffix == ".py"]
    hint = suggest(data, ("stories", "python")) or "give a text file, a JSON file or a folder"
    raise UserError(f"--data={data} does not exist; {hint}")


def files_below(root: str, leave_out=()) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(root):
        if any(OWN_FILES.fullmatch(name) for name in names):
            folders.clear()
            continue
        folders[:] = [n for n in folders if not n.startswith(".") and n not in leave_out]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(found)


def open_text(path: Path) -> io.TextIOBase:
    """Bytes that are not UTF-8 become lone surrogates, and all line ends become \\n."""
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    return opened(path, "rt", encoding="utf-8-sig", errors="surrogateescape")


def is_text(path: Path, in_folder: bool) -> bool:
    """Whether a file begins like text: UTF-16 and binary files contain NULs. In a folder, JSON
    without texts (settings, notebooks) does not count."""
    if not path.is_file():
        return False
    with open_text(path) as f, contextlib.suppress(UserError):
        is_binary = "\0" in f.read(8192)
        f.seek(0)
        return not is_binary and not (in_folder and is_json(path) and not any(read_json(f)))
    return False


def is_json(path: Path) -> bool:
    """By its name, or because it begins with an object."""
    with open_text(path) as f:
        return bool(JSON_NAME.search(path.name) or JSON_START.match(f.read(8192)))


def read_json(f) -> Iterator[io.StringIO]:
    """The texts of JSON objects, one a line, or in an array that is held in memory as a whole."""
    for number, line in enumerate(f, 1):
        if not line.strip():
            continue
        found = repr(line[:40])
        try:
            spans_lines = re.match(r"\s*(\[|\{\s*$)", line)
            entries = json.loads(line + f.read() if spans_lines else line)
            for entry in entries if isinstance(entries, list) else [entries]:
                found = f"one with {', '.join({**entry})}"
                yield io.StringIO(entry["text"], newline=None)
        except (ValueError, KeyError, TypeError):
            wrong = f"{f.name}, line {number}: not a JSON object with a text field, but {found}"
            raise UserError(f"{wrong}; correct or rename") from None


def split_documents(blocks: Iterable[str]) -> Iterator[tuple[str, bool, bool]]:
    """Cut a text into documents, where <|endoftext|> stands, and these into pieces of BLOCK
    characters: (text, is_last, is_chosen), where the document's first piece decides whether it is
    chosen. Empty documents are left out: two EOTs in a row would teach nothing."""
    rest = ""
    is_first = True
    for block in itertools.chain(blocks, [f"{EOT_TEXT}\n"]):
        parts = SEPARATOR.split(rest + block)
        for number, rest in enumerate(parts, 1):
            has_ended = number < len(parts)
            kept = 0 if has_ended else BLOCK + len(EOT_TEXT)  # a separator may have begun in it
            while len(rest) > kept:
                text, rest = rest[:BLOCK], rest[BLOCK:]
                is_last = has_ended and not rest
                if is_first:
                    chosen = is_chosen(text)
                yield text, is_last, chosen
                is_first = is_last


def is_chosen(text: str) -> bool:
    """Whether a document is one of VAL_EVERY: a hash of its text decides, so equal ones agree."""
    digest = hashlib.sha256(text.strip().encode()).digest()
    return int.from_bytes(digest[:8]) % VAL_EVERY == 0


# ---- documents -> token ids --------------------------------------------------------------------


@dataclasses.dataclass
class Tokens:
    """A tokenized corpus: 1-D arrays of ids in memory-mapped files, an EOT after every document."""

    tok: Tokenizer
    train: np.ndarray
    val: np.ndarray
    digest: str  # of the corpus's content
    about: str  # a one-line description
    floor: float | None  # entropy of the validation text, nats per byte; None unless stories


def load_tokens(
    config: DataConfig, tok: Tokenizer | None = None, log=print, expected: str | None = None
) -> Tokens:
    """The Tokens of a corpus, from its cache or newly made. Raises UserError.

    `tok` overrides config.tokenizer. `log` gets lines for the user. `expected` is the digest that
    the corpus must have if a run continues on it."""
    corpus = Corpus(config.data)
    digest = corpus.digest()
    if expected not in (None, digest):
        remedy = "restore it, or name the text to train on from now on with --data"
        raise UserError(f"{corpus} is not the text that the checkpoint was trained on: {remedy}")
    tok = tok or find_tokenizer(config, corpus, digest, log)
    path = cache_path(config, "tokens", digest, tok.to_json())
    cached = read_cache(path, tok)
    if cached is None:
        write_cache(path, tok, corpus, log)
        cached = read_cache(path, tok)
    train, val, facts = cached

    at_end = "" if facts["by_hash"] else " at its end"
    about = f"{corpus}, {len(train):,} tokens and {len(val):,} held out{at_end} ({tok.name})"
    if facts["n_replaced"]:
        about += f"; {facts['n_replaced']:,} bytes that are not UTF-8 were replaced"
    return Tokens(tok, train, val, digest, about, facts["floor"])


def cache_path(config: DataConfig, kind: str, *content: str) -> Path:
    key = hashlib.sha256(json.dumps([CACHE_FORMAT, VAL_EVERY, *content]).encode()).hexdigest()
    return Path(config.cache_dir, f"{kind}-{key[:16]}.json")


def find_tokenizer(config: DataConfig, corpus: Corpus, digest: str, log) -> Tokenizer:
    """The requested tokenizer, or the automatic one. A BPE is trained once for each corpus, without
    the held-out documents; if the end of the text is held out, on the whole text."""
    by_size = "bytes" if corpus.size < LARGE else LARGE_TOKENIZER
    name = config.tokenizer or (STORIES_TOKENIZER if corpus.n_stories else by_size)
    if not name.startswith("bpe:"):
        return get_tokenizer(name)
    path = cache_path(config, "tokenizer", digest, name)
    if not path.exists():
        log(f"training {name} on {corpus}")
        tok = get_tokenizer(name, (text for text, _, is_val in corpus.pieces() if not is_val))
        with atomic_write(path) as f:
            f.write(tok.to_json().encode())
    return Tokenizer.from_json(path.read_text(encoding="utf-8"))


def read_cache(path: Path, tok: Tokenizer) -> tuple[np.ndarray, np.ndarray, dict] | None:
    """(training ids, validation ids, facts), or None if they are missing or do not fit."""
    try:
        facts = json.loads(path.read_bytes())
        train = np.memmap(path.with_suffix(".train"), tok.dtype, "r")
        val = np.memmap(path.with_suffix(".val"), tok.dtype, "r")
    except (OSError, ValueError):
        return None
    fits = [len(train), len(val)] == facts["sizes"]
    return (train, val, facts) if fits else None


def write_cache(path: Path, tok: Tokenizer, corpus: Corpus, log) -> None:
    """Write the ids of the training and of the validation documents, and facts beside them."""
    log(f"tokenizing {corpus} with {tok.name}")
    eot = np.array([tok.EOT], tok.dtype).tobytes()
    n_bytes = len(eot)  # of each id
    reported = time.monotonic()
    with (
        atomic_write(path.with_suffix(".train")) as train,
        atomic_write(path.with_suffix(".val")) as val,
    ):
        for text, is_last, is_val in corpus.pieces():
            ids = np.array(tok.encode(text), tok.dtype).tobytes()
            (val if is_val else train).write(ids + eot * is_last)
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                log(f"{(train.tell() + val.tell()) // n_bytes:,} tokens so far")

        n = (train.tell() + val.tell()) // n_bytes
        if n < 4:  # two to train on, two held out
            raise UserError(f"--data={corpus.name} has only {n} tokens; give more text")
        if val.tell() == 0:  # hold out the last tokens, with their EOT
            n_train = n - max(n // VAL_EVERY, 2)
            train.seek(n_train * n_bytes)
            shutil.copyfileobj(train, val)
            train.seek((n_train - 1) * n_bytes)
            train.write(eot)  # training text wraps around, so it needs an EOT at its end
            train.truncate()
        sizes = [train.tell() // n_bytes, val.tell() // n_bytes]
    facts = {"sizes": sizes, "floor": corpus.floor(), "by_hash": corpus.by_hash}
    facts["n_replaced"] = corpus.n_replaced.total()
    with atomic_write(path) as f:
        f.write(json.dumps(facts).encode())


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
