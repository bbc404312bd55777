"""yardsticks.py: what every trained model is asked, whatever its objective, for comparisons.

All models are asked about the same held-out stories, and a model of another text about windows of
that text, too. To go on and to fill holes, each reads them in the format that its objective knows
best; probes read the plain text. Losses of different objectives cannot be compared; bits of the
same bytes, and answers, can.
"""

import ast
import contextlib
import copy
import itertools
import json
import keyword
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import stories
from checkpoint import checkpoint_path, open_checkpoint
from corpus import DataConfig, count_stories, load_tokens
from data import VALIDATION, Batch, Text, make_batch
from generate import Decoder, Sampler
from lab import skills
from lab.skills import GAP_ROOM, MARKS, MEASURE, N_STORIES, SEED, Stories, logits_after, words_of
from objectives import OBJECTIVES, Knobs, check_knobs, source_of
from sample import GAP, TASKS, TrainedModel, bound_nats, load, permuted_nats
from sample import set_for_asking, tasks_of
from util import UserError, build

MOST_CHARS = 210  # of a story that is asked about; with its marks it fits a row of 64 tokens
N_CONTINUED = 50  # stories whose second halves are scored
N_WINDOWS = 200  # windows of another text whose second halves are scored
WINDOW = (200, 100)  # bytes of such a window: those that are given, those that are scored
MOST_BYTES = 1 << 19  # all windows are from this many bytes at that text's beginning
N_ROWS = 64  # rows on which a loss is measured
N_INSIDE = 300  # words that are asked about with a hole inside
N_PROBED = 900  # questions about first events
N_WORDS = 3600  # words that do or do not fit
N_OF_ROLE = 50  # names of each role from one document, at most
N_NAMES = 3000  # names in all; if there are fewer than a third as many, nothing is asked
N_DOCUMENTS = 20  # longest documents of a text: which of them is a window from?
N_OF_DOCUMENT = 60  # windows from each of them, at most
N_DRAWN = 5000  # stories, so that enough of them have two kinds of event
N_TWINS = 5  # random networks that a model's probes are compared with
DECAY = 1e-3  # a probe's penalty on its squared weights


# ---- going on ------------------------------------------------------------------------------------

Halves = list[tuple[list[int], list[int]]]  # of texts: ids of the first and second half


def short_stories(n: int, seed: int = SEED) -> Stories:
    """n stories of at most MOST_CHARS, the same for all models."""
    rng = np.random.default_rng(seed)
    drawn = (stories.story(rng) for _ in itertools.count())
    return list(itertools.islice((s for s in drawn if len(s.text) <= MOST_CHARS), n))


def halves_of_stories(trained: TrainedModel) -> Halves:
    """The ids of stories, cut between two lines in the middle. Empty if rows are too short."""
    encode = trained.tok.encode
    told = short_stories(N_CONTINUED)
    longest = max(len(encode(story.text)) for story in told)
    if longest + MARKS > trained.block_size:
        return []
    return [(encode(first), encode(second)) for first, second in skills.halves(told)]


