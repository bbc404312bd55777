"""claims.py: what textbooks claim about pre-training objectives, and the runs that decide.

Each claim is an entry of CLAIMS: its arms and the comparisons of their scores, written down before
the claim's first run (RESULTS.md names the exceptions, and what papers say). compare.py trains
and measures the arms.
"""

import itertools
import textwrap
from math import ceil, hypot, inf
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from lab.skills import N_STORIES
from lab.yardsticks import OTHER_ROWS, PREFIXES, SPANS

Scores = dict[str, list[dict[str, float]]]  # flags of an arm -> the scores of each of its runs


class Comparison(NamedTuple):
    """Two arms, compared by one score. `margin` is the difference that matters."""

    arm: str
    kind: str  # "no worse" or "better"
    other: str
    score: str
    margin: float


class Claim(NamedTuple):
    """What textbooks say, and what decides: comparisons of arms (runs with the same flags)."""

    text: str
    shared_flags: str  # of all arms
    rules: list[tuple]  # (arms, kind, others, scores, margin); all combinations are compared

    def flags(self, arm: str) -> str:
        return f"{ARMS.get(arm, arm)} {self.shared_flags}".strip()

    @property
    def comparisons(self) -> list[Comparison]:
        found = []
        for arms, kind, others, scores, margin in self.rules:
            names = [text.split(", ") for text in (arms, others, scores)]
            for arm, other, score in itertools.product(*names):
                found.append(Comparison(arm, kind, other, score, margin))
        return found

    @property
    def arms(self) -> list[str]:
        compared = self.comparisons
        return list(dict.fromkeys([c.arm for c in compared] + [c.other for c in compared]))


def in_order(arms: str, score: str, margin: float) -> list[tuple]:
    """Rules: each arm is better than the next."""
    names = arms.split(", ")
    return [(arm, "better", other, score, margin) for arm, other in itertools.pairwise(names)]


