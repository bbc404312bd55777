"""model.py: one transformer for every objective: embedding, blocks, one attention rule, heads, KV cache.

The layout is Qwen3's (arXiv 2505.09388), parameter names included, so that weights can travel: RMSNorm, QK-norm, rotary
positions, SwiGLU, grouped-query heads, no biases. What a position sees is decided by two arrays of the row, never by an
objective's name. Left out: dropout, mixture of experts, sliding windows, anything about training.

    B rows, T positions, C channels (n_embd), H heads, D channels a head, V ids, S cache slots, n horizons

    >>> model = Transformer(ModelConfig(vocab_size=576, n_layer=2, n_head=2, n_kv_head=1, head_dim=32, n_embd=64, d_ff=192))
    >>> model.logits(model(torch.zeros(1, 8, dtype=torch.long))[0]).shape
    torch.Size([1, 8, 576])
"""
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from data import flag

FLEX_BLOCK = 128


@dataclass
class ModelConfig:
    """shape of the transformer"""
    n_layer: int = flag(6, "transformer blocks, in [1, inf)")
    n_head: int = flag(3, "query heads a block, in [1, inf)")
    n_kv_head: int | None = flag(None, "key/value heads a block, in [1, inf); automatic: n_head")
    head_dim: int = flag(64, "channels a head, in [1, inf)")
    n_embd: int = flag(192, "channels of the residual stream, in [1, inf)")
    d_ff: int | None = flag(None, "channels inside the SwiGLU, in [1, inf); automatic: 8/3 n_embd, rounded up to 64")
    tied: bool = flag(False, "unembed with the embedding's matrix")
    rope_theta: float = flag(10000.0, "rotary base, in (0, inf)")
    norm_eps: float = flag(1e-6, "RMSNorm epsilon, in [0, inf)")
    # decided by tokenizer and objective, not by flags
    vocab_size: int = 576
    n_future: int = 1               # horizons predicted at each position; 1 is the ordinary model
    mtp_heads: str = "parallel"     # how horizons beyond the first are made: parallel (Gloeckle) or chain (DeepSeek-V3)
    pair_head: bool = False         # one logit a row, on its first position
    detect_head: bool = False       # one logit a position
    generator_frac: float = 0.0     # width of a second, small model that shares the embedding; 0: none

    def __post_init__(self):
        self.n_kv_head = self.n_head if self.n_kv_head is None else self.n_kv_head
        self.d_ff = -(-self.n_embd * 8 // 3 // 64) * 64 if self.d_ff is None else self.d_ff


# ---- attention: one rule -------------------------------------------------------------------------------------------

def may_attend(segment: Tensor, prefix: Tensor) -> Tensor:
    """(B, T), (B, T) -> (B, T, T) bool: query q sees key k iff both are of one example and k is not later, or both are prefix."""
    T = segment.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool, device=segment.device).tril()
    same = segment[:, :, None] == segment[:, None, :]
    return same & (causal | (prefix[:, :, None] & prefix[:, None, :]))


def block_mask(segment: Tensor, prefix: Tensor) -> BlockMask:
    """The same rule for FlexAttention. A tile is visited if any pair in it may attend, judged from the extremes of its
    rows alone, so no T x T matrix is ever made; inside a tile the rule itself decides."""
    B, T = segment.shape
    tiles = segment.view(B, -1, FLEX_BLOCK)
    low, high, bidirectional = tiles.amin(-1), tiles.amax(-1), prefix.view(B, -1, FLEX_BLOCK).any(-1)       # (B, tiles)
    overlap = (low[:, :, None] <= high[:, None, :]) & (low[:, None, :] <= high[:, :, None])
    n = T // FLEX_BLOCK
    earlier = torch.ones(n, n, dtype=torch.bool, device=segment.device).tril()
    visit = overlap & (earlier | (bidirectional[:, :, None] & bidirectional[:, None, :]))                   # (B, q, k)
    both = lambda t: t[:, :, None] & t[:, None, :]                # (B, q, k): in tiles of one example the rule need not be asked
    whole = both(low == high) & (low[:, :, None] == low[:, None, :]) & (earlier.tril(-1) | both(prefix.view(B, -1, FLEX_BLOCK).all(-1)))
    listed = lambda t: (t.sum(-1, dtype=torch.int32)[:, None], t.int().argsort(dim=-1, descending=True, stable=True).int()[:, None])

    def rule(b, h, q, k):
        return (segment[b, q] == segment[b, k]) & ((k <= q) | (prefix[b, q] & prefix[b, k]))

    return BlockMask.from_kv_blocks(*listed(visit & ~whole), *listed(whole), BLOCK_SIZE=FLEX_BLOCK, mask_mod=rule)


