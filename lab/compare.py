"""compare.py: measure all objectives with the same yardsticks, and test the claims of textbooks.

Trains one small model for each arm and seed, and asks them all the same questions (yardsticks.py).
Finished runs are kept, so a comparison that was stopped resumes where it left off.

    python -m lab.compare --objectives=clm,fim,mlm --max_steps=1000
    python -m lab.compare --claims=fim_is_free       (verdicts, and claims.png with matplotlib)
    python -m lab.compare --score out/clm out/fim
    python -m lab.compare --score out/clm out/fim --on=clm,span
    python -m lab.compare --plot out/clm out/fim
"""

import contextlib
import functools
import glob
import itertools
import json
import re
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

import numpy as np
import torch

import train
from lab.claims import CLAIMS, Scores, drawing_of, mean_and_deviation, plot_claims, section
from lab.yardsticks import loss_on, own_text, read_log, scores_of_run
from objectives import OBJECTIVES, Knobs, clm, mask_tokens, with_token_loss
from sample import load
from util import atomic_write, build, comma_list, duration, flag, parse_flags, run_command


@dataclass
class CompareConfig:
    """what is compared"""

    objectives: str = flag("", "comma list of objectives for the table; empty: all")
    claims: str = flag("", f"comma list of claims to test: {', '.join(CLAIMS)}, or all")
    max_steps: int = flag(500, "steps of every run", min=1)
    seeds: int = flag(3, "runs of each kind, with seeds 1, 2, ...", min=1)
    flags: str = flag("", "train.py flags for all runs, added to --preset=tiny, e.g. --n_layer=2")
    out_dir: str = flag("out/compare", "folder of the runs, their scores and the tables")
    score: str = flag("", "print a table of yardsticks for these runs (RUN RUN, RUN,RUN or out/*)")
    on: str = flag(
        "", f"with --score: print losses on rows of these instead: {', '.join(with_token_loss())}"
    )
    plot: str = flag("", "draw the loss curves of these runs as curves.png (RUN RUN or out/*)")


# ---- runs ---------------------------------------------------------------------------------------


def scores_path(config: CompareConfig, arm: str, seed: int) -> Path:
    """The file for a run's scores. It is written last, so a run without it is not finished. An arm
    is an objective and its flags; the folder is named after them."""
    told = f"{arm} {config.flags} {config.max_steps}steps seed{seed}"
    return Path(config.out_dir, re.sub(r"[^\w.]+", "-", told), "scores.json")


def measure_arms(config: CompareConfig, arms: list[str]) -> Scores:
    """The scores of each arm, one for each seed. Missing runs are trained and measured first.
    Raises UserError."""
    for arm in arms:  # before spending hours, refuse flags that the objective does not read
        train.settings(["--overwrite", f"--objective={arm.split()[0]}", *shlex.split(config.flags)])
    seeds = range(1, config.seeds + 1)
    jobs = [(arm, seed) for seed in seeds for arm in dict.fromkeys(arms)]
    left = [job for job in jobs if not scores_path(config, *job).exists()]
    print(f"{len(jobs) - len(left)} of {len(jobs)} runs are already in {config.out_dir}")
    if left:
        print("some minutes for each run; after Ctrl-C, the same command goes on with those left")
    for arm, seed in one_by_one(left, "{0[0]} | seed {0[1]}".format):
        run(config, arm, seed)
    paths = {arm: [scores_path(config, arm, seed) for seed in seeds] for arm in arms}
    return {arm: [json.loads(path.read_text()) for path in paths[arm]] for arm in arms}


def one_by_one(jobs: list, label: Callable) -> Iterator:
    """Yield the jobs, each after a line with its number, its label and the time that is left."""
    began = time.perf_counter()
    for number, job in enumerate(jobs):
        spent = time.perf_counter() - began
        eta = duration(spent / number * (len(jobs) - number)) if number else "unknown"
        print(f"run {number + 1}/{len(jobs)} | {label(job)} | eta {eta}")
        yield job


def run(config: CompareConfig, arm: str, seed: int) -> Path:
    """The folder with the output and the scores of one arm and seed. If the scores are missing, the
    run is trained and measured first, and before it the run that it starts from."""
    path = scores_path(config, arm, seed)
    if path.exists():
        return path.parent
    words = ["--preset=tiny", f"--max_steps={config.max_steps}"]  # later flags override these
    changed = {}  # entries of OBJECTIVES
    for word in shlex.split(f"{config.flags} --objective={arm}"):
        name, _, value = word.partition("=")
        if name == "--max_steps":
            steps = config.max_steps * float(value.removesuffix("x"))
            word = f"--max_steps={max(round(steps), 1)}"
        elif name == "--init_from" and value.startswith("@"):
            word = f"--init_from={run(config, value[1:], seed)}"
        elif name == "--mask_shares":
            row = functools.partial(mlm_with_shares, [float(x) for x in value.split(",")])
            changed["mlm"] = OBJECTIVES["mlm"]._replace(row=row)
            continue
        elif name == "--hidden_inputs":
            row = functools.partial(clm_with_hidden, float(value))
            changed["clm"] = OBJECTIVES["clm"]._replace(row=row)
            continue
        words.append(word)
    folder = path.parent
    words += [f"--out_dir={folder}", f"--seed={seed}", "--overwrite"]

    with patch.dict(OBJECTIVES, changed):
        train_quietly(folder, words)
    print("  trained; measuring")
    scores = scores_of_run(folder)
    with atomic_write(path) as f:
        f.write(json.dumps(scores).encode())
    return folder


