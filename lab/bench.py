"""bench.py: how fast each part runs: corruption, decoding, training; and where a step's time goes.

Every figure comes from what train.py and sample.py run; `step` repeats a step of train.main's loop.
Nothing is kept on disk.

    python -m lab.bench
    python -m lab.bench --only=corruption --objective=fim,span --seconds=0.5
    python -m lab.bench --only=decoding --out_dir=out/mtp
    python -m lab.bench --only=training --objective=clm,mtp --preset=gpt2
    python -m lab.bench --only=step --objective=fim --compile=False
"""

import contextlib
import gc
import io
import itertools
import platform
import re
import shlex
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

import train
from checkpoint import build_model, open_checkpoint
from corpus import DataConfig, load_tokens
from data import TRAIN, Text, check_text, make_batch
from generate import Sampler, look_up
from lab.yardsticks import decode_in_turns, read_log
from model import Transformer
from objectives import OBJECTIVES, Knobs, check_knobs, source_of, total_loss
from optimizers import make_optimizers
from sample import load, set_for_asking
from tokenizer import get_tokenizer
from util import (
    UserError,
    build,
    comma_list,
    find_device,
    flag,
    has_bfloat16,
    parse_flags,
    run_command,
)

ROWS = 64  # of a batch that is corrupted
UNMASK_STEPS = (1, 2, 4, 8, 32)  # a block has at most as many as tokens
WARM = 3  # first log lines of a training run, which do not count
# Dense bfloat16 TFLOP/s, from the vendors' data sheets. The first key found in a name counts.
# fmt: off
PEAK_TFLOPS = {
    "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312, "B200": 2250,
    "L40S": 362, "L4": 121, "A10": 125, "RTX 4090": 165, "RTX 3090": 71,
}
# fmt: on


@dataclass
class BenchConfig:
    """what is measured, and for how long"""

    only: str = flag("corruption,decoding,training", "comma list of these sections, or step")
    objective: str = flag(",".join(OBJECTIVES), "objectives to corrupt and train with")
    preset: str = flag("micro", "size of the models that are trained", tuple(train.PRESETS))
    flags: str = flag("", "train.py flags for the models that are trained, e.g. --n_layer=2")
    compile: bool = flag(True, "torch.compile the models that are trained, as in long runs")
    data: str | None = flag(
        None,
        "text or .jsonl file, folder, stories or python; automatic: stories, or the run's text",
    )
    tokenizer: str | None = flag(
        None, "for training: bytes, bpe:N or a tiktoken name; automatic: by text size"
    )
    out_dir: str = flag("", "run to decode with; empty: nothing is decoded")
    block_size: int = flag(1024, "T, positions in a corrupted row", min=8)
    seconds: float = flag(1.0, "length of one measurement, in seconds", above=0)
    device: str | None = flag(None, "cpu, cuda, cuda:N or mps; automatic: the fastest available")


def show(name: str, value: float, unit: str) -> None:
    number = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    print(f"{name:<44}{number:>10} {unit}")


# ---- text to rows ------------------------------------------------------------------------------


def measure_corruption(config: BenchConfig, names: list[str], folder: str) -> None:
    """From memory-mapped bytes to batches, by the CPU time of the one thread that makes them."""
    T = config.block_size
    tok = get_tokenizer("bytes")
    tokens = load_tokens(DataConfig(config.data or "stories", cache_dir=folder), tok)
    text = Text(tokens.train, tok.EOT)
    check_text(text, T)
    for name in names:
        check_knobs({name: 1.0}, Knobs(), (), T)
        source = source_of({name: 1.0}, text, tok, T, Knobs(), seed=1)
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
    "look_up": lambda decoder: [look_up],
    "heads": lambda decoder: [decoder.heads],
    "both": lambda decoder: [decoder.heads, look_up],
}


def measure_decoding(config: BenchConfig, names: list[str], folder: str) -> None:
    """Write T/2 tokens after T/2 tokens of held-out text: one sample, plain and with drafts; then
    64 samples at once, plain. Block and diffusion: one sample, in several numbers of steps."""
    if not config.out_dir:  # an untrained model repeats itself: its drafts would all be right
        print("skipped: give --out_dir, the run to decode with")
        return
    trained = load(config.out_dir, config.device)
    n = trained.block_size // 2
    own = build(DataConfig, open_checkpoint(config.out_dir).state["settings"])
    data = replace(own, data=config.data or own.data, cache_dir=folder)
    val = load_tokens(data, trained.tok).val
    if {"continue_block", "continue_unmask"} & {*trained.tasks}:
        for steps in UNMASK_STEPS:
            began, written = time.perf_counter(), 0
            for prompt in prompts_for(4 * config.seconds, val, n):
                text = trained.tok.decode(prompt)
                flags = dict(max_new_tokens=n, steps=steps, temperature=0.0)
                [answer] = trained.ask("continue", text, **flags)
                written += len(answer.ids)
            speed = written / (time.perf_counter() - began)
            show(f"{steps} steps a block (diffusion: in all)", speed, "tokens/s")
        return
    if "continue" not in trained.tasks:
        able = ", ".join(name for name in OBJECTIVES if "continue" in OBJECTIVES[name].tasks)
        raise UserError(f"--out_dir={config.out_dir}: decoding is measured with {able} only")
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


