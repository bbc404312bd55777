"""sample.py: use a trained model to continue, fill, restore, judge, score or embed a text.

The checkpoint says which objective and tokenizer it has, and the flags say what is wanted. If the
objective cannot serve a request, the error names the objectives that can. What the model wrote is
marked ⟪like this⟫. Left out: training, chat, serving. In Python:

    from sample import load
    model = load("out/fim")
    model.infill("Today Tom has", " red balls.")

    python sample.py --out_dir=out/fim --prompt="Today Tom has" --suffix=" red balls."
    python sample.py --out_dir=out/mlm --prompt="Today Tom has 5[MASK] balls."
    python sample.py --out_dir=out/mtp --prompt="At dawn," --speculative
    python sample.py --out_dir=out/clm --prompt="Today Tom has 5 red" --task=score
"""

import contextlib
import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from checkpoint import Checkpoint, build_model, open_checkpoint
from config import UserError, build, flag, parse_flags, run_command, suggest, visible
from device import find_device
from generate import Decoder, LookUp, Sampler, cut, heads_of, unmask
from mixture import first_member
from objectives import FIM_MARKS, OBJECTIVES, PAIR_MARKS, fim_prompt, pair_ids
from sentences import Spelled
from tokenizer import N_SENTINELS, Tokenizer

TASK_NAMES = ("continue", "infill", "fill", "restore", "unmask", "detect", "pair")
TASK_NAMES += ("similarity", "score", "embed")
GAP = "[MASK]"  # stands for a gap inside --prompt
MOST_NEW = 200  # most tokens that are written by default (a text is restored whole)
FILL_TOKENS = 8  # room that is reserved for the answer in each gap; diffusion fills so many
UL2_HIDDEN = 5  # tokens before the first gap that are hidden from ul2 too (infill_span)
FIM_GIVEN = 4  # tokens before a gap that fim reads as the beginning of its middle
BOUND_ROWS = 64  # maskings from which diffusion's bound on a text is estimated
# A token with more than this probability is marked as replaced. The threshold is above one half
# because texts that people ask about have fewer wrong tokens than training rows.
MARKED_ABOVE = 0.6


@dataclass
class SampleConfig:
    """which run is used, and for what"""

    out_dir: str = flag("out/clm", "folder of the run, or one of its checkpoints")
    prompt: str = flag("", "the text, with [MASK] for each gap; or the first of two texts")
    suffix: str | None = flag(None, "the text after a gap, or the second of two")
    task: str | None = flag(None, "what to do; automatic: by the texts given", TASK_NAMES)
    max_new_tokens: int | None = flag(
        None,
        f"write at most this many tokens; automatic: {MOST_NEW}, but a text is restored whole; "
        f"diffusion unmasks so many, or {FILL_TOKENS} in a gap",
        min=1,
        max=1 << 24,
    )
    num_samples: int = flag(1, "number of samples", min=1, max=1 << 16)
    temperature: float | None = flag(
        None, "0: the likeliest token; automatic: 0.7 to continue a text, 0 to fill", min=0
    )
    top_k: int = flag(0, "draw from the k likeliest tokens; 0: all", min=0)
    top_p: float = flag(1.0, "draw from the fewest tokens of this total probability", min=0, max=1)
    seed: int = flag(1, "seed of the first sample; the next ones count up", min=0, below=1 << 31)
    speculative: bool = flag(False, "draft and verify: faster, the same text except for rounding")
    mode: str = flag("R", "ul2: fill short gaps (R) or long ones (X)", ("R", "X"))
    steps: int = flag(32, "diffusion: steps from all masked to none", min=1)
    order: str = flag("confidence", "diffusion: surest first, or random", ("confidence", "random"))
    json: bool = flag(False, "print one JSON object per sample, for programs")
    device: str | None = flag(None, "cpu, cuda, cuda:N or mps; automatic: the fastest available")

    @property
    def most_new(self) -> int:
        """At most how many tokens are written."""
        return MOST_NEW if self.max_new_tokens is None else self.max_new_tokens


# ---- a trained model, for use -------------------------------------------------------------------


