"""test_model.py: what the transformer promises, as executable tests.

The attention rule and everything that must follow it, the kernels against slow reference versions,
the cache, the heads. What an objective's rows mean is tested in test_objectives.py, decoding in
test_generate.py.

    pytest test_model.py
"""

import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch.nn import functional as F

import model as model_file
from data import make_row, mask_kind
from device import Machine
from model import (
    KVCache,
    ModelConfig,
    RMSNorm,
    Transformer,
    apply_rotary,
    attend,
    block_mask,
    dense_mask,
    rotary,
)
from objectives import OBJECTIVES, Knobs, attention_mask, total_loss
from test_objectives import (
    TOK,
    awake,
    batch_of,
    draw,
    may_see,
    model_for,
)


def tensors(segment, prefix) -> tuple[torch.Tensor, torch.Tensor]:
    """A row's segment and prefix -> the tensors that the model takes, (1, T) each."""
    return torch.tensor(np.array(segment))[None], torch.tensor(np.array(prefix, bool))[None]


def test_model_imports_nothing_of_the_project():
    """So that it can be copied alone."""
    text = Path(model_file.__file__).read_text(encoding="utf-8")
    imported = set(re.findall(r"(?m)^ *(?:import|from) (\w+)", text))
    assert imported == {"functools", "math", "dataclasses", "torch"}


# ---- the attention rule --------------------------------------------------------------------------


def naive_attention(q, k, v, allowed) -> np.ndarray:
    """(H, T, D) arrays and (T, T) bool: one head and one query at a time."""
    out = np.zeros_like(q)
    for h, t in np.ndindex(q.shape[:2]):
        group = h * len(k) // len(q)
        score = np.exp(k[group] @ q[h, t] / q.shape[2] ** 0.5)
        score = np.where(allowed[t], score, 0)
        out[h, t] = score / score.sum() @ v[group]
    return out


PACKED_ROW = make_row(
    np.zeros(14),
    np.zeros(14),
    raw=None,
    segment=np.array([1] * 5 + [2] * 6 + [0] * 3),
    prefix=np.isin(range(14), [0, 1, 2, 5, 6, 13]),
)
FULL_ROW = make_row(np.zeros(14), np.zeros(14), raw=None, prefix=True)
CAUSAL_ROW = make_row(np.zeros(14), np.zeros(14), raw=None)
ROWS = [("rule", PACKED_ROW), ("full", FULL_ROW), ("causal", CAUSAL_ROW)]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("kind, row", ROWS)
def test_attention_is_the_naive_rule(kind, row, kv_heads):
    dice = np.random.default_rng(0)
    q, k, v = (dice.normal(size=(heads, 14, 8)) for heads in (4, kv_heads, kv_heads))
    segment, prefix = tensors(row.segment, row.prefix)
    mask = model_for("clm").attention_mask(kind, segment, prefix)
    assert isinstance(mask, str) == (kind != "rule")
    got = attend(*(torch.tensor(x)[None] for x in (q, k, v)), mask)[0].numpy()
    np.testing.assert_allclose(got, naive_attention(q, k, v, may_see(row)), atol=1e-12)


def test_a_shortcut_is_taken_only_where_it_is_the_rule():
    """For every row of three positions, the chosen mask lets each position see exactly what the
    rule does. Padding may see anything."""
    model = model_for("clm")
    shortcuts = {"causal": np.tri(3, dtype=bool), "full": np.ones((3, 3), bool)}
    kinds = set()
    for segment in itertools.product([0, 1, 2], repeat=3):
        for prefix in itertools.product([False, True], repeat=3):
            zeros = np.zeros(3, np.int32)
            row = make_row(zeros, zeros, zeros, np.array(prefix), np.array(segment))
            kind = mask_kind(row.segment[None], row.prefix[None])
            mask = model.attention_mask(kind, *tensors(row.segment, row.prefix))
            allowed = shortcuts[mask] if isinstance(mask, str) else mask[0, 0].numpy()
            real = row.segment > 0
            assert (allowed == may_see(row))[real].all(), (segment, prefix, kind)
            kinds.add(kind)
    assert kinds == {"causal", "full", "rule"}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_rows_of_an_objective_take_the_fast_path(name):
    batch = batch_of(draw(8, name))
    fast = {"causal": "causal", "full": "full", "prefix": "rule"}[OBJECTIVES[name].attention]
    padded = bool((batch.segment != 1).any())
    assert batch.mask_kind == ("rule" if padded and fast == "full" else fast)


