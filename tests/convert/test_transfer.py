"""Attention transfer: every objective and mixer, what trains, and the weight cross-entropy against a naive one."""

import itertools
import weakref
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from tests.convert import bench
from tests.models.tiny import tiny_model
from tests.pairwise import full_product, label, pairwise
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridize import losses
from hybridize.convert import transfer
from hybridize.convert.transfer import TransferStage, cut, weight_cross_entropy
from hybridize.data.batching import Batch
from hybridize.layers.token_mixer import TokenMixer
from hybridize.models.families import FAMILIES, AttentionShape
from hybridize.models.modeling import HybridForCausalLM
from hybridize.models.surgery import hybridize_model
from hybridize.ops.sequences import Sequences
from hybridize.recipe import Objective, TransferStep
from hybridize.spec import HybridSpec

W = 4
WINDOWED = bench.WINDOWED
SEPARATE = WINDOWED | {"normalizer": {"kind": "separate", "mix": "fixed"}}
SPECS = {
    "hedgehog": {"all": WINDOWED},
    "sliding": {"all": WINDOWED | {"window": {"kind": "sliding", "size": 8, "sinks": 2}}},
    "t2r": {"all": WINDOWED | {"feature_map": {"kind": "t2r", "features": 16}}},
    "fixed": {"all": SEPARATE},
    "learnt": {"all": WINDOWED | {"normalizer": {"kind": "separate", "mix": "learnt"}}},
    "mass": {"all": WINDOWED | {"normalizer": {"kind": "separate", "mix": "mass"}}},
    "linear": {"all": {"attention": "linear"}},
    "mixed layers": {"all": WINDOWED, "layers": {"1,3": {"attention": "softmax"}}},
    "head groups": {
        "all": {"groups": [{"heads": "1/2", "attention": "softmax"}, {"heads": "1/2", **WINDOWED}]}
    },
    "maps by KV head": {"all": WINDOWED | {"feature_map": {"kind": "hedgehog", "k_map_heads": "kv"}}},
}
OBJECTIVES = {
    "mse": {"output_mse": 1000},
    "ce": {"weight_ce": 1},
    "both": {"output_mse": 1000, "weight_ce": 1},
}


def student(spec: dict, **overrides) -> HybridForCausalLM:
    return hybridize_model(tiny_model("llama", **overrides), HybridSpec.model_validate(spec))


def stage_of(model: HybridForCausalLM, **step) -> TransferStage:
    return TransferStage(model, TransferStep.model_validate({"tokens": 1} | step), [])


def snapshot(model: HybridForCausalLM) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def batch(text: Path) -> Batch:
    return bench.batch(text, rows=1, length=96)


@pytest.mark.parametrize("against", ["hybrid", "linear_only"])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("spec", SPECS)
def test_every_objective_lowers_its_loss_and_trains_what_it_names_alone(spec, objective, against, batch):
    model = student(SPECS[spec])
    stage = stage_of(model, objective=OBJECTIVES[objective] | {"against": against})
    before, first = snapshot(model), None
    names = set(stage.parameters())
    assert names == {name for name in before if ".groups." in name}
    optimizer = torch.optim.AdamW(stage.parameters().values(), lr=1e-2, weight_decay=0.0)
    for _ in range(3):
        result = stage.step(batch, 1 / stage.count(batch))
        first = result.loss if first is None else first
        optimizer.step()
        optimizer.zero_grad()
    assert result.loss < first
    changed = {name for name, value in snapshot(model).items() if not torch.equal(value, before[name])}
    frozen_mix = {name for name in names if ".mix." in name} if against == "linear_only" else set()
    assert changed == names - frozen_mix


@pytest.mark.parametrize(("train", "parts"), [("maps", ("map_q", "map_k")), ("mix", ("mix",))])
def test_train_names_the_parts(train, parts, batch):
    stage = stage_of(student(SPECS["hedgehog"]), train=train)
    assert stage.parameters() and all(any(f".{p}." in name for p in parts) for name in stage.parameters())
    stage.step(batch, 1.0)
    with_gradient = {name for name, p in stage.model.named_parameters() if p.grad is not None}
    assert with_gradient == set(stage.parameters())


