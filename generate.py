"""generate.py: decoding: plain with a cache, speculative (draft, verify, accept), and unmasking.

Speculative: something cheap guesses the next tokens (drafts), and one pass of the model reads them
all. Drafts are kept up to the first that differs from what the model draws in its place. Each place
has one uniform random number, which decides the token there, given the text before it. So the text
is the same as in plain decoding, at any temperature (unless a number lies within rounding error of
the boundary between two tokens), and no rejection step (Leviathan et al. 2023) is needed.

Left out: drafting for several texts at once, beam search.

    decoder = Decoder(model, block_size=256, sampler=Sampler(temperature=0.8))
    drafters = [heads_of(decoder), LookUp()]
    [new], stats = decoder.generate(prompt, 100, stops={tok.EOT}, drafters=drafters)

B rows, T positions read in a pass, C channels, V ids, n tokens drawn in a pass.
"""

import functools
import gc
import itertools
import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model import KVCache, Transformer

# Measured on one CPU thread, with an older and larger mtp model.
LONGEST_GRAM = 4  # at most this many of the last tokens are looked up in the text
LOOK_UP_DRAFTS = 4  # tokens drafted from the place where they are found
POSITION_COST = 0.06  # cost of one more position in a pass, in passes of one position
ALLOWANCE = 0.01  # added to a paused drafter's balance in each pass, in passes
MOST_CREDIT = 2.0  # the largest balance, in passes
# On a GPU, chosen without a comparison:
LONGEST_GRAPH = 16  # most positions in a CUDA graph; longer inputs are prompts
CALLS_BEFORE_GRAPH = 8  # of one shape; capturing would not pay off for a short answer


@dataclass
class Sampler:
    """Chooses the next token by one uniform number: inverse CDF, in order of the ids. Two similar
    distributions give the same token for most numbers, so drafts often equal the tokens drawn."""

    temperature: float = 0.0  # 0: the likeliest token; 1: the model's own distribution
    top_k: int = 0  # draw from the k likeliest tokens; 0: all
    top_p: float = 1.0  # draw from the fewest tokens that hold this probability

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    def probs(self, logits: Tensor) -> Tensor:
        """(..., V) logits -> (..., V) probabilities to draw from. If greedy: those at
        temperature 1, by which heads judge their guesses."""
        logits = logits.float()
        if self.greedy:
            return logits.softmax(-1)
        temperature = min(max(self.temperature, 1e-6), 1e6)  # extremes overflow float32
        p = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
        if self.top_k == 0 and self.top_p == 1:
            return p

        falling, order = p.sort(descending=True, stable=True)
        keep = falling.cumsum(-1) - falling < self.top_p  # those before it hold less than top_p
        if self.top_k:
            keep[..., self.top_k :] = False
        p = torch.zeros_like(p).scatter(-1, order, falling * keep)
        return p / p.sum(-1, keepdim=True)

    def choose(self, p: Tensor, u: Tensor) -> Tensor:
        """(..., V) probabilities, (...) numbers -> (...) ids: where cumsum(p) passes u."""
        if self.greedy:
            return p.argmax(-1)
        total = p.to(u.dtype).cumsum(-1)
        passed = (total <= u[..., None]).sum(-1)
        last = (total < total[..., -1:]).sum(-1)  # rounding must not lead past the last possible id
        return torch.minimum(passed, last)

    def __call__(self, logits: Tensor, u: Tensor) -> Tensor:
        """(..., V) logits, (...) uniform numbers -> (...) ids."""
        if self.greedy:
            return logits.argmax(-1)
        return self.choose(self.probs(logits), u)


@dataclass
class Stats:
    """What one generation took."""

    tokens: int = 0  # of all rows
    seconds: float = 0.0
    passes: int = 0  # through the trunk; the first reads the prompt
    drafted: int = 0  # tokens guessed
    kept: int = 0  # of these


def count_kept(drafts: list[int], drawn: list[int]) -> int:
    """How many drafts equal the tokens drawn in their place, up to the first that does not.

    >>> count_kept([5, 6, 7], [5, 6, 9, 1])
    2
    """
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(drafts, drawn))
    return len(list(same))


