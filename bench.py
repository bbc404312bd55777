"""bench.py: how fast each part runs, beside what this machine could do, both measured in one run.

Tokenization, corruption on one thread, decoding (plain and with drafts), training steps and their
memory. Every figure comes from the functions that train.py and sample.py run. Left out: how good
a model gets. Nothing is kept on disk.

    python bench.py
    python bench.py --only=corruption --objective=fim,span --seconds=0.5
    python bench.py --only=decoding --out_dir=out/mtp
    python bench.py --only=training --objective=clm,mtp --preset=gpt2 --json

A limit is the machine's own, an aim is ours. What is compared: tokenization with reading and
hashing the file; corruption with copying the batch; decoding with the copy bandwidth / what a
pass must read, as if drafts cost nothing; training with the rate of a matrix product /
model.flops_per_token; a step's time and memory with those of the first objective.
"""

import contextlib
import io
import itertools
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

import train
from checkpoint import Checkpoint
from config import UserError, build, comma_list, flag, parse_flags, run_command
from corpus import Corpus, DataConfig, Tokens, load_tokens
from data import Text
from device import Machine, choose_machine, synchronize
from generate import Decoder, Sampler
from log import Meter, StopRequest
from mixture import TRAIN, Source, check_text, make_batch
from model import ModelConfig, Transformer
from objectives import OBJECTIVES, Knobs
from sample import Reader, drafters_of, few_threads, load
from settings import PRESETS, settle
from tokenizer import EOT_TEXT, Tokenizer, get_tokenizer, train_bpe

PIECEWISE = ("span", "ul2", "bart", "fim", "nsp", "sop")  # rows that are put together from pieces
ROWS = 64  # of a batch that is corrupted
TEMPERATURES = {0.0: 2.0, 0.8: 1.3}  # of decoding, and our aims: with drafts over plain
WARM = 2  # windows of training steps that do not count


@dataclass
class BenchConfig:
    """what is measured, and for how long"""

    only: str = flag("limits,tokenization,corruption,decoding,training", "comma list of sections")
    objective: str = flag(",".join(OBJECTIVES), "comma list, to corrupt and train with")
    preset: str = flag("tiny", "size of models without --out_dir", tuple(PRESETS))
    data: str = flag("", "text or .jsonl file, folder, stories or python; empty: stories")
    out_dir: str = flag("", "run to decode with; empty: a fresh model, and no drafts")
    block_size: int = flag(1024, "T, positions of the corrupted rows", min=8, max=1 << 20)
    seconds: float = flag(1.0, "length of one measurement, seconds", above=0)
    device: str | None = flag(None, "cpu, cuda, cuda:N or mps; automatic: the fastest there is")
    compile: bool = flag(False, "torch.compile a pass of decoding")
    json: bool = flag(False, "JSON lines only: section, name, value, unit, limit, share, aim")


class Report:
    """One line a figure, as soon as it is known: a table, or JSON."""

    def __init__(self, as_json: bool):
        self.json = as_json
        self.section = ""

    def open(self, section: str) -> None:
        self.section = section
        if not self.json:
            titles = f"{'value':>10} {'unit':<12}{'limit':>10}{'share':>9}{'aim':>9}"
            print(f"\n{section:<42}{titles}\n{'─' * 93}", flush=True)

    def figure(self, name: str, value: float | None, unit="", limit=None, aim=None) -> None:
        share = value / limit if limit and value is not None else None
        if self.json:
            line = dict(section=self.section, name=name, value=value, unit=unit)
            line |= dict(limit=limit, share=share, aim=aim)
            print(json.dumps(line), flush=True)
            return
        percent = "-" if share is None else f"{share:.1%}"
        numbers = f"{short(value):>10} {unit:<12}{short(limit):>10}{percent:>9}{short(aim):>9}"
        print(f"{name:<42}{numbers}", flush=True)


def short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


class Limits(NamedTuple):
    """The device at its best."""

    flops: dict[torch.dtype, float]  # of a matrix product, a second
    copy: float  # bytes a second, read and written


@dataclass
class Bench:
    """What all sections share."""

    config: BenchConfig
    machine: Machine
    names: list[str]  # of the objectives
    report: Report
    cache: str  # folder of the token caches
    limits: Limits | None = None

    def tokens(self, tok: Tokenizer | None = None) -> Tokens:
        """The corpus, by its own tokenizer unless one is given."""
        data = DataConfig(self.config.data, cache_dir=self.cache)
        return load_tokens(data, tok, log=ignore)


