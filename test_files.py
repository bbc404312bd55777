"""test_files.py: what flags, files, tokenizers and corpora promise, also if something goes wrong.

pytest test_files.py
pytest test_files.py -k "checkpoint or lock"
"""

import dataclasses
import doctest
import errno
import itertools
import json
import math
import os
import pickle
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import zipfile
import zlib
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import config
import corpus
import log
import run as run_file
import stories
import tokenizer
from checkpoint import CHECKPOINT, CHECKPOINT_FORMAT, load_checkpoint, save_checkpoint
from config import UNFINISHED, UserError, build, flag, lock_folder, parse_flags
from corpus import Corpus, DataConfig, load_tokens
from sentences import Spelled
from settings import TrainConfig
from tokenizer import (
    EOT_TEXT,
    N_SENTINELS,
    SPECIALS,
    Tokenizer,
    get_tokenizer,
    train_bpe,
)

HERE = Path(__file__).resolve().parent
posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals, locks and limits")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's limits")


# ---- helpers -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """This process's working directory, with nothing in it but a text of 60 documents."""
    monkeypatch.chdir(tmp_path)
    documents = [f"def f{i}(x):\n    return x * {i}\n" * (1 + i % 7) for i in range(60)]
    (tmp_path / "text.txt").write_text(f"{EOT_TEXT}\n".join(documents))
    return tmp_path


def start(code: str, *flags: str, **options) -> subprocess.Popen:
    """Start a Python process that runs `code`; `flags` are for the interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment, **options}
    return subprocess.Popen([sys.executable, *flags, "-c", code], text=True, **options)


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


def everything(tokens: corpus.Tokens) -> str:
    """The text of both splits, without the EOTs that end documents."""
    ids = np.concatenate([tokens.train, tokens.val])
    return tokens.tok.decode(ids).replace(EOT_TEXT, "")


def load(data: str, **fields) -> corpus.Tokens:
    return load_tokens(DataConfig(data=data, **fields), log=lambda line: None)


def temporary_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith(UNFINISHED)]


def leaves(part) -> list:
    """All values in a nested state as a flat list, with tensors as bytes."""
    if torch.is_tensor(part):
        raw = part.detach().flatten().contiguous().view(torch.uint8).numpy().tobytes()
        return [part.dtype, tuple(part.shape), raw]
    if isinstance(part, dict):
        return [leaf for key in sorted(part, key=str) for leaf in (key, *leaves(part[key]))]
    if isinstance(part, (list, tuple)):
        return [leaf for item in part for leaf in leaves(item)]
    return [part]


class Bomb:
    """Unpickling it creates a file."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


@pytest.mark.parametrize(
    "module", [config, tokenizer, log, run_file], ids=lambda module: module.__name__
)
def test_worked_examples_of_the_docstrings_hold(module):
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


# ---- flags -------------------------------------------------------------------------------------


@dataclasses.dataclass
class DemoConfig:
    """a section of flags

    This paragraph is for readers of the code.
    """

    lr: float = flag(0.02, "learning rate", min=0)
    rate: float = flag(0.15, "share of 100% of the tokens", above=0, below=1)
    max_steps: int = flag(600, "steps of the whole run", min=1, max=10**9)
    clip: float = flag(1.0, "largest norm", above=0)
    width: int | None = flag(None, "channels; automatic: by the preset", min=1)
    schedule: str = flag("linear", "how the rate falls", ("linear", "constant"))
    compile: bool = flag(False, "use torch.compile")
    out_dir: str = flag("out", "folder of the run")
    by_hand: int = dataclasses.field(default=3, metadata={"help": "as model.py has it", "min": 1})
    private: int = 0


def demo(*argv: str) -> DemoConfig:
    return build(DemoConfig, parse_flags(list(argv), "", DemoConfig))


def test_flags_are_typed_and_only_those_given_are_returned():
    argv = ["--lr=1e-3", "--width=64", "--compile", "--out_dir", "my run", "--by_hand=4"]
    given = parse_flags(argv, "", DemoConfig)
    assert given == {"lr": 1e-3, "width": 64, "compile": True, "out_dir": "my run", "by_hand": 4}
    assert build(DemoConfig, given | {"lr": 0.5, "other": 1}).lr == 0.5
    assert demo("--compile=False", "--clip=2") == DemoConfig(compile=False, clip=2)
    assert demo("--lr=0", "--max_steps=1000000000").max_steps == 10**9  # both are in the interval


@posix
def test_a_tilde_is_the_home_folder_in_paths_only(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    given = parse_flags(["--out_dir=~/run", "--schedule=~/x"], "", DemoConfig)
    assert given == {"out_dir": "/home/me/run", "schedule": "~/x"}


@pytest.mark.parametrize(
    "argv", [["clm", "--compile"], ["--compile", "clm"], ["--name=clm", "--compile"]]
)
def test_one_free_word_may_stand_before_or_after_the_flags_or_with_its_name(argv):
    assert parse_flags(argv, "", DemoConfig, positional="name") == {"name": "clm", "compile": True}


@pytest.mark.parametrize(
    "word, message",
    [
        ("--lr=nan", "--lr=nan: must be a finite number"),
        ("--lr=inf", "--lr=inf: must be a finite number"),
        ("--clip=inf", "--clip=inf: must be a finite number"),
        ("--rate=1", "--rate=1.0: must be above 0 and below 1"),
        ("--rate=0", "--rate=0.0: must be above 0 and below 1"),
        ("--max_steps=0", "--max_steps=0: must be at least 1 and at most 1000000"),
        ("--max_steps=3.5", "--max_steps='3.5': must be a whole number"),
        (f"--max_steps={10**40}", "--max_steps: the number is too large"),
        (f"--max_steps={'9' * 5000}", "must be a whole number"),
        ("--width=0", "--width=0: must be at least 1"),
        ("--by_hand=0", "--by_hand=0: must be at least 1"),
        ("--schedule=cosine", "--schedule='cosine': must be linear or constant"),
        ("--compile=maybe", "--compile='maybe': must be true or false"),
        ("--lr", "--lr"),
        ("--private=1", "unknown flag --private"),
        ("word", "unexpected 'word'; flags are written --name=value"),
        ("--comp", "unknown flag --comp; did you mean --compile?"),
    ],
)
def test_a_value_or_a_word_that_is_no_flag_is_refused_in_one_line(word, message):
    with pytest.raises(UserError, match=re.escape(message)) as refusal:
        demo(word)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"max_steps": "x"}, "--max_steps='x': must be a whole number"),
        ({"max_steps": True}, "--max_steps=True: must be a whole number"),
        ({"out_dir": ["a"]}, "--out_dir=['a']: must be text"),
        ({"private": 0.5}, "--private=0.5: must be a whole number"),
        ({"lr": math.nan}, "--lr=nan"),
    ],
)
def test_values_from_a_file_are_checked_as_those_of_the_command_line(values, message):
    with pytest.raises(UserError, match=re.escape(message)):
        build(DemoConfig, values)


@pytest.mark.parametrize(
    "word, meant",
    [
        ("--learning_rate", "--lr"),
        ("--max_iters", "--max_steps"),
        ("--n_steps", "--max_steps"),
        ("--batch", "--batch_size"),
        ("--batch-size", "--batch_size"),
        ("--seq_len", "--block_size"),
        ("--objectve", "--objective"),
        ("--dropout", None),
        ("--eval_only", None),
        ("--zzz", None),
    ],
)
def test_only_near_spellings_and_known_synonyms_are_suggested(word, meant):
    known = (
        "--lr --fim_rate --max_steps --rope_theta --eval_rows --batch_size --block_size --objective"
    )
    expected = f"did you mean {meant}?" if meant else ""
    assert config.suggest(word, known.split()) == expected


