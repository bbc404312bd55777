"""test_program.py: what the command line promises, most of it shown by making a fault happen.

The tests use models of one block and 32 channels on the CPU, a corpus made here, and processes
without a network. Left out: the contents of rows (test_objectives.py), flags, files and corpora on
their own (test_files.py), decoding (test_generate.py), drawing (test_view.py), anything on a GPU.

    pytest test_program.py
    pytest test_program.py -k "resume or kill"
"""

import dataclasses
import gc
import json
import math
import multiprocessing
import os
import py_compile
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch
from torch.nn import functional as F

import config
import device
import run as run_file
import sample
import skills
import train
from checkpoint import load_checkpoint, save_checkpoint
from config import UserError, lock_folder
from corpus import DataConfig, load_tokens
from data import Text
from device import Machine
from log import Meter, duration, metrics_text
from mixture import (
    TRAIN,
    Source,
    check_knobs,
    check_text,
    draw_row,
    make_batch,
    parse_mixture,
    with_heads,
)
from model import ModelConfig, Transformer
from objectives import BART_NOISE, FIM_LAYOUTS, OBJECTIVES, Knobs, Metric, token_loss, total_loss
from optimizers import Muon, all_groups, learning_rate_scale, make_optimizers
from run import Run
from settings import PRESETS, TrainConfig, settle
from test_files import HERE, leaves, linux, posix, temporary_files
from tokenizer import Tokenizer

TINY = """--n_layer=1 --n_embd=32 --d_ff=128 --n_head=1 --head_dim=32 --block_size=32
    --batch_size=4 --eval_rows=8 --log_every=1 --max_steps=20 --decay_frac=0 --dtype=float32
    --device=cpu --data=text.txt"""
FOREVER = "--max_steps=1000000 --compile=False"  # a run this long would be compiled

# Every process started here runs this first, so that it cannot reach any other machine.
GUARD = """
import socket
local = (None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname())
connect, getaddrinfo = socket.socket.connect, socket.getaddrinfo

def connect_here(self, address):
    if isinstance(address, tuple) and address[0] not in local:
        raise OSError("the network is closed")
    return connect(self, address)

def find_here(host, *args, **options):
    if host not in local:
        raise socket.gaierror("the network is closed")
    return getaddrinfo(host, *args, **options)

socket.socket.connect, socket.getaddrinfo = connect_here, find_here
"""
STOPPING = "stopping after this step, then saving (again: stop at once, unsaved)\n"

# Starts command lines, each in a fork, so that torch is imported only once for all of them.
TYPIST = """
import json, os, re, resource, runpy, shlex, signal, sys
import run, sample, torch._dynamo, torch._inductor.config, train

def prepare(folder, out, err):
    os.chdir(folder)
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

def obey(name, value):
    '''NAME=value before a command, as in a shell. Some of the names do more.'''
    os.environ[name] = value
    if name == "TERMINAL":  # its own, whose closing sends SIGHUP
        os.setsid()
        os.dup2(os.open(value, os.O_RDWR), 0)
    if name == "CXX":
        torch._inductor.config.cpp.cxx = (value,)
    if name == "NOHUP":
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if name == "ROW_PROCESSES":
        run.row_processes = lambda machine: int(value)
    if name == "PROJECT":  # a changed copy of this one
        for file in os.listdir(value):
            sys.modules.pop(file.split(".")[0], None)
        sys.path.insert(0, value)
        os.environ["SCRIPTS"] = value
    if name == "FILE_LIMIT":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(value), int(value)))
    if name == "MEMORY_LIMIT":  # beyond what is in use by now
        used = int(re.search("VmData:\\s+([0-9]+)", open("/proc/self/status").read())[1]) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (used + int(value), used + int(value)))

def type_in(line):
    words = shlex.split(line)
    while "=" in words[0]:
        obey(*words.pop(0).split("="))
    sys.argv = [os.path.join(os.environ["SCRIPTS"], words[0]), *words[1:]]
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ending:
        code = ending.code
    sys.stdout.flush()
    os._exit(code or 0)  # a normal exit of torch would take longer than all the rest

for request in sys.stdin:
    what, *rest = json.loads(request)
    if what == "start":
        answer = os.fork()
        if answer == 0:
            prepare(*rest[1:])
            type_in(rest[0])
    else:
        pid, status = os.waitpid(rest[0], os.WNOHANG)
        answer = os.waitstatus_to_exitcode(status) if pid else None
    print(json.dumps(answer), flush=True)
"""


# ---- helpers -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


def write_texts(folder: Path) -> Path:
    dice = random.Random(0)
    documents = []
    for _ in range(60):
        document = ""
        for i in range(dice.randint(5, 30)):
            name, argument = dice.choice("abcdef"), dice.choice("xyz")
            document += f"def {name}{i}({argument}): return {dice.randint(0, 999)}\n"
        documents.append(document)
    (folder / "text.txt").write_text("<|endoftext|>\n".join(documents))
    (folder / "older.txt").write_text("0123456789 " * 200)
    return folder


def start(folder: Path, command: str) -> subprocess.Popen:
    """Start Python with the words of `command` in `folder`."""
    files = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    words = [sys.executable, *shlex.split(command)]
    process = subprocess.Popen(words, cwd=folder, stdout=files[0], stderr=files[1])
    process.files = files
    return process


class Typist:
    """A process that starts command lines."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", TYPIST],
            env={**os.environ, "SCRIPTS": str(HERE)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, *request):
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def __call__(self, folder: Path, command: str) -> Result:
        return finish(Started(self, folder, command))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()


class Started:
    """A command that a typist has started, used like a Popen. `shown`: where its output goes."""

    def __init__(self, typist: Typist, folder: Path, command: str, shown: str = ""):
        self.typist = typist
        self.files = tempfile.NamedTemporaryFile(), tempfile.NamedTemporaryFile()
        places = [shown or file.name for file in self.files]
        self.returncode = None
        self.pid = typist.ask("start", command, str(folder), *places)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.typist.ask("poll", self.pid)
        return self.returncode

    def wait(self, seconds: float = 600) -> None:
        end = time.monotonic() + seconds
        while self.poll() is None:
            assert time.monotonic() < end, "the command does not end"
            time.sleep(0.005)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def wait_for(process: subprocess.Popen | Started, ready) -> None:
    """Wait until standard output contains the text `ready`, or until `ready()` is true."""
    end = time.monotonic() + 600
    while process.poll() is None and time.monotonic() < end:
        shown = os.pread(process.files[0].fileno(), 1 << 20, 0).decode(errors="replace")
        if ready in shown if isinstance(ready, str) else ready():
            return
        time.sleep(0.01)
    raise AssertionError(finish(process))


def finish(process: subprocess.Popen | Started) -> Result:
    try:
        process.wait(600)
    finally:
        process.kill()
        process.wait()
    for file in process.files:
        file.seek(0)
    out, err = (file.read().decode(errors="replace") for file in process.files)
    return Result(process.returncode, out, err)


def train_here(*flags: str) -> None:
    """Train a tiny model in this process. Each argument may hold several flags."""
    train.main(" ".join([TINY, *flags]).split())


def resume_here(*flags: str, folder: str = "out/clm") -> None:
    train.main(f"--out_dir={folder} --init_from=resume {' '.join(flags)}".split())


def works(result: Result) -> None:
    assert result.code == 0 and "Traceback" not in result.err, result


def refused(result: Result, *words: str) -> None:
    """Check for exit code 1 and a single error line that contains all the words."""
    lines = result.err.strip().splitlines()
    assert result.code == 1 and len(lines) == 1 and lines[0].startswith("error: "), result
    for word in words:
        assert word in lines[0], (word, lines[0])


def log_of(folder) -> list[dict]:
    return [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]


def losses(folder) -> list[float]:
    return [line["loss"] for line in log_of(folder) if "loss" in line]


def evaluations(folder) -> list[dict]:
    return [line for line in log_of(folder) if "val_loss" in line]


def weights_and_optimizers(folder) -> list:
    state = load_checkpoint(Path(folder, "ckpt.pt"))
    return leaves([state["model"], state["optimizers"], state["step"]])


def change_checkpoint(folder, part: str | None = None, **values) -> None:
    """Forge some values of a checkpoint or of one of its parts."""
    path = Path(folder, "ckpt.pt")
    state = load_checkpoint(path)
    save_checkpoint(path, state | ({part: state[part] | values} if part else values))


def everything_in(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="session", autouse=True)
def closed_network(tmp_path_factory):
    """Processes reach only this machine, see no GPU and use one thread, as this process does."""
    guard = tmp_path_factory.mktemp("guard")
    (guard / "sitecustomize.py").write_text(GUARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(guard), str(HERE)]))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("RUST_BACKTRACE", "0")
        patch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
        for name in ("RANK", "WORLD_SIZE", "PYTHONOPTIMIZE"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session")
def typed(closed_network):
    """typed(folder, command line) -> Result"""
    with Typist() as typist:
        yield typist


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """This process's working directory, with nothing in it but a corpus and an older corpus."""
    monkeypatch.chdir(tmp_path)
    return write_texts(tmp_path)


@pytest.fixture(scope="session")
def trained(typed, tmp_path_factory) -> Path:
    """A folder with the run out/clm, which has a previous checkpoint, and what it printed."""
    folder = write_texts(tmp_path_factory.mktemp("trained"))
    clm = typed(folder, f"train.py {TINY} --eval_every=5 --save_every=10")
    works(clm)
    (folder / "printed").write_text(clm.out)
    return folder


@pytest.fixture
def copied(trained, tmp_path, monkeypatch) -> Path:
    """A copy of `trained` that may be changed; also this process's working directory."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- training ----------------------------------------------------------------------------------


def test_muon_updates_the_matrices_of_blocks_and_adamw_all_else():
    rates = dict(lr=1.0, lr_embed=2.0, lr_unembed=3.0, lr_binary=4.0)
    config = TrainConfig(**rates)
    for name in ("electra", "nsp", "mtp"):
        model = Transformer(with_heads(ModelConfig(), parse_mixture(name), Knobs()))
        adamw, muon = make_optimizers(model, config, torch.float32, compile=False)
        by_muon = {id(p) for group in muon.param_groups for p in group["params"]}
        rate_of = {id(p): g["lr"] for g in all_groups([adamw, muon]) for p in g["params"]}
        for path, p in model.named_parameters():
            if path.startswith(("embed_tokens", "short_conv", "second_text")) or "norm" in path:
                expected = "lr_embed"
            elif path == "lm_head.weight":
                expected = "lr_unembed"
            elif path.startswith(("pair_head", "detect_head")):
                expected = "lr_binary"
            else:
                expected = "lr"
                assert p.ndim == 2
            assert rate_of[id(p)] == rates[expected], path
            assert (id(p) in by_muon) == (expected == "lr"), path


@pytest.mark.parametrize(
    "decay_frac, scales",
    [
        (0.0, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (0.5, [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]),
    ],
)
def test_learning_rates_rise_stay_and_fall(decay_frac, scales):
    at_once = TrainConfig(max_steps=8, warmup_steps=0, decay_frac=decay_frac)
    assert learning_rate_scale(0, at_once) == 1.0
    config = TrainConfig(max_steps=8, warmup_steps=4, decay_frac=decay_frac)
    assert [learning_rate_scale(step, config) for step in range(8)] == pytest.approx(scales)


def test_muon_steps_along_orthogonal_matrices_by_their_rate():
    """The update is along Nesterov's mean of gradient and momentum. For a tall matrix, it is about
    sqrt(rows / columns) · lr · U Vᵀ; five Newton-Schulz steps bring singular values near 1."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(32, 16))
    start = p.detach().clone()
    muon = Muon([p], lr=0.1, weight_decay=0.5, dtype=torch.float32, compile=False)
    first, second = torch.randn(2, 32, 16)
    direction = [first, second.lerp((0.95 * 0.05 * first + 0.05 * second), 0.95)]
    for gradient, nesterov in zip([first, second], direction):
        p.grad = gradient.clone()
        muon.step()
        step = (start * (1 - 0.1 * 0.5) - p.detach()) / (0.1 * 2**0.5)
        U, _, Vt = torch.linalg.svd(nesterov, full_matrices=False)
        assert 0.6 < torch.linalg.svdvals(step).min() <= torch.linalg.svdvals(step).max() < 1.3
        assert F.cosine_similarity(step.flatten(), (U @ Vt).flatten(), dim=0) > 0.97
        start = p.detach().clone()


def test_speed_counts_what_was_read(folder):
    """Crops of stories fill half or 3/4 of a row; the rest is cut off and not counted."""
    train_here(
        "--objective=contrastive --data=stories:60 --block_size=128 --batch_size=8 --max_steps=3"
    )
    for line in log_of("out/contrastive"):
        if "loss" in line:
            n_read = line["tokens_per_s"] * line["ms"] / 1000
            assert n_read in (pytest.approx(8 * 64), pytest.approx(8 * 96))


