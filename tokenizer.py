"""tokenizer.py: text to ids and back: bytes, a tiktoken encoding, or a BPE trained here.

Every tokenizer has the same special tokens after its own ids, so that a checkpoint of one objective
can be trained further with another. Text that spells a special token is encoded as plain text.

    >>> tok = get_tokenizer("bytes")
    >>> tok.encode("Hi [MASK]")
    [72, 105, 32, 91, 77, 65, 83, 75, 93]
    >>> tok.decode([72, 105, tok.MASK])
    'Hi[MASK]'
"""

import base64
import heapq
import json
import math
import re
import unicodedata
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import regex  # installed with tiktoken; it reads the same patterns
import tiktoken

from util import UserError, suggest

EOT_TEXT = "<|endoftext|>"
N_SENTINELS = 256
SPECIALS = ["[PAD]", "[MASK]", "[CLS]", "[SEP]", "<PRE>", "<SUF>", "<MID>", "[R]", "[S]", "[X]"]
SPECIALS += [f"<extra_id_{k}>" for k in range(N_SENTINELS)]

# words with the space before them, up to three digits, punctuation with a newline after it, blanks;
# combining marks belong to words: without them, many of Asia's scripts would fall apart
BPE_PATTERN = r" ?[\p{L}\p{M}]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]+\n?|\s+(?!\S)|\s+"
SINGLE_BYTES = [bytes([b]) for b in range(256)]
MOST_CHARS = 32 << 20  # from which a BPE is trained
MOST_DIFFERENT = 1 << 20  # characters in different words; the rarest words beyond are left out
MOST_LETTERS = 1000  # per word when a BPE is trained; longer words, such as DNA, are cut
LONGEST = 1 << 18  # characters encoded at a time: a million blanks overflow tiktoken's stack


def normalize(text: str | bytes) -> str:
    """The text of a corpus or a prompt: without a byte order mark, with \\n as its only line end,
    and with U+FFFD for every byte that is not UTF-8.

    >>> normalize(b"\\xef\\xbb\\xbfone\\r\\ntwo\\xff")
    'one\\ntwo\ufffd'
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


class Tokenizer:
    """Ids: first those of text, then EOT, then SPECIALS; an encoding with its own EOT keeps it.

    Tables by id: `bytes`, empty for special ids and vocabulary padding; their number `n_bytes`;
    `names` of special ids."""

    def __init__(self, name, ranks: dict[bytes, int], pattern: str, specials=(), nfc=False):
        self.name = name
        self.nfc = nfc  # letters and accents are composed before a text is encoded
        self.ranks = ranks
        self.n_ordinary = len(ranks)  # ids below it are text
        self.specials = dict(specials)
        self.n_ids = max([len(ranks) - 1, *self.specials.values()]) + 1
        for spelling in (EOT_TEXT, *SPECIALS):
            if spelling not in self.specials:
                self.specials[spelling] = self.n_ids
                self.n_ids += 1
        self.vocab_size = math.ceil(self.n_ids / 64) * 64
        self.dtype = np.dtype(np.uint16 if self.n_ids <= 1 << 16 else np.uint32)
        self.names = {id: spelling for spelling, id in reversed(self.specials.items())}
        self.EOT = self.specials[EOT_TEXT]
        self.PAD, self.MASK, self.CLS, self.SEP = map(self.specials.get, SPECIALS[:4])
        self.PRE, self.SUF, self.MID = map(self.specials.get, SPECIALS[4:7])
        self.R, self.S, self.X, self.sentinel = map(self.specials.get, SPECIALS[7:11])

        self.bytes = [b""] * self.vocab_size
        for piece, id in ranks.items():
            self.bytes[id] = piece
        self.n_bytes = np.array([len(piece) for piece in self.bytes], np.int32)
        self._spelled = [self.names.get(id, "").encode() or b for id, b in enumerate(self.bytes)]
        self.enc = tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=self.specials
        )

    def encode(self, text: str | bytes) -> list[int]:
        """Ids of plain text. Bytes that are not UTF-8 become the ids of single bytes."""
        if isinstance(text, str):
            text = text.encode("utf-8", "replace")
        if self.name == "bytes":
            return list(text)

        ids = []
        text = text.decode("utf-8", "surrogateescape")
        if self.nfc:
            text = unicodedata.normalize("NFC", text)
        # Text, stray byte, text, stray byte, ...: a stray byte decodes to a lone surrogate.
        for part in re.split("([\udc80-\udcff])", text):
            if "\udc80" <= part <= "\udcff":
                ids.append(self.ranks[part.encode("utf-8", "surrogateescape")])
            else:
                for start in range(0, len(part), LONGEST):
                    ids += self.enc.encode_ordinary(part[start : start + LONGEST])
        return ids

    def decode_bytes(self, ids) -> bytes:
        """The bytes of ids: special ids spelled out; vocab padding and negative ids left out."""
        ids = np.asarray(ids, dtype=np.int64).ravel()
        return b"".join([self._spelled[id] for id in ids.tolist() if 0 <= id < self.vocab_size])

    def decode(self, ids) -> str:
        """The text of ids; an incomplete character becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """What from_json rebuilds it from: its name, and its pieces if it was trained here or
        imported from Hugging Face."""
        if not self.name.startswith(("bpe:", "hf:")):
            return json.dumps({"name": self.name})
        pieces = [base64.b64encode(piece).decode() for piece in self.bytes[: self.n_ordinary]]
        spec = {"name": self.name, "pattern": self.enc._pat_str, "pieces": pieces}
        if self.name.startswith("hf:"):
            spec |= {"specials": self.specials, "nfc": self.nfc}
        return json.dumps(spec)

    @classmethod
    def from_json(cls, text: str) -> "Tokenizer":
        """The tokenizer that to_json wrote. Raises UserError."""
        try:
            spec = json.loads(text)
            name = spec["name"]
            if name.startswith(("bpe:", "hf:")):
                pieces = [base64.b64decode(piece) for piece in spec["pieces"]]
                ranks = {piece: id for id, piece in enumerate(pieces)}
                more = spec.get("specials", ()), spec.get("nfc", False)
                return cls(name, ranks, spec["pattern"], *more)
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise UserError(f"this is not a tokenizer's JSON: {text[:60]!r} ({e})") from None
        return get_tokenizer(name)


