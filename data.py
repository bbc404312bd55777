"""data.py: a text becomes token ids, documents, windows, batches; and nothing here knows what a row means.

A corpus is a text file, a .jsonl file (field "text") or a folder; by default the source of Python's standard library.
It is tokenized once, as a stream, into a memory-mapped cache keyed by content, tokenizer and format. Files are data,
never code: the cache is raw integers behind a JSON header, a tokenizer is JSON, a checkpoint loads weights only.

    >>> tok = get_tokenizer("bytes")
    >>> tok.encode("Hi [MASK]"), tok.decode([72, 105, tok.MASK])
    ([72, 105, 32, 91, 77, 65, 83, 75, 93], 'Hi[MASK]')
"""
import argparse
import base64
import codecs
import contextlib
import dataclasses
import difflib
import hashlib
import heapq
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import sysconfig
import tempfile
import textwrap
import types
import typing
import zipfile
import zlib
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tiktoken
import torch

EOT_TEXT = "<|endoftext|>"
IGNORE = -100           # the target where nothing is asked
N_SENTINELS = 256
# One table for every objective, so that a checkpoint of one can go on with another. Ids follow the tokenizer's own.
SPECIALS = ("[PAD]", "[MASK]", "[CLS]", "[SEP]", "<PRE>", "<SUF>", "<MID>", "[R]", "[S]", "[X]",
            *(f"<extra_id_{k}>" for k in range(N_SENTINELS)))
CACHE_FORMAT = 2        # raise it when the bytes of a token cache change meaning
VAL_EVERY = 20          # every 20th document is validation; with fewer than 20, the last 1/20 of the tokens
BLOCK = 1 << 20         # characters read, tokenized and written at a time: the bound on memory
BLANKS = 1 << 18        # tiktoken's regular expressions overflow their stack on a million blanks: longer runs are cut
# What a checkpoint holds, and as what.
CHECKPOINT = dict(model=dict, optimizers=list, step=int, objective=str, tokenizer=str, model_config=dict, knobs=dict,
                  train_config=dict, data_config=dict, elapsed_s=float)


class UserError(ValueError):
    """A mistake the user can mend: the command line prints it as one line, without a traceback."""


def flag(default, help: str, choices: tuple = ()):
    """A dataclass field that is also a command-line flag. `help` gives its unit, and its interval if it has one, as in
    `a share, in (0, 1]`: what is outside is refused."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices})


def check_values(config) -> None:
    """Raise UserError on a value of another type than its field's, none of its choices, or outside the interval that its help gives."""
    hints = typing.get_type_hints(type(config))
    for f in dataclasses.fields(config):
        value, kinds, choices = getattr(config, f.name), typing.get_args(hints[f.name]) or (hints[f.name],), f.metadata.get("choices")
        typed = isinstance(value, (*kinds, int) if float in kinds else kinds) and (bool in kinds or not isinstance(value, bool))
        if not typed or choices and value is not None and value not in choices:
            raise UserError(f"--{f.name}={value!r}: must be {' or '.join(map(str, choices or [k.__name__ for k in kinds]))}")
        found = re.search(r"\bin ([\[(])(\S+), (\S+)([\])])", f.metadata.get("help", ""))
        if found and value is not None:
            left, low, high, right = found.groups()
            if not (float(low) < value < float(high) or left == "[" and value == float(low) or right == "]" and value == float(high)):
                raise UserError(f"--{f.name}={value}: must be {found[0]}")


@dataclasses.dataclass
class DataConfig:
    """the text and its tokens"""
    data: str = flag("", "text file, .jsonl file (field 'text') or folder; empty: Python's standard library")
    tokenizer: str = flag("bytes", "bytes, bpe:N (N ids, trained on the corpus) or a tiktoken name such as gpt2")
    invalid_utf8: str = flag("replace", "bytes that are not UTF-8: replace (and count) or refuse", ("replace", "refuse"))
    cache_dir: str = flag(".cache", "folder of the token caches")


# ---- random numbers -------------------------------------------------------------------------------------------------

