"""The page at `/` in headless Chromium while both texts arrive; it depends on this server alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from specdec_kernels.engine import SamplingParams
from specdec_kernels.server.app import PAGE
from support.browser import CHROMIUM, Page, browsing
from support.request_engines import make_engine
from support.server_thread import Running, serving

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
PROMPT = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(make_engine("chain", max_len=512, adaptive=False)) as running:
        yield running


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with browsing(tmp_path) as page:
        yield page


def test_page_is_one_file_that_requests_this_server_only(server: Running) -> None:
    status, headers, body = server.ask("/")
    assert (status, body) == (200, PAGE.read_bytes())
    assert headers["Content-Security-Policy"].startswith("default-src 'self';")
    text = body.decode()
    assert not re.search(r"(src|href)=\"(?!data:)", text) and "//" not in re.sub(
        r"^ *// .*|  // .*$", "", text, flags=re.M
    )
    paths = set(re.findall(r'"(v1/[a-z/]+)"', text))
    assert paths == {"v1/models", "v1/completions", "v1/chat/completions"}
    assert all(server.ask(f"/{path}")[0] in (200, 405) for path in paths)


@needs_chromium
@pytest.mark.parametrize("order", ["together", "turns"])
def test_page_shows_both_texts(server: Running, page: Page, order: str) -> None:
    (want,) = server.engine.generate(PROMPT, SamplingParams(60))
    page.open(f"http://127.0.0.1:{server.port}/")
    page.wait_for("element('prompt').value !== ''")
    for name, value in {"prompt": PROMPT, "tokens": 60, "mode": "text", "order": order}.items():
        page.value(f"element('{name}').value = {value!r}")
    page.value("element('run').click()")
    page.wait_for("element('verdict').textContent !== ''")
    verdict, note = (page.value(f"element('{name}').textContent") for name in ("verdict", "note"))
    if order == "turns":
        assert re.fullmatch(r"\d+\.\d\d times as fast", verdict) and note.startswith("The same text")
    else:  # two runs that share the machine say nothing of a speed-up
        assert verdict == "The same text" and note.startswith("Both runs shared the machine")
    for pane, rounds in (("on", want.stats.rounds), ("off", 59)):
        assert page.value(f"element('{pane}').querySelector('pre').textContent") == want.text
        shown = {
            name: page.value(f"element('{pane}').querySelector('.{name}').textContent")
            for name in ("count", "length", "speed")
        }
        assert (shown["count"], shown["length"]) == ("60", f"{59 / rounds:.2f}") and float(shown["speed"]) > 0
    accepted = "Array.from(element('%s').querySelectorAll('span.accepted'), span => span.textContent).join('')"
    assert page.value(accepted % "off") == "" and 0 < len(page.value(accepted % "on")) < len(want.text or "")
    color = "getComputedStyle(element('on').querySelector('span.%s')).color"
    assert page.value(color % "accepted") != page.value(color % "own")
    assert page.value("element('run').textContent") == "Run" and not page.errors


@needs_chromium
def test_page_link_runs_at_once_and_stops(server: Running, page: Page) -> None:
    page.open(f"http://127.0.0.1:{server.port}/#prompt={quote(PROMPT)}&tokens=100000&mode=text")
    page.wait_for("Number(element('on').querySelector('.count').textContent) > 10")
    page.value("element('run').click()")
    page.wait_for("document.querySelectorAll('.error').length === 2")
    assert page.value("document.querySelector('.error').textContent") == "stopped"
    server.wait_until_idle()


@needs_chromium
def test_page_shows_errors(page: Page) -> None:
    with serving(make_engine(), api_key="secret") as running:
        page.open(f"http://127.0.0.1:{running.port}/#prompt=x")
        page.wait_for("document.querySelectorAll('.error').length === 2")
        assert "the API key is missing" in page.value("document.querySelector('.error').textContent")
        page.value("element('key').value = 'secret'; element('key').dispatchEvent(new Event('change'))")
        page.wait_for("element('model').textContent === 'tiny' && element('verdict').textContent !== ''")


@needs_chromium
def test_page_keeps_the_prompt_when_a_key_is_given(page: Page) -> None:
    with serving(make_engine(), api_key="secret") as running:
        page.open(f"http://127.0.0.1:{running.port}/")
        page.wait_for("element('prompt').value !== ''")
        page.value("element('prompt').value = 'mine'; element('tokens').value = 7")
        page.value("element('key').value = 'secret'; element('key').dispatchEvent(new Event('change'))")
        page.wait_for("element('model').textContent === 'tiny'")
        assert page.value("element('prompt').value + element('tokens').value") == "mine7"


@needs_chromium
@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 900)])
def test_page_shows_the_comparison_on_one_screen(server: Running, page: Page, width: int, height: int) -> None:
    page.resize(width, height)
    page.open(f"http://127.0.0.1:{server.port}/#prompt={quote(PROMPT)}&tokens=60")
    page.wait_for("element('verdict').textContent !== ''")
    for name in ("#verdict", ".bar strong", "#on pre", "#off h2"):
        box = page.value(f"JSON.stringify(document.querySelector('{name}').getBoundingClientRect())")
        top, bottom = (json.loads(box)[side] for side in ("top", "bottom"))
        assert top >= 0 and bottom <= height, name
    assert page.value("document.documentElement.scrollWidth") <= width
    sizes = "['verdict', 'note'].map(name => parseFloat(getComputedStyle(element(name)).fontSize))"
    assert page.value(f"Math.max(...{sizes})") >= 20


@needs_chromium
def test_page_escapes_model_output(page: Page) -> None:
    """Tags in the text are shown, not interpreted."""
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with serving(make_engine(max_len=512), chat_template=template) as running:
        prompt = quote('x = "<b>bold</b>"\n' * 8)
        page.open(f"http://127.0.0.1:{running.port}/#prompt={prompt}&tokens=40&mode=chat")
        page.wait_for("element('verdict').textContent !== ''")
        assert "<b>bold</b>" in page.value("element('on').querySelector('pre').textContent")
        assert page.value("document.querySelectorAll('b').length") == 0
