"""log.py: what a run prints, writes and adds up, and how it is told to stop."""

import contextlib
import errno
import json
import os
import re
import signal
import time
from pathlib import Path

import torch

from config import atomic_write, silence_stdout, visible
from device import sum_of_all


class Log:
    """Lines on the screen and objects in log.jsonl. Only the first process writes them."""

    def __init__(self, folder: Path, first: bool, signals: list[int]):
        self.path = folder / "log.jsonl"
        self.first = first
        self.signals = signals  # signals that have asked the run to stop

    def open(self, n_steps: int) -> None:
        """Begin log.jsonl, or continue it after the lines of the first `n_steps` steps."""
        lines = read_lines(self.path) if self.path.exists() else []
        kept = [line for line in lines if line.get("step") in range(1, n_steps + 1)]
        with atomic_write(self.path) as f:
            f.write("".join(json.dumps(line) + "\n" for line in kept).encode())

    def print(self, text: str = "") -> None:
        if not self.first:
            return
        try:
            print(visible(text), flush=True)
        except OSError as e:
            # Ctrl-C has also ended `| tee`, or the terminal is closed: go on, to save the run.
            if not self.signals and e.errno != errno.EIO:
                raise
            silence_stdout()

    def write(self, **values) -> None:
        if self.first:
            try:
                with open(self.path, "a") as f:  # closed each time: a full disk shows at once
                    f.write(json.dumps(values) + "\n")
            except OSError as e:
                e.filename = str(self.path)
                raise


def read_lines(path: Path) -> list[dict]:
    """The objects of a .jsonl file; a line cut short by a kill or a full disk is left out."""
    found = []
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)]


@contextlib.contextmanager
def stop_signals(received: list[int]):
    """The first Ctrl-C, SIGTERM or SIGHUP (a closed terminal) only asks the run to finish its step:
    its number is added to `received`. The second one ends the process at once. Both say so."""

    def receive(number, frame):
        # Not print(): the signal may have interrupted one, and print() cannot be entered twice.
        line = b"stopping after this step, then saving (again: stop at once, unsaved)\n"
        if received:
            line = b"stopped at once: what was not saved is lost\n"
        with contextlib.suppress(OSError):  # with `2>&1 | tee`, Ctrl-C has also ended tee
            os.write(2, line)
        if received:
            os._exit(128 + number)
        received.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    hang_up = getattr(signal, "SIGHUP", None)  # none on Windows
    if hang_up and signal.getsignal(hang_up) != signal.SIG_IGN:  # nohup ignores it
        numbers.append(hang_up)
    before = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Meter:
    """Sums of Metrics, kept on the device until they are asked for. In training, they cover the
    steps from one log line to the next, and `steps` and `positions` count what they cover."""

    def __init__(self):
        self.began = time.perf_counter()  # moved forward by pauses, which do not count
        self.steps = 0
        self.positions = 0  # of this process; trimmed padding is not counted
        self.sums = {}  # name -> (2,): sum and divisor
        self.coefficients = {}

    def add(self, metrics: dict) -> None:
        for name, metric in metrics.items():
            both = torch.stack([metric.sum.detach().float(), metric.divisor.float()])
            self.sums[name] = self.sums.get(name, 0) + both
            self.coefficients[name] = metric.coefficient

    def means(self) -> dict[str, float]:
        """The loss, and the mean of each metric over all processes. Waits for the device."""
        sums = sum_of_all(torch.stack(list(self.sums.values()))).tolist()
        means = {name: s / w for name, (s, w) in zip(self.sums, sums) if w}
        loss = sum(self.coefficients[name] * mean for name, mean in means.items())
        return {"loss": loss, **means}


def duration(seconds: float) -> str:
    """3661 -> '1h01m', 61 -> '1m01s', 5 -> '5s'."""
    m, s = divmod(max(0, round(seconds)), 60)
    if m >= 60:
        return f"{m // 60}h{m % 60:02d}m"
    return f"{m}m{s:02d}s" if m else f"{s}s"


def short(number: float) -> str:
    """A number with a letter for its size.

    >>> short(1234567), short(999_960), short(12345), short(999.7), short(999)
    ('1.23M', '1.00M', '12.3k', '1.0k', '999')
    """
    if number >= 999_950:
        return f"{number / 1e6:.2f}M"
    return f"{number / 1e3:.1f}k" if number >= 999.5 else f"{number:.0f}"


def metrics_text(means: dict[str, float]) -> str:
    """The metrics of an objective besides its loss, each with its baseline if it has one."""
    hidden = ["replaced_share"]  # detect_accuracy_baseline shows it already
    hidden += [name for name in means if re.fullmatch(r"loss_\d+", name)]  # parts of future_loss
    losses = [name for name in means if name.endswith("_loss")]
    if len(losses) == 1:  # it equals the loss
        hidden += losses
    text = ""
    for name, mean in means.items():
        if name not in hidden and not name.endswith("_baseline"):
            text += f" | {name} {mean:.3f}"
            if f"{name}_baseline" in means:
                text += f" (guessing: {means[f'{name}_baseline']:.3f})"
    return text
