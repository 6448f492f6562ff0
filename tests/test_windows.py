"""Window membership, by the definition of DESIGN D1 written as sets; the cache bound; the drawing; bad input."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest
import torch
from tests.ops.brute_force import far_keys, near_keys

from hybridize.windows import Window, draw

LENGTH = 30
WINDOWS = [
    Window(kind, size, sinks, overlap)
    for kind, size, sinks, overlap in product(
        ("sliding", "terraced"), (1, 2, 4, 7), (0, 1, 5, 12), (False, True)
    )
]
T, I = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None, :]  # noqa: E741


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_membership_by_definition(window):
    near, far = window.near(T, I), window.far(T, I)
    for t in range(LENGTH):
        assert torch.nonzero(near[t]).flatten().tolist() == near_keys(
            window.kind, window.size, window.sinks, t
        )
        assert torch.nonzero(far[t]).flatten().tolist() == far_keys(
            window.kind, window.size, window.sinks, window.overlap, t
        )
    assert torch.equal(window.has_far(T[:, 0]), far.any(1))
    assert window.first_far_position == (
        int(torch.nonzero(far.any(1))[0]) if far.any() else window.first_far_position
    )
    if not window.overlap:
        assert not (near & far).any()
        assert torch.equal(near | far, I <= T)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_the_cache_bound_is_enough_and_no_more(window):
    """Keys from `kept_from` on, and only those (sinks aside), are near the last token; the ring always holds them."""
    most = 0
    for length in range(1, LENGTH + 1):
        near = near_keys(window.kind, window.size, 0, length - 1)
        assert window.kept_from(length) == near[0]
        assert window.kept_from(torch.tensor(length)) == near[0]
        most = max(most, len(near))
    assert most == window.ring
    assert window.kept_from(0) == window.kept_from(torch.tensor(0)) == 0


@pytest.mark.parametrize("window", [w for w in WINDOWS if not w.sinks], ids=str)
def test_near_keys_lie_in_a_querys_chunk_or_the_one_before(window):
    for at_least in (1, 8, 64):
        chunk = window.chunk(at_least)
        assert chunk >= at_least and chunk % window.size == 0
        near = torch.nonzero(window.near(T, I))
        assert ((near[:, 0] // chunk - near[:, 1] // chunk) <= 1).all()


def test_drawing_from_the_command_line():
    window = Window("terraced", 2, sinks=1)
    assert draw(window, 6).splitlines() == ["o     ", "o#    ", "o##   ", "o###  ", "o.### ", "o.####"]
    command = [sys.executable, "-m", "hybridize.windows", "terraced", "2", "--sinks", "1", "--length", "6"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.rstrip("\n") == draw(window, 6)
    assert draw(Window("sliding", 2, overlap=True), 3).splitlines() == ["#  ", "## ", ".##"]


@pytest.mark.parametrize(
    "arguments,message",
    [
        (("round", 4), "window.kind is 'round'; allowed are 'sliding' and 'terraced'"),
        (("terraced", 0), "window.size is 0; it must be at least 1 key"),
        (("sliding", -1), "window.size is -1; it must be at least 1 key"),
        (("sliding", 4, -2), "window.sinks is -2; it must be 0 or more positions"),
    ],
)
def test_bad_windows_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Window(*arguments)
