"""train.py: the loop: configuration, schedule, optimizer, evaluation, checkpoints, log.

It never learns which objective it trains: the table in objectives.py gives it rows and a loss. One file, one device, or
several under torchrun; the rows of a step depend on (seed, step, row) alone, so a resumed run sees what an
uninterrupted one would, and two processes see together what one sees.

    python train.py --objective=fim
    python train.py --objective=fim --init_from=resume --max_steps=2000
    torchrun --standalone --nproc_per_node=2 train.py --objective=clm
"""
import json
import math
import os
import platform
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from data import DataConfig, Replay, Rng, Tokenizer, UserError, atomic_write, check_values, cli, collate, flag, load_checkpoint, load_tokens, parse_flags, save_checkpoint
from model import ModelConfig, Transformer, compile_model
from objectives import OBJECTIVES, Knobs, check_knobs, check_text, make_rows, parse_mixture

PRESETS = {   # what each size overrides; tiny is for a laptop's CPU, small for one GPU, gpt2 is GPT-2's 124M
    "tiny":  dict(n_layer=6, n_head=3, n_embd=192, block_size=256, batch_size=16, max_steps=600),
    "small": dict(n_layer=8, n_head=8, n_embd=512, block_size=512, batch_size=64, max_steps=4000),
    "gpt2":  dict(n_layer=12, n_head=12, n_embd=768, tied=True, block_size=1024, batch_size=64, max_steps=5000),
}
HEADS = ("future", "pair_head", "detect_head", "generator")   # parameters that objectives add to the trunk
PEAK_TFLOPS = {   # dense bf16, from the vendors' data sheets
    "H200": 989, "H100": 989, "A100": 312, "B200": 2250, "L40S": 362, "L4": 121, "A10": 125, "RTX 4090": 165, "RTX 3090": 71}


@dataclass
class TrainConfig:
    """the run"""
    objective: str = flag("clm", "name from the table of objectives.py, or a mixture such as clm:0.5,ul2:0.5")
    preset: str | None = flag(None, "size of model and run; automatic: small on a GPU, else tiny", tuple(PRESETS))
    out_dir: str | None = flag(None, "folder of the run; automatic: out/OBJECTIVE")
    init_from: str = flag("scratch", "scratch, resume (go on in out_dir), or the folder of a run whose weights to start from")
    freeze_trunk: bool = flag(False, "train only the heads that the objective adds")
    block_size: int = flag(256, "T, positions a row, in [8, inf)")
    batch_size: int = flag(16, "rows a step, over all devices and accumulation, in [1, inf)")
    grad_accum: int = flag(1, "parts a step's rows are split into, to save memory, in [1, inf)")
    max_steps: int = flag(600, "steps of the whole run, in [1, inf)")
    lr: float = flag(0.02, "learning rate of Muon (the blocks' matrices), in [0, inf)")
    lr_embed: float = flag(0.01, "learning rate of AdamW for the embedding and the gains, in [0, inf)")
    lr_head: float = flag(0.004, "learning rate of AdamW for the unembedding and small heads, in [0, inf)")
    weight_decay: float = flag(0.0, "decoupled weight decay of the matrices, per unit of learning rate, in [0, inf)")
    schedule: str = flag("linear", "after warm-up: constant then linear to zero, cosine to zero, or constant", ("linear", "cosine", "constant"))
    warmup_steps: int = flag(10, "steps of linear warm-up, in [0, inf)")
    decay_frac: float = flag(0.7, "linear schedule: share of the run that decays, in (0, 1]")
    grad_clip: float = flag(1.0, "largest norm of the gradient, in [0, inf); 0: unclipped")
    seed: int = flag(1, "seed of initialization, data and sampling, in [0, 2147483648)")
    replay_data: str = flag("", "an older corpus to mix back in, by row (same forms as --data); empty: none")
    replay_rate: float = flag(0.05, "share of rows from --replay_data, in (0, 1)")
    log_every: int = flag(10, "steps between log lines, in [1, inf)")
    eval_every: int = flag(200, "steps between evaluations, in [1, inf)")
    eval_rows: int = flag(128, "validation rows of an evaluation, in [1, inf)")
    save_every: int = flag(200, "steps between checkpoints, in [1, inf)")
    device: str | None = flag(None, "cpu, cuda, cuda:N or mps; automatic: the fastest there is")
    dtype: str | None = flag(None, "of matrix products; automatic: bfloat16 where the hardware has it", ("float32", "bfloat16"))
    compile: bool | None = flag(None, "torch.compile; automatic: on CUDA")