def test_a_folder_may_be_called_like_the_built_in_text(folder):
    train_here("--data=stories:60 --out_dir=stories:60 --max_steps=1 --tokenizer=bytes")
    assert Path("stories:60/ckpt.pt").exists()


def test_a_model_is_trained_logged_evaluated_and_saved(trained):
    printed = (trained / "printed").read_text()
    speed = r"[\d.]+ ms \| [\d.]+k? tok/s \| eta \d+s"
    assert re.search(rf"(?m)^step 20/20 \| loss \d\.\d{{4}} \| lr 2\.0e-02 \| {speed}$", printed)
    assert re.search(r"(?m)^eval 20/20 \| val loss \d\.\d{4} nats, \d\.\d{3} bits", printed)
    assert "python sample.py --out_dir=out/clm" in printed

    run_folder = trained / "out/clm"
    steps = [line for line in log_of(run_folder) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 21))
    assert all(line.keys() >= {"lr", "ms", "tokens_per_s"} for line in steps)
    seen = evaluations(run_folder)
    assert [line["step"] for line in seen] == [5, 10, 15, 20]
    assert all(line.keys() >= {"bits_per_byte", "elapsed_s"} for line in seen)
    assert seen[-1]["val_loss"] < seen[0]["val_loss"] < math.log(576) + 0.1

    kept = {path.name for path in run_folder.iterdir()}
    assert kept == {"ckpt.pt", "previous.pt", "best.pt", "log.jsonl", ".run.lock"}
    assert load_checkpoint(run_folder / "ckpt.pt")["step"] == 20
    assert load_checkpoint(run_folder / "previous.pt")["step"] == 15
    assert not temporary_files(trained)


@pytest.mark.parametrize(
    "line",
    [
        r"device     cpu .* 1 thread; float32 matrix products; not compiled$",
        r"model      0\.05M parameters: layers 1, width 32, heads 1, ids 576 \(preset micro\)",
        r"data       text\.txt \(1 file",
        r"objective  clm: 100\.0% of the positions are predicted, 0\.0% are padding",
        r"run        20 steps of 4 rows of 32 positions, into out/clm",
    ],
)
def test_a_run_says_what_it_is(line, trained):
    assert re.search(f"(?m)^{line}", (trained / "printed").read_text())


def test_the_memory_of_a_container_bounds_what_is_free(monkeypatch):
    files = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   8000 kB\n"}
    monkeypatch.setattr(device, "_system_file", lambda path: files.get(path, ""))
    for limit, free in (("max\n", 8_192_000), ("5000\n", 5000), ("9999999999\n", 8_192_000)):
        files["/sys/fs/cgroup/memory.max"] = limit
        assert device.free_memory() == free
    files.clear()
    assert device.free_memory() == math.inf


def test_several_processes_on_one_mac_are_refused(monkeypatch):
    monkeypatch.setattr(device, "processes", lambda: (0, 2))
    monkeypatch.setattr(device, "find_device", lambda name: torch.device("mps"))
    with pytest.raises(UserError, match="start without torchrun"):
        Machine()


def test_a_gpu_without_native_bfloat16_gets_float32(monkeypatch):
    properties = {
        "is_available": True,
        "get_device_capability": (7, 5),
        "get_device_name": "Tesla T4",
        "set_device": None,
    }
    for name, value in properties.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    machine = Machine(None, None, None)
    assert machine.dtype == torch.float32 and machine.device.type == "cuda"
    assert "Tesla T4" in str(machine)


@pytest.mark.parametrize("asked", ["", "--compile=True"])
def test_a_compiler_error_ends_the_run_only_if_compile_was_asked_for(folder, monkeypatch, asked):
    """Otherwise the run goes on uncompiled, with the same losses as a run that never compiled."""
    from torch._dynamo.exc import TorchDynamoException

    def broken(run, batches):
        if run.machine.compile:
            gradients(run, batches[:1])
            raise TorchDynamoException("vr must not be None")
        assert not run.model.flex
        gradients(run, batches)

    def figures(folder):
        seen = [line for line in log_of(folder) if "lr" in line]
        return [{k: v for k, v in line.items() if k.startswith("loss")} for line in seen]

    flags = "--objective=clm,bart --max_steps=3 --grad_accum=2"
    train_here(f"{flags} --out_dir=eager")
    monkeypatch.setattr(device, "LONG_RUN", 3)
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    monkeypatch.setattr(Transformer, "compile_for_training", lambda m: setattr(m, "flex", True))
    gradients = train.compute_gradients
    monkeypatch.setattr(train, "compute_gradients", broken)
    try:
        if asked:
            with pytest.raises(UserError, match="torch.compile failed .vr must not be None"):
                train_here(f"{flags} {asked}")
        else:
            train_here(f"{flags} --out_dir=went_on")
            assert figures("went_on") == figures("eager")
            assert "loss_clm" in figures("eager")[0]
    finally:
        torch.compiler.set_stance("default")
        torch.use_deterministic_algorithms(False)


def test_a_cpu_compiles_long_runs():
    assert Machine("cpu", steps=10_000).compile
    assert not Machine("cpu", steps=10).compile
    assert not Machine("cpu", compile=False, steps=10_000).compile


@posix
def test_where_no_compiler_is_installed_a_long_run_says_so_and_goes_on(typed, folder):
    missing = f"CXX=missing TORCHINDUCTOR_CACHE_DIR={folder}/compiled"
    process = Started(typed, folder, f"{missing} train.py {TINY} --max_steps=9999")
    wait_for(process, "step 0002/")
    process.send_signal(signal.SIGTERM)
    result = finish(process)
    assert "\ncompile    failed, continuing without it (--compile=True says why)\n" in result.out
    assert result.err == STOPPING


@pytest.mark.parametrize("clip", [0, 0.01])
def test_each_step_has_its_own_rate_and_its_own_gradient_clipped(clip, folder):
    flags = f"{TINY} --grad_clip={clip} --max_steps=8 --warmup_steps=4 --decay_frac=0.5"
    run = Run(settle(shlex.split(flags)), Machine("cpu", "float32", compile=False))
    norms = []

    def look():
        gradients = [p.grad.flatten() for p in run.model.parameters() if p.grad is not None]
        norms.append(torch.cat(gradients).norm().item())

    run.optimizers[0].step = look  # and not a step
    for step in range(8):
        train.take_step(run, step)
        for group in all_groups(run.optimizers):
            expected = group["peak_lr"] * learning_rate_scale(step, run.config)
            assert group["lr"] == pytest.approx(expected)
        assert not any(p.grad is not None and p.grad.any() for p in run.model.parameters())
    assert norms == pytest.approx([0.01] * 8, rel=1e-3) if clip else min(norms) > 0.1


def test_figures_of_time_leave_out_evaluations_and_tell_what_is_left(folder, monkeypatch, capsys):
    """Here a step takes a second, and an evaluation 100. The rates are those of the steps."""

    def taking(seconds, function):
        def call(*args):
            clock[0] += seconds
            return function(*args)

        return call

    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(train, "evaluate", taking(100, train.evaluate))
    monkeypatch.setattr(Run, "training_batches", taking(1, Run.training_batches))
    train_here("--max_steps=6 --eval_every=2 --save_every=2")
    steps = [line for line in log_of("out/clm") if "lr" in line]
    assert [line["ms"] for line in steps] == pytest.approx([1000] * 6)
    assert [line["tokens_per_s"] for line in steps] == pytest.approx([4 * 32] * 6)
    assert [line["lr"] for line in steps] == pytest.approx([0.002 * n for n in range(1, 7)])
    printed = capsys.readouterr().out
    assert re.findall(r"eta (\S+)", printed) == ["5s", "4s", "3s", "2s", "1s", "0s"]
    assert [line["elapsed_s"] for line in evaluations("out/clm")] == [102, 204, 306]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_trains_on_rows_of_eight_tokens(name, folder, capsys):
    """The evaluation shows bits per byte only if the loss is a code length."""
    train_here(f"--objective={name} --block_size=8 --max_steps=2")
    [seen] = evaluations(f"out/{name}")
    line = f"eval 2/2 | val loss {seen['val_loss']:.4f} nats"
    a_code_length = name in ("clm", "prefix", "fim", "mtp", "diffusion")
    assert a_code_length == bool(OBJECTIVES[name].likelihood), "correct the list above"
    if a_code_length:
        line += f", {seen['bits_per_byte']:.3f} bits per byte"
    assert f"{line} " in capsys.readouterr().out


def test_figures_of_the_log_are_means_over_its_steps(folder):
    """True of the loss and of each mixture member's loss. A step's weight is its target count."""
    flags = "--objective=clm,bart --grad_accum=2 --max_steps=4"
    for every in (1, 4):
        train_here(f"{flags} --log_every={every} --out_dir=out/{every}")
    each = [line for line in log_of("out/1") if "loss" in line]
    [mean] = [line for line in log_of("out/4") if "loss" in line]
    run = Run(settle(shlex.split(f"{TINY} {flags}")), Machine("cpu", "float32", compile=False))
    targets = [sum(b.weights.sum().item() for b in run.training_batches(i)) for i in range(4)]
    expected = np.average([line["loss"] for line in each], weights=targets)
    assert mean["loss"] == pytest.approx(expected, abs=1e-5)
    assert expected != pytest.approx(np.mean([line["loss"] for line in each]), abs=1e-4)
    for name in ("loss_clm", "loss_bart"):
        seen = [line[name] for line in each if name in line]
        assert min(seen) <= mean[name] <= max(seen)
        assert mean[name] != pytest.approx(seen[-1], abs=2e-4)


def test_a_log_line_has_the_share_of_a_known_peak(folder, monkeypatch, capsys):
    monkeypatch.setattr(Machine, "peak_flops", lambda self: 1e12)
    train_here("--objective=clm --max_steps=1")
    [line] = [line for line in log_of("out/clm") if "mfu" in line]
    run = Run(settle(shlex.split(TINY)), Machine("cpu", "float32", compile=False))
    assert run.target_share == 1
    flops = run.model.flops_per_token(32, 1)
    assert line["mfu"] == pytest.approx(flops * line["tokens_per_s"] / 1e12)
    assert f" | mfu {line['mfu']:.1%} | " in capsys.readouterr().out


@pytest.mark.parametrize("first_step, log_every", [(0, 1), (0, 10), (8, 10)])
def test_the_time_of_compiling_is_not_that_of_a_step(first_step, log_every, folder, capsys):
    """Two steps compile: log lines about them have no time, and a line says how long they took."""
    flags = f"{TINY} --log_every={log_every}"
    run = Run(settle(shlex.split(flags)), Machine("cpu", "float32", compile=False))
    run.open_folder()
    run.machine.compile = True
    run.first_step = first_step
    run.meter.began -= 100
    lines = []
    for step in range(first_step, first_step + 3):
        train.take_step(run, step)
        train.after_step(run, step + 1)
        lines.append(capsys.readouterr().out)
    assert ["compiled   in 1m4" in line for line in lines] == [False, True, False]
    assert run.meter.steps == (0 if log_every == 1 else 1)
    logged = [line for line in log_of("out/clm") if "loss" in line]
    if log_every == 1:
        assert ["ms" in line for line in logged] == [False, False, True]
        assert [" ms | " in line for line in lines] == [False, False, True]
    elif first_step == 8:  # step 10
        assert len(logged) == 1 and "ms" not in logged[0]


def test_the_folder_is_locked_until_the_report_is_written(folder, monkeypatch):
    """By then Ctrl-C has its usual effect again: no step is left to finish."""
    refused = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def finish(run):
        assert all(signal.getsignal(number) == handler for number, handler in handlers.items())
        with pytest.raises(UserError, match="is in use by another run"), lock_folder("out/clm"):
            pass
        refused.append(run)

    monkeypatch.setattr(train, "finish", finish)
    train_here("--objective=clm --max_steps=1")
    assert len(refused) == 1


def test_adamw_does_not_decay_and_has_the_usual_betas():
    model = Transformer(ModelConfig(n_layer=1, n_embd=32))
    config = TrainConfig(weight_decay=0.1, lr=0.02, lr_binary=0.004)
    adamw, muon = make_optimizers(model, config, torch.float32, compile=False)
    assert all(
        (group["weight_decay"], group["betas"], group["eps"]) == (0, (0.9, 0.95), 1e-10)
        and group["fused"]  # one kernel for many parameters, also on a CPU
        for group in adamw.param_groups
    )
    assert muon.param_groups[0]["weight_decay"] == 0.1


def test_validation_rows_are_the_same_for_every_seed(folder):
    machine = Machine(device="cpu", dtype="float32", compile=False)
    runs = [Run(settle([*TINY.split(), f"--seed={seed}"]), machine) for seed in (1, 2)]
    first, second = (run.validation_batch(0).inputs for run in runs)
    assert torch.equal(first, second)
    assert not torch.equal(*(run.training_batches(0)[0].inputs for run in runs))
    assert not torch.equal(*(run.model.embed_tokens.weight for run in runs))


