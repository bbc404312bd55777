"""model.py: one transformer for every objective: embedding, blocks, one attention rule, heads,
cache.

The layout and the parameter names (without their prefix `model.`) are Qwen3's (arXiv 2505.09388):
RMSNorm, QK-norm, rotary positions, SwiGLU, grouped-query heads, no biases. Two arrays of the row,
`segment` and `group`, decide which position sees which, and `place` says where each token stands in
its text; the objective's name decides nothing. Left out: dropout, mixture of experts, the training
loop. This file needs nothing but PyTorch: copy it alone if you like.

    B rows, T positions, C channels (n_embd), H query heads, H_kv key and value heads, D channels
    per head, V ids, S cache slots, N positions with a target. Horizon k is the task of predicting
    the token k places ahead: every model has horizon 1, multi-token prediction (mtp) has more. The
    trunk is the embedding and the blocks; heads are what only some objectives add to it (lm_head
    is not one).

    >>> model = Transformer(ModelConfig(vocab_size=576, n_layer=2, n_head=2, n_embd=64))
    >>> [state] = model(torch.zeros(1, 8, dtype=torch.long))
    >>> model.logits(state).shape
    torch.Size([1, 8, 576])

Differs:
- from Qwen3: a short convolution over the embeddings, and attention values that also read the
  embeddings. Both make copying easier to learn; short_conv=False and value_embed=False turn them
  off, and then the model computes what Qwen3 does.
- from Qwen3: rope_theta is 1e4; there it is 1e6.
"""

import functools
import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

FEW_QUERIES = 16  # with so few, PyTorch's kernels for a masked row are slow on a GPU
SHORT_ROW = 512  # longest row with attention by its formula (CPU, bfloat16): memory grows with T²
LOGITS_AT_ONCE = 1 << 27  # a loss with more of them makes them in chunks, to save memory


def setting(default, help: str, **interval):
    """A field that is also a flag. Repeats util.flag so that this file can be copied alone."""
    return field(default=default, metadata={"help": help, **interval})


@dataclass
class ModelConfig:
    """shape of the transformer"""

    n_layer: int = setting(4, "transformer blocks", min=1)
    n_head: int = setting(4, "query heads per block", min=1)
    n_kv_head: int | None = setting(None, "key and value heads; automatic: n_head", min=1)
    n_embd: int = setting(128, "channels of the residual stream", min=1)
    tied: bool = setting(False, "unembed with the embedding matrix")
    short_conv: bool = setting(True, "add to each embedding a learned share of its two neighbors")
    value_embed: bool = setting(True, "attention's values also read the embeddings")
    rope_theta: float = setting(10000.0, "rotary base", min=1)

    # Not flags.
    head_dim: int | None = None  # channels per head, an even number; None: n_embd // n_head
    d_ff: int | None = None  # channels in the SwiGLU; None: 8/3 n_embd, rounded up to 64s
    norm_eps: float = 1e-6  # epsilon of RMSNorm
    qk_norm: bool = True  # queries and keys are normed; Llama's are not

    # Set by the tokenizer and the objective (`with_heads`).
    vocab_size: int = 576
    n_future: int = 1  # tokens predicted at each position; 1 is the ordinary model
    mtp_heads: str = "linear"  # kind of the heads beyond the first: linear, parallel or chain
    pair_head: bool = False  # one logit for each row, read from its first position
    separator: int = 0  # id of [SEP], which ends each text of a pair
    detect_head: bool = False  # one logit for each position
    generator_frac: float = 0.0  # width of a second model, as a share of n_embd; 0: none

    def __post_init__(self):
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        if self.head_dim is None:
            self.head_dim = self.n_embd // self.n_head
        if self.d_ff is None:
            self.d_ff = math.ceil(8 * self.n_embd / 3 / 64) * 64


# ---- attention: one rule -----------------------------------------------------------------------


