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
    return corpus.load_tokens(
        corpus.DataConfig(name, tokenizer), log=printed.append, **more
    ), printed


def documents_of(name: str) -> list[str]:
    n = count_stories(name)
    read = pieces(Corpus(name, n, [] if n else find_files(name)[0]))
    return "".join(text + "\0" * is_last for text, is_last, _ in read).split("\0")[:-1]


CORPORA = {  # file -> content, documents
    "plain.txt": (f"one\n{EOT_TEXT}\n\n{EOT_TEXT}\ntwo\n\nthree", ["one\n", "\n", "two\n\nthree"]),
    "empty_ones.txt": (f"{EOT_TEXT}\n{EOT_TEXT}\none\n{EOT_TEXT}\n{EOT_TEXT}\n", ["one\n"]),
    "joined.txt": (EOT_TEXT.join(["one", " two\n", "\n\nthree"]), ["one", " two\n", "\nthree"]),
    "windows.txt": (b"\xef\xbb\xbfone\r\n<|endoftext|>\r\ntwo\rthree", ["one\n", "two\nthree"]),
    "broken.txt": (b"a\xff\xe2\x82" + b"x" * 300, ["a\ufffd\ufffd\ufffd" + "x" * 300]),
    "lines.JSONL": ('{"text": "a\\r\\nb"}\n\n{"n": 1, "text": "c"}\n', ["a\nb", "c"]),
    "lines.ndjson": ('{"text": ""}\n{"text": "\\ud83d"}', ["\ufffd"]),
    "joined.jsonl": (json.dumps({"text": f"one{EOT_TEXT} two"}), ["one", " two"]),
    "lines.json": ('\ufeff{"text": "a"}\n{"text": "b"}', ["a", "b"]),
    "lines": ('{"n": 1, "text": "a"}\n{"text": "b"}', ["a", "b"]),
    "lines.log": ('{"text": "a"}\n', ['{"text": "a"}\n']),
    "array.json": (json.dumps([{"text": "\ufeffa"}, {"text": "b"}], indent=1), ["a", "b"]),
    "lines.json.gz": (gzip.compress(b'{"text": "a"}\n{"text": "b"}'), ["a", "b"]),
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
    corpus.load_tokens(corpus.DataConfig("texts", "bpe:300", "texts/cache"), log=print)
    os.symlink("..", "texts/a/back")
    os.symlink("nothing", "texts/a/broken")
    assert documents_of("texts") == ["a/c.md", "a/ckpt.pt", "b.txt"]
    words = "texts (3 files, 20 bytes; left out: 1 run, 1 unreadable), "
    assert load("texts")[0].about.startswith(words)


BAD_FILES = {  # file -> content, what is said if it is alone, what in a folder
    "a.txt.gz": (b"text", "Not a gzipped file", "bad gzip"),
    "b.txt.gz": (gzip.compress(b"text" * 99)[:-9], "ended before", "bad gzip"),
    "c.json": ("[" * 20_000, "nested", "JSON nested too deep"),
    "d.txt": ("text".encode("utf-16"), "NUL", "binary"),
    "e.json": ('{"s": "x", "id": 1}', r"line 1: .*s \(str\), id \(int\)", "JSON without texts"),
    "f.jsonl": ('{"text": "x"}\n{"text": []}', r"line 2: .* \(list\)", "JSON without texts from"),
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
    assert (
        corpus.DataConfig().data == "stories" and count_stories("stories") == stories.DEFAULT_SIZE
    )
    for name in ("stories", "python", "stories:30"):  # a path of this name wins
        write(f"{name}/a.txt", "my own")
        assert documents_of(name) == ["my own"] and count_stories(name) is None


def test_a_hash_of_its_text_decides_whether_a_document_is_held_out(folder):
    """So every kind of document is, in any order, and copies of a document stay together."""
    kinds = [[f"{kind} {n}\n" for n in range(1000)] for kind in ("one", "other")]
    texts = [text for pair in zip(*kinds) for text in pair]
    write("t/a.txt", EOT_TEXT.join(texts))
    write("t/b.txt", EOT_TEXT.join(texts[::-1]))
    tok, train, val, *_ = vars(load("t")[0]).values()
    train, val = (tok.decode(ids).split(EOT_TEXT)[:-1] for ids in (train, val))
    assert sorted(train + val) == sorted(texts * 2) and not set(train) & set(val)
    for kind in kinds:
        assert len(set(val).intersection(kind)) == pytest.approx(50, abs=20)


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
        assert tokens.train[-1] == tokens.val[-1] == tokens.tok.EOT
        assert tokens.tok.decode(tokens.train).startswith(f"0\n{EOT_TEXT}1\n")


def test_a_text_is_tokenized_once_until_it_or_the_tokenizer_changes(folder):
    write("t.txt", b"some \xef\xbf\xbd\xff\n" * 50 + b" " * 5000)
    first, printed = load("t.txt")
    assert "tokenizing" in printed[0] and isinstance(first.train, np.memmap)
    assert first.about.endswith("; 50 bytes that are not UTF-8 were replaced")
    again, printed = load("t.txt", expected=first.digest)
    assert not printed and (again.train == first.train).all() and again.about == first.about
    write("copy.txt.gz", gzip.compress(Path("t.txt").read_bytes()))
    assert load("copy.txt.gz")[0].digest == first.digest  # the content counts, not the file
    write("t.txt", "same words\n" * 50)
    changed, printed = load("t.txt")
    assert printed and changed.tok.decode(changed.train).startswith("same")
    with pytest.raises(UserError, match="not the text .* --data"):
        load("t.txt", expected=first.digest)
    bpe, printed = load("t.txt", "bpe:260")
    assert "training bpe:260" in printed[0] and not load("t.txt", "bpe:260")[1]
    other = get_tokenizer("bpe:260", ["me me me"])  # a checkpoint's: the same name, other pieces
    assert "tokenizing" in load("t.txt", "bpe:260", tok=other)[1][0]
    assert load("t.txt", "bpe:260")[0].tok.bytes == bpe.tok.bytes


def test_a_cut_or_missing_cache_is_made_again(folder):
    write("t.txt", "some words\n" * 50)
    load("t.txt")
    for path in Path(".cache").iterdir():  # .json, .train and .val
        for damage in (lambda path: path.write_bytes(path.read_bytes()[:-2]), Path.unlink):
            damage(path)
            assert load("t.txt")[1] and not load("t.txt")[1]


def test_the_automatic_tokenizer_follows_the_text(folder):
    write("small.txt", "some words " * 99)
    write("large.txt", "some words " * 99_999)
    write("large.txt.gz", gzip.compress(np.random.default_rng(0).bytes(500_000).hex().encode()))
    names = {"small.txt": "bytes", "large.txt": "bpe:2048", "large.txt.gz": "bpe:2048"}
    for name, tokenizer in (names | {"stories:20": "bpe:1024"}).items():
        assert load(name, None)[0].tok.name == tokenizer


def test_a_bpe_is_not_trained_on_held_out_documents(folder):
    held_out = next(text for n in range(999) if is_chosen(text := f"{n} zqx zqx zqx"))
    write("t.txt", EOT_TEXT.join(["the cat sat on the mat\n"] * 20 + [held_out]))
    learned = b" ".join(load("t.txt", "bpe:300")[0].tok.bytes)
    assert b"cat" in learned and b"zq" not in learned


def test_the_floor_is_the_entropy_of_the_held_out_stories(folder, monkeypatch):
    monkeypatch.setattr(corpus, "REPORT_SECONDS", 0)
    tokens, printed = load("stories:200")
    assert sum("tokens so far" in line for line in printed) == 200
    held_out = [(text, nats) for text, nats in stories.documents(200) if is_chosen(text)]
    assert tokens.tok.decode(tokens.val) == "".join(text + EOT_TEXT for text, _ in held_out)
    n_bytes = len(tokens.val) - len(held_out)  # without the EOTs
    assert tokens.floor == pytest.approx(sum(nats for _, nats in held_out) / n_bytes)
    assert load("stories:200")[0].floor == tokens.floor  # from the cache


def test_a_file_of_ids_is_used_as_it_is(folder):
    ids = np.arange(1000, dtype=np.uint16) % 256
    write("ids.bin", ids.tobytes())
    tokens, printed = load("ids.bin")
    assert not printed and not Path(".cache").exists()  # nothing is copied
    assert (tokens.train == ids[:950]).all() and (tokens.val == ids[950:]).all()
    write("ids.bin", ids[::-1].tobytes())
    with pytest.raises(UserError, match="not the text"):
        load("ids.bin", expected=tokens.digest)


REFUSALS = [  # --data, --tokenizer, content of the file, and a word that the one line contains
    ("storys", "bytes", None, "does not exist; did you mean stories"),
    ("stories:19", "bytes", None, "from 20 to 1000000"),
    ("t.txt", "bytes", b"<|endoftext|>\n" * 99, "has only 0 tokens"),
    ("t.jsonl", "bytes", b'{"text": "one"}\n\n{"te', "t.jsonl: line 3"),
    ("t.json", "bytes", b'{\n "data": [{"text": "one"}]}', "with data .list"),
    ("t.txt", "bytes", "天气很好。".encode("gbk") * 99, "iconv -f GB18030 -t UTF-8 t.txt"),
    ("t.txt", "bpe:300", b"caf\xe9 " + b"x" * 90, "iconv"),
    ("t.bin", None, b"ids_", "--tokenizer=gpt2"),
    ("t.bin", "bytes", b"ids", "3 bytes"),
    ("t.bin", "bytes", b"\xff" * 20, "the id 65535"),
    ("t.txt", "gpt3", b"text", "did you mean gpt2"),
    ("t.txt", "bpe:256", b"text", "from 257"),
]


@pytest.mark.parametrize("data, tokenizer, content, word", REFUSALS)
def test_refusals_are_one_line_and_leave_no_cache(data, tokenizer, content, word, folder):
    if content is not None:
        write(data, content)
    with pytest.raises(UserError, match=word) as refusal:
        load(data, tokenizer)
    assert "\n" not in str(refusal.value) and not list(Path(".cache").glob("*"))