# fmt: off
# The objective and the flags of a run. An arm that is not listed is an objective without flags.
# --max_steps=2x: twice compare.py's --max_steps. --init_from=@ARM starts from the weights of the
# run that has ARM's objective and flags (in quotes if there are any flags) and the same seed.
# --mask_shares=0.9,0: of mlm's targets, 90% become [MASK], 0% random tokens, and the others stay.
# --hidden_inputs=0.3: 30% of clm's inputs become [MASK], and every target is still predicted.
ARMS = {
    "before": "clm",
    "hidden 0.2x": "clm --hidden_inputs=0.3 --max_steps=0.2x",
    "hidden 0.8x": "clm --hidden_inputs=0.3 --max_steps=0.8x",
    "hidden 3x": "clm --hidden_inputs=0.3 --max_steps=3x",
    "bytes": "clm --tokenizer=bytes --block_size=512 --batch_size=8",
    "no old rows": "clm --data=python --init_from=@clm",
    "5% old rows": "clm --data=python --init_from=@clm --replay_data=stories",
    "25% old rows": "clm --data=python --init_from=@clm --replay_data=stories --replay_rate=0.25",
    "clm with conv": "clm --value_embed=False --short_conv=True --data=python",
    "clm without": "clm --value_embed=False --short_conv=False --data=python",
    "fim 50%": "fim --fim_rate=0.5",
    "fim 90%": "fim --fim_rate=0.9",
    "psm": "fim --fim_layouts=psm",
    "spm": "fim --fim_layouts=spm",
    "psm + spm": "fim",
    "psm + spm2": "fim --fim_layouts=psm,spm2",
    "cut in characters": "fim",
    "cut in tokens": "fim --fim_cuts=tokens",
    "fim with conv": "fim --value_embed=False --short_conv=True --max_steps=2x",
    "fim without": "fim --value_embed=False --short_conv=False --max_steps=2x",
    "chain of 2": "mtp --n_future=2 --mtp_heads=chain",
    "chain of 4": "mtp --mtp_heads=chain",
    "parallel 2": "mtp --n_future=2 --mtp_heads=parallel",
    "parallel 4": "mtp --mtp_heads=parallel",
    "linear 4": "mtp --mtp_heads=linear",
    "15% masked": "mlm",
    "100/0/0": "mlm --mask_shares=1,0",
    "90/0/10": "mlm --mask_shares=0.9,0",
    "80/10/10": "mlm",
    "mlm after clm": "mlm --init_from=@clm",
    "mlm with conv": "mlm --value_embed=False --short_conv=True",
    "mlm without": "mlm --value_embed=False --short_conv=False",
    "clm + mlm": "clm:0.5,mlm:0.5",
    "clm + mntp": "clm:0.5,mntp:0.5",
    "block of 4": "block --diffusion_block=4 --context_weight=0",
    "block of 16": "block --diffusion_block=16 --context_weight=0",
    "block of 4 + clm": "block --diffusion_block=4 --context_weight=1",
    "block of 16 + clm": "block --diffusion_block=16 --context_weight=1",
    "block of 4 2x": "block --diffusion_block=4 --context_weight=0 --max_steps=2x",
    "block of 16 2x": "block --diffusion_block=16 --context_weight=0 --max_steps=2x",
    "diffusion 3x": "diffusion --max_steps=3x",
    "alone": "contrastive --max_steps=2x",
    "after clm": "contrastive --init_from=@clm",
    "after mlm": "contrastive --init_from=@mlm",
    "after clm on code": "contrastive '--init_from=@clm --data=python'",
    "after mlm on code": "contrastive '--init_from=@mlm --data=python'",
    "alone on code": "contrastive --max_steps=2x --data=python",
}
ARMS |= {f"clm {x}x": f"clm --max_steps={x}x" for x in (0.1, 0.15, 0.2, 0.4, 0.8, 1.4)}
ARMS |= {f"mlm {x}x": f"mlm --max_steps={x}x" for x in (1.4, 2)}
ARMS |= {f"{p}% masked": f"mlm --mask_rate={p / 100}" for p in (10, 30, 40, 60)}
ARMS |= {f"prefix of {p}%": f"prefix --prefix_frac={p / 100}" for p in (10, *PREFIXES)}
ARMS |= {f"spans of {n}": f"span --corruption_rate=0.5 --mean_span={n}" for n in SPANS}

BITS = ["bits per byte", "bits per byte of own text"]
LOWER_IS_BETTER = [*BITS, *(f"{bits} at most" for bits in BITS), "val_loss", *OTHER_ROWS]
# The best possible scores: of shares 1, of the second halves and the rows of stories their entropy,
# computed from the grammar. Infinity: not known.
BEST = dict.fromkeys(LOWER_IS_BETTER, -inf) | {"bits per byte": 0.1001}
BEST |= {"prefix of 25%": 0.4895, "prefix of 50%": 0.4923, "prefix of 75%": 0.5558}
for t in (0, 0.8):
    BEST |= {f"tokens per pass at temperature {t}": inf, f"times as fast at temperature {t}": inf}
RETRIEVED = f"second halves found among {N_STORIES}"