def test_help_shows_every_flag_with_interval_and_default_in_100_columns(capsys):
    doc = """demo.py: what the script does.

    Another paragraph.

        python demo.py --lr=0.1
    """.replace("\n    ", "\n")
    with pytest.raises(SystemExit) as stop:
        parse_flags(["--help"], doc, DemoConfig, positional="name")
    page = capsys.readouterr().out
    assert stop.value.code == 0 and max(map(len, page.splitlines())) <= 100
    assert "share of 100% of the tokens (above 0 and below 1) [0.15]" in page
    assert "as model.py has it (at least 1) [3]" in page
    assert "steps of the whole run (at least 1) [600]" in page  # 10**9 is only a guard
    assert "what the script does" in page and "    python demo.py --lr=0.1" in page
    assert "Another paragraph" not in page and "readers of the code" not in page
    assert "--private" not in page and "linear|constant" in page


def test_what_a_file_says_cannot_move_the_cursor():
    assert config.visible("a\x1b[2J\r\x9b\u202eb\n\t\ud800") == "a·[2J···b\n\t·"
    words = (
        "5\u202f€\xa0x\u3000می\u200cخواهم \U0001f469\u200d\U0001f467 co\xadop"  # as people write it
    )
    assert config.visible(words) == words


# ---- the command line --------------------------------------------------------------------------

COMMAND = "from config import *\n"
ENDINGS = {  # what main does, the exit code, and the line on standard error
    "raise UserError('a\\x1b[31mb\\nc')": (1, "error: a·[31mb c\n"),
    "raise MemoryError": (1, "error: out of memory; what was saved before is intact. Lower --n\n"),
    "raise RuntimeError('CUDA out of memory')": (1, "error: out of memory"),
    "raise RuntimeError('DefaultCPUAllocator: not enough memory')": (1, "error: out of memory"),
    "raise RuntimeError('DataLoader worker (pid 7) is killed by signal: Killed. ')": (
        1,
        "error: out of memory",
    ),
    "raise SystemError('<ufunc> returned NULL without setting an exception')": (
        1,
        "error: out of memory",
    ),
    "open('/nowhere/at/all')": (1, "error: No such file or directory: /nowhere/at/all"),
    "raise KeyboardInterrupt": (130, "stopped by a signal"),
    "import os; os.kill(os.getpid(), 15)": (143, "stopped by a signal"),
    # A second Ctrl-C while Python exits is ignored.
    "import atexit, os; atexit.register(os.kill, os.getpid(), 2); raise SystemExit(3)": (3, ""),
    "1 / 0": (1, "Traceback"),
}


@posix
def test_every_ending_is_one_line_and_the_right_exit_code():
    """One process forks a child for each ending, because starting Python anew takes longer."""
    code = f"""{COMMAND}
import json, os
for body in {list(ENDINGS)!r}:
    def main(argv):
        exec(body)
    read, write = os.pipe()
    if os.fork() == 0:
        os.dup2(write, 2)
        run_command(main, lower="--n")
    os.close(write)
    status = os.wait()[1]
    print(json.dumps([os.waitstatus_to_exitcode(status), open(read).read()]), flush=True)
"""
    status, out, err = finish(start(code))
    assert status == 0, err
    for line, (expected, words) in zip(out.splitlines(), ENDINGS.values(), strict=True):
        status, err = json.loads(line)
        assert status == expected and err.startswith(words), line
        assert err.count("\n") == bool(words) or words == "Traceback"


@posix
def test_a_pipe_that_closes_early_and_a_full_disk_are_no_tracebacks():
    code = f"{COMMAND}run_command(lambda argv: [print('x' * 100) for _ in range(9999)])"
    full = os.open("/dev/full", os.O_WRONLY) if os.path.exists("/dev/full") else None

    piped = start(code)
    piped.stdout.close()
    assert piped.wait(600) == 128 + signal.SIGPIPE and piped.stderr.read() == ""
    if full is not None:
        status, _, err = finish(start(code, stdout=full))
        assert status == 1 and err.startswith("error: No space left on device")
        # Half a line stays in Python's buffer until the end.
        little = f"{COMMAND}run_command(lambda argv: print('x', end=''))"
        status, _, err = finish(start(little, stdout=os.open("/dev/full", os.O_WRONLY)))
        assert status == 1 and err.startswith("error: No space left on device")


@posix
def test_a_terminal_that_knows_only_ascii_shows_question_marks():
    ascii_only = {**os.environ, "PYTHONPATH": str(HERE), "PYTHONIOENCODING": "ascii"}
    process = start(f"{COMMAND}run_command(lambda argv: print('\\u27ea'))", env=ascii_only)
    assert finish(process) == (0, "?\n", "")


@posix
def test_a_program_whose_output_is_closed_works_all_the_same():
    """As with `python train.py >&-`."""
    code = f"{COMMAND}sys.stdout = None\nrun_command(lambda argv: print('x'))"
    assert finish(start(code)) == (0, "", "")


# ---- files and locks ---------------------------------------------------------------------------


def test_a_file_is_written_whole_or_not_at_all(folder):
    path = folder / "new" / "file"
    with config.atomic_write(path) as f:
        f.write(b"first")
    with pytest.raises(KeyboardInterrupt), config.atomic_write(path) as f:
        f.write(b"second")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"first"
    with config.atomic_write(path, keep="before") as f:
        f.write(b"third")
    assert (path.read_bytes(), path.with_name("before").read_bytes()) == (b"third", b"first")
    assert not temporary_files(folder)


@posix
def test_a_link_stays_and_what_is_no_file_is_not_replaced(folder):
    Path("link").symlink_to("file")
    with config.atomic_write("link") as f:
        f.write(b"text")
    assert Path("link").is_symlink() and Path("file").read_bytes() == b"text"
    os.mkfifo("pipe")
    for name in ("pipe", "."):
        with pytest.raises(UserError, match="not a regular file"), config.atomic_write(name):
            pass
    assert Path("pipe").is_fifo() and not temporary_files(folder)


def test_numbers_of_numpy_are_numbers():
    built = config.build(TrainConfig, {"lr": np.float64(0.5), "seed": np.int64(3)})
    assert (built.lr, type(built.seed)) == (0.5, int)
    with pytest.raises(UserError, match="--lr"):
        config.build(TrainConfig, {"lr": np.array([0.5, 0.5])})


@posix
def test_what_a_killed_writer_left_is_replaced_never_written_to(folder):
    """By now it may be anything: a file with other permissions, or a link to another file."""
    Path("other").write_bytes(b"of somebody else")
    Path("file" + UNFINISHED).symlink_to("other")
    with config.atomic_write("file") as f:
        f.write(b"whole")
    assert Path("file").read_bytes() == b"whole"
    assert Path("other").read_bytes() == b"of somebody else"
    assert not Path("file").is_symlink() and not temporary_files(folder)


def test_a_file_is_on_the_disk_before_it_has_a_name_and_best_is_named_first(folder, monkeypatch):
    """Else a power cut could leave an empty file where a whole one was, or a kill between the two
    names a ckpt.pt whose best.pt is missing."""

    def sync(descriptor):
        done.append(os.fstat(descriptor).st_size)

    def rename(old, new):
        done.append(Path(new).name)
        replace(old, new)

    done = []
    replace = os.replace
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    with config.atomic_write("file", also=Path("best")) as f:
        f.write(b"text")
    assert done == [4, "best", "file"]


@posix
def test_a_second_name_that_a_killed_writer_left_is_no_obstacle(folder):
    Path("file").write_bytes(b"first")
    for name in ("before", "best"):
        os.link("file", name + UNFINISHED)
    with config.atomic_write("file", keep="before", also=Path("best")) as f:
        f.write(b"second")
    assert [Path(n).read_bytes() for n in ("before", "best")] == [b"first", b"second"]
    assert not temporary_files(folder)


@posix
@pytest.mark.parametrize("umask, rights", [(0o077, 0o600), (0o002, 0o664)])
def test_a_file_has_the_rights_that_its_user_gives_new_files(umask, rights, folder):
    before = os.umask(umask)
    try:
        with config.atomic_write("file") as f:
            f.write(b"private or not")
    finally:
        os.umask(before)
    assert Path("file").stat().st_mode & 0o777 == rights