class TrainedModel:
    """A trained model, opened for use: the Python interface, and what the tasks need. ask,
    generate and infill take the flags of their task as keywords, such as temperature and seed."""

    def __init__(self, checkpoint: Checkpoint, device: str | None = None):
        self.device = find_device(device)
        self.tok = checkpoint.tok
        self.mixture = checkpoint.mixture
        self.knobs = checkpoint.knobs
        self.block_size = checkpoint.block_size
        self.model = build_model(checkpoint).to(self.device).requires_grad_(False)
        if self.device.type == "cpu":
            # The same values, stored column-major: 8 drafts then cost little more than 1 token.
            for module in self.model.modules():
                if isinstance(module, nn.Linear):
                    module.weight.data = module.weight.data.mT.contiguous().mT
        # Positions of a row that a pair model (nsp, sop) needs for [CLS] and [SEP]:
        self.pair_marks = 0 if self.model.pair_head is None else PAIR_MARKS
        self.banned = ~self.allowed().to(self.device)

    @property
    def attention(self) -> str:
        """ "causal", "prefix" or "full"; for a mixture, that of its first member."""
        return first_member(self.mixture).attention

    @property
    def tasks(self) -> list[str]:
        """The entries of TASKS that the model serves, the usual one first."""
        return tasks_of(self.mixture)

    def decoder(self, sampler: Sampler | None = None, batch: int = 1, also_allowed=()) -> Decoder:
        """A new decoder, greedy by default, that may draw text, EOT and `also_allowed` ids."""
        return Decoder(self.model, batch, self.block_size, sampler, self.allowed(also_allowed))

    def allowed(self, also_allowed=()) -> Tensor:
        """(V,) bool: the ids that may be drawn: text, EOT, and `also_allowed`."""
        allowed = torch.zeros(self.model.config.vocab_size, dtype=torch.bool)
        allowed[: self.tok.vocab_size] = torch.from_numpy(self.tok.n_bytes > 0)
        allowed[[self.tok.EOT, *also_allowed]] = True
        return allowed

    @torch.inference_mode()
    def states(self, ids, prefix_length: int = 0) -> Tensor:
        """(T,) ids, the first `prefix_length` read both ways -> (T, C), normalized."""
        row = torch.as_tensor(ids, device=self.device)[None]
        prefix = torch.arange(len(ids), device=self.device)[None] < prefix_length
        kind = "full" if prefix_length == len(ids) else "rule"
        mask = self.model.attention_mask(kind, torch.ones_like(row), prefix)
        return self.model.norm(self.model.trunk(row, mask))[0]

    @torch.inference_mode()
    def logits(self, ids, prefix_length: int = 0) -> Tensor:
        """(T,) ids -> (T, V) float32: the logits of what each position predicts. Ids that are
        never drawn, the special tokens other than EOT, have -inf."""
        logits = self.model.logits(self.states(ids, prefix_length))
        return logits.float().masked_fill(self.banned, -torch.inf)

    def states_both_ways(self, ids: list[int]) -> Tensor:
        """(T, C): the states of T ids, read in both directions. A pair model gets them as a
        pair, split at the sentence end nearest to the middle."""
        if not self.pair_marks:
            return self.states(ids, prefix_length=len(ids))
        tok = self.tok
        half = len(ids) // 2
        ends = Spelled(np.array(ids), tok).sentence_ends()
        middle = min(ends, key=lambda end: abs(end - half), default=half)
        row = pair_ids(ids[:middle], ids[middle:], tok)
        states = self.states(row, prefix_length=len(row))
        return torch.cat([states[1 : 1 + middle], states[2 + middle : -1]])

    def own_states(self, ids: list[int]) -> Tensor:
        """(T, C): the states of T ids, read in both directions, unless attention is causal."""
        if self.attention == "causal":
            return self.states(ids)
        return self.states_both_ways(ids)

    def as_document(self, ids: list[int]) -> list[int]:
        """The ids plus a document's EOT, if it fits (a pair model has [SEP] there instead)."""
        return ids if self.pair_marks else [*ids, self.tok.EOT][: self.block_size]

    @torch.inference_mode()
    def masked_logits(self, ids: list[int]) -> Tensor:
        """(T, V) float32: logits of what belongs at each of T ids, read in both directions. Ids
        that are never drawn have -inf. For an electra model, the generator answers."""
        model = self.model
        if model.generator is None:
            logits = model.logits(self.states_both_ways(ids))
        else:
            row = torch.tensor([ids], device=self.device)
            states = model.generator_states(row, model.full_mask(row))[0]
            logits = F.linear(states, model.embed_tokens.weight)
        return logits.float().masked_fill(self.banned, -torch.inf)

    def ask(self, task: str | None, prompt="", suffix: str | None = None, **flags):
        """The answers to a task of the command line, whose flags are keywords here."""
        known = vars(SampleConfig()).keys() - {"out_dir", "device", "json"}
        for name in sorted(flags.keys() - known):
            hint = suggest(name, known) or "load() takes out_dir and device"
            raise TypeError(f"ask() takes no {name}; {hint}")
        request = dict(flags, task=task, prompt=prompt, suffix=suffix)
        return serve(self, build(SampleConfig, request))

    def generate(self, prompt: str = "", **flags) -> str:
        """The text that continues the prompt: one sample; ask() can give several."""
        return self.ask("continue", prompt, num_samples=1, **flags)[0].text

    def infill(self, before: str, after: str, **flags) -> str:
        """The text between two texts: one sample; ask() can give several."""
        return self.ask("infill", before, after, num_samples=1, **flags)[0].text

    def fill(self, text: str) -> str:
        """The text with each [MASK] replaced by a token."""
        return self.ask("fill", text)[0].whole

    def score(self, text: str) -> dict:
        """nats, perplexity per token, bits_per_byte; bound: whether these are upper bounds."""
        return self.ask("score", text)[0].details

    def embed(self, text: str) -> Tensor:
        """(C,) float32: the mean of the text's hidden states, read a context at a time."""
        ids = self.tok.encode(text) or [self.tok.EOT]
        room = self.block_size - self.pair_marks
        parts = [self.own_states(ids[start : start + room]) for start in range(0, len(ids), room)]
        return torch.cat(parts).float().mean(0).cpu()


