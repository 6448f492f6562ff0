"""Taking layers apart: expanded keys and values, layers rebuilt from the teacher's, changes of spec, and the refusals.

Shapes: B batch, T tokens, E hidden width, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

import copy

import pytest
import torch
from tests.models.hybrids import (
    HYPE,
    KEPT,
    LIGHTNING,
    MIXTURE,
    TERRACED,
    hybrid,
    shift_own_parameters,
    tokens,
)
from tests.models.tiny import MODEL_TYPES, tiny_model

from hybridize.models.modeling import HybridForCausalLM
from hybridize.models.surgery import hybridize_model, replace_layers, resolve_spec, softmax_teacher
from hybridize.spec import HybridSpec, ResolvedSpec

IDS = tokens(2, 19)
EXPANDED = {"attention": "softmax", "heads": "expand"}


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def convert(family: str, spec: dict, dtype: torch.dtype = torch.float32, **sizes: int) -> HybridForCausalLM:
    sizes = {"num_hidden_layers": 2, **sizes}
    return hybridize_model(tiny_model(family, **sizes).to(dtype), HybridSpec.model_validate(spec))


def resolved(model: HybridForCausalLM, spec: dict) -> ResolvedSpec:
    return resolve_spec(HybridSpec.model_validate(spec), model.config.base_config())


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (6, 2), (4, 4)], ids=str)
@pytest.mark.parametrize("family", MODEL_TYPES)
def test_an_expanded_softmax_layer_is_the_teachers_own(family, heads):
    """Biases, norms and fused projections too: head h has the key and value of floor(h / (H / G))."""
    count, kv_count = heads
    sizes = {"num_attention_heads": count, "num_key_value_heads": kv_count, "hidden_size": 8 * count}
    plain, expanded = (convert(family, {"all": spec}, **sizes) for spec in (KEPT, EXPANDED))
    torch.testing.assert_close(logits(expanded), logits(plain), rtol=1e-4, atol=1e-5)
    # OLMo 2 normalises all heads' keys together, the others' norms serve every head
    wide = ("k_proj", "v_proj", *(["k_norm"] if family == "olmo2" else []))
    for ours, theirs, shape in zip(expanded.mixers, plain.mixers, plain.shapes, strict=True):
        q_width = shape.heads * shape.head_dim
        ours_now, theirs_now = (part_by_name(mixer, family, q_width) for mixer in (ours, theirs))
        assert ours_now.keys() == theirs_now.keys()
        for name, value in ours_now.items():
            wanted = theirs_now[name]
            if name.startswith(wide):
                blocks = wanted.split(shape.head_dim)
                wanted = torch.cat([blocks[h // (count // kv_count)] for h in range(count)])
            assert torch.equal(value, wanted), name
        for module in ours.modules():
            if isinstance(module, torch.nn.Linear):
                assert (module.out_features, module.in_features) == tuple(module.weight.shape)
        assert all(parameter.is_contiguous() for parameter in ours.parameters())


def part_by_name(mixer: torch.nn.Module, family: str, q_width: int) -> dict[str, torch.Tensor]:
    """The parameters of the projections and norms; a fused projection in its parts."""
    own = {name: value for name, value in mixer.state_dict().items() if "groups" not in name}
    if family == "phi3":
        q, rest = own.pop("qkv_proj.weight").tensor_split([q_width])
        k, v = rest.chunk(2)
        own.update({"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v})
    return own


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "olmo2", "phi3"])
def test_expanded_layers_learn_apart(family):
    """The copies are parameters of their own: after a step they differ."""
    model = convert(family, {"all": EXPANDED}).train()
    model(IDS, labels=IDS).loss.backward()
    for mixer in model.mixers:
        projection = mixer.qkv_proj if family == "phi3" else mixer.v_proj
        width = mixer.shape.heads * mixer.shape.head_dim
        grad = projection.weight.grad[-width:].unflatten(0, (mixer.shape.heads, -1))
        assert projection.weight.grad.isfinite().all() and not torch.equal(grad[0], grad[1])
        if projection.bias is not None:
            assert projection.bias.grad[-width:].unflatten(0, (mixer.shape.heads, -1))[0].any()


HALO = {"all": LIGHTNING, "layers": {"1": HYPE}, "kept": KEPT}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "olmo2", "phi3", "smollm3"])
def test_replaced_layers_come_from_copies(family):
    """The teacher stays as it was, learnt layers too; a replaced layer is what a fresh conversion would have made."""
    teacher = softmax_teacher(tiny_model(family, num_hidden_layers=3))
    expected, weights = logits(teacher), copy.deepcopy(teacher.state_dict())
    student = convert(family, {"all": LIGHTNING}, num_hidden_layers=3)
    shift_own_parameters(student)
    untouched = [student.mixers[0], student.mixers[2]]
    before = copy.deepcopy(student.state_dict())
    spec = {"all": LIGHTNING, "layers": {"1": HYPE}}
    replace_layers(student, teacher, resolved(student, spec))
    assert [student.mixers[0], student.mixers[2]] == untouched
    assert student.spec == student.config.spec == resolved(student, spec)
    fresh = convert(family, spec, num_hidden_layers=3).state_dict()
    after = student.state_dict()
    assert list(after) == list(fresh)
    for name, value in after.items():
        assert torch.equal(value, (fresh if ".1.self_attn." in name else before)[name]), name
    assert not student.mixers[1].training
    # what the student learns from now on does not reach the teacher
    with torch.no_grad():
        for parameter in student.mixers[1].parameters():
            parameter.add_(1)
    torch.testing.assert_close(logits(teacher), expected, rtol=0, atol=0)
    assert all(torch.equal(value, weights[name]) for name, value in teacher.state_dict().items())
    # and back, layer by layer, to the teacher itself
    back = resolved(student, {"all": KEPT})
    replace_layers(student, teacher, back)
    torch.testing.assert_close(logits(student), expected, rtol=0, atol=0)


def test_replacing_nothing_keeps_every_module():
    student, teacher = hybrid({"all": LIGHTNING}), softmax_teacher(tiny_model("llama", num_hidden_layers=2))
    mixers, weights = student.mixers, copy.deepcopy(student.state_dict())
    replace_layers(student, teacher, student.spec)
    assert student.mixers == mixers
    assert all(torch.equal(value, weights[name]) for name, value in student.state_dict().items())


@pytest.mark.parametrize("spec", [LIGHTNING, MIXTURE, TERRACED], ids=["lightning", "mixture", "terraced"])
def test_replaced_layers_take_the_students_dtype_and_mode(spec):
    """A float32 teacher and a bfloat16 student: maps and gates stay float32, as in a fresh conversion."""
    teacher = softmax_teacher(tiny_model("llama", num_hidden_layers=2))
    student = convert("llama", {"all": KEPT}, torch.bfloat16).train()
    replace_layers(student, teacher, resolved(student, {"all": KEPT, "layers": {"1": spec}}))
    fresh = convert("llama", {"all": KEPT, "layers": {"1": spec}}, torch.bfloat16)
    assert {name: x.dtype for name, x in student.state_dict().items()} == {
        name: x.dtype for name, x in fresh.state_dict().items()
    }
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in student.state_dict().items())
    assert all(mixer.training for mixer in student.mixers)
    assert next(teacher.parameters()).dtype == torch.float32


def test_a_student_that_cannot_be_is_left_as_it_was():
    teacher = softmax_teacher(tiny_model("llama", num_hidden_layers=2))
    student = convert("llama", {"all": TERRACED})
    before, spec = student.mixers, student.spec
    three = ResolvedSpec(layers=(*spec.layers, spec.layers[0]))
    with pytest.raises(ValueError, match="spec has 3 layers; the model has 2"):
        replace_layers(student, teacher, three)
    changed = convert("llama", {"all": KEPT, "layers": {"1": {**KEPT, "position": "none"}}})
    with pytest.raises(ValueError, match="layer 1 of the teacher is not its own softmax attention any more"):
        replace_layers(student, changed, resolved(student, {"all": KEPT}))
    with pytest.raises(ValueError, match="layer 0 of the teacher is not its own softmax"):
        replace_layers(student, convert("llama", {"all": LIGHTNING}), resolved(student, {"all": KEPT}))
    assert student.mixers == before and student.spec == student.config.spec == spec


OTHERS = {
    "lightning": LIGHTNING,
    "no positions": {**KEPT, "position": "none"},
    "own base": {**KEPT, "position": {"rope": 50}},
    "own norms": {**KEPT, "qk_norm": True},
    "scaled": {**KEPT, "logit_scale": {"kind": "constant", "value": 2}},
    "expanded": EXPANDED,
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_layer_that_projects_otherwise_is_no_teacher(name):
    model = convert("llama", {"all": TERRACED, "layers": {"1": OTHERS[name]}})
    with (
        model.as_teacher(),
        pytest.raises(ValueError, match="layer 1 no longer projects as its teacher does"),
    ):
        logits(model)


def test_a_layer_without_rope_that_is_given_one_is_no_teacher():
    """SmolLM3: `position: rope` is the teacher's own only where the teacher has it."""
    for layer, fits in ((0, True), (1, False)):
        spec = {"all": TERRACED, "layers": {str(layer): {**TERRACED, "position": "rope"}}}
        model = convert("smollm3", spec)
        with model.as_teacher():
            if fits:
                expected = logits(tiny_model("smollm3", num_hidden_layers=2))
                torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
            else:
                with pytest.raises(ValueError, match="layer 1 no longer projects as its teacher does"):
                    logits(model)


