"""test_compare.py: yardsticks measure what they say, verdicts follow their rule, runs are kept."""

import functools
import json
import math
import re
import shlex
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import stories
import train
from corpus import DataConfig, load_tokens
from data import Text
from lab import compare, skills, yardsticks
from lab.claims import CLAIMS, Claim, Comparison, draw_panel, section, verdict
from lab.compare import CompareConfig, scores_path
from model import ModelConfig, Transformer
from objectives import Knobs, parse_mixture
from checkpoint import open_checkpoint
from sample import load
from tokenizer import get_tokenizer
from util import UserError

SMALL = "--n_layer=1 --n_head=1 --n_embd=16 --batch_size=4 --device=cpu"


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
    """A real comparison of small runs: its command, its folder, and for each objective the folder
    and the scores of its run."""
    folder = tmp_path_factory.mktemp("lab")
    flags = f"{SMALL} --data=stories:400 --cache_dir={folder}/cache"
    command = [f"--out_dir={folder}", "--max_steps=2", "--seeds=1", f"--flags={flags}"]
    names = ["clm", "mlm", "span", "fim", "electra"]
    compare.main([*command, f"--objectives={','.join(names)}"])
    config = CompareConfig(out_dir=str(folder), max_steps=2, seeds=1, flags=flags)
    files = {name: scores_path(config, name, 1) for name in names}
    return SimpleNamespace(
        command=command,
        folder=folder,
        config=config,
        runs={name: path.parent for name, path in files.items()},
        scores={name: json.loads(path.read_text()) for name, path in files.items()},
    )


def cells_of(table: str) -> dict[str, list[str]]:
    """A Markdown table as a dict: the first cell of each row -> its other cells."""
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: cells for name, *cells in rows}


# ---- runs ----------------------------------------------------------------------------------------


def test_a_comparison_measures_each_run_once_and_writes_a_table(lab, capsys):
    files = [run / "scores.json" for run in lab.runs.values()]
    before = [file.stat().st_mtime_ns for file in files]
    compare.main([*lab.command, "--objectives=clm,mlm,span,fim,electra"])
    assert [file.stat().st_mtime_ns for file in files] == before
    assert "5 of 5 runs are already in" in capsys.readouterr().out
    for name, scores in lab.scores.items():
        assert all(math.isfinite(value) for value in scores.values()), name
        assert scores["bits per byte"] > 1.0  # the model knows nothing
        assert 0 < scores["first event random"] < 1
        lines = yardsticks.read_log(lab.runs[name])
        assert scores["val_loss"] == [x["val_loss"] for x in lines if "val_loss" in x][-1]
        assert scores["ms"] == median(x["ms"] for x in lines if "ms" in x)
    fim = lab.scores["fim"]  # sample.py uses the last of its layouts
    assert fim["holes ended right"] == fim["holes ended right (spm)"]
    cells = cells_of((lab.folder / "table.md").read_text())
    assert cells.keys() == {"run", *(f"`{name}`" for name in lab.runs)}
    assert cells["run"][0] == "goes on: bits per byte"
    assert float(cells["`clm`"][0]) == pytest.approx(lab.scores["clm"]["bits per byte"], rel=0.01)


def test_a_run_starts_from_another_of_its_seed_and_may_be_longer(lab):
    arm = "mlm --init_from=@clm --max_steps=1.5x"
    saved = open_checkpoint(compare.run(lab.config, arm, 1)).state["settings"]
    assert saved["init_from"] == str(lab.runs["clm"]) and saved["max_steps"] == 3
    assert saved["seed"] == 1


def test_other_shares_of_the_targets_of_mlm_may_be_masked(lab):
    run = compare.run(lab.config, "mlm --mask_shares=1,0", 1)
    losses = [yardsticks.read_log(folder)[0]["loss"] for folder in (run, lab.runs["mlm"])]
    assert losses[0] != losses[1]
    x, rng, tok = np.arange(256), np.random.default_rng(1), get_tokenizer("bytes")
    for shares, seen in (((1, 0), [tok.MASK]), ((0, 1), range(256)), ((0, 0), x)):
        row = compare.mlm_with_shares(shares, x, rng, tok, 256, Knobs(mask_rate=0.9))
        assert np.isin(row.inputs[row.targets >= 0], seen).all()
        assert (row.inputs == x).all() == (shares == (0, 0))