def load(out_dir, device: str | None = None) -> TrainedModel:
    """Load the model from a run's folder, or from one of its checkpoints. Changes no global state.
    Raises UserError."""
    return TrainedModel(open_checkpoint(out_dir), device)


# ---- tasks: each a function (trained, request) -> answers ---------------------------------------


@dataclass
class Answer:
    """`parts` is a text in pieces, each with True if the model wrote it; `ids` are the tokens that
    the model wrote."""

    parts: list[tuple[str, bool]]
    ids: list[int] = field(default_factory=list)
    details: dict = field(default_factory=dict)  # further results of a task, for programs
    lines: list[str] = field(default_factory=list)  # further output, for people

    @property
    def text(self) -> str:
        """What the model wrote."""
        return "".join(text for text, written in self.parts if written)

    @property
    def whole(self) -> str:
        """What the model wrote, with the given text around it."""
        return "".join(text for text, _ in self.parts)


def write(
    trained: TrainedModel,
    request: SampleConfig,
    prompt: list[int],
    prefix_length: int = 0,
    ends=(),
    goes_on=False,
) -> list[Answer]:
    """Samples of what follows a prompt, up to an EOT or one of the ids in `ends`. If there are
    `ends`, a sample has at least one token, like a span in training. `goes_on`: the text may
    outgrow the context, whose beginning is then dropped. The answer for a gap may not, because that
    would drop the question."""
    tok = trained.tok
    most = request.most_new
    if not goes_on:
        most = min(most, max(trained.block_size - len(prompt) + 1, 0))  # the last token is not read
    decoder = trained.decoder(sampler_for(request, goes_on), request.num_samples, ends)
    drafters = []
    if request.speculative:
        heads = [heads_of(decoder)] if trained.model.future else []
        drafters = [*heads, LookUp()]
    written, stats = decoder.generate(
        prompt,
        most,
        stops={tok.EOT, *ends},
        may_be_empty=not ends,
        seed=request.seed,
        prefix_length=prefix_length,
        drafters=drafters,
    )
    figures = {name: getattr(stats, name) for name in ("passes", "drafted", "kept", "seconds")}
    answers = [Answer([(tok.decode(ids), True)], ids, figures) for ids in written]
    note_full(answers, most, request)
    return answers


def sampler_for(request: SampleConfig, goes_on: bool) -> Sampler:
    usual = 0.7 if goes_on else 0.0
    temperature = usual if request.temperature is None else request.temperature
    if temperature == 0 and (request.top_k or request.top_p < 1):
        wrong = "--top_k and --top_p have no effect at temperature 0, the default to fill gaps"
        raise UserError(f"{wrong}; add --temperature=0.7, or leave them out")
    return Sampler(temperature, request.top_k, request.top_p)


def gap_parts(request: SampleConfig) -> list[str]:
    """The texts between the gaps: each [MASK] is a gap, and there is one before --suffix."""
    text = request.prompt if request.suffix is None else request.prompt + GAP + request.suffix
    return text.split(GAP)


def with_masks(tok: Tokenizer, parts: list[str]) -> list[int]:
    """The parts' ids with [MASK] in each gap."""
    ids = []
    for part in parts:
        ids += [*tok.encode(part), tok.MASK]
    return ids[:-1]


def parts_of(tok: Tokenizer, ids: list[int], written: list[bool]) -> list[tuple[str, bool]]:
    """Ids, and for each whether the model wrote it -> the parts of an answer."""
    runs = itertools.groupby(zip(written, ids), key=lambda pair: pair[0])
    return [(tok.decode([id for _, id in run]), by_model) for by_model, run in runs]


def need_room(trained: TrainedModel, n: int, remedy: str = "shorten the texts") -> None:
    """Raise UserError if a question and its answer take more tokens than the context has."""
    if n > trained.block_size:
        raise UserError(f"this takes {n} tokens but the context has {trained.block_size}: {remedy}")


def note_full(answers: list[Answer], room: int, request: SampleConfig) -> None:
    """A line for people about each answer that ended only because it took all the `room`."""
    for answer in answers:
        if 0 < len(answer.ids) == room < request.most_new:
            answer.lines.append("(the context is full; to see the rest, shorten the texts)")


def note_unread(n: int, n_read: int, which: str) -> list[str]:
    """A line for people if the model read only some of n tokens."""
    return [f"(only {n_read} of {n} tokens were read: those {which})"] if n_read < n else []


def continue_text(trained: TrainedModel, request: SampleConfig, source=()) -> list[Answer]:
    """Text after the prompt. `source`: ids to read instead of the prompt's, in both directions."""
    ids = trained.tok.encode(request.prompt)
    prompt = source or ids or [trained.tok.EOT]
    answers = write(trained, request, prompt, len(source), goes_on=True)
    # Of the ids that fit, only the text's: continue_ul2 adds a mode token and an EOT.
    n_read = sum(id < trained.tok.n_ordinary for id in prompt[-trained.block_size :])
    for answer in answers:
        answer.parts.insert(0, (request.prompt, False))
        answer.lines += note_unread(len(ids), n_read, "at the end")
    return answers