@pytest.mark.parametrize("compiled, T, used", [(0, 8192, False), (1, 8192, True), (1, 8191, False)])
def test_flex_attention_is_used_only_where_it_is_compiled(compiled, T, used, monkeypatch):
    """Uncompiled, it holds all scores in memory; in short rows a dense mask is faster. (The rows of
    this test only claim to be on CUDA.)"""
    monkeypatch.setattr(model_file, "dense_mask", lambda segment, prefix: "dense")
    model = model_for("span")
    model.block_mask = lambda segment, prefix: "FlexAttention's"
    assert not model.flex
    model.flex = bool(compiled)
    rows = SimpleNamespace(is_cuda=True, shape=(4, T))
    assert model.attention_mask("rule", rows, rows) == ("FlexAttention's" if used else "dense")


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000 Laptop GPU", None),
    ],
)
def test_a_card_is_known_by_its_whole_name(name, tflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    machine = Machine("cpu")
    machine.device = torch.device("cuda")
    assert machine.peak_flops() == (tflops and tflops * 1e12)


def test_the_compiled_model_is_the_model():
    """By this machine's C++ compiler, with the dense mask: this path once had a bug of its own. The
    result is cached for other processes."""
    try:
        torch.compile(torch.neg)(torch.ones(8))
    except Exception:  # each compiler reports in its own way what is missing
        pytest.skip("needs a C++ compiler and Python's headers")
    model = awake(model_for("span", n_layer=1))
    batch = batch_of(draw(2, "span"))
    gradients = []
    cached = counters["aot_autograd"]
    cached.clear()
    for _ in range(2):
        states = model(batch.inputs, attention_mask(model, batch))[0]
        states.square().mean().backward()
        gradients.append({path: p.grad for path, p in model.named_parameters()})
        model.zero_grad()
        model.compile_for_training()
    for path, gradient in gradients[0].items():
        if gradient is not None:
            torch.testing.assert_close(gradients[1][path], gradient, rtol=1e-3, atol=1e-6)
    assert cached["total"] == 1 and not cached["autograd_cache_bypass"], cached


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_is_dense_attention():
    """Rows of two of its blocks: packed, prefix, padded, and two documents of a block each."""
    T = 256
    rows = [draw(1, name, T=T)[0] for name in ("span", "prefix", "nsp")]
    segments = [row.segment for row in rows]
    prefixes = [row.prefix for row in rows]
    segments.append(np.repeat(np.int32([1, 2]), T // 2))
    prefixes.append(np.zeros(T, bool))
    segment = torch.from_numpy(np.stack(segments))
    prefix = torch.from_numpy(np.stack(prefixes))

    tiles = block_mask(segment, prefix)
    visited = tiles.to_dense()[:, 0].bool().tolist()
    assert visited[3] == [[True, False], [False, True]], "a block in which nothing is seen"

    torch.manual_seed(0)
    q, k, v = (torch.randn(len(segment), heads, T, 16) for heads in (2, 1, 1))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        got = attend(q, k, v.to(dtype), tiles)  # autocast leaves q and k in float32
        want = attend(q, k, v.to(dtype), dense_mask(segment, prefix))
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, atol=tolerance, rtol=10 * tolerance)


@pytest.mark.parametrize("kind", ["linear", "parallel", "chain"])
def test_a_model_with_heads_compiles_to_the_same_model(kind):
    """The table of rotary positions is a constant there: no graph has a sine."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return aot_eager(graph, inputs)

    knobs = dict(mtp_heads=kind, n_future=2)
    model = awake(model_for("mtp", n_layer=1, knobs=Knobs(**knobs)))
    compiled = torch.compile(model, backend=backend, dynamic=False)
    batch = batch_of(draw(2, "mtp", T=16, **knobs))
    gradients = []
    for network in (model, compiled):
        states = network(batch.inputs, "causal", batch.extra)
        torch.stack(states).square().mean().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)
    assert len(graphs) == 1 and ".sin(" not in graphs[0]


def test_compiled_chunks_fix_the_vocabulary_but_not_the_number_of_positions():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = model_for("clm")
    options = dict(backend=backend, dynamic=True)
    model.cross_entropy_chunk = torch.compile(model.cross_entropy_chunk, **options)
    for n in (5, 7):
        model.cross_entropy(torch.randn(n, 32), torch.arange(n), torch.ones(n))
    assert len(graphs) == 1
    model.cross_entropy(torch.randn(7, 32), torch.arange(7), torch.ones(7), torch.randn(600, 32))
    assert len(graphs) == 2
    assert not hasattr(model.unembedding, "_dynamo_static_indices")  # else the model is recompiled


def test_what_training_calls_is_compiled():
    model = model_for("electra")
    plain = [model.block_mask, model.cross_entropy_chunk, model.generator_states]
    model.compile_for_training()
    compiled = [model.block_mask, model.cross_entropy_chunk, model.generator_states]
    assert [f._torchdynamo_orig_callable for f in compiled] == plain
    assert model.flex


@torch.no_grad()  # FlexAttention has no backward pass on a CPU
def test_a_model_compiled_with_flex_attention_is_the_model_and_is_compiled_once():
    """Each step brings a new mask of the same shape."""
    T = 128
    model = awake(model_for("span", n_layer=1))
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)
    batch = batch_of(draw(2, "span", T=T))
    compiled_mask = torch.compile(block_mask, backend="aot_eager", dynamic=False)
    halves = torch.where(torch.arange(T) < T // 2, batch.segment, batch.segment + 9)
    for segment, stance in ((batch.segment, "default"), (halves, "fail_on_recompile")):
        want = model(batch.inputs, dense_mask(segment, batch.prefix))[0]
        with torch.compiler.set_stance(stance):
            got = compiled(batch.inputs, compiled_mask(segment, batch.prefix))[0]
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


# ---- the rule is written in one place ------------------------------------------------------------


def sliding_window(q, k, segment_q, segment_k, prefix_q, prefix_k):
    """Another rule: the last three positions of the segment; in the prefix, the next two too."""
    near = (k > q - 3) & (k < q + 3)
    return near & (segment_q == segment_k) & ((k <= q) | (prefix_q & prefix_k))


@pytest.fixture
def edited(monkeypatch):
    """A reader's edit of the rule, in its one place."""
    monkeypatch.setattr(model_file, "may_attend", sliding_window)


def rule_of_the_papers(q, k, segment_q, segment_k, prefix_q, prefix_k):
    return (segment_q == segment_k) & ((k <= q) | (prefix_q & prefix_k))


def test_edited_rule_is_noticed_in_long_rows():
    """In 20,000 positions, not all pairs are compared."""
    for kind in ("causal", "full"):
        assert model_file.rule_is_plain(kind, 20_000, rule_of_the_papers)
        assert not model_file.rule_is_plain(kind, 20_000, sliding_window)


def near(T: int) -> np.ndarray:
    """(T, T): is the key less than three positions away?"""
    return abs(np.subtract.outer(np.arange(T), np.arange(T))) < 3


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_edited_rule_reaches_flex_attention(edited):
    [row] = draw(1, "span", T=128)
    arrays = tensors(row.segment, row.prefix)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 128, 16)
    got = attend(q, k, v, block_mask(*arrays))
    allowed = torch.from_numpy(may_see(row) & near(128))
    torch.testing.assert_close(got, attend(q, k, v, allowed), atol=1e-5, rtol=1e-4)


def seen_by_the_last(model, batch) -> list[int]:
    """How far back the tokens are that change the last state of a model of one block."""
    states = model(batch.inputs, attention_mask(model, batch))[0]
    distances = []
    for t in range(batch.inputs.shape[1]):
        changed = batch.inputs.clone()
        changed[0, t] = (changed[0, t] + 1) % TOK.n_ordinary
        moved = model(changed, attention_mask(model, batch))[0] - states
        if moved[0, -1].abs().max() > 1e-9:
            distances.append(batch.inputs.shape[1] - 1 - t)
    return sorted(distances)


@pytest.mark.parametrize("name", ["clm", "mlm"])
def test_edited_rule_reaches_training(name, edited):
    """Rows that are "causal" or "full" no longer take the shortcut."""
    model = awake(model_for(name, n_layer=1, short_conv=False), torch.float64)
    batch = batch_of(draw(1, name, T=12))
    assert batch.mask_kind in ("causal", "full")
    with torch.no_grad():
        assert seen_by_the_last(model, batch) == [0, 1, 2]


def test_edited_rule_reaches_a_model_that_is_given_no_mask(edited):
    model = awake(model_for("clm", short_conv=False))
    ids = torch.arange(12)[None]
    allowed = torch.from_numpy(near(12) & np.tri(12, dtype=bool))
    assert torch.equal(model(ids)[0], model(ids, allowed[None, None])[0])


def test_a_mask_that_means_nothing_is_refused():
    """Otherwise any other word would let a position see everything after it."""
    model = Transformer(ModelConfig(vocab_size=64))
    ids = torch.zeros(1, 8, dtype=torch.long)
    with pytest.raises(AssertionError, match="causal, full or rule, got prefix"):
        model.attention_mask("prefix", torch.ones_like(ids), ids < 1)
    with pytest.raises(AssertionError, match="causal or full, got casual"):
        model(ids, "casual")
    with pytest.raises(AssertionError, match=r"\(B or 1, 1, T, S\), got \(8, 8\)"):
        model(ids, torch.ones(8, 8, dtype=torch.bool))


# ---- the short convolution -----------------------------------------------------------------------


def mixed_by_hand(model, ids, allowed) -> torch.Tensor:
    """(T,) ids, (T, T) who sees whom -> (T, C)."""
    x = model.embed_tokens(ids)
    mixed = x.clone()
    for t in range(len(ids)):
        for beside, share in zip((t - 1, t + 1), model.short_conv):
            if 0 <= beside < len(ids) and allowed[t, beside]:
                mixed[t] += share * x[beside]
    return mixed


@torch.no_grad()
@pytest.mark.parametrize("name", OBJECTIVES)
def test_short_convolution_sees_what_the_rule_allows(name):
    """With every kind of mask that an objective's rows use, and with FlexAttention's."""
    model = awake(model_for(name), torch.float64)
    rows = draw(4, name, T=128)
    batch = batch_of(rows)
    T = batch.inputs.shape[1]
    tiles = block_mask(batch.segment, batch.prefix)
    for mask in (attention_mask(model, batch), tiles):
        got = model.embed(batch.inputs, mask)
        for row, ids, mixed in zip(rows, batch.inputs, got):
            want = mixed_by_hand(model, ids, may_see(row)[:T, :T])
            torch.testing.assert_close(mixed, want)


def only_itself(q, k, segment_q, segment_k, prefix_q, prefix_k):
    """Another rule: a position sees only itself."""
    return (q == k) & (segment_q == segment_k)


@torch.no_grad()
def test_edited_rule_reaches_the_short_convolution(monkeypatch):
    """A token that sees only itself gets nothing from its neighbors, in training or in decoding."""
    monkeypatch.setattr(model_file, "may_attend", only_itself)
    for name in ("clm", "mlm"):
        model = awake(model_for(name))
        batch = batch_of(draw(2, name))
        own = model.embed_tokens(batch.inputs)
        assert torch.equal(model.embed(batch.inputs, attention_mask(model, batch)), own)

        cache = KVCache(model.config, batch=2, slots=48, device="cpu")
        for positions in (torch.arange(5), torch.arange(5, 7)):
            mask = cache.mask(positions, prefix_length=5)
            read = model.embed(batch.inputs[:, positions], mask, positions, cache)
            assert torch.equal(read, own[:, positions])


@torch.no_grad()
def test_electras_generator_does_without_the_short_convolution():
    model = awake(model_for("electra"))
    ids = torch.arange(8)[None]
    states = model.generator_states(ids, "full")
    model.short_conv.zero_()
    assert torch.equal(model.generator_states(ids, "full"), states)


# ---- values that read the embeddings -------------------------------------------------------------


@torch.no_grad()
def test_values_read_the_embeddings_in_every_block(monkeypatch):
    model = awake(model_for("clm"))
    ids = torch.arange(10)[None]
    used = []

    def watched(q, k, v, mask):
        used.append(v.transpose(1, 2).flatten(2))
        return attend(q, k, v, mask)

    monkeypatch.setattr(model_file, "attend", watched)
    model.trunk(ids, "causal")
    x = embedded = model.embed(ids, "causal")
    for layer, values in zip(model.layers, list(used), strict=True):
        attention = layer.self_attn
        want = layer.input_layernorm(x) @ attention.v_proj.weight.T
        torch.testing.assert_close(values, want + embedded @ attention.v_embed.weight.T)
        x = layer(x, "causal", model.rope(x), embedded=embedded)


# ---- positions and the cache ---------------------------------------------------------------------


def test_rotary_turns_pairs_and_scores_depend_on_distance_alone():
    config = ModelConfig(head_dim=16)
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def at(x, position):
        return apply_rotary(
            x, rotary(torch.tensor([position]), config.head_dim, config.rope_theta)
        )[0, 0, 0]

    assert torch.equal(at(q, 0), q[0, 0, 0])
    assert at(q, 7).norm().item() == pytest.approx(q.norm().item())
    score = at(q, 9) @ at(k, 4)
    torch.testing.assert_close(score, at(q, 105) @ at(k, 100), atol=1e-4, rtol=1e-4)
    assert abs(score - at(q, 9) @ at(k, 5)) > 1e-2

    # Pair (x[i], x[i + D/2]) turns by position · theta^(-2i/D).
    i, position = 3, 5
    angle = position * config.rope_theta ** (-2 * i / 16)
    x = q[0, 0, 0]
    want = x[i] * math.cos(angle) - x[i + 8] * math.sin(angle)
    assert at(q, position)[i].item() == pytest.approx(want.item(), abs=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("prefix_length", [0, 5])
def test_reading_with_the_cache_is_reading_at_once(prefix_length):
    """Five tokens at once, which may be a prefix, then pieces of one to three tokens. Some tokens
    are read twice, as after a rejected draft."""
    model = awake(model_for("prefix", n_kv_head=1), torch.float64)
    ids = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))
    segment = torch.ones(2, 12)
    prefix = (torch.arange(12) < prefix_length).expand(2, 12)
    want = model.trunk(ids, dense_mask(segment, prefix))

    cache = KVCache(model.config, batch=2, slots=16, device="cpu", dtype=torch.float64)
    for start, stop in ((0, 5), (5, 6), (6, 9), (7, 9), (9, 12)):
        positions = torch.arange(start, stop)
        mask = cache.mask(positions, prefix_length)
        read = ids[:, start:stop]
        if (start, stop) == (6, 9):
            read = (read + 1) % 256  # a wrong draft, overwritten by the next pass ...
            read[:, 0] = ids[:, 6]  # ... except for its first token, which was right
        got = model.trunk(read, mask, positions, cache)
        if (start, stop) != (6, 9):
            torch.testing.assert_close(got, want[:, start:stop])