class Decoder:
    """A model, a KV cache for `batch` samples of one prompt, and a sampler."""

    def __init__(self, model: Transformer, batch=1, block_size=256, sampler=None, allowed=None):
        """`sampler`: greedy by default. `allowed` (V,) bool: the ids that may be drawn."""
        weight = model.embed_tokens.weight
        self.model = model
        self.device = weight.device
        self.batch = batch
        self.block_size = block_size
        self.sampler = sampler or Sampler()
        self.penalty = torch.zeros(len(weight), device=self.device)  # -inf: may not be drawn
        if allowed is not None:
            self.penalty[~allowed.to(self.device)] = -torch.inf

        slots = math.ceil(block_size / 16) * 16  # a mask of such a width needs no copy on CUDA
        self.cache = KVCache(model.config, batch, slots, self.device, weight.dtype)
        # States before the final norm: the trunk's, and those of heads that are blocks.
        shape = (batch, slots, model.config.n_embd)
        n_states = 1 if model.config.mtp_heads == "linear" else model.config.n_future
        self.states = [weight.new_zeros(shape) for _ in range(n_states)]
        fast = captured if self.device.type == "cuda" else lambda function: function
        self.run_pass = fast(self._pass)
        self.run_linear_heads = fast(self._draft_by_linear_heads)
        by_block = [functools.partial(self._draft_by_block, i) for i in range(len(model.future))]
        self.run_block_heads = [fast(run) for run in by_block]

    def logits(self, state: Tensor) -> Tensor:
        """(..., C) before the final norm -> (..., V) float32; -inf: may not be drawn."""
        return self.model.logits(self.model.norm(state)).float() + self.penalty

    def _pass(self, ids: Tensor, positions: Tensor, prefix_length: Tensor, u: Tensor, bias: Tensor):
        """(B, T) ids at (T,) positions -> (B, n) tokens: what follows each of the last n ids,
        decided by u (B, n). The first `prefix_length` slots are read in both directions; `bias`
        (V,) is added to the logits."""
        mask = self.cache.mask(positions, prefix_length)
        x = self.model.trunk(ids, mask, positions, self.cache)
        if self.model.future:
            self.states[0].index_copy_(1, positions, x)
        return self.sampler(self.logits(x[:, -u.shape[1] :]) + bias, u)

    def read(self, ids: list[list[int]], slot: int, n_prefix: int, u: Tensor, bias: Tensor):
        """One pass over the ids of B rows, whose first one goes to `slot` -> what _pass draws, as B
        lists. The first `n_prefix` slots are the prefix."""
        ids = torch.tensor(ids, device=self.device)
        slots = torch.arange(slot, slot + ids.shape[1], device=self.device)
        prefix_length = torch.tensor(n_prefix, device=self.device)
        return self.run_pass(ids, slots, prefix_length, u, bias).tolist()

    def _draft_by_linear_heads(self, position: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """The drafts of all n linear heads, decided by u (n,), and their probabilities: (n,) each.
        The heads read the trunk's state at `position` (1,), the last that the trunk has read."""
        trunk = self.states[0].index_select(1, position)  # (1, 1, C)
        states = torch.cat([head(trunk) for head in self.model.future])  # (n, 1, C)
        return self._guess(states, u)

    def _draft_by_block(self, i: int, tokens: Tensor, positions: Tensor, u: Tensor):
        """The draft of future[i], decided by u (1,), and its probability: (1,) each. The head
        reads the trunk's states at `positions` (T,). In a chain it instead reads the previous
        head's states (the first head: the trunk's) and `tokens` (1, T), which are i + 1 places
        later. The draft's place is one after the last of `tokens`."""
        model = self.model
        trunk = self.states[0].index_select(1, positions)
        previous = self.states[i].index_select(1, positions)
        mask = self.cache.mask(positions)
        rope = self.cache.rope.index_select(1, positions)
        store = functools.partial(self.cache.store, model.config.n_layer + i, positions)
        state = model.future[i](trunk, previous, model.embed_tokens(tokens), mask, rope, store)
        self.states[i + 1].index_copy_(1, positions, state)

        return self._guess(state, u)

    def _guess(self, state: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """States of n heads, (n, T, C), and (n,) numbers -> the token that each head draws at the
        last position, and its probability: (n,) each."""
        p = self.sampler.probs(self.logits(state[:, -1]))
        tokens = self.sampler.choose(p, u)
        return tokens, p.gather(1, tokens[:, None])[:, 0]

    @torch.inference_mode()
    def generate(
        self,
        prompt: list[int],
        max_new_tokens: int,
        stops: Collection[int] = (),
        may_be_empty: bool = True,
        seed: int = 1,
        prefix_length: int = 0,
        drafters=(),
    ) -> tuple[list[list[int]], Stats]:
        """A prompt of at least one token -> the new tokens of each sample, which end before the
        first of `stops`, and the statistics.

        The prompt's first `prefix_length` tokens are read in both directions. When the context is
        full, its first half is dropped and its second half is read again; if there was a prefix,
        all of that is the new one. `drafters` need a batch of 1. Heads come first among them: they
        read the trunk's states, which drafted tokens do not have yet. If not `may_be_empty`, the
        first new token is none of `stops`. Indices are places in the text: place i is in slot
        i - context_start of the cache."""
        assert self.batch == 1 or not drafters, f"drafting takes one sample, got {self.batch}"
        began = time.perf_counter()
        W = self.block_size  # the context's width, in tokens
        numbers = self.numbers_for(max_new_tokens, seed)
        no_bias = torch.zeros_like(self.penalty)
        first_bias = no_bias.clone()
        if not may_be_empty:
            first_bias[list(stops)] = -torch.inf
        stats = Stats()
        new = [[] for _ in range(self.batch)]
        # The cache holds text[context_start:read_to]: nothing at first.
        context_start = read_to = max(0, len(prompt) - W)

        # A row that has met a stop goes on until all rows have; `cut` removes what follows.
        while len(new[0]) < max_new_tokens and any(set(row).isdisjoint(stops) for row in new):
            texts = [prompt + row for row in new]
            length = len(texts[0])
            if length - context_start > W:
                context_start = read_to = length - W // 2
                prefix_length = prefix_length and length  # what is read again is the new prefix

            # Draft, but not in the pass that reads the prompt.
            u = numbers[:, len(new[0]) :]
            drafts = []
            if read_to > context_start:
                for drafter in drafters:
                    drafts += drafter(texts[0], drafts, context_start, u)
            room = min(context_start + W - length, max_new_tokens - len(new[0]) - 1)
            drafts = drafts[:room]

            # One pass over the tokens not read yet, and over the drafts.
            ids = [text[read_to:] + drafts for text in texts]
            u = u[:, : len(drafts) + 1]
            bias = no_bias if new[0] else first_bias
            n_prefix = max(prefix_length - context_start, 0)
            drawn = self.read(ids, read_to - context_start, n_prefix, u, bias)

            # Keep the drafts that equal what was drawn, and the token drawn after them.
            kept = count_kept(drafts, drawn[0])
            for row, tokens in zip(new, drawn):
                row += tokens[: kept + 1]
            read_to = length + kept
            stats.passes += 1
            stats.drafted += len(drafts)
            stats.kept += kept

        new = [cut(row, stops) for row in new]
        stats.tokens = sum(map(len, new))
        stats.seconds = time.perf_counter() - began
        return new, stats

    def numbers_for(self, n: int, seed: int) -> Tensor:
        """(B, n + heads): the numbers that decide all tokens. With a larger n, the text begins as
        with a smaller n."""
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        n += len(self.model.future)  # heads look ahead of the last token
        return uniform(generators(self.batch, seed), n, dtype).to(self.device)


def generators(batch: int, seed: int) -> list[torch.Generator]:
    """One for each sample: the first is seeded with `seed`, the next with seed + 1, ..."""
    return [torch.Generator().manual_seed(seed + sample) for sample in range(batch)]


def uniform(dice: list[torch.Generator], n: int, dtype=torch.float32) -> Tensor:
    """(B, n) numbers in [0, 1), a row from each generator."""
    return torch.stack([torch.rand(n, generator=each, dtype=dtype) for each in dice])


def cut(tokens: list[int], stops: Collection[int]) -> list[int]:
    """The tokens before the first one of `stops`."""
    return list(itertools.takewhile(lambda token: token not in stops, tokens))


# ---- drafters ----------------------------------------------------------------------------------


class Drafter:
    """Drafts what follows a text, with `guess`, as long as that pays. Make one for each generation.

    Its balance, in passes, rises by one for each draft that is kept and falls by the cost of
    drafting. While the balance is below zero, the drafter pauses and each pass adds ALLOWANCE. So a
    drafter that never helps costs MOST_CREDIT passes plus the allowances."""

    cost_of_asking = 0.0  # in passes
    cost = POSITION_COST  # of each draft, in passes

    def __init__(self):
        self.balance = MOST_CREDIT
        self.last_drafts = []
        self.drafts_start = 0  # where the first of them would stand in the text

    def __call__(self, text: list[int], drafts: list[int], start: int, u: Tensor) -> list[int]:
        """More drafts for a text, after those that other drafters made. The text's context begins
        at `start`; the numbers u (1, n) will decide what follows the text."""
        kept = count_kept(self.last_drafts, text[self.drafts_start :])
        self.balance = min(self.balance + kept, MOST_CREDIT)
        if self.balance < 0:
            self.balance += ALLOWANCE
        new = []
        if self.balance >= 0:
            new = self.guess(text, drafts, start, u)
            self.balance -= self.cost_of_asking + self.cost * len(new)
        self.last_drafts = new
        self.drafts_start = len(text) + len(drafts)
        return new


class LookUp(Drafter):
    """Finds the last tokens (four, else three, two, one) earlier in the context, and drafts what
    followed them there. It takes the latest of several places (Saxena 2023: the first that all
    drafts follow)."""

    def guess(self, text: list[int], drafts: list[int], start: int, u: Tensor) -> list[int]:
        context = "".join(map(chr, text[start:]))  # strings have a fast search
        tail = context[-LONGEST_GRAM:] + "".join(map(chr, drafts))
        for n in range(LONGEST_GRAM, 0, -1):
            found = context.rfind(tail[-n:], 0, len(context) - 1)
            if found >= 0:
                # If fewer tokens follow than are drafted, they are repeated, as in "abab".
                place = start + found + n
                following = text[place : place + LOOK_UP_DRAFTS] + drafts
                return (following * LOOK_UP_DRAFTS)[:LOOK_UP_DRAFTS]
        return []


class LinearHeads(Drafter):
    """Linear extra heads of an mtp model: one call asks all of them.

        text a b c d, of which the trunk has read a b c:
        at c  future[0] guesses e, future[1] guesses f, ...

    A guess becomes a draft if it and all guesses before it are likely enough to be right that
    reading one more position pays."""

    def __init__(self, decoder: Decoder):
        super().__init__()
        self.decoder = decoder
        self.cost_of_asking = cost_in_passes(decoder.model, decoder.model.future)
        self.least_probability = self.cost

    def guess(self, text: list[int], drafts: list[int], start: int, u: Tensor) -> list[int]:
        newest_read = torch.tensor([len(text) - 2 - start], device=u.device)
        n_heads = len(self.decoder.model.future)
        guesses, probabilities = self.decoder.run_linear_heads(newest_read, u[0, :n_heads])
        # Of each guess and all before it. This never rises, so those that pay come first.
        all_so_far = itertools.accumulate(probabilities.tolist(), operator.mul)
        n_likely = sum(p >= self.least_probability for p in all_so_far)
        return guesses.tolist()[:n_likely]


class BlockHeads(Drafter):
    """Extra heads of an mtp model that are blocks, each with its own cache. They are asked one by
    one, as long as all guesses so far are likely enough to be right that one more head pays.

        text a b c d, of which the trunk has read a b c:
        at c  future[0] reads d and guesses e, future[1] reads e and guesses f, ...  (a chain)
        at c  future[0] guesses e, future[1] guesses f, ...                          (parallel)

    Head i of a chain has read i guesses. When it is asked again, it makes those i cache entries
    again, because a guess may have been wrong."""

    def __init__(self, decoder: Decoder):
        super().__init__()
        self.decoder = decoder
        self.start = None  # where the cached context begins in the text
        self.final_to = []  # for each head: its cache entries before this position are final
        model = decoder.model
        self.is_chain = model.config.mtp_heads == "chain"
        self.cost = cost_in_passes(model, model.future[0]) + POSITION_COST
        self.least_probability = self.cost

    def guess(self, text: list[int], drafts: list[int], start: int, u: Tensor) -> list[int]:
        if start != self.start:  # the context has moved: all positions are new
            self.start = start
            self.final_to = [0] * len(self.decoder.run_block_heads)

        context = text[start:]
        guesses = []
        all_so_far = 1.0
        for i in range(len(self.final_to)):
            guess, probability = self.ask(i, context, guesses, u[0, i : i + 1])
            guesses.append(guess.item())
            all_so_far *= probability.item()
            if all_so_far < self.least_probability:
                break
        return guesses

    def ask(self, i: int, context: list[int], guesses: list[int], u: Tensor):
        """Head i's guess and its probability. The head first makes its cache entries that are not
        final: entry p of a chain also reads the token at p + i + 1, which may be a guess."""
        first = self.final_to[i]
        newest = len(context) - 1  # position of the last token, which the trunk is yet to read
        positions = torch.arange(first, newest, device=u.device)
        tokens = torch.tensor([[*context, *guesses][first + i + 1 :]], device=u.device)
        n_from_guesses = i if self.is_chain else 0  # the last entries
        self.final_to[i] = max(newest - n_from_guesses, 0)
        return self.decoder.run_block_heads[i](tokens, positions, u)


def heads_of(decoder: Decoder) -> Drafter:
    """The drafter that asks the heads of an mtp model."""
    is_linear = decoder.model.config.mtp_heads == "linear"
    return LinearHeads(decoder) if is_linear else BlockHeads(decoder)


def cost_in_passes(model: Transformer, heads: nn.Module) -> float:
    """The cost of asking `heads`, in passes of the trunk: the number of weights that they read,
    divided by the number that a pass reads."""

    def n_read(module: nn.Module) -> int:
        return model.unembedding.numel() + sum(p.numel() for p in module.parameters())

    return n_read(heads) / n_read(model.layers)


# ---- masked diffusion --------------------------------------------------------------------------


@torch.inference_mode()
def unmask(
    model: Transformer,
    ids: Tensor,
    mask_id: int,
    allowed: Tensor,
    sampler: Sampler,
    steps: int = 32,
    order: str = "confidence",
    seed: int = 1,
) -> Tensor:
    """(B, T) ids, masked at the same positions in all rows -> the ids with each mask replaced.

    Each of the `steps` draws a token for every masked position, and fills 1/steps of the positions
    that were masked at the start: those where the model is surest (LLaDA's low-confidence
    remasking), or random ones with order="random"."""
    mask = model.full_mask(ids)
    banned = ~allowed.to(ids.device)
    B, T = ids.shape
    dice = generators(B, seed)
    n_masked = int((ids[0] == mask_id).sum())
    steps = min(steps, n_masked)
    for step in range(steps):
        logits = model.logits(model(ids, mask)[0]).float()
        logits = logits.masked_fill(banned, -torch.inf)
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


# ---- speed --------------------------------------------------------------------------------------


def captured(function: Callable) -> Callable:
    """Run a function of tensors as a CUDA graph, so that no kernel waits for Python. The first
    calls of a shape run the function itself; then a graph is captured, which later calls replay."""
    graphs = {}
    calls = Counter()

    def call(*inputs: Tensor):
        shapes = tuple(x.shape for x in inputs)
        calls[shapes] += 1
        if calls[shapes] <= CALLS_BEFORE_GRAPH or inputs[0].shape[-1] > LONGEST_GRAPH:
            return function(*inputs)
        if shapes not in graphs:
            own = tuple(x.clone() for x in inputs)  # each replay copies its inputs there
            was_collecting = gc.isenabled()
            gc.disable()  # freeing an older graph meanwhile would end the capture
            try:
                with torch.cuda.device_of(own[0]):
                    graphs[shapes] = torch.cuda.make_graphed_callables(function, own)
            finally:
                if was_collecting:
                    gc.enable()
        return graphs[shapes](*inputs)

    return call
