"""claims.py: what textbooks claim of pre-training objectives, and the runs that decide.

Each claim is a row of CLAIMS: its arms, and the comparisons of their scores, written down before
the claim's first run. compare.py trains and measures the arms.
"""

import itertools
import math
import statistics
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from skills import N_STORIES
from yardsticks import OTHER_ROWS, SPANS


class Comparison(NamedTuple):
    """Two arms, compared by one score. `margin` is the difference that matters."""

    arm: str
    kind: str  # "no worse" or "better"
    other: str
    score: str
    margin: float


class Claim(NamedTuple):
    """What textbooks say, who published it, and the comparisons that decide, written down before
    the runs. An arm is the flags of a run. `--init_from=@NAME` begins with the weights of an arm
    that stands before it: of objective NAME, with the same seed and the flags that follow NAME
    inside the quotes. `--max_steps=2x` is twice the steps that compare.py was given."""

    says: str
    published: str
    arms: dict[str, str]
    comparisons: tuple[Comparison, ...]


def compared(arms: str, kind: str, others: str, scores: str, margin: float) -> tuple:
    """The comparisons of each of `arms` with each of `others` by each score; each a comma list."""
    names = itertools.product(arms.split(", "), others.split(", "), scores.split(", "))
    return tuple(Comparison(arm, kind, other, score, margin) for arm, other, score in names)


def arms_of(*objectives: str, each: str = "", **others: str) -> dict[str, str]:
    """Arms by name: objectives at their default knobs, and others by objective and flags. `each`:
    flags of all of them."""
    named = {name: name for name in objectives} | others
    return {name: f"--objective={flags} {each}".strip() for name, flags in named.items()}


LOWER_IS_BETTER = ["bits a byte", "own bits a byte", "val_loss", *OTHER_ROWS]
RETRIEVED = f"second halves found among {N_STORIES}"

