"""Workload: conversations about documents, as many clients of one assistant send them. Derived from a seed.

In a group of 64 requests all have the same instructions of 211 tokens, and each of 12 conversations asks about one of 2
documents of 531 and 559 tokens, in 4 turns. A turn's prompt has all former questions (19 to 37 tokens) and their answers (20
tokens, scripted: what the model answers does not change the prompts). 16 of the requests repeat a former prompt exactly, with
random numbers of their own. Every turn follows the one before it, every repeat its original; who is next is drawn. Half of
the requests are greedy. A group has 54,784 prompt tokens, all but 3,365 of them in a common head with a former prompt, and
1,024 answer tokens.
"""

from dataclasses import dataclass
from random import Random

CONVERSATIONS, TURNS, REPEATS_A_TURN = 12, 4, 4
GROUP = (CONVERSATIONS + REPEATS_A_TURN) * TURNS
QUESTION_OFFSETS = ((7, -3, 5, -9), (-7, 3, -5, 9))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the parts of prompts and of answers."""

    instructions: int = 211
    documents: tuple[int, ...] = (531, 559)
    question: int = 28
    scripted_answer: int = 20
    answers: tuple[int, int, int, int] = (8, 12, 16, 28)


SHORT = Lengths(instructions=37, documents=(50, 67), question=14, scripted_answer=9, answers=(2, 3, 4, 7))


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, how many tokens answer it, and how they are chosen."""

    number: int
    prompt: list[int]
    answer_tokens: int
    top_p: float
    seed: int


def make_requests(count: int, *, seed: int, vocabulary: int, lengths: Lengths) -> list[Request]:
    """Requests in the order in which they come."""
    random = Random(seed)  # noqa: S311 - a workload, no secret

    def tokens(count: int) -> list[int]:
        return random.choices(range(vocabulary), k=count)

    instructions = tokens(lengths.instructions)
    prompts: list[list[int]] = []
    while len(prompts) < count:
        documents = [tokens(length) for length in lengths.documents]
        coming: list[tuple[float, list[int]]] = []
        for conversation in range(CONVERSATIONS):
            prompt = instructions + documents[conversation % len(documents)]
            offsets = QUESTION_OFFSETS[conversation % 2]
            for turn in range(TURNS):
                prompt = prompt + tokens(lengths.question + offsets[turn])
                coming.append((turn + random.random(), prompt))
                if conversation // REPEATS_A_TURN == turn % (CONVERSATIONS // REPEATS_A_TURN):
                    coming.append((turn + 1 + random.random(), prompt))
                prompt = prompt + tokens(lengths.scripted_answer)
        prompts += [prompt for _, prompt in sorted(coming)]
    return [
        Request(number, prompt, lengths.answers[number % 4], top_p=0.9 * (number // 4 % 2), seed=seed + number)
        for number, prompt in enumerate(prompts[:count])
    ]