def test_the_file_before_is_kept_where_there_are_no_links(folder, monkeypatch):
    def no_links(*paths):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_links)
    for content in (b"first", b"second"):
        with config.atomic_write("file", keep="before") as f:
            f.write(content)
    assert Path("before").read_bytes() == b"first"


HOLD = """
import sys, time
from config import atomic_write, lock_folder
with lock_folder("run"), atomic_write("run/ckpt.pt") as f:
    print("held", flush=True)
    time.sleep(600)
"""


@posix
def test_a_run_locks_its_folder_until_it_dies_however_it_dies(folder):
    holder = start(HOLD, cwd=folder)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match="run is in use by another run"), lock_folder("run"):
        pass
    with lock_folder("run", "cache"):  # a run's folder may be a cache, too
        pass
    holder.kill()
    holder.wait()
    assert len(temporary_files(folder)) == 1 and not Path("run/ckpt.pt").exists()
    for content in (b"after the kill", b"again"):
        with lock_folder("run"), config.atomic_write("run/ckpt.pt") as f:
            f.write(content)
        assert Path("run/ckpt.pt").read_bytes() == content and not temporary_files(folder)


def test_without_locks_on_this_platform_all_else_works(folder, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "no locks on this file system")

    for locks in (None, SimpleNamespace(flock=no_locks, LOCK_EX=2, LOCK_NB=4)):
        monkeypatch.setattr(config, "fcntl", locks)
        with lock_folder("."), lock_folder("."), config.atomic_write("file") as f:
            f.write(b"whole")
        assert Path("file").read_bytes() == b"whole"


# ---- checkpoints -------------------------------------------------------------------------------


def state(step: int = 1, **change) -> dict:
    made = {name: kind() for name, kind in CHECKPOINT.items()}
    weights = {
        "embed_tokens.weight": torch.arange(600.0).view(20, 30) + step,
        "norm": torch.ones(30),
    }
    return {**made, "model": weights, "step": step, **change}


def test_a_checkpoint_and_the_one_before_come_back(folder):
    save_checkpoint("run/ckpt.pt", state(1))
    save_checkpoint("run/ckpt.pt", state(2))
    again = load_checkpoint("run/ckpt.pt")
    assert leaves(again) == leaves({"format": CHECKPOINT_FORMAT, **state(2)})
    assert load_checkpoint("run/previous.pt")["step"] == 1
    with pytest.raises(UserError, match="other/ckpt.pt does not exist; name a folder .*: run$"):
        load_checkpoint("other/ckpt.pt")
    with pytest.raises(UserError, match="train first"):
        load_checkpoint("run/nothing/here/ckpt.pt")
    with pytest.raises(UserError, match="name a folder with a run: [^ ]*run$"):  # a run inside
        load_checkpoint(folder / "ckpt.pt")


def test_best_pt_is_in_the_folder_of_the_run_even_if_ckpt_pt_is_a_link(folder):
    Path("elsewhere").mkdir()
    Path("run").mkdir()
    save_checkpoint("elsewhere/ckpt.pt", state(1))
    Path("run/ckpt.pt").symlink_to("../elsewhere/ckpt.pt")
    save_checkpoint("run/ckpt.pt", state(2), is_best=True)
    assert load_checkpoint("run/best.pt")["step"] == load_checkpoint("run/ckpt.pt")["step"] == 2
    assert not Path("elsewhere/best.pt").exists()


def test_a_damaged_checkpoint_names_the_remedy_which_works(folder):
    save_checkpoint("my run/ckpt.pt", state(0), is_best=True)  # previous.pt will be newer
    save_checkpoint("my run/ckpt.pt", state(1))
    save_checkpoint("my run/ckpt.pt", state(2))
    os.truncate("my run/ckpt.pt", 1000)
    with pytest.raises(UserError, match="ckpt.pt is damaged") as refusal:
        load_checkpoint("my run/ckpt.pt")
    command = str(refusal.value).partition("an earlier one: ")[2]
    assert command == "cp 'my run/previous.pt' 'my run/ckpt.pt'"
    subprocess.run(command, shell=True, check=True)
    assert load_checkpoint("my run/ckpt.pt")["step"] == 1
    os.rename("my run/previous.pt", "my run/best.pt")
    Path("my run/ckpt.pt").unlink()
    kept = "restore an earlier one: cp 'my run/best.pt' 'my run/ckpt.pt"
    with pytest.raises(UserError, match=f"does not exist; {kept}"):  # a new run died early
        load_checkpoint("my run/ckpt.pt")
    Path("my run/ckpt.pt").write_bytes(b"")
    with pytest.raises(UserError, match=kept):
        load_checkpoint("my run/ckpt.pt")


def test_every_flipped_bit_of_a_checkpoint_is_noticed_or_harmless(folder):
    save_checkpoint("ckpt.pt", state())
    raw = Path("ckpt.pt").read_bytes()
    good = leaves(load_checkpoint("ckpt.pt"))
    draw = np.random.default_rng(0)
    noticed = 0
    for place in draw.permutation(len(raw))[:400].tolist():
        flipped = bytearray(raw)
        flipped[place] ^= 1 << draw.integers(8)
        Path("ckpt.pt").write_bytes(flipped)
        try:
            assert leaves(load_checkpoint("ckpt.pt")) == good, place
        except UserError as e:
            assert "is damaged" in str(e) or "another program or version" in str(e)
            noticed += 1
    assert noticed > 150


@pytest.mark.parametrize("disguise", ["pickle", "zip"])
def test_a_checkpoint_that_would_run_code_is_refused(disguise, folder):
    if disguise == "pickle":
        Path("ckpt.pt").write_bytes(pickle.dumps(Bomb()))
    else:
        torch.save({**state(), "step": Bomb()}, "ckpt.pt")
    with pytest.raises(UserError, match="ckpt.pt is damaged, or not a checkpoint"):
        load_checkpoint("ckpt.pt")
    assert not Path("executed").exists()
    pickle.loads(pickle.dumps(Bomb()))
    assert Path("executed").exists()  # the bomb is live


@pytest.mark.parametrize(
    "change, words",
    [
        ({"format": 1}, "another program or version"),
        ({"tokenizer": 3}, "no tokenizer in it"),
        ({"data_config": None}, "no data_config in it"),
        ({"optimizers": {}}, "no optimizers in it"),
    ],
)
def test_a_checkpoint_with_impossible_parts_is_refused(change, words, folder):
    save_checkpoint("ckpt.pt", state(**change))
    with pytest.raises(UserError, match=words):
        load_checkpoint("ckpt.pt")


def test_a_file_that_unpacks_to_more_than_it_holds_is_refused(folder):
    save_checkpoint("ckpt.pt", state(model={"w": torch.zeros(10**6)}))
    with zipfile.ZipFile("ckpt.pt") as packed, zipfile.ZipFile("bomb.pt", "w", 8) as bomb:
        for name in packed.namelist():
            bomb.writestr(name, packed.read(name))
    with pytest.raises(UserError, match="its parts are larger than the file"):
        load_checkpoint("bomb.pt")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        OSError(errno.EIO, "Input/output error"),
        PermissionError(errno.EACCES, "Permission denied"),
    ],
)
def test_other_errors_are_not_reported_as_damage(error, folder, monkeypatch):
    def fail(*args, **options):
        raise error

    save_checkpoint("ckpt.pt", state())
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(type(error), match=re.escape(str(error))):
        load_checkpoint("ckpt.pt")


def test_a_folder_named_as_a_checkpoint_is_no_damaged_one(folder):
    Path("run/ckpt.pt").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        load_checkpoint("run/ckpt.pt")


