"""settings.py: a run's settings: flags, else a checkpoint's values, else the defaults."""

from dataclasses import dataclass, field

import torch

from checkpoint import Checkpoint, open_checkpoint
from config import UserError, build, flag, flags_of, parse_flags
from corpus import DataConfig
from mixture import check_knobs, check_shape, first_member, parse_mixture, with_heads
from model import ModelConfig
from objectives import OBJECTIVES, Knobs

STEPS = [objective.steps for objective in OBJECTIVES.values()]
RATE = {"min": 0, "below": 1e18}  # the interval of a learning rate
# fmt: off
# micro: for a laptop's CPU; tiny: for compare.py; small: for one GPU; gpt2: GPT-2's shape (131M)
PRESETS = {
    "micro": dict(n_layer=3, n_head=4, head_dim=32, n_embd=128, d_ff=256, lr_unembed=0.012,
                  block_size=128, batch_size=32, max_steps=1400, generator_frac=0.125),
    "tiny":  dict(n_layer=4, n_head=4, head_dim=32, n_embd=128, lr_unembed=0.012,
                  block_size=128, batch_size=32, max_steps=1500),
    "small": dict(n_layer=8, n_head=8, head_dim=64, n_embd=512, lr_unembed=0.004,
                  block_size=512, batch_size=64, max_steps=1000),
    "gpt2":  dict(n_layer=12, n_head=12, head_dim=64, n_embd=768, lr_unembed=0.004, tied=True,
                  block_size=1024, batch_size=64, max_steps=5000),
}
# fmt: on


@dataclass
class TrainConfig:
    """the run; in brackets the default, or one for each preset: micro | tiny | small | gpt2"""

    objective: str = flag("clm", f"{', '.join(OBJECTIVES)}, or a mixture: clm:0.5,ul2:0.5")
    preset: str | None = flag(None, "size; automatic: small on CUDA, else micro", tuple(PRESETS))
    out_dir: str | None = flag(None, "folder of the run; automatic: out/OBJECTIVE")
    overwrite: bool = flag(False, "replace the run in out_dir")
    init_from: str = flag("scratch", "scratch, resume (continue out_dir), or a run to start from")
    freeze_trunk: bool = flag(False, "train only the heads that the objective has")
    block_size: int = flag(
        128, "T, positions in a row; default halved for nsp, sop, contrastive", min=8, max=1 << 20
    )
    batch_size: int = flag(
        32, "rows per step, in total; default doubled for nsp, sop, contrastive", min=1, max=1 << 20
    )
    grad_accum: int = flag(1, "micro-batches per step, to save memory", min=1)
    max_steps: int = flag(
        1500, f"steps; objectives multiply this default by {min(STEPS)} to {max(STEPS)}", min=1
    )
    lr: float | None = flag(None, "learning rate of Muon; automatic: by objective", **RATE)
    lr_embed: float = flag(0.01, "AdamW's rate: embedding, norms, short_conv, second_text", **RATE)
    lr_unembed: float = flag(0.012, "learning rate of the unembedding (AdamW)", **RATE)
    lr_binary: float | None = flag(None, "rate of one-logit heads; automatic: by objective", **RATE)
    weight_decay: float = flag(0.0, "for Muon: p *= 1 - lr · weight_decay", **RATE)
    warmup_steps: int = flag(10, "steps over which the learning rates rise from zero", min=0)
    decay_frac: float = flag(
        0.7, "share of the run, at its end, with falling rates; 0: constant", min=0, max=1
    )
    grad_clip: float = flag(1.0, "clip the gradient to this norm; 0: no clipping", min=0)
    seed: int = flag(1, "seed of initialization and rows", min=0, below=1 << 31)
    # Not a flag: how many steps trained the weights that this run starts from. Rows are drawn by
    # step number, so counting on from there draws different rows.
    steps_before: int = field(default=0, metadata={"min": 0})
    # Not flags either: what a resumed run has read so far, perhaps with other batch sizes.
    positions_before: int = field(default=0, metadata={"min": 0})
    epochs_before: float = field(default=0.0, metadata={"min": 0})
    replay_data: str = flag("", "an older corpus to mix in, row by row; empty: none")
    replay_rate: float = flag(0.05, "share of the rows drawn from --replay_data", above=0, below=1)
    log_every: int = flag(10, "steps between log lines", min=1)
    eval_every: int = flag(200, "steps between evaluations", min=1)
    eval_rows: int = flag(128, "validation rows per evaluation", min=1)
    save_every: int = flag(200, "steps between checkpoints", min=1)
    device: str | None = flag(None, "cpu, cuda, cuda:N or mps; automatic: the fastest available")
    dtype: str | None = flag(None, "matrix products; automatic: by device", ("float32", "bfloat16"))
    compile: bool | None = flag(
        None, "torch.compile; automatic: on CUDA, and in long runs on a CPU"
    )


# ---- from flags to settings ----------------------------------------------------------------------


@dataclass
class Settings:
    """Everything that decides what a run does."""

    train: TrainConfig
    model: ModelConfig
    knobs: Knobs
    data: DataConfig
    mixture: dict[str, float]
    checkpoint: Checkpoint | None  # what the run continues or starts from
    given: dict  # the flags that the user typed


