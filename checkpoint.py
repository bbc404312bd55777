"""checkpoint.py: save a run, read it back, check it before anything trusts it, build its model.

A checkpoint may come from anybody. It is read as data, never as code. The checks here make sure
that its parts fit each other and model.py, so that a bad one ends in a one-line error.
"""

import errno
import math
import os
import pickle
import shlex
import textwrap
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from config import UserError, atomic_write, build, is_out_of_memory
from mixture import check_knobs, check_shape, parse_mixture, with_heads
from model import ModelConfig, Transformer
from objectives import OBJECTIVES, Knobs
from tokenizer import Tokenizer

# fmt: off
CHECKPOINT_FORMAT = 2
CHECKPOINT = {  # what a checkpoint holds; `model` is name -> tensor, `tokenizer` is JSON
    "model": dict, "optimizers": list, "step": int, "elapsed_s": float, "best_val_loss": float,
    "tokenizer": str, "model_config": dict, "knobs": dict, "train_config": dict,
    "data_config": dict, "data_digest": str, "replay_digest": str,
}
# fmt: on


# ---- the file ----------------------------------------------------------------------------------


def save_checkpoint(path, state: dict, is_best: bool = False) -> None:
    """Save a dict with the keys of CHECKPOINT; the old file is kept beside it as previous.pt. If
    `is_best`, the file is also best.pt, which is written first: if the run is killed before ckpt.pt
    follows, resuming makes the same best.pt again."""
    best = Path(path).with_name("best.pt") if is_best else None
    with atomic_write(path, keep="previous.pt", also=best) as f:
        try:
            torch.save({"format": CHECKPOINT_FORMAT, **state}, f)
        except RuntimeError as e:  # torch's zip writer hides what stopped the write
            raise (e.__context__ if isinstance(e.__context__, OSError) else e) from None


def load_checkpoint(path) -> dict:
    """Read a checkpoint as data: no code in it runs, and all contents are checked against CRCs.

    Returns the saved dict with its tensors on the CPU. Raises UserError that names the remedy.
    """
    path = Path(path)
    if not path.exists():
        folder = path.parent
        places = (folder, folder.parent, Path("out"))
        runs = next(filter(None, (sorted(place.glob("*/ckpt.pt")) for place in places)), [])
        names = ", ".join(str(run.parent) for run in runs[:20])
        name = folder.name if folder.name in OBJECTIVES else "clm"
        remedy = f"train first: python train.py --objective={name} writes out/{name}"
        if runs:
            remedy = f"name a folder with a run: {names}"
        raise UserError(f"{path} does not exist; {_another_one(path) or remedy}")
    with open(path, "rb") as f:
        try:
            return _read_checkpoint(f)
        except Exception as e:  # zipfile, pickle and torch each raise their own errors on bad bytes
            # EINVAL comes from wrong offsets inside a zip: that is damage, not a failing disk.
            disk_failed = isinstance(e, OSError) and e.errno not in (None, errno.EINVAL)
            if disk_failed or is_out_of_memory(e) or isinstance(e, UserError):
                raise
            reason = str(e).splitlines()[0][:120] if str(e) else type(e).__name__
            if isinstance(e, pickle.UnpicklingError):  # torch's message advises running that code
                reason = "it holds code, not only data; none of it was run"
            remedy = _another_one(path) or "restore a copy or train again"
            line = f"{path} is damaged, or not a checkpoint of this program ({reason}); {remedy}"
            raise UserError(line) from None


def _read_checkpoint(f) -> dict:
    """Raises an exception of any type if the file is not as save_checkpoint writes it."""
    with zipfile.ZipFile(f) as z:
        if sum(part.file_size for part in z.infolist()) > os.fstat(f.fileno()).st_size:
            raise ValueError("its parts are larger than the file")
        if bad := z.testzip():
            raise ValueError(f"checksum of {bad} is wrong")
    f.seek(0)
    state = torch.load(f, map_location="cpu", weights_only=True)
    if state.get("format") != CHECKPOINT_FORMAT:
        raise UserError(f"{f.name} was written by another program or version; train again")
    for name, kind in CHECKPOINT.items():
        if not isinstance(state.get(name), kind):
            raise ValueError(f"no {name} in it")
    return state