def attend(q: Tensor, k: Tensor, v: Tensor, mask) -> Tensor:
    """(B, H, T, D), (B, H_kv, S, D) twice -> (B, H, T, D) by the fastest exact path for `mask`:
    "causal", "full", a tensor (bool, or what is added to the scores) that broadcasts to (B, 1, T, S), or a BlockMask (CUDA)."""
    gqa, dtype = q.shape[1] != k.shape[1], v.dtype               # of the matrix products; autocast may leave q and k in float32
    compute = torch.float32 if v.device.type == "cpu" and dtype == torch.bfloat16 else dtype    # bf16 attention is slow there
    q, k, v = q.to(compute), k.to(compute), v.to(compute)
    if isinstance(mask, BlockMask):
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=gqa).to(dtype)
    dense = None if isinstance(mask, str) else mask if mask.dtype == torch.bool else mask.to(compute)
    if v.device.type == "mps":                                   # torch 2.10 and 2.11 misread permuted views there (issues 181133, 184180)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        dense = None if dense is None else dense.expand(-1, q.shape[1], -1, -1).contiguous()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=dense, is_causal=dense is None and mask == "causal", enable_gqa=gqa).to(dtype)


def rotary(positions: Tensor, config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(T,) or (B, T) positions -> cosines and signed sines, (…, T, 1, D), broadcast over heads (Su et al. 2021)."""
    half = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32) / config.head_dim
    angle = (positions.float()[..., None] * config.rope_theta**-half).unsqueeze(-2)
    sin = angle.sin()
    return angle.cos().tile(2).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) by its position's angle: (B, T, H, D) -> the same."""
    cos, sin = (t.to(x.dtype) for t in turn)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class KVCache:
    """Static keys and values of each layer, (B, S, H_kv, D) twice, so that decoding never allocates and one graph serves.

    A position's entry is overwritten when the position is read again, and entries after the newest position are never
    seen: the trunk's need no clean-up after rejected drafts."""

    def __init__(self, config: ModelConfig, batch: int, slots: int, heads: int, device, dtype=torch.float32):
        side_by_side = heads > 0 and config.mtp_heads == "parallel"
        rows = [batch] * config.n_layer + ([(config.n_future - 1) * batch] if side_by_side else [batch] * heads)
        empty = lambda n: torch.zeros(n, slots, config.n_kv_head, config.head_dim, device=device, dtype=dtype)
        self.k, self.v, self.slots = [empty(n) for n in rows], [empty(n) for n in rows], slots
        self.row = torch.arange(max(rows), device=device)[:, None]

    def write(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, H_kv, D) twice at (B, T) positions -> all keys and values of the layer, (B, S, H_kv, D)."""
        here = self.row[:len(k)], positions
        self.k[layer][here], self.v[layer][here] = k.to(self.k[layer].dtype), v.to(self.v[layer].dtype)
        return self.k[layer], self.v[layer]

    def mask(self, positions: Tensor, prefix_length: Tensor | None = None) -> Tensor:
        """(B, T) positions -> (B, 1, T, S), what attention adds: the rule, with the first `prefix_length` (B,) slots read
        bidirectionally."""
        slot, q = torch.arange(self.slots, device=positions.device), positions[..., None]
        seen = slot <= q
        if prefix_length is not None:
            length = prefix_length[:, None, None]
            seen = seen | ((slot < length) & (q < length))
        return torch.zeros(seen.shape, device=seen.device, dtype=self.k[0].dtype).masked_fill_(~seen, -torch.inf)[:, None]


# ---- blocks ---------------------------------------------------------------------------------------------------------

class RMSNorm(nn.Module):
    """x / sqrt(mean x² + eps) · weight over the last axis. With `stack`, so many weights side by side."""

    def __init__(self, width: int, eps: float, stack: int = 0):
        super().__init__()
        self.weight, self.width, self.eps = nn.Parameter(torch.ones(stack, width) if stack else torch.ones(width)), (width,), eps

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        if weight.ndim == 1:
            return F.rms_norm(x, self.width, weight, self.eps)
        return (F.rms_norm(x, self.width, None, self.eps).reshape(len(weight), -1, *self.width) * weight[:, None]).view(x.shape)


class Linear(nn.Module):
    """x Wᵀ without a bias. With `stack`, so many matrices side by side: the k-th part of the batch meets the k-th of them."""

    def __init__(self, n_in: int, n_out: int, stack: int = 0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(stack, n_out, n_in) if stack else torch.empty(n_out, n_in))

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.ndim == 2:
            return F.linear(x, self.weight)
        return torch.bmm(x.reshape(len(self.weight), -1, x.shape[-1]), self.weight.mT).view(*x.shape[:-1], -1)


class Attention(nn.Module):
    """Grouped-query attention with QK-norm and rotary positions: (B, T, C) -> (B, T, C). `store` keeps keys and values and
    gives back all there are."""

    def __init__(self, config: ModelConfig, stack: int = 0):
        super().__init__()
        C, H, Hkv, self.D = config.n_embd, config.n_head, config.n_kv_head, config.head_dim
        self.q_proj = Linear(C, H * self.D, stack)
        self.k_proj = Linear(C, Hkv * self.D, stack)
        self.v_proj = Linear(C, Hkv * self.D, stack)
        self.o_proj = Linear(H * self.D, C, stack)
        self.q_norm, self.k_norm = RMSNorm(self.D, config.norm_eps, stack), RMSNorm(self.D, config.norm_eps, stack)

    def forward(self, x: Tensor, mask, turn, store=None) -> Tensor:
        q, k, v = (y.view(*y.shape[:2], -1, self.D) for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))      # (B, T, H, D)
        q, k = rotate(self.q_norm(q), turn), rotate(self.k_norm(k), turn)
        if store is not None:
            k, v = store(k, v)
        y = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)                # (B, H, T, D)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, stack: int = 0):
        super().__init__()
        self.gate_proj = Linear(config.n_embd, config.d_ff, stack)
        self.up_proj = Linear(config.n_embd, config.d_ff, stack)
        self.down_proj = Linear(config.d_ff, config.n_embd, stack)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One block; or, with `stack`, so many side by side, which costs few more kernels than one: (stack · B, T, C) in and out."""

    def __init__(self, config: ModelConfig, stack: int = 0):
        super().__init__()
        self.input_layernorm = RMSNorm(config.n_embd, config.norm_eps, stack)
        self.self_attn = Attention(config, stack)
        self.post_attention_layernorm = RMSNorm(config.n_embd, config.norm_eps, stack)
        self.mlp = MLP(config, stack)

    def forward(self, x: Tensor, mask, turn, store=None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), mask, turn, store)
        return x + self.mlp(self.post_attention_layernorm(x))


