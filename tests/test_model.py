"""test_model.py: what the transformer and its optimizers promise, as executable tests.

The attention rule and everything that must follow it, the kernels against slow reference versions,
the cache, cross entropy, the heads, Muon. What an objective's rows mean is tested in
test_objectives.py, decoding in test_generate.py.

    pytest tests/test_model.py
"""

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch.nn import functional as F

import model as model_file
from data import make_row, mask_kind
from model import KVCache, ModelConfig, apply_rotary, attend, rotary
from objectives import OBJECTIVES, Knobs
from optimizers import Muon, learning_rate_scale, make_optimizers
from test_objectives import TOK, awake, batch_of, draw, mask_of, may_see, model_for


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0))


def test_model_imports_nothing_of_the_project():
    """So that it can be copied alone."""
    text = Path(model_file.__file__).read_text(encoding="utf-8")
    imported = set(re.findall(r"(?m)^ *(?:import|from) (\w+)", text))
    assert imported == {"functools", "math", "dataclasses", "torch"}


# ---- the attention rule --------------------------------------------------------------------------


def tensors(row) -> tuple[torch.Tensor, torch.Tensor]:
    """A row's segment and group, as the model takes them, (1, T) each."""
    return torch.tensor(np.array(row.segment))[None], torch.tensor(np.array(row.group))[None]


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
    group=np.array([1, 1, 0, -1, 0, 2, 2, 0, -1, -1, -2, 0, 0, 1]),
)
FULL_ROW = make_row(np.zeros(14), np.zeros(14), raw=None, group=1)
CAUSAL_ROW = make_row(np.zeros(150), np.zeros(150), raw=None)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    "kind, row", [("rule", PACKED_ROW), ("full", FULL_ROW), ("causal", CAUSAL_ROW)]
)
def test_attention_is_the_naive_rule(kind, row, kv_heads):
    """By torch's kernels, by the formula as decoding on CUDA uses it, and in blocks of queries,
    as training on a CPU does."""
    dice = np.random.default_rng(0)
    T = len(row.inputs)
    arrays = [dice.normal(size=(heads, T, 8)) for heads in (4, kv_heads, kv_heads)]
    q, k, v = (torch.tensor(x)[None] for x in arrays)
    mask = model_for("clm").attention_mask(kind, *tensors(row))
    assert isinstance(mask, str) == (kind != "rule")
    want = naive_attention(*arrays, may_see(row))
    np.testing.assert_allclose(attend(q, k, v, mask)[0], want, atol=1e-12)
    few = model_file.attend_by_formula(q, k, v, model_file.dense_mask(*tensors(row)))
    np.testing.assert_allclose(few[0], want, atol=1e-12)
    with torch.autocast("cpu", torch.bfloat16):
        blocks = attend(q.float(), k.float(), v.bfloat16(), mask)
    np.testing.assert_allclose(blocks[0].float(), want, atol=0.05)


def test_a_shortcut_is_taken_only_where_it_is_the_rule():
    """For every row of three positions, the chosen mask lets each position see exactly what the
    rule does. Padding may see anything."""
    model = model_for("clm")
    shortcuts = {"causal": np.tri(3, dtype=bool), "full": np.ones((3, 3), bool)}
    kinds = set()
    for segment in itertools.product([0, 1, 2], repeat=3):
        for group in itertools.product([-1, 0, 1], repeat=3):
            zeros = np.zeros(3, np.int32)
            row = make_row(zeros, zeros, zeros, np.array(group), np.array(segment))
            kind = mask_kind(row.segment[None], row.group[None])
            mask = model.attention_mask(kind, *tensors(row))
            allowed = shortcuts[mask] if isinstance(mask, str) else mask[0, 0].numpy()
            real = row.segment > 0
            assert (allowed == may_see(row))[real].all(), (segment, group, kind)
            kinds.add(kind)
    assert kinds == {"causal", "full", "rule"}


def test_a_mask_that_means_nothing_is_refused():
    """Otherwise any other word would let a position see everything after it."""
    model = model_for("clm")
    ids = random_ids(1, 8)
    with pytest.raises(AssertionError, match="causal, full or rule, got prefix"):
        model.attention_mask("prefix", torch.ones_like(ids), ids < 1)
    with pytest.raises(AssertionError, match="causal or full, got casual"):
        model(ids, "casual")


