"""sample.py: reading a trained model out: continue, infill, fill, unmask, mark, score; plain or drafting for itself.

The checkpoint says which objective and tokenizer it has; the flags say what is wanted, and a request that the objective
cannot serve names those that can. Nothing here trains.

    python sample.py --out_dir=out/fim --prompt="def add(a, b):" --suffix="    return c"
    python sample.py --out_dir=out/mlm --prompt="for i in [MASK]ange(10):"
    python sample.py --out_dir=out/mtp --prompt="import os" --speculative
"""
import codecs
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn import functional as F

from data import Tokenizer, UserError, check_values, cli, flag, load_checkpoint, parse_flags
from model import Block, KVCache, Transformer, rotary
from objectives import FIM_LAYOUTS, OBJECTIVES, embed, parse_mixture


@dataclass
class SampleConfig:
    """what is read out of which run, and how"""
    out_dir: str = flag("out/fim", "folder of the run to read out")
    prompt: str = flag("", "the text before; the first text where two are compared; empty: a document begins")
    suffix: str | None = flag(None, "the text after a gap to fill; the second text where two are compared; left out: no such text")
    gap: str = flag("[MASK]", "what stands for a gap inside --prompt, where the objective fills gaps")
    task: str | None = flag(None, "what is asked for; automatic: from the texts given and what the model can do",
                            ("continue", "infill", "fill", "restore", "unmask", "detect", "pair", "similarity"))
    max_new_tokens: int = flag(200, "most tokens to generate, in [1, inf); for diffusion the tokens between --prompt and --suffix")
    num_samples: int = flag(1, "samples, in [1, inf)")
    temperature: float = flag(0.0, "in [0, inf); 0: the most probable token; 1: the model's own distribution")
    top_k: int = flag(0, "sample from the k most probable tokens, in [0, inf); 0: all")
    top_p: float = flag(1.0, "sample from the fewest tokens that hold this probability, in [0, 1]; 0: the most probable one")
    seed: int = flag(1, "seed of the draws, in [0, 2147483648)")
    speculative: bool = flag(False, "let an mtp model draft its own tokens: the same text, sooner; plain decoding is timed beside it")
    draft_tokens: int | None = flag(None, "tokens that the heads draft a pass, in [1, inf); automatic: as many as there are heads")
    lookup_tokens: int = flag(12, "tokens looked up in the text and drafted after those, or instead of them, in [0, 64]")
    mode: str = flag("R", "ul2: which denoiser fills gaps, R (short ones) or X (long ones)", ("R", "X"))
    steps: int = flag(32, "diffusion: steps from all masked to none, in [1, inf)")
    order: str = flag("confidence", "diffusion: which tokens come first, the surest or any", ("confidence", "random"))
    compile: bool = flag(False, "torch.compile a decoding pass: plain decoding about twice as fast, after some 15 seconds")
    json: bool = flag(False, "one JSON object a sample, for programs")
    device: str | None = flag(None, "cpu, cuda or mps; automatic: the fastest there is")


# ---- decoding -------------------------------------------------------------------------------------------------------