# fmt: off
CLAIMS = {
    "fim_is_free": Claim(
        "fim costs nothing left to right",
        "Bavarian et al. 2022: no loss up to a rate of 0.9",
        arms_of("clm", fim50="fim --fim_rate=0.5", fim90="fim --fim_rate=0.9",
                each="--max_steps=0.3x"),
        compared("fim50, fim90", "no worse", "clm", "bits a byte", 0.01)),
    "pairs": Claim(
        "judging pairs of texts beside mlm costs the filling of masks nothing, and its states tell "
        "better which words fit and what happens first, at equal steps",
        "Liu et al. 2019: nsp adds nothing; Lan et al. 2020: nsp adds little, sop more",
        arms_of("mlm", "nsp", "sop"),
        compared("nsp, sop", "no worse", "mlm", "masked words found", 0.05)
        + compared("nsp, sop", "better", "mlm", "word fits, first event", 0.02)),
    "both_worlds": Claim(
        "ul2 is as good as clm and prefix at going on, at equal steps",
        "Tay et al. 2022: better than both",
        arms_of("ul2", "clm", "prefix", each="--max_steps=0.3x"),
        compared("ul2", "no worse", "clm, prefix", "bits a byte", 0.01)),
    "future_helps": Claim(
        "predicting two tokens makes the first one better",
        "Gloeckle et al. 2024: on code better from 3 billion parameters on, worse far below; on "
        "children's stories models of at most 30 million copy names better",
        arms_of("clm", chain="mtp --n_future=2",
                parallel="mtp --n_future=2 --mtp_heads=parallel", each="--max_steps=0.3x"),
        compared("chain, parallel", "better", "clm", "bits a byte", 0.01)),
    "masking_rate": Claim(
        "masking 15% teaches to fill single words at least as well as any other rate, and masking "
        "40% represents a text as well",
        "Devlin et al. 2019 mask 15%; Wettig et al. 2023: 40% is better for large models",
        arms_of(mlm10="mlm --mask_rate=0.1", mlm15="mlm", mlm30="mlm --mask_rate=0.3",
                mlm40="mlm --mask_rate=0.4", mlm60="mlm --mask_rate=0.6"),
        compared("mlm15", "no worse", "mlm10, mlm30, mlm40, mlm60", "masked words found", 0.05)
        + compared("mlm40", "no worse", "mlm15", "first event, rise or fall", 0.02)),
    "detecting_represents": Claim(
        "electra represents a text better than mlm, at equal steps and beside mlm for 1.4 times "
        "the steps (a step of electra takes 1.2 times as long)",
        "Clark et al. 2020: as good with a quarter of the compute, better for the same, most of "
        "all for small models",
        arms_of("mlm", "electra", longer="mlm --max_steps=1.4x"),
        compared("electra", "better", "mlm, longer", "first event, rise or fall", 0.02)),
    "mixed": Claim(
        "clm and mlm in one model, half of the rows each, are as good as either alone",
        "Tay et al. 2022: a mixture of denoisers is better than its parts",
        arms_of("clm", "mlm", both="clm:0.5,mlm:0.5"),
        compared("both", "no worse", "clm", "bits a byte", 0.01)
        + compared("both", "no worse", "mlm", "masked words found", 0.05)),
    "retrieval_starts": Claim(
        "partners are found better if the first half of the steps was clm or mlm, best if mlm",
        "Izacard et al. 2022 start from BERT",
        arms_of("clm", "mlm", longer="contrastive --max_steps=2x",
                from_clm="contrastive --init_from=@clm", from_mlm="contrastive --init_from=@mlm"),
        compared("from_mlm, from_clm", "better", "longer", RETRIEVED, 0.02)
        + compared("from_mlm", "better", "from_clm", RETRIEVED, 0.02)),
    "layouts_share": Claim(
        "psm and spm trained together fill holes as well as each alone, at equal steps",
        "Bavarian et al. 2022: each gains from the other",
        arms_of(joint="fim", psm="fim --fim_layouts=psm", spm="fim --fim_layouts=spm",
                each="--max_steps=2x"),
        compared("joint", "no worse", "psm", "holes filled right (psm)", 0.05)
        + compared("joint", "no worse", "spm", "holes filled right (spm)", 0.05)),
    "spm_form": Claim(
        "beside psm, spm is learned better with the middle right after the prefix (spm2)",
        "Bavarian et al. 2022 and Roziere et al. 2023 (Code Llama) use that form",
        arms_of(spm="fim", spm2="fim --fim_layouts=psm,spm2", each="--max_steps=2x"),
        compared("spm2", "better", "spm", "holes filled right, holes inside words", 0.05)
        + compared("spm2", "no worse", "spm", "holes filled right (psm)", 0.05)),
    "cuts": Claim(
        "cuts between tokens in training: holes of whole words are filled, not those inside words",
        "Bavarian et al. 2022: in holes cut anywhere a third of the score of cuts in characters",
        arms_of(characters="fim", tokens="fim --fim_cuts=tokens", each="--max_steps=2x"),
        compared("tokens", "better", "characters", "holes filled right", 0.05)
        + compared("characters", "better", "tokens", "holes inside words", 0.05)),
    "span_lengths": Claim(
        "spans of each mean length are predicted best after training on that length",
        "Raffel et al. 2020, at 15%: means of 2 to 5 do alike downstream, 10 slightly worse",
        arms_of(**{f"span{n}": f"span --corruption_rate=0.5 --mean_span={n}" for n in SPANS}),
        tuple(Comparison(f"span{n}", "better", f"span{other}", f"spans of {n}", 0.02)
              for n in SPANS for other in SPANS if other != n)),
    "prefix_shares": Claim(
        "prefixes of any length in training are as good for one length as that length alone, "
        "at equal steps",
        "Raffel et al. 2020 draw the length uniformly",
        arms_of("prefix", of10="prefix --prefix_frac=0.1", of25="prefix --prefix_frac=0.25",
                of50="prefix --prefix_frac=0.5", of75="prefix --prefix_frac=0.75"),
        compared("prefix", "no worse", "of25", "prefix of 25%", 0.02)
        + compared("prefix", "no worse", "of50", "prefix of 50%", 0.02)
        + compared("prefix", "no worse", "of75", "prefix of 75%", 0.02)
        + compared("of75", "better", "of10, of25, of50", "prefix of 75%", 0.02)),
    "mlm_after_clm": Claim(
        "a model fills masks better if the first half of its steps was clm",
        "Gisserot-Boukhlef et al. 2025: clm, then mlm beats mlm alone for a fixed budget",
        arms_of("clm", after="mlm --init_from=@clm", alone="mlm --max_steps=2x"),
        compared("after", "better", "alone", "masked words found", 0.02)),
    "fim_on_code": Claim(
        "fim costs nothing left to right, on Python source",
        "Bavarian et al. 2022: no loss up to a rate of 0.9",
        arms_of("clm", fim50="fim --fim_rate=0.5", fim90="fim --fim_rate=0.9",
                each="--data=python"),
        compared("fim50, fim90", "no worse", "clm", "own bits a byte", 0.02)),
    "both_worlds_on_code": Claim(
        "ul2 is as good as clm and prefix at going on, at equal steps, on Python source",
        "Tay et al. 2022: better than both",
        arms_of("ul2", "clm", "prefix", each="--data=python"),
        compared("ul2", "no worse", "clm, prefix", "own bits a byte", 0.02)),
    "future_on_code": Claim(
        "predicting two or four tokens makes the first one better, on Python source, at equal "
        "steps and beside clm for 1.4 times the steps",
        "Gloeckle et al. 2024: better from 3 billion parameters on, mostly best with four, worse "
        "far below",
        arms_of("clm", longer="clm --max_steps=1.4x", chain2="mtp --n_future=2",
                parallel2="mtp --n_future=2 --mtp_heads=parallel", chain4="mtp",
                parallel4="mtp --mtp_heads=parallel", each="--data=python"),
        compared("chain2, parallel2, chain4, parallel4", "better", "clm", "own bits a byte", 0.02)
        + compared("chain2, chain4, parallel4", "better", "longer", "own bits a byte", 0.02)),
    "bytes_on_code": Claim(
        "words from a BPE are better than bytes, at equal positions, on Python source",
        "Xue et al. 2022 (ByT5): as good at equal positions, small models even better",
        arms_of("clm", bytes="clm --tokenizer=bytes --block_size=512 --batch_size=8",
                each="--data=python"),
        compared("clm", "better", "bytes", "own bits a byte", 0.02)),
    "data_repeats": Claim(
        "where data repeats, diffusion goes on better than clm, whenever that was stopped",
        "Prabhudesai et al. 2025; Ni et al. 2025: diffusion gains where clm overfits",
        arms_of(diffusion="diffusion --data=stories:400 --max_steps=3x",
                clm50="clm --data=stories:400 --max_steps=0.1x",
                clm100="clm --data=stories:400 --max_steps=0.2x",
                clm200="clm --data=stories:400 --max_steps=0.4x",
                clm400="clm --data=stories:400 --max_steps=0.8x"),
        compared("diffusion", "better", "clm50, clm100, clm200, clm400", "bits a byte", 0.05)),
    "hidden_inputs": Claim(
        "where data repeats, clm that reads a part of its inputs as [MASK] does not spoil, and "
        "goes on as well as diffusion",
        "Ni et al. 2025: noise in the inputs helps clm, but does not close the gap",
        arms_of(diffusion="diffusion --data=stories:400 --max_steps=3x",
                clm400="clm --data=stories:400 --max_steps=0.8x",
                hidden100="clm --hidden_inputs=0.3 --data=stories:400 --max_steps=0.2x",
                hidden400="clm --hidden_inputs=0.3 --data=stories:400 --max_steps=0.8x",
                hidden1500="clm --hidden_inputs=0.3 --data=stories:400 --max_steps=3.0x"),
        compared("hidden400", "better", "clm400", "bits a byte", 0.05)
        + compared("hidden1500", "no worse", "hidden100, diffusion", "bits a byte", 0.05)),
    "neighbors_help": Claim(
        "a share of the two tokens beside it in each embedding makes copying learned sooner, "
        "at equal steps",
        "Allen-Zhu 2025 (Canon layers): in every block, better at recall and reasoning",
        arms_of(fim="fim --value_embed=False --short_conv=True",
                fim_plain="fim --value_embed=False --short_conv=False", each="--max_steps=2x")
        | arms_of(mlm="mlm --value_embed=False --short_conv=True",
                  mlm_plain="mlm --value_embed=False --short_conv=False")
        | arms_of(clm="clm --value_embed=False --short_conv=True",
                  clm_plain="clm --value_embed=False --short_conv=False", each="--data=python"),
        compared("fim", "better", "fim_plain",
                 "holes filled right (psm), holes filled right (spm)", 0.05)
        + compared("mlm", "better", "mlm_plain", "masked words found", 0.05)
        + compared("clm", "better", "clm_plain", "own bits a byte", 0.02)),
    "mlm_represents": Claim(
        "states of mlm tell which words fit better than those of clm: at equal steps, and at equal "
        "targets (clm for 0.15 of the steps)",
        "Devlin et al. 2019: both directions understand better than one",
        arms_of("mlm", "clm", fewer="clm --max_steps=0.15x"),
        compared("mlm", "better", "clm, fewer", "word fits", 0.02)),
    "names_on_code": Claim(
        "states of mlm tell what a name in Python source is for (called, assigned to, read) better "
        "than those of clm, at equal steps and at equal targets, and than those of electra; those "
        "of mlm that masks 40% as well",
        "Devlin et al. 2019: both directions understand better than one; Clark et al. 2020: "
        "detecting represents better; Wettig et al. 2023: 40% is better than 15%",
        arms_of("mlm", "clm", "electra", fewer="clm --max_steps=0.15x",
                mlm40="mlm --mask_rate=0.4", each="--data=python"),
        compared("mlm", "better", "clm, fewer, electra", "roles of names", 0.02)
        + compared("mlm40", "no worse", "mlm", "roles of names", 0.02)),
    "documents_on_code": Claim(
        "the mean of mlm's states tells better than that of clm's or electra's from which document "
        "a window is, on Python source",
        "Devlin et al. 2019: both directions understand better than one",
        arms_of("mlm", "clm", "electra", each="--data=python"),
        compared("mlm", "better", "clm, electra", "documents", 0.02)),
    "drafts_on_code": Claim(
        "a chain of three heads saves more passes than three parallel heads, on Python source, and "
        "more time",
        "DeepSeek-V3 2024: 85% to 90% of second tokens kept, 1.8 times as fast; Gloeckle et al. "
        "2024: 2.5 of 3 drafts, 3 times as fast",
        arms_of(chain4="mtp", parallel4="mtp --mtp_heads=parallel", each="--data=python"),
        compared("chain4", "better", "parallel4", "tokens a pass at temperature 0, "
                 "tokens a pass at temperature 0.8, times as fast at temperature 0, "
                 "times as fast at temperature 0.8", 0.1)),
    "masking_rate_on_code": Claim(
        "masking 40% fills masks as well as 15%, on Python source",
        "Wettig et al. 2023: 40% is better than 15% for large models",
        arms_of(mlm15="mlm", mlm40="mlm --mask_rate=0.4", each="--data=python"),
        compared("mlm40", "no worse", "mlm15", "masks of 15%, masks of 40%", 0.05)),
    "retrieval_on_code": Claim(
        "partners are found better if the first half of the steps was clm or mlm, on Python source",
        "Izacard et al. 2022 start from BERT",
        arms_of("clm", "mlm", longer="contrastive --max_steps=2x", each="--data=python")
        | arms_of(from_clm="contrastive '--init_from=@clm --data=python'",
                  from_mlm="contrastive '--init_from=@mlm --data=python'"),
        compared("from_mlm, from_clm", "better", "longer", "second parts found", 0.02)),
    "replay": Claim(
        "a few rows of the old text keep it from being forgotten, and cost the new text nothing",
        "Ibrahim et al. 2024: 5% of replay for a weak shift, 25% for a strong one",
        arms_of("clm", none="clm --data=python --init_from=@clm",
                replay5="clm --data=python --init_from=@clm --replay_data=stories",
                replay25="clm --data=python --init_from=@clm --replay_data=stories "
                         "--replay_rate=0.25"),
        compared("replay5", "better", "none", "bits a byte", 0.05)
        + compared("replay5, replay25", "no worse", "clm", "bits a byte", 0.01)
        + compared("replay5, replay25", "no worse", "none", "val_loss", 0.02)),
}
# fmt: on


