"""test_train.py: what a run promises: settings, log, checkpoints, resume, signals, one-line errors.

Runs are real: a model of one block and 32 channels learns 60 stories for a few steps. Where a test
needs the command line itself (signals, exit codes, several processes), it starts a process.
"""

import json
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from checkpoint import open_checkpoint
from objectives import OBJECTIVES, Metric, total_loss
from optimizers import learning_rate_scale
from sample import load
from util import UserError

ROOT = Path(__file__).parent.parent
TINY = [
    "--n_layer=1",
    "--n_embd=32",
    "--n_head=1",
    "--block_size=32",
    "--batch_size=4",
    "--log_every=1",
    "--tokenizer=bytes",
    "--data=stories:60",
    "--dtype=float32",
    "--device=cpu",
    "--max_steps=4",
]
SLOW = ["--max_steps=100000", "--compile=False"]  # a run that a signal will end


def run(*flags: str) -> list[dict]:
    """Train here, without the report at the end -> the objects in the log."""
    folder = next(flag for flag in flags if flag.startswith("--out_dir=")).split("=")[1]
    train.main([*TINY, *flags], report=False)
    return log_of(folder)


def log_of(folder) -> list[dict]:
    return [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]


def losses(log: list[dict]) -> list[float]:
    return [line["loss"] for line in log if "loss" in line]


def start(*words, **options) -> subprocess.Popen:
    """train.py as a process, whose lines can be read as they come."""
    command = [sys.executable, str(ROOT / "train.py"), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, env=environment, **pipes | options)


def wait_for(process, words: str) -> None:
    for line in process.stdout:
        if words in line:
            return
    raise AssertionError(f"{words!r} never came: {process.stderr.read()}")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, tmp_path_factory):
    """Each test works in a folder of its own; all share a token cache."""
    monkeypatch.chdir(tmp_path)
    os.symlink(tmp_path_factory.getbasetemp(), ".cache")
    return tmp_path


