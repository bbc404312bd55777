"""pages.py: the pages of atlas.py, in Markdown: from docstrings, tables of the code, and runs."""

import inspect
import re
import shlex
import textwrap
from pathlib import Path
from statistics import fmean

import objectives
from lab.chart import first_skill
from lab.claims import CLAIMS
from lab.skills import Skill, report
from objectives import OBJECTIVES, Knobs, Objective, parse_mixture
from util import flags_of, short
from view import about

RESULTS = Path(__file__).with_name("RESULTS.md")
N_CLAIMS = 8  # most claims on a page
N_NEAREST = 3  # other objectives on a page
FIELDS = ("loss", "attention", "tasks", "knobs", "heads", "likelihood")  # that are compared
# fmt: off
ARXIV = {  # the paper that a docstring names first
    "prefix": "1910.10683", "fim": "2207.14255", "cm3": "2201.07520", "mtp": "2404.19737",
    "span": "1910.10683", "ul2": "2205.05131", "bart": "1910.13461", "mlm": "1810.04805",
    "mntp": "2404.05961", "nsp": "1810.04805", "sop": "1909.11942", "electra": "2003.10555",
    "diffusion": "2406.07524", "block": "2503.09573", "plm": "1906.08237",
    "contrastive": "2112.09118",
}
# fmt: on


# ---- a page -------------------------------------------------------------------------------------


def page(name: str, runs: dict[str, dict]) -> str:
    """A page about an objective, in Markdown; without a run, what was measured is left out."""
    letters = "[all objectives, and the letters of examples](README.md)"
    links = [f"`python train.py --objective={name}`", letters]
    if name in ARXIV:
        links.insert(0, f"arXiv [{ARXIV[name]}](https://arxiv.org/abs/{ARXIV[name]})")
    picture = f"![On a short text: what {name} reads, what it asks, who sees whom]({name}.svg)"
    explanation, differs = parts_of_docstring(name)
    parts = [f"# {name}", about(name), " · ".join(links), picture, *explanation]
    if name in runs:
        parts += figures(name, runs)
    parts += [knobs(name), differs, claims(name), functions(name), nearest(name)]
    return "\n\n".join(filter(None, parts)) + "\n"


def parts_of_docstring(name: str) -> tuple[list[str], str]:
    """The paragraphs after the first, with examples as blocks of code; then what differs. If there
    is no example, that of the loss is shown (electra)."""
    entry = OBJECTIVES[name]
    _, *parts = inspect.getdoc(entry.row).split("\n\n")
    [differs] = [part for part in parts if part.startswith("Differs:")] or [""]
    parts = [part for part in parts if part != differs]
    if not any(map(is_example, parts)):
        parts += filter(is_example, inspect.getdoc(entry.loss).split("\n\n"))
    shown = [code(textwrap.dedent(part)) if is_example(part) else part for part in parts]
    return shown, differs.replace("Differs:", "**Differs:** what papers or their code do otherwise")


def is_example(paragraph: str) -> bool:
    return paragraph.startswith("    ")


def code(text: str) -> str:
    return f"```\n{text}\n```"


def table(head: list[str], *rows: list) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def figures(name: str, runs: dict[str, dict]) -> list[str]:
    """The curves, an answer and all right answers, and what they cost."""
    run = runs[name]
    speed = short(run["tokens_per_s"])
    clm = runs.get("clm", {"machine": ""})
    if name != "clm" and clm["machine"] == run["machine"]:
        speed += f" ({run['tokens_per_s'] / clm['tokens_per_s']:.2f} times clm's)"
    skills = {skill: Skill(*shares) for skill, shares in run["skills"].items()}
    cost = [f"{run['steps']:,}", f"{run['minutes']:.1f}", speed, run["machine"]]
    return [
        f"![Validation loss and right answers, by step]({name}-curve.svg)",
        code("\n".join([*run["answer"], "", *report(skills)])),
        table(["steps", "minutes of steps alone", "tokens a second", "machine"], cost),
    ]


def knobs(name: str) -> str:
    """A table of the flags that the objective reads; their help names the objectives first."""
    rows = []
    for field in flags_of(Knobs):
        if field.name in OBJECTIVES[name].knobs:
            default = "automatic" if field.default is None else field.default
            if isinstance(default, float):
                default = round(default, 3)
            rows.append([f"`--{field.name}`", default, field.metadata["help"].split(": ", 1)[1]])
    return table(["flag", "default", ""], *rows) if rows else ""


