"""atlas.py: a page about each objective: its rows, its curves, an answer, what it costs, its kin.

Trains one default run of each objective, counts right answers on the way, and keeps what it has
measured in runs.json. The pages follow from that file, the code and RESULTS.md.

    python -m lab.atlas              (some minutes for each run; after Ctrl-C, it goes on)
    python -m lab.atlas --draw       (the pages again, without training)
    python -m lab.atlas --only=clm,fim --flags=--max_steps=30 --out_dir=out/try --to=out/try/pages
"""

import datetime
import json
import platform
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

import train
from checkpoint import open_checkpoint
from corpus import DataConfig, load_tokens
from lab.chart import curves, progress, strip
from lab.compare import logged, one_by_one, train_quietly
from lab.pages import overview, page
from lab.picture import PictureConfig, strips_of
from lab.skills import measure
from lab.yardsticks import read_log
from objectives import OBJECTIVES
from sample import TrainedModel, load, set_for_asking, showcase
from util import UserError, atomic_write, build, comma_list, flag, parse_flags, run_command

EVAL_EVERY = 100  # steps between two points of a curve
N_WATCHED = 60  # stories asked about at each of them but the last: skills.N_STORIES


@dataclass
class AtlasConfig:
    """what is trained, and where its pages go"""

    draw: bool = flag(False, "train nothing, draw the pages again")
    only: str = flag("", "comma list of objectives to train; empty: all")
    flags: str = flag("", "train.py flags for all runs, e.g. --max_steps=30")
    out_dir: str = flag("out/atlas", "folder of the runs")
    to: str = flag("lab/atlas", "folder of runs.json and the pages")


# ---- runs ---------------------------------------------------------------------------------------


def finished_run(config: AtlasConfig, name: str) -> dict | None:
    """What was measured of a run. This file is written last: without it, a run is not finished."""
    path = Path(config.out_dir, name, "measured.json")
    if not path.exists():
        return None
    run = json.loads(path.read_text())
    if run["flags"] != config.flags:
        raise UserError(f"{path.parent} has --flags={run['flags']!r}: name another --out_dir")
    return run


def train_and_measure(config: AtlasConfig, name: str, commit: str) -> dict:
    """Train a run, or what is left of it; then count its right answers, and keep all figures."""
    folder = Path(config.out_dir, name)
    words = [f"--objective={name}", f"--out_dir={folder}", f"--eval_every={EVAL_EVERY}"]
    words += shlex.split(config.flags)
    steps = train.settings([*words, "--overwrite"]).train.max_steps
    if not (folder / "ckpt.pt").exists():
        train_quietly(folder, [*words, "--overwrite"], watch)
    elif open_checkpoint(folder).state["step"] < steps:
        train_quietly(folder, [*words, "--init_from=resume"], watch)
    run = measured(folder) | {"flags": config.flags, "commit": commit}
    with atomic_write(folder / "measured.json") as f:
        f.write(json.dumps(run).encode())
    return run


def watch(trained: TrainedModel) -> dict:
    """What train.py logs at each evaluation, too."""
    return {"right_answers": count(trained, N_WATCHED)}


def count(trained: TrainedModel, n: int | None = None) -> dict[str, list[float]]:
    """For each skill the share of right answers, and the share that guessing gets."""
    with set_for_asking(trained):
        skills = measure(trained, n)
    return {name: [round(share, 4) for share in skill] for name, skill in skills.items()}


def measured(folder: Path) -> dict:
    """All that the pages tell about a run. Minutes are those of the steps alone, without
    compiling, evaluating and counting."""
    trained = load(folder)
    data = build(DataConfig, open_checkpoint(folder).state["settings"])
    tokens = load_tokens(data, trained.tok, log=lambda line: None)
    answer = []
    showcase(trained, tokens, f"out/{folder.name}", answer.append)

    lines = read_log(folder)
    steps, ms = logged(lines, "ms")
    minutes = np.cumsum(np.diff(steps, prepend=0) * ms) / 60_000
    evaluations = []
    for line in lines:
        if "val_loss" in line:
            figures = {"step": line["step"], "val_loss": round(line["val_loss"], 4)}
            figures["minutes"] = round(np.interp(line["step"], steps, minutes), 5)
            evaluations.append(figures | {"skills": line["right_answers"]})
    evaluations[-1]["skills"] = skills = count(trained)
    return {
        "steps": int(steps[-1]),
        "minutes": round(minutes[-1], 5),
        "tokens_per_s": round(median(logged(lines, "tokens_per_s")[1])),
        "evaluations": evaluations,
        "stories": N_WATCHED,
        "skills": skills,
        "answer": answer,
        "date": datetime.date.today().isoformat(),
        "machine": machine(trained.device),
    }


def commit_now() -> str:
    """The short name of the commit whose code runs, or "unknown"."""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    if not shutil.which("git"):
        return "unknown"
    return subprocess.run(words, capture_output=True, text=True).stdout.strip() or "unknown"


def machine(device: torch.device) -> str:
    """The machine in words."""
    name = f"{platform.machine()} ({device.type})"
    cpu = Path("/proc/cpuinfo")  # Linux only
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif cpu.exists() and (model := re.search(r"model name\s*: (.*)", cpu.read_text())):
        name = model[1]
    return f"{name}, threads: {torch.get_num_threads()}, torch {torch.__version__}"


# ---- files --------------------------------------------------------------------------------------


def files_of(runs: dict[str, dict]) -> dict[str, str]:
    """Every file of the atlas, except runs.json, and its content."""
    files = {"README.md": overview(runs)}
    for name, drawings in strips_of(list(OBJECTIVES), PictureConfig()).items():
        files |= {f"{name}.md": page(name, runs), f"{name}.svg": strip(drawings)}
    for name, run in runs.items():
        files[f"{name}-curve.svg"] = curves(run)
    if runs:
        files["progress.svg"] = progress(runs)
    return files


def write_atlas(folder, runs: dict[str, dict]) -> None:
    files = files_of(runs)
    if runs:
        lines = [f'"{name}": {json.dumps(runs[name])}' for name in OBJECTIVES if name in runs]
        files["runs.json"] = "{\n" + ",\n".join(lines) + "\n}\n"
    for name, content in files.items():
        with atomic_write(Path(folder, name)) as f:
            f.write(content.encode())


def read_runs(folder) -> dict[str, dict]:
    """What was measured of each objective's run."""
    path = Path(folder, "runs.json")
    return json.loads(path.read_text()) if path.exists() else {}


def main(argv: list[str]) -> None:
    config = build(AtlasConfig, parse_flags(argv, __doc__, AtlasConfig))
    names = comma_list("only", config.only or ",".join(OBJECTIVES), OBJECTIVES)
    runs = read_runs(config.to)
    left = []
    if not config.draw:
        found = {name: finished_run(config, name) for name in names}
        runs |= {name: run for name, run in found.items() if run}
        left = [name for name in names if not found[name]]
        print(f"{len(names) - len(left)} of {len(names)} runs are already in {config.out_dir}")
        print("after Ctrl-C, the same command goes on")
    commit = commit_now()  # now: another may be checked out before the runs end
    for name in one_by_one(left, str):
        runs[name] = train_and_measure(config, name, commit)
        write_atlas(config.to, runs)
    write_atlas(config.to, runs)  # also if none was left
    print(f"wrote {config.to}/README.md")


if __name__ == "__main__":
    run_command(main, lower="--flags=--batch_size")
