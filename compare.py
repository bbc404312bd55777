"""compare.py: every objective on the same yardsticks, and what textbooks claim of them, measured.

One small model, one corpus, one set of held-out stories. Each run is asked, in the format that its
objective knows best, to continue a text, to fill a hole, and to hold what a linear probe can read.
Losses of different objectives cannot be compared; bits of the same bytes, and answers, can.
Finished runs are kept, so a comparison that was stopped goes on where it stood.

    python compare.py --objectives=clm,fim,mlm --seeds=3 --max_steps=600
    python compare.py --claims=fim_is_free           (verdicts, and claims.png with matplotlib)
    python compare.py --score=out/clm,out/fim
    python compare.py --score=out/clm,out/fim --on=clm,span
    python compare.py --plot=out/clm,out/fim

What counts as a verdict is written into CLAIMS before a claim's first run.
"""

import contextlib
import json
import math
import re
import shlex
import statistics
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import stories
import train
from config import UserError, atomic_write, build, flag, parse_flags, run_command
from data import Batch, Text
from generate import Decoder
from log import duration
from objectives import (
    OBJECTIVES,
    VALIDATION,
    Knobs,
    Source,
    fim_prompt,
    make_batch,
    token_loss,
)
from sample import Reader, few_threads, load
from skills import (
    MARKS,
    N_STORIES,
    SEED,
    answer_to,
    halves,
    held_out,
    holes,
    prompt_to_continue,
)

MOST_CHARS = 210  # of a story that is asked about: rows of 64 tokens hold it, with marks
N_CONTINUED = 50  # stories whose second halves are scored
N_PROBED = 600  # stories that a probe learns from; half as many more test it
N_DRAWN = 5000  # stories among which are enough of two kinds of event
DECAY = 1e-3  # of the squared weights of a probe


def questions(reader: Reader, n: int, seed: int = SEED) -> list[stories.Story]:
    """Short unseen stories, the same for all models. Raises UserError where one does not fit."""
    rng = np.random.default_rng(seed)
    told = []
    while len(told) < n:
        story = stories.story(rng)
        if len(story.text) <= MOST_CHARS:
            told.append(story)
    longest = max(len(reader.tok.encode(story.text)) for story in told)
    if longest + MARKS > reader.block_size:
        raise UserError(
            f"--block_size={reader.block_size}: a story of {longest} tokens and its marks do not "
            f"fit; train with --block_size={longest + MARKS} at least"
        )
    return told


# ---- yardsticks: each asks a trained model about the same held-out stories ----------------------


def chain_rule_nats(reader: Reader, first: list[int], second: list[int]) -> float:
    """-log p of the second half by a model that fills masks: token after token, left to right, each
    from those before it. That is a likelihood of any model's conditionals. A diffusion model sees
    the tokens to come as masks, as it was trained, and so learns their number; the others see one
    mask and nothing after it."""
    tok = reader.tok
    all_masked = "unmask" in reader.tasks
    never = ~reader.allowed().to(reader.device)
    nats = 0.0
    for i, token in enumerate(second):
        hidden = len(second) - i if all_masked else 1
        ids = [*first, *second[:i], *[tok.MASK] * hidden]
        logits = reader.masked_logits(ids)[len(first) + i]
        nats -= logits.masked_fill(never, -torch.inf).log_softmax(-1)[token].item()
    return nats


def second_half_bits(reader: Reader) -> float | None:
    """Bits per byte of second halves, given the first."""
    if "similarity" in reader.tasks:
        return None
    usual = reader.tasks[0]
    task = "continue_ul2" if "continue_ul2" in reader.tasks else usual
    nats = n_bytes = 0.0
    for first, second in halves(questions(reader, N_CONTINUED)):
        before = reader.tok.encode(first)
        ids = reader.tok.encode(second)
        if reader.attention == "full":
            nats += chain_rule_nats(reader, before, ids)
        else:
            prompt, prefix = prompt_to_continue(reader, task, before)
            logits = reader.logits(torch.tensor([[*prompt, *ids[:-1]]]), prefix)[0]
            wanted = torch.tensor(ids, device=logits.device)
            nats += F.cross_entropy(logits[-len(ids) :], wanted, reduction="sum").item()
        n_bytes += len(second.encode())
    return nats / np.log(2) / n_bytes


