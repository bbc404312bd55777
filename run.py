"""run.py: what a run is made of: batches, model, optimizers, log; how it starts, resumes and saves.

train.py takes the steps. What can be checked before the first step is checked here, and ends in a
one-line error. All rows come from mixture.draw_row, so a resumed run sees the same rows as one
that was never stopped, and two processes together see the same rows as one process.
"""

import contextlib
import dataclasses
import math
import multiprocessing
import os
import re
import shlex
import signal
import threading
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from checkpoint import Checkpoint, save_checkpoint
from config import UserError
from corpus import Tokens, count_stories, load_tokens
from data import Batch, Text, collate
from device import Machine, free_memory
from log import Log, Meter
from mixture import TRAIN, VALIDATION, Source, check_text, draw_row, first_member, make_batch
from model import ModelConfig, Transformer
from objectives import OBJECTIVES, Metrics
from optimizers import make_optimizers, restore_optimizers
from sample import TrainedModel
from settings import Settings, TrainConfig

# All other modules are heads. (second_text is part of the trunk, though only pair models have it.)
TRUNK = ("embed_tokens", "second_text", "short_conv", "layers", "norm", "lm_head")
SAMPLE_ROWS = 64  # rows from which the shares of targets and of padding are estimated
EVAL_BATCH = 16  # rows evaluated at a time; fixed: contrastive compares them with each other
MOST_ROW_PROCESSES = 8
ACTIVATION_BYTES = 130  # per position, block and channel, kept by a step on a CPU (measured)


# ---- the run -----------------------------------------------------------------------------------