# ---- the rule is written in one place ------------------------------------------------------------


def sliding_window(q, k, segment_q, segment_k, group_q, group_k):
    """Another rule: the last three positions of the segment; in a group, the next two too."""
    near = (k > q - 3) & (k < q + 3)
    return near & (segment_q == segment_k) & ((k <= q) | ((group_q == group_k) & (group_q != 0)))


def only_itself(q, k, segment_q, segment_k, group_q, group_k):
    """Another rule: a position sees only itself."""
    return (q == k) & (segment_q == segment_k)


def test_an_edited_rule_is_noticed_in_long_rows():
    """In 20,000 positions, not all pairs are compared."""
    for kind in ("causal", "full"):
        assert model_file.rule_is_plain(kind, 20_000, model_file.may_attend)
        assert not model_file.rule_is_plain(kind, 20_000, sliding_window)


@torch.no_grad()
@pytest.mark.parametrize("name", ["clm", "mlm", "span"])
def test_an_edited_rule_reaches_training(name, monkeypatch):
    """Rows that were "causal" or "full" no longer take the shortcut, nor does a model that is given
    no mask."""
    monkeypatch.setattr(model_file, "may_attend", sliding_window)
    model = awake(model_for(name, short_conv=False, n_layer=1), torch.float64)
    [row] = draw(1, name)
    batch = batch_of([row])
    states = model(batch.inputs, mask_of(model, batch))[0]
    assert torch.equal(model(batch.inputs)[0], states) == (name == "clm")
    T = batch.inputs.shape[1]
    distance = np.subtract.outer(np.arange(T), np.arange(T))
    allowed = may_see(row)[:T, :T] & (abs(distance) < 3)
    for t in range(T):
        changed = batch.inputs.clone()
        changed[0, t] = (changed[0, t] + 1) % TOK.n_ordinary
        moved = (model(changed, mask_of(model, batch))[0] - states)[0].abs().amax(1) > 1e-9
        real = row.segment[:T] > 0
        assert (moved.numpy() == allowed[:, t])[real].all()


@torch.no_grad()
def test_an_edited_rule_reaches_the_short_convolution(monkeypatch):
    """A token that sees only itself gets nothing from its neighbors, in training or in decoding."""
    monkeypatch.setattr(model_file, "may_attend", only_itself)
    for name in ("clm", "mlm"):
        model = awake(model_for(name))
        batch = batch_of(draw(2, name))
        own = model.embed_tokens(batch.inputs)
        assert torch.equal(model.embed(batch.inputs, mask_of(model, batch)), own)
        cache = KVCache(model.config, batch=2, slots=48, device="cpu")
        for positions in (torch.arange(5), torch.arange(5, 7)):
            mask = cache.mask(positions, stop=5)
            read = model.embed(batch.inputs[:, positions], mask, positions, cache)
            assert torch.equal(read, own[:, positions])


# ---- embeddings, positions and the cache ---------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", OBJECTIVES)
def test_short_convolution_sees_what_the_rule_allows(name):
    """With every kind of mask that an objective's rows use."""
    model = awake(model_for(name), torch.float64)
    rows = draw(4, name)
    batch = batch_of(rows)
    T = batch.inputs.shape[1]
    got = model.embed(batch.inputs, mask_of(model, batch))
    for row, ids, mixed in zip(rows, batch.inputs, got):
        x = model.embed_tokens(ids)
        want = x.clone()
        for t, (step, share) in itertools.product(range(T), zip((-1, 1), model.short_conv)):
            if 0 <= t + step < T and may_see(row)[t, t + step]:
                want[t] += share * x[t + step]
        torch.testing.assert_close(mixed, want)


@torch.no_grad()
def test_values_read_the_embeddings():
    """A position that sees only itself gives its own value."""
    attention = awake(model_for("clm")).layers[1].self_attn
    x, embedded = torch.randn(2, 1, 1, 32)
    value = attention.v_proj(x) + attention.v_embed(embedded)
    rope = torch.ones(2, 1, 1, 16)
    got = attention(x, "causal", rope, embedded=embedded)
    torch.testing.assert_close(got, attention.o_proj(value))