def test_a_pattern_of_runs_leaves_out_what_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("out/a/ckpt.pt", "out/b/log.jsonl", "out/compare/x/ckpt.pt", "out/curves.png"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).touch()
    assert compare.named_runs("out/*") == ["out/a", "out/b"]
    # These get errors of their own:
    assert compare.named_runs("out/compare") == ["out/compare"]
    assert compare.named_runs("out/a,nowhere") == ["out/a", "nowhere"]


def test_runs_are_scored(lab, capsys, monkeypatch):
    monkeypatch.chdir(lab.folder)
    clm, span, electra = (lab.runs[name].name for name in ("clm", "span", "electra"))
    compare.main(["--score", clm, span, electra, "--on=clm,span"])
    printed = capsys.readouterr().out
    assert re.search(rf"(?m)^{re.escape(span)} +\d\.\d{{4}} +\d\.\d{{4}}$", printed)
    assert "electra is not trained to predict tokens" in printed
    compare.main([f"--score={clm}/best.pt"])  # the log is about the last weights
    printed = capsys.readouterr().out
    assert "goes on: bits per byte" in printed and "time of a step" not in printed


@pytest.mark.filterwarnings("ignore:constrained_layout")  # the names of these runs are very long
def test_curves_are_drawn(lab, tmp_path):
    pytest.importorskip("matplotlib")
    compare.main(["--plot", str(lab.runs["clm"]), str(lab.runs["mlm"]), f"--out_dir={tmp_path}"])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        ("--flags=--n_layers=1", "--n_layer"),
        ("--flags=--mask_rate=0.3 --objectives=clm", "mlm"),
        ("--claims=fim_is_fre", "fim_is_free"),
        ("--objectives=clmm", "clm"),
        ("--score=out/clm --on=electra", "span"),
        ("--plot=nowhere", "log.jsonl"),
    ],
)
def test_what_does_not_exist_is_refused(flags, remedy, tmp_path):
    with pytest.raises(UserError, match=remedy):
        compare.main([*flags.split(), f"--out_dir={tmp_path}"])


# ---- claims --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLAIMS)
def test_arms_of_claims_can_be_run(name):
    claim = CLAIMS[name]
    for c in claim.comparisons:
        assert c.arm != c.other and c.kind in ("better", "no worse") and c.margin > 0
    arms = [claim.flags(arm) for arm in claim.arms]
    assert len(set(arms)) == len(arms)
    for arm in arms:
        words = shlex.split(f"--overwrite --objective={arm}")
        starts = [word for word in words if word.startswith("--init_from=@")]
        for start in starts:
            other = shlex.split(start.replace("init_from=@", "objective="))
            train.settings(["--overwrite", *other])
        own = ("--max_steps=", "--mask_shares=", "--hidden_inputs=", "--init_from=@")
        train.settings([word for word in words if not word.startswith(own)])


def test_claims_are_decided_by_scores_that_exist(lab):
    known = {
        *("bits per byte of own text", "bits per byte of own text at most"),
        *("roles of names", "documents", "second parts found"),
        *("tokens per pass at temperature 0", "tokens per pass at temperature 0.8"),
        *("times as fast at temperature 0", "times as fast at temperature 0.8"),
        *(f"second halves found among {n}" for n in (200,)),
        *yardsticks.OTHER_ROWS,
    }
    known = known.union(*(scores.keys() for scores in lab.scores.values()))
    for claim in CLAIMS.values():
        assert {comparison.score for comparison in claim.comparisons} <= known, claim.text


def test_a_claim_is_judged_from_real_runs(lab, monkeypatch, capsys):
    """The same runs as the table's; verdicts are written with the flags of their runs."""
    rules = [("clm", "better", "mlm", "first event, no such score", 0.02)]
    monkeypatch.setitem(CLAIMS, "test", Claim("clm wins", "", rules))
    compare.main([*lab.command, "--claims=test"])
    written = (lab.folder / "claims.md").read_text()
    assert written in capsys.readouterr().out
    assert written.startswith("### Clm wins\n")
    assert "| clm better than mlm | 0.02 | first event | 0." in written
    assert "| cannot tell |" in written  # there is only one seed
    assert "| no such score | no such score |" in written
    assert written.endswith(f"--max_steps=2 --seeds=1 --flags='{lab.config.flags}'\n")