class Run:
    """All that a run consists of, ready to go on after `first_step` steps. Raises UserError."""

    def __init__(self, settings: Settings, machine: Machine):
        config = settings.train
        check_batches(settings, machine)
        self.settings = settings
        self.config = config
        self.machine = machine
        self.folder = Path(config.out_dir)
        self.signals = []  # the signals that asked the run to stop
        self.rows_ahead = None  # an iterator over the next steps' rows, made by other processes
        self.log = Log(self.folder, machine.rank == 0, self.signals)
        self.tokens, self.replay_tokens = load_corpora(settings, self.log)
        self.source, self.val_source = sources(settings, self.tokens, self.replay_tokens)

        tok = self.tokens.tok
        shape = dataclasses.replace(settings.model, separator=tok.SEP)
        if settings.checkpoint is None:
            shape = dataclasses.replace(shape, vocab_size=tok.vocab_size)
        check_memory(shape, config, machine)
        self.model = make_model(shape, settings, self.log).to(machine.device)
        if config.freeze_trunk:
            freeze_trunk(self.model, config.objective)
        self.optimizers = make_optimizers(self.model, config, machine.dtype, machine.compile)
        if machine.compile:
            # An earlier run in this process may have turned compilation off.
            torch.compiler.set_stance("default")
            self.model.compile_for_training()
            if machine.device.type != "cuda":
                # Else threads would add up the embedding's gradient in a different order each time.
                torch.use_deterministic_algorithms(True, warn_only=True)

        self.first_step = 0
        self.best_val_loss = math.inf
        self.val_loss = math.inf  # of the last evaluation
        self.began = time.perf_counter()  # as if earlier parts of the run had ended just now
        if config.init_from == "resume":
            self.resume(settings.checkpoint.state)

        self.target_share, padding_share, self.text_share = shares_of_positions(self.source)
        if padding_share == 1.0:
            raise UserError("--data: no document is long enough for a row; give longer documents")
        held_out = self.validation_batch(0)
        if self.target_share and len(held_out.targets) == 0:
            raise UserError("--data: the held-out text leaves nothing to predict; give more text")
        describe(self, padding_share)
        self.meter = Meter()

    def resume(self, state: dict) -> None:
        """Go on where a checkpoint's run stopped. Raises UserError."""
        restore_optimizers(self.optimizers, state["optimizers"])
        self.first_step = state["step"]
        self.began -= state["elapsed_s"]
        before = state["train_config"]
        same_text = self.tokens.digest == state["data_digest"]
        same_length = self.config.block_size == before.get("block_size")
        same_rows = self.config.eval_rows == before.get("eval_rows")
        if same_text and same_length and same_rows and (self.folder / "best.pt").exists():
            self.best_val_loss = state["best_val_loss"]  # else not comparable, or not kept
        if not same_text:
            self.config.epochs_before = 0.0
            self.log.print("text       is not the checkpoint's: epochs are counted anew")

    def open_folder(self) -> None:
        """Begin the run's files or go on with them (the first process only). If a run is replaced,
        its last checkpoint stays as previous.pt until the new run saves for the second time. A
        best.pt whose loss is unknown, or of another text or other held-out rows, is kept as
        best-before-STEP.pt. Raises UserError if another process has written to the folder since
        this one began, unless --overwrite replaces what it wrote."""
        if self.machine.rank:
            return
        check_folder(self.settings)
        ckpt = self.folder / "ckpt.pt"
        best = self.folder / "best.pt"
        resume = self.config.init_from == "resume"
        if resume and ckpt.stat().st_mtime_ns != self.settings.checkpoint.written:
            raise UserError(f"another run has written {ckpt} since; run the command again")
        if not resume:
            for old in (best, *self.folder.glob("best-before-*.pt")):
                old.unlink(missing_ok=True)
            if ckpt.exists():
                os.replace(ckpt, self.folder / "previous.pt")
        elif self.best_val_loss == math.inf and best.exists():
            kept = self.folder / f"best-before-{self.first_step}.pt"
            os.replace(best, kept)
            self.log.print(f"best.pt    is now {kept.name}: its loss cannot be compared")
        self.log.open(self.first_step)

    def training_batches(self, step: int) -> list[Batch]:
        """This process's micro-batches of a step: --grad_accum of them."""
        made_here = self.rows_ahead is None
        batches = self.draw_batches(step) if made_here else next(self.rows_ahead)
        return [batch.to(self.machine.device) for batch in batches]

    def draw_batches(self, step: int) -> list[Batch]:
        """The same, drawn by this process. Each of the n micro-batches of all processes takes every
        n-th of the step's `batch_size` rows, so that diffusion's t is evenly spread within it."""
        n_rows = self.config.batch_size
        n_batches = self.config.grad_accum * self.machine.world
        step += self.config.steps_before
        batches = []
        for first in range(self.machine.rank, n_batches, self.machine.world):
            row_numbers = range(first, n_rows, n_batches)
            batches.append(make_batch(self.source, TRAIN, step, row_numbers, n_rows))
        return batches

    @contextlib.contextmanager
    def rows_made_ahead(self):
        """Inside the block, if the device is a GPU, other processes make the rows of the next
        steps, in order. A GPU can be faster than one process makes rows and starts kernels."""
        n_processes = row_processes(self.machine)
        if n_processes:
            loader = DataLoader(
                range(self.first_step, self.config.max_steps),
                batch_size=None,  # an item is a step
                collate_fn=self.draw_batches,
                num_workers=n_processes,
                worker_init_fn=end_with_the_run,
                multiprocessing_context="fork",  # the processes share the text
                generator=torch.Generator(),  # torch's own would be advanced
            )
            self.rows_ahead = iter(loader)
        try:
            yield
        finally:
            self.rows_ahead = None  # this ends the processes

    def validation_batch(self, number: int) -> Batch:
        """A batch of the validation rows, the same at every evaluation and in every process."""
        n_rows = self.config.eval_rows
        numbers = range(n_rows)[number * EVAL_BATCH : (number + 1) * EVAL_BATCH]
        batch = make_batch(self.val_source, VALIDATION, 0, numbers, n_rows)
        return batch.to(self.machine.device)

    def forward(self, batch: Batch) -> Metrics:
        """The objective's Metrics of one batch; total_loss computes the loss from them."""
        objective = first_member(self.settings.mixture)  # all members have the same loss
        with self.machine.autocast():
            return objective.loss(self.model, batch, self.tokens.tok, self.settings.knobs)

    def share_of_peak(self, speed: float) -> float | None:
        """The model's FLOPs, at `speed` positions per second of this process, as a share of what
        the data sheet promises; None if that is not known."""
        peak = self.machine.peak_flops()
        if peak is None:
            return None
        flops = self.model.flops_per_token(self.config.block_size, self.target_share)
        return flops * speed / peak

    def progress(self, done: int) -> str:
        """How far the run is, such as 0250/5000."""
        all_steps = str(self.config.max_steps)
        return f"{done:0{len(all_steps)}}/{all_steps}"

    def seen(self, done: int) -> tuple[int, float]:
        """Positions in the rows of `done` steps, with the padding that collate trims, and epochs of
        the training text, counted by what went into rows."""
        config = self.config
        positions = (done - self.first_step) * config.batch_size * config.block_size
        new_share = 1 - config.replay_rate if self.replay_tokens else 1.0
        epochs = positions * self.text_share * new_share / len(self.tokens.train)
        return config.positions_before + positions, config.epochs_before + epochs

    def trained_model(self) -> TrainedModel:
        """The current weights, for inference."""
        state = {"model": self.model.state_dict()}
        mixture, knobs = self.settings.mixture, self.settings.knobs
        T = self.config.block_size
        checkpoint = Checkpoint(state, self.tokens.tok, mixture, self.model.config, knobs, T)
        return TrainedModel(checkpoint, str(self.machine.device))

    def save(self, step: int, is_best: bool) -> None:
        """Write ckpt.pt and best.pt (first process only). UserError if weights are not finite."""
        if self.machine.rank:
            return
        largest = torch.stack([p.detach().abs().max() for p in self.model.parameters()]).max()
        require_finite(largest.item(), "largest weight", step)
        positions, epochs = self.seen(step)
        before = dict(positions_before=positions, epochs_before=epochs)  # for a resumed run
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": step,
            "elapsed_s": time.perf_counter() - self.began,
            "best_val_loss": self.best_val_loss,
            "tokenizer": self.tokens.tok.to_json(),
            "model_config": dataclasses.asdict(self.model.config),
            "knobs": dataclasses.asdict(self.settings.knobs),
            "train_config": dataclasses.asdict(self.config) | before,
            "data_config": dataclasses.asdict(self.settings.data),
            "data_digest": self.tokens.digest,
            "replay_digest": self.replay_tokens.digest if self.replay_tokens else "",
        }
        save_checkpoint(self.folder / "ckpt.pt", state, is_best)


