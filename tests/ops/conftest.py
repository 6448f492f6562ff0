"""On a GPU: kernels of flash-linear-attention take their first configuration, since choosing the fastest takes a minute a case."""

from __future__ import annotations

from typing import Any

import torch


def first_configuration() -> None:
    """Before the library is imported: its decorators read the configurations then."""
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return
    whole = Autotuner.__init__

    def init(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        whole(self, fn, arg_names, configs[:1] if configs else configs, *args, **kwargs)

    Autotuner.__init__ = init


if torch.cuda.is_available():
    first_configuration()