@pytest.mark.parametrize(
    ("kind", "arm", "other", "expected"),
    [
        ("better", (0.20, 0.001), (0.25, 0.001), "supported"),
        ("better", (0.25, 0.001), (0.20, 0.001), "refuted"),
        ("better", (0.249, 0.001), (0.25, 0.001), "refuted"),  # below the margin
        ("better", (0.241, 0.001), (0.25, 0.001), "cannot tell"),
        ("better", (0.20, 0.04), (0.25, 0.04), "cannot tell"),  # within the noise
        ("better", (0.21, 0.01), (0.25, 0.01), "supported"),  # surely above zero is enough
        ("no worse", (0.25, 0.001), (0.25, 0.001), "supported"),
        ("no worse", (0.20, 0.001), (0.25, 0.001), "supported"),
        ("no worse", (0.255, 0.001), (0.25, 0.001), "supported"),
        ("no worse", (0.255, 0.005), (0.25, 0.005), "cannot tell"),  # noise does not help
        ("no worse", (0.262, 0.001), (0.25, 0.001), "cannot tell"),
        ("no worse", (0.28, 0.001), (0.25, 0.001), "refuted"),
    ],
)
def test_verdicts_follow_their_rule(kind, arm, other, expected):
    """Lower bits per byte and losses are better, and higher shares."""
    runs = [[mean - sd, mean, mean + sd] for mean, sd in (arm, other)]
    for score in ("bits per byte", "bits per byte of own text", "val_loss", "spans of 3"):
        bits = Comparison("a", kind, "b", score, 0.01)
        assert verdict(bits, *runs) == expected
        assert verdict(bits, runs[0][:1], runs[1]) == "cannot tell"
    share = bits._replace(score="first event")
    assert verdict(share, *([1 - value for value in each] for each in runs)) == expected


def test_without_room_there_is_no_verdict():
    """The best is 0.1001 bits for stories, and 1 for shares; for speed and Python it is unknown."""
    cases = [("better", 0.101, 0.109, "no room"), ("better", 0.101, 0.112, "supported")]
    cases += [("no worse", 0.109, 0.104, "no room"), ("no worse", 0.112, 0.104, "supported")]
    for kind, arm, other, expected in cases:
        bits = Comparison("a", kind, "b", "bits per byte", 0.01)
        runs = [[mean - 1e-4, mean + 1e-4] for mean in (arm, other)]
        shares = [[1.1001 - value for value in values] for values in runs]
        assert verdict(bits, *runs) == expected
        assert verdict(bits._replace(score="word fits"), *shares) == expected
        own = verdict(bits._replace(score="bits per byte of own text"), *runs)
        speed = verdict(bits._replace(score="times as fast at temperature 0"), *shares)
        assert "no room" not in (own, speed)


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
    assert "| a better than b | 0.02 | x | 0.9 ± 0.0014 and 0.5 ± 0.0014 | supported |" in section(
        claim, known
    )


# ---- the table -----------------------------------------------------------------------------------


def test_a_table_takes_runs_of_unlike_scores():
    """Here only some runs have scores, and only some were measured beside random networks. Step
    times are relative to the first row that has one."""
    scores = {"bits per byte": 1.0, "first event": 0.7}
    runs = {"b": [{}], "a": [scores, scores | {"first event random": 0.5}]}
    few = cells_of("\n".join(compare.table(runs)))
    assert few["run"] == ["`b`", "`a`"]
    assert few["goes on: bits per byte"] == ["-", "1 ± 0"]
    assert few["first event"] == ["-", "0.7 ± 0 (random 0.5)"]
    runs |= {"c": [{"ms": 40.0}, {"ms": 60.0}], "d": [{"ms": 80.0}]}
    many = cells_of("\n".join(compare.table(runs)))
    step = "time of a step, first row = 1"
    assert many["run"] == ["goes on: bits per byte", "first event", step]
    assert many["`a`"] == ["1 ± 0", "0.7 ± 0 (random 0.5)", "-"]
    assert (many["`c`"][-1], many["`d`"][-1]) == ("1 ± 0.28", "1.6")
    first = [{"holes filled right": 0.9, "masked words found": 0.2}]
    assert compare.cell(first, ["holes filled right", "masked words found"]) == "0.9"