def test_layers_pass_the_teachers_output_on(text):
    batch = bench.batch(text, rows=4)
    teacher = tiny_model("llama")
    model = student(SPECS["hedgehog"])
    seen: list[Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    stage_of(model).step(batch, 1.0)
    expected: list[Tensor] = []
    for layer in teacher.model.layers:
        layer.register_forward_hook(lambda module, args, output: expected.append(output.detach()))
    bounds = [
        *torch.nonzero(batch.position_ids_BT.flatten() == 0).flatten().tolist(),
        batch.input_ids_BT.numel(),
    ]
    with torch.no_grad():
        documents = batch.input_ids_BT.flatten().split([b - a for a, b in itertools.pairwise(bounds)])
        assert len(documents) > 2
        for document in documents:
            teacher(document[None])
    layers = len(seen)
    by_layer = [torch.cat(expected[layer::layers], 1).flatten(0, 1) for layer in range(layers)]
    for ours, theirs in zip(seen, by_layer, strict=True):
        torch.testing.assert_close(ours.flatten(0, 1), theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("against", ["hybrid", "linear_only"])
def test_weight_cross_entropy_equals_the_naive_one(against):
    """Packed documents, float64, by the formulas of the paper; values and gradients of the maps and gamma."""
    model = student(SPECS["hedgehog"], num_hidden_layers=2).double()
    lengths = (3, 40, 21, 150)
    total = sum(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ids = torch.randint(4, 90, (1, total), generator=torch.Generator().manual_seed(1))
    batch = Batch(ids, ids, positions)
    stage = stage_of(model, objective={"weight_ce": 1, "against": against})
    captured = []

    def keep(mixer, q, k, v, sequences):
        captured.append((mixer, q.detach()[0], k.detach()[0]))
        return mixer.teacher(q, k, v, sequences)

    with torch.no_grad(), model.intercepted(keep):
        model.hidden_states(ids, position_ids=positions)
    stage.step(batch, 1 / total)
    value = 0.0
    for mixer, q, k in captured:
        group = mixer.mixers[0]
        leaves = [
            p.detach().clone().requires_grad_()
            for p in (group.map_q.weight, group.map_k.weight, group.mix.logit)
        ]
        loss = naive_weight_ce(q, k, *leaves, lengths, mixer.shape.scale, against)
        value += loss.item() / len(captured)
        gradients = torch.autograd.grad(loss / len(captured), leaves, allow_unused=True)
        for parameter, gradient in zip(
            (group.map_q.weight, group.map_k.weight, group.mix.logit), gradients, strict=True
        ):
            if gradient is None:
                assert parameter.grad is None
            else:
                torch.testing.assert_close(parameter.grad, gradient, atol=1e-9, rtol=1e-7)
    assert float(stage.step(batch, 1.0).loss) / total == pytest.approx(value, rel=1e-6)


def naive_weight_ce(q, k, w_q, w_k, logit, lengths, scale, against, w=8):
    """`q` [P, H, D], `k` [P, G, D]; mean over heads and all queries of -sum_i A_ti ln A'_ti."""
    heads, groups = q.shape[1], k.shape[1]
    total, begin = torch.zeros((), dtype=torch.float64), 0
    for n in lengths:
        for h in range(heads):
            q_TD, k_TD = q[begin : begin + n, h], k[begin : begin + n, h // (heads // groups)]
            score = scale * q_TD @ k_TD.T
            causal = torch.ones(n, n).tril().bool()
            teacher = score.masked_fill(~causal, -torch.inf).softmax(-1)

            def phi(x, weight):
                return torch.cat([(x @ weight).softmax(-1), (-x @ weight).softmax(-1)], -1).clamp(min=1e-12)

            product = phi(q_TD, w_q[h]) @ phi(k_TD, w_k[h]).T
            if against == "linear_only":
                student = product * causal / (product * causal).sum(-1, keepdim=True)
            else:
                block = torch.arange(n) // w
                near = causal & (block[None, :] >= block[:, None] - 1)
                shifted = score - score.masked_fill(~near, -torch.inf).amax(-1, keepdim=True)
                mass = torch.sigmoid(logit[h]) * shifted.exp() * near + product * (causal & ~near)
                student = mass / mass.sum(-1, keepdim=True)
            total = total - (teacher * student.clamp(min=1e-12).log()).masked_fill(~causal, 0).sum()
        begin += n
    return total / (heads * sum(lengths))


HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (3, 1)}
NEAR = {
    "sliding": {"kind": "sliding", "size": W},
    "terraced": {"kind": "terraced", "size": W},
    "sliding-sinks": {"kind": "sliding", "size": W, "sinks": 2},
    "terraced-sinks": {"kind": "terraced", "size": W, "sinks": 6},
    "terraced-overlap": {"kind": "terraced", "size": W, "sinks": 1, "overlap": True},
}
NORMALIZERS = {
    "shared": {"kind": "shared", "gamma": 0.3},
    "shared-1mg": {"kind": "shared", "eta": "one_minus_gamma"},
    "fixed": {"kind": "separate", "gate": 0.7},
    "learnt": {"kind": "separate", "mix": "learnt", "empty_far": "zero"},
    "mass": {"kind": "separate", "mix": "mass"},
}
MAPS = {
    "query": {"kind": "hedgehog", "features": 6},
    "kv": {"kind": "hedgehog", "features": 6, "k_map_heads": "kv", "init": "identity_noise"},
    "t2r": {"kind": "t2r", "features": 5},
}
EQUALITY = [
    *pairwise(
        {
            "attention": ("windowed_linear",),
            "heads": tuple(HEADS),
            "near": tuple(NEAR),
            "normalizer": tuple(NORMALIZERS),
            "map": tuple(MAPS),
            "against": ("hybrid", "linear_only"),
            "teacher": (None, 5),
            "softcap": (None, 1.5),
            "tile": ((3, 1), (5, 200), (128, 2**20)),
        }
    ),
    *full_product({"attention": ("linear",), "heads": ("gqa",), "map": tuple(MAPS), "tile": ((5, 200),)}),
]


def layer(row: dict) -> TokenMixer:
    """A float64 layer of one group whose own parameters have left their first values."""
    heads, kv_heads = HEADS[row["heads"]]
    spec = {"attention": row["attention"], "feature_map": MAPS[row["map"]]}
    if row["attention"] == "windowed_linear":
        spec |= {"window": NEAR[row["near"]], "normalizer": NORMALIZERS[row["normalizer"]]}
    resolved = HybridSpec.model_validate({"all": spec}).resolve(
        layers=1, heads=heads, kv_heads=kv_heads, head_dim=8
    )
    shape = AttentionShape(0, 32, heads, kv_heads, 8, 0.5, row.get("softcap"), row.get("teacher"), True)
    mixer = TokenMixer(nn.Module(), FAMILIES["llama"], shape, resolved.layers[0]).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mixer.groups.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return mixer


def draw(mixer: TokenMixer, tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    q, k = (
        torch.randn(1, tokens, heads, 8, generator=generator, dtype=torch.float64)
        for heads in (mixer.shape.heads, mixer.shape.kv_heads)
    )
    return q, k


def dense_weights(output: Callable[..., Tensor], q: Tensor, k: Tensor) -> Tensor:
    """`[1, H, T, T]`: what attention gives where the value of token i is the i-th unit vector."""
    tokens = q.shape[1]
    units = torch.eye(tokens, dtype=q.dtype)[None, :, None].expand(1, tokens, k.shape[2], tokens)
    return output(q, k, units, Sequences.dense(1, tokens)).transpose(1, 2)


@pytest.mark.parametrize("row", EQUALITY, ids=label)
def test_weight_cross_entropy_equals_the_materialised_one(row, monkeypatch):
    """Packed documents of mixed lengths in tiles of several sizes; the weights themselves come from the operations' outputs."""
    queries, budget = row["tile"]
    monkeypatch.setattr(transfer, "QUERIES", {False: queries})
    monkeypatch.setattr(transfer, "BUDGET", {False: budget})
    lengths = (2, 3 * W + 5, 1, 2 * W, W - 1, 0, W + 1, 3 * W + 5, W, 2 * W + 1)
    mixer = layer(row)
    group = mixer.mixers[0]
    q, k = draw(mixer, sum(lengths))
    sequences = Sequences.packed(torch.tensor([0, *accumulate(lengths)]))
    objective = Objective(weight_ce=1, against=row.get("against", "hybrid"))
    if objective.against == "linear_only":
        student = group.linear_only
    else:
        student = lambda *x: group.attend(*x)[0]  # noqa: E731
    total = torch.zeros((), dtype=torch.float64)
    for q_T, k_T in zip(q.split(lengths, 1), k.split(lengths, 1), strict=True):
        if q_T.shape[1]:
            with torch.no_grad():
                teacher = dense_weights(mixer.teacher, q_T, k_T)
            total = (
                total
                + q_T.shape[1] * losses.weight_cross_entropy(teacher, dense_weights(student, q_T, k_T))[0]
            )
    expected = total / sum(lengths)
    value = weight_cross_entropy(mixer, group, q, k, sequences, objective)
    torch.testing.assert_close(value, expected, atol=1e-10, rtol=1e-10)
    parameters = dict(group.named_parameters())
    pairs = [torch.autograd.grad(x, list(parameters.values()), allow_unused=True) for x in (value, expected)]
    for name, ours, theirs in zip(parameters, *pairs, strict=True):
        assert (ours is None) == (theirs is None), name
        if theirs is not None:
            assert theirs.abs().max() > 1e-6
            torch.testing.assert_close(
                ours, theirs, atol=1e-10, rtol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )
    with torch.no_grad():
        unlearnt = weight_cross_entropy(mixer, group, q, k, sequences, objective)
    assert not unlearnt.requires_grad and torch.equal(unlearnt, value)


@pytest.mark.parametrize("budget", [1, 300, 5000, 2**20])
def test_tiles_hold_every_query_once_within_their_budget(budget):
    lengths, heads = (5, 0, 40, 1, 8, 9, 40, 33), 3
    sequences = Sequences.packed(torch.tensor([0, *accumulate(lengths)]))
    flat = torch.arange(sum(lengths))
    seen = []
    for tile in cut(sequences, heads, budget, 8):
        index = tile.lay(flat)
        queries = tile.last - tile.first
        assert index.shape[1] == tile.last and queries <= 8
        assert len(index) == 1 or heads * queries * index.numel() <= budget
        seen.append(index[:, tile.first :][tile.counted().squeeze(1)])
        assert ((index == index[:, :1] + torch.arange(tile.last)) | (index == index.amax(1, True))).all()
    assert torch.equal(torch.cat(seen).sort().values, flat)
    assert cut(Sequences.dense(2, 0), heads, budget, 8) == []


class LiveBytes(TorchDispatchMode):
    """The most bytes that were alive at once of what was made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self.seen:
                size = tensor.untyped_storage().nbytes()
                self.seen.add(key)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(tensor.untyped_storage(), self.free, key, size)
        return out

    def free(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.live -= size


@pytest.mark.parametrize("against", ["hybrid", "linear_only"])
def test_the_weight_cross_entropys_memory_is_linear_in_the_length(against):
    """Forward and backward; a form that held all weights would take 4 times as much for twice the length."""
    row = {"attention": "windowed_linear", "heads": "gqa", "near": "terraced", "map": "query"}
    mixer = layer(row | {"normalizer": "shared"}).float()
    peaks = []
    for tokens in (1024, 2048):
        q, k = (x.float() for x in draw(mixer, tokens))
        objective = Objective(weight_ce=1, against=against)
        with LiveBytes() as bytes_:
            weight_cross_entropy(
                mixer, mixer.mixers[0], q, k, Sequences.dense(1, tokens), objective
            ).backward()
        peaks.append(bytes_.peak)
    assert peaks[1] < 2.1 * peaks[0]
    assert peaks[1] < 4 * mixer.shape.heads * 2048**2


def test_layers_that_keep_softmax_do_not_dilute_the_error(batch):
    whole, mixed = student(SPECS["hedgehog"]), student(SPECS["mixed layers"])
    stages = [TransferStage(m, TransferStep.model_validate({"tokens": 1}), [batch]) for m in (whole, mixed)]
    errors = [stage.layer_errors() for stage in stages]
    assert errors[1] == pytest.approx([errors[0][0], 0, errors[0][2], 0])
    assert stages[1].validate()["nmse"] == pytest.approx((errors[0][0] + errors[0][2]) / 2)


def test_validation_and_layer_errors_weigh_batches_by_their_tokens(text):
    model = student(SPECS["hedgehog"])
    rows = bench.batch(text, rows=3)
    cut = [
        Batch(*(tensor[part] for tensor in (rows.input_ids_BT, rows.labels_BT, rows.position_ids_BT)))
        for part in (slice(0, 2), slice(2, 3))
    ]
    step = TransferStep.model_validate({"tokens": 1})
    losses = [TransferStage(model, step, [part]).validate()["loss"] for part in cut]
    assert TransferStage(model, step, cut).validate()["loss"] == pytest.approx(
        (2 * losses[0] + losses[1]) / 3
    )
    errors = [torch.tensor(TransferStage(model, step, [part]).layer_errors()) for part in cut]
    both = torch.tensor(TransferStage(model, step, cut).layer_errors())
    torch.testing.assert_close(both, (2 * errors[0] + errors[1]) / 3)
