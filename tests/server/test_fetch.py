"""Fetching pictures: what is reached, what is never reached, and what a hostile server can cost."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from http_client import post
from live_server import LiveServer, chat_body
from picture_files import encode, pattern

from server.fetch import Address, Fetcher, FetchError, is_public

PICTURE = encode(pattern(64, 96))
CERTIFICATE = Path(__file__).with_name("tls") / "pictures.test.pem"
# In these tests one address of the machine plays the internet; all others are what they are, not public.
OPEN = ipaddress.ip_address("127.0.0.1")

Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Web:
    """A web server in the test's event loop, and the name service that leads to it.

    names: what each host name resolves to, one list per question asked, the last one for ever. requests: heads that
    came, one per connection.
    """

    port: int = 0
    names: dict[str, list[list[str]]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    requests: list[bytes] = field(default_factory=list)

    async def resolve(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        answers = self.names.get(host)
        if answers is None:
            try:
                return [str(ipaddress.ip_address(host))]
            except ValueError:
                raise OSError("no such name") from None
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def fetcher(self, **settings: Any) -> Fetcher:
        given: dict[str, Any] = {"ports": frozenset({self.port}), "is_allowed": OPEN.__eq__, "resolve": self.resolve}
        return Fetcher(**{**given, **settings})


def run(scenario: Callable[[Web], Awaitable[None]], handle: Handler, tls: ssl.SSLContext | None = None) -> Web:
    """Run `scenario` beside a server that answers with `handle`."""
    web = Web(names={"pictures.test": [["127.0.0.1"]], "other.test": [["127.0.0.1"]]})

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            web.requests.append(head)
            await handle(head, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
        async with server:
            web.port = server.sockets[0].getsockname()[1]
            await asyncio.wait_for(scenario(web), 30)

    asyncio.run(main())
    return web


def reply(body: bytes = PICTURE, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def answering(data: bytes) -> Handler:
    async def handle(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return handle


def redirecting(*places: str) -> Handler:
    """Answers with redirects, in order, then with the picture. {port} in a place is the server's."""
    left = list(places)

    async def handle(head: bytes, writer: asyncio.StreamWriter) -> None:
        if not left:
            writer.write(reply())
            return
        port = writer.get_extra_info("sockname")[1]
        writer.write(reply(b"", "302 Found", f"location: {left.pop(0).format(port=port)}"))

    return handle


def refused(
    url: str, handle: Handler, code: str, says: str = "", *, served: ssl.SSLContext | None = None, **settings: Any
) -> Web:
    """Fetching `url` fails in that way."""

    async def scenario(web: Web) -> None:
        with pytest.raises(FetchError) as refusal:
            await web.fetcher(**settings).fetch(url.format(port=web.port))
        assert refusal.value.code == code
        assert says in str(refusal.value)

    return run(scenario, handle, served)


FORBIDDEN = "image_url_forbidden"
FAILED = "image_fetch_failed"
URL = "http://pictures.test:{port}/a.png"


def test_a_picture_arrives_whole() -> None:
    async def scenario(web: Web) -> None:
        assert await web.fetcher().fetch(f"http://pictures.test:{web.port}/a%20b/\u00e4.png?x=1&y=%2F#top") == PICTURE

    (head,) = run(scenario, answering(reply())).requests
    lines = head.decode().split("\r\n")
    assert lines[0] == "GET /a%20b/%C3%A4.png?x=1&y=%2F HTTP/1.1"
    headers = {line.split(": ")[0].lower(): line.split(": ")[1] for line in lines[1:] if line}
    assert headers["host"].startswith("pictures.test:")
    assert headers["accept-encoding"] == "identity"
    assert not {"cookie", "authorization", "referer"} & set(headers)


def test_chunked_bodies_are_read() -> None:
    async def scenario(web: Web) -> None:
        assert await web.fetcher().fetch(URL.format(port=web.port)) == b"abcde"

    run(scenario, answering(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"))


NOT_PUBLIC = [
    "127.0.0.1", "127.8.9.1", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "192.0.0.1", "192.0.2.1", "198.18.0.1", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255",
    "::", "::1", "fe80::1", "fe80::1%1", "fc00::1", "fd12::1", "fec0::1", "ff02::1", "2001:db8::1", "2002:7f00:1::1",
    "2001::1", "64:ff9b::7f00:1", "64:ff9b:1::1", "100::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1",
]  # fmt: skip


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["93.184.216.34", "1.1.1.1", "2606:4700:4700::1111", "::ffff:1.1.1.1"])
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "[::1]", "169.254.169.254", "10.1.2.3", "[::ffff:127.0.0.1]", "[fe80::1]", "0.0.0.0"]
)
def test_addresses_of_the_own_network_are_not_reached(host: str) -> None:
    web = refused(f"http://{host}:{{port}}/a.png", answering(reply()), FORBIDDEN, "not public", is_allowed=is_public)
    assert web.requests == []


