"""What chapter 14 measures with: which calls are timed, what is kept of them, and what is found in a list."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from minillm.book import one_product, step_trials
from minillm.kernels.native_build import NO_UNIT


@pytest.mark.parametrize(
    "operations, layer",
    [
        ("e abc abc abc n", "abc"),
        ("e abc abc abc abc abc n h", "abc"),  # five layers: two do not come three times
        ("aaab aaab aaab", "aaab"),  # not "a"
        ("abc abd abc", None),
        ("abc abc", None),
        ("", None),
    ],
)
def test_a_layer_is_the_longest_stretch_that_comes_three_times_in_a_row(operations, layer):
    found = step_trials.layer_of(list(operations.replace(" ", "")))
    assert (found and "".join(found)) == layer


def test_microseconds_are_those_of_the_least_disturbed_rounds(monkeypatch):
    calls, clock = [], iter([0.0, 0.8, 1.0, 1.2, 2.0, 2.6, 3.0, 3.9, 4.0, 4.9, 5.0, 5.9, 6.0, 6.9])
    monkeypatch.setattr(step_trials.time, "perf_counter", lambda: next(clock))
    took = step_trials.microseconds(lambda *inputs: calls.append(inputs), ("x", "y"), rounds=4)
    assert took == pytest.approx(1e6 * 0.2 / 4)
    assert calls == [("x", "y")] * 28


def test_launches_are_recorded_and_still_happen():
    engine = SimpleNamespace(runner=SimpleNamespace(launch=lambda output: len(output.rows)))
    step = lambda names: SimpleNamespace(rows=[SimpleNamespace(request_id=name) for name in names])
    launched = step_trials.record_launches(engine)
    assert [engine.runner.launch(step(names)) for names in ("A", "AB", "")] == [1, 2, 0]
    assert launched == ["A", "AB", ""]


def test_the_profile_of_the_least_disturbed_step_is_kept(monkeypatch):
    spent, happened = iter([[5, 4], [2, 3], [4, 4]]), []

    class Profile:
        def __init__(self, activities):
            self.times = next(spent)

        def __enter__(self):
            happened.append("profile")
            return self

        def __exit__(self, *error):
            happened.append("end")

        def key_averages(self):
            return [SimpleNamespace(self_cpu_time_total=time) for time in self.times]

    monkeypatch.setattr(step_trials, "profile", Profile)
    served = SimpleNamespace(
        rung=SimpleNamespace(off=()),
        begin=lambda steps: happened.append(f"begin {steps}"),
        engine=SimpleNamespace(step=lambda: happened.append("step")),
    )
    assert step_trials.profiled(served).times == [2, 3]
    assert happened == ["begin 3", *["profile", "step", "end"] * 3], "the prompt is computed outside"


def test_without_a_matrix_unit_nothing_is_compiled_or_timed(monkeypatch):
    monkeypatch.setattr(one_product, "has_unit", lambda: False)
    monkeypatch.setattr(one_product, "compiled", lambda *flags: pytest.fail("compiled"))
    assert one_product.unit_times([1, 16]) is None


@pytest.fixture
def threads():
    """Two, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


def test_unit_times_are_of_one_product_with_other_weights_where_rows_are_few(threads, monkeypatch):
    built, timed, met = [], {}, {}

    def best_of(candidates, repeats):
        assert torch.get_num_threads() == 1 and repeats > 1
        for key, run in candidates.items():
            met[key] = []
            timed["now"] = key
            run()
        return {key: 6.0 * (key[1] + 1) for key in candidates}

    class Library:
        def __init__(self, flags):
            self.flags = flags

        def linear(self, x, weights, bias, out, rows, out_features, in_features):
            name, width = timed["now"]
            assert (rows, out_features, in_features) == (width, 8, 4) and bias is None
            assert (name == "vector instructions") == (set(NO_UNIT) <= set(self.flags))
            met[timed["now"]].append(weights)

    def compiled(*flags):
        built.append(flags)
        return Library(flags)

    def torch_linear(x, weight):
        met[timed["now"]].append(weight.data_ptr())
        return x @ weight.T

    monkeypatch.setattr(one_product, "has_unit", lambda: True)
    monkeypatch.setattr(one_product, "compiled", compiled)
    monkeypatch.setattr(one_product, "best_of", best_of)
    monkeypatch.setattr(one_product.native, "pack", lambda weight: weight)
    monkeypatch.setattr(one_product.huge_pages, "copy", torch.clone)
    monkeypatch.setattr(torch.nn.functional, "linear", torch_linear)
    times = one_product.unit_times([1, 16, 17], out=8, inputs=4)
    assert set(times) == {
        (name, rows) for name in ("matrix unit", "vector instructions", "PyTorch") for rows in (1, 16, 17)
    }
    for (name, rows), weights in met.items():
        products = 24 if rows <= 16 else 2
        assert len(weights) == len(set(weights)) == products, "every product reads other weights"
        assert times[name, rows] == 6.0 * (rows + 1) / products
    assert len(built) == 2 and all("-DBF16" in flags for flags in built)
    assert torch.get_num_threads() == threads