CLAIMS = {
    "fim_is_free": Claim("fim costs nothing in left-to-right prediction", "--max_steps=0.3x",
        [("fim 50%, fim 90%", "no worse", "clm", "bits per byte", 0.01)]),
    "fim_on_code": Claim(
        "fim costs nothing in left-to-right prediction, on Python source", "--data=python",
        [("fim 50%, fim 90%", "no worse", "clm", "bits per byte of own text", 0.02)]),
    "both_worlds": Claim("ul2 continues text as well as clm and prefix", "--max_steps=0.3x",
        [("ul2", "no worse", "clm, prefix", "bits per byte", 0.01)]),
    "both_worlds_on_code": Claim(
        "ul2 continues text as well as clm and prefix, on Python source", "--data=python",
        [("ul2", "no worse", "clm, prefix", "bits per byte of own text", 0.02)]),
    "future_helps": Claim(
        "training to predict two tokens improves the first one", "--max_steps=0.3x",
        [("chain of 2, parallel 2", "better", "clm", "bits per byte", 0.01)]),
    "future_on_code": Claim(
        "training to predict two or four tokens improves the first one, on Python source, also "
        "beside clm for 1.4 times the steps", "--data=python",
        [("chain of 2, parallel 2, chain of 4, parallel 4, linear 4", "better", "clm",
          "bits per byte of own text", 0.02),
         ("chain of 2, chain of 4, parallel 4, linear 4", "better", "clm 1.4x",
          "bits per byte of own text", 0.02)]),
    "drafts_on_code": Claim(
        "a chain of three heads saves more passes and more time than three parallel heads, on "
        "Python source", "--data=python",
        [("chain of 4", "better", "parallel 4", "tokens per pass at temperature 0, "
          "tokens per pass at temperature 0.8, times as fast at temperature 0, "
          "times as fast at temperature 0.8", 0.1)]),
    "bytes_on_code": Claim(
        "BPE is better than bytes, at equal positions, on Python source",
        "--data=python", [("clm", "better", "bytes", "bits per byte of own text", 0.02)]),
    "mixed": Claim("clm and mlm in one model, half the rows each, are as good as either alone", "",
        [("clm + mlm", "no worse", "clm", "bits per byte", 0.01),
         ("clm + mlm", "no worse", "mlm", "masked words found", 0.05)]),
    "block_interpolates": Claim(
        "block diffusion lies between clm and diffusion: the smaller the block, the fewer bits", "",
        in_order("clm, block of 4, block of 16, diffusion", "bits per byte at most", 0.02)),
    "block_interpolates_on_code": Claim(
        "block diffusion lies between clm and diffusion, on Python source", "--data=python",
        in_order("clm, block of 4, block of 16, diffusion",
                 "bits per byte of own text at most", 0.02)),
    "block_and_clm": Claim(
        "block diffusion lies between clm and diffusion, if clean text is predicted, too", "",
        in_order("clm, block of 4 + clm, block of 16 + clm, diffusion",
                 "bits per byte at most", 0.02)),
    "block_and_clm_on_code": Claim(
        "block diffusion lies between clm and diffusion, if clean text is predicted, too, on "
        "Python source", "--data=python",
        in_order("clm, block of 4 + clm, block of 16 + clm, diffusion",
                 "bits per byte of own text at most", 0.02)),
    "blocks_at_equal_text": Claim(
        "block diffusion lies between clm and diffusion if it reads as much text as they do, "
        "in twice as many rows", "",
        in_order("clm, block of 4 2x, block of 16 2x, diffusion",
                 "bits per byte at most", 0.02)),
    "one_after_another": Claim(
        "filled one after another (plm), the holes of a word that is hidden everywhere agree more "
        "often than if all are filled at once (mlm)", "",
        [("plm", "better", "mlm", "holes of one word filled alike", 0.05)]),
    "one_after_another_on_code": Claim(
        "filled one after another (plm), the holes of a word that is hidden everywhere agree more "
        "often than if all are filled at once (mlm), on Python source", "--data=python",
        [("plm", "better", "mlm", "holes of one word filled alike", 0.05)]),
    "hybrid": Claim(
        "GPT-BERT's hybrid, clm and mntp in one model, fills masks better than mlm and continues "
        "text better than clm, at equal steps", "",
        [("clm + mntp", "better", "mlm", "masks of 15%, masks of 40%", 0.05),
         ("clm + mntp", "better", "clm", "bits per byte", 0.01)]),
    "hybrid_on_code": Claim(
        "GPT-BERT's hybrid fills masks better than mlm and continues text better than clm, at "
        "equal steps, on Python source", "--data=python",
        [("clm + mntp", "better", "mlm", "masks of 15%, masks of 40%", 0.05),
         ("clm + mntp", "better", "clm", "bits per byte of own text", 0.02)]),
    "data_repeats": Claim(
        "if the data is repeated, diffusion beats clm, whenever that was stopped",
        "--data=stories:400",
        [("diffusion 3x", "better", "clm 0.1x, clm 0.2x, clm 0.4x, clm 0.8x",
          "bits per byte", 0.05)]),
    "hidden_inputs": Claim(
        "if the data is repeated, clm with 30% of its inputs hidden does not overfit, and equals "
        "diffusion", "--data=stories:400",
        [("hidden 0.8x", "better", "clm 0.8x", "bits per byte", 0.05),
         ("hidden 3x", "no worse", "hidden 0.2x, diffusion 3x", "bits per byte", 0.05)]),
    "replay": Claim(
        "a few rows of an old text keep it from being forgotten, at no cost to the new text", "",
        [("5% old rows", "better", "no old rows", "bits per byte", 0.05),
         ("5% old rows, 25% old rows", "no worse", "before", "bits per byte", 0.01),
         ("5% old rows, 25% old rows", "no worse", "no old rows", "val_loss", 0.02)]),

    "masking_rate": Claim(
        "masking 15% teaches to fill single words at least as well as any other rate, and masking "
        "40% represents a text as well", "",
        [("15% masked", "no worse", "10% masked, 30% masked, 40% masked, 60% masked",
          "masked words found", 0.05),
         ("40% masked", "no worse", "15% masked", "first event", 0.02)]),
    "masking_rate_on_code": Claim(
        "masking 40% fills masks as well as 15%, on Python source", "--data=python",
        [("40% masked", "no worse", "15% masked", "masks of 15%, masks of 40%", 0.05)]),
    "pairs": Claim(
        "judging pairs of texts beside mlm costs the filling of masks nothing, and its states tell "
        "better which words fit", "",
        [("nsp, sop", "no worse", "mlm", "masked words found in short stories", 0.05),
         ("nsp, sop", "better", "mlm", "word fits", 0.02)]),
    "mlm_after_clm": Claim("a model fills masks better if the first half of its steps was clm", "",
        [("mlm after clm", "better", "mlm 2x", "masked words found", 0.02)]),
    "layouts_share": Claim(
        "psm and spm trained together fill holes as well as each alone", "--max_steps=2x",
        [("psm + spm", "no worse", "psm", "holes filled right (psm)", 0.05),
         ("psm + spm", "no worse", "spm", "holes filled right (spm)", 0.05)]),
    "spm_form": Claim(
        "beside psm, spm is learned better with the middle right after the prefix (spm2)",
        "--max_steps=2x",
        [("psm + spm2", "better", "psm + spm", "holes filled right, holes inside words", 0.05),
         ("psm + spm2", "no worse", "psm + spm", "holes filled right (psm)", 0.05)]),
    "cuts": Claim(
        "cuts between tokens in training: holes of whole words are filled, not those inside words",
        "--max_steps=2x",
        [("cut in tokens", "better", "cut in characters", "holes filled right", 0.05),
         ("cut in characters", "better", "cut in tokens", "holes inside words", 0.05)]),
    "span_lengths": Claim(
        "spans of each mean length are predicted best after training on that length", "",
        [(f"spans of {n}", "better", f"spans of {other}", f"spans of {n}", 0.02)
         for n in SPANS for other in SPANS if other != n]),
    "prefix_shares": Claim(
        "prefixes of any length in training are as good for one length as that length alone", "",
        [*(("prefix", "no worse", f"prefix of {p}%", f"prefix of {p}%", 0.02) for p in PREFIXES),
         ("prefix of 75%", "better", "prefix of 10%, prefix of 25%, prefix of 50%",
          "prefix of 75%", 0.02)]),
    "neighbors_help": Claim(
        "a share of the two tokens beside it in each embedding makes copying learned sooner", "",
        [("fim with conv", "better", "fim without",
          "holes filled right (psm), holes filled right (spm)", 0.05),
         ("mlm with conv", "better", "mlm without", "masked words found", 0.05),
         ("clm with conv", "better", "clm without", "bits per byte of own text", 0.02)]),

    "mlm_represents": Claim(
        "states of mlm tell which words fit better than those of clm: at equal steps, and at equal "
        "targets (clm for 0.15 of the steps)", "",
        [("mlm", "better", "clm, clm 0.15x", "word fits", 0.02)]),
    "visible_targets": Claim(
        "mlm's states tell which words fit because some targets stay visible: if all are masked "
        "(100/0/0), they tell it less well, but better than clm's, and masks are filled as well",
        "",
        [("90/0/10, 80/10/10", "better", "100/0/0", "word fits", 0.02),
         ("90/0/10", "no worse", "80/10/10", "word fits", 0.02),
         ("100/0/0", "better", "clm", "word fits", 0.02),
         ("100/0/0", "no worse", "80/10/10", "masked words found", 0.05)]),
    "names_on_code": Claim(
        "states of mlm tell what a name in Python source is for (called, assigned to, read) better "
        "than those of clm, at equal steps and at equal targets, and than those of electra; those "
        "of mlm that masks 40% as well", "--data=python",
        [("mlm", "better", "clm, clm 0.15x, electra", "roles of names", 0.02),
         ("40% masked", "no worse", "mlm", "roles of names", 0.02)]),
    "documents_on_code": Claim(
        "the mean of mlm's states tells better than that of clm's or electra's from which document "
        "a window is, on Python source", "--data=python",
        [("mlm", "better", "clm, electra", "documents", 0.02)]),
    "detecting_represents": Claim(
        "electra represents a text better than mlm, also beside mlm for 1.4 times the steps (a "
        "step of electra takes 1.2 times as long)", "",
        [("electra", "better", "mlm, mlm 1.4x", "first event", 0.02)]),
    "retrieval_starts": Claim(
        "partners are found better if the first half of the steps was clm or mlm, best if mlm", "",
        [("after mlm, after clm", "better", "alone", RETRIEVED, 0.02),
         ("after mlm", "better", "after clm", RETRIEVED, 0.02)]),
    "retrieval_on_code": Claim(
        "partners are found better if the first half of the steps was clm or mlm, on Python source",
        "",
        [("after mlm on code, after clm on code", "better", "alone on code",
          "second parts found", 0.02)]),
}
# fmt: on


