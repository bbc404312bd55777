"""config.py: flags from dataclasses, one-line errors, atomic file writes.

A dataclass is a section of flags. Each field declares its type, default, help and interval:

    >>> @dataclasses.dataclass
    ... class Demo:
    ...     rate: float = flag(0.15, "share of tokens masked", above=0, below=1)
    >>> build(Demo, parse_flags(["--rate=0.3"], "", Demo))
    Demo(rate=0.3)

This is safety code, kept off the reading path: nobody needs it to learn how a model is trained.
"""

import argparse
import contextlib
import dataclasses
import difflib
import math
import operator
import os
import re
import shutil
import signal
import sys
import typing
import unicodedata
from functools import partial
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# fmt: off
# The limits that a field's metadata may set on its value: in words, and as a comparison.
LIMITS = {
    "min":   ("at least", operator.ge),
    "above": ("above",    operator.gt),
    "max":   ("at most",  operator.le),
    "below": ("below",    operator.lt),
}
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
SYNONYMS = {  # what other programs call our flags
    "learning_rate": "lr", "max_lr": "lr", "max_iters": "max_steps", "n_iters": "max_steps",
    "n_steps": "max_steps", "num_steps": "max_steps", "steps": "max_steps", "batch": "batch_size",
    "context_length": "block_size", "seq_len": "block_size", "d_model": "n_embd",
    "hidden_size": "n_embd", "dataset": "data", "input": "data", "corpus": "data",
    "out": "out_dir", "output": "out_dir", "resume": "init_from", "load": "init_from",
    "eval_interval": "eval_every",
    # And our objectives.
    "gpt": "clm", "bert": "mlm", "roberta": "mlm", "t5": "span", "albert": "sop",
    "mdlm": "diffusion", "llada": "diffusion", "contriever": "contrastive",
}
# fmt: on
# Flags in which a leading ~ is the home folder: shells do not expand --data=~/text.txt.
PATHS = ("data", "replay_data", "out_dir", "cache_dir", "init_from", "svg")
UNFINISHED = ".unfinished"  # suffix of files that are still being written


class UserError(ValueError):
    """A mistake the user can fix: the command line prints it as one line, without a traceback."""


def visible(text: str) -> str:
    r"""Make untrusted text safe to print: it cannot move the cursor or recolor the terminal.

    >>> visible("\x1b[31mred,\n\tas it was")
    '·[31mred,\n\tas it was'
    """
    return "".join(c if c.isprintable() or is_harmless(c) else "·" for c in text)


def is_harmless(c: str) -> bool:
    """Whether str.isprintable() needlessly rejects `c`: spaces of any width, joiners in words."""
    return c in "\n\t\u00ad\u200c\u200d" or unicodedata.category(c) == "Zs"


# ---- flags -------------------------------------------------------------------------------------


def flag(default, help: str, choices: tuple = (), **interval):
    """A field that is also a command-line flag. `interval` is any of min, max, above and below."""
    assert interval.keys() <= LIMITS.keys(), f"interval: any of {list(LIMITS)}, got {interval}"
    metadata = {"help": help, "choices": choices, **interval}
    return dataclasses.field(default=default, metadata=metadata)


def flags_of(cls) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(cls) if "help" in field.metadata]


def _types(field) -> tuple[type, ...]:
    """The types that a value may have: `int | None` gives (int, NoneType)."""
    return typing.get_args(field.type) or (field.type,)


def _interval(field, below=math.inf) -> str:
    """The interval in words, such as "above 0 and below 1", or "". Only limits less than `below`
    are named: larger ones guard against overflow, and users need not see them."""
    limits = [key for key in LIMITS if field.metadata.get(key, math.inf) < below]
    return " and ".join(f"{LIMITS[key][0]} {field.metadata[key]}" for key in limits)


def _check(field, value) -> None:
    """Raise UserError if a field's type, choices or interval forbid the value."""
    types = _types(field)
    if value is None and type(None) in types:
        return
    if type(value) is int and abs(value) >= 1 << 63:
        raise UserError(f"--{field.name}: the number is too large")
    shown = f"--{field.name}={value!r:.60}"
    if type(value) not in types and not (float in types and type(value) is int):
        raise UserError(f"{shown}: must be {KINDS[types[0]]}")

    choices = field.metadata.get("choices")
    if choices and value not in choices:
        raise UserError(f"{shown}: must be {' or '.join(choices)}")
    if isinstance(value, str):
        return
    if not math.isfinite(value):
        raise UserError(f"{shown}: must be a finite number")
    limits = [key for key in LIMITS if key in field.metadata]
    if not all(LIMITS[key][1](value, field.metadata[key]) for key in limits):
        raise UserError(f"{shown}: must be {_interval(field)}")


