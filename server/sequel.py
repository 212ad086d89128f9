"""What a conversation's next prompt will begin with, so that it can be read while nothing else is to do.

At the next user message the template drops the thinking of earlier turns and writes calls in its own form: the state
behind the answer fits no more. But all of that prompt except the message itself is known as soon as the answer is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.core import GenerationRequest, Prompt
from engine.errors import FermionError
from server.chatwire import message_of
from server.job import Reply, Sequel
from server.prompt import ChatPrompt, PromptBuilder, prompt_scope
from server.schema import ChatCompletionRequest, Message

# What stands for the message to come; the prompt is cut before it.
_PLACEHOLDER = "."


class ChatSequel(Sequel):
    """What may follow the answer to one chat request.

    chat: the rendered request; generation: what the engine was asked for.
    """

    def __init__(
        self, prompts: PromptBuilder, request: ChatCompletionRequest, chat: ChatPrompt, generation: GenerationRequest
    ) -> None:
        self._prompts = prompts
        self._request = request
        self._chat = chat
        self._generation = generation

    @property
    def tenant(self) -> bytes:
        """See Sequel."""
        return self._generation.cache.scope

    def remember(self, reply: Reply) -> None:
        """See Sequel."""
        if reply.stop_string is None:
            scope = prompt_scope(self._request, self.tenant)
            self._prompts.remember(self._request, scope, self._chat, reply.token_ids, self._answer(reply))

    @property
    def may_be_read(self) -> bool:
        """See Sequel."""
        cache, request = self._generation.cache, self._request
        is_open = request.continue_final_message or request.add_generation_prompt is False
        return cache.read and cache.write and not is_open

    def continues(self, other: Sequel) -> bool:
        """See Sequel."""
        if not isinstance(other, ChatSequel) or other.tenant != self.tenant:
            return False
        earlier = other._request.messages
        return self._request.messages[: len(earlier)] == earlier

    def shadows(self, reply: Reply, context_length: int) -> Sequence[GenerationRequest]:
        """See Sequel."""
        cache = self._generation.cache
        request = self._request
        answer = self._answer(reply)
        if not (answer.content or answer.tool_calls):
            return ()
        # A client that has left out the thinking of earlier answers will do so again.
        earlier = [message for message in request.messages if message.role == "assistant"]
        if earlier and not any(message.reasoning_content or message.reasoning for message in earlier):
            answer = answer.model_copy(update={"reasoning_content": None})
        following = ["tool", "user"] if answer.tool_calls else ["user"]
        found: list[GenerationRequest] = []
        for role in following:
            prompt = self._following(answer, role)
            if prompt is not None and len(prompt.token_ids) < context_length:
                found.append(
                    GenerationRequest(
                        self._generation.request_id, prompt, max_tokens=0, cache=replace(cache, shadow=True)
                    )
                )
        return found

    def _answer(self, reply: Reply) -> Message:
        return Message.model_validate(message_of(reply.deltas))

    def _following(self, answer: Message, role: str) -> Prompt | None:
        """The prompt as far as a message of `role` behind the answer will find it. None: the template refuses."""
        call_id = answer.tool_calls[0].id if answer.tool_calls and role == "tool" else None
        message = Message.model_validate({"role": role, "content": _PLACEHOLDER, "tool_call_id": call_id})
        request = self._request.model_copy(
            update={"messages": [*self._request.messages, answer, message], "add_generation_prompt": False}
        )
        try:
            prompt = self._prompts.chat(request, pictures=self._chat.pictures, scope=self.tenant).prompt
        except FermionError:
            return None
        return self._prompts.opened(prompt)