# ---- rows that other processes make --------------------------------------------------------------


def row_processes(machine: Machine) -> int:
    """How many other processes make rows: none without a GPU or without fork (Windows)."""
    if machine.device.type != "cuda" or "fork" not in multiprocessing.get_all_start_methods():
        return 0
    n_runs = int(os.environ.get("LOCAL_WORLD_SIZE", machine.world))  # torchrun's, on this machine
    n_cores = len(os.sched_getaffinity(0)) // n_runs
    return min(max(n_cores // 2, 1), MOST_ROW_PROCESSES)


def end_with_the_run(number: int) -> None:
    """For a process that makes rows. It ignores Ctrl-C, which reaches all processes of a terminal:
    the run ends it. If the run itself was killed, it ends within a second (DataLoader's own check
    left most of them alive)."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    parent = os.getppid()

    def watch():
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ---- text and model ------------------------------------------------------------------------------


def load_corpora(settings: Settings, log: Log) -> tuple[Tokens, Tokens | None]:
    """The corpus, and the one to replay if there is one. Raises UserError."""
    config = settings.train
    tok = settings.checkpoint.tok if settings.checkpoint else None
    saved = settings.checkpoint.state if settings.checkpoint else {}
    # If the checkpoint, not the user, names a text, that text must not have changed.
    expected = None if "data" in settings.given else saved.get("data_digest")
    tokens = load_tokens(settings.data, tok, log.print, expected)
    if not config.replay_data:
        return tokens, None
    data = dataclasses.replace(settings.data, data=config.replay_data)
    expected = None if "replay_data" in settings.given else saved.get("replay_digest")
    try:
        replay = load_tokens(data, tokens.tok, log.print, expected)
        text = Text(replay.train, replay.tok.EOT)
        check_text(settings.mixture, text, config.block_size, settings.knobs)
    except UserError as e:
        line = str(e).replace("--data", "--replay_data")
        if not line.startswith("--replay_data"):
            line = f"--replay_data: {line}"
        raise UserError(line) from None
    return tokens, replay


def sources(settings: Settings, tokens: Tokens, replay: Tokens | None) -> tuple[Source, Source]:
    """The Sources of training and of validation rows. UserError if there is too little text."""
    config, mixture, knobs = settings.train, settings.mixture, settings.knobs
    tok = tokens.tok
    text = Text(tokens.train, tok.EOT)
    val_text = Text(tokens.val, tok.EOT)
    replay_text = Text(replay.train, tok.EOT) if replay else None
    check_text(mixture, text, config.block_size, knobs)
    check_text(mixture, val_text, config.block_size, knobs, held_out=True)
    validation = Source(mixture, val_text, tok, config.block_size, knobs, seed=0)
    before = config.steps_before  # step numbers continue an earlier run's
    train = validation._replace(
        text=text,
        seed=config.seed,
        replay_text=replay_text,
        replay_rate=config.replay_rate,
        warmup=(before, before + knobs.mask_warmup * config.max_steps),
    )
    return train, validation


def shares_of_positions(source: Source) -> tuple[float, float, float]:
    """Three shares, estimated from SAMPLE_ROWS training rows: the shares of targets and of padding
    among the positions that trim_padding leaves, and of corpus tokens among all T positions."""
    source = source._replace(warmup=(0, 0))  # diffusion's first rows are not typical
    rows = [draw_row(source, TRAIN, 0, i, SAMPLE_ROWS)[0] for i in range(SAMPLE_ROWS)]
    sample = collate(rows, source.tok.n_bytes)
    targets = len(sample.targets) / sample.inputs.numel()
    padding = (sample.segment == 0).float().mean().item()
    # No more than what was read: contrastive reads only two crops of its text.
    n_text = sum(min(len(row.raw), int((row.segment > 0).sum())) for row in rows)
    return targets, padding, n_text / (SAMPLE_ROWS * source.T)


def make_model(model_config: ModelConfig, settings: Settings, log: Log) -> Transformer:
    """A fresh model, or one with a checkpoint's weights; its heads are those of this objective."""
    config = settings.train
    with torch.random.fork_rng(devices=[]):  # weights are drawn on the CPU
        torch.manual_seed(config.seed)
        model = Transformer(model_config)
    if settings.checkpoint is not None:
        state = settings.checkpoint.state
        if config.init_from == "resume":
            before = state["train_config"].get("max_steps", config.max_steps)
            line = f"resumes    after step {state['step']}"
            if before != config.max_steps:
                line += f" of {before}, now with schedules for {config.max_steps} steps"
            log.print(line)
        else:
            objective = state["train_config"]["objective"]
            log.print(f"weights    from {config.init_from} ({objective}, {state['step']} steps)")
            trained = model.config.tied or first_member(settings.checkpoint.mixture).unembeds
            if first_member(settings.mixture).unembeds and not trained:
                log.print(f"weights    lm_head was not trained by {objective}")
        for change, heads in fit_weights(model, settings.checkpoint).items():
            if heads:
                log.print(f"weights    {change}: {', '.join(heads)}")
    return model


def freeze_trunk(model: Transformer, objective: str) -> None:
    """Freeze all parameters except the heads'. Raises UserError if there are no heads."""
    for name, p in model.named_parameters():
        p.requires_grad_(name.split(".")[0] not in TRUNK)
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"--freeze_trunk: {objective} adds no head to train; leave it out")


def fit_weights(model: Transformer, checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Load the weights that fit; only heads and second_text can be missing or left over. Returns
    the names of the modules that are new here, and of those left behind."""
    saved = checkpoint.state["model"]
    here = model.state_dict()
    # Chained and parallel heads have the same weight names, but different inputs.
    same_heads = checkpoint.model_config.mtp_heads == model.config.mtp_heads
    usable = {k: v for k, v in saved.items() if same_heads or not k.startswith("future.")}
    fits = {k: v for k, v in usable.items() if k in here and v.shape == here[k].shape}
    model.load_state_dict(fits, strict=False)
    return {
        "new here": modules_of(here.keys() - fits.keys()),
        "left behind": modules_of(saved.keys() - fits.keys()),
    }


def modules_of(weights) -> list[str]:
    """The modules that weights belong to; each drafting head is listed separately.

    >>> modules_of({"future.0.join.weight", "future.1.join.weight", "pair_head.out.bias"})
    ['future.0', 'future.1', 'pair_head']
    """
    return sorted({re.match(r"future\.\d+|[^.]+", name)[0] for name in weights})


def describe(run: Run, padding_share: float) -> None:
    """Print the lines that a run begins with."""
    config, machine, shape = run.config, run.machine, run.model.config
    dtype = str(machine.dtype).removeprefix("torch.")
    compiled = "compiled in the first steps" if machine.compile else "not compiled"
    run.log.print(f"device     {machine}; {dtype} matrix products; {compiled}")

    n = sum(p.numel() for p in run.model.parameters())
    run.log.print(
        f"model      {n / 1e6:.2f}M parameters: layers {shape.n_layer}, width {shape.n_embd}, "
        f"heads {shape.n_head}, ids {shape.vocab_size} (preset {config.preset})"
    )
    n_documents = len(run.source.text.sizes)
    data = f"data       {run.tokens.about}; documents to train on: {n_documents:,}"
    if config.replay_data:
        data += f"; {config.replay_rate:.0%} of the rows from {config.replay_data}"
    if len(run.tokens.val) <= config.block_size:
        data += "; fewer tokens are held out than a row has: val loss says little"
    run.log.print(data)
    what = "whole rows are compared, no positions are predicted"
    if run.target_share:
        what = f"{run.target_share:.1%} of the positions are predicted"
    shares = run.settings.mixture
    members = ", ".join(f"{name} ({share:.0%} of the rows)" for name, share in shares.items())
    name = members if len(shares) > 1 else config.objective
    run.log.print(f"objective  {name}: {what}, {padding_share:.1%} are padding")
    run.log.print(
        f"run        {config.max_steps} steps of {config.batch_size} rows of "
        f"{config.block_size} positions, into {config.out_dir}"
    )


# ---- what would stop a run later -----------------------------------------------------------------


def check_batches(settings: Settings, machine: Machine) -> None:
    """Raise UserError if the rows of a step do not divide evenly among its micro-batches, or if a
    batch has too few rows to compare."""
    config = settings.train
    n_batches = config.grad_accum * machine.world
    if config.batch_size % n_batches:
        factor = f"--grad_accum={config.grad_accum} times the number of processes ({machine.world})"
        raise UserError(f"--batch_size={config.batch_size}: must be a multiple of {factor}")
    fewest = max(OBJECTIVES[name].fewest_rows for name in settings.mixture)
    needs = f"--objective={config.objective} needs {fewest} rows or more to compare"
    if config.batch_size < fewest * n_batches:
        remedy = f"raise --batch_size={config.batch_size}"
        if config.grad_accum > 1:
            remedy += f" or lower --grad_accum={config.grad_accum}"
        raise UserError(f"{needs} in each micro-batch: {remedy}")
    if config.eval_rows < fewest:
        raise UserError(f"{needs}: raise --eval_rows={config.eval_rows}")


def check_folder(settings: Settings) -> None:
    """Raise UserError if another run would be lost, or if this one is done already. Also if its
    folder cannot be written to, or if this or the cache's is a file or the folder of the text."""
    config = settings.train
    folder = Path(config.out_dir)
    names = [name for name in (settings.data.data, config.replay_data) if name]
    texts = [Path(name) for name in names if not (count_stories(name) or name == "python")]
    for name, other in (("out_dir", folder), ("cache_dir", Path(settings.data.cache_dir))):
        if other.exists() and not other.is_dir():
            raise UserError(f"--{name}={other} is a file; name a folder")
        # Once a folder holds a run or a cache, it is not read as text again.
        if other.is_dir() and any(text.is_dir() and other.samefile(text) for text in texts):
            raise UserError(f"--{name}={other} is the folder of the text; name another")
    existing = next(filter(os.path.lexists, (folder, *folder.parents)), folder)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        what = "cannot be written to" if existing.is_dir() else "is no folder"
        raise UserError(f"--out_dir={folder}: {existing} {what}; name another")
    if config.init_from == "resume":
        done = settings.checkpoint.state["step"]
        if done >= config.max_steps:
            remedy = "give a larger --max_steps"
            if count_stories(settings.data.data):
                flag = shlex.quote(f"--out_dir={folder}")
                remedy += f", or count its right answers: python skills.py {flag}"
            raise UserError(f"this run has already taken {done} steps; {remedy}")
        return
    for name in ("ckpt.pt", "best.pt", "previous.pt", "best-before-*.pt"):
        kept = next(folder.glob(name), None)
        if not config.overwrite and kept:
            remedy = (
                "continue it (--init_from=resume), replace it (--overwrite) or keep it (another"
            )
            raise UserError(
                f"{config.out_dir} already holds a run ({kept.name}): {remedy} --out_dir)"
            )


def check_memory(shape: ModelConfig, config: TrainConfig, machine: Machine) -> None:
    """Raise UserError if a step on the CPU would need more memory than is free: the system would
    kill the process without a message."""
    if machine.device.type != "cpu":
        return
    rows = config.batch_size // config.grad_accum  # of all processes: they share the memory
    blocks = shape.n_layer + shape.n_future - 1  # linear heads take less
    need = ACTIVATION_BYTES * rows * config.block_size * blocks * shape.n_embd
    with torch.device("meta"):  # takes no memory
        n_weights = sum(p.numel() for p in Transformer(shape).parameters())
    # In each process, in float32: each with its gradient and at most two moments.
    need += 16 * n_weights * machine.world
    free = free_memory()
    if need > free:
        lack = f"a step needs about {need / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free"
        remedy = (
            "lower --batch_size or --block_size, raise --grad_accum, or take a smaller --preset"
        )
        raise UserError(f"{lack}; {remedy}")


def require_finite(value: float, what: str, step: int) -> None:
    if not math.isfinite(value):
        remedy = "what was saved before is intact. Lower --lr, or --lr_embed"
        raise UserError(f"the {what} became {value} by step {step}; {remedy}")