def ignore(line: str = "") -> None:
    """Where the log lines of what is measured go."""


def timed(call, seconds: float, device=None, clock=time.perf_counter) -> float:
    """Median seconds of a call, after one that does not count."""
    call()
    times = []
    while sum(times) < seconds or len(times) < 3:
        began = clock()
        call()
        if device:
            synchronize(device)
        times.append(clock() - began)
    return statistics.median(times)


# ---- the machine -------------------------------------------------------------------------------


def measure_limits(bench: Bench) -> None:
    bench.report.open("limits")
    device = bench.machine.device
    seconds = bench.config.seconds
    on_cuda = device.type == "cuda"
    n = 8192 if on_cuda else 2048

    flops = {}
    for dtype in (torch.bfloat16, torch.float32):
        square = torch.randn(n, n, device=device).to(dtype)
        taken = timed(lambda a=square: a @ a, seconds, device)
        flops[dtype] = 2 * n**3 / taken
        name = f"{str(dtype).removeprefix('torch.')} matrix product"
        if on_cuda and dtype == torch.float32:
            name += " (TF32)"
        bench.report.figure(name, flops[dtype] / 1e12, "TFLOP/s")

    copy = copy_speed(bench)
    bench.report.figure("copy, read + written", copy / 1e9, "GB/s")
    bench.limits = Limits(flops, copy)


def copy_speed(bench: Bench) -> float:
    """Bytes a second, read and written."""
    device = bench.machine.device
    source = torch.ones(1 << 27, device=device)  # 512 MiB: past any cache
    target = torch.ones_like(source)
    seconds = timed(lambda: target.copy_(source), bench.config.seconds, device)
    return 2 * source.nbytes / seconds


# ---- text to rows ------------------------------------------------------------------------------


def measure_tokenization(bench: Bench) -> None:
    """From a text file to cached token ids, with all that load_tokens does on the way."""
    bench.report.open("tokenization")
    texts = [text for text, _ in Corpus(bench.config.data).pieces()]
    path = Path(bench.cache, "text.txt")
    path.write_text(f"\n{EOT_TEXT}\n".join(texts), encoding="utf-8")
    corpus = Corpus(str(path))
    megabytes = corpus.size / 1e6
    limit = megabytes / timed(corpus.digest, bench.config.seconds)

    began = time.perf_counter()
    bpe = train_bpe(texts, 1024)
    taken = time.perf_counter() - began
    bench.report.figure(f"training of {bpe.name}", megabytes / taken, "MB/s", limit)

    for tok in (get_tokenizer("bytes"), bpe):
        data = DataConfig(str(path), cache_dir=bench.cache)
        began = time.perf_counter()
        load_tokens(data, tok, log=ignore)
        taken = time.perf_counter() - began
        bench.report.figure(f"tokenization, {tok.name}", megabytes / taken, "MB/s", limit)


def measure_corruption(bench: Bench) -> None:
    """From memory-mapped ids to batches."""
    bench.report.open("corruption")
    tokens = bench.tokens(get_tokenizer("bytes"))
    for name in bench.names:
        corrupt(bench, name, name, tokens, aim=5 if name in PIECEWISE else 10)
    if "fim" in bench.names:  # cuts between characters: its parts are tokenized anew
        tokens = bench.tokens()
        corrupt(bench, f"fim, {tokens.tok.name}", "fim", tokens, aim=1)


def corrupt(bench: Bench, title: str, name: str, tokens: Tokens, aim: float) -> None:
    """In seconds of the one thread that makes batches, whatever else runs here."""
    tok = tokens.tok
    T = bench.config.block_size
    text = Text(tokens.train, tok.EOT)
    mixture = {name: 1.0}
    check_text(mixture, text, T, Knobs())
    source = Source(mixture, text, tok, T, Knobs(), seed=1)
    steps = itertools.count()

    def make():
        return make_batch(source, TRAIN, next(steps), range(ROWS), ROWS)

    arrays = [value.numpy() for value in vars(make()).values() if torch.is_tensor(value)]

    def copy():
        return [array.copy() for array in arrays]

    millions = ROWS * T / 1e6
    speed = millions / timed(make, bench.config.seconds, clock=time.thread_time)
    limit = millions / timed(copy, bench.config.seconds / 10, clock=time.thread_time)
    bench.report.figure(title, speed, "M tokens/s", limit, aim)


