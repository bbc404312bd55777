"""train.py: train a model on a text, evaluate it on held-out text, keep a log and checkpoints.

Read from top to bottom: presets and flags, `main` with the loop, then what they call. `main` knows
no objective by its name: the table in objectives.py gives the rows and the loss.

    python train.py --objective=fim
    python train.py --objective=fim --init_from=resume --max_steps=3000
    torchrun --standalone --nproc_per_node=2 train.py --objective=clm
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint import Checkpoint, checkpoint_path, open_checkpoint, save_checkpoint
from corpus import DataConfig, Tokens, load_tokens
from data import TRAIN, VALIDATION, Batch, Source, Text
from data import check_text, collate, draw_row, make_batch
from model import ModelConfig, Transformer
from objectives import OBJECTIVES, Knobs, check_knobs, first_member
from objectives import parse_mixture, source_of, total_loss, with_heads
from optimizers import learning_rate_scale, make_optimizers
from sample import TrainedModel, one_line_sample, set_for_asking, showcase
from tokenizer import Tokenizer
from util import UserError, atomic_write, build, duration, find_device, flag, flags_of
from util import has_bfloat16, parse_flags, run_command, short, visible

EVAL_ROWS = 128  # validation rows, the same at every evaluation
EVAL_BATCH = 16  # of them at a time; fixed, because contrastive compares them with each other
SAMPLE_ROWS = 64  # rows from which the shares of targets and of padding are estimated
GRAD_CLIP = 1.0  # the gradient is scaled down to this norm
LONG_RUN = 500  # fewest steps that repay half a minute of compiling on a CPU


# ---- configuration -----------------------------------------------------------------------------


# fmt: off
# micro: for a laptop's CPU; tiny: for lab.compare; small: for one GPU; gpt2: GPT-2's shape (131M)
PRESETS = {
    "micro": dict(n_layer=3, n_head=4, n_embd=128, d_ff=256,
                  block_size=128, batch_size=32, max_steps=1400, generator_frac=0.125),
    "tiny":  dict(n_layer=4, n_head=4, n_embd=128,
                  block_size=128, batch_size=32, max_steps=1500),
    "small": dict(n_layer=8, n_head=8, n_embd=512, lr_unembed=0.004,
                  block_size=512, batch_size=64, max_steps=1000),
    "gpt2":  dict(n_layer=12, n_head=12, n_embd=768, lr_unembed=0.004, tied=True,
                  block_size=1024, batch_size=64, max_steps=5000),
}
# What an objective changes in a preset. `steps` multiplies max_steps. `split`: so many times the
# rows, each that much shorter: pairs and crops are short, and more rows give more labels.
RECIPES = {
    "clm":         dict(steps=0.4),
    "prefix":      dict(steps=0.4),
    "mtp":         dict(steps=0.4),
    "fim":         dict(steps=0.95),
    "cm3":         dict(steps=0.8),
    "span":        dict(steps=0.9),
    "ul2":         dict(steps=1.05),
    "bart":        dict(steps=0.8),
    "mlm":         dict(steps=1.05),
    "mntp":        dict(steps=1.05),
    "nsp":         dict(steps=1.2, split=2, lr=0.01),
    "sop":         dict(split=2),
    "electra":     dict(steps=0.75, lr_binary=0.012),
    "diffusion":   dict(steps=1.1, lr=0.014),
    "block":       dict(steps=0.8),
    "plm":         dict(steps=1.05),
    "contrastive": dict(steps=0.6, split=2),
}
# fmt: on


@dataclasses.dataclass
class TrainConfig:
    """the run; in brackets the default, or one for each preset: micro | tiny | small | gpt2"""

    objective: str = flag("clm", f"{', '.join(OBJECTIVES)}, or a mixture: clm:0.5,ul2:0.5")
    preset: str | None = flag(None, "size; automatic: small on CUDA, else micro", tuple(PRESETS))
    out_dir: str | None = flag(None, "folder of the run; automatic: out/OBJECTIVE")
    overwrite: bool = flag(False, "replace the run in out_dir")
    init_from: str = flag("scratch", "scratch, resume (continue out_dir), a run, a Qwen3 or Llama")
    freeze_trunk: bool = flag(False, "train only the heads that the objective has")
    block_size: int = flag(128, "T, positions in a row; halved for nsp, sop, contrastive", min=8)
    batch_size: int = flag(32, "rows per step, in total; doubled for these three", min=1)
    grad_accum: int = flag(1, "micro-batches per step; for contrastive: fewer negatives", min=1)
    max_steps: int = flag(1500, "steps; the default depends on the objective, too", min=1)
    lr: float = flag(0.02, "learning rate of Muon; a released model: 1e-4, AdamW for all", min=0)
    optimizer: str = "muon"  # of the blocks' matrices, or "adamw"
    lr_unembed: float = flag(0.012, "learning rate of the unembedding (AdamW)", min=0)
    lr_embed: float = 0.01  # of the embedding, norms, short_conv, second_text (AdamW)
    lr_binary: float = 0.004  # of one-logit heads (AdamW)
    seed: int = flag(1, "seed of initialization and rows", min=0)
    replay_data: str = flag("", "an older corpus to mix in, row by row; empty: none")
    replay_rate: float = flag(0.05, "share of the rows drawn from --replay_data", above=0, below=1)
    log_every: int = flag(10, "steps between log lines", min=1)
    eval_every: int = flag(200, "steps between evaluations, each with a checkpoint", min=1)
    device: str | None = flag(None, "cpu, cuda, cuda:N or mps; automatic: the fastest available")
    dtype: str | None = flag(None, "matrix products; automatic: by device", ("float32", "bfloat16"))
    compile: bool | None = flag(
        None, f"torch.compile; automatic: on CUDA, and on a CPU from {LONG_RUN} steps on"
    )
    # Steps that trained the weights which this run starts from. Rows are drawn by step number, so
    # counting on from there draws other rows.
    steps_before: int = 0


class Settings(NamedTuple):
    """Everything that decides what a run does."""

    train: TrainConfig
    model: ModelConfig
    knobs: Knobs
    data: DataConfig
    mixture: dict[str, float]
    checkpoint: Checkpoint | None  # what the run continues or starts from
    given: dict  # the flags that the user typed


def settings(argv: list[str]) -> Settings:
    """A value comes from the flags, else from the checkpoint, else from the objective's recipe,
    else from the preset, else from the field's default. Raises UserError."""
    classes = (TrainConfig, ModelConfig, Knobs, DataConfig)
    given = parse_flags(argv, __doc__, *classes, defaults=defaults_for_help(*classes))
    objective = given.get("objective", "clm")
    folder = given.get("out_dir") or "out/" + objective.replace(":", "-").replace(",", "+")
    init_from = given.get("init_from", "scratch")
    checkpoint = None
    saved = {}
    if init_from != "scratch":
        checkpoint = open_checkpoint(
            checkpoint_path(folder) if init_from == "resume" else init_from
        )
        freeze_trunk = given.get("freeze_trunk", False)
        saved = carried_over(checkpoint, init_from == "resume", freeze_trunk)

    mixture = parse_mixture((saved | given).get("objective", "clm"))
    on_gpu = torch.cuda.is_available() and given.get("device") != "cpu"
    preset = (saved | given).get("preset") or ("small" if on_gpu else "micro")
    values = defaults_of(preset, mixture, given, checkpoint) | saved | given | {"out_dir": folder}
    train, model, knobs, data = (build(cls, values) for cls in classes)
    s = Settings(train, with_heads(model, mixture, knobs), knobs, data, mixture, checkpoint, given)
    check_knobs(mixture, knobs, given, train.block_size)
    check_settings(s)
    return s


