"""DataSpec: the `data:` section of a recipe."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Role = Literal["text", "prompt", "input", "response", "messages"]


def _one_or_several(value: Any) -> Any:
    """A name, or a tuple of two or more; one name in a list is that name, so that it is the same text everywhere."""
    if isinstance(value, str):
        return _named(value)
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ValueError(
            f"must be a name or a list of names such as [docstrings, package_code], not {value!r}"
        )
    if not value:
        raise ValueError("is an empty list; name at least one text")
    paths = [PurePath(_named(name)) for name in value]
    twice = [name for index, name in enumerate(value) if paths[index] in paths[:index]]
    if twice:
        raise ValueError(f"names {twice[0]!r} twice; list every text once")
    return value[0] if len(value) == 1 else tuple(value)


def _named(name: str) -> str:
    if not name.strip():
        raise ValueError(f"holds {name!r}, which names no text; an empty path would be the folder one is in")
    return name


class DataSpec(BaseModel):
    """Where text comes from and how it becomes rows of tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: Annotated[str | tuple[str, ...], BeforeValidator(_one_or_several)] = Field(
        "docstrings",
        description="docstrings, package_code, recall, code, essays; a .txt, .jsonl or .parquet file or a folder of them; a hub "
        "dataset id; or a list of these but hub datasets: each is divided into splits alone, then documents are pooled, so "
        "that a text's share of the rows is its share of all characters",
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

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the texts."""
        return (self.source,) if isinstance(self.source, str) else self.source

    @property
    def label(self) -> str:
        """The names of the texts as one, for messages."""
        return " + ".join(self.sources)

    def by_source(self) -> dict[str, DataSpec]:
        """The same of each text alone, by its name."""
        return {source: self.model_copy(update={"source": source}) for source in self.sources}

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
