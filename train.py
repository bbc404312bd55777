"""train.py: train a model on a text, evaluate it on held-out text, keep a log and checkpoints.

No code here depends on an objective's name: the table in objectives.py gives rows and a loss.
run.py builds what a run consists of. Training uses one device, or several under torchrun (tested
with two processes on a CPU, not with several GPUs).

    python train.py --objective=fim
    python train.py --objective=fim --init_from=resume --max_steps=3000
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

import threads  # isort: skip  # noqa: F401  (before torch)

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from config import UserError, lock_folder, run_command
from data import Batch
from device import Machine, sum_of_all
from log import Meter, duration, metrics_text, short, stop_signals
from objectives import OBJECTIVES, total_loss
from optimizers import all_groups, learning_rate_scale
from run import EVAL_BATCH, Run, check_folder, require_finite
from sample import set_for_asking
from settings import settle
from showcase import one_line_sample, showcase
from skills import measure, report


def main(argv: list[str]) -> None:
    settings = settle(argv, __doc__)  # flags override a checkpoint's values
    config = settings.train
    check_folder(settings)
    machine = Machine(config.device, config.dtype, config.compile, config.max_steps)
    machine.join_processes()
    run = Run(settings, machine)

    # Only the first process writes files.
    with contextlib.nullcontext() if machine.rank else lock_folder(config.out_dir):
        with stop_signals(run.signals):  # the first signal lets the step finish
            run.open_folder()
            done = train(run)
        if done == config.max_steps and not run.signals and machine.rank == 0:
            finish(run)
    code = 0
    if done < config.max_steps:
        program = "python"
        if machine.world > 1:
            program = f"torchrun --standalone --nproc_per_node={machine.world}"
        command = f"{program} train.py --init_from=resume --out_dir={shlex.quote(config.out_dir)}"
        if "cache_dir" in settings.given:
            command += f" --cache_dir={shlex.quote(settings.data.cache_dir)}"
        run.log.print(f"stopped after step {done}, saved. To resume: {command}")
        # A process that got no signal stops because another one did.
        code = 128 + (run.signals[0] if run.signals else signal.SIGTERM)
    elif run.signals:  # they arrived during the last step
        run.log.print("stopped after the last step: the run is complete, its report is left out")
        code = 128 + run.signals[0]
    machine.leave_processes(code)
    if code:
        sys.exit(code)


def train(run: Run) -> int:
    """Take the steps and do what follows each -> how many are done (not all, after a signal)."""
    with run.rows_made_ahead():
        for step in range(run.first_step, run.config.max_steps):
            take_step(run, step)
            if after_step(run, step + 1):
                break
    return step + 1


def take_step(run: Run, step: int) -> None:
    """One optimizer step. The batch's metrics are added to run.meter."""
    for group in all_groups(run.optimizers):
        group["lr"] = group["peak_lr"] * learning_rate_scale(step, run.config)
    compute_gradients_with_fallback(run, step)
    if run.config.grad_clip:
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), run.config.grad_clip)
    for optimizer in run.optimizers:
        optimizer.step()
    run.model.zero_grad()


def compute_gradients_with_fallback(run: Run, step: int) -> None:
    """Call compute_gradients; if torch.compile fails at the first step, retry without it."""
    batches = run.training_batches(step)
    try:
        compute_gradients(run, batches)
    except torch._dynamo.exc.TorchDynamoException as error:
        # With --compile=True, compiling must work; where it is automatic, it may fail.
        if run.config.compile or step > run.first_step:
            reason = str(error).splitlines()[0]
            raise UserError(f"torch.compile failed ({reason}); add --compile=False") from error
        run.log.print("compile    failed, continuing without it (--compile=True says why)")
        run.machine.compile = False
        run.model.flex = False  # uncompiled FlexAttention holds all scores in memory
        torch.compiler.set_stance("force_eager")
        run.meter = Meter()
        run.model.zero_grad()
        compute_gradients(run, batches)


def compute_gradients(run: Run, batches: list[Batch]) -> None:
    """Forward and backward. The gradients do not depend on how many micro-batches and processes
    share the step. (Except for contrastive, whose negatives are the rows of one micro-batch.)"""
    world = run.machine.world  # number of processes
    mean_weight = sum(batch.total_weight for batch in batches) / len(batches)  # of this process
    mean_weight = sum_of_all(mean_weight / world)  # of all processes
    for batch in batches:
        run.meter.positions += batch.inputs.numel()
        # All divide by the same mean weight, so a target counts equally in every micro-batch.
        metrics = run.forward(dataclasses.replace(batch, total_weight=mean_weight))
        loss = total_loss(metrics) / len(batches)
        loss.backward()
        run.meter.add(metrics)
    if world > 1:
        gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
        total = sum_of_all(parameters_to_vector(gradients))  # in one go
        vector_to_parameters(total / world, gradients)


# ---- what follows a step -----------------------------------------------------------------------