def defaults_of(preset: str, mixture: dict, given: dict, checkpoint: Checkpoint | None) -> dict:
    """The preset's values, changed by the recipe of the mixture's first member; the steps are the
    most of any member. With a checkpoint, T is the checkpoint's."""
    values = {"preset": preset, **PRESETS[preset]}
    if "n_embd" in given:  # at another width, the SwiGLU has the usual one
        values.pop("d_ff", None)
    recipes = [RECIPES.get(name, {}) for name in mixture]
    recipe = {"steps": 1.0, "split": 1, **recipes[0]}
    T = values["block_size"]
    if checkpoint:
        first = next(iter(checkpoint.mixture))
        T = checkpoint.block_size * RECIPES.get(first, {}).get("split", 1)
    values |= recipe
    values["block_size"] = max(T // recipe["split"], 8)
    values["batch_size"] *= recipe["split"]
    steps = max(recipe.get("steps", 1.0) for recipe in recipes)
    values["max_steps"] = round(values["max_steps"] * steps)
    return values


# For what comes from a released model; measured with one of 135M parameters (lab/NOTES.md).
GENTLE = dict(optimizer="adamw", lr=1e-4, lr_embed=1e-4, lr_unembed=1e-4)


def carried_over(checkpoint: Checkpoint, resume: bool, freeze_trunk: bool) -> dict:
    """The checkpoint's values that hold unless a flag says otherwise."""
    saved = checkpoint.state["settings"]
    heads = {name for objective in OBJECTIVES.values() for name in objective.heads}
    shape = {k: v for k, v in vars(checkpoint.model_config).items() if k not in heads}
    if resume:
        kept = saved.keys() - {"init_from", "out_dir", "overwrite", "cache_dir"}
    else:
        kept = saved.keys() & {"data", "preset", *heads}
        if checkpoint.tok.name.startswith("hf:") and not freeze_trunk:
            shape |= GENTLE  # heads that are new learn by the usual rates
        shape["steps_before"] = saved["steps_before"] + checkpoint.state["step"]
    return shape | {name: saved[name] for name in kept}


def defaults_for_help(*classes) -> dict[str, str]:
    """What --help shows for the fields that presets set, such as "3 | 4 | 8 | 12"."""
    fields = {field.name: field for cls in classes for field in flags_of(cls)}
    shown = {}
    for name in fields.keys() & set().union(*PRESETS.values()):
        values = [preset.get(name, fields[name].default) for preset in PRESETS.values()]
        shown[name] = " | ".join(map(str, values))
    return shown


def check_settings(s: Settings) -> None:
    """Raise UserError on values that do not go together."""
    c, shape = s.train, s.model
    n_batches = c.grad_accum * int(os.environ.get("WORLD_SIZE", 1))
    if c.batch_size % n_batches:
        factor = f"--grad_accum={c.grad_accum} times the number of processes"
        raise UserError(f"--batch_size={c.batch_size}: must be a multiple of {factor}")
    if c.batch_size == n_batches and "similarity" in first_member(s.mixture).tasks:
        wrong = (
            f"--batch_size={c.batch_size}: a micro-batch has one row, with nothing to tell it from"
        )
        raise UserError(f"{wrong}; lower --grad_accum or raise --batch_size")
    if shape.n_head % shape.n_kv_head:
        raise UserError(f"--n_kv_head={shape.n_kv_head}: must divide --n_head={shape.n_head}")
    if shape.head_dim % 2:
        wrong = f"--n_embd={shape.n_embd}: divided by --n_head={shape.n_head}"
        raise UserError(f"{wrong}, it must give an even number")
    if c.freeze_trunk and not s.checkpoint:
        raise UserError("--freeze_trunk: a fresh trunk must learn; give --init_from=RUN")
    if "replay_rate" in s.given and not c.replay_data:
        raise UserError("--replay_rate is the share of another text: give --replay_data")
    if s.checkpoint and s.given.get("tokenizer", s.checkpoint.tok.name) != s.checkpoint.tok.name:
        raise UserError(f"--tokenizer: the checkpoint has {s.checkpoint.tok.name}; leave it out")
    if c.init_from == "resume":
        done = s.checkpoint.state["step"]
        if s.mixture != s.checkpoint.mixture:
            remedy = f"start a new run from its weights: --init_from={c.out_dir} --out_dir=NEW"
            raise UserError(f"--objective={c.objective} is not that of the run; {remedy}")
        if done >= c.max_steps:
            raise UserError(f"this run has taken {done} steps; give a larger --max_steps")
    elif not c.overwrite and Path(c.out_dir, "log.jsonl").exists():
        remedy = "continue it (--init_from=resume), replace it (--overwrite) or name another"
        raise UserError(f"--out_dir={c.out_dir} already holds a run: {remedy}")


# ---- the run -----------------------------------------------------------------------------------


def main(argv: list[str], report: bool = True, watch: Callable | None = None) -> None:
    """`report`: at the end, show what the model writes, and count its right answers.
    `watch(trained)`: a dict of further values to log at each evaluation (lab.atlas)."""
    s = settings(argv)
    c = s.train

    # device
    device = find_device(c.device)
    rank, world = join_processes(device)
    log = Log(Path(c.out_dir, "log.jsonl"), rank)
    dtype = getattr(torch, c.dtype or ("bfloat16" if has_bfloat16(device) else "float32"))
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)
    compile = c.compile
    if compile is None:
        compile = device.type == "cuda" or (device.type == "cpu" and c.max_steps >= LONG_RUN)
    how = "compiled in the first steps" if compile else "not compiled"
    log.print(f"device     {device}, {str(dtype).removeprefix('torch.')} matrix products, {how}")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    keep_freed_memory(device)

    # data
    tokens, source, val_source = load_data(s, log)
    tok = tokens.tok
    read_per_row = describe_rows(source, s, log)

    # model
    model = make_model(s, tok, log).to(device)
    loss = first_member(s.mixture).loss
    if compile:
        model.compile_for_training()
        if device.type != "cuda":  # else threads add up the embedding's gradient in any order
            torch.use_deterministic_algorithms(True, warn_only=True)

    # optimizers
    rates = (c.lr, c.lr_embed, c.lr_unembed, c.lr_binary)
    optimizers = make_optimizers(model, c.optimizer, *rates, dtype)

    # resume
    began = time.perf_counter()
    first_step = 0
    best = math.inf  # the lowest validation loss so far
    if c.init_from == "resume":
        state = s.checkpoint.state
        for optimizer, saved in zip(optimizers, state["optimizers"]):  # momenta, but not the rates
            optimizer.load_state_dict(optimizer.state_dict() | {"state": saved["state"]})
        first_step = state["step"]
        began -= state["elapsed_s"]
        if tokens.digest == state["data_digest"]:  # else losses cannot be compared
            best = state["best_val_loss"]
        log.print(f"resumes    after step {first_step}")
    log.open(first_step, c.overwrite)
    log.print(
        f"run        {c.max_steps} steps of {c.batch_size} rows of {c.block_size} positions, "
        f"into {c.out_dir}"
    )

    if s.checkpoint and not first_step:  # what the weights can do
        with autocast:
            means = evaluate(model, loss, val_source, s.knobs)
        amounts = {"tokens": 0, "epochs": 0.0, "elapsed_s": 0.0}
        log_evaluation(log, means, progress_at(0, c), 0, best, amounts, s.mixture, tokens.floor)

    # loop
    meter = Meter()
    with stop_signals() as signals:
        for step in range(first_step, c.max_steps):
            scale = learning_rate_scale(step, c.max_steps)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak_lr"] * scale

            batches = draw_batches(source, step, c, rank, world)  # while a GPU ends the last step
            for batch in batches:
                batch = batch.to(device)
                with autocast:
                    metrics = loss(model, batch, tok, s.knobs)
                (total_loss(metrics) / len(batches)).backward()
                meter.add(metrics, batch.inputs.numel())

            if world > 1:
                for p in model.parameters():
                    if p.grad is not None:
                        sum_of_all(p.grad).div_(world)
            torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()

            done = step + 1
            last = done == c.max_steps
            stopping = not last and any_process_was_told(signals, done % c.log_every == 0, device)
            progress = progress_at(done, c)
            meter.steps += 1
            if last or stopping or done % c.log_every == 0:
                log_step(log, meter, progress, done, c.lr * scale, c.max_steps - done)
                meter = Meter()
            elif compile and done == first_step + 2:  # these two steps compiled
                meter.means()  # waits for the device
                log.print(f"compiled   in {duration(time.perf_counter() - meter.began)}")
                meter = Meter()

            paused = time.perf_counter()
            improved = False
            if last or done % c.eval_every == 0:
                with autocast:
                    means = evaluate(model, loss, val_source, s.knobs)
                improved = means["loss"] < best
                best = min(best, means["loss"])
                n_read = done * c.batch_size
                amounts = {
                    "tokens": n_read * c.block_size,
                    "epochs": n_read * read_per_row / len(tokens.train),
                    "elapsed_s": time.perf_counter() - began,
                }
                trained = copy_for_use(model, s, tok)
                if watch:
                    amounts |= watch(trained)
                log_evaluation(log, means, progress, done, best, amounts, s.mixture, tokens.floor)
                if not last:
                    log.print(f"sample, ⟪by the model⟫: {one_line_sample(trained, tokens)}")
            if rank == 0 and (last or stopping or done % c.eval_every == 0):
                elapsed = time.perf_counter() - began
                save(model, optimizers, s, tokens, done, elapsed, best, improved)
            meter.began += time.perf_counter() - paused  # the next step times leave this out
            if stopping:
                break

    if report and rank == 0 and done == c.max_steps and not signals:
        folder = c.out_dir if improved else f"{c.out_dir}/best.pt"
        show_results(trained, tokens, folder, log)
        name_next_steps(c, log)
    if world > 1:
        dist.destroy_process_group()
    if signals or done < c.max_steps:
        stop_here(s, done, world, signals)


