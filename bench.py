"""bench.py: how fast each part runs: corruption, decoding, training.

Every figure comes from the functions that train.py and sample.py run. Nothing is kept on disk.

    python bench.py
    python bench.py --only=corruption --objective=fim,span --seconds=0.5
    python bench.py --only=decoding --out_dir=out/mtp
    python bench.py --only=training --objective=clm,mtp --preset=gpt2
"""

import contextlib
import gc
import io
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import threads  # isort: skip  # noqa: F401  (before torch)

import numpy as np
import torch

import train
from checkpoint import open_checkpoint
from config import UserError, build, comma_list, flag, parse_flags, run_command
from corpus import DataConfig, load_tokens
from data import Text
from device import Machine, find_device
from generate import LookUp, Sampler, heads_of
from mixture import TRAIN, Source, check_knobs, check_text, make_batch
from objectives import OBJECTIVES, Knobs
from run import Run
from sample import TrainedModel, set_for_asking
from settings import PRESETS, carried_over, settle
from tokenizer import get_tokenizer
from yardsticks import decode_in_turns

ROWS = 64  # of a batch that is corrupted
WARM = 2  # first windows of training steps, which do not count


@dataclass
class BenchConfig:
    """what is measured, and for how long"""

    only: str = flag("corruption,decoding,training", "comma list of sections")
    objective: str = flag(",".join(OBJECTIVES), "objectives to corrupt and train with")
    preset: str = flag("micro", "size of the models that are trained", tuple(PRESETS))
    grad_accum: int = flag(1, "micro-batches per training step", min=1)
    data: str | None = flag(
        None,
        "text or .jsonl file, folder, stories or python; automatic: stories, or the run's text",
    )
    tokenizer: str | None = flag(
        None, "for training: bytes, bpe:N or a tiktoken name; automatic: by text size"
    )
    out_dir: str = flag("", "run to decode with; empty: nothing is decoded")
    block_size: int = flag(1024, "T, positions in a corrupted row", min=8, max=1 << 20)
    seconds: float = flag(1.0, "length of one measurement, in seconds", above=0)
    device: str | None = flag(None, "cpu, cuda, cuda:N or mps; automatic: the fastest available")


def show(name: str, value: float, unit: str) -> None:
    number = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    print(f"{name:<44}{number:>10} {unit}")


# ---- text to rows ------------------------------------------------------------------------------


def measure_corruption(config: BenchConfig, names: list[str], cache: str) -> None:
    """From memory-mapped bytes to batches, by the CPU time of the one thread that makes them."""
    T = config.block_size
    tok = get_tokenizer("bytes")
    tokens = load_tokens(DataConfig(config.data or "stories", cache_dir=cache), tok)
    text = Text(tokens.train, tok.EOT)
    for name in names:
        check_knobs({name: 1.0}, Knobs(), {}, T)
        check_text({name: 1.0}, text, T, Knobs())
        source = Source({name: 1.0}, text, tok, T, Knobs(), seed=1)
        times = []
        while sum(times) < config.seconds or len(times) < 4:
            began = time.thread_time()
            make_batch(source, TRAIN, len(times), range(ROWS), ROWS)
            times.append(time.thread_time() - began)
        typical = statistics.median(times[1:])  # the first one warms up
        show(name, ROWS * T / 1e6 / typical, "M tokens/s")


# ---- decoding ----------------------------------------------------------------------------------

DRAFTERS = {  # way of decoding -> its drafters
    "plain": lambda decoder: [],
    "look_up": lambda decoder: [LookUp()],
    "heads": lambda decoder: [heads_of(decoder)],
    "both": lambda decoder: [heads_of(decoder), LookUp()],
}


def measure_decoding(config: BenchConfig, names: list[str], cache: str) -> None:
    """Write T/2 tokens after T/2 tokens of held-out text: one sample, plain and with drafts; then
    64 samples at once, plain."""
    if not config.out_dir:  # an untrained model repeats itself: its drafts would all be right
        print("skipped: give --out_dir, the run to decode with")
        return
    checkpoint = open_checkpoint(config.out_dir)
    trained = TrainedModel(checkpoint, config.device)
    if "continue" not in trained.tasks:
        able = ", ".join(name for name in OBJECTIVES if "continue" in OBJECTIVES[name].tasks)
        raise UserError(f"--out_dir={config.out_dir}: decoding is measured with {able} only")
    n = trained.block_size // 2
    own = build(DataConfig, carried_over(checkpoint, resume=False))
    data = DataConfig(config.data) if config.data else own
    expected = None if config.data else checkpoint.state["data_digest"]
    val = load_tokens(replace(data, cache_dir=cache), trained.tok, expected=expected).val
    ways = list(DRAFTERS) if trained.model.future else ["plain", "look_up"]
    for temperature, batch in itertools.product((0.0, 0.8), (1, 64)):
        asked = {way: DRAFTERS[way] for way in ways if batch == 1 or way == "plain"}
        decoder = trained.decoder(Sampler(temperature), batch)
        with set_for_asking(trained):
            # Warm up: on CUDA, each shape needs some passes before its graph is captured.
            decode_in_turns(decoder, [val[:n].tolist()] * 2, n, asked)
            prompts = prompts_for(4 * config.seconds * len(asked), val, n)
            sums = decode_in_turns(decoder, prompts, n, asked)

        about = f", temperature {temperature:g}" + (f", batch {batch}" if batch > 1 else "")
        speeds = {way: stats["tokens"] / stats["seconds"] for way, stats in sums.items()}
        for way, speed in speeds.items():
            show(way + about, speed, "tokens/s")
            if way != "plain":
                show(f"{way}{about}: speed over plain", speed / speeds["plain"], "x")
                kept = sums[way]["kept"] / max(sums[way]["drafted"], 1)
                show(f"{way}{about}: drafts kept", 100 * kept, "%")


