"""sample.py: using a trained model: one small function for each task.

The checkpoint says which objective and tokenizer it has, the flags say what is wanted, and a
request that the objective cannot serve names those that can. What the model wrote is marked, ⟪so⟫,
or by a color on a terminal. Left out: training, chat, serving. In Python:

    from sample import load
    model = load("out/fim")
    model.infill("Today Tom has", " red balls.")

    python sample.py --out_dir=out/fim --prompt="Today Tom has" --suffix=" red balls."
    python sample.py --out_dir=out/mlm --prompt="Today Tom has 5[MASK] balls."
    python sample.py --out_dir=out/mtp --prompt="At dawn," --speculative
    python sample.py --out_dir=out/clm --prompt="Today Tom has 5 red balls." --task=score
"""

import contextlib
import functools
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from checkpoint import Checkpoint, build_model, checkpoint_path, open_checkpoint
from config import UserError, build, flag, parse_flags, run_command, visible
from device import find_device, has_bfloat16
from generate import Decoder, Heads, LookUp, Sampler, cut, unmask
from objectives import OBJECTIVES, PAIR_MARKS, fim_prompt, mask_probability, pair_ids
from tokenizer import N_SENTINELS, Tokenizer

TASK_NAMES = ("continue", "infill", "fill", "restore", "unmask", "detect", "pair", "similarity")
FILL_TOKENS = 8  # room that is kept for what stands in a gap
BOUND_ROWS = 64  # maskings by which diffusion's bound on a text is estimated


@dataclass
class SampleConfig:
    """which run is used, and for what"""

    out_dir: str = flag("out/fim", "folder of the run, or one of its checkpoints")
    prompt: str = flag("", "the text before, or the first of two; empty: a document begins")
    suffix: str | None = flag(None, "the text after a gap, or the second of two")
    gap: str = flag("[MASK]", "what stands for a gap inside --prompt, where gaps are filled")
    task: str | None = flag(
        None, "what is asked; automatic: by the texts given", (*TASK_NAMES, "score", "embed")
    )
    max_new_tokens: int = flag(200, "most tokens to write; diffusion: tokens to unmask", min=1)
    num_samples: int = flag(1, "samples", min=1)
    temperature: float | None = flag(
        None,
        "0: the likeliest token, 1: the model's own; automatic: 0.7 to continue a text, 0 to fill",
        min=0,
    )
    top_k: int = flag(0, "draw from the k likeliest tokens; 0: all", min=0)
    top_p: float = flag(1.0, "draw from the fewest tokens that hold this probability", min=0, max=1)
    seed: int = flag(1, "seed of the draws", min=0, below=1 << 31)
    speculative: bool = flag(
        False, "draft and verify: the same text (but for bfloat16's rounding), sooner"
    )
    mode: str = flag("R", "ul2: fills short gaps (R) or long ones (X)", ("R", "X"))
    steps: int = flag(32, "diffusion: steps from all masked to none", min=1)
    order: str = flag("confidence", "diffusion: the surest first, or any", ("confidence", "random"))
    json: bool = flag(False, "one JSON object a sample, for programs")
    device: str | None = flag(None, "cpu, cuda or mps; automatic: the fastest there is")

    def __post_init__(self):
        for name in ("prompt", "suffix", "gap"):
            text = getattr(self, name)
            if text is not None:  # what is not UTF-8 becomes a question mark
                setattr(self, name, text.encode("utf-8", "replace").decode())


# ---- the reader ---------------------------------------------------------------------------------