@posix
def test_killed_at_any_moment_of_a_save_a_checkpoint_loads(folder):
    draw = np.random.default_rng(0)
    before = state()
    save_checkpoint("ckpt.pt", before)
    for _ in range(30):
        child = os.fork()
        if child == 0:
            save_until_killed(before)
        time.sleep(draw.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        after = load_checkpoint("ckpt.pt")
        assert after["step"] >= before["step"]
        if after["step"] > 1:
            assert load_checkpoint("best.pt")["step"] >= after["step"]
        before = after
        if os.path.exists("previous.pt"):
            load_checkpoint("previous.pt")
    assert before["step"] > 1


def save_until_killed(saved: dict) -> None:
    try:
        while True:
            saved["step"] += 1
            save_checkpoint("ckpt.pt", saved, is_best=True)
    finally:
        os._exit(1)


# ---- tokenizers --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    texts = [Path(tokenizer.__file__).read_text()]
    return {"bytes": get_tokenizer("bytes"), "bpe": get_tokenizer("bpe:300", texts)}


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_one_table_of_special_tokens_follows_the_text(name, tokenizers):
    tok = tokenizers[name]
    assert tok.n_ordinary == tok.EOT and tok.n_ids == tok.n_ordinary + 1 + len(SPECIALS)
    assert tok.vocab_size % 64 == 0 and 0 <= tok.vocab_size - tok.n_ids < 64
    assert tok.decode([tok.PAD, tok.MASK, tok.CLS, tok.SEP]) == "[PAD][MASK][CLS][SEP]"
    assert (
        tok.decode([tok.PRE, tok.SUF, tok.MID, tok.R, tok.S, tok.X]) == "<PRE><SUF><MID>[R][S][X]"
    )
    last = tok.sentinel + N_SENTINELS - 1
    assert tok.names[last] == "<extra_id_255>" and tok.specials["<extra_id_255>"] == last
    assert last == tok.n_ids - 1
    assert tok.n_bytes.shape == (tok.vocab_size,) and tok.n_bytes.dtype == np.int32
    assert tok.n_bytes.tolist() == [len(piece) for piece in tok.bytes]
    assert not tok.n_bytes[tok.n_ordinary :].any()


def any_bytes(draw: np.random.Generator) -> bytes:
    """Noise, text in many scripts, white space, separators and byte order marks, mixed."""
    letters = [*range(32, 127), 10, 13, 0x85, 0xA0, 0x3B1, 0x2028, 0x4E2D, 0x1F600]
    parts = []
    for _ in range(draw.integers(0, 6)):
        n = int(draw.integers(0, 120))
        kinds = [
            draw.integers(0, 256, n, dtype=np.uint8).tobytes(),
            "".join(map(chr, draw.choice(letters, n))).encode(),
            bytes(draw.choice(list(b" \t\n\r\0"), n)),
            b"<|endoftext|>\n" * (n // 9),
            b"\xef\xbb\xbf" * n,
        ]
        parts.append(kinds[draw.integers(len(kinds))])
    return b"".join(parts)


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_any_bytes_survive(name, tokenizers):
    tok = tokenizers[name]
    draw = np.random.default_rng(0)
    for _ in range(200):
        raw = any_bytes(draw)
        ids = tok.encode(raw)
        assert tok.decode_bytes(ids) == raw and all(i < tok.n_ordinary for i in ids)
        assert tok.n_bytes[ids].sum() == len(raw)
    stray = draw.integers(128, 192, 5000, dtype=np.uint8).tobytes()
    assert tok.decode_bytes(tok.encode(stray)) == stray


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_any_ids_decode(name, tokenizers):
    tok = tokenizers[name]
    assert tok.decode([]) == "" and tok.decode([-100, tok.vocab_size, 10**9]) == ""
    assert tok.decode(np.array([[104], [105]])) == "hi"
    assert tok.decode([255, tok.EOT, 104]) == "\ufffd" + EOT_TEXT + "h"
    assert tok.decode_bytes(range(tok.n_ids, tok.vocab_size)) == b""


def test_a_million_blanks_are_tokenized(tokenizers):
    text = "word" + " " * 1_200_000 + "word" + "\n" * 1_200_000 + "word"
    assert tokenizers["bpe"].decode(tokenizers["bpe"].encode(text)) == text


def sentences(tok: Tokenizer, text: str) -> list[str]:
    ids = np.array(tok.encode(text))
    stops = [0, *Spelled(ids, tok).sentence_ends(), len(ids)]
    return [tok.decode(ids[a:b]) for a, b in itertools.pairwise(stops)]


@pytest.mark.parametrize(
    "expected",
    [
        ["He ran.", " She sat!", "\tWhy?", " So."],
        ["import os.path; x = a.b(3.14)"],
        ["x = a.b(3.14)\n", "y"],
        ["One.\n\n\n", "Two\n", "three"],
        ["So...", " well"],
        ["no end"],
        ["A.\n"],
        ["他跑了。", "她坐下！", "为什么？", "“好。”他说。"],
        ["你好！！\n", "好。", " x"],
        ["（他走了。）她笑。", "好。"],
        ['"好。"他说。', "好。\r\n", "x"],
        ["「好。」彼は言った。", "次。"],
    ],
)
def test_a_sentence_ends_before_a_blank_after_newlines_or_after_a_chinese_mark(expected):
    tok = get_tokenizer("bytes")
    assert sentences(tok, "".join(expected)) == expected


def test_sentences_of_pieces_with_ends_inside():
    """A BPE piece can hold a mark and a blank, or a newline and the next line's indent."""
    ranks = {bytes([b]): b for b in range(256)}
    for piece in (b". ", b"\n    ", b".\n", b" a", b"\n\n", b"a.", "。他".encode()):
        ranks[piece] = len(ranks)
    tok = Tokenizer("by hand", ranks, r"(?s)\. |\n    |\.\n| a|\n\n|a\.|。他|.")
    assert sentences(tok, "b. c\n    d.\nfa. a b\n\n\nc") == [
        "b. ",
        "c\n    ",
        "d.\n",
        "fa.",
        " a b\n\n\n",
        "c",
    ]
    assert sentences(tok, "好。他说。好") == ["好。他说。", "好"]  # no end inside a piece
    assert Spelled(np.array([]), tok).sentence_ends() == []
    with_mask = np.array([*tok.encode("a.\n"), tok.MASK])
    assert Spelled(with_mask, tok).sentence_ends() == [2]


def test_cuts_do_not_depend_on_how_a_process_hashes():
    code = """
import numpy as np
from sentences import cuts_alike
from tokenizer import get_tokenizer
tok = get_tokenizer("bytes")
text = np.array(tok.encode("a. B! c? D.  e!  F?\\tg.\\nH!\\ni" * 3))
for seed in range(20):
    print(cuts_alike(text, text, np.random.default_rng(seed), tok, 100))
"""
    started = []
    for seed in "12":
        environment = {**os.environ, "PYTHONPATH": str(HERE), "PYTHONHASHSEED": seed}
        started.append(start(code, env=environment))
    one, two = map(finish, started)
    assert one == two and one[0] == 0 and len(set(one[1].splitlines())) > 5


def test_bpe_merges_the_most_frequent_pair_first_and_is_deterministic():
    text = "low low low lower lowest newest"
    ranks = train_bpe([text], 260).ranks
    assert list(ranks)[256:] == [b"lo", b"low", b" low", b"es"]
    assert train_bpe([text], 260).ranks == ranks


def slow_bpe(words, n_ids):
    """The pieces that train_bpe should find, by counting all pairs again for each merge."""
    words = [tuple(word.encode()) for word in words]
    pieces = [bytes([b]) for b in range(256)]
    while len(pieces) < n_ids:
        counts = Counter(pair for word in words for pair in pairwise(word))
        if not counts:
            break
        pair = min(counts, key=lambda pair: (-counts[pair], pair))
        piece = pieces[pair[0]] + pieces[pair[1]]
        if piece not in pieces:  # always, as train_bpe assumes
            pieces.append(piece)
        words = [merge(word, pair, pieces.index(piece)) for word in words]
    return pieces


def merge(word, pair, new):
    if word[:2] == pair:
        return (new, *merge(word[2:], pair, new))
    return (*word[:1], *merge(word[1:], pair, new)) if word else ()


@pytest.mark.parametrize("seed", range(5))
def test_bpe_agrees_with_counting_all_pairs_anew(seed, monkeypatch):
    """Even if a word is longer than MOST_LETTERS: training splits such a word into parts."""
    draw = np.random.default_rng(seed)
    words = ["".join(draw.choice(list("abc"), draw.integers(1, 9))) for _ in range(60)]
    monkeypatch.setattr(tokenizer, "MOST_LETTERS", 200)
    words.append("".join(draw.choice(list("acgt"), 600)))
    parts = [words[-1][start : start + 200] for start in (0, 200, 400)]
    spaced = [words[0], *(f" {word}" for word in words[1:-1])]
    text = " ".join(words[:-1]) + "\n" + words[-1]
    assert list(train_bpe([text], 300).ranks) == slow_bpe([*spaced, "\n", *parts], 300)


def test_bpe_of_few_words_has_fewer_pieces_and_each_stands_once():
    ranks = train_bpe(["abc abc ab bc"], 400).ranks
    assert len(ranks) < 400 and list(ranks.values()) == list(range(len(ranks)))
    assert get_tokenizer("bpe:400", ["abc abc ab bc"]).ranks == ranks
    assert get_tokenizer("bpe:400", ["a", "b"]).n_ordinary == 256


def test_a_tokenizer_survives_its_json(tokenizers):
    for tok in tokenizers.values():
        again = Tokenizer.from_json(tok.to_json())
        assert again.to_json() == tok.to_json() and again.bytes == tok.bytes
        assert again.encode("the cat") == tok.encode("the cat")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "{}",
        "[]",
        "3",
        '{"name": 3}',
        '{"name": "bpe:300"}',
        '{"name": "bpe:300", "pattern": "(", "pieces": ["QQ==", "QQ=="]}',
        '{"name": "nothing"}',
        '{"name": "bpe:1\\u001b[2J", "pattern": "", "pieces": []}',
    ],
)
def test_json_that_is_no_tokenizer_is_refused(text):
    with pytest.raises(UserError):
        Tokenizer.from_json(text)