# ---- data --------------------------------------------------------------------------------------


def load_data(s: Settings, log: "Log") -> tuple[Tokens, Source, Source]:
    """The corpus, and what training and validation rows are drawn from. Raises UserError."""
    c, knobs = s.train, s.knobs
    tok = s.checkpoint.tok if s.checkpoint else None
    # If the checkpoint, not the user, names the text, it must not have changed.
    from_checkpoint = s.checkpoint and "data" not in s.given
    expected = s.checkpoint.state["data_digest"] if from_checkpoint else None
    tokens = load_tokens(s.data, tok, log.print, expected)
    log.print(f"data       {tokens.about}")
    tok = tokens.tok
    text = Text(tokens.train, tok.EOT)
    check_text(text, c.block_size)
    replay_text = replay_val = None
    if c.replay_data:
        replay = load_tokens(dataclasses.replace(s.data, data=c.replay_data), tok, log.print)
        replay_text = Text(replay.train, tok.EOT)
        replay_val = Text(replay.val, tok.EOT)
        log.print(f"replay     {replay.about}; {c.replay_rate:.0%} of the rows")

    val_text = Text(tokens.val, tok.EOT)
    if len(val_text.sizes) == 0:
        raise UserError("--data: no held-out document has two tokens or more; give more text")
    validation = source_of(s.mixture, val_text, tok, c.block_size, knobs, seed=0)
    validation = validation._replace(replay_text=replay_val)  # evaluated, never drawn
    train = validation._replace(
        text=text,
        seed=c.seed,
        replay_text=replay_text,
        replay_rate=c.replay_rate,
    )
    return tokens, train, validation