@pytest.mark.parametrize("host", ["2130706433", "0x7f000001", "127.1", "0177.0.0.1", "localhost"])
def test_disguised_addresses_are_not_reached(host: str) -> None:
    """The system's name service reads them as 127.0.0.1, or as nothing."""

    async def scenario(web: Web) -> None:
        with pytest.raises(FetchError):
            await Fetcher(ports=frozenset({web.port})).fetch(f"http://{host}:{web.port}/a.png")

    assert run(scenario, answering(reply())).requests == []


def test_one_private_address_among_public_ones_is_enough() -> None:
    async def scenario(web: Web) -> None:
        web.names["mixed.test"] = [["127.0.0.1", "10.0.0.1"]]
        with pytest.raises(FetchError, match="not public"):
            await web.fetcher().fetch(f"http://mixed.test:{web.port}/")

    assert run(scenario, answering(reply())).requests == []


def test_a_name_that_changes_its_address_is_asked_once() -> None:
    """DNS rebinding: the connection goes to the address that was checked, whatever the name leads to afterwards."""

    async def scenario(web: Web) -> None:
        web.names["rebind.test"] = [["127.0.0.1"], ["10.0.0.1"]]
        assert await web.fetcher().fetch(f"http://rebind.test:{web.port}/") == PICTURE
        assert web.asked == ["rebind.test"]

    assert len(run(scenario, answering(reply())).requests) == 1


def test_redirects_are_followed() -> None:
    async def scenario(web: Web) -> None:
        assert await web.fetcher().fetch(URL.format(port=web.port)) == PICTURE
        assert web.asked == ["pictures.test", "other.test", "other.test", "other.test"]

    web = run(scenario, redirecting("http://other.test:{port}/b.png", "/c.png", "d.png?e=f"))
    assert [head.split()[1] for head in web.requests] == [b"/a.png", b"/b.png", b"/c.png", b"/d.png?e=f"]


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("http://127.0.0.2:{port}/x", "not public"),
        ("http://[::1]:{port}/x", "not public"),
        ("http://169.254.169.254:{port}/latest", "not public"),
        ("http://pictures.test:1/x", "Port 1"),
        ("file:///etc/passwd", "http or https"),
        ("gopher://pictures.test:{port}/x", "http or https"),
        ("//user:secret@pictures.test:{port}/x", "credentials"),
    ],
)
def test_redirects_are_checked_like_the_first_url(place: str, says: str) -> None:
    assert len(refused(URL, redirecting(place), FORBIDDEN, says).requests) == 1


def test_a_redirect_to_a_name_that_changes_is_checked_anew() -> None:
    async def scenario(web: Web) -> None:
        web.names["rebind.test"] = [["127.0.0.1"], ["192.168.0.1"]]
        with pytest.raises(FetchError, match="not public"):
            await web.fetcher().fetch(f"http://rebind.test:{web.port}/")

    assert len(run(scenario, redirecting("/again")).requests) == 1


def test_redirects_end() -> None:
    assert len(refused(URL, redirecting(*["/again"] * 9), FAILED, "redirects").requests) == 4


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://user:secret@pictures.test:{port}/", "credentials"),
        ("http://pictures.test:{port}@evil.test/", "credentials"),
        ("http://pictures.test:22/", "Port 22"),
        ("http://pictures.test/", "Port 80"),
        ("http://pictures.test:99999/", "not well formed"),
        ("http://pictures.test:{port}/a b", "blanks"),
        ("http://pictures.test:{port}\\@evil.test/", "backslashes"),
        ("http://pictures.test:{port}/\r\nhost: evil", "control characters"),
        ("http:///a.png", "no host"),
        ("http://[::1/", "not well formed"),
        ("http://" + "a" * 70 + ".test:{port}/", "not well formed"),
        ("http://pictures.test:{port}/" + "a" * 9000, "too long"),
        ("ftp://pictures.test:{port}/", "http or https"),
    ],
)
def test_urls_that_are_refused_unasked(url: str, says: str) -> None:
    web = refused(url, answering(reply()), FORBIDDEN, says)
    assert (web.requests, web.asked) == ([], [])


def test_only_the_usual_ports_by_default() -> None:
    async def scenario(web: Web) -> None:
        with pytest.raises(FetchError, match="Port"):
            await Fetcher().fetch(URL.format(port=web.port))

    run(scenario, answering(reply()))


def test_unknown_names() -> None:
    refused("http://nowhere.test:{port}/", answering(reply()), FAILED, "not known")


