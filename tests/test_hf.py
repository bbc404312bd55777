"""hf.py: a model of Hugging Face comes in, learns something, and goes out again."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from checkpoint import build_model, open_checkpoint
from hf import QWEN, byte_letters, export_model, import_model, word_steps
from objectives import OBJECTIVES
from sample import load
from tokenizer import Tokenizer
from util import UserError

safetensors = pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

ROOT = Path(__file__).parents[1]
TEXT = "".join((ROOT / name).read_text() for name in ("util.py", "stories.py"))
ODD = [
    "It's 12345, I'LL don\u2019t, x\u017f'\u017f a'\u017fb",  # a long s is an s to (?i:'s)
    "e\u0301 A\u030a \u1100\u1161 \ufb01 \u212b",  # composed by NFC, or not
    "   \t\n\r\n \u00a0\u2003x\u3000\u0085y\u200b\u180e\u2028z  ",
    "日本語 ﷽ ١٢٣ ௧௨ ½ Ⅷ नमस्ते กำ 👩‍👩‍👧‍👦🏳️‍🌈 \U0001f9ff\U000e0001\ufffd\x00\x1b[0m",
    "def f(x):\n\treturn  x**2   # ok!!\n\n\n    pass\n",
    TEXT[:3000],
]


MARKS = ["<|endoftext|>", "<|im_start|>"]


def make_tokenizer(kind="qwen", nfc=True, marks=MARKS):
    """A byte-level BPE with the special tokens last, as in Qwen's files. Or "gpt2", or "digits" one
    by one: with the special tokens first, and without the bytes that the text lacks."""
    tok = tokenizers.Tokenizer(tokenizers.models.BPE())
    letters = tokenizers.pre_tokenizers.ByteLevel
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(QWEN), "isolated")
    spell = letters(add_prefix_space=False, use_regex=kind != "qwen")
    first = {"qwen": [split], "digits": [digits], "gpt2": []}[kind]
    tok.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*first, spell]) if first else spell
    tok.decoder = tokenizers.decoders.ByteLevel()
    if nfc:
        tok.normalizer = tokenizers.normalizers.NFC()
    has = dict(special_tokens=marks)
    if kind == "qwen":
        has = dict(initial_alphabet=letters.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, show_progress=False, **has)
    tok.train_from_iterator([*ODD, TEXT], trainer)
    tok.add_special_tokens(marks)
    return tok


def make_folder(folder, tok=None, layout="Qwen3", dtype=torch.float32, shard="5GB", **shape):
    """A random Qwen3 or Llama, written by transformers -> that model."""
    tok = tok or make_tokenizer("qwen" if layout == "Qwen3" else "digits")
    config, model = (getattr(transformers, layout + what) for what in ("Config", "ForCausalLM"))
    shape = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=2) | shape
    shape = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16) | shape
    config = config(
        vocab_size=tok.get_vocab_size() + 10,
        initializer_range=0.2,
        max_position_embeddings=64,
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, **shape},
    )
    torch.manual_seed(0)
    model(config).to(dtype).save_pretrained(folder, max_shard_size=shard)
    tok.save(str(Path(folder, "tokenizer.json")))
    return model.from_pretrained(folder, dtype=torch.float32).eval()


def run(*flags, objective="clm", out_dir, steps=3):
    """Train for a few steps on the project's source."""
    sizes = ["--max_steps=3", "--batch_size=4", "--eval_every=100"]
    flags = [f"--objective={objective}", f"--out_dir={out_dir}", *sizes, *flags]
    train.main([*flags, f"--data={ROOT}/util.py", f"--cache_dir={out_dir}"], report=False)


def load_theirs(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


# ---- in ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        dict(tie_word_embeddings=True),
        dict(layout="Llama", tie_word_embeddings=True, rms_norm_eps=1e-3),
        dict(num_key_value_heads=4, rms_norm_eps=1e-5),
        dict(dtype=torch.bfloat16, shard="20KB"),
        dict(layout="Llama", num_key_value_heads=1, head_dim=32),
    ],
)
@torch.no_grad()
def test_an_imported_model_computes_the_same(tmp_path, how):
    theirs = make_folder(tmp_path, **how)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or "shard" not in how
    saved = import_model(tmp_path)
    mine = build_model(saved)
    vocab = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab()
    their_id = {saved.tok.specials[mark]: vocab.pop(mark) for mark in MARKS}
    byte = {letter: number for number, letter in enumerate(byte_letters())}
    for piece, id in vocab.items():
        their_id[saved.tok.ranks[bytes(map(byte.get, piece))]] = id
    old = sorted(their_id)  # each of these ids has the row that it had there
    their_old = torch.tensor([their_id[id] for id in old])
    logits = mine.logits(mine(torch.tensor(old)[:480].view(12, 40))[0])[..., old]
    expected = theirs(their_old[:480].view(12, 40)).logits[..., their_old]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    new = sorted({*range(saved.tok.n_ids)} - their_id.keys())
    assert (new[0] < saved.tok.n_ordinary) == (how.get("layout") == "Llama")  # bytes, too
    rows = mine.embed_tokens.weight
    for id in new:  # a byte is the mean of all, a mark of what spells it
        mark = saved.tok.names.get(id)
        like = rows[saved.tok.encode(mark) if mark else old].mean(0)
        torch.testing.assert_close(rows[id], like)
    assert len(mine.embed_tokens.weight) % 64 == 0


