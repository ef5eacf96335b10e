"""Check models of many families of transformers, and write the table in docs/models.md: python benchmarks/models.py

Each family is a small random model of its default configuration, which `streamrl check --model` compares with
transformers. Names as arguments check only these families and print their results.
"""

from __future__ import annotations

import re
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from streamrl.causal_models import random_model, small_config
from streamrl.launch.model_check import Result, check_model

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
FAMILIES = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "granite",
    "smollm3",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "deepseek_v3",
    "falcon_h1",
    "cohere2",
    "gpt2",
    "gpt_neox",
    "bloom",
    "llama4_text",
)
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
COLUMNS = ("packed rows", "log-probabilities", "gradients", "save and reload", "generation and update")
TABLE = re.compile(r"(?<=<!-- families -->\n).*(?=<!-- end -->)", re.DOTALL)


def save_family(folder: Path, family: str) -> Path:
    """Write a small random model of `family`, as such models are published, with a tokenizer of words."""
    model = random_model(small_config(CONFIG_MAPPING[family]()))
    model.save_pretrained(folder)
    vocabulary = {f"t{i}": i for i in range(model.config.vocab_size - 1)} | {"<unk>": model.config.vocab_size - 1}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, chat_template=TEMPLATE).save_pretrained(folder)
    return folder


def check_family(family: str) -> list[Result]:
    """Return the results of `streamrl check --model` for a model of `family`."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / family
        try:
            save_family(folder, family)
        except Exception as error:  # tolerance point: the table lists the families that fail
            return [Result("small copy", "fails", f"{type(error).__name__}: {error}")]
        return check_model(folder)


def row_of(family: str, results: Sequence[Result]) -> str:
    """Return the row of the table."""
    found = {result.part: result for result in results}
    cells = [found[part].verdict if part in found else "–" for part in COLUMNS]
    notes = [result for verdict in ("fails", "falls back") for result in results if result.verdict == verdict]
    why = notes[0].why.partition(": packed log-probabilities differ")[0] if notes else ""
    return f"| {' | '.join((family, *cells, ' '.join(why.replace('|', '/').split())[:200]))} |".replace("|  |", "| |")


def table_of(rows: Sequence[str]) -> str:
    """Return the table for the page: families with the same results share a row."""
    families: dict[str, list[str]] = {}
    for row in rows:
        family, _, results = row.removeprefix("| ").partition(" | ")
        families.setdefault(results, []).append(family)
    head = ("families", *COLUMNS, "why")
    lines = (f"| {', '.join(alike)} | {results}" for results, alike in families.items())
    return "\n".join((f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines)) + "\n"


def main() -> None:
    """Check the families, and write the table if all of them were checked."""
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows = []
    for family in sys.argv[1:] or FAMILIES:
        rows.append(row_of(family, check_family(family)))
        print(rows[-1], flush=True)
    if not sys.argv[1:]:
        PAGE.write_text(TABLE.sub(lambda _: table_of(rows), PAGE.read_text()))


if __name__ == "__main__":
    main()
