"""Charts show every number, to scale within their group."""

from xml.etree import ElementTree

from vllm.benchmarks.chart import bar_chart

_SVG = "{http://www.w3.org/2000/svg}"


def test_bars_are_to_scale_and_labelled() -> None:
    groups = {"a <b>": {"x": 50.0, "y": 200.0}, "empty": {}, "c": {"x": 1.25}}
    root = ElementTree.fromstring(bar_chart("Title & more", groups, "tok/s"))
    texts = [element.text for element in root.iter(f"{_SVG}text")]
    assert texts[0] == "Title & more"
    assert {"a <b>", "c", "x", "y", "50 tok/s", "200 tok/s", "1.25 tok/s"} < set(texts)
    assert "empty" not in texts
    widths = [float(r.get("width")) for r in list(root.iter(f"{_SVG}rect"))[1:]]
    assert widths[0] * 4 == widths[1] == widths[2]
    bottom = float(root.get("height"))
    assert all(float(t.get("y")) < bottom for t in root.iter(f"{_SVG}text"))


def test_zeros_have_no_bar() -> None:
    root = ElementTree.fromstring(bar_chart("t", {"g": {"x": 0.0}}))
    assert [r.get("width") for r in root.iter(f"{_SVG}rect")] == ["100%", "0.0"]
