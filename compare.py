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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import train
from checkpoint import Checkpoint, checkpoint_path, open_checkpoint
from claims import CLAIMS, drawing_of, figure, overview, plot_claims, section
from config import UserError, atomic_write, build, comma_list, flag, parse_flags, run_command
from corpus import DEFAULT_DATA, DataConfig, count_stories, load_tokens
from data import Text
from log import duration, read_lines
from objectives import OBJECTIVES, Knobs, token_loss
from sample import Reader, few_threads
from settings import carried_over
from yardsticks import loss_on, scores

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
        words = shlex.split(f"{self.common} {flags}")  # of two, the last one holds
        steps = self.max_steps
        for word in list(words):
            if word.startswith("--init_from=@"):
                start = self.run_folder(word.replace("init_from=@", "objective="), seed)
                words[words.index(word)] = f"--init_from={start}"
            if word.startswith("--max_steps="):
                words.remove(word)
                times = float(word.removeprefix("--max_steps=").removesuffix("x"))
                steps = max(round(steps * times), 1)
        own = [f"--out_dir={folder}", f"--max_steps={steps}", f"--seed={seed}"]
        folder.mkdir(parents=True, exist_ok=True)
        torch.compiler.reset()  # a new model is compiled anew
        try:
            with open(folder / "screen.txt", "w") as screen, contextlib.redirect_stdout(screen):
                train.main([*words, *own, "--overwrite"])
        except SystemExit:  # a signal
            print("stopped; the same command begins this run again and keeps those before it")
            raise

        found = scores_of(folder, self.n_twins)
        told, _ = self.key(flags, seed)
        with open(self.folder / "results.jsonl", "a") as f:
            line = dict(flags=told, seed=seed, n_twins=self.n_twins, scores=found)
            f.write(json.dumps(line) + "\n")


def from_log(folder: Path) -> dict[str, float]:
    """What the run wrote of itself: time of a step, last validation loss, skills."""
    lines = read_lines(folder / "log.jsonl")
    times = [line["ms"] for line in lines if "ms" in line]
    found = {"ms": statistics.median(times)} if times else {}
    for line in lines:
        if "val_loss" in line:
            found["val_loss"] = line["val_loss"]
        for name, skill in line.get("skills", {}).items():
            found[name] = skill["value"]
    return found


def scores_of(folder: Path, n_twins: int) -> dict[str, float]:
    """All that is known of a run, given by its folder or a checkpoint: the yardsticks, and what it
    wrote of itself."""
    path = checkpoint_path(folder)
    checkpoint = open_checkpoint(path)
    reader = Reader(checkpoint)
    try:
        own = own_text(checkpoint)
    except UserError as e:
        print(f"{folder} is not asked about its own text: {e}")
        own = None
    with few_threads(reader):
        found = scores(reader, own, n_twins)
        if path.name == "ckpt.pt":  # of best.pt and previous.pt the log's last lines say nothing
            found |= from_log(path.parent)
        layout = reader.knobs.fim_layouts.split(",")[-1]  # that which sample.py uses
        for what in ("holes filled right", "holes ended right"):
            if f"{what} ({layout})" in found:
                found[what] = found[f"{what} ({layout})"]
        return found


def own_text(checkpoint: Checkpoint) -> Text | None:
    """The held-out text of a run's corpus, where that is not stories. Raises UserError where it is
    not there any more."""
    data = build(DataConfig, carried_over(checkpoint, resume=False))
    if count_stories(data.data or DEFAULT_DATA):
        return None
    tokens = load_tokens(data, checkpoint.tok, expected=checkpoint.state["data_digest"])
    return Text(tokens.val, tokens.tok.EOT)


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


# ---- the table, the curves, the command ---------------------------------------------------------

