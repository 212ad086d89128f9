"""The engine: a loaded model and the life of one request in it, from prompt to last token."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType

from engine.config import EngineConfig, ModelConfig
from engine.core import CacheControl, FinishReason, GenerationRequest, Progress, Prompt, TokenResult
from engine.errors import Cancelled, ContextLengthExceeded, KernelError, ModelFileError, OutOfMemory, RequestError
from engine.model import Model, PausedPass
from engine.placement import Placement, place
from engine.profiler import OperationCost
from engine.reuse import ModelCache, PromptRun, Reuse, cache_bytes, template_markers
from engine.sampling import Sampler
from engine.segments import CardRule, Stretch
from engine.tokenizer import Tokenizer
from engine.vision import PictureRows, Sight, Tower, VisionTower, check_pictures
from engine.weights import VisionWeights, Weights, load_weights

_GPU_DEVICE = Path("/dev/nvidiactl")
"""There while a driver for NVIDIA cards is loaded."""

_REPORT_INTERVAL_S = 0.1
"""Progress is told at most this often."""


class Engine:
    """Runs one generation at a time, in the thread that calls it.

    model: sizes of the loaded model; it reads pictures if model.vision is not None. placement: what was decided at
    load. vocab_size: ids that have a token; the model's rows above it are padding and are never drawn.
    """

    def __init__(
        self, model: Model, placement: Placement, vocab_size: int, reuse: Reuse, pictures: PictureRows | None
    ) -> None:
        """Use `load`. pictures None: the model does not see."""
        self._model = model
        self._reuse = reuse
        self._pictures = pictures
        self.model: ModelConfig = model.config
        self.placement = placement
        self.vocab_size = vocab_size

    @staticmethod
    def load(path: Path, config: EngineConfig) -> Engine:
        """Map and check the checkpoint directory `path` and start the threads.

        The calling thread becomes one of them: generate from it. Raises ModelFileError, ConfigError, OutOfMemory.
        """
        weights = load_weights(path, ModelConfig.load(path), config)
        tokenizer = Tokenizer.load(path)
        tokens = tokenizer.vocab_size
        if tokens > weights.config.vocab_size:
            raise ModelFileError(
                f"{path}: the tokenizer has ids up to {tokens - 1}, the model {weights.config.vocab_size} rows"
            )
        kept_bytes = cache_bytes(weights, config)
        placement = place(weights.config, config, weights.file.resident_bytes, kept_bytes)
        allowed = os.sched_getaffinity(0)
        model, rule, card = _load_model(weights, config, placement)
        pictures = None
        try:
            if weights.vision is not None:
                tower, seen = _load_tower(weights.vision, model, config)
                pictures, card = PictureRows(tower), card + seen
            # The model has pinned this thread; the cache's would inherit that and share the one processor.
            with _running_on(allowed):
                cache = ModelCache(weights, config, kept_bytes, model.cpu, card) if kept_bytes else None
        except BaseException:
            if pictures is not None:
                pictures.close()
            model.close()
            raise
        reuse = Reuse(template_markers(tokenizer), config.pass_tokens, cache, rule)
        return Engine(model, placement, tokens, reuse, pictures)

    @property
    def cache(self) -> CacheControl | None:
        """The prefix cache's administration, None if there is no cache."""
        return self._reuse.cache

    @property
    def picture_counters(self) -> Mapping[str, int]:
        """What became of the pictures in prompts, see `PictureRows.counters`; empty if the model does not see."""
        return {} if self._pictures is None else self._pictures.counters()

    @property
    def context_length(self) -> int:
        """Tokens of prompt and output together."""
        return self.placement.context_length

    @property
    def tier(self) -> str:
        """The instruction set in use."""
        return self._model.cpu.tier

    @property
    def scratch_bytes(self) -> int:
        """Memory held for intermediate results."""
        return self._model.cpu.scratch_bytes

    def start_profile(self) -> None:
        """Count what operations cost, from nothing."""
        self._model.cpu.start_profile()

    def operation_costs(self) -> tuple[OperationCost, ...]:
        """What operations cost since `start_profile`; see CpuEngine."""
        return self._model.cpu.operation_costs()

    def generate(
        self, request: GenerationRequest, cancelled: Callable[[], bool]
    ) -> Generator[Progress | TokenResult, None, None]:
        """Progress until the prompt is in the state, then one TokenResult per token.

        A token is computed only when the next item is asked for, so closing the generator stops the work. `cancelled`
        is asked once per layer of prefill and once per token; Cancelled is raised if it says yes. Raises RequestError
        (ContextLengthExceeded) before any work.
        """
        self._check(request)
        sampler = Sampler(
            request.sampling,
            request.prompt.token_ids,
            self.vocab_size,
            self._model.cpu.sample,
            constraint=request.constraint,
            top_logprobs=request.top_logprobs,
        )
        run = self._reuse.begin(request.prompt, self._model.new_state(), request.cache)
        generated: list[int] = []
        try:
            row = yield from self._prefill(run, request, cancelled)
            if request.max_tokens == 0:
                return
            logits = self._model.logits(row)
            for count in range(1, request.max_tokens + 1):
                token, logprobs = sampler.choose(logits[: self.vocab_size])
                reason = None
                if token in request.stop_token_ids:
                    reason = FinishReason.STOP
                elif count == request.max_tokens:
                    reason = FinishReason.LENGTH
                try:
                    yield TokenResult(token, reason, logprobs)
                except GeneratorExit:
                    run.ended(generated)
                    raise
                if reason is not None:
                    run.ended(generated)
                    return
                if cancelled():
                    raise Cancelled("the request was withdrawn")
                logits = self._model.decode(run.state, token)
                generated.append(token)
        finally:
            run.close()

    def close(self) -> None:
        """Write what the prefix cache has for the disk; free scratch memory and threads. Idempotent."""
        self._reuse.close()
        if self._pictures is not None:
            self._pictures.close()
        self._model.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prefill(
        self, run: PromptRun, request: GenerationRequest, cancelled: Callable[[], bool]
    ) -> Generator[Progress | TokenResult, None, int]:
        """Take what is missing of the prompt into the state, segment by segment; returns the row of its last token in
        the last pass."""
        total, start = len(request.prompt.token_ids), time.monotonic()
        yield Progress(total, run.resumed, run.resumed, 0.0, run.report)
        told = start
        row = 0
        sight = None
        if self._pictures is not None and request.prompt.images:
            sight = Sight(self._pictures, request.prompt, request.cache)
        for stretch in run.stretches:
            begin = run.state.position
            # Pictures' embeddings are not kept with a pass, nor is what a card has of it.
            can_pause = sight is None and not stretch.on_card
            paused = run.paused_pass(stretch.end) if can_pause else None
            layers, begun = 0 if paused is None else paused.layers, False
            with closing(self._take(run, request.prompt, sight, stretch, paused)) as steps:
                while True:
                    if cancelled():
                        if can_pause and layers == self.model.num_hidden_layers:
                            run.reached()
                        elif paused is not None and not begun:
                            run.pause(paused, stretch.end)  # the engine still holds another pass
                        elif can_pause and layers:
                            run.pause(PausedPass(layers, self._model.cpu.hidden), stretch.end)
                        run.cancelled()
                        raise Cancelled("the request was withdrawn")
                    try:
                        processed = begin + next(steps)
                        layers, begun = layers + 1, True
                    except StopIteration as end:
                        row = end.value
                        break
                    now = time.monotonic()
                    if processed == total:
                        continue
                    if now - told >= _REPORT_INTERVAL_S:
                        told = now
                        yield Progress(total, run.resumed, processed, now - start, run.report)
        elapsed = time.monotonic() - start
        run.measured(elapsed)
        yield Progress(total, run.resumed, total, elapsed, run.report)
        return row

    def _take(
        self, run: PromptRun, prompt: Prompt, sight: Sight | None, stretch: Stretch, paused: PausedPass | None
    ) -> Generator[int, None, int]:
        """As `Model.advance_steps`, for one stretch of the prompt; pictures in it are encoded first."""
        state, begin = run.state, run.state.position
        ids, card = prompt.token_ids[begin : stretch.end], stretch if stretch.on_card else None
        if sight is None:
            row = yield from self._model.advance_steps(state, ids, card=card, reached=run.reached, paused=paused)
            run.reached()
            return row

        def reached() -> None:
            state.rope_delta = sight.rope_delta(state.position)
            run.reached()

        rows = []
        with closing(sight.rows_steps(begin, stretch.end)) as looking:
            while True:
                try:
                    next(looking)
                except StopIteration as end:
                    rows = end.value
                    break
                yield 0
        positions = sight.positions[begin : stretch.end]
        row = yield from self._model.advance_steps(state, ids, positions, rows, card=card, reached=reached)
        reached()
        return row

    def _check(self, request: GenerationRequest) -> None:
        ids = request.prompt.token_ids
        check_pictures(request.prompt, self.model)
        if len(ids) == 0:
            raise RequestError("The prompt is empty.", param="messages")
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size:
            raise RequestError(f"The prompt holds a token outside 0..{self.vocab_size - 1}.", param="messages")
        if request.max_tokens < 0:
            raise RequestError(f"max_tokens is {request.max_tokens}, expected at least 0.", param="max_tokens")
        if len(ids) + request.max_tokens > self.context_length:
            raise ContextLengthExceeded(len(ids), request.max_tokens, self.context_length)


