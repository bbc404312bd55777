"""compare.py: all objectives on the same yardsticks, and the claims of textbooks put to the test.

Trains one small model for each arm and seed, and asks all of them the same (yardsticks.py).
Finished runs are kept: a comparison that was stopped goes on where it stood.

    python compare.py --objectives=clm,fim,mlm --seeds=3 --max_steps=600
    python compare.py --claims=fim_is_free           (verdicts, and claims.png with matplotlib)
    python compare.py --score out/clm out/fim
    python compare.py --score out/clm out/fim --on=clm,span
    python compare.py --plot out/clm out/fim
"""

import contextlib
import json
import re
import shlex
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import train
from checkpoint import checkpoint_path, open_checkpoint
from claims import CLAIMS, drawing_of, figure, plot_claims, section
from config import UserError, atomic_write, build, comma_list, flag, parse_flags, run_command
from log import duration, read_lines
from objectives import OBJECTIVES, Knobs, token_loss
from sample import Reader
from settings import settle
from yardsticks import check_context, loss_on, own_text, scores_of

N_TWINS = 5  # random networks beside the probes of a table's runs


# ---- runs ---------------------------------------------------------------------------------------


@dataclass
class Lab:
    """A folder of runs, and what was measured of each. A run is known by its flags and seed."""

    folder: Path
    max_steps: int
    seeds: int
    common: str = ""  # flags of all runs
    n_twins: int = 0  # random networks beside each run's probes

    def results(self) -> dict[tuple, dict[str, float]]:
        """The lines of results.jsonl: (all flags, seed) -> scores. A line without the random
        networks that are asked for does not count."""
        path = self.folder / "results.jsonl"
        lines = read_lines(path) if path.exists() else []
        lines = [line for line in lines if line.get("n_twins", 0) >= self.n_twins]
        return {(line["flags"], line["seed"]): line["scores"] for line in lines}

    def key(self, flags: str, seed: int) -> tuple[str, int]:
        return f"{flags} --max_steps={self.max_steps} {self.common}".strip(), seed

    def run_folder(self, flags: str, seed: int) -> Path:
        """Named by what the run was told."""
        words = re.sub(r"--objective=|[^\w.,]+", " ", f"{flags} {self.common}").split()
        return self.folder / "-".join([*words, f"{self.max_steps}steps", f"seed{seed}"])

    def measured(self, flags: str) -> list[dict[str, float]]:
        """The scores of all seeds that were run with these flags."""
        known = self.results()
        keys = [self.key(flags, seed + 1) for seed in range(self.seeds)]
        return [known[key] for key in keys if key in known]

    def run_all(self, arms: list[str]) -> None:
        """Train and measure what is not there yet; say what is left."""
        arms = dict.fromkeys(arms)  # claims share them
        jobs = [(flags, seed) for seed in range(1, self.seeds + 1) for flags in arms]
        known = self.results()
        left = [job for job in jobs if self.key(*job) not in known]
        if len(left) < len(jobs):
            done = len(jobs) - len(left)
            print(f"{done} of {len(jobs)} runs are in {self.folder}, of whatever code made them")
        began = time.perf_counter()
        for number, (flags, seed) in enumerate(left):
            spent = time.perf_counter() - began
            eta = duration(spent / number * (len(left) - number)) if number else "unknown"
            print(f"run {number + 1}/{len(left)} | {flags} | seed {seed} | eta {eta}", flush=True)
            self.run(flags, seed)

    def run(self, flags: str, seed: int) -> None:
        """One training, what it prints in its folder, its scores as a line of results.jsonl."""
        folder = self.run_folder(flags, seed)
        words = [f"--max_steps={self.max_steps}"]
        for word in shlex.split(f"{self.common} {flags}"):  # of two alike, the last one holds
            if word.startswith("--max_steps="):
                times = float(word.removeprefix("--max_steps=").removesuffix("x"))
                word = f"--max_steps={max(round(self.max_steps * times), 1)}"
            elif word.startswith("--init_from=@"):
                start = self.run_folder(word.replace("init_from=@", "objective="), seed)
                word = f"--init_from={start}"
            words.append(word)
        words += [f"--out_dir={folder}", f"--seed={seed}", "--overwrite"]

        folder.mkdir(parents=True, exist_ok=True)
        torch.compiler.reset()  # a new model is compiled anew
        with open(folder / "screen.txt", "w") as screen, contextlib.redirect_stdout(screen):
            check_context(settle(words))
            train.main(words)
        found = scores_of(folder, self.n_twins)
        told, _ = self.key(flags, seed)
        line = dict(flags=told, seed=seed, n_twins=self.n_twins, scores=found)
        with open(self.folder / "results.jsonl", "a") as f:
            f.write(json.dumps(line) + "\n")