def _real(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64          # Metal has no float64


N_GRAM = 4      # most tokens by which a place in the text is looked up
READ = 8        # newest positions of a pass that the heads read: all of a long one's cost more than they help


@dataclass
class Sampler:
    """Which token follows. One uniform number per output position decides, so drafting cannot change the text."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def probs(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(…, V) logits -> probabilities in falling order and their ids, (…, k)."""
        scaled, ids = logits.float().topk(min(self.top_k or logits.shape[-1], logits.shape[-1]))
        p = ((scaled - scaled[..., :1]) / min(max(self.temperature, 1e-6), 1e6)).softmax(-1)     # float32 holds no wider
        before = p.cumsum(-1) - p
        p = p * ((before < self.top_p) | (torch.arange(p.shape[-1], device=p.device) == 0))
        return p / p.sum(-1, keepdim=True), ids

    def __call__(self, logits: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """(…, V) logits, (…) uniform numbers -> (…) ids, by the inverse of the cumulative distribution."""
        if self.temperature == 0 or self.top_p == 0 or self.top_k == 1:
            return logits.argmax(-1)
        p, ids = self.probs(logits)
        at = (p.to(u.dtype).cumsum(-1) <= u[..., None]).sum(-1).clamp(max=p.shape[-1] - 1)
        at = torch.minimum(at, (p > 0).sum(-1) - 1)                        # rounding at the very end of the distribution
        return ids.gather(-1, at[..., None]).squeeze(-1)


@dataclass
class Stats:
    """Of one generation: `tokens` emitted over all rows, seconds, passes (a row's, summed over the rows; without its last, of
    which only a part may count), and in how many of them each draft was kept."""
    tokens: int = 0
    seconds: float = 0.0
    passes: int = 0
    kept: list | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def acceptance(self) -> list[float]:
        return [n / max(self.passes, 1) for n in self.kept]

    def __add__(self, other: "Stats") -> "Stats":
        kept = [a + b for a, b in zip(self.kept, other.kept)]
        return Stats(self.tokens + other.tokens, self.seconds + other.seconds, self.passes + other.passes, kept)


class Decoder:
    """Generation with a static KV cache; with `heads` > 0 so many of an mtp model's heads guess ahead and one pass verifies.

    After the heads' drafts come `lookup` more: what followed the last tokens, as many of N_GRAM as possible, the last time they
    stood in the text (prompt lookup decoding, Saxena 2023); where all N_GRAM did, that is drafted from the first token on.
    A pass reads the newest token and its drafts, always as many, draws the true token after each, and keeps the drafts for as
    long as they match: the output is that of plain decoding, token for token.
    Past the context's end a row goes on with the later half of its context, at places that depend on the length alone.
    """

    def __init__(self, model: Transformer, batch: int, heads: int = 0, sampler: Sampler | None = None, allowed: torch.Tensor | None = None,
                 block_size: int = 256, lookup: int = 0, compile: bool = False):
        self.model, self.heads, self.drafts, self.sampler, self.window = model, heads, heads + lookup, sampler or Sampler(), block_size
        self.device = model.embed_tokens.weight.device
        slots = -(-(block_size + self.drafts + 1) // 16) * 16              # a mask of whole 16s needs no copy on CUDA
        self.cache = KVCache(model.config, batch, slots, heads, self.device, model.embed_tokens.weight.dtype)
        self.text = torch.zeros(batch, slots + self.drafts, dtype=torch.long, device=self.device)     # by position, guesses too
        V = model.config.vocab_size
        self.banned = torch.zeros(V, device=self.device) if allowed is None else torch.where(allowed.to(self.device), 0.0, -torch.inf)
        self.row, self.steps = torch.arange(batch, device=self.device), torch.arange(self.drafts + 1, device=self.device)
        self.step, self.replay = torch.compile(self._pass, dynamic=False) if compile else self._pass, None

    def _pick(self, h, u):
        return self.sampler(self.model.logits(self.model.norm(h)).float() + self.banned, u)

    def _draft(self, states, positions, last, newest, mask):
        """Trunk states (B, W, C) at `positions` (B, W), of which index `last` (B,) is the newest known to be right and followed
        by `newest` (B,) -> (B, drafts) guesses at what follows that.

        In their cache, heads may have entries made from wrong guesses and lack those of positions that READ left out: that costs
        a few drafts, never a wrong token."""
        if not self.drafts:
            return newest[:, None][:, :0]
        model, heads, row, text = self.model, self.heads, self.row, self.text
        at, first = positions[row, last] + 1, model.config.n_layer
        ahead, b = at[:, None] + self.steps[1:], row[:, None]
        text[row, at] = newest
        guess = lambda h: (model.logits(model.norm(h)).float() + self.banned).argmax(-1)
        if heads and isinstance(model.future, Block):                     # all heads side by side, one unembedding
            n = model.config.n_future - 1
            places = positions.repeat(n, 1)
            h = model.future(states.repeat(n, 1, 1), mask.repeat(n, 1, 1, 1), rotary(places, model.config, states.dtype),
                             lambda k, v: self.cache.write(first, k, v, places))
            text[b, ahead[:, :heads]] = guess(h.unflatten(0, (n, -1))[:heads, row, last]).T
        elif heads:
            turn, h = rotary(positions, model.config, states.dtype), states
            for i, head in enumerate(model.future[:heads]):
                following = model.embed_tokens(text.gather(1, positions + i + 1))
                h = head(h, following, mask, turn, lambda k, v, i=i: self.cache.write(first + i, k, v, positions))
                text[row, at + i + 1] = guess(h[row, last])
        if heads < self.drafts:
            text[b, ahead[:, heads:]] = self._look_up(at + heads, self.drafts - heads)[0]
        if 0 < heads < self.drafts:                                       # where much of the text stood there before, the heads know less
            found, length = self._look_up(at, self.drafts)
            return torch.where(length == N_GRAM, found, text.gather(1, ahead))
        return text.gather(1, ahead)

    def _look_up(self, end, n):
        """What followed the longest of the text's last N_GRAM tokens, of which the newest is at `end` (B,), the last time that they
        stood there before -> n tokens, (B, n), and how many those were, (B, 1)."""
        text = self.text
        tail = text.gather(1, (end[:, None] - torch.arange(N_GRAM, device=self.device)).clamp(min=0))
        same = F.pad(text, (N_GRAM - 1, 0), value=-1).unfold(1, N_GRAM, 1).flip(-1) == tail[:, None]   # (B, place of the newest, N_GRAM)
        place = torch.arange(same.shape[1], device=self.device)
        score = same.cumprod(-1).sum(-1) * len(place) + place             # the longest; of those, the latest
        best, place = torch.where(place < end[:, None], score, -1).max(1, keepdim=True)
        following = torch.arange(n, device=self.device) % (end[:, None] - place)          # a short period repeats itself
        return text.gather(1, place + 1 + following), best // same.shape[1]

    def _prefill(self, contexts, prefix_length, u):
        """Read whole contexts -> newest token (B,), drafts (B, drafts)."""
        n, row = torch.tensor([len(c) for c in contexts]), self.row
        ids = torch.zeros(len(contexts), max(map(len, contexts)), dtype=torch.long)
        for b, c in enumerate(contexts):
            ids[b, :len(c)] = torch.tensor(c)
        ids, n = ids.to(self.device), n.to(self.device)
        self.text[:, :ids.shape[1]] = ids
        positions = torch.arange(ids.shape[1], device=self.device).expand_as(ids)
        mask = self.cache.mask(positions, prefix_length)
        states = self.model.trunk(ids, mask, positions, self.cache)
        newest = self._pick(states[row, n - 1], u)
        return newest, self._draft(states, positions, n - 1, newest, mask)

    def _pass(self, newest, drafts, position, drawn, u):
        """One decoding pass, all on the device: `newest` (B,) stands at `position` (B,), after `drawn` (B,) new tokens, and u
        (B, 1 + drafts) decides -> the true tokens and, last, how many drafts matched, (B, 2 + drafts); the next pass's first four."""
        ids, positions = torch.cat([newest[:, None], drafts], 1), position[:, None] + self.steps       # (B, 1 + drafts)
        self.text.scatter_(1, positions, ids)
        mask = self.cache.mask(positions)
        states = self.model.trunk(ids, mask, positions, self.cache)
        true = self._pick(states, u)
        match = (true[:, :-1] == drafts).int().cumprod(1).sum(1)
        match = torch.minimum(match, self.window - 1 - position)                        # what plain decoding reads past the end differs
        latest = true[self.row, match]
        last = match
        if self.heads:                                                                  # which read the newest positions only
            first, b = (match + 1 - len(self.steps[:READ])).clamp(min=0), self.row[:, None]
            near, last = first[:, None] + self.steps[:READ], match - first
            states, positions, mask = states[b, near], positions[b, near], mask[b, :, near].transpose(1, 2)
        drafts = self._draft(states, positions, last, latest, mask)
        return torch.cat([true, match[:, None]], 1), latest, drafts, (position + match + 1).clamp(max=self.window - 1), drawn + match + 1

    def _graphed(self, *inputs):
        """The pass as it is, or on CUDA one captured graph for the whole generation."""
        if self.device.type != "cuda":
            return self.step(*inputs)
        if self.replay is None:
            static = [x.clone() for x in inputs]
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self.step(*static)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                made = self.step(*static)
            self.replay = graph, static, made
        graph, static, made = self.replay
        for mine, given in zip(static, inputs):
            mine.copy_(given)
        graph.replay()
        return [x.clone() for x in made]

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], max_new_tokens: int, eot: int, seed: int = 1, prefix_length: list[int] | None = None,
                 on_tokens=None) -> tuple[list[list[int]], Stats]:
        """Prompts (at least one token each) -> the new tokens of each, up to and without `eot`, and the figures."""
        W, B = self.window, len(prompts)
        u = torch.rand(B, max_new_tokens, generator=torch.Generator().manual_seed(seed), dtype=_real(self.device)).to(self.device)
        texts, out = [list(p)[-W:] for p in prompts], [[] for _ in prompts]
        prefix = [max(0, n - (len(p) - len(t))) for n, p, t in zip(prefix_length or [0] * B, prompts, texts)]
        done, stats, state = [False] * B, Stats(kept=[0] * self.drafts), None
        drawn, began = torch.zeros(B, dtype=torch.long, device=self.device), time.perf_counter()
        while not all(done):
            if reading := state is None or any(len(t) > W and not d for t, d in zip(texts, done)):
                for b, t in enumerate(texts):
                    if len(t) > W:
                        drop = len(t) - W // 2
                        texts[b], prefix[b] = t[drop:], max(0, prefix[b] - drop)
                length = torch.tensor(prefix, device=self.device) if any(prefix) else None
                newest, drafts = self._prefill(texts, length, u.gather(1, drawn[:, None].clamp(max=max_new_tokens - 1))[:, 0])
                fresh = [[token, 0] for token in newest.tolist()]
                drawn = drawn + 1
                state = newest, drafts, torch.tensor([min(len(t), W - 1) for t in texts], device=self.device), drawn
            else:
                fresh, *state = self._graphed(*state, u.gather(1, (drawn[:, None] + self.steps).clamp(max=max_new_tokens - 1)))
                fresh, drawn = fresh.tolist(), state[3]                                  # the pass's one look at the device
            for b, (*tokens, match) in enumerate(fresh):
                if done[b]:
                    continue
                tokens = tokens[:match + 1]
                new = (tokens[:tokens.index(eot)] if eot in tokens else tokens)[:max_new_tokens - len(out[b])]
                if not reading and len(new) == len(tokens):                              # not the last pass, of which only a part counts
                    stats.passes, stats.kept = stats.passes + 1, [kept + (i < match) for i, kept in enumerate(stats.kept)]
                texts[b] += tokens
                out[b] += new
                stats.tokens += len(new)
                done[b] = len(new) < len(tokens) or len(out[b]) >= max_new_tokens
                if on_tokens and new:
                    on_tokens(b, new)
        stats.seconds = time.perf_counter() - began
        return out, stats


# ---- what can be asked ----------------------------------------------------------------------------------------------

class Reader:
    """A checkpoint opened for reading."""

    def __init__(self, state: dict, device: str | None = None):
        from train import checkpoint_configs, choose_machine
        self.device = choose_machine(device, None, None).device
        self.tok = Tokenizer.from_json(state["tokenizer"])
        run, config, self.knobs, _ = checkpoint_configs(state)
        self.block_size, self.model = run.block_size, Transformer(config)
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as e:
            raise UserError(f"the checkpoint's weights are not those of its configuration ({str(e).splitlines()[0][:90]}); "
                            "train again or restore a copy") from None
        self.model.to(self.device).eval()
        self.names = list(parse_mixture(state["objective"]))
        if self.device.type == "cpu" and self.model.config.n_embd <= 512:
            torch.set_num_threads(1)                                       # a token is too little work to share
        for p in (p for p in self.model.parameters() if p.ndim > 1 and self.device.type == "cpu"):
            p.data = p.data.mT.contiguous().mT                             # column by column: eight tokens cost little more than one
        self.amp = torch.bfloat16 if self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) >= (8, 0) else None
        if self.amp:
            self.model.to(self.amp)

    @property
    def readouts(self) -> list[str]:
        return list(dict.fromkeys(r for name in self.names for r in OBJECTIVES[name].sample))

    def allowed(self, extra=()) -> torch.Tensor:
        """(V,) which ids may be drawn: text, EOT, and `extra`."""
        ids = torch.zeros(self.model.config.vocab_size, dtype=torch.bool)
        ids[[i for i, piece in enumerate(self.tok.bytes) if piece] + [self.tok.EOT, *extra]] = True
        return ids

    def pieces(self, c: SampleConfig) -> list[list[int]]:
        """--prompt split at its gaps, --suffix after one more, each as plain text's ids."""
        return [self.tok.encode(t) for t in c.prompt.split(c.gap)] + ([self.tok.encode(c.suffix)] if c.suffix is not None else [])

    def room(self, ids: list[int], c: SampleConfig, answer: int) -> None:
        if len(ids) + answer > self.block_size:
            raise UserError(f"the text has {len(ids)} tokens and its answer about {answer}, the context {self.block_size}: shorten --prompt or --suffix")