# fmt: off
COLUMNS = {  # heading -> the scores it shows, the first that a run has
    "goes on, bits per byte":  ("continue",),
    "goes on, bound":          ("continue, bound",),
    "goes on, own text":       ("own text",),
    "holes filled right":      ("holes filled right", "three holes filled right ([R])",
                                "masked words found",
                                "masked words found by the generator",
                                "sentences with masked words restored"),
    "holes ended right":       ("holes ended right", "three holes ended right ([R])"),
    "seeing the left only":    ("left only",),
    "first event read off":    ("pooled",),
    "first event, random":     ("pooled random",),
    "first event, guessing":   ("pooled guessing",),
    "rise or fall read off":   ("token",),
    "rise or fall, random":    ("token random",),
    "rise or fall, guessing":  ("token guessing",),
    "words that fit, read off": ("word fits", "own word fits"),
    "roles of names read off": ("own names",),
    "roles of names, random":  ("own names random",),
    "documents read off":      ("own documents",),
    "documents, random":       ("own documents random",),
    "tokens a pass, drafted":  ("tokens a pass at 0",),
    "times as fast, drafted":  ("times as fast at 0",),
    "targets a position":      ("targets",),
    "a step, first row = 1":   ("ms",),
    "tokens/s":                ("tokens_per_s",),
}
FOOTNOTE = """\
Means ± standard deviations over seeds. Holes: one word of an unseen story; models that fill masks
are told how many tokens it has, as is the baseline that sees the left only; fim, span, ul2 and bart
must end it themselves (fim: in spm; ul2: three holes at once, of one to four words each, which the
past fixes, in [R]; bart: sentences with masked words, of a shuffled story). All else is asked of
stories of at most 210 characters. Of electra the small generator goes on and fills, the detector is
read off. Diffusion is told how many tokens follow; bound: what it trains on. Read off by a linear
classifier from frozen states, of the run and of {twins} random networks of its shape (their mean);
guessing: always saying the commonest class; whether a word fits, half. Roles of names in Python
source: called, assigned to or read; documents: which of 20 a window is from. Tokens a pass: with
the drafts of mtp's heads, at temperature 0. -: contrastive predicts no token; clm, prefix and mtp
do not see what follows a hole; the left-only baseline needs a causal model; a model that reads both
ways does not write from left to right (no tokens/s); runs on other text are not asked about
stories, nor runs on stories about other text."""
# fmt: on


def table(measured: dict[str, list[dict[str, float]]]) -> list[str]:
    """Markdown: a row for each name, whose runs have these scores, and a column for each yardstick
    that any of them has: mean ± deviation over the runs."""
    known = {key for runs in measured.values() for run in runs for key in run}
    columns = {name: keys for name, keys in COLUMNS.items() if known.intersection(keys)}
    lines = ["| run | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    times = [[run["ms"] for run in runs if "ms" in run] for runs in measured.values()]
    a_step = statistics.mean(next(filter(None, times), [1.0]))  # of the first row that has a time
    for name, runs in measured.items():
        cells = [f"`{name}`"]
        for keys in columns.values():
            key = next((key for key in keys if any(key in run for run in runs)), None)
            unit = a_step if key == "ms" else 1.0
            values = [run[key] / unit for run in runs if key in run]
            cells.append(str(figure(values)) if values else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, "", FOOTNOTE.format(twins=N_TWINS)]


def plot_curves(runs: list[str], picture: Path) -> None:
    """Training and validation loss of some runs by step; spikes of the loss are marked. Raises
    UserError without matplotlib."""
    drawing = drawing_of(7, 4)
    axes = drawing.subplots()
    for run in runs:
        path = Path(run) / "log.jsonl"
        if not path.is_file():
            raise UserError(f"{run} is no folder of a run: {path} does not exist")
        lines = read_lines(path)
        steps = [line["step"] for line in lines if "loss" in line]
        losses = [line["loss"] for line in lines if "loss" in line]
        [curve] = axes.plot(steps, losses, label=run, linewidth=1)
        spikes = [i for i in range(1, len(losses)) if losses[i] > 1.5 * losses[i - 1]]
        axes.plot([steps[i] for i in spikes], [losses[i] for i in spikes], "x", color="red")
        steps = [line["step"] for line in lines if "val_loss" in line]
        losses = [line["val_loss"] for line in lines if "val_loss" in line]
        axes.plot(steps, losses, "o", color=curve.get_color(), markersize=3)
    axes.set(
        xlabel="step",
        ylabel="nats (line: training, dots: validation);\nnot comparable between objectives",
        yscale="log",
    )
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:.2g}")
    axes.legend()
    drawing.savefig(picture, dpi=120)


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


