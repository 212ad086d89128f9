"""Settings: precedence, names, and what a wrong one is answered with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import CacheSettings
from engine.errors import ConfigError
from server.config import DEMO_CHECKPOINT, Settings, flag, load_settings, unknown_variables, variable


@pytest.fixture(autouse=True)
def _no_forced_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FERMION_SIMD_TIER", raising=False)


@pytest.fixture
def settings_file(tmp_path: Path) -> Path:
    path = tmp_path / "fermion.toml"
    path.write_text('port = 7001\nqueue_size = 3\nhost = "10.0.0.1"\n')
    return path


def test_flags_win_over_environment_over_file_over_defaults(
    settings_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FERMION_PORT", "7002")
    monkeypatch.setenv("FERMION_QUEUE_SIZE", "4")
    settings = load_settings({"port": 7003, "queue_size": None}, settings_file)
    assert (settings.port, settings.queue_size, settings.host, settings.keep_alive_s) == (7003, 4, "10.0.0.1", 5.0)


def test_the_file_can_be_named_by_the_environment(settings_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FERMION_CONFIG", str(settings_file))
    assert load_settings({}).port == 7001


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FERMION_API_KEY", "")
    assert load_settings({}).api_key is None


@pytest.mark.parametrize("name", [name for name in Settings.model_fields if name != "model"])
def test_every_name_is_an_environment_variable_and_a_key(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples: dict[str, Any] = {
        "log_level": "debug",
        "simd_tier": "scalar",
        "compute": "f32",
        "huge_pages": "on",
        "numa": "off",
        "memory_lock": True,
        "device": "gpu",
        "gpu_memory": "5G",
        "cors_origins": "http://a",
        "served_model_name": "m",
        "host": "::1",
        "api_key": "k",
        "api_key_file": "/keys",
        "cache_ram": "7M",
        "cache_disk": "1.5 GiB",
        "cache_dir": "/cache",
        "no_cache": True,
        "image_max_pixels": 4096,
        "image_fetch": True,
        "no_shadow": True,
        "preserve_thinking": True,
    }
    value = samples.get(name, 77 if name == "context_length" else 7)
    expected = {
        "cors_origins": ("http://a",),
        "api_key_file": Path("/keys"),
        "cache_ram": 7 << 20,
        "gpu_memory": 5 << 30,
        "cache_disk": 3 << 29,
        "cache_dir": Path("/cache"),
    }.get(name, value)
    monkeypatch.setenv(variable(name), str(value))
    assert getattr(load_settings({}), name) == expected
    monkeypatch.delenv(variable(name))
    path = tmp_path / "s.toml"
    path.write_text(f"{name} = {json.dumps(value)}\n")
    assert getattr(load_settings({}, path), name) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("quue_size = 3", "unknown key 'quue_size'. Did you mean queue_size?"),
        ("[server]\nport = 1", "unknown key 'server'."),
        ("port = ", "is not valid TOML"),
        ('port = "x"', "port 'x': input should be a valid integer"),
        ("port = 65536", "port 65536: input should be less than or equal to 65535"),
        ('simd_tier = "avx3"', "simd_tier 'avx3': input should be 'auto', 'scalar', 'ssse3', 'avx2' or 'avx512'"),
    ],
)
def test_a_wrong_file_is_named_with_its_flaw(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings({}, path)
    assert complaint in str(caught.value)
    assert "bad.toml" in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        load_settings({}, tmp_path / "none.toml")


def test_the_source_at_fault_is_named(settings_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FERMION_THREADS", "zero")
    with pytest.raises(ConfigError) as caught:
        load_settings({"queue_size": -1}, settings_file)
    lines = sorted(str(caught.value).splitlines())
    assert lines == [
        "--queue-size -1: input should be greater than or equal to 0",
        "FERMION_THREADS 'zero': input should be a valid integer, unable to parse string as an integer",
    ]


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('model = "models/big"\n')
    assert load_settings({}, path).model == tmp_path / "models" / "big"


def test_a_key_never_shows_in_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('api_key = ["secret-word"]\n')
    with pytest.raises(ConfigError) as caught:
        load_settings({}, path)
    assert "secret-word" not in str(caught.value)


def test_keys_come_from_setting_and_file(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# team\nalpha\n\n beta#1 \n")
    keys.chmod(0o600)
    assert load_settings({"api_key": "own", "api_key_file": keys}).server_config().api_keys == (
        "own",
        "alpha",
        "beta#1",
    )


@pytest.mark.parametrize("content", [None, "# nothing\n"])
def test_a_key_file_without_keys_is_an_error(content: str | None, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    if content is not None:
        keys.write_text(content)
    with pytest.raises(ConfigError, match="api_key_file"):
        load_settings({"api_key_file": keys}).server_config()


def test_origins_are_split_at_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FERMION_CORS_ORIGINS", "http://a, http://b,")
    assert load_settings({}).cors_origins == ("http://a", "http://b")


@pytest.mark.parametrize("origin", ["foo", "https://a/", "https://a/b", "localhost:3000", "https://*.a"])
def test_origins_that_no_browser_sends_are_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"^--cors-origins '.*': expected \* or origins like https://host:port"):
        load_settings({"cors_origins": f"http://b,{origin}"})
    assert load_settings({"cors_origins": "*, null,moz-extension://ab-cd"}).cors_origins[1:] == (
        "null",
        "moz-extension://ab-cd",
    )


def test_complaints_are_in_our_words() -> None:
    with pytest.raises(ConfigError, match=r"^--cache-ram 'lots': expected a size with its unit"):
        load_settings({"cache_ram": "lots"})


def test_the_served_name_follows_the_model(tmp_path: Path) -> None:
    assert load_settings({}).server_config().served_model_name == "fermion-demo"
    assert load_settings({}).model == DEMO_CHECKPOINT
    assert load_settings({"model": tmp_path / "big"}).server_config().served_model_name == "big"
    assert load_settings({"served_model_name": "x"}).server_config().served_model_name == "x"


def test_the_engine_gets_its_part() -> None:
    engine = load_settings({"simd_tier": "ssse3", "threads": 3, "context_length": 1024}).engine_config()
    assert (engine.simd_tier, engine.threads, engine.context_length) == ("ssse3", 3, 1024)


@pytest.mark.parametrize("value", ["7", "lots", "-1G", "1X", ""])
def test_sizes_have_units(value: str) -> None:
    with pytest.raises(ConfigError, match=r"--cache-ram.*expected a size with its unit, like 512M or 4G"):
        load_settings({"cache_ram": value})
    with pytest.raises(ConfigError, match="--cache-ram"):
        load_settings({"cache_ram": "0"})


def test_the_cache_gets_its_part(tmp_path: Path) -> None:
    given = {"cache_ram": "1G", "cache_disk": "0", "cache_dir": tmp_path}
    assert load_settings(given).engine_config().cache == CacheSettings(1 << 30, 0, tmp_path)
    assert load_settings({}).engine_config().cache == CacheSettings()
    assert load_settings({"no_cache": True}).engine_config().cache is None


def test_misspelt_variables_are_reported() -> None:
    (sentence,) = unknown_variables({"FERMION_SIMD_TEIR": "x", "FERMION_PORT": "1", "FERMION_CONFIG": "f", "HOME": "h"})
    assert sentence.endswith("FERMION_SIMD_TEIR is not a setting and has no effect. Did you mean FERMION_SIMD_TIER?")


def test_names_are_spelt_by_rule() -> None:
    assert (flag("queue_size"), variable("queue_size")) == ("--queue-size", "FERMION_QUEUE_SIZE")
