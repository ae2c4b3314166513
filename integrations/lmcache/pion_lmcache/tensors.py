"""Arrays of rows by reference: numpy (ml_dtypes' bfloat16 too) and torch, as bytes and a format."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pion_server.client import Fmt

_FORMATS: dict[np.dtype[Any], Fmt] = {
    np.dtype(np.float32): "FP32",
    np.dtype(np.float16): "FP16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
}


def array_of(tensor: Any) -> npt.NDArray[Any]:
    """A numpy array over the memory of `tensor`, which is one already or a torch tensor on CPU.

    A tensor elsewhere is copied to the CPU first. Raises TypeError on anything else.
    """
    if isinstance(tensor, np.ndarray):
        return tensor
    if not hasattr(tensor, "detach"):
        raise TypeError(f"expected a numpy array or a torch tensor, got {type(tensor).__name__}")
    import torch

    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:  # numpy has no such dtype of its own
        array: npt.NDArray[Any] = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return array
    return np.asarray(tensor.numpy())


def format_of(array: npt.NDArray[Any]) -> Fmt:
    """How the array's values look on the wire. Raises TypeError where they are not floats that the
    wire knows."""
    fmt = _FORMATS.get(array.dtype)
    if fmt is None:
        raise TypeError(f"rows are float32, float16 or bfloat16, got {array.dtype}")
    return fmt
