"""skills.py: what a trained model can do, counted on stories that it has never seen.

For each story it is known which words the rest determines, so a skill is a share of right answers,
shown beside the share that guessing gets; 100% is possible. Each task in the table of objectives.py
has one measurement in MEASURE. Objectives with the same task are asked the same questions, about
stories that fit their rows.

    python -m lab.skills --out_dir=out/fim
"""

import copy
import functools
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import stories
from sample import GAP, TrainedModel, load, set_for_asking
from util import build, flag, parse_flags, run_command

SEED = 20_000_000  # of the held-out stories: no corpus is drawn with this seed
N_STORIES = 200
N_WRITTEN = 40  # stories that the model continues, a token at a time
MARKS = 4  # most special tokens that a question adds to its story (ul2: 6, see MEASURE)
GAP_ROOM = 8  # tokens reserved for the answer in a gap
N_MASKED = 5  # most runs of words hidden in a story at once (bart, diffusion)


Stories = list[stories.Story]


class Skill(NamedTuple):
    """Shares of right answers, between 0 and 1."""

    value: float
    chance: float  # the share that guessing gets


class Hole(NamedTuple):
    """A word that its story determines, with the space before it, and the text on both sides."""

    before: str
    word: str
    after: str


# ---- questions with one right answer -------------------------------------------------------------


def held_out(trained: TrainedModel, room: int, full=False, n: int | None = None) -> Stories:
    """n stories, else N_STORIES, of at most `room` tokens, or fewer if few are that short. With
    some 10^11 possible stories, a corpus hardly ever contains the same one. `full`: only stories to
    which no sentence could be added, so that a gap of any length has one right answer."""
    rng = np.random.default_rng(SEED)
    drawn = (stories.story(rng) for _ in range(10 * N_STORIES))
    allowed = (story for story in drawn if story.is_full or not full)
    fitting = (story for story in allowed if len(trained.tok.encode(story.text)) <= room)
    return list(itertools.islice(fitting, n or N_STORIES))


def words_of(story: stories.Story, fixed_by: str) -> list[Hole]:
    """The words that are fixed by the "past" (the text before them) or by "both" sides."""
    found = []
    for start, stop, by in story.determined:
        before = story.text[:start].removesuffix(" ")
        if by == fixed_by:
            found.append(Hole(before, story.text[len(before) : stop], story.text[stop:]))
    return found


def first_line(story: stories.Story) -> str:
    return story.text[: story.text.index("\n") + 1]


def holes(unseen: Stories) -> list[Hole]:
    """From each story, one word that the text on both sides determines."""
    rng = np.random.default_rng(SEED)
    found = [words_of(story, "both") for story in unseen]
    return [words[rng.integers(len(words))] for words in found]


def runs_of_words(story: stories.Story) -> list[Hole]:
    """The words that are fixed by the text before them; adjacent words form one hole."""
    runs = []
    for hole in words_of(story, "past"):
        if runs and hole.before == runs[-1].before + runs[-1].word:
            last = runs.pop()
            hole = Hole(last.before, last.word + hole.word, hole.after)
        runs.append(hole)
    return runs


def skill(answers: list[tuple[bool, str]]) -> Skill:
    """`answers`: for each question, whether it was answered right, and the right words. Guessing
    says for every word the most common word of its kind, and must get all words of an answer
    right."""
    kinds = defaultdict(Counter)
    for _, answer in answers:
        for word in answer.split():
            kinds[kind_of(word)][word] += 1
    commonest = {words.most_common(1)[0][0] for words in kinds.values()}
    guessed = [commonest.issuperset(answer.split()) for _, answer in answers]
    return Skill(fmean([right for right, _ in answers]), fmean(guessed))


# Words that can take each other's place.
LISTS = {**stories.FACTS, "he": ["he", "she"], "him": ["him", "her", "his"]}
LISTS["makes"] = ["makes", "leaves"]
KINDS = {f"{word}{s}": kind for kind, words in LISTS.items() for word in words for s in ("", "s")}


def kind_of(word: str) -> str:
    """The list that a word or its singular is from, or "other"."""
    return "n" if word.isdigit() else KINDS.get(word, "other")


# ---- one measurement for each task ---------------------------------------------------------------


