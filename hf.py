r"""hf.py: a model of Hugging Face in, to be trained further; a trained model out, for transformers.

In: train.py and sample.py take a folder with a Qwen3 as if it were a run: config.json, safetensors,
and a tokenizer.json with a byte-level BPE. Out: a folder that AutoModelForCausalLM and
AutoTokenizer load. Nothing is downloaded. Left out: other architectures, rope scaling, sliding
windows, quantized weights, chat templates, and heads on the way in.

    python train.py --objective=fim --init_from=Qwen3-0.6B-Base --data=PATH --out_dir=out/fim
    python hf.py --out_dir=out/fim --to=my_model

Differs, from transformers: a text that spells a special token is encoded as plain text here.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import Checkpoint, open_checkpoint
from model import ModelConfig, Transformer
from objectives import FIM_LAYOUTS, OBJECTIVES, Knobs
from tokenizer import BPE_PATTERN, Tokenizer
from util import UserError, build, flag, parse_flags, run_command

SIZES = {  # config.json's name -> ModelConfig's
    "vocab_size": "vocab_size",
    "hidden_size": "n_embd",
    "intermediate_size": "d_ff",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_kv_head",
    "head_dim": "head_dim",
}
COMPUTED = {  # config.json's field -> the values with which model.py computes the same
    "model_type": ["qwen3"],
    "hidden_act": ["silu", None],
    "attention_bias": [False, None],
    "use_sliding_window": [False, None],
    "layer_types": [["full_attention"], None],
    "rope_type": ["default", None],
    "partial_rotary_factor": [1, None],
    "quantization_config": [None],
}
LONGEST_ROW = 1024  # --block_size, unless the user says otherwise or the model has fewer positions

# How a text is cut into words. Each of these leaves no character out, as tiktoken needs.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
QWEN += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
BYTES = r"[\s\S]"
PATTERNS = (GPT2, QWEN, LLAMA3, BPE_PATTERN, BYTES)
# tiktoken's own spellings of these mean other things to the library that transformers uses.
PORTABLE = {"bytes": BYTES, "gpt2": GPT2, "r50k_base": GPT2, "cl100k_base": LLAMA3}

THEIR_MARKS = {"<PRE>": "<|fim_prefix|>", "<SUF>": "<|fim_suffix|>", "<MID>": "<|fim_middle|>"}


def byte_letters() -> list[str]:
    """The letter that stands for each byte in tokenizer.json (GPT-2, `bytes_to_unicode`).

    >>> "".join(byte_letters()[b] for b in "é\\n".encode())
    'Ã©Ċ'
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b if b in printable else next(others)) for b in range(256)]


# ---- in ----------------------------------------------------------------------------------------


def import_model(folder) -> Checkpoint:
    """A Qwen3's folder as a run of clm that has taken no step here. Raises UserError."""
    folder = Path(folder)
    try:
        config, block_size = read_config(folder)
        tok, n_theirs = read_tokenizer(folder, config)
        weights = read_weights(folder, config)
    except UserError:
        raise
    except Exception as e:  # JSON, safetensors and torch each have their own errors
        reason = f"{type(e).__name__}: {e}".splitlines()[0][:200]
        raise UserError(f"{folder} is not a model that can be read ({reason})") from None

    n_rows = max(tok.vocab_size, math.ceil(config.vocab_size / 64) * 64)
    for name in weights.keys() & {"embed_tokens.weight", "lm_head.weight"}:
        mean = weights[name][:n_theirs].mean(0)
        wider = mean.repeat(n_rows, 1)
        wider[: config.vocab_size] = weights[name]
        wider[n_theirs : tok.n_ids] = mean  # the special tokens that only this program has
        weights[name] = wider
    state = {
        "model": weights,
        "settings": {"objective": "clm", "block_size": block_size, "steps_before": 0},
        "step": 0,
        "data_digest": None,
        "best_val_loss": math.inf,
    }
    config = replace(config, vocab_size=n_rows)
    return Checkpoint(state, tok, {"clm": 1.0}, config, Knobs(), block_size)


