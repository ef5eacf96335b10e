"""Small tasks that a run learns within minutes: data functions and their reward functions.

A data function, `function(index, seed, **args)`, returns row `index` (`data.source = "python"`, `data.path =
"streamrl.rollout.tasks:copy_digits"`). Equal arguments give the same row in every process.
"""

from __future__ import annotations

import hashlib
import random
import re
from typing import Any

from streamrl.rollout.reward.functions import Response
from streamrl.types import Prompt

_NUMBER = re.compile(r"-?\d+")
_DECIMAL = re.compile(r"-?\d+(?:\.\d+)?")


def copy_digits(index: int, seed: int, *, digits: int = 4) -> dict[str, Any]:
    """Return the prompt `1234=` with the answer `1234`; for the scratch model, like the next four functions."""
    text = _digits(f"copy/{seed}/{index}", digits)
    return {"prompt": f"{text}=", "answer": text}


def increment_digits(index: int, seed: int, *, digits: int = 4) -> dict[str, Any]:
    """Return the prompt `1239=` with the answer `2340`: each digit plus one, without carrying."""
    text = _digits(f"increment/{seed}/{index}", digits)
    return {"prompt": f"{text}=", "answer": "".join(str((int(digit) + 1) % 10) for digit in text)}


def sort_digits(index: int, seed: int, *, digits: int = 4) -> dict[str, Any]:
    """Return the prompt `4213=` with the answer `1234`."""
    text = _digits(f"sort/{seed}/{index}", digits)
    return {"prompt": f"{text}=", "answer": "".join(sorted(text))}


def modular_addition(index: int, seed: int, *, modulus: int = 10) -> dict[str, Any]:
    """Return the prompt `7 8=` with the answer `5`: the sum modulo `modulus`.

    All numbers have as many digits as `modulus - 1`. Raises `ValueError` if `modulus` is below 2.
    """
    if modulus < 2:
        raise ValueError(f"modulus = {modulus}: it has to be 2 or more")
    numbers = random.Random(f"modular addition/{seed}/{index}")
    x, y = numbers.randrange(modulus), numbers.randrange(modulus)
    width = len(str(modulus - 1))
    return {"prompt": f"{x:0{width}} {y:0{width}}=", "answer": f"{(x + y) % modulus:0{width}}"}


def repeat_digit(index: int, seed: int, *, most: int = 16) -> dict[str, Any]:
    """Return the prompt `7 03=` with the answer `777`: a digit and its number of repetitions, from 1 to `most`.

    The number is drawn uniformly. The length of the answer depends on the prompt alone, so a bias to short responses
    can be seen. Raises `ValueError` if `most` is below 1.
    """
    if most < 1:
        raise ValueError(f"most = {most}: it has to be 1 or more")
    chance = random.Random(f"repeat/{seed}/{index}")
    digit, count = chance.choice("0123456789"), chance.randint(1, most)
    return {"prompt": f"{digit} {count:0{len(str(most))}}=", "answer": digit * count}


def _digits(key: str, count: int) -> str:
    return "".join(random.Random(key).choices("0123456789", k=count))


def copy_reward(response: Response, prompt: Prompt) -> float:
    """Return the share of correct positions; the end of the response counts as the last position.

    For every task above, whose answers are strings of characters.
    """
    wanted, given = str(prompt.answer), response.text
    ended = response.finish_reason == "stop"
    right = sum(a == b for a, b in zip(wanted, given, strict=False)) + (ended and len(given) == len(wanted))
    return right / (max(len(wanted), len(given)) + 1)


def addition(index: int, seed: int, *, low: int = 1, high: int = 9) -> dict[str, Any]:
    """Return the prompt `What is x + y?` with the sum, for an instruction-tuned model."""
    numbers = random.Random(f"addition/{seed}/{index}")
    x, y = numbers.randint(low, high), numbers.randint(low, high)
    return {"prompt": f"What is {x} + {y}? Answer with only the number.", "answer": str(x + y)}


def addition_reward(response: Response, prompt: Prompt) -> float:
    """Return 1 if the last number is right, 0.1 if it is another number, 0 without a number or without an end.

    There is no reward in between: with 0.5 for a right number among other words, policies did not improve further.
    """
    if response.finish_reason != "stop":
        return 0.0
    numbers = _NUMBER.findall(response.text.replace(" - ", " minus "))
    if not numbers:
        return 0.0
    return 1.0 if numbers[-1] == str(prompt.answer) else 0.1


def last_number(response: Response, prompt: Prompt) -> float:
    """Return 1 if the last number of the response equals that of the answer, else 0. Commas between digits are ignored.

    An answer of GSM8K is a solution that ends with `#### 72`.
    """
    given, wanted = (_DECIMAL.findall(text.replace(",", "")) for text in (response.text, str(prompt.answer)))
    return float(bool(given and wanted) and float(given[-1]) == float(wanted[-1]))


def hash_reward(response: Response, prompt: Prompt) -> float:
    """Return a pseudo-random number in [0, 1) that depends on the prompt and its response alone.

    For measuring speed, not learning.
    """
    digest = hashlib.blake2b(f"{prompt.seq}/{response.text}/{response.output_tokens}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") / 2**32
