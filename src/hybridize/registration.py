"""Make `AutoModelForCausalLM` know hybrid checkpoints, without making `import hybridize` slow.

Where transformers' auto classes are loaded already, registration happens at once; otherwise when they are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

AUTO = "transformers.models.auto.modeling_auto"


def register() -> None:
    """Register `HybridConfig` and `HybridForCausalLM` with transformers' auto classes. Harmless when repeated."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from hybridize.models.configuration import HybridConfig
    from hybridize.models.modeling import HybridForCausalLM

    AutoConfig.register("hybridize", HybridConfig, exist_ok=True)
    AutoModelForCausalLM.register(HybridConfig, HybridForCausalLM, exist_ok=True)


class _AfterAuto(MetaPathFinder):
    """Finds transformers' auto module as usual and registers once it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != AUTO:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


class _Registering(Loader):
    def __init__(self, inner: Loader) -> None:
        self.inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        register()


def register_lazily() -> None:
    """Register now if the auto classes are loaded, else as soon as they are."""
    if AUTO in sys.modules:
        register()
    elif not any(isinstance(finder, _AfterAuto) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterAuto())