def settle(argv: list[str], about: str = "") -> Settings:
    """Turn command-line words into settings. A value comes from the flags, else from the
    checkpoint, else from the objective's row in the table, else from the preset, else from the
    field's default. Raises UserError before it touches anything of an earlier run."""
    classes = (TrainConfig, ModelConfig, Knobs, DataConfig)
    given = parse_flags(argv, about, *classes, defaults=defaults_by_preset(*classes))
    # TrainConfig is built three times: to find the checkpoint, then the preset, then all values.
    train = build(TrainConfig, given)
    for name in ("out_dir", "init_from", "cache_dir"):
        if given.get(name) == "":
            raise UserError(f"--{name}= is empty; give a value or leave it out")
    folder = train.out_dir or "out/" + train.objective.replace(":", "-").replace(",", "+")

    checkpoint = None
    saved = {}
    if train.init_from != "scratch":
        resume = train.init_from == "resume"
        checkpoint = open_checkpoint(folder if resume else train.init_from)
        saved = carried_over(checkpoint, resume)
        refuse_changes(given, checkpoint, resume)

    train = build(TrainConfig, saved | given)
    if train.freeze_trunk and checkpoint is None:
        raise UserError("--freeze_trunk=True needs a trained trunk: add --init_from=FOLDER")
    if "replay_rate" in given and not train.replay_data:
        raise UserError("--replay_rate needs --replay_data: add that, or leave --replay_rate out")
    if train.overwrite and train.init_from == "resume":
        raise UserError(
            "--overwrite replaces a run, --init_from=resume continues it: leave one out"
        )

    on_gpu = torch.cuda.is_available() and train.device != "cpu"
    preset = train.preset or ("small" if on_gpu else "micro")
    defaults = defaults_of(preset, train.objective, checkpoint, given)
    values = defaults | saved | given | {"out_dir": folder}  # the later dict wins
    train = build(TrainConfig, values)
    knobs = build(Knobs, values)
    data = build(DataConfig, values)
    model = checkpoint.model_config if checkpoint else build(ModelConfig, values)
    mixture = parse_mixture(train.objective)
    check_knobs(mixture, knobs, given, train.block_size)
    check_shape(model)
    model = with_heads(model, mixture, knobs)
    check_rates(given, train, model)
    return Settings(train, model, knobs, data, mixture, checkpoint, given)


def check_rates(given: dict, train: TrainConfig, model: ModelConfig) -> None:
    """Raise UserError if a rate was given for a one-logit head or an unembedding that is not
    trained."""
    first = first_member(parse_mixture(train.objective))
    if "lr_binary" in given and not any(head.endswith("_head") for head in first.heads):
        raise UserError(f"--lr_binary has no effect with {train.objective}: remove it")
    if "lr_unembed" in given and (train.freeze_trunk or not first.unembeds):
        cause = "--freeze_trunk" if train.freeze_trunk else train.objective
        raise UserError(f"--lr_unembed has no effect with {cause}: remove it")
    if "lr_unembed" in given and model.tied:
        raise UserError("--lr_unembed has no effect with --tied=True (--lr_embed has): remove it")


def defaults_by_preset(*classes) -> dict[str, str]:
    """What --help shows for the fields that presets set, such as "3 | 4 | 8 | 12"."""
    fields = {field.name: field for cls in classes for field in flags_of(cls)}
    shown = {}
    for name in set().union(*PRESETS.values()):
        values = [preset.get(name, fields[name].default) for preset in PRESETS.values()]
        shown[name] = " | ".join("automatic" if value is None else str(value) for value in values)
    return shown


def defaults_of(preset: str, objective: str, checkpoint: Checkpoint | None, given: dict) -> dict:
    """The preset's values, and those of the objective's entry in the table (for a mixture, the
    entry of its first member, but the most steps of any). With split_rows = k (nsp, sop,
    contrastive), a batch has k times the preset's rows, each T/k long. With a checkpoint, T is its
    block_size times its own objective's k."""
    mixture = parse_mixture(objective)
    first = first_member(mixture)
    sizes = dict(PRESETS[preset])
    if given.get("n_embd", sizes["n_embd"]) != sizes["n_embd"]:  # at another width, the usual d_ff
        sizes.pop("d_ff", None)
    T = sizes["block_size"]
    if checkpoint is not None:
        T = checkpoint.block_size * first_member(checkpoint.mixture).split_rows
    return sizes | {
        "preset": preset,
        "block_size": max(T // first.split_rows, 8),
        "batch_size": sizes["batch_size"] * first.split_rows,
        "max_steps": round(sizes["max_steps"] * max(OBJECTIVES[name].steps for name in mixture)),
        "lr": first.lr,
        "lr_binary": first.lr_binary,
    }


def carried_over(checkpoint: Checkpoint, resume: bool) -> dict:
    """The checkpoint's values that hold unless a flag says otherwise. They never include where
    files are written: a checkpoint may come from anybody."""
    state = checkpoint.state
    saved = {**state["train_config"], **state["knobs"], **state["data_config"]}
    if resume:
        kept = saved.keys() - {"init_from", "out_dir", "overwrite", "cache_dir"}
    else:
        before = build(TrainConfig, state["train_config"])
        saved["steps_before"] = before.steps_before + state["step"]
        heads = {name for objective in OBJECTIVES.values() for name in objective.heads}
        kept = saved.keys() & ({"data", "invalid_utf8", "preset", "steps_before"} | heads)
    return {name: saved[name] for name in kept}


def refuse_changes(given: dict, checkpoint: Checkpoint, resume: bool) -> None:
    """Raise UserError if a flag changes what the checkpoint fixes (repeating it is allowed)."""
    fixed = {f.name: getattr(checkpoint.model_config, f.name) for f in flags_of(ModelConfig)}
    fixed["tokenizer"] = checkpoint.tok.name
    names = ["preset"]
    if resume:
        names = ["preset", "objective", "freeze_trunk"]
        fixed |= vars(checkpoint.knobs)
    before = build(TrainConfig, checkpoint.state["train_config"])
    fixed |= {name: getattr(before, name) for name in names}
    for name, value in given.items():
        if name in fixed and fixed[name] != value:
            raise UserError(f"--{name}={value}, but the checkpoint has {fixed[name]}; leave it out")