def describe_rows(source: Source, s: Settings, log: "Log") -> float:
    """Say which share of the positions has a target, and which is padding -> how many tokens of the
    corpus a row holds: all estimated from SAMPLE_ROWS rows. Raises UserError if rows are empty."""
    rows = [draw_row(source, TRAIN, 0, i, SAMPLE_ROWS)[0] for i in range(SAMPLE_ROWS)]
    sample = collate(rows, source.tok.n_bytes)
    padding = (sample.segment == 0).float().mean().item()
    if padding == 1.0:
        raise UserError("--data: no document is long enough for a row; give longer documents")
    what = f"{len(sample.targets) / sample.inputs.numel():.1%} of the positions are predicted"
    if not len(sample.targets):
        what = "whole rows are compared, no positions are predicted"
    shares = ", ".join(f"{name} ({share:.0%} of the rows)" for name, share in s.mixture.items())
    name = shares if len(s.mixture) > 1 else s.train.objective
    log.print(f"objective  {name}: {what}, {padding:.1%} are padding")
    # No more than what is read: contrastive reads only two crops of its text.
    return sum(min(len(row.raw), (row.segment > 0).sum()) for row in rows) / SAMPLE_ROWS


def draw_batches(
    source: Source, step: int, c: TrainConfig, rank: int = 0, world: int = 1
) -> list[Batch]:
    """This process's micro-batches of a step. Each of the n micro-batches of all processes takes
    every n-th of the step's rows, so that diffusion's t is evenly spread within it. All divide
    their loss by the same number, so a target counts equally in every micro-batch."""
    n = c.grad_accum * world
    batches = []
    for first in range(rank, n, world):
        row_numbers = range(first, c.batch_size, n)
        batches.append(make_batch(source, TRAIN, c.steps_before + step, row_numbers, c.batch_size))
    weight = sum_of_all(sum(batch.total_weight for batch in batches)) / n
    return [dataclasses.replace(batch, total_weight=weight) for batch in batches]


