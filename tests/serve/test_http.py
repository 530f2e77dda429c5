"""The HTTP API, tested with a LibreTranslate client and a fuzzer."""

from __future__ import annotations

import asyncio
import html
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import unsupported_method
from starlette.exceptions import HTTPException

from simulmt.runtime.stream import Translator
from simulmt.serve.access import ApiKeys, Counted
from simulmt.serve.app import Settings, create_app
from simulmt.serve.http import Detector, HttpApi, _Splitter, base_code, translate_html

from .helpers import PATIENCE, Served, eventually, get, post, synthetic_text

Serve = Callable[..., Served]
TEXT = synthetic_text(sentences=2, seed=21)
PAIR = {"source": "synthetic", "target": "synthetic"}

app = create_app(Settings(("toy",), threads=1))
contract = schemathesis.openapi.from_asgi("/openapi.json", app)


@contract.parametrize()
@settings(max_examples=15, deadline=None, derandomize=True)
def test_every_response_conforms_to_the_openapi_document(case: schemathesis.Case[Any]) -> None:
    case.call_and_validate(excluded_checks=[unsupported_method], timeout=PATIENCE)


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.http, timeout=PATIENCE) as client:
        yield client


def test_a_text_for_a_text_and_a_list_for_a_list(client: httpx.Client, translator: Translator) -> None:
    texts = [TEXT, "", "kyo tsi\nmyi za", " "]
    one = client.post("/translate", json={"q": TEXT, **PAIR})
    many = client.post("/translate", json={"q": texts, **PAIR, "delay": 1.0})  # a whole number all the same
    assert one.json() == {"translatedText": translator.translate(TEXT, 5)}
    assert many.json() == {"translatedText": [translator.translate(text, 1) for text in texts]}


def test_a_long_text_is_translated_whole(client: httpx.Client, translator: Translator) -> None:
    text = "\n".join([TEXT] * 40 + [" ".join([TEXT] * 10)])
    assert client.post("/translate", json={"q": text, **PAIR}).json() == {
        "translatedText": translator.translate(text, 5)
    }


def test_forms_are_accepted(client: httpx.Client, translator: Translator) -> None:
    one = client.post("/translate", data={"q": TEXT, **PAIR, "format": "text", "delay": "5"})
    two = client.post("/translate", data={"q": ["kyo", "tsi"], **PAIR})
    assert one.json() == {"translatedText": translator.translate(TEXT, 5)}
    assert two.json() == {"translatedText": [translator.translate("kyo", 5), translator.translate("tsi", 5)]}


def test_the_source_can_be_left_to_the_server_where_there_is_only_one(client: httpx.Client) -> None:
    assert client.post("/translate", json={"q": "kyo", "source": "auto", "target": "synthetic"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"source": "synthetic", "target": "synthetic"}, "q"),
        ({"q": 5, **PAIR}, "q"),
        ({"q": "a", "source": "en", "target": "synthetic"}, "'en'"),
        ({"q": "a", "source": "auto", "target": "de"}, "'de'"),
        ({"q": "a", **PAIR, "format": "pdf"}, "format"),
        ({"q": "a", **PAIR, "delay": 2}, "delay 2"),
        ({"q": "a", **PAIR, "dealy": 3}, "unknown field `dealy`"),
        ({"q": "a", **PAIR, "\ud800": 3}, "invalid body"),
        (["q"], "object"),
    ],
)
def test_a_bad_request_gets_the_reason(client: httpx.Client, body: Any, word: str) -> None:
    answer = client.post("/translate", content=json.dumps(body))
    assert answer.status_code == 400
    assert word in answer.json()["error"]


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 20_000, b"\xff", b"q=%ff"])
def test_invalid_requests_are_refused(client: httpx.Client, body: bytes) -> None:
    for kind in ("application/json", "application/x-www-form-urlencoded"):
        answer = client.post("/translate", content=body, headers={"Content-Type": kind})
        assert answer.status_code == 400
        assert answer.json()["error"]