def after_step(run: Run, done: int) -> bool:
    """Log, evaluate and save as often as the flags say. `done`: the number of steps taken so far.
    Returns whether a signal stops the run here."""
    config = run.config
    last = done == config.max_steps
    logging = last or done % config.log_every == 0
    saving = last or done % config.save_every == 0
    evaluating = last or done % config.eval_every == 0
    # The first two steps compile, later ones only for new shapes.
    compiling = run.machine.compile and done <= run.first_step + 2
    just_compiled = compiling and done == run.first_step + 2
    run.meter.steps += 1

    # To read the loss, Python must wait until the GPU has finished the step. All processes read it
    # after the same steps: if one of them stopped alone, the others would wait for it.
    on_cpu = run.machine.device.type == "cpu"
    asked_to_stop = run.machine.world == 1 and run.signals
    if not (on_cpu or asked_to_stop or logging or saving or evaluating or just_compiled):
        return False
    require_finite(run.meter.means()["loss"], "loss", done)
    n_signals = torch.tensor(len(run.signals), device=run.machine.device)
    stopped = not last and sum_of_all(n_signals).item() > 0  # a signal to any process
    if logging or stopped:
        log_step(run, done, compiling)
    if just_compiled and not (last or stopped):
        run.log.print(f"compiled   in {duration(time.perf_counter() - run.meter.began)}")
        run.meter = Meter()

    pause_began = time.perf_counter()
    improved = evaluating and log_evaluation(run, done, evaluate(run))
    if stopped or saving or improved:
        run.save(done, is_best=improved)
    if evaluating and not (last or stopped) and run.machine.rank == 0:  # finish() shows more
        run.log.print(f"sample, ⟪by the model⟫: {one_line_sample(run.trained_model(), run.tokens)}")
        gc.collect()  # a decoder is in a reference cycle, and would stay on the GPU for a while
    run.meter.began += time.perf_counter() - pause_began  # step times leave the pause out
    return stopped


def log_step(run: Run, done: int, compiling: bool) -> None:
    """Log the steps since the last line; without their time if it includes compiling."""
    config = run.config
    lr = config.lr * learning_rate_scale(done - 1, config)
    means = run.meter.means()
    means.pop("bits_per_byte", None)
    values = dict(step=done, loss=means.pop("loss"), lr=lr)
    line = f"step {run.progress(done)} | loss {values['loss']:.4f} | lr {lr:.1e}"
    began = run.meter.began
    if not compiling:
        elapsed = time.perf_counter() - began
        seconds = elapsed / run.meter.steps  # per step
        rate = run.meter.positions * run.machine.world / elapsed  # positions/s, all processes
        values |= dict(ms=seconds * 1e3, tokens_per_s=rate)
        line += f" | {seconds * 1e3:.1f} ms | {short(rate)} tok/s"
        mfu = run.share_of_peak(rate / run.machine.world)
        if mfu is not None:
            values["mfu"] = mfu
            line += f" | mfu {mfu:.1%}"
        if not run.signals:  # else the run stops here
            line += f" | eta {duration(seconds * (config.max_steps - done))}"
    run.log.write(**values, **means)
    run.log.print(line + metrics_text(means))
    run.meter = Meter()
    if compiling:  # after_step then says how long all of it took
        run.meter.began = began


@torch.no_grad()
def evaluate(run: Run) -> dict[str, float]:
    """The loss and the objective's metrics: means over the validation rows. Every process evaluates
    all rows, so that the number of processes changes nothing."""
    meter = Meter()
    # On a CPU, compiling the forward pass alone would take longer than running it.
    eager = run.machine.device.type == "cpu" or not run.machine.compile
    run.model.eval()
    with torch.compiler.set_stance("force_eager" if eager else "default"):
        for number in range(math.ceil(run.config.eval_rows / EVAL_BATCH)):
            meter.add(run.forward(run.validation_batch(number)))
    run.model.train()
    return meter.means()


def log_evaluation(run: Run, done: int, means: dict[str, float]) -> bool:
    """Log an evaluation and keep its loss -> whether it is the best so far."""
    loss = means.pop("loss")
    require_finite(loss, "validation loss", done)
    likelihoods = {OBJECTIVES[name].likelihood for name in run.settings.mixture}
    bits = means.pop("bits_per_byte", None)
    values = dict(step=done, val_loss=loss)
    line = f"eval {run.progress(done)} | val loss {loss:.4f} nats"
    if bits is not None and all(likelihoods):
        values["bits_per_byte"] = bits
        line += f", {bits:.3f} bits per byte"
        if run.tokens.floor and likelihoods == {"text"}:
            # `floor` is the entropy of whole stories. On rows, even a perfect model would be about
            # a tenth above it: rows cut off the ends of stories, and ends are easiest to predict.
            values["floor_bits_per_byte"] = run.tokens.floor / math.log(2)
            line += f" (entropy of the language: {values['floor_bits_per_byte']:.3f})"

    positions, epochs = run.seen(done)
    elapsed = time.perf_counter() - run.began
    run.log.write(**values, **means, tokens=positions, epochs=epochs, elapsed_s=elapsed)
    line += metrics_text(means)
    line += f" | {short(positions)} tokens, {epochs:.1f} epochs, {duration(elapsed)}"
    run.val_loss = loss
    improved = loss < run.best_val_loss
    if improved:
        run.best_val_loss = loss
    else:
        line += f" | best.pt has {run.best_val_loss:.4f}"
    run.log.print(line)
    return improved


def finish(run: Run) -> None:
    """Show what the model writes, then count its right answers, for the screen and the log."""
    trained = run.trained_model()
    run.log.print()
    showcase(trained, run.folder, run.tokens, run.log.print)
    if run.best_val_loss < 0.95 * run.val_loss:
        flag = shlex.quote(f"--out_dir={run.folder / 'best.pt'}")
        run.log.print(
            f"Better: {flag}, whose validation loss is {run.best_val_loss:.4f}. The run may have "
            "memorized its text: try fewer --max_steps"
        )
    if run.tokens.floor is None:  # right answers are known for stories only
        return
    run.log.print("Counting right answers ...")
    with set_for_asking(trained):
        skills = measure(trained)
    for line in ["", *report(skills)]:
        run.log.print(line)
    run.log.write(skills={name: skill._asdict() for name, skill in skills.items()})


if __name__ == "__main__":
    run_command(
        main,
        lower="--batch_size or --block_size, raise --grad_accum, or take a smaller --preset",
    )
