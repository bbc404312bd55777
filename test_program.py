"""test_program.py: what the command line promises, each promise shown by making the fault happen.

Models of one block and 32 channels on the CPU, a corpus made here, every process without a network: the whole file runs in
about a minute and a half on two cores. Left out: what the rows of an objective hold (test_objectives.py), anything on a GPU.

    pytest test_program.py
    pytest test_program.py -k "resume or killed"
"""
import dataclasses
import json
import math
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import bench
import data
import objectives
import sample
import train
import view
from data import DataConfig, Rng, UserError, collate, get_tokenizer, load_checkpoint, load_tokens, save_checkpoint
from model import ModelConfig, Transformer
from objectives import OBJECTIVES, Knobs, check_knobs, check_text, make_rows, parse_mixture

HERE = Path(__file__).resolve().parent
TINY = ["--n_layer=1", "--n_embd=32", "--n_head=1", "--head_dim=32", "--block_size=32", "--batch_size=4", "--eval_rows=8", "--log_every=1",
        "--max_steps=20", "--schedule=constant", "--dtype=float32", "--device=cpu", "--data=text.txt"]
ROWS = ["--block_size=32", "--data=text.txt", "--json"]
LOOPBACK_ONLY = '''
import os, signal, socket, threading, time
local = (None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname())
connect, getaddrinfo = socket.socket.connect, socket.getaddrinfo

def closed_connect(self, address):
    if isinstance(address, tuple) and address[0] not in local:
        raise OSError("the network is closed")
    return connect(self, address)

def closed_getaddrinfo(host, *more, **names):
    if host not in local:
        raise socket.gaierror("the network is closed")
    return getaddrinfo(host, *more, **names)

def die(when):
    while not os.path.exists(when):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)

socket.socket.connect, socket.getaddrinfo = closed_connect, closed_getaddrinfo
if "DOOMED" in os.environ and os.environ.get("RANK") == "1":
    threading.Thread(target=die, args=[os.environ["DOOMED"]], daemon=True).start()
'''
posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and limits")
compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's limits")


# ---- helpers --------------------------------------------------------------------------------------------------------

def write_text(folder: Path) -> Path:
    draw = random.Random(0)
    line = lambda i: f"def {draw.choice('abcdef')}{i}({draw.choice('xyz')}): return {draw.randint(0, 999)}\n"
    documents = ["".join(line(i) for i in range(draw.randint(5, 30))) for _ in range(60)]
    (folder / "text.txt").write_text("<|endoftext|>\n".join(documents))
    (folder / "older.txt").write_text("0123456789 " * 200)
    return folder


def start(folder: Path, *words: str, **options) -> subprocess.Popen:
    """One of the scripts (or `-c code`, `-m module`) in its own process, with `folder` as the working directory."""
    words = (str(HERE / words[0]), *words[1:]) if words[0].endswith(".py") else words
    files = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    process = subprocess.Popen([sys.executable, *words], cwd=folder, stdout=files[0], stderr=files[1], **options)
    process.files = files
    return process


def until(process: subprocess.Popen, ready) -> None:
    """Wait until `ready(standard output)`, or `ready` itself stands in it."""
    end = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < end:
        shown = os.pread(process.files[0].fileno(), 1 << 20, 0).decode(errors="replace")
        if ready in shown if isinstance(ready, str) else ready(shown):
            return
        time.sleep(0.01)
    raise AssertionError(finish(process))


def finish(process: subprocess.Popen) -> types.SimpleNamespace:
    try:
        process.wait(120)
    finally:
        process.kill()
        process.wait()
    for file in process.files:
        file.seek(0)
    out, err = (file.read().decode(errors="replace") for file in process.files)
    return types.SimpleNamespace(code=process.returncode, out=out, err=err)


def run(folder: Path, *words: str, **options) -> types.SimpleNamespace:
    return finish(start(folder, *words, **options))


