"""train.py: the loop: steps, evaluation, log.

No code here depends on an objective's name: the table in objectives.py gives rows and a loss.
What a run is made of is run.py's concern. One device, or several under torchrun.

    python train.py --objective=fim
    python train.py --objective=fim --init_from=resume --max_steps=2000
    torchrun --standalone --nproc_per_node=2 train.py --objective=clm
"""

import contextlib
import dataclasses
import gc
import math
import shlex
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from config import UserError, keep_under, lock_folder, run_command
from data import Batch
from device import Machine
from log import Meter, duration, figures, short
from objectives import total_loss
from optimizers import all_groups, learning_rate_scale
from run import EVAL_BATCH, Run, check_batches, check_folder, make_way, require_finite
from sample import few_threads
from settings import settle
from showcase import glimpse, showcase
from skills import measure, report


def train(run: Run) -> None:
    """The steps, with what follows each."""
    run.log.open(run.first_step)
    for step in range(run.first_step, run.config.max_steps):
        take_step(run, step)
        after_step(run, step + 1)
        if run.stopped:
            break


def take_step(run: Run, step: int) -> None:
    """New weights; run.meter has the figures."""
    for group in all_groups(run.optimizers):
        group["lr"] = group["peak_lr"] * learning_rate_scale(step, run.config)
    gradients_or_uncompiled(run, step)
    if run.config.grad_clip:
        torch.nn.utils.clip_grad_norm_(run.params, run.config.grad_clip)
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad()


def gradients_or_uncompiled(run: Run, step: int) -> None:
    """compute_gradients; where torch.compile fails at the first step, again without it."""
    try:
        compute_gradients(run, run.training_batches(step))
    except torch._dynamo.exc.TorchDynamoException as error:
        # --compile=True must work; what was compiled automatically may fail.
        if run.config.compile or step > run.first_step:
            reason = str(error).splitlines()[0]
            raise UserError(f"torch.compile failed ({reason}); add --compile=False") from error
        stop_compiling(run)
        compute_gradients(run, run.training_batches(step))


def compute_gradients(run: Run, batches: list[Batch]) -> None:
    """Forward and backward: the same gradients, however many micro-batches and processes make the
    step. (Not contrastive: its negatives are the rows of one micro-batch.)"""
    machine = run.machine
    weight = sum(batch.total_weight for batch in batches) / len(batches) / machine.world
    if machine.world > 1:
        dist.all_reduce(weight)

    for batch in batches:
        run.n_read += batch.inputs.numel()
        # All divide by the same mean weight: a target counts alike in every micro-batch.
        metrics = run.metrics(dataclasses.replace(batch, total_weight=weight))
        loss = total_loss(metrics) / len(batches)
        loss.backward()
        run.meter.add(metrics)
    if machine.world > 1:
        for p in run.params:
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= machine.world


def stop_compiling(run: Run) -> None:
    """From now on compiled functions run as they are written. The first step begins again."""
    run.log.print("compile    failed, goes on without it (--compile=True says why)")
    run.machine.compile = False
    run.model.flex = False  # not compiled, FlexAttention holds all scores in memory
    torch.compiler.set_stance("force_eager")
    run.start_interval()
    for optimizer in run.optimizers:
        optimizer.zero_grad()


@torch.no_grad()
def evaluate(run: Run) -> dict[str, float]:
    """Means over the validation rows, which do not depend on batches or processes: val_loss, and
    the figures of the objective."""
    meter = Meter()
    machine = run.machine
    n_batches = math.ceil(run.config.eval_rows / EVAL_BATCH)
    # On a CPU, compiling the forward pass alone would take longer than running it.
    eager = machine.device.type == "cpu" or not machine.compile
    run.model.eval()
    with torch.compiler.set_stance("force_eager" if eager else "default"):
        for first in range(0, n_batches, machine.world):
            mine = first + machine.rank
            batch = run.validation_batch(min(mine, n_batches - 1))
            # A process with no rows left counts the last ones with weight 0: means() adds up the
            # same figures in all of them.
            meter.add(run.metrics(batch), counted=float(mine < n_batches))
    run.model.train()
    means = meter.means()
    loss = meter.loss(means)
    if not all(run.likelihoods):
        means.pop("bits_per_byte", None)
    return {"val_loss": loss, **means}


def stop_agreed(run: Run) -> bool:
    """Whether any process was asked to stop: all of them hear of it at the same place."""
    asked = torch.tensor(float(run.stop.asked), device=run.machine.device)
    if run.machine.world > 1:
        dist.all_reduce(asked)
    return asked.item() > 0


# ---- what follows a step -----------------------------------------------------------------------


