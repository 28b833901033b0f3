"""The commands `width`, `startup` and `transfers`: their logic with invented measurements, and small real runs."""

import json
import sys
from itertools import combinations

import pytest
from rich.console import Console

from keras_sn.benchmarks import __main__ as command_line
from keras_sn.benchmarks import reports, speed, startup, transfers, width
from keras_sn.benchmarks.measure import Configuration

TINY_RESNET = json.dumps({"blocks": (1,), "image_size": 16, "width": 4, "classes": 4})
KEYWORDS = "keywords arguments only when eager execution is enabled."
"""Why `keras-remat` cannot train, in TensorFlow's words."""


def cells(table):
    """The rows of a table, without what is empty at their ends."""
    rows = zip(*(column.cells for column in table.columns), strict=True)
    return [" | ".join(row).rstrip(" |") for row in rows]


def started(argv, capsys):
    """A command's exit status, and what it printed, in one line without the table's borders."""
    status = command_line.main(argv)
    return status, " ".join(capsys.readouterr().out.replace("│", " ").split())


# --- width


def limited(limits):
    """A `run` under which an engine trains up to a batch, at 100 samples a second or less; None cannot be measured at all."""

    def run(configuration):
        limit = limits[configuration.engine]
        row = configuration.row() | {"fits": None, "reason": "Traceback\nValueError: broken"}
        if limit is None:
            return row
        speed = 100 if configuration.batch_size <= 10 else 50
        seconds = configuration.batch_size / speed
        return row | {"fits": configuration.batch_size <= limit, "reason": "", "seconds_per_step": seconds}

    return run


def search(limits, **changes):
    settings = {"memory_bytes": 2**30, "steps": 2, "tolerance": 0.0, "largest": 1000} | changes
    return width.WidthSearch(run=limited(limits), **settings)


def test_width_starts_from_the_widest_before():
    limits = {"keras-graph": 10, "auto": 77, "recompute": 0}
    row = search(limits).compare("resnet", tuple(limits), 4)
    assert row["widest"] == limits
    firsts = {engine: next(p["batch_size"] for p in row["points"] if p["engine"] == engine) for engine in limits}
    assert firsts == {"keras-graph": 4, "auto": 10, "recompute": 77}
    assert {point["memory_bytes"] for point in row["points"]} == {2**30}


def test_width_stops_within_the_tolerance_and_at_the_largest():
    batch, points = search({"auto": 77}, tolerance=0.1).widest("resnet", "auto", 4)
    assert 77 / 1.1 <= batch < 77
    assert len(points) < len(search({"auto": 77}).widest("resnet", "auto", 4)[1])
    assert search({"auto": 77}, largest=50).widest("resnet", "auto", 4)[0] == 50


def test_width_goes_on_after_an_engine_that_cannot():
    limits = {"keras-graph": 10, "keras-remat": None, "auto": 77}
    row = search(limits).compare("resnet", tuple(limits), 4)
    assert row["widest"] == limits
    assert cells(width.table([row], tuple(limits), "title")) == [
        "resnet | keras-graph | 10 | 1.0 | 100 | 1.00",
        "resnet | keras-remat | failed",
        "resnet | auto | 77 | 7.7 | 50 | 0.50",
    ]


def test_width_without_plain_keras_has_no_ratios():
    limits = {"keras-graph": None, "auto": 7}
    row = search(limits).compare("resnet", tuple(limits), 4)
    assert cells(width.table([row], tuple(limits), "title"))[1] == "resnet | auto | 7 |  | 100"


def test_width_for_real(tmp_path, capsys):
    options = ["--arguments", TINY_RESNET, "--memory", "1GiB", "--first", "2", "--largest", "2", "--steps", "2"]
    engines = ["keras-recompute-grad", "keras-remat"]
    argv = ["width", "--networks", "resnet", *options, "--engines", *engines, "--out", str(tmp_path)]
    status, shown = started(argv, capsys)
    report = json.loads((tmp_path / "width.json").read_text())
    (row,) = report["rows"]
    assert row["widest"] == {"keras-recompute-grad": 2, "keras-remat": None}
    trained, failed = row["points"]
    assert len(trained["losses"]) == 2
    assert trained["memory_bytes"] == report["memory_bytes"] == 2**30
    assert 0 < trained["peak_bytes"] < 2**30
    assert failed["reason"].endswith(KEYWORDS)
    assert status == 1
    assert "keras-remat failed: Exception encountered" in shown
    assert (tmp_path / "width.png").stat().st_size > 5_000
    assert "width.png" in shown.replace(" ", "")


# --- startup