# ---- model -------------------------------------------------------------------------------------

# All other modules are heads.
TRUNK = ("embed_tokens", "short_conv", "layers", "norm", "lm_head")


def make_model(s: Settings, tok: Tokenizer, log: "Log") -> Transformer:
    """A fresh model, or one with a checkpoint's weights; its heads are those of the objective."""
    c = s.train
    shape = dataclasses.replace(s.model, separator=tok.SEP)
    if s.checkpoint is None:
        shape.vocab_size = tok.vocab_size
    with torch.random.fork_rng(devices=[]):  # weights are drawn on the CPU
        torch.manual_seed(c.seed)
        model = Transformer(shape)
    if s.checkpoint:
        heads = load_weights(model, s.checkpoint)
        if c.init_from != "resume":
            how = f"({s.checkpoint.state['step']} steps); {c.optimizer}, rate {c.lr:g}"
            log.print(f"weights    from {c.init_from} {how}{heads}")
    if c.freeze_trunk:
        for name, p in model.named_parameters():
            p.requires_grad_(name.split(".")[0] not in TRUNK)
        if not any(p.requires_grad for p in model.parameters()):
            raise UserError(f"--freeze_trunk: {c.objective} adds no head to train; leave it out")
    n = sum(p.numel() for p in model.parameters())
    log.print(
        f"model      {n / 1e6:.2f}M parameters: layers {shape.n_layer}, width {shape.n_embd}, "
        f"heads {shape.n_head}, ids {shape.vocab_size} (preset {c.preset})"
    )
    return model


