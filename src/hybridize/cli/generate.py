"""`hybridize generate`: continue a prompt, or answer it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hybridize.cli.common import DeviceOption, DtypeOption, RunArgument

MaxNewTokensOption = Annotated[int, typer.Option(min=1, help="Tokens to write at most.")]
TemperatureOption = Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")]
TopPOption = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens of this total share.")
]
SeedOption = Annotated[int, typer.Option(help="Of the sampling.")]


def generate(
    run: RunArgument,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT")],
    max_new_tokens: MaxNewTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat/--raw", help="Put PROMPT into the tokenizer's chat template, or continue it as it is."
        ),
    ] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Write on from PROMPT, token by token."""
    import hybridize

    if not prompt:
        raise ValueError("PROMPT is empty; give some text to continue")
    model, tokenizer = hybridize.load(run, device=device, dtype=dtype.value if dtype else None)
    inputs = (
        chat_inputs(tokenizer, [{"role": "user", "content": prompt}])
        if chat
        else tokenizer(prompt, return_tensors="pt")
    )
    if not chat:
        typer.echo(prompt, nl=False)
    stream(model, tokenizer, inputs, sampling(max_new_tokens, temperature, top_p), seed)


def sampling(max_new_tokens: int, temperature: float, top_p: float) -> dict[str, Any]:
    """Arguments of `generate`."""
    if temperature == 0:
        return {"max_new_tokens": max_new_tokens, "do_sample": False}
    return {"max_new_tokens": max_new_tokens, "do_sample": True, "temperature": temperature, "top_p": top_p}


def chat_inputs(tokenizer: Any, messages: list[dict[str, str]]) -> Any:
    """`messages` in the tokenizer's chat template, ready for the answer.

    Raises:
        ValueError: the tokenizer has no chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the model's tokenizer has no chat template; use `hybridize generate --raw`")
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


def stream(model: Any, tokenizer: Any, inputs: Any, options: dict[str, Any], seed: int) -> str:
    """Generate, printing as tokens come; gives the new text."""
    import torch
    from transformers import TextStreamer

    torch.manual_seed(seed)
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items() if name != "token_type_ids"}
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    with torch.inference_mode():
        output = model.generate(**inputs, **options, streamer=streamer, pad_token_id=tokenizer.pad_token_id)
    new = output[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True)
