"""test_bench.py: the benchmark runs, says what it says in JSON too, and refuses in one line.

pytest test_bench.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import bench

HERE = Path(__file__).resolve().parent
KEYS = ["section", "name", "value", "unit", "limit", "share", "aim"]


@pytest.fixture
def text(tmp_path) -> Path:
    """A corpus of 60 little documents."""
    documents = [f"def f{i}(x):\n    return x * {i}\n" * 8 for i in range(60)]
    path = tmp_path / "text.txt"
    path.write_text("<|endoftext|>\n".join(documents))
    return path


def run(*flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(HERE / "bench.py"), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


def test_each_figure_is_a_line_of_json(text):
    flags = ["--only=tokenization,corruption", "--objective=clm,span", "--block_size=128"]
    done = run(*flags, f"--data={text}", "--seconds=0.01", "--json")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(list(line) == KEYS for line in lines)
    corruption = [line for line in lines if line["section"] == "corruption"]
    assert [(line["name"], line["aim"]) for line in corruption] == [("clm", 10), ("span", 5)]
    assert {line["section"] for line in lines} == {"tokenization", "corruption"}
    for line in lines:
        assert line["value"] > 0 and line["share"] == pytest.approx(line["value"] / line["limit"])


def test_training_steps_are_timed_and_leave_no_run_behind(text, tmp_path):
    flags = [f"--data={text}", f"--cache_dir={tmp_path}/cache", f"--out_dir={tmp_path}/run"]
    flags += ["--objective=span", "--device=cpu", "--n_layer=1", "--n_head=1", "--n_embd=64"]
    steps = bench.train_alone([*flags, "--block_size=32", "--batch_size=2", "--max_steps=9"], 4)
    assert steps.ms > 0 and steps.tokens == 64 and steps.waited < steps.ms
    assert not (tmp_path / "run").exists()


def test_an_unknown_section_is_refused_in_one_line():
    done = run("--only=limits,corruptoin")
    assert done.returncode == 1 and done.stdout == ""
    expected = "'corruptoin' does not belong here; did you mean corruption?\n"
    assert done.stderr.endswith(expected) and done.stderr.count("\n") == 1


def test_the_sections_are_those_of_the_flag():
    assert ",".join(bench.SECTIONS) == bench.BenchConfig.only
