"""checkpoint.py: save a run, read it back as data, build its model.

A checkpoint is data, never code: `weights_only` refuses anything else.
"""

import errno
import os
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

from model import ModelConfig, Transformer
from objectives import Knobs, parse_mixture
from tokenizer import Tokenizer
from util import UserError, atomic_write, build

FORMAT = 3  # raise it when the meaning of a checkpoint's contents changes


@dataclass
class Checkpoint:
    """A run, as it was saved."""

    state: dict  # see train.save
    tok: Tokenizer
    mixture: dict[str, float]
    model_config: ModelConfig
    knobs: Knobs
    block_size: int


def save_checkpoint(path, state: dict) -> None:
    with atomic_write(path) as f:
        try:
            torch.save({"format": FORMAT, **state}, f)
        except RuntimeError as e:  # torch cannot finish a file that was cut
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from e


def checkpoint_path(run) -> Path:
    """A run's checkpoint file: `run` names it, or the run's folder."""
    path = Path(run)
    return path if path.suffix == ".pt" else path / "ckpt.pt"


def open_checkpoint(run) -> Checkpoint:
    """Read the checkpoint of a run, or a model of Hugging Face. Raises UserError if it is missing,
    damaged or of another version."""
    path = checkpoint_path(run)
    if not path.is_file():
        if Path(run, "config.json").is_file():
            from hf import import_model

            return import_model(run)
        raise UserError(f"{path} does not exist; {what_to_name_instead(Path(run))}")
    try:
        with zipfile.ZipFile(path) as z:
            if bad := z.testzip():  # compares CRCs: torch.load would take a flipped bit
                raise ValueError(f"the checksum of {bad} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state.get("format") != FORMAT:
            raise ValueError("it was written by another program or version")
        tok = Tokenizer.from_json(state["tokenizer"])
        model_config = build(ModelConfig, state["model_config"])
        knobs = build(Knobs, state["settings"])
        mixture = parse_mixture(state["settings"]["objective"])
        block_size = state["settings"]["block_size"]
    except Exception as e:  # zipfile, pickle and torch each have their own errors for bad bytes
        reason = str(e).splitlines()[0][:200] if str(e) else type(e).__name__
        raise UserError(
            f"{path} cannot be used ({reason}); restore a copy or train again"
        ) from None
    return Checkpoint(state, tok, mixture, model_config, knobs, block_size)


def what_to_name_instead(run: Path) -> str:
    """The remedy for a name that is neither a run's nor a model's."""
    if snapshots := sorted(run.glob("snapshots/*/config.json")):  # a folder of the hub's cache
        return f"the model is in {snapshots[-1].parent}"
    if runs := sorted(str(found.parent) for found in Path("out").glob("*/ckpt.pt")):
        remedy = f"name a run: {', '.join(runs)}"
    else:
        remedy = "train first: python train.py"
    if re.fullmatch(r"(?!out/)[\w-]+/[\w.-]+", str(run)) and not run.parent.exists():
        remedy = f"for a model of the hub: hf download {run} --local-dir={run.name}, then name this"
    return remedy


def build_model(checkpoint: Checkpoint) -> Transformer:
    """The checkpoint's model, on the CPU. Raises UserError if the weights do not fit model.py."""
    try:
        with torch.device("meta"):  # names and shapes without memory
            model = Transformer(checkpoint.model_config)
        model.load_state_dict(checkpoint.state["model"], assign=True)
    except RuntimeError as e:
        reason = str(e).splitlines()[1].strip() if "\n" in str(e) else e
        raise UserError(f"the checkpoint's weights do not fit model.py ({reason})") from None
    return model.eval()
