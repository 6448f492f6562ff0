"""Short convolutions of recurrent groups: what they do to a layer and to a model, and where the spec allows them."""

from __future__ import annotations

import pytest
import torch
from tests.models.hybrids import hybrid, realigned, shift_own_parameters, tokens
from tests.models.tiny import tiny_model
from torch import Tensor
from torch.nn.functional import conv1d
from transformers import AutoModelForCausalLM

from hybridize.mixers.parts import ShortConv
from hybridize.mixers.recurrent import ConvolvedState
from hybridize.models.modeling import CACHE
from hybridize.models.surgery import hybridize_model
from hybridize.ops.sequences import Sequences
from hybridize.recipe import Recipe, RecipeError
from hybridize.spec import RECURRENT, GroupSpec, HybridSpec

WIDTH = 4
OTHERS = ("softmax", "linear", "windowed_linear")
# a convolution beside groups without one, and another width
MIXTURE = {
    "groups": [
        {"attention": "gdn", "short_conv": WIDTH, "heads": "1/2", "qk_norm": True, "position": "none"},
        {"attention": "softmax", "heads": "1/2"},
    ]
}
MIXTURE_2 = {
    "groups": [
        {"attention": "lightning", "heads": "1/2"},
        {"attention": "mamba2", "short_conv": 2, "heads": "1/2", "output_gate": "half"},
    ]
}
SPEC = {"all": MIXTURE, "layers": {"1": MIXTURE_2}}


@pytest.mark.parametrize("attention", RECURRENT)
@torch.no_grad()
def test_at_first_nothing_changes(attention):
    ids, logits = tokens(2, 11), []
    for width in (None, WIDTH):
        spec = HybridSpec.model_validate({"all": {"attention": attention, "short_conv": width}})
        logits.append(hybridize_model(tiny_model("llama"), spec)(ids, use_cache=False).logits)
    assert torch.equal(*logits)


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    channels, width = weight.shape
    y = conv1d(x.transpose(1, 2), weight[:, None], padding=width - 1, groups=channels)
    return y[..., : x.shape[1]].transpose(1, 2)


