"""sample.py: use a trained model to continue, fill, restore, judge, score or embed a text.
The checkpoint says what its model can do, and the texts say what is wanted: a [MASK] in --prompt
is a gap, and so is the place between --prompt and --suffix. What it wrote is marked ⟪like this⟫.

Left out: training, chat, serving. In Python:

    from sample import load
    model = load("out/fim")
    model.infill("Today Tom has", " red balls.")

On the command line:

    python sample.py --out_dir=out/clm --prompt="At dawn, Tom" --temperature=0.8 --num_samples=3
    python sample.py --out_dir=out/fim --prompt="Today Tom has" --suffix=" red balls."
    python sample.py --out_dir=out/mlm --prompt="Today Tom has 5[MASK] balls."
    python sample.py --out_dir=out/electra --prompt="Today Tom has 5 red of."
    python sample.py --out_dir=out/nsp --prompt="Today Tom has 5 balls." --suffix="He finds 2 more."
    python sample.py --out_dir=out/mtp --prompt="At dawn," --speculative
    python sample.py --out_dir=out/clm --prompt="Today Tom has 5 red" --task=score
"""

import contextlib
import itertools
import json
import math
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from checkpoint import build_model, open_checkpoint
from corpus import Tokens
from data import Text
from generate import Decoder, Sampler
from generate import cut, generators, look_up, uniform, unmask, write_blocks
from model import Transformer
from objectives import FIM_MARKS, OBJECTIVES, PAIR_MARKS, fim_prompt, marked_parts, pair_ids
from objectives import block_sizes, by_turns, groups_of_blocks, permuted, sentence_ends
from tokenizer import Tokenizer, normalize
from util import UserError, build, find_device, flag, parse_flags, run_command, visible

GAP = "[MASK]"  # stands for a gap inside --prompt
MOST_NEW = 200  # most tokens that are written by default (a text is restored whole)
CONTEXT_FULL = "(the context is full: shorten the texts to see the rest)"
BOUND_ROWS = 64  # maskings from which a bound on a text's nats is estimated
BOUND_LOGITS = 1 << 24  # that are made at a time, for one masking at least


@dataclass
class SampleConfig:
    """which run is used, and for what"""

    out_dir: str = flag("out/clm", "a run, one of its checkpoints, or a Qwen3's or Llama's folder")
    prompt: str = flag(
        "", f"the text ({GAP}: a gap), or the first of two; @FILE or @-: read", is_text=True
    )
    suffix: str | None = flag(None, "the text after a gap, or the second of two", is_text=True)
    task: str | None = flag(None, "continue, infill, score, ...; automatic: by the texts given")
    max_new_tokens: int | None = flag(
        None, f"most tokens, automatic: {MOST_NEW}; or as many as a diffusion's gap has", min=1
    )
    num_samples: int = flag(1, "number of samples", min=1)
    temperature: float | None = flag(None, "0: the likeliest; automatic: 0.7, or 0 to fill", min=0)
    top_k: int = flag(0, "draw from the k likeliest tokens; 0: all", min=0)
    top_p: float = flag(1.0, "draw from the fewest tokens of this total probability", min=0, max=1)
    seed: int = flag(1, "seed of the first sample; the next ones count up", min=0, below=1 << 31)
    speculative: bool = flag(False, "draft and verify: faster, the same text except for rounding")
    mode: str = flag("R", "ul2: fill short gaps (R) or long ones (X)", ("R", "X"))
    steps: int = flag(32, "diffusion, block: most steps from all masked to none", min=1)
    order: str = flag("confidence", "unmask the surest first, or random", ("confidence", "random"))
    json: bool = flag(False, "print one JSON object per sample, for programs")
    device: str | None = flag(None, "cpu, cuda, cuda:N or mps; automatic: the fastest available")

    def __post_init__(self):
        self.prompt = normalize(self.prompt)
        self.suffix = self.suffix and normalize(self.suffix)

    @property
    def most_new(self) -> int:
        return MOST_NEW if self.max_new_tokens is None else self.max_new_tokens

    def sampler(self, usual: float) -> Sampler:
        temperature = usual if self.temperature is None else self.temperature
        return Sampler(temperature, self.top_k, self.top_p)

    @property
    def parts(self) -> list[str]:
        """The texts between the gaps: each [MASK] is a gap, and there is one before --suffix."""
        text = self.prompt if self.suffix is None else self.prompt + GAP + self.suffix
        return text.split(GAP)


@dataclass
class Answer:
    """`parts` is a text in pieces, each with True if the model wrote it."""

    parts: list[tuple[str, bool]]
    ids: list[int] = field(default_factory=list)  # what it wrote, perhaps after the prompt's end
    details: dict = field(default_factory=dict)  # further results of a task, for programs
    lines: list[str] = field(default_factory=list)  # further output, for people

    @property
    def text(self) -> str:  # what the model wrote
        return "".join(text for text, written in self.parts if written)

    @property
    def whole(self) -> str:  # with the given text around it
        return "".join(text for text, _ in self.parts)


# ---- a trained model, for use -------------------------------------------------------------------