# ---- going on ------------------------------------------------------------------------------------


def test_the_chain_rule_gives_a_probability(lab):
    """Over all next tokens, exp(-nats) sums to 1. The nats of two tokens are the sum of their
    conditional nats, so over all texts of two tokens exp(-nats) sums to 1 as well."""
    trained = load(lab.runs["mlm"])
    nats = functools.partial(yardsticks.chain_rule_nats, trained)
    allowed = trained.allowed().nonzero().squeeze(1).tolist()
    first = trained.tok.encode("Tom has")
    assert sum(math.exp(-nats(first, [id])) for id in allowed) == pytest.approx(1, abs=1e-4)
    a, b = allowed[:2]
    expected = nats(first, [a]) + nats([*first, a], [b])
    assert nats(first, [a, b]) == pytest.approx(expected, abs=1e-5)


def test_the_bits_of_a_second_half_are_those_of_its_tokens_among_all_that_may_be_drawn(lab):
    """Token by token, from a softmax over text and EOT only: special ids are never generated."""
    trained = load(lab.runs["clm"])
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
    bits = yardsticks.second_half_bits(trained, pairs)
    assert bits == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-4)


def test_a_mixture_goes_on_as_its_first_member_does(lab):
    trained = load(lab.runs["clm"])
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
    flags = f"{SMALL} --objective=clm --data=abc.txt --tokenizer=bytes --block_size=512"
    train.main([*flags.split(), "--max_steps=60", "--out_dir=run"], report=False)
    trained = load("run")
    own = yardsticks.own_text("run")
    pairs = yardsticks.halves_of_windows(trained, own)
    assert len(pairs) >= 9
    for first, second in pairs:
        assert bytes(first) + bytes(second) in b"abc" * 101
        assert (len(first), len(second)) == yardsticks.WINDOW
    learned = yardsticks.second_half_bits(trained, pairs)
    assert learned < 0.5
    other = [(first, second[::-1]) for first, second in pairs]
    assert yardsticks.second_half_bits(trained, other) > 2 * learned
    assert yardsticks.scores_of_run("run")["bits per byte of own text"] == learned
    trained.block_size = 128  # room for the second half and the end of the first
    assert yardsticks.second_half_bits(trained, pairs) == pytest.approx(learned, rel=0.5)
    trained.block_size = 96  # no second half fits
    assert yardsticks.second_half_bits(trained, pairs) is None
    found = yardsticks.scores_of_model(trained, own)
    assert found.keys() == {"targets per position"}
    Path("abc.txt").write_text("abd" * 20_000)
    with pytest.raises(UserError, match="--data"):
        yardsticks.own_text("run")


def test_rows_too_short_for_a_story_leave_out_what_is_asked_about_stories(lab):
    trained = load(lab.runs["clm"])
    trained.block_size = 32
    assert yardsticks.scores_of_model(trained).keys() == {"targets per position"}


def test_windows_of_a_text_are_the_same_bytes_for_every_tokenizer(lab):
    tokens = load_tokens(DataConfig("stories:200", cache_dir=f"{lab.folder}/cache"))
    trained = load(lab.runs["clm"])
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
    trained = load(lab.runs["clm"])
    trained.tok = get_tokenizer("bytes")
    ids = np.arange(9000) // 300  # window number n is made of the byte n
    pairs = yardsticks.halves_of_windows(trained, Text(ids, trained.tok.EOT), apart=True)
    assert len({first[0] for first, _ in pairs}) == len(pairs) == 29
    assert all(set(first) == set(second) == {first[0]} for first, second in pairs)


# ---- probes --------------------------------------------------------------------------------------


def test_a_probe_reads_what_is_linear_and_nothing_from_noise():
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(900, 8, generator=generator)
    labels = torch.bucketize(states[:, 0] - states[:, 1], torch.tensor([-0.6, 0.6]))  # in order
    assert yardsticks.probe(states, labels, 600) > 0.9
    noise = torch.randint(3, (900,), generator=generator)
    assert yardsticks.probe(states, noise, 600) < 0.42


