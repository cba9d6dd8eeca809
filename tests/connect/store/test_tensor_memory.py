"""torch's tensors as values, and back."""

import ctypes

import pytest
import torch

from cache.named.tensor_format import DTYPES, HEAD_BYTES
from connect.store.tensor_memory import tensor_at, tensor_in, value_of, values_of_shards

WHOLE = torch.arange(24.0).reshape(4, 6)


def through_bytes(value):
    into = bytearray(value.nbytes)
    value.copy_to(ctypes.addressof(ctypes.c_char.from_buffer(into)), 0, value.nbytes)
    return tensor_in(into)


@pytest.mark.parametrize(
    "tensor",
    [
        *[torch.arange(5).to(getattr(torch, name)) for name in DTYPES],
        *(WHOLE.t(), WHOLE[1:3, ::2], WHOLE.expand(2, 4, 6), torch.tensor(5), torch.zeros(0, 3)),
        torch.view_as_complex(torch.ones(1, 2)).conj().imag,  # its sign is a mark and not in its bytes
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_a_tensor_comes_back(tensor):
    found = through_bytes(value_of(tensor))
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert found.float().tolist() == tensor.float().tolist()


def test_parts_lie_one_after_the_other():
    parts = [through_bytes(value) for value in values_of_shards(WHOLE, 3, 1)]
    assert torch.equal(torch.cat(parts, 1), WHOLE)


def test_memory_that_holds_no_tensor_is_none():
    memory = ctypes.create_string_buffer(HEAD_BYTES + 96)
    at = ctypes.addressof(memory)
    assert tensor_at(at, HEAD_BYTES + 96) is None
    value_of(WHOLE).copy_to(at, 0, HEAD_BYTES + 96)
    assert tensor_at(at, HEAD_BYTES + 96).data_ptr() == at + HEAD_BYTES
    assert (tensor_at(at, HEAD_BYTES + 95), tensor_at(at, 10), tensor_at(0, HEAD_BYTES + 96)) == (None, None, None)