# ---- optimizers -----------------------------------------------------------------------------------------------------

def orthogonalize(G: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(n, a, b) -> about U Vᵀ of each matrix's singular value decomposition: five Newton-Schulz steps (Jordan et al. 2024)."""
    X = (G / (G.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(dtype)
    wide = G.shape[1] > G.shape[2]
    X = X.mT if wide else X
    for _ in range(5):
        A = X @ X.mT
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X.mT if wide else X


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) with matrices of one shape in one batch; torch.optim.Muon takes them one by one."""

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.0, dtype: torch.dtype = torch.float32):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.orthogonalize, self.dtype = orthogonalize, dtype                # of the Newton-Schulz steps

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape[-2:], []).append(p)
            for (a, b), params in shapes.items():
                g, state = torch.cat([p.grad.view(-1, a, b) for p in params]), self.state[params[0]]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(g)                  # (n, a, b), kept by the first of the shape
                m = state["momentum"].lerp_(g, 1 - group["momentum"])
                update = self.orthogonalize(g.lerp(m, group["momentum"]), self.dtype)    # Nesterov
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                parts = update.to(g.dtype).split([p.numel() // (a * b) for p in params])
                torch._foreach_add_(params, [u.view_as(p) for u, p in zip(parts, params)], alpha=-group["lr"] * max(1, a / b) ** 0.5)


def make_optimizers(model: Transformer, config: TrainConfig, dtype: torch.dtype = torch.float32) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of blocks, AdamW for the rest."""
    matrices, embed, head = [], [], []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if "embed_tokens" in name or "norm" in name:
            embed.append(p)
        elif "_head" in name:
            head.append(p)
        else:
            matrices.append(p)
    groups = [dict(params=embed, lr=config.lr_embed), dict(params=head, lr=config.lr_head)]
    adam = torch.optim.AdamW([g for g in groups if g["params"]], betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0,
                             fused=model.embed_tokens.weight.is_cuda)
    optimizers = [adam, *([Muon(matrices, config.lr, weight_decay=config.weight_decay, dtype=dtype)] if matrices else [])]
    for group in (g for o in optimizers for g in o.param_groups):
        group["peak_lr"] = group["lr"]
    return optimizers


def restore_optimizers(optimizers: list[torch.optim.Optimizer], saved: list[dict]) -> None:
    """Go on with a checkpoint's momenta, at the learning rates and weight decay of now. Raises UserError."""
    try:
        for optimizer, state in zip(optimizers, saved, strict=True):
            groups = zip(optimizer.state_dict()["param_groups"], state["param_groups"], strict=True)
            optimizer.load_state_dict({"state": state["state"], "param_groups": [now | {"params": then["params"]} for now, then in groups]})
            if not optimizer.state or any(v.ndim and v.shape[-2:] != p.shape[-2:] for p, made in optimizer.state.items() for v in made.values()):
                raise ValueError("none, or another shape")
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise UserError(f"the checkpoint's optimizers are not those of its configuration ({e}); restore a copy or train again") from None


def schedule(step: int, config: TrainConfig) -> float:
    """Share of the peak learning rate at a step (from 0)."""
    warm = min(1.0, (step + 1) / max(config.warmup_steps, 1))
    left = (config.max_steps - step) / max(config.max_steps, 1)
    if config.schedule == "cosine":
        return warm * 0.5 * (1 + math.cos(math.pi * (1 - left)))
    return warm * (min(1.0, left / config.decay_frac) if config.schedule == "linear" else 1.0)


# ---- the device -----------------------------------------------------------------------------------------------------

@dataclass
class Machine:
    """Where it runs, and why."""
    device: torch.device
    dtype: torch.dtype
    compile: bool
    rank: int
    world: int
    lines: list[str]

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype) if self.dtype != torch.float32 else nullcontext()


def _cpu_has_bf16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def choose_machine(device: str | None, dtype: str | None, compile: bool | None) -> Machine:
    """Raises UserError for a device that is not there."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    why = "as asked"
    if device is None:
        mps = torch.backends.mps.is_available()
        device = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
        why = "the fastest here" if device != "cpu" else "no GPU found"
    try:
        if device == "cuda":
            device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        dev = torch.device(device)
        torch.zeros(1, device=dev)
    except (RuntimeError, AssertionError) as e:
        raise UserError(f"--device={device}: not usable here ({str(e).splitlines()[0][:80]}); use --device=cpu or leave it out") from None
    name = torch.cuda.get_device_name(dev) if dev.type == "cuda" else f"{platform.machine()}, {torch.get_num_threads()} threads" if dev.type == "cpu" else ""
    lines = [f"device     {dev} {name} ({why})" + (f", rank {rank} of {world}" if world > 1 else "")]
    native = torch.cuda.get_device_capability(dev) >= (8, 0) if dev.type == "cuda" else dev.type == "cpu" and _cpu_has_bf16()
    reason = "as asked" if dtype else "native here" if native else "no native bfloat16 here"
    kind = getattr(torch, dtype) if dtype else torch.bfloat16 if native else torch.float32
    lines += [f"precision  {str(kind).removeprefix('torch.')} matrix products ({reason}), float32 weights"]
    reason = "as asked" if compile is not None else "pays on CUDA only"
    compile = dev.type == "cuda" if compile is None else compile
    lines += [f"compile    {'on' if compile else 'off'} ({reason})"]
    if dev.type == "cuda":
        torch.cuda.set_device(dev)
        torch.set_float32_matmul_precision("high")
    return Machine(dev, kind, compile, rank, world, lines)


# ---- batches --------------------------------------------------------------------------------------------------------

class Loader:
    """Batches of a step, made in the background while the step before runs. `waited` adds up the seconds it was too late."""

    def __init__(self, mixture, tokens, train_text, config: TrainConfig, knobs: Knobs, machine: Machine):
        self.args, self.tokens = (mixture, (train_text, tokens.val), tokens.tok, knobs), tokens
        self.config, self.machine = config, machine
        self.pool, self.next, self.waited = ThreadPoolExecutor(1), {}, 0.0

    def _make(self, step: int, split: int = 0, n_rows: int = 0) -> list[dict]:
        mixture, text, tok, knobs = self.args
        c, m = self.config, self.machine
        seed, total = (c.seed, c.batch_size) if split == 0 else (0, n_rows)
        size = min(c.batch_size // (c.grad_accum * m.world), -(-total // m.world))
        batches = []
        for start in range(m.rank * size, total, m.world * size):
            rng = Rng(seed, split, step, range(start, min(start + size, total)), total)
            batch = collate(make_rows(mixture, text[split], rng, tok, c.block_size, knobs), tuple(mixture) if len(mixture) > 1 else ())
            if m.device.type == "cuda":
                batch = {k: v.pin_memory() if torch.is_tensor(v) else v for k, v in batch.items()}
            batches.append(batch)
        return batches

    def _move(self, batches: list[dict]) -> list[dict]:
        return [{k: v.to(self.machine.device, non_blocking=True) if torch.is_tensor(v) else v for k, v in b.items()} for b in batches]

    def __call__(self, step: int) -> list[dict]:
        """The batches of a training step, one a part of --grad_accum."""
        future = self.next.pop(step, None) or self.pool.submit(self._make, step)
        if step + 1 < self.config.max_steps:
            self.next[step + 1] = self.pool.submit(self._make, step + 1)
        began = time.perf_counter()
        batches = future.result()
        self.waited += time.perf_counter() - began
        return self._move(batches)

    def validation(self, n_rows: int) -> list[dict]:
        """The same rows whenever and by whichever run it is asked."""
        return self._move(self._make(0, 1, n_rows))


# ---- the run --------------------------------------------------------------------------------------------------------

class Log:
    """Lines on the screen and objects in log.jsonl, on the first process only."""

    def __init__(self, folder: Path, first: bool):
        self.path, self.first = folder / "log.jsonl", first
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob("ckpt.pt.*.tmp"):                 # by a run that was killed while it saved
                left.unlink()

    def open(self, start: int) -> None:
        """Begin log.jsonl, or go on after the lines of the first `start` steps."""
        if self.first:
            if start and self.path.exists():
                kept = [line for line in self.path.read_text().splitlines() if _step_of(line) <= start]
                with atomic_write(self.path) as f:
                    f.writelines(line.encode() + b"\n" for line in kept)
            self.file = open(self.path, "a" if start else "w", buffering=1)

    def say(self, text: str = "") -> None:
        if self.first:
            print(text, flush=True)

    def write(self, **values) -> None:
        if self.first:
            self.file.write(json.dumps(values) + "\n")


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf                                                # a line cut short by a kill


class Meter:
    """Means of a loss and its figures, summed on the device until they are asked for. A figure is a number of a batch, or a
    sum and its weight, (2,), where batches hold different amounts of it."""

    def __init__(self):
        self.sums = {}

    def add(self, n: float, figures: dict[str, torch.Tensor]) -> None:
        for name, value in figures.items():
            value = value.detach().float()
            pair = value if value.ndim else torch.stack([value * n, torch.full_like(value, n)])
            self.sums[name] = self.sums.get(name, 0) + pair

    def means(self, world: int) -> dict[str, float]:
        """Over all processes; begins anew. One look at the device."""
        packed, names = torch.stack([*self.sums.values()]), list(self.sums)
        if world > 1:
            dist.all_reduce(packed)
        self.sums = {}
        return {name: total / weight for name, (total, weight) in zip(names, packed.tolist()) if weight}


@torch.no_grad()
def evaluate(model, loader: Loader, loss_of, config: TrainConfig, machine: Machine, bytes_per_token: float) -> dict[str, float]:
    """Means over the validation rows: val_loss in nats, val_bpb in bits per byte (None where no token is predicted)."""
    model.eval()
    meter = Meter()
    for batch in loader.validation(config.eval_rows):
        with machine.autocast():
            loss, figures = loss_of(model, batch)
        meter.add(len(batch["inputs"]), {"val_loss": loss, **figures})
    model.train()
    means = meter.means(machine.world)
    means["val_bpb"] = means["token_loss"] / math.log(2) / bytes_per_token if "token_loss" in means else None
    return means


def gradients(model, batches: list[dict], loss_of, params, machine: Machine, meter: Meter, stop: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of a step, the same whatever its parts and processes -> loss, whether any process wants to stop; figures to `meter`."""
    # the normalizer is the whole step's; beside it travels the wish to stop
    shared = torch.stack([sum(b["denom"] for b in batches) / len(batches), torch.full((), float(stop), device=machine.device)])
    if machine.world > 1:
        dist.all_reduce(shared)
    total = torch.zeros((), device=machine.device)
    for batch in batches:
        batch["denom"] = shared[0] / machine.world
        with machine.autocast():
            loss, figures = loss_of(model, batch)
        (loss / len(batches)).backward()
        total += loss.detach() / len(batches)
        meter.add(1.0, figures)
    if machine.world > 1:
        for p in params:
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= machine.world
        dist.all_reduce(total)
        total /= machine.world
    return total, shared[1]


def require_finite(value: float, what: str, step: int, out: Path) -> None:
    """Raise UserError where a number is none."""
    if not math.isfinite(value):
        raise UserError(f"the {what} became {value} by step {step}; the last checkpoint in {out} is kept. Lower --lr, "
                        "or go on from there with --init_from=resume")


def duration(seconds: float) -> str:
    """3661 -> '1h01m', 61 -> '1m01s'."""
    m, s = divmod(max(0, round(seconds)), 60)
    return f"{m // 60}h{m % 60:02d}m" if m >= 60 else f"{m}m{s:02d}s" if m else f"{s}s"


def rate(value: float) -> str:
    """1234567 -> '1.23M'."""
    return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"


class _Stop:
    """The first Ctrl-C or SIGTERM asks to finish the step; the second ends the process at once."""

    def __init__(self):
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self)

    def __call__(self, number, frame):
        if self.asked:
            os._exit(128 + number)
        self.asked = True