def test_a_strange_pattern_in_a_tokenizer_is_refused(tokenizers):
    spec = json.loads(tokenizers["bpe"].to_json())
    for pattern in ("", "(", "(a+)+$"):
        with pytest.raises(UserError, match="pattern"):
            Tokenizer.from_json(json.dumps(spec | {"pattern": pattern}))


def test_a_tokenizer_with_a_strange_name_or_without_each_byte_once_is_refused(tokenizers):
    spec = json.loads(tokenizers["bpe"].to_json())
    first, second, *rest = spec["pieces"]
    for pieces in ([], rest, [second, first, *rest], [first, second, *rest, rest[-1]]):
        with pytest.raises(UserError, match="the pieces"):
            Tokenizer.from_json(json.dumps(spec | {"pieces": pieces}))
    for name in ("bpe:300\x1b[2J", "bpe:30"):
        with pytest.raises(UserError, match="not a tokenizer's JSON"):
            Tokenizer.from_json(json.dumps(spec | {"name": name}))


@pytest.mark.parametrize(
    "name, words",
    [
        ("gpt3", "did you mean gpt2?"),
        ("nothing", "choose bytes, bpe:N or one of gpt2"),
        ("bpe:12", "bpe:4096"),
        ("bpe:256", "from 257 to 999999"),
        ("bpe:x", "bpe:4096"),
        ("bpe:9999999", "bpe:4096"),
    ],
)
def test_a_tokenizer_that_is_not_known_names_what_is(name, words):
    with pytest.raises(UserError, match=re.escape(words)):
        get_tokenizer(name, ["text"])


def test_an_encoding_that_would_have_to_be_fetched_names_the_remedy(folder, monkeypatch):
    def no_network(name):
        raise ConnectionError("no network")

    monkeypatch.setattr(tokenizer.tiktoken, "get_encoding", no_network)
    for ask in (get_tokenizer, lambda name: Tokenizer.from_json(json.dumps({"name": name}))):
        with pytest.raises(UserError, match="--tokenizer=gpt2.*TIKTOKEN_CACHE_DIR.*new runs can"):
            ask("gpt2")


def test_an_encoding_keeps_its_own_eot_and_may_have_no_gap(monkeypatch):
    """An EOT may come after the ids of text, not among them (as in p50k_base)."""

    def with_eot(eot):
        ranks = {piece: id + (id >= eot) for id, piece in enumerate(tokenizer.SINGLE_BYTES)}
        special = {EOT_TEXT: eot}
        return tokenizer.tiktoken.Encoding(
            "gpt2", pat_str=r"(?s).", mergeable_ranks=ranks, special_tokens=special
        )

    monkeypatch.setattr(tokenizer.tiktoken, "get_encoding", lambda name: with_eot(300))
    tok = get_tokenizer("gpt2")
    assert (tok.EOT, tok.PAD, tok.n_ids) == (300, 301, 301 + len(SPECIALS))
    assert tok.n_ordinary == 256 and tok.decode([300]) == EOT_TEXT
    monkeypatch.setattr(tokenizer.tiktoken, "get_encoding", lambda name: with_eot(255))
    with pytest.raises(UserError, match="--tokenizer=p50k_base: its ids have a gap"):
        get_tokenizer("p50k_base")


def test_a_bpe_is_trained_on_the_beginning_of_a_large_text_and_its_frequent_words(monkeypatch):
    monkeypatch.setattr(tokenizer, "MOST_CHARS", 20)
    texts = iter(["abab " * 5, "not read"])
    train_bpe(texts, 260)
    assert list(texts) == ["not read"]
    monkeypatch.setattr(tokenizer, "MOST_DIFFERENT", 2)
    assert list(train_bpe(["xyz" + " ab" * 3], 260).ranks)[256:] == [b" a", b" ab"]


def test_ids_that_need_more_than_two_bytes_get_them():
    pieces = [*tokenizer.SINGLE_BYTES, *(i.to_bytes(3, "big") for i in range(70_000))]
    tok = Tokenizer("large", {piece: id for id, piece in enumerate(pieces)}, r"(?s).{1,3}")
    assert tok.n_ids > 1 << 16
    assert np.array([tok.EOT], tok.dtype).tolist() == [tok.EOT]


def test_a_piece_of_a_bpe_has_three_digits_at_most():
    tok = get_tokenizer("bpe:300", ["1234567 " * 50])
    longest = max(len(piece.strip()) for piece in tok.bytes if piece.strip().isdigit())
    assert longest == 3
    assert len(tok.encode("1234567")) == 3


# ---- corpora -----------------------------------------------------------------------------------


def test_every_document_ends_with_eot_and_every_twentieth_is_validation(folder):
    tokens = load("text.txt", tokenizer="bytes")
    documents = Path("text.txt").read_text().split(f"{EOT_TEXT}\n")
    for ids, expected in ((tokens.val, documents[19::20]), (tokens.train, documents[:19])):
        text = tokens.tok.decode(ids)
        assert text.startswith("".join(document + EOT_TEXT for document in expected))
    assert (tokens.train == tokens.tok.EOT).sum() == 57 and tokens.val[-1] == tokens.tok.EOT
    assert isinstance(tokens.train, np.memmap) and tokens.train.ndim == 1 and tokens.floor is None
    assert "text.txt (1 file" in tokens.about and "(bytes)" in tokens.about


def test_documents_end_in_the_files_of_a_folder_too(folder):
    Path("texts").mkdir()
    Path("texts/a.txt").write_text(f"one\n{EOT_TEXT}\ntwo\n")
    Path("texts/b.txt").write_text("three\n")
    assert list(Corpus("texts").pieces()) == [("one\n", True), ("two\n", True), ("three\n", True)]