class ChainHead(nn.Module):
    """Horizon k from horizon k-1: block_k(W_k [norm(h_{k-1}); norm(emb(x[t+k-1]))]) (DeepSeek-V3, eq. 21)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm_h, self.norm_e = RMSNorm(config.n_embd, config.norm_eps), RMSNorm(config.n_embd, config.norm_eps)
        self.join, self.block = Linear(2 * config.n_embd, config.n_embd), Block(config)

    def forward(self, h: Tensor, embedded: Tensor, mask, turn, store=None) -> Tensor:
        return self.block(self.join(torch.cat([self.norm_h(h), self.norm_e(embedded)], dim=-1)), mask, turn, store)


class Generator(nn.Module):
    """A narrow model that shares the main model's embedding (ELECTRA): (B, T, C) embedded -> (B, T, C), to be unembedded
    with the embedding's matrix."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        head = max(1, round(config.n_head * config.generator_frac))
        width = max(8, round(config.n_embd * config.generator_frac / 8) * 8)
        small = replace(config, n_embd=width, n_head=head, n_kv_head=head, d_ff=None)
        self.inward = Linear(config.n_embd, small.n_embd)
        self.layers = nn.ModuleList(Block(small) for _ in range(config.n_layer))
        self.norm = RMSNorm(small.n_embd, config.norm_eps)
        self.outward = Linear(small.n_embd, config.n_embd)

    def forward(self, embedded: Tensor, mask, turn) -> Tensor:
        x = self.inward(embedded)
        for layer in self.layers:
            x = layer(x, mask, turn)
        return self.outward(self.norm(x))