def test_memory_is_that_of_one_micro_batch(folder, monkeypatch):
    monkeypatch.setattr(run_file, "free_memory", lambda: 100e6)
    shape = ModelConfig(n_layer=2, n_embd=64)
    config = TrainConfig(batch_size=64, block_size=128)
    machine = Machine("cpu", "float32", False)
    with pytest.raises(UserError, match="a step needs about 0.1"):
        run_file.check_memory(shape, config, machine)
    run_file.check_memory(shape, dataclasses.replace(config, grad_accum=8), machine)


def test_processes_share_the_memory(folder, monkeypatch):
    """Each takes a part of the rows, but holds all of the weights."""
    shape = ModelConfig(n_layer=2, n_embd=64)
    machine = Machine("cpu", "float32", False)
    n_weights = sum(p.numel() for p in Transformer(shape).parameters())
    few_rows = TrainConfig(batch_size=2, block_size=8)
    monkeypatch.setattr(run_file, "free_memory", lambda: 24 * n_weights)
    run_file.check_memory(shape, few_rows, machine)
    monkeypatch.setattr(machine, "world", 2)
    with pytest.raises(UserError, match="a step needs about"):
        run_file.check_memory(shape, few_rows, machine)

    many_rows = TrainConfig(batch_size=64, block_size=128)
    monkeypatch.setattr(run_file, "free_memory", lambda: 100e6)
    with pytest.raises(UserError, match="a step needs about 0.1"):
        run_file.check_memory(shape, many_rows, machine)


@pytest.mark.parametrize("name, shown", [("clm", True), ("fim", False), ("prefix", False)])
def test_the_entropy_of_the_language_stands_beside_bits_of_whole_texts_only(
    name, shown, folder, capsys
):
    train_here(f"--objective={name} --data=stories:40 --max_steps=1")
    [line] = evaluations(f"out/{name}")
    assert ("entropy of the language" in capsys.readouterr().out) == shown
    assert ("floor_bits_per_byte" in line) == shown


def test_the_loss_of_the_log_is_the_one_that_a_step_minimizes():
    """Each part with its coefficient; a metric with coefficient 0 is only logged."""
    one = torch.tensor(1.0)
    parts = {
        "token_loss": Metric(6 * one, 2 * one, 1.0),
        "detect_loss": Metric(1 * one, 4 * one, 50.0),
        "detect_accuracy": Metric(3 * one, 4 * one),
    }
    meter = Meter()
    meter.add(parts)
    meter.add(parts)
    means = meter.means()
    assert means["loss"] == pytest.approx(3 + 50 / 4) == pytest.approx(total_loss(parts).item())
    assert means["detect_accuracy"] == 0.75


def test_a_loss_beside_others_is_shown():
    """The only one is left out, because it equals the loss."""
    means = {"loss": 3.0, "token_loss": 1.0, "detect_loss": 0.04, "replaced_share": 0.1}
    assert "token_loss 1.000 | detect_loss 0.040" in metrics_text(means)
    assert metrics_text({"token_loss": 1.0, "pair_loss": 0.5, "pair_accuracy": 0.5}) != ""
    only = {"contrastive_loss": 3.0, "retrieval_accuracy": 0.5}
    assert metrics_text(only) == " | retrieval_accuracy 0.500"
    assert "replaced_share" not in metrics_text(means)


def test_durations_of_minutes_and_hours():
    assert [duration(s) for s in (5, 61, 3599.6, 3661, 7325)] == [
        *("5s", "1m01s", "1h00m", "1h01m", "2h02m")
    ]


def train_config_of(*flags) -> TrainConfig:
    return settle(["--device=cpu", *flags]).train


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("preset", PRESETS)
def test_defaults_are_those_of_the_preset_and_of_the_objective(name, preset):
    """Pairs and crops: k times the rows, each 1/k as long, so a step reads as many positions."""
    config = train_config_of(f"--objective={name}", f"--preset={preset}")
    of_preset, own = PRESETS[preset], OBJECTIVES[name]
    assert config.batch_size == of_preset["batch_size"] * own.split_rows
    assert config.block_size * own.split_rows == of_preset["block_size"]
    assert (config.lr, config.lr_binary) == (own.lr, own.lr_binary)
    assert config.max_steps == round(of_preset["max_steps"] * own.steps)
    assert config.lr_unembed == of_preset["lr_unembed"]


def test_a_cpu_gets_the_preset_micro_on_a_machine_with_a_gpu_too(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert train_config_of().preset == "micro"
    assert settle([]).train.preset == "small"


def test_what_the_results_were_measured_with_are_the_defaults():
    """A change here makes the numbers of RESULTS.md those of another program."""
    config = train_config_of()
    rates = (config.lr_embed, config.warmup_steps, config.decay_frac, config.weight_decay)
    assert rates == (0.01, 10, 0.7, 0.0) and config.grad_clip == 1.0
    own = {name: (o.steps, o.lr, o.lr_binary) for name, o in OBJECTIVES.items()}
    assert own["nsp"] == (1.2, 0.01, 0.004) and own["electra"] == (0.75, 0.02, 0.012)
    assert own["diffusion"] == (1.1, 0.014, 0.004) and own["clm"] == (0.4, 0.02, 0.004)
    steps = {name: objective.steps for name, objective in OBJECTIVES.items()}
    assert (steps["fim"], steps["span"], steps["ul2"], steps["mlm"]) == (0.95, 0.9, 1.05, 1.05)
    assert Knobs().mask_warmup == 0.6


def test_products_are_in_the_dtype_that_was_asked_for():
    a, b = torch.ones(2, 8, 8)
    for dtype in (torch.float32, torch.bfloat16):
        with Machine("cpu", str(dtype).removeprefix("torch.")).autocast():
            assert (a @ b).dtype == dtype


@pytest.mark.parametrize(
    "flags, dtype",
    [
        ("avx2 avx512f avx512bw", "float32"),
        ("avx512f avx512_bf16", "bfloat16"),
        ("avx2 amx_bf16", "bfloat16"),
        ("", "float32"),
    ],
)
def test_a_cpu_without_native_bfloat16_gets_float32(flags, dtype, monkeypatch):
    monkeypatch.setattr(device, "_system_file", lambda path: f"flags : {flags}\n")
    assert Machine("cpu").dtype == getattr(torch, dtype)


def a_gpu(monkeypatch):
    properties = {
        "is_available": True,
        "get_device_capability": (9, 0),
        "set_device": None,
        "get_device_name": "NVIDIA H100",
    }
    for name, value in properties.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)


def test_each_process_of_torchrun_has_its_own_gpu(monkeypatch):
    a_gpu(monkeypatch)
    found = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "3",
        "MASTER_ADDR": "",
        "MASTER_PORT": "",
    }
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    for asked in (None, "cuda"):
        machine = Machine(asked, None, None)
        assert str(machine.device) == "cuda:3" and (machine.rank, machine.world) == (3, 4)
    assert str(Machine("cuda:1", None, None).device) == "cuda:1"


# ---- rows that other processes make -----------------------------------------------------------


def same_batches(got: list, want: list) -> bool:
    """Whether all fields are equal, dtypes included."""
    fields = [(vars(a), vars(b)) for a, b in zip(got, want, strict=True)]
    pairs = [(a[name], b[name]) for a, b in fields for name in {*a, *b}]
    return all(
        torch.equal(x, y) and x.dtype == y.dtype if torch.is_tensor(x) else x == y for x, y in pairs
    )


@pytest.mark.parametrize("flags", ["--objective=clm,bart --grad_accum=2", "--objective=electra"])
@posix
def test_rows_made_ahead_are_the_rows_of_the_steps(folder, flags, monkeypatch):
    """By two other processes, which Ctrl-C reaches too: they go on until the run ends them."""
    monkeypatch.setattr(run_file, "row_processes", lambda machine: 2)
    run = Run(settle(shlex.split(f"{TINY} {flags}")), Machine("cpu", "float32", compile=False))
    run.first_step = 3
    random_state = torch.get_rng_state()
    with run.rows_made_ahead():
        children = multiprocessing.active_children()
        assert len(children) == 2
        for step in range(3, 20):
            if step == 5:
                for child in children:
                    os.kill(child.pid, signal.SIGINT)
                    os.kill(child.pid, signal.SIGTERM)
            assert same_batches(run.training_batches(step), run.draw_batches(step))
    assert not multiprocessing.active_children()
    assert torch.equal(torch.get_rng_state(), random_state)
    with run.rows_made_ahead():
        run.training_batches(3)  # a run that is stopped takes no more steps
    assert not multiprocessing.active_children()
    assert same_batches(run.training_batches(3), run.draw_batches(3))


@linux
def test_processes_that_make_rows_end_with_a_run_that_is_killed(typed, folder):
    """They would hold its folder's lock. Their rows are larger than what fits into a pipe."""
    flags = f"{TINY} {FOREVER} --batch_size=64 --block_size=512"
    process = Started(typed, folder, f"ROW_PROCESSES=2 train.py {flags}")
    wait_for(process, "\nstep ")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    assert len(children) == 2
    end = time.monotonic() + 60
    while any(Path("/proc", child).exists() for child in children) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(Path("/proc", child).exists() for child in children)


@posix
def test_a_run_whose_rows_are_made_ahead_is_the_same_run(folder, monkeypatch):
    flags = "--objective=span --max_steps=5 --save_every=3"
    train_here(f"{flags} --out_dir=here")
    monkeypatch.setattr(run_file, "row_processes", lambda machine: 2)
    train_here(f"{flags} --out_dir=ahead")
    losses = [[line["loss"] for line in log_of(name) if "lr" in line] for name in ("here", "ahead")]
    assert losses[0] == losses[1] and len(losses[0]) == 5


@pytest.mark.parametrize(
    "device, world, methods, expected",
    [
        ("cpu", 1, ["fork"], 0),
        ("mps", 1, ["fork", "spawn"], 0),
        ("cuda", 1, ["fork", "spawn"], 8),
        ("cuda", 4, ["fork", "spawn"], 3),
        ("cuda", 64, ["fork", "spawn"], 1),
        ("cuda", 1, ["spawn"], 0),
    ],
)
def test_a_gpu_gets_its_rows_from_half_of_the_cores(device, world, methods, expected, monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: methods)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(24), raising=False)
    machine = SimpleNamespace(device=torch.device(device), world=world)
    assert run_file.row_processes(machine) == expected


def printed_figures(name: str, capsys) -> str:
    """The line of the only evaluation of a run of two steps."""
    train_here(f"--objective={name} --max_steps=2 --out_dir=out/x --overwrite")
    lines = capsys.readouterr().out.splitlines()
    return next(line for line in lines if line.startswith("eval"))


def test_figures_come_with_what_guessing_would_reach(folder, capsys):
    line = printed_figures("electra", capsys)
    always_original = evaluations("out/x")[0]["detect_accuracy_baseline"]
    replaced = evaluations("out/x")[0]["replaced_share"]  # not shown: it is 1 - guessing
    assert replaced == pytest.approx(1 - always_original, abs=1e-6)
    assert 0.8 < always_original < 1 and f"(guessing: {always_original:.3f})" in line
    assert re.search(r"pair_accuracy \d\.\d+ \(guessing: 0\.500\)", printed_figures("nsp", capsys))
    line = printed_figures("mtp", capsys)
    assert "future_loss" in line and "loss_2" not in line  # it is in log.jsonl only
    assert "loss_2" in evaluations("out/x")[0]
    line = printed_figures("contrastive", capsys)
    assert re.search(r"retrieval_accuracy \d\.\d+ \(guessing: 0\.125\)", line)  # of 8 rows


def test_tokens_and_epochs_stand_beside_the_steps(folder, capsys):
    (folder / "text.txt").write_text("abcdefgh" * 128)  # and an EOT: 974 + 51 tokens
    train_here("--max_steps=32")
    assert re.search(r"\| 4\.1k tokens, 4\.2 epochs, \d+s$", capsys.readouterr().out, re.M)
    [line] = evaluations("out/clm")
    assert line["tokens"] == 32 * 4 * 32 and line["epochs"] == pytest.approx(4096 / 974)