def compare_claims(lab: Lab, names: list[str]) -> list[str]:
    """Run what is missing -> the claims' verdicts as Markdown; claims.png where that can be."""
    claims = [CLAIMS[name] for name in names]
    lab.run_all(list(dict.fromkeys(arm for claim in claims for arm in claim.arms.values())))
    lines = overview(claims, lab.measured)
    for name, claim in zip(names, claims):
        lines += section(name, claim, lab.measured)
    with_matplotlib(plot_claims, claims, lab.measured, lab.folder / "claims.png")
    return lines


def compare_objectives(lab: Lab, names: list[str]) -> list[str]:
    """Run what is missing -> the table as Markdown; the curves of seed 1 where that can be."""
    arms = [f"--objective={name}" for name in names]
    lab.run_all(arms)
    measured = {flags.removeprefix("--objective="): lab.measured(flags) for flags in arms}
    folders = [lab.run_folder(flags, 1) for flags in arms]
    runs = [str(folder) for folder in folders if (folder / "log.jsonl").exists()]
    with_matplotlib(plot_curves, runs, lab.folder / "curves.png")
    return table(measured)


def with_matplotlib(plot: Callable, *arguments) -> None:
    """A picture, or one line about how to get it."""
    try:
        plot(*arguments)
    except UserError as e:
        print(e)


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


def check_request(config: CompareConfig, given: dict) -> None:
    """Raise UserError on flags that contradict each other."""
    try:
        flags = {word.split("=")[0] for word in shlex.split(config.flags)}
    except ValueError as e:
        raise UserError(f"--flags={config.flags}: {e}") from None
    for name in ("data", "objective", "max_steps", "seed", "out_dir"):
        if f"--{name}" in flags:
            raise UserError(f"--flags={config.flags}: compare.py sets --{name}; remove it")
    if config.on and not config.score:
        raise UserError(f"--on={config.on} is read with --score only: add it or leave it out")
    modes = [name for name in ("objectives", "claims", "score", "plot") if getattr(config, name)]
    if len(modes) > 1:
        raise UserError(f"--{modes[0]} and --{modes[1]} are two requests: leave one out")
    for name in ("max_steps", "seeds", "flags"):
        if name in given and (config.score or config.plot):
            raise UserError(f"--{name} is for runs to be trained; --{modes[0]} trains none")


def main(argv: list[str]) -> None:
    given = parse_flags(join_runs(argv), __doc__, CompareConfig)
    config = build(CompareConfig, given)
    check_request(config, given)
    n_twins = 0 if config.claims else N_TWINS
    lab = Lab(Path(config.out_dir), config.max_steps, config.seeds, config.flags, n_twins)
    if config.plot:
        lab.folder.mkdir(parents=True, exist_ok=True)
        plot_curves(config.plot.split(","), lab.folder / "curves.png")
        print(f"wrote {lab.folder / 'curves.png'}")
        return
    if config.score and config.on:
        print_scores(config.score.split(","), config.on)
        return
    if config.score:
        measured = {run: [scores_of(Path(run), N_TWINS)] for run in config.score.split(",")}
        print("\n".join(table(measured)))
        return

    if config.claims:
        asked = ",".join(CLAIMS) if config.claims == "all" else config.claims
        lines = compare_claims(lab, comma_list("claims", asked, CLAIMS))
        path = lab.folder / "claims.md"
    else:
        asked = config.objectives or ",".join(OBJECTIVES)
        lines = compare_objectives(lab, comma_list("objectives", asked, OBJECTIVES))
        path = lab.folder / "table.md"
    with atomic_write(path) as f:
        f.write("\n".join([*lines, ""]).encode())
    print("\n".join(lines))


if __name__ == "__main__":
    run_command(main, "--max_steps or --seeds")
