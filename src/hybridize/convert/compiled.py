"""torch.compile in training steps: the layers of a model are compiled while a step runs, and as they are everywhere else.

A layer becomes a few graphs: what reads the layout of a call (`Sequences.once`) and kernels of other libraries stay outside
them, and layers of a kind share theirs. Validation, with its odd last batch, runs uncompiled and forces no graph anew.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn

from hybridize.layers.token_mixer import TokenMixer
from hybridize.mixers.recurrent import RecurrentMixer
from hybridize.recipe import Recipe

Made = TypeVar("Made", bound=Callable[..., Any])

BACKEND = "inductor"
VARIANTS = 64
"""Graphs of one piece of code: kinds of layers, lengths of rows, teacher and student."""


def check_compiler(recipe: Recipe) -> None:
    """Refuse a recipe with `compile: true` where there is no C++ compiler: torch.compile would say so hours later."""
    wanted = [f"{i}].{step.kind}" for i, step in enumerate(recipe.steps) if getattr(step, "compile", False)]
    if not wanted or BACKEND != "inductor":
        return
    names = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++", "c++"]
    if not any(shutil.which(name) for name in names):
        raise ValueError(
            f"steps[{wanted[0]}.compile: torch.compile needs a C++ compiler, and {' or '.join(names)} is not on the PATH;"
            " install one or set compile: false"
        )


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The modules that hold a token mixer: the decoder layers."""
    return [
        module
        for module in model.modules()
        if any(isinstance(child, TokenMixer) for child in module.children())
    ]


class Compiled:
    """Compiles `modules` for the time of a step. Where `regular` (every row is one sequence of full length in every batch)
    recurrences are compiled too; other attention has kernels of its own, and packed rows another grid in every batch."""

    def __init__(self, modules: Iterable[nn.Module], *, regular: bool) -> None:
        self.modules = list(modules)
        self.mixers = [x for module in self.modules for x in module.modules() if isinstance(x, TokenMixer)]
        self.apart = [mixer for mixer in self.mixers if not (regular and _recurrent(mixer))]
        self._calls: list[Callable[..., Any]] = []
        self._functions: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._running = False

    def function(self, plain: Made) -> Made:
        """A function of tensors as a step calls it; itself outside of steps."""
        if not self._running:
            return plain
        if plain not in self._functions:
            self._functions[plain] = torch.compile(plain, backend=BACKEND, dynamic=False)
        return cast(Made, self._functions[plain])

    @contextmanager
    def step(self) -> Iterator[None]:
        """The modules as compiled ones."""
        if not self.modules:
            yield
            return
        if not self._calls:
            self._calls = [
                torch.compile(module._call_impl, backend=BACKEND, dynamic=False) for module in self.modules
            ]
        for mixer in self.apart:
            mixer.attend = torch.compiler.disable(mixer.attend)  # type: ignore[method-assign]
        for module, call in zip(self.modules, self._calls, strict=True):
            module._compiled_call_impl = call
        self._running = True
        try:
            with torch._dynamo.config.patch(recompile_limit=VARIANTS):
                yield
        finally:
            self._running = False
            for module in self.modules:
                module._compiled_call_impl = None
            for mixer in self.apart:
                del mixer.attend


def _recurrent(mixer: TokenMixer) -> bool:
    return all(isinstance(group, RecurrentMixer) for group in mixer.mixers)