def _another_one(path: Path) -> str:
    """A hint at another checkpoint beside this one (how to restore ckpt.pt from it), or ""."""
    set_aside = sorted(file.name for file in path.parent.glob("best-before-*.pt"))
    for name in ("ckpt.pt", "previous.pt", "best.pt", *set_aside):
        other = path.with_name(name)
        if other.exists() and not (path.exists() and other.samefile(path)):
            if path.name == "ckpt.pt":
                return f"restore an earlier one: {shlex.join(['cp', str(other), str(path)])}"
            return f"name another one: {other}"
    return ""


# ---- what it says ------------------------------------------------------------------------------


@dataclass
class Checkpoint:
    """The contents of a checkpoint file, after all checks."""

    state: dict  # as load_checkpoint returns it
    tok: Tokenizer
    mixture: dict[str, float]
    model_config: ModelConfig
    knobs: Knobs
    block_size: int
    written: int = 0  # mtime of the file in ns: a run that is still stopping would rewrite it


def _is_plain(weight) -> bool:
    """Whether a weight has the form that run.py saves. A sparse or expanded tensor could be small
    in the file and still fill the memory."""
    return (
        isinstance(weight, Tensor)
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.layout == torch.strided
        and weight.is_contiguous()
    )


def checkpoint_path(run: str) -> Path:
    """A run's checkpoint file: `run` names it, or the run's folder. Raises UserError."""
    path = Path(run)
    if path.is_file() and path.suffix != ".pt":
        raise UserError(f"{run} is a file; name the folder of a run, or a checkpoint in it (.pt)")
    return path if path.suffix == ".pt" and not path.is_dir() else path / "ckpt.pt"


def open_checkpoint(run) -> Checkpoint:
    """Read a run's checkpoint and check what it says. Raises UserError if the file is not a
    checkpoint, contradicts itself or does not fit model.py."""
    path = checkpoint_path(run)
    written = path.stat().st_mtime_ns if path.exists() else 0
    state = load_checkpoint(path)
    try:
        saved = state["train_config"]
        tok = Tokenizer.from_json(state["tokenizer"])
        block_size = saved.get("block_size")
        if type(block_size) is not int or not 8 <= block_size <= 1 << 20:
            raise UserError(f"--block_size={block_size!r}: must be a number from 8 to {1 << 20}")
        for name, weight in state["model"].items():
            if not _is_plain(weight) or not weight.isfinite().all():
                raise UserError(f"the weights {name} are not plain float32, or not finite")
        if state["step"] < 0 or not 0 <= state["elapsed_s"] < math.inf:
            told = f"step={state['step']}, elapsed_s={state['elapsed_s']}"
            raise UserError(f"{told}: impossible values")
        mixture = parse_mixture(str(saved.get("objective")))
        knobs = build(Knobs, state["knobs"])
        check_knobs(mixture, knobs, (), block_size)
        shape = build(ModelConfig, state["model_config"])
        check_shape(shape)
        config = with_heads(shape, mixture, knobs)
        if config.vocab_size < tok.vocab_size:
            raise UserError(f"it has {config.vocab_size} ids, its tokenizer {tok.vocab_size}")
        checkpoint = Checkpoint(state, tok, mixture, config, knobs, block_size, written)
        build_model(checkpoint)
    except UserError as e:
        remedy = "if nothing helps, restore a copy or train again"
        raise UserError(f"{path} cannot be used: {e}; {remedy}") from None
    return checkpoint


def build_model(checkpoint: Checkpoint) -> Transformer:
    """The checkpoint's model, on the CPU. Raises UserError if the weights do not fit model.py."""
    try:
        with torch.device("meta"):  # names and shapes without memory
            model = Transformer(checkpoint.model_config)
        model.load_state_dict(checkpoint.state["model"], assign=True)
    except (RuntimeError, TypeError, AttributeError) as e:  # also for names that are not strings
        reason = textwrap.shorten(str(e), 500)  # torch writes a line for each weight
        raise UserError(f"its weights do not fit this model.py ({reason})") from None
    return model.eval()