def test_startup_takes_turns_and_medians():
    asked = []

    def run(configuration):
        turn = asked.count(configuration.engine)
        asked.append(configuration.engine)
        row = {"engine": configuration.engine, "fits": True, "reason": "", "seconds_per_step": 0.5}
        if seconds[configuration.engine][turn] is None:
            return row | {"fits": False, "reason": "Traceback\nout of memory"}
        return row | {"first_step_seconds": seconds[configuration.engine][turn]}

    seconds = {"keras-graph": (4.0, 1.0, 2.0), "auto": (7.0, 9.0, 3.0), "recompute": (1.0, 1.0, None)}
    engines = list(seconds)
    configurations = [Configuration(engine=engine, network="resnet", batch_size=1) for engine in engines]
    rows = startup.measure_starts(configurations, 3, run)
    assert asked == 3 * engines
    assert [row.get("rounds") for row in rows] == [[4.0, 1.0, 2.0], [7.0, 9.0, 3.0], None]
    expected = ["keras-graph | 2.0 | 1.00 | 0.5", "auto | 7.0 | 3.50 | 0.5", "recompute | does not fit"]
    assert cells(startup.table(rows, "title")) == expected
    assert cells(startup.table(rows[::-1], "title"))[1] == "auto | 7.0 |  | 0.5", "no ratio to what failed"


def test_startup_for_real(tmp_path, capsys):
    options = ["--network", "resnet", "--arguments", TINY_RESNET, "--batch", "2", "--engines", "keras-graph", "recompute"]
    status, shown = started(["startup", *options, "--out", str(tmp_path)], capsys)
    rows = json.loads((tmp_path / "startup.json").read_text())["rows"]
    assert status == 0, rows
    assert [row["engine"] for row in rows] == ["keras-graph", "recompute"]
    for row in rows:
        assert row["rounds"] == [row["first_step_seconds"]]
        assert row["first_step_seconds"] > row["seconds_per_step"] > 0
    assert f"{rows[1]['first_step_seconds'] / rows[0]['first_step_seconds']:.2f}" in shown
    assert (tmp_path / "startup.png").stat().st_size > 5_000
    assert "startup.png" in shown.replace(" ", "")


# --- transfers


def test_transfers_are_told_of_one_step():
    trace = {
        "busy_seconds": 0.04,
        "copy_seconds": {"to_host": 0.5, "to_device": 0.0},
        "copied_bytes": {"to_host": 4 * 2**30, "to_device": 0},
        "hidden_seconds": {"to_host": 0.375, "to_device": 0.0},
    }
    rows = [
        {"engine": "offload-xla", "fits": True, "reason": "", "trace": trace, "traced_steps": 4},
        {"engine": "recompute-xla", "fits": True, "reason": ""},
        {"engine": "auto-xla", "fits": False, "reason": "Traceback\nout of memory"},
    ]
    assert cells(transfers.table(rows, "title")) == [
        "offload-xla | 10.0 | to the host | 1024 | 125.00 | 8.0 | 75%",
        " |  | back | 0 | 0.00",
        "recompute-xla |  | no GPU was traced",
        "auto-xla |  | out of memory",
    ]


# --- plots


def figures_of(module, monkeypatch):
    """A list that the figures of a module come into."""
    figures, new_figure = [], reports.new_figure
    monkeypatch.setattr(module, "new_figure", lambda *arguments: figures.append(new_figure(*arguments)) or figures[-1])
    return figures


def test_bars_say_what_they_are(tmp_path, monkeypatch):
    figures = figures_of(reports, monkeypatch)
    panels = {"resnet": {"keras-graph": 64, "keras-remat": None, "auto": 130}, "vit": {"keras-graph": 0, "auto": 12.34}}
    reports.plot_bars(panels, "title", "samples", tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 5_000
    resnet, vit = figures[0].axes
    assert (resnet.get_title("left"), vit.get_title("left"), vit.get_xlabel()) == ("resnet", "vit", "samples")
    assert [bar.get_width() for bar in resnet.patches] == [64, 0, 130]
    assert [text.get_text() for axes in (resnet, vit) for text in axes.texts] == ["64", "not measured", "130", "0", "12.3"]
    assert [text.get_text() for text in resnet.get_yticklabels()] == ["keras-graph", "keras-remat", "auto"]
    assert resnet.get_ylim()[0] > resnet.get_ylim()[1], "the first engine is on top"
    colors = [bar.get_facecolor() for bar in resnet.patches]
    assert colors[0] == colors[1] != colors[2], "ours stand out"
    assert resnet.get_xlim() == vit.get_xlim() == (0, pytest.approx(1.15 * 130))


def test_names_in_the_plot_of_speed_do_not_overlap(tmp_path, monkeypatch):
    figures = figures_of(speed, monkeypatch)
    places = {
        "keras-xla": (8, 1.0),
        "none-xla": (8, 1.004),
        "keras-recompute-grad-xla": (3.6, 0.79),
        "recompute-xla": (3.5, 0.79),
    }
    rows = [
        {"label": engine, "fits": True, "peak_bytes": peak, "seconds_per_step": 1 / rate}
        for engine, (peak, rate) in places.items()
    ]
    failed = {"label": "keras-remat-xla", "fits": None}
    speed.plot([*rows, failed], "title", tmp_path / "speed.png")
    (axes,) = figures[0].axes
    assert sorted(text.get_text() for text in axes.texts) == sorted(places)
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    assert all(axes.bbox.contains(box.x1, box.y1) for box in boxes)


def test_without_matplotlib_the_rest_is_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    reports.draw(Console(), reports.plot_bars, {"resnet": {"auto": 1}}, "title", "samples", tmp_path / "bars.png")
    assert "bars.png is not drawn, because matplotlib is not installed" in " ".join(capsys.readouterr().out.split())
    assert not list(tmp_path.iterdir())