# ---- verdicts ------------------------------------------------------------------------------------


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

    The arm's gain is known to within `noise`, twice the deviation of the difference of two single
    runs. "better" is supported where the gain is surely above zero and itself above the margin, and
    refuted where it is surely below the margin. "no worse" is supported where the arm surely does
    not lag by the margin, and refuted where it surely does.

    >>> better = Comparison("b", "better", "a", "bits a byte", 0.01)
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


def judge(claim: Claim, c: Comparison, measured: Callable) -> tuple[str, str]:
    """The figures of both arms, or why there are none, and the verdict, or "". measured(flags): the
    scores of each seed of an arm."""
    runs = [measured(claim.arms[name]) for name in (c.arm, c.other)]
    values = [[scores[c.score] for scores in each if c.score in scores] for each in runs]
    if not all(values):
        return "no such score" if all(runs) else "not run", ""
    arm, other = map(figure, values)
    return f"{arm} and {other}", verdict(c, arm, other)


def section(name: str, claim: Claim, measured: Callable) -> list[str]:
    """Markdown: the claim, its figures, the verdicts."""
    lines = [f"### {claim.says[0].upper()}{claim.says[1:]}", ""]
    lines.append(f"Published: {claim.published}. (`--claims={name}`)")
    lines += ["", "| comparison | margin | by | figures | verdict |", "|---|---|---|---|---|"]
    for c in claim.comparisons:
        figures, found = judge(claim, c, measured)
        about = f"{c.arm} {c.kind} than {c.other} | {c.margin} | {c.score}"
        shown = f" **{found}**" if found else ""
        lines.append(f"| {about} | {figures} |{shown} |")
    return [*lines, ""]