def continue_prefix(trained: TrainedModel, request: SampleConfig) -> list[Answer]:
    """The prompt is read in both directions, then continued."""
    source = trained.tok.encode(request.prompt)[-trained.block_size :]
    return continue_text(trained, request, source)


def continue_ul2(trained: TrainedModel, request: SampleConfig) -> list[Answer]:
    """UL2's S-denoiser: [S] and the prompt are the source, and what follows is the target."""
    text = trained.tok.encode(request.prompt)[-(trained.block_size * 3 // 4) :]
    return continue_text(trained, request, [trained.tok.S, *text, trained.tok.EOT])


def infill_fim(trained: TrainedModel, request: SampleConfig) -> list[Answer]:
    """The text in one gap, up to EOT. The layout is the last of the model's fim_layouts, by default
    spm, where the middle comes right after its prefix: a small model learns that first.

    The last FIM_GIVEN tokens before the gap are moved after <MID>, as if the middle began with
    them. So the model writes right after the words that it continues. (In psm they would be far
    away, before <SUF>.)

        At dawn Tom rode to the[MASK]. -> <SUF>.<PRE>At dawn<MID> Tom rode to the
                                          goes on with: mill$
    """
    parts = gap_parts(request)
    before, after = map(trained.tok.encode, parts)
    n = len(before) + len(after)
    room = trained.block_size - FIM_MARKS - min(trained.block_size // 4, request.most_new)
    before = before[-max(room - len(after), room // 2) :]  # each side may have half of the room
    after = after[: room - len(before)]
    layout = trained.knobs.fim_layouts.split(",")[-1]
    given_from = max(len(before) - FIM_GIVEN, 0)
    while given_from and trained.tok.bytes[before[given_from]][0] >> 6 == 0b10:
        given_from -= 1  # this token begins inside a UTF-8 character
    prompt = fim_prompt(layout, trained.tok, before[:given_from], after)
    answers = write(trained, request, [*prompt, *before[given_from:]])
    for answer in answers:
        answer.parts = [(parts[0], False), *answer.parts, (parts[1], False)]
        answer.lines += note_unread(n, len(before) + len(after), "around the gap")
    return answers


def infill_span(trained: TrainedModel, request: SampleConfig, mode=(), hidden=None) -> list[Answer]:
    """The source has a sentinel in each gap; the target repeats each, followed by the missing text.

    Training hides the same share of every text, and the model expects that share: if less is
    missing, it writes too much into the gaps. So more is hidden here: the last `hidden` tokens
    before the first gap, which are given at the start of the target, and a gap at the end of the
    text, which the model is not asked to fill.

        At noon Ben sees that Tom has[MASK] hats. -> source At noon Ben sees<0> hats.<1>$
            3 tokens are hidden: the target is given <0> that Tom has, and goes on with: red<1>
    """
    tok = trained.tok
    parts = gap_parts(request)
    n = len(parts) - 1
    if n >= N_SENTINELS:
        raise UserError(f"the texts have {n} gaps, but this model fills at most {N_SENTINELS - 1}")
    pieces = [tok.encode(part) for part in parts]  # of the source, with gaps between them
    hidden = min(hidden or round(trained.knobs.mean_span), len(pieces[0]))
    n_shown = len(pieces[0]) - hidden
    given = pieces[0][n_shown:]
    source = [*mode, *pieces[0][:n_shown]]
    for k, piece in enumerate(pieces[1:]):
        source += [tok.sentinel + k, *piece]
    if pieces[-1]:  # otherwise the text already ends in a gap
        source.append(tok.sentinel + n)
    source.append(tok.EOT)
    room_for_gaps = n * (1 + FILL_TOKENS)
    remedy = f"shorten the texts or give fewer gaps ({n} may take {room_for_gaps} tokens)"
    need_room(trained, len(source) + len(given) + room_for_gaps, remedy)

    seeds = range(request.seed, request.seed + request.num_samples)
    requests = [replace(request, num_samples=1, seed=seed) for seed in seeds]
    return [fill_in_turn(trained, one, source, given, parts) for one in requests]


def fill_in_turn(trained: TrainedModel, request: SampleConfig, source, given, parts) -> Answer:
    """Fill the gaps between the parts, one after another, by writing the target, which begins
    with <0> and the `given` tokens. A gap ends at the next sentinel, or at an EOT, which the model
    writes early if it thinks that all gaps are filled."""
    tok = trained.tok
    target = [tok.sentinel, *given]
    whole = Answer([(parts[0], False)])
    fills = []
    figures = Counter()
    for k in range(1, len(parts)):
        left = request.most_new - len(whole.ids)
        seed = request.seed + 1000 * (k - 1)  # each gap has random numbers of its own
        rest = replace(request, max_new_tokens=left, seed=seed)
        [answer] = write(trained, rest, [*source, *target], len(source), [tok.sentinel + k])
        target += [*answer.ids, tok.sentinel + k]
        whole.parts += [*answer.parts, (parts[k], False)]
        whole.ids += answer.ids
        fills.append(answer.text)
        figures.update(answer.details)
        whole.lines += answer.lines
        if not answer.ids:  # a gap that was reached has at least one token
            remedy = "shorten the texts" if left > 0 else "raise --max_new_tokens"
            whole.lines.append(f"(gap {k} was not reached: {remedy})")
    whole.details = {**figures, "fills": fills}
    return whole


def infill_ul2(trained: TrainedModel, request: SampleConfig) -> list[Answer]:
    """infill_span, after a mode token, [R] or [X]."""
    return infill_span(trained, request, [getattr(trained.tok, request.mode)], UL2_HIDDEN)


def restore(trained: TrainedModel, request: SampleConfig) -> list[Answer]:
    """The whole text, restored from a noisy one; each gap is one [MASK]."""
    tok = trained.tok
    source = [*with_masks(tok, gap_parts(request)), tok.EOT]
    if len(source) == 1:
        raise UserError("there is no text to restore: give --prompt")
    need_room(trained, 2 * len(source))
    whole = replace(request, max_new_tokens=request.max_new_tokens or trained.block_size)
    return write(trained, whole, source, len(source))


def fill_masks(trained: TrainedModel, request: SampleConfig) -> list[Answer]:
    """One token for each [MASK], all at once; the five likeliest are listed."""
    tok = trained.tok
    ids = with_masks(tok, gap_parts(request))
    need_room(trained, len(ids) + trained.pair_marks)

    masked = [id == tok.MASK for id in ids]
    gaps = [i for i, is_masked in enumerate(masked) if is_masked]
    logits = trained.masked_logits(trained.as_document(ids))[gaps]
    logits[:, tok.EOT] = -torch.inf  # a document does not end in a gap
    top = logits.softmax(-1).topk(5)
    guesses = []
    lines = []
    for gap, best, p in zip(gaps, top.indices.tolist(), top.values.tolist()):
        ids[gap] = best[0]
        tokens = [tok.decode([id]) for id in best]
        guesses.append([{"token": token, "p": round(q, 4)} for token, q in zip(tokens, p)])
        listed = "   ".join(f"{token!r} {q:.2f}" for token, q in zip(tokens, p))
        lines.append(f"gap {len(lines) + 1}: {listed}")
    written = [ids[gap] for gap in gaps]
    return [Answer(parts_of(tok, ids, masked), written, {"guesses": guesses}, lines)]


def unmask_gaps(trained: TrainedModel, request: SampleConfig) -> list[Answer]:
    """Masked tokens become text in `steps` steps. Each [MASK] in --prompt is one masked token;
    between --prompt and --suffix there are --max_new_tokens."""
    n = request.max_new_tokens or FILL_TOKENS
    n = min(n, trained.block_size + 1)  # one too many is enough for need_room to refuse
    text = request.prompt
    remedy = "shorten the texts"
    if request.suffix is not None:
        text += GAP * n + request.suffix
        remedy += ", or lower --max_new_tokens, the gap's length"
    elif request.max_new_tokens:
        wrong = f"--max_new_tokens does not apply to {GAP}, which is one token"
        raise UserError(f"{wrong}: leave that flag out, or give two texts, --prompt and --suffix")
    ids = with_masks(trained.tok, text.split(GAP))
    need_room(trained, len(ids), remedy)
    return unmasked(trained, request, trained.as_document(ids), goes_on=False)


def unmask_rest(trained: TrainedModel, request: SampleConfig) -> list[Answer]:
    """Up to --max_new_tokens masked tokens after the prompt become text in `steps` steps. An EOT
    that the model writes ends the text."""
    ids = trained.tok.encode(request.prompt)
    need_room(trained, len(ids) + 1)
    n = min(request.most_new, trained.block_size - len(ids))
    answers = unmasked(trained, request, ids + [trained.tok.MASK] * n, goes_on=True)
    note_full(answers, n, request)
    return answers


def unmasked(trained: TrainedModel, request, ids: list[int], goes_on: bool) -> list[Answer]:
    """Samples of the ids with text in place of [MASK]. Only a text that goes on may end there."""
    tok = trained.tok
    allowed = trained.allowed()
    allowed[tok.EOT] = goes_on
    x = torch.tensor([ids] * request.num_samples, device=trained.device)
    options = dict(steps=request.steps, order=request.order, seed=request.seed)
    sampler = sampler_for(request, goes_on)
    rows = unmask(trained.model, x, tok.MASK, allowed, sampler, **options).tolist()

    masked = [id == tok.MASK for id in ids]
    rows = [cut(row, {tok.EOT}) for row in rows]
    return [Answer(parts_of(tok, row, masked), [*itertools.compress(row, masked)]) for row in rows]


@torch.inference_mode()
def detect(trained: TrainedModel, request: SampleConfig) -> list[Answer]:
    """The tokens that were probably replaced are marked; the most suspect ones are listed."""
    ids = trained.tok.encode(request.prompt)
    if not ids:
        raise UserError("there is no text to judge: give --prompt")
    need_room(trained, len(ids))
    states = trained.states_both_ways(trained.as_document(ids))[: len(ids)]
    p = [round(q, 4) for q in trained.model.detect_head(states).float().sigmoid().tolist()]
    # A character of several tokens is marked as a whole.
    begins = [trained.tok.bytes[id][0] >> 6 != 0b10 for id in ids]
    characters = list(itertools.accumulate(begins))  # for each token, the number of its character
    doubted = {c for c, q in zip(characters, p) if q > MARKED_ABOVE}
    parts = parts_of(trained.tok, ids, [c in doubted for c in characters])
    suspects = sorted(range(len(p)), key=p.__getitem__, reverse=True)[:5]
    listed = (f"{trained.tok.decode([ids[i]])!r} {p[i]:.2f} (token {i})" for i in suspects)
    lines = ["most suspicious: " + "   ".join(listed)]
    if not doubted:
        lines.insert(0, f"(nothing is marked: no token has a probability above {MARKED_ABOVE})")
    pieces = [trained.tok.decode([id]) for id in ids]
    return [Answer(parts, [], {"pieces": pieces, "replaced_probability": p}, lines)]


@torch.inference_mode()
def pair(trained: TrainedModel, request: SampleConfig, says="the second text follows the first"):
    """Does the second text follow the first (nsp)?"""
    first, second = map(trained.tok.encode, (request.prompt, request.suffix))
    need_room(trained, len(first) + len(second) + PAIR_MARKS)
    row = pair_ids(first, second, trained.tok)
    state = trained.states(row, prefix_length=len(row))[0]
    p = trained.model.pair_head(state).float().sigmoid().item()
    line = f"probability that {says}: {p:.3f}"
    return [Answer([], [], {"probability": round(p, 4)}, [line])]


def pair_order(trained: TrainedModel, request: SampleConfig) -> list[Answer]:
    """Are two texts of one document in order (sop)?"""
    return pair(trained, request, says="the texts are in order, if they are from one document")


def similarity(trained: TrainedModel, request: SampleConfig) -> list[Answer]:
    """Cosine of the two texts' embeddings."""
    first, second = map(trained.embed, (request.prompt, request.suffix))
    cosine = F.cosine_similarity(first, second, dim=0).item()
    line = f"similarity (cosine): {cosine:.3f}"
    return [Answer([], [], {"similarity": round(cosine, 4)}, [line])]


def embed(trained: TrainedModel, request: SampleConfig) -> list[Answer]:
    """The mean of the text's hidden states."""
    if not request.prompt:
        raise UserError("there is no text to embed: give --prompt")
    vector = trained.embed(request.prompt).tolist()
    line = f"{len(vector)} numbers (--json has all): "
    line += " ".join(f"{x:.3f}" for x in vector[:8]) + " ..."
    return [Answer([], [], {"embedding": vector}, [line])]


def score(trained: TrainedModel, request: SampleConfig) -> list[Answer]:
    """nats, perplexity and bits per byte, if the objective's loss is a code length of text. (A
    prefix model pays a lot for a text's first tokens: in training it seldom predicted these.)"""
    ids = trained.tok.encode(request.prompt)
    if not ids:
        raise UserError("there is no text to score: give --prompt")
    bound = trained.attention == "full"
    nats = bound_nats(trained, ids) if bound else causal_nats(trained, ids)
    perplexity = math.exp(min(nats / len(ids), 700))  # more would overflow
    bits = nats / math.log(2) / int(trained.tok.n_bytes[ids].sum())
    details = dict(nats=nats, n_tokens=len(ids), bound=bound)
    details |= dict(perplexity=perplexity, bits_per_byte=bits)
    line = f"at most about {nats:.2f} nats" if bound else f"{nats:.2f} nats"
    line += f" over {len(ids)} tokens, perplexity {perplexity:.4g} per token, "
    return [Answer([], [], details, [f"{line}{bits:.3f} bits per byte"])]


def causal_nats(trained: TrainedModel, ids: list[int]) -> float:
    """-log p of the ids at the start of a document, with probabilities over the ids that may be
    drawn. In a long text, each id after the first context has at least half a context before it."""
    text = torch.tensor([trained.tok.EOT, *ids], device=trained.device)
    W = trained.block_size
    nats = 0.0
    done = 0  # ids scored so far
    while done < len(ids):
        start = max(0, done - W // 2)
        window = text[start : start + W + 1]
        logits = trained.logits(window[:-1])[done - start :]
        nats += F.cross_entropy(logits, window[1 + done - start :], reduction="sum").item()
        done = start + len(window) - 1
    return nats


def bound_nats(trained: TrainedModel, ids: list[int], before: list[int] | None = None) -> float:
    """Diffusion's upper bound on -log p of the ids after `before` (by default the start of a
    document), given their number: k of n tokens are masked, k is uniform on 1 ... n, and the nats
    of the masked tokens weigh n/k (as LLaDA is evaluated). It is estimated from BOUND_ROWS maskings
    with evenly spread k, the same for the same text. A long text is scored in parts of one row
    each, as separate texts."""
    before = torch.tensor(before or [trained.tok.EOT])
    room = trained.block_size - len(before)
    rng = np.random.default_rng(ids)
    nats = 0.0
    for start in range(0, len(ids), room):
        text = torch.tensor(ids[start : start + room])
        n = len(text)
        u = rng.random()
        for row in range(BOUND_ROWS):
            k = 1 + int(n * (row + u) / BOUND_ROWS)
            masked = torch.zeros(n, dtype=torch.bool)
            masked[rng.permutation(n)[:k]] = True
            noisy = torch.cat([before, text.masked_fill(masked, trained.tok.MASK)])
            logits = trained.logits(noisy, prefix_length=len(noisy))[len(before) :].cpu()
            loss = F.cross_entropy(logits[masked], text[masked], reduction="sum").item()
            nats += loss * n / k / BOUND_ROWS
    return nats


class Task(NamedTuple):
    """An entry of TASKS: a task, as one kind of model does it."""

    names: tuple[str, ...]  # values of --task that ask for it, the usual one first
    function: Callable  # function(trained, request) -> answers
    texts: str  # which --prompt and --suffix it takes, see can_answer
    reads: set[str]  # the flags it reads, except those that every task reads


# The flags read by tasks that draw tokens, that write text, and that unmask.
DRAWS = {"max_new_tokens", "num_samples", "temperature", "top_k", "top_p", "seed"}
WRITES = DRAWS | {"speculative"}
UNMASKS = DRAWS | {"steps", "order"}
# fmt: off
NEEDS = {  # the texts of a task -> how they are given
    "text":      "a text without a gap, in --prompt",
    "one gap":   f"a text with one gap: {GAP} in --prompt, or between --prompt and --suffix",
    "gaps":      f"a text with gaps: {GAP} in --prompt, or between --prompt and --suffix",
    "two texts": "two texts: --prompt and --suffix",
    "any text":  "a text, with or without gaps",
}
TASKS = {
    "continue":        Task(("continue",),         continue_text,   "text",      WRITES),
    "continue_prefix": Task(("continue",),         continue_prefix, "text",      WRITES),
    "continue_ul2":    Task(("continue",),         continue_ul2,    "text",      WRITES),
    "infill_fim":      Task(("infill",),           infill_fim,      "one gap",   WRITES),
    "infill_span":     Task(("infill",),           infill_span,     "gaps",      WRITES),
    "infill_ul2":      Task(("infill",),           infill_ul2,      "gaps",      WRITES | {"mode"}),
    "restore":         Task(("restore",),          restore,         "any text",  WRITES),
    "unmask":          Task(("unmask", "infill"),  unmask_gaps,     "gaps",      UNMASKS),
    "continue_unmask": Task(("continue",),         unmask_rest,     "text",      UNMASKS),
    "fill":            Task(("fill",),             fill_masks,      "gaps",      set()),
    "detect":          Task(("detect",),           detect,          "text",      set()),
    "pair":            Task(("pair",),             pair,            "two texts", set()),
    "pair_order":      Task(("pair",),             pair_order,      "two texts", set()),
    "similarity":      Task(("similarity",),       similarity,      "two texts", set()),
    "score":           Task(("score",),            score,           "text",      set()),
    "embed":           Task(("embed",),            embed,           "text",      set()),
}
# fmt: on
assert {*TASK_NAMES} == {name for task in TASKS.values() for name in task.names}
for name, objective in OBJECTIVES.items():
    assert {*objective.tasks} <= TASKS.keys(), f"{name}: {objective.tasks} must be in TASKS"


# ---- asking and answering ----------------------------------------------------------------------


def tasks_of(names: Iterable[str]) -> list[str]:
    """The entries of TASKS that a model of these objectives serves, the usual one first."""
    found = [entry for name in names for entry in OBJECTIVES[name].tasks]
    if all(OBJECTIVES[name].likelihood for name in names):
        found.append("score")
    return list(dict.fromkeys([*found, "embed"]))


def can_answer(entry: str, request: SampleConfig) -> bool:
    """Whether an entry of TASKS takes the given texts and, if --task is set, goes by that name."""
    task = TASKS[entry]
    n_gaps = len(gap_parts(request)) - 1
    # --suffix alone makes one gap. Where a task takes none, naming it makes "[MASK]" plain text.
    fits = {
        "text": request.suffix is None and (n_gaps == 0 or request.task),
        "one gap": n_gaps == 1,
        "gaps": n_gaps > 0,
        "two texts": request.prompt and request.suffix and (n_gaps == 1 or request.task),
        "any text": True,
    }
    wanted = request.task in task.names if request.task else entry not in ("score", "embed")
    return bool(wanted and fits[task.texts])


def unread_flags(entry: str, request: SampleConfig) -> list[str]:
    """The flags that were set (differ from their defaults) but are read only by other tasks."""
    others = set().union(*(task.reads for task in TASKS.values())) - TASKS[entry].reads
    return sorted(name for name in others if getattr(request, name) != getattr(SampleConfig, name))


def refusal(trained: TrainedModel, request: SampleConfig) -> str:
    """A refusal's text: what this model takes, and which objectives could serve the request."""
    names = {}  # how texts are given -> the names of the tasks that take them, each once
    for task in (TASKS[entry] for entry in trained.tasks):
        names.setdefault(NEEDS[task.texts], {})[task.names[0]] = None
    takes = "; or ".join(f"{texts} (--task={'|'.join(each)})" for texts, each in names.items())
    known = {name for entry in trained.tasks for name in TASKS[entry].names}
    lacks = request.task is not None and request.task not in known
    has_no = f"has no --task={request.task}; it " if lacks else ""
    line = f"this {'+'.join(trained.mixture)} model {has_no}takes {takes}"
    if not (request.task or request.prompt or request.suffix):  # then nothing was asked
        return line
    others = [name for name in OBJECTIVES if any(can_answer(e, request) for e in tasks_of([name]))]
    if others:
        line += f". Objectives that take texts given like yours: {', '.join(others)}"
    return line


@contextlib.contextmanager
def set_for_asking(trained: TrainedModel):
    """Settings for short texts of many lengths: one thread for a small model on a CPU, because a
    token is too little work to share; on CUDA no cuDNN attention: it plans anew for each length,
    and no TF32: a pass over one token would round otherwise than a pass over several."""
    threads = torch.get_num_threads()
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    precision = torch.get_float32_matmul_precision()
    if trained.device.type == "cpu" and trained.model.config.n_embd <= 512:
        torch.set_num_threads(1)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        torch.set_float32_matmul_precision(precision)


def serve(trained: TrainedModel, request: SampleConfig) -> list[Answer]:
    """The answers to a request. Raises UserError if it cannot be served or a flag is not read."""
    able = [entry for entry in trained.tasks if can_answer(entry, request)]
    if not able:
        raise UserError(refusal(trained, request))
    # If several can (in a mixture), take the first that reads most of the given flags.
    entry = min(able, key=lambda entry: len(unread_flags(entry, request)))
    if ignored := unread_flags(entry, request):
        task = f"--task={TASKS[entry].names[0]} of this {'+'.join(trained.mixture)} model"
        raise UserError(f"--{ignored[0]} does not apply to {task}; leave it out")
    if request.speculative and request.num_samples > 1:
        raise UserError("--speculative writes one text at a time: leave out --num_samples")
    with set_for_asking(trained):
        answers = TASKS[entry].function(trained, request)
    answers[0].lines += hints(trained, request, entry, able)
    if len(answers) > 1 and all(answer.ids == answers[0].ids for answer in answers):
        remedy = "raise --temperature, and --top_k or --top_p if you set them"
        answers[-1].lines.append(f"(all samples are identical; to vary them, {remedy})")
    return answers


def hints(trained: TrainedModel, request: SampleConfig, entry: str, able: list[str]) -> list[str]:
    """What may surprise somebody about the answer of `entry`, one of the `able` entries of TASKS:
    that another task could have been meant, and that a blank before a gap is a token of its own."""
    lines = []
    name = TASKS[entry].names[0]
    fitting = (other for other in able if not unread_flags(other, request))
    others = {TASKS[other].names[0] for other in fitting} - {name}
    if others and not request.task and len(trained.mixture) > 1:
        choices = " or ".join(f"--task={other}" for other in sorted(others))
        lines.append(f"(task: {name}; {choices} would do something else)")

    takes_gaps = TASKS[entry].texts in ("one gap", "gaps", "any text")
    blank_before_gap = any(part.endswith(" ") for part in gap_parts(request)[:-1])
    if takes_gaps and blank_before_gap and trained.tok.name != "bytes":
        lines.append("(a token includes the space before its word: leave no space before a gap)")
    return lines


# ---- showing -----------------------------------------------------------------------------------


def marked(parts: list[tuple[str, bool]]) -> str:
    """The text with marks around what the model wrote.

    >>> marked([("a", False), ("b", True)])
    'a⟪b⟫'
    """
    return "".join(f"⟪{visible(text)}⟫" if written else visible(text) for text, written in parts)


def show(answers: list[Answer]) -> None:
    for number, answer in enumerate(answers, 1):
        if len(answers) > 1:
            print(f"--- sample {number}")
        if answer.parts:
            print(marked(answer.parts))
        for line in answer.lines:
            print(visible(line))
    figures = answers[0].details
    if figures.get("drafted"):
        speed = len(answers[0].ids) / figures["seconds"]
        kept = f"kept {figures['kept']} of {figures['drafted']} drafts"
        print(f"[{speed:.1f} tokens/s, {kept}]", file=sys.stderr)


def main(argv: list[str]) -> None:
    request = build(SampleConfig, parse_flags(argv, __doc__, SampleConfig))
    answers = serve(load(request.out_dir, request.device), request)
    if request.json:
        for answer in answers:
            said = {"prompt": request.prompt, "suffix": request.suffix, "text": answer.text}
            said |= {"whole": answer.whole, "tokens": answer.ids, "notes": answer.lines}
            print(json.dumps(said | answer.details, allow_nan=False))
    else:
        show(answers)


if __name__ == "__main__":
    run_command(main, lower="--num_samples or --max_new_tokens")