def settle(argv: list[str]):
    """Flags, preset and checkpoint -> (train, model, knobs, data configs, checkpoint or None). Raises UserError."""
    train, model, knobs, data, given = parse_flags(argv, __doc__, TrainConfig, ModelConfig, Knobs, DataConfig)
    train.out_dir = train.out_dir or "out/" + train.objective.replace(":", "-").replace(",", "+")
    state = None
    if train.init_from != "scratch":
        folder = Path(train.out_dir if train.init_from == "resume" else train.init_from)
        state = load_checkpoint(folder / "ckpt.pt" if folder.suffix != ".pt" else folder)
    if train.preset is None:
        train.preset = "small" if torch.cuda.is_available() and train.device != "cpu" else "tiny"
    for config in (train, model):                                     # preset first, then what was given
        for f in fields(config):
            if f.name not in given and f.name in PRESETS[train.preset]:
                setattr(config, f.name, PRESETS[train.preset][f.name])
    if state is None:
        model = replace(model, **{k: None for k in ("n_kv_head", "d_ff") if k not in given})
    if state is not None:                                             # what a checkpoint fixes must not be given otherwise
        resume = train.init_from == "resume"
        saved_train, saved_model, saved_knobs, saved_data = checkpoint_configs(state)
        names_of = lambda config: [f.name for f in fields(config)]
        fixed = [(model, saved_model, [f.name for f in fields(model) if f.metadata] + ["vocab_size"]), (data, saved_data, ["tokenizer"])]
        carried = [(train, saved_train, ["block_size"])]
        if resume:
            fixed += [(train, saved_train, ["objective", "preset", "freeze_trunk"]), (knobs, saved_knobs, names_of(knobs))]
            carried = [(train, saved_train, names_of(train)), (data, saved_data, names_of(data))]
        for config, saved, names in fixed:
            for name in names:
                value = getattr(saved, name)
                if name in given and getattr(config, name) != value:
                    raise UserError(f"--{name}={getattr(config, name)}, but the checkpoint has {value}; leave the flag out, "
                                    "or start in another --out_dir, from scratch or from this folder with --init_from")
                setattr(config, name, value)
        for config, saved, names in carried:
            for name in names:
                if name not in given and name not in ("init_from", "out_dir"):
                    setattr(config, name, getattr(saved, name))
    return train, model, knobs, data, state, given