@pytest.mark.parametrize("kind, nfc", [("qwen", 1), ("qwen", 0), ("gpt2", 0), ("digits", 0)])
def test_ids_are_those_of_transformers(tmp_path, kind, nfc):
    theirs = make_tokenizer(kind, nfc)
    make_folder(tmp_path, theirs)
    tok = import_model(tmp_path).tok
    rng = np.random.default_rng(0)
    letters = [c for text in ODD for c in text] + list("'sSrR \n\u0301")
    mixed = ["".join(rng.choice(letters, 30)) for _ in range(300)]
    n_before = 0 if kind == "qwen" else len(MARKS)  # ids before those of text
    for text in ODD + mixed:
        assert tok.encode(text) == [id - n_before for id in theirs.encode(text).ids], repr(text)
        assert Tokenizer.from_json(tok.to_json()).encode(text) == tok.encode(text)
    assert tok.encode(b"a\xffb") == [tok.ranks[b"a"], tok.ranks[b"\xff"], tok.ranks[b"b"]]


def test_the_models_own_special_tokens_are_taken(tmp_path):
    marks = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<think>"]
    make_folder(tmp_path, make_tokenizer(marks=marks))
    (tmp_path / "tokenizer.json").rename(tmp_path.with_name("blob"))  # as in the hub's cache
    (tmp_path / "tokenizer.json").symlink_to(tmp_path.with_name("blob"))
    imported = import_model(tmp_path).tok
    assert imported.name == f"hf:{tmp_path.name}"
    for tok in (imported, Tokenizer.from_json(imported.to_json())):
        assert [tok.EOT, tok.PRE, tok.MID, tok.SUF] == [500, 501, 502, 503]
        assert min(tok.PAD, tok.MASK, tok.R, tok.sentinel) > 504
        assert tok.n_ordinary == 500 and tok.vocab_size % 64 == 0


def edit(name, **values):
    """A change of a JSON file: `a__b` is the field b of the field a."""

    def change(folder):
        content = json.loads((folder / name).read_text())
        for path, value in values.items():
            *outer, last = path.split("__")
            inner = content
            for field in outer:
                inner = inner[field]
            inner[last] = value
        (folder / name).write_text(json.dumps(content))

    return change