def drawing_of(width: float, height: float):
    """An empty picture; None, and a line about how to get it, without matplotlib."""
    try:
        import matplotlib.figure
    except ImportError:
        print("pictures need matplotlib: pip install matplotlib")
        return None
    return matplotlib.figure.Figure(figsize=(width, height), layout="constrained")


def color_of(verdicts: set[str]) -> str:
    """The color of an arm's figure: black without a verdict, gray if its verdicts differ."""
    if not verdicts:
        return "black"
    if len(verdicts) > 1:
        return "gray"
    [verdict] = verdicts
    return {"supported": "green", "refuted at this size": "red"}.get(verdict, "gray")


def plot_claims(claims: list[Claim], measured: Callable, path: Path) -> None:
    """A panel for each score that decides a claim: its arms, mean ± deviation over the seeds, in
    the color of their verdict."""
    panels = []
    for claim in claims:
        scores = dict.fromkeys(c.score for c in claim.comparisons)
        panels += [(claim, score) for score in scores]
    columns = min(len(panels), 4)
    rows = math.ceil(len(panels) / columns)
    drawing = drawing_of(3.5 * columns, 2.7 * rows + 0.3)
    if drawing is None:
        return
    legend = (
        "supported: green, refuted at this size: red, cannot tell or mixed: gray, black: what "
        "these are compared with; a score that names no unit: nats if lower is better, else the "
        "share of right answers"
    )
    drawing.suptitle(textwrap.fill(legend, 56 * columns), fontsize=8)
    for place, (claim, score) in enumerate(panels, 1):
        axes = drawing.add_subplot(rows, columns, place)
        for arm, flags in claim.arms.items():
            values = [run[score] for run in measured(flags) if score in run]
            if values:
                decided_by = [c for c in claim.comparisons if (c.arm, c.score) == (arm, score)]
                color = color_of({judge(claim, c, measured)[1] for c in decided_by})
                mean, sd, _ = figure(values)
                axes.errorbar([arm], [mean], yerr=[sd], fmt="o", color=color)
        axes.set_title(textwrap.fill(claim.says, 44), fontsize=8)
        lower = "\n(lower is better)" if score in LOWER_IS_BETTER else ""
        axes.set_ylabel(score + lower, fontsize=8)
        axes.tick_params(labelsize=7)
        axes.margins(0.2)
    drawing.savefig(path, dpi=80)
    print(f"wrote {path}")
