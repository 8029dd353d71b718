"""The page of a report is self-contained, and a browser reports no errors."""

import html
import importlib.util
import json
import re
import shutil
import subprocess

import pytest

from flash_frac.inspect.write import render_page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)
MISSING = [
    name
    for name, there in {
        "the package playwright (pip install playwright)": importlib.util.find_spec("playwright"),
        "a browser (apt-get install chromium)": BROWSER,
    }.items()
    if not there
]


@pytest.fixture(scope="module")
def page_text(report):
    return render_page(report.as_dict())


def test_the_page_holds_its_numbers(page_text, report):
    found = re.search(
        r'<script type="application/json" id="report">(.*?)</script>', page_text, re.S
    )
    assert json.loads(found[1]) == report.as_dict()
    assert "@@" not in page_text.replace(found[1], "")


def test_the_page_needs_nothing_else(page_text):
    assert "http" not in page_text.lower()
    assert not re.findall(r'(?:src|href)="(?!data:)', page_text)
    assert "@import" not in page_text and "fetch(" not in page_text


def test_a_name_cannot_break_out_of_the_page(report):
    numbers = report.as_dict() | {"name": "</title></script><script>alert(1)</script>"}
    assert "<script>alert" not in render_page(numbers)


def look(page, folder, *, width, dark):
    """The page as a browser has built it, with its errors, colours and overflow in the title."""
    listen = "<head><script>const wrong = []; onerror = (text) => { wrong.push(text); };</script>"
    tell = """<script>addEventListener("load", () => { document.title = JSON.stringify({ wrong,
        over: document.documentElement.scrollWidth - innerWidth, width: innerWidth,
        ground: getComputedStyle(document.body).backgroundColor }); });</script></body>"""
    path = folder / "look.html"
    changed = page.replace("<head>", listen, 1).replace("</body>", tell)
    path.write_text(changed, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},800"]
    options += [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    command = [BROWSER, *options, f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=120)
    return done.stdout, json.loads(html.unescape(re.search("<title>(.*?)</title>", done.stdout)[1]))


@pytest.mark.skipif(not BROWSER, reason="needs a browser (apt-get install chromium)")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_phone_shows_two_checkpoints(mixed_report, tmp_path, dark):
    """Both models in the same panels, in both themes, and nothing wider than the screen."""
    numbers = mixed_report.as_dict()
    page = render_page(numbers | {"name": "later"}, numbers | {"name": "earlier"})
    shown, found = look(page, tmp_path, width=360, dark=dark)
    assert found["wrong"] == [] and found["over"] <= 0 and found["width"] <= 500
    levels = [int(x) for x in re.findall(r"\d+", found["ground"])[:3]]
    assert (max(levels) < 60) == dark and (min(levels) > 200) != dark
    assert '<b id="before-name">earlier</b>' in shown and '<b id="after-name">later</b>' in shown
    for chart in ("response", "alpha", "delta", "lambda", "horizon"):
        drawn = re.search(rf'<svg id="{chart}".*?</svg>', shown, re.DOTALL)[0]
        assert "l-before" in drawn, chart
    assert re.search(r"median [\d.]+ · before [\d.]+", shown)
    assert 'id="compared"' in shown and 'id="compared" hidden' not in shown


@pytest.mark.skipif(not BROWSER, reason="needs a browser (apt-get install chromium)")
def test_one_checkpoint_has_no_trace_of_a_comparison(page_text, tmp_path):
    shown, found = look(page_text, tmp_path, width=360, dark=False)
    assert found["wrong"] == [] and found["over"] <= 0
    assert "l-before" not in shown.split("</style>")[1].split('<script type="application')[0]
    assert 'id="compared" hidden' in shown and "NaN" not in shown.split('<script type="app')[0]


@pytest.mark.skipif(bool(MISSING), reason=f"the page was not opened: it needs {MISSING}")
def test_a_browser_finds_no_error(page_text, mixed_report, tmp_path):
    from playwright.sync_api import sync_playwright

    (tmp_path / "index.html").write_text(page_text, encoding="utf-8")
    mixed = render_page(mixed_report.as_dict())
    (tmp_path / "mixed.html").write_text(mixed, encoding="utf-8")
    uses = {"index.html": [use_mouse, use_keyboard], "mixed.html": [use_mixed]}
    errors, requests = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        try:
            for scheme, width in (("light", 1200), ("dark", 400)):
                page = browser.new_page(
                    color_scheme=scheme, viewport={"width": width, "height": 800}
                )
                page.on("console", lambda message: errors.append(message.text))
                page.on("pageerror", lambda error: errors.append(str(error)))
                page.on("request", lambda request: requests.append(request.url))
                for name, use in uses.items():
                    page.goto((tmp_path / name).as_uri())
                    for how in use:
                        how(page)
                page.set_viewport_size({"width": 700, "height": 800})
                # Of the page itself only the table may be wider than the window.
                assert page.evaluate("document.documentElement.scrollWidth") <= 700
        finally:
            browser.close()
    assert not errors
    assert {url.rsplit("/", 1)[-1] for url in requests} == set(uses)


def use_mouse(page):
    assert "</script><b>text @@ &" in page.inner_text("#about")
    for layer in ("0", "1"):
        page.select_option("#layer", layer)
        for head in ("-1", "0", "1"):
            page.select_option("#head", head)
            assert f"layer {layer}" in page.inner_text("#response-name")
            assert not re.search("NaN|undefined|Infinity", page.inner_html("main"))
    assert page.is_disabled("#layer-on") and page.is_disabled("#head-on")
    page.click("#layer-back")
    page.click("#head-back")
    assert page.inner_text("#response-name") == "layer 0, head 0"
    for name in ("response", "power", "exponential", "others", "horizon"):
        before = page.inner_html("#response")
        page.click(f"#show-{name}")
        assert page.inner_html("#response") != before
        page.click(f"#show-{name}")
    page.click("#log-colour")
    page.hover("#response")
    assert page.inner_text("#readout").startswith("lag ")
    page.hover("#read .cell >> nth=3")
    assert "mode" in page.inner_text("#tip")
    page.click("#read .cell >> nth=7")
    assert page.inner_text("#response-name") == "layer 0, head 1"
    page.click("#alpha-map .cell >> nth=-2")
    assert page.inner_text("#response-name") == "layer 1, head 0"
    page.click("#horizon .clickable >> nth=0")
    page.hover("#timescale .column >> nth=-1")
    page.click("#table button >> nth=1")
    assert page.input_value("#layer") == "1"


def use_keyboard(page):
    page.focus("#response")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#readout").startswith("lag 2")
    page.keyboard.press("End")
    assert page.inner_text("#readout").startswith("lag 64")
    page.keyboard.press("Escape")
    page.select_option("#head", "-1")
    page.focus("#write")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    assert page.input_value("#head") == "1"
    page.focus("#horizon")
    page.keyboard.press("ArrowLeft")
    assert page.input_value("#layer") == "0"
    page.focus("#layer-on")
    page.keyboard.press("Enter")
    assert page.input_value("#layer") == "1"


def use_mixed(page):
    """Every layer has its type and the charts of that type, and no others."""
    names = ("Frac", "delta", "sliding attention", "attention")
    charts = {"#distances-card": (2, 3), "#distributions-card": (0, 1), "#modes-card": (0,)}
    assert "4 layers (1 Frac, 1 delta, 1 attention, 1 sliding attention)" in page.inner_text(
        "#about"
    )
    for layer, name in enumerate(names):
        page.select_option("#layer", str(layer))
        assert page.inner_text("#response-name").endswith(f"mean of all heads, {name}")
        for card, layers in charts.items():
            assert page.is_visible(card) == (layer in layers)
        assert (
            page.is_visible("#half_life") == (layer == 1) != page.is_visible("#alpha") or layer > 1
        )
        assert page.locator("#head option").count() == (4 if layer == 1 else 3)
        assert name in page.inner_text(f"#table tbody tr >> nth={layer}")
        assert not re.search("NaN|undefined|Infinity|null", page.inner_html("main"))
    page.hover("#distances .column >> nth=2")
    assert page.inner_text("#tip").startswith("distance 2 to 3: ")
    page.click("#distances-map .cell >> nth=-1")
    assert page.inner_text("#response-name") == "layer 3, head 1, attention"
    page.click("#alpha-map .cell >> nth=0")
    assert page.inner_text("#response-name") == "layer 0, head 0, Frac"
    page.select_option("#layer", "1")
    page.select_option("#head", "2")
    page.click("#layer-back")
    assert page.input_value("#head") == "1"