def _mix(z: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64 (Steele et al. 2014), in place: a bijection whose bits look random."""
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


class Rng:
    """Random numbers for B rows at once. Row b's depend on (seed, split, step, rows[b]) and on nothing else.

    Counter-based (the n-th number is a hash of n), so a row of any step can be rebuilt alone, by any number of workers.
    `rows` are the numbers of the rows within the step's whole batch of `n_rows`; `split` is 0 (train) or 1 (validation).

        >>> one, many = Rng(1, 0, 7, [5]), Rng(1, 0, 7, range(8))
        >>> bool((one.random(3) == many.random(3)[5]).all())
        True
    """
    GOLDEN = np.uint64(0x9E3779B97F4A7C15)

    def __init__(self, seed: int, split: int, step: int, rows, n_rows: int | None = None):
        self.rows = np.asarray(rows, dtype=np.uint64)
        self.n_rows = n_rows or len(self.rows)
        shared = np.array([seed % (1 << 64)], np.uint64)
        for part in (split, step):
            shared = _mix((shared ^ np.uint64(part)) + self.GOLDEN)
        self.key = _mix(_mix(shared + (self.rows + np.uint64(1)) * self.GOLDEN))         # (B,)
        self.shared = float(_mix(shared + self.GOLDEN)[0] >> np.uint64(11)) * 2.0**-53   # one number for the whole step
        self.count = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index) -> "Rng":
        """The generator of some of the rows; it goes on where this one stands."""
        rng = object.__new__(Rng)
        rng.rows, rng.key, rng.n_rows = self.rows[index], self.key[index], self.n_rows
        rng.shared, rng.count = self.shared, self.count
        return rng

    def fork(self, index, number) -> "Rng":
        """The generator of the number-th example of some of the rows."""
        rng = self[index]
        rng.key, rng.count = _mix(rng.key + (np.atleast_1d(number).astype(np.uint64) + np.uint64(1)) * self.GOLDEN), 0
        return rng

    def bits(self, n: int) -> np.ndarray:
        """(B, n) uint64: call c's number i is a hash of (c, i), so that more or fewer numbers do not move the next call's."""
        counter = np.uint64((self.count << 32) + 1) + np.arange(n, dtype=np.uint64)
        self.count += 1
        return _mix(self.key[:, None] + counter * self.GOLDEN)

    def random(self, n: int) -> np.ndarray:
        """(B, n) float64, uniform in [0, 1)."""
        return (self.bits(n) >> np.uint64(11)) * 2.0**-53

    def below(self, high, n: int = 1) -> np.ndarray:
        """(B, n) int64, uniform in 0 .. high-1; `high` is a number or broadcasts to (B, n)."""
        return np.minimum(self.random(n) * high, np.asarray(high) - 1).astype(np.int64)

    def choose(self, n, k, skip=None) -> np.ndarray:
        """(B, max k) int32: k distinct numbers below n in rising order, every set equally likely, none where `skip` (B, n) is
        True. n and k are numbers or (B,); a row with fewer than the most is filled up with its n."""
        n, k = (np.broadcast_to(v, len(self))[:, None] for v in (n, k))
        most, low = int(k.max(initial=0)), np.uint64((1 << int(n.max(initial=1)).bit_length()) - 1)
        if most == 0:
            self.count += 1                                                         # as if drawn: batch mates must not matter
            return np.zeros((len(self), 0), np.int32)
        number = np.arange(n.max(), dtype=np.uint64)
        ticket = self.bits(len(number))
        ticket &= ~low                                                              # random bits above, the number below
        ticket |= number
        if n.min() < len(number):
            ticket[number >= n] = ~np.uint64(0)
        if skip is not None:
            ticket[skip] = ~np.uint64(0)
        lowest = np.sort(np.partition(ticket, most - 1, axis=1)[:, :most], axis=1) & low
        return np.sort(np.where(np.arange(most) < k, lowest.astype(np.int32), n.astype(np.int32)), axis=1)


# ---- tokenizers -----------------------------------------------------------------------------------------------------

class Tokenizer:
    """A tiktoken.Encoding with the special tokens of SPECIALS after its own ids.

    `n_ordinary`: ids below it are text; `EOT`, `PAD`, `MASK`, `CLS`, `SEP`, `PRE`, `SUF`, `MID`, `R`, `S`, `X` and
    `sentinel` (the first of N_SENTINELS): special ids; `n_ids`: all real ids; `vocab_size`: rounded up to 64.
    """

    def __init__(self, name: str, ranks: dict[bytes, int], pattern: str, specials: dict[str, int]):
        self.name, self.n_ordinary, self.ranks, self.pattern = name, len(ranks), ranks, pattern
        first = max([len(ranks) - 1, *specials.values()]) + 1
        if EOT_TEXT not in specials:
            specials, first = {**specials, EOT_TEXT: first}, first + 1
        self.specials = {EOT_TEXT: specials[EOT_TEXT], **{s: first + i for i, s in enumerate(SPECIALS)}}
        self.enc = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks,
                                     special_tokens={**specials, **self.specials})
        self.EOT = specials[EOT_TEXT]
        self.PAD, self.MASK, self.CLS, self.SEP, self.PRE, self.SUF, self.MID, self.R, self.S, self.X = range(first, first + 10)
        self.sentinel = first + 10
        self.n_ids = first + len(SPECIALS)
        self.vocab_size = -(-self.n_ids // 64) * 64
        self.dtype = np.dtype(np.uint16 if self.n_ids <= 1 << 16 else np.uint32)
        self.bytes = [b""] * self.vocab_size                       # id -> bytes; b"" for special and padded ids
        for piece, i in ranks.items():
            self.bytes[i] = piece
        self.names = {i: s for s, i in {**specials, **self.specials}.items()}
        # a sentence ends after . ! ? or a newline (spaces that hang on to a token do not count)
        self.ends_sentence = np.array([b.rstrip(b" \t")[-1:] in (b".", b"!", b"?", b"\n") and b != b"" for b in self.bytes])

    def encode(self, text: str | bytes) -> list[int]:
        """Ids of plain text; special tokens spelled out in it stay text. Bytes that are not UTF-8 become single bytes."""
        if isinstance(text, str):
            text = text.encode("utf-8", errors="replace")
        if self.name == "bytes":
            return list(text)
        try:
            return self._encode(text.decode())
        except UnicodeDecodeError:
            parts = re.split("([\udc80-\udcff])", text.decode("utf-8", "surrogateescape"))     # text, stray byte, text, ...
            return [i for n, part in enumerate(parts)
                    for i in ([self.ranks[part.encode("utf-8", "surrogateescape")]] if n % 2 else self._encode(part))]

    def _encode(self, text: str) -> list[int]:
        if any(text[i:i + BLANKS].isspace() for i in range(0, len(text) - BLANKS + 1, BLANKS)):
            return [i for n in range(0, len(text), BLANKS) for i in self.enc.encode_ordinary(text[n:n + BLANKS])]
        return self.enc.encode_ordinary(text)

    def decode_bytes(self, ids) -> bytes:
        """The text's bytes; special ids are spelled by name, padded ids and negative numbers are nothing."""
        ids = np.asarray(ids).ravel().tolist()
        return b"".join(self.bytes[i] or self.names.get(i, "").encode() for i in ids if 0 <= i < self.n_ids)

    def decode(self, ids) -> str:
        """Text of ids; a partial UTF-8 character shows as U+FFFD and never raises."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """All that is needed to build it again; ranks are spelled out only for tokenizers trained here."""
        if not self.name.startswith("bpe:"):
            return json.dumps({"name": self.name})
        pieces = [base64.b64encode(self.bytes[i]).decode() for i in range(self.n_ordinary)]
        return json.dumps({"name": self.name, "pattern": self.pattern, "pieces": pieces})

    @classmethod
    def from_json(cls, text: str) -> "Tokenizer":
        """Raises UserError where the JSON is not a tokenizer."""
        try:
            spec = json.loads(text)
            if not spec["name"].startswith("bpe:"):
                return get_tokenizer(spec["name"])
            ranks = {base64.b64decode(p, validate=True): i for i, p in enumerate(spec["pieces"])}
            assert len(ranks) == len(spec["pieces"]), "a piece stands twice"
            assert all(bytes([b]) in ranks for b in range(256)), "a single byte is missing"
            return cls(spec["name"], ranks, spec["pattern"], {})
        except UserError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError) as e:
            raise UserError(f"this is not a tokenizer's JSON: {text[:60]!r} ({e}); train again or restore the file") from None


def get_tokenizer(name: str, corpus: "Corpus | None" = None) -> Tokenizer:
    """'bytes', a tiktoken name, or 'bpe:N' trained on `corpus`. Raises UserError with the remedy."""
    if name == "bytes":
        return Tokenizer("bytes", {bytes([b]): b for b in range(256)}, r"(?s).", {})
    if name.startswith("bpe:"):
        if not name[4:].isdecimal() or not 257 <= int(name[4:]) <= 1 << 20:
            raise UserError(f"--tokenizer={name}: write bpe:N with N from 257 to {1 << 20}, e.g. bpe:4096")
        return Tokenizer(name, *train_bpe(corpus, int(name[4:])), {})
    if name not in (known := tiktoken.list_encoding_names()):
        close = difflib.get_close_matches(name, [*known, "bytes", "bpe:4096"], 1, 0)
        raise UserError(f"--tokenizer={name} is not known; did you mean {close[0]}? (bytes, bpe:N, {', '.join(known)})")
    try:
        base = tiktoken.get_encoding(name)
    except Exception as e:   # requests' own errors: tiktoken names no other
        raise UserError(f"--tokenizer={name}: its file is not cached and could not be fetched ({type(e).__name__}); once, with a "
                        f"network, run python -c \"import tiktoken; tiktoken.get_encoding('{name}')\" with TIKTOKEN_CACHE_DIR "
                        "set to a folder you keep, or use --tokenizer=bytes") from None
    return Tokenizer(name, base._mergeable_ranks, base._pat_str, dict(base._special_tokens))


# letters with the space before them, up to three digits, punctuation, runs of blanks: GPT-2's idea of a word
BPE_PATTERN = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_bpe(corpus: "Corpus", n_ids: int, max_chars: int = 32 << 20) -> tuple[dict[bytes, int], str]:
    """Byte-pair encoding (Sennrich et al. 2016) on the corpus's first `max_chars` characters -> ranks, pattern.

    Every distinct word is kept once with its count; a heap gives the most frequent pair; a merge touches only the
    words that hold it. Ties go to the lower ids, so the same text gives the same tokenizer.
    """
    import regex  # comes with tiktoken, whose patterns it reads
    words, seen = Counter(), 0
    for text, _ in corpus.pieces():
        words.update(regex.findall(BPE_PATTERN, text))
        seen += len(text)
        if seen > max_chars:
            break
    ids = [list(word.encode("utf-8", "replace")) for word in words]
    freq = list(words.values())
    pieces = [bytes([b]) for b in range(256)]
    count, where = defaultdict(int), defaultdict(set)
    for w, word in enumerate(ids):
        for pair in itertools.pairwise(word):
            count[pair] += freq[w]
            where[pair].add(w)
    heap = [(-c, pair) for pair, c in count.items()]
    heapq.heapify(heap)
    while len(pieces) < n_ids and heap:
        c, pair = heapq.heappop(heap)
        if count[pair] != -c:                        # stale: its true count is on the heap too, or it is gone
            continue
        new = len(pieces)
        pieces.append(pieces[pair[0]] + pieces[pair[1]])
        changed = set()
        for w in where.pop(pair):
            word, merged, i = ids[w], [], 0
            while i < len(word):
                if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
                    merged.append(new)
                    i += 2
                else:
                    merged.append(word[i])
                    i += 1
            for old in itertools.pairwise(word):
                count[old] -= freq[w]
                changed.add(old)
            for fresh in itertools.pairwise(merged):
                count[fresh] += freq[w]
                where[fresh].add(w)
                changed.add(fresh)
            ids[w] = merged
        count.pop(pair)
        for p in changed - {pair}:
            if count[p] > 0:
                heapq.heappush(heap, (-count[p], p))
            else:
                count.pop(p, None)
                where.pop(p, None)
    if len(set(pieces)) < n_ids:
        raise UserError(f"--tokenizer=bpe:{n_ids}: this corpus has only {len(set(pieces))} distinct pieces; use bpe:{len(set(pieces))} or less")
    return {piece: i for i, piece in enumerate(pieces)}, BPE_PATTERN


# ---- reading text ---------------------------------------------------------------------------------------------------

def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    found = []
    for folder, inside, files in os.walk(root):
        inside[:] = [name for name in inside if name not in skip]          # never walks into site-packages
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found)


SEPARATOR = re.compile(r"(?m)<\|endoftext\|>\n(?<=^<\|endoftext\|>\n)")   # a whole line; found by its letters, which is fast


class Corpus:
    """The documents of a path, streamed: memory stays bounded whatever the size of a file, a document or a line of text."""

    def __init__(self, path: str = "", invalid_utf8: str = "replace"):
        self.path, self.invalid_utf8, self.replaced = path, invalid_utf8, 0
        if path and not os.path.exists(path):
            raise UserError(f"--data={path} does not exist; give a text file, a .jsonl file or a folder")
        if not path:
            self.files = _standard_library()
        elif os.path.isdir(path):
            hidden = lambda p: any(part.startswith(".") for part in p.relative_to(path).parts)
            found = (p for p in Path(path).rglob("*") if p.is_file() and not hidden(p))
            self.files = [p for p in sorted(found) if b"\0" not in _head(p)]
        else:
            self.files = [Path(path)]
        self.one_file = self.files == [Path(path)]
        if not any(p.stat().st_size for p in self.files):
            raise UserError(f"--data={path}: no text in it; give a file or folder that holds text")

    def __str__(self) -> str:
        size = sum(p.stat().st_size for p in self.files) / 1e6
        many = f"{len(self.files)} files" if len(self.files) > 1 else "1 file"
        return f"{self.path or 'Python standard library'} ({many}, {size:.1f} MB)"

    def digest(self) -> str:
        """Hash of what is in the files, where each ends and how it is read; not of names and dates."""
        h = hashlib.sha256()
        for p in self.files:
            h.update(b"%d %d %d\0" % (p.stat().st_size, self.one_file, p.suffix == ".jsonl"))
            with open(p, "rb") as f:
                while block := f.read(BLOCK):
                    h.update(block)
        return h.hexdigest()

    def pieces(self):
        """Yield (text, is_last): documents in pieces of about a million characters, cut at a line's end where there is one."""
        self.replaced = 0
        for path in self.files:
            if path.suffix == ".jsonl":
                yield from self._jsonl(path)
            else:
                yield from self._plain(path)

    def _plain(self, path: Path):
        pending, line_start = "", True
        for block in self._decoded(path):
            pending += block
            cut = pending.rfind("\n") + 1 or (len(pending) if len(pending) >= BLOCK else 0)
            text, pending = pending[:cut], pending[cut:]
            # in a single text file a line of its own ends a document; a folder's files are documents already
            first = 0 if line_start else text.find("\n") + 1 or cut     # where the text's first whole line begins
            parts = SEPARATOR.split(text[first:]) if self.one_file else [text[first:]]
            parts[0] = text[:first] + parts[0]
            line_start = text.endswith("\n") if text else line_start
            for i, part in enumerate(parts):
                if part or i < len(parts) - 1:
                    yield part, i < len(parts) - 1
        if self.one_file and line_start and pending == EOT_TEXT:
            pending = ""
        yield pending, True

    def _decoded(self, path: Path):
        decoder, cut = codecs.getincrementaldecoder("utf-8-sig")("replace" if self.invalid_utf8 == "replace" else "strict"), ""
        with open(path, "rb") as f:
            while True:
                block = f.read(BLOCK)
                text = cut + self._decode(path, block, lambda b: decoder.decode(b, final=not b))
                cut = "\r" if block and text.endswith("\r") else ""            # its \n may come with the next block
                yield text[:len(text) - len(cut)].replace("\r\n", "\n")
                if not block:
                    return

    def _decode(self, path: Path, raw: bytes, decode) -> str:
        """What `decode` makes of the bytes; counts replacements. Raises UserError where none are wanted."""
        try:
            text = decode(raw)
        except UnicodeDecodeError as e:
            raise UserError(f"{path}: not UTF-8 ({e.reason}); convert it, or pass --invalid_utf8=replace") from None
        self.replaced += max(0, text.count("\ufffd") - raw.count("\ufffd".encode()))
        return text

    def _jsonl(self, path: Path):
        """A line is held in memory whole: it is one JSON object."""
        errors = "replace" if self.invalid_utf8 == "replace" else "strict"
        with open(path, "rb") as f:
            for number, raw in enumerate(f, 1):
                line = self._decode(path, raw, lambda b: b.decode("utf-8", errors)).removeprefix("\ufeff")
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)["text"]
                    assert isinstance(text, str)
                except (ValueError, KeyError, TypeError, AssertionError, RecursionError):
                    raise UserError(f"{path}, line {number}: not a JSON object with a string field 'text': {line[:40]!r}; "
                                    "mend or remove the line") from None
                for start in range(0, len(text), BLOCK):
                    yield text[start:start + BLOCK], start + BLOCK >= len(text)


