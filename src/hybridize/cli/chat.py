"""`hybridize chat`: a conversation in the terminal."""

from __future__ import annotations

import typer

from hybridize.cli.common import DeviceOption, DtypeOption, RunArgument
from hybridize.cli.generate import (
    MaxNewTokensOption,
    SeedOption,
    TemperatureOption,
    TopPOption,
    chat_inputs,
    sampling,
    stream,
)


def chat(
    run: RunArgument,
    max_new_tokens: MaxNewTokensOption = 256,
    temperature: TemperatureOption = 0.7,
    top_p: TopPOption = 0.9,
    seed: SeedOption = 0,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Talk to a run or a teacher. /reset forgets the conversation; /exit or end of input leaves."""
    import hybridize

    model, tokenizer = hybridize.load(run, device=device, dtype=dtype.value if dtype else None)
    options = sampling(max_new_tokens, temperature, top_p)
    messages: list[dict[str, str]] = []
    while True:
        try:
            text = input("you> ").strip()
        except EOFError:
            typer.echo()
            return
        if text == "/exit":
            return
        if text == "/reset":
            messages = []
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        answer = stream(model, tokenizer, chat_inputs(tokenizer, messages), options, seed + len(messages))
        messages.append({"role": "assistant", "content": answer})