@posix
def test_folders_that_links_lead_to_are_read_once(folder):
    for name in ("texts/b", "elsewhere/inside"):
        Path(name).mkdir(parents=True)
        Path(name, "one.txt").write_text(f"{name}\n")
    Path("texts/a").symlink_to("../elsewhere")
    Path("texts/c").symlink_to("../elsewhere")
    Path("elsewhere/inside/back").symlink_to("../../texts")
    Path("elsewhere/inside/up").symlink_to("../..")
    Path("not_asked_for.txt").write_text("no\n")
    found = list(Corpus("texts").pieces())
    assert found == [("elsewhere/inside\n", True), ("texts/b\n", True)]


def test_of_few_documents_the_tail_is_validation(folder):
    Path("a.txt").write_text("x" * 999)
    tokens = load("a.txt")
    assert (len(tokens.train), len(tokens.val), tokens.val[-1]) == (950, 50, tokens.tok.EOT)
    Path("a.txt").write_text("abc")  # the least: one token and an EOT each
    tokens = load("a.txt")
    assert [tokens.tok.decode(ids) for ids in (tokens.train, tokens.val)] == [
        *(f"a{EOT_TEXT}", f"c{EOT_TEXT}")
    ]


def test_stories_come_with_the_cost_of_their_language(folder, monkeypatch):
    tokens = load("stories:200", tokenizer="bytes")
    held_out = list(stories.documents(200))[19::20]
    assert tokens.tok.decode(tokens.val) == "".join(text + EOT_TEXT for text, _ in held_out)
    n_bytes = tokens.tok.n_bytes[tokens.val].sum()
    assert tokens.floor == pytest.approx(sum(nats for _, nats in held_out) / n_bytes)
    assert load("stories:200", tokenizer="bytes").floor == tokens.floor
    assert "stories (200 documents)" in tokens.about
    assert load("stories:200").tok.name.startswith("bpe:")
    assert Corpus("stories:201").digest() != tokens.digest
    monkeypatch.setattr(stories, "DEFAULT_SIZE", 200)
    assert Corpus("stories").digest() == tokens.digest


def test_an_edit_of_the_grammar_or_of_its_probabilities_makes_other_stories(monkeypatch):
    """Otherwise the stories of an earlier grammar would be read from the cache."""
    digest = Corpus("stories:20").digest()
    *most, last = stories.WORDS["kind"]
    for table, name, value in [
        (stories.WORDS, "kind", [*most, last + "r"]),
        (vars(stories), "log", lambda n: math.log(n + 1)),
    ]:
        with monkeypatch.context() as patch:
            patch.setitem(table, name, value)
            assert Corpus("stories:20").digest() != digest


def test_the_default_is_stories_and_a_path_is_a_path(folder):
    assert DataConfig().data == "stories"
    assert len(Corpus("python").files) > 300
    Path("stories").write_text("my own")
    assert Corpus("stories").files == [] and Corpus("./stories").files == [Path("stories")]
    with pytest.raises(UserError, match="--data=storys does not exist; did you mean stories?"):
        Corpus("storys")
    for wrong in ("", "19", "many", "1e3", "\u00b2", "-5", "9" * 5000):
        with pytest.raises(UserError, match="write stories:N with N from 20 to 1000000"):
            Corpus(f"stories:{wrong}")


def test_the_automatic_tokenizer_follows_the_size(folder, monkeypatch):
    assert load("text.txt").tok.name == "bytes"
    monkeypatch.setattr(corpus, "LARGE", 100)
    monkeypatch.setattr(corpus, "LARGE_TOKENIZER", "bpe:280")
    assert load("text.txt").tok.name == "bpe:280"
    Path("x.txt").write_text("ab " * 999)  # two words do not give that many pieces
    few = load("x.txt").tok
    assert few.name == "bpe:280" and few.n_ordinary < 280
    assert load("x.txt").tok.to_json() == few.to_json()


def test_an_edited_corpus_another_tokenizer_and_another_reading_are_tokenized_afresh(folder):
    path = Path("a.txt")
    path.write_text('{"text": "some words"}\n' * 20)
    first = load("a.txt")
    stamp = path.stat()
    path.write_text('{"text": "same words"}\n' * 20)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # same size, same date
    assert "some" in everything(first) and "same" not in everything(first)
    assert "same" in everything(load("a.txt")) and "some" not in everything(load("a.txt"))
    assert load("a.txt").digest != first.digest
    assert len(load("a.txt", tokenizer="bpe:260").train) < len(load("a.txt").train)
    shutil.copy("a.txt", "a.jsonl")  # the same bytes, read as JSON lines
    assert everything(load("a.jsonl")) == "same words" * 20
    shutil.copy("a.txt", "a.ndjson")
    assert everything(load("a.ndjson")) == "same words" * 20
    assert load("a.jsonl").digest != load("a.txt").digest


WEIRD = {  # name -> content, and what the refusal says (None: it works)
    "empty.txt": (b"", "no text in it"),
    "one.txt": (b"x", "one.txt has only 2 tokens; give more text"),
    "two.txt": (b"xy", "two.txt has only 3 tokens; give more text"),
    "nul.txt": (b"\0" * 5000, "no text in it"),
    "line.txt": (b"x" * 1_500_000, None),
    "bom_crlf.txt": (b"\xef\xbb\xbfone\r\ntwo\r\n" * 300, None),
    "invalid.txt": (b"a\xff\xfeb\n" * 900, None),
    "utf16.txt": ("text".encode("utf-16"), "in UTF-8 (no pipe, no UTF-16, no NUL bytes)"),
    "separators.txt": (b"<|endoftext|>\n" * 99, "0 tokens"),
    "letters.txt": (b"a\n<|endoftext|>\n" * 90, None),
    "good.jsonl": (b'{"text": "one\\ntwo"}\r\n\n' * 300, None),
    "broken.jsonl": (b'{"text": "one"}\n{"text": 2}\n', "broken.jsonl, line 2"),
    "cut.jsonl": (b'{"text": "one"}\n{"te', "cut.jsonl, line 2"),
    "deep.jsonl": (b"[" * 100_000, "deep.jsonl, line 1"),
    "surrogate.jsonl": (b'{"text": "\\ud800 and more words"}\n' * 90, None),
    "nowhere": (None, "--data=nowhere does not exist"),
    "": (None, "--data= does not exist; give a text file"),
    "images/a.png": (b"\x89PNG\0\0", "no text in it"),
    "hidden/.a.txt": (b"text", "no text in it"),
    "folder/a.txt": (b"some words\n" * 50, None),
    "folder/b.bin": (b"\0" * 50, None),
}


@pytest.mark.parametrize("name", WEIRD)
def test_weird_corpora_work_or_are_refused_in_one_line(name, folder):
    content, words = WEIRD[name]
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    if content is not None:
        path.write_bytes(content)
    if name == "folder/b.bin":
        Path("folder/a.txt").write_text("some words\n" * 50)
    top = path.parts[0] if name else ""
    if words is None:
        tokens = load(top)
        assert len(tokens.train) >= 2 and "\ufeff" not in everything(tokens)[:1]
        assert "\0" not in everything(tokens)
    else:
        with pytest.raises(UserError, match=re.escape(words)) as refusal:
            load(top)
        assert "\n" not in str(refusal.value) and not temporary_files(folder)


@pytest.mark.parametrize("name", ["invalid.txt", "invalid.jsonl"])
def test_bytes_that_are_not_utf8_are_replaced_and_counted_or_refused(name, folder):
    Path(name).write_bytes(b'{"text": "a\xffb \xef\xbf\xbd"}\n' * 99)
    said = []
    tokens = load_tokens(DataConfig(data=name), log=said.append)
    assert everything(tokens).count("a\ufffdb \ufffd") == 99
    again = load_tokens(DataConfig(data=name), log=said.append)  # from the cache
    for about in (tokens.about, again.about):
        assert about.endswith("; 99 bytes that are not UTF-8 were replaced")
    with pytest.raises(UserError, match=f"{name} has invalid UTF-8"):
        load(name, invalid_utf8="refuse")


