"""generate.py: decoding: plain with a cache, speculative (draft, verify, keep), and unmasking.

In speculative decoding something cheap guesses the next tokens, the drafts, and one pass of the
model reads them all. They are kept up to the first that differs from what the model draws there.
One uniform random number for each place decides its token, so drafting changes no token, at any
temperature, unless a number lies within rounding error of the boundary between two tokens.

    decoder = Decoder(model, block_size=256, sampler=Sampler(temperature=0.8))
    drafters = [decoder.heads, look_up]
    [new], stats = decoder.generate(prompt, 100, stops={tok.EOT}, drafters=drafters)

Differs: Leviathan et al. 2023 keep a draft by chance, with the ratio of two probabilities.
Left out: drafting for several texts at once, beam search.

B rows, T positions read in a pass, C channels, V ids, n tokens drawn in a pass.
"""

import functools
import gc
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from model import KVCache, Transformer

# Measured on one CPU thread, with models of four blocks.
LONGEST_GRAM = 4  # at most this many of the last tokens are looked up in the text
LOOK_UP_DRAFTS = 4  # tokens drafted from the place where they are found
DRAFT_COST = 0.07  # of making and reading a draft of look-up or of linear heads, in passes
BLOCK_COST = 0.4  # of a draft by a block; one more pays if likelier to be right than this
TRIAL_EVERY = 16  # passes: then the drafter that has gained least is tried
# On a GPU, chosen without a comparison:
LONGEST_GRAPH = 16  # most positions in a CUDA graph; longer inputs are prompts
CALLS_BEFORE_GRAPH = 8  # of one shape; capturing would not pay off for a short answer


@dataclass
class Sampler:
    """Chooses the next token by one uniform number: the inverse CDF, in order of the ids."""

    temperature: float = 0.0  # 0: the likeliest token; 1: the model's own distribution
    top_k: int = 0  # draw from the k likeliest tokens; 0: all
    top_p: float = 1.0  # draw from the fewest tokens that hold this probability

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    def probs(self, logits: Tensor) -> Tensor:
        """(..., V) logits -> (..., V) probabilities to draw from; if greedy, the model's own."""
        p = (logits.float() / (1.0 if self.greedy else self.temperature)).softmax(-1)
        if self.greedy or (self.top_k == 0 and self.top_p == 1):
            return p

        falling, order = p.sort(descending=True, stable=True)
        if self.top_k:
            falling[..., self.top_k :] = 0
        before = falling.cumsum(-1) - falling
        keep = before < self.top_p * falling.sum(-1, keepdim=True)  # of what top_k has left
        p = torch.zeros_like(p).scatter(-1, order, falling * keep)
        return p / p.sum(-1, keepdim=True)

    def choose(self, p: Tensor, u: Tensor) -> Tensor:
        """(..., V) probabilities, (...) numbers -> (...) ids: where cumsum(p) passes u."""
        if self.greedy:
            return p.argmax(-1)
        total = p.cumsum(-1)
        passed = (total <= u[..., None]).sum(-1)
        last = (total < total[..., -1:]).sum(-1)  # rounding must not lead past the last possible id
        return torch.minimum(passed, last)

    def __call__(self, logits: Tensor, u: Tensor) -> Tensor:
        """(..., V) logits, (...) uniform numbers -> (...) ids."""
        return logits.argmax(-1) if self.greedy else self.choose(self.probs(logits), u)


@dataclass
class Stats:
    """What one generation took."""

    tokens: int = 0  # of all rows
    seconds: float = 0.0
    passes: int = 0  # through the trunk; the first reads the prompt
    drafted: int = 0  # tokens guessed
    kept: int = 0  # of these