class Reader:
    """A trained model, opened for use: the Python interface, and what the tasks need.

    The methods take the flags of the command line as keywords, such as temperature and seed."""

    def __init__(self, checkpoint: Checkpoint, device: str | None = None):
        self.device = find_device(device)
        self.tok = checkpoint.tok
        self.mixture = checkpoint.mixture
        self.knobs = checkpoint.knobs
        self.block_size = checkpoint.block_size
        self.model = build_model(checkpoint).to(self.device)
        if self.device.type == "cuda" and has_bfloat16(self.device):
            self.model.to(torch.bfloat16)
        if self.device.type == "cpu":  # by columns, 8 tokens (drafts) cost little more than 1
            for module in self.model.modules():
                if isinstance(module, nn.Linear):
                    module.weight.data = module.weight.data.mT.contiguous().mT

    @property
    def attention(self) -> str:
        """ "causal", "prefix" or "full"; of a mixture, that of its first member."""
        return OBJECTIVES[next(iter(self.mixture))].attention

    @property
    def pair_marks(self) -> int:
        """Positions of a row that a model of pairs needs for its marks; else 0."""
        return 0 if self.model.pair_head is None else PAIR_MARKS

    @property
    def tasks(self) -> list[str]:
        """The entries of TASKS that the model serves, the usual one first."""
        found = []
        for name in self.mixture:
            known = [task for task in OBJECTIVES[name].tasks if task in TASKS]
            found += known or [USUAL[OBJECTIVES[name].attention]]
        return list(dict.fromkeys([*found, "score", "embed"]))

    @functools.cached_property
    def greedy_decoder(self) -> Decoder:
        """A decoder that always writes the likeliest token."""
        return Decoder(self.model, block_size=self.block_size, allowed=self.allowed())

    def allowed(self, extra=()) -> Tensor:
        """(V,) bool: the ids that may be drawn: text, EOT, and `extra`."""
        allowed = torch.zeros(self.model.config.vocab_size, dtype=torch.bool)
        allowed[: self.tok.vocab_size] = torch.from_numpy(self.tok.n_bytes > 0)
        allowed[[self.tok.EOT, *extra]] = True
        return allowed

    @torch.inference_mode()
    def states(self, ids: Tensor, prefix: int = 0) -> Tensor:
        """(B, T) ids, of which `prefix` are read in both directions -> (B, T, C), normed."""
        ids = ids.to(self.device)
        position = torch.arange(ids.shape[1], device=self.device).expand_as(ids)
        kind = "full" if prefix == ids.shape[1] else "rule"
        mask = self.model.attention_mask(kind, torch.ones_like(ids), position < prefix)
        return self.model.norm(self.model.trunk(ids, mask))

    @torch.inference_mode()
    def logits(self, ids: Tensor, prefix: int = 0) -> Tensor:
        """(B, T) ids -> (B, T, V) float32: what each position predicts."""
        return self.model.logits(self.states(ids, prefix)).float()

    def states_both_ways(self, ids: list[int]) -> Tensor:
        """(T, C): the states of T ids that are read in both directions. A model that judges pairs
        reads them as one, cut at the sentence's end that is nearest to the middle."""
        if self.model.pair_head is None:
            return self.states(torch.tensor([ids]), prefix=len(ids))[0]
        tok = self.tok
        half = len(ids) // 2
        ends = 1 + np.flatnonzero(tok.sentence_ends(np.array(ids)))
        middle = min(ends, key=lambda end: abs(end - half), default=half)
        row = pair_ids(ids[:middle], ids[middle:], tok)
        states = self.states(torch.tensor(row[None]), prefix=len(row))[0]
        return torch.cat([states[1 : 1 + middle], states[2 + middle : -1]])

    def own_states(self, ids: list[int]) -> Tensor:
        """(T, C): the states of T ids, read in both directions where the model can."""
        if self.attention == "causal":
            return self.states(torch.tensor([ids]))[0]
        return self.states_both_ways(ids)

    def as_document(self, ids: list[int]) -> list[int]:
        """The ids with the EOT that follows a document in training's rows, where it fits. (A model
        that judges pairs has a mark of its own there.)"""
        if self.model.pair_head is not None:
            return ids
        return [*ids, self.tok.EOT][: self.block_size]

    @torch.inference_mode()
    def masked_logits(self, ids: list[int]) -> Tensor:
        """(T, V) float32: what should stand at each of T ids, which are read in both directions. Of
        an electra model the generator answers."""
        model = self.model
        if model.generator is None:
            return model.logits(self.states_both_ways(ids)).float()
        row = torch.tensor([ids], device=self.device)
        states = model.generator_states(row, model.full_mask(row))[0]
        return F.linear(states, model.embed_tokens.weight).float()

    def ask(self, task: str, prompt: str = "", suffix: str | None = None, **flags):
        """Answers to a task of the command line, with its flags as keywords."""
        if suffix is not None:
            flags["suffix"] = suffix
        given = dict(flags, task=task, prompt=prompt)
        unknown = given.keys() - SampleConfig.__dataclass_fields__.keys()
        if unknown:
            raise UserError(f"unknown flag {min(unknown)}; see python sample.py --help")
        return read_out(self, build(SampleConfig, given), given=flags)

    def ask_for_one(self, *request, **flags) -> "Answer":
        """The same, where there is one answer."""
        if flags.get("num_samples", 1) != 1:
            raise UserError("num_samples: ask() gives several samples, this method one")
        return self.ask(*request, **flags)[0]

    def generate(self, prompt: str = "", **flags) -> str:
        """The text that goes on after the prompt."""
        return self.ask_for_one("continue", prompt, **flags).text

    def infill(self, before: str, after: str, **flags) -> str:
        """The text between two texts."""
        return self.ask_for_one("infill", before, after, **flags).text

    def fill(self, text: str, **flags) -> str:
        """The text with a token for each [MASK]."""
        return self.ask_for_one("fill", text, **flags).whole

    def score(self, text: str) -> dict:
        """nats, perplexity (of a token) and bits_per_byte of a text after the start of a document;
        `bound` is True where they are upper bounds."""
        return self.ask("score", text)[0].details

    def embed(self, text: str) -> Tensor:
        """(C,) float32: the mean of the text's hidden states."""
        return embedding(self, self.tok.encode(text)).cpu()


