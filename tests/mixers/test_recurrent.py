"""Every recurrent mixer: against its formula in a plain loop, against itself in pieces, and inside a model.

Legend: B rows, T tokens, E width, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import math

import pytest
import torch
from tests.models.tiny import tiny_model
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from hybridize.mixers.recurrent import RecurrentMixer
from hybridize.mixers.registry import build_mixer
from hybridize.mixers.types import GroupShape
from hybridize.models.modeling import HybridForCausalLM
from hybridize.models.surgery import hybridize_model
from hybridize.ops.sequences import Sequences
from hybridize.spec import RECURRENT, GroupSpec, HybridSpec

GATED = tuple(kind for kind in RECURRENT if kind != "lightning")
HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 8, 24
LENGTH = 71  # the operations' chunks hold 64 tokens at most
ERROR = {torch.float32: 2e-5, torch.bfloat16: 1e-2}


def build(kind: str, *, kv_heads: int = KV_HEADS, layer: int = 1, shifted: bool = True) -> RecurrentMixer:
    """A float32 mixer; `shifted`: its own parameters have left their first values."""
    spec = GroupSpec(attention=kind, heads=HEADS).completed()
    shape = GroupShape(layer, HEADS, kv_heads, DIM, DIM**-0.5, None, None, WIDTH, layers=3)
    mixer = build_mixer(spec, shape)
    assert isinstance(mixer, RecurrentMixer)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in mixer.parameters():
            if shifted:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return mixer


class Tensors:
    """q, k, v and the layer's input x."""

    def __init__(self, *tensors: Tensor) -> None:
        self.q, self.k, self.v, self.x = tensors

    @classmethod
    def random(
        cls,
        rows: int,
        length: int,
        *,
        kv_heads: int = KV_HEADS,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> Tensors:
        generator = torch.Generator().manual_seed(seed)
        shapes = [(rows, length, heads, DIM) for heads in (HEADS, kv_heads, kv_heads)]
        return cls(
            *(
                torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
                for shape in (*shapes, (rows, length, WIDTH))
            )
        )

    def map(self, function) -> Tensors:
        return Tensors(*map(function, (self.q, self.k, self.v, self.x)))

    def cut(self, begin: int, end: int) -> Tensors:
        return self.map(lambda tensor: tensor[:, begin:end])

    def expanded(self) -> Tensors:
        copies = HEADS // self.k.shape[2]
        return Tensors(
            self.q, self.k.repeat_interleave(copies, 2), self.v.repeat_interleave(copies, 2), self.x
        )


def run(mixer: RecurrentMixer, x: Tensors, sequences: Sequences | None = None) -> Tensor:
    sequences = sequences or Sequences.dense(*x.q.shape[:2])
    return mixer.attend(x.q, x.k, x.v, sequences, x_BTE=x.x)[0]


def in_pieces(mixer: RecurrentMixer, x: Tensors, sizes: list[int]) -> Tensor:
    rows, state, outputs, begin = x.q.shape[0], None, [], 0
    for size in sizes:
        y = x.cut(begin, begin + size)
        sequences = Sequences.dense(rows, size, [begin] * rows)
        o, state = mixer.attend(y.q, y.k, y.v, sequences, state, x_BTE=y.x, keep_state=True)
        outputs.append(o)
        begin += size
    assert begin == x.q.shape[1] and state is not None and state.lengths_N.tolist() == [begin] * rows
    return torch.cat(outputs, 1)


def error(ours: Tensor, exact: Tensor) -> float:
    assert ours.shape == exact.shape
    return float((ours.double() - exact).norm() / exact.norm())


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def by_formula(kind: str, mixer: RecurrentMixer, x: Tensors) -> Tensor:
    """`o_BTHD` of float64 tensors, a token and a head at a time, each attention as its paper writes it."""
    p = {name: value.double() for name, value in mixer.state_dict().items()}
    p = {name.removeprefix("control."): value for name, value in p.items()}
    x = x.expanded()
    o = torch.zeros_like(x.q)
    for b in range(x.q.shape[0]):
        for h in range(HEADS):
            S = torch.zeros(DIM, DIM, dtype=torch.float64)
            rows = slice(h * DIM, (h + 1) * DIM)
            for t in range(x.q.shape[1]):
                q, k, v, u = x.q[b, t, h], x.k[b, t, h], x.v[b, t, h], x.x[b, t]
                match kind:
                    case "lightning":
                        S = math.exp(-(2.0 ** (-8 * (h + 1) / HEADS))) * S + torch.outer(k, v)
                        o[b, t, h] = q @ S / math.sqrt(DIM)
                    case "gla":
                        logit = p["up"][rows] @ (p["down"] @ u) + p["bias"][h]
                        S = (logsigmoid(logit) / 16).exp()[:, None] * S + torch.outer(k, v)
                        o[b, t, h] = q @ S / math.sqrt(DIM)
                    case "mamba2":
                        dt = softplus(p["dt_weight"][h] @ u + p["dt_bias"][h])
                        S = (-p["A_log"][h].exp() * dt).exp() * S + dt * torch.outer(k, v)
                        o[b, t, h] = q @ S + p["D"][h] * v
                    case "gdn":
                        g = -p["A_log"][h].exp() * softplus(p["dt_weight"][h] @ u + p["dt_bias"][h])
                        beta = 2 * torch.sigmoid(p["beta_weight"][h] @ u)
                        S = g.exp() * S
                        S = S + beta * torch.outer(unit(k), v - unit(k) @ S)
                        o[b, t, h] = unit(q) @ S / math.sqrt(DIM)
                    case "kda":
                        low = p["up"][rows] @ (p["down"] @ u)
                        S = (-p["A_log"][h].exp() * softplus(low + p["dt_bias"][h])).exp()[:, None] * S
                        beta = torch.sigmoid(p["beta_weight"][h] @ u)
                        S = S + beta * torch.outer(unit(k), v - unit(k) @ S)
                        o[b, t, h] = unit(q) @ S / math.sqrt(DIM)
                    case "rwkv7":
                        low = p["w_up"][rows] @ torch.tanh(p["w_down"] @ u)
                        decay = (-math.exp(-0.5) * torch.sigmoid(p["w0"][h] + low)).exp()
                        a = torch.sigmoid(p["a0"][h] + p["a_up"][rows] @ (p["a_down"] @ u))
                        kk = unit(k * p["k_k"][h])
                        k = k * (1 + (a - 1) * p["k_a"][h])
                        S = decay[:, None] * S - torch.outer(a * kk, kk @ S) + torch.outer(k, v)
                        o[b, t, h] = q @ S + (q * k * p["r_k"][h]).sum() * v
    return o


@pytest.mark.parametrize("kind", RECURRENT)
@torch.no_grad()
def test_equals_its_formula(kind):
    """A float64 mixer, to rounding (Lightning's own decay is float32); float32 and bfloat16 within their precision."""
    mixer = build(kind)
    for dtype in (torch.float32, torch.bfloat16):
        x = Tensors.random(2, LENGTH, dtype=dtype)
        o = run(mixer, x)
        assert o.dtype == dtype
        assert error(o, by_formula(kind, mixer, x.map(Tensor.double))) < ERROR[dtype]
    x = Tensors.random(2, LENGTH, dtype=torch.float64)
    exact = by_formula(kind, mixer, x)
    assert error(run(mixer.double(), x), exact) < (1e-6 if kind == "lightning" else 1e-11)


@pytest.mark.parametrize("kind", RECURRENT)
@torch.no_grad()
def test_prefill_equals_steps_chunks_and_prefixes(kind):
    mixer, x = build(kind), Tensors.random(2, LENGTH)
    exact = by_formula(kind, mixer, x.map(Tensor.double))
    for sizes in ([1] * LENGTH, [2, 1, 40, 1, 26, 1], [64, 7]):
        assert error(in_pieces(mixer, x, sizes), exact) < ERROR[torch.float32], sizes
    for length in (1, 2, 63, 64, 65):
        assert error(run(mixer, x.cut(0, length)), exact[:, :length]) < ERROR[torch.float32], length


@pytest.mark.parametrize("kind", RECURRENT)
@torch.no_grad()
def test_packed_documents_equal_their_own_rows(kind):
    """The second document is poison and stays alone; an empty one stands between."""
    mixer, lengths = build(kind), [5, 3, 0, LENGTH, 1]
    singles = [Tensors.random(1, length, seed=length) for length in lengths]
    singles[1] = singles[1].map(lambda tensor: torch.full_like(tensor, torch.nan))
    packed = Tensors(*(torch.cat([getattr(x, name) for x in singles], 1) for name in "qkvx"))
    o = run(mixer, packed, Sequences.packed(torch.tensor([0, *lengths]).cumsum(0)))
    for number, (piece, x) in enumerate(zip(o.split(lengths, 1), singles, strict=True)):
        if number == 1:
            assert piece.isnan().all()
        elif piece.numel():
            torch.testing.assert_close(piece, run(mixer, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", RECURRENT)
def test_output_is_coefficients_times_v(kind):
    """With what a token adds beside the memory (Mamba-2's D, RWKV-7's bonus) on the diagonal, and in some rows as in all."""
    mixer, x = build(kind).double(), Tensors.random(2, 20, dtype=torch.float64)
    A_BHQS = mixer.coefficients(x.q, x.k, slice(None), x.x)
    o = torch.einsum("bhqs,bshv->bqhv", A_BHQS, x.expanded().v)
    torch.testing.assert_close(o, run(mixer, x), rtol=1e-6, atol=1e-7)
    assert not A_BHQS.triu(1).any()
    some = slice(3, 17, 2)
    torch.testing.assert_close(mixer.coefficients(x.q, x.k, some, x.x), A_BHQS[:, :, some])
    grads = [
        torch.autograd.grad(y.square().sum(), list(mixer.parameters())) if kind != "lightning" else ()
        for y in (o, run(mixer, x))
    ]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", GATED)
def test_gradients_reach_every_own_parameter_from_the_start(kind):
    mixer, x = build(kind, shifted=False), Tensors.random(2, LENGTH)
    run(mixer, x).square().sum().backward()
    for name, parameter in mixer.named_parameters():
        assert name.startswith("control.")
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert (parameter.grad != 0).any(), name


@pytest.mark.parametrize("kind", GATED)
def test_first_values_depend_on_the_layer_alone(kind):
    """Not on the dtype or device a model is built in, nor on torch's own generator; the meta device needs none."""
    first, other = (build(kind, layer=layer, shifted=False).control.state_dict() for layer in (1, 2))
    torch.manual_seed(5)
    torch.set_default_dtype(torch.bfloat16)
    try:
        again = build(kind, shifted=False).control.state_dict()
        with torch.device("meta"):
            empty = build(kind, shifted=False)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(parameter.is_meta for parameter in empty.parameters())
    filled = empty.to_empty(device="cpu")
    filled.control.reset_parameters()
    for name, value in first.items():
        assert value.dtype == torch.float32 and value.isfinite().all()
        assert torch.equal(value, again[name]) and torch.equal(value, filled.control.state_dict()[name]), name
    assert any(not torch.equal(value, other[name]) for name, value in first.items())


@torch.no_grad()
def test_first_memories():
    """GLA keeps 1/e after 2048 to 64 tokens, without what the token adds; RWKV-7's channels span those of its paper."""
    x = torch.zeros(1, 1, WIDTH)
    (log_BTHD,) = build("gla", shifted=False).control(x)
    expected = torch.tensor([2048.0, 645.0, 203.2, 64.0])[:, None].expand(-1, DIM)
    torch.testing.assert_close(-1 / log_BTHD[0, 0], expected, rtol=1e-3, atol=0)
    w_BTHD, a_BTHD = build("rwkv7", shifted=False).control(x)
    assert 1 < -1 / w_BTHD.min() < 4 and -1 / w_BTHD.max() > 3000
    assert 0.3 < a_BTHD.mean() < 0.6


@pytest.mark.parametrize("kind", RECURRENT)
@torch.no_grad()
def test_grouped_heads_equal_their_copies(kind):
    grouped, single = build(kind), build(kind, kv_heads=HEADS)
    single.load_state_dict(grouped.state_dict())
    x = Tensors.random(2, 9)
    torch.testing.assert_close(run(grouped, x), run(single, x.expanded()), rtol=0, atol=0)


@pytest.mark.parametrize("kind", GATED)
@torch.no_grad()
def test_gates_leave_autocast_and_low_precision(kind):
    """bfloat16 parameters are read as they are, and no gate is rounded; autocast changes nothing."""
    mixer, x = build(kind), Tensors.random(1, 30, dtype=torch.bfloat16)
    plain, gates = run(mixer, x), mixer.control(x.x)
    assert all(gate.dtype == torch.float32 for gate in gates)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(run(mixer, x), plain, rtol=0, atol=0)
    rounded = mixer.bfloat16().control(x.x)
    for gate, exact in zip(rounded, gates, strict=True):
        assert gate.dtype == torch.float32
        assert not torch.equal(gate, gate.bfloat16().float())
        torch.testing.assert_close(gate, exact, rtol=0.1, atol=1e-2)


@pytest.mark.parametrize("kind", GATED)
def test_gates_without_the_layers_input_are_refused(kind):
    mixer, x = build(kind), Tensors.random(1, 3)
    with pytest.raises(ValueError, match="x_BTE is None; this attention computes its gates"):
        mixer.coefficients(x.q, x.k, slice(None))
    with pytest.raises(ValueError, match="x_BTE is None"):
        mixer.attend(x.q, x.k, x.v, Sequences.dense(1, 3))


@torch.no_grad()
def test_lightning_needs_no_input():
    mixer, x = build("lightning"), Tensors.random(1, 3)
    assert not list(mixer.parameters())
    assert mixer.coefficients(x.q, x.k, slice(None)).shape == (1, HEADS, 3, 3)


def hybrid(kind: str) -> HybridForCausalLM:
    spec = {
        "attention": kind,
        "position": "rope",
        "qk_norm": True,
        "output_norm": True,
        "output_gate": True,
        "heads": "expand",
    }
    teacher = tiny_model("llama", num_hidden_layers=2)
    return hybridize_model(teacher, HybridSpec.model_validate({"all": spec}))


@pytest.mark.parametrize("kind", RECURRENT)
@torch.no_grad()
def test_a_model_generates_the_same_with_and_without_cache(kind):
    """Two prompts, one left-padded."""
    model = hybrid(kind)
    ids = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[1, :4], mask[1, :4] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    cached = model.generate(ids, use_cache=True, **options)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **options))
    assert cached.shape == (2, 21)
    alone = model.generate(ids[1:, 4:], **{**options, "attention_mask": mask[1:, 4:]})
    assert torch.equal(alone, cached[1:, 4:])


@pytest.mark.parametrize("kind", RECURRENT)
@torch.no_grad()
def test_a_checkpoint_opens_in_bfloat16_with_float32_control(kind, tmp_path):
    """float32: the same logits bit for bit."""
    model = hybrid(kind)
    for number, parameter in enumerate(model.parameters()):
        parameter.add_(0.01 * math.sin(number + 1))
    ids = torch.randint(3, 128, (1, 20), generator=torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path)
    again = HybridForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(again(ids).logits, model(ids).logits)
    small = HybridForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, parameter in small.named_parameters():
        assert parameter.dtype == (torch.float32 if ".control." in name else torch.bfloat16), name
        if ".control." in name:
            assert torch.equal(parameter, model.get_parameter(name)), name
    assert small(ids).logits.isfinite().all()


@pytest.mark.parametrize("kind", GATED)
@torch.no_grad()
def test_a_checkpoint_without_control_starts_as_new(kind, tmp_path):
    model = hybrid(kind)
    state = {name: value for name, value in model.state_dict().items() if ".control." not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    again = HybridForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, ignore_mismatched_sizes=True)
    found = 0
    for name, parameter in model.named_parameters():
        if ".control." in name:
            found += 1
            assert torch.equal(again.get_parameter(name), parameter), name
    assert found