class Decoder:
    """A model, a sampler, and a KV cache for `batch` samples of one prompt. The cache holds
    text[start:read_to]; place i of the text is in slot i - start.

    `sampler`: greedy by default. `allowed`, (V,) bool: the ids that may be drawn."""

    def __init__(self, model: Transformer, batch=1, block_size=256, sampler=None, allowed=None):
        self.model = model
        self.batch = batch
        self.block_size = block_size
        self.sampler = sampler or Sampler()
        weight = model.embed_tokens.weight
        self.device = weight.device
        self.penalty = torch.zeros(len(weight), device=self.device)  # -inf: may not be drawn
        if allowed is not None:
            self.penalty[~allowed.to(self.device)] = -torch.inf

        slots = math.ceil(block_size / 16) * 16  # a mask of such a width needs no copy on CUDA
        self.cache = KVCache(model.config, batch, slots, self.device, weight.dtype)
        # States before the final norm: the trunk's, and those of heads that are blocks.
        shape = (batch, slots, model.config.n_embd)
        self.states = [weight.new_zeros(shape) for _ in range(model.config.n_future)]

        ask_heads = [functools.partial(self._ask_block, i) for i in range(len(model.future))]
        self.cost = {look_up: DRAFT_COST, self.heads: BLOCK_COST}  # of a draft; if empty, no pauses
        if model.config.mtp_heads == "linear":
            ask_heads = [self._ask_linear_heads]
            self.cost[self.heads] = DRAFT_COST
        fast = captured if self.device.type == "cuda" else lambda function: function
        self.run_pass = fast(self._pass)
        self.run_heads = [fast(function) for function in ask_heads]

    @torch.inference_mode()
    def generate(
        self,
        prompt: list[int],
        max_new_tokens: int,
        stops: Collection[int] = (),
        first: Tensor | None = None,
        seed: int = 1,
        prefix_length: int = 0,
        drafters=(),
    ) -> tuple[list[list[int]], Stats]:
        """A prompt of at least one token -> the new tokens of each sample, which end before the
        first of `stops`, and the statistics. `first`, (V,) bool: the ids that may come first.

        The prompt's first `prefix_length` tokens are read in both directions. `drafters` need a
        batch of 1. Each is a function of the context and of the numbers that will decide what
        follows it."""
        assert self.batch == 1 or not drafters, f"drafting takes one sample, got {self.batch}"
        began = time.perf_counter()
        self.start = self.read_to = max(0, len(prompt) - self.block_size)
        self.prefix_length = prefix_length
        self.heads_read = Counter()  # (start, head): its cache is right up to this slot
        self.stats = Stats()
        penalty = self.penalty.clone()
        if first is not None:
            penalty[~first.to(self.device)] = -torch.inf

        new = [[] for _ in range(self.batch)]
        if max_new_tokens > 0:
            u = self.numbers_for(max_new_tokens, seed)
            new = self._read([prompt] * self.batch, u[:, :1], penalty)
            if drafters:
                self._speculate(prompt, new[0], u, max_new_tokens, stops, drafters)
            else:
                self._go_on(prompt, new, u, max_new_tokens, stops)
        new = [cut(row, stops) for row in new]
        self.stats.tokens = sum(map(len, new))
        self.stats.seconds = time.perf_counter() - began
        return new, self.stats

    def _go_on(self, prompt, new, u, max_new_tokens, stops) -> None:
        """Plain decoding: append one token a pass to each row of `new`. A row that has met a stop
        goes on until all rows have."""
        while len(new[0]) < max_new_tokens and any(set(row).isdisjoint(stops) for row in new):
            n = len(new[0])
            self._slide(len(prompt) + n)
            drawn = self._read([prompt + row for row in new], u[:, n : n + 1], self.penalty)
            for row, tokens in zip(new, drawn):
                row += tokens

    def _speculate(self, prompt, new, u, max_new_tokens, stops, drafters) -> None:
        """Speculative decoding: append to `new` the drafts that equal the tokens drawn in their
        place, and the token drawn after them.

        One drafter drafts in a pass: the one that has gained most lately, by drafts that were kept
        less the cost of all its drafts. If even that has lost, none drafts, but for trials."""
        gain = dict.fromkeys(drafters, 0.2)  # in a pass, an exponential mean: a hope at first
        while len(new) < max_new_tokens and set(new).isdisjoint(stops):
            text = prompt + new
            n = len(new)
            self._slide(len(text))
            is_trial = self.stats.passes % TRIAL_EVERY == 0
            choose = min if is_trial else max
            drafter = choose(drafters, key=gain.get)
            pays = is_trial or gain[drafter] >= 0
            drafts = []
            if pays and self.read_to > self.start:  # else the trunk has no state to draft from
                room = min(self.start + self.block_size - len(text), max_new_tokens - n - 1)
                drafts = drafter(text[self.start :], u[0, n:])[:room]

            [drawn] = self._read([text + drafts], u[:, n : n + len(drafts) + 1], self.penalty)
            kept = count_kept(drafts, drawn)
            if drafts:
                latest = kept - len(drafts) * self.cost.get(drafter, 0)
                gain[drafter] += 0.1 * (latest - gain[drafter])
            new += drawn[: kept + 1]
            self.read_to = len(text) + kept
            self.stats.drafted += len(drafts)
            self.stats.kept += kept

    def _slide(self, length: int) -> None:
        """If a text of this length does not fit into the context, drop the context's first half and
        read its second half again; if there was a prefix, all of that is the new one."""
        if length - self.start > self.block_size:
            self.start = self.read_to = length - self.block_size // 2
            self.prefix_length = self.prefix_length and length

    def _read(self, texts: list[list[int]], u: Tensor, penalty: Tensor) -> list[list[int]]:
        """One pass over what was not read yet of B texts -> what _pass draws, as B lists."""
        ids = torch.tensor([text[self.read_to :] for text in texts], device=self.device)
        first = self.read_to - self.start
        slots = torch.arange(first, first + ids.shape[1], device=self.device)
        n_prefix = torch.tensor(self.prefix_length - self.start, device=self.device)
        self.read_to = len(texts[0])
        self.stats.passes += 1
        return self.run_pass(ids, slots, n_prefix, u, penalty).tolist()

    def heads(self, context: list[int], u: Tensor) -> list[int]:
        """Drafts by the extra heads of an mtp model. Linear ones are all asked in one call; those
        that are blocks one by one, as long as all guesses so far are likely to be right.

            text a b c d, of which the trunk has read a b c:
            at c  future[0] guesses e, future[1] guesses f, ...               (linear and parallel)
            at c  future[0] reads d and guesses e, future[1] reads e and guesses f, ...   (a chain)

        Blocks have caches. Head i of a chain has read i guesses, which may have been wrong: when it
        is asked again, it makes those i cache entries again."""
        known = list(context)
        newest = len(known) - 1  # slot of the last token, which the trunk has not read
        likely = 1.0  # the probability of all guesses so far
        for i, call in enumerate(self.run_heads):
            if likely < BLOCK_COST:
                break
            first = self.heads_read[self.start, i]
            slots = torch.arange(first, newest, device=self.device)
            tokens = torch.tensor([known[first + i + 1 :]], device=self.device)
            guesses, p = call(tokens, slots, u[: len(self.model.future)])
            self.heads_read[self.start, i] = max(newest - i, 0)
            known += guesses.tolist()
            likely *= p.item()
        return known[newest + 1 :]

    def numbers_for(self, n: int, seed: int) -> Tensor:
        """(B, n + heads): the numbers that decide n tokens, and the guesses of heads after them."""
        u = uniform(generators(self.batch, seed), n + len(self.model.future), torch.float64)
        return u.to(self.device, torch.float32)

    # The rest takes and returns only tensors, as CUDA graphs do.

    def _pass(self, ids: Tensor, slots: Tensor, n_prefix: Tensor, u: Tensor, penalty: Tensor):
        """(B, T) ids in (T,) slots -> (B, n) tokens: what follows each of the last n ids, decided
        by u (B, n). The first `n_prefix` slots are read in both directions."""
        mask = self.cache.mask(slots, n_prefix)
        x = self.model.trunk(ids, mask, slots, self.cache)
        if self.model.future:
            self.states[0].index_copy_(1, slots, x)
        logits = self.model.logits(self.model.norm(x[:, -u.shape[1] :]))
        return self.sampler(logits.float() + penalty, u)

    def _ask_linear_heads(self, tokens: Tensor, slots: Tensor, u: Tensor):
        """The guesses of all n heads, decided by u (n,), and the probability of all together. The
        heads read the trunk's state in the last of (T,) slots, and no `tokens`."""
        trunk = self.states[0].index_select(1, slots[-1:])  # (1, 1, C)
        return self._guess(torch.cat([head(trunk) for head in self.model.future]), u)

    def _ask_block(self, i: int, tokens: Tensor, slots: Tensor, u: Tensor):
        """The guess of future[i], decided by u[i], and its probability. The head reads the trunk's
        states in (T,) slots; in a chain, the previous head's states and `tokens` (1, T), which are
        i + 1 places later."""
        model = self.model
        trunk = self.states[0].index_select(1, slots)
        previous = self.states[i].index_select(1, slots)
        mask = self.cache.mask(slots)
        rope = self.cache.rope.index_select(1, slots)
        store = functools.partial(self.cache.store, model.config.n_layer + i, slots)
        state = model.future[i](trunk, previous, model.embed_tokens(tokens), mask, rope, store)
        self.states[i + 1].index_copy_(1, slots, state)
        return self._guess(state, u[i : i + 1])

    def _guess(self, state: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """States of n heads, (n, T, C), and (n,) numbers -> the n tokens that the heads draw at
        the last position, and the product of their probabilities."""
        logits = self.model.logits(self.model.norm(state[:, -1]))
        p = self.sampler.probs(logits.float() + self.penalty)
        tokens = self.sampler.choose(p, u)
        return tokens, p.gather(1, tokens[:, None]).prod()


def generators(batch: int, seed: int) -> list[torch.Generator]:
    """One for each sample: the first is seeded with `seed`, the next with seed + 1, ..."""
    return [torch.Generator().manual_seed(seed + sample) for sample in range(batch)]


def uniform(dice: list[torch.Generator], n: int, dtype=torch.float32) -> Tensor:
    """(B, n) numbers in [0, 1), a row from each generator."""
    return torch.stack([torch.rand(n, generator=each, dtype=dtype) for each in dice])


def cut(tokens: list[int], stops: Collection[int]) -> list[int]:
    """The tokens before the first one of `stops`."""
    return list(itertools.takewhile(lambda token: token not in stops, tokens))


def count_kept(drafts: list[int], drawn: list[int]) -> int:
    """How many drafts equal the tokens drawn in their place, up to the first that does not.

    >>> count_kept([5, 6, 7], [5, 6, 9, 1])
    2
    """
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(drafts, drawn))
    return len(list(same))