def may_attend(q, k, segment_q, segment_k, group_q, group_k):
    """The rule: query position q sees key position k iff both belong to the same segment, and
    either k is not later than q and not private, or both are in the same group. Group 0 is none: it
    is read from left to right. A negative group is private: nobody else sees it.

    The arguments are integers, Booleans or tensors; they broadcast. Training, decoding, view.py and
    the short convolution (a position's vector holds a share of the neighbors that it may see) all
    use this function: a change here changes all of them.
    """
    together = (group_q == group_k) & (group_q != 0)
    return (segment_q == segment_k) & ((k <= q) & (group_k >= 0) | together)


def dense_mask(segment: Tensor, group: Tensor) -> Tensor:
    """The rule for whole rows: (B, T), (B, T) -> (B, 1, T, T) bool, query down, key across."""
    position = torch.arange(segment.shape[1], device=segment.device)
    segments = segment[:, None, :, None], segment[:, None, None, :]
    groups = group[:, None, :, None], group[:, None, None, :]
    return may_attend(position[:, None], position, *segments, *groups)


@functools.lru_cache
def rule_is_plain(kind: str, T: int, rule) -> bool:
    """Whether `rule` is plain `kind` attention, "causal" or "full", in a row of one segment. If
    someone edits may_attend, this keeps the fast kernels from disagreeing with it."""
    full = int(kind == "full")
    q = torch.linspace(0, T - 1, min(T, 1024)).round().long()[:, None]  # all T² pairs take long
    k = torch.arange(T)
    return torch.equal(rule(q, k, 1, 1, full, full), (k <= q) | bool(full))


def attend(q: Tensor, k: Tensor, v: Tensor, mask) -> Tensor:
    """Attention: (B, H, T, D), (B, H_kv, S, D) twice -> (B, H, T, D). `mask` is "causal", "full" or
    a bool tensor (B or 1, 1, T, S), from Transformer.attention_mask or KVCache.mask."""
    assert torch.is_tensor(mask) or mask in ("causal", "full"), f"causal or full, got {mask}"
    allowed = mask if torch.is_tensor(mask) else None
    causal = allowed is None and mask == "causal"
    dtype = v.dtype  # under autocast q and k are in float32, the norms' dtype
    slow_kernel = v.device.type == "cpu" and dtype == torch.bfloat16
    if slow_kernel and k.shape[2] <= SHORT_ROW:
        return attend_in_blocks(q, k, v, allowed, causal)
    q, k, v = (x.to(torch.float32 if slow_kernel else dtype) for x in (q, k, v))
    if v.is_cuda and allowed is not None and q.shape[2] <= FEW_QUERIES:
        return attend_by_formula(q, k, v, allowed)
    if v.device.type == "mps":  # torch 2.10 and 2.11 misread views there (PyTorch issue 181133)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        allowed = None if allowed is None else allowed.repeat(1, q.shape[1], 1, 1)
    with torch.autocast(v.device.type, enabled=False):  # it would cast back to bfloat16
        grouped = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, allowed, is_causal=causal, enable_gqa=grouped)
    return y.to(dtype)


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, allowed, causal: bool) -> Tensor:
    """`attend` by the formula, for bfloat16 on a CPU: half of the time of PyTorch's kernel in
    float32. `allowed` is the bool mask, or None. Causal queries come in up to four blocks, each
    without the keys after its last query. A mask that is added costs nothing in the backward pass.
    """
    T = q.shape[2]
    if allowed is None:
        at = torch.arange(T, device=q.device)
        allowed = (at <= at[:, None])[None, None] | (not causal)
    # (B or 1, 1, T, S); because this is in float32, so is the softmax.
    bias = torch.where(allowed, 0.0, -torch.inf)
    size = max(64, math.ceil(T / 4)) if causal else T
    blocks = []
    for start in range(0, T, size):
        stop = min(start + size, T)
        seen = stop if causal else k.shape[2]
        block = q[:, :, start:stop], k[:, :, :seen], v[:, :, :seen]
        blocks.append(attend_by_formula(*block, bias[..., start:stop, :seen]))
    return torch.cat(blocks, dim=2)