def read_config(folder: Path) -> tuple[ModelConfig, int]:
    """config.json -> the model's shape and a length of rows."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    config |= {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    config["rope_type"] = rope.get("rope_type", rope.get("type"))
    config["layer_types"] = sorted(set(config.get("layer_types") or [])) or None
    for field, values in COMPUTED.items():
        if config.get(field) not in values:
            wrong = f"{path}: {field} is {config.get(field)!r}"
            raise UserError(f"{wrong}, but model.py computes only {values[0]!r}")
    for field in (*SIZES, "max_position_embeddings"):
        size = config.get(field)
        if type(size) is not int or not 1 <= size <= 1 << 20:
            raise UserError(f"{path}: {field} is {size!r}; give a number from 1 to {1 << 20}")
    shape = {ours: config[theirs] for theirs, ours in SIZES.items()}
    shape |= dict(tied=bool(config.get("tie_word_embeddings")), short_conv=False, value_embed=False)
    shape["rope_theta"] = float(config.get("rope_theta", 10000))
    shape["norm_eps"] = float(config.get("rms_norm_eps", 1e-6))
    if shape["n_head"] % shape["n_kv_head"] or shape["head_dim"] % 2:
        wrong = "num_key_value_heads must divide num_attention_heads, and head_dim be even"
        raise UserError(f"{path}: {wrong}")
    return build(ModelConfig, shape), min(config["max_position_embeddings"], LONGEST_ROW)


def read_weights(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """The safetensors as model.py names them, in float32."""
    load_file = safetensors().load_file
    files = ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if index.exists() and not (folder / files[0]).exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    weights = {}
    for file in files:
        if Path(file).name != file:
            raise UserError(f"{index}: weight_map names {file!r}, which is not in the folder")
        if not (folder / file).is_file():
            raise UserError(f"{folder / file} is missing; only safetensors are read, never pickles")
        weights |= load_file(folder / file)
    weights = {name.removeprefix("model."): weight for name, weight in weights.items()}
    if config.tied:
        weights.pop("lm_head.weight", None)

    with torch.device("meta"):  # names and shapes without memory
        expected = Transformer(config).state_dict()
    for name in expected.keys() ^ weights.keys():
        what = "lacks" if name in expected else "has an unknown weight,"
        raise UserError(f"{folder}: a Qwen3 of config.json's shape; the file {what} {name}")
    for name, weight in weights.items():
        has = f"{folder}: {name} is {weight.dtype}, {list(weight.shape)}"
        if weight.shape != expected[name].shape:
            raise UserError(f"{has}; config.json says {list(expected[name].shape)}")
        if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UserError(f"{has}; convert it to bfloat16 or float32")
    return {name: weight.float() for name, weight in weights.items()}


def safetensors():
    try:
        import safetensors.torch
    except ImportError:
        raise UserError("this needs a package: pip install safetensors") from None
    return safetensors.torch


def read_tokenizer(folder: Path, config: ModelConfig) -> tuple[Tokenizer, int]:
    """tokenizer.json -> the tokenizer, and how many ids it had before this program's were added."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise UserError(f"{path} is missing: save the tokenizer with save_pretrained()")
    spec = json.loads(path.read_text(encoding="utf-8"))
    model = spec["model"]
    added = {token["content"]: token["id"] for token in spec["added_tokens"]}
    text = sorted((id, piece) for piece, id in model["vocab"].items() if piece not in added)
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    n_theirs = max([*model["vocab"].values(), *added.values()]) + 1
    nfc = spec["normalizer"] == {"type": "NFC"}
    pattern = pattern_of(spec["pre_tokenizer"])
    letters = byte_letters()
    short_pieces = {piece for _, piece in text if len(piece) == 1}
    merged = list(dict.fromkeys(left + right for left, right in merges))
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")

    # In tiktoken, the order of the ids is the order of the merges.
    reasons = {
        "model is not a byte-level BPE": model.get("type") != "BPE"
        or short_pieces != set(letters)
        or model.get("byte_fallback")
        or affixes,
        "normalizer is not NFC": spec["normalizer"] and not nfc,
        "pre_tokenizer is not that of GPT-2, Qwen or Llama 3": pattern not in PATTERNS,
        "added_tokens or other ids lie among those of the text": [id for id, _ in text]
        != list(range(len(text))) or min(added.values(), default=len(text)) < len(text),
        "merges are not in the order of the ids": merged != [p for _, p in text if len(p) > 1],
        "added_tokens go beyond config.json's vocab_size": n_theirs > config.vocab_size,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UserError(f"{path}: {reason}")
    byte = {letter: b for b, letter in enumerate(letters)}
    ranks = {bytes(map(byte.get, piece)): id for id, piece in text}
    ours = {mark: added[name] for mark, name in THEIR_MARKS.items() if name in added}
    tok = Tokenizer(f"hf:{folder.resolve().name}", ranks, pattern, added | ours, nfc)
    return tok, n_theirs


def pattern_of(pre_tokenizer: dict) -> str | None:
    """The regular expression of a pre-tokenizer, or None if it does more than that."""
    *before, last = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    if not before:
        return GPT2 if last.get("use_regex", True) else None
    split = before[0]
    alone = len(before) == 1 and split["type"] == "Split" and not last.get("use_regex", True)
    isolates = alone and split["behavior"] == "Isolated" and not split.get("invert")
    return split["pattern"].get("Regex") if isolates else None
