"""optimizers.py: Muon for the blocks' matrices, AdamW for the rest, and their learning rates."""

import torch
from torch import Tensor

from model import Transformer


def orthogonalize(G: Tensor, dtype: torch.dtype) -> Tensor:
    """Newton-Schulz's iteration with the coefficients of Jordan et al. 2024: (n, a, b) -> the same
    shape. Each matrix U S Vᵀ becomes about U Vᵀ: divided by its norm, it has no singular value
    above 1; then five steps bring most of them to 0.5 ... 1.5."""
    X = (G / (G.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(dtype)
    tall = G.shape[1] > G.shape[2]  # if so, transpose: X Xᵀ is then the smaller product
    if tall:
        X = X.mT
    for _ in range(5):
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=-4.7750, alpha=2.0315)  # -4.7750 A + 2.0315 A A
        X = torch.baddbmm(X, B, X, beta=3.4445)  # 3.4445 X + B X
    return X.mT if tall else X


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024): momentum SGD with each matrix's update orthogonalized, one batch
    per shape.

    Differs: torch.optim.Muon always uses bfloat16, which is slow on processors without it."""

    def __init__(self, params, lr: float, dtype: torch.dtype):
        super().__init__(params, dict(lr=lr, momentum=0.95))
        self.dtype = dtype  # of the Newton-Schulz steps

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            same_shape = {}
            for p in group["params"]:
                if p.grad is not None:
                    same_shape.setdefault(p.shape, []).append(p)
            for (rows, columns), params in same_shape.items():
                update = self.update(params, group["momentum"])  # (n, rows, columns)
                scale = max(1, rows / columns) ** 0.5  # tall matrices: larger steps
                torch._foreach_add_(params, list(update.unbind()), alpha=-group["lr"] * scale)

    def update(self, params: list[Tensor], momentum: float) -> Tensor:
        """Nesterov momentum, orthogonalized. All momenta are stacked in the state of params[0]."""
        gradient = torch.stack([p.grad for p in params])
        state = self.state[params[0]]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(gradient)
        mean = state["momentum"].lerp_(gradient, 1 - momentum)
        update = orthogonalize(gradient.lerp(mean, momentum), self.dtype)
        return update.to(gradient.dtype)


def make_optimizers(
    model: Transformer, kind: str, lr, lr_embed, lr_unembed, lr_binary, dtype
) -> list[torch.optim.Optimizer]:
    """AdamW for the embedding, its short convolution and vectors such as norms (lr_embed), the
    unembedding (lr_unembed) and the heads of one logit (lr_binary); `kind`, "muon" or "adamw", for
    every other matrix (lr). A group's `peak_lr` is its learning rate at its highest. Frozen
    parameters are left out."""
    unembedding, binary, embedding, matrices = [], [], [], []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if "lm_head" in name:
            unembedding.append(p)
        elif "_head" in name:  # pair_head, detect_head
            binary.append(p)
        elif "embed_tokens" in name or name == "short_conv" or p.ndim != 2:
            embedding.append(p)
        else:
            matrices.append(p)

    rates = [(embedding, lr_embed), (unembedding, lr_unembed), (binary, lr_binary)]
    if kind == "adamw":
        rates.append((matrices, lr))
    groups = [dict(params=params, lr=rate) for params, rate in rates if params]
    optimizers = []
    if groups:
        options = dict(betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True)
        optimizers.append(torch.optim.AdamW(groups, **options))
    if matrices and kind == "muon":
        optimizers.append(Muon(matrices, lr, dtype))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def learning_rate_scale(step: int, max_steps: int, warmup_steps=10, decay_frac=0.7) -> float:
    """Share of the peak learning rate at a step, counted from 0: it rises to 1 in `warmup_steps`,
    and over the last `decay_frac` of the run it falls in a straight line to 0.

    >>> [learning_rate_scale(step, 100) for step in (0, 9, 30, 65)]
    [0.1, 1.0, 1.0, 0.5]
    """
    warmup = (step + 1) / warmup_steps
    decay = (max_steps - step) / max_steps / decay_frac
    return min(1.0, warmup) * min(1.0, decay)