def test_the_best_weights_are_kept_and_an_evaluation_says_that_they_were_better(folder, capsys):
    """On random letters, nothing learned from the training text helps on validation text."""
    dice = random.Random(1)
    (folder / "text.txt").write_text("".join(dice.choices("abcdefgh", k=500)))
    train_here("--max_steps=100 --eval_every=25 --batch_size=16 --log_every=50 --eval_rows=16")
    seen = evaluations("out/clm")
    best = min(seen, key=lambda line: line["val_loss"])
    assert best["step"] < 100 and best["val_loss"] < seen[-1]["val_loss"] - 0.1
    printed = capsys.readouterr().out
    assert f"| best.pt has {best['val_loss']:.4f}\n" in printed
    better = f"Better: --out_dir=out/clm/best.pt, whose validation loss is {best['val_loss']:.4f}."
    assert best["val_loss"] < 0.95 * seen[-1]["val_loss"] and better in printed

    kept = load_checkpoint("out/clm/best.pt")
    assert kept["step"] == best["step"] and kept["best_val_loss"] == best["val_loss"]
    assert sample.load("out/clm/best.pt").generate("a", max_new_tokens=1)
    train_here("--init_from=out/clm/best.pt --out_dir=out/again --max_steps=1")
    printed = capsys.readouterr().out
    assert "best.pt has" not in printed and "Better:" not in printed
    train_here("--init_from=resume --max_steps=101 --eval_rows=16")
    assert f"| best.pt has {best['val_loss']:.4f}\n" in capsys.readouterr().out
    assert load_checkpoint("out/clm/best.pt")["step"] == best["step"]
    # With other validation rows, the earlier best loss is not comparable.
    train_here("--init_from=resume --max_steps=102 --eval_rows=8")
    assert load_checkpoint("out/clm/best.pt")["step"] == 102
    assert load_checkpoint("out/clm/best-before-101.pt")["step"] == best["step"]


def test_no_best_is_claimed_that_is_not_there(copied, capsys):
    """A resumed run set best.pt aside, and was killed before it saved a better one."""
    os.replace("out/clm/best.pt", "out/clm/best-before-20.pt")
    resume_here("--max_steps=21")
    assert "best.pt has" not in capsys.readouterr().out and Path("out/clm/best.pt").exists()
    os.remove("out/clm/best.pt")
    with pytest.raises(UserError, match="best.pt does not exist; name another one: .*ckpt.pt"):
        sample.load("out/clm/best.pt")


def test_a_run_that_is_only_left_as_previous_is_not_lost(copied):
    os.remove("out/clm/best.pt")
    os.replace("out/clm/ckpt.pt", "out/clm/previous.pt")
    with pytest.raises(UserError, match="already holds a run \\(previous.pt\\)"):
        train_here()
    os.replace("out/clm/previous.pt", "out/clm/best-before-20.pt")
    with pytest.raises(UserError, match="already holds a run \\(best-before"):
        train_here()
    with pytest.raises(UserError, match="cp out/clm/best-before-20.pt out/clm/ckpt.pt"):
        resume_here()


def test_a_resumed_run_says_that_its_text_has_changed(copied, capsys):
    resume_here("--max_steps=21 --data=text.txt")
    assert "epochs are counted anew" not in capsys.readouterr().out
    with open("text.txt", "a") as f:
        f.write("one more line\n")
    resume_here("--max_steps=22 --data=text.txt")
    assert "text       is not the checkpoint's: epochs are counted anew" in capsys.readouterr().out


def test_epochs_count_the_text_that_rows_show(folder):
    """Rows of bart hold their text twice, rows of nsp have padding, rows of contrastive hold two
    crops of 5% to 50%; rows of clm are full."""
    (folder / "text.txt").write_text("A cat ran. It hid. It ate.\n<|endoftext|>\n" * 100)
    epochs = {}
    for name in ("clm", "bart", "nsp", "contrastive"):
        train_here(f"--objective={name} --out_dir=out/{name} --max_steps=1 --block_size=16")
        [line] = evaluations(f"out/{name}")
        epochs[name] = line["epochs"]
    assert 0.3 < epochs["bart"] / epochs["clm"] < 0.6
    assert 0.3 < epochs["nsp"] / epochs["clm"] < 1.0
    assert 0.4 < epochs["contrastive"] / epochs["clm"] < 0.65


def test_held_out_text_that_says_little_is_pointed_out(folder, capsys):
    (folder / "text.txt").write_text("A cat ran. It hid. It ate.\n" * 20)
    train_here("--max_steps=1")
    assert "fewer tokens are held out than a row has" in capsys.readouterr().out


def test_an_evaluation_leaves_no_decoder_in_memory(folder, monkeypatch):
    """On a GPU, each decoder would hold another copy of the weights."""

    def count(run):
        left.append(sum(type(thing) is sample.Decoder for thing in gc.get_objects()))

    left = []
    monkeypatch.setattr(train, "finish", count)
    gc.collect()
    gc.disable()
    try:
        train_here("--max_steps=3 --eval_every=1")
    finally:
        gc.enable()
    assert left == [0]


def test_one_seed_gives_one_run_and_evaluating_changes_nothing(trained, folder):
    """The run `trained` evaluates four times as often, in a process of its own."""
    train_here("--eval_every=20")
    assert losses("out/clm") == losses(trained / "out/clm")
    assert weights_and_optimizers("out/clm") == weights_and_optimizers(trained / "out/clm")
    last = evaluations(trained / "out/clm")[-1]
    assert evaluations("out/clm")[0]["val_loss"] == last["val_loss"]
    train_here("--seed=2 --out_dir=other")
    assert not set(losses("other")) & set(losses(trained / "out/clm"))


@pytest.mark.parametrize(
    "objective",
    [
        "clm:0.5,span:0.5 --lr_unembed=0",
        "contrastive",
        "nsp --lr_unembed=0 --lr_binary=0",
        "diffusion --lr_unembed=0",
    ],
)
def test_validation_loss_depends_on_the_weights_and_rows_alone(objective, copied):
    """Not on the batch size or on grad_accum. (For processes, see "several processes" below.)"""
    seen = []
    still = "--lr=0 --lr_embed=0 --max_steps=1 --eval_rows=37"
    for shape in ("--batch_size=2", "--batch_size=32", "--batch_size=8 --grad_accum=4"):
        train_here(f"--objective={objective} --init_from=out/clm --out_dir=out/x", still, shape)
        seen.append(evaluations("out/x")[0]["val_loss"])
        shutil.rmtree("out/x")
    assert seen[0] > 0 and seen == [seen[0]] * 3


@pytest.mark.parametrize("objective", ["bart,clm", "nsp"])
def test_parts_of_a_step_add_up_to_the_step(objective, folder):
    """bart and clm differ in targets per row, so micro-batches are weighted by their targets. nsp
    also has a loss for each row."""
    flags = f"--objective={objective} --max_steps=5"
    for parts in (1, 4):
        train_here(f"{flags} --grad_accum={parts} --out_dir=out/{parts}")
    assert np.allclose(losses("out/1"), losses("out/4"), atol=1e-4)


# ---- from one run to another -------------------------------------------------------------------


def test_another_objective_starts_from_a_checkpoint_and_replays_an_older_corpus(copied, capsys):
    train_here(
        "--objective=sop --init_from=out/clm --replay_data=older.txt --replay_rate=0.5",
        "--lr=0 --lr_embed=0 --max_steps=2",
    )
    printed = capsys.readouterr().out
    assert "weights    from out/clm (clm, 20 steps)" in printed
    assert "weights    new here: pair_head" in printed
    assert "50% of the rows from older.txt" in printed
    before = load_checkpoint("out/clm/ckpt.pt")["model"]
    state = load_checkpoint("out/sop/ckpt.pt")
    after = state["model"]
    assert state["model_config"]["separator"] == Tokenizer.from_json(state["tokenizer"]).SEP
    assert all(torch.equal(weight, after[name]) for name, weight in before.items() if "mlp" in name)


def test_replayed_rows_are_no_epochs_of_the_new_text(folder):
    train_here("--objective=clm --max_steps=20 --out_dir=out/new")
    train_here("--objective=clm --max_steps=20 --replay_data=older.txt --replay_rate=0.75")
    alone, beside = (evaluations(f"out/{name}")[-1]["epochs"] for name in ("new", "clm"))
    assert beside == pytest.approx(alone / 4)


def test_a_mixture_answers_by_the_member_that_can(folder):
    train_here("--objective=fim,ul2 --max_steps=1 --out_dir=out/both")
    trained = sample.load("out/both")
    assert "fills" not in trained.ask("infill", "a", "b")[0].details  # fim answers
    assert len(trained.ask("infill", "a", "b", mode="X")[0].details["fills"]) == 1
    assert len(trained.ask("infill", "a[MASK]b[MASK]")[0].details["fills"]) == 2
    with pytest.raises(UserError, match="--steps does not apply to --task=infill"):
        trained.ask("infill", "a", "b", steps=2)


def test_documents_of_one_token_make_no_row(folder):
    Path("letters.jsonl").write_text('{"text": "a"}\n' * 200)
    with pytest.raises(UserError, match="no document is long enough for a row"):
        train_here("--objective=bart --data=letters.jsonl --max_steps=1")


def test_held_out_text_of_one_document_cannot_be_compared(folder):
    """Each crop would be the only candidate for itself."""
    documents = (folder / "text.txt").read_text().split("<|endoftext|>\n")[:20]
    (folder / "text.txt").write_text("<|endoftext|>\n".join(documents))
    with pytest.raises(UserError, match="contrastive needs two documents or more"):
        train_here("--objective=contrastive --max_steps=1")


def test_errors_of_a_replayed_text_name_its_flag(folder):
    Path("letters.jsonl").write_text('{"text": "a"}\n' * 40)
    wrong = {"nope": "=nope does not exist", "letters.jsonl": ": no document has two tokens"}
    for data, words in wrong.items():
        with pytest.raises(UserError, match=f"^--replay_data{words}"):
            train_here(f"--objective=nsp --max_steps=1 --replay_data={data}")


def test_half_of_the_rows_are_the_replayed_ones(folder):
    new, old = (load_tokens(DataConfig(data=name)) for name in ("text.txt", "older.txt"))
    eot = new.tok.EOT
    text, old_text = Text(new.train, eot), Text(old.train, eot)
    source = Source({"clm": 1.0}, text, new.tok, 32, Knobs(), 1, old_text, replay_rate=0.5)
    digits = 0
    for number in range(400):
        row, _ = draw_row(source, TRAIN, 0, number, 400)
        digits += set(row.inputs) <= set(b"0123456789 ")
    assert 0.4 < digits / 400 < 0.6


def test_a_runs_folder_may_have_the_name_of_a_checkpoint(copied):
    os.rename("out/clm", "out/v1.pt")
    assert sample.load("out/v1.pt").generate("a", max_new_tokens=1)


def test_new_heads_of_any_size_start_from_any_checkpoint(copied, capsys):
    one = "--max_steps=1"
    train_here(one, "--objective=mtp --n_future=2 --mtp_heads=chain --init_from=out/clm")
    capsys.readouterr()
    train_here(
        one, "--objective=mtp --n_future=3 --mtp_heads=parallel --init_from=out/mtp --overwrite"
    )
    assert "weights    new here: future.0, future.1\n" in capsys.readouterr().out
    train_here(one, "--objective=clm --init_from=out/mtp/ckpt.pt --out_dir=out/again")
    assert "weights    left behind: future.0, future.1\n" in capsys.readouterr().out
    train_here(
        one,
        "--objective=mtp --n_future=4 --init_from=out/mtp",  # parallel heads, as before
        "--out_dir=out/four",
    )
    assert "weights    new here: future.2\n" in capsys.readouterr().out
    again, before = (load_checkpoint(f"out/{name}/ckpt.pt")["model"] for name in ("again", "clm"))
    assert again.keys() == before.keys()
    train_here(one, "--objective=electra --generator_frac=0.5 --init_from=out/clm --out_dir=out/e")
    capsys.readouterr()
    train_here(one, "--objective=electra --init_from=out/e --out_dir=out/e2")  # as wide as before
    assert "new here" not in capsys.readouterr().out


@pytest.mark.parametrize("heads", ["linear", "parallel", "chain"])
def test_a_frozen_trunk_stays_bit_identical_while_its_new_heads_learn(heads, copied):
    train_here(
        f"--max_steps=2 --objective=mtp --mtp_heads={heads} --init_from=out/clm --freeze_trunk"
    )
    after = load_checkpoint("out/mtp/ckpt.pt")["model"]
    for name, weight in load_checkpoint("out/clm/ckpt.pt")["model"].items():
        assert torch.equal(weight, after[name]), name
    new = [w for name, w in after.items() if re.match(r"future.*(linear|down_proj)", name)]
    assert new and all(weight.any() for weight in new)  # they began at zero


def test_a_frozen_trunk_includes_the_vector_that_marks_a_second_text(copied):
    train_here("--max_steps=2 --objective=sop --init_from=out/clm --freeze_trunk")
    after = load_checkpoint("out/sop/ckpt.pt")["model"]
    assert not after["second_text"].any() and after["pair_head.out.weight"].any()


def test_an_unembedding_that_was_never_trained_is_named(copied, capsys):
    train_here("--max_steps=1 --objective=contrastive")
    train_here("--max_steps=1 --objective=electra --init_from=out/contrastive")
    line = "weights    lm_head was not trained by contrastive"
    assert line not in capsys.readouterr().out
    train_here("--max_steps=1 --objective=mlm --init_from=out/contrastive")
    assert line in capsys.readouterr().out


