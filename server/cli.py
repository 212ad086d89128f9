"""The `fermion` command. Owns flags, exit codes and help; every command imports what it needs when it runs.

Exit codes: 0 done; 1 something failed on the way; 2 the input or a setting is at fault.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.errors import ConfigError, FermionError, ModelFileError, RequestError

if TYPE_CHECKING:
    from engine.bench import Speed
    from server.config import Settings

app = typer.Typer(
    name="fermion",
    help="OpenAI-compatible server for the Qwen3.6 family on old and small machines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measure speed; make synthetic models to measure on.", no_args_is_help=True)
app.add_typer(bench, name="bench")
cache = typer.Typer(help="What the prefix cache has on disk.", no_args_is_help=True)
app.add_typer(cache, name="cache")

_ENGINE = "Engine"
_LIMITS = "Limits"
_ACCESS = "Access"
_GPU = "GPU"
_CACHE = "Prefix cache"
_PICTURES = "Pictures"

Model = Annotated[
    Path | None, typer.Argument(help="Checkpoint directory; the built-in demo model if not given.", show_default=False)
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="TOML file of settings (see docs/settings.md).", show_default=False),
]
SimdTier = Annotated[
    str | None,
    typer.Option(
        help="Kernel tier: scalar, ssse3, avx2, avx512, or auto, the best that runs here. (default: auto)",
        rich_help_panel=_ENGINE,
        show_default=False,
    ),
]
HugePages = Annotated[
    str | None,
    typer.Option(
        help="Huge pages under the weights: auto, what the file gives; on, copied if need be; off. (default: auto)",
        rich_help_panel=_ENGINE,
        show_default=False,
    ),
]
Numa = Annotated[
    str | None,
    typer.Option(
        help="Weights on machines with several NUMA nodes: interleave, or off. (default: interleave)",
        rich_help_panel=_ENGINE,
        show_default=False,
    ),
]
MemoryLock = Annotated[
    bool | None,
    typer.Option(
        "--memory-lock", help="The weights may not be paged out.", rich_help_panel=_ENGINE, show_default=False
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="Threads that compute, at most one per processor. (default: one per physical core)",
        rich_help_panel=_ENGINE,
        show_default=False,
    ),
]
Compute = Annotated[
    str | None,
    typer.Option(
        help="w4a8: integer kernels; f32: exact and slow, to verify against. (default: w4a8)",
        rich_help_panel=_ENGINE,
        show_default=False,
    ),
]
ContextLength = Annotated[
    int | None,
    typer.Option(
        help="Context window in tokens, at most the model's own. (default: that)",
        rich_help_panel=_ENGINE,
        show_default=False,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="Where prompts run: auto (a GPU if one is there), cpu or gpu. (default: auto)",
        rich_help_panel=_GPU,
        show_default=False,
    ),
]
GpuMemory = Annotated[
    str | None,
    typer.Option(
        help="Memory of the GPU to use at most, like 5G. (default: what is free)",
        rich_help_panel=_GPU,
        show_default=False,
    ),
]
Chart = Annotated[
    Path | None,
    typer.Option(help="Write a PNG: time by operation, or speed over several lengths.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="End with one line of JSON.")]


def main() -> None:
    """Entry point of the console command."""
    app()


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Turn fermion's errors into one line on stderr and an exit code."""
    try:
        yield
    except FermionError as error:
        for line in str(error).splitlines():
            typer.echo(f"error: {line}", err=True)
        is_input = isinstance(error, ConfigError | ModelFileError | RequestError)
        raise typer.Exit(2 if is_input else 1) from error
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; nobody is left to tell
        raise typer.Exit(1) from None


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"fermion {version('fermion')}")
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def serve(
    model: Model = None,
    config: ConfigFile = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. (default: 127.0.0.1)", show_default=False)
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port; 0 lets the system choose. (default: 8000)", show_default=False)
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(help="The model's name in the API. (default: the directory's name)", show_default=False),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error. (default: info)", show_default=False)
    ] = None,
    simd_tier: SimdTier = None,
    threads: Threads = None,
    compute: Compute = None,
    context_length: ContextLength = None,
    huge_pages: HugePages = None,
    numa: Numa = None,
    memory_lock: MemoryLock = None,
    device: Device = None,
    gpu_memory: GpuMemory = None,
    gpu_min_tokens: Annotated[
        int | None,
        typer.Option(
            help="Shorter segments of a prompt run on the CPU, 1 to 1024. (default: measured at start)",
            rich_help_panel=_GPU,
            show_default=False,
        ),
    ] = None,
    image_max_pixels: Annotated[
        int | None,
        typer.Option(
            help="Most pixels of a picture; larger ones are made smaller. 1024 pixels cost a token. (default: 1048576)",
            rich_help_panel=_PICTURES,
            show_default=False,
        ),
    ] = None,
    max_images: Annotated[
        int | None,
        typer.Option(
            help="Most pictures in a request; 0: none. (default: 16)", rich_help_panel=_PICTURES, show_default=False
        ),
    ] = None,
    image_fetch: Annotated[
        bool | None,
        typer.Option(
            "--image-fetch",
            help="Fetch pictures from public http and https URLs. (default: only data: URLs)",
            rich_help_panel=_PICTURES,
            show_default=False,
        ),
    ] = None,
    cache_ram: Annotated[
        str | None,
        typer.Option(
            help="Memory of the prefix cache, like 512M or 4G. (default: an eighth of the machine's, less if short)",
            rich_help_panel=_CACHE,
            show_default=False,
        ),
    ] = None,
    cache_disk: Annotated[
        str | None,
        typer.Option(
            help="Disk space of the prefix cache, like 20G; 0: none. (default: a tenth of the file system)",
            rich_help_panel=_CACHE,
            show_default=False,
        ),
    ] = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the prefix cache. (default: fermion/prefix in the user's cache directory)",
            rich_help_panel=_CACHE,
            show_default=False,
        ),
    ] = None,
    no_cache: Annotated[
        bool | None,
        typer.Option(
            "--no-cache",
            help="Compute every prompt from its first token.",
            rich_help_panel=_CACHE,
            show_default=False,
        ),
    ] = None,
    no_shadow: Annotated[
        bool | None,
        typer.Option(
            "--no-shadow",
            help="Leave the processors alone between requests instead of reading ahead.",
            rich_help_panel=_CACHE,
            show_default=False,
        ),
    ] = None,
    preserve_thinking: Annotated[
        bool | None,
        typer.Option(
            "--preserve-thinking",
            help="Show the model the thinking of earlier answers, also where clients leave it out.",
            rich_help_panel=_CACHE,
            show_default=False,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Key that clients must send. Better in FERMION_API_KEY or a file: other users see command lines.",
            rich_help_panel=_ACCESS,
            show_default=False,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File of accepted keys, one per line.", rich_help_panel=_ACCESS, show_default=False),
    ] = None,
    cors_origins: Annotated[
        str | None,
        typer.Option(
            help="Web origins whose pages may call, separated by commas; * is any. (default: none)",
            rich_help_panel=_ACCESS,
            show_default=False,
        ),
    ] = None,
    queue_size: Annotated[
        int | None,
        typer.Option(
            help="Requests that may wait; more are answered 429. (default: 64)",
            rich_help_panel=_LIMITS,
            show_default=False,
        ),
    ] = None,
    request_timeout_s: Annotated[
        float | None,
        typer.Option(
            help="Seconds of work that one request may cost; 0 is no limit. (default: 0)",
            rich_help_panel=_LIMITS,
            show_default=False,
        ),
    ] = None,
    keep_alive_s: Annotated[
        float | None,
        typer.Option(
            help="Longest silence on a waiting connection, seconds. (default: 5)",
            rich_help_panel=_LIMITS,
            show_default=False,
        ),
    ] = None,
    max_body_mb: Annotated[
        int | None,
        typer.Option(help="Largest request body, MiB. (default: 64)", rich_help_panel=_LIMITS, show_default=False),
    ] = None,
    shutdown_grace_s: Annotated[
        float | None,
        typer.Option(
            help="Seconds that running requests get when the server stops. (default: 30)",
            rich_help_panel=_LIMITS,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve a model at http://HOST:PORT/v1.

    Each flag is also an environment variable (FERMION_QUEUE_SIZE) and a key of the --config file (queue_size).

    Flags win over the environment, the environment over the file.
    """
    flags = {name: value for name, value in locals().items() if name != "config"}
    with _exit_codes():
        import logging
        import os

        from server.config import load_settings, unknown_variables

        settings = load_settings(flags, config)

        logging.basicConfig(
            level=settings.log_level.upper(), format="%(asctime)s %(levelname)-7s %(message)s", stream=sys.stderr
        )
        log = logging.getLogger("fermion")
        for sentence in unknown_variables(os.environ):
            log.warning("%s", sentence)

        from engine.inventory import take_inventory
        from server.app import serve as serve_until_stopped

        server_config, engine_config = settings.server_config(), settings.engine_config()
        # Looks at the whole checkpoint before anything listens: a bad one is an error of input, not of serving.
        headline = take_inventory(settings.model, engine_config).headline()
        log.info("Model %s (%s): %s", server_config.served_model_name, settings.model, headline)
        raise typer.Exit(serve_until_stopped(server_config, engine_config))


@app.command()
def chat(
    model: Model = None,
    url: Annotated[
        str | None,
        typer.Option(help="Talk to this server (http://host:8000/v1) instead of starting one.", show_default=False),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="FERMION_API_KEY", help="Key for --url.", show_default=False)
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="Which of the models of --url. (default: the first)", show_default=False)
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    think: Annotated[bool, typer.Option("--think/--no-think", help="Let the model reason before it answers.")] = True,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, max=2.0, help="Sampling temperature. (default: the model's)", show_default=False),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer in tokens. (default: no limit)", show_default=False)
    ] = None,
    simd_tier: SimdTier = None,
    threads: Threads = None,
    context_length: ContextLength = None,
) -> None:
    """Talk to a model in the terminal. Ctrl-C stops an answer, Ctrl-D ends the talk, /help lists commands."""
    with _exit_codes():
        from server import chat as terminal

        options = terminal.ChatOptions(
            system=system, think=think, temperature=temperature, max_tokens=max_tokens, model_name=model_name
        )
        if url is not None:
            if model is not None:
                raise ConfigError("MODEL and --url exclude each other: a server has its own model")
            terminal.run(url, api_key, options)
            return
        settings = _engine_settings(model, simd_tier, threads, None, context_length)
        with terminal.local_server(settings) as local_url:
            terminal.run(local_url, None, options)


# Commands whose flags are described where their code is, so that they are read only when one of them is used.
_CHECKPOINT_COMMANDS = {
    "convert": "Convert a published checkpoint or a GGUF file into a 4-bit checkpoint.",
    "calibrate": "Gather the statistics that make conversion and pruning better.",
    "prune": "Drop the experts of a checkpoint that matter least.",
    "evaluate": "Measure what conversion or pruning cost in accuracy.",
}


def _checkpoint_command(name: str) -> Callable[[typer.Context], None]:
    def command(context: typer.Context) -> None:
        from engine.convert import cli as commands

        foreign = typer.Typer(
            add_completion=False,
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"]},
        )
        foreign.command()(getattr(commands, name))
        foreign(args=context.args, prog_name=context.command_path)

    return command


for _name, _help in _CHECKPOINT_COMMANDS.items():
    app.command(
        _name,
        help=_help,
        rich_help_panel="Checkpoints",
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(_checkpoint_command(_name))


@app.command()
def info(
    model: Model = None,
    simd_tier: SimdTier = None,
    threads: Threads = None,
    compute: Compute = None,
    context_length: ContextLength = None,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint holds, what a token reads of it, and what it needs on this machine."""
    with _exit_codes():
        from engine.inventory import take_inventory

        settings = _engine_settings(model, simd_tier, threads, compute, context_length)
        inventory = take_inventory(settings.model, settings.engine_config())
        typer.echo(json.dumps(inventory.as_json()) if as_json else inventory.as_text())


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Look at what prompts need to run on a graphics card, and say how to mend what is missing.

    Exit code 1 if something is broken. docs/fermi.md explains each point.
    """
    from engine import doctor as examination

    findings = examination.examine()
    typer.echo("\n".join(finding.as_text() for finding in findings))
    if as_json:
        from dataclasses import asdict

        typer.echo(json.dumps([asdict(finding) for finding in findings]))
    if any(finding.verdict is examination.Verdict.BROKEN for finding in findings):
        typer.echo("Until this is mended prompts run on the CPU; without a card there is nothing to mend.", err=True)
        raise typer.Exit(1)


@bench.command()
def decode(
    model: Model = None,
    context: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens before the first measured one; may be given again. (default: 128)"),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode in a round.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the median counts.")] = 3,
    simd_tier: SimdTier = None,
    threads: Threads = None,
    compute: Compute = None,
    context_length: ContextLength = None,
    chart: Chart = None,
    as_json: AsJson = False,
) -> None:
    """Time per generated token, and the memory traffic it makes. With --json one line for each context, at the end."""
    with _exit_codes():
        from engine.bench import measure_decode

        settings = _engine_settings(model, simd_tier, threads, compute, context_length)
        config = settings.engine_config()
        _tell(
            [
                measure_decode(settings.model, config, context=length, tokens=tokens, rounds=rounds, report=_note)
                for length in context or [128]
            ],
            chart,
            as_json,
        )


@bench.command()
def prefill(
    model: Model = None,
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Length of the prompt; may be given again. (default: 512)")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the median counts.")] = 3,
    simd_tier: SimdTier = None,
    threads: Threads = None,
    compute: Compute = None,
    context_length: ContextLength = None,
    chart: Chart = None,
    as_json: AsJson = False,
) -> None:
    """Time from a prompt to its first answer token. With --json one line for each length, at the end."""
    with _exit_codes():
        from engine.bench import measure_prefill

        settings = _engine_settings(model, simd_tier, threads, compute, context_length)
        config = settings.engine_config()
        _tell(
            [
                measure_prefill(settings.model, config, tokens=length, rounds=rounds, report=_note)
                for length in tokens or [512]
            ],
            chart,
            as_json,
        )


def _tell(speeds: list[Speed], chart: Path | None, as_json: bool) -> None:
    for speed in speeds:
        typer.echo(speed.as_table())
        typer.echo(speed.as_text())
    if chart is not None:
        from engine.bench import draw

        draw(speeds, chart)
    if as_json:
        for speed in speeds:
            typer.echo(json.dumps(speed.as_json()))


@bench.command()
def vision(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="Checkpoint directory; random weights of the 35B model's tower (0.9 GB) if not given.",
            show_default=False,
        ),
    ] = None,
    width: Annotated[int, typer.Option(min=1, help="Width of the picture in pixels.")] = 1024,
    height: Annotated[int, typer.Option(min=1, help="Height of the picture in pixels.")] = 1024,
    rounds: Annotated[int, typer.Option(min=3, help="Rounds; the median counts.")] = 5,
    simd_tier: SimdTier = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Time of one picture in the vision tower, and how near that is to what the processors can do."""
    with _exit_codes():
        from engine.vision_bench import measure_vision

        config = _engine_settings(model, simd_tier, threads, None, None).engine_config()
        speed = measure_vision(model, config, width=width, height=height, rounds=rounds, report=_note)
        typer.echo(speed.as_text())
        if as_json:
            typer.echo(json.dumps(speed.as_json()))


@bench.command()
def peer(
    model: Model = None,
    against: Annotated[
        str, typer.Option("--peer", help="llama.cpp or ik_llama.cpp, whose Python package is needed.")
    ] = "llama.cpp",
    python: Annotated[
        str | None,
        typer.Option(help="Python that has the package. (default: this one)", show_default=False),
    ] = None,
    gguf: Annotated[
        Path | None,
        typer.Option(
            help="The peer's model; written if it is not there. (default: MODEL.gguf beside MODEL)", show_default=False
        ),
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens before the first decoded one.")] = 128,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode in a round.")] = 32,
    prefill_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians count.")] = 3,
    simd_tier: SimdTier = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Our speed beside another engine's, in turns, on a model of the same shape."""
    with _exit_codes():
        from engine.convert.cli import ProgressLine
        from engine.peer import compare

        settings = _engine_settings(model, simd_tier, threads, None, None)
        directory = settings.model
        comparison = compare(
            directory,
            settings.engine_config(),
            peer=against,
            python=python or sys.executable,
            gguf=gguf or directory.with_name(f"{directory.name}.gguf"),
            context=context,
            tokens=tokens,
            prefill_tokens=prefill_tokens,
            rounds=rounds,
            report=_note,
            progress=ProgressLine("writing"),
        )
        typer.echo(comparison.as_text())
        if as_json:
            typer.echo(json.dumps(comparison.as_json()))


@bench.command("make-synthetic")
def make_synthetic(
    directory: Annotated[Path, typer.Argument(help="Checkpoint directory to create.", show_default=False)],
    layers: Annotated[int, typer.Option(help="Decoder layers, a multiple of 4.")] = 40,
    experts: Annotated[int, typer.Option(help="Experts in each layer.")] = 128,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 0,
) -> None:
    """Write a checkpoint of the published shape with random weights (10.5 GB; less with fewer layers)."""
    with _exit_codes():
        import os

        from engine.convert.cli import ProgressLine
        from engine.convert.synthetic import Shape, make_synthetic
        from server.config import DEMO_CHECKPOINT

        make_synthetic(
            directory,
            Shape(layers, experts),
            seed=seed,
            threads=len(os.sched_getaffinity(0)),
            progress=ProgressLine("writing"),
            text_files=DEMO_CHECKPOINT,
        )
        typer.echo(f"wrote {directory}")


CacheDirectory = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir", help="Directory, if it is not the one that settings and environment name.", show_default=False
    ),
]


@cache.command("list")
def list_cache(cache_dir: CacheDirectory = None, as_json: AsJson = False) -> None:
    """Show what each model has on disk. A folder belongs to one checkpoint, processor tier and build."""
    with _exit_codes():
        from dataclasses import asdict
        from datetime import datetime

        from engine.reuse import list_folders

        place, folders = list_folders(_cache_directory(cache_dir))
        if as_json:
            typer.echo(json.dumps({"directory": str(place), "folders": [asdict(folder) for folder in folders]}))
            return
        typer.echo(f"{place}: {len(folders)} model{'' if len(folders) == 1 else 's'}")
        for folder in folders:
            used = datetime.fromtimestamp(folder.used_at).strftime("%Y-%m-%d %H:%M") if folder.used_at else "?"
            state = "in use" if folder.in_use else f"last used {used}"
            typer.echo(
                f"{folder.fingerprint[:16]}  {folder.snapshots:6} snapshots  {folder.nbytes / 2**20:10.1f} MiB  {state}"
            )


@cache.command("size")
def size_cache(cache_dir: CacheDirectory = None) -> None:
    """Print the bytes that the cache takes on disk, all models together."""
    with _exit_codes():
        from engine.reuse import list_folders

        typer.echo(sum(folder.nbytes for folder in list_folders(_cache_directory(cache_dir))[1]))


@cache.command("clear")
def clear_cache(cache_dir: CacheDirectory = None) -> None:
    """Delete what is on disk, except folders that a running server writes (use DELETE /v1/cache there)."""
    with _exit_codes():
        from engine.reuse import clear_folders

        freed, kept = clear_folders(_cache_directory(cache_dir))
        typer.echo(f"freed {freed / 2**20:.1f} MiB")
        if kept:
            raise ConfigError(f"in use and kept: {', '.join(name[:16] for name in kept)}")


def _cache_directory(given: Path | None) -> Path | None:
    from server.config import load_settings

    return load_settings({"cache_dir": given}).cache_dir


def _engine_settings(
    model: Path | None, simd_tier: str | None, threads: int | None, compute: str | None, context_length: int | None
) -> Settings:
    """Settings of the commands that use an engine without a server; environment and FERMION_CONFIG count too."""
    from server.config import load_settings

    flags = {
        "model": model,
        "simd_tier": simd_tier,
        "threads": threads,
        "compute": compute,
        "context_length": context_length,
    }
    return load_settings(flags)


def _note(text: str) -> None:
    """Progress of a measurement: on stderr, so that stdout holds only results."""
    typer.echo(text, err=True)