# ---- cross entropy -------------------------------------------------------------------------------


@pytest.mark.parametrize("banned", [None, 7])
def test_linear_cross_entropy_is_cross_entropy(banned):
    """Loss and gradients, over several chunks, with weights, and with an id that can never be
    predicted."""
    V = 1 << 13
    torch.manual_seed(0)
    model = model_for("clm")
    states = torch.randn(600, 16, requires_grad=True)
    matrix = torch.randn(V, 16, requires_grad=True)
    targets = torch.randint(9, V, (600,))
    weights = torch.rand(600)
    total, nll = model.cross_entropy(states, targets, weights, matrix, banned)

    logits = states @ matrix.T
    if banned is not None:
        logits = logits.index_fill(1, torch.tensor([banned]), -math.inf)
    each = F.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(nll, each.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(total, (each * weights).sum())
    got = torch.autograd.grad(3 * total, (states, matrix))
    want = torch.autograd.grad(3 * (each * weights).sum(), (states, matrix))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_a_target_that_is_nearly_certain_keeps_its_gradient_in_bfloat16():
    """p - 1 from p would be 0 there: bfloat16 has no number between 0.996 and 1."""
    model = model_for("clm")
    matrix = torch.eye(8, requires_grad=True)
    states = (9.0 * torch.eye(8)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        total, nll = model.cross_entropy(states, torch.arange(8), torch.ones(8), matrix)
    total.backward()
    p = math.exp(9) / (math.exp(9) + 7)
    assert p > 0.999
    np.testing.assert_allclose(states.grad.diagonal(), p - 1, rtol=5e-3)
    np.testing.assert_allclose(matrix.grad.diagonal(), 9 * (p - 1), rtol=1e-2)


@pytest.mark.parametrize("name", ["clm", "mtp", "electra"])
def test_on_cuda_the_residual_stream_is_in_the_dtype_of_autocast(name, monkeypatch):
    """Here CUDA's autocast is said to be what the CPU's is. The losses stay in float32, and so does
    the residual stream of electra's generator."""
    enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: enabled("cpu"))
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: dtype_of("cpu"))
    model = awake(model_for(name))
    batch = batch_of(draw(2, name))
    with torch.autocast("cpu", torch.bfloat16):
        assert model.trunk(batch.inputs, "causal").dtype == torch.bfloat16
        metrics = OBJECTIVES[name].loss(model, batch, TOK, Knobs())
    loss = total_loss(metrics)
    assert loss.dtype == torch.float32
    loss.backward()
    assert not torch.is_autocast_enabled("cpu")
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)