def get_tokenizer(name: str, texts=()) -> Tokenizer:
    """'bytes', a tiktoken encoding's name, or 'bpe:N': learned from `texts`, at most N text ids."""
    if name == "bytes":
        return Tokenizer("bytes", {byte: id for id, byte in enumerate(SINGLE_BYTES)}, r"(?s).")
    if name.startswith("bpe:"):
        if not re.fullmatch("bpe:[1-9][0-9]{2,5}", name) or int(name[4:]) < 257:
            raise UserError(f"--tokenizer={name}: write bpe:4096, or another N from 257 to 999999")
        return train_bpe(texts, int(name[4:]))
    known = tiktoken.list_encoding_names()
    if name not in known:
        hint = suggest(name, known) or f"choose bytes, bpe:N or one of {', '.join(known)}"
        raise UserError(f"--tokenizer={name} is not known; {hint}")
    try:
        base = tiktoken.get_encoding(name)
    except Exception as e:  # tiktoken lets the errors of its network library through
        line = f"--tokenizer={name}: not cached, and the download failed ({type(e).__name__})"
        remedy = "set TIKTOKEN_CACHE_DIR to a folder that has it, or start with --tokenizer=bytes"
        raise UserError(f"{line}; {remedy}") from None
    ranks = base._mergeable_ranks
    if max(ranks.values()) >= len(ranks):  # p50k_base's EOT lies among them
        raise UserError(f"--tokenizer={name}: its ids have a gap; use gpt2 or cl100k_base")
    return Tokenizer(name, ranks, base._pat_str, base._special_tokens)


def train_bpe(texts, n_ids: int) -> Tokenizer:
    """Byte-pair encoding (Sennrich et al. 2016) on the beginning of the texts.

    It ends early if every word has become one piece. Each distinct word is kept once, with its
    count; a merge touches only the words that contain the pair. Ties go to the lower ids, so the
    same text always gives the same tokenizer."""
    counted = _count_words(texts)
    times = list(counted.values())
    words = [list(word.encode("utf-8", "replace")) for word in counted]
    pieces = list(SINGLE_BYTES)
    count = Counter()  # pair -> how often it occurs in the text
    where = defaultdict(set)  # pair -> the words it occurs in, or did
    for w, word in enumerate(words):
        for pair in pairwise(word):
            count[pair] += times[w]
            where[pair].add(w)
    heap = [(-n, pair) for pair, n in count.items()]
    heapq.heapify(heap)

    while len(pieces) < n_ids and heap:
        n, pair = heapq.heappop(heap)
        if count[pair] != -n or n == 0:
            continue  # stale: the current count is on the heap, too
        change = Counter()
        for w in where.pop(pair):
            for other, sign in _merge(words[w], pair, len(pieces)):
                change[other] += sign * times[w]
                where[other].add(w)
        pieces.append(pieces[pair[0]] + pieces[pair[1]])
        for other, n in change.items():
            if n:
                count[other] += n
                heapq.heappush(heap, (-count[other], other))
    return Tokenizer(f"bpe:{n_ids}", {piece: id for id, piece in enumerate(pieces)}, BPE_PATTERN)


def _merge(word: list[int], pair: tuple[int, int], new: int):
    """Replace a pair by its new piece, from left to right. Yield what that changes: (pair, -1) for
    each that is lost, (pair, 1) for each that is gained.

    >>> word = [1, 1, 1, 2]
    >>> list(_merge(word, (1, 1), 3)), word
    ([((1, 1), -1), ((1, 1), -1), ((3, 1), 1)], [3, 1, 2])
    """
    i = 0
    while i < len(word) - 1:
        if word[i] == pair[0] and word[i + 1] == pair[1]:
            before = max(i - 1, 0)
            yield from ((lost, -1) for lost in pairwise(word[before : i + 3]))
            word[i : i + 2] = [new]
            yield from ((gained, 1) for gained in pairwise(word[before : i + 2]))
        i += 1


def _count_words(texts) -> Counter:
    """How often each word occurs in about the first MOST_CHARS characters of the texts."""
    words = Counter()
    read = 0  # characters
    for text in texts:
        for word in regex.findall(BPE_PATTERN, text):
            for start in range(0, len(word), MOST_LETTERS):
                words[word[start : start + MOST_LETTERS]] += 1
        read += len(text)
        if read > MOST_CHARS:
            break
    kept = Counter()
    different = 0  # characters
    for word, n in words.most_common():
        if different > MOST_DIFFERENT:
            break
        kept[word] = n
        different += len(word)
    return kept
