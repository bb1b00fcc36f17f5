"""Functions that draw random numbers from numpy: each runs unchanged, between two graphs.

Dynamo would draw other numbers, from torch's generator, and trace what numpy makes of them as operators on tensors.
SpecAugment masks time and features so (wav2vec2 and its kin, Whisper). A setting lets numpy draw its own
(`dynamo_settings`): Dynamo breaks the graph where a function does. It would trace the rest of such a function anew for
every number drawn; so the function is left alone whole.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np

from remat._torch.dynamo import not_begun_at


def leave_alone(function: Any) -> None:
    """Keep a trace from following `function` if it draws numpy's random numbers, so that it runs untraced."""
    if isinstance(function, types.FunctionType) and _draws(function):
        not_begun_at(function, nor_within=True)


def _draws(function: types.FunctionType) -> bool:
    names = function.__code__.co_names
    known = [function.__globals__.get(name) for name in names]
    return any(each is np.random for each in known) or (any(each is np for each in known) and "random" in names)
