"""Pictures from the web, without letting a client reach what only the server can reach.

A URL is resolved once, every address it resolves to must be public, and the connection goes to one of exactly those
addresses: a name that resolves differently a moment later (DNS rebinding) changes nothing. Redirects are URLs like the
first. Time, bytes and hops are limited. Nothing is kept.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import quote, urljoin, urlsplit

import httpx2 as httpx

from engine.errors import RequestError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[list[str]]]

MAX_BYTES = 20 << 20
TIMEOUT_S = 15.0
PORTS = frozenset({80, 443})

_DEFAULT_PORTS = {"http": 80, "https": 443}
_MAX_REDIRECTS = 3
_MAX_URL = 8192
_AT_ONCE = 8
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# What a target may hold as it is; anything else is percent-encoded.
_TARGET_CHARACTERS = "/%:?#[]@!$&'()*+,;=~-._"

# Prefixes behind which another address hides, and that a gateway may translate: 6to4, NAT64 (RFC 6052, RFC 8215).
_TRANSLATED = tuple(ipaddress.ip_network(prefix) for prefix in ("2002::/16", "64:ff9b::/96", "64:ff9b:1::/48"))


class FetchError(RequestError):
    """A picture could not be had; the text says why. `code`: "image_url_forbidden", "image_fetch_failed" or
    "image_too_large"."""


def is_public(address: Address) -> bool:
    """Whether an address is one that anybody on the internet can reach."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address.scope_id is not None or address.is_site_local or any(address in net for net in _TRANSLATED):
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


@dataclass(frozen=True, slots=True)
class _Target:
    """A checked URL, taken apart. path: with the query."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """For the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


class Fetcher:
    """Gets pictures by http and https. Belongs to one event loop, which it never blocks.

    max_bytes: largest file; timeout_s: for one picture with all redirects; ports: that URLs may name. resolve,
    is_allowed and tls are for tests: how names become addresses, which of them may be reached, whom https trusts.
    """

    def __init__(
        self,
        *,
        max_bytes: int = MAX_BYTES,
        timeout_s: float = TIMEOUT_S,
        ports: frozenset[int] = PORTS,
        resolve: Resolve | None = None,
        is_allowed: Callable[[Address], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._ports = ports
        self._resolve = resolve or _Resolver()
        self._is_allowed = is_allowed
        self._tls = tls or ssl.create_default_context()
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def fetch(self, url: str) -> bytes:
        """The bytes at `url`. Raises FetchError."""
        try:
            async with asyncio.timeout(self._timeout_s), self._room:
                return await self._follow(url)
        except TimeoutError:
            raise _failed(f"did not arrive within {self._timeout_s:g} s") from None

    async def _follow(self, url: str) -> bytes:
        for _ in range(_MAX_REDIRECTS + 1):
            target = self._check(url)
            found = await self._get(target, await self._addresses(target))
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise _failed(f"is behind more than {_MAX_REDIRECTS} redirects")

    def _check(self, url: str) -> _Target:
        if len(url) > _MAX_URL or any(ord(char) <= 32 or char in "\\\x7f" for char in url):
            raise _forbidden("The URL is too long or holds blanks, backslashes or control characters.")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
            if ":" not in host:
                host = host.encode("idna").decode("ascii")
        except ValueError:
            raise _forbidden("The URL is not well formed.") from None
        if parts.scheme not in _DEFAULT_PORTS:
            raise _forbidden("The URL leads to something other than http or https.")
        if not host:
            raise _forbidden("The URL names no host.")
        if "@" in parts.netloc:
            raise _forbidden("The URL holds credentials.")
        port = _DEFAULT_PORTS[parts.scheme] if port is None else port
        if port not in self._ports:
            raise _forbidden(f"Port {port} is none of those that pictures are fetched from.")
        path = parts.path or "/"
        return _Target(
            parts.scheme, host, port, quote(f"{path}?{parts.query}" if parts.query else path, _TARGET_CHARACTERS)
        )

    async def _addresses(self, target: _Target) -> list[str]:
        try:
            found = await self._resolve(target.host, target.port)
        except (OSError, UnicodeError):
            raise _failed("has a host name that is not known") from None
        # One bad address among good ones is reason enough: it would be a matter of chance which is used.
        if not found or not all(self._is_allowed(ipaddress.ip_address(address)) for address in found):
            raise _forbidden("The URL leads to an address that is not public.")
        return found

    async def _get(self, target: _Target, addresses: list[str]) -> bytes | str:
        """The file, or where a redirect leads."""
        headers = {
            "host": target.authority,
            "accept": "image/png,image/jpeg,image/webp,image/gif,image/bmp",
            "accept-encoding": "identity",
            "user-agent": "fermion",
        }
        # Proxies of the environment would resolve the name again.
        async with httpx.AsyncClient(trust_env=False, verify=self._tls, timeout=None) as client:
            for position, address in enumerate(addresses):
                location = httpx.URL(
                    scheme=target.scheme, host=address, port=target.port, raw_path=target.path.encode("ascii")
                )
                names = {"sni_hostname": target.host}
                try:
                    async with client.stream("GET", location, headers=headers, extensions=names) as response:
                        return await self._read(response)
                except httpx.ConnectError as error:
                    if position == len(addresses) - 1:
                        is_tls = "[SSL" in str(error)
                        what = "comes from a host that cannot prove its name" if is_tls else "is out of reach"
                        raise _failed(what) from None
                except (httpx.HTTPError, httpx.InvalidURL):
                    raise _failed("comes with an answer that is not HTTP, or breaks off") from None
        raise AssertionError("there is at least one address")

    async def _read(self, response: httpx.Response) -> bytes | str:
        if response.status_code in _REDIRECTS and "location" in response.headers:
            return str(response.headers["location"])
        if response.status_code != 200:
            raise _failed(f"is answered with status {response.status_code}")
        if response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            raise _failed("comes compressed, which was not asked for")
        too_large = FetchError(f"The file behind the URL has more than {self._max_bytes} bytes.", code=_TOO_LARGE)
        declared = response.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise too_large
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > self._max_bytes:
                raise too_large
        return bytes(body)


_TOO_LARGE = "image_too_large"


def _forbidden(message: str) -> FetchError:
    return FetchError(message, code="image_url_forbidden")


def _failed(what: str) -> FetchError:
    return FetchError(f"The picture {what}.", code="image_fetch_failed")


class _Resolver:
    """The system's name service, in threads of its own: slow names must not take those that serve requests."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="fermion-resolve")

    async def __call__(self, host: str, port: int) -> list[str]:
        def look_up() -> list[str]:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return [str(address[0]) for _, _, _, _, address in found]

        return await asyncio.get_running_loop().run_in_executor(self._threads, look_up)