def load(out_dir, device: str | None = None) -> Reader:
    """The model of a run's folder, or of one of its checkpoints. Changes nothing global. Raises
    UserError."""
    return Reader(open_checkpoint(checkpoint_path(out_dir)), device)


# ---- tasks: each a function (reader, request) -> answers ---------------------------------------


@dataclass
class Answer:
    """`parts` is a text in pieces, each with True where the model wrote it; `ids`: its tokens."""

    parts: list[tuple[str, bool]]
    ids: list[int] = field(default_factory=list)
    details: dict = field(default_factory=dict)  # what a task says besides, for programs
    lines: list[str] = field(default_factory=list)  # and for people

    @property
    def text(self) -> str:
        """What the model wrote."""
        return "".join(text for text, written in self.parts if written)

    @property
    def whole(self) -> str:
        return "".join(text for text, _ in self.parts)


def write(
    reader: Reader, c: SampleConfig, prompt: list[int], prefix: int = 0, extra=(), slides=False
):
    """Samples after a prompt -> their new ids, and figures of speed; `extra`: ids that may be drawn
    besides text. A sample ends where the context does, unless it `slides` on: but then its source
    or suffix would be forgotten."""
    prompt = prompt or [reader.tok.EOT]
    most = c.max_new_tokens
    if not slides:
        most = min(most, reader.block_size - len(prompt) + 1)  # the last token is not read
    temperature = 0.0 if c.temperature is None else c.temperature
    sampler = Sampler(temperature, c.top_k, c.top_p)
    decoder = Decoder(
        reader.model, c.num_samples, reader.block_size, sampler, reader.allowed(extra)
    )
    drafters = drafters_of(decoder, "both") if c.speculative else []
    options = dict(stop=reader.tok.EOT, seed=c.seed, prefix=prefix)
    written, stats = decoder.generate(prompt, most, drafters=drafters, **options)
    figures = {"tokens_per_s": round(stats.tokens_per_s, 1)}
    if c.speculative:
        figures["tokens_per_pass"] = round(1 + stats.kept / max(stats.passes, 1), 3)
        figures |= dict(passes=stats.passes, drafted=stats.drafted, kept=stats.kept)
    return written, figures


def drafters_of(decoder: Decoder, draft: str) -> list:
    """Who drafts: "heads", "look_up" or "both"; a model without extra heads has look_up only."""
    look_up = LookUp(decoder.sampler.temperature)
    if draft == "look_up" or not len(decoder.model.future):
        return [look_up]
    return [Heads(decoder)] if draft == "heads" else [Heads(decoder), look_up]


def gap_parts(c: SampleConfig) -> list[str]:
    """The texts around the gaps: --prompt split at its gaps, and --suffix after one more."""
    parts = c.prompt.split(c.gap)
    return parts if c.suffix is None else [*parts, c.suffix]


def join_with(marks: Iterable[int], pieces: list[list[int]]) -> list[int]:
    """Pieces of ids with a mark in each gap.

    >>> join_with(itertools.count(90), [[1], [2, 3], []])
    [1, 90, 2, 3, 91]
    """
    ids = list(pieces[0])
    for mark, piece in zip(marks, pieces[1:]):
        ids += [mark, *piece]
    return ids


def with_masks(tok: Tokenizer, parts: list[str]) -> list[int]:
    """The parts' ids with [MASK] in each gap."""
    return join_with(itertools.repeat(tok.MASK), [tok.encode(part) for part in parts])


def interleave(parts: list[str], fills: list[str]) -> list[tuple[str, bool]]:
    """Texts and what fills the gaps between them -> the parts of an answer.

    >>> interleave(["a", "c"], ["b"])
    [('a', False), ('b', True), ('c', False)]
    """
    pieces = [(parts[0], False)]
    for part, fill in zip(parts[1:], fills):
        pieces += [(fill, True), (part, False)]
    return pieces


def need_room(reader: Reader, ids: list[int], answer=0, remedy="shorten --prompt or --suffix"):
    if len(ids) + answer > reader.block_size:
        raise UserError(
            f"the text has {len(ids)} tokens and its answer about {answer}, the context "
            f"{reader.block_size}: {remedy}"
        )