def train_quietly(folder: Path, words: list[str], watch: Callable | None = None) -> None:
    """Train, with the screen in a file of the run."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.compiler.reset()  # the new model is compiled from scratch
    with open(folder / "screen.txt", "a") as screen, contextlib.redirect_stdout(screen):
        train.main(words, report=False, watch=watch)


def mlm_with_shares(shares, x, rng, tok, T: int, knobs: Knobs):
    """mlm's row, but other shares of its targets become [MASK] and random tokens than 0.8, 0.1."""
    return mask_tokens(x, rng, tok, knobs.mask_rate, *shares)


def clm_with_hidden(share: float, x, rng, tok, T: int, knobs: Knobs):
    """clm's row, but a share of the inputs becomes [MASK], also in validation: the control for
    diffusion on repeated data (Ni et al. 2025)."""
    row = clm(x, rng, tok, T, knobs)
    hidden = (rng.random(T) < share) & (row.inputs < tok.n_ordinary)
    return row._replace(inputs=np.where(hidden, tok.MASK, row.inputs))


# ---- the table, the curves ----------------------------------------------------------------------

# fmt: off
COLUMNS = {  # head of a column -> scores; the first that a run has is shown
    "goes on: bits per byte": ["bits per byte"],
    "... at most": ["bits per byte at most"],
    "own text goes on: bits per byte": ["bits per byte of own text"],
    "holes filled": [
        "holes filled right", "three holes filled right ([R])", "masked words found",
        "masked words found by the generator", "sentences with masked words restored"],
    "holes ended": ["holes ended right", "three holes ended right ([R])"],
    "holes, left side only": ["seeing the left only"],
    "first event": ["first event"],
    "word fits": ["word fits"],
    "roles of names": ["roles of names"],
    "documents": ["documents"],
    "tokens per pass": ["tokens per pass at temperature 0"],
    "times as fast": ["times as fast at temperature 0"],
    "targets per position": ["targets per position"],
    "time of a step, first row = 1": ["ms"],
}
FOOTNOTE = """\
Means ± standard deviations over seeds; random: the mean of random networks. Goes on: second halves
of stories, given the first (train.py: whole stories). First event: knowing which two events there
are, but not their order, gets 0.49. RESULTS.md says how each column is measured, and which models
are not (-). Times of steps are from the logs: compare them only if all runs were compiled, or none,
on one machine."""
# fmt: on


def table(scores: Scores) -> list[str]:
    """Markdown: a row for each name in `scores`, and a column for each yardstick that any of the
    runs has. With three names or fewer, the table is transposed to fit a terminal."""
    known = {key for runs in scores.values() for run in runs for key in run}
    columns = {head: keys for head, keys in COLUMNS.items() if known.intersection(keys)}
    grid = [["run", *columns]]
    times = [[run["ms"] for run in runs if "ms" in run] for runs in scores.values()]
    a_step = fmean(next(filter(None, times), [1.0]))  # mean of the first row that has times
    for name, runs in scores.items():
        runs = [run | {"ms": run["ms"] / a_step} if "ms" in run else run for run in runs]
        grid.append([f"`{name}`", *(cell(runs, keys) for keys in columns.values())])
    if len(scores) <= 3:
        grid = list(zip(*grid))
    widths = [max(map(len, column)) for column in zip(*grid)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in grid]
    lines.insert(1, "|---" * len(widths) + "|")
    return [*lines, "", FOOTNOTE]


def cell(runs: list[dict[str, float]], keys: list[str]) -> str:
    """The first of these scores that the runs have, and the same score of random networks."""
    for key in keys:
        values = [run[key] for run in runs if key in run]
        random = [run[f"{key} random"] for run in runs if f"{key} random" in run]
        if values:
            return mean_and_deviation(values) + (f" (random {fmean(random):.2g})" if random else "")
    return "-"


def plot_curves(runs: list, picture: Path) -> None:
    """Training and validation loss of some runs by step; spikes of the loss are marked. Beside it
    the right answers, where they were counted during training (by lab.atlas)."""
    logs = {run: read_log(run) for run in runs}
    counted = any("right_answers" in line for lines in logs.values() for line in lines)
    drawing = drawing_of(12 if counted else 7, 4)
    if drawing is None:
        return
    axes, *beside = drawing.subplots(1, 1 + counted, squeeze=False)[0]
    for run, lines in logs.items():
        steps, losses = logged(lines, "loss")
        [curve] = axes.plot(steps, losses, label=str(run)[-45:], linewidth=1)
        spikes = 1 + np.flatnonzero(losses[1:] > 1.5 * losses[:-1])
        axes.plot(steps[spikes], losses[spikes], "x", color="red")
        axes.plot(*logged(lines, "val_loss"), "o", color=curve.get_color(), markersize=3)
        for skill, shares in itertools.islice(right_answers(lines).items(), 1):
            label = f"{skill}, {str(run)[-20:]}"
            beside[0].plot(*shares, "o-", color=curve.get_color(), markersize=3, label=label)
    for panel in beside:
        panel.set_xlabel("step")
        panel.set_ylabel("share of right answers")
        panel.legend()
    axes.set_xlabel("step")
    axes.set_ylabel("nats (line: training, dots: validation);\nnot comparable between objectives")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:.2g}")
    axes.legend()
    drawing.savefig(picture, dpi=120)
    print(f"wrote {picture}")