def logits_after(trained: TrainedModel, task: str, first: list[int], second: list[int]) -> Tensor:
    """(T, V): the logits with which a left-to-right model predicts each of the T ids of `second`,
    which continue `first`, in the layout of an entry of sample.TASKS. An EOT marks the start of a
    document; sample.py leaves it out, because a prompt may begin anywhere."""
    tok = trained.tok
    causal = ([], [tok.EOT, *first])
    layouts = {  # what is read both ways, and what is written before `second`
        "continue": causal,
        "infill_fim": causal,
        "continue_prefix": ([tok.EOT, *first], []),
        "continue_ul2": ([tok.S, *first, tok.EOT], []),
        "infill_span": ([*first, tok.sentinel, tok.EOT], [tok.sentinel]),
        "restore": ([*first, tok.MASK, tok.EOT], first),  # the whole text is written again
    }
    source, written = layouts[task]
    row = [*source, *written, *second[:-1]]
    return trained.logits(row, len(source))[-len(second) :]


def continuing(trained: TrainedModel, unseen: Stories, entry="continue") -> dict[str, Skill]:
    """After a story's first line, how many words that are fixed by the text before them would the
    model write?"""
    encode = trained.tok.encode
    answers = []
    for story in unseen:
        first = first_line(story)
        middle = len(first)
        rest = encode(story.text[middle:])
        logits = logits_after(trained, entry, encode(first), rest)
        guesses = logits[:, : trained.tok.n_ordinary].argmax(-1).tolist()
        for hole in words_of(story, "past"):
            if len(hole.before) < middle:
                continue
            stop = len(encode(hole.before[middle:] + hole.word))
            start = stop - len(encode(hole.word))  # a word has the same ids wherever it stands
            answers.append((guesses[start:stop] == rest[start:stop], hole.word))
    how = {"continue_prefix": " (prefix)", "continue_ul2": " ([S])"}.get(entry, "")
    found = {f"words that follow from the past{how}": skill(answers)}
    found |= {f"{name}{how}": skill for name, skill in writing(trained, unseen).items()}
    if len(trained.model.future):
        found["drafts of its heads kept"] = drafts_kept(trained, unseen)
    return found


def continuing_blocks(trained: TrainedModel, unseen: Stories) -> dict[str, Skill]:
    """From each story, a word that is fixed by the text before it: does the model write it?"""
    rng = np.random.default_rng(SEED)
    answers = []
    for story in unseen:
        words = words_of(story, "past")
        hole = words[rng.integers(len(words))]
        n = len(trained.tok.encode(hole.word))
        [answer] = trained.ask("continue", hole.before, max_new_tokens=n, temperature=0.0)
        answers.append((answer.text == hole.word, hole.word))
    return {"words that follow from the past": skill(answers)} | writing(trained, unseen)


def writing(trained: TrainedModel, unseen: Stories) -> dict[str, Skill]:
    """Stories, sampled from their first line on: the share that stop where a story does, after a
    line about the night, which guessing hardly ever does; and how many of their sums are right."""
    longest = max(len(trained.tok.encode(story.text)) for story in unseen)
    ended = []
    sums = []
    for story in unseen[:N_WRITTEN]:
        [answer] = trained.ask("continue", first_line(story), max_new_tokens=longest)
        ended.append(re.search(r"(?m)^At night, .*\.\n\Z", answer.text) is not None)
        sums += sums_right(first_line(story) + answer.text)
    return {
        "stories written to their end": Skill(fmean(ended), 0.0),
        "sums in written stories right": Skill(fmean(sums or [False]), 1 / stories.MOST),
    }


def sums_right(text: str) -> list[bool]:
    """For each sum in a story, whether it is right.

    >>> sums_right("Tom has 5 hats. Tom finds 2 more. Now he has 7 hats. That makes 8.")
    [True, False]
    """
    right = []
    n = 0
    for said, number, what in re.findall(r"(Now \w+ has |That \w+ )?(\d+)( more| of them)?", text):
        if said:
            right.append(int(number) == n)
        elif what:
            n += int(number) if what == " more" else -int(number)
        elif n == 0:
            n = int(number)
    return right


def drafts_kept(trained: TrainedModel, unseen: Stories) -> Skill:
    """The share of the heads' drafts that equal what the model itself writes. Guessing always
    drafts the most common token."""
    decoder = trained.decoder()
    sums = Counter()  # of generate.Stats
    written = Counter()
    for story in unseen:
        prompt = [trained.tok.EOT, *trained.tok.encode(first_line(story))]
        [new], stats = decoder.generate(
            prompt, 60, stops={trained.tok.EOT}, drafters=[decoder.heads]
        )
        sums.update(vars(stats))
        written.update(new)
    chance = max(written.values(), default=0) / max(sums["tokens"], 1)
    return Skill(sums["kept"] / max(sums["drafted"], 1), chance)