# ---- decoding ----------------------------------------------------------------------------------


def measure_decoding(bench: Bench) -> None:
    """Held-out text goes on: plain and with drafts, one text or 64 samples of it."""
    bench.report.open("decoding")
    if bench.config.out_dir:
        reader = load(bench.config.out_dir, bench.config.device)
    else:
        reader = fresh_reader(bench.config.preset, bench.config.device)
    text = Text(bench.tokens(reader.tok).val, reader.tok.EOT)
    ways = ["plain"]
    if bench.config.out_dir:  # a fresh model repeats itself: its drafts would all be right
        ways.append("look_up")
        if reader.model.future:
            ways += ["heads", "both"]

    with few_threads(reader):
        bench.limits = bench.limits._replace(copy=copy_speed(bench))  # by as many threads
        for temperature in TEMPERATURES:
            decode(bench, reader, text, temperature, 1, ways)
            decode(bench, reader, text, temperature, 64, ["plain"])


def fresh_reader(preset: str, device: str | None) -> Reader:
    """A model that nobody trained, as sample.py would hold it."""
    size = PRESETS[preset]
    tok = get_tokenizer("bytes")
    config = build(ModelConfig, size, {"vocab_size": tok.vocab_size})
    state = {"model": Transformer(config).state_dict()}
    checkpoint = Checkpoint(state, tok, {"clm": 1.0}, config, Knobs(), size["block_size"])
    return Reader(checkpoint, device)


def drafters(way: str, decoder: Decoder) -> list:
    """New ones for each text, as they remember what they saw of it."""
    return [] if way == "plain" else drafters_of(decoder, way)


