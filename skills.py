"""skills.py: what a model can do after its training, counted on stories that it has never seen.

Of each word, the built-in stories say whether the rest of its story determines it. So a skill is a
share of right answers, beside that of guessing and the best possible. There is one measurement for
each task in objectives.py's table: a new objective with a known task is measured too.

    python skills.py --out_dir=out/fim
"""

import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import stories
from config import UserError, build, flag, parse_flags, run_command
from generate import Decoder, Heads
from objectives import OBJECTIVES, embed_segments, fim_prompt, two_long_chunks
from sample import Reader, load

SEED = 20_000_000  # of the held-out stories: no corpus is drawn with it
N_STORIES = 200


class Skill(NamedTuple):
    """Shares between 0 and 1: of the model, of guessing, and a bound on what is possible."""

    value: float
    chance: float
    best: float = 1.0


class Hole(NamedTuple):
    """A word that its story determines, with the space before it, and the text on both sides."""

    before: str
    word: str
    after: str


def likeliest(reader: Reader, logits: Tensor) -> list[int]:
    """(T, V) logits -> the likeliest ordinary token at each position."""
    return logits[:, : reader.tok.n_ordinary].argmax(-1).tolist()


def write(reader: Reader, prompt: list[int], n: int, prefix: int = 0) -> str:
    """What the model writes after the prompt: at most n tokens, greedily, up to EOT."""
    decoder = Decoder(reader.model, block_size=reader.block_size)
    [new], _ = decoder.generate(prompt, n, stop=reader.tok.EOT, prefix=prefix)
    return reader.tok.decode(new)


# ---- questions with one right answer -------------------------------------------------------------


def held_out(n: int = N_STORIES) -> list[stories.Story]:
    """Stories of a seed of their own: of some 10^13, none is likely to be in a corpus."""
    rng = np.random.default_rng(SEED)
    return [stories.story(rng) for _ in range(n)]


def words_of(story: stories.Story, kind: str) -> list[Hole]:
    """The words of a kind: "past", fixed by the text before, or "both", by what is around them."""
    text = story.text
    found = []
    for span in story.determined:
        start = span.start
        if text[:start].endswith(" "):
            start -= 1
        if span.kind == kind:
            found.append(Hole(text[:start], text[start : span.stop], text[span.stop :]))
    return found


def holes(n: int = N_STORIES) -> list[Hole]:
    """One word from each of n stories, which the text on both sides determines."""
    rng = np.random.default_rng(SEED)
    found = [words_of(story, "both") for story in held_out(n)]
    return [words[rng.integers(len(words))] for words in found]


def skill(right: list[bool], answers: list[str]) -> Skill:
    """The share that is right, beside always giving the commonest answer of the word's kind."""
    kinds = {}
    for answer in answers:
        kinds.setdefault(kind_of(answer.strip()), []).append(answer)
    guessed = sum(Counter(group).most_common(1)[0][1] for group in kinds.values())
    return Skill(sum(right) / len(right), guessed / len(answers))


def kind_of(word: str) -> str:
    """The list of stories.FACTS that a word is from, or "other"."""
    for kind, options in stories.FACTS.items():
        if word in map(str, options) or word.removesuffix("s") in options:
            return kind
    return "other"


# ---- one measurement for each task ---------------------------------------------------------------


def continuing(reader: Reader, with_prefix: bool = False) -> dict[str, Skill]:
    """Of the words that the text before them fixes, how many would the model write?"""
    right = []
    answers = []
    for story in held_out():
        ids = [reader.tok.EOT, *reader.tok.encode(story.text)]
        first_line = len(reader.tok.encode(story.text.split("\n")[0])) + 1
        prefix = first_line if with_prefix else 0
        guesses = likeliest(reader, reader.logits(torch.tensor([ids]), prefix)[0])
        for hole in words_of(story, "past"):
            stop = 1 + len(reader.tok.encode(hole.before + hole.word))
            start = stop - len(reader.tok.encode(hole.word))
            if start > prefix:
                right.append(guesses[start - 1 : stop - 1] == ids[start:stop])
                answers.append(hole.word)
    found = {"words that follow from the text before": skill(right, answers)}
    if len(reader.model.future):
        found["drafts of its heads kept"] = Skill(drafts_kept(reader), 0.0)
    return found