def test_a_run_that_starts_from_another_carries_its_text(copied, capsys):
    flags = " ".join(word for word in TINY.split() if not word.startswith("--data"))
    train.main(f"{flags} --objective=mlm --init_from=out/clm --max_steps=1".split())
    assert "data       text.txt (1 file" in capsys.readouterr().out
    assert load_checkpoint("out/mlm/ckpt.pt")["data_config"]["data"] == "text.txt"


def test_a_second_run_in_the_same_folder_is_refused_unless_it_is_to_replace_it(copied):
    before = everything_in(copied)
    for flags in ("", "--init_from=out/clm", "--init_from=out/clm/best.pt"):
        with pytest.raises(UserError, match="out/clm already holds a run") as refusal:
            train_here(flags)
        for remedy in ("--init_from=resume", "--out_dir", "--overwrite"):
            assert remedy in str(refusal.value)
    assert everything_in(copied) == before
    train_here("--overwrite --max_steps=3")
    assert len(losses("out/clm")) == 3 and load_checkpoint("out/clm/previous.pt")["step"] == 20
    os.remove("out/clm/ckpt.pt")
    with pytest.raises(UserError, match="out/clm already holds a run .best.pt."):
        train_here("")
    assert load_checkpoint("out/clm/best.pt")


@pytest.mark.parametrize(
    "flags",
    [
        "--data=nowhere",
        "--block_size=100000",
        "--freeze_trunk",
        "--batch_size=3 --grad_accum=2",
        "--objective=fmi",
        "--lr=nan",
        "--tokenizer=gpt3",
        "--init_from=nowhere",
        "--init_from=resume",
    ],
)
def test_a_run_that_is_refused_leaves_no_folder(flags, folder):
    with pytest.raises(UserError):
        train_here(flags, "--out_dir=out/x")
    assert not (folder / "out").exists() and not temporary_files(folder)


def test_a_refused_run_leaves_the_one_before_as_it_was(copied):
    before = everything_in(copied / "out")
    for flags in ("--data=older.txt --block_size=100000", "--data=nowhere", "--init_from=nowhere"):
        with pytest.raises(UserError):
            train_here(flags, "--overwrite")
    assert everything_in(copied / "out") == before


@posix
def test_a_second_command_does_not_touch_a_training_that_runs(typed, folder):
    process = Started(typed, folder, f"train.py {TINY} {FOREVER} --save_every=1")
    wait_for(process, lambda: (folder / "out/clm/previous.pt").exists())
    with pytest.raises(UserError, match="data=typo does not exist"):
        train_here("--overwrite --data=typo")
    for flags in ("--overwrite", f"--init_from=resume {FOREVER}"):
        with pytest.raises(UserError, match="out/clm is in use by another run"):
            train_here(flags)
    process.send_signal(signal.SIGTERM)
    assert "stopped after step" in finish(process).out
    resume_here(f"--max_steps={load_checkpoint('out/clm/ckpt.pt')['step'] + 1}")


def test_a_resumed_run_keeps_the_flags_of_its_first_part(copied):
    own = dict(
        **dict(batch_size=6, grad_accum=3, max_steps=77, eval_rows=9, block_size=16, seed=7),
        **dict(lr=0.003, lr_embed=0.004, lr_unembed=0.005, lr_binary=0.006, weight_decay=0.1),
        **dict(warmup_steps=3, decay_frac=0.3, grad_clip=0.5, freeze_trunk=True),
        **dict(replay_data="older.txt", replay_rate=0.2, log_every=3, eval_every=5, save_every=11),
        **dict(steps_before=5, positions_before=6, epochs_before=0.7),
        **dict(dtype="bfloat16", compile=False, device="cpu"),
    )
    change_checkpoint("out/clm", "train_config", **own)
    resumed = vars(settle(["--init_from=resume", "--out_dir=out/clm"]).train)
    assert own.items() <= resumed.items()
    others = {"objective", "preset", "out_dir", "overwrite", "init_from"}
    assert resumed.keys() == own.keys() | others, "add the new flag"


def test_a_resumed_run_takes_the_rates_of_its_flags(copied):
    settings = settle(["--out_dir=out/clm", "--init_from=resume", "--max_steps=30", "--lr=0.005"])
    run = Run(settings, Machine(device="cpu", dtype="float32", compile=False))
    assert run.optimizers[1].param_groups[0]["peak_lr"] == 0.005


def test_a_run_that_starts_from_another_reads_bytes_that_are_not_utf8_as_that_did(copied):
    change_checkpoint("out/clm", "data_config", invalid_utf8="refuse")
    assert settle(["--init_from=out/clm", "--objective=mlm"]).data.invalid_utf8 == "refuse"


@pytest.mark.parametrize("flag", ["--block_size=16", "--data=other.txt"])
def test_a_best_loss_of_other_rows_is_not_kept(flag, copied):
    Path("other.txt").write_text("A dog sat. It slept. It woke.\n" * 300)
    change_checkpoint("out/clm", best_val_loss=0.001)
    resume_here("--max_steps=21", flag)
    assert load_checkpoint("out/clm/ckpt.pt")["best_val_loss"] > 0.01
    assert load_checkpoint("out/clm/best.pt")["step"] == 21
    assert Path("out/clm/best-before-20.pt").exists()


def test_the_time_of_a_resumed_run_goes_on(copied):
    change_checkpoint("out/clm", elapsed_s=5000.0)
    resume_here("--max_steps=21")
    assert evaluations("out/clm")[-1]["elapsed_s"] > 5000
    assert load_checkpoint("out/clm/ckpt.pt")["elapsed_s"] > 5000


def test_a_run_that_replaces_another_does_not_keep_its_best(copied):
    """Files with names of the user's own stay."""
    for name in ("best-before-9.pt", "best-of-all.pt"):
        Path("out/clm", name).touch()
    flags = [*TINY.split(), "--out_dir=out/clm", "--objective=mlm", "--overwrite"]
    machine = Machine(device="cpu", dtype="float32", compile=False)
    run = Run(settle(flags), machine)
    run.open_folder()
    assert {path.name for path in Path("out/clm").glob("*.pt")} == {"best-of-all.pt", "previous.pt"}


# ---- stopping and resuming ---------------------------------------------------------------------

MIXTURE = "clm:0.5,fim:0.3,ul2:0.2"
REPLAY = "clm --replay_data=older.txt --replay_rate=0.4 --grad_accum=2 --decay_frac=0.7"


@pytest.mark.parametrize("objective", [*OBJECTIVES, MIXTURE, REPLAY])
def test_resume_four_steps_and_four_more_are_eight_bit_by_bit(objective, folder, capsys):
    train_here(f"--objective={objective} --out_dir=whole --max_steps=8")
    stopped = "decay_frac" in objective or objective == "diffusion"
    if stopped:  # its schedules depend on max_steps
        train_and_stop(4, f"--objective={objective} --out_dir=parts --max_steps=8")
    else:
        train_here(f"--objective={objective} --out_dir=parts --max_steps=4")
    capsys.readouterr()
    resume_here("--max_steps=8", folder="parts")
    longer = "" if stopped else " of 4, now with schedules for 8 steps"
    assert f"resumes    after step 4{longer}\n" in capsys.readouterr().out
    assert weights_and_optimizers("parts") == weights_and_optimizers("whole")
    assert losses("parts") == losses("whole")


def test_diffusion_warms_up_after_another_run_as_well(folder):
    """The warmup counts this run's own steps, not those of the run that it starts from. Validation
    rows have no warmup, so all validation losses are comparable."""
    train_here("--objective=clm --max_steps=40")
    settings = settle(
        shlex.split(f"{TINY} --objective=diffusion --init_from=out/clm --max_steps=50")
    )
    run = Run(settings, Machine(device="cpu", dtype="float32", compile=False))
    assert settings.train.steps_before == 40 and run.source.warmup == (40, 70)
    assert run.val_source.warmup == (0, 0)
    assert 0.4 < run.target_share < 0.6  # what is shown is true of most of the run
    hidden = [len(run.training_batches(step)[0].targets) for step in (0, 49)]
    assert 0 < 2 * hidden[0] < hidden[1]


def test_each_micro_batch_hides_about_as_much(folder):
    """t grows with the row number: adjacent rows alone would hide too little or too much."""
    flags = f"{TINY} --objective=diffusion --batch_size=64 --grad_accum=4 --mask_warmup=0"
    settings = settle(shlex.split(flags))
    run = Run(settings, Machine(device="cpu", dtype="float32", compile=False))
    batches = run.training_batches(0)
    hidden = [len(batch.targets) / batch.inputs.numel() for batch in batches]
    assert len(hidden) == 4 and all(0.35 < share < 0.65 for share in hidden)


def train_and_stop(step: int, flags: str) -> None:
    """Train in this process, and send it a SIGTERM during step `step`, counted from 1."""

    def call(run, number):
        if number == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return load(run, number)

    load = Run.training_batches
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ending:
        patch.setattr(Run, "training_batches", call)
        train_here(flags)
    assert ending.value.code == 128 + signal.SIGTERM


@posix
def test_a_signal_finishes_the_step_and_prints_the_command_that_goes_on(typed, trained, folder):
    folders = ["--out_dir=my run", "--cache_dir=my cache"]
    typed_folders = " ".join(map(shlex.quote, folders))
    process = Started(typed, folder, f"train.py {TINY} --eval_every=5 {typed_folders}")
    wait_for(process, "step 03/20")
    process.send_signal(signal.SIGINT)
    stopped = finish(process)
    assert stopped.code == 128 + signal.SIGINT
    assert stopped.err == STOPPING
    step, command = re.search(r"after step (\d+), saved. To resume: (.*)", stopped.out).groups()
    assert load_checkpoint("my run/ckpt.pt")["step"] == int(step) < 20
    assert "eta" not in stopped.out.splitlines()[-2]  # the last step's line
    python, script, *flags = shlex.split(command)
    assert (python, script) == ("python", "train.py")
    assert flags == ["--init_from=resume", *folders]
    train.main(flags)
    assert weights_and_optimizers("my run") == weights_and_optimizers(trained / "out/clm")
    assert losses("my run") == losses(trained / "out/clm")


@posix
def test_ctrl_c_saves_where_it_ends_the_reader_of_a_pipe_too(typed, folder):
    """In `python train.py 2>&1 | tee log.txt`, Ctrl-C also ends tee; the run is still saved."""
    os.mkfifo("pipe")
    process = Started(typed, folder, f"train.py {TINY} {FOREVER}", shown="pipe")
    with open("pipe") as shown:
        assert any(line.startswith("step 0000002/") for line in shown)
    process.send_signal(signal.SIGINT)
    assert finish(process).code == 128 + signal.SIGINT
    assert load_checkpoint("out/clm/ckpt.pt")["step"] >= 2


@linux
@pytest.mark.parametrize("nohup", [False, True])
def test_a_run_whose_terminal_is_closed_is_saved_and_with_nohup_goes_on(nohup, typed, folder):
    screen, terminal = os.openpty()
    name = os.ttyname(terminal)
    command = f"TERMINAL={name} {'NOHUP=1' * nohup} train.py {TINY} {FOREVER} --save_every=1"
    process = Started(typed, folder, command, shown=os.devnull if nohup else name)
    wait_for(process, lambda: (folder / "out/clm/previous.pt").exists())
    os.close(terminal)
    before = load_checkpoint("out/clm/ckpt.pt")["step"]
    os.close(screen)
    if nohup:
        wait_for(process, lambda: load_checkpoint("out/clm/ckpt.pt")["step"] > before + 3)
        process.send_signal(signal.SIGTERM)
    number = signal.SIGTERM if nohup else signal.SIGHUP
    assert finish(process).code == 128 + number
    assert load_checkpoint("out/clm/ckpt.pt")["step"] >= before


@posix
def test_a_stop_leaves_out_no_evaluation(folder):
    flags = "--max_steps=6 --eval_every=2 --out_dir="
    train_here(f"{flags}whole")
    train_and_stop(4, f"{flags}parts")
    assert [line["step"] for line in evaluations("parts")] == [2, 4]
    assert load_checkpoint("parts/best.pt")["step"] == 4
    resume_here(folder="parts")
    assert losses("parts") == losses("whole")
    best = [load_checkpoint(f"{run}/best.pt") for run in ("whole", "parts")]
    assert best[0]["step"] == best[1]["step"]