def after_step(run: Run, done: int) -> None:
    """Log, evaluate, save and stop as often as asked."""
    config = run.config
    last = done == config.max_steps
    run.n_steps += 1
    logging = done % config.log_every == 0 or last
    # Looking at a number costs nothing on a CPU; on a GPU it would wait for the step to end.
    looking = run.machine.device.type == "cpu" or logging
    if looking:  # at the loss of all processes: where one would stop alone, the others would wait
        require_finite(run.meter.loss(run.meter.means()), "loss", done)
    if logging:
        log_step(run, done)

    paused = time.perf_counter()
    run.stopped = looking and not last and stop_agreed(run)
    evaluating = last or (done % config.eval_every == 0 and not run.stopped)
    improved = False
    if evaluating:
        improved = log_evaluation(run, done, evaluate(run))
    if run.stopped or last or improved or done % config.save_every == 0:
        run.save(done)
    if improved and run.machine.rank == 0:
        keep_under(run.folder / "ckpt.pt", run.folder / "best.pt")
    if evaluating and not last and run.machine.rank == 0:  # the end shows more
        run.log.print(f"     {glimpse(run.reader(), run.tokens)}")
        gc.collect()  # a decoder refers to itself, and would stay on the GPU for a while
    run.clock += time.perf_counter() - paused  # a step's time is its own
    if run.stopped:
        run.log.print(
            f"stopped after step {done}, saved. Go on: python train.py --init_from=resume "
            f"--out_dir={shlex.quote(config.out_dir)}"
        )


def log_step(run: Run, done: int) -> None:
    config = run.config
    lr = config.lr * learning_rate_scale(done - 1, config)
    seconds = (time.perf_counter() - run.clock) / run.n_steps
    rate = run.n_read * run.machine.world / (run.n_steps * seconds)
    means = run.meter.means()
    loss = run.meter.loss(means)
    means.pop("bits_per_byte", None)
    line = (
        f"step {done:0{run.width}}/{config.max_steps} | loss {loss:.4f} | "
        f"lr {lr:.1e} | {seconds * 1e3:.1f} ms | {short(rate)} tok/s"
    )
    values = dict(step=done, loss=loss, lr=lr, ms=seconds * 1e3, tokens_per_s=rate)
    if peak := run.machine.peak_flops():
        flops = run.model.flops_per_token(config.block_size, run.target_share)
        values["mfu"] = flops * rate / run.machine.world / peak
        line += f" | mfu {values['mfu']:.1%}"
    line += f" | eta {duration(seconds * (config.max_steps - done))}"
    run.log.write(**values, **means)
    run.log.print(line + figures(means))
    run.start_interval()


def log_evaluation(run: Run, done: int, means: dict[str, float]) -> bool:
    """Log an evaluation -> whether its validation loss is the best so far."""
    config = run.config
    loss = means["val_loss"]
    require_finite(loss, "validation loss", done)
    seen = done * config.batch_size * config.block_size
    new_share = 1 - config.replay_rate if run.old else 1.0
    epochs = seen * run.text_share * new_share / len(run.tokens.train)
    values = dict(step=done, **means, tokens=seen, epochs=epochs, elapsed_s=run.elapsed())
    line = f"eval {done:0{run.width}}/{config.max_steps} | val loss {loss:.4f} nats"
    if "bits_per_byte" in means:
        line += f", {means['bits_per_byte']:.3f} bits per byte"
        if run.tokens.floor and run.likelihoods == {"text"}:
            # Rows break stories off before their ends, the most certain part: in rows a perfect
            # model would stand about a tenth higher.
            values["floor_bits_per_byte"] = run.tokens.floor / math.log(2)
            line += f" (the language itself, whole stories: {values['floor_bits_per_byte']:.3f})"
    run.log.write(**values)
    line += figures({k: v for k, v in means.items() if k != "val_loss"})
    line += f" | {short(seen)} tokens, {epochs:.1f} epochs, {duration(run.elapsed())}"
    improved = loss < run.best_val_loss
    if improved:
        run.best_val_loss = loss
    else:
        line += f" | best.pt has {run.best_val_loss:.4f}"
    run.log.print(line)
    return improved


def finish(run: Run) -> None:
    """Show a read-out, and count what the model can do, for the screen and the log."""
    if run.machine.rank:
        return
    reader = run.reader()
    run.log.print()
    showcase(reader, run.folder, run.tokens, run.log.print)
    if run.tokens.floor is None:  # only stories know what is right
        return
    with few_threads(reader):
        skills = measure(reader)
    for line in ["", *report(skills)]:
        run.log.print(line)
    run.log.write(skills={name: skill._asdict() for name, skill in skills.items()})


def main(argv: list[str]) -> None:
    settings = settle(argv, __doc__)
    config = settings.train
    check_folder(settings)
    machine = Machine(config.device, config.dtype, config.compile, config.max_steps)
    check_batches(settings, machine)
    if machine.compile and machine.device.type != "cuda":
        # Compiled, threads would add up the embedding's gradient in a different order each time.
        torch.use_deterministic_algorithms(True, warn_only=True)
    if machine.world > 1:
        on_cuda = machine.device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            timeout=timedelta(days=1),  # the first process's report takes time
            device_id=machine.device if on_cuda else None,
        )
    run = Run(settings, machine)
    first = machine.rank == 0  # the only process that writes files
    lock = lock_folder(config.out_dir) if first else contextlib.nullcontext()
    with run.stop, lock:  # from here on a signal finishes the step; before, it ends the program
        if first and config.init_from != "resume":
            make_way(run.folder)
        train(run)
    stopped = run.stopped or run.stop.asked
    if not stopped:
        finish(run)
    if machine.world > 1:
        dist.barrier()  # the first process still reports: the others wait for it
        dist.destroy_process_group()
    if stopped:  # perhaps by a signal to another process
        sys.exit(128 + (run.stop.asked or signal.SIGTERM))


if __name__ == "__main__":
    run_command(main, "--batch_size or --block_size, raise --grad_accum, or a smaller --preset")
