"""Conversations that the workers are asked, as token ids, in a file that the demonstration writes and every worker reads.

So that all workers have the same prompts by construction. Immutable; any thread.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from demo.conversation import QUESTIONS, SYSTEM, WordTokenizer, cut_prefix, read_documents

VOCABULARY_MOST = 4096


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prefix and the questions that follow one another; an answer goes between two questions."""

    title: str
    prefix: list[int]
    questions: list[list[int]]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a worker needs to know. `seed` gives the model its weights."""

    seed: int
    vocabulary: int
    chunk_tokens: int
    answer_tokens: int
    conversations: list[Conversation]

    def write(self, path: Path) -> None:
        """Write the plan as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Plan":
        """The plan that `write` wrote."""
        fields = json.loads(path.read_text())
        conversations = [Conversation(**entry) for entry in fields.pop("conversations")]
        return cls(**fields, conversations=conversations)


def make_plan(*, documents: int, prefix_tokens: int, chunk_tokens: int, answer_tokens: int, seed: int) -> Plan:
    """Conversations over `documents` texts of this machine."""
    texts = read_documents(documents)
    tokenizer = WordTokenizer([SYSTEM, *QUESTIONS, *(document.text for document in texts)], VOCABULARY_MOST)
    questions = [tokenizer.encode(question) for question in QUESTIONS]
    return Plan(
        seed=seed,
        vocabulary=tokenizer.size,
        chunk_tokens=chunk_tokens,
        answer_tokens=answer_tokens,
        conversations=[
            Conversation(document.title, cut_prefix(tokenizer, document, prefix_tokens), questions)
            for document in texts
        ],
    )
