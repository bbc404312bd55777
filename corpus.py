"""corpus.py: files become documents, and documents become cached token ids.

A corpus is a text file, a .jsonl file (field "text"), a folder, or a built-in one: `python`, the
source of Python's standard library, `stories`, or `stories:N`, so many of them. It is tokenized
once, as a stream, into a memory-mapped cache that is named after its content, its tokenizer and the
cache's format. Files are data, never code: the cache is raw integers behind a JSON header with a
checksum.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import sysconfig
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np

import stories
from config import UserError, atomic_write, flag, lock_folder, suggest, visible
from tokenizer import EOT_TEXT, Tokenizer, get_tokenizer, train_bpe

DEFAULT_DATA = "stories"
MOST_STORIES = 1_000_000  # 200 MB of text, a minute
BUILTIN_TOKENIZER = {"stories": "bpe:1024", "python": "bpe:2048"}
LARGE_TOKENIZER = "bpe:2048"  # for files of LARGE bytes or more; smaller ones are read as bytes
LARGE = 1_000_000
VAL_EVERY = 20  # every 20th document is validation; of fewer than 20, the last 1/20 of the tokens
BLOCK = 1 << 20  # characters that are read, tokenized and written at a time: the bound on memory
CACHE_FORMAT = 3  # raise it when the bytes of a cache change their meaning
HEADER = 4096  # bytes of JSON before the ids
REPORT_SECONDS = 5  # between the lines that show how far the tokenization is
UTF16 = (b"\xff\xfe", b"\xfe\xff")  # how such a text begins
RUN_FILES = ("ckpt.pt", ".run.lock")  # a folder that holds one of these is a run, not text


@dataclass
class DataConfig:
    """the text and its tokens"""

    data: str = flag("", "text or .jsonl file, folder, stories[:N] or python; empty: stories")
    tokenizer: str | None = flag(None, "bytes, bpe:N or a tiktoken name; automatic: by the size")
    invalid_utf8: str = flag("replace", "bytes that are not UTF-8", ("replace", "refuse"))
    cache_dir: str = flag(".cache", "folder of the token caches")


@dataclass
class Tokens:
    """A tokenized corpus: 1-D arrays of ids in memory-mapped files, an EOT after every document."""

    tok: Tokenizer
    train: np.ndarray
    val: np.ndarray
    digest: str  # of the corpus's content
    about: str  # one line for people
    floor: float | None  # nats a byte of the validation text, where the generator knows them


# ---- reading text ------------------------------------------------------------------------------


class Corpus:
    """The documents of a path or of a built-in corpus, streamed: memory stays bounded.

    `leave_out` are folders inside `data` that are not text: the cache, the run's own.
    """

    def __init__(self, data: str = "", invalid_utf8: str = "replace", leave_out=()):
        self.name = data or DEFAULT_DATA
        self.invalid_utf8 = invalid_utf8
        self.replaced = 0  # bytes that were not UTF-8, so far
        self.n_read = 0  # bytes of the files, so far
        self.n_stories = count_stories(self.name)
        path = Path(self.name)
        if self.n_stories:
            self.files = []
        elif self.name == "python":
            self.files = _standard_library()
        elif path.is_dir():
            self.files = _text_files(path, leave_out)
        elif path.exists():
            self.files = [path]
        else:
            hint = suggest(self.name, BUILTIN_TOKENIZER) or "give a text file, .jsonl or folder"
            raise UserError(f"--data={self.name} does not exist; {hint}")

        self.one_file = self.files == [path]
        self.size = sum(file.stat().st_size for file in self.files)
        if self.size == 0 and not self.n_stories:
            raise UserError(f"--data={self.name}: no text in it; give a file or folder with text")
        if self.one_file and _head(path).startswith(UTF16):
            remedy = f"iconv -f UTF-16 -t UTF-8 {shlex.quote(self.name)} > text.txt"
            raise UserError(f"--data={self.name} is UTF-16 text; convert it: {remedy}")

    def __str__(self) -> str:
        if self.n_stories:
            return f"stories ({self.n_stories} documents)"
        n_files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        return f"{visible(self.name)} ({n_files}, {self.size / 1e6:.1f} MB)"

    def digest(self) -> str:
        """A hash of what is in the files and how it is read, not of names and dates."""
        if self.n_stories:
            generator = Path(stories.__file__).read_bytes()
            return hashlib.sha256(generator + b"%d" % self.n_stories).hexdigest()
        whole = hashlib.sha256(b"one" if self.one_file else b"many")
        for path in self.files:
            part = hashlib.sha256()
            with open(path, "rb") as f:
                while block := f.read(BLOCK):
                    part.update(block)
            whole.update(part.digest())
            whole.update(b"json" if path.suffix == ".jsonl" else b"text")
        return whole.hexdigest()

    def require(self, digest: str) -> None:
        """Raise UserError where the text has changed since it had this digest."""
        if self.digest() != digest:
            raise UserError(f"--data={self.name} changed while it was read; run the command again")

    def pieces(self):
        """Yield (text, is_last) for pieces of documents, of about a million characters at most.

        A document without a character is left out: two EOT in a row would teach nothing.
        """
        inside = False  # a document of which something was yielded
        for text, is_last in self._all_pieces():
            inside = inside or text != ""
            if inside:
                yield text, is_last
            inside = inside and not is_last

    def _all_pieces(self):
        self.replaced = 0
        self.n_read = 0
        if self.n_stories:
            yield from ((text, True) for text, _ in self._stories)
        for path in self.files:
            before = self.n_read
            # bytes that are not UTF-8 become lone surrogates; all line ends become \n
            with open(path, encoding="utf-8-sig", errors="surrogateescape", buffering=BLOCK) as f:
                read = self._json_lines if path.suffix == ".jsonl" else self._plain
                for piece in read(f):
                    self.n_read = before + f.buffer.raw.tell()
                    yield piece

    def _plain(self, f):
        """In a corpus of one file, a line that is only <|endoftext|> ends a document."""
        lines = []
        size = 0
        at_line_start = True
        while line := f.readline(BLOCK):
            is_last = self.one_file and at_line_start and line.rstrip("\n") == EOT_TEXT
            at_line_start = line.endswith("\n")
            if not is_last:
                lines.append(line)
                size += len(line)
            if is_last or size >= BLOCK:
                yield self._mended(f, "".join(lines)), is_last
                lines.clear()
                size = 0
        yield self._mended(f, "".join(lines)), True

    def _json_lines(self, f):
        """Each line is one JSON object, held in memory whole."""
        for number, line in enumerate(f, 1):
            line = self._mended(f, line)
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
                if not isinstance(text, str):
                    raise TypeError
            except (ValueError, KeyError, TypeError, RecursionError):
                wrong = f"{f.name}, line {number}: no JSON object with a text: {line[:40]!r}"
                raise UserError(f"{wrong}; mend or remove the line") from None
            for start in range(0, len(text), BLOCK):
                yield text[start : start + BLOCK], start + BLOCK >= len(text)

    def _mended(self, f, text: str) -> str:
        """Bytes that were not UTF-8 become U+FFFD and are counted, or are refused."""
        text, n = re.subn("[\udc80-\udcff]", "\ufffd", text)
        if n and self.invalid_utf8 == "refuse":
            raise UserError(f"{f.name}: not UTF-8; convert it, or pass --invalid_utf8=replace")
        self.replaced += n
        return text

    @cached_property
    def _stories(self) -> list[tuple[str, float]]:
        return list(stories.documents(self.n_stories))

    def floor(self) -> float | None:
        """Nats a byte that the language itself costs, over the validation documents."""
        if not self.n_stories:
            return None
        held_out = self._stories[VAL_EVERY - 1 :: VAL_EVERY]
        return sum(nats for _, nats in held_out) / sum(len(text.encode()) for text, _ in held_out)


def count_stories(data: str) -> int | None:
    """ "stories:500" -> 500, "stories" -> as many as usual; None: it is another corpus. Raises
    UserError for a number that makes no corpus."""
    if data == "stories":
        return stories.DEFAULT_SIZE
    if not data.startswith("stories:"):
        return None
    number = data.removeprefix("stories:")
    n = int(number) if re.fullmatch("[0-9]{1,7}", number) else 0
    if not VAL_EVERY <= n <= MOST_STORIES:
        raise UserError(
            f"--data={data}: write stories:N, with N from {VAL_EVERY} to {MOST_STORIES}"
        )
    return n


def _head(path: Path) -> bytes:
    with open(path, "rb") as f:
        return f.read(8192)


def _standard_library() -> list[Path]:
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    found = []
    for folder, inside, names in os.walk(sysconfig.get_path("stdlib")):
        inside[:] = [name for name in inside if name not in skip]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def _text_files(root: Path, leave_out) -> list[Path]:
    """The files of a folder without hidden ones, binary ones, runs and what is to be left out."""

    def fail(error):
        raise error

    left_out = {Path(path).resolve() for path in leave_out}
    found = []
    for folder, inside, names in os.walk(root, onerror=fail):
        inside[:] = [name for name in inside if not name.startswith(".")]
        if Path(folder).resolve() in left_out or any(name in names for name in RUN_FILES):
            inside.clear()
            continue
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return [path for path in sorted(found) if path.is_file() and b"\0" not in _head(path)]


# ---- the token cache ---------------------------------------------------------------------------


def load_tokens(
    config: DataConfig,
    tok: Tokenizer | None = None,
    log=print,
    leave_out=(),
    expected: str | None = None,
) -> Tokens:
    """The Tokens of a corpus, from its cache or made anew. Raises UserError.

    `tok` overrides config.tokenizer. `log` takes lines for people. `leave_out`: folders inside a
    folder corpus that are not text. `expected`: the digest of the corpus of a run that goes on.
    """
    corpus = Corpus(config.data, config.invalid_utf8, [config.cache_dir, *leave_out])
    digest = corpus.digest()
    if expected not in (None, digest):
        raise UserError(
            f"{corpus} is not the text that the checkpoint was trained on: it was edited or moved; "
            "restore it, or name the text to go on with by --data (or --replay_data)"
        )
    tok = tok or _tokenizer(config, corpus, digest, log)
    parts = [CACHE_FORMAT, VAL_EVERY, digest, tok.to_json(), config.invalid_utf8]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    path = Path(config.cache_dir, f"tokens-{key[:16]}.bin")

    cached = _read_cache(path, key, tok)
    if cached is None:
        with _lock(config):  # one process makes the cache; those that waited find it
            cached = _read_cache(path, key, tok)
            cached = cached or _write_cache(corpus, digest, tok, path, key, log)
    ids, header = cached
    train = ids[: header["n_train"]]
    val = ids[header["n_train"] :]
    about = f"{corpus}, {len(train) / 1e6:.2f}M + {len(val) / 1e6:.2f}M tokens ({tok.name})"
    return Tokens(tok, train, val, digest, about, header["floor"])


def _lock(config: DataConfig):
    return lock_folder(config.cache_dir, name="cache", stale=("token*.tmp",), wait=True)


def _tokenizer(config: DataConfig, corpus: Corpus, digest: str, log) -> Tokenizer:
    """The tokenizer that was asked for, or the automatic one; trained once for each corpus."""
    small = "bytes" if corpus.size < LARGE else LARGE_TOKENIZER
    kind = "stories" if corpus.n_stories else corpus.name
    name = config.tokenizer or BUILTIN_TOKENIZER.get(kind, small)
    if not name.startswith("bpe:"):
        return get_tokenizer(name)
    path = Path(config.cache_dir, f"tokenizer-{name[4:]}-{digest[:16]}.json")
    with contextlib.suppress(OSError, UserError):
        tok = Tokenizer.from_json(path.read_text(encoding="utf-8", errors="replace"))
        if tok.name == name or config.tokenizer is None:
            return tok

    log(f"training {name} on {corpus}")
    texts = (text for text, _ in corpus.pieces())
    if config.tokenizer:
        tok = get_tokenizer(name, texts)
    else:  # a corpus with few different words gets fewer ids
        tok = train_bpe(texts, int(name[4:]))
    corpus.require(digest)
    with _lock(config), atomic_write(path) as f:
        f.write(tok.to_json().encode())
    return tok


def _checksum(header: dict, ids: np.ndarray) -> int:
    return zlib.crc32(ids, zlib.crc32(json.dumps(header).encode()))


def _read_cache(path: Path, key: str, tok: Tokenizer) -> tuple[np.ndarray, dict] | None:
    """Ids and header of a cache that is whole and no other corpus's, else None."""
    try:
        with open(path, "rb") as f:
            header = json.loads(f.read(HEADER))
        ids = np.memmap(path, tok.dtype, mode="r", offset=HEADER)
        sizes = [header["n_train"], header["n_val"]]
        possible = all(type(n) is int and n > 0 for n in sizes) and sum(sizes) == len(ids)
        known = isinstance(header["floor"], (float, type(None))) and header["key"] == key
        whole = header.pop("crc") == _checksum(header, ids) and ids.max() <= tok.EOT
        return (ids, header) if possible and known and whole else None
    except (OSError, ArithmeticError, LookupError, ValueError, TypeError, RecursionError):
        return None