def filled(asked: list[Hole], texts: list[str], what="holes", how="") -> dict[str, Skill]:
    """Shares of holes filled with the right words, and with the right number of words. A model
    that cannot tell where a hole ends hardly ever gets the latter right."""
    right = [(text == hole.word, hole.word) for hole, text in zip(asked, texts)]
    ended = [len(text.split()) == len(hole.word.split()) for hole, text in zip(asked, texts)]
    return {
        f"{what} filled right{how}": skill(right),
        f"{what} ended right{how}": Skill(fmean(ended), 0.0),
    }


def infilling(trained: TrainedModel, unseen: Stories, how="") -> dict[str, Skill]:
    """One-word holes."""
    asked = holes(unseen)
    most = 2 * GAP_ROOM
    fills = [trained.ask("infill", h.before, h.after, max_new_tokens=most)[0].text for h in asked]
    return filled(asked, fills, how=how)


def infilling_fim(trained: TrainedModel, unseen: Stories) -> dict[str, Skill]:
    """One-word holes, in each layout."""
    found = {}
    for layout in trained.knobs.fim_layouts.split(","):
        in_layout = copy.copy(trained)
        in_layout.knobs = replace(trained.knobs, fim_layouts=layout)
        found |= infilling(in_layout, unseen, f" ({layout})")
    return found


def infilling_at_once(trained: TrainedModel, unseen: Stories, n: int, **flags) -> tuple:
    """The first n holes of each story at once -> the holes, and what fills them."""
    asked = []
    fills = []
    for story in unseen:
        runs = runs_of_words(story)[:n]
        text = with_gaps(story.text, runs, [GAP] * len(runs))
        [answer] = trained.ask("infill", text, max_new_tokens=20 * n, **flags)
        asked += runs
        fills += answer.details["fills"]
    return asked, fills


def infilling_ul2(trained: TrainedModel, unseen: Stories) -> dict[str, Skill]:
    """Three holes, in both modes that fill gaps."""
    found = {}
    for mode in "RX":
        answers = infilling_at_once(trained, unseen, 3, mode=mode)
        found |= filled(*answers, "three holes", f" ([{mode}])")
    return found


def infilling_cm3(trained: TrainedModel, unseen: Stories) -> dict[str, Skill]:
    return filled(*infilling_at_once(trained, unseen, 2), "two holes")


def restoring(trained: TrainedModel, unseen: Stories) -> dict[str, Skill]:
    """Stories with masked words and shuffled sentences. How many of the sentences with a mask come
    back right, and how many of all sentences come back in their place?"""
    rng = np.random.default_rng(SEED)
    restored = []
    in_place = []
    for story in unseen:
        lines = story.text.splitlines()
        runs = some_runs(story, rng)
        hidden = defaultdict(str)  # number of a line -> its masked words
        for run in runs:
            hidden[run.before.count("\n")] += run.word
        noisy = with_gaps(story.text, runs, [GAP] * len(runs)).splitlines(keepends=True)
        shuffled = "".join(noisy[i] for i in rng.permutation(len(noisy)))

        n = len(trained.tok.encode(story.text)) + 1
        answer = trained.ask("restore", shuffled, max_new_tokens=n)[0].text.splitlines()
        answer += [""] * len(lines)
        in_place += [line == was for line, was in zip(answer, lines)]
        restored += [(lines[number] in answer, words) for number, words in hidden.items()]
    guessing = len(unseen) / len(in_place)  # 1 / mean number of sentences in a story
    return {
        "sentences with masked words restored": skill(restored),
        "shuffled sentences put in their place": Skill(fmean(in_place), guessing),
    }


def some_runs(story: stories.Story, rng: np.random.Generator) -> list[Hole]:
    """Up to N_MASKED runs of words, in order, which the other words determine even if the lines
    are shuffled. So words of "That makes 3." are never hidden: that line could stand elsewhere."""
    runs = [run for run in runs_of_words(story) if not run.before.endswith("\nThat")]
    return [runs[i] for i in sorted(rng.permutation(len(runs))[:N_MASKED])]


def with_gaps(text: str, runs: list[Hole], gaps: list[str]) -> str:
    """The text with something else in the place of each run.

    >>> with_gaps("Tom has 5 cats.", [Hole("Tom has", " 5 cats", ".")], ["_"])
    'Tom has_.'
    """
    for run, gap in zip(reversed(runs), reversed(gaps)):  # so that earlier positions stay valid
        text = run.before + gap + text[len(run.before + run.word) :]
    return text


