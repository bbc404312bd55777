"""corpus.py: a corpus becomes token ids, in memory-mapped files, and a part of it is held out.

A corpus is a text file (<|endoftext|> ends a document), JSON (objects with a field "text", one a
line or in an array), either of them compressed (.gz), a folder of such files, a .bin file of ids
(nanoGPT's train.bin), or built in: `python` (the source of Python's standard library), `stories`,
or `stories:N` (N of them). One pass over the text writes its ids into a cache.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
from array import array
from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch.distributed as dist

import stories
from documents import BLOCK, VAL_EVERY, Corpus, count_stories, find_files, is_chosen, pieces
from tokenizer import EOT_TEXT, Tokenizer, get_tokenizer
from util import UserError, atomic_write, flag, visible

STORIES_TOKENIZER = "bpe:1024"
LARGE_TOKENIZER = "bpe:2048"  # for texts of LARGE bytes or more; smaller ones get byte tokens
LARGE = 1_000_000
GZIP_FACTOR = 4  # a text is taken to be so many times as large as its .gz
CACHE_FORMAT = 14  # raise it when the same text would give other ids
REPORT_SECONDS = 5  # between two progress lines of the tokenization


@dataclass
class DataConfig:
    """the text and its tokens"""

    data: str = flag("stories", "text, JSON or .bin file, folder, stories, stories:N or python")
    tokenizer: str | None = flag(None, "bytes, bpe:N or a tiktoken name; automatic: by the text")
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


def load_tokens(
    config: DataConfig, tok: Tokenizer | None = None, log=print, expected: str | None = None
) -> Tokens:
    """The Tokens of a corpus, from its cache or newly made. Raises UserError.

    `tok` overrides config.tokenizer. `log` gets lines for the user. `expected` is the digest that
    the corpus must have if a run continues on it."""
    group = None
    if dist.is_initialized():  # the first process makes the cache, and the others wait for it
        group = dist.new_group(backend="gloo", timeout=timedelta(days=9))
        if dist.get_rank() > 0:
            dist.barrier(group)
    is_ids = config.data.endswith(".bin") and os.path.isfile(config.data)
    tokens = map_ids(config, tok) if is_ids else load_text(config, tok, log)
    if group and dist.get_rank() == 0:
        dist.barrier(group)
    if expected not in (None, tokens.digest):
        wrong = f"--data={config.data} is not the text that the checkpoint was trained on"
        raise UserError(f"{wrong}: restore it, or name another one with --data")
    return tokens


def map_ids(config: DataConfig, tok: Tokenizer | None) -> Tokens:
    """A file of ids, as it is: nothing is copied, and its end is held out."""
    data = config.data
    if tok is None and (config.tokenizer or "bpe:").startswith("bpe:"):
        raise UserError(f"--data={data} holds ids: name their tokenizer, such as --tokenizer=gpt2")
    tok = tok or get_tokenizer(config.tokenizer)
    size = os.path.getsize(data)
    n, odd = divmod(size, tok.dtype.itemsize)
    if n < 4 or odd:
        raise UserError(f"--data={data}: {size} bytes are not four or more ids of {tok.dtype}")
    ids = np.memmap(data, tok.dtype, "r")
    if ids.max() >= tok.n_ids:
        wrong = f"--data={data}: the id {ids.max()} is not one of the {tok.n_ids} of {tok.name}"
        raise UserError(f"{wrong}; name the tokenizer that made this file with --tokenizer")
    n_train = n - max(n // VAL_EVERY, 2)
    about = f"{visible(data)} ({size:,} bytes of ids), {n_train:,} tokens and {n - n_train:,} "
    about += f"held out at its end ({tok.name})"
    ends = ids.view(np.uint8)[:BLOCK].tobytes() + ids.view(np.uint8)[-BLOCK:].tobytes()
    digest = hashlib.sha256(b"%d" % size + ends).hexdigest()
    return Tokens(tok, ids[:n_train], ids[n_train:], digest, about, None)


def load_text(config: DataConfig, tok: Tokenizer | None, log) -> Tokens:
    """The Tokens of a text. If its cache is there, nothing else is read."""
    n_stories = count_stories(config.data)
    files, left_out = ([], Counter()) if n_stories else find_files(config.data)
    corpus = Corpus(config.data, n_stories, files, left_out=left_out)
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    program = Path(stories.__file__).read_text(encoding="utf-8") if n_stories else None
    key = hashlib.sha256(json.dumps([CACHE_FORMAT, stats, n_stories, program]).encode())
    bpe_path = None
    if tok is None:
        size = sum(GZIP_FACTOR * n if name.lower().endswith(".gz") else n for name, n, _ in stats)
        by_size = "bytes" if size < LARGE else LARGE_TOKENIZER
        name = config.tokenizer or (STORIES_TOKENIZER if n_stories else by_size)
        bpe_key = hashlib.sha256(f"{key.hexdigest()} {name}".encode()).hexdigest()
        bpe_path = Path(config.cache_dir, f"tokenizer-{bpe_key[:16]}.json")
        tok = find_tokenizer(name, bpe_path, corpus, log)
    key.update(tok.to_json().encode())
    path = Path(config.cache_dir, f"tokens-{key.hexdigest()[:16]}.json")
    splits = [path.with_suffix(".train"), path.with_suffix(".val")]

    try:
        facts = json.loads(path.read_bytes())
        fits = facts.pop("sizes") == [split.stat().st_size for split in splits]
    except (OSError, ValueError):
        fits = False
    if not fits:
        facts = write_cache(path, tok, corpus, log)
        if bpe_path and tok.name.startswith("bpe:"):
            with atomic_write(bpe_path) as f:
                f.write(tok.to_json().encode())
    train, val = (np.memmap(split, tok.dtype, "r") for split in splits)
    return Tokens(tok, train, val, **facts)


def find_tokenizer(name: str, saved: Path, corpus: Corpus, log) -> Tokenizer:
    """A BPE learns from the documents that are not held out; if the end of the text will be, from
    all of them."""
    if not name.startswith("bpe:"):
        return get_tokenizer(name)
    if saved.exists():
        return Tokenizer.from_json(saved.read_text(encoding="utf-8"))
    log(f"training {name} on {corpus.name}")
    first, second = (replace(corpus, n_replaced=Counter(), left_out=Counter()) for _ in range(2))
    for _ in pieces(first):  # finds out what is held out
        pass
    corpus.told = second.told = first.told
    texts = (text for text, _, chosen in pieces(second) if not (chosen and first.by_hash))
    return get_tokenizer(name, texts)


def write_cache(path: Path, tok: Tokenizer, corpus: Corpus, log) -> dict:
    """Write the ids of the training and of the held-out documents, and facts beside them."""
    log(f"tokenizing {corpus.name} with {tok.name}")
    eot = np.array([tok.EOT], tok.dtype).tobytes()
    content = hashlib.sha256()
    lengths = array("q")  # of each piece, in bytes of ids; those that are held out are negative
    reported = time.monotonic()
    with (
        atomic_write(path.with_suffix(".train")) as train,
        atomic_write(path.with_suffix(".val")) as val,
    ):
        for text, is_last, held_out in pieces(corpus):
            content.update((text + EOT_TEXT * is_last).encode())
            ids = np.array(tok.encode(text), tok.dtype).tobytes() + eot * is_last
            (val if held_out else train).write(ids)
            lengths.append(-len(ids) if held_out else len(ids))
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                log(f"{(train.tell() + val.tell()) // len(eot):,} tokens so far")
        n = (train.tell() + val.tell()) // len(eot)
        if n < 4:  # two to train on, two held out
            wrong = f"--data={corpus.name} has only {n} tokens{left_out_words(corpus)}"
            raise UserError(f"{wrong}; give more text")
        if not corpus.by_hash:
            hold_out_end(train, val, lengths, eot)
        sizes = [train.tell(), val.tell()]
    n_train, n_val = (size // len(eot) for size in sizes)
    facts = {"digest": content.hexdigest(), **describe(corpus, n_train, n_val, tok.name)}
    with atomic_write(path) as f:
        f.write(json.dumps(facts | {"sizes": sizes}).encode())
    return facts


def hold_out_end(train, val, lengths: array, eot: bytes) -> None:
    """Put the held-out documents back where they came from; then hold out the last tokens."""
    n = (train.tell() + val.tell()) // len(eot)
    n_train = n - max(n // VAL_EVERY, 2)
    if val.tell():
        with tempfile.TemporaryFile(dir=Path(train.name).parent) as whole:
            train.seek(0)
            val.seek(0)
            for length in lengths:
                whole.write(train.read(length) if length > 0 else val.read(-length))
            whole.seek(0)
            train.seek(0)
            shutil.copyfileobj(whole, train)
    train.seek(n_train * len(eot))
    val.seek(0)
    shutil.copyfileobj(train, val)
    train.seek((n_train - 1) * len(eot))
    train.write(eot)  # training text wraps around, so it needs an EOT at its end
    train.truncate()
    val.truncate()


def describe(corpus: Corpus, n_train: int, n_val: int, tokenizer: str) -> dict:
    """A line about the corpus, and the entropy of its held-out stories."""
    floor = None
    if corpus.n_stories:
        about = f"stories ({corpus.n_stories} documents)"
        told = [each for each in corpus.told if not corpus.by_hash or is_chosen(each[0])]
        floor = sum(nats for _, nats in told) / sum(len(text) for text, _ in told)
    else:
        n_files = "1 file" if corpus.n_files == 1 else f"{corpus.n_files} files"
        what = f"{n_files}, {corpus.n_bytes:,} bytes{left_out_words(corpus)}"
        about = f"{visible(corpus.name)} ({what})"
    at_end = "" if corpus.by_hash else " at its end"
    about += f", {n_train:,} tokens and {n_val:,} held out{at_end} ({tokenizer})"
    if corpus.n_replaced.total():
        about += f"; {corpus.n_replaced.total():,} bytes that are not UTF-8 were replaced"
    return {"about": about, "floor": floor}


def left_out_words(corpus: Corpus) -> str:
    """ "; left out: 2 binary, 1 run" """
    counts = [(n, why) for why, n in corpus.left_out.most_common() if n]
    words = [f"{n} {why}{'s' if why == 'run' and n > 1 else ''}" for n, why in counts]
    return f"; left out: {', '.join(words)}" if words else ""