def check_config(c: TrainConfig, m: ModelConfig, given, world: int) -> None:
    """Raise UserError on values that no run can have, and on flags that this one does not read."""
    for name, reader, read in (("replay_rate", "--replay_data", c.replay_data), ("decay_frac", "--schedule=linear", c.schedule == "linear")):
        if name in given and not read:
            raise UserError(f"--{name} is read with {reader} only: add it or leave the flag out")
    if c.batch_size % (c.grad_accum * world):
        raise UserError(f"--batch_size={c.batch_size}: must be a multiple of --grad_accum={c.grad_accum} times {world} processes")
    if m.n_head % m.n_kv_head:
        raise UserError(f"--n_kv_head={m.n_kv_head}: must divide --n_head={m.n_head}")
    if m.head_dim % 2:
        raise UserError(f"--head_dim={m.head_dim}: must be even, for rotary positions")


def with_heads(config: ModelConfig, mixture: dict[str, float], knobs: Knobs) -> ModelConfig:
    """The shape with what the objective adds, and nothing of what another one added."""
    none = {"n_future": 1, "pair_head": False, "detect_head": False, "generator_frac": 0.0}
    return replace(config, **none | OBJECTIVES[next(iter(mixture))].heads(knobs))


def checkpoint_configs(state: dict) -> tuple[TrainConfig, ModelConfig, Knobs, DataConfig]:
    """What a checkpoint says that it is; a stranger's may say anything, so it is checked as flags are. Raises UserError."""
    try:
        kinds = {"train_config": TrainConfig, "model_config": ModelConfig, "knobs": Knobs, "data_config": DataConfig}
        train, model, knobs, data = (kind(**{f.name: state[part][f.name] for f in fields(kind) if f.name in state[part]}) for part, kind in kinds.items())
        tok, mixture = Tokenizer.from_json(state["tokenizer"]), parse_mixture(state["objective"])
        train.objective, data.tokenizer = state["objective"], tok.name
        for config in (train, model, knobs, data):
            check_values(config)
        check_config(train, model, (), 1)
        check_knobs(mixture, knobs, (), train.block_size)
        if model.vocab_size < tok.vocab_size:
            raise UserError(f"it has {model.vocab_size} ids, and its tokenizer {tok.vocab_size}")
    except (TypeError, UserError) as e:
        raise UserError(f"the checkpoint says {e}; restore a copy or train again") from None
    return train, with_heads(model, mixture, knobs), knobs, data