def test_files_without_text_are_counted(folder):
    Path("texts").mkdir()
    for name in ("a.txt", "b.txt"):
        Path("texts", name).write_text("some words\n")
    assert str(Corpus("texts")) == "texts (2 files, 22 bytes)"
    Path("texts/c.txt").write_text("words", encoding="utf-16")
    assert str(Corpus("texts")) == "texts (2 files, 22 bytes; 1 without text left out)"


def test_half_a_character_in_json_is_replaced_or_refused(folder):
    Path("half.jsonl").write_text('{"text": "half \\ud83d, whole \\ud83d\\ude00"}\n' * 30)
    Path("dos.jsonl").write_text('{"text": "one\\r\\ntwo"}\n' * 30)
    assert everything(load("dos.jsonl")).startswith("one\ntwo")
    assert everything(load("half.jsonl")).startswith("half \ufffd, whole \U0001f600")
    with pytest.raises(UserError, match="half.jsonl has invalid UTF-8"):
        load("half.jsonl", invalid_utf8="refuse")


def test_training_text_that_is_cut_inside_a_document_ends_there(folder):
    """Windows wrap around: without an EOT at the end, one would run on into the first words."""
    Path("t.txt").write_text("abcdefghij" * 10)
    tokens = load("t.txt")
    assert tokens.tok.decode(tokens.train) == ("abcdefghij" * 10)[:95] + EOT_TEXT
    assert tokens.tok.decode(tokens.val) == "ghij" + EOT_TEXT


def test_a_tokenizer_is_not_trained_on_held_out_documents(folder):
    documents = ["the cat sat on the mat"] * 40
    documents[19] = documents[39] = "zqx zqx zqx zqx zqx zqx"
    Path("t.txt").write_text("\n<|endoftext|>\n".join(documents))
    tok = load("t.txt", tokenizer="bpe:300").tok
    pieces = [tok.decode_bytes([id]) for id in range(tok.n_ordinary)]
    assert any(b"cat" in piece for piece in pieces)
    assert not any(b"zq" in piece for piece in pieces)