@pytest.fixture(scope="module")
def clm_run(tmp_path_factory):
    """A finished run. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("clm")
    flags = [f"--out_dir={folder / 'run'}", f"--cache_dir={folder}", "--eval_every=2"]
    train.main([*TINY, *flags], report=False)
    return folder / "run"


@pytest.fixture
def copied(clm_run):
    return shutil.copytree(clm_run, "out/clm")


# ---- settings ----------------------------------------------------------------------------------


def test_a_value_comes_from_the_first_that_has_it(copied):
    def settings(*flags):
        return train.settings([*flags, "--device=cpu", "--overwrite"])

    micro = settings("--objective=nsp")
    assert (micro.train.preset, micro.model.n_layer, micro.model.d_ff) == ("micro", 3, 256)
    assert (micro.train.block_size, micro.train.batch_size) == (64, 64)  # split in two
    assert (micro.train.max_steps, micro.train.lr) == (round(1.2 * 1400), 0.01)
    assert settings("--preset=gpt2").model.tied
    assert settings("--objective=nsp", "--lr=0.5").train.lr == 0.5  # a flag over the recipe
    assert settings("--n_embd=256").model.d_ff == 704  # the usual 8/3
    mixture = settings("--objective=clm,span").train
    assert mixture.max_steps == round(0.9 * 1400)  # those of the slowest member
    assert mixture.out_dir == "out/clm+span"

    resumed = settings("--init_from=resume", "--max_steps=9", "--lr=0.5")
    assert (resumed.train.block_size, resumed.data.data) == (32, "stories:60")  # the checkpoint's
    assert (resumed.train.max_steps, resumed.train.lr) == (9, 0.5)  # flags over the checkpoint
    other = settings("--objective=sop", "--init_from=out/clm")
    assert (other.model.n_embd, other.train.block_size) == (32, 16)  # its shape and half its rows
    assert other.train.steps_before == 4  # so that other rows are drawn


def test_help_shows_each_flag_with_its_default(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    page = capsys.readouterr().out
    flags = re.findall(r"(?m)^  --(\w+)", page)
    assert len(flags) == len(set(flags)) <= 45
    assert re.search(r"--n_layer .*\[3 \| 4 \| 8 \| 12\]", page)
    assert re.search(r"--mask_rate .*above 0 and below 1.*\[0.15\]", " ".join(page.split()))
    assert "python train.py --objective=fim" in page
    assert max(map(len, page.splitlines())) <= 100


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--objectve=fim", "--objective"),
        ("--objective=fmi", "did you mean fim"),
        ("--objective=clm,nsp", "nsp cannot be mixed"),
        ("--objective=clm:0,span:1", "share above 0"),
        ("fim", "fim"),
        ("--lr=fast", "--lr"),
        ("--lr", "--lr"),
        ("--lr=-1", "--lr"),
        ("--lr=nan", "--lr"),
        ("--mask_rate=1.5 --objective=mlm", "below 1"),
        ("--dtype=float16", "float32 or bfloat16"),
        ("--device=tpu", "--device=tpu"),
        ("--mean_span=3", "only to span"),
        ("--objective=span --mean_span=1 --block_size=8000", "--corruption_rate"),
        ("--objective=fim --fim_layouts=smp", "did you mean spm"),
        ("--batch_size=6 --grad_accum=4", "multiple of --grad_accum"),
        ("--n_head=2 --n_kv_head=3", "--n_kv_head"),
        ("--n_embd=33", "--n_embd"),
        ("--block_size=100000", "lower --block_size"),
        ("--data=missing.txt", "missing.txt does not exist"),
        ("--tokenizer=gpt5", "did you mean gpt2"),
        ("--out_dir=out/clm", "--overwrite"),
        ("--out_dir=out/clm --init_from=resume", "larger --max_steps"),
        ("--out_dir=out/clm --init_from=resume --objective=mlm --max_steps=9", "--objective"),
        ("--init_from=resume", "out/clm"),
        ("--init_from=out/nothing", "name a run: out/clm"),
        ("--init_from=out/clm --tokenizer=gpt2", "--tokenizer"),
        ("--init_from=out/clm --n_layer=2", "does not fit"),
        ("--init_from=out/clm --freeze_trunk", "adds no head"),
        ("--objective=mtp --freeze_trunk", "--init_from=RUN"),
        ("--replay_rate=0.5", "--replay_data"),
        ("--objective=contrastive --grad_accum=4", "lower --grad_accum"),
    ],
)
def test_what_cannot_be_meant_ends_in_one_line(flags, words, copied):
    """The line names the flag and the remedy, and no folder is left behind."""
    with pytest.raises(UserError, match=re.escape(words)) as refused:
        train.main([*TINY, "--out_dir=out/new", *flags.split()], report=False)
    assert "\n" not in str(refused.value)
    assert os.listdir("out") == ["clm"] and not Path("out/new").exists()


def test_the_command_line_prints_one_line_without_a_traceback():
    process = start("--lr=-1")
    out, err = process.communicate()
    assert (process.returncode, out) == (1, "")
    assert err.startswith("error: --lr=-1") and err.count("\n") == 1


# ---- a run -------------------------------------------------------------------------------------


def test_a_run_is_logged_evaluated_and_saved(clm_run):
    log = log_of(clm_run)
    steps = [line for line in log if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all(line["ms"] > 0 and line["tokens_per_s"] > 0 for line in steps)
    evaluations = [line for line in log if "val_loss" in line]
    assert [line["step"] for line in evaluations] == [2, 4]
    assert evaluations[-1]["tokens"] == 4 * 4 * 32
    checkpoint = open_checkpoint(clm_run)
    assert checkpoint.state["step"] == 4 and checkpoint.mixture == {"clm": 1.0}
    best = min(line["val_loss"] for line in evaluations)
    assert open_checkpoint(clm_run / "best.pt").state["best_val_loss"] == best
    assert sorted(os.listdir(clm_run)) == ["best.pt", "ckpt.pt", "log.jsonl"]


def test_the_end_of_a_run_shows_what_it_learned(capsys):
    train.main([*TINY, "--objective=mlm", "--max_steps=2"])
    shown = capsys.readouterr().out
    assert "python sample.py --out_dir=out/mlm" in shown and "⟪" in shown
    assert "lab/atlas/mlm.md" in shown and "python -m lab.compare --plot out/mlm" in shown
    assert re.search(r"step 2/2 \| loss \d+\.\d{4} \| lr .* \| .* ms \| .* tok/s \| eta 0s", shown)


def test_what_watches_a_run_is_logged_and_changes_nothing(clm_run):
    flags = [*TINY, "--eval_every=2", "--out_dir=watched"]

    def watch(trained) -> dict:
        torch.rand(3)
        return {"written": len(trained.generate("At", max_new_tokens=3))}

    train.main(flags, report=False, watch=watch)
    log = log_of("watched")
    assert [line["written"] > 0 for line in log if "val_loss" in line] == [True, True]
    assert losses(log) == losses(log_of(clm_run))


def test_the_loss_is_the_one_that_a_step_minimizes():
    metrics = {
        "token_loss": Metric(torch.tensor(6.0), torch.tensor(3.0), 1.0),
        "pair_loss": Metric(torch.tensor(4.0), torch.tensor(2.0), 0.5),
        "accuracy": Metric(torch.tensor(1.0), torch.tensor(2.0)),
    }
    meter = train.Meter()
    meter.add(metrics)
    meter.add(metrics)
    assert meter.means()["loss"] == total_loss(metrics).item() == 3.0


def test_learning_rates_rise_stay_and_fall():
    scales = [learning_rate_scale(step, 100) for step in range(100)]
    assert np.allclose(scales[:10], np.linspace(0.1, 1, 10))
    assert scales[10:30] == [1.0] * 20
    assert np.allclose(scales[30:], np.linspace(1, 0, 71)[:70])


@pytest.mark.parametrize("objective", ["bart,clm", "nsp"])
def test_parts_of_a_step_add_up_to_the_step(objective):
    """bart and clm differ in targets per row, so micro-batches are weighted by their targets. nsp
    also has a loss for each row."""
    flags = [f"--objective={objective}", "--block_size=64"]
    whole = run(*flags, "--out_dir=out/whole")
    parts = run(*flags, "--out_dir=out/parts", "--grad_accum=4")
    assert np.allclose(losses(whole), losses(parts), atol=1e-4)


def test_validation_does_not_depend_on_seed_or_batches():
    first = run("--out_dir=out/a", "--lr=0", "--lr_unembed=0", "--max_steps=1")
    second = run("--out_dir=out/b", "--lr=0", "--lr_unembed=0", "--max_steps=1", "--batch_size=8")
    assert first[-1]["val_loss"] == pytest.approx(second[-1]["val_loss"], rel=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_resuming_is_bit_for_bit_the_uninterrupted_run(objective):
    """Stopped after 2 of 4 steps, from that checkpoint the same losses and weights follow."""
    flags = [f"--objective={objective}", "--block_size=64", "--eval_every=2"]
    whole = run(*flags, "--out_dir=out/whole")
    saved = open_checkpoint("out/whole").state["model"]

    class Stop(Exception):
        pass

    def stop_at_two(name, *rest, save=train.save_checkpoint):
        save(name, *rest)
        if Path(name).name == "ckpt.pt":
            raise Stop

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(train, "save_checkpoint", stop_at_two)  # as if the machine had gone down
        run(*flags, "--out_dir=out/parts")
    with open("out/parts/log.jsonl", "a") as f:
        f.write('{"step": 3, "lo')  # a line that was cut
    parts = run(*flags, "--out_dir=out/parts", "--init_from=resume")
    assert losses(parts) == losses(whole)
    for name, weight in open_checkpoint("out/parts").state["model"].items():
        assert torch.equal(weight, saved[name]), name


def test_a_full_disk_ends_in_one_line_and_keeps_what_was_saved(copied):
    before = Path("out/clm/ckpt.pt").read_bytes()
    limit = 50_000  # bytes of a file: the tokens have fewer, a checkpoint has more
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        with pytest.raises(UserError, match="out/clm/best.pt could not be written"):
            run("--out_dir=out/clm", "--init_from=resume", "--max_steps=9")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert Path("out/clm/ckpt.pt").read_bytes() == before
    assert sorted(os.listdir("out/clm")) == ["best.pt", "ckpt.pt", "log.jsonl"]


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_what_was_saved(copied):
    before = Path("out/clm/ckpt.pt").read_bytes()
    with pytest.raises(UserError, match="Lower --lr"):
        run("--out_dir=out/clm", "--init_from=resume", "--max_steps=50", "--lr_unembed=1e38")
    assert Path("out/clm/ckpt.pt").read_bytes() == before


# ---- from one run to another -------------------------------------------------------------------


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_any_objective_starts_from_any_other(objective, copied, capsys):
    flags = [f"--objective={objective}", "--init_from=out/clm", "--out_dir=out/there"]
    first, *_ = run(*flags, "--max_steps=2")
    was = open_checkpoint("out/clm").state["best_val_loss"]
    assert first["step"] == 0 and (objective != "clm" or first["val_loss"] == pytest.approx(was))
    run("--objective=clm", "--init_from=out/there", "--out_dir=out/back", "--max_steps=2")
    heads = {"mtp": "future.0", "nsp": "pair_head", "sop": "pair_head", "electra": "detect_head"}
    shown = capsys.readouterr().out
    assert shown.count(f"new here: {heads.get(objective)}") == (objective in heads)
    assert load("out/back").generate("At", max_new_tokens=3)


@pytest.mark.parametrize("heads", ["linear", "parallel", "chain"])
def test_a_frozen_trunk_stays_bit_identical_while_its_new_heads_learn(heads, copied):
    flags = ["--objective=mtp", f"--mtp_heads={heads}", "--init_from=out/clm", "--freeze_trunk"]
    run(*flags, "--out_dir=out/mtp")
    before = open_checkpoint("out/clm").state["model"]
    after = open_checkpoint("out/mtp").state["model"]
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    fresh = train.make_model(
        train.settings([*TINY, *flags, "--overwrite"]), load("out/clm").tok, quiet()
    )
    assert any(not torch.equal(fresh.state_dict()[name], after[name]) for name in after)


def quiet() -> train.Log:
    return train.Log(Path("log.jsonl"), rank=1)


def test_an_older_text_is_mixed_in(copied, capsys):
    Path("new.txt").write_text("Quite another text. " * 400)
    flags = ["--init_from=out/clm", "--data=new.txt", "--replay_data=stories:60"]
    run(*flags, "--replay_rate=0.5", "--out_dir=out/both")
    out = capsys.readouterr().out
    assert "50% of the rows" in out and "loss_on_old_text" in out
    _, rows, _ = train.load_data(
        train.settings([*TINY, *flags, "--replay_rate=0.5", "--overwrite"]), quiet()
    )
    drawn = [train.draw_row(rows, train.TRAIN, 0, i, 400)[0].raw for i in range(400)]
    new = {*b"Quite another text. "}
    assert 140 < sum(set(raw.tolist()) <= new for raw in drawn) < 260


def test_a_run_is_replaced_only_when_told_to(copied):
    run("--out_dir=out/clm", "--overwrite", "--max_steps=2")
    assert [line["step"] for line in log_of("out/clm") if "loss" in line] == [1, 2]
    assert open_checkpoint("out/clm/best.pt").state["step"] == 2


def test_a_text_that_has_changed_is_noticed_on_resuming():
    Path("text.txt").write_text("Once upon a time. " * 300)
    run("--data=text.txt", "--out_dir=out/x")
    Path("text.txt").write_text("Upon a time, once. " * 300)
    with pytest.raises(UserError, match="--data"):
        train.main(["--init_from=resume", "--out_dir=out/x", "--max_steps=9"])


# ---- checkpoints are data ----------------------------------------------------------------------


class Code:
    """An object whose unpickling would run code."""

    def __reduce__(self):
        return (os.mkdir, ("hacked",))


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def change(path: Path, **values) -> None:
    torch.save(torch.load(path, weights_only=True) | values, path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1000]),
        flip_a_bit,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(pickle.dumps(Code())),
        lambda path: torch.save({"format": 3, "model": Code()}, path),
        lambda path: change(path, format=1),
        lambda path: change(path, model={"norm.weight": torch.zeros(3)}),
        lambda path: change(path, settings={}),
        lambda path: change(path, tokenizer="{}"),
    ],
    ids=[
        "truncated",
        "flipped",
        "empty",
        "pickle",
        "code",
        "version",
        "weights",
        "settings",
        "tokenizer",
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_refused_in_one_line(damage, copied):
    damage(Path("out/clm/ckpt.pt"))
    with pytest.raises(UserError) as refused:
        load("out/clm")
    assert "\n" not in str(refused.value) and not Path("hacked").exists()


# ---- signals and several processes -------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_run_and_says_how_to_resume(number):
    process = start(*TINY, *SLOW, "--out_dir=out/my run")
    wait_for(process, "step 000003/")
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == 128 + number
    resume = "python train.py --init_from=resume '--out_dir=out/my run'"
    done = int(re.search(rf"stopped after step (\d+), saved. To resume: {resume}", err)[1])
    assert open_checkpoint("out/my run").state["step"] == done
    train.main(["--init_from=resume", "--out_dir=out/my run", f"--max_steps={done + 1}"], False)
    steps = [line["step"] for line in log_of("out/my run") if "loss" in line]
    assert steps == list(range(1, done + 2))


def test_ctrl_c_saves_the_run_behind_a_pipe_whose_reader_it_ends_too():
    process = start(*TINY, *SLOW, "--out_dir=out/x")
    wait_for(process, "step 000003/")
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    err = process.stderr.read()
    assert process.wait() == 130 and "To resume:" in err and Path("out/x/ckpt.pt").exists()


def test_two_processes_take_the_steps_of_one():
    flags = [*TINY, "--objective=clm,bart", "--grad_accum=2"]
    alone = run(*flags, "--out_dir=out/alone")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    flags += ["--out_dir=out/together", "--cache_dir=out/cache"]  # the first one tokenizes
    command = [sys.executable, *words, str(ROOT / "train.py"), *flags]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    together = log_of("out/together")
    assert np.allclose(losses(together), losses(alone), atol=1e-4)
    assert together[-2]["val_loss"] == pytest.approx(alone[-1]["val_loss"], abs=1e-4)


# ---- the project as a whole --------------------------------------------------------------------


def test_the_core_works_without_the_laboratory_and_the_tests():
    """`rm -r lab tests` leaves a project that trains, samples and draws."""
    leave_out = shutil.ignore_patterns(".*", "lab", "tests", "out", "__pycache__")
    shutil.copytree(ROOT, "core", ignore=leave_out)

    def works(*words: str) -> str:
        command = [sys.executable, *words]
        return subprocess.run(
            command, cwd="core", check=True, capture_output=True, text=True
        ).stdout

    assert "lab" not in works("train.py", *TINY, "--objective=fim", "--max_steps=2")
    assert "⟪" in works("sample.py", "--out_dir=out/fim", "--prompt=At", "--suffix=.")
    assert "<MID>" in works("view.py", "fim")
    assert "passed" in works("-m", "pytest", "-q", "test_objectives.py", "-k", "worked")


def test_the_objective_that_the_readme_adds_works():
    """The README adds an objective by a diff of objectives.py: a function and an entry. It passes
    all tests that are made for each objective."""
    diff = re.search(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    function, entry = (re.findall(r"(?m)^\+(.*)$", part) for part in diff.split("@@\n"))
    shutil.copytree(ROOT, "fork", ignore=shutil.ignore_patterns(".*", "out", "lab"))
    path = Path("fork/objectives.py")
    table = "OBJECTIVES = {\n"
    code = path.read_text().replace(table, "\n".join([*function, "", table]))
    path.write_text(code.replace(table, table + "\n".join(entry) + "\n"))
    for words in (
        ["train.py", *TINY, "--objective=anyrate", "--max_steps=2"],
        ["view.py", "anyrate"],
        ["-m", "pytest", "-q", "test_objectives.py", "tests", "-k", "anyrate or every_objective"],
    ):
        command = [sys.executable, *words]
        shown = subprocess.run(command, cwd="fork", capture_output=True, text=True)
        assert shown.returncode == 0, shown.stdout


def test_the_commands_of_the_readme_have_flags_that_exist():
    text = (ROOT / "README.md").read_text()
    commands = re.findall(r"(?:python|torchrun) (?:-m )?([\w./]+)((?: [^`\n|&#]*)?)", text)
    pages = {}
    for script, words in commands:
        flags = re.findall(r" --(\w+)", words)
        if script not in pages and flags:
            module = ["-m", script] if script.startswith("lab.") else [script]
            command = [sys.executable, *module, "--help"]
            pages[script] = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
        for flag in flags:
            shown = re.search(rf"(?m)^ +--{flag}\b", pages[script]) or flag == "help"
            assert shown, f"{script} has no --{flag}"
    assert {"train.py", "sample.py"} <= pages.keys()