def test_linear_cross_entropy_holds_a_chunk_of_logits_at_a_time():
    """And it computes gradients only in training, and only if something is trained."""
    model = model_for("clm")
    calls = []

    def watched(states, *rest):
        calls.append((len(states), rest[-1]))
        return model_file.cross_entropy_chunk(states, *rest)

    model.cross_entropy_chunk = watched
    matrix = torch.zeros(1 << 13, 32)
    n = 3 * 256 + 1
    states = torch.zeros(n, 32, requires_grad=True)
    rest = (torch.zeros(n, dtype=torch.long), torch.ones(n), matrix)
    model.cross_entropy(states, *rest)
    assert calls == [(256, True), (256, True), (256, True), (1, True)]
    with torch.no_grad():
        model.cross_entropy(states, *rest)
    model.cross_entropy(states.detach(), *rest)
    assert calls[4:] == 2 * [(256, False), (256, False), (256, False), (1, False)]


# ---- heads and shapes ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "parallel", "chain"])
def test_mtp_without_its_heads_is_clm(kind):
    full = awake(model_for("mtp", knobs=Knobs(mtp_heads=kind)))
    plain = model_for("clm")
    trunk = {key: p for key, p in full.state_dict().items() if not key.startswith("future")}
    plain.load_state_dict(trunk)
    batch = batch_of(draw(8, "mtp"))
    first = full(batch.inputs, ahead=batch.extra)[0]
    torch.testing.assert_close(first, plain(batch.inputs)[0])


