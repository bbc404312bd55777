"""test_bench.py: the benchmark runs, and refuses in one line what it cannot measure.

pytest test_bench.py
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import bench
import train
from config import UserError

HERE = Path(__file__).resolve().parent


@pytest.fixture
def text(tmp_path) -> Path:
    """A corpus of 60 small documents."""
    documents = [f"def f{i}(x):\n    return x * {i}\n" * 8 for i in range(60)]
    path = tmp_path / "text.txt"
    path.write_text("<|endoftext|>\n".join(documents))
    return path


def test_each_figure_is_a_line(text, capsys):
    flags = ["--only=corruption", "--objective=clm,span", "--block_size=128"]
    bench.main([*flags, f"--data={text}", "--seconds=0.01"])
    printed = capsys.readouterr().out
    figures = re.findall(r"(?m)^(\S+) +([\d.]+) M tokens/s$", printed)
    assert [name for name, _ in figures] == ["clm", "span"]
    assert all(float(value) > 0 for _, value in figures)
    assert "compile" not in printed  # only training decides whether to compile


def test_decoding_is_timed_by_each_way_to_draft(text, tmp_path, capsys):
    """A run of two steps writes nothing useful, but its speed can be measured. The text is its own,
    unless the user names another."""
    flags = f"--objective=mtp --data={text} --cache_dir={tmp_path}/cache --out_dir={tmp_path}/run"
    train.main(f"{flags} --max_steps=2 --block_size=32 --n_layer=1 --eval_rows=16".split())
    capsys.readouterr()
    flags = ["--only=decoding", f"--out_dir={tmp_path}/run", "--seconds=0.01"]
    bench.main(flags)
    printed = capsys.readouterr().out
    assert f"tokenizing {text}" in printed
    bench.main([*flags, "--data=stories:40"])
    assert "tokenizing stories (40 documents)" in capsys.readouterr().out
    for way in ("plain", "look_up", "heads", "both"):
        assert re.search(rf"(?m)^{way}, temperature 0.8 +[\d,.]+ tokens/s$", printed)
        assert way == "plain" or f"{way}, temperature 0: speed over plain" in printed


def test_rows_that_an_objective_cannot_make_are_refused(text):
    flags = ["--only=corruption", "--objective=ul2", "--block_size=4096", f"--data={text}"]
    with pytest.raises(UserError, match="--block_size=4096: .* spans per row, but only 256"):
        bench.main(flags)


def test_a_flag_that_nothing_reads_is_refused():
    with pytest.raises(UserError, match="--preset has no effect with --only=corruption,decoding"):
        bench.main(["--only=corruption,decoding", "--preset=gpt2"])
    read = set().union(*(flags for _, flags in bench.SECTIONS.values()))
    assert read | {"only", "device"} == vars(bench.BenchConfig()).keys()


def test_each_prompt_is_the_next_piece_of_the_text():
    prompts = bench.prompts_for(1000, np.arange(10), 3)
    assert [next(prompts) for _ in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [2, 3, 4]]
    assert list(bench.prompts_for(0, np.arange(10), 3)) == [[0, 1, 2]]


def test_decoding_is_not_timed_with_a_model_that_does_not_write(text, tmp_path):
    flags = f"--objective=mlm --data={text} --cache_dir={tmp_path}/cache --out_dir={tmp_path}/run"
    train.main(f"{flags} --max_steps=1 --block_size=32 --n_layer=1 --eval_rows=16".split())
    with pytest.raises(UserError, match="decoding is measured with clm, fim, mtp only"):
        bench.main(["--only=decoding", f"--out_dir={tmp_path}/run"])


def test_training_steps_are_timed_and_leave_no_run_behind(text, tmp_path):
    flags = [f"--data={text}", f"--cache_dir={tmp_path}/cache", f"--out_dir={tmp_path}/run"]
    flags += ["--objective=span", "--device=cpu", "--n_layer=1", "--n_head=1", "--n_embd=64"]
    flags += ["--block_size=32", "--batch_size=2", "--max_steps=9"]
    ms, speed, mfu = bench.train_alone(flags, 4)
    assert ms > 0 and speed == pytest.approx(64 / ms * 1000) and mfu is None
    assert not (tmp_path / "run").exists()


def test_the_models_that_are_trained_get_their_flags(text, capsys, monkeypatch):
    asked = []

    def timed(argv, windows):
        asked.append(argv)
        return 2.0, 3000.0, 0.25

    monkeypatch.setattr(bench, "train_alone", timed)
    flags = ["--only=training", "--objective=clm,span", f"--data={text}", "--device=cpu"]
    given = {"--tokenizer=bpe:300", "--grad_accum=2"}
    bench.main([*flags, *given])
    assert len(asked) == 2 and all(given <= {*argv} for argv in asked)
    bench.main(flags)
    assert not any(flag.startswith("--tok") for argv in asked[2:] for flag in argv)
    assert re.search(r"(?m)^span: model FLOPs, of the peak +25 %$", capsys.readouterr().out)


def test_the_sections_are_those_of_the_flag():
    assert ",".join(bench.SECTIONS) == bench.BenchConfig.only


def test_threads_of_two_runs_on_the_same_cores_do_not_spin_for_long(tmp_path):
    """GNU's OpenMP itself prints the value that it reads where a program first imports torch. Here
    that import finds a file which loads nothing else."""
    found = [*Path(torch.__file__).parent.glob("lib/libgomp*")]
    if not found:
        pytest.skip("torch has another OpenMP here")
    (tmp_path / "torch.py").write_text(f"import ctypes\nctypes.CDLL({str(found[0])!r})\nexit()\n")
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment |= {"OMP_DISPLAY_ENV": "verbose", "PYTHONPATH": str(tmp_path)}
    for program in ("train.py", "compare.py", "bench.py"):
        command = [sys.executable, str(HERE / program)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
        assert "GOMP_SPINCOUNT = '3000'" in done.stderr, program
