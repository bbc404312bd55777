"""compare.py: measure all objectives with the same yardsticks, and test the claims of textbooks.

Trains one small model for each arm and seed, and asks them all the same questions (yardsticks.py).
Finished runs are kept, so a comparison that was stopped resumes where it left off.

    python compare.py --objectives=clm,fim,mlm --max_steps=1000
    python compare.py --claims=fim_is_free           (verdicts, and claims.png with matplotlib)
    python compare.py --score out/clm out/fim
    python compare.py --score out/clm out/fim --on=clm,span
    python compare.py --plot out/clm out/fim
"""

import contextlib
import glob
import json
import re
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import threads  # isort: skip  # noqa: F401  (before torch)

import numpy as np
import torch

import train
from checkpoint import open_checkpoint
from claims import CLAIMS, Scores, drawing_of, mean_and_deviation, plot_claims, section
from config import UserError, atomic_write, build, comma_list, flag, parse_flags, run_command
from corpus import DataConfig
from log import duration, read_lines
from mixture import with_token_loss
from model import ModelConfig
from objectives import OBJECTIVES, Knobs
from sample import TrainedModel
from settings import TrainConfig, settle
from yardsticks import loss_on, own_text, scores_of_run


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
        settle([f"--objective={arm.split()[0]}", *shlex.split(config.flags)])
    seeds = range(1, config.seeds + 1)
    jobs = [(arm, seed) for seed in seeds for arm in dict.fromkeys(arms)]
    left = [job for job in jobs if not scores_path(config, *job).exists()]
    done = len(jobs) - len(left)
    if done:
        print(f"{done} of {len(jobs)} runs are already in {config.out_dir} (remove to repeat)")
    if left:
        print(f"runs to train and to measure: {len(left)}, some minutes each")
        print("Ctrl-C stops; the same command then goes on with the runs that are left")
    began = time.perf_counter()
    for number, (arm, seed) in enumerate(left):
        spent = time.perf_counter() - began
        eta = duration(spent / number * (len(left) - number)) if number else "unknown"
        print(f"run {number + 1}/{len(left)} | {arm} | seed {seed} | eta {eta}")
        run(config, arm, seed)
    paths = {arm: [scores_path(config, arm, seed) for seed in seeds] for arm in arms}
    return {arm: [json.loads(path.read_text()) for path in paths[arm]] for arm in arms}


def run(config: CompareConfig, arm: str, seed: int) -> Path:
    """The folder with the output and the scores of one arm and seed. If the scores are missing, the
    run is trained and measured first, and before it the run that it starts from."""
    path = scores_path(config, arm, seed)
    if path.exists():
        return path.parent
    words = ["--preset=tiny", f"--max_steps={config.max_steps}"]  # later flags override these
    for word in shlex.split(f"{config.flags} --objective={arm}"):
        if word.startswith("--max_steps="):
            times = float(word.removeprefix("--max_steps=").removesuffix("x"))
            word = f"--max_steps={max(round(config.max_steps * times), 1)}"
        elif word.startswith("--init_from=@"):
            word = f"--init_from={run(config, word.removeprefix('--init_from=@'), seed)}"
        words.append(word)
    folder = path.parent
    words += [f"--out_dir={folder}", f"--seed={seed}", "--overwrite"]

    folder.mkdir(parents=True, exist_ok=True)
    torch.compiler.reset()  # the new model is compiled from scratch
    screen = open(folder / "screen.txt", "w", encoding="utf-8")
    try:
        with screen, contextlib.redirect_stdout(screen):
            train.main(words)
        print("  trained; measuring")
        scores = scores_of_run(folder)
    except (SystemExit, KeyboardInterrupt):
        line = "stopped; the same command keeps all finished runs and begins this one again"
        print(line, file=sys.stderr)  # Ctrl-C has also ended `| tee`
        raise
    with atomic_write(path) as f:
        f.write(json.dumps(scores).encode())
    return folder


# ---- the table, the curves, the command ---------------------------------------------------------

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
    "tokens/s": ["tokens/s"],
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
    """Training and validation loss of some runs by step; spikes of the loss are marked."""
    drawing = drawing_of(7, 4)
    if drawing is None:
        return
    axes = drawing.subplots()
    for run in runs:
        path = Path(run, "log.jsonl")
        if not path.is_file():
            raise UserError(f"{run} is not the folder of a run: {path} does not exist")
        lines = read_lines(path)
        steps, losses = logged(lines, "loss")
        [curve] = axes.plot(steps, losses, label=str(run)[-45:], linewidth=1)
        spikes = 1 + np.flatnonzero(losses[1:] > 1.5 * losses[:-1])
        axes.plot(steps[spikes], losses[spikes], "x", color="red")
        axes.plot(*logged(lines, "val_loss"), "o", color=curve.get_color(), markersize=3)
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
    both = [(line.get("step"), line.get(name)) for line in lines]
    known = [pair for pair in both if all(isinstance(value, int | float) for value in pair)]
    return np.array(known, float).reshape(-1, 2).T