def test_mtp_with_one_horizon_is_clm():
    model = awake(model_for("clm"))
    losses = []
    for name, knobs in (("clm", {}), ("mtp", {"n_future": 1})):
        batch = batch_of(draw(8, name, **knobs))
        parts = OBJECTIVES[name].loss(model, batch, TOK, Knobs(**knobs))
        losses.append(total_loss(parts).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["linear", "parallel"])
def test_linear_and_parallel_heads_read_the_trunks_state_alone(kind):
    """That is, its state before the final norm, which all horizons share."""
    model = awake(model_for("mtp", knobs=Knobs(mtp_heads=kind)))
    ids = torch.randint(0, 256, (1, 9), generator=torch.Generator().manual_seed(0))
    states = model(ids)
    h = model.trunk(ids, "causal")
    for k, head in enumerate(model.future, 1):
        if kind == "linear":
            expected = h + h @ head.linear.weight.T
        else:
            expected = head.block(h, "causal", model.rope(h))
        torch.testing.assert_close(states[k], model.norm(expected))


@torch.no_grad()
def test_chain_head_is_deepseeks_formula():
    """h_k = block(W [norm(h_{k-1}); norm(emb(x[t+k-1]))]), where h_1 is the trunk's state before
    the final norm."""
    model = awake(model_for("mtp", knobs=Knobs(mtp_heads="chain")))
    for head in model.future:
        torch.nn.init.uniform_(head.norm_h.weight)
        torch.nn.init.uniform_(head.norm_e.weight)
    ids = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(0))
    T = 9
    ahead = torch.stack([ids[:, k : k + T] for k in (1, 2, 3)], dim=-1)
    with pytest.raises(ValueError, match="give `ahead`"):
        model(ids[:, :T])
    states = model(ids[:, :T], ahead=ahead)
    h = model.trunk(ids[:, :T], "causal")
    torch.testing.assert_close(states[0], model.norm(h))
    for k, head in enumerate(model.future, 1):
        token = model.embed_tokens(ids[:, k : k + T])
        both = torch.cat([head.norm_h(h), head.norm_e(token)], dim=-1)
        h = head.block(both @ head.join.weight.T, "causal", model.rope(h))
        torch.testing.assert_close(states[k], model.norm(h))


