"""No `T x T` tensor in the chunked implementations: the largest tensor made, forward and backward, grows as T does."""

from __future__ import annotations

import pytest
import torch
from tests.ops.cases import inputs, mixes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hybridize.ops import linear, softmax, windowed_linear
from hybridize.ops.sequences import Sequences
from hybridize.windows import Window

SHORT, LONG, W = 1024, 2048, 64


class LargestTensor(TorchDispatchMode):
    """Elements of the largest storage that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.element_size())
        return result


def run(
    name: str, length: int, impl: str = "chunked", *, packed: bool = False, softcap: float | None = None
) -> int:
    x = inputs(1, length, heads=2, groups=1, dim=16, features=16, grad=True)
    sequences = Sequences.packed(torch.tensor([0, 5, length // 2, length])) if packed else None
    options = {"sequences": sequences, "return_state": True, "impl": impl}
    with LargestTensor() as largest:
        if name == "linear":
            result = linear.forward(x.q, x.k, x.v, x.map_q, x.map_k, **options)
        elif name == "softmax":
            result = softmax.forward(x.q, x.k, x.v, None, softcap=softcap, **options)
        else:
            operation, kind, mix = name.split()
            window = Window(kind, W, sinks=2, overlap=mix == "separate")
            if operation == "softmax":
                window = Window(kind, W, sinks=2)
                result = softmax.forward(x.q, x.k, x.v, window, return_aux=True, softcap=softcap, **options)
            else:
                result = windowed_linear.forward(
                    x.q, x.k, x.v, x.map_q, x.map_k, window, mixes(2)[mix], softcap=softcap, **options
                )
        result.o.square().sum().backward()
    return largest.elements


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(
    "name",
    [
        "linear",
        "softmax sliding -",
        "softmax terraced -",
        *(
            f"windowed {kind} {mix}"
            for kind in ("sliding", "terraced")
            for mix in ("shared", "separate", "mass")
        ),
    ],
)
def test_the_largest_tensor_grows_linearly(name, softcap, packed):
    short, long = (run(name, length, softcap=softcap, packed=packed) for length in (SHORT, LONG))
    assert long < LONG * LONG / 2
    assert long <= 2.1 * short


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_full_softmax_never_holds_its_scores(softcap, packed):
    """Fused without a cap; with one, tiles of 256 queries."""
    short, long = (run("softmax", length, packed=packed, softcap=softcap) for length in (SHORT, LONG))
    assert long <= 2.1 * short and long <= 2 * 256 * LONG


def test_capped_softmax_keeps_no_tile_for_its_backward():
    """What autograd saves grows linearly too."""

    def saved(length: int) -> int:
        x, elements = inputs(1, length, heads=2, groups=1, dim=16, grad=True), {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            elements[tensor.untyped_storage().data_ptr()] = (
                tensor.untyped_storage().nbytes() // tensor.element_size()
            )
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            softmax.forward(x.q, x.k, x.v, None, softcap=5.0).o.sum().backward()
        return sum(elements.values())

    assert saved(LONG) <= 2.1 * saved(SHORT)


def test_the_measure_sees_a_quadratic_tensor():
    short, long = (run("windowed sliding shared", length, "reference") for length in (SHORT, LONG))
    assert long >= LONG * LONG and long > 3.5 * short


@torch.no_grad()
def test_a_step_touches_the_window_and_the_state_alone():
    """Decode costs the same after 100 tokens as after 2,000."""

    def largest(length: int) -> int:
        x = inputs(1, length + 1, heads=2, groups=1, dim=16, features=16)
        window, mix = Window("terraced", W, sinks=2), mixes(2)["shared"]
        first = x.rows(slice(None), slice(0, length))
        last = inputs(1, 1, heads=2, groups=1, dim=16, features=16)  # no view of the long tensors
        maps = x.map_q, x.map_k
        state = windowed_linear.forward(
            first.q, first.k, first.v, *maps, window, mix, return_state=True
        ).state
        with LargestTensor() as seen:
            windowed_linear.step(last.q, last.k, last.v, *maps, window, mix, state)
        return seen.elements

    assert largest(200) == largest(2000 + 8)
