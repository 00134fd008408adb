"""Pictures show the numbers that they are given."""

import math
import re
import warnings
from pathlib import Path

import numpy as np
import pytest

from chargpt.analysis import plots
from chargpt.analysis.compare import Row
from chargpt.analysis.ladder import Ladder
from chargpt.analysis.predictions import Group
from chargpt.inference.evaluation import BaselineLoss


def test_ladder_bars_are_bits_per_character_in_rung_order() -> None:
    nats = {"uniform": [4.0], "xz -9": [1.5]}
    trained = {"bigram (trained)": [2.0, 2.2], "one head, scaled": [1.0, 1.2]}
    rows = [
        Row(name, BaselineLoss(each, np.zeros((2, 0))), run="a" if name in trained else None)
        for name, losses in (nats | trained).items()
        for each in losses
    ]
    ladder = Ladder(title="a text", rows=rows)
    figure = plots.ladder(ladder)
    (axes,) = figure.axes
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == pytest.approx([nats / math.log(2) for nats in (4.0, 1.5, 2.1, 1.1)])
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["uniform", "xz -9", "bigram (trained)", "one head, scaled"]
    (errors,) = axes.collections
    reach = [float(np.ptp(segment[:, 0])) / 2 for segment in errors.get_segments()]
    margin = ladder.groups["bigram (trained)"].loss.margin
    assert margin is not None
    assert reach == pytest.approx([0, 0, margin / math.log(2), margin / math.log(2)])


def test_attention_maps_show_the_weights_with_characters_on_both_axes() -> None:
    weights = np.random.default_rng(0).random((3, 4, 4)).astype(np.float32)
    figure = plots.attention(weights, "a\n b", ["one", "two", "three"])
    assert [axes.get_title() for axes in figure.axes] == ["one", "two", "three"]
    for axes, head in zip(figure.axes, weights, strict=True):
        np.testing.assert_array_equal(axes.images[0].get_array(), head)
        assert [text.get_text() for text in axes.texts] == [c for c in "a⏎␣b" for _ in range(2)]


def test_glyphs_missing_from_the_font_cause_no_warning(tmp_path: Path) -> None:
    weights = np.eye(4, dtype=np.float32)[None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plots.save(plots.attention(weights, "床前明月", ["one"]), tmp_path / "a.png")
        page = plots.inline(plots.attention(weights, "床前明月", ["one"]), "heads")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in page


def test_calibration_plots_accuracy_against_confidence() -> None:
    groups = [Group("low", 10, 0.2, 1.0, 0.3), Group("high", 30, 0.9, 0.1, 0.8)]
    line = plots.calibration(groups).axes[0].lines[1]
    np.testing.assert_allclose(line.get_xydata(), [[0.3, 0.2], [0.8, 0.9]])


def test_loss_curves_and_baselines_are_plotted_at_their_values() -> None:
    curves = {"$^$": [(0, 4.0), (10, 2.0)], "_mine": [(1, 2.0), (2, 1.0)]}
    figure = plots.loss_curves(curves, {"6-gram": 2.49, "bigram": 2.5}, "$_$")
    (axes,) = figure.axes
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [[0, 4], [10, 2]])
    assert [line.get_ydata()[0] for line in axes.lines[2:]] == [2.49, 2.5]
    in_legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert in_legend == [r"\$^\$: 2.000", " _mine: 1.000"]
    figure.draw_without_rendering()  # dollar signs in a name are not parsed as a formula
    assert [text.get_text() for text in axes.texts] == ["6-gram 2.490", "bigram 2.500"]
    lower, upper = (text.get_window_extent() for text in axes.texts)
    assert lower.y1 <= upper.y0
    assert min(lower.x0, upper.x0) >= axes.get_window_extent().x1  # none lies on a curve


def test_the_speed_curve_has_a_point_for_each_write_of_complete_metrics() -> None:
    # ten steps a second, written every ten steps
    same = {"loss": 1.0, "grad_norm": 1.0, "lr_factor": 1.0}
    records = [{"step": s, **same, "seconds": -(-s // 10)} for s in range(1, 101)]
    figure = plots.optimization_curves([*records, {"step": 101, "grad_norm": 1.0}], 64)
    np.testing.assert_allclose(figure.axes[2].lines[0].get_ydata(), [640] * 9)
    assert figure.axes[1].lines[0].get_xdata()[-1] == 100


def test_thinning_returns_the_means_of_equal_parts() -> None:
    points = [(step, float(step)) for step in range(1, 101)]
    assert plots.smoothed(points)[:2] == [(3, 2.0), (6, 5.0)]
    assert len(plots.smoothed(points)) <= plots.MAX_POINTS
    assert plots.smoothed(points)[-1] == (100, 98.5)  # of four points: one alone would be noise
    assert plots.smoothed([]) == []
    assert plots.smoothed(points[:5]) == points[:5]


def test_inline_svg_uses_the_page_colour_and_unique_ids() -> None:
    first, second = (
        plots.inline(plots.loss_curves({"a": [(0, 1.0), (1, 0.5)]}, {}, ""), name)
        for name in ("one", "two")
    )
    assert "#000000" not in first
    assert "currentColor" in first
    assert "<metadata" not in first
    ids = [set(re.findall(r' id="([^"]*)"', svg)) for svg in (first, second)]
    assert ids[0]
    assert not ids[0] & ids[1]
    for svg, own in zip((first, second), ids, strict=True):
        used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
        assert used <= own