def _generate(r: Reader, c: SampleConfig, prompt: list[int], prefix: int = 0, extra=(), show=None) -> list[dict]:
    """Samples of one prompt as dictionaries with `ids`; with --speculative the plain run's figures beside them."""
    sampler, heads = Sampler(c.temperature, c.top_k, c.top_p), r.model.config.n_future - 1
    drafting = (heads if c.draft_tokens is None else c.draft_tokens) * c.speculative         # so many heads
    prompts = [prompt or [r.tok.EOT]] * c.num_samples
    runs = []
    for k in ([0, drafting] if drafting else [0]):
        decoder = Decoder(r.model, c.num_samples, k, sampler, r.allowed(extra), r.block_size, c.lookup_tokens * (k > 0), c.compile)
        if c.speculative or c.compile:                                     # the first pass of a process is slow: not counted
            decoder.generate(prompts, min(8, c.max_new_tokens), r.tok.EOT, c.seed, [prefix] * c.num_samples)
        on_tokens = show if k == drafting else None
        runs.append(decoder.generate(prompts, c.max_new_tokens, r.tok.EOT, c.seed, [prefix] * c.num_samples, on_tokens))
    (outs, stats), (_, plain) = runs[-1], runs[0]
    figures = {"tokens_per_s": round(stats.tokens_per_s, 1)}
    if drafting:
        figures |= {"plain_tokens_per_s": round(plain.tokens_per_s, 1), "tokens_per_pass": round(1 + sum(stats.acceptance), 3),
                    "acceptance": [round(a, 3) for a in stats.acceptance], "heads": drafting, "passes": stats.passes}
    return [dict(ids=ids, **figures) for ids in outs]


