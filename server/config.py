"""Settings of a server process: flags, environment, TOML file and defaults, merged once and checked here.

Owns every name a user can set. The same name is a flag (`--queue-size`), an environment variable
(`FERMION_QUEUE_SIZE`) and a TOML key (`queue_size`). Flags win over the environment, the environment over the file,
the file over the defaults. Nothing else in the project reads the environment or a settings file.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from engine.config import CacheSettings, EngineConfig
from engine.errors import ConfigError

ENV_PREFIX = "FERMION_"
CONFIG_VARIABLE = "FERMION_CONFIG"
DEMO_CHECKPOINT = Path(__file__).parent.parent / "engine" / "demo" / "checkpoint"

SimdTier = Literal["auto", "scalar", "ssse3", "avx2", "avx512"]
Compute = Literal["w4a8", "f32"]
Device = Literal["auto", "cpu", "gpu"]
HugePages = Literal["auto", "on", "off"]
Numa = Literal["interleave", "off"]
LogLevel = Literal["debug", "info", "warning", "error"]


_UNITS = {"K": 10, "M": 20, "G": 30, "T": 40}


def _byte_count(value: Any) -> Any:
    """`512M`, `4GiB` or `0` as bytes. A bare number could mean anything, so it is refused."""
    if value is None:
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT])(?:i?B)?", str(value).strip(), re.IGNORECASE)
    if match is None:
        if str(value).strip() == "0":
            return 0
        raise ValueError("expected a size with its unit, like 512M or 4G")
    return int(float(match[1]) * 2 ** _UNITS[match[2].upper()])


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s,*]+")
ByteCount = Annotated[int, BeforeValidator(_byte_count)]


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the HTTP side needs. Sizes in bytes, times in seconds; meanings as in `Settings`."""

    model: Path
    served_model_name: str
    host: str
    port: int
    api_keys: tuple[str, ...]
    cors_origins: tuple[str, ...]
    queue_size: int
    request_timeout_s: float
    keep_alive_s: float
    max_body_bytes: int
    shutdown_grace_s: float
    image_max_pixels: int
    max_images: int
    image_fetch: bool
    shadow: bool
    preserve_thinking: bool


class Settings(BaseSettings):
    """Every setting with its type, limits and default; `fermion serve --help` describes each.

    Sizes and times carry their unit in the name. None: derived from the checkpoint or the machine.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, hide_input_in_errors=True
    )

    model: Path = DEMO_CHECKPOINT
    served_model_name: Annotated[str | None, Field(min_length=1)] = None

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    api_key: Annotated[str | None, Field(min_length=1)] = None
    api_key_file: Path | None = None
    cors_origins: Annotated[tuple[str, ...], NoDecode] = ()
    queue_size: Annotated[int, Field(ge=0, le=100_000)] = 64
    request_timeout_s: Annotated[float, Field(ge=0, le=604_800)] = 0.0
    keep_alive_s: Annotated[float, Field(gt=0, le=60)] = 5.0
    max_body_mb: Annotated[int, Field(ge=1, le=4096)] = 64
    shutdown_grace_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    log_level: LogLevel = "info"

    simd_tier: SimdTier = "auto"
    threads: Annotated[int | None, Field(ge=1, le=1024)] = None
    compute: Compute = "w4a8"
    context_length: Annotated[int | None, Field(ge=64)] = None
    huge_pages: HugePages = "auto"
    numa: Numa = "interleave"
    memory_lock: bool = False

    device: Device = "auto"
    gpu_memory: Annotated[ByteCount | None, Field(gt=0)] = None
    gpu_min_tokens: Annotated[int | None, Field(ge=1, le=1024)] = None

    image_max_pixels: Annotated[int, Field(ge=1024, le=16_777_216)] = 1_048_576
    max_images: Annotated[int, Field(ge=0, le=1000)] = 16
    image_fetch: bool = False

    cache_ram: Annotated[ByteCount | None, Field(gt=0)] = None
    cache_disk: ByteCount | None = None
    cache_dir: Path | None = None
    no_cache: bool = False
    no_shadow: bool = False
    preserve_thinking: bool = False

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _split_origins(cls, value: Any) -> Any:
        return tuple(filter(None, (part.strip() for part in value.split(",")))) if isinstance(value, str) else value

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        # Browsers send exactly this form; anything else would match none of them.
        for origin in origins:
            if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"expected * or origins like https://host:port, without a path; got {origin!r}")
        return origins

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """`load_settings` merges the sources itself, to be able to name the one at fault."""
        return (init_settings,)

    def server_config(self) -> ServerConfig:
        """The HTTP side's part. ConfigError if the key file cannot be read or is empty."""
        return ServerConfig(
            model=self.model,
            served_model_name=self.served_model_name or self.default_model_name(),
            host=self.host,
            port=self.port,
            api_keys=self._api_keys(),
            cors_origins=self.cors_origins,
            queue_size=self.queue_size,
            request_timeout_s=self.request_timeout_s,
            keep_alive_s=self.keep_alive_s,
            max_body_bytes=self.max_body_mb << 20,
            shutdown_grace_s=self.shutdown_grace_s,
            image_max_pixels=self.image_max_pixels,
            max_images=self.max_images,
            image_fetch=self.image_fetch,
            shadow=not self.no_shadow,
            preserve_thinking=self.preserve_thinking,
        )

    def engine_config(self) -> EngineConfig:
        """The engine's part."""
        return EngineConfig(
            simd_tier=self.simd_tier,
            threads=self.threads,
            compute=self.compute,
            context_length=self.context_length,
            device=self.device,
            gpu_memory=self.gpu_memory,
            gpu_min_tokens=self.gpu_min_tokens,
            huge_pages=self.huge_pages,
            numa=self.numa,
            memory_lock=self.memory_lock,
            cache=None if self.no_cache else CacheSettings(self.cache_ram, self.cache_disk, self.cache_dir),
        )

    def default_model_name(self) -> str:
        """`fermion-demo` for the embedded model, else the name of the checkpoint directory."""
        if self.model == DEMO_CHECKPOINT:
            return "fermion-demo"
        return self.model.resolve().name or "model"

    def _api_keys(self) -> tuple[str, ...]:
        keys = () if self.api_key is None else (self.api_key,)
        return keys if self.api_key_file is None else (*keys, *_read_keys(self.api_key_file))


