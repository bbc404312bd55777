"""corpus.py: files become documents, and documents become cached token ids.

A corpus is a text file (a line <|endoftext|> ends a document), a .jsonl or .ndjson file (field
"text"), a folder of both, or a built-in corpus: `python` (the source of Python's standard library),
`stories`, or `stories:N` (N of them). It is tokenized once, as a stream, into a memory-mapped cache
file that is named after a hash of the content and the tokenizer.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import struct
import sysconfig
import time
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

import stories
from config import UserError, atomic_write, flag, lock_folder, suggest, visible
from tokenizer import EOT_TEXT, Tokenizer, get_tokenizer

MOST_STORIES = 1_000_000  # 200 MB of text, a minute
STORIES_TOKENIZER = "bpe:1024"
LARGE_TOKENIZER = "bpe:2048"  # for texts of LARGE bytes or more; smaller ones get byte tokens
LARGE = 1_000_000
VAL_EVERY = 20  # every 20th document is validation; with fewer than 20, the last 1/20 of the tokens
BLOCK = 1 << 20  # characters that are read, tokenized and written at a time: this bounds memory
CACHE_FORMAT = 11  # raise it when the meaning of a cache's bytes changes
# After the ids: the number of training ids, the floor or NaN, and how many bytes were replaced.
FOOTER = struct.Struct("<qdq")
CRC_BYTES = 4  # after the footer: a CRC-32 of everything before it
REPORT_SECONDS = 5  # between two progress lines of the tokenization
NO_TEXT = {"ckpt.pt", ".run.lock", ".cache.lock"}  # folders with one of these are runs or caches
# Folders beside or inside the standard library that are not its code:
NO_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass
class DataConfig:
    """the text and its tokens"""

    data: str = flag(
        "stories", "text, .jsonl or .ndjson file, folder, stories, stories:N or python"
    )
    tokenizer: str | None = flag(None, "bytes, bpe:N or a tiktoken name; automatic: by the text")
    invalid_utf8: str = flag("replace", "what to do with non-UTF-8 bytes", ("replace", "refuse"))
    cache_dir: str = flag(".cache", "folder of the token caches")


@dataclass
class Tokens:
    """A tokenized corpus: 1-D arrays of ids in memory-mapped files, an EOT after every document."""

    tok: Tokenizer
    train: np.ndarray
    val: np.ndarray
    digest: str  # of the corpus's content
    about: str  # a one-line description
    floor: float | None  # entropy of the validation text, nats per byte; None unless stories


# ---- reading text ------------------------------------------------------------------------------


class Corpus:
    """The documents of a path or of a built-in corpus, read piece by piece."""

    def __init__(self, data: str, invalid_utf8: str = "replace"):
        self.name = data
        self.invalid_utf8 = invalid_utf8
        self.replaced = 0  # bytes that were not UTF-8, so far
        self.n_stories = count_stories(data)
        if self.n_stories:
            files = []
        elif data == "python":
            library = _files_of(sysconfig.get_path("stdlib"), NO_LIBRARY)
            files = [path for path in library if path.suffix == ".py"]
        elif os.path.isdir(data):
            files = _files_of(data)
        elif os.path.exists(data):
            files = [Path(data)]
        else:
            hint = suggest(data, ("stories", "python"))
            remedy = hint or "give a text file, a .jsonl file or a folder"
            raise UserError(f"--data={data} does not exist; {remedy}")

        self.files = [path for path in files if _is_text(path)]
        self.n_left_out = len(files) - len(self.files)
        self.size = sum(path.stat().st_size for path in self.files)
        if self.size == 0 and not self.n_stories:
            remedy = "give a text file in UTF-8 (no pipe, no UTF-16, no NUL bytes)"
            if os.path.isdir(data):
                remedy += "; folders that hold a run are skipped"
            raise UserError(f"--data={data}: there is no text in it; {remedy}")

    def __str__(self) -> str:
        if self.n_stories:
            return f"stories ({self.n_stories} documents)"
        n_files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        left_out = f"; {self.n_left_out} without text left out" if self.n_left_out else ""
        return f"{visible(self.name)} ({n_files}, {self.size:,} bytes{left_out})"

    def digest(self) -> str:
        """A hash of what is in the files and how it is read, not of names and dates."""
        if self.n_stories:
            # Any edit of the grammar or of its probabilities changes some of the first stories.
            first = [(text, round(nats, 3)) for text, nats in stories.documents(1000)]
            return hashlib.sha256(repr((self.n_stories, first)).encode()).hexdigest()
        whole = hashlib.sha256()
        for path in self.files:
            part = hashlib.sha256()
            with open(path, "rb") as f:
                while block := f.read(BLOCK):
                    part.update(block)
            whole.update(part.digest())
            whole.update(_format(path).encode())
        return whole.hexdigest()

    def require_unchanged(self, digest: str) -> None:
        """Raise UserError if the text has changed since it had this digest."""
        if self.digest() != digest:
            raise UserError(f"--data={self.name} changed while being read; run the command again")

    def pieces(self):
        """Yield (text, is_last) for pieces of documents, of about BLOCK characters at most.

        An empty document is left out: two EOTs in a row would teach nothing. Bytes that are not
        UTF-8 become U+FFFD and are counted in `replaced`, or they raise UserError."""
        self.replaced = 0
        if self.n_stories:
            yield from ((text, True) for text, _ in self._stories)
        for path in self.files:
            # Bytes that are not UTF-8 become lone surrogates, and all line ends become \n.
            with open(path, encoding="utf-8-sig", errors="surrogateescape", buffering=BLOCK) as f:
                for text, is_last in READERS[_format(path)](f):
                    text, n = re.subn("[\ud800-\udfff]", "\ufffd", text)  # JSON can add more
                    self.replaced += n
                    if n and self.invalid_utf8 == "refuse":
                        raise UserError(f"{path} has invalid UTF-8; pass --invalid_utf8=replace")
                    yield text, is_last

    def split(self):
        """Yield (text, is_last, is_val) for each piece; every VAL_EVERY-th document is_val."""
        n_documents = 0
        for text, is_last in self.pieces():
            yield text, is_last, n_documents % VAL_EVERY == VAL_EVERY - 1
            n_documents += is_last

    @cached_property
    def _stories(self) -> list[tuple[str, float]]:
        return list(stories.documents(self.n_stories))

    def floor(self) -> float | None:
        """Nats per byte of the validation documents under their own grammar, if it is known."""
        if not self.n_stories:
            return None
        held_out = self._stories[VAL_EVERY - 1 :: VAL_EVERY]
        return sum(nats for _, nats in held_out) / sum(len(text.encode()) for text, _ in held_out)


def count_stories(data: str) -> int | None:
    """ "stories:500" -> 500, "stories" -> the default number; another corpus -> None."""
    if data == "stories":
        return stories.DEFAULT_SIZE
    if not data.startswith("stories:"):
        return None
    number = data.removeprefix("stories:")
    n = int(number) if re.fullmatch("[0-9]{1,7}", number) else 0
    if not VAL_EVERY <= n <= MOST_STORIES:
        raise UserError(f"--data={data}: write stories:N with N from {VAL_EVERY} to {MOST_STORIES}")
    return n


def _files_of(root: str, leave_out=()) -> list[Path]:
    """The files below a folder, except hidden ones, runs, caches and folders in `leave_out`. Links
    to folders are followed, but none is read twice, and none that contains this one."""

    def fail(error):
        raise error

    found = []
    seen = {os.fspath(folder) for folder in Path(root).resolve().parents}
    for folder, inside, names in os.walk(root, onerror=fail, followlinks=True):
        inside[:] = sorted(n for n in inside if not n.startswith(".") and n not in leave_out)
        place = os.path.realpath(folder)
        if place in seen or NO_TEXT.intersection(names):
            inside.clear()
        else:
            found += [Path(folder, name) for name in names if not name.startswith(".")]
        seen.add(place)
    return sorted(found)


def _is_text(path: Path) -> bool:
    """Whether a file begins like text: UTF-16 and binary files contain NULs."""
    if not path.is_file():
        return False
    with open(path, "rb") as f:
        return b"\0" not in f.read(8192)


def _format(path: Path) -> str:
    """A key of READERS. It is part of the digest: the same bytes, read otherwise, are another
    text."""
    return "json" if path.suffix.lower() in (".jsonl", ".ndjson") else "text"


def _plain(f):
    """A line that is only <|endoftext|> ends a document, and so does the end of the file. A piece
    is held back until it is known whether its document continues."""
    piece = []  # lines
    size = 0
    at_line_start = True
    while line := f.readline(BLOCK):
        is_separator = at_line_start and line.strip() == EOT_TEXT
        at_line_start = line.endswith("\n")
        if piece and (is_separator or size >= BLOCK):
            yield "".join(piece), is_separator
            piece = []
            size = 0
        if not is_separator:
            piece.append(line)
            size += len(line)
    if piece:
        yield "".join(piece), True


def _json_lines(f):
    """Each line is one JSON object, and is held in memory as a whole."""
    for number, line in enumerate(f, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            if not isinstance(text, str):
                raise TypeError
            text = text.replace("\r\n", "\n").replace("\r", "\n")  # as in text files
        except (ValueError, KeyError, TypeError, RecursionError):
            wrong = f"{f.name}, line {number}: not a JSON object with a text field: {line[:40]!r}"
            raise UserError(f"{wrong}; correct or remove it") from None
        for start in range(0, len(text), BLOCK):
            yield text[start : start + BLOCK], start + BLOCK >= len(text)


READERS = {"text": _plain, "json": _json_lines}  # reader(file) -> pairs (text, is_last)


# ---- the token cache ---------------------------------------------------------------------------


def load_tokens(
    config: DataConfig, tok: Tokenizer | None = None, log=print, expected=None
) -> Tokens:
    """The Tokens of a corpus, from its cache or newly made. Raises UserError.

    `tok` overrides config.tokenizer. `log` gets lines for the user. `expected` is the digest that
    the corpus must have if a run continues on it."""
    try:
        corpus = Corpus(config.data, config.invalid_utf8)
    except UserError as e:
        if expected is None:
            raise
        remedy = "the checkpoint names this text: say with --data where it is now"
        raise UserError(f"{e}; {remedy}") from None
    digest = corpus.digest()
    if expected not in (None, digest):
        remedy = "restore it, or name the text to train on from now on with --data"
        raise UserError(f"{corpus} is not the text that the checkpoint was trained on: {remedy}")
    tok = tok or _tokenizer(config, corpus, digest, log)
    parts = [CACHE_FORMAT, VAL_EVERY, digest, tok.to_json(), config.invalid_utf8]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    path = Path(config.cache_dir, f"tokens-{key[:16]}.bin")

    train, val, floor, n_replaced = _cached(
        lambda: _read_cache(path, tok),
        lambda: _write_cache(corpus, digest, tok, path, log),
        config.cache_dir,
        log,
    )
    about = f"{corpus}, {len(train):,} tokens and {len(val):,} held out ({tok.name})"
    if n_replaced:
        about += f"; {n_replaced:,} bytes that are not UTF-8 were replaced"
    return Tokens(tok, train, val, digest, about, floor)


def _tokenizer(config: DataConfig, corpus: Corpus, digest: str, log) -> Tokenizer:
    """The requested tokenizer, or the automatic one. A BPE is trained once for each corpus, without
    the held-out documents (with fewer than VAL_EVERY documents, on the whole text)."""
    by_size = "bytes" if corpus.size < LARGE else LARGE_TOKENIZER
    name = config.tokenizer or (STORIES_TOKENIZER if corpus.n_stories else by_size)
    if not name.startswith("bpe:"):
        return get_tokenizer(name)
    path = Path(config.cache_dir, f"tokenizer-{CACHE_FORMAT}-{name[4:]}-{digest[:16]}.json")

    def texts():  # a generator: starts after get_tokenizer has checked the name
        log(f"training {name} on {corpus}")
        yield from (text for text, _, is_val in corpus.split() if not is_val)

    def train():
        tok = get_tokenizer(name, texts())
        corpus.require_unchanged(digest)
        with atomic_write(path) as f:
            f.write(tok.to_json().encode())

    return _cached(lambda: _read_tokenizer(path), train, config.cache_dir, log)


def _cached(read, make, folder: str, log):
    """What read() finds. If that is None, one process calls make() first while others wait."""
    found = read()
    if found is None:
        with lock_folder(folder, name="cache", waiting=log):
            if read() is None:
                make()
            found = read()
    return found


def _read_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer in a file, or None if the file is missing or damaged."""
    with contextlib.suppress(OSError, UserError):
        return Tokenizer.from_json(path.read_text(encoding="utf-8", errors="replace"))
    return None