def filling(trained: TrainedModel, unseen: Stories, task="fill") -> dict[str, Skill]:
    """Words with one [MASK] for each token. An electra model's generator is meant to be weak."""
    answers = []
    for hole in holes(unseen):
        word = trained.tok.encode(hole.word)
        [answer] = trained.ask(task, hole.before + GAP * len(word) + hole.after)
        answers.append((answer.ids == word, hole.word))
    whose = "" if trained.model.generator is None else " by the generator"
    return {f"masked words found{whose}": skill(answers)}


def unmasking(trained: TrainedModel, unseen: Stories) -> dict[str, Skill]:
    """The shares that come back right: of single words, then of up to N_MASKED runs of words masked
    in one story at once. Several tokens are unmasked step by step."""
    encode = trained.tok.encode
    rng = np.random.default_rng(SEED)
    answers = []
    for story in unseen:
        runs = some_runs(story, rng)
        masks = [GAP * len(encode(run.word)) for run in runs]
        [answer] = trained.ask("unmask", with_gaps(story.text, runs, masks))
        written = iter(answer.ids)
        for run in runs:
            right = encode(run.word)
            answers.append((list(itertools.islice(written, len(right))) == right, run.word))
    single = filling(trained, unseen, "unmask")
    return single | {"words unmasked, up to five runs at once": skill(answers)}


