"""test_bench.py: the benchmark prints its figures."""

import re

import numpy as np
import pytest

import train
from lab import bench
from model import ModelConfig, Transformer
from util import UserError

SMALL = "--n_layer=1 --n_head=1 --n_embd=16 --block_size=32 --batch_size=4 --device=cpu"


@pytest.fixture
def text(tmp_path):
    """A corpus of 60 small documents."""
    documents = [f"def f{i}(x):\n    return x * {i}\n" * 8 for i in range(60)]
    path = tmp_path / "text.txt"
    path.write_text("<|endoftext|>\n".join(documents))
    return path


def figures(printed: str) -> dict[str, float]:
    """The lines with a number and a unit."""
    found = re.findall(r"(?m)^(\S.*?) {2,}([\d,.]+(?:e[+-]\d+)?) \S+", printed)
    return {name: float(number.replace(",", "")) for name, number in found}


def test_corruption_and_training_are_timed(text, tmp_path, capsys):
    flags = f"--objective=span --block_size=128 --data={text} --seconds=0.01 --device=cpu"
    bench.main([*flags.split(), "--only=corruption,training", "--compile=False"])
    found = figures(capsys.readouterr().out)
    assert {"span", "span: step", "span: speed"} == found.keys()
    assert all(value > 0 for value in found.values())
    speed = 32 * 128 / found["span: step"] * 1000  # rows of the preset micro
    assert found["span: speed"] == pytest.approx(speed, rel=0.1)


def test_the_kernels_of_a_step_take_all_of_its_time(text, capsys):
    flags = f"--only=step --objective=clm --flags=--block_size=64 --data={text} --device=cpu"
    bench.main([*flags.split(), "--compile=False", "--seconds=0.01"])
    head, _, row = capsys.readouterr().out.splitlines()[-3:]
    found = dict(zip(head.split(" | "), row.split(" | ")))
    assert sum(float(v) for k, v in found.items() if k.endswith("%")) == pytest.approx(100, abs=1)
    assert float(found["products %"]) > 1


def test_decoding_is_timed_by_each_way_to_draft(text, tmp_path, capsys):
    """A run of two steps writes nothing useful, but its speed can be measured."""
    flags = f"{SMALL} --data={text} --cache_dir={tmp_path} --max_steps=2"
    for name in ("mtp", "mlm", "block"):
        words = [f"--objective={name}", f"--out_dir={tmp_path}/{name}"]
        train.main([*flags.split(), *words], report=False)
    capsys.readouterr()
    flags = ["--only=decoding", "--seconds=0.01", "--device=cpu"]
    bench.main([*flags, f"--out_dir={tmp_path}/mtp"])
    found = figures(capsys.readouterr().out)
    for way in ("plain", "look_up", "heads", "both"):
        assert found[f"{way}, temperature 0.8"] > 0
        assert way == "plain" or found[f"{way}, temperature 0: speed over plain"] > 0
    bench.main([*flags, f"--out_dir={tmp_path}/block"])
    assert figures(capsys.readouterr().out)["2 steps a block (diffusion: in all)"] > 0
    with pytest.raises(UserError, match="clm, fim, cm3, mtp"):
        bench.main([*flags, f"--out_dir={tmp_path}/mlm"])


def test_each_prompt_is_the_next_piece_of_the_text():
    prompts = bench.prompts_for(1000, np.arange(10), 3)
    assert [next(prompts) for _ in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [2, 3, 4]]
    assert list(bench.prompts_for(0, np.arange(10), 3)) == [[0, 1, 2]]


def test_flops_count_a_matrix_six_times_and_attention():
    """Of the unembedding, only the quarter of the positions that have targets count."""
    config = ModelConfig(vocab_size=640, n_layer=2, n_head=2, n_embd=32)
    matrices = 2 * (5 * 32 * 32 + 3 * 32 * config.d_ff) + 2 * 32 + 640 * 32 / 4
    want = 6 * matrices + 12 * 2 * 2 * 16 * 100
    assert bench.flops_per_token(Transformer(config), T=100, target_share=1 / 4) == want
