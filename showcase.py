"""showcase.py: what a model makes of held-out text, shown during its training and after it.

The model's usual task is asked about one validation document, in most tasks with a hole in it.
"""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

from config import UserError
from data import Text
from sample import GAP, TASKS, TrainedModel, marked

MOST_HIDDEN = 6  # most tokens of a masked word: the guesses for each take a line


def showcase(trained: TrainedModel, folder: Path, tokens, print_line: Callable) -> None:
    """Print an answer about held-out text (corpus.Tokens), and the command for your own text."""
    flags, original = question(trained, tokens)
    try:
        [answer] = trained.ask(None, **flags)
    except UserError as e:  # if rows have only a few tokens, or texts one word
        print_line(f"Nothing to show from the validation text: {e}")
        return

    shown = [marked(answer.parts)]
    if answer.whole == answer.text:  # the answer does not contain the question
        shown = [flags["prompt"], flags.get("suffix", ""), *shown]
    print_line("On validation text, which the model has not seen (⟪…⟫ is what it wrote):")
    print_line("─" * 80)
    print_line(f"\n{'┄' * 80}\n".join(text.rstrip("\n") for text in shown if text))
    print_line("─" * 80)
    for line in answer.lines:
        print_line(line)
    if original:
        print_line(f"The original: {original}")
    command = f"python sample.py {shlex.quote(f'--out_dir={folder}')}"
    for name, value in flags.items():
        if name in ("prompt", "suffix"):
            value = f'"...{GAP}..."' if GAP in value else '"..."'
        command += f" --{name}={value}"
    print_line(f"Your own text: {command}")


def one_line_sample(trained: TrainedModel, tokens) -> str:
    """What the model makes of the same held-out text, in one line, to show it learning."""
    flags, _ = question(trained, tokens)
    if "temperature" in TASKS[trained.tasks[0]].reads:
        flags["temperature"] = 0.0
    try:
        [answer] = trained.ask(None, **flags)
    except UserError:
        return "(nothing to show)"
    line = marked(answer.parts) or " ".join(answer.lines)
    line = " ".join(line.split())
    start = max(line.find("⟪") - 45, 0)
    start = line.rfind(" ", 0, start + 1) + 1  # start at a word
    return line[start : start + 90]


def text_with_a_hole(trained: TrainedModel, tokens) -> tuple[str, str, str]:
    """A validation document that fits in half a context: the text before, in and after a hole. The
    hole is a word from its later half, if possible one that also occurs elsewhere."""
    text = Text(tokens.val, tokens.tok.EOT)
    room = trained.block_size // 2 - 2  # a task adds special tokens
    if len(text.sizes) == 0:
        return "", "", ""
    fitting = text.sizes * (text.sizes <= room)
    chosen = fitting.argmax() if fitting.any() else text.sizes.argmax()
    whole = trained.tok.decode(tokens.val[text.starts[chosen] : text.stops[chosen]][:room])
    whole = whole.strip("\ufffd")  # bytes of a character that was cut
    whole = whole.split(GAP)[0]  # a [MASK] in the document itself would count as a gap

    words = list(re.finditer(r"[^\S\n]?\w{1,12}", whole))  # Chinese has no spaces: take parts
    if not words:
        return whole, "", ""
    later = words[len(words) // 2 :]
    known = [word for word in later if len(re.findall(rf"\b{word.group().strip()}\b", whole)) > 1]
    candidates = [word for word in known if len(word.group()) > 4] or known or later
    hole = candidates[len(candidates) // 2]
    return whole[: hole.start()], hole.group(), whole[hole.end() :]


def question(trained: TrainedModel, tokens) -> tuple[dict, str]:
    """Flags that ask the usual task about a text with a hole, and the right answer in quotes (or an
    empty text, if it is not known)."""
    before, hole, after = text_with_a_hole(trained, tokens)
    tok = trained.tok
    entry = trained.tasks[0]
    texts = TASKS[entry].texts
    if entry == "detect":
        other = " " + (before.split() or ["?"])[-1]
        return {"prompt": before + other + after}, f"{hole!r} (here: {other!r})"
    if entry == "fill":
        hidden = hole
        while len(tok.encode(hidden)) > MOST_HIDDEN:
            hidden = hidden[:-1]
        n = max(len(tok.encode(hidden)), 1)
        return {"prompt": before + n * GAP + hole.removeprefix(hidden) + after}, repr(hidden)
    if texts == "text":
        return {"prompt": before, "max_new_tokens": trained.block_size // 4}, ""
    if texts == "two texts":
        whole = before + hole + after
        middle = len(whole) // 2
        lines = [m.end() for m in re.finditer("\n", whole[:-1])] or [middle]
        cut = min(lines, key=lambda end: abs(end - middle))
        return {"prompt": whole[:cut], "suffix": whole[cut:]}, ""
    n = {"unmask": max(len(tok.encode(hole)), 1), "restore": trained.block_size // 2}.get(entry, 24)
    return {"prompt": before, "suffix": after, "max_new_tokens": n}, repr(hole)