def halves_of_windows(trained: TrainedModel, text: Text, apart: bool = False) -> Halves:
    """N_WINDOWS windows of a text, as the ids of two parts. Empty if the text is shorter than one.
    Every tokenizer gets the same bytes, except for part of a token at either end. `apart`: windows
    do not overlap, and there may be fewer."""
    tokens = text.tokens[:MOST_BYTES]
    ends = np.cumsum(trained.tok.n_bytes[tokens])
    size = sum(WINDOW)
    n_starts = min(ends[-1], MOST_BYTES) - size
    if n_starts < 1:
        return []
    rng = np.random.default_rng(SEED)
    if apart:
        starts = size * rng.permutation(n_starts // size)[:N_WINDOWS]
    else:
        starts = rng.integers(n_starts, size=N_WINDOWS)
    pairs = []
    for start in starts:
        i, j, k = np.searchsorted(ends, start + np.cumsum([0, *WINDOW]), side="right")
        if j < k:  # else one token covers the second part
            pairs.append((tokens[i:j].tolist(), tokens[j:k].tolist()))
    return pairs


def chain_rule_nats(trained: TrainedModel, first: list[int], second: list[int]) -> float:
    """-log p of the second half under a model that fills masks. Each token is predicted from those
    before it, so by the chain rule the sum is a likelihood. A diffusion model sees all tokens still
    to come as masks, as in training, and so knows their number; the others see one mask."""
    all_masked = "unmask" in trained.tasks
    nats = 0.0
    for i, token in enumerate(second):
        hidden = len(second) - i if all_masked else 1
        ids = [*first, *second[:i], *[trained.tok.MASK] * hidden]
        logits = trained.masked_logits(ids)[len(first) + i]
        nats -= logits.log_softmax(-1)[token].item()
    return nats


def second_half_bits(trained: TrainedModel, pairs: Halves, bound=False) -> float | None:
    """Bits per byte of second halves, given the first. If a first half is too long for the row, its
    end is read, as if a document began there. None if a row has no room for a second half, or if
    the model does not continue texts. `bound`: diffusion is scored by its bound, as block always
    is."""
    tasks = tasks_of([next(iter(trained.mixture))])  # a mixture is asked like its first member
    task = "continue_ul2" if "continue_ul2" in tasks else tasks[0]
    copies = MEASURE[task].copies if task in MEASURE else 1  # of the first half in the row
    rooms = [(trained.text_size - MARKS - len(second)) // copies for _, second in pairs]
    if "similarity" in trained.tasks or min(rooms, default=0) < 1:
        return None
    nats = n_bytes = 0.0
    for (first, second), room in zip(pairs, rooms):
        first = first[-room:]
        if bound or trained.attention == "block":
            nats += bound_nats(trained, second, first)
        elif trained.attention == "permuted":
            nats += permuted_nats(trained, second, first)
        elif trained.attention == "full":
            nats += chain_rule_nats(trained, first, second)
        else:
            logits = logits_after(trained, task, first, second)
            wanted = torch.tensor(second, device=logits.device)
            nats += F.cross_entropy(logits, wanted, reduction="sum").item()
        n_bytes += int(trained.tok.n_bytes[second].sum())
    return nats / np.log(2) / n_bytes


def bits_of_second_halves(trained: TrainedModel, pairs: Halves, name: str) -> dict:
    """Bits per byte, and the bound on it, which differs only for diffusion."""
    bits = at_most = second_half_bits(trained, pairs)
    if "unmask" in trained.tasks:
        at_most = second_half_bits(trained, pairs, bound=True)
    return {name: bits, f"{name} at most": at_most}


# ---- linear probes -------------------------------------------------------------------------------


class Exam(NamedTuple):
    """Questions for a linear probe, which predicts a text's class from the state at one position,
    or from the mean of all states."""

    questions: list[tuple[list[int], int | None, int]]  # ids, position or None, class
    n_learned: int  # the probe is fitted to the first n_learned questions, the others test it


def share_right(trained: TrainedModel, exam: Exam) -> float:
    """The share that a probe gets right from the model's frozen states. With random weights it gets
    many right, too, most of all if attention is causal, because a text's beginning then enters most
    states. So compare only models with the same kind of attention, each with its random_twin."""
    to_the_left = trained.attention in ("causal", "block")
    read = trained.states if to_the_left else trained.states_both_ways
    states = []
    for ids, at, _ in exam.questions:
        of_text = read(ids).float().cpu()
        states.append(of_text.mean(0) if at is None else of_text[at])
    *_, labels = zip(*exam.questions)
    return probe(torch.stack(states), torch.tensor(labels), exam.n_learned)


def probe(states: Tensor, labels: Tensor, n: int) -> float:
    """(N, C), (N,) -> the share that a linear classifier gets right. It is fitted to the first n by
    cross entropy (logistic regression) and tested on the others."""
    x = (states - states[:n].mean(0)) / states[:n].std(0).clamp(min=1e-6)
    x = F.pad(x, (0, 1), value=1.0)
    weights = torch.zeros(x.shape[1], int(labels.max()) + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        total = F.cross_entropy(x[:n] @ weights, labels[:n]) + DECAY * weights.square().sum()
        total.backward()
        return total

    optimizer.step(loss)
    return ((x[n:] @ weights).argmax(1) == labels[n:]).float().mean().item()


@torch.no_grad()
def random_twin(trained: TrainedModel, seed: int) -> TrainedModel:
    """The same model with random weights, even where training begins with zeros: vectors and
    matrices of the usual scale, norms of 1, biases of 0."""
    twin = copy.copy(trained)
    twin.model = copy.deepcopy(trained.model)
    generator = torch.Generator().manual_seed(seed)
    for name, p in twin.model.named_parameters():
        if name.endswith("bias"):
            p.fill_(0.0)
        elif "norm" in name:
            p.fill_(1.0)
        else:
            std = 1.0 if name == "embed_tokens.weight" else p.shape[-1] ** -0.5
            p.copy_(torch.randn(p.shape, generator=generator) * std)
    return twin


# A regular expression for each kind of event: a gift, a find, a loss, a meeting, moving on.
EVENT_WORDS = ["|".join(stories.WORDS[verb]) for verb in ("gives", "finds", "loses")]
EVENT_WORDS += ["meet", "from the"]


def kinds_of_events(story: str) -> list[int]:
    """The kinds of events that happen, as indices of EVENT_WORDS, in the order of the story."""
    places = [re.search(words, story) for words in EVENT_WORDS]
    found = {kind: place.start() for kind, place in enumerate(places) if place}
    return sorted(found, key=found.get)


def first_events(trained: TrainedModel, told: Stories) -> Exam:
    """Does the mean of all states tell which of two kinds of event comes first? (A bag of words
    tells that both happen, but not their order.)"""
    questions = []
    for text, *_ in told:
        kinds = kinds_of_events(text)
        if len(kinds) == 2 and len(questions) < N_PROBED:
            questions.append((trained.tok.encode(text), None, kinds[0]))
    return Exam(questions, len(questions) * 2 // 3)


def fitting_words(trained: TrainedModel, told: Stories) -> Exam:
    """Does the state at a word's last token tell whether the word fits? The text before determines
    the right word; in half of the stories, another word of its kind replaces it and contradicts the
    story. Random networks are right in half of the cases, or little more."""
    rng = np.random.default_rng(SEED)
    questions = []
    for story in told:
        words = [hole for hole in words_of(story, "past") if skills.times_told(hole, story) > 1]
        words = [hole for hole in words if skills.kind_of(hole.word.strip()) in stories.FACTS]
        if words and len(questions) < N_WORDS:
            hole = words[rng.integers(len(words))]
            other = skills.with_another_word(hole, rng)
            fits = rng.random() < 0.5
            before, word, after = hole if fits else other
            at = len(trained.tok.encode(before + word)) - 1
            questions.append((trained.tok.encode(before + word + after), at, int(fits)))
    return Exam(questions, len(questions) * 2 // 3)


def names_by_role(source: bytes) -> list[list[int]]:
    """Where the names in a Python program end: those that are called, assigned to and read.

    >>> names_by_role(b"n = len(text)")
    [[6], [0], [11]]
    """
    lines = np.cumsum([0, *map(len, source.splitlines(keepends=True))])  # where each begins
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about the program's code
        nodes = list(ast.walk(ast.parse(source.decode())))
    functions = {node.func for node in nodes if isinstance(node, ast.Call)}
    places = {"Call": [], "Store": [], "Load": [], "Del": []}
    for node in nodes:
        if isinstance(node, ast.Name):
            role = "Call" if node in functions else type(node.ctx).__name__
            places[role].append(int(lines[node.end_lineno - 1]) + node.end_col_offset - 1)
    return [places["Call"], places["Store"], places["Load"]]


def roles_of_names(trained: TrainedModel, text: Text) -> Exam | None:
    """Does the state at the last token of a name in Python source tell whether the name is called,
    assigned to or read? The text after the name shows it; the text before is up to half of the row.
    Each document gives equally many names of each role. About a third of the names, from documents
    of their own, test the probe. None if too little of the text is Python."""
    rng = np.random.default_rng(SEED)
    length = max(trained.block_size - 2 * MARKS, 1)
    questions = []
    edges = []  # where each document's questions end
    for start, stop in zip(text.starts, text.stops):
        ids = text.tokens[start:stop]
        try:
            found = names_by_role(trained.tok.decode_bytes(ids))
        except (SyntaxError, ValueError):  # not Python
            continue
        ends = np.cumsum(trained.tok.n_bytes[ids])
        n = min(N_OF_ROLE, *map(len, found))
        for role, places in enumerate(found):
            for place in rng.permutation(places)[:n]:
                at = int(np.searchsorted(ends, place, side="right"))
                first = max(at - length // 2, 0)
                window = ids[first : first + length].tolist()
                questions.append((window, at - first, role))
        edges.append(len(questions))
        if len(questions) >= N_NAMES:
            break
    if len(questions) < N_NAMES // 3:
        return None
    return Exam(questions, min(edges, key=lambda edge: abs(edge - len(questions) * 2 // 3)))


def documents_apart(trained: TrainedModel, text: Text) -> Exam | None:
    """Does the mean of a window's states tell which of the text's longest documents it is from?
    None if these documents are too few or too short."""
    rng = np.random.default_rng(SEED)
    length = max(trained.block_size - 2 * MARKS, 1)
    questions = []
    longest = np.argsort(-text.sizes, kind="stable")[:N_DOCUMENTS]
    for label, document in enumerate(longest):
        starts = np.arange(text.starts[document], text.stops[document] - length, length)
        for start in rng.permutation(starts)[:N_OF_DOCUMENT]:
            questions.append((text.tokens[start : start + length].tolist(), None, label))
    n_asked = len({label for _, _, label in questions})
    if n_asked < N_DOCUMENTS or len(questions) < N_DOCUMENTS * N_OF_DOCUMENT // 2:
        return None
    order = rng.permutation(len(questions))
    return Exam([questions[i] for i in order], len(questions) * 2 // 3)


# ---- drafts, holes, losses -----------------------------------------------------------------------


def decode_in_turns(decoder: Decoder, prompts: Iterable, n: int, ways: dict[str, Callable]) -> dict:
    """Write n tokens after each prompt in each of the ways: name -> sums of generate.Stats. The
    ways take turns, so that whatever else runs here slows all of them alike. A way is decoder ->
    drafters."""
    sums = {name: Counter() for name in ways}
    for seed, prompt in enumerate(prompts):
        for name, drafters_for in ways.items():
            _, stats = decoder.generate(prompt, n, seed=seed, drafters=drafters_for(decoder))
            sums[name].update(vars(stats))
    return sums


def drafting(trained: TrainedModel, pairs: Halves) -> dict[str, float]:
    """What an mtp model gains from its heads' drafts as it continues the first part of each pair:
    tokens per pass (counting the one that reads the prompt) if the heads always draft, and the
    speed relative to plain decoding if they pause when drafting does not pay."""
    found = {}
    n = trained.block_size // 2
    prompts = [first[-n:] for first, _ in pairs]
    for temperature in (0.0, 0.8):
        decoder = trained.decoder(Sampler(temperature))
        ways = {"plain": lambda decoder: [], "heads": lambda decoder: [decoder.heads]}
        pausing = decode_in_turns(decoder, prompts, n, ways)
        decoder.cost = {}
        always = decode_in_turns(decoder, prompts, n, ways)
        at = f"at temperature {temperature:g}"
        found[f"tokens per pass {at}"] = always["heads"]["tokens"] / always["heads"]["passes"]
        found[f"times as fast {at}"] = pausing["plain"]["seconds"] / pausing["heads"]["seconds"]
    return found


def left_only(trained: TrainedModel) -> float:
    """The share of holes filled right by a model that is given only the text before the hole and
    the number of tokens to write: the baseline for models that see both sides."""
    encode = trained.tok.encode
    right = []
    for hole in skills.holes(skills.held_out(trained, trained.block_size - MARKS, full=True)):
        word = encode(hole.word)
        guesses = logits_after(trained, "continue", encode(hole.before), word).argmax(-1)
        right.append(guesses.tolist() == word)
    return fmean(right)


def holes_inside_words(trained: TrainedModel) -> float | None:
    """The share that fim fills right of holes that leave a word's first two letters and its last.
    These letters mostly determine the word, so this tests spelling. None if no story fits a row."""
    fim = copy.copy(trained)
    fim.mixture = {"fim": 1.0}
    room = MEASURE["infill_fim"].room(trained.block_size)
    told = skills.held_out(trained, room, full=True)
    words = [hole for story in told for hole in words_of(story, "both")]
    right = []
    for before, word, after in [hole for hole in words if len(hole.word.strip()) > 3][:N_INSIDE]:
        cut = len(word) - len(word.strip()) + 2
        texts = (before + word[:cut], word[-1] + after)
        [answer] = fim.ask("infill", *texts, max_new_tokens=2 * GAP_ROOM)
        right.append(answer.text == word[cut:-1])
    return fmean(right) if right else None


def holes_in_windows(trained: TrainedModel, text: Text) -> dict[str, float]:
    """One-word holes in the middle of windows: the shares begun with the right two characters,
    filled exactly, and ended by the model. Most words of a real text cannot be known."""
    rng = np.random.default_rng(SEED)
    right = {"begun": [], "filled": [], "ended": []}
    for ids in map(np.concatenate, halves_of_windows(trained, text)):
        ids = ids[: trained.block_size - MARKS - 3 * GAP_ROOM]
        window = trained.tok.decode(ids).strip("\ufffd")
        third = len(window) // 3
        words = [*re.finditer(r" ?\b[^\W_]\w*", window[third:-third])]
        if not words:
            continue
        start, stop = words[rng.integers(len(words))].span()
        before, after = window[: third + start], window[third + stop :]
        word = window[third + start : third + stop]
        [answer] = trained.ask("infill", before, after, max_new_tokens=2 * GAP_ROOM)
        right["begun"].append(answer.text[:2] == word[:2])
        right["filled"].append(answer.text == word)
        right["ended"].append(len(answer.ids) < 2 * GAP_ROOM)
    return {f"holes of own text {what}": fmean(found) for what, found in right.items()}


def filled_alike(trained: TrainedModel, texts: list[str], is_asked: Callable) -> dict[str, float]:
    """A word that is hidden wherever a text has it, one word in each text: the share of texts in
    which all its holes get the same tokens. `is_asked`(word): may this word be hidden?"""
    rng = np.random.default_rng(SEED)
    alike = []
    for text in texts:
        known = Counter(word for word in re.findall(r" [^\W\d_]{3,}\b", text) if is_asked(word[1:]))
        words = [word for word, n in known.items() if n > 1]
        if not words:
            continue
        word = words[rng.integers(len(words))]
        masks = GAP * len(trained.tok.encode(word))
        [answer] = trained.ask("fill", re.sub(rf"{word}\b", masks, text))
        fills = np.array(answer.ids).reshape(known[word], -1)
        alike.append((fills == fills[0]).all())
    return {"holes of one word filled alike": fmean(alike)} if alike else {}


def rows_of(trained: TrainedModel, mixture: dict, knobs: Knobs, text: Text | None) -> Batch:
    """N_ROWS rows of a held-out text, or of stories if `text` is None."""
    tok = trained.tok
    if text is None:
        told = short_stories(N_STORIES)
        ids = [i for story in told for i in [*tok.encode(story.text), tok.EOT]]
        text = Text(np.array(ids, tok.dtype), tok.EOT)
    source = source_of(mixture, text, tok, trained.block_size, knobs, SEED)
    return make_batch(source, VALIDATION, 0, range(N_ROWS), N_ROWS).to(trained.device)


def targets_per_position(trained: TrainedModel, text: Text | None) -> float:
    """Predictions per position that the run's own objective asks for: tokens and, for electra, also
    a yes or no at each position."""
    batch = rows_of(trained, trained.mixture, trained.knobs, text)
    n = batch.targets.numel()
    if trained.model.detect_head is not None:
        n += int((batch.segment > 0).sum())
    return n / batch.inputs.numel()


@torch.no_grad()
def loss_on(trained: TrainedModel, name: str, knobs: Knobs, text: Text | None = None) -> float:
    """Nats per target on rows of an objective with token cross entropy, by default of stories.
    Raises UserError if the model's rows are too long for the objective."""
    check_knobs({name: 1.0}, knobs, (), trained.block_size)
    batch = rows_of(trained, {name: 1.0}, knobs, text)
    part = OBJECTIVES[name].loss(trained.model, batch, trained.tok, knobs)["token_loss"]
    return (part.sum / part.divisor).item()


# Rows on which every run of their objective is scored, whatever its own knobs (nats per target).
SPANS = (1, 3, 8, 32)  # mean lengths, at rate 0.5: at 0.15 a story has only one span of 8 or of 32
OTHER_ROWS = {f"spans of {n}": (["span"], Knobs(corruption_rate=0.5, mean_span=n)) for n in SPANS}
PREFIXES = (25, 50, 75)  # percent of a row
OTHER_ROWS |= {f"prefix of {p}%": (["prefix"], Knobs(prefix_frac=p / 100)) for p in PREFIXES}
OTHER_ROWS |= {f"masks of {p}%": (["mlm", "mntp"], Knobs(mask_rate=p / 100)) for p in (15, 40)}


# ---- a run --------------------------------------------------------------------------------------


def scores_of_model(trained: TrainedModel, own: Text | None = None) -> dict[str, float]:
    """The yardsticks and skills of one model. `own`: held-out text of its corpus, if that is not
    stories; such a model must continue stories, but is asked nothing else about them. The results
    of its probes come with those of random networks."""
    pairs = halves_of_stories(trained)
    found = bits_of_second_halves(trained, pairs, "bits per byte")

    exams = {}
    if own is None:
        found |= {name: skill.value for name, skill in skills.measure(trained).items()}
    else:
        pairs = halves_of_windows(trained, own)
        found |= bits_of_second_halves(trained, pairs, "bits per byte of own text")
        exams["roles of names"] = roles_of_names(trained, own)
        exams["documents"] = documents_apart(trained, own)
        if any(TASKS[entry].name == "infill" for entry in trained.tasks if entry != "unmask"):
            found |= holes_in_windows(trained, own)
        if trained.tasks[0].startswith("fill"):
            most = trained.block_size * 3 // 4
            texts = [trained.tok.decode((first + second)[:most]) for first, second in pairs]
            found |= filled_alike(trained, texts, lambda word: not keyword.iskeyword(word))
        if "similarity" in trained.tasks:
            windows = halves_of_windows(trained, own, apart=True)
            if len(windows) == N_WINDOWS:
                texts = [tuple(map(trained.tok.decode, pair)) for pair in windows]
                found["second parts found"] = skills.partners_found(trained, texts)
    if own is None and pairs:
        told = short_stories(N_DRAWN, SEED + 1)
        exams["first event"] = first_events(trained, told)
        exams["word fits"] = fitting_words(trained, told)
        if trained.attention == "causal":
            found["seeing the left only"] = left_only(trained)
        if "fill" in trained.tasks:  # "masked words found" is about stories that fit the run's rows
            [filled] = skills.filling(trained, short_stories(N_STORIES)).values()
            found["masked words found in short stories"] = filled.value
        if trained.tasks[0].startswith("fill"):
            texts = [story.text for story in short_stories(N_STORIES)]
            found |= filled_alike(
                trained, texts, lambda word: skills.kind_of(word) in stories.FACTS
            )
        if "fim" in trained.mixture:
            found["holes inside words"] = holes_inside_words(trained)
    if trained.model.future and pairs:
        found |= drafting(trained, pairs[:N_CONTINUED])

    found |= probes(trained, exams)
    found |= losses_on_other_rows(trained, own)
    found["targets per position"] = targets_per_position(trained, own)
    return {name: value for name, value in found.items() if value is not None}


def probes(trained: TrainedModel, exams: dict[str, Exam | None]) -> dict[str, float]:
    """What probes get right from the states of the model and of random networks. An exam is None if
    there is too little text for it."""
    found = {}
    for name, exam in exams.items():
        if exam is not None:
            found[name] = share_right(trained, exam)
            twins = (random_twin(trained, SEED + i) for i in range(N_TWINS))
            found[f"{name} random"] = fmean(share_right(twin, exam) for twin in twins)
    return found


def losses_on_other_rows(trained: TrainedModel, own: Text | None) -> dict[str, float]:
    """Losses on those OTHER_ROWS that are of the model's objective and fit its context."""
    found = {}
    for name, (objectives, knobs) in OTHER_ROWS.items():
        for objective in trained.mixture.keys() & objectives:
            with contextlib.suppress(UserError):  # such rows do not fit
                found[name] = loss_on(trained, objective, knobs, own)
    return found


def scores_of_run(run) -> dict[str, float]:
    """All that is known about a run, given its folder or a checkpoint: the yardsticks and, from its
    log, the time of a step and the last validation loss. Raises UserError."""
    trained = load(run)
    with set_for_asking(trained):
        found = scores_of_model(trained, own_text(run))
    path = checkpoint_path(run)
    if path.name == "ckpt.pt":  # the log's last lines are not about best.pt
        lines = read_log(path.parent)
        found["ms"] = median(line["ms"] for line in lines if "ms" in line)
        *_, found["val_loss"] = (line["val_loss"] for line in lines if "val_loss" in line)
    layout = trained.knobs.fim_layouts.split(",")[-1]  # the one that sample.py uses
    for what in ("holes filled right", "holes ended right"):
        if f"{what} ({layout})" in found:
            found[what] = found[f"{what} ({layout})"]
    return found


def read_log(folder: Path) -> list[dict]:
    """The lines of a run's log.jsonl. Raises UserError if there is none."""
    path = Path(folder, "log.jsonl")
    if not path.is_file():
        raise UserError(f"{folder} is not the folder of a run: {path} does not exist")
    return [json.loads(line) for line in path.read_text().splitlines()]


def own_text(run) -> Text | None:
    """The held-out text of a run's corpus, or None if that is stories. Raises UserError if the
    corpus is not there any more."""
    checkpoint = open_checkpoint(run)
    data = build(DataConfig, checkpoint.state["settings"])
    if count_stories(data.data):
        return None
    tokens = load_tokens(data, checkpoint.tok, expected=checkpoint.state["data_digest"])
    return Text(tokens.val, tokens.tok.EOT)