async def never(head: bytes, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def trickle(head: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


async def slow_head(head: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nx: ")
    await trickle(head, writer)


async def endless(head: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(bytes(65536))
        await writer.drain()


async def endless_head(head: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"x-filler: " + b"a" * 1000 + b"\r\n")
        await writer.drain()


@pytest.mark.parametrize("handle", [never, trickle, slow_head])
def test_slow_servers_are_given_up(handle: Handler) -> None:
    refused(URL, handle, FAILED, "within 0.3 s", timeout_s=0.3)


def test_slow_redirects_share_one_time() -> None:
    async def handle(head: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)
        writer.write(reply(b"", "302 Found", "location: /again"))

    refused(URL, handle, FAILED, "within 0.5 s", timeout_s=0.5)


@pytest.mark.parametrize("handle", [endless, answering(reply(bytes(5000)))])
def test_large_files_are_cut_off(handle: Handler) -> None:
    refused(URL, handle, "image_too_large", "more than 4096 bytes", max_bytes=4096)


@pytest.mark.parametrize(
    ("handle", "says"),
    [
        (endless_head, "not HTTP"),
        (answering(b"SSH-2.0-OpenSSH\r\n\r\n"), "not HTTP"),
        (answering(b""), "not HTTP"),
        (answering(reply()[:-10]), "breaks off"),
        (answering(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"), "not HTTP"),
        (answering(reply(b"", "404 Not Found")), "status 404"),
        (answering(reply(b"", "500 Oops")), "status 500"),
        (answering(reply(b"", "304 Not Modified")), "status 304"),
        (answering(reply(b"", "302 Found")), "status 302"),
        (answering(reply(PICTURE, "200 OK", "content-encoding: gzip")), "compressed"),
    ],
)
def test_bad_answers(handle: Handler, says: str) -> None:
    refused(URL, handle, FAILED, says)


def tls_server() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    return context


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(CERTIFICATE))


def test_https_proves_the_name_though_the_address_is_pinned() -> None:
    async def scenario(web: Web) -> None:
        assert await web.fetcher(tls=trusting()).fetch(f"https://pictures.test:{web.port}/") == PICTURE

    run(scenario, answering(reply()), tls_server())


@pytest.mark.parametrize(("host", "trust"), [("other.test", True), ("127.0.0.1", True), ("pictures.test", False)])
def test_https_hosts_that_cannot_prove_their_name(host: str, trust: bool) -> None:
    settings = {"tls": trusting()} if trust else {}
    url = f"https://{host}:{{port}}/"
    web = refused(url, answering(reply()), FAILED, "prove its name", served=tls_server(), **settings)
    assert web.requests == []


def test_closed_ports() -> None:
    async def scenario(web: Web) -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        with pytest.raises(FetchError, match="out of reach"):
            await web.fetcher(ports=frozenset({port})).fetch(f"http://pictures.test:{port}/")

    run(scenario, answering(reply()))


def test_a_second_address_is_tried() -> None:
    async def scenario(web: Web) -> None:
        web.names["two.test"] = [["127.0.0.9", "127.0.0.1"]]
        fetcher = web.fetcher(is_allowed=lambda address: address.is_loopback)
        assert await fetcher.fetch(f"http://two.test:{web.port}/") == PICTURE

    run(scenario, answering(reply()))


def serve_pictures(start_server: Callable[..., LiveServer], **names: list[str]) -> LiveServer:
    async def resolve(host: str, port: int) -> list[str]:
        return names[host.partition(".")[0]]

    def allowed(address: Address) -> bool:
        return address == OPEN

    fetcher = Fetcher(timeout_s=5.0, ports=frozenset(range(1, 65536)), resolve=resolve, is_allowed=allowed)
    return start_server(fetcher=fetcher)


@pytest.mark.parametrize("stream", [False, True])
def test_requests_with_urls(start_server: Callable[..., LiveServer], stream: bool) -> None:
    """Over HTTP: what was fetched is in the prompt, other content is refused, forbidden addresses are refused."""
    live = serve_pictures(start_server, pictures=["127.0.0.1"], inside=["10.0.0.1"])

    def ask(url: str) -> Any:
        part = {"type": "image_url", "image_url": {"url": url}}
        return post(live, chat_body([part], stream=stream))

    async def scenario(web: Web) -> None:
        good = await asyncio.to_thread(ask, f"http://pictures.test:{web.port}/a.png")
        assert good.status == 200
        assert (live.engine.requests[-1].prompt.images[0].pixels == pattern(64, 96)).all()
        wrong = await asyncio.to_thread(ask, f"http://pictures.test:{web.port}/page")
        assert (wrong.status, wrong.error["code"]) == (400, "invalid_image")
        assert "an HTML page" in wrong.error["message"]
        inside = await asyncio.to_thread(ask, f"http://inside.test:{web.port}/a.png")
        assert (inside.status, inside.error["code"]) == (400, FORBIDDEN)
        assert inside.error["param"] == "messages[0].content[0].image_url"
        assert "10.0.0.1" not in json.dumps(inside.json)

    async def handle(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(b"<!doctype html>" if b"/page" in head else PICTURE, "200 OK", "content-type: image/png"))

    assert len(run(scenario, handle).requests) == 2
