"""A small tokenizer with a chat template that writes what Qwen3's writes: tools, reasoning, results."""

from __future__ import annotations

from typing import Any

from streamrl.rollout.chat import ChatTokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEXT = (
    "user assistant system tool What is 2 + 2 and 10 add the two numbers, please. I add them: name arguments sure so "
)

TEMPLATE = r"""
{%- set asked = namespace(last=messages|length - 1) -%}
{%- for m in messages -%}
  {%- if m.role == "user" -%}{%- set asked.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- set first = messages[0].content if messages[0].role == "system" else "" -%}
{%- if tools -%}
  {{- "<|im_start|>system\n" + (first + "\n\n" if first else "") -}}
  {{- "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n" -}}
  {{- "You are provided with function signatures within <tools></tools> XML tags:\n<tools>" -}}
  {%- for tool in tools -%}{{- "\n" + (tool | tojson) -}}{%- endfor -%}
  {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments " -}}
  {{- "within <tool_call></tool_call> XML tags:\n<tool_call>\n" -}}
  {{- '{"name": <function-name>, "arguments": <args-json-object>}' + "\n</tool_call><|im_end|>\n" -}}
{%- elif first -%}
  {{- "<|im_start|>system\n" + first + "<|im_end|>\n" -}}
{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == "user" or (m.role == "system" and not loop.first) -%}
    {{- "<|im_start|>" + m.role + "\n" + m.content + "<|im_end|>\n" -}}
  {%- elif m.role == "assistant" -%}
    {%- set thought = m.reasoning_content or "" -%}
    {{- "<|im_start|>assistant\n" -}}
    {%- if loop.index0 > asked.last and (loop.last or thought) -%}
      {{- "<think>\n" + thought.strip("\n") + "\n</think>\n\n" -}}
    {%- endif -%}
    {{- m.content -}}
    {%- for call in m.tool_calls or [] -%}
      {{- "\n" if m.content or not loop.first else "" -}}
      {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
      {{- (call.function.arguments | tojson) + "}\n</tool_call>" -}}
    {%- endfor -%}
    {{- "<|im_end|>\n" -}}
  {%- elif m.role == "tool" -%}
    {{- "" if not loop.first and messages[loop.index0 - 1].role == "tool" else "<|im_start|>user" -}}
    {{- "\n<tool_response>\n" + m.content + "\n</tool_response>" -}}
    {{- "" if not loop.last and messages[loop.index0 + 1].role == "tool" else "<|im_end|>\n" -}}
  {%- endif -%}
{%- endfor -%}
{{- "<|im_start|>assistant\n" if add_generation_prompt else "" -}}
"""


def make_qwen(template: str = TEMPLATE) -> ChatTokenizer:
    """Byte-level BPE with some merges, and the special tokens of Qwen3."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made: Any = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r"\n+| ?[a-zA-Z]+| ?[^\sa-zA-Z]+|\s+"), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([TEXT * 4], trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet))
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template
    )
    return ChatTokenizer(tokenizer)