def look_up(context: list[int], u: Tensor | None = None) -> list[int]:
    """Drafts by finding the last tokens (four, else three, two, one) earlier in the context: what
    followed them there. (Prompt lookup decoding, Saxena 2023.)

    >>> look_up([5, 6, 7, 8, 9, 5, 6])
    [7, 8, 9, 5]

    Differs: of several places, Saxena takes the first that all drafts follow; here, the latest."""
    text = "".join(map(chr, context))  # strings have a fast search
    for n in range(LONGEST_GRAM, 0, -1):
        found = text.rfind(text[-n:], 0, len(text) - 1)
        if found >= 0:
            # If fewer tokens follow than are drafted, they are repeated, as in "abab".
            following = context[found + n :]
            return (following * LOOK_UP_DRAFTS)[:LOOK_UP_DRAFTS]
    return []


# ---- masked diffusion --------------------------------------------------------------------------


@torch.inference_mode()
def unmask(
    read: Callable,
    ids: Tensor,
    mask_id: int,
    sampler: Sampler,
    dice: list[torch.Generator],
    steps: int,
    order: str,
) -> Tensor:
    """Masked diffusion (LLaDA, Nie et al. 2025): (B, T) ids, masked at the same positions in all
    rows -> the ids with each mask replaced. Each step draws a token for every masked position from
    the logits, `read`(ids) -> (B, T, V), and keeps 1/steps of all: where the model is surest, or
    anywhere with order="random".

    Differs: LLaDA's code gives the remainder of the division to the first steps, draws by Gumbel
    noise, and writes from left to right in blocks with the same, fully bidirectional model."""
    T = ids.shape[1]
    n_masked = int((ids[0] == mask_id).sum())
    steps = min(steps, n_masked)
    for step in range(steps):
        logits = read(ids)
        guess = sampler(logits, uniform(dice, T).to(ids.device))
        if order == "random":
            confidence = uniform(dice, T).to(ids.device)
        else:
            confidence = logits.softmax(-1).gather(-1, guess[..., None])[..., 0]
        confidence = confidence.masked_fill(ids != mask_id, -1.0)
        n = n_masked * (step + 1) // steps - n_masked * step // steps
        surest = confidence.topk(n).indices  # (B, n)
        ids = ids.scatter(1, surest, guess.gather(1, surest))
    return ids