def prompts_for(seconds: float, tokens: np.ndarray, n: int) -> Iterator[list[int]]:
    """Pieces of the text, n tokens each, until the time is over, but at least one."""
    began = time.perf_counter()
    for number in itertools.count():
        start = number * n % max(len(tokens) - n, 1)
        yield tokens[start : start + n].tolist()
        if time.perf_counter() - began > seconds:
            return


# ---- training ----------------------------------------------------------------------------------


def measure_training(config: BenchConfig, names: list[str], cache: str) -> None:
    """Time and speed of a training step of each objective; on CUDA also the share of the device's
    peak that the model's FLOPs are, if the peak is known, and the memory taken."""
    windows = WARM + max(4, round(6 * config.seconds))
    for name in names:
        flags = [f"--objective={name}", f"--preset={config.preset}"]
        flags.append(f"--data={config.data or 'stories'}")
        flags += [f"--cache_dir={cache}", f"--out_dir={cache}/run"]
        flags += [f"--grad_accum={config.grad_accum}"]
        flags += [f"--tokenizer={config.tokenizer}"] if config.tokenizer else []
        flags += [f"--device={config.device}"] if config.device else []
        flags.append("--max_steps=1000000")  # the learning rate stays at its peak
        torch.compiler.reset()  # the new model is compiled from scratch
        gc.collect()  # free the memory of the previous model
        on_cuda = find_device(config.device).type == "cuda"
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        ms, speed, mfu = train_alone(flags, windows)
        show(f"{name}: step", ms, "ms")
        show(f"{name}: speed", speed, "tokens/s")
        if mfu is not None:
            show(f"{name}: model FLOPs, of the peak", 100 * mfu, "%")
        if on_cuda:  # as the allocator counts it
            peak = torch.cuda.max_memory_allocated() / (1 << 20)
            show(f"{name}: peak memory", peak, "MiB")


def train_alone(argv: list[str], windows: int) -> tuple[float, float, float | None]:
    """train.py's loop without evaluation, checkpoints or log -> ms a step, tokens a second, and the
    share of the device's peak that the model's FLOPs are, if the peak is known."""
    settings = settle(argv)
    config = settings.train
    machine = Machine(config.device, config.dtype, config.compile, config.max_steps)
    window = 10 if machine.device.type == "cuda" else 1  # steps between two synchronizations
    with contextlib.redirect_stdout(io.StringIO()):
        run = Run(settings, machine)

    times = []
    with run.rows_made_ahead():
        for first in range(0, windows * window, window):
            began = time.perf_counter()
            for step in range(first, first + window):
                train.take_step(run, step)
            getattr(torch, machine.device.type).synchronize()  # wait until the device is done
            times.append((time.perf_counter() - began) / window * 1e3)
    ms = statistics.median(times[WARM:])
    speed = config.batch_size * config.block_size / ms * 1e3
    return ms, speed, run.share_of_peak(speed)


# ---- the command -------------------------------------------------------------------------------

SECTIONS = {  # what is measured, and the flags that it reads besides --only and --device
    "corruption": (measure_corruption, {"objective", "data", "block_size", "seconds"}),
    "decoding": (measure_decoding, {"out_dir", "data", "seconds"}),
    "training": (
        measure_training,
        {"objective", "data", "seconds", "preset", "grad_accum", "tokenizer"},
    ),
}


def main(argv: list[str]) -> None:
    given = parse_flags(argv, __doc__, BenchConfig)
    config = build(BenchConfig, given)
    chosen = comma_list("only", config.only, SECTIONS)
    read = {"only", "device"}.union(*(SECTIONS[section][1] for section in chosen))
    if unread := sorted(given.keys() - read):
        raise UserError(f"--{unread[0]} has no effect with --only={config.only}: leave it out")
    if config.out_dir:
        open_checkpoint(config.out_dir)  # refuse a wrong name before minutes are spent
    names = comma_list("objective", config.objective, OBJECTIVES)
    print(f"device     {Machine(config.device)}")
    with tempfile.TemporaryDirectory() as cache:
        for section in chosen:
            print(f"\n{section}")
            measure, _ = SECTIONS[section]
            measure(config, names, cache)


if __name__ == "__main__":
    run_command(main, lower="--preset or --block_size")
