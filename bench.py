"""bench.py: how fast each part runs: corruption, decoding, training.

Every figure comes from the functions that train.py and sample.py run. Nothing is kept on disk.

    python bench.py
    python bench.py --only=corruption --objective=fim,span --seconds=0.5
    python bench.py --only=decoding --out_dir=out/mtp
    python bench.py --only=training --objective=clm,mtp --preset=gpt2
"""

import contextlib
import io
import itertools
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

import torch

import train
from config import UserError, build, comma_list, flag, parse_flags, run_command
from corpus import DataConfig, load_tokens
from data import Text
from device import Machine
from generate import Decoder, Sampler
from mixture import TRAIN, Source, check_text, make_batch
from objectives import OBJECTIVES, Knobs
from run import Run
from sample import Reader, drafters_of, few_threads, load
from settings import PRESETS, settle
from tokenizer import get_tokenizer

ROWS = 64  # of a batch that is corrupted
WARM = 2  # windows of training steps that do not count


@dataclass
class BenchConfig:
    """what is measured, and for how long"""

    only: str = flag("corruption,decoding,training", "comma list of sections")
    objective: str = flag(",".join(OBJECTIVES), "comma list, to corrupt and train with")
    preset: str = flag("tiny", "size of the models that are trained", tuple(PRESETS))
    data: str = flag("stories", "text or .jsonl file, folder, stories or python")
    out_dir: str = flag("", "run to decode with; empty: nothing is decoded")
    block_size: int = flag(1024, "T, positions of the corrupted rows", min=8, max=1 << 20)
    seconds: float = flag(1.0, "length of one measurement, seconds", above=0)
    device: str | None = flag(None, "cpu, cuda, cuda:N or mps; automatic: the fastest there is")


def show(name: str, value: float, unit: str) -> None:
    number = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    print(f"{name:<44}{number:>10} {unit}", flush=True)


# ---- text to rows ------------------------------------------------------------------------------


def measure_corruption(config: BenchConfig, names: list[str], cache: str) -> None:
    """From memory-mapped bytes to batches, in seconds of the one thread that makes them."""
    T = config.block_size
    tok = get_tokenizer("bytes")
    tokens = load_tokens(DataConfig(config.data, cache_dir=cache), tok)
    text = Text(tokens.train, tok.EOT)
    for name in names:
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


def measure_decoding(config: BenchConfig, names: list[str], cache: str) -> None:
    """Held-out text goes on: plain and with drafts, one text or 64 samples of it."""
    if not config.out_dir:  # a fresh model repeats itself: its drafts would all be right
        print("give --out_dir, the run to decode with")
        return
    reader = load(config.out_dir, config.device)
    drafts = ["look_up", "heads", "both"] if reader.model.future else ["look_up"]
    plain = {"plain": lambda decoder: []}
    ways = plain | {draft: partial(drafters_of, draft=draft) for draft in drafts}
    data = DataConfig(config.data, cache_dir=cache)
    text = Text(load_tokens(data, reader.tok).val, reader.tok.EOT)
    with few_threads(reader):
        for temperature in (0.0, 0.8):
            decode(config, reader, text, temperature, 1, ways)
            decode(config, reader, text, temperature, 64, plain)


def decode(config, reader: Reader, text: Text, temperature: float, batch: int, ways: dict) -> None:
    """T/2 tokens after each prompt of T/2; about four measurements for each way."""
    n = reader.block_size // 2
    decoder = reader.decoder(Sampler(temperature), batch)
    # CUDA captures a shape that comes again.
    decode_in_turns(decoder, [text.tokens[:n].tolist()] * 2, n, ways)
    prompts = prompts_for(4 * config.seconds * len(ways), text, n)
    sums = decode_in_turns(decoder, prompts, n, ways)

    about = f", temperature {temperature:g}" + (f", batch {batch}" if batch > 1 else "")
    plain = sums["plain"]["tokens"] / sums["plain"]["seconds"]
    for way, stats in sums.items():
        speed = stats["tokens"] / stats["seconds"]
        show(way + about, speed, "tokens/s")
        if way != "plain":
            show(f"{way}{about}: over plain", speed / plain, "x")
            kept = stats["kept"] / max(stats["drafted"], 1)
            show(f"{way}{about}: drafts kept", kept, "of drafts")


