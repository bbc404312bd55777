"""util.py: flags from dataclasses, one-line errors, atomic writes, the device, numbers for people.

A dataclass is a section of flags. Each field declares its type, default, help and interval:

    >>> @dataclasses.dataclass
    ... class Demo:
    ...     rate: float = flag(0.15, "share of tokens masked", above=0, below=1)
    >>> build(Demo, parse_flags(["--rate=0.3"], "", Demo))
    Demo(rate=0.3)
"""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import operator
import os
import re
import sys
import typing
import unicodedata
from pathlib import Path

import torch

LIMITS = {  # of a field's value: in words, and as a comparison
    "min": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "max": ("at most", operator.le),
    "below": ("below", operator.lt),
}


class UserError(ValueError):
    """A mistake the user can fix: the command line prints it as one line, without a traceback."""


def visible(text: str) -> str:
    r"""Make untrusted text safe to print: it cannot move the cursor or recolor the terminal.

    >>> visible("\x1b[31mred,\n\tas it was")
    '·[31mred,\n\tas it was'
    """
    harmless = "\n\t\u00ad\u200c\u200d"  # the last three join or part letters
    return "".join(
        c if c.isprintable() or c in harmless or unicodedata.category(c) == "Zs" else "·"
        for c in text
    )


# ---- flags -------------------------------------------------------------------------------------


def flag(default, help: str, choices: tuple = (), is_text=False, **interval):
    """A field that is also a command-line flag. `interval` is any of min, max, above and below.
    `is_text`: see text_or_file; other strings may be paths, which may begin with ~."""
    about = dict(help=help, choices=choices, is_text=is_text, **interval)
    return dataclasses.field(default=default, metadata=about)


def flags_of(cls) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(cls) if "help" in field.metadata]


def interval_of(field) -> str:
    """The interval in words, such as "above 0 and below 1", or ""."""
    limits = [key for key in LIMITS if key in field.metadata]
    return " and ".join(f"{LIMITS[key][0]} {field.metadata[key]}" for key in limits)


def build(cls, values: dict):
    """An instance of a dataclass: its defaults, overridden by `values`; other keys are ignored.
    Raises UserError for a value outside its field's choices or interval."""
    given = {f: values[f.name] for f in dataclasses.fields(cls) if f.name in values}
    for field, value in given.items():
        if value is None:
            continue
        choices = field.metadata.get("choices")
        if choices and value not in choices:
            raise UserError(f"--{field.name}={value}: must be {' or '.join(choices)}")
        limits = [key for key in LIMITS if key in field.metadata]
        if not all(LIMITS[key][1](value, field.metadata[key]) for key in limits):
            raise UserError(f"--{field.name}={value}: must be {interval_of(field)}")
    return cls(**{field.name: value for field, value in given.items()})


def suggest(word: str, known) -> str:
    """A question that suggests the word the user probably meant, or "".

    >>> suggest("fmi", ["clm", "fim"]), suggest("--leraning_rate", ["--lr"])
    ('did you mean fim?', '')
    """
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else ""


def comma_list(flag: str, text: str, known) -> list[str]:
    """The names in a flag's text. Raises UserError if one is not known or appears twice."""
    names = text.split(",")
    for name in names:
        if name not in known:
            hint = suggest(name, known) or f"choose from {', '.join(known)}"
            raise UserError(f"--{flag}={text}: {name!r} is not known; {hint}")
        if names.count(name) > 1:
            raise UserError(f"--{flag}={text}: {name} appears twice; name it once")
    return names


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(message)