# ---- verdicts ------------------------------------------------------------------------------------


def mean_and_deviation(values: list[float]) -> str:
    """Mean and deviation over the seeds.

    >>> mean_and_deviation([0.125, 0.135]), mean_and_deviation([1800, 2100])
    ('0.13 ± 0.0071', '1,950 ± 210')
    """
    text = rounded(fmean(values), 3)
    return f"{text} ± {rounded(stdev(values), 2)}" if len(values) > 1 else text


def rounded(x: float, digits: int) -> str:
    """The number without an exponent: 212.1 with 2 digits is 210."""
    return f"{float(f'{x:.{digits}g}'):,g}"


def verdict(c: Comparison, arm: list[float], other: list[float]) -> str:
    """Supported, refuted (at this size and length), no room, or cannot tell: by all seeds' scores.

    The arm's gain is known to within `noise`, twice the deviation of the difference of two single
    runs. "better" is supported if the gain is above the margin and surely above zero, and refuted
    if the gain is surely below the margin. It needs room: `other` at least a margin away from the
    best possible score. "no worse" is supported if the arm surely does not lag by as much as the
    margin, and refuted if it surely does. It needs one arm further than the margin from the best.

    >>> verdict(Comparison("b", "better", "a", "bits per byte", 0.01), [0.2, 0.2], [0.24, 0.26])
    'supported'
    """
    if min(len(arm), len(other)) < 2:
        return "cannot tell"
    gain = fmean(arm) - fmean(other)
    if c.score in LOWER_IS_BETTER:
        gain = -gain
    noise = 2 * hypot(stdev(arm), stdev(other))
    room = [abs(BEST.get(c.score, 1.0) - fmean(values)) for values in (arm, other)]
    if c.kind == "better":
        no_room = room[1] < c.margin
        supported = gain > max(c.margin, noise)
        refuted = gain + noise < c.margin
    else:
        no_room = max(room) <= c.margin
        supported = gain - noise > -c.margin
        refuted = gain + noise < -c.margin
    if no_room:
        return "no room"
    if supported:
        return "supported"
    return "refuted" if refuted else "cannot tell"