def load_weights(model: Transformer, checkpoint: Checkpoint) -> str:
    """Load the weights that fit -> which heads are new here, and which are left behind, in words.
    Raises UserError if a weight of the trunk is missing or left over."""
    saved = checkpoint.state["model"]
    here = model.state_dict()
    # Heads of two kinds may have the same names, but they read different inputs.
    same_heads = checkpoint.model_config.mtp_heads == model.config.mtp_heads
    fits = {
        name: weight
        for name, weight in saved.items()
        if name in here and weight.shape == here[name].shape
        if same_heads or not name.startswith("future.")
    }
    model.load_state_dict(fits, strict=False)
    words = ""
    for what, names in (("new here", here.keys() - fits), ("left behind", saved.keys() - fits)):
        modules = sorted({re.match(r"future\.\d+|[^.]+", name)[0] for name in names})
        unfit = [name for name in modules if name in TRUNK]
        if unfit:
            raise UserError(f"the checkpoint does not fit the flags of the model: {unfit[0]}")
        words += f"; {what}: {', '.join(modules)}" if modules else ""
    return words


def keep_freed_memory(device: torch.device) -> None:
    """On a CPU, let glibc keep what a step frees for the next one: it keeps up to twice the largest
    block that was ever freed. Asking the system for memory takes up to a seventh of a step."""
    if device.type == "cpu":
        torch.empty(31 << 20, dtype=torch.uint8)


def copy_for_use(model: Transformer, s: Settings, tok: Tokenizer) -> TrainedModel:
    """The current weights, for inference."""
    with torch.device("meta"):
        copy = Transformer(model.config)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    copy.load_state_dict(weights, assign=True)
    return TrainedModel(copy.eval(), tok, s.mixture, s.knobs, s.train.block_size)


# ---- several processes, and signals ------------------------------------------------------------


def join_processes(device: torch.device) -> tuple[int, int]:
    """Join the other processes of torchrun, if there are any -> this one's rank, their number."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return int(os.environ.get("RANK", 0)), world


def sum_of_all(x: Tensor) -> Tensor:
    """Sum `x` over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


@contextlib.contextmanager
def stop_signals():
    """A list, to which the first Ctrl-C or SIGTERM (also the signal of a closed terminal) adds its
    number: the run then finishes its step and saves. The second one ends the process at once."""
    received = []

    def receive(number, frame):
        if received:
            os._exit(128 + number)
        received.append(number)
        os.write(2, b"stopping after this step, then saving (again: stop at once, unsaved)\n")

    numbers = [signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)]
    before = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def any_process_was_told(signals: list[int], is_log_step: bool, device) -> bool:
    """Whether to stop. Several processes must agree, and ask each other only at log steps."""
    if not dist.is_initialized():
        return bool(signals)
    return is_log_step and sum_of_all(torch.tensor(len(signals), device=device)).item() > 0


def stop_here(s: Settings, done: int, world: int, signals: list[int]) -> None:
    """End the process, and say how to go on: on stderr, because Ctrl-C also ends `| tee`."""
    if done < s.train.max_steps:
        program = "python" if world == 1 else f"torchrun --standalone --nproc_per_node={world}"
        words = ["--init_from=resume", f"--out_dir={s.train.out_dir}"]
        line = f"stopped after step {done}, saved. To resume: {program} train.py"
        print(line, shlex.join(words), file=sys.stderr)
    sys.exit(128 + (signals[0] if signals else signal.SIGTERM))