@pytest.mark.parametrize("block", [16, 17, 18, 20, 31, 64])
def test_line_ends_and_separators_across_the_edges_of_blocks(block, folder, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK", block)
    separator = b"<|endoftext|>"
    parts = [b"\xef\xbb\xbfone\r\n", separator, b"\r\ntwo\r\n", b"x" * 40, separator, b"\r\n"]
    Path("t.txt").write_bytes(b"".join([*parts, separator, b" \nthree\r\n", separator]))
    pieces = list(Corpus("t.txt").pieces())
    text = "".join(text + "|" * is_last for text, is_last in pieces)
    assert text == "one\n|two\n" + "x" * 40 + "<|endoftext|>\n|three\n|"


def test_a_text_has_its_own_tokenizer_whatever_others_read_it_before(folder):
    """A run that starts from another text's checkpoint reads this text with that tokenizer, which
    may have the same name."""
    Path("other.txt").write_text("zq zqz qzq " * 100)
    other = load("other.txt", tokenizer="bpe:300").tok
    assert load_tokens(DataConfig("text.txt"), other, log=print).tok is other
    own = load("text.txt", tokenizer="bpe:300").tok
    assert own.to_json() != other.to_json()
    assert own.to_json() == load("text.txt", tokenizer="bpe:300", cache_dir="new").tok.to_json()
    assert load("text.txt", tokenizer="bpe:280").tok.name == "bpe:280"  # of another size, too


def test_a_folder_corpus_leaves_out_runs_and_the_cache(folder):
    for name in (
        "a.txt",
        "sub/b.txt",
        "out/clm/log.jsonl",
        "out/young/log.jsonl",
    ):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text('{"step": 1}\n' * 9)
    Path("out/clm/ckpt.pt").write_text("weights")
    with lock_folder("out/young"):  # a run that has not saved yet
        files = Corpus(".").files
    assert files == [Path("a.txt"), Path("sub/b.txt"), Path("text.txt")]
    shutil.rmtree("out")
    config = DataConfig(".", "bpe:300", cache_dir="cache")
    tokens, again = (load_tokens(config, log=lambda line: None) for _ in range(2))
    assert tokens.digest == again.digest and list(Path("cache").glob("tokens-*.bin"))


def test_tokens_of_another_tokenizer_of_the_same_name_are_not_taken_from_the_cache(folder):
    """A run that starts from another text's checkpoint reads this text with that tokenizer."""
    Path("other.txt").write_text("zq zqz qzq " * 100)
    text = Path("text.txt").read_text().replace(f"{EOT_TEXT}\n", "")
    other = load("other.txt", tokenizer="bpe:300").tok
    for tok in (other, None):
        read = load_tokens(DataConfig("text.txt", "bpe:300"), tok, log=lambda line: None)
        ids = np.concatenate([read.train, read.val])
        assert len(read.tok.decode(ids).replace(EOT_TEXT, "")) == len(text)


def test_a_json_text_as_long_as_a_block_is_a_document_of_its_own(folder, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK", 8)
    texts = ["a" * 8, "b" * 16, "c" * 7, "d" * 9]
    Path("t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    whole = "".join(text + "|" * is_last for text, is_last in Corpus("t.jsonl").pieces())
    assert whole.split("|") == [*texts, ""]


def test_a_document_of_several_blocks_is_held_out_or_trained_on_as_a_whole(folder, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK", 8)
    texts = [f"document {i} is longer than a block" for i in range(40)]
    Path("t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokens = load("t.jsonl")
    held_out = [texts.pop(39), texts.pop(19)][::-1]
    assert tokens.tok.decode(tokens.val) == "".join(text + EOT_TEXT for text in held_out)
    assert tokens.tok.decode(tokens.train) == "".join(text + EOT_TEXT for text in texts)


def test_a_folder_that_may_not_be_read_is_not_left_out_in_silence(folder, monkeypatch):
    def scan(path):
        if os.path.basename(path) == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    scandir = os.scandir
    Path("texts/closed").mkdir(parents=True)
    Path("texts/a.txt").write_text("some words\n")
    monkeypatch.setattr(os, "scandir", scan)
    with pytest.raises(PermissionError, match="closed"):
        Corpus("texts")


def test_hidden_folders_are_not_read(folder):
    for name in ("texts/a.txt", "texts/.git/config", "texts/.venv/lib/b.py"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("some words\n")
    assert Corpus("texts").files == [Path("texts/a.txt")]


def test_the_python_corpus_is_the_library_without_tests_and_packages_of_others():
    folders = {part for path in Corpus("python").files for part in path.parts}
    assert not folders & {"test", "tests", "site-packages", "dist-packages", "__pycache__"}
    assert "asyncio" in folders
    assert {path.suffix for path in Corpus("python").files} == {".py"}


def test_the_end_of_a_file_name_may_be_written_in_capitals(folder):
    Path("T.JSONL").write_text('{"text": "one"}\n' * 30)
    assert everything(load("T.JSONL")) == "one" * 30


def test_line_ends_in_json_are_those_of_text_files(folder):
    text = "one\rtwo\r\nthree\n"
    Path("mac.jsonl").write_text(json.dumps({"text": text}) + "\n")
    Path("mac.txt").write_bytes(text.encode())
    pieces = [list(Corpus(name).pieces()) for name in ("mac.jsonl", "mac.txt")]
    assert pieces[0] == pieces[1] == [("one\ntwo\nthree\n", True)]


def test_nothing_below_the_folder_of_a_run_is_read(folder):
    for name in ("texts/a.txt", "texts/run/ckpt.pt", "texts/run/samples/b.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("some words\n")
    assert Corpus("texts").files == [Path("texts/a.txt")]


# ---- the cache ---------------------------------------------------------------------------------


def forged(raw: bytes, n_train=5, ids: bytes | None = None) -> bytes:
    """A cache with another split or other ids, and with the matching checksum."""
    footer = corpus.FOOTER.pack(n_train, math.nan, 0)
    body = (raw[: -len(footer) - corpus.CRC_BYTES] if ids is None else ids) + footer
    return body + zlib.crc32(body).to_bytes(corpus.CRC_BYTES, "little")


HARMS = {
    "cut": lambda raw: raw[:-2],
    "odd": lambda raw: raw[:-1],
    "short": lambda raw: raw[:10],
    "tiny": lambda raw: raw[:2],
    "empty": lambda raw: b"",
    "flipped id": lambda raw: raw[:500] + bytes([raw[500] ^ 1]) + raw[501:],
    "flipped footer": lambda raw: raw[:-10] + bytes([raw[-10] ^ 1]) + raw[-9:],
    "pickle": lambda raw: pickle.dumps(Bomb()),
    "forged: no split": lambda raw: forged(raw, n_train=-1),
    "forged: a huge split": lambda raw: forged(raw, n_train=1 << 62),
    "forged: no ids": lambda raw: forged(raw, ids=b""),
    "forged: half an id": lambda raw: forged(raw, ids=b"abc"),
    "forged: strange ids": lambda raw: forged(raw, ids=b"\xff\xff" * 100),
    "forged: special ids": lambda raw: forged(raw, ids=b"\x01\x01" * 100),  # 257: [PAD]
    "forged: no footer": lambda raw: b"abc" + zlib.crc32(b"abc").to_bytes(4, "little"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_or_hostile_cache_is_built_again(harm, folder):
    load("text.txt")
    (path,) = Path(".cache").glob("tokens-*.bin")
    good = path.read_bytes()
    path.write_bytes(HARMS[harm](good))
    assert path.read_bytes() != good
    load("text.txt")
    assert path.read_bytes() == good and not Path("executed").exists()


@pytest.mark.parametrize("content", [b"[" * 100_000, b"{", b'{"name": "bpe:300"}', b"\xff\0"])
def test_a_damaged_or_hostile_tokenizer_is_trained_again(content, folder):
    tok = load("text.txt", tokenizer="bpe:300").tok
    (path,) = Path(".cache").glob("tokenizer-*.json")
    path.write_bytes(content)
    assert load("text.txt", tokenizer="bpe:300").tok.to_json() == tok.to_json() == path.read_text()


@pytest.mark.parametrize(
    "name, moment", [("bytes", "tokenizing"), ("bpe:258", "tokenizing"), ("bpe:258", "training")]
)
def test_a_corpus_that_changes_while_it_is_read_leaves_no_cache(name, moment, folder, monkeypatch):
    """The digest is taken first and the text is read later; the cache must not mix versions."""
    monkeypatch.setattr(tokenizer, "MOST_CHARS", 200)  # only the beginning is read

    def edit(line):
        if line.startswith(moment):
            Path("text.txt").write_text("poison " * 500)

    before = Path("text.txt").read_text()
    with pytest.raises(UserError, match="changed while being read"):
        load_tokens(DataConfig("text.txt", tokenizer=name), log=edit)
    Path("text.txt").write_text(before)
    tokens = load("text.txt", tokenizer=name)
    assert "poison" not in everything(tokens)
    shutil.rmtree(".cache")
    assert tokens.tok.to_json() == load("text.txt", tokenizer=name).tok.to_json()


def test_a_long_tokenization_says_how_far_it_is(folder, monkeypatch):
    monkeypatch.setattr(corpus, "REPORT_SECONDS", 0)
    monkeypatch.setattr(corpus, "BLOCK", 1 << 16)
    Path("big.txt").write_text("some words\n" * 300_000)
    said = []
    load_tokens(DataConfig("big.txt", tokenizer="bytes"), log=said.append)
    progress = [line for line in said if line.endswith(" tokens so far")]
    assert len(progress) > 2
    assert re.fullmatch(r"[\d,]+ tokens so far", progress[0])


TOKENIZE = """
import time, zlib, corpus
from config import run_command
def slow(*args):
    print("busy", flush=True)
    time.sleep(2)
def main(argv):
    tokens = corpus.load_tokens(corpus.DataConfig("text.txt", tokenizer="bpe:300"), log=print)
    print(tokens.about, zlib.crc32(tokens.train))
run_command(main)
"""


@posix
def test_processes_that_build_one_cache_at_once_agree_and_build_it_once(folder):
    """They begin together. Whoever begins work sleeps for a while, so that the others see it."""
    code = TOKENIZE.replace("log=print", "log=lambda line: print(line) or time.sleep(0.4)")
    code = code.replace("def main(argv):", "def main(argv):\n    print(flush=True), input()")
    together = [start(code, cwd=folder, stdin=subprocess.PIPE) for _ in range(3)]
    for process in together:
        process.stdout.readline()
    for process in together:
        print(file=process.stdin, flush=True)
    results = [finish(process) for process in together]
    assert all(status == 0 for status, _, _ in results), results
    assert len({out.splitlines()[-1] for _, out, _ in results}) == 1
    for work in ("training", "tokenizing"):
        assert sum(work in out for _, out, _ in results) == 1
    assert len(list(Path(".cache").glob("tokens-*"))) == 1 and not temporary_files(folder)
    with lock_folder(".cache", "cache"):  # another build locks it: what is there can be read
        status, out, _ = finish(start(TOKENIZE, cwd=folder))
    assert status == 0 and out.splitlines() == results[0][1].splitlines()[-1:]


@posix
def test_a_process_says_that_it_waits_for_a_cache_that_another_one_makes(folder):
    with lock_folder(".cache", "cache"):
        process = start(TOKENIZE, cwd=folder)
        ready, _, _ = select.select([process.stdout], [], [], 60)
        assert ready, "it waits in silence"
        line = process.stdout.readline()
    assert line == "waiting for another process, which is writing in .cache\n"
    status, out, _ = finish(process)
    assert status == 0 and out.startswith("training bpe:300 on text.txt")


@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_stopped_tokenization_left_goes_with_the_next_one(number, folder):
    """After SIGTERM, the process cleans up; after SIGKILL, the text's next tokenization does."""
    code = TOKENIZE.replace("def main", "corpus.Tokenizer.encode = slow\ndef main")
    process = start(code.replace("bpe:300", "bytes"), cwd=folder)
    while "busy" not in process.stdout.readline():
        assert process.poll() is None
    assert len(temporary_files(folder)) == 1
    process.send_signal(number)
    assert process.wait(600) == (143 if number == signal.SIGTERM else -9)
    assert len(temporary_files(folder)) == (0 if number == signal.SIGTERM else 1)
    load("text.txt")
    assert not temporary_files(folder)


@linux
def test_a_corpus_ten_times_larger_than_the_memory_allowed_is_tokenized(folder):
    """The limit is on the memory that a process adds after it has tokenized a first text."""
    room = 2 << 20
    piece = "some words and some more\n" * 400 + f"{EOT_TEXT}\n"
    with open("big.txt", "w") as f:
        for _ in range(10 * room // len(piece) + 1):
            f.write(piece)
    code = f"""
import re, resource, corpus
corpus.BLOCK = 1 << 16
def load(data):
    return corpus.load_tokens(corpus.DataConfig(data, tokenizer="bytes"))
load("text.txt")
used = int(re.search("VmData:\\\\s+([0-9]+)", open("/proc/self/status").read())[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + {room}, used + {room}))
print(load("big.txt").about)
"""
    environment = {**os.environ, "PYTHONPATH": str(HERE), "MALLOC_ARENA_MAX": "1"}
    status, out, err = finish(start(code, cwd=folder, env=environment))
    assert status == 0 and "big.txt (1 file, 20,9" in out, err


REUSE = """
import numpy as np, resource
from device import Machine

Machine("cpu")
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [np.ones(3 << 17) for _ in range(10)]  # 3 MB each
    del blocks
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other mallocs have other rules")
def test_memory_that_a_step_frees_is_used_again():
    code, out, err = finish(start(REUSE))
    assert code == 0, err
    first, *later = map(int, out.split())  # pages that were fetched from the system
    assert first > 1000 > 10 * max(later)
