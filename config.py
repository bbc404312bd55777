"""config.py: flags from dataclasses, one-line errors, files written whole.

A dataclass is a section of flags. Each field holds its type, default, help and interval, once:

    >>> @dataclasses.dataclass
    ... class Demo:
    ...     rate: float = flag(0.15, "share of tokens masked", above=0, below=1)
    >>> build(Demo, parse_flags(["--rate=0.3"], "", Demo))
    Demo(rate=0.3)

This is the safety work, kept off the reading path: nobody needs it to learn how a model is trained.
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
# What the metadata of a field may say about its value: in words, and as a comparison.
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
UNFINISHED = ".unfinished"  # how the names of files end that are being written


class UserError(ValueError):
    """A mistake the user can mend: the command line prints it as one line, without a traceback."""


def visible(text: str) -> str:
    r"""Text from anywhere, made unable to move the cursor or recolor the terminal.

    >>> visible("\x1b[31mred,\n\tas it was")
    '·[31mred,\n\tas it was'
    """
    return "".join(c if c.isprintable() or is_harmless(c) else "·" for c in text)


def is_harmless(c: str) -> bool:
    """Blanks of all widths, and joiners inside words, which Python does not call printable."""
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
    """In words, such as "above 0 and below 1", or "". Only limits below `below` are named: larger
    ones guard against overflow, and nobody reads them."""
    limits = [key for key in LIMITS if field.metadata.get(key, math.inf) < below]
    return " and ".join(f"{LIMITS[key][0]} {field.metadata[key]}" for key in limits)


def _check(field, value) -> None:
    """Raise UserError where the type, the choices or the interval of a field forbid a value."""
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
    """An instance of a dataclass: its defaults, and over them the values given.

    Keys that are not fields are passed over, so that one dict of flags serves several classes.
    Raises UserError for an illegal value.
    """
    numbers = {name: v.item() for name, v in given.items() if getattr(v, "shape", None) == ()}
    given = given | numbers  # Python's, where they were numpy's
    fields = [field for field in dataclasses.fields(cls) if field.name in given]
    for field in fields:
        _check(field, given[field.name])
    return cls(**{field.name: given[field.name] for field in fields})


def suggest(word: str, known) -> str:
    """A question that names the word that was probably meant, or "".

    >>> suggest("--learning_rate", ["--fim_rate", "--lr"]), suggest("fmi", ["clm", "fim"])
    ('did you mean --lr?', 'did you mean fim?')
    >>> suggest("--obj", ["--objective"])
    'did you mean --objective?'
    >>> suggest("--dropout", ["--rope_theta"])
    ''
    """
    bare = word.lstrip("-").replace("-", "_").lower()
    same = [name for name in known if name.lstrip("-") in (bare, SYNONYMS.get(bare))]
    swapped = [name for name in known if sorted(name) == sorted(word)]  # short words, as fmi
    longer = [name for name in known if len(bare) > 2 and name.startswith(word)]
    found = same + swapped + longer + difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    return f"did you mean {found[0]}?" if found else ""


def comma_list(flag: str, text: str, legal) -> list[str]:
    """The names in a flag's text. Raises UserError where one is not of `legal` or stands twice."""
    names = text.split(",")
    for name in names:
        if name not in legal:
            hint = suggest(name, legal) or f"choose from {', '.join(legal)}"
            raise UserError(f"--{flag}={text}: {name!r} is not known; {hint}")
        if names.count(name) > 1:
            raise UserError(f"--{flag}={text}: {name} stands twice; name it once")
    return names


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(
            message.replace("expected one argument", "has no value; write --name=value")
        )


def parse_flags(
    argv: list[str], doc: str | None, *classes, positional: str | None = None, defaults=None
) -> dict:
    """The flags that were given, `--name=value` for every field with a help: {name: value}.

    `positional` names one free word, which may be left out. For --help: `doc` is the script's
    docstring, `defaults` says by name what to show in place of fields' own defaults. Raises
    UserError for what is no flag; `build` checks the values.
    """
    fields = {f"--{field.name}": field for cls in classes for field in flags_of(cls)}
    switches = [name for name, field in fields.items() if bool in _types(field)]
    words = [f"{word}=true" if word in switches else word for word in argv]
    if positional:  # its name may be given, as with train.py
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
    """Its help page: the script's first paragraph, its flags in a section for each dataclass, its
    commands."""
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
    """The value that a flag's text says; else the text itself, which _check will refuse."""
    kind = _types(field)[0]
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    with contextlib.suppress(ValueError):
        return kind(text)
    return text


# ---- files -------------------------------------------------------------------------------------


@contextlib.contextmanager
def atomic_write(path, keep: str | None = None):
    """Write a file whole or not at all: a temporary file, fsync, rename. At no moment is there no
    file at `path`. `keep` names where the old one stays. The temporary name is always the same, so
    processes that may write one file hold a lock (lock_folder)."""
    path = Path(path)
    if path.is_symlink():
        path = path.resolve()  # the link stays
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a file that can be replaced; name another")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + UNFINISHED)
    temporary.unlink(missing_ok=True)  # of a process that was killed
    try:
        with open(temporary, "x+b") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        if keep and path.exists():
            keep_under(path, path.with_name(keep))
        os.replace(temporary, path)
    except BaseException as e:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(e, OSError) and e.filename is None:
            e.filename = str(path)
        raise


def keep_under(path: Path, kept: Path) -> None:
    """Give a file a second name, so that it is kept when it loses its first."""
    second = kept.with_name(kept.name + UNFINISHED)
    second.unlink(missing_ok=True)
    try:
        os.link(path, second)
    except OSError:  # a file system without links
        shutil.copyfile(path, second)
    os.replace(second, kept)
    second.unlink(missing_ok=True)  # where both named one file already, rename does nothing


@contextlib.contextmanager
def lock_folder(folder, name: str = "run", wait: bool = False):
    """Keep others out of a folder while the `with` block runs. Raises UserError where another is in
    it, unless `wait`. The operating system's lock ends with its process, however that dies; where
    there are none, as on Windows, no two processes should write one folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f".{name}.lock", "a") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another run writes there; name another folder") from None
        except (AttributeError, OSError):  # no fcntl on Windows, no locks on some file systems
            pass
        yield


# ---- the command line --------------------------------------------------------------------------


def is_out_of_memory(e: BaseException) -> bool:
    """As Python, torch and numpy each say it, and Python where numpy loses its error on the way."""
    words = "out of memory|allocate memory|not enough memory|ALLOC_FAILED|returned NULL without"
    said = isinstance(e, RuntimeError | SystemError) and re.search(words, str(e))
    return isinstance(e, MemoryError) or bool(said)


def silence_stdout() -> None:
    """Standard output is closed or full: it is not tried again, nor is what is still buffered."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_command(main, lower: str = "--block_size") -> None:
    """Run a script's main(argv): what a user can mend ends in one line, never in a traceback.

    Exit codes: 0; 1 for an error; 128 + its number for a signal, so 141 where the reader of a pipe
    has gone, as `| head` does. `lower` names the flags that save memory.
    """

    def interrupt(number, frame):
        raise KeyboardInterrupt(number)  # on its way out, temporary files are removed

    signal.signal(signal.SIGTERM, interrupt)
    if sys.stdout is None:  # closed by whoever started this
        sys.stdout = open(os.devnull, "w")
    try:
        sys.stdout.reconfigure(errors="replace")  # a terminal may not know every character
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
    finally:  # while Python ends, there is nothing left to stop
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    silence_stdout()
    if line:
        print(visible(line).replace("\n", " "), file=sys.stderr)
    sys.exit(code)