# ---- what a run prints and keeps ---------------------------------------------------------------


class Log:
    """Lines on the screen, and objects in log.jsonl. Only the first process writes."""

    def __init__(self, path: Path, rank: int):
        self.path = path
        self.first = rank == 0

    def open(self, n_steps: int, overwrite: bool) -> None:
        """Begin the file, or keep the lines of the first `n_steps` steps. It tells that a run is
        here: FileExistsError if another one has begun since the flags were checked."""
        if not self.first:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if overwrite and not n_steps:
            for name in ("log.jsonl", "ckpt.pt", "best.pt"):
                self.path.with_name(name).unlink(missing_ok=True)
        if not n_steps:
            open(self.path, "x").close()
            return
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        kept = [line for line in lines if step_of(line) <= n_steps]
        with atomic_write(self.path) as f:
            f.write("".join(line + "\n" for line in kept).encode())

    def print(self, line: str = "") -> None:
        if self.first:
            try:
                print(visible(line), flush=True)
            except BrokenPipeError:  # Ctrl-C has also ended `| tee`: go on, to save the run
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def write(self, **values) -> None:
        if self.first:
            with open(self.path, "a") as f:
                f.write(json.dumps(values) + "\n")


def step_of(line: str) -> float:
    """The step of a line of log.jsonl; infinity without one, or if a full disk cut the line."""
    try:
        return json.loads(line).get("step", math.inf)
    except ValueError:
        return math.inf


class Meter:
    """Sums of Metrics since the last log line, kept on the device until they are asked for."""

    def __init__(self):
        self.began = time.perf_counter()
        self.steps = 0
        self.positions = 0
        self.sums = {}  # name -> (2,): sum and divisor
        self.coefficients = {}

    def add(self, metrics: dict, positions: int = 0) -> None:
        self.positions += positions
        for name, metric in metrics.items():
            both = torch.stack([metric.sum.detach().float(), metric.divisor.float()])
            self.sums[name] = self.sums.get(name, 0) + both
            self.coefficients[name] = metric.coefficient

    def means(self) -> dict[str, float]:
        """The loss, and the mean of each metric over all processes. Waits for the device."""
        sums = sum_of_all(torch.stack(list(self.sums.values()))).tolist()
        means = {name: total / n for name, (total, n) in zip(self.sums, sums) if n}
        loss = sum(self.coefficients[name] * mean for name, mean in means.items())
        return {"loss": loss, **means}


def progress_at(step: int, c: TrainConfig) -> str:
    """ "0250/5000": as many digits at each step."""
    return f"{step:0{len(str(c.max_steps))}}/{c.max_steps}"


def log_step(log: Log, meter: Meter, progress: str, done: int, lr: float, left: int) -> None:
    """Log the steps since the last line. Raises UserError if the loss is not finite."""
    means = meter.means()
    loss = require_finite(means.pop("loss"), "loss", done)
    means.pop("bits_per_byte", None)  # of training rows: the evaluation shows it
    elapsed = time.perf_counter() - meter.began
    ms = elapsed / meter.steps * 1e3
    world = dist.get_world_size() if dist.is_initialized() else 1
    speed = meter.positions * world / elapsed
    log.write(step=done, loss=loss, lr=lr, ms=ms, tokens_per_s=speed, **means)
    log.print(
        f"step {progress} | loss {loss:.4f} | lr {lr:.1e} | {ms:.1f} ms | {short(speed)} tok/s"
        f" | eta {duration(ms / 1e3 * left)}" + metrics_text(means)
    )


@torch.no_grad()
def evaluate(model, loss, source: Source, knobs: Knobs) -> dict[str, float]:
    """The loss and the objective's metrics: means over the validation rows. Every process evaluates
    all rows, so that the number of processes changes nothing."""
    meter = Meter()
    device = model.embed_tokens.weight.device
    model.eval()
    # On a CPU, compiling the forward pass alone would take longer than running it.
    with torch.compiler.set_stance("force_eager" if device.type == "cpu" else "default"):
        for start in range(0, EVAL_ROWS, EVAL_BATCH):
            numbers = range(start, start + EVAL_BATCH)
            batch = make_batch(source, VALIDATION, 0, numbers, EVAL_ROWS).to(device)
            meter.add(loss(model, batch, source.tok, knobs))
    model.train()
    means = meter.means()
    if source.replay_text is not None:
        old = source._replace(text=source.replay_text, replay_text=None)
        means["loss_on_old_text"] = evaluate(model, loss, old, knobs)["loss"]
    return means