def drafts_kept(reader: Reader) -> float:
    """The share of the heads' drafts that are what the model itself writes."""
    drafted = kept = 0
    for story in held_out(20):
        prompt = [reader.tok.EOT, *reader.tok.encode(story.text.split("\n")[0] + "\n")]
        decoder = Decoder(reader.model, block_size=reader.block_size)
        _, stats = decoder.generate(prompt, 60, stop=reader.tok.EOT, drafters=[Heads(decoder)])
        drafted += stats.drafted
        kept += stats.kept
    return kept / max(drafted, 1)


def infilling(reader: Reader, prompt_of: Callable) -> Skill:
    """Holes filled with the right word, and ended where they should.

    prompt_of(hole) -> ids, and how many of them are read in both directions."""
    right = []
    answers = []
    for hole in holes():
        prompt, prefix = prompt_of(hole)
        right.append(write(reader, prompt, 16, prefix) == hole.word)
        answers.append(hole.word)
    return skill(right, answers)


def infilling_fim(reader: Reader) -> dict[str, Skill]:
    tok = reader.tok
    found = {}
    for layout in reader.knobs.fim_layouts.split(","):

        def prompt_of(hole, layout=layout):
            return fim_prompt(layout, tok, tok.encode(hole.before), tok.encode(hole.after)), 0

        found[f"holes filled right ({layout})"] = infilling(reader, prompt_of)
    return found


def infilling_span(reader: Reader, **flags) -> dict[str, Skill]:
    """The answer ends at the next sentinel or at EOT, whichever the model writes: a text of one gap
    is rare in its training. A story that does not fit into a row counts as not answered."""
    right = []
    answers = []
    for hole in holes():
        asked = dict(suffix=hole.after, max_new_tokens=16, **flags)
        try:
            [answer] = reader.ask("infill", hole.before, **asked)
            right.append(answer.text == hole.word)
        except UserError:
            right.append(False)
        answers.append(hole.word)
    mode = "".join(f" ([{mode}])" for mode in flags.values())
    return {f"holes filled right{mode}": skill(right, answers)}


def infilling_ul2(reader: Reader) -> dict[str, Skill]:
    return infilling_span(reader, mode="R") | infilling_span(reader, mode="X")


def restoring(reader: Reader) -> dict[str, Skill]:
    """Stories with one word masked, whose sentence comes back right; stories whose sentences were
    shuffled, given back in order, letter by letter."""
    tok = reader.tok
    rng = np.random.default_rng(SEED)
    filled = []
    ordered = []
    answers = []
    for hole in holes():
        text = hole.before + hole.word + hole.after
        n = len(tok.encode(text)) + 1
        masked = [*tok.encode(hole.before), tok.MASK, *tok.encode(hole.after), tok.EOT]
        sentence = hole.before.split("\n")[-1] + hole.word + hole.after.split("\n")[0]
        filled.append(sentence in write(reader, masked, n, len(masked)).split("\n"))
        answers.append(hole.word)

        lines = text.splitlines(keepends=True)
        shuffled = "".join(lines[i] for i in rng.permutation(len(lines)))
        source = [*tok.encode(shuffled), tok.EOT]
        ordered.append(write(reader, source, n, len(source)) == text)
    in_order = np.mean([1 / math.factorial(story.text.count("\n")) for story in held_out()])
    return {
        "sentences with a masked word restored": skill(filled, answers),
        "stories with shuffled sentences restored": Skill(
            sum(ordered) / len(ordered), float(in_order)
        ),
    }


def filling(reader: Reader) -> dict[str, Skill]:
    """Words whose tokens read [MASK]."""
    tok = reader.tok
    model = reader.model
    right = []
    answers = []
    for hole in holes():
        word = tok.encode(hole.word)
        before = tok.encode(hole.before)
        after = tok.encode(hole.after)
        if model.pair_head is not None:
            before = [tok.CLS, *before]
            after = [*after, tok.SEP]
        ids = [*before, *[tok.MASK] * len(word), *after]
        at = slice(len(before), len(before) + len(word))
        if model.generator is None:
            logits = reader.logits(torch.tensor([ids]), len(ids))[0]
        else:
            row = torch.tensor([ids], device=reader.device)
            states = model.generator_states(row, model.full_mask(row))[0]
            logits = F.linear(states, model.embed_tokens.weight)
        right.append(likeliest(reader, logits)[at] == word)
        answers.append(hole.word)
    return {"masked words found": skill(right, answers)}


def halves(n: int = N_STORIES) -> list[tuple[str, str]]:
    """Held-out stories, each cut between two lines in its middle."""
    pairs = []
    for story in held_out(n):
        lines = story.text.splitlines(keepends=True)
        middle = len(lines) // 2
        pairs.append(("".join(lines[:middle]), "".join(lines[middle:])))
    return pairs


