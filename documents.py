"""documents.py: the documents of a corpus, read once and piece by piece.

Plain text and JSON become one stream of text, in which <|endoftext|> ends a document. A file that
cannot be read does not stop a folder: it is left out, from where it breaks, and counted; alone, it
is an error.

    >>> text, is_last, is_held_out = next(pieces(Corpus("stories:20", n_stories=20)))
    >>> text[:8], is_last
    ('At dawn,', True)
"""

import gzip
import hashlib
import json
import os
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import stories
from tokenizer import EOT_TEXT, normalize
from util import UserError, suggest

MOST_STORIES = 1_000_000  # 200 MB of text, a minute
VAL_EVERY = 20  # one document in 20 is held out for validation
HELD_OUT = (0.02, 0.10)  # if the documents' hash holds out another share, it is the end of the text
MOST_REPLACED = 0.01  # share of bytes that are not UTF-8; a text with more is in another encoding
BLOCK = 1 << 20  # characters that are read and tokenized at a time: this bounds memory
# Folders beside or inside the standard library that are not its code:
NO_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
CACHE_FILE = re.compile(r"(tokens|tokenizer)-[0-9a-f]{16}\.json")  # its folder holds no text
JSON_START = re.compile(r'\s*(\[\s*)?\{\s*"')
# It takes a newline with it; at the end of what was read so far, that newline may still come.
SEPARATOR = re.compile(rf"{re.escape(EOT_TEXT)}(?:\n|(?!\Z))")
# An error in reading a file -> what is wrong with it, in the line about a folder:
FAULTS = dict.fromkeys([gzip.BadGzipFile, EOFError, zlib.error], "bad gzip")
FAULTS |= {UnicodeError: "binary", ValueError: "JSON without texts"}
FAULTS |= {RecursionError: "JSON nested too deep", OSError: "unreadable"}


@dataclass
class Corpus:
    """What is read, and what the reading has found."""

    name: str
    n_stories: int | None = None
    files: list[Path] = field(default_factory=list)
    told: list[tuple[str, float]] = field(default_factory=list)  # stories and their nats, if read
    n_files: int = 0  # with text
    n_bytes: int = 0  # of text
    n_held_out: int = 0  # bytes of the documents that their hash holds out
    n_replaced: Counter = field(default_factory=Counter)  # file -> its bytes that are not UTF-8
    left_out: Counter = field(default_factory=Counter)  # what is wrong -> number of files
    by_hash: bool = True  # whether documents are held out by their hash, or the end of the text


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


def find_files(data: str) -> tuple[list[Path], Counter]:
    """The files of a path or of Python's library, without hidden ones and caches; and how many runs
    and unreadable ones were left out."""
    is_library = data == "python" and not os.path.exists(data)
    root = sysconfig.get_path("stdlib") if is_library else data
    if os.path.isfile(root):
        return [Path(root)], Counter()
    if not os.path.isdir(root):
        wrong = "is neither a file nor a folder" if os.path.exists(root) else "does not exist"
        hint = suggest(data, ("stories", "python")) or "give a text file, a JSON file or a folder"
        raise UserError(f"--data={data} {wrong}; {hint}")

    suffix, not_read = (".py", NO_LIBRARY) if is_library else ("", ())
    files = []
    left_out = Counter()
    visited = set()  # a link may lead back to a folder above it
    walk = os.walk(root, onerror=lambda _: left_out.update(["unreadable"]), followlinks=True)
    for folder, folders, names in walk:
        real = os.path.realpath(folder)
        is_run = {"ckpt.pt", "log.jsonl"} <= {*names}
        left_out["run"] += is_run and real not in visited
        if real in visited or is_run or any(map(CACHE_FILE.fullmatch, names)):
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(n for n in folders if n[0] != "." and n not in not_read)
        paths = [Path(folder, n) for n in names if n[0] != "." and n.endswith(suffix)]
        regular = [path for path in paths if os.path.isfile(path)]
        left_out["unreadable"] += len(paths) - len(regular)  # links to nothing, pipes, ...
        files += regular
    return sorted(files), left_out


def read_files(corpus: Corpus) -> Iterator[str]:
    """Yield texts in blocks, <|endoftext|> after each text."""
    for path in corpus.files:
        has_text = False
        try:
            for block in read_file(path, corpus.n_replaced):
                has_text = True
                yield block
        except tuple(FAULTS) as error:
            if len(corpus.files) == 1:
                raise UserError(f"--data={path}: {error}") from None
            fault = FAULTS.get(type(error), "unreadable")
            corpus.left_out[f"{fault} from the middle on" if has_text else fault] += 1
        corpus.n_files += has_text
        yield f"{EOT_TEXT}\n"