def test_dressings_on_the_output_keep_the_teacher_inside():
    dressed = {**TERRACED, "output_norm": True, "output_gate": "half"}
    model = convert("llama", {"all": dressed})
    shift_own_parameters(model)
    with model.as_teacher():
        expected = logits(tiny_model("llama", num_hidden_layers=2))
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "smollm3"])
def test_positions_by_layer(family):
    """`rope` and `none` name what the teacher does in layers that do it, and change the others. Layer 1 of SmolLM3 has none."""
    plain = logits(convert(family, {"all": KEPT}))
    same = {"llama": {"0": True, "1": True}, "smollm3": {"0": True, "1": False}}[family]
    for layer, rotates in same.items():
        for position in ("rope", "none"):
            spec = {"all": KEPT, "layers": {layer: {**KEPT, "position": position}}}
            close = torch.allclose(logits(convert(family, spec)), plain, rtol=0, atol=0)
            assert close == (rotates == (position == "rope")), (layer, position)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "smollm3"])
def test_the_teachers_base_by_its_number_is_its_own_rope(family):
    base = tiny_model(family, num_hidden_layers=1).config.rope_parameters["rope_theta"]
    plain = convert(family, {"all": KEPT}, num_hidden_layers=1)
    named = convert(family, {"all": {**KEPT, "position": {"rope": base}}}, num_hidden_layers=1)
    torch.testing.assert_close(logits(named), logits(plain), rtol=1e-5, atol=1e-5)


