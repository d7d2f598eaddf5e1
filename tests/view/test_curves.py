from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from five_seeds import draw_seeds
from PIL import Image

from toolwise.errors import ToolwiseError
from toolwise.training.run_folder import open_run
from toolwise.view.curves import LIGHT, _draw_kinds, draw_legend, render_curves

MakeRun = Callable[..., Path]
PNG = b"\x89PNG\r\n\x1a\n"


def draw_curves(run: Path, out: Path) -> Path:
    out.write_bytes(render_curves(open_run(run)))
    return out


def size_of(png: Path) -> tuple[int, int]:
    data = png.read_bytes()
    assert data.startswith(PNG)
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def colours_in(png: Path) -> set[str]:
    image = Image.open(png).convert("RGB")
    return {"#{:02x}{:02x}{:02x}".format(*pixel) for _, pixel in image.getcolors(1 << 24)}


def test_the_figure_has_the_size_it_should(make_run: MakeRun, tmp_path: Path) -> None:
    width, height = size_of(draw_curves(make_run(), tmp_path / "a.png"))
    assert abs(width - 1200) <= 2
    assert abs(height - 700) <= 2


def test_all_three_panels_are_drawn(make_run: MakeRun, tmp_path: Path) -> None:
    drawn = colours_in(draw_curves(make_run(), tmp_path / "a.png"))
    assert {"#1f6f8b", "#b8622b", "#b9c3cd"} <= drawn


def test_a_figure_without_anything_to_name_has_no_legend() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_legend(axes, LIGHT)
    assert axes.get_legend() is None


def test_the_bars_of_kinds_are_named_though_the_first_kind_has_none(make_run: MakeRun) -> None:
    from matplotlib.figure import Figure

    run = make_run()
    summary = json.loads((run / "summary.json").read_text())
    first = next(iter(summary["before"]["by_kind"]))
    for side in ("before", "after"):
        summary[side]["by_kind"][first] = {"cost": 1.0, "n": 16}
    (run / "summary.json").write_text(json.dumps(summary))
    axes = Figure().subplots()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _draw_kinds(axes, open_run(run), LIGHT)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["before", "after"]


def test_without_kinds_there_are_no_bars(make_run: MakeRun, tmp_path: Path) -> None:
    drawn = colours_in(draw_curves(make_run(kinds=False), tmp_path / "a.png"))
    assert {"#1f6f8b", "#b8622b"} <= drawn
    assert "#b9c3cd" not in drawn


def test_an_sft_run_has_its_losses_and_speed(tmp_path: Path) -> None:
    lines = [{"step": n, "loss": 2.0 / (n + 1), "time/tokens_per_s": 100.0 + n} for n in range(1, 30)]
    lines += [{"step": 0, "eval/loss": 2.0}, {"step": 29, "eval/loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert {"#1f6f8b"} <= colours_in(draw_curves(tmp_path, tmp_path / "a.png"))
    run = open_run(tmp_path)
    assert (run.summary["before"]["loss"], run.summary["after"]["loss"]) == (2.0, 1.0)


@pytest.mark.parametrize(
    "line",
    [
        {"step": 1, "score/mean": 0.5},
        {"step": 1, "reward/correct/mean": 0.5},
        {"step": 1, "cost/mean": 0.5},
        {"step": 1, "eval/x/correct": 0.5},
        {"step": 1, "eval/cost": None},
        {"step": 1, "score/mean": None},
    ],
)
def test_any_lone_series_makes_a_picture(tmp_path: Path, line: dict[str, float]) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    size_of(draw_curves(tmp_path, tmp_path / "a.png"))


def test_an_empty_run_makes_a_picture(tmp_path: Path) -> None:
    size_of(draw_curves(tmp_path, tmp_path / "a.png"))


def test_names_that_look_like_mathematics_are_drawn_as_they_are(make_run: MakeRun, tmp_path: Path) -> None:
    size_of(draw_curves(make_run("run $\\frac$ 1", finished=False), tmp_path / "a.png"))


def test_many_kinds_are_cut_to_what_can_be_read(tmp_path: Path) -> None:
    kinds = {f"kind {i}": {"correct": 0.5, "cost": 1.0, "n": i} for i in range(40)}
    side = {"score": 0.1, "correct": 0.2, "cost": 0.3, "by_kind": kinds}
    (tmp_path / "summary.json").write_text(json.dumps({"before": side, "after": side}))
    size_of(draw_curves(tmp_path, tmp_path / "a.png"))


def test_seeds_share_one_picture(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(f"seed-{seed}", seed=seed, steps=20) for seed in range(3)]
    png = draw_seeds(runs, tmp_path / "seeds.png")
    size_of(png)
    assert "#1f6f8b" in colours_in(png)


def test_seeds_of_different_length_are_drawn_too(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("short", steps=10), make_run("long", steps=40)]
    size_of(draw_seeds(runs, tmp_path / "seeds.png"))


def test_seeds_without_validation_are_an_error_for_people(tmp_path: Path) -> None:
    with pytest.raises(ToolwiseError, match="nothing to plot"):
        draw_seeds([tmp_path], tmp_path / "seeds.png")


def test_importing_the_views_loads_neither_matplotlib_nor_torch() -> None:
    script = (
        "import sys, toolwise.view.curves, toolwise.view.report, toolwise.training.trackers.console\n"
        "assert not {'matplotlib', 'torch', 'jinja2', 'numpy'} & set(sys.modules)"
    )
    environ = {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", script], env=environ, check=True, timeout=60)