def test_json_sent_as_a_form_gets_a_hint(client: httpx.Client) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = client.post("/translate", content=json.dumps({"q": "a", **PAIR}), headers=form)
    assert answer.json()["error"].endswith("; send JSON with Content-Type: application/json")


def test_errors_of_routing_look_the_same(client: httpx.Client) -> None:
    assert (client.get("/nowhere").status_code, client.get("/nowhere").json()) == (404, {"error": "Not Found"})
    assert client.get("/translate").status_code == 405
    assert client.get("/static/../app.py").status_code == 404


def test_a_long_request_is_refused(serve: Serve) -> None:
    served = serve(message_bytes=1_000)
    with suppress(httpx.WriteError):  # it hangs up while the client is still sending
        assert post(f"{served.http}/translate", json={"q": "a" * 100_000, **PAIR}).status_code == 413


def test_keys(serve: Serve) -> None:
    url = f"{serve(keys=ApiKeys(['sesame'])).http}/translate"
    body = {"q": "kyo", **PAIR}
    assert post(url, json=body).status_code == 403
    assert post(url, json={**body, "api_key": "sesam"}).status_code == 403
    assert post(url, json={**body, "api_key": "sesame"}).status_code == 200
    assert post(url, json=body, headers={"Authorization": "Bearer sesame"}).status_code == 200