def test_a_stop_logs_the_steps_since_the_last_line(folder):
    train_and_stop(7, "--max_steps=20 --log_every=5 --out_dir=parts")
    lines = [json.loads(line) for line in Path("parts/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "ms" in line] == [5, 7]


def test_a_checkpoint_that_another_run_writes_meanwhile_is_not_lost(copied, monkeypatch):
    """The first run may still be stopping while the second one reads its text."""

    def load_slowly(*args):
        shutil.copyfile("out/clm/ckpt.pt", "copy.pt")
        os.replace("copy.pt", "out/clm/ckpt.pt")
        return load(*args)

    load = run_file.load_corpora
    before = Path("out/clm/log.jsonl").read_text()
    monkeypatch.setattr(run_file, "load_corpora", load_slowly)
    with pytest.raises(UserError, match="another run has written .* since; run the command again"):
        resume_here("--max_steps=21")
    assert Path("out/clm/log.jsonl").read_text() == before


def test_a_run_that_begins_and_ends_meanwhile_is_not_replaced(copied, monkeypatch):
    def load_slowly(*args):
        shutil.copytree("out/clm", "out/new")
        return load(*args)

    load = run_file.load_corpora
    monkeypatch.setattr(run_file, "load_corpora", load_slowly)
    with pytest.raises(UserError, match="out/new already holds a run"):
        train_here("--out_dir=out/new")
    assert load_checkpoint("out/new/ckpt.pt")["step"] == load_checkpoint("out/new/best.pt")["step"]


def test_tokens_and_epochs_add_up_over_other_batches_and_epochs_begin_anew_with_other_text(folder):
    train_here("--max_steps=4")
    resume_here("--max_steps=6", "--batch_size=8")
    first, second = evaluations("out/clm")
    assert first["tokens"] == 4 * 4 * 32 and second["tokens"] == first["tokens"] + 2 * 8 * 32
    assert second["epochs"] == pytest.approx(2 * first["epochs"])
    (folder / "other.txt").write_text("A dog sat. It slept. It woke.\n" * 300)
    resume_here("--max_steps=7", "--data=other.txt")
    third = evaluations("out/clm")[-1]
    assert third["tokens"] == second["tokens"] + 8 * 32
    assert third["epochs"] == pytest.approx(8 * 32 / (9001 * 19 / 20), rel=0.01)


@posix
def test_a_second_signal_stops_at_once(typed, folder):
    process = Started(typed, folder, f"train.py {TINY} {FOREVER}")
    wait_for(process, "step 0000002/")
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        process.send_signal(number)  # both requests to stop arrive within one step
    stopped = finish(process)
    assert stopped.code in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert stopped.err.endswith("stopped at once: what was not saved is lost\n")
    assert not (folder / "out/clm/ckpt.pt").exists()


@posix
def test_a_signal_in_the_last_step_finds_the_run_done(folder, capsys):
    train_and_stop(10, "--max_steps=10")
    printed = capsys.readouterr().out
    assert "To resume" not in printed  # nothing is left to do
    assert "stopped after the last step: the run is complete" in printed
    assert load_checkpoint("out/clm/ckpt.pt")["step"] == 10


def test_resume_refuses_what_the_checkpoint_fixes_and_names_both_values(copied):
    fixed = {
        "--objective=fim": "clm",
        "--tokenizer=bpe:300": "bytes",
        "--n_layer=2": "1",
        "--head_dim=64": "32",
        "--preset=small": "micro",
        "--freeze_trunk=True": "False",
        "--doc_mask=True": "False",
    }
    for flag, saved in fixed.items():
        with pytest.raises(UserError, match=f"{flag}, but the checkpoint has {saved}; leave"):
            resume_here("--max_steps=30", flag)
    with pytest.raises(UserError, match="has already taken 20 steps; give a larger --max_steps"):
        resume_here()
    resume_here("--max_steps=21 --n_layer=1 --tokenizer=bytes")  # the same values are no change


def test_a_run_that_starts_from_another_takes_the_rates_of_its_size(copied):
    change_checkpoint("out/clm", "train_config", preset="small")
    config = settle(["--init_from=out/clm", "--objective=mlm", "--device=cpu"]).train
    assert config.preset == "small" and config.lr_unembed == PRESETS["small"]["lr_unembed"]


def test_skills_says_if_the_questions_are_not_about_the_text_of_the_run(copied, capsys):
    skills.main(["--out_dir=out/clm"])
    data = load_checkpoint("out/clm/ckpt.pt")["data_config"]["data"]
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == f"this model has learned --data={data}, but the questions are about stories"


def test_a_width_of_the_users_own_has_the_usual_d_ff(folder):
    """At another n_embd, the preset's d_ff is not used: d_ff is computed, unless it is given."""
    for flags, d_ff in {
        "": 256,
        "--n_embd=128": 256,
        "--n_embd=192": 512,
        "--n_embd=192 --d_ff=300": 300,
    }.items():
        assert settle(["--device=cpu", "--preset=micro", *flags.split()]).model.d_ff == d_ff


def test_a_mixture_runs_as_long_as_its_slowest_member(folder):
    steps = {}
    for names in ("clm", "ul2", "clm,ul2", "ul2:0.1,clm:0.9"):
        steps[names] = settle([f"--objective={names}", "--device=cpu"]).train.max_steps
    assert steps["clm"] < steps["ul2"] == steps["clm,ul2"] == steps["ul2:0.1,clm:0.9"]


def test_a_mixture_has_a_folder_that_every_file_system_can_name(folder):
    config = settle(["--objective=clm:0.5,ul2:0.5", "--device=cpu"]).train
    assert config.out_dir == "out/clm-0.5+ul2-0.5"


def test_a_run_that_starts_from_another_draws_other_rows(folder):
    """Its rows follow those of all runs before it: here the third of three runs is resumed."""
    train_here("--objective=clm --max_steps=3")
    train_here("--objective=mlm --max_steps=2 --init_from=out/clm")
    train_here("--objective=clm --max_steps=1 --init_from=out/mlm --out_dir=out/last")
    names = ("out/clm", "out/mlm", "out/last")
    states = [load_checkpoint(f"{name}/ckpt.pt") for name in names]
    assert [state["train_config"]["steps_before"] for state in states] == [0, 3, 5]

    resume = ["--init_from=resume", "--max_steps=9", "--device=cpu", *TINY.split()]
    runs = []
    for name in ("out/clm", "out/last"):
        settings = settle([*resume, f"--out_dir={name}"])
        runs.append(Run(settings, Machine(device="cpu", dtype="float32", compile=False)))
    first, last = runs
    assert torch.equal(last.training_batches(1)[0].inputs, first.training_batches(6)[0].inputs)


def test_the_same_objective_goes_on_with_rows_of_the_same_length(folder):
    train_here("--objective=nsp --block_size=24 --max_steps=1")
    config = settle(["--init_from=out/nsp", "--objective=nsp", "--device=cpu"]).train
    assert config.block_size == 24
    for objective, length in (("clm", 48), ("contrastive", 24)):  # as many positions in a chunk
        config = settle(["--init_from=out/nsp", f"--objective={objective}", "--device=cpu"]).train
        assert config.block_size == length


def test_a_flag_that_a_checkpoint_lacks_gets_the_default_of_its_objective(folder):
    train_here("--objective=nsp --max_steps=1")
    state = load_checkpoint("out/nsp/ckpt.pt")
    del state["train_config"]["lr_binary"]
    save_checkpoint("out/nsp/ckpt.pt", state)
    config = settle(["--init_from=resume", "--out_dir=out/nsp", "--device=cpu"]).train
    assert config.lr_binary == OBJECTIVES["nsp"].lr_binary is not None


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_text_is_read(copied, monkeypatch):
    Path("text.txt").unlink()
    Path("link").symlink_to("nowhere")
    with pytest.raises(UserError, match="--out_dir=link: link is no folder; name another"):
        train_here("--out_dir=link")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(UserError, match=r"--out_dir=new/a: \. cannot be written to; name"):
        train_here("--out_dir=new/a")
    with pytest.raises(UserError, match="--out_dir=out/clm: out/clm cannot be written to"):
        resume_here("--max_steps=30")
    assert not Path("new").exists()


def test_an_edited_text_is_noticed_when_a_run_goes_on(copied):
    before = everything_in(copied / "out")
    text = Path("text.txt").read_text()
    Path("text.txt").write_text(text.replace("def", "let"))
    for flags in ("--init_from=resume", "--init_from=out/clm --out_dir=out/x"):
        with pytest.raises(UserError, match="is not the text that the checkpoint was trained on"):
            train.main(f"--out_dir=out/clm {flags} --max_steps=30".split())
    Path("text.txt").unlink()
    with pytest.raises(UserError, match="--data=text.txt does not exist; .* checkpoint names"):
        resume_here("--max_steps=30")
    assert everything_in(copied / "out") == before
    Path("moved.txt").write_text(text)
    resume_here("--max_steps=22 --data=moved.txt")
    Path("text.txt").write_text(text + "edited on purpose")
    resume_here("--max_steps=23 --data=text.txt")


def test_an_edited_older_text_is_noticed_too(folder):
    train_here("--replay_data=older.txt --max_steps=1")
    Path("older.txt").write_text("abcdefgh " * 200)
    with pytest.raises(UserError, match="older.txt .* is not the text that .* --replay_data"):
        resume_here("--max_steps=2")


def test_strange_lines_in_the_log_are_dropped_when_a_run_goes_on(copied):
    path = Path("out/clm/log.jsonl")
    good = path.read_bytes()
    strange = [
        b'{"step": 21, "loss": 9.0}',  # not yet saved when the run was killed
        b'{"step": 0}',
        b'{"step": "x"}',
        b"\xff\xfe",
        b'{"step": 1e999}',
        b'{"step": ' + b"9" * 4000 + b"}",
        b"{}",
        b"[1, 2]",
        b"[" * 100_000,
        b"3",
        b"",
        b'{"step": 2',
    ]
    path.write_bytes(good + b"\n".join(strange))
    resume_here("--max_steps=21")
    assert path.read_bytes().startswith(good)
    added = path.read_text().removeprefix(good.decode()).splitlines()
    assert [json.loads(line)["step"] for line in added] == [21, 21]


# ---- the command line --------------------------------------------------------------------------

MISTYPED = {
    "train.py --objectve=fim": "unknown flag --objectve; did you mean --objective?",
    "bench.py --only=decoding,corruptoin": "did you mean corruption?",
    "train.py fim": "unexpected 'fim'",
    "train.py --objective=clm --mask_rate=0.3": "--mask_rate does not apply to clm",
    "train.py --objective=clm --lr_binary=0.1": "--lr_binary has no effect with clm: remove it",
    "train.py --objective=electra --lr_unembed=0.1": "--lr_unembed has no effect with electra",
    "train.py --tied=True --lr_unembed=0.1": "--lr_unembed has no effect with --tied=True",
    "train.py --objective=mtp --init_from=run --freeze_trunk --lr_unembed=0.1": (
        "--lr_unembed has no effect with --freeze_trunk: remove it"
    ),
    "train.py --out_dir=run --init_from=resume --overwrite": "--overwrite replaces a run",
    "view.py --svg=picture.svg": "--svg needs an objective",
    "compare.py --score=out/clm --seeds=2": "--seeds has no effect with --score",
    "train.py --device=meta": "--device=meta: it must be cpu, cuda, cuda:N or mps",
    "train.py --data=text.txt --out_dir=text.txt": "--out_dir=text.txt is a file; name a folder",
    "train.py --data=text.txt --out_dir=text.txt/a/b": (
        "--out_dir=text.txt/a/b: text.txt is no folder; name another"
    ),
    "train.py --data=text.txt --cache_dir=text.txt": "--cache_dir=text.txt is a file; name a",
    "train.py --out_dir=": "--out_dir= is empty; give a value or leave it out",
    "train.py --cache_dir=": "--cache_dir= is empty; give a value or leave it out",
    "train.py --init_from=": "--init_from= is empty; give a value or leave it out",
    "train.py --data=. --out_dir=.": "--out_dir=. is the folder of the text; name another",
    "train.py --data=run --cache_dir=run": "--cache_dir=run is the folder of the text",
    "train.py --replay_data=. --out_dir=.": "--out_dir=. is the folder of the text",
    "train.py --objective=contrastive --data=text.txt --batch_size=8 --grad_accum=8": (
        "in each micro-batch: raise --batch_size=8 or lower --grad_accum=8"
    ),
    "train.py --objective=contrastive --data=text.txt --eval_rows=1": "raise --eval_rows=1",
    "train.py --objective=bart --bart_noise=infil": "'infil' is not known; did you mean",
    "sample.py --out_dir=text.txt": "text.txt is a file; name the folder of a run",
    "train.py --device=cuda:99": "name another, such as --device=cpu",
    "RANK=1 train.py": "RANK=1, WORLD_SIZE=1: unset both",
    "RANK=0 WORLD_SIZE=2 train.py": "start with torchrun",
    "RANK=x WORLD_SIZE=\x1b[2J train.py": "RANK=x, WORLD_SIZE=·[2J",
    "sample.py --prompt -x": "--prompt: needs a value; write --name=value",
    "sample.py --max_new_tokens=9000000000": "must be at least 1 and at most 16777216",
    "view.py clm --block_size=100000": "must be at least 8 and at most 4096",
    "view.py clm --svg=run": "run is not a regular file; name another",
    "compare.py clm fim": "unexpected 'clm'; flags are written --name=value",
    "compare.py --objectives=clm,mlm --flags=--doc_mask": "--doc_mask does not apply to mlm",
    "compare.py --score=run,nowhere --on=clm": "nowhere/ckpt.pt does not exist",
    "sample.py --device=meta --out_dir=run": "--device=meta",
    "TIKTOKEN_CACHE_DIR=empty view.py clm --data=text.txt --tokenizer=gpt2": "--tokenizer=bytes",
}


@posix
def test_what_cannot_be_meant_ends_in_one_line_and_exit_code_1(typed, copied):
    shutil.move("out/clm", "run")
    before = everything_in(copied)
    for command, words in MISTYPED.items():
        refused(typed(copied, command), words)
    assert everything_in(copied) == before


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--max_steps=0", "at least 1"),
        ("--block_size=7", "--block_size=7: must be at least 8"),
        (f"--grad_accum={10**30}", "--grad_accum: the number is too large"),
        (f"--batch_size={1 << 50}", "must be at least 1 and at most 1048576"),
        ("--lr=1e308", "--lr=1e+308: must be at least 0 and below 1e+18"),
        ("--replay_rate=0.1", "--replay_rate needs --replay_data"),
        ("--batch_size=5 --grad_accum=2", "--batch_size=5: must be a multiple of --grad_accum=2"),
        ("--n_head=3 --n_kv_head=2", "--n_kv_head=2: must divide --n_head=3"),
        ("--n_kv_head=0", "--n_kv_head=0"),
        ("--d_ff=0", "--d_ff=0"),
        ("--head_dim=33", "--head_dim=33: must be even"),
        ("--rope_theta=0", "--rope_theta=0"),
        ("--preset=huge", "--preset='huge': must be micro or tiny or small or gpt2"),
        ("--replay_rate=1", "--replay_rate=1"),
        ("--objective=clm:0.9,clm:0.1", "clm appears twice; name it once"),
        ("--freeze_trunk", "--freeze_trunk=True needs a trained trunk"),
        ("--init_from=out/clm --out_dir=x --freeze_trunk", "clm adds no head to train"),
        ("--init_from=out/clm --out_dir=x --n_layer=2", "--n_layer=2, but the checkpoint has 1"),
        ("--init_from=out/clm --out_dir=x --tokenizer=bpe:300", "but the checkpoint has bytes"),
        ("--init_from=out/clm --out_dir=x --preset=gpt2", "--preset=gpt2, but the checkpoint has"),
        (
            "--init_from=out/x/y",
            "out/x/y/ckpt.pt does not exist; name a folder with a run: out/clm",
        ),
        (f"--seed={1 << 31}", "--seed"),
    ],
)
def test_values_no_run_can_have_are_refused_by_name(flags, words, copied):
    with pytest.raises(UserError, match=re.escape(words)):
        train_here("--out_dir=out/x", flags)


