"""Every error that fermion raises on purpose, as one tree.

    FermionError
    |-- ModelFileError            a checkpoint file is missing, truncated, foreign or inconsistent
    |-- ConfigError               a setting (flag, environment, TOML, config.json value) is not acceptable
    |-- RequestError              a request cannot be served as asked; `param` names the culprit
    |   `-- ContextLengthExceeded prompt + requested output do not fit the context window
    |-- OutOfMemory               host or device memory does not suffice for what was asked
    |-- KernelError               a native kernel or a device reported failure; the process is suspect
    `-- Cancelled                 the caller gave up; not a fault

Imports nothing of ours.
"""

from __future__ import annotations


class FermionError(Exception):
    """Base of all errors that fermion raises on purpose."""


class ModelFileError(FermionError):
    """A checkpoint file is missing, truncated, foreign or inconsistent. The text names file and tensor."""


class ConfigError(FermionError):
    """A setting is not acceptable. The text names the setting, the value and what is accepted."""


class RequestError(FermionError):
    """A request cannot be served as asked.

    `param` is the JSON path of the field at fault, if one is; `code` is a stable machine-readable word.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthExceeded(RequestError):
    """The prompt (plus the output asked for) does not fit the context window; sizes in tokens."""

    def __init__(self, prompt_tokens: int, requested_tokens: int, context_length: int) -> None:
        super().__init__(
            f"This model's maximum context length is {context_length} tokens, but the request needs "
            f"{prompt_tokens + requested_tokens} ({prompt_tokens} in the messages, {requested_tokens} in the "
            "completion). Shorten the messages or ask for fewer tokens.",
            param="messages",
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.requested_tokens = requested_tokens
        self.context_length = context_length


class OutOfMemory(FermionError):
    """Host or device memory does not suffice; the text gives bytes wanted and available."""


class KernelError(FermionError):
    """A native kernel or device reported failure. State touched by it must be discarded."""


class Cancelled(FermionError):
    """The caller withdrew the request; work stopped at the next layer or token."""
