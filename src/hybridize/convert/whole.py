"""What the stages that run the whole student share: autocast, float32 masters, activation checkpointing, the end.

Legend: B rows, T tokens, E width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from hybridize import losses
from hybridize.convert.compiled import Compiled, layers_of
from hybridize.data.batching import Batch
from hybridize.models.modeling import HybridForCausalLM


class WholeStudent:
    """A stage without its loss. Which parameters train is the subclass's business: it marks them and calls `begin`."""

    name: str

    def __init__(
        self, model: HybridForCausalLM, validation: Iterable[Batch], *, autocast: bool, checkpointing: bool
    ) -> None:
        self.model, self.autocast, self.checkpointing = model, autocast, checkpointing
        self.validation = list(validation)
        self._parameters: dict[str, nn.Parameter] = {}
        self.compiled = Compiled((), regular=False)
        model.requires_grad_(False)

    def compile(self, *, regular: bool) -> None:
        """Run the layers through torch.compile in steps; `regular` as `Compiled` has it."""
        self.compiled = Compiled(layers_of(self.model), regular=regular)

    def begin(self) -> None:
        """Take over the parameters that are marked as trainable."""
        self._parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if self.checkpointing:
            _switch(self.model, "enable")({"use_reentrant": False})

    def parameters(self) -> dict[str, nn.Parameter]:
        return self._parameters

    def count(self, batch: Batch) -> int:
        return losses.count_targets(batch.labels_BT)

    def on_boundary(self, k: int) -> None:
        """Epochs change nothing here."""

    def casting(self) -> torch.autocast:
        """bf16 products where the recipe computes in bf16."""
        return torch.autocast(self.model.device.type, dtype=torch.bfloat16, enabled=self.autocast)

    def hidden(self, batch: Batch) -> Tensor:
        """The student's `[B, T, E]` before the head."""
        ids_BT = batch.input_ids_BT.to(self.model.device)
        return self.model.hidden_states(ids_BT, position_ids=batch.position_ids_BT)[0]

    def finish(self) -> None:
        """Leave the model ready to run."""
        if self.checkpointing:
            _switch(self.model, "disable")()
        self.model.eval().requires_grad_(False)


def _switch(model: HybridForCausalLM, verb: str) -> Callable[..., None]:
    """transformers' switch of activation checkpointing, which 5.24 renamed."""
    former: Callable[..., None] = getattr(model, f"gradient_checkpointing_{verb}")
    return getattr(model, f"activation_checkpointing_{verb}", former)