def replace_by(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def sharded_outside(folder):
    pickled(folder)
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "change, word",
    [
        (edit("config.json", model_type="gemma"), "model_type"),
        (edit("config.json", rope_parameters={"rope_type": "yarn", "factor": 4.0}), "rope_type"),
        (edit("config.json", rope_scaling={"type": "linear"}, rope_parameters=None), "rope_type"),
        (edit("config.json", use_sliding_window=True), "use_sliding_window"),
        (edit("config.json", layer_types=["sliding_attention"] * 2), "layer_types"),
        (edit("config.json", mlp_bias=True), "mlp_bias"),
        (edit("config.json", quantization_config={"bits": 4}), "quantization_config"),
        (edit("config.json", head_dim=0), "head_dim"),
        (edit("config.json", num_key_value_heads=3), "k_proj"),
        (edit("config.json", hidden_size="48"), "hidden_size"),
        (edit("config.json", num_hidden_layers=10**9), "num_hidden_layers"),
        (edit("config.json", intermediate_size=96), "mlp"),  # wrong shapes
        (edit("config.json", num_hidden_layers=3), "layers.2"),
        (edit("config.json", num_hidden_layers=1), "layers.1"),
        (edit("config.json", tie_word_embeddings=True, vocab_size=8), "vocab_size"),
        (edit("tokenizer.json", pre_tokenizer={"type": "Metaspace"}), "pre_tokenizer.*Metaspace"),
        (edit("tokenizer.json", pre_tokenizer=None), "pre_tokenizer.*None"),
        (edit("tokenizer.json", pre_tokenizer__pretokenizers=word_steps(".")), "pre_tokenizer"),
        (edit("tokenizer.json", normalizer={"type": "Lowercase"}), "normalizer"),
        (edit("tokenizer.json", model__type="Unigram"), "Unigram"),
        (edit("tokenizer.json", model__vocab={"\u2581a": 0}), "bytes as letters"),
        (edit("tokenizer.json", model__merges=[["a", "b"]]), "merges"),
        (edit("tokenizer.json", added_tokens=[{"content": "<x>", "id": 3}]), "added_tokens"),
        (replace_by("config.json", b"[" * 9999), "RecursionError"),
        (replace_by("tokenizer.json", b"\xff\x00"), "UnicodeDecodeError"),
        (replace_by("model.safetensors", b"no safetensors"), "Safetensor"),
        (pickled, "model.safetensors"),
        (sharded_outside, "weight_map"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, change, word):
    make_folder(tmp_path)
    change(tmp_path)
    with pytest.raises(UserError, match=word) as caught:
        import_model(tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


# ---- taught ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["Qwen3", "Llama"])
def test_fim_is_taught_to_it_and_it_goes_out_again(tmp_path, layout):
    make_folder(tmp_path / "in", layout=layout)
    run(f"--init_from={tmp_path}/in", "--block_size=48", objective="fim", out_dir=tmp_path / "fim")
    run("--init_from=resume", "--max_steps=4", objective="fim", out_dir=tmp_path / "fim")
    export_model(tmp_path / "fim", tmp_path / "out")
    assert (
        "<PRE>the text before<SUF>the text after<MID>" in (tmp_path / "out/README.md").read_text()
    )
    check_both_agree(tmp_path / "fim", tmp_path / "out", ["The function", "<PRE>def<SUF>:<MID>"])
    export_model(tmp_path / "in", tmp_path / "untaught")  # a folder is opened like a run
    check_both_agree(tmp_path / "in", tmp_path / "untaught", ["The function"])
    for folder in ("out", "untaught"):
        assert type(load_theirs(tmp_path / folder)[0]).__name__ == f"{layout}ForCausalLM"


def test_it_is_trained_by_rates_of_its_own_and_so_is_what_starts_from_it(tmp_path, monkeypatch):
    make_folder(tmp_path / "in")
    monkeypatch.chdir(tmp_path)
    run("--init_from=in", objective="fim", out_dir="first")

    def rates(*flags):
        c = train.settings(["--out_dir=new", *flags]).train
        return c.optimizer, c.lr, c.lr_embed, c.lr_unembed

    gentle = ("adamw", 1e-4, 1e-4, 1e-4)
    assert rates("--init_from=in") == rates("--init_from=first", "--objective=mlm") == gentle
    assert rates("--init_from=in", "--lr=0.5") == ("adamw", 0.5, 1e-4, 1e-4)
    heads = rates("--init_from=in", "--objective=mtp", "--freeze_trunk")  # all that learns is new
    assert heads == rates("--objective=mtp") == ("muon", 0.02, 0.01, 0.012)


def test_heads_are_taught_to_it_and_draft(tmp_path):
    make_folder(tmp_path / "in")
    flags = [f"--init_from={tmp_path}/in", "--freeze_trunk"]
    run(*flags, objective="mtp", out_dir=tmp_path / "mtp")
    before = import_model(tmp_path / "in").state["model"]
    after = open_checkpoint(tmp_path / "mtp").state["model"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(after[name].any() for name in after.keys() - before.keys())
    trained = load(tmp_path / "mtp", "cpu")
    plain, fast = (
        trained.ask("continue", "def ", max_new_tokens=30, temperature=0.0, speculative=on)[0].ids
        for on in (False, True)
    )
    assert plain == fast and len(plain) > 5
    export_model(tmp_path / "mtp", tmp_path / "out")
    check_both_agree(tmp_path / "mtp", tmp_path / "out", ["def "])
    assert "heads.safetensors" in (tmp_path / "out/README.md").read_text()


def test_more_positions_and_another_base_are_allowed(tmp_path):
    make_folder(tmp_path / "in")
    flags = [f"--init_from={tmp_path}/in", "--rope_theta=80000", "--block_size=100"]
    run(*flags, out_dir=tmp_path / "long")
    export_model(tmp_path / "long", tmp_path / "out")
    theirs, _ = load_theirs(tmp_path / "out")
    assert theirs.config.max_position_embeddings == 100
    assert theirs.config.rope_parameters["rope_theta"] == 80000
    check_both_agree(tmp_path / "long", tmp_path / "out", ["def "])


@pytest.mark.parametrize("objective", ["diffusion", "span", "electra", "block"])
@torch.no_grad()
def test_a_model_that_reads_both_ways_goes_out_with_the_mask_to_give_it(tmp_path, objective):
    make_folder(tmp_path / "in")
    with torch.enable_grad():
        run(f"--init_from={tmp_path}/in", objective=objective, out_dir=tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "out")
    theirs, _ = load_theirs(tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert "is wrong, without an error" in card
    T, P = 20, 20 if OBJECTIVES[objective].attention == "full" else 7
    where, code = (card.split(f"`{name}")[1].split("`")[0] for name in ("p = ", "attention_mask="))
    prefix = eval(where, {"torch": torch, "T": T, "P": P})
    their_mask = eval(code, {"torch": torch, "T": T, "p": prefix})
    mine = build_model(open_checkpoint(tmp_path / "run"))
    ids = torch.randint(0, 500, (1, T), generator=torch.Generator().manual_seed(0))
    mask = mine.attention_mask("rule", torch.ones_like(ids), prefix[None])
    logits = mine.logits(mine.norm(mine.trunk(ids, mask)))
    expected = theirs(ids, attention_mask=their_mask).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


# ---- out ---------------------------------------------------------------------------------------


@torch.no_grad()
def check_both_agree(run, folder, prompts):
    """transformers loads the folder and computes what the run does."""
    theirs, their_tok = load_theirs(folder)
    trained = load(run, "cpu")
    tok = trained.tok
    for text in ODD:
        ids = tok.encode(text)
        assert their_tok(text).input_ids == ids
        assert their_tok.decode(ids) == tok.decode(ids)
    ids = torch.tensor([tok.encode(TEXT)[:40]])
    expected = theirs(ids).logits
    logits = trained.model.logits(trained.model(ids)[0])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    for prompt in prompts:
        inputs = their_tok(prompt, return_tensors="pt")
        their_ids = theirs.generate(**inputs, max_new_tokens=20, do_sample=False)[0].tolist()
        n = inputs.input_ids.shape[1]
        decoder = trained.decoder()
        [mine], _ = decoder.generate(inputs.input_ids[0].tolist(), 20, stops={tok.EOT})
        assert mine == their_ids[n : n + len(mine)] and len(mine) > 1


PLAIN = ["--short_conv=False", "--value_embed=False"]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:400"])
def test_a_model_trained_here_goes_out_and_comes_back(tmp_path, tokenizer):
    shape = ["--n_layer=2", "--n_head=2", "--n_embd=32", f"--tokenizer={tokenizer}"]
    run(*PLAIN, *shape, out_dir=tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "out")
    check_both_agree(tmp_path / "run", tmp_path / "out", ["def "])
    first, back = open_checkpoint(tmp_path / "run"), import_model(tmp_path / "out")
    assert all(
        torch.equal(w, back.state["model"][name]) for name, w in first.state["model"].items()
    )
    assert back.tok.specials == first.tok.specials


def test_a_full_disk_leaves_nothing_that_looks_like_a_model(tmp_path, monkeypatch):
    def fail(*_):
        raise safetensors.SafetensorError("no space left")

    make_folder(tmp_path / "in")
    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(UserError, match="no space left"):
        export_model(tmp_path / "in", tmp_path / "new" / "out")
    assert not any((tmp_path / "new").iterdir())


def test_a_name_or_a_cache_of_the_hub_gets_the_folder_to_give_instead(tmp_path):
    (tmp_path / "models--a--b" / "snapshots" / "c0de").mkdir(parents=True)
    (tmp_path / "models--a--b" / "snapshots" / "c0de" / "config.json").touch()
    with pytest.raises(UserError, match="the model is in .*models--a--b/snapshots/c0de$"):
        load(tmp_path / "models--a--b")
    with pytest.raises(UserError, match="hf download Owner/Model-1.7B --local-dir=Model-1.7B"):
        load("Owner/Model-1.7B")


def test_the_additions_are_refused_with_the_flags_to_train_without(tmp_path):
    run("--n_layer=1", "--n_embd=32", out_dir=tmp_path / "run")
    command = [sys.executable, "hf.py", f"--out_dir={tmp_path}/run", f"--to={tmp_path}/out"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "--short_conv=False --value_embed=False" in done.stderr