def test_scales_at_inference_are_off_in_training():
    for when, off in (("inference", True), ("always", False)):
        scale = {"kind": "constant", "value": 3, "when": when}
        model, plain = (convert("llama", {"all": {**KEPT, "logit_scale": s}}) for s in (scale, None))
        assert not torch.allclose(logits(model), logits(plain))
        assert torch.equal(logits(model.train()), logits(plain.train())) == off


def test_a_change_of_spec_keeps_what_it_can():
    model = hybrid({"all": {**HYPE, "qk_norm": True}})
    before = copy.deepcopy(model.state_dict())
    norms, gate = {**HYPE, "qk_norm": True, "logit_scale": None}, {**HYPE, "output_norm": True}
    model.respec(resolved(model, {"all": norms, "layers": {"1": gate}}))
    after = model.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in after.items() if name in before)
    assert set(after) - set(before) == {"model.layers.1.self_attn.groups.0.output_norm.weight"}
    assert set(before) - set(after) == {f"model.layers.1.self_attn.groups.0.{x}_norm.weight" for x in "qk"}
    assert model.mixers[0].mixers[0].spec.logit_scale is None


def test_a_change_of_spec_that_cannot_be_leaves_the_model_as_it_was():
    model = convert("llama", {"all": HYPE})
    mixers, spec, expected = [mixer.groups for mixer in model.mixers], model.spec, logits(model)
    for layer in (EXPANDED, LIGHTNING):
        with pytest.raises(ValueError, match="layer 1: heads: expand changes the projections"):
            model.respec(resolved(model, {"all": KEPT, "layers": {"1": layer}}))
    with pytest.raises(ValueError, match="layer 0: heads: expand changes the projections"):
        expanded = convert("llama", {"all": LIGHTNING})
        expanded.respec(resolved(model, {"all": {"attention": "lightning"}}))
    with pytest.raises(ValueError, match="spec has 1 layers; the model has 2"):
        model.respec(ResolvedSpec(layers=spec.layers[:1]))
    assert [mixer.groups for mixer in model.mixers] == mixers and model.spec == model.config.spec == spec
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=0)


def test_open_gates_change_nothing_at_first():
    plain = convert("llama", {"all": KEPT})
    for gate, same in (("open", True), ("half", False)):
        model = convert("llama", {"all": {**KEPT, "output_gate": gate}})
        assert torch.allclose(logits(model), logits(plain), rtol=1e-6, atol=1e-6) == same


def test_a_teacher_with_norms_keeps_its_own():
    """`qk_norm` adds norms where the teacher has none a head; Qwen3's stay the teacher's."""
    for family, own in (("qwen3", False), ("llama", True), ("olmo2", True)):
        model = convert(family, {"all": {**KEPT, "qk_norm": True}})
        names = [name for name, _ in model.named_parameters() if ".groups.0.q_norm" in name]
        assert len(names) == (2 if own else 0), family
    normed = logits(convert("qwen3", {"all": {**KEPT, "qk_norm": True}}))
    torch.testing.assert_close(normed, logits(convert("qwen3", {"all": KEPT})), rtol=0, atol=0)