@torch.no_grad()
def test_it_stands_before_the_norm_and_knows_kv_heads():
    """q, k and v of each group by hand: keys and values are convolved once a KV head, other groups are left alone."""
    model = hybrid(SPEC)
    mixer = model.mixers[0]
    x = torch.randn(2, 9, mixer.shape.hidden)
    one, _ = mixer.mixers
    dim, heads, kv_heads = mixer.shape.head_dim, one.shape.heads, one.shape.kv_heads
    assert one.short_conv.k_weight.shape == (kv_heads * dim, WIDTH) and kv_heads < heads
    nothing = torch.ones(1, 9, dim), torch.zeros(1, 9, dim)  # a RoPE that turns by no angle
    q, k, v = mixer.project(x, nothing, Sequences.dense(2, 9))
    raw_q, raw_k, raw_v = (
        projection(x).unflatten(-1, (-1, dim)) for projection in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    own_q = convolved(raw_q[:, :, :heads].flatten(2), one.short_conv.q_weight).unflatten(2, (-1, dim))
    own_k = convolved(raw_k[:, :, :kv_heads].flatten(2), one.short_conv.k_weight).unflatten(2, (-1, dim))
    own_v = convolved(raw_v[:, :, :kv_heads].flatten(2), one.short_conv.v_weight).unflatten(2, (-1, dim))
    torch.testing.assert_close(q, torch.cat([one.q_norm(own_q), raw_q[:, :, heads:]], 2))
    torch.testing.assert_close(k, torch.cat([one.k_norm(own_k), raw_k[:, :, kv_heads:]], 2))
    torch.testing.assert_close(v, torch.cat([own_v, raw_v[:, :, kv_heads:]], 2))


@torch.no_grad()
def test_beams_steps_and_copies_of_a_cache():
    """Rows padded to one length, some shorter than the convolution; the cache continues, forks and is read as a snapshot."""
    model = hybrid(SPEC)
    mask = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    prompts = tokens(3, 5) * mask
    options = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
    for more in ({}, {"num_beams": 3, "num_return_sequences": 2}):
        found = [
            model.generate(prompts, attention_mask=mask, use_cache=use_cache, **options, **more)
            for use_cache in (True, False)
        ]
        assert torch.equal(*found)
    ids, cache = tokens(2, 12), model.new_cache()
    whole = model(ids, use_cache=False).logits
    model(ids[:, :7], **{CACHE: cache})
    state = cache.states[0][0]
    assert isinstance(state, ConvolvedState) and state.memory is not None
    assert state.conv.x_NRC.shape[1] == WIDTH - 1
    kept = cache.snapshot()
    model(tokens(2, 4, seed=9), **{CACHE: cache})
    kept.reorder_cache(torch.tensor([1, 0, 1]))
    rest = model(ids[[1, 0, 1], 7:], **{CACHE: kept}).logits
    torch.testing.assert_close(rest, whole[[1, 0, 1], 7:], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_save_load_and_another_dtype(tmp_path):
    model, ids = hybrid(SPEC), tokens(1, 9)
    model.save_pretrained(tmp_path)
    loaded = realigned(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert torch.equal(loaded(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    low = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert low.mixers[0].mixers[0].short_conv.q_weight.dtype == torch.bfloat16
    cache = low.new_cache()
    assert low(ids, **{CACHE: cache}).logits.isfinite().all()
    state = cache.states[0][0]
    assert state.conv.x_NRC.dtype == torch.bfloat16 and state.memory.S_NHDV.dtype == torch.float32


@torch.no_grad()
def test_another_width_starts_as_new():
    """A change of spec keeps what keeps its shape; the convolution does not."""
    model = hybrid({"all": {"attention": "gdn", "short_conv": WIDTH}}, layers=1)
    (mixer,), dim = model.mixers, model.shapes[0].head_dim
    wider = HybridSpec.model_validate({"all": {"attention": "gdn", "short_conv": 3}})
    spec = wider.resolve(layers=1, heads=mixer.shape.heads, kv_heads=mixer.shape.kv_heads, head_dim=dim)
    before = mixer.mixers[0].control.beta_weight.clone()
    mixer.respec(spec.layers[0])
    weight = mixer.mixers[0].short_conv.v_weight
    assert torch.equal(weight, torch.tensor([0.0, 0, 1]).expand_as(weight))
    assert torch.equal(mixer.mixers[0].control.beta_weight, before)


def test_training_reaches_every_weight():
    """In float32 masters under autocast, packed documents, also of families whose norms widen q and k."""
    for family in ("llama", "qwen3"):
        model = hybrid({"all": {"attention": "gla", "short_conv": WIDTH}}, family)
        shift_own_parameters(model)
        ids = tokens(1, 16)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=ids, cu_seqlens=torch.tensor([0, 3, 4, 16])).loss
        loss.backward()
        for mixer in model.mixers:
            for weight in mixer.mixers[0].short_conv.parameters():
                assert weight.grad.isfinite().all() and bool((weight.grad.abs().amax(0) > 0).all())


@pytest.mark.parametrize("attention", OTHERS)
def test_other_attentions_take_none(attention):
    window = {"window": {"kind": "sliding", "size": 4}} if attention == "windowed_linear" else {}
    with pytest.raises(
        ValueError, match=f"attention '{attention}' takes no short_conv; only recurrent .*gdn"
    ):
        GroupSpec(attention=attention, short_conv=WIDTH, **window)


def test_a_recipe_says_what_is_wrong_with_it():
    def read(**group):
        return Recipe.from_dict({"spec": {"all": group}, "steps": []})

    assert read(attention="kda", short_conv=2).spec.all.groups[0].short_conv == 2
    with pytest.raises(RecipeError, match="short_conv.*greater than or equal to 2"):
        read(attention="kda", short_conv=1)
    with pytest.raises(RecipeError, match="takes no short_conv"):
        read(attention="softmax", short_conv=4)


def test_first_values():
    conv = ShortConv(6, 4, 3)
    assert [tuple(weight.shape) for weight in conv.parameters()] == [(6, 3), (4, 3), (4, 3)]
    for weight in conv.parameters():
        assert torch.equal(weight, torch.tensor([0.0, 0, 1]).expand_as(weight))