def test_a_probe_is_tested_on_questions_that_it_has_not_learned():
    """Labels are noise, but with as many channels as questions a probe learns them by heart."""
    torch.manual_seed(0)
    states, labels = torch.randn(200, 200), torch.randint(2, (200,))
    assert yardsticks.probe(states, labels, 150) < 0.75


def test_a_random_network_has_weights_of_the_usual_scale():
    """With a segment embedding ten times as large, probes of nsp and sop were right in 91%."""
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


def test_events_are_recognized_by_each_of_their_words():
    lines = [f"At noon, Ann {verb} him 1 more." for verb in stories.WORDS["gives"]]
    lines += [f"At noon, Tom {verb} 2 more." for verb in stories.WORDS["finds"]]
    lines += [f"At noon, Tom {verb} 1 of them." for verb in stories.WORDS["loses"]]
    lines += ["At noon, they meet a shy fox.", "At noon, they run from the mill to the park."]
    first = "At dawn, Tom shows Ann 5 red cats at the mill.\n"
    kinds = [yardsticks.kinds_of_events(first + line) for line in lines]
    assert kinds == [[0]] * 3 + [[1]] * 3 + [[2]] * 3 + [[3], [4]]
    assert yardsticks.kinds_of_events(f"{lines[-2]}\n{lines[0]}") == [3, 0]  # in order


def test_a_word_that_does_not_fit_contradicts_what_was_told_before():
    tok = get_tokenizer("bytes")
    told = yardsticks.short_stories(1000)
    questions, n = yardsticks.fitting_words(SimpleNamespace(tok=tok), told)
    assert len(questions) == yardsticks.N_WORDS and n == len(questions) * 2 // 3
    assert sum(fits for *_, fits in questions) == pytest.approx(len(questions) / 2, rel=0.2)
    texts = {story.text for story in told}
    for ids, at, fits in questions:
        assert fits == (tok.decode(ids) in texts)
        before, word = tok.decode(ids[: at + 1]).rsplit(maxsplit=1)
        assert not fits or word in before


class Neighbor:
    """A model whose state at a byte is the byte `far` places after it."""

    tok = get_tokenizer("bytes")
    block_size = 64
    attention = "full"

    def __init__(self, far: int):
        self.far = far

    def states_both_ways(self, ids):
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
    text = text_of(*programs, "no Python at all", "x = (")
    exam = yardsticks.roles_of_names(Neighbor(1), text)
    assert yardsticks.share_right(Neighbor(1), exam) == 1.0
    assert yardsticks.share_right(Neighbor(0), exam) < 0.45  # guessing: a third
    assert yardsticks.roles_of_names(Neighbor(1), text_of("no Python", *programs[:3])) is None


def test_names_are_found_at_their_last_byte():
    source = "if é:\r\n\tdel x\r\n\ty = f(é)\n".encode()
    found = yardsticks.names_by_role(source)
    ends = [[source[: place + 1].decode()[-1] for place in places] for places in found]
    assert ends == [["f"], ["y"], ["é", "é"]]


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


# ---- drafts, losses ------------------------------------------------------------------------------


def test_tokens_of_a_pass_are_more_where_heads_draft_what_is_written(tmp_path):
    """One letter, repeated, is easy to draft; but the heads of a fresh model draft wrongly."""
    (tmp_path / "a.txt").write_text("a" * 20_000)
    flags = f"{SMALL} --n_layer=2 --objective=mtp --data={tmp_path}/a.txt --tokenizer=bytes"
    flags += f" --mtp_heads=chain --block_size=64 --cache_dir={tmp_path} --out_dir={tmp_path}/"
    found = []
    for steps in (1, 40):
        train.main(f"{flags}{steps} --max_steps={steps}".split(), report=False)
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


def test_a_loss_on_own_text_is_on_that_text(lab):
    """A model that has seen only stories finds other text harder."""
    trained = load(lab.runs["clm"])
    other = Text(np.array(trained.tok.encode("zq {}[]~ XKCD! " * 500)), trained.tok.EOT)
    loss = [yardsticks.loss_on(trained, "clm", Knobs(), text) for text in (None, other)]
    assert loss[0] < loss[1]