def read_file(path: Path, n_replaced: Counter) -> Iterator[str]:
    """Yield plain text in blocks, or JSON's texts with <|endoftext|> after each. All line ends
    become \\n, bytes that are not UTF-8 become U+FFFD. Raises one of FAULTS."""
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig", errors="surrogateescape") as f:
        head = f.read(8192)
        f.seek(0)
        if "\0" in head:
            raise UnicodeError("it has NUL bytes; if it is UTF-16, convert it to UTF-8")
        suffix = Path(path.name.lower().removesuffix(".gz")).suffix
        is_json = suffix in (".json", ".jsonl", ".ndjson", ".ipynb")
        if not suffix and JSON_START.match(head):
            is_json = True
        for number, text in enumerate(f if is_json else iter(lambda: f.read(BLOCK), ""), 1):
            if is_json and re.match(r"\s*(\[|\{\s*$)", text):
                text += f.read()  # an array, or an object over several lines: all of it
            text, n = re.subn("[\ud800-\udfff]", "\ufffd", text)
            n_replaced[path] += n  # bytes that are not UTF-8; a \ud83d in JSON is not one
            yield from texts_of_json(text, number) if is_json else [text]


def texts_of_json(line: str, number: int) -> Iterator[str]:
    """The texts of an object, or of an array of objects, with <|endoftext|> after each."""
    entry = line
    try:
        entries = json.loads(line) if line.strip() else []
        for entry in entries if isinstance(entries, list) else [entries]:
            yield normalize(entry["text"]) + f"{EOT_TEXT}\n"
    except RecursionError:
        raise RecursionError(f"line {number}: this JSON is nested too deep") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        found = repr(str(entry)[:40])
        if isinstance(entry, dict):
            found = "one with " + ", ".join(f"{k} ({type(v).__name__})" for k, v in entry.items())
        wrong = f"line {number}: not a JSON object whose text is a string, but {found[:100]}"
        raise ValueError(f"{wrong}; correct it, or rename the file to .txt") from None


def pieces(corpus: Corpus) -> Iterator[tuple[str, bool, bool]]:
    """Yield (text, is_last, is_held_out) for pieces of documents, of BLOCK characters at most.
    Empty documents are left out: two EOTs in a row would teach nothing. Raises UserError if the
    text is in another encoding."""
    if corpus.n_stories:
        corpus.told = corpus.told or list(stories.documents(corpus.n_stories))
        blocks = (f"{text}{EOT_TEXT}\n" for text, _ in corpus.told)
    else:
        blocks = read_files(corpus)
    rest = ""
    is_first = True
    for block in blocks:
        *documents, rest = SEPARATOR.split(rest + block)
        cut = []
        for text in documents:
            starts = range(0, len(text), BLOCK)
            cut += [(text[start : start + BLOCK], start == starts[-1]) for start in starts]
        while len(rest) > BLOCK + len(EOT_TEXT):  # a separator may have begun in it
            cut.append((rest[:BLOCK], False))
            rest = rest[BLOCK:]
        for text, is_last in cut:
            if is_first:
                held_out = is_chosen(text)
            is_first = is_last
            n_bytes = len(text.encode())
            corpus.n_bytes += n_bytes
            corpus.n_held_out += n_bytes if held_out else 0
            yield text, is_last, held_out

    n_replaced = corpus.n_replaced.total()
    if n_replaced > MOST_REPLACED * corpus.n_bytes:
        [(path, n)] = corpus.n_replaced.most_common(1)
        remedy = f"iconv -f GB18030 -t UTF-8 {path} > NEW (or from LATIN1, SHIFT_JIS, ...)"
        raise UserError(f"--data={path}: {n:,} bytes are not UTF-8; convert it: {remedy}")
    least, most = HELD_OUT
    corpus.by_hash = least * corpus.n_bytes <= corpus.n_held_out <= most * corpus.n_bytes


def is_chosen(text: str) -> bool:
    """Whether a document is one of VAL_EVERY: a hash of its text decides, so equal ones agree."""
    digest = hashlib.sha256(text.strip().encode()).digest()
    return int.from_bytes(digest[:8]) % VAL_EVERY == 0