def logged(lines: list[dict], name: str) -> np.ndarray:
    """(2, N): the steps at which a value was logged, and the values."""
    known = [(line["step"], line[name]) for line in lines if name in line]
    return np.array(known, float).reshape(-1, 2).T


def right_answers(lines: list[dict]) -> dict[str, np.ndarray]:
    """For each skill that was counted during training: the steps, the shares of right answers."""
    found = {}
    for line in lines:
        for skill, (value, _) in line.get("right_answers", {}).items():
            found.setdefault(skill, []).append((line["step"], value))
    return {skill: np.array(points).T for skill, points in found.items()}


def print_scores(runs: list[str], names: list[str]) -> None:
    """Each run's loss on rows that other objectives make of the held-out text of the run's corpus.
    Raises UserError."""
    print(f"{'nats per target on':<24}" + "".join(f"{name:>12}" for name in names))
    for run in runs:
        trained = load(run)
        if trained.model.generator is not None or "similarity" in trained.tasks:
            print(f"{run:<24} {'+'.join(trained.mixture)} is not trained to predict tokens")
            continue
        trained.model.future = torch.nn.ModuleList()  # without extra heads, mtp is a clm model
        losses = [loss_on(trained, name, Knobs(), own_text(run)) for name in names]
        print(f"{run:<24}" + "".join(f"{loss:>12.4f}" for loss in losses))
    print("Compare only within a column, and only runs with the same text and tokenizer.")


# ---- the command --------------------------------------------------------------------------------


def join_runs(argv: list[str]) -> list[str]:
    """Append free words to the flag before them: the shell expands out/* to such words.

    >>> join_runs(["--plot", "out/a", "out/b", "--out_dir=c"])
    ['--plot=out/a,out/b', '--out_dir=c']
    """
    words = []
    for word in argv:
        if word.startswith("--") or not words or not words[-1].startswith("--"):
            words.append(word)
        else:
            words[-1] += ("," if "=" in words[-1] else "=") + word
    return words


def named_runs(text: str) -> list[str]:
    """The runs that --score or --plot names. What else a pattern such as out/* finds is left out;
    a name that does not exist gets an error of its own later."""
    paths = [path for name in text.split(",") for path in sorted(glob.glob(name)) or [name]]
    return [path for path in paths if is_run(Path(path)) or not Path(path).exists()] or paths


def is_run(path: Path) -> bool:
    return path.suffix == ".pt" or (path / "log.jsonl").is_file() or (path / "ckpt.pt").is_file()


def main(argv: list[str]) -> None:
    config = build(CompareConfig, parse_flags(join_runs(argv), __doc__, CompareConfig))
    folder = Path(config.out_dir)
    if config.score and config.on:
        print_scores(named_runs(config.score), comma_list("on", config.on, with_token_loss()))
    elif config.score:
        found = {}
        for run in named_runs(config.score):
            print(f"measuring {run}, which takes some minutes")
            found[run] = [scores_of_run(run)]
        print("\n".join(table(found)))
    elif config.plot:
        folder.mkdir(parents=True, exist_ok=True)
        plot_curves(named_runs(config.plot), folder / "curves.png")
    elif config.claims:
        asked = ",".join(CLAIMS) if config.claims == "all" else config.claims
        claims = [CLAIMS[name] for name in comma_list("claims", asked, CLAIMS)]
        arms = [claim.flags(arm) for claim in claims for arm in claim.arms]
        found = measure_arms(config, arms)
        lines = [line for claim in claims for line in section(claim, found)]
        more = f" --flags={shlex.quote(config.flags)}" if config.flags else ""
        lines += ["", f"All runs: --max_steps={config.max_steps} --seeds={config.seeds}{more}"]
        write_and_print(lines, folder / "claims.md")
        plot_claims(claims, found, folder / "claims.png")
    else:
        names = comma_list("objectives", config.objectives or ",".join(OBJECTIVES), OBJECTIVES)
        write_and_print(table(measure_arms(config, names)), folder / "table.md")
        plot_curves([scores_path(config, name, 1).parent for name in names], folder / "curves.png")


def write_and_print(lines: list[str], path: Path) -> None:
    with atomic_write(path) as f:
        f.write("\n".join([*lines, ""]).encode())
    print("\n".join(lines))


if __name__ == "__main__":
    run_command(main, lower="--max_steps or --seeds")
