r"""hf.py: a model of Hugging Face in, to be trained further; a trained model out, for transformers.

A Qwen3's or Llama's folder (config.json, safetensors, tokenizer.json) is used as if it were a run.
Left out: downloads, other layouts, rope scaling, sentencepiece, chat templates, heads coming in.

    python sample.py --out_dir=Qwen3-0.6B-Base --prompt="At dawn," --task=score
    python train.py --objective=fim --init_from=Qwen3-0.6B-Base --data=PATH --out_dir=out/fim
    python hf.py --out_dir=out/fim --to=my_model
"""

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from checkpoint import Checkpoint, build_model, open_checkpoint
from model import ModelConfig
from objectives import OBJECTIVES, Knobs, fim_prompt
from tokenizer import BPE_PATTERN, EOT_TEXT, SINGLE_BYTES, SPECIALS, Tokenizer
from util import UserError, build, flag, parse_flags, run_command

# fmt: off
SIZES = {  # config.json's name -> ModelConfig's
    "vocab_size": "vocab_size", "hidden_size": "n_embd", "intermediate_size": "d_ff",
    "num_hidden_layers": "n_layer", "head_dim": "head_dim",
    "num_attention_heads": "n_head", "num_key_value_heads": "n_kv_head",
}
COMPUTED = {  # config.json's field -> the value that model.py computes, also when there is no field
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_type": "default",
    "use_sliding_window": False, "layer_types": "full_attention", "quantization_config": None,
}
LAYOUTS = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}  # model_type -> architecture
# How a text is cut into words. None of these leaves a character out: tiktoken would drop it.
QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+")
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# As GPT-2, where digits are set apart first: blanks before a digit are those of a text's end.
DIGITS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
PATTERNS = (QWEN, BPE_PATTERN, GPT2, DIGITS)
# fmt: on
THEIR_MARKS = {"<PRE>": "<|fim_prefix|>", "<SUF>": "<|fim_suffix|>", "<MID>": "<|fim_middle|>"}


def refuse(wrong, line: str) -> None:
    if wrong:
        raise UserError(line)


def safetensors():
    """The package that reads and writes Hugging Face's weights. Raises UserError without it."""
    try:
        import safetensors.torch
    except ImportError:
        raise UserError("hf.py needs another package: pip install safetensors") from None
    return safetensors


def word_steps(pattern: str) -> list[dict]:
    """What tokenizer.json calls pre-tokenizers: cut by a pattern, then spell bytes as letters."""
    split = dict(type="Split", pattern={"Regex": pattern}, behavior="Isolated", invert=False)
    spell = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
    return [split, spell]


def pattern_of(words: dict) -> str | None:
    """The pattern that cuts as these pre-tokenizers of a tokenizer.json do; None: none here."""
    steps = words.get("pretokenizers", [words])
    steps = [{**step, "trim_offsets": False} if "trim_offsets" in step else step for step in steps]
    digits = dict(type="Digits", individual_digits=True)
    gpt2 = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=True)
    known = [(word_steps(pattern), pattern) for pattern in PATTERNS]
    known += [([gpt2], GPT2), ([digits, gpt2], DIGITS)]
    return next((pattern for its_steps, pattern in known if its_steps == steps), None)