def run_all(folder: Path, commands) -> list[types.SimpleNamespace]:
    """Several commands, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda words: run(folder, *words), commands))


def works(result) -> None:
    assert result.code == 0 and "Traceback" not in result.err, result


def refused(result, *words: str) -> None:
    """A non-zero exit and, at last, one line that holds the words."""
    last = (result.err.strip().splitlines() or [""])[-1]
    assert result.code not in (0, None) and last.startswith("error: ") and "Traceback" not in result.err, result
    for word in words:
        assert word in last, (word, last)


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in log_of(folder) if "loss" in line]


def leaves(x) -> list:
    """All that a nested state holds, tensors as their bytes."""
    if torch.is_tensor(x):
        return [x.dtype, tuple(x.shape), x.detach().flatten().contiguous().view(torch.uint8).numpy().tobytes()]
    if isinstance(x, dict):
        return [leaf for key in sorted(x, key=str) for leaf in (key, *leaves(x[key]))]
    return [leaf for part in x for leaf in leaves(part)] if isinstance(x, (list, tuple)) else [x]


def weights_and_optimizer(folder: Path) -> list:
    state = load_checkpoint(folder / "ckpt.pt")
    return leaves([state["model"], state["optimizers"], state["step"]])


def partial_files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.name.endswith(".tmp")]


@pytest.fixture(scope="session", autouse=True)
def closed_network(tmp_path_factory):
    """Every process started here can reach nothing but this machine, sees no GPU and computes on one thread."""
    guard = tmp_path_factory.mktemp("guard")
    (guard / "sitecustomize.py").write_text(LOOPBACK_ONLY)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(guard), str(HERE)]))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("RUST_BACKTRACE", "0")
        patch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def signals_as_before():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty working directory with a corpus; also this process's own."""
    monkeypatch.chdir(tmp_path)
    return write_text(tmp_path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """A folder with out/clm, with a checkpoint before its last, and out/fim; and what the trainings printed."""
    folder = write_text(tmp_path_factory.mktemp("trained"))
    clm, fim = run_all(folder, [("train.py", *TINY, "--objective=clm", "--eval_every=5", "--save_every=10"),
                                ("train.py", *TINY, "--objective=fim", "--log_every=5", "--eval_every=10")])
    works(clm)
    works(fim)
    (folder / "clm.txt").write_text(clm.out)
    (folder / "fim.txt").write_text(fim.out)
    return folder


@pytest.fixture
def copied(trained, tmp_path, monkeypatch) -> Path:
    """A copy of that folder to break; also this process's working directory."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- training and reading out ---------------------------------------------------------------------------------------

def test_a_model_is_trained_logged_evaluated_and_saved(trained):
    shown, run_folder = (trained / "clm.txt").read_text(), trained / "out/clm"
    assert re.search(r"^step 20/20 \| loss \d+\.\d{4} \| lr 2\.0e-02 \| [\d.]+ ms \| [\d.]+k? tok/s \| eta \d+s$", shown, re.M), shown
    assert re.search(r"^eval 20/20 \| val loss \d", shown, re.M) and "python sample.py --out_dir=out/clm" in shown
    steps = [line for line in log_of(run_folder) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 21)) and all(line.keys() >= {"lr", "ms", "tokens_per_s"} for line in steps)
    evaluations = [line for line in log_of(run_folder) if "val_loss" in line]
    assert [line["step"] for line in evaluations] == [5, 10, 15, 20] and all(line.keys() >= {"val_bpb", "elapsed_s"} for line in evaluations)
    assert evaluations[-1]["val_loss"] < evaluations[0]["val_loss"] < math.log(576) + 0.1
    assert load_checkpoint(run_folder / "ckpt.pt")["step"] == 20 and load_checkpoint(run_folder / "previous.pt")["step"] == 10
    assert not partial_files(trained)


def test_the_device_the_precision_and_the_reasons_are_printed(trained):
    shown = (trained / "clm.txt").read_text()
    for line in ("device     cpu .* \\(as asked\\)", "precision  float32 matrix products \\(as asked\\)", "compile    off \\(pays on CUDA only\\)"):
        assert re.search("^" + line, shown, re.M), shown


def test_a_gpu_without_native_bfloat16_gets_float32(monkeypatch):
    for name, value in dict(is_available=True, get_device_capability=(7, 5), get_device_name="Tesla T4", set_device=None).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda *_: None)
    machine = train.choose_machine(None, None, None)
    assert machine.dtype == torch.float32 and "no native bfloat16" in machine.lines[1] and "Tesla T4" in machine.lines[0]


def test_samples_are_printed_for_people_and_as_json(trained):
    people, programs, hole = run_all(trained, [
        ("sample.py", "--out_dir=out/clm", "--prompt=def ", "--max_new_tokens=20"),
        ("sample.py", "--out_dir=out/clm", "--prompt=def ", "--max_new_tokens=20", "--num_samples=3", "--temperature=1", "--json"),
        ("sample.py", "--out_dir=out/fim", "--prompt=def ", "--suffix=: return 1", "--max_new_tokens=20", "--json")])
    for result in (people, programs, hole):
        works(result)
    assert people.out.startswith("def ") and "tokens/s" in people.err
    three, (one,) = ([json.loads(line) for line in result.out.splitlines()] for result in (programs, hole))
    assert len(three) == 3 and len({s["text"] for s in three}) > 1
    for s in (*three, one):
        assert s.keys() >= {"prompt", "text", "tokens", "tokens_per_s"} and s["prompt"] == "def " and len(s["tokens"]) <= 20
        assert get_tokenizer("bytes").decode(s["tokens"]) == s["text"]
    assert one["suffix"] == ": return 1"


def test_another_objective_starts_from_a_checkpoint_and_replays_an_older_corpus(copied):
    result = run(copied, "train.py", *TINY, "--objective=sop", "--init_from=out/clm", "--replay_data=older.txt", "--replay_rate=0.5", "--lr=0",
                 "--lr_embed=0", "--max_steps=2")
    works(result)
    before, after = (load_checkpoint(copied / "out" / name / "ckpt.pt") for name in ("clm", "sop"))
    assert "new here: pair_head" in result.out and "from out/clm (clm, 20 steps)" in result.out and after["step"] == 2
    assert "50% of the rows from older.txt" in result.out and "replaces" not in result.out
    assert leaves(after["model"]["layers.0.mlp.up_proj.weight"]) == leaves(before["model"]["layers.0.mlp.up_proj.weight"])


def test_a_run_that_is_replaced_is_named_and_a_fresh_trunk_is_not_frozen(copied, capsys):
    with pytest.raises(UserError, match="--freeze_trunk=True needs --init_from"):
        train.main([*TINY, "--objective=mtp", "--out_dir=out/clm", "--freeze_trunk=True"])
    assert "replaces" not in capsys.readouterr().out
    train.main([*TINY, "--out_dir=out/clm", "--max_steps=1"])
    assert "replaces   the run in out/clm;" in capsys.readouterr().out


def test_figures_of_the_log_are_means_over_its_steps(folder):
    """The members' losses too: each weighs as many rows as it had."""
    for every in (1, 4):
        train.main([*TINY, "--objective=clm,bart", f"--log_every={every}", "--max_steps=4", f"--out_dir=out/{every}"])
    each, (mean,) = ([line for line in log_of(folder / f"out/{every}") if "loss" in line] for every in (1, 4))
    assert mean["loss"] == pytest.approx(np.mean([line["loss"] for line in each]), abs=1e-4)
    for name in ("loss_clm", "loss_bart"):
        seen = [line[name] for line in each if name in line]
        assert min(seen) <= mean[name] <= max(seen) and mean[name] != pytest.approx(seen[-1], abs=2e-4)


def test_half_of_the_rows_are_the_replayed_ones(folder):
    new, old = (load_tokens(DataConfig(data=name)).train for name in ("text.txt", "older.txt"))
    rows = data.Replay(new, old, 0.5).stream(Rng(1, 0, 0, range(400)), 32)
    digits = np.isin(rows, np.frombuffer(b"0123456789 ", np.uint8)).all(1).mean()
    assert 0.4 < digits < 0.6


def test_new_heads_of_any_size_start_from_any_checkpoint(copied):
    for flags in ("--objective=mtp --n_future=2 --init_from=out/clm", "--objective=mtp --n_future=3 --mtp_heads=parallel --init_from=out/mtp",
                  "--objective=clm --init_from=out/mtp/ckpt.pt --out_dir=out/again"):
        train.main([*TINY, "--max_steps=1", *flags.split()])
    assert load_checkpoint("out/again/ckpt.pt")["model"].keys() == load_checkpoint("out/clm/ckpt.pt")["model"].keys()


def test_frozen_trunk_stays_bit_identical_while_its_new_heads_learn(copied):
    before = load_checkpoint("out/clm/ckpt.pt")["model"]
    for heads in ("chain", "parallel"):
        train.main([*TINY, "--max_steps=2", "--objective=mtp", f"--mtp_heads={heads}", "--init_from=out/clm", "--freeze_trunk=True"])
        after = load_checkpoint("out/mtp/ckpt.pt")["model"]
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        new = [value for name, value in after.items() if name.startswith("future") and "down_proj" in name]
        assert new and all(value.any() for value in new)             # they began at zero


def test_rows_are_printed_for_programs(folder):
    result = run(folder, "objectives.py", "fim", *ROWS, "--n=3", "--seed=1")
    works(result)
    head, *rows = map(json.loads, result.out.splitlines())
    assert head.keys() == {"objective", "block_size", "vocab_size", "special_tokens", "attention"} and len(rows) == 3
    assert head["special_tokens"]["<|endoftext|>"] == 256 and head["block_size"] == 32 and head["vocab_size"] == 576
    for row in rows:
        assert row.keys() == {"source", "inputs", "targets", "weights", "segment", "prefix"} and len(row["inputs"]) == len(row["targets"]) == 32


def test_the_default_corpus_is_the_standard_library(folder):
    result = run(folder, "objectives.py", "fim", "--n=3")
    works(result)
    assert "tokenizing Python standard library" in result.err and result.out.count("original") == 3


@pytest.mark.parametrize("name", OBJECTIVES)
def test_rows_of_eight_train_and_end_well(name, folder, capsys):
    train.main([*TINY, f"--objective={name}", "--block_size=8", "--max_steps=2"])
    assert "python sample.py" in capsys.readouterr().out


# ---- the command line -----------------------------------------------------------------------------------------------

def test_mistyped_unread_and_abbreviated_flags_are_refused(folder):
    cases = [("train.py --objectve=fim", "did you mean --objective?"), ("train.py --lear=3", "unknown flag --lear=3"),
             ("train.py --compile=maybe", "neither true nor false"), ("train.py --objective=clm --mask_rate=0.3", "--mask_rate is not read by clm"),
             ("objectives.py --objectiv=fim", "unknown flag"), ("objectives.py fmi", "did you mean fim?"), ("objectives.py clm --jso", "did you mean --json?")]
    for (_, words), result in zip(cases, run_all(folder, [case.split() for case, _ in cases])):
        refused(result, words)
    assert {p.name for p in folder.iterdir()} == {"text.txt", "older.txt"}


@pytest.mark.parametrize("main, flag, words", [
    (sample.main, "--temprature=1", "did you mean --temperature?"), (train.main, "--batch_size=3.5", "--batch_size"), (train.main, "fim", "unexpected 'fim'"),
    (train.main, "--preset=huge", "--preset"), (train.main, "--tied=1", "neither true nor false"), (sample.main, "--out=x", "--out=x")])
def test_words_that_are_no_flags_exit(main, flag, words):
    with pytest.raises(SystemExit, match=f"error: .*{re.escape(words)}"):
        main([flag])


@pytest.mark.parametrize("flags, words", [
    ("--lr=nan", "--lr=nan"), ("--max_steps=0", "in [1, inf)"), ("--block_size=7", "--block_size=7"), ("--batch_size=5 --grad_accum=2", "multiple"),
    ("--n_head=3 --n_kv_head=2", "--n_kv_head=2"), ("--n_kv_head=0", "--n_kv_head=0"), ("--d_ff=0", "--d_ff=0"),
    ("--head_dim=33", "even"), ("--rope_theta=0", "--rope_theta=0"), ("--replay_rate=1", "--replay_rate=1"),
    ("--replay_rate=0.1", "with --replay_data only"), ("--schedule=cosine --decay_frac=0.5", "with --schedule=linear only"),
    ("--objective=span --corruption_rate=1", "--corruption_rate=1"), ("--objective=mtp --n_future=0", "--n_future=0"), ("--objective=clm:0", "positive"),
    ("--objective=clm,electra", "cannot be mixed"), ("--freeze_trunk=True", "--freeze_trunk"), ("--tokenizer=bpe:12", "bpe:4096"),
    ("--tokenizer=gpt3", "did you mean gpt2?"), ("--data=nowhere", "--data=nowhere does not exist"), ("--init_from=nowhere", "train first"),
    ("--fim_layouts=psm,xyz --objective=fim", "psm, spm, spm2"), (f"--seed={1 << 31}", "--seed"), ("--seed=-1", "--seed=-1"),
    ("--device=cuda:99", "--device=cpu")])
def test_values_no_run_can_have_are_refused_by_name(flags, words, folder):
    with pytest.raises(UserError, match=re.escape(words)):
        train.main([*TINY, *flags.split()])


def test_help_lists_every_flag_with_its_default_on_a_screen_of_100_columns(folder):
    scripts = {"train.py": (train.TrainConfig, ModelConfig, Knobs, DataConfig), "sample.py": (sample.SampleConfig,),
               "objectives.py": (view.ViewConfig, Knobs, DataConfig), "bench.py": (bench.BenchConfig,)}
    for (name, configs), result in zip(scripts.items(), run_all(folder, [(script, "--help") for script in scripts])):
        works(result)
        assert max(map(len, result.out.splitlines())) <= 100, name
        shown = "".join(result.out.split())                                      # wrapped anywhere
        for field in (f for config in configs for f in dataclasses.fields(config) if f.metadata):
            about, default = field.metadata["help"], f"[{field.default}]"
            if field.default in ("", None):
                assert re.search("automatic:|empty:|left out:", about), f"--{field.name} does not say what happens without it"
                default = ""
            assert re.search(rf"^ +--{field.name}\b", result.out, re.M) and "".join(f"{about}{default}".split()) in shown, (name, field.name)


def test_the_commands_of_the_readme_have_flags_that_exist():
    configs = {"train": (train.TrainConfig, ModelConfig, Knobs, DataConfig), "sample": (sample.SampleConfig,),
               "objectives": (view.ViewConfig, Knobs, DataConfig)}
    commands = re.findall(r"python (train|sample|objectives)\.py((?: [^`\n|&]*)?)", (HERE / "README.md").read_text(encoding="utf-8"))
    assert len(commands) > 5
    for script, words in commands:
        data.parse_flags([w for w in shlex.split(words) if w.startswith("-") and w != "--help"], "", *configs[script])


def test_a_tokenizer_that_would_have_to_be_fetched_names_the_remedy(folder, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder / "empty"))
    refused(run(folder, "objectives.py", "clm", *ROWS, "--tokenizer=gpt2"), "--tokenizer=gpt2", "TIKTOKEN_CACHE_DIR", "--tokenizer=bytes")


