"""Records of samples: what comes back, what is refused, and what damage does."""

from __future__ import annotations

import pickle
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fastloop.feeds.cache import records
from fastloop.feeds.cache.records import CannotKeep, pack, unpack

KEY = b"k" * 16


def back(sample: Any, key: bytes = KEY) -> Any:
    found = unpack(key, memoryview(pack(key, sample)))
    assert found is not None
    return found[0]


def picture(mode: str = "RGB", size: tuple[int, int] = (7, 5)) -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(noise).convert(mode)


@pytest.mark.parametrize(
    "sample",
    [
        *(None, True, 3, -(2**70), 0.1, -0.0, float("inf"), "ünï\ud800", b"\0\xff", (), [], {}),
        (1, [2.5, {"a": b"x", 7: (None,)}], "end"),
    ],
)
def test_plain_values_come_back_as_they_were(sample: Any) -> None:
    found = back(sample)
    assert found == sample and type(found) is type(sample) and repr(found) == repr(sample)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float32", "complex128", "<U3", ">i4"])
def test_arrays_come_back_bit_for_bit_and_can_be_written_to(dtype: str) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    found, nothing, zero = back((array, array[:0], array[0, 0, 0]))
    assert found.dtype == array.dtype and found.shape == array.shape and found.tobytes() == array.tobytes()
    assert nothing.shape == (0, 3, 4) and zero == array[0, 0, 0] and type(zero) is type(array[0, 0, 0])
    found[0] = found[1]
    assert np.array_equal(found[0], array[1])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64])
def test_tensors_come_back_bit_for_bit_and_can_be_written_to(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    found, nothing, one = back([tensor, tensor[:0], tensor[1, 1].clone()])
    assert torch.equal(found, tensor) and found.dtype == dtype and found.is_contiguous()
    assert nothing.shape == (0, 4) and one.shape == () and one == tensor[1, 1]
    found.zero_()
    assert not found.any() and tensor.any()


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "CMYK", "1", "F", "I"])
def test_pictures_come_back_pixel_for_pixel_with_what_they_know(mode: str) -> None:
    image = picture(mode)
    image.info = {"exif": b"II*", "dpi": (72.0, 72.0)}
    found = back({"image": image, "label": 3})["image"]
    assert type(found) is Image.Image and found.mode == mode and found.size == (7, 5)
    assert found.tobytes() == image.tobytes() and found.info == image.info
    found.putpixel((0, 0), found.getpixel((1, 1)))


Pair = namedtuple("Pair", "a b")


class Text(str):
    pass


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        (object(), "a builtins.object"),
        (Pair(1, 2), "Pair"),
        ([Text("x")], "Text"),
        ({1.5: 2}, "keys are neither"),
        ({True: 2}, "keys are neither"),
        (np.array([object()]), "an array of object"),
        (np.zeros((3, 4)).T, "not contiguous"),
        (torch.zeros(3, 4).T, "not contiguous"),
        (torch.ones(3, dtype=torch.complex64).conj(), "resolve_conj"),
        (torch.zeros(2, requires_grad=True), "requires gradients"),
        (torch.nn.Parameter(torch.zeros(2)), "Parameter"),
        (picture().convert("P"), "mode P"),
        ({1, 2}, "a builtins.set"),
    ],
)
def test_what_would_not_come_back_as_it_was_is_refused(sample: Any, said: str) -> None:
    with pytest.raises(CannotKeep, match=said):
        pack(KEY, (1, sample))


def test_every_damaged_byte_is_noticed() -> None:
    whole = pack(KEY, (np.arange(5, dtype=np.uint8), "label"))
    assert unpack(KEY, memoryview(whole)) is not None
    for place in range(len(whole)):
        broken = bytearray(whole)
        broken[place] ^= 0x40
        assert unpack(KEY, memoryview(broken)) is None, f"byte {place}"
    for length in range(len(whole)):
        assert unpack(KEY, memoryview(whole)[:length]) is None, f"cut to {length}"
    assert unpack(KEY, memoryview(whole + b"\0")) is None
    assert unpack(b"j" * 16, memoryview(whole)) is None, "another sample's"


def test_a_planted_pickle_is_not_loaded() -> None:
    """K5."""

    class Bomb:
        def __reduce__(self) -> Any:
            return pytest.fail, ("it was loaded",)

    payload = pickle.dumps(Bomb())
    assert unpack(KEY, memoryview(payload)) is None
    assert back(payload) == payload, "as bytes it is a sample like others"
    assert not {"pickle", "marshal", "shelve"} & set(vars(records))
