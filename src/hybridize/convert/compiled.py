"""torch.compile in training steps: the layers of a model are compiled while a step runs, and as they are everywhere else.

A layer becomes a few graphs: what reads the layout of a call (`Sequences.once`) and kernels of other libraries stay outside
them, and layers of a kind share theirs. Validation, with its odd last batch, runs uncompiled and forces no graph anew.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from hybridize.layers.token_mixer import TokenMixer
from hybridize.mixers.recurrent import RecurrentMixer
from hybridize.recipe import Recipe

Made = TypeVar("Made", bound=Callable[..., Any])

BACKEND = "inductor"
VARIANTS = 64
"""Graphs of one piece of code: kinds of layers, lengths of rows, teacher and student."""


def check_compiler(recipe: Recipe, device: torch.device, left: Iterable[int]) -> None:
    """Refuse `compile: true` in the steps numbered `left` where there is no C++ compiler: torch.compile would say so hours later."""
    left = {*left}
    wanted = [path for index, path, step in recipe.stages if index in left and step.compile]
    if not wanted or BACKEND != "inductor":
        return
    names = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++", "c++"]
    if device.type == "cpu":  # code of CPUs is built by the one compiler that torch looks for
        names = [os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")]
    if not any(shutil.which(name) for name in names):
        raise ValueError(
            f"{wanted[0]}.compile: torch.compile needs a C++ compiler, and {' or '.join(names)} is not on the PATH;"
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
    recurrences and short convolutions are compiled too; other attention has kernels of its own, and packed rows another grid
    and another number of documents in every batch."""

    def __init__(self, modules: Iterable[nn.Module], *, regular: bool) -> None:
        self.modules = [part for module in modules for part in _parts(module)]
        self.mixers = [x for module in self.modules for x in module.modules() if isinstance(x, TokenMixer)]
        self.apart = [(x, "attend") for x in self.mixers if not (regular and _recurrent(x))]
        self.apart += [(x, "convolve") for x in self.mixers if not regular and _convolves(x)]
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
        for mixer, call in self.apart:
            setattr(mixer, call, torch.compiler.disable(getattr(mixer, call)))
        for module, compiled in zip(self.modules, self._calls, strict=True):
            module._compiled_call_impl = compiled
        self._running = True
        try:
            with torch._dynamo.config.patch(recompile_limit=VARIANTS):
                yield
        except BackendCompilerFailed as error:
            cause = error.inner_exception
            why = ": ".join([type(cause).__name__, *str(cause).splitlines()[:1]])
            raise RuntimeError(
                f"compile: true: torch.compile could not make code of a layer ({why}); HYBRIDIZE_DEBUG=1 shows all of it."
                " Repair what it names, or set compile: false and begin another folder"
            ) from error
        finally:
            self._running = False
            for module in self.modules:
                module._compiled_call_impl = None
            for mixer, call in self.apart:
                delattr(mixer, call)


def _parts(module: nn.Module) -> list[nn.Module]:
    """What is compiled of a layer: itself, or its parts where torch's checkpoint, which nothing is traced through, surrounds them."""
    return [*module.children()] if getattr(module, "gradient_checkpointing", False) else [module]


def _recurrent(mixer: TokenMixer) -> bool:
    return all(isinstance(group, RecurrentMixer) for group in mixer.mixers)


def _convolves(mixer: TokenMixer) -> bool:
    return any(isinstance(group, RecurrentMixer) and group.short_conv is not None for group in mixer.mixers)