def rises_or_falls(story: str) -> int:
    """How many things there are at the end, against the beginning: fewer 0, as many 1, more 2. At
    the story's first number only what comes later tells."""
    numbers = [int(number) for number in re.findall(r"\d+", story)]
    return 1 + int(np.sign(numbers[-1] - numbers[0]))


EVENT_WORDS = ["|".join(stories.WORDS[verb]) for verb in ("gives", "finds", "loses")]
EVENT_WORDS += ["meet", "from the"]


def kinds_of_events(story: str) -> list[int]:
    """A number for each kind of EVENT_WORDS that happens, in the order of the story."""
    places = [re.search(words, story) for words in EVENT_WORDS]
    found = {kind: place.start() for kind, place in enumerate(places) if place}
    return sorted(found, key=found.get)


@torch.no_grad()
def probed(reader: Reader) -> dict[str, float]:
    """Shares right of two linear probes on frozen states: pooled, of the mean of all states, which
    of two kinds of event comes first (that both happen, a bag of words knows); token, of the state
    at the first number, whether it rises or falls."""
    told = questions(reader, N_DRAWN, SEED + 1)
    texts = [story.text for story in told]
    of_two = [text for text in texts if len(kinds_of_events(text)) == 2][: N_PROBED * 3 // 2]
    pooled = torch.stack([states_of(reader, text).mean(0) for text in of_two])
    events = torch.tensor([kinds_of_events(text)[0] for text in of_two])

    local = []
    for text in texts[: len(of_two)]:
        at = len(reader.tok.encode(text[: re.search(r"\d+", text).end()])) - 1
        local.append(states_of(reader, text)[at])
    trends = torch.tensor([rises_or_falls(text) for text in texts[: len(of_two)]])
    return {
        "pooled": probe(pooled, events),
        "pooled guessing": share_of_commonest(events),
        "token": probe(torch.stack(local), trends),
        "token guessing": share_of_commonest(trends),
    }


def states_of(reader: Reader, text: str) -> Tensor:
    """(T, C) float32 of a text, read in both directions where the model can."""
    ids = reader.tok.encode(text)
    if reader.attention == "full":
        return reader.states_both_ways(ids).float().cpu()
    both_ways = len(ids) if reader.attention == "prefix" else 0
    return reader.states(torch.tensor([ids]), both_ways)[0].float().cpu()


def share_of_commonest(labels: Tensor) -> float:
    """What always guessing one class of the tested third gets right, at best."""
    tested = labels[len(labels) * 2 // 3 :]
    return (tested.bincount().max() / len(tested)).item()


def probe(states: Tensor, labels: Tensor) -> float:
    """(N, C), (N,) -> the share of the last third that a linear classifier gets right, fitted to
    the rest by cross entropy (logistic regression)."""
    n = len(states) * 2 // 3
    x = (states - states[:n].mean(0)) / states[:n].std(0).clamp(min=1e-6)
    x = F.pad(x, (0, 1), value=1.0)
    weights = torch.zeros(x.shape[1], int(labels.max()) + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        total = F.cross_entropy(x[:n] @ weights, labels[:n]) + DECAY * weights.square().sum()
        total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(loss)
    return ((x[n:] @ weights).argmax(1) == labels[n:]).float().mean().item()


def left_only(reader: Reader) -> float:
    """Holes filled right by a model that sees the text before them only: the baseline. How many
    tokens it may write is told."""
    right = []
    for hole in holes(held_out(reader, reader.block_size - MARKS)):
        prompt = [reader.tok.EOT, *reader.tok.encode(hole.before)]
        right.append(answer_to(reader, prompt, len(reader.tok.encode(hole.word))) == hole.word)
    return statistics.mean(right)


def holes_inside_words(reader: Reader) -> float:
    """Holes filled right that leave the first two letters of a word and its last."""
    tok = reader.tok
    layout = reader.knobs.fim_layouts.split(",")[-1]
    right = []
    for hole in holes(held_out(reader, reader.block_size - 2 * MARKS)):
        cut = len(hole.word.lstrip()[:2]) + hole.word.startswith(" ")
        middle = hole.word[cut:-1]
        if not middle:
            continue
        before = tok.encode(hole.before + hole.word[:cut])
        after = tok.encode(hole.word[-1] + hole.after)
        right.append(answer_to(reader, fim_prompt(layout, tok, before, after), 16) == middle)
    return statistics.mean(right)


def rows_of(reader: Reader, mixture: dict[str, float], knobs: Knobs) -> Batch:
    """64 rows of held-out stories."""
    tok = reader.tok
    ids = [i for story in questions(reader, N_STORIES) for i in [*tok.encode(story.text), tok.EOT]]
    text = Text(np.array(ids, tok.dtype), tok.EOT)
    source = Source(mixture, text, tok, reader.block_size, knobs, SEED)
    return make_batch(source, VALIDATION, 0, range(64), 64).to(reader.device)


def count_targets(reader: Reader, batch: Batch) -> int:
    """Predictions that a batch asks for: tokens, and of electra a yes or no for each position."""
    asked = batch.weights > 0
    n = int(asked.sum()) * batch.targets[0].numel()
    if reader.model.detect_head is not None:
        n += int((batch.segment > 0).sum())
    return n


def decoding_speed(reader: Reader) -> float | None:
    """Tokens a second of plain decoding, one text at a time."""
    if reader.attention == "full":
        return None
    decoder = Decoder(reader.model, block_size=reader.block_size)
    decoder.generate([reader.tok.EOT], 8)
    return decoder.generate([reader.tok.EOT], 100)[1].tokens_per_s


@torch.no_grad()
def loss_on(reader: Reader, name: str, knobs: Knobs) -> float:
    """Nats a target on rows of an objective with token cross entropy."""
    batch = rows_of(reader, {name: 1.0}, knobs)
    part = OBJECTIVES[name].loss(reader.model, batch, knobs, reader.tok)["token_loss"]
    return (part.sum / part.weight).item()


# Nats a target on rows of a run's own objective with other knobs.
OTHER_ROWS = {f"spans of {n}": ("span", Knobs(mean_span=n)) for n in (1, 3, 8, 32)}
OTHER_ROWS |= {f"prefix of {p}%": ("prefix", Knobs(prefix_frac=p / 100)) for p in (25, 50, 75)}


def scores(reader: Reader) -> dict[str, float]:
    """The yardsticks of one model; its skills are in its log."""
    found = {"continue": second_half_bits(reader)}
    found |= probed(reader)
    found["tokens_per_s"] = decoding_speed(reader)
    batch = rows_of(reader, reader.mixture, reader.knobs)
    found["targets"] = count_targets(reader, batch) / batch.inputs.numel()
    if reader.attention == "causal":
        found["left only"] = left_only(reader)
    if "infill_fim" in reader.tasks:
        found["holes inside words"] = holes_inside_words(reader)
    for name, (objective, knobs) in OTHER_ROWS.items():
        if objective in reader.mixture:
            found[name] = loss_on(reader, objective, knobs)
    return {name: value for name, value in found.items() if value is not None}


def read_lines(path: Path) -> list[dict]:
    """The lines of a .jsonl file; one that a full disk cut short is left out."""
    found = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


# ---- runs ---------------------------------------------------------------------------------------


@dataclass
class Lab:
    """A folder of runs, and what was measured of each. A run is known by its flags and seed."""

    folder: Path
    max_steps: int
    seeds: int
    common: str = ""  # flags of all runs

    def results(self) -> dict[tuple, dict[str, float]]:
        """The lines of results.jsonl: (all flags, seed) -> scores."""
        path = self.folder / "results.jsonl"
        lines = read_lines(path) if path.exists() else []
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
        words = shlex.split(f"{flags} {self.common}")
        steps = self.max_steps
        for word in list(words):
            if word.startswith("--init_from=@"):
                start = self.run_folder(word.replace("init_from=@", "objective="), seed)
                words[words.index(word)] = f"--init_from={start}"
            if word.startswith("--max_steps=@"):
                words.remove(word)
                steps = round(steps * float(word.removeprefix("--max_steps=@")))
        own = [f"--out_dir={folder}", f"--max_steps={steps}", f"--seed={seed}"]
        folder.mkdir(parents=True, exist_ok=True)
        torch.compiler.reset()  # a new model is compiled anew
        try:
            with open(folder / "screen.txt", "w") as screen, contextlib.redirect_stdout(screen):
                train.main([*words, *own, "--overwrite"])
        except SystemExit:  # a signal
            print("stopped; the same command begins this run again and keeps those before it")
            raise

        found = scores_of(folder)
        told, _ = self.key(flags, seed)
        with open(self.folder / "results.jsonl", "a") as f:
            f.write(json.dumps(dict(flags=told, seed=seed, scores=found)) + "\n")


def from_log(folder: Path) -> dict[str, float]:
    """What the run wrote of itself: time of a step, last validation loss, skills."""
    lines = read_lines(folder / "log.jsonl")
    found = {"ms": statistics.median(line["ms"] for line in lines if "ms" in line)}
    for line in lines:
        if "val_loss" in line:
            found["val_loss"] = line["val_loss"]
        for name, skill in line.get("skills", {}).items():
            found[name] = skill["value"]
    return found


def scores_of(folder: Path) -> dict[str, float]:
    """All that is known of a run: the yardsticks, and what it wrote of itself."""
    reader = load(folder)
    with few_threads(reader):
        return scores(reader) | from_log(folder)


# ---- claims -------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """Two arms, compared by one score. `margin` is the difference that matters."""

    arm: str
    kind: str  # "no worse" or "better"
    other: str
    score: str
    margin: float


class Claim(NamedTuple):
    """What textbooks say, who published it, and the comparisons that decide, written down before
    the runs. An arm is the flags of a run; `--init_from=@NAME` is the run of objective NAME with
    the same seed, which must be an arm before it; `--max_steps=@2` is twice the steps of all."""

    says: str
    published: str
    arms: dict[str, str]
    comparisons: tuple[Comparison, ...]


def arms_of(*objectives: str, **others: str) -> dict[str, str]:
    """Arms by name: objectives at their default knobs, and others by their flags."""
    return {name: f"--objective={name}" for name in objectives} | others


LOWER_IS_BETTER = ("continue", "val_loss", "ms", *OTHER_ROWS)
RETRIEVED = f"second halves found among {N_STORIES}"

# fmt: off
CLAIMS = {
    "fim_is_free": Claim(
        "fim costs nothing left to right",
        "Bavarian et al. 2022: no loss up to a rate of 0.9",
        arms_of("clm", fim50="--objective=fim --fim_rate=0.5",
                fim90="--objective=fim --fim_rate=0.9"),
        (Comparison("fim50", "no worse", "clm", "continue", 0.01),
         Comparison("fim90", "no worse", "clm", "continue", 0.01))),
    "mlm_represents": Claim(
        "mlm represents a text better than clm, at equal tokens",
        "Devlin et al. 2019: BERT beats left-to-right training on every task",
        arms_of("clm", "mlm"),
        (Comparison("mlm", "better", "clm", "pooled", 0.02),)),
    "pairs_help": Claim(
        "judging pairs of texts beside mlm makes it represent them better",
        "Liu et al. 2019: nsp does not help; Lan et al. 2020: sop does",
        arms_of("mlm", nsp="--objective=nsp --block_size=128 --batch_size=32",
                sop="--objective=sop --block_size=128 --batch_size=32"),
        (Comparison("nsp", "better", "mlm", "pooled", 0.02),
         Comparison("sop", "better", "mlm", "pooled", 0.02))),
    "both_worlds": Claim(
        "ul2 is as good as clm and prefix at going on",
        "Tay et al. 2022: better than both",
        arms_of("ul2", "clm", "prefix"),
        (Comparison("ul2", "no worse", "clm", "continue", 0.01),
         Comparison("ul2", "no worse", "prefix", "continue", 0.01))),
    "future_helps": Claim(
        "predicting two tokens makes the first one better",
        "Gloeckle et al. 2024: better from 3 billion parameters on, worse below",
        arms_of("clm", chain="--objective=mtp --n_future=2",
                parallel="--objective=mtp --n_future=2 --mtp_heads=parallel"),
        (Comparison("chain", "better", "clm", "continue", 0.01),
         Comparison("parallel", "better", "clm", "continue", 0.01))),
    "masking_rate": Claim(
        "masking 40% represents as well as 15%",
        "Wettig et al. 2023: 40% is better than 15% for large models",
        arms_of(mlm15="--objective=mlm", mlm40="--objective=mlm --mask_rate=0.4"),
        (Comparison("mlm40", "no worse", "mlm15", "pooled", 0.02),
         Comparison("mlm40", "no worse", "mlm15", "token", 0.02))),
    "masking_rate_fills": Claim(
        "masking 15% teaches to fill single words at least as well as any other rate",
        "Devlin et al. 2019 mask 15%; Wettig et al. 2023: 40% is better for large models",
        arms_of(mlm10="--objective=mlm --mask_rate=0.1", mlm15="--objective=mlm",
                mlm30="--objective=mlm --mask_rate=0.3", mlm40="--objective=mlm --mask_rate=0.4",
                mlm60="--objective=mlm --mask_rate=0.6"),
        tuple(Comparison("mlm15", "no worse", other, "masked words found", 0.05)
              for other in ("mlm10", "mlm30", "mlm40", "mlm60"))),
    "detecting_represents": Claim(
        "electra represents a text better than mlm, at equal tokens",
        "Clark et al. 2020: as good with a quarter of the compute",
        arms_of("mlm", "electra"),
        (Comparison("electra", "better", "mlm", "pooled", 0.02),
         Comparison("electra", "better", "mlm", "token", 0.02))),
    "mixed": Claim(
        "clm and mlm in one model, half of the rows each, are as good as either alone",
        "Tay et al. 2022: a mixture of denoisers is better than its parts",
        arms_of("clm", "mlm", both="--objective=clm:0.5,mlm:0.5"),
        (Comparison("both", "no worse", "clm", "continue", 0.01),
         Comparison("both", "no worse", "mlm", "masked words found", 0.05))),
    "retrieval_starts": Claim(
        "contrastive training finds partners better after as many steps of clm, best after mlm",
        "Izacard et al. 2022 start from BERT",
        arms_of("clm", "mlm", "contrastive",
                from_clm="--objective=contrastive --init_from=@clm",
                from_mlm="--objective=contrastive --init_from=@mlm"),
        (Comparison("from_mlm", "better", "contrastive", RETRIEVED, 0.02),
         Comparison("from_clm", "better", "contrastive", RETRIEVED, 0.02),
         Comparison("from_mlm", "better", "from_clm", RETRIEVED, 0.02))),
    "bytes_cost": Claim(
        "words from a small BPE are learned sooner than bytes, at equal positions",
        "Xue et al. 2022 (ByT5): bytes need more training time",
        arms_of("clm", bytes="--objective=clm --tokenizer=bytes --block_size=512 --batch_size=8"),
        (Comparison("clm", "better", "bytes", "continue", 0.01),)),
    "layouts_share": Claim(
        "psm and spm trained together fill holes as well as each alone, at equal tokens",
        "Bavarian et al. 2022: each gains from the other",
        arms_of(joint="--objective=fim --max_steps=@2",
                psm="--objective=fim --fim_layouts=psm --max_steps=@2",
                spm="--objective=fim --fim_layouts=spm --max_steps=@2",
                joint2="--objective=fim --fim_layouts=psm,spm2 --max_steps=@2"),
        (Comparison("joint", "no worse", "psm", "holes filled right (psm)", 0.05),
         Comparison("joint", "no worse", "spm", "holes filled right (spm)", 0.05),
         Comparison("joint2", "no worse", "psm", "holes filled right (psm)", 0.05),
         Comparison("joint2", "better", "joint", "holes inside words", 0.05))),
    "cuts": Claim(
        "a model that is trained with cuts between tokens fails where a hole is inside a word",
        "Bavarian et al. 2022: a third of the score of cuts between characters",
        arms_of(characters="--objective=fim --max_steps=@2",
                tokens="--objective=fim --fim_cuts=tokens --max_steps=@2"),
        (Comparison("characters", "better", "tokens", "holes inside words", 0.1),
         Comparison("characters", "no worse", "tokens", "holes filled right (psm)", 0.05),
         Comparison("characters", "no worse", "tokens", "holes filled right (spm)", 0.05))),
    "span_lengths": Claim(
        "spans of each mean length are predicted best by a model that was trained on them",
        "Raffel et al. 2020: means of 2 to 10 tokens do about as well downstream",
        arms_of(span1="--objective=span --mean_span=1", span3="--objective=span",
                span8="--objective=span --mean_span=8", span32="--objective=span --mean_span=32"),
        (Comparison("span1", "better", "span3", "spans of 1", 0.02),
         Comparison("span3", "better", "span1", "spans of 3", 0.02),
         Comparison("span3", "better", "span8", "spans of 3", 0.02),
         Comparison("span8", "better", "span3", "spans of 8", 0.02),
         Comparison("span8", "better", "span32", "spans of 8", 0.02),
         Comparison("span32", "better", "span8", "spans of 32", 0.02))),
    "prefix_shares": Claim(
        "prefixes of any length in training are as good for one length as that length alone",
        "Raffel et al. 2020 draw the length uniformly",
        arms_of(any="--objective=prefix", of25="--objective=prefix --prefix_frac=0.25",
                of50="--objective=prefix --prefix_frac=0.5",
                of75="--objective=prefix --prefix_frac=0.75"),
        (Comparison("any", "no worse", "of25", "prefix of 25%", 0.02),
         Comparison("any", "no worse", "of50", "prefix of 50%", 0.02),
         Comparison("any", "no worse", "of75", "prefix of 75%", 0.02))),
    "equal_time": Claim(
        "electra represents a text better than mlm, at equal time (a step of electra costs 1.4)",
        "Clark et al. 2020: better for the same compute, most of all for small models",
        arms_of("electra", longer="--objective=mlm --max_steps=@1.4"),
        (Comparison("electra", "better", "longer", "pooled", 0.02),
         Comparison("electra", "better", "longer", "token", 0.02))),
    "equal_targets": Claim(
        "mlm needs 6.7 times the tokens, then it represents as well as clm",
        "Clark et al. 2020: mlm learns from 15% of its tokens only",
        arms_of("clm", longer="--objective=mlm --max_steps=@6.7"),
        (Comparison("longer", "no worse", "clm", "pooled", 0.02),)),
    "mlm_after_clm": Claim(
        "a model fills masks better if the first half of its steps was clm",
        "Gisserot-Boukhlef et al. 2025: clm, then mlm beats mlm alone for a fixed budget",
        arms_of("clm", after="--objective=mlm --init_from=@clm",
                alone="--objective=mlm --max_steps=@2"),
        (Comparison("after", "better", "alone", "masked words found", 0.02),
         Comparison("after", "better", "alone", "pooled", 0.02))),
    "replay": Claim(
        "a few rows of the old text keep it from being forgotten, and cost the new text nothing",
        "Ibrahim et al. 2024: 5% of replay for a weak shift, 25% for a strong one",
        arms_of("clm", none="--objective=clm --data=python --init_from=@clm",
                replay5="--objective=clm --data=python --init_from=@clm --replay_data=stories",
                replay25="--objective=clm --data=python --init_from=@clm --replay_data=stories "
                         "--replay_rate=0.25"),
        (Comparison("replay5", "better", "none", "continue", 0.05),
         Comparison("replay5", "no worse", "clm", "continue", 0.01),
         Comparison("replay25", "no worse", "clm", "continue", 0.01),
         Comparison("replay5", "no worse", "none", "val_loss", 0.02),
         Comparison("replay25", "no worse", "none", "val_loss", 0.02))),
}
# fmt: on


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


class Figure(NamedTuple):
    """A score over seeds."""

    mean: float
    sd: float
    n: int

    def __str__(self) -> str:
        spread = f" ± {self.sd:.2g}" if self.n > 1 else ""
        return f"{self.mean:.3g}{spread}"


def figure(values: list[float]) -> Figure:
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return Figure(statistics.mean(values), sd, len(values))


def verdict(comparison: Comparison, arm: Figure, other: Figure) -> str:
    """Supported, refuted at this size, or cannot tell.

    The arm's advantage is known to within two standard deviations of a difference. "better" is
    supported where it is surely above zero and at least the margin, refuted where it is surely
    below the margin. "no worse" is supported where the arm surely does not lag by the margin,
    refuted where it surely does.

    >>> better = Comparison("b", "better", "a", "continue", 0.01)
    >>> verdict(better, Figure(0.20, 0.002, 3), Figure(0.25, 0.002, 3))
    'supported'
    >>> verdict(better, Figure(0.25, 0.002, 3), Figure(0.25, 0.002, 3))
    'refuted at this size'
    >>> verdict(better, Figure(0.20, 0.05, 3), Figure(0.25, 0.05, 3))
    'cannot tell'
    """
    if min(arm.n, other.n) < 2:
        return "cannot tell"
    gain = other.mean - arm.mean
    if comparison.score not in LOWER_IS_BETTER:
        gain = -gain
    noise = 2 * np.hypot(arm.sd, other.sd)
    margin = comparison.margin
    if comparison.kind == "better":
        supported = gain > max(margin, noise)
        refuted = gain + noise < margin
    else:
        supported = gain - noise > -margin
        refuted = gain + noise < -margin
    if supported:
        return "supported"
    return "refuted at this size" if refuted else "cannot tell"


def judge(lab: Lab, claim: Claim) -> list[str]:
    """Markdown: the claim, its figures, the verdicts."""
    lines = [f"### {claim.says[0].upper()}{claim.says[1:]}", "", f"Published: {claim.published}."]
    lines += ["", "| comparison | by | figures | verdict |", "|---|---|---|---|"]
    for c in claim.comparisons:
        about = f"{c.arm} {c.kind} than {c.other} by {c.margin}"
        runs = [lab.measured(claim.arms[name]) for name in (c.arm, c.other)]
        values = [[scores[c.score] for scores in each if c.score in scores] for each in runs]
        if all(values):
            arm, other = map(figure, values)
            lines.append(
                f"| {about} | {c.score} | {arm} and {other} | **{verdict(c, arm, other)}** |"
            )
        else:
            lines.append(f"| {about} | {c.score} | not run | |")
    return [*lines, ""]


# ---- the table, the curves, the command ---------------------------------------------------------

# fmt: off
COLUMNS = {  # heading -> the scores it shows, the first that a run has
    "goes on, bits per byte":  ("continue",),
    "holes filled right":      ("holes filled right (spm)", "holes filled right",
                                "three holes at once ([R])", "masked words found",
                                "masked words found by the generator",
                                "sentences with masked words restored"),
    "seeing the left only":    ("left only",),
    "first event read off":    ("pooled",),
    "rise or fall read off":   ("token",),
    "targets a position":      ("targets",),
    "ms a step":               ("ms",),
    "tokens/s":                ("tokens_per_s",),
}
FOOTNOTE = """\
Means ± standard deviations over seeds. Holes: one word of an unseen story; models that fill masks
are told how many tokens it has, as is the baseline that sees the left only; fim, span, ul2 and bart
must end it themselves (fim: in spm; ul2: three holes at once, of one to four words each, which the
past fixes, in [R]; bart: sentences with masked words, of a shuffled story). All else is asked of
stories of at most 210 characters. Of electra the small generator goes on and fills, the detector is
read off. Diffusion is told how many tokens follow. Read off by a linear classifier from frozen
states: always saying the commonest class is right in {pooled} and {token}. -: the model has no such
figure."""
# fmt: on


def table(measured: dict[str, list[dict[str, float]]]) -> list[str]:
    """Markdown: a row for each name, whose runs have these scores, and a column for each yardstick:
    mean ± deviation over the runs."""
    lines = ["| run | " + " | ".join(COLUMNS) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    guessing = {"pooled": "?", "token": "?"}
    for name, runs in measured.items():
        cells = [f"`{name}`"]
        for keys in COLUMNS.values():
            key = next((key for key in keys if runs and key in runs[0]), None)
            cells.append("-" if key is None else str(figure([run[key] for run in runs])))
        lines.append("| " + " | ".join(cells) + " |")
        if runs:
            guessing = {key: f"{runs[0][f'{key} guessing']:.0%}" for key in guessing}
    return [*lines, "", FOOTNOTE.format(**guessing)]


def drawing_of(width: float, height: float):
    """An empty picture. Raises UserError without matplotlib."""
    try:
        import matplotlib.figure
    except ImportError:
        raise UserError("pictures need matplotlib: pip install matplotlib") from None
    return matplotlib.figure.Figure(figsize=(width, height), layout="constrained")


def plot_claims(lab: Lab, claims: list[Claim], path: Path) -> None:
    """A panel for each score that decides a claim: its arms, mean ± deviation over the seeds."""
    panels = []
    for claim in claims:
        for score in dict.fromkeys(c.score for c in claim.comparisons):
            figures = {}
            for name, flags in claim.arms.items():
                values = [run[score] for run in lab.measured(flags) if score in run]
                if values:
                    figures[name] = figure(values)
            panels.append((claim.says, score, figures))
    rows = math.ceil(len(panels) / 3)
    drawing = drawing_of(11, 3 * rows)
    for place, (says, score, figures) in enumerate(panels, 1):
        axes = drawing.add_subplot(rows, 3, place)
        means = [each.mean for each in figures.values()]
        axes.errorbar(list(figures), means, yerr=[each.sd for each in figures.values()], fmt="o")
        axes.set_title(textwrap.fill(says, 40), fontsize=9)
        axes.set_ylabel("bits per byte" if score == "continue" else score)
        axes.tick_params(axis="x", labelsize=8)
        axes.margins(0.2)
    drawing.savefig(path, dpi=120)


def plot_curves(runs: list[str], path: Path) -> None:
    """Training and validation loss of some runs by step; spikes of the loss are marked."""
    drawing = drawing_of(7, 4)
    axes = drawing.subplots()
    for run in runs:
        lines = read_lines(Path(run) / "log.jsonl")
        steps = [line["step"] for line in lines if "loss" in line]
        losses = [line["loss"] for line in lines if "loss" in line]
        [curve] = axes.plot(steps, losses, label=run, linewidth=1)
        spikes = [i for i in range(1, len(losses)) if losses[i] > 1.5 * losses[i - 1]]
        axes.plot([steps[i] for i in spikes], [losses[i] for i in spikes], "x", color="red")
        steps = [line["step"] for line in lines if "val_loss" in line]
        losses = [line["val_loss"] for line in lines if "val_loss" in line]
        axes.plot(steps, losses, "o", color=curve.get_color(), markersize=3)
    axes.set(xlabel="step", ylabel="nats (line: training, dots: validation)", yscale="log")
    axes.legend()
    drawing.savefig(path, dpi=120)


def print_scores(runs: list[str], names: list[str]) -> None:
    """Each run's loss on the rows of other objectives. Raises UserError."""
    able = [name for name, row in OBJECTIVES.items() if row.loss is token_loss]
    for name in names:
        if name not in able:
            raise UserError(
                f"--on={name}: must be of those with token loss only: {', '.join(able)}"
            )
    print(f"{'nats a target on':<24}" + "".join(f"{name:>12}" for name in names))
    for run in runs:
        reader = load(run)
        print(f"{run:<24}" + "".join(f"{loss_on(reader, name, Knobs()):>12.4f}" for name in names))


def main(argv: list[str]) -> None:
    config = build(CompareConfig, parse_flags(argv, __doc__, CompareConfig))
    for name in ("data", "objective", "max_steps", "seed", "out_dir"):
        if f"--{name}=" in config.flags:
            raise UserError(f"--flags={config.flags}: compare.py sets --{name}; remove it")
    lab = Lab(Path(config.out_dir), config.max_steps, config.seeds, config.flags)
    if config.plot:
        lab.folder.mkdir(parents=True, exist_ok=True)
        plot_curves(config.plot.split(","), lab.folder / "curves.png")
        print(f"wrote {lab.folder / 'curves.png'}")
        return
    if config.score and config.on:
        print_scores(config.score.split(","), config.on.split(","))
        return
    if config.score:
        print("\n".join(table({run: [scores_of(Path(run))] for run in config.score.split(",")})))
        return

    if config.claims:
        names = list(CLAIMS) if config.claims == "all" else config.claims.split(",")
        unknown = [name for name in names if name not in CLAIMS]
        if unknown:
            raise UserError(f"--claims={unknown[0]}: there are {', '.join(CLAIMS)}")
        arms = list(dict.fromkeys(arm for name in names for arm in CLAIMS[name].arms.values()))
        lab.run_all(arms)
        claims = [CLAIMS[name] for name in names]
        lines = [line for claim in claims for line in judge(lab, claim)]
        path = lab.folder / "claims.md"
        try:
            plot_claims(lab, claims, lab.folder / "claims.png")
        except UserError as e:  # the table comes without it
            print(e)
    else:
        names = config.objectives.split(",") if config.objectives else list(OBJECTIVES)
        names = list(dict.fromkeys(name.strip() for name in names))
        for name in names:
            if name not in OBJECTIVES:
                raise UserError(f"--objectives={name}: there are {', '.join(OBJECTIVES)}")
        arms = [f"--objective={name}" for name in names]
        lab.run_all(arms)
        measured = {flags.removeprefix("--objective="): lab.measured(flags) for flags in arms}
        lines = table(measured)
        path = lab.folder / "table.md"

    with atomic_write(path) as f:
        f.write("\n".join([*lines, ""]).encode())
    print("\n".join(lines))


if __name__ == "__main__":
    run_command(main, "--max_steps or --seeds")
