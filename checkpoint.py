"""checkpoint.py: a file of a run, checked before anything trusts it, and the model that it holds.

A checkpoint may come from anybody. config.py reads it as data, never as code; here it is compared
with itself and with model.py, so that what is wrong with it is one line and costs no memory.

    checkpoint = open_checkpoint("out/fim/ckpt.pt")
    model = build_model(checkpoint)
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from config import UserError, build, load_checkpoint, visible
from mixture import check_knobs, parse_mixture, with_heads
from model import ModelConfig, Transformer
from objectives import Knobs
from tokenizer import Tokenizer


@dataclass
class Checkpoint:
    """What a file says, checked."""

    state: dict  # as config.load_checkpoint gives it
    tok: Tokenizer
    mixture: dict[str, float]
    model_config: ModelConfig
    knobs: Knobs
    block_size: int


def checkpoint_path(run: str) -> Path:
    """A run is named by its folder, or by one of its checkpoints. Raises UserError."""
    path = Path(run)
    if path.is_file() and path.suffix != ".pt":
        raise UserError(f"{run} is a file; name the folder of a run, or a checkpoint in it (.pt)")
    return path if path.suffix == ".pt" else path / "ckpt.pt"


def open_checkpoint(path) -> Checkpoint:
    """Raises UserError for a file that is not a checkpoint, contradicts itself or does not fit
    model.py. Sizes are checked against the weights, so a lie about them costs no memory."""
    state = load_checkpoint(path)
    try:
        saved = state["train_config"]
        tok = Tokenizer.from_json(state["tokenizer"])
        mixture = parse_mixture(str(saved.get("objective")))
        block_size = saved.get("block_size")
        if type(block_size) is not int or not 8 <= block_size <= 1 << 20:
            raise UserError(f"--block_size={block_size!r}: must be an int from 8 to {1 << 20}")
        knobs = build(Knobs, state["knobs"])
        check_knobs(mixture, knobs, (), block_size)
        old = {"short_conv": False, "value_embed": False}  # files from before them do not say so
        config = with_heads(build(ModelConfig, old, state["model_config"]), mixture, knobs)
        if config.vocab_size < tok.vocab_size:
            raise UserError(f"it has {config.vocab_size} ids, its tokenizer {tok.vocab_size}")
        check_weights(config, state["model"])
    except UserError as e:
        raise UserError(f"{path}: the checkpoint says {e}; restore a copy or train again") from None
    return Checkpoint(state, tok, mixture, config, knobs, block_size)


def check_weights(config: ModelConfig, weights: dict[str, Tensor]) -> None:
    """Raise UserError unless a model of this shape has weights of these names and shapes."""
    layers = {name.split(".")[1] for name in weights if name.startswith("layers.")}
    if config.n_layer != len(layers):  # before so many are made
        raise UserError(f"--n_layer={config.n_layer}, and it has weights of {len(layers)}")
    try:
        expected = empty_model(config).state_dict()
    except (RuntimeError, OverflowError, TypeError) as e:
        raise UserError(f"its shape is impossible ({str(e).splitlines()[0][:80]})") from None

    shared = expected.keys() & weights.keys()
    differences = {
        "missing": expected.keys() - shared,
        "unknown here": weights.keys() - shared,
        "other size": {name for name in shared if expected[name].shape != weights[name].shape},
    }
    told = []
    for what, names in differences.items():
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            told.append(f"{what}: {', '.join(sorted(names)[:3])}{more}")
    if told:
        raise UserError(f"its weights do not fit this model.py ({'; '.join(told)})")


def empty_model(config: ModelConfig) -> Transformer:
    """Names and shapes without memory."""
    with torch.device("meta"):
        return Transformer(config)


def build_model(checkpoint: Checkpoint) -> Transformer:
    """The model with the checkpoint's weights, in float32 on the CPU. Raises UserError for NaN."""
    weights = {name: weight.float() for name, weight in checkpoint.state["model"].items()}
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise UserError(f"the weights {visible(name)} are not finite (NaN); train again")
    model = empty_model(checkpoint.model_config)
    model.load_state_dict(weights, assign=True)
    return model.eval()