def parse_flags(argv: list[str], doc: str | None, *classes, positional="", defaults=None) -> dict:
    """The given flags as {name: value}. Every field with a help text is a flag, `--name=value`.

    `positional` names one optional positional argument. For --help, `doc` is the script's
    docstring, and `defaults` maps names to what is shown instead of a field's own default. Raises
    UserError for anything that is not a flag; `build` checks the values."""
    doc = doc or ""
    commands = re.findall(r"(?m)^ {4}(?:python|torchrun) .*$", doc)
    parser = Parser(
        usage=f"python %(prog)s {f'[{positional}] ' if positional else ''}[--flag=value ...]",
        description=doc.split("\n\n")[0],
        epilog="\n".join(["examples:", *commands]) if commands else None,
        formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, width=100),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    if positional:
        parser.add_argument(positional, nargs="?")
    for cls in classes:
        title = cls.__name__.removesuffix("Config").lower()
        section = parser.add_argument_group(title, cls.__doc__.splitlines()[0])
        for field in flags_of(cls):
            default = (defaults or {}).get(field.name, field.default)
            shown = "" if default in ("", None) else f" [{default}]"
            interval = f" ({interval_of(field)})" if interval_of(field) else ""
            as_string = text_or_file if field.metadata.get("is_text") else os.path.expanduser
            kind = (typing.get_args(field.type) or (field.type,))[0]  # int of `int | None`
            section.add_argument(
                f"--{field.name}",
                type={bool: true_or_false, str: as_string}.get(kind, kind),
                metavar="|".join(field.metadata.get("choices", ())) or kind.__name__.upper(),
                help=(field.metadata["help"] + interval + shown).replace("%", "%%"),
                **(dict(nargs="?", const=True) if kind is bool else {}),  # --name alone is true
            )
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].split("=")[0]
        known = [f"--{field.name}" for cls in classes for field in flags_of(cls)]
        raise UserError(f"unknown flag {name}; {suggest(name, known) or 'see --help'}")
    return vars(given)


def text_or_file(text: str) -> str:
    """A text as it is. @FILE or @-: what is written there, without its last line end, which is
    seldom meant. @@ begins a text with @."""
    if not text.startswith("@") or text.startswith("@@"):
        return text.removeprefix("@")
    file = sys.stdin.buffer if text == "@-" else open(text[1:], "rb")
    with file:
        written = file.read().decode("utf-8-sig", "surrogateescape")
    return re.sub(r"\r?\n\Z", "", written)


def true_or_false(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


# ---- files and errors --------------------------------------------------------------------------


@contextlib.contextmanager
def atomic_write(path):
    """Write a file whole or not at all: under another name first, then renamed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with open(unfinished, "w+b") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(unfinished, path)
    except OSError as e:
        if e.filename:  # another file, or one that the error names
            raise
        remedy = "free some space or name another folder; what was saved before is intact"
        raise UserError(f"{path} could not be written ({e.strerror}): {remedy}") from e
    finally:
        unfinished.unlink(missing_ok=True)


def run_command(main, lower: str = "--block_size") -> None:
    """Run a script's main(argv). An error that the user can fix ends in one line and exit code 1.
    `lower` names the flags that save memory."""
    sys.stdout.reconfigure(errors="replace", line_buffering=True)  # a pipe gets each line at once
    try:
        main(sys.argv[1:])
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except (UserError, OSError, EOFError) as e:
        sys.exit(visible(f"error: {e}").replace("\n", " "))
    except (MemoryError, torch.OutOfMemoryError):
        sys.exit(f"error: out of memory; what was saved before is intact. Lower {lower}")
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as e:
        if "can't allocate memory" in str(e):  # a RuntimeError of the CPU
            sys.exit(f"error: out of memory; what was saved before is intact. Lower {lower}")
        if not type(e).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        sys.exit(f"error: torch.compile failed ({str(e).splitlines()[0]}); add --compile=False")


# ---- the device --------------------------------------------------------------------------------


def find_device(name: str | None = None) -> torch.device:
    """The named device, else the best one. Raises UserError if it cannot hold a tensor."""
    if name is None:
        name = "mps" if torch.backends.mps.is_available() else "cpu"
        name = "cuda" if torch.cuda.is_available() else name
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0][:80]
        raise UserError(f"--device={name}: {reason}; try --device=cpu") from None
    return torch.device(name)


def has_bfloat16(device: torch.device) -> bool:
    """Whether the hardware multiplies bfloat16 matrices itself; emulation would be slower."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    cpu = Path("/proc/cpuinfo")  # Linux only: a Mac uses float32
    return cpu.exists() and re.search("avx512_bf16|amx_bf16", cpu.read_text()) is not None


# ---- numbers for people ------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """3661 -> '1h01m', 61 -> '1m01s', 5 -> '5s'."""
    m, s = divmod(max(0, round(seconds)), 60)
    if m >= 60:
        return f"{m // 60}h{m % 60:02d}m"
    return f"{m}m{s:02d}s" if m else f"{s}s"


def short(number: float) -> str:
    """A number with a letter for its size.

    >>> short(1234567), short(12345), short(999)
    ('1.23M', '12.3k', '999')
    """
    if number >= 999_950:
        return f"{number / 1e6:.2f}M"
    return f"{number / 1e3:.1f}k" if number >= 999.5 else f"{number:.0f}"
