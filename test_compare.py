"""test_compare.py: yardsticks measure what they say, verdicts follow their rule, runs are kept.

pytest test_compare.py
"""

import doctest
import functools
import math
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import claims
import compare
import skills
import train
import yardsticks
from checkpoint import load_checkpoint, open_checkpoint, save_checkpoint
from claims import CLAIMS, Claim, Comparison, draw_panel, plot_claims, section, verdict
from compare import CompareConfig, measure_arms, scores_path
from config import UserError
from corpus import DataConfig, load_tokens
from data import Text
from mixture import parse_mixture
from model import ModelConfig, Transformer
from objectives import OBJECTIVES, token_loss
from sample import load
from settings import settle
from test_stories import replay, some_stories
from tokenizer import get_tokenizer
from yardsticks import chain_rule_nats, kinds_of_events, probe

SMALL = "--n_layer=1 --n_head=1 --head_dim=16 --n_embd=16"


def config_for(folder, **others) -> CompareConfig:
    flags = f"--cache_dir={folder / 'cache'} --data=stories:400 --device=cpu --batch_size=4"
    flags += " --eval_rows=16"
    return CompareConfig(out_dir=str(folder), max_steps=2, seeds=1, flags=flags, **others)


@pytest.fixture(scope="module", autouse=True)
def fewer_questions():
    """The same code runs, but with fewer questions; this saves minutes."""
    patch = pytest.MonkeyPatch()
    fewer = dict(N_CONTINUED=10, N_DRAWN=1000, N_PROBED=150, N_WORDS=150, N_TWINS=1, N_ROWS=16)
    fewer |= dict(N_WINDOWS=40)
    for name, n in fewer.items():
        patch.setattr(yardsticks, name, n)
    patch.setattr(yardsticks, "short_stories", functools.cache(yardsticks.short_stories))
    patch.setattr(skills, "N_STORIES", 40)
    patch.setattr(skills, "N_WRITTEN", 5)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Small runs of three objectives, and their scores."""
    config = config_for(tmp_path_factory.mktemp("lab"))
    arms = [f"{name} {SMALL}" for name in ("clm", "mlm", "span")]
    folders = [scores_path(config, arm, 1).parent for arm in arms]
    scores = measure_arms(config, arms)
    return SimpleNamespace(config=config, arms=arms, folders=folders, scores=scores)


def test_each_run_is_measured_once(lab, capsys):
    files = [scores_path(lab.config, arm, 1) for arm in lab.arms]
    before = [file.stat().st_mtime_ns for file in files]
    assert measure_arms(lab.config, lab.arms) == lab.scores
    assert [file.stat().st_mtime_ns for file in files] == before
    assert capsys.readouterr().out.startswith("3 of 3 runs are already in ")
    for [scores] in lab.scores.values():
        assert all(math.isfinite(value) for value in scores.values())
        assert scores["bits per byte"] > 1.0  # the model knows nothing
        assert 0 < scores["first event random"] < 1


def cells_of(table: list[str]) -> dict[str, list[str]]:
    """A Markdown table as a dict: the first cell of each row -> its other cells."""
    lines = [line for line in table if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: cells for name, *cells in rows}


def test_a_pattern_of_runs_leaves_out_what_is_none(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for path in ("out/a/ckpt.pt", "out/b/log.jsonl", "out/compare/x/ckpt.pt", "out/curves.png"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).touch()
    assert compare.named_runs("out/*") == ["out/a", "out/b"]
    assert capsys.readouterr().out == "left out, not runs: out/compare, out/curves.png\n"
    # These will be refused, each with an error of its own:
    assert compare.named_runs("out/compare") == ["out/compare"]
    assert compare.named_runs("out/a,nowhere") == ["out/a", "nowhere"]
    for name in ("out/c[1]", "out/c1"):  # the first is also a pattern, which finds the second
        Path(name).mkdir()
        Path(name, "ckpt.pt").touch()
    assert compare.named_runs("out/c[1]") == ["out/c[1]"]


def test_a_table_takes_runs_of_unlike_scores():
    """Here only some runs have scores, and only some were measured beside random networks."""
    scores = {"bits per byte": 1.0, "first event": 0.7}
    runs = {"a": [scores, scores | {"first event random": 0.5}], "b": [{}]}
    few = cells_of(compare.table(runs))
    assert few["run"] == ["`a`", "`b`"]
    assert few["goes on: bits per byte"] == ["1 ± 0", "-"]
    assert few["first event"] == ["0.7 ± 0 (random 0.5)", "-"]
    many = cells_of(compare.table(runs | {"c": [{}], "d": [{}]}))
    assert many["run"] == ["goes on: bits per byte", "first event"]
    assert many["`a`"] == ["1 ± 0", "0.7 ± 0 (random 0.5)"] and many["`d`"] == ["-", "-"]


def test_the_chain_rule_gives_a_probability(lab):
    """Over all next tokens, exp(-nats) sums to 1. The nats of two tokens are the sum of their
    conditional nats, so over all texts of two tokens exp(-nats) sums to 1 as well."""
    trained = load(lab.folders[1])
    allowed = trained.allowed().nonzero().squeeze(1).tolist()
    first = trained.tok.encode("Tom has")
    total = sum(math.exp(-chain_rule_nats(trained, first, [id])) for id in allowed)
    assert total == pytest.approx(1, abs=1e-4)
    nats = chain_rule_nats(trained, first, allowed[:2])
    one = chain_rule_nats(trained, first, allowed[:1])
    two = chain_rule_nats(trained, [*first, allowed[0]], allowed[1:2])
    assert nats == pytest.approx(one + two, abs=1e-5)


def test_a_probe_reads_what_is_linear_and_nothing_from_noise():
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(900, 8, generator=generator)
    labels = torch.bucketize(states[:, 0] - states[:, 1], torch.tensor([-0.6, 0.6]))  # in order
    assert probe(states, labels, 600) > 0.9
    noise = torch.randint(3, (900,), generator=generator)
    assert probe(states, noise, 600) < 0.42


def test_labels_are_those_of_the_story():
    number = {"receive": 0, "give": 0, "find": 1, "lose": 2, "meet": 3, "move": 4}
    for text, _, _ in some_stories(200):
        events, _ = replay(text)
        kinds = [number[kind] for kind, _, _ in events]
        assert kinds_of_events(text) == list(dict.fromkeys(kinds))


@pytest.mark.parametrize(
    ("kind", "arm", "other", "expected"),
    [
        ("better", (0.20, 0.001), (0.25, 0.001), "supported"),
        ("better", (0.25, 0.001), (0.20, 0.001), "refuted at this size"),
        ("better", (0.249, 0.001), (0.25, 0.001), "refuted at this size"),  # below the margin
        ("better", (0.241, 0.001), (0.25, 0.001), "cannot tell"),
        ("better", (0.20, 0.04), (0.25, 0.04), "cannot tell"),  # within the noise
        ("no worse", (0.25, 0.001), (0.25, 0.001), "supported"),
        ("no worse", (0.20, 0.001), (0.25, 0.001), "supported"),
        ("no worse", (0.255, 0.001), (0.25, 0.001), "supported"),
        ("no worse", (0.255, 0.005), (0.25, 0.005), "cannot tell"),  # noise does not help
        ("no worse", (0.262, 0.001), (0.25, 0.001), "cannot tell"),
        ("no worse", (0.28, 0.001), (0.25, 0.001), "refuted at this size"),
    ],
)
def test_verdicts_follow_their_rule(kind, arm, other, expected):
    """Lower bits per byte are better, and so are higher shares."""
    bits = Comparison("a", kind, "b", "bits per byte", 0.01)
    runs = [[mean - sd, mean, mean + sd] for mean, sd in (arm, other)]
    assert verdict(bits, *runs) == expected
    assert verdict(bits, runs[0][:1], runs[1]) == "cannot tell"
    share = bits._replace(score="first event")
    assert verdict(share, *([1 - value for value in each] for each in runs)) == expected


@pytest.mark.parametrize("module", [claims, compare, yardsticks], ids=lambda m: m.__name__)
def test_the_examples_of_the_files_are_right(module):
    found = doctest.testmod(module)
    assert found.attempted > 0 and found.failed == 0


@pytest.mark.parametrize("name", CLAIMS)
def test_arms_of_claims_can_be_run(name):
    claim = CLAIMS[name]
    for c in claim.comparisons:
        assert c.arm != c.other and c.kind in ("better", "no worse") and c.margin > 0
    arms = [claim.flags(arm) for arm in claim.arms]
    assert len(set(arms)) == len(arms)
    for arm in arms:
        words = shlex.split(f"--objective={arm}")
        starts = [word for word in words if word.startswith("--init_from=@")]
        for start in starts:
            settle(shlex.split(start.replace("init_from=@", "objective=")))
        settle([word for word in words if word not in starts and "max_steps" not in word])


def test_a_run_starts_from_another_of_its_seed_and_may_be_longer(tmp_path, monkeypatch):
    """The other run is trained first."""
    monkeypatch.setattr(compare, "scores_of_run", lambda folder: {})
    config = config_for(tmp_path)
    config.flags += f" {SMALL}"
    longer = "mlm --init_from=@clm --max_steps=1.5x"
    shorter = "clm --max_steps=0.1x"
    measure_arms(config, [longer, shorter])
    folders = {arm: scores_path(config, arm, 1).parent for arm in ("clm", longer, shorter)}
    saved = load_checkpoint(folders[longer] / "ckpt.pt")["train_config"]
    assert saved["init_from"] == str(folders["clm"]) and saved["max_steps"] == 3
    assert load_checkpoint(folders[shorter] / "ckpt.pt")["train_config"]["max_steps"] == 1


def test_the_bits_of_a_second_half_are_those_of_its_tokens_among_all_that_may_be_drawn(lab):
    """Token by token, from a softmax over text and EOT only: special ids are never generated."""
    trained = load(lab.folders[0])
    allowed = trained.allowed().nonzero().flatten().tolist()
    nats = n_bytes = 0.0
    pairs = yardsticks.halves_of_stories(trained)[:5]
    for first, second in pairs:
        text = [trained.tok.EOT, *first]
        for token in second:
            logits = trained.logits(text)[-1, allowed]
            nats -= logits.log_softmax(-1)[allowed.index(token)].item()
            text.append(token)
        n_bytes += len(trained.tok.decode(second).encode())
    assert yardsticks.second_half_bits(trained, pairs) == pytest.approx(
        nats / math.log(2) / n_bytes, rel=1e-4
    )


def test_a_mixture_goes_on_as_its_first_member_does(lab):
    trained = load(lab.folders[0])
    pairs = yardsticks.halves_of_stories(trained)[:2]
    bits = {}
    for mixture in ("clm", "clm,ul2", "ul2", "ul2,clm"):
        trained.mixture = parse_mixture(mixture)
        bits[mixture] = yardsticks.second_half_bits(trained, pairs)
    assert bits["clm"] == bits["clm,ul2"] != bits["ul2"] == bits["ul2,clm"]


def test_a_run_on_other_text_is_asked_to_go_on_with_that_text_too(tmp_path, monkeypatch):
    """A model that has memorized "abcabc..." needs almost no bits for its held-out end."""
    monkeypatch.chdir(tmp_path)
    Path("abc.txt").write_text("abc" * 20_000)
    flags = (
        f"{SMALL} --objective=clm --data=abc.txt --tokenizer=bytes --max_steps=60 --device=cpu "
        "--block_size=512 --batch_size=4 --eval_rows=16 --out_dir=run"
    )
    train.main(flags.split())
    trained = load("run")
    checkpoint = open_checkpoint("run/ckpt.pt")
    own = yardsticks.own_text(checkpoint)
    pairs = yardsticks.halves_of_windows(trained, own)
    assert len(pairs) >= 9
    for first, second in pairs:
        assert bytes(first) + bytes(second) in b"abc" * 101
        assert (len(first), len(second)) == yardsticks.WINDOW
    learned = yardsticks.second_half_bits(trained, pairs)
    assert learned < 0.5
    other = [(first, second[::-1]) for first, second in pairs]
    assert yardsticks.second_half_bits(trained, other) > 2 * learned
    trained.block_size = 128  # room for the second half and the end of the first
    assert yardsticks.second_half_bits(trained, pairs) == pytest.approx(learned, rel=0.5)
    trained.block_size = 96  # no second half fits
    assert yardsticks.second_half_bits(trained, pairs) is None
    found = yardsticks.scores_of_model(trained, own)
    assert found.keys() == {"targets per position", "tokens/s"}
    trained.block_size = 8  # the smallest
    assert yardsticks.scores_of_model(trained, own).keys() == found.keys()
    cells = cells_of(compare.table({"x": [found]}))
    assert cells.keys() == {"run", "targets per position", "tokens/s"}
    assert cells["targets per position"] == ["1"]
    Path("abc.txt").write_text("abd" * 20_000)
    with pytest.raises(UserError, match="not the text that the checkpoint was trained on"):
        yardsticks.own_text(checkpoint)

    short = Text(own.tokens[: sum(yardsticks.WINDOW)], trained.tok.EOT)
    assert yardsticks.halves_of_windows(trained, short) == []
    assert yardsticks.second_half_bits(trained, []) is None


def test_windows_of_a_text_are_the_same_bytes_for_every_tokenizer(lab):
    tokens = load_tokens(DataConfig("stories:200", cache_dir=f"{lab.config.out_dir}/cache"))
    trained = load(lab.folders[0])
    trained.tok = tokens.tok
    pairs = yardsticks.halves_of_windows(trained, Text(tokens.train, tokens.tok.EOT))
    trained.tok = get_tokenizer("bytes")
    whole = tokens.train[tokens.train != tokens.tok.EOT]
    ids = np.array(trained.tok.encode(tokens.tok.decode_bytes(whole)))
    same = yardsticks.halves_of_windows(trained, Text(ids, trained.tok.EOT))
    for (first, second), (given, scored) in zip(pairs, same, strict=True):
        begin, end = (
            tokens.tok.decode_bytes(i).replace(b"<|endoftext|>", b"") for i in (first, second)
        )
        assert abs(len(begin) - 200) < 20 and abs(len(end) - 100) < 20
        assert (begin + end)[20:-20] in bytes(given) + bytes(scored)


def test_windows_that_are_apart_have_no_text_in_common(lab):
    trained = load(lab.folders[0])
    trained.tok = get_tokenizer("bytes")
    ids = np.arange(9000) // 300  # window number n is made of the byte n
    pairs = yardsticks.halves_of_windows(trained, Text(ids, trained.tok.EOT), apart=True)
    assert len(pairs) == 29
    assert len({first[0] for first, _ in pairs}) == 29
    assert all(set(first) == set(second) == {first[0]} for first, second in pairs)


class Neighbor:
    """A model whose state at a byte is the byte `far` places after it."""

    tok = get_tokenizer("bytes")
    block_size = 64

    def __init__(self, far: int):
        self.far = far

    def own_states(self, ids):
        return F.one_hot(torch.tensor([*ids[self.far :], *[0] * self.far]), 256).float()


def text_of(*documents: str) -> Text:
    tok = Neighbor.tok
    ids = [id for document in documents for id in [*tok.encode(document), tok.EOT]]
    return Text(np.array(ids), tok.EOT)


def test_what_follows_a_name_tells_its_role_and_not_the_name():
    rng = np.random.default_rng(1)
    names = [f"{a}{b}" for a in "pqrst" for b in "é12"]
    programs = []
    for _ in range(20):
        lines = [f"{a}= {b}({c}[0])" for a, b, c in rng.choice(names, (40, 3))]
        programs.append("\n".join(lines))
    too_deep = "x = " + "-" * 8000 + "1"
    text = text_of(*programs, "no Python at all", "x = (", too_deep)
    exam = yardsticks.roles_of_names(Neighbor(1), text)
    assert yardsticks.share_right(Neighbor(1), exam) == 1.0
    assert yardsticks.share_right(Neighbor(0), exam) < 0.45  # guessing: a third
    assert yardsticks.roles_of_names(Neighbor(1), text_of("no Python", *programs[:3])) is None


def test_names_are_found_at_their_last_byte():
    source = "if é:\r\n\tdel x\r\n\ty = f(é)\n".encode()
    found = yardsticks.names_by_role(source)
    assert [[source[: place + 1].decode()[-1] for place in places] for places in found] == [
        ["f"],
        ["y"],
        ["é", "é"],
    ]


def test_a_document_is_told_by_its_own_letters_only():
    rng = np.random.default_rng(1)

    def document(letters: str) -> str:
        return "".join(rng.choice(list(letters), 4000))

    trained = Neighbor(0)
    own = text_of(*(document("xyz" + chr(97 + n)) for n in range(20)))
    exam = yardsticks.documents_apart(trained, own)
    assert yardsticks.share_right(trained, exam) > 0.95
    same = text_of(*(document("xyz") for _ in range(20)))
    exam = yardsticks.documents_apart(trained, same)
    assert yardsticks.share_right(trained, exam) < 0.15  # guessing: a twentieth
    ten = text_of(*(document("xyz") for _ in range(10)))
    assert yardsticks.documents_apart(trained, ten) is None


def test_tokens_of_a_pass_are_more_where_heads_draft_what_is_written(tmp_path):
    """One letter, repeated, is easy to draft; but the heads of a fresh model draft wrongly."""
    (tmp_path / "a.txt").write_text("a" * 20_000)
    flags = (
        f"{SMALL} --n_layer=2 --objective=mtp --data={tmp_path}/a.txt --tokenizer=bytes "
        f"--block_size=64 --batch_size=4 --eval_rows=4 --device=cpu --cache_dir={tmp_path} "
        f"--out_dir={tmp_path}/"
    )
    found = []
    for steps in (1, 40):
        train.main(f"{flags}{steps} --max_steps={steps}".split())
        trained = load(tmp_path / str(steps))
        found.append(yardsticks.drafting(trained, [([97] * 20, [])] * 2))
    before, after = found
    passes = [f"tokens per pass at temperature {t}" for t in ("0", "0.8")]
    times = [key.replace("tokens per pass", "times as fast") for key in passes]
    assert before.keys() == {*passes, *times}
    assert all(1 <= before[key] < after[key] <= 4 for key in passes)
    assert all(value > 0 for value in after.values())
    assert after[passes[0]] > 3
    found = yardsticks.scores_of_model(trained, text_of("a" * 100))  # too little text for a window
    assert passes[0] not in found and "targets per position" in found


def test_a_word_that_does_not_fit_contradicts_what_was_told_before(lab, monkeypatch):
    monkeypatch.setattr(yardsticks, "N_WORDS", 2000)
    tok = get_tokenizer("bytes")
    told = yardsticks.short_stories(1000)
    questions, n = yardsticks.fitting_words(SimpleNamespace(tok=tok), told)
    assert len(questions) > 800 and n == len(questions) * 2 // 3
    assert sum(fits for *_, fits in questions) == pytest.approx(len(questions) / 2, rel=0.1)
    texts = {story.text for story in told}
    for ids, at, fits in questions:
        assert fits == (tok.decode(ids) in texts)
        before, word = tok.decode(ids[: at + 1]).rsplit(maxsplit=1)
        assert not fits or word in before


def test_what_does_not_exist_is_refused(lab):
    with pytest.raises(UserError, match="compare.py sets --data"):
        compare.main(["--flags=--data=python"])
    with pytest.raises(UserError, match="compare.py sets --seed"):
        compare.main(["--flags=--n_layer=1 --seed 7"])
    with pytest.raises(UserError, match="--on=clm does nothing without --score"):
        compare.main(["--on=clm"])
    with pytest.raises(UserError, match="--claims is empty; give a value or leave it out"):
        compare.main(["--claims="])
    with pytest.raises(UserError, match="--flags=--n_layers=1: unknown flag --n_layers; did you"):
        compare.main(["--flags=--n_layers=1"])
    with pytest.raises(UserError, match="--claims has no effect with --objectives"):
        compare.main(["--objectives=clm", "--claims=all"])
    with pytest.raises(UserError, match="did you mean fim_is_free"):
        compare.main(["--claims=fim_is_fre"])
    with pytest.raises(UserError, match="did you mean clm"):
        compare.main(["--objectives=clmm"])
    able = [name for name, row in OBJECTIVES.items() if row.loss is token_loss]
    with pytest.raises(UserError, match=f"choose from {', '.join(able)}"):
        compare.main([f"--score={lab.folders[0]}", "--on=electra"])
    trained = load(lab.folders[0])
    trained.block_size = 2600
    with pytest.raises(UserError, match="sentinels"):
        yardsticks.loss_on(trained, "ul2", yardsticks.Knobs())


def test_rows_that_do_not_fit_the_context_are_left_out_and_other_faults_are_not(lab, monkeypatch):
    """At T=2048, hiding half a row in spans of 1 needs more sentinels than there are."""
    spans = [f"spans of {n}" for n in yardsticks.SPANS]
    [known] = lab.scores[lab.arms[2]]
    assert [name for name in known if name in yardsticks.OTHER_ROWS] == spans
    trained = load(lab.folders[2])
    own = Text(np.array(trained.tok.encode("Tom has 5 apples. " * 50)), trained.tok.EOT)
    trained.block_size = 2048
    monkeypatch.setattr(yardsticks, "N_ROWS", 2)
    assert [name for name in yardsticks.scores_of_model(trained, own) if name in spans] == spans[1:]

    def loss_on(*args):
        raise UserError("a fault")

    monkeypatch.setattr(yardsticks, "loss_on", loss_on)
    with pytest.raises(UserError, match="a fault"):
        yardsticks.scores_of_model(trained, own)


@pytest.mark.filterwarnings("ignore:constrained_layout")  # the names of these runs are very long
def test_runs_are_scored_and_drawn(lab, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(lab.config.out_dir)
    runs = [folder.name for folder in lab.folders]
    compare.main([f"--score={','.join(runs)}", "--on=clm,span"])
    assert len(capsys.readouterr().out.splitlines()) == 5
    compare.main([f"--score={runs[0]},{runs[2]}/ckpt.pt"])
    printed = capsys.readouterr().out
    assert printed.count("seed1`") == printed.count("seed1/ckpt.pt`") == 1
    [of_last] = lab.scores[lab.arms[1]]
    of_best = yardsticks.scores_of_run(Path(runs[1]) / "best.pt")
    assert "val_loss" in of_last and "val_loss" not in of_best  # the log is about the last weights
    without_log = tmp_path / "without_log"
    without_log.mkdir()
    shutil.copy(Path(runs[1]) / "ckpt.pt", without_log)
    assert yardsticks.scores_of_run(without_log).keys() == of_best.keys()
    pytest.importorskip("matplotlib")
    with pytest.raises(UserError, match="nowhere is not the folder of a run"):
        compare.main(["--plot", "nowhere", f"--out_dir={tmp_path}"])
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    whole = Path(runs[0], "log.jsonl").read_text()
    broken = '{"loss": 2.0}\n{"step": 2, "loss": "x"}\n{"step": 3, "loss": [1]}\n{"step"'
    (damaged / "log.jsonl").write_text(whole + broken)
    compare.main(["--plot", *runs, str(damaged), f"--out_dir={tmp_path}"])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["electra", "contrastive"])
def test_a_model_that_does_not_predict_tokens_has_no_loss_on_them(lab, tmp_path, capsys, name):
    flags = f"{SMALL} {lab.config.flags} --objective={name} --max_steps=1 --out_dir={tmp_path}"
    train.main(flags.split())
    capsys.readouterr()
    compare.main([f"--score={tmp_path},{lab.folders[0]}", "--on=clm"])
    _, none, clm, _ = capsys.readouterr().out.splitlines()
    assert none == f"{str(tmp_path):<24} {name} is not trained to predict tokens"
    assert re.fullmatch(r".* \d\.\d{4}", clm)


def test_a_run_that_is_stopped_while_it_is_measured_begins_again(lab, monkeypatch, capsys):
    def stop(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "scores_of_run", stop)
    with pytest.raises(KeyboardInterrupt):
        compare.run(lab.config, f"clm {SMALL} --lr=0.01", 1)
    screen = capsys.readouterr()
    assert screen.out.endswith("  trained; measuring\n") and "begins this one again" in screen.err


def test_a_chain_of_heads_is_scored_without_its_heads(tmp_path, capsys):
    common = f"{SMALL} --data=stories:200 --cache_dir={tmp_path} --device=cpu --batch_size=4"
    for name, more in (("mtp", "--mtp_heads=chain"), ("clm", "")):
        flags = f"{common} --objective={name} {more} --out_dir={tmp_path}/{name}"
        train.main([*flags.split(), "--eval_rows=16", "--max_steps=1"])
    weights = load_checkpoint(tmp_path / "mtp/ckpt.pt")["model"]
    state = load_checkpoint(tmp_path / "clm/ckpt.pt")
    state["model"] = {name: weights[name] for name in state["model"]}
    save_checkpoint(tmp_path / "clm/ckpt.pt", state)
    capsys.readouterr()
    compare.main([f"--score={tmp_path}/mtp,{tmp_path}/clm", "--on=clm,prefix"])
    mtp, clm = [line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:3]]
    assert mtp == clm and len(mtp) == 2


def test_a_random_network_has_weights_of_the_usual_scale():
    """As in `reset_parameters`, v_embed (it reads the embeddings) is scaled like other matrices.
    With a segment embedding ten times as large, probes of nsp and sop were right in 91%."""
    model = Transformer(ModelConfig(vocab_size=300, n_embd=96, n_head=3, pair_head=True))
    twin = yardsticks.random_twin(SimpleNamespace(model=model), seed=1)
    weights = dict(twin.model.named_parameters())
    assert {"second_text", "short_conv", "layers.0.self_attn.v_embed.weight"} <= weights.keys()
    for name, weight in weights.items():
        if name.endswith("bias"):
            assert (weight == 0).all()
        elif "norm" in name:
            assert (weight == 1).all()
        else:
            expected = 1.0 if name == "embed_tokens.weight" else weight.shape[-1] ** -0.5
            assert weight.std().item() == pytest.approx(expected, rel=0.3), name


def test_a_claim_is_judged_by_its_arms():
    known = {"a": [{"x": 0.9}, {"x": 0.92}], "b": [{"x": 0.5}, {"x": 0.52}], "c": [{}]}
    claim = Claim("a wins", "", [("a", "better", "b, c", "x", 0.02)])
    lines = section(claim, known)
    assert lines[:2] == ["### A wins", ""]
    assert lines[-3:] == [
        "| a better than b | 0.02 | x | 0.91 ± 0.014 and 0.51 ± 0.014 | supported |",
        "| a better than c | 0.02 | x | no such score |  |",
        "",
    ]


def test_an_arm_has_the_color_of_its_verdict():
    """It is gray if the arm's verdicts differ, and black if it has none."""

    class Axes(Mock):
        def errorbar(self, mean, arm, color, **_):
            colors[arm] = color

    colors = {}
    scores = {"a": 0.9, "b": 0.5, "c": 0.95, "d": 0.89}
    known = {arm: [{"x": mean - 0.001}, {"x": mean + 0.001}] for arm, mean in scores.items()}
    asked = [("a", "better", "b, c", "x", 0.02), ("b", "no worse", "d", "x", 0.02)]
    claim = Claim("a wins", "", [*asked, ("d", "better", "b", "x", 0.02)])
    draw_panel(Axes(), claim, "x", known)
    assert colors == {"a": "tab:gray", "b": "tab:red", "c": "black", "d": "tab:green"}