def continue_(r, c, show=None):
    """The prompt goes on, left to right."""
    return _generate(r, c, r.tok.encode(c.prompt), show=show)


def continue_prefix(r, c, show=None):
    """The prompt is read both ways, then goes on."""
    ids = r.tok.encode(c.prompt)[-r.block_size:]
    return _generate(r, c, ids, prefix=len(ids), show=show)


def continue_ul2(r, c, show=None):
    """UL2's S-denoiser: [S] and the prompt are the source, what follows is the target."""
    ids = [r.tok.S, *r.tok.encode(c.prompt)[-(r.block_size * 3 // 4):], r.tok.EOT]
    return _generate(r, c, ids, prefix=len(ids), show=show)


def middle(r, c, show=None):
    """What stands between two texts, up to EOT, in the last of the layouts that the model was trained with: by default spm, where
    the middle follows its prefix directly, which a small model learns first."""
    before, after = r.pieces(c)
    room = r.block_size * 3 // 4 - 3
    before = before[-max(room - len(after), room // 2):]                   # too long a text loses its far ends
    after = after[:room - len(before)]
    ids = FIM_LAYOUTS[r.knobs.fim_layouts.split(",")[-1]](r.tok, before, after)
    return _generate(r, c, ids, show=show)


def gaps(r, c, show=None, mode=()):
    """Sentinels stand for the gaps of the source; the target says, sentinel by sentinel, what is in them."""
    parts = r.pieces(c)
    n = len(parts) - 1
    if n < 1:
        raise UserError(f"there is no gap: give --suffix, or write {c.gap} inside --prompt")
    sentinels = [r.tok.sentinel + k for k in range(n + 1)]
    source = [*mode, *(i for k, part in enumerate(parts) for i in [*part, *([sentinels[k]] if k < n else [])]), r.tok.EOT]
    r.room(source, c, 8 * n)
    made = _generate(r, c, [*source, sentinels[0]], prefix=len(source), extra=sentinels[1:])
    for sample in made:
        fills, now = [[]], 0
        for i in sample["ids"]:
            if i == sentinels[min(now + 1, n)]:
                now += 1
                if now == n:
                    break
                fills.append([])
            elif i < r.tok.n_ordinary:
                fills[-1].append(i)
        sample["fills"] = [r.tok.decode(f) for f in fills] + [""] * (n - len(fills))
        sample["ids"] = [i for f in fills for i in f]
        sample["whole"] = "".join(r.tok.decode(part) + (sample["fills"][k] if k < n else "") for k, part in enumerate(parts))
    return made


def gaps_ul2(r, c, show=None):
    """The same after a mode token, [R] or [X]."""
    return gaps(r, c, show, (getattr(r.tok, c.mode),))


def restore(r, c, show=None):
    """The whole text again, from a noisy one; a gap is one [MASK]."""
    parts = r.pieces(c)
    source = [i for k, part in enumerate(parts) for i in [*([r.tok.MASK] if k else []), *part]] + [r.tok.EOT]
    r.room(source, c, len(source))
    return _generate(r, c, source, prefix=len(source), show=show)


@torch.no_grad()
def fill(r, c, show=None):
    """One token for each [MASK], all at once, with the five likeliest."""
    parts = r.pieces(c)
    ids = [i for k, part in enumerate(parts) for i in [*([r.tok.MASK] if k else []), *part]]
    if len(parts) < 2:
        raise UserError(f"there is nothing to fill: write {c.gap} inside --prompt where a token is missing")
    ids = [r.tok.CLS, *ids, r.tok.SEP] if r.model.pair_head is not None else ids
    r.room(ids, c, 0)
    x = torch.tensor([ids], device=r.device)
    if r.model.generator is not None:
        logits = F.linear(r.model.generate_hidden(x, "full"), r.model.embed_tokens.weight)
    else:
        logits = r.model.logits(r.model(x, "full")[0])
    logits = logits.float().masked_fill(~r.allowed().to(r.device), -torch.inf)
    at = [i for i, token in enumerate(ids) if token == r.tok.MASK]
    top = logits[0, at].softmax(-1).topk(5)
    guesses = [[{"token": r.tok.decode([i]), "p": round(p, 4)} for i, p in zip(*row)] for row in zip(top.indices.tolist(), top.values.tolist())]
    for i, row in zip(at, top.indices.tolist()):
        ids[i] = row[0]
    return [dict(ids=[ids[i] for i in at], whole=r.tok.decode([i for i in ids if i not in (r.tok.CLS, r.tok.SEP)]), guesses=guesses)]


@torch.no_grad()
def detect(r, c, show=None):
    """The tokens that were probably replaced in ⟦⟧, and the most suspect ones."""
    ids = r.tok.encode(c.prompt)
    if not ids:
        raise UserError("there is no text to judge: give --prompt")
    r.room(ids, c, 0)
    p = r.model.detect_head(r.model(torch.tensor([ids], device=r.device), "full")[0]).sigmoid()[0, :, 0].tolist()
    marked = "".join(f"⟦{r.tok.decode([i])}⟧" if q > 0.5 else r.tok.decode([i]) for i, q in zip(ids, p))
    suspects = [{"token": r.tok.decode([ids[i]]), "at": i, "p": round(p[i], 4)} for i in sorted(range(len(p)), key=p.__getitem__)[:-6:-1]]
    return [dict(ids=ids, whole=marked, replaced_probability=[round(q, 4) for q in p], suspects=suspects)]


@torch.no_grad()
def pair(r, c, show=None):
    """Does the second text follow the first (nsp), or are they in order (sop)?"""
    a, b = _two(r, c)
    ids = [r.tok.CLS, *a, r.tok.SEP, *b, r.tok.SEP]
    p = r.model.pair_head(r.model(torch.tensor([ids], device=r.device), "full")[0][:, 0]).sigmoid().item()
    return [dict(ids=[], whole=f"probability that the second text follows the first: {p:.3f}", probability=round(p, 4))]


@torch.no_grad()
def similarity(r, c, show=None):
    """Cosine of the two texts' embeddings."""
    both = []
    for ids in _two(r, c):
        x = torch.tensor([ids], device=r.device)
        both.append(embed(r.model, x, "full", torch.ones_like(x), 1)[0, 0])
    cosine = (both[0] @ both[1]).item()
    return [dict(ids=[], whole=f"similarity (cosine): {cosine:.3f}", similarity=round(cosine, 4))]


def _two(r, c):
    if not c.prompt or not c.suffix:
        raise UserError("two texts are compared: give --prompt and --suffix")
    room = (r.block_size - 3) // 2
    return r.tok.encode(c.prompt)[-room:], r.tok.encode(c.suffix)[:room]


@torch.no_grad()
def unmask(r, c, show=None):
    """From all gaps masked to none in `steps` steps; what is given stays untouched."""
    parts, tok = r.pieces(c), r.tok
    between = [tok.MASK] * (c.max_new_tokens if c.suffix is not None else 1)
    if len(parts) == 1:
        parts, between = [parts[0], []], [tok.MASK] * c.max_new_tokens
    ids = [i for k, part in enumerate(parts) for i in [*(between if k == len(parts) - 1 else [tok.MASK] if k else []), *part]]
    r.room(ids, c, 0)
    x = torch.tensor([ids] * c.num_samples, device=r.device)
    masked, generator = x == tok.MASK, torch.Generator().manual_seed(c.seed)
    total, began = int(masked[0].sum()), time.perf_counter()
    banned = torch.where(r.allowed().to(r.device), 0.0, -torch.inf)
    banned[tok.EOT] = -torch.inf                                           # the loss never asks for it
    sampler = Sampler(c.temperature, c.top_k, c.top_p)
    steps = min(c.steps, total)
    for step in range(steps):
        logits = r.model.logits(r.model(x, "full")[0]).float() + banned
        guess = sampler(logits, torch.rand(x.shape, generator=generator, dtype=_real(r.device)).to(r.device))
        sure = logits.softmax(-1).gather(-1, guess[..., None]).squeeze(-1)
        if c.order == "random":
            sure = torch.rand(x.shape, generator=generator).to(r.device)
        left = total - total * (step + 1) // steps                         # still masked after this step
        rank = sure.masked_fill(~(x == tok.MASK), 2.0).argsort(1).argsort(1)
        x = torch.where((x == tok.MASK) & (rank >= left), guess, x)
        if show:
            show(0, x[0].tolist())
    seconds = time.perf_counter() - began
    speed = round(total * c.num_samples / max(seconds, 1e-9), 1)
    return [dict(ids=row[m].tolist(), whole=tok.decode(row.tolist()), tokens_per_s=speed) for row, m in zip(x, masked)]


DRAWS = {"max_new_tokens", "num_samples", "temperature", "top_k", "top_p", "seed"}
WRITES = DRAWS | {"compile"}
READOUTS = {   # name in the table OBJECTIVES -> function, the tasks it serves, how many texts it takes, the flags that not all read
    "continue":        (continue_,       ("continue",),                    "text", WRITES),
    "continue_prefix": (continue_prefix, ("continue",),                    "text", WRITES),
    "continue_ul2":    (continue_ul2,    ("continue",),                    "text", WRITES),
    "middle":          (middle,          ("infill",),                      "gap",  WRITES | {"suffix"}),
    "gaps":            (gaps,            ("infill",),                      "gap",  WRITES | {"suffix"}),
    "gaps_ul2":        (gaps_ul2,        ("infill",),                      "gap",  WRITES | {"suffix", "mode"}),
    "restore":         (restore,         ("restore", "infill"),            "any",  WRITES | {"suffix"}),
    "unmask":          (unmask,          ("unmask", "infill", "continue"), "any",  DRAWS | {"suffix", "steps", "order"}),
    "fill":            (fill,            ("fill",),                        "gap",  {"suffix"}),
    "detect":          (detect,          ("detect",),                      "text", set()),
    "pair":            (pair,            ("pair",),                        "two",  {"suffix"}),
    "similarity":      (similarity,      ("similarity",),                  "two",  {"suffix"}),
}


def choose(r: Reader, c: SampleConfig) -> tuple:
    """The row of READOUTS that serves the request. Raises UserError with the objectives that could, where this model cannot."""
    if c.task:
        fits = lambda name: c.task in READOUTS[name][1]
        wanted = f"--task={c.task}"
    else:
        gap = c.suffix is not None or c.gap in c.prompt
        kinds = ("gap", "two", "any") if gap else ("text", "any")
        fits = lambda name: READOUTS[name][2] in kinds
        wanted = "filling or comparing (--suffix, or a gap in --prompt)" if gap else "one text without a gap"
    able = [name for name in r.readouts if fits(name)]
    if not able and not c.task and c.suffix is None:                       # --gap means nothing to this model: plain text
        able = [name for name in r.readouts if READOUTS[name][2] == "text"]
    if not able:
        others = [o for o, row in OBJECTIVES.items() if any(fits(name) for name in row.sample)]
        served = dict.fromkeys(task for name in r.readouts for task in READOUTS[name][1])
        raise UserError(f"this {'+'.join(r.names)} model does not serve {wanted}; it serves {', '.join(served)}. Objectives that do: {', '.join(others)}")
    if c.task is None and c.suffix is None and c.gap in c.prompt:          # a gap inside one text, not two texts
        able = sorted(able, key=lambda name: READOUTS[name][2] == "two")
    return READOUTS[able[0]]


def visible(text: str) -> str:
    """Text as a terminal may show it: no control characters but line breaks and tabs, which a young model of bytes writes."""
    return "".join(ch if ch.isprintable() or ch in "\n\t" else "·" for ch in text)


class _Stream:
    """Prints tokens of the first sample as they come, never half a character."""

    def __init__(self, tok: Tokenizer):
        self.tok, self.decoder = tok, codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, row: int, tokens: list[int]) -> None:
        if row == 0:
            print(visible(self.decoder.decode(self.tok.decode_bytes(tokens))), end="", flush=True)


def read_out(r: Reader, c: SampleConfig, quiet: bool = False) -> list[dict]:
    """Samples as dictionaries with `prompt`, `text`, `tokens` and what the read-out adds; printed unless quiet."""
    check_values(c)
    if not c.gap:
        raise UserError("--gap is empty: give the text that stands for a gap")
    heads = r.model.config.n_future - 1
    if c.speculative and not heads:
        causal = all(OBJECTIVES[name].attention == "causal" for name in r.names)
        raise UserError(f"--speculative needs an mtp checkpoint and this one is {'+'.join(r.names)}: train one with python train.py --objective=mtp"
                        + f", or add heads to this one with --objective=mtp --init_from={c.out_dir} --freeze_trunk=True" * causal)
    if c.draft_tokens is not None and not 1 <= c.draft_tokens <= heads:
        able = f"1 to {heads} tokens" if heads else "nothing; train with --objective=mtp"
        raise UserError(f"--draft_tokens={c.draft_tokens}: this model's heads draft {able}")
    readout, *_ = choose(r, c)
    if readout is middle and (n := c.prompt.count(c.gap) + (c.suffix is not None)) != 1:
        able = [o for o, row in OBJECTIVES.items() if {"gaps", "gaps_ul2", "restore"} & set(row.sample)]
        raise UserError(f"this model fills one gap and the texts have {n}: give --prompt and --suffix. Several are filled by {', '.join(able)}")
    if readout is middle and c.suffix is None:
        c = replace(c, **dict(zip(("prompt", "suffix"), c.prompt.split(c.gap))))
    stream = None
    if not quiet and c.num_samples == 1:
        if readout in (continue_, continue_prefix, continue_ul2, middle, restore):
            if readout is not restore:
                print(c.prompt, end="")
            stream = _Stream(r.tok)
        elif readout is unmask and sys.stdout.isatty():
            def stream(row, ids):
                print("\033[H\033[J" + r.tok.decode(ids).replace("[MASK]", "░"), flush=True)
                time.sleep(0.02)
    made = readout(r, c, stream)
    samples = []
    for i, sample in enumerate(made):
        ids = sample.pop("ids")
        samples.append(dict(prompt=c.prompt, **({"suffix": c.suffix} if c.suffix is not None else {}),
                            text=r.tok.decode(ids), tokens=ids, tokens_per_s=sample.pop("tokens_per_s", None), **sample))
        if not quiet and not (stream and "whole" not in sample):
            title = f"--- sample {i + 1}\n" if len(made) > 1 else ""
            print(title + visible(sample.get("whole") or c.prompt + r.tok.decode(ids) + (c.suffix or "")))
        elif not quiet:
            print(c.suffix if readout is middle else "")
    return samples


def details(sample: dict) -> list[str]:
    """A line for the guesses at each gap, or for the tokens most suspected of being replaced."""
    lists = {f"gap {k}": guesses for k, guesses in enumerate(sample.get("guesses", []), 1)}
    if "suspects" in sample:
        lists["most suspect"] = sample["suspects"]
    show = lambda g: f"{g['token']!r} {g['p']:.2f}" + (f" at {g['at']}" if "at" in g else "")
    return [f"{title}: " + "   ".join(map(show, guesses)) for title, guesses in lists.items()]


def main(argv: list[str]) -> None:
    c, given = parse_flags(argv, __doc__, SampleConfig)
    if not c.speculative and (unread := {"draft_tokens", "lookup_tokens"} & set(given)):
        raise UserError(f"--{min(unread)} is read with --speculative only: add it or leave the flag out")
    r = Reader(load_checkpoint(Path(c.out_dir) / "ckpt.pt"), c.device)
    readout, *_, read = choose(r, c)
    read = read - ({"max_new_tokens"} if readout is unmask and c.suffix is None and c.gap in c.prompt else set())  # a gap is one token
    if unread := set().union(*(row[3] for row in READOUTS.values())) - read & set(given):
        first = min(unread)
        able = [o for o, row in OBJECTIVES.items() if any(first in READOUTS[name][3] for name in row.sample)]
        raise UserError(f"--{first} is not read by this model's way to answer; it belongs to {', '.join(able)}: leave it out")
    for s in (samples := read_out(r, c, quiet=c.json)):
        if c.json:
            print(json.dumps(s))
        for line in details(s) if not c.json else ():
            print(line)
    s = samples[0]
    if not c.json and s["tokens_per_s"]:
        line = f"[{len(s['tokens'])} tokens, {s['tokens_per_s']:.0f} tokens/s"
        if "acceptance" in s:
            kept, heads = s["acceptance"], s["heads"]
            line += (f"; plain {s['plain_tokens_per_s']:.0f} tokens/s; {s['tokens_per_pass']:.2f} tokens per pass; kept of the first "
                     f"{heads} drafts " + ", ".join(f"{a:.0%}" for a in kept[:heads])
                     + f", of {len(kept) - heads} looked up after them {sum(kept[heads:]):.1f} a pass" * (len(kept) > heads))
        print(line + "]", file=sys.stderr)


def _hole(text: str) -> tuple[str, str, str]:
    """A piece of code -> what stands before, in and after a hole: the end of a line in its later half."""
    lines = text.splitlines(keepends=True)[1:]                             # the first is seldom whole
    at = next((i for i in range(len(lines) // 2, len(lines)) if len(lines[i].strip()) > 20), len(lines) // 2)
    line = lines[at] if lines else ""
    end = len(line.rstrip())
    cut = max(end - 12, 0)
    return "".join(lines[:at]) + line[:cut], line[cut:end], line[end:] + "".join(lines[at + 1:])


def showcase(out: Path, tokens, say) -> None:
    """After training: one read-out of held-out text, and the command for more."""
    r = Reader(load_checkpoint(out / "ckpt.pt"))
    usual = r.readouts[0]
    kind, T = READOUTS[usual][2], r.block_size
    longest = int((tokens.val.stops - tokens.val.starts).argmax())
    start = (tokens.val.starts[longest] + tokens.val.stops[longest]) // 2
    before, hole, after = _hole(r.tok.decode(tokens.val.tokens[start:min(start + T // 2, tokens.val.stops[longest])]))
    c = SampleConfig(out_dir=str(out), prompt=before, max_new_tokens=T // 4 if kind == "text" else 24, temperature=0.6)
    example = '--prompt="import os"'
    if usual == "fill":
        c.prompt, example = before + c.gap + hole[1:] + after, f'--prompt="import {c.gap}s"'
    elif kind == "two":
        c.prompt, c.suffix, example = before + hole, after, '--prompt="first text" --suffix="second text"'
    elif kind != "text":
        c.suffix, example = after, '--prompt="def add(a, b): return " --suffix=" + b"'
    if usual in ("unmask", "restore"):
        c.max_new_tokens = max(len(r.tok.encode(hole)), 1) if usual == "unmask" else T // 2
    try:
        sample = read_out(r, c, quiet=True)[0]
    except UserError as e:                                                 # rows of a few tokens, texts of one line
        return say(f"Nothing to show from the validation text: {e}\nMore: python sample.py --out_dir={out} {example}")
    rule = "─" * 80
    asked = [c.prompt, "┄" * 80, c.suffix, rule] if kind == "two" else [before + c.gap + after, rule] if usual == "restore" else []
    inside = "whole" not in sample and not asked                           # the model's part stands within the text
    say("On validation text, which it has not seen" + (" (⟪…⟫ is the model's):" if inside else ":"))
    shown = before + "⟪" + sample["text"] + "⟫" + (c.suffix or "") if inside else sample.get("whole") or sample["text"]
    say("\n".join([rule, *asked, visible(shown), *[rule] * (kind != "two")]))
    if c.prompt == before and c.suffix and not asked:
        say(f"the hole's original: {hole!r}; the model's: {sample['text']!r}")
    for line in details(sample):
        say(line + f" (the original: {hole[:1]!r})" * (usual == "fill"))
    say(f"More: python sample.py --out_dir={out} {example}")


if __name__ == "__main__":
    cli(main, "--num_samples or --max_new_tokens")
