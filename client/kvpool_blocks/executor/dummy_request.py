"""Dummy requests: they warm up captured graphs and pad batches, and their KV is never reused.

Has the fields of TensorRT-LLM's LlmRequest that an executor reads. It computes nothing. One thread.
"""

import enum
from dataclasses import dataclass, field
from types import SimpleNamespace

# As in TensorRT-LLM: 0 gives NaN in some models.
DUMMY_TOKEN = 1


class RequestState(enum.Enum):
    """The states of a request that a cache distinguishes, by TensorRT-LLM's names."""

    CONTEXT_INIT = enum.auto()
    GENERATION_IN_PROGRESS = enum.auto()
    GENERATION_COMPLETE = enum.auto()


def state_of(request: object) -> str:
    """The name of a request's state."""
    return str(getattr(getattr(request, "state", None), "name", ""))


@dataclass(slots=True)
class DummyRequest:
    """A request of `tokens` dummy tokens, in its context phase, or generating the next one."""

    py_request_id: int
    tokens: list[int]
    state: RequestState = RequestState.CONTEXT_INIT
    py_draft_tokens: list[int] = field(default_factory=list)
    prompt_len: int = 0
    orig_prompt_len: int = 0
    context_current_position: int = 0
    context_chunk_size: int = 0
    max_new_tokens: int = 1
    py_rewind_len: int = 0
    is_dummy_request: bool = True
    is_first_context_chunk: bool = True
    sampling_config: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(beam_width=1))

    @classmethod
    def of(cls, request_id: int, tokens: int, *, is_generating: bool, draft_tokens: int) -> "DummyRequest":
        """A generating one has all tokens but the last as its prompt."""
        prompt = tokens - 1 if is_generating else tokens
        state = RequestState.GENERATION_IN_PROGRESS if is_generating else RequestState.CONTEXT_INIT
        drafts = [DUMMY_TOKEN] * draft_tokens if is_generating else []
        return cls(request_id, [DUMMY_TOKEN] * tokens, state, drafts, prompt, prompt, 0, prompt)

    def get_tokens(self, beam: int) -> list[int]:  # noqa: ARG002 - there is one beam
        """All tokens."""
        return list(self.tokens)

    def set_prepopulated_prompt_len(self, tokens: int, tokens_per_block: int) -> None:  # noqa: ARG002 - LlmRequest's
        """Leading tokens that need no computing."""
        self.context_current_position = tokens
        self.context_chunk_size = self.prompt_len - tokens