@dataclass
class CompareConfig:
    """what is compared"""

    objectives: str = flag("", "comma list for the table; empty: all")
    claims: str = flag("", f"comma list of {', '.join(CLAIMS)}, or all: their runs and verdicts")
    max_steps: int = flag(600, "steps of every run", min=1)
    seeds: int = flag(3, "runs of each kind, with seeds 1, 2, ...", min=1)
    flags: str = flag("", "flags of train.py for all runs, e.g. '--n_layer=2 --compile=True'")
    out_dir: str = flag("out/compare", "folder of the runs, of results.jsonl and of the tables")
    score: str = flag("", "comma list of runs: the table of yardsticks for these")
    on: str = flag("", "--score: comma list of objectives, whose rows are scored instead")
    plot: str = flag("", "comma list of runs: their loss curves as curves.png")


REQUESTS = {  # each with the other flags that it reads
    "objectives": ("max_steps", "seeds", "flags", "out_dir"),
    "claims": ("max_steps", "seeds", "flags", "out_dir"),
    "score": ("on",),
    "plot": ("out_dir",),
}


# ---- the table, the curves, the command ---------------------------------------------------------

# fmt: off
COLUMNS = [  # headed by its first score, each shows the first that a run has
    ["bits a byte"], ["bits a byte at most"], ["own bits a byte"],
    ["holes filled right", "three holes filled right ([R])", "masked words found",
     "masked words found by the generator", "sentences with masked words restored"],
    ["holes ended right", "three holes ended right ([R])"], ["seeing the left only"],
    ["first event"], ["rise or fall"], ["word fits"], ["roles of names"], ["documents"],
    ["tokens a pass at temperature 0"], ["times as fast at temperature 0"],
    ["targets a position"], ["ms"], ["tokens/s"],
]
FOOTNOTE = """\
Means ± standard deviations over seeds, in brackets the mean of random networks. Always the
commonest answer: first event 0.28, rise or fall 0.42. How each column is asked, and which models
are not (-): yardsticks.py and RESULTS.md."""
# fmt: on


def table(measured: dict[str, list[dict[str, float]]]) -> list[str]:
    """Markdown: a row for each name, whose runs have these scores, and a column for each yardstick
    that any of them has."""
    known = {key for runs in measured.values() for run in runs for key in run}
    columns = [keys for keys in COLUMNS if known.intersection(keys)]
    heads = ["a step, first row = 1" if keys == ["ms"] else keys[0] for keys in columns]
    lines = ["| run | " + " | ".join(heads) + " |", "|---" * (1 + len(columns)) + "|"]
    times = [[run["ms"] for run in runs if "ms" in run] for runs in measured.values()]
    a_step = statistics.mean(next(filter(None, times), [1.0]))  # of the first row that has a time
    for name, runs in measured.items():
        cells = [f"`{name}`"]
        for keys in columns:
            key = next((key for key in keys if any(key in run for run in runs)), None)
            unit = a_step if key == "ms" else 1.0
            values = [run[key] / unit for run in runs if key in run]
            random = [run[f"{key} random"] for run in runs if f"{key} random" in run]
            beside = f" (random {statistics.mean(random):.2g})" if random else ""
            cells.append(f"{figure(values)}{beside}" if values else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, "", FOOTNOTE]


def plot_curves(runs: list[str], picture: Path) -> None:
    """Training and validation loss of some runs by step; spikes of the loss are marked."""
    drawing = drawing_of(7, 4)
    if drawing is None:
        return
    axes = drawing.subplots()
    for run in runs:
        path = Path(run) / "log.jsonl"
        if not path.is_file():
            raise UserError(f"{run} is no folder of a run: {path} does not exist")
        lines = read_lines(path)
        steps, losses = logged(lines, "loss")
        [curve] = axes.plot(steps, losses, label=run, linewidth=1)
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
    """(2, N): the steps at which a figure was logged, and the figure."""
    return np.array([(line["step"], line[name]) for line in lines if name in line]).reshape(-1, 2).T