def test_a_terminal_that_knows_only_ascii(folder, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    works(run(folder, "objectives.py", "fim", "--data=text.txt"))


# ---- stopping and going on ------------------------------------------------------------------------------------------

@posix
def test_a_signal_finishes_the_step_saves_and_prints_the_command_that_goes_on_bit_exactly(trained, folder):
    flags = [*TINY, "--objective=clm", "--eval_every=5", "--max_steps=20"]
    process = start(folder, "train.py", *flags)
    until(process, "step 05/20")
    process.send_signal(signal.SIGTERM)
    stopped = finish(process)
    works(stopped)
    command = re.search(r"stopped after step \d+, saved. Go on: python (.*)", stopped.out)[1]
    works(run(folder, *shlex.split(command)))
    assert weights_and_optimizer(folder / "out/clm") == weights_and_optimizer(trained / "out/clm")
    assert losses(folder / "out/clm") == losses(trained / "out/clm")


@posix
def test_a_second_signal_stops_at_once(folder):
    process = start(folder, "train.py", *TINY, "--max_steps=1000000")
    until(process, "step 0000002/")
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):      # both arrive within one step
        process.send_signal(number)
    assert finish(process).code == 128 + signal.SIGTERM and not (folder / "out/clm/ckpt.pt").exists()


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_tokenizing_leaves_nothing_behind(number, folder):
    with open(folder / "big.txt", "wb") as f:
        f.truncate(1 << 28)                                                      # takes no room, but seconds to read
    process = start(folder, "objectives.py", "clm", "--data=big.txt",
                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    until(process, lambda _: partial_files(folder))
    process.send_signal(number)
    result = finish(process)
    assert result.code == 128 + number and "Traceback" not in result.err and not partial_files(folder)


@pytest.mark.parametrize("name", [*OBJECTIVES, "clm:0.5,fim:0.3,ul2:0.2", "clm --replay_data=older.txt --replay_rate=0.4 --grad_accum=2"])
def test_ten_steps_and_ten_more_are_twenty(name, folder):
    for flags in ("--out_dir=whole", "--out_dir=parts --max_steps=10", "--out_dir=parts --init_from=resume"):
        train.main([*TINY, *f"--objective={name} {flags}".split()])
    assert weights_and_optimizer(folder / "parts") == weights_and_optimizer(folder / "whole")
    assert losses(folder / "parts") == losses(folder / "whole")


def test_resume_refuses_what_the_checkpoint_fixes_and_names_both_values(copied):
    cases = [("--objective=fim", "clm"), ("--tokenizer=bpe:300", "bytes"), ("--n_layer=2", "1"), ("--head_dim=64", "32"), ("--preset=small", "tiny")]
    resume = ["train.py", "--out_dir=out/clm", "--init_from=resume", "--max_steps=30"]
    refused(run(copied, *resume, *[flag for flag, _ in cases[:1]]), "--objective=fim", "the checkpoint has clm")
    for flag, saved in cases:
        with pytest.raises(UserError, match=f"{flag}, but the checkpoint has {saved}"):
            train.main([*resume[1:], flag])
    with pytest.raises(UserError, match="--fim_rate=0.9, but the checkpoint has 0.5"):
        train.main(["--out_dir=out/fim", "--init_from=resume", "--max_steps=30", "--fim_rate=0.9"])
    with pytest.raises(UserError, match="20 steps; give a larger --max_steps"):
        train.main(["--out_dir=out/clm", "--init_from=resume"])


def test_a_run_that_cannot_start_leaves_the_log_of_the_one_before(copied):
    before = (copied / "out/clm/log.jsonl").read_bytes()
    with pytest.raises(UserError):
        train.main([*TINY, "--data=older.txt", "--block_size=100000"])
    assert (copied / "out/clm/log.jsonl").read_bytes() == before


def test_one_seed_gives_one_run_and_evaluating_changes_nothing(trained, folder):
    """`trained` evaluates every 5 steps."""
    works(run(folder, "train.py", *TINY, "--eval_every=20"))
    assert losses(folder / "out/clm") == losses(trained / "out/clm")
    assert weights_and_optimizer(folder / "out/clm") == weights_and_optimizer(trained / "out/clm")
    last = [[line["val_loss"] for line in log_of(where / "out/clm") if "val_loss" in line][-1] for where in (folder, trained)]
    assert last[0] == last[1]
    train.main([*TINY, "--seed=2", "--out_dir=other"])
    assert not set(losses(folder / "other")) & set(losses(trained / "out/clm"))


# ---- numbers that go wrong ------------------------------------------------------------------------------------------

def test_steps_without_a_target_have_loss_zero_and_harm_nothing(folder):
    works(run(folder, "train.py", *TINY, "--objective=diffusion", "--block_size=8", "--batch_size=1", "--max_steps=40"))
    seen = losses(folder / "out/diffusion")
    assert 0.0 in seen and max(seen) > 0 and all(map(math.isfinite, seen))
    assert all(weight.isfinite().all() for weight in load_checkpoint(folder / "out/diffusion/ckpt.pt")["model"].values())


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_last_checkpoint(copied):
    before = (copied / "out/clm/ckpt.pt").read_bytes()
    result = run(copied, "train.py", "--out_dir=out/clm", "--init_from=resume", "--max_steps=40", "--lr_head=1e38", "--eval_every=20", "--save_every=20")
    refused(result, "the loss became", "by step 22", "out/clm", "--lr")
    assert (copied / "out/clm/ckpt.pt").read_bytes() == before


@pytest.mark.parametrize("flags, what", [("--eval_every=1 --lr_head=1e38", "validation loss"), ("--save_every=1 --lr_embed=inf", "largest weight")])
def test_weights_that_went_wrong_after_a_good_step_are_not_saved(flags, what, copied, monkeypatch):
    for module in (data, train):
        monkeypatch.setattr(module, "check_values", lambda config: None)         # lets an infinite rate through
    before = (copied / "out/clm/ckpt.pt").read_bytes()
    with pytest.raises(UserError, match=f"the {what} became .* by step 21"):
        train.main(["--out_dir=out/clm", "--init_from=resume", "--max_steps=40", *flags.split()])
    assert (copied / "out/clm/ckpt.pt").read_bytes() == before


def test_out_of_memory_names_the_flags_to_lower_and_keeps_the_checkpoint(copied, monkeypatch):
    before = (copied / "out/clm/ckpt.pt").read_bytes()
    resume = ["--out_dir=out/clm", "--init_from=resume", "--max_steps=40"]
    refused(run(copied, "train.py", *resume, f"--batch_size={1 << 50}"), "out of memory", "--batch_size", "--grad_accum", "--preset")

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    monkeypatch.setitem(OBJECTIVES, "clm", OBJECTIVES["clm"]._replace(loss=full))
    for main, flags in ((train.main, resume), (sample.main, ["--out_dir=out/clm", f"--num_samples={1 << 40}"])):
        monkeypatch.setattr(sys, "argv", ["program", *flags])
        with pytest.raises(SystemExit, match="out of memory; what was saved before is intact. Lower --this"):
            data.cli(main, "--this")
    assert (copied / "out/clm/ckpt.pt").read_bytes() == before


# ---- files that go wrong --------------------------------------------------------------------------------------------

@posix
def test_killed_while_saving_again_and_again_a_checkpoint_always_loads(folder):
    draw, at = random.Random(0), 0
    for kill in range(2):
        process = start(folder, "train.py", *TINY, "--save_every=1", "--max_steps=1000000", *(["--init_from=resume"] if kill else []))
        until(process, lambda shown: shown.count("\nstep ") > 3)
        time.sleep(draw.random() * 0.2)
        process.kill()
        finish(process)
        state = load_checkpoint(folder / "out/clm/ckpt.pt")
        assert state["step"] > at and all(load_checkpoint(p) for p in (folder / "out/clm").glob("previous.pt"))
        at = state["step"]
    train.main(["--init_from=resume", "--out_dir=out/clm", f"--max_steps={at + 1}"])
    assert not partial_files(folder)                                             # what a kill left is cleared away


@posix
def test_killed_at_any_moment_of_a_save_the_old_or_the_new_checkpoint_loads(trained, folder):
    shutil.copy(trained / "out/clm/ckpt.pt", folder)
    works(run(folder, "-c", """if True:
        import os, random, signal, time, data
        draw, state = random.Random(0), data.load_checkpoint("ckpt.pt")
        for kill in range(40):
            child = os.fork()
            while child == 0:
                state["step"] += 1
                data.save_checkpoint("ckpt.pt", state)
            time.sleep(draw.random() * 0.03)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            before, state = state["step"], data.load_checkpoint("ckpt.pt")
            assert state["step"] >= before
    """))


@posix
@pytest.mark.parametrize("what, limit, words", [
    ("objectives.py clm --data=text.txt --cache_dir=new", 10_000, "new/tokens-"),
    ("train.py --out_dir=out/clm --init_from=resume --max_steps=22", 200_000, "out/clm/ckpt.pt"),
    ("train.py --out_dir=out/clm --init_from=resume --max_steps=9999", 500, "out/clm/log.jsonl")])
def test_a_full_disk_is_one_line_and_leaves_what_was_there(what, limit, words, copied):
    """A limit on the size of a file stands for the full disk: of the cache, the checkpoint, the log."""
    resource = pytest.importorskip("resource")
    before = {p: p.read_bytes() for p in copied.rglob("*.pt")}
    log = (copied / "out/clm/log.jsonl").read_bytes()
    result = run(copied, *what.split(), preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    refused(result, "File too large", words)
    assert not partial_files(copied) and {p: p.read_bytes() for p in copied.rglob("*.pt")} == before
    assert (copied / "out/clm/log.jsonl").read_bytes().startswith(log)


class Bomb:
    """Unpickled, it makes a file."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


@pytest.mark.parametrize("disguise", ["pickle", "zip"])
def test_a_checkpoint_that_would_run_code_is_refused(disguise, copied):
    path = copied / "out/clm/ckpt.pt"
    if disguise == "pickle":
        path.write_bytes(pickle.dumps(Bomb()))
    else:
        torch.save({**load_checkpoint(path), "step": Bomb()}, path)
    result = run(copied, "sample.py" if disguise == "zip" else "train.py", "--out_dir=out/clm", *(["--init_from=resume"] if disguise == "pickle" else []))
    refused(result, "out/clm/ckpt.pt", "cp out/clm/previous.pt out/clm/ckpt.pt")
    assert not (copied / "executed").exists()
    pickle.loads(pickle.dumps(Bomb()))
    assert (copied / "executed").exists()                                        # the bomb is live


@pytest.mark.parametrize("change", [
    dict(tokenizer="[" * 100_000), dict(tokenizer="{}"), dict(tokenizer='{"name": 3}'), dict(tokenizer='{"name": "bpe:300"}'), dict(tokenizer="[]"),
    dict(tokenizer='{"name": "bpe:300", "pattern": "(", "pieces": ["QQ==", "QQ=="]}'), dict(tokenizer=3), dict(optimizers=None), dict(model={}),
    dict(model_config={"n_layer": 2})])
def test_a_checkpoint_that_contradicts_itself_is_refused(change, copied):
    save_checkpoint("out/clm/ckpt.pt", load_checkpoint("out/clm/ckpt.pt") | change)
    for main, flags in ((train.main, ["--init_from=resume", "--max_steps=30"]), (sample.main, [])):
        with pytest.raises(UserError):
            main(["--out_dir=out/clm", *flags])


@pytest.mark.parametrize("part, change, words", [
    (None, dict(step=-1), "its step or its time is impossible"), (None, dict(elapsed_s=math.nan), "its step or its time is impossible"),
    (None, dict(model={"embed_tokens.weight": 3}), "its weights are no tensors"), (None, dict(model={3: torch.zeros(1)}), "its weights are no tensors"),
    (None, dict(objective="xyz"), "there is no 'xyz'"), (None, dict(objective="nsp"), "are not those of its configuration"),
    ("train_config", dict(block_size="x"), "--block_size='x': must be int"), ("train_config", dict(lr=math.nan), "--lr=nan: must be in [0, inf)"),
    ("train_config", dict(schedule="x"), "--schedule='x': must be linear or"), ("train_config", dict(seed=True), "--seed=True: must be int"),
    ("knobs", dict(n_future=2.5), "--n_future=2.5: must be int"), ("knobs", dict(fim_layouts="xyz"), "--fim_layouts=xyz: must be a comma list"),
    ("model_config", dict(n_layer="1"), "--n_layer='1': must be int"), ("model_config", dict(d_ff=None, n_embd="1"), "the checkpoint says"),
    ("model_config", dict(head_dim=7), "--head_dim=7: must be even"), ("model_config", dict(n_head=3, n_kv_head=2), "must divide --n_head=3"),
    ("model_config", dict(vocab_size=99), "it has 99 ids"),
    ("model_config", dict(n_layer=3), "weights are not those of its configuration"), ("data_config", dict(invalid_utf8=1), "--invalid_utf8=1: must be")])
def test_a_value_that_no_checkpoint_can_have_is_named(part, change, words, copied):
    saved = load_checkpoint("out/clm/ckpt.pt")
    save_checkpoint("out/clm/ckpt.pt", saved | ({part: saved[part] | change} if part else change))
    for main, flags in ((train.main, ["--init_from=resume", "--max_steps=30"]), (sample.main, [])):
        with pytest.raises(UserError, match=re.escape(words)):
            main(["--out_dir=out/clm", *flags])


def test_optimizers_of_another_run_are_refused_and_an_unknown_field_is_not(copied):
    saved = load_checkpoint("out/clm/ckpt.pt")
    adam, muon = saved["optimizers"]
    wrong = {0: {"momentum": torch.zeros(1, 3, 3)}}
    for optimizers in ([], [adam], [adam, 3], [adam, {**muon, "state": wrong}], [adam, {**muon, "param_groups": []}], [adam, {"param_groups": muon["param_groups"]}],
                       [adam, muon | {"state": {}}]):
        save_checkpoint("out/clm/ckpt.pt", saved | {"optimizers": optimizers})
        with pytest.raises(UserError, match="optimizers are not those of its configuration"):
            train.main(["--out_dir=out/clm", "--init_from=resume", "--max_steps=30"])
    save_checkpoint("out/clm/ckpt.pt", saved | {"knobs": saved["knobs"] | {"of_a_fork": 1}, "train_config": saved["train_config"] | {"of_a_fork": 1}})
    sample.main(["--out_dir=out/clm", *GREEDY.split()])
    with pytest.raises(UserError, match="--freeze_trunk=True, but the checkpoint has False"):
        train.main(["--out_dir=out/clm", "--init_from=resume", "--max_steps=30", "--freeze_trunk=True"])


def test_a_damaged_checkpoint_names_the_file_and_the_remedy_which_works(copied):
    path = copied / "out/clm/ckpt.pt"
    path.write_bytes(path.read_bytes()[:-1000])
    remedy = "cp out/clm/previous.pt out/clm/ckpt.pt"
    refused(run(copied, "sample.py", "--out_dir=out/clm"), "out/clm/ckpt.pt is damaged", remedy)
    shutil.copy(*remedy.split()[1:])
    train.main(["--init_from=resume", "--out_dir=out/clm"])
    assert load_checkpoint(path)["step"] == 20


def test_every_flipped_byte_of_a_checkpoint_is_noticed_or_harmless(copied):
    path, draw = copied / "out/clm/ckpt.pt", np.random.default_rng(0)
    raw = path.read_bytes()
    good, noticed = leaves(load_checkpoint(path)), 0
    at = np.concatenate([draw.integers(0, len(raw), 150), draw.integers(len(raw) - 8000, len(raw), 250)])      # the directory stands at the end
    for place in at.tolist():
        flipped = bytearray(raw)
        flipped[place] ^= 1 << draw.integers(8)
        path.write_bytes(flipped)
        try:
            assert leaves(load_checkpoint(path)) == good, place
        except UserError as e:
            noticed += "ckpt.pt is damaged" in str(e)
    assert noticed > 200


# ---- the corpus and its cache ---------------------------------------------------------------------------------------

def text_of(tokens: data.Tokens) -> str:
    return tokens.tok.decode(np.concatenate([tokens.train.tokens, tokens.val.tokens])).replace("<|endoftext|>", "")


def test_an_edited_corpus_another_tokenizer_and_another_reading_are_tokenized_afresh(folder):
    (folder / "a.txt").write_text('{"text": "some words"}\n' * 9)
    first = text_of(load_tokens(DataConfig(data="a.txt")))
    stamp = os.stat("a.txt")
    (folder / "a.txt").write_text('{"text": "same words"}\n' * 9)
    os.utime("a.txt", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))                 # same size, same date
    assert text_of(load_tokens(DataConfig(data="a.txt"))) == first.replace("some", "same")
    assert text_of(load_tokens(DataConfig(data="a.txt", tokenizer="bpe:260"))) == first.replace("some", "same")
    shutil.copy("a.txt", "a.jsonl")                                              # the same bytes, read otherwise
    assert text_of(load_tokens(DataConfig(data="a.jsonl"))) == "same words" * 9
    assert text_of(load_tokens(DataConfig(data="a.jsonl", tokenizer="bpe:260"))) == "same words" * 9


def cache_of(folder: Path) -> Path:
    return next((folder / ".cache").glob("tokens-*.bin"))


def rechecked(raw: bytes, **change) -> bytes:
    """A cache with another header and the checksum that belongs to it."""
    header = {**json.loads(raw[:4096]), **change}
    header["crc"] = zlib.crc32(raw[4096:], zlib.crc32(json.dumps({k: v for k, v in header.items() if k != "crc"}).encode()))
    return json.dumps(header).encode().ljust(4096) + raw[4096:]


@pytest.mark.parametrize("harm", [
    lambda raw: raw[:-2], lambda raw: raw[:3000], lambda raw: b"", lambda raw: raw[:5000] + b"!" + raw[5001:], lambda raw: b"[" * len(raw),
    lambda raw: pickle.dumps(Bomb()), lambda raw: re.sub(rb'(?<="val_bytes": )\d', b"1", raw), lambda raw: rechecked(raw, val_bytes=0),
    lambda raw: rechecked(raw, n_train=-1), lambda raw: rechecked(raw[:4096] + b"\xff" * len(raw[4096:])), lambda raw: b"[1, 2]".ljust(4096)],
    ids=["cut", "short", "empty", "flipped", "deep", "pickle", "header", "no bytes", "negative", "strange ids", "list"])
def test_a_damaged_or_hostile_cache_is_built_again(harm, folder):
    load_tokens(DataConfig(data="text.txt"))
    path = cache_of(folder)
    good = path.read_bytes()
    path.write_bytes(harm(good))
    assert path.read_bytes() != good
    load_tokens(DataConfig(data="text.txt"))
    assert path.read_bytes() == good and not (folder / "executed").exists()


def test_a_damaged_cache_does_not_show_in_what_the_command_line_prints(folder):
    before = run(folder, "objectives.py", "clm", *ROWS)
    os.truncate(cache_of(folder), 10_000)
    assert run(folder, "objectives.py", "clm", *ROWS).out == before.out


def test_a_hostile_tokenizer_file_is_replaced(folder):
    tokens = load_tokens(DataConfig(data="text.txt", tokenizer="bpe:300"))
    path = next((folder / ".cache").glob("bpe300-*.json"))
    for content in (pickle.dumps(Bomb()), b"[" * 100_000, b'{"name": "bpe:300", "pattern": "(", "pieces": []}', b"{", b'{"name": "bpe:300"}'):
        path.write_bytes(content)
        works(run(folder, "objectives.py", "clm", *ROWS, "--tokenizer=bpe:300"))
        assert path.read_text() == tokens.tok.to_json() and not (folder / "executed").exists()


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_runs_that_build_one_cache_at_once_agree(tokenizer, folder):
    together = [start(folder, "objectives.py", "clm", *ROWS, f"--tokenizer={tokenizer}") for _ in range(4)]
    shown = {finish(process).out for process in together}
    assert len(shown) == 1 and shown.pop().count("\n") == 2
    assert len(list((folder / ".cache").glob("tokens-*"))) == 1 and not partial_files(folder)


WEIRD = {   # name: content, and the words of the refusal (none: it works)
    "empty.txt": (b"", "no text in it"), "short.txt": (b"a few words", "one row needs"), "nul.txt": (b"\0" * 5000, None),
    "line.txt": (b"x" * 3_000_000, None), "bom_crlf.txt": (b"\xef\xbb\xbfone\r\ntwo\r\n" * 300, None), "invalid.txt": (b"a\xff\xfeb\n" * 900, None),
    "only_separators.txt": (b"<|endoftext|>\n" * 99, "0 tokens"), "letters.txt": (b"a\n<|endoftext|>\n" * 90, None),
    "good.jsonl": (b'{"text": "one\\ntwo"}\r\n\n' * 300, None), "broken.jsonl": (b'{"text": "one"}\n{"text": 2}\n', "broken.jsonl, line 2"),
    "cut.jsonl": (b'{"text": "one"}\n{"te', "cut.jsonl, line 2"), "deep.jsonl": (b"[" * 100_000, "deep.jsonl, line 1"),
    "surrogate.jsonl": (b'{"text": "\\ud800 and more words"}\n' * 90, None), "nowhere": (None, "does not exist"), "images/a.png": (b"\x89PNG\0\0", "no text"),
    "hidden/.a.txt": (b"text", "no text"), "folder/a.txt": (b"some words\n" * 50, None), "folder/b.bin": (b"\0" * 50, None)}


def test_weird_corpora_work_or_are_refused_in_one_line(folder):
    for name, (content, _) in WEIRD.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if content is not None:
            (folder / name).write_bytes(content)
    results = run_all(folder, [("objectives.py", "clm", "--json", f"--data={name.split('/')[0]}") for name in WEIRD])
    for (_, words), result in zip(WEIRD.values(), results):
        if words is None:
            works(result)
        else:
            refused(result, words)
    notes = {name: result.err for name, result in zip(WEIRD, results)}
    assert "1800 places" in notes["invalid.txt"] and "--invalid_utf8=refuse" in notes["invalid.txt"]


@pytest.mark.parametrize("name", ["invalid.txt", "invalid.jsonl"])
def test_invalid_utf8_is_replaced_and_counted_or_refused_as_the_flag_says(name, folder):
    (folder / name).write_bytes(b'{"text": "a\xffb"}\n' * 99)
    said = []
    text = text_of(load_tokens(DataConfig(data=name), log=said.append))
    assert text.count("a\ufffdb") == 99 and any("99 places" in line for line in said)
    with pytest.raises(UserError, match=f"{name}: not UTF-8"):
        load_tokens(DataConfig(data=name, invalid_utf8="refuse"))


def test_line_ends_and_separators_across_the_edges_of_blocks(folder, monkeypatch):
    for block in (16, 17, 18, 31, 64):
        monkeypatch.setattr(data, "BLOCK", block)
        (folder / "t.txt").write_bytes(b"\xef\xbb\xbfone\r\n<|endoftext|>\r\ntwo\r\n" + b"x" * 40 + b"<|endoftext|>\r\n<|endoftext|>\nthree\r\r\n<|endoftext|>")
        pieces = list(data.Corpus("t.txt").pieces())
        assert "".join(text for text, _ in pieces) == "one\ntwo\n" + "x" * 40 + "<|endoftext|>\nthree\r\n", block
        assert sum(last for text, last in data._nonempty(iter(pieces))) == 3


def test_a_million_blanks_are_tokenized(folder):
    text = "word" + " " * 1_200_000 + "word" + "\n" * 1_200_000 + "word\n" * 300
    (folder / "blank.txt").write_text(text)
    assert text_of(load_tokens(DataConfig(data="blank.txt", tokenizer="bpe:258"))) == text


@linux
def test_a_corpus_ten_times_larger_than_the_memory_allowed_is_tokenized_and_read(folder):
    """The limit is on what is added to a process that has trained before; blocks and stacks of threads are made small to match."""
    room, piece = 8 << 20, (folder / "text.txt").read_bytes().replace(b"<|endoftext|>\n", b"") + b"<|endoftext|>\n"
    with open(folder / "big.txt", "wb") as f:
        f.write(piece * (10 * room // len(piece) + 1))
    limited = f"""if True:
        import resource, sys, threading, data, train
        threading.stack_size(1 << 18)
        data.BLOCK = 1 << 16
        train.main([*sys.argv[1:], "--data=text.txt"])
        used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (used + {room}, used + {room}))
        data.cli(train.main)
    """
    result = run(folder, "-c", limited, *TINY, "--max_steps=2", "--data=big.txt", env={**os.environ, "MALLOC_ARENA_MAX": "1"})
    works(result)
    assert "data       big.txt (1 file, 83.9 MB)" in result.out


# ---- text that looks like something else ----------------------------------------------------------------------------

def test_special_tokens_spelled_out_stay_plain_text(copied):
    (copied / "a.txt").write_text("a [MASK] <PRE> <|endoftext|> b <extra_id_0>\n" * 90)
    corpus, prompt = run_all(copied, [("objectives.py", "clm", "--json", "--data=a.txt", "--n=20"),
                                      ("sample.py", "--out_dir=out/clm", "--prompt=a [MASK] <|endoftext|>", "--json", "--max_new_tokens=5")])
    for row in map(json.loads, corpus.out.splitlines()[1:]):
        assert max(row["source"]) < 256
    assert json.loads(prompt.out)["prompt"] == "a [MASK] <|endoftext|>"
    read = []
    reader = sample.Reader(load_checkpoint("out/clm/ckpt.pt"), "cpu")
    reader.model.trunk = lambda ids, *more, trunk=reader.model.trunk: (read.append(ids), trunk(ids, *more))[1]
    sample.read_out(reader, sample.SampleConfig(prompt="[MASK]<PRE>", max_new_tokens=1), quiet=True)
    assert read[0].tolist() == [list(b"[MASK]<PRE>")]


def test_only_real_text_is_sampled_and_any_ids_decode(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    sample.main(["--out_dir=out/clm", "--temperature=1e30", "--max_new_tokens=400", "--num_samples=8", "--json"])
    drawn = [i for line in capsys.readouterr().out.splitlines() for i in json.loads(line)["tokens"]]
    assert len(set(drawn)) > 200 and max(drawn) < 256                            # uniform over bytes, and EOT ends the text
    draw = np.random.default_rng(0)
    for tok in (get_tokenizer("bytes"), data.Tokenizer("bpe:257", {bytes([b]): b for b in range(256)} | {b"ab": 256}, data.BPE_PATTERN, {})):
        for _ in range(300):
            assert isinstance(tok.decode(draw.integers(-5, tok.vocab_size + 99, draw.integers(0, 40))), str)
        assert tok.decode([0xE2, 0x82]) == "\ufffd" and tok.decode([tok.n_ids, tok.vocab_size - 1, -1]) == ""


# ---- what is asked of a model ---------------------------------------------------------------------------------------

GREEDY = "--prompt=def --max_new_tokens=12"


@pytest.mark.parametrize("flags", ["--temperature=1 --top_p=0", "--temperature=1e-30", "--temperature=1e-320", "--temperature=1 --top_k=1", "--seed=7"])
def test_limits_of_decoding_are_the_greedy_text(flags, trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    texts = []
    for more in ([], flags.split()):
        sample.main(["--out_dir=out/clm", "--json", *GREEDY.split(), *more])
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1] and len(texts[0]) == 12


@pytest.mark.parametrize("flags", ["--temperature=1e30", "--temperature=1e39", "--temperature=1e308", "--temperature=1 --top_k=100000", "--max_new_tokens=70",
                                   "--prompt=", "--temperature=1 --top_p=1e-9", "--max_new_tokens=1"])
def test_wide_open_decoding_is_defined(flags, trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    sample.main(["--out_dir=out/clm", "--json", *GREEDY.split(), *flags.split()])
    assert json.loads(capsys.readouterr().out)["tokens"]


@pytest.mark.parametrize("flags, words", [
    ("--temperature=-1", "--temperature=-1.0"), ("--temperature=nan", "--temperature=nan"), ("--num_samples=0", "--num_samples=0"),
    ("--max_new_tokens=-1", "--max_new_tokens=-1"), ("--top_p=1.5", "--top_p=1.5"), ("--top_k=-1", "--top_k=-1"), ("--seed=-1", "--seed=-1"),
    ("--suffix=x", "this clm model does not serve"), ("--draft_tokens=2", "--draft_tokens is read with --speculative"),
    ("--steps=3", "--steps is not read by this model's way to answer; it belongs to diffusion"), ("--task=continue --suffix=x", "--suffix is not read"),
    ("--speculative", "mtp checkpoint"), ("--gap=", "--gap is empty"), ("--out_dir=nowhere", "train first")])
def test_requests_that_mean_nothing_are_refused(flags, words, trained, monkeypatch):
    monkeypatch.chdir(trained)
    with pytest.raises(UserError, match=re.escape(words)):
        sample.main(["--out_dir=out/clm", *flags.split()])


@pytest.mark.parametrize("preset", ["tiny", "gpt2"])
def test_the_model_that_the_benchmark_makes_can_be_read_out(preset):
    reader = sample.Reader(bench.random_state(preset), "cpu")
    out, stats = sample.Decoder(reader.model, 1, 2, None, reader.allowed(), 16, 3).generate([[1, 2]], 6, eot=-1)
    assert len(out[0]) == 6 and max(out[0]) < reader.tok.vocab_size and stats.passes


@pytest.mark.parametrize("name, flags", [("diffusion", "--steps=2 --order=random --suffix=b"), ("ul2", "--mode=X --suffix=b"), ("fim", "--suffix=b"),
                                         ("bart", "--suffix=b --temperature=1"), ("mlm", "--prompt=a[MASK]")])
def test_a_flag_is_read_where_it_means_something(name, flags, copied, capsys):
    train.main([*TINY, f"--objective={name}", "--out_dir=out/x", "--block_size=64", "--max_steps=2"])
    capsys.readouterr()
    sample.main(["--out_dir=out/x", "--prompt=a", "--json", *flags.split(), *["--max_new_tokens=4"] * (name != "mlm")])
    assert json.loads(capsys.readouterr().out)["prompt"].startswith("a")


def test_what_a_young_model_writes_cannot_change_the_terminal(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    monkeypatch.setattr(sample.Sampler, "__call__", lambda self, logits, u: torch.full(logits.shape[:-1], 27))       # ESC
    sample.main(["--out_dir=out/clm", "--prompt=a\tb", "--max_new_tokens=3"])
    sample.main(["--out_dir=out/clm", "--prompt=a\tb", "--max_new_tokens=3", "--num_samples=2"])
    assert capsys.readouterr().out == "a\tb···\n--- sample 1\na\tb···\n--- sample 2\na\tb···\n"


def test_what_does_not_write_refuses_the_flags_of_writing_and_shows_its_two_texts(copied, capsys):
    train.main([*TINY, "--objective=sop", "--out_dir=out/sop", "--block_size=256", "--max_steps=2"])
    shown = capsys.readouterr().out.split("─" * 80)
    first, second = (text.strip("\n") for text in shown[1].split("┄" * 80))
    tokens = load_tokens(DataConfig(data="text.txt"))
    held_out = "".join(tokens.tok.decode(tokens.val.tokens).split("\n"))
    assert first and second and "".join((first + second).split("\n")) in held_out and len(shown) == 3 and "probability" in shown[2]
    for flag, texts in (("--temperature=1", ["--prompt=a", "--suffix=b"]), ("--num_samples=2", ["--prompt=a[MASK]"])):
        with pytest.raises(UserError, match=f"{flag.split('=')[0]} is not read"):
            sample.main(["--out_dir=out/sop", flag, *texts])


@pytest.mark.parametrize("flags", ["--draft_tokens=2 --lookup_tokens=3", "--lookup_tokens=0", pytest.param("--compile", marks=compiler)])
def test_drafting_prints_the_same_text_and_its_figures(flags, copied):
    """As a user types it; also compiled."""
    works(run(copied, "train.py", *TINY, "--objective=mtp", "--out_dir=out/mtp"))
    plain, fast, shown = run_all(copied, [("sample.py", "--out_dir=out/mtp", "--prompt=def ", "--max_new_tokens=24", *more)
                                          for more in (["--json"], ["--json", "--speculative", *flags.split()], ["--speculative", "--lookup_tokens=1"])])
    works(fast)
    plain, fast = json.loads(plain.out), json.loads(fast.out)
    assert fast["tokens"] == plain["tokens"] and len(fast["tokens"]) == 24 and shown.out.startswith(sample.visible("def " + plain["text"]))
    assert len(fast["acceptance"]) == {"--lookup_tokens=0": 3, "--compile": 15}.get(flags, 5) and all(0 <= a <= 1 for a in fast["acceptance"])
    whole_passes = 1 + fast["passes"] * fast["tokens_per_pass"]                  # the first token comes with the prompt
    assert 24 - 1 - len(fast["acceptance"]) - 0.1 <= whole_passes <= 24.1 and fast["plain_tokens_per_s"] > 0
    assert re.search(r"tokens/s; plain \d+ tokens/s; [\d.]+ tokens per pass; kept of the first 3 drafts "
                     r"\d+%, \d+%, \d+%, of 1 looked up after them [\d.]+ a pass\]", shown.err)


def test_compiling_without_a_compiler_is_one_line(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    refused(run(trained, "sample.py", "--out_dir=out/clm", "--compile", *GREEDY.split()), "C++ compiler")


def test_fim_fills_a_gap_inside_the_prompt(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    made = []
    for words in (["--prompt=def [MASK]: return"], ["--prompt=def ", "--suffix=: return"]):
        sample.main(["--out_dir=out/fim", "--json", "--max_new_tokens=9", *words])
        made.append(json.loads(capsys.readouterr().out)["text"])
    assert made[0] == made[1]


def test_a_prompt_longer_than_the_context_or_empty_or_not_utf8(trained, monkeypatch, capsys):
    long, not_utf8 = run_all(trained, [("sample.py", "--out_dir=out/clm", "--json", "--max_new_tokens=50", "--prompt=" + "long " * 99),
                                       ("sample.py", "--out_dir=out/clm", "--max_new_tokens=5", b"--prompt=\xff\xe2\x82")])
    works(long)
    works(not_utf8)
    assert len(json.loads(long.out)["tokens"]) == 50
    monkeypatch.chdir(trained)
    sample.main(["--out_dir=out/fim", "--json", "--max_new_tokens=50", "--prompt=", "--suffix=" + "long " * 99])
    assert json.loads(capsys.readouterr().out)["prompt"] == ""


# ---- several processes ----------------------------------------------------------------------------------------------

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(HERE / "train.py"), *TINY]


@posix
def test_two_processes_give_the_loss_of_one_and_only_the_first_writes(trained, folder):
    result = run(folder, *TORCHRUN, "--eval_every=5")
    works(result)
    assert {p.name for p in (folder / "out/clm").iterdir()} == {"ckpt.pt", "log.jsonl"} and result.out.count("step 20/20") == 1
    for key in ("loss", "val_loss"):
        here, there = ([line[key] for line in log_of(where / "out/clm") if key in line] for where in (folder, trained))
        assert len(here) == len(there) and np.allclose(here, there, atol=1e-4), key


@posix
def test_a_rank_that_dies_ends_the_job(folder):
    result = run(folder, *TORCHRUN, "--max_steps=1000000", "--save_every=5", env={**os.environ, "DOOMED": str(folder / "out/clm/previous.pt")})
    assert result.code != 0 and "SIGKILL" in result.err                          # `finish` would have waited two minutes
    assert load_checkpoint(folder / "out/clm/ckpt.pt")["step"] % 5 == 0


@posix
def test_a_signal_to_several_processes_saves_once_and_resumes(folder):
    process = start(folder, *TORCHRUN, "--max_steps=1000000")
    until(process, "step 0000002/")
    process.send_signal(signal.SIGINT)
    step = int(re.search(r"stopped after step (\d+), saved", finish(process).out)[1])
    assert load_checkpoint(folder / "out/clm/ckpt.pt")["step"] == step and not partial_files(folder)


# ---- anything at all ------------------------------------------------------------------------------------------------

def any_bytes(draw: np.random.Generator) -> bytes:
    kinds = [lambda n: draw.integers(0, 256, n, dtype=np.uint8).tobytes(),
             lambda n: "".join(map(chr, draw.choice([*range(32, 127), 10, 13, 0x85, 0xA0, 0x3B1, 0x2028, 0x4E2D, 0x1F600], n))).encode(),
             lambda n: bytes(draw.choice(list(b" \t\n\r\0"), n)), lambda n: b"<|endoftext|>\n" * (n // 9), lambda n: b"\xef\xbb\xbf" * n]
    return b"".join(kinds[draw.integers(len(kinds))](int(draw.integers(0, 120))) for _ in range(draw.integers(0, 6)))


def test_any_bytes_survive_every_tokenizer(folder):
    draw = np.random.default_rng(0)
    tokenizers = [get_tokenizer("bytes"), load_tokens(DataConfig(data="text.txt", tokenizer="bpe:300")).tok]
    for raw in (any_bytes(draw) for _ in range(300)):
        for tok in tokenizers:
            ids = tok.encode(raw)
            assert tok.decode_bytes(ids) == raw and (not ids or max(ids) < tok.n_ordinary)
    junk = draw.integers(128, 192, 5000, dtype=np.uint8).tobytes()               # thousands of stray bytes
    assert tokenizers[1].decode_bytes(tokenizers[1].encode(junk)) == junk


def test_any_file_is_tokenized_or_refused(folder):
    draw = np.random.default_rng(1)
    for i in range(200):
        raw = any_bytes(draw)
        (folder / "any.txt").write_bytes(raw)
        try:
            tokens = load_tokens(DataConfig(data="any.txt", tokenizer=("bytes", "bpe:257")[i % 2], cache_dir=f"cache{i}"))
        except UserError:
            continue
        text = raw.decode("utf-8-sig", "replace").replace("\r\n", "\n")
        documents = [d for d in re.split(r"(?m)^<\|endoftext\|>(?:\n|\Z)", text) if d]
        ids = np.concatenate([tokens.train.tokens, tokens.val.tokens])
        assert (ids == tokens.tok.EOT).sum() == len(documents) and len(tokens.train) >= 2 and len(tokens.val) >= 1
        if len(documents) < data.VAL_EVERY:                                      # else validation's documents stand last
            assert tokens.tok.decode(ids) == "".join(d + "<|endoftext|>" for d in documents)


def any_configuration(draw: np.random.Generator) -> tuple[str, int, int, Knobs]:
    """A valid objective or mixture, T, B and knobs."""
    plain = [name for name, row in OBJECTIVES.items() if row.loss is objectives.token_loss]
    name = str(draw.choice(list(OBJECTIVES))) if draw.random() < 0.8 else ",".join(f"{n}:{draw.random() + 0.01:.2f}" for n in draw.permutation(plain)[:3])
    rate = lambda: float(draw.uniform(0.02, 0.98))
    some = lambda names: ",".join(draw.permutation(names)[:draw.integers(1, len(names) + 1)])
    return name, int(draw.integers(8, 80)), int(draw.integers(1, 6)), Knobs(
        mask_rate=rate(), corruption_rate=rate(), mean_span=float(draw.uniform(1, 9)), prefix_frac=rate() if draw.random() < 0.5 else None,
        fim_rate=float(draw.choice([0, 0.5, 1])), fim_layouts=some(list(objectives.FIM_LAYOUTS)), bart_noise=some(objectives.BART_NOISE),
        n_future=int(draw.integers(1, 6)), mtp_heads=str(draw.choice(["parallel", "chain"])), generator_frac=rate(), rtd_weight=float(draw.integers(0, 60)),
        doc_mask=bool(draw.integers(2)))


def test_any_valid_configuration_makes_rows_and_a_training_step(folder):
    draw, tried = np.random.default_rng(2), 0
    (folder / "poem.txt").write_text("Ça va? Ευχαριστώ! 漢字。😀\n<|endoftext|>\nx\n<|endoftext|>\n" * 40, encoding="utf-8")
    corpora = [load_tokens(DataConfig(data=name, tokenizer=tok)) for name in ("text.txt", "poem.txt") for tok in ("bytes", "bpe:270")]
    for step in range(300):
        name, T, B, knobs = any_configuration(draw)
        B += B == 1 and name == "contrastive"                      # which refuses a row without a negative
        tokens = corpora[draw.integers(len(corpora))]
        mixture, tok = parse_mixture(name), tokens.tok
        row = OBJECTIVES[next(iter(mixture))]
        try:
            check_knobs(mixture, knobs, {}, T)
            check_text(mixture, tokens.train, T, knobs, tokens.tok)
        except UserError:
            continue
        tried += 1
        torch.manual_seed(step)
        model = Transformer(ModelConfig(n_layer=1, n_head=2, head_dim=8, n_embd=16, vocab_size=tok.vocab_size, **row.heads(knobs)))
        for split, text in enumerate((tokens.train, tokens.val)):
            made = make_rows(mixture, text, Rng(step, split, step, range(B)), tok, T, knobs)
            batch = collate(made, tuple(mixture) if len(mixture) > 1 else ())
            loss, _ = row.loss(model, batch, knobs, tok)
            loss.backward()
            assert made["inputs"].shape == (B, T) and made["inputs"].max() < tok.n_ids and loss.isfinite(), (name, T, B, knobs)
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters()), (name, T, B, knobs)
    assert tried > 200
