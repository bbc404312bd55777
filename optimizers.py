"""optimizers.py: Muon for the blocks' matrices, AdamW for the rest, and their learning rates."""

import torch
from torch import Tensor

from config import UserError
from model import Transformer
from settings import TrainConfig


def orthogonalize(G: Tensor, dtype: torch.dtype) -> Tensor:
    """(n, a, b) -> the same shape: each matrix U S Vᵀ becomes about U Vᵀ. Divided by its norm, it
    has no singular value above 1; then five Newton-Schulz steps bring most of them to 0.5 ... 1.5
    (coefficients of Jordan et al. 2024)."""
    X = (G / (G.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(dtype)
    tall = G.shape[1] > G.shape[2]  # if so, transpose: X Xᵀ is then the smaller product
    if tall:
        X = X.mT
    for _ in range(5):
        A = X @ X.mT
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X.mT if tall else X


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024): momentum SGD with each matrix's update orthogonalized, one batch
    per shape. (torch.optim.Muon always uses bfloat16, which is slow on processors without it.)"""

    def __init__(self, params, lr: float, weight_decay: float, dtype: torch.dtype, compile: bool):
        super().__init__(params, dict(lr=lr, momentum=0.95, weight_decay=weight_decay))
        self.dtype = dtype  # of the Newton-Schulz steps
        self.orthogonalize = orthogonalize
        if compile:
            self.orthogonalize = torch.compile(orthogonalize, dynamic=False)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            same_shape = {}
            for p in group["params"]:
                if p.grad is not None:
                    same_shape.setdefault(p.shape, []).append(p)
            for (rows, columns), params in same_shape.items():
                update = self.update(params, group["momentum"])  # (n, rows, columns)
                lr = group["lr"]
                torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
                scale = max(1, rows / columns) ** 0.5  # tall matrices: larger steps
                torch._foreach_add_(params, list(update.unbind()), alpha=-lr * scale)

    def update(self, params: list[Tensor], momentum: float) -> Tensor:
        """Nesterov momentum, orthogonalized. All momenta are stacked in the state of params[0]."""
        gradient = torch.stack([p.grad for p in params])
        state = self.state[params[0]]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(gradient)
        mean = state["momentum"].lerp_(gradient, 1 - momentum)
        update = self.orthogonalize(gradient.lerp(mean, momentum), self.dtype)
        return update.to(gradient.dtype)


def make_optimizers(model: Transformer, config: TrainConfig, dtype, compile: bool) -> list:
    """AdamW for the embedding, its short convolution, vectors (norms, biases), the unembedding and
    parameters named ..._head; Muon for every other matrix."""
    # The keys are the fields of TrainConfig that hold the learning rates.
    params = {"lr_embed": [], "lr_unembed": [], "lr_binary": [], "lr": []}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if "lm_head" in name:
            params["lr_unembed"].append(p)
        elif "_head" in name:
            params["lr_binary"].append(p)  # pair_head, detect_head
        elif "embed_tokens" in name or name == "short_conv" or p.ndim != 2:
            params["lr_embed"].append(p)
        else:
            params["lr"].append(p)

    matrices = params.pop("lr")
    groups = [dict(params=p, lr=getattr(config, rate)) for rate, p in params.items() if p]
    options = dict(betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True)
    optimizers = []
    if groups:
        optimizers.append(torch.optim.AdamW(groups, **options))
    if matrices:
        optimizers.append(Muon(matrices, config.lr, config.weight_decay, dtype, compile))
    for group in all_groups(optimizers):
        group["peak_lr"] = group["lr"]
    return optimizers


def all_groups(optimizers: list) -> list[dict]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def restore_optimizers(optimizers: list, saved: list[dict]) -> None:
    """Load a checkpoint's momenta, but use the flags' learning rates. Raises UserError."""
    try:
        for optimizer, state in zip(optimizers, saved, strict=True):
            here = optimizer.state_dict()
            optimizer.load_state_dict(here | {"state": state["state"]})
            params = [p for group in optimizer.param_groups for p in group["params"]]
            if not any(optimizer.state.values()):
                raise ValueError("they have no momenta")
            for p, momenta in optimizer.state.items():
                shapes = {"step": (), "exp_avg": p.shape, "exp_avg_sq": p.shape}  # AdamW's
                if isinstance(optimizer, Muon):  # one for all matrices of a shape
                    n_stacked = sum(other.shape == p.shape for other in params)
                    shapes = {"momentum": (n_stacked, *p.shape)}
                if {name: x.shape for name, x in momenta.items()} != shapes:
                    raise ValueError("they are of other weights")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        wrong = f"the checkpoint's optimizers do not fit its model ({error})"
        raise UserError(f"{wrong}; restore a copy or train again") from None


def learning_rate_scale(step: int, config: TrainConfig) -> float:
    """Share of the peak learning rate at a step, counted from 0."""
    scale = min(1.0, (step + 1) / max(config.warmup_steps, 1))
    if config.decay_frac:
        left = (config.max_steps - step) / config.max_steps
        scale *= min(1.0, left / config.decay_frac)
    return scale