def judged(claim: Claim, scores: Scores) -> list[tuple]:
    """Each comparison, the values of its score for both arms, and the verdict, which is "" if an
    arm does not have this score."""
    found = []
    for c in claim.comparisons:
        both = [scores[claim.flags(name)] for name in (c.arm, c.other)]
        arm, other = ([run[c.score] for run in runs if c.score in run] for runs in both)
        found.append((c, arm, other, verdict(c, arm, other) if arm and other else ""))
    return found


def section(claim: Claim, scores: Scores) -> list[str]:
    """Markdown: the claim, its figures, the verdicts."""
    lines = [f"### {claim.text[0].upper()}{claim.text[1:]}", ""]
    lines += ["| comparison | margin | by | figures | verdict |", "|---|---|---|---|---|"]
    for c, arm, other, found in judged(claim, scores):
        about = f"{c.arm} {c.kind} than {c.other} | {c.margin} | {c.score}"
        figures = "no such score"
        if found:
            figures = f"{mean_and_deviation(arm)} and {mean_and_deviation(other)}"
        lines.append(f"| {about} | {figures} | {found} |")
    return [*lines, ""]


# ---- pictures ------------------------------------------------------------------------------------

COLORS = {"supported": "tab:green", "refuted": "tab:red", "": "black"}
LEGEND = "green: supported, red: refuted, gray: undecided, no room or mixed, black: the baseline"


