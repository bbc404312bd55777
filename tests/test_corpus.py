"""test_corpus.py: files become documents, documents become token ids."""

import gzip
import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest

import corpus
import documents
import stories
from corpus import DataConfig
from documents import Corpus, count_stories, find_files, is_chosen, pieces
from tokenizer import EOT_TEXT, get_tokenizer
from util import UserError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, content: str | bytes) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())


def load(name: str, tokenizer="bytes", **more):
    """The tokens of a corpus, and the lines that were printed."""
    printed = []
    return corpus.load_tokens(DataConfig(name, tokenizer), log=printed.append, **more), printed


def documents_of(name: str) -> list[str]:
    n = count_stories(name)
    read = pieces(Corpus(name, n, [] if n else find_files(name)[0]))
    return "".join(text + "\0" * is_last for text, is_last, _ in read).split("\0")[:-1]


# ---- files -> documents ------------------------------------------------------------------------

CORPORA = {  # file -> content, documents
    "plain.txt": (f"one\n{EOT_TEXT}\n\n{EOT_TEXT}\ntwo\n\nthree", ["one\n", "\n", "two\n\nthree"]),
    "empty_ones.txt": (f"{EOT_TEXT}\n{EOT_TEXT}\none\n{EOT_TEXT}\n{EOT_TEXT}\n", ["one\n"]),
    "joined.txt": (EOT_TEXT.join(["one", " two\n", "\n\nthree"]), ["one", " two\n", "\nthree"]),
    "windows.txt": (b"\xef\xbb\xbfone\r\n<|endoftext|>\r\ntwo\rthree", ["one\n", "two\nthree"]),
    "broken.txt": (
        b"a\xffb\xe2\x82 c\xef\xbf\xbd" + b"x" * 300,
        ["a\ufffdb\ufffd\ufffd c\ufffd" + "x" * 300],
    ),
    "lines.JSONL": ('{"text": "a\\r\\nb"}\n\n{"n": 1, "text": "c"}\n', ["a\nb", "c"]),
    "lines.ndjson": ('{"text": ""}\n{"text": "\\ud83d"}', ["\ufffd"]),
    "joined.jsonl": (json.dumps({"text": f"one{EOT_TEXT} two"}), ["one", " two"]),
    "lines.json": ('\ufeff{"text": "a"}\n{"text": "b"}', ["a", "b"]),
    "lines": ('{"n": 1, "text": "a"}\n{"text": "b"}', ["a", "b"]),
    "lines.log": ('{"text": "a"}\n', ['{"text": "a"}\n']),
    "array.json": (json.dumps([{"text": "\ufeffa"}, {"text": "b"}], indent=1), ["a", "b"]),
    "object.json": (json.dumps({"text": "a"}, indent=1), ["a"]),
    "plain.txt.gz": (gzip.compress(b"one\r\n<|endoftext|>two"), ["one\n", "two"]),
    "lines.jsonl.gz": (gzip.compress(b'{"text": "a"}\n{"text": "b"}'), ["a", "b"]),
}


@pytest.mark.parametrize("name", CORPORA)
def test_documents_of_every_format(name, folder):
    content, expected = CORPORA[name]
    write(name, content)
    assert documents_of(name) == expected


