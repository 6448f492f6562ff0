"""DataSpec: the `data:` section of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Role = Literal["text", "prompt", "input", "response", "messages"]


class DataSpec(BaseModel):
    """Where text comes from and how it becomes rows of tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(
        "docstrings",
        description="docstrings, code, essays; a .txt, .jsonl or .parquet file or a folder of them; a hub dataset id",
    )
    length: int = Field(1024, ge=2, description="tokens a row")
    name: str | None = Field(None, description="configuration of a hub dataset")
    split: str | None = Field(None, description="take everything from this split of a hub dataset")
    documents: Literal["isolated", "joined"] = Field(
        "isolated",
        description="isolated: documents of a row do not see each other; joined: a row is one text (LoLCATs)",
    )
    fields: dict[Role, str] | None = Field(
        None,
        description="which field holds the text, the prompt (and its input) and response, or the messages",
    )
    chat_template: bool = Field(
        False, description="render prompt and response with the tokenizer's chat template"
    )
    mask_prompt: bool = Field(True, description="tokens of the prompt are read but are no targets")
    validation: float = Field(0.04, ge=0, lt=0.5, description="share of the text held out for validation")
    test: float = Field(0.04, ge=0, lt=0.5, description="share of the text held out for the test")
    shuffle: bool = Field(True, description="shuffle documents before packing")
    seed: int = Field(0, ge=0, description="of the shuffle")

    @model_validator(mode="after")
    def _fields_fit_together(self) -> DataSpec:
        roles = set(self.fields or ())
        shapes: tuple[set[str], ...] = (
            {"text"},
            {"messages"},
            {"prompt", "response"},
            {"prompt", "input", "response"},
        )
        if self.fields is not None and roles not in shapes:
            raise ValueError(
                f"fields maps {sorted(roles)}; allowed are text, or messages, or prompt and response (and input)"
            )
        if self.chat_template and roles == {"text"}:
            raise ValueError(
                "chat_template needs fields with a prompt and response, or messages; plain text has no roles"
            )
        return self