def measure_training(config: BenchConfig, names: list[str], folder: str) -> None:
    """Time and speed of a training step of each objective, from the log of a short run; on CUDA
    also the memory taken and, if the peak is known, the share of it that the model's FLOPs are."""
    on_cuda = find_device(config.device).type == "cuda"
    log_every = 10 if on_cuda else 1  # steps between two synchronizations
    steps = log_every * (WARM + max(4, round(6 * config.seconds)))
    for name in names:
        run = f"{folder}/run-{name}"
        flags = flags_for(config, name, folder, run)
        flags += [f"--max_steps={steps}", f"--log_every={log_every}"]
        torch.compiler.reset()  # the new model is compiled from scratch
        gc.collect()  # free the memory of the previous model
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        with contextlib.redirect_stdout(io.StringIO()):
            train.main(flags, report=False)

        lines = [line for line in read_log(run) if "ms" in line][WARM:]
        speed = statistics.median(line["tokens_per_s"] for line in lines)
        show(f"{name}: step", statistics.median(line["ms"] for line in lines), "ms")
        show(f"{name}: speed", speed, "tokens/s")
        if on_cuda:
            peak = torch.cuda.max_memory_allocated() / (1 << 20)  # as the allocator counts it
            show(f"{name}: peak memory", peak, "MiB")
            if flops := peak_flops(torch.cuda.get_device_name()):
                share = flops_of_run(run) * speed / flops
                show(f"{name}: model FLOPs, of the peak", 100 * share, "%")


def flags_for(config: BenchConfig, name: str, folder: str, run: str) -> list[str]:
    """train.py's flags for a run that is measured."""
    flags = [f"--objective={name}", f"--preset={config.preset}", f"--out_dir={run}"]
    flags += [f"--data={config.data or 'stories'}", f"--cache_dir={folder}"]
    flags += [f"--compile={config.compile}", *shlex.split(config.flags)]
    flags += [f"--tokenizer={config.tokenizer}"] if config.tokenizer else []
    return flags + ([f"--device={config.device}"] if config.device else [])


def peak_flops(device_name: str) -> float | None:
    """FLOP/s according to the data sheet, if known.

    >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("NVIDIA L400")
    (989000000000000.0, None)
    """
    found = [peak for key, peak in PEAK_TFLOPS.items() if re.search(rf"\b{key}\b", device_name)]
    return 1e12 * found[0] if found else None


def flops_of_run(run: str) -> float:
    """FLOPs per position of a run's training step, with the targets of a batch of its rows."""
    checkpoint = open_checkpoint(run)
    data = build(DataConfig, checkpoint.state["settings"])
    text = Text(load_tokens(data, checkpoint.tok).train, checkpoint.tok.EOT)
    T = checkpoint.block_size
    parts = (text, checkpoint.tok, T, checkpoint.knobs)
    batch = make_batch(source_of(checkpoint.mixture, *parts, seed=1), TRAIN, 0, range(ROWS), ROWS)
    target_share = len(batch.targets) / batch.inputs.numel()
    return flops_per_token(build_model(checkpoint), T, target_share)


def flops_per_token(model: Transformer, T: int, target_share: float) -> float:
    """FLOPs of a training step per position, counted as in the PaLM paper: 6 for each entry of a
    matrix, 12 H D T for each attention layer. Only positions with a target are unembedded."""
    matrices = model.unembedding.numel() * model.config.n_future * target_share
    width = 0  # H · D, summed over all attention layers
    for name, p in model.named_parameters():
        if p.ndim > 1 and not name.startswith(("embed_tokens", "lm_head")):
            matrices += p.numel()
        if name.endswith("o_proj.weight"):
            width += p.shape[1]
    return 6 * matrices + 12 * width * T


# ---- a step, by its parts ------------------------------------------------------------------------

# fmt: off
KERNELS = {  # share of the time in kernels -> their names; the first that fits counts
    "attention": "scaled_dot_product|flash|::bmm|(?<!log)_softmax",  # bmm: a bit of Muon, too
    "fused": "cpp_fused|triton",          # by torch.compile: all other elementwise work
    "optimizer": "adam|lerp|foreach|baddbmm",
    "products": "mm|linear|matmul|gemm",
    "copies": "copy|cat|stack|clone|fill|zero|roll|index",
    "elementwise": "",
}
# fmt: on