def drawing_of(width: float, height: float):
    """An empty figure. Without matplotlib: None, and a printed line that says what to install."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("pictures need matplotlib: pip install matplotlib")
        return None
    return Figure(figsize=(width, height), layout="constrained")


def plot_claims(claims: list[Claim], scores: Scores, path: Path) -> None:
    """Draw a panel for each score that decides a claim. It shows the claim's arms, mean ± deviation
    over the seeds, in the colors of their verdicts."""
    panels = []
    for claim in claims:
        panels += [(claim, score) for score in dict.fromkeys(c.score for c in claim.comparisons)]
    columns = min(len(panels), 3)
    rows = ceil(len(panels) / columns)
    drawing = drawing_of(max(3.4 * columns, 7), 2.8 * rows + 0.3)
    if drawing is None:
        return
    drawing.supxlabel(LEGEND, fontsize=10)
    for place, (claim, score) in zip(drawing.subfigures(rows, columns, squeeze=False).flat, panels):
        place.suptitle(textwrap.fill(f"Claim: {claim.text}", 46), fontsize=10)
        draw_panel(place.add_subplot(), claim, score, scores)
    drawing.savefig(path, dpi=160)
    print(f"wrote {path}")


def draw_panel(axes, claim: Claim, score: str, scores: Scores) -> None:
    values = {}
    verdicts = {arm: set() for arm in claim.arms}
    for c, arm, other, found in judged(claim, scores):
        if c.score == score:
            values |= {c.arm: arm, c.other: other}
            verdicts[c.arm] |= {found} - {""}  # "": no such score
    for arm in reversed([arm for arm in claim.arms if values.get(arm)]):  # from the bottom up
        # Black: other arms are compared with it. Gray: what is not a key of COLORS.
        color = COLORS.get(" and ".join(verdicts[arm]), "tab:gray")
        deviation = stdev(values[arm]) if len(values[arm]) > 1 else 0
        axes.errorbar(fmean(values[arm]), arm, xerr=deviation, fmt="o", markersize=7, color=color)
    better = "lower" if score in LOWER_IS_BETTER else "higher"
    unit = ", nats" if score in (*OTHER_ROWS, "val_loss") else ""
    axes.set_xlabel(f"{score}{unit}\n({better} is better)", fontsize=10)
    axes.margins(x=0.1, y=0.3)
    axes.locator_params(axis="x", nbins=5, steps=[1, 2, 5, 10])  # more numbers would overlap
    axes.grid(axis="x", alpha=0.3)