def log_evaluation(log, means, progress, done, best, amounts, mixture, floor) -> None:
    """Log an evaluation. Bits per byte are shown where the loss is a likelihood; the entropy of the
    language only for whole texts. (That of whole stories: rows cut off their ends, which are
    easiest to predict, so even a perfect model would be about a tenth above it.)"""
    loss = require_finite(means.pop("loss"), "validation loss", done)
    likelihoods = {OBJECTIVES[name].likelihood for name in mixture}
    bits = means.pop("bits_per_byte", None)
    values = dict(step=done, val_loss=loss)
    line = f"eval {progress} | val loss {loss:.4f} nats"
    if bits is not None and all(likelihoods):
        values["bits_per_byte"] = bits
        line += f", {bits:.3f} bits per byte"
        if floor and likelihoods == {"text"}:
            values["floor_bits_per_byte"] = floor / math.log(2)
            line += f" (entropy of the language: {values['floor_bits_per_byte']:.3f})"
    log.write(**values, **means, **amounts)
    line += metrics_text(means) + f" | {short(amounts['tokens'])} tokens"
    line += f", {amounts['epochs']:.1f} epochs, {duration(amounts['elapsed_s'])}"
    log.print(line + (f" | best.pt has {best:.4f}" if best < loss else ""))


def metrics_text(means: dict[str, float]) -> str:
    """The metrics of an objective besides its loss, each with its baseline if it has one."""
    losses = [name for name in means if name.endswith("_loss")]
    text = ""
    for name, mean in means.items():
        is_part = re.fullmatch(r"loss_\d+|replaced_share|.*_baseline", name)
        if not is_part and losses != [name]:  # a single loss is the loss
            text += f" | {name} {mean:.3f}"
            if f"{name}_baseline" in means:
                text += f" (guessing: {means[f'{name}_baseline']:.3f})"
    return text


def require_finite(value: float, what: str, step: int) -> float:
    if not math.isfinite(value):
        saved = "what was saved before is intact"
        raise UserError(f"the {what} became {value} by step {step}; {saved}. Lower --lr")
    return value


def save(model, optimizers, s: Settings, tokens: Tokens, done, elapsed, best, improved) -> None:
    """Write ckpt.pt, and best.pt if the validation loss has improved."""
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "step": done,
        "elapsed_s": elapsed,
        "best_val_loss": best,
        "tokenizer": tokens.tok.to_json(),
        "model_config": dataclasses.asdict(model.config),
        "settings": {**vars(s.train), **vars(s.knobs), **vars(s.data)},
        "data_digest": tokens.digest,
    }
    folder = Path(s.train.out_dir)
    if improved:
        save_checkpoint(folder / "best.pt", state)
    save_checkpoint(folder / "ckpt.pt", state)


def show_results(trained: TrainedModel, tokens: Tokens, out_dir: str, log: Log) -> None:
    """Show what the model writes. Where right answers are known, count them, if lab/ is there."""
    log.print()
    showcase(trained, tokens, out_dir, log.print)
    if tokens.floor is None:
        return
    with contextlib.suppress(ImportError):
        from lab.skills import measure, report

        log.print("Counting right answers ...")
        with set_for_asking(trained):
            skills = measure(trained)
        log.print("\n" + "\n".join(report(skills)))
        log.write(skills={name: skill._asdict() for name, skill in skills.items()})


def name_next_steps(c: TrainConfig, log: Log) -> None:
    """Name the page about the objective and the command that compares runs, if lab/ is there."""
    lab = Path(__file__).with_name("lab")
    if (lab / "atlas" / f"{c.objective}.md").exists():
        log.print(f"\nAbout {c.objective}: lab/atlas/{c.objective}.md")
    if (lab / "compare.py").exists():
        log.print(f"Beside another run: python -m lab.compare --plot {shlex.quote(c.out_dir)} RUN")


if __name__ == "__main__":
    run_command(main, lower="--batch_size or --block_size, or take a smaller --preset")