def byte_letters() -> list[str]:
    """The letter that stands for each byte in tokenizer.json: GPT-2's `bytes_to_unicode`."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def import_model(folder) -> Checkpoint:
    """The folder of a Qwen3 or a Llama as a run of clm that has taken no step. Raises UserError."""
    try:
        config, block_size = read_config(Path(folder, "config.json"))
        tok, theirs = read_tokenizer(Path(folder, "tokenizer.json"), config.vocab_size)
        weights = read_weights(Path(folder))
        if config.tied:
            weights.pop("lm_head.weight", None)
        theirs |= {id: id for id in range(tok.n_ids, min(tok.vocab_size, config.vocab_size))}
        for name in weights.keys() & {"embed_tokens.weight", "lm_head.weight"}:
            rows = weights[name][list(theirs.values())]
            weights[name] = rows.mean(0).repeat(tok.vocab_size, 1)  # also for bytes that are new
            weights[name][list(theirs)] = rows
            for new in tok.names.keys() - theirs.keys():  # <PRE>: the mean of "<", "PRE" and ">"
                weights[name][new] = weights[name][tok.encode(tok.names[new])].mean(0)
        config = replace(config, vocab_size=tok.vocab_size)
        settings = {"objective": "clm", "block_size": block_size, "steps_before": 0}
        state = {"model": weights, "settings": settings, "step": 0, "data_digest": None}
        saved = Checkpoint(state, tok, {"clm": 1.0}, config, Knobs(), block_size)
        build_model(saved)  # compares names and shapes
    except Exception as e:  # JSON, safetensors and torch each have their own errors
        reason = f"{e}" if isinstance(e, UserError) else f"{type(e).__name__}: {e}"
        raise UserError(f"{folder} cannot be used: {reason[:250].splitlines()[0]}") from None
    return saved


def read_config(path: Path) -> tuple[ModelConfig, int]:
    """config.json -> the model's shape, and how long rows are unless a flag says otherwise."""
    config = json.loads(path.read_text())
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    config |= {"rope_type": rope.get("type"), **rope}
    name = config["model_type"]
    refuse(name not in LAYOUTS, f"config.json: model_type is {name!r}, not {' or '.join(LAYOUTS)}")
    if name == "llama" and config.get("head_dim") is None:  # as in older files
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    config["layer_types"] = "+".join(sorted(set(config.get("layer_types") or []))) or None
    for field, value in COMPUTED.items():
        wrong = config.get(field) not in (value, None)
        refuse(wrong, f"config.json: {field} is {config.get(field)!r}, not {value!r}")
    for field in (*SIZES, "max_position_embeddings"):
        size = config.get(field)
        wrong = type(size) is not int or not 1 <= size <= 1 << 20
        refuse(wrong, f"config.json: {field} is {size!r}, not a number from 1 to 1048576")
    shape = {ours: config[theirs] for theirs, ours in SIZES.items()}
    shape |= dict(short_conv=False, value_embed=False, qk_norm=name == "qwen3")
    shape |= dict(norm_eps=config["rms_norm_eps"], rope_theta=float(config["rope_theta"]))
    shape |= dict(tied=bool(config.get("tie_word_embeddings")))
    return build(ModelConfig, shape), min(config["max_position_embeddings"], 1024)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The safetensors, in one file or several: as model.py names them, in float32."""
    files, weights = {"model.safetensors"}, {}
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = set(json.loads(index.read_text())["weight_map"].values())
    for file in files:
        refuse(Path(file).name != file, f"weight_map: {file!r} is not a file of the folder")
        for name, weight in safetensors().torch.load_file(folder / file).items():
            weights[name.removeprefix("model.")] = weight.float()
    return weights


def read_tokenizer(path: Path, n_rows: int) -> tuple[Tokenizer, dict[int, int]]:
    """tokenizer.json -> the tokenizer, and for each of its ids that is not new: which it was there.
    Text comes first, then bytes that the vocabulary lacks, special tokens, and this program's.

    Differs: text that spells a special token is encoded as plain text, unlike in transformers, and
    no byte is lost."""
    spec = json.loads(path.read_text(encoding="utf-8"))
    model, normalizer, words = (spec[key] for key in ("model", "normalizer", "pre_tokenizer"))
    added = {token["content"]: token["id"] for token in spec["added_tokens"]}
    text = {piece: id for piece, id in model["vocab"].items() if piece not in added}
    pieces = sorted(text, key=text.get)
    marks = sorted(added, key=added.get)
    ids = sorted([*text.values(), *added.values()])
    merged = dict.fromkeys("".join(merge).replace(" ", "") for merge in model["merges"])
    byte = {letter: number for number, letter in enumerate(byte_letters())}
    pattern = pattern_of(words or {})
    needs = {
        f"model must be BPE, not {model['type']}": model["type"] == "BPE",
        f"normalizer must be NFC, not {normalizer}": normalizer in (None, {"type": "NFC"}),
        f"pre_tokenizer must be Qwen's or GPT-2's, not {words}": pattern,
        "vocab must spell bytes as letters, like GPT-2's": byte.keys() >= set("".join(pieces)),
        "added_tokens must not be blanks": all(map(str.strip, added)),
        "ids of vocab and added_tokens must differ": len(set(ids)) == len(ids),
        "ids must be below config.json's vocab_size": ids[-1] < n_rows,
        "merges must have the order of ids": [*merged] == [p for p in pieces if len(p) > 1],
    }
    for need, is_met in needs.items():
        refuse(not is_met, f"tokenizer.json: {need}")

    spelled = {bytes(map(byte.get, piece)): text[piece] for piece in pieces}
    ranks = {piece: id for id, piece in enumerate(spelled | dict.fromkeys(SINGLE_BYTES))}
    specials = {mark: id for id, mark in enumerate(marks, len(ranks))}
    theirs = dict(enumerate(spelled.values())) | {specials[mark]: added[mark] for mark in marks}
    specials |= {ours: specials[name] for ours, name in THEIR_MARKS.items() if name in specials}
    name = f"hf:{path.parent.resolve().name}"  # the file may be a link into a cache
    return Tokenizer(name, ranks, pattern, specials, normalizer is not None), theirs


@dataclass
class ExportConfig:
    """the model to give away"""

    out_dir: str = flag("out/clm", "folder of a run, or one of its checkpoints")
    to: str = flag("exported", "folder to write; it must be new or empty")


def export_model(run: str, to: str) -> None:
    """Write a run's model as a folder that transformers loads, or nothing. Raises UserError.

    A model that reads in both directions goes out, too: transformers computes it if it is given
    the mask, which the card shows."""
    saved = open_checkpoint(run)
    tok, config, folder = saved.tok, saved.model_config, Path(to)
    added = config.short_conv or config.value_embed or config.pair_head
    layout = "qwen3" if config.qk_norm else "llama"
    wrong = "short_conv, value_embed and the pairs of nsp and sop are not in transformers' layouts"
    refuse(added, f"{run}: {wrong}; train with --short_conv=False --value_embed=False")
    refuse(folder.exists() and any(folder.iterdir()), f"--to={to} is not empty; name another")
    fields = {theirs: getattr(config, ours) for theirs, ours in SIZES.items()}
    fields |= dict(model_type=layout, architectures=[LAYOUTS[layout]], hidden_act="silu")
    fields |= dict(tie_word_embeddings=config.tied, rms_norm_eps=config.norm_eps)
    fields |= dict(rope_theta=config.rope_theta, max_position_embeddings=saved.block_size)
    ends = dict(eos_token_id=tok.EOT, pad_token_id=tok.PAD)
    never = [id for id in range(tok.n_ordinary, config.vocab_size) if id != tok.EOT]
    loader = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token=EOT_TEXT)
    files = {
        "config.json": fields | ends,
        "generation_config.json": ends | {"suppress_tokens": never},
        "tokenizer.json": tokenizer_json(tok),
        "tokenizer_config.json": loader | {"pad_token": SPECIALS[0]},
    }
    trunk, heads = {}, {}
    for name, weight in saved.state["model"].items():
        if name.startswith(("embed_tokens.", "layers.", "norm.")):
            trunk[f"model.{name}"] = weight
        else:
            (trunk if name == "lm_head.weight" else heads)[name] = weight
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as beside:
        unfinished = Path(beside, "unfinished")
        unfinished.mkdir()
        for name, content in files.items():
            (unfinished / name).write_text(json.dumps(content, indent=1))
        (unfinished / "README.md").write_text(card(saved, folder, heads))
        try:
            save_file = safetensors().torch.save_file
            save_file(trunk, unfinished / "model.safetensors", {"format": "pt"})
            if heads:
                save_file(heads, unfinished / "heads.safetensors")
        except safetensors().SafetensorError as e:  # such as a full disk
            raise UserError(f"--to={to}: {e}") from None
        unfinished.rename(folder)


def tokenizer_json(tok: Tokenizer) -> dict:
    """What transformers reads. Like tiktoken, it takes a whole word that is a piece, else merges
    the neighbors that form the piece with the lowest id."""
    pattern = BPE_PATTERN if tok.name == "bytes" else tok.enc._pat_str  # bytes never merge
    refuse(pattern not in PATTERNS, f"--to: {tok.name} cannot go out; train with bytes or bpe:N")
    letters = byte_letters()
    spelled = {piece: "".join(letters[byte] for byte in piece) for piece in tok.ranks}
    merges = []
    for piece in tok.bytes[: tok.n_ordinary]:
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        merges += [[spelled[a], spelled[b]] for a, b in halves if a in spelled and b in spelled]
    vocab = {spelled[piece]: id for piece, id in tok.ranks.items()}
    options = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    return {
        "added_tokens": [{"id": i, "content": tok.names[i], **options} for i in sorted(tok.names)],
        "normalizer": {"type": "NFC"} if tok.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": word_steps(pattern)},
        "decoder": word_steps(pattern)[1],
        "model": {"type": "BPE", "ignore_merges": True, "vocab": vocab, "merges": merges},
    }


def card(saved: Checkpoint, folder: Path, heads: dict) -> str:
    """The model card: how the model was trained, how to ask it, and what the loader gets wrong."""
    tok, about, prompt = saved.tok, saved.state["settings"], "The beginning of a text"
    if "fim" in saved.mixture:
        parts = tok.encode("the text before"), tok.encode("the text after")
        prompt = tok.decode(fim_prompt(saved.knobs.fim_layouts.split(",")[0], tok, *parts))
    text = f"""# {folder.name}
A transformer, trained with {about["objective"]} for {saved.state["step"]} steps of rows of
{saved.block_size} positions.

    transformers.pipeline("text-generation", "{folder}")("{prompt}", return_full_text=False)
"""
    attention = {OBJECTIVES[name].attention for name in saved.mixture}
    if "permuted" in attention:
        text += "\n**It was trained on rows in another order than the text's: use sample.py.**\n"
    elif "causal" not in attention:
        where = "torch.arange(T) >= P" if "block" in attention else "torch.arange(T) < P"
        text += f"""
**It was trained to read some of T positions, `p = {where}`, in both directions. The loader reads
to the left only: what it writes is wrong, without an error.** Its logits are right with
`attention_mask=torch.ones(1, 1, T, T).bool().tril() | (p & p[:, None])`.
"""
    if heads:
        names = ", ".join(sorted({name.split(".")[0] for name in heads}))
        text += f"\n`heads.safetensors` has what the loader leaves out: {names}.\n"
    return text


def main(argv: list[str]) -> None:
    config = build(ExportConfig, parse_flags(argv, __doc__, ExportConfig))
    export_model(config.out_dir, config.to)
    print(f"{config.to} holds the model; its README.md says how to use it")


if __name__ == "__main__":
    run_command(main)