def pairing(reader: Reader) -> dict[str, Skill]:
    """Does the second text follow the first? Half of the pairs are true. A false one is what the
    objective's are: of two stories, or the halves of one in the wrong order."""
    pairs = halves()
    of_two = OBJECTIVES[next(iter(reader.mixture))].draw is two_long_chunks
    right = []
    for i, (first, second) in enumerate(pairs):
        is_true = i % 2 == 0
        if not is_true and of_two:
            second = pairs[i - 1][1]
        elif not is_true:
            first, second = second, first
        probability = reader.ask("pair", first, second)[0].details["probability"]
        right.append((probability > 0.5) == is_true)
    return {"pairs judged right": Skill(sum(right) / len(right), 0.5)}


def detecting(reader: Reader) -> dict[str, Skill]:
    """One word of a story is replaced by another of its kind: is it found, and are others left in
    peace? Guessing: the share of all tokens that is reported; the share that is replaced."""
    tok = reader.tok
    model = reader.model
    rng = np.random.default_rng(SEED)
    cases = found = right = reported = replaced = tokens = 0
    for hole in holes():
        others = words_like(hole.word.strip())
        if not others:
            continue
        other = hole.word.replace(hole.word.strip(), others[rng.integers(len(others))])
        before = tok.encode(hole.before)
        word = tok.encode(other)
        ids = torch.tensor([[*before, *word, *tok.encode(hole.after)]], device=reader.device)
        doubt = model.detect_head(model(ids, model.full_mask(ids))[0])[0] > 0
        inside = doubt[len(before) : len(before) + len(word)]
        cases += 1
        found += inside.any().item()
        right += inside.sum().item()
        reported += doubt.sum().item()
        replaced += len(word)
        tokens += len(doubt)
    return {
        "replaced words found": Skill(found / cases, reported / tokens),
        "reports that are right": Skill(right / max(reported, 1), replaced / tokens),
    }


def words_like(word: str) -> list[str]:
    """The other words that could stand in this one's place in a story."""
    options = [str(option) for option in stories.FACTS.get(kind_of(word), [])]
    if word not in options:
        options = [f"{option}s" for option in options]
    return [other for other in options if other != word]


def comparing(reader: Reader) -> dict[str, Skill]:
    """Each story's first half finds its second half among those of all."""
    vectors = [[embedding(reader, half) for half in pair] for pair in halves()]
    first, second = (torch.stack(column) for column in zip(*vectors))
    partner = (first @ second.T).argmax(1)
    right = (partner == torch.arange(len(partner), device=partner.device)).float().mean().item()
    return {"second halves found among 200": Skill(right, 1 / N_STORIES)}


def embedding(reader: Reader, text: str) -> Tensor:
    """(C,) of length 1."""
    ids = torch.tensor([reader.tok.encode(text)], device=reader.device)
    return embed_segments(reader.model, ids, reader.model.full_mask(ids), torch.ones_like(ids), 1)[
        0, 0
    ]


MEASURE = {  # a task of the table OBJECTIVES -> what it is measured by
    "continue": continuing,
    "continue_prefix": functools.partial(continuing, with_prefix=True),
    "infill_fim": infilling_fim,
    "infill_span": infilling_span,
    "infill_ul2": infilling_ul2,
    "restore": restoring,
    "fill": filling,
    "unmask": filling,
    "pair": pairing,
    "detect": detecting,
    "similarity": comparing,
}


@torch.no_grad()
def measure(reader: Reader) -> dict[str, Skill]:
    """The skills of all tasks that the model was trained for, by name."""
    found = {}
    for task in reader.tasks:
        if task in MEASURE:
            found |= MEASURE[task](reader)
    return found


def report(skills: dict[str, Skill]) -> list[str]:
    """A table for people."""
    title = f"on {N_STORIES} unseen stories"
    lines = [f"{title:<44}{'learned':>9}{'guessing':>10}{'at most':>10}"]
    for name, s in skills.items():
        lines.append(f"  {name:<42}{s.value:>9.1%}{s.chance:>10.1%}{s.best:>10.0%}")
    return lines


@dataclass
class SkillsConfig:
    """which run is examined"""

    out_dir: str = flag("out/fim", "folder of the run")
    device: str | None = flag(None, "cpu, cuda or mps; automatic: the fastest there is")


def main(argv: list[str]) -> None:
    config = build(SkillsConfig, parse_flags(argv, __doc__, SkillsConfig))
    for line in report(measure(load(config.out_dir, config.device))):
        print(line)


if __name__ == "__main__":
    run_command(main, "--device")