def build(model_config: ModelConfig, state: dict | None, config: TrainConfig, log) -> Transformer:
    """A fresh model, or a checkpoint's weights with what this objective's heads add or drop."""
    torch.manual_seed(config.seed)
    model = Transformer(model_config)
    if state is not None:
        here, saved = model.state_dict(), state["model"]
        fits = {k: v for k, v in saved.items() if k in here and v.shape == here[k].shape}
        if strange := [k for k in here.keys() | saved.keys() if k not in fits and not k.startswith(HEADS)]:
            raise UserError(f"{config.init_from}: the checkpoint's weights are not those of its configuration ({min(strange)}); train again or restore a copy")
        model.load_state_dict(fits, strict=False)
        if config.init_from != "resume":
            log.say(f"weights    from {config.init_from} ({state['objective']}, {state['step']} steps)")
        for what, names in (("new here", here.keys() - fits.keys()), ("left behind", saved.keys() - fits.keys())):
            if names:
                log.say(f"weights    {what}: {', '.join(sorted({k.split('.')[0] for k in names}))}")
    if config.freeze_trunk:
        if state is None:
            raise UserError("--freeze_trunk=True needs --init_from=FOLDER: the trunk of a fresh model has learned nothing")
        for name, p in model.named_parameters():
            p.requires_grad_(name.startswith(HEADS))
        if not any(p.requires_grad for p in model.parameters()):
            raise UserError(f"--freeze_trunk=True: {config.objective} adds no head to train; use it with mtp, nsp, sop or electra")
    return model