def test_pages_of_other_origins_need_permission(serve: Serve) -> None:
    served = serve(origins=("https://friend.example",))

    def status(origin: str) -> int:
        headers = {"Origin": origin}
        return post(f"{served.http}/translate", json={"q": "kyo", **PAIR}, headers=headers).status_code

    assert status(served.http) == status("https://friend.example") == 200
    assert status("https://stranger.example") == 403
    preflight = httpx.options(
        f"{served.http}/translate",
        timeout=PATIENCE,
        headers={
            "Origin": "https://friend.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "content-type",
        },
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://friend.example"


def test_another_name_for_a_loopback_address_needs_a_key(serve: Serve) -> None:
    def status(served: Served, **body: str) -> int:
        headers = {"Host": "evil.example", "Origin": "http://evil.example"}
        return post(f"{served.http}/translate", json={"q": "kyo", **PAIR, **body}, headers=headers).status_code

    assert status(serve()) == 403
    assert status(serve(keys=ApiKeys(["sesame"])), api_key="sesame") == 200


def test_requests_above_the_limit_are_told_to_try_again(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve(requests=1)
    answers: list[int] = []

    async def wait_for_an_answer(*_: object) -> str:
        while not answers:
            await asyncio.sleep(0.01)
        return "late"

    def ask() -> None:
        answers.append(post(f"{served.http}/translate", json={"q": "kyo", **PAIR}).status_code)

    monkeypatch.setattr(served.service.models["toy"], "translate", wait_for_an_answer)
    first = threading.Thread(target=ask)
    first.start()
    eventually(lambda: served.service.counters.total(Counted.REQUESTS) == 1)
    ask()
    first.join()
    assert answers == [429, 200]


def test_information_about_the_server(client: httpx.Client) -> None:
    model = {"name": "toy", "kind": "ctc", "source": "synthetic", "target": "synthetic"}
    assert client.get("/v1/models").json() == {"models": [{**model, "delays": [1, 3, 5], "default_delay": 3}]}
    language = {"code": "synthetic", "name": "Synthetic", "targets": ["synthetic"]}
    assert client.get("/languages").json() == [language]
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json() == {"status": "ready"}
    jsonschema.Draft202012Validator.check_schema(client.get("/v1/schema").json())


def test_metrics_count_streams_and_split_the_lag(serve: Serve) -> None:
    served = serve()
    with served.talk() as talk:
        talk.start()
        assert 'simulmt_live_streams{model="toy"} 1.0' in get(f"{served.http}/metrics").text
        talk.send("source", text=TEXT).send("finish")
        commits = sum(message["type"] == "commit" for message in talk.receive_all())
    with served.talk() as talk:
        talk.send("finish").receive_error()
    eventually(lambda: 'simulmt_live_streams{model="toy"} 0.0' in get(f"{served.http}/metrics").text)
    text = get(f"{served.http}/metrics").text
    assert f'simulmt_commits_total{{model="toy"}} {commits}.0' in text
    assert f'simulmt_source_words_total{{model="toy"}} {len(TEXT.split())}.0' in text
    assert 'simulmt_sentences_total{model="toy"} 2.0' in text
    assert 'simulmt_errors_total{code="out_of_order"} 1.0' in text
    for part in ("policy", "queue", "compute"):
        assert f'simulmt_lag_seconds_count{{model="toy",part="{part}"}} {commits}.0' in text
    assert 'simulmt_batch_streams_count{model="toy"}' in text


def test_pages_may_load_nothing_from_elsewhere(client: httpx.Client) -> None:
    for path in ("/", "/captions", "/health"):
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_multipart_forms_are_accepted(client: httpx.Client, translator: Translator) -> None:
    fields = {"q": TEXT, **PAIR, "delay": "1", "format": "text", "api_key": ""}
    answer = client.post("/translate", files={name: (None, value) for name, value in fields.items()})
    assert answer.json() == {"translatedText": translator.translate(TEXT, 1)}
    file = client.post("/translate", files={"q": ("text.txt", "kyo"), "source": (None, "auto")})
    assert file.status_code == 400


@pytest.mark.parametrize(
    ("tag", "code"),
    [("zh", "zh"), ("zh-Hans", "zh"), ("zh_CN", "zh"), ("de-AT", "de"), ("EN", "en"), ("zh-Hant", "zh-hant")],
)
def test_language_tags_lead_to_the_languages_of_models(tag: str, code: str) -> None:
    assert base_code(tag) == code


def test_detection_distinguishes_the_languages() -> None:
    detector = Detector(["en", "de", "synthetic"])
    assert detector.detect("Good morning, how are you today?")[0].language == "en"
    ranked = detector.detect("Guten Morgen, wie geht es dir heute?")
    assert [found.language for found in ranked] == ["de", "en"]
    assert ranked[0].confidence > 90
    assert sum(found.confidence for found in ranked) == pytest.approx(100, abs=0.2)


def test_languages_that_cannot_be_detected_must_be_given() -> None:
    api = HttpApi.__new__(HttpApi)
    api._detector = Detector(["en", "synthetic", "toki"])
    with pytest.raises(HTTPException, match="cannot detect the source language; set source to one of: synthetic, toki"):
        asyncio.run(api._detect_source("kyo tsi", dict.fromkeys(["synthetic", "toki"])))  # type: ignore[arg-type]


def test_detection_is_among_all_languages_even_if_one_is_possible() -> None:
    api = HttpApi.__new__(HttpApi)
    api._detector = Detector(["en", "de", "synthetic"])
    text = "Guten Morgen, wie geht es dir heute?"
    found = asyncio.run(api._detect_source(text, {"en": None}))  # type: ignore[dict-item]
    assert found.language == "en"
    assert found.confidence < 10
    found = asyncio.run(api._detect_source(text, {"synthetic": None}))  # type: ignore[dict-item]
    assert (found.language, found.confidence) == ("synthetic", 0.0)


def test_detection_of_the_only_language(client: httpx.Client) -> None:
    answer = client.post("/detect", data={"q": "kyo tsi"})
    assert answer.json() == [{"language": "synthetic", "confidence": 100.0}]
    answer = client.post("/translate", json={"q": "kyo", "source": "auto", "target": "synthetic"})
    assert answer.json()["detectedLanguage"] == {"language": "synthetic", "confidence": 100.0}


def test_html_keeps_its_markup(client: httpx.Client, translator: Translator) -> None:
    page = (
        '<!DOCTYPE html><p class="a">\n kyo  tsi &amp; </p><br><!-- kyo --><img src="kyo"/>'
        '<script>if (1 < 2) kyo()</script><div translate="no">kyo <b>&lt;tsi</b></div><p>myi'
    )
    answer = client.post("/translate", json={"q": page, **PAIR, "format": "html"}).json()["translatedText"]
    first, last = (html.escape(translator.translate(text, 5), quote=False) for text in ("kyo tsi &", "myi"))
    assert answer == (
        f'<!DOCTYPE html><p class="a">\n {first} </p><br><!-- kyo --><img src="kyo"/>'
        f'<script>if (1 < 2) kyo()</script><div translate="no">kyo <b>&lt;tsi</b></div><p>{last}'
    )


async def shout(text: str) -> str:
    return text.upper()


@pytest.mark.parametrize("beginning", ["<a ", "</a ", "<a b='", '<a b="', "<!--", "<!", "<![", "<?", "<script>"])
def test_unclosed_markup_is_read_once(beginning: str) -> None:
    for text in (1_000 * beginning, 1_001 * beginning):
        assert [part for part in _Splitter(text).parts if part[0]] == [(text, False)]


@pytest.mark.parametrize(
    ("page", "translated"),
    [
        ("x <![@ y", "X <![@ y"),
        ("<![foo bar", "<![foo bar"),
        ("a<![CDATA[x y]]>b", "A<![CDATA[x y]]>B"),
        ("a <![if !vml]> b <![endif]>", "A <![if !vml]> B <![endif]>"),
        ("a<?php b ?>c</>d</ e>f", "A<?php b ?>C</>D</ e>F"),
        ("a<!-->b<!--->c<!-- d --!>e<!-- f", "A<!-->B<!--->C<!-- d --!>E<!-- f"),
        ("a<script>let b", "A<script>let b"),
        ("a<STYLE>b { c: '</p>' }</Style >d", "A<STYLE>b { c: '</p>' }</Style >D"),
        ("a<script/>b<script src='c'/>d", "A<script/>B<script src='c'/>D"),
        ("a <b c", "A <b c"),
        ("1 < 2 <3 & x<y>z", "1 &lt; 2 &lt;3 &amp; X<y>Z"),
        ("<p title='a > b' lang=de>c</p>", "<p title='a > b' lang=de>C</p>"),
        ('<p title="a>b</p>', '<p title="a>B</p>'),
        ("<code>a<br>b<i>c</code>d", "<code>a<br>b<i>c</code>D"),
        ("<p translate = 'no'>a<p>b</p>&nbsp;</p>&nbsp;<P>c", "<p translate = 'no'>a<p>b</p>&nbsp;</p>&nbsp;<P>C"),
        ('<img translate="no">a', '<img translate="no">A'),
        ('<p Translate="NO">a</p>b<p translate=yes>c', '<p Translate="NO">a</p>B<p translate=yes>C'),
        ("<pre>\n  a\n\n\tb <b>c\r\n  d</b>\n</pre>e\n f", "<pre>\n  A\n\n\tB <b>C\r\n  D</b>\n</pre>E F"),
        ("<textarea>a\n  b &lt;\n</textarea>", "<textarea>A\n  B &lt;\n</textarea>"),
        (f"a&#{5_000 * '1'};b&#x41;", "A\ufffdBA"),
    ],
)
def test_markup_is_kept_as_it_is(page: str, translated: str) -> None:
    assert asyncio.run(translate_html(page, shout)) == translated


def test_a_part_without_a_full_stop_gets_none() -> None:
    async def end(text: str) -> str:
        return f"{text}。"

    page = "<h1>a b</h1><p>c. </p><p>d!</p>"
    assert asyncio.run(translate_html(page, end)) == "<h1>a b</h1><p>c.。 </p><p>d!。</p>"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*"<>/!-?[]='\"& \na\u4e00", "<a ", "<!--", "-->", "code", "</code>"]), max_size=30))
def test_any_text_is_split_without_loss(pieces: list[str]) -> None:
    text = "".join(pieces).replace("&", "+")
    assert "".join(part for part, _ in _Splitter(text).parts) == text