def _write_cache(corpus: Corpus, digest: str, tok: Tokenizer, path: Path, key: str, log):
    """Tokenize the corpus; returns ids and header."""
    log(f"tokenizing {corpus} with {tok.name}")
    with atomic_write(path) as f:
        f.write(b" " * HEADER)
        n_train, n_val = _write_ids(f, path.parent, corpus, tok, log)
        corpus.require(digest)
        if n_val == 0:  # few documents: an EOT and, before it, some text
            n_val = max(n_train // VAL_EVERY, 2)
            n_train -= n_val
        if n_train < 2:
            what = f"{n_train + n_val} tokens are not enough to train on"
            raise UserError(f"--data={corpus.name}: {what}; give more text")
        header = {"key": key, "n_train": n_train, "n_val": n_val, "floor": corpus.floor()}
        f.flush()
        header["crc"] = _checksum(header, np.memmap(f, tok.dtype, mode="r", offset=HEADER))
        f.seek(0)
        f.write(json.dumps(header).encode())
    if corpus.replaced:
        remedy = "--invalid_utf8=refuse stops instead"
        log(f"{corpus.replaced} bytes that are not UTF-8 were replaced ({remedy})")
    return np.memmap(path, tok.dtype, mode="r", offset=HEADER), header


def _write_ids(f, folder: Path, corpus: Corpus, tok: Tokenizer, log) -> list[int]:
    """Write the ids of the training documents, then of validation's. Returns their numbers."""
    threads = min(os.cpu_count() or 1, 8)
    bundles = _bundles(corpus)
    reported = time.monotonic()
    with tempfile.TemporaryFile(dir=folder) as held_out, ThreadPoolExecutor(threads) as pool:
        # a few bundles at a time, so that a corpus larger than the memory streams through
        while batch := list(itertools.islice(bundles, 2 * threads)):
            for train, val in pool.map(partial(_encode, tok), batch):
                f.write(train)
                held_out.write(val)
            now = time.monotonic()
            if now - reported > REPORT_SECONDS and corpus.size:
                reported = now
                log(f"tokenized {corpus.n_read / 1e6:.0f} of {corpus.size / 1e6:.0f} MB")
        sizes = [f.tell() - HEADER, held_out.tell()]  # bytes
        held_out.seek(0)
        shutil.copyfileobj(held_out, f, BLOCK)
    return [size // tok.dtype.itemsize for size in sizes]


def _bundles(corpus: Corpus):
    """Lists of (text, is_last, is_val), of about a million characters: what one task encodes."""
    bundle = []
    size = 0
    n_documents = 0
    for text, is_last in corpus.pieces():
        is_val = n_documents % VAL_EVERY == VAL_EVERY - 1
        bundle.append((text, is_last, is_val))
        size += len(text)
        n_documents += is_last
        if size >= BLOCK or len(bundle) >= 4096:
            yield bundle
            bundle = []
            size = 0
    yield bundle


def _encode(tok: Tokenizer, bundle) -> list[bytes]:
    """The ids of a bundle's training texts and of its validation texts, as a cache holds them."""
    eot = np.array([tok.EOT], tok.dtype).tobytes()
    parts = [[], []]
    for text, is_last, is_val in bundle:
        raw = text.encode("utf-8", "replace")
        ids = np.frombuffer(raw, np.uint8) if tok.name == "bytes" else np.array(tok.encode(raw))
        parts[is_val].append(ids.astype(tok.dtype).tobytes())
        if is_last:
            parts[is_val].append(eot)
    return [b"".join(part) for part in parts]
