"""Times another engine in a process of its own: started by `engine.peer` with the Python that has that engine's
package, and by nobody else. Needs the standard library and that package alone; reads none of ours.

Arguments: module (llama_cpp or ik_llama_cpp), GGUF file, threads, context length. Then one request per line of standard
input, one answer per line of standard output, both JSON: {"kind": "prefill", "tokens": n} or {"kind": "decode",
"context": n, "tokens": m} is answered by {"seconds": [...]}, of the prompt or of each token. The first line written
says that the model is loaded. Token ids are random: speed does not depend on them.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from typing import Any, TextIO

BATCH = 512  # tokens that run at once, as in both engines' own tools


class Peer:
    """A loaded model and its context, through the package's functions of the C library."""

    def __init__(self, module: str, path: str, threads: int, context: int) -> None:
        self._api: Any = importlib.import_module(module)
        if module == "ik_llama_cpp":
            self._api = importlib.import_module("ik_llama_cpp._ctypes_api")
        api = self._api
        api.llama_backend_init()
        model_parameters = api.llama_model_default_params()
        parameters = api.llama_context_default_params()
        if module == "ik_llama_cpp":  # llama.cpp repacks on its own; the fork's best needs asking for
            model_parameters.repack_tensors = True
            model_parameters.use_mmap = False
            parameters.fused_moe_up_gate = True
            parameters.flash_attn = True
        parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = context, BATCH, BATCH
        parameters.n_threads = parameters.n_threads_batch = threads
        model = api.llama_model_load_from_file(path.encode(), model_parameters)
        if not model:
            raise SystemExit(f"{module} cannot load {path}")
        self._vocab = 200_000
        self._context = api.llama_init_from_model(model, parameters)
        if not self._context:
            raise SystemExit(f"{module} cannot make a context of {context} tokens")
        self._batch = api.llama_batch_init(BATCH, 0, 1)

    def prefill(self, tokens: int) -> list[float]:
        """Seconds of a prompt, from nothing."""
        self._clear()
        start = time.perf_counter()
        self._run(0, tokens)
        return [time.perf_counter() - start]

    def decode(self, context: int, tokens: int) -> list[float]:
        """Seconds of each token behind a prompt."""
        self._clear()
        self._run(0, context)
        seconds = []
        for position in range(context, context + tokens):
            start = time.perf_counter()
            self._run(position, 1)
            seconds.append(time.perf_counter() - start)
        return seconds

    def _run(self, first: int, count: int) -> None:
        """Feed random tokens; the logits of the last one are there when this returns."""
        api, batch = self._api, self._batch
        for begin in range(first, first + count, BATCH):
            size = min(BATCH, first + count - begin)
            batch.n_tokens = size
            for i in range(size):
                batch.token[i] = random.randrange(self._vocab)
                batch.pos[i] = begin + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = 0
                batch.logits[i] = begin + i == first + count - 1
            if api.llama_decode(self._context, batch) != 0:
                raise SystemExit(f"the engine failed at position {begin}")
        api.llama_get_logits_ith(self._context, batch.n_tokens - 1)  # waits for them

    def _clear(self) -> None:
        api = self._api
        if hasattr(api, "llama_kv_cache_clear"):
            api.llama_kv_cache_clear(self._context)
        else:
            api.llama_memory_clear(api.llama_get_memory(self._context), True)


def main(arguments: list[str], requests: TextIO, answers: TextIO) -> None:
    """Serve requests until there are no more."""
    module, path, threads, context = arguments
    random.seed(0)
    peer = Peer(module, path, int(threads), int(context))

    def answer(value: object) -> None:
        print(json.dumps(value), file=answers, flush=True)

    answer({"loaded": True})
    for line in requests:
        request = json.loads(line)
        if request["kind"] == "prefill":
            answer({"seconds": peer.prefill(request["tokens"])})
        else:
            answer({"seconds": peer.decode(request["context"], request["tokens"])})


if __name__ == "__main__":
    # The libraries write to standard output too: answers get a copy of it, everything else goes to standard error.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(sys.argv[1:], sys.stdin, channel)