def _head(path: Path) -> bytes:
    with open(path, "rb") as f:
        return f.read(8192)


# ---- documents and windows -------------------------------------------------------------------------------------------

class Text:
    """One split of a corpus: token ids with an EOT after every document, and where each document starts and stops."""

    def __init__(self, tokens: np.ndarray, eot: int):
        self.tokens = tokens
        parts = range(0, len(tokens), BLOCK)                        # the text may be larger than memory
        stops = np.concatenate([np.empty(0, np.int64), *(i + np.flatnonzero(tokens[i:i + BLOCK] == eot) for i in parts)])
        starts = np.concatenate([[0], stops + 1])[:len(stops)]
        if len(stops) == 0 or stops[-1] != len(tokens) - 1:        # a split may end inside a document
            starts, stops = np.append(starts, stops[-1] + 1 if len(stops) else 0), np.append(stops, len(tokens))
        keep = stops > starts
        self.starts, self.stops = starts[keep], stops[keep]

    def __len__(self) -> int:
        return len(self.tokens)

    def stream(self, rng: Rng, length: int) -> np.ndarray:
        """(B, length) int32: windows anywhere in the text, EOT between documents."""
        if length > len(self):                                      # only a tiny validation split: repeat it
            return np.tile(np.resize(self.tokens, length).astype(np.int32), (len(rng), 1))
        windows = np.lib.stride_tricks.sliding_window_view(np.asarray(self.tokens), length)         # a view: nothing is read yet
        return windows[rng.below(len(windows))[:, 0]].astype(np.int32)

    def inside(self, rng: Rng, length: int, pad: int, n: int = 1, other: bool = False) -> np.ndarray:
        """(B, n, length) int32: n windows of one document (of n documents, if `other`), shorter ones padded at the end.

        Where documents of at least `length` tokens hold half of the text, only those are drawn from (no padding). Raises
        UserError where no document has two tokens.
        """
        size = self.stops - self.starts
        ways = np.where(size >= length, size - length + 1, 0)       # each window of each long document is equally likely
        if size[size >= length].sum() * 2 < size.sum():
            ways = size * (size > 1)
        edge = np.cumsum(ways)
        if edge[-1] == 0:
            raise UserError("no document has two tokens; give text with longer documents")
        at = rng.below(edge[-1], n)                                 # (B, n)
        doc = np.searchsorted(edge, at, side="right")
        if not other:
            doc[:] = doc[:, :1]
        elif len(self.starts) > 1:                                  # another document, however few there are
            step = 1 + rng.below(len(self.starts) - 1, n)
            doc[:, 1:] = np.where(doc[:, 1:] == doc[:, :1], (doc[:, :1] + step[:, 1:]) % len(self.starts), doc[:, 1:])
        short = size[doc] if other or n == 1 else (size[doc] + 1) // 2                # two crops of one must be able to differ
        crop = np.where(size[doc] > length, length, np.minimum(short, length))
        room = size[doc] - crop + 1
        start = rng.below(room, n)
        if other and len(self.starts) == 1:                         # one document: a distant place, half a document away
            start[:, 1:] = (start[:, :1] + room[:, 1:] // 2) % room[:, 1:]
        index = (self.starts[doc] + start)[..., None] + np.arange(length)
        window = self.tokens[np.minimum(index, len(self) - 1)].astype(np.int32)
        return np.where(np.arange(length) < crop[..., None], window, pad)


class Replay:
    """A text with an older one mixed back in: each row comes from `old` with probability `rate`."""

    def __init__(self, new: Text, old: Text, rate: float):
        self.new, self.old, self.rate = new, old, rate

    def _draw(self, rng: Rng, window) -> np.ndarray:
        old = rng.random(1)[:, 0] < self.rate
        out = window(self.new, rng)
        out[old] = window(self.old, rng[old])
        return out

    def stream(self, rng: Rng, length: int) -> np.ndarray:
        return self._draw(rng, lambda text, r: text.stream(r, length))

    def inside(self, rng: Rng, length: int, pad: int, n: int = 1, other: bool = False) -> np.ndarray:
        return self._draw(rng, lambda text, r: text.inside(r, length, pad, n, other))


# ---- batches ---------------------------------------------------------------------------------------------------------

def collate(made: dict[str, np.ndarray], names=()) -> dict:
    """Rows -> a batch of tensors, with what the device would have to ask the host for: which attention the arrays amount
    to, and where the targets are. Their number is rounded up to a 32nd of the batch, so that shapes stay few.

    `index` (N,) flat positions, `targets` (N,) or (N, n) and `weights` (N,) there, `denom` the sum of weights."""
    targets, segment, prefix = made["targets"], made["segment"], made["prefix"]
    flat = targets.reshape(segment.size, -1)
    index = np.flatnonzero(flat[:, 0] != IGNORE)
    weights = made["weights"].reshape(-1)[index]
    step = max(segment.size // 32, 1)
    spare = -len(index) % step if len(index) else step
    index = np.append(index, np.arange(spare))                      # places of weight 0
    chosen = np.where(flat[index] == IGNORE, 0, flat[index]).astype(np.int64)
    batch = dict(inputs=made["inputs"], index=index, weights=np.pad(weights, (0, spare)), denom=np.float32(weights.sum() or 1),
                 targets=chosen if targets.ndim == 3 else chosen[:, 0])
    if targets.ndim == 3:
        batch["ahead"] = np.maximum(targets[:, :, :-1], 0)
    one, padding_last = segment.max() <= 1, (segment[:, 1:] <= segment[:, :-1]).all()
    if one and padding_last and not prefix.any():
        batch["attention"] = "causal"                               # padding stands last: nobody sees it
    elif prefix.all() and segment.all() and one:
        batch["attention"] = "full"
    else:
        batch |= dict(attention="rows", segment=segment, prefix=prefix)
    if "label" in made:
        batch["label"] = made["label"]
    if "dice" in made:
        batch["dice"] = made["dice"].reshape(-1)[index]
    if "member" in made:
        batch |= dict(members=tuple(names), member=made["member"].repeat(segment.shape[1])[index])
    return {k: v if isinstance(v, (str, tuple)) else torch.tensor(v) for k, v in batch.items()}


# ---- the token cache ------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Tokens:
    """A tokenized corpus. `bytes_per_token` is that of the validation text (EOT counts as a token without bytes)."""
    tok: Tokenizer
    train: Text
    val: Text
    bytes_per_token: float
    about: str


def load_tokens(config: DataConfig, tok: Tokenizer | None = None, log=lambda line: None) -> Tokens:
    """The tokenized corpus of `config`, from its cache or made anew; `tok` overrides config.tokenizer. Raises UserError."""
    corpus = Corpus(config.data, config.invalid_utf8)
    digest = corpus.digest()
    tok = tok or _cached_tokenizer(config, corpus, digest, log)
    key = hashlib.sha256(json.dumps([CACHE_FORMAT, VAL_EVERY, digest, tok.to_json(), config.invalid_utf8]).encode()).hexdigest()
    path = Path(config.cache_dir) / f"tokens-{key[:16]}.bin"
    header = _read_header(path, key, tok)
    if header is None:
        _write_cache(corpus, tok, path, key, log)
        header = _read_header(path, key, tok)
        if header is None:
            raise UserError(f"{path}: the token cache just written cannot be read back; check the disk")
    ids = np.memmap(path, dtype=tok.dtype, mode="r", offset=4096)
    train, val = Text(ids[:header["n_train"]], tok.EOT), Text(ids[header["n_train"]:], tok.EOT)
    about = f"{corpus}, {len(train) / 1e6:.2f}M + {len(val) / 1e6:.2f}M tokens ({tok.name}, train + validation)"
    return Tokens(tok, train, val, header["val_bytes"] / len(val), about)


def _cached_tokenizer(config: DataConfig, corpus: Corpus, digest: str, log) -> Tokenizer:
    if not config.tokenizer.startswith("bpe:"):
        return get_tokenizer(config.tokenizer)
    path = Path(config.cache_dir) / f"{config.tokenizer.replace(':', '')}-{digest[:16]}.json"
    with contextlib.suppress(OSError, UserError):
        tok = Tokenizer.from_json(path.read_text(encoding="utf-8", errors="replace"))
        if tok.name == config.tokenizer:
            return tok
    log(f"training {config.tokenizer} on {corpus}")
    tok = get_tokenizer(config.tokenizer, corpus)
    with atomic_write(path) as f:
        f.write(tok.to_json().encode())
    return tok


def _read_header(path: Path, key: str, tok: Tokenizer) -> dict | None:
    """The header of a cache that is whole and ours, else None."""
    try:
        with open(path, "rb") as f:
            header = json.loads(f.read(4096))
            counts = header["n_train"], header["n_val"], header["val_bytes"]
            whole = all(type(n) is int and n > 0 for n in counts) and os.path.getsize(path) == 4096 + tok.dtype.itemsize * sum(counts[:2])
            if header["key"] != key or not whole:
                return None
            crc, highest = _checksum(f, header, tok)
        return header if crc == header["crc"] and highest <= tok.EOT else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _checksum(f, header: dict, tok: Tokenizer) -> tuple[int, int]:
    """CRC of a cache's header and ids, and the highest id."""
    crc, highest = zlib.crc32(json.dumps({k: v for k, v in header.items() if k != "crc"}).encode()), 0
    f.seek(4096)
    while block := f.read(BLOCK):
        crc, highest = zlib.crc32(block, crc), max(highest, int(np.frombuffer(block, tok.dtype).max()))
    return crc, highest


def _write_cache(corpus: Corpus, tok: Tokenizer, path: Path, key: str, log) -> None:
    """Tokenize in threads with bounded look-ahead; training documents first, then validation's."""
    eot = np.array([tok.EOT], tok.dtype).tobytes()

    def encode(piece):
        text, last = piece
        raw = text.encode("utf-8", errors="replace")
        ids = np.frombuffer(raw, np.uint8) if tok.name == "bytes" else np.asarray(tok.encode(raw), np.int64)
        assert len(ids) == 0 or ids.max() < tok.n_ordinary
        return ids.astype(tok.dtype).tobytes() + eot * last, len(raw), last

    log(f"tokenizing {corpus} with {tok.name}")
    n_doc, sizes, n_bytes = 0, [0, 0], [0, 0]
    with atomic_write(path) as f, tempfile.TemporaryFile(dir=path.parent) as held_out:
        f.write(b" " * 4096)
        threads = min(os.cpu_count() or 1, 8)                      # more would wait for the disk and hold memory
        with ThreadPoolExecutor(threads) as pool:
            for ids, raw, last in _bounded_map(pool, encode, _nonempty(corpus.pieces()), 2 * threads):
                split = n_doc % VAL_EVERY == VAL_EVERY - 1
                (held_out if split else f).write(ids)
                sizes[split] += len(ids) // tok.dtype.itemsize
                n_bytes[split] += raw
                n_doc += last
        held_out.seek(0)
        shutil.copyfileobj(held_out, f, BLOCK)
        if sizes[1] == 0:                                          # few documents: the tail of the text
            tail = max(sizes[0] // VAL_EVERY, 2)                   # an EOT and, before it, some text
            n_bytes[1] = max(round(n_bytes[0] * tail / max(sizes[0], 1)), 1)
            sizes = [sizes[0] - tail, tail]
        if sizes[0] < 2:
            raise UserError(f"--data={corpus.path}: {sum(sizes)} tokens are not enough to train on; give more text")
        header = dict(key=key, n_train=sizes[0], n_val=sizes[1], val_bytes=n_bytes[1])
        header["crc"] = _checksum(f, header, tok)[0]
        f.seek(0)
        f.write(json.dumps(header).encode())
    if corpus.replaced:
        log(f"{corpus.replaced} places that are not UTF-8 were replaced (--invalid_utf8=refuse stops instead)")


def _nonempty(pieces):
    """Drop documents without a character: two EOT in a row would teach nothing."""
    started = False
    for text, last in pieces:
        started = started or bool(text)
        if started:
            yield text, last
        started = started and not last


def _bounded_map(pool, function, pieces, ahead: int):
    """pool.map that holds at most `ahead` bundles of pieces, so that a corpus larger than memory streams through."""
    def bundles():
        bundle, size = [], 0
        for piece in pieces:
            bundle.append(piece)
            size += len(piece[0])
            if size >= BLOCK or len(bundle) >= 4096:                # short documents share a task: one each costs more than its work
                yield bundle
                bundle, size = [], 0
        yield bundle

    waiting = []
    for bundle in bundles():
        waiting.append(pool.submit(lambda b: [function(piece) for piece in b], bundle))
        if len(waiting) >= ahead:
            yield from waiting.pop(0).result()
    for future in waiting:
        yield from future.result()


# ---- files ----------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def atomic_write(path, keep: str | None = None):
    """Write a file whole or not at all: a temporary file, fsync, rename. `keep` names where the old one stays."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".", suffix=".tmp")
    try:
        with open(handle, "w+b") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)
        if keep and path.exists():
            _keep(path, path.with_name(keep))
        os.replace(temporary, path)
    except BaseException as e:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(e, OSError) and e.filename is None:
            e.filename = str(path)
        raise


def _keep(path: Path, kept: Path) -> None:
    """A second name for the file, so that at no moment there is none under the first."""
    link = kept.with_name(kept.name + ".tmp")
    with contextlib.suppress(OSError):
        os.unlink(link)
    try:
        os.link(path, link)
    except OSError:                                                # a file system without links
        shutil.copyfile(path, link)
    os.replace(link, kept)


def save_checkpoint(path, state: dict) -> None:
    """Tensors, numbers and strings only; the one before stays beside it as previous.pt."""
    with atomic_write(path, keep="previous.pt") as f:
        try:
            torch.save(state, f)
        except RuntimeError as e:                                  # its zip writer hides what stopped the write
            raise (e.__context__ if isinstance(e.__context__, OSError) else e) from None


def load_checkpoint(path) -> dict:
    """Read a checkpoint as data (no code runs), every byte checked against its CRC. Raises UserError with the remedy."""
    path = Path(path)
    if not path.exists():
        runs = [str(found.parent) for found in sorted(path.parent.parent.glob("*/ckpt.pt"))]
        raise UserError(f"{path} does not exist; train first (python train.py --help)" + f" or name a folder that has a run: {', '.join(runs[:20])}" * bool(runs))
    previous = path.with_name("previous.pt")
    remedy = f"the one before it is kept: cp {previous} {path}" if previous.exists() and previous != path else "restore a copy or train again"
    try:
        with zipfile.ZipFile(path) as z:
            if bad := z.testzip():
                raise zipfile.BadZipFile(f"checksum of {bad} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
        if missing := [name for name, kind in CHECKPOINT.items() if not isinstance(state.get(name), kind)]:
            raise ValueError(f"no {', '.join(missing)} in it")
        if not all(isinstance(name, str) and isinstance(weight, torch.Tensor) for name, weight in state["model"].items()):
            raise ValueError("its weights are no tensors")
        if state["step"] < 0 or not 0 <= state["elapsed_s"] < math.inf:
            raise ValueError("its step or its time is impossible")
        return state
    except Exception as e:   # zipfile, pickle and torch each raise their own on foreign bytes
        reason = str(e).splitlines()[0][:120] if str(e) else type(e).__name__
        if "weights_only" in str(e) or "Weights only" in str(e):
            reason = "it holds code, not only data; nothing in it was run"
        raise UserError(f"{path} is damaged or no checkpoint of this program ({reason}); {remedy}") from None


# ---- the command line -----------------------------------------------------------------------------------------------

def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        sys.exit(f"error: {message}")


def parse_flags(argv: list[str], doc: str, *configs, positional: str | None = None):
    """Flags `--name=value` from the fields of dataclasses -> their instances and the set of names given.

    `configs` are dataclasses (their defaults hold). `positional` names one optional free word, returned under that name in
    the dictionary's place of `given`. Exits with one line on an unknown flag (the nearest is named) or a bad value, raises UserError
    on one outside its interval.
    """
    formatter = lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=100)
    examples = re.findall(r"(?m)^ {4}(?:python|torchrun) .*$", doc)
    parser = _Parser(description=textwrap.fill(re.sub(r"^\w+\.py: ", "", doc.strip().split("\n\n")[0].replace("\n", " ")), 100), formatter_class=formatter,
                     epilog="\n".join(["examples:", *examples]) if examples else None, allow_abbrev=False,
                     usage=f"python %(prog)s {f'[{positional}] ' if positional else ''}[--flag=value ...]")
    if positional:
        parser.add_argument(positional, nargs="?", default=None, help="see above")
    for config in configs:
        about = None if config.__doc__.startswith(config.__name__ + "(") else config.__doc__      # not dataclass's own docstring
        section = parser.add_argument_group(config.__name__.removesuffix("Config").lower(), about)
        hints = typing.get_type_hints(config)
        for field in (f for f in dataclasses.fields(config) if "help" in f.metadata):
            kind = hints[field.name]
            if isinstance(kind, types.UnionType):
                kind = next(a for a in typing.get_args(kind) if a is not type(None))
            extra = dict(type=kind, metavar=kind.__name__.upper())
            if kind is bool:
                extra = dict(type=_boolean, nargs="?", const=True, metavar="true|false")
            if field.metadata["choices"]:
                extra |= dict(choices=field.metadata["choices"], metavar="|".join(map(str, field.metadata["choices"])))
            shown = f" [{field.default}]" if field.default not in ("", None) else ""
            section.add_argument(f"--{field.name}", default=argparse.SUPPRESS, help=(field.metadata["help"] + shown).replace("%", "%%"), **extra)
    values, unknown = parser.parse_known_args(argv)
    known = [f"--{f.name}" for config in configs for f in dataclasses.fields(config) if "help" in f.metadata]
    for word in unknown:
        near = difflib.get_close_matches(word.split("=")[0], known, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else "see --help"
        parser.error(f"unknown flag {word}; {hint}" if word.startswith("-") else f"unexpected {word!r}; flags are written --name=value")
    given = vars(values)
    instances = [config(**{f.name: given[f.name] for f in dataclasses.fields(config) if f.name in given}) for config in configs]
    for config in instances:
        check_values(config)
    return *instances, given


def cli(main, lower: str = "--block_size") -> None:
    """Run a script's main(argv): a mistake, a full disk or memory is one line and exit code 1, never a traceback. `lower`
    says what saves memory."""
    sys.stdout.reconfigure(errors="replace")                       # a terminal may not know every character
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))        # temporary files are removed
    try:
        main(sys.argv[1:])
    except UserError as e:
        sys.exit(f"error: {e}")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as e:
        sys.exit(f"error: {e.strerror or e}: {e.filename or 'while writing'}; what was saved before is intact")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (MemoryError, RuntimeError) as e:                       # torch's OutOfMemoryError is a RuntimeError
        if re.search(r"C\+\+ compiler|Python\.h", str(e)):
            sys.exit("error: --compile needs a C++ compiler and Python's headers; install them or leave it out")
        if isinstance(e, RuntimeError) and not re.search("out of memory|allocate memory|not enough memory|ALLOC_FAILED", str(e)):
            raise
        sys.exit(f"error: out of memory; what was saved before is intact. Lower {lower}")