def claims(name: str) -> str:
    """A list of claims with this objective, those first whose arms are mostly its own, each with
    the verdict of its row in RESULTS.md, and those of more rows that link to it."""
    results = RESULTS.read_text()
    shares = {}
    verdicts = {}
    for key, claim in CLAIMS.items():
        rows = re.findall(rf"(?m)^\| \[(.*)\]\(#{key}\).* \| (.*) \|$", results)
        arms = [parse_mixture(claim.flags(arm).split()[0]) for arm in claim.arms]
        if rows and any(name in arm for arm in arms):
            shares[key] = fmean(name in arm for arm in arms)
            [(_, verdict), *others] = rows
            verdicts[key] = "; ".join([verdict, *(": ".join(row) for row in others)])
    lines = ["**Where it wins and loses:** claims, and their verdicts (?: cannot tell)"]
    order = sorted(shares, key=shares.get, reverse=True)
    for key in order[:N_CLAIMS]:
        lines.append(f"- [{CLAIMS[key].text}](../RESULTS.md#{key}): {verdicts[key]}")
    if order[N_CLAIMS:]:
        lines.append(f"- and {len(order[N_CLAIMS:])} more in [RESULTS.md](../RESULTS.md)")
    return "\n".join(lines) if shares else ""


def functions(name: str) -> str:
    links = []
    for function in (OBJECTIVES[name].row, OBJECTIVES[name].loss):
        line = inspect.getsourcelines(function)[1]
        links.append(f"[`{function.__name__}`](../../objectives.py#L{line})")
    return f"**Read** {links[0]}, which makes a row, and {links[1]}, its loss."


def nearest(name: str) -> str:
    """A list of the objectives whose entries in the table differ in the fewest fields; of equally
    many, those of the same attention first."""
    others = {}
    for other in OBJECTIVES:
        pairs = zip(Objective._fields, OBJECTIVES[name], OBJECTIVES[other])
        others[other] = [field for field, a, b in pairs if a != b and field in FIELDS]
    del others[name]
    lines = ["**Nearest:** what else differs in the table `OBJECTIVES`"]
    order = sorted(others, key=lambda other: (len(others[other]), "attention" in others[other]))
    for other in order[:N_NEAREST]:
        differ = ", ".join(others[other]) or "nothing"
        lines.append(f"- [{other}]({other}.md): {about(other, source=False)} *({differ})*")
    return "\n".join(lines)


# ---- the first page ----------------------------------------------------------------------------


def overview(runs: dict[str, dict]) -> str:
    """How the atlas was made; all objectives in one picture, and in one table."""
    parts = ["# Atlas of the objectives", how_it_was_made(runs)]
    if runs:
        parts.append("![Right answers of all objectives, by minutes of training](progress.svg)")
    rows = []
    for name in OBJECTIVES:
        picture = f'<a href="{name}.md"><img src="{name}.svg" width="520" alt="{name}"></a>'
        what = f"{about(name, source=False)}<br>{picture}"
        right = minutes = ""
        if runs.get(name, {}).get("skills"):  # none if rows are too short for a story
            minutes = f"{runs[name]['minutes']:.1f}"
            skill, share, chance = first_skill(runs[name])
            right = f"{skill}: **{share:.0%}** ({chance:.0%})"
        rows.append([f"[{name}]({name}.md)", what, right, minutes])
    parts.append(
        table(["", "on a short text", "right answers (guessing)", "minutes of steps"], *rows)
    )
    [letters] = re.findall(r"(?m)^In worked examples (?:.+\n)+", objectives.__doc__)
    return "\n\n".join([*parts, letters])


def how_it_was_made(runs: dict[str, dict]) -> str:
    words = "A page for each objective, made from the code and [RESULTS.md](../RESULTS.md)"
    if not runs:
        return f"{words}. `python -m lab.atlas` trains all, and adds what it measures."
    kinds = ("date", "commit", "machine", "flags")
    values = {kind: ", ".join(sorted({run[kind] for run in runs.values()})) for kind in kinds}
    command = "python -m lab.atlas"
    if values["flags"]:
        command += f" --flags={shlex.quote(values['flags'])}"
    made = f"{values['date']}, commit {values['commit']}, {values['machine']}"
    return f"{words}, and from {len(runs)} runs on the built-in stories by `{command}` ({made})."