def build(cls, given: dict):
    """An instance of a dataclass: its defaults, overridden by the given values.

    Keys that are not fields are ignored, so that one dict of flags can serve several classes.
    Raises UserError for an illegal value.
    """
    numbers = {name: v.item() for name, v in given.items() if getattr(v, "shape", None) == ()}
    given = given | numbers  # numpy scalars become Python numbers
    fields = [field for field in dataclasses.fields(cls) if field.name in given]
    for field in fields:
        _check(field, given[field.name])
    return cls(**{field.name: given[field.name] for field in fields})


def suggest(word: str, known) -> str:
    """A question that suggests the word the user probably meant, or "".

    >>> suggest("--learning_rate", ["--fim_rate", "--lr"]), suggest("fmi", ["clm", "fim"])
    ('did you mean --lr?', 'did you mean fim?')
    >>> suggest("--obj", ["--objective"]), suggest("--leraning_rate", ["--lr"])
    ('did you mean --objective?', 'did you mean --lr?')
    >>> suggest("--dropout", ["--rope_theta"])
    ''
    """
    bare = word.lstrip("-").replace("-", "_").lower()
    own = {name.lstrip("-"): name for name in known}
    names = own | {other: own[name] for other, name in SYNONYMS.items() if name in own}
    same = [name for name in names if name == bare]
    swapped = [name for name in own if sorted(name) == sorted(bare)]  # short typos, such as fmi
    longer = [name for name in own if len(bare) > 2 and name.startswith(bare)]
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    close = [name.lstrip("-") for name in close] or difflib.get_close_matches(bare, names, 1, 0.9)
    found = same + swapped + longer + close
    return f"did you mean {names[found[0]]}?" if found else ""


def comma_list(flag: str, text: str, legal) -> list[str]:
    """The names in a flag's text. Raises UserError if one is not in `legal` or appears twice."""
    names = text.split(",")
    for name in names:
        if name not in legal:
            hint = suggest(name, legal) or f"choose from {', '.join(legal)}"
            raise UserError(f"--{flag}={text}: {name!r} is not known; {hint}")
        if names.count(name) > 1:
            raise UserError(f"--{flag}={text}: {name} appears twice; name it once")
    return names


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(
            message.replace("expected one argument", "needs a value; write --name=value")
        )


def parse_flags(
    argv: list[str], doc: str | None, *classes, positional: str | None = None, defaults=None
) -> dict:
    """The given flags as {name: value}. Every field with a help text is a flag, `--name=value`.

    `positional` names one optional positional argument. For --help, `doc` is the script's
    docstring, and `defaults` maps names to what is shown instead of a field's own default. Raises
    UserError for anything that is not a flag; `build` checks the values.
    """
    fields = {f"--{field.name}": field for cls in classes for field in flags_of(cls)}
    switches = [name for name, field in fields.items() if bool in _types(field)]
    words = [f"{word}=true" if word in switches else word for word in argv]
    if positional:  # it may also be written as a flag, as in train.py
        words = [
            word.removeprefix(f"--{positional}=") for word in words if word != f"--{positional}"
        ]
    given, unknown = _parser(doc or "", classes, positional, defaults or {}).parse_known_args(words)
    for word in unknown:
        if not word.startswith("-"):
            raise UserError(f"unexpected {word!r}; flags are written --name=value")
        name = word.split("=")[0]
        raise UserError(f"unknown flag {name}; {suggest(name, fields) or 'see --help'}")
    return vars(given)


def _parser(doc: str, classes, positional: str | None, defaults) -> argparse.ArgumentParser:
    """The parser. Its help page shows the first paragraph of `doc`, a section of flags for each
    dataclass, and the commands in `doc`."""
    commands = re.findall(r"(?m)^ {4}(?:python|torchrun) .*$", doc)
    parser = _Parser(
        usage=f"python %(prog)s {f'[{positional}] ' if positional else ''}[--flag=value ...]",
        description=doc.split("\n\n")[0],
        epilog="\n".join(["examples:", *commands]) if commands else None,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, width=100),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    if positional:
        parser.add_argument(positional, nargs="?")
    for cls in classes:
        about = cls.__doc__.splitlines()[0]
        section = parser.add_argument_group(cls.__name__.removesuffix("Config").lower(), about)
        for field in flags_of(cls):
            kind = "|".join(field.metadata.get("choices", ())) or _types(field)[0].__name__.upper()
            words = field.metadata["help"]
            if interval := _interval(field, below=1 << 20):
                words += f" ({interval})"
            default = defaults.get(field.name, field.default)
            if default not in ("", None):
                words += f" [{default}]"
            words = words.replace("%", "%%")
            typed = partial(_value, field)
            section.add_argument(f"--{field.name}", type=typed, metavar=kind, help=words)
    return parser