def test_rotary_turns_pairs_and_scores_depend_on_distance_alone():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def at(x, position):
        return apply_rotary(x, rotary(torch.tensor([position]), 16, 10_000.0))[0, 0, 0]

    assert torch.equal(at(q, 0), q[0, 0, 0])
    assert at(q, 7).norm().item() == pytest.approx(q.norm().item())
    score = at(q, 9) @ at(k, 4)
    torch.testing.assert_close(score, at(q, 105) @ at(k, 100), atol=1e-4, rtol=1e-4)
    assert abs(score - at(q, 9) @ at(k, 5)) > 1e-2

    # Pair (x[i], x[i + D/2]) turns by position · theta^(-2i/D).
    i, position = 3, 5
    angle = position * 10_000 ** (-2 * i / 16)
    x = q[0, 0, 0]
    want = x[i] * math.cos(angle) - x[i + 8] * math.sin(angle)
    assert at(q, position)[i].item() == pytest.approx(want.item(), abs=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("prefix_length", [0, 5])
def test_reading_with_the_cache_is_reading_at_once(prefix_length):
    """Five tokens at once, which may be a prefix, then pieces of one to three tokens. Some tokens
    are read twice, as after a rejected draft."""
    model = awake(model_for("prefix", n_kv_head=1, rope_theta=50.0), torch.float64)
    ids = random_ids(2, 12)
    prefix = (torch.arange(12) < prefix_length).expand(2, 12)
    want = model.trunk(ids, model.attention_mask("rule", torch.ones(2, 12), prefix))

    cache = KVCache(model.config, batch=2, slots=12, device="cpu", dtype=torch.float64)
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


@pytest.mark.parametrize("forbidden_id", [None, 7])
@pytest.mark.parametrize("in_chunks", [False, True])
def test_cross_entropy_is_torchs(in_chunks, forbidden_id, monkeypatch):
    """Loss and gradients, with weights and with an id that can never be predicted. In chunks, no
    logits are kept for the backward pass."""
    if in_chunks:
        monkeypatch.setattr(model_file, "LOGITS_AT_ONCE", 100 * 500)
    torch.manual_seed(0)
    states = torch.randn(350, 16, requires_grad=True)
    matrix = torch.randn(500, 16, requires_grad=True)
    targets = torch.randint(9, 500, (350,))
    weights = torch.rand(350)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        model = model_for("clm")
        total, nll = model.cross_entropy(states, targets, weights, matrix, forbidden_id)
    assert (max(x.numel() for x in kept) < 50 * 500) == in_chunks

    logits = states @ matrix.T
    if forbidden_id is not None:
        logits = logits.index_fill(1, torch.tensor([forbidden_id]), -math.inf)
    each = F.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(nll, each.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(total, (each * weights).sum())
    got = torch.autograd.grad(3 * total, (states, matrix))
    want = torch.autograd.grad(3 * (each * weights).sum(), (states, matrix))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_cross_entropy_of_no_positions_is_zero():
    """As for a batch of only padding."""
    model = model_for("clm")
    nothing = torch.zeros(0, dtype=torch.long)
    total, nll = model.cross_entropy(model.embed_tokens(nothing), nothing, torch.zeros(0))
    total.backward()
    assert total == 0 and nll.shape == (0,) and not model.lm_head.weight.grad.any()


def test_a_target_that_is_nearly_certain_keeps_its_gradient_in_bfloat16():
    """p - 1 would be 0 there: bfloat16 has no number between 0.996 and 1."""
    matrix = torch.eye(8, requires_grad=True)
    states = (9.0 * torch.eye(8)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = model_for("clm").cross_entropy(states, torch.arange(8), torch.ones(8), matrix)
    total.backward()
    p = math.exp(9) / (math.exp(9) + 7)
    assert p > 0.999
    np.testing.assert_allclose(states.grad.diagonal(), p - 1, rtol=5e-3)
    np.testing.assert_allclose(matrix.grad.diagonal(), 9 * (p - 1), rtol=1e-2)


# ---- compiled ------------------------------------------------------------------------------------


def test_the_compiled_model_is_the_model():
    """By this machine's C++ compiler, with the dense mask. The result is cached for other
    processes."""
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
        states = model(batch.inputs, mask_of(model, batch))[0]
        states.square().mean().backward()
        gradients.append({path: p.grad for path, p in model.named_parameters()})
        model.zero_grad()
        model.compile_for_training()
    for path, gradient in gradients[0].items():
        if gradient is not None:
            torch.testing.assert_close(gradients[1][path], gradient, rtol=1e-3, atol=1e-6)
    assert cached["total"] == 1 and not cached["autograd_cache_bypass"], cached


@pytest.mark.parametrize("kind", ["linear", "parallel", "chain"])
def test_a_model_with_heads_compiles_to_the_same_model(kind):
    """The table of rotary positions is a constant there: no graph has a sine."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return aot_eager(graph, inputs)

    model = awake(model_for("mtp", Knobs(mtp_heads=kind, n_future=2), n_layer=1))
    compiled = torch.compile(model, backend=backend, dynamic=False)
    batch = batch_of(draw(2, "mtp", T=16, mtp_heads=kind, n_future=2))
    gradients = []
    for network in (model, compiled):
        states = network(batch.inputs, "causal", batch.extra)
        torch.stack(states).square().mean().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)
    assert len(graphs) == 1 and ".sin(" not in graphs[0]


def test_compiled_cross_entropy_fixes_the_vocabulary_but_not_the_number_of_positions():
    """Only N is a symbol: kernels for any V and C would be slower. The gradients are the same."""
    graphs = []

    def backend(graph, inputs):
        graphs.append([x for x in inputs if isinstance(x, torch.SymInt)])
        return aot_eager(graph, inputs)

    model = awake(model_for("clm"))
    gradients = []
    for compiled in (False, True):
        if compiled:
            model.nll_of = torch.compile(model.nll_of, backend=backend, dynamic=True)
        for n in (5, 7):
            states = model.embed_tokens(torch.arange(n))
            total, _ = model.cross_entropy(states, torch.arange(n), torch.arange(n))
            total.backward()
        gradients.append([model.lm_head.weight.grad, model.embed_tokens.weight.grad])
        model.zero_grad()
    assert [len(symbols) for symbols in graphs] == [1]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


# ---- heads and shapes ----------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("kind", ["linear", "parallel"])
def test_linear_and_parallel_heads_read_the_trunks_state_alone(kind):
    """That is, its state before the final norm, which all horizons share."""
    model = awake(model_for("mtp", Knobs(mtp_heads=kind)))
    ids = random_ids(1, 9)
    states = model(ids)
    h = model.trunk(ids, "causal")
    torch.testing.assert_close(states[0], model.norm(h))
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
    model = awake(model_for("mtp", Knobs(mtp_heads="chain")))
    for head in model.future:
        torch.nn.init.uniform_(head.norm_h.weight)
        torch.nn.init.uniform_(head.norm_e.weight)
    ids = random_ids(1, 12)
    T = 9
    ahead = torch.stack([ids[:, k : k + T] for k in (1, 2, 3)], dim=-1)
    states = model(ids[:, :T], ahead=ahead)
    h = model.trunk(ids[:, :T], "causal")
    for k, head in enumerate(model.future, 1):
        token = model.embed_tokens(ids[:, k : k + T])
        both = torch.cat([head.norm_h(h), head.norm_e(token)], dim=-1)
        h = head.block(both @ head.join.weight.T, "causal", model.rope(h))
        torch.testing.assert_close(states[k], model.norm(h))


@pytest.mark.parametrize("kv_heads, tied", [(4, False), (2, False), (1, True)])
def test_model_is_qwen3(kv_heads, tied):
    """Another implementation with the same weights, under the same names, gives the same logits."""
    transformers = pytest.importorskip("transformers")
    shape = dict(n_head=4, n_kv_head=kv_heads, tied=tied, rope_theta=50.0, norm_eps=1e-3)
    mine = awake(model_for("clm", short_conv=False, value_embed=False, **shape))
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
        rope_parameters=dict(rope_type="default", rope_theta=c.rope_theta),
        tie_word_embeddings=tied,
    )
    theirs = transformers.Qwen3ForCausalLM(config).eval()
    weights = {}
    for name, p in mine.state_dict().items():
        weights[name if name.startswith("lm_head") else f"model.{name}"] = p
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if tied else set())
    ids = random_ids(2, 40)
    torch.testing.assert_close(mine.logits(mine(ids)[0]), theirs(ids).logits, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_a_new_model_is_the_identity_and_guesses_evenly(tied):
    model = model_for("clm", tied=tied)
    ids = random_ids(1, 40)
    assert torch.equal(model.trunk(ids, "causal"), model.embed_tokens(ids))
    total, _ = model.cross_entropy(model(ids)[0][0, :-1], ids[0, 1:], torch.ones(39))
    assert total.item() / 39 == pytest.approx(math.log(TOK.vocab_size), rel=0.02)
    first, *others = model_for("mtp")(ids)  # linear heads are the identity too
    assert len(others) == 3 and all(torch.equal(state, first) for state in others)


@torch.no_grad()
def test_electras_generator_is_narrow_and_does_without_the_short_convolution():
    """A d_ff given for the model (as by the preset micro) is not that of its generator."""
    model = awake(model_for("electra", n_embd=64, n_head=4, d_ff=256))
    gate = model.generator.layers[0].mlp.gate_proj
    assert gate.out_features == ModelConfig(n_embd=16).d_ff == 64
    ids = random_ids(1, 8)
    states = model.generator_states(ids, "full")
    model.short_conv.zero_()
    assert torch.equal(model.generator_states(ids, "full"), states)


# ---- optimizers ----------------------------------------------------------------------------------


def test_muon_updates_the_matrices_of_blocks_and_adamw_all_else():
    rates = dict(lr=1.0, lr_embed=2.0, lr_unembed=3.0, lr_binary=4.0)
    for name in ("electra", "nsp", "mtp"):
        model = model_for(name)
        adamw, muon = make_optimizers(model, "muon", **rates, dtype=torch.float32)
        by_muon = {id(p) for group in muon.param_groups for p in group["params"]}
        groups = [*adamw.param_groups, *muon.param_groups]
        rate_of = {id(p): group["peak_lr"] for group in groups for p in group["params"]}
        for path, p in model.named_parameters():
            if path.startswith(("embed_tokens", "short_conv", "second_text")) or "norm" in path:
                expected = "lr_embed"
            elif path == "lm_head.weight":
                expected = "lr_unembed"
            elif path.startswith(("pair_head", "detect_head")):
                expected = "lr_binary"
            else:
                expected = "lr"
                assert p.ndim == 2
            assert rate_of[id(p)] == rates[expected], path
            assert (id(p) in by_muon) == (expected == "lr"), path
        for group in adamw.param_groups:
            assert (group["weight_decay"], group["betas"]) == (0, (0.9, 0.95))


def test_muon_steps_along_orthogonal_matrices_by_their_rate():
    """The update is along Nesterov's mean of gradient and momentum. For a tall matrix, it is about
    sqrt(rows / columns) · lr · U Vᵀ; five Newton-Schulz steps bring singular values near 1."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(32, 16))
    muon = Muon([p], lr=0.1, dtype=torch.float32)
    first, second = torch.randn(2, 32, 16)
    direction = [first, second.lerp((0.95 * 0.05 * first + 0.05 * second), 0.95)]
    for gradient, nesterov in zip([first, second], direction):
        start = p.detach().clone()
        p.grad = gradient.clone()
        muon.step()
        step = (start - p.detach()) / (0.1 * 2**0.5)
        U, _, Vt = torch.linalg.svd(nesterov, full_matrices=False)
        assert 0.6 < torch.linalg.svdvals(step).min() <= torch.linalg.svdvals(step).max() < 1.3
        assert F.cosine_similarity(step.flatten(), (U @ Vt).flatten(), dim=0) > 0.97


def test_learning_rates_rise_stay_and_fall():
    scales = [learning_rate_scale(step, 8, warmup_steps=4, decay_frac=0.5) for step in range(8)]
    assert scales == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25])