def describe(loader: Loader, model: Transformer, config: TrainConfig, machine: Machine) -> list[str]:
    """The lines that a run begins with."""
    mixture, text, tok, knobs = loader.args
    sample = make_rows(mixture, text[0], Rng(config.seed, 0, 0, range(64)), tok, config.block_size, knobs)
    padded = (sample["segment"] == 0).mean()
    asked = (sample["targets"].reshape(64, config.block_size, -1)[..., 0] >= 0).mean()
    c, n = model.config, sum(p.numel() for p in model.parameters())
    return [*machine.lines,
            f"model      {n / 1e6:.2f}M parameters: {c.n_layer} layers, {c.n_embd} wide, {c.n_head} heads, {c.vocab_size} ids (preset {config.preset})",
            f"data       {loader.tokens.about}" + f", {config.replay_rate:.0%} of the rows from {config.replay_data}" * bool(config.replay_data),
            f"objective  {config.objective}: " + (f"{asked:.1%} of the positions are" if asked else "whole rows are") + f" asked for, {padded:.2%} are padding",
            f"run        {config.max_steps} steps of {config.batch_size} rows of {config.block_size}, into {config.out_dir}"]


@dataclass
class Run:
    """What a training run consists of, ready to go on after `start` steps."""
    config: TrainConfig
    machine: Machine
    model: Transformer
    optimizers: list[torch.optim.Optimizer]
    loader: Loader
    loss_of: Callable
    log: Log
    start: int
    before: float            # seconds that earlier parts of the run took
    state: dict              # what a checkpoint holds and training does not change

    def __post_init__(self):
        self.began, self.out = time.perf_counter(), Path(self.config.out_dir)
        self.params = [p for p in self.model.parameters() if p.requires_grad]

    def elapsed(self) -> float:
        return self.before + time.perf_counter() - self.began

    def save(self, step: int) -> None:
        """A checkpoint, by the first process; not one with weights that are no numbers."""
        if self.machine.rank == 0:
            require_finite(torch.stack([p.detach().abs().max() for p in self.params]).max().item(), "largest weight", step, self.out)
            weights = {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers]}
            save_checkpoint(self.out / "ckpt.pt", weights | self.state | {"step": step, "elapsed_s": self.elapsed()})