def print_scores(runs: list[str], names: str) -> None:
    """Each run's loss on held-out rows of other objectives, of its own text. Raises UserError."""
    able = [name for name, row in OBJECTIVES.items() if row.loss is token_loss]
    names = comma_list("on", names, able)
    print(f"{'nats a target on':<24}" + "".join(f"{name:>12}" for name in names))
    for run in runs:
        checkpoint = open_checkpoint(checkpoint_path(run))
        reader = Reader(checkpoint)
        if reader.model.generator is not None or "similarity" in reader.tasks:
            name = "+".join(reader.mixture)
            raise UserError(f"--score={run}: {name} does not train the model to predict tokens")
        reader.model.future = torch.nn.ModuleList()  # what is left of mtp is a clm model
        text = own_text(checkpoint)
        losses = [loss_on(reader, name, Knobs(), text) for name in names]
        print(f"{run:<24}" + "".join(f"{loss:>12.4f}" for loss in losses))
    print("Compare within a column only, and runs with the same text and tokenizer.")


def join_runs(argv: list[str]) -> list[str]:
    """Free words belong to the flag before them, as the shell's out/* gives them.

    >>> join_runs(["--plot", "out/a", "out/b", "--seeds=2"])
    ['--plot=out/a,out/b', '--seeds=2']
    """
    words = []
    for word in argv:
        if word.startswith("--") or not words:
            words.append(word)
        else:
            words[-1] += ("," if "=" in words[-1] else "=") + word
    return words


def which_request(config: CompareConfig, given: dict) -> str:
    """One of REQUESTS. Raises UserError on flags that it does not read."""
    request = next((name for name in REQUESTS if getattr(config, name)), "objectives")
    unread = given.keys() - {request, *REQUESTS[request]}
    if unread:
        raise UserError(f"--{min(unread)} is not read with --{request}: leave one of them out")
    try:
        shlex.split(config.flags)
    except ValueError as e:
        raise UserError(f"--flags={config.flags}: {e}") from None
    for name in ("data", "objective", "max_steps", "seed", "out_dir"):
        if re.search(rf"--{name}\b", config.flags):
            raise UserError(f"--flags={config.flags}: compare.py sets --{name}; remove it")
    return request


def main(argv: list[str]) -> None:
    given = parse_flags(join_runs(argv), __doc__, CompareConfig)
    config = build(CompareConfig, given)
    request = which_request(config, given)
    folder = Path(config.out_dir)
    if config.on:
        print_scores(config.score.split(","), config.on)
    elif request == "score":
        measured = {run: [scores_of(Path(run), N_TWINS)] for run in config.score.split(",")}
        print("\n".join(table(measured)))
    elif request == "plot":
        folder.mkdir(parents=True, exist_ok=True)
        plot_curves(config.plot.split(","), folder / "curves.png")
    elif request == "claims":
        compare_claims(config)
    else:
        compare_objectives(config)


def compare_claims(config: CompareConfig) -> None:
    """Run what is missing; the claims' verdicts, and claims.png where that can be."""
    asked = ",".join(CLAIMS) if config.claims == "all" else config.claims
    claims = {name: CLAIMS[name] for name in comma_list("claims", asked, CLAIMS)}
    lab = Lab(Path(config.out_dir), config.max_steps, config.seeds, config.flags)
    lab.run_all([arm for claim in claims.values() for arm in claim.arms.values()])
    lines = [line for name in claims for line in section(name, claims[name], lab.measured)]
    write_and_print(lines, lab.folder / "claims.md")
    plot_claims(claims.values(), lab.measured, lab.folder / "claims.png")


def compare_objectives(config: CompareConfig) -> None:
    """Run what is missing; the table, and the curves of seed 1 where that can be."""
    names = comma_list("objectives", config.objectives or ",".join(OBJECTIVES), OBJECTIVES)
    arms = {name: f"--objective={name}" for name in names}
    lab = Lab(Path(config.out_dir), config.max_steps, config.seeds, config.flags, N_TWINS)
    lab.run_all(arms.values())
    lines = table({name: lab.measured(flags) for name, flags in arms.items()})
    write_and_print(lines, lab.folder / "table.md")
    folders = [lab.run_folder(flags, 1) for flags in arms.values()]
    plot_curves([str(path) for path in folders if path.exists()], lab.folder / "curves.png")


def write_and_print(lines: list[str], path: Path) -> None:
    with atomic_write(path) as f:
        f.write("\n".join([*lines, ""]).encode())
    print("\n".join(lines))


if __name__ == "__main__":
    run_command(main, "--max_steps or --seeds")