def load_settings(flags: Mapping[str, Any], config_file: Path | None = None) -> Settings:
    """Merge flags (None: not given), environment, TOML file and defaults.

    config_file: `--config`; without it FERMION_CONFIG names the file, without that there is none. ConfigError names
    each setting at fault, where it was set, what was got and what is accepted.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    environment = EnvSettingsSource(Settings)()
    file = config_file or _file_from_environment()
    from_file = {} if file is None else read_settings_file(file)
    try:
        return Settings(**{**from_file, **environment, **given})
    except ValidationError as error:
        lines = [
            _complaint(str(detail["loc"][0]), detail["msg"], given, environment, from_file, file)
            for detail in error.errors(include_url=False, include_context=False)
        ]
        raise ConfigError("\n".join(lines)) from None


def read_settings_file(path: Path) -> dict[str, Any]:
    """The keys of a TOML settings file. ConfigError if it cannot be read, is not TOML or has an unknown key."""
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"settings file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"settings file {path} is not valid TOML: {error}") from None
    for key in values:
        if key not in Settings.model_fields:
            raise ConfigError(f"settings file {path}: unknown key {key!r}.{_suggestion(key)}")
    # A relative path in a file means relative to that file, wherever the server is started.
    for key in ("model", "api_key_file", "cache_dir"):
        if isinstance(values.get(key), str):
            values[key] = path.parent / Path(values[key]).expanduser()
    return values


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """One sentence per FERMION_ variable that means nothing here: most are misspelt. The caller logs them."""
    known = {variable(name) for name in Settings.model_fields} | {CONFIG_VARIABLE}
    return [
        f"environment variable {name} is not a setting and has no effect."
        f"{_suggestion(name.removeprefix(ENV_PREFIX).lower(), variable)}"
        for name in sorted(environment)
        if name.startswith(ENV_PREFIX) and name not in known
    ]


def flag(name: str) -> str:
    """`queue_size` -> `--queue-size`."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """`queue_size` -> `FERMION_QUEUE_SIZE`."""
    return ENV_PREFIX + name.upper()


def _file_from_environment() -> Path | None:
    value = os.environ.get(CONFIG_VARIABLE)
    return Path(value).expanduser() if value else None


def _complaint(
    name: str,
    message: str,
    flags: Mapping[str, Any],
    environment: Mapping[str, Any],
    from_file: Mapping[str, Any],
    file: Path | None,
) -> str:
    if name in flags:
        place, value = flag(name), flags[name]
    elif name in environment:
        place, value = variable(name), environment[name]
    else:
        place, value = f"{file}: {name}", from_file[name]
    shown = "" if "key" in name else f" {value!r}"
    message = message.removeprefix("Value error, ")
    return f"{place}{shown}: {message[:1].lower()}{message[1:]}"


def _suggestion(name: str, spell: Any = str) -> str:
    near = get_close_matches(name, Settings.model_fields, n=1)
    return f" Did you mean {spell(near[0])}?" if near else ""


def _read_keys(path: Path) -> tuple[str, ...]:
    try:
        text = path.read_text("utf-8")
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise ConfigError(f"api_key_file {path}: {error.strerror}") from None
    if mode & stat.S_IROTH:
        print(f"warning: {path} is readable by every user of this machine (chmod 600 it)", file=sys.stderr)
    lines = (line.strip() for line in text.splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"api_key_file {path} holds no key; without the setting no key is asked for")
    return keys