def prepare(config: TrainConfig, model_config: ModelConfig, knobs: Knobs, data: DataConfig, state: dict | None, given) -> Run:
    """Everything up to the first step. Raises UserError before anything of an earlier run is touched."""
    machine, mixture = choose_machine(config.device, config.dtype, config.compile), parse_mixture(config.objective)
    check_config(config, model_config, given, machine.world)
    check_knobs(mixture, knobs, given, config.block_size)
    if machine.world > 1:
        dist.init_process_group("nccl" if machine.device.type == "cuda" else "gloo", timeout=timedelta(days=1))   # tokenizing takes time
    resume, first = config.init_from == "resume", machine.rank == 0
    start = state["step"] if resume else 0
    if start >= config.max_steps:
        raise UserError(f"this run has done its {start} steps; give a larger --max_steps to go on")
    log = Log(Path(config.out_dir), first)
    if machine.world > 1 and not first:
        dist.barrier()                                               # the first process makes the token cache
    tokens = load_tokens(data, Tokenizer.from_json(state["tokenizer"]) if state else None, log.say)
    train_text, tok = tokens.train, tokens.tok
    if config.replay_data:
        train_text = Replay(train_text, load_tokens(replace(data, data=config.replay_data), tok, log.say).train, config.replay_rate)
    if machine.world > 1 and first:
        dist.barrier()
    check_text(mixture, tokens.train, config.block_size, knobs, tok)

    row = OBJECTIVES[next(iter(mixture))]
    model_config = with_heads(model_config if state else replace(model_config, vocab_size=tok.vocab_size), mixture, knobs)
    model = build(model_config, state, config, log).to(machine.device)
    optimizers = make_optimizers(model, config, machine.dtype)
    if resume:
        restore_optimizers(optimizers, state["optimizers"])
    if machine.compile:
        compile_model(model)
        optimizers[-1].orthogonalize = torch.compile(orthogonalize)
    loader = Loader(mixture, tokens, train_text, config, knobs, machine)
    for line in describe(loader, model, config, machine):
        log.say(line)
    if not resume and (Path(config.out_dir) / "ckpt.pt").exists():
        log.say(f"replaces   the run in {config.out_dir}; another --out_dir keeps it, --init_from=resume goes on with it")
    log.open(start)                                                  # not before all is known to be right
    constant = {"objective": config.objective, "tokenizer": tok.to_json(), "model_config": asdict(model_config), "knobs": asdict(knobs),
                "train_config": asdict(config), "data_config": asdict(data)}
    return Run(config, machine, model, optimizers, loader, lambda model, batch: row.loss(model, batch, knobs, tok), log, start,
               state["elapsed_s"] if resume else 0.0, constant)