def continue_text(reader: Reader, c: SampleConfig, source=()) -> list[Answer]:
    """The prompt goes on, left to right; `source`: what is read both ways in its place."""
    if c.temperature is None:
        c = replace(c, temperature=0.7)
    ids = reader.tok.encode(c.prompt)
    n = len(ids)
    prompt = source or ids
    written, figures = write(reader, c, prompt, len(source), slides=True)
    n_read = sum(id < reader.tok.n_ordinary for id in prompt[-reader.block_size :])
    lines = [f"(read: the last {n_read} of the prompt's {n} tokens)"] if n_read < n else []
    answers = []
    for ids in written:
        parts = [(c.prompt, False), (reader.tok.decode(ids), True)]
        answers.append(Answer(parts, ids, figures, lines))
    return answers


def continue_prefix(reader: Reader, c: SampleConfig) -> list[Answer]:
    """The prompt is read in both directions, then goes on."""
    source = reader.tok.encode(c.prompt)[-reader.block_size :]
    return continue_text(reader, c, source)


def continue_ul2(reader: Reader, c: SampleConfig) -> list[Answer]:
    """UL2's S-denoiser: [S] and the prompt are the source, what follows is the target."""
    text = reader.tok.encode(c.prompt)[-(reader.block_size * 3 // 4) :]
    return continue_text(reader, c, [reader.tok.S, *text, reader.tok.EOT])


def infill_fim(reader: Reader, c: SampleConfig) -> list[Answer]:
    """What stands in one gap, up to EOT. The layout is the last of those that the model was trained
    with, by default spm: there the middle follows its prefix, which a small model learns first."""
    parts = gap_parts(c)
    if len(parts) != 2:
        able = objectives_with("infill_span", "infill_ul2", "restore")
        raise UserError(
            f"this model fills one gap and the texts have {len(parts) - 1}: give --prompt and "
            f"--suffix. Several are filled by {', '.join(able)}"
        )
    before, after = (reader.tok.encode(part) for part in parts)
    room = reader.block_size * 3 // 4 - 3
    before = before[-max(room - len(after), room // 2) :]  # a text too long loses its far end
    after = after[: room - len(before)]
    layout = reader.knobs.fim_layouts.split(",")[-1]
    prompt = fim_prompt(layout, reader.tok, before, after)
    written, figures = write(reader, c, prompt)
    return [Answer(interleave(parts, [reader.tok.decode(ids)]), ids, figures) for ids in written]


def infill_span(reader: Reader, c: SampleConfig, mode=()) -> list[Answer]:
    """Sentinels stand in the source's gaps; the target says after each what is there.

    Training hides the same share of every text: where the gaps hold less, a model writes too much
    into them. So two gaps are added. One hides the text's first tokens, as many as a span of
    training has; the target begins with them. One, at the text's end, takes what is too much."""
    tok = reader.tok
    parts = gap_parts(c)
    n = len(parts) - 1
    if not 1 <= n <= N_SENTINELS - 2:
        raise UserError(
            f"the texts have {n} gaps, and this model fills 1 to {N_SENTINELS - 2}: give --suffix, "
            f"or write {c.gap} inside --prompt"
        )
    pieces = [tok.encode(part) for part in parts]
    opening = [tok.sentinel]  # of the target
    given = pieces[0][: round(reader.knobs.mean_span)]
    if len(given) < len(pieces[0]):
        pieces = [[], pieces[0][len(given) :], *pieces[1:]]
        opening += [*given, tok.sentinel + 1]
    if pieces[-1]:
        pieces.append([])
    source = [*mode, *join_with(itertools.count(tok.sentinel), pieces), tok.EOT]
    prompt = [*source, *opening]
    need_room(reader, prompt, FILL_TOKENS * n)
    sentinels = [opening[-1] + k for k in range(n + 1)]
    written, figures = write(reader, c, prompt, len(source), sentinels[1:])

    answers = []
    for ids in written:
        fills = split_fills(ids, sentinels)
        texts = [tok.decode(fill) for fill in fills]
        ids = [id for fill in fills for id in fill]
        answers.append(Answer(interleave(parts, texts), ids, {"fills": texts, **figures}))
    return answers


def split_fills(ids: list[int], sentinels: list[int]) -> list[list[int]]:
    """`span 0 <1> span 1 <2> ...` -> the spans; sentinels[k] opens span k, the last one ends."""
    fills = [[] for _ in sentinels[1:]]
    now = 0
    for id in ids:
        if id == sentinels[now + 1]:
            now += 1
            if now == len(fills):
                break
        elif id not in sentinels:
            fills[now].append(id)
    return fills


def infill_ul2(reader: Reader, c: SampleConfig) -> list[Answer]:
    """The same after a mode token, [R] or [X]."""
    return infill_span(reader, c, mode=[getattr(reader.tok, c.mode)])


def restore(reader: Reader, c: SampleConfig) -> list[Answer]:
    """The whole text again, from a noisy one; a gap is one [MASK]."""
    tok = reader.tok
    source = [*with_masks(tok, gap_parts(c)), tok.EOT]
    need_room(reader, source, len(source))
    written, figures = write(reader, c, source, len(source))
    return [Answer([(tok.decode(ids), True)], ids, figures) for ids in written]


def fill(reader: Reader, c: SampleConfig) -> list[Answer]:
    """One token for each [MASK], all at once, with the five likeliest."""
    tok = reader.tok
    parts = gap_parts(c)
    if len(parts) < 2:
        raise UserError(f"there is nothing to fill: write {c.gap} inside --prompt")
    ids = with_masks(tok, parts)
    need_room(reader, ids, reader.pair_marks)

    allowed = reader.allowed()
    allowed[tok.EOT] = False
    masked = [i for i, id in enumerate(ids) if id == tok.MASK]
    logits = reader.masked_logits(reader.as_document(ids))[masked]
    p = logits.masked_fill(~allowed.to(logits.device), -torch.inf).softmax(-1)
    top = p.topk(5)
    guesses = []
    for row in zip(top.indices.tolist(), top.values.tolist()):
        guesses.append([{"token": tok.decode([id]), "p": round(p, 4)} for id, p in zip(*row)])
    lines = []
    for k, row in enumerate(guesses, 1):
        lines.append(f"gap {k}: " + "   ".join(f"{g['token']!r} {g['p']:.2f}" for g in row))
    texts = [row[0]["token"] for row in guesses]
    best = top.indices[:, 0].tolist()
    return [Answer(interleave(parts, texts), best, {"guesses": guesses}, lines)]


def unmask_text(reader: Reader, c: SampleConfig) -> list[Answer]:
    """Masked tokens become text in `steps` steps: one for each gap inside --prompt, as many as
    --max_new_tokens before --suffix or, if there is no gap, at the end: there an EOT ends it."""
    tok = reader.tok
    parts = gap_parts(c)
    open_end = len(parts) == 1
    after = []
    n = 0
    if c.suffix is not None:
        after = tok.encode(parts.pop())
        n = c.max_new_tokens
    before = with_masks(tok, parts)
    if open_end:  # as many as fit
        n = min(c.max_new_tokens, max(reader.block_size - len(before), 1))
    remedy = "say how many tokens to unmask, as --max_new_tokens=1, or shorten the text"
    need_room(reader, [*before, *after], n, remedy)
    ids = [*before, *[tok.MASK] * n, *after]
    if not open_end:
        ids = reader.as_document(ids)

    allowed = reader.allowed()
    allowed[tok.EOT] = open_end
    temperature = c.temperature
    if temperature is None:
        temperature = 0.7 if open_end else 0.0
    x = torch.tensor([ids] * c.num_samples, device=reader.device)
    sampler = Sampler(temperature, c.top_k, c.top_p)
    options = dict(steps=c.steps, order=c.order, seed=c.seed)
    rows = unmask(reader.model, x, tok.MASK, allowed, sampler, **options).tolist()

    masked = [id == tok.MASK for id in ids]
    answers = []
    for row in rows:
        row = cut(row, tok.EOT)
        pieces = []
        for written, run in itertools.groupby(zip(masked, row), key=lambda pair: pair[0]):
            pieces.append((tok.decode([id for _, id in run]), written))
        answers.append(Answer(pieces, list(itertools.compress(row, masked))))
    return answers


@torch.inference_mode()
def detect(reader: Reader, c: SampleConfig) -> list[Answer]:
    """The tokens that were probably replaced are marked; the most suspect ones are listed."""
    ids = reader.tok.encode(c.prompt)
    if not ids:
        raise UserError("there is no text to judge: give --prompt")
    need_room(reader, ids)
    states = reader.states_both_ways(reader.as_document(ids))[: len(ids)]
    p = reader.model.detect_head(states).float().sigmoid().tolist()
    parts = []
    for doubted, run in itertools.groupby(zip(ids, p), key=lambda pair: pair[1] > 0.5):
        parts.append((reader.tok.decode([id for id, _ in run]), doubted))
    order = sorted(range(len(p)), key=p.__getitem__, reverse=True)[:5]
    suspects = [{"token": reader.tok.decode([ids[i]]), "at": i, "p": round(p[i], 4)} for i in order]
    line = "   ".join(f"{s['token']!r} {s['p']:.2f} (token {s['at']})" for s in suspects)
    details = {"replaced_probability": [round(q, 4) for q in p], "suspects": suspects}
    return [Answer(parts, [], details, [f"most suspect: {line}"])]


def two_texts(reader: Reader, c: SampleConfig) -> list[list[int]]:
    """The ids of both. Raises UserError where one is missing."""
    if not c.prompt or not c.suffix:
        raise UserError("two texts are compared: give --prompt and --suffix")
    return [reader.tok.encode(text) for text in (c.prompt, c.suffix)]


@torch.inference_mode()
def pair(reader: Reader, c: SampleConfig, says="the second text follows the first"):
    """Does the second text follow the first (nsp)? The row holds the end of the first and the
    beginning of the second."""
    first, second = two_texts(reader, c)
    room = reader.block_size - PAIR_MARKS
    second = second[: max(room - len(first), room // 2)]
    first = first[-(room - len(second)) :]
    row = pair_ids(first, second, reader.tok)
    state = reader.states(torch.tensor(row[None]), prefix=len(row))[:, 0]
    p = reader.model.pair_head(state).float().sigmoid().item()
    line = f"probability that {says}: {p:.3f}"
    return [Answer([], [], {"probability": round(p, 4)}, [line])]


def pair_order(reader: Reader, c: SampleConfig) -> list[Answer]:
    """Are two texts of one document in order (sop)?"""
    return pair(reader, c, says="the texts, if of one document, are in this order")


def similarity(reader: Reader, c: SampleConfig) -> list[Answer]:
    """Cosine of the two texts' embeddings."""
    a, b = (embedding(reader, ids) for ids in two_texts(reader, c))
    cosine = F.cosine_similarity(a, b, dim=0).item()
    line = f"similarity (cosine): {cosine:.3f}"
    return [Answer([], [], {"similarity": round(cosine, 4)}, [line])]


def embedding(reader: Reader, ids: list[int]) -> Tensor:
    """(C,): the mean of the hidden states of all ids, a context at a time."""
    ids = ids or [reader.tok.EOT]
    room = reader.block_size - reader.pair_marks
    parts = [reader.own_states(ids[start : start + room]) for start in range(0, len(ids), room)]
    return torch.cat(parts).float().mean(0)


def embed(reader: Reader, c: SampleConfig) -> list[Answer]:
    """The mean of the text's hidden states."""
    vector = embedding(reader, reader.tok.encode(c.prompt)).tolist()
    line = f"{len(vector)} numbers: " + " ".join(f"{x:.3f}" for x in vector[:8]) + " ..."
    return [Answer([], [], {"embedding": vector}, [line])]


def score(reader: Reader, c: SampleConfig) -> list[Answer]:
    """nats, perplexity and bits per byte, where the objective's loss is a code length of text. (For
    prefix the first tokens cost much: in training they are mostly read, and seldom asked for.)"""
    if not all(OBJECTIVES[name].likelihood for name in reader.mixture):
        able = ", ".join(name for name, row in OBJECTIVES.items() if row.likelihood)
        raise UserError(f"{'+'.join(reader.mixture)} gives a text no probability; these do: {able}")
    ids = reader.tok.encode(c.prompt)
    if not ids:
        raise UserError("there is no text to score: give --prompt")
    bound = reader.attention == "full"
    nats = bound_nats(reader, ids) if bound else causal_nats(reader, ids)
    details = {
        "nats": nats,
        "tokens": len(ids),
        "perplexity": math.exp(min(nats / len(ids), 700)),
        "bits_per_byte": nats / math.log(2) / int(reader.tok.n_bytes[ids].sum()),
        "bound": bound,
    }
    at_most = "at most " if bound else ""
    line = (
        f"{at_most}{nats:.2f} nats over {len(ids)} tokens, perplexity {details['perplexity']:.2f} "
        f"a token, {details['bits_per_byte']:.3f} bits per byte"
    )
    return [Answer([], [], details, [line])]


def causal_nats(reader: Reader, ids: list[int]) -> float:
    """-log p of the ids at the start of a document, among the ids that may be drawn; of a long
    text, each with at least half a context before it."""
    text = torch.tensor([reader.tok.EOT, *ids], device=reader.device)
    never = ~reader.allowed().to(reader.device)  # as where fim begins to rearrange a text
    W = reader.block_size
    nats = 0.0
    done = 0  # ids that are scored
    while done < len(ids):
        start = max(0, done - W // 2)
        window = text[start : start + W + 1]
        logits = reader.logits(window[None, :-1])[0, done - start :]
        logits = logits.masked_fill(never, -torch.inf)
        nats += F.cross_entropy(logits, window[1 + done - start :], reduction="sum").item()
        done = start + len(window) - 1
    return nats


def bound_nats(reader: Reader, ids: list[int], before: list[int] | None = None) -> float:
    """Diffusion's bound on -log p of the ids after `before`, by default the start of a document,
    given how many they are; estimated from BOUND_ROWS evenly spread mask rates. Of a text longer
    than a row each part counts as a text of its own."""
    before = torch.tensor(before or [reader.tok.EOT])
    room = reader.block_size - len(before)
    generator = torch.Generator().manual_seed(0)
    nats = 0.0
    for start in range(0, len(ids), room):
        text = torch.tensor(ids[start : start + room])
        for row in range(BOUND_ROWS):
            p = mask_probability((row + 0.5) / BOUND_ROWS)
            masked = torch.rand(len(text), generator=generator) < p
            noisy = torch.cat([before, text.masked_fill(masked, reader.tok.MASK)])
            logits = reader.logits(noisy[None], prefix=len(noisy))[0, len(before) :].cpu()
            logits = logits.index_fill(1, torch.tensor([reader.tok.MASK]), -torch.inf)
            loss = F.cross_entropy(logits[masked], text[masked], reduction="sum").item()
            nats += loss / p / BOUND_ROWS
    return nats


class Task(NamedTuple):
    """`names`: those under which it may be asked for, the usual one first. `texts`: "text" (one),
    "gap" (around a gap), "two" (compared) or "any". `reads`: the flags that it reads and not every
    task does."""

    names: tuple[str, ...]
    function: Callable
    texts: str
    reads: set[str]


DRAWS = {"max_new_tokens", "num_samples", "temperature", "top_k", "top_p", "seed"}
WRITES = DRAWS | {"speculative"}
UNMASKS = DRAWS | {"suffix", "steps", "order"}
# fmt: off
TASKS = {
    "continue":        Task(("continue",),          continue_text,   "text", WRITES),
    "continue_prefix": Task(("continue",),          continue_prefix, "text", WRITES),
    "continue_ul2":    Task(("continue",),          continue_ul2,    "text", WRITES),
    "infill_fim":      Task(("infill",),            infill_fim,      "gap",  WRITES | {"suffix"}),
    "infill_span":     Task(("infill",),            infill_span,     "gap",  WRITES | {"suffix"}),
    "infill_ul2":      Task(("infill",),            infill_ul2,      "gap",
                            WRITES | {"suffix", "mode"}),
    "restore":         Task(("restore", "infill"),  restore,         "any",  WRITES | {"suffix"}),
    "unmask":          Task(("unmask", "infill", "continue"), unmask_text, "any", UNMASKS),
    "fill":            Task(("fill",),              fill,            "gap",  {"suffix"}),
    "detect":          Task(("detect",),            detect,          "text", set()),
    "pair":            Task(("pair",),              pair,            "two",  {"suffix"}),
    "pair_order":      Task(("pair",),              pair_order,      "two",  {"suffix"}),
    "similarity":      Task(("similarity",),        similarity,      "two",  {"suffix"}),
    "score":           Task(("score",),             score,           "text", set()),
    "embed":           Task(("embed",),             embed,           "text", set()),
}
# fmt: on
# The task of an objective that names none of TASKS:
USUAL = {"causal": "continue", "prefix": "continue_prefix", "full": "fill"}


# ---- asking and answering ----------------------------------------------------------------------


def objectives_with(*tasks: str) -> list[str]:
    """The objectives that serve one of these entries of TASKS."""
    return [name for name, row in OBJECTIVES.items() if set(tasks) & set(row.tasks)]


def can_answer(entry: str, c: SampleConfig) -> bool:
    """Whether an entry of TASKS is the task that was named, or else one for the texts given."""
    task = TASKS[entry]
    if c.task:
        return c.task in task.names
    if c.suffix is not None:
        return task.texts in ("gap", "any", "two")
    if c.gap in c.prompt:
        return task.texts in ("gap", "any")
    return task.texts in ("text", "any")


def choose_task(reader: Reader, c: SampleConfig, given) -> str:
    """The entry of TASKS that serves the request; of several, which a mixture may have, the first
    that reads all `given` flags and all gaps. Raises UserError with the objectives that could serve
    it, where this model cannot."""
    if not c.gap:
        raise UserError("--gap is empty: give the text that stands for a gap")
    usual = [entry for entry in reader.tasks if entry not in ("score", "embed")]  # unless named
    able = [entry for entry in (reader.tasks if c.task else usual) if can_answer(entry, c)]
    if able:
        one_gap = len(gap_parts(c)) == 2
        fitting = [e for e in able if not unread(e, c, given) and (one_gap or e != "infill_fim")]
        return (fitting or able)[0]

    if c.task:
        wanted = f"--task={c.task}"
    elif c.suffix is not None or c.gap in c.prompt:
        wanted = f"filling or comparing (--suffix, or {c.gap} in --prompt)"
    else:
        wanted = "one text without a gap"
    served = dict.fromkeys(TASKS[entry].names[0] for entry in reader.tasks)
    if not all(OBJECTIVES[name].likelihood for name in reader.mixture):
        served.pop("score")
    others = objectives_with(*(entry for entry in TASKS if can_answer(entry, c)))
    raise UserError(
        f"this {'+'.join(reader.mixture)} model does not serve {wanted}; it serves "
        f"{', '.join(served)}. Objectives that do: {', '.join(others)}"
    )


def read_out(reader: Reader, c: SampleConfig, given=()) -> list[Answer]:
    """The answers to a request; `given` names the flags that must mean something to the task."""
    entry = choose_task(reader, c, given)
    refuse_unread(entry, c, given)
    if c.speculative and c.num_samples > 1:
        raise UserError(f"--num_samples={c.num_samples}: --speculative writes one text at a time")
    with few_threads(reader):
        return TASKS[entry].function(reader, c)


def unread(entry: str, c: SampleConfig, given) -> list[str]:
    """The given flags that mean nothing to this task, and something to another."""
    reads = set(TASKS[entry].reads)
    if entry == "unmask" and c.suffix is None and c.gap in c.prompt:
        reads.discard("max_new_tokens")  # a gap is one token
    all_read = set().union(*(task.reads for task in TASKS.values()))
    return sorted((all_read - reads).intersection(given))


def refuse_unread(entry: str, c: SampleConfig, given) -> None:
    """Raise UserError for a flag that means nothing to this task."""
    for name in unread(entry, c, given)[:1]:
        able = objectives_with(*(entry for entry, task in TASKS.items() if name in task.reads))
        raise UserError(
            f"--{name} is not read by this task of this model; leave it out, or use "
            f"{', '.join(able)}"
        )


# ---- showing -----------------------------------------------------------------------------------


def brackets() -> tuple[str, str]:
    """What stands around the model's words: green on a terminal, else brackets."""
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return ("\033[32m", "\033[0m") if color else ("⟪", "⟫")


def marked(parts: list[tuple[str, bool]], around: tuple[str, str] | None = None) -> str:
    """The text with marks around what the model wrote.

    >>> marked([("a", False), ("b", True)], ("[", "]"))
    'a[b]'
    """
    opening, closing = around or brackets()
    shown = ""
    for text, written in parts:
        shown += opening + visible(text) + closing if written else visible(text)
    return shown


def show(answers: list[Answer]) -> None:
    for number, answer in enumerate(answers, 1):
        if answer.parts:
            title = f"--- sample {number}\n" if len(answers) > 1 else ""
            print(title + marked(answer.parts))
        for line in answer.lines:
            print(visible(line))
    figures = answers[0].details
    if "tokens_per_s" not in figures:
        return
    n_tokens = sum(len(answer.ids) for answer in answers)
    line = f"[{n_tokens} tokens, {figures['tokens_per_s']:.0f} tokens/s"
    if "drafted" in figures:
        line += f"; {figures['tokens_per_pass']:.2f} tokens per pass; "
        line += f"kept {figures['kept']} of {figures['drafted']} drafts"
    print(line + "]", file=sys.stderr)


def as_json(answer: Answer, c: SampleConfig) -> str:
    """One object: prompt, suffix if any, what the model wrote, and what the task says besides."""
    fields = {"prompt": c.prompt}
    if c.suffix is not None:
        fields["suffix"] = c.suffix
    fields |= {"text": answer.text, "whole": answer.whole, "tokens": answer.ids}
    return json.dumps(fields | answer.details, allow_nan=False)


@contextlib.contextmanager
def few_threads(reader: Reader):
    """One thread for a small model on a CPU: a token is too little work to share."""
    before = torch.get_num_threads()
    if reader.device.type == "cpu" and reader.model.config.n_embd <= 512:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main(argv: list[str]) -> None:
    given = parse_flags(argv, __doc__, SampleConfig)
    c = build(SampleConfig, given)
    reader = load(c.out_dir, c.device)
    answers = read_out(reader, c, given)
    if c.json:
        for answer in answers:
            print(as_json(answer, c))
    else:
        show(answers)


if __name__ == "__main__":
    run_command(main, "--num_samples or --max_new_tokens")
