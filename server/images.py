"""Pictures of a request: from the parts of its messages to pixels. Owns where they may come from and how many.

Bytes come with the request (data: URLs), or from the web where the server allows that. Decoding runs in few threads of
its own, so that pictures neither stop the event loop nor take all processors from the engine.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote_to_bytes

from engine.errors import RequestError
from engine.image import Detail, Picture, PreprocessorConfig, load_picture
from server.errors import ApiError, invalid, unsupported
from server.fetch import Fetcher
from server.schema import ImagePart, Message

_DECODERS = 2
_BLANKS = b" \t\r\n"
# Decoded pictures that are kept, in bytes: each turn of a conversation brings all of its pictures again.
_RECENT_BYTES = 64 << 20

_BAD_URL = "invalid_image_url"


class PictureReader:
    """Reads the pictures of requests for one checkpoint.

    max_pixels: most pixels of one after resizing, never below the checkpoint's minimum; per_request: how many one
    request may hold; fetcher: None refuses whatever does not come with the request.
    """

    def __init__(
        self, config: PreprocessorConfig, *, max_pixels: int, per_request: int, fetcher: Fetcher | None = None
    ) -> None:
        self._config = config
        self._max_pixels = max_pixels
        self._per_request = per_request
        self._fetcher = fetcher
        self._recent = _Recent(_RECENT_BYTES)
        self._threads = ThreadPoolExecutor(_DECODERS, thread_name_prefix="fermion-picture")

    async def read(self, parts: Sequence[tuple[str, ImagePart]], tenant: bytes) -> tuple[Picture, ...]:
        """The pictures of `parts` (path and part), in order. The first bad one is a 400 that names its path.

        tenant: whose pictures, so that nobody learns from the time it takes what others have sent.
        """
        if len(parts) > self._per_request:
            path = parts[self._per_request][0]
            text = f"The request holds {len(parts)} pictures; at most {self._per_request} are read."
            raise invalid(text, path, "too_many_images")
        tasks = [asyncio.create_task(self._read(part, path, tenant)) for path, part in parts]
        try:
            return tuple([await task for task in tasks])
        finally:
            for task in tasks:
                task.cancel()
            # None may end unnoticed with an error of its own.
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, part: ImagePart, path: str, tenant: bytes) -> Picture:
        detail = Detail.LOW if part.detail == "low" else Detail.HIGH
        loop = asyncio.get_running_loop()
        try:
            scheme = part.url.partition(":")[0].lower()
            if scheme == "data":
                return await loop.run_in_executor(self._threads, self._decode_url, part.url, detail, tenant)
            if scheme not in ("http", "https"):
                raise RequestError("A picture must come as a data: URL with base64 content.", code=_BAD_URL)
            if self._fetcher is None:
                text = "This server does not fetch pictures: send the file itself, as a data: URL with base64 content."
                raise RequestError(text, code="image_fetch_disabled")
            data = await self._fetcher.fetch(part.url)
            return await loop.run_in_executor(self._threads, self._decode, data, detail, tenant)
        except RequestError as error:
            raise ApiError(400, str(error), code=error.code or "invalid_image", param=path) from None

    def _decode_url(self, url: str, detail: Detail, tenant: bytes) -> Picture:
        return self._decode(data_url_bytes(url), detail, tenant)

    def _decode(self, data: bytes, detail: Detail, tenant: bytes) -> Picture:
        hashed = hashlib.sha256(b"\0".join((tenant, detail.encode(), b"")))
        hashed.update(data)
        key = hashed.digest()
        known = self._recent.get(key)
        if known is None:
            known = load_picture(data, self._config, detail=detail, max_pixels=self._max_pixels)
            self._recent.put(key, known)
        return known


class _Recent:
    """The pictures that were decoded last, up to `capacity` bytes of pixels. Threads may share it."""

    def __init__(self, capacity: int) -> None:
        self._left = capacity
        self._pictures: OrderedDict[bytes, Picture] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> Picture | None:
        with self._lock:
            if key in self._pictures:
                self._pictures.move_to_end(key)
            return self._pictures.get(key)

    def put(self, key: bytes, picture: Picture) -> None:
        with self._lock:
            if key not in self._pictures:
                self._pictures[key] = picture
                self._left -= picture.pixels.nbytes
            while self._left < 0:
                self._left += self._pictures.popitem(last=False)[1].pixels.nbytes


def data_url_bytes(url: str) -> bytes:
    """The content of a data: URL (RFC 2397). Its media type is not looked at: labels lie. RequestError if it is not
    base64."""
    head, comma, payload = url.partition(",")
    if not comma or not head.lower().rstrip().endswith(";base64"):
        raise RequestError("A data: URL must hold base64 content: data:image/png;base64,...", code=_BAD_URL)
    try:
        encoded = payload.encode("ascii")
        if b"%" in encoded:
            encoded = unquote_to_bytes(encoded)
        return base64.b64decode(encoded.translate(None, _BLANKS), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        raise RequestError("The data: URL does not hold valid base64.", code="invalid_image") from None


def picture_parts(messages: Sequence[Message]) -> Iterator[tuple[str, ImagePart]]:
    """Path and part of every picture, in the order in which the model reads them. ApiError where none may stand."""
    for index, message in enumerate(messages):
        if not isinstance(message.content, list):
            continue
        for position, part in enumerate(message.content):
            if isinstance(part, ImagePart):
                path = part.path or f"messages[{index}].content[{position}].image_url"
                if message.role not in ("user", "tool"):
                    raise invalid(f"A message of role '{message.role}' cannot hold pictures.", path)
                yield path, part


def refuse_pictures(parts: Sequence[tuple[str, ImagePart]]) -> None:
    """ApiError if there is a picture, for a model that reads none."""
    for path, _ in parts:
        raise unsupported(path, "This model reads no pictures.")