@linux
@pytest.mark.parametrize(
    "flags",
    [
        "--preset=gpt2 --n_embd=16384 --n_layer=96",
        "--batch_size=1048576",
        "--n_embd=1000000",
    ],
)
def test_what_does_not_fit_the_memory_is_said_before_it_is_taken(flags, folder):
    before = time.monotonic()
    with pytest.raises(UserError, match=r"needs about [\d.inf]+ GB, but only [\d.]+ GB are free"):
        train_here(flags)
    assert time.monotonic() - before < 60 and not Path("out").exists()


SCRIPTS = ["train.py", "sample.py", "view.py", "skills.py", "compare.py"]


@pytest.fixture(scope="session")
def help_pages(typed, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("help")
    pages = {}
    for script in SCRIPTS:
        result = typed(folder, f"{script} --help")
        works(result)
        pages[script] = result.out
    assert not list(folder.iterdir())
    return pages


@posix
def test_help_pages_fit_a_screen_and_say_what_happens_without_a_flag(help_pages):
    for page in help_pages.values():
        assert max(map(len, page.splitlines())) <= 100 and "examples:" in page
    page = "".join(help_pages["train.py"].split())  # it may be wrapped anywhere
    for section in (TrainConfig, ModelConfig, Knobs, DataConfig):
        for field in dataclasses.fields(section):
            if "help" not in field.metadata:
                continue
            about = field.metadata["help"]
            assert f"--{field.name}" in page and "".join(about.split()) in page, field.name
            if any(field.name in preset for preset in PRESETS.values()):
                default = "|".join(
                    str(preset.get(field.name, field.default)) for preset in PRESETS.values()
                ).replace("None", "automatic")
            elif field.default in ("", None):
                assert re.search("automatic:|empty:", about), field.name
                continue
            else:
                default = field.default
            assert f"[{default}]" in page, field.name


@posix
def test_the_objective_that_the_readme_adds_works(typed, folder):
    """The diff in the README is applied to a copy of the project."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    diff = re.search(r"```diff\n(.*?)```", text, re.S)[1]
    function, row = diff.split("@@\n")
    added = ["\n".join(re.findall(r"(?m)^\+(.*)$", part)) for part in (function, row)]
    where = ["class Objective(NamedTuple):\n", "OBJECTIVES = {\n"]
    project = folder / "project"
    project.mkdir()
    for path in HERE.glob("*.py"):
        shutil.copy(path, project)
    code = (project / "objectives.py").read_text(encoding="utf-8")
    code = code.replace(where[0], f"{added[0]}\n\n\n{where[0]}")
    code = code.replace(where[1], f"{where[1]}{added[1]}\n")
    (project / "objectives.py").write_text(code, encoding="utf-8")

    for command in (f"train.py {TINY} --objective=anyrate --max_steps=2", "view.py anyrate"):
        result = typed(folder, f"PROJECT={project} {command}")
        works(result)
        assert "anyrate" in result.out


@posix
def test_the_commands_of_the_readme_have_flags_that_exist(help_pages):
    text = (HERE / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"(?:python|train\.py|\w+) (\w+\.py)((?: [^`\n|&#]*)?)", text)
    known = [command for command in commands if command[0] in help_pages]
    assert len(known) > 5
    for script, words in known:
        for flag in re.findall(r" --(\w+)", words):
            shown = re.search(rf"(?m)^ +--{flag}\b", help_pages[script])
            assert shown or flag == "help", f"{script} has no --{flag}"


@posix
def test_without_asserts_and_docstrings_the_programs_do_and_refuse_the_same(typed, copied):
    """As in python -OO, which would also compile all of torch anew."""
    for path in HERE.glob("*.py"):
        py_compile.compile(path, copied / f"optimized/{path.stem}.pyc", optimize=2)

    def run(command: str) -> Result:
        script, flags = command.split(".py", 1)
        return typed(copied, f"PROJECT={copied}/optimized {script}.pyc{flags}")

    does = [
        f"train.py {TINY} --objective=fim --max_steps=2",
        "train.py --help",
        "sample.py --out_dir=out/clm --prompt=def --max_new_tokens=4 --json",
    ]
    refuses = [
        f"train.py {TINY} --head_dim=33 --out_dir=x",
        f"train.py {TINY} --objective=clm,electra --out_dir=x",
        f"train.py {TINY} --data=nowhere --out_dir=x",
        f"train.py {TINY} --tokenizer=bpe:12 --out_dir=x",
        f"train.py {TINY} --tokenzer=x --out_dir=x",
        f"train.py {TINY}",
        "view.py clm --mask_rate=0.3",
        "sample.py --out_dir=out/clm --num_samples=0",
    ]
    results = [run(command) for command in does]
    for command in refuses:
        refused(run(command))
    for result in results:
        works(result)
    assert load_checkpoint("out/fim/ckpt.pt")["step"] == 2
    assert "--objective" in results[1].out and len(json.loads(results[2].out)["tokens"]) <= 4


# ---- numbers that go wrong ---------------------------------------------------------------------


def test_steps_without_a_target_have_loss_zero_and_harm_nothing(folder):
    train_here("--objective=diffusion --block_size=8 --batch_size=1 --max_steps=40")
    seen = losses("out/diffusion")
    assert 0.0 in seen and max(seen) > 0 and all(map(math.isfinite, seen))
    weights = load_checkpoint("out/diffusion/ckpt.pt")["model"].values()
    assert all(weight.isfinite().all() for weight in weights)


@pytest.mark.parametrize(
    "flags, what",
    [
        ("--lr=1e17 --lr_embed=1e17 --eval_every=50 --save_every=50", "loss"),
        ("--lr=1e17 --lr_embed=1e17 --eval_every=1", "validation loss"),
        ("--lr_embed=inf --save_every=1", "largest weight"),
    ],
)
def test_a_loss_that_is_not_finite_stops_the_run_and_nothing_bad_is_saved(
    flags, what, copied, monkeypatch
):
    if "inf" in flags:
        monkeypatch.setattr(config, "_check", lambda *_: None)  # which would refuse inf
    before = (copied / "out/clm/ckpt.pt").read_bytes()
    with pytest.raises(UserError, match=f"the {what} became .* by step 2[12]; .*Lower --lr"):
        resume_here("--max_steps=40", flags)
    assert (copied / "out/clm/ckpt.pt").read_bytes() == before
    with pytest.raises(UserError, match=f"the {what} became .* by step [12]; .*Lower --lr"):
        train_here("--overwrite --max_steps=40", flags)
    assert (copied / "out/clm/previous.pt").read_bytes() == before


@linux
def test_out_of_memory_names_the_flags_to_lower_and_keeps_the_checkpoint(typed, copied):
    """A limit that the system does not report stands in for memory that others have taken."""
    before = everything_in(copied / "out")
    resume = "train.py --out_dir=out/clm --init_from=resume --max_steps=40 --batch_size=16384"
    result = typed(copied, f"MEMORY_LIMIT={400 << 20} {resume}")
    refused(result, "out of memory; what was saved before is intact")
    refused(result, "--batch_size", "--grad_accum", "--preset")
    assert everything_in(copied / "out") == before


# ---- files that go wrong -----------------------------------------------------------------------


def test_a_kill_while_a_checkpoint_has_two_names_leaves_no_file_behind(copied):
    """The old checkpoint is already named previous.pt, but is still named ckpt.pt as well."""
    os.replace("out/clm/ckpt.pt", "out/clm/previous.pt")
    os.link("out/clm/previous.pt", "out/clm/ckpt.pt")
    resume_here("--max_steps=21")
    assert load_checkpoint("out/clm/ckpt.pt")["step"] == 21
    assert load_checkpoint("out/clm/previous.pt")["step"] == 20
    assert not temporary_files(copied)


@posix
@pytest.mark.parametrize(
    "flags, limit, words",
    [
        ("--out_dir=out/clm --init_from=resume --max_steps=22", 200_000, "out/clm/ckpt.pt"),
        (f"--out_dir=out/clm --init_from=resume {FOREVER}", 0, "log.jsonl"),
        (f"{TINY} --cache_dir=new --out_dir=x", 10_000, "new/tokens-"),
    ],
    ids=["checkpoint", "log", "cache"],
)
def test_a_full_disk_is_one_line_and_leaves_what_was_there(flags, limit, words, typed, copied):
    """A limit on file size stands in for the full disk."""
    before = everything_in(copied)
    log = copied / "out/clm/log.jsonl"
    limit = limit or len(before[log]) + 300  # bytes, enough for two more lines

    result = typed(copied, f"FILE_LIMIT={limit} train.py {flags}")
    refused(result, "File too large", words)
    assert not temporary_files(copied)
    after = everything_in(copied)
    assert after[log].startswith(before.pop(log))
    assert all(after[path] == content for path, content in before.items())


# ---- untrusted checkpoints ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "part, values, words",
    [
        (None, dict(tokenizer="{}"), "ckpt.pt"),
        (None, dict(model={}), "its weights do not fit"),
        ("model_config", dict(n_layer=3), "layers.1."),
        ("model_config", dict(n_layer="1"), "--n_layer='1': must be a whole number"),
        (None, dict(model={"w": 3}), "the weights w are not plain float32"),
        (None, dict(model={3: torch.zeros(2)}), "its weights do not fit"),
        (None, dict(model={b"w": torch.zeros(2)}), "its weights do not fit"),
        (
            None,
            dict(model={"w": torch.full((2,), math.nan)}),
            "the weights w are not plain float32",
        ),
        (
            None,
            dict(model={"w": torch.zeros(2).to_sparse()}),
            "the weights w are not plain float32",
        ),
        (
            None,
            dict(model={"w": torch.zeros(1).expand(10**12)}),
            "the weights w are not plain float32",
        ),
        (None, dict(step=-5), "step=-5, elapsed_s="),
        (None, dict(elapsed_s=math.nan), "elapsed_s=nan: impossible"),
        ("model_config", dict(n_embd=10**6), "embed_tokens.weight"),
        ("model_config", dict(n_embd=10**9), "--n_embd=1000000000: must be at least 1 and at most"),
        ("train_config", dict(block_size="x"), "--block_size='x': must be a number from 8"),
        ("model_config", dict(vocab_size=10**9), "embed_tokens.weight"),
        ("model_config", dict(vocab_size=99), "it has 99 ids"),
        ("model_config", dict(rope_theta=5e-324), "--rope_theta=5e-324: must be at least 1"),
        ("model_config", dict(head_dim=7), "--head_dim=7: must be even"),
        ("model_config", dict(n_head=3, n_kv_head=2), "--n_kv_head=2: must divide --n_head=3"),
        ("model_config", dict(d_ff=None, n_embd="1"), "--n_embd='1': must be a whole number"),
        ("train_config", dict(objective="xyz"), "'xyz' is not known"),
        ("train_config", dict(objective=["clm"]), "ckpt.pt"),
        ("train_config", dict(objective="ul2", block_size=8192), "UL2"),
        ("train_config", dict(block_size=4), "--block_size=4: must be a number from 8"),
        ("train_config", dict(block_size=1 << 21), "--block_size=2097152: must be a number from 8"),
        (None, dict(model={"w": torch.zeros(2).half()}), "the weights w are not plain float32"),
        ("train_config", dict(objective="nsp"), "pair_head"),
        ("knobs", dict(n_future=2.5), "--n_future=2.5: must be a whole number"),
    ],
)
def test_a_checkpoint_that_contradicts_itself_is_refused(part, values, words, copied):
    change_checkpoint("out/clm", part, **values)
    for main, flags in ((train.main, ["--init_from=resume", "--max_steps=30"]), (sample.main, [])):
        with pytest.raises(UserError, match=re.escape(words)):
            main(["--out_dir=out/clm", *flags])


@pytest.mark.parametrize(
    "part, values, words",
    [
        ("train_config", dict(preset="huge"), "--preset='huge'"),
        ("train_config", dict(preset=["tiny"]), "--preset=['tiny']"),
        ("train_config", dict(lr=math.nan), "--lr=nan: must be a finite number"),
        ("train_config", dict(dtype="x"), "--dtype='x': must be float32 or"),
        ("train_config", dict(seed=True), "--seed=True: must be a whole number"),
        ("train_config", dict(replay_data=3), "--replay_data=3: must be text"),
        ("train_config", dict(replay_data="/dev/zero"), "/dev/zero"),
        ("data_config", dict(data=1), "--data=1: must be text"),
        (None, dict(step=10**30), "steps; give a larger --max_steps"),
    ],
)
def test_a_value_that_no_run_can_go_on_with_is_named(part, values, words, copied):
    change_checkpoint("out/clm", part, **values)
    with pytest.raises(UserError, match=re.escape(words)):
        resume_here(*([] if "step" in values else ["--max_steps=30"]))


def test_paths_in_a_checkpoint_are_not_obeyed(copied):
    """Files would be written to one path and read from the other."""
    Path("secret.txt").write_text("a secret " * 999)
    change_checkpoint("out/clm", "data_config", cache_dir="stolen")
    change_checkpoint("out/clm", "train_config", out_dir="stolen", overwrite=True)
    resume_here("--max_steps=21")
    assert not Path("stolen").exists() and len(losses("out/clm")) == 21

    before = everything_in(copied)
    change_checkpoint("out/clm", "data_config", data="secret.txt")
    again = "--overwrite --init_from=out/clm --objective=mlm"
    for flags in ("--init_from=resume --max_steps=30", again):
        with pytest.raises(UserError, match="is not the text that the checkpoint was trained on"):
            train.main(["--out_dir=out/clm", *flags.split()])
    changed = set(everything_in(copied)) - set(before)
    assert {path.parent.name for path in changed} <= {"clm"}  # nothing was tokenized


ESCAPE = "\x1b[2J"


@posix
def test_a_checkpoint_cannot_write_escapes_to_the_terminal(typed, copied):
    weights = load_checkpoint("out/clm/ckpt.pt")["model"]
    specification = json.loads(load_checkpoint("out/clm/ckpt.pt")["tokenizer"])
    forgeries = [
        (None, dict(tokenizer=json.dumps(specification | {"name": ESCAPE}))),
        (None, dict(model=weights | {f"future{ESCAPE}.0": torch.zeros(1)})),
        ("train_config", dict(objective=ESCAPE)),
        ("train_config", dict(objective=f"clm,{ESCAPE}")),
        ("train_config", dict(device=ESCAPE)),
        ("train_config", dict(replay_data=ESCAPE)),
        ("train_config", dict(preset=ESCAPE)),
        ("data_config", dict(data=ESCAPE)),
    ]
    commands = []
    for number, (part, values) in enumerate(forgeries):
        shutil.copytree("out/clm", f"out/{number}")
        change_checkpoint(f"out/{number}", part, **values)
        commands += [
            f"train.py --out_dir=out/{number} --init_from=resume --max_steps=21",
            f"train.py {TINY} --out_dir=x --overwrite --init_from=out/{number} --max_steps=1",
            f"sample.py --out_dir=out/{number} --max_new_tokens=1",
        ]
    results = [typed(copied, command) for command in commands]
    assert sum(result.code == 1 for result in results) >= 15
    for command, result in zip(commands, results):
        assert "\x1b" not in result.out + result.err, command
        assert "Traceback" not in result.err, command


def test_a_text_with_escapes_in_its_name_is_shown_without(folder, capsys):
    shutil.copy("text.txt", f"{ESCAPE}.txt")
    shutil.copy("older.txt", f"old{ESCAPE}.txt")
    train_here("--max_steps=1", f"--data={ESCAPE}.txt --replay_data=old{ESCAPE}.txt")
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "from old·[2J.txt" in printed


def test_optimizers_of_another_run_are_refused(copied):
    adam, muon = load_checkpoint("out/clm/ckpt.pt")["optimizers"]
    threes = {n: dict.fromkeys(each, torch.zeros(3)) for n, each in muon["state"].items()}
    fewer = {n: {name: x[:-1] for name, x in each.items()} for n, each in muon["state"].items()}
    first_only = {
        n: {name: x for name, x in each.items() if name != "exp_avg_sq"}
        for n, each in adam["state"].items()
    }
    scalars = {n: dict.fromkeys(each, torch.tensor(0.0)) for n, each in adam["state"].items()}
    wrong = {
        "none": [],
        "one": [adam],
        "no optimizer": [adam, 3],
        "no state": [adam, {"param_groups": muon["param_groups"]}],
        "a list": [adam, {**muon, "state": []}],
        "of other weights": [adam, {**muon, "state": threes}],
        "one matrix less": [adam, {**muon, "state": fewer}],
        "scalars": [{**adam, "state": scalars}, muon],
        "no second moments": [{**adam, "state": first_only}, muon],
        "swapped": [muon, adam],
    }
    for kind, optimizers in wrong.items():
        change_checkpoint("out/clm", optimizers=optimizers)
        with pytest.raises(UserError, match="the checkpoint's optimizers do not fit its model"):
            resume_here("--max_steps=30")
            raise AssertionError(kind)


def test_a_checkpoint_whose_encoding_must_be_fetched_is_not_called_invalid(copied, monkeypatch):
    def no_network(name):
        raise ConnectionError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    change_checkpoint("out/clm", tokenizer='{"name": "gpt2"}')
    with pytest.raises(UserError, match="cannot be used: --tokenizer=gpt2.*TIKTOKEN_CACHE_DIR"):
        resume_here("--max_steps=30")


def test_fields_of_a_fork_are_passed_over(copied):
    for part in ("knobs", "train_config", "model_config"):
        change_checkpoint("out/clm", part, of_a_fork=1)
    resume_here("--max_steps=21")


# ---- several processes -------------------------------------------------------------------------


@posix
def test_two_processes_give_the_figures_of_one_and_a_signal_saves_once(folder):
    """Every process evaluates all 37 validation rows; only the first one writes."""
    flags = "--objective=clm,bart --eval_rows=37 --eval_every=4 --grad_accum=2"
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node=2"
    process = start(
        folder, f"{torchrun} {HERE}/train.py {TINY} {flags} {FOREVER} --out_dir=together"
    )
    wait_for(process, "step 0000009/")
    process.send_signal(signal.SIGINT)
    shown = finish(process).out
    assert shown.count("step 0000008/") == 1
    resume = "torchrun --standalone --nproc_per_node=2 train.py --init_from=resume"
    step = int(re.search(rf"stopped after step (\d+), saved. To resume: {resume}", shown)[1])
    assert load_checkpoint("together/ckpt.pt")["step"] == step and not temporary_files(folder)

    train_here(flags, "--max_steps=8", "--out_dir=alone")
    files = [sorted(path.name for path in Path(name).iterdir()) for name in ("together", "alone")]
    assert files[0] == files[1]
    assert np.allclose(losses("together")[:8], losses("alone"), atol=1e-4)
    read = [
        [x["ms"] * x["tokens_per_s"] for x in log_of(name) if "ms" in x]
        for name in ("together", "alone")
    ]
    assert sum(read[0][:8]) == pytest.approx(sum(read[1]), rel=0.2)  # by both
    for here, there in zip(evaluations("together")[:2], evaluations("alone"), strict=True):
        assert here["val_loss"] == pytest.approx(there["val_loss"], abs=1e-4)
    resume_here(f"--max_steps={step + 1}", folder="together")


# ---- random configurations ---------------------------------------------------------------------


def any_configuration(dice: np.random.Generator) -> tuple[str, int, int, Knobs]:
    """Draw a valid objective or mixture, T, B and knobs."""

    def share() -> float:
        return float(dice.uniform(0.02, 0.98))

    def some_of(names) -> str:
        return ",".join(dice.permutation(names)[: dice.integers(1, len(names) + 1)])

    name = str(dice.choice(list(OBJECTIVES)))
    if dice.random() < 0.2:
        plain = [name for name, row in OBJECTIVES.items() if row.loss is token_loss]
        name = ",".join(f"{n}:{dice.random() + 0.01:.2f}" for n in dice.permutation(plain)[:3])
    knobs = Knobs(
        mask_rate=share(),
        corruption_rate=share(),
        mean_span=float(dice.uniform(1, 9)),
        prefix_frac=share() if dice.random() < 0.5 else None,
        fim_rate=float(dice.choice([0, 0.5, 1])),
        fim_layouts=some_of(list(FIM_LAYOUTS)),
        fim_cuts=str(dice.choice(["characters", "tokens"])),
        bart_noise=some_of(list(BART_NOISE)),
        n_future=int(dice.integers(1, 6)),
        mtp_heads=str(dice.choice(["linear", "parallel", "chain"])),
        generator_frac=share(),
        rtd_weight=float(dice.integers(1, 60)),
        doc_mask=bool(dice.integers(2)),
        hidden_inputs=float(dice.choice([0, 0.5])),
    )
    return name, int(dice.integers(8, 80)), int(dice.integers(1, 6)), knobs


def test_any_valid_configuration_makes_rows_and_a_training_step(folder):
    dice = np.random.default_rng(2)
    poem = "Ça va? Ευχαριστώ! 漢字。😀\n<|endoftext|>\nx\n<|endoftext|>\n" * 40
    (folder / "poem.txt").write_text(poem, encoding="utf-8")
    corpora = []
    for name in ("text.txt", "poem.txt"):
        for tokenizer in ("bytes", "bpe:270"):
            corpora.append(load_tokens(DataConfig(data=name, tokenizer=tokenizer)))
    tried = 0
    for step in range(150):
        name, T, B, knobs = any_configuration(dice)
        tokens = corpora[dice.integers(len(corpora))]
        tok, mixture = tokens.tok, parse_mixture(name)
        train_text, val_text = Text(tokens.train, tok.EOT), Text(tokens.val, tok.EOT)
        try:
            check_knobs(mixture, knobs, {}, T)
            check_text(mixture, train_text, T, knobs)
        except UserError:
            continue
        tried += 1
        shape = ModelConfig(n_layer=1, n_head=2, head_dim=8, n_embd=16, vocab_size=tok.vocab_size)
        torch.manual_seed(step)
        model = Transformer(with_heads(shape, mixture, knobs))
        for split, text in enumerate((train_text, val_text)):
            source = Source(mixture, text, tok, T, knobs, seed=step)
            batch = make_batch(source, split, step, range(B), B)
            parts = OBJECTIVES[next(iter(mixture))].loss(model, batch, tok, knobs)
            loss = total_loss(parts)
            loss.backward()
            assert len(batch.inputs) == B and batch.inputs.shape[1] <= T
            assert batch.inputs.max() < tok.n_ids
            assert loss.isfinite(), (name, T, B, knobs)
        for p in model.parameters():
            assert p.grad is None or p.grad.isfinite().all(), (name, T, B, knobs)
    assert tried > 100
