"""An agent that is a program: it plays the game of examples/guess_number.py with what its environment tells it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.request
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--guesses", type=int, required=True)
    guesses = parser.parse_args().guesses
    task = json.loads(os.environ["STREAMRL_TASK"])
    messages: list[dict[str, str]] = task["messages"]
    for _ in range(guesses):
        said = ask(messages)
        if said == task["answer"]:
            sys.stdout.write("found it\n1.0\n")
            return
        hint = "!" if not said.isdecimal() else ">" if int(task["answer"]) > int(said) else "<"
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": hint}]
    sys.stdout.write("0.0\n")


def ask(messages: list[dict[str, str]]) -> str:
    """What the policy says."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        data=json.dumps({"model": os.environ["STREAMRL_MODEL"], "messages": messages}).encode(),
        headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        body: dict[str, Any] = json.loads(answer.read())
    return str(body["choices"][0]["message"]["content"])


if __name__ == "__main__":
    main()
