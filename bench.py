"""bench.py: how fast each part runs, beside what this machine could do, both measured in the same run.

Tokenization, corruption on one thread, decoding (plain and drafting for itself), training steps and their memory. Every
figure comes from the functions that train.py and sample.py run. Left out: how good a model gets. Nothing is kept on disk.

    python bench.py
    python bench.py --only=corruption --objective=fim,span --seconds=0.5
    python bench.py --only=limits,decoding --out_dir=out/mtp --compile
    python bench.py --only=training --preset=gpt2 --json

A limit is the machine's, or an aim of ours where it says so; a share above 100% is good of a rate, bad of a time. Corruption
stands beside writing the same rows; training beside the matrix product rate / model.flops_per_token; decoding beside the copy
bandwidth / what a pass must read (the weights, and the filled part of the cache).
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
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

import sample
import train
from data import Corpus, DataConfig, Rng, UserError, cli, flag, get_tokenizer, load_checkpoint, load_tokens, parse_flags
from model import ModelConfig, Transformer
from objectives import OBJECTIVES, Knobs, check_knobs, check_text, make_rows, parse_mixture

AIMS = {"mlm": 60, "span": 40, "ul2": 30, "bart": 10, "fim": 5, "fim, bpe:4096": 1}   # M tokens/s of corruption on one thread
ROWS, GPT2_VOCAB = 64, 50304                                                # rows a call of the corruption; ids
WARM = 2                                                                    # windows of training steps that do not count


@dataclass
class BenchConfig:
    """what is measured, and for how long"""
    only: str = flag("limits,corruption,decoding,training", "comma list of sections")
    objective: str = flag(",".join(OBJECTIVES), "comma list of objectives to corrupt and train with")
    preset: str | None = flag(None, "size of the models; automatic: as train.py's, but gpt2 for decoding on a GPU", tuple(train.PRESETS))
    out_dir: str = flag("", "folder of an mtp run to decode with; empty: random weights, whose drafts are mostly wrong")
    block_size: int = flag(1024, "T of the corrupted rows, positions, in [8, inf)")
    seconds: float = flag(1.0, "length of one measurement, seconds, in (0, inf)")
    minutes: float = flag(8.0, "no training run begins later than this, minutes, in (0, inf)")
    device: str | None = flag(None, "cpu, cuda, cuda:N or mps; automatic: the fastest there is")
    compile: bool = flag(False, "decode with compiled passes, as sample.py --compile does")
    json: bool = flag(False, "JSON lines only: section, name, value, unit, limit, share")


class Report:
    """One line a figure, as soon as it is known: a table or JSON."""

    def __init__(self, as_json: bool):
        self.json, self.section = as_json, ""

    def open(self, section: str) -> None:
        self.section = section
        if not self.json:
            print(f"\n{section:<43}{'value':>12} {'unit':<14}{'limit':>16}{'share':>12}\n{'─' * 98}", flush=True)

    def figure(self, name: str, value: float | None, unit: str = "", limit: float | None = None, aim: bool = False) -> None:
        share = value / limit if limit and value is not None else None
        if self.json:
            value, limit, share = (None if v is None else float(f"{v:.6g}") for v in (value, limit, share))
            print(json.dumps(dict(section=self.section, name=name, value=value, unit=unit, limit=limit, share=share)), flush=True)
        else:
            show = lambda v: "-" if v is None else f"{v:,.0f}" if abs(v) >= 1000 else f"{v:.3g}"
            bound, part = "aim " * aim + show(limit), "-" if share is None else f"{share:.1%}"
            print(f"{name:<43}{show(value):>12} {unit:<14}{bound:>16}{part:>12}" if unit else name, flush=True)


def timed(call, seconds: float, sync=lambda: None, clock=time.perf_counter) -> float:
    """Median seconds of a call, after one that does not count."""
    call()
    times = []
    while sum(times) < seconds or len(times) < 3:
        sync()
        began = clock()
        call()
        sync()
        times.append(clock() - began)
    return statistics.median(times)


def limits(report: Report, machine: train.Machine, seconds: float) -> dict:
    """The device at its best: torch dtype -> FLOP/s of a matrix product, "copy" -> bytes/s, "memory" -> bytes or None."""
    report.open("limits")
    device, sync, found = machine.device, getattr(torch, machine.device.type).synchronize, {}
    cuda = device.type == "cuda"
    name, n = (torch.cuda.get_device_name(device), 8192) if cuda else ("", 2048)
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.randn(n, n, device=device).to(dtype)
        found[dtype] = 2 * n**3 / timed(lambda: a @ a, seconds, sync)
        how = " (TF32)" if cuda and dtype == torch.float32 else ""                   # choose_machine asks for it
        sheet = next((v for k, v in train.PEAK_TFLOPS.items() if k in name and dtype == torch.bfloat16), None)
        report.figure(f"{str(dtype).removeprefix('torch.')} matrix product{how}", found[dtype] / 1e12, "TFLOP/s", sheet)
    source = torch.ones(1 << 27, device=device)                                      # 512 MiB: past any cache
    target = torch.ones_like(source)
    found["copy"] = 2 * source.nbytes / timed(lambda: target.copy_(source), seconds, sync)
    report.figure("copy, read + written", found["copy"] / 1e9, "GB/s")
    found["memory"] = torch.cuda.get_device_properties(device).total_memory if cuda else None
    if not cuda and hasattr(os, "sysconf"):
        found["memory"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return found


def corruption(report: Report, config: BenchConfig, names: list[str], cache: str) -> None:
    """From text to ids, and from memory-mapped ids to rows: seconds of the one thread that makes them, whoever else runs here."""
    report.open("corruption")
    megabytes, T = sum(p.stat().st_size for p in Corpus().files) / 1e6, config.block_size

    def clock(make):
        began = time.perf_counter()
        return make(), time.perf_counter() - began

    def rate(what: str, name: str, tokens) -> None:
        mixture, step, millions = {name: 1.0}, itertools.count(), ROWS * T / 1e6
        check_text(mixture, tokens.train, T, Knobs(), tokens.tok)
        rows = lambda: make_rows(mixture, tokens.train, Rng(1, 0, next(step), range(ROWS)), tokens.tok, T, Knobs())
        made = rows()
        copying = timed(lambda: [v.copy() for v in made.values()], config.seconds / 10, clock=time.thread_time)
        making = timed(rows, config.seconds, clock=time.thread_time)
        report.figure(what, millions / making, "M tokens/s", AIMS.get(what, millions / copying), aim=what in AIMS)

    tokens, seconds = clock(lambda: load_tokens(DataConfig(cache_dir=cache)))
    report.figure("tokenization, bytes", megabytes / seconds, "MB/s")
    for name in names:
        rate(name, name, tokens)
    if "fim" in names:
        tok, seconds = clock(lambda: get_tokenizer("bpe:4096", Corpus()))
        report.figure("training of bpe:4096", seconds, "s", 6 * megabytes, aim=True)
        tokens, seconds = clock(lambda: load_tokens(DataConfig(cache_dir=cache), tok))
        report.figure("tokenization, bpe:4096", megabytes / seconds, "MB/s")
        rate("fim, bpe:4096", "fim", tokens)


def decoding(report: Report, config: BenchConfig, cache: str, machine: train.Machine, limit: dict) -> None:
    """Held-out text goes on: plain, with the heads' drafts, with tokens looked up too, with those alone; and against recomputing."""
    report.open("decoding")
    if config.out_dir:
        state = load_checkpoint(Path(config.out_dir) / "ckpt.pt")
    else:
        state = random_state(config.preset or ("gpt2" if machine.device.type == "cuda" else "tiny"))
    r = sample.Reader(state, config.device)
    if r.model.future is None:
        raise UserError(f"--out_dir={config.out_dir}: drafting needs an mtp run and this one is {'+'.join(r.names)}; train one: train.py --objective=mtp")
    text, heads = load_tokens(DataConfig(cache_dir=cache), r.tok).val, r.model.config.n_future - 1
    prompts = lambda batch, length, step=0: text.stream(Rng(1, 1, step, range(batch)), length).tolist()

    def decode(batch: int, ways: dict, window: int = r.block_size, read: int = r.block_size // 2, n: int = 0) -> float:
        """`n` new tokens a row after prompts of `read`, or as many texts as --seconds hold; by turns, so that what else runs here
        slows all ways alike -> tokens/s of the first, plain, one."""
        torch.compiler.reset()                                                       # it gives up after eight versions of a function
        decoders = {what: sample.Decoder(r.model, batch, heads, block_size=window, lookup=lookup, compile=config.compile)
                    for what, (heads, lookup) in ways.items()}
        totals = {what: sample.Stats(kept=[0] * sum(drafts)) for what, drafts in ways.items()}
        for decoder in decoders.values():
            decoder.generate(prompts(batch, read), 8, eot=-1)                        # on CUDA this captures the graph
        for step in itertools.count():
            for what, decoder in decoders.items():
                totals[what] += decoder.generate(prompts(batch, read, step), n or window - read, eot=-1)[1]
            if n or sum(t.seconds for t in totals.values()) > 4 * config.seconds * len(ways):
                break
        plain = totals["plain"].tokens_per_s
        for what, (heads, lookup) in ways.items():
            unread = ("future",) * (heads == 0) + ("embed_tokens",) * (r.model.lm_head is not None)
            weights = sum(p.nbytes for name, p in r.model.named_parameters() if not name.startswith(unread))
            cache, total = decoders[what].cache, totals[what]
            filled, per_pass = 2 * sum(k.nbytes for k in cache.k) * (read + window) / 2 / cache.slots, 1 + sum(total.acceptance)
            what += f", {n} tokens" if n else f", batch {batch}"
            report.figure(what, total.tokens_per_s, "tokens/s", batch * per_pass * limit["copy"] / (weights + filled))
            if heads + lookup:
                report.figure(f"{what}: tokens a pass", per_pass, "tokens", 1 + heads + lookup)
                for i, kept in enumerate(total.acceptance[:heads] if lookup == 0 else ()):
                    report.figure(f"{what}: draft {i + 1} kept", kept, "of the passes", 1)
                report.figure(f"{what}: over plain", total.tokens_per_s / plain, "x")
        return plain

    lookup, n = sample.SampleConfig.lookup_tokens, 512
    ways = {"plain": (0, 0), "drafting": (heads, 0), f"drafting, {lookup} looked up": (heads, lookup), f"{heads + lookup} looked up": (0, heads + lookup)}
    for batch in (1, 64):
        decode(batch, ways)
    plain, ids = decode(1, {"plain": (0, 0)}, window=16 + n, read=16, n=n), torch.tensor(prompts(1, 16), device=r.device)
    began = time.perf_counter()
    with torch.no_grad():
        for _ in range(n):                                                           # the naive way: the whole context again
            ids = torch.cat([ids, r.model.logits(r.model.norm(r.model.trunk(ids)[:, -1:])).argmax(-1)], 1)
    ids.tolist()
    naive = n / (time.perf_counter() - began)
    report.figure(f"recomputing the context, {n} tokens", naive, "tokens/s")
    report.figure("plain over recomputing", plain / naive, "x", 10, aim=True)


def random_state(preset: str) -> dict:
    """A checkpoint of an mtp model that nobody trained: its drafts are mostly wrong, so a pass keeps about one token."""
    tok, knobs, size = get_tokenizer("bytes"), Knobs(), train.PRESETS[preset]
    vocabulary = dict(vocab_size=GPT2_VOCAB, tied=True) if preset == "gpt2" else dict(vocab_size=tok.vocab_size)   # GPT-2's 124M
    torch.manual_seed(1)
    model = Transformer(ModelConfig(**{k: size[k] for k in ("n_layer", "n_head", "n_embd")}, **vocabulary, **OBJECTIVES["mtp"].heads(knobs)))
    for p in (p for name, p in model.named_parameters() if "norm" not in name):      # fresh blocks do nothing: all heads would agree
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return dict(model=model.state_dict(), model_config=asdict(model.config), tokenizer=tok.to_json(), objective="mtp", knobs=asdict(knobs),
                step=0, train_config={"block_size": size["block_size"]}, data_config={})


def train_once(argv: list[str], window: int, vocab_size: int | None) -> dict:
    """In a process of its own: train.main without evaluation, checkpoint and read-out -> what its steps took.

    Peak memory is the allocator's on CUDA, elsewhere the process's (Linux only), libraries included."""
    build, load, marks, seen = train.build, train.load_tokens, [], {}

    class Loader(train.Loader):
        def __call__(self, step):                                                    # the first thing in a step
            marks.append((time.perf_counter(), self.waited))
            seen["shape"] = self.config.batch_size, self.config.block_size
            return super().__call__(step)

    def load_with(*args):
        tokens = load(*args)
        tokens.tok.vocab_size = vocab_size or tokens.tok.vocab_size
        return tokens

    train.Loader, train.load_tokens, train.build = Loader, load_with, lambda *args: seen.setdefault("model", build(*args))
    train.evaluate, train.save_checkpoint, sample.showcase = lambda *a: {"val_loss": 0.0, "val_bpb": None}, lambda *a: None, lambda *a: None
    with contextlib.redirect_stdout(io.StringIO()):
        train.main(argv)
    B, T = seen["shape"]
    (first, before), (last, after) = marks[WARM * window], marks[-1]
    each = [(b - a) / window for (a, _), (b, _) in itertools.pairwise(marks[WARM * window::window])]
    status = Path("/proc/self/status").read_text() if os.path.exists("/proc/self/status") else ""
    resident = next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM")), None)
    return dict(seconds=statistics.median(each), tokens=B * T, flops=seen["model"].flops_per_token(T), waited=(after - before) / (last - first),
                memory=torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else resident)


def training(report: Report, config: BenchConfig, names: list[str], cache: str, machine: train.Machine, limit: dict, began: float) -> None:
    """A step of each objective in a process of its own: time beside clm's, speed, memory, waiting for data."""
    report.open("training")
    cuda = machine.device.type == "cuda"
    window = 10 if cuda else 1                                                       # steps between two looks at the device
    steps = window * (WARM + max(4, round(6 * config.seconds))) + 1
    mib = lambda size: size and size / 2**20

    def run(name: str, *flags: str, vocab_size: int | None = None) -> dict | None:
        if time.perf_counter() - began > 60 * config.minutes:
            return report.figure(f"{name}: not begun within --minutes={config.minutes:g}", None)
        argv = [f"--objective={name}", f"--max_steps={steps}", f"--log_every={window}", f"--cache_dir={cache}", f"--out_dir={cache}/run", *flags]
        argv += [f"--device={config.device}"] * (config.device is not None)
        try:
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                return pool.submit(train_once, argv, window, vocab_size).result()
        except (UserError, BrokenExecutor, torch.OutOfMemoryError) as e:
            return report.figure(f"{name}: {str(e).splitlines()[0]}", None)

    torch.cuda.empty_cache()                                                         # decoding's memory
    if cuda:
        shape = ("--preset=gpt2", "--batch_size=8", "--compile=False")
        layers = train.PRESETS["gpt2"]["n_layer"] + Knobs().n_future - 1             # a clm with as many blocks as mtp and its heads
        runs = (("clm",), ("clm", f"--n_layer={layers}"), ("mtp",))
        small, tall, mtp = (mib(found and found["memory"]) for found in [run(*r, *shape, vocab_size=GPT2_VOCAB) for r in runs])
        report.figure("clm, 50k ids: peak memory", small, "MiB", mib(limit["memory"]))
        report.figure(f"mtp, 50k ids: memory of clm, {layers} blocks", mtp, "MiB", tall and 1.15 * tall, aim=True)
    else:
        report.figure("memory of mtp beside clm's at 50k ids: CUDA only", None)
    clm = None
    for name in names:
        if found := run(name, *[f"--preset={config.preset}"] * (config.preset is not None)):
            clm = found["seconds"] * 1e3 if name == "clm" else clm
            report.figure(f"{name}: step beside clm's", found["seconds"] * 1e3, "ms", clm)
            report.figure(f"{name}: speed, FLOPs utilization", found["tokens"] / found["seconds"], "tokens/s", limit[machine.dtype] / found["flops"])
            report.figure(f"{name}: peak memory", mib(found["memory"]), "MiB", mib(limit["memory"]))
            report.figure(f"{name}: waiting for data", found["waited"] * found["seconds"] * 1e3, "ms", found["seconds"] * 1e3)


def main(argv: list[str]) -> None:
    config, _ = parse_flags(argv, __doc__, BenchConfig)
    began, sections, names, legal = time.perf_counter(), config.only.split(","), config.objective.split(","), BenchConfig.only.split(",")
    for part in (part for part in sections if part not in legal):
        raise UserError(f"--only={config.only}: there is no section {part!r}, only {', '.join(legal)}")
    for name in names:
        check_knobs(parse_mixture(name), Knobs(), (), config.block_size)
    machine, report = train.choose_machine(config.device, None, None), Report(config.json)
    if not config.json:
        print(*machine.lines, sep="\n")
        if hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5:
            print(f"load       {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores: what else runs here makes figures low")
    with tempfile.TemporaryDirectory() as cache:
        limit = limits(report, machine, config.seconds) if set(sections) != {"corruption"} else {}
        if "corruption" in sections:
            corruption(report, config, names, cache)
        if "decoding" in sections:
            decoding(report, config, cache, machine, limit)
        if "training" in sections:
            training(report, config, names, cache, machine, limit, began)
    if not config.json:
        print(f"\n{train.duration(time.perf_counter() - began)}")


if __name__ == "__main__":
    cli(main, "--preset or --block_size")