@torch.inference_mode()
def write_blocks(
    decoder: Decoder, prompt: list[int], n: int, size: int, mask_id: int, stops, seed: int, **how
) -> list[list[int]]:
    """Block diffusion (BD3-LM, Arriola et al. 2025): the new tokens of each sample, at most n, up
    to the first of `stops`. Blocks of `size` tokens are unmasked one after another (`how`: steps
    and order), the first from what the prompt leaves of it. Then a block is read once more, as
    clean text. Since clean text sees no later block, the cache is exact.

        prompt abcde, size 4: reads abcd, unmasks e###, reads the result, unmasks ####, ...

    Differs: the paper's code unmasks at random times, not the surest first; it reads a prompt in
    whole blocks only, and stops where entropy falls."""
    model, cache = decoder.model, decoder.cache
    dice = generators(decoder.batch, seed)
    text = torch.tensor([prompt] * decoder.batch, dtype=torch.long, device=decoder.device)

    def read(ids: Tensor, both_ways: bool) -> Tensor:
        first, stop = read_to - start, read_to - start + ids.shape[1]
        slots = torch.arange(first, stop, device=decoder.device)
        mask = cache.mask(slots, stop if both_ways else 0, first)
        return model.trunk(ids, mask, slots, cache)

    def read_block(ids: Tensor) -> Tensor:
        return model.logits(model.norm(read(ids, True))).float() + decoder.penalty

    start = read_to = 0  # the cache holds text[start:read_to]
    new = text[:, :0]
    while new.shape[1] < n and any(set(row).isdisjoint(stops) for row in new.tolist()):
        at = text.shape[1] // size * size
        if at + size - start > decoder.block_size:  # drop the first half of the context
            start = read_to = max(at - decoder.block_size // 2 // size * size, 0)
        if read_to < at:
            read(text[:, read_to:at], both_ways=False)
            read_to = at
        masks = text.new_full((decoder.batch, at + size - text.shape[1]), mask_id)
        block = torch.cat([text[:, at:], masks], dim=1)
        block = unmask(read_block, block, mask_id, decoder.sampler, dice, **how)
        text = torch.cat([text[:, :at], block], dim=1)
        new = text[:, len(prompt) :]
    return [cut(row[:n], stops) for row in new.tolist()]


# ---- speed --------------------------------------------------------------------------------------


def captured(function: Callable) -> Callable:
    """A function of tensors that runs as a CUDA graph, so that no kernel waits for Python, once its
    inputs have often had the same shapes."""
    graphs = {}
    calls = Counter()

    def call(*inputs: Tensor):
        shapes = tuple(x.shape for x in inputs)
        calls[shapes] += 1
        if calls[shapes] <= CALLS_BEFORE_GRAPH or inputs[0].shape[-1] > LONGEST_GRAPH:
            return function(*inputs)
        if shapes not in graphs:
            own = tuple(x.clone() for x in inputs)  # each replay copies its inputs there
            gc.disable()  # freeing an older graph meanwhile would end the capture
            with torch.cuda.device_of(own[0]):
                graphs[shapes] = torch.cuda.make_graphed_callables(function, own)
            gc.enable()
        return graphs[shapes](*inputs)

    return call