def test_claims_are_drawn(lab, tmp_path):
    pytest.importorskip("matplotlib")
    claim = Claim("one is better", "", [(lab.arms[0], "better", lab.arms[1], "first event", 0.1)])
    plot_claims([claim], lab.scores, tmp_path / "claims.png")
    assert (tmp_path / "claims.png").read_bytes().startswith(b"\x89PNG")


def test_step_times_are_relative_to_the_first_row_that_has_one():
    runs = {"c": [{}], "a": [{"ms": 40.0}, {"ms": 60.0}], "b": [{"ms": 80.0}]}
    assert cells_of(compare.table(runs))["time of a step, first row = 1"] == [
        "-",
        "1 ± 0.28",
        "1.6",
    ]


def test_a_run_that_others_start_from_is_trained_once(tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(compare.train, "main", lambda words: trained.append(words[-3]))
    monkeypatch.setattr(compare, "scores_of_run", lambda folder: {})
    measure_arms(config_for(tmp_path), ["mlm --init_from=@clm", "clm", "fim"])
    assert len(trained) == len(set(trained)) == 3 and trained[0].startswith("--out_dir=")


def test_rows_too_short_for_a_story_leave_out_what_is_asked_about_stories(lab):
    trained = load(lab.folders[0])
    trained.block_size = 32
    assert yardsticks.scores_of_model(trained).keys() == {"targets per position", "tokens/s"}


@pytest.mark.parametrize(
    "score",
    [
        "bits per byte",
        "bits per byte of own text",
        "val_loss",
        "spans of 3",
        "prefix of 50%",
        "masks of 15%",
    ],
)
def test_of_losses_the_lower_one_is_better(score):
    better = Comparison("b", "better", "a", score, 0.01)
    assert verdict(better, [1.0, 1.001], [2.0, 2.001]) == "supported"
    assert verdict(better, [2.0, 2.001], [1.0, 1.001]) == "refuted at this size"


def test_a_gain_above_the_margin_and_surely_above_zero_is_enough():
    better = Comparison("b", "better", "a", "word fits", 0.02)
    assert verdict(better, [0.54, 0.55, 0.56], [0.5, 0.51, 0.52]) == "supported"


def test_a_column_shows_the_first_score_that_a_run_has():
    runs = [{"holes filled right": 0.9, "masked words found": 0.2}]
    assert compare.cell(runs, ["holes filled right", "masked words found"]) == "0.9"


def test_each_seed_and_each_set_of_flags_has_a_run_of_its_own(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(compare.train, "main", told.append)
    monkeypatch.setattr(compare, "scores_of_run", lambda folder: {"ms": len(told)})
    for flags, steps in (("", 5), ("--n_layer=2", 5), ("", 6)):
        config = compare.CompareConfig(seeds=2, flags=flags, max_steps=steps, out_dir=str(tmp_path))
        scores = compare.measure_arms(config, ["clm"])
        assert [run["ms"] for run in scores["clm"]] == [len(told) - 1, len(told)]
        for seed, words in zip((1, 2), told[-2:]):
            assert {f"--seed={seed}", f"--max_steps={steps}", *flags.split()} <= {*words}
    assert len({word for words in told for word in words if "out_dir" in word}) == 6


def test_a_run_starts_from_the_run_of_its_own_seed(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(compare.train, "main", told.append)
    monkeypatch.setattr(compare, "scores_of_run", lambda folder: {})
    config = compare.CompareConfig(seeds=2, max_steps=5, out_dir=str(tmp_path))
    compare.measure_arms(config, ["mlm --init_from=@clm"])
    assert len(told) == 4
    for seed, words in zip((1, 2), told[1::2]):
        assert f"--init_from={compare.scores_path(config, 'clm', seed).parent}" in words


def test_verdicts_are_written_with_the_flags_of_their_runs(tmp_path, monkeypatch, capsys):
    def measured(config, arms):  # fim is worse
        bits = {arm: 1.0 if arm.startswith("clm") else 2.0 for arm in arms}
        return {
            arm: [{"bits per byte": x + seed / 1000} for seed in range(3)]
            for arm, x in bits.items()
        }

    monkeypatch.setattr(compare, "measure_arms", measured)
    monkeypatch.setattr(compare, "plot_claims", lambda *_: None)
    compare.main([f"--out_dir={tmp_path}", "--claims=fim_is_free", "--flags=--n_layer=1"])
    written = (tmp_path / "claims.md").read_text()
    assert written == capsys.readouterr().out
    assert written.count("refuted at this size") == 2
    assert written.endswith("All runs: --max_steps=500 --seeds=3 --flags=--n_layer=1\n")