def print_scores(runs: list[str], names: str) -> None:
    """Each run's loss on rows that other objectives make of the held-out text of the run's corpus.
    Raises UserError."""
    able = with_token_loss()
    names = comma_list("on", names, able)
    print(f"{'nats per target on':<24}" + "".join(f"{name:>12}" for name in names))
    for run in runs:
        checkpoint = open_checkpoint(run)
        trained = TrainedModel(checkpoint)
        if trained.model.generator is not None or "similarity" in trained.tasks:
            print(f"{run:<24} {'+'.join(trained.mixture)} is not trained to predict tokens")
            continue
        trained.model.future = torch.nn.ModuleList()  # without extra heads, mtp is a clm model
        text = own_text(checkpoint)
        losses = [loss_on(trained, name, Knobs(), text) for name in names]
        print(f"{run:<24}" + "".join(f"{loss:>12.4f}" for loss in losses))
    print("Compare only within a column, and only runs with the same text and tokenizer.")


def check_flags(request: str, given: dict, config: CompareConfig) -> None:
    """Raise UserError on flags that the request does not read, or that compare.py sets itself."""
    others = {"score": {"on"}, "plot": {"out_dir"}}
    read = {request} | others.get(request, {"max_steps", "seeds", "flags", "out_dir"})
    for name in sorted(given.keys() - read):
        if request in given:
            raise UserError(f"--{name} has no effect with --{request}: leave one of them out")
        if not given[name]:
            raise UserError(f"--{name} is empty; give a value or leave it out")
        raise UserError(f"--{name}={given[name]} does nothing without --score, which names runs")
    try:
        words = shlex.split(config.flags)
        own = parse_flags(words, "", TrainConfig, ModelConfig, Knobs, DataConfig)
    except ValueError as e:  # UserError is a ValueError, too
        raise UserError(f"--flags={config.flags}: {e}") from None
    if fixed := own.keys() & {"data", "objective", "max_steps", "seed", "out_dir"}:
        raise UserError(f"--flags={config.flags}: compare.py sets --{min(fixed)}; remove it")


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
    """The runs that --score or --plot names, with patterns such as out/* expanded. Files and
    folders of other kinds, which such a pattern also finds, are left out."""
    names = list(filter(None, text.split(",")))
    paths = []
    for name in names:
        paths += [name] if Path(name).exists() else sorted(glob.glob(name)) or [name]
    others = [path for path in paths if Path(path).exists() and not is_run(Path(path))]
    if len(others) == len(paths):
        return paths  # they get an error of their own
    if others:
        print(f"left out, not runs: {', '.join(others)}")
    return [path for path in paths if path not in others]


def is_run(path: Path) -> bool:
    inside = [path / name for name in ("ckpt.pt", "log.jsonl")]
    return path.suffix == ".pt" or any(file.is_file() for file in inside)


def main(argv: list[str]) -> None:
    given = parse_flags(join_runs(argv), __doc__, CompareConfig)
    config = build(CompareConfig, given)
    requests = [name for name in ("objectives", "claims", "score", "plot") if getattr(config, name)]
    request = requests[0] if requests else "objectives"
    check_flags(request, given, config)
    folder = Path(config.out_dir)
    if request == "score":
        runs = named_runs(config.score)
        for run in runs:
            open_checkpoint(run)  # refuse a wrong name before minutes are spent
    if config.on:
        print_scores(runs, config.on)
    elif request == "score":
        found = {}
        for run in runs:
            print(f"measuring {run}, which takes some minutes")
            found[run] = [scores_of_run(Path(run))]
        print("\n".join(table(found)))
    elif request == "plot":
        folder.mkdir(parents=True, exist_ok=True)
        plot_curves(named_runs(config.plot), folder / "curves.png")
    elif request == "claims":
        asked = ",".join(CLAIMS) if config.claims == "all" else config.claims
        claims = [CLAIMS[name] for name in comma_list("claims", asked, CLAIMS)]
        if config.seeds == 1:
            print("with one seed nothing is decided: each verdict will be 'cannot tell'")
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