def _read_cache(path: Path, tok: Tokenizer):
    """(training ids, validation ids, floor, number of bytes replaced), or None if the cache is
    missing or damaged."""
    with contextlib.suppress(OSError, ValueError, struct.error):  # missing, or too short
        raw = np.memmap(path, mode="r")  # bytes
        body, crc = np.split(raw, [-CRC_BYTES])
        if zlib.crc32(body) != int.from_bytes(crc.tobytes(), "little"):
            return None
        n_train, floor, n_replaced = FOOTER.unpack(body[-FOOTER.size :])
        ids = body[: -FOOTER.size].view(tok.dtype)
        # A forged cache has a valid checksum, too: check the ids.
        if 0 < n_train < len(ids) and ids.max() <= tok.EOT:
            floor = None if math.isnan(floor) else floor
            return ids[:n_train], ids[n_train:], floor, n_replaced
    return None


def _write_cache(corpus: Corpus, digest: str, tok: Tokenizer, path: Path, log) -> None:
    """Write the ids of the training and of the validation documents, a footer and a CRC-32."""
    log(f"tokenizing {corpus} with {tok.name}")
    eot = np.array([tok.EOT], tok.dtype).tobytes()
    reported = time.monotonic()
    with atomic_write(path) as f:
        ends = []
        for of_val in (False, True):
            for text, is_last, is_val in corpus.split():
                if is_val == of_val:
                    f.write(np.array(tok.encode(text), tok.dtype).tobytes() + eot * is_last)
                if time.monotonic() - reported > REPORT_SECONDS:
                    reported = time.monotonic()
                    log(f"{f.tell() // tok.dtype.itemsize:,} tokens so far")
            ends.append(f.tell() // tok.dtype.itemsize)
        corpus.require_unchanged(digest)
        n_train, n = ends
        if n < 4:  # two to train on, two held out
            raise UserError(f"--data={corpus.name} has only {n} tokens; give more text")
        if n_train == n:  # too few documents: hold out the last tokens, with their EOT
            n_train -= max(n // VAL_EVERY, 2)
            f.seek((n_train - 1) * tok.dtype.itemsize)
            f.write(eot)  # training text needs an EOT at its end: it wraps around to its beginning
            f.seek(0, os.SEEK_END)
        floor = corpus.floor()
        f.write(FOOTER.pack(n_train, math.nan if floor is None else floor, corpus.replaced))
        f.flush()
        f.write(zlib.crc32(np.memmap(f, mode="r")).to_bytes(CRC_BYTES, "little"))
