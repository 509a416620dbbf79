"""The pictures of chapters 15 and 16 say in words what they show."""

from __future__ import annotations

import numpy as np

from minillm.book import bits_figures, calibration_figures, format_figures
from minillm.book.prediction import Prediction


def test_from_weights_to_codes_and_back():
    alt = bits_figures.codes_map().alt
    assert "3, -1, 0, -5, 1, 5, -2, 7" in alt and "16 bytes" in alt and "4 bytes, and 2 bytes for the scale" in alt


def test_grids_tell_codes_and_idle_marks():
    weights = [0.1, 0.4, 0.7]
    assert "Codes: [1, 4, 7]" in bits_figures.grid(weights, np.arange(-7, 8) / 10, [1, 4, 7]).alt
    grids = {"symmetric": (np.arange(-3, 4) * 0.7 / 3, 0.25), "shifted": (np.arange(8) / 10, 0.1)}
    alt = bits_figures.two_grids(weights, grids).alt
    assert "symmetric, 3 of 7 marks lie where no weight is, relative error 0.25" in alt


def test_an_outlier_is_left_out_of_the_share_that_became_zero():
    codes = np.array([[0, 0, 7, 0], [1, 2, 3, 0]])
    panels = {"per tensor": (codes, 4.5, 0.5), "per row": (codes, 5.0, 0.4)}
    alt = bits_figures.shared_scales(panels, at=(0, 2), outlier=30.0).alt
    assert "one weight of 30" in alt and "per tensor: 57% of the other weights became zero, relative error 0.50" in alt


def test_error_and_loss_tell_the_groups_of_64():
    keys = [(bits, group) for bits in (2, 8) for group in (None, 64, 32)]
    errors = {(bits, group): (1 / 2**bits, bits + 0.25) for bits, group in keys}
    losses = {(bits, group): 8.0 - bits for bits, group in keys}
    guess = Prediction("Fewest bits", 6, "bits", mine=False)
    alt = bits_figures.error_and_loss(errors, losses, dict.fromkeys(keys, 0.1), {8: 0.004}, guess).alt
    assert "from 0.25 at 2 bits to 0.0039 at 8" in alt and "0.0000 nats at 8 bits, 6.0000 nats at 2 bits" in alt


def test_formats_bytes_gains_and_layouts():
    assert "fp8 and fp4 crowd around 0" in bits_figures.marks({"int4": np.arange(-7, 8) / 7, "fp4": [-1.0, 0, 1]}).alt
    assert "NVFP4: a box of 8 bits over each 16" in format_figures.levels().alt
    assert "2 codes in 1 bytes, highest bit first: 00111001" in format_figures.packed_bytes([0x39], [9, 3]).alt
    gains, inks = {"int4": [3.76, 1.0, 1.0], "int8": [2.0, 1.2, 1.0]}, {"int4": "ours", "int8": "other"}
    alt = format_figures.gain_limits([1, 160, 166], gains, 153.0, inks).alt
    assert "int4 3.76 times, int8 2.00 times), then falling to 1 at 166 rows" in alt, "not where the ridge is"
    assert "AWQ [(0, 0), (2, 0)]" in format_figures.layouts({"AWQ": ([(0, 0), (2, 0)], "outputs 8 to 15")}).alt


def test_the_methods_of_calibration_are_told_in_words():
    alt = calibration_figures.calibration_map().alt
    for told in ("SmoothQuant divides the large input", "GPTQ rounds", "AWQ gives", "A rotation mixes"):
        assert told in alt
    alt = calibration_figures.error_shares({"of the output": np.linspace(0.05, 1, 20)}, "down").alt
    assert "a tenth of them holds 15% of the output" in alt
    alt = calibration_figures.channels({"before": [1, 1, 2], "after": [1, 1, 512]}, [2], 0.1).alt
    assert "after: largest 512, 512 times the median" in alt


def test_two_weights_and_their_marks():
    def cost(point, correlation, w):
        d1, d2 = w[0] - point[0], w[1] - point[1]
        return d1 * d1 + 2 * correlation * d1 * d2 + d2 * d2

    case = {"w": (0.4, 0.4), "nearest": (0, 0), "passed_on": (0, 1), "second": 0.76, "best": (0, 1)}
    alt = calibration_figures.level_sets([case, case], cost, [(0, 0), (0, 1)], 0.9).alt
    assert "nearest costs 0.608, passing on 0.088, the best 0.088" in alt


def test_the_results_of_calibration_carry_their_numbers():
    alt = calibration_figures.scaled_columns([1, 2], [(4, 10, 8), (1, 11, 6)]).alt
    assert "falls from 40% to 10%" in alt and "from 60% to 100%" in alt and "least near 2" in alt
    assert (
        "rotated: largest 2, rms 2" in calibration_figures.one_token({"as it is": [4, 0, 0, 0], "rotated": [2] * 4}).alt
    )
    assert "rtn - gptq 0.0130 ± 0.0068" in calibration_figures.differences([("rtn - gptq", "gptq", 0.013, 0.0068)]).alt
    panels = {"whole rows": {"rtn": [(2.6, 8.8), (3.5, 0.03)]}, "groups of 64": {"gptq": [(2.8, 0.2)]}}
    assert "rtn, whole rows: 2.60 bits +880.00%, 3.50 bits +3.00%" in calibration_figures.by_bits(panels).alt