def attend_by_formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """`attend` as the formula says it, softmax(q kᵀ / sqrt(D)) v. The mask, (B or 1, 1, T, S), is
    bool, or float to be added. For the few queries of a pass in decoding, its five kernels take 14
    to 25 µs where PyTorch's one takes 63 (H100, float32)."""
    T = q.shape[2]
    q = (q * q.shape[-1] ** -0.5).unflatten(1, (k.shape[1], -1))  # (B, H_kv, queries per key, T, D)
    scores = (q.flatten(2, 3) @ k.mT).unflatten(2, (-1, T))  # (B, H_kv, queries per key, T, S)
    mask = mask[:, :, None]
    scores = scores.where(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    p = scores.softmax(-1).to(v.dtype)
    return (p.flatten(2, 3) @ v).unflatten(2, (-1, T)).flatten(1, 2)


def rotary(place: Tensor, head_dim: int, theta: float) -> Tensor:
    """RoPE (Su et al. 2021): (T,) or (B, T) places -> cosines, and sines whose first half is
    negated, (2, T, 1, D) or (2, B, T, 1, D)."""
    exponent = torch.arange(0, head_dim, 2, device=place.device) / head_dim
    angle = place.float()[..., None, None] * theta**-exponent  # (..., T, 1, D/2)
    sin = angle.sin()
    return torch.stack([angle.cos().tile(2), torch.cat([-sin, sin], dim=-1)])


@torch.compiler.assume_constant_result
def rotary_table(T: int, head_dim: int, theta: float, device) -> Tensor:
    """What `rotary` gives for places 0 ... T-1, (2, T, 1, head_dim). A compiled model holds
    this as a constant; else each of its kernels would compute the sines anew."""
    return rotary(torch.arange(T, device=device), head_dim, theta)


def apply_rotary(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) by its place's angle: (B, T, H, D) -> the same."""
    cos, sin = rope
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos.to(x.dtype), swapped, sin.to(x.dtype))


class KVCache:
    """Keys and values of every block, (B, S, H_kv, D) each: the trunk's blocks, then the heads'.
    `vectors`, (B, S, C), holds the embeddings that the short convolution reads. All rows are at the
    same positions. A slot is overwritten when its position is read again, and slots after the
    newest position are never seen, so rejected drafts need no clean-up."""

    def __init__(self, config: ModelConfig, batch: int, slots: int, device, dtype=torch.float32):
        n_future_blocks = 0 if config.mtp_heads == "linear" else config.n_future - 1
        blocks = range(config.n_layer + n_future_blocks)
        shape = (batch, slots, config.n_kv_head, config.head_dim)
        self.k = [torch.zeros(shape, device=device, dtype=dtype) for _ in blocks]
        self.v = [torch.zeros(shape, device=device, dtype=dtype) for _ in blocks]
        self.vectors = torch.zeros(batch, slots, config.n_embd, device=device, dtype=dtype)
        self.slots = torch.arange(slots, device=device)
        self.rope = rotary(self.slots, config.head_dim, config.rope_theta)  # (2, S, 1, D)

    def store(self, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, T, H_kv, D) at (T,) positions; return all of the layer's, (B, S, H_kv, D)."""
        self.k[layer].index_copy_(1, positions, k.to(self.k[layer].dtype))
        self.v[layer].index_copy_(1, positions, v.to(self.v[layer].dtype))
        return self.k[layer], self.v[layer]

    def store_vectors(self, positions: Tensor, x: Tensor, at: Tensor) -> Tensor:
        """Store (B, T, C) at (T,) positions; return those at (T, 2) positions: (B, T, 2, C)."""
        self.vectors.index_copy_(1, positions, x.to(self.vectors.dtype))
        return self.vectors.index_select(1, at.flatten()).unflatten(1, at.shape)

    def mask(self, positions: Tensor, stop: int | Tensor = 0, start=0) -> Tensor:
        """The rule for (T,) positions over all slots, (1, 1, T, S) bool; the slots from `start` to
        before `stop` are read both ways."""
        group = ((self.slots >= start) & (self.slots < stop)).int()
        group_q = group[positions][:, None]
        return may_attend(positions[:, None], self.slots, 1, 1, group_q, group)[None, None]


# ---- blocks ------------------------------------------------------------------------------------


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean of x² + eps) · weight: PyTorch's, in the weight's dtype even under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


