"""What goes to a device in one copy arrives as it was; what comes back is read in order."""

from __future__ import annotations

import numpy as np
import torch

from minillm.sampling.noise import derive_seed
from minillm.speculative.rejection import derive
from minillm.staging import ALIGNMENT, Download, fill, layout, upload, views

COLUMNS = [
    np.arange(5),
    np.array([True, False, True]),
    np.array([], np.int64),
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.array([0.5, -2.0], np.float32),
    np.arange(12).reshape(3, 4)[:, ::2],  # not in one piece
]


def test_columns_side_by_side_are_aligned_and_come_out_as_they_went_in():
    starts, num_bytes = layout(COLUMNS)
    assert all(start % ALIGNMENT == 0 for start in starts) and starts == sorted(starts)
    host = torch.full((num_bytes,), 255, dtype=torch.uint8)
    fill(host, COLUMNS, starts)
    for tensor, column in zip(views(host.clone(), COLUMNS, starts), COLUMNS, strict=True):
        assert tensor.shape == column.shape and tensor.numpy().dtype == column.dtype
        np.testing.assert_array_equal(tensor.numpy(), column)


def test_nothing_but_empty_columns_is_no_error():
    starts, num_bytes = layout([np.array([], np.int64)])
    assert views(torch.empty(num_bytes, dtype=torch.uint8), [np.array([], np.int64)], starts)[0].shape == (0,)


def test_lists_are_whole_numbers_and_a_download_keeps_its_order():
    first, second = upload([3, 1], [], device="cpu")
    assert first.tolist() == [3, 1] and first.dtype == second.dtype == torch.int64 and second.shape == (0,)
    assert [x.tolist() for x in Download(second, first).wait()] == [[], [3, 1]]


def test_a_seed_is_derived_on_the_device_as_it_is_on_the_host():
    seeds = [0, 1, 5, 2**62, 2**63 - 1]
    for stream in (0, 7, 2**32, 2**32 + 1):
        assert derive(torch.tensor(seeds), stream).tolist() == [derive_seed(seed, stream) for seed in seeds]
