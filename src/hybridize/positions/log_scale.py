"""Factors on q of full softmax groups, by the query's position (DESIGN D7). t counts from 0.

They depend on nothing but the position and declared lengths: a factor that knew the prompt's length would make decoding differ
from prefill.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_position(position: Tensor, base: float) -> Tensor:
    """ln(t + base) / ln base: 1 at t = 0, growing for ever (HyPE, arXiv 2601.22156, Eq. 11). Float32."""
    return (position.double() + base).log().div(math.log(base)).float()


def log_length(position: Tensor, length: float) -> Tensor:
    """max(1, ln(t + 1) / ln length): 1 up to the length the model was trained at. Float32."""
    return (position.double() + 1).log().div(math.log(length)).clamp(min=1).float()


def constant(position: Tensor, value: float) -> Tensor:
    """The same at every position. Float32."""
    return torch.full(position.shape, value, device=position.device)