def prompts_for(seconds: float, text: Text, n: int) -> Iterator[list[int]]:
    """Pieces of the text, n tokens each, until the time is over; one at least."""
    began = time.perf_counter()
    for number in itertools.count():
        start = number * n % max(len(text) - n, 1)
        yield text.tokens[start : start + n].tolist()
        if time.perf_counter() - began > seconds:
            return


def decode_in_turns(decoder: Decoder, prompts: Iterable, n: int, ways: dict[str, Callable]) -> dict:
    """n tokens after each prompt by one way after another, so that what else runs here slows all of
    them alike: name -> sums of generate.Stats. A way is decoder -> drafters, new for each text."""
    sums = {name: Counter() for name in ways}
    for seed, prompt in enumerate(prompts):
        for name, drafters_for in ways.items():
            drafters = drafters_for(decoder)
            _, stats = decoder.generate(prompt, n, seed=seed, drafters=drafters)
            sums[name].update(vars(stats))
    return sums


# ---- training ----------------------------------------------------------------------------------


def measure_training(config: BenchConfig, names: list[str], cache: str) -> None:
    """A step of each objective, in a process of its own, so that the memory is its own too."""
    windows = WARM + max(4, round(6 * config.seconds))
    for name in names:
        flags = [f"--objective={name}", f"--preset={config.preset}", f"--data={config.data}"]
        flags += [f"--cache_dir={cache}", f"--out_dir={cache}/run"]
        flags += [f"--device={config.device}"] if config.device else []
        flags.append("--max_steps=1000000")  # the rate of learning stays at its peak
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            try:
                figures = pool.submit(train_alone, flags, windows).result()
            except BrokenExecutor as e:  # killed, perhaps for its memory
                raise UserError(f"{name}: {e}; take a smaller --preset") from None
        for what, (value, unit) in figures.items():
            show(f"{name}: {what}", value, unit)


def train_alone(argv: list[str], windows: int) -> dict[str, tuple[float, str]]:
    """train.py's loop without evaluation, checkpoints and log -> its figures, with their units."""
    settings = settle(argv)
    config = settings.train
    machine = Machine(config.device, config.dtype, config.compile, config.max_steps)
    on_cuda = machine.device.type == "cuda"
    window = 10 if on_cuda else 1  # steps from one look at the device to the next
    with contextlib.redirect_stdout(io.StringIO()):
        run = Run(settings, machine)

    times = []
    for first in range(0, windows * window, window):
        began = time.perf_counter()
        for step in range(first, first + window):
            train.take_step(run, step)
        getattr(torch, machine.device.type).synchronize()  # until the device has done all of it
        times.append((time.perf_counter() - began) / window * 1e3)
    ms = statistics.median(times[WARM:])
    speed = config.batch_size * config.block_size / ms * 1e3
    figures = {"step": (ms, "ms"), "speed": (speed, "tokens/s")}
    if on_cuda:  # that the allocator held
        figures["peak memory"] = (torch.cuda.max_memory_allocated() / (1 << 20), "MiB")
    return figures


# ---- the command -------------------------------------------------------------------------------

SECTIONS = {
    "corruption": measure_corruption,
    "decoding": measure_decoding,
    "training": measure_training,
}


def main(argv: list[str]) -> None:
    config = build(BenchConfig, parse_flags(argv, __doc__, BenchConfig))
    chosen = comma_list("only", config.only, SECTIONS)
    names = comma_list("objective", config.objective, OBJECTIVES)
    print(f"device     {Machine(config.device)}")
    with tempfile.TemporaryDirectory() as cache:
        for section in chosen:
            print(f"\n{section}")
            SECTIONS[section](config, names, cache)


if __name__ == "__main__":
    run_command(main, "--preset or --block_size")