def measure_step(config: BenchConfig, names: list[str], folder: str) -> None:
    """Milliseconds of drawing rows, forward, backward and optimizer, medians; what share of the
    time each kind of kernel takes; the step's FLOPs a second, and those of plain products."""
    parts = ("rows", "forward", "backward", "update", "step")
    heads = [*(f"{part} ms" for part in parts), *(f"{kind} %" for kind in KERNELS)]
    print("| " + " | ".join(["objective", *heads, "GFLOP/s", "of products"]) + " |")
    print("|---" * (len(heads) + 3) + "|")
    torch._inductor.config.cpp.enable_kernel_profile = True  # compiled kernels have names
    for name in names:
        torch.compiler.reset()
        step, model, batch = ready_to_step(config, name, folder)
        times = []
        while len(times) < 5 or sum(map(sum, times)) < 5 * config.seconds:
            times.append(step(len(times)))
        typical = [1e3 * statistics.median(part) for part in zip(*times[WARM:])]
        with torch.profiler.profile() as profile:
            step(len(times))
        B, T = batch.inputs.shape
        flops = flops_per_token(model, T, len(batch.targets) / B / T) * B * T
        speeds = [flops / sum(typical) / 1e6, flops_of_products(model, B * T) / 1e9]
        cells = [*typical, sum(typical), *shares_of(profile), *speeds]
        print(f"| {name} | " + " | ".join(f"{cell:.3g}" for cell in cells) + " |", flush=True)


def ready_to_step(config: BenchConfig, name: str, folder: str):
    """A function of a step's number that takes the step, as train.main does, and returns the
    seconds of its four parts; the model, and a batch."""
    s = train.settings(flags_for(config, name, folder, f"{folder}/step-{name}"))
    c, device = s.train, find_device(s.train.device)
    silent = train.Log(None, rank=1)
    tokens, source, _ = train.load_data(s, silent)
    model = train.make_model(s, tokens.tok, silent).to(device)
    dtype = torch.bfloat16 if has_bfloat16(device) else torch.float32
    train.keep_freed_memory(device)
    if config.compile:
        model.compile_for_training()
        torch.use_deterministic_algorithms(device.type != "cuda", warn_only=True)
    rates = (c.lr, c.lr_embed, c.lr_unembed, c.lr_binary)
    optimizers = make_optimizers(model, c.optimizer, *rates, dtype)

    def step(number: int) -> list[float]:
        clock = [now(device)]
        batch = train.draw_batches(source, number, c)[0]
        clock.append(now(device))
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            metrics = OBJECTIVES[name].loss(model, batch.to(device), tokens.tok, s.knobs)
        clock.append(now(device))
        total_loss(metrics).backward()
        clock.append(now(device))
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.GRAD_CLIP)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        clock.append(now(device))
        return list(np.diff(clock))

    return step, model, train.draw_batches(source, 0, c)[0]


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def shares_of(profile) -> list[float]:
    """The percentages of the time in kernels that each of KERNELS takes."""
    sums = dict.fromkeys(KERNELS, 0.0)
    for event in profile.key_averages():
        kind = next(kind for kind, names in KERNELS.items() if re.search(names, event.key))
        sums[kind] += event.self_device_time_total or event.self_cpu_time_total
    return [100 * part / sum(sums.values()) for part in sums.values()]


def flops_of_products(model: Transformer, n: int) -> float:
    """FLOP/s of the model's plain products: n vectors times each matrix, in bfloat16."""
    matrices = [layer.weight for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    pairs = [(m.new_ones(n, m.shape[1]).bfloat16(), m.detach().bfloat16().mT) for m in matrices]
    seconds = []
    for _ in range(5):
        began = now(matrices[0].device)
        for x, m in pairs:
            x @ m
        seconds.append(now(matrices[0].device) - began)
    return 2 * n * sum(m.numel() for m in matrices) / statistics.median(seconds)


# ---- the command -------------------------------------------------------------------------------

SECTIONS = {
    "corruption": measure_corruption,
    "decoding": measure_decoding,
    "training": measure_training,
    "step": measure_step,
}


def main(argv: list[str]) -> None:
    config = build(BenchConfig, parse_flags(argv, __doc__, BenchConfig))
    sections = comma_list("only", config.only, SECTIONS)
    names = comma_list("objective", config.objective, OBJECTIVES)
    device = find_device(config.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    print(f"device     {device}, {name}")
    with tempfile.TemporaryDirectory() as folder:
        for section in sections:
            print(f"\n{section}")
            SECTIONS[section](config, names, folder)


if __name__ == "__main__":
    run_command(main, lower="--preset or --block_size")