def _load_model(weights: Weights, config: EngineConfig, placement: Placement) -> tuple[Model, CardRule | None, str]:
    """The model, with a card if there is one to use: what it computes and what decides its bits. Nothing of cards is
    imported where there is none."""

    def on_cpu(weights: Weights) -> Model:
        return Model(
            weights, config, threads=placement.threads, cpus=placement.cpus, max_context=placement.context_length
        )

    if config.device == "cpu" or (config.device == "auto" and not _GPU_DEVICE.exists()):
        return on_cpu(weights), None, ""
    from engine import gpu

    insist, context = config.device == "gpu", placement.context_length
    opened = gpu.open_card(
        weights,
        kv_f32=config.compute == "f32",
        insist=insist,
        context_length=context,
        memory_limit=config.gpu_memory,
    )
    if opened is None:
        return on_cpu(weights), None, ""
    card, plan = opened
    try:
        weights, locked = gpu.lock_experts(weights, plan, card)
        model = on_cpu(weights)
    except BaseException:
        card.close()
        raise
    try:
        prefill = gpu.GpuPrefill(weights, model.cpu, card, plan, locked=locked)
        least = config.gpu_min_tokens or gpu.measure_min_tokens(
            prefill, lambda ids: model.prefill(model.new_state(), ids), model.new_state
        )
    except (KernelError, OutOfMemory) as error:
        card.close()
        try:
            gpu.decline(error, insist=insist)
        except BaseException:
            model.close()
            raise
        return model, None, ""
    except BaseException:
        card.close()
        model.close()
        raise
    model.use_gpu(prefill)
    rule = gpu.card_rule(plan, context, least)
    return model, rule, f"{prefill.identity}, {rule}"


def _load_tower(weights: VisionWeights, model: Model, config: EngineConfig) -> tuple[Tower, str]:
    """The vision tower, on the model's card if there is one with room; and what decides its bits there."""
    cpu = VisionTower(weights, model.cpu.tier, model.cpu.pool)
    if model.gpu is None:
        return cpu, ""
    from engine import gpu_vision

    try:
        return gpu_vision.open_tower(weights, cpu, model.gpu, config.gpu_memory)
    except BaseException:
        cpu.close()
        raise


@contextmanager
def _running_on(cpus: set[int]) -> Iterator[None]:
    """Let this thread, and those it starts, run on other processors for a while."""
    here = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, here)