Linear = functools.partial(nn.Linear, bias=False)


class Attention(nn.Module):
    """Grouped-query attention with QK-norm and rotary positions: (B, T, C) -> (B, T, C).

    In decoding, `store` caches the new keys and values and returns those of all slots. With
    value_embed, the values also read `embedded`, the (B, T, C) input of the first block, so that
    the token itself can be copied, as in modded-nanogpt (Jordan et al. 2024).

    Differs: modded-nanogpt's value embeddings have tables of their own."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        C, D = config.n_embd, config.head_dim
        self.head_dim = D
        self.q_proj = Linear(C, config.n_head * D)
        self.k_proj = Linear(C, config.n_kv_head * D)
        self.v_proj = Linear(C, config.n_kv_head * D)
        self.v_embed = Linear(C, config.n_kv_head * D) if config.value_embed else None
        self.o_proj = Linear(config.n_head * D, C)
        self.q_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, mask, rope, store=None, embedded=None) -> Tensor:
        shape = (*x.shape[:2], -1, self.head_dim)
        q = apply_rotary(self.q_norm(self.q_proj(x).view(shape)), rope)  # (B, T, H, D)
        k = apply_rotary(self.k_norm(self.k_proj(x).view(shape)), rope)  # (B, T, H_kv, D)
        v = self.v_proj(x).view(shape)
        if self.v_embed is not None:
            v = v + self.v_embed(embedded).view(shape)
        if store is not None:
            k, v = store(k, v)  # (B, S, H_kv, D)
        y = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)  # (B, H, T, D)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = Linear(config.n_embd, config.d_ff)
        self.up_proj = Linear(config.n_embd, config.d_ff)
        self.down_proj = Linear(config.d_ff, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.n_embd, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, mask, rope, store=None, embedded=None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), mask, rope, store, embedded)
        return x + self.mlp(self.post_attention_layernorm(x))


# ---- heads that an objective may ask for ---------------------------------------------------------


class FutureHead(nn.Module):
    """Horizon k of multi-token prediction: makes h_k, (B, T, C), which predicts x[t+k]. h_1 is the
    trunk's state before the final norm. All horizons share the final norm and the unembedding.

    linear (Gloeckle et al. 2024, appendix B): h_k = h_1 + W_k h_1, where W_k begins at zero.
    parallel (section 2 of that paper): h_k = block_k(h_1).
    chain (DeepSeek-V3, eqs. 21 and 22; our k is the paper's k+1):
    h_k = block_k(W_k [norm_h(h_{k-1}); norm_e(emb(x[t+k-1]))]), where emb has no short convolution.

    Differs:
    - linear: in the paper h_k = W_k h_1, and its main models have parallel heads.
    - parallel: in the paper horizon 1 has such a block too, and the trunk has fewer blocks instead.
    - chain: the published head has its own final norm. vLLM and SGLang put the embedding first and
      use the trunk's state after its final norm."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.kind = config.mtp_heads
        if self.kind == "chain":
            self.norm_h = RMSNorm(config.n_embd, config.norm_eps)
            self.norm_e = RMSNorm(config.n_embd, config.norm_eps)
            self.join = Linear(2 * config.n_embd, config.n_embd)
        if self.kind == "linear":
            self.linear = Linear(config.n_embd, config.n_embd)
        else:
            self.block = Block(config)

    def forward(self, trunk, previous=None, next_vector=None, mask=None, rope=None, store=None):
        """`trunk` is h_1. A chain instead reads `previous`, h_{k-1}, and `next_vector`, the
        embedding of x[t+k-1]. The other arguments are for blocks."""
        if self.kind == "linear":
            return trunk + self.linear(trunk)
        x = trunk
        if self.kind == "chain":
            parts = [self.norm_h(previous), self.norm_e(next_vector)]
            x = self.join(torch.cat(parts, dim=-1))
            x = x.to(trunk.dtype)  # under autocast, join lowers the precision
        return self.block(x, mask, rope, store)


class BinaryHead(nn.Module):
    """Dense, GELU, linear: (..., C) -> (...), a logit (the head of ELECTRA's reference code)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.dense = nn.Linear(config.n_embd, config.n_embd)
        self.out = nn.Linear(config.n_embd, 1)

    def forward(self, h: Tensor) -> Tensor:
        return self.out(F.gelu(self.dense(h))).squeeze(-1)


class ElectraGenerator(nn.Module):
    """ELECTRA's small model (Clark et al. 2020): narrower blocks between the main model's embedding
    and its transpose: (B, T, C) -> (B, T, C).

    Differs: in the reference code GELU and a norm follow `widen`, and the logits have a bias."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        n_head = max(1, round(config.n_head * config.generator_frac))
        width = max(8, round(config.n_embd * config.generator_frac / 8) * 8)
        small = replace(config, n_embd=width, n_head=n_head, n_kv_head=n_head, d_ff=None)
        self.narrow = Linear(config.n_embd, width)
        self.layers = nn.ModuleList(Block(small) for _ in range(config.n_layer))
        self.norm = RMSNorm(width, config.norm_eps)
        self.widen = Linear(width, config.n_embd)

    def forward(self, embedded: Tensor, mask, rope) -> Tensor:
        x = self.narrow(embedded).to(embedded.dtype)
        for layer in self.layers:
            x = layer(x, mask, rope)
        return self.widen(self.norm(x))


# ---- the model -----------------------------------------------------------------------------------


def neighbors_of(positions: Tensor, mask) -> tuple[Tensor, Tensor]:
    """(T,) positions -> those before and after each, (T, 2), and whether the mask shows them, (B or
    1, T, 2) bool. Where there is none, it is the position itself, as not shown."""
    here = positions[:, None]
    last = mask.shape[-1] - 1 if torch.is_tensor(mask) else len(positions) - 1
    at = torch.cat([here - 1, here + 1], dim=1).clamp(0, last)
    if torch.is_tensor(mask):
        seen = mask[:, 0].take_along_dim(at[None], dim=2)
    else:
        seen = (at <= here)[None] | (mask == "full")
    return at, seen & (at != here)


def beside(x: Tensor, mask: Tensor, place: Tensor) -> Tensor:
    """(B, T, C) -> (B, T, 2, C): for each position, the vectors of those that it sees one place
    before and one place after it. There is at most one of each; where there is none, zeros."""
    assert torch.is_tensor(mask), f"with `place`, a mask of kind rule, got {mask}"
    apart = place[:, None, :] - place[:, :, None]  # (B, T, T), query down, key across
    seen = torch.stack([apart == -1, apart == 1], dim=2) & mask.transpose(1, 2)  # (B, T, 2, T)
    return (seen.to(x.dtype).flatten(1, 2) @ x).unflatten(1, (-1, 2))


class Transformer(nn.Module):
    """Embedding, blocks, norm, unembedding, and the heads that `config` asks for."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.n_embd)
        # For each channel: the share of the previous vector, and of the next one, that is added.
        self.short_conv = nn.Parameter(torch.empty(2, config.n_embd)) if config.short_conv else None
        # BERT's segment embedding: it is added to the tokens of a pair's second text.
        self.second_text = nn.Parameter(torch.empty(config.n_embd)) if config.pair_head else None
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.lm_head = None if config.tied else Linear(config.n_embd, config.vocab_size)

        plain = replace(config, value_embed=False)  # only the trunk's blocks read the embeddings
        self.future = nn.ModuleList(FutureHead(plain) for _ in range(config.n_future - 1))
        self.pair_head = BinaryHead(config) if config.pair_head else None
        self.detect_head = BinaryHead(config) if config.detect_head else None
        self.generator = ElectraGenerator(plain) if config.generator_frac else None

        self.nll_of = nll_of  # compile_for_training replaces it
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Blocks and linear heads begin as the identity: the matrices that write to the residual
        stream are zero. So is the last matrix of a BinaryHead, which makes its logit."""
        C = self.config.n_embd
        zeros = ("o_proj.weight", "down_proj.weight", "linear.weight", "_head.out.weight")
        for name, p in self.named_parameters():
            if name.endswith("bias") or name in ("short_conv", "second_text"):
                nn.init.zeros_(p)
            elif p.ndim == 1:  # of a norm
                nn.init.ones_(p)
            elif name.endswith(zeros):
                nn.init.zeros_(p)
            elif name == "embed_tokens.weight":
                nn.init.normal_(p, std=C**-0.5 if self.config.tied else 1.0)
            elif name in ("lm_head.weight", "generator.widen.weight"):
                nn.init.normal_(p, std=0.001)  # the first predictions are almost uniform
            else:
                nn.init.normal_(p, std=p.shape[-1] ** -0.5)
        if self.config.tied:
            # Untrained blocks pass the embedding through. With a weight of 1 here, each position
            # would predict its own input, with a logit of sqrt(C) and all others near 0.
            self.norm.weight.fill_(C**-0.5)

    @property
    def unembedding(self) -> Tensor:
        """(V, C)."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def attention_mask(self, kind: str, segment: Tensor, group: Tensor):
        """(B, T) arrays -> the mask that `attend` takes. `kind` is what the caller knows about
        them: "causal" means one segment in group 0, then perhaps padding; "full" means one segment
        in group 1; "rule" allows anything."""
        assert kind in ("causal", "full", "rule"), f"causal, full or rule, got {kind}"
        if kind != "rule" and rule_is_plain(kind, segment.shape[1], may_attend):
            return kind
        return dense_mask(segment, group)

    def full_mask(self, ids: Tensor):
        """The mask for (B, T) ids that are all read in both directions."""
        return self.attention_mask("full", torch.ones_like(ids), torch.ones_like(ids))

    def rope(self, x: Tensor, place: Tensor | None = None) -> Tensor:
        """Cosines and sines for (B, T) places, by default 0 ... T-1, where x is (B, T, ...)."""
        c = self.config
        if place is None:
            return rotary_table(x.shape[1], c.head_dim, c.rope_theta, x.device)
        return rotary(place, c.head_dim, c.rope_theta)

    def embed(self, ids: Tensor, mask, positions=None, cache=None, place=None) -> Tensor:
        """(B, T) ids -> (B, T, C): each token's vector, marked in a pair's second text, plus a
        learned share of its two neighbors', where the mask shows them: a short convolution, like
        the Canon layers of Allen-Zhu 2025. It makes copying easier: the token after an earlier
        "red" has "red" in its vector, so one block can find it; attention alone (an induction head)
        needs two.

        Differs: Canon layers are up to four in every block, each over a token and the three before.
        """
        x = self.embed_tokens(ids)
        if self.second_text is not None:
            is_separator = ids == self.config.separator
            in_second = (is_separator.cumsum(1) - is_separator.int()) == 1  # B and its [SEP]
            x = x + in_second[..., None] * self.second_text
        if torch.is_autocast_enabled("cuda"):  # the residual stream, too, is then in its dtype
            x = x.to(torch.get_autocast_dtype("cuda"))
        if self.short_conv is None:
            return x
        if place is not None:
            return (x + (beside(x, mask, place) * self.short_conv).sum(2)).to(x.dtype)
        if cache is None:
            positions = torch.arange(ids.shape[1], device=ids.device)
        at, seen = neighbors_of(positions, mask)
        if cache is None:  # faster than x[:, at]; where roll wraps around, nothing is seen
            vectors = torch.stack([x.roll(1, dims=1), x.roll(-1, dims=1)], dim=2)  # (B, T, 2, C)
        else:
            vectors = cache.store_vectors(positions, x, at)
        return (x + (vectors * self.short_conv * seen[..., None]).sum(2)).to(x.dtype)

    def trunk(self, ids: Tensor, mask, positions=None, cache=None, rope=None, place=None) -> Tensor:
        """(B, T) ids -> (B, T, C), before the final norm. With a cache, `positions` (T,) are those
        of the ids; else they are 0, 1, ..., and so are the tokens' places unless `place` (B, T) is
        given. `rope` saves computing the angles a second time."""
        x = embedded = self.embed(ids, mask, positions, cache, place)
        if rope is None:
            rope = cache.rope.index_select(1, positions) if cache else self.rope(ids, place)
        for i, layer in enumerate(self.layers):
            store = functools.partial(cache.store, i, positions) if cache else None
            x = layer(x, mask, rope, store, embedded)
        return x

    def forward(self, ids: Tensor, mask=None, ahead=None, place=None) -> list[Tensor]:
        """(B, T) ids -> states, not logits: one (B, T, C) for each horizon, normed; `logits` and
        `cross_entropy` take them. `mask` comes from attention_mask; without it, attention is
        causal. A chain of heads also reads `ahead`, (B, T, n_future - 1): the tokens at t+1, t+2,
        .... `place`, (B, T): where the tokens stand, by default 0 ... T-1."""
        chain = self.config.mtp_heads == "chain"
        if mask is None:
            mask = self.attention_mask("causal", torch.ones_like(ids), torch.zeros_like(ids))
        rope = self.rope(ids, place)  # once: with a second rotary_table a graph does not compile
        x = self.trunk(ids, mask, rope=rope, place=place)
        states = [x]
        for i, head in enumerate(self.future):
            next_vector = self.embed_tokens(ahead[:, :, i]) if chain else None
            states.append(head(x, states[-1], next_vector, mask, rope))
        return [self.norm(state) for state in states]

    def generator_states(self, ids: Tensor, mask) -> Tensor:
        """(B, T) ids -> states of ELECTRA's generator, (B, T, C), to be multiplied by the
        embedding matrix. The generator does not use the short convolution: if it were rarely wrong,
        the detector would have little to find."""
        x = self.embed_tokens(ids)
        return self.generator(x, mask, self.rope(x))

    def logits(self, state: Tensor) -> Tensor:
        """(..., C) normed -> (..., V)."""
        return F.linear(state, self.unembedding)

    def cross_entropy(self, states, targets, weights, unembedding=None, forbidden_id=None):
        """(N, C), (N,), (N,) -> the sum of weights · nll, a scalar, and the nll of each position,
        (N,). `forbidden_id` can never be predicted.

        If the loss takes more than LOGITS_AT_ONCE logits, they are made chunk by chunk, and once
        more in the backward pass."""
        matrix = self.unembedding if unembedding is None else unembedding
        nll_of = self.nll_of
        n_chunks = 1 + len(states) * len(matrix) // LOGITS_AT_ONCE
        if n_chunks > 1:
            nll_of = functools.partial(checkpoint, nll_of, use_reentrant=False)
        chunks = zip(states.chunk(n_chunks), targets.chunk(n_chunks))
        nll = torch.cat([nll_of(*chunk, matrix, forbidden_id) for chunk in chunks])
        return (nll * weights).sum(), nll

    def compile_for_training(self) -> None:
        """torch.compile what a training step runs on the device.

        `dynamic` is fixed in advance: otherwise the first sizes seen would choose the kernels, and
        a resumed run could round differently from one that was never stopped.
        """
        torch._dynamo.config.recompile_limit = 64  # nsp's rows have many sizes
        # A graph that enters autocast, as attend may, is kept for the next process only if torch
        # is told that this is safe (PyTorch issue 191106). The next run starts 4 seconds sooner.
        cacheable = torch._inductor.config.unsafe_marked_cacheable_functions
        for verb in ("enter", "exit"):
            cacheable[f"torch.amp.autocast_mode._{verb}_autocast"] = torch.__version__
        self.compile(dynamic=False)
        self.nll_of = torch.compile(nll_of, dynamic=True)
        if self.generator is not None:
            self.generator_states = torch.compile(self.generator_states, dynamic=False)


def nll_of(states: Tensor, targets: Tensor, matrix: Tensor, forbidden_id: int | None) -> Tensor:
    """(N, C), (N,), (V, C) -> the negative log-likelihood of each target, (N,), in float32."""
    logits = F.linear(states, matrix).float()  # (N, V)
    if forbidden_id is not None:
        logits[:, forbidden_id] = -torch.inf
    return F.cross_entropy(logits, targets, reduction="none")