def halves(unseen: Stories) -> list[tuple[str, str]]:
    """Stories, each cut in the middle, between two lines."""
    lines = [story.text.splitlines(keepends=True) for story in unseen]
    return [("".join(s[: len(s) // 2]), "".join(s[len(s) // 2 :])) for s in lines]


def middles(unseen: Stories) -> list[tuple[str, str]]:
    """Stories without their first and last line, which alone would tell the order, cut before the
    last line that begins with a time, such as "At noon". There are two such lines or more, so the
    times in both parts tell the order."""
    pairs = []
    for story in unseen:
        lines = story.text.splitlines(keepends=True)[1:-1]
        timed = [i for i, line in enumerate(lines) if line.startswith("At ")]
        if len(timed) > 1:
            pairs.append(("".join(lines[: timed[-1]]), "".join(lines[timed[-1] :])))
    return pairs


def pairing(trained: TrainedModel, unseen: Stories, of_two=True) -> dict[str, Skill]:
    """Does the second text follow the first? Half of the pairs are true. The false ones are like
    those in training: from two stories if `of_two`, else two parts of one in the wrong order."""
    pairs = halves(unseen) if of_two else middles(unseen)
    # The shortest second texts first: the one before is about as long, never longer, so it fits.
    pairs = sorted(pairs, key=lambda pair: len(trained.tok.encode(pair[1])))
    right = []
    for i, (first, second) in enumerate(pairs):
        is_true = i % 2 == 0
        if not is_true:
            first, second = (first, pairs[i - 1][1]) if of_two else (second, first)
        probability = trained.ask("pair", first, second)[0].details["probability"]
        right.append((probability > 0.5) == is_true)
    name = "pairs judged right" if of_two else f"pairs judged right (inside {len(pairs)} stories)"
    return {name: Skill(fmean(right), 0.5)}


def detecting(trained: TrainedModel, unseen: Stories) -> dict[str, Skill]:
    """One occurrence of a word that its story contains three times or more is replaced by another
    word of its kind, which the other occurrences contradict. Is it found, and are other words left
    alone? Guessing makes as many reports, at random places."""
    rng = np.random.default_rng(SEED)
    found = []
    reported = []  # for each token of all stories: does the model doubt it?
    replaced = []  # is it wrong?
    for story in unseen:
        repeated = [hole for hole in words_of(story, "both") if times_told(hole, story) >= 3]
        if not repeated:
            continue
        hole = with_another_word(repeated[rng.integers(len(repeated))], rng)
        [answer] = trained.ask("detect", "".join(hole))
        doubts = [p > 0.5 for p in answer.details["replaced_probability"]]
        before, word, after = map(trained.tok.encode, hole)
        found.append(any(doubts[len(before) : len(before) + len(word)]))
        reported += doubts
        replaced += [False] * len(before) + [True] * len(word) + [False] * len(after)
    right = [wrong for doubted, wrong in zip(reported, replaced) if doubted]
    return {
        "replaced words found (recall)": Skill(fmean(found), fmean(reported)),
        "reports that are right (precision)": Skill(fmean(right or [0]), fmean(replaced)),
    }


def times_told(hole: Hole, story: stories.Story) -> int:
    """How often a fact occurs in a story; 1 for a number: numbers change and are not facts."""
    word = hole.word.strip()
    return 1 if word.isdigit() else len(re.findall(rf"\b{word}\b", story.text))


def with_another_word(hole: Hole, rng: np.random.Generator) -> Hole:
    """The hole with another word of the same kind in it, which contradicts the story."""
    word = hole.word.strip()
    options = stories.FACTS[kind_of(word)]
    if word not in options:
        options = [f"{option}s" for option in options]
    others = [option for option in options if option != word]
    return hole._replace(word=hole.word.replace(word, others[rng.integers(len(others))]))


def comparing(trained: TrainedModel, unseen: Stories) -> dict[str, Skill]:
    """How many first halves of stories find their own second half among those of all stories?"""
    found = partners_found(trained, halves(unseen))
    return {f"second halves found among {len(unseen)}": Skill(found, 1 / len(unseen))}


def partners_found(trained: TrainedModel, pairs: list[tuple[str, str]]) -> float:
    """The share of pairs whose first text finds its own second text among those of all pairs."""
    vectors = [[trained.embed(text) for text in pair] for pair in pairs]
    first, second = (F.normalize(torch.stack(column), dim=-1) for column in zip(*vectors))
    partner = (first @ second.T).argmax(1)
    return (partner == torch.arange(len(partner))).float().mean().item()


class Measurement(NamedTuple):
    """How the skill of one task is measured: an entry of MEASURE."""

    function: Callable  # function(trained, unseen stories) -> {name: Skill}
    copies: int = 1  # how often a row of this task holds the story
    answer: int = 0  # positions of the row that are reserved for the answer
    full: bool = False  # ask about full stories only: there, gaps of any length have one filling

    def room(self, block_size: int) -> int:
        """The most tokens of a story that a question can hold."""
        return block_size // self.copies - MARKS - self.answer


# fmt: off
MEASURE = {  # an entry of sample.TASKS -> how it is measured
    "continue":        Measurement(continuing),
    "continue_prefix": Measurement(functools.partial(continuing, entry="continue_prefix")),
    "continue_ul2":    Measurement(functools.partial(continuing, entry="continue_ul2")),
    "infill_fim":      Measurement(infilling_fim, answer=2 * GAP_ROOM, full=True),
    "continue_block":  Measurement(continuing_blocks, copies=2),
    "infill_cm3":      Measurement(infilling_cm3, answer=2 + 2 * GAP_ROOM, full=True),
    "infill_span":     Measurement(infilling, answer=1 + GAP_ROOM, full=True),
    # six marks, two more than MARKS; then room for three gaps
    "infill_ul2":      Measurement(infilling_ul2, answer=2 + 3 * GAP_ROOM, full=True),
    "restore":         Measurement(restoring, copies=2, full=True),
    "fill":            Measurement(filling),
    "fill_in_order":   Measurement(filling),
    "unmask":          Measurement(unmasking),
    "pair":            Measurement(pairing),
    "pair_order":      Measurement(functools.partial(pairing, of_two=False)),
    "detect":          Measurement(detecting),
    "similarity":      Measurement(comparing),
}
# fmt: on


def measure(trained: TrainedModel, n: int | None = None) -> dict[str, Skill]:
    """The skills of all tasks that the model was trained for, on n stories, else N_STORIES, except
    for those whose questions do not fit into the context. Members of a mixture are asked one by
    one, because two of them may serve the same request."""
    members = {}  # by entry of sample.TASKS
    for name in trained.mixture:
        member = copy.copy(trained)
        member.mixture = {name: 1.0}
        for entry in member.tasks:
            if entry in MEASURE:
                members.setdefault(entry, member)
    found = {}
    for entry, member in members.items():
        how = MEASURE[entry]
        unseen = held_out(trained, how.room(trained.block_size), how.full, n)
        if len(unseen) == (n or N_STORIES):
            found |= how.function(member, unseen)
    return found


def report(skills: dict[str, Skill]) -> list[str]:
    """A table for people."""
    if not skills:
        return ["not counted: rows are too short for a story, or no task has a test"]
    title = "on unseen stories (100% is possible)"
    lines = [f"{title:<44}{'learned':>9}{'guessing':>10}"]
    for name, s in skills.items():
        lines.append(f"  {name:<42}{s.value:>9.1%}{s.chance:>10.1%}")
    return lines


@dataclass
class SkillsConfig:
    """which run is examined"""

    out_dir: str = flag("out/clm", "folder of the run, or one of its checkpoints")
    device: str | None = flag(None, "cpu, cuda, cuda:N or mps; automatic: the fastest available")


def main(argv: list[str]) -> None:
    config = build(SkillsConfig, parse_flags(argv, __doc__, SkillsConfig))
    trained = load(config.out_dir, config.device)
    with set_for_asking(trained):
        skills = measure(trained)
    print("\n".join(report(skills)))


if __name__ == "__main__":
    run_command(main)
