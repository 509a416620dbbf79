"""What fewer bits cost, a smaller version of `minillm bench quality`: the claims of chapter 16, asserted."""

from __future__ import annotations

import pytest

from minillm.bench import quality

EIGHT = ("int8", "fp8", "W8A8", "outliers: original", "outliers: W8A8", "outliers: smoothquant", "outliers: llm_int8")
THREE = ("int3 rtn 64", "int3 gptq 64", "int3 awq 64")


@pytest.fixture(scope="module")
def outliers():
    return quality.run(quality.Workload(documents=4, asked=2, seeds=1, calibration_documents=16, only=EIGHT), "cpu")[
        "figures"
    ]


@pytest.fixture(scope="module")
def three_bits():
    return quality.run(quality.Workload(documents=16, asked=0, seeds=3, calibration_documents=32, only=THREE), "cpu")[
        "figures"
    ]


@pytest.mark.parametrize("name", ["int8", "fp8", "W8A8"])
def test_eight_bits_cost_less_than_half_a_percent(outliers, name):
    assert abs(outliers[name]["increase"]) < 0.005


def test_the_outlier_version_says_the_same(outliers):
    assert outliers["outliers: original"]["perplexities"] == pytest.approx(
        outliers["original"]["perplexities"], rel=1e-4
    )
    assert outliers["outliers: original"]["right"] == outliers["original"]["right"]


def test_smoothquant_rescues_the_outlier_version(outliers):
    assert outliers["outliers: W8A8"]["increase"] > 50  # it babbles
    assert max(outliers["outliers: W8A8"]["right"].values()) == 0
    for name in ("smoothquant", "llm_int8"):
        assert abs(outliers[f"outliers: {name}"]["increase"]) < 0.005
        assert outliers[f"outliers: {name}"]["right"] == outliers["original"]["right"]
    assert outliers["outliers: smoothquant static"]["increase"] < 0.02 < outliers["outliers: W8A8 static"]["increase"]


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_calibration_beats_rounding_at_three_bits_on_every_seed(three_bits, method):
    plain, calibrated = three_bits["int3 rtn 64"], three_bits[f"int3 {method} 64"]
    assert plain["bits_per_weight"] == calibrated["bits_per_weight"]
    assert len(plain["increases"]) == len(calibrated["increases"]) == 3
    assert max(calibrated["increases"]) < min(plain["increases"])  # by more than the spread over seeds


def test_a_workload_that_makes_no_sense_is_named():
    with pytest.raises(ValueError, match="seeds=9 is not allowed"):
        quality.Workload(seeds=9)
    with pytest.raises(ValueError, match="no candidate begins with int9"):
        _ = quality.Workload(only=("int9",)).candidates


def test_calibration_never_reads_what_is_measured():
    assert not set(quality.CALIBRATION_SEEDS) & set(quality.FRESH_SEEDS)
    assert len(quality.CALIBRATION_SEEDS) == len(quality.FRESH_SEEDS)


def test_the_tables_have_a_row_for_every_candidate(outliers, three_bits):
    for figures, expected in ((outliers, 2), (three_bits, 1)):  # without questions there are no answers to show
        found = quality.tables({"workload": {"model": "tinyworld"}, "figures": figures})
        assert [table.row_count for table in found] == [len(figures)] * expected
    assert quality.share(0.0025) == "+0.25%" and quality.share(290.0) == "×291"