def decode(bench: Bench, reader: Reader, text: Text, temperature, batch: int, ways: list) -> None:
    """T/2 tokens after each prompt of T/2, by one way after another, so that what else runs here
    slows all of them alike; about four measurements for each way."""
    torch.compiler.reset()  # it gives up after eight versions of a function
    T = reader.block_size
    sampler = Sampler(temperature)
    decoder = Decoder(reader.model, batch, T, sampler, compile=bench.config.compile)
    for way in [*ways, *ways]:  # CUDA captures a shape that comes again
        decoder.generate(prompt(text, T // 2, 0), 8, drafters=drafters(way, decoder))

    runs = {way: [] for way in ways}
    began = time.perf_counter()
    number = 0
    while number == 0 or time.perf_counter() - began < 4 * bench.config.seconds * len(ways):
        number += 1
        start = prompt(text, T // 2, number)
        for way in ways:
            stats = decoder.generate(start, T // 2, seed=number, drafters=drafters(way, decoder))[1]
            runs[way].append(stats)

    about = f", temperature {temperature:g}"
    if batch > 1:
        about += f", batch {batch}"
    passes = bench.limits.copy / bytes_of_pass(reader.model, batch, filled=3 * T // 4)
    report_decoding(bench.report, runs, about, passes, aim=TEMPERATURES[temperature])


def report_decoding(report: Report, runs: dict, about: str, passes: float, aim: float) -> None:
    """`passes`: the most there can be in a second."""
    plain = total(runs["plain"], "tokens") / total(runs["plain"], "seconds")
    for way, stats in runs.items():
        speed = total(stats, "tokens") / total(stats, "seconds")
        per_pass = total(stats, "tokens") / total(stats, "passes")
        title = way + about
        report.figure(title, speed, "tokens/s", per_pass * passes)
        if way != "plain":
            kept = total(stats, "kept") / max(total(stats, "drafted"), 1)
            report.figure(f"{title}: over plain", speed / plain, "x", None, aim)
            report.figure(f"{title}: tokens a pass", per_pass, "tokens")
            report.figure(f"{title}: drafts kept", kept, "of drafts", limit=1)


def total(stats: list, name: str) -> float:
    return sum(getattr(one, name) for one in stats)


def prompt(text: Text, length: int, number: int) -> list[int]:
    """Some tokens of the text, the same for the same number."""
    start = number * length % max(len(text) - length, 1)
    return text.tokens[start : start + length].tolist()


def bytes_of_pass(model: Transformer, batch: int, filled: int) -> int:
    """What one pass of the trunk must read: its weights, and the filled positions of the cache."""
    c = model.config
    weights = [*model.layers.parameters(), model.unembedding]
    cached = 2 * c.n_layer * c.n_kv_head * c.head_dim * batch * filled
    return sum(p.nbytes for p in weights) + cached * weights[0].element_size()


# ---- training ----------------------------------------------------------------------------------


class Steps(NamedTuple):
    """What the training steps of one run took."""

    ms: float  # of a step, the median
    waited: float  # ms of a step in which the loop stood still for data
    tokens: int  # of a step
    flops: float  # of a token
    memory: float | None  # peak, MiB


def measure_training(bench: Bench) -> None:
    """A step of each objective, in a process of its own, so that the memory is its own too."""
    bench.report.open("training")
    if bench.machine.device.type == "cuda":
        torch.cuda.empty_cache()  # decoding's memory
    windows = WARM + max(4, round(6 * bench.config.seconds))
    peak = bench.limits.flops[bench.machine.dtype]
    first = None
    for name in bench.names:
        flags = [f"--objective={name}", f"--preset={bench.config.preset}"]
        flags += [f"--data={bench.config.data}", f"--cache_dir={bench.cache}"]
        flags += [f"--out_dir={bench.cache}/run", f"--device={bench.machine.device}"]
        flags.append("--max_steps=1000000")  # the rate of learning stays at its peak
        try:
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                steps = pool.submit(train_alone, flags, windows).result()
        except (UserError, BrokenExecutor, torch.OutOfMemoryError) as error:
            bench.report.figure(f"{name}: {str(error).splitlines()[0]}", None)
            continue
        first = first or steps
        speed = steps.tokens / steps.ms * 1e3
        bench.report.figure(f"{name}: step", steps.ms, "ms", first.ms)
        bench.report.figure(f"{name}: speed", speed, "tokens/s", peak / steps.flops)
        bench.report.figure(f"{name}: peak memory", steps.memory, "MiB", first.memory)
        bench.report.figure(f"{name}: waiting for data", steps.waited, "ms", steps.ms)


def train_alone(argv: list[str], windows: int) -> Steps:
    """train.py's loop without evaluation, checkpoints and log."""
    settings = settle(argv)
    config = settings.train
    machine = choose_machine(config.device, config.dtype, config.compile, config.max_steps)
    on_cuda = machine.device.type == "cuda"
    window = 10 if on_cuda else 1  # steps from one look at the device to the next
    with contextlib.redirect_stdout(io.StringIO()):
        run = train.prepare(settings, machine, StopRequest())

    times = []
    waits = []
    for first in range(0, windows * window, window):
        waited = run.loader.waited
        began = time.perf_counter()
        for step in range(first, first + window):
            train.take_step(run, step, Meter())
        synchronize(machine.device)
        times.append((time.perf_counter() - began) / window * 1e3)
        waits.append((run.loader.waited - waited) / window * 1e3)
    return Steps(
        ms=statistics.median(times[WARM:]),
        waited=statistics.mean(waits[WARM:]),
        tokens=config.batch_size * config.block_size,
        flops=run.model.flops_per_token(config.block_size, run.target_share),
        memory=peak_memory(machine.device),
    )


def peak_memory(device: torch.device) -> float | None:
    """MiB: the allocator's on CUDA, elsewhere the whole process's, on Linux only."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / (1 << 20)
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
    return None


# ---- the command -------------------------------------------------------------------------------

SECTIONS = {
    "limits": measure_limits,
    "tokenization": measure_tokenization,
    "corruption": measure_corruption,
    "decoding": measure_decoding,
    "training": measure_training,
}


def main(argv: list[str]) -> None:
    config = build(BenchConfig, parse_flags(argv, __doc__, BenchConfig))
    chosen = comma_list("only", config.only, SECTIONS)
    names = comma_list("objective", config.objective, OBJECTIVES)
    machine = choose_machine(config.device)
    if not config.json:
        print(*machine.lines, sep="\n")
        if hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5:
            print(f"load       {os.getloadavg()[0]:.1f}: what else runs here makes figures low")
    with tempfile.TemporaryDirectory() as cache:
        bench = Bench(config, machine, names, Report(config.json), cache)
        for section, measure in SECTIONS.items():
            needed = section == "limits" and {"decoding", "training"} & set(chosen)
            if section in chosen or needed:
                measure(bench)


if __name__ == "__main__":
    run_command(main, "--preset or --block_size")
