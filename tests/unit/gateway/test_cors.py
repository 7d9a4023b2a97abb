"""The CORS headers of answers and preflights."""

from gateway.domain.cors import answer_headers, preflight_headers

PAGE = b"https://page.example"


def test_any_origin_is_answered_with_a_star() -> None:
    headers = dict(answer_headers(PAGE, ("*",)))
    assert headers[b"access-control-allow-origin"] == b"*"
    exposed = headers[b"access-control-expose-headers"].split(b", ")
    assert {b"retry-after", b"request-id", b"x-yard-loading"} <= {*exposed}
    assert b"vary" not in headers


def test_a_list_of_origins_echoes_its_members_only() -> None:
    headers = dict(answer_headers(PAGE, ("https://page.example",)))
    assert headers[b"access-control-allow-origin"] == PAGE
    assert headers[b"vary"] == b"origin"
    assert answer_headers(b"https://other.example", ("https://page.example",)) == ()


def test_no_browser_no_headers() -> None:
    assert answer_headers(None, ("*",)) == ()


def test_a_preflight_echoes_header_names_and_nothing_else() -> None:
    headers = dict(preflight_headers(b"Authorization, X-Stainless-OS,bad name, a:b,\tx-y "))
    assert headers[b"access-control-allow-headers"] == b"authorization, x-stainless-os, x-y"
    assert b"POST" in headers[b"access-control-allow-methods"]
    assert b"access-control-allow-headers" not in dict(preflight_headers(None))


def test_a_preflight_echoes_a_bounded_number_of_names() -> None:
    names = b",".join(b"x-%d" % n for n in range(1000))
    echoed = dict(preflight_headers(names))[b"access-control-allow-headers"]
    assert echoed.count(b",") == 63
