"""The bias of mass mixing starts where the gate follows the teacher's own shares of near and far."""

import torch
from tests.models.tiny import tiny_model

from hybridize.convert.calibrate import calibrate_mass
from hybridize.data.batching import Batch
from hybridize.models.surgery import hybridize_model
from hybridize.ops import softmax, windowed_linear
from hybridize.spec import HybridSpec

MASS = {
    "attention": "windowed_linear",
    "window": {"kind": "terraced", "size": 4},
    "normalizer": {"kind": "separate", "mix": "mass"},
}
SPEC = HybridSpec.model_validate({"all": MASS, "layers": {"0": {"attention": "softmax"}}})


def test_the_mean_log_odds_of_the_gate_are_the_teachers():
    model = hybridize_model(tiny_model("llama", True), SPEC)
    ids = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(0))
    calibrate_mass(model, Batch(ids, ids, torch.arange(40).expand(2, -1)))
    seen = []

    def look(mixer, q, k, v, sequences):
        group = mixer.mixers[0]
        if group.far:
            maps, mix = (group.map_q.map(), group.map_k.map()), group.mix.mix(q.device)
            aux = windowed_linear.forward(q, k, v, *maps, group.window, mix, return_aux=True).aux
            near = aux["shift"] + aux["near_den"].log()
            student = near - aux["far_den"].log() - group.mix.logit  # log odds of the gate
            weights = softmax.coefficients(q, k)
            t, i = torch.arange(40)[:, None], torch.arange(40)
            share = (
                (weights * group.window.near(t, i)).sum(-1).transpose(1, 2)
            )  # teacher's near mass, [B, T, H]
            teacher = torch.log(share) - torch.log1p(-share)
            seen.append((student[:, 8:].mean((0, 1)), teacher[:, 8:].mean((0, 1))))
        return mixer.teacher(q, k, v, sequences)

    with torch.no_grad(), model.intercepted(look):
        model.hidden_states(ids)
    assert seen
    for student, teacher in seen:
        torch.testing.assert_close(student, teacher, rtol=1e-3, atol=1e-3)
    mixes = [mixer.mixers[0].mix.logit for mixer in model.mixers if mixer.mixers[0].far]
    assert all(bias.abs().max() > 0.1 for bias in mixes)