class Transformer(nn.Module):
    """Embedding, blocks, norm, unembedding, and the heads that `config` asks for."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config, self.flex = config, False          # FlexAttention is fast only where it is compiled
        self.embed_tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.lm_head = None if config.tied else Linear(config.n_embd, config.vocab_size)
        more = config.n_future - 1
        self.future = None if more == 0 else Block(config, more) if config.mtp_heads == "parallel" else nn.ModuleList(ChainHead(config) for _ in range(more))
        self.pair_head = nn.Linear(config.n_embd, 1) if config.pair_head else None
        self.detect_head = nn.Linear(config.n_embd, 1) if config.detect_head else None
        self.generator = Generator(config) if config.generator_frac else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Blocks begin as the identity: the matrices that write to the residual stream are zero."""
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif "norm" in name:
                nn.init.ones_(p)
            elif name.endswith(("o_proj.weight", "down_proj.weight", "pair_head.weight", "detect_head.weight")):
                nn.init.zeros_(p)
            elif "embed_tokens" in name:
                nn.init.normal_(p, std=p.shape[-1] ** -0.5 if self.config.tied else 1.0)
            elif name.endswith(("lm_head.weight", "outward.weight")):
                nn.init.normal_(p, std=0.001)
            else:
                nn.init.normal_(p, std=p.shape[-1] ** -0.5)

    @property
    def unembedding(self) -> Tensor:
        """(V, C)."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def mask(self, attention: str, segment: Tensor | None = None, prefix: Tensor | None = None):
        """What `attend` takes: "causal" and "full" as they are; "rows" asks the row's own arrays, (B, T) each."""
        if attention != "rows":
            return attention
        if self.flex and segment.is_cuda and segment.shape[1] % FLEX_BLOCK == 0:
            return block_mask(segment, prefix)
        return may_attend(segment, prefix)[:, None]

    def trunk(self, ids: Tensor, mask="causal", positions: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """(B, T) ids -> (B, T, C), before the last norm. With a cache, `positions` (B, T) say where the ids stand."""
        x = self.embed_tokens(ids)
        turn = rotary(torch.arange(ids.shape[1], device=ids.device) if positions is None else positions, self.config, x.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x, mask, turn, None if cache is None else lambda k, v, i=i: cache.write(i, k, v, positions))
        return x

    def forward(self, ids: Tensor, mask="causal", ahead: Tensor | None = None) -> list[Tensor]:
        """(B, T) ids -> one (B, T, C) a horizon, normed, ready for `logits`. `ahead` (B, T, n-1): the ids at t+1 … t+n-1."""
        h = self.trunk(ids, mask)
        out, turn = [h], rotary(torch.arange(ids.shape[1], device=ids.device), self.config, h.dtype)
        if isinstance(self.future, Block):
            n = self.config.n_future - 1
            out += self.future(h.repeat(n, 1, 1), mask.repeat(n, 1, 1, 1) if torch.is_tensor(mask) else mask, turn).chunk(n)
        elif self.future is not None:
            for k, head in enumerate(self.future):
                out.append(head(out[-1], self.embed_tokens(ahead[:, :, k]), mask, turn))
        return [self.norm(x) for x in out]

    def generate_hidden(self, ids: Tensor, mask) -> Tensor:
        """The generator's (B, T, C), to be multiplied with the embedding's matrix."""
        x = self.embed_tokens(ids)
        return self.generator(x, mask, rotary(torch.arange(ids.shape[1], device=ids.device), self.config, x.dtype))

    def logits(self, h: Tensor) -> Tensor:
        """(…, C) normed -> (…, V)."""
        return F.linear(h, self.unembedding)

    def flops_per_token(self, T: int, asked: float = 1.0) -> float:
        """Of one training step (forward and backward), by the PaLM paper's count: 6 a matrix entry, 12 H D T a block; a share
        `asked` of the positions meets the unembedding."""
        more = self.config.n_future - 1
        matrices = sum(p.numel() for n, p in self.named_parameters() if p.ndim > 1 and not any(s in n for s in ("norm", "embed_tokens", "lm_head")))
        matrices += self.unembedding.numel() * (1 + more) * asked
        blocks = len(self.layers) + more
        return 6 * matrices + 12 * blocks * self.config.n_head * self.config.head_dim * T


def compile_model(model: Transformer) -> None:
    """torch.compile what a training step runs on the device: the model and the cross entropy's chunk."""
    global _chunk
    model.flex = True
    model.compile()
    if model.generator is not None:
        model.generate_hidden = torch.compile(model.generate_hidden)
    _chunk = torch.compile(_chunk)


# ---- cross entropy without the logits -------------------------------------------------------------------------------

class _LinearCrossEntropy(torch.autograd.Function):
    """Σ weights · cross entropy(h @ unembedding.T, targets), a chunk of positions at a time; the gradients are made on the
    way (logits exist once, are used three times and are gone), so memory holds one chunk whatever the vocabulary."""

    @staticmethod
    def forward(ctx, h, unembedding, targets, weights, banned, chunk):
        dtype = torch.get_autocast_dtype(h.device.type) if torch.is_autocast_enabled(h.device.type) else h.dtype
        u, need = unembedding.to(dtype), any(ctx.needs_input_grad[:2])
        nll = torch.empty(len(h), device=h.device, dtype=torch.float32)
        dh, du = (torch.empty_like(h), torch.zeros_like(unembedding)) if need else (None, None)
        for i in range(0, len(h), chunk):
            part = slice(i, i + chunk)
            nll[part], dh_part, du_part = _chunk(h[part].to(dtype), u, targets[part], weights[part], banned, need)
            if need:
                dh[part] = dh_part
                du += du_part
        ctx.save_for_backward(dh, du)
        ctx.mark_non_differentiable(nll)
        return (nll * weights).sum(), nll

    @staticmethod
    def backward(ctx, grad, _):
        dh, du = ctx.saved_tensors
        return dh * grad.to(dh.dtype), du * grad, None, None, None, None


def _chunk(h, u, targets, weights, banned, need):
    with torch.autocast(h.device.type, enabled=False):
        logits = (h @ u.T).float()                                         # (n, V)
        if banned is not None:
            logits[:, banned] = -torch.inf
        log_z = logits.logsumexp(-1)
        nll = log_z - logits.gather(-1, targets[:, None]).squeeze(-1)
        if not need:
            return nll, None, None
        p = logits.sub_(log_z[:, None]).exp_()                             # d nll / d logits = softmax - one-hot
        p[torch.arange(len(p), device=p.device), targets] -= 1
        p = p.mul_(weights[:, None]).to(u.dtype)
        return nll, p @ u, p.T @ h


def linear_cross_entropy(h: Tensor, unembedding: Tensor, targets: Tensor, weights: Tensor, banned: int | None = None) -> tuple[Tensor, Tensor]:
    """(N, C), (V, C), (N,), (N,) -> Σ weights · nll, a scalar with gradient, and the nll of each position, (N,), without.

    `banned` is an id that can never be predicted."""
    chunk = max(256, (1 << (27 if h.is_cuda else 21)) // len(unembedding))
    return _LinearCrossEntropy.apply(h, unembedding, targets, weights, banned, chunk)