def _value(field, text: str):
    """A flag's text as the flag's type; failing that, the text itself, which _check will reject."""
    kind = _types(field)[0]
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if field.name in PATHS:
        return os.path.expanduser(text)
    with contextlib.suppress(ValueError):
        return kind(text)
    return text


# ---- files -------------------------------------------------------------------------------------


@contextlib.contextmanager
def atomic_write(path, keep: str | None = None, also: Path | None = None):
    """Write a file whole or not at all: a temporary file, fsync, rename. An existing file at `path`
    is never missing, even for a moment; `keep` is a name under which the old one is kept, and
    `also` a second path for the new one, which it gets first. The temporary name is fixed, so
    processes that may write the same file hold a lock (lock_folder)."""
    path = Path(path)
    if path.is_symlink():
        path = path.resolve()  # keep the link, replace its target
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a regular file; name another")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + UNFINISHED)
    temporary.unlink(missing_ok=True)  # left by a process that was killed
    try:
        with open(temporary, "x+b") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        if keep and path.exists():
            keep_under(path, path.with_name(keep))
        if also:
            keep_under(temporary, also)
        os.replace(temporary, path)
    except BaseException as e:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(e, OSError) and e.filename is None:
            e.filename = str(path)
        raise


def keep_under(path: Path, kept: Path) -> None:
    """Give a file a second name, under which it survives when its first name is reused."""
    second = kept.with_name(kept.name + UNFINISHED)
    second.unlink(missing_ok=True)
    try:
        os.link(path, second)
    except OSError:  # a file system without links
        shutil.copyfile(path, second)
    os.replace(second, kept)
    second.unlink(missing_ok=True)  # if both were the same file already, replace did nothing


@contextlib.contextmanager
def lock_folder(folder, name: str = "run", waiting=None):
    """Keep other processes out of a folder while the `with` block runs. If another one is in it,
    raise UserError, or, with `waiting` (a function that shows the user a line), wait for it. The
    operating system drops the lock when the process ends, however it ends. Where there are no
    locks, as on Windows, run one process per folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f".{name}.lock", "a") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is None:
                raise UserError(f"{folder} is in use by another run; name another folder") from None
            waiting(f"waiting for another process, which is writing in {folder}")
            with contextlib.suppress(OSError):
                fcntl.flock(f, fcntl.LOCK_EX)
        except (AttributeError, OSError):  # no fcntl on Windows, no locks on some file systems
            pass
        yield


# ---- the command line --------------------------------------------------------------------------


def is_out_of_memory(e: BaseException) -> bool:
    """Whether memory ran out, as Python, torch and numpy each say it. ("returned NULL without" is
    Python's message when numpy loses its own error on the way. A process that makes rows is killed
    if memory runs out.)"""
    words = "out of memory|allocate memory|not enough memory|ALLOC_FAILED|returned NULL without"
    words += "|killed by signal: Killed"
    said = isinstance(e, RuntimeError | SystemError) and re.search(words, str(e))
    return isinstance(e, MemoryError) or bool(said)


def silence_stdout() -> None:
    """Standard output is closed or full: drop what is still buffered and all later output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_command(main, lower: str = "--block_size") -> None:
    """Run a script's main(argv). An error the user can fix ends in one line, never in a traceback.

    Exit codes: 0; 1 for an error; 128 + the number of a signal, so 141 if the reader of a pipe is
    gone, as with `| head`. `lower` names the flags that save memory.
    """

    def interrupt(number, frame):
        raise KeyboardInterrupt(number)  # as it propagates, temporary files are removed

    signal.signal(signal.SIGTERM, interrupt)
    if sys.stdout is None:  # closed by whoever started this
        sys.stdout = open(os.devnull, "w")
    try:
        # A terminal may not know every character. A pipe gets each line at once.
        sys.stdout.reconfigure(errors="replace", line_buffering=True)
        main(sys.argv[1:])
        sys.stdout.flush()
        return
    except KeyboardInterrupt as e:
        line = "stopped by a signal; what was saved before is intact"
        code = 128 + (e.args[0] if e.args else signal.SIGINT)
    except BrokenPipeError:
        line = ""
        code = 128 + 13  # SIGPIPE
    except Exception as e:
        code = 1
        if isinstance(e, UserError):
            line = f"error: {e}"
        elif is_out_of_memory(e):
            line = f"error: out of memory; what was saved before is intact. Lower {lower}"
        elif isinstance(e, OSError):
            where = e.filename or "while writing"
            line = f"error: {e.strerror or e}: {where}; what was saved before is intact"
        else:  # a bug deserves its traceback
            raise
    finally:  # while Python exits, there is nothing left to stop
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    silence_stdout()
    if line:
        print(visible(line).replace("\n", " "), file=sys.stderr)
    sys.exit(code)