@pytest.mark.parametrize("block", [16, 17, 18, 20, 31, 64])
def test_documents_do_not_depend_on_how_much_is_read_at_a_time(block, folder, monkeypatch):
    texts = ["one\n", "two\n" + "x" * 40 + EOT_TEXT[:-1], "three \n" * 9]
    write("t.txt", f"{EOT_TEXT}\n".join(texts).replace("\n", "\r\n"))
    write("t.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    monkeypatch.setattr(documents, "BLOCK", block)
    assert documents_of("t.txt") == documents_of("t.jsonl") == texts


def test_a_folder_is_read_without_hidden_files_runs_and_caches(folder):
    runs = ("out/clm/ckpt.pt", "out/clm/log.jsonl", "out/clm/f.txt")
    names = ("b.txt", "a/c.md", "a/ckpt.pt", ".git/d.txt", "a/.e.txt", "cache/g.txt", *runs)
    for name in names:
        write(f"texts/{name}", name)
    corpus.load_tokens(DataConfig("texts", "bpe:300", "texts/cache"), log=print)
    os.symlink("..", "texts/a/back")
    os.symlink("nothing", "texts/a/broken")
    assert documents_of("texts") == ["a/c.md", "a/ckpt.pt", "b.txt"]
    words = "texts (3 files, 20 bytes; left out: 1 run, 1 unreadable), "
    assert load("texts")[0].about.startswith(words)


BAD_FILES = {  # file -> content, what is said if it is alone, what in a folder
    "a.txt.gz": (b"text", "Not a gzipped file", "bad gzip"),
    "b.txt.gz": (gzip.compress(b"text" * 99)[:-9], "ended before", "bad gzip"),
    "c.json": ("[" * 20_000, "recursion", "JSON nested too deep"),
    "d.txt": ("text".encode("utf-16"), "NUL", "binary"),
    "e.json": (
        '{"name": "x", "id": 1}',
        r"line 1: .*name \(str\), id \(int\)",
        "JSON without texts",
    ),
    "f.jsonl": ('{"text": "x"}\n{"text": []}', r"line 2: .*text \(list\)", "rest after JSON w"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_does_not_stop_a_folder(name, folder):
    content, alone, in_folder = BAD_FILES[name]
    write(f"t/{name}", content)
    with pytest.raises(UserError, match=f"{name}: .*{alone}"):
        load("t")
    write("t/good.txt", "a good text")
    assert f"; left out: 1 {in_folder}" in load("t")[0].about


def test_built_in_corpora(folder):
    parts = {part for path in find_files("python")[0] for part in path.parts}
    assert "asyncio" in parts and not parts & {"test", "site-packages", "__pycache__"}
    assert documents_of("stories:30") == [text for text, _ in stories.documents(30)]
    assert DataConfig().data == "stories" and count_stories("stories") == stories.DEFAULT_SIZE
    for name in ("stories", "python", "stories:30"):  # a path of this name wins
        write(f"{name}/a.txt", "my own")
        assert documents_of(name) == ["my own"] and count_stories(name) is None


# ---- documents -> ids --------------------------------------------------------------------------


def test_a_hash_of_its_text_decides_whether_a_document_is_held_out(folder):
    """So every kind of document is, in any order, and copies of a document stay together."""
    kinds = [[f"{kind} {n}\n" for n in range(1000)] for kind in ("one", "other")]
    texts = [text for pair in zip(*kinds) for text in pair]
    write("t.txt", EOT_TEXT.join(texts))
    write("copies/a.txt", EOT_TEXT.join(texts[::-1]))
    Path("copies/b.txt").symlink_to(Path("t.txt").absolute())
    tokens, _ = load("t.txt")
    assert "held out (bytes)" in tokens.about and tokens.floor is None
    train, val = (tokens.tok.decode(ids).split(EOT_TEXT)[:-1] for ids in (tokens.train, tokens.val))
    assert sorted(train + val) == sorted(texts)
    for kind in kinds:
        assert len(set(val).intersection(kind)) == pytest.approx(50, abs=20)
    copies, _ = load("copies")
    assert sorted(copies.tok.decode(copies.val).split(EOT_TEXT)[:-1]) == sorted(val * 2)


@pytest.mark.parametrize("large_one_is_chosen", [False, True])
def test_if_the_hash_holds_out_too_much_or_too_little_it_is_the_end(large_one_is_chosen, folder):
    larges = (f"{n} " * 2000 for n in itertools.count())
    large = next(text for text in larges if is_chosen(text) == large_one_is_chosen)
    for n in range(19):
        write(f"t/{n:02}.txt", f"{n}\n")
    write("t/large.txt", large)
    for _ in range(2):  # made, and from the cache
        tokens, _ = load("t")
        assert len(tokens.val) == (len(tokens.train) + len(tokens.val)) // 20
        assert f"{len(tokens.train):,} tokens and {len(tokens.val)} held out at its" in tokens.about
        assert large.endswith(tokens.tok.decode(tokens.val[:-1]))
        assert tokens.tok.decode(tokens.train).startswith(f"0\n{EOT_TEXT}1\n")


@pytest.mark.parametrize("text, n_held_out", [("abc", 1), ("abcdefghij" * 10, 4)])
def test_of_few_documents_the_tail_is_held_out_and_both_parts_end_with_eot(
    text, n_held_out, folder
):
    write("t.txt", text)
    tokens, _ = load("t.txt")
    assert tokens.tok.decode(tokens.train) == text[: -n_held_out - 1] + EOT_TEXT
    assert tokens.tok.decode(tokens.val) == text[-n_held_out:] + EOT_TEXT


def test_a_text_is_tokenized_once_until_it_or_the_tokenizer_changes(folder):
    write("t.txt", "some words\n" * 50)
    first, printed = load("t.txt")
    assert "tokenizing" in printed[0] and isinstance(first.train, np.memmap)

    again, printed = load("t.txt", expected=first.digest)
    assert not printed and (again.train == first.train).all()
    write("copy.jsonl", json.dumps({"text": "some words\n" * 50}))
    assert load("copy.jsonl")[0].digest == first.digest  # the content counts, not the file

    write("t.txt", "same words\n" * 50)
    os.utime("t.txt", (1, 1))  # some file systems count time in seconds
    changed, printed = load("t.txt")
    assert printed and changed.tok.decode(changed.train).startswith("same")
    with pytest.raises(UserError, match="not the text .* --data"):
        load("t.txt", expected=first.digest)

    bpe, printed = load("t.txt", "bpe:260")
    assert "training bpe:260" in printed[0] and len(bpe.train) < len(changed.train)
    assert not load("t.txt", "bpe:260")[1]
    other = get_tokenizer("bpe:260", ["me me me"])  # a checkpoint's: the same name, other pieces
    given, printed = load("t.txt", "bpe:260", tok=other)
    assert given.tok is other and printed
    assert other.decode(given.train).startswith("same words\n")


@pytest.mark.parametrize("suffix", ["json", "train", "val"])
def test_a_cut_or_missing_cache_is_made_again(suffix, folder):
    write("t.txt", "some words\n" * 50)
    load("t.txt")
    [path] = Path(".cache").glob(f"*.{suffix}")
    path.write_bytes(path.read_bytes()[:-2])
    assert load("t.txt")[1] and not load("t.txt")[1]
    path.unlink()
    assert load("t.txt")[1] and not load("t.txt")[1]


def test_bytes_that_are_not_utf8_are_counted(folder):
    write("t.txt", (b"a\xffb \xef\xbf\xbd" + b"x" * 99) * 99)
    for tokens, _ in (load("t.txt"), load("t.txt")):  # made, and from the cache
        assert tokens.about.endswith("; 99 bytes that are not UTF-8 were replaced")


def test_a_long_tokenization_says_how_far_it_is(folder, monkeypatch):
    monkeypatch.setattr(corpus, "REPORT_SECONDS", 0)
    printed = load("stories:20")[1]
    assert len([line for line in printed if "tokens so far" in line]) == 20


def test_the_automatic_tokenizer_follows_the_text(folder):
    write("small.txt", "some words " * 99)
    write("large.txt", "some words " * 99_999)
    write("large.txt.gz", gzip.compress(np.random.default_rng(0).bytes(500_000).hex().encode()))
    assert load("small.txt", None)[0].tok.name == "bytes"
    assert load("large.txt", None)[0].tok.name == "bpe:2048"
    assert load("large.txt.gz", None)[0].tok.name == "bpe:2048"  # its text has 1 MB
    assert load("stories:20", None)[0].tok.name == "bpe:1024"


def test_a_bpe_is_not_trained_on_held_out_documents(folder):
    held_out = next(text for n in range(999) if is_chosen(text := f"{n} zqx zqx zqx"))
    write("t.txt", EOT_TEXT.join(["the cat sat on the mat\n"] * 20 + [held_out]))
    pieces = load("t.txt", "bpe:300")[0].tok.bytes
    assert any(b"cat" in piece for piece in pieces)
    assert not any(b"zq" in piece for piece in pieces)


def test_the_floor_is_the_entropy_of_the_held_out_stories(folder):
    tokens, _ = load("stories:200")
    told = list(stories.documents(200))
    held_out = [(text, nats) for text, nats in told if is_chosen(text)]
    assert tokens.tok.decode(tokens.val) == "".join(text + EOT_TEXT for text, _ in held_out)
    n_bytes = tokens.tok.n_bytes[tokens.val].sum()
    assert tokens.floor == pytest.approx(sum(nats for _, nats in held_out) / n_bytes)
    assert load("stories:200")[0].floor == tokens.floor  # from the cache
    few = list(stories.documents(20))  # the end is held out: the entropy of all
    whole = sum(nats for _, nats in few) / sum(len(text) for text, _ in few)
    assert load("stories:20")[0].floor == pytest.approx(whole)


def test_a_file_of_ids_is_used_as_it_is(folder):
    ids = np.arange(1000, dtype=np.uint16) % 256
    write("ids.bin", ids.tobytes())
    tokens, printed = load("ids.bin")
    assert not printed and not Path(".cache").exists() and isinstance(tokens.train, np.memmap)
    assert (tokens.train == ids[:950]).all() and (tokens.val == ids[950:]).all()
    assert "950 tokens and 50 held out at its end" in tokens.about
    write("ids.bin", ids[::-1].tobytes())
    with pytest.raises(UserError, match="not the text"):
        load("ids.bin", expected=tokens.digest)


# ---- refusals ----------------------------------------------------------------------------------


def load_text(content: bytes, name="t.txt", tokenizer="bytes"):
    write(name, content)
    load(name, tokenizer)


REFUSALS = [  # what is done, and a word that the one line contains
    (lambda: load("nowhere.txt"), "does not exist"),
    (lambda: load("storys"), "did you mean stories"),
    (lambda: load("stories:19"), "from 20 to 1000000"),
    (lambda: load("stories:many"), "from 20 to 1000000"),
    (lambda: load_text(b""), "has only 0 tokens"),
    (lambda: load_text(b"x"), "has only 2 tokens"),
    (lambda: load_text(b"<|endoftext|>\n" * 99), "has only 0 tokens"),
    (lambda: load_text(b'{"text": "one"}\n{"text": 2}\n', "t.jsonl"), "t.jsonl: line 2"),
    (lambda: load_text(b'{"text": "one"}\n\n{"te', "t.jsonl"), "t.jsonl: line 3"),
    (lambda: load_text(b'["one"]', "t.jsonl"), "but 'one'"),
    (lambda: load_text(b'{"content": "one", "id": 1}\n{}', "t"), "content .*, id"),
    (lambda: load_text(b'{\n "data": [{"text": "one"}]}', "t.json"), "with data .list"),
    (lambda: load_text(b'[{"id": 1,\n "body": "one"}]', "t.json"), "id .*, body"),
    (lambda: load_text("天气很好。".encode("gbk") * 99), "iconv -f GB18030 -t UTF-8 t.txt"),
    (lambda: load_text(b"caf\xe9 " + b"x" * 90), "iconv"),
    (lambda: load_text(b"ids_", "t.bin", None), "--tokenizer=gpt2"),
    (lambda: load_text(b"ids", "t.bin"), "3 bytes"),
    (lambda: load_text(b"\xff" * 20, "t.bin"), "the id 65535"),
    (lambda: load_text(b"text", tokenizer="gpt3"), "did you mean gpt2"),
    (lambda: load_text(b"text", tokenizer="nothing"), "bpe:N"),
    (lambda: load_text(b"text", tokenizer="bpe:256"), "from 257"),
    (lambda: load_text(b"text", tokenizer="bpe:x"), "bpe:4096"),
]


@pytest.mark.parametrize("act, word", REFUSALS)
def test_refusals_are_one_line_and_leave_no_cache(act, word, folder):
    with pytest.raises(UserError, match=word) as refusal:
        act()
    assert "\n" not in str(refusal.value) and not list(Path(".cache").glob("*"))