class TrainedModel:
    """A trained model, opened for use: the Python interface, and what the tasks need. ask, generate
    and infill take the flags of their task as keywords, such as temperature and seed."""

    def __init__(self, model: Transformer, tok: Tokenizer, mixture, knobs, block_size: int):
        """`model` should be used for nothing else: its weights are prepared for decoding."""
        self.model = model.eval().requires_grad_(False)
        self.tok = tok
        self.mixture = mixture
        self.knobs = knobs
        self.block_size = block_size
        if self.device.type == "cpu":
            # The same values, stored column-major: 8 drafts then cost little more than 1 token.
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    module.weight.data = module.weight.data.mT.contiguous().mT
        self.is_shifted = any(OBJECTIVES[name].shifted for name in mixture)
        # Positions that are added to a text with masks: [CLS] and [SEP]s, or an EOT before it
        self.n_marks = PAIR_MARKS if model.pair_head else int(self.is_shifted)
        self.banned = ~self.allowed().to(self.device)

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @property
    def attention(self) -> str:
        """ "causal", "prefix", "full", "block" or "permuted"; of a mixture's first member."""
        return OBJECTIVES[next(iter(self.mixture))].attention

    @property
    def tasks(self) -> list[str]:
        """The entries of TASKS that the model serves, the usual one first."""
        return tasks_of(self.mixture)

    @property
    def text_size(self) -> int:
        """The most tokens of text in a row: block holds each token twice, plm the chosen ones."""
        T = self.block_size
        sizes = {"block": T // 2, "permuted": math.ceil(T / (1 + self.knobs.plm_rate))}
        return sizes.get(self.attention, T)

    def decoder(self, sampler: Sampler | None = None, batch: int = 1, also_allowed=()) -> Decoder:
        """A new decoder, greedy by default, that may draw text, EOT and `also_allowed` ids."""
        return Decoder(self.model, batch, self.text_size, sampler, self.allowed(also_allowed))

    def allowed(self, also_allowed=()) -> Tensor:
        """(V,) bool: the ids that may be drawn: text, EOT, and `also_allowed`."""
        allowed = torch.zeros(self.model.config.vocab_size, dtype=torch.bool)
        allowed[: self.tok.vocab_size] = torch.from_numpy(self.tok.n_bytes > 0)
        allowed[[self.tok.EOT, *also_allowed]] = True
        return allowed

    @torch.inference_mode()
    def states(self, ids, prefix_stop: int = 0, group=None, place=None) -> Tensor:
        """(T,) or (B, T) ids, of which those before `prefix_stop` are read both ways -> (T, C) or
        (B, T, C), normalized. `group` and `place`, (T,): those of a row in another order."""
        rows = torch.atleast_2d(torch.as_tensor(ids, device=self.device))
        T = rows.shape[1]
        group = np.arange(T) < prefix_stop if group is None else np.asarray(group)
        kind = "full" if (group == 1).all() else "rule"
        group = torch.as_tensor(group, dtype=torch.int, device=self.device)[None]
        if place is not None:
            place = torch.as_tensor(place, device=self.device)[None]
        mask = self.model.attention_mask(kind, torch.ones_like(rows), group)
        x = self.model.norm(self.model.trunk(rows, mask, place=place))
        return x if np.ndim(ids) == 2 else x[0]

    @torch.inference_mode()
    def logits(self, ids, prefix_stop: int = 0, group=None, place=None) -> Tensor:
        """(..., T) ids -> (..., T, V) float32: the logits of what each position predicts. Ids that
        are never drawn, the special tokens other than EOT, have -inf."""
        logits = self.model.logits(self.states(ids, prefix_stop, group, place))
        return logits.float().masked_fill(self.banned, -torch.inf)

    def states_both_ways(self, ids: list[int]) -> Tensor:
        """(T, C): the states of T ids, read in both directions. A pair model gets them as a
        pair, split at the sentence end nearest to the middle."""
        if self.model.pair_head is None:
            return self.states(ids, prefix_stop=len(ids))
        half = len(ids) // 2
        ends = sentence_ends(np.array(ids), self.tok)
        middle = min(ends, key=lambda end: abs(end - half), default=half)
        row = pair_ids(ids[:middle], ids[middle:], self.tok)
        states = self.states(row, prefix_stop=len(row))
        return torch.cat([states[1 : 1 + middle], states[2 + middle : -1]])

    @torch.inference_mode()
    def masked_logits(self, ids: list[int]) -> Tensor:
        """(T, V) float32: logits of what belongs at each of T ids, read in both directions. Ids
        that are never drawn have -inf. For an electra model, the generator answers."""
        model = self.model
        if self.is_shifted:  # each id is predicted by the position before it
            row = [self.tok.EOT, *ids]
            logits = model.logits(self.states(row, prefix_stop=len(row))[:-1])
        elif model.generator is None:
            logits = model.logits(self.states_both_ways(ids))
        else:
            row = torch.tensor([ids], device=self.device)
            states = model.generator_states(row, model.full_mask(row))[0]
            logits = F.linear(states, model.embed_tokens.weight)
        return logits.float().masked_fill(self.banned, -torch.inf)

    def as_document(self, ids: list[int]) -> list[int]:
        """The ids plus a document's EOT, if it fits (a pair model has [SEP] there instead)."""
        if self.model.pair_head:
            return ids
        return [*ids, self.tok.EOT][: self.block_size - self.n_marks]

    def ask(self, task: str | None, prompt="", suffix: str | None = None, **flags) -> list[Answer]:
        """The answers to a task of the command line, whose flags are keywords here."""
        request = SampleConfig(task=task, prompt=prompt, suffix=suffix, **flags)
        return serve(self, build(SampleConfig, vars(request)))

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
        ids = self.tok.encode(normalize(text)) or [self.tok.EOT]
        room = self.text_size - self.n_marks
        read = self.states if self.attention in ("causal", "block") else self.states_both_ways
        parts = [read(ids[start : start + room]) for start in range(0, len(ids), room)]
        return torch.cat(parts).float().mean(0).cpu()


def load(out_dir, device: str | None = None) -> TrainedModel:
    """The model of a run, of one of its checkpoints, or of Hugging Face. Raises UserError."""
    saved = open_checkpoint(out_dir)
    model = build_model(saved).to(find_device(device))
    return TrainedModel(model, saved.tok, saved.mixture, saved.knobs, saved.block_size)


# ---- what the tasks share ----------------------------------------------------------------------


def write(
    trained, request, prompt: list[int], n_prefix=0, ends=(), goes_on=False, left_out=()
) -> list[Answer]:
    """Samples of what follows a prompt, whose first `n_prefix` ids are read in both directions, up
    to an EOT or one of the ids in `ends`. If there are `ends`, a sample has at least one token.
    `goes_on`: the text may outgrow the context, whose beginning is then dropped. The answer for a
    gap may not, because that would drop the question. `left_out`: the prompt's last ids, which
    `heal` may spell in another way; the answer's text is what comes after these."""
    tok = trained.tok
    sampler = request.sampler(0.7 if goes_on else 0.0)

    def next_logits(ids: list[int]) -> Tensor:
        row = [*prompt, *ids]
        dropped = max(len(row) - trained.block_size, 0)
        return trained.logits(row[dropped:], max(n_prefix - dropped, 0))[-1]

    answers = []
    for start, some in heal(tok, left_out, next_logits, sampler, request):
        most = some.most_new
        if not goes_on:  # the last token is not read
            most = max(min(most, trained.block_size - len(prompt) - len(start) + 1), 0)
        first = trained.allowed()
        first[tok.EOT] = not ends or len(text_after(tok, left_out, start)) > 0
        decoder = trained.decoder(sampler, some.num_samples, ends)
        drafters = []
        if request.speculative:
            drafters = [decoder.heads, look_up] if trained.model.future else [look_up]
        rows, stats = decoder.generate(
            [*prompt, *start], most, {tok.EOT, *ends}, first, some.seed, n_prefix, drafters
        )
        for new in rows:
            ids = [*start, *new]
            lines = [CONTEXT_FULL] if len(new) == most < some.most_new else []
            text = text_after(tok, left_out, ids)
            details = asdict(stats) | {"written": len(new) + request.most_new - some.most_new}
            answers.append(Answer([(text, True)], ids, details, lines))
    return answers


def heal(tok: Tokenizer, left_out, next_logits: Callable, sampler: Sampler, request):
    """Token healing: yield how samples begin, and the request for those that begin so. `left_out`:
    a prompt's last ids. A sample begins with the first of them as they are, then one token whose
    bytes begin with those of the rest. Each such spelling has its probability under the model,
    given the text. `next_logits`(ids): (V,), for what follows the prompt and these ids."""
    if not left_out:
        yield [], request
        return
    temperature = 1.0 if sampler.greedy else sampler.temperature
    log_p = []
    known = 0.0  # log p of the ids before
    for i in range(len(left_out)):
        logits = next_logits(left_out[:i])[: tok.vocab_size].cpu()
        log_q = (logits / temperature).log_softmax(-1)
        log_p.append((known + log_q).masked_fill(~begins_with(tok, left_out[i:]), -torch.inf))
        known = known + log_q[left_out[i]]
    p = replace(sampler, temperature=1.0).probs(torch.stack(log_p).flatten())
    dice = generators(request.num_samples, request.seed + (1 << 32))  # not those of the tokens
    u = uniform(dice, 1)[:, 0]
    chosen = sampler.choose(p.expand(len(u), -1), u).tolist()
    seed = request.seed
    for i, alike in itertools.groupby(chosen):
        n_kept, last = divmod(i, tok.vocab_size)
        start = [*left_out[:n_kept], last]
        n = len(list(alike))
        most = request.most_new - (len(text_after(tok, left_out, start)) > 0)
        yield start, replace(request, num_samples=n, seed=seed, max_new_tokens=most)
        seed += n


def begins_with(tok: Tokenizer, ids: list[int]) -> Tensor:
    """(V,) bool: the tokens whose bytes begin with those of the ids."""
    begin = tok.decode_bytes(ids)
    return torch.tensor([piece.startswith(begin) for piece in tok.bytes])


def text_after(tok: Tokenizer, left_out, ids: list[int]) -> str:
    """The text of the ids after that of the ids left out, with which it begins."""
    written = tok.decode_bytes(ids)[len(tok.decode_bytes(left_out)) :]
    return written.decode("utf-8", errors="replace")


def open_end(tok: Tokenizer, text: str) -> tuple[list[int], list[int]]:
    """A text's ids, and separately the last few if one longer token begins with their bytes: the
    text may end inside it, as "walk to the mi" ends inside " mill". A blank at the end is encoded
    by itself, because it is a part of the next word, not of an indentation before it."""
    blank = text[-1:] if text.endswith((" ", "\t")) else ""
    ids = tok.encode(text.removesuffix(blank)) + tok.encode(blank)
    for n in (3, 2, 1):
        end = tok.decode_bytes(ids[-n:])
        if any(piece.startswith(end) and piece != end for piece in tok.bytes):
            return ids[:-n], ids[-n:]
    return ids, []


def with_masks(tok: Tokenizer, parts: list[str]) -> tuple[list[int], dict[int, Tensor]]:
    """The parts' ids with [MASK] in each gap, and which tokens fit where a part ends in a blank:
    position -> (V,) bool. The blank is left to the token in the gap, which begins with it."""
    ids = []
    fits = {}
    for part in parts[:-1]:
        known, left_out = open_end(tok, part) if part.endswith(" ") else (tok.encode(part), [])
        ids += [*known, tok.MASK]
        if left_out:
            fits[len(ids) - 1] = begins_with(tok, left_out)
    return ids + tok.encode(parts[-1]), fits


def keep_fitting(logits: Tensor, fits: dict[int, Tensor]) -> None:
    """Give -inf to what does not fit in the (..., T, V) logits, in place."""
    for position, fit in fits.items():
        logits[..., position, : len(fit)].masked_fill_(~fit.to(logits.device), -torch.inf)


def parts_of(tok: Tokenizer, ids: list[int], written: list[bool]) -> list[tuple[str, bool]]:
    """Ids, and for each whether the model wrote it -> the parts of an answer."""
    runs = itertools.groupby(zip(written, ids), key=lambda pair: pair[0])
    return [(tok.decode([id for _, id in run]), by_model) for by_model, run in runs]


def spelled(tok: Tokenizer, id: int) -> str:
    """A token's text, or its bytes if it is a part of a character."""
    text = tok.decode([id])
    return f"0x{tok.bytes[id].hex()}" if "\ufffd" in text else text


def need_room(trained: TrainedModel, n: int) -> None:
    """Raise UserError if a question and its answer take more tokens than the context has."""
    if n > trained.block_size:
        room = f"the context has {trained.block_size}"
        raise UserError(f"this takes {n} tokens, but {room}: shorten the texts or --max_new_tokens")


# ---- tasks: each a function (trained, request) -> answers ---------------------------------------


def continue_text(trained, request, source_of=lambda ids: []):
    """Text after the prompt. `source_of` its ids: what is read instead, in both directions."""
    ids, left_out = open_end(trained.tok, request.prompt)
    source = source_of(ids)
    prompt = source or ids or [trained.tok.EOT]
    answers = write(trained, request, prompt, len(source), goes_on=True, left_out=left_out)
    for answer in answers:
        answer.parts.insert(0, (request.prompt, False))
    return answers


def continue_prefix(trained, request):
    """The prompt is read in both directions, then continued."""
    return continue_text(trained, request, lambda ids: ids[-trained.block_size :])


def continue_ul2(trained, request):
    """UL2's S-denoiser: [S] and the prompt are the source, and what follows is the target."""
    tok = trained.tok
    most = trained.block_size * 3 // 4
    return continue_text(trained, request, lambda ids: [tok.S, *ids[-most:], tok.EOT])


def infill_fim(trained, request):
    """The text in one gap, up to EOT, in the last of the model's fim_layouts, by default spm. The
    last token before the gap is moved after <MID>, as if the middle began with it: so the model
    writes right after the word that it continues, also in psm.

        Tom rode to the[MASK]. -> <SUF>.<PRE>Tom rode to<MID> the, goes on with: mill$
    """
    tok = trained.tok
    layout = trained.knobs.fim_layouts.split(",")[-1]
    before, left_out = open_end(tok, request.parts[0])
    after = tok.encode(request.parts[1])
    reserved = min(trained.block_size // 4, request.most_new)  # for the answer
    room = trained.block_size - FIM_MARKS - reserved
    before = before[-max(room - len(after), room // 2) :]  # each side may have half of the room
    after = after[: room - len(before)]
    given_from = max(len(before) - 1, 0)
    while given_from and tok.bytes[before[given_from]][0] >> 6 == 0b10:
        given_from -= 1  # this token begins inside a UTF-8 character
    prompt = fim_prompt(layout, tok, before[:given_from], after)
    answers = write(trained, request, [*prompt, *before[given_from:]], left_out=left_out)
    for answer in answers:
        answer.parts = [(request.parts[0], False), *answer.parts, (request.parts[1], False)]
    return answers


def infill_cm3(trained, request):
    """The text has a sentinel in each gap; after it, each is repeated and followed by the missing
    text, up to an EOT.

        Tom has[MASK] hats. -> Tom has<0> hats.<0>, goes on with: red$
    """
    tok = trained.tok
    pieces, left_out = zip(*(open_end(tok, part) for part in request.parts[:-1]))
    after = [*pieces[1:], tok.encode(request.parts[-1])]
    text = [*pieces[0], *marked_parts(after, tok)]
    need_room(trained, len(text) + 3 * len(pieces) - 1)  # a sentinel, a token, an EOT
    ends = [[tok.EOT, tok.sentinel + k] for k in range(1, len(pieces))] + [[tok.EOT]]
    asking = [*text, tok.sentinel], 0, left_out, ends
    return [fill_in_turn(trained, request, *asking, i) for i in range(request.num_samples)]


def infill_span(trained, request, mode=()):
    """The source has a sentinel in each gap; the target repeats each, followed by the missing text.

    Tom has[MASK] hats. -> source Tom has<0> hats.$, target <0>, goes on with: red$
    """
    tok = trained.tok
    pieces, left_out = zip(*(open_end(tok, part) for part in request.parts[:-1]))
    after = [*pieces[1:], tok.encode(request.parts[-1])]
    source = [*mode, *pieces[0], *marked_parts(after, tok), tok.EOT]
    need_room(trained, len(source) + 2 * len(pieces))
    ends = [[tok.sentinel + k] for k in range(1, len(pieces))] + [[tok.EOT]]
    asking = [*source, tok.sentinel], len(source), left_out, ends
    return [fill_in_turn(trained, request, *asking, i) for i in range(request.num_samples)]


def fill_in_turn(trained, request, row, n_prefix: int, left_out, ends, sample=0) -> Answer:
    """One sample: fill the gaps one after another by going on with the row, whose first `n_prefix`
    ids are read in both directions. Gap k ends at the first id of ends[k], which are then appended,
    or at an EOT, which the model writes early if it thinks that all gaps are filled. Each gap has
    random numbers of its own."""
    whole = Answer([(request.parts[0], False)], details=Counter())
    fills = []
    for k, part in enumerate(request.parts[1:]):
        left = request.most_new - whole.details["written"]
        seed = request.seed + sample + 1000 * k
        rest = replace(request, max_new_tokens=left, num_samples=1, seed=seed)
        [answer] = write(trained, rest, row, n_prefix, ends[k][:1], left_out=left_out[k])
        row = [*row, *answer.ids, *ends[k]]
        whole.parts += [*answer.parts, (part, False)]
        whole.ids += answer.ids
        whole.lines += answer.lines
        if answer.details["written"] == left > 0 and part is not request.parts[-1]:
            whole.lines.append(
                f"(gap {k + 1} took the last of --max_new_tokens={request.most_new})"
            )
        whole.details.update(answer.details)  # a Counter: adds
        fills.append(answer.text)
    return replace(whole, details={**whole.details, "fills": fills})


def infill_ul2(trained, request):
    """infill_span, after a mode token, [R] or [X]."""
    return infill_span(trained, request, [getattr(trained.tok, request.mode)])


def restore(trained, request):
    """The whole text, restored from a noisy one; each gap is one [MASK]."""
    tok = trained.tok
    ids = [id for part in request.parts for id in (*tok.encode(part), tok.MASK)]
    source = [*ids[:-1], tok.EOT]
    need_room(trained, 2 * len(source))
    whole = replace(request, max_new_tokens=request.max_new_tokens or trained.block_size)
    return write(trained, whole, source, len(source))


@torch.inference_mode()
def fill_masks(trained, request):
    """One token for each [MASK], all at once; the five likeliest are listed."""
    tok = trained.tok
    ids, fits = with_masks(tok, request.parts)
    need_room(trained, len(ids) + trained.n_marks)
    gaps = [i for i, id in enumerate(ids) if id == tok.MASK]
    logits = trained.masked_logits(trained.as_document(ids))
    keep_fitting(logits, fits)
    logits = logits[gaps]
    logits[:, tok.EOT] = -torch.inf  # a document does not end in a gap
    top = logits.softmax(-1).topk(5)
    guesses = []
    lines = []
    for gap, best, p in zip(gaps, top.indices.tolist(), top.values.tolist()):
        ids[gap] = best[0]
        tokens = [spelled(tok, id) for id in best]
        guesses.append([{"token": token, "p": round(q, 4)} for token, q in zip(tokens, p)])
        listed = "   ".join(f"{token!r} {q:.2f}" for token, q in zip(tokens, p))
        lines.append(f"gap {len(guesses)}: {listed}")
    if "0x" in str(lines) and tok.name == "bytes":
        lines.insert(0, f"(a {GAP} is one byte here; a letter that is not English has several)")
    parts = parts_of(tok, ids, [i in gaps for i in range(len(ids))])
    return [Answer(parts, [ids[gap] for gap in gaps], {"guesses": guesses}, lines)]


@torch.inference_mode()
def fill_in_order(trained, request):
    """One token for each [MASK], one after another, the surest first; each sees those before it, so
    the log-probability of all of them is exact. The five likeliest are listed."""
    tok = trained.tok
    asked, fits = with_masks(tok, request.parts)
    ids = np.array([*asked, tok.EOT][: trained.text_size])
    if len(asked) > trained.text_size:
        raise UserError(f"a text may have {trained.text_size} tokens here, not {len(asked)}")
    gaps = np.flatnonzero(ids == tok.MASK).tolist()
    visible = np.setdiff1d(np.arange(len(ids)), gaps)
    dice = np.random.default_rng(request.seed)
    left, order, guesses, lines = [*gaps], [], {}, {}
    log_p = 0.0
    while left:
        seen = int(trained.knobs.plm_rate < 1)  # else training has no visible group
        logits = trained.logits(
            np.concatenate([ids[visible], ids[order].astype(int), np.full(len(left), tok.MASK)]),
            group=[seen] * len(visible) + [0] * len(order) + [-1 - gap for gap in left],
            place=np.concatenate([visible, order, left]).astype(int),
        )[-len(left) :]
        logits[:, tok.EOT] = -torch.inf  # a document does not end in a gap
        keep_fitting(logits, {i: fits[gap] for i, gap in enumerate(left) if gap in fits})
        p = logits.softmax(-1)
        surest = dice.integers(len(left)) if request.order == "random" else int(p.amax(1).argmax())
        top = p[surest].topk(5)
        gap = left.pop(surest)
        order.append(gap)
        ids[gap] = top.indices[0].item()
        log_p += top.values[0].log().item()
        listed = [(spelled(tok, id), q) for id, q in zip(top.indices.tolist(), top.values.tolist())]
        guesses[gap] = [{"token": token, "p": round(q, 4)} for token, q in listed]
        lines[gap] = "   ".join(f"{token!r} {q:.2f}" for token, q in listed)
    shown = [f"gap {k}: {lines[gap]}" for k, gap in enumerate(gaps, 1)]
    shown.append(f"log-probability of all: {log_p:.2f} nats")
    details = {"guesses": [guesses[gap] for gap in gaps], "log_p": log_p}
    parts = parts_of(tok, ids[: len(asked)].tolist(), [id == tok.MASK for id in asked])
    return [Answer(parts, ids[gaps].tolist(), details, shown)]


def unmask_gaps(trained, request):
    """Masked tokens become text in `steps` steps. Each [MASK] in --prompt is one masked token;
    between --prompt and --suffix there are --max_new_tokens."""
    text = request.prompt
    if request.suffix is not None:
        if request.max_new_tokens is None:
            raise UserError(f"give the gap's --max_new_tokens, or one {GAP} for each in --prompt")
        text += GAP * request.max_new_tokens + request.suffix
    ids, fits = with_masks(trained.tok, text.split(GAP))
    need_room(trained, len(ids))
    return unmasked(trained, request, trained.as_document(ids), goes_on=False, fits=fits)


def unmask_rest(trained, request):
    """Masked tokens after the prompt become text, which an EOT may end, in `steps` steps."""
    tok = trained.tok
    prompt, left_out = open_end(tok, request.prompt)
    need_room(trained, len(prompt) + len(left_out) + 1)

    def with_masked_rest(ids: list[int], n: int) -> list[int]:
        text = [*prompt, *ids]
        return text + [tok.MASK] * min(n, trained.block_size - len(text))

    def next_logits(ids: list[int]) -> Tensor:
        return trained.masked_logits(with_masked_rest(ids, request.most_new))[len(prompt + ids)]

    answers = []
    for start, some in heal(tok, left_out, next_logits, request.sampler(0.7), request):
        row = with_masked_rest(start, some.most_new)
        for each in unmasked(trained, some, row, goes_on=True, fits={}):
            answer = continuation(tok, request, left_out, [*start, *each.ids])
            if len(each.ids) == len(row) - len(prompt + start) < some.most_new:
                answer.lines.append(CONTEXT_FULL)
            answers.append(answer)
    return answers


def unmasked(trained, request, ids: list[int], goes_on: bool, fits) -> list[Answer]:
    """Samples of the ids with text in place of [MASK]. Only a text that goes on may end there.
    `fits`: see with_masks."""
    tok, model = trained.tok, trained.model
    banned = trained.banned.clone()
    banned[tok.EOT] = not goes_on
    x = torch.tensor([ids] * request.num_samples, device=trained.device)
    mask = model.full_mask(x)

    def read(ids: Tensor) -> Tensor:
        logits = model.logits(model(ids, mask)[0]).float().masked_fill(banned, -torch.inf)
        keep_fitting(logits, fits)
        return logits

    sampler = request.sampler(0.7 if goes_on else 0.0)
    dice = generators(request.num_samples, request.seed)
    rows = unmask(read, x, tok.MASK, sampler, dice, request.steps, request.order).tolist()
    masked = [id == tok.MASK for id in ids]
    rows = [cut(row, {tok.EOT}) for row in rows]
    return [Answer(parts_of(tok, row, masked), [*itertools.compress(row, masked)]) for row in rows]


def continue_block(trained, request):
    """Text after the prompt, block by block, each unmasked in at most `steps` steps."""
    tok = trained.tok
    prompt, left_out = open_end(tok, request.prompt)
    size, n_blocks = block_sizes(trained.block_size, trained.knobs)

    def next_logits(ids: list[int]) -> Tensor:
        text = [*prompt, *ids]
        n_clean = len(text) // size * size
        row = text + [tok.MASK] * (n_clean + size - len(text))
        group = [0] * n_clean + [-1] * size
        kept = size * n_blocks  # the end of the row, in whole blocks
        return trained.logits(row[-kept:], group=group[-kept:])[len(text) - len(row)]

    answers = []
    sampler = request.sampler(0.7)
    for start, some in heal(tok, left_out, next_logits, sampler, request):
        decoder = trained.decoder(sampler, some.num_samples)
        how = dict(seed=some.seed, steps=request.steps, order=request.order)
        text = [*prompt, *start]
        rows = write_blocks(decoder, text, some.most_new, size, tok.MASK, {tok.EOT}, **how)
        answers += [continuation(tok, request, left_out, [*start, *new]) for new in rows]
    return answers


def continuation(tok: Tokenizer, request, left_out: list[int], ids: list[int]) -> Answer:
    """The prompt, and after it the text of new ids, which begin with that of the ids left out."""
    return Answer([(request.prompt, False), (text_after(tok, left_out, ids), True)], ids)


@torch.inference_mode()
def detect(trained, request):
    """The tokens that were probably replaced are marked; the most suspect ones are listed."""
    tok = trained.tok
    ids = tok.encode(request.prompt)
    need_room(trained, len(ids))
    states = trained.states_both_ways(trained.as_document(ids))[: len(ids)]
    p = [round(q, 4) for q in trained.model.detect_head(states).float().sigmoid().tolist()]
    # A character of several tokens is marked as a whole.
    begins = [tok.bytes[id][0] >> 6 != 0b10 for id in ids]
    characters = list(itertools.accumulate(begins))  # for each token, the number of its character
    doubted = {c for c, q in zip(characters, p) if q > 0.5}
    parts = parts_of(tok, ids, [c in doubted for c in characters])
    pieces = [spelled(tok, id) for id in ids]
    suspects = sorted(range(len(p)), key=p.__getitem__, reverse=True)[:5]
    line = "   ".join(f"{pieces[i]!r} {p[i]:.2f} (token {i})" for i in suspects)
    details = {"pieces": pieces, "replaced_probability": p}
    return [Answer(parts, details=details, lines=[f"most suspicious: {line}"])]


@torch.inference_mode()
def pair(trained, request):
    """Does the second text follow the first? (sop takes for granted that they are neighbors.)"""
    first, second = map(trained.tok.encode, (request.prompt, request.suffix))
    row = pair_ids(first, second, trained.tok)
    need_room(trained, len(row))
    state = trained.states(row, prefix_stop=len(row))[0]
    p = trained.model.pair_head(state).float().sigmoid().item()
    line = f"probability that the second text follows the first: {p:.3f}"
    return [Answer([], [], {"probability": round(p, 4)}, [line])]


def similarity(trained, request):
    """Cosine of the two texts' embeddings."""
    first, second = map(trained.embed, (request.prompt, request.suffix))
    cosine = F.cosine_similarity(first, second, dim=0).item()
    return [
        Answer([], [], {"similarity": round(cosine, 4)}, [f"similarity (cosine): {cosine:.3f}"])
    ]


def embed(trained, request):
    """The mean of the text's hidden states."""
    vector = trained.embed(request.prompt).tolist()
    shown = " ".join(f"{x:.3f}" for x in vector[:8])
    line = f"{len(vector)} numbers (--json has all): {shown} ..."
    return [Answer([], [], {"embedding": vector}, [line])]


def score(trained, request):
    """nats, perplexity and bits per byte, if the objective's loss is a code length of text. (A
    prefix model pays a lot for a text's first tokens: in training it seldom predicted these; so
    does plm, unless its plm_rate is 1.)"""
    ids = trained.tok.encode(request.prompt)
    bound = trained.attention in ("full", "block")
    nats_of = {"full": bound_nats, "block": bound_nats, "permuted": permuted_nats}
    nats = nats_of.get(trained.attention, causal_nats)(trained, ids)
    perplexity = math.exp(min(nats / len(ids), 700))  # more would overflow
    bits = nats / math.log(2) / int(trained.tok.n_bytes[ids].sum())
    details = dict(nats=nats, n_tokens=len(ids), bound=bound)
    details |= dict(perplexity=perplexity, bits_per_byte=bits)
    line = f"{'at most about ' if bound else ''}{nats:.2f} nats over {len(ids)} tokens, "
    line += f"perplexity {perplexity:.4g} per token, {bits:.3f} bits per byte"
    return [Answer([], [], details, [line])]


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


def permuted_nats(trained: TrainedModel, ids: list[int], before: list[int] | None = None) -> float:
    """-log p of the ids after `before` (by default the start of a document), asked one by one from
    left to right. In a long text, all but the first have at least half a row before them."""
    T, n = trained.block_size, trained.text_size
    whole = np.array([*(before or [trained.tok.EOT]), *ids])
    done = len(whole) - len(ids)  # tokens that are given or scored
    nats = 0.0
    while done < len(whole):
        start = max(0, done - n // 2)
        n_given = done - start
        text = whole[start : start + min(n, (T + n_given) // 2)]
        row = permuted(text, np.arange(n_given, len(text)), trained.tok)
        asked = row.targets >= 0
        group = np.where(row.group == 1, int(trained.knobs.plm_rate < 1), row.group)
        logits = trained.logits(row.inputs, group=group, place=row.place)[asked]
        targets = torch.from_numpy(row.targets[asked]).to(logits.device)
        nats += F.cross_entropy(logits, targets, reduction="sum").item()
        done = start + len(text)
    return nats


def bound_nats(trained: TrainedModel, ids: list[int], before: list[int] | None = None) -> float:
    """An upper bound on -log p of the ids after `before` (by default the start of a document): k of
    a block's n tokens are masked, k is uniform on 1 ... n, and the nats of the masked tokens weigh
    n/k (as LLaDA is evaluated). It is estimated from about BOUND_ROWS maskings with evenly spread
    k, the same for the same text. For diffusion, whose block is the whole part of a text that fits
    a row, the number of ids is given, and each part is scored as a separate text."""
    rng = np.random.default_rng(ids)
    MASK = trained.tok.MASK
    is_block = trained.attention == "block"
    L = block_sizes(trained.block_size, trained.knobs)[0] if is_block else trained.block_size
    nats = 0.0
    for text, n_given in parts_to_score(trained, ids, before, L):
        n_rows = max(BOUND_ROWS * (len(text) - n_given) // len(ids), 1)
        masked = np.zeros((n_rows, len(text)), bool)
        weight = np.zeros((n_rows, len(text)))
        for start in range(0, len(text), L):
            at = np.arange(max(start, n_given), min(start + L, len(text)))
            n = len(at)
            k = 1 + (n * (np.arange(n_rows) + rng.random()) / n_rows).astype(int)  # in each masking
            masked[:, at] = rng.permuted(np.tile(np.arange(n), (n_rows, 1)), axis=1) < k[:, None]
            weight[:, at] = n / k[:, None]

        rows = text[None].repeat(n_rows, axis=0)
        noisy = np.arange(len(text))
        layout = dict(prefix_stop=len(text))
        if is_block:  # what follows the text in its last block is not known
            whole = np.append(text, np.full(-len(text) % L, MASK))
            group, place = groups_of_blocks(len(whole), L)
            rows = by_turns(whole, whole, L)[None].repeat(n_rows, axis=0)
            noisy = np.flatnonzero(group < 0)[: len(text)]
            layout = dict(group=group, place=place)
        rows[:, noisy] = np.where(masked, MASK, text)
        wanted = torch.tensor(text, device=trained.device)
        weight = torch.from_numpy(weight * masked).float().to(trained.device)
        at_once = max(BOUND_LOGITS // (rows.shape[1] * trained.model.config.vocab_size), 1)
        for part, weights in zip(torch.from_numpy(rows).split(at_once), weight.split(at_once)):
            logits = trained.logits(part, **layout)[:, noisy]
            nll = F.cross_entropy(logits.mT, wanted.expand(len(part), -1), reduction="none")
            nats += (nll.where(weights > 0, 0.0) * weights).sum().item() / n_rows
    return nats


def parts_to_score(trained: TrainedModel, ids: list[int], before: list[int] | None, L: int):
    """Yield texts that fit a row, and how many of their first tokens are given. For blocks, each
    part after the first begins with half a row of the text before it, if a row has two blocks."""
    W = trained.text_size // L * L
    if trained.attention == "full":
        given = before or [trained.tok.EOT]
        for start in range(0, len(ids), W - len(given)):
            yield np.array([*given, *ids[start : start + W - len(given)]]), len(given)
        return
    whole = np.array([*(before or []), *ids])
    done = len(whole) - len(ids)  # tokens that are given or scored
    while done < len(whole):
        start = max(0, done - W // 2 // L * L) // L * L
        yield whole[start : start + W], done - start
        done = start + W


class Task(NamedTuple):
    """A task, as one kind of model does it."""

    name: str  # of --task, which may also be the entry's own
    function: Callable  # function(trained, request) -> answers
    texts: str  # which --prompt and --suffix it takes: a key of NEEDS
    reads: set[str] = set()  # the flags it reads, except those that every task reads


# The flags read by tasks that write text, and that unmask.
DRAWS = {"max_new_tokens", "num_samples", "temperature", "top_k", "top_p", "seed"}
WRITES = DRAWS | {"speculative"}
UNMASKS = DRAWS | {"steps", "order"}
# fmt: off
NEEDS = {  # the texts of a task -> how they are given
    "start":     "a text to go on with, in --prompt",
    "text":      "a text, in --prompt",
    "one gap":   f"a text with one gap: {GAP} in --prompt, or between --prompt and --suffix",
    "gaps":      f"a text with gaps: {GAP} in --prompt, or between --prompt and --suffix",
    "any text":  "a text, with or without gaps, in --prompt",
    "two texts": "two texts: --prompt and --suffix",
}
TASKS = {
    "continue":        Task("continue",   continue_text,   "start",     WRITES),
    "continue_prefix": Task("continue",   continue_prefix, "start",     WRITES),
    "continue_ul2":    Task("continue",   continue_ul2,    "start",     WRITES),
    "continue_unmask": Task("continue",   unmask_rest,     "start",     UNMASKS),
    "continue_block":  Task("continue",   continue_block,  "start",     UNMASKS),
    "infill_fim":      Task("infill",     infill_fim,      "one gap",   WRITES),
    "infill_cm3":      Task("infill",     infill_cm3,      "gaps",      WRITES),
    "infill_span":     Task("infill",     infill_span,     "gaps",      WRITES),
    "infill_ul2":      Task("infill",     infill_ul2,      "gaps",      WRITES | {"mode"}),
    "unmask":          Task("infill",     unmask_gaps,     "gaps",      UNMASKS),
    "restore":         Task("restore",    restore,         "any text",  WRITES),
    "fill":            Task("fill",       fill_masks,      "gaps"),
    "fill_in_order":   Task("fill",       fill_in_order,   "gaps",      {"order", "seed"}),
    "detect":          Task("detect",     detect,          "text"),
    "pair":            Task("pair",       pair,            "two texts"),
    "pair_order":      Task("pair",       pair,            "two texts"),
    "similarity":      Task("similarity", similarity,      "two texts"),
    "score":           Task("score",      score,           "text"),
    "embed":           Task("embed",      embed,           "text"),
}
# fmt: on


# ---- asking and answering ----------------------------------------------------------------------


def tasks_of(names: Iterable[str]) -> list[str]:
    """The entries of TASKS that a model of these objectives serves, the usual one first."""
    found = [entry for name in names for entry in OBJECTIVES[name].tasks]
    if all(OBJECTIVES[name].likelihood for name in names):
        found.append("score")
    return list(dict.fromkeys([*found, "embed"]))


def serve(trained: TrainedModel, request: SampleConfig) -> list[Answer]:
    """The answers of the model's first task that takes the given texts and, if --task is set, has
    that name. Raises UserError if there is none, or if a flag is not read."""
    n_gaps = len(request.parts) - 1  # --suffix makes one
    given = {
        "start": n_gaps == 0,
        "text": n_gaps == 0 and request.prompt,
        "one gap": n_gaps == 1,
        "gaps": n_gaps > 0,
        "any text": request.prompt or request.suffix,
        "two texts": n_gaps == 1 and request.prompt and request.suffix,
    }
    tasks = {entry: TASKS[entry] for entry in trained.tasks}
    for entry, task in tasks.items():
        meant = entry not in ("score", "embed")  # these only if they are named
        if given[task.texts] and (request.task in (task.name, entry) if request.task else meant):
            break
    else:
        takes = dict.fromkeys(f"--task={task.name}: {NEEDS[task.texts]}" for task in tasks.values())
        raise UserError(f"this {'+'.join(trained.mixture)} model takes {'; '.join(takes)}")
    for name in sorted({*WRITES, *UNMASKS, "mode"} - task.reads):
        if getattr(request, name) != getattr(SampleConfig, name):
            raise UserError(f"--{name} is not read by --task={task.name} of this model")
    if request.speculative and request.num_samples > 1:
        raise UserError("--speculative drafts for one sample: leave out --num_samples")
    with set_for_asking(trained):
        return task.function(trained, request)


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


# ---- showing -----------------------------------------------------------------------------------


def marked(parts: list[tuple[str, bool]]) -> str:
    """The text with marks around what the model wrote: a⟪b⟫."""
    return "".join(f"⟪{visible(text)}⟫" if written else visible(text) for text, written in parts)


def show(answer: Answer, print_line: Callable = print) -> None:
    if answer.parts:
        print_line(marked(answer.parts))
    for line in answer.lines:
        print_line(visible(line))


def question(trained: TrainedModel, tokens: Tokens) -> tuple[dict, str]:
    """A request for the model's usual task about a validation document that fits in half a context,
    and the text that it hides: a word of the later half, if possible one that also occurs
    elsewhere."""
    tok = trained.tok
    text = Text(tokens.val, tok.EOT)
    room = trained.block_size // 2 - 2  # a task adds special tokens
    chosen = (text.sizes * (text.sizes <= room)).argmax()  # the first document if none fits
    whole = tok.decode(tokens.val[text.starts[chosen] : text.stops[chosen]][:room])
    whole = whole.strip("\ufffd").split(GAP)[0]  # no half character, and no gap but the hole
    if chosen == 0:  # it may begin inside a word
        whole = re.sub(r"^\w+\s+(?=\S)", "", whole)
    words = [*re.finditer(r"[^\S\n]?\w{1,12}", whole)] or [re.search("$", whole)]
    later = words[len(words) // 2 :]
    known = [word for word in later if whole.count(word.group()) > 1]
    hole = max(known or later, key=lambda word: len(word.group()))
    before, hidden, after = whole[: hole.start()], hole.group(), whole[hole.end() :]

    entry = trained.tasks[0]
    if entry in ("fill", "fill_in_order", "unmask"):
        return {"prompt": before + GAP * len(tok.encode(hidden)) + after}, hidden
    if entry == "detect":
        wrong = " " + (before.split() or ["?"])[-1]
        return {"prompt": before + wrong + after}, hidden
    if TASKS[entry].texts == "start":
        return {"prompt": before, "max_new_tokens": trained.block_size // 4}, ""
    if TASKS[entry].texts == "two texts":
        cut = before.rfind("\n") + 1 or len(before)  # where a sentence ends
        return {"prompt": whole[:cut], "suffix": whole[cut:]}, ""
    limit = {} if entry == "restore" else {"max_new_tokens": 24}
    return {"prompt": before, "suffix": after, **limit}, hidden


def showcase(trained: TrainedModel, tokens: Tokens, folder, print_line: Callable) -> None:
    """Print an answer about held-out text, and the command for your own text."""
    request, hidden = question(trained, tokens)
    try:
        [answer] = trained.ask(None, **request)
    except UserError as error:
        return print_line(f"Nothing to show from the validation text: {error}")
    texts = {name: text for name, text in request.items() if name in ("prompt", "suffix")}
    print_line("On validation text, which the model has not seen (⟪…⟫ is what it wrote):")
    if answer.whole == answer.text:  # the answer does not contain the question
        print_line(visible(" ... ".join(texts.values())))
    show(answer, print_line)
    if hidden:
        print_line(f"The original: {hidden!r}")
    yours = {name: f"...{GAP}..." if GAP in text else "..." for name, text in texts.items()}
    flags = " ".join(f'--{name}="{text}"' for name, text in yours.items())
    print_line(f"Your own text: python sample.py --out_dir={shlex.quote(str(folder))} {flags}")


def one_line_sample(trained: TrainedModel, tokens: Tokens) -> str:
    """What the model makes of the same held-out text, in one line, to show it learning."""
    try:
        [answer] = trained.ask(None, **question(trained, tokens)[0])
    except UserError:
        return "(nothing to show)"
    line = " ".join((marked(answer.parts) or answer.lines[0]).split())
    start = max(line.find("⟪") - 45, 0)
    return line[start : start + 90]


def main(argv: list[str]) -> None:
    request = build(SampleConfig, parse_flags(argv, __doc__, SampleConfig))
    answers = serve(load(request.out_dir, request.device), request)
    for number, answer in enumerate(answers, 1):
        if request.json:
            said = {"prompt": request.prompt, "suffix": request.suffix, "text": answer.text}
            said |= {"whole": answer.whole, "tokens": answer.ids, "notes": answer.lines}
            print(json.dumps({**answer.details, **said}, allow_nan=False))
        else:
            if len(answers) > 1:
                print(f"--- sample {number}")
            show(answer)
    figures = answers[0].details
    if figures.get("tokens") and not request.json:
        line = f"{figures['tokens'] / figures['seconds']:.1f} tokens/s"
        if request.speculative:
            line += f", kept {figures['kept']} of {figures['drafted']} drafts"
        print(f"[{line}]", file=sys.stderr)


if __name__ == "__main__":
    run_command(main, lower="--num_samples or --max_new_tokens")