def train(run: Run) -> None:
    """The steps, with their log, evaluations and checkpoints; at the end one read-out. Raises UserError on a loss that is no number."""
    config, machine, model, log, params = run.config, run.machine, run.model, run.log, run.params
    tokens_a_step, flops = config.batch_size * config.block_size, model.flops_per_token(config.block_size)
    gpu = torch.cuda.get_device_name(machine.device) if machine.device.type == "cuda" else ""
    peak = next((v * 1e12 for k, v in PEAK_TFLOPS.items() if k in gpu), None)
    stop, width = _Stop(), len(str(config.max_steps))
    recent, meter, since, logged = torch.zeros((), device=machine.device), Meter(), time.perf_counter(), run.start
    careful = machine.device.type == "cpu"                           # looking at a number costs nothing here

    for step in range(run.start, config.max_steps):
        scale = schedule(step, config)
        for group in (g for o in run.optimizers for g in o.param_groups):
            group["lr"] = group["peak_lr"] * scale
        total, stop_all = gradients(model, run.loader(step), run.loss_of, params, machine, meter, stop.asked)
        if config.grad_clip:
            torch.nn.utils.clip_grad_norm_([p for p in params if p.grad is not None], config.grad_clip)
        for optimizer in run.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recent += total
        done, last = step + 1, step + 1 == config.max_steps
        look = done % config.log_every == 0 or last
        stopping = (careful or look) and stop_all.item() > 0 or machine.world == 1 and stop.asked
        saving = done % config.save_every == 0 or last or stopping
        if careful or look or saving:
            require_finite(recent.item(), "loss", done, run.out)
        if look:
            seconds = (time.perf_counter() - since) / (done - logged)
            mean, tokens_s = recent.item() / (done - logged), tokens_a_step / seconds
            shown = {k: round(v, 4) for k, v in meter.means(machine.world).items() if k != "token_loss"}
            mfu = {"mfu": round(flops * tokens_s / machine.world / peak, 4)} if peak else {}
            log.write(step=done, loss=mean, lr=config.lr * scale, ms=seconds * 1e3, tokens_per_s=tokens_s, **mfu, **shown)
            log.say(f"step {done:0{width}}/{config.max_steps} | loss {mean:.4f} | lr {config.lr * scale:.1e} | {seconds * 1e3:.1f} ms"
                    f" | {rate(tokens_s)} tok/s"
                    + (f" | mfu {mfu['mfu']:.1%}" if mfu else "") + f" | eta {duration(seconds * (config.max_steps - done))}"
                    + "".join(f" | {k} {v:.3f}" for k, v in shown.items()))
            recent.zero_()
            since, logged = time.perf_counter(), done
        paused = time.perf_counter()
        if done % config.eval_every == 0 or last:
            means = evaluate(model, run.loader, run.loss_of, config, machine, run.loader.tokens.bytes_per_token)
            require_finite(means["val_loss"], "validation loss", done, run.out)
            log.write(step=done, **means, elapsed_s=run.elapsed())
            more = "".join(f", {k} {v:.3f}" for k, v in means.items() if k not in ("val_loss", "val_bpb", "token_loss"))
            token = means.get("token_loss", means["val_loss"])       # bits are of the tokens asked for, not of what else is in the loss
            bits = f", of them the tokens' {token:.4f}" * (abs(token - means["val_loss"]) > 1e-4)
            bits += f" ({means['val_bpb']:.3f} bits per byte)" if means["val_bpb"] is not None else ""
            log.say(f"eval {done:0{width}}/{config.max_steps} | val loss {means['val_loss']:.4f} nats{bits}{more} | {duration(run.elapsed())} elapsed")
        if saving:
            run.save(done)
        since += time.perf_counter() - paused                        # a step's time is its own
        if stopping:
            log.say(f"stopped after step {done}, saved. Go on: python train.py --init_from=resume --out_dir={config.out_dir}")
            break
    waited = run.loader.waited / max(run.elapsed() - run.before, 1e-9)
    log.say(f"data       the loop waited for batches {waited:.2%} of the time")
    log.write(step=done, data_wait_share=waited)
    if machine.rank == 0 and done == config.max_steps:
        from sample import showcase
        log.say()
        showcase(run.out, run.loader.tokens, log.say)
    if machine.world > 1:
        dist.destroy_process_group()


def main(argv: list[str]) -> None:
    train(prepare(*settle(argv)))


if __name__ == "__main__":
    cli(main, "--batch_size or --block_size, raise --grad_accum, or take a smaller --preset")