@pytest.mark.parametrize("kv_heads, tied", [(4, False), (2, False), (1, True)])
def test_model_is_qwen3(kv_heads, tied):
    """Another implementation with the same weights, under the same names, gives the same logits."""
    transformers = pytest.importorskip("transformers")
    shape = dict(n_head=4, n_kv_head=kv_heads, tied=tied)
    shape |= dict(short_conv=False, value_embed=False)
    mine = awake(model_for("clm", **shape))
    c = mine.config
    config = transformers.Qwen3Config(
        vocab_size=c.vocab_size,
        hidden_size=c.n_embd,
        intermediate_size=c.d_ff,
        num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head,
        num_key_value_heads=c.n_kv_head,
        head_dim=c.head_dim,
        rms_norm_eps=c.norm_eps,
        tie_word_embeddings=tied,
    )
    theirs = transformers.Qwen3ForCausalLM(config).eval()
    weights = {}
    for name, p in mine.state_dict().items():
        weights[name if name.startswith("lm_head") else f"model.{name}"] = p
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if tied else set())
    ids = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(mine.logits(mine(ids)[0]), theirs(ids).logits, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_blocks_begin_as_the_identity():
    model = model_for("clm")
    ids = torch.arange(10)[None]
    assert torch.equal(model.trunk(ids, "causal"), model.embed_tokens(ids))
    first, *others = model_for("mtp")(ids)  # so do linear heads
    assert len(others) == 3 and all(torch.equal(state, first) for state in others)


@pytest.mark.parametrize("kind, n_blocks", [("linear", 2), ("parallel", 5), ("chain", 5)])
def test_the_cache_has_room_for_all_blocks(kind, n_blocks):
    config = model_for("mtp", n_layer=2, knobs=Knobs(mtp_heads=kind)).config
    assert len(KVCache(config, batch=1, slots=16, device="cpu").k) == n_blocks


def test_only_the_heads_that_were_asked_for_exist():
    plain = {name.split(".")[0] for name in model_for("clm").state_dict()}
    assert plain == {"embed_tokens", "short_conv", "layers", "norm", "lm_head"}
    tied = {name.split(".")[0] for name in model_for("clm", tied=True).state_dict()}
    assert tied == {"embed_tokens", "short_conv", "layers", "norm"}
    extra = {
        "mtp": {"future"},
        "nsp": {"pair_head", "second_text"},
        "electra": {"detect_head", "generator"},
    }
    for name, heads in extra.items():
        assert {key.split(".")[0] for key in model_for(name).state_dict()} == plain | heads


def test_flops_count_a_matrix_six_times_and_attention():
    config = ModelConfig(vocab_size=640, n_layer=2, n_head=2, head_dim=16, n_embd=32)
    matrices = 2 * (5 * 32 * 32 + 3 * 32 * config.d_ff) + 2 * 32 + 640 * 32 / 4
    want = 6 * matrices + 12 * 2 * 2 * 16 * 100
    assert Transformer(config).flops_per_token(T=100, target_share=1 / 4) == want


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
def test_the_formula_for_few_queries_equals_pytorchs_attention(n_kv_head):
    B, H, T, S, D = 2, 4, 3, 20, 8
    torch.manual_seed(1)
    q = torch.randn(B, T, H, D).transpose(1, 2)
    k, v = torch.randn(2, B, S, n_kv_head, D).transpose(2, 3)
    mask = torch.rand(1, 1, T, S) < 0.5
    mask[..., 0] = True  # each query sees something
    expected = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    assert torch.allclose(model_file.attend_few(q, k, v, mask), expected, atol=1e-6)


@torch.no_grad()
def test_rope_theta_reaches_training_and_decoding_alike():
    """Another base gives other states, and reading with the cache still is reading at once."""
    ids = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))
    states = []
    for theta in (10_000.0, 50.0):
        model = awake(model_for("clm", rope_theta=theta), torch.float64)
        at_once = model.trunk(ids, "causal")
        cache = KVCache(model.config, batch=2, slots=16, device="cpu", dtype=torch.float64)
        positions = torch.arange(12)
        cached = model.trunk(ids, cache.mask(positions), positions, cache)
        torch.testing.assert_close(cached, at_once)
        states.append(at_once)
    assert (states[0] - states[1]).abs().max() > 1e-3


def test_norm_eps_reaches_every_norm():
    for name in ("clm", "electra"):
        model = model_for(name, norm_eps=0.25)
        norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
        assert len(norms) >= 2 * 4 + 1 and {norm.eps for norm in norms} == {0.25}


def test_flops_count_the_unembedding_once_for_each_horizon():
    one, four = (ModelConfig(vocab_size=640, n_future=n) for n in (1, 4))
    heads = 3 * 128 * 128  # linear ones
    more = Transformer(four).flops_per_token(10, 1.0) - Transformer(one).flops_per_token(10, 1.0)
    assert more == 6 * (heads + 3 * 640 * 128)


def test_the_vector_of_a_second_text_begins_at_zero():
    """Like the short convolution: a model that gets a pair head begins as it was without one."""
    model = model_for("nsp")
    assert not model.second_text.any() and not model.short_conv.any()


def test_the_generators_blocks_are_as_narrow_as_their_width_asks():
    """A d_ff given for the model (as by the preset micro) is not that of its generator."""
    generator = model_for("electra", n_embd=64, n_head=4, d_ff=256).generator
    assert generator.layers[0].mlp.gate_proj.out_features == ModelConfig(n_embd=16).d_ff == 64
