"""checkpoint.py: a file of a run, checked before anything trusts it, and the model that it holds.

A checkpoint may come from anybody. config.py reads it as data, never as code; here it is compared
with itself and with model.py, so that what is wrong with it is one line.

    checkpoint = open_checkpoint("out/fim/ckpt.pt")
    model = build_model(checkpoint)
"""

import textwrap
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from config import UserError, build, load_checkpoint
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
    model.py."""
    state = load_checkpoint(path)
    try:
        saved = state["train_config"]
        tok = Tokenizer.from_json(state["tokenizer"])
        block_size = saved.get("block_size")
        if type(block_size) is not int or not 8 <= block_size <= 1 << 20:
            raise UserError(f"--block_size={block_size!r}: must be a number from 8 to {1 << 20}")
        check_weights(state["model"])
        mixture = parse_mixture(str(saved.get("objective")))
        knobs = build(Knobs, state["knobs"])
        check_knobs(mixture, knobs, (), block_size)
        config = with_heads(build(ModelConfig, state["model_config"]), mixture, knobs)
        if config.vocab_size < tok.vocab_size:
            raise UserError(f"it has {config.vocab_size} ids, its tokenizer {tok.vocab_size}")
        checkpoint = Checkpoint(state, tok, mixture, config, knobs, block_size)
        build_model(checkpoint)
    except UserError as e:
        raise UserError(f"{path}: the checkpoint says {e}; restore a copy or train again") from None
    return checkpoint


def check_weights(weights: dict) -> None:
    """Raise UserError unless these are arrays of finite numbers."""
    for name, weight in weights.items():
        plain = isinstance(weight, Tensor) and weight.device.type == "cpu"
        if not plain or not weight.is_floating_point() or not weight.isfinite().all():
            raise UserError(f"the weights {name} are not finite numbers (NaN)")


def build_model(checkpoint: Checkpoint) -> Transformer:
    """The model with the checkpoint's weights, on the CPU. Raises UserError where they do not fit,
    as those of another model.py."""
    try:
        with torch.device("meta"):  # names and shapes without memory
            model = Transformer(checkpoint.model_config)
        model.load_state_dict(checkpoint.state["model"], assign=True)
    except (RuntimeError, TypeError, AttributeError) as e:  # also for names that are no text
        reason = textwrap.shorten(str(e), 500)  # torch gives a line to each weight
        raise UserError(f"its weights do not fit this model.py ({reason})") from None
    return model.eval()
